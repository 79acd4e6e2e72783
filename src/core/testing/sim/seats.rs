//! The disks of a simulated array and its members, in one lane or in several; and the order in which lanes
//! take their events.

use super::super::disk::SimDisk;
use super::super::{DiskRegion, superblocks};
use super::lanes::{Turn, handle_in};
use super::{HungEnd, SimArray, new_uuid};
use crate::block_io::DeviceId;
use crate::format::{RegionKind, Role};
use crate::units::{LaneIndex, MemberIndex, VolumeOffset};
use crate::volume::{AdminRequest, LaneCut, NewDevice, ReplacementStep, RequestId, for_lane};
use std::ops::Range;

/// How far lanes run apart.
#[derive(Clone, Copy)]
pub(super) struct LanePace {
    /// While there is something else to do, a lane takes an event in one step of so many.
    pub one_in: u64,
    /// Takes nothing while others have something to take.
    laggard: Option<LaneIndex>,
    /// Fewer events than this go to the lanes beside another one before these settle; none at 0.
    pub beside: u64,
    /// Whether what it says comes late, too.
    speaks_late: bool,
}

impl LanePace {
    pub(super) fn of(seed: u64) -> LanePace {
        let laggard = (seed >> 8).is_multiple_of(2).then_some(LaneIndex((seed >> 16) as u16));
        let beside = if (seed >> 4) % 3 == 1 { 6 } else { 0 };
        let speaks_late = (seed >> 9).is_multiple_of(2);
        LanePace { one_in: [1, 2, 8][(seed % 3) as usize], laggard, beside, speaks_late }
    }
}

impl SimArray {
    /// What is taken next of what waits.
    fn next_turn(&mut self) -> Turn {
        let turns: Vec<Turn> = self.volume.waiting().collect();
        let laggard = self.pace.laggard.map(|lane| LaneIndex(lane.0 % self.volume.cut().count()));
        let is_late = |turn: &Turn| match *turn {
            Turn::Of(lane) => Some(lane) == laggard,
            Turn::ClientsHear(lane) => self.pace.speaks_late && Some(lane) == laggard,
        };
        let in_time: Vec<Turn> = turns.iter().copied().filter(|turn| !is_late(turn)).collect();
        let turns = if in_time.is_empty() { turns } else { in_time };
        turns[self.random.index(turns.len())]
    }

    /// Has a lane, or clients, take the next of what waits for them.
    pub(super) fn deliver(&mut self) {
        let turn = self.next_turn();
        let mut output = std::mem::take(&mut self.output);
        self.volume.deliver(self.now, turn, &mut output);
        self.carry_out(output);
    }

    /// Has lanes and clients take everything that waits for them.
    pub(super) fn deliver_all(&mut self) {
        while self.volume.backlog() > 0 {
            self.deliver();
        }
    }

    /// Gives an administrator's request to the array, in whose lanes nothing else waits then.
    pub(super) fn administer(&mut self, id: RequestId, request: &AdminRequest) {
        self.deliver_all();
        let requests = self.words_of_lanes(request);
        let mut output = std::mem::take(&mut self.output);
        self.volume.administer(self.now, (id, requests), &mut output);
        self.carry_out(output);
    }

    /// Tells the lanes what becomes of the device that they build for a member.
    pub fn order_replacement(&mut self, member: MemberIndex, step: &ReplacementStep) {
        self.deliver_all();
        let mut output = std::mem::take(&mut self.output);
        self.volume.order_replacement(self.now, (member, step), &mut output);
        self.carry_out(output);
    }

    /// An administrator's request in the words of each lane: a new device has a window, and a superblock, for
    /// each.
    pub(in crate::testing) fn words_of_lanes(&self, request: &AdminRequest) -> Vec<AdminRequest> {
        let device = match request {
            AdminRequest::Online { device, .. } | AdminRequest::Replace { device, .. } => Some(device),
            _ => None,
        };
        let of_lane = |lane: LaneIndex, device: &NewDevice| {
            let disk = self.disks.get(&device.device.0);
            let (bytes, superblock) = match (self.volume.cut().count(), disk) {
                (2.., Some(disk)) => {
                    let superblock = device.superblock.as_ref().and(superblocks::of_lane(disk, lane));
                    let window = disk.window(lane);
                    (window.end - window.start, superblock.map(Box::new))
                }
                _ => (device.bytes, device.superblock.clone()),
            };
            NewDevice {
                device: handle_in(lane, device.device.0),
                uuid: device.uuid,
                bytes,
                superblock,
                bad_copies: device.bad_copies.clone(),
                known_zero: device.known_zero,
            }
        };
        let request = match *request {
            AdminRequest::CancelReplace { member, device: None } => {
                AdminRequest::CancelReplace { member, device: self.volume.new_device_of(member) }
            }
            _ => request.clone(),
        };
        let lanes = (0..self.volume.cut().count()).map(LaneIndex);
        lanes.map(|lane| for_lane(&request, device.map(|device| of_lane(lane, device)))).collect()
    }

    /// The lane of a byte of the volume, where it is there, and the bytes from there on that are in that
    /// lane.
    pub(in crate::testing) fn lane_of(&self, offset: VolumeOffset) -> (LaneIndex, VolumeOffset, u64) {
        let (lane, within) = self.volume.cut().place_of(offset);
        (lane, within, self.volume.cut().run_from(offset))
    }

    /// By lane: the members that it has in service, bit by index.
    pub(in crate::testing) fn in_service(&self) -> Vec<u64> {
        let bits = |members: &Vec<(u16, u32)>| members.iter().fold(0, |bits, (member, _)| bits | 1 << member);
        self.volume.serving().iter().map(bits).collect()
    }

    /// By member: the disk of each lane that has it in service.
    #[must_use]
    pub fn serving(&self) -> Vec<Vec<u32>> {
        let mut all = vec![Vec::new(); usize::from(self.world.shape.width())];
        for (member, disk) in self.volume.serving().into_iter().flatten() {
            all[usize::from(member)].push(disk);
        }
        all
    }

    /// By member: the disk that serves it in every lane; none while they differ, or a lane is without it.
    pub(in crate::testing) fn seats(&self) -> Vec<Option<u32>> {
        let lanes = usize::from(self.cut().count());
        let seat = |disks: Vec<u32>| {
            let first = *disks.first()?;
            (disks.len() == lanes && disks.iter().all(|disk| *disk == first)).then_some(first)
        };
        self.serving().into_iter().map(seat).collect()
    }

    /// Whether a lane has yet to hear of something for which it may let go of a member: that member still
    /// looks as if nothing were wrong with it.
    pub(in crate::testing) fn has_bad_news(&self) -> bool {
        self.volume.has_bad_news()
    }

    /// How the volume is cut into lanes.
    pub(in crate::testing) fn cut(&self) -> &LaneCut {
        self.volume.cut()
    }

    /// Adds a blank disk of the members' size, for a replacement. Returns its handle.
    pub fn add_blank_disk(&mut self) -> NewDevice {
        let bytes = self.disks.values().map(|disk| disk.bytes()).min().expect("there are disks");
        let id = self.disks.keys().max().map_or(0, |last| last + 1);
        let part = self.disks.values().next().map(SimDisk::part).filter(|part| part.is_cut());
        let disk = SimDisk::new(bytes);
        self.disks.insert(id, part.map_or(disk.clone(), |part| disk.cut_into(part)));
        let uuid = new_uuid(&mut self.random);
        NewDevice { known_zero: true, ..NewDevice::new(DeviceId(id), uuid, bytes) }
    }

    /// Brings a disk back under a new handle. Its operations in flight end first.
    pub fn reopen_disk(&mut self, old: u32) -> NewDevice {
        while let Some(at) = self.queue.iter().position(|(device, ..)| device.0 == old) {
            self.execute_queued(at);
        }
        self.end_hung(old, HungEnd::Late);
        self.deliver_all();
        let mut disk = self.disks.remove(&old).expect("a disk to reopen");
        disk.dead = false;
        let superblock = superblocks::newest(&disk).map(Box::new);
        let id = self.disks.keys().max().map_or(0, |last| last + 1).max(old + 1);
        let uuid = superblock.as_ref().map_or_else(|| new_uuid(&mut self.random), |s| s.device);
        let device = NewDevice { superblock, ..NewDevice::new(DeviceId(id), uuid, disk.bytes()) };
        self.disks.insert(id, disk);
        device
    }

    /// The disk whose superblock names this member, if the array does not use it.
    #[must_use]
    pub fn disk_out_of_use(&self, member: u16) -> Option<u32> {
        let in_use = |id: u32| {
            let queued = self.queue.iter().any(|(device, ..)| device.0 == id);
            queued || self.hung(id) > 0 || self.volume.uses(id)
        };
        let superblock = |(id, disk): (&u32, &SimDisk)| Some((*id, superblocks::newest(disk)?));
        let known = self.disks.iter().filter_map(superblock);
        let candidates =
            known.filter(|(id, s)| s.member.0 == member && s.role == Role::Member && !in_use(*id));
        candidates.max_by_key(|(_, s)| (s.epoch.number, s.sequence)).map(|(id, _)| id)
    }

    /// The disk that serves a member now.
    #[must_use]
    pub fn disk_of(&self, member: u16) -> Option<u32> {
        self.status().members[usize::from(member)].device.map(|device| device.0)
    }

    /// Size of a disk.
    #[must_use]
    pub fn disk_bytes(&self, id: u32) -> u64 {
        self.disks[&id].bytes()
    }

    /// Where slots lie on every disk, in bytes: in the window of each lane.
    #[must_use]
    pub fn data_regions(&self) -> Vec<Range<u64>> {
        let disk = self.disks.values().find(|disk| superblocks::newest(disk).is_some());
        DiskRegion::Data.ranges(disk.expect("a disk with a superblock"))
    }

    /// Where slots lie on every disk, in bytes, with one lane.
    #[must_use]
    pub fn data_region(&self) -> Range<u64> {
        let superblock = self.disks.values().find_map(superblocks::newest).expect("a disk with a superblock");
        let region = superblock.data_region();
        region.offset.0..region.offset.0 + region.len
    }

    /// Where metadata pages lie on every disk, in bytes; empty without any.
    #[must_use]
    pub fn pages_region(&self) -> Range<u64> {
        let superblock = self.disks.values().find_map(superblocks::newest).expect("a disk with a superblock");
        superblock.region(RegionKind::Pages).map_or(0..0, |pages| pages.offset.0..pages.offset.0 + pages.len)
    }

    /// Where the redo log lies on every disk, in bytes; empty without one.
    #[must_use]
    pub fn log_region(&self) -> Range<u64> {
        let superblock = self.disks.values().find_map(superblocks::newest).expect("a disk with a superblock");
        superblock.region(RegionKind::Log).map_or(0..0, |log| log.offset.0..log.offset.0 + log.len)
    }
}
