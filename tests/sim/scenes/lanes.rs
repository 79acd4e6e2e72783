//! Scenes of arrays of two lanes in which one of them alone has trouble.

use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, Fate, SimArray, SimDisk, SimShape, WriteFault};
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{AdminRequest, ArrayState, ClientError, ClientRequest, MemberCondition, NoticeKind};

const STRIPE: usize = 2 * 4096;
/// Bytes of pages that are looked at.
const SPAN: usize = 1 << 20;

fn shape() -> SimShape {
    SimShape::new(2, 1, 4096, 8).in_lanes(2, 1).logged(ChecksumKind::Crc32c, 256 << 10)
}

/// A write to one stripe is acknowledged and lost, because too many members come back without it: the next
/// flush must fail, whichever lane the stripe is in.
///
/// # Errors
/// When it does not.
pub(crate) fn lost_writes_are_told(stripe: usize) -> Result<(), String> {
    const PART: usize = STRIPE - 1024;
    let at = (stripe * STRIPE) as u64 + 512;
    let mut sim = SimArray::create(shape(), 3);
    sim.write(0, &[1; 8 * STRIPE]).expect("written");
    let flush = sim.submit(ClientRequest::Flush);
    sim.wait(flush).expect("flushed");
    // Otherwise a flush of the other lane might make it durable.
    while sim.step() {}
    // Part of both data columns: without them it cannot be had from parity.
    sim.write(at, &[2; PART]).expect("written");
    for id in 0..2 {
        let disk = sim.disks.get_mut(&id).expect("a disk");
        disk.cut_power(|_, _| Fate::Lost);
        disk.dead = true;
    }
    // Each lane notices it by what it writes.
    for lane in 0..2 {
        assert!(sim.write((lane * STRIPE) as u64, &[3; 512]).is_err());
    }
    sim.sleep(1000);
    while sim.step() {}
    assert_eq!((sim.status().state, sim.writes_lost), (ArrayState::Failed, 0));
    let mut out = vec![0, 1];
    while sim.status().state == ArrayState::Failed {
        let before = out.len();
        out.retain(|&member| {
            let id = sim.disk_out_of_use(member).expect("no lane has it");
            let device = sim.reopen_disk(id);
            sim.admin(AdminRequest::Online { member: MemberIndex(member), device }).is_err()
        });
        if out.len() == before {
            return Err(format!("none can come back: {:?}", sim.notices));
        }
    }
    let flush = sim.submit(ClientRequest::Flush);
    let told_at_once = sim.wait(flush).is_err();
    sim.settle();
    let read = sim.read(at, PART).map_err(|error| format!("{error}: {:?}", sim.notices))?;
    if read == [2; PART] {
        return Err(format!("the write is not lost: {:?}", sim.notices));
    }
    match sim.writes_lost > 0 && told_at_once {
        true => Ok(()),
        false => Err(format!("lost, told {} times, {told_at_once}: {:?}", sim.writes_lost, sim.notices)),
    }
}

/// Zeroes over several lanes that must be fast: they are written in all of them, or refused and written in
/// none. The daemon once had the last lane alone write them, and acknowledged them.
///
/// # Errors
/// When some are missing, or written although they were refused.
pub(crate) fn fast_zeroes(lanes: u16) -> Result<(), String> {
    const BYTES: usize = 16 * STRIPE;
    let shape = SimShape::new(2, 1, 4096, 16).in_lanes(lanes, 1).logged(ChecksumKind::Crc32c, 128 << 10);
    let mut sim = SimArray::create(shape, 3);
    sim.write(0, &[7; BYTES]).expect("written");
    let zeroed = 4 * STRIPE;
    for (offset, len, may_unmap, is_done) in [
        (512, zeroed - 512, true, false),
        (0, zeroed + 512, true, false),
        (0, zeroed, false, false),
        (STRIPE, zeroed, true, true),
    ] {
        let (at, fua) = (VolumeOffset(offset as u64), false);
        let len = len as u64;
        let id = sim.submit(ClientRequest::WriteZeroes { offset: at, len, may_unmap, fast_only: true, fua });
        let result = sim.wait(id).map(drop);
        let wanted = if is_done { Ok(()) } else { Err(ClientError::NotSupported) };
        if result != wanted {
            return Err(format!("zeroes at {offset}+{len}: {result:?}"));
        }
        let read = sim.read(0, BYTES).map_err(|error| error.to_string())?;
        let byte = |at: usize| if is_done && (offset..offset + len as usize).contains(&at) { 0 } else { 7 };
        if let Some(at) = (0..BYTES).find(|&at| read[at] != byte(at)) {
            return Err(format!("zeroes at {offset}+{len}, {wanted:?}: {} at {at}", read[at]));
        }
    }
    Ok(())
}

/// A stripe of one lane cannot be read: a read over both lanes fails, and so does a write that needs what was
/// there.
///
/// # Errors
/// When one succeeds.
pub(crate) fn errors_of_one_lane_are_told(seed: u64) -> Result<(), String> {
    let mut sim = SimArray::create(shape(), seed);
    sim.write(0, &[1; 8 * STRIPE]).expect("written");
    sim.settle();
    // Two members of three: whatever the first stripes of the second lane consist of is gone.
    for id in 0..2 {
        let disk = sim.disks.get_mut(&id).expect("a disk");
        let data = DiskRegion::Data.ranges(disk).swap_remove(1);
        let blocks = disk.written_blocks(data);
        disk.bad_blocks.extend(blocks);
    }
    for (at, len) in [(0, 2 * STRIPE), (STRIPE / 2, 8 * STRIPE - STRIPE / 2)] {
        if let Ok(bytes) = sim.read(at as u64, len) {
            return Err(format!("a read at {at} was answered with {} bytes", bytes.len()));
        }
    }
    let read = sim.read(0, STRIPE).map_err(|error| format!("the first lane is whole: {error}"))?;
    if read != [1; STRIPE] {
        return Err("the first lane has other bytes".into());
    }
    match sim.write(512, &[2; 2 * STRIPE - 1024]) {
        Ok(()) => Err("a write was acknowledged of which one lane could not do its part".into()),
        Err(_) => Ok(()),
    }
}

/// The second lane lets go of member 1, whose storage is full. The first lane lets go of it, too, if it has
/// one to `spare`; it has not where it was started without member 0.
///
/// # Errors
/// When the first lane fails, or the member does not come back by itself.
pub(crate) fn full_for_one_lane(spare: bool) -> Result<(), String> {
    let mut sim = SimArray::create(shape(), 4);
    sim.write(0, &[1; 8 * STRIPE]).expect("written");
    sim.settle();
    if !spare {
        let disk = sim.disks.get_mut(&0).expect("a disk");
        for copy in DiskRegion::Superblocks.ranges(disk).into_iter().take(4) {
            disk.poke(copy.start, &vec![0; (copy.end - copy.start) as usize]);
        }
    }
    sim = sim.kill_where(false, |_, _| true).map_err(|error| error.to_string())?;
    sim.sleep(1000);
    sim.settle();
    sim.disks.get_mut(&1).expect("a disk").full = true;
    // Stripe 1 is in the second lane.
    let write = sim.submit_write(STRIPE as u64, &[2; STRIPE], false);
    sim.sleep(30_000);
    sim.wait(write).map_err(|error| format!("the write: {error}: {:?}", sim.notices))?;
    sim.settle();
    let (state, member) = (sim.status().state, sim.status().members[1].clone());
    let is_as_it_should = match spare {
        true => sim.released.contains(&1) && member.returns,
        false => !sim.released.contains(&1) && member.state == MemberState::Missing,
    };
    if state != ArrayState::Degraded || !is_as_it_should {
        return Err(format!("{state:?}, {member:?}: {:?}", sim.notices));
    }
    sim.read(0, 8 * STRIPE).map(drop).map_err(|error| error.to_string())
}

/// The second lane lets go of member 1, whose storage is full. In the first lane what is on the other members
/// cannot be read, so what is on this one is nowhere else: it stays there until the others can be read.
///
/// # Errors
/// When something cannot be read that could be read before, or the first lane keeps the member too long.
pub(crate) fn kept_for_last_copies(seed: u64) -> Result<(), String> {
    let mut sim = SimArray::create(shape(), seed);
    sim.write(0, &[1; 8 * STRIPE]).expect("written");
    sim.settle();
    for id in [0, 2] {
        let disk = sim.disks.get_mut(&id).expect("a disk");
        let data = DiskRegion::Data.ranges(disk).swap_remove(0);
        let blocks = disk.written_blocks(data);
        disk.bad_blocks.extend(blocks);
    }
    let chunks: Vec<u64> = (0..16).map(|chunk| chunk * 4096).collect();
    let readable = |sim: &mut SimArray| -> Vec<u64> {
        chunks.iter().copied().filter(|at| sim.read(*at, 4096).is_ok()).collect()
    };
    let before = readable(&mut sim);
    assert!(
        before.len() > 8 && before.len() < 16,
        "all of the second lane and some of the first: {before:?}"
    );
    sim.disks.get_mut(&1).expect("a disk").full = true;
    // Stripe 1 is in the second lane.
    let write = sim.submit_write(STRIPE as u64, &[2; STRIPE], false);
    sim.sleep(30_000);
    sim.wait(write).map_err(|error| format!("the write: {error}: {:?}", sim.notices))?;
    sim.sleep(10_000);
    let after = readable(&mut sim);
    if after != before {
        return Err(format!("{before:?} could be read, and now {after:?}: {:?}", sim.notices));
    }
    let member = sim.status().members[1].clone();
    let told = sim.notices.iter().filter(|notice| notice.kind == NoticeKind::MemberKept).count();
    if !member.conditions.contains(&MemberCondition::KeptByLanes)
        || member.state != MemberState::Missing
        || told != 1
    {
        return Err(format!("told {told} times, {member:?}: {:?}", sim.notices));
    }
    for id in [0, 2] {
        sim.disks.get_mut(&id).expect("a disk").bad_blocks.clear();
    }
    let all = readable(&mut sim);
    // That parity can be read again, too, is not known otherwise.
    sim.admin(AdminRequest::ScrubStart).map_err(|refusal| format!("{refusal:?}"))?;
    sim.settle();
    let member = sim.status().members[1].clone();
    let is_let_go = sim.released.contains(&1) && member.returns;
    match is_let_go && !member.conditions.contains(&MemberCondition::KeptByLanes) && all == chunks {
        true => Ok(()),
        false => Err(format!("{all:?} can be read, {member:?}: {:?}", sim.notices)),
    }
}

/// A page of checksums of the second lane, of a newer version than any of the first, is written into the
/// first one on some member: it must not count there.
///
/// # Errors
/// When data of the first lane can no longer be read, or reads as something else.
pub(crate) fn page_written_into_another_lane(seed: u64) -> Result<(), String> {
    let mut sim = SimArray::create(shape(), seed);
    for stripe in 0..8 {
        sim.write((stripe * STRIPE) as u64, &[1 + stripe as u8; STRIPE]).expect("written");
    }
    sim.sleep(10_000);
    sim.settle();
    let pages = |disk: &SimDisk, lane: usize| DiskRegion::Pages.ranges(disk).swap_remove(lane);
    let bytes = |disk: &SimDisk| disk.peek(pages(disk, 1).start, SPAN);
    let mut before = Vec::new();
    for round in 0..6 {
        if round == 5 {
            // Two of three members have copies of a page: one of those that have written it before.
            let writers =
                sim.disks.values_mut().zip(&before).filter(|(disk, before)| bytes(disk) != **before);
            let (disk, _) = writers.collect::<Vec<_>>().swap_remove((seed % 2) as usize);
            let (first, second) = (pages(disk, 0), pages(disk, 1));
            let by = first.start.wrapping_sub(second.start);
            disk.write_fault = Some((second, WriteFault::MisdirectedBy(by)));
        } else {
            before = sim.disks.values().map(bytes).collect();
        }
        for stripe in [1, 3, 5, 7] {
            sim.write((stripe * STRIPE) as u64, &[100 + round; 4096]).expect("written");
        }
        sim.sleep(10_000);
        sim.settle();
    }
    if sim.disks.values().any(|disk| disk.write_fault.is_some()) {
        return Err(format!("no page was written: {:?}", sim.status()));
    }
    sim = sim.kill_where(false, |_, _| true).map_err(|error| error.to_string())?;
    for stripe in [0, 2, 4, 6] {
        let at = (stripe * STRIPE) as u64;
        let read = sim.read(at, STRIPE).map_err(|error| format!("{error}: {:?}", sim.notices))?;
        if read != [1 + stripe as u8; STRIPE] {
            return Err(format!("stripe {stripe} is wrong"));
        }
    }
    Ok(())
}
