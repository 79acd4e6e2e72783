//! The bytes of one superblock copy. docs/on-disk-format.md has the table of fields; the structs below are
//! that table in code, and the size assertions keep the two from drifting.
//!
//! Invariants: `encode` writes only superblocks that `decode` accepts; `decode` returns only superblocks
//! whose numbers are consistent, so that arithmetic on them (`slots * chunk`, region ends) cannot overflow.
//! Must not know where copies lie and which one counts.

use super::features::{CHECKSUM_PAGES, KNOWN_COMPAT, KNOWN_INCOMPAT, LANES, UPDATE_COUNT, feature_names};
use super::field::{Fault, boolean, coded, ensure, fault};
use super::{
    COPY_BYTES, COUNT_END, ChecksumKind, Epoch, FORMAT_MAJOR, FORMAT_MINOR, FormatError, Geometry,
    LOG_BLOCK_BYTES, LanePart, Lanes, Left, LogStart, MAX_CHUNK_BYTES, MAX_DEVICE_BYTES, MAX_GROUP,
    MAX_LANES, MAX_LEFT, MAX_LEFT_UPDATES, MAX_MEMBERS, MAX_NAME_BYTES, MAX_REGIONS, MAX_REPLACEMENTS,
    MIN_CHUNK_BYTES, MatrixId, MemberRecord, MemberSet, MemberState, NO_PLACE, PAGE_ENTRIES, PageLayout,
    REGION_ALIGN, Region, RegionKind, ReplacementRecord, Role, ScrubRecord, Superblock, VolumeKind,
    valid_name,
};
use crate::units::{ByteOffset, LaneIndex, MemberIndex, ROW_BYTES, SlotIndex};
use std::collections::HashSet;
use std::fmt;
use uuid::Uuid;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First bytes of every copy. The last two bytes differ under newline translation and end a text display.
pub(super) const MAGIC: [u8; 8] = *b"CALPE\x0d\x0a\x1a";

/// Fills a copy that is cleared before an update. No sector of a superblock looks like this, so a torn
/// clearing never yields a whole copy and is recognised.
pub const CLEARED_BYTE: u8 = 0xa5;

/// The least that a device writes atomically.
const SECTOR: usize = 512;

/// Where the copy's own checksum lies; it is computed with this field zero. Fixed for all versions.
const CHECKSUM_AT: std::ops::Range<usize> = 0x10..0x30;

/// Whether a clearing of this copy, or an update of one that was cleared, was cut off.
fn has_cleared_sector(copy: &[u8]) -> bool {
    copy.chunks_exact(SECTOR).any(|sector| sector.iter().all(|&byte| byte == CLEARED_BYTE))
}

// More than 15 fields: the table of the on-disk format, byte by byte.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawCopy {
    magic: [u8; 8],
    version_major: U16,
    version_minor: U16,
    copy_bytes: U32,
    checksum: [u8; 32],
    sequence: U64,
    features_compat: U64,
    features_ro_compat: U64,
    features_incompat: U64,
    array: [u8; 16],
    device: [u8; 16],
    name: [u8; MAX_NAME_BYTES],
    created_unix: U64,
    member: U16,
    role: u8,
    clean: u8,
    matrix: u8,
    checksum_kind: u8,
    volume: u8,
    reserved_0: u8,
    data: U16,
    parity: U16,
    chunk: U32,
    sector: U32,
    lane_group: U32,
    slots: U64,
    volume_bytes: U64,
    epoch_number: U64,
    epoch_id: U64,
    epoch_parent: U64,
    epoch_live: [U64; 4],
    /// Written by earlier builds, for arrays without redo log.
    reserved_7: U64,
    scrub_active: u8,
    reserved_2: [u8; 7],
    scrub_position: U64,
    scrub_errors_so_far: U64,
    scrub_repaired_so_far: U64,
    scrub_finished_unix: U64,
    scrub_errors: U64,
    scrub_repaired: U64,
    region_count: U16,
    member_count: U16,
    replacement_count: U16,
    left_count: U16,
    log_start_sequence: U64,
    log_start_epoch: U64,
    log_secret: [u8; 16],
    update: U64,
    update_complete: U64,
    map_pages: U64,
    left_updates: [RawLeftUpdate; MAX_LEFT_UPDATES],
    lane_count: U16,
    lane: U16,
    regions: [RawRegion; MAX_REGIONS],
    part: RawPart,
    members: [RawMember; MAX_MEMBERS as usize],
    scrub_unchecked: [U64; 4],
    replacements: [RawReplacement; MAX_REPLACEMENTS],
    left_epochs: [U64; MAX_MEMBERS as usize],
    left_tails: [RawLeft; MAX_LEFT],
    scrub_unchecked_before: [U64; 4],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRegion {
    kind: u8,
    reserved_0: [u8; 7],
    offset: U64,
    len: U64,
    reserved_1: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawPart {
    stride: U64,
    volume_bytes: U64,
    reserved: [u8; 16],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawMember {
    uuid: [u8; 16],
    rebuilt: U64,
    state: u8,
    reserved: [u8; 7],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawReplacement {
    uuid: [u8; 16],
    rebuilt: U64,
    member: U16,
    reserved: [u8; 6],
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLeft {
    member: U16,
    tail: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawLeftUpdate {
    member: U16,
    update: U64,
}

const _: () = {
    assert!(size_of::<RawCopy>() == COPY_BYTES);
    assert!(size_of::<RawRegion>() == 32);
    assert!(size_of::<RawMember>() == 32);
    assert!(size_of::<RawReplacement>() == 32);
    assert!(size_of::<RawPart>() == 32);
    assert!(std::mem::offset_of!(RawCopy, checksum) == CHECKSUM_AT.start);
    assert!(std::mem::offset_of!(RawCopy, sequence) == CHECKSUM_AT.end);
    assert!(std::mem::offset_of!(RawCopy, name) == 0x70);
    assert!(std::mem::offset_of!(RawCopy, data) == 0xc0);
    assert!(std::mem::offset_of!(RawCopy, lane_group) == 0xcc);
    assert!(std::mem::offset_of!(RawCopy, epoch_number) == 0xe0);
    assert!(std::mem::offset_of!(RawCopy, scrub_active) == 0x120);
    assert!(std::mem::offset_of!(RawCopy, region_count) == 0x158);
    assert!(std::mem::offset_of!(RawCopy, log_start_sequence) == 0x160);
    assert!(std::mem::offset_of!(RawCopy, log_secret) == 0x170);
    assert!(std::mem::offset_of!(RawCopy, regions) == 0x200);
    assert!(std::mem::offset_of!(RawCopy, lane_count) == 0x1fc);
    assert!(std::mem::offset_of!(RawCopy, lane) == 0x1fe);
    assert!(std::mem::offset_of!(RawCopy, part) == 0x3e0);
    assert!(std::mem::offset_of!(RawCopy, members) == 0x400);
    assert!(std::mem::offset_of!(RawCopy, scrub_unchecked) == 0x23e0);
    assert!(std::mem::offset_of!(RawCopy, replacements) == 0x2400);
    assert!(std::mem::offset_of!(RawCopy, left_epochs) == 0x3400);
    assert!(std::mem::offset_of!(RawCopy, left_tails) == 0x3bf8);
    assert!(std::mem::offset_of!(RawCopy, scrub_unchecked_before) == 0x3fe0);
    assert!(std::mem::offset_of!(RawCopy, update) == 0x180);
    assert!(std::mem::offset_of!(RawCopy, map_pages) == 0x190);
    assert!(std::mem::offset_of!(RawCopy, left_updates) == 0x198);
};

impl Superblock {
    /// The bytes of a copy. Unknown compat bits are dropped, because the bytes that they describe are not
    /// carried over. Unknown ro-compat bits stay: assembly must not write to their member
    /// ([`Superblock::unfit`]).
    ///
    /// # Panics
    /// When the superblock breaks an invariant that [`Superblock::decode`] would refuse.
    #[must_use]
    pub fn encode(&self) -> Box<[u8; COPY_BYTES]> {
        if let Err(fault) = self.validate() {
            panic!(
                "superblock field '{}' is {}, expected {}: not written",
                fault.field, fault.found, fault.expected
            );
        }
        let mut bytes = Box::new([0; COPY_BYTES]);
        self.fill(RawCopy::mut_from_bytes(bytes.as_mut_slice()).expect("exactly a copy, of any alignment"));
        let checksum = checksum(bytes.as_slice());
        bytes[CHECKSUM_AT].copy_from_slice(&checksum);
        bytes
    }

    /// Reads a copy of exactly [`COPY_BYTES`] bytes.
    ///
    /// # Errors
    /// What is wrong with it; nothing of a refused copy is to be used, save its sequence.
    pub fn decode(bytes: &[u8]) -> Result<Superblock, FormatError> {
        if bytes.len() >= MAGIC.len() && bytes[..MAGIC.len()] != MAGIC {
            return Err(if has_cleared_sector(bytes) { FormatError::Cleared } else { FormatError::NoMagic });
        }
        let raw = RawCopy::ref_from_bytes(bytes).map_err(|_| FormatError::Length { found: bytes.len() })?;
        let expected = checksum(bytes);
        if expected != raw.checksum {
            if has_cleared_sector(bytes) {
                return Err(FormatError::Cleared);
            }
            return Err(FormatError::Checksum { expected: hex(&expected), found: hex(&raw.checksum) });
        }
        let sequence = raw.sequence.get();
        let (major, minor) = (raw.version_major.get(), raw.version_minor.get());
        if major > FORMAT_MAJOR {
            return Err(FormatError::NewerVersion { major, minor, sequence });
        }
        let features = raw.features_incompat.get();
        let unknown = features & !KNOWN_INCOMPAT;
        if unknown != 0 {
            return Err(FormatError::IncompatFeatures { features: feature_names(unknown), sequence });
        }
        if features == 0 {
            return Err(FormatError::NoRedoLog { name: raw.shown_name(), sequence });
        }
        raw.read().and_then(|superblock| superblock.validate().map(|()| superblock)).map_err(
            |Fault { field, found, expected }| FormatError::Field { field, found, expected, sequence },
        )
    }

    fn fill(&self, raw: &mut RawCopy) {
        raw.magic = MAGIC;
        raw.version_major = FORMAT_MAJOR.into();
        raw.version_minor = FORMAT_MINOR.into();
        raw.copy_bytes = (COPY_BYTES as u32).into();
        raw.sequence = self.sequence.into();
        raw.features_compat = (self.features_compat & KNOWN_COMPAT).into();
        raw.features_ro_compat = self.features_ro_compat.into();
        raw.features_incompat = (self.features_incompat | UPDATE_COUNT).into();
        raw.array = self.array.into_bytes();
        raw.device = self.device.into_bytes();
        raw.name[..self.name.len()].copy_from_slice(self.name.as_bytes());
        raw.created_unix = self.created_unix.into();
        raw.member = self.member.0.into();
        raw.role = self.role.byte();
        raw.clean = u8::from(self.clean);
        raw.matrix = self.matrix.byte();
        raw.checksum_kind = self.checksum.byte();
        raw.volume = self.volume.byte();
        raw.data = self.geometry.data.into();
        raw.parity = self.geometry.parity.into();
        raw.chunk = self.geometry.chunk.into();
        raw.sector = self.geometry.sector.into();
        raw.slots = self.geometry.slots.into();
        raw.volume_bytes = self.geometry.volume_bytes.into();
        raw.epoch_number = self.epoch.number.into();
        raw.epoch_id = self.epoch.id.into();
        raw.epoch_parent = self.epoch.parent.into();
        raw.epoch_live = self.epoch.live.0.map(U64::from);
        raw.scrub_active = u8::from(self.scrub.position.is_some());
        raw.scrub_position = self.scrub.position.map_or(0, |slot| slot.0).into();
        raw.scrub_errors_so_far = self.scrub.errors_so_far.into();
        raw.scrub_repaired_so_far = self.scrub.repaired_so_far.into();
        raw.scrub_finished_unix = self.scrub.finished_unix.into();
        raw.scrub_errors = self.scrub.errors.into();
        raw.scrub_repaired = self.scrub.repaired.into();
        raw.scrub_unchecked = self.scrub.unchecked.0.map(U64::from);
        raw.scrub_unchecked_before = self.scrub.unchecked_before.0.map(U64::from);
        raw.region_count = (self.regions.len() as u16).into();
        raw.member_count = (self.members.len() as u16).into();
        raw.replacement_count = (self.replacements.len() as u16).into();
        raw.log_start_sequence = self.log_start.sequence.into();
        raw.log_start_epoch = self.log_start.epoch.into();
        raw.log_secret = self.log_secret;
        raw.update = self.update.into();
        raw.update_complete = self.update_complete.into();
        raw.map_pages = self.map_pages.into();
        self.fill_part(raw);
        let mut tails = raw.left_tails.iter_mut();
        for (at, left) in self.left.iter().enumerate().filter(|(_, left)| left.epoch != 0) {
            raw.left_epochs[at] = left.epoch.into();
            let tail = tails.next().expect("no more records than there is room for");
            (tail.member, tail.tail) = ((at as u16).into(), left.tail.into());
        }
        raw.left_count = ((MAX_LEFT - tails.len()) as u16).into();
        let mut updates = raw.left_updates.iter_mut();
        for (at, left) in self.left.iter().enumerate().filter(|(_, left)| left.update != 0) {
            let record = updates.next().expect("no more records than there is room for");
            (record.member, record.update) = ((at as u16).into(), left.update.into());
        }
        for (raw, region) in raw.regions.iter_mut().zip(&self.regions) {
            raw.kind = region.kind.byte();
            raw.offset = region.offset.0.into();
            raw.len = region.len.into();
        }
        for (raw, member) in raw.members.iter_mut().zip(&self.members) {
            raw.uuid = member.uuid.into_bytes();
            raw.rebuilt = member.rebuilt.0.into();
            raw.state = member.state.byte();
        }
        for (raw, replacement) in raw.replacements.iter_mut().zip(&self.replacements) {
            raw.uuid = replacement.uuid.into_bytes();
            raw.rebuilt = replacement.rebuilt.0.into();
            raw.member = replacement.member.0.into();
        }
    }

    fn fill_part(&self, raw: &mut RawCopy) {
        if self.part.is_cut() {
            raw.lane_count = self.part.lanes.count.into();
            raw.lane_group = self.part.lanes.group.into();
            raw.lane = self.part.lane.0.into();
            raw.part.stride = self.part.stride.into();
            raw.part.volume_bytes = self.part.volume_bytes.into();
        }
    }

    /// Checks the rules between the fields, so that later arithmetic on them is safe.
    fn validate(&self) -> Result<(), Fault> {
        ensure(valid_name(&self.name), "name", format_args!("{:?}", self.name), "a valid array name")?;
        self.geometry.validate()?;
        let Geometry { slots, .. } = self.geometry;
        let width = self.geometry.width();
        let member_limit = format_args!("below {width}, the members of the array");
        ensure(self.member.0 < width, "member", self.member, member_limit)?;
        for (what, value) in self.counts() {
            ensure(value < COUNT_END, what, value, "a number below 2^62")?;
        }
        let pages = slots.div_ceil(PAGE_ENTRIES as u64);
        let pages_limit = format_args!("at most {pages}, the pages of the stripe map");
        ensure(self.map_pages <= pages, "map pages", self.map_pages, pages_limit)?;
        let update = self.update;
        ensure(
            self.update_complete <= update,
            "update complete",
            self.update_complete,
            format_args!("at most {update}, the update"),
        )?;
        ensure(
            self.epoch.live.iter().all(|member| member.0 < width),
            "epoch live set",
            self.epoch.live,
            member_limit,
        )?;
        let slot_limit = format_args!("at most {slots}, the slots of the array");
        let position = self.scrub.position.unwrap_or_default();
        ensure(position.0 <= slots, "scrub position", position, slot_limit)?;
        for unchecked in [self.scrub.unchecked, self.scrub.unchecked_before] {
            ensure(
                unchecked.iter().all(|member| member.0 < width),
                "members the scrub has not checked",
                unchecked,
                member_limit,
            )?;
        }
        self.validate_members(slot_limit, member_limit)?;
        self.validate_regions()?;
        self.validate_part()?;
        let features = Superblock::incompat_features(self.checksum, self.part.lanes.count);
        ensure(
            self.features_incompat | UPDATE_COUNT == features,
            "incompat features",
            format_args!("{:#x}", self.features_incompat),
            format_args!("{features:#x} for what the array uses"),
        )?;
        self.validate_log_and_pages()
    }

    /// Checks that there is room for the log and the pages, so that no offset computed in them is outside.
    fn validate_log_and_pages(&self) -> Result<(), Fault> {
        let most = u64::from(NO_PLACE) * LOG_BLOCK_BYTES as u64;
        let logs = || self.regions.iter().filter(|region| region.kind == RegionKind::Log);
        ensure(logs().next().is_some(), "log regions", 0, "one or more")?;
        let longest = logs().map(|region| region.len).max().unwrap_or_default();
        ensure(
            longest <= most,
            "log region length",
            longest,
            format_args!("at most {most}, whose blocks can be numbered"),
        )?;
        let needed = PageLayout::new(self.geometry, self.checksum != ChecksumKind::None).region_bytes();
        let len = self.region(RegionKind::Pages).map_or(0, |region| region.len);
        ensure(len >= needed, "pages region length", len, format_args!("{needed} bytes or more"))
    }

    /// Checks that the lane is one of the array's, that it fits its window, and that it has its share of the
    /// volume.
    fn validate_part(&self) -> Result<(), Fault> {
        let LanePart { lane, lanes: Lanes { count, group }, stride, volume_bytes } = self.part;
        if self.part == LanePart::WHOLE {
            return Ok(());
        }
        let several = format_args!("from 2 to {MAX_LANES}");
        ensure((2..=MAX_LANES).contains(&count), "lane count", count, several)?;
        let is_group = group.is_power_of_two() && group <= MAX_GROUP;
        ensure(is_group, "lane group", group, format_args!("a power of two, at most {MAX_GROUP}"))?;
        ensure(lane.0 < count, "lane", lane, format_args!("below {count}, the lanes of the array"))?;
        let most = MAX_DEVICE_BYTES / u64::from(count);
        let is_stride = stride > 0 && stride.is_multiple_of(REGION_ALIGN) && stride <= most;
        ensure(is_stride, "lane stride", stride, format_args!("whole MiB, at most {most}"))?;
        // The last lane has the rest of the device, which is not known here.
        let needed = self.device_bytes_min();
        let is_last = lane.0 + 1 == count;
        let stride_limit = format_args!("{needed} bytes or more, which its lane takes");
        ensure(is_last || needed <= stride, "lane stride", stride, stride_limit)?;
        ensure(
            volume_bytes > 0 && volume_bytes.is_multiple_of(ROW_BYTES) && volume_bytes <= MAX_DEVICE_BYTES,
            "whole volume bytes",
            volume_bytes,
            format_args!("whole 4 KiB blocks, at most {MAX_DEVICE_BYTES}"),
        )?;
        let ahead = self.part.ahead(self.geometry.width());
        ensure(self.geometry.ahead == ahead, "rotation", self.geometry.ahead, format_args!("{ahead} slots"))?;
        let share = self.part.share_bytes(lane, self.geometry.stripe_bytes());
        let share_limit = format_args!("{share}, the share that lane {lane} has of {volume_bytes}");
        ensure(self.geometry.volume_bytes == share, "volume bytes", self.geometry.volume_bytes, share_limit)
    }

    fn validate_members(
        &self,
        slot_limit: fmt::Arguments,
        member_limit: fmt::Arguments,
    ) -> Result<(), Fault> {
        let Geometry { slots, .. } = self.geometry;
        let width = self.geometry.width();
        ensure(
            self.members.len() == usize::from(width),
            "member count",
            self.members.len(),
            format_args!("{width}, data and parity together"),
        )?;
        ensure(self.left.len() == usize::from(width), "left", self.left.len(), width.to_string())?;
        let left = self.left.iter().filter(|left| left.epoch != 0).count();
        ensure(left <= MAX_LEFT, "left count", left, format_args!("at most {MAX_LEFT}"))?;
        let unheld = self.left.iter().any(|left| left.epoch == 0 && left.tail != 0);
        ensure(!unheld, "left tail", "of a member without an epoch", "none")?;
        let updates = self.left.iter().filter(|left| left.update != 0).count();
        let limit = format_args!("at most {MAX_LEFT_UPDATES}");
        ensure(updates <= MAX_LEFT_UPDATES, "left updates", updates, limit)?;
        let mut devices = HashSet::new();
        for record in &self.members {
            ensure(record.rebuilt.0 <= slots, "member rebuilt", record.rebuilt, slot_limit)?;
            ensure(devices.insert(record.uuid), "member uuid", record.uuid, "different for each device")?;
        }
        ensure(
            self.replacements.len() <= MAX_REPLACEMENTS,
            "replacement count",
            self.replacements.len(),
            format_args!("at most {MAX_REPLACEMENTS}"),
        )?;
        let mut replaced = HashSet::new();
        for record in &self.replacements {
            ensure(record.member.0 < width, "replacement member", record.member, member_limit)?;
            ensure(
                replaced.insert(record.member),
                "replacement member",
                record.member,
                "one for each member",
            )?;
            ensure(record.rebuilt.0 <= slots, "replacement rebuilt", record.rebuilt, slot_limit)?;
            ensure(
                devices.insert(record.uuid),
                "replacement uuid",
                record.uuid,
                "different for each device",
            )?;
        }
        let its_record = format_args!("the {} record of member {} to have it", self.role, self.member);
        let no_record = format_args!("no record to have it, as it was replaced");
        let (right, rule) = match self.role {
            Role::Member => (self.members[usize::from(self.member.0)].uuid == self.device, its_record),
            Role::Replacement => {
                let named = |r: &ReplacementRecord| r.member == self.member && r.uuid == self.device;
                (self.replacements.iter().any(named), its_record)
            }
            Role::Replaced => (!devices.contains(&self.device), no_record),
        };
        ensure(right, "device uuid", self.device, rule)
    }

    fn validate_regions(&self) -> Result<(), Fault> {
        ensure(
            self.regions.len() <= MAX_REGIONS,
            "region count",
            self.regions.len(),
            format_args!("at most {MAX_REGIONS}"),
        )?;
        let head = 2 * COPY_BYTES as u64;
        for region in &self.regions {
            let aligned = region.offset.0.is_multiple_of(ROW_BYTES) && region.len.is_multiple_of(ROW_BYTES);
            let end = region.offset.0.checked_add(region.len);
            let fits = end.is_some_and(|end| end <= MAX_DEVICE_BYTES - head);
            ensure(
                aligned && region.len > 0 && region.offset.0 >= head && fits,
                "region",
                format_args!("{} at {} of {} bytes", region.kind, region.offset, region.len),
                "whole 4 KiB blocks between the superblock copies",
            )?;
        }
        let mut sorted = self.regions.clone();
        sorted.sort_by_key(|region| region.offset);
        for pair in sorted.windows(2) {
            ensure(
                pair[0].offset.0 + pair[0].len <= pair[1].offset.0,
                "region",
                format_args!("{} at {} of {} bytes", pair[0].kind, pair[0].offset, pair[0].len),
                format_args!("to end before the {} region at {}", pair[1].kind, pair[1].offset),
            )?;
        }
        let data = self.regions.iter().filter(|region| region.kind == RegionKind::Data).count();
        ensure(data == 1, "data regions", data, "one")?;
        let needed = self.geometry.slots * u64::from(self.geometry.chunk);
        let len = self.data_region().len;
        ensure(
            len >= needed,
            "data region length",
            len,
            format_args!("{needed} bytes or more for {} slots", self.geometry.slots),
        )
    }
}

impl Geometry {
    fn validate(&self) -> Result<(), Fault> {
        ensure(self.data >= 1, "data", self.data, "1 or more")?;
        let width = u32::from(self.data) + u32::from(self.parity);
        ensure(
            width <= u32::from(MAX_MEMBERS),
            "data + parity",
            width,
            format_args!("{MAX_MEMBERS} members at most"),
        )?;
        ensure(
            self.chunk.is_power_of_two() && (MIN_CHUNK_BYTES..=MAX_CHUNK_BYTES).contains(&self.chunk),
            "chunk",
            self.chunk,
            format_args!("a power of two from {MIN_CHUNK_BYTES} to {MAX_CHUNK_BYTES}"),
        )?;
        ensure(matches!(self.sector, 512 | 4096), "sector", self.sector, "512 or 4096")?;
        // Bounds slots * chunk, hence every offset inside a member.
        let most = MAX_DEVICE_BYTES / u64::from(self.chunk);
        ensure((1..=most).contains(&self.slots), "slots", self.slots, format_args!("from 1 to {most}"))?;
        let capacity = u128::from(self.slots) * u128::from(self.stripe_bytes());
        ensure(
            self.volume_bytes >= ROW_BYTES
                && self.volume_bytes.is_multiple_of(ROW_BYTES)
                && self.volume_bytes <= MAX_DEVICE_BYTES
                && u128::from(self.volume_bytes) <= capacity,
            "volume bytes",
            self.volume_bytes,
            format_args!("whole 4 KiB blocks, at most {capacity} in {} slots", self.slots),
        )
    }
}

impl RawCopy {
    /// The name, for a message about a copy that is not read.
    fn shown_name(&self) -> String {
        let bytes = self.name.split(|&byte| byte == 0).next().unwrap_or_default();
        bytes.escape_ascii().to_string()
    }

    fn read(&self) -> Result<Superblock, Fault> {
        ensure(
            self.copy_bytes.get() as usize == COPY_BYTES,
            "copy bytes",
            self.copy_bytes.get(),
            COPY_BYTES.to_string(),
        )?;
        let name_len = self.name.iter().position(|&byte| byte == 0).unwrap_or(MAX_NAME_BYTES);
        let (name, padding) = self.name.split_at(name_len);
        let name_fault =
            || fault("name", format_args!("{:?}", name.escape_ascii().to_string()), "a valid name");
        ensure(padding.iter().all(|&byte| byte == 0), "name padding", "not zero", "zeroes")?;
        let name = std::str::from_utf8(name).map_err(|_| name_fault())?.to_owned();
        let counted = |field, count: U16, limit: usize| {
            let count = usize::from(count.get());
            ensure(count <= limit, field, count, format_args!("at most {limit}")).map(|()| count)
        };
        let regions = counted("region count", self.region_count, MAX_REGIONS)?;
        let members = counted("member count", self.member_count, usize::from(MAX_MEMBERS))?;
        let replacements = counted("replacement count", self.replacement_count, MAX_REPLACEMENTS)?;
        let scrub_active = boolean("scrub active", self.scrub_active)?;
        let features_incompat = self.features_incompat.get();
        let has_updates = features_incompat & UPDATE_COUNT != 0;
        let checksum = match features_incompat & CHECKSUM_PAGES {
            0 => ChecksumKind::None,
            _ => coded("checksum kind", self.checksum_kind, ChecksumKind::from_byte)?,
        };
        let part = self.read_part();
        Ok(Superblock {
            features_compat: self.features_compat.get(),
            features_ro_compat: self.features_ro_compat.get(),
            features_incompat,
            array: Uuid::from_bytes(self.array),
            name,
            created_unix: self.created_unix.get(),
            device: Uuid::from_bytes(self.device),
            member: MemberIndex(self.member.get()),
            role: coded("role", self.role, Role::from_byte)?,
            geometry: Geometry {
                data: self.data.get(),
                parity: self.parity.get(),
                chunk: self.chunk.get(),
                sector: self.sector.get(),
                slots: self.slots.get(),
                volume_bytes: self.volume_bytes.get(),
                ahead: part.ahead(self.data.get().saturating_add(self.parity.get())),
            },
            matrix: coded("matrix", self.matrix, MatrixId::from_byte)?,
            checksum,
            volume: coded("volume kind", self.volume, VolumeKind::from_byte)?,
            regions: self.regions[..regions].iter().map(RawRegion::read).collect::<Result<_, _>>()?,
            sequence: self.sequence.get(),
            update: if has_updates { self.update.get() } else { 0 },
            update_complete: if has_updates { self.update_complete.get() } else { 0 },
            map_pages: self.map_pages.get(),
            epoch: Epoch {
                number: self.epoch_number.get(),
                id: self.epoch_id.get(),
                parent: self.epoch_parent.get(),
                live: MemberSet(self.epoch_live.map(U64::get)),
            },
            clean: boolean("clean", self.clean)?,
            members: self.members[..members].iter().map(RawMember::read).collect::<Result<_, _>>()?,
            replacements: self.replacements[..replacements].iter().map(RawReplacement::read).collect(),
            scrub: ScrubRecord {
                position: scrub_active.then_some(SlotIndex(self.scrub_position.get())),
                errors_so_far: self.scrub_errors_so_far.get(),
                repaired_so_far: self.scrub_repaired_so_far.get(),
                finished_unix: self.scrub_finished_unix.get(),
                errors: self.scrub_errors.get(),
                repaired: self.scrub_repaired.get(),
                unchecked: MemberSet(self.scrub_unchecked.map(U64::get)),
                unchecked_before: MemberSet(self.scrub_unchecked_before.map(U64::get)),
            },
            log_secret: self.log_secret,
            log_start: LogStart {
                epoch: self.log_start_epoch.get(),
                sequence: self.log_start_sequence.get(),
            },
            part,
            left: if has_updates { self.read_left(members)? } else { vec![Left::default(); members] },
        })
    }

    fn read_part(&self) -> LanePart {
        if self.features_incompat.get() & LANES == 0 {
            return LanePart::WHOLE;
        }
        LanePart {
            lane: LaneIndex(self.lane.get()),
            lanes: Lanes { count: self.lane_count.get(), group: self.lane_group.get() },
            stride: self.part.stride.get(),
            volume_bytes: self.part.volume_bytes.get(),
        }
    }

    /// The members with an epoch and a tail. A member with an epoch alone, as earlier builds wrote it, counts
    /// as one that left nothing to go by.
    fn read_left(&self, members: usize) -> Result<Vec<Left>, Fault> {
        let count = usize::from(self.left_count.get());
        ensure(count <= MAX_LEFT, "left count", count, format_args!("at most {MAX_LEFT}"))?;
        let mut left = vec![Left::default(); members];
        for raw in &self.left_tails[..count] {
            let member = usize::from(raw.member.get());
            let free = left.get(member).is_some_and(|left| left.epoch == 0);
            let epoch = self.left_epochs.get(member).map_or(0, |epoch| epoch.get());
            ensure(free && epoch != 0, "left member", member, "a member with an epoch, once")?;
            left[member] = Left { epoch, tail: raw.tail.get(), update: 0 };
        }
        for raw in self.left_updates.iter().filter(|raw| raw.update.get() != 0) {
            let member = usize::from(raw.member.get());
            let free = left.get(member).is_some_and(|left| left.update == 0);
            ensure(free, "left update", member, "a member, once")?;
            left[member].update = raw.update.get();
        }
        Ok(left)
    }
}

impl RawRegion {
    fn read(&self) -> Result<Region, Fault> {
        Ok(Region {
            kind: coded("region kind", self.kind, RegionKind::from_byte)?,
            offset: ByteOffset(self.offset.get()),
            len: self.len.get(),
        })
    }
}

impl RawMember {
    fn read(&self) -> Result<MemberRecord, Fault> {
        Ok(MemberRecord {
            uuid: Uuid::from_bytes(self.uuid),
            state: coded("member state", self.state, MemberState::from_byte)?,
            rebuilt: SlotIndex(self.rebuilt.get()),
        })
    }
}

impl RawReplacement {
    fn read(&self) -> ReplacementRecord {
        ReplacementRecord {
            member: MemberIndex(self.member.get()),
            uuid: Uuid::from_bytes(self.uuid),
            rebuilt: SlotIndex(self.rebuilt.get()),
        }
    }
}

/// BLAKE3 of a copy with its checksum field zero.
fn checksum(bytes: &[u8]) -> [u8; 32] {
    // In one piece: sixteen chunks of the hash side by side are much faster than pieces of odd lengths allow.
    let mut copy = [0; COPY_BYTES];
    copy.copy_from_slice(bytes);
    copy[CHECKSUM_AT].fill(0);
    *blake3::hash(&copy).as_bytes()
}

fn hex(hash: &[u8; 32]) -> String {
    hash[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::check_array_name;
    use super::*;
    use crate::format::{COUNTED_IN_A_LIFE, Unfit, golden};
    use crate::units::StripeIndex;
    use proptest::prelude::*;

    /// A superblock with something in every field, and the same at every run.
    pub(in crate::format) fn example(role: Role) -> Superblock {
        let geometry = Geometry {
            data: 4,
            parity: 3,
            chunk: 65536,
            sector: 4096,
            slots: 4112,
            volume_bytes: 1 << 30,
            ahead: 0,
        };
        let uuid = |number: u128| Uuid::from_u128(0x0123_4567_89ab_4def_8000_0000_0000_0000 + number);
        let mut members: Vec<_> = (0..7)
            .map(|i| MemberRecord { uuid: uuid(i), state: MemberState::Online, rebuilt: SlotIndex(0) })
            .collect();
        members[2].state = MemberState::Rebuilding;
        members[2].rebuilt = SlotIndex(77);
        members[5].state = MemberState::Faulted;
        let left = |member| match member {
            5 => Left { epoch: 0x7654_3210_feeb_daed, tail: 980, update: 0 },
            _ => Left::default(),
        };
        Superblock {
            features_compat: 0,
            features_ro_compat: 0,
            features_incompat: 0x17,
            array: uuid(1000),
            name: "tank".into(),
            created_unix: 1_750_000_000,
            device: match role {
                Role::Member => uuid(2),
                Role::Replacement => uuid(99),
                Role::Replaced => uuid(55),
            },
            member: MemberIndex(if role == Role::Member { 2 } else { 5 }),
            role,
            geometry,
            matrix: MatrixId::Vandermonde11d,
            checksum: ChecksumKind::Blake3,
            volume: VolumeKind::Plain,
            regions: vec![
                Region { kind: RegionKind::Log, offset: ByteOffset(1 << 20), len: 16 << 20 },
                Region { kind: RegionKind::Pages, offset: ByteOffset(17 << 20), len: 17 << 20 },
                Region { kind: RegionKind::Data, offset: ByteOffset(34 << 20), len: 257 << 20 },
            ],
            sequence: 42,
            update: 41,
            update_complete: 39,
            map_pages: 0,
            epoch: Epoch {
                number: 9,
                id: 0xdead_beef_0123_4567,
                parent: 0x7654_3210_feeb_daed,
                live: MemberSet::first(5),
            },
            clean: true,
            members,
            replacements: vec![ReplacementRecord {
                member: MemberIndex(5),
                uuid: uuid(99),
                rebuilt: SlotIndex(1234),
            }],
            scrub: ScrubRecord {
                position: Some(SlotIndex(17)),
                errors_so_far: 1,
                repaired_so_far: 2,
                finished_unix: 1_749_000_000,
                errors: 3,
                repaired: 4,
                unchecked: MemberSet::new(),
                unchecked_before: MemberSet::new(),
            },
            log_secret: *b"0123456789abcdef",
            part: LanePart::WHOLE,
            log_start: LogStart { epoch: 8, sequence: 990 },
            left: (0..7).map(left).collect(),
        }
    }

    /// The example with the pages of its stripe map counted, and updates at which members left.
    pub(in crate::format) fn counted_example(role: Role) -> Superblock {
        let mut counted = Superblock { map_pages: 17, ..example(role) };
        (counted.left[5].update, counted.left[6].update) = (37, 33);
        counted
    }

    /// The example as the superblock of one of eight lanes.
    pub(in crate::format) fn lane_example() -> Superblock {
        let part = LanePart {
            lane: LaneIndex(3),
            lanes: Lanes { count: 8, group: 4 },
            stride: 292 << 20,
            volume_bytes: (8 << 30) - 12288,
        };
        let one = example(Role::Member);
        let geometry = Geometry { ahead: part.ahead(one.geometry.width()), ..one.geometry };
        Superblock { features_incompat: 0x37, part, geometry, ..one }
    }

    /// A superblock of one of several lanes, of an array whose last stripe is the last one of this lane;
    /// where no device would be large enough, the superblock as it is.
    fn cut(superblock: Superblock, random: u64) -> Superblock {
        let lanes = Lanes { count: 2 + random as u16 % 31, group: 1 << (random >> 16 & 7) };
        let lane = LaneIndex((random >> 32) as u16 % lanes.count);
        let stride = superblock.device_bytes_min().next_multiple_of(REGION_ALIGN);
        let (stripe_bytes, stripes) = (superblock.geometry.stripe_bytes(), superblock.geometry.stripes());
        let whole = lanes.stripe_of(lane, StripeIndex(stripes - 1)).0 + 1;
        let too_large = whole.checked_mul(stripe_bytes).is_none_or(|bytes| bytes > MAX_DEVICE_BYTES);
        if too_large || stride > MAX_DEVICE_BYTES / u64::from(lanes.count) {
            return superblock;
        }
        let short = (random >> 48) % (stripe_bytes / ROW_BYTES) * ROW_BYTES;
        let part = LanePart { lane, lanes, stride, volume_bytes: whole * stripe_bytes - short };
        let ahead = part.ahead(superblock.geometry.width());
        let geometry = Geometry { volume_bytes: stripes * stripe_bytes, ahead, ..superblock.geometry };
        let features_incompat = Superblock::incompat_features(superblock.checksum, lanes.count);
        Superblock { features_incompat, part, geometry, ..superblock }
    }

    /// The example as it was written before updates were counted, and the superblock that it is read as.
    fn uncounted(role: Role) -> (Superblock, Vec<u8>) {
        let root = crate::format::project();
        let bytes = std::fs::read(root.join(format!("tests/golden/superblock-redo-{role}.bin"))).unwrap();
        let left = vec![Left::default(); 7];
        let superblock =
            Superblock { features_incompat: 0x7, update: 0, update_complete: 0, left, ..example(role) };
        (superblock, bytes)
    }

    /// Overwrites bytes of a copy and corrects its checksum, as a faulty writer would.
    fn forged(superblock: &Superblock, at: usize, bytes: &[u8]) -> Box<[u8; COPY_BYTES]> {
        let mut copy = superblock.encode();
        copy[at..at + bytes.len()].copy_from_slice(bytes);
        let sum = checksum(copy.as_slice());
        copy[CHECKSUM_AT].copy_from_slice(&sum);
        copy
    }

    /// Where the counts of a copy are.
    const COUNTS_AT: [usize; 12] =
        [0x30, 0xb0, 0xe0, 0x130, 0x138, 0x140, 0x148, 0x150, 0x160, 0x168, 0x180, 0x3bfa];

    /// The superblock that is read back after this one was written: without unknown compat bits, which are
    /// dropped, and, for an image in which updates are not counted, upgraded.
    fn read_back(superblock: &Superblock) -> Superblock {
        let again = Superblock::decode(superblock.encode().as_slice()).expect("our own bytes");
        let Superblock { features_compat, features_incompat, .. } = *superblock;
        Superblock { features_compat, features_incompat, ..again }
    }

    /// The same after everything was counted further by `by`.
    fn counted_on(superblock: Superblock, by: u64) -> Superblock {
        let Superblock { sequence, epoch, scrub, log_start: start, .. } = superblock.clone();
        let log_start = LogStart { epoch: start.epoch + by, sequence: start.sequence + by };
        Superblock {
            sequence: sequence + by,
            update: superblock.update + by,
            update_complete: superblock.update_complete + by,
            epoch: Epoch { number: epoch.number + by, ..epoch },
            scrub: ScrubRecord {
                errors_so_far: scrub.errors_so_far + by,
                errors: scrub.errors + by,
                ..scrub
            },
            log_start,
            ..superblock
        }
    }

    fn superblocks() -> impl Strategy<Value = Superblock> {
        let shape = (1u16..=255).prop_flat_map(|width| (1..=width, Just(width), 12u32..=22, 1u64..1 << 36));
        let ids = (any::<u128>(), any::<[u64; 8]>(), "[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}");
        let flags = (any::<bool>(), any::<bool>(), any::<bool>(), 0usize..3);
        let whole = (shape, ids, flags).prop_map(
            |((data, width, chunk_log2, slots), (base, numbers, name), (clean, sector, scrubbing, kind))| {
                let count_of = |number: u64| number % COUNT_END;
                let uuid = |number: u128| Uuid::from_u128(base.wrapping_add(number));
                let chunk = 1u32 << chunk_log2;
                let pick = |number: u64| SlotIndex(number % (slots + 1));
                let count = (numbers[0] % u64::from(width)) as usize % MAX_REPLACEMENTS;
                let replacements: Vec<_> = (0..count)
                    .map(|i| ReplacementRecord {
                        member: MemberIndex(i as u16),
                        uuid: uuid(1000 + i as u128),
                        rebuilt: pick(numbers[1].rotate_left(i as u32)),
                    })
                    .collect();
                let role = match count {
                    _ if !clean && numbers[0] % 5 == 0 => Role::Replaced,
                    1.. if clean => Role::Replacement,
                    _ => Role::Member,
                };
                let member = MemberIndex((numbers[2] % (count.max(1) as u64)) as u16);
                let capacity = u128::from(slots) * u128::from(chunk) * u128::from(data);
                let capacity = u64::try_from(capacity).unwrap_or(u64::MAX).min(MAX_DEVICE_BYTES);
                let geometry = Geometry {
                    data,
                    parity: width - data,
                    chunk,
                    sector: if sector { 512 } else { 4096 },
                    slots,
                    volume_bytes: (numbers[4] % capacity).max(ROW_BYTES) & !(ROW_BYTES - 1),
                    ahead: 0,
                };
                let data_start = 1 << 20;
                let data_end = data_start + slots * u64::from(chunk);
                let pages = PageLayout::new(geometry, true).region_bytes();
                let checksum = ChecksumKind::ALL[kind];
                Superblock {
                    features_compat: 0,
                    features_ro_compat: 0,
                    features_incompat: Superblock::incompat_features(checksum, 1),
                    array: uuid(5000),
                    name,
                    created_unix: count_of(numbers[3]),
                    device: uuid(match role {
                        Role::Member => u128::from(member.0),
                        Role::Replacement => 1000 + u128::from(member.0),
                        Role::Replaced => 6000,
                    }),
                    member,
                    role,
                    geometry,
                    matrix: MatrixId::Vandermonde11d,
                    checksum,
                    volume: VolumeKind::ALL[kind % 2],
                    regions: vec![
                        Region { kind: RegionKind::Log, offset: ByteOffset(32768), len: 4096 },
                        Region {
                            kind: RegionKind::Data,
                            offset: ByteOffset(data_start),
                            len: slots * u64::from(chunk),
                        },
                        Region { kind: RegionKind::Pages, offset: ByteOffset(data_end), len: pages },
                    ],
                    sequence: count_of(numbers[5]),
                    update: count_of(numbers[6]),
                    update_complete: count_of(numbers[6]) / 2,
                    map_pages: numbers[5] % (slots.div_ceil(PAGE_ENTRIES as u64) + 1),
                    epoch: Epoch {
                        number: count_of(numbers[6]),
                        id: numbers[7],
                        parent: numbers[0],
                        live: (0..width)
                            .filter(|i| numbers[1] >> (i % 64) & 1 == 1)
                            .map(MemberIndex)
                            .collect(),
                    },
                    clean,
                    members: (0..width)
                        .map(|i| MemberRecord {
                            uuid: uuid(u128::from(i)),
                            state: MemberState::ALL
                                [(numbers[3] >> (i % 32)) as usize % MemberState::ALL.len()],
                            rebuilt: pick(numbers[4].rotate_left(u32::from(i))),
                        })
                        .collect(),
                    replacements,
                    scrub: ScrubRecord {
                        position: scrubbing.then(|| pick(numbers[5])),
                        errors_so_far: count_of(numbers[6]),
                        repaired_so_far: count_of(numbers[7]),
                        finished_unix: count_of(numbers[1]),
                        errors: count_of(numbers[2]),
                        repaired: count_of(numbers[3]),
                        unchecked: (0..width)
                            .map(MemberIndex)
                            .filter(|i| numbers[5] >> (i.0 % 64) & 1 == 1)
                            .collect(),
                        unchecked_before: (0..width)
                            .map(MemberIndex)
                            .filter(|i| numbers[4] >> (i.0 % 64) & 1 == 1)
                            .collect(),
                    },
                    left: (0..width)
                        .map(|i| {
                            let update = if i % 3 == 0 && i < 30 { count_of(numbers[6]) } else { 0 };
                            match numbers[5].rotate_left(u32::from(i)) {
                                epoch if i < MAX_LEFT as u16 && epoch != 0 => {
                                    Left { epoch, tail: count_of(!epoch), update }
                                }
                                _ => Left { update, ..Left::default() },
                            }
                        })
                        .collect(),
                    log_secret: base.to_le_bytes(),
                    part: LanePart::WHOLE,
                    log_start: LogStart { epoch: count_of(numbers[1]), sequence: count_of(numbers[2]) },
                }
            },
        );
        let random = prop_oneof![2 => Just(None), 1 => any::<u64>().prop_map(Some)];
        (whole, random).prop_map(|(whole, random)| match random {
            Some(random) => cut(whole, random),
            None => whole,
        })
    }

    proptest! {
        #[test]
        fn every_superblock_reads_back_as_it_was_written(superblock in superblocks()) {
            prop_assert_eq!(Superblock::decode(superblock.encode().as_slice()), Ok(superblock));
        }

        #[test]
        fn forged_bytes_never_panic_and_what_decodes_encodes_again(
            edits in prop::collection::vec((0usize..COPY_BYTES, any::<u8>()), 1..4),
        ) {
            let mut copy = example(Role::Member).encode();
            // Half of the edits go where the small fields are.
            for (at, byte) in edits {
                copy[if at % 2 == 0 { 8 + at % 0x500 } else { at }] = byte;
            }
            let sum = checksum(copy.as_slice());
            copy[CHECKSUM_AT].copy_from_slice(&sum);
            if let Ok(superblock) = Superblock::decode(copy.as_slice()) {
                prop_assert_eq!(read_back(&superblock), superblock);
            }
        }

        /// Whatever a device says: an array that may start from it can count on for longer than any start
        /// lasts.
        #[test]
        fn forged_counts_never_make_a_later_update_impossible(
            field in 0usize..COUNTS_AT.len(), edge in 0u32..64, less in 0u64..3, counted in 0..COUNTED_IN_A_LIFE,
        ) {
            let value = (1u64 << edge).wrapping_sub(less);
            let copy = forged(&example(Role::Member), COUNTS_AT[field], &value.to_le_bytes());
            let Ok(superblock) = Superblock::decode(copy.as_slice()) else {
                // An update has a number of its own, above that of the one before.
                prop_assert!(value >= COUNT_END || COUNTS_AT[field] == 0x180 && value < 39);
                return Ok(());
            };
            prop_assert_eq!(read_back(&superblock), superblock.clone());
            match superblock.unfit() {
                Some(unfit) => prop_assert!(value >= COUNT_END - COUNTED_IN_A_LIFE, "{unfit}"),
                None => {
                    let later = counted_on(superblock, counted);
                    prop_assert_eq!(read_back(&later), later);
                }
            }
        }

        #[test]
        fn noise_is_no_superblock(bytes in prop::collection::vec(any::<u8>(), 0..20000)) {
            prop_assert!(Superblock::decode(&bytes).is_err());
        }
    }

    #[test]
    fn every_flipped_byte_is_rejected() {
        let good = example(Role::Member).encode();
        let mut copy = good.clone();
        for at in 0..COPY_BYTES {
            for mask in [0x01, 0x80, 0xff] {
                copy[at] ^= mask;
                assert!(Superblock::decode(copy.as_slice()).is_err(), "byte {at:#x} xor {mask:#x}");
                copy[at] ^= mask;
            }
        }
        assert_eq!(copy, good);
    }

    #[test]
    fn truncated_and_overlong_input_is_rejected() {
        let copy = example(Role::Member).encode();
        for len in [0, 1, 7, 8, 100, 4096, COPY_BYTES - 1] {
            let error = Superblock::decode(&copy[..len]).unwrap_err();
            assert_eq!(error, FormatError::Length { found: len });
        }
        let mut long = copy.to_vec();
        long.push(0);
        assert_eq!(Superblock::decode(&long), Err(FormatError::Length { found: COPY_BYTES + 1 }));
    }

    #[test]
    fn golden_images_are_written_and_read_byte_for_byte() {
        for role in [Role::Member, Role::Replacement, Role::Replaced] {
            let bytes =
                golden(&format!("superblock-update-count-{role}.bin"), example(role).encode().as_slice());
            assert_eq!(Superblock::decode(&bytes), Ok(example(role)), "{role}");
        }
        let counted = counted_example(Role::Member);
        let bytes = golden("superblock-map-pages-member.bin", counted.encode().as_slice());
        assert_eq!(Superblock::decode(&bytes), Ok(counted));
        let lane = lane_example();
        let bytes = golden("superblock-lane-member.bin", lane.encode().as_slice());
        assert_eq!(Superblock::decode(&bytes), Ok(lane));
    }

    #[test]
    fn a_lane_of_several_is_told_by_its_feature() {
        let lane = lane_example();
        assert_eq!(lane.unfit(), None);
        assert_eq!(lane.feature_names(), "redo-log, checksum-pages, stripe-map, update-count, lanes");
        assert_eq!(lane.volume_bytes(), (8 << 30) - 12288);
        // Without the feature the places of these fields are reserved.
        for at in [0xcc, 0x1fc, 0x1fe, 0x3e0, 0x3e8] {
            let copy = forged(&example(Role::Member), at, &[7]);
            assert_eq!(Superblock::decode(copy.as_slice()), Ok(example(Role::Member)), "byte {at:#x}");
        }
        // With it in a superblock that is not cut they have to be right.
        let copy = forged(&example(Role::Member), 0x48, &[0x37]);
        assert!(Superblock::decode(copy.as_slice()).is_err());
    }

    #[test]
    fn impossible_lanes_are_refused_by_name() {
        let cases: &[(usize, &[u8], &str)] = &[
            (0x1fc, &[1, 0], "lane count"),
            (0x1fc, &[0, 0], "lane count"),
            (0x1fc, &[33, 0], "lane count"),
            (0xcc, &[3, 0, 0, 0], "lane group"),
            (0xcc, &[0, 0, 0, 0], "lane group"),
            (0xcc, &[0, 0, 2, 0], "lane group"),
            (0x1fe, &[8, 0], "lane"),
            (0x1fe, &[0, 1], "lane"),
            (0x3e0, &[0; 8], "lane stride"),
            (0x3e0, &[1], "lane stride"),
            (0x3e0, &[0xff; 8], "lane stride"),
            (0x3e0, &(1u64 << 60).to_le_bytes(), "lane stride"),
            // The regions of the example end at 291 MiB, and two copies of the superblock are behind them.
            (0x3e0, &(291u64 << 20).to_le_bytes(), "lane stride"),
            (0x3e8, &[0; 8], "whole volume bytes"),
            (0x3e8, &[1], "whole volume bytes"),
            (0x3e8, &(1u64 << 63).to_le_bytes(), "whole volume bytes"),
            // Eight turns of the lanes more and less.
            (0x3e8, &(9u64 << 30).to_le_bytes(), "volume bytes"),
            (0x3e8, &(7u64 << 30).to_le_bytes(), "volume bytes"),
            (0xd8, &[0, 0x10, 0, 0], "volume bytes"),
            (0xd0, &[0, 1, 0, 0, 0, 0, 0, 0], "volume bytes"),
        ];
        for (at, bytes, expected) in cases {
            let copy = forged(&lane_example(), *at, bytes);
            match Superblock::decode(copy.as_slice()) {
                Err(FormatError::Field { field, .. }) => assert_eq!(field, *expected, "byte {at:#x}"),
                other => panic!("byte {at:#x}: expected a fault in '{expected}', got {other:?}"),
            }
        }
        // The last lane may have less than the others' window: it has the rest of the device.
        let mut last = lane_example();
        last.part.lane = LaneIndex(7);
        last.geometry.ahead = last.part.ahead(last.geometry.width());
        last.part.stride = 290 << 20;
        assert_eq!(Superblock::decode(last.encode().as_slice()), Ok(last));
    }

    #[test]
    fn the_whole_has_the_slots_and_the_devices_of_all_lanes() {
        let lane = lane_example();
        let whole = lane.array_geometry();
        assert_eq!(
            whole,
            Geometry { slots: 8 * 4112, volume_bytes: (8 << 30) - 12288, ahead: 0, ..lane.geometry }
        );
        let window = (291 << 20) + 2 * COPY_BYTES as u64;
        assert_eq!(lane.device_bytes_min(), window);
        assert_eq!(lane.whole_device_bytes_min(), 7 * (292 << 20) + window);
        let one = example(Role::Member);
        assert_eq!(one.array_geometry(), one.geometry);
        assert_eq!(one.whole_device_bytes_min(), one.device_bytes_min());
    }

    #[test]
    fn images_in_which_updates_are_not_counted_are_read_and_upgraded_by_the_next_update() {
        for role in [Role::Member, Role::Replacement, Role::Replaced] {
            let (expected, bytes) = uncounted(role);
            let read = Superblock::decode(&bytes).unwrap();
            assert_eq!(read, expected, "{role}");
            let upgraded = Superblock::decode(read.encode().as_slice()).unwrap();
            assert_eq!(upgraded, Superblock { features_incompat: 0x17, ..expected }, "{role}");
        }
    }

    #[test]
    fn a_device_that_was_replaced_is_in_no_record() {
        let replaced = example(Role::Replaced);
        for device in [replaced.members[2].uuid, replaced.replacements[0].uuid] {
            let copy = forged(&replaced, 0x60, device.as_bytes());
            let error = Superblock::decode(&copy[..]).expect_err("it is no member any more");
            assert!(error.to_string().contains("it was replaced"), "{error}");
        }
    }

    #[test]
    fn golden_images_of_arrays_without_redo_log_are_refused_by_name() {
        let root = crate::format::project();
        for role in [Role::Member, Role::Replacement] {
            let bytes = std::fs::read(root.join(format!("tests/golden/superblock-v1-{role}.bin"))).unwrap();
            let error = Superblock::decode(&bytes).unwrap_err();
            assert_eq!(error, FormatError::NoRedoLog { name: "tank".into(), sequence: 42 }, "{role}");
            assert_eq!(error.refused_sequence(), Some(42));
            let text = error.to_string();
            assert!(text.contains("'tank' without redo log") && text.contains("copy the data out"), "{text}");
        }
    }

    #[test]
    fn log_and_map_come_together_and_checksums_only_with_them() {
        for bits in [0x1, 0x2, 0x3, 0x4, 0x6] {
            let copy = forged(&example(Role::Member), 0x48, &[bits]);
            match Superblock::decode(copy.as_slice()) {
                Err(FormatError::Field { field, .. }) => {
                    assert_eq!(field, "incompat features", "bits {bits:#x}")
                }
                other => panic!("bits {bits:#x}: {other:?}"),
            }
        }
        let none = forged(&example(Role::Member), 0xbd, &[0]);
        assert!(Superblock::decode(none.as_slice()).is_err(), "pages of no checksum");
        let unhashed =
            Superblock { checksum: ChecksumKind::None, features_incompat: 0x15, ..example(Role::Member) };
        assert_eq!(Superblock::decode(unhashed.encode().as_slice()), Ok(unhashed));
        // Features that the array does not use are not written.
        let plain = Superblock { features_incompat: 0, ..example(Role::Member) };
        assert!(std::panic::catch_unwind(|| plain.encode()).is_err());
        assert_eq!(
            example(Role::Member).feature_names(),
            "redo-log, checksum-pages, stripe-map, update-count"
        );
    }

    #[test]
    fn an_array_has_room_for_log_and_pages() {
        let refused = |change: fn(&mut Superblock)| {
            let mut superblock = example(Role::Member);
            change(&mut superblock);
            superblock.validate().map_err(|fault| fault.field).unwrap_err()
        };
        assert_eq!(refused(|s| s.regions[0].kind = RegionKind::Pages), "log regions");
        assert_eq!(refused(|s| s.regions[1].kind = RegionKind::Log), "pages region length");
        assert_eq!(refused(|s| s.regions[1].len = 8 << 20), "pages region length");
        assert_eq!(refused(|s| s.left.truncate(1)), "left");
        let long = |s: &mut Superblock| {
            s.regions[0] = Region { kind: RegionKind::Log, offset: ByteOffset(1 << 40), len: 1 << 44 };
        };
        assert_eq!(refused(long), "log region length");
    }

    #[test]
    fn log_starts_are_ordered_by_epoch_then_sequence() {
        let start = |epoch, sequence| LogStart { epoch, sequence };
        assert!(start(3, 1) > start(2, 900) && start(3, 2) > start(3, 1));
    }

    #[test]
    fn a_newer_major_version_is_refused_with_the_version() {
        let copy = forged(&example(Role::Member), 8, &[2, 0, 5, 0]);
        let error = Superblock::decode(copy.as_slice()).unwrap_err();
        assert_eq!(error, FormatError::NewerVersion { major: 2, minor: 5, sequence: 42 });
        assert!(error.to_string().contains("2.5"), "{error}");
    }

    #[test]
    fn a_newer_minor_version_is_read() {
        let copy = forged(&example(Role::Member), 10, &[9, 0]);
        assert_eq!(Superblock::decode(copy.as_slice()), Ok(example(Role::Member)));
    }

    #[test]
    fn unknown_features_act_by_their_class() {
        let incompat = forged(&example(Role::Member), 0x48, &[0x1f, 0x02]);
        let error = Superblock::decode(incompat.as_slice()).unwrap_err();
        assert!(error.to_string().contains("have: cas-volume, incompat bit 9;"), "{error}");
        assert_eq!(error.refused_sequence(), Some(42));

        let ro_compat = forged(&example(Role::Member), 0x40, &[0x10]);
        let read = Superblock::decode(ro_compat.as_slice()).unwrap();
        assert_eq!(read.unfit(), Some(Unfit::RoCompatFeatures { features: "ro-compat bit 4".into() }));
        assert_eq!(read_back(&read), read, "no panic: a mistake of the caller's must not end the process");
        assert_eq!(example(Role::Member).unfit(), None);

        let compat = forged(&example(Role::Member), 0x38, &[0x10]);
        let read = Superblock::decode(compat.as_slice()).unwrap();
        assert_eq!(read.features_compat, 0x10);
        assert_eq!(Superblock::decode(read.encode().as_slice()).unwrap().features_compat, 0);
    }

    #[test]
    fn impossible_fields_are_refused_by_name() {
        let example = example(Role::Member);
        let cases: &[(usize, &[u8], &str)] = &[
            (0x0c, &[0, 0, 0, 0], "copy bytes"),
            (0x30, &[0xff; 8], "sequence"),
            (0x30, &(u64::MAX - 1).to_le_bytes(), "sequence"),
            (0x30, &COUNT_END.to_le_bytes(), "sequence"),
            (0xe0, &[0xff; 8], "epoch number"),
            (0x160, &[0xff; 8], "log start sequence"),
            (0x168, &[0xff; 8], "log start epoch"),
            (0x130, &[0xff; 8], "scrub errors so far"),
            (0x60, &[0; 16], "device uuid"),
            (0x70, b"/", "name"),
            (0x70 + 60, b"x", "name padding"),
            (0xb8, &[7, 0], "member"),
            (0xba, &[9], "role"),
            (0xbb, &[2], "clean"),
            (0xbc, &[0], "matrix"),
            (0xbd, &[3], "checksum kind"),
            (0xbe, &[0], "volume kind"),
            (0xc0, &[0, 0], "data"),
            (0xc2, &[0xff, 0], "data + parity"),
            (0xc4, &[1, 0, 1, 0], "chunk"),
            (0xc4, &[0, 0, 0, 0], "chunk"),
            (0xc8, &[0, 4], "sector"),
            (0xd0, &[0xff; 8], "slots"),
            (0xd8, &[0xff; 8], "volume bytes"),
            (0xd8, &[0; 8], "volume bytes"),
            (0xf8, &[0xff], "epoch live set"),
            (0x120, &[2], "scrub active"),
            (0x128, &[0xff; 8], "scrub position"),
            (0x23e0, &[0xff], "members the scrub has not checked"),
            (0x3fe0, &[0xff], "members the scrub has not checked"),
            (0x15e, &[101, 0], "left count"),
            (0x15e, &[2, 0], "left member"),
            (0x3bf8, &[7, 0], "left member"),
            (0x3bf8, &[4, 0], "left member"),
            (0x3bfa, &[0xff; 8], "left tail"),
            (0x198, &[7, 0, 1], "left update"),
            (0x198, &[5, 0, 1, 0, 0, 0, 0, 0, 0, 0, 5, 0, 1], "left update"),
            (0x19a, &[0xff; 8], "left update"),
            (0x180, &[0xff; 8], "update"),
            (0x190, &[18], "map pages"),
            (0x190, &[0xff; 8], "map pages"),
            (0x188, &[42], "update complete"),
            (0x158, &[17, 0], "region count"),
            (0x158, &[0, 0], "data regions"),
            (0x15a, &[6, 0], "member count"),
            (0x15a, &[0xff, 0xff], "member count"),
            (0x15c, &[129, 0], "replacement count"),
            (0x200, &[0], "region kind"),
            (0x208, &[0; 8], "region"),
            (0x208, &[0, 0xf0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], "region"),
            (0x210, &[0, 0, 0, 2], "region"),
            (0x250, &[0, 0, 0x10, 0], "data region length"),
            (0x410, &[0xff; 8], "member rebuilt"),
            (0x418, &[0], "member state"),
            (0x2410, &[0xff; 8], "replacement rebuilt"),
            (0x2418, &[7, 0], "replacement member"),
        ];
        for (at, bytes, expected) in cases {
            let copy = forged(&example, *at, bytes);
            match Superblock::decode(copy.as_slice()) {
                Err(FormatError::Field { field, .. }) => assert_eq!(field, *expected, "byte {at:#x}"),
                other => panic!("byte {at:#x}: expected a fault in '{expected}', got {other:?}"),
            }
        }
    }

    #[test]
    fn two_devices_with_one_identity_are_refused() {
        let mut twins = example(Role::Member);
        twins.members[0].uuid = twins.members[1].uuid;
        assert!(std::panic::catch_unwind(|| twins.encode()).is_err());
        let mut twins = example(Role::Member);
        twins.replacements[0].uuid = twins.members[1].uuid;
        assert!(std::panic::catch_unwind(|| twins.encode()).is_err());
    }

    #[test]
    fn names_are_one_safe_word() {
        for name in ["a", "tank", "Data-1.0_x", &"n".repeat(64)] {
            assert!(valid_name(name), "{name}");
        }
        for name in ["", ".", "-x", "a b", "a/b", "ä", "a\n", &"n".repeat(65)] {
            assert!(!valid_name(name) && check_array_name(name).is_err(), "{name}");
        }
    }
}
