//! Why an administrator's request is refused: a variant for each reason, with the facts behind it. The
//! administrator reads its text.
//!
//! Plain data. Must decide nothing, and must not know any machine of the array.

use crate::format::{MemberSet, MemberState, Unfit};
use crate::units::{LaneIndex, MemberIndex};

/// Why a device's content must not be built over unless an administrator gives it up.
pub(in crate::array) const NOWHERE_ELSE: &str = "may be nowhere else";

/// Why an administrator's request is refused, having changed nothing; or why it failed later
/// ([`AdminRefusal::NewDeviceLeft`], [`AdminRefusal::ReplacementGivenUp`]). A field `array` is the array's
/// name: the text names commands that take it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminRefusal {
    /// The array takes no requests any more.
    #[error("the array is stopping")]
    Stopping,
    /// A second request to stop.
    #[error("the array is stopping already")]
    StoppingAlready,
    /// No member has this index.
    #[error("there is no member {member}: the array has members 0 to {}", width - 1)]
    NoSuchMember {
        /// The index.
        member: MemberIndex,
        /// How many members the array has.
        width: usize,
    },
    /// The log of the array cannot be replayed, and members that are missing may help.
    #[error(
        "the array cannot be served: {reason}. Stop it with 'calpe export {array}', bring back members that are missing, and \
         import it again"
    )]
    NotServed {
        /// Name of the array.
        array: String,
        /// Why the log cannot be replayed.
        reason: String,
    },
    /// The log of the array cannot be replayed, and all members are here.
    #[error("the array cannot be served: {reason}. 'calpe status {array}' says what can be done")]
    NotServedWhole {
        /// Name of the array.
        array: String,
        /// Why the log cannot be replayed.
        reason: String,
    },
    /// The log of the array cannot be replayed, and nothing was written to its members at this start.
    #[error(
        "the array cannot be served as it was started, and nothing was written: stop it, bring back members that are missing, and \
         start it with them"
    )]
    NotServedUnwritten,
    /// A repair before the log is replayed.
    #[error("the array does not serve yet, its redo log is being replayed: try again when that is done")]
    NotServingYet,

    /// The member is already out of service in the very state asked for.
    #[error("member {member} is {} already", state.as_str())]
    OutAlready {
        /// Which member.
        member: MemberIndex,
        /// Its state.
        state: MemberState,
    },
    /// The member is out of service in another state, and a failed array records nothing.
    #[error(
        "member {member} is {} already, and the array has FAILED: nothing can be recorded before its members are back",
        state.as_str()
    )]
    NotRecorded {
        /// Which member.
        member: MemberIndex,
        /// Its state.
        state: MemberState,
    },
    /// Without the member too few would be online.
    #[error("member {member} is needed: {} online, and with fewer the array could not serve its data", members_are(*online))]
    Needed {
        /// Which member.
        member: MemberIndex,
        /// How many members are online, this one among them.
        online: usize,
    },
    /// The member left by itself before it could go offline as ordered, and came back with another device.
    #[error("member {member} has left meanwhile, and has another device now")]
    HasOtherDevice {
        /// Which member.
        member: MemberIndex,
    },

    /// The device is too small for a member.
    #[error("the device has {bytes} bytes and {needed} are needed")]
    TooSmall {
        /// What it has.
        bytes: u64,
        /// What a member takes.
        needed: u64,
    },
    /// The member is not out.
    #[error("member {member} is {} already; use 'calpe replace' for another device", state.as_str())]
    InAlready {
        /// Which member.
        member: MemberIndex,
        /// Its state.
        state: MemberState,
    },
    /// The superblock of the device may not be written by this version.
    #[error("member {member} cannot come back: {why}; 'calpe replace' builds it anew")]
    Unfit {
        /// Which member.
        member: MemberIndex,
        /// What is wrong with the superblock.
        why: Unfit,
    },
    /// The superblock is that of another lane of the array.
    #[error(
        "member {member} cannot come back: its device has the superblock of lane {found} where that of lane {expected} belongs; \
         'calpe replace' builds it anew"
    )]
    OtherLane {
        /// Which member.
        member: MemberIndex,
        /// The lane by that superblock.
        found: LaneIndex,
        /// The lane that lies there.
        expected: LaneIndex,
    },
    /// The superblock of the device claims a count that is not believed.
    #[error("member {member} cannot come back: {claim}; 'calpe replace' builds it anew")]
    Unbelievable {
        /// Which member.
        member: MemberIndex,
        /// The claim.
        claim: Overclaim,
    },
    /// The content of the device may be nowhere else, and the member would be built over it.
    #[error("member {member} cannot come back: {why}")]
    Kept {
        /// Which member.
        member: MemberIndex,
        /// Its content.
        why: Behind,
    },
    /// The device is that of a member which was replaced, and no superblock says so yet.
    #[error("this device was replaced just now, and that is still being recorded: try again")]
    ReplacedJustNow,
    /// A replacement of the member is being built, and would be in the way of its own device.
    #[error(
        "a replacement of member {member} is being built: wait until it is complete, or give it up with 'calpe replace --cancel \
         {array} {member}'"
    )]
    BeingReplaced {
        /// Name of the array.
        array: String,
        /// Which member.
        member: MemberIndex,
    },
    /// The array has failed, and other members must come back before this one.
    #[error(
        "the array has FAILED, and member {member} lacks what was written after it had left, or may lack it: bring back first what \
         was in service until then, with 'calpe online {array} MEMBER' for member {}; then the array serves again, and member \
         {member} is caught up with what it missed",
        listed(first)
    )]
    OthersFirst {
        /// Name of the array.
        array: String,
        /// Which member.
        member: MemberIndex,
        /// Members that were in service when the array failed.
        first: MemberSet,
    },
    /// The array has failed, and the member had left service before others did.
    #[error(
        "the array has FAILED, and member {member} may lack writes that it had acknowledged and not flushed ({}); clients notice \
         that only when the array is started anew. Restart it, without --force: the log is replayed, and nothing that was flushed \
         is lost",
        why.as_deref().unwrap_or("it left before the others")
    )]
    MayLackUnflushed {
        /// Which member.
        member: MemberIndex,
        /// Why it left, where that is known.
        why: Option<String>,
    },
    /// The array has failed, and the device is not as the member left it.
    #[error(
        "the array has FAILED and this device does not hold what member {member} last held, or that is not sure{}; bring back the \
         members that were in service when it failed, or restart the array: a start looks at all members that are there",
        why.map(|why| format!(" ({why})")).unwrap_or_default()
    )]
    NotAsItLeft {
        /// Which member.
        member: MemberIndex,
        /// How that is known, if it is.
        why: Option<Behind>,
    },

    /// Nothing is built in an array that has failed.
    #[error("the array has FAILED; bring its members back before replacing one")]
    NothingToBuildFrom,
    /// The member has a replacement.
    #[error(
        "a replacement of member {member} is being built already: wait until it is complete, or give it up with 'calpe replace \
         --cancel {array} {member}'"
    )]
    BeingReplacedAlready {
        /// Name of the array.
        array: String,
        /// Which member.
        member: MemberIndex,
    },
    /// The new device was in its place, and left before that was recorded.
    #[error("the new device has left again meanwhile: see 'calpe events'")]
    NewDeviceLeft,
    /// The replacement ended before it was recorded.
    #[error("the replacement was cancelled or given up meanwhile: see 'calpe events'")]
    ReplacementGivenUp,
    /// A member that is being rebuilt is no replacement that could be given up.
    #[error(
        "member {member} is REBUILDING and there is no old device that could stay instead: 'calpe offline' or 'calpe fail' ends \
         the rebuild"
    )]
    NoOldDevice {
        /// Which member.
        member: MemberIndex,
    },
    /// Lanes have the new device as the member, or were told to change over to it.
    #[error(
        "lanes of the array change over to the new device of member {member}, or have done so, and the others follow: it cannot be \
         given up any more. Wait until 'calpe status {array}' shows the member on that device; then another one can replace it"
    )]
    ChangesOver {
        /// Name of the array.
        array: String,
        /// Which member.
        member: MemberIndex,
    },
    /// The member has no replacement.
    #[error("member {member} is not being replaced")]
    NotBeingReplaced {
        /// Which member.
        member: MemberIndex,
    },

    /// A scrub of an array that has failed.
    #[error("the array has FAILED; there is nothing to scrub")]
    NothingToScrub,
    /// There is a scrub that is not paused.
    #[error("a scrub {} already: {}'calpe wait {array} -t scrub' waits for its end", state.words(), state.advice())]
    ScrubAlready {
        /// Name of the array.
        array: String,
        /// Its state.
        state: ScrubState,
    },
    /// The scrub is paused.
    #[error("the scrub is paused already: 'calpe scrub {array}' goes on with it")]
    ScrubPausedAlready {
        /// Name of the array.
        array: String,
    },
    /// There is no scrub, running or paused.
    #[error("no scrub is running")]
    NoScrub,
    /// A repair of an array that has failed.
    #[error("the array has FAILED; there is nothing to look at")]
    NothingToLookAt,
    /// There is a repair.
    #[error("a repair is running already")]
    RepairAlready,
}

/// The state of a scrub that is not paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScrubState {
    /// Waits until the content of the redo log is in place, which needs room.
    ForLog,
    /// Waits for a rebuild.
    ForRebuild,
    /// Waits for room on a member.
    ForRoom,
    /// Runs.
    Running,
}

impl ScrubState {
    fn words(self) -> &'static str {
        match self {
            ScrubState::ForLog => "waits until what the redo log holds is in place",
            ScrubState::ForRebuild => "waits for a rebuild",
            ScrubState::ForRoom => "waits for room on a member that is full",
            ScrubState::Running => "is running",
        }
    }

    fn advice(self) -> &'static str {
        match self {
            ScrubState::ForLog | ScrubState::ForRoom => "make room; ",
            ScrubState::ForRebuild | ScrubState::Running => "",
        }
    }
}

/// Why a device is not current.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Behind {
    /// The device was in service in a history that has gone on apart from that of the array, or is an old
    /// copy.
    #[error(
        "it holds another history, or is an old copy: none of those that served with it in epoch {held} serves in epoch {current}, and \
         what was written there {NOWHERE_ELSE}. Keep it, or give that up: 'calpe replace --force' builds it anew"
    )]
    Apart {
        /// Number of its epoch.
        held: u64,
        /// Number of the array's epoch.
        current: u64,
    },
    /// The members that serve are older copies of those that served with it.
    #[error(
        "it is newer than the array, which was started without it, from older copies of the others: it has update {complete} of \
         the superblocks, which had reached every member, and the array went on after update {left}. What was written in between \
         {NOWHERE_ELSE}. Keep it, or give that up: 'calpe replace --force' builds it anew"
    )]
    Newer {
        /// The newest update that it knows to be complete.
        complete: u64,
        /// The newest update that it can have received from those that serve.
        left: u64,
    },
    /// Its epoch is not that of the array.
    #[error("{}", words_of_epochs(*held, *current))]
    Epoch {
        /// Number of its epoch.
        held: u64,
        /// Number of the array's epoch.
        current: u64,
    },
    /// The device lacks an update of the superblocks that it had.
    #[error(
        "it was rolled back to an older state of itself: it has update {held} of its superblock, and update {complete} had \
         reached every member"
    )]
    Update {
        /// The update that it has.
        held: u64,
        /// The newest that had reached every member.
        complete: u64,
    },
    /// By its own record, less of its log is in place than was when it left.
    #[error(
        "it was rolled back to an older state of itself, or left before it was told what was in place, which nothing tells \
         apart: it shows the batches of its log below {shown} to be in place, and those below {tail} were when it left"
    )]
    Tail {
        /// Batches below are in place, by its record.
        shown: u64,
        /// Batches below were in place when it left.
        tail: u64,
    },
}

/// A count in a superblock beyond any that an array can have reached (T6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it claims {what} {claimed}, and the array knows of none after {known}")]
pub struct Overclaim {
    /// What is counted.
    pub what: &'static str,
    /// The count in the superblock.
    pub claimed: u64,
    /// The highest count that the array knows.
    pub known: u64,
}

fn words_of_epochs(held: u64, current: u64) -> String {
    match held < current {
        true => format!("stale: it holds epoch {held} and the array is at epoch {current}; it missed writes"),
        false => {
            format!("stale: it holds an epoch {held} that the array, at epoch {current}, went on without")
        }
    }
}

fn members_are(count: usize) -> String {
    match count {
        1 => "1 member is".to_owned(),
        many => format!("{many} members are"),
    }
}

fn listed(members: &MemberSet) -> String {
    members.iter().map(|member| member.to_string()).collect::<Vec<_>>().join(", ")
}
