//! The requests to an array and the actions that it asks for: the vocabulary between an array and its volume,
//! and, for administrators' requests, between a volume and its driver. Plain data.

use crate::array::MemberCondition;
use crate::array::job::Job;
use crate::array::refusal::AdminRefusal;
use crate::block_io::{Buf, BufMut, DeviceId, IoOp, IoToken};
use crate::format::Superblock;
use crate::units::{MemberIndex, StripeIndex, VolumeOffset};
use std::ops::Range;
use uuid::Uuid;

/// Names one client or admin request in its completion; chosen by the driver, opaque here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Names one [`StripeRequest`] of a volume; chosen by the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StripeRequestId(pub u64);

/// A request of a volume about stripes; the array knows where they are. Offsets and lengths are multiples of
/// the array's sector.
#[derive(Debug)]
pub enum StripeRequest {
    /// Fill `buf` from byte `offset` of the stripe's user data; must not go beyond the stripe.
    Read {
        /// Which stripe.
        stripe: StripeIndex,
        /// Bytes into the k * chunk bytes of user data.
        offset: usize,
        /// Filled on success.
        buf: BufMut,
    },
    /// Write `data` at byte `offset` of the stripe's user data.
    Write {
        /// Which stripe.
        stripe: StripeIndex,
        /// Bytes into the k * chunk bytes of user data.
        offset: usize,
        /// At least one byte, not beyond the stripe.
        data: Buf,
        /// Done only when on stable storage.
        fua: bool,
    },
    /// Write a whole stripe.
    WriteStripe {
        /// Which stripe.
        stripe: StripeIndex,
        /// Its k * chunk bytes of user data, one part after the other.
        parts: Vec<Buf>,
        /// Done only when on stable storage.
        fua: bool,
    },
    /// Make whole stripes read as zeroes.
    Zero {
        /// First stripe.
        first: StripeIndex,
        /// How many, at most [`ZERO_RUN_STRIPES`].
        count: u64,
    },
    /// Done when all writes completed before are on stable storage.
    Flush,
    /// Which chunks of these stripes are holes.
    Extents {
        /// First stripe.
        first: StripeIndex,
        /// How many.
        count: u64,
    },
    /// How much redundancy these stripes have. An array that has failed answers as well.
    Health {
        /// First stripe.
        first: StripeIndex,
        /// How many.
        count: u64,
    },
}

/// How much redundancy bytes have, as far as the array knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Readable, with full redundancy.
    Clean,
    /// Readable, with less than full redundancy: members are missing, being rebuilt or behind, or parity is
    /// doubtful.
    Degraded,
    /// Reads fail, or may fail: which blocks a device went into service without is not known one by one.
    Lost,
}

/// Most stripes of one zero request: bounds the locks it takes and the zeroes it may have to write.
pub const ZERO_RUN_STRIPES: u64 = 64;

/// The result of a [`StripeRequest`] that succeeded.
#[derive(Debug)]
pub enum StripeReply {
    /// Done.
    Done,
    /// The filled buffer.
    Data(BufMut),
    /// The buffer, filled except for these ranges (ascending, disjoint, never empty), which read as zeroes
    /// whatever it holds there.
    Sparse(BufMut, Vec<Range<usize>>),
    /// Runs of stripes, in their order: (stripes, whether they are holes).
    Holes(Vec<(u64, bool)>),
    /// Runs of user data, in stripe order: (bytes, health).
    Health(Vec<(u64, Health)>),
}

/// The end of a slot request, for the volume that submitted it.
pub type EndedRequest = (StripeRequestId, Result<StripeReply, ClientError>);

/// An action that an array asks for. Its volume passes these on to the driver unchanged.
#[derive(Debug)]
pub enum ArrayAction {
    /// Execute an operation and give its completion to the array. Must be accepted for any device that was
    /// not released.
    Io {
        /// Where.
        device: DeviceId,
        /// Goes into the completion.
        token: IoToken,
        /// What.
        op: IoOp,
        /// No client waits for it at present: what goes in place, and pages written back.
        may_wait: bool,
    },
    /// Do the work, at once or on another thread, and give its end to the array.
    Work(Job),
    /// An administrator's request ended. For a replacement: the device was admitted, and is still to be
    /// built.
    AdminDone(RequestId, Result<AdminOutcome, AdminRefusal>),
    /// The array has no more use for this device: close it once all operations in flight on it have ended.
    /// Only then may it be handed to an array again.
    Release(DeviceId),
    /// Something an operator wants to know: log it, keep it for `events`.
    Notice(ArrayNotice),
    /// Writes that were acknowledged and not flushed are lost: the next flush of every client that may have
    /// made them must fail.
    WritesLost,
}

/// Why a client request failed. The NBD layer turns it into an errno.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClientError {
    /// The bytes cannot be read or written (more than m members gone, or unreadable). EIO.
    #[error("input/output error")]
    Io,
    /// A member's filesystem is full. ENOSPC.
    #[error("no space left for a member")]
    NoSpace,
    /// A fast zero was asked for where there is none. ENOTSUP.
    #[error("not supported")]
    NotSupported,
    /// The volume is stopping. ESHUTDOWN.
    #[error("the volume is stopping")]
    Stopping,
}

/// An administrator's request.
#[derive(Clone, Debug)]
pub enum AdminRequest {
    /// Take a member out for good, as if it had failed.
    Fail {
        /// Which member.
        member: MemberIndex,
    },
    /// Take a member out on purpose.
    Offline {
        /// Which member.
        member: MemberIndex,
    },
    /// A member's device is back (or a wholly blank device takes its place, when `superblock` is none). The
    /// array decides whether it is current or has to be rebuilt.
    Online {
        /// Which member.
        member: MemberIndex,
        /// The newly opened device.
        device: NewDevice,
    },
    /// Build a new device for a member; the old one, if there, stays in service until the new one is
    /// complete.
    Replace {
        /// Which member.
        member: MemberIndex,
        /// The newly opened, blank device.
        device: NewDevice,
    },
    /// Change the pace of rebuild and scrub, until the next start.
    Pace {
        /// Floor while clients are busy, bytes of user data per second.
        rebuild_min: u64,
        /// Ceiling; 0 for none.
        rebuild_max: u64,
    },
    /// Give up the replacement of a member that is being built; its old device stays in service.
    CancelReplace {
        /// Which member.
        member: MemberIndex,
        /// The new device, as lanes that build it know it: a lane in which it is the member refuses.
        device: Option<Uuid>,
    },
    /// Start or continue a scrub.
    ScrubStart,
    /// Pause a scrub.
    ScrubPause,
    /// Stop a scrub and forget its position.
    ScrubStop,
    /// Look again at every block that is set aside or called lost.
    Repair,
    /// Forget the counts of a member, or of all members and the array.
    Clear {
        /// None: of all members and the array.
        member: Option<MemberIndex>,
    },
    /// Finish everything in flight, answer new requests with [`ClientError::Stopping`], flush, mark the array
    /// clean and complete the request. The volume does nothing after that.
    Stop,
}

/// Tells one of several lanes what becomes of the device that it builds beside the old one of a member. The
/// lanes of an array change over to such a device together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplacementOrder {
    /// Which member.
    pub member: MemberIndex,
    /// The new device. The order is void where another one is being built by now, or none.
    pub device: Uuid,
    /// What becomes of it.
    pub step: ReplacementStep,
}

/// See [`ReplacementOrder`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplacementStep {
    /// It takes its place as soon as it is complete here: it is complete in every lane.
    ChangeOver,
    /// It is given up, because another lane is without it, for this reason.
    GiveUp(String),
    /// It does not take its place before [`ReplacementStep::GoOn`]: lanes are asked whether it can be
    /// cancelled in all of them.
    Stay,
    /// It may take its place again.
    GoOn,
}

/// Why another lane of the array has let go of a device. This one lets go of it, too, so that it can come
/// back or be replaced as a whole, unless that would make anything unreadable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LetGo {
    /// The device lacks something, and comes back when it has that.
    Lacks(MemberCondition),
    /// It has failed there, for this reason.
    Failed(Option<String>),
}

/// A device that the driver has opened, locked and checked for size, handed to the array.
#[derive(Clone, Debug)]
pub struct NewDevice {
    /// Its handle.
    pub device: DeviceId,
    /// Its identity: that of its superblock, or freshly made for a blank device.
    pub uuid: Uuid,
    /// Size of the device in bytes, rounded down to its sector.
    pub bytes: u64,
    /// Its valid superblock of this array, if it has one. Otherwise its log region holds nothing of this
    /// array either.
    pub superblock: Option<Box<Superblock>>,
    /// Copies of its superblock that are damaged, and why, as in "head A is damaged: it is not there".
    pub bad_copies: Vec<String>,
    /// The data region is known to read as zeroes (a new sparse file, or just discarded).
    pub known_zero: bool,
}

impl NewDevice {
    /// A device without a superblock, which may hold anything.
    #[must_use]
    pub fn new(device: DeviceId, uuid: Uuid, bytes: u64) -> NewDevice {
        NewDevice { device, uuid, bytes, superblock: None, bad_copies: Vec::new(), known_zero: false }
    }
}

/// What an administrator's request did, in one line for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminOutcome(pub String);

/// The outcome of a stop that leaves nothing to replay. The outcome of any other stop says why it is not
/// clean.
pub const STOPPED_CLEANLY: &str = "stopped cleanly";

/// Something an operator wants to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayNotice {
    /// What kind of thing it is.
    pub kind: NoticeKind,
    /// How bad: an error needs a person, a warning a look, information none.
    pub level: NoticeLevel,
    /// The member it is about, if one.
    pub member: Option<MemberIndex>,
    /// Where in the volume, if it is about one place.
    pub offset: Option<VolumeOffset>,
    /// One sentence: what happened, where, and what to do.
    pub text: String,
}

macro_rules! notice_kinds {
    ($($(#[$doc:meta])* $kind:ident $name:literal),+ $(,)?) => {
        /// The kind of a notice to an operator.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum NoticeKind { $($(#[$doc])* $kind),+ }

        impl NoticeKind {
            /// Its name, for scripts: never changes its meaning.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(NoticeKind::$kind => $name),+ }
            }
        }
    };
}

notice_kinds! {
    /// A device under construction goes without blocks that cannot be read.
    SlotLacks "blocks_not_built",
    /// `calpe repair` has ended.
    RepairEnded "repair_ended",
    /// A write set aside blocks that it could not read.
    BlocksSetAside "blocks_set_aside",
    /// A write ended in an error and has changed nothing.
    WriteFailed "write_failed",
    /// The storage under a member is full.
    MemberFull "member_full",
    /// The host lacks memory or the like for operations on a member.
    HostShort "host_short",
    /// Operations on a member that was full or short succeed again.
    ShortageEnded "shortage_ended",
    /// The array stops although members lack room or resources.
    StoppedShort "stopped_short",
    /// The array did not stop in time, and is checked at the next start.
    NotStopped "not_stopped",
    /// A scrub found a row that nothing tells how to mend.
    ScrubUnresolved "scrub_unresolved",
    /// What was built on a device before an unclean stop is compared with its checksums, or does not match.
    BuildCompared "build_compared",
    /// Blocks that were wrong or unreadable are rewritten.
    BlocksRepaired "blocks_repaired",
    /// Blocks that were wrong or unreadable were rewritten, and are so again; or could not be
    /// rewritten.
    BlocksNotRepaired "blocks_not_repaired",
    /// A member is far slower than the others.
    MemberSlow "member_slow",
    /// A member that was far slower than the others is not any more.
    MemberNotSlow "member_not_slow",
    /// The errors of a member do not end, and others could not be read without it.
    MemberKept "member_kept",
    /// A member may lack unflushed writes and comes back with a restart only.
    MemberNeedsRestart "member_needs_restart",
    /// A member or its rebuild is out of service.
    MemberOut "member_out",
    /// The device that was to replace a member is out.
    ReplacementGivenUp "replacement_given_up",
    /// A replacement is complete in one of several lanes, and waits for the others.
    ReplacementWaits "replacement_waits",
    /// A replacement was given up on request.
    ReplacementCancelled "replacement_cancelled",
    /// A scrub is complete.
    ScrubEnded "scrub_ended",
    /// A member is rebuilt and in service.
    MemberRebuilt "member_rebuilt",
    /// A replacement is complete and in service.
    MemberReplaced "member_replaced",
    /// A device that was replaced does not say so itself.
    OldDeviceUnmarked "old_device_unmarked",
    /// Every member is in service again.
    ArrayWhole "array_online",
    /// A metadata page cannot be read for now.
    PageUnreadable "page_unreadable",
    /// A metadata page can be read again.
    PageReadable "page_readable",
    /// A member that came back is rebuilt and not only caught up.
    MemberRebuiltWhole "member_rebuilt_whole",
    /// A client got an error for blocks that cannot be read.
    BlocksUnreadable "blocks_unreadable",
    /// A client's request ended in an I/O error.
    ClientFailed "client_request_failed",
    /// A metadata page is damaged on all members.
    PageLost "page_lost",
    /// A copy of a superblock is damaged, and rewritten.
    SuperblockDamaged "superblock_damaged",
    /// A copy of a metadata page is rewritten.
    PageRepaired "page_repaired",
    /// The array cannot be served.
    ArrayRefused "array_refused",
    /// Blocks of the redo log were damaged.
    LogDamaged "log_damaged",
    /// A page of the stripe map may be behind.
    MapPageOld "map_page_old",
    /// The redo log was replayed.
    LogReplayed "log_replayed",
    /// Parts of the redo log could not be read and count as never written.
    LogUnread "log_unread",
    /// Batches at the end of the redo log were dropped.
    LogDropped "log_dropped",
    /// Writes that clients of a failed array had not flushed are lost.
    WritesLost "writes_lost",
    /// Rows could not be replayed.
    RowsLost "rows_lost",
    /// A rebuild waits for checksums that cannot be read.
    SlotSkipped "slot_skipped",
    /// Enough members of a failed array are back.
    ArrayServesAgain "array_serves_again",
}

/// Severity of a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NoticeLevel {
    /// Progress and completion.
    Info,
    /// Redundancy is reduced or something was repaired.
    Warning,
    /// Data cannot be served.
    Error,
}

impl PartialEq for StripeReply {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (StripeReply::Done, StripeReply::Done) => true,
            (StripeReply::Data(a), StripeReply::Data(b)) => a[..] == b[..],
            (StripeReply::Sparse(a, i), StripeReply::Sparse(b, j)) => a[..] == b[..] && i == j,
            (StripeReply::Holes(a), StripeReply::Holes(b)) => a == b,
            (StripeReply::Health(a), StripeReply::Health(b)) => a == b,
            _ => false,
        }
    }
}
