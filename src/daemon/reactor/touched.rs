//! Which pages of checksums a reactor has read lately for reads of a lane, because they were not in memory. A
//! page that is needed again soon is worth keeping: the next read of it goes to the owner, which loads it.
//!
//! A table with one place for many pages: of random reads over far more pages than the cache holds, few find
//! their page again, and the cache is not churned for them. Where the pages in use fit the cache, each is
//! loaded after some reads. Must not know what pages hold.

/// Pages of the cache for each place of the table: with as many pages in use as the cache holds, a page is
/// loaded after this many reads of it.
const PAGES_FOR_EACH: usize = 16;
/// Least and most places: 32 KiB for each lane and reactor.
const PLACES: (usize, usize) = (16, 4096);

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Touched {
    /// For each place the page that was last read there + 1, or 0.
    last: Box<[u64]>,
}

impl Touched {
    /// For a lane that keeps at most so many pages in memory.
    pub(super) fn new(pages_kept_max: usize) -> Touched {
        let places = (pages_kept_max / PAGES_FOR_EACH).clamp(PLACES.0, PLACES.1);
        Touched { last: vec![0; places].into_boxed_slice() }
    }

    /// Notes that a page is needed. Returns whether it was lately.
    pub(super) fn again(&mut self, page: u64) -> bool {
        // Pages of one stream, or those that one member has first, do not meet in one place.
        let spread = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let at = spread as usize % self.last.len();
        std::mem::replace(&mut self.last[at], page + 1) == page + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of `reads` random reads over `pages` pages, how many find theirs again.
    fn found(kept: usize, pages: u64, reads: u64) -> u64 {
        let mut touched = Touched::new(kept);
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % pages
        };
        (0..reads).filter(|_| touched.again(next())).count() as u64
    }

    #[test]
    fn a_page_that_is_needed_twice_running_is_found_and_the_first_is_not() {
        let mut touched = Touched::new(0);
        assert!(!touched.again(0) && touched.again(0) && !touched.again(7) && touched.again(7));
    }

    #[test]
    fn pages_that_fit_the_cache_are_loaded_soon_and_many_more_are_not() {
        let fits = found(8192, 8192, 100_000);
        assert!((4000..9000).contains(&fits), "{fits} of 100000, about one in 16");
        let many = found(8192, 8 * 8192, 100_000);
        assert!(many < 1300, "{many} of 100000");
        assert_eq!(found(usize::MAX, 1, 100), 99);
    }
}
