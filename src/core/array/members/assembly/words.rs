//! Words about devices that are not used, about members that are older copies of themselves, and about the
//! one that is newer. Must decide nothing.

use crate::format::MemberSet;
use crate::units::MemberIndex;
use uuid::Uuid;

/// Why a device of an array is not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotUsed {
    /// The reason, in words for people.
    pub why: String,
    /// Whether its content may be nowhere else: it must not be built over unless an administrator gives that
    /// up.
    pub is_kept: bool,
}

impl NotUsed {
    /// For a device that holds nothing that counts.
    pub(super) fn merely(why: impl ToString) -> NotUsed {
        NotUsed { why: why.to_string(), is_kept: false }
    }

    /// For a device whose content may be nowhere else.
    pub(super) fn kept(why: impl ToString) -> NotUsed {
        NotUsed { why: why.to_string(), is_kept: true }
    }
}

/// Tells that an array would be served in an earlier state, without what was written since.
const STARTS_OLDER: &str = "Forced, the array starts from the older state";

/// The text of `AssemblyError::Unconfirmed`.
pub(super) fn unconfirmed(
    name: &str,
    member: MemberIndex,
    device: Uuid,
    claim: &str,
    older: &MemberSet,
) -> String {
    if older.is_empty() {
        return format!(
            "array '{name}' cannot start: member {member} (device {device}) {claim}, and no other member that is here confirms it. Either \
             it is damaged, or the others are older copies of themselves. Bring back members that confirm it, take it away, or force \
             the start without it"
        );
    }
    let (them, are) = older_copies(older);
    format!(
        "array '{name}' cannot start: {them} {are}. Member {member} (device {device}) is newer: it {claim}. Put the current device or file \
         of {them} back: then nothing is lost. {STARTS_OLDER}, without member {member}, and what was written since is not there"
    )
}

/// "members 0, 1", and a word for what they are.
pub(super) fn older_copies(older: &MemberSet) -> (String, &'static str) {
    match older.len() {
        1 => (format!("member {older}"), "is an older copy of itself"),
        _ => (format!("members {older}"), "are older copies of themselves"),
    }
}
