//! Why an array cannot be served. Plain data; the administrator reads its text. Must decide nothing.

use crate::array::members::assembly::words::{NotUsed, older_copies, unconfirmed};
use crate::array::refusal::NOWHERE_ELSE;
use crate::format::{MemberSet, Unfit};
use crate::units::{LaneIndex, MemberIndex};
use uuid::Uuid;

/// Why an array cannot be served.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssemblyError {
    /// There are no devices.
    #[error("no device of the array was found")]
    Nothing,
    /// A member must not be written to, and the others cannot be served without it.
    #[error("array '{name}' cannot start with member {member}: {why}. Without it: {without}")]
    Unfit {
        /// Array name.
        name: String,
        /// The member, the first if there are several.
        member: MemberIndex,
        /// Why it must not be written to.
        why: Unfit,
        /// Why the others cannot be served.
        without: Box<AssemblyError>,
    },
    /// Superblocks of one array disagree about facts that never change.
    #[error(
        "members {first} and {second} of array '{name}' disagree about its geometry: one of them is damaged or foreign; take it away"
    )]
    Inconsistent {
        /// Array name.
        name: String,
        /// A member.
        first: MemberIndex,
        /// One that differs from it.
        second: MemberIndex,
    },
    /// Superblocks of two lanes of one array, each of which is assembled by itself.
    #[error(
        "members {first} and {second} of array '{name}' have superblocks of lanes {first_lane} and {second_lane} in one place: one of \
         them was written to the wrong place, or copied there"
    )]
    OtherLane {
        /// Array name.
        name: String,
        /// A member.
        first: MemberIndex,
        /// The lane by its superblock.
        first_lane: LaneIndex,
        /// One of another lane.
        second: MemberIndex,
        /// That lane.
        second_lane: LaneIndex,
    },
    /// Two devices claim the same identity.
    #[error(
        "two devices claim to be member {member} of array '{name}' (device uuid {uuid}): one is a copy; take the copy away"
    )]
    Duplicate {
        /// Array name.
        name: String,
        /// The member.
        member: MemberIndex,
        /// The identity that occurs twice.
        uuid: Uuid,
    },
    /// Too few members.
    #[error(
        "array '{name}' ({data}+{parity}) cannot start: {found} of {needed} needed current members are here; missing: {missing}"
    )]
    TooFew {
        /// Array name.
        name: String,
        /// k.
        data: u16,
        /// m.
        parity: u16,
        /// Usable members found.
        found: usize,
        /// How many are needed at least.
        needed: usize,
        /// The members that are missing: index and device uuid.
        missing: String,
    },
    /// Enough members to read, too few to be sure that no other host serves the rest.
    #[error(
        "array '{name}': {found} of {width} members are here, not a majority, and not all that were last in service; others \
         could be serving the rest. Missing: {missing}. Bring them back, or force the start if they are lost for good"
    )]
    NoMajority {
        /// Array name.
        name: String,
        /// Usable members found.
        found: usize,
        /// k+m.
        width: usize,
        /// The members that are missing.
        missing: String,
    },
    /// A member claims something that no other confirms.
    #[error("{}", unconfirmed(name, *member, *device, claim, older))]
    Unconfirmed {
        /// Array name.
        name: String,
        /// The member.
        member: MemberIndex,
        /// Its device.
        device: Uuid,
        /// The claim.
        claim: String,
        /// Members that are here as older copies of themselves if it is true; none where it claims something
        /// else.
        older: Box<MemberSet>,
    },
    /// Too many members were rolled back.
    #[error(
        "array '{name}' cannot start: {which}. The others are {found}, too few. Bring back members as they were last, or take \
         those away that are newer to start from the older state"
    )]
    RolledBack {
        /// Array name.
        name: String,
        /// The members that were rolled back.
        members: Box<MemberSet>,
        /// Which they are, and how that is known.
        which: String,
        /// Members that are current.
        found: usize,
    },
    /// Two histories.
    #[error(
        "array '{name}' has two diverged histories: it was forced to start with different members, and {one} served without {other}. \
         Take the members of the history that you do not want away; what was written there can still be read by starting them \
         alone, forced"
    )]
    Diverged {
        /// Array name.
        name: String,
        /// The members of one history, and its epoch.
        one: String,
        /// The members of the other history, and its epoch.
        other: String,
    },
}

impl AssemblyError {
    /// Why a forced start leaves a member out because of this error.
    pub(super) fn left_out_by_force(&self) -> NotUsed {
        match self {
            AssemblyError::Unconfirmed { older, claim, .. } if !older.is_empty() => {
                let (them, are) = older_copies(older);
                NotUsed::kept(format!(
                    "left out by force, although it is newer: {them} {are} (it {claim}). What was written since they were copied is not \
                     served, and {NOWHERE_ELSE}: keep this device. With the current ones of {them} in their places instead, a start finds \
                     all of it"
                ))
            }
            _ => NotUsed::merely(format!("left out by force: {self}")),
        }
    }
}
