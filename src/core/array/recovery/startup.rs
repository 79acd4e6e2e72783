//! The life of a logged array's log: replay before anything is served, and again when an array that had failed has
//! enough members back. Rules A4, R1 and R9; R2 to R8 are in `recovery/`.
//!
//! Invariant: a life begins with nothing in flight and ends with nothing of it acknowledged that a replay would not
//! find; whatever began in an earlier life ends with an error.

use crate::array::Core;
use crate::array::base::members::{PagesBuilt, Which};
use crate::array::client::fetch::{Missing, Why};
use crate::array::log::journal::Journal;
use crate::array::log::state::Redo;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::PageStore;
use crate::array::recovery::{
    Building, Lifted, LostRow, PageFault, Recovered, Recovery, RecoveryContext, RecoveryIo, RecoveryOutcome,
    Ring, RolledBack,
};
use crate::array::{
    Array, ArrayAction, ArrayConfig, ClientError, Inflight, LogState, NoticeKind, NoticeLevel, Op, Owner,
    StripeRequest,
};
use crate::block_io::{IoFault, IoFaultKind, IoOp, IoValue, Pool};
use crate::codec::BlockHasher;
use crate::format::{
    ChecksumKind, EpochStamp, LOG_BLOCK_BYTES, LogKey, LogStart, MemberSet, MemberState, PAGE_BYTES, Region,
    RegionKind, Superblock,
};
use crate::units::{ByteOffset, Count, MemberIndex, SlotIndex, Timestamp};
use std::collections::VecDeque;

/// Where a log is in its life.
pub(in crate::array) enum Life {
    /// Nothing is known of it; waits until the epoch is complete and nothing is in flight.
    Starting,
    /// Being replayed, or only judged; how many losses of members there were when that began.
    Recovering {
        recovery: Box<Recovery>,
        losses: u64,
    },
    /// Replayed; waits until the superblocks say where it starts now (R9).
    Marking(LogStart),
    Serving,
    /// It cannot be served; the reason was told.
    Refused(String),
}

/// What never changes about a log.
#[derive(Clone)]
pub(in crate::array) struct LogFacts {
    pub key: LogKey,
    /// Checksums of blocks, if the array has any.
    pub checksums: Option<BlockHasher>,
    pub log: Region,
    pub pages_offset: ByteOffset,
    pub overlay_max: usize,
    /// Members that have an image of each row that is written, at least: that of the data, and
    /// those of the parity.
    pub members_of_write: usize,
    pub cache_pages_max: usize,
    /// The newest log start of the members when this life of the log began, and whether the log was empty then.
    pub start: LogStart,
    pub clean: bool,
    /// Serve although replay finds rows lost that nothing would tell from good ones.
    pub force: bool,
}

/// Most bytes of images that wait to go in place: what a checkpoint writes in a second or so.
const OVERLAY_MAX: usize = 64 << 20;

impl LogFacts {
    pub(in crate::array) fn new(
        superblock: &Superblock,
        start: LogStart,
        config: &ArrayConfig,
        pool: &Pool,
    ) -> LogFacts {
        let region = |kind| superblock.region(kind).expect("a logged array has log and pages regions");
        let (log, pages) = (region(RegionKind::Log), region(RegionKind::Pages));
        let secret = superblock.redo.secret;
        let (_, slab) = pool.slab();
        LogFacts {
            key: LogKey::derive(superblock.array, secret),
            checksums: match superblock.checksum {
                ChecksumKind::None => None,
                ChecksumKind::Crc32c => Some(BlockHasher::Crc32c),
                ChecksumKind::Blake3 => Some(BlockHasher::Blake3),
            },
            log,
            pages_offset: pages.offset,
            overlay_max: OVERLAY_MAX.min(slab / 4),
            members_of_write: 1 + usize::from(superblock.geometry.parity),
            cache_pages_max: (config.page_cache / PAGE_BYTES).max(CACHE_PAGES_MIN),
            start,
            clean: superblock.clean,
            force: config.force,
        }
    }

    pub(in crate::array) fn ring_blocks(&self) -> u32 {
        // The format bounds the log region far below 2^32 blocks; what is beyond would go unused.
        u32::try_from(self.log.len / LOG_BLOCK_BYTES as u64).unwrap_or(u32::MAX - 1)
    }
}

/// Stripes of the map that are gone through at once: some 0.3 ms, so that other arrays of the same thread are served
/// meanwhile.
const STRIPES_AT_ONCE: u64 = 1 << 15;

/// Pages in the cache at least: those of the operations under way.
const CACHE_PAGES_MIN: usize = 256;

impl Array {
    /// Moves the start on as far as it goes.
    pub(in crate::array) fn pump_startup(&mut self) {
        let losses = self.supers.losses();
        match &mut self.redo_mut().life {
            Life::Serving | Life::Refused(_) => {}
            Life::Starting => self.begin_recovery(),
            Life::Recovering { losses: before, .. } if *before != losses => {
                // A member has left: assembly's rules apply anew (A1).
                self.redo_mut().life = Life::Starting;
                self.begin_recovery();
            }
            Life::Recovering { .. } => self.poll_recovery(),
            Life::Marking(start) => {
                let start = *start;
                if self.supers.durable_log_start() == Some(start) && self.acknowledgements_allowed() {
                    self.begin_serving();
                }
            }
        }
    }

    /// The start goes on by itself, without any I/O.
    pub(in crate::array) fn startup_due(&self) -> Option<Timestamp> {
        let Life::Recovering { recovery, .. } = &self.redo.life else { return None };
        recovery.has_work().then_some(self.core.now)
    }

    /// Only when a test wants the rule broken that replay waits for its epoch.
    pub(in crate::array) fn is_epoch_late(&self) -> bool {
        (is_off(Mutation::EpochAfterRedo) || is_off(Mutation::EpochAfterRedoNorNote))
            && matches!(self.redo.life, Life::Starting | Life::Recovering { .. })
    }

    /// Whether it is not known yet that the array can be served by the members that are here. No epoch is made until it is: a
    /// start that is refused leaves those that are missing as current as they were.
    pub(in crate::array) fn is_unjudged(&self) -> bool {
        self.redo.start.unjudged
    }

    /// Whether it was judged that it cannot, and nothing was written.
    pub(in crate::array) fn is_refused_unwritten(&self) -> bool {
        self.redo.start.unjudged && matches!(self.redo.life, Life::Refused(_))
    }

    /// The members that are here can be served: their epoch is made, and the log replayed in it.
    fn judged(&mut self) {
        let redo = self.redo_mut();
        redo.start.unjudged = false;
        redo.start.behind = MemberSet::default();
        redo.life = Life::Starting;
        self.pump_supers();
    }

    fn begin_recovery(&mut self) {
        let quiet = self.core.inflight.is_empty() && self.ops.iter().all(|(_, op)| matches!(op, Op::Ended));
        if self.core.is_failed()
            || !quiet
            || !(self.acknowledgements_allowed() || self.is_epoch_late() || self.is_unjudged())
        {
            return;
        }
        self.supers.forget_log_start();
        let epoch = self.supers.epoch();
        let mut facts = self.redo().facts.clone();
        // The newest that was recorded (R2), as a restart would find it: not where the log started when this process did. What
        // rings hold from before is void, also what a device has brought along that joined since.
        facts.start = self.supers.template().redo.start;
        let usable = self.core.online();
        let lifts = std::mem::take(&mut self.redo_mut().start.lifts);
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
            array: self.supers.template().array,
            key: facts.key,
            data_offset: self.core.shape.data_offset,
            log: facts.log,
            pages_offset: facts.pages_offset,
            hasher: facts.checksums.unwrap_or(BlockHasher::Crc32c),
            checksums: facts.checksums.is_some(),
            usable,
            building: building.collect(),
            start: facts.start,
            clean: facts.clean,
            map_pages: self.supers.template().map_pages,
            force: facts.force,
            lift_max: lifts.then_some(2 * self.redo().place.overlay_max),
            judge_only: self.is_unjudged(),
            durable: self.redo().start.durable_before,
            away: self.supers.live().iter().filter(|member| !usable.contains(*member)).collect(),
            behind: usable.iter().filter(|member| self.redo().start.behind.contains(*member)).collect(),
            epoch: EpochStamp { number: epoch.number, id: epoch.id },
            stripes_at_once: STRIPES_AT_ONCE,
            codec: self.core.shape.codec.clone(),
            pool: self.core.pool.clone(),
        };
        let mut pages = PageStore::new(
            self.core.shape.geometry,
            facts.checksums.is_some(),
            facts.key,
            self.supers.template().array,
            facts.cache_pages_max,
        );
        let members = (0..self.core.map.width()).map(|at| MemberIndex(at as u16));
        members.filter(|member| !usable.contains(*member)).for_each(|member| pages.left(member));
        // What devices that are being built lack of pages, and what was on its way to them, is not
        // known any more.
        self.core.builds_mut().for_each(|(_, _, _, progress)| progress.pages = PagesBuilt::No);
        let losses = self.supers.losses();
        let (lives, unjudged, behind) =
            (self.redo().lives, self.redo().start.unjudged, self.redo().start.behind);
        let mut redo = Redo::new(facts, pages, self.empty_journal());
        (redo.lives, redo.start.unjudged, redo.start.behind) = (lives, unjudged, behind);
        redo.start.durable_before = self.redo().start.durable_before;
        redo.start.acknowledged_before = self.redo().start.acknowledged_before;
        redo.start.queued = std::mem::take(&mut self.redo_mut().start.queued);
        redo.life = Life::Recovering { recovery: Box::new(Recovery::new(context)), losses };
        *self.redo_mut() = redo;
        self.poll_recovery();
    }

    fn empty_journal(&self) -> Journal {
        let heads = vec![0; self.core.map.width()];
        let facts = &self.redo().facts;
        Journal::new(
            facts.key,
            self.supers.template().array,
            facts.ring_blocks(),
            heads,
            facts.start.sequence,
            Default::default(),
        )
    }

    fn poll_recovery(&mut self) {
        let mut io = Vec::new();
        let now = self.core.now;
        let redo = self.redo_mut();
        let Life::Recovering { recovery, .. } = &mut redo.life else { return };
        let outcome = recovery.poll(now, &mut redo.pages, &mut io);
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
                // Another recovery over those that are left, once nothing of this one is in flight.
                self.redo_mut().life = Life::Starting;
            }
            Some(RecoveryOutcome::Refused(error)) => {
                let yields = error.yields_to_force() && !self.redo().facts.force;
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
        // Assembly found a majority, these among them: they are here, so that no other half can be served with them.
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
            self.redo_mut().start.behind.remove(member);
        }
        // Another recovery over those that are left.
        self.redo_mut().life = Life::Starting;
    }

    /// Batches below are in place on all members in service, as far as is known.
    pub(in crate::array) fn tail_in_place(&self) -> Option<u64> {
        match &self.redo.life {
            Life::Serving | Life::Marking(_) => match &self.redo.unsettled {
                // Nothing has told the members of a higher one.
                Some(unsettled) => unsettled.tail,
                None => Some(self.redo().journal.tail()),
            },
            Life::Recovering { recovery, .. } => recovery.tail(),
            Life::Starting | Life::Refused(_) => None,
        }
    }

    /// What readers of a member's log have to know.
    pub(in crate::array) fn ring(&self) -> Ring {
        let facts = &self.redo().facts;
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
        self.redo_mut().life = Life::Refused(reason.to_owned());
        self.redo_mut().start.yields_to_force = yields_to_force;
        self.core.notice(
            NoticeKind::ArrayRefused,
            NoticeLevel::Error,
            None,
            format!("the array cannot be served: {reason}"),
        );
        let queued = std::mem::take(&mut self.redo_mut().start.queued);
        for (piece, ..) in queued {
            self.core.done(piece, Err(ClientError::Io));
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
        let counts = match &self.redo().life {
            Life::Recovering { recovery, .. } => recovery.counts(item),
            _ => false,
        };
        if let (Err(fault), crate::array::Effect::None) = (&result, entry.effect)
            && (counts || fault.kind == IoFaultKind::Gone)
        {
            self.read_fault(entry.member, entry.device, *fault);
        }
        self.recovery_done(item, result);
    }

    fn recovery_done(&mut self, item: usize, result: Result<IoValue, IoFault>) {
        if let Life::Recovering { recovery, .. } = &mut self.redo_mut().life {
            recovery.io_done(item, result);
        }
    }

    /// Replay is over: the log starts anew behind it.
    fn recovered(&mut self, recovered: Recovered, lifted: Option<Lifted>, tail: Option<u64>) {
        for &PageFault { page, member, fault, is_lost } in &recovered.page_faults {
            // What gave an error was counted as such.
            let counted = u64::from(fault.is_of_content());
            let counters = &mut self.core.member_mut(member).counters;
            counters.checksum_errors += counted;
            if !is_lost {
                // As while it serves: the copy takes the write of the next checkpoint, as far as is known.
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
        let redo = self.redo_mut();
        redo.stripes = recovered.stripes;
        redo.journal = Journal::new(
            redo.facts.key,
            array,
            redo.facts.ring_blocks(),
            recovered.next_blocks,
            recovered.next_sequence,
            recovered.previous,
        );
        if let Some(lifted) = lifted {
            self.settle(lifted, tail);
            return self.begin_serving();
        }
        if is_off(Mutation::NoCut) {
            return self.begin_serving();
        }
        let start = self.start_log_anew(recovered.next_sequence);
        self.redo_mut().life = Life::Marking(start);
    }

    /// R9: the superblocks are to say that the log starts here, behind all that was replayed.
    pub(in crate::array) fn start_log_anew(&mut self, sequence: u64) -> LogStart {
        let start = LogStart { sequence, epoch: self.supers.epoch().number };
        let facts = &mut self.redo_mut().facts;
        facts.start = start;
        facts.clean = false;
        self.supers.set_log_start(start);
        start
    }

    /// The log was replayed up to the batch `end`. Clients that were told of writes beyond it, before the array failed, and did
    /// not flush them are still there: the flush that would make those durable fails, as that of a disk that lost its cache does.
    fn tell_of_lost_writes(&mut self, end: u64) {
        let acknowledged = std::mem::take(&mut self.redo_mut().start.acknowledged_before);
        if end >= acknowledged || is_off(Mutation::LostWritesUntold) {
            return;
        }
        self.client_notices.count_error();
        let text = "writes that were acknowledged and not flushed before the array failed are lost: too many members came back \
                    without them. The next flush of each client that was connected meanwhile ends in an I/O error";
        self.core.notice(NoticeKind::WritesLost, NoticeLevel::Error, None, text.into());
        self.core.actions.push(ArrayAction::WritesLost);
        let queued = std::mem::take(&mut self.redo_mut().start.queued);
        let (flushes, others): (VecDeque<_>, VecDeque<_>) =
            queued.into_iter().partition(|(_, request, _)| matches!(request, StripeRequest::Flush));
        self.redo_mut().start.queued = others;
        flushes.into_iter().for_each(|(piece, ..)| self.core.done(piece, Err(ClientError::Io)));
    }

    /// R9 is done.
    fn begin_serving(&mut self) {
        let now = self.core.now;
        let redo = self.redo_mut();
        redo.life = Life::Serving;
        redo.start.durable_before = 0;
        let queued = std::mem::take(&mut redo.start.queued);
        if std::mem::take(&mut self.was_failed) {
            let text = "enough members are back: the array serves again";
            self.core.notice(NoticeKind::ArrayServesAgain, NoticeLevel::Warning, None, text.into());
        }
        for (piece, request, _) in queued {
            self.submit(now, piece, request);
        }
    }

    /// For the status.
    pub(in crate::array) fn log_state(&self) -> LogState {
        match &self.redo.life {
            Life::Starting | Life::Recovering { .. } | Life::Marking(_) => LogState::Replaying,
            Life::Serving if self.redo.unsettled.is_some() => LogState::Settling,
            Life::Serving => LogState::Serving,
            Life::Refused(reason) => LogState::Refused(reason.clone()),
        }
    }
}

impl Core {
    /// The device of a member, in service, being built, or its replacement.
    pub(in crate::array) fn device_of(
        &self,
        member: MemberIndex,
        which: Which,
    ) -> Option<crate::block_io::DeviceId> {
        let member = self.member(member);
        match which {
            Which::Primary if matches!(member.state, MemberState::Online | MemberState::Rebuilding) => {
                member.device.map(|device| device.id)
            }
            Which::Primary => None,
            Which::Replacement => member.replacement.as_ref().map(|replacement| replacement.device.id),
        }
    }
}
