//! Gathers writes that together cover a stripe, so that a stream of requests smaller than a stripe, or not
//! aligned to one, is written as whole stripes: once, and without a read.
//!
//! A part is kept back only where the stripe before was covered by writes that were under way at the same
//! time; so a client that waits for each answer, or writes here and there, waits for nothing. What is kept
//! goes on when the stripe is covered, when something else changes it, or when its time is over. Invariants:
//! a part that was kept is given out once; parts of a stripe are given out in the order in which they came.
//! Must not know of clients or of the array.

use crate::array::StripeRequestId;
use crate::block_io::Buf;
use crate::units::{StripeIndex, Timestamp};
use slab::Slab;
use std::collections::VecDeque;
use std::ops::Range;

/// A write of a part of a stripe.
pub(super) struct WritePart {
    pub id: StripeRequestId,
    pub stripe: StripeIndex,
    /// Bytes into the stripe.
    pub offset: usize,
    pub data: Buf,
    pub fua: bool,
}

/// What becomes of a part.
pub(super) enum Offered {
    /// It goes on by itself.
    Alone(WritePart),
    /// These go on one by one.
    Apart(Vec<WritePart>),
    /// It is kept until [`Gather::due`] at the latest.
    Kept,
    /// These parts, ascending, are the stripe.
    Whole(Vec<WritePart>),
}

/// See the head of this file.
pub(super) struct Gather {
    stripe_bytes: usize,
    /// Stripes of which parts are under way, and the rest was not seen yet.
    watched: Vec<Watched>,
    /// How many of them are kept.
    kept: usize,
    /// The latest stripes that were covered by writes under way at the same time.
    covered: VecDeque<StripeIndex>,
    /// Usual time from the first part of such a stripe to its last, in nanoseconds.
    usual: u64,
    /// Stripes that were given out whole.
    whole: Slab<Vec<WritePart>>,
}

struct Watched {
    stripe: StripeIndex,
    since: Timestamp,
    /// When its parts go on at the latest; none where they are under way already.
    until: Option<Timestamp>,
    /// Bytes that the parts cover. None of them overlap.
    covered: usize,
    places: Vec<(StripeRequestId, Range<usize>)>,
    kept: Vec<WritePart>,
}

/// Most parts of a stripe that are gathered. More of them cost more to join than they save.
const PARTS_MAX: usize = 16;
/// Most stripes that are watched. A stream has one or two at a time.
const WATCHED_MAX: usize = 64;
/// Stripes that are remembered: one for each stream that writes to the lane.
const COVERED_MAX: usize = 64;
/// A part is kept for this many times the usual time...
const PATIENCE: u64 = 4;
/// ...within these limits, nanoseconds. Where all cores are busy with 16 streams, each of them sends a
/// request of 1 MiB every 3 to 5 ms.
const KEPT_NS: std::ops::RangeInclusive<u64> = 500_000..=30_000_000;
/// The name of a whole stripe is the place of its parts and this bit, which names of parts never have.
const WHOLE_BIT: u64 = 1 << 63;

impl Gather {
    pub(super) fn new(stripe_bytes: usize) -> Gather {
        Gather {
            stripe_bytes,
            watched: Vec::new(),
            kept: 0,
            covered: VecDeque::new(),
            usual: *KEPT_NS.start(),
            whole: Slab::new(),
        }
    }

    /// Takes a part that overlaps nothing that is kept.
    pub(super) fn offer(&mut self, now: Timestamp, part: WritePart) -> Offered {
        let len = part.data.len();
        if len >= self.stripe_bytes {
            return Offered::Alone(part);
        }
        let at = match self.watched.iter().position(|watched| watched.stripe == part.stripe) {
            Some(at) => at,
            None => match self.watch(now, part.stripe, len) {
                Some(at) => at,
                None => return Offered::Alone(part),
            },
        };
        let watched = &mut self.watched[at];
        if watched.places.len() == PARTS_MAX {
            let mut parts = self.end_uncovered(at);
            parts.push(part);
            return Offered::Apart(parts);
        }
        watched.covered += len;
        let is_covered = watched.covered == self.stripe_bytes;
        if !is_covered {
            watched.places.push((part.id, part.offset..part.offset + len));
        }
        if watched.until.is_none() {
            if is_covered {
                self.end_covered(now, at);
            }
            return Offered::Alone(part);
        }
        watched.kept.push(part);
        if !is_covered {
            return Offered::Kept;
        }
        let mut parts = self.end_covered(now, at).kept;
        parts.sort_unstable_by_key(|part| part.offset);
        Offered::Whole(parts)
    }

    /// Begins to watch a stripe of which a part of `len` bytes has come, if that may be gathered.
    fn watch(&mut self, now: Timestamp, stripe: StripeIndex, len: usize) -> Option<usize> {
        let before = stripe.0.checked_sub(1).map(StripeIndex);
        let follows = before.is_some_and(|before| self.covered.contains(&before));
        // A stream may have a little end in a stripe. What is small and no part of one is not looked at.
        let is_small = len < self.stripe_bytes.div_ceil(PARTS_MAX);
        if is_small && !follows {
            return None;
        }
        if self.watched.len() == WATCHED_MAX {
            // The one that came first and is not kept makes room.
            let oldest = self.watched.iter().position(|watched| watched.until.is_none())?;
            self.watched.remove(oldest);
        }
        let patience = (PATIENCE * self.usual).clamp(*KEPT_NS.start(), *KEPT_NS.end());
        let until = follows.then_some(Timestamp(now.0 + patience));
        self.kept += usize::from(follows);
        self.watched.push(Watched {
            stripe,
            since: now,
            until,
            covered: 0,
            places: Vec::new(),
            kept: Vec::new(),
        });
        Some(self.watched.len() - 1)
    }

    /// Notes that a stripe was covered in time.
    fn end_covered(&mut self, now: Timestamp, at: usize) -> Watched {
        let watched = self.end(at);
        let took = now.nanos_since(watched.since).min(*KEPT_NS.end());
        self.usual = (3 * self.usual + took) / 4;
        self.covered.retain(|stripe| *stripe != watched.stripe && stripe.0 + 1 != watched.stripe.0);
        self.covered.truncate(COVERED_MAX - 1);
        self.covered.push_front(watched.stripe);
        watched
    }

    /// Notes that a stripe was not: its stream has to show again that it is one.
    fn end_uncovered(&mut self, at: usize) -> Vec<WritePart> {
        let watched = self.end(at);
        self.covered.retain(|stripe| stripe.0 + 1 != watched.stripe.0);
        watched.kept
    }

    fn end(&mut self, at: usize) -> Watched {
        let watched = self.watched.remove(at);
        self.kept -= usize::from(watched.until.is_some());
        watched
    }

    /// Takes out what is kept of a stripe of which `range` is about to be changed by something that cannot be
    /// gathered with it.
    pub(super) fn disturb(&mut self, stripe: StripeIndex, range: &Range<usize>) -> Vec<WritePart> {
        let overlaps = |watched: &Watched| {
            watched.stripe == stripe
                && watched.places.iter().any(|(_, place)| place.start < range.end && range.start < place.end)
        };
        match self.watched.iter().position(overlaps) {
            Some(at) => self.end_uncovered(at),
            None => Vec::new(),
        }
    }

    /// Takes out what is kept of the stripes of a run that is about to be zeroed.
    pub(super) fn disturb_run(&mut self, stripes: &Range<u64>) -> Vec<WritePart> {
        self.take_out(|watched| stripes.contains(&watched.stripe.0))
    }

    /// Takes out what was kept until now.
    pub(super) fn overdue(&mut self, now: Timestamp) -> Vec<WritePart> {
        if self.kept == 0 {
            return Vec::new();
        }
        self.take_out(|watched| watched.until.is_some_and(|until| until <= now))
    }

    /// Takes out all that is kept.
    pub(super) fn take_all(&mut self) -> Vec<WritePart> {
        self.take_out(|_| true)
    }

    fn take_out(&mut self, which: impl Fn(&Watched) -> bool) -> Vec<WritePart> {
        let mut parts = Vec::new();
        while let Some(at) = self.watched.iter().position(&which) {
            parts.append(&mut self.end_uncovered(at));
        }
        parts
    }

    /// When the first of the kept parts has to go on.
    pub(super) fn due(&self) -> Option<Timestamp> {
        if self.kept == 0 {
            return None;
        }
        self.watched.iter().filter_map(|watched| watched.until).min()
    }

    /// A part that went on by itself has ended. Its stripe is watched no more: what comes later was not under
    /// way at the same time.
    pub(super) fn ended(&mut self, id: StripeRequestId) {
        let holds = |watched: &Watched| watched.places.iter().any(|(part, _)| *part == id);
        if let Some(at) = self.watched.iter().position(holds) {
            debug_assert!(self.watched[at].until.is_none(), "what is kept is not under way");
            self.end_uncovered(at);
        }
    }

    /// Names a stripe that is given out whole.
    pub(super) fn begin_whole(&mut self, parts: Vec<WritePart>) -> StripeRequestId {
        StripeRequestId(WHOLE_BIT | self.whole.insert(parts) as u64)
    }

    /// The parts of a stripe that was given out whole and has ended; none for another request.
    pub(super) fn end_whole(&mut self, id: StripeRequestId) -> Option<Vec<WritePart>> {
        (id.0 & WHOLE_BIT != 0).then(|| self.whole.remove((id.0 & !WHOLE_BIT) as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::Pool;
    use proptest::prelude::*;

    const STRIPE: usize = 256 << 10;
    const MS: u64 = 1_000_000;

    struct Bench {
        pool: Pool,
        gather: Gather,
        next: u64,
    }

    impl Bench {
        fn new() -> Bench {
            Bench { pool: Pool::new(1 << 20).expect("address space"), gather: Gather::new(STRIPE), next: 0 }
        }

        fn part(&mut self, stripe: u64, range: Range<usize>) -> WritePart {
            self.next += 1;
            WritePart {
                id: StripeRequestId(self.next),
                stripe: StripeIndex(stripe),
                offset: range.start,
                data: self.pool.alloc(range.len()).freeze(),
                fua: false,
            }
        }

        /// Offers a part; the ids of those that go on now.
        fn offer(&mut self, now: u64, stripe: u64, range: Range<usize>) -> (Vec<u64>, &'static str) {
            let part = self.part(stripe, range);
            match self.gather.offer(Timestamp(now), part) {
                Offered::Alone(part) => (vec![part.id.0], "alone"),
                Offered::Apart(parts) => (ids(&parts), "apart"),
                Offered::Kept => (Vec::new(), "kept"),
                Offered::Whole(parts) => (ids(&parts), "whole"),
            }
        }

        /// Shows the gatherer one stripe that two writes under way together cover.
        fn show_stream(&mut self, now: u64, stripe: u64) {
            assert_eq!(self.offer(now, stripe, 0..STRIPE / 2).1, "alone");
            assert_eq!(self.offer(now, stripe, STRIPE / 2..STRIPE).1, "alone");
        }
    }

    fn ids(parts: &[WritePart]) -> Vec<u64> {
        parts.iter().map(|part| part.id.0).collect()
    }

    #[test]
    fn a_stream_is_gathered_from_its_second_stripe_on() {
        let mut bench = Bench::new();
        bench.show_stream(0, 7);
        for stripe in 8..20 {
            // The order within a stripe does not matter.
            let (first, last) = (0..STRIPE / 4, STRIPE / 2..STRIPE);
            assert_eq!(bench.offer(stripe * MS, stripe, last).1, "kept");
            assert_eq!(bench.offer(stripe * MS, stripe, STRIPE / 4..STRIPE / 2).1, "kept");
            let (parts, how) = bench.offer(stripe * MS, stripe, first);
            assert_eq!((parts.len(), how), (3, "whole"));
            assert!(parts[0] > parts[1] && parts[1] > parts[2], "ascending by offset: {parts:?}");
            assert_eq!(bench.gather.due(), None);
        }
    }

    #[test]
    fn a_client_that_waits_for_each_answer_is_never_kept() {
        let mut bench = Bench::new();
        for stripe in 0..20 {
            for half in [0..STRIPE / 2, STRIPE / 2..STRIPE] {
                let (parts, how) = bench.offer(stripe * MS, stripe, half);
                assert_eq!(how, "alone");
                bench.gather.ended(StripeRequestId(parts[0]));
            }
        }
    }

    #[test]
    fn what_is_kept_in_vain_goes_on_in_time_and_the_stream_has_to_show_itself_again() {
        let mut bench = Bench::new();
        bench.show_stream(0, 0);
        assert_eq!(bench.offer(MS, 1, 0..STRIPE / 2).1, "kept");
        let due = bench.gather.due().expect("something is kept");
        assert!(due.0 > MS && due.0 <= MS + KEPT_NS.end());
        assert!(bench.gather.overdue(Timestamp(due.0 - 1)).is_empty());
        assert_eq!(bench.gather.overdue(due).len(), 1);
        assert_eq!(bench.gather.due(), None);
        // Neither this stripe nor the next one is waited for.
        assert_eq!(bench.offer(3 * MS, 1, 0..STRIPE / 2).1, "alone");
        assert_eq!(bench.offer(3 * MS, 2, 0..STRIPE / 2).1, "alone");
    }

    #[test]
    fn how_long_a_part_is_kept_follows_what_the_stream_takes() {
        let mut bench = Bench::new();
        let mut now = 0;
        bench.show_stream(now, 0);
        for stripe in 1..40 {
            assert_eq!(bench.offer(now, stripe, 0..STRIPE / 2).1, "kept");
            let due = bench.gather.due().expect("kept").0;
            assert!(due - now <= *KEPT_NS.end());
            now += (due - now) * 3 / 4;
            assert_eq!(bench.offer(now, stripe, STRIPE / 2..STRIPE).1, "whole");
        }
        assert_eq!(bench.offer(now, 40, 0..STRIPE / 2).1, "kept");
        assert_eq!(
            bench.gather.due().expect("kept").0 - now,
            *KEPT_NS.end(),
            "a slow stream is waited for longer"
        );
    }

    #[test]
    fn a_change_of_the_same_bytes_lets_what_is_kept_go_on_first() {
        let mut bench = Bench::new();
        bench.show_stream(0, 0);
        assert_eq!(bench.offer(0, 1, 0..STRIPE / 2).1, "kept");
        assert!(bench.gather.disturb(StripeIndex(1), &(STRIPE / 2..STRIPE)).is_empty(), "other bytes");
        assert!(bench.gather.disturb(StripeIndex(2), &(0..STRIPE)).is_empty(), "another stripe");
        assert_eq!(bench.gather.disturb(StripeIndex(1), &(4096..8192)).len(), 1);
        bench.show_stream(0, 4);
        assert_eq!(bench.offer(0, 5, 0..STRIPE / 2).1, "kept");
        assert_eq!(bench.gather.disturb_run(&(3..9)).len(), 1);
    }

    #[test]
    fn small_parts_are_left_alone_but_for_the_ends_of_a_stream() {
        let mut bench = Bench::new();
        for stripe in 0..4 {
            assert_eq!(bench.offer(0, stripe, 0..4096).1, "alone");
        }
        assert!(bench.gather.watched.is_empty());
        bench.show_stream(0, 0);
        assert_eq!(bench.offer(0, 1, 0..512).1, "kept");
        assert_eq!(bench.offer(0, 1, 512..STRIPE - 512).1, "kept");
        assert_eq!(bench.offer(0, 1, STRIPE - 512..STRIPE).1, "whole");
        assert_eq!(bench.offer(0, 3, 0..4096).1, "alone", "no part of the stream");
        // Too many of them are not waited for.
        for at in 0..PARTS_MAX {
            assert_eq!(bench.offer(0, 2, at * 512..(at + 1) * 512).1, "kept");
        }
        let (parts, how) = bench.offer(0, 2, PARTS_MAX * 512..STRIPE);
        assert_eq!((parts.len(), how), (PARTS_MAX + 1, "apart"));
        assert_eq!(bench.gather.due(), None);
    }

    proptest! {
        /// Each part that is offered comes out exactly once, what is kept is due, and whole stripes are
        /// whole.
        #[test]
        fn nothing_is_lost_and_nothing_is_given_out_twice(
            steps in proptest::collection::vec((0u64..4, 0usize..8, 1usize..8, 0u8..12), 1..200)
        ) {
            let mut bench = Bench::new();
            let (mut now, mut inside) = (0, Vec::new());
            let mut out: Vec<u64> = Vec::new();
            for (stripe, at, len, what) in steps {
                now += 50_000;
                let range = at * STRIPE / 8..((at + len) * STRIPE / 8).min(STRIPE);
                let released = match what {
                    0 => bench.gather.disturb_run(&(stripe..stripe + 2)),
                    1 => bench.gather.overdue(Timestamp(now)),
                    2 => bench.gather.take_all(),
                    3 => {
                        if let Some(&id) = out.last() {
                            bench.gather.ended(StripeRequestId(id));
                        }
                        Vec::new()
                    }
                    _ => bench.gather.disturb(StripeIndex(stripe), &range),
                };
                out.extend(ids(&released));
                if what > 3 {
                    let part = bench.part(stripe, range);
                    inside.push(part.id.0);
                    match bench.gather.offer(Timestamp(now), part) {
                        Offered::Alone(part) => out.push(part.id.0),
                        Offered::Apart(parts) => out.extend(ids(&parts)),
                        Offered::Kept => prop_assert!(bench.gather.due().is_some()),
                        Offered::Whole(parts) => {
                            let mut end = 0;
                            for part in &parts {
                                prop_assert_eq!(part.offset, end);
                                end += part.data.len();
                            }
                            prop_assert_eq!(end, STRIPE);
                            out.extend(ids(&parts));
                        }
                    }
                }
                let kept = bench.gather.watched.iter().filter(|watched| watched.until.is_some()).count();
                prop_assert_eq!(kept, bench.gather.kept);
            }
            out.extend(ids(&bench.gather.take_all()));
            out.sort_unstable();
            prop_assert_eq!(out, inside);
            prop_assert!(bench.gather.watched.is_empty());
        }
    }
}
