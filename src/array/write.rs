//! Writes and zeroing: lock the rows, read what new parity needs, compute, write data and parity, acknowledge.
//!
//! From the moment the first member is written, the operation finishes or is parked: it never lets go of rows
//! that may be torn while it still knows their new content. Parked operations have been answered with an error;
//! their client may find either the old or the new bytes, every other block of the rows stays right.

use super::lock::LockMode;
use super::plan::{self, Band, ParityPath};
use super::{Array, Flow, Inflight, Op, Owner, PieceId, SlotReply, ZERO_RUN_SLOTS};
use super::{ClientError, NoticeLevel};
use crate::block_io::{Buf, BufMut, DeviceId, IoFault, IoFaultKind, IoOp, IoValue};
use crate::codec;
use crate::format::{MemberSet, MemberState};
use crate::units::{ByteOffset, ColumnIndex, MemberIndex, SlotIndex};
use std::ops::Range;

pub(super) struct WriteOp {
    /// None once the client has its answer.
    piece: Option<PieceId>,
    kind: Kind,
    stage: Stage,
    /// The slots this operation has locked so far.
    locked: Vec<SlotIndex>,
    /// Reads for new parity.
    plans: Vec<BandPlan>,
    reads: Vec<OldBytes>,
    pending: usize,
    suspect: MemberSet,
    bad: MemberSet,
    faulted: bool,
    /// What goes to the members.
    items: Vec<Item>,
    no_space: bool,
}

enum Kind {
    Data { slot: SlotIndex, offset: usize, data: Buf, fua: bool },
    Zero { first: SlotIndex, count: u64, may_unmap: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Lock,
    /// Locked; reads for parity come next.
    Plan,
    Read,
    /// Parity is computed; waits for the gate.
    Gate,
    Write,
    /// Written; waits until it may be acknowledged.
    Acknowledge,
    /// Answered with an error; still to be written.
    Parked,
}

struct BandPlan {
    band: Band,
    path: ParityPath,
}

/// Bytes of one column in the rows of one band, as they are on the member.
struct OldBytes {
    band: usize,
    column: usize,
    member: MemberIndex,
    buf: Option<BufMut>,
}

/// One write to one device.
struct Item {
    member: MemberIndex,
    device: DeviceId,
    offset: ByteOffset,
    payload: Payload,
    retried: bool,
    state: ItemState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ItemState {
    Todo,
    InFlight,
    Done,
}

#[derive(Clone)]
enum Payload {
    Data { buf: Buf, fua: bool },
    Zero { len: u64, may_unmap: bool },
}

/// Zeroes for a device that cannot punch holes are written in pieces of this many bytes.
const ZERO_WRITE_BYTES: usize = 1 << 20;

impl Array {
    pub(super) fn start_write(
        &mut self,
        piece: PieceId,
        slot: SlotIndex,
        offset: usize,
        data: Buf,
        fua: bool,
    ) {
        assert!(
            !data.is_empty() && offset + data.len() <= self.map.stripe_bytes(),
            "a write beyond its slot"
        );
        self.start_write_op(piece, Kind::Data { slot, offset, data, fua });
    }

    pub(super) fn start_zero(&mut self, piece: PieceId, first: SlotIndex, count: u64, may_unmap: bool) {
        assert!(
            (1..=ZERO_RUN_SLOTS).contains(&count) && first.0 + count <= self.map.slots,
            "a zero run out of bounds"
        );
        self.start_write_op(piece, Kind::Zero { first, count, may_unmap });
    }

    fn start_write_op(&mut self, piece: PieceId, kind: Kind) {
        self.client_ops += 1;
        self.write_ops += 1;
        let mut write = Box::new(WriteOp {
            piece: Some(piece),
            kind,
            stage: Stage::Lock,
            locked: Vec::new(),
            plans: Vec::new(),
            reads: Vec::new(),
            pending: 0,
            suspect: MemberSet::default(),
            bad: MemberSet::default(),
            faulted: false,
            items: Vec::new(),
            no_space: false,
        });
        let key = self.ops.insert(Op::Busy);
        let flow = self.lock_write(key, &mut write);
        self.put_back(key, Op::Write(write), flow);
    }

    /// Takes the locks one slot after the other, ascending, so that two operations never wait for each other.
    fn lock_write(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        loop {
            let (slot, rows) = match &write.kind {
                Kind::Data { slot, .. } if !write.locked.is_empty() => {
                    debug_assert_eq!(*slot, write.locked[0]);
                    break;
                }
                Kind::Data { slot, offset, data, .. } => {
                    let bands = plan::bands(&self.map, *offset, data.len());
                    let low = bands.first().map_or(0, |band| band.rows.start);
                    let high = bands.last().map_or(0, |band| band.rows.end);
                    (*slot, low..high)
                }
                Kind::Zero { count, .. } if write.locked.len() as u64 == *count => break,
                Kind::Zero { first, .. } => {
                    (SlotIndex(first.0 + write.locked.len() as u64), 0..self.map.chunk)
                }
            };
            if self.slot_is_parked(slot) {
                return self.refuse_write(key, write, ClientError::NoSpace);
            }
            write.locked.push(slot);
            if !self.locks.acquire(slot, rows, LockMode::Exclusive, key) {
                return Flow::Wait;
            }
        }
        write.stage = Stage::Plan;
        self.plan_write(key, write)
    }

    /// Whether a parked operation owns a part of `slot`.
    pub(super) fn slot_is_parked(&self, slot: SlotIndex) -> bool {
        self.parked.iter().any(|&key| match self.ops.get(key) {
            Some(Op::Write(parked)) => parked.locked.contains(&slot),
            _ => false,
        })
    }

    /// A lock has been granted, a gate has opened, or the array has failed meanwhile.
    pub(super) fn advance_write(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        match write.stage {
            Stage::Lock if self.is_failed() => self.refuse_write(key, write, ClientError::Io),
            Stage::Lock if write.no_space => self.refuse_write(key, write, ClientError::NoSpace),
            Stage::Lock => self.lock_write(key, write),
            Stage::Gate if self.is_failed() => self.refuse_write(key, write, ClientError::Io),
            Stage::Gate => self.write_members(key, write),
            Stage::Acknowledge => self.acknowledge(key, write),
            Stage::Parked => self.write_members(key, write),
            Stage::Plan | Stage::Read | Stage::Write => Flow::Wait,
        }
    }

    /// Decides per band how parity comes about, and reads what that takes.
    fn plan_write(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        write.plans.clear();
        write.reads.clear();
        write.faulted = false;
        let Kind::Data { slot, offset, data, .. } = &write.kind else {
            return self.enter_gate(key, write);
        };
        let (slot, offset, len) = (*slot, *offset, data.len());
        let trusted = self.passes.parity_is_trusted(slot);
        let parities = self.written_parities(slot);
        let readable = |column: usize| {
            let member = self.map.member_of(slot, ColumnIndex(column as u16));
            !write.bad.contains(member) && self.readable(member, slot).is_some()
        };
        for band in plan::bands(&self.map, offset, len) {
            let path = plan::path(&self.map, &band, readable, &parities, trusted);
            write.plans.push(BandPlan { band, path });
        }
        for (at, BandPlan { band, path }) in write.plans.iter().enumerate() {
            let columns: Vec<usize> = match path {
                ParityPath::Direct => Vec::new(),
                ParityPath::ReadModifyWrite => band.columns.clone().chain(parities.iter().copied()).collect(),
                ParityPath::ReconstructWrite => {
                    (0..self.map.k).filter(|c| !band.columns.contains(c)).collect()
                }
                ParityPath::DecodeWrite(sources) => sources.clone(),
                ParityPath::Impossible => {
                    self.notice_unreadable(slot);
                    return self.refuse_write(key, write, ClientError::Io);
                }
            };
            for column in columns {
                let member = self.map.member_of(slot, ColumnIndex(column as u16));
                write.reads.push(OldBytes { band: at, column, member, buf: None });
            }
        }
        if write.reads.is_empty() {
            self.compute_parity(write);
            return self.enter_gate(key, write);
        }
        write.stage = Stage::Read;
        for (item, old) in write.reads.iter().enumerate() {
            let rows = &write.plans[old.band].band.rows;
            let Some(device) = self.readable(old.member, slot) else {
                unreachable!("planned from readable columns")
            };
            let offset = self.map.device_offset(self.data_offset, slot, rows.start);
            let buf = self.pool.alloc(rows.len());
            self.submit_io(Owner::Op { key, item }, old.member, device, IoOp::Read { offset, buf });
            write.pending += 1;
        }
        Flow::Wait
    }

    /// Parity columns of `slot` that some device will take.
    fn written_parities(&self, slot: SlotIndex) -> Vec<usize> {
        (self.map.k..self.map.width())
            .filter(|&column| {
                let member = self.map.member_of(slot, ColumnIndex(column as u16));
                self.targets(member, slot).next().is_some()
            })
            .collect()
    }

    pub(super) fn write_io(
        &mut self,
        key: usize,
        write: &mut WriteOp,
        item: usize,
        entry: Inflight,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        write.pending -= 1;
        if write.stage == Stage::Read {
            match result {
                Ok(IoValue::Data(buf)) => write.reads[item].buf = Some(buf),
                Ok(_) => unreachable!("a read yields data"),
                Err(fault) => {
                    write.faulted = true;
                    if write.suspect.contains(entry.member) {
                        write.bad.insert(entry.member);
                    }
                    write.suspect.insert(entry.member);
                    self.read_fault(entry.member, entry.device, fault);
                }
            }
            if write.pending > 0 {
                return Flow::Wait;
            }
            if self.is_failed() {
                return self.refuse_write(key, write, ClientError::Io);
            }
            if write.faulted {
                return self.plan_write(key, write);
            }
            self.compute_parity(write);
            return self.enter_gate(key, write);
        }
        match result {
            Ok(_) => write.items[item].state = ItemState::Done,
            Err(fault) => self.write_item_failed(key, write, item, fault),
        }
        if write.pending > 0 { Flow::Wait } else { self.members_written(key, write) }
    }

    /// New parity of every band, and with it everything that goes to the members.
    fn compute_parity(&mut self, write: &mut WriteOp) {
        let Kind::Data { slot, offset, data, fua } = &write.kind else { return };
        let (slot, fua) = (*slot, *fua);
        let new_bytes = |column: usize, rows: &Range<usize>| {
            let start = column * self.map.chunk + rows.start - offset;
            &data[start..start + rows.len()]
        };
        let parities = self.written_parities(slot);
        let mut columns: Vec<(usize, usize, Buf)> = Vec::with_capacity(self.map.width());
        for part in self.map.columns(*offset, data.len()) {
            let column = usize::from(part.column.0);
            let start = column * self.map.chunk + part.range.start - offset;
            columns.push((column, part.range.start, data.slice(start..start + part.range.len())));
        }
        let (plans, reads) = (&write.plans, &mut write.reads);
        // One buffer for each parity and run of adjacent bands, so that a parity chunk is one write.
        let mut at = 0;
        while at < plans.len() && !parities.is_empty() {
            let run_end = (at + 1..plans.len())
                .find(|&next| plans[next - 1].band.rows.end != plans[next].band.rows.start)
                .unwrap_or(plans.len());
            let rows = plans[at].band.rows.start..plans[run_end - 1].band.rows.end;
            let mut rest: Vec<BufMut> = parities.iter().map(|_| self.pool.alloc(rows.len())).collect();
            let mut done: Vec<Option<BufMut>> = parities.iter().map(|_| None).collect();
            for (band_at, plan) in plans.iter().enumerate().take(run_end).skip(at) {
                let len = plan.band.rows.len();
                let mut current: Vec<BufMut> = rest
                    .iter_mut()
                    .map(|buf| {
                        let tail = buf.split_off(len);
                        std::mem::replace(buf, tail)
                    })
                    .collect();
                let mut targets: Vec<(usize, &mut [u8])> = parities
                    .iter()
                    .zip(&mut current)
                    .map(|(p, buf)| (p - self.map.k, &mut buf[..]))
                    .collect();
                band_parity(&self.codec, plan, band_at, reads, new_bytes, &mut targets);
                for (whole, piece) in done.iter_mut().zip(current) {
                    match whole {
                        None => *whole = Some(piece),
                        Some(whole) => whole.unsplit(piece),
                    }
                }
            }
            for (parity, buf) in parities.iter().zip(done) {
                if let Some(buf) = buf {
                    columns.push((*parity, rows.start, buf.freeze()));
                }
            }
            at = run_end;
        }
        write.reads.clear();
        for (column, start, buf) in columns {
            let member = self.map.member_of(slot, ColumnIndex(column as u16));
            for device in self.targets(member, slot) {
                let offset = self.map.device_offset(self.data_offset, slot, start);
                let payload = Payload::Data { buf: buf.clone(), fua };
                write.items.push(Item {
                    member,
                    device,
                    offset,
                    payload,
                    retried: false,
                    state: ItemState::Todo,
                });
            }
        }
    }

    /// Items of a zero run: on each device one operation over the contiguous chunks of the slots.
    fn zero_items(&self, first: SlotIndex, count: u64, may_unmap: bool) -> Vec<Item> {
        let mut items = Vec::new();
        for member in (0..self.map.width()).map(|at| MemberIndex(at as u16)) {
            // A device being built takes the slots of the run that are built on it.
            let mut runs: Vec<(DeviceId, SlotIndex, u64)> = Vec::with_capacity(2);
            for slot in (first.0..first.0 + count).map(SlotIndex) {
                for device in self.targets(member, slot) {
                    let run = runs
                        .iter_mut()
                        .find(|(id, start, slots)| *id == device && start.0 + *slots == slot.0);
                    match run {
                        Some((_, _, slots)) => *slots += 1,
                        None => runs.push((device, slot, 1)),
                    }
                }
            }
            for (device, start, slots) in runs {
                items.push(Item {
                    member,
                    device,
                    offset: self.map.device_offset(self.data_offset, start, 0),
                    payload: Payload::Zero { len: slots * self.map.chunk as u64, may_unmap },
                    retried: false,
                    state: ItemState::Todo,
                });
            }
        }
        items
    }

    fn enter_gate(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        if self.is_failed() {
            return self.refuse_write(key, write, ClientError::Io);
        }
        write.stage = Stage::Gate;
        self.write_members(key, write)
    }

    /// Sends every item that is not done, once the array is marked dirty and all losses are recorded.
    fn write_members(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        self.last_write = self.now;
        if !self.writes_allowed() {
            self.gated.push(key);
            return Flow::Wait;
        }
        if let (Kind::Zero { first, count, may_unmap }, true) = (&write.kind, write.items.is_empty()) {
            write.items = self.zero_items(*first, *count, *may_unmap);
        }
        if write.stage == Stage::Gate {
            write.stage = Stage::Write;
        }
        for item in 0..write.items.len() {
            self.send_item(key, write, item);
        }
        if write.pending > 0 { Flow::Wait } else { self.members_written(key, write) }
    }

    /// Sends one item to its device; if that left service meanwhile the item is void: the member is recorded as lost.
    fn send_item(&mut self, key: usize, write: &mut WriteOp, item: usize) {
        let entry = &mut write.items[item];
        if entry.state != ItemState::Todo {
            return;
        }
        if self.find_device(entry.device).is_none() {
            if !self.may_return(entry.member) {
                entry.state = ItemState::Done;
            }
            return;
        }
        let op = match &entry.payload {
            Payload::Data { buf, fua } => IoOp::Write { offset: entry.offset, buf: buf.clone(), fua: *fua },
            Payload::Zero { len, may_unmap } => {
                IoOp::Zero { offset: entry.offset, len: *len, may_unmap: *may_unmap }
            }
        };
        entry.state = ItemState::InFlight;
        write.pending += 1;
        let (member, device) = (entry.member, entry.device);
        self.submit_io(Owner::Op { key, item }, member, device, op);
    }

    /// Whether a member that is out may come back as current, without a rebuild: only while the array has failed.
    fn may_return(&self, member: MemberIndex) -> bool {
        self.is_failed() && self.returnable.contains(member)
    }

    fn write_item_failed(&mut self, key: usize, write: &mut WriteOp, item: usize, fault: IoFault) {
        let entry = &mut write.items[item];
        entry.state = ItemState::Todo;
        match (&entry.payload, fault.kind) {
            (_, IoFaultKind::NoSpace) => {
                if !write.no_space {
                    let text = format!(
                        "member {} has no space left for a write ({fault}): make room on its filesystem; the write is \
                         retried until it succeeds, its client got ENOSPC",
                        entry.member
                    );
                    let member = entry.member;
                    write.no_space = true;
                    self.notice(NoticeLevel::Error, Some(member), text);
                }
            }
            (Payload::Zero { len, .. }, IoFaultKind::Unsupported) => {
                // Zeroes are written out; the item becomes the first piece and the others follow.
                let (member, device, start, len) = (entry.member, entry.device, entry.offset, *len);
                if let Some(device) = self.device_mut(member, device) {
                    device.cannot_zero = true;
                }
                let zeroes = self.pool.alloc_zeroed(ZERO_WRITE_BYTES.min(len as usize)).freeze();
                entry.state = ItemState::Done;
                let mut at = 0;
                while at < len {
                    let piece = (len - at).min(zeroes.len() as u64);
                    let payload = Payload::Data { buf: zeroes.slice(0..piece as usize), fua: false };
                    let offset = start.plus(at);
                    write.items.push(Item {
                        member,
                        device,
                        offset,
                        payload,
                        retried: false,
                        state: ItemState::Todo,
                    });
                    self.send_item(key, write, write.items.len() - 1);
                    at += piece;
                }
            }
            (_, IoFaultKind::Medium) if !entry.retried => {
                entry.retried = true;
                self.send_item(key, write, item);
            }
            _ => {
                let (member, device) = (entry.member, entry.device);
                self.write_fault(member, device, "write", fault);
                if !self.may_return(member) {
                    write.items[item].state = ItemState::Done;
                }
            }
        }
    }

    /// Nothing is in flight any more.
    fn members_written(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        let failed = self.is_failed();
        for item in &mut write.items {
            // Items for devices that left service while the array lives on are void.
            if item.state == ItemState::Todo && !failed && self.find_device(item.device).is_none() {
                item.state = ItemState::Done;
            }
        }
        let complete = write.items.iter().all(|item| item.state == ItemState::Done);
        if complete && !failed {
            self.parked.retain(|&parked| parked != key);
            write.stage = Stage::Acknowledge;
            return self.acknowledge(key, write);
        }
        if write.stage != Stage::Parked {
            write.stage = Stage::Parked;
            self.parked.push(key);
            let error = if failed { ClientError::Io } else { ClientError::NoSpace };
            self.answer_write(write, Err(error));
            for slot in write.locked.clone() {
                for waiter in self.locks.waiters(slot) {
                    self.refuse_waiter(waiter);
                }
            }
        }
        Flow::Wait
    }

    /// Whoever waits behind a parked operation would wait for a person; it gets an error instead.
    fn refuse_waiter(&mut self, key: usize) {
        match self.ops.get_mut(key) {
            Some(Op::Write(waiting)) => waiting.no_space = true,
            Some(Op::Read(waiting)) => waiting.refuse(),
            _ => return,
        }
        self.ready.push_back(key);
    }

    fn acknowledge(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        if write.piece.is_some() {
            if self.is_failed() {
                self.answer_write(write, Err(ClientError::Io));
            } else if !self.acknowledgements_allowed() {
                self.unacknowledged.push(key);
                return Flow::Wait;
            } else {
                self.answer_write(write, Ok(SlotReply::Done));
            }
        }
        self.end_write(key, write)
    }

    /// Ends a write that has not touched any member.
    fn refuse_write(&mut self, key: usize, write: &mut WriteOp, error: ClientError) -> Flow {
        debug_assert!(write.items.iter().all(|item| item.state == ItemState::Todo));
        self.answer_write(write, Err(error));
        self.end_write(key, write)
    }

    fn answer_write(&mut self, write: &mut WriteOp, result: Result<SlotReply, ClientError>) {
        if let Some(piece) = write.piece.take() {
            self.client_ops -= 1;
            self.done(piece, result);
        }
    }

    fn end_write(&mut self, key: usize, write: &mut WriteOp) -> Flow {
        for slot in std::mem::take(&mut write.locked) {
            self.unlock(slot, key);
        }
        self.write_ops -= 1;
        self.last_write = self.now;
        Flow::Finished
    }

    /// Tries parked writes again: space may have been made, members may have come back.
    pub(super) fn retry_parked(&mut self) {
        if self.parked.is_empty()
            || self.is_failed()
            || self.stopping.is_some()
            || self.now.nanos_since(self.last_parked_retry) < RETRY_PARKED_NS
        {
            return;
        }
        self.last_parked_retry = self.now;
        self.resume_parked();
    }

    /// Whether a parked write waits for this device.
    pub(super) fn is_owed(&self, device: DeviceId) -> bool {
        self.parked.iter().any(|&key| match self.ops.get(key) {
            Some(Op::Write(write)) => {
                write.items.iter().any(|item| item.device == device && item.state != ItemState::Done)
            }
            _ => false,
        })
    }

    /// Sends what parked writes still owe, to the devices their members have now.
    pub(super) fn resume_parked(&mut self) {
        for key in self.parked.clone() {
            let Some(Op::Write(mut write)) = self.ops.get_mut(key).map(|op| std::mem::replace(op, Op::Busy))
            else {
                continue;
            };
            for item in write.items.iter_mut().filter(|item| item.state == ItemState::Todo) {
                item.retried = false;
                // A member that has returned takes what it is owed; one that is being built takes it from its build.
                let member = self.member(item.member);
                if let (None, MemberState::Online, Some(device)) =
                    (self.find_device(item.device), member.state, member.device)
                {
                    item.device = device.id;
                }
            }
            if write.pending == 0 && !self.gated.contains(&key) {
                self.ready.push_back(key);
            }
            self.ops[key] = Op::Write(write);
        }
    }
}

/// Parked writes are retried this often.
const RETRY_PARKED_NS: u64 = 1_000_000_000;

/// Computes the parities of one band into `targets` (parity row, bytes).
fn band_parity<'a>(
    codec: &codec::Codec,
    plan: &BandPlan,
    band_at: usize,
    reads: &mut [OldBytes],
    new_bytes: impl Fn(usize, &Range<usize>) -> &'a [u8],
    targets: &mut [(usize, &mut [u8])],
) {
    let rows = &plan.band.rows;
    let modified = &plan.band.columns;
    let k = codec.data();
    if plan.path == ParityPath::ReadModifyWrite {
        for old in reads.iter().filter(|old| old.band == band_at && old.column >= k) {
            if let (Some(target), Some(bytes)) =
                (targets.iter_mut().find(|(p, _)| p + k == old.column), &old.buf)
            {
                target.1.copy_from_slice(bytes);
            }
        }
        for old in reads.iter_mut().filter(|old| old.band == band_at && old.column < k) {
            let Some(delta) = &mut old.buf else { continue };
            codec::xor_into(delta, new_bytes(old.column, rows));
            codec.update(old.column, delta, targets);
        }
        return;
    }
    let mut missing: Vec<(usize, Vec<u8>)> = Vec::new();
    if let ParityPath::DecodeWrite(sources) = &plan.path {
        missing = (0..k)
            .filter(|c| !modified.contains(c) && !sources.contains(c))
            .map(|c| (c, vec![0; rows.len()]))
            .collect();
        let present: Vec<(usize, &[u8])> = reads
            .iter()
            .filter(|old| old.band == band_at)
            .filter_map(|old| old.buf.as_deref().map(|bytes| (old.column, bytes)))
            .collect();
        let mut wanted: Vec<(usize, &mut [u8])> =
            missing.iter_mut().map(|(column, bytes)| (*column, &mut bytes[..])).collect();
        codec.recover(&present, &mut wanted).expect("k distinct present columns decode any other");
    }
    let data: Vec<&[u8]> = (0..k)
        .map(|column| {
            if modified.contains(&column) {
                return new_bytes(column, rows);
            }
            let read = reads.iter().find(|old| old.band == band_at && old.column == column);
            let decoded = missing.iter().find(|(c, _)| *c == column).map(|(_, bytes)| &bytes[..]);
            read.and_then(|old| old.buf.as_deref()).or(decoded).expect("planned to be read or decoded")
        })
        .collect();
    codec.encode(&data, targets);
}
