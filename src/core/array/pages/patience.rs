//! Pages that cannot be read for now (rule T3): which requests wait for them, when they are read again, and
//! when a waiting request gets an error. Nothing is decided about their content.
//!
//! A page is tried again with growing intervals for [`PATIENCE_NS`] after the first try. Then the waiting
//! requests get an error. From then on each request has the page read once, until it can be read, and the
//! array itself reads a few such pages at a time.
//!
//! The build of a device waits for no single page: it goes on and comes back. However many pages cannot be
//! read, they cost no more than their reads ([`AT_ONCE`]).

use crate::array::geometry::Map;
use crate::array::pages::Pages;
use crate::array::pages::copies::Torn;
use crate::array::pages::store::{LoadOutcome, Loaded, Want};
use crate::array::{Core, NoticeKind, NoticeLevel};
use crate::format::PageIndex;
use crate::units::{ROW_BYTES, SlotIndex, Timestamp, VolumeOffset};
use std::collections::BTreeMap;

/// A request waits this long for a page that cannot be read: longer than a path of a disk takes to come back,
/// and far below the 30 s after which the kernel's NBD client gives up a request.
const PATIENCE_NS: u64 = 3_000_000_000;
/// The first interval between two tries; each is twice as long as the one before.
const INTERVAL_MIN_NS: u64 = 50_000_000;
/// The longest interval between two tries.
const INTERVAL_MAX_NS: u64 = 800_000_000;
/// Most pages that are remembered as given up. Requests for another one wait as for any page.
const GIVEN_UP_MAX: usize = 65_536;

/// A ticket with this bit gets its answer at the first try that fails.
pub(super) const AT_ONCE: usize = 1 << (usize::BITS - 1);

/// See the head of this file.
#[derive(Debug, Default)]
pub(in crate::array) struct UnreadablePages {
    pages: BTreeMap<PageIndex, Trial>,
    /// Counts changes of which pages are given up.
    revision: u64,
    /// The next look begins behind this page.
    looked_at: Option<PageIndex>,
    /// When pages that were given up are looked at again.
    look_at: Timestamp,
    /// Pages with data behind them that a device was built without, and for which no request got an error.
    lacked: usize,
    /// The page that could not be read last, and why.
    last: Option<(PageIndex, String)>,
}

#[derive(Debug)]
struct Trial {
    since: Timestamp,
    interval_ns: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// It is being read.
    Trying,
    /// It is read again at this time, for these tickets.
    Waiting(Timestamp, Vec<usize>),
    /// Requests got an error for it.
    GivenUp,
    /// A device was built without it, and no request got an error for it; whether there is data behind it.
    Lacked(bool),
}

/// How many pages that were given up are looked at again at a time, and how long after each other: a look
/// costs a read of each copy.
const LOOK_ROUND: usize = 16;
const LOOK_INTERVAL_NS: u64 = 5_000_000_000;
/// The interval after a page of the last round was readable: others are then likely to be.
const LOOK_INTERVAL_FOUND_NS: u64 = 100_000_000;
/// Most pages whose blocks are listed: the status is asked for with every tick.
const LISTED_MAX: usize = 2048;

impl UnreadablePages {
    /// Whether the page waits to be read again. The ticket then waits with it, unless it gets its answer at
    /// the first try.
    pub(super) fn joins(&mut self, page: PageIndex, ticket: usize) -> bool {
        match self.pages.get_mut(&page).map(|trial| &mut trial.stage) {
            Some(Stage::Waiting(_, tickets)) => {
                if ticket & AT_ONCE == 0 {
                    tickets.push(ticket);
                }
                true
            }
            _ => false,
        }
    }

    /// Whether the page could not be read when it was last tried.
    pub(super) fn is_known(&self, page: PageIndex) -> bool {
        self.pages.contains_key(&page)
    }

    /// Records that a try has failed. Returns the tickets that get an error, and whether they are the first
    /// to.
    fn failed(
        &mut self,
        page: PageIndex,
        now: Timestamp,
        is_hopeless: bool,
        tickets: Vec<usize>,
    ) -> Option<(Vec<usize>, bool)> {
        let (at_once, waiting): (Vec<usize>, Vec<usize>) =
            tickets.into_iter().partition(|ticket| ticket & AT_ONCE != 0);
        if waiting.is_empty() && !at_once.is_empty() {
            // What is recorded of the page does not change.
            if matches!(self.pages.get(&page), Some(Trial { stage: Stage::Trying, .. })) {
                self.pages.remove(&page);
            }
            return Some((at_once, false));
        }
        let fresh = || Trial { since: now, interval_ns: INTERVAL_MIN_NS, stage: Stage::Trying };
        let trial = self.pages.entry(page).or_insert_with(fresh);
        let was_lacked = matches!(trial.stage, Stage::Lacked(true));
        self.lacked -= usize::from(was_lacked);
        if matches!(trial.stage, Stage::Lacked(false)) {
            *trial = fresh();
        }
        let was_given_up = matches!(trial.stage, Stage::GivenUp);
        if was_given_up || was_lacked || is_hopeless || now.nanos_since(trial.since) >= PATIENCE_NS {
            trial.stage = Stage::GivenUp;
            self.revision += u64::from(!was_given_up);
            if self.pages.len() > GIVEN_UP_MAX {
                self.pages.remove(&page);
            }
            return Some(([at_once, waiting].concat(), !was_given_up));
        }
        trial.stage = Stage::Waiting(Timestamp(now.0 + trial.interval_ns), waiting);
        trial.interval_ns = (2 * trial.interval_ns).min(INTERVAL_MAX_NS);
        (!at_once.is_empty()).then_some((at_once, false))
    }

    /// Records that a device is built without this page, and whether there is data behind it. The page is
    /// looked at again like one that was given up.
    fn lacks(&mut self, page: PageIndex, has_data: bool) {
        if self.pages.len() < GIVEN_UP_MAX && !self.pages.contains_key(&page) {
            let stage = Stage::Lacked(has_data);
            self.pages.insert(page, Trial { since: Timestamp(0), interval_ns: INTERVAL_MIN_NS, stage });
            self.lacked += usize::from(has_data);
            self.revision += u64::from(has_data);
        }
    }

    /// The page that could not be read last and the reason, in words.
    fn last_of_all(&self) -> String {
        self.last.as_ref().map_or_else(String::new, |(page, why)| format!(" (page {}: {why})", page.0))
    }

    /// Pages that are looked at again, ascending.
    fn looked_for(&self) -> impl Iterator<Item = PageIndex> + '_ {
        let is_looked_for = |trial: &Trial| matches!(trial.stage, Stage::GivenUp | Stage::Lacked(_));
        self.pages.iter().filter(move |(_, trial)| is_looked_for(trial)).map(|(&page, _)| page)
    }

    /// Pages for which requests got an error, or would, ascending.
    fn given_up(&self) -> impl Iterator<Item = PageIndex> + '_ {
        let is_given_up = |trial: &Trial| matches!(trial.stage, Stage::GivenUp | Stage::Lacked(true));
        self.pages.iter().filter(move |(_, trial)| is_given_up(trial)).map(|(&page, _)| page)
    }

    /// The pages of the next look, if one is due.
    fn take_round(&mut self, now: Timestamp) -> Vec<PageIndex> {
        if self.pages.is_empty() || now < self.look_at {
            return Vec::new();
        }
        self.look_at = Timestamp(now.0 + LOOK_INTERVAL_NS);
        let after = self.looked_at;
        let behind = self.looked_for().filter(|&page| after.is_none_or(|after| page > after));
        let mut round: Vec<PageIndex> = behind.take(LOOK_ROUND).collect();
        if round.is_empty() {
            round = self.looked_for().take(LOOK_ROUND).collect();
        }
        self.looked_at = round.last().copied();
        round
    }

    /// Records that the page was read. Returns whether requests had got an error for it.
    fn readable(&mut self, page: PageIndex, now: Timestamp) -> bool {
        let trial = self.pages.remove(&page);
        let was_given_up = matches!(trial, Some(Trial { stage: Stage::GivenUp, .. }));
        let was_lacked = matches!(trial, Some(Trial { stage: Stage::Lacked(true), .. }));
        self.lacked -= usize::from(was_lacked);
        if was_given_up || matches!(trial, Some(Trial { stage: Stage::Lacked(_), .. })) {
            self.revision += 1;
            self.look_at = self.look_at.min(Timestamp(now.0 + LOOK_INTERVAL_FOUND_NS));
        }
        was_given_up
    }

    /// Has pages that were given up looked at soon, since there are new copies.
    pub(super) fn look_soon(&mut self, now: Timestamp) {
        self.look_at = self.look_at.min(now);
    }

    /// The pages that are due to be read again, with the operations that wait for them; all such pages, if
    /// `all`.
    fn take_due(&mut self, now: Timestamp, all: bool) -> Vec<(PageIndex, Vec<usize>)> {
        let mut due = Vec::new();
        for (&page, trial) in &mut self.pages {
            if let Stage::Waiting(at, tickets) = &mut trial.stage
                && (all || *at <= now)
            {
                due.push((page, std::mem::take(tickets)));
                trial.stage = Stage::Trying;
            }
        }
        due
    }
}

impl Pages {
    /// Handles a load that has ended without its page.
    pub(in crate::array) fn not_read(&mut self, core: &mut Core, page: PageIndex, loaded: Loaded) {
        // Waiting does not bring a member back.
        let is_hopeless = loaded.unread.as_ref().is_some_and(|unread| !unread.by_error);
        let told = self.unreadable.failed(page, core.now, is_hopeless, loaded.waiters);
        self.unreadable.last = loaded.unread.as_ref().map(|unread| (page, unread.text.clone()));
        let Some((tickets, is_first)) = told else { return };
        if is_first {
            let why = loaded.unread.map_or_else(String::new, |unread| unread.text);
            let text = format!(
                "metadata page {} cannot be read for now ({why}): what it has the checksums of is answered with errors until it can be \
                 read; nothing is given up",
                page.0
            );
            core.notice(NoticeKind::PageUnreadable, NoticeLevel::Error, None, text);
        }
        self.arrived(core, page, LoadOutcome::Unreadable, tickets);
    }

    /// Handles a load that has brought a page that could not be read before.
    pub(in crate::array) fn read(&mut self, core: &mut Core, page: PageIndex) {
        let lacked = self.unreadable.lacked;
        let was_told = self.unreadable.readable(page, core.now);
        if lacked == 1 && self.unreadable.lacked == 0 {
            let text = "metadata pages that a new device went without can be read again".to_owned();
            core.notice(NoticeKind::PageReadable, NoticeLevel::Info, None, text);
        }
        if was_told {
            let text = format!("metadata page {} can be read again", page.0);
            core.notice(NoticeKind::PageReadable, NoticeLevel::Info, None, text);
        }
    }

    /// Tick: reads pages again that could not be read.
    pub(in crate::array) fn retry(&mut self, core: &mut Core) {
        let usable = core.online();
        for (page, tickets) in self.unreadable.take_due(core.now, false) {
            let mut ended = Vec::new();
            let mut io = Vec::new();
            for ticket in tickets {
                if !self.tickets.contains_key(&ticket) {
                    continue;
                }
                let usable = |member| usable.contains(member);
                match self.store.want(page, ticket, Torn::Impossible, &usable, &mut io) {
                    Want::Loading => {}
                    Want::Cached => ended.push((ticket, LoadOutcome::Ready)),
                    // The array has failed, and operations that ask end because of that.
                    Want::BeingWritten | Want::Unavailable => ended.push((ticket, LoadOutcome::Unreadable)),
                }
            }
            if io.is_empty() {
                self.unreadable.pages.remove(&page);
            }
            for (ticket, outcome) in ended {
                self.arrived(core, page, outcome, vec![ticket]);
            }
            self.send(core, io);
        }
    }

    /// Tick: looks at pages again that were given up, a few at a time.
    pub(in crate::array) fn look(&mut self, core: &mut Core) {
        let usable = core.online();
        let mut io = Vec::new();
        for page in self.unreadable.take_round(core.now) {
            // No operation holds this ticket: the result shows in whether the page is still given up.
            let ticket = self.new_ticket(true);
            let usable = |member| usable.contains(member);
            match self.store.want(page, ticket, Torn::Impossible, &usable, &mut io) {
                Want::Cached => {
                    self.store.release(page);
                    self.unreadable.readable(page, core.now);
                }
                Want::Loading | Want::BeingWritten | Want::Unavailable => {}
            }
        }
        self.send(core, io);
    }

    /// Records that a device is built without this page, and whether there is data behind it.
    pub(in crate::array) fn lacks(&mut self, page: PageIndex, has_data: bool) {
        self.unreadable.lacks(page, has_data);
    }

    /// The page that could not be read last and the reason, in words.
    pub(in crate::array) fn last_unreadable(&self) -> String {
        self.unreadable.last_of_all()
    }

    /// A number that changes whenever a page is given up, or can be read again.
    pub(in crate::array) fn given_up_revision(&self) -> u64 {
        self.unreadable.revision
    }

    /// How many metadata pages were given up.
    pub(in crate::array) fn count_given_up(&self) -> u64 {
        self.unreadable.given_up().count() as u64
    }

    /// Byte ranges of the volume that cannot be read or written because pages with their checksums cannot be
    /// read, in no order.
    pub(in crate::array) fn ranges_given_up(&self, map: &Map) -> Vec<(VolumeOffset, u64)> {
        let layout = self.store.layout();
        let rows = map.chunk / ROW_BYTES as usize;
        let mut ranges = Vec::new();
        for page in self.unreadable.given_up().take(LISTED_MAX) {
            for slot in layout.slots_of(page).map(SlotIndex) {
                let Some(stripe) = self.stripes.stripe_at(slot).filter(|&stripe| self.holds_data(stripe))
                else {
                    continue;
                };
                let is_behind = |row: &usize| layout.hash_pages(slot, *row..row + 1).contains(&page.0);
                let Some(first) = (0..rows).find(is_behind) else { continue };
                let count = (first..rows).take_while(is_behind).count() as u64;
                for column in 0..map.k {
                    let within = column * map.chunk + first * ROW_BYTES as usize;
                    let start = stripe.0 * map.stripe_bytes() as u64 + within as u64;
                    ranges.push((VolumeOffset(start), count * ROW_BYTES));
                }
            }
        }
        ranges
    }

    /// Ends all waiting for pages at once: the array has failed, or stops.
    pub(in crate::array) fn end_trials(&mut self, core: &mut Core) {
        for (page, tickets) in self.unreadable.take_due(core.now, true) {
            self.arrived(core, page, LoadOutcome::Unreadable, tickets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_tried_with_growing_intervals_then_given_up_and_then_tried_once_for_each_request() {
        let mut pages = UnreadablePages::default();
        let page = PageIndex(3);
        let mut now = Timestamp(1_000_000_000);
        let mut tries = 0;
        let mut tickets = vec![1];
        loop {
            match pages.failed(page, now, false, std::mem::take(&mut tickets)) {
                None => {}
                Some(told) => {
                    assert_eq!(told, (vec![1, 2], true));
                    break;
                }
            }
            assert!(pages.joins(page, 2));
            tickets = vec![1, 2];
            let before = now;
            while pages.take_due(now, false).is_empty() {
                now.0 += 10_000_000;
            }
            assert!(now.nanos_since(before) <= INTERVAL_MAX_NS);
            tries += 1;
        }
        assert!(tries >= 6, "{tries}");
        assert!(
            (PATIENCE_NS..PATIENCE_NS + INTERVAL_MAX_NS).contains(&now.nanos_since(Timestamp(1_000_000_000)))
        );
        assert!(!pages.joins(page, 3), "it is looked at at once");
        assert_eq!(pages.failed(page, now, false, vec![3]), Some((vec![3], false)));
    }

    #[test]
    fn pages_given_up_are_looked_at_in_turn_and_soon_after_one_was_readable() {
        let mut pages = UnreadablePages::default();
        let many = 2 * LOOK_ROUND as u64;
        (0..many).for_each(|page| _ = pages.failed(PageIndex(page), Timestamp(0), true, Vec::new()));
        let at = Timestamp(LOOK_INTERVAL_NS);
        let round = |first: u64| (first..first + LOOK_ROUND as u64).map(PageIndex).collect::<Vec<_>>();
        assert_eq!(pages.take_round(at), round(0));
        assert!(pages.take_round(at).is_empty(), "not due");
        let before = pages.revision;
        assert!(pages.readable(PageIndex(3), at) && !pages.readable(PageIndex(3), at));
        assert_ne!(pages.revision, before);
        assert_eq!(pages.take_round(Timestamp(at.0 + LOOK_INTERVAL_FOUND_NS)), round(LOOK_ROUND as u64));
        assert_eq!(pages.take_round(Timestamp(at.0 + 2 * LOOK_INTERVAL_NS))[0], PageIndex(0), "in turn");
    }

    #[test]
    fn a_build_gets_its_answer_at_once_and_nothing_is_recorded_of_the_page() {
        let mut pages = UnreadablePages::default();
        let (page, now, build) = (PageIndex(3), Timestamp(5), 7 | AT_ONCE);
        assert_eq!(pages.failed(page, now, false, vec![build]), Some((vec![build], false)));
        assert!(!pages.joins(page, 1), "it is looked at at once");
        assert_eq!(pages.failed(page, now, false, vec![1, build]), Some((vec![build], false)));
        assert!(pages.joins(page, build) && pages.joins(page, 2));
        assert_eq!(pages.take_due(now, true), [(page, vec![1, 2])]);
        let end = Timestamp(now.0 + PATIENCE_NS);
        assert_eq!(pages.failed(page, end, false, vec![build, 1, 2]), Some((vec![build, 1, 2], true)));
        assert_eq!(pages.failed(page, end, false, vec![build]), Some((vec![build], false)));
        assert_eq!(pages.given_up().count(), 1);
    }

    #[test]
    fn pages_that_a_device_was_built_without_are_looked_at_and_count_if_data_is_behind_them() {
        let mut pages = UnreadablePages::default();
        let (data, none, now) = (PageIndex(1), PageIndex(2), Timestamp(LOOK_INTERVAL_NS));
        pages.lacks(data, true);
        pages.lacks(none, false);
        assert_eq!(pages.given_up().collect::<Vec<_>>(), [data]);
        assert_eq!(pages.take_round(now), [data, none]);
        let looks = vec![AT_ONCE];
        assert_eq!(pages.failed(none, now, false, looks.clone()), Some((looks, false)));
        assert_eq!(pages.failed(data, now, false, vec![1]), Some((vec![1], true)), "it was tried for long");
        assert_eq!(pages.failed(none, now, false, vec![1]), None, "a request waits for it");
        assert!(pages.readable(data, now) && !pages.readable(none, now));
        assert_eq!((pages.lacked, pages.pages.len()), (0, 0));
    }

    #[test]
    fn no_request_waits_for_members_that_are_not_here() {
        let mut pages = UnreadablePages::default();
        assert_eq!(pages.failed(PageIndex(0), Timestamp(5), true, vec![1]), Some((vec![1], true)));
    }
}
