//! Members that come back: by command, or as soon as they are there again.
//!
//! Must not know how requests arrive, or when a member is tried.

use super::hand_over::{By, check_fit, hand_over, new_device};
use super::own_device::open_own;
use super::target::{self, Target, state_of};
use crate::control::{ErrorCode, MemberRef, RequestError};
use crate::daemon::arrays::outcome::{Done, Outcome, refusal};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::returns::Own;
use crate::daemon::devices::looking::identity_of;
use crate::daemon::devices::search::Hindrance;
use calpe_core::array::assembly::NOWHERE_ELSE;
use calpe_core::format::MemberState;
use calpe_core::units::shown;
use calpe_core::volume::{AdminRequest, NewDevice};
use std::path::Path;

/// Brings a member back that is out, or only tells.
pub(crate) fn online(
    arrays: &Arrays,
    array: &str,
    member: &MemberRef,
    path: Option<&Path>,
    dry_run: bool,
) -> Outcome {
    let target = target::find(arrays, array, member)?;
    let change = arrays.begin_change(target.superblock.array)?;
    let state = state_of(arrays, &target)?;
    if matches!(state, MemberState::Online | MemberState::Rebuilding) {
        return match path.filter(|path| !target.seat.is_at(path, identity_of(path))) {
            Some(_) => Err(refusal(
                ErrorCode::Refused,
                format!(
                    "{} is {} already; another device takes its place with 'calpe replace'",
                    target.describe(),
                    state.as_str()
                ),
            )),
            None => Ok(Done::line(format!("{} is {} already", target.describe(), state.as_str()))),
        };
    }
    let own = open_own(arrays, &target, path, &change)?;
    if dry_run {
        let (device, superblock, _) = own;
        let new = new_device(arrays, &device, Some(superblock));
        let request = AdminRequest::Online { member: target.index, device: new };
        let done = arrays.would(target.array, &target.name, request);
        let done = done.inspect_err(|error| note_kept(arrays, &target, device.path(), error))?;
        return Ok(Done::line(format!("{} ({})", done.message, shown(device.path()))));
    }
    let done = bring_online(arrays, &target, own, By::Command)?;
    arrays.returns.back(target.superblock.array, target.index);
    Ok(done)
}

/// Hands a member's own device to its array again.
pub(crate) fn bring_online(arrays: &Arrays, target: &Target, own: Own, by: By) -> Outcome {
    let (device, superblock, bad_copies) = own;
    check_fit(target, &device)?;
    let new = NewDevice { bad_copies, ..new_device(arrays, &device, Some(superblock)) };
    let path = device.path().to_owned();
    hand_over(arrays, target, new, device, by, |member, device| AdminRequest::Online { member, device })
        .inspect_err(|error| note_kept(arrays, target, &path, error))
}

/// A member was not taken back. If its device holds data that may be nowhere else, the status says
/// so from now on: the array does not record devices that it has refused.
fn note_kept(arrays: &Arrays, target: &Target, path: &Path, error: &RequestError) {
    if error.message.contains(NOWHERE_ELSE) {
        let reason = format!("not taken back: {}: {}", shown(path), error.message);
        arrays
            .served
            .with_names(target.array, |names| names.hinder(target.seat.uuid, Hindrance::Kept, reason));
    }
}
