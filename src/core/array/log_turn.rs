//! Advances the log, under the permits of the superblocks.

use crate::array::log::permits::Permits;
use crate::array::log::settle::Settling;
use crate::array::{Array, ClientError, Inflight};
use crate::block_io::{IoFault, IoFaultKind, IoValue};
use crate::format::EpochStamp;

impl Array {
    /// The permits of the superblocks at present.
    pub(in crate::array) fn permits(&self) -> Permits {
        let epoch = self.supers.epoch();
        Permits {
            epoch: EpochStamp { number: epoch.number, id: epoch.id },
            losses: self.supers.losses(),
            acknowledge: self.supers.acknowledgements_allowed(&self.core),
            in_place: self.supers.in_place_allowed(&self.core),
            write: self.supers.is_durably_dirty() && self.supers.in_place_allowed(&self.core),
            has_asked: false,
            has_issued: false,
        }
    }

    /// Passes the log's reports on to the superblocks.
    fn report_to_supers(&mut self, permits: &Permits) {
        if permits.has_asked {
            self.supers.want_dirty();
        }
        if permits.has_issued {
            self.supers.note_batch();
        }
    }

    /// Advances the log as far as it can go.
    pub(super) fn pump_redo(&mut self) {
        if self.core.is_stopped() {
            return;
        }
        if !self.redo.is_serving() {
            self.pump_startup();
            return;
        }
        if self.core.is_failed() {
            return;
        }
        self.end_hold();
        let mut permits = self.permits();
        self.redo.pump_batches(&mut self.core, &mut permits);
        self.report_to_supers(&permits);
        self.pump_settling();
        let mut permits = self.permits();
        self.redo.pump_rest(&mut self.core, &mut self.pages, &mut permits);
        self.report_to_supers(&permits);
    }

    /// Advances the end of a replay.
    fn pump_settling(&mut self) {
        match self.redo.settling(&self.pages) {
            Settling::StartAnew(end) if self.supers.acknowledgements_allowed(&self.core) => {
                let start = self.start_log_anew(end);
                self.redo.starts_anew(start);
                self.pump_supers();
            }
            Settling::Record(start)
                if self.supers.durable_log_start() == Some(start)
                    && self.supers.acknowledgements_allowed(&self.core) =>
            {
                self.redo.settled(&mut self.core);
            }
            _ => {}
        }
    }

    /// Tick: puts a quiet log in place, and notes that it is.
    pub(super) fn checkpoint_when_idle(&mut self) {
        let mut permits = self.permits();
        self.redo.checkpoint_when_idle(&mut self.core, &self.pages, &mut permits);
        self.report_to_supers(&permits);
    }

    /// Takes the end of a flush of a round.
    pub(super) fn round_io(&mut self) {
        let mut permits = self.permits();
        self.redo.flush_done(&mut self.core, &mut self.pages, &mut permits);
        self.report_to_supers(&permits);
    }

    /// Takes the end of giving back the space of a discarded slot on a device, which may have failed.
    pub(super) fn punch_io(&mut self, entry: &Inflight, result: Result<IoValue, IoFault>) {
        // A device that is gone, or short of something, may be able to give space back all the same.
        if let Err(fault) = result
            && fault.kind != IoFaultKind::Gone
            && !fault.kind.passes()
            && let Some(device) = self.core.device_mut(entry.member, entry.device)
        {
            device.cannot_zero = true;
        }
        self.redo.in_place_done();
    }

    /// Wakes operations that wait for room; they look again.
    pub(in crate::array) fn wake_waiting_for_room(&mut self) {
        self.redo.wake_waiting_for_room(&mut self.core);
    }

    /// The sequence of the next batch, when the log is empty and everything is in place and durable, and no
    /// copies of pages have to be written again.
    pub(in crate::array) fn drained_log(&self) -> Option<u64> {
        self.needless_log().filter(|_| self.pages.store().dirty_pages() == 0)
    }

    /// See [`crate::array::log::Redo::needless_end`].
    pub(in crate::array) fn needless_log(&self) -> Option<u64> {
        self.redo.needless_end(&self.pages)
    }

    /// Ends everything that waits for the log: the array has failed, and the content of its members decides
    /// from here on.
    pub(in crate::array) fn log_failed(&mut self) {
        self.pages.end_trials(&mut self.core);
        if self.core.stop.stopping.is_none() {
            // Nothing proves that the array is quiet before its log was read.
            self.supers.unmark_clean();
        }
        if self.redo.is_serving() {
            let (durable, acknowledged) = self.redo.durable_and_acknowledged();
            self.startup.note_failure(durable, acknowledged);
        }
        let (waiting, mut ended) = self.redo.fail();
        self.core.load.client_ops -= ended.len();
        ended.extend(self.startup.take_queued().into_iter().map(|(id, ..)| id));
        self.startup.end_recovery();
        self.passes.forget_owed_pages();
        self.core.work.ready.extend(waiting);
        let patient = std::mem::take(&mut self.core.work.patient);
        self.core.work.ready.extend(patient.into_iter().map(|(_, key)| key));
        for id in ended {
            self.core.done(id, Err(ClientError::Io));
        }
    }
}
