//! Outcomes of member operations, and operations that the caller's thread runs itself, until the
//! caller takes them.
//!
//! Invariants: outcomes of one owner come in order; owners take turns, so that one with thousands
//! does not keep the others waiting. Must not know what the operations are for.

use calpe_core::block_io::{Completion, DeviceId};
use std::collections::VecDeque;

/// A completed operation and the array it belongs to.
#[derive(Debug)]
pub(crate) struct MemberCompletion {
    /// The owner that submitted it.
    pub owner: u32,
    /// The device.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "an owner knows the device by the token; tests compare it")
    )]
    pub device: DeviceId,
    /// The outcome.
    pub completion: Completion,
}

/// Entries that an empty queue keeps room for.
const KEPT: usize = 64;

/// The next thing for an owner.
#[derive(Debug)]
pub(super) enum Ready {
    Finished(MemberCompletion),
    /// The key of an operation that is run when its outcome is taken.
    Inline(usize),
}

/// One queue for each owner. Owners are numbered from 0 on.
#[derive(Debug, Default)]
pub(super) struct ReadyQueue {
    queues: Vec<VecDeque<Ready>>,
    /// Owners whose queues are not empty, the next one first.
    turns: VecDeque<u32>,
}

impl ReadyQueue {
    pub(super) fn push(&mut self, owner: u32, ready: Ready) {
        let index = owner as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, VecDeque::new);
        }
        if self.queues[index].is_empty() {
            self.turns.push_back(owner);
        }
        self.queues[index].push_back(ready);
    }

    /// Something has finished.
    pub(super) fn finished(&mut self, done: MemberCompletion) {
        self.push(done.owner, Ready::Finished(done));
    }

    /// The next entry of the owner whose turn it is.
    pub(super) fn pop(&mut self) -> Option<Ready> {
        let owner = self.turns.pop_front()?;
        let queue = &mut self.queues[owner as usize];
        let ready = queue.pop_front();
        if queue.is_empty() {
            // Arrays come and go, and their numbers are not used again.
            queue.shrink_to(KEPT);
        } else {
            self.turns.push_back(owner);
        }
        ready
    }

    /// The owner is gone; the rest of its entries is still delivered.
    pub(super) fn release(&mut self, owner: u32) {
        if let Some(queue) = self.queues.get_mut(owner as usize) {
            queue.shrink_to(0);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_take_turns_and_each_has_its_order() {
        let mut queue = ReadyQueue::default();
        for key in 0..1000 {
            queue.push(7, Ready::Inline(key));
        }
        queue.push(2, Ready::Inline(5000));
        queue.push(0, Ready::Inline(6000));
        queue.push(2, Ready::Inline(5001));
        let mut seen = Vec::new();
        while let Some(ready) = queue.pop() {
            let Ready::Inline(key) = ready else { panic!("nothing has finished") };
            seen.push(key);
        }
        assert_eq!(seen[..6], [0, 5000, 6000, 1, 5001, 2]);
        assert_eq!(seen[6..], (3..1000).collect::<Vec<_>>());
        assert!(queue.is_empty());
    }
}
