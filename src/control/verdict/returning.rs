//! The sentences of a status about members that come back by themselves. Words only: `verdict` decides which
//! members these are.

use super::{is_displaced, is_refused, names};
use crate::control::{ArrayReport, ArrayState, Condition, MemberReport};
use calpe_core::units::Printable;

/// What to do about members that come back by themselves: never replace them, unless the device in their
/// place cannot serve.
pub(super) fn wait_for(array: &ArrayReport, members: &[&MemberReport]) -> String {
    let (full, rest): (Vec<&MemberReport>, Vec<_>) =
        members.iter().copied().partition(|member| member.conditions.contains(&Condition::Full));
    let (displaced, rest): (Vec<&MemberReport>, Vec<_>) =
        rest.into_iter().partition(|member| is_displaced(member));
    let (refused, rest): (Vec<&MemberReport>, Vec<_>) =
        rest.into_iter().partition(|member| is_refused(member));
    let (quarantined, away): (Vec<&MemberReport>, Vec<_>) =
        rest.into_iter().partition(|member| member.conditions.contains(&Condition::Quarantined));
    let mut text = Vec::new();
    if !away.is_empty() {
        let again = match away.iter().filter_map(|member| member.tried_in_s).max() {
            None => "being tried now".to_owned(),
            Some(seconds) => format!("tried again within {} s", seconds.max(1)),
        };
        text.push(format!(
            "Waiting for {}: what is there comes back by itself when it answers ({again}); see that hosts and network are up. ({})",
            hosts_of(&away),
            names(&away)
        ));
    }
    if !quarantined.is_empty() {
        let seconds = quarantined.iter().filter_map(|member| member.tried_in_s).max().unwrap_or(0).max(1);
        text.push(format!(
            "Whether {} is back is not asked for another {seconds} s, as what was sent there before the connection was lost may \
             still be written; what is there comes back by itself after that, if it answers. ({})",
            hosts_of(&quarantined),
            names(&quarantined)
        ));
    }
    if !full.is_empty() {
        text.push(format!(
            "Make room, 16 MiB at least for a file: what is full comes back by itself then. ({})",
            names(&full)
        ));
    }
    if !refused.is_empty() {
        let whose = if refused.len() == 1 { "a member" } else { "members" };
        text.push(format!(
            "Waiting alone does not bring back {whose} whose server is there and whose device is refused: mend what stands \
             beside it (certificates and settings of TLS on both sides, the name of the export and who may see it, the \
             server's own storage); it comes back by itself then. ({})",
            names(&refused)
        ));
    }
    if let Some(first) = displaced.first() {
        let anew = match array.state {
            ArrayState::Failed => String::new(),
            _ => format!(
                "; a device that is gone for good is replaced with 'calpe replace {} {} NEW'",
                array.name, first.index
            ),
        };
        text.push(format!(
            "What answers in the place of {} cannot serve: see that the URI leads to the device of its member, whole and \
             writable, which comes back by itself then{anew}. ({})",
            if displaced.len() == 1 { "a member" } else { "members" },
            names(&displaced)
        ));
    }
    text.join(" ")
}

/// The hosts of these members, for people, each once.
fn hosts_of(members: &[&MemberReport]) -> String {
    let mut hosts: Vec<String> =
        members.iter().map(|member| Printable(&host_of(&member.name)).to_string()).collect();
    hosts.dedup();
    hosts.join(", ")
}

/// The host in the URI of a remote member; else the member's name.
fn host_of(name: &str) -> String {
    let rest = name.split_once("://").map_or(name, |(_, rest)| rest);
    let host = match rest.strip_prefix('[') {
        Some(address) => address.split(']').next().unwrap_or_default(),
        None => rest.split(['/', ':', '?']).next().unwrap_or_default(),
    };
    if host.is_empty() { name.to_owned() } else { host.to_owned() }
}
