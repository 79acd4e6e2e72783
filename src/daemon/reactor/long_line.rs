//! A connection's long requests, by their numbers: which of them can go on, and what they keep from the others. Must not
//! know what they are.

use std::collections::VecDeque;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct LongLine {
    /// Those that can go on.
    ready: VecDeque<usize>,
    /// The long write whose payload comes next on the stream.
    writing: Option<usize>,
    /// A long read has the connection to itself; nothing is parsed.
    alone: bool,
}

impl LongLine {
    /// A long request can go on, after the others.
    pub(super) fn push(&mut self, long: usize) {
        self.ready.push_back(long);
    }

    /// The next long request that can go on.
    pub(super) fn pop(&mut self) -> Option<usize> {
        self.ready.pop_front()
    }

    /// How many can go on.
    pub(super) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Takes all that can go on.
    pub(super) fn take_ready(&mut self) -> Vec<usize> {
        self.ready.drain(..).collect()
    }

    /// The payload of a long write comes next on the stream.
    pub(super) fn begin_writing(&mut self, long: usize) {
        self.writing = Some(long);
    }

    /// The long write whose payload comes next on the stream.
    pub(super) fn writing(&self) -> Option<usize> {
        self.writing
    }

    /// The payload of the long write is there, and taken care of.
    pub(super) fn end_writing(&mut self) {
        self.writing = None;
    }

    /// A long read has the connection to itself.
    pub(super) fn begin_alone(&mut self) {
        self.alone = true;
    }

    /// It has no more.
    pub(super) fn end_alone(&mut self) {
        self.alone = false;
    }

    /// Whether something that was received has to wait for a long request.
    pub(super) fn blocks_stream(&self) -> bool {
        self.writing.is_some() || self.alone
    }

    /// Whether there is any that can go on, or keeps others waiting.
    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && !self.blocks_stream()
    }

    /// A long request is dropped.
    pub(super) fn drop(&mut self, at: usize) {
        self.ready.retain(|&long| long != at);
        if self.writing == Some(at) {
            self.writing = None;
        }
    }
}
