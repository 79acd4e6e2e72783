//! Pages that cannot be read for now (rule T3): who waits for them, when they are looked at again, and when a request that
//! waits gets an error. Nothing is decided about what they hold.
//!
//! A page is tried again with growing intervals for [`PATIENCE_NS`] after the first try. Then those who wait are told, and from
//! then on each request has the page looked at once, until it can be read.

use super::page_copies::Torn;
use super::pages::{LoadOutcome, Loaded, Want};
use super::{Array, NoticeKind, NoticeLevel};
use crate::format::PageIndex;
use crate::units::Timestamp;
use std::collections::BTreeMap;

/// A request waits this long for a page that cannot be read: longer than a path of a disk takes to come back, and far below
/// the 30 s after which the kernel's NBD client gives a request up.
const PATIENCE_NS: u64 = 3_000_000_000;
/// The first interval between two tries; each is twice as long as the one before.
const INTERVAL_MIN_NS: u64 = 50_000_000;
/// The longest interval between two tries.
const INTERVAL_MAX_NS: u64 = 800_000_000;
/// Pages that were given up are remembered up to so many: of one more, the next request waits as for any page.
const GIVEN_UP_MAX: usize = 65_536;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct UnreadablePages {
    pages: BTreeMap<PageIndex, Trial>,
}

#[derive(Debug)]
struct Trial {
    since: Timestamp,
    interval_ns: u64,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Is being read.
    Trying,
    /// Is read again at this time, for these tickets.
    Waiting(Timestamp, Vec<usize>),
    /// Requests were told so.
    GivenUp,
}

impl UnreadablePages {
    /// Whether the page waits to be read again; the ticket then waits with it.
    pub fn joins(&mut self, page: PageIndex, ticket: usize) -> bool {
        match self.pages.get_mut(&page).map(|trial| &mut trial.stage) {
            Some(Stage::Waiting(_, tickets)) => {
                tickets.push(ticket);
                true
            }
            _ => false,
        }
    }

    /// A try has failed. Returns the tickets that are to be told, and whether they are the first to be.
    fn failed(
        &mut self,
        page: PageIndex,
        now: Timestamp,
        is_hopeless: bool,
        tickets: Vec<usize>,
    ) -> Option<(Vec<usize>, bool)> {
        let fresh = Trial { since: now, interval_ns: INTERVAL_MIN_NS, stage: Stage::Trying };
        let trial = self.pages.entry(page).or_insert(fresh);
        let was_given_up = matches!(trial.stage, Stage::GivenUp);
        if was_given_up || is_hopeless || now.nanos_since(trial.since) >= PATIENCE_NS {
            trial.stage = Stage::GivenUp;
            if self.pages.len() > GIVEN_UP_MAX {
                self.pages.remove(&page);
            }
            return Some((tickets, !was_given_up));
        }
        trial.stage = Stage::Waiting(Timestamp(now.0 + trial.interval_ns), tickets);
        trial.interval_ns = (2 * trial.interval_ns).min(INTERVAL_MAX_NS);
        None
    }

    /// The pages that are to be read again, with those who wait; all, if `all`.
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

impl Array {
    /// A load has ended without a page.
    pub(super) fn page_unreadable(&mut self, page: PageIndex, loaded: Loaded) {
        let now = self.now;
        // Waiting brings back no member.
        let is_hopeless = loaded.unread.as_ref().is_some_and(|unread| !unread.by_error);
        let told = self.redo_mut().unreadable.failed(page, now, is_hopeless, loaded.waiters);
        let Some((tickets, is_first)) = told else { return };
        if is_first {
            let why = loaded.unread.map_or_else(String::new, |unread| unread.text);
            let text = format!(
                "metadata page {} cannot be read for now ({why}): what it has the checksums of is answered with errors until it \\
                 can; nothing is given up",
                page.0
            );
            self.notice(NoticeKind::PageUnreadable, NoticeLevel::Error, None, text);
        }
        self.page_arrived(page, LoadOutcome::Unreadable, tickets);
    }

    /// A page was loaded after all.
    pub(super) fn page_readable(&mut self, page: PageIndex) {
        if let Some(Trial { stage: Stage::GivenUp, .. }) = self.redo_mut().unreadable.pages.remove(&page) {
            let text = format!("metadata page {} can be read again", page.0);
            self.notice(NoticeKind::PageReadable, NoticeLevel::Info, None, text);
        }
    }

    /// Tick: pages that could not be read are read again.
    pub(super) fn retry_pages(&mut self) {
        let now = self.now;
        let usable = self.online();
        for (page, tickets) in self.redo_mut().unreadable.take_due(now, false) {
            let mut ended = Vec::new();
            let mut io = Vec::new();
            let redo = self.redo_mut();
            for ticket in tickets {
                if !redo.page_tickets.contains_key(&ticket) {
                    continue;
                }
                let usable = |member| usable.contains(member);
                match redo.pages.want(page, ticket, Torn::Impossible, &usable, &mut io) {
                    Want::Loading => {}
                    Want::Cached => ended.push((ticket, LoadOutcome::Ready)),
                    // The array has failed, and whoever asks ends for that.
                    Want::BeingWritten | Want::Unavailable => ended.push((ticket, LoadOutcome::Unreadable)),
                }
            }
            if io.is_empty() {
                redo.unreadable.pages.remove(&page);
            }
            for (ticket, outcome) in ended {
                self.page_arrived(page, outcome, vec![ticket]);
            }
            self.send_page_io(io);
        }
    }

    /// The array has failed, or stops: whoever waits for a page is told at once.
    pub(super) fn end_page_trials(&mut self) {
        let now = self.now;
        for (page, tickets) in self.redo_mut().unreadable.take_due(now, true) {
            self.page_arrived(page, LoadOutcome::Unreadable, tickets);
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
    fn nobody_waits_for_members_that_are_not_there() {
        let mut pages = UnreadablePages::default();
        assert_eq!(pages.failed(PageIndex(0), Timestamp(5), true, vec![1]), Some((vec![1], true)));
    }
}
