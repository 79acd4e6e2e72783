//! Hands an open device to an array as a member's, and remembers where it is.
//!
//! Invariant: a device is handed to an array only if it is large enough and its sectors fit; [`check_fit`]
//! checks that where the device is opened. Must not know where the device comes from.

use super::target::Target;
use crate::control::{ErrorCode, RequestError};
use crate::daemon::arrays::names::Place;
use crate::daemon::arrays::outcome::{Done, refusal};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::returns::Own;
use crate::daemon::devices::lanes::DeviceLane;
use crate::daemon::devices::looking::{look_at, patience};
use crate::daemon::devices::superblocks::{windows_of, witness};
use crate::daemon::reactor::ReactorError;
use crate::member::{self, Device, DeviceError, DeviceKind};
use calpe_core::block_io::DeviceId;
use calpe_core::format::{CopyPlace, Superblock};
use calpe_core::units::{LaneIndex, MemberIndex, ROW_BYTES, shown};
use calpe_core::volume::{AdminRequest, NewDevice};
use std::path::Path;
use uuid::Uuid;

/// What brings a member back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A command of an administrator, which overrules earlier ones.
    Command,
    /// The device is there again. This does not bring back a member that an administrator has taken out.
    Itself,
}

/// Why a device did not become a member's.
#[derive(Debug)]
pub(crate) enum NotTaken {
    /// Its array refused it, or is not served any more.
    ByArray(ReactorError),
    /// It came by itself, and an administrator has taken the member out.
    KeptOut,
}

impl From<NotTaken> for RequestError {
    fn from(reason: NotTaken) -> RequestError {
        match reason {
            NotTaken::ByArray(error) => error.into(),
            NotTaken::KeptOut => refusal(ErrorCode::Refused, "an administrator has taken it out"),
        }
    }
}

/// Hands an open device to an array, each lane its window of it, and remembers where it is.
pub(crate) fn hand_over(
    arrays: &Arrays,
    target: &Target,
    device: &Device,
    new: Vec<NewDevice>,
    by: By,
    request: impl Fn(MemberIndex, NewDevice) -> AdminRequest,
) -> Result<Done, NotTaken> {
    let ids: Vec<DeviceId> = new.iter().map(|new| new.device).collect();
    let uuid = new[0].uuid;
    let path = device.path().to_owned();
    device.set_limits(target.limits);
    let windows = device.windows(&windows_of(target.superblock.part, device.facts().bytes));
    for window in &windows {
        window.set_remote_witness(witness(window.facts().bytes, target.superblock.array, uuid, 0));
    }
    let place = Place::of(uuid, device);
    let since = device.since();
    // Before the device is in service: a status may be asked for while superblocks are being written.
    arrays.served.with_names(target.array, |names| {
        ids.iter().for_each(|id| names.add_device(*id, place.clone()));
    });
    let outcome = {
        // A command that takes out a member that is away promises that it stays away.
        let _alone = (by == By::Itself).then(|| arrays.returns.alone());
        // A statement of its own, so that the array is not asked under the lock of the records.
        let stays_out = by == By::Itself && arrays.returns.is_kept_out(target.superblock.array, target.index);
        match stays_out {
            true => Err(NotTaken::KeptOut),
            false => {
                let devices = ids.iter().copied().zip(windows).map(|device| vec![device]);
                let requests = new.into_iter().map(|new| request(target.index, new)).zip(devices);
                arrays.reactor.admin(target.array, requests.collect()).map_err(NotTaken::ByArray)
            }
        }
    };
    let outcome = outcome.inspect_err(|_| {
        // It may have become the member's and left again: then this is the device that comes back.
        let at = usize::from(target.index.0);
        let is_members = arrays.facts(target.array).is_ok_and(|f| f.status.members[at].uuid == place.uuid);
        arrays.served.with_names(target.array, |names| {
            // Of several lanes some may have taken it.
            if let [id] = ids[..] {
                names.withdraw_device(id);
            }
            if is_members {
                names.seat(at, place);
            }
        });
        arrays.remember_now(target.array);
    })?;
    // Only losses before `since` are forgotten: the connection may have been lost again meanwhile.
    member::forget_lost(&path, since);
    arrays.remember_now(target.array);
    let message = format!("array '{}': {} ({})", target.name, outcome.0, shown(&path));
    let warnings = outside_search(arrays, target, &path);
    let warnings = warnings.into_iter().collect();
    Ok(Done { message, warnings, ..Done::default() })
}

/// The windows of a device that is to be a member's, as each lane of its array is given one.
pub(crate) fn new_devices(
    arrays: &Arrays,
    target: &Target,
    uuid: Uuid,
    device_bytes: u64,
) -> impl Iterator<Item = NewDevice> {
    let windows = windows_of(target.superblock.part, device_bytes).into_iter();
    windows
        .map(move |window| NewDevice::new(arrays.reactor.next_device_id(), uuid, window.end - window.start))
}

/// The same for a member's own device, with what it says of itself. A lane that finds nothing of its own
/// there builds it anew.
pub(crate) fn own_devices(arrays: &Arrays, target: &Target, (device, lanes): &Own) -> Vec<NewDevice> {
    let all = new_devices(arrays, target, target.seat.uuid, device.facts().bytes);
    let with_own = |(new, (lane, read)): (NewDevice, (LaneIndex, &DeviceLane))| {
        let is_own = |superblock: &&Superblock| {
            superblock.array == target.superblock.array
                && superblock.device == target.seat.uuid
                && superblock.part.lane == lane
        };
        let superblock = read.superblock.as_ref().ok().filter(is_own).cloned().map(Box::new);
        let word = |(place, why): &(CopyPlace, String)| format!("{} is damaged: {why}", place.word());
        let bad_copies = read.damaged.iter().map(word).collect();
        NewDevice { superblock, bad_copies, ..new }
    };
    all.zip((0..).map(LaneIndex).zip(&lanes.lanes)).map(with_own).collect()
}

/// A warning about a device outside the places where members of its array are looked for.
pub(crate) fn outside_search(arrays: &Arrays, target: &Target, path: &Path) -> Option<String> {
    let array = target.superblock.array;
    let is_configured = arrays.settings.is_configured(array, &target.name);
    arrays.memory.outside_search(array, path, arrays.settings.search_places(), is_configured)
}

/// Refuses a device that is in use as a member of an array of this daemon. The error names the member and
/// gives this advice.
pub(crate) fn check_unused(
    arrays: &Arrays,
    target: &Target,
    new: &Path,
    advice: &str,
) -> Result<(), RequestError> {
    // With the limit of the opening that follows: a path that hangs now would hang then.
    let identity = look_at(new, patience(target.limits))?;
    let ids = arrays.served.ids();
    for id in ids {
        let Ok(facts) = arrays.facts(id) else { continue };
        let user = arrays.served.with_names(id, |names| {
            let is_it = |device: Option<DeviceId>| {
                device.and_then(|id| names.place_of(id)).is_some_and(|place| place.is_at(new, identity))
            };
            let mut members = facts.status.members.iter();
            let member = members
                .find(|member| is_it(member.device) || is_it(member.replacement.map(|new| new.device)))?;
            let role = if is_it(member.device) { "is" } else { "is being built as" };
            Some(format!("{} {role} member {} of array '{}'", shown(new), member.index, names.name))
        });
        if let Some(user) = user.flatten() {
            return Err(refusal(ErrorCode::Refused, format!("{user}: {advice}")));
        }
    }
    Ok(())
}

/// Whether a device can hold what a member holds.
pub(crate) fn check_fit(target: &Target, device: &Device) -> Result<(), RequestError> {
    let facts = device.facts();
    let needed = target.needed_bytes();
    if facts.bytes < needed {
        return Err(
            DeviceError::TooShort { path: device.path().into(), bytes: facts.exact_bytes, needed }.into()
        );
    }
    // Members are read and written by whole blocks, whatever sector the array shows to clients.
    if u64::from(facts.sector) > ROW_BYTES {
        let what = match facts.kind {
            DeviceKind::Block => "device",
            DeviceKind::File => "filesystem",
            DeviceKind::Remote => "server",
        };
        return Err(refusal(
            ErrorCode::Device,
            format!(
                "{}: the {what} has sectors of {} bytes, members are read and written in blocks of {ROW_BYTES}: use another one",
                shown(device.path()),
                facts.sector
            ),
        ));
    }
    Ok(())
}
