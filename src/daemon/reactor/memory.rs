//! Shares of the memory for payloads: what a client's requests and unread replies may take, however many others there
//! are and whatever they do.
//!
//! Invariants: with `n` clients none is given more than 1/n of the memory, or half of it where there is but one; all
//! together are given no more than there is, but for [`GUARANTEED`] bytes each, which nobody can take from a client. So a
//! client waits for no memory but its own: what is too large for the rest is carried out in parts. Must not know what the
//! memory holds.

use super::edges::blocks_of;
use super::long::STATUS_BYTES;
use calpe_core::nbd::{Command, Request};

/// Bytes that a client always has: a few small requests, or a part of a large one that is worth its trip.
pub(super) const GUARANTEED: usize = 64 << 10;

/// Most of the memory that one client gets, as a divisor, so that a second one finds some.
const CLIENTS_MIN: usize = 2;

/// What memory comes in, in bytes: buffers are whole pages.
const PAGE: u64 = 4096;

/// Bytes of memory that a request counts as, from its arrival until its reply was sent: the pages of its payload, or those
/// around what it reads; of a write that does not lie on blocks both.
pub(super) fn charge_of(request: &Request) -> usize {
    let around = blocks_of(request, PAGE);
    let around = around.end - around.start;
    let bytes = match request.command {
        Command::Read => around,
        Command::Write if around == request.length => around,
        Command::Write => around + request.length.next_multiple_of(PAGE),
        Command::BlockStatus => return STATUS_BYTES,
        _ => 0,
    };
    bytes as usize
}

/// What all clients of a reactor have, and may have.
#[derive(Debug)]
pub(super) struct Memory {
    bytes: usize,
    taken: usize,
    clients: usize,
}

impl Memory {
    pub(super) fn new(bytes: usize) -> Memory {
        Memory { bytes, taken: 0, clients: 0 }
    }

    /// So many clients share it.
    pub(super) fn set_clients(&mut self, clients: usize) {
        self.clients = clients;
    }

    /// Bytes that a client may have in all.
    pub(super) fn share(&self) -> usize {
        (self.bytes / self.clients.max(CLIENTS_MIN)).max(GUARANTEED)
    }

    /// Bytes that a client may take now that has `held` of them.
    pub(super) fn allowed(&self, held: usize) -> usize {
        let fair = self.share().saturating_sub(held).min(self.bytes.saturating_sub(self.taken));
        fair.max(GUARANTEED.saturating_sub(held))
    }

    /// Whether clients that hold more than their share keep others from theirs.
    pub(super) fn is_scarce(&self) -> bool {
        self.taken + self.share() > self.bytes
    }

    /// There is more, for one client alone.
    pub(super) fn lend(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// What was lent is gone again.
    pub(super) fn take_away(&mut self, bytes: usize) {
        self.bytes -= bytes;
    }

    pub(super) fn take(&mut self, bytes: usize) {
        self.taken += bytes;
    }

    pub(super) fn give_back(&mut self, bytes: usize) {
        self.taken -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn one_client_gets_half_and_a_hundred_a_hundredth_each() {
        let mut memory = Memory::new(128 * MIB);
        memory.set_clients(1);
        assert_eq!(memory.allowed(0), 64 * MIB);
        memory.take(64 * MIB);
        assert_eq!(memory.allowed(64 * MIB), 0);
        memory.set_clients(100);
        assert_eq!(memory.allowed(0), 128 * MIB / 100);
        assert_eq!(memory.allowed(64 * MIB), 0);
        memory.take(64 * MIB);
        assert_eq!(memory.allowed(0), GUARANTEED);
        assert_eq!(memory.allowed(GUARANTEED - 1), 1);
        assert!(memory.is_scarce());
    }

    #[test]
    fn a_request_counts_as_the_pages_it_takes() {
        let charge = |command, offset, length| charge_of(&Request::new(command, offset, length));
        assert_eq!(charge(Command::Read, 4096, 8192), 8192);
        assert_eq!(charge(Command::Read, 512, 512), 4096);
        assert_eq!(charge(Command::Read, 4000, 1200), 8192);
        assert_eq!(charge(Command::Write, 0, 4096), 4096);
        assert_eq!(charge(Command::Write, 4095, 2), 8192 + 4096);
        assert_eq!(charge(Command::Trim, 0, 1 << 30), 0);
    }

    proptest! {
        /// Greedy clients that come one after the other and give nothing back.
        #[test]
        fn all_together_have_no_more_than_there_is_and_each_its_guarantee(
            bytes in 0..200 * MIB, takes in prop::collection::vec(0..300usize, 0..2000),
        ) {
            let mut memory = Memory::new(bytes);
            let mut held = vec![0; 300];
            for (at, client) in takes.into_iter().enumerate() {
                memory.set_clients((at / 4 + 1).min(300));
                let client = client % (at / 4 + 1).min(300);
                let take = memory.allowed(held[client]);
                prop_assert!(held[client] > 0 || take >= GUARANTEED);
                memory.take(take);
                held[client] += take;
            }
            let all: usize = held.iter().sum();
            prop_assert!(all <= bytes + GUARANTEED * held.iter().filter(|held| **held > 0).count());
        }
    }
}
