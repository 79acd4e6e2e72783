//! Executes [`IoOp`]s on open devices: through a shared io_uring; in the calling thread where that
//! is faster; or through a ring beside it ([`super::aside`]) where starting an operation may block.
//!
//! Invariants: the buffers of an operation are owned by its entry in `flights` from submission to completion,
//! whatever becomes of the array that submitted it, and are leaked rather than freed if the engine is dropped
//! before; a device is closed only when nothing is in flight on it; every submitted operation completes
//! exactly once. Short transfers are continued, interrupted ones repeated. Must not know arrays or clients.
//!
//! Why memory-backed files mostly bypass io_uring: tmpfs cannot do non-blocking buffered I/O, so io_uring
//! hands each request to a worker thread: 4 KiB reads one at a time took 64 us that way and 0.9 us as a plain
//! pread, and 4 KiB writes 32 deep 1.4 us against 1.05 us (Linux 6.18, 2 cores). Transfers that would wait
//! behind other large ones do go to workers, so that copying keeps a second core busy: 1 MiB reads 8 deep
//! through a 4+2 array went from 2.7 to 3.6 GB/s, writes from 1.8 to 2.4 (best of ten runs of one second).
//! Registering the files beside the buffers made no difference above the noise (0.70 against 0.69 us for a 4
//! KiB read), so it is not done.
#![allow(unsafe_code)] // memory handed to the kernel; each block argues for itself

use super::aside::Aside;
use super::attached::{Attached, Look};
use super::copying::Copying;
use super::error::fault_kind;
use super::flight::Flight;
use super::inbox::Inbox;
use super::ready::{MemberCompletion, Ready, ReadyQueue};
use super::registered::{Registration, fixed_index, register};
use super::shared::SharedDevice;
use super::system_call::{TRANSFER_MAX, system_call, zero_mode};
use super::{Device, DeviceKind, Ring};
use calpe_core::block_io::{
    Completion, DeviceId, Extent, IoFault, IoFaultKind, IoOp, IoToken, IoValue, Pool,
};
use calpe_core::units::{Timestamp, shown};
use io_uring::{opcode, squeue, types};
use slab::Slab;
use std::collections::VecDeque;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

/// How often an operation that the kernel could not start (EAGAIN, EINTR) is repeated at once. The
/// array waits out a shortage that lasts longer.
const RETRIES_MAX: u16 = 16;

/// Bytes of which a short transfer tells truly how many it moved. Nothing of a longer one counts when it is
/// short, and it is done again in such pieces: Linux 6.18 goes on after an error in the middle of direct I/O
/// on FUSE with the next page at the place of the one that failed, and reports the sum as a short count.
const SURE_BYTES: usize = 4096;

/// Longest range zeroed on the calling thread on a memory-backed file; freeing more pages takes too long.
const INLINE_ZERO_MAX: u64 = 4 << 20;

/// Longest time counted between two turns of the caller's loop, in nanoseconds.
const TURN_NANOS_MAX: u64 = 1_000_000_000;

/// Reserved flight key for the inbox poll.
const INBOX_KEY: usize = u32::MAX as usize;

/// Bit of the keys that check the path of a device; the other bits are the device's number.
const LOOK_BIT: usize = 1 << 31;

/// Result of operations on a device that was released.
const GONE: IoFault = IoFault { kind: IoFaultKind::Gone, errno: libc::EBADF };

/// Fault of a device whose operations do not end.
const HANGS: IoFault = IoFault { kind: IoFaultKind::Gone, errno: libc::ETIMEDOUT };

/// The executor of one thread's member I/O.
#[derive(Debug)]
pub(crate) struct MemberIo {
    tag: u64,
    pool: Pool,
    /// How many threads may read its devices.
    readers: usize,
    registration: Registration,
    devices: Vec<Option<Attached>>,
    flights: Slab<Flight>,
    ready: ReadyQueue,
    copying: Copying,
    /// Where threads put outcomes: those of remote devices, and of the rings beside the engine's.
    inbox: Option<Arc<Inbox>>,
    /// Operations that the threads of remote devices hold.
    remote_in_flight: usize,
    /// Operations in flight on devices that were not released.
    awaited: usize,
    /// Nanoseconds counted over all turns of the caller's loop.
    clock: u64,
    last_turn: Option<Timestamp>,
    /// Devices found to be gone that were not reported yet.
    gone: Vec<(u32, DeviceId, IoFault)>,
    /// Released devices that other threads still read.
    closing: Vec<DeviceId>,
}

/// Operations of an owner that have not ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stragglers {
    /// Devices that have had operations in flight, and ended none, for at least the time asked about.
    pub busy: Vec<DeviceId>,
    /// Devices without operations in flight.
    pub idle: Vec<DeviceId>,
    /// Time since an operation on any of these devices ended, other than for want of room or memory: what is
    /// tried again and fails is no progress.
    pub silence: Duration,
}

impl MemberIo {
    /// An executor whose ring entries carry `tag`, which occupies the upper 32 bits of their `user_data`.
    /// `readers`: threads that may read its devices beside it.
    #[must_use]
    pub(crate) fn new(tag: u32, pool: &Pool, readers: usize) -> MemberIo {
        MemberIo {
            readers,
            tag: u64::from(tag) << 32,
            pool: pool.clone(),
            registration: Registration::Pending,
            devices: Vec::new(),
            flights: Slab::new(),
            ready: ReadyQueue::default(),
            copying: Copying::new(),
            inbox: None,
            remote_in_flight: 0,
            awaited: 0,
            clock: 0,
            last_turn: None,
            gone: Vec::new(),
            closing: Vec::new(),
        }
    }

    /// Has workers copy large transfers of memory-backed files from now on, or does not.
    pub(crate) fn copy_elsewhere(&mut self, is_room: bool) {
        self.copying.use_workers(is_room);
    }

    /// Whether workers are copying.
    pub(crate) fn is_copied_elsewhere(&self) -> bool {
        self.copying.has_offloaded()
    }

    /// Prepares for remote devices while descriptors are available.
    ///
    /// # Errors
    /// When the system is out of descriptors.
    pub(crate) fn open_inbox(&mut self, ring: &mut Ring) -> io::Result<()> {
        self.inbox(ring).map(|_| ())
    }

    /// Takes over an open device under a new id. Panics when the id was used before, which is a
    /// mistake of the caller.
    pub(crate) fn add(&mut self, ring: &mut Ring, id: DeviceId, owner: u32, mut device: Device) {
        if let Some(remote) = device.remote() {
            match self.inbox(ring) {
                Ok(inbox) => remote.attach(&inbox),
                // Without an inbox, its operations would end unnoticed.
                Err(error) => panic!("no descriptor for the outcomes of remote members: {error}"),
            }
        }
        let aside = if device.holds_up() { self.start_aside(ring, &mut device) } else { None };
        let is_shared = device.facts().kind != DeviceKind::Remote && aside.is_none();
        if is_shared && !device.facts().memory && self.registration == Registration::Pending {
            self.registration = register(ring, &self.pool);
        }
        let index = id.0 as usize;
        if self.devices.len() <= index {
            self.devices.resize_with(index + 1, || None);
        }
        assert!(self.devices[index].is_none(), "device id {} given out twice", id.0);
        let readers = self.readers;
        let memory = device.facts().memory;
        let share = || Arc::new(SharedDevice::new(device.raw_fd(), device.start(), memory, readers));
        let shared = (is_shared && !device.holds_up()).then(share);
        self.devices[index] = Some(Attached {
            device,
            aside,
            shared,
            owner,
            in_flight: 0,
            depth: 0,
            waiting: VecDeque::new(),
            released: false,
            reported_gone: false,
            busy_since: self.clock,
            last_end: self.clock,
            look: None,
        });
        let workers = self.devices.iter().flatten().map(Attached::workers);
        ring.allow_workers(workers.fold(0, u32::saturating_add));
    }

    /// Starts the ring of a device whose operations may block their caller. If that fails, workers
    /// of the shared ring wait for the device; this thread does not, either way.
    fn start_aside(&mut self, ring: &mut Ring, device: &mut Device) -> Option<Aside> {
        let file = device.file().ok()?.as_fd();
        let started = self.inbox(ring).and_then(|inbox| Aside::start(&inbox, file, device.held()));
        let path = shown(device.path());
        let told = |error: &io::Error| tracing::warn!(%path, %error, "no ring of its own for this file");
        let aside = started.inspect_err(told).ok()?;
        device.hand_over();
        Some(aside)
    }

    /// The device behind an id, if it is open.
    #[must_use]
    pub(crate) fn device(&self, id: DeviceId) -> Option<&Device> {
        self.devices.get(id.0 as usize)?.as_ref().map(|attached| &attached.device)
    }

    /// Whether an owner has this local device already, in service or with operations that have not ended.
    pub(crate) fn has(&self, owner: u32, device: &Device) -> bool {
        self.devices.iter().flatten().any(|attached| attached.is_window_of(device, owner))
    }

    /// What other threads may read a device through; none where only this engine can, or it is not open.
    #[must_use]
    pub(crate) fn shared(&self, id: DeviceId) -> Option<Arc<SharedDevice>> {
        self.devices.get(id.0 as usize)?.as_ref()?.shared.clone()
    }

    /// Closes a device as soon as nothing is in flight on it. Operations that the kernel does not
    /// have yet end at once.
    pub(crate) fn release(&mut self, id: DeviceId) {
        let Some(attached) = self.attached(id) else { return };
        if std::mem::replace(&mut attached.released, true) {
            return;
        }
        let in_flight = attached.in_flight as usize;
        let is_read = attached.shared.as_ref().is_some_and(|shared| {
            shared.release();
            !shared.is_unused()
        });
        let waiting = std::mem::take(&mut attached.waiting);
        match attached.device.remote() {
            Some(remote) => remote.release(),
            None if in_flight > 0 || is_read => attached.device.leave(),
            None => {}
        }
        if is_read {
            self.closing.push(id);
        }
        self.awaited -= in_flight;
        for key in waiting {
            self.finish(key, Err(GONE));
        }
        self.close_if_idle(id);
    }

    /// Releases all devices of an owner.
    pub(crate) fn release_owner(&mut self, owner: u32) {
        for index in 0..self.devices.len() {
            if self.devices[index].as_ref().is_some_and(|attached| attached.owner == owner) {
                self.release(DeviceId(index as u32));
            }
        }
        self.ready.release(owner);
    }

    /// Starts an operation; its outcome comes out of [`MemberIo::next_finished`].
    pub(crate) fn submit(&mut self, ring: &mut Ring, owner: u32, device: DeviceId, token: IoToken, op: IoOp) {
        self.take(ring, (owner, device, token, op), false);
    }

    /// The same for an operation that nobody waits for at present: where the calling thread runs it, others
    /// of its owner come before it, one each.
    pub(crate) fn submit_later(
        &mut self,
        ring: &mut Ring,
        owner: u32,
        device: DeviceId,
        token: IoToken,
        op: IoOp,
    ) {
        self.take(ring, (owner, device, token, op), true);
    }

    fn take(
        &mut self,
        ring: &mut Ring,
        (owner, device, token, op): (u32, DeviceId, IoToken, IoOp),
        may_wait: bool,
    ) {
        let clock = self.clock;
        let Some(attached) = self.attached(device).filter(|attached| !attached.released) else {
            let completion = Completion { token, result: Err(GONE) };
            self.ready.finished(MemberCompletion { owner, device, completion });
            return;
        };
        let op = attached.device.place(op);
        if attached.in_flight == 0 {
            attached.busy_since = clock;
        }
        attached.in_flight += 1;
        if let Some(remote) = attached.device.remote() {
            remote.submit(owner, device, token, op);
            self.awaited += 1;
            self.remote_in_flight += 1;
            return;
        }
        let memory = attached.device.facts().memory;
        self.awaited += 1;
        let key = self.flights.insert(Flight {
            owner,
            device,
            token,
            op,
            done: 0,
            most: TRANSFER_MAX,
            retries: 0,
            offloaded: false,
            may_wait,
            since: None,
        });
        match &self.flights[key].op {
            IoOp::Extents { offset, len } => {
                let (offset, len) = (offset.0, *len);
                // Only memory answers at once; elsewhere the range counts as all data, which is allowed, too.
                let asked = self.device(device).filter(|_| memory).map(|d| d.placed_extents(offset, len));
                self.finish(key, Ok(Some(asked.unwrap_or_else(|| vec![Extent { len, hole: false }]))));
            }
            IoOp::Zero { len, .. } if memory && *len > INLINE_ZERO_MAX => self.push(ring, key),
            _ if memory => self.start_in_memory(ring, key),
            _ => self.start(ring, key),
        }
    }

    /// Takes a completion of the ring whose `user_data` carries this engine's tag.
    pub(crate) fn complete(&mut self, ring: &mut Ring, user_data: u64, result: i32) {
        let key = (user_data & u64::from(u32::MAX)) as usize;
        debug_assert_eq!(user_data & !u64::from(u32::MAX), self.tag, "a completion of somebody else");
        if key == INBOX_KEY {
            self.await_inbox(ring);
            let ended = self.inbox.as_ref().map(|inbox| inbox.take_ended()).unwrap_or_default();
            ended.into_iter().for_each(|(user_data, result)| self.complete(ring, user_data, result));
            return;
        }
        if key & LOOK_BIT != 0 {
            self.looked(DeviceId((key & !LOOK_BIT) as u32), result);
            return;
        }
        let device = self.flights[key].device;
        match self.advance(key, result) {
            Progress::Again => self.push(ring, key),
            Progress::Finished(done) => {
                self.ready.finished(done);
                self.start_waiting(ring, device);
            }
        }
    }

    /// The next finished operation, of each owner in turn. Operations on memory-backed files are
    /// run here, one per call, so that the caller can act on each outcome before the next operation
    /// takes its time.
    pub(crate) fn next_finished(&mut self) -> Option<MemberCompletion> {
        if self.ready.is_empty() {
            self.take_returned();
        }
        match self.ready.pop()? {
            Ready::Finished(done) => Some(done),
            Ready::Inline(key) => {
                self.copying.ran_inline(self.flights[key].bytes());
                Some(self.execute_inline(key))
            }
        }
    }

    /// Whether [`MemberIo::next_finished`] has something.
    #[must_use]
    pub(crate) fn has_finished(&self) -> bool {
        !self.ready.is_empty() || self.has_returned()
    }

    /// Operations submitted and not finished, except those on released devices.
    #[must_use]
    pub(crate) fn in_flight(&self) -> usize {
        self.awaited
    }

    /// Advances the clock. To be called at each turn of the caller's loop, after it has taken
    /// completions.
    pub(crate) fn pass_time(&mut self, now: Timestamp) {
        let passed = self.last_turn.replace(now).map_or(0, |last| now.nanos_since(last));
        self.clock += passed.min(TURN_NANOS_MAX);
        self.take_returned();
        self.close_unread();
    }

    /// Whether released devices of an owner, or of anybody, stay open because other threads read them.
    #[must_use]
    pub(crate) fn is_closing(&self, owner: Option<u32>) -> bool {
        let devices = self.closing.iter().filter_map(|id| self.devices[id.0 as usize].as_ref());
        devices.into_iter().any(|attached| owner.is_none_or(|owner| attached.owner == owner))
    }

    /// Closes released devices that nobody reads any more.
    fn close_unread(&mut self) {
        if self.closing.is_empty() {
            return;
        }
        let devices = &self.devices;
        let is_read = |id: &DeviceId| devices[id.0 as usize].as_ref().is_some_and(Attached::is_read);
        let (closing, unread) = std::mem::take(&mut self.closing).into_iter().partition(is_read);
        self.closing = closing;
        let unread: Vec<DeviceId> = unread;
        unread.into_iter().for_each(|id| self.close_if_idle(id));
    }

    /// Starts to check whether files are still at their paths; [`MemberIo::vanished`] reports the
    /// result.
    pub(crate) fn look_after_files(&mut self, ring: &mut Ring) {
        for (index, attached) in self.devices.iter_mut().enumerate() {
            let Some(attached) = attached.as_mut().filter(|a| a.is_in_service() && a.look.is_none()) else {
                continue;
            };
            let Some(path) = attached.device.path_to_watch() else { continue };
            let look = attached.look.insert(Box::new(Look { path, stat: MaybeUninit::uninit() }));
            let cwd = types::Fd(libc::AT_FDCWD);
            let entry = opcode::Statx::new(cwd, look.path.as_ptr(), look.stat.as_mut_ptr().cast())
                .mask(libc::STATX_BASIC_STATS)
                .build();
            let entry = entry.user_data(self.tag | (LOOK_BIT | index) as u64);
            // SAFETY: path and answer belong to the boxed look, which stays where it is until the
            // completion was taken, and is leaked by `drop` otherwise.
            unsafe {
                match &attached.aside {
                    Some(aside) => aside.push(entry),
                    None => ring.push(entry),
                }
            }
        }
    }

    fn looked(&mut self, id: DeviceId, result: i32) {
        let attached = self.attached(id).expect("open while it is looked at");
        let look = attached.look.take().expect("one look at a time");
        // SAFETY: the kernel says that it has filled it in.
        let stat = if result < 0 { Err(-result) } else { Ok(unsafe { look.stat.assume_init_ref() }) };
        if attached.is_in_service()
            && let Some(errno) = attached.device.has_vanished(stat)
        {
            attached.reported_gone = true;
            let owner = attached.owner;
            self.gone.push((owner, id, IoFault { kind: IoFaultKind::Gone, errno }));
        }
        self.close_if_idle(id);
    }

    /// Files that were deleted, moved away or replaced, remote devices that were given up, and
    /// local ones with operations that do not end, since the last call, with their owners. Each is
    /// reported once.
    pub(crate) fn vanished(&mut self) -> Vec<(u32, DeviceId, IoFault)> {
        let mut gone = std::mem::take(&mut self.gone);
        for (index, slot) in self.devices.iter_mut().enumerate() {
            if let Some(attached) = slot
                && attached.is_in_service()
                && let Some(fault) = attached.device.given_up()
            {
                attached.reported_gone = true;
                gone.push((attached.owner, DeviceId(index as u32), fault));
            }
        }
        for (_, flight) in &self.flights {
            let Some(since) = flight.since else { continue };
            let attached = self.devices[flight.device.0 as usize].as_mut().expect("open while in flight");
            let limit = attached.device.time_limit().as_nanos() as u64;
            if attached.is_in_service() && self.clock - since > limit {
                attached.reported_gone = true;
                let path = shown(attached.device.path());
                tracing::warn!(%path, "an operation has not ended within {} s", limit / 1_000_000_000);
                gone.push((flight.owner, flight.device, HANGS));
            }
        }
        gone
    }

    /// Which devices of an owner that were not released have had operations in flight for `least`.
    #[must_use]
    pub(crate) fn stragglers(&self, owner: u32, least: Duration) -> Stragglers {
        let attached = self.devices.iter().enumerate();
        let attached = attached.filter_map(|(index, slot)| Some((DeviceId(index as u32), slot.as_ref()?)));
        let all: Vec<_> = attached.filter(|(_, a)| a.owner == owner && !a.released).collect();
        let last_end = all.iter().map(|(_, a)| a.last_end).max().unwrap_or(0);
        let least = least.as_nanos() as u64;
        // What is tried again from time to time is not in flight for long.
        let held_up = all.iter().filter(|(_, a)| a.in_flight > 0 && self.clock - a.busy_since >= least);
        Stragglers {
            busy: held_up.map(|&(id, _)| id).collect(),
            idle: all.iter().filter(|(_, a)| a.in_flight == 0).map(|&(id, _)| id).collect(),
            silence: Duration::from_nanos(self.clock - last_end),
        }
    }

    /// The inbox where threads put outcomes; the ring reports when something comes in.
    fn inbox(&mut self, ring: &mut Ring) -> io::Result<Arc<Inbox>> {
        if let Some(inbox) = &self.inbox {
            return Ok(Arc::clone(inbox));
        }
        let inbox = Arc::new(Inbox::new()?);
        self.inbox = Some(Arc::clone(&inbox));
        self.await_inbox(ring);
        Ok(inbox)
    }

    /// Asks the ring to report when something comes into the inbox.
    fn await_inbox(&mut self, ring: &mut Ring) {
        let Some(inbox) = &self.inbox else { return };
        // The counter was raised for outcomes that `next_finished` finds; an error means that there
        // was nothing to read.
        let _ = inbox.wake.read();
        let fd = types::Fd(inbox.wake.as_fd().as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
        // SAFETY: no memory involved; the kernel holds the file of the descriptor from here on.
        unsafe { ring.push(entry.user_data(self.tag | INBOX_KEY as u64)) }
    }

    /// Whether remote devices have returned outcomes without a wake-up: only the first of several
    /// raises the counter.
    fn has_returned(&self) -> bool {
        self.remote_in_flight > 0 && self.inbox.as_ref().is_some_and(|inbox| !inbox.is_empty())
    }

    fn take_returned(&mut self) {
        if self.remote_in_flight == 0 {
            return;
        }
        let returned = self.inbox.as_ref().map(|inbox| inbox.take()).unwrap_or_default();
        self.remote_in_flight -= returned.len();
        for (owner, device, token, result) in returned {
            self.note_end(device, result.as_ref().err());
            let completion = Completion { token, result };
            self.ready.finished(MemberCompletion { owner, device, completion });
            self.close_if_idle(device);
        }
    }

    /// Counts an operation on a device as ended, with an error or without.
    fn note_end(&mut self, id: DeviceId, fault: Option<&IoFault>) {
        let clock = self.clock;
        let attached = self.attached(id).expect("open while in flight");
        attached.in_flight -= 1;
        attached.busy_since = clock;
        if !fault.is_some_and(|fault| fault.kind.passes()) {
            attached.last_end = clock;
        }
        self.awaited -= usize::from(!attached.released);
    }

    fn attached(&mut self, id: DeviceId) -> Option<&mut Attached> {
        self.devices.get_mut(id.0 as usize)?.as_mut()
    }

    fn close_if_idle(&mut self, id: DeviceId) {
        if let Some(slot) = self.devices.get_mut(id.0 as usize)
            && slot
                .as_ref()
                .is_some_and(|a| a.released && a.in_flight == 0 && a.look.is_none() && !a.is_read())
        {
            *slot = None;
        }
    }

    /// Has a worker copy a transfer, or lets it wait for this thread.
    fn start_in_memory(&mut self, ring: &mut Ring, key: usize) {
        if self.copying.offloads(self.flights[key].bytes()) {
            self.flights[key].offloaded = true;
            self.push(ring, key);
        } else {
            let (owner, may_wait) = (self.flights[key].owner, self.flights[key].may_wait);
            match may_wait {
                true => self.ready.push_later(owner, key),
                false => self.ready.push(owner, Ready::Inline(key)),
            }
        }
    }

    /// Hands an operation to the kernel, or lets it wait until the kernel has fewer operations of
    /// this device.
    fn start(&mut self, ring: &mut Ring, key: usize) {
        let attached =
            self.devices[self.flights[key].device.0 as usize].as_mut().expect("open while in flight");
        if attached.depth >= attached.depth_max() {
            attached.waiting.push_back(key);
            return;
        }
        attached.depth += 1;
        self.push(ring, key);
    }

    /// Hands over operations that have waited, as far as there is room.
    fn start_waiting(&mut self, ring: &mut Ring, id: DeviceId) {
        while let Some(attached) = self.attached(id)
            && attached.depth < attached.depth_max()
            && let Some(key) = attached.waiting.pop_front()
        {
            attached.depth += 1;
            self.push(ring, key);
        }
    }

    fn push(&mut self, ring: &mut Ring, key: usize) {
        let clock = self.clock;
        self.flights[key].since.get_or_insert(clock);
        let entry = self.entry(key).user_data(self.tag | key as u64);
        let attached =
            self.devices[self.flights[key].device.0 as usize].as_ref().expect("open while in flight");
        // SAFETY: the buffers belong to the flight, which stays in `flights` until the completion
        // was taken and is leaked by `drop` otherwise; the descriptor stays open while its
        // in_flight count is above zero: that of this table with the device, that of a ring beside
        // this one until it has nothing under way.
        unsafe {
            match &attached.aside {
                Some(aside) => aside.push(entry),
                None => ring.push(entry),
            }
        }
    }

    fn entry(&mut self, key: usize) -> squeue::Entry {
        let flight = &mut self.flights[key];
        let attached = self.devices[flight.device.0 as usize].as_ref().expect("open while in flight");
        let fd = types::Fd(attached.aside.as_ref().map_or_else(|| attached.device.raw_fd(), Aside::fd));
        // Buffers are registered with the shared ring only.
        let registration = if attached.aside.is_some() { Registration::Refused } else { self.registration };
        let (done, len) = (flight.done, flight.next_bytes());
        let entry = match &mut flight.op {
            IoOp::Read { offset, buf } => {
                let start = buf[done..].as_mut_ptr();
                let at = offset.0 + done as u64;
                match fixed_index(registration, &self.pool, start, len) {
                    Some(index) => opcode::ReadFixed::new(fd, start, len as u32, index).offset(at).build(),
                    None => opcode::Read::new(fd, start, len as u32).offset(at).build(),
                }
            }
            IoOp::Write { offset, buf, fua } => {
                let start = buf[done..].as_ptr();
                let at = offset.0 + done as u64;
                let flags = if *fua { libc::RWF_DSYNC } else { 0 };
                match fixed_index(registration, &self.pool, start, len) {
                    Some(index) => opcode::WriteFixed::new(fd, start, len as u32, index)
                        .offset(at)
                        .rw_flags(flags)
                        .build(),
                    None => opcode::Write::new(fd, start, len as u32).offset(at).rw_flags(flags).build(),
                }
            }
            IoOp::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            IoOp::Zero { offset, len, may_unmap } => {
                opcode::Fallocate::new(fd, *len).offset(offset.0).mode(zero_mode(*may_unmap)).build()
            }
            IoOp::Extents { .. } => unreachable!("extents are answered at submission"),
        };
        // With that flag a worker of the kernel waits, not the submitter.
        if attached.device.holds_up() { entry.flags(squeue::Flags::ASYNC) } else { entry }
    }

    /// Runs an operation to its end on this thread.
    fn execute_inline(&mut self, key: usize) -> MemberCompletion {
        loop {
            let flight = &mut self.flights[key];
            let device = self.devices[flight.device.0 as usize].as_ref().expect("open while in flight");
            let (done, len) = (flight.done, flight.next_bytes());
            let result = system_call(device.device.raw_fd(), &mut flight.op, done, len);
            if let Progress::Finished(done) = self.advance(key, result) {
                return done;
            }
        }
    }

    /// Applies the result of one system call to an operation.
    fn advance(&mut self, key: usize, result: i32) -> Progress {
        let flight = &mut self.flights[key];
        let attached = self.devices[flight.device.0 as usize].as_ref().expect("open while in flight");
        let facts = attached.device.facts();
        let total = flight.bytes();
        if result >= 0 && attached.released && flight.done + (result as usize) < total {
            // The device was released: nothing waits for the rest.
            return Progress::Finished(self.end(key, Err(GONE)));
        }
        if result < 0 {
            let errno = -result;
            if matches!(errno, libc::EAGAIN | libc::EINTR | libc::ECANCELED)
                && flight.retries < RETRIES_MAX
                && !attached.released
            {
                flight.retries += 1;
                return Progress::Again;
            }
            let zero = matches!(flight.op, IoOp::Zero { .. });
            // A disk that was taken away may answer as if it were full; its size is 0 then.
            let kind =
                if attached.device.was_cut_off() { IoFaultKind::Gone } else { fault_kind(errno, zero) };
            return Progress::Finished(self.end(key, Err(IoFault { kind, errno })));
        }
        if total == 0 {
            return Progress::Finished(self.end(key, Ok(None)));
        }
        let asked = flight.next_bytes();
        let mut done = flight.done + result as usize;
        if done < total {
            if (result as usize) < asked && flight.most > SURE_BYTES {
                (flight.done, flight.most, flight.retries) = (0, SURE_BYTES, 0);
                return Progress::Again;
            }
            if facts.direct {
                // A direct transfer continues at a sector; a started sector is transferred again.
                done -= done % facts.sector as usize;
            }
            if done <= flight.done {
                // The file was truncated from outside.
                let fault = IoFault { kind: IoFaultKind::Gone, errno: libc::ENODATA };
                return Progress::Finished(self.end(key, Err(fault)));
            }
            flight.done = done;
            flight.retries = 0;
            return Progress::Again;
        }
        Progress::Finished(self.end(key, Ok(None)))
    }

    fn finish(&mut self, key: usize, result: Result<Option<Vec<Extent>>, IoFault>) {
        let done = self.end(key, result);
        self.ready.finished(done);
    }

    /// Removes an operation that has ended from the tables.
    fn end(&mut self, key: usize, result: Result<Option<Vec<Extent>>, IoFault>) -> MemberCompletion {
        let flight = self.flights.remove(key);
        if flight.offloaded {
            self.copying.ran_elsewhere();
        }
        let attached = self.attached(flight.device).expect("open while in flight");
        attached.depth -= u32::from(attached.is_limited() && flight.since.is_some());
        let result = match flight.op {
            IoOp::Flush => attached.device.judge_flush(result),
            _ => result,
        };
        self.note_end(flight.device, result.as_ref().err());
        let result = result.map(|extents| match (extents, flight.op) {
            (Some(extents), _) => IoValue::Extents(extents),
            (None, IoOp::Read { buf, .. }) => IoValue::Data(buf),
            (None, _) => IoValue::Done,
        });
        let completion = Completion { token: flight.token, result };
        self.close_if_idle(flight.device);
        MemberCompletion { owner: flight.owner, device: flight.device, completion }
    }
}

impl Drop for MemberIo {
    fn drop(&mut self) {
        // As below.
        self.devices
            .iter_mut()
            .flatten()
            .filter_map(|attached| attached.look.take())
            .for_each(std::mem::forget);
        // Operations in a ring beside this one delay the closing of its device; nothing waits for
        // that.
        let is_kept =
            |attached: &Attached| attached.aside.is_some() && attached.in_flight > 0 || attached.is_read();
        self.devices.iter().flatten().filter_map(|a| a.shared.as_ref()).for_each(|shared| shared.release());
        self.devices.drain(..).flatten().filter(is_kept).for_each(std::mem::forget);
        if !self.flights.is_empty() {
            // The kernel may still write into these buffers: losing the memory is the lesser evil.
            tracing::warn!(operations = self.flights.len(), "member operations abandoned in flight");
            std::mem::forget(std::mem::take(&mut self.flights));
        }
    }
}

enum Progress {
    Finished(MemberCompletion),
    Again,
}

#[cfg(test)]
mod tests {
    use super::super::aside;
    use super::super::attached::DEPTH_MAX;
    use super::*;
    use calpe_core::block_io::Buf;
    use calpe_core::units::ByteOffset;
    use proptest::prelude::*;
    use std::fs::{File, OpenOptions};
    use std::io::Write;
    use std::path::Path;
    use tempfile::TempDir;

    const TAG: u32 = 7;
    const OWNER: u32 = 3;
    const ID: DeviceId = DeviceId(2);
    const BYTES: u64 = 8 << 20;

    struct Bench {
        dir: TempDir,
        ring: Ring,
        pool: Pool,
        members: MemberIo,
        now: Timestamp,
    }

    impl Bench {
        /// One new sparse member: on a disk filesystem, or in memory.
        fn new(memory: bool) -> Bench {
            let dir =
                if memory { tempfile::tempdir_in("/dev/shm").unwrap() } else { tempfile::tempdir().unwrap() };
            let device = Device::create_sparse(&dir.path().join("m.img"), BYTES).unwrap();
            assert!(!memory || device.facts().memory);
            Bench::with(dir, device)
        }

        /// One member that is a pipe: reads do not end before something is written into it.
        fn that_hangs() -> (Bench, File) {
            let dir = tempfile::tempdir().unwrap();
            let (reader, writer) = nix::unistd::pipe().unwrap();
            let device = Device::fake(&dir.path().join("pipe"), reader.into(), BYTES);
            (Bench::with(dir, device), writer.into())
        }

        /// One member file whose filesystem may keep callers waiting.
        fn that_holds_up() -> Bench {
            let dir = tempfile::tempdir().unwrap();
            let mut device = Device::create_sparse(&dir.path().join("m.img"), BYTES).unwrap();
            device.hold_up();
            Bench::with(dir, device)
        }

        fn with(dir: TempDir, device: Device) -> Bench {
            let mut ring = Ring::new().unwrap();
            let pool = Pool::new(4 << 20).unwrap();
            let mut members = MemberIo::new(TAG, &pool, 1);
            members.add(&mut ring, ID, OWNER, device);
            let now = Timestamp(1);
            members.pass_time(now);
            Bench { dir, ring, pool, members, now }
        }

        fn turn(&mut self, wait: Duration) -> usize {
            let mut events = Vec::new();
            self.ring.enter(Some(wait), &mut events).unwrap();
            for event in &events {
                self.members.complete(&mut self.ring, event.user_data, event.result);
            }
            events.len()
        }

        /// Lets time pass.
        fn pass(&mut self, seconds: u64) {
            for _ in 0..seconds * 10 {
                self.now = Timestamp(self.now.0 + 100_000_000);
                self.turn(Duration::ZERO);
                self.members.pass_time(self.now);
            }
        }

        fn gone(&mut self) -> Vec<(u32, DeviceId, i32)> {
            let gone = self.members.vanished().into_iter();
            gone.map(|(owner, id, fault)| (owner, id, fault.errno)).collect()
        }

        /// Checks the files once, and returns the result.
        fn look(&mut self) -> Vec<(u32, DeviceId, i32)> {
            self.members.look_after_files(&mut self.ring);
            while self.members.attached(ID).is_some_and(|attached| attached.look.is_some()) {
                self.turn(Duration::from_secs(10));
            }
            self.gone()
        }

        fn submit(&mut self, token: u64, op: IoOp) {
            self.members.submit(&mut self.ring, OWNER, ID, IoToken(token), op);
        }

        fn wait(&mut self) -> Completion {
            loop {
                if let Some(done) = self.members.next_finished() {
                    assert_eq!((done.owner, done.device), (OWNER, ID));
                    return done.completion;
                }
                assert!(self.turn(Duration::from_secs(10)) > 0, "no completion within ten seconds");
            }
        }

        fn run(&mut self, op: IoOp) -> Result<IoValue, IoFault> {
            self.submit(1, op);
            self.wait().result
        }

        fn filled(&self, len: usize, byte: u8) -> Buf {
            let mut buf = self.pool.alloc(len);
            buf.fill(byte);
            buf.freeze()
        }

        fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, IoFault> {
            let buf = self.pool.alloc(len);
            self.run(IoOp::Read { offset: ByteOffset(offset), buf }).map(|value| match value {
                IoValue::Data(buf) => buf.to_vec(),
                other => panic!("a read gave {other:?}"),
            })
        }

        fn write(&mut self, offset: u64, buf: Buf, fua: bool) {
            let done = self.run(IoOp::Write { offset: ByteOffset(offset), buf, fua }).unwrap();
            assert!(matches!(done, IoValue::Done));
        }
    }

    #[test]
    fn what_is_written_reads_back_on_disk_and_in_memory() {
        for memory in [false, true] {
            let mut bench = Bench::new(memory);
            for (offset, len, fua) in [(0, 4096, false), (65536, 1 << 20, true), (BYTES - 4096, 4096, true)] {
                let buf = bench.filled(len, len as u8 ^ 0x5a);
                bench.write(offset, buf, fua);
                assert!(matches!(bench.run(IoOp::Flush), Ok(IoValue::Done)));
                assert!(bench.read(offset, len).unwrap().iter().all(|&b| b == len as u8 ^ 0x5a));
            }
        }
    }

    #[test]
    fn an_owner_of_thousands_of_operations_does_not_keep_another_waiting() {
        const OTHER: (u32, DeviceId) = (OWNER + 1, DeviceId(ID.0 + 1));
        for memory in [true, false] {
            let mut bench = Bench::new(memory);
            let device = Device::create_sparse(&bench.dir.path().join("other.img"), BYTES).unwrap();
            bench.members.add(&mut bench.ring, OTHER.1, OTHER.0, device);
            let read = |bench: &Bench| IoOp::Read { offset: ByteOffset(0), buf: bench.pool.alloc(4096) };
            for token in 0..200 {
                let op = read(&bench);
                bench.submit(token, op);
            }
            let op = read(&bench);
            bench.members.submit(&mut bench.ring, OTHER.0, OTHER.1, IoToken(0), op);
            // The kernel has already finished its reads before this asks for any.
            let mut ended = if memory { 201 } else { 0 };
            while ended < 201 {
                ended += bench.turn(Duration::from_secs(10));
            }
            let owners: Vec<u32> =
                std::iter::from_fn(|| bench.members.next_finished()).map(|done| done.owner).collect();
            assert_eq!(owners.len(), 201);
            let turn = owners.iter().position(|&owner| owner == OTHER.0);
            assert!(turn <= Some(1), "memory: {memory}; after {turn:?} of the other owner");
        }
    }

    #[test]
    fn memory_beyond_the_slab_works_as_well() {
        let mut bench = Bench::new(false);
        let hog = bench.pool.alloc(4 << 20);
        let buf = bench.filled(8192, 9);
        assert!(!bench.pool.contains(buf.as_ptr(), 8192));
        bench.write(4096, buf, false);
        assert_eq!(bench.read(4096, 8192).unwrap(), vec![9; 8192]);
        drop(hog);
    }

    #[test]
    fn a_read_past_the_end_of_a_cut_off_file_means_gone() {
        for memory in [false, true] {
            let mut bench = Bench::new(memory);
            let path = bench.dir.path().join("m.img");
            OpenOptions::new().write(true).open(path).unwrap().set_len(65536 + 1000).unwrap();
            for (offset, len) in [(1 << 20, 4096), (65536 - 4096, 16384), (65536, 4096)] {
                let fault = bench.read(offset, len).unwrap_err();
                assert_eq!(fault.kind, IoFaultKind::Gone, "{offset}");
            }
            assert!(bench.read(0, 65536).is_ok());
        }
    }

    #[test]
    fn zeroing_zeroes_or_is_refused_whole() {
        for memory in [false, true] {
            for may_unmap in [false, true] {
                let mut bench = Bench::new(memory);
                let buf = bench.filled(1 << 20, 5);
                bench.write(0, buf, false);
                let zeroed = bench.run(IoOp::Zero { offset: ByteOffset(65536), len: 131072, may_unmap });
                let back = bench.read(65536, 131072).unwrap();
                match zeroed {
                    Ok(_) => assert!(back.iter().all(|&b| b == 0)),
                    Err(fault) => {
                        assert_eq!(fault.kind, IoFaultKind::Unsupported);
                        assert!(back.iter().all(|&b| b == 5));
                    }
                }
                assert_eq!(bench.read(0, 65536).unwrap(), vec![5; 65536]);
            }
        }
    }

    #[test]
    fn extents_cover_the_range_asked_for() {
        for memory in [false, true] {
            let mut bench = Bench::new(memory);
            let buf = bench.filled(1 << 20, 5);
            bench.write(1 << 20, buf, false);
            match bench.run(IoOp::Extents { offset: ByteOffset(0), len: BYTES }) {
                Ok(IoValue::Extents(extents)) => {
                    let holes: Vec<bool> = extents.iter().map(|extent| extent.hole).collect();
                    // Only memory answers without waiting.
                    let expected: &[bool] = if memory { &[true, false, true] } else { &[false] };
                    assert_eq!(holes, expected);
                    assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), BYTES);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn a_full_submission_queue_loses_nothing() {
        let mut bench = Bench::new(false);
        let count = 5000;
        for token in 0..count {
            let buf = bench.pool.alloc(512.max(bench.members.device(ID).unwrap().facts().sector as usize));
            bench.submit(token, IoOp::Read { offset: ByteOffset(0), buf });
        }
        let mut seen = vec![false; count as usize];
        for _ in 0..count {
            let done = bench.wait();
            assert!(done.result.is_ok());
            assert!(!std::mem::replace(&mut seen[done.token.0 as usize], true), "completed twice");
        }
        assert_eq!(bench.members.in_flight(), 0);
    }

    #[test]
    fn large_transfers_shared_with_workers_end_up_where_they_belong() {
        let mut bench = Bench::new(true);
        let (count, len) = (32, 128 << 10);
        for turn in 0..4u8 {
            for n in 0..count {
                let buf = bench.filled(len, turn ^ n as u8);
                let offset = ByteOffset(n * len as u64);
                bench.submit(n, IoOp::Write { offset, buf, fua: n % 5 == 0 });
            }
            (0..count).for_each(|_| assert!(bench.wait().result.is_ok()));
            for n in 0..count {
                let buf = bench.pool.alloc(len);
                bench.submit(n, IoOp::Read { offset: ByteOffset(n * len as u64), buf });
            }
            assert!(bench.members.copying.offloads_no_more());
            for _ in 0..count {
                let Completion { token, result } = bench.wait();
                let Ok(IoValue::Data(buf)) = result else { panic!("{result:?}") };
                assert!(buf.iter().all(|&b| b == turn ^ token.0 as u8), "{token:?}");
            }
            assert!(bench.members.copying.is_over());
        }
    }

    #[test]
    fn a_released_device_is_closed_after_its_last_operation() {
        let mut bench = Bench::new(false);
        let path = bench.dir.path().join("m.img");
        let buf = bench.pool.alloc(1 << 20);
        bench.submit(1, IoOp::Read { offset: ByteOffset(0), buf });
        bench.members.release(ID);
        assert!(Device::open(&path, crate::member::Access::Exclusive).is_err());
        assert!(bench.wait().result.is_ok());
        assert!(bench.members.device(ID).is_none());
        Device::open(&path, crate::member::Access::Exclusive).unwrap();
        assert_eq!(bench.run(IoOp::Flush).unwrap_err().kind, IoFaultKind::Gone);
    }

    #[test]
    fn a_file_that_was_deleted_moved_cut_off_or_replaced_is_reported_once() {
        type Case = (fn(&Path), i32);
        let cases: [Case; 5] = [
            (|path| std::fs::remove_file(path).unwrap(), libc::ENOENT),
            (|path| std::fs::rename(path, path.with_extension("moved")).unwrap(), libc::ENOENT),
            (|path| OpenOptions::new().write(true).open(path).unwrap().set_len(4096).unwrap(), libc::ENODATA),
            (
                |path| {
                    std::fs::write(path.with_extension("new"), "other").unwrap();
                    std::fs::rename(path.with_extension("new"), path).unwrap();
                },
                libc::EEXIST,
            ),
            (
                |path| {
                    std::fs::remove_file(path).unwrap();
                    std::fs::create_dir(path).unwrap();
                },
                libc::EISDIR,
            ),
        ];
        for (memory, (change, errno)) in [false, true].into_iter().flat_map(|m| cases.map(|case| (m, case))) {
            let mut bench = Bench::new(memory);
            assert_eq!(bench.look(), []);
            change(&bench.dir.path().join("m.img"));
            assert_eq!(bench.look(), [(OWNER, ID, errno)]);
            assert_eq!(bench.look(), []);
        }
    }

    #[test]
    fn a_device_whose_operations_do_not_end_is_gone_and_its_buffers_stay_its_own() {
        let (mut bench, mut writer) = Bench::that_hangs();
        let address = {
            let buf = bench.pool.alloc(4096);
            let address = buf.as_ptr();
            bench.submit(1, IoOp::Read { offset: ByteOffset(0), buf });
            address
        };
        bench.pass(29);
        assert_eq!(bench.gone(), []);
        bench.pass(2);
        assert_eq!(bench.gone(), [(OWNER, ID, libc::ETIMEDOUT)]);
        bench.pass(60);
        assert_eq!(bench.gone(), [], "told once");
        bench.members.release(ID);
        assert_eq!(bench.members.in_flight(), 0, "nobody waits for it");
        assert!(bench.members.device(ID).is_some(), "it is open as long as something is in flight");
        let others: Vec<_> = (0..1024).map(|_| bench.pool.alloc(4096)).collect();
        assert!(others.iter().all(|buf| buf.as_ptr() != address), "its memory is not given away");
        assert!(bench.run(IoOp::Flush).is_err_and(|fault| fault.kind == IoFaultKind::Gone));
        writer.write_all(&[7; 4096]).unwrap();
        assert!(bench.wait().result.is_ok(), "what ends late ends");
        assert!(bench.members.device(ID).is_none());
    }

    #[test]
    fn time_passes_only_while_the_loop_turns() {
        let (mut bench, _writer) = Bench::that_hangs();
        let buf = bench.pool.alloc(4096);
        bench.submit(1, IoOp::Read { offset: ByteOffset(0), buf });
        // A process that was stopped for an hour.
        let now = bench.now;
        bench.now = Timestamp(now.0 + 3_600_000_000_000);
        bench.members.pass_time(bench.now);
        assert_eq!(bench.gone(), []);
        bench.pass(31);
        assert_eq!(bench.gone(), [(OWNER, ID, libc::ETIMEDOUT)]);
    }

    #[test]
    fn a_device_that_hangs_takes_its_share_of_the_kernel_and_what_waits_ends_with_it() {
        let (mut bench, mut writer) = Bench::that_hangs();
        let count = u64::from(DEPTH_MAX) + 10;
        for token in 0..count {
            let buf = bench.pool.alloc(512);
            bench.submit(token, IoOp::Read { offset: ByteOffset(0), buf });
        }
        let attached = bench.members.attached(ID).unwrap();
        assert_eq!((attached.depth, attached.waiting.len()), (DEPTH_MAX, 10));
        // An operation that ends makes room.
        writer.write_all(&[7; 512]).unwrap();
        assert!(bench.wait().result.is_ok());
        assert_eq!(bench.members.attached(ID).unwrap().waiting.len(), 9);
        bench.members.release(ID);
        for _ in 0..9 {
            assert!(bench.wait().result.is_err_and(|fault| fault.kind == IoFaultKind::Gone));
        }
        assert_eq!(bench.members.attached(ID).unwrap().in_flight, DEPTH_MAX);
    }

    #[test]
    fn what_goes_through_a_ring_beside_ends_once_and_as_elsewhere() {
        let mut bench = Bench::that_holds_up();
        assert!(bench.members.attached(ID).unwrap().aside.is_some());
        let count = 3 * u64::from(aside::DEPTH_MAX);
        for token in 0..count {
            let buf = bench.filled(4096, token as u8);
            bench.submit(token, IoOp::Write { offset: ByteOffset(token * 4096), buf, fua: token % 7 == 0 });
        }
        let attached = bench.members.attached(ID).unwrap();
        assert_eq!(
            (attached.depth, attached.waiting.len()),
            (aside::DEPTH_MAX, 2 * aside::DEPTH_MAX as usize)
        );
        let mut seen = vec![false; count as usize];
        for _ in 0..count {
            let done = bench.wait();
            assert!(done.result.is_ok());
            assert!(!std::mem::replace(&mut seen[done.token.0 as usize], true), "completed twice");
        }
        assert!(matches!(bench.run(IoOp::Flush), Ok(IoValue::Done)));
        for token in 0..count {
            assert_eq!(bench.read(token * 4096, 4096).unwrap(), vec![token as u8; 4096]);
        }
        bench.run(IoOp::Zero { offset: ByteOffset(0), len: 4096, may_unmap: true }).unwrap();
        assert_eq!(bench.read(0, 8192).unwrap(), [[0; 4096], [1; 4096]].concat());
        let path = bench.dir.path().join("m.img");
        OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!(bench.read(0, 8192).unwrap_err().kind, IoFaultKind::Gone);
        bench.members.release(ID);
        assert!(bench.members.device(ID).is_none());
        drop(Device::open(&path, crate::member::Access::Exclusive).unwrap());
    }

    #[test]
    fn an_engine_that_ends_keeps_what_a_ring_beside_it_may_still_begin() {
        for _ in 0..20 {
            let mut bench = Bench::that_holds_up();
            for token in 0..40 {
                let buf = bench.filled(64 << 10, 1);
                bench.submit(token, IoOp::Write { offset: ByteOffset(token << 16), buf, fua: true });
            }
            let path = bench.dir.path().join("m.img");
            drop(bench.members);
            // Its descriptor does not belong to another file by now.
            assert!(Device::open(&path, crate::member::Access::Exclusive).is_err());
        }
    }

    #[test]
    fn nothing_of_a_short_transfer_counts_and_it_is_done_again_in_pieces() {
        let mut bench = Bench::new(false);
        let (buf, target) = (bench.filled(16 << 10, 1), bench.pool.alloc(16 << 10));
        let write = IoOp::Write { offset: ByteOffset(0), buf, fua: false };
        for op in [write, IoOp::Read { offset: ByteOffset(0), buf: target }] {
            // It never gets to the kernel: the results are given here.
            bench.submit(1, op);
            let key = bench.members.flights.iter().next().expect("in flight").0;
            let state = |bench: &Bench| (bench.members.flights[key].done, bench.members.flights[key].most);
            assert_eq!(state(&bench), (0, TRANSFER_MAX));
            for (moved, expected) in [(12 << 10, 0), (4096, 4096), (512, 4096 + 512), (4096 - 512, 8192)] {
                assert!(matches!(bench.members.advance(key, moved), Progress::Again));
                assert_eq!(state(&bench), (expected, SURE_BYTES), "after {moved}");
            }
            assert!(matches!(bench.members.advance(key, 4096), Progress::Again));
            let Progress::Finished(ended) = bench.members.advance(key, 4096) else { panic!("it is done") };
            assert!(ended.completion.result.is_ok());
        }
    }

    #[test]
    fn who_holds_up_an_owner_is_known() {
        let (mut bench, _writer) = Bench::that_hangs();
        let other = DeviceId(ID.0 + 1);
        let device = Device::create_sparse(&bench.dir.path().join("other"), BYTES).unwrap();
        bench.members.add(&mut bench.ring, other, OWNER, device);
        let buf = bench.pool.alloc(512);
        bench.submit(1, IoOp::Read { offset: ByteOffset(0), buf });
        bench.pass(3);
        let expected = Stragglers { busy: vec![ID], idle: vec![other], silence: Duration::from_secs(3) };
        let least = Duration::from_secs(3);
        assert_eq!(bench.members.stragglers(OWNER, least), expected);
        assert_eq!(bench.members.stragglers(OWNER, least * 2).busy, []);
        assert_eq!(bench.members.stragglers(OWNER + 1, least).busy, []);
    }

    #[test]
    fn who_lacks_room_neither_ends_the_silence_nor_holds_up() {
        let (mut bench, _writer) = Bench::that_hangs();
        let full = DeviceId(ID.0 + 1);
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let device = Device::fake(Path::new("/dev/full"), file, BYTES);
        bench.members.add(&mut bench.ring, full, OWNER, device);
        let buf = bench.pool.alloc(512);
        bench.submit(1, IoOp::Read { offset: ByteOffset(0), buf });
        let write = |bench: &mut Bench| {
            let op = IoOp::Write { offset: ByteOffset(0), buf: bench.filled(512, 1), fua: false };
            bench.members.submit(&mut bench.ring, OWNER, full, IoToken(2), op);
        };
        for _ in 0..3 {
            bench.pass(1);
            write(&mut bench);
            while bench.members.next_finished().is_none() {
                bench.turn(Duration::from_secs(10));
            }
        }
        let expected = Stragglers { busy: vec![ID], idle: vec![full], silence: Duration::from_secs(3) };
        assert_eq!(bench.members.stragglers(OWNER, Duration::from_secs(3)), expected);
        write(&mut bench);
        let expected = Stragglers { idle: vec![], ..expected };
        assert_eq!(bench.members.stragglers(OWNER, Duration::from_secs(3)), expected);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn the_device_holds_what_a_plain_array_would(
            memory: bool,
            steps in prop::collection::vec((0u64..64, 1usize..32, any::<u8>()), 1..40),
        ) {
            let mut bench = Bench::new(memory);
            let mut model = vec![0u8; 128 * 4096];
            for (block, blocks, byte) in steps {
                let (offset, len) = (block * 4096, blocks * 4096);
                let buf = bench.filled(len, byte);
                bench.write(offset, buf, false);
                model[offset as usize..offset as usize + len].fill(byte);
            }
            prop_assert_eq!(bench.read(0, model.len()).unwrap(), model);
        }
    }
}
