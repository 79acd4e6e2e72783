//! Where the log of an array starts, by the superblocks of its members (R2, T6).
//!
//! A start that is too late skips content of the log, so one device alone is not believed. A start that is
//! too early only costs time: no log space from there on is used again before every member in service knows a
//! later tail (W4). Pure: superblocks in, a verdict out.

use crate::array::mutation::{Mutation, is_off};
use crate::format::{LogStart, Superblock};
use crate::units::MemberIndex;

/// Sets in `superblock` what is believed of the log, and whether the array is clean; the rest as in
/// [`believed`]. Without a member in service nothing changes.
pub(in crate::array) fn record(
    superblock: &mut Superblock,
    seated: &[&Superblock],
    all: &[&Superblock],
    record: &Superblock,
) {
    if seated.is_empty() {
        return;
    }
    superblock.clean = is_clean(seated);
    superblock.log_start = believed(seated, all, record);
    // One update records the same on all: anything that one device records beyond the others is a claim (T6).
    let newest = seated.iter().filter(|s| s.epoch == record.epoch && s.update == record.update);
    superblock.map_pages = newest.map(|s| s.map_pages).min().unwrap_or(superblock.map_pages);
}

/// The start of the log that is believed. `seated` are the superblocks of the members in service, at least
/// one, `all` those of all devices of the array, and `record` is one of the epoch that is served.
///
/// Of k + s members in service, the latest start counts that s + 1 of them have or are past, and two in any
/// case: a wrong one would take that many wrong superblocks. An update that a power cut ended may have told
/// fewer members of a later start; then everything from the earlier one on is still there.
///
/// A device that joined with the epoch has nothing in its log from before. If a member has only the parent of
/// that epoch, because the update was cut off, the start in the epoch itself counts: the log was empty, and
/// all members knew that, before the device joined.
fn believed(seated: &[&Superblock], all: &[&Superblock], record: &Superblock) -> LogStart {
    let mut starts: Vec<LogStart> = seated.iter().map(|s| s.log_start).collect();
    starts.sort_unstable_by(|a, b| b.cmp(a));
    // In a clean array everything is in place, and only the numbers in use matter: the highest is above them
    // all.
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
    let of_epoch = all.iter().filter(|s| s.epoch == epoch).map(|s| s.log_start);
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

/// Whether everything in the log is in place: every member in service records that.
fn is_clean(seated: &[&Superblock]) -> bool {
    seated.iter().all(|s| s.clean)
}

#[cfg(test)]
mod tests {
    use super::*;
    use uuid::Uuid;

    #[test]
    fn a_start_that_one_device_alone_names_is_not_believed() {
        let devices: Vec<Uuid> = (0..3).map(|at| Uuid::from_u128(1000 + at)).collect();
        let mut superblocks = crate::testing::small_array(2, 1).superblocks(&devices);
        for (superblock, sequence) in superblocks.iter_mut().zip([5, 5, 9]) {
            superblock.clean = false;
            superblock.log_start = LogStart { epoch: 1, sequence };
        }
        let all: Vec<&Superblock> = superblocks.iter().collect();
        assert_eq!(believed(&all, &all, all[0]).sequence, 5);
    }
}
