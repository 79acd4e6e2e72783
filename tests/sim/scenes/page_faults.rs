//! Metadata pages and the end of the log that cannot be read for a moment (rules T3, R5 and T8): scenes that
//! each return what went wrong. Shared by `tests/sim/page_faults.rs`, where nothing may go wrong, and
//! `tests/sim/mutations.rs`, where something must with a rule broken.

use super::live;
use calpe_core::block_io::IoOp;
use calpe_core::format::{COPY_BYTES, all_copy_offsets};
use calpe_core::format::{
    ChecksumKind, LogKey, MemberState, PAGE_BYTES, Page, PageIndex, PageLayout, RegionKind, Superblock,
};
use calpe_core::testing::{
    DiskRegion, Fate, OpKinds, PassingFault, Random, SimArray, SimDisk, SimShape, SimWorld, Trouble,
};
use calpe_core::units::{MemberIndex, Timestamp};
use calpe_core::volume::{AdminRequest, ClientRequest, LogState};
use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) const BLOCK: usize = 4096;
pub(crate) const CHUNK: usize = 16384;
const SECOND: u64 = 1_000_000_000;

type Disks = BTreeMap<u32, SimDisk>;

/// An array that was stopped or killed, and the expected content of its volume.
pub(crate) struct Scene {
    pub world: SimWorld,
    pub disks: Disks,
    pub model: Vec<u8>,
}

pub(crate) fn shape(data: u16, parity: u16, stripes: u64) -> SimShape {
    SimShape::new(data, parity, CHUNK as u32, stripes).logged(ChecksumKind::Crc32c, 1 << 20)
}

impl Scene {
    /// A running array full of random bytes, all of them in place.
    pub(crate) fn running(shape: SimShape, seed: u64) -> (SimWorld, SimArray, Vec<u8>) {
        let world = SimWorld::new(shape, 32 << 20);
        let mut model = vec![0; shape.volume_bytes as usize];
        Random::new(seed ^ 0xf111).fill(&mut model);
        let mut sim = SimArray::create_in(&world, seed);
        sim.write(0, &model).expect("written");
        sim.settle();
        (world, sim, model)
    }

    /// The same, stopped.
    pub(crate) fn stopped(shape: SimShape, seed: u64) -> Scene {
        let (world, mut sim, model) = Scene::running(shape, seed);
        sim.admin(AdminRequest::Stop).expect("it stops");
        Scene { world, disks: sim.disks.clone(), model }
    }

    /// The same, killed; every write has happened.
    pub(crate) fn killed(world: SimWorld, sim: &SimArray, model: Vec<u8>) -> Scene {
        Scene { world, disks: sim.wreck().settle(false, |_, _| Fate::Kept), model }
    }

    pub(crate) fn start(&self, force: bool) -> SimArray {
        self.world.start(self.disks.clone(), force, Random::new(5)).expect("it assembles")
    }

    /// Makes reads of the pages on this disk fail until the time `until` of the next start's clock.
    pub(crate) fn hide_pages(&mut self, disk: u32, until: Timestamp) {
        let disk = self.disks.get_mut(&disk).expect("a disk");
        let pages = DiskRegion::Pages.ranges(disk);
        disk.inject(unreadable(pages, until));
    }
}

/// A fault that makes reads of these bytes fail.
pub(crate) fn unreadable(within: Vec<Range<u64>>, until: Timestamp) -> PassingFault {
    PassingFault::new(Trouble::Medium).on(OpKinds::READS).within(within).until(until)
}

/// The newest superblock of a disk.
pub(crate) fn superblock(disk: &SimDisk) -> Superblock {
    let copies = all_copy_offsets(disk.bytes()).map(|at| Superblock::decode(&disk.peek(at.0, COPY_BYTES)));
    copies.into_iter().flatten().max_by_key(|copy| copy.sequence).expect("a member")
}

/// The disk and bytes of each copy of a page, in an array whose members are on the disks of their numbers.
pub(crate) fn copies(disk: &SimDisk, page: PageIndex) -> Vec<(u32, Range<u64>)> {
    let superblock = superblock(disk);
    let layout = PageLayout::new(superblock.geometry, superblock.checksum != ChecksumKind::None);
    let start = superblock.region(RegionKind::Pages).expect("pages").offset.0;
    let place = |(member, offset): (MemberIndex, u64)| {
        (u32::from(member.0), start + offset..start + offset + 2 * PAGE_BYTES as u64)
    };
    layout.copies(page).map(place).collect()
}

/// The first page of hashes.
pub(crate) fn first_hash_page(disk: &SimDisk) -> PageIndex {
    PageIndex(PageLayout::new(superblock(disk).geometry, true).map_pages())
}

/// The place of a copy with the newest version.
pub(crate) fn newest_place(disk: &SimDisk, page: PageIndex, copy: &Range<u64>) -> Range<u64> {
    let superblock = superblock(disk);
    let key = LogKey::derive(superblock.array, superblock.log_secret);
    let places = (copy.start..copy.end).step_by(PAGE_BYTES);
    let sequence = |at: u64| {
        Page::decode(&key, superblock.array, page, &disk.peek(at, PAGE_BYTES)).map_or(0, |page| page.sequence)
    };
    let at = places.max_by_key(|&at| sequence(at)).expect("two places");
    at..at + PAGE_BYTES as u64
}

/// Executes everything and lets a minute pass, whatever hangs meanwhile.
pub(crate) fn drain(sim: &mut SimArray) {
    live(sim, 60);
}

/// Checks block by block that everything reads as it must.
pub(crate) fn verify(sim: &mut SimArray, model: &[u8], when: &str) -> Result<(), String> {
    for (block, expected) in model.chunks(BLOCK).enumerate() {
        match sim.read((block * BLOCK) as u64, BLOCK) {
            Ok(read) if read == expected => {}
            Ok(_) => return Err(format!("{when}: block {block} reads wrong; {:?}", texts(sim))),
            Err(error) => return Err(format!("{when}: block {block}: {error:?}; {:?}", texts(sim))),
        }
    }
    Ok(())
}

/// Checks that no block reads wrong. Returns how many end with an error.
pub(crate) fn verify_or_error(sim: &mut SimArray, model: &[u8], when: &str) -> Result<usize, String> {
    let mut errors = 0;
    for (block, expected) in model.chunks(BLOCK).enumerate() {
        match sim.read((block * BLOCK) as u64, BLOCK) {
            Ok(read) if read == expected => {}
            Ok(_) => return Err(format!("{when}: block {block} reads wrong; {:?}", texts(sim))),
            Err(_) => errors += 1,
        }
    }
    Ok(errors)
}

pub(crate) fn texts(sim: &SimArray) -> Vec<&str> {
    sim.notices.iter().map(|notice| notice.text.as_str()).collect()
}

/// Stops the array, starts it again, and checks that everything reads as it must and that a scrub finds
/// nothing.
fn verify_after_restart(mut sim: SimArray, model: &[u8], when: &str) -> Result<(), String> {
    drain(&mut sim);
    verify(&mut sim, model, when)?;
    drain(&mut sim);
    let mut sim = sim.stop_and_restart(false).map_err(|error| format!("{when}: {error}"))?;
    drain(&mut sim);
    verify(&mut sim, model, &format!("{when}, after a restart"))?;
    for _ in 0..2 {
        sim.admin(AdminRequest::ScrubStart).map_err(|error| format!("{when}: {error:?}"))?;
        drain(&mut sim);
    }
    let scrub = sim.status().last_scrub.ok_or("no scrub has ended")?;
    let is_whole = (scrub.errors, scrub.repaired) == (0, 0);
    if is_whole { Ok(()) } else { Err(format!("{when}: a scrub finds {scrub:?}; {:?}", texts(&sim))) }
}

/// Copies of pages cannot be read for a moment while no page is cached; meanwhile clients read and write.
/// Those requests may fail; afterwards nothing else may be different. `offline`: a member is out of service
/// all the while.
pub(crate) fn pages_unreadable_for_a_moment(offline: bool, millis: u64, seed: u64) -> Result<(), String> {
    let scene = Scene::stopped(shape(2, 1, 40), seed);
    let mut model = scene.model.clone();
    let mut sim = scene.start(false);
    drain(&mut sim);
    if offline {
        sim.admin(AdminRequest::Offline { member: MemberIndex(0) }).expect("one is spare");
        drain(&mut sim);
    }
    let until = Timestamp(sim.now().0 + millis * 1_000_000);
    for disk in sim.disks.values_mut() {
        let pages = DiskRegion::Pages.ranges(disk);
        // One place of each copy, or both: only the place with the newest version matters, and which one that
        // is varies.
        let within = match seed % 3 {
            0 => pages,
            one => {
                let places = pages.iter().flat_map(|pages| pages.clone().step_by(PAGE_BYTES));
                let picked = places.enumerate().filter(|(at, _)| at % 2 == one as usize - 1);
                picked.map(|(_, at)| at..at + PAGE_BYTES as u64).collect()
            }
        };
        disk.inject(unreadable(within, until));
    }
    let mut random = Random::new(seed);
    let mut writes = Vec::new();
    for _ in 0..6 {
        let block = random.below((model.len() / BLOCK) as u64) as usize;
        if random.one_in(2) {
            sim.submit_read((block * BLOCK) as u64, BLOCK);
        } else {
            let bytes = vec![random.below(250) as u8 + 1; BLOCK];
            writes.push((block, sim.submit_write((block * BLOCK) as u64, &bytes, true), bytes));
        }
    }
    for (block, id, bytes) in writes {
        match sim.wait(id) {
            Ok(_) => model[block * BLOCK..][..BLOCK].copy_from_slice(&bytes),
            Err(error) if millis < 2_000 => return Err(format!("a write did not wait: {error:?}")),
            Err(_) => {}
        }
    }
    sim.sleep(millis);
    let mut at_once = Vec::new();
    std::mem::swap(&mut at_once, &mut sim.notices);
    if let Some(text) = at_once.iter().map(|notice| &notice.text).find(|text| text.contains("on all members"))
    {
        return Err(format!("called lost: {text}"));
    }
    verify_after_restart(sim, &model, "the pages can be read again")
}

/// Case 4: a member is dead, and the newest version of a page of the stripe map cannot be read on another
/// during the start after a kill. The stripes were written again and again, each time to another slot, and
/// flushed.
pub(crate) fn old_map_page(until: Timestamp, seed: u64) -> Result<(), String> {
    let stripes = 300usize;
    let shape = SimShape::new(2, 1, 4096, stripes as u64).logged(ChecksumKind::Crc32c, 1 << 20);
    let world = SimWorld::new(shape, 32 << 20);
    let mut sim = SimArray::create_in(&world, seed);
    let stripe = 2 * 4096;
    let mut model = vec![0; stripes * stripe];
    for round in 1..3u8 + (seed % 2) as u8 {
        model.fill(round);
        sim.write(0, &model).expect("written");
        let flush = sim.submit(ClientRequest::Flush);
        sim.wait(flush).expect("flushed");
        sim.settle();
    }
    // At the kill, the log names entries of another page of the map, or of the same one.
    let last = if seed.is_multiple_of(3) { 5 } else { stripes - 1 };
    model[last * stripe..(last + 1) * stripe].fill(9);
    sim.write((last * stripe) as u64, &vec![9; stripe]).expect("written");
    let mut scene = Scene::killed(world, &sim, model);
    let any = scene.disks.values().next().expect("a disk");
    let places = copies(any, PageIndex(0));
    let (dead, sick) = (places[0].0, places[1].clone());
    scene.disks.get_mut(&dead).expect("a disk").dead = true;
    let place = newest_place(&scene.disks[&sick.0], PageIndex(0), &sick.1);
    let hidden = if seed.is_multiple_of(2) { place } else { sick.1 };
    scene.disks.get_mut(&sick.0).expect("a disk").inject(unreadable(vec![hidden], until));
    let mut sim = scene.start(false);
    drain(&mut sim);
    if until.0 < 5 * SECOND {
        verify(&mut sim, &scene.model, "the map page can be read again")?;
        // A page of the map is rewritten.
        sim.write(0, &vec![8; stripe]).map_err(|error| format!("{error:?}"))?;
        scene.model[..stripe].fill(8);
        drain(&mut sim);
        return verify(&mut sim, &scene.model, "the map page was written");
    }
    let LogState::Refused(reason) = sim.status().log else {
        verify_or_error(&mut sim, &scene.model, "the map page cannot be read")?;
        return Err(format!("served without the newest map page: {:?}", texts(&sim)));
    };
    if !reason.contains("metadata page 0") || !reason.contains(&format!("unreadable on member {}", sick.0)) {
        return Err(format!("it does not say which page and member: {reason}"));
    }
    // When it can be read again, the refused start has changed nothing.
    sim.disks.values_mut().for_each(SimDisk::clear_faults);
    scene.disks = sim.wreck().settle(true, |_, _| Fate::Kept);
    let mut sim = scene.start(false);
    drain(&mut sim);
    verify(&mut sim, &scene.model, "the start after the refused one")
}

/// What happens to the copies of pages of checksums that other members have, while a member is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OtherCopies {
    /// They rot.
    Rotten,
    /// They give errors from now on, and reads of them go on.
    Unreadable,
    /// The copies of pages of which the member has missed no block rot; other pages are written meanwhile.
    SomeRotten,
    /// They rot, and so does the place of the member's own copy that does not hold the newest version.
    RottenAndOneOwnPlace,
}

/// A member is away for a moment, and the copies of pages of checksums on the others are gone. Its own copies
/// are still good: once it is back, everything reads as before, even after the member is lost for good.
pub(crate) fn only_a_returning_member_has_pages(
    shape: SimShape,
    others: OtherCopies,
    seed: u64,
) -> Result<(), String> {
    let parity = shape.parity;
    let scene = Scene::stopped(shape, seed);
    let mut sim = scene.start(false);
    let mut model = scene.model.clone();
    drain(&mut sim);
    let away = (seed % u64::from(parity + 2)) as u32;
    let any = sim.disks[&0].clone();
    let first = first_hash_page(&any).0;
    let pages = PageLayout::new(superblock(&any).geometry, true).pages();
    let spared = if others == OtherCopies::SomeRotten { pages / 2 } else { pages };
    let mut hidden: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
    for page in (first..spared).map(PageIndex) {
        let copies = copies(&any, page);
        if !copies.iter().any(|(disk, _)| *disk == away) {
            continue;
        }
        for (disk, place) in copies {
            let newest = newest_place(&sim.disks[&disk], page, &place);
            let disk_of = sim.disks.get_mut(&disk).expect("a disk");
            match others {
                _ if disk == away => {
                    if others == OtherCopies::RottenAndOneOwnPlace {
                        let other = if newest.start == place.start { newest.end } else { place.start };
                        disk_of.poke(other, &[7; PAGE_BYTES]);
                    }
                }
                OtherCopies::Unreadable => hidden.entry(disk).or_default().push(place),
                _ => disk_of.poke(place.start + 1000, &[7; 2 * PAGE_BYTES - 1000]),
            }
        }
    }
    for (disk, within) in hidden {
        sim.disks.get_mut(&disk).expect("a disk").inject(unreadable(within, Timestamp(u64::MAX)));
    }
    let index = MemberIndex(away as u16);
    sim.admin(AdminRequest::Offline { member: index }).map_err(|error| format!("{error:?}"))?;
    if others == OtherCopies::SomeRotten {
        // The slots of this block are in the other half of the pages.
        let block = model.len() / BLOCK - 1;
        model[block * BLOCK..].fill(9);
        sim.write((block * BLOCK) as u64, &[9; BLOCK]).map_err(|error| format!("{error:?}"))?;
    }
    sim.sleep(500);
    let device = sim.reopen_disk(away);
    sim.admin(AdminRequest::Online { member: index, device }).map_err(|error| format!("{error:?}"))?;
    drain(&mut sim);
    if sim.status().members[usize::from(index.0)].state != MemberState::Online {
        return Err(format!("the member is not back: {:?}", texts(&sim)));
    }
    verify(&mut sim, &model, "the member is back")?;
    let told =
        |sim: &SimArray| texts(sim).iter().any(|text| text.contains("a damaged copy of metadata page"));
    if others != OtherCopies::Unreadable && !told(&sim) {
        return Err(format!("no notice names the rotten copies: {:?}", texts(&sim)));
    }
    if others == OtherCopies::Unreadable {
        // Their copies become readable again, and are old.
        sim.disks.values_mut().for_each(SimDisk::clear_faults);
        return verify_after_restart(sim, &model, "after it was back");
    }
    drain(&mut sim);
    let disk = sim.disk_of(index.0).expect("its disk");
    sim.disks.get_mut(&disk).expect("a disk").dead = true;
    verify(&mut sim, &model, "the member is lost for good")
}

/// Pages of checksums cannot be read on any member for a moment while the log is replayed.
pub(crate) fn pages_unreadable_during_replay(millis: u64, seed: u64) -> Result<(), String> {
    let (world, mut sim, mut model) = Scene::running(shape(2, 1, 40), seed);
    let mut random = Random::new(seed);
    for _ in 0..8 {
        let block = random.below((model.len() / BLOCK) as u64) as usize;
        let bytes = vec![random.below(250) as u8 + 1; BLOCK];
        model[block * BLOCK..][..BLOCK].copy_from_slice(&bytes);
        let id = sim.submit_write((block * BLOCK) as u64, &bytes, true);
        sim.wait(id).expect("written");
    }
    let mut scene = Scene::killed(world, &sim, model);
    let until = Timestamp(millis * 1_000_000);
    for disk in 0..3 {
        scene.hide_pages(disk, until);
    }
    let sim = scene.start(false);
    verify_after_restart(sim, &scene.model, "after the replay")
}

/// A copy of a page cannot be read for a moment, all within the budget, and its blocks are written later. The
/// power fails while the page is written, and the other copy is gone.
pub(crate) fn pages_unreadable_and_a_power_cut(seed: u64) -> Result<(), String> {
    let scene = Scene::stopped(shape(2, 1, 40), seed);
    let mut sim = scene.start(false);
    let Scene { world, mut model, .. } = scene;
    drain(&mut sim);
    let page = first_hash_page(&sim.disks[&0]);
    let places = copies(&sim.disks[&0], page);
    let (sick, other) = (places[seed as usize % 2].clone(), places[1 - seed as usize % 2].0);
    // Both places, and each of them alone.
    let fault = unreadable(vec![sick.1.clone()], Timestamp(u64::MAX)).times(3);
    sim.disks.get_mut(&sick.0).expect("a disk").inject(fault);
    sim.read(0, BLOCK).map_err(|error| format!("one copy is enough: {error:?}"))?;
    // The entry of this block is not in the sector of the page's head, so a torn page is noticed.
    let block = 120 + seed as usize % 8;
    model[block * BLOCK..][..BLOCK].fill(7);
    let id = sim.submit_write((block * BLOCK) as u64, &[7; BLOCK], true);
    sim.wait(id).map_err(|error| format!("{error:?}"))?;
    // Until the copy is on its way.
    let is_written = |sim: &SimArray| {
        let is_it = |op: &IoOp| matches!(op, IoOp::Write { offset, .. } if sick.1.contains(&offset.0));
        sim.queued().any(|(disk, op)| disk == sick.0 && is_it(op))
    };
    while !is_written(&sim) {
        if !sim.step() {
            sim.sleep(100);
        }
    }
    for tear in 0..8 {
        let mut disks = sim.wreck().settle(true, |_, disk| {
            if disk == sick.0 { Fate::Torn(Random::new(seed * 8 + tear).next_u64()) } else { Fate::Kept }
        });
        disks.get_mut(&other).expect("a disk").dead = true;
        let mut sim = world.start(disks, false, Random::new(tear)).expect("it assembles");
        drain(&mut sim);
        verify(&mut sim, &model, &format!("tear {tear}"))?;
    }
    Ok(())
}

/// Checks that all writes are there after a start with the faults of the scene or, if that was refused, after
/// one without them. Returns whether it was refused.
fn refused_or_right(mut scene: Scene) -> Result<bool, String> {
    let mut sim = scene.start(false);
    drain(&mut sim);
    let refused = matches!(sim.status().log, LogState::Refused(_));
    if refused {
        sim.disks.values_mut().for_each(SimDisk::clear_faults);
        scene.disks = sim.wreck().settle(true, |_, _| Fate::Kept);
        sim = scene.start(false);
        drain(&mut sim);
    }
    verify(&mut sim, &scene.model, "the log can be read, or others have what it takes").map(|()| refused)
}

/// The last flushed batch, which no note covers yet, cannot be read for a moment on more members than the
/// array survives. Returns whether the start was refused meanwhile.
pub(crate) fn flushed_batch_unreadable(millis: u64, seed: u64) -> Result<bool, String> {
    let (data, parity) = [(2, 1), (3, 2), (2, 2)][seed as usize % 3];
    let shape = shape(data, parity, 12);
    let (world, mut sim, mut model) = Scene::running(shape, seed);
    let log = sim.log_region();
    let to_log = |op: &IoOp| match op {
        IoOp::Write { offset, buf, .. } if log.contains(&offset.0) => {
            Some(offset.0..offset.0 + buf.len() as u64)
        }
        _ => None,
    };
    let mut random = Random::new(seed);
    let whole = seed.is_multiple_of(4);
    let stripe = usize::from(data) * CHUNK;
    // One batch before it, so that there is a chain.
    for last in [false, true] {
        let len = if whole { stripe } else { BLOCK };
        let at = random.below((model.len() / len) as u64) as usize * len;
        let bytes = vec![random.below(250) as u8 + 1; len];
        model[at..at + len].copy_from_slice(&bytes);
        let id = sim.submit_write(at as u64, &bytes, true);
        let mut pieces: BTreeMap<u32, Vec<Range<u64>>> = BTreeMap::new();
        loop {
            for (disk, op) in sim.queued() {
                pieces.entry(disk).or_default().extend(to_log(op));
            }
            if sim.poll(id).is_some() {
                break;
            }
            if !sim.step() {
                sim.sleep(100);
            }
        }
        if !last {
            continue;
        }
        let sick = random.choose(usize::from(parity) + 1, usize::from(data + parity));
        let mut scene = Scene::killed(world.clone(), &sim, model.clone());
        for at in sick {
            let disk = scene.disks.get_mut(&(at as u32)).expect("a disk");
            let mut within = pieces.remove(&(at as u32)).unwrap_or_default();
            if seed % 2 == 1 {
                // The blocks behind the batch cannot be read either. That doubt is settled first, and must
                // not settle the one about the batch.
                within.iter_mut().for_each(|piece| piece.end = log.end.min(piece.end + 4 * BLOCK as u64));
            }
            // For a whole stripe the log holds only records; the data that decides is in its slot.
            within.extend(DiskRegion::Data.ranges(disk).into_iter().filter(|_| whole));
            disk.inject(unreadable(within, Timestamp(millis * 1_000_000)));
        }
        return refused_or_right(scene);
    }
    unreachable!("the last batch returns")
}

/// The whole logs of more members than the array survives cannot be read for a moment, with flushed batches
/// in them that a note covers. Returns whether the start was refused meanwhile.
pub(crate) fn logs_unreadable(millis: u64, seed: u64) -> Result<bool, String> {
    let (data, parity) = [(2, 1), (4, 2), (2, 2)][seed as usize % 3];
    let (world, mut sim, mut model) = Scene::running(shape(data, parity, 12), seed);
    let mut random = Random::new(seed);
    for at in 0..12 {
        let block = random.below((model.len() / BLOCK) as u64) as usize;
        model[block * BLOCK..][..BLOCK].fill(at + 1);
        let id = sim.submit_write((block * BLOCK) as u64, &[at + 1; BLOCK], true);
        sim.wait(id).expect("written");
    }
    let mut scene = Scene::killed(world, &sim, model);
    for at in random.choose(usize::from(parity) + 1, usize::from(data + parity)) {
        let disk = scene.disks.get_mut(&(at as u32)).expect("a disk");
        let log = DiskRegion::Log.ranges(disk);
        disk.inject(unreadable(log, Timestamp(millis * 1_000_000)));
    }
    refused_or_right(scene)
}

/// Case 3: one member is dead, and much of the ring of another cannot be read, none of it in use. No member
/// leaves for that.
pub(crate) fn unused_ring_unreadable(seed: u64) -> Result<(), String> {
    let shape = shape(2, 1, 12);
    let (world, mut sim, mut model) = Scene::running(shape, seed);
    let mut random = Random::new(seed);
    for _ in 0..random.below(5) {
        let block = random.below((model.len() / BLOCK) as u64) as usize;
        let bytes = vec![random.below(250) as u8 + 1; BLOCK];
        model[block * BLOCK..][..BLOCK].copy_from_slice(&bytes);
        let id = sim.submit_write((block * BLOCK) as u64, &bytes, true);
        sim.wait(id).expect("written");
    }
    let mut scene = Scene::killed(world, &sim, model);
    let dead = random.below(3) as u32;
    let sick = (dead + 1) % 3;
    scene.disks.get_mut(&dead).expect("a disk").dead = true;
    let disk = scene.disks.get_mut(&sick).expect("a disk");
    let log = DiskRegion::Log.ranges(disk).remove(0);
    // The log starts where the ring begins, and is short.
    let unused = log.start + (log.end - log.start) / 2..log.end;
    disk.inject(unreadable(vec![unused], Timestamp(u64::MAX)));
    let mut sim = scene.start(false);
    drain(&mut sim);
    verify(&mut sim, &scene.model, "with half of a ring unreadable")?;
    let errors: Vec<u64> = sim.status().members.iter().map(|member| member.counters.read_errors).collect();
    if errors.iter().any(|errors| *errors > 0) {
        return Err(format!("errors of a scan are counted: {errors:?}"));
    }
    Ok(())
}

/// Within the budget: after a kill under load all reads of one member fail for good. The start may wait a
/// little, but then goes on, and all acknowledged writes are there.
pub(crate) fn one_member_unreadable(seed: u64) -> Result<(), String> {
    let (data, parity) = [(2, 1), (4, 2), (2, 2), (1, 1)][seed as usize % 4];
    let shape = shape(data, parity, 12);
    let (world, mut sim, mut model) = Scene::running(shape, seed);
    let mut random = Random::new(seed);
    let blocks = (model.len() / BLOCK) as u64;
    // The last write is not answered: it may or may not be there.
    let mut last = None;
    for at in 0..8 {
        let block = random.below(blocks) as usize;
        let bytes = vec![at as u8 + 1; BLOCK];
        let id = sim.submit_write((block * BLOCK) as u64, &bytes, random.one_in(2));
        if at < 7 {
            sim.wait(id).expect("written");
            model[block * BLOCK..][..BLOCK].copy_from_slice(&bytes);
        } else {
            (0..random.below(12)).for_each(|_| {
                sim.step();
            });
            last = Some((block, bytes));
        }
    }
    let (block, bytes) = last.expect("the last");
    let mut torn = Random::new(seed);
    let disks = sim.wreck().settle(false, |_, _| if torn.one_in(2) { Fate::Kept } else { Fate::Lost });
    let mut scene = Scene { world, disks, model };
    let sick = random.below(u64::from(data + parity)) as u32;
    let superblocks = DiskRegion::Superblocks.ranges(&scene.disks[&sick]);
    let end = superblocks.iter().map(|range| range.start).filter(|start| *start > 1 << 20).min();
    let start = superblocks.iter().map(|range| range.end).filter(|end| *end < 1 << 20).max();
    let within = start.expect("copies at the head")..end.expect("copies at the tail");
    scene.disks.get_mut(&sick).expect("a disk").inject(unreadable(vec![within], Timestamp(u64::MAX)));
    let mut sim = scene.start(false);
    drain(&mut sim);
    if sim.read((block * BLOCK) as u64, BLOCK).is_ok_and(|read| read == bytes) {
        scene.model[block * BLOCK..][..BLOCK].copy_from_slice(&bytes);
    }
    verify(&mut sim, &scene.model, "one member is unreadable")
}

/// The writes of [`flushed_and_killed`], each of one block full of its number, from 1 on.
const FLUSHED_WRITES: u8 = 12;

/// 2+1, killed after writes that were flushed one by one: a note covers all but the last of them.
fn flushed_and_killed(seed: u64) -> Result<Scene, String> {
    let (world, mut sim, mut model) = Scene::running(shape(2, 1, 12), seed);
    for write in 1..=FLUSHED_WRITES {
        let block = usize::from(write - 1) * 7 % (model.len() / BLOCK);
        model[block * BLOCK..][..BLOCK].fill(write);
        let id = sim.submit_write((block * BLOCK) as u64, &[write; BLOCK], true);
        sim.wait(id).map_err(|error| format!("a write: {error:?}"))?;
    }
    Ok(Scene::killed(world, &sim, model))
}

/// The data blocks in the log of a disk of [`flushed_and_killed`]: their places and the numbers of their
/// writes.
fn images(disk: &SimDisk) -> Vec<(u64, u8)> {
    let log = DiskRegion::Log.ranges(disk).remove(0);
    let image = |at: u64| {
        let bytes = disk.peek(at, BLOCK);
        let is_of_write =
            (1..=FLUSHED_WRITES).contains(&bytes[0]) && bytes.iter().all(|byte| *byte == bytes[0]);
        is_of_write.then_some((at, bytes[0]))
    };
    (log.start..log.end).step_by(BLOCK).filter_map(image).collect()
}

/// One image in the log of one member is rotten, and the log of another cannot be read for a moment. A
/// passing error costs nothing, whatever else is wrong (T1, T3): the last batch is not taken for one that was
/// never flushed, and no row is given up. Returns whether the start was refused meanwhile.
pub(crate) fn image_rotten_and_log_unreadable(millis: u64, seed: u64) -> Result<bool, String> {
    let mut scene = flushed_and_killed(seed)?;
    let (rotten, sick) = ((seed % 3) as u32, ((seed + 1 + seed / 3 % 2) % 3) as u32);
    let disk = scene.disks.get_mut(&rotten).expect("a disk");
    let passes = millis < 10_000;
    // If the error stays, batches that no note covers are dropped, with an event.
    let images: Vec<u64> = images(disk)
        .into_iter()
        .filter(|(_, write)| passes || *write < FLUSHED_WRITES)
        .map(|(at, _)| at)
        .collect();
    let Some(&at) = images.iter().rev().nth(seed as usize / 6 % images.len().max(1)) else {
        return Ok(false);
    };
    disk.flip(at, 1);
    let log = DiskRegion::Log.ranges(disk);
    scene.disks.get_mut(&sick).expect("a disk").inject(unreadable(log, Timestamp(millis * 1_000_000)));
    refused_or_right(scene)
}

/// Flushed rows of 2+1: one member is absent at the start, and one image in the log of another is rotten. The
/// log of the absent member holds what decodes the row, and its absence is no evidence of a loss (T1). Either
/// nothing is lost without it, or the start is refused and the member stays current. Returns whether it was
/// refused.
pub(crate) fn member_comes_late(seed: u64) -> Result<bool, String> {
    let mut scene = flushed_and_killed(seed)?;
    let (late, rotten) = ((seed % 3) as u32, ((seed + 1) % 3) as u32);
    let disk = scene.disks.get_mut(&rotten).expect("a disk");
    let Some((at, _)) = images(disk).into_iter().find(|(_, write)| *write < 10) else { return Ok(false) };
    disk.flip(at, 1);
    let start_without = |force| {
        let mut disks = scene.disks.clone();
        disks.get_mut(&late).expect("a disk").dead = true;
        let mut sim = scene.world.start(disks, force, Random::new(5)).expect("it assembles");
        drain(&mut sim);
        sim
    };
    let mut sim = start_without(false);
    if !matches!(sim.status().log, LogState::Refused(_)) {
        let device = sim.reopen_disk(late);
        let member = MemberIndex(late as u16);
        sim.admin(AdminRequest::Online { member, device }).map_err(|error| format!("{error:?}"))?;
        drain(&mut sim);
        return verify(&mut sim, &scene.model, "the late member is back").map(|()| false);
    }
    let said = format!("{:?}", texts(&sim));
    if !said.contains(&format!("member {late}, missing now, may have them")) {
        return Err(format!("it does not say which member is wanted: {said}"));
    }
    // The disks as the refused start left them, with the member present.
    let mut disks = sim.disks.clone();
    disks.get_mut(&late).expect("a disk").dead = false;
    let mut sim = scene.world.start(disks, false, Random::new(5)).expect("it assembles");
    drain(&mut sim);
    verify(&mut sim, &scene.model, "all are there")?;
    match verify_or_error(&mut start_without(true), &scene.model, "forced")? {
        0 => Err("refused, and forced it had it all".into()),
        _ => Ok(true),
    }
}
