//! How an opened array begins to be served: its remembered state, its volume, its rules.
//!
//! Invariant: every device that an array is handed was opened and locked before. Must not know how it was
//! found.

use super::meters::Meters;
use super::names::{Names, Place};
use super::outcome::refusal;
use super::registry::Arrays;
use super::served::Served;
use super::settings::ServeOptions;
use crate::control::{ArrayReport, ArrayState, ErrorCode, MemberReport, MemberState, RequestError, ScanKind};
use crate::daemon::config::MIN_PAGE_CACHE;
use crate::daemon::devices::import::{self, LeftOut, Opened, OpenedLane};
use crate::daemon::devices::search::Hindrance;
use crate::daemon::events::{News, kinds};
use crate::daemon::reactor::{NewArray, NewLane};
use crate::member::{Device, forget_lost};
use calpe_core::array::assembly::{Assembled, Seat};
use calpe_core::array::{ArrayConfig, Footprint, OpenDevice};
use calpe_core::block_io::DeviceId;
use calpe_core::codec::Codec;
use calpe_core::format::{MemberState as Seated, Superblock, VolumeKind};
use calpe_core::units::{HumanSize, LaneIndex, SizeBeside, SlotIndex, VolumeOffset};
use calpe_core::volume::{LaneCut, NoticeLevel, PlainVolume, Volume};
use std::collections::HashMap;
use std::path::PathBuf;
use uuid::Uuid;

/// Begins to serve an opened array.
///
/// # Errors
/// When an array of its name or identity is served, or it cannot be exported.
pub(crate) fn serve(
    arrays: &Arrays,
    opened: Opened,
    mut options: ServeOptions,
) -> Result<ArrayReport, RequestError> {
    let Opened { mut lanes, damaged, warnings, left_out, forbidden } = opened;
    let mut causes = HashMap::new();
    for OpenedLane { assembled, .. } in &mut lanes {
        arrays.memory.recall_given_up(assembled, &left_out);
        causes.extend(arrays.memory.recall_causes(assembled, &left_out));
    }
    let superblock = lanes[0].assembled.superblock.clone();
    let memory = check_servable(arrays, &superblock, options)?;
    options.page_cache = Some(memory.page_cache / lanes.len() as u64);
    let opened: Vec<OpenLane> = lanes.into_iter().map(|lane| OpenLane::of(arrays, lane)).collect();
    let missing = missing_in_all(&opened);
    let forbidden = forbidden.into_iter().map(|device| (device, Hindrance::Forbidden));
    let hindered = left_out.iter().filter_map(|left| Some((left.device, left.hindrance?)));
    let hindrances = forbidden.chain(hindered).collect();
    let names = Names {
        read_only: options.read_only,
        damaged: damaged.into_iter().collect(),
        hindrances,
        causes,
        ..names_of(arrays, &opened, &left_out)
    };
    for (_, device) in opened.iter().flat_map(OpenLane::devices) {
        device.set_limits(options.limits);
        forget_lost(device.path(), device.since());
    }
    let rotational = opened.iter().flat_map(OpenLane::devices).any(|(_, device)| device.facts().rotational);
    let cut = LaneCut::of(&superblock);
    let lanes = (0..).map(LaneIndex).zip(opened).map(|(lane, opened)| {
        let config = options.array_config(rotational).for_lane(cut.count());
        opened.begin(arrays, (cut, lane), config)
    });
    let lanes = lanes.collect::<Result<Vec<_>, _>>()?;
    let sections = arrays.settings.sections();
    if !arrays.served.list(|served| served.names.name.clone()).contains(&names.name) {
        arrays.events.name(&names.name, names.uuid);
    }
    let id = arrays.reactor.add_array(NewArray {
        array: superblock.array,
        name: names.name.clone(),
        cut,
        lanes,
        read_only: options.read_only,
        rules: sections.rules(&names.name, names.uuid),
    })?;
    let (name, uuid) = (names.name.clone(), names.uuid);
    let paths: Vec<PathBuf> = names.paths().cloned().collect();
    begin_returns(arrays, (&name, uuid), &paths, &missing, options.force);
    arrays.served.add(Served { id, superblock, names, limits: options.limits, memory: memory.total });
    drop(sections);
    // No attempt goes on looking for it, so none undoes an export right after this.
    arrays.awaited.now_served(&name, uuid, &paths);
    arrays.remember_now(id);
    let report = arrays.report_of(id)?;
    tell_imported(arrays, &report, warnings, left_out);
    Ok(report)
}

/// A lane whose devices are open and have handles.
struct OpenLane {
    assembled: Assembled<usize>,
    devices: Vec<Option<(DeviceId, Device)>>,
}

impl OpenLane {
    fn of(arrays: &Arrays, lane: OpenedLane) -> OpenLane {
        let OpenedLane { assembled, devices } = lane;
        let handle = |device: Option<Device>| device.map(|d| (arrays.reactor.next_device_id(), d));
        OpenLane { assembled, devices: devices.into_iter().map(handle).collect() }
    }

    fn devices(&self) -> impl Iterator<Item = &(DeviceId, Device)> {
        self.devices.iter().flatten()
    }

    fn open(&self, key: usize) -> &(DeviceId, Device) {
        self.devices[key].as_ref().expect("assembly seats only devices that are open")
    }

    /// Makes its volume, with what an earlier run knew of it.
    fn begin(
        self,
        arrays: &Arrays,
        (cut, lane): (LaneCut, LaneIndex),
        config: ArrayConfig,
    ) -> Result<NewLane, RequestError> {
        let geometry = self.assembled.superblock.geometry;
        let array = self.assembled.superblock.array;
        let codec = Codec::new(usize::from(geometry.data), usize::from(geometry.parity))
            .map_err(|error| refusal(ErrorCode::Failed, error.to_string()))?;
        let OpenLane { assembled, devices } = self;
        let open = |key: usize| {
            let (id, device) = devices[key].as_ref().expect("assembly seats only devices that are open");
            OpenDevice { id: *id, bytes: device.facts().bytes }
        };
        let assembled = import::with_handles(assembled, open);
        let mut volume = Box::new(PlainVolume::new(assembled, codec, arrays.pool.clone(), config));
        expect_earlier(arrays, &mut volume, array, (cut, lane));
        Ok(NewLane { volume, devices: devices.into_iter().flatten().collect() })
    }
}

/// Members that no lane has: index and device.
fn missing_in_all(lanes: &[OpenLane]) -> Vec<(u16, Uuid)> {
    let is_missing =
        |index: usize| lanes.iter().all(|lane| lane.assembled.seats[index].state == Seated::Missing);
    let seats = lanes[0].assembled.seats.iter().enumerate();
    let missing = seats.filter(|(index, _)| is_missing(*index));
    missing.map(|(index, seat)| (index as u16, seat.uuid)).collect()
}

/// The names of an array, from its seats and from earlier runs. They begin as writable for clients, and
/// without faults of devices.
fn names_of(arrays: &Arrays, lanes: &[OpenLane], left_out: &[LeftOut]) -> Names {
    let superblock = &lanes[0].assembled.superblock;
    let seat = |index: usize| {
        // Where a lane lacks a device that another one has, it is there all the same.
        let all = lanes.iter().map(|lane| (lane, &lane.assembled.seats[index]));
        let found = all.clone().find_map(|(lane, seat)| {
            let key = seat.key.as_ref()?;
            Some(Place::of(seat.uuid, &lane.open(*key).1))
        });
        found.unwrap_or_else(|| {
            let uuid = lanes[0].assembled.seats[index].uuid;
            let left = left_out.iter().find(|left| left.device == uuid);
            let path = left.and_then(|left| left.path.clone());
            Place::unseen(uuid, path.or_else(|| arrays.memory.earlier_path(superblock.array, uuid)))
        })
    };
    let devices_of = |lane: &OpenLane| {
        let place = |key: &usize, uuid: Uuid| {
            let (id, device) = lane.open(*key);
            (*id, Place::of(uuid, device))
        };
        let of_seat = |seat: &Seat<usize>| {
            let own = seat.key.as_ref().map(|key| place(key, seat.uuid));
            let new = seat.replacement.as_ref().map(|(key, uuid, _)| place(key, *uuid));
            own.into_iter().chain(new).collect::<Vec<_>>()
        };
        lane.assembled.seats.iter().flat_map(of_seat).collect::<Vec<_>>()
    };
    Names {
        name: superblock.name.clone(),
        uuid: superblock.array,
        kind: superblock.volume,
        read_only: false,
        seats: (0..lanes[0].assembled.seats.len()).map(seat).collect(),
        devices: lanes.iter().flat_map(devices_of).collect(),
        earlier: arrays.memory.earlier_counts(superblock.array),
        earlier_client_errors: arrays.memory.earlier_client_errors(superblock.array),
        earlier_unchecked: arrays.memory.earlier_unchecked(superblock.array),
        damaged: HashMap::new(),
        hindrances: HashMap::new(),
        findings: HashMap::new(),
        causes: HashMap::new(),
        meters: Meters::default(),
    }
}

/// Tells the volume of a lane what an earlier run knew of it.
fn expect_earlier(arrays: &Arrays, volume: &mut PlainVolume, array: Uuid, (cut, lane): (LaneCut, LaneIndex)) {
    let [unreadable, beyond_repair] = arrays.memory.earlier_damage(array).map(|ranges| {
        // What a file says may lie beyond the volume.
        let len = |offset: VolumeOffset, len: u64| len.min(cut.volume_bytes().saturating_sub(offset.0));
        let ranges: Vec<_> = ranges.iter().map(|&(offset, bytes)| (offset, len(offset, bytes))).collect();
        cut.within(lane, &ranges)
    });
    volume.expect_damage(&beyond_repair, true);
    volume.expect_damage(&unreadable, false);
    let places = volume.status().geometry.slots.saturating_mul(u64::from(cut.count()));
    for (device, runs) in arrays.memory.earlier_lacking(array) {
        // What a file says may lie beyond the slots.
        let within = |&(first, count): &(SlotIndex, u64)| {
            let count = count.min(places.saturating_sub(first.0));
            (count > 0).then_some((first, count))
        };
        let runs = runs.iter().filter_map(within);
        let slots = runs.flat_map(|(first, count)| cut.slots_at(lane, first, count));
        volume.expect_lacking(device, &slots.collect::<Vec<_>>());
    }
    if arrays.memory.scrub_was_paused(array) {
        volume.keep_scrub_paused();
    }
}

/// Makes events of an array that has begun to be served, and of devices that it starts without.
fn tell_imported(arrays: &Arrays, report: &ArrayReport, warnings: Vec<String>, left_out: Vec<LeftOut>) {
    let level = if report.state == ArrayState::Online { NoticeLevel::Info } else { NoticeLevel::Warning };
    let scrub = report.scan.iter().find(|scan| scan.kind == ScanKind::Scrub);
    let scrub = scrub.map_or_else(String::new, |scan| {
        let words = scan.state.words().unwrap_or("goes on");
        format!("; a scrub that was under way, at {:.1} %, {words}", scan.percent)
    });
    // Only the replay of its log shows whether it can be served; another event reports it if not.
    let is_there =
        |member: &&MemberReport| matches!(member.state, MemberState::Online | MemberState::Degraded);
    let there = report.members.iter().filter(is_there).count();
    let there = format!("{there} of {}", report.members.len());
    arrays.notice(&report.name, kinds::IMPORTED, level, format!("imported, with {there} members{scrub}"));
    for warning in warnings {
        arrays.notice(&report.name, kinds::IMPORT_NOTE, NoticeLevel::Warning, warning);
    }
    for LeftOut { device, reason, .. } in left_out {
        let member = report.members.iter().find(|member| member.uuid == device);
        let text = format!("{reason}; the array starts without it");
        let news = News::new(Some(&report.name), kinds::MEMBER_LEFT_OUT, NoticeLevel::Warning, text);
        arrays.events.tell(News { member: member.map(|member| member.index), ..news });
    }
}

/// Memory for the metadata of an array, in bytes.
// Plain data: what was found to be left for an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MetadataMemory {
    /// All of it.
    pub total: u64,
    /// The setting of its page cache.
    pub page_cache: u64,
}

/// The page cache of an array without a setting of its own has at most this part of the memory that is left
/// for metadata, as a divisor: stripe maps and caches of arrays that are served later take the rest.
const CACHE_PART: u64 = 4;

/// But at least this, if the checksums of the whole array need it: as in versions that had no other default.
const CACHE_MIN: u64 = 64 << 20;

/// And at most this: nearly 700 GiB of data with 4+2. The loss of a member takes some 50 ms for as many
/// pages, during which nothing is served.
const CACHE_MAX: u64 = 4 << 30;

/// Whether an array may be served beside the others. Returns the memory for its metadata.
pub(crate) fn check_servable(
    arrays: &Arrays,
    superblock: &Superblock,
    options: ServeOptions,
) -> Result<MetadataMemory, RequestError> {
    if arrays.served.uuids().contains(&superblock.array) {
        return Err(refusal(ErrorCode::Refused, format!("array '{}' is served already", superblock.name)));
    }
    if superblock.volume != VolumeKind::Plain {
        let what = format!(
            "array '{}' is a {} volume: a newer version of calpe is needed",
            superblock.name, superblock.volume
        );
        return Err(refusal(ErrorCode::Refused, what));
    }
    memory_for(arrays, superblock, options)
}

/// The page cache of an array that has no setting for it, where so many bytes are left for metadata.
fn default_page_cache(superblock: &Superblock, left: u64) -> u64 {
    let without = footprint(superblock, 0).total();
    let part = left.saturating_sub(without) / CACHE_PART;
    let lanes = u64::from(superblock.part.lanes.count);
    Footprint::whole_cache(superblock)
        .saturating_mul(lanes)
        .min(part.clamp(CACHE_MIN, CACHE_MAX))
        .max(MIN_PAGE_CACHE)
}

/// The memory of all lanes of an array, with a page cache of so many bytes in all. Every lane has room for as
/// many stripes as the first.
fn footprint(superblock: &Superblock, page_cache: u64) -> Footprint {
    let lanes = u64::from(superblock.part.lanes.count);
    let Footprint { stripe_map, page_cache } = Footprint::of(superblock, page_cache / lanes);
    Footprint { stripe_map: stripe_map.saturating_mul(lanes), page_cache: page_cache.saturating_mul(lanes) }
}

/// Memory for the metadata of an array, if there is enough beside that of the others.
fn memory_for(
    arrays: &Arrays,
    superblock: &Superblock,
    options: ServeOptions,
) -> Result<MetadataMemory, RequestError> {
    let taken: u64 = arrays.served.list(|served| served.memory).iter().sum();
    let left = arrays.metadata_memory.saturating_sub(taken);
    let page_cache = options.page_cache.unwrap_or_else(|| default_page_cache(superblock, left));
    let needed = footprint(superblock, page_cache);
    if needed.total() <= left {
        return Ok(MetadataMemory { total: needed.total(), page_cache });
    }
    // Whether the smallest page cache would fit.
    let is_cache = footprint(superblock, MIN_PAGE_CACHE).total() <= left;
    let cache = if is_cache { ", lower the array's page_cache" } else { "" };
    let what = format!(
        "array '{}' needs {needed} of memory, and {} of {} are left: raise metadata_memory in [daemon]{cache}, or, if its size of {} is not what you expect, look at its members with 'calpe inspect'",
        superblock.name,
        SizeBeside { bytes: left, other: needed.total() },
        HumanSize(arrays.metadata_memory),
        HumanSize(superblock.volume_bytes()),
    );
    Err(refusal(ErrorCode::Refused, what))
}

/// Records that an array begins to be served, from devices at these paths, without these members (index and
/// device). Members that were missing when the array had FAILED, or when it could not be served for lack of
/// members, come back by themselves. None does where an administrator starts the array by force: that gives
/// them up.
fn begin_returns(
    arrays: &Arrays,
    (name, uuid): (&str, Uuid),
    paths: &[PathBuf],
    missing: &[(u16, Uuid)],
    is_forced: bool,
) {
    let lacked = arrays.awaited.lacked_members(name, uuid, paths);
    let before = arrays.memory.failed_without(uuid);
    arrays.returns.begin(uuid, missing, |device| !is_forced && (lacked || before.contains(&device)));
}
