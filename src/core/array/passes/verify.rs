//! How a scrub judges a slot whose data and parity disagree and whose blocks have no checksums.
//!
//! No column is trusted: where there are at least two parities to judge by, the single column without which
//! the row is consistent is the wrong one and is rewritten; otherwise the row is reported.

use crate::array::passes::schedule::Passes;
use crate::array::{Core, NoticeKind, NoticeLevel};
use crate::block_io::{Buf, BufMut, DeviceId};
use crate::units::{MemberIndex, ROW_BYTES, SlotIndex};

/// A column of a slot as it was read.
// Plain data: given by the operation that has read it.
pub(super) struct Column {
    pub column: usize,
    pub member: MemberIndex,
    pub device: DeviceId,
    /// The bytes of the chunk.
    pub buf: BufMut,
}

/// A rewrite of one row of one column.
// Plain data: given back to that operation.
pub(super) struct Repair {
    pub member: MemberIndex,
    pub device: DeviceId,
    /// The first byte within the chunk.
    pub start: usize,
    pub buf: Buf,
}

/// Most inconsistent rows that one scrub names in notices one by one; the others are only counted.
const ROW_NOTICES_MAX: u64 = 16;

impl Passes {
    /// Finds the rows that are inconsistent and, where possible, the column that is wrong.
    pub(super) fn scrub_columns(
        &mut self,
        core: &mut Core,
        slot: SlotIndex,
        columns: &[Column],
    ) -> Vec<Repair> {
        let rows = 0..core.map.chunk / ROW_BYTES as usize;
        rows.filter_map(|row| self.scrub_row(core, slot, columns, row)).collect()
    }

    fn scrub_row(
        &mut self,
        core: &mut Core,
        slot: SlotIndex,
        columns: &[Column],
        row: usize,
    ) -> Option<Repair> {
        let start = row * ROW_BYTES as usize;
        let rows: Vec<(usize, &[u8])> =
            columns.iter().map(|c| (c.column, &c.buf[start..start + ROW_BYTES as usize])).collect();
        if core.shape.codec.consistent(&rows) {
            return None;
        }
        let errors = self.scrub_mut().map_or(0, |pass| pass.note_errors(1));
        let liar = core.single_liar(&rows);
        let Some(liar) = liar.and_then(|liar| columns.iter().find(|c| c.column == liar)) else {
            if errors <= ROW_NOTICES_MAX {
                let text = format!(
                    "scrub: row {row} of slot {slot} is inconsistent and parity cannot tell which member is wrong; nothing \
                     was changed. Compare with a backup and write the affected blocks again"
                );
                core.notice(NoticeKind::ScrubUnresolved, NoticeLevel::Error, None, text);
            }
            return None;
        };
        let others: Vec<(usize, &[u8])> =
            rows.iter().filter(|(c, _)| *c != liar.column).take(core.map.k).copied().collect();
        let mut buf = core.pool.alloc(ROW_BYTES as usize);
        core.shape
            .codec
            .recover(&others, &mut [(liar.column, &mut buf[..])])
            .expect("k distinct present columns decode any other");
        let member = liar.member;
        core.member_mut(member).counters.checksum_errors += 1;
        Some(Repair { member, device: liar.device, start, buf: buf.freeze() })
    }
}

impl Core {
    /// The one column without which the row is consistent; none when several qualify, when none does, or when
    /// no redundancy would be left to judge by.
    fn single_liar(&self, rows: &[(usize, &[u8])]) -> Option<usize> {
        if rows.len() < self.map.k + 2 {
            return None;
        }
        let mut liar = None;
        for at in 0..rows.len() {
            let mut others = rows.to_vec();
            let (column, _) = others.remove(at);
            if self.shape.codec.consistent(&others) && liar.replace(column).is_some() {
                return None;
            }
        }
        liar
    }
}
