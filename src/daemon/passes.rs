//! `calpe scrub` and `calpe repair`. Must not know how requests arrive, nor how an array checks
//! itself.

use super::arrays::outcome::{Done, Outcome};
use super::arrays::registry::Arrays;
use crate::control::ScrubAction;
use calpe_core::volume::AdminRequest;

/// Starts, pauses or stops a scrub, or only says what would happen.
pub(crate) fn scrub(arrays: &Arrays, array: &str, action: ScrubAction, dry_run: bool) -> Outcome {
    let (id, name) = arrays.find(array, |served| (served.id, served.names.name.clone()))?;
    let request = match action {
        ScrubAction::Start => AdminRequest::ScrubStart,
        ScrubAction::Pause => AdminRequest::ScrubPause,
        ScrubAction::Stop => AdminRequest::ScrubStop,
    };
    let message = arrays.ask(id, &name, request, dry_run)?;
    let warning = match dry_run {
        false => arrays.remember_scrub(id),
        true => arrays
            .memory
            .cannot_remember()
            .filter(|_| matches!(action, ScrubAction::Pause))
            .map(|why| format!("the pause would not be remembered: {why}")),
    };
    Ok(Done { message, warnings: warning.into_iter().collect(), ..Done::default() })
}

/// Starts a repair, or only says what would happen.
pub(crate) fn repair(arrays: &Arrays, array: &str, dry_run: bool) -> Outcome {
    let (id, name) = arrays.find(array, |served| (served.id, served.names.name.clone()))?;
    Ok(Done::line(arrays.ask(id, &name, AdminRequest::Repair, dry_run)?))
}
