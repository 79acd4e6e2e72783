//! One slot of a scrub or a resync: read every column, check data against parity, repair what can be told.
//!
//! A resync believes the data and corrects parity: after an unclean stop either version of a row is right, but
//! the two must agree. A scrub believes nobody: where at least two parities are there to judge by, the single
//! column whose removal makes the row consistent is the liar and is rewritten; otherwise the row is reported.

use super::lock::LockMode;
use super::{ActivityKind, NoticeLevel};
use super::{Array, Flow, Inflight, Op, Owner};
use crate::block_io::{Buf, BufMut, DeviceId, IoFault, IoOp, IoValue};
use crate::format::MemberSet;
use crate::units::{ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex};

pub(super) struct VerifyOp {
    kind: ActivityKind,
    slot: SlotIndex,
    stage: Stage,
    columns: Vec<Column>,
    pending: usize,
    suspect: MemberSet,
    /// Rows that each entry of the write stage repairs.
    repairs: Vec<(MemberIndex, u64)>,
}

impl VerifyOp {
    pub(super) fn waits_for_lock(&self) -> bool {
        self.stage == Stage::Lock
    }
}

struct Column {
    column: usize,
    member: MemberIndex,
    device: DeviceId,
    buf: Option<BufMut>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Lock,
    Read,
    Write,
}

/// A rewrite of some rows of one column.
struct Repair {
    at: usize,
    start: usize,
    buf: Buf,
    rows: u64,
}

/// Inconsistent rows that are named one by one in notices, for each pass; the rest is only counted.
const ROW_NOTICES_MAX: u64 = 16;

impl Array {
    pub(super) fn start_verify_slot(&mut self, kind: ActivityKind, slot: SlotIndex) {
        let op = Box::new(VerifyOp {
            kind,
            slot,
            stage: Stage::Lock,
            columns: Vec::new(),
            pending: 0,
            suspect: MemberSet::default(),
            repairs: Vec::new(),
        });
        let key = self.ops.insert(Op::Verify(op));
        if self.locks.acquire(slot, 0..self.map.chunk, LockMode::Exclusive, key) {
            self.ready.push_back(key);
        }
    }

    pub(super) fn advance_verify(&mut self, key: usize, op: &mut VerifyOp) -> Flow {
        if op.stage != Stage::Lock {
            return Flow::Wait;
        }
        op.stage = Stage::Read;
        if self.is_failed() {
            return self.end_verify(key, op, false);
        }
        for column in 0..self.map.width() {
            let member = self.map.member_of(op.slot, ColumnIndex(column as u16));
            if let Some(device) = self.readable(member, op.slot) {
                op.columns.push(Column { column, member, device, buf: None });
            }
        }
        let data = op.columns.iter().filter(|c| c.column < self.map.k).count();
        if op.kind == ActivityKind::Resync && data < self.map.k {
            return self.skip_verify(key, op);
        }
        for item in 0..op.columns.len() {
            self.read_column(key, op, item);
        }
        Flow::Wait
    }

    fn read_column(&mut self, key: usize, op: &mut VerifyOp, item: usize) {
        let Column { member, device, .. } = op.columns[item];
        let offset = self.map.device_offset(self.data_offset, op.slot, 0);
        let buf = self.pool.alloc(self.map.chunk);
        self.submit_io(Owner::Op { key, item }, member, device, IoOp::Read { offset, buf });
        op.pending += 1;
    }

    pub(super) fn verify_io(
        &mut self,
        key: usize,
        op: &mut VerifyOp,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        op.pending -= 1;
        match (op.stage, result) {
            (Stage::Read, Ok(IoValue::Data(buf))) => op.columns[item].buf = Some(buf),
            (Stage::Read, Err(fault)) => {
                self.read_fault(entry.member, entry.device, fault);
                let again = !op.suspect.contains(entry.member) && self.find_device(entry.device).is_some();
                op.suspect.insert(entry.member);
                if again {
                    self.read_column(key, op, item);
                }
            }
            (Stage::Write, Ok(_)) => {
                let (member, rows) = op.repairs[item];
                self.member_mut(member).counters.repaired += rows;
                if let Some(pass) = self.passes.pass_mut(op.kind) {
                    pass.repaired += rows;
                }
            }
            (_, Ok(_)) => {}
            (_, Err(fault)) => self.write_fault(entry.member, entry.device, "repair", fault),
        }
        if op.pending > 0 {
            return Flow::Wait;
        }
        match op.stage {
            Stage::Read if self.is_failed() => self.end_verify(key, op, false),
            Stage::Read => self.judge(key, op),
            _ => self.end_verify(key, op, true),
        }
    }

    /// Everything that can be read has been read.
    fn judge(&mut self, key: usize, op: &mut VerifyOp) -> Flow {
        let mut repairs = Vec::new();
        let usable = match op.kind {
            ActivityKind::Resync => self.resync_slot(op, &mut repairs),
            _ => self.scrub_slot(op, &mut repairs),
        };
        if !usable {
            return self.skip_verify(key, op);
        }
        op.stage = Stage::Write;
        for repair in repairs {
            let Column { member, device, .. } = op.columns[repair.at];
            // A member that left service meanwhile is rebuilt from the rest, not patched.
            if self.find_device(device).is_none() {
                continue;
            }
            let offset = self.map.device_offset(self.data_offset, op.slot, repair.start);
            let write = IoOp::Write { offset, buf: repair.buf, fua: false };
            self.submit_io(Owner::Op { key, item: op.repairs.len() }, member, device, write);
            op.repairs.push((member, repair.rows));
            op.pending += 1;
        }
        if op.pending > 0 { Flow::Wait } else { self.end_verify(key, op, true) }
    }

    /// Parity is recomputed from data and written where it differs. False: some data cannot be read.
    fn resync_slot(&mut self, op: &VerifyOp, repairs: &mut Vec<Repair>) -> bool {
        let (k, chunk) = (self.map.k, self.map.chunk);
        let data: Vec<&[u8]> =
            op.columns.iter().filter(|c| c.column < k).filter_map(|c| c.buf.as_deref()).collect();
        if data.len() < k {
            return false;
        }
        let parities: Vec<usize> = (0..op.columns.len()).filter(|&at| op.columns[at].column >= k).collect();
        let mut fresh: Vec<BufMut> = parities.iter().map(|_| self.pool.alloc(chunk)).collect();
        let mut outputs: Vec<(usize, &mut [u8])> = parities
            .iter()
            .zip(&mut fresh)
            .map(|(&at, buf)| (op.columns[at].column - k, &mut buf[..]))
            .collect();
        self.codec.encode(&data, &mut outputs);
        for (at, fresh) in parities.into_iter().zip(fresh) {
            let old = op.columns[at].buf.as_deref();
            let rows = chunk.div_ceil(ROW_BYTES as usize) as u64;
            let differing = old.map_or(rows, |old| {
                let pairs = old.chunks(ROW_BYTES as usize).zip(fresh.chunks(ROW_BYTES as usize));
                pairs.filter(|(a, b)| a != b).count() as u64
            });
            if differing > 0 {
                if let Some(pass) = self.passes.pass_mut(op.kind) {
                    pass.errors += differing;
                }
                repairs.push(Repair { at, start: 0, buf: fresh.freeze(), rows: differing });
            }
        }
        true
    }

    /// Scrubs the columns of a slot of a logged array without checksums: (column, member, device, bytes of the chunk).
    /// Returns what is to be rewritten: (member, device, byte within the chunk, bytes).
    pub(super) fn scrub_columns(
        &mut self,
        slot: SlotIndex,
        columns: Vec<(usize, MemberIndex, DeviceId, BufMut)>,
    ) -> Vec<(MemberIndex, DeviceId, usize, Buf)> {
        let columns = columns.into_iter().map(|(column, member, device, buf)| Column {
            column,
            member,
            device,
            buf: Some(buf),
        });
        let op = VerifyOp {
            kind: ActivityKind::Scrub,
            slot,
            stage: Stage::Read,
            columns: columns.collect(),
            pending: 0,
            suspect: MemberSet::default(),
            repairs: Vec::new(),
        };
        let mut repairs = Vec::new();
        self.scrub_slot(&op, &mut repairs);
        let place = |repair: Repair| {
            let column = &op.columns[repair.at];
            (column.member, column.device, repair.start, repair.buf)
        };
        repairs.into_iter().map(place).collect()
    }

    /// Finds out which rows are inconsistent and, where that can be told, because of whom.
    fn scrub_slot(&mut self, op: &VerifyOp, repairs: &mut Vec<Repair>) -> bool {
        let k = self.map.k;
        let present: Vec<(usize, &[u8])> =
            op.columns.iter().filter_map(|c| c.buf.as_deref().map(|bytes| (c.column, bytes))).collect();
        if present.len() < k {
            self.count_errors(op, self.map.chunk as u64 / ROW_BYTES);
            self.notice_unreadable(op.slot);
            return true;
        }
        if present.len() > k && !self.codec.consistent(&present) {
            for row in 0..self.map.chunk / ROW_BYTES as usize {
                self.scrub_row(op, &present, row, repairs);
            }
            return true;
        }
        // Columns that could not be read are decoded from the others, which agree, and rewritten.
        for (at, column) in op.columns.iter().enumerate().filter(|(_, c)| c.buf.is_none()) {
            let mut buf = self.pool.alloc(self.map.chunk);
            self.codec
                .recover(&present[..k], &mut [(column.column, &mut buf[..])])
                .expect("k distinct present columns decode any other");
            let rows = self.map.chunk as u64 / ROW_BYTES;
            self.count_errors(op, rows);
            repairs.push(Repair { at, start: 0, buf: buf.freeze(), rows });
        }
        present.len() > k || !repairs.is_empty()
    }

    fn scrub_row(
        &mut self,
        op: &VerifyOp,
        present: &[(usize, &[u8])],
        row: usize,
        repairs: &mut Vec<Repair>,
    ) {
        let start = row * ROW_BYTES as usize;
        let rows: Vec<(usize, &[u8])> =
            present.iter().map(|(c, bytes)| (*c, &bytes[start..start + ROW_BYTES as usize])).collect();
        if self.codec.consistent(&rows) {
            return;
        }
        self.count_errors(op, 1);
        let errors = self.passes.pass_mut(op.kind).map_or(0, |pass| pass.errors);
        let liar = self.single_liar(&rows);
        let Some((liar, member)) = liar.and_then(|liar| {
            let at = op.columns.iter().position(|c| c.column == liar)?;
            Some((at, op.columns[at].member))
        }) else {
            if errors <= ROW_NOTICES_MAX {
                let text = format!(
                    "scrub: row {row} of slot {} is inconsistent and parity cannot tell which member is wrong; nothing \
                     was changed. Compare with a backup and write the affected blocks again",
                    op.slot
                );
                self.notice(NoticeLevel::Error, None, text);
            }
            return;
        };
        let others: Vec<(usize, &[u8])> =
            rows.iter().filter(|(c, _)| *c != op.columns[liar].column).take(self.map.k).copied().collect();
        let mut buf = self.pool.alloc(ROW_BYTES as usize);
        self.codec
            .recover(&others, &mut [(op.columns[liar].column, &mut buf[..])])
            .expect("k distinct present columns decode any other");
        self.member_mut(member).counters.checksum_errors += 1;
        if errors <= ROW_NOTICES_MAX {
            let text =
                format!("scrub: row {row} of slot {} is wrong on member {member}; it is rewritten", op.slot);
            self.notice(NoticeLevel::Warning, Some(member), text);
        }
        repairs.push(Repair { at: liar, start, buf: buf.freeze(), rows: 1 });
    }

    /// The one column without which the row is consistent; none when several qualify, or none does, or when no
    /// redundancy would be left to judge by.
    fn single_liar(&self, rows: &[(usize, &[u8])]) -> Option<usize> {
        if rows.len() < self.map.k + 2 {
            return None;
        }
        let mut liar = None;
        for at in 0..rows.len() {
            let mut others = rows.to_vec();
            let (column, _) = others.remove(at);
            if self.codec.consistent(&others) && liar.replace(column).is_some() {
                return None;
            }
        }
        liar
    }

    fn count_errors(&mut self, op: &VerifyOp, rows: u64) {
        if let Some(pass) = self.passes.pass_mut(op.kind) {
            pass.errors += rows;
        }
    }

    fn skip_verify(&mut self, key: usize, op: &mut VerifyOp) -> Flow {
        if let Some(pass) = self.passes.pass_mut(op.kind) {
            pass.skipped += 1;
        }
        self.end_verify(key, op, true)
    }

    pub(super) fn end_verify(&mut self, key: usize, op: &mut VerifyOp, complete: bool) -> Flow {
        self.verified(op.kind, op.slot, complete);
        self.unlock(op.slot, key);
        Flow::Finished
    }
}
