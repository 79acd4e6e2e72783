//! The lives of a logged array's log: replay before anything is served, and again when an array that had
//! failed has enough members back. Rules A4, R1 and R9; R2 to R8 are in the other files of `recovery/`.
//!
//! Invariant: a life begins with nothing in flight and ends with nothing acknowledged that a replay would not
//! find; an operation that began in an earlier life ends with an error.

use crate::array::base::members::{PagesBuilt, Which};
use crate::array::base::shortage::changes_nothing;
use crate::array::blocks::{Missing, Why};
use crate::array::log::life::Life;
use crate::array::mutation::{Mutation, is_off};
use crate::array::recovery::{
    Building, Checks, Judging, Known, Lifted, LostRow, PageFault, Recovered, Recovery, RecoveryContext,
    RecoveryIo, RecoveryOutcome, Regions, Ring, RolledBack,
};
use crate::array::{
    Array, ArrayAction, ClientError, Inflight, LogState, NoticeKind, NoticeLevel, Op, Owner, StripeRequest,
    StripeRequestId,
};
use crate::block_io::{IoFault, IoFaultKind, IoOp, IoValue};
use crate::codec::BlockHasher;
use crate::format::{EpochStamp, LogStart, MemberSet, MemberState};
use crate::units::{Count, MemberIndex, SlotIndex, Timestamp};
use std::collections::VecDeque;

/// The conditions for a start of the log, and the requests that wait for it.
#[derive(Default)]
pub(in crate::array) struct Startup {
    /// While the log is [`Life::Recovering`].
    running: Option<Running>,
    /// Whether it is not yet known that the array can be served, because a member that the last epoch had in
    /// service is missing, or holds only the parent of that epoch. Until it is known, nothing is written:
    /// otherwise the return of such a member would not help, or the evidence of its age would be gone.
    unjudged: bool,
    /// For a start that is refused: whether a forced one would go on.
    yields_to_force: bool,
    /// While that is not known: members in service that hold only the parent of the last epoch.
    behind: MemberSet,
    /// Batches below were durable before the array failed, whatever its members show when they come back; 0
    /// where nothing is known.
    durable_before: u64,
    /// Batches below were acknowledged before the array failed, durable or not; 0 where nothing is known.
    acknowledged_before: u64,
    /// Client requests that came before the log was replayed, and when.
    queued: VecDeque<QueuedRequest>,
    /// Whether the next replay writes nothing in place.
    lifts: bool,
}

/// A client request that waits for the replay of the log, and since when.
type QueuedRequest = (StripeRequestId, StripeRequest, Timestamp);

/// A replay, or a judgement without one; and the count of lost members when it began.
struct Running {
    recovery: Box<Recovery>,
    losses: u64,
}

/// Stripes of the map that are gone through at once: about 0.3 ms, so that other arrays of the same thread
/// are served meanwhile.
const STRIPES_AT_ONCE: u64 = 1 << 15;

impl Startup {
    /// `behind`: members in service that hold only the parent of the last epoch.
    pub(in crate::array) fn new(unjudged: bool, behind: MemberSet) -> Startup {
        Startup { unjudged, behind, ..Startup::default() }
    }

    /// For a start that is refused: whether a forced one would go on.
    pub(in crate::array) fn yields_to_force(&self) -> bool {
        self.yields_to_force
    }

    /// Has the array judged anew, because enough members are back after it had failed.
    pub(in crate::array) fn judge_anew(&mut self) {
        self.unjudged = true;
    }

    /// Records that a member of an array that has failed is back, and whether it holds only the parent of the
    /// last epoch.
    pub(in crate::array) fn note_return(&mut self, index: MemberIndex, is_behind: bool) {
        if is_behind {
            self.behind.insert(index);
        } else {
            self.behind.remove(index);
        }
    }

    /// Records that no device has the last epoch, so that no member is behind it.
    pub(in crate::array) fn forget_behind(&mut self) {
        self.behind = MemberSet::default();
    }

    /// Records that the array has failed while it served: batches below were durable, and acknowledged.
    pub(in crate::array) fn note_failure(&mut self, durable: u64, acknowledged: u64) {
        self.durable_before = durable;
        self.acknowledged_before = acknowledged;
    }

    /// Client requests that wait for the replay.
    pub(in crate::array) fn take_queued(&mut self) -> VecDeque<QueuedRequest> {
        std::mem::take(&mut self.queued)
    }

    /// Takes out the queued requests that have waited this long.
    pub(in crate::array) fn take_late(
        &mut self,
        now: Timestamp,
        patience_ns: u64,
    ) -> VecDeque<QueuedRequest> {
        let is_late = |(_, _, since): &QueuedRequest| now.nanos_since(*since) >= patience_ns;
        let (late, others) = self.take_queued().into_iter().partition(is_late);
        self.queued = others;
        late
    }

    /// Whether a replay is running that another could replace without writing in place.
    pub(in crate::array) fn may_lift(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.recovery.may_lift())
    }

    /// Ends the replay, which is over, or void.
    pub(in crate::array) fn end_recovery(&mut self) {
        self.running = None;
    }
}

impl Array {
    /// Advances the start as far as it can go.
    pub(in crate::array) fn pump_startup(&mut self) {
        let losses = self.supers.losses();
        match self.redo.life() {
            Life::Serving | Life::Refused(_) => {}
            Life::Starting => self.begin_recovery(),
            Life::Recovering if self.startup.running.as_ref().is_none_or(|run| run.losses != losses) => {
                // A member has left: assembly's rules apply anew (A1).
                self.start_over();
                self.begin_recovery();
            }
            Life::Recovering => self.poll_recovery(),
            Life::Marking(start) => {
                let start = *start;
                if self.supers.have_log_start(start) && self.supers.acknowledgements_allowed(&self.core) {
                    self.begin_serving();
                }
            }
        }
    }

    /// When the start goes on by itself, without any I/O.
    pub(in crate::array) fn startup_due(&self) -> Option<Timestamp> {
        let running = self.startup.running.as_ref()?;
        running.recovery.has_work().then_some(self.core.now)
    }

    /// Has a request that came before the log was replayed wait for that.
    pub(in crate::array) fn queue(&mut self, id: StripeRequestId, request: StripeRequest) {
        match self.core.lasting_shortage().filter(|_| !changes_nothing(&request)) {
            Some(error) => self.core.done(id, Err(error)),
            None => self.startup.queued.push_back((id, request, self.core.now)),
        }
    }

    /// Begins another replay, which leaves the content that it finds in the log.
    pub(in crate::array) fn begin_lifting(&mut self) {
        self.start_over();
        self.startup.lifts = true;
    }

    /// Has another recovery begin.
    fn start_over(&mut self) {
        self.startup.end_recovery();
        self.redo.set_life(Life::Starting);
    }

    /// Only when a test breaks the rule that replay waits for its epoch.
    pub(in crate::array) fn is_epoch_late(&self) -> bool {
        (is_off(Mutation::EpochAfterRedo) || is_off(Mutation::EpochAfterRedoNorNote))
            && matches!(self.redo.life(), Life::Starting | Life::Recovering)
    }

    /// Whether it is not known yet that the members that are here can serve the array. No epoch is made until
    /// it is: a start that is refused leaves the missing members as current as they were.
    pub(in crate::array) fn is_unjudged(&self) -> bool {
        self.startup.unjudged
    }

    /// Whether it was judged that they cannot, and nothing was written.
    pub(in crate::array) fn is_refused_unwritten(&self) -> bool {
        self.startup.unjudged && self.redo.is_refused()
    }

    /// Goes on, because the members that are here can serve: their epoch is made, and the log replayed in it.
    fn judged(&mut self) {
        self.startup.unjudged = false;
        self.startup.behind = MemberSet::default();
        self.start_over();
        self.pump_supers();
    }

    fn begin_recovery(&mut self) {
        let quiet = self.io_is_idle() && self.ops.iter().all(|(_, op)| matches!(op, Op::Ended));
        if self.core.is_failed()
            || !quiet
            || !(self.supers.acknowledgements_allowed(&self.core)
                || self.is_epoch_late()
                || self.is_unjudged())
        {
            return;
        }
        self.supers.forget_log_start();
        // The array is judged anew.
        self.startup.yields_to_force = false;
        let epoch = self.supers.epoch();
        let mut facts = self.redo.facts().clone();
        // The newest that was recorded (R2), as a restart would find it: not where the log started when this
        // process did. Earlier pieces in the rings are void, also those that a device has brought along that
        // joined since.
        facts.start = self.supers.template().log_start;
        let usable = self.core.online();
        let lifts = std::mem::take(&mut self.startup.lifts);
        let building = self.core.roster.members.iter().enumerate().flat_map(|(at, member)| {
            let index = MemberIndex(at as u16);
            let primary = member.device.zip(member.progress.as_ref());
            let primary = primary.map(|(device, progress)| (Which::Primary, device.id, progress.done()));
            let second =
                member.replacement.as_ref().map(|r| (Which::Replacement, r.device.id, r.progress.done()));
            [primary, second].into_iter().flatten().map(move |(which, _, built)| Building {
                member: index,
                which,
                bound: SlotIndex(built),
            })
        });
        let context = RecoveryContext {
            map: self.core.map,
            geometry: self.core.shape.geometry,
            regions: Regions {
                data_offset: self.core.shape.data_offset,
                log: facts.log,
                pages_offset: facts.pages_offset,
            },
            checks: Checks {
                array: self.supers.template().array,
                key: facts.key,
                hasher: facts.checksums.unwrap_or(BlockHasher::Crc32c),
                checksums: facts.checksums.is_some(),
            },
            usable,
            building: building.collect(),
            known: Known {
                start: facts.start,
                durable: self.startup.durable_before,
                clean: facts.clean,
                map_pages: self.supers.template().map_pages,
            },
            force: facts.force,
            lift_max: lifts.then_some(2 * self.redo.overlay_max()),
            judging: Judging {
                judge_only: self.is_unjudged(),
                away: self.supers.live().iter().filter(|member| !usable.contains(*member)).collect(),
                behind: usable.iter().filter(|member| self.startup.behind.contains(*member)).collect(),
            },
            epoch: EpochStamp { number: epoch.number, id: epoch.id },
            stripes_at_once: STRIPES_AT_ONCE,
            codec: self.core.shape.codec.clone(),
            pool: self.core.pool.clone(),
        };
        let mut pages = facts.empty_pages(self.core.shape.geometry, self.supers.template().array);
        let members = (0..self.core.map.width()).map(|at| MemberIndex(at as u16));
        members.filter(|member| !usable.contains(*member)).for_each(|member| pages.left(member));
        // It is not known any more which pages devices that are being built lack, and which were on their way
        // to them.
        self.core.builds_mut().for_each(|(_, progress)| progress.pages = PagesBuilt::No);
        let losses = self.supers.losses();
        let (array, width) = (self.supers.template().array, self.core.map.width());
        let journal = self.redo.facts().empty_journal(array, width);
        self.redo.begin_anew(facts, journal);
        pages.take_over_view(&mut self.pages);
        self.pages = pages;
        self.startup.running = Some(Running { recovery: Box::new(Recovery::new(context)), losses });
        self.poll_recovery();
    }

    fn poll_recovery(&mut self) {
        let mut io = Vec::new();
        let now = self.core.now;
        let Some(Running { recovery, .. }) = &mut self.startup.running else { return };
        let outcome = recovery.poll(now, self.pages.store_for_replay(), &mut io);
        let tail = recovery.tail();
        let lifted = outcome.as_ref().and_then(|_| recovery.take_lifted());
        for io in io {
            self.send_recovery_io(io);
        }
        if let (Some(_), Some(tail)) = (&outcome, tail) {
            self.supers.departed_mut().learn_tail(tail);
        }
        match outcome {
            None => {}
            Some(RecoveryOutcome::RolledBack(members)) => self.leave_out(&members),
            Some(RecoveryOutcome::Recovered(_)) if self.is_unjudged() => self.judged(),
            Some(RecoveryOutcome::Recovered(recovered)) => self.recovered(*recovered, lifted, tail),
            Some(RecoveryOutcome::Failed { member, which, what, fault }) => {
                if let Some(device) = self.core.device_of(member, which) {
                    self.write_fault(member, device, what, fault);
                }
                // Another recovery over the members that are left, once nothing of this one is in flight.
                self.start_over();
            }
            Some(RecoveryOutcome::Refused(error)) => {
                let yields = error.yields_to_force() && !self.redo.facts().force;
                self.refuse_to_serve(&error.to_string(), yields);
            }
        }
    }

    /// T6: goes on without members that were rolled back, where the others can decode.
    fn leave_out(&mut self, members: &[(MemberIndex, RolledBack)]) {
        let mut left = self.core.online();
        for (member, _) in members {
            left.remove(*member);
        }
        // Assembly found a majority, including these: they are here, so no other half can be served with
        // them.
        if left.len() < self.core.map.k {
            let list: Vec<String> =
                members.iter().map(|(member, why)| format!("member {member}: {why}")).collect();
            let text = format!(
                "{}; the other {} {} too few to go on without: bring back members as they were last",
                list.join("; "),
                Count::of(left.len(), "member"),
                Count::of(left.len(), "member").are()
            );
            return self.refuse_to_serve(&text, false);
        }
        for &(member, why) in members {
            if let Some(device) = self.core.device_of(member, Which::Primary) {
                let reason = format!("{why}; it must be rebuilt ('calpe online')");
                self.fault_device(member, device, MemberState::Faulted, reason);
            }
            self.core.roster.returnable.remove(member);
            self.supers.departed_mut().roll_back(member);
            self.startup.behind.remove(member);
        }
        // Another recovery over the members that are left.
        self.start_over();
    }

    /// Batches below are in place on all members in service, as far as is known.
    pub(in crate::array) fn tail_in_place(&self) -> Option<u64> {
        match self.redo.life() {
            Life::Serving | Life::Marking(_) => self.redo.tail_in_place(),
            Life::Recovering => self.startup.running.as_ref().and_then(|running| running.recovery.tail()),
            Life::Starting | Life::Refused(_) => None,
        }
    }

    /// The facts that readers of a member's log need.
    pub(in crate::array) fn ring(&self) -> Ring {
        let facts = self.redo.facts();
        Ring {
            blocks: facts.ring_blocks(),
            key: facts.key,
            array: self.supers.template().array,
            hasher: facts.checksums.unwrap_or(BlockHasher::Crc32c),
            map: self.core.map,
        }
    }

    /// `yields_to_force`: a forced start would go on.
    fn refuse_to_serve(&mut self, reason: &str, yields_to_force: bool) {
        self.startup.end_recovery();
        self.redo.set_life(Life::Refused(reason.to_owned()));
        self.startup.yields_to_force = yields_to_force;
        self.core.notice(
            NoticeKind::ArrayRefused,
            NoticeLevel::Error,
            None,
            format!("the array cannot be served: {reason}"),
        );
        for (id, ..) in self.startup.take_queued() {
            self.core.done(id, Err(ClientError::Io));
        }
    }

    fn send_recovery_io(&mut self, io: RecoveryIo) {
        let (item, member, which, op) = match io {
            RecoveryIo::Read { item, member, offset, buf } => {
                (item, member, Which::Primary, IoOp::Read { offset, buf })
            }
            RecoveryIo::Write { item, member, which, offset, buf } => {
                (item, member, which, IoOp::Write { offset, buf, fua: false })
            }
            RecoveryIo::Flush { item, member, which } => (item, member, which, IoOp::Flush),
        };
        match self.core.device_of(member, which) {
            Some(device) => self.core.submit_io(Owner::Recovery { item }, member, device, op),
            // A device under construction that has left service needs nothing more.
            None => self.recovery_done(item, Ok(IoValue::Done)),
        }
    }

    pub(in crate::array) fn recovery_io(
        &mut self,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) {
        let running = self.startup.running.as_ref();
        let counts = running.is_some_and(|running| running.recovery.counts(item));
        if let (Err(fault), crate::array::Effect::None) = (&result, entry.effect)
            && (counts || fault.kind == IoFaultKind::Gone)
        {
            self.read_fault(entry.member, entry.device, *fault);
        }
        self.recovery_done(item, result);
    }

    fn recovery_done(&mut self, item: usize, result: Result<IoValue, IoFault>) {
        if let Some(running) = &mut self.startup.running {
            running.recovery.io_done(item, result);
        }
    }

    /// Ends the replay: the log starts anew behind it.
    fn recovered(&mut self, recovered: Recovered, lifted: Option<Lifted>, tail: Option<u64>) {
        for &PageFault { page, member, fault, is_lost } in &recovered.page_faults {
            // Reads that gave errors were counted as such.
            let counted = u64::from(fault.is_of_content());
            let counters = &mut self.core.member_mut(member).counters;
            counters.checksum_errors += counted;
            if !is_lost {
                // As while it serves: the copy counts as repaired by the next checkpoint, as far as is known.
                counters.repaired += counted;
                self.core.notice_page_fault(member, page, fault);
            }
        }
        for &(member, blocks) in &recovered.log_faults {
            self.core.member_mut(member).counters.checksum_errors += blocks;
            let rest = if recovered.lost.is_empty() { "; what they held was taken from others" } else { "" };
            let text = format!(
                "{} of the redo log of member {member} {} damaged or lost{rest}",
                Count(blocks, "block"),
                Count(blocks, "block").were()
            );
            self.core.notice(NoticeKind::LogDamaged, NoticeLevel::Warning, Some(member), text);
        }
        if recovered.map_pages_gone > 0 {
            let pages = Count(recovered.map_pages_gone, "page");
            let text = format!(
                "{pages} of the stripe map had been written and {} on no member that is here: the start was forced, so what was in \
                 their stripes reads as zeroes",
                pages.are()
            );
            self.core.notice(NoticeKind::MapPageOld, NoticeLevel::Error, None, text);
        }
        for page in &recovered.old_map_pages {
            let text = format!(
                "page {page} of the stripe map may be behind: no copy of it is undamaged. Where a crash cut it off as it was \
                 written, nothing is missing; after anything else stripes of it may read as they were before"
            );
            self.core.notice(NoticeKind::MapPageOld, NoticeLevel::Error, None, text);
        }
        if recovered.batches > 0 && lifted.is_none() {
            let text = format!(
                "the redo log was replayed: {}, {} brought up to date",
                Count(recovered.batches.into(), "batch"),
                Count(recovered.rows_redone, "row")
            );
            self.core.notice(NoticeKind::LogReplayed, NoticeLevel::Info, None, text);
        }
        if let (0, Some(members)) = (recovered.dropped, &recovered.dropped_unread) {
            let text = format!(
                "the redo log of {members} could not be read everywhere: what may be there and nowhere else counts as never written"
            );
            self.core.notice(NoticeKind::LogUnread, NoticeLevel::Error, None, text);
        } else if recovered.dropped > 0 {
            let (level, why) = match &recovered.dropped_unread {
                None if recovered.log_faults.is_empty() => (NoticeLevel::Warning, String::new()),
                None => {
                    let why = "; blocks of the redo log were damaged or lost, so what was flushed just before the stop may be \
                               among them";
                    (NoticeLevel::Error, why.into())
                }
                Some(members) => {
                    (NoticeLevel::Error, format!("; the log of {members} could not be read there"))
                }
            };
            let text = format!(
                "{} at the end of the redo log {} dropped: too few members have them whole, and no member notes \
                 that they were flushed{why}",
                Count(recovered.dropped.into(), "batch"),
                Count(recovered.dropped.into(), "batch").were()
            );
            self.core.notice(NoticeKind::LogDropped, level, None, text);
        }
        if !recovered.lost.is_empty() {
            for LostRow { slot, row, columns } in &recovered.lost {
                if let Some(stripe) = recovered.stripes.stripe_at(*slot) {
                    let missing = |&column: &usize| Missing { column, row: *row, why: Why::Unreadable };
                    let missing: Vec<Missing> = columns.iter().map(missing).collect();
                    self.damage.note(stripe, &missing);
                }
            }
            let text = format!(
                "{} could not be replayed on enough members: their blocks read as errors until they are written \
                 again",
                Count::of(recovered.lost.len(), "row")
            );
            self.core.notice(NoticeKind::RowsLost, NoticeLevel::Error, None, text);
        }
        self.tell_of_lost_writes(recovered.end);
        let array = self.supers.template().array;
        self.pages.replayed(recovered.stripes);
        let facts = self.redo.facts();
        let journal =
            facts.journal(array, recovered.next_blocks, recovered.next_sequence, recovered.previous);
        self.redo.replayed(journal);
        self.startup.end_recovery();
        if let Some(Lifted { images, stripes }) = lifted {
            self.redo.settle(&mut self.core, &mut self.pages, images, stripes, tail);
            return self.begin_serving();
        }
        if is_off(Mutation::NoCut) {
            return self.begin_serving();
        }
        let start = self.start_log_anew(recovered.next_sequence);
        self.redo.set_life(Life::Marking(start));
    }

    /// R9: has the superblocks record that the log starts here, behind everything that was replayed.
    pub(in crate::array) fn start_log_anew(&mut self, sequence: u64) -> LogStart {
        let start = LogStart { sequence, epoch: self.supers.epoch().number };
        self.redo.starts_at(start);
        self.supers.set_log_start(start);
        start
    }

    /// The log was replayed up to the batch `end`. There may still be clients whose writes beyond that were
    /// acknowledged before the array failed, and not flushed. The flush that would make those durable fails,
    /// like that of a disk that has lost its cache.
    fn tell_of_lost_writes(&mut self, end: u64) {
        let acknowledged = std::mem::take(&mut self.startup.acknowledged_before);
        if end >= acknowledged || is_off(Mutation::LostWritesUntold) {
            return;
        }
        self.client_notices.count_error();
        let text = "writes that were acknowledged and not flushed before the array failed are lost: too many members came back \
                    without them. The next flush of each client that was connected meanwhile ends in an I/O error";
        self.core.notice(NoticeKind::WritesLost, NoticeLevel::Error, None, text.into());
        self.core.actions.push(ArrayAction::WritesLost);
        let queued = self.startup.take_queued();
        let (flushes, others): (VecDeque<_>, VecDeque<_>) =
            queued.into_iter().partition(|(_, request, _)| matches!(request, StripeRequest::Flush));
        self.startup.queued = others;
        flushes.into_iter().for_each(|(id, ..)| self.core.done(id, Err(ClientError::Io)));
    }

    /// Begins to serve: R9 is done.
    fn begin_serving(&mut self) {
        let now = self.core.now;
        self.redo.set_life(Life::Serving);
        self.startup.durable_before = 0;
        let queued = self.startup.take_queued();
        if std::mem::take(&mut self.was_failed) {
            let text = "enough members are back: the array serves again";
            self.core.notice(NoticeKind::ArrayServesAgain, NoticeLevel::Warning, None, text.into());
        }
        for (id, request, _) in queued {
            self.submit(now, id, request);
        }
    }

    /// The state of the log, for the status.
    pub(in crate::array) fn log_state(&self) -> LogState {
        match self.redo.life() {
            Life::Starting | Life::Recovering | Life::Marking(_) => LogState::Replaying,
            Life::Serving if self.redo.is_unsettled() => LogState::Settling,
            Life::Serving => LogState::Serving,
            Life::Refused(reason) => LogState::Refused(reason.clone()),
        }
    }
}
