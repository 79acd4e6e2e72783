//! The metadata pages of a device under construction, and how it joins.
//!
//! A pass walks the pages that have a copy on the member and has each written whole with a checkpoint. When that is
//! over and every slot is built, the log is emptied, so that no image in it is missing on the new device, and the
//! device joins with a new epoch.

use super::members::{PagesBuilt, Which};
use super::page_hold::{PageHold, PagesHeld};
use super::redo::Share;
use super::{Array, Flow, Op};
use crate::block_io::DeviceId;
use crate::format::PageIndex;
use crate::units::MemberIndex;

pub(super) struct PagePass {
    member: MemberIndex,
    which: Which,
    device: DeviceId,
    next: PageIndex,
    hold: Option<(PageIndex, PageHold)>,
    /// All pages were asked for; the checkpoint that must have ended.
    last: Option<u64>,
    life: u64,
}

impl Array {
    /// Whether a device whose slots are built may join. If not, what that takes is on its way.
    pub(super) fn may_join(&mut self, member: MemberIndex, which: Which) -> bool {
        match self.pages_built(member, which) {
            Some(PagesBuilt::No) => {
                self.set_pages_built(member, which, PagesBuilt::Running);
                self.start_page_pass(member, which);
                return false;
            }
            Some(PagesBuilt::Running) | None => return false,
            Some(PagesBuilt::Done) => {}
        }
        self.redo_mut().held = true;
        let drained = self.redo().promised == Share::default() && self.needless_log().is_some();
        if !drained {
            self.redo_mut().checkpoint.want();
        }
        // The update that tells of the device says that all members have in place what it has no log of (T6).
        if drained && !self.supers.is_known_quiet() {
            self.supers.want_quiet();
            return false;
        }
        drained && self.acknowledgements_allowed()
    }

    /// Ends the hold on new writes when nobody waits to join any more, and the epoch of who has joined is complete.
    pub(super) fn end_hold(&mut self) {
        if !self.redo().held || !self.acknowledgements_allowed() {
            return;
        }
        let slots = self.map.slots;
        let waits = self
            .builds_mut()
            .any(|(_, _, _, progress)| progress.pages == PagesBuilt::Done && progress.is_over(slots));
        // Nobody joins an array that is stopping, and it stops only when the writes that wait have ended.
        if !waits || self.stopping.is_some() {
            self.redo_mut().held = false;
            self.wake_waiting_for_room();
        }
    }

    fn pages_built(&mut self, member: MemberIndex, which: Which) -> Option<PagesBuilt> {
        self.builds_mut().find(|(m, w, _, _)| *m == member && *w == which).map(|(_, _, _, p)| p.pages)
    }

    fn set_pages_built(&mut self, member: MemberIndex, which: Which, to: PagesBuilt) {
        if let Some((_, _, _, progress)) = self.builds_mut().find(|(m, w, _, _)| *m == member && *w == which)
        {
            progress.pages = to;
        }
    }

    fn start_page_pass(&mut self, member: MemberIndex, which: Which) {
        let Some(device) = self.device_of(member, which) else { return };
        let life = self.redo().lives;
        let pass = PagePass { member, which, device, next: PageIndex(0), hold: None, last: None, life };
        let key = self.ops.insert(Op::PagePass(Box::new(pass)));
        self.ready.push_back(key);
    }

    pub(super) fn advance_page_pass(&mut self, key: usize, pass: &mut PagePass) -> Flow {
        let ours = self.device_of(pass.member, pass.which) == Some(pass.device);
        if !ours || self.is_failed() || pass.life != self.redo().lives || !self.redo().is_serving() {
            return self.end_page_pass(pass, false);
        }
        loop {
            if let Some((page, mut hold)) = pass.hold.take() {
                let pages = match self.hold_pages(key, &mut hold) {
                    PagesHeld::Wait => {
                        pass.hold = Some((page, hold));
                        return Flow::Wait;
                    }
                    held => (&mut self.redo_mut().pages, held),
                };
                match pages {
                    (pages, PagesHeld::Unreadable) => pages.void(page, pass.member, pass.which),
                    (pages, _) => pages.rebuild(page, pass.member, pass.which),
                }
                self.release_pages(&mut hold);
            }
            let redo = self.redo_mut();
            if let Some(last) = pass.last {
                if redo.checkpoint.ended >= last {
                    return self.end_page_pass(pass, true);
                }
                redo.checkpoint.want();
                redo.waiting_for_drain.push(key);
                return Flow::Wait;
            }
            if redo.pages.dirty_pages() >= redo.facts.cache_pages_max / 4 {
                redo.checkpoint.want();
                redo.waiting_for_drain.push(key);
                return Flow::Wait;
            }
            match redo.pages.next_page_on(pass.member, pass.next) {
                Some(page) => {
                    pass.next = PageIndex(page.0 + 1);
                    pass.hold = Some((page, PageHold::new(page.0..page.0 + 1, pass.life)));
                }
                // Not a checkpoint that has begun already: it may have frozen the pages before.
                None => pass.last = Some(redo.checkpoint.begun + 1),
            }
        }
    }

    pub(super) fn end_page_pass(&mut self, pass: &mut PagePass, complete: bool) -> Flow {
        if let Some((_, mut hold)) = pass.hold.take() {
            self.release_pages(&mut hold);
        }
        if self.device_of(pass.member, pass.which) == Some(pass.device) {
            let built = if complete { PagesBuilt::Done } else { PagesBuilt::No };
            self.set_pages_built(pass.member, pass.which, built);
        }
        Flow::Finished
    }
}
