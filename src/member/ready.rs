//! Outcomes of member operations, and operations that the caller's thread runs itself, until the
//! caller takes them.
//!
//! Invariants: outcomes of one owner come in order; owners take turns, so that one with thousands does not
//! keep the others waiting; operations that nobody waits for are run one for each of the others, so that a
//! checkpoint does not keep the clients of its array waiting, and ends all the same. Must not know what the
//! operations are for.

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

/// What an owner has.
#[derive(Debug, Default)]
struct Queue {
    first: VecDeque<Ready>,
    /// Operations that others come before, one each.
    later: VecDeque<usize>,
    /// Whether it is the turn of one of them.
    is_their_turn: bool,
}

impl Queue {
    fn is_empty(&self) -> bool {
        self.first.is_empty() && self.later.is_empty()
    }

    fn pop(&mut self) -> Option<Ready> {
        let theirs = if self.is_their_turn { self.later.pop_front().map(Ready::Inline) } else { None };
        self.is_their_turn = theirs.is_none();
        theirs.or_else(|| self.first.pop_front()).or_else(|| self.later.pop_front().map(Ready::Inline))
    }
}

/// One queue for each owner. Owners are numbered from 0 on.
#[derive(Debug, Default)]
pub(super) struct ReadyQueue {
    queues: Vec<Queue>,
    /// Owners whose queues are not empty, the next one first.
    turns: VecDeque<u32>,
}

impl ReadyQueue {
    pub(super) fn push(&mut self, owner: u32, ready: Ready) {
        self.queue(owner).first.push_back(ready);
    }

    /// An operation before which others of its owner are run, one each.
    pub(super) fn push_later(&mut self, owner: u32, key: usize) {
        self.queue(owner).later.push_back(key);
    }

    /// The queue of an owner, which is to get something.
    fn queue(&mut self, owner: u32) -> &mut Queue {
        let index = owner as usize;
        if self.queues.len() <= index {
            self.queues.resize_with(index + 1, Queue::default);
        }
        if self.queues[index].is_empty() {
            self.turns.push_back(owner);
        }
        &mut self.queues[index]
    }

    /// Something has finished.
    pub(super) fn finished(&mut self, done: MemberCompletion) {
        self.push(done.owner, Ready::Finished(done));
    }

    /// The next entry of the owner whose turn it is.
    pub(super) fn pop(&mut self) -> Option<Ready> {
        let owner = self.turns.pop_front()?;
        let queue = &mut self.queues[owner as usize];
        let ready = queue.pop();
        if queue.is_empty() {
            // Arrays come and go, and their numbers are not used again.
            queue.first.shrink_to(KEPT);
            queue.later.shrink_to(KEPT);
        } else {
            self.turns.push_back(owner);
        }
        ready
    }

    /// The owner is gone; the rest of its entries is still delivered.
    pub(super) fn release(&mut self, owner: u32) {
        if let Some(queue) = self.queues.get_mut(owner as usize) {
            queue.first.shrink_to(0);
            queue.later.shrink_to(0);
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

    #[test]
    fn what_nobody_waits_for_comes_one_for_each_of_the_others() {
        let mut queue = ReadyQueue::default();
        for key in 100..104 {
            queue.push_later(1, key);
        }
        for key in 0..2 {
            queue.push(1, Ready::Inline(key));
        }
        let mut seen = Vec::new();
        while let Some(ready) = queue.pop() {
            let Ready::Inline(key) = ready else { panic!("nothing has finished") };
            seen.push(key);
        }
        assert_eq!(seen, [0, 100, 1, 101, 102, 103]);
        assert!(queue.is_empty());
    }
}
