//! Pages for operations, and the handling of page I/O that ends: for the pages, for the members that hold
//! their copies, and for a scrub that reads them.

use crate::array::pages::hold::{PageHold, PageTask, PagesHeld};
use crate::array::pages::store::{Answer, LoadOutcome, PageRead};
use crate::array::{Array, Inflight, NoticeKind, NoticeLevel};
use crate::block_io::{IoFault, IoFaultKind, IoValue};
use crate::format::{MemberSet, MemberState, PageIndex};
use crate::units::MemberIndex;

impl Array {
    /// Whether all pages are here and held. Otherwise the operation `key` is advanced when that may have
    /// changed.
    pub(in crate::array) fn hold_pages(&mut self, key: usize, hold: &mut PageHold) -> PagesHeld {
        let held = self.pages.hold(&mut self.core, key, hold);
        if hold.is_to_ask_later() {
            self.redo.wait_for_checkpoint_once(key);
        }
        held
    }

    /// Releases the pages of an operation.
    pub(in crate::array) fn release_pages(&mut self, hold: &mut PageHold) {
        self.pages.release(hold, self.redo.lives());
    }

    /// Takes the end of the I/O of a page. The meaning of a fault for the device was judged before.
    pub(in crate::array) fn page_io(
        &mut self,
        task: PageTask,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) {
        match (task, result) {
            (PageTask::Read(read), Ok(IoValue::Data(buf))) => {
                self.bad.page_mended(entry.member, read.page());
                self.page_read(read, Answer::Bytes(&buf));
            }
            (PageTask::Read(read), Err(fault)) => {
                self.note_bad_page(entry.member, read.page(), fault.kind == IoFaultKind::Medium);
                let gone = self.core.find_device(entry.device).is_none();
                self.page_read(read, if gone { Answer::Gone } else { Answer::Unreadable });
            }
            (PageTask::Write(write), Ok(_)) => {
                self.bad.page_mended(entry.member, write.page());
                self.pages.write_done(write, true);
            }
            (PageTask::Write(write), Err(_)) => self.pages.write_done(write, false),
            (PageTask::Read(_), Ok(_)) => unreachable!("a read yields data"),
        }
    }

    /// Whether no operation waits for the end of an I/O, sent or not.
    pub(in crate::array) fn io_is_idle(&self) -> bool {
        self.core.inflight.is_empty() && !self.pages.has_gone()
    }

    /// Ends page I/O that was not sent because its device had left service.
    pub(super) fn end_gone_page_io(&mut self) {
        while let Some(task) = self.pages.next_gone() {
            match task {
                PageTask::Read(read) => self.page_read(read, Answer::Gone),
                PageTask::Write(write) => self.pages.write_done(write, false),
            }
        }
    }

    fn note_bad_page(&mut self, member: MemberIndex, page: PageIndex, is_bad: bool) {
        if is_bad && self.core.member(member).state == MemberState::Online {
            self.bad.page_failed(self.core.now, member, page);
        }
    }

    fn page_read(&mut self, read: PageRead, answer: Answer<'_>) {
        let page = read.page();
        let redo = &self.redo;
        let no_entry_counts = |pages: &_, page| redo.no_entry_counts(pages, page);
        let loaded = self.pages.read_done(&mut self.core, read, answer, no_entry_counts);
        let Some(loaded) = loaded else { return };
        if loaded.outcome == LoadOutcome::Unreadable {
            self.note_reread(page, MemberSet::default());
            return self.pages.not_read(&mut self.core, page, loaded);
        }
        if loaded.outcome != LoadOutcome::AskAgain {
            self.pages.read(&mut self.core, page);
            if !loaded.is_of_one_copy {
                self.note_reread(page, loaded.good);
            }
        }
        for (member, fault) in loaded.faults {
            let is_kept = loaded.is_kept;
            match self.passes.scrub_mut() {
                // Bad copies are rewritten by the next checkpoint, unless no copy shows what to write.
                Some(scrub) if is_kept => _ = scrub.note_errors(1),
                Some(scrub) => scrub.owe_page(page, member),
                None => {}
            }
            if !is_kept && loaded.marked.contains(member) {
                // The device was built without the page, which is no error of the device.
                continue;
            }
            let has_scrub = self.passes.has_scrub();
            let counters = &mut self.core.member_mut(member).counters;
            // An error of the device was counted when it happened.
            counters.checksum_errors += u64::from(fault.is_of_content());
            // A scrub reads it again. Without a scrub, a copy that could be read counts as repaired by the
            // write, as far as is known.
            counters.repaired += u64::from(!is_kept && !has_scrub && fault.is_of_content());
            self.note_bad_page(member, page, true);
            // Where no copy of a page is good, nothing shows what to rewrite: that is reported once, below.
            if !is_kept {
                self.core.notice_page_fault(member, page, fault);
            }
        }
        if loaded.is_kept {
            let text = format!(
                "metadata page {} is damaged or old on all members, and nothing can rewrite it but writes: blocks whose checksums it \
                 does not have read as errors until they are written again, or a copy of it is good after all",
                page.0
            );
            self.core.notice(NoticeKind::PageLost, NoticeLevel::Error, None, text);
        }
        self.pages.arrived(&mut self.core, page, loaded.outcome, loaded.waiters);
    }

    /// Tick: reads pages again that could not be read, and looks at those that were given up.
    pub(super) fn retry_pages(&mut self) {
        self.pages.retry(&mut self.core);
        if !self.core.stop.hurried && !self.core.is_failed() && self.redo.is_serving() {
            self.pages.look(&mut self.core);
        }
    }
}
