//! The array: k+m members as slots that survive the loss of any m of them.
//!
//! A sans-IO state machine. Requests on slots, completions of member I/O and the passing of time go in;
//! member I/O, replies and notices come out in [`ArrayAction`]s, which the caller takes when it has settled.
//! It owns the states of its members, their superblocks, the row locks, and the passes (rebuild, scrub).
//!
//! Invariants:
//! * Data and parity of a row change only under that row's exclusive lock; decoding happens under a shared
//!   one.
//! * A write that left a member out is acknowledged only after the superblocks of the others record that
//!   durably (rules E1-E3 of the crash-safety design), so a member that missed a write is never taken for
//!   current.
//! * With more than m members gone nothing is written; writes that were cut off are completed from the log
//!   when the members return.
//!
//! Must not know of clients, sockets, paths, clocks or threads.

mod api;
mod base;
mod blocks;
mod client;
mod create;
mod damage;
mod footprint;
pub mod geometry;
mod health;
mod inspect;
mod job;
mod log;
mod log_turn;
mod members;
pub mod mutation;
mod page_io;
mod pages;
mod passes;
mod recovery;
mod refusal;
mod rounds;
mod status;
mod view_reader;

use crate::array::base::inflight::{Ended, Flight, Inflight, InflightTable};
use crate::array::base::lock::LockTable;
use crate::array::base::members::{Census, Changeover, Device, Member, Progress, Replaced, Replacement};
use crate::array::base::shortage::Shortages;
use crate::array::base::{Core, Load, Roster, Shape, StopState, WorkQueues};
use crate::array::blocks::Why;
use crate::array::client::notices::ClientNotices;
use crate::array::client::read::LoggedRead;
use crate::array::client::write::LoggedWrite;
use crate::array::damage::Damage;
use crate::array::damage::looks::Looks;
use crate::array::log::Redo;
use crate::array::log::facts::LogFacts;
pub use crate::array::members::assembly;
use crate::array::members::assembly::{Assembled, Built};
use crate::array::members::bad_blocks::BadBlocks;
use crate::array::members::ring_check::RingCheck;
use crate::array::members::supers::Supers;
use crate::array::members::waiting::WaitingRequests;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::Pages;
use crate::array::pages::hold::PageTask;
use crate::array::passes::page_pass::PagePass;
use crate::array::passes::page_scrub::PageScrub;
use crate::array::passes::repair::{Repair, RepairProgress};
use crate::array::passes::schedule::Passes;
use crate::array::passes::super_scrub::SuperScrub;
use crate::array::passes::walk::LoggedPass;
use crate::array::recovery::startup::Startup;
use crate::array::rounds::FlushRounds;
use crate::block_io::{Completion, DeviceId, IoFault, IoToken, IoValue, Pool};
use crate::codec::Codec;
use crate::format::{ChecksumKind, Geometry, MemberSet, MemberState, RegionKind};
use crate::units::{SlotIndex, Timestamp};
pub use api::{
    AdminOutcome, AdminRequest, ArrayAction, ArrayNotice, ClientError, EndedRequest, Health, LetGo,
    NewDevice, NoticeKind, NoticeLevel, ReplacementOrder, ReplacementStep, RequestId, STOPPED_CLEANLY,
    StripeReply, StripeRequest, StripeRequestId, ZERO_RUN_STRIPES,
};
pub use calpe_view::Orphan;
pub use create::{LaneSeed, NewArray, NewLanes};
pub use footprint::Footprint;
use geometry::Map;
pub use job::{Job, JobDone, OpKey, Urgency, Work, WorkDone};
pub use refusal::{AdminRefusal, Behind, Overclaim, ScrubState};
use slab::Slab;
pub use status::{
    Activity, ActivityKind, ArrayState, GIVEN_UP, LogState, MemberCondition, MemberCounters, MemberStatus,
    PageCacheStatus, ReplacementStatus, Rest, ScrubResult, VolumeStatus,
};
use std::collections::VecDeque;
pub use view_reader::{AskArray, PlanExtent, PlannedPage, ReadPiece, ReadPlan, ViewReader};

/// An opened device as assembly hands it over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenDevice {
    /// Its handle.
    pub id: DeviceId,
    /// Its size in bytes.
    pub bytes: u64,
}

/// How a whole stripe is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullStripe {
    /// It is coded and written once, to a free slot: the fastest way.
    #[default]
    Fresh,
    /// It goes through the log and then in place. This writes everything twice and keeps stripes in their
    /// order on disk, for rotating members.
    Logged,
}

/// Parameters of an array at its start besides its superblocks.
#[derive(Clone, Debug)]
pub struct ArrayConfig {
    /// Floor of rebuild and scrub in bytes of user data per second while clients are busy.
    pub rebuild_min: u64,
    /// Ceiling in bytes of user data per second; 0 for none.
    pub rebuild_max: u64,
    /// How whole stripes are written.
    pub full_stripe: FullStripe,
    /// Bytes from which on reads are verified and decoded, and new parity is computed, as a job, in arrays
    /// with checksums. With fewer bytes, the way to a thread and back takes longer than the work. But where
    /// hashing blocks together is faster and several clients' requests are under way, small jobs are given
    /// away too, to be done together.
    pub job_bytes_min: usize,
    /// Bytes of memory for pages of checksums. A page has 252, those of parity among them: with 4+2 these are
    /// the checksums of 164 times as many bytes of data. What readers on other threads see of them takes as
    /// much again.
    pub page_cache: usize,
    /// Serve although a replay of the log finds rows lost whose wrong content nothing would reveal.
    pub force: bool,
    /// Randomness for epoch identities.
    pub seed: u64,
    /// Seconds since 1970 at `Timestamp(0)`.
    pub unix_at_zero: u64,
}

impl ArrayConfig {
    /// For one of several lanes, of which all together keep to the rates.
    #[must_use]
    pub fn for_lane(self, lanes: u16) -> ArrayConfig {
        let lanes = u64::from(lanes);
        ArrayConfig {
            rebuild_min: self.rebuild_min.div_ceil(lanes),
            rebuild_max: self.rebuild_max.div_ceil(lanes),
            ..self
        }
    }
}

impl Default for ArrayConfig {
    fn default() -> Self {
        ArrayConfig {
            rebuild_min: 32 << 20,
            rebuild_max: 0,
            full_stripe: FullStripe::Fresh,
            job_bytes_min: 64 << 10,
            page_cache: 64 << 20,
            force: false,
            seed: 0,
            unix_at_zero: 0,
        }
    }
}

/// See the head of this file.
pub struct Array {
    core: Core,
    ops: Slab<Op>,
    /// Places of the members in service that cannot be read.
    bad: BadBlocks,
    supers: Supers,
    passes: Passes,
    /// Whether it had failed, enough members are back, and it was not yet reported that it serves again.
    was_failed: bool,
    /// Blocks that could not be had.
    damage: Damage,
    /// The repair that an administrator has started, while it runs.
    repair: Option<RepairProgress>,
    /// Looks at blocks that could not be had.
    looks: Looks,
    /// What was reported of failed requests.
    client_notices: ClientNotices,
    /// Requests of administrators that are answered later.
    waiting: WaitingRequests,
    redo: Box<Redo>,
    pages: Pages,
    rounds: FlushRounds,
    startup: Startup,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stopping {
    Draining(RequestId),
    Marking(RequestId),
    Stopped,
}

enum Op {
    /// Taken out while it is advanced.
    Busy,
    /// Over. Its key is not reused before every wake-up that may still name it has been handled.
    Ended,
    LoggedRead(Box<LoggedRead>),
    LoggedWrite(Box<LoggedWrite>),
    LoggedPass(Box<LoggedPass>),
    PagePass(Box<PagePass>),
    PageScrub(Box<PageScrub>),
    SuperScrub(Box<SuperScrub>),
    Repair(Box<Repair>),
    RingCheck(Box<RingCheck>),
}

/// The owner of an I/O, with its name for it.
#[derive(Clone, Copy, Debug)]
enum Owner {
    Op {
        key: usize,
        item: usize,
    },
    Super,
    /// A member's piece of a batch of the redo log.
    Piece {
        sequence: u64,
    },
    /// One flush of a round for the redo log.
    Round,
    /// A run of images that goes in place.
    InPlace,
    /// The space of a discarded slot is given back.
    Punch,
    /// A copy of a metadata page.
    Page(PageTask),
    /// A bad block, read to see whether it is still bad.
    Probe,
    /// Replay.
    Recovery {
        item: usize,
    },
}

/// The effect of a successful operation on its device's cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Effect {
    None,
    Write,
    /// Makes everything durable that had completed when it began: the device's write count then.
    Flush(u64),
}

/// Whether an operation waits for something or is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Wait,
    Finished,
}

impl Array {
    /// Takes over an assembled array and begins a new epoch on its members.
    #[must_use]
    pub fn new(assembled: Assembled<OpenDevice>, codec: Codec, pool: Pool, config: ArrayConfig) -> Array {
        let supers = Supers::new(&assembled, config.seed);
        let superblock = assembled.superblock;
        let geometry = superblock.geometry;
        assert_eq!(
            (codec.data(), codec.parity()),
            (usize::from(geometry.data), usize::from(geometry.parity))
        );
        let map = Map::new(&geometry);
        let data_offset = superblock
            .regions
            .iter()
            .find(|region| region.kind == RegionKind::Data)
            .expect("a decoded superblock has a data region")
            .offset;
        let changeover = Changeover::of(&superblock.part);
        let sequence_of = |uuid| assembled.sequences.get(&uuid).copied().unwrap_or(0);
        // A replay writes again what the log names to devices that are being built, too. After an unclean
        // stop only hashes show whether such a device was rolled back since, because its log is not written
        // (T6): what was built is compared with them, and built anew where there are none. The array may be
        // clean and the device have an older superblock: then it did not get the last one.
        let has_hashes = superblock.checksum != ChecksumKind::None;
        let is_clean = superblock.clean;
        let resumed = |built: Built| {
            let is_proven = is_clean && (built.is_clean || is_off(Mutation::CleanOfOthersBelieved));
            Progress::resumed(if is_proven || has_hashes { built.slots } else { SlotIndex(0) }, is_proven)
        };
        let members: Vec<Member> = assembled
            .seats
            .into_iter()
            .map(|seat| Member {
                uuid: seat.uuid,
                state: seat.state,
                progress: (seat.state == MemberState::Rebuilding).then(|| resumed(seat.built)),
                device: seat.key.map(|open| Device::found(open.id, open.bytes, sequence_of(seat.uuid))),
                replacement: seat.replacement.map(|(open, uuid, built)| Replacement {
                    device: Device::found(open.id, open.bytes, sequence_of(uuid)),
                    uuid,
                    progress: resumed(built),
                    changeover,
                    stays: false,
                }),
                counters: MemberCounters::default(),
                reason: seat.reason,
                away: None,
                cut_off: false,
                has_left: false,
                kept: None,
            })
            .collect();
        let exchanged = assembled.replaced.into_iter().map(|(open, member, uuid)| Replaced {
            member,
            uuid,
            device: Device::found(open.id, open.bytes, sequence_of(uuid)),
        });
        let exchanged = exchanged.collect();
        let scrub = superblock.scrub;
        let facts = LogFacts::new(&superblock, &config, &pool);
        let pages = facts.empty_pages(geometry, superblock.array);
        let journal = facts.empty_journal(superblock.array, map.width());
        let redo = Box::new(Redo::new(facts, journal));
        let unjudged = assembled.live != superblock.epoch.live || !assembled.behind.is_empty();
        let startup = Startup::new(unjudged, assembled.behind);
        let passes = Passes::new(geometry.slots, &scrub);
        let core = Core {
            map,
            shape: Shape { geometry, data_offset, encoding: codec.encoding(), codec },
            pool,
            config,
            now: Timestamp(0),
            roster: Roster {
                census: Census::of(&members),
                has_changed: true,
                members,
                returnable: MemberSet::default(),
                releasing: Vec::new(),
                exchanged,
            },
            inflight: InflightTable::default(),
            shortages: Shortages::default(),
            paces: base::pace::Paces::default(),
            work: WorkQueues {
                ready: VecDeque::new(),
                granted: Vec::new(),
                ended: Vec::new(),
                gated: Vec::new(),
                patient: Vec::new(),
            },
            locks: LockTable::default(),
            load: Load {
                jobs_out: 0,
                client_ops: 0,
                last_client: Timestamp(0),
                write_ops: 0,
                last_write: Timestamp(0),
            },
            stop: StopState { stopping: None, hurried: false, stop_begun: None },
            actions: Vec::new(),
            ended_requests: VecDeque::new(),
        };
        let mut array = Array {
            core,
            ops: Slab::new(),
            bad: BadBlocks::default(),
            supers,
            passes,
            was_failed: false,
            damage: Damage::default(),
            repair: None,
            looks: Looks::default(),
            client_notices: ClientNotices::default(),
            waiting: WaitingRequests::default(),
            redo,
            pages,
            rounds: FlushRounds::default(),
            startup,
        };
        array.settle();
        array
    }

    /// Shape of the array.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.core.shape.geometry
    }

    /// The address arithmetic of this array.
    #[must_use]
    pub fn map(&self) -> &Map {
        &self.core.map
    }

    /// Moves the actions that are due now into `out`.
    pub fn take_actions(&mut self, out: &mut Vec<ArrayAction>) {
        out.append(&mut self.core.actions);
    }

    /// The next end of a slot request, in the order in which they ended.
    pub fn next_ended(&mut self) -> Option<EndedRequest> {
        self.core.ended_requests.pop_front()
    }

    /// Starts a request. Its end comes from [`Array::next_ended`].
    pub fn submit(&mut self, now: Timestamp, id: StripeRequestId, request: StripeRequest) {
        self.core.now = now;
        self.core.load.last_client = now;
        if self.core.stop.stopping.is_some() {
            self.core.done(id, Err(ClientError::Stopping));
        } else if let (StripeRequest::Health { first, count }, true) = (&request, self.core.is_failed()) {
            self.start_health(id, *first, *count);
        } else if self.core.is_failed() {
            self.core.done(id, Err(ClientError::Io));
        } else {
            self.submit_logged(id, request);
        }
    }

    /// Starts a request, or queues it until the log is replayed.
    fn submit_logged(&mut self, id: StripeRequestId, request: StripeRequest) {
        let redo = &self.redo;
        if redo.is_refused() {
            match request {
                StripeRequest::Health { first, count } => self.start_health(id, first, count),
                _ => self.core.done(id, Err(ClientError::Io)),
            }
            return;
        }
        if !redo.is_serving() {
            self.queue(id, request);
            return;
        }
        match request {
            StripeRequest::Read { stripe, offset, buf } => self.start_logged_read(id, stripe, offset, buf),
            StripeRequest::Write { stripe, offset, data, fua } => {
                self.start_logged_write(id, stripe, offset, data, fua)
            }
            StripeRequest::WriteStripe { stripe, parts, fua } => {
                self.start_stripe_write(id, stripe, parts, fua)
            }
            // Checkpoints give its space back.
            StripeRequest::Zero { first, count } => self.start_discard(id, first, count),
            StripeRequest::Flush => self.redo.start_flush(&mut self.core, id),
            StripeRequest::Extents { first, count } => self.logged_extents(id, first, count),
            StripeRequest::Health { first, count } => self.start_health(id, first, count),
        }
    }

    /// Takes the end of a member operation.
    pub fn io_done(&mut self, now: Timestamp, completion: Completion) {
        self.core.now = now;
        let Completion { token, result } = completion;
        match result {
            Err(fault) if self.tries_again(token, fault) => {}
            result => self.end_flight(token, result),
        }
        if !self.core.roster.releasing.is_empty() {
            self.core.release_idle_devices();
        }
    }

    /// Ends an operation and frees its token.
    fn end_flight(&mut self, token: IoToken, result: Result<IoValue, IoFault>) {
        match self.core.inflight.end(token) {
            Ended::Awaited(Flight { entry, again, since, short }) => {
                if result.is_ok() && again.is_transfer() && short.is_none() {
                    self.core.paces.note(entry.member, self.core.now.nanos_since(since));
                }
                if let Some(short) = short {
                    self.core.shortages.ended(entry.device, token, short, result.is_ok());
                }
                self.note_outcome(&entry, &again, &result);
                self.io_ended(entry, result);
            }
            Ended::Late(entry) => self.core.late_end(&entry, &result),
        }
    }

    /// Gives the end of an operation to its owner.
    fn io_ended(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        if let (true, Some(device)) = (result.is_ok(), self.core.device_mut(entry.member, entry.device)) {
            match entry.effect {
                Effect::None => {}
                Effect::Write => device.writes += 1,
                Effect::Flush(writes) => device.flushed = device.flushed.max(writes),
            }
        }
        if let Err(fault) = result {
            self.judge_fault(&entry, fault);
        }
        match entry.owner {
            Owner::Op { key, item } => self.op_io(key, item, entry, result),
            Owner::Super => self.super_io(),
            Owner::Piece { sequence } => self.redo.piece_done(sequence),
            Owner::Round => self.round_io(),
            Owner::InPlace => self.redo.in_place_done(),
            Owner::Punch => self.punch_io(&entry, result),
            Owner::Page(task) => self.page_io(task, entry, result),
            Owner::Probe => self.bad.probed(entry.member),
            Owner::Recovery { item } => self.recovery_io(item, entry, result),
        }
    }

    /// Takes the end of a job.
    ///
    /// # Panics
    /// When this array gave out no such job.
    pub fn worked(&mut self, now: Timestamp, done: JobDone) {
        self.core.now = now;
        let JobDone { owner: OpKey(key), done: WorkDone::Code(columns) } = done;
        self.core.load.jobs_out -= 1;
        let mut op = std::mem::replace(&mut self.ops[key], Op::Busy);
        let flow = match &mut op {
            Op::LoggedRead(read) => self.logged_read_coded(key, read, columns),
            Op::LoggedWrite(write) => self.logged_write_coded(key, write, columns),
            Op::LoggedPass(pass) => self.logged_pass_coded(key, pass, columns),
            Op::Busy | Op::Ended => unreachable!("an operation outlives its job"),
            Op::PagePass(_) | Op::PageScrub(_) | Op::SuperScrub(_) | Op::Repair(_) | Op::RingCheck(_) => {
                unreachable!("pages and logs are no bulk work")
            }
        };
        self.put_back(key, op, flow);
    }

    /// Takes the report that a device is gone although no operation failed.
    pub fn device_gone(&mut self, now: Timestamp, device: DeviceId, fault: IoFault) {
        self.core.now = now;
        let reason = match fault.errno {
            libc::ETIMEDOUT => "its device does not answer: operations on it do not end".to_owned(),
            libc::EEXIST => "its file is gone: another file is at its path now".to_owned(),
            libc::EISDIR => "its file is gone: something that is no file is at its path now".to_owned(),
            libc::ENODATA => "its file was cut off: it is shorter than the member".to_owned(),
            _ => format!("its device is gone: {fault}"),
        };
        match self.core.find_device(device) {
            Some((member, _)) => self.device_missing(member, device, reason, fault),
            // It is out of service already, and operations may still wait for it.
            None => {
                self.core.abandon(device, fault);
                self.core.release_idle_devices();
            }
        }
    }

    /// Announces that a stop will follow when the requests under way have ended: those that wait for a fault
    /// to pass try once more, and then end with an error.
    pub fn hurry(&mut self) {
        self.core.stop.hurried = true;
    }

    /// Lets time pass: paces the passes, retries operations that wait, records progress.
    pub fn tick(&mut self, now: Timestamp) {
        self.core.now = now;
        if self.core.is_stopped() {
            return;
        }
        self.judge_shortages();
        self.judge_errors();
        self.core.judge_paces();
        self.core.wake_patient();
        self.look_at_damage();
        self.retry_pages();
        self.checkpoint_when_idle();
        self.save_progress();
        self.judge_requests();
        self.judge_unreadable_notices();
        self.mark_idle_clean();
    }

    /// When the next tick is due at the latest, if something waits for a time; see [`Array::tick`].
    #[must_use]
    pub fn due(&self) -> Option<Timestamp> {
        let due = self.startup_due().or_else(|| self.core.shortages.due());
        [due, self.looks.due(&self.damage, &self.core, self.redo.is_serving())].into_iter().flatten().min()
    }

    /// The facts of this array.
    #[must_use]
    pub fn status(&self) -> VolumeStatus {
        VolumeStatus {
            state: self.state(),
            geometry: self.core.shape.geometry,
            epoch: self.supers.epoch_number(),
            dirty: self.supers.is_dirty(),
            members: self.member_status(),
            activities: self.activities(),
            last_scrub: self.passes.last_scrub(),
            engine: self.core.shape.codec.engine().name(),
            client_errors: self.client_notices.errors(),
            checksum: self.supers.template().checksum,
            log: self.log_state(),
            yields_to_force: self.startup.yields_to_force(),
            lost: self.damage.ranges(&self.core.map, Why::is_beyond_repair),
            set_aside: self.damage.ranges(&self.core.map, |why| why == Why::SetAside),
            set_aside_on: self.set_aside_on(),
            unreadable: self.unreadable_ranges(),
            page_cache: self.pages.cache_status(),
            unreadable_pages: self.pages.count_given_up(),
            unconfirmed_lost: self.damage.unconfirmed_lost_ranges(&self.core.map),
            unconfirmed: self.unconfirmed_ranges(),
        }
    }

    /// State of the array as a whole.
    #[must_use]
    pub fn state(&self) -> ArrayState {
        match self.core.map.width() - self.core.online().len() {
            _ if self.redo.is_refused() => ArrayState::Failed,
            0 => ArrayState::Online,
            gone if gone <= self.core.map.m => ArrayState::Degraded,
            _ => ArrayState::Failed,
        }
    }

    /// Works until every operation waits for I/O, time or a lock. Events only note what has happened and take
    /// the operations concerned to where they wait next: batches, superblocks, passes and readers elsewhere
    /// have their turn here, once for all events since the last call. Nothing is acknowledged before.
    pub fn settle(&mut self) {
        loop {
            // Ends the operations that wait for a device that has left service.
            while let Some((entry, fault)) = self.core.inflight.next_orphan() {
                self.io_ended(entry, Err(fault));
            }
            self.end_gone_page_io();
            while let Some(key) = self.core.work.ready.pop_front() {
                self.advance(key);
            }
            self.pump_supers();
            self.pump_redo();
            self.pump_passes();
            self.pump_stop();
            let has_ended = self.pump_shortages();
            if self.core.work.ready.is_empty()
                && !has_ended
                && !self.core.inflight.has_orphans()
                && !self.pages.has_gone()
            {
                for key in self.core.work.ended.drain(..) {
                    self.ops.remove(key);
                }
                self.show();
                return;
            }
        }
    }

    fn advance(&mut self, key: usize) {
        let Some(place) = self.ops.get_mut(key) else { return };
        let mut op = std::mem::replace(place, Op::Busy);
        let flow = match &mut op {
            Op::Busy => unreachable!("operations are advanced one at a time"),
            Op::Ended => Flow::Wait,
            Op::LoggedRead(read) => self.advance_logged_read(key, read),
            Op::LoggedWrite(write) => self.advance_logged_write(key, write),
            Op::LoggedPass(pass) => self.advance_logged_pass(key, pass),
            Op::PagePass(pass) => self.advance_page_pass(key, pass),
            Op::PageScrub(scrub) => self.advance_page_scrub(key, scrub),
            Op::SuperScrub(scrub) => self.advance_super_scrub(key, scrub),
            Op::Repair(repair) => self.advance_repair(key, repair),
            Op::RingCheck(check) => check.advance(&mut self.core, key),
        };
        self.put_back(key, op, flow);
    }

    fn op_io(&mut self, key: usize, item: usize, entry: Inflight, result: Result<IoValue, IoFault>) {
        let mut op = std::mem::replace(&mut self.ops[key], Op::Busy);
        let flow = match &mut op {
            Op::Busy | Op::Ended => unreachable!("an operation outlives its I/O"),
            Op::LoggedRead(read) => self.logged_read_io(key, read, item, entry, result),
            Op::LoggedWrite(write) => self.logged_write_io(key, write, item, entry, result),
            Op::LoggedPass(pass) => self.logged_pass_io(key, pass, item, entry, result),
            Op::RingCheck(check) => check.io_ended(&mut self.core, key, result),
            Op::SuperScrub(scrub) => self.super_scrub_io(key, scrub, item, result),
            Op::PagePass(pass) => self.page_pass_io(key, pass, item, result),
            Op::PageScrub(_) | Op::Repair(_) => {
                unreachable!("pages have I/O of their own")
            }
        };
        self.put_back(key, op, flow);
    }

    fn put_back(&mut self, key: usize, op: Op, flow: Flow) {
        match flow {
            Flow::Wait => self.ops[key] = op,
            Flow::Finished => {
                self.ops[key] = Op::Ended;
                self.core.work.ended.push(key);
            }
        }
    }
}
