//! A device in a helper, as its owner sees it: a batch is a parcel in a slot of the exchange and a word in
//! the ring, and what comes back is copied out of the exchange.
//!
//! Invariant: outputs are written by `deliver` alone, on the thread of the owner, when the batch is no longer
//! the helper's; the helper has no address of theirs. Must not know how the process is kept.
#![allow(unsafe_code)] // copies from and to request memory; each block argues from the contract of `Device`

use std::os::fd::OwnedFd;
use std::sync::Arc;

use calpe_core::block_io::Pool;

use super::exchange::Exchange;
use super::link::{Link, NextDrill, Outcome, Word, note_of};
use super::parcel::{self, Parcel, Piece};
use super::process::Helper;
use super::ring::Pusher;
use crate::device::{Device, DeviceError, DeviceInfo, Digest, HostRange, Wake, Work};

/// Bytes of a block that is hashed.
const BLOCK: usize = 4096;

/// How a device reaches its helper.
pub(super) struct Line {
    pub(super) helper: Helper,
    pub(super) link: Arc<Link>,
    pub(super) exchange: Arc<Exchange>,
    /// Rings when there are orders.
    pub(super) orders: OwnedFd,
    /// The memories that the helper maps, by number.
    pub(super) memories: Vec<Pool>,
}

/// See the module's head.
pub(super) struct RemoteDevice {
    info: DeviceInfo,
    slot_bytes: usize,
    line: Line,
    drill: Arc<NextDrill>,
    pusher: Pusher,
    /// The batches under way, by slot.
    started: Vec<Option<Started>>,
}

/// What is done with the result of a batch.
struct Started {
    outputs: Vec<HostRange>,
    column_bytes: usize,
    digests: usize,
}

impl RemoteDevice {
    pub(super) fn new(
        info: DeviceInfo,
        (slots, slot_bytes): (usize, usize),
        line: Line,
        drill: Arc<NextDrill>,
    ) -> RemoteDevice {
        let started = (0..slots).map(|_| None).collect();
        RemoteDevice { info, slot_bytes, line, drill, pusher: Pusher::default(), started }
    }

    /// The parcel of a batch. Inputs that the helper cannot map are copied into the slot, behind the outputs.
    ///
    /// # Safety
    /// As [`Device::start`].
    unsafe fn pack(&self, slot: usize, work: &Work) -> Parcel {
        let Line { exchange, memories, .. } = &self.line;
        let mut parcel = Parcel {
            transform: work.transform.clone(),
            hash: work.hash,
            keep: !work.outputs.is_empty(),
            columns: work.columns,
            column_bytes: work.column_bytes,
            inputs: Vec::with_capacity(work.inputs.len()),
        };
        let mut free = parcel.output_bytes();
        for &HostRange { column, offset, start, bytes } in &work.inputs {
            let known = memories.iter().position(|memory| memory.contains(start.as_ptr(), bytes));
            let (memory, at) = match known {
                Some(memory) => (memory, start.addr().get() - memories[memory].slab().0.addr().get()),
                None => {
                    // SAFETY: mapped and unchanged by the caller's promise.
                    unsafe { exchange.copy_in(slot, free, start, bytes) };
                    free += bytes;
                    (memories.len(), free - bytes)
                }
            };
            parcel.inputs.push(Piece { column, offset, bytes, memory, at });
        }
        parcel
    }
}

impl Device for RemoteDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn slots(&self) -> usize {
        self.started.len()
    }

    fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    unsafe fn start(&mut self, slot: usize, work: Work, wake: Wake) -> Result<(), DeviceError> {
        assert!(self.started[slot].is_none(), "slot {slot} is not idle");
        if work.bytes() > self.slot_bytes {
            return Err(DeviceError::Unsupported("more bytes than a slot has"));
        }
        // SAFETY: the caller's promise is this function's.
        let parcel = unsafe { self.pack(slot, &work) };
        let Line { link, exchange, orders, .. } = &self.line;
        exchange.put_parcel(slot, &parcel::write(&parcel));
        let serial = link.begin(slot, wake).map_err(DeviceError::Lost)?;
        let digests = if work.hash { work.bytes() / BLOCK } else { 0 };
        self.started[slot] =
            Some(Started { outputs: work.outputs, column_bytes: work.column_bytes, digests });
        let word = Word { slot, note: note_of(self.drill.take()), serial };
        self.pusher.push(&exchange.orders(), word.pack());
        // It fails only where the bell has rung 2^64 times unheard: then it rings anyway.
        let _ = rustix::io::write(orders, &1u64.to_ne_bytes());
        Ok(())
    }

    fn finish(&mut self, slot: usize) -> Result<Vec<Digest>, DeviceError> {
        let failed = |text: &str| DeviceError::Failed { operation: "finish", text: text.to_owned() };
        match self.line.link.finish(slot).map_err(DeviceError::Lost)? {
            None => Err(failed("the batch has not ended")),
            Some(Outcome::Refused) => {
                self.started[slot] = None;
                Err(DeviceError::Unsupported("its helper does not do such batches"))
            }
            Some(Outcome::Done) => {
                let started = self.started[slot].as_ref().ok_or_else(|| failed("no batch was started"))?;
                Ok(self.line.exchange.digests(slot, started.digests))
            }
        }
    }

    unsafe fn deliver(&mut self, slot: usize) {
        let Some(Started { outputs, column_bytes, .. }) = self.started[slot].take() else { return };
        for HostRange { column, offset, start, bytes } in outputs {
            // SAFETY: the caller holds the outputs of the batch for this.
            unsafe { self.line.exchange.copy_out(slot, column * column_bytes + offset, start, bytes) };
        }
    }

    fn watch(&mut self, lost: Wake) {
        self.line.link.watch(lost);
    }

    fn lost(&self) -> Option<String> {
        self.line.link.ended()
    }

    fn process(&self) -> Option<u32> {
        Some(self.line.helper.pid())
    }

    fn abandon(self: Box<Self>) {
        self.line.helper.give_up();
    }
}
