//! The state of arrays as users see it: the same facts for `status` as text, as JSON, and for
//! `wait`.

use super::certificate::CertificateReport;
use super::engine::EngineReport;
use serde::{Deserialize, Serialize};
use std::fmt;
use uuid::Uuid;

/// Version of the JSON fields; rises when a field changes its meaning or is removed. New fields may
/// come at any time.
pub const OUTPUT_VERSION: u32 = 1;

/// State of arrays.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// [`OUTPUT_VERSION`] of the program that made it.
    pub output_version: u32,
    /// In order of name.
    pub arrays: Vec<ArrayReport>,
    /// Certificates that the daemon shows and trusts under TLS.
    #[serde(default)]
    pub certificates: Vec<CertificateReport>,
    /// Problems of the daemon itself, a line each, for example that the state directory cannot be
    /// written to.
    #[serde(default)]
    pub problems: Vec<String>,
}

impl Status {
    /// A status of this version.
    #[must_use]
    pub fn new(arrays: Vec<ArrayReport>) -> Status {
        Status { output_version: OUTPUT_VERSION, arrays, certificates: Vec::new(), problems: Vec::new() }
    }
}

/// One array.
// More than 15 fields: mirrors the JSON of `calpe status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ArrayReport {
    /// Its name.
    pub name: String,
    /// Its identity; nil, which is null in JSON, where no member was found that tells it.
    #[serde(with = "nil_as_null")]
    pub uuid: Uuid,
    /// The state of the array.
    pub state: ArrayState,
    /// Its state in a sentence, empty when there is nothing to say. See `explain`.
    pub status: String,
    /// What to do about it in a sentence, empty when there is nothing to do.
    pub action: String,
    /// Its volume.
    pub volume: VolumeReport,
    /// Data chunks of a stripe.
    pub data: u16,
    /// Parity chunks of a stripe.
    pub parity: u16,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Checksum of each block: "blake3", "crc32c" or "none".
    #[serde(default)]
    pub checksum: String,
    /// Its redo log.
    pub log: LogReport,
    /// Number of its epoch.
    pub epoch: u64,
    /// A stop right now would count as unclean.
    pub dirty: bool,
    /// Where clients reach it.
    pub uris: Vec<String>,
    /// Clients may only read.
    #[serde(default)]
    pub read_only: bool,
    /// Connections of clients that use it now.
    #[serde(default)]
    pub clients: u64,
    /// Every member, in order of index.
    pub members: Vec<MemberReport>,
    /// The lanes that have FAILED while others serve.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_lanes: Vec<u16>,
    /// Passes that run or wait, the running one first.
    pub scan: Vec<ScanReport>,
    /// How the last complete scrub ended; none before the first.
    pub last_scrub: Option<LastScrub>,
    /// Members that the last scrub could not check everywhere, because they were out of service, or
    /// the host lacked resources to read them.
    #[serde(default)]
    pub last_scrub_unchecked: Vec<u16>,
    /// What computes parity.
    pub engine: EngineReport,
    /// The cache for its checksums; none where it has none, or is not served.
    #[serde(default)]
    pub page_cache: Option<PageCacheReport>,
    /// Errors that clients got.
    pub errors: ErrorReport,
    /// Ranges of the volume that are beyond repair, ascending: reading them is an error until they
    /// are written.
    #[serde(default)]
    pub lost: Vec<LostReport>,
    /// Ranges that were set aside when the rest of their rows was written, ascending: reading them
    /// is an error until their members can read them again, or they are written.
    #[serde(default)]
    pub set_aside: Vec<LostReport>,
    /// The members that alone hold the ranges of `set_aside`.
    #[serde(default)]
    pub set_aside_members: Vec<u16>,
    /// Ranges that could not be read at the last attempt, ascending. Nothing shows that they are
    /// lost.
    #[serde(default)]
    pub unreadable: Vec<LostReport>,
    /// Metadata pages that cannot be read for now. The ranges whose checksums they hold are in
    /// `unreadable`, and can be neither read nor written.
    #[serde(default)]
    pub unreadable_pages: u64,
    /// Ranges that were beyond repair or unreadable when the daemon ended, ascending, and that have not been
    /// read since. Ranges that were written or repaired just before the end may be among them.
    #[serde(default)]
    pub unconfirmed: Vec<LostReport>,
    /// For an array that should be served and is not: the attempts to serve it. The other fields
    /// then show only what was found of it.
    #[serde(default)]
    pub start: Option<StartReport>,
}

/// Serializes a uuid that may not be known.
mod nil_as_null {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};
    use uuid::Uuid;

    pub(super) fn serialize<S: Serializer>(uuid: &Uuid, serializer: S) -> Result<S::Ok, S::Error> {
        Some(uuid).filter(|uuid| !uuid.is_nil()).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Uuid, D::Error> {
        Ok(Option::deserialize(deserializer)?.unwrap_or_default())
    }
}

/// The attempts to serve an array; none has succeeded yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartReport {
    /// How many attempts have failed; 0 while the first runs.
    pub attempts: u64,
    /// Why the last attempt failed.
    pub problem: Option<String>,
    /// What to do about it.
    pub advice: String,
    /// Where its members are looked for.
    pub searched: Vec<String>,
    /// Paths found there that cannot be used, one line for each.
    pub notes: Vec<String>,
}

/// The cache in memory for the checksums of an array.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PageCacheReport {
    /// Bytes that it may take.
    pub bytes: u64,
    /// Bytes in use.
    pub used: u64,
    /// Bytes with which it would hold all checksums of the array.
    pub whole: u64,
    /// How often requests of clients found the checksums that they needed in it, since the array was started
    /// or had failed last.
    pub hits: u64,
    /// How often they had to wait for them.
    pub misses: u64,
    /// `hits` of all, in percent; none before the first request.
    pub hit_percent: Option<f64>,
}

impl PageCacheReport {
    /// The report of a cache with these sizes and counts.
    #[must_use]
    pub fn new([bytes, used, whole]: [u64; 3], hits: u64, misses: u64) -> PageCacheReport {
        let all = hits + misses;
        let percent = |all: u64| (hits as f64 * 1000.0 / all as f64).round() / 10.0;
        let hit_percent = (all > 0).then(|| percent(all));
        PageCacheReport { bytes, used, whole, hits, misses, hit_percent }
    }
}

/// A range of a volume that cannot be read, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostReport {
    /// Its start in the volume, in bytes.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

/// A redo log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogReport {
    /// What it does now.
    pub state: LogState,
    /// Why it is refused.
    pub reason: Option<String>,
    /// Whether `calpe import --force` starts the array although the log is refused, and gives up the content
    /// that cannot be replayed.
    #[serde(default)]
    pub yields_to_force: bool,
}

impl ArrayReport {
    /// Whether the last scrub could compare everything: without checksums, that takes more members
    /// than hold data.
    #[must_use]
    pub fn last_scrub_compared(&self) -> bool {
        self.checksum != "none" || self.last_scrub_unchecked.len() < usize::from(self.parity)
    }
}

/// What a redo log does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogState {
    /// It is being replayed after a stop; requests wait.
    Replaying,
    /// It was replayed after a stop, and its content waits for room to be written in place; reads
    /// are served, writes wait.
    Settling,
    /// It is in service.
    Serving,
    /// It cannot be replayed; requests end in an error.
    Refused,
    /// The array is not served.
    NotStarted,
}

impl LogState {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            LogState::Replaying => "replaying",
            LogState::Settling => "settling",
            LogState::Serving => "serving",
            LogState::Refused => "refused",
            LogState::NotStarted => "waits for members",
        }
    }
}

/// State of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ArrayState {
    /// Every member is in service.
    Online,
    /// Some members are not in service; all data can be served.
    Degraded,
    /// Too few members, or not served for another reason: requests are refused and nothing is
    /// written.
    Failed,
    /// Its members are being looked for, for the first time since the daemon started.
    Waiting,
}

/// State of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum MemberState {
    /// In service.
    Online,
    /// In service, with errors.
    Degraded,
    /// Its content is being re-created.
    Rebuilding,
    /// Taken out after errors, or by an administrator.
    Faulted,
    /// Taken out on purpose.
    Offline,
    /// Not there.
    Missing,
    /// Waiting to replace a member.
    Spare,
    /// Its device is there, and its array is not served.
    Found,
    /// Its device is about to be looked for, for the first time.
    Waiting,
}

macro_rules! upper_case_names {
    ($name:ident: $($value:ident $word:literal),+) => {
        impl $name {
            /// The name as status prints it.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$value => $word),+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

upper_case_names!(ArrayState: Online "ONLINE", Degraded "DEGRADED", Failed "FAILED", Waiting "WAITING");
upper_case_names!(MemberState:
    Online "ONLINE", Degraded "DEGRADED", Rebuilding "REBUILDING", Faulted "FAULTED", Offline "OFFLINE",
    Missing "MISSING", Spare "SPARE", Found "FOUND", Waiting "WAITING"
);

/// The volume of an array.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeReport {
    /// "plain" or "cas".
    pub kind: String,
    /// Size that clients see.
    pub bytes: u64,
    /// Bytes that clients have written, for a volume that stores fewer bytes than that.
    pub logical: Option<u64>,
    /// Bytes stored for them.
    pub stored: Option<u64>,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberReport {
    /// Its place.
    pub index: u16,
    /// Path of its present or last device; its uuid where no path is known.
    pub name: String,
    /// Identity of its device.
    pub uuid: Uuid,
    /// Its state.
    pub state: MemberState,
    /// Reads that failed, until `calpe clear`.
    pub read: u64,
    /// Writes and flushes that failed.
    pub write: u64,
    /// Blocks found wrong.
    pub cksum: u64,
    /// Blocks rewritten with reconstructed bytes.
    pub repaired: u64,
    /// Why it is not online.
    pub reason: Option<String>,
    /// Further conditions that a person should know.
    #[serde(default)]
    pub conditions: Vec<Condition>,
    /// Its transfers go through the page cache of the daemon's host. If the array is a block device
    /// of the same host, writing memory back may then need memory.
    #[serde(default)]
    pub cached: bool,
    /// Seconds until the next attempt to bring it back; none where an attempt runs, or none will
    /// follow.
    #[serde(default)]
    pub tried_in_s: Option<u64>,
    /// The device that is being built in its place.
    pub replacement: Option<ReplacementReport>,
}

impl MemberReport {
    /// Whether lanes of the array are on different devices of it.
    pub(crate) fn is_split(&self) -> bool {
        self.conditions.contains(&Condition::Split)
    }
}

/// A condition of a member that a person should know beside its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// The storage under it is full.
    Full,
    /// The storage under the device that is being built in its place is full.
    NewDeviceFull,
    /// The device that is being built in its place is complete in some lanes of the array, and takes its
    /// place when it is in all of them.
    NewDeviceWaits,
    /// The daemon's host lacks memory or another resource for operations on it.
    HostShort,
    /// It has errors without end, and stays because others could not be read without it.
    KeptDespiteErrors,
    /// It is out of service in some lanes of the array, and others need it.
    KeptByLanes,
    /// Blocks of it stay bad although they were rewritten, or cannot be rewritten.
    NotMended,
    /// Its device went into service without blocks that could not be read: they are built when they
    /// can be.
    LacksBlocks,
    /// Its reads and writes take far longer than those of the others.
    Slow,
    /// It is out of service, and comes back by itself when its host answers, or when there is room.
    Returning,
    /// It is out of service, and another device answers in its place, or its own is smaller than it
    /// was or read-only. It comes back by itself when its own device is there again.
    Displaced,
    /// It is out of service: its server answers and does not give its device, or this host has no
    /// certificates to ask with. It comes back by itself when that is corrected.
    Refused,
    /// Blocks of it were rewritten with bytes from others.
    Repaired,
    /// It comes back by itself, but is not tried yet: writes of the lost connection may still land
    /// on it.
    Quarantined,
    /// It was in service until the array failed. Such members come back first.
    ServedLast,
    /// Its device is there and not used, and may hold the only copy of something: nothing is built
    /// over it.
    Kept,
    /// It is out of service, and the device in its place holds no superblock: it can only be built
    /// anew.
    Overwritten,
    /// It is out of service, and its device is smaller than it was: it can only be replaced.
    CutOff,
    /// It is out of service: several devices claim to be it, and none can be told to be the copy.
    Claimed,
    /// It is out of service, and may be on a device that the daemon's user may not read.
    Forbidden,
    /// It is out of service, and operations from before it left have not ended: it cannot come back before
    /// they have.
    Unanswered,
    /// Lanes of the array are on different devices of it.
    Split,
    /// It is out of service in some lanes of the array. Others have it in service, and must let go of it
    /// before it can come back, as its filesystem may keep callers waiting.
    HeldAlone,
}

impl Condition {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Condition::Full => "its storage is full",
            Condition::NewDeviceFull => "the storage of its new device is full",
            Condition::NewDeviceWaits => "its new device waits until every lane has built it",
            Condition::HostShort => "this host lacks resources for it",
            Condition::KeptDespiteErrors => "kept despite its errors",
            Condition::KeptByLanes => "kept by lanes that need it",
            Condition::NotMended => "blocks of it stay bad when they are rewritten",
            Condition::LacksBlocks => "blocks of it were not built",
            Condition::Slow => "far slower than the others",
            Condition::Returning => "comes back by itself",
            Condition::Displaced => "what is in its place cannot serve",
            Condition::Refused => "its device is refused",
            Condition::Repaired => "blocks were repaired",
            Condition::Quarantined => "not tried yet, as earlier writes may still land",
            Condition::ServedLast => "in service until the array failed",
            Condition::Kept => "holds what may be nowhere else",
            Condition::Overwritten => "no superblock is in its place",
            Condition::CutOff => "its device was cut off",
            Condition::Claimed => "several devices claim to be it",
            Condition::Forbidden => "may be what the daemon may not read",
            Condition::Unanswered => "what it was asked has not ended",
            Condition::Split => "its lanes are on different devices",
            Condition::HeldAlone => "lanes have to let go of it first",
        }
    }
}

/// A device being built as the replacement of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReplacementReport {
    /// Path of the new device.
    pub name: String,
    /// Identity of the new device.
    pub uuid: Option<Uuid>,
}

/// Kind of a pass over the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScanKind {
    /// Members are re-created.
    Rebuild,
    /// Everything is read and verified.
    Scrub,
    /// Blocks that are set aside or called lost are read again.
    Repair,
}

impl ScanKind {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            ScanKind::Rebuild => "rebuild",
            ScanKind::Scrub => "scrub",
            ScanKind::Repair => "repair",
        }
    }
}

/// Whether a pass runs, and what it waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScanState {
    /// It runs.
    #[default]
    Running,
    /// An administrator has paused it.
    Paused,
    /// A rebuild goes first.
    WaitsForRebuild,
    /// A member is full: the content of the redo log from the start goes in place first, or the
    /// operations of the pass wait for room.
    WaitsForRoom,
    /// Too few members are in service: the array has failed.
    WaitsForMembers,
    /// What it builds is complete, and takes its place when all lanes of the array are known to have built
    /// it.
    WaitsForLanes,
}

impl ScanState {
    /// The words for it; none while it runs.
    #[must_use]
    pub const fn words(self) -> Option<&'static str> {
        match self {
            ScanState::Running => None,
            ScanState::Paused => Some("paused"),
            ScanState::WaitsForRebuild => Some("waits for the rebuild"),
            ScanState::WaitsForRoom => Some("waits for room on a member that is full: make room"),
            ScanState::WaitsForMembers => Some("waits for members"),
            ScanState::WaitsForLanes => Some("complete; waits for all lanes"),
        }
    }
}

/// A pass that runs or waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScanReport {
    /// Which.
    pub kind: ScanKind,
    /// Done, of 100.
    pub percent: f64,
    /// Bytes covered.
    pub done: u64,
    /// Bytes to cover.
    pub total: u64,
    /// Bytes a second lately; none when not known yet, or when it does not run.
    pub rate_bytes_per_s: Option<u64>,
    /// Seconds to the end at this rate.
    pub eta_s: Option<u64>,
    /// Slots that are tried again, because a rebuild could not read blocks of them, or the host
    /// lacked resources for a scrub.
    #[serde(default)]
    pub retried: u64,
    /// Metadata pages that could not be read for a device under construction, and are tried again.
    #[serde(default)]
    pub retried_pages: u64,
    /// It does not run; `state` says why.
    pub paused: bool,
    /// Whether it runs, and what it waits for.
    #[serde(default)]
    pub state: ScanState,
    /// Inconsistencies found so far.
    pub errors: u64,
    /// Blocks repaired so far.
    pub repaired: u64,
}

impl ScanReport {
    /// The highest percentage that is shown of a pass that is not over.
    pub const RUNNING_PERCENT_MAX: f64 = 99.9;

    /// Percentage done; 100 of a pass over nothing.
    #[must_use]
    pub fn percent_of(done: u64, total: u64) -> f64 {
        if total == 0 { 100.0 } else { done.min(total) as f64 * 100.0 / total as f64 }
    }
}

/// How the last complete scrub ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastScrub {
    /// When, in seconds since 1970.
    pub finished_unix: u64,
    /// Errors found.
    pub errors: u64,
    /// Blocks repaired.
    pub repaired: u64,
}

/// Errors that clients got, until `calpe clear`. With a state directory, the counts survive a
/// restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorReport {
    /// Requests that ended in an I/O error, or for lack of space.
    pub client: u64,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::engine::GpuReport;
    use super::*;

    /// A healthy 4+2 array.
    pub(in crate::control) fn healthy() -> ArrayReport {
        ArrayReport {
            name: "tank".into(),
            uuid: Uuid::from_u128(1),
            state: ArrayState::Online,
            status: String::new(),
            action: String::new(),
            volume: VolumeReport { kind: "plain".into(), bytes: 1 << 30, logical: None, stored: None },
            data: 4,
            parity: 2,
            chunk: 65536,
            checksum: "blake3".into(),
            log: LogReport { state: LogState::Serving, reason: None, yields_to_force: false },
            epoch: 3,
            dirty: false,
            uris: vec!["nbd+unix:///tank?socket=/run/calpe/nbd.sock".into()],
            read_only: false,
            clients: 0,
            members: (0..6)
                .map(|index| MemberReport {
                    index,
                    name: format!("/srv/m{index}"),
                    uuid: Uuid::from_u128(100 + u128::from(index)),
                    state: MemberState::Online,
                    read: 0,
                    write: 0,
                    cksum: 0,
                    repaired: 0,
                    reason: None,
                    conditions: Vec::new(),
                    cached: false,
                    replacement: None,
                    tried_in_s: None,
                })
                .collect(),
            scan: Vec::new(),
            last_scrub: None,
            last_scrub_unchecked: Vec::new(),
            engine: EngineReport { codec: "gfni".into(), gpu: GpuReport::default() },
            page_cache: None,
            errors: ErrorReport::default(),
            lost: Vec::new(),
            set_aside: Vec::new(),
            set_aside_members: Vec::new(),
            failed_lanes: Vec::new(),
            unreadable: Vec::new(),
            unreadable_pages: 0,
            unconfirmed: Vec::new(),
            start: None,
        }
    }

    /// A running pass without errors, for tests.
    pub(crate) fn running(kind: ScanKind, done: u64, total: u64) -> ScanReport {
        ScanReport {
            kind,
            percent: ScanReport::percent_of(done, total),
            done,
            total,
            rate_bytes_per_s: None,
            eta_s: None,
            retried: 0,
            retried_pages: 0,
            paused: false,
            state: ScanState::Running,
            errors: 0,
            repaired: 0,
        }
    }

    #[test]
    fn json_has_the_promised_names() {
        let mut array = healthy();
        array.scan.push(ScanReport { rate_bytes_per_s: Some(3), ..running(ScanKind::Scrub, 1, 2) });
        array.lost.push(LostReport { offset: 4096, bytes: 8192 });
        array.set_aside.push(LostReport { offset: 16384, bytes: 4096 });
        array.unreadable.push(LostReport { offset: 32768, bytes: 4096 });
        let status = Status::new(vec![array]);
        let json = serde_json::to_value(&status).unwrap();
        assert_eq!(json["output_version"], 1);
        let array = &json["arrays"][0];
        assert_eq!(array["state"], "ONLINE");
        assert_eq!(array["volume"]["bytes"], 1 << 30);
        assert!(array["volume"]["logical"].is_null());
        for field in ["name", "uuid", "status", "action", "data", "parity", "chunk", "epoch", "dirty", "uris"]
        {
            assert!(!array[field].is_null(), "{field}");
        }
        assert_eq!(array["members"][5]["state"], "ONLINE");
        for field in ["index", "name", "uuid", "read", "write", "cksum", "repaired"] {
            assert!(!array["members"][0][field].is_null(), "{field}");
        }
        assert_eq!(array["scan"][0]["kind"], "scrub");
        assert_eq!(array["scan"][0]["rate_bytes_per_s"], 3);
        assert_eq!(array["engine"]["codec"], "gfni");
        assert_eq!((&array["checksum"], &array["log"]["state"]), (&"blake3".into(), &"serving".into()));
        assert_eq!((&array["lost"][0]["offset"], &array["lost"][0]["bytes"]), (&4096.into(), &8192.into()));
        assert_eq!(
            (&array["set_aside"][0]["offset"], &array["unreadable"][0]["offset"]),
            (&16384.into(), &32768.into())
        );
        assert_eq!(serde_json::from_value::<Status>(json).unwrap(), status);
    }

    #[test]
    fn fields_of_newer_daemons_are_ignored() {
        let mut json = serde_json::to_value(Status::new(vec![healthy()])).unwrap();
        json["arrays"][0]["invented_later"] = 7.into();
        assert!(serde_json::from_value::<Status>(json).is_ok());
    }

    #[test]
    fn fields_that_older_daemons_do_not_have_may_be_absent() {
        let mut json = serde_json::to_value(Status::new(vec![healthy()])).unwrap();
        assert!(json["arrays"][0]["members"][0].as_object_mut().unwrap().remove("conditions").is_some());
        let array = json["arrays"][0].as_object_mut().unwrap();
        for field in ["checksum", "lost", "set_aside", "unreadable", "start"] {
            assert!(array.remove(field).is_some(), "{field}");
        }
        let read = serde_json::from_value::<Status>(json).unwrap();
        assert!(read.arrays[0].checksum.is_empty() && read.arrays[0].lost.is_empty());
    }

    #[test]
    fn percentages_stay_between_0_and_100() {
        assert_eq!(ScanReport::percent_of(0, 0), 100.0);
        assert_eq!(ScanReport::percent_of(1, 4), 25.0);
        assert_eq!(ScanReport::percent_of(5, 4), 100.0);
    }

    #[test]
    fn states_print_as_they_serialise() {
        for state in [ArrayState::Online, ArrayState::Degraded, ArrayState::Failed, ArrayState::Waiting] {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
        assert_eq!(serde_json::to_value(MemberState::Rebuilding).unwrap(), MemberState::Rebuilding.as_str());
        assert_eq!(format!("{:<9}|", MemberState::Spare), "SPARE    |");
        assert_eq!(serde_json::to_value(Condition::KeptDespiteErrors).unwrap(), "kept_despite_errors");
    }
}
