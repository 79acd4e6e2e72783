//! One slot of a rebuild or of a scrub of a logged array: held still, fetched, and written or repaired.
//!
//! Every block that goes to a device under construction was verified or decoded from verified blocks. A scrub
//! knows by its checksum which block is wrong; without checksums it falls back on parity (`verify.rs`).

mod prove;

use crate::array::Core;
use crate::array::base::proofs::Proof;
use crate::array::blocks::{Missing, Why, runs};
use crate::array::client::fetch::{Blend, Fetch, FetchRules, Fetched, Ingredient};
use crate::array::mutation::{Mutation, is_off};
use crate::array::passes::rebuild::Target;
use crate::array::passes::slot_hold::{Held, SlotHold};
use crate::array::passes::verify::{Column, Repair};
use crate::array::{Array, Flow, Inflight, NoticeKind, NoticeLevel, Op, Owner};
use crate::block_io::{Buf, BufMut, IoFault, IoOp, IoValue};
use crate::codec::{BlockHasher, CodedColumns};
use crate::format::MemberState;
use crate::units::{BlockHash, ColumnIndex, ROW_BYTES, SlotIndex, Timestamp};
use std::ops::Range;

const BLOCK: usize = ROW_BYTES as usize;

pub(in crate::array) struct LoggedPass {
    hold: SlotHold,
    work: Work,
    stage: Stage,
    fetch: Fetch,
    writing: usize,
    /// When the slot is read again.
    not_before: Timestamp,
    /// When a block of the slot could not be read for the first time.
    unreadable_since: Option<Timestamp>,
    /// Counts of blocks that were bad, of those that are repaired, and of columns with blocks that cannot be
    /// had for now.
    bad: u64,
    repaired: u64,
    unread: Vec<usize>,
}

/// How long a rebuild reads a slot again where blocks cannot be read. After that the new device lacks them
/// until all others are built, and they are tried again (`Progress::lacking`).
const PATIENCE_NS: u64 = 5_000_000_000;

/// Time between two tries.
const RETRY_NS: u64 = 500_000_000;

/// How long a rebuild waits in total without building a slot whole. After that it reads each slot once.
const PATIENCE_TOTAL_NS: u64 = 60_000_000_000;

enum Work {
    Rebuild(Vec<Target>),
    /// Compares what a device got before an unclean stop (`walk/prove.rs`).
    Prove(Target, Proof),
    /// Builds blocks of the slot on a device that went into service without them.
    Build(Target),
    Scrub,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Hold,
    Prove,
    Fetch,
    /// Waits, with blocks to repair, while a loss is not recorded (E3).
    Gate,
    Write,
}

impl LoggedPass {
    /// Whether its writes must reach its devices.
    pub(in crate::array) fn is_rebuild(&self) -> bool {
        matches!(self.work, Work::Rebuild(_))
    }

    /// The slot, if it is being built and blocks of it could not be read: it is read again before it counts
    /// as lacking them.
    pub(in crate::array) fn unreadable_build(&self) -> Option<SlotIndex> {
        self.unreadable_since.filter(|_| self.is_rebuild()).map(|_| self.hold.slot())
    }

    /// Whether it waits for a lock, a checkpoint or a page, and has nothing in flight.
    pub(in crate::array) fn waits(&self) -> bool {
        self.stage == Stage::Hold && self.hold.waits()
    }
}

impl Array {
    pub(super) fn start_logged_rebuild(&mut self, slot: SlotIndex, targets: Vec<Target>) {
        self.start_logged_pass(slot, Work::Rebuild(targets));
    }

    pub(super) fn start_logged_scrub(&mut self, slot: SlotIndex) {
        self.start_logged_pass(slot, Work::Scrub);
    }

    /// Looks at the blocks that a device went into service without, and builds them.
    pub(in crate::array) fn start_build_of(&mut self, slot: SlotIndex, target: Target) {
        self.start_logged_pass(slot, Work::Build(target));
    }

    fn start_logged_pass(&mut self, slot: SlotIndex, work: Work) {
        let hold = self.new_hold(slot, &work);
        let is_look = matches!(work, Work::Build(_));
        let rules = FetchRules { background: true, is_look, ..FetchRules::default() };
        let pass = LoggedPass {
            hold,
            work,
            stage: Stage::Hold,
            fetch: Fetch::new(slot, rules),
            writing: 0,
            not_before: self.core.now,
            unreadable_since: None,
            bad: 0,
            repaired: 0,
            unread: Vec::new(),
        };
        let key = self.ops.insert(Op::LoggedPass(Box::new(pass)));
        self.core.work.ready.push_back(key);
    }

    fn new_hold(&self, slot: SlotIndex, work: &Work) -> SlotHold {
        let life = self.redo.lives();
        match work {
            Work::Scrub => SlotHold::new(slot, life),
            Work::Build(_) | Work::Prove(..) => SlotHold::to_build(slot, None, life),
            Work::Rebuild(targets) => {
                let since: Option<Vec<u64>> =
                    targets.iter().map(|target| self.core.needs_since(target)).collect();
                SlotHold::to_build(slot, since.and_then(|since| since.into_iter().min()), life)
            }
        }
    }

    pub(in crate::array) fn advance_logged_pass(&mut self, key: usize, pass: &mut LoggedPass) -> Flow {
        if pass.stage == Stage::Gate {
            return self.fetched_pass(key, pass);
        }
        if pass.stage != Stage::Hold {
            return Flow::Wait;
        }
        if self.core.is_failed() || !self.redo.is_serving() {
            return self.end_logged_pass(key, pass, false);
        }
        if self.core.now < pass.not_before {
            return Flow::Wait;
        }
        let held = self.hold_slot(key, &mut pass.hold);
        if matches!(pass.work, Work::Scrub) && !matches!(held, Held::Wait) {
            self.passes.note_unchecked_in(&self.core, pass.hold.slot());
        }
        let stripe = match held {
            Held::Wait => return Flow::Wait,
            Held::Empty => {
                self.forget_empty(pass);
                return self.end_logged_pass(key, pass, true);
            }
            Held::Unreadable => return self.skip_pass(key, pass),
            Held::Stripe(stripe) => stripe,
        };
        if let Work::Prove(target, _) = &pass.work {
            let target = *target;
            return self.read_to_prove(key, pass, target);
        }
        let rows = 0..self.core.map.chunk / BLOCK;
        let columns: Vec<usize> = match &pass.work {
            Work::Scrub => (0..self.core.map.width()).collect(),
            Work::Prove(..) => unreachable!("read as it is"),
            Work::Build(target) => vec![target.column],
            Work::Rebuild(targets) => {
                // A device that was only away for some time needs the data written since.
                let needs = |target: &&Target| {
                    self.core.needs_since(target).is_none_or(|since| self.is_missed(stripe, since))
                };
                let mut columns: Vec<usize> =
                    targets.iter().filter(needs).map(|target| target.column).collect();
                columns.sort_unstable();
                columns.dedup();
                columns
            }
        };
        if columns.is_empty() {
            return self.end_logged_pass(key, pass, true);
        }
        let mut wanted = 0;
        for column in columns {
            // A scrub of a degraded array verifies the members that are there.
            let slot = pass.hold.slot();
            if !pass.is_rebuild() && self.core.readable(self.core.member_at(slot, column), slot).is_none() {
                continue;
            }
            pass.fetch.want(column, rows.clone(), self.core.pool.alloc(self.core.map.chunk));
            wanted += 1;
        }
        // Equal hashes prove equal bytes only where nobody can make them collide; with a CRC the bytes are
        // compared too, below.
        let proves = self.pages.checksums() == Some(BlockHasher::Blake3);
        if matches!(pass.work, Work::Scrub)
            && proves
            && self.core.map.m > 0
            && wanted == self.core.map.width()
        {
            pass.fetch.blend(Blend {
                transform: self.core.shape.encoding.clone(),
                inputs: (0..self.core.map.k).map(Ingredient::Wanted).collect(),
                keeps: false,
            });
        }
        if wanted == 0 {
            return self.end_logged_pass(key, pass, true);
        }
        pass.stage = Stage::Fetch;
        match self.fetch(key, &mut pass.fetch) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.fetched_pass(key, pass),
        }
    }

    /// Ends a pass over a slot whose checksums cannot be read now (rule T3). A device under construction goes
    /// without its blocks for now, and in the end for good: once the checksums can be read, its content does
    /// not match them, and is decoded from others and repaired.
    fn skip_pass(&mut self, key: usize, pass: &mut LoggedPass) -> Flow {
        let slot = pass.hold.slot();
        match &mut pass.work {
            Work::Scrub => {
                if let Some(scrub) = self.passes.scrub_mut() {
                    scrub.note_errors(1);
                }
            }
            Work::Build(_) => {}
            Work::Prove(_, outcome) => *outcome = Proof::Unknown,
            Work::Rebuild(targets) => {
                // Others follow it, and all of them are tried again and again: only the first is reported.
                if self.core.builds_mut().all(|(_, progress)| progress.retried() == 0) {
                    let text = format!(
                        "slot {slot} was not built, as its checksums cannot be read for now: it is tried again, as are \
                         others like it"
                    );
                    self.core.notice(NoticeKind::SlotSkipped, NoticeLevel::Warning, None, text);
                }
                targets.iter().for_each(|target| self.slot_lacks(slot, target));
            }
        }
        self.end_logged_pass(key, pass, true)
    }

    pub(in crate::array) fn logged_pass_io(
        &mut self,
        key: usize,
        pass: &mut LoggedPass,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        if pass.stage == Stage::Prove {
            return self.prove_io(key, pass, &entry, result);
        }
        if pass.stage == Stage::Fetch {
            return match self.fetch_io(key, &mut pass.fetch, item, entry, result) {
                Fetched::Wait => Flow::Wait,
                Fetched::Done => self.fetched_pass(key, pass),
            };
        }
        pass.writing -= 1;
        let is_target = |target: &Target| target.device.id == entry.device;
        match (&pass.work, result) {
            (Work::Rebuild(targets), result) if targets.iter().any(is_target) => {
                if let Err(fault) = result {
                    self.write_fault(entry.member, entry.device, "write of the rebuild", fault);
                }
            }
            (_, result) => {
                let mended = self.mend_io(key, &mut pass.fetch, item, &entry, result);
                pass.writing += mended.begun;
                pass.repaired += mended.repaired;
                if let (Work::Scrub, Some(scrub)) = (&pass.work, self.passes.scrub_mut()) {
                    scrub.note_repaired(mended.repaired);
                }
            }
        }
        if pass.writing > 0 {
            return Flow::Wait;
        }
        if !self.core.is_failed() {
            self.forget_built(pass);
        }
        self.end_logged_pass(key, pass, !self.core.is_failed())
    }

    /// Takes the end of a job that has verified what was read.
    pub(in crate::array) fn logged_pass_coded(
        &mut self,
        key: usize,
        pass: &mut LoggedPass,
        coded: CodedColumns,
    ) -> Flow {
        if pass.stage == Stage::Prove {
            return self.prove_hashed(key, pass, &coded);
        }
        match self.fetch_coded(key, &mut pass.fetch, coded) {
            Fetched::Wait => Flow::Wait,
            Fetched::Done => self.fetched_pass(key, pass),
        }
    }

    fn fetched_pass(&mut self, key: usize, pass: &mut LoggedPass) -> Flow {
        if self.core.is_failed() || !self.redo.is_serving() {
            return self.end_logged_pass(key, pass, false);
        }
        self.tell_log();
        if pass.fetch.repair_count() > 0 && !self.redo.may_acknowledge() {
            pass.stage = Stage::Gate;
            self.core.work.gated.push(key);
            return Flow::Wait;
        }
        pass.stage = Stage::Write;
        match pass.work {
            Work::Rebuild(_) => self.write_pass(key, pass),
            Work::Build(_) => self.build_pass(key, pass),
            Work::Scrub => self.judge_pass(key, pass),
            Work::Prove(..) => unreachable!("it fetches nothing"),
        }
    }

    /// Writes the fetched columns to the devices under construction.
    fn write_pass(&mut self, key: usize, pass: &mut LoggedPass) -> Flow {
        let slot = pass.hold.slot();
        if pass.fetch.missing().iter().any(|block| block.why == Why::Unreadable)
            && self.waits_for_slot(key, pass)
        {
            return Flow::Wait;
        }
        let Work::Rebuild(targets) = &mut pass.work else { unreachable!("a rebuild") };
        if !pass.fetch.missing().is_empty() && self.pages.checksums().is_none() {
            // Nothing would distinguish these blocks from good ones later.
            let reason = format!("slot {slot} cannot be decoded: too many of its chunks cannot be read");
            for target in std::mem::take(targets) {
                self.fault_device(
                    target.device.member,
                    target.device.id,
                    MemberState::Faulted,
                    reason.clone(),
                );
            }
            return self.end_logged_pass(key, pass, true);
        }
        let targets = std::mem::take(targets);
        let missing = pass.fetch.take_missing();
        match self.pages.stripes().stripe_at(slot).filter(|_| !missing.is_empty()) {
            // Clients read the other blocks of these rows, not those that are missing here.
            Some(stripe) => {
                self.note_missing(stripe, slot, &pass.fetch.missing_data(&missing, self.core.map.width()));
            }
            None => self.passes.restore_patience(),
        }
        for target in &targets {
            let lacks = |block: &Missing| block.column == target.column && block.why == Why::Unreadable;
            if missing.iter().any(lacks) {
                self.slot_lacks(slot, target);
            } else if pass.fetch.wants(target.column) {
                self.damage.forget_lacking(&self.core, slot, target.device.member, target.device.id);
            }
            // A device that needs no data written since it left goes on without what it lacked then.
        }
        let own = |target: &Target| pass.fetch.rows_from_unbuilt(target.column, target.device.id);
        let own: Vec<Vec<usize>> = targets.iter().map(own).collect();
        let columns: Vec<(usize, Buf)> =
            pass.fetch.take().into_iter().map(|(column, _, buf)| (column, buf.freeze())).collect();
        pass.writing = self.send_repairs(key, &mut pass.fetch);
        for (target, own) in targets.iter().zip(own) {
            let Some((_, buf)) = columns.iter().find(|(column, _)| *column == target.column) else {
                continue;
            };
            if self.core.find_device(target.device.id).is_none() {
                continue;
            }
            // Blocks that cannot be had are left as they are: the device may hold their only copy (T1). So
            // are blocks that it has given itself.
            let has = |row: usize| {
                is_off(Mutation::RebuildWritesWhatItLacks)
                    || !own.contains(&row)
                        && !missing.iter().any(|block| (block.column, block.row) == (target.column, row))
            };
            for rows in runs(0..buf.len() / BLOCK, has) {
                let offset =
                    self.core.map.device_offset(self.core.shape.data_offset, slot, rows.start * BLOCK);
                let buf = buf.slice(rows.start * BLOCK..rows.end * BLOCK);
                let op = IoOp::Write { offset, buf, fua: false };
                self.core.submit_io(Owner::Op { key, item: 0 }, target.device.member, target.device.id, op);
                pass.writing += 1;
            }
        }
        pass.work = Work::Rebuild(targets);
        if pass.writing > 0 { Flow::Wait } else { self.end_logged_pass(key, pass, true) }
    }

    /// Handles a slot with blocks that cannot be read. True: the slot is released, to be read again later.
    fn waits_for_slot(&mut self, key: usize, pass: &mut LoggedPass) -> bool {
        let since = *pass.unreadable_since.get_or_insert(self.core.now);
        let is_over = self.core.now.nanos_since(since) >= PATIENCE_NS
            || self.passes.patience_spent_ns() >= PATIENCE_TOTAL_NS
            || self.core.stop.hurried;
        if is_over {
            return false;
        }
        self.passes.spend_patience(RETRY_NS);
        let slot = pass.hold.slot();
        self.release_slot(key, &mut pass.hold);
        pass.hold = self.new_hold(slot, &pass.work);
        pass.fetch = Fetch::new(slot, FetchRules { background: true, ..FetchRules::default() });
        pass.stage = Stage::Hold;
        pass.not_before = Timestamp(self.core.now.0 + RETRY_NS);
        self.core.work.patient.push((pass.not_before, key));
        true
    }

    /// Repairs the blocks that the device lacks.
    fn build_pass(&mut self, key: usize, pass: &mut LoggedPass) -> Flow {
        if let Work::Build(Target { column, .. }) = pass.work {
            // Wrong blocks that are found on others are left to a scrub.
            pass.fetch.repair_only(|_, of| of == column);
        }
        self.core.note_found(pass);
        pass.writing = self.send_repairs(key, &mut pass.fetch);
        if pass.writing > 0 {
            return Flow::Wait;
        }
        self.forget_built(pass);
        self.end_logged_pass(key, pass, true)
    }

    /// Takes slots off the list of those that devices in service lack, because a pass has read them, and
    /// repaired what was bad.
    fn forget_built(&mut self, pass: &LoggedPass) {
        if pass.repaired < pass.bad || pass.is_rebuild() {
            return;
        }
        let slot = pass.hold.slot();
        for column in 0..self.core.map.width() {
            let member = self.core.member_at(slot, column);
            let was_read = match &pass.work {
                Work::Build(target) => target.column == column,
                _ => true,
            };
            // A block that was decoded because its member could not be read for a shortage may not be there.
            if was_read
                && !pass.unread.contains(&column)
                && !pass.fetch.short_columns().contains(&column)
                && self.damage.may_lack_slot(&self.core, member, slot)
                && let Some(device) = self.core.readable(member, slot)
            {
                self.damage.forget_lacking(&self.core, slot, member, device);
            }
        }
    }

    /// Takes a slot that holds no data off that list, since nothing of it is needed.
    fn forget_empty(&mut self, pass: &mut LoggedPass) {
        let slot = pass.hold.slot();
        match &mut pass.work {
            // A slot that a device lacks and that a crash may bring back is left to a look.
            Work::Scrub => self.note_slot_not_needed(slot),
            Work::Prove(_, outcome) => *outcome = Proof::Holds,
            Work::Build(target) => {
                self.damage.forget_lacking(&self.core, slot, target.device.member, target.device.id)
            }
            Work::Rebuild(targets) => {
                for target in targets
                    .iter()
                    .filter(|target| self.core.needs_since(target).is_none())
                    .collect::<Vec<_>>()
                {
                    self.damage.forget_lacking(&self.core, slot, target.device.member, target.device.id);
                }
            }
        }
    }

    /// Counts wrong blocks and repairs them; then data must agree with parity.
    fn judge_pass(&mut self, key: usize, pass: &mut LoggedPass) -> Flow {
        let slot = pass.hold.slot();
        if self.reads_again(slot, &pass.fetch) {
            return self.end_logged_pass(key, pass, true);
        }
        // Members may have left before they gave their blocks.
        self.passes.note_unchecked_in(&self.core, slot);
        // A member that has left service meanwhile needs no repair.
        pass.fetch.repair_only(|device, _| self.core.find_device(device).is_some());
        self.core.note_found(pass);
        let repairs = pass.bad;
        let lost = pass.fetch.take_missing();
        let unread = self.given_up_unread(slot, &pass.fetch);
        if let Some(scrub) = self.passes.scrub_mut() {
            scrub.note_errors(repairs + (lost.len() + unread.len()) as u64);
        }
        let all = [pass.fetch.missing_data(&lost, self.core.map.k), unread].concat();
        if !all.is_empty()
            && let Some(stripe) = self.pages.stripes().stripe_at(slot)
        {
            self.note_missing(stripe, slot, &all);
        }
        let encoded = pass.fetch.take_blended();
        let columns = pass.fetch.take();
        self.forget_verified(slot, &columns, &all);
        let present: Vec<(usize, &[u8])> =
            columns.iter().map(|(column, _, buf)| (*column, &buf[..])).collect();
        let agree = !lost.is_empty()
            || present.len() <= self.core.map.k
            || encoded.map_or_else(
                || self.core.shape.codec.consistent(&present),
                |encoded| self.is_parity(slot, &encoded.output_hashes),
            );
        if !agree && self.pages.checksums().is_none() {
            return self.judge_by_parity(key, pass, columns);
        }
        if !agree {
            if let Some(scrub) = self.passes.scrub_mut() {
                scrub.note_errors(1);
            }
            let text = format!(
                "scrub: every block of slot {slot} matches its checksum, but parity does not match data; nothing was \
                 changed. Write the stripe again, and report this: it should not be possible"
            );
            self.core.notice(NoticeKind::ScrubUnresolved, NoticeLevel::Error, None, text);
        }
        pass.writing = self.send_repairs(key, &mut pass.fetch);
        if pass.writing > 0 {
            return Flow::Wait;
        }
        self.forget_built(pass);
        self.end_logged_pass(key, pass, true)
    }

    /// Whether the scrub reads the slot again later, because members could not be read for a shortage of this
    /// host: the slot is judged only then. Where that was tried for long enough, the scrub reports that it
    /// has not checked these members.
    fn reads_again(&mut self, slot: SlotIndex, fetch: &Fetch) -> bool {
        if fetch.short_columns().is_empty() {
            return false;
        }
        let members = fetch.short_columns().iter().map(|&column| self.core.member_at(slot, column)).collect();
        let (turns, now) = (self.scrub_turns(), self.core.now);
        let scrub = self.passes.scrub_mut();
        scrub.is_some_and(|scrub| scrub.was_short(slot, members, turns, now))
    }

    /// Blocks of data whose entries call them set aside or lost, and that the fetch did not ask for because
    /// their members are out: they are missing although their rows are whole otherwise.
    fn given_up_unread(&self, slot: SlotIndex, fetch: &Fetch) -> Vec<Missing> {
        let is_out = |column: &usize| self.core.readable(self.core.member_at(slot, *column), slot).is_none();
        let known = fetch.missing_data(&[], self.core.map.k);
        let mut all = Vec::new();
        for column in (0..self.core.map.k).filter(is_out) {
            for row in 0..self.core.map.chunk / BLOCK {
                let why = match self.pages.block_hash(slot, row, column) {
                    Some(hash) if hash.is_set_aside() => Why::SetAside,
                    Some(BlockHash::LOST) => Why::Lost,
                    _ => continue,
                };
                if known.iter().all(|block| (block.column, block.row) != (column, row)) {
                    all.push(Missing { column, row, why });
                }
            }
        }
        all
    }

    /// Takes blocks that were read, or decoded, off the list of damage, whatever was known of them. A block
    /// of a member that is out, in a row that is whole otherwise, becomes due for a look.
    fn forget_verified(
        &mut self,
        slot: SlotIndex,
        columns: &[(usize, Range<usize>, BufMut)],
        lost: &[Missing],
    ) {
        let Some(stripe) = self.pages.stripes().stripe_at(slot).filter(|_| !self.damage.is_empty()) else {
            return;
        };
        let is_lost =
            |column: usize, row: usize| lost.iter().any(|block| (block.column, block.row) == (column, row));
        let is_whole = |row: usize| lost.iter().all(|block| block.row != row);
        let of_stripe: Vec<_> = self.damage.of_stripe(stripe).map(|(block, _)| block).collect();
        for block in of_stripe {
            let (column, row) = (usize::from(block.1), block.2 as usize);
            let was_read = columns.iter().any(|(read, rows, _)| *read == column && rows.contains(&row));
            if was_read && !is_lost(column, row) {
                self.damage.forget(block);
            } else if !was_read && is_whole(row) {
                self.damage.look_at(block);
            }
        }
    }

    /// Whether these hashes of parities, computed from data that was found good, are the expected ones,
    /// column after column. None of these parities is lost, so each was read, or decoded, with its expected
    /// hash.
    fn is_parity(&self, slot: SlotIndex, hashes: &[BlockHash]) -> bool {
        let rows = 0..self.core.map.chunk / BLOCK;
        let parities = (self.core.map.k..self.core.map.width()).map(|column| ColumnIndex(column as u16));
        let expected = parities.flat_map(|column| self.pages.store().hashes(slot, rows.clone(), column));
        expected.eq(hashes.iter().copied())
    }

    /// Without checksums: the one column without which a row is consistent is the wrong one.
    fn judge_by_parity(
        &mut self,
        key: usize,
        pass: &mut LoggedPass,
        columns: Vec<(usize, Range<usize>, BufMut)>,
    ) -> Flow {
        let slot = pass.hold.slot();
        let columns = columns.into_iter().filter_map(|(column, _, buf)| {
            let member = self.core.member_at(slot, column);
            Some(Column { column, member, device: self.core.readable(member, slot)?, buf })
        });
        let columns: Vec<Column> = columns.collect();
        for Repair { member, device, start, buf } in self.passes.scrub_columns(&mut self.core, slot, &columns)
        {
            if self.core.find_device(device).is_none() {
                continue;
            }
            self.core.send_repair(key, &mut pass.fetch, member, device, start / BLOCK, buf);
            pass.writing += 1;
        }
        if pass.writing > 0 { Flow::Wait } else { self.end_logged_pass(key, pass, true) }
    }

    /// `complete`: the slot is done; otherwise it is started again.
    pub(super) fn end_logged_pass(&mut self, key: usize, pass: &mut LoggedPass, complete: bool) -> Flow {
        let slot = pass.hold.slot();
        self.release_slot(key, &mut pass.hold);
        self.core.work.patient.retain(|(_, other)| *other != key);
        match &pass.work {
            Work::Rebuild(targets) => {
                self.core.built_slot(slot, targets, complete);
                self.passes.ended();
            }
            Work::Build(_) => self.damage.looked_at_lacking(),
            Work::Prove(target, outcome) => {
                self.core.end_proof(slot, target, *outcome);
                self.passes.ended();
            }
            Work::Scrub => self.passes.verified(self.core.now, slot, complete),
        }
        Flow::Finished
    }
}

impl Core {
    /// Notes what a pass that repairs has found.
    fn note_found(&mut self, pass: &mut LoggedPass) {
        pass.bad = pass.fetch.repair_count() as u64;
        let unread = pass.fetch.missing().iter().filter(|block| block.why == Why::Unreadable);
        pass.unread = unread.map(|block| block.column).collect();
    }
}
