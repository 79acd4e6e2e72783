//! Members with endless errors (rule T5 of the crash-safety design): the places of them that `bad_blocks.rs`
//! lists are looked at again, and the members leave service if they can be spared.
//!
//! Invariant: a member that a listed row or page needs stays, and so does one that alone has blocks which are
//! set aside. Must not know how errors are counted.

use crate::array::members::bad_blocks::Excess;
use crate::array::mutation::{Mutation, is_off};
use crate::array::{Array, Core, NoticeKind, NoticeLevel, Owner};
use crate::block_io::{DeviceId, IoOp};
use crate::format::MemberState;
use crate::units::{ByteOffset, MemberIndex, ROW_BYTES, SlotIndex};

impl Array {
    /// Tick: takes members with endless errors out of service, if they can be spared (T5).
    pub(in crate::array) fn judge_errors(&mut self) {
        // While the log is replayed nothing is looked at again.
        if self.core.is_failed() || self.core.stop.stopping.is_some() || !self.redo.is_serving() {
            return;
        }
        for (index, excess) in self.bad.excessive(self.core.now, self.looks.reads()) {
            let Some(device) = self.core.member(index).device else { continue };
            let errors = match excess {
                Excess::Certain(errors) => errors,
                Excess::Probe(blocks) => {
                    blocks.into_iter().for_each(|block| self.probe(index, device.id, block));
                    continue;
                }
                Excess::Unmended(blocks) => {
                    blocks.into_iter().for_each(|block| self.look_at_content(index, block));
                    continue;
                }
            };
            let has_aside = self.has_set_aside(index);
            if !has_aside && self.may_spare(index) || is_off(Mutation::LastCopyNotSpared) {
                let reason =
                    format!("its errors do not end: {errors} places cannot be read or are wrong again");
                self.fault_device(index, device.id, MemberState::Faulted, reason);
            } else if self.bad.keep(index) {
                let why = match has_aside {
                    true => {
                        "it alone has blocks that are set aside, and with another device they may be beyond repair: mend what makes \
                         its reads fail"
                    }
                    false => "without it others could not be read: replace it with 'calpe replace'",
                };
                let text = format!(
                    "the errors of member {index} do not end: {errors} places cannot be read or are wrong again. It is kept in \
                     service all the same, for {why}"
                );
                self.core.notice(NoticeKind::MemberKept, NoticeLevel::Error, Some(index), text);
            }
        }
    }

    /// Looks again at a place of a member in service that was bad.
    fn probe(&mut self, index: MemberIndex, device: DeviceId, block: u64) {
        let offset = ByteOffset(block * ROW_BYTES);
        if !self.bad.is_of_content(index, block) {
            let op = IoOp::Read { offset, buf: self.core.pool.alloc(ROW_BYTES as usize) };
            return self.core.submit_io(Owner::Probe, index, device, op);
        }
        self.look_at_content(index, block);
        self.bad.probed(index);
    }

    /// Reads the block that is at a place of a member, and repairs it if it is bad. The result shows as a
    /// verdict.
    fn look_at_content(&mut self, index: MemberIndex, block: u64) {
        let offset = ByteOffset(block * ROW_BYTES);
        if let Some(within) =
            offset.0.checked_sub(self.core.shape.data_offset.0).filter(|_| self.redo.is_serving())
        {
            let chunk = self.core.map.chunk as u64;
            let slot = SlotIndex(within / chunk);
            let (column, row) = (self.core.map.column_of(slot, index).0, (within % chunk / ROW_BYTES) as u32);
            match self.pages.stripes().stripe_at(slot) {
                Some(stripe) if self.pages.holds_data(stripe) => self.look_again((stripe, column, row), None),
                _ => self.note_slot_not_needed(slot),
            }
        }
    }

    /// Notes a block that a look asked for and that no data needs: it was never written, or its content is
    /// given up.
    pub(in crate::array) fn note_not_needed(&mut self, slot: SlotIndex, column: usize, row: usize) {
        let offset = self.core.map.device_offset(self.core.shape.data_offset, slot, row * ROW_BYTES as usize);
        self.bad.verified(self.core.member_at(slot, column), offset);
    }

    /// As [`Array::note_not_needed`], for a whole slot, which holds no data.
    pub(in crate::array) fn note_slot_not_needed(&mut self, slot: SlotIndex) {
        let start = self.core.map.device_offset(self.core.shape.data_offset, slot, 0).0;
        for column in 0..self.core.map.width() {
            self.bad.not_needed(self.core.member_at(slot, column), start..start + self.core.map.chunk as u64);
        }
    }

    /// Whether blocks that are listed as set aside are on the member: no other can give them (T1).
    fn has_set_aside(&self, index: MemberIndex) -> bool {
        self.set_aside_places().any(|(_, member)| member == index)
    }

    /// Whether something may become unreadable without a member, as far as is known. A lane of several does
    /// not let go of such a device only because others are without it.
    pub(super) fn may_need(&self, index: MemberIndex) -> bool {
        if is_off(Mutation::LetsGoOfWhatItNeeds) {
            return false;
        }
        // The blocks beside one that cannot be decoded can be read from their own members alone; its own may
        // be this one. Those that were listed before the start are looked at first.
        let is_unreadable = || self.damage.iter().any(|(_, why)| !why.counts_as_zeroes());
        let is_unknown = || self.damage.has_due() || self.pages.count_given_up() > 0;
        let is_needed = || match self.core.member(index).state {
            MemberState::Online => !self.may_spare(index),
            // What has been built of it may be needed where others have become bad since.
            _ => self.bad.unlisted(index) > 0 || !self.bad.blocks(index).is_empty(),
        };
        self.has_set_aside(index) || is_unreadable() || is_unknown() || is_needed()
    }

    /// Whether all that is known can be read without a member in service: each row and page that is listed as
    /// bad on others too (T5).
    pub(super) fn may_spare(&self, index: MemberIndex) -> bool {
        let online = self.core.online();
        // Rows that a device was built without are bad on it, and are listed by slots.
        let unlisted = self.bad.unlisted(index) + self.damage.lacking_beside(&self.core, Some(index)).len();
        // Erasures of a row that is bad on none of the others, as far as that is known.
        let gone = self.core.map.width() - online.len() + 1 + unlisted;
        // The member may also have blocks that are set aside and not listed, where that list is full.
        if gone > self.core.map.m || self.damage.is_full() {
            return false;
        }
        let pages = &self.pages;
        let holds_data = |block: u64| {
            let slot = self.core.slot_of_block(block);
            self.redo.is_serving()
                && pages.stripes().stripe_at(slot).is_some_and(|stripe| pages.holds_data(stripe))
        };
        let rows = self.bad.blocks(index);
        let rows = rows.into_iter().all(|(block, bad)| gone + bad <= self.core.map.m || !holds_data(block));
        rows && self.bad.pages(index).into_iter().all(|(page, bad)| {
            let copies = pages.store().layout().copies(page).map(|(member, _)| member);
            let gone = copies.filter(|member| *member == index || !online.contains(*member)).count();
            gone + bad + unlisted <= self.core.map.m
        })
    }
}

impl Core {
    /// The slot of a listed block of a member.
    pub(super) fn slot_of_block(&self, block: u64) -> SlotIndex {
        SlotIndex((block * ROW_BYTES).saturating_sub(self.shape.data_offset.0) / self.map.chunk as u64)
    }
}
