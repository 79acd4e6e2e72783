//! Which request of an array waits for which: all that modify, given to the volume or waiting, found by the blocks that they
//! touch.
//!
//! Invariants: a request waits for one that came before it, or for an orphan, which the volume has: so something always
//! goes on. To find what a request has to wait for takes steps by the logarithm of how many there are, whoever sent them, as
//! long as they do not differ in their lengths; one that ends is found by those that wait for it alone. Must not know
//! clients, or what a request does.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

/// Number of a request; later ones have larger numbers.
pub(super) type Ticket = u64;

/// What a request touches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Span {
    /// Its blocks, as a range of bytes.
    pub(super) bytes: Range<u64>,
    /// It changes them.
    pub(super) modifies: bool,
    /// It begins or ends within a block.
    pub(super) uneven: bool,
}

/// See the head of this file. `W` is a request that waits.
#[derive(Debug)]
pub(super) struct Precedence<W> {
    next: Ticket,
    /// All that modify.
    all: Ranges,
    /// Those of them that do not lie on blocks.
    uneven: Ranges,
    /// Those that the volume has of clients that hung up.
    orphans: Ranges,
    waiting: HashMap<Ticket, W>,
    /// Those that wait, by what they wait for.
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
    /// A request has come.
    pub(super) fn enter(&mut self, span: &Span) -> Ticket {
        let ticket = self.next;
        self.next += 1;
        if span.modifies {
            self.all.insert(&span.bytes, ticket);
            if span.uneven {
                self.uneven.insert(&span.bytes, ticket);
            }
        }
        ticket
    }

    /// What a request has to wait for, if anything: an orphan that it overlaps, or the last that modifies some block
    /// that it modifies, too, and came before it, where either of them does not lie on blocks.
    pub(super) fn blocker(&self, span: &Span, ticket: Ticket) -> Option<Ticket> {
        if let Some(orphan) = self.orphans.last(&span.bytes, Ticket::MAX) {
            return Some(orphan);
        }
        let others = if span.uneven { &self.all } else { &self.uneven };
        if span.modifies { others.last(&span.bytes, ticket) } else { None }
    }

    /// A request waits behind another one.
    pub(super) fn wait(&mut self, ticket: Ticket, behind: Ticket, waiting: W) {
        self.waiting.insert(ticket, waiting);
        self.behind.entry(behind).or_default().push(ticket);
    }

    /// A request that waits.
    pub(super) fn waiting(&self, ticket: Ticket) -> Option<&W> {
        self.waiting.get(&ticket)
    }

    /// Takes a request that has waited; it is still in its place.
    pub(super) fn resume(&mut self, ticket: Ticket) -> Option<W> {
        self.waiting.remove(&ticket)
    }

    /// The client of a request that the volume has hung up.
    pub(super) fn orphan(&mut self, span: &Span, ticket: Ticket) {
        self.orphans.insert(&span.bytes, ticket);
    }

    /// A request has ended, or is given up. Returns those that have waited for it.
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

    /// All that wait.
    pub(super) fn into_waiting(self) -> impl Iterator<Item = W> {
        // In the order in which they came.
        self.waiting.into_iter().collect::<BTreeMap<_, _>>().into_values()
    }
}

/// Lengths up to this many units have each a class of their own.
const EXACT_MAX: u64 = 8;

/// What lengths are counted in, in bytes: the smallest block that there is.
const UNIT: u64 = 512;

/// Ranges of bytes with their tickets.
///
/// Ranges of a class are at most so long; so those that overlap another range begin within so much before it.
#[derive(Debug, Default)]
struct Ranges {
    /// (class, start, end, ticket).
    entries: BTreeSet<(u8, u64, u64, Ticket)>,
    /// How many there are of each class.
    classes: BTreeMap<u8, usize>,
}

/// The class of a length, in bytes.
fn class_of(len: u64) -> u8 {
    let units = len.div_ceil(UNIT).max(1);
    let class = match units {
        ..=EXACT_MAX => units,
        _ => EXACT_MAX + u64::from(units.next_power_of_two().trailing_zeros()),
    };
    class as u8
}

/// The longest range of a class, in bytes.
fn longest_of(class: u8) -> u64 {
    let class = u64::from(class);
    let units = if class <= EXACT_MAX { class } else { 1 << (class - EXACT_MAX) };
    units.saturating_mul(UNIT)
}

impl Ranges {
    fn insert(&mut self, range: &Range<u64>, ticket: Ticket) {
        let class = class_of(range.end - range.start);
        if self.entries.insert((class, range.start, range.end, ticket)) {
            *self.classes.entry(class).or_default() += 1;
        }
    }

    fn remove(&mut self, range: &Range<u64>, ticket: Ticket) {
        if self.entries.is_empty() {
            return;
        }
        let class = class_of(range.end - range.start);
        if self.entries.remove(&(class, range.start, range.end, ticket))
            && let Some(count) = self.classes.get_mut(&class)
        {
            *count -= 1;
            if *count == 0 {
                self.classes.remove(&class);
            }
        }
    }

    /// The largest ticket below `before` of those that overlap a range.
    fn last(&self, range: &Range<u64>, before: Ticket) -> Option<Ticket> {
        let mut last = None;
        for &class in self.classes.keys() {
            let low = range.start.saturating_sub(longest_of(class));
            let mut below = (class, range.end, 0, 0);
            // Those of the same start and end are looked at together.
            while let Some(&(_, start, end, _)) = self.entries.range((class, low, 0, 0)..below).next_back() {
                if end > range.start {
                    let same = (class, start, end, 0)..(class, start, end, before);
                    last = last.max(self.entries.range(same).next_back().map(|&(_, _, _, ticket)| ticket));
                }
                below = (class, start, end, 0);
            }
        }
        last
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
    fn every_length_has_a_class_that_is_no_shorter() {
        for len in (0..100_000).chain([1 << 30, (1 << 40) + 1, u64::MAX / 4]) {
            assert!(longest_of(class_of(len)) >= len, "{len}");
        }
    }

    #[test]
    fn those_that_wait_for_one_block_go_one_after_the_other() {
        let mut order = Precedence::default();
        let block = span(4096..8192, true, true);
        let tickets: Vec<Ticket> = (0..1000).map(|_| order.enter(&block)).collect();
        assert_eq!(order.blocker(&block, tickets[0]), None);
        for pair in tickets.windows(2) {
            let behind = order.blocker(&block, pair[1]).unwrap();
            assert_eq!(behind, pair[0]);
            order.wait(pair[1], behind, pair[1]);
        }
        for pair in tickets.windows(2) {
            assert_eq!(order.leave(&block, pair[0]), vec![pair[1]]);
            assert_eq!(order.resume(pair[1]), Some(pair[1]));
            assert_eq!(order.blocker(&block, pair[1]), None);
        }
        assert!(order.leave(&block, tickets[999]).is_empty());
        assert_eq!((order.all.entries.len(), order.all.classes.len(), order.behind.len()), (0, 0, 0));
    }

    #[test]
    fn whatever_overlaps_an_orphan_waits_for_it_and_other_reads_wait_for_nothing() {
        let mut order: Precedence<()> = Precedence::default();
        let write = span(0..4096, true, false);
        let ticket = order.enter(&write);
        let read = span(0..4096, false, false);
        let mine = order.enter(&read);
        assert_eq!(order.blocker(&read, mine), None);
        order.orphan(&write, ticket);
        assert_eq!(order.blocker(&read, mine), Some(ticket));
        assert_eq!(order.blocker(&span(4096..8192, true, true), 9), None);
        order.leave(&write, ticket);
        assert_eq!(order.blocker(&read, mine), None);
    }

    proptest! {
        /// What is found is what a look at every request finds.
        #[test]
        fn the_last_of_all_that_overlap_is_found(
            entries in prop::collection::vec((0..300u64, 1..80u64, any::<bool>()), 1..120),
            gone in prop::collection::vec(any::<bool>(), 120),
            (start, len, uneven) in (0..300u64, 1..80u64, any::<bool>()),
            before in 0..130u64,
        ) {
            let mut order: Precedence<()> = Precedence::default();
            let mut left = Vec::new();
            for ((start, len, uneven), gone) in entries.into_iter().zip(gone) {
                let span = span(start * 512..(start + len) * 512, true, uneven);
                let ticket = order.enter(&span);
                if gone {
                    order.leave(&span, ticket);
                } else {
                    left.push((ticket, span));
                }
            }
            let mine = span(start * 512..(start + len) * 512, true, uneven);
            let overlaps = |(ticket, other): &&(Ticket, Span)| {
                *ticket < before
                    && (uneven || other.uneven)
                    && other.bytes.start < mine.bytes.end
                    && mine.bytes.start < other.bytes.end
            };
            let expected = left.iter().filter(overlaps).map(|(ticket, _)| *ticket).max();
            prop_assert_eq!(order.blocker(&mine, before), expected);
        }
    }
}
