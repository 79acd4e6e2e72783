//! The status of a volume: plain facts, no paths and no formatting. The daemon adds paths and rates.

use crate::block_io::DeviceId;
use crate::format::{ChecksumKind, Geometry, MemberSet, MemberState};
use crate::units::{MemberIndex, SlotIndex, VolumeOffset};
use uuid::Uuid;

/// State of an array as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayState {
    /// Every member is online.
    Online,
    /// 1 to m members are not in service; all data can be served.
    Degraded,
    /// More than m members are gone: I/O is refused, nothing is written, until they come back. Or its log
    /// cannot be replayed.
    Failed,
}

/// Errors and repairs of one member since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemberCounters {
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes and flushes that failed.
    pub write_errors: u64,
    /// Blocks of data, parity, metadata pages or log found wrong.
    pub checksum_errors: u64,
    /// Blocks rewritten with reconstructed bytes.
    pub repaired: u64,
}

/// Troubles of a member beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MemberCondition {
    /// The storage under it is full: operations that fail are tried again, or it had to leave.
    Full,
    /// The storage under the device that is being built as its replacement is full: the device is given up if
    /// that lasts.
    NewDeviceFull,
    /// Its replacement is complete in one of several lanes, and takes its place when it is in all of them.
    NewDeviceWaits,
    /// This host lacks memory or the like for operations on it: they are tried again, or it had to leave.
    ShortOfResources,
    /// Its errors do not end, and it is kept in service because bad places of others could not be read
    /// without it.
    KeptDespiteErrors,
    /// Another lane of the array has let go of it, and this one needs it.
    KeptByLanes,
    /// Blocks of it stay bad although they were rewritten, or cannot be rewritten.
    NotMended,
    /// Its device went into service without blocks that could not be read: they are built when they can be.
    LacksBlocks,
    /// Its reads and writes take far longer than those of the others.
    Slow,
    /// It was in service until the array failed, and can come back to it: such members come first.
    ServedLast,
    /// It is out of service because its file ended too early.
    CutOff,
    /// Lanes of the array are on different devices of it, and none is being built to end that.
    Split,
}

/// One member of the array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its place.
    pub index: MemberIndex,
    /// Identity of the device that it has, or had last.
    pub uuid: Uuid,
    /// Its state.
    pub state: MemberState,
    /// The device in service or being rebuilt in its place, if one is open.
    pub device: Option<DeviceId>,
    /// A replacement being built while `device` (or nothing) serves.
    pub replacement: Option<ReplacementStatus>,
    /// Its errors and repairs.
    pub counters: MemberCounters,
    /// Why it is not online, in one line.
    pub reason: Option<String>,
    /// Other troubles that a person should know of.
    pub conditions: Vec<MemberCondition>,
    /// A device of it has left service since the start of the array; otherwise a member that is out was so
    /// before.
    pub has_left: bool,
    /// It is out of service for a reason that passes: it may be brought back when that is over, without a
    /// request.
    pub returns: bool,
    /// For its device and the one that is being built in its place: runs of slots (the first, and how many,
    /// ascending) that each went without.
    pub lacking: Vec<(Uuid, Vec<(SlotIndex, u64)>)>,
}

/// Begins the reason of a member in service whose replacement was given up; why follows.
pub const GIVEN_UP: &str = "its replacement was given up: ";

/// A device that is being built beside the one in service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplacementStatus {
    /// Its handle.
    pub device: DeviceId,
    /// Its identity.
    pub uuid: Uuid,
    /// It is complete, and takes its place when the driver of the lanes says that all others have built
    /// theirs ([`ReplacementOrder`](crate::array::ReplacementOrder)).
    pub is_held: bool,
}

/// Kind of a background pass over the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ActivityKind {
    /// Members or replacements are rebuilt.
    Rebuild,
    /// Everything is read and verified.
    Scrub,
    /// Blocks that are set aside or called lost are looked at again.
    Repair,
}

/// Why a background pass does nothing for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// An administrator has paused it.
    Paused,
    /// A rebuild goes first.
    ForRebuild,
    /// A member is full: the content that the redo log had at the start goes in place first, or the work
    /// under way waits for room.
    ForRoom,
    /// The array has failed.
    ForMembers,
    /// What it builds is complete, and other lanes still build theirs.
    ForLanes,
}

/// A background pass that runs, or waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Activity {
    /// Which pass.
    pub kind: ActivityKind,
    /// Bytes of volume data covered so far.
    pub done_bytes: u64,
    /// Bytes of volume data to cover.
    pub total_bytes: u64,
    /// Slots that are tried again: a rebuild found blocks in them that cannot be read, or a shortage kept a
    /// scrub from reading them.
    pub retried: u64,
    /// Metadata pages that could not be read when they were to be written to a device, and are tried again.
    pub retried_pages: u64,
    /// Why it does nothing now.
    pub rest: Option<Rest>,
    /// Inconsistencies found so far by a scrub.
    pub errors: u64,
    /// Blocks repaired so far.
    pub repaired: u64,
}

/// How the last complete scrub ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubResult {
    /// Seconds since 1970 when it ended.
    pub finished_unix: u64,
    /// Rows found inconsistent.
    pub errors: u64,
    /// How many of them are repaired, in blocks.
    pub repaired: u64,
    /// Members that it could not check everywhere, because they were out of service while it ran, or this
    /// host lacked resources to read them.
    pub unchecked: MemberSet,
}

/// The stage of an array's redo log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogState {
    /// It waits to be replayed, or is being replayed; requests wait.
    Replaying,
    /// It was replayed, and its content waits for room to go in place: reads are served, writes wait.
    Settling,
    /// It is in service.
    Serving,
    /// It cannot be replayed, for this reason; requests end in an error.
    Refused(String),
}

/// The cache for checksums of blocks, in pages of 4 KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCacheStatus {
    /// Pages in it now.
    pub pages: u64,
    /// Most that it holds, unless more are in use or changed.
    pub pages_max: u64,
    /// As many as hold the checksums of the whole array.
    pub pages_needed: u64,
    /// Pages that requests of clients found in it, since the log was last replayed.
    pub hits: u64,
    /// Pages that requests had to wait for.
    pub misses: u64,
}

/// The facts of one array and its volume.
// More than 15 fields: one for each thing that `calpe status` shows of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeStatus {
    /// State of the array.
    pub state: ArrayState,
    /// Shape of the array.
    pub geometry: Geometry,
    /// Current epoch number.
    pub epoch: u64,
    /// Whether a stop right now would count as unclean.
    pub dirty: bool,
    /// Per member, by index.
    pub members: Vec<MemberStatus>,
    /// Passes that run or wait, the running one first.
    pub activities: Vec<Activity>,
    /// The last complete scrub.
    pub last_scrub: Option<ScrubResult>,
    /// Name of the codec engine in use ("gfni").
    pub engine: &'static str,
    /// Client requests that ended in EIO or ENOSPC since the start.
    pub client_errors: u64,
    /// Checksums of blocks.
    pub checksum: ChecksumKind,
    /// The redo log.
    pub log: LogState,
    /// Where the log cannot be replayed: whether a forced start would go on, and give up what prevents it.
    pub yields_to_force: bool,
    /// Parts of the volume found to be beyond repair since the start: (offset, bytes), ascending. A write
    /// heals them.
    pub lost: Vec<(VolumeOffset, u64)>,
    /// Parts that are set aside: their content may still be on their members, which could not read it when
    /// the rest of the row was written. The array itself reads them again.
    pub set_aside: Vec<(VolumeOffset, u64)>,
    /// The members that have them.
    pub set_aside_on: MemberSet,
    /// Parts that could not be read when they were last asked for, because members are missing or gave
    /// errors; nothing shows that they are lost. Also all parts whose checksums cannot be read: these can be
    /// neither read nor written in part.
    pub unreadable: Vec<(VolumeOffset, u64)>,
    /// The cache for checksums.
    pub page_cache: PageCacheStatus,
    /// Metadata pages that cannot be read for now: the parts that they have checksums of are in `unreadable`.
    pub unreadable_pages: u64,
    /// Parts that an earlier run knew to be beyond repair, and of which this one knows nothing yet. They are
    /// in no list above.
    pub unconfirmed_lost: Vec<(VolumeOffset, u64)>,
    /// Likewise, parts that an earlier run could not read.
    pub unconfirmed: Vec<(VolumeOffset, u64)>,
}
