//! Byte ranges with tickets. Answers: the first and the last ticket among those whose ranges overlap a given
//! one.
//!
//! Lengths are sorted into classes, from each power of two to the next. Each class has a grid of cells as
//! long as its shortest range, so a range either is a cell or crosses at least one border of its grid. It is
//! cut into a tail, from its start to the next border; whole cells, which are tails as well; and a head, from
//! the last border to its end. Tails of one cell end together and heads of one cell begin together. So the
//! tails (or heads) that overlap a range are neighbours in the order of their starts (or last bytes). A tree
//! in which each node knows the first and the last ticket below it finds them in logarithmic time, whatever
//! the ranges are.
//!
//! Must not know requests.

use slab::Slab;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;

/// Number of a request; later ones have larger numbers.
pub(super) type Ticket = u64;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// By the base-two logarithm of the length of a cell.
    classes: BTreeMap<u32, Class>,
}

#[derive(Debug, Default)]
struct Class {
    /// By where they start.
    tails: Tree,
    /// By their last byte.
    heads: Tree,
}

/// The first and the last of some tickets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) first: Ticket,
    pub(super) last: Ticket,
}

impl Ends {
    fn of(ticket: Ticket) -> Ends {
        Ends { first: ticket, last: ticket }
    }

    fn join(a: Option<Ends>, b: Option<Ends>) -> Option<Ends> {
        let (Some(a), Some(b)) = (a, b) else { return a.or(b) };
        Some(Ends { first: a.first.min(b.first), last: a.last.max(b.last) })
    }
}

/// The class of a range that is not empty.
fn class_of(range: &Range<u64>) -> u32 {
    (range.end - range.start).ilog2()
}

impl Class {
    /// Calls `act` with each piece of a range: the tree where it belongs, and its place there.
    fn each_piece(&mut self, class: u32, range: &Range<u64>, mut act: impl FnMut(&mut Tree, u64)) {
        let cell = 1 << class;
        act(&mut self.tails, range.start);
        let mut border = (range.start / cell + 1).saturating_mul(cell);
        while range.end.saturating_sub(border) >= cell {
            act(&mut self.tails, border);
            border += cell;
        }
        if border < range.end {
            act(&mut self.heads, range.end - 1);
        }
    }

    fn is_empty(&self) -> bool {
        self.tails.nodes.is_empty()
    }
}

impl Ranges {
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }

    /// Adds a range; an empty one overlaps nothing.
    pub(super) fn insert(&mut self, range: &Range<u64>, ticket: Ticket) {
        if range.is_empty() {
            return;
        }
        let class = class_of(range);
        let entry = self.classes.entry(class).or_default();
        entry.each_piece(class, range, |tree, at| tree.insert((at, ticket)));
    }

    /// Removes a range, if it is there.
    pub(super) fn remove(&mut self, range: &Range<u64>, ticket: Ticket) {
        if range.is_empty() {
            return;
        }
        let class = class_of(range);
        let Some(entry) = self.classes.get_mut(&class) else { return };
        entry.each_piece(class, range, |tree, at| tree.remove((at, ticket)));
        if entry.is_empty() {
            self.classes.remove(&class);
        }
    }

    /// The first and the last ticket of those that overlap a range.
    pub(super) fn overlapping(&self, range: &Range<u64>) -> Option<Ends> {
        if range.is_empty() {
            return None;
        }
        let of_class = |(&class, Class { tails, heads }): (&u32, &Class)| {
            let cell = 1 << class;
            let tails = tails.within(range.start / cell * cell..range.end);
            let border = range.end.checked_next_multiple_of(cell);
            Ends::join(tails, heads.within(range.start..border.map_or(u64::MAX, |border| border - 1)))
        };
        self.classes.iter().map(of_class).fold(None, Ends::join)
    }
}

/// A place in a file, and a ticket, by which those of one place are told apart.
type Key = (u64, Ticket);

/// A treap, a search tree by keys that is a heap by random weights (Seidel, Aragon: Randomized search trees):
/// its depth is logarithmic whatever keys a client chooses.
#[derive(Debug, Default)]
struct Tree {
    nodes: Slab<Node>,
    root: Option<usize>,
    weights: RandomState,
    inserted: u64,
}

#[derive(Debug)]
struct Node {
    key: Key,
    weight: u64,
    /// First and last ticket of this subtree.
    ends: Ends,
    left: Option<usize>,
    right: Option<usize>,
}

impl Tree {
    fn insert(&mut self, key: Key) {
        self.inserted += 1;
        let weight = self.weights.hash_one(self.inserted);
        let node = Node { key, weight, ends: Ends::of(key.1), left: None, right: None };
        let node = self.nodes.insert(node);
        let (left, right) = self.split(self.root, key);
        let left = self.merge(left, Some(node));
        self.root = self.merge(left, right);
    }

    fn remove(&mut self, key: Key) {
        self.root = self.without(self.root, key);
    }

    /// A subtree without one key.
    fn without(&mut self, at: Option<usize>, key: Key) -> Option<usize> {
        let Node { key: here, left, right, .. } = self.nodes[at?];
        if here == key {
            self.nodes.remove(at?);
            return self.merge(left, right);
        }
        if key < here {
            self.nodes[at?].left = self.without(left, key);
        } else {
            self.nodes[at?].right = self.without(right, key);
        }
        self.sum_up(at?)
    }

    /// Splits a subtree into the keys below `key` and the others.
    fn split(&mut self, at: Option<usize>, key: Key) -> (Option<usize>, Option<usize>) {
        let Some(at) = at else { return (None, None) };
        if self.nodes[at].key < key {
            let (below, others) = self.split(self.nodes[at].right, key);
            self.nodes[at].right = below;
            (self.sum_up(at), others)
        } else {
            let (below, others) = self.split(self.nodes[at].left, key);
            self.nodes[at].left = others;
            (below, self.sum_up(at))
        }
    }

    /// Joins two subtrees; all keys of the first are below those of the second.
    fn merge(&mut self, first: Option<usize>, second: Option<usize>) -> Option<usize> {
        let (Some(left), Some(right)) = (first, second) else { return first.or(second) };
        if self.nodes[left].weight > self.nodes[right].weight {
            self.nodes[left].right = self.merge(self.nodes[left].right, second);
            self.sum_up(left)
        } else {
            self.nodes[right].left = self.merge(first, self.nodes[right].left);
            self.sum_up(right)
        }
    }

    /// Recomputes a node's ends from those of its children.
    fn sum_up(&mut self, at: usize) -> Option<usize> {
        let Node { key, left, right, .. } = self.nodes[at];
        let children = Ends::join(self.ends(left), self.ends(right));
        self.nodes[at].ends = Ends::join(Some(Ends::of(key.1)), children)?;
        Some(at)
    }

    fn ends(&self, at: Option<usize>) -> Option<Ends> {
        at.map(|at| self.nodes[at].ends)
    }

    /// The first and the last ticket at these places.
    fn within(&self, places: Range<u64>) -> Option<Ends> {
        let mut at = self.root;
        while let Some(node) = at.map(|at| &self.nodes[at]) {
            if node.key.0 < places.start {
                at = node.right;
            } else if node.key.0 >= places.end {
                at = node.left;
            } else {
                let below = self.from(node.left, places.start);
                let above = self.before(node.right, places.end);
                return Ends::join(Some(Ends::of(node.key.1)), Ends::join(below, above));
            }
        }
        None
    }

    /// The same of a subtree, at places from `start` on.
    fn from(&self, mut at: Option<usize>, start: u64) -> Option<Ends> {
        let mut ends = None;
        while let Some(node) = at.map(|at| &self.nodes[at]) {
            if node.key.0 < start {
                at = node.right;
            } else {
                ends = Ends::join(ends, Ends::join(Some(Ends::of(node.key.1)), self.ends(node.right)));
                at = node.left;
            }
        }
        ends
    }

    /// The same of a subtree, at places before `end`.
    fn before(&self, mut at: Option<usize>, end: u64) -> Option<Ends> {
        let mut ends = None;
        while let Some(node) = at.map(|at| &self.nodes[at]) {
            if node.key.0 >= end {
                at = node.left;
            } else {
                ends = Ends::join(ends, Ends::join(Some(Ends::of(node.key.1)), self.ends(node.left)));
                at = node.right;
            }
        }
        ends
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn depth(tree: &Tree, at: Option<usize>) -> usize {
        let Some(at) = at else { return 0 };
        1 + depth(tree, tree.nodes[at].left).max(depth(tree, tree.nodes[at].right))
    }

    /// Many small ranges below a wide one: a client can produce them.
    #[test]
    fn the_way_to_any_of_many_is_short() {
        let mut ranges = Ranges::default();
        (0..50_000).for_each(|nth| ranges.insert(&(nth * 4096..nth * 4096 + 4096), nth));
        let tree = &ranges.classes[&12].tails;
        assert_eq!(tree.nodes.len(), 50_000);
        assert!(depth(tree, tree.root) < 100, "{}", depth(tree, tree.root));
        assert_eq!(ranges.overlapping(&(8192..1 << 40)), Some(Ends { first: 2, last: 49_999 }));
        (0..50_000).for_each(|nth| ranges.remove(&(nth * 4096..nth * 4096 + 4096), nth));
        assert!(ranges.is_empty());
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_overlap_as_others_do() {
        let mut ranges = Ranges::default();
        ranges.insert(&(0..u64::MAX), 1);
        ranges.insert(&(u64::MAX - 5..u64::MAX), 2);
        ranges.insert(&(7..7), 3);
        assert_eq!(ranges.overlapping(&(u64::MAX - 1..u64::MAX)), Some(Ends { first: 1, last: 2 }));
        assert_eq!(ranges.overlapping(&(5..9)), Some(Ends::of(1)));
        assert_eq!(ranges.overlapping(&(5..5)), None);
        ranges.remove(&(0..u64::MAX), 1);
        ranges.remove(&(0..u64::MAX), 1);
        assert_eq!(ranges.overlapping(&(0..u64::MAX)), Some(Ends::of(2)));
    }

    proptest! {
        /// The index finds what a scan of all ranges finds.
        #[test]
        fn the_ends_of_all_that_overlap_are_found(
            entries in prop::collection::vec((0..400u64, 0..150u64, any::<bool>()), 1..150),
            asked in prop::collection::vec((0..400u64, 0..150u64), 1..20),
        ) {
            let mut ranges = Ranges::default();
            let mut left = Vec::new();
            for (ticket, (start, len, gone)) in (0..).zip(entries) {
                let range = start..start + len;
                ranges.insert(&range, ticket);
                left.push((ticket, range, gone));
            }
            for (ticket, range, _) in left.extract_if(.., |(_, _, gone)| *gone) {
                ranges.remove(&range, ticket);
            }
            for (start, len) in asked {
                let overlaps = |range: &Range<u64>| {
                    range.start.max(start) < range.end.min(start + len)
                };
                let tickets = left.iter().filter(|(_, range, _)| overlaps(range)).map(|(ticket, ..)| Ends::of(*ticket));
                let expected = tickets.map(Some).fold(None, Ends::join);
                prop_assert_eq!(ranges.overlapping(&(start..start + len)), expected);
            }
        }
    }
}
