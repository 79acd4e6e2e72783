//! Opens and serves an array that was found, and collects warnings about it.
//!
//! Must not know who asks for it, nor how arrays are assembled.

use crate::control::{ArrayReport, ErrorCode, Event, LogState, RequestError, Severity};
use crate::daemon::arrays::outcome::refusal;
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::serve::serve;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::arrays::waiting::NotServed;
use crate::daemon::config::ArrayChoice;
use crate::daemon::devices::import::{self, ImportError, Opened, OpenedLane};
use crate::daemon::devices::search::Search;
use calpe_core::format::MemberState;
use calpe_core::units::{HumanSize, MemberIndex};
use calpe_core::volume::NoticeKind;
use std::collections::BTreeMap;
use uuid::Uuid;

/// Most lines about paths that could not be read, where members are missing.
const UNREAD_TOLD: usize = 8;

/// Opens an array that was found, and begins to serve it. Returns its report and warnings, a line each. The
/// lines of `told` become events of the array.
///
/// # Errors
/// As [`import::open`] and [`serve`].
pub(crate) fn open_and_serve(
    arrays: &Arrays,
    found: &Search,
    array: Uuid,
    options: ServeOptions,
    told: &[String],
) -> Result<(ArrayReport, Vec<String>), RequestError> {
    let _change = arrays.begin_change(array)?;
    let (opened, warnings) = open_found(arrays, found, array, options, told)?;
    Ok((serve(arrays, opened, options)?, warnings))
}

/// As [`open_and_serve`], for an awaited array, unless it is given up meanwhile. Warnings of the
/// search become events.
pub(crate) fn open_and_serve_awaited(
    arrays: &Arrays,
    which: &ArrayChoice,
    found: &Search,
    array: Uuid,
    options: ServeOptions,
) -> Result<ArrayReport, NotServed> {
    let _change = arrays.begin_change(array)?;
    if arrays.awaited.was_exported(which, array) {
        return Err(refusal(ErrorCode::Refused, format!("array '{which}' was exported meanwhile")).into());
    }
    let (opened, _) = open_found(arrays, found, array, options, &found.warnings)?;
    let _not_meanwhile = arrays.awaited.keep_awaiting();
    if !arrays.awaited.is_awaited(which) {
        return Err(refusal(ErrorCode::Refused, format!("array '{which}' is not awaited any more")).into());
    }
    Ok(serve(arrays, opened, options)?)
}

/// Opens an array that was found. Also returns warnings.
fn open_found(
    arrays: &Arrays,
    found: &Search,
    array: Uuid,
    options: ServeOptions,
    told: &[String],
) -> Result<(Opened, Vec<String>), ImportError> {
    arrays.returns.await_attempts(array);
    let opened = import::open(&found.arrays[&array], options.force, options.limits.local);
    let mut opened = opened.map_err(|error| explained(arrays, error, found, array))?;
    opened.explain_missing(found, |_, device| arrays.memory.earlier_path(array, device));
    opened.warnings.extend(lost_replacement_lines(arrays, &opened));
    opened.warnings.extend(unread_lines(found, &opened));
    let mut warnings = opened.warnings.clone();
    warnings.extend(opened.left_out.iter().map(|left| left.reason.clone()));
    let told: Vec<String> = opened.not_told(told).cloned().collect();
    opened.warnings.splice(0..0, told);
    Ok((opened, warnings))
}

/// Adds what is known of missing members to an error.
pub(crate) fn explained(arrays: &Arrays, error: ImportError, found: &Search, array: Uuid) -> ImportError {
    let members = &found.arrays[&array];
    let earlier = |device| arrays.memory.earlier_path(array, device);
    error.explained(|| {
        let newest = import::newest_found(members);
        newest.map_or_else(BTreeMap::new, |newest| found.about_missing(members, newest, earlier))
    })
}

/// Warnings about replacements whose devices are not there, a line each.
pub(crate) fn lost_replacement_lines(arrays: &Arrays, opened: &Opened) -> Vec<String> {
    let name = &opened.first().superblock.name;
    let line = |(member, why): (MemberIndex, String)| {
        format!(
            "the replacement of member {member} that was being built is given up: {why}; begin again with 'calpe replace {name} \
             {member} NEW'"
        )
    };
    let lost = |lane: &OpenedLane| arrays.memory.lost_replacements(&lane.assembled, &opened.left_out);
    let lost: BTreeMap<MemberIndex, String> = opened.lanes.iter().flat_map(lost).collect();
    lost.into_iter().map(line).collect()
}

/// What the start of an array has lost, a line each, from its events since number `since`.
pub(crate) fn losses(arrays: &Arrays, report: &ArrayReport, since: u64) -> Vec<String> {
    let name = &report.name;
    let is_loss = |event: &Event| {
        let is_dropped = event.kind == NoticeKind::LogDropped.name();
        // A refusal is the failure of the command, not a warning.
        let is_refusal = event.kind == NoticeKind::ArrayRefused.name();
        let is_told = event.severity == Severity::Error && !is_refusal;
        event.array.as_deref() == Some(name) && (is_told || is_dropped)
    };
    let events = arrays.events.since(since).into_iter().filter(is_loss);
    let mut lines: Vec<String> = events.map(|event| format!("array '{name}': {}", event.text)).collect();
    if report.log.state == LogState::Replaying {
        lines.push(format!(
            "array '{name}': its redo log is still being replayed; 'calpe events' tells what cannot be, if anything cannot"
        ));
    }
    lines
}

/// One line on an array that has just begun to be served.
#[must_use]
pub(crate) fn served_line(report: &ArrayReport) -> String {
    let shape = format!("{}+{}, {}", report.data, report.parity, HumanSize(report.volume.bytes));
    let uri = report.uris.first().map(|uri| format!(", {uri}")).unwrap_or_default();
    let replay = match report.log.state {
        LogState::Replaying => ", and its redo log is being replayed",
        _ => "",
    };
    format!("array '{}' ({shape}) is {}{replay}{uri}", report.name, report.state)
}

/// Paths that could not be read, a line each, if members are missing: the members may be there.
pub(crate) fn unread_lines(found: &Search, opened: &Opened) -> Vec<String> {
    let mut seats = opened.lanes.iter().flat_map(|lane| &lane.assembled.seats);
    let is_missing = seats.any(|seat| seat.state == MemberState::Missing);
    let lines = opened.not_told(&found.unread).take(UNREAD_TOLD).cloned();
    if is_missing { lines.collect() } else { Vec::new() }
}
