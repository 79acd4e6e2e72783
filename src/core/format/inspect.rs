//! What `calpe inspect` reports about one device: the four superblock copies, and the fields of the
//! one that counts, as text and as JSON. The field names are a contract with scripts; numbers are
//! bytes unless their name says slots.

use super::{
    CopyPlace, FormatError, LogStart, MemberSet, MemberState, Region, RegionKind, Role, Superblock,
    all_copy_offsets, leftover_bytes, newest,
};
use crate::units::{Count, HumanSize, Printable, UnixTime, two_sizes};
use serde::Serialize;
use std::fmt;
use uuid::Uuid;

/// Version of the JSON fields; rises when a field changes its meaning or is removed.
const OUTPUT_VERSION: u32 = 1;

/// Everything about one device.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// Version of these fields.
    pub output_version: u32,
    /// The device, as it was named.
    pub path: String,
    /// Its size.
    pub device_bytes: u64,
    /// The four copies, head first.
    pub copies: Vec<CopyReport>,
    /// Why it cannot serve as a member, if so. Without a usable superblock the fields below are absent.
    pub error: Option<String>,
    /// Fields of the copy that counts.
    #[serde(flatten)]
    pub superblock: Option<SuperblockReport>,
}

/// One copy of the superblock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CopyReport {
    /// "head A" and so on.
    pub place: &'static str,
    /// Where it lies.
    pub offset: u64,
    /// Whether it can be read and used.
    pub valid: bool,
    /// Its sequence, where known.
    pub sequence: Option<u64>,
    /// What is wrong with it.
    pub error: Option<String>,
}

/// The fields of a superblock, under the names that scripts use.
// More than 15 fields: a report, one for each key of the JSON that scripts read.
#[derive(Clone, Debug, Serialize)]
pub struct SuperblockReport {
    array_uuid: Uuid,
    name: String,
    created_unix: u64,
    data: u16,
    parity: u16,
    chunk: u32,
    sector: u32,
    slots: u64,
    matrix: &'static str,
    checksum: &'static str,
    volume_kind: &'static str,
    volume_bytes: u64,
    device_uuid: Uuid,
    member_index: u16,
    role: &'static str,
    data_offset: u64,
    data_length: u64,
    unused_bytes: u64,
    sequence: u64,
    update: u64,
    update_complete: u64,
    epoch: EpochReport,
    clean: bool,
    /// Pages of the stripe map that have a version, at least; absent where they were not counted.
    map_pages: Option<u64>,
    members: Vec<MemberReport>,
    replacements: Vec<ReplacementReport>,
    regions: Vec<RegionReport>,
    scrub: ScrubReport,
    log_start: LogStart,
    /// Absent in an array that is not cut into lanes.
    #[serde(skip_serializing_if = "Option::is_none")]
    lane: Option<LaneReport>,
    features: FeatureReport,
}

/// The part of an array of several lanes that a superblock is about.
#[derive(Clone, Debug, Serialize)]
struct LaneReport {
    index: u16,
    /// Lanes of the array.
    count: u16,
    /// Stripes that go to a lane at a time.
    group_stripes: u32,
    /// Bytes of a device that each lane but the last one has.
    stride: u64,
    /// Size of the whole volume; `volume_bytes` is this lane's share.
    whole_volume_bytes: u64,
}

#[derive(Clone, Debug, Serialize)]
struct EpochReport {
    number: u64,
    id: String,
    parent: String,
    live: MemberSet,
}

#[derive(Clone, Debug, Serialize)]
struct MemberReport {
    index: u16,
    uuid: Uuid,
    state: &'static str,
    rebuilt_slots: u64,
    /// Identity of the last epoch in which a member out of service was current, absent where there is none.
    left_epoch_id: Option<String>,
    /// Batches below were in place on it then.
    left_tail: Option<u64>,
    /// The newest update of the superblocks that its device can have got, absent where that is not known.
    left_update: Option<u64>,
}

#[derive(Clone, Debug, Serialize)]
struct ReplacementReport {
    member_index: u16,
    uuid: Uuid,
    rebuilt_slots: u64,
}

/// One region of the device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RegionReport {
    /// What it holds.
    pub kind: RegionKind,
    /// Where it starts.
    pub offset: u64,
    /// Its length.
    pub length: u64,
}

#[derive(Clone, Debug, Serialize)]
struct ScrubReport {
    /// Slots verified by a scrub under way, absent when none is.
    position_slots: Option<u64>,
    errors_so_far: u64,
    repaired_so_far: u64,
    /// End of the last complete scrub, 0 for never.
    finished_unix: u64,
    errors: u64,
    repaired: u64,
}

#[derive(Clone, Debug, Serialize)]
struct FeatureReport {
    compat: String,
    ro_compat: String,
    incompat: String,
    /// Names of the incompat features, separated by commas.
    incompat_names: String,
}

impl Inspection {
    /// Puts together what was read of a device of this size; the copies in the order of [`CopyPlace::ALL`]. A
    /// copy that could not be read at all is given as the text of its I/O error.
    #[must_use]
    pub fn new(
        path: String,
        device_bytes: u64,
        copies: [Result<Result<Superblock, FormatError>, String>; 4],
    ) -> Inspection {
        let reports = CopyPlace::ALL
            .iter()
            .zip(all_copy_offsets(device_bytes))
            .zip(&copies)
            .map(|((place, offset), copy)| CopyReport::new(*place, offset.0, copy))
            .collect();
        let (superblock, error) = match newest(copies.into_iter().flatten()) {
            Ok(superblock) => {
                let needed = superblock.device_bytes_min();
                let cut_off = (device_bytes < needed).then(|| {
                    let (has, needed) = two_sizes(device_bytes, needed);
                    format!("the device has {has}, its superblock describes {needed}: it was cut off, or copied in part")
                });
                (Some(SuperblockReport::new(superblock, device_bytes)), cut_off)
            }
            Err(error) => (None, Some(error.to_string())),
        };
        Inspection { output_version: OUTPUT_VERSION, path, device_bytes, copies: reports, error, superblock }
    }
}

impl Inspection {
    /// Whether the superblock has never been updated since the array was created.
    fn is_first(&self) -> bool {
        self.superblock.as_ref().is_some_and(|superblock| superblock.sequence <= 1)
    }
}

impl CopyReport {
    fn new(
        place: CopyPlace,
        offset: u64,
        copy: &Result<Result<Superblock, FormatError>, String>,
    ) -> CopyReport {
        let (sequence, error) = match copy {
            Ok(Ok(superblock)) => (Some(superblock.sequence), None),
            Ok(Err(error)) => (error.refused_sequence(), Some(error.to_string())),
            Err(error) => (None, Some(error.clone())),
        };
        CopyReport { place: place.word(), offset, valid: error.is_none(), sequence, error }
    }
}

impl SuperblockReport {
    fn new(superblock: Superblock, device_bytes: u64) -> SuperblockReport {
        let data = superblock.data_region();
        let feature = |bits: u64| format!("{bits:#x}");
        let incompat_names = superblock.feature_names();
        let lane = superblock.part.is_cut().then_some(LaneReport {
            index: superblock.part.lane.0,
            count: superblock.part.lanes.count,
            group_stripes: superblock.part.lanes.group,
            stride: superblock.part.stride,
            whole_volume_bytes: superblock.part.volume_bytes,
        });
        SuperblockReport {
            array_uuid: superblock.array,
            name: superblock.name,
            created_unix: superblock.created_unix,
            data: superblock.geometry.data,
            parity: superblock.geometry.parity,
            chunk: superblock.geometry.chunk,
            sector: superblock.geometry.sector,
            slots: superblock.geometry.slots,
            matrix: superblock.matrix.word(),
            checksum: superblock.checksum.word(),
            volume_kind: superblock.volume.word(),
            volume_bytes: superblock.geometry.volume_bytes,
            device_uuid: superblock.device,
            member_index: superblock.member.0,
            role: superblock.role.word(),
            data_offset: data.offset.0,
            data_length: data.len,
            unused_bytes: leftover_bytes(device_bytes, &superblock.regions),
            sequence: superblock.sequence,
            update: superblock.update,
            update_complete: superblock.update_complete,
            epoch: EpochReport {
                number: superblock.epoch.number,
                id: epoch_id(superblock.epoch.id),
                parent: epoch_id(superblock.epoch.parent),
                live: superblock.epoch.live,
            },
            clean: superblock.clean,
            map_pages: Some(superblock.map_pages).filter(|&pages| pages != 0),
            members: (0..)
                .zip(superblock.members)
                .zip(superblock.left)
                .map(|((index, member), left)| MemberReport {
                    index,
                    uuid: member.uuid,
                    state: member.state.as_str(),
                    rebuilt_slots: member.rebuilt.0,
                    left_epoch_id: (left.epoch != 0).then(|| epoch_id(left.epoch)),
                    left_tail: (left.epoch != 0).then_some(left.tail),
                    left_update: (left.update != 0).then_some(left.update),
                })
                .collect(),
            replacements: superblock
                .replacements
                .iter()
                .map(|replacement| ReplacementReport {
                    member_index: replacement.member.0,
                    uuid: replacement.uuid,
                    rebuilt_slots: replacement.rebuilt.0,
                })
                .collect(),
            regions: superblock
                .regions
                .iter()
                .map(|&Region { kind, offset, len }| RegionReport { kind, offset: offset.0, length: len })
                .collect(),
            scrub: ScrubReport {
                position_slots: superblock.scrub.position.map(|slot| slot.0),
                errors_so_far: superblock.scrub.errors_so_far,
                repaired_so_far: superblock.scrub.repaired_so_far,
                finished_unix: superblock.scrub.finished_unix,
                errors: superblock.scrub.errors,
                repaired: superblock.scrub.repaired,
            },
            log_start: superblock.log_start,
            lane,
            features: FeatureReport {
                compat: feature(superblock.features_compat),
                ro_compat: feature(superblock.features_ro_compat),
                incompat: feature(superblock.features_incompat),
                incompat_names,
            },
        }
    }
}

impl fmt::Display for Inspection {
    /// The text form, one fact a line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "device", format_args!("{} ({})", self.path, HumanSize(self.device_bytes)))?;
        for copy in &self.copies {
            let sequence = copy.sequence.map_or_else(|| "-".to_owned(), |sequence| sequence.to_string());
            let verdict = match copy.error.as_deref() {
                // Updates alternate between two places; the first has left the other one as it was.
                Some(error) if self.is_first() && error == FormatError::NoMagic.to_string() => {
                    "not written yet"
                }
                Some(error) => error,
                None => "valid",
            };
            line(
                f,
                "superblock",
                format_args!("{} at {:>12}  sequence {sequence:<6} {verdict}", copy.place, copy.offset),
            )?;
        }
        if let Some(error) = &self.error {
            line(f, "error", error)?;
        }
        self.superblock.as_ref().map_or(Ok(()), |superblock| superblock.fmt(f))
    }
}

impl fmt::Display for SuperblockReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        line(f, "array", format_args!("{} ({})", self.name, self.array_uuid))?;
        line(f, "created", format_args!("{} ({})", UnixTime(self.created_unix), self.created_unix))?;
        let Self { data, parity, .. } = self;
        line(
            f,
            "geometry",
            format_args!(
                "{data} data + {parity} parity, chunk {}, sector {}, {} slots",
                HumanSize(u64::from(self.chunk)),
                self.sector,
                self.slots
            ),
        )?;
        if let Some(LaneReport { index, count, group_stripes, stride, whole_volume_bytes }) = self.lane {
            let group = Count(u64::from(group_stripes), "stripe");
            let whole = HumanSize(whole_volume_bytes);
            line(f, "lane", format_args!("{index} of {count}, {group} at a time, {stride} bytes apart"))?;
            line(f, "whole volume", format_args!("{whole_volume_bytes} bytes ({whole})"))?;
        }
        line(f, "matrix", self.matrix)?;
        line(f, "checksum", self.checksum)?;
        line(
            f,
            "volume",
            format_args!(
                "{}, {} bytes ({})",
                self.volume_kind,
                self.volume_bytes,
                HumanSize(self.volume_bytes)
            ),
        )?;
        let member = MemberState::ALL
            .iter()
            .find(|state| {
                self.members.get(usize::from(self.member_index)).is_some_and(|m| m.state == state.as_str())
            })
            .map_or("-", |state| state.as_str());
        let index = self.member_index;
        if self.role == Role::Member.word() {
            line(f, "member", format_args!("{index} {member}"))?;
        } else if self.role == Role::Replaced.word() {
            line(f, "member", format_args!("was member {index} until it was replaced"))?;
        } else {
            line(f, "member", format_args!("being built as member {index}"))?;
        }
        line(f, "device uuid", self.device_uuid)?;
        line(
            f,
            "epoch",
            format_args!(
                "{} id {} parent {} live {}",
                self.epoch.number, self.epoch.id, self.epoch.parent, self.epoch.live
            ),
        )?;
        line(f, "update", format_args!("{}, {} was complete", self.update, self.update_complete))?;
        line(f, "clean", if self.clean { "yes" } else { "no" })?;
        let LogStart { epoch, sequence } = self.log_start;
        line(f, "log start", format_args!("batch {sequence}, epoch {epoch}"))?;
        if let Some(pages) = self.map_pages {
            line(f, "stripe map", format_args!("{} written, at least", Count(pages, "page")))?;
        }
        for region in &self.regions {
            let what = format!("{} region", region.kind);
            line(
                f,
                &what,
                format_args!("at {}, {} bytes ({})", region.offset, region.length, HumanSize(region.length)),
            )?;
        }
        line(f, "unused", format_args!("{} bytes at the end", self.unused_bytes))?;
        self.fmt_scrub(f)?;
        line(
            f,
            "features",
            format_args!(
                "compat {} ro-compat {} incompat {} ({})",
                self.features.compat,
                self.features.ro_compat,
                self.features.incompat,
                if self.features.incompat_names.is_empty() { "none" } else { &self.features.incompat_names }
            ),
        )?;
        writeln!(f, "\n  MEMBER  STATE       UUID")?;
        for member in &self.members {
            write!(f, "  {:>6}  {:<10}  {}", member.index, member.state, member.uuid)?;
            if member.rebuilt_slots > 0 {
                write!(f, "  {} of {} slots rebuilt", member.rebuilt_slots, self.slots)?;
            }
            if let Some(left) = &member.left_epoch_id {
                write!(f, "  current until epoch {left}")?;
            }
            if let Some(update) = member.left_update {
                write!(f, "  got no update after {update}")?;
            }
            writeln!(f)?;
        }
        for replacement in &self.replacements {
            writeln!(
                f,
                "  {:>6}  replacement {}  {} of {} slots built",
                replacement.member_index, replacement.uuid, replacement.rebuilt_slots, self.slots
            )?;
        }
        Ok(())
    }
}

impl SuperblockReport {
    fn fmt_scrub(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(position) = self.scrub.position_slots {
            line(
                f,
                "scrub",
                format_args!(
                    "under way, {position} of {}, {}, {} repaired",
                    Count(self.slots, "slot"),
                    Count(self.scrub.errors_so_far, "error"),
                    self.scrub.repaired_so_far
                ),
            )?;
        }
        match self.scrub.finished_unix {
            0 => line(f, "last scrub", "never"),
            when => line(
                f,
                "last scrub",
                format_args!(
                    "ended {} ({when}), {}, {} repaired",
                    UnixTime(when),
                    Count(self.scrub.errors, "error"),
                    self.scrub.repaired
                ),
            ),
        }
    }
}

/// In hexadecimal: JSON readers that use floating point would round the 64-bit identities.
fn epoch_id(id: u64) -> String {
    format!("{id:016x}")
}

fn line(f: &mut fmt::Formatter<'_>, what: &str, value: impl fmt::Display) -> fmt::Result {
    writeln!(f, "{what:>13}: {}", Printable(&value.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::superblock_bytes::tests::{counted_example, example, lane_example};
    use super::*;

    fn inspection() -> Inspection {
        let superblock = example(Role::Member);
        let older = Superblock { sequence: 41, ..superblock.clone() };
        Inspection::new(
            "/srv/m2.img".into(),
            300 << 20,
            [
                Ok(Ok(superblock)),
                Ok(Ok(older)),
                Ok(Err(FormatError::NoMagic)),
                Err("read: input/output error".into()),
            ],
        )
    }

    #[test]
    fn json_has_the_promised_fields() {
        let json = serde_json::to_value(inspection()).unwrap();
        assert_eq!(json["output_version"], 1);
        assert_eq!(json["array_uuid"], "01234567-89ab-4def-8000-0000000003e8");
        assert_eq!(json["name"], "tank");
        assert_eq!((&json["data"], &json["parity"]), (&4.into(), &3.into()));
        assert_eq!(json["chunk"], 65536);
        assert_eq!(json["matrix"], "vandermonde-11d");
        assert_eq!(json["member_index"], 2);
        assert_eq!(json["data_offset"], 34 << 20);
        assert_eq!(json["data_length"], 257 << 20);
        assert_eq!(json["epoch"]["number"], 9);
        assert_eq!(json["epoch"]["id"], "deadbeef01234567");
        assert_eq!(json["epoch"]["live"], serde_json::json!([0, 1, 2, 3, 4]));
        assert_eq!(json["members"][5]["state"], "FAULTED");
        assert_eq!(json["unused_bytes"], (9 << 20) - 32768);
        assert_eq!(json["copies"][0]["valid"], true);
        assert_eq!(json["copies"][1]["sequence"], 41);
        assert_eq!(json["copies"][2]["error"], "no Calpe superblock");
        assert_eq!(json["copies"][3]["valid"], false);
        assert!(json["error"].is_null());
        assert_eq!(json["checksum"], "blake3");
        assert_eq!(json["log_start"], serde_json::json!({"epoch": 8, "sequence": 990}));
        assert_eq!((&json["update"], &json["update_complete"]), (&41.into(), &39.into()));
        assert_eq!(json["features"]["incompat"], "0x17");
        assert_eq!(json["features"]["incompat_names"], "redo-log, checksum-pages, stripe-map, update-count");
        assert_eq!(json["members"][5]["left_epoch_id"], "76543210feebdaed");
        assert_eq!(json["members"][5]["left_tail"], 980);
        assert!(json["members"][0]["left_epoch_id"].is_null() && json["members"][5]["left_update"].is_null());
        assert!(json["map_pages"].is_null());
    }

    #[test]
    fn what_counted_map_pages_and_updates_at_which_members_left_are_told() {
        let copy = || Ok(Ok(counted_example(Role::Member)));
        let inspection = Inspection::new("m".into(), 300 << 20, [copy(), copy(), copy(), copy()]);
        let json = serde_json::to_value(&inspection).unwrap();
        assert_eq!((&json["map_pages"], &json["members"][5]["left_update"]), (&17.into(), &37.into()));
        let text = inspection.to_string();
        assert!(text.contains("stripe map: 17 pages written, at least"), "{text}");
        assert!(text.contains("current until epoch 76543210feebdaed  got no update after 37"), "{text}");
    }

    #[test]
    fn a_lane_of_several_says_which_it_is_and_how_large_the_whole_is() {
        let copy = || Ok(Ok(lane_example()));
        let inspection = Inspection::new("m".into(), 292 << 20, [copy(), copy(), copy(), copy()]);
        let json = serde_json::to_value(&inspection).unwrap();
        let expected = serde_json::json!({
            "index": 3, "count": 8, "group_stripes": 4, "stride": 292 << 20,
            "whole_volume_bytes": (8u64 << 30) - 12288,
        });
        assert_eq!((&json["lane"], &json["volume_bytes"]), (&expected, &(1 << 30).into()));
        let text = inspection.to_string();
        assert!(text.contains("lane: 3 of 8, 4 stripes at a time, 306184192 bytes apart"), "{text}");
        assert!(text.contains("whole volume: 8589922304 bytes (8.00 GiB)"), "{text}");
        assert!(serde_json::to_value(self::inspection()).unwrap().get("lane").is_none());
    }

    #[test]
    fn text_names_each_copy_and_member() {
        let text = inspection().to_string();
        for part in [
            "head A at            0  sequence 42     valid",
            "tail B at    314556416  sequence -      read: input/output error",
            "array: tank (01234567-89ab-4def-8000-0000000003e8)",
            "geometry: 4 data + 3 parity, chunk 64 KiB, sector 4096, 4112 slots",
            "member: 2 REBUILDING",
            "checksum: blake3",
            "log start: batch 990, epoch 8",
            "features: compat 0x0 ro-compat 0x0 incompat 0x17 (redo-log, checksum-pages, stripe-map, update-count)",
            "FAULTED     01234567-89ab-4def-8000-000000000005  current until epoch 76543210feebdaed",
            "data region: at 35651584, 269484032 bytes (257 MiB)",
            "  2  REBUILDING  01234567-89ab-4def-8000-000000000002  77 of 4112 slots rebuilt",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
    }

    #[test]
    fn a_device_without_superblock_says_so_and_has_no_fields() {
        let none = || Ok(Err(FormatError::NoMagic));
        let inspection = Inspection::new("x".into(), 4096, [none(), none(), none(), none()]);
        let json = serde_json::to_value(&inspection).unwrap();
        assert_eq!(json["error"], "no Calpe superblock");
        assert!(json.get("array_uuid").is_none());
        assert!(inspection.to_string().contains("error: no Calpe superblock"));
    }
}
