//! Reads: straight from the members where all are in service, decoded under a row lock where not. A block that
//! a member could not read is answered from the others and rewritten.

use super::geometry::ColumnRange;
use super::lock::LockMode;
use super::{Array, Flow, Inflight, Op, Owner, PieceId, SlotReply};
use super::{ClientError, NoticeLevel};
use crate::block_io::{BufMut, IoFault, IoOp, IoValue};
use crate::format::{MemberSet, MemberState};
use crate::units::{ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex};
use std::ops::Range;

pub(super) struct ReadOp {
    piece: PieceId,
    slot: SlotIndex,
    offset: usize,
    len: usize,
    /// The whole buffer before it is split among the parts.
    whole: Option<BufMut>,
    parts: Vec<Part>,
    /// Columns read only to decode: (column, bytes of `window`).
    sources: Vec<(usize, Option<BufMut>)>,
    /// Rows that are decoded.
    window: Range<usize>,
    pending: usize,
    stage: Stage,
    /// Members that failed a read of this operation once; a second time makes them `bad`.
    suspect: MemberSet,
    bad: MemberSet,
    faulted: bool,
    refused: bool,
}

impl ReadOp {
    /// The lock it waits for may never come: the next advance ends it.
    pub(super) fn refuse(&mut self) {
        self.refused = true;
    }
}

struct Part {
    range: ColumnRange,
    member: MemberIndex,
    missing: bool,
    buf: Option<BufMut>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Reading without a lock: every part is there.
    Direct,
    /// Waiting for the row lock.
    Lock,
    /// Reading and decoding under the lock.
    Locked,
    /// Answered; rewriting what could not be read.
    Repair,
}

impl Array {
    pub(super) fn start_read(&mut self, piece: PieceId, slot: SlotIndex, offset: usize, buf: BufMut) {
        self.client_ops += 1;
        let mut read = ReadOp {
            piece,
            slot,
            offset,
            len: buf.len(),
            whole: Some(buf),
            parts: Vec::new(),
            sources: Vec::new(),
            window: 0..0,
            pending: 0,
            stage: Stage::Direct,
            suspect: MemberSet::default(),
            bad: MemberSet::default(),
            faulted: false,
            refused: false,
        };
        self.split_parts(&mut read);
        let direct = read.parts.iter().all(|part| !part.missing);
        let key = self.ops.insert(Op::Busy);
        let flow = if direct {
            self.issue_parts(key, &mut read);
            Flow::Wait
        } else {
            self.lock_read(key, &mut read)
        };
        self.put_back(key, Op::Read(read), flow);
    }

    fn split_parts(&mut self, read: &mut ReadOp) {
        let mut rest = read.whole.take().unwrap_or_else(|| self.pool.alloc(read.len));
        read.parts.clear();
        read.sources.clear();
        for range in self.map.columns(read.offset, read.len) {
            let tail = rest.split_off(range.range.len());
            let member = self.map.member_of(read.slot, range.column);
            let missing = read.bad.contains(member) || self.readable(member, read.slot).is_none();
            read.parts.push(Part { range, member, missing, buf: Some(std::mem::replace(&mut rest, tail)) });
        }
    }

    /// Sends a read for every part that is there.
    fn issue_parts(&mut self, key: usize, read: &mut ReadOp) {
        for (item, part) in read.parts.iter_mut().enumerate() {
            let Some(device) = self.readable(part.member, read.slot).filter(|_| !part.missing) else {
                continue;
            };
            let Some(buf) = part.buf.take() else { continue };
            let offset = self.map.device_offset(self.data_offset, read.slot, part.range.range.start);
            self.submit_io(Owner::Op { key, item }, part.member, device, IoOp::Read { offset, buf });
            read.pending += 1;
        }
    }

    fn lock_read(&mut self, key: usize, read: &mut ReadOp) -> Flow {
        // Rows of a parked write are torn until its members take it; nothing can be decoded from them.
        if self.is_failed() || self.slot_is_parked(read.slot) {
            self.refuse_read(read);
            return Flow::Finished;
        }
        let low = read.parts.iter().map(|p| p.range.range.start).min().unwrap_or(0);
        let high = read.parts.iter().map(|p| p.range.range.end).max().unwrap_or(0);
        read.stage = Stage::Lock;
        if self.locks.acquire(read.slot, low..high, LockMode::Shared, key) {
            self.ready.push_back(key);
        }
        Flow::Wait
    }

    /// The lock has been granted, or will not be.
    pub(super) fn advance_read(&mut self, key: usize, read: &mut ReadOp) -> Flow {
        if read.stage != Stage::Lock {
            return Flow::Wait;
        }
        if read.refused || self.is_failed() {
            return self.fail_read(key, read);
        }
        read.stage = Stage::Locked;
        self.read_locked(key, read)
    }

    /// Reads what is there, and enough else to decode what is not.
    fn read_locked(&mut self, key: usize, read: &mut ReadOp) -> Flow {
        read.faulted = false;
        if read.whole.is_some() || read.parts.iter().any(|part| part.buf.is_none()) {
            self.split_parts(read);
        } else {
            // Waiting for the lock may have changed who is there.
            for part in &mut read.parts {
                part.missing =
                    read.bad.contains(part.member) || self.readable(part.member, read.slot).is_none();
            }
        }
        let missing = || read.parts.iter().filter(|part| part.missing).map(|part| &part.range.range);
        read.window =
            missing().map(|r| r.start).min().unwrap_or(0)..missing().map(|r| r.end).max().unwrap_or(0);
        if !read.window.is_empty() {
            match self.choose_sources(read) {
                Some(sources) => read.sources = sources,
                None => return self.fail_read(key, read),
            }
        }
        self.issue_parts(key, read);
        for at in 0..read.sources.len() {
            let column = read.sources[at].0;
            let member = self.map.member_of(read.slot, ColumnIndex(column as u16));
            let Some(device) = self.readable(member, read.slot) else { continue };
            let buf = self.pool.alloc(read.window.len());
            let offset = self.map.device_offset(self.data_offset, read.slot, read.window.start);
            let item = read.parts.len() + at;
            self.submit_io(Owner::Op { key, item }, member, device, IoOp::Read { offset, buf });
            read.pending += 1;
        }
        debug_assert!(read.pending > 0);
        Flow::Wait
    }

    /// The columns to read in addition, so that with the parts that span the window there are k.
    fn choose_sources(&self, read: &ReadOp) -> Option<Vec<(usize, Option<BufMut>)>> {
        let spans = |column: usize| {
            read.parts
                .iter()
                .any(|p| usize::from(p.range.column.0) == column && spans_window(p, &read.window))
        };
        let from_parts = (0..self.map.k).filter(|&c| spans(c)).count();
        let needed = self.map.k.saturating_sub(from_parts);
        let sources: Vec<_> = (0..self.map.width())
            .filter(|&c| !spans(c))
            .filter(|&c| {
                let member = self.map.member_of(read.slot, ColumnIndex(c as u16));
                !read.bad.contains(member) && self.readable(member, read.slot).is_some()
            })
            .take(needed)
            .map(|c| (c, None))
            .collect();
        (sources.len() == needed).then_some(sources)
    }

    pub(super) fn read_io(
        &mut self,
        key: usize,
        read: &mut ReadOp,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        read.pending -= 1;
        match result {
            Ok(IoValue::Data(buf)) => match read.parts.get_mut(item) {
                Some(part) => part.buf = Some(buf),
                None => read.sources[item - read.parts.len()].1 = Some(buf),
            },
            Ok(_) if read.stage == Stage::Repair => {
                self.member_mut(entry.member).counters.repaired += 1;
            }
            Ok(_) => unreachable!("a read yields data"),
            Err(fault) if read.stage == Stage::Repair => {
                self.write_fault(entry.member, entry.device, "rewrite of an unreadable block", fault);
            }
            Err(fault) => {
                read.faulted = true;
                if read.suspect.contains(entry.member) {
                    read.bad.insert(entry.member);
                }
                read.suspect.insert(entry.member);
                self.read_fault(entry.member, entry.device, fault);
            }
        }
        if read.pending > 0 {
            return Flow::Wait;
        }
        match read.stage {
            Stage::Repair => {
                self.unlock(read.slot, key);
                Flow::Finished
            }
            Stage::Direct if read.faulted => self.lock_read(key, read),
            Stage::Direct => {
                self.answer_read(read);
                Flow::Finished
            }
            Stage::Locked if read.faulted && self.is_failed() => self.fail_read(key, read),
            Stage::Locked if read.faulted => self.read_locked(key, read),
            Stage::Locked => {
                self.decode_read(read);
                self.answer_and_repair(key, read)
            }
            Stage::Lock => unreachable!("nothing is in flight while waiting for a lock"),
        }
    }

    fn fail_read(&mut self, key: usize, read: &mut ReadOp) -> Flow {
        self.refuse_read(read);
        self.unlock(read.slot, key);
        Flow::Finished
    }

    fn refuse_read(&mut self, read: &ReadOp) {
        self.notice_unreadable(read.slot);
        self.client_ops -= 1;
        self.done(read.piece, Err(ClientError::Io));
    }

    fn decode_read(&mut self, read: &mut ReadOp) {
        let window = read.window.clone();
        for at in 0..read.parts.len() {
            if !read.parts[at].missing {
                continue;
            }
            let Some(mut buf) = read.parts[at].buf.take() else {
                unreachable!("a missing part keeps its buffer")
            };
            let want = read.parts[at].range.range.clone();
            let column = usize::from(read.parts[at].range.column.0);
            let mut present: Vec<(usize, &[u8])> = Vec::with_capacity(self.map.k);
            for part in read.parts.iter().filter(|p| spans_window(p, &window)) {
                if let Some(bytes) = &part.buf {
                    let start = want.start - part.range.range.start;
                    present.push((usize::from(part.range.column.0), &bytes[start..start + want.len()]));
                }
            }
            for (source, bytes) in &read.sources {
                if let Some(bytes) = bytes {
                    let start = want.start - window.start;
                    present.push((*source, &bytes[start..start + want.len()]));
                }
            }
            present.truncate(self.map.k);
            self.codec
                .recover(&present, &mut [(column, &mut buf[..])])
                .expect("k distinct present columns decode any other");
            read.parts[at].buf = Some(buf);
        }
    }

    /// Rewrites, from the decoded bytes, what a member in service could not read; then the lock goes.
    fn answer_and_repair(&mut self, key: usize, read: &mut ReadOp) -> Flow {
        let mut repairs = Vec::new();
        for part in &read.parts {
            let member = self.member(part.member);
            if !(part.missing && read.bad.contains(part.member) && member.state == MemberState::Online) {
                continue;
            }
            if let (Some(device), Some(bytes)) = (member.device, &part.buf) {
                let mut copy = self.pool.alloc(bytes.len());
                copy.copy_from_slice(bytes);
                repairs.push((part.member, device.id, part.range.range.start, copy.freeze()));
            }
        }
        self.answer_read(read);
        // Nothing is written to an array that has lost more than it can bear.
        if repairs.is_empty() || self.is_failed() {
            self.unlock(read.slot, key);
            return Flow::Finished;
        }
        read.stage = Stage::Repair;
        for (member, device, start, buf) in repairs {
            let rows = (buf.len() as u64).div_ceil(ROW_BYTES);
            let text =
                format!("{rows} unreadable blocks of member {member} in slot {} are rewritten", read.slot);
            self.notice(NoticeLevel::Warning, Some(member), text);
            let offset = self.map.device_offset(self.data_offset, read.slot, start);
            self.submit_io(
                Owner::Op { key, item: 0 },
                member,
                device,
                IoOp::Write { offset, buf, fua: false },
            );
            read.pending += 1;
        }
        Flow::Wait
    }

    fn answer_read(&mut self, read: &mut ReadOp) {
        let mut whole: Option<BufMut> = None;
        for part in read.parts.drain(..) {
            let Some(buf) = part.buf else { unreachable!("every part is filled") };
            match &mut whole {
                None => whole = Some(buf),
                Some(whole) => whole.unsplit(buf),
            }
        }
        self.client_ops -= 1;
        let reply = whole.map_or(SlotReply::Done, SlotReply::Data);
        self.done(read.piece, Ok(reply));
    }
}

/// Whether the part is read anyway and covers all rows that are decoded.
fn spans_window(part: &Part, window: &Range<usize>) -> bool {
    !part.missing && part.range.range.start <= window.start && part.range.range.end >= window.end
}
