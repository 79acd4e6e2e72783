//! Background passes over all slots: which one runs, how far it has come, and how much bandwidth it may take.
//!
//! Rebuild before scrub, which waits. While clients are busy a pass keeps to the floor
//! `rebuild_min`, otherwise to the ceiling `rebuild_max`.

use crate::array::base::members::{Progress, Replaced, Which};
use crate::array::passes::page_scrub::PAGES_PER_TURN;
use crate::array::{Activity, ActivityKind, ArrayState, NoticeKind, NoticeLevel, Rest, ScrubResult};
use crate::array::{Array, Op};
use crate::format::{MemberSet, MemberState, PageIndex, ScrubRecord};
use crate::units::{Count, MemberIndex, SlotIndex, Timestamp};
use std::collections::BTreeSet;
use std::ops::Range;

pub(in crate::array) struct Passes {
    scrub: Option<Pass>,
    scrub_paused: bool,
    last_scrub: Option<ScrubResult>,
    slots: u64,
    /// Slot operations under way, of all passes; looks at superblocks have no position, and are not among them.
    pub running: usize,
    /// Scrubs that were stopped: what one of them still has under way counts for no other.
    pub scrubs_stopped: u64,
    draining: bool,
    /// Bytes of user data that may be started now, and when that was last topped up.
    allowance: f64,
    topped_up: Timestamp,
    /// Nanoseconds for which rebuilds waited for blocks that cannot be read, since a slot was last built whole.
    pub patience_spent: u64,
}

/// A pass that verifies superblocks (super_scrub.rs), and beside them slots in ascending order; then metadata pages
/// (page_scrub.rs).
pub(in crate::array) struct Pass {
    progress: Progress,
    supers: SupersTurn,
    pub errors: u64,
    pub repaired: u64,
    /// Members that were out of service when a slot with data was verified, or that a shortage of
    /// this host kept from being read.
    pub unchecked: MemberSet,
    /// Members that a shortage keeps from being read in slots that are read again: these slots are
    /// lacking in `progress`.
    short: MemberSet,
    /// Copies of metadata pages that were found bad, of `errors`: the next checkpoint writes them, then they are read again,
    /// and those that are good count as repaired. The pass ends after that.
    owed: BTreeSet<(PageIndex, MemberIndex)>,
    /// The checkpoint that is waited for.
    settles: Option<u64>,
    /// Copies that were bad once more: of one with a place that cannot be read, the first write goes to the other place.
    owed_again: BTreeSet<(PageIndex, MemberIndex)>,
    /// How often the copies were begun to be read again: what is found bad from then on is left to the next scrub.
    rereads: u32,
    /// An operation that does so is under way.
    pub rereading: bool,
}

/// Whether a scrub has looked at the superblocks. It does so first of all: its own progress is recorded in them, which would
/// mend what is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SupersTurn {
    Due,
    UnderWay,
    Over,
}

impl Pass {
    fn from(slot: u64) -> Pass {
        let progress = Progress::starting_at(slot, false);
        let (unchecked, owed) = (MemberSet::new(), BTreeSet::new());
        let owed_again = owed.clone();
        Pass {
            progress,
            supers: SupersTurn::Due,
            errors: 0,
            repaired: 0,
            unchecked,
            short: unchecked,
            owed,
            settles: None,
            owed_again,
            rereads: 0,
            rereading: false,
        }
    }

    fn finished(&self, turns: u64) -> bool {
        self.supers == SupersTurn::Over && self.progress.is_over(turns)
    }

    /// A shortage of this host kept members from being read in a slot. True: the slot is read
    /// again, when the scrub is through with all others. False: that was tried for long enough, or
    /// too many slots wait for it, and these members count as not checked.
    pub(super) fn was_short(
        &mut self,
        slot: SlotIndex,
        members: MemberSet,
        turns: u64,
        now: Timestamp,
    ) -> bool {
        let has_room = self.progress.lacking.len() < SHORT_SLOTS_MAX;
        let again = has_room && self.progress.lacks(slot.0, turns, now);
        let noted = if again { &mut self.short } else { &mut self.unchecked };
        members.iter().for_each(|member| _ = noted.insert(member));
        again
    }

    /// The members that it has not checked, or not so far in slots that it has been through.
    fn not_checked(&self) -> MemberSet {
        let short = self.short.iter().filter(|_| self.progress.retried() > 0);
        self.unchecked.iter().chain(short).collect()
    }

    /// The copy of a page was found bad, and is due to be written.
    pub(in crate::array) fn owe_page(&mut self, page: PageIndex, member: MemberIndex) {
        if self.rereads > 0 {
            return;
        }
        self.errors += u64::from(self.owed.insert((page, member)));
        self.settles = None;
    }

    /// Copies that are neither repaired nor given up.
    fn open_pages(&self) -> u64 {
        (self.owed.len() + self.owed_again.len()) as u64
    }

    /// The copies of a page were read again, and those of these members are good: the members whose copies were bad before.
    pub(super) fn reread(&mut self, page: PageIndex, good: MemberSet) -> Vec<MemberIndex> {
        if self.rereads == 0 {
            return Vec::new();
        }
        let owed: Vec<MemberIndex> = self.owed_of(page).collect();
        for member in &owed {
            self.owed.remove(&(page, *member));
        }
        let (mended, bad): (Vec<_>, Vec<_>) = owed.into_iter().partition(|member| good.contains(*member));
        if self.rereads < REREADS_MAX {
            self.owed_again.extend(bad.into_iter().map(|member| (page, member)));
        }
        self.repaired += mended.len() as u64;
        mended
    }

    fn owed_of(&self, page: PageIndex) -> impl Iterator<Item = MemberIndex> {
        let (first, last) = ((page, MemberIndex(0)), (page, MemberIndex(u16::MAX)));
        self.owed.range(first..=last).map(|(_, member)| *member)
    }

    /// Pages whose copies are to be read again: the first, and those that follow it, so many at most.
    fn next_reread(&self, pages_max: u64) -> Option<Range<u64>> {
        let first = self.owed.first()?.0;
        let follow =
            (first.0..first.0 + pages_max).take_while(|&page| self.owed_of(PageIndex(page)).next().is_some());
        Some(first.0..first.0 + follow.count() as u64)
    }
}

/// Memory that slot operations of passes may hold at one time, in bytes: what a device that verifies and decodes in batches
/// of 16 MiB takes to be kept full, with one batch on it, one waiting and two being read and written.
const WINDOW_BYTES: usize = 64 << 20;
/// Slots under way at one time at most, which is what small chunks come to: each has locks and pages of its own.
const WINDOW_SLOTS: usize = 128;
/// Slots that a scrub remembers to read again: with more the shortage is not one that passes within
/// moments.
const SHORT_SLOTS_MAX: usize = 4096;
/// How often a scrub has the bad copies of a page written and reads them again: once for each place of a copy.
const REREADS_MAX: u32 = 2;
/// Clients count as busy for this long after their last request.
const CLIENT_BUSY_NS: u64 = 5_000_000;
/// Allowance that may pile up, in seconds of the rate: more than a tick, so that a slow tick does not cost rate.
const BURST_SECONDS: f64 = 0.25;

impl Passes {
    pub(in crate::array) fn new(slots: u64, scrub: &ScrubRecord) -> Passes {
        let last_scrub = (scrub.finished_unix > 0).then_some(ScrubResult {
            finished_unix: scrub.finished_unix,
            errors: scrub.errors,
            repaired: scrub.repaired,
            unchecked: if scrub.position.is_none() { scrub.unchecked } else { scrub.unchecked_before },
        });
        let unfinished = scrub.position.map(|position| Pass {
            errors: scrub.errors_so_far,
            repaired: scrub.repaired_so_far,
            unchecked: scrub.unchecked,
            ..Pass::from(position.0)
        });
        Passes {
            scrub: unfinished,
            scrub_paused: false,
            last_scrub,
            slots,
            running: 0,
            scrubs_stopped: 0,
            draining: false,
            allowance: 0.0,
            topped_up: Timestamp(0),
            patience_spent: 0,
        }
    }

    /// The log begins a new life, which knows nothing of copies that were to be written: a scrub that has found some
    /// begins anew, and finds them again.
    pub(in crate::array) fn forget_owed_pages(&mut self) {
        let Some(pass) = self.scrub.as_mut().filter(|pass| pass.open_pages() > 0) else { return };
        pass.errors -= pass.open_pages();
        pass.owed.clear();
        pass.owed_again.clear();
        (pass.settles, pass.rereads, pass.rereading) = (None, 0, false);
        pass.progress = Progress::starting_at(0, false);
        (pass.unchecked, pass.short) = (MemberSet::new(), MemberSet::new());
    }

    /// Whether a scrub waits for a checkpoint to write the copies of pages that it found bad.
    pub(in crate::array) fn waits_for_checkpoint(&self) -> bool {
        self.scrub.as_ref().is_some_and(|pass| pass.settles.is_some())
    }

    /// Nothing new starts until every slot operation under way has ended: they belong to positions that are void.
    pub(in crate::array) fn drain(&mut self) {
        self.draining = true;
    }

    pub(in crate::array) fn scrub_record(&self) -> ScrubRecord {
        let last = self.last_scrub;
        let unchecked_last = last.map_or_else(MemberSet::new, |last| last.unchecked);
        ScrubRecord {
            // The pages are looked at anew.
            position: self.scrub.as_ref().map(|pass| SlotIndex(pass.progress.done().min(self.slots))),
            errors_so_far: self.scrub.as_ref().map_or(0, |pass| pass.errors - pass.open_pages()),
            repaired_so_far: self.scrub.as_ref().map_or(0, |pass| pass.repaired),
            finished_unix: last.map_or(0, |l| l.finished_unix),
            errors: last.map_or(0, |l| l.errors),
            repaired: last.map_or(0, |l| l.repaired),
            // A restart does not know which slots were to be read again.
            unchecked: self.scrub.as_ref().map_or(unchecked_last, Pass::not_checked),
            unchecked_before: self.scrub.as_ref().map_or_else(MemberSet::new, |_| unchecked_last),
        }
    }

    pub(in crate::array) fn pass_mut(&mut self, kind: ActivityKind) -> Option<&mut Pass> {
        match kind {
            ActivityKind::Scrub => self.scrub.as_mut(),
            ActivityKind::Rebuild | ActivityKind::Repair => None,
        }
    }

    /// Starts a scrub, or continues a paused one. False: it was running already.
    pub(in crate::array) fn start_scrub(&mut self) -> bool {
        let fresh = self.scrub.is_none();
        if fresh {
            self.scrub = Some(Pass::from(0));
        }
        let was_paused = std::mem::take(&mut self.scrub_paused);
        fresh || was_paused
    }

    /// Whether there is a scrub, and nobody has paused it.
    pub(in crate::array) fn scrub_is_running(&self) -> bool {
        self.scrub.is_some() && !self.scrub_paused
    }

    /// Whether there is a scrub that somebody has paused.
    pub(in crate::array) fn scrub_is_paused(&self) -> bool {
        self.scrub.is_some() && self.scrub_paused
    }

    /// Whether there is a scrub, paused or not.
    pub(in crate::array) fn has_scrub(&self) -> bool {
        self.scrub.is_some()
    }

    /// Pauses the scrub that is running.
    pub(in crate::array) fn pause_scrub(&mut self) {
        self.scrub_paused = self.scrub.is_some();
    }

    /// The scrub that has yet to look at the superblocks now begins to, if there is one that may go on.
    fn take_supers_turn(&mut self) -> bool {
        let scrub = self.scrub.as_mut().filter(|pass| !self.scrub_paused && pass.supers == SupersTurn::Due);
        scrub.map(|pass| pass.supers = SupersTurn::UnderWay).is_some()
    }

    /// Ends the scrub, if there is one.
    pub(in crate::array) fn stop_scrub(&mut self) {
        self.scrub_paused = false;
        self.draining = true;
        self.scrub = None;
        self.scrubs_stopped += 1;
    }
}

impl Array {
    /// A scrub that was under way when the array was stopped was paused then, and stays so.
    pub fn keep_scrub_paused(&mut self) {
        self.passes.pause_scrub();
    }

    /// Starts slot operations while the window and the allowance permit.
    pub(in crate::array) fn pump_passes(&mut self) {
        if self.core.is_failed() || self.core.stop.stopping.is_some() || !self.redo.is_settled() {
            return;
        }
        if self.passes.draining && self.passes.running > 0 {
            return;
        }
        self.passes.draining = false;
        self.end_finished_passes();
        if self.passes.take_supers_turn() {
            self.start_super_scrub();
        }
        let stripe = self.core.map.stripe_bytes();
        let window = (WINDOW_BYTES / (self.core.map.width() * self.core.map.chunk)).clamp(1, WINDOW_SLOTS);
        while self.passes.running < window {
            let Some(kind) = self.next_pass() else { return };
            if !self.take_allowance(stripe as f64) {
                return;
            }
            self.passes.running += 1;
            match kind {
                ActivityKind::Rebuild => self.start_rebuild_slot(),
                ActivityKind::Repair => unreachable!("a repair goes at its own pace"),
                ActivityKind::Scrub => {
                    let (slots, turns, now) = (self.core.map.slots, self.scrub_turns(), self.core.now);
                    let Some(pass) = self.passes.pass_mut(kind) else { return };
                    let Some(slot) = pass.progress.due(turns, now).map(SlotIndex) else { return };
                    pass.progress.begin(slot.0);
                    if slot.0 >= slots {
                        self.start_page_scrub(slot.0);
                    } else {
                        self.start_logged_scrub(slot);
                    }
                }
            }
        }
    }

    /// The pass whose turn it is, if it has slots to start.
    fn next_pass(&self) -> Option<ActivityKind> {
        if self.core.any_building() {
            return self.core.next_build_slot().map(|_| ActivityKind::Rebuild);
        }
        let scrub = self.passes.scrub.as_ref().filter(|_| !self.passes.scrub_paused)?;
        scrub.progress.due(self.scrub_turns(), self.core.now).map(|_| ActivityKind::Scrub)
    }

    /// Pacing: a token bucket whose rate depends on whether clients are busy.
    fn take_allowance(&mut self, bytes: f64) -> bool {
        let busy = self.core.load.client_ops > 0
            || self.core.now.nanos_since(self.core.load.last_client) < CLIENT_BUSY_NS;
        let rate = match (busy, self.core.config.rebuild_max) {
            (false, 0) => return true,
            (false, max) => max as f64,
            (true, 0) => self.core.config.rebuild_min as f64,
            (true, max) => self.core.config.rebuild_min.min(max) as f64,
        };
        let elapsed = self.core.now.nanos_since(self.passes.topped_up) as f64 / 1e9;
        self.passes.topped_up = self.core.now;
        // A stripe larger than the burst must still get its turn.
        let limit = (rate * BURST_SECONDS).max(bytes);
        self.passes.allowance = (self.passes.allowance + rate * elapsed).min(limit);
        let granted = self.passes.allowance >= bytes;
        if granted {
            self.passes.allowance -= bytes;
        }
        granted
    }

    /// A verify operation has ended; one that was not complete is started again.
    pub(super) fn verified(&mut self, kind: ActivityKind, slot: SlotIndex, complete: bool) {
        self.passes.running -= 1;
        let now = self.core.now;
        if let Some(pass) = self.passes.pass_mut(kind) {
            pass.progress.running.remove(&slot.0);
            // What is read again comes again alone.
            if !complete && !pass.progress.put_back(slot.0, now) {
                pass.progress.rewind_to(slot.0);
            }
        }
    }

    /// The superblocks were looked at, or will be again.
    pub(super) fn verified_supers(&mut self, complete: bool) {
        if let Some(pass) = self.passes.pass_mut(ActivityKind::Scrub) {
            pass.supers = if complete { SupersTurn::Over } else { SupersTurn::Due };
        }
    }

    fn end_finished_passes(&mut self) {
        let turns = self.scrub_turns();
        if self.passes.scrub.as_ref().is_some_and(|pass| pass.finished(turns))
            && self.scrub_has_settled()
            && let Some(pass) = self.passes.scrub.take()
        {
            // Two scrubs are told apart by when they ended, also over a restart.
            let earlier = self.passes.last_scrub.as_ref().map_or(0, |last| last.finished_unix + 1);
            let was_compared = self.pages.checksums().is_some() || pass.unchecked.len() < self.core.map.m;
            // What was not looked at, or not compared, does not refute what an earlier scrub has
            // found.
            let stands = |last: &ScrubResult| last.errors.saturating_sub(last.repaired) > pass.errors;
            let saw_all = was_compared && pass.unchecked.is_empty();
            let standing = self.passes.last_scrub.filter(|last| !saw_all && stands(last));
            let (errors, repaired) =
                standing.map_or((pass.errors, pass.repaired), |last| (last.errors, last.repaired));
            let result = ScrubResult {
                finished_unix: earlier.max(self.core.config.unix_at_zero + self.core.now.0 / 1_000_000_000),
                errors,
                repaired,
                unchecked: pass.unchecked,
            };
            let is_whole = pass.errors == 0 && pass.unchecked.is_empty() && was_compared;
            let level = if is_whole { NoticeLevel::Info } else { NoticeLevel::Warning };
            let mut text =
                format!("scrub finished: {}, {} repaired", Count(pass.errors, "error"), pass.repaired);
            if !pass.unchecked.is_empty() {
                let members: Vec<String> = pass.unchecked.iter().map(|member| member.to_string()).collect();
                text += &format!(
                    "; not checked everywhere, as out of service or for a lack of resources: member{} {}; scrub \
                     again when that is over",
                    if members.len() == 1 { "" } else { "s" },
                    members.join(", ")
                );
            }
            if !was_compared {
                text += match pass.unchecked.is_empty() {
                    true => "; without checksums and parity nothing could be compared",
                    false => "; without checksums nothing could be compared while they were out",
                };
            }
            if let Some(last) = standing {
                text += &format!("; {} of an earlier scrub stand", Count(last.errors, "error"));
            }
            self.passes.last_scrub = Some(result);
            self.bad.scrubbed();
            self.tell_unreadable();
            self.core.notice(NoticeKind::ScrubEnded, level, None, text);
            self.supers.want();
        }
        if self.core.any_building() {
            for at in 0..self.core.roster.members.len() {
                self.end_finished_builds(MemberIndex(at as u16));
            }
        }
        self.pump_supers();
    }

    /// Whether what a scrub that is through has found bad was written, and read again.
    fn scrub_has_settled(&mut self) -> bool {
        let (Some(pass), redo) = (self.passes.scrub.as_mut(), &mut self.redo) else { return true };
        if pass.owed.is_empty() && !pass.rereading {
            if pass.owed_again.is_empty() {
                return true;
            }
            pass.owed = std::mem::take(&mut pass.owed_again);
            pass.settles = None;
            pass.rereads += 1;
        }
        let checkpoint = *pass.settles.get_or_insert_with(|| {
            // Not one under way, which may have begun before.
            redo.want_whole_checkpoint()
        });
        if redo.checkpoints_ended() < checkpoint || pass.rereading || self.passes.scrub_paused {
            return false;
        }
        (pass.rereads, pass.rereading) = (pass.rereads.max(1), true);
        if let Some(pages) = pass.next_reread(PAGES_PER_TURN) {
            self.passes.running += 1;
            self.start_page_reread(pages);
        }
        false
    }

    fn end_finished_builds(&mut self, index: MemberIndex) {
        let slots = self.core.map.slots;
        // Only a device that a restart would find may count as the member.
        let member = self.core.member(index);
        let recorded = member.device.is_some_and(|device| device.recorded);
        let built = recorded && member.progress.as_ref().is_some_and(|p| p.is_over(slots));
        let new_built =
            member.replacement.as_ref().is_some_and(|r| r.device.recorded && r.progress.is_over(slots));
        if !built && !new_built {
            self.forget_looks_with(index);
            return;
        }
        if built && self.has_looked_with(index) && self.may_join(index, Which::Primary) {
            self.forget_looks_with(index);
            self.tell_lacking(index, Which::Primary);
            let member = self.core.member_mut(index);
            member.progress = None;
            member.state = MemberState::Online;
            member.reason = None;
            self.core.count_members();
            let next = self.needless_log();
            self.pages.joined(index, Which::Primary, self.core.now);
            // No batch may be written before the epoch with this member is complete.
            self.supers.note_join(next);
            self.core.notice(
                NoticeKind::MemberRebuilt,
                NoticeLevel::Info,
                Some(index),
                format!("member {index} is rebuilt and online"),
            );
            self.core.notice_if_whole();
        }
        let may_join = new_built && self.has_looked_with(index) && self.may_join(index, Which::Replacement);
        if may_join {
            self.tell_lacking(index, Which::Replacement);
        }
        let member = self.core.member_mut(index);
        if let Some(replacement) = member.replacement.take_if(|_| may_join) {
            let old = member.device.replace(replacement.device);
            self.forget_looks_with(index);
            self.bad.forget(index);
            let member = self.core.member_mut(index);
            let uuid = std::mem::replace(&mut member.uuid, replacement.uuid);
            member.counters = Default::default();
            let was = std::mem::replace(&mut member.state, MemberState::Online);
            member.progress = None;
            member.reason = None;
            self.core.count_members();
            // The old device stays until the exchange is on disk: until then it is what a restart would look for.
            self.core.roster.exchanged.extend(old.map(|device| Replaced { member: index, uuid, device }));
            let next = self.needless_log();
            self.pages.joined(index, Which::Replacement, self.core.now);
            // Recorded like a loss: the old device must not count as current once it misses a write.
            self.supers.note_join(next);
            self.core.notice(
                NoticeKind::MemberReplaced,
                NoticeLevel::Info,
                Some(index),
                format!("member {index} is replaced and online"),
            );
            // Where its old device was in service, nothing was missing by it.
            if was != MemberState::Online {
                self.core.notice_if_whole();
            }
        }
    }

    pub(in crate::array) fn last_scrub(&self) -> Option<ScrubResult> {
        self.passes.last_scrub
    }

    pub(in crate::array) fn activities(&self) -> Vec<Activity> {
        let slots = self.core.map.slots;
        let bytes = |slot: u64| slot * self.core.map.stripe_bytes() as u64;
        let activity = |kind, pass: &Pass, rest| Activity {
            kind,
            done_bytes: bytes(pass.progress.covered().min(slots)),
            total_bytes: bytes(slots),
            retried: pass.progress.retried(),
            retried_pages: 0,
            rest,
            errors: pass.errors,
            repaired: pass.repaired,
        };
        let held = match self.state() {
            ArrayState::Failed => Some(Rest::ForMembers),
            _ => (self.redo.is_settling() || self.passes_wait_for_room()).then_some(Rest::ForRoom),
        };
        let mut all = Vec::new();
        let building = self.core.roster.members.iter().flat_map(|member| {
            [member.progress.as_ref(), member.replacement.as_ref().map(|r| &r.progress)].into_iter().flatten()
        });
        let building: Vec<&Progress> = building.collect();
        if let Some(done) = building.iter().map(|progress| progress.covered()).min() {
            let unreadable = self.ops.iter().filter_map(|(_, op)| match op {
                Op::LoggedPass(op) => op.unreadable_build(),
                _ => None,
            });
            let unreadable: BTreeSet<u64> = unreadable.map(|slot| slot.0).collect();
            all.push(Activity {
                kind: ActivityKind::Rebuild,
                done_bytes: bytes(done.min(slots)),
                total_bytes: bytes(slots),
                retried: building.iter().map(|progress| progress.retried_beside(&unreadable)).sum(),
                retried_pages: building.iter().map(|progress| progress.retried_pages).sum(),
                rest: held,
                errors: 0,
                repaired: 0,
            });
        }
        if let Some(pass) = &self.passes.scrub {
            let rest = match self.passes.scrub_paused {
                true => Some(Rest::Paused),
                false => held.or((!all.is_empty()).then_some(Rest::ForRebuild)),
            };
            all.push(activity(ActivityKind::Scrub, pass, rest));
        }
        all.extend(self.repair_activity());
        all
    }

    /// Ends slot operations that wait for a lock: its holder may never let go.
    pub(in crate::array) fn end_waiting_passes(&mut self) {
        let waiting: Vec<usize> = self
            .ops
            .iter()
            .filter(|(_, op)| match op {
                Op::LoggedPass(op) => op.waits(),
                Op::SuperScrub(op) => op.waits(),
                Op::PagePass(op) => op.waits(),
                Op::PageScrub(_) | Op::Repair(_) => true,
                _ => false,
            })
            .map(|(key, _)| key)
            .collect();
        for key in waiting {
            let mut op = std::mem::replace(&mut self.ops[key], Op::Busy);
            let flow = match &mut op {
                Op::LoggedPass(op) => self.end_logged_pass(key, op, false),
                Op::PagePass(op) => self.end_page_pass(key, op, false),
                Op::PageScrub(op) => self.end_page_scrub(op, false),
                Op::SuperScrub(op) => self.end_super_scrub(key, op, false),
                Op::Repair(op) => self.end_repair_walk(op, false),
                _ => unreachable!("just found to be one of these"),
            };
            self.put_back(key, op, flow);
        }
    }

    /// Whether operations other than those of clients are under way.
    pub(in crate::array) fn background_is_idle(&self) -> bool {
        !self.ops.iter().any(|(_, op)| {
            matches!(
                op,
                Op::LoggedPass(_) | Op::PagePass(_) | Op::PageScrub(_) | Op::SuperScrub(_) | Op::Repair(_)
            )
        })
    }
}
