//! Whether a device takes work off cores that are all busy. There the question is not who is sooner: each
//! microsecond of a core that is spared does other work. So work goes to a device where that costs the cores
//! much less than doing it, and nobody waits longer than a few milliseconds. Both are learnt from batches.
//!
//! Invariant: what was learnt keeps work away for a while only, then it is tried again. Pure: must not know
//! of queues, threads or clocks.

use super::policy::{Estimate, Verdict};

/// How long jobs may wait for their answers, in seconds, where the CPU would not take longer anyway.
const WAIT_MAX: f64 = 3e-3;

/// Most work of devices, in seconds, that may lie ahead of a job.
const AHEAD_MAX: f64 = 2e-3;

/// The most that a batch may cost the cores, as a part of what it spares them: less gain is not worth the
/// wait.
const SPENT_MAX: f64 = 0.6;

/// What offering a job and taking its answer costs the reactor, in seconds: a lock, a queue, a wake-up.
const HANDOVER: f64 = 15e-6;

/// Batches that the means are of; older ones fade.
const REMEMBERED: u32 = 16;
/// Batches that must have ended before they are judged.
const JUDGED_MIN: u32 = 4;
/// Most bytes of input that devices have while there are not so many: as much as is risked for a trial.
const TRIAL_BYTES_MAX: u64 = 8 << 20;

/// Jobs that are kept away before the next trial: at first, and at most, since it doubles with each failure.
const PAUSE_MIN: u64 = 256;
/// See [`PAUSE_MIN`].
const PAUSE_MAX: u64 = 8192;

/// What there is to learn from a batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) jobs: usize,
    /// Seconds of a core that its jobs would have taken.
    pub(super) spared: f64,
    /// Seconds of cores that the device's threads and process have used for it.
    pub(super) spent: f64,
    /// Seconds from the offer of its first job to the answer.
    pub(super) waited: f64,
}

/// Sums over all batches that were taken to spare busy cores.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) batches: u64,
    pub(super) spared: f64,
    pub(super) spent: f64,
    pub(super) trials: u64,
}

/// See the module's head.
#[derive(Debug)]
pub(super) struct Worth {
    /// Means of the last batches.
    spared: f64,
    spent: f64,
    waited: f64,
    /// How many the means are of, up to [`REMEMBERED`].
    batches: u32,
    /// Jobs kept away since the last trial.
    kept_away: u64,
    pause: u64,
    totals: Totals,
}

impl Default for Worth {
    fn default() -> Worth {
        let totals = Totals::default();
        Worth { spared: 0.0, spent: 0.0, waited: 0.0, batches: 0, kept_away: 0, pause: PAUSE_MIN, totals }
    }
}

impl Worth {
    /// Decides for some jobs while the cores are busy. `ahead_bytes`: input that devices have or that waits
    /// for them.
    pub(super) fn decide(&mut self, estimate: &Estimate, jobs: u64, ahead_bytes: u64) -> Verdict {
        let Estimate { alone, backlog, on_cpu, on_core } = *estimate;
        if !alone.is_finite() || on_core < 2.0 * HANDOVER * jobs as f64 {
            return Verdict::Small;
        }
        let verdict = self.judge(on_cpu);
        if verdict != Verdict::Spare {
            self.keep_away(jobs);
            return verdict;
        }
        let ahead_max = AHEAD_MAX.max(on_cpu);
        if alone > ahead_max {
            return Verdict::Late;
        }
        let is_trial = self.batches < JUDGED_MIN;
        if backlog + alone > ahead_max || (is_trial && ahead_bytes >= TRIAL_BYTES_MAX) {
            return Verdict::Spill;
        }
        Verdict::Spare
    }

    /// What was learnt says. `on_cpu`: seconds until the CPU would have done it.
    fn judge(&self, on_cpu: f64) -> Verdict {
        if self.batches < JUDGED_MIN {
            Verdict::Spare
        } else if self.spent > SPENT_MAX * self.spared {
            Verdict::Costly
        } else if self.waited > WAIT_MAX.max(on_cpu) {
            Verdict::Late
        } else {
            Verdict::Spare
        }
    }

    /// After some time a few batches are tried, and judged by themselves.
    fn keep_away(&mut self, jobs: u64) {
        self.kept_away += jobs;
        if self.kept_away >= self.pause {
            self.kept_away = 0;
            self.batches = 0;
            self.pause = (2 * self.pause).min(PAUSE_MAX);
            self.totals.trials += 1;
        }
    }

    /// Learns from a batch that was taken to spare busy cores.
    pub(super) fn learn(&mut self, ended: Ended) {
        let Ended { jobs, spared, spent, waited } = ended;
        let spent = spent + HANDOVER * jobs as f64;
        self.totals.batches += 1;
        self.totals.spared += spared;
        self.totals.spent += spent;
        self.batches = (self.batches + 1).min(REMEMBERED);
        let weight = f64::from(self.batches).recip();
        self.spared += (spared - self.spared) * weight;
        self.spent += (spent - self.spent) * weight;
        self.waited += (waited - self.waited) * weight;
        if self.batches == REMEMBERED && self.judge(0.0) == Verdict::Spare {
            self.pause = PAUSE_MIN;
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.totals
    }

    /// How long the first jobs of the last batches waited, in seconds.
    pub(super) fn waited(&self) -> f64 {
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1.5 MiB of a stripe: 0.7 ms of a core, 0.2 ms on a device with nothing else to do.
    const STRIPE: Estimate = Estimate { alone: 2e-4, backlog: 0.0, on_cpu: 7e-4, on_core: 7e-4 };
    const GOOD: Ended = Ended { jobs: 1, spared: 7e-4, spent: 2e-4, waited: 6e-4 };

    fn learnt(ended: Ended, batches: u32) -> Worth {
        let mut worth = Worth::default();
        (0..batches).for_each(|_| worth.learn(ended));
        worth
    }

    fn verdict(worth: &mut Worth) -> Verdict {
        worth.decide(&STRIPE, 1, 0)
    }

    /// Jobs that are kept away before the next trial.
    fn pause(worth: &mut Worth) -> u64 {
        (0..100_000).take_while(|_| verdict(worth) != Verdict::Spare).count() as u64
    }

    #[test]
    fn what_spares_cores_is_taken_though_the_cpu_would_be_sooner() {
        let later = Estimate { alone: 1.5e-3, ..STRIPE };
        assert_eq!(learnt(GOOD, 9).decide(&later, 1, 0), Verdict::Spare);
        // Work of a device that takes longer is not even begun, unless the CPU takes as long.
        let slow = Estimate { alone: 2.5e-3, ..STRIPE };
        assert_eq!(learnt(GOOD, 9).decide(&slow, 1, 0), Verdict::Late);
        assert_eq!(learnt(GOOD, 9).decide(&Estimate { on_cpu: 3e-3, ..slow }, 1, 0), Verdict::Spare);
    }

    #[test]
    fn what_costs_as_much_to_hand_over_as_to_do_is_small() {
        let small = Estimate { on_core: 2e-5, ..STRIPE };
        assert_eq!(learnt(GOOD, 9).decide(&small, 1, 0), Verdict::Small);
        assert_eq!(learnt(GOOD, 9).decide(&STRIPE, 30, 0), Verdict::Small, "many small ones no less");
        let nobody = Estimate { alone: f64::INFINITY, ..STRIPE };
        assert_eq!(learnt(GOOD, 9).decide(&nobody, 1, 0), Verdict::Small);
    }

    #[test]
    fn devices_never_have_more_than_some_milliseconds_of_work() {
        let mut worth = learnt(GOOD, 9);
        assert_eq!(worth.decide(&Estimate { backlog: 1.7e-3, ..STRIPE }, 1, 0), Verdict::Spare);
        assert_eq!(worth.decide(&Estimate { backlog: 1.9e-3, ..STRIPE }, 1, 0), Verdict::Spill);
        let queued = Estimate { backlog: 1.9e-3, on_cpu: 3e-3, ..STRIPE };
        assert_eq!(worth.decide(&queued, 1, 0), Verdict::Spare, "the CPU would take longer");
    }

    #[test]
    fn batches_that_cost_the_cores_too_much_keep_work_away() {
        assert_eq!(verdict(&mut learnt(Ended { spent: 4e-4, ..GOOD }, 9)), Verdict::Spare);
        assert_eq!(verdict(&mut learnt(Ended { spent: 4.5e-4, ..GOOD }, 9)), Verdict::Costly);
        // Handing over many jobs is not free either.
        assert_eq!(verdict(&mut learnt(Ended { jobs: 20, ..GOOD }, 9)), Verdict::Costly);
    }

    #[test]
    fn answers_that_come_after_some_milliseconds_keep_work_away_unless_the_cpu_takes_as_long() {
        let mut late = learnt(Ended { waited: 4e-3, ..GOOD }, 9);
        assert_eq!(verdict(&mut late), Verdict::Late);
        assert_eq!(late.decide(&Estimate { on_cpu: 5e-3, ..STRIPE }, 1, 0), Verdict::Spare);
    }

    #[test]
    fn one_bad_moment_among_good_ones_changes_nothing() {
        let mut worth = learnt(GOOD, 100);
        worth.learn(Ended { waited: 30e-3, spent: 3e-3, ..GOOD });
        assert_eq!(verdict(&mut worth), Verdict::Spare);
        (0..3).for_each(|_| worth.learn(Ended { waited: 30e-3, ..GOOD }));
        assert_eq!(verdict(&mut worth), Verdict::Late, "several in a row do");
    }

    #[test]
    fn what_was_kept_away_is_tried_again_with_little_and_judged_by_that_alone() {
        let mut worth = learnt(Ended { waited: 1.0, spent: 1.0, ..GOOD }, 1000);
        assert_eq!(pause(&mut worth), PAUSE_MIN);
        assert_eq!(worth.decide(&STRIPE, 1, TRIAL_BYTES_MAX - 1), Verdict::Spare);
        assert_eq!(worth.decide(&STRIPE, 1, TRIAL_BYTES_MAX), Verdict::Spill, "no more than is risked");
        (0..JUDGED_MIN).for_each(|_| worth.learn(GOOD));
        assert_eq!(worth.decide(&STRIPE, 1, TRIAL_BYTES_MAX), Verdict::Spare);
        assert_eq!(worth.totals().trials, 1);
    }

    #[test]
    fn trials_that_fail_become_rare_and_one_that_succeeds_makes_them_frequent_again() {
        let bad = Ended { waited: 1.0, ..GOOD };
        let mut worth = learnt(bad, REMEMBERED);
        let mut pauses = Vec::new();
        for _ in 0..8 {
            pauses.push(pause(&mut worth));
            (0..JUDGED_MIN).for_each(|_| worth.learn(bad));
        }
        assert_eq!(pauses, [256, 512, 1024, 2048, 4096, 8192, 8192, 8192]);
        pause(&mut worth);
        (0..REMEMBERED).for_each(|_| worth.learn(GOOD));
        (0..REMEMBERED).for_each(|_| worth.learn(bad));
        assert_eq!(pause(&mut worth), PAUSE_MIN);
    }

    #[test]
    fn sums_say_what_it_has_come_to() {
        let totals = learnt(GOOD, 10).totals();
        assert_eq!((totals.batches, totals.trials), (10, 0));
        assert!((totals.spared - 7e-3).abs() < 1e-9 && (totals.spent - 2.15e-3).abs() < 1e-9, "{totals:?}");
    }
}
