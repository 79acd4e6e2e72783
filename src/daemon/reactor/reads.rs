//! Reads that need no owner: the reactor of the connection looks up in the array's view where the blocks are
//! and what they must hash to, reads them itself, and verifies them. Whatever does not work out goes to the
//! owner of the array like any other request: no look-up, an error, bytes that do not match, a device that
//! does not answer soon.
//!
//! Where the hashes of a small read are not in memory, their page is read beside the data. Such a read goes
//! to the owner now and then, so that pages that are worth it are kept in memory (`touched.rs`).
//!
//! Small reads from memory of one parse run are verified together, because hashing many blocks side by side
//! is faster. Large ones are cut into portions, which threads without work take over.
//!
//! Invariants: a read that is taken ends once, with its bytes or with its order given back; a device is
//! counted as being read as long as the kernel or a thread may use it. Must not know connections.

use super::directory::ListedLane;
use super::job_pool::{Errand, ErrandDone};
use super::jobs::Jobs;
use super::orders::{ArrayId, LaneId, Order, ReactorId};
use super::touched::Touched;
use crate::member::{DeviceReads, Ring, SharedDevice};
use calpe_core::block_io::{BufMut, DeviceId, Pool};
use calpe_core::nbd::Command;
use calpe_core::units::{ROW_BYTES, Timestamp, VolumeOffset};
use calpe_core::volume::{PlannedPage, ReadPiece, ReadPlan, ViewReader};
use slab::Slab;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Reads of at least this many bytes are cut into portions.
const PORTION_BYTES: u64 = 128 << 10;

/// Bytes of small reads that are verified at once: two rounds of the widest registers, sixteen blocks each.
const GATHERED_BYTES_MAX: usize = 32 * ROW_BYTES as usize;

/// Reads of one device that a reactor has in the kernel at one time; further ones go to the owner, which
/// queues them.
const DEPTH_MAX: usize = 128;

/// How long a device may take, in nanoseconds, before the owner is asked, which knows other ways to the data.
const PATIENCE_NANOS: u64 = 2_000_000_000;

/// See the head of this file.
pub(super) struct Reads {
    me: ReactorId,
    pool: Pool,
    devices: HashMap<LaneId, Devices>,
    gathered: Gathered,
    portioned: Slab<Portioned>,
    portions: Slab<Portion>,
    in_kernel: DeviceReads,
    ended: VecDeque<Ended>,
    spare: Vec<ReadPlan>,
}

/// A read that has ended.
pub(super) enum Ended {
    /// With its bytes.
    Read(Order, BufMut),
    /// The owner has to be asked.
    AskOwner(Arc<ListedLane>, Order),
}

/// The devices of a lane, as of one version.
struct Devices {
    version: u64,
    /// In the order of their ids.
    all: Vec<(DeviceId, Arc<SharedDevice>)>,
    are_memory: bool,
    /// Pages that were read lately because they were not in memory.
    touched: Touched,
}

impl Devices {
    fn find(&self, id: DeviceId) -> Option<&Arc<SharedDevice>> {
        let at = self.all.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(&self.all[at].1)
    }

    /// Whether one of these pages should be kept in memory, for which the owner has to be asked.
    fn are_worth_keeping(&mut self, pages: &[PlannedPage]) -> bool {
        // All of them are noted.
        pages.iter().fold(false, |is_one, page| self.touched.again(page.number()) | is_one)
    }
}

/// Small reads of one array that were made and are to be verified together.
#[derive(Default)]
struct Gathered {
    lanes: Vec<GatheredOfLane>,
    bytes: usize,
    /// Buffers of pages, to be used again: as many as one round has needed.
    spare_pages: Vec<BufMut>,
}

/// Those of one lane.
struct GatheredOfLane {
    lane: Arc<ListedLane>,
    plan: ReadPlan,
    reads: Vec<(Order, BufMut)>,
    /// The pages of the plan.
    pages: Vec<BufMut>,
}

impl Gathered {
    /// Those of a lane; there are none of another array.
    fn of(&mut self, lane: &Arc<ListedLane>) -> &mut GatheredOfLane {
        let at = self.lanes.iter().position(|other| Arc::ptr_eq(&other.lane, lane));
        let at = at.unwrap_or_else(|| {
            let (lane, plan) = (Arc::clone(lane), ReadPlan::default());
            self.lanes.push(GatheredOfLane { lane, plan, reads: Vec::new(), pages: Vec::new() });
            self.lanes.len() - 1
        });
        &mut self.lanes[at]
    }
}

/// A read whose portions are under way.
struct Portioned {
    lane: Arc<ListedLane>,
    order: Order,
    /// The buffers of the portions that have ended well.
    parts: Vec<Option<BufMut>>,
    left: usize,
    failed: bool,
    since: Timestamp,
}

/// A portion of a read.
struct Portion {
    read: usize,
    nth: usize,
    plan: ReadPlan,
    /// The devices that are counted as being read for it; none where the kernel reads.
    files: Vec<Arc<SharedDevice>>,
    /// The buffers of its pieces that have come, then those of pages, where the kernel reads.
    pieces: Vec<Option<BufMut>>,
    left: usize,
    failed: bool,
}

impl Reads {
    pub(super) fn new(me: ReactorId, tag: u32, pool: Pool) -> Reads {
        Reads {
            me,
            pool,
            devices: HashMap::new(),
            gathered: Gathered::default(),
            portioned: Slab::new(),
            portions: Slab::new(),
            in_kernel: DeviceReads::new(tag, me.0),
            ended: VecDeque::new(),
            spare: Vec::new(),
        }
    }

    /// Whether reads are under way.
    pub(super) fn is_busy(&self) -> bool {
        !self.portioned.is_empty()
    }

    /// The next read that has ended.
    pub(super) fn next_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    /// Takes an order, if it is a read that can be made here. Gives it back otherwise.
    pub(super) fn take(
        &mut self,
        ring: &mut Ring,
        jobs: &mut Jobs,
        now: Timestamp,
        lane: &Arc<ListedLane>,
        order: Order,
    ) -> Option<Order> {
        let request = &order.request;
        let is_of_blocks = |bytes: u64| bytes.is_multiple_of(ROW_BYTES);
        let is_whole = request.length > 0 && is_of_blocks(request.offset) && is_of_blocks(request.length);
        let Some(reader) = lane.reader().filter(|_| request.command == Command::Read && is_whole) else {
            return Some(order);
        };
        self.refresh(lane);
        let are_memory = self.devices[&lane.id()].are_memory;
        if are_memory && request.length < PORTION_BYTES {
            self.gather(lane, reader, order)
        } else {
            self.begin(ring, jobs, now, lane, reader, order)
        }
    }

    /// Takes note of the present devices of a lane.
    fn refresh(&mut self, lane: &ListedLane) {
        let version = lane.devices().version();
        if self.devices.get(&lane.id()).is_some_and(|devices| devices.version == version) {
            return;
        }
        let all = lane.devices().all();
        let are_memory = all.iter().all(|(_, device)| device.is_memory());
        let touched = Touched::new(lane.reader().map_or(0, ViewReader::pages_kept_max));
        self.devices.insert(lane.id(), Devices { version, all, are_memory, touched });
    }

    /// Forgets the devices of an array that is gone.
    pub(super) fn forget(&mut self, array: ArrayId) {
        self.devices.retain(|lane, _| lane.array() != array);
        if self.gathered.bytes == 0 {
            self.gathered.lanes.clear();
        }
    }
}

/// Small reads from memory.
impl Reads {
    fn gather(&mut self, lane: &Arc<ListedLane>, reader: &ViewReader, order: Order) -> Option<Order> {
        let is_other = |of: &GatheredOfLane| of.lane.id().array() != lane.id().array();
        if self.gathered.lanes.first().is_some_and(is_other) {
            self.verify_gathered();
            self.gathered.lanes.clear();
        }
        let (offset, len) = (VolumeOffset(order.request.offset), order.request.length as usize);
        let mut spare_pages = std::mem::take(&mut self.gathered.spare_pages);
        let GatheredOfLane { plan, reads, pages, .. } = self.gathered.of(lane);
        let before = plan.extent();
        let (first, first_page) = (plan.pieces().len(), pages.len());
        if reader.plan_also(offset, len, plan).is_err() {
            self.gathered.spare_pages = spare_pages;
            return Some(order);
        }
        let mut order = order;
        let mut buf = order.payload.take().unwrap_or_else(|| self.pool.alloc(len));
        let devices = self.devices.get_mut(&lane.id()).expect("they were refreshed");
        let is_left_here = !devices.are_worth_keeping(&plan.pages()[first_page..]);
        let read = |piece: &ReadPiece, target: &mut [u8]| {
            devices.find(piece.device).is_some_and(|file| read_now(file, self.me, target, piece.offset.0))
        };
        let mut at = 0;
        let is_read = is_left_here
            && plan.pages()[first_page..].iter().map(PlannedPage::piece).all(|piece| {
                pages.push(spare_pages.pop().unwrap_or_else(|| self.pool.alloc(piece.len)));
                read(&piece, pages.last_mut().expect("one was pushed"))
            })
            && plan.pieces()[first..].iter().all(|piece| {
                let target = &mut buf[at..at + piece.len];
                at += piece.len;
                read(piece, target)
            });
        if !is_read {
            // What was gathered before is verified without.
            plan.truncate(before);
            spare_pages.extend(pages.drain(first_page..));
            self.gathered.spare_pages = spare_pages;
            return Some(order);
        }
        reads.push((order, buf));
        self.gathered.spare_pages = spare_pages;
        self.gathered.bytes += len;
        if self.gathered.bytes >= GATHERED_BYTES_MAX {
            self.verify_gathered();
        }
        None
    }

    /// Verifies what was gathered.
    pub(super) fn verify_gathered(&mut self) {
        if self.gathered.bytes == 0 {
            return;
        }
        let Gathered { lanes, bytes, spare_pages } = &mut self.gathered;
        let are_known = lanes.iter_mut().all(|GatheredOfLane { lane, plan, pages, .. }| {
            pages.is_empty() || lane.reader().expect("it has planned them").learn(plan, pages)
        });
        let plans = lanes.iter().map(|of| (of.lane.reader().expect("it has planned them"), &of.plan));
        let buffers = lanes.iter().flat_map(|of| of.reads.iter().map(|(_, buf)| &buf[..]));
        let all_are_right = are_known && ViewReader::verify_all(plans, buffers);
        for GatheredOfLane { lane, plan, reads, pages } in lanes {
            spare_pages.append(pages);
            for (order, buf) in reads.drain(..) {
                // The owner finds out which is wrong.
                self.ended.push_back(match all_are_right {
                    true => Ended::Read(order, buf),
                    false => Ended::AskOwner(Arc::clone(lane), order),
                });
            }
            plan.clear();
        }
        *bytes = 0;
    }
}

/// Large reads, and those from disks.
impl Reads {
    fn begin(
        &mut self,
        ring: &mut Ring,
        jobs: &mut Jobs,
        now: Timestamp,
        lane: &Arc<ListedLane>,
        reader: &ViewReader,
        order: Order,
    ) -> Option<Order> {
        let (offset, length) = (order.request.offset, order.request.length);
        let mut planned = Vec::new();
        let mut at = offset;
        while at < offset + length {
            let end = ((at / PORTION_BYTES + 1) * PORTION_BYTES).min(offset + length);
            let plan = self.plan(lane.id(), reader, at, (end - at) as usize);
            let Some(plan) = plan else {
                planned.into_iter().for_each(|(plan, files): (ReadPlan, Vec<_>)| self.give_up(plan, &files));
                return Some(order);
            };
            planned.push(plan);
            at = end;
        }
        let mut order = order;
        let mut buf = order.payload.take().unwrap_or_else(|| self.pool.alloc(length as usize));
        let count = planned.len();
        let read = self.portioned.insert(Portioned {
            lane: Arc::clone(lane),
            order,
            parts: (0..count).map(|_| None).collect(),
            left: count,
            failed: false,
            since: now,
        });
        let are_memory = self.devices[&lane.id()].are_memory;
        // Those that threads take first: they copy while this one does.
        let idle = if are_memory { jobs.idle_threads() } else { 0 };
        let threads = count * idle / (idle + 1);
        let mut here = Vec::new();
        for (nth, (plan, files)) in planned.into_iter().enumerate() {
            let bytes = plan.pieces().iter().map(|piece| piece.len).sum();
            let rest = buf.split_off(bytes);
            let part = std::mem::replace(&mut buf, rest);
            let left = files.len();
            let portion = Portion { read, nth, plan, files, pieces: Vec::new(), left, failed: false };
            let key = self.portions.insert(portion);
            match are_memory {
                false => self.submit(ring, key, part),
                true if nth < threads => self.send(jobs, reader, key, part),
                true => here.push((key, part)),
            }
        }
        for (key, mut part) in here {
            let Portion { plan, files, .. } = &self.portions[key];
            let is_right = read_and_verify(reader, plan, files, &mut part);
            self.portion_ended(key, is_right.then_some(part));
        }
        None
    }

    /// Plans a portion, and counts its devices as being read. None where the owner has to be asked.
    fn plan(
        &mut self,
        lane: LaneId,
        reader: &ViewReader,
        offset: u64,
        len: usize,
    ) -> Option<(ReadPlan, Vec<Arc<SharedDevice>>)> {
        let mut plan = self.spare.pop().unwrap_or_default();
        let mut files = Vec::new();
        let devices = self.devices.get_mut(&lane).expect("they were refreshed");
        let is_planned = reader.plan(VolumeOffset(offset), len, &mut plan).is_ok()
            // Threads that copy memory read no pages.
            && (plan.pages().is_empty() || !devices.are_memory && !devices.are_worth_keeping(plan.pages()));
        let begin = |id: DeviceId| {
            devices.find(id).filter(|file| !file.is_full(self.me.0, DEPTH_MAX) && file.begin(self.me.0))
        };
        let found = is_planned
            && pieces_of(&plan)
                .all(|piece| begin(piece.device).map(|file| files.push(Arc::clone(file))).is_some());
        if !found {
            self.give_up(plan, &files);
            return None;
        }
        Some((plan, files))
    }

    fn give_up(&mut self, plan: ReadPlan, files: &[Arc<SharedDevice>]) {
        files.iter().for_each(|file| file.end(self.me.0));
        self.spare.push(plan);
    }

    /// Has a thread read and verify a portion.
    fn send(&mut self, jobs: &mut Jobs, reader: &ViewReader, key: usize, mut buf: BufMut) {
        let Portion { read, plan, files, .. } = &mut self.portions[key];
        let (plan, files, reader) = (std::mem::take(plan), files.clone(), reader.clone());
        let errand: Errand = Box::new(move || {
            let is_right = read_and_verify(&reader, &plan, &files, &mut buf);
            ErrandDone { key, buf, is_right }
        });
        let array = self.portioned[*read].lane.id().array();
        if let Err(errand) = jobs.send(array, errand) {
            self.errand_ended(errand());
        }
    }

    /// Takes the result of a thread.
    pub(super) fn errand_ended(&mut self, ErrandDone { key, buf, is_right }: ErrandDone) {
        self.portion_ended(key, is_right.then_some(buf));
    }

    /// Has the kernel read a portion.
    fn submit(&mut self, ring: &mut Ring, key: usize, mut buf: BufMut) {
        let pieces: Vec<_> = pieces_of(&self.portions[key].plan).collect();
        let of_data = self.portions[key].plan.pieces().len();
        self.portions[key].pieces = pieces.iter().map(|_| None).collect();
        let files = std::mem::take(&mut self.portions[key].files);
        for (nth, (piece, file)) in pieces.into_iter().zip(files).enumerate() {
            let buf = if nth < of_data {
                let rest = buf.split_off(piece.len);
                std::mem::replace(&mut buf, rest)
            } else {
                self.pool.alloc(piece.len)
            };
            self.in_kernel.submit(ring, file, buf, piece.offset.0, (key, nth));
        }
    }

    /// Takes a completion of the ring that belongs to a read.
    pub(super) fn complete(&mut self, user_data: u64, result: i32) {
        let Some(((key, nth), buf)) = self.in_kernel.complete(user_data, result) else { return };
        let portion = &mut self.portions[key];
        portion.failed |= buf.is_none();
        portion.pieces[nth] = buf;
        portion.left -= 1;
        if portion.left > 0 {
            return;
        }
        if portion.failed {
            self.portion_ended(key, None);
            return;
        }
        let lane = &self.portioned[portion.read].lane;
        let reader = lane.reader().expect("it has planned the read");
        let mut pieces: Vec<BufMut> = std::mem::take(&mut portion.pieces).into_iter().flatten().collect();
        let mut pages = pieces.split_off(portion.plan.pieces().len());
        let is_right = reader.learn(&mut portion.plan, &mut pages)
            && reader.verify(&portion.plan, pieces.iter().map(|piece| &piece[..]));
        let whole = is_right.then(|| self.pool.join(pieces));
        self.portion_ended(key, whole);
    }

    /// A portion has ended; none: the owner has to be asked for it.
    fn portion_ended(&mut self, key: usize, buf: Option<BufMut>) {
        let Portion { read, nth, plan, files, .. } = self.portions.remove(key);
        self.give_up(plan, &files);
        let portioned = &mut self.portioned[read];
        portioned.failed |= buf.is_none();
        portioned.parts[nth] = buf;
        portioned.left -= 1;
        if portioned.left > 0 {
            return;
        }
        let Portioned { lane, order, parts, failed, .. } = self.portioned.remove(read);
        self.ended.push_back(match failed {
            true => Ended::AskOwner(lane, order),
            false => Ended::Read(order, self.pool.join(parts.into_iter().flatten())),
        });
    }

    /// Asks owners for what devices take too long for, at each tick.
    pub(super) fn lose_patience(&mut self, now: Timestamp) {
        let late = self.portioned.iter().filter(|(_, read)| now.nanos_since(read.since) > PATIENCE_NANOS);
        for read in late.map(|(read, _)| read).collect::<Vec<_>>() {
            let of_it: Vec<usize> = self
                .portions
                .iter()
                .filter(|(_, portion)| portion.read == read)
                .map(|(key, _)| key)
                .collect();
            // Threads only copy memory: what they have ends soon.
            if of_it.iter().any(|&key| !self.portions[key].files.is_empty()) {
                continue;
            }
            self.in_kernel.abandon(|key| of_it.contains(&key));
            of_it.into_iter().for_each(|key| self.spare.push(self.portions.remove(key).plan));
            let Portioned { lane, order, .. } = self.portioned.remove(read);
            self.ended.push_back(Ended::AskOwner(lane, order));
        }
    }
}

/// All that is read for a plan: the data, then pages.
fn pieces_of(plan: &ReadPlan) -> impl Iterator<Item = ReadPiece> + '_ {
    plan.pieces().iter().copied().chain(plan.pages().iter().map(PlannedPage::piece))
}

/// Reads from memory. Returns whether all bytes came.
fn read_now(file: &SharedDevice, me: ReactorId, target: &mut [u8], offset: u64) -> bool {
    if !file.begin(me.0) {
        return false;
    }
    let is_read = file.read_now(target, offset);
    file.end(me.0);
    is_read
}

/// Reads what was planned from devices in memory that are counted as being read, and verifies it.
fn read_and_verify(
    reader: &ViewReader,
    plan: &ReadPlan,
    files: &[Arc<SharedDevice>],
    buf: &mut BufMut,
) -> bool {
    let mut at = 0;
    for (piece, file) in plan.pieces().iter().zip(files) {
        if !file.read_now(&mut buf[at..at + piece.len], piece.offset.0) {
            return false;
        }
        at += piece.len;
    }
    reader.verify(plan, std::iter::once(&buf[..]))
}
