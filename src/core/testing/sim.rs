//! An array over disks in memory. Operations queue up and are executed one by one in an order that the seed
//! decides; the process can be killed with operations half done, and the power of all disks can fail. Faults
//! of a disk itself are in `disk.rs`. Deterministic: the same seed and the same calls give the same run.

mod cas;
mod front;
mod hung;
mod lanes;
mod seats;
mod shape;
mod volume;

use super::disk::{BLOCK, DiskWrite, SimDisk};
use super::faults::fault;
use super::{Fate, Random, Refused, Trouble, superblocks};
use crate::array::assembly::{Assembled, AssemblyError, Candidate, assemble};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{ArrayConfig, NewArray, OpenDevice};
use crate::block_io::{Buf, Completion, DeviceId, IoFault, IoFaultKind, IoOp, IoToken, Pool};
use crate::codec::Codec;
use crate::format::{ArrayShape, LanePart, RegionKind, geometry_for, member_bytes_for, superblock_offsets};
use crate::units::{BlockHash, LaneIndex, Timestamp, VolumeOffset};
use crate::volume::{
    AdminOutcome, AdminRefusal, AdminRequest, ArrayAction, ArrayNotice, CasVolume, ClientError, ClientReply,
    ClientRequest, Job, LaneCut, PlainVolume, RequestId, VolumeEvent, VolumeOutput, VolumeStatus, WorkDone,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use uuid::Uuid;

use hung::Hung;
pub use hung::HungEnd;
pub(super) use lanes::{SimLanes, disk_of};
use seats::LanePace;
pub use shape::SimShape;
use volume::SimVolume;

/// Parts that many runs share: the shape, memory for buffers and the codec's tables.
#[derive(Clone)]
pub struct SimWorld {
    /// The shape of every array made in it.
    pub shape: SimShape,
    pool: Pool,
    codec: Codec,
}

impl SimWorld {
    /// A world with a slab of `pool_bytes`; buffers that do not fit come from the heap.
    ///
    /// # Panics
    /// When the shape is impossible.
    #[must_use]
    pub fn new(shape: SimShape, pool_bytes: usize) -> SimWorld {
        let codec = Codec::new(usize::from(shape.data), usize::from(shape.parity)).expect("a valid geometry");
        SimWorld { shape, pool: Pool::new(pool_bytes).expect("address space"), codec }
    }

    /// Disks of a new array, before its first start.
    ///
    /// # Panics
    /// When the shape is impossible.
    #[must_use]
    pub fn new_disks(&self, random: &mut Random) -> BTreeMap<u32, SimDisk> {
        let shape = self.shape;
        let array_shape =
            ArrayShape { data: shape.data, parity: shape.parity, chunk: shape.chunk, sector: 512, lanes: 1 };
        let cut = shape.cut();
        let of_lane = |lane| member_bytes_for(cut.bytes_of(lane), array_shape).expect("a possible shape");
        let window = shape.lanes.indices().map(of_lane).max().expect("there are lanes");
        // Windows of several lanes begin at whole mebibytes.
        let window = if cut.count() > 1 { window.next_multiple_of(1 << 20) } else { window };
        let bytes = window * u64::from(cut.count());
        let part = match cut.count() {
            1 => LanePart::WHOLE,
            _ => LanePart {
                lane: LaneIndex(0),
                lanes: shape.lanes,
                stride: window,
                volume_bytes: shape.volume_bytes,
            },
        };
        let uuids: Vec<Uuid> = (0..shape.width()).map(|_| new_uuid(random)).collect();
        let (array, mut secret) = (new_uuid(random), *new_uuid(random).as_bytes());
        let mut disks: BTreeMap<u32, SimDisk> = BTreeMap::new();
        for lane in shape.lanes.indices() {
            let (mut geometry, mut regions) =
                geometry_for(window, array_shape, Some(cut.bytes_of(lane))).expect("a layout");
            for region in regions.iter_mut().filter(|region| region.kind == RegionKind::Log) {
                region.len = shape.log_bytes.unwrap_or(region.len).min(region.len);
            }
            if let Some(free) = shape.free_slots {
                geometry.slots = geometry.slots.min(geometry.stripes() + free);
            }
            if lane.0 > 0 && !is_off(Mutation::LanesShareASecret) {
                secret = *new_uuid(random).as_bytes();
            }
            let part = LanePart { lane, ..part };
            geometry.ahead = part.ahead(geometry.width());
            let new = NewArray {
                part,
                name: "sim".into(),
                uuid: array,
                created_unix: 1,
                epoch_id: 1,
                geometry,
                regions,
                checksum: shape.checksum,
                secret,
            };
            for (superblock, at) in new.superblocks(&uuids).iter().zip(0..) {
                let disk = disks.entry(at).or_insert_with(|| match part.is_cut() {
                    true => SimDisk::new(bytes).cut_into(part),
                    false => SimDisk::new(bytes),
                });
                let start = disk.window(lane).start;
                for offset in superblock_offsets(window, superblock.sequence) {
                    disk.poke(start + offset.0, &superblock.encode()[..]);
                }
            }
        }
        disks
    }

    /// Starts the array of these disks, without the dead ones.
    ///
    /// # Errors
    /// When it cannot be assembled.
    pub fn start(
        &self,
        disks: BTreeMap<u32, SimDisk>,
        force: bool,
        random: Random,
    ) -> Result<SimArray, AssemblyError> {
        SimArray::start(self.clone(), disks, force, random)
    }
}

/// The state that a crash leaves: the disks with their caches, and the operations on their way to them.
#[derive(Clone)]
pub struct Wreck {
    /// The disks.
    pub disks: BTreeMap<u32, SimDisk>,
    in_flight: Vec<(u32, DiskWrite)>,
    executed: u64,
}

impl Wreck {
    /// How many writes may be lost: those in flight and, when the power fails, those in caches.
    #[must_use]
    pub fn undecided(&self, power: bool) -> usize {
        let cached: usize = if power { self.disks.values().map(|disk| disk.cached().len()).sum() } else { 0 };
        cached + self.in_flight.len()
    }

    /// The number, as [`Wreck::settle`] counts, of the last such write of every disk.
    #[must_use]
    pub fn newest(&self, power: bool) -> BTreeSet<usize> {
        let mut number = 0;
        let mut newest = BTreeSet::new();
        for (id, disk) in &self.disks {
            let cached = if power { disk.cached().len() } else { 0 };
            let count = cached + self.in_flight.iter().filter(|(device, _)| device == id).count();
            number += count;
            newest.extend((count > 0).then(|| number - 1));
        }
        newest
    }

    /// Settles every write that may be lost, and returns the disks as the next start finds them. `fate` is
    /// called in the order of the disks, for cached writes before those in flight, with a running number and
    /// the disk.
    #[must_use]
    pub fn settle(mut self, power: bool, mut fate: impl FnMut(usize, u32) -> Fate) -> BTreeMap<u32, SimDisk> {
        let mut number = 0;
        for (id, disk) in &mut self.disks {
            let cached = if power { disk.cached().len() } else { 0 };
            let fates: Vec<Fate> = (number..number + cached).map(|at| fate(at, *id)).collect();
            number += cached;
            if power {
                disk.cut_power(|at, _| fates[at]);
            }
            for (_, write) in self.in_flight.iter().filter(|(device, _)| device == id) {
                self.executed += 1;
                disk.leave_behind(write, self.executed, fate(number, *id));
                number += 1;
            }
            if power {
                disk.write_back();
            }
        }
        self.disks
    }
}

/// See the head of this file.
// More than 15 fields: the state of one simulated host: its array, disks, queues and clock.
pub struct SimArray {
    world: SimWorld,
    /// The disks; a device's handle is its key. Disks out of use stay until removed.
    pub disks: BTreeMap<u32, SimDisk>,
    /// All notices of the array so far.
    pub notices: Vec<ArrayNotice>,
    /// How often the array has reported that acknowledged writes that were not flushed are lost.
    pub writes_lost: u64,
    /// Devices the array has released.
    pub released: BTreeSet<u32>,
    pub(super) volume: SimLanes,
    pace: LanePace,
    queue: Vec<(DeviceId, IoToken, IoOp, u64)>,
    /// Operations that do not end.
    hung: Vec<Hung>,
    /// Nanoseconds after which the array is told that the device of a hung operation is gone, as the daemon
    /// tells it.
    pub hang_limit: Option<u64>,
    /// Jobs that the volume gave away and that are not done yet.
    jobs: Vec<Job>,
    /// The lane of each of them.
    job_lanes: Vec<LaneIndex>,
    /// No job is done while this is set.
    pub holds_jobs: bool,
    /// Operations executed so far, by all disks.
    pub(super) executed: u64,
    /// Writes submitted, and writes and flushes executed.
    pub(super) changes: u64,
    output: VolumeOutput,
    client_done: HashMap<u64, Result<ClientReply, ClientError>>,
    pub(super) admin_done: HashMap<u64, Result<AdminOutcome, AdminRefusal>>,
    next_request: u64,
    pub(super) now: Timestamp,
    random: Random,
}

impl SimArray {
    /// Creates an array on fresh disks 0..k+m and serves it.
    ///
    /// # Panics
    /// When the shape is impossible.
    #[must_use]
    pub fn create(shape: SimShape, seed: u64) -> SimArray {
        // Enough for a few hundred requests; only memory that is touched costs anything.
        Self::create_in(&SimWorld::new(shape, 64 << 20), seed)
    }

    /// Creates an array on fresh disks 0..k+m and serves it.
    ///
    /// # Panics
    /// When the shape is impossible.
    #[must_use]
    pub fn create_in(world: &SimWorld, seed: u64) -> SimArray {
        let mut random = Random::new(seed);
        let disks = world.new_disks(&mut random);
        world.start(disks, false, random).expect("a fresh array assembles")
    }

    fn start(
        world: SimWorld,
        disks: BTreeMap<u32, SimDisk>,
        force: bool,
        mut random: Random,
    ) -> Result<SimArray, AssemblyError> {
        let part = disks.values().next().map_or(LanePart::WHOLE, SimDisk::part);
        let assembled: Vec<_> =
            part.lanes.indices().map(|lane| assemble_lane(&disks, lane, force)).collect::<Result<_, _>>()?;
        let (cut, data) =
            (LaneCut::of(&assembled[0].superblock), assembled[0].superblock.data_region().offset.0);
        let defaults = ArrayConfig::default();
        let seed = random.next_u64();
        let job_bytes_min = world.shape.job_bytes.unwrap_or(match seed % 8 {
            blocks @ 1..=4 => (blocks * BLOCK) as usize,
            _ => defaults.job_bytes_min,
        });
        let page_cache = world.shape.page_cache.unwrap_or(defaults.page_cache);
        let volume = |(assembled, lane): (Assembled<OpenDevice>, u64)| {
            let seed = seed.wrapping_add(lane << 32);
            let config = ArrayConfig { seed, job_bytes_min, page_cache, force, ..defaults };
            let (codec, pool) = (world.codec.clone(), world.pool.clone());
            match world.shape.cas {
                None => SimVolume::Plain(Box::new(PlainVolume::new(assembled, codec, pool, config))),
                Some(_) => {
                    let bytes = world.shape.volume_bytes;
                    SimVolume::Cas(Box::new(CasVolume::new(assembled, codec, pool, config, bytes)))
                }
            }
        };
        let volumes = assembled.into_iter().zip(0..).map(volume).collect();
        let ids: Vec<u32> = disks.keys().copied().collect();
        let volume = SimLanes::new(cut, (part, data), volumes, (world.pool.clone(), ids.into_iter()));
        // Cached writes of an earlier life are older than all operations of this one.
        let executed = disks.values().map(SimDisk::newest_cached).max().unwrap_or(0);
        let mut sim = SimArray {
            world,
            disks,
            notices: Vec::new(),
            writes_lost: 0,
            released: BTreeSet::new(),
            volume,
            pace: LanePace::of(seed),
            queue: Vec::new(),
            hung: Vec::new(),
            hang_limit: None,
            jobs: Vec::new(),
            job_lanes: Vec::new(),
            holds_jobs: false,
            executed,
            changes: 0,
            output: VolumeOutput::default(),
            client_done: HashMap::new(),
            admin_done: HashMap::new(),
            next_request: 0,
            now: Timestamp(1),
            random,
        };
        sim.event(VolumeEvent::Tick);
        Ok(sim)
    }

    /// A number that changes whenever the state that a crash would leave may have changed.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Operations in flight.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.queue.len() + self.hung.len() + self.jobs.len() + self.volume.backlog()
    }

    /// The state that a crash at this moment would leave.
    #[must_use]
    pub fn wreck(&self) -> Wreck {
        let write =
            |(device, _, op, _): &(DeviceId, IoToken, IoOp, u64)| Some((device.0, DiskWrite::of(op)?));
        let hung = self.hung.iter().filter_map(|hung| Some((hung.device.0, DiskWrite::of(&hung.op)?)));
        let in_flight = self.queue.iter().filter_map(write).chain(hung).collect();
        let mut disks = self.disks.clone();
        disks.values_mut().for_each(|disk| disk.start_clock_anew(self.now));
        Wreck { disks, in_flight, executed: self.executed }
    }

    /// Kills the process: some of the operations in flight have happened, others have not. Then starts again.
    ///
    /// # Errors
    /// When the array cannot be assembled.
    pub fn kill_and_restart(mut self, force: bool) -> Result<SimArray, AssemblyError> {
        let mut random = self.random.clone();
        self.random.next_u64();
        self.kill_where(force, |_, _| random.one_in(2))
    }

    /// Kills the process; `happened` decides for each operation in flight whether it has happened. Then
    /// starts again.
    ///
    /// # Errors
    /// When the array cannot be assembled.
    pub fn kill_where(
        mut self,
        force: bool,
        mut happened: impl FnMut(u32, &IoOp) -> bool,
    ) -> Result<SimArray, AssemblyError> {
        self.crash(&mut happened);
        Self::start(self.world, self.disks, force, self.random)
    }

    /// Cuts the power of all disks: each write that no flush has covered may be kept, lost or torn. Then
    /// starts again.
    ///
    /// # Errors
    /// When the array cannot be assembled.
    pub fn power_cut_and_restart(mut self, force: bool) -> Result<SimArray, AssemblyError> {
        let mut random = self.random.clone();
        self.random.next_u64();
        self.crash(&mut |_, _| random.one_in(2));
        for disk in self.disks.values_mut() {
            disk.lose_power(&mut random);
        }
        Self::start(self.world, self.disks, force, self.random)
    }

    fn crash(&mut self, happened: &mut dyn FnMut(u32, &IoOp) -> bool) {
        let hung = std::mem::take(&mut self.hung).into_iter();
        let hung = hung.map(|hung| (hung.device, hung.token, hung.op, hung.submitted));
        for (device, _, op, submitted) in std::mem::take(&mut self.queue).into_iter().chain(hung) {
            if happened(device.0, &op)
                && let Some(disk) = self.disks.get_mut(&device.0)
            {
                self.executed += 1;
                // The result that the dead process would have got does not matter.
                let _ = disk.execute(op, self.executed, submitted);
            }
        }
        self.disks.values_mut().for_each(|disk| disk.start_clock_anew(self.now));
    }

    /// Cuts the power of one disk: each write that no flush has covered may be kept, lost or torn.
    pub fn cut_power_of(&mut self, id: u32) {
        let mut random = self.random.clone();
        if let Some(disk) = self.disks.get_mut(&id) {
            disk.lose_power(&mut random);
        }
    }

    /// The operations in flight that do not hang, in no fixed order.
    pub fn queued(&self) -> impl Iterator<Item = (u32, &IoOp)> {
        self.queue.iter().map(|(device, _, op, _)| (device.0, op))
    }

    /// The jobs that are not done yet.
    #[must_use]
    pub fn jobs(&self) -> &[Job] {
        &self.jobs
    }

    /// Executes the oldest queued operation that `wanted` accepts; returns false when there is none.
    pub fn step_where(&mut self, mut wanted: impl FnMut(u32, &IoOp) -> bool) -> bool {
        self.now.0 += 50_000;
        self.deliver_all();
        while let Some(last) = self.jobs.len().checked_sub(1).filter(|_| !self.holds_jobs) {
            self.do_job(last);
        }
        let fitting = (0..self.queue.len()).filter(|&at| wanted(self.queue[at].0.0, &self.queue[at].2));
        match fitting.min_by_key(|&at| self.queue[at].3) {
            Some(at) => {
                self.execute_queued(at);
                true
            }
            None => false,
        }
    }

    fn execute_queued(&mut self, at: usize) {
        let (device, token, op, submitted) = self.queue.swap_remove(at);
        self.executed += 1;
        self.changes += u64::from(!matches!(op, IoOp::Read { .. } | IoOp::Extents { .. }));
        let now = (self.executed, self.now);
        let struck = self.disks.get_mut(&device.0).and_then(|disk| disk.strike(&op, now));
        match struck.map(Trouble::fault) {
            None => self.end(device, token, op, submitted),
            Some(Some(fault)) => self.event(VolumeEvent::Io(Completion { token, result: Err(fault) })),
            Some(None) => {
                self.hung.push(Hung { device, token, op, submitted, since: self.now, is_told: false });
            }
        }
    }

    /// Lets the disk execute the operation and tells the array.
    pub(super) fn end(&mut self, device: DeviceId, token: IoToken, op: IoOp, submitted: u64) {
        let now = self.executed;
        let disk = self.disks.get_mut(&device.0);
        let result = disk.map_or(Err(fault(IoFaultKind::Gone)), |disk| disk.execute(op, now, submitted));
        self.event(VolumeEvent::Io(Completion { token, result }));
    }

    /// Starts an administrator's request; [`SimArray::poll_admin`] returns its result.
    pub fn submit_admin(&mut self, request: AdminRequest) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.administer(RequestId(id), &request);
        id
    }

    /// The result of an administrator's request; None while it is under way.
    pub fn poll_admin(&mut self, id: u64) -> Option<Result<AdminOutcome, Refused>> {
        self.admin_done.remove(&id).map(|result| result.map_err(Refused::from))
    }

    /// The number that the next request will have.
    #[must_use]
    pub fn next_request(&self) -> u64 {
        self.next_request
    }

    /// Starts a client request.
    pub fn submit(&mut self, request: ClientRequest) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.event(VolumeEvent::Client(RequestId(id), request));
        id
    }

    /// Starts a write of `bytes`.
    pub fn submit_write(&mut self, offset: u64, bytes: &[u8], fua: bool) -> u64 {
        let mut buf = self.world.pool.alloc(bytes.len());
        buf.copy_from_slice(bytes);
        let data: Buf = buf.freeze();
        self.submit(ClientRequest::Write { offset: VolumeOffset(offset), data, fua })
    }

    /// Starts a read.
    pub fn submit_read(&mut self, offset: u64, len: usize) -> u64 {
        let buf = self.world.pool.alloc(len);
        self.submit(ClientRequest::Read { offset: VolumeOffset(offset), buf })
    }

    /// Starts a read whose answer may describe zeroes.
    pub fn submit_sparse_read(&mut self, offset: u64, len: usize) -> u64 {
        let buf = self.world.pool.alloc(len);
        self.submit(ClientRequest::ReadSparse { offset: VolumeOffset(offset), buf })
    }

    /// Writes and waits.
    ///
    /// # Errors
    /// With the error that the client would get.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ClientError> {
        let id = self.submit_write(offset, bytes, false);
        self.wait(id).map(|_| ())
    }

    /// Reads and waits.
    ///
    /// # Errors
    /// With the error that the client would get.
    pub fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, ClientError> {
        let id = self.submit_read(offset, len);
        match self.wait(id)? {
            ClientReply::Data(buf) => Ok(buf.to_vec()),
            other => panic!("a read was answered with {other:?}"),
        }
    }

    /// Executes until the request has ended.
    ///
    /// # Errors
    /// With the error that the client would get.
    pub fn wait(&mut self, id: u64) -> Result<ClientReply, ClientError> {
        loop {
            if let Some(result) = self.client_done.remove(&id) {
                return result;
            }
            self.progress("a client request");
        }
    }

    /// The result of a client request; None while it is under way.
    pub fn poll(&mut self, id: u64) -> Option<Result<ClientReply, ClientError>> {
        self.client_done.remove(&id)
    }

    /// Makes an administrator's request and waits for its end.
    ///
    /// # Errors
    /// With the refusal.
    pub fn admin(&mut self, request: AdminRequest) -> Result<AdminOutcome, Refused> {
        let id = self.submit_admin(request);
        loop {
            if let Some(result) = self.poll_admin(id) {
                return result;
            }
            self.progress("an administrator's request");
        }
    }

    /// Stops cleanly and starts again.
    ///
    /// # Errors
    /// When the array cannot be assembled.
    pub fn stop_and_restart(mut self, force: bool) -> Result<SimArray, AssemblyError> {
        self.admin(AdminRequest::Stop).expect("a stop succeeds");
        let queued = self.queue.iter().map(|(device, ..)| device.0);
        let mut left = queued.chain(self.hung.iter().map(|hung| hung.device.0));
        assert!(left.all(|id| self.released.contains(&id)), "nothing is awaited after a stop");
        assert!(self.jobs.is_empty(), "no work is out after a stop");
        self.crash(&mut |_, _| true);
        Self::start(self.world, self.disks, force, self.random)
    }

    /// Lets everything settle, scrubs, and asserts that the scrub finds nothing.
    ///
    /// # Panics
    /// When it finds or repairs something, or cannot be started.
    #[track_caller]
    pub fn assert_scrub_clean(&mut self) {
        self.settle();
        self.admin(AdminRequest::ScrubStart).expect("a scrub starts");
        self.settle();
        let scrub = self.status().last_scrub.expect("the scrub has ended");
        assert_eq!((scrub.errors, scrub.repaired), (0, 0), "{:?}", self.notices);
    }

    /// Executes a queued operation, if there is one, and lets a little time pass. With some seeds more of
    /// them, whose ends the array takes together.
    pub fn step(&mut self) -> bool {
        let beside = match self.pace.beside {
            0 => return self.step_alone(),
            most => self.random.below(most),
        };
        self.volume.gathers = true;
        let mut any = false;
        for _ in 0..=beside {
            any |= self.step_alone();
        }
        self.volume.gathers = false;
        let mut output = std::mem::take(&mut self.output);
        self.volume.settle(self.now, &mut output);
        self.carry_out(output);
        any
    }

    fn step_alone(&mut self) -> bool {
        self.now.0 += 50_000;
        let can_wait = !self.queue.is_empty() || !self.jobs.is_empty();
        if self.volume.backlog() > 0 && (!can_wait || self.random.one_in(self.pace.one_in)) {
            self.deliver();
            return true;
        }
        let idle = self.holds_jobs || self.jobs.is_empty();
        if !idle && (self.queue.is_empty() || self.random.one_in(2)) {
            let at = self.random.below(self.jobs.len() as u64) as usize;
            self.do_job(at);
            return true;
        }
        if self.queue.is_empty() {
            return false;
        }
        let mut at = self.random.below(self.queue.len() as u64) as usize;
        if self.is_slow(at)
            && let Some(other) = (0..self.queue.len()).find(|&other| !self.is_slow(other))
        {
            at = other;
        }
        self.execute_queued(at);
        true
    }

    fn do_job(&mut self, at: usize) {
        let lane = self.job_lanes.swap_remove(at);
        let mut job = self.jobs.swap_remove(at).run();
        if self.executed.is_multiple_of(3) {
            // As after the failure of a device that keeps the buffers it could still write to.
            let WorkDone::Code(columns) = &mut job.done;
            for output in &mut columns.outputs {
                let mut other = self.world.pool.alloc(output.len());
                other.copy_from_slice(output);
                *output = other;
            }
        }
        let mut output = std::mem::take(&mut self.output);
        self.volume.worked(self.now, (lane, job), &mut output);
        self.carry_out(output);
    }

    fn is_slow(&self, at: usize) -> bool {
        let (device, _, op, _) = &self.queue[at];
        let is_flush = matches!(op, IoOp::Flush);
        self.disks.get(&device.0).is_some_and(|disk| disk.slow || (disk.slow_flushes && is_flush))
    }

    /// Tells the array that the operations of a disk do not end.
    pub fn device_hangs(&mut self, id: u32) {
        let fault = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };
        self.event(VolumeEvent::DeviceGone(DeviceId(id), fault));
    }

    /// Lets `milliseconds` pass, executing nothing but ticks.
    pub fn sleep(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds.div_ceil(100) {
            self.deliver_all();
            self.now.0 += 100_000_000;
            self.event(VolumeEvent::Tick);
            self.tell_of_hung();
            self.deliver_all();
        }
    }

    /// The array's clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.now
    }

    /// Executes everything, background passes included, until nothing is left to do.
    pub fn settle(&mut self) {
        let mut quiet = 0;
        while quiet < 40 {
            if self.step() {
                quiet = 0;
            } else {
                quiet += 1;
                self.sleep(100);
            }
        }
        assert!(
            self.status().activities.iter().all(|a| a.rest.is_some()),
            "a pass hangs: {:?}",
            self.status().activities
        );
    }

    fn progress(&mut self, what: &str) {
        let mut idle = 0;
        while !self.step() {
            self.sleep(100);
            idle += 1;
            assert!(idle < 300, "{what} hangs with nothing in flight: {:?}", self.status());
            if !self.client_done.is_empty() || !self.admin_done.is_empty() {
                return;
            }
        }
    }

    /// The volume of kind cas.
    #[cfg(test)]
    pub(crate) fn cas(&mut self) -> &mut CasVolume {
        self.volume.cas()
    }

    /// The status of the volume.
    #[must_use]
    pub fn status(&self) -> VolumeStatus {
        self.volume.status()
    }

    /// For reads of the first lane on other threads than the array's.
    pub(super) fn view_reader(&self) -> crate::volume::ViewReader {
        self.volume.view_reader(LaneIndex(0)).expect("a plain volume has one")
    }

    /// Tells the array of bytes of the volume that an earlier run could not read.
    pub fn expect_damage(&mut self, ranges: &[(VolumeOffset, u64)], is_beyond_repair: bool) {
        self.volume.expect_damage(ranges, is_beyond_repair);
    }

    /// When a tick is due at the latest.
    #[must_use]
    pub fn due(&self) -> Option<Timestamp> {
        self.volume.due()
    }

    /// The hash of a block of the volume according to the array's cached pages; None when its page is not
    /// cached.
    pub(super) fn cached_hash(&self, block: usize) -> Option<BlockHash> {
        self.volume.cached_hash(VolumeOffset(block as u64 * BLOCK))
    }

    /// The simulator's generator, so that a test's random choices can come from the same seed.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    pub(super) fn event(&mut self, event: VolumeEvent) {
        let mut output = std::mem::take(&mut self.output);
        self.volume.step(self.now, event, &mut output);
        self.carry_out(output);
    }

    /// Passes on replies, and carries out actions.
    fn carry_out(&mut self, mut output: VolumeOutput) {
        for (id, result) in output.replies.drain(..) {
            assert!(self.client_done.insert(id.0, result).is_none(), "answered twice");
        }
        for action in output.actions.drain(..) {
            match action {
                ArrayAction::Io { device, token, op, .. } => {
                    assert!(!self.released.contains(&device.0), "I/O on a released device");
                    self.changes += u64::from(matches!(op, IoOp::Write { .. } | IoOp::Zero { .. }));
                    self.queue.push((device, token, op, self.executed));
                }
                ArrayAction::Work(job) => {
                    self.jobs.push(job);
                    self.job_lanes.extend(self.volume.worked_for.pop_front());
                }
                ArrayAction::AdminDone(id, result) => {
                    assert!(self.admin_done.insert(id.0, result).is_none(), "answered twice");
                }
                ArrayAction::Release(device) => {
                    // Operations in flight on it may end later, or never.
                    assert!(self.released.insert(device.0), "released twice");
                }
                ArrayAction::Notice(notice) => self.notices.push(notice),
                ArrayAction::WritesLost => self.writes_lost += 1,
            }
        }
        self.output = output;
    }
}

/// Assembles one lane of the disks that are not dead.
fn assemble_lane(
    disks: &BTreeMap<u32, SimDisk>,
    lane: LaneIndex,
    force: bool,
) -> Result<Assembled<OpenDevice>, AssemblyError> {
    let candidates: Vec<Candidate<OpenDevice>> = disks
        .iter()
        .filter(|(_, disk)| !disk.dead)
        .filter_map(|(id, disk)| {
            let window = disk.window(lane);
            let key = OpenDevice { id: lanes::handle_in(lane, *id), bytes: window.end - window.start };
            Some(Candidate { key, superblock: superblocks::of_lane(disk, lane)? })
        })
        .collect();
    assemble(&candidates, force)
}

fn new_uuid(random: &mut Random) -> Uuid {
    Uuid::from_u64_pair(random.next_u64(), random.next_u64())
}
