//! The superblock: identity, geometry, epoch and member states of an array, on every member. These are the
//! types; their bytes are in `superblock_bytes.rs`, where copies lie in `copies.rs`.

use super::words::worded;
use super::{COPY_BYTES, LanePart, MAX_NAME_BYTES, MemberSet};
use crate::units::{ByteOffset, MemberIndex, SlotIndex};
use uuid::Uuid;

/// Shape of an array: fixed at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Geometry {
    /// Data chunks of a stripe, at least 1.
    pub data: u16,
    /// Parity chunks of a stripe; `data + parity <= 255`.
    pub parity: u16,
    /// Bytes of a chunk: a multiple of 4 KiB, a power of two.
    pub chunk: u32,
    /// Smallest unit of I/O in bytes: 512 or 4096.
    pub sector: u32,
    /// Slots in every member's data region, those beyond the volume included.
    pub slots: u64,
    /// Size of the volume in bytes, at most `slots * data * chunk`; a multiple of 4 KiB.
    pub volume_bytes: u64,
    /// Slots that the rotation of members is ahead by, below `data + parity`: [`LanePart::ahead`].
    #[serde(skip)]
    pub ahead: u16,
}

impl Geometry {
    /// Members of the array: data and parity.
    #[must_use]
    pub fn width(&self) -> u16 {
        self.data + self.parity
    }

    /// Bytes of user data in a stripe.
    #[must_use]
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.data) * u64::from(self.chunk)
    }

    /// Logical stripes of the volume; the last one may be partly beyond its end.
    #[must_use]
    pub fn stripes(&self) -> u64 {
        self.volume_bytes.div_ceil(self.stripe_bytes())
    }
}

/// Which Reed-Solomon matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MatrixId {
    /// Systematic Vandermonde over 0x11D (Gibraltar, Backblaze).
    Vandermonde11d,
}

worded!(MatrixId, "parity matrix", Vandermonde11d = 1 "vandermonde-11d");

/// Which checksum each block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChecksumKind {
    /// None.
    None,
    /// CRC-32C.
    Crc32c,
    /// BLAKE3 truncated to 16 bytes.
    Blake3,
}

worded!(ChecksumKind, "checksum", None = 0 "none", Crc32c = 1 "crc32c", Blake3 = 2 "blake3");

/// Which volume lives on the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VolumeKind {
    /// Stripes map to slots one to one.
    Plain,
    /// Content-addressed.
    Cas,
}

worded!(VolumeKind, "volume kind", Plain = 1 "plain", Cas = 2 "cas");

/// State of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemberState {
    /// In service.
    Online,
    /// Its content is being re-created.
    Rebuilding,
    /// Taken out of service after errors or by an administrator.
    Faulted,
    /// Taken out of service on purpose.
    Offline,
    /// Not found at assembly, or vanished.
    Missing,
}

worded!(
    MemberState, "member state",
    Online = 1 "online",
    Rebuilding = 2 "rebuilding",
    Faulted = 3 "faulted",
    Offline = 4 "offline",
    Missing = 5 "missing",
);

impl MemberState {
    /// The name as `status` prints it, in upper case.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            MemberState::Online => "ONLINE",
            MemberState::Rebuilding => "REBUILDING",
            MemberState::Faulted => "FAULTED",
            MemberState::Offline => "OFFLINE",
            MemberState::Missing => "MISSING",
        }
    }
}

/// An epoch: rule E1 of the crash-safety design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Epoch {
    /// One more than the highest seen.
    pub number: u64,
    /// Random identity.
    pub id: u64,
    /// Identity of the epoch before, 0 for none.
    pub parent: u64,
    /// The members in service.
    pub live: MemberSet,
}

/// What this device is in the array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The device of `Superblock::member`.
    Member,
    /// Being built as the replacement of `Superblock::member`.
    Replacement,
    /// Former device of `Superblock::member`, which was replaced. Its content counts for nothing; its epoch
    /// says since when.
    Replaced,
}

worded!(Role, "role", Member = 1 "member", Replacement = 2 "replacement", Replaced = 3 "replaced");

/// One row of the member table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct MemberRecord {
    /// Identity of the device.
    pub uuid: Uuid,
    /// Its state.
    pub state: MemberState,
    /// While `Rebuilding`: slots below are complete and durable.
    pub rebuilt: SlotIndex,
}

/// A replacement under construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ReplacementRecord {
    /// The member it will become.
    pub member: MemberIndex,
    /// Identity of the new device.
    pub uuid: Uuid,
    /// Slots below are complete and durable.
    pub rebuilt: SlotIndex,
}

/// Progress and outcome of scrubs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct ScrubRecord {
    /// A scrub is under way; slots below are verified.
    pub position: Option<SlotIndex>,
    /// Errors found so far by the scrub under way.
    pub errors_so_far: u64,
    /// Repairs so far by the scrub under way.
    pub repaired_so_far: u64,
    /// Seconds since 1970 when the last complete scrub ended, 0 for never.
    pub finished_unix: u64,
    /// Errors it found.
    pub errors: u64,
    /// Blocks it repaired.
    pub repaired: u64,
    /// Members that were out of service, or that this host lacked resources to read, when slots
    /// were verified by the scrub under way; without one, by the last complete one.
    pub unchecked: MemberSet,
    /// While a scrub is under way: members that the last complete one did not check.
    pub unchecked_before: MemberSet,
}

/// Where the redo log starts: pieces before it, and pieces of older epochs, are void. Ordered by epoch, then
/// sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
pub struct LogStart {
    /// Number of the epoch in which the log starts.
    pub epoch: u64,
    /// Sequence of its first batch.
    pub sequence: u64,
}

/// What a member held when it left service. The stripe map shows what it has missed since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Left {
    /// Identity of the last complete epoch in which it was current, 0 for none: then it is rebuilt.
    pub epoch: u64,
    /// Batches below were in place on it, and a batch in its log said so.
    pub tail: u64,
    /// The newest update of the superblocks that it can have got before the array went on without it; 0 where
    /// unknown.
    pub update: u64,
}

/// What a region of a member holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionKind {
    /// The redo log ring.
    Log,
    /// Checksum and stripe map pages.
    Pages,
    /// Slots.
    Data,
}

worded!(RegionKind, "region kind", Log = 1 "log", Pages = 2 "pages", Data = 3 "data");

/// A region of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Region {
    /// What it holds.
    pub kind: RegionKind,
    /// Where it starts on the device.
    pub offset: ByteOffset,
    /// Bytes.
    pub len: u64,
}

/// End of the last region of a member.
#[must_use]
pub fn region_end(regions: &[Region]) -> ByteOffset {
    regions.iter().map(|region| region.offset.plus(region.len)).max().unwrap_or_default()
}

/// The superblock of one device.
// More than 15 fields: one for each thing that a superblock records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Features an older version may ignore.
    pub features_compat: u64,
    /// Features an older version may ignore when it only reads.
    pub features_ro_compat: u64,
    /// Features without which a version must refuse: [`Superblock::incompat_features`].
    pub features_incompat: u64,
    /// Identity of the array.
    pub array: Uuid,
    /// Name of the array.
    pub name: String,
    /// Seconds since 1970 of its creation.
    pub created_unix: u64,
    /// Identity of this device.
    pub device: Uuid,
    /// The member this device is or will be.
    pub member: MemberIndex,
    /// Its role.
    pub role: Role,
    /// The part of the array that it is about.
    pub part: LanePart,
    /// Shape; with several lanes that of this lane.
    pub geometry: Geometry,
    /// Parity matrix.
    pub matrix: MatrixId,
    /// Checksums.
    pub checksum: ChecksumKind,
    /// Volume.
    pub volume: VolumeKind,
    /// Regions of this device.
    pub regions: Vec<Region>,
    /// Counts writes of this superblock; the highest valid copy is the current one.
    pub sequence: u64,
    /// Number of this update of the members' superblocks, the same on all of them; 0 before updates were
    /// counted.
    pub update: u64,
    /// The newest update that all members in service had when this one began. A device with an older one was
    /// rolled back.
    pub update_complete: u64,
    /// Epoch.
    pub epoch: Epoch,
    /// No write is under way.
    pub clean: bool,
    /// Per member.
    pub members: Vec<MemberRecord>,
    /// Replacements under construction.
    pub replacements: Vec<ReplacementRecord>,
    /// Scrubs.
    pub scrub: ScrubRecord,
    /// Source of the key of log and pages; random, fixed at creation. Each lane has its own.
    pub log_secret: [u8; 16],
    /// Where the redo log starts.
    pub log_start: LogStart,
    /// Pages of the stripe map that have a version on the members, at least; 0 if they were not counted. A
    /// start that finds fewer knows that copies which look as if they were never written have lost their
    /// content.
    pub map_pages: u64,
    /// Per member, while it is out of service: what it must hold to be caught up.
    pub left: Vec<Left>,
}

impl Superblock {
    /// The region of a kind, the first if there are several.
    #[must_use]
    pub fn region(&self, kind: RegionKind) -> Option<Region> {
        self.regions.iter().copied().find(|region| region.kind == kind)
    }

    /// The data region; every valid superblock has exactly one.
    #[must_use]
    pub fn data_region(&self) -> Region {
        self.region(RegionKind::Data).expect("a valid superblock has a data region")
    }

    /// Size of the whole volume in bytes.
    #[must_use]
    pub fn volume_bytes(&self) -> u64 {
        if self.part.is_cut() { self.part.volume_bytes } else { self.geometry.volume_bytes }
    }

    /// The shape of the whole array: the slots and the volume of all lanes together.
    #[must_use]
    pub fn array_geometry(&self) -> Geometry {
        let slots = self.geometry.slots * u64::from(self.part.lanes.count);
        Geometry { slots, volume_bytes: self.volume_bytes(), ahead: 0, ..self.geometry }
    }

    /// Bytes that this lane takes of a device at least: the regions, and two copies of the superblock behind
    /// them.
    #[must_use]
    pub fn device_bytes_min(&self) -> u64 {
        region_end(&self.regions).0 + 2 * COPY_BYTES as u64
    }

    /// Bytes that a device of this array has at least, for all lanes.
    #[must_use]
    pub fn whole_device_bytes_min(&self) -> u64 {
        u64::from(self.part.lanes.count - 1) * self.part.stride + self.device_bytes_min()
    }
}

/// Whether a text can name an array: 1 to 64 of `A-Z a-z 0-9 . _ -`, the first a letter or digit. So a name
/// is also a file name, a URI path and one word on a command line.
#[must_use]
pub fn valid_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    name.len() <= MAX_NAME_BYTES
        && name.bytes().all(plain)
        && name.bytes().next().is_some_and(|first| first.is_ascii_alphanumeric())
}

/// [`valid_name`], with the sentence to show when it is not.
///
/// # Errors
/// That sentence.
pub fn check_array_name(name: &str) -> Result<(), String> {
    if valid_name(name) {
        Ok(())
    } else {
        Err(format!(
            "'{name}' cannot name an array: use 1 to {MAX_NAME_BYTES} letters, digits, '.', '_' or '-', the first a letter or digit"
        ))
    }
}
