//! Scenes of trouble of the host, and of bad places of members, that should cost nothing.

use super::live;
use calpe_core::format::ChecksumKind;
use calpe_core::testing::{
    DiskRegion, Mutation, OpKinds, PassingFault, SimArray, SimDisk, SimShape, Trouble,
};
use calpe_core::volume::{AdminRequest, ArrayState, ClientReply};

/// Bytes of a chunk of [`filled`].
pub(crate) const CHUNK: usize = 16384;

/// A clean array of 400 stripes of 16 KiB chunks, full of bytes.
pub(crate) fn filled(data: u16, parity: u16) -> SimArray {
    let shape = SimShape::new(data, parity, CHUNK as u32, 400).logged(ChecksumKind::Blake3, 1 << 20);
    let mut sim = SimArray::create(shape, 1);
    sim.write(0, &vec![7; shape.volume_bytes as usize]).expect("written");
    sim.settle();
    sim
}

/// Reads everything, and lets time pass for the consequences. Returns the first error.
fn read_all(sim: &mut SimArray) -> Option<String> {
    let stripe = 2 * CHUNK;
    let first = (0..400).find_map(|at| {
        let read = sim.read((at * stripe) as u64, stripe);
        read.err().map(|error| format!("stripe {at}: {error}"))
    });
    live(sim, 20);
    first
}

/// The data regions of all members are full while the last writes to some stripes are only in the log, and a
/// scrub reaches these stripes before or after that. Clients can still read the stripes, and write them once
/// there is room. Returns what goes wrong, if anything.
pub(crate) fn scrub_without_room() -> Option<String> {
    for scrub_first in [false, true] {
        let mut sim = filled(2, 1);
        let places: Vec<u64> = (0..16).map(|at| at * 2 * CHUNK as u64).collect();
        let full = |sim: &mut SimArray| {
            for disk in sim.disks.values_mut() {
                let data = DiskRegion::Data.ranges(disk);
                disk.inject(PassingFault::new(Trouble::NoSpace).on(OpKinds::WRITES).within(data));
            }
        };
        if !scrub_first {
            full(&mut sim);
        }
        for &at in &places {
            sim.write(at, &[3; 4096]).expect("written");
        }
        sim.admin(AdminRequest::ScrubStart).expect("it starts");
        if scrub_first {
            full(&mut sim);
        }
        live(&mut sim, 3);
        let reads: Vec<(u64, u64)> = places.iter().map(|&at| (at, sim.submit_read(at, 4096))).collect();
        live(&mut sim, 1);
        for (at, id) in reads {
            match sim.poll(id) {
                Some(Ok(ClientReply::Data(read))) if read[..] == [3; 4096] => {}
                other => {
                    return Some(format!(
                        "scrub first {scrub_first}: a read at {at}: {:?}",
                        other.map(|end| end.is_ok())
                    ));
                }
            }
        }
        sim.disks.values_mut().for_each(SimDisk::clear_faults);
        live(&mut sim, 30);
        if sim.status().last_scrub.is_none() {
            return Some(format!("scrub first {scrub_first}: the scrub has not ended"));
        }
    }
    None
}

/// Runs the trouble whose cost the broken rule is meant to prevent. Returns what it cost, if anything.
pub(crate) fn cost_of_faults(mutation: Mutation) -> Option<String> {
    if mutation == Mutation::HeldThroughShortage {
        return scrub_without_room();
    }
    let parity = if mutation == Mutation::HealedErrorsCount { 2 } else { 1 };
    let mut sim = filled(2, parity);
    let region = sim.data_region();
    let blocks = |sim: &SimArray, member: u32| sim.disks[&member].written_blocks(region.clone());
    let broken = |disk: &mut SimDisk, blocks: &[u64]| {
        let ranges = blocks.iter().map(|block| block * 4096..(block + 1) * 4096);
        disk.inject(PassingFault::new(Trouble::Medium).on(OpKinds::READS | OpKinds::WRITES).within(ranges));
    };
    let (first, second) = (blocks(&sim, 0), blocks(&sim, 1));
    match mutation {
        Mutation::ShortageIsAFault => {
            let shortage = PassingFault::new(Trouble::Shortage).on(OpKinds::WRITES).times(2);
            sim.disks.values_mut().for_each(|disk| disk.inject(shortage.clone()));
            if let Err(error) = sim.write(0, &[1; 4096]) {
                return Some(format!("a write: {error}"));
            }
        }
        Mutation::HealedErrorsCount => {
            sim.disks.get_mut(&0).expect("a disk").bad_blocks = first.into_iter().collect();
        }
        _ => {
            broken(sim.disks.get_mut(&0).expect("a disk"), &first[..800]);
            broken(sim.disks.get_mut(&1).expect("a disk"), &second[1000..1040]);
        }
    }
    let error = read_all(&mut sim).or_else(|| read_all(&mut sim));
    let status = sim.status();
    error.or_else(|| (status.state != ArrayState::Online).then(|| format!("{:?}", status.state)))
}
