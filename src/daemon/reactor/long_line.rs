//! A connection's long requests, by their numbers: which of them can go on, and what they block meanwhile.
//! Must not know what they are.

use std::collections::VecDeque;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct LongLine {
    /// Those that can go on.
    ready: VecDeque<usize>,
    /// The long write whose payload comes next on the stream.
    writing: Option<usize>,
    /// Whether a long read has the connection to itself; nothing is parsed then.
    alone: bool,
}

impl LongLine {
    /// Queues a long request that can go on behind the others.
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

    /// Notes that the payload of a long write comes next on the stream.
    pub(super) fn begin_writing(&mut self, long: usize) {
        self.writing = Some(long);
    }

    /// The long write whose payload comes next on the stream.
    pub(super) fn writing(&self) -> Option<usize> {
        self.writing
    }

    /// The payload of the long write is complete and was taken.
    pub(super) fn end_writing(&mut self) {
        self.writing = None;
    }

    /// Gives the connection to a long read alone.
    pub(super) fn begin_alone(&mut self) {
        self.alone = true;
    }

    /// Ends that.
    pub(super) fn end_alone(&mut self) {
        self.alone = false;
    }

    /// Whether received input has to wait for a long request.
    pub(super) fn blocks_stream(&self) -> bool {
        self.writing.is_some() || self.alone
    }

    /// Whether no long request can go on or blocks others.
    pub(super) fn is_empty(&self) -> bool {
        self.ready.is_empty() && !self.blocks_stream()
    }

    /// Drops a long request.
    pub(super) fn drop(&mut self, at: usize) {
        self.ready.retain(|&long| long != at);
        if self.writing == Some(at) {
            self.writing = None;
        }
    }
}
