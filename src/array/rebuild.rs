//! One slot of a rebuild: re-create the chunk of every device that is at this slot, from the old device where it
//! still serves, else from any k columns.

use super::lock::LockMode;
use super::members::{Progress, Which};
use super::{Array, Flow, Inflight, Op, Owner};
use crate::block_io::{BufMut, DeviceId, IoFault, IoOp, IoValue};
use crate::format::{MemberSet, MemberState};
use crate::units::{ColumnIndex, MemberIndex, SlotIndex};

pub(super) struct RebuildOp {
    slot: SlotIndex,
    targets: Vec<Target>,
    stage: Stage,
    reads: Vec<(usize, MemberIndex, Option<BufMut>)>,
    pending: usize,
    suspect: MemberSet,
    bad: MemberSet,
    faulted: bool,
}

impl RebuildOp {
    pub(super) fn waits_for_lock(&self) -> bool {
        self.stage == Stage::Lock
    }
}

/// A device that is to get a slot.
pub(super) struct Target {
    pub member: MemberIndex,
    pub device: DeviceId,
    pub column: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Lock,
    Read,
    Write,
}

impl Array {
    /// The progress of every device that is being built.
    pub(super) fn builds_mut(
        &mut self,
    ) -> impl Iterator<Item = (MemberIndex, Which, DeviceId, &mut Progress)> {
        self.members.iter_mut().enumerate().flat_map(|(at, member)| {
            let index = MemberIndex(at as u16);
            let primary = member.device.zip(member.progress.as_mut());
            let primary = primary.map(|(device, progress)| (index, Which::Primary, device.id, progress));
            let second = member.replacement.as_mut();
            let second = second.map(|r| (index, Which::Replacement, r.device.id, &mut r.progress));
            [primary, second].into_iter().flatten()
        })
    }

    /// The next slot that a device under construction needs: the lowest of all, so that devices which join later
    /// catch up and then share the reads of the others.
    pub(super) fn next_build_slot(&self) -> Option<SlotIndex> {
        let progresses = self.members.iter().flat_map(|member| {
            [member.progress.as_ref(), member.replacement.as_ref().map(|r| &r.progress)].into_iter().flatten()
        });
        progresses.map(|p| p.next).filter(|&next| next < self.map.slots).min().map(SlotIndex)
    }

    pub(super) fn start_rebuild_slot(&mut self) {
        let Some(slot) = self.next_build_slot() else {
            self.passes.running -= 1;
            return;
        };
        let map = self.map;
        let mut targets = Vec::new();
        for (member, _, device, progress) in self.builds_mut() {
            if progress.next == slot.0 {
                progress.next += 1;
                progress.running.insert(slot.0);
                targets.push(Target { member, device, column: usize::from(map.column_of(slot, member).0) });
            }
        }
        if self.redo.is_some() {
            self.start_logged_rebuild(slot, targets);
            return;
        }
        let op = Box::new(RebuildOp {
            slot,
            targets,
            stage: Stage::Lock,
            reads: Vec::new(),
            pending: 0,
            suspect: MemberSet::default(),
            bad: MemberSet::default(),
            faulted: false,
        });
        let key = self.ops.insert(Op::Rebuild(op));
        if self.locks.acquire(slot, 0..map.chunk, LockMode::Exclusive, key) {
            self.ready.push_back(key);
        }
    }

    pub(super) fn advance_rebuild(&mut self, key: usize, op: &mut RebuildOp) -> Flow {
        if op.stage != Stage::Lock {
            return Flow::Wait;
        }
        op.stage = Stage::Read;
        self.read_for_rebuild(key, op)
    }

    fn read_for_rebuild(&mut self, key: usize, op: &mut RebuildOp) -> Flow {
        op.faulted = false;
        op.reads.clear();
        if self.is_failed() {
            return self.end_rebuild(key, op, false);
        }
        let slot = op.slot;
        let readable = |column: usize| {
            let member = self.map.member_of(slot, ColumnIndex(column as u16));
            !op.bad.contains(member) && self.readable(member, slot).is_some()
        };
        // A column that some device still serves is copied; the others are decoded from any k.
        let mut columns: Vec<usize> = Vec::with_capacity(self.map.k + 1);
        let mut decode = false;
        for target in &op.targets {
            if readable(target.column) {
                if !columns.contains(&target.column) {
                    columns.push(target.column);
                }
            } else {
                decode = true;
            }
        }
        if decode {
            let more = (0..self.map.width()).filter(|c| readable(*c) && !columns.contains(c));
            let needed = self.map.k.saturating_sub(columns.len());
            let more: Vec<usize> = more.take(needed).collect();
            columns.extend(more);
            if columns.len() < self.map.k {
                return self.abort_rebuild(key, op);
            }
        }
        for column in columns {
            let member = self.map.member_of(slot, ColumnIndex(column as u16));
            let Some(device) = self.readable(member, slot) else { unreachable!("just found readable") };
            let offset = self.map.device_offset(self.data_offset, slot, 0);
            let buf = self.pool.alloc(self.map.chunk);
            self.submit_io(
                Owner::Op { key, item: op.reads.len() },
                member,
                device,
                IoOp::Read { offset, buf },
            );
            op.reads.push((column, member, None));
            op.pending += 1;
        }
        Flow::Wait
    }

    pub(super) fn rebuild_io(
        &mut self,
        key: usize,
        op: &mut RebuildOp,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        op.pending -= 1;
        match (op.stage, result) {
            (Stage::Read, Ok(IoValue::Data(buf))) => op.reads[item].2 = Some(buf),
            (Stage::Read, Err(fault)) => {
                op.faulted = true;
                if op.suspect.contains(entry.member) {
                    op.bad.insert(entry.member);
                }
                op.suspect.insert(entry.member);
                self.read_fault(entry.member, entry.device, fault);
            }
            (_, Ok(_)) => {}
            (_, Err(fault)) => self.write_fault(entry.member, entry.device, "write of the rebuild", fault),
        }
        if op.pending > 0 {
            return Flow::Wait;
        }
        match op.stage {
            Stage::Read if op.faulted => self.read_for_rebuild(key, op),
            Stage::Read => self.write_rebuilt(key, op),
            Stage::Write => self.end_rebuild(key, op, !self.is_failed()),
            Stage::Lock => unreachable!("nothing is in flight while waiting for a lock"),
        }
    }

    fn write_rebuilt(&mut self, key: usize, op: &mut RebuildOp) -> Flow {
        if self.is_failed() {
            return self.end_rebuild(key, op, false);
        }
        op.stage = Stage::Write;
        let slot = op.slot;
        let mut reads: Vec<(usize, crate::block_io::Buf)> =
            op.reads.drain(..).filter_map(|(column, _, buf)| Some((column, buf?.freeze()))).collect();
        let mut wanted: Vec<(usize, BufMut)> = Vec::new();
        for target in &op.targets {
            if !reads.iter().any(|(c, _)| *c == target.column)
                && !wanted.iter().any(|(c, _)| *c == target.column)
            {
                wanted.push((target.column, self.pool.alloc(self.map.chunk)));
            }
        }
        if !wanted.is_empty() {
            let present: Vec<(usize, &[u8])> =
                reads.iter().take(self.map.k).map(|(c, buf)| (*c, &buf[..])).collect();
            let mut outputs: Vec<(usize, &mut [u8])> =
                wanted.iter_mut().map(|(c, buf)| (*c, &mut buf[..])).collect();
            self.codec.recover(&present, &mut outputs).expect("k distinct present columns decode any other");
        }
        reads.extend(wanted.into_iter().map(|(column, buf)| (column, buf.freeze())));
        for target in &op.targets {
            // A target that has left service meanwhile has lost its progress too.
            let Some(known_zero) = self.build_known_zero(target.member, target.device) else { continue };
            let Some((_, buf)) = reads.iter().find(|(c, _)| *c == target.column) else { continue };
            if known_zero && is_zero(buf) {
                continue;
            }
            let offset = self.map.device_offset(self.data_offset, slot, 0);
            let write = IoOp::Write { offset, buf: buf.clone(), fua: false };
            self.submit_io(Owner::Op { key, item: 0 }, target.member, target.device, write);
            op.pending += 1;
        }
        if op.pending > 0 { Flow::Wait } else { self.end_rebuild(key, op, true) }
    }

    /// Whether a device under construction is known to read as zeroes where it has not been written; None: it
    /// is not under construction any more.
    fn build_known_zero(&mut self, member: MemberIndex, device: DeviceId) -> Option<bool> {
        self.builds_mut().find(|(m, _, d, _)| *m == member && *d == device).map(|(_, _, _, p)| p.known_zero)
    }

    /// `complete`: the slot is built on every target; otherwise it will be started again.
    pub(super) fn end_rebuild(&mut self, key: usize, op: &mut RebuildOp, complete: bool) -> Flow {
        self.built_slot(op.slot, &op.targets, complete);
        self.unlock(op.slot, key);
        Flow::Finished
    }

    /// Moves the progress of the targets over a slot, or back to it.
    pub(super) fn built_slot(&mut self, slot: SlotIndex, targets: &[Target], complete: bool) {
        for target in targets {
            for (member, _, device, progress) in self.builds_mut() {
                if member == target.member && device == target.device {
                    progress.running.remove(&slot.0);
                    if !complete {
                        progress.rewind_to(slot.0);
                    }
                }
            }
        }
        self.passes.running -= 1;
    }

    /// The epoch up to which a device under construction is current anyway.
    pub(super) fn needs_since(&mut self, target: &Target) -> Option<u64> {
        let mut builds = self.builds_mut();
        builds
            .find(|(m, _, d, _)| *m == target.member && *d == target.device)
            .and_then(|(_, _, _, p)| p.since)
    }

    /// Fewer than k columns of the slot can be read: what would be built is not known, so nothing is.
    fn abort_rebuild(&mut self, key: usize, op: &mut RebuildOp) -> Flow {
        let reason = format!(
            "slot {} cannot be decoded: fewer than {} of its chunks can be read (members {:?} fail)",
            op.slot,
            self.map.k,
            op.bad.iter().map(|m| m.0).collect::<Vec<_>>()
        );
        for target in std::mem::take(&mut op.targets) {
            self.fault_device(target.member, target.device, MemberState::Faulted, reason.clone());
        }
        self.end_rebuild(key, op, true)
    }
}

fn is_zero(bytes: &[u8]) -> bool {
    let (words, tail) = bytes.as_chunks::<64>();
    words.iter().all(|word| word.iter().fold(0, |a, b| a | b) == 0) && tail.iter().all(|&b| b == 0)
}
