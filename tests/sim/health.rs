//! What a volume reports about its health and its known zeroes, over simulated members.

use calpe_core::format::ChecksumKind;
use calpe_core::testing::{SimArray, SimShape};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{
    AdminRequest, ArrayState, ClientError, ClientReply, ClientRequest, Health, ReadRun,
};

const BLOCK: usize = 4096;
const CHUNK: usize = 16384;
const K: usize = 3;
const STRIPES: usize = 12;
const STRIPE: u64 = (K * CHUNK) as u64;
const VOLUME: u64 = STRIPES as u64 * STRIPE;

fn create(shape: SimShape, seed: u64) -> SimArray {
    SimArray::create(shape, seed)
}

fn logged(checksum: ChecksumKind, seed: u64) -> SimArray {
    let shape = SimShape::new(K as u16, 1, CHUNK as u32, STRIPES as u64);
    create(shape.logged(checksum, 1 << 20), seed)
}

fn health(sim: &mut SimArray, offset: u64, len: u64) -> Vec<(u64, Health)> {
    let id = sim.submit(ClientRequest::Health { offset: VolumeOffset(offset), len });
    let ClientReply::Health(runs) = sim.wait(id).expect("answered") else { panic!("health") };
    assert_eq!(runs.iter().map(|run| run.0).sum::<u64>(), len, "a small volume is covered");
    runs
}

fn fail(sim: &mut SimArray, member: u16) {
    sim.admin(AdminRequest::Fail { member: MemberIndex(member) }).expect("failed");
}

#[test]
fn a_healthy_array_is_clean_a_degraded_one_degraded_and_a_failed_one_lost() {
    for mut sim in [logged(ChecksumKind::Blake3, 2), logged(ChecksumKind::None, 3)] {
        sim.write(0, &vec![5; VOLUME as usize]).expect("written");
        sim.settle();
        assert_eq!(health(&mut sim, 512, VOLUME - 512), [(VOLUME - 512, Health::Clean)]);
        fail(&mut sim, 2);
        assert_eq!(health(&mut sim, 0, VOLUME), [(VOLUME, Health::Degraded)]);
        sim.read(0, VOLUME as usize).expect("degraded is readable");
        let device = sim.add_blank_disk();
        sim.admin(AdminRequest::Replace { member: MemberIndex(2), device }).expect("admitted");
        sim.settle();
        assert_eq!(health(&mut sim, 0, VOLUME), [(VOLUME, Health::Clean)]);
        let disks: Vec<u32> = (0..2).map(|member| sim.disk_of(member).expect("in service")).collect();
        for disk in disks {
            sim.disks.get_mut(&disk).expect("it exists").dead = true;
        }
        let read = sim.read(0, VOLUME as usize);
        if sim.status().state == ArrayState::Failed {
            assert_eq!(read, Err(ClientError::Io));
            assert_eq!(health(&mut sim, 0, VOLUME), [(VOLUME, Health::Lost)]);
        } else {
            panic!("two of four gone: {:?}", sim.status());
        }
    }
}

#[test]
fn a_rebuild_makes_the_volume_clean_from_its_beginning_on() {
    // Whole stripes of a new array go to the slots of their numbers, so that the order of slots is that of
    // the volume.
    let mut sim = logged(ChecksumKind::None, 4);
    sim.write(0, &vec![5; VOLUME as usize]).expect("written");
    fail(&mut sim, 0);
    let device = sim.add_blank_disk();
    sim.admin(AdminRequest::Replace { member: MemberIndex(0), device }).expect("admitted");
    let mut shapes = Vec::new();
    while sim.step() {
        let runs = health(&mut sim, 0, VOLUME);
        let order: Vec<Health> = runs.iter().map(|run| run.1).collect();
        assert!(
            matches!(order[..], [Health::Degraded] | [Health::Clean, Health::Degraded] | [Health::Clean]),
            "{runs:?}"
        );
        shapes.push(order.len());
    }
    sim.settle();
    assert!(shapes.contains(&1), "it was seen");
    assert_eq!(health(&mut sim, 0, VOLUME), [(VOLUME, Health::Clean)]);
}

/// Overwrites one block on the disk of a member, behind the array's back.
fn spoil(sim: &mut SimArray, member: u16, slot: u64, row: u64) {
    let at = sim.data_region().start + slot * CHUNK as u64 + row * BLOCK as u64;
    let disk = sim.disk_of(member).expect("in service");
    sim.disks.get_mut(&disk).expect("it exists").poke(at, &[0xd5; BLOCK]);
}

#[test]
fn blocks_beyond_repair_are_lost_once_found_their_rows_degraded_and_a_write_heals_them() {
    let mut sim = logged(ChecksumKind::Blake3, 5);
    sim.write(0, &vec![5; VOLUME as usize]).expect("written");
    sim.settle();
    // Two of the four blocks of one row: more than one parity can restore.
    spoil(&mut sim, 0, 2, 1);
    spoil(&mut sim, 1, 2, 1);
    assert_eq!(health(&mut sim, 0, VOLUME), [(VOLUME, Health::Clean)], "no read has met it");
    sim.admin(AdminRequest::ScrubStart).expect("a scrub starts");
    sim.settle();
    let runs = health(&mut sim, 0, VOLUME);
    let of = |wanted: Health| runs.iter().filter(|run| run.1 == wanted).map(|run| run.0).sum::<u64>();
    let listed: u64 = sim.status().lost.iter().map(|(_, len)| *len).sum();
    assert!(listed > 0);
    assert_eq!(of(Health::Lost), listed, "{runs:?}");
    assert_eq!(of(Health::Lost) + of(Health::Degraded), (K * BLOCK) as u64, "the whole row: {runs:?}");
    // The report is true: ranges that it calls lost cannot be read, all others can.
    let mut at = 0;
    for (len, health) in runs {
        let read = sim.read(at, len as usize);
        assert_eq!(read.is_err(), health == Health::Lost, "{len} bytes at {at}: {health:?}");
        at += len;
    }
    sim.write(0, &vec![6; VOLUME as usize]).expect("written");
    assert_eq!(health(&mut sim, 0, VOLUME), [(VOLUME, Health::Clean)]);
}

/// The result of a sparse read: runs as (bytes, whether they are data), and the bytes.
fn read_sparse(sim: &mut SimArray, offset: u64, len: usize) -> (Vec<(u64, bool)>, Vec<u8>) {
    // The buffer is full of rubbish, as buffers are.
    let mut buf = calpe_core::block_io::Pool::new(1 << 20).expect("address space").alloc(len);
    buf.fill(0xee);
    let id = sim.submit(ClientRequest::ReadSparse { offset: VolumeOffset(offset), buf });
    match sim.wait(id).expect("read") {
        ClientReply::Data(buf) => (vec![(len as u64, true)], buf.to_vec()),
        ClientReply::Sparse(runs) => {
            let mut bytes = Vec::new();
            let shape = runs.iter().map(|run| match run {
                ReadRun::Zeroes(len) => {
                    bytes.resize(bytes.len() + *len as usize, 0);
                    (*len, false)
                }
                ReadRun::Data(buf) => {
                    bytes.extend_from_slice(buf);
                    (buf.len() as u64, true)
                }
            });
            (shape.collect(), bytes)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn arrays_know_their_zeroes_by_stripe_and_with_checksums_by_block() {
    for checksum in [ChecksumKind::None, ChecksumKind::Blake3] {
        let mut sim = logged(checksum, 6);
        assert_eq!(read_sparse(&mut sim, 0, VOLUME as usize).0, [(VOLUME, false)], "nothing was written");
        assert_eq!(read_sparse(&mut sim, 512, 1024).0, [(1024, false)]);
        // One block in the middle of the fourth stripe.
        let at = 3 * STRIPE + CHUNK as u64 + BLOCK as u64;
        sim.write(at, &[7; BLOCK]).expect("written");
        let mut model = vec![0; VOLUME as usize];
        model[at as usize..at as usize + BLOCK].fill(7);
        for _ in 0..2 {
            let (shape, bytes) = read_sparse(&mut sim, 0, VOLUME as usize);
            assert!(bytes == model, "{checksum:?} {shape:?}");
            let want = match checksum {
                ChecksumKind::None => vec![(3 * STRIPE, false), (STRIPE, true), (VOLUME - 4 * STRIPE, false)],
                _ => vec![(at, false), (BLOCK as u64, true), (VOLUME - at - BLOCK as u64, false)],
            };
            assert_eq!(shape, want, "{checksum:?}");
            // A read that is not aligned to blocks, and one that is not sparse, get the same bytes.
            let start = at as usize - 512;
            assert!(read_sparse(&mut sim, start as u64, 8192).1 == model[start..start + 8192]);
            assert!(sim.read(0, VOLUME as usize).expect("read") == model);
            // The second time, a member is missing.
            sim.settle();
            if sim.status().state == ArrayState::Online {
                fail(&mut sim, 1);
            }
        }
        sim.write(0, &vec![9; VOLUME as usize]).expect("written");
        assert_eq!(read_sparse(&mut sim, 0, VOLUME as usize).0, [(VOLUME, true)]);
    }
}

#[test]
fn fast_zeroes_are_whole_stripes() {
    let ask = |sim: &mut SimArray, offset: u64, len: u64, may_unmap: bool| {
        let offset = VolumeOffset(offset);
        let id =
            sim.submit(ClientRequest::WriteZeroes { offset, len, may_unmap, fast_only: true, fua: false });
        sim.wait(id).map(|_| ())
    };
    let mut sim = logged(ChecksumKind::Blake3, 8);
    sim.write(0, &vec![5; VOLUME as usize]).expect("written");
    assert_eq!(ask(&mut sim, STRIPE, 2 * STRIPE, true), Ok(()));
    let refused = Err(ClientError::NotSupported);
    assert_eq!(ask(&mut sim, 4 * STRIPE, STRIPE, false), refused, "space is to stay allocated");
    assert_eq!(ask(&mut sim, 4 * STRIPE, 512, true), refused);
    assert_eq!(ask(&mut sim, 4 * STRIPE + 512, STRIPE, true), refused);
    let bytes = sim.read(0, VOLUME as usize).expect("read");
    let zeroed = STRIPE as usize..3 * STRIPE as usize;
    assert!(bytes.iter().enumerate().all(|(at, &byte)| (byte == 0) == zeroed.contains(&at)));
}
