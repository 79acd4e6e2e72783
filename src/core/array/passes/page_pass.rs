//! The metadata pages of a device under construction, and how it joins.
//!
//! A pass walks over the pages that have a copy on the member and has each written whole with a checkpoint.
//! When that is over and every slot is built, the log is emptied, so that no image in it is missing on the
//! new device, and the device joins with a new epoch.
//!
//! A page that the other members cannot give is marked as damaged on the device. But where a device is only
//! caught up, its own copy may be the only one left: if its member has missed no block with an entry in the
//! page, that copy is read, and the page taken from it (`pages/offers.rs`). If it does not decide the content
//! of the page, it stays as it is.
//!
//! Pages that cannot be read are tried again before the device joins, as slots are: once it is in service,
//! another member may leave, and with it the only other copy. The pass does not wait for single pages: it
//! goes on at the first error, and comes back in rounds to those that failed. It does not wait for pages
//! without data behind them.

use crate::array::base::members::{MemberDevice, PagesBuilt, Progress, Which};
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::hold::{PageHold, PagesHeld};
use crate::array::{Array, Core, Flow, NoticeKind, NoticeLevel, Op, Owner};
use crate::block_io::{BufMut, IoFault, IoOp, IoValue};
use crate::format::{PAGE_BYTES, PageIndex};
use crate::units::{Count, MemberIndex, SlotIndex, Timestamp};
use std::collections::{BTreeSet, VecDeque};

/// Time between two tries of pages that cannot be read.
const RETRY_NS: u64 = 1_000_000_000;

/// How long they are tried where slots have used up the time that a device waits.
const ROUNDS_MIN_NS: u64 = 4_000_000_000;

/// Most pages that are tried again at one time: with more, the members that should give them are as good as
/// gone.
const TRIED_AGAIN_MAX: usize = 4096;

pub(in crate::array) struct PagePass {
    device: MemberDevice,
    next: PageIndex,
    hold: Option<(PageIndex, PageHold)>,
    /// The copy of a page on the device itself, being read. Its content was offered for the page named last,
    /// and may be of use, now or later.
    own: Option<OwnCopy>,
    offered: Option<(PageIndex, bool)>,
    retries: Retries,
    /// The checkpoint that must have ended, once all pages were asked for.
    last: Option<u64>,
    life: u64,
}

/// Pages that could not be read, and are tried again.
struct Retries {
    /// How often it has come back to pages that could not be read; and those left of the present round, which
    /// begins at this time.
    rounds: u32,
    again: VecDeque<PageIndex>,
    not_before: Timestamp,
    /// Pages that could not be read, of which the copy on the device itself may count: it is read when
    /// another try has failed.
    aside: VecDeque<PageIndex>,
    /// Pages that the device lacks and that it waits for.
    lacking: BTreeSet<PageIndex>,
    /// Until when it waits for them at least.
    patient_until: Timestamp,
    is_last_try: bool,
}

/// See [`PagePass::own`].
struct OwnCopy {
    page: PageIndex,
    places: [Option<BufMut>; 2],
    pending: usize,
}

/// Whether a device that is caught up lacks blocks with entries in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Missed {
    None,
    Some,
    /// A crash could bring back some. After a checkpoint it cannot.
    AskLater,
}

impl PagePass {
    /// Whether it has nothing in flight.
    pub(in crate::array) fn waits(&self) -> bool {
        self.own.is_none()
    }
}

impl Array {
    /// Whether a device whose slots are built has its metadata pages, too. If not, this starts what is still
    /// to be done.
    pub(super) fn has_built_pages(&mut self, member: MemberIndex, which: Which) -> bool {
        match self.core.pages_built(member, which) {
            Some(PagesBuilt::No) => {
                self.core.set_pages_built(member, which, PagesBuilt::Running);
                self.start_page_pass(member, which);
                false
            }
            Some(PagesBuilt::Running) | None => false,
            Some(PagesBuilt::Done) => true,
        }
    }

    /// Whether a device whose slots are built may join. If not, this starts what is still to be done.
    pub(super) fn may_join(&mut self, member: MemberIndex, which: Which) -> bool {
        if !self.has_built_pages(member, which) {
            return false;
        }
        self.redo.hold_writes();
        // Pages that it was built without and that were readable since: it counts as having them once it is
        // in service.
        if self.pages.store().is_due_on(member, which) {
            self.redo.want_checkpoint();
            return false;
        }
        self.ask_log();
        let drained = !self.redo.has_promised() && self.supers.is_log_needless();
        if !drained {
            self.redo.want_checkpoint();
        }
        // The update that records the device says that all members have everything in place that the device
        // has no log of (T6). The pages that it was built with went through a checkpoint, so this update
        // began when it was built: a copy of it from before is recognised as well.
        if drained && !self.supers.is_known_quiet() {
            self.supers.want_quiet();
            return false;
        }
        drained && self.supers.acknowledgements_allowed(&self.core)
    }

    /// Ends the hold on new writes when no device waits to join any more, and the epoch of the one that has
    /// joined is complete.
    pub(in crate::array) fn end_hold(&mut self) {
        if !self.redo.holds_writes() || !self.supers.acknowledgements_allowed(&self.core) {
            return;
        }
        let slots = self.core.map.slots;
        let is_built = |progress: &Progress| progress.pages == PagesBuilt::Done && progress.is_over(slots);
        let waits = self.core.roster.members.iter().any(|member| {
            let new = member.replacement.as_ref().filter(|_| !member.holds_replacement());
            member.progress.as_ref().is_some_and(is_built) || new.is_some_and(|new| is_built(&new.progress))
        });
        // No device joins an array that is stopping, and it stops only when the writes that wait have ended.
        if !waits || self.core.stop.stopping.is_some() {
            self.redo.release_writes(&mut self.core);
        }
    }

    fn start_page_pass(&mut self, member: MemberIndex, which: Which) {
        let Some(id) = self.core.device_of(member, which) else { return };
        let life = self.redo.lives();
        let pass = PagePass {
            device: MemberDevice { member, which, id },
            next: PageIndex(0),
            hold: None,
            own: None,
            offered: None,
            retries: Retries {
                rounds: 0,
                again: VecDeque::new(),
                not_before: self.core.now,
                aside: VecDeque::new(),
                lacking: BTreeSet::new(),
                patient_until: self.core.now,
                is_last_try: false,
            },
            last: None,
            life,
        };
        let key = self.ops.insert(Op::PagePass(Box::new(pass)));
        self.core.work.ready.push_back(key);
    }

    pub(in crate::array) fn advance_page_pass(&mut self, key: usize, pass: &mut PagePass) -> Flow {
        if pass.own.as_ref().is_some_and(|own| own.pending > 0) {
            return Flow::Wait;
        }
        let ours = self.core.still_has(pass.device);
        if !ours || self.core.is_failed() || pass.life != self.redo.lives() || !self.redo.is_serving() {
            return self.end_page_pass(key, pass, false);
        }
        if self.core.now < pass.retries.not_before {
            return Flow::Wait;
        }
        loop {
            if let Some(own) = pass.own.take() {
                self.offer_own_copy(pass, &own);
            }
            if let Some((page, mut hold)) = pass.hold.take() {
                let held = self.hold_pages(key, &mut hold);
                if held == PagesHeld::Wait {
                    pass.hold = Some((page, hold));
                    return Flow::Wait;
                }
                let is_unreadable = held == PagesHeld::Unreadable;
                if !is_unreadable {
                    self.pages.rebuild(page, pass.device.member, pass.device.which);
                }
                self.release_pages(&mut hold);
                if is_unreadable {
                    match self.own_copy_counts(pass, page) {
                        Missed::AskLater => {
                            pass.hold = Some((page, PageHold::at_once(page.0..page.0 + 1, pass.life)));
                            self.redo.wait_for_checkpoint(key);
                            return Flow::Wait;
                        }
                        Missed::None
                            if pass.retries.rounds == 0 && !self.redo.no_entry_counts(&self.pages, page) =>
                        {
                            pass.retries.aside.push_back(page);
                        }
                        Missed::None => match pass.offered {
                            Some((offered, tells)) if offered == page => {
                                if tells {
                                    self.pages.leave_alone(page, pass.device.member);
                                } else {
                                    self.pages.void(page, pass.device.member, pass.device.which);
                                }
                                self.page_lacks(pass, page);
                            }
                            _ => return self.read_own_copy(key, pass, page),
                        },
                        Missed::Some => {
                            self.pages.void(page, pass.device.member, pass.device.which);
                            self.page_lacks(pass, page);
                        }
                    }
                }
            }
            if let Some(last) = pass.last {
                if self.redo.checkpoints_ended() >= last
                    && !self.pages.store().is_due_on(pass.device.member, pass.device.which)
                {
                    return self.end_page_pass(key, pass, true);
                }
                self.redo.wait_for_checkpoint(key);
                return Flow::Wait;
            }
            if self.pages.store().is_dirty_beyond(4) {
                self.redo.wait_for_checkpoint(key);
                return Flow::Wait;
            }
            let page = self.pages.store().next_page_on(pass.device.member, pass.next);
            if let Some(page) = page.or_else(|| self.core.next_page_again(pass)) {
                pass.next = pass.next.max(PageIndex(page.0 + 1));
                pass.hold = Some((page, PageHold::at_once(page.0..page.0 + 1, pass.life)));
                continue;
            }
            if self.begin_round(pass) {
                self.core.work.patient.push((pass.retries.not_before, key));
                return Flow::Wait;
            }
            if self.begin_last_try(pass) {
                continue;
            }
            self.note_lacking_pages(pass);
            // Not a checkpoint that has already begun: it may have frozen the pages before.
            pass.last = Some(self.redo.next_checkpoint());
        }
    }

    /// Begins to ask again for the pages that could not be read. False: it waits for none.
    fn begin_round(&mut self, pass: &mut PagePass) -> bool {
        let pages = self.pages.store();
        pass.retries.lacking.retain(|page| pages.is_void_on(*page, pass.device.member, pass.device.which));
        if pass.retries.is_last_try {
            return false;
        }
        if pass.retries.rounds == 0 {
            pass.retries.patient_until = Timestamp(self.core.now.0 + ROUNDS_MIN_NS);
        }
        if !pass.retries.lacking.is_empty() && self.core.waits_for_pages(pass) {
            pass.retries.again = pass.retries.lacking.iter().copied().collect();
        }
        let many = pass.retries.again.len() + pass.retries.aside.len();
        self.core.set_retried_pages(pass, many as u64);
        if many == 0 {
            return false;
        }
        if pass.retries.rounds == 0 {
            let text = format!(
                "{} cannot be read for now{}: tried again for up to half a minute before the device of member {} is in service",
                Count::of(many, "metadata page"),
                self.pages.last_unreadable(),
                pass.device.member
            );
            self.core.notice(NoticeKind::PageUnreadable, NoticeLevel::Warning, None, text);
        }
        pass.retries.rounds += 1;
        pass.offered = None;
        pass.retries.not_before = Timestamp(self.core.now.0 + RETRY_NS);
        true
    }

    /// Asks once more for all pages that the device lacks, also for those that it did not wait for because no
    /// data is behind them: with the others they may be readable by now.
    fn begin_last_try(&mut self, pass: &mut PagePass) -> bool {
        if pass.retries.rounds == 0
            || pass.retries.is_last_try
            || self.core.stop.hurried
            || is_off(Mutation::JoinsLacking)
        {
            return false;
        }
        pass.retries.is_last_try = true;
        pass.offered = None;
        pass.retries.again = self.pages.store().void_on(pass.device.member, pass.device.which).collect();
        !pass.retries.again.is_empty()
    }

    /// Handles a page that cannot be read, and of which the device has no good copy, as far as is known.
    fn page_lacks(&self, pass: &mut PagePass, page: PageIndex) {
        if pass.retries.lacking.len() < TRIED_AGAIN_MAX && !self.redo.no_entry_counts(&self.pages, page) {
            pass.retries.lacking.insert(page);
        }
    }

    /// Reports that the device joins without pages that cannot be read.
    fn note_lacking_pages(&mut self, pass: &PagePass) {
        let void: Vec<PageIndex> =
            self.pages.store().void_on(pass.device.member, pass.device.which).collect();
        let mut with_data = 0;
        for &page in &void {
            let has_data = !self.redo.no_entry_counts(&self.pages, page);
            with_data += usize::from(has_data);
            self.pages.lacks(page, has_data);
        }
        let why = self.pages.last_unreadable();
        let (count, member) = (Count::of(void.len(), "metadata page"), pass.device.member);
        let (level, what) = match with_data {
            0 if void.is_empty() => return,
            0 => (NoticeLevel::Warning, "no data is behind them".to_owned()),
            _ => {
                let some = if with_data < void.len() {
                    format!("{with_data} of them have")
                } else {
                    "they have".into()
                };
                let what = format!(
                    "what {some} the checksums of is answered with errors until they can be read; nothing is given up"
                );
                (NoticeLevel::Error, what)
            }
        };
        let text =
            format!("{count} cannot be read for now{why}, and member {member} is built without: {what}");
        self.core.notice(NoticeKind::PageUnreadable, level, None, text);
    }

    /// Whether the device lacks blocks with entries in a page that cannot be read elsewhere. It does if it is
    /// not caught up.
    fn own_copy_counts(&mut self, pass: &PagePass, page: PageIndex) -> Missed {
        self.core.caught_up_since(pass).map_or(Missed::Some, |since| self.missed_of(page, since))
    }

    /// Whether a member that is as it was at the end of epoch `since` has missed blocks with entries in a
    /// page.
    fn missed_of(&self, page: PageIndex, since: u64) -> Missed {
        if is_off(Mutation::ReturningCopyVoided) {
            return Missed::Some;
        }
        let (redo, pages) = (&self.redo, &self.pages);
        let mut missed = Missed::None;
        for slot in pages.store().layout().slots_of(page).map(SlotIndex) {
            match pages.stripes().stripe_at(slot) {
                Some(stripe) if pages.holds_data(stripe) => {
                    if self.is_missed(stripe, since) {
                        return Missed::Some;
                    }
                }
                Some(stripe) if redo.is_in_log(stripe) => missed = Missed::AskLater,
                None if pages.stripes().is_retired(slot) => missed = Missed::AskLater,
                // The entries of a slot without data are written anew with its first data.
                Some(_) | None => {}
            }
        }
        missed
    }

    fn read_own_copy(&mut self, key: usize, pass: &mut PagePass, page: PageIndex) -> Flow {
        let mut copies = self.pages.store().layout().copies(page);
        let (_, offset) =
            copies.find(|(member, _)| *member == pass.device.member).expect("a member with a copy");
        let first = self.pages.offset().plus(offset);
        pass.own = Some(OwnCopy { page, places: [None, None], pending: 2 });
        for (item, offset) in [first, first.plus(PAGE_BYTES as u64)].into_iter().enumerate() {
            let read = IoOp::Read { offset, buf: self.core.pool.alloc(PAGE_BYTES) };
            self.core.submit_io(Owner::Op { key, item }, pass.device.member, pass.device.id, read);
        }
        Flow::Wait
    }

    pub(in crate::array) fn page_pass_io(
        &mut self,
        key: usize,
        pass: &mut PagePass,
        item: usize,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        let own = pass.own.as_mut().expect("its copy is being read");
        own.pending -= 1;
        match result {
            Ok(IoValue::Data(bytes)) => own.places[item] = Some(bytes),
            Ok(_) => unreachable!("a read yields data"),
            // The meaning of the fault for the device was judged before.
            Err(_) => {}
        }
        self.advance_page_pass(key, pass)
    }

    /// Offers the copy that was read. The page is asked for once more, and taken from the copy if that is
    /// still needed.
    fn offer_own_copy(&mut self, pass: &mut PagePass, own: &OwnCopy) {
        let page = own.page;
        let since = self.core.caught_up_since(pass);
        let since = since.filter(|since| self.missed_of(page, *since) == Missed::None);
        let tells = since.is_some_and(|since| {
            let places = [0, 1].map(|at: usize| own.places[at].as_deref());
            self.pages.offer(page, pass.device.member, since, places)
        });
        pass.offered = Some((page, tells));
        pass.hold = Some((page, PageHold::at_once(page.0..page.0 + 1, pass.life)));
    }

    pub(in crate::array) fn end_page_pass(
        &mut self,
        key: usize,
        pass: &mut PagePass,
        complete: bool,
    ) -> Flow {
        self.core.work.patient.retain(|(_, other)| *other != key);
        if let Some((_, mut hold)) = pass.hold.take() {
            self.release_pages(&mut hold);
        }
        if self.core.still_has(pass.device) {
            let built = if complete { PagesBuilt::Done } else { PagesBuilt::No };
            self.core.set_pages_built(pass.device.member, pass.device.which, built);
            self.core.set_retried_pages(pass, 0);
        }
        Flow::Finished
    }
}

impl Core {
    /// The progress of the device that is being built for a member, if there is one.
    fn build_of(&mut self, member: MemberIndex, which: Which) -> Option<&mut Progress> {
        let mut builds = self.builds_mut();
        builds.find(|(of, _)| (of.member, of.which) == (member, which)).map(|(_, progress)| progress)
    }

    fn pages_built(&mut self, member: MemberIndex, which: Which) -> Option<PagesBuilt> {
        self.build_of(member, which).map(|progress| progress.pages)
    }

    fn set_pages_built(&mut self, member: MemberIndex, which: Which, to: PagesBuilt) {
        if let Some(progress) = self.build_of(member, which) {
            progress.pages = to;
        }
    }

    /// The next page of a round. The round is over when it waits for no more pages; but pages put aside are
    /// tried before they are decided.
    fn next_page_again(&mut self, pass: &mut PagePass) -> Option<PageIndex> {
        if !pass.retries.again.is_empty() && !pass.retries.is_last_try && !self.waits_for_pages(pass) {
            pass.retries.again.clear();
        }
        if pass.retries.rounds == 0 {
            return None;
        }
        pass.retries.aside.pop_front().or_else(|| pass.retries.again.pop_front())
    }

    /// Whether it still waits for pages that the device lacks.
    fn waits_for_pages(&mut self, pass: &PagePass) -> bool {
        let now = self.now;
        let build = self.build_of(pass.device.member, pass.device.which);
        let is_patient = build.is_some_and(|progress| progress.is_patient(now));
        (is_patient || now < pass.retries.patient_until)
            && !self.stop.hurried
            && !is_off(Mutation::JoinsLacking)
    }

    fn set_retried_pages(&mut self, pass: &PagePass, many: u64) {
        if let Some(progress) = self.build_of(pass.device.member, pass.device.which) {
            progress.retried_pages = many;
        }
    }

    /// The epoch until whose end the member was in service, if the device is its own and is only caught up.
    fn caught_up_since(&mut self, pass: &PagePass) -> Option<u64> {
        match pass.device.which {
            Which::Primary => self.build_of(pass.device.member, pass.device.which)?.since,
            Which::Replacement => None,
        }
    }
}
