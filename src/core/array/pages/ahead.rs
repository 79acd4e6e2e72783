//! Pages that are loaded before a request needs them, and how often requests find their pages in the cache.
//!
//! A sequence of reads that follow one another in the volume is a stream: the pages of what follows it are
//! loaded while it goes on, so that its next read finds them. How far ahead grows with what the stream has
//! read; random reads make no stream. No operation waits for these loads, and they are few at a time.
//!
//! Must not know of copies.

use crate::array::Core;
use crate::array::pages::Pages;
use crate::array::pages::copies::Torn;
use crate::array::pages::patience::AT_ONCE;
use crate::array::pages::store::Want;
use crate::array::status::PageCacheStatus;
use crate::format::PageIndex;
use crate::units::{ROW_BYTES, StripeIndex};
use std::ops::Range;

/// Streams that are told apart: those of a few clients. The one that went on longest ago gives way.
const STREAMS_MAX: usize = 16;

/// Reads of one client may arrive in another order than it sent them: a read may begin this many of its own
/// lengths from where the one before ended, but not further than these bytes. With more, small random reads
/// in a small volume would pass for streams.
const SLACK_LENGTHS: u64 = 8;
const SLACK_BYTES_MAX: u64 = 1 << 20;

/// Bytes that make a stream: more than most single requests have, so that a large random read makes none.
const STREAM_BYTES_MIN: u64 = 2 << 20;

/// How far ahead of a stream pages are loaded, in bytes of data: more than a client has under way, and with
/// blocks of 4 KiB in rows of six, six pages or so.
const AHEAD_BYTES_MAX: u64 = 4 << 20;

/// Most loads ahead at one time, over all streams; a small cache allows fewer, see [`Pages::load_ahead`].
const LOADS_MAX: usize = 16;

/// The ticket of all loads ahead: no operation holds it, and it gets its answer at the first try.
const TICKET: usize = AT_ONCE | 1 << (usize::BITS - 2);

/// Reads that follow one another.
#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// Where the next read should begin, in bytes of the volume.
    next: u64,
    /// Bytes read so far.
    run: u64,
    /// The pages of stripes below were asked for.
    asked: u64,
    /// When it last went on, counted in reads.
    turn: u64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    streams: Vec<Stream>,
    turn: u64,
    /// Loads under way that no request has asked for.
    loading: usize,
    hits: u64,
    misses: u64,
}

impl Ahead {
    /// Counts a page that a request of a client has asked for.
    pub(super) fn count(&mut self, want: Want) {
        match want {
            Want::Cached => self.hits += 1,
            Want::Loading => self.misses += 1,
            Want::BeingWritten | Want::Unavailable => {}
        }
    }

    /// Takes the end of a load for this ticket, which may be of another.
    pub(super) fn arrived(&mut self, ticket: usize) {
        self.loading -= usize::from(ticket == TICKET);
    }

    /// Takes note of a read. Returns the stripes whose pages the stream will need next, if it is one, up to
    /// `ahead_max` bytes behind the read.
    fn read(&mut self, start: u64, len: u64, stripe_bytes: u64, ahead_max: u64) -> Range<u64> {
        self.turn += 1;
        let slack = (SLACK_LENGTHS * len).min(SLACK_BYTES_MAX);
        let follows = |stream: &Stream| start.abs_diff(stream.next) <= slack;
        let at = match self.streams.iter().position(follows) {
            Some(at) => at,
            None => {
                let new = Stream { next: start, ..Stream::default() };
                let oldest = (0..self.streams.len()).min_by_key(|&at| self.streams[at].turn);
                match oldest.filter(|_| self.streams.len() == STREAMS_MAX) {
                    Some(oldest) => {
                        self.streams[oldest] = new;
                        oldest
                    }
                    None => {
                        self.streams.push(new);
                        self.streams.len() - 1
                    }
                }
            }
        };
        let stream = &mut self.streams[at];
        stream.turn = self.turn;
        stream.next = stream.next.max(start + len);
        stream.run += len;
        if stream.run < STREAM_BYTES_MIN {
            return 0..0;
        }
        let end = stream.next + (stream.run / 2).min(ahead_max);
        let first = stream.asked.max(stream.next / stripe_bytes);
        first..(end / stripe_bytes + 1).max(first)
    }

    /// Records that the pages of a stream's stripes below `stripe` were asked for.
    fn asked_below(&mut self, stripe: u64) {
        let turn = self.turn;
        let last = self.streams.iter_mut().find(|stream| stream.turn == turn);
        last.expect("a stream has just gone on").asked = stripe;
    }
}

impl Pages {
    /// Takes note of a client's read of part of a stripe, and loads pages that its stream will need.
    pub(in crate::array) fn note_read(
        &mut self,
        core: &mut Core,
        stripe: StripeIndex,
        offset: usize,
        len: usize,
    ) {
        if self.checksums.is_none() {
            return;
        }
        let stripe_bytes = core.map.stripe_bytes() as u64;
        let (stripes, layout) = (core.shape.geometry.stripes(), self.store.layout());
        // Pages that push one another out of the cache before they are used cost more than they save.
        let bytes_of_page = stripes * stripe_bytes / (layout.pages() - layout.map_pages()).max(1);
        let ahead_max = AHEAD_BYTES_MAX.min(bytes_of_page * (self.store.cache_pages_max() as u64 / 4));
        let start = stripe.0 * stripe_bytes + offset as u64;
        let wanted = self.ahead.read(start, len as u64, stripe_bytes, ahead_max);
        let wanted = wanted.start..wanted.end.min(stripes);
        for stripe in wanted.clone().map(StripeIndex) {
            let entry = self.map_entry(stripe);
            if entry.holds_data {
                let rows = core.map.chunk / ROW_BYTES as usize;
                for page in self.hash_pages(entry.slot, 0..rows).map(PageIndex) {
                    if !self.load_ahead(core, page) {
                        return self.ahead.asked_below(stripe.0);
                    }
                }
            }
        }
        if !wanted.is_empty() {
            self.ahead.asked_below(wanted.end);
        }
    }

    /// Loads a page for no operation. False: too many such loads are under way.
    fn load_ahead(&mut self, core: &mut Core, page: PageIndex) -> bool {
        if self.store.is_near(page) || self.unreadable.is_known(page) {
            return true;
        }
        let loads_max = (self.store.cache_pages_max() / 8).clamp(1, LOADS_MAX);
        if self.ahead.loading >= loads_max || core.stop.hurried {
            return false;
        }
        let usable = core.online();
        let mut io = Vec::new();
        let usable = |member| usable.contains(member);
        if self.store.want(page, TICKET, Torn::Impossible, &usable, &mut io) == Want::Loading {
            self.ahead.loading += 1;
        }
        self.send(core, io);
        true
    }

    /// The cache of pages, as status shows it.
    pub(in crate::array) fn cache_status(&self) -> PageCacheStatus {
        let layout = self.store.layout();
        PageCacheStatus {
            pages: self.store.cached_pages() as u64,
            pages_max: self.store.cache_pages_max() as u64,
            pages_needed: layout.pages() - layout.map_pages(),
            hits: self.ahead.hits,
            misses: self.ahead.misses,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRIPE: u64 = 256 << 10;

    #[test]
    fn a_stream_asks_further_ahead_as_it_goes_on_and_for_each_stripe_once() {
        let mut ahead = Ahead::default();
        let (mut asked, mut at) = (0, 40 * STRIPE);
        for read in 0..64 {
            let wanted = ahead.read(at, STRIPE, STRIPE, AHEAD_BYTES_MAX);
            at += STRIPE;
            if at < 40 * STRIPE + STREAM_BYTES_MIN {
                assert_eq!(wanted, 0..0, "read {read}");
                continue;
            }
            assert!(wanted.start >= asked && wanted.start >= at / STRIPE, "read {read}: {wanted:?}");
            assert!(wanted.end <= (at + AHEAD_BYTES_MAX) / STRIPE + 1, "read {read}: {wanted:?}");
            ahead.asked_below(wanted.end);
            asked = wanted.end;
        }
        assert_eq!(asked, (at + AHEAD_BYTES_MAX) / STRIPE + 1);
        assert_eq!(ahead.streams.len(), 1);
    }

    #[test]
    fn random_reads_ask_for_nothing_and_reads_in_another_order_are_a_stream() {
        let mut ahead = Ahead::default();
        let mut place = 1u64;
        for _ in 0..10_000 {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            assert_eq!(ahead.read((place >> 20) & !4095, 1 << 20, STRIPE, AHEAD_BYTES_MAX), 0..0);
        }
        assert_eq!(ahead.streams.len(), STREAMS_MAX);
        // In a volume of 32 MiB, for a long time.
        for _ in 0..100_000 {
            place = place.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            assert_eq!(ahead.read((place >> 20) & 0x1ff_f000, 4096, STRIPE, AHEAD_BYTES_MAX), 0..0);
        }
        let order = [1, 0, 3, 2, 5, 4, 7, 6, 9, 8u64];
        let wanted = order.map(|nth| ahead.read((1 << 50) + nth * STRIPE, STRIPE, STRIPE, AHEAD_BYTES_MAX));
        assert!(!wanted[9].is_empty(), "{wanted:?}");
    }
}
