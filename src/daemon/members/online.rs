//! Brings members back: by command, or as soon as they are there again.
//!
//! Must not know how requests arrive, or when a member is tried.

use super::hand_over::{By, NotTaken, hand_over, own_devices};
use super::own_device::open_own;
use super::target::{self, Target, state_of};
use crate::control::{ErrorCode, MemberRef};
use crate::daemon::arrays::outcome::{Done, Outcome, refusal};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::returns::Own;
use crate::daemon::devices::looking::identity_of;
use crate::daemon::devices::search::Hindrance;
use crate::daemon::reactor::ReactorError;
use calpe_core::format::MemberState;
use calpe_core::units::shown;
use calpe_core::volume::{AdminRefusal, AdminRequest};
use std::path::Path;

/// Brings a member back that is out, or only says what would happen.
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
        let request = |device| AdminRequest::Online { member: target.index, device };
        let requests = own_devices(arrays, &target, &own).into_iter().map(request);
        let would = arrays.would(target.array, &target.name, requests.collect());
        let path = own.0.path();
        let would = would.inspect_err(|error| note_kept(arrays, &target, path, error))?;
        return Ok(Done::line(format!("{would} ({})", shown(path))));
    }
    let done = bring_online(arrays, &target, own, By::Command)?;
    arrays.returns.back(target.superblock.array, target.index);
    Ok(done)
}

/// Hands a member's own device, which [fits](super::hand_over::check_fit), to its array again.
pub(crate) fn bring_online(arrays: &Arrays, target: &Target, own: Own, by: By) -> Outcome {
    let new = own_devices(arrays, target, &own);
    let (device, _) = own;
    let request = |member, device| AdminRequest::Online { member, device };
    let taken = hand_over(arrays, target, &device, new, by, request);
    if let Err(NotTaken::ByArray(error)) = &taken {
        note_kept(arrays, target, device.path(), error);
    }
    Ok(taken?)
}

/// Records that a member was not taken back. If its device holds data that may be nowhere else, the status
/// says so from now on: the array does not record devices that it has refused.
fn note_kept(arrays: &Arrays, target: &Target, path: &Path, error: &ReactorError) {
    if let ReactorError::Refused(AdminRefusal::Kept { .. }) = error {
        let reason = format!("not taken back: {}: {error}", shown(path));
        arrays
            .served
            .with_names(target.array, |names| names.hinder(target.seat.uuid, Hindrance::Kept, reason));
    }
}
