//! `calpe scrub` and `calpe repair`. Must not know how requests arrive, nor how an array checks
//! itself.

use super::arrays::outcome::{Done, Outcome};
use super::arrays::registry::Arrays;
use crate::control::ScrubAction;
use calpe_core::volume::AdminRequest;

/// Starts, pauses or stops a scrub, or only tells.
pub(crate) fn scrub(arrays: &Arrays, array: &str, action: ScrubAction, dry_run: bool) -> Outcome {
    let (id, name) = arrays.find(array, |served| (served.id, served.names.name.clone()))?;
    let request = match action {
        ScrubAction::Start => AdminRequest::ScrubStart,
        ScrubAction::Pause => AdminRequest::ScrubPause,
        ScrubAction::Stop => AdminRequest::ScrubStop,
    };
    if dry_run {
        let mut done = arrays.would(id, &name, request)?;
        let why = arrays.memory.cannot_remember().filter(|_| matches!(action, ScrubAction::Pause));
        done.warnings.extend(why.map(|why| format!("the pause would not be remembered: {why}")));
        return Ok(done);
    }
    let outcome = arrays.reactor.admin(id, request, Vec::new())?;
    let warnings = arrays.remember_scrub(id).into_iter().collect();
    Ok(Done { message: format!("array '{name}': {}", outcome.0), warnings, ..Done::default() })
}

/// Starts a repair, or only tells.
pub(crate) fn repair(arrays: &Arrays, array: &str, dry_run: bool) -> Outcome {
    let (id, name) = arrays.find(array, |served| (served.id, served.names.name.clone()))?;
    if dry_run {
        return arrays.would(id, &name, AdminRequest::Repair);
    }
    let outcome = arrays.reactor.admin(id, AdminRequest::Repair, Vec::new())?;
    Ok(Done::line(format!("array '{name}': {}", outcome.0)))
}
