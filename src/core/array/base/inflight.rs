//! Member operations that have not ended, by their tokens. Rule T7: when a device leaves service, nothing
//! waits for its operations any more. They are abandoned: their owners learn at once that the device is gone,
//! and later results from the device only free their tokens. Must not know what the operations are for.

use crate::array::{Effect, Owner};
use crate::block_io::{Buf, DeviceId, IoFault, IoOp, IoToken, Pool};
use crate::units::{ByteOffset, MemberIndex, Timestamp};
use slab::Slab;
use std::collections::VecDeque;

/// The owner of an operation, and its place.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) struct Inflight {
    pub owner: Owner,
    pub member: MemberIndex,
    pub device: DeviceId,
    pub effect: Effect,
}

/// The facts needed to submit an operation again.
#[derive(Clone, Debug)]
pub(in crate::array) enum Again {
    Read { offset: ByteOffset, len: usize },
    Write { offset: ByteOffset, buf: Buf, fua: bool },
    Flush,
    Zero { offset: ByteOffset, len: u64, may_unmap: bool },
    Extents { offset: ByteOffset, len: u64 },
}

impl Again {
    fn of(op: &IoOp) -> Again {
        match op {
            IoOp::Read { offset, buf } => Again::Read { offset: *offset, len: buf.len() },
            IoOp::Write { offset, buf, fua } => Again::Write { offset: *offset, buf: buf.clone(), fua: *fua },
            IoOp::Flush => Again::Flush,
            &IoOp::Zero { offset, len, may_unmap } => Again::Zero { offset, len, may_unmap },
            &IoOp::Extents { offset, len } => Again::Extents { offset, len },
        }
    }

    /// The operation; a read gets a buffer of `pool`.
    pub(super) fn op(&self, pool: &Pool) -> IoOp {
        match self {
            Again::Read { offset, len } => IoOp::Read { offset: *offset, buf: pool.alloc(*len) },
            Again::Write { offset, buf, fua } => IoOp::Write { offset: *offset, buf: buf.clone(), fua: *fua },
            Again::Flush => IoOp::Flush,
            &Again::Zero { offset, len, may_unmap } => IoOp::Zero { offset, len, may_unmap },
            &Again::Extents { offset, len } => IoOp::Extents { offset, len },
        }
    }

    /// Whether it transfers bytes, so that its duration can be compared.
    pub(in crate::array) fn is_transfer(&self) -> bool {
        matches!(self, Again::Read { .. } | Again::Write { .. })
    }

    pub(super) fn changes_nothing(&self) -> bool {
        matches!(self, Again::Read { .. } | Again::Extents { .. })
    }
}

/// The state of an operation that has met a shortage and is tried again; see `shortage.rs`.
#[derive(Clone, Copy, Debug)]
pub(in crate::array) struct Short {
    pub since: Timestamp,
    pub tries: u32,
    pub fault: IoFault,
    /// When it is submitted again; none while the driver has it.
    pub due: Option<Timestamp>,
}

/// An operation that was submitted and has not ended.
#[derive(Debug)]
pub(in crate::array) struct Flight {
    pub entry: Inflight,
    pub again: Again,
    pub since: Timestamp,
    pub short: Option<Short>,
}

/// See the head of this file.
#[derive(Default)]
pub(in crate::array) struct InflightTable {
    entries: Slab<Entry>,
    /// Entries that were abandoned and have not ended.
    abandoned: usize,
    /// Abandoned operations of which their owners have not been told yet.
    orphans: VecDeque<(Inflight, IoFault)>,
}

struct Entry {
    flight: Flight,
    abandoned: bool,
}

/// The end of an operation.
pub(in crate::array) enum Ended {
    /// Its owner waits for it.
    Awaited(Flight),
    /// Its owner learned long ago that the device is gone.
    Late(Inflight),
}

impl InflightTable {
    pub(super) fn insert(&mut self, entry: Inflight, op: &IoOp, now: Timestamp) -> IoToken {
        let flight = Flight { entry, again: Again::of(op), since: now, short: None };
        IoToken(self.entries.insert(Entry { flight, abandoned: false }) as u64)
    }

    /// The operation, if its owner waits for it.
    pub(super) fn get(&self, token: IoToken) -> Option<&Flight> {
        self.entries.get(token.0 as usize).filter(|entry| !entry.abandoned).map(|entry| &entry.flight)
    }

    /// As [`InflightTable::get`].
    pub(super) fn get_mut(&mut self, token: IoToken) -> Option<&mut Flight> {
        let entry = self.entries.get_mut(token.0 as usize).filter(|entry| !entry.abandoned);
        entry.map(|entry| &mut entry.flight)
    }

    /// Number of operations that owners wait for.
    pub(super) fn awaited(&self) -> usize {
        self.entries.len() - self.abandoned + self.orphans.len()
    }

    /// Forgets an operation that the driver does not have.
    pub(super) fn forget(&mut self, token: IoToken) {
        let entry = self.entries.remove(token.0 as usize);
        assert!(entry.flight.short.is_some_and(|short| short.due.is_some()), "the driver will end it");
    }

    /// Takes the end of an operation. Its token is free from then on.
    pub(in crate::array) fn end(&mut self, token: IoToken) -> Ended {
        let Entry { flight, abandoned } =
            self.entries.remove(usize::try_from(token.0).expect("a token given out here"));
        if abandoned {
            self.abandoned -= 1;
            return Ended::Late(flight.entry);
        }
        Ended::Awaited(flight)
    }

    /// Abandons all operations of a device. Tokens of those that the driver does not have are free at once.
    /// Returns those that had met a shortage.
    pub(super) fn abandon(&mut self, device: DeviceId, fault: IoFault) -> Vec<(IoToken, Short)> {
        let mut short = Vec::new();
        for (token, entry) in &mut self.entries {
            if entry.flight.entry.device == device && !entry.abandoned {
                entry.abandoned = true;
                self.abandoned += 1;
                self.orphans.push_back((entry.flight.entry, fault));
                short.extend(entry.flight.short.map(|short| (IoToken(token as u64), short)));
            }
        }
        for (token, _) in short.iter().filter(|(_, short)| short.due.is_some()) {
            self.entries.remove(token.0 as usize);
            self.abandoned -= 1;
        }
        short
    }

    /// The next abandoned operation of which the owner must be told, and the fault.
    pub(in crate::array) fn next_orphan(&mut self) -> Option<(Inflight, IoFault)> {
        self.orphans.pop_front()
    }

    /// Whether owners of abandoned operations have yet to learn of it.
    pub(in crate::array) fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Whether no owner waits for an operation.
    pub(in crate::array) fn is_empty(&self) -> bool {
        self.entries.len() == self.abandoned && self.orphans.is_empty()
    }

    /// Whether an owner waits for an operation of a device.
    pub(super) fn is_awaited(&self, device: DeviceId) -> bool {
        self.entries.iter().any(|(_, entry)| entry.flight.entry.device == device && !entry.abandoned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::IoFaultKind;

    const GONE: IoFault = IoFault { kind: IoFaultKind::Gone, errno: libc::ENODEV };

    fn flush_on(device: u32) -> Inflight {
        Inflight {
            owner: Owner::Round,
            member: MemberIndex(0),
            device: DeviceId(device),
            effect: Effect::Flush(0),
        }
    }

    #[test]
    fn abandoned_operations_are_told_once_and_keep_their_tokens_until_they_end() {
        let mut table = InflightTable::default();
        let tokens = [1, 2, 1].map(|device| table.insert(flush_on(device), &IoOp::Flush, Timestamp(0)));
        table.abandon(DeviceId(1), GONE);
        table.abandon(DeviceId(1), GONE);
        assert!(!table.is_awaited(DeviceId(1)) && table.is_awaited(DeviceId(2)));
        for _ in 0..2 {
            assert_eq!(table.next_orphan().map(|(entry, _)| entry.device), Some(DeviceId(1)));
        }
        assert!(table.next_orphan().is_none(), "told once");
        // A late end must not be taken for that of another operation.
        let other = table.insert(flush_on(3), &IoOp::Flush, Timestamp(0));
        assert!(!tokens.contains(&other));
        assert!(matches!(table.end(tokens[0]), Ended::Late(_)));
        assert!(matches!(table.end(tokens[1]), Ended::Awaited(_)));
        assert!(!table.is_empty());
        assert!(matches!(table.end(other), Ended::Awaited(_)));
        assert!(table.is_empty(), "no owner waits for the others");
        assert!(matches!(table.end(tokens[2]), Ended::Late(_)));
    }

    #[test]
    fn an_abandoned_operation_that_the_driver_does_not_have_frees_its_token_at_once() {
        let mut table = InflightTable::default();
        let [with, without] = [1, 1].map(|device| table.insert(flush_on(device), &IoOp::Flush, Timestamp(0)));
        let fault = IoFault { kind: IoFaultKind::Shortage, errno: libc::ENOMEM };
        for (token, due) in [(with, None), (without, Some(Timestamp(7)))] {
            let short = Short { since: Timestamp(1), tries: 1, fault, due };
            table.get_mut(token).expect("awaited").short = Some(short);
        }
        let short: Vec<IoToken> = table.abandon(DeviceId(1), GONE).into_iter().map(|(t, _)| t).collect();
        assert_eq!(short, [with, without]);
        assert!(table.get(with).is_none() && table.get(without).is_none());
        assert_eq!(table.awaited(), 2, "their owners are to be told");
        assert!(table.next_orphan().is_some() && table.next_orphan().is_some());
        assert_eq!(table.insert(flush_on(2), &IoOp::Flush, Timestamp(0)), without);
        assert!(matches!(table.end(with), Ended::Late(_)));
    }

    #[test]
    fn a_table_with_owners_to_be_told_is_not_empty() {
        let mut table = InflightTable::default();
        table.insert(flush_on(1), &IoOp::Flush, Timestamp(0));
        table.abandon(DeviceId(1), GONE);
        assert!(!table.is_empty());
        table.next_orphan();
        assert!(table.is_empty());
    }
}
