//! Advances the log, and carries the messages between it and the superblocks.
//!
//! Each message is delivered before the array's call returns: the log takes the permits before each of its
//! steps, and the superblocks take the reports after it.

use crate::array::log::permits::{Ceased, Out, Permits, Reports, Written};
use crate::array::log::settle::Settling;
use crate::array::{Array, ClientError, Inflight};
use crate::block_io::{IoFault, IoFaultKind, IoValue};
use crate::format::EpochStamp;

impl Array {
    /// Delivers what the superblocks permit at present.
    pub(in crate::array) fn tell_log(&mut self) {
        let (supers, core) = (&self.supers, &self.core);
        let epoch = supers.epoch();
        self.redo.take_permits(Permits {
            epoch: EpochStamp { number: epoch.number, id: epoch.id },
            losses: supers.losses(),
            acknowledge: supers.acknowledgements_allowed(core),
            in_place: supers.in_place_allowed(core),
            write: supers.is_durably_dirty() && supers.in_place_allowed(core),
        });
    }

    /// Delivers the log's reports to the superblocks.
    pub(in crate::array) fn hear_log(&mut self) {
        let Reports { wants_write, has_issued } = self.redo.take_reports();
        if wants_write {
            self.supers.want_dirty();
        }
        if has_issued {
            self.supers.note_batch();
        }
    }

    /// Asks the log how it stands, and delivers the answer to the superblocks.
    pub(in crate::array) fn ask_log(&mut self) {
        self.supers.note_standing(self.redo.standing(&self.pages));
    }

    /// Takes the news that a member is out of service.
    pub(in crate::array) fn cease(&mut self, Out { member, told }: Out) -> Ceased {
        let tail = told.and_then(|told| self.tail_of_leaving(told));
        self.pages.left(member);
        if self.redo.is_serving() {
            self.redo.member_lost();
        }
        Ceased { tail }
    }

    /// The tail that a member that leaves must show when it comes back (T6). Not higher than the one that it
    /// was given: what a checkpoint put in place is recorded with the next batch or the mark of an idle
    /// array. A copy of the member from before the checkpoint shows the same tail, so the log keeps
    /// everything from there on, and the map records that as written without the member.
    ///
    /// `told` is that of an update under way, if there is one. If the member does not get it, it is rebuilt
    /// although its content is right; with a lower tail the others would start their log above it when the
    /// update completes, and what lies between would be missing from the log and from the map.
    fn tail_of_leaving(&mut self, told: u64) -> Option<u64> {
        let tail = self.tail_in_place()?;
        if !self.redo.is_settled() {
            return Some(tail);
        }
        Some(self.redo.tail_to_show(told, tail))
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
        self.tell_log();
        self.redo.pump_batches(&mut self.core);
        self.hear_log();
        self.pump_settling();
        self.tell_log();
        self.redo.pump_rest(&mut self.core, &mut self.pages);
        self.hear_log();
        self.pump_rounds();
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
                if self.supers.have_log_start(start) && self.supers.acknowledgements_allowed(&self.core) =>
            {
                self.redo.settled(&mut self.core);
            }
            _ => {}
        }
    }

    /// Tick: puts a quiet log in place, and notes that it is.
    pub(super) fn checkpoint_when_idle(&mut self) {
        self.tell_log();
        self.redo.checkpoint_when_idle(&mut self.core, &self.pages);
        self.hear_log();
    }

    /// Begins a round if the log waits for one and none is under way.
    fn pump_rounds(&mut self) {
        if !self.rounds.is_idle() {
            return;
        }
        let Some(wish) = self.redo.wants_round(&self.core, &self.pages) else { return };
        let written = self.redo.ask_written();
        if let Some(written) = self.rounds.begin(&mut self.core, wish, written) {
            self.end_round(written);
        }
    }

    /// Takes the end of a flush of a round, whose fault, if any, was judged before.
    pub(super) fn round_io(&mut self) {
        if let Some(written) = self.rounds.flush_done() {
            self.end_round(written);
        }
    }

    fn end_round(&mut self, written: Written) {
        self.tell_log();
        self.redo.flushed(&mut self.core, &mut self.pages, written);
        self.hear_log();
        if self.redo.is_serving() && !self.core.is_failed() && self.redo.has_checkpoint() {
            self.pump_rounds();
        }
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
        self.rounds.forget();
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
