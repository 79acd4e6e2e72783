//! The order of an array's requests: which request waits for which. Knows every modifying request, in the
//! volume or waiting, by the blocks that it touches.
//!
//! Invariants: a request waits only for one that came before it, or for an orphan, which the volume already
//! has; so there is always a request that can go on. Finding what a request waits for takes logarithmic time
//! in the number of requests (`ranges`); a request that ends wakes only those that wait for it. A woken
//! request searches again, at most once for each request that came before it. Must not know clients, or what
//! a volume does.

use super::ranges::Ranges;
pub(super) use super::ranges::Ticket;
use calpe_core::nbd::Request;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

/// What the protocol has made sure of.
const RANGE_OF_VOLUME: &str = "a request lies within its export";

/// What a request touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Its blocks, as a range of bytes.
    pub(super) bytes: Range<u64>,
    /// Whether it changes them.
    pub(super) modifies: bool,
    /// Whether it begins or ends within a block.
    pub(super) uneven: bool,
}

impl Span {
    /// The span of a request to a volume whose blocks have `block` bytes.
    pub(super) fn of(request: &Request, block: u64) -> Span {
        let bytes = blocks_of(request, block);
        let modifies = request.command.modifies();
        let uneven = modifies && bytes != (request.offset..request.offset + request.length);
        Span { bytes, modifies, uneven }
    }
}

/// The blocks that a request touches, as a range of bytes.
pub(super) fn blocks_of(request: &Request, block: u64) -> Range<u64> {
    let end = request.offset.saturating_add(request.length);
    request.offset / block * block..end.checked_next_multiple_of(block).expect(RANGE_OF_VOLUME)
}

/// See the head of this file. `W` is a request that waits.
#[derive(Debug)]
pub(super) struct Precedence<W> {
    next: Ticket,
    /// All modifying requests.
    all: Ranges,
    /// Those of them that begin or end within a block.
    uneven: Ranges,
    /// Modifying requests of clients that hung up, which the volume still has.
    orphans: Ranges,
    waiting: HashMap<Ticket, W>,
    /// Waiting requests, by the one that they wait for.
    behind: HashMap<Ticket, Vec<Ticket>>,
}

impl<W> Default for Precedence<W> {
    fn default() -> Precedence<W> {
        Precedence {
            next: 0,
            all: Ranges::default(),
            uneven: Ranges::default(),
            orphans: Ranges::default(),
            waiting: HashMap::new(),
            behind: HashMap::new(),
        }
    }
}

impl<W> Precedence<W> {
    /// Enters a new request. Returns its ticket, and the last of the requests that it has to wait for.
    pub(super) fn enter(&mut self, span: &Span) -> (Ticket, Option<Ticket>) {
        let ticket = self.next;
        self.next += 1;
        let last = self.orphan_of(span).or_else(|| Some(self.others(span)?.overlapping(&span.bytes)?.last));
        if span.modifies {
            self.all.insert(&span.bytes, ticket);
            if span.uneven {
                self.uneven.insert(&span.bytes, ticket);
            }
        }
        (ticket, last)
    }

    /// What an entered request has to wait for, if anything: an orphan that it overlaps, or, for a modifying
    /// request, the first earlier modifying request of a block of its own, where one of the two begins or
    /// ends within a block.
    pub(super) fn blocker(&self, span: &Span, ticket: Ticket) -> Option<Ticket> {
        let earlier = || self.others(span)?.overlapping(&span.bytes).map(|others| others.first);
        self.orphan_of(span).or_else(|| earlier().filter(|&first| first < ticket))
    }

    fn orphan_of(&self, span: &Span) -> Option<Ticket> {
        Some(self.orphans.overlapping(&span.bytes)?.last)
    }

    /// The requests that a new one waits for where they overlap it.
    fn others(&self, span: &Span) -> Option<&Ranges> {
        span.modifies.then_some(if span.uneven { &self.all } else { &self.uneven })
    }

    /// Makes a request wait behind another one.
    pub(super) fn wait(&mut self, ticket: Ticket, behind: Ticket, waiting: W) {
        self.waiting.insert(ticket, waiting);
        self.behind.entry(behind).or_default().push(ticket);
    }

    /// A request that waits.
    pub(super) fn waiting(&self, ticket: Ticket) -> Option<&W> {
        self.waiting.get(&ticket)
    }

    /// Takes a waiting request out to go on; it keeps its place in the order.
    pub(super) fn resume(&mut self, ticket: Ticket) -> Option<W> {
        self.waiting.remove(&ticket)
    }

    /// Marks a request in the volume as an orphan: its client has hung up.
    pub(super) fn orphan(&mut self, span: &Span, ticket: Ticket) {
        self.orphans.insert(&span.bytes, ticket);
    }

    /// Removes a request that has ended or is given up. Returns those that waited for it.
    pub(super) fn leave(&mut self, span: &Span, ticket: Ticket) -> Vec<Ticket> {
        if span.modifies {
            self.all.remove(&span.bytes, ticket);
            if span.uneven {
                self.uneven.remove(&span.bytes, ticket);
            }
            self.orphans.remove(&span.bytes, ticket);
        }
        self.behind.remove(&ticket).unwrap_or_default()
    }

    /// All that wait, in the order in which they came, with their tickets.
    pub(super) fn into_waiting(self) -> impl Iterator<Item = (Ticket, W)> {
        self.waiting.into_iter().collect::<BTreeMap<_, _>>().into_iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn span(bytes: Range<u64>, modifies: bool, uneven: bool) -> Span {
        Span { bytes, modifies, uneven: uneven && modifies }
    }

    #[test]
    fn those_that_wait_for_one_block_go_one_after_the_other() {
        let mut order = Precedence::default();
        let block = span(4096..8192, true, true);
        let (first, behind) = order.enter(&block);
        assert_eq!(behind, None);
        let mut tickets = vec![first];
        for nth in 1..1000 {
            let (ticket, behind) = order.enter(&block);
            assert_eq!(behind, Some(tickets[nth - 1]));
            order.wait(ticket, tickets[nth - 1], ticket);
            tickets.push(ticket);
        }
        for pair in tickets.windows(2) {
            assert_eq!(order.leave(&block, pair[0]), vec![pair[1]]);
            assert_eq!(order.resume(pair[1]), Some(pair[1]));
            assert_eq!(order.blocker(&block, pair[1]), None);
        }
        assert!(order.leave(&block, tickets[999]).is_empty());
        assert!(order.all.is_empty() && order.uneven.is_empty() && order.behind.is_empty());
    }

    #[test]
    fn whatever_overlaps_an_orphan_waits_for_it_and_other_reads_wait_for_nothing() {
        let mut order: Precedence<()> = Precedence::default();
        let write = span(0..4096, true, false);
        let (ticket, _) = order.enter(&write);
        let read = span(0..4096, false, false);
        let (mine, behind) = order.enter(&read);
        assert_eq!((behind, order.blocker(&read, mine)), (None, None));
        order.orphan(&write, ticket);
        assert_eq!((order.blocker(&read, mine), order.enter(&read).1), (Some(ticket), Some(ticket)));
        assert_eq!(order.blocker(&span(4096..8192, true, true), 9), None);
        order.leave(&write, ticket);
        assert_eq!(order.blocker(&read, mine), None);
    }

    proptest! {
        /// The order finds what a scan of all requests finds.
        #[test]
        fn those_that_overlap_are_found(
            entries in prop::collection::vec((0..300u64, 1..80u64, any::<bool>()), 1..120),
            gone in prop::collection::vec(any::<bool>(), 120),
            (start, len, uneven) in (0..300u64, 1..80u64, any::<bool>()),
            before in 0..130u64,
        ) {
            let mut order: Precedence<()> = Precedence::default();
            let mut left = Vec::new();
            for ((start, len, uneven), gone) in entries.into_iter().zip(gone) {
                let span = span(start * 512..(start + len) * 512, true, uneven);
                let (ticket, _) = order.enter(&span);
                if gone {
                    order.leave(&span, ticket);
                } else {
                    left.push((ticket, span));
                }
            }
            let mine = span(start * 512..(start + len) * 512, true, uneven);
            let overlaps = |(_, other): &&(Ticket, Span)| {
                (uneven || other.uneven)
                    && other.bytes.start < mine.bytes.end
                    && mine.bytes.start < other.bytes.end
            };
            let others: Vec<Ticket> = left.iter().filter(overlaps).map(|(ticket, _)| *ticket).collect();
            // One that was there before some of the others, and one that comes now.
            let first = others.iter().copied().min().filter(|&first| first < before);
            prop_assert_eq!(order.blocker(&mine, before), first);
            prop_assert_eq!(order.enter(&mine).1, others.into_iter().max());
        }
    }
}
