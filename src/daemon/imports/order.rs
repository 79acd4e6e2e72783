//! `calpe import`.
//!
//! Invariants: an import that fails has changed nothing; one failure among several neither hides the arrays
//! that were imported nor passes for success. Must not know how requests arrive.

use super::configured::{is_found_again, name_of, not_the_configured, served_all_the_same};
use super::list::{options_of, places};
use super::opening::{explained, losses, open_and_serve, served_line, unread_lines};
use crate::control::{ArrayReport, ErrorCode, LogState};
use crate::daemon::arrays::outcome::CLOSING_WAIT;
use crate::daemon::arrays::outcome::{Done, Outcome, refusal};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::serve::check_servable;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::devices::import::{self, ImportError};
use crate::daemon::devices::places::{covers, directory_of};
use crate::daemon::devices::search::{Found, Search, search_patiently};
use crate::member::await_closings;
use calpe_core::format::Superblock;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long an import waits for the replay of the log, so that its reply can say what could not be replayed.
/// Replay takes milliseconds to seconds, and longer only where a member does not answer.
const REPLAY_WAIT: Duration = Duration::from_secs(5);

/// Time between two checks whether the replay has ended.
const REPLAY_LOOK: Duration = Duration::from_millis(5);

/// What is to be imported, and how.
pub(crate) struct ImportOrder {
    /// Name or uuid of the array; none with `all`.
    pub array: Option<String>,
    /// Every array found.
    pub all: bool,
    /// Where to look beside the configured places.
    pub dirs: Vec<PathBuf>,
    /// Start even where the present members cannot prove that they are the current ones.
    pub force: bool,
    /// Do not serve it again after a restart.
    pub once: bool,
    /// Only say what would happen.
    pub dry_run: bool,
}

/// Imports arrays, or only says what would happen.
pub(crate) fn import(arrays: &Arrays, order: &ImportOrder) -> Outcome {
    let ImportOrder { array, all, dirs, force, once, dry_run } = order;
    let (array, all, force, dry_run) = (array.as_deref(), *all, *force, *dry_run);
    if let (Some(array), false) = (array, all)
        && (dirs.is_empty() || array.parse::<Uuid>().is_ok())
        && arrays.find(array, |_| ()).is_ok()
    {
        // This needs no search. Another array of the same name counts only in places that the request names.
        return Err(refusal(ErrorCode::Refused, format!("array '{array}' is served already")));
    }
    let places = places(arrays, dirs);
    // Devices that served an array belong to it wherever they are.
    let earlier = arrays.memory.earlier_paths(array.filter(|_| !all));
    let limits = arrays.look_limits(array.filter(|_| !all));
    let found = search_patiently(&places, &earlier, &limits);
    found.check_whole()?;
    let is_served = |uuid: &Uuid| arrays.served.uuids().contains(uuid);
    let is_there = |members: &[Found]| members.iter().any(|member| !member.remembered);
    let chosen: Vec<Uuid> = match (array, all) {
        (Some(array), false) => {
            let uuid = found.choose(array, &places).map_err(|error| match error {
                ImportError::Ambiguous { uuids, .. } if uuids.iter().any(is_served) => {
                    let others = uuids.iter().filter(|uuid| !is_served(uuid));
                    let others = others.map(|uuid| format!("{uuid}{}", options_of(dirs)));
                    refusal(ErrorCode::Refused, format!(
                        "array '{array}' is served already; another one of that name, which was found besides, can be \
                         imported only when that is exported: 'calpe export {array}', then 'calpe import {}'",
                        others.collect::<Vec<_>>().join("' or 'calpe import ")
                    ))
                }
                error => error.into(),
            })?;
            if is_served(&uuid) {
                return Err(refusal(ErrorCode::Refused, format!("array '{array}' is served already")));
            }
            vec![uuid]
        }
        (None, true) => {
            // Without directories, remembered arrays are meant as well, as in the list.
            let is_meant = |members: &[Found]| dirs.is_empty() || is_there(members);
            let not_served = found.arrays.iter().filter(|(uuid, _)| !is_served(uuid));
            not_served.filter(|(_, members)| is_meant(members)).map(|(uuid, _)| *uuid).collect()
        }
        _ => {
            return Err(refusal(ErrorCode::BadRequest, "name one array to import, or ask for all of them"));
        }
    };
    let mut done = Done { warnings: found.warnings.clone(), ..Done::default() };
    if all {
        // Further arrays may be among them.
        done.warnings.extend(found.forbidden_in(|_| true));
    }
    let mut lines = Vec::new();
    let mut failures = Vec::new();
    // Names of arrays that this dry run would have imported before.
    let mut taken: Vec<String> = Vec::new();
    for uuid in chosen {
        let name = name_of(&found.arrays[&uuid]).to_owned();
        let imported = match dry_run {
            true => would_import(arrays, &found, uuid, force, &taken, dirs),
            false => import_one(arrays, &found, uuid, force),
        };
        match imported {
            Ok(Done { message, warnings, failures: refused }) => {
                failures.extend(refused);
                lines.push(message);
                for warning in warnings {
                    if !done.warnings.contains(&warning) {
                        done.warnings.push(warning);
                    }
                }
                let is_configured = arrays.settings.is_configured(uuid, &name);
                let unkept = if dry_run && *once {
                    arrays.memory.not_again(uuid)
                } else if dry_run {
                    let why = arrays.memory.trouble();
                    why.map(|why| format!("the import would not be remembered: {why}"))
                } else {
                    let places = with_members(&places, &found.arrays[&uuid]);
                    let again = Some(&places).filter(|_| !once).map(Vec::as_slice);
                    let unkept = arrays.memory.import_again(uuid, again);
                    if *once { arrays.memory.not_again(uuid) } else { unkept }
                };
                // A restart serves a configured array in any case, if its members are found.
                let members = found.arrays[&uuid].iter().map(|member| &*member.path);
                let is_found = is_configured && is_found_again(arrays, uuid, &name, members);
                done.warnings.extend(unkept.filter(|_| !is_found));
                done.warnings.extend(match once {
                    true => served_all_the_same(arrays, &found, uuid, &name),
                    false => not_the_configured(arrays, &found, uuid),
                });
                taken.push(name);
            }
            Err(error) => failures.push(error),
        }
    }
    // One failure among several must neither hide the arrays that were imported nor pass for success.
    match (lines.is_empty(), failures.last()) {
        (true, Some(error)) => {
            let texts: Vec<_> = failures.iter().map(|error| error.message.as_str()).collect();
            return Err(refusal(error.code, texts.join("\n")));
        }
        (true, None) => lines.push("nothing to import".into()),
        (false, _) => {}
    }
    done.message = lines.join("\n");
    done.failures = failures;
    Ok(done)
}

fn import_one(arrays: &Arrays, found: &Search, array: Uuid, force: bool) -> Outcome {
    let options =
        ServeOptions { force, ..arrays.settings.options_for(name_of(&found.arrays[&array]), array) };
    let before = arrays.events.next();
    let (report, mut warnings) = open_and_serve(arrays, found, array, options, &[])?;
    let report = when_replayed(arrays, report);
    warnings.extend(losses(arrays, &report, before));
    let refused = report.log.reason.as_ref().filter(|_| report.log.state == LogState::Refused);
    let failure = |reason| {
        let name = &report.name;
        let what =
            format!("array '{name}' cannot be served: {reason}; 'calpe status {name}' says what to do");
        refusal(ErrorCode::Refused, what)
    };
    let failures = refused.map(failure).into_iter().collect();
    Ok(Done { message: served_line(&report), warnings, failures })
}

/// The report of an array that has just begun to be served, after its log is replayed or
/// [`REPLAY_WAIT`] is over.
fn when_replayed(arrays: &Arrays, mut report: ArrayReport) -> ArrayReport {
    let begun = Instant::now();
    while report.log.state == LogState::Replaying && begun.elapsed() < REPLAY_WAIT {
        std::thread::sleep(REPLAY_LOOK);
        match arrays.status(Some(&report.uuid.to_string())).map(|mut reports| reports.pop()) {
            Ok(Some(now)) => report = now,
            // Another request has stopped it meanwhile.
            Ok(None) | Err(_) => break,
        }
    }
    report
}

/// What an import would do. Opens and locks the devices: whether that works is part of the answer. `taken`:
/// names of arrays that would be imported before it; `dirs`: the directories of the request.
fn would_import(
    arrays: &Arrays,
    found: &Search,
    array: Uuid,
    force: bool,
    taken: &[String],
    dirs: &[PathBuf],
) -> Outcome {
    let members = &found.arrays[&array];
    let options = ServeOptions { force, ..arrays.settings.options_for(name_of(members), array) };
    let _change = arrays.begin_change(array)?;
    let opened = import::open(members, force, options.limits.local);
    let mut opened = opened.map_err(|error| explained(arrays, error, found, array))?;
    opened.explain_missing(found, |_, device| arrays.memory.earlier_path(array, device));
    opened.warnings.extend(unread_lines(found, &opened));
    let superblock = &opened.first().superblock;
    check_servable(arrays, superblock, options)?;
    let Superblock { name, .. } = superblock;
    if taken.contains(name) {
        let text = format!(
            "another array named '{name}' would be imported before it, and two of one name are not served at once: import the \
             one that you want by its uuid, this one with 'calpe import {array}{}'",
            options_of(dirs)
        );
        return Err(refusal(ErrorCode::Refused, text));
    }
    if arrays.find(name, |_| ()).is_ok() {
        let text = format!("an array named '{name}' is served already: export that one first");
        return Err(refusal(ErrorCode::Refused, text));
    }
    let replay = match opened.lanes.iter().all(|lane| lane.assembled.superblock.clean) {
        true => "",
        false => "; whether its redo log can be replayed shows only when it is imported",
    };
    let message = format!(
        "would import array '{name}' with {} of {} members{replay}",
        opened.lanes.iter().map(|lane| lane.assembled.live.len()).min().unwrap_or(0),
        superblock.members.len()
    );
    let left_out = opened.left_out.iter().map(|left| left.reason.clone());
    let warnings = opened.warnings.iter().cloned().chain(left_out).collect();
    drop(opened);
    await_closings(CLOSING_WAIT);
    Ok(Done { message, warnings, ..Done::default() })
}

/// Where a restart looks for the members: these places, and the directories of members that were
/// found elsewhere.
fn with_members(places: &[PathBuf], members: &[Found]) -> Vec<PathBuf> {
    let mut all = places.to_vec();
    for member in members {
        if !all.iter().any(|place| covers(place, &member.path)) {
            all.extend(directory_of(&member.path));
        }
    }
    all
}
