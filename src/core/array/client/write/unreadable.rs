//! Writes into rows that cannot be read for their parity (rules T1 and T2 of the crash-safety design), and
//! how blocks that such writes set aside come back.
//!
//! New parity may come from the old bytes of the written columns and of the parities, or from the other data
//! columns: both are tried, since either may be readable where the other is not. If neither is, the write
//! releases its rows and tries again, within a limit. After that it sets aside what it cannot read: these
//! columns count as zeroes in the new parity, and their hashes stay. Reading them is an error until their own
//! members give the content again ([`Array::start_repay`]) or they are written. It sets them aside at once
//! where every block of the row was read and too few match: waiting would show nothing new, and such blocks
//! stay known as beyond repair.
//!
//! A write sets nothing aside without checksums, for a shortage of the host, or where a block is not on its
//! own member and others would give it but for an error: then it ends with an error and has changed nothing.

use crate::array::Core;
use crate::array::blocks::{BlockName, Missing, Why};
use crate::array::client::plan::ParityPath;
use crate::array::client::write::{BLOCK, Flow, LoggedWrite, Stage, Work};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{Array, ClientError, NoticeKind, NoticeLevel, Owner, StripeReply};
use crate::block_io::{IoFault, IoOp, IoValue};
use crate::format::MemberState;
use crate::units::{ColumnIndex, Count, StripeIndex, Timestamp};

/// How new parity is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::array) enum Way {
    /// The way that reads least.
    Usual,
    /// From the old bytes of the written columns and of the parities.
    Delta,
    /// From the other data columns.
    Afresh,
}

/// How long a write tries to read its rows: longer than a path of a disk takes to come back, shorter than the
/// 30 s after which the kernel's NBD client gives up a request.
const PATIENCE_NS: u64 = 10_000_000_000;

/// Blocks that are looked at together between two tries.
const MENDED_AT_ONCE: usize = 64;

/// Time between two tries.
const RETRY_NS: u64 = 250_000_000;

impl Array {
    /// Goes on where blocks that new parity needs cannot be had.
    pub(super) fn old_missing(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        // The reads themselves have waited for the end of the shortage; another way would have to wait again.
        if write.fetch.host_is_short() && self.core.is_lasting_shortage(write.request.since) {
            return self.refuse_unreadable(key, write);
        }
        let all_delta = write.parity.plans.iter().all(|(_, path)| *path == ParityPath::ReadModifyWrite);
        let all_afresh = write.parity.plans.iter().all(|(_, path)| *path != ParityPath::ReadModifyWrite);
        let next = match write.parity.way {
            Way::Usual if all_delta => Some(Way::Afresh),
            Way::Usual => Some(Way::Delta),
            Way::Delta if !all_afresh => Some(Way::Afresh),
            Way::Delta | Way::Afresh => None,
        };
        if let Some(next) = next {
            write.parity.way = next;
            return self.plan_logged(key, write);
        }
        if let Some((_, column, row)) = write.repays {
            return self.still_set_aside(key, write, usize::from(column), row as usize);
        }
        let mut unknown = write.fetch.missing().iter().filter(|block| !block.why.counts_as_zeroes());
        let is_proven = unknown.all(|block| block.why == Why::Proven);
        let has_waited = is_off(Mutation::NoPatience) || self.core.has_waited(write);
        let may_set_aside =
            self.pages.checksums().is_some() && !write.fetch.host_is_short() && !self.would_lose(write);
        if may_set_aside && (is_proven || has_waited) {
            return self.set_aside(write);
        }
        if has_waited || is_proven || self.core.stop.hurried {
            return self.refuse_unreadable(key, write);
        }
        self.wait_to_read(key, write)
    }

    /// Handles a block that is written in part and cannot be had, so that its new content is not known.
    pub(super) fn edges_missing(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let may_change = write.fetch.missing().iter().any(|block| block.why == Why::Unreadable);
        if !may_change || self.core.has_waited(write) || self.core.stop.hurried {
            return self.refuse_unreadable(key, write);
        }
        self.wait_to_read(key, write)
    }

    /// Whether setting aside what is missing would lose a block for good: its own member does not have it, so
    /// only the others of its row can give it, and nothing prevents that but an error, which may pass (T2).
    fn would_lose(&self, write: &LoggedWrite) -> bool {
        let missing = write.fetch.missing().iter().filter(|block| block.why == Why::Unreadable);
        let mut hidden = missing.filter(|block| write.fetch.has_errors(block.row));
        hidden.any(|&Missing { column, row, .. }| {
            let is_absent = write.fetch.is_absent(column, row);
            write.fetch.is_wrong(column, row) || is_absent && !self.is_kept_by(write, column)
        })
    }

    /// Whether a member that is not in service, or is being built, has what the stripe holds in its column.
    fn is_kept_by(&self, write: &LoggedWrite, column: usize) -> bool {
        let index = self.core.member_at(write.slot, column);
        let member = self.core.member(index);
        let since = match member.state {
            MemberState::Rebuilding => member.progress.as_ref().and_then(|progress| progress.since),
            _ => self.supers.current_until(index),
        };
        since.is_some_and(|since| !self.is_missed(write.stripe, since))
    }

    fn refuse_unreadable(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        let missing = write.fetch.take_missing();
        self.note_missing(write.stripe, write.slot, &missing);
        self.end_logged_write(key, write, Err(ClientError::Io))
    }

    /// Releases the rows, so that reads go on, and reads them again later.
    fn wait_to_read(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        write.parity.unreadable_since.get_or_insert(self.core.now);
        let missing = write.fetch.take_missing();
        write.parity.way = Way::Usual;
        // Other writes may change the rest of its blocks before it has the rows again (T2).
        if let Some((offset, data)) = write.task.asked.take()
            && !is_off(Mutation::WritesWhatItReadBefore)
        {
            write.task.work = Work::Data { offset, data };
        }
        self.release_write(key, write);
        self.wake_waiting_for_room();
        self.mend_from_unbuilt(write.stripe, &missing);
        let until = Timestamp(self.core.now.0 + RETRY_NS);
        write.stage = Stage::Patience(until);
        self.core.work.patient.push((until, key));
        Flow::Wait
    }

    /// Has reads mend what is missing from devices that are being built: these may have blocks that members
    /// in service lack.
    fn mend_from_unbuilt(&mut self, stripe: StripeIndex, missing: &[Missing]) {
        if !self.core.any_building() || self.core.stop.stopping.is_some() || self.looks.reads() {
            return;
        }
        for block in missing.iter().filter(|block| !block.why.counts_as_zeroes()).take(MENDED_AT_ONCE) {
            self.look_again((stripe, block.column as u16, block.row as u32), None);
        }
    }

    /// T1, beyond the budget (T8): counts what cannot be read as zeroes from now on. Its hashes stay.
    fn set_aside(&mut self, write: &mut LoggedWrite) -> Flow {
        let aside: Vec<Missing> = write
            .fetch
            .missing()
            .iter()
            .filter(|block| !block.why.counts_as_zeroes())
            .map(|block| Missing {
                why: if block.why == Why::Proven { Why::Gone } else { Why::SetAside },
                ..*block
            })
            .collect();
        let text = match aside.iter().filter(|block| block.why == Why::Gone).count() {
            gone if gone == aside.len() => format!(
                "{} of slot {} {} beyond repair: what could give them was read, and is wrong. A write into these rows \
                 leaves them so. Reading them is an error until they are written",
                Count::of(gone, "block"),
                write.slot,
                Count::of(gone, "block").are()
            ),
            _ => format!(
                "{} of slot {} cannot be read, and fewer than {} others of their rows can: a write into these rows sets \
                 them aside. Reading them is an error until their members give them again, or they are written",
                Count::of(aside.len(), "block"),
                write.slot,
                self.core.map.k
            ),
        };
        let offset = self.core.offset_of(write.stripe, &aside);
        self.core.notice_at(NoticeKind::BlocksSetAside, NoticeLevel::Error, offset, text);
        let flow = self.records_made(write);
        self.damage.note(write.stripe, &aside);
        flow
    }

    /// Reads a block that is set aside from its own member. If its content is still what its hash says, it is
    /// written anew with all parities. `waiters` are advanced when that is over, which may be before this
    /// returns.
    pub(in crate::array) fn start_repay(
        &mut self,
        block: BlockName,
        waiters: impl IntoIterator<Item = usize>,
    ) {
        if self.looks.begin(block, waiters) {
            let (stripe, column, row) = block;
            let work = Work::Repay { column: usize::from(column), row: row as usize };
            self.start_logged(None, stripe, work, false);
        }
    }

    /// Whether an operation waits for blocks to be read again.
    pub(in crate::array) fn is_repaying(&self, key: usize) -> bool {
        self.looks.is_waiting(key)
    }

    /// Reads the block that is set aside, now that the rows are locked and their pages are here.
    pub(super) fn read_set_aside(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        column: usize,
        row: usize,
    ) -> Flow {
        let entry = self.pages.block_hash(write.slot, row, column);
        let member = self.core.member_at(write.slot, column);
        let device = self.core.readable(member, write.slot);
        if !entry.is_some_and(|entry| entry.is_set_aside()) {
            // The block was written meanwhile, or the write that would have set it aside failed: its content
            // decides.
            let block = (write.stripe, column as u16, row as u32);
            let flow = self.end_logged_write(key, write, Ok(StripeReply::Done));
            if self.core.stop.stopping.is_none() {
                self.look_again(block, None);
            }
            return flow;
        }
        let Some(device) = device else { return self.still_set_aside(key, write, column, row) };
        write.stage = Stage::Repay;
        let offset = self.core.map.device_offset(self.core.shape.data_offset, write.slot, row * BLOCK);
        let read = IoOp::Read { offset, buf: self.core.pool.alloc(BLOCK) };
        self.core.submit_io(Owner::Op { key, item: 0 }, member, device, read);
        Flow::Wait
    }

    pub(super) fn set_aside_read(
        &mut self,
        key: usize,
        write: &mut LoggedWrite,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        let Work::Repay { column, row } = write.task.work else { unreachable!("a block is repaid") };
        let is_void = self.core.is_failed() || write.life != self.redo.lives();
        if is_void {
            return self.end_logged_write(key, write, Ok(StripeReply::Done));
        }
        let Ok(IoValue::Data(bytes)) = result else { return self.still_set_aside(key, write, column, row) };
        let entry = self.pages.store().hash(write.slot, row, ColumnIndex(column as u16));
        if !entry.was_set_aside_from(self.pages.log_hasher().hash(&bytes)) {
            // No other column can give it.
            self.damage.note(write.stripe, &[Missing { column, row, why: Why::Gone }]);
            return self.end_logged_write(key, write, Ok(StripeReply::Done));
        }
        // To coding the block has held zeroes until now.
        let offset = column * self.core.map.chunk + row * BLOCK;
        write.task.work = Work::Data { offset, data: bytes.freeze() };
        let flow = self.plan_logged(key, write);
        if flow == Flow::Finished { flow } else { self.advance_logged_write(key, write) }
    }

    fn still_set_aside(&mut self, key: usize, write: &mut LoggedWrite, column: usize, row: usize) -> Flow {
        self.damage.note(write.stripe, &[Missing { column, row, why: Why::SetAside }]);
        self.end_logged_write(key, write, Ok(StripeReply::Done))
    }

    /// Wakes the operations that wait for the block that this write has written again; they look at it again.
    pub(super) fn end_repay(&mut self, write: &mut LoggedWrite) {
        let Some(block) = write.repays.take() else { return };
        self.core.work.ready.extend(self.looks.end(block));
    }
}

impl Core {
    /// Whether a wanted block keeps new parity from being computed. A data column that counts as zeroes does
    /// not; a parity is never known to be zeroes.
    pub(super) fn keeps_from_coding(&self, block: &Missing) -> bool {
        !block.why.counts_as_zeroes() || block.column >= self.map.k
    }

    fn has_waited(&self, write: &LoggedWrite) -> bool {
        write.parity.unreadable_since.is_some_and(|since| self.now.nanos_since(since) >= PATIENCE_NS)
    }

    pub(super) fn try_again(&mut self, write: &mut LoggedWrite, until: Timestamp) -> Flow {
        if self.now >= until {
            write.stage = Stage::Room;
        }
        Flow::Wait
    }

    /// Tick: advances operations whose time to read again has come.
    pub(in crate::array) fn wake_patient(&mut self) {
        let now = self.now;
        let due = self.work.patient.extract_if(.., |(until, _)| *until <= now).map(|(_, key)| key);
        self.work.ready.extend(due);
    }
}
