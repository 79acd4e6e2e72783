//! The sentences of a status about ranges of an array that cannot be served: beyond repair, set aside,
//! unreadable for now, or not read yet. Words only: `verdict` decides which ranges these are.

use super::returning::wait_for;
use super::{
    Explanation, command_back, explain_degraded, in_service, is_cut_off, is_kept, is_overwritten, is_there,
    names, returns, use_what_is_there,
};
use crate::control::{ArrayReport, LostReport, MemberReport, MemberState};
use calpe_core::units::{Count, HumanSize};

fn explain_lost(array: &ArrayReport) -> Explanation {
    let mut status = format!(
        "{} of the volume are beyond repair: reading them is an error until they are written again.",
        bytes_of(&array.lost)
    );
    let others: Vec<LostReport> = array.unreadable.iter().chain(&array.set_aside).copied().collect();
    status += &unread_besides(&others);
    if !array.unconfirmed.is_empty() {
        let bytes = bytes_of(&array.unconfirmed);
        status += &format!(
            " Whether {bytes} more can be read, which could not when the daemon ended, is being looked at."
        );
    }
    let action = match !others.is_empty() || may_be_away(array) {
        true => format!("{} What is beyond repair: write it again from a backup.", get_blocks_back(array)),
        false => {
            format!("'calpe status -v {}' lists where; write these parts again from a backup.", array.name)
        }
    };
    Explanation { status, action }
}

/// A sentence about ranges that cannot be read for now, to follow one about other ranges; empty
/// without any.
fn unread_besides(parts: &[LostReport]) -> String {
    match parts {
        [] => String::new(),
        _ => {
            format!(" {} more cannot be read for now, and nothing shows that they are lost.", bytes_of(parts))
        }
    }
}

/// Whether ranges of the volume cannot be served, or may be missing.
pub(super) fn lacks_data(array: &ArrayReport) -> bool {
    !array.lost.is_empty() || !array.set_aside.is_empty() || is_unread(array)
}

/// Whether ranges cannot be read for now, or have not been read yet.
fn is_unread(array: &ArrayReport) -> bool {
    !array.unreadable.is_empty() || !array.unconfirmed.is_empty() || array.unreadable_pages > 0
}

/// Whether members that are out of service may hold ranges that cannot be served.
fn may_be_away(array: &ArrayReport) -> bool {
    let own = || array.members.iter().filter(|member| array.set_aside_members.contains(&member.index));
    let is_set_aside_there =
        !array.set_aside.is_empty() && (own().next().is_none() || !own().all(in_service));
    !array.members.iter().all(in_service) && (is_unread(array) || is_set_aside_there)
}

pub(super) fn explain_without_data(array: &ArrayReport) -> Explanation {
    match array {
        _ if !array.lost.is_empty() => explain_lost(array),
        _ if !array.set_aside.is_empty() => explain_set_aside(array),
        _ if !array.unreadable.is_empty() => explain_unreadable(array),
        _ if !array.unconfirmed.is_empty() => explain_unconfirmed(array),
        _ => explain_unreadable(array),
    }
}

/// Adds which members are not in service, and what to do about them unless another sentence says so.
pub(super) fn beside_absent(
    array: &ArrayReport,
    absent: &[&MemberReport],
    explanation: Explanation,
) -> Explanation {
    if absent.is_empty() {
        return explanation;
    }
    let degraded = explain_degraded(array, absent);
    let is_told_of = |member: &MemberReport| may_give_blocks(member) || is_built(member);
    Explanation {
        status: format!("{} {}", degraded.status, explanation.status),
        action: match may_be_away(array) && absent.iter().any(|member| is_told_of(member)) {
            true => explanation.action,
            false => format!("{} {}", degraded.action, explanation.action),
        },
    }
}

/// Whether a device is being built for it.
fn is_built(member: &MemberReport) -> bool {
    member.state == MemberState::Rebuilding || !in_service(member) && member.replacement.is_some()
}

/// Whether it is not in service, and may come back with its content.
fn may_give_blocks(member: &MemberReport) -> bool {
    let cannot_return = is_overwritten(member) || is_cut_off(member) || is_kept(member);
    !in_service(member) && !is_built(member) && !cannot_return
}

/// What to do about blocks that may come back with a member which is missing, or gives errors.
fn get_blocks_back(array: &ArrayReport) -> String {
    let away: Vec<&MemberReport> = array.members.iter().filter(|member| may_give_blocks(member)).collect();
    let looks = format!("the array looks again by itself. 'calpe status -v {}' lists where.", array.name);
    let (returning, gone): (Vec<&MemberReport>, Vec<_>) = away.iter().copied().partition(|m| returns(m));
    let (there, gone): (Vec<&MemberReport>, Vec<_>) = gone.into_iter().partition(|m| is_there(m));
    let mut text = match away[..] {
        [] if array.members.iter().any(is_built) => {
            return format!("Wait for the rebuild to end, and mend what makes reads fail; {looks}");
        }
        [] => return format!("Mend what makes reads fail; {looks}"),
        [member] => format!("Do not replace member {}, which may alone have these blocks.", member.index),
        _ => "Do not replace members that are missing: they may alone have these blocks.".to_owned(),
    };
    if !gone.is_empty() {
        let commands: Vec<String> = gone.iter().map(|member| command_back(array, member)).collect();
        let them = if gone.len() == 1 { "it" } else { "them" };
        text += &format!(" Bring {them} back with {} ({}).", commands.join(", "), names(&gone));
    }
    if !there.is_empty() {
        text += &format!(" {}", use_what_is_there(array, &there));
    }
    if !returning.is_empty() {
        text += &format!(" {}", wait_for(array, &returning));
    }
    format!("{text} Mend what makes reads fail; {looks}")
}

fn bytes_of(parts: &[LostReport]) -> HumanSize {
    HumanSize(parts.iter().fold(0u64, |sum, part| sum.saturating_add(part.bytes)))
}

fn explain_set_aside(array: &ArrayReport) -> Explanation {
    let more = unread_besides(&array.unreadable);
    Explanation {
        status: format!(
            "{} of the volume are set aside: their members could not read them when the rest of their rows was written. \
             Reading them is an error until their members can read them again, or they are written.{more}",
            bytes_of(&array.set_aside)
        ),
        action: keep_set_aside(array),
    }
}

/// What to do about blocks that are set aside: only their own members have them.
fn keep_set_aside(array: &ArrayReport) -> String {
    let has_some = |member: &&MemberReport| array.set_aside_members.contains(&member.index);
    let here: Vec<&MemberReport> =
        array.members.iter().filter(has_some).filter(|member| in_service(member)).collect();
    if here.is_empty() {
        return get_blocks_back(array);
    }
    let whose = if here.len() == 1 { "a member that alone has" } else { "members that alone have" };
    let keep = format!("Do not replace {whose} blocks that are set aside ({}).", names(&here));
    match may_be_away(array) {
        true => format!("{keep} {}", get_blocks_back(array)),
        false => format!(
            "{keep} Mend what makes its reads fail: the array looks again by itself. 'calpe status -v {}' lists where.",
            array.name
        ),
    }
}

/// A sentence about metadata pages that cannot be read, to follow one about blocks; empty without
/// any.
fn pages_besides(array: &ArrayReport) -> String {
    match array.unreadable_pages {
        0 => String::new(),
        1 => " 1 metadata page with checksums cannot be read; what it describes can be neither read nor written.".into(),
        many => format!(
            " {many} metadata pages with checksums cannot be read; what they describe can be neither read nor written."
        ),
    }
}

fn explain_unreadable(array: &ArrayReport) -> Explanation {
    if array.unreadable.is_empty() {
        let pages = Count(array.unreadable_pages, "metadata page");
        return Explanation {
            status: format!(
                "Stripes that hold no data cannot be written for now: {pages} for their checksums cannot be read."
            ),
            action: get_blocks_back(array),
        };
    }
    let (bytes, of_pages) = (bytes_of(&array.unreadable), pages_besides(array));
    Explanation {
        status: format!(
            "{bytes} of the volume cannot be read for now: more than {} {} missing or give errors there.{of_pages} \
             Nothing shows that they are lost.",
            Count(array.parity.into(), "member"),
            Count(array.parity.into(), "member").are()
        ),
        action: get_blocks_back(array),
    }
}

fn explain_unconfirmed(array: &ArrayReport) -> Explanation {
    let far = match array.members.iter().all(in_service) {
        true => "",
        false => ", as far as that can be told without the members that are not in service",
    };
    Explanation {
        status: format!(
            "{} of the volume were beyond repair or unreadable when the daemon ended. Whether they still are is being looked at{far}.{}",
            bytes_of(&array.unconfirmed),
            pages_besides(array)
        ),
        action: {
            let back = match array.members.iter().all(in_service) {
                true => format!("'calpe status -v {}' lists where.", array.name),
                false => get_blocks_back(array),
            };
            format!(
                "Look again in a moment; what stays so cannot be told while members are missing or give errors. {back}"
            )
        },
    }
}
