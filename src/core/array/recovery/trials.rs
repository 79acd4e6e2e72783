//! Lets the end of the log be decided only when blocks that could not be read cannot change it (rules R5 and
//! T3).
//!
//! Until then nothing has been written: the rings, the map and the blocks in doubt are read again from the
//! start, with growing intervals. When that takes too long, the start is refused unless it is forced. But
//! where no more members are gone or give errors than the array survives, a batch that does not show was not
//! durable, and is dropped with an event.

use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::store::PageStore;
use crate::array::recovery::chain::{Chain, ChainFault, Finds};
use crate::array::recovery::decide::{Decision, Judge};
use crate::array::recovery::pages::PageTrials;
use crate::array::recovery::patience::Patience;
use crate::array::recovery::scan::Scan;
use crate::array::recovery::unread::{Doubt, in_words};
use crate::array::recovery::{Doing, Recovered, Recovery, RecoveryError, RecoveryOutcome, Step};
use crate::units::MemberIndex;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct LogTrials {
    patience: Patience,
    /// There is no time left: the blocks that can be read decide.
    is_over: bool,
}

impl Recovery {
    pub(super) fn begin_scan(&mut self) {
        let mut start = self.cx.known.start;
        if is_off(Mutation::OldEpochPiecesIgnored) {
            start.epoch = start.epoch.max(self.cx.epoch.number - 1);
        }
        let mut finds = Finds::new(start, self.cx.usable, self.cx.map.width(), self.cx.known.durable);
        finds.expect_nothing_of(self.cx.epoch, self.cx.judging.behind);
        self.step = Step::Scan(Box::new((Scan::new(self.ring, self.cx.usable), finds)));
    }

    /// Ends the scan, once all rings were read.
    pub(super) fn end_scan(&mut self, mut finds: Finds) {
        let everything_was_read = finds.has_read_all() || is_off(Mutation::UnreadTailDropped);
        let is_final = everything_was_read || self.trials.log.is_over;
        let map = &self.cx.map;
        match finds.chain(self.cx.force && is_final) {
            Ok(chain) => {
                let doubt = chain.hidden_end(self.cx.usable, self.cx.judging.behind, map);
                let sequence = chain.sequence(chain.batches().len() as u32);
                let unread = chain.unread().text();
                if doubt != Doubt::None && !self.settle(doubt, Some(sequence), &unread) {
                    return;
                }
                if doubt >= Doubt::Denied {
                    self.result.dropped_unread = Some(unread);
                }
                let probe = Scan::probe(self.ring, self.cx.usable, &chain);
                self.step = Step::Probe(Box::new((probe, chain)));
            }
            Err(fault) if is_final => self.end_at(fault),
            // The missing parts may be where the errors are.
            Err(fault) => match self.trials.log.patience.failed(self.now) {
                Some(at) => self.step = Step::Again { at },
                None if self.cx.force => {
                    self.trials.log.is_over = true;
                    self.step = Step::Again { at: self.now };
                }
                None => self.end_at(fault),
            },
        }
    }

    /// The members that are not here and may have blocks of rows that are lost, in words. None where there
    /// are none, or the start is forced.
    pub(super) fn absent_with_losses(&self) -> Option<String> {
        if self.cx.force || !self.plan.decision.loses_absent() {
            return None;
        }
        let had_part = |member: &MemberIndex| {
            self.plan.judge.chain().batches().iter().any(|batch| batch.place(*member).is_some())
        };
        Some(in_words(self.cx.judging.away.iter().filter(had_part)))
    }

    /// Ends the recovery, because there is no chain to replay with these members.
    fn end_at(&mut self, fault: ChainFault) {
        match fault {
            ChainFault::Error(error) => self.refuse(error),
            ChainFault::RolledBack(members) => {
                self.outcome = Some(RecoveryOutcome::RolledBack(members));
            }
        }
    }

    /// Whether the end of the log is decided, although blocks could not be read that could change it.
    /// Otherwise this chooses the next step.
    pub(super) fn settles_end(&mut self, doubt: Doubt) -> bool {
        let chain = self.plan.judge.chain();
        let first = self.plan.decision.longest();
        let (usable, behind, epoch) = (self.cx.usable, self.cx.judging.behind, self.cx.epoch);
        let loses_unread = self.plan.decision.loses_unread();
        let was_never_durable = !loses_unread
            && (first as usize) < chain.batches().len()
            && chain.was_never_durable(first, usable, behind, epoch);
        let sequence = (!loses_unread).then_some(chain.sequence(first));
        let doubt = match doubt {
            // A block that was read without an error may be wrong all the same: the errors get the time to
            // pass.
            _ if was_never_durable => Doubt::Denied,
            doubt => doubt,
        };
        let unread = chain.unread().text();
        let settles = doubt == Doubt::None || self.settle(doubt, sequence, &unread);
        if settles && doubt != Doubt::None {
            self.result.dropped_unread = Some(unread);
        }
        settles
    }

    /// `sequence`: the first batch that may be there and is dropped. `unread`: in words, the members with
    /// logs that could not be read.
    fn settle(&mut self, doubt: Doubt, sequence: Option<u64>, unread: &str) -> bool {
        let trials = &mut self.trials.log;
        if !trials.is_over
            && let Some(at) = trials.patience.failed(self.now)
        {
            self.step = Step::Again { at };
            return false;
        }
        trials.is_over = true;
        if doubt == Doubt::Beyond && !self.cx.force {
            let members = unread.to_owned();
            self.refuse(match sequence {
                Some(sequence) => RecoveryError::EndUnreadable { sequence, members },
                None => RecoveryError::LogUnreadable { members },
            });
            return false;
        }
        true
    }

    /// Forgets everything that was read, and reads it again.
    pub(super) fn read_anew(&mut self, pages: &mut PageStore) {
        debug_assert!(self.io.is_idle() && self.work.jobs.is_empty(), "nothing is under way");
        pages.forget_all();
        let chain = Chain::empty(self.cx.known.start.sequence, self.cx.map.width());
        self.plan.decision = Decision::new(&chain);
        self.plan.judge = Judge::new(chain, self.cx.map, self.cx.usable, self.cx.judging.away);
        self.work.tiles.clear();
        self.work.suspects.clear();
        self.lost.clear();
        self.map.named_pages.clear();
        self.map.slots_with_data.clear();
        self.trials.pages = PageTrials::default();
        self.result = Recovered::default();
        self.begin_scan();
    }

    /// Whether an error of this operation counts: not where a ring is scanned, and not repeatedly where a
    /// read is tried again (rule T5).
    pub(crate) fn counts(&self, item: usize) -> bool {
        let is_ring = self.io.flights.get(item).is_some_and(|flight| matches!(flight.doing, Doing::Ring(_)));
        !is_ring
            && !self.trials.pages.is_trying()
            && !self.trials.cells.is_trying()
            && !self.trials.log.is_trying()
    }
}

impl LogTrials {
    fn is_trying(&self) -> bool {
        self.patience.has_failed()
    }
}
