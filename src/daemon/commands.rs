//! Administrators' commands as events: what was asked for, by whom, and the outcome. Must not carry
//! anything out.

use crate::control::{GpuDrill, MemberRef, Reply, Request, ScrubAction};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::events::{News, kinds};
use crate::daemon::members::target;
use calpe_core::units::shown;
use calpe_core::volume::NoticeLevel;

/// A request for a change, in words.
pub(super) struct Command {
    array: Option<String>,
    member: Option<MemberRef>,
    text: String,
}

/// The command in a request; none for requests that only ask, and for dry runs.
pub(super) fn command_of(request: &Request) -> Option<Command> {
    let of = |array: &str, member: Option<&MemberRef>, text: String| {
        Some(Command { array: Some(array.to_owned()), member: member.cloned(), text })
    };
    let forced = |force: bool| if force { " --force" } else { "" };
    match request {
        Request::Ping { .. }
        | Request::Status { .. }
        | Request::Events { .. }
        | Request::History { .. }
        | Request::ListImportable { .. } => None,
        Request::Import { dry_run: true, .. }
        | Request::Export { dry_run: true, .. }
        | Request::Fail { dry_run: true, .. }
        | Request::Offline { dry_run: true, .. }
        | Request::Online { dry_run: true, .. }
        | Request::Replace { dry_run: true, .. }
        | Request::CancelReplace { dry_run: true, .. }
        | Request::Scrub { dry_run: true, .. }
        | Request::Repair { dry_run: true, .. }
        | Request::Clear { dry_run: true, .. }
        | Request::GpuDrill { dry_run: true, .. }
        | Request::Shutdown { dry_run: true } => None,
        Request::Import { array, force, once, .. } => {
            let once = if *once { " --once" } else { "" };
            let which = array.as_deref().unwrap_or("-a");
            Some(Command {
                array: array.clone(),
                member: None,
                text: format!("import {which}{}{once}", forced(*force)),
            })
        }
        Request::Export { array, force, .. } => of(array, None, format!("export{}", forced(*force))),
        Request::Fail { array, member, .. } => of(array, Some(member), format!("fail {member}")),
        Request::Offline { array, member, .. } => of(array, Some(member), format!("offline {member}")),
        Request::Online { array, member, path, .. } => {
            let path = path.as_ref().map(|path| format!(" --path {}", shown(path))).unwrap_or_default();
            of(array, Some(member), format!("online {member}{path}"))
        }
        Request::Replace { array, old, new, force, .. } => {
            of(array, Some(old), format!("replace {old} {}{}", shown(new), forced(*force)))
        }
        Request::CancelReplace { array, member, .. } => {
            of(array, Some(member), format!("replace --cancel {member}"))
        }
        Request::Scrub { array, action, .. } => {
            let option = match action {
                ScrubAction::Start => "",
                ScrubAction::Pause => " --pause",
                ScrubAction::Stop => " --stop",
            };
            of(array, None, format!("scrub{option}"))
        }
        Request::Repair { array, .. } => of(array, None, "repair".into()),
        Request::Clear { array, member, .. } => {
            let which = member.as_ref().map(|member| format!(" {member}")).unwrap_or_default();
            of(array, member.as_ref(), format!("clear{which}"))
        }
        Request::GpuDrill { drill, .. } => {
            let drill = match drill {
                GpuDrill::Error => "error",
                GpuDrill::Hang => "hang",
            };
            Some(Command { array: None, member: None, text: format!("gpu drill {drill}") })
        }
        Request::Shutdown { dry_run: false } => {
            Some(Command { array: None, member: None, text: "shutdown".into() })
        }
    }
}

/// Makes an event of a command and its outcome.
pub(super) fn note_command(arrays: &Arrays, command: Command, uid: u32, reply: &Reply) {
    let Command { array, member, text } = command;
    let text = match reply {
        Reply::Error(error) => format!("command '{text}' of uid {uid} was refused: {error}"),
        Reply::Done { message, failures, .. } => {
            let refused = failures.iter().map(|error| format!("\nrefused: {error}"));
            format!("command '{text}' of uid {uid}: {message}{}", refused.collect::<String>())
        }
        _ => format!("command '{text}' of uid {uid}"),
    };
    // Events carry its name, even if the request gave its uuid or path.
    let name = array.as_ref().and_then(|array| {
        let served = arrays.find(array, |served| served.names.name.clone()).ok();
        served.or_else(|| arrays.memory.earlier_name(array.parse().ok()?))
    });
    let member = match (&array, member) {
        (_, Some(MemberRef::Index(index))) => Some(index),
        (Some(array), Some(member)) => target::find(arrays, array, &member).ok().map(|target| target.index.0),
        _ => None,
    };
    let uuid = array.as_ref().and_then(|array| array.parse().ok());
    let name = name.or(array);
    let news = News::new(name.as_deref(), kinds::COMMAND, NoticeLevel::Info, text);
    arrays.events.tell(News { uid: Some(uid), uuid, member, ..news });
}
