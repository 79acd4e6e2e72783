//! What the writes of a load write, and whether the volume may have no room for it.

use super::super::Written;
use super::{Pending, Run, SECTORS};
use crate::volume::{ClientError, ClientReply};

/// Kinds of content that blocks have in common.
const COMMON_KINDS: u64 = 6;

impl Run {
    /// Begins a write to these sectors, or, with content that other blocks have, to the whole blocks among
    /// them.
    pub(super) fn choose_content(&mut self, first: usize, count: usize) -> Written {
        let one_in = self.workload.common_one_in;
        if one_in == 0 || !self.random.one_in(one_in) {
            return self.oracle.begin_write(first, count);
        }
        let block = SECTORS as usize;
        let (start, end) = (first.next_multiple_of(block), (first + count) / block * block);
        let (first, count) = if start < end { (start, end - start) } else { (first, count) };
        let kind = self.random.below(COMMON_KINDS);
        self.oracle.begin_common_write(first, count, kind)
    }

    /// Whether a write was refused by a volume that has no room for all its blocks.
    pub(super) fn is_refused(&self, pending: &Pending, result: &Result<ClientReply, ClientError>) -> bool {
        let is_write = matches!(pending, Pending::Write { .. });
        is_write && matches!(result, Err(ClientError::NoSpace)) && self.sim.may_be_full()
    }
}
