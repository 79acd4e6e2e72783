//! Compares what a device under construction got before an unclean stop with the checksums, before the device
//! counts as built.
//!
//! The superblock says how far a device was built, but not whether it was rolled back since: a snapshot that
//! was made after that superblock was written has it, too, and lacks later writes to slots that were built.
//! Of a member in service the log would show that (T6). It is not written to devices under construction, so
//! they are read instead: one chunk of a slot, where building it anew reads k and writes one. A slot that
//! does not match is built once more. Must not know how a slot is built.

use crate::array::base::proofs::Proof;
use crate::array::passes::rebuild::Target;
use crate::array::passes::walk::{LoggedPass, Stage, Work};
use crate::array::{Array, Flow, Inflight, NoticeKind, NoticeLevel, Owner, Urgency};
use crate::block_io::{IoFault, IoOp, IoValue};
use crate::codec::{CodecJob, CodedColumns, Column, Outputs};
use crate::units::{BlockHash, ColumnIndex, ROW_BYTES, SlotIndex};

impl Array {
    /// Compares a slot.
    pub(in crate::array::passes) fn start_proof(&mut self, slot: SlotIndex, target: Target) {
        let build = self.core.builds_mut().find(|(device, _)| *device == target.device);
        if build.is_some_and(|(_, progress)| progress.proofs.announce()) {
            let member = target.device.member;
            let text = format!(
                "what was built on the new device of member {member} before the stop is compared with its checksums first"
            );
            self.core.notice(NoticeKind::BuildCompared, NoticeLevel::Info, Some(member), text);
        }
        self.start_logged_pass(slot, Work::Prove(target, Proof::Unknown));
    }

    /// Reads the chunk of a slot that is held.
    pub(super) fn read_to_prove(&mut self, key: usize, pass: &mut LoggedPass, target: Target) -> Flow {
        if self.core.find_device(target.device.id).is_none() {
            return self.end_logged_pass(key, pass, true);
        }
        let offset = self.core.map.device_offset(self.core.shape.data_offset, pass.hold.slot(), 0);
        let op = IoOp::Read { offset, buf: self.core.pool.alloc(self.core.map.chunk) };
        self.core.submit_io(Owner::Op { key, item: 0 }, target.device.member, target.device.id, op);
        pass.stage = Stage::Prove;
        Flow::Wait
    }

    /// Takes the end of that read.
    pub(super) fn prove_io(
        &mut self,
        key: usize,
        pass: &mut LoggedPass,
        entry: &Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        let outcome = match (result, self.pages.checksums()) {
            (Ok(IoValue::Data(buf)), Some(hasher)) => {
                let inputs = vec![Column::Owned(buf)];
                let job =
                    CodecJob { transform: None, hasher: Some(hasher), inputs, outputs: Outputs::Hashed };
                self.core.give_away(key, job, Urgency::Background);
                return Flow::Wait;
            }
            (Err(fault), _) if fault.kind.passes() => Proof::Unknown,
            (Err(fault), _) => {
                self.read_fault(entry.member, entry.device, fault);
                Proof::Fails
            }
            (Ok(_), _) => unreachable!("a read of an array with checksums yields data"),
        };
        self.end_proof(key, pass, outcome)
    }

    /// Takes the hashes of what was read.
    pub(super) fn prove_hashed(&mut self, key: usize, pass: &mut LoggedPass, coded: &CodedColumns) -> Flow {
        let Work::Prove(Target { column, .. }, _) = &pass.work else { unreachable!("it compares a slot") };
        let rows = 0..self.core.map.chunk / ROW_BYTES as usize;
        let expected = self.pages.store().hashes(pass.hold.slot(), rows, ColumnIndex(*column as u16));
        // Of blocks that were never written, or are lost, nothing is needed.
        let is_as = |(expected, found): (BlockHash, &BlockHash)| {
            expected == BlockHash::UNWRITTEN || !expected.is_stored() || expected == *found
        };
        let holds = expected.zip(&coded.hashes).all(is_as);
        self.end_proof(key, pass, if holds { Proof::Holds } else { Proof::Fails })
    }

    fn end_proof(&mut self, key: usize, pass: &mut LoggedPass, outcome: Proof) -> Flow {
        let Work::Prove(target, of) = &mut pass.work else { unreachable!("it compares a slot") };
        if self.core.is_failed() || !self.redo.is_serving() {
            return self.end_logged_pass(key, pass, false);
        }
        *of = outcome;
        // Others follow it: only the first of a device is reported.
        let (member, device) = (target.device.member, target.device);
        let build = self.core.builds_mut().find(|(of, _)| *of == device);
        if outcome == Proof::Fails && build.is_some_and(|(_, progress)| progress.proofs.tell()) {
            let text = format!(
                "the device that is built for member {member} does not hold, or does not give, all that it held before the stop: \
                 it was rolled back, or is damaged; the slots in question are built once more"
            );
            self.core.notice(NoticeKind::BuildCompared, NoticeLevel::Warning, Some(member), text);
        }
        self.end_logged_pass(key, pass, true)
    }
}
