//! Metadata pages for operations: an operation holds the pages it works on, and they are loaded for it.
//!
//! Lies between the page store, which knows pages and copies, and the members, which have devices and leave
//! service.

use crate::array::Core;
use crate::array::base::members::Which;
use crate::array::pages::Pages;
use crate::array::pages::copies::{CopyFault, Torn};
use crate::array::pages::patience::AT_ONCE;
use crate::array::pages::store::{Answer, LoadOutcome, Loaded, PageIo, PageRead, PageWrite, Want};
use crate::array::{NoticeKind, NoticeLevel, Owner};
use crate::block_io::IoOp;
use crate::format::PageIndex;
use crate::units::{MemberIndex, SlotIndex};
use std::ops::Range;

/// The pages of an operation.
#[derive(Debug, Default)]
pub(in crate::array) struct PageHold {
    pages: Range<u64>,
    /// Whether the copies of cached pages are read too: for a scrub.
    check: bool,
    /// Whether it waits for no page that cannot be read: for a build, which comes back to such pages.
    at_once: bool,
    /// Whether it counts in what is said of the cache.
    is_counted: bool,
    /// Pages to be checked that were being written, each with how often it had been written when that was
    /// first found.
    busy: Vec<(PageIndex, u64)>,
    /// Pages of `busy` that have to be asked for again after the checkpoint.
    later: Vec<PageIndex>,
    /// Identifies the hold to the page store, once it has asked. The key of its operation would not do:
    /// another operation gets that key soon after this one has ended, while pages that this one waited for
    /// still arrive.
    ticket: Option<usize>,
    /// Pages pinned for it.
    held: Vec<PageIndex>,
    loading: usize,
    /// Pages that cannot be read now.
    unreadable: usize,
    life: u64,
}

/// How far holding pages has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum PagesHeld {
    /// Not done: the operation is advanced when that may have changed.
    Wait,
    /// All pages are here and pinned. For a scrub, all but `unreadable` pages, which cannot be read.
    All { unreadable: usize },
    /// Some page cannot be read now, although it was tried for as long as a request may wait (rule T3): the
    /// operation ends with an error and changes nothing. The next request for the page has it read again.
    Unreadable,
}

/// A page under check that was written this often meanwhile has a new version in both places of every copy:
/// the first of these writes may have been under way when the check was asked for, and the last one still is.
const WRITES_THAT_REPLACE: u64 = 3;

/// A page that was loaded for an operation.
pub(super) struct Arrival {
    ticket: usize,
    page: PageIndex,
    outcome: LoadOutcome,
}

/// The task that a page I/O belongs to.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) enum PageTask {
    Read(PageRead),
    Write(PageWrite),
}

impl PageHold {
    pub(in crate::array) fn new(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { pages, life, ..PageHold::default() }
    }

    /// The same for a request of a client.
    pub(in crate::array) fn of_client(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { is_counted: true, ..PageHold::new(pages, life) }
    }

    /// The same as the first, but the first failed try to read a page is reported.
    pub(in crate::array) fn at_once(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { at_once: true, ..PageHold::new(pages, life) }
    }

    /// The same as the first, with every copy of the pages read and compared.
    pub(in crate::array) fn checked(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { check: true, ..PageHold::new(pages, life) }
    }

    /// Whether pages are being written, and the hold waits for nothing else.
    pub(in crate::array) fn waits_for_checkpoint(&self) -> bool {
        self.loading == 0 && !self.later.is_empty()
    }

    /// Whether pages are to be asked for again after the next checkpoint.
    pub(in crate::array) fn is_to_ask_later(&self) -> bool {
        !self.later.is_empty()
    }

    /// Whether a page is here.
    pub(in crate::array) fn has(&self, page: PageIndex) -> bool {
        self.held.contains(&page)
    }
}

impl Pages {
    /// Whether all pages are here and held. Otherwise the operation `key` is advanced when that may have
    /// changed. With [`PageHold::is_to_ask_later`] the caller must also advance it after the next checkpoint.
    pub(in crate::array) fn hold(&mut self, core: &mut Core, key: usize, hold: &mut PageHold) -> PagesHeld {
        let ticket = match hold.ticket {
            Some(ticket) => ticket,
            None => {
                let ticket = self.new_ticket(hold.at_once);
                self.tickets.insert(ticket, key);
                hold.ticket = Some(ticket);
                for page in hold.pages.clone() {
                    self.ask_for(core, ticket, hold, PageIndex(page));
                }
                ticket
            }
        };
        for page in std::mem::take(&mut hold.later) {
            self.ask_for(core, ticket, hold, page);
        }
        while hold.loading > 0 {
            let Some(at) = self.arrivals.iter().position(|arrival| arrival.ticket == ticket) else { break };
            let arrival = self.arrivals.swap_remove(at);
            hold.loading -= 1;
            match arrival.outcome {
                LoadOutcome::Ready | LoadOutcome::Lost | LoadOutcome::Behind => hold.held.push(arrival.page),
                LoadOutcome::Unreadable => hold.unreadable += 1,
                LoadOutcome::AskAgain => self.ask_for(core, ticket, hold, arrival.page),
            }
        }
        if hold.unreadable > 0 && !hold.check {
            return PagesHeld::Unreadable;
        }
        if hold.loading > 0 {
            return PagesHeld::Wait;
        }
        if hold.later.is_empty() {
            self.tickets.remove(&ticket);
        }
        let all = hold.held.len() + hold.unreadable == (hold.pages.end - hold.pages.start) as usize;
        if all { PagesHeld::All { unreadable: hold.unreadable } } else { PagesHeld::Wait }
    }

    /// `at_once`: the ticket gets its answer at the first try that fails.
    pub(super) fn new_ticket(&mut self, at_once: bool) -> usize {
        let ticket = self.next_ticket | if at_once { AT_ONCE } else { 0 };
        self.next_ticket += 1;
        ticket
    }

    fn ask_for(&mut self, core: &mut Core, ticket: usize, hold: &mut PageHold, page: PageIndex) {
        if self.unreadable.joins(page, ticket) {
            match hold.at_once {
                true => hold.unreadable += 1,
                false => hold.loading += 1,
            }
            return;
        }
        let usable = core.online();
        let mut io = Vec::new();
        let usable = |member| usable.contains(member);
        let want = if hold.check {
            self.store.check(page, ticket, &usable, &mut io)
        } else {
            self.store.want(page, ticket, Torn::Impossible, &usable, &mut io)
        };
        if hold.is_counted {
            self.ahead.count(want);
        }
        match want {
            Want::Cached => hold.held.push(page),
            Want::Loading => hold.loading += 1,
            Want::BeingWritten => self.ask_later(hold, page),
            // The array has failed, and operations that ask end because of that.
            Want::Unavailable => {}
        }
        self.send(core, io);
    }

    /// Puts off a page to be checked that is being written: it is asked for again when that is over, unless
    /// it was written so often since then that nothing is left to check.
    fn ask_later(&mut self, hold: &mut PageHold, page: PageIndex) {
        let written = self.store.snapshot(page).sequence;
        let known = hold.busy.iter().find(|(other, _)| *other == page).map(|(_, first)| *first);
        let first = known.unwrap_or(written);
        if known.is_none() {
            hold.busy.push((page, written));
        }
        if written >= first + WRITES_THAT_REPLACE {
            self.store.pin(page);
            hold.held.push(page);
            return;
        }
        hold.later.push(page);
    }

    /// Releases the pages, also those still on their way. Pages of a life of the log before `life` ended with
    /// that life.
    pub(in crate::array) fn release(&mut self, hold: &mut PageHold, life: u64) {
        let hold = std::mem::take(hold);
        if hold.life != life {
            return;
        }
        for page in hold.held {
            self.store.release(page);
        }
        let Some(ticket) = hold.ticket else { return };
        self.tickets.remove(&ticket);
        for arrival in self.arrivals.extract_if(.., |arrival| arrival.ticket == ticket) {
            if arrival.outcome.pins() {
                self.store.release(arrival.page);
            }
        }
    }

    pub(super) fn send(&mut self, core: &mut Core, io: Vec<PageIo>) {
        for io in io {
            let (task, member, which, offset) = match &io {
                PageIo::Read { read, member, offset, .. } => {
                    (PageTask::Read(*read), *member, Which::Primary, *offset)
                }
                PageIo::Write { write, member, which, offset, .. } => {
                    (PageTask::Write(*write), *member, *which, *offset)
                }
            };
            let Some(device) = core.device_of(member, which) else {
                self.gone.push_back(task);
                continue;
            };
            let offset = self.offset.plus(offset);
            let op = match io {
                PageIo::Read { len, .. } => IoOp::Read { offset, buf: core.pool.alloc(len) },
                PageIo::Write { bytes, .. } => IoOp::Write { offset, buf: bytes, fua: false },
            };
            core.submit_io(Owner::Page(task), member, device, op);
        }
    }

    /// Takes out I/O that was not sent because its device has left service. It ends with that error.
    pub(in crate::array) fn next_gone(&mut self) -> Option<PageTask> {
        self.gone.pop_front()
    }

    /// Whether there is such I/O.
    pub(in crate::array) fn has_gone(&self) -> bool {
        !self.gone.is_empty()
    }

    /// Takes the end of a write.
    pub(in crate::array) fn write_done(&mut self, write: PageWrite, succeeded: bool) {
        self.store.write_done(write, succeeded);
    }

    /// Takes the end of a read. Some when it was the last of its load, with how the result is judged.
    /// `no_entry_counts`: no slot with entries in the page counts.
    pub(in crate::array) fn read_done(
        &mut self,
        core: &mut Core,
        read: PageRead,
        answer: Answer<'_>,
        no_entry_counts: impl FnOnce(&Pages, PageIndex) -> bool,
    ) -> Option<Loaded> {
        let mut more = Vec::new();
        let loaded = self.store.read_done(read, answer, &mut more);
        self.send(core, more);
        let mut loaded = loaded?;
        let page = read.page();
        if loaded.outcome == LoadOutcome::Ready && self.is_blank_and_in_use(page) {
            if loaded.unread.is_some() {
                self.store.retract_blank(page);
                (loaded.outcome, loaded.faults) = (LoadOutcome::Unreadable, Vec::new());
            } else {
                loaded.faults = self.store.deny_blank(page);
                (loaded.outcome, loaded.is_kept) = (LoadOutcome::Lost, true);
            }
        }
        if loaded.outcome == LoadOutcome::Ready {
            self.store.outdo_left_alone(page);
        }
        if loaded.is_kept && no_entry_counts(self, page) {
            let bad = loaded.faults.iter().map(|(member, _)| *member).collect();
            self.store.begin_anew(page, bad);
            (loaded.outcome, loaded.is_kept) = (LoadOutcome::Ready, false);
            // It was known when these copies were written that they hold no version, so they do not count as
            // errors.
            loaded.faults.retain(|(member, _)| !loaded.marked.contains(*member));
        }
        Some(loaded)
    }

    /// Tells the operations that wait for a page that its load has ended.
    pub(in crate::array) fn arrived(
        &mut self,
        core: &mut Core,
        page: PageIndex,
        outcome: LoadOutcome,
        tickets: Vec<usize>,
    ) {
        for ticket in tickets {
            self.ahead.arrived(ticket);
            match self.tickets.get(&ticket) {
                Some(&key) => {
                    self.arrivals.push(Arrival { ticket, page, outcome });
                    core.work.ready.push_back(key);
                }
                // The requester has finished.
                None if outcome.pins() => self.store.release(page),
                None => {}
            }
        }
    }

    /// Whether a page shows no version on any member although a stripe holds data in one of its slots. The
    /// hashes of a stripe are written together with the map entry that says it holds data, and until then
    /// they are in the cache.
    fn is_blank_and_in_use(&self, page: PageIndex) -> bool {
        let holds_data =
            |slot| self.stripes.stripe_at(SlotIndex(slot)).is_some_and(|stripe| self.holds_data(stripe));
        self.store.is_blank(page) && self.store.layout().slots_of(page).any(holds_data)
    }
}

impl Core {
    pub(in crate::array) fn notice_page_fault(
        &mut self,
        member: MemberIndex,
        page: PageIndex,
        fault: CopyFault,
    ) {
        let what = match fault {
            CopyFault::Damaged => "a damaged",
            CopyFault::Unreadable => "an unreadable",
            CopyFault::Stale => "an old",
            CopyFault::Blank => "an empty",
        };
        let text =
            format!("member {member} has {what} copy of metadata page {}; it will be rewritten", page.0);
        self.notice(NoticeKind::PageRepaired, NoticeLevel::Warning, Some(member), text);
    }
}
