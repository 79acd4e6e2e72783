//! Whether a device holds what the array left on it, or was rolled back to an older copy of itself: rule T6 of the crash-safety
//! design. One question with one answer, for assembly, `online`, automatic return, and catching up.
//!
//! What a device says of itself is a claim that is compared with what others say. Pure. What the rings of all members tell
//! together (reused space) is judged where they are read, in `recovery/chain.rs`.

use super::mutation::{Mutation, is_off};
use crate::format::{Epoch, Role, Superblock};
use crate::units::MemberIndex;

/// What a device must show to be current.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// The epoch that it holds, or whose parent: then the bump to it was cut off, and nothing was written under it (A1).
    pub epoch: Epoch,
    /// The newest update of the superblocks that is known to be complete.
    pub update: u64,
    /// Batches below are in place on it, and its superblock or a piece in its ring says so.
    pub tail: u64,
}

/// Why a device is not current.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Behind {
    #[error(
        "it holds another history, or is an old copy: none of those that served with it in epoch {held} serves in epoch {current}, and \
         what was written there may be nowhere else. Keep it, or give that up: 'calpe replace --force' builds it anew"
    )]
    Apart { held: u64, current: u64 },
    #[error("stale: it holds epoch {held} and the array is at epoch {current}; it missed writes")]
    Epoch { held: u64, current: u64 },
    #[error(
        "it was rolled back to an older state of itself: it has update {held} of its superblock, and update {complete} had \
         reached every member"
    )]
    Update { held: u64, complete: u64 },
    #[error(
        "it was rolled back to an older state of itself: it shows the batches of its log below {shown} to be in place, and \
         those below {tail} were when it left"
    )]
    Tail { shown: u64, tail: u64 },
}

/// Whether the device with this superblock is current; `ring_tail` is the highest tail that pieces in its ring show, 0 where
/// that is not asked.
pub(super) fn is_current(superblock: &Superblock, ring_tail: u64, mark: &Mark) -> Result<(), Behind> {
    if !holds(superblock, &mark.epoch) {
        return Err(Behind::Epoch { held: superblock.epoch.number, current: mark.epoch.number });
    }
    has_update(superblock, mark.update)?;
    let shown = superblock.redo.start.sequence.max(ring_tail);
    if shown < mark.tail && !is_off(Mutation::LeftTailNotChecked) {
        return Err(Behind::Tail { shown, tail: mark.tail });
    }
    Ok(())
}

/// Whether a device has the newest update of the superblocks that is known to have reached all members, it among them.
pub(super) fn has_update(superblock: &Superblock, complete: u64) -> Result<(), Behind> {
    if superblock.update < complete && !is_off(Mutation::NoUpdateCount) {
        return Err(Behind::Update { held: superblock.update, complete });
    }
    Ok(())
}

/// Whether a device served a history of its own, so that what was written there may be nowhere else (A3): it did not merely
/// miss what `line`, a superblock of the history that is served, has.
///
/// A member that merely left has an epoch of the line, made by members some of which serve still, unless all of them have left since.
/// The device of another history shows three things: none of those that served with it serves in the line; some that serve in the
/// line were out in its epoch, as the same devices (by uuid); and its log started anew behind what was in place when it left the
/// line. An older copy of a member may show the first two where everybody else was replaced meanwhile. A history whose own members, or
/// those of the line, have all been replaced since is not recognised.
pub(super) fn is_apart(device: &Superblock, line: &Superblock) -> bool {
    let names = |of: &Superblock, member| of.members.get(usize::from(member)).map(|record| record.uuid);
    let Superblock { member, epoch: held, .. } = device;
    let is_own = device.role == Role::Member && names(line, member.0) == Some(device.device);
    let was_in = held.live.contains(*member) && !line.epoch.live.contains(*member);
    let left = line.left.get(usize::from(member.0)).copied().unwrap_or_default();
    let is_older = device.redo.start.sequence < left.tail;
    let is_of_line = is_older || [line.epoch.id, line.epoch.parent, left.epoch].contains(&held.id);
    let is_same = |other: &MemberIndex| names(line, other.0) == names(device, other.0);
    let mut known = line.epoch.live.iter().filter(is_same).peekable();
    is_own
        && was_in
        && !is_of_line
        && known.peek().is_some()
        && known.all(|other| !held.live.contains(other))
        && !is_off(Mutation::OtherHistoryIsStale)
}

/// Whether a device's content is of this epoch: it holds the epoch, or its parent with the bump unfinished (A1).
pub(super) fn holds(superblock: &Superblock, epoch: &Epoch) -> bool {
    let held = superblock.epoch;
    if is_off(Mutation::EpochWithoutId) {
        return held.number == epoch.number || held.number + 1 == epoch.number;
    }
    let unfinished = epoch.parent != 0 && held.id == epoch.parent;
    held == *epoch || (unfinished && !is_off(Mutation::EpochOnlyHighestNumber))
}
