//! Whether a device still holds what the array wrote to it, or was rolled back to an older copy of itself:
//! rule T6 of the crash-safety design. Assembly, `online`, automatic return, and catching up all ask here.
//!
//! What a device records of itself is a claim that is compared with the records of others. Pure. What the
//! rings of all members prove together (reused space) is judged where they are read, in `recovery/chain.rs`.

use crate::array::mutation::{Mutation, is_off};
use crate::array::refusal::Behind;
use crate::format::{Epoch, MemberState, Role, Superblock};
use crate::units::MemberIndex;
use uuid::Uuid;

/// What a device must show to be current.
// Plain data: the record of a member, given to the functions that judge its device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// The epoch that it must hold, or whose parent it must hold: then the bump to it was cut off, and
    /// nothing was written under it (A1).
    pub epoch: Epoch,
    /// The newest update of the superblocks that is known to be complete.
    pub update: u64,
    /// Batches below are in place on it, and its superblock or a piece in its ring records that.
    pub tail: u64,
}

/// Whether the device with this superblock is current; `ring_tail` is the highest tail that pieces in its
/// ring show, 0 where that does not matter.
pub(super) fn is_current(superblock: &Superblock, ring_tail: u64, mark: &Mark) -> Result<(), Behind> {
    if !holds(superblock, &mark.epoch) {
        return Err(Behind::Epoch { held: superblock.epoch.number, current: mark.epoch.number });
    }
    has_update(superblock, mark.update)?;
    let shown = superblock.log_start.sequence.max(ring_tail);
    if shown < mark.tail && !is_off(Mutation::LeftTailNotChecked) {
        return Err(Behind::Tail { shown, tail: mark.tail });
    }
    Ok(())
}

/// Whether a device has the newest update of the superblocks that is known to have reached all members,
/// including its own.
pub(super) fn has_update(superblock: &Superblock, complete: u64) -> Result<(), Behind> {
    if superblock.update < complete && !is_off(Mutation::NoUpdateCount) {
        return Err(Behind::Update { held: superblock.update, complete });
    }
    Ok(())
}

/// Why a device that the array with superblock `line` does without must not be built over unless an
/// administrator explicitly gives up its content (A3): that may be nowhere else.
pub(super) fn why_kept(device: &Superblock, line: &Superblock) -> Option<Behind> {
    if is_apart(device, line) {
        return Some(Behind::Apart { held: device.epoch.number, current: line.epoch.number });
    }
    let left = line.left.get(usize::from(device.member.0)).map_or(0, |left| left.update);
    is_newer(device, line).then_some(Behind::Newer { complete: device.update_complete, left })
}

/// Whether a device was in service beside members of the line when these held more than the line began with:
/// they are then older copies of themselves (A3, T6).
///
/// A member that merely left knows no update to be complete that is newer than the newest which the line had
/// then. With one exception: the update under way when it last saw the members that serve may have become
/// complete on the others, and no further one began before the loss of those members was recorded. So that
/// update counts only if all members that serve, and are known to the device, were with it. A device is not
/// recognised if it left before the line began, or when updates at which members leave were not recorded yet.
fn is_newer(device: &Superblock, line: &Superblock) -> bool {
    let left = line.left.get(usize::from(device.member.0)).map_or(0, |left| left.update);
    let were_with_it = || {
        let mut known = known_to(device, line).peekable();
        known.peek().is_some() && known.all(|other| device.epoch.live.contains(other))
    };
    let is_beyond = |known: u64| device.update_complete > known;
    // A device of another history may be newer as well.
    let is_believed = !is_off(Mutation::NewerIsStale) && !is_off(Mutation::OtherHistoryIsStale);
    was_in(device, line)
        && left != 0
        && (is_beyond(left + 1) || is_beyond(left) && were_with_it())
        && is_believed
}

/// Whether a device was in service as a member that is out of service in the line.
fn was_in(device: &Superblock, line: &Superblock) -> bool {
    let is_own = device.role == Role::Member && uuid_of(line, device.member) == Some(device.device);
    is_own && device.epoch.live.contains(device.member) && !line.epoch.live.contains(device.member)
}

/// The members in service in the line that the device knows with the same devices.
fn known_to(device: &Superblock, line: &Superblock) -> impl Iterator<Item = MemberIndex> {
    line.epoch.live.iter().filter(|&other| uuid_of(line, other) == uuid_of(device, other))
}

fn uuid_of(superblock: &Superblock, member: MemberIndex) -> Option<Uuid> {
    superblock.members.get(usize::from(member.0)).map(|record| record.uuid)
}

/// Whether a device served a history of its own, so that data written there may be nowhere else (A3), rather
/// than merely missed the changes in `line`, a superblock of the history that is served.
///
/// A member that merely left has an epoch of the line, made by members some of which still serve, unless all
/// of them have left since. A device of another history shows three things: none of the members that served
/// with it serves in the line; some that serve in the line were out in its epoch, with the same devices (by
/// uuid); and its log started anew at or beyond the point up to which it had everything in place when it left
/// the line. An older copy of a member may show the first two where all other members were replaced
/// meanwhile. A history is not recognised if its own members, or those of the line, have all been replaced
/// since.
pub(super) fn is_apart(device: &Superblock, line: &Superblock) -> bool {
    let Superblock { member, epoch: held, .. } = device;
    let left = line.left.get(usize::from(member.0));
    let is_older = left.is_some_and(|left| device.log_start.sequence < left.tail);
    let left_epoch = left.map_or(0, |left| left.epoch);
    let is_of_line = is_older || [line.epoch.id, line.epoch.parent, left_epoch].contains(&held.id);
    let mut known = known_to(device, line).peekable();
    was_in(device, line)
        && !is_of_line
        && known.peek().is_some()
        && known.all(|other| !held.live.contains(other))
        && !is_off(Mutation::OtherHistoryIsStale)
}

/// Whether a device was in service in the epoch that it holds, if that counts its member. In superblocks of
/// earlier builds the device may have been under construction then, having come in while the epoch was not
/// complete.
pub(super) fn was_in_service(superblock: &Superblock) -> bool {
    let Superblock { member, device, ref epoch, .. } = *superblock;
    let own = superblock.members.get(usize::from(member.0)).filter(|record| record.uuid == device);
    let is_being_built = own.is_some_and(|record| record.state == MemberState::Rebuilding);
    !(epoch.live.contains(member) && is_being_built) || is_off(Mutation::NewDeviceInOldEpoch)
}

/// Whether a device's content is of this epoch: it holds the epoch, or its parent with the bump unfinished
/// (A1).
pub(super) fn holds(superblock: &Superblock, epoch: &Epoch) -> bool {
    let held = superblock.epoch;
    if is_off(Mutation::EpochWithoutId) {
        return held.number == epoch.number || held.number + 1 == epoch.number;
    }
    let unfinished = epoch.parent != 0 && held.id == epoch.parent;
    held == *epoch || (unfinished && !is_off(Mutation::EpochOnlyHighestNumber))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::refusal::NOWHERE_ELSE;
    use crate::format::{Left, MemberSet};

    fn members(indices: &[u16]) -> MemberSet {
        indices.iter().copied().map(MemberIndex).collect()
    }

    /// Member 2 of a 2+2, as of epoch 300 with `live`, which knows `complete` to be complete; and a line of
    /// members 0 and 1 from epoch 200, which left it out after update 10.
    fn divided(live: &[u16], complete: u64) -> (Superblock, Superblock) {
        let devices: Vec<Uuid> = (0..4).map(|at| Uuid::from_u128(1000 + at)).collect();
        let superblocks = crate::testing::small_array(2, 2).superblocks(&devices);
        let epoch = |number, id, live| Epoch { number, id, parent: 200, live };
        let mut device = superblocks[2].clone();
        (device.update, device.update_complete) = (complete + 1, complete);
        device.epoch = epoch(7, 300, members(live));
        let mut line = superblocks[0].clone();
        (line.update, line.update_complete) = (900, 899);
        line.epoch = epoch(7, 400, members(&[0, 1]));
        line.left[2] = Left { epoch: 200, tail: 1, update: 10 };
        (device, line)
    }

    fn is_kept_as_newer(device: &Superblock, line: &Superblock) -> bool {
        matches!(why_kept(device, line), Some(Behind::Newer { .. }))
    }

    #[test]
    fn a_device_that_was_in_service_with_newer_states_of_those_that_serve_is_kept() {
        let (device, line) = divided(&[0, 1, 2, 3], 11);
        let Some(why @ Behind::Newer { complete: 11, left: 10 }) = why_kept(&device, &line) else {
            panic!("{:?}", why_kept(&device, &line));
        };
        assert!(why.to_string().contains(NOWHERE_ELSE), "{why}");
        // Also where it holds the epoch with which it left the line.
        let mut same = device.clone();
        same.epoch = Epoch { id: 200, number: 6, ..same.epoch };
        assert!(is_kept_as_newer(&same, &line));
        // However far the line has come, and whichever devices have joined it or were replaced in it.
        let mut later = line;
        later.epoch = Epoch { number: 90, id: 9, parent: 8, live: members(&[0, 1, 3]) };
        later.members[1].uuid = Uuid::from_u128(7);
        assert!(is_kept_as_newer(&device, &later));
    }

    #[test]
    fn a_member_that_merely_left_is_not_kept() {
        for complete in [0, 9, 10] {
            let (device, line) = divided(&[0, 1, 2, 3], complete);
            assert_eq!(why_kept(&device, &line), None, "{complete}");
        }
        // The update that was under way when it lost the members that serve became complete without them, and
        // the next one recorded that.
        let (device, mut line) = divided(&[2, 3], 11);
        line.epoch.live.insert(MemberIndex(3));
        assert_eq!(why_kept(&device, &line), None);
        let (device, mut line) = divided(&[2, 3], 12);
        line.epoch.live.insert(MemberIndex(3));
        assert!(is_kept_as_newer(&device, &line), "another has become complete since");
    }

    #[test]
    fn a_device_that_was_not_in_service_or_is_not_known_is_not_kept() {
        type Change = fn(&mut Superblock, &mut Superblock);
        let changes: [Change; 5] = [
            |device, _| _ = device.epoch.live.remove(MemberIndex(2)),
            |device, _| device.role = Role::Replaced,
            |_, line| line.epoch.live = members(&[0, 1, 2]),
            |_, line| line.members[2].uuid = Uuid::from_u128(7),
            |_, line| line.left[2].update = 0,
        ];
        for (at, change) in changes.into_iter().enumerate() {
            let (mut device, mut line) = divided(&[0, 1, 2, 3], 50);
            change(&mut device, &mut line);
            assert_eq!(why_kept(&device, &line), None, "{at}");
        }
    }

    #[test]
    fn only_a_device_of_a_lower_epoch_is_said_to_have_missed_writes() {
        assert!(Behind::Epoch { held: 2, current: 3 }.to_string().contains("missed writes"));
        assert!(!Behind::Epoch { held: 3, current: 3 }.to_string().contains("missed writes"));
    }
}
