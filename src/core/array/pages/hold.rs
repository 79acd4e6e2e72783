//! Metadata pages for operations: an operation holds the pages it works on, and they are loaded for it.
//!
//! Between the page store, which knows pages and copies, and the members, which have devices and leave service.

use crate::array::Core;
use crate::array::base::members::Which;
use crate::array::pages::copies::{CopyFault, Torn};
use crate::array::pages::patience::AT_ONCE;
use crate::array::pages::store::{Answer, LoadOutcome, PageIo, PageRead, PageWrite, Want};
use crate::array::{Array, Inflight, NoticeKind, NoticeLevel, Owner};
use crate::block_io::{IoFault, IoFaultKind, IoOp, IoValue};
use crate::format::{MemberSet, MemberState, PageIndex};
use crate::units::{MemberIndex, SlotIndex};
use std::ops::Range;

/// The pages of an operation.
#[derive(Debug, Default)]
pub(in crate::array) struct PageHold {
    pages: Range<u64>,
    /// Read the copies of cached pages too: a scrub.
    check: bool,
    /// Wait for no page that cannot be read: a build, which comes back to it.
    at_once: bool,
    /// Pages to be checked that were being written, and how often they had been written when that was first found.
    busy: Vec<(PageIndex, u64)>,
    /// Of these, those to be asked for again after the checkpoint.
    later: Vec<PageIndex>,
    /// Names it towards the page store, once it has asked. The key of its operation would not do: that is another's
    /// soon after an operation has ended, and pages that it was waiting for arrive all the same.
    ticket: Option<usize>,
    /// Pinned for it.
    held: Vec<PageIndex>,
    loading: usize,
    /// Pages that cannot be read now.
    unreadable: usize,
    life: u64,
}

/// How far holding pages has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum PagesHeld {
    /// Not yet: the operation is advanced when that may have changed.
    Wait,
    /// All pages are here and pinned; of those of a scrub, all but so many that cannot be read.
    All { unreadable: usize },
    /// Some page cannot be read now, and was tried for as long as a request may wait (rule T3): the operation ends with an
    /// error and changes nothing. Whoever asks next has the page looked at again.
    Unreadable,
}

/// A page under check that was written this often meanwhile was written in both places of every copy, from the
/// beginning: the first write may have been under way when it was asked for, the last still is.
const WRITES_THAT_REPLACE: u64 = 3;

/// A page that was loaded for an operation.
pub(in crate::array) struct Arrival {
    pub ticket: usize,
    pub page: PageIndex,
    pub outcome: LoadOutcome,
}

/// What a page I/O belongs to.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) enum PageTask {
    Read(PageRead),
    Write(PageWrite),
}

impl PageHold {
    pub(in crate::array) fn new(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { pages, life, ..PageHold::default() }
    }

    /// The same, but a page that cannot be read is told of at the first try that fails.
    pub(in crate::array) fn at_once(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { at_once: true, ..PageHold::new(pages, life) }
    }

    /// The same as the first, with every copy of the pages read and compared.
    pub(in crate::array) fn checked(pages: Range<u64>, life: u64) -> PageHold {
        PageHold { check: true, ..PageHold::new(pages, life) }
    }

    /// Whether pages are being written, and nothing else is waited for.
    pub(in crate::array) fn waits_for_checkpoint(&self) -> bool {
        self.loading == 0 && !self.later.is_empty()
    }

    /// Whether a page is here.
    pub(in crate::array) fn has(&self, page: PageIndex) -> bool {
        self.held.contains(&page)
    }
}

impl Array {
    /// Whether all pages are here and held. Otherwise the operation `key` is advanced when that may have changed.
    pub(in crate::array) fn hold_pages(&mut self, key: usize, hold: &mut PageHold) -> PagesHeld {
        let ticket = match hold.ticket {
            Some(ticket) => ticket,
            None => {
                let redo = self.redo_mut();
                let ticket = redo.page_waits.next_page_ticket | if hold.at_once { AT_ONCE } else { 0 };
                redo.page_waits.next_page_ticket += 1;
                redo.page_waits.page_tickets.insert(ticket, key);
                hold.ticket = Some(ticket);
                for page in hold.pages.clone() {
                    self.ask_for_page(ticket, hold, PageIndex(page));
                }
                ticket
            }
        };
        for page in std::mem::take(&mut hold.later) {
            self.ask_for_page(ticket, hold, page);
        }
        while hold.loading > 0 {
            let arrivals = &mut self.redo_mut().page_waits.arrivals;
            let Some(at) = arrivals.iter().position(|arrival| arrival.ticket == ticket) else { break };
            let arrival = arrivals.swap_remove(at);
            hold.loading -= 1;
            match arrival.outcome {
                LoadOutcome::Ready | LoadOutcome::Lost | LoadOutcome::Behind => hold.held.push(arrival.page),
                LoadOutcome::Unreadable => hold.unreadable += 1,
                LoadOutcome::AskAgain => self.ask_for_page(ticket, hold, arrival.page),
            }
        }
        if hold.unreadable > 0 && !hold.check {
            return PagesHeld::Unreadable;
        }
        if hold.loading > 0 {
            return PagesHeld::Wait;
        }
        if hold.later.is_empty() {
            self.redo_mut().page_waits.page_tickets.remove(&ticket);
        }
        let all = hold.held.len() + hold.unreadable == (hold.pages.end - hold.pages.start) as usize;
        if all { PagesHeld::All { unreadable: hold.unreadable } } else { PagesHeld::Wait }
    }

    fn ask_for_page(&mut self, ticket: usize, hold: &mut PageHold, page: PageIndex) {
        if self.redo_mut().page_waits.unreadable.joins(page, ticket) {
            match hold.at_once {
                true => hold.unreadable += 1,
                false => hold.loading += 1,
            }
            return;
        }
        let usable = self.core.online();
        let mut io = Vec::new();
        let pages = &mut self.redo_mut().pages;
        let usable = |member| usable.contains(member);
        let want = if hold.check {
            pages.check(page, ticket, &usable, &mut io)
        } else {
            pages.want(page, ticket, Torn::Impossible, &usable, &mut io)
        };
        match want {
            Want::Cached => hold.held.push(page),
            Want::Loading => hold.loading += 1,
            Want::BeingWritten => self.ask_later(ticket, hold, page),
            // The array has failed, and whoever asks ends for that.
            Want::Unavailable => {}
        }
        self.send_page_io(io);
    }

    /// A page to be checked is being written: it is asked for again when that is over, unless it was written so often
    /// since that nothing is left to check.
    fn ask_later(&mut self, ticket: usize, hold: &mut PageHold, page: PageIndex) {
        let redo = self.redo_mut();
        let written = redo.pages.snapshot(page).sequence;
        let known = hold.busy.iter().find(|(other, _)| *other == page).map(|(_, first)| *first);
        let first = known.unwrap_or(written);
        if known.is_none() {
            hold.busy.push((page, written));
        }
        if written >= first + WRITES_THAT_REPLACE {
            redo.pages.pin(page);
            hold.held.push(page);
            return;
        }
        hold.later.push(page);
        let key = redo.page_waits.page_tickets[&ticket];
        if !redo.waits.waiting_for_drain.contains(&key) {
            redo.waits.waiting_for_drain.push(key);
        }
    }

    /// Gives up the pages, those too that are still on their way; those of an earlier life of the log went with it.
    pub(in crate::array) fn release_pages(&mut self, hold: &mut PageHold) {
        let hold = std::mem::take(hold);
        let redo = self.redo_mut();
        if redo.lives == hold.life {
            for page in hold.held {
                redo.pages.release(page);
            }
            let Some(ticket) = hold.ticket else { return };
            redo.page_waits.page_tickets.remove(&ticket);
            for arrival in redo.page_waits.arrivals.extract_if(.., |arrival| arrival.ticket == ticket) {
                if arrival.outcome.pins() {
                    redo.pages.release(arrival.page);
                }
            }
        }
    }

    pub(in crate::array) fn send_page_io(&mut self, io: Vec<PageIo>) {
        for io in io {
            let (task, member, which, offset) = match &io {
                PageIo::Read { read, member, offset, .. } => {
                    (PageTask::Read(*read), *member, Which::Primary, *offset)
                }
                PageIo::Write { write, member, which, offset, .. } => {
                    (PageTask::Write(*write), *member, *which, *offset)
                }
            };
            let offset = self.redo().place.pages_offset.plus(offset);
            let Some(device) = self.core.device_of(member, which) else {
                self.page_gone(task);
                continue;
            };
            let op = match io {
                PageIo::Read { len, .. } => IoOp::Read { offset, buf: self.core.pool.alloc(len) },
                PageIo::Write { bytes, .. } => IoOp::Write { offset, buf: bytes, fua: false },
            };
            self.core.submit_io(Owner::Page(task), member, device, op);
        }
    }

    pub(in crate::array) fn page_io(
        &mut self,
        task: PageTask,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) {
        match (task, result) {
            (PageTask::Read(read), Ok(IoValue::Data(buf))) => {
                self.bad.page_mended(entry.member, read.page);
                self.page_read(read, Answer::Bytes(&buf));
            }
            (PageTask::Read(read), Err(fault)) => {
                self.read_fault(entry.member, entry.device, fault);
                self.note_bad_page(entry.member, read.page, fault.kind == IoFaultKind::Medium);
                let gone = self.core.find_device(entry.device).is_none();
                self.page_read(read, if gone { Answer::Gone } else { Answer::Unreadable });
            }
            (PageTask::Write(write), Ok(_)) => {
                self.bad.page_mended(entry.member, write.page);
                self.page_written(write, true);
            }
            (PageTask::Write(write), Err(fault)) => {
                self.write_fault(entry.member, entry.device, "write of a metadata page", fault);
                self.page_written(write, false);
            }
            (PageTask::Read(_), Ok(_)) => unreachable!("a read yields data"),
        }
    }

    fn note_bad_page(&mut self, member: MemberIndex, page: PageIndex, is_bad: bool) {
        if is_bad && self.core.member(member).state == MemberState::Online {
            self.bad.page_failed(self.core.now, member, page);
        }
    }

    fn page_gone(&mut self, task: PageTask) {
        match task {
            PageTask::Read(read) => self.page_read(read, Answer::Gone),
            PageTask::Write(write) => self.page_written(write, false),
        }
    }

    fn page_read(&mut self, read: PageRead, answer: Answer<'_>) {
        let mut more = Vec::new();
        let loaded = self.redo_mut().pages.read_done(read, answer, &mut more);
        self.send_page_io(more);
        let Some(mut loaded) = loaded else { return };
        if loaded.outcome == LoadOutcome::Ready && self.is_blank_and_in_use(read.page) {
            if loaded.unread.is_some() {
                self.redo_mut().pages.retract_blank(read.page);
                (loaded.outcome, loaded.faults) = (LoadOutcome::Unreadable, Vec::new());
            } else {
                loaded.faults = self.redo_mut().pages.deny_blank(read.page);
                (loaded.outcome, loaded.is_kept) = (LoadOutcome::Lost, true);
            }
        }
        if loaded.outcome == LoadOutcome::Ready {
            self.redo_mut().pages.outdo_left_alone(read.page);
        }
        if loaded.is_kept && self.tells_of_nothing(read.page) {
            let bad = loaded.faults.iter().map(|(member, _)| *member).collect();
            self.redo_mut().pages.begin_anew(read.page, bad);
            (loaded.outcome, loaded.is_kept) = (LoadOutcome::Ready, false);
            // That they have no version was known when they were written: nobody is to blame for it.
            loaded.faults.retain(|(member, _)| !loaded.marked.contains(*member));
        }
        if loaded.outcome == LoadOutcome::Unreadable {
            self.note_reread(read.page, MemberSet::default());
            return self.page_unreadable(read.page, loaded);
        }
        if loaded.outcome != LoadOutcome::AskAgain {
            self.page_readable(read.page);
            self.note_reread(read.page, loaded.good);
        }
        for (member, fault) in loaded.faults {
            let is_kept = loaded.is_kept;
            match self.passes.scrub_mut() {
                // They are written anew with the next checkpoint, unless no copy tells what to write.
                Some(scrub) if is_kept => _ = scrub.note_errors(1),
                Some(scrub) => scrub.owe_page(read.page, member),
                None => {}
            }
            if !is_kept && loaded.marked.contains(member) {
                // It was built without the page, which is no error of it.
                continue;
            }
            let has_scrub = self.passes.has_scrub();
            let counters = &mut self.core.member_mut(member).counters;
            // That it gave an error was counted when it did.
            counters.checksum_errors += u64::from(fault.is_of_content());
            // A scrub reads it again. Without one, a copy that could be read takes the write, as far as is known.
            counters.repaired += u64::from(!is_kept && !has_scrub && fault.is_of_content());
            self.note_bad_page(member, read.page, true);
            // Of one of which none is good, nothing tells what to rewrite: that is told once, below.
            if !is_kept {
                self.core.notice_page_fault(member, read.page, fault);
            }
        }
        if loaded.is_kept {
            let text = format!(
                "metadata page {} is damaged or old on all members, and nothing can rewrite it but writes: blocks whose checksums it \
                 does not have read as errors until they are written again, or a copy of it is good after all",
                read.page.0
            );
            self.core.notice(NoticeKind::PageLost, NoticeLevel::Error, None, text);
        }
        self.page_arrived(read.page, loaded.outcome, loaded.waiters);
    }

    /// Tells the operations that wait for a page.
    pub(super) fn page_arrived(&mut self, page: PageIndex, outcome: LoadOutcome, tickets: Vec<usize>) {
        for ticket in tickets {
            let redo = self.redo_mut();
            match redo.page_waits.page_tickets.get(&ticket) {
                Some(&key) => {
                    redo.page_waits.arrivals.push(Arrival { ticket, page, outcome });
                    self.core.work.ready.push_back(key);
                }
                // The requester has finished.
                None if outcome.pins() => redo.pages.release(page),
                None => {}
            }
        }
    }

    /// Whether a page shows no version on any member although a stripe holds data in one of its slots. The hashes of a
    /// stripe are written with the entry of the map that says it holds data, and before that they are in the cache.
    fn is_blank_and_in_use(&self, page: PageIndex) -> bool {
        let redo = self.redo();
        let holds_data = |slot| redo.stripes.stripe_at(SlotIndex(slot)).is_some_and(|s| self.holds_data(s));
        redo.pages.is_blank(page) && redo.pages.layout().slots_of(page).any(holds_data)
    }

    /// Whether nothing that a page of checksums tells of counts: no slot of it holds data, nor
    /// could a crash bring back some. What it says of such a slot is written anew with the first
    /// data.
    pub(super) fn tells_of_nothing(&self, page: PageIndex) -> bool {
        let redo = self.redo();
        let layout = redo.pages.layout();
        let may_count = |slot| match redo.stripes.stripe_at(slot) {
            Some(stripe) => self.holds_data(stripe) || redo.is_in_log(stripe),
            None => redo.stripes.is_retired(slot),
        };
        page.0 >= layout.map_pages()
            && redo.is_serving()
            && !layout.slots_of(page).map(SlotIndex).any(may_count)
    }

    fn page_written(&mut self, write: PageWrite, succeeded: bool) {
        self.redo_mut().pages.write_done(write, succeeded);
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
