//! Member operations that have not ended, by their tokens. Rule T7: when a device leaves service, nothing waits for its
//! operations any more. They are abandoned: their owners are told at once that the device is gone, and what the device says
//! of them later only frees their tokens. Must not know what the operations are for.

use super::{Effect, Owner};
use crate::block_io::{DeviceId, IoFault, IoToken};
use crate::units::MemberIndex;
use slab::Slab;
use std::collections::VecDeque;

/// Who submitted an operation, and where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Inflight {
    pub owner: Owner,
    pub member: MemberIndex,
    pub device: DeviceId,
    pub effect: Effect,
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct InflightTable {
    entries: Slab<Entry>,
    /// Entries that were abandoned and have not ended.
    abandoned: usize,
    /// Abandoned operations whose owners were not told yet.
    orphans: VecDeque<(Inflight, IoFault)>,
}

struct Entry {
    inflight: Inflight,
    abandoned: bool,
}

/// The end of an operation.
pub(super) enum Ended {
    /// Its owner waits for it.
    Awaited(Inflight),
    /// Its owner was told long ago that the device is gone.
    Late(Inflight),
}

impl InflightTable {
    pub fn insert(&mut self, inflight: Inflight) -> IoToken {
        IoToken(self.entries.insert(Entry { inflight, abandoned: false }) as u64)
    }

    /// Takes the end of an operation. Its token is free from then on.
    pub fn end(&mut self, token: IoToken) -> Ended {
        let Entry { inflight, abandoned } =
            self.entries.remove(usize::try_from(token.0).expect("a token given out here"));
        if abandoned {
            self.abandoned -= 1;
            return Ended::Late(inflight);
        }
        Ended::Awaited(inflight)
    }

    /// Abandons all operations of a device.
    pub fn abandon(&mut self, device: DeviceId, fault: IoFault) {
        for (_, entry) in &mut self.entries {
            if entry.inflight.device == device && !entry.abandoned {
                entry.abandoned = true;
                self.abandoned += 1;
                self.orphans.push_back((entry.inflight, fault));
            }
        }
    }

    /// The next abandoned operation whose owner is to be told, and of what.
    pub fn next_orphan(&mut self) -> Option<(Inflight, IoFault)> {
        self.orphans.pop_front()
    }

    /// Whether some owner is to be told.
    pub fn has_orphans(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Whether nobody waits for an operation.
    pub fn is_empty(&self) -> bool {
        self.entries.len() == self.abandoned && self.orphans.is_empty()
    }

    /// Whether somebody waits for an operation of a device.
    pub fn is_awaited(&self, device: DeviceId) -> bool {
        self.entries.iter().any(|(_, entry)| entry.inflight.device == device && !entry.abandoned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_io::IoFaultKind;

    const GONE: IoFault = IoFault { kind: IoFaultKind::Gone, errno: libc::ENODEV };

    fn flush_on(device: u32) -> Inflight {
        Inflight {
            owner: Owner::Flush,
            member: MemberIndex(0),
            device: DeviceId(device),
            effect: Effect::Flush(0),
        }
    }

    #[test]
    fn abandoned_operations_are_told_once_and_keep_their_tokens_until_they_end() {
        let mut table = InflightTable::default();
        let tokens = [1, 2, 1].map(|device| table.insert(flush_on(device)));
        table.abandon(DeviceId(1), GONE);
        table.abandon(DeviceId(1), GONE);
        assert!(!table.is_awaited(DeviceId(1)) && table.is_awaited(DeviceId(2)));
        for _ in 0..2 {
            assert_eq!(table.next_orphan().map(|(entry, _)| entry.device), Some(DeviceId(1)));
        }
        assert!(table.next_orphan().is_none(), "told once");
        // A late end must not be taken for that of another operation.
        let other = table.insert(flush_on(3));
        assert!(!tokens.contains(&other));
        assert!(matches!(table.end(tokens[0]), Ended::Late(_)));
        assert!(matches!(table.end(tokens[1]), Ended::Awaited(_)));
        assert!(!table.is_empty());
        assert!(matches!(table.end(other), Ended::Awaited(_)));
        assert!(table.is_empty(), "nobody waits for what is left");
        assert!(matches!(table.end(tokens[2]), Ended::Late(_)));
    }

    #[test]
    fn a_table_with_owners_to_be_told_is_not_empty() {
        let mut table = InflightTable::default();
        table.insert(flush_on(1));
        table.abandon(DeviceId(1), GONE);
        assert!(!table.is_empty());
        table.next_orphan();
        assert!(table.is_empty());
    }
}
