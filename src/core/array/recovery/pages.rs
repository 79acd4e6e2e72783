//! Metadata pages in a recovery: the stripe map is loaded, pages that cannot be read are tried again, changed
//! pages are written.
//!
//! A page counts when its newest version is known (rule T3). Where the log names a page, copies that a crash
//! has cut off are no error: then any copy that was read whole is enough, and R8 writes all of them. A page
//! whose newest version no copy shows, because of errors, is tried again; after that the start is refused
//! unless it is forced.

use crate::array::base::members::Which;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::copies::Torn;
use crate::array::pages::store::{LoadOutcome, Loaded, PageIo, PageStore, Settle, Unread, Want};
use crate::array::recovery::patience::Patience;
use crate::array::recovery::{Building, Doing, PageFault, Recovery, RecoveryError, Step};
use crate::format::PageIndex;
use crate::units::{MemberIndex, SlotIndex, StripeIndex, Timestamp};
use std::collections::BTreeMap;

/// Most map pages that are being read at once: enough for the speed of a disk, 4 MiB of answers for one
/// parity.
const MAP_PAGES_AT_ONCE: usize = 256;

/// Most frozen pages whose writes are given out at once.
const PAGE_WRITES_AT_ONCE: usize = 128;

/// The waiter of the pages of the stripe map; other waiters are keys of jobs.
const MAP_WAITER: usize = usize::MAX;

/// Pages that could not be read.
#[derive(Debug, Default)]
pub(super) struct PageTrials {
    patience: Patience,
    /// The pages are read again at this time.
    again: Option<Timestamp>,
    /// The pages, with the jobs that wait for each; none wait while a page is being read again.
    pages: BTreeMap<PageIndex, Vec<usize>>,
    /// Copies that cannot be read count as damaged: there is no time left, and the start is forced.
    takes_anything: bool,
}

impl PageTrials {
    /// Whether pages are tried again.
    pub(super) fn is_trying(&self) -> bool {
        !self.pages.is_empty()
    }
}

impl Recovery {
    /// Loads every page of the stripe map; it stays in the cache.
    pub(super) fn load_map(&mut self, mut next: u64, pages: &mut PageStore) -> bool {
        while next < pages.layout().map_pages() && self.io.flights.len() < MAP_PAGES_AT_ONCE {
            let page = PageIndex(next);
            next += 1;
            match self.want_page(page, MAP_WAITER, pages) {
                Want::Cached => pages.release(page),
                Want::Loading => {}
                Want::BeingWritten => unreachable!("nothing is checked"),
                Want::Unavailable => self.refuse(RecoveryError::PageUnavailable { page: page.0 }),
            }
        }
        if next < pages.layout().map_pages() || !self.io.is_idle() || !self.trials.pages.pages.is_empty() {
            return self.stay(Step::Map { next });
        }
        let gone = self.cx.known.map_pages.saturating_sub(pages.map_written());
        if gone > 0 && !self.cx.force && !is_off(Mutation::MapPagesNotCounted) {
            self.refuse(RecoveryError::MapGone { gone, counted: self.cx.known.map_pages });
            return true;
        }
        self.result.map_pages_gone = gone;
        if self.cx.known.clean {
            self.finish(pages);
        } else {
            self.map.slots_with_data = vec![false; self.cx.map.slots as usize];
            self.step = Step::Held { next: 0 };
        }
        true
    }

    /// Notes which slots hold data by the stripe map, some stripes at a time.
    pub(super) fn note_held(&mut self, next: u64, pages: &PageStore) -> bool {
        let end = self.cx.geometry.stripes().min(next + self.cx.stripes_at_once);
        for stripe in (next..end).map(StripeIndex) {
            let entry = pages.map_entry(stripe);
            if let Some(held) = self.map.slots_with_data.get_mut(entry.slot.0 as usize) {
                *held |= entry.holds_data;
            }
        }
        if end < self.cx.geometry.stripes() {
            return self.stay(Step::Held { next: end });
        }
        self.step = Step::Weigh { next: 0 };
        true
    }

    /// Asks for a page; its I/O is under way then.
    pub(super) fn want_page(&mut self, page: PageIndex, waiter: usize, pages: &mut PageStore) -> Want {
        let usable = self.cx.usable;
        // Pages of hashes belong to rows that the log names.
        let torn = match waiter {
            MAP_WAITER if self.cx.known.clean => Torn::Impossible,
            MAP_WAITER if !self.map.named_pages.contains(&page) => Torn::Unnamed,
            _ => Torn::Possible,
        };
        let mut more = Vec::new();
        let want = pages.want(page, waiter, torn, &|member| usable.contains(member), &mut more);
        self.page_io(more);
        want
    }

    pub(super) fn page_io(&mut self, wanted: Vec<PageIo>) {
        for io in wanted {
            match io {
                PageIo::Read { read, member, offset, len } => {
                    self.io.read(
                        member,
                        self.cx.regions.pages_offset.plus(offset),
                        len,
                        Doing::PageRead(read),
                    );
                }
                PageIo::Write { write, member, which, offset, bytes } => {
                    let offset = self.cx.regions.pages_offset.plus(offset);
                    self.io.write(member, which, offset, bytes, Doing::PageWrite(write));
                }
            }
        }
    }

    pub(super) fn page_loaded(&mut self, page: PageIndex, loaded: Loaded, pages: &mut PageStore) {
        let Loaded { waiters, mut outcome, mut faults, unread, .. } = loaded;
        if outcome == LoadOutcome::Ready && pages.is_blank(page) && self.must_be_written(page, pages) {
            if unread.is_some() && !self.trials.pages.takes_anything {
                pages.retract_blank(page);
                outcome = LoadOutcome::Unreadable;
            } else {
                faults = pages.deny_blank(page);
                outcome = LoadOutcome::Lost;
            }
        }
        debug_assert_ne!(outcome, LoadOutcome::AskAgain, "no member leaves while a recovery goes on");
        if outcome == LoadOutcome::Unreadable {
            return self.page_unreadable(page, waiters, unread, pages);
        }
        self.trials.pages.pages.remove(&page);
        if self.trials.pages.pages.is_empty() {
            self.trials.pages.patience.succeeded();
        }
        let is_lost = outcome == LoadOutcome::Lost;
        let fault = |(member, fault)| PageFault { page, member, fault, is_lost };
        self.result.page_faults.extend(faults.into_iter().map(fault));
        for waiter in waiters {
            if waiter != MAP_WAITER {
                self.job_page_loaded(waiter, pages);
                continue;
            }
            match outcome {
                LoadOutcome::Lost => self.refuse(RecoveryError::MapLost { page: page.0 }),
                // See [`Torn::Unnamed`]: it is not ignored silently.
                LoadOutcome::Behind if self.cx.force || !self.cx.known.clean => {
                    self.result.old_map_pages.push(page.0);
                }
                LoadOutcome::Behind => self.refuse(RecoveryError::MapBehind { page: page.0 }),
                LoadOutcome::Ready | LoadOutcome::Unreadable | LoadOutcome::AskAgain => {}
            }
            pages.release(page);
        }
    }

    /// Handles a page whose newest version no copy shows (rule T3): it is read again later, or the start ends
    /// here.
    fn page_unreadable(
        &mut self,
        page: PageIndex,
        waiters: Vec<usize>,
        unread: Option<Unread>,
        pages: &mut PageStore,
    ) {
        let trials = &mut self.trials.pages;
        trials.pages.entry(page).or_default().extend(waiters);
        // Waiting does not bring a member back.
        let may_pass = unread.as_ref().is_none_or(|unread| unread.by_error);
        if trials.again.is_none() {
            trials.again = trials.patience.failed(self.now);
        }
        if may_pass && trials.again.is_some() {
            return;
        }
        if unread.as_ref().is_some_and(|unread| unread.is_likely) {
            pages.settle_for(Settle::Likely);
            trials.again = Some(self.now);
            return;
        }
        if self.cx.force {
            trials.takes_anything = true;
            pages.settle_for(Settle::Anything);
            trials.again = Some(self.now);
            return;
        }
        let why = unread.map_or_else(String::new, |unread| unread.text);
        self.refuse(RecoveryError::PageUnreadable { page: page.0, why });
    }

    /// Reads pages again whose time has come.
    pub(super) fn retry_pages(&mut self, pages: &mut PageStore) {
        if self.outcome.is_some() || self.trials.pages.again.is_none_or(|at| at > self.now) {
            return;
        }
        self.trials.pages.again = None;
        let waiting: Vec<(PageIndex, Vec<usize>)> = self
            .trials
            .pages
            .pages
            .iter_mut()
            .map(|(page, waiters)| (*page, std::mem::take(waiters)))
            .collect();
        for (page, waiters) in waiting {
            for waiter in waiters {
                match self.want_page(page, waiter, pages) {
                    Want::Loading => {}
                    Want::Cached | Want::BeingWritten | Want::Unavailable => {
                        unreachable!(
                            "a page that could not be read is not cached, and its members are the same"
                        )
                    }
                }
            }
        }
    }

    /// Whether a page has hashes of a slot that held data before the log began: then it was written. If the
    /// log has the first record of a stripe, its page may never have been written.
    fn must_be_written(&self, page: PageIndex, pages: &PageStore) -> bool {
        let mut slots = pages.layout().slots_of(page);
        slots.any(|slot| {
            self.map.slots_with_data[slot as usize] && !self.plan.judge.begins_in_log(SlotIndex(slot))
        })
    }

    /// R8: the pages that were changed, then a flush of everything.
    pub(super) fn write_pages(&mut self, next: usize, pages: &mut PageStore) -> bool {
        let (usable, building) = (self.cx.usable, self.cx.building.clone());
        let targets = |member: MemberIndex, which: Which| {
            let built = |device: &Building| device.member == member && device.which == which;
            which == Which::Primary && usable.contains(member) || building.iter().any(built)
        };
        while self.io.flights.len() < PAGE_WRITES_AT_ONCE {
            let mut wanted = Vec::new();
            pages.frozen_writes(1, &targets, &self.io.pool, &mut wanted);
            if wanted.is_empty() {
                break;
            }
            self.page_io(wanted);
        }
        if !pages.is_written() || !self.io.is_idle() {
            return self.stay(Step::Pages { next });
        }
        self.flush(true);
        self.step = Step::FlushRedo { next };
        true
    }
}
