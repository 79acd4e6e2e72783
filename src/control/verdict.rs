//! What the facts of an array mean: the exit code of `status --test`, and the sentences that say
//! what state an array is in and what to do. One place, so that text, JSON and exit code never
//! disagree.

mod returning;
mod without_data;

use self::returning::wait_for;
use self::without_data::{beside_absent, explain_without_data, lacks_data};
use super::{ArrayReport, ArrayState, Condition, LogState, MemberReport, MemberState, ScanKind, StartReport};
use calpe_core::units::{Count, Printable, quoted};
use std::path::Path;

/// What `status --test` answers, with its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All is well.
    Healthy = 0,
    /// Degraded, a scrub found errors, blocks are beyond repair, or clients saw errors.
    Degraded = 1,
    /// Failed or unusable.
    Failed = 2,
    /// Not known: no daemon, no such array, or no array at all.
    CannotTell = 4,
}

impl Verdict {
    /// The exit code.
    #[must_use]
    pub(crate) const fn exit_code(self) -> u8 {
        self as u8
    }
}

/// The worst of all arrays. Without any array the answer is not healthy: an array may have failed
/// to start.
#[must_use]
pub(crate) fn verdict(arrays: &[ArrayReport]) -> Verdict {
    let verdicts = || arrays.iter().map(verdict_of);
    [Verdict::Failed, Verdict::Degraded, Verdict::Healthy]
        .into_iter()
        .find(|verdict| verdicts().any(|of| of == *verdict))
        .unwrap_or(Verdict::CannotTell)
}

fn verdict_of(array: &ArrayReport) -> Verdict {
    let troubled = scrub_errors(array) > 0 || array.errors.client > 0 || !array.lost.is_empty();
    let troubled = troubled || !array.set_aside.is_empty() || !array.unreadable.is_empty();
    let troubled = troubled || !array.unconfirmed.is_empty() || array.unreadable_pages > 0;
    let is_grave = |condition| {
        matches!(
            condition,
            Condition::Full
                | Condition::KeptDespiteErrors
                | Condition::NotMended
                | Condition::LacksBlocks
                | Condition::Split
        )
    };
    let mut conditions = array.members.iter().flat_map(|member| member.conditions.iter().copied());
    let troubled = troubled || conditions.any(is_grave);
    match array.state {
        _ if array.log.state == LogState::Refused => Verdict::Failed,
        ArrayState::Failed | ArrayState::Waiting => Verdict::Failed,
        ArrayState::Degraded => Verdict::Degraded,
        ArrayState::Online if troubled => Verdict::Degraded,
        ArrayState::Online => Verdict::Healthy,
    }
}

/// Whether `status --test` answers healthy for this array alone.
#[must_use]
pub(crate) fn is_healthy(array: &ArrayReport) -> bool {
    verdict_of(array) == Verdict::Healthy
}

/// What state an array is in, and what to do; both empty when there is nothing to say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Explanation {
    /// For [`ArrayReport::status`].
    pub status: String,
    /// For [`ArrayReport::action`].
    pub action: String,
}

/// Puts the facts of an array in sentences. Reads every field but the sentences of the report.
#[must_use]
pub(crate) fn explain(array: &ArrayReport) -> Explanation {
    let absent: Vec<_> = array.members.iter().filter(|member| !in_service(member)).collect();
    if let Some(start) = &array.start {
        return explain_start(start);
    }
    let explanation = match array.state {
        ArrayState::Waiting => Explanation::default(),
        _ if array.log.state == LogState::Refused && absent.len() <= usize::from(array.parity) => {
            explain_refused(array)
        }
        ArrayState::Failed => explain_failed(array, &absent),
        _ if lacks_data(array) => beside_absent(array, &absent, explain_without_data(array)),
        ArrayState::Degraded => explain_degraded(array, &absent),
        ArrayState::Online => explain_online(array),
    };
    let explanation = with_split(array, with_unanswered(&absent, explanation));
    with_full(array, with_new_device_full(array, explanation))
}

/// Adds which members are on different devices, and how to end that.
fn with_split(array: &ArrayReport, explanation: Explanation) -> Explanation {
    let split: Vec<_> = array.members.iter().filter(|member| member.is_split()).collect();
    let Some(first) = split.first() else { return explanation };
    let join = |first: &str, second: String| format!("{first} {second}").trim_start().to_owned();
    Explanation {
        status: join(
            &explanation.status,
            format!("Lanes have different devices as {}: none of these can be spared.", called(&split)),
        ),
        action: join(
            &explanation.action,
            format!(
                "Keep all devices of {}, and replace it once more: 'calpe replace {} {} NEW'.",
                called(&split),
                array.name,
                first.index
            ),
        ),
    }
}

/// Adds that members with unfinished operations cannot come back yet.
fn with_unanswered(absent: &[&MemberReport], explanation: Explanation) -> Explanation {
    let hangs = |member: &&&MemberReport| member.conditions.contains(&Condition::Unanswered);
    let hanging: Vec<&MemberReport> = absent.iter().filter(hangs).copied().collect();
    if hanging.is_empty() {
        return explanation;
    }
    let (was, them) = if hanging.len() == 1 { ("was", "it") } else { ("were", "they") };
    let action = format!(
        "{} What was asked of {} before {them} {was} taken out has not ended, and {them} cannot come back before it has: mend what \
         hangs there, or abort it (docs/members.md).",
        explanation.action,
        names(&hanging)
    );
    Explanation { action: action.trim_start().to_owned(), ..explanation }
}

/// Adds that a device which is being built has no room.
fn with_new_device_full(array: &ArrayReport, explanation: Explanation) -> Explanation {
    let has = |member: &MemberReport, condition| member.conditions.contains(&condition);
    let is_built_full = |member: &MemberReport| is_rebuilding(member) && has(member, Condition::Full);
    let is_full = |member: &&MemberReport| has(member, Condition::NewDeviceFull) || is_built_full(member);
    let Some(member) = array.members.iter().find(is_full) else { return explanation };
    let (name, then) = match has(member, Condition::NewDeviceFull) {
        true => {
            let new = member.replacement.as_ref().map_or("its new device", |new| &new.name);
            (Printable(new).to_string(), "it is given up after 20 s of that")
        }
        false => (
            shown_name(member).to_string(),
            "it leaves after 20 s of that, and comes back when there is room",
        ),
    };
    let join = |first: String, second: String| format!("{first} {second}").trim_end().to_owned();
    Explanation {
        status: join(
            format!(
                "The storage under {name}, which is being built for member {}, is full: {then}.",
                member.index
            ),
            explanation.status,
        ),
        action: join(format!("Make room for {name}."), explanation.action),
    }
}

/// Adds what full storage means for clients and for redundancy, as the first thing: nothing else is
/// as urgent.
fn with_full(array: &ArrayReport, explanation: Explanation) -> Explanation {
    let is_served = array.state != ArrayState::Waiting && array.state != ArrayState::Failed;
    let is_full = |member: &&MemberReport| in_service(member) && member.conditions.contains(&Condition::Full);
    let full: Vec<&MemberReport> = array.members.iter().filter(is_full).collect();
    if full.is_empty() || !is_served {
        return explanation;
    }
    let which = match full[..] {
        [member] => format!("member {} ({})", member.index, shown_name(member)),
        _ => format!("{} members ({})", full.len(), names(&full)),
    };
    let Explanation { status, action } = explanation;
    let join = |first: String, second: String| match second.is_empty() {
        true => first,
        false => format!("{first} {second}"),
    };
    let what = match array.log.state {
        LogState::Replaying => {
            "the redo log is being replayed, which waits for room; requests wait meanwhile, and end in an error after 30 s"
        }
        LogState::Settling => {
            "what the redo log holds since the last stop waits for room to go in place; reads are served, and writes wait, and \
             end in an error ('no space') after 30 s"
        }
        _ => "writes that need new space there wait, and end in an error ('no space') after 30 s",
    };
    Explanation {
        status: join(
            format!(
                "The storage under {which} is full: {what}; a member that is full for 20 s leaves service where the others can \
                 do without it."
            ),
            status,
        ),
        action: join(
            match array.log.state {
                LogState::Replaying | LogState::Settling => {
                    "Make room there: the replay then goes on by itself, and what was written is safe.".into()
                }
                _ => "Make room there: writes then go on by themselves, and what was written is safe.".into(),
            },
            action,
        ),
    }
}

fn explain_start(start: &StartReport) -> Explanation {
    let status = match &start.problem {
        None => "It is not served yet: its members are being looked for.".to_owned(),
        Some(problem) => format!("It is not served: {problem}."),
    };
    Explanation { status, action: start.advice.clone() }
}

fn explain_failed(array: &ArrayReport, absent: &[&MemberReport]) -> Explanation {
    let served = match &array.failed_lanes[..] {
        [] => "I/O is refused and nothing is written.".to_owned(),
        failed => {
            let one = failed.len() == 1;
            let numbers: Vec<String> = failed.iter().map(u16::to_string).collect();
            format!(
                "lane{} {} {} FAILED: I/O on what {} of the volume is refused, and nothing is written there; the other lanes read \
                 and write, and no flush succeeds.",
                if one { "" } else { "s" },
                numbers.join(", "),
                if one { "has" } else { "have" },
                if one { "it has" } else { "they have" },
            )
        }
    };
    Explanation {
        status: format!(
            "{} of {} {} not in service, {} may be; {served}",
            absent.len(),
            Count::of(array.members.len(), "member"),
            Count::of(absent.len(), "member").are(),
            array.parity
        ),
        action: match absent.iter().all(|member| returns(member)) {
            true => wait_for(array, absent),
            false => bring_back(array, absent),
        },
    }
}

/// How to bring members of a failed array back. Only members that were in service until the array
/// failed can come back to it; others lack what was written since, and are caught up when the array
/// serves again.
fn bring_back(array: &ArrayReport, absent: &[&MemberReport]) -> String {
    let name = &array.name;
    let served_last = |member: &&&MemberReport| {
        member.conditions.contains(&Condition::ServedLast) && !is_overwritten(member) && !is_cut_off(member)
    };
    let first: Vec<&MemberReport> = absent.iter().filter(served_last).copied().collect();
    let rest: Vec<&MemberReport> = absent.iter().filter(|member| !served_last(member)).copied().collect();
    if absent.len() > usize::from(array.parity) + first.len() {
        return format!(
            "Reconnect the devices of members that are missing, then stop it with '{}' and import it again with 'calpe import \
             {name}', without --force: the members that could come back while it runs are too few, and nothing that was flushed is lost. ({})",
            export(array),
            names(absent)
        );
    }
    let commands: Vec<String> =
        first.iter().map(|member| format!("'calpe online {name} {}'", member.index)).collect();
    let then = match rest.is_empty() {
        true => String::new(),
        false => format!("; when the array serves again, the others can come back: {}", names(&rest)),
    };
    format!(
        "Bring back first what was in service until it failed: reconnect its devices, then {} ({}){then}. If one of these is gone for \
         good, stop the array with '{}' and import it again with 'calpe import {name}', without --force: it serves then if what is \
         there lacks nothing that was flushed.",
        commands.join(", "),
        names(&first),
        export(array)
    )
}

fn explain_refused(array: &ArrayReport) -> Explanation {
    let reason = array.log.reason.as_deref().unwrap_or("its redo log cannot be replayed");
    let (name, export) = (&array.name, export(array));
    let bring = match array.members.iter().all(in_service) {
        true => "mend what makes reads of its members fail, or put back members as they were last",
        false => "bring members back that are missing",
    };
    let again = format!("Stop it with '{export}', {bring}, and import it again with 'calpe import {name}'");
    Explanation {
        status: format!("It cannot be served: {reason}."),
        action: match array.log.yields_to_force {
            true => format!("{again}; or accept the loss with '{export} && calpe import --force {name}'."),
            false => format!(
                "{again}. Where that cannot be done, nothing of Calpe starts it, --force neither: copy the members, and get out what \
                 is left with 'scripts/recover.py --force' (docs/faults.md)."
            ),
        },
    }
}

/// How to stop an array that serves no request: its clients get only errors.
fn export(array: &ArrayReport) -> String {
    let force = if array.clients > 0 { "--force " } else { "" };
    format!("calpe export {force}{}", array.name)
}

fn explain_degraded(array: &ArrayReport, absent: &[&MemberReport]) -> Explanation {
    let left = usize::from(array.parity).saturating_sub(absent.len());
    let tolerance = match left {
        0 => "no further loss can be survived".to_owned(),
        1 => "one more loss can be survived".to_owned(),
        more => format!("{more} more losses can be survived"),
    };
    let verb = if absent.len() == 1 { "is" } else { "are" };
    // Clients do not depend on the room of a device that is being built.
    let lacks = |member: &&MemberReport| member.conditions.contains(&Condition::LacksBlocks);
    let lacking: Vec<&MemberReport> = array.members.iter().filter(lacks).collect();
    // Their bad blocks are read again, which takes a while.
    let is_troubled = |member: &&MemberReport| {
        let bad = [Condition::NotMended, Condition::KeptDespiteErrors];
        in_service(member) && bad.iter().any(|bad| member.conditions.contains(bad))
    };
    let troubled: Vec<&MemberReport> = array.members.iter().filter(is_troubled).collect();
    let may_meet = absent.len() + troubled.len() > usize::from(array.parity);
    // After a restart it is no longer known which blocks these are.
    let has_unrepaired = array.last_scrub.is_some_and(|scrub| scrub.errors > scrub.repaired);
    let is_short =
        |member: &MemberReport| !is_rebuilding(member) && member.conditions.contains(&Condition::Full);
    let served = match array.log.state {
        LogState::Replaying => "requests wait until the redo log is replayed, ",
        // The rebuild has met blocks that cannot be read; the list has them only after some
        // attempts.
        _ if array.scan.iter().any(|scan| scan.retried + scan.retried_pages > 0) => "",
        _ if !lacking.is_empty() || lacks_data(array) || may_meet || has_unrepaired => "",
        LogState::Settling => {
            "all data can be read, and writes wait until what the redo log holds is in place, "
        }
        _ if array.read_only => "all data can be read, ",
        _ if array.members.iter().any(is_short) => "all data can be read, and written while there is space, ",
        _ => "all data can be read and written, ",
    };
    let mut places = Vec::new();
    if !lacking.is_empty() {
        let lack = if lacking.len() == 1 { "lacks" } else { "lack" };
        places.push(format!("{} {lack} blocks that were not built so far", called(&lacking)));
    }
    if !troubled.is_empty() {
        places.push(format!("blocks of {} cannot be read", called(&troubled)));
    } else if [&array.lost, &array.set_aside, &array.unreadable].iter().any(|parts| !parts.is_empty()) {
        places.push("blocks cannot be read already".to_owned());
    } else if !array.unconfirmed.is_empty() {
        places.push("what could not be read when the daemon ended still cannot be".to_owned());
    } else if has_unrepaired {
        places.push("what the last scrub could not repair is bad still".to_owned());
    }
    let but = match (&places[..], left) {
        ([], _) => String::new(),
        (places, 0) => format!(", and data may be unreadable where {}", places.join(" or where ")),
        (places, _) => format!(", and fewer where {}", places.join(" or where ")),
    };
    let status = format!(
        "{} of {} members {verb} not in service; {served}{tolerance}{but}.",
        absent.len(),
        array.members.len()
    );
    let waiting: Vec<_> = absent
        .iter()
        .copied()
        .filter(|member| member.state != MemberState::Rebuilding && member.replacement.is_none())
        .collect();
    let (held, waiting): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|member| is_held_alone(member));
    let (returning, gone): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|member| returns(member));
    let (overwritten, gone): (Vec<_>, Vec<_>) = gone.into_iter().partition(|member| is_overwritten(member));
    let (kept, gone): (Vec<_>, Vec<_>) = gone.into_iter().partition(|member| is_kept(member));
    let (cut_off, gone): (Vec<_>, Vec<_>) = gone.into_iter().partition(|member| is_cut_off(member));
    let (there, gone): (Vec<_>, Vec<_>) = gone.into_iter().partition(|member| is_there(member));
    let none_gone =
        [&held, &gone, &overwritten, &kept, &cut_off, &there].iter().all(|members| members.is_empty());
    let action = match (none_gone, returning.is_empty()) {
        (true, true) if array.log.state == LogState::Settling => {
            "The rebuild goes on when what the redo log holds is in place.".into()
        }
        (true, true) => format!("Wait for the rebuild to end: 'calpe wait {}'.", array.name),
        (true, false) => wait_for(array, &returning),
        (false, _) => {
            let needs_more =
                |member: &&MemberReport| member.conditions.contains(&Condition::Full) || is_blocked(member);
            let room = returning.iter().any(needs_more).then(|| wait_for(array, &returning));
            let held = (!held.is_empty()).then(|| let_go_first(array, &held));
            let keep = kept.first().map(|first| keep(array, &kept, first.index));
            let there = (!there.is_empty()).then(|| use_what_is_there(array, &there));
            let back = (!gone.is_empty()).then(|| get_back(array, &gone));
            let anew = (!overwritten.is_empty()).then(|| build_anew(array, &overwritten));
            let replaced = (!cut_off.is_empty()).then(|| replace_cut_off(array, &cut_off));
            [room, held, keep, there, back, anew, replaced]
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
                .join(" ")
        }
    };
    Explanation { status, action }
}

/// Members by their numbers, as in "members 0, 2 and 3".
fn called(members: &[&MemberReport]) -> String {
    let numbers: Vec<String> = members.iter().map(|member| member.index.to_string()).collect();
    match numbers.split_last() {
        None => String::new(),
        Some((one, [])) => format!("member {one}"),
        Some((last, others)) => format!("members {} and {last}", others.join(", ")),
    }
}

/// What to do about members that do not come back by themselves.
fn get_back(array: &ArrayReport, gone: &[&MemberReport]) -> String {
    if gone.iter().all(|member| member.state == MemberState::Offline) {
        let commands: Vec<_> = gone.iter().map(|member| command_back(array, member)).collect();
        let what = if gone.len() == 1 { "it" } else { "them" };
        return format!("Bring {what} back with {}.", commands.join(", "));
    }
    let is_full = |member: &&MemberReport| member.conditions.contains(&Condition::Full);
    let room = if gone.iter().any(is_full) { "Make room where it is full. " } else { "" };
    format!(
        "{room}Replace it with 'calpe replace {name} {index} NEW', or bring it back with 'calpe online {name} {index}'. ({})",
        names(gone),
        name = array.name,
        index = gone[0].index
    )
}

/// What to do about members whose devices are there, as far as is known, and that need more than
/// 'calpe online'.
fn use_what_is_there(array: &ArrayReport, members: &[&MemberReport]) -> String {
    let one = |member: &&MemberReport| {
        let online = format!("calpe online {} {}", array.name, member.index);
        match member.conditions.contains(&Condition::Claimed) {
            true => format!(
                "Several devices claim to be member {}: move the copy away, and bring the other back with '{online}'; or name the \
                 one to use: '{online} --path PATH'.",
                member.index
            ),
            false => format!(
                "Member {} may be what the daemon's user may not read: let that user read and write it, and bring it back with \
                 '{online} --path PATH'; if it is not that, replace it with 'calpe replace {} {} NEW'.",
                member.index, array.name, member.index
            ),
        }
    };
    let told: Vec<String> = members.iter().map(one).collect();
    format!("{} ({})", told.join(" "), names(members))
}

/// What to do about members that lanes have to let go of before they can come back.
fn let_go_first(array: &ArrayReport, members: &[&MemberReport]) -> String {
    let is_full = members.iter().any(|member| member.conditions.contains(&Condition::Full));
    let room = if is_full { "Make room where it is full. " } else { "" };
    let told: Vec<String> = members.iter().map(|member| command_back(array, member)).collect();
    let (name, first) = (&array.name, members[0].index);
    let is_needed = members.iter().any(|member| member.conditions.contains(&Condition::KeptByLanes));
    let needed = match is_needed {
        true => {
            format!(
                " Not before the other members are back, or mended: a lane needs it to read something, and would be without it. Until \
                 then 'calpe replace {name} {first} NEW' is safe."
            )
        }
        false => {
            format!(" Where 'calpe offline' is refused, replace it: 'calpe replace {name} {first} NEW'.")
        }
    };
    format!(
        "{room}Other lanes have it in service, on a filesystem where they must let go of it before it can come back: {}.{needed} ({})",
        told.join(", "),
        names(members)
    )
}

/// What brings a member back.
fn command_back(array: &ArrayReport, member: &MemberReport) -> String {
    let (name, index) = (&array.name, member.index);
    match is_held_alone(member) {
        true => format!("'calpe offline {name} {index}' and then 'calpe online {name} {index}'"),
        false => format!("'calpe online {name} {index}'"),
    }
}

/// Whether lanes have to let go of it before it can come back.
fn is_held_alone(member: &MemberReport) -> bool {
    member.conditions.contains(&Condition::HeldAlone)
}

/// What to do about members whose devices must not be built over; `first` is one of them.
fn keep(array: &ArrayReport, kept: &[&MemberReport], first: u16) -> String {
    format!(
        "Keep the device of {}: it holds what may be nowhere else, and 'calpe online' refuses it. To see what it holds, 'calpe export \
         {name}', and import the array with that device and the ones that were last in service with it. To give that up, \
         'calpe replace {name} {first} NEW', with another device.",
        names(kept),
        name = array.name,
    )
}

/// Whether its device is there, as far as is known, and it needs more than 'calpe online'.
fn is_there(member: &MemberReport) -> bool {
    [Condition::Claimed, Condition::Forbidden].iter().any(|there| member.conditions.contains(there))
}

/// Whether its device must not be built over.
fn is_kept(member: &MemberReport) -> bool {
    member.conditions.contains(&Condition::Kept)
}

/// Whether it can only be built anew.
fn is_overwritten(member: &MemberReport) -> bool {
    member.conditions.contains(&Condition::Overwritten)
}

/// Whether it can only be replaced, as its device is smaller than it was.
fn is_cut_off(member: &MemberReport) -> bool {
    member.conditions.contains(&Condition::CutOff)
}

/// What to do about members whose devices are smaller than they were: they cannot come back.
fn replace_cut_off(array: &ArrayReport, members: &[&MemberReport]) -> String {
    let commands: Vec<String> =
        members.iter().map(|member| format!("'calpe replace {} {} NEW'", array.name, member.index)).collect();
    let what = if members.len() == 1 { "its device was" } else { "their devices were" };
    format!("Replace what cannot come back, as {what} cut off: {}. ({})", commands.join(", "), names(members))
}

/// What to do about members whose superblocks are gone: they cannot come back.
fn build_anew(array: &ArrayReport, members: &[&MemberReport]) -> String {
    let commands: Vec<String> = members
        .iter()
        .map(|member| {
            format!("'calpe replace {} {} {}'", array.name, member.index, quoted(Path::new(&member.name)))
        })
        .collect();
    let (hold, them) = match members {
        [member] => (format!("the place of member {} holds", member.index), "it"),
        _ => (format!("the places of {} members hold", members.len()), "them"),
    };
    format!(
        "As {hold} no superblock of this array any more, build {them} anew there, or elsewhere: {}; a file that was cut short is \
         removed first. ({})",
        commands.join(", "),
        names(members)
    )
}

fn explain_online(array: &ArrayReport) -> Explanation {
    let found = scrub_errors(array);
    if found > 0 {
        return Explanation {
            status: format!("A scrub found {}.", Count(found, "error")),
            action: format!(
                "See 'calpe events', replace a member whose counts rise, then 'calpe scrub {}' again.",
                array.name
            ),
        };
    }
    if array.errors.client > 0 {
        return Explanation {
            status: match array.errors.client {
                1 => "1 client request ended in an error.".into(),
                many => format!("{many} client requests ended in an error."),
            },
            action: format!(
                "'calpe events' tells of them; their clients know what they lack. What cannot be read is listed here as long as it \
                 cannot, and nothing is now. 'calpe clear {}' forgets the count.",
                array.name
            ),
        };
    }
    let with = |condition| array.members.iter().find(|member| member.conditions.contains(&condition));
    if let Some(member) = with(Condition::KeptDespiteErrors) {
        return Explanation {
            status: format!(
                "The errors of member {} ({}) do not end; it is kept in service, as others could not be read without it.",
                member.index,
                shown_name(member)
            ),
            action: unless_replaced(array, member, |replace| format!("Replace it now: '{replace}'.")),
        };
    }
    if let Some(member) = with(Condition::NotMended) {
        return Explanation {
            status: format!(
                "Member {} ({}) keeps giving errors: blocks of it are bad also after they were rewritten; the others make up for them.",
                member.index,
                shown_name(member)
            ),
            action: unless_replaced(array, member, |replace| {
                format!(
                    "Replace it with '{replace}', or mend what makes it fail: such blocks are looked at again every minute."
                )
            }),
        };
    }
    if let Some(member) = with(Condition::LacksBlocks) {
        return Explanation {
            status: format!(
                "Member {} ({}) went into service without blocks that could not be read; its device lacks them so far, and one loss \
                 fewer than otherwise may be survived.",
                member.index,
                shown_name(member)
            ),
            action: format!(
                "They are looked at again every few seconds, and built when they can be read: mend what keeps others from \
                 reading. 'calpe scrub {} -w' reads everything and tells what is left.",
                array.name
            ),
        };
    }
    if let Some(member) = with(Condition::HostShort) {
        return Explanation {
            status: format!(
                "This host lacks memory or the like for operations on member {} ({}); they are tried again.",
                member.index,
                shown_name(member)
            ),
            action: "Give the daemon what it lacks: see 'calpe events'.".into(),
        };
    }
    if let Some(member) = with(Condition::Slow) {
        return Explanation {
            status: format!(
                "Member {} ({}) is far slower than the others, and slows the whole array down.",
                member.index,
                shown_name(member)
            ),
            action: unless_replaced(array, member, |replace| {
                format!(
                    "Look at its device and what leads there; replace it with '{replace}' if it stays so."
                )
            }),
        };
    }
    if let Some((member, reason)) = array
        .members
        .iter()
        .filter(|member| !member.is_split())
        .find_map(|member| Some((member, member.reason.as_ref()?)))
    {
        return Explanation {
            status: format!(
                "Member {} ({}) is in service: {}.",
                member.index,
                shown_name(member),
                Printable(reason)
            ),
            action: unless_replaced(array, member, |replace| {
                format!(
                    "If it is still to be replaced, begin again with '{replace}'; otherwise 'calpe clear {} {}' ends this message.",
                    array.name, member.index
                )
            }),
        };
    }
    let has_errors = |member: &&MemberReport| member.read + member.write + member.cksum > 0;
    let troubled: Vec<_> = array.members.iter().filter(has_errors).collect();
    match troubled.first() {
        Some(member) => Explanation {
            // The report does not show whether everything was repaired: lost blocks may have been
            // written again.
            status: match troubled.len() {
                1 => format!("Member {} ({}) had errors", member.index, shown_name(member)),
                many => format!("{many} members had errors ({})", names(&troubled)),
            } + "; nothing is known to be unreadable now.",
            action: match troubled.len() {
                1 => unless_replaced(array, member, |replace| {
                    format!("Watch its counts; replace it with '{replace}' if they rise.")
                }),
                _ => format!(
                    "Watch their counts; replace a member whose counts rise with 'calpe replace {} MEMBER NEW'.",
                    array.name
                ),
            },
        },
        None => Explanation::default(),
    }
}

/// What to do about a member in service that should be replaced: `advice`, unless a replacement is under way.
fn unless_replaced(
    array: &ArrayReport,
    member: &MemberReport,
    advice: impl FnOnce(String) -> String,
) -> String {
    match (&member.replacement, array.log.state) {
        (None, _) => advice(format!("calpe replace {} {} NEW", array.name, member.index)),
        (Some(_), LogState::Settling) => {
            "Its replacement is built when what the redo log holds is in place.".into()
        }
        (Some(_), _) => {
            format!("Its replacement is being built: 'calpe wait {}' waits for that.", array.name)
        }
    }
}

/// Whether it comes back by itself.
fn returns(member: &MemberReport) -> bool {
    let returns = member.conditions.contains(&Condition::Returning) || is_blocked(member);
    returns && !is_kept(member) && !is_held_alone(member)
}

/// Whether it comes back by itself, but not without help.
fn is_blocked(member: &MemberReport) -> bool {
    is_displaced(member) || is_refused(member)
}

/// Whether its server is known to answer and to withhold its device.
fn is_refused(member: &MemberReport) -> bool {
    member.conditions.contains(&Condition::Refused)
}

/// Whether the device in its place is known to be unable to serve.
fn is_displaced(member: &MemberReport) -> bool {
    member.conditions.contains(&Condition::Displaced)
}

fn is_rebuilding(member: &MemberReport) -> bool {
    member.state == MemberState::Rebuilding
}

fn in_service(member: &MemberReport) -> bool {
    matches!(member.state, MemberState::Online | MemberState::Degraded)
}

fn scrub_errors(array: &ArrayReport) -> u64 {
    let last = array.last_scrub.map_or(0, |scrub| scrub.errors);
    let running = array.scan.iter().filter(|scan| scan.kind == ScanKind::Scrub).map(|scan| scan.errors);
    running.fold(last, u64::saturating_add)
}

/// The name of a member for a sentence that may have several lines: line breaks in a path are
/// escaped.
fn shown_name(member: &MemberReport) -> Printable<'_> {
    Printable(&member.name)
}

/// The absent members, for people; shortened on very wide arrays.
fn names(members: &[&MemberReport]) -> String {
    const SHOWN: usize = 8;
    let one = |member: &&MemberReport| format!("{}: {}", member.index, shown_name(member));
    let shown: Vec<_> = members.iter().take(SHOWN).map(one).collect();
    let more = members.len().saturating_sub(SHOWN);
    if more == 0 { shown.join(", ") } else { format!("{}, and {more} more", shown.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::super::status::tests::{healthy, running};
    use super::super::{LastScrub, LogReport, LostReport, ReplacementReport, ScanReport};
    use super::*;

    fn with_absent(states: &[MemberState]) -> ArrayReport {
        let mut array = healthy();
        for (member, &state) in array.members.iter_mut().zip(states) {
            member.state = state;
        }
        array.state = match states.len() {
            0 => ArrayState::Online,
            1 | 2 => ArrayState::Degraded,
            _ => ArrayState::Failed,
        };
        array
    }

    #[test]
    fn where_one_lane_has_failed_the_others_are_said_to_serve() {
        let mut array = with_absent(&[MemberState::Missing; 3]);
        assert!(explain(&array).status.ends_with("2 may be; I/O is refused and nothing is written."));
        array.failed_lanes = vec![1];
        let told = explain(&array).status;
        assert!(told.contains("lane 1 has FAILED: I/O on what it has of the volume is refused"), "{told}");
        assert!(told.contains("the other lanes read and write, and no flush succeeds"), "{told}");
    }

    #[test]
    fn a_member_whose_lanes_are_on_different_devices_is_not_good_and_is_replaced_once_more() {
        let mut array = healthy();
        array.members[2].conditions = vec![Condition::Split];
        array.members[2].reason = Some("its lanes are on 2 devices (a and b)".into());
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Degraded);
        let told = explain(&array);
        assert_eq!(told.status, "Lanes have different devices as member 2: none of these can be spared.");
        assert_eq!(
            told.action,
            "Keep all devices of member 2, and replace it once more: 'calpe replace tank 2 NEW'."
        );
    }

    #[test]
    fn what_answers_in_the_place_of_a_member_is_told_and_not_waited_for() {
        let mut array = with_absent(&[MemberState::Missing, MemberState::Missing]);
        array.members[0].name = "nbd://store/a".into();
        array.members[0].conditions = vec![Condition::Displaced];
        array.members[1].conditions = vec![Condition::Returning];
        array.members[1].name = "nbd://other/b".into();
        let action = explain(&array).action;
        let (waiting, displaced) = action.split_once("What answers in the place").expect(&action);
        assert!(waiting.contains("Waiting for other:") && !waiting.contains("store"), "{action}");
        assert!(displaced.contains("'calpe replace tank 0 NEW'. (0: nbd://store/a)"), "{action}");
        array.members[1].conditions.clear();
        let action = explain(&array).action;
        assert!(
            action.contains("What answers in the place") && action.contains("calpe online tank 1"),
            "{action}"
        );
        let mut failed = with_absent(&[MemberState::Missing; 3]);
        failed.members[..3].iter_mut().for_each(|member| member.conditions = vec![Condition::Displaced]);
        let action = explain(&failed).action;
        assert!(
            action.contains("in the place of members cannot serve") && !action.contains("calpe replace"),
            "{action}"
        );
    }

    #[test]
    fn what_a_server_refuses_is_not_waited_for_as_if_its_host_were_away() {
        let mut array = with_absent(&[MemberState::Missing, MemberState::Faulted]);
        array.members[0].name = "nbds://store/a".into();
        array.members[0].conditions = vec![Condition::Refused];
        let action = explain(&array).action;
        assert!(!action.contains("when it answers") && !action.contains("Waiting for store"), "{action}");
        assert!(action.contains("certificates") && action.contains("(0: nbds://store/a)"), "{action}");
        assert!(action.contains("calpe online tank 1"), "{action}");
        array.members[1].conditions = vec![Condition::Returning];
        array.members[1].name = "nbd://other/b".into();
        let action = explain(&array).action;
        assert!(action.contains("Waiting for other:") && !action.contains("calpe online"), "{action}");
        assert!(!action.contains("calpe replace"), "{action}");
    }

    #[test]
    fn a_host_that_is_not_asked_yet_is_not_said_to_be_waited_for() {
        let mut array = with_absent(&[MemberState::Faulted, MemberState::Missing]);
        array.members[0].name = "nbd://store/a".into();
        array.members[0].conditions = vec![Condition::Returning, Condition::Quarantined];
        array.members[0].tried_in_s = Some(12);
        array.members[1].name = "nbd://other/b".into();
        array.members[1].conditions = vec![Condition::Returning];
        array.members[1].tried_in_s = Some(3);
        let action = explain(&array).action;
        let (waiting, quarantined) = action.split_once("Whether store is back").expect(&action);
        assert!(
            waiting.starts_with("Waiting for other: ") && waiting.contains("tried again within 3 s"),
            "{action}"
        );
        assert!(quarantined.starts_with(" is not asked for another 12 s"), "{action}");
        array.members[1].tried_in_s = None;
        let action = explain(&array).action;
        assert!(action.contains("when it answers (being tried now)"), "{action}");
    }

    #[test]
    fn a_line_break_in_a_name_makes_no_line_of_a_sentence() {
        let name = "/srv/m\nstate: ONLINE";
        let with = |state, conditions: &[Condition], errors| {
            let mut array = with_absent(&[state]);
            if state == MemberState::Online {
                array.state = ArrayState::Online;
            }
            let member = &mut array.members[0];
            (member.name, member.conditions, member.cksum) = (name.into(), conditions.to_vec(), errors);
            array
        };
        for array in [
            with(MemberState::Missing, &[], 0),
            with(MemberState::Missing, &[Condition::Kept], 0),
            with(MemberState::Missing, &[Condition::Displaced], 0),
            with(MemberState::Missing, &[Condition::Overwritten], 0),
            with(MemberState::Missing, &[Condition::Returning], 0),
            with(MemberState::Missing, &[Condition::Returning, Condition::Full], 0),
            with(MemberState::Online, &[Condition::Full], 0),
            with(MemberState::Online, &[Condition::Slow], 0),
            with(MemberState::Online, &[Condition::HostShort], 0),
            with(MemberState::Online, &[Condition::KeptDespiteErrors], 0),
            with(MemberState::Online, &[Condition::NotMended], 0),
            with(MemberState::Online, &[], 7),
        ] {
            let Explanation { status, action } = explain(&array);
            let text = format!("{status} {action}");
            assert!(text.contains("/srv/m\\nstate") && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn an_array_whose_members_lack_blocks_does_not_promise_what_it_would_without() {
        let mut array = with_absent(&[MemberState::Faulted]);
        array.members[1].conditions = vec![Condition::LacksBlocks];
        let status = explain(&array).status;
        let end = "one more loss can be survived, and fewer where member 1 lacks blocks that were not built so far.";
        assert!(status.ends_with(end) && !status.contains("can be read"), "{status}");
        for member in [2, 3] {
            array.members[member].conditions = vec![Condition::LacksBlocks, Condition::KeptDespiteErrors];
        }
        let status = explain(&array).status;
        let end = "and fewer where members 1, 2 and 3 lack blocks that were not built so far \
                   or where blocks of members 2 and 3 cannot be read.";
        assert!(status.ends_with(end), "{status}");
        array.parity = 1;
        let status = explain(&array).status;
        assert!(
            status.contains("no further loss can be survived, and data may be unreadable where"),
            "{status}"
        );
        assert!(!status.contains("fewer"), "{status}");
    }

    #[test]
    fn what_is_bad_already_survives_fewer_losses() {
        let mut array = with_absent(&[MemberState::Offline]);
        array.last_scrub = Some(LastScrub { finished_unix: 1, errors: 4, repaired: 4 });
        let survives = "all data can be read and written, one more loss can be survived.";
        assert!(explain(&array).status.contains(survives), "{}", explain(&array).status);
        array.last_scrub = Some(LastScrub { finished_unix: 1, errors: 4, repaired: 3 });
        let status = explain(&array).status;
        let fewer = "one more loss can be survived, and fewer where what the last scrub could not repair is bad still.";
        assert!(status.contains(fewer) && !status.contains("all data"), "{status}");
        let part = vec![LostReport { offset: 0, bytes: 4096 }];
        let mut lacking = [array.clone(), array.clone(), array];
        lacking[0].unreadable = part.clone();
        lacking[1].lost = part.clone();
        lacking[2].set_aside = part;
        for array in lacking {
            let status = explain(&array).status;
            let fewer = "one more loss can be survived, and fewer where blocks cannot be read already.";
            assert!(status.contains(fewer), "{status}");
        }
    }

    #[test]
    fn a_rebuild_that_has_met_what_cannot_be_read_does_not_say_that_all_can() {
        let mut array = with_absent(&[MemberState::Rebuilding]);
        array.scan.push(running(ScanKind::Rebuild, 1, 100));
        assert!(explain(&array).status.contains("all data can be read and written, one more loss"));
        for (retried, retried_pages) in [(1, 0), (0, 1)] {
            (array.scan[0].retried, array.scan[0].retried_pages) = (retried, retried_pages);
            let status = explain(&array).status;
            assert!(
                !status.contains("can be read") && status.contains("not in service; one more"),
                "{status}"
            );
        }
    }

    #[test]
    fn a_failed_array_names_first_what_can_come_back_to_it() {
        let mut array = with_absent(&[MemberState::Missing; 3]);
        array.members[2].conditions = vec![Condition::ServedLast];
        let action = explain(&array).action;
        assert_eq!(
            action,
            "Bring back first what was in service until it failed: reconnect its devices, then 'calpe online tank 2' (2: /srv/m2); \
             when the array serves again, the others can come back: 0: /srv/m0, 1: /srv/m1. If one of these is gone for good, stop the \
             array with 'calpe export tank' and import it again with 'calpe import tank', without --force: it serves then if what is \
             there lacks nothing that was flushed."
        );
        array.members[2].conditions.clear();
        let action = explain(&array).action;
        assert!(action.contains("'calpe export tank'") && action.contains("without --force"), "{action}");
    }

    #[test]
    fn an_array_whose_log_is_refused_says_why_whichever_members_are_there() {
        let mut array = with_absent(&[MemberState::Missing]);
        array.state = ArrayState::Failed;
        array.log = LogReport {
            state: LogState::Refused,
            reason: Some("it breaks off".into()),
            yields_to_force: true,
        };
        assert!(explain(&array).status.contains("it breaks off"));
        let action = explain(&array).action;
        assert!(action.contains("'calpe export tank && calpe import --force tank'"), "{action}");
        assert!(action.contains("bring members back that are missing"), "{action}");
        array.clients = 2;
        let action = explain(&array).action;
        assert!(action.contains("'calpe export --force tank && calpe import --force tank'"), "{action}");
        // The advice does not name --force where that would not help.
        array.log.yields_to_force = false;
        let action = explain(&array).action;
        assert!(!action.contains("import --force") && action.contains("scripts/recover.py"), "{action}");
        array.state = ArrayState::Degraded;
        array.log = LogReport { state: LogState::Replaying, reason: None, yields_to_force: false };
        let status = explain(&array).status;
        assert!(status.contains("requests wait") && !status.contains("all data"), "{status}");
    }

    #[test]
    fn full_storage_is_told_first_whatever_else_there_is_to_tell() {
        let mut array = with_absent(&[MemberState::Offline]);
        array.members[2].conditions = vec![Condition::Full];
        let Explanation { status, action } = explain(&array);
        assert!(status.starts_with("The storage under member 2 (/srv/m2) is full"), "{status}");
        assert!(status.contains("writes that need new space there wait"), "{status}");
        assert!(status.contains("1 of 6 members is not in service"), "{status}");
        assert!(!status.contains("all data can be read and written"), "{status}");
        assert!(action.starts_with("Make room there: "), "{action}");
        assert!(action.contains("'calpe online tank 0'"), "{action}");

        let mut array = healthy();
        array.members[2].conditions = vec![Condition::Full];
        array.errors.client = 3;
        let Explanation { status, action } = explain(&array);
        assert!(status.contains("is full") && status.contains("3 client requests"), "{status}");
        assert!(action.starts_with("Make room there") && action.contains("'calpe clear tank'"), "{action}");

        // A replay that waits for room, before reads are served, and after.
        array.log.state = LogState::Replaying;
        let Explanation { status, action } = explain(&array);
        assert!(status.contains("being replayed, which waits for room; requests wait"), "{status}");
        assert!(action.contains("the replay then goes on by itself"), "{action}");
        array.log.state = LogState::Settling;
        let Explanation { status, .. } = explain(&array);
        assert!(status.contains("waits for room to go in place; reads are served"), "{status}");

        // A member that has left for lack of room: the others may share its storage.
        let mut array = with_absent(&[MemberState::Missing, MemberState::Missing]);
        array.members[1].conditions = vec![Condition::Full, Condition::Returning];
        let Explanation { status, action } = explain(&array);
        assert!(status.contains("and written while there is space"), "{status}");
        assert!(
            action.contains(
                "Make room, 16 MiB at least for a file: what is full comes back by itself then. (1: /srv/m1)"
            ),
            "{action}"
        );
        assert!(action.contains("'calpe replace tank 0 NEW'"), "{action}");
    }

    #[test]
    fn what_hangs_is_told_beside_what_would_bring_it_back() {
        let mut array = with_absent(&[MemberState::Faulted, MemberState::Offline]);
        assert!(!explain(&array).action.contains("has not ended"));
        array.members[0].conditions.push(Condition::Unanswered);
        let action = explain(&array).action;
        let told =
            "What was asked of 0: /srv/m0 before it was taken out has not ended, and it cannot come back";
        assert!(action.contains("'calpe online tank 0'") && action.contains(told), "{action}");
    }

    #[test]
    fn that_all_can_be_read_is_not_said_where_more_members_than_may_be_have_bad_blocks() {
        let mut array = with_absent(&[MemberState::Offline]);
        array.members[1].conditions = vec![Condition::NotMended];
        let status = explain(&array).status;
        assert!(
            status.contains("all data can be read and written, one more loss can be survived, and fewer"),
            "{status}"
        );
        array.members[2].conditions = vec![Condition::NotMended];
        let status = explain(&array).status;
        assert!(
            !status.contains("all data") && status.contains("where blocks of members 1 and 2 cannot be read"),
            "{status}"
        );
    }

    #[test]
    fn no_rebuild_is_waited_for_that_waits_for_room() {
        let mut array = with_absent(&[MemberState::Rebuilding]);
        array.log.state = LogState::Settling;
        for is_full in [true, false] {
            array.members[2].conditions = if is_full { vec![Condition::Full] } else { Vec::new() };
            let action = explain(&array).action;
            assert_eq!(action.starts_with("Make room there: the replay"), is_full, "{action}");
            assert!(action.ends_with("when what the redo log holds is in place."), "{action}");
            assert!(!action.contains("Wait for the rebuild"), "{action}");
        }
    }

    #[test]
    fn a_member_that_is_being_replaced_is_not_to_be_replaced() {
        let of_state = |set: fn(&mut MemberReport)| {
            let mut array = healthy();
            set(&mut array.members[2]);
            assert!(explain(&array).action.contains("'calpe replace tank 2 NEW'"), "{array:?}");
            array.members[2].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid: None });
            explain(&array).action
        };
        for action in [
            of_state(|member| member.cksum = 1),
            of_state(|member| member.conditions = vec![Condition::NotMended]),
            of_state(|member| member.conditions = vec![Condition::KeptDespiteErrors]),
            of_state(|member| member.conditions = vec![Condition::Slow]),
            of_state(|member| member.reason = Some("its replacement was given up".into())),
        ] {
            assert_eq!(action, "Its replacement is being built: 'calpe wait tank' waits for that.");
        }
    }

    #[test]
    fn a_member_that_is_there_and_not_taken_is_not_told_to_come_back_by_what_is_refused() {
        let mut array = with_absent(&[MemberState::Missing, MemberState::Missing]);
        array.members[0].conditions = vec![Condition::Claimed];
        array.members[1].conditions = vec![Condition::Forbidden];
        let action = explain(&array).action;
        assert!(action.starts_with("Several devices claim to be member 0: move the copy away"), "{action}");
        assert!(action.contains("'calpe online tank 0 --path PATH'"), "{action}");
        assert!(!action.contains("calpe replace tank 0"), "{action}");
        assert!(action.contains("let that user read and write it"), "{action}");
        assert!(action.ends_with("(0: /srv/m0, 1: /srv/m1)"), "{action}");
        assert!(!action.contains("  "), "{action}");
    }

    #[test]
    fn what_has_left_for_lack_of_room_is_told_to_need_that_also_where_it_does_not_return() {
        let mut array = with_absent(&[MemberState::Missing]);
        array.members[0].conditions = vec![Condition::Full];
        let action = explain(&array).action;
        assert!(action.starts_with("Make room where it is full. Replace it with 'calpe replace"), "{action}");
    }

    #[test]
    fn what_only_an_earlier_run_knew_is_not_asserted() {
        let mut array = healthy();
        array.unconfirmed = vec![LostReport { offset: 4096, bytes: 4096 }];
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Degraded);
        let status = explain(&array).status;
        assert!(status.starts_with("4 KiB of the volume were beyond repair or unreadable when"), "{status}");
        assert!(status.ends_with("is being looked at."), "{status}");
        // All of the page list may be from an earlier run.
        array.unreadable_pages = 1;
        let status = explain(&array).status;
        let pages = "is being looked at. 1 metadata page with checksums cannot be read;";
        assert!(status.contains(pages) && !status.contains("hold no data"), "{status}");
        array.unreadable_pages = 0;
        array.members[0].state = MemberState::Offline;
        let status = explain(&array).status;
        assert!(
            status.contains("as far as that can be told without the members that are not in"),
            "{status}"
        );
        array.members[0].state = MemberState::Online;
        array.lost = vec![LostReport { offset: 0, bytes: 4096 }];
        assert!(explain(&array).status.starts_with("4 KiB of the volume are beyond repair"));
        array.members[0].state = MemberState::Offline;
        array.state = ArrayState::Degraded;
        let Explanation { status, action } = explain(&array);
        let begin = format!("1 of {} members is not in service; ", array.members.len());
        assert!(status.starts_with(&begin) && status.contains("4 KiB of the volume are beyond"), "{status}");
        assert!(!status.contains("all data can be read"), "{status}");
        assert!(
            action.starts_with("Do not replace member 0"),
            "what is not confirmed may be there alone: {action}"
        );
        array.unconfirmed.clear();
        let action = explain(&array).action;
        assert!(action.starts_with("Bring it back with 'calpe online"), "{action}");
    }

    #[test]
    fn a_member_that_may_alone_have_blocks_is_brought_back_and_not_replaced() {
        let part = vec![LostReport { offset: 0, bytes: 16384 }];
        for state in [MemberState::Missing, MemberState::Offline, MemberState::Faulted] {
            for is_lost in [false, true] {
                let mut array = with_absent(&[state]);
                array.unreadable = part.clone();
                array.lost =
                    if is_lost { vec![LostReport { offset: 65536, bytes: 4096 }] } else { Vec::new() };
                let Explanation { status, action } = explain(&array);
                assert!(status.contains("16 KiB") && status.contains("cannot be read for now"), "{status}");
                assert_eq!((status.contains("4 KiB"), action.contains("from a backup")), (is_lost, is_lost));
                assert!(!status.contains("all data can be read"), "{status}");
                let first = "Do not replace member 0, which may alone have these blocks. Bring it back with 'calpe online tank 0' \
                             (0: /srv/m0).";
                assert!(action.starts_with(first) && !action.contains("calpe replace"), "{action}");
            }
        }
        let mut array = with_absent(&[MemberState::Missing, MemberState::Offline]);
        array.set_aside = part;
        let action = explain(&array).action;
        assert!(action.contains("'calpe online tank 0', 'calpe online tank 1'"), "{action}");
        array.members[0].conditions = vec![Condition::Returning];
        let action = explain(&array).action;
        assert!(
            action.contains("comes back by itself") && action.contains("'calpe online tank 1' ("),
            "{action}"
        );
        // These cannot come back, or must not.
        array.members[1].conditions = vec![Condition::Kept];
        for gone in [Condition::Overwritten, Condition::CutOff] {
            array.members[0].conditions = vec![gone];
            let action = explain(&array).action;
            assert!(
                !action.contains("calpe online tank 0") && action.contains("Mend what makes reads fail"),
                "{action}"
            );
            assert!(
                action.contains("Keep the device of 1") && action.contains("'calpe replace tank 0 "),
                "{action}"
            );
        }
        // None is missing.
        let mut array = with_absent(&[]);
        array.unreadable = vec![LostReport { offset: 0, bytes: 4096 }];
        assert!(explain(&array).action.starts_with("Mend what makes reads fail"));
        array.members[0].state = MemberState::Rebuilding;
        assert!(explain(&array).action.starts_with("Wait for the rebuild to end"));
    }

    #[test]
    fn blocks_that_are_set_aside_are_told_with_the_members_that_have_them() {
        let mut array = with_absent(&[MemberState::Offline]);
        array.set_aside = vec![LostReport { offset: 0, bytes: 8192 }];
        array.set_aside_members = vec![0];
        assert!(explain(&array).action.starts_with("Do not replace member 0, which may alone"));
        // For a member in service that fails reads.
        array.set_aside_members = vec![1];
        let action = explain(&array).action;
        assert!(
            action.contains("Do not replace a member that alone has blocks that are set aside (1: "),
            "{action}"
        );
        assert!(!action.contains("Do not replace member 0"), "{action}");
        assert!(action.contains("Bring it back with 'calpe online tank 0'"), "{action}");
        // It may have other blocks.
        array.unreadable = vec![LostReport { offset: 65536, bytes: 4096 }];
        let Explanation { status, action } = explain(&array);
        assert!(
            action.contains("Do not replace member 0") && action.contains("'calpe online tank 0'"),
            "{action}"
        );
        assert!(status.contains("is not in service; one more loss can be survived"), "{status}");
        assert!(
            status.contains("8 KiB of the volume are set aside") && status.contains("4 KiB more cannot"),
            "{status}"
        );
    }

    #[test]
    fn metadata_pages_that_cannot_be_read_are_told_with_what_that_means() {
        let mut array = with_absent(&[MemberState::Offline]);
        array.unreadable = vec![LostReport { offset: 0, bytes: 8192 }];
        assert!(!explain(&array).status.contains("metadata"));
        array.unreadable_pages = 2;
        let told = explain(&array).status;
        assert!(told.contains("8 KiB of the volume cannot be read for now"), "{told}");
        assert!(
            told.starts_with("1 of 6 members is not in service; one more loss can be survived, and fewer where blocks cannot be read already."),
            "{told}"
        );
        assert!(told.contains("2 metadata pages") && told.contains("neither read nor written"), "{told}");
        assert!(!told.contains("all data can be read"), "{told}");
        let mut online = healthy();
        online.unreadable_pages = 1;
        assert_eq!(verdict(std::slice::from_ref(&online)), Verdict::Degraded);
        let told = explain(&online).status;
        assert!(
            told.starts_with("Stripes that hold no data cannot be written for now: 1 metadata page "),
            "{told}"
        );
        assert!(!told.contains("0 B"), "{told}");
    }

    #[test]
    fn a_member_whose_superblock_is_gone_is_to_be_built_anew_and_not_to_come_back() {
        let mut array = with_absent(&[MemberState::Offline]);
        array.members[0].conditions = vec![Condition::Overwritten];
        let action = explain(&array).action;
        assert!(
            action.contains("'calpe replace tank 0 /srv/m0'") && !action.contains("calpe online"),
            "{action}"
        );
        array.members[1].state = MemberState::Offline;
        let action = explain(&array).action;
        assert!(action.contains("'calpe replace tank 0 /srv/m0'"), "{action}");
        assert!(action.contains("'calpe online tank 1'") && !action.contains("online tank 0"), "{action}");
        // Beside a member that comes back when there is room.
        array.members[1].state = MemberState::Missing;
        array.members[1].conditions = vec![Condition::Full, Condition::Returning];
        let action = explain(&array).action;
        assert!(action.starts_with("Make room, 16 MiB") && !action.contains("calpe online"), "{action}");
        assert!(action.contains("As the place of member 0 holds no superblock"), "{action}");
        assert!(action.contains("'calpe replace tank 0 /srv/m0'"), "{action}");
        let mut failed = with_absent(&[MemberState::Missing; 3]);
        failed.members[2].conditions = vec![Condition::ServedLast, Condition::Overwritten];
        assert!(!explain(&failed).action.contains("calpe online"), "{}", explain(&failed).action);
    }

    #[test]
    fn what_lanes_have_to_let_go_of_first_is_told_with_the_command_for_that() {
        let mut array = with_absent(&[MemberState::Missing, MemberState::Offline]);
        array.members[0].conditions = vec![Condition::HeldAlone];
        let back = "'calpe offline tank 0' and then 'calpe online tank 0'";
        let action = explain(&array).action;
        assert!(action.contains(back) && action.contains("'calpe replace tank 0 NEW'"), "{action}");
        assert!(action.contains("Bring it back with 'calpe online tank 1'"), "{action}");
        assert!(action.contains("Where 'calpe offline' is refused"), "{action}");
        array.members[0].conditions.push(Condition::KeptByLanes);
        let action = explain(&array).action;
        assert!(action.contains("Not before the other members are back"), "a lane needs it: {action}");
        // It does not come back by itself where lanes have it.
        array.members[0].conditions = vec![Condition::Full, Condition::Returning, Condition::HeldAlone];
        let action = explain(&array).action;
        assert!(action.starts_with("Make room where it is full. ") && action.contains(back), "{action}");
        assert!(!action.contains("by itself"), "{action}");
        array.unreadable = vec![LostReport { offset: 0, bytes: 8192 }];
        let action = explain(&array).action;
        assert!(action.contains(back) && !action.contains("'calpe replace"), "{action}");
    }

    #[test]
    fn a_member_that_was_cut_off_is_to_be_replaced_and_not_to_come_back() {
        let mut array = with_absent(&[MemberState::Missing, MemberState::Faulted]);
        array.members[0].conditions = vec![Condition::CutOff];
        let action = explain(&array).action;
        assert!(
            action.contains("'calpe replace tank 0 NEW'") && !action.contains("online tank 0"),
            "{action}"
        );
        assert!(action.contains("'calpe online tank 1'"), "{action}");
        array.members[1].conditions = vec![Condition::CutOff];
        let action = explain(&array).action;
        assert!(
            action.contains("'calpe replace tank 1 NEW'") && !action.contains("calpe online"),
            "{action}"
        );
    }

    #[test]
    fn a_device_that_holds_what_may_be_nowhere_else_is_to_be_kept_whatever_becomes_of_others() {
        let mut array = with_absent(&[MemberState::Offline, MemberState::Offline]);
        // It answers, and still does not come back.
        array.members[1].conditions = vec![Condition::Returning, Condition::Kept];
        let action = explain(&array).action;
        assert!(action.starts_with("Keep the device of 1: "), "{action}");
        assert!(action.contains("'calpe online tank 0'") && !action.contains("online tank 1"), "{action}");
    }

    #[test]
    fn all_members_that_are_full_are_named() {
        let mut array = healthy();
        array.members[0].conditions = vec![Condition::Full];
        assert!(explain(&array).status.contains("under member 0 (/srv/m0) is full"));
        array.members[3].conditions = vec![Condition::Full];
        assert!(explain(&array).status.contains("under 2 members (0: /srv/m0, 3: /srv/m3) is full"));
    }

    #[test]
    fn a_new_device_that_is_full_is_named_and_not_its_member() {
        let mut array = healthy();
        array.members[2].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid: None });
        array.members[2].conditions = vec![Condition::NewDeviceFull];
        let told = explain(&array);
        assert!(
            told.status.starts_with("The storage under /srv/new, which is being built for member 2, is full")
        );
        assert!(told.status.contains("given up") && !told.status.contains("/srv/m2"), "{told:?}");
        assert!(told.action.contains("Make room for /srv/new"), "{told:?}");
        // A device that is built for a member that has no other.
        let mut array = with_absent(&[MemberState::Rebuilding]);
        array.members[0].conditions = vec![Condition::Full];
        let told = explain(&array);
        assert!(told.status.contains("for member 0, is full: it leaves after 20 s of that"), "{told:?}");
        assert!(told.status.contains("all data can be read and written"), "{told:?}");
        assert!(told.action.starts_with("Make room for /srv/m0. Wait for the rebuild"), "{told:?}");
    }

    #[test]
    fn exit_codes_are_those_of_the_contract() {
        assert_eq!(verdict(&[healthy()]).exit_code(), 0);
        assert_eq!(verdict(&[with_absent(&[MemberState::Missing])]).exit_code(), 1);
        assert_eq!(verdict(&[with_absent(&[MemberState::Missing; 3])]).exit_code(), 2);
        assert_eq!(verdict(&[]).exit_code(), 4);
    }

    #[test]
    fn the_worst_array_decides() {
        let (degraded, failed) =
            (with_absent(&[MemberState::Faulted]), with_absent(&[MemberState::Faulted; 3]));
        assert_eq!(verdict(&[healthy(), degraded.clone(), healthy()]), Verdict::Degraded);
        assert_eq!(verdict(&[degraded, failed, healthy()]), Verdict::Failed);
    }

    #[test]
    fn scrub_errors_count_until_a_clean_scrub() {
        let mut array = healthy();
        array.last_scrub = Some(LastScrub { finished_unix: 1, errors: 3, repaired: 3 });
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Degraded);
        assert!(explain(&array).status.contains("3 errors"));
        array.last_scrub = Some(LastScrub { finished_unix: 2, errors: 0, repaired: 0 });
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Healthy);
        array.scan.push(ScanReport { errors: 1, ..running(ScanKind::Scrub, 1, 100) });
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Degraded);
    }

    #[test]
    fn client_errors_are_not_healthy() {
        let mut array = healthy();
        array.errors.client = 2;
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Degraded);
        assert!(explain(&array).status.contains("2 client requests"));
    }

    #[test]
    fn a_log_that_is_refused_is_a_failure_and_lost_blocks_are_trouble() {
        let mut array = healthy();
        array.lost = vec![LostReport { offset: 0, bytes: 4096 }, LostReport { offset: 1 << 20, bytes: 8192 }];
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Degraded);
        assert!(explain(&array).status.starts_with("12 KiB of the volume"), "{}", explain(&array).status);
        array.log =
            LogReport { state: LogState::Refused, reason: Some("no room".into()), yields_to_force: false };
        for state in [ArrayState::Online, ArrayState::Failed] {
            array.state = state;
            assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Failed);
            let told = explain(&array);
            assert!(told.status.contains("no room") && told.action.contains("--force neither"), "{told:?}");
            assert!(!told.action.contains("missing"), "{told:?}");
        }
        array.state = ArrayState::Online;
        array.log.state = LogState::Replaying;
        array.lost.clear();
        assert_eq!(verdict(&[array]), Verdict::Healthy, "requests wait a moment");
    }

    #[test]
    fn healthy_arrays_need_no_words() {
        assert_eq!(explain(&healthy()), Explanation::default());
    }

    #[test]
    fn sentences_say_what_is_left_and_what_to_do() {
        let one = explain(&with_absent(&[MemberState::Missing]));
        assert!(one.status.starts_with("1 of 6 members is"), "{}", one.status);
        assert!(one.status.contains("one more loss"), "{}", one.status);
        assert!(one.action.contains("calpe replace tank 0 NEW"), "{}", one.action);
        let two = explain(&with_absent(&[MemberState::Offline, MemberState::Rebuilding]));
        assert!(two.status.contains("no further loss"), "{}", two.status);
        assert!(two.action.contains("calpe online tank 0"), "{}", two.action);
        let building = explain(&with_absent(&[MemberState::Rebuilding]));
        assert!(building.action.contains("calpe wait tank"), "{}", building.action);
        let mut replaced = with_absent(&[MemberState::Faulted]);
        replaced.members[0].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid: None });
        assert!(explain(&replaced).action.contains("calpe wait tank"));
        let failed = explain(&with_absent(&[MemberState::Missing; 3]));
        assert!(failed.status.contains("3 of 6"), "{}", failed.status);
        assert!(failed.action.contains("1: /srv/m1"), "{}", failed.action);
    }

    #[test]
    fn members_that_come_back_by_themselves_are_waited_for_and_not_replaced() {
        let mut array = with_absent(&[MemberState::Faulted, MemberState::Missing]);
        array.members[0].name = "nbd://host1:10809/disk".into();
        array.members[0].conditions = vec![Condition::Returning];
        let told = explain(&array).action;
        assert!(told.contains("calpe replace tank 1 NEW") && !told.contains("host1"), "{told}");
        array.members[1].name = "/srv/m1".into();
        array.members[1].conditions = vec![Condition::Full, Condition::Returning];
        let told = explain(&array).action;
        assert!(told.starts_with("Waiting for host1:") && told.contains("Make room"), "{told}");
        assert!(!told.contains("replace"), "{told}");
        let mut failed = with_absent(&[MemberState::Faulted; 3]);
        for (member, host) in failed.members.iter_mut().zip(["a", "b", "[::1]"]) {
            member.name = format!("nbd://{host}/x");
            member.conditions = vec![Condition::Returning];
        }
        assert!(explain(&failed).action.starts_with("Waiting for a, b, ::1:"), "{}", explain(&failed).action);
    }

    #[test]
    fn conditions_of_members_in_service_are_named_with_what_to_do() {
        for (condition, word, verdict_of_it) in [
            (Condition::Full, "Make room", Verdict::Degraded),
            (Condition::KeptDespiteErrors, "calpe replace tank 2 NEW", Verdict::Degraded),
            (Condition::NotMended, "calpe replace tank 2 NEW", Verdict::Degraded),
            (Condition::LacksBlocks, "calpe scrub tank -w", Verdict::Degraded),
            (Condition::HostShort, "what it lacks", Verdict::Healthy),
            (Condition::Slow, "what leads there", Verdict::Healthy),
        ] {
            let mut array = healthy();
            array.members[2].conditions = vec![condition];
            let told = explain(&array);
            assert!(
                told.status.to_lowercase().contains("member 2 (/srv/m2)") && told.action.contains(word),
                "{told:?}"
            );
            assert_eq!(verdict(std::slice::from_ref(&array)), verdict_of_it);
            array.status = told.status;
            assert_eq!(is_healthy(&array), verdict_of_it == Verdict::Healthy, "with a status line, too");
        }
        assert!(is_healthy(&healthy()));
    }

    #[test]
    fn a_replacement_that_was_given_up_is_told_while_the_member_serves_on() {
        let mut array = healthy();
        array.members[3].reason = Some("its replacement was given up: no device".into());
        let told = explain(&array);
        assert!(
            told.status.contains("Member 3 (/srv/m3) is in service: its replacement was given up: no device")
        );
        assert!(
            told.action.contains("calpe replace tank 3 NEW") && told.action.contains("calpe clear tank 3")
        );
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Healthy);
    }

    #[test]
    fn a_member_with_errors_is_named_while_online() {
        let mut array = healthy();
        array.members[4].cksum = 1;
        let told = explain(&array).status;
        assert_eq!(told, "Member 4 (/srv/m4) had errors; nothing is known to be unreadable now.");
        assert_eq!(verdict(std::slice::from_ref(&array)), Verdict::Healthy);
        array.members[1].read = 2;
        let told = explain(&array).status;
        assert!(told.starts_with("2 members had errors (1: /srv/m1, 4: /srv/m4);"), "{told}");
        let action = explain(&array).action;
        assert!(action.contains("replace a member whose counts rise with 'calpe replace tank MEMBER NEW'"));
    }

    #[test]
    fn a_member_that_may_have_what_is_not_confirmed_is_not_told_to_be_replaced() {
        let mut array = with_absent(&[MemberState::Missing]);
        array.unconfirmed = vec![LostReport { offset: 8192, bytes: 4096 }];
        let alone = explain(&array).action;
        assert!(!alone.contains("calpe replace"), "{alone}");
        array.lost = vec![LostReport { offset: 0, bytes: 4096 }];
        let Explanation { status, action } = explain(&array);
        assert!(!action.contains("calpe replace"), "{action}");
        assert!(status.contains("unconfirmed") || status.contains("when the daemon ended"), "{status}");
    }
}
