//! A cache of two pages of checksums, so that nearly every page is read again from one of its copies, whose
//! newest versions and places are remembered (rule T3): scenes that each return what went wrong.

use super::page_faults::{
    BLOCK, Scene, copies, drain, first_hash_page, newest_place, superblock, texts, unreadable, verify,
};
use super::returning::rot;
use calpe_core::block_io::IoOp;
use calpe_core::format::{ChecksumKind, PAGE_BYTES, PageIndex, PageLayout};
use calpe_core::testing::{DiskRegion, Fate, Random, SimArray, SimDisk, SimShape, SimWorld};
use calpe_core::units::{MemberIndex, Timestamp};
use calpe_core::volume::{AdminRequest, ArrayState, ClientRequest};
use std::ops::Range;

const CHUNK: usize = 16384;
const SECOND: u64 = 1_000_000_000;

/// An array with some dozen pages of checksums.
pub(crate) fn shape(data: u16, parity: u16) -> SimShape {
    let shape = SimShape::new(data, parity, CHUNK as u32, 240).logged(ChecksumKind::Crc32c, 1 << 20);
    SimShape { page_cache: Some(2 * PAGE_BYTES), ..shape }
}

fn disk(sim: &mut SimArray, member: u16) -> &mut SimDisk {
    let id = sim.disk_of(member).expect("in service");
    sim.disks.get_mut(&id).expect("a disk")
}

/// The pages of checksums.
fn hash_pages(sim: &mut SimArray) -> Vec<PageIndex> {
    let any = &*disk(sim, 0);
    let pages = PageLayout::new(superblock(any).geometry, true).pages();
    (first_hash_page(any).0..pages).map(PageIndex).collect()
}

/// Offsets in the pages region of a member of its copies of pages of checksums.
fn copies_on(sim: &mut SimArray, member: u16) -> Vec<(PageIndex, Range<u64>)> {
    let pages = hash_pages(sim);
    // The places are the same on every disk that a member has.
    let any = disk(sim, member).clone();
    let all = pages.into_iter().flat_map(|page| copies(&any, page).into_iter().map(move |copy| (page, copy)));
    all.filter(|(_, (of, _))| *of == u32::from(member)).map(|(page, (_, places))| (page, places)).collect()
}

fn bytes_of_stripe(sim: &SimArray) -> usize {
    usize::from(sim.status().geometry.data) * CHUNK
}

/// Writes one block in every stripe, each in the same place within its stripe.
fn touch(sim: &mut SimArray, model: &mut [u8], within: usize, value: u8) -> Result<(), String> {
    let stripe = bytes_of_stripe(sim);
    for start in (0..model.len() / stripe).map(|at| at * stripe + within * BLOCK) {
        model[start..start + BLOCK].fill(value ^ (start / stripe) as u8);
        sim.write(start as u64, &model[start..start + BLOCK]).map_err(|error| format!("{error:?}"))?;
    }
    drain(sim);
    Ok(())
}

/// Reads a block of every stripe, so that no page is left in the cache that was there before.
fn pass_over(sim: &mut SimArray, model: &[u8], when: &str) -> Result<(), String> {
    let stripe = bytes_of_stripe(sim);
    for start in (0..model.len()).step_by(stripe) {
        let read = sim.read(start as u64, BLOCK).map_err(|error| format!("{when}: {error:?}"))?;
        if read != model[start..start + BLOCK] {
            return Err(format!("{when}: stripe {} reads wrong", start / stripe));
        }
    }
    Ok(())
}

/// Scrubs twice; the second scrub finds nothing.
fn scrub(sim: &mut SimArray, when: &str) -> Result<(), String> {
    for _ in 0..2 {
        sim.admin(AdminRequest::ScrubStart).map_err(|error| format!("{when}: {error:?}"))?;
        drain(sim);
    }
    let scrub = sim.status().last_scrub.ok_or("no scrub has ended")?;
    let is_whole = (scrub.errors, scrub.repaired) == (0, 0);
    if is_whole { Ok(()) } else { Err(format!("{when}: a scrub finds {scrub:?}; {:?}", texts(sim))) }
}

/// The last writes of all pages to one member are lost while the pages are in no cache: its copies show older
/// versions, which are not used, and are repaired.
pub(crate) fn copies_that_lost_a_write(shape: SimShape, seed: u64) -> Result<(), String> {
    let (_world, mut sim, mut model) = Scene::running(shape, seed);
    drain(&mut sim);
    let member = (seed % u64::from(shape.width())) as u16;
    let copies = copies_on(&mut sim, member);
    let before: Vec<(Range<u64>, Vec<u8>)> = copies
        .into_iter()
        .map(|(_, places)| (places.clone(), disk(&mut sim, member).peek(places.start, 2 * PAGE_BYTES)))
        .collect();
    touch(&mut sim, &mut model, 1, 0x51)?;
    pass_over(&mut sim, &model, "after the writes")?;
    for (places, bytes) in before {
        disk(&mut sim, member).poke(places.start, &bytes);
    }
    verify(&mut sim, &model, "with old copies of pages")?;
    drain(&mut sim);
    scrub(&mut sim, "after the old copies")
}

/// A member loses writes, of blocks and of the pages with their hashes, and has both as they were before. A
/// reader on another thread returns neither what the old block holds while the page is in the cache, nor when
/// it is not.
pub(crate) fn old_blocks_and_pages_read_elsewhere(shape: SimShape, seed: u64) -> Result<(), String> {
    let (_world, mut sim, mut model) = Scene::running(shape, seed);
    drain(&mut sim);
    touch(&mut sim, &mut model, 1, 0x51)?;
    pass_over(&mut sim, &model, "before")?;
    let member = (seed % u64::from(shape.width())) as u16;
    let regions = [sim.pages_region(), sim.data_region()];
    let (stripe, mut with_pages) = (bytes_of_stripe(&sim), 0);
    for at in [3, 60, 150, 220] {
        let blocks = (0..usize::from(shape.data)).map(|column| at * stripe + column * CHUNK + 2 * BLOCK);
        let blocks: Vec<usize> = blocks.collect();
        push_out(&mut sim, &model, at)?;
        with_pages += read_blocks_elsewhere(&sim, &model, &blocks, "before the writes")?;
        let old: Vec<Vec<u8>> = regions
            .iter()
            .map(|region| disk(&mut sim, member).peek(region.start, (region.end - region.start) as usize))
            .collect();
        for start in &blocks {
            model[*start..start + BLOCK].fill(at as u8 ^ 0x99);
            let written = sim.write(*start as u64, &model[*start..start + BLOCK]);
            written.map_err(|error| format!("{error:?}"))?;
        }
        drain(&mut sim);
        for (region, bytes) in regions.iter().zip(&old) {
            disk(&mut sim, member).poke(region.start, bytes);
        }
        read_blocks_elsewhere(&sim, &model, &blocks, "with the page in the cache")?;
        push_out(&mut sim, &model, at)?;
        read_blocks_elsewhere(&sim, &model, &blocks, "with the page on the members")?;
        verify(&mut sim, &model, "with old blocks and pages")?;
        drain(&mut sim);
    }
    if with_pages == 0 {
        return Err("no page was read elsewhere".into());
    }
    scrub(&mut sim, "after the old blocks")
}

/// Pushes the pages of a stripe out of the cache, by reads of others.
fn push_out(sim: &mut SimArray, model: &[u8], at: usize) -> Result<(), String> {
    let stripe = bytes_of_stripe(sim);
    for other in [40, 80, 120, 160] {
        let start = (at + other) % (model.len() / stripe) * stripe;
        sim.read(start as u64, BLOCK).map_err(|error| format!("{error:?}"))?;
    }
    Ok(())
}

/// Reads blocks on another thread, with each copy of their page. Returns how many were read with their page.
fn read_blocks_elsewhere(
    sim: &SimArray,
    model: &[u8],
    blocks: &[usize],
    when: &str,
) -> Result<usize, String> {
    let mut with_pages = 0;
    for (start, copy) in blocks.iter().flat_map(|start| (0..3).map(move |copy| (*start, copy))) {
        let Some((bytes, is_with_pages)) = sim.read_elsewhere(start as u64, BLOCK, copy) else { continue };
        if bytes != model[start..start + BLOCK] {
            return Err(format!("{when}: block {start} reads wrong elsewhere"));
        }
        with_pages += usize::from(is_with_pages);
    }
    Ok(with_pages)
}

/// Power is cut while every copy of some pages is being written, of pages that were read from one copy: every
/// copy still shows the version before, which alone has the checksums of the blocks that were written last.
pub(crate) fn writes_of_pages_cut_off(shape: SimShape, seed: u64) -> Result<(), String> {
    let (world, mut sim, mut model) = Scene::running(shape, seed);
    drain(&mut sim);
    // The pages of the last stripes push the others out of the cache.
    touch(&mut sim, &mut model, 1, 0x51)?;
    if seed.is_multiple_of(2) {
        // The newest versions are in the other places.
        touch(&mut sim, &mut model, 2, 0x52)?;
    }
    let pages = sim.pages_region();
    let stripe = bytes_of_stripe(&sim);
    for start in [7, 100, 201].map(|at| (at + 5 * seed as usize) % 240 * stripe + 3 * BLOCK) {
        model[start..start + BLOCK].fill(0x77);
        let id = sim.submit_write(start as u64, &model[start..start + BLOCK], true);
        while sim.poll(id).is_none() {
            if !sim.step_where(|_, op| !is_write_within(op, &pages)) {
                sim.sleep(100);
            }
        }
    }
    for _ in 0..50 {
        while sim.step_where(|_, op| !is_write_within(op, &pages)) {}
        sim.sleep(100);
    }
    if !sim.queued().any(|(_, op)| is_write_within(op, &pages)) {
        return Err("no page was being written".into());
    }
    let disks = sim.wreck().settle(true, |_, _| Fate::HEADLESS);
    let mut sim = Scene { world, disks, model: Vec::new() }.start(false);
    drain(&mut sim);
    verify(&mut sim, &model, "after the power cut")?;
    drain(&mut sim);
    scrub(&mut sim, "after the power cut")
}

fn is_write_within(op: &IoOp, range: &Range<u64>) -> bool {
    matches!(op, IoOp::Write { offset, .. } if range.contains(&offset.0))
}

/// A device is built while some pages cannot be read elsewhere, and joins without them. When they have been
/// read again, its copies are whole: the member that had these pages alone can be spared.
pub(crate) fn a_device_that_joins_without_pages(shape: SimShape, seed: u64) -> Result<(), String> {
    let (_world, mut sim, mut model) = Scene::running(shape, seed);
    drain(&mut sim);
    touch(&mut sim, &mut model, 1, 0x51)?;
    pass_over(&mut sim, &model, "before")?;
    let member = (seed % u64::from(shape.width())) as u16;
    let other = (member + 1) % shape.width();
    let pages = DiskRegion::Pages.ranges(disk(&mut sim, other));
    disk(&mut sim, other).inject(unreadable(pages, Timestamp(u64::MAX)));
    sim.admin(AdminRequest::Fail { member: MemberIndex(member) }).map_err(|error| format!("{error:?}"))?;
    let device = sim.add_blank_disk();
    let replace = AdminRequest::Replace { member: MemberIndex(member), device };
    sim.admin(replace).map_err(|error| format!("{error:?}"))?;
    until_whole(&mut sim)?;
    disk(&mut sim, other).clear_faults();
    drain(&mut sim);
    pass_over(&mut sim, &model, "with the pages")?;
    drain(&mut sim);
    let mut sim = sim.stop_and_restart(false).map_err(|error| error.to_string())?;
    drain(&mut sim);
    let offline = AdminRequest::Offline { member: MemberIndex(other) };
    sim.admin(offline).map_err(|error| format!("{error:?}"))?;
    verify(&mut sim, &model, "without the member that had the pages alone")
}

fn until_whole(sim: &mut SimArray) -> Result<(), String> {
    let begun = sim.now().0;
    while sim.status().state != ArrayState::Online || !sim.status().activities.is_empty() {
        if !sim.step() {
            sim.sleep(100);
        }
        if sim.now().0 - begun > 300 * SECOND {
            return Err(format!("it does not become whole: {:?}", texts(sim)));
        }
    }
    Ok(())
}

/// What befalls one member, while the others are well.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    Away,
    Replaced,
    Rotten,
    LostWrites,
    Unreadable,
    Killed,
    PowerCut,
}

const TROUBLES: [Trouble; 7] = [
    Trouble::Away,
    Trouble::Replaced,
    Trouble::Rotten,
    Trouble::LostWrites,
    Trouble::Unreadable,
    Trouble::Killed,
    Trouble::PowerCut,
];

/// One trouble follows another, each with reads and writes before, meanwhile and afterwards. Everything reads
/// right all the time; in the end a scrub finds nothing, and any member can be spared.
pub(crate) fn one_trouble_after_another(shape: SimShape, seed: u64, rounds: usize) -> Result<(), String> {
    let (_world, mut sim, mut model) = Scene::running(shape, seed);
    let mut random = Random::new(seed ^ 0xc01d);
    drain(&mut sim);
    for round in 0..rounds {
        let trouble = TROUBLES[random.below(TROUBLES.len() as u64) as usize];
        let member = random.below(u64::from(shape.width())) as u16;
        let when = format!("round {round}, {trouble:?} of {member}");
        load(&mut sim, &mut model, &mut random, &when)?;
        sim = befall(sim, &mut model, &mut random, (trouble, member), &when)?;
        load(&mut sim, &mut model, &mut random, &when)?;
        drain(&mut sim);
        if random.one_in(2) {
            scrub(&mut sim, &when)?;
        } else {
            // What is at fault on this member is found before another one has a fault.
            verify(&mut sim, &model, &when)?;
            drain(&mut sim);
            scrub(&mut sim, &when)?;
        }
    }
    let member = random.below(u64::from(shape.width())) as u16;
    sim.admin(AdminRequest::Offline { member: MemberIndex(member) }).map_err(|error| format!("{error:?}"))?;
    verify(&mut sim, &model, &format!("without member {member}"))
}

fn befall(
    mut sim: SimArray,
    model: &mut [u8],
    random: &mut Random,
    (trouble, member): (Trouble, u16),
    when: &str,
) -> Result<SimArray, String> {
    let index = MemberIndex(member);
    let refused = |error: &dyn std::fmt::Debug| format!("{when}: {error:?}");
    match trouble {
        Trouble::Away => {
            let old = sim.disk_of(member).expect("in service");
            sim.admin(AdminRequest::Offline { member: index }).map_err(|error| refused(&error))?;
            load(&mut sim, model, random, when)?;
            let device = sim.reopen_disk(old);
            sim.admin(AdminRequest::Online { member: index, device }).map_err(|error| refused(&error))?;
            load(&mut sim, model, random, when)?;
            until_whole(&mut sim)?;
        }
        Trouble::Replaced => {
            if random.one_in(2) {
                sim.admin(AdminRequest::Fail { member: index }).map_err(|error| refused(&error))?;
            }
            let device = sim.add_blank_disk();
            sim.admin(AdminRequest::Replace { member: index, device }).map_err(|error| refused(&error))?;
            load(&mut sim, model, random, when)?;
            until_whole(&mut sim)?;
        }
        Trouble::Rotten => {
            let id = sim.disk_of(member).expect("in service");
            for (page, places) in copies_on(&mut sim, member) {
                if random.one_in(2) {
                    let newest = newest_place(&sim.disks[&id], page, &places);
                    let other = if newest.start == places.start { newest.end } else { places.start };
                    let place = if random.one_in(3) { other..other + PAGE_BYTES as u64 } else { newest };
                    rot(&mut sim, id, &place);
                }
            }
        }
        Trouble::LostWrites => {
            drain(&mut sim);
            let places: Vec<Range<u64>> =
                copies_on(&mut sim, member).into_iter().map(|(_, places)| places).collect();
            let bytes: Vec<Vec<u8>> = places
                .iter()
                .map(|places| disk(&mut sim, member).peek(places.start, 2 * PAGE_BYTES))
                .collect();
            load(&mut sim, model, random, when)?;
            drain(&mut sim);
            for (places, bytes) in places.iter().zip(&bytes) {
                disk(&mut sim, member).poke(places.start, bytes);
            }
        }
        Trouble::Unreadable => {
            let pages = DiskRegion::Pages.ranges(disk(&mut sim, member));
            let until = Timestamp(sim.now().0 + SECOND);
            disk(&mut sim, member).inject(unreadable(pages, until));
            load(&mut sim, model, random, when)?;
            sim.sleep(2000);
        }
        Trouble::Killed => sim = sim.kill_and_restart(false).map_err(|error| refused(&error))?,
        Trouble::PowerCut => {
            let flush = sim.submit(ClientRequest::Flush);
            sim.wait(flush).map_err(|error| refused(&error))?;
            sim = sim.power_cut_and_restart(false).map_err(|error| refused(&error))?;
        }
    }
    Ok(sim)
}

/// Writes and reads blocks anywhere, and short runs of them.
fn load(sim: &mut SimArray, model: &mut [u8], random: &mut Random, when: &str) -> Result<(), String> {
    let blocks = model.len() / BLOCK;
    for _ in 0..60 {
        let len = (1 + random.below(3) as usize).min(blocks);
        let start = random.below((blocks - len + 1) as u64) as usize * BLOCK;
        let range = start..start + len * BLOCK;
        if random.one_in(2) {
            random.fill(&mut model[range.clone()]);
            let written = sim.write(start as u64, &model[range]);
            written.map_err(|error| format!("{when}: a write of {start}: {error:?}; {:?}", texts(sim)))?;
        } else {
            let read = sim.read(start as u64, range.len());
            let read =
                read.map_err(|error| format!("{when}: a read of {start}: {error:?}; {:?}", texts(sim)))?;
            if read != model[range.clone()] {
                return Err(format!("{when}: {start} reads wrong; {:?}", texts(sim)));
            }
            let elsewhere = sim.read_elsewhere(start as u64, range.len(), start / BLOCK);
            if elsewhere.is_some_and(|(bytes, _)| bytes != model[range]) {
                return Err(format!("{when}: {start} reads wrong elsewhere; {:?}", texts(sim)));
            }
        }
    }
    Ok(())
}

/// An array whose cache holds an eighth of its pages, all of which were read since it was started.
pub(crate) fn with_an_eighth_of_the_pages(seed: u64) -> (SimArray, Vec<u8>) {
    let shape = SimShape::new(4, 2, 64 << 10, 120).logged(ChecksumKind::Blake3, 4 << 20);
    let world = SimWorld::new(SimShape { page_cache: Some(6 * PAGE_BYTES), ..shape }, 64 << 20);
    let mut model = vec![0; shape.volume_bytes as usize];
    Random::new(seed).fill(&mut model);
    let mut sim = SimArray::create_in(&world, seed);
    for (at, part) in model.chunks(1 << 20).enumerate() {
        sim.write((at as u64) << 20, part).expect("written");
    }
    drain(&mut sim);
    let mut sim = sim.stop_and_restart(false).expect("it starts");
    drain(&mut sim);
    for start in (0..model.len()).step_by(256 << 10) {
        assert!(sim.read(start as u64, 256 << 10).expect("readable") == model[start..start + (256 << 10)]);
    }
    drain(&mut sim);
    (sim, model)
}
