//! Background passes over all slots: chooses which one runs, and keeps how far it has come and how much
//! bandwidth it may take.
//!
//! Rebuild runs before scrub, which waits. While clients are busy a pass keeps to the floor `rebuild_min`,
//! otherwise to the ceiling `rebuild_max`.

use crate::array::base::members::Progress;
use crate::array::geometry::Map;
use crate::array::passes::page_scrub::PAGES_PER_TURN;
use crate::array::{Activity, ActivityKind, ArrayState, NoticeKind, NoticeLevel, Rest, ScrubResult};
use crate::array::{Array, Core, Op};
use crate::format::{MemberSet, PageIndex, ScrubRecord};
use crate::units::{Count, MemberIndex, SlotIndex, Timestamp};
use std::collections::BTreeSet;
use std::ops::Range;

pub(in crate::array) struct Passes {
    scrub: Option<Pass>,
    scrub_paused: bool,
    last_scrub: Option<ScrubResult>,
    slots: u64,
    /// Slot operations under way, of all passes. Looks at superblocks have no position, and are not counted.
    running: usize,
    /// Number of scrubs that were stopped: operations of a stopped scrub that are still under way do not
    /// count for a later one.
    scrubs_stopped: u64,
    draining: bool,
    /// Bytes of user data that may be started now, and when they were last topped up.
    allowance: f64,
    topped_up: Timestamp,
    /// Nanoseconds for which rebuilds waited for blocks that cannot be read, since a slot was last built
    /// whole.
    patience_spent: u64,
    /// Whether the last turn compared a slot.
    has_proved: bool,
}

/// A pass that verifies superblocks (`super_scrub.rs`), and beside them slots in ascending order; then
/// metadata pages (`page_scrub.rs`).
pub(in crate::array) struct Pass {
    progress: Progress,
    supers: SupersTurn,
    errors: u64,
    repaired: u64,
    /// Members that were out of service when a slot with data was verified, or that could not be read for a
    /// shortage of this host.
    unchecked: MemberSet,
    /// Members that cannot be read, for a shortage, in slots that are read again: `progress` lists these
    /// slots as lacking.
    short: MemberSet,
    /// Copies of metadata pages that were found bad, and are counted in `errors`. The next checkpoint writes
    /// them, then they are read again, and those that are good count as repaired. The pass ends after that.
    owed: BTreeSet<(PageIndex, MemberIndex)>,
    /// The checkpoint that it waits for.
    settles: Option<u64>,
    /// Copies that were bad a second time: if a copy has a place that cannot be read, the first write goes to
    /// the other place.
    owed_again: BTreeSet<(PageIndex, MemberIndex)>,
    /// How often reading the copies again was begun. From a limit on, bad copies are left to the next scrub.
    rereads: u32,
    /// Whether an operation that does so is under way.
    rereading: bool,
}

/// Whether a scrub has looked at the superblocks. It does so before anything else, because its own progress
/// is recorded in them, which would mend the damage that it looks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SupersTurn {
    Due,
    UnderWay,
    Over,
}

/// What a pass begins with now.
enum Turn {
    /// A slot of the rebuild.
    Rebuild,
    /// A slot that was built before an unclean stop.
    Prove,
    /// A slot of the scrub, or one of its turns of pages.
    Scrub(SlotIndex),
}

/// How far a scrub that has been through everything is with repairing what it found bad.
enum Settling {
    /// All of it was written and read again.
    Over,
    /// It is being written or read, or the scrub is paused.
    UnderWay,
    /// A checkpoint must write it.
    NeedsCheckpoint,
    /// These pages were written, and must be read again.
    Reread(Range<u64>),
}

impl Pass {
    /// Counts inconsistencies that were found. Returns their number so far.
    pub(in crate::array) fn note_errors(&mut self, found: u64) -> u64 {
        self.errors += found;
        self.errors
    }

    /// Counts repaired inconsistencies.
    pub(super) fn note_repaired(&mut self, repaired: u64) {
        self.repaired += repaired;
    }

    /// Notes that a member was not checked everywhere.
    pub(super) fn note_unchecked(&mut self, member: MemberIndex) {
        self.unchecked.insert(member);
    }

    /// Notes that the operation that reads copies again has ended.
    pub(super) fn reread_ended(&mut self) {
        self.rereading = false;
    }

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

    /// Notes members that could not be read in a slot for a shortage of this host. True: the slot is read
    /// again, when the scrub is through with all others. False: that was tried for long enough, or too many
    /// slots wait for it, and these members count as not checked.
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

    /// The members that it has not checked, or not yet in slots that it has been through.
    fn not_checked(&self) -> MemberSet {
        let short = self.short.iter().filter(|_| self.progress.retried() > 0);
        self.unchecked.iter().chain(short).collect()
    }

    /// Notes that the copy of a page was found bad, and has to be written.
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

    /// Takes the result of reading the copies of a page again: those of the members `good` are. Returns the
    /// members whose copies were bad before and are good now.
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

    /// Pages whose copies must be read again: the first, and those that follow it, at most `pages_max`.
    fn next_reread(&self, pages_max: u64) -> Option<Range<u64>> {
        let first = self.owed.first()?.0;
        let follow =
            (first.0..first.0 + pages_max).take_while(|&page| self.owed_of(PageIndex(page)).next().is_some());
        Some(first.0..first.0 + follow.count() as u64)
    }
}

/// Memory that slot operations of passes may hold at one time, in bytes: enough to keep a device full that
/// verifies and decodes in batches of 16 MiB, with one batch on it, one waiting and two being read and
/// written.
const WINDOW_BYTES: usize = 64 << 20;
/// Most slots under way at one time, a limit that small chunks reach: each has locks and pages of its own.
const WINDOW_SLOTS: usize = 128;
/// Most slots that a scrub remembers to read again: with more of them the shortage is not one that passes
/// within moments.
const SHORT_SLOTS_MAX: usize = 4096;
/// How often a scrub has the bad copies of a page written and reads them again: once for each place of a
/// copy.
const REREADS_MAX: u32 = 2;
/// Clients count as busy for this long after their last request.
const CLIENT_BUSY_NS: u64 = 5_000_000;
/// Most allowance that may pile up, in seconds of the rate: more than a tick, so that a slow tick does not
/// cost rate.
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
            has_proved: false,
        }
    }

    /// The log begins a new life, in which copies that were to be written are not known: a scrub that has
    /// found some begins anew, and finds them again.
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

    /// Starts nothing new until every slot operation under way has ended, because these belong to positions
    /// that are void.
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

    /// The scrub, paused or not.
    pub(in crate::array) fn scrub_mut(&mut self) -> Option<&mut Pass> {
        self.scrub.as_mut()
    }

    /// The result of the last complete scrub.
    pub(in crate::array) fn last_scrub(&self) -> Option<ScrubResult> {
        self.last_scrub
    }

    /// How many scrubs were stopped so far.
    pub(super) fn scrubs_stopped(&self) -> u64 {
        self.scrubs_stopped
    }

    /// Counts a slot operation that has ended.
    pub(super) fn ended(&mut self) {
        self.running -= 1;
    }

    /// Nanoseconds for which rebuilds have waited for blocks that cannot be read, since a slot was last built
    /// whole.
    pub(super) fn patience_spent_ns(&self) -> u64 {
        self.patience_spent
    }

    /// Adds time for which a rebuild waits for blocks that cannot be read.
    pub(super) fn spend_patience(&mut self, ns: u64) {
        self.patience_spent += ns;
    }

    /// Lets rebuilds wait anew, because a slot was built whole.
    pub(super) fn restore_patience(&mut self) {
        self.patience_spent = 0;
    }

    /// Starts a scrub, or continues a paused one. False: it was already running.
    pub(in crate::array) fn start_scrub(&mut self) -> bool {
        let fresh = self.scrub.is_none();
        if fresh {
            self.scrub = Some(Pass::from(0));
        }
        let was_paused = std::mem::take(&mut self.scrub_paused);
        fresh || was_paused
    }

    /// Whether there is a scrub that is not paused.
    pub(in crate::array) fn scrub_is_running(&self) -> bool {
        self.scrub.is_some() && !self.scrub_paused
    }

    /// Whether there is a scrub that is paused.
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

    /// Marks the look at the superblocks as begun, if a scrub that may go on has yet to begin it. Returns
    /// whether it did.
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

    /// Whether slot operations may begin: not before all that belong to void positions have ended.
    fn goes_on(&mut self) -> bool {
        let is_drained = !self.draining || self.running == 0;
        self.draining &= !is_drained;
        is_drained
    }

    /// The turn that begins now, while the window and the allowance permit. `turns`: how many a scrub has.
    fn next_turn(&mut self, core: &Core, turns: u64) -> Option<Turn> {
        let window = (WINDOW_BYTES / (core.map.width() * core.map.chunk)).clamp(1, WINDOW_SLOTS);
        if self.running >= window {
            return None;
        }
        let is_rebuild = core.any_building();
        // Other slots do not wait for a device that is compared for hours.
        let gives_way = self.has_proved && core.has_others_to_build();
        if is_rebuild && !gives_way && core.has_unproven() {
            // It reads one chunk.
            let is_granted = self.take_allowance(core, core.map.chunk as f64);
            self.running += usize::from(is_granted);
            self.has_proved |= is_granted;
            return is_granted.then_some(Turn::Prove);
        }
        if is_rebuild {
            core.next_build_slot()?;
        } else {
            self.scrub.as_ref().filter(|_| !self.scrub_paused)?.progress.due(turns, core.now)?;
        }
        if !self.take_allowance(core, core.map.stripe_bytes() as f64) {
            return None;
        }
        self.running += 1;
        self.has_proved = false;
        if is_rebuild {
            return Some(Turn::Rebuild);
        }
        let progress = &mut self.scrub.as_mut()?.progress;
        let slot = progress.due(turns, core.now)?;
        progress.begin(slot);
        Some(Turn::Scrub(SlotIndex(slot)))
    }

    /// Pacing: a token bucket whose rate depends on whether clients are busy.
    fn take_allowance(&mut self, core: &Core, bytes: f64) -> bool {
        let busy = core.load.client_ops > 0 || core.now.nanos_since(core.load.last_client) < CLIENT_BUSY_NS;
        let rate = match (busy, core.config.rebuild_max) {
            (false, 0) => return true,
            (false, max) => max as f64,
            (true, 0) => core.config.rebuild_min as f64,
            (true, max) => core.config.rebuild_min.min(max) as f64,
        };
        let elapsed = core.now.nanos_since(self.topped_up) as f64 / 1e9;
        self.topped_up = core.now;
        // A stripe larger than the burst must still get its turn.
        let limit = (rate * BURST_SECONDS).max(bytes);
        self.allowance = (self.allowance + rate * elapsed).min(limit);
        let granted = self.allowance >= bytes;
        if granted {
            self.allowance -= bytes;
        }
        granted
    }

    /// Ends a turn of the scrub. One that was not complete is started again.
    pub(super) fn verified(&mut self, now: Timestamp, slot: SlotIndex, complete: bool) {
        self.ended();
        if let Some(pass) = &mut self.scrub {
            pass.progress.running.remove(&slot.0);
            // A turn that is read again comes back alone.
            if !complete && !pass.progress.put_back(slot.0, now) {
                pass.progress.rewind_to(slot.0);
            }
        }
    }

    /// Notes the members that the scrub cannot check in a slot.
    pub(super) fn note_unchecked_in(&mut self, core: &Core, slot: SlotIndex) {
        let Some(scrub) = &mut self.scrub else { return };
        let members = (0..core.map.width()).map(|column| core.member_at(slot, column));
        members
            .filter(|&member| core.readable(member, slot).is_none())
            .for_each(|member| scrub.note_unchecked(member));
    }

    /// Notes that the superblocks were looked at, or have to be looked at again.
    pub(super) fn verified_supers(&mut self, complete: bool) {
        if let Some(pass) = &mut self.scrub {
            pass.supers = if complete { SupersTurn::Over } else { SupersTurn::Due };
        }
    }

    /// Whether the scrub has been through everything.
    fn scrub_is_through(&self, turns: u64) -> bool {
        self.scrub.as_ref().is_some_and(|pass| pass.finished(turns))
    }

    /// Whether everything that a scrub found bad was written and read again; the scrub has been through
    /// everything. `next`: how many checkpoints will have ended with the next that begins; `ended`: how many
    /// have.
    fn settle_scrub(&mut self, next: u64, ended: u64) -> Settling {
        let Some(pass) = self.scrub.as_mut() else { return Settling::Over };
        if pass.owed.is_empty() && !pass.rereading {
            if pass.owed_again.is_empty() {
                return Settling::Over;
            }
            pass.owed = std::mem::take(&mut pass.owed_again);
            pass.settles = None;
            pass.rereads += 1;
        }
        let Some(checkpoint) = pass.settles else {
            // Not the one under way, which may have begun before.
            pass.settles = Some(next);
            return Settling::NeedsCheckpoint;
        };
        if ended < checkpoint || pass.rereading || self.scrub_paused {
            return Settling::UnderWay;
        }
        (pass.rereads, pass.rereading) = (pass.rereads.max(1), true);
        let Some(pages) = pass.next_reread(PAGES_PER_TURN) else { return Settling::UnderWay };
        self.running += 1;
        Settling::Reread(pages)
    }

    /// Ends the scrub, and returns its report. `has_checksums`: blocks are compared with checksums.
    fn end_scrub(&mut self, core: &Core, has_checksums: bool) -> Option<(NoticeLevel, String)> {
        let pass = self.scrub.take()?;
        // Two scrubs are distinguished by when they ended, also across a restart.
        let earlier = self.last_scrub.as_ref().map_or(0, |last| last.finished_unix + 1);
        let was_compared = has_checksums || pass.unchecked.len() < core.map.m;
        // A place that was not looked at, or not compared, does not refute what an earlier scrub has found
        // there.
        let stands = |last: &ScrubResult| last.errors.saturating_sub(last.repaired) > pass.errors;
        let saw_all = was_compared && pass.unchecked.is_empty();
        let standing = self.last_scrub.filter(|last| !saw_all && stands(last));
        let (errors, repaired) =
            standing.map_or((pass.errors, pass.repaired), |last| (last.errors, last.repaired));
        let result = ScrubResult {
            finished_unix: earlier.max(core.config.unix_at_zero + core.now.0 / 1_000_000_000),
            errors,
            repaired,
            unchecked: pass.unchecked,
        };
        let is_whole = pass.errors == 0 && pass.unchecked.is_empty() && was_compared;
        let level = if is_whole { NoticeLevel::Info } else { NoticeLevel::Warning };
        let mut text = format!("scrub finished: {}, {} repaired", Count(pass.errors, "error"), pass.repaired);
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
        self.last_scrub = Some(result);
        Some((level, text))
    }

    /// The scrub, for the status. `rest`: why it does nothing now, if it is not paused.
    fn scrub_activity(&self, map: &Map, rest: Option<Rest>) -> Option<Activity> {
        let pass = self.scrub.as_ref()?;
        let bytes = |slot: u64| slot * map.stripe_bytes() as u64;
        Some(Activity {
            kind: ActivityKind::Scrub,
            done_bytes: bytes(pass.progress.covered().min(map.slots)),
            total_bytes: bytes(map.slots),
            retried: pass.progress.retried(),
            retried_pages: 0,
            rest: if self.scrub_paused { Some(Rest::Paused) } else { rest },
            errors: pass.errors,
            repaired: pass.repaired,
        })
    }
}

impl Array {
    /// Keeps a scrub paused that was under way when the array was stopped.
    pub fn keep_scrub_paused(&mut self) {
        self.passes.pause_scrub();
    }

    /// Starts slot operations while the window and the allowance permit.
    pub(in crate::array) fn pump_passes(&mut self) {
        if self.core.is_failed() || self.core.stop.stopping.is_some() || !self.redo.is_settled() {
            return;
        }
        if !self.passes.goes_on() {
            return;
        }
        self.end_finished_passes();
        if self.passes.take_supers_turn() {
            self.start_super_scrub();
        }
        let turns = self.scrub_turns();
        while let Some(turn) = self.passes.next_turn(&self.core, turns) {
            match turn {
                Turn::Rebuild => match self.core.begin_build() {
                    Some((slot, targets)) => self.start_logged_rebuild(slot, targets),
                    None => self.passes.ended(),
                },
                Turn::Prove => match self.core.begin_proof() {
                    Some((slot, target)) => self.start_proof(slot, target),
                    None => self.passes.ended(),
                },
                Turn::Scrub(slot) if slot.0 >= self.core.map.slots => self.start_page_scrub(slot.0),
                Turn::Scrub(slot) => self.start_logged_scrub(slot),
            }
        }
    }

    fn end_finished_passes(&mut self) {
        let has_checksums = self.pages.checksums().is_some();
        if self.passes.scrub_is_through(self.scrub_turns())
            && self.scrub_has_settled()
            && let Some((level, text)) = self.passes.end_scrub(&self.core, has_checksums)
        {
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

    /// Whether everything that a scrub found bad was written and read again; the scrub has been through
    /// everything.
    fn scrub_has_settled(&mut self) -> bool {
        match self.passes.settle_scrub(self.redo.next_checkpoint(), self.redo.checkpoints_ended()) {
            Settling::Over => return true,
            Settling::UnderWay => {}
            Settling::NeedsCheckpoint => _ = self.redo.want_whole_checkpoint(),
            Settling::Reread(pages) => self.start_page_reread(pages),
        }
        false
    }

    pub(in crate::array) fn activities(&self) -> Vec<Activity> {
        let slots = self.core.map.slots;
        let bytes = |slot: u64| slot * self.core.map.stripe_bytes() as u64;
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
                rest: held.or(self.core.all_builds_are_held().then_some(Rest::ForLanes)),
                errors: 0,
                repaired: 0,
            });
        }
        let rest = held.or((!all.is_empty()).then_some(Rest::ForRebuild));
        all.extend(self.passes.scrub_activity(&self.core.map, rest));
        all.extend(self.repair_activity());
        all
    }

    /// Ends slot operations that wait for a lock, because its holder may never release it.
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
                Op::SuperScrub(op) => self.end_super_scrub(key, op),
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
