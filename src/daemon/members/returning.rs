//! Brings back members that went away for a reason that passes: remote ones whose connection was given up,
//! and local ones whose storage was full, for which the host lacked resources (rule T4), or that were missing
//! while their array had failed or could not be served. Each is tried, with back-off. When its device answers
//! again, and has room, the daemon does what `calpe online` does.
//!
//! Invariants: nothing here waits for a server, except a thread of its own for each member; a device is
//! handed over only after it has been reachable for a while, so that writes that an earlier connection left
//! with its server have landed. Must not know the state machine of an array.

use super::hand_over::{By, check_fit};
use super::online::bring_online;
use super::own_device::open_own;
use super::target::{self, Target};
use crate::control::{MemberRef, RequestError};
use crate::daemon::arrays::away::{Away, Sought};
use crate::daemon::arrays::changes::Change;
use crate::daemon::arrays::held::Held;
use crate::daemon::arrays::outcome::Done;
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::returns::{Attempted, Looking, NotBack, Obstacle, Own, Step};
use crate::daemon::devices::import::SETTLE;
use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::devices::looking::{identity_of, open_member, patience};
use crate::daemon::devices::search::search;
use crate::daemon::devices::superblocks::check_length;
use crate::daemon::events::kinds;
use crate::daemon::reactor::{ArrayFacts, ArrayId};
use crate::member::patience::within_apart;
use crate::member::{self, Access, Device, DeviceError, TimeLimits};
use calpe_core::format::{MemberState, NewestError, Role, Superblock};
use calpe_core::units::{HumanSize, MemberIndex, shown};
use calpe_core::volume::NoticeLevel;
use nix::sys::statvfs::statvfs;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::thread::sleep;
use uuid::Uuid;

/// A member that was full is tried again when its filesystem has this many bytes free.
const ROOM_MIN: u64 = 16 << 20;

/// Advances the attempts for every member of an array that may come back, and takes back those that were
/// found; to be called about once a second, as a change of the array.
pub(crate) fn return_members(arrays: &Arrays, array: ArrayId, facts: &ArrayFacts, _change: &Change) {
    for member in arrays.away(array, facts) {
        if let Some(own) = attempt(arrays, array, &member) {
            take_back(arrays, array, &member, own);
        }
    }
}

/// Brings back members of a FAILED array whose devices are where they were. Devices that were in service when
/// it failed are current, so nothing is overwritten; the array refuses others, which come back when it serves
/// again.
pub(crate) fn bring_back(arrays: &Arrays, array: ArrayId, facts: &ArrayFacts, change: &Change) {
    let gone = arrays.served.with_names(array, |names| {
        let members = facts.status.members.iter().zip(names.seats());
        let missing = members.filter(|(member, _)| member.state == MemberState::Missing);
        let places = missing.filter_map(|(member, seat)| Some((member.index, seat.path.clone()?)));
        (names.uuid, places.collect::<Vec<(MemberIndex, PathBuf)>>())
    });
    let Some((uuid, gone)) = gone else { return };
    for (index, path) in gone {
        if arrays.returns.is_kept_out(uuid, index) {
            continue;
        }
        // This runs once a second, so a device is not searched for elsewhere.
        if member::is_remote(&path) || identity_of(&path).is_none() {
            continue;
        }
        let target = target::find(arrays, &uuid.to_string(), &MemberRef::Index(index.0));
        let back = target.and_then(|target| {
            let own = open_own(arrays, &target, Some(&path), change)?;
            bring_online(arrays, &target, own, By::Itself).map(drop)
        });
        if let Err(error) = back {
            tracing::debug!(%error, "a member of a failed array is not back");
        }
    }
}

/// Advances the attempts for a member. Returns its device once an attempt has found it.
fn attempt(arrays: &Arrays, array: ArrayId, member: &Away) -> Option<Own> {
    let terms = member.terms();
    if let (false, Some(lost)) = (arrays.returns.is_tried(terms), &member.lost) {
        let text = format!("the connection to it is given up: {}; it is tried again", lost.reason);
        arrays.notice_member(array, kinds::MEMBER_LOST, NoticeLevel::Warning, member.index, text);
    }
    // Lanes are not asked under the lock of the attempts.
    let held = match arrays.held(array, member.index) {
        Held::Shared(device) => Some(device),
        Held::Nowhere => None,
        // What could be opened beside it is a copy.
        Held::Alone => return None,
    };
    match arrays.returns.step(terms, |looking| begin(member, held, looking)) {
        Step::Idle => None,
        Step::Found(own) => Some(*own),
        Step::Blocked(obstacle) => {
            let text = format!("it cannot come back for now: {}; it is tried again", obstacle.reason());
            arrays.notice_member(array, kinds::MEMBER_BLOCKED, NoticeLevel::Warning, member.index, text);
            None
        }
    }
}

/// Begins to look for a member's device, on a thread of its own. The receiver gets the outcome; it has no
/// sender when there is no thread. `held`: its device, where other lanes have it in service.
fn begin(member: &Away, held: Option<Device>, looking: Looking) -> Receiver<Attempted> {
    let (sender, receiver) = channel();
    let (places, limits, was_short) = (member.places.clone(), member.limits, member.was_short);
    let (array, device, sought) = (member.array, member.uuid, member.sought.clone());
    let thread = std::thread::Builder::new().name("member-return".into());
    let _ = thread.spawn(move || {
        let _looking = looking;
        let found = match was_short {
            true => has_room(&places, limits).map_err(NotBack::Away),
            false => Ok(()),
        };
        let place = found.and_then(|()| match sought {
            Some(sought) => place_of(&sought, limits, array, device),
            None => Ok(None),
        });
        let found = place.and_then(|place| {
            let places = place.map_or(places, |place| vec![place]);
            look_for(&places, held, limits, array, device)
        });
        // If nobody waits for it any more, the device is closed again.
        let _ = sender.send(found);
    });
    receiver
}

fn take_back(arrays: &Arrays, array: ArrayId, away: &Away, own: Own) {
    let (device, lanes) = own;
    let path = shown(device.path()).to_string();
    let target = target::find(arrays, &away.array.to_string(), &MemberRef::Index(away.index.0));
    let outcome: Result<Done, RequestError> = target.and_then(|target: Target| {
        target.check_own(&device, lanes.first())?;
        check_fit(&target, &device)?;
        bring_online(arrays, &target, (device, lanes), By::Itself)
    });
    match outcome {
        Ok(done) => {
            arrays.returns.succeeded(away.array, away.index);
            let how = match away {
                Away { was_short: true, .. } => "has room again",
                Away { is_local: true, .. } => "is there again",
                _ => "answers again",
            };
            let text = format!("{path} {how}: {}", done.message);
            arrays.notice_member(array, kinds::MEMBER_RETURNED, NoticeLevel::Info, away.index, text);
        }
        Err(error) => {
            tracing::debug!(%error, "a member answers and is not taken back");
            arrays.returns.failed(away.terms());
        }
    }
}

/// Checks that the filesystems of these files have room for more than a member writes at once: a member that
/// comes back to a full filesystem would leave again. Room on servers and below block devices cannot be
/// determined.
fn has_room(places: &[PathBuf], limits: TimeLimits) -> Result<(), String> {
    for place in places.iter().filter(|place| !member::is_remote(place)) {
        let own = place.clone();
        let room = within_apart(place, "ask for its free space", limits.local, move || {
            let is_file = own.is_file();
            is_file.then(|| statvfs(&own).ok()).flatten()
        });
        let room = room.map_err(|error| error.to_string())?;
        if room.is_some_and(|fs| fs.blocks_available() * fs.fragment_size() < ROOM_MIN) {
            let room = HumanSize(ROOM_MIN);
            return Err(format!("{}: its filesystem has less than {room} of free space", shown(place)));
        }
    }
    Ok(())
}

/// Where the device is, if it is there and no other device claims to be it.
fn place_of(
    sought: &Sought,
    limits: TimeLimits,
    array: Uuid,
    uuid: Uuid,
) -> Result<Option<PathBuf>, NotBack> {
    let claimants = |places: &[PathBuf]| -> Result<Vec<PathBuf>, NotBack> {
        let mut found = search(places, patience(limits));
        found.check_whole().map_err(|error| NotBack::Away(error.to_string()))?;
        let all = found.arrays.remove(&array).unwrap_or_default().into_iter();
        let is_own = |s: &Superblock| s.device == uuid && s.role == Role::Member;
        Ok(all.filter(|found| is_own(&found.superblock)).map(|found| found.path).collect())
    };
    let own = sought.own.as_slice();
    if !own.is_empty() && claimants(own)?.is_empty() {
        return Ok(None);
    }
    let mut all = claimants(&[own, &sought.around].concat())?;
    if all.len() > 1 {
        let paths: Vec<String> = all.iter().map(|path| shown(path).to_string()).collect();
        return Err(NotBack::Away(format!("{}: each of them claims to be it", paths.join(", "))));
    }
    Ok(all.pop())
}

/// Why a device is not taken that says it is a member's, where lanes have another one in service as that.
const A_COPY: &str = "it is a copy of the device that other lanes of the array have in service";

/// Opens the device of a member, wherever it is, unless it is `held` already.
fn look_for(
    places: &[PathBuf],
    mut held: Option<Device>,
    limits: TimeLimits,
    array: Uuid,
    uuid: Uuid,
) -> Attempted {
    let is_own = |s: &Superblock| s.array == array && s.device == uuid && s.role == Role::Member;
    let mut first = None;
    for place in places {
        // Opened read-only first: a device of another array is not opened for writing.
        let looked = open_member(place, Access::ReadOnly, limits);
        let looked = looked.map(|(device, lanes)| (device, first_of(&lanes))).map_err(NotBack::from);
        let not_back = match looked {
            Ok((device, Ok(superblock))) if is_own(&superblock) => {
                check_length(&device, &superblock).map_err(|error| unfit(place, &error))?;
                drop(device);
                let device = match held.take_if(|device| device.is_at(place)) {
                    Some(device) => device,
                    None if held.is_some() => {
                        first.get_or_insert_with(|| blocked(place, Obstacle::Displaced(A_COPY.into())));
                        continue;
                    }
                    None => Device::open(place, Access::Exclusive).map_err(|error| match error {
                        DeviceError::ReadOnly { .. } => unfit(place, &error),
                        error => error.into(),
                    })?,
                };
                device.set_limits(limits);
                sleep(SETTLE);
                let lanes = DeviceLanes::read(&device);
                first_of(&lanes).map_err(|error| other_in(place, Err(error)))?;
                return Ok((device, lanes));
            }
            Ok((_, found)) => other_in(place, found),
            Err(not_back) => not_back,
        };
        // The first place is the last place of the member, if that is known.
        first.get_or_insert(not_back);
    }
    Err(first.unwrap_or_else(|| NotBack::Away("it is not known where it may be".into())))
}

/// What a device says of itself, by the first of its superblocks that can be used.
fn first_of(lanes: &DeviceLanes) -> Result<Superblock, NewestError> {
    lanes.first().cloned().map_err(Clone::clone)
}

/// The obstacle where the member's own device was found and cannot serve.
fn unfit(place: &Path, error: &DeviceError) -> NotBack {
    blocked(place, Obstacle::Displaced(error.to_string()))
}

/// The obstacle where something else was found.
fn other_in(place: &Path, found: Result<Superblock, NewestError>) -> NotBack {
    let what = match found {
        // It may be the member's device.
        Err(error @ NewestError::Unreadable(_)) => {
            return blocked(place, Obstacle::Refused(format!("{} answers: {error}", shown(place))));
        }
        Ok(Superblock { name, member, role: Role::Replaced, .. }) => {
            format!("what is there was member {member} of array '{name}', and has been replaced since")
        }
        Ok(Superblock { name, member, .. }) => {
            format!("another device is there now, member {member} of array '{name}'")
        }
        Err(NewestError::NotAMember) => "what is there holds no Calpe superblock".to_owned(),
        Err(error) => error.to_string(),
    };
    blocked(place, Obstacle::Displaced(format!("{} answers: {what}", shown(place))))
}

/// Only a server's answer counts as an obstacle: a local path may lead elsewhere at any time.
fn blocked(place: &Path, obstacle: Obstacle) -> NotBack {
    match member::is_remote(place) {
        true => NotBack::Blocked(obstacle),
        false => NotBack::Away(obstacle.reason().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::devices::import::tests::created_in;
    use crate::daemon::devices::superblocks::read_superblock;

    #[test]
    fn a_device_that_nobody_had_open_is_found_where_it_alone_says_that_it_is_it() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 1, 1);
        let path = |name: &str| dir.path().join(name);
        let device = Device::open(&path("m0"), Access::ReadOnly).unwrap();
        let uuid = read_superblock(&device).unwrap().device;
        drop(device);
        let find = |own: Option<&str>| {
            let sought = Sought { own: own.map(path), around: vec![dir.path().to_owned()] };
            place_of(&sought, TimeLimits::default(), array, uuid)
        };
        for own in [Some("m0"), None] {
            assert_eq!(find(own), Ok(Some(path("m0"))), "{own:?}");
        }
        std::fs::copy(path("m0"), path("copy")).unwrap();
        for own in [Some("m0"), None] {
            let NotBack::Away(why) = find(own).unwrap_err() else { panic!("it may be moved away") };
            assert!(why.contains("copy") && why.contains("each of them claims to be it"), "{why}");
        }
        std::fs::remove_file(path("m0")).unwrap();
        assert_eq!(find(Some("m0")), Ok(None), "elsewhere it may be a copy");
        assert_eq!(find(None), Ok(Some(path("copy"))));
    }
}
