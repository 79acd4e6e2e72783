//! Flushes, one at a time for everybody who waits, and the question which chunks are holes.

use super::ClientError;
use super::{Array, Flow, Inflight, Op, Owner, PieceId, SlotReply};
use crate::block_io::{Extent, IoFault, IoOp, IoValue};
use crate::units::{ColumnIndex, MemberIndex, SlotIndex};

/// One flush of all members serves every request that waited when it began; later ones wait for the next.
#[derive(Default)]
pub(super) struct FlushGroup {
    waiting: Vec<PieceId>,
    running: Vec<PieceId>,
    pending: usize,
    /// The members are flushed; the answer waits until a loss is recorded.
    held: bool,
}

impl FlushGroup {
    /// Everybody who waits, for an answer that is not the flush's own.
    pub(super) fn take_all(&mut self) -> Vec<PieceId> {
        self.held = false;
        let mut all = std::mem::take(&mut self.running);
        all.append(&mut self.waiting);
        all
    }
}

impl Array {
    pub(super) fn start_flush(&mut self, piece: PieceId) {
        self.client_ops += 1;
        self.flushes.waiting.push(piece);
    }

    pub(super) fn pump_flushes(&mut self) {
        if self.flushes.held && self.acknowledgements_allowed() {
            self.answer_flush();
        }
        if self.flushes.pending > 0 || self.flushes.held || self.flushes.waiting.is_empty() {
            return;
        }
        self.flushes.running = std::mem::take(&mut self.flushes.waiting);
        for (member, _, device) in self.devices() {
            if device.is_unflushed() {
                self.submit_io(Owner::Flush, member, device.id, IoOp::Flush);
                self.flushes.pending += 1;
            }
        }
        self.flushes.held = true;
        if self.flushes.pending == 0 {
            self.pump_flushes();
        }
    }

    pub(super) fn flush_io(&mut self, entry: Inflight, result: Result<IoValue, IoFault>) {
        self.flushes.pending -= 1;
        if let Err(fault) = result {
            self.flush_fault(entry.member, entry.device, fault);
        }
    }

    fn answer_flush(&mut self) {
        if self.flushes.pending > 0 {
            return;
        }
        self.flushes.held = false;
        for piece in std::mem::take(&mut self.flushes.running) {
            self.client_ops -= 1;
            self.done(piece, Ok(SlotReply::Done));
        }
    }

    pub(super) fn start_extents(&mut self, piece: PieceId, first: SlotIndex, count: u64) {
        assert!(count > 0 && first.0 + count <= self.map.slots, "extents out of bounds");
        self.client_ops += 1;
        let width = self.map.width();
        let mut op = Box::new(ExtentsOp { piece, first, count, pending: 0, holes: vec![None; width] });
        let key = self.ops.insert(Op::Busy);
        for member in (0..width).map(|at| MemberIndex(at as u16)) {
            // A device being built is asked only when it holds the last slot of the run, and so all of them.
            let Some(device) = self.readable(member, SlotIndex(first.0 + count - 1)) else { continue };
            let offset = self.map.device_offset(self.data_offset, first, 0);
            let len = count * self.map.chunk as u64;
            let item = usize::from(member.0);
            self.submit_io(Owner::Op { key, item }, member, device, IoOp::Extents { offset, len });
            op.pending += 1;
        }
        if op.pending == 0 {
            self.ready.push_back(key);
        }
        self.ops[key] = Op::Extents(op);
    }

    pub(super) fn advance_extents(&mut self, op: &mut ExtentsOp) -> Flow {
        if op.pending == 0 { self.answer_extents(op) } else { Flow::Wait }
    }

    pub(super) fn extents_io(
        &mut self,
        op: &mut ExtentsOp,
        item: usize,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        op.pending -= 1;
        // A member that cannot tell has data everywhere; that is always a right answer.
        if let Ok(IoValue::Extents(extents)) = result {
            op.holes[item] = Some(chunk_holes(&extents, self.map.chunk as u64, op.count));
        }
        if op.pending > 0 { Flow::Wait } else { self.answer_extents(op) }
    }

    fn answer_extents(&mut self, op: &mut ExtentsOp) -> Flow {
        let mut holes = Vec::with_capacity(op.count as usize * self.map.k);
        for at in 0..op.count {
            for column in 0..self.map.k as u16 {
                let member = self.map.member_of(SlotIndex(op.first.0 + at), ColumnIndex(column));
                let of_member = op.holes[usize::from(member.0)].as_ref();
                holes.push(of_member.is_some_and(|chunks| chunks[at as usize]));
            }
        }
        self.client_ops -= 1;
        let reply = if self.is_failed() { Err(ClientError::Io) } else { Ok(SlotReply::Holes(holes)) };
        self.done(op.piece, reply);
        Flow::Finished
    }
}

/// A question for holes in a run of slots.
pub(super) struct ExtentsOp {
    piece: PieceId,
    first: SlotIndex,
    count: u64,
    pending: usize,
    /// Per member: per chunk of the run whether it is a hole.
    holes: Vec<Option<Vec<bool>>>,
}

/// Which of `count` chunks lie wholly in holes.
fn chunk_holes(extents: &[Extent], chunk: u64, count: u64) -> Vec<bool> {
    let mut holes = vec![true; count as usize];
    let mut at = 0u64;
    for extent in extents {
        let end = (at + extent.len).min(count * chunk);
        if !extent.hole && end > at {
            for hole in &mut holes[(at / chunk) as usize..end.div_ceil(chunk) as usize] {
                *hole = false;
            }
        }
        at += extent.len;
    }
    // What the answer does not cover is not known to be a hole.
    for hole in &mut holes[(at.min(count * chunk) / chunk) as usize..] {
        *hole = false;
    }
    holes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_chunks_wholly_inside_holes_are_holes() {
        let extents = [
            Extent { len: 100, hole: true },
            Extent { len: 10, hole: false },
            Extent { len: 290, hole: true },
        ];
        assert_eq!(chunk_holes(&extents, 100, 4), [true, false, true, true]);
        assert_eq!(
            chunk_holes(&extents, 100, 5),
            [true, false, true, true, false],
            "the answer was too short"
        );
        assert_eq!(chunk_holes(&[], 100, 2), [false, false]);
    }
}
