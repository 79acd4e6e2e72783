//! Members whose whole device is not what it was: rolled back to a copy of itself, or with a superblock that says what is not
//! true. Rule T6 of the crash-safety design: such a member is recognised, and costs the array that member and nothing else.

use calpe::format::{COUNT_END, ChecksumKind, MemberState};
use calpe::testing::{Claim, Random, SimArray, SimDisk, SimShape};
use calpe::units::MemberIndex;
use calpe::volume::{AdminRequest, ArrayState};

const BLOCK: usize = 4096;
const CHUNK: usize = 4 * BLOCK;

/// An array and what its volume must read as.
struct Checked {
    sim: SimArray,
    model: Vec<u8>,
}

impl Checked {
    /// A clean array of eight stripes full of random bytes.
    fn filled(data: u16, parity: u16, checksum: ChecksumKind, seed: u64) -> Checked {
        let shape = SimShape::new(data, parity, CHUNK as u32, 8).logged(checksum, 256 << 10);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create(shape, seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        Checked { sim, model }
    }

    #[track_caller]
    fn verify(&mut self) {
        let read = self.sim.read(0, self.model.len()).expect("every byte can be read");
        let differing = (0..read.len() / BLOCK)
            .filter(|block| read[block * BLOCK..][..BLOCK] != self.model[block * BLOCK..][..BLOCK])
            .count();
        assert_eq!(differing, 0, "blocks read what is not theirs: {:?}", self.sim.notices);
    }
}

fn disk(sim: &mut SimArray, id: u32) -> &mut SimDisk {
    sim.disks.get_mut(&id).expect("a disk")
}

fn states(sim: &SimArray) -> Vec<MemberState> {
    sim.status().members.iter().map(|m| m.state).collect()
}

#[test]
fn numbers_that_nobody_counted_to_cost_their_member_and_no_more() {
    for claim in [Claim::Sequence, Claim::EpochNumber, Claim::LogStartSequence, Claim::LogStartEpoch] {
        // The last is read and not started from; of the others the superblock is refused.
        for value in [u64::MAX, u64::MAX - 1, COUNT_END, COUNT_END - 1] {
            let mut array = Checked::filled(2, 2, ChecksumKind::Crc32c, 1);
            disk(&mut array.sim, 1).forge_superblock(claim, |_| value);
            array.sim = array.sim.kill_where(false, |_, _| false).expect("three of four members are enough");
            let missing = states(&array.sim)[1];
            assert_eq!(missing, MemberState::Missing, "{claim:?} {value}: {:?}", states(&array.sim));
            array.sim.settle();
            array.verify();
            // And at another start, from what that one has written.
            array.sim = array.sim.stop_and_restart(false).expect("enough members");
            array.verify();
        }
    }
}

#[test]
fn a_member_with_features_that_forbid_writing_is_left_out_and_not_taken_back() {
    let mut array = Checked::filled(2, 2, ChecksumKind::Crc32c, 2);
    disk(&mut array.sim, 3).forge_superblock(Claim::RoCompat, |_| 1 << 33);
    array.sim = array.sim.kill_where(false, |_, _| false).expect("three of four members are enough");
    array.sim.settle();
    assert_eq!(states(&array.sim)[3], MemberState::Missing);
    let device = array.sim.reopen_disk(3);
    let refused = array.sim.admin(AdminRequest::Online { member: MemberIndex(3), device }).unwrap_err();
    assert!(refused.0.contains("ro-compat bit 33") && refused.0.contains("newer Calpe"), "{refused}");
    array.verify();
    assert_eq!(array.sim.status().state, ArrayState::Degraded);
}

#[test]
fn a_member_that_comes_back_with_numbers_at_their_end_is_refused_by_name() {
    for claim in [Claim::Sequence, Claim::EpochNumber] {
        let mut array = Checked::filled(2, 1, ChecksumKind::Blake3, 3);
        array.sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("it can be spared");
        array.sim.settle();
        disk(&mut array.sim, 0).forge_superblock(claim, |_| COUNT_END - 2);
        let device = array.sim.reopen_disk(0);
        let refused = array.sim.admin(AdminRequest::Online { member: MemberIndex(0), device }).unwrap_err();
        assert!(refused.0.contains("member 0 cannot come back"), "{refused}");
        array.sim.settle();
        array.verify();
    }
}
