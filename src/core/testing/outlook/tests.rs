//! A dry run has the same verdict as the request itself: every request in every state of an array. The
//! requests are about member 1.

use super::SimArray;
use crate::block_io::DeviceId;
use crate::format::{ChecksumKind, MemberState, Role, Superblock};
use crate::testing::{Random, SimShape, SimWorld, superblocks};
use crate::units::{LaneIndex, MemberIndex};
use crate::volume::{
    AdminRefusal, AdminRequest, ArrayState, ClientRequest, LogState, MemberCondition, NewDevice,
};
use std::collections::{BTreeMap, BTreeSet};

const BLOCK: usize = 4096;
const CHUNK: u32 = 16384;
const TARGET: MemberIndex = MemberIndex(1);

type State = (&'static str, fn() -> SimArray);
type Request = (&'static str, fn(&mut SimArray) -> AdminRequest);

const STATES: [State; 31] = [
    ("healthy", healthy),
    ("with writes in the log alone", || written(healthy())),
    ("member 1 offline", || offline(healthy(), &[1])),
    ("member 1 faulted", || faulted(healthy())),
    ("member 1 missing", || without(healthy(), &[1])),
    ("member 1 offline, and the spare one", || offline(healthy(), &[1, 0])),
    ("member 1 needed", || offline(healthy(), &[0, 2])),
    ("member 1 rebuilding", || replacing(faulted(healthy()), 1)),
    ("member 1 being caught up", caught_up),
    ("member 1 being replaced", || replacing(healthy(), 1)),
    ("member 1 offline and being replaced", replaced_offline),
    ("member 1 just replaced", just_replaced),
    ("member 2 rebuilding", || replacing(healthy(), 2)),
    ("scrub running", || scrubbing(healthy())),
    ("scrub waiting for a rebuild", || scrubbing(replacing(healthy(), 2))),
    ("scrub paused", || paused(scrubbing(healthy()))),
    ("repair running", repairing),
    ("failed member by member", failed),
    ("failed at once", || without(written(healthy()), &[0, 1, 2])),
    ("failed while members are out", || without(offline(healthy(), &[1, 0]), &[2, 3])),
    ("failed as flushes failed", flushes_failed),
    ("failed with a scrub", || without(scrubbing(healthy()), &[0, 1, 2])),
    ("failed, its log refused as it came back", log_refused),
    ("refused at its start", || refused_at_start(false)),
    ("refused at its start without member 1", || refused_at_start(true)),
    ("of another history than member 1", divided),
    ("starting", starting),
    ("replaying", replaying),
    ("its volume stopping", volume_stopping),
    ("stopping", stopping),
    ("stopped", stopped),
];

const REQUESTS: [Request; 25] = [
    ("fail", |_| AdminRequest::Fail { member: TARGET }),
    ("fail one that is not there", |_| AdminRequest::Fail { member: MemberIndex(9) }),
    ("offline", |_| AdminRequest::Offline { member: TARGET }),
    ("online", |sim| online(own(sim))),
    ("online of a blank device", |sim| online(sim.add_blank_disk())),
    ("online of a device that is too small", |sim| online(NewDevice { bytes: 1 << 20, ..own(sim) })),
    ("online of one with the superblock of another lane", |sim| {
        online(changed(sim, |s| s.part.lane = LaneIndex(5)))
    }),
    ("online of one that claims too much", |sim| online(changed(sim, |s| s.epoch.number += 1 << 40))),
    ("online of one that must not be written", |sim| {
        online(changed(sim, |s| s.features_ro_compat = 1 << 63))
    }),
    ("online of one that was replaced", |sim| online(replaced(sim))),
    ("online of one that is not there", |sim| AdminRequest::Online {
        member: MemberIndex(9),
        device: own(sim),
    }),
    ("replace", |sim| replace(TARGET, sim.add_blank_disk())),
    ("replace by a device that is too small", |sim| {
        replace(TARGET, NewDevice { bytes: 1 << 20, ..sim.add_blank_disk() })
    }),
    ("replace one that is not there", |sim| replace(MemberIndex(9), sim.add_blank_disk())),
    ("cancel", |_| AdminRequest::CancelReplace { member: TARGET, device: None }),
    ("cancel of one that is not there", |_| AdminRequest::CancelReplace {
        member: MemberIndex(9),
        device: None,
    }),
    ("pace", |_| AdminRequest::Pace { rebuild_min: 1 << 20, rebuild_max: 0 }),
    ("scrub", |_| AdminRequest::ScrubStart),
    ("pause", |_| AdminRequest::ScrubPause),
    ("stop scrub", |_| AdminRequest::ScrubStop),
    ("repair", |_| AdminRequest::Repair),
    ("clear", |_| AdminRequest::Clear { member: Some(TARGET) }),
    ("clear of one that is not there", |_| AdminRequest::Clear { member: Some(MemberIndex(9)) }),
    ("clear all", |_| AdminRequest::Clear { member: None }),
    ("stop", |_| AdminRequest::Stop),
];

/// The reasons that occur. Others need an event between a request and its answer.
const REASONS: [&str; 31] = [
    "BeingReplaced",
    "BeingReplacedAlready",
    "InAlready",
    "Kept",
    "MayLackUnflushed",
    "Needed",
    "NoOldDevice",
    "NoScrub",
    "NoSuchMember",
    "NotAsItLeft",
    "NotBeingReplaced",
    "NotRecorded",
    "NotServed",
    "NotServedUnwritten",
    "NotServedWhole",
    "NotServingYet",
    "NothingToBuildFrom",
    "NothingToLookAt",
    "NothingToScrub",
    "OtherLane",
    "OthersFirst",
    "OutAlready",
    "RepairAlready",
    "ReplacedJustNow",
    "ScrubAlready",
    "ScrubPausedAlready",
    "Stopping",
    "StoppingAlready",
    "TooSmall",
    "Unbelievable",
    "Unfit",
];

#[test]
fn a_dry_run_has_the_verdict_of_the_request_itself() {
    let mut reasons = BTreeSet::new();
    for (state, prepare) in STATES {
        let prepared = prepare();
        for (what, request) in REQUESTS {
            let what = format!("{what}, {state}");
            let mut sim = prepare();
            assert_eq!(sim.status(), prepared.status(), "{what}: the state is always the same");
            let request = request(&mut sim);
            let would = sim.would(&request);
            assert_eq!(sim.status(), prepared.status(), "{what}: a dry run changes something");
            let id = sim.submit_admin(request);
            let did = sim.poll_admin(id);
            if let Err(refused) = would {
                reasons.insert(reason(&refused.1));
                assert_eq!(did, Some(Err(refused)), "{what}");
                assert_eq!(sim.status(), prepared.status(), "{what}: it was refused and changes something");
                continue;
            }
            let did = did.or_else(|| {
                live(&mut sim, 10);
                sim.poll_admin(id)
            });
            assert!(matches!(did, Some(Ok(_))), "{what}: the dry run says {would:?}, and then it is {did:?}");
        }
    }
    assert_eq!(Vec::from_iter(&reasons), REASONS);
}

/// The name of a reason.
fn reason(refusal: &AdminRefusal) -> String {
    let debug = format!("{refusal:?}");
    debug.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default().to_owned()
}

fn online(device: NewDevice) -> AdminRequest {
    AdminRequest::Online { member: TARGET, device }
}

fn replace(member: MemberIndex, device: NewDevice) -> AdminRequest {
    AdminRequest::Replace { member, device }
}

/// A copy of the newest disk whose superblock names member 1.
fn own(sim: &mut SimArray) -> NewDevice {
    changed(sim, |_| ())
}

/// The same with another superblock.
fn changed(sim: &mut SimArray, change: fn(&mut Superblock)) -> NewDevice {
    let mut device = copy_where(sim, |s| s.member == TARGET && s.role == Role::Member);
    device.superblock.as_deref_mut().map(change);
    device
}

/// A copy of the disk that member 1 had before it was replaced, or else of its own.
fn replaced(sim: &mut SimArray) -> NewDevice {
    let serves = sim.status().members[usize::from(TARGET.0)].uuid;
    let is_replaced = |s: &Superblock| s.member == TARGET && s.device != serves;
    let any = sim.disks.values().filter_map(superblocks::newest).any(|s| is_replaced(&s));
    if any { copy_where(sim, is_replaced) } else { own(sim) }
}

fn copy_where(sim: &mut SimArray, wanted: impl Fn(&Superblock) -> bool) -> NewDevice {
    let known = sim.disks.iter().filter_map(|(id, disk)| Some((*id, superblocks::newest(disk)?)));
    let newest = known.filter(|(_, s)| wanted(s)).max_by_key(|(_, s)| (s.epoch.number, s.sequence));
    let (id, superblock) = newest.expect("there is one");
    let mut disk = sim.disks[&id].clone();
    disk.dead = false;
    let id = sim.disks.keys().max().expect("there are disks") + 1;
    let (uuid, bytes) = (superblock.device, disk.bytes());
    sim.disks.insert(id, disk);
    NewDevice { superblock: Some(Box::new(superblock)), ..NewDevice::new(DeviceId(id), uuid, bytes) }
}

fn live(sim: &mut SimArray, seconds: u64) {
    for _ in 0..seconds * 10 {
        while sim.step() {}
        sim.sleep(100);
    }
}

fn world(data: u16, parity: u16) -> SimWorld {
    SimWorld::new(SimShape::new(data, parity, CHUNK, 8).logged(ChecksumKind::Blake3, 1 << 20), 16 << 20)
}

/// An array full of bytes.
fn filled(data: u16, parity: u16) -> SimArray {
    let mut sim = SimArray::create_in(&world(data, parity), 11);
    let bytes = 8 * usize::from(data) * CHUNK as usize;
    sim.write(0, &vec![5; bytes]).expect("written");
    sim.settle();
    sim
}

fn healthy() -> SimArray {
    filled(2, 2)
}

/// Less than a stripe is written.
fn written(mut sim: SimArray) -> SimArray {
    sim.write(0, &[7; BLOCK]).expect("written");
    sim
}

fn offline(mut sim: SimArray, members: &[u16]) -> SimArray {
    for member in members {
        sim.admin(AdminRequest::Offline { member: MemberIndex(*member) }).expect("it goes");
    }
    sim.settle();
    sim
}

fn faulted(mut sim: SimArray) -> SimArray {
    sim.admin(AdminRequest::Fail { member: TARGET }).expect("it goes");
    sim.settle();
    sim
}

/// The disks of these members die at once.
fn without(mut sim: SimArray, members: &[u16]) -> SimArray {
    for member in members {
        let id = sim.disk_of(*member).expect("in service");
        sim.disks.get_mut(&id).expect("a disk").dead = true;
    }
    notice(&mut sim);
    sim
}

/// Makes the array notice, by a write, which disks are dead.
fn notice(sim: &mut SimArray) {
    let write = sim.submit_write(0, &[9; BLOCK], true);
    // The write fails where too many are dead.
    let _ = sim.wait(write);
    live(sim, 2);
}

fn replacing(mut sim: SimArray, member: u16) -> SimArray {
    let device = sim.add_blank_disk();
    sim.submit_admin(replace(MemberIndex(member), device));
    sim
}

fn caught_up() -> SimArray {
    let mut sim = written(offline(healthy(), &[1]));
    let device = own(&mut sim);
    sim.submit_admin(online(device));
    assert_eq!(sim.status().members[1].state, MemberState::Rebuilding);
    sim
}

fn replaced_offline() -> SimArray {
    let mut sim = replacing(healthy(), 1);
    sim.submit_admin(AdminRequest::Fail { member: TARGET });
    let member = &sim.status().members[1];
    assert!(member.state == MemberState::Faulted && member.replacement.is_some(), "{member:?}");
    sim
}

/// The replacement of member 1 is complete, and no superblock says so.
fn just_replaced() -> SimArray {
    let mut sim = replacing(healthy(), 1);
    while sim.status().members[1].replacement.is_some() {
        if !sim.step() {
            sim.sleep(10);
        }
    }
    sim
}

fn scrubbing(mut sim: SimArray) -> SimArray {
    sim.admin(AdminRequest::ScrubStart).expect("it starts");
    assert!(!sim.status().activities.is_empty());
    sim
}

fn paused(mut sim: SimArray) -> SimArray {
    sim.admin(AdminRequest::ScrubPause).expect("it rests");
    sim
}

fn repairing() -> SimArray {
    // Its pages are not in the cache after a start.
    let mut sim = healthy().stop_and_restart(false).expect("it starts");
    live(&mut sim, 2);
    sim.admin(AdminRequest::Repair).expect("it starts");
    assert!(!sim.status().activities.is_empty());
    sim
}

/// Member after member dies, and each lacks what was written after it.
fn failed() -> SimArray {
    let mut sim = healthy();
    for member in 0..3 {
        sim = without(sim, &[member]);
    }
    assert_eq!(sim.status().state, ArrayState::Failed);
    sim
}

/// Members that may have lost acknowledged writes.
fn flushes_failed() -> SimArray {
    let mut sim = without(healthy(), &[0]);
    for member in [1, 2] {
        let id = sim.disk_of(member).expect("in service");
        sim.disks.get_mut(&id).expect("a disk").failing_flushes = 1;
    }
    notice(&mut sim);
    assert_eq!(sim.status().state, ArrayState::Failed);
    sim
}

/// Older copies of members come back to an array that has failed.
fn log_refused() -> SimArray {
    let mut sim = filled(2, 1);
    // The superblocks record writes before the copies are taken, so the copies cannot be recognised by that.
    let write = sim.submit_write(0, &[7; BLOCK], true);
    sim.wait(write).expect("written");
    let disks = [0, 1].map(|member| sim.disk_of(member).expect("in service"));
    let older = disks.map(|id| sim.disks[&id].copy(false));
    for round in 0..8 {
        let write = sim.submit_write(round * 5 * BLOCK as u64, &[round as u8; BLOCK], true);
        sim.wait(write).expect("written");
    }
    sim = without(sim, &[0, 1]);
    for (id, copy) in disks.iter().zip(&older) {
        sim.disks.get_mut(id).expect("a disk").restore(copy);
    }
    let served_last = |sim: &SimArray, member: u16| {
        sim.status().members[usize::from(member)].conditions.contains(&MemberCondition::ServedLast)
    };
    let member = (0..2).find(|member| served_last(&sim, *member)).expect("one was in service until then");
    let id = sim.disk_out_of_use(member).expect("it is out");
    let device = sim.reopen_disk(id);
    sim.admin(AdminRequest::Online { member: MemberIndex(member), device }).expect("it seems current");
    live(&mut sim, 30);
    assert!(matches!(sim.status().log, LogState::Refused(_)), "{:?}", sim.status().log);
    sim
}

/// No metadata page can be read except on member 1, which may be missing.
fn refused_at_start(is_missing: bool) -> SimArray {
    let mut sim = healthy();
    sim.admin(AdminRequest::Stop).expect("it stops");
    let pages = sim.pages_region();
    let junk = vec![0xa5; (pages.end - pages.start) as usize];
    let spared = if is_missing { sim.disks.keys().nth(1).copied() } else { None };
    for (_, disk) in sim.disks.iter_mut().filter(|(id, _)| Some(**id) != spared) {
        disk.poke(pages.start, &junk);
    }
    if let Some(spared) = spared {
        sim.disks.get_mut(&spared).expect("a disk").dead = true;
    }
    let mut sim = world(2, 2).start(sim.disks.clone(), false, Random::new(1)).expect("it assembles");
    live(&mut sim, 20);
    assert!(matches!(sim.status().log, LogState::Refused(_)), "{:?}", sim.status().log);
    sim
}

/// The halves of the array were forced to start apart, and member 1 comes from the other one.
fn divided() -> SimArray {
    let mut sim = healthy();
    sim.admin(AdminRequest::Stop).expect("it stops");
    let (theirs, ours): (BTreeMap<_, _>, BTreeMap<_, _>) =
        sim.disks.clone().into_iter().partition(|(id, _)| *id < 2);
    let world = world(2, 2);
    let mut other = world.start(theirs, true, Random::new(1)).expect("it is forced");
    for round in 0..3 {
        other = other.stop_and_restart(true).expect("it is forced");
        other.write(0, &[round; BLOCK]).expect("written");
        let flush = other.submit(ClientRequest::Flush);
        other.wait(flush).expect("flushed");
        other.settle();
    }
    let mut sim = world.start(ours, true, Random::new(2)).expect("it is forced");
    sim.settle();
    sim.disks.insert(1, other.disks[&1].clone());
    sim
}

fn starting() -> SimArray {
    written(healthy()).kill_and_restart(false).expect("it starts")
}

fn replaying() -> SimArray {
    let mut sim = starting();
    while !sim.queued().any(|(_, op)| matches!(op, crate::block_io::IoOp::Read { .. })) {
        assert!(sim.step(), "it reads its log");
    }
    assert_eq!(sim.status().log, LogState::Replaying);
    sim
}

/// A client's write is in flight, so that the array is not told to stop.
fn volume_stopping() -> SimArray {
    let mut sim = healthy();
    sim.submit_write(0, &[7; BLOCK], false);
    sim.submit_admin(AdminRequest::Stop);
    sim
}

fn stopping() -> SimArray {
    let mut sim = written(healthy());
    sim.submit_admin(AdminRequest::Stop);
    sim
}

fn stopped() -> SimArray {
    let mut sim = healthy();
    sim.admin(AdminRequest::Stop).expect("it stops");
    sim
}
