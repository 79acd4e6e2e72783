//! Repairs: blocks that were wrong or unreadable are rewritten with the right content, and read again.
//!
//! Invariant: a block counts as repaired only if it was read again and holds what was written. A block that
//! cannot be read, or is wrong again, is reported and stays listed as bad. Must not know how the blocks were
//! found, nor where their bytes came from.

use crate::array::Core;
use crate::array::client::fetch::{BLOCK, Fetch};
use crate::array::members::bad_blocks::Ill;
use crate::array::{Array, Inflight, NoticeKind, NoticeLevel, Owner};
use crate::block_io::{Buf, DeviceId, IoFault, IoFaultKind, IoOp, IoValue};
use crate::units::{ByteOffset, Count, MemberIndex, SlotIndex};

/// A block to be rewritten.
// Plain data: a block that a fetch has found wrong, handed over to be sent.
pub(super) struct Repair {
    pub member: MemberIndex,
    pub device: DeviceId,
    pub column: usize,
    pub row: usize,
    pub bytes: Buf,
}

/// Blocks of one member that are being rewritten. Their write is item `2 n` of the fetch, where `n`
/// is their place among those that were sent, and the read that follows it item `2 n + 1`.
#[derive(Clone)]
pub(super) struct Sent {
    offset: ByteOffset,
    row: usize,
    bytes: Buf,
}

/// The outcome of one operation of a repair.
// Plain data: given to the operation that repairs.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::array) struct Mended {
    /// Operations that were begun. Each ends with such an outcome.
    pub begun: usize,
    /// Blocks that are repaired.
    pub repaired: u64,
}

impl Array {
    /// Sends the repairs of a fetch, adjacent rows in one write. Returns how many writes are under
    /// way, each of which ends in [`Array::mend_io`]. Nothing is written while a loss is not
    /// recorded (E3).
    pub(in crate::array) fn send_repairs(&mut self, key: usize, fetch: &mut Fetch) -> usize {
        let mut repairs = std::mem::take(&mut fetch.found.repairs);
        repairs.retain(|repair| {
            // Bytes that match an old hash may be older than those they would overwrite.
            let pages = &self.pages;
            let is_doubted = || pages.store().is_doubted(fetch.slot, repair.row, repair.column);
            if pages.checksums().is_some() && is_doubted() {
                return false;
            }
            let offset =
                self.core.map.device_offset(self.core.shape.data_offset, fetch.slot, repair.row * BLOCK);
            self.bad.may_mend(self.core.now, repair.member, offset, fetch.rules.background)
        });
        self.tell_log();
        if self.core.is_failed() || !self.redo.may_acknowledge() {
            return 0;
        }
        repairs.sort_by_key(|repair| (repair.column, repair.row));
        let mut sent = 0;
        let mut at = 0;
        while at < repairs.len() {
            let first = &repairs[at];
            let run = repairs[at..]
                .iter()
                .enumerate()
                .take_while(|(n, r)| r.column == first.column && r.row == first.row + n)
                .count();
            if self.core.find_device(first.device).is_some() {
                let mut buf = self.core.pool.alloc(run * BLOCK);
                for (n, repair) in repairs[at..at + run].iter().enumerate() {
                    buf[n * BLOCK..(n + 1) * BLOCK].copy_from_slice(&repair.bytes);
                }
                self.core.send_repair(key, fetch, first.member, first.device, first.row, buf.freeze());
                sent += 1;
            }
            at += run;
        }
        sent
    }

    /// Takes the end of a write or read of a repair.
    pub(in crate::array) fn mend_io(
        &mut self,
        key: usize,
        fetch: &mut Fetch,
        item: usize,
        entry: &Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Mended {
        let (at, is_write) = (item / 2, item.is_multiple_of(2));
        let sent = fetch.sent[at].clone();
        let rows = sent.bytes.len() / BLOCK;
        let is_there = self.core.find_device(entry.device).is_some();
        let ill = match result {
            Ok(IoValue::Data(found)) if found[..] == sent.bytes[..] => {
                self.core.member_mut(entry.member).counters.repaired += rows as u64;
                self.core.notice_repair(entry.member, fetch.slot, sent.row, rows);
                return Mended { begun: 0, repaired: rows as u64 };
            }
            Ok(IoValue::Data(_)) => Ill::Wrong,
            Ok(_) if is_there => {
                self.core.read_mended(key, entry, at, &sent);
                return Mended { begun: 1, repaired: 0 };
            }
            Ok(_) => return Mended::default(),
            Err(fault) if is_write => {
                self.repair_fault(entry.member, entry.device, fault);
                if fault.kind == IoFaultKind::Medium && is_there {
                    let what = format!(
                        "{} wrong or unreadable, and cannot be rewritten",
                        Count::of(rows, "block").were()
                    );
                    self.core.notice_not_mended(entry.member, fetch.slot, &sent, &what);
                }
                return Mended::default();
            }
            // The errors of this place were counted already.
            Err(fault) if fault.kind == IoFaultKind::Medium => Ill::Unreadable,
            Err(fault) => {
                self.read_fault(entry.member, entry.device, fault);
                return Mended::default();
            }
        };
        if !is_there {
            return Mended::default();
        }
        if rows > 1 {
            // Its blocks are read one by one to find which are bad.
            for n in 0..rows {
                let bytes = sent.bytes.slice(n * BLOCK..(n + 1) * BLOCK);
                let offset = ByteOffset(sent.offset.0 + (n * BLOCK) as u64);
                let alone = Sent { offset, row: sent.row + n, bytes };
                self.core.read_mended(key, entry, fetch.sent.len(), &alone);
                fetch.sent.push(alone);
            }
            return Mended { begun: rows, repaired: 0 };
        }
        self.bad.bad_again(self.core.now, entry.member, sent.offset, ill);
        let what = match ill {
            Ill::Unreadable => "cannot be read again after it was rewritten",
            Ill::Wrong => "is wrong again after it was rewritten",
        };
        self.core.notice_not_mended(entry.member, fetch.slot, &sent, what);
        Mended::default()
    }
}

impl Core {
    fn notice_repair(&mut self, member: MemberIndex, slot: SlotIndex, row: usize, rows: usize) {
        let text = format!(
            "{} of member {member} from row {row} of slot {slot} on {} wrong or unreadable; {} rewritten",
            Count::of(rows, "block"),
            Count::of(rows, "block").were(),
            if rows == 1 { "it is" } else { "they are" }
        );
        self.notice(NoticeKind::BlocksRepaired, NoticeLevel::Warning, Some(member), text);
    }

    /// Rewrites adjacent rows of a member.
    pub(in crate::array) fn send_repair(
        &mut self,
        key: usize,
        fetch: &mut Fetch,
        member: MemberIndex,
        device: DeviceId,
        row: usize,
        bytes: Buf,
    ) {
        let offset = self.map.device_offset(self.shape.data_offset, fetch.slot, row * BLOCK);
        let op = IoOp::Write { offset, buf: bytes.clone(), fua: false };
        let item = fetch.sent.len() * 2;
        fetch.sent.push(Sent { offset, row, bytes });
        self.submit_io(Owner::Op { key, item }, member, device, op);
    }

    fn read_mended(&mut self, key: usize, entry: &Inflight, at: usize, sent: &Sent) {
        let read = IoOp::Read { offset: sent.offset, buf: self.pool.alloc(sent.bytes.len()) };
        self.submit_io(Owner::Op { key, item: at * 2 + 1 }, entry.member, entry.device, read);
    }

    fn notice_not_mended(&mut self, member: MemberIndex, slot: SlotIndex, sent: &Sent, what: &str) {
        let Sent { row, bytes, .. } = sent;
        let blocks = Count::of(bytes.len() / BLOCK, "block");
        let text = format!(
            "{blocks} of member {member} from row {row} of slot {slot} on {what}: look at its device"
        );
        self.notice(NoticeKind::BlocksNotRepaired, NoticeLevel::Error, Some(member), text);
    }
}
