//! Two checks of blocks: no block changes unless a client writes it (T2), and no block that clients cannot
//! read is still on the disks (T1).

use super::disk::{BLOCK, SimDisk};
use super::{Floor, Oracle, SimArray, superblocks};
use crate::array::geometry::Map;
use crate::codec::Codec;
use crate::units::{BlockHash, ColumnIndex, MemberIndex, SlotIndex, VolumeOffset};
use std::ops::Range;

/// The hashes of all blocks of a volume that were seen in the array's cache.
#[derive(Clone, Default)]
pub(super) struct Watch {
    hashes: Vec<Option<BlockHash>>,
}

impl Watch {
    /// Forgets all hashes: after a start the log decides which of the last writes took effect.
    pub(super) fn reset(&mut self) {
        self.hashes.clear();
    }

    /// Checks all blocks. Those within `written` may have changed: requests to write them were under way
    /// since the last call. `may_set_aside`: more members had trouble than the array survives, so blocks may
    /// have been set aside.
    ///
    /// # Errors
    /// With the first block that changed without being written.
    pub(super) fn look(
        &mut self,
        sim: &SimArray,
        blocks: usize,
        (written, may_set_aside): (&[Range<usize>], bool),
    ) -> Result<(), String> {
        self.hashes.resize(blocks, None);
        for (block, before) in self.hashes.iter_mut().enumerate() {
            let Some(now) = sim.cached_hash(block) else { continue };
            let Some(before) = before.replace(now).filter(|before| *before != now) else { continue };
            // A block that was lost or set aside may be found again.
            let is_found = now.is_stored() && (before == BlockHash::LOST || before.was_set_aside_from(now));
            let is_set_aside = may_set_aside && before.is_stored() && now == before.set_aside();
            if !is_found && !is_set_aside && !written.iter().any(|range| range.contains(&block)) {
                let name = |hash| match hash {
                    BlockHash::LOST => "lost".into(),
                    BlockHash::UNWRITTEN => "unwritten".into(),
                    hash if hash.is_set_aside() => "set aside".into(),
                    BlockHash(bytes) => format!("stored with hash {:02x?}", &bytes[..4]),
                };
                return Err(format!(
                    "T2: block {block} changed without a write: it was {} and is {}",
                    name(before),
                    name(now)
                ));
            }
        }
        Ok(())
    }
}

/// Where the disks still hold content of a block that clients may expect: in the block itself, or in k other
/// readable columns of a row that decode to it. Zeroes are not searched for: they lie everywhere.
pub(super) fn remains(sim: &SimArray, oracle: &Oracle, block: usize, floor: Floor) -> Option<String> {
    let status = sim.status();
    let (lane, within, _) = sim.lane_of(VolumeOffset(block as u64 * BLOCK));
    let superblock = sim.disks.values().find_map(|disk| superblocks::of_lane(disk, lane))?;
    let map = Map::new(&superblock.geometry);
    let codec = Codec::new(map.k, map.m).expect("the array has this geometry");
    let region = sim.data_regions().into_iter().nth(usize::from(lane.0))?;
    let disk_of = |member: usize| {
        let id = status.members[member].device?.0;
        sim.disks.get(&id).filter(|disk| !disk.dead)
    };
    let disks: Vec<Option<&SimDisk>> = (0..map.width()).map(disk_of).collect();
    let is_it =
        |bytes: &[u8]| bytes.iter().any(|byte| *byte != 0) && oracle.check(block, bytes, floor).is_ok();
    let stripe = within.0 as usize / map.stripe_bytes();
    let rows = map.chunk / BLOCK as usize;
    for (slot, row) in (0..map.slots).flat_map(|slot| (0..rows).map(move |row| (SlotIndex(slot), row))) {
        let at = region.start + slot.0 * map.chunk as u64 + (row as u64 * BLOCK);
        let mut columns: Vec<(usize, Vec<u8>)> = Vec::new();
        for (member, disk) in disks.iter().enumerate() {
            let column = usize::from(map.column_of(slot, MemberIndex(member as u16)).0);
            // Data columns that were never written count as zeroes, whatever their members hold.
            let neighbour = VolumeOffset((stripe * map.k * rows + column * rows + row) as u64 * BLOCK);
            let neighbour = (sim.cut().whole_of(lane, neighbour).0 / BLOCK) as usize;
            if column < map.k
                && neighbour < oracle.blocks()
                && sim.cached_hash(neighbour) == Some(BlockHash::UNWRITTEN)
            {
                columns.push((column, vec![0; BLOCK as usize]));
            } else if let Some(disk) = disk.filter(|disk| !disk.bad_blocks.contains(&(at / BLOCK))) {
                columns.push((column, disk.peek(at, BLOCK as usize)));
            }
        }
        if let Some((column, _)) = columns.iter().find(|(_, bytes)| is_it(bytes)) {
            let member = map.member_of(slot, ColumnIndex(*column as u16));
            return Some(format!("member {member} holds it in row {row} of slot {slot}"));
        }
        let wanted = within.0 as usize % map.stripe_bytes() / map.chunk;
        columns.retain(|(column, _)| *column != wanted);
        let mut decoded = vec![0; BLOCK as usize];
        let found = subsets(columns.len(), map.k).find(|chosen| {
            let present: Vec<(usize, &[u8])> =
                chosen.iter().map(|&at| (columns[at].0, &columns[at].1[..])).collect();
            let recovered = codec.recover(&present, &mut [(wanted, &mut decoded)]);
            recovered.is_ok() && is_it(&decoded)
        });
        if let Some(chosen) = found {
            let columns: Vec<usize> = chosen.iter().map(|&at| columns[at].0).collect();
            return Some(format!("columns {columns:?} of row {row} of slot {slot} give it"));
        }
    }
    None
}

/// Every choice of `count` numbers below `end`, ascending.
fn subsets(end: usize, count: usize) -> impl Iterator<Item = Vec<usize>> {
    let mut next: Option<Vec<usize>> = (count <= end).then(|| (0..count).collect());
    std::iter::from_fn(move || {
        let this = next.take()?;
        let mut following = this.clone();
        if let Some(at) = (0..count).rev().find(|&at| following[at] < end - count + at) {
            following[at] += 1;
            for after in at + 1..count {
                following[after] = following[after - 1] + 1;
            }
            next = Some(following);
        }
        Some(this)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ChecksumKind;
    use crate::testing::{Random, oracle::BLOCK_BYTES};
    use crate::testing::{Run, SimShape, Workload};

    #[test]
    fn all_subsets_come_once() {
        assert_eq!(subsets(4, 2).collect::<Vec<_>>(), [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        assert_eq!(subsets(3, 3).count(), 1);
        assert_eq!(subsets(2, 3).count(), 0);
        assert_eq!(subsets(11, 8).count(), 165);
    }

    fn written() -> (SimArray, Oracle) {
        let shape = SimShape::new(3, 2, 8192, 3).logged(ChecksumKind::Crc32c, 256 << 10);
        let sim = SimArray::create(shape, 5);
        let oracle = Oracle::new(shape.volume_bytes);
        let workload = Workload { faults: 0, admin: 0, zeroes: 0, ..Workload::MIXED };
        let mut load = Run::new(sim, oracle, workload, Random::new(5));
        for _ in 0..2000 {
            load.step().expect("nothing is wrong");
        }
        load.read_all().expect("nothing is wrong");
        load.sim.sleep(10_000);
        load.sim.settle();
        (load.sim, load.oracle)
    }

    #[test]
    fn a_block_is_found_where_others_give_it_and_only_there() {
        let (mut sim, oracle) = written();
        let block = (0..oracle.blocks())
            .find(|block| {
                sim.read((block * BLOCK_BYTES) as u64, BLOCK_BYTES).expect("it reads").iter().any(|b| *b != 0)
            })
            .expect("something was written");
        let found = |sim: &SimArray| remains(sim, &oracle, block, Floor::ALL_ANSWERED);
        let before = found(&sim).expect("it is there");
        assert!(before.contains("holds it"), "{before}");
        let region = sim.data_region();
        let all = region.start / BLOCK..region.end / BLOCK;
        for (gone, member) in (0..5).enumerate() {
            // One member after the other becomes unreadable.
            sim.disks.get_mut(&member).expect("a disk").bad_blocks.extend(all.clone());
            match gone + 1 {
                1 | 2 => assert!(found(&sim).is_some(), "{} are left", 4 - gone),
                _ => assert_eq!(found(&sim).filter(|found| found.contains("give it")), None),
            }
        }
        assert_eq!(found(&sim), None, "nothing is left");
    }

    #[test]
    fn a_change_of_a_block_without_a_write_is_seen_and_one_by_a_write_is_accepted() {
        let (mut sim, oracle) = written();
        let of_block = |block| Vec::from_iter([block].map(|block| block..block + 1));
        let mut watch = Watch::default();
        watch.look(&sim, oracle.blocks(), (&[], false)).expect("the first look");
        watch.look(&sim, oracle.blocks(), (&[], false)).expect("nothing has happened");
        sim.write(BLOCK, &[9; BLOCK as usize]).expect("a write");
        let other = watch
            .clone()
            .look(&sim, oracle.blocks(), (&of_block(5), false))
            .expect_err("block 1 has changed");
        assert!(other.contains("block 1 changed"), "{other}");
        watch.look(&sim, oracle.blocks(), (&of_block(1), false)).expect("it was written");
    }
}
