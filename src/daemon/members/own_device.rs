//! Finds and opens the own device of a member that is out.
//!
//! Invariant: a device that is opened is locked and proven to be the member's. Must not know what it is
//! opened for.

use super::hand_over::{check_fit, check_unused};
use super::target::Target;
use crate::control::{ErrorCode, RequestError};
use crate::daemon::arrays::changes::Change;
use crate::daemon::arrays::held::Held;
use crate::daemon::arrays::outcome::refusal;
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::returns::{ATTEMPT_WAIT, Own};
use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::devices::looking::{open_member, patience};
use crate::daemon::devices::search::{Hindrance, overwritten};
use crate::member::patience::within;
use crate::member::{Access, DeviceError, Identity};
use calpe_core::units::{quoted, shown};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Opens the own device of a member that is out: at this path, or wherever it is.
pub(crate) fn open_own(
    arrays: &Arrays,
    target: &Target,
    path: Option<&Path>,
    _change: &Change,
) -> Result<Own, RequestError> {
    // A device that is still closing is recognised by its identity. Its path may lead to something else by
    // now.
    let leaving = target.seat.found.and_then(|found| found.identity).is_some_and(Identity::is_leaving);
    if let (true, None, Some(path)) = (leaving, path, &target.seat.path) {
        return Err(DeviceError::Unfinished { path: path.clone() }.into());
    }
    let path = match path {
        Some(path) => {
            check_unused(arrays, target, path, &format!("name the device of member {}", target.index))?;
            path.to_owned()
        }
        None => where_is(arrays, target)?,
    };
    // An attempt to bring the member back may have the device locked. No other begins during this change of
    // the array.
    let attempt = arrays.returns.interrupt(target.superblock.array, target.index);
    drop(attempt.map(|attempt| attempt.recv_timeout(ATTEMPT_WAIT)));
    // Locked even in a dry run: whether that works is part of the answer.
    let (device, lanes) = match arrays.held(target.array, target.index) {
        Held::Shared(device) if device.is_at(&path) => {
            let limit = patience(target.limits);
            within(&path, "read its superblocks", limit, move || {
                let lanes = DeviceLanes::read(&device);
                (device, lanes)
            })?
        }
        Held::Nowhere => open_member(&path, Access::Exclusive, target.limits)?,
        Held::Shared(_) => return Err(refusal(ErrorCode::Refused, a_copy(target, &path))),
        Held::Alone => {
            return Err(match open_member(&path, Access::Exclusive, target.limits) {
                Err(DeviceError::Locked { .. }) => refusal(ErrorCode::Device, held_alone(target, &path)),
                Err(error) => error.into(),
                Ok(_) => refusal(ErrorCode::Refused, a_copy(target, &path)),
            });
        }
    };
    target.check_own(&device, lanes.first())?;
    check_fit(target, &device)?;
    Ok((device, lanes))
}

/// Why a device is not the one that lanes have in service, whatever it says of itself.
fn a_copy(target: &Target, path: &Path) -> String {
    let Target { name, index, .. } = target;
    format!(
        "{} is not the device that lanes of the array have in service as member {index}, but a copy of it: bring that one back with \
         'calpe online {name} {index}'",
        shown(path)
    )
}

/// Why a device that lanes have in service cannot come back to the others, and what helps.
fn held_alone(target: &Target, path: &Path) -> String {
    let Target { name, index, .. } = target;
    format!(
        "{}: lanes of the array have it in service, and on a filesystem that may keep its callers waiting (FUSE, NFS and \
         the like) others cannot use it beside them: take it out with 'calpe offline {name} {index}', and bring it back with 'calpe \
         online {name} {index}'; where a lane cannot do without it, replace it with 'calpe replace {name} {index} NEW', by another \
         device",
        shown(path)
    )
}

/// Where the own device of a member is: at its last place, beside other members, or in the configured places.
fn where_is(arrays: &Arrays, target: &Target) -> Result<PathBuf, RequestError> {
    let places = arrays.settings.search_places();
    let wider =
        arrays.served.with_names(target.array, |names| names.places_around(&places)).unwrap_or_default();
    let mut own: Vec<PathBuf> = target.seat.path.clone().into_iter().collect();
    let begun = Instant::now();
    let there = target.seek(&own);
    // A device at the place where it was in service since the daemon started is no copy.
    if target.seat.found.is_some() && !there.copies.is_empty() {
        return target.current_of(&there.copies);
    }
    if there.copies.is_empty() {
        own.clear();
        // It did not answer in time, and would not in a wider search.
        if begun.elapsed() >= patience(target.limits) && there.cut_off.is_none() && !there.is_overwritten {
            return Err(target.not_found(&there));
        }
    }
    let places: Vec<PathBuf> = own.into_iter().chain(wider).collect();
    let all = target.seek(&places);
    if !all.copies.is_empty() {
        return target.current_of(&all.copies);
    }
    if let Some(why) = there.cut_off.clone().or(all.cut_off) {
        arrays.served.with_names(target.array, |names| {
            names.hinder(target.seat.uuid, Hindrance::CutOff, why.clone());
        });
        let (name, index) = (&target.name, target.index);
        return Err(refusal(
            ErrorCode::Device,
            format!(
                "{why}; {} cannot come back from there. To replace it: 'calpe replace {name} {index} NEW', unless the array has \
                 FAILED; if its device is at another path now: 'calpe online {name} {index} --path PATH'",
                target.describe()
            ),
        ));
    }
    if let (true, Some(path)) = (there.is_overwritten, &target.seat.path) {
        arrays.served.with_names(target.array, |names| {
            names.hinder(target.seat.uuid, Hindrance::Overwritten, overwritten(path));
        });
        let (name, index) = (&target.name, target.index);
        return Err(refusal(
            ErrorCode::Device,
            format!(
                "{}; {} cannot come back from there. To build it anew: 'calpe replace {name} {index} {}', unless the array has \
                 FAILED; if its device is at another path now: 'calpe online {name} {index} --path PATH'",
                overwritten(path),
                target.describe(),
                quoted(path)
            ),
        ));
    }
    Err(target.not_found(&there))
}
