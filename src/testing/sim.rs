//! An array over disks in memory. Operations queue up and are executed one by one in an order the seed decides;
//! disks can die, fail blocks, fill up and refuse; the process can be killed with operations half done.

use super::Random;
use crate::array::assembly::{AssemblyError, Candidate, assemble};
use crate::array::{ArrayConfig, NewArray, OpenDevice};
use crate::block_io::{
    Buf, Completion, DeviceId, Extent, IoFault, IoFaultKind, IoOp, IoToken, IoValue, Pool,
};
use crate::codec::Codec;
use crate::format::{
    ArrayShape, COPY_BYTES, ChecksumKind, Superblock, all_copy_offsets, geometry_for, member_bytes_for,
};
use crate::units::{Timestamp, VolumeOffset};
use crate::volume::{
    AdminError, AdminOutcome, AdminRequest, ArrayNotice, ClientError, ClientReply, ClientRequest, NewDevice,
    PlainVolume, RequestId, Volume, VolumeAction, VolumeEvent, VolumeStatus,
};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use uuid::Uuid;

/// Shape of a simulated array.
#[derive(Clone, Copy, Debug)]
pub struct SimShape {
    /// k.
    pub data: u16,
    /// m.
    pub parity: u16,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Bytes of the volume.
    pub volume_bytes: u64,
}

/// A disk in memory: sparse, with faults to order.
#[derive(Clone, Default)]
pub struct SimDisk {
    blocks: HashMap<u64, Block>,
    bytes: u64,
    /// Every operation fails as if the device were gone.
    pub dead: bool,
    /// Reads that touch these 4 KiB blocks fail until the block is written.
    pub bad_blocks: BTreeSet<u64>,
    /// Writes of data fail for lack of space; superblocks have their place already.
    pub full: bool,
    /// Zeroing is refused as unsupported.
    pub cannot_zero: bool,
    /// The next flushes fail.
    pub failing_flushes: u32,
    /// Operations executed.
    pub reads: u64,
    /// Operations executed.
    pub writes: u64,
    /// Operations executed.
    pub flushes: u64,
    /// Older contents of blocks that no flush has covered: (when it was overwritten, what it was), oldest first.
    unflushed: HashMap<u64, Vec<(u64, Option<Block>)>>,
}

type Block = Box<[u8; BLOCK as usize]>;

const BLOCK: u64 = 4096;

impl SimDisk {
    /// A disk of zeroes.
    #[must_use]
    pub fn new(bytes: u64) -> SimDisk {
        SimDisk { bytes, ..SimDisk::default() }
    }

    /// Reads without faults or counting.
    #[must_use]
    pub fn peek(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        for (at, byte) in pieces(offset, len) {
            if let Some(block) = self.blocks.get(&(byte / BLOCK)) {
                let within = (byte % BLOCK) as usize;
                out[at.clone()].copy_from_slice(&block[within..within + at.len()]);
            }
        }
        out
    }

    /// Writes without faults or counting.
    pub fn poke(&mut self, offset: u64, bytes: &[u8]) {
        for (at, byte) in pieces(offset, bytes.len()) {
            let block = self.blocks.entry(byte / BLOCK).or_insert_with(|| Box::new([0; BLOCK as usize]));
            let within = (byte % BLOCK) as usize;
            block[within..within + at.len()].copy_from_slice(&bytes[at]);
        }
    }

    fn holds_superblocks(&self, offset: u64) -> bool {
        all_copy_offsets(self.bytes).iter().any(|copy| copy.0 == offset)
    }

    /// Remembers what the blocks held, for a power cut.
    fn remember(&mut self, blocks: std::ops::Range<u64>, now: u64) {
        for block in blocks {
            let old = self.blocks.get(&block).cloned();
            self.unflushed.entry(block).or_default().push((now, old));
        }
    }

    /// The power fails: every block is as it was at some moment since the last flush.
    fn lose_power(&mut self, random: &mut Random) {
        let mut unflushed: Vec<_> = std::mem::take(&mut self.unflushed).into_iter().collect();
        unflushed.sort_by_key(|(block, _)| *block);
        let mode = random.below(4);
        for (block, mut versions) in unflushed {
            let at = match mode {
                0 => 0,
                1 => versions.len(),
                _ => random.below(versions.len() as u64 + 1) as usize,
            };
            if at < versions.len() {
                match versions.swap_remove(at).1 {
                    Some(old) => self.blocks.insert(block, old),
                    None => self.blocks.remove(&block),
                };
            }
        }
    }

    /// `now` counts operations; a flush covers what had been executed when it was submitted, at `submitted`.
    fn execute_at(&mut self, op: IoOp, now: u64, submitted: u64) -> Result<IoValue, IoFault> {
        if !self.dead {
            match &op {
                IoOp::Write { offset, buf, fua } if !self.full || self.holds_superblocks(offset.0) => {
                    let blocks = offset.0 / BLOCK..(offset.0 + buf.len() as u64).div_ceil(BLOCK);
                    if *fua {
                        blocks.for_each(|block| drop(self.unflushed.remove(&block)));
                    } else {
                        self.remember(blocks, now);
                    }
                }
                IoOp::Zero { offset, len, .. } if !self.cannot_zero => {
                    self.remember(offset.0 / BLOCK..(offset.0 + len) / BLOCK, now);
                }
                IoOp::Flush if self.failing_flushes == 0 => {
                    self.unflushed.retain(|_, versions| {
                        versions.retain(|(when, _)| *when > submitted);
                        !versions.is_empty()
                    });
                }
                _ => {}
            }
        }
        self.execute(op)
    }

    fn execute(&mut self, op: IoOp) -> Result<IoValue, IoFault> {
        if self.dead {
            return Err(fault(IoFaultKind::Gone));
        }
        match op {
            IoOp::Read { offset, mut buf } => {
                self.reads += 1;
                assert!(offset.0 + buf.len() as u64 <= self.bytes, "a read beyond the disk");
                let blocks = offset.0 / BLOCK..(offset.0 + buf.len() as u64).div_ceil(BLOCK);
                if self.bad_blocks.range(blocks).next().is_some() {
                    return Err(fault(IoFaultKind::Medium));
                }
                let bytes = self.peek(offset.0, buf.len());
                buf.copy_from_slice(&bytes);
                Ok(IoValue::Data(buf))
            }
            IoOp::Write { offset, buf, .. } => {
                self.writes += 1;
                assert!(offset.0 + buf.len() as u64 <= self.bytes, "a write beyond the disk");
                if self.full && !self.holds_superblocks(offset.0) {
                    return Err(fault(IoFaultKind::NoSpace));
                }
                for block in offset.0 / BLOCK..(offset.0 + buf.len() as u64).div_ceil(BLOCK) {
                    self.bad_blocks.remove(&block);
                }
                self.poke(offset.0, &buf);
                Ok(IoValue::Done)
            }
            IoOp::Flush if self.failing_flushes > 0 => {
                self.failing_flushes -= 1;
                Err(fault(IoFaultKind::Medium))
            }
            IoOp::Flush => {
                self.flushes += 1;
                Ok(IoValue::Done)
            }
            IoOp::Zero { .. } if self.cannot_zero => Err(fault(IoFaultKind::Unsupported)),
            IoOp::Zero { offset, len, .. } => {
                self.writes += 1;
                assert!(
                    offset.0.is_multiple_of(BLOCK)
                        && len.is_multiple_of(BLOCK)
                        && offset.0 + len <= self.bytes
                );
                for block in offset.0 / BLOCK..(offset.0 + len) / BLOCK {
                    self.blocks.remove(&block);
                    self.bad_blocks.remove(&block);
                }
                Ok(IoValue::Done)
            }
            IoOp::Extents { offset, len } => {
                let blocks = offset.0 / BLOCK..(offset.0 + len) / BLOCK;
                let extents = blocks.map(|b| Extent { len: BLOCK, hole: !self.blocks.contains_key(&b) });
                Ok(IoValue::Extents(extents.collect()))
            }
        }
    }
}

/// Cuts a byte range at block boundaries: (range in the caller's buffer, position on the disk).
fn pieces(offset: u64, len: usize) -> impl Iterator<Item = (std::ops::Range<usize>, u64)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        if at >= len {
            return None;
        }
        let byte = offset + at as u64;
        let piece = ((BLOCK - byte % BLOCK) as usize).min(len - at);
        at += piece;
        Some((at - piece..at, byte))
    })
}

fn fault(kind: IoFaultKind) -> IoFault {
    let errno = match kind {
        IoFaultKind::Medium => libc::EIO,
        IoFaultKind::Gone => libc::ENODEV,
        IoFaultKind::NoSpace => libc::ENOSPC,
        IoFaultKind::Unsupported => libc::EOPNOTSUPP,
    };
    IoFault { kind, errno }
}

/// See the head of this file.
pub struct SimArray {
    shape: SimShape,
    /// The disks; a device's handle is its key. Disks that were taken away stay until removed.
    pub disks: BTreeMap<u32, SimDisk>,
    /// Everything the array has said so far.
    pub notices: Vec<ArrayNotice>,
    /// Devices the array has released.
    pub released: BTreeSet<u32>,
    volume: PlainVolume,
    queue: Vec<(DeviceId, IoToken, IoOp, u64)>,
    /// Operations executed so far, by all disks.
    executed: u64,
    actions: Vec<VolumeAction>,
    client_done: HashMap<u64, Result<ClientReply, ClientError>>,
    admin_done: HashMap<u64, Result<AdminOutcome, AdminError>>,
    next_request: u64,
    now: Timestamp,
    pool: Pool,
    random: Random,
}

impl SimArray {
    /// Creates an array on fresh disks 0..k+m and serves it.
    ///
    /// # Panics
    /// When the shape is impossible.
    #[must_use]
    pub fn create(shape: SimShape, seed: u64) -> SimArray {
        let array_shape =
            ArrayShape { data: shape.data, parity: shape.parity, chunk: shape.chunk, sector: 512 };
        let bytes = member_bytes_for(shape.volume_bytes, array_shape).expect("a possible shape");
        let (geometry, regions) =
            geometry_for(bytes, array_shape, Some(shape.volume_bytes)).expect("a layout");
        let mut random = Random::new(seed);
        let width = shape.data + shape.parity;
        let uuids: Vec<Uuid> = (0..width).map(|_| new_uuid(&mut random)).collect();
        let new = NewArray {
            name: "sim".into(),
            uuid: new_uuid(&mut random),
            created_unix: 1,
            epoch_id: 1,
            geometry,
            regions,
            checksum: ChecksumKind::None,
            redo: None,
            members_are_zero: true,
        };
        let mut disks = BTreeMap::new();
        for (superblock, at) in new.superblocks(&uuids).iter().zip(0..) {
            let mut disk = SimDisk::new(bytes);
            for offset in all_copy_offsets(bytes) {
                disk.poke(offset.0, &superblock.encode()[..]);
            }
            disks.insert(at, disk);
        }
        let pool = Pool::new(64 << 20).expect("address space");
        Self::start(shape, disks, false, pool, random).expect("a fresh array assembles")
    }

    fn start(
        shape: SimShape,
        disks: BTreeMap<u32, SimDisk>,
        force: bool,
        pool: Pool,
        mut random: Random,
    ) -> Result<SimArray, AssemblyError> {
        let candidates: Vec<Candidate<OpenDevice>> = disks
            .iter()
            .filter(|(_, disk)| !disk.dead)
            .filter_map(|(id, disk)| {
                let key = OpenDevice { id: DeviceId(*id), bytes: disk.bytes };
                Some(Candidate { key, superblock: read_superblock(disk)? })
            })
            .collect();
        let assembled = assemble(&candidates, force)?;
        let codec = Codec::new(usize::from(shape.data), usize::from(shape.parity)).expect("a valid geometry");
        let config = ArrayConfig { seed: random.next_u64(), ..ArrayConfig::default() };
        let volume = PlainVolume::new(assembled, codec, pool.clone(), config);
        // What an earlier life left in the caches is older than everything this one does.
        let unflushed = disks.values().flat_map(|disk| disk.unflushed.values().flatten());
        let executed = unflushed.map(|(when, _)| *when).max().unwrap_or(0);
        let mut sim = SimArray {
            shape,
            disks,
            notices: Vec::new(),
            released: BTreeSet::new(),
            volume,
            queue: Vec::new(),
            executed,
            actions: Vec::new(),
            client_done: HashMap::new(),
            admin_done: HashMap::new(),
            next_request: 0,
            now: Timestamp(1),
            pool,
            random,
        };
        sim.event(VolumeEvent::Tick);
        Ok(sim)
    }

    /// Kills the process: of the operations in flight some have happened and some have not. Then starts anew.
    ///
    /// # Errors
    /// When the array cannot be assembled.
    pub fn kill_and_restart(mut self, force: bool) -> Result<SimArray, AssemblyError> {
        let mut random = self.random.clone();
        self.random.next_u64();
        self.kill_where(force, |_, _| random.one_in(2))
    }

    /// Kills the process; of the operations in flight those have happened for which `happened` says so.
    ///
    /// # Errors
    /// When the array cannot be assembled.
    pub fn kill_where(
        mut self,
        force: bool,
        mut happened: impl FnMut(u32, &IoOp) -> bool,
    ) -> Result<SimArray, AssemblyError> {
        self.crash(&mut happened);
        Self::start(self.shape, self.disks, force, self.pool, self.random)
    }

    /// The power of all disks fails: what no flush has covered is there or not, block by block. Then starts anew.
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
        Self::start(self.shape, self.disks, force, self.pool, self.random)
    }

    fn crash(&mut self, happened: &mut dyn FnMut(u32, &IoOp) -> bool) {
        for (device, _, op, submitted) in std::mem::take(&mut self.queue) {
            if happened(device.0, &op)
                && let Some(disk) = self.disks.get_mut(&device.0)
            {
                self.executed += 1;
                // What the dead process would have been told does not matter.
                let _ = disk.execute_at(op, self.executed, submitted);
            }
        }
    }

    /// The power of one disk fails: what no flush has covered is there or not.
    pub fn cut_power_of(&mut self, id: u32) {
        let mut random = self.random.clone();
        if let Some(disk) = self.disks.get_mut(&id) {
            disk.lose_power(&mut random);
        }
    }

    /// What is in flight, in the order of submission.
    pub fn queued(&self) -> impl Iterator<Item = (u32, &IoOp)> {
        self.queue.iter().map(|(device, _, op, _)| (device.0, op))
    }

    /// Executes the oldest queued operation that `wanted` accepts; false: there is none.
    pub fn step_where(&mut self, mut wanted: impl FnMut(u32, &IoOp) -> bool) -> bool {
        self.now.0 += 50_000;
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
        let now = self.executed;
        let disk = self.disks.get_mut(&device.0);
        let result = disk.map_or(Err(fault(IoFaultKind::Gone)), |disk| disk.execute_at(op, now, submitted));
        self.event(VolumeEvent::Io(Completion { token, result }));
    }

    /// Starts an administrator's request; its end comes out of [`SimArray::poll_admin`].
    pub fn submit_admin(&mut self, request: AdminRequest) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        self.event(VolumeEvent::Admin(RequestId(id), request));
        id
    }

    /// Whether the administrator's request has ended, and how.
    pub fn poll_admin(&mut self, id: u64) -> Option<Result<AdminOutcome, AdminError>> {
        self.admin_done.remove(&id)
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
        let mut buf = self.pool.alloc(bytes.len());
        buf.copy_from_slice(bytes);
        let data: Buf = buf.freeze();
        self.submit(ClientRequest::Write { offset: VolumeOffset(offset), data, fua })
    }

    /// Starts a read.
    pub fn submit_read(&mut self, offset: u64, len: usize) -> u64 {
        let buf = self.pool.alloc(len);
        self.submit(ClientRequest::Read { offset: VolumeOffset(offset), buf })
    }

    /// Writes and waits.
    ///
    /// # Errors
    /// What the client would get.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ClientError> {
        let id = self.submit_write(offset, bytes, false);
        self.wait(id).map(|_| ())
    }

    /// Reads and waits.
    ///
    /// # Errors
    /// What the client would get.
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
    /// What the client would get.
    pub fn wait(&mut self, id: u64) -> Result<ClientReply, ClientError> {
        loop {
            if let Some(result) = self.client_done.remove(&id) {
                return result;
            }
            self.progress("a client request");
        }
    }

    /// Whether the request has ended, and how.
    pub fn poll(&mut self, id: u64) -> Option<Result<ClientReply, ClientError>> {
        self.client_done.remove(&id)
    }

    /// Makes an administrator's request and waits for its end.
    ///
    /// # Errors
    /// The refusal.
    pub fn admin(&mut self, request: AdminRequest) -> Result<AdminOutcome, AdminError> {
        let id = self.next_request;
        self.next_request += 1;
        self.event(VolumeEvent::Admin(RequestId(id), request));
        loop {
            if let Some(result) = self.admin_done.remove(&id) {
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
        assert!(self.queue.is_empty(), "nothing is in flight after a stop");
        Self::start(self.shape, self.disks, force, self.pool, self.random)
    }

    /// A blank disk of the members' size, for a replacement; its handle.
    pub fn add_blank_disk(&mut self) -> NewDevice {
        let bytes = self.disks.values().map(|disk| disk.bytes).min().expect("there are disks");
        let id = self.disks.keys().max().map_or(0, |last| last + 1);
        self.disks.insert(id, SimDisk::new(bytes));
        let uuid = new_uuid(&mut self.random);
        NewDevice { device: DeviceId(id), uuid, bytes, superblock: None, known_zero: true }
    }

    /// The disk of a member that came back, under a new handle.
    pub fn reopen_disk(&mut self, old: u32) -> NewDevice {
        let mut disk = self.disks.remove(&old).expect("a disk to reopen");
        disk.dead = false;
        let superblock = read_superblock(&disk).map(Box::new);
        let id = self.disks.keys().max().map_or(0, |last| last + 1).max(old + 1);
        let uuid = superblock.as_ref().map_or_else(|| new_uuid(&mut self.random), |s| s.device);
        let device =
            NewDevice { device: DeviceId(id), uuid, bytes: disk.bytes, superblock, known_zero: false };
        self.disks.insert(id, disk);
        device
    }

    /// The disk that serves a member now.
    #[must_use]
    pub fn disk_of(&self, member: u16) -> Option<u32> {
        self.status().members[usize::from(member)].device.map(|device| device.0)
    }

    /// Size of a disk.
    #[must_use]
    pub fn disk_bytes(&self, id: u32) -> u64 {
        self.disks[&id].bytes
    }

    /// Where slots lie on every disk, in bytes.
    #[must_use]
    pub fn data_region(&self) -> std::ops::Range<u64> {
        let superblock = self.disks.values().find_map(read_superblock).expect("a disk with a superblock");
        let region = superblock.data_region();
        region.offset.0..region.offset.0 + region.len
    }

    /// Executes one queued operation, if there is one, and lets a little time pass.
    pub fn step(&mut self) -> bool {
        self.now.0 += 50_000;
        if self.queue.is_empty() {
            return false;
        }
        let at = self.random.below(self.queue.len() as u64) as usize;
        self.execute_queued(at);
        true
    }

    /// Lets `milliseconds` pass with nothing executed but ticks.
    pub fn sleep(&mut self, milliseconds: u64) {
        for _ in 0..milliseconds.div_ceil(100) {
            self.now.0 += 100_000_000;
            self.event(VolumeEvent::Tick);
        }
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
            self.status().activities.iter().all(|a| a.paused),
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

    /// The facts.
    #[must_use]
    pub fn status(&self) -> VolumeStatus {
        self.volume.status()
    }

    /// The array's random choices and the test's may come from one seed.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    fn event(&mut self, event: VolumeEvent) {
        let mut actions = std::mem::take(&mut self.actions);
        self.volume.step(self.now, event, &mut actions);
        for action in actions.drain(..) {
            match action {
                VolumeAction::Io { device, token, op } => {
                    assert!(!self.released.contains(&device.0), "I/O on a released device");
                    self.queue.push((device, token, op, self.executed));
                }
                VolumeAction::ClientDone(id, result) => {
                    assert!(self.client_done.insert(id.0, result).is_none(), "answered twice");
                }
                VolumeAction::AdminDone(id, result) => {
                    assert!(self.admin_done.insert(id.0, result).is_none(), "answered twice");
                }
                VolumeAction::Release(device) => {
                    assert!(self.released.insert(device.0), "released twice");
                    assert!(
                        self.queue.iter().all(|(d, _, _, _)| *d != device),
                        "released with I/O in flight"
                    );
                }
                VolumeAction::Notice(notice) => self.notices.push(notice),
            }
        }
        self.actions = actions;
    }
}

fn new_uuid(random: &mut Random) -> Uuid {
    Uuid::from_u64_pair(random.next_u64(), random.next_u64())
}

fn read_superblock(disk: &SimDisk) -> Option<Superblock> {
    all_copy_offsets(disk.bytes)
        .into_iter()
        .filter_map(|offset| Superblock::decode(&disk.peek(offset.0, COPY_BYTES)).ok())
        .max_by_key(|superblock| superblock.sequence)
}
