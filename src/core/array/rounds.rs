//! Flush rounds: one flush of every member, for all that waits for one.
//!
//! The log says that it waits for a round; it is asked how far it has written, the members are flushed, and
//! it is told. Rule W1: what the log counts as durable after a round had ended on the members before the
//! first of them was flushed, because the log answered before that. A member that is lost meanwhile is the
//! business of the log, which acknowledges nothing before the loss is recorded (E3): it learns of the loss
//! before it learns that the round is over.
//!
//! Must not know what the log waits for.

use crate::array::base::members::Which;
use crate::array::log::permits::{RoundWish, Written};
use crate::array::{Core, Owner};
use crate::block_io::IoOp;
use crate::format::MemberState;

/// See the head of this file.
#[derive(Default)]
pub(in crate::array) struct FlushRounds {
    under_way: Option<Round>,
}

struct Round {
    /// Flushes that have not ended.
    pending: usize,
    /// The answer of the log.
    written: Written,
}

impl FlushRounds {
    /// Whether none is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.under_way.is_none()
    }

    /// Begins a round after the log has answered. Returns the answer if there is nothing to flush: the round
    /// is over.
    pub(super) fn begin(&mut self, core: &mut Core, wish: RoundWish, written: Written) -> Option<Written> {
        let mut pending = 0;
        for (member, which, device) in core.devices() {
            let in_service = which == Which::Primary && core.member(member).state == MemberState::Online;
            if (wish.with_builds || in_service) && device.is_unflushed() {
                core.submit_io(Owner::Round, member, device.id, IoOp::Flush);
                pending += 1;
            }
        }
        if pending == 0 {
            return Some(written);
        }
        self.under_way = Some(Round { pending, written });
        None
    }

    /// Counts a flush that has ended. Returns the log's answer when it was the last one.
    pub(super) fn flush_done(&mut self) -> Option<Written> {
        let round = self.under_way.as_mut()?;
        round.pending -= 1;
        if round.pending > 0 {
            return None;
        }
        self.under_way.take().map(|round| round.written)
    }

    /// Forgets the round under way: the array has failed.
    pub(super) fn forget(&mut self) {
        self.under_way = None;
    }
}
