//! Where the log of an array starts, by what the superblocks of its members say (R2, T6).
//!
//! A start that is too late skips what the log holds, so what one device alone says is not
//! believed. A start that is too early only costs time: nothing that the log holds from there on is
//! used again before every member in service knows a later tail (W4). Pure: superblocks in, a
//! verdict out.

use crate::array::mutation::{Mutation, is_off};
use crate::format::{LogStart, Superblock};
use crate::units::MemberIndex;

/// The start of the log that is believed. `seated` are the superblocks of the members in service,
/// one at least, `all` those of all devices of the array, and `record` is one of the epoch that is
/// served.
///
/// Of k + s members in service, the latest start counts that s + 1 of them have or are past, and
/// two in any case: so many would have to lie. An update that a power cut ended may have told fewer
/// of a later start; then everything from the earlier one on is still there.
///
/// A device that joined with the epoch has nothing in its log from before. Where a member has only
/// the parent of that epoch, because the update was cut off, the start that the epoch itself names
/// holds: the log was empty, and all knew it, before the device joined.
pub(in crate::array) fn believed(
    seated: &[&Superblock],
    all: &[&Superblock],
    record: &Superblock,
) -> LogStart {
    let mut starts: Vec<LogStart> = seated.iter().map(|s| s.redo.start).collect();
    starts.sort_unstable_by(|a, b| b.cmp(a));
    // In a clean array everything is in place, and only the numbers in use matter: the highest is above them all.
    if is_clean(seated) || is_off(Mutation::LoneLogStartBelieved) {
        return starts[0];
    }
    let spare = starts.len().saturating_sub(usize::from(record.geometry.data));
    let confirmed = starts[spare.max(1).min(starts.len() - 1)];
    let epoch = record.epoch;
    let mut parents = seated.iter().filter(|s| epoch.parent != 0 && s.epoch.id == epoch.parent);
    if !parents.any(|parent| has_joined(record, parent)) {
        return confirmed;
    }
    let of_epoch = all.iter().filter(|s| s.epoch == epoch).map(|s| s.redo.start);
    of_epoch.min().map_or(confirmed, |start| start.max(confirmed))
}

/// Whether some device is in service by `record` and was not by the superblock of the epoch before.
fn has_joined(record: &Superblock, parent: &Superblock) -> bool {
    let serves = |of: &Superblock, at: u16| {
        let uuid = of.members.get(usize::from(at)).map(|member| member.uuid);
        uuid.filter(|_| of.epoch.live.contains(MemberIndex(at)))
    };
    (0..record.geometry.width())
        .any(|at| serves(record, at).is_some() && serves(record, at) != serves(parent, at))
}

/// Whether the log holds nothing that is not in place: every member in service says so.
pub(in crate::array) fn is_clean(seated: &[&Superblock]) -> bool {
    seated.iter().all(|s| s.clean)
}
