//! A member returns while some or all of its pages of checksums cannot be read on the others (rule T3):
//! scenes that each return what went wrong.

use super::page_faults::{
    BLOCK, CHUNK, Scene, copies, drain, first_hash_page, newest_place, shape, superblock, texts, unreadable,
    verify_or_error,
};
use calpe_core::format::{PAGE_BYTES, PageIndex, PageLayout};
use calpe_core::testing::{Random, SimArray, SimDisk, SimShape, SimWorld};
use calpe_core::units::{MemberIndex, Timestamp, VolumeOffset};
use calpe_core::volume::{AdminRequest, ClientRequest};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The harm to places of copies: on the returning member the place with the newest version, on the others one
/// place or both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    Rotten,
    /// The place is unreadable while the member is away and catches up.
    Unreadable,
    /// The place is as if its last write, acknowledged by the device, had never happened.
    WriteLost,
}

/// Which places of the others' copies are harmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OthersHarmed {
    Both,
    /// The older one; the newest version is there and whole.
    Older,
}

/// The disks and bytes of a page's copies.
type PlacesOfCopies = Vec<(u32, Range<u64>)>;

fn pages_on(sim: &SimArray, member: u32) -> Vec<(PageIndex, PlacesOfCopies)> {
    let any = &sim.disks[&0];
    let pages = PageLayout::new(superblock(any).geometry, true).pages();
    let all = (first_hash_page(any).0..pages).map(PageIndex).map(|page| (page, copies(any, page)));
    all.filter(|(_, copies)| copies.iter().any(|(disk, _)| *disk == member)).collect()
}

pub(crate) fn rot(sim: &mut SimArray, disk: u32, place: &Range<u64>) {
    let rot = vec![7; (place.end - place.start) as usize - 1000];
    sim.disks.get_mut(&disk).expect("a disk").poke(place.start + 1000, &rot);
}

fn leave_and_return(
    sim: &mut SimArray,
    index: MemberIndex,
    hidden: &[Range<u64>],
    millis: u64,
) -> Result<(), String> {
    sim.admin(AdminRequest::Offline { member: index }).map_err(|error| format!("{error:?}"))?;
    sim.sleep(500);
    let device = sim.reopen_disk(u32::from(index.0));
    if !hidden.is_empty() {
        let until = Timestamp(sim.now().0.saturating_add(millis.saturating_mul(1_000_000)));
        let disk = sim.disks.get_mut(&device.device.0).expect("a disk");
        disk.inject(unreadable(hidden.to_vec(), until));
    }
    sim.admin(AdminRequest::Online { member: index, device }).map_err(|error| format!("{error:?}"))?;
    drain(sim);
    Ok(())
}

/// The returning member's copies have a fault of their own, and their other place holds an older version,
/// from before half of the blocks were written. Blocks that only the newest version knows of read right or
/// end with an error. Returns how many errors are left in the end.
pub(crate) fn an_older_version_is_there(
    shape: SimShape,
    own: Harm,
    others: (Harm, OthersHarmed),
    seed: u64,
) -> Result<usize, String> {
    let parity = shape.parity;
    let world = SimWorld::new(shape, 32 << 20);
    let mut model = vec![0; world.shape.volume_bytes as usize];
    let mut sim = SimArray::create_in(&world, seed);
    let half = model.len() / 2 / BLOCK * BLOCK;
    for (at, fill) in [(0, half), (half, model.len() - half)] {
        Random::new(seed ^ 0xf111 ^ at as u64).fill(&mut model[at..at + fill]);
        sim.write(at as u64, &model[at..at + fill]).expect("written");
        sim.settle();
        drain(&mut sim);
    }
    sim.admin(AdminRequest::Stop).expect("it stops");
    let scene = Scene { world, disks: sim.disks.clone(), model };
    // Nothing is cached.
    let mut sim = scene.start(false);
    drain(&mut sim);
    let away = (seed % u64::from(parity + 2)) as u32;
    let mut hidden: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    for (page, copies) in pages_on(&sim, away) {
        for (disk, copy) in copies {
            let newest = newest_place(&sim.disks[&disk], page, &copy);
            let older =
                if newest.start == copy.start { newest.end..copy.end } else { copy.start..newest.start };
            let (harm, place) = match others {
                _ if disk == away => (own, newest),
                (harm, OthersHarmed::Both) => (harm, copy),
                (harm, OthersHarmed::Older) => (harm, older),
            };
            match harm {
                Harm::Rotten => rot(&mut sim, disk, &place),
                Harm::Unreadable => hidden.entry(disk).or_default().push(place),
                Harm::WriteLost => {
                    sim.disks.get_mut(&disk).expect("a disk").poke(place.start, &[0; PAGE_BYTES]);
                }
            }
        }
    }
    let own = hidden.remove(&away).unwrap_or_default();
    for (disk, within) in hidden {
        sim.disks.get_mut(&disk).expect("a disk").inject(unreadable(within, Timestamp(u64::MAX)));
    }
    leave_and_return(&mut sim, MemberIndex(away as u16), &own, u64::MAX)?;
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    drain(&mut sim);
    verify_or_error(&mut sim, &scene.model, "when all can be read again")
}

/// Only the returning member has whole copies of pages, and it cannot read them for a moment when it returns.
/// Returns how many blocks cannot be read when that is over.
pub(crate) fn own_copies_unreadable_for_a_moment(
    shape: SimShape,
    millis: u64,
    seed: u64,
) -> Result<usize, String> {
    let parity = shape.parity;
    let scene = Scene::stopped(shape, seed);
    let mut sim = scene.start(false);
    drain(&mut sim);
    let away = (seed % u64::from(parity + 2)) as u32;
    let mut own = Vec::new();
    for (disk, place) in pages_on(&sim, away).into_iter().flat_map(|(_, copies)| copies) {
        match disk {
            _ if disk == away => own.push(place),
            _ => rot(&mut sim, disk, &place),
        }
    }
    leave_and_return(&mut sim, MemberIndex(away as u16), &own, millis)?;
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    drain(&mut sim);
    verify_or_error(&mut sim, &scene.model, "when all can be read again")
}

/// The allowed contents of blocks, by the byte that fills them; None for the initial content.
struct May {
    of: Vec<BTreeSet<Option<u8>>>,
    last: u8,
}

impl May {
    /// Writes and discards blocks and whole stripes at random.
    fn change(&mut self, sim: &mut SimArray, random: &mut Random, stripe: usize, count: u64) {
        for _ in 0..count {
            let len = if random.below(2) == 0 { stripe } else { BLOCK };
            let at = random.below((self.of.len() * BLOCK / len) as u64) as usize * len;
            let is_trim = random.below(3) == 0;
            self.last = self.last.wrapping_add(1).max(1);
            let fill = if is_trim { 0 } else { self.last };
            let done = if is_trim {
                let offset = VolumeOffset(at as u64);
                let id = sim.submit(ClientRequest::Trim { offset, len: len as u64, fua: false });
                sim.wait(id).is_ok()
            } else {
                sim.write(at as u64, &vec![fill; len]).is_ok()
            };
            for block in &mut self.of[at / BLOCK..(at + len) / BLOCK] {
                if done && !is_trim {
                    block.clear();
                }
                // A discard may leave any earlier content.
                block.insert(Some(fill));
            }
            if random.below(4) == 0 {
                sim.settle();
            }
        }
    }
}

/// Clients write and discard, and the array restarts, while a member is away that has the only copies of some
/// pages. It returns, and may leave again before it is done. Nothing reads wrong. Returns how often pages
/// were taken from it.
pub(crate) fn what_it_missed_is_not_taken_from_it(
    data: u16,
    parity: u16,
    seed: u64,
) -> Result<usize, String> {
    let scene = Scene::stopped(shape(data, parity, 200), seed);
    let mut sim = scene.start(false);
    let mut random = Random::new(seed ^ 0x991);
    let stripe = usize::from(data) * CHUNK;
    let mut may = May { of: vec![BTreeSet::from([None]); scene.model.len() / BLOCK], last: 0 };
    may.change(&mut sim, &mut random, stripe, 6);
    sim.settle();
    let away = random.below(u64::from(data + parity)) as u16;
    let index = MemberIndex(away);
    let mut away_disk = sim.disk_of(away).expect("its disk");
    sim.admin(AdminRequest::Offline { member: index }).map_err(|error| format!("{error:?}"))?;
    for _ in 0..1 + random.below(3) {
        let count = random.below(8);
        may.change(&mut sim, &mut random, stripe, count);
        sim.disks.get_mut(&away_disk).expect("it").dead = true;
        let restarted = if random.below(3) == 0 {
            sim.settle();
            sim.stop_and_restart(false)
        } else {
            sim.kill_and_restart(false)
        };
        sim = restarted.map_err(|error| format!("start: {error}"))?;
        sim.settle();
        let other = (0..data + parity).find(|member| *member != away).expect("another");
        let any = sim.disks[&sim.disk_of(other).expect("its disk")].clone();
        let pages = PageLayout::new(superblock(&any).geometry, true).pages();
        for page in (first_hash_page(&any).0..pages).map(PageIndex) {
            if random.below(2) == 0 {
                continue;
            }
            for (member, place) in copies(&any, page) {
                if let Some(disk) = sim.disk_of(member as u16).filter(|_| member != u32::from(away)) {
                    rot(&mut sim, disk, &place);
                }
            }
        }
        let count = random.below(4);
        may.change(&mut sim, &mut random, stripe, count);
        let device = sim.reopen_disk(away_disk);
        away_disk = device.device.0;
        drop(sim.admin(AdminRequest::Online { member: index, device }));
        for _ in 0..random.below(300) {
            sim.step();
        }
        let count = random.below(4);
        may.change(&mut sim, &mut random, stripe, count);
        if random.below(2) == 0 {
            drain(&mut sim);
        }
        drop(sim.admin(AdminRequest::Offline { member: index }));
    }
    let device = sim.reopen_disk(away_disk);
    drop(sim.admin(AdminRequest::Online { member: index, device }));
    drain(&mut sim);
    let taken = texts(&sim).iter().filter(|text| text.contains("can be read again")).count();
    for (block, may) in may.of.iter().enumerate() {
        let Ok(read) = sim.read((block * BLOCK) as u64, BLOCK) else { continue };
        let is = |fill: &Option<u8>| match fill {
            None => read == scene.model[block * BLOCK..][..BLOCK],
            Some(fill) => read.iter().all(|byte| byte == fill),
        };
        if !may.iter().any(is) {
            return Err(format!("block {block} reads {}, may be {may:?}; {:?}", read[0], texts(&sim)));
        }
    }
    Ok(taken)
}
