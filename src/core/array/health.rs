//! The health of stripes, as far as the array knows it: which have full redundancy, which have less, and
//! which blocks are beyond repair.
//!
//! Answered from memory, without I/O: from the state of the members, the progress of rebuilds, and the blocks
//! that reads, scrubs and replays found lost since the start. Damage that no read has met yet is not
//! included; a scrub finds it. Must not know what the answers are for.

use crate::array::api::Health;
use crate::array::{Array, StripeReply, StripeRequestId};
use crate::units::{MemberIndex, ROW_BYTES, StripeIndex};
use std::collections::BTreeSet;

impl Array {
    /// Answers for `count` stripes.
    pub(super) fn start_health(&mut self, id: StripeRequestId, first: StripeIndex, count: u64) {
        assert!(count > 0 && first.0 + count <= self.core.map.slots, "health out of bounds");
        let stripe_bytes = self.core.map.stripe_bytes() as u64;
        let mut runs: Vec<(u64, Health)> = Vec::new();
        let mut add = |len: u64, health: Health| match runs.last_mut() {
            Some(last) if last.1 == health => last.0 += len,
            _ => runs.push((len, health)),
        };
        let unserved = self.core.is_failed() || self.log_is_refused();
        for stripe in (first.0..first.0 + count).map(StripeIndex) {
            if unserved {
                add(stripe_bytes, Health::Lost);
                continue;
            }
            let (of_stripe, doubtful) = self.stripe_health(stripe);
            let broken = self.damage.of_stripe(stripe);
            let broken: BTreeSet<(u16, u32)> = broken.map(|((_, column, row), _)| (column, row)).collect();
            if broken.is_empty() && doubtful.is_empty() {
                add(stripe_bytes, of_stripe);
                continue;
            }
            // Each block that cannot be had leaves its row with less redundancy.
            let rows: BTreeSet<u32> = broken.iter().map(|&(_, row)| row).collect();
            for column in 0..self.core.map.k as u16 {
                for row in 0..(self.core.map.chunk as u64 / ROW_BYTES) as u32 {
                    let is_lost = broken.contains(&(column, row)) || doubtful.contains(&column);
                    let health = match (is_lost, rows.contains(&row)) {
                        (true, _) => Health::Lost,
                        (false, true) => Health::Degraded,
                        (false, false) => of_stripe,
                    };
                    add(ROW_BYTES, health);
                }
            }
        }
        self.core.done(id, Ok(StripeReply::Health(runs)));
    }

    /// The health of a stripe by its members and rebuilds; and its columns of data that may have blocks which
    /// neither their own member nor decoding can give.
    fn stripe_health(&self, stripe: StripeIndex) -> (Health, Vec<u16>) {
        let slot = self.pages.map_entry(stripe).slot;
        let is_missing = |member: MemberIndex| self.core.readable(member, slot).is_none();
        let may_lack =
            |member: MemberIndex| is_missing(member) || self.damage.is_read_without(&self.core, member, slot);
        let members = || (0..self.core.map.width()).map(|at| MemberIndex(at as u16));
        let missing = members().filter(|&member| is_missing(member)).count();
        let lacking = members().filter(|&member| may_lack(member)).count();
        if missing > self.core.map.m {
            (Health::Lost, Vec::new())
        } else if lacking > self.core.map.m {
            let columns = (0..self.core.map.k).filter(|&column| may_lack(self.core.member_at(slot, column)));
            (Health::Degraded, columns.map(|column| column as u16).collect())
        } else if lacking > 0 {
            (Health::Degraded, Vec::new())
        } else {
            (Health::Clean, Vec::new())
        }
    }

    pub(super) fn log_is_refused(&self) -> bool {
        self.redo.is_refused()
    }
}
