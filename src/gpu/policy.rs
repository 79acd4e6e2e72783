//! Whether a device does some work sooner than the CPU: by size, from measured tables, and by load,
//! from what waits on either side. Pure arithmetic: must not know of queues, threads or clocks.

use serde::{Deserialize, Serialize};

use calpe_core::codec::Form;

use super::batch::Kind;

/// Columns of the code that tables are measured with: k of 8+4.
pub(super) const MEASURED_DATA: usize = 8;
/// m of the code that tables are measured with.
pub(super) const MEASURED_PARITY: usize = 4;
/// Columns that the measured recovery computes.
const MEASURED_WANTED: usize = 1;

/// Numbers of CPU threads that crossovers are reported for.
const REPORTED_THREADS: [usize; 3] = [1, 4, 16];

/// Kinds of work that cost differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Parities, and the hashes of all columns. Updates of parities count as this.
    EncodeHash,
    /// Columns from others, without hashes.
    Encode,
    /// Missing columns, and the hashes of all.
    RecoverHash,
    /// Hashes only.
    Hash,
}

impl Class {
    /// All of them, in the order of [`Costs::classes`].
    pub const ALL: [Class; 4] = [Class::EncodeHash, Class::Encode, Class::RecoverHash, Class::Hash];

    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Class::EncodeHash => "encode_hash",
            Class::Encode => "encode",
            Class::RecoverHash => "recover_hash",
            Class::Hash => "hash",
        }
    }
}

/// Bytes of input by class.
pub(super) type Load = [u64; Class::ALL.len()];

/// How long a batch takes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Bytes of all inputs.
    pub bytes: u64,
    /// Time from the start of the batch until its results are in host memory.
    pub seconds: f64,
}

/// What one class of work costs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClassCosts {
    /// Which.
    pub class: Class,
    /// On the device, by ascending size. At least one.
    pub batches: Vec<Point>,
    /// On one thread of this CPU, per byte of input.
    pub cpu_seconds_per_byte: f64,
}

/// What work costs on a device and on this CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    /// One entry a class, in the order of [`Class::ALL`].
    pub classes: [ClassCosts; Class::ALL.len()],
}

/// From which size on a device is as fast as a number of threads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crossover {
    /// The class of work.
    pub class: Class,
    /// Number of CPU threads that it is compared with.
    pub threads: usize,
    /// Size of the smallest batch, measured or interpolated, in bytes of input; None: the threads
    /// are faster at any size.
    pub bytes: Option<u64>,
}

impl Costs {
    /// Costs of a device that takes `latency` seconds and then does `bytes_per_second`, beside a
    /// CPU thread that does `cpu_bytes_per_second`, for all classes.
    #[must_use]
    pub fn linear(latency: f64, bytes_per_second: f64, cpu_bytes_per_second: f64) -> Costs {
        let point = |bytes: u64| Point { bytes, seconds: latency + bytes as f64 / bytes_per_second };
        Costs {
            classes: Class::ALL.map(|class| ClassCosts {
                class,
                batches: [4 << 10, 64 << 10, 1 << 20, 64 << 20].map(point).to_vec(),
                cpu_seconds_per_byte: cpu_bytes_per_second.recip(),
            }),
        }
    }

    /// Whether the tables can be used: one for each class, sizes ascending, all figures positive.
    #[must_use]
    pub fn are_usable(&self) -> bool {
        let positive = |figure: f64| figure.is_finite() && figure > 0.0;
        self.classes.iter().zip(Class::ALL).all(|(costs, class)| {
            costs.class == class
                && positive(costs.cpu_seconds_per_byte)
                && costs.batches.first().is_some_and(|point| point.bytes > 0)
                && costs.batches.windows(2).all(|pair| pair[0].bytes < pair[1].bytes)
                && costs.batches.iter().all(|point| positive(point.seconds))
        })
    }

    /// Estimated seconds of a batch on the device: linear between two sizes, constant below the
    /// smallest, proportional beyond the largest.
    #[must_use]
    pub fn device_seconds(&self, class: Class, bytes: u64) -> f64 {
        let points = &self.classes[class as usize].batches;
        let next = points.partition_point(|point| point.bytes < bytes);
        match (next.checked_sub(1).map(|before| points[before]), points.get(next)) {
            (None, Some(first)) => first.seconds,
            (Some(before), Some(after)) => {
                let share = (bytes - before.bytes) as f64 / (after.bytes - before.bytes) as f64;
                before.seconds + share * (after.seconds - before.seconds)
            }
            (Some(last), None) => last.seconds * bytes as f64 / last.bytes as f64,
            (None, None) => f64::INFINITY,
        }
    }

    /// Bytes per second of a device under full load.
    fn device_rate(&self, class: Class) -> f64 {
        self.classes[class as usize].batches.last().map_or(0.0, |point| point.bytes as f64 / point.seconds)
    }

    /// Estimated seconds per byte of input on one CPU thread: the measured figure, with coding
    /// scaled by the number of outputs, and hashing by outputs per input.
    fn cpu_seconds_per_byte(&self, demand: Demand) -> f64 {
        let measured = |class: Class| self.classes[class as usize].cpu_seconds_per_byte;
        let (parity, data) = (MEASURED_PARITY as f64, MEASURED_DATA as f64);
        let outputs = demand.outputs as f64;
        let ratio = outputs / demand.inputs.max(1) as f64;
        let base = measured(demand.class);
        let (coding, hashing) = match demand.class {
            Class::EncodeHash => (outputs / parity - 1.0, ratio - parity / data),
            Class::Encode => (outputs / parity - 1.0, 0.0),
            Class::RecoverHash => {
                let wanted = MEASURED_WANTED as f64;
                ((outputs - wanted) / parity, ratio - wanted / data)
            }
            Class::Hash => (0.0, 0.0),
        };
        let corrected = base + coding * measured(Class::Encode) + hashing * measured(Class::Hash);
        // Contradictory measurements must not make work free.
        corrected.max(base / 16.0)
    }

    /// From which size on the device is as fast as several numbers of threads, for every class.
    #[must_use]
    pub fn crossovers(&self) -> Vec<Crossover> {
        let all = Class::ALL.iter().flat_map(|&class| REPORTED_THREADS.map(|threads| (class, threads)));
        all.map(|(class, threads)| Crossover { class, threads, bytes: self.crossover(class, threads) })
            .collect()
    }

    /// See [`Costs::crossovers`]. Sizes are tried in steps of a quarter, since tables may cross
    /// more than once.
    fn crossover(&self, class: Class, threads: usize) -> Option<u64> {
        let costs = &self.classes[class as usize];
        let (first, last) = (costs.batches.first()?.bytes, costs.batches.last()?.bytes);
        let cpu = costs.cpu_seconds_per_byte / threads.max(1) as f64;
        let mut sizes = std::iter::successors(Some(first), |&bytes| {
            (bytes < last).then(|| bytes.saturating_add((bytes / 4).max(4096)).min(last))
        });
        sizes.find(|&bytes| self.device_seconds(class, bytes) <= bytes as f64 * cpu)
    }
}

/// The properties of work that its cost depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub(super) class: Class,
    /// Columns that the outputs are made from.
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl Demand {
    pub(super) fn of(kind: &Kind) -> Demand {
        let Some(transform) = &kind.transform else {
            return Demand { class: Class::Hash, inputs: 1, outputs: 0 };
        };
        let class = match (transform.form(), kind.hash) {
            (_, false) => Class::Encode,
            (Form::Recover { .. }, true) => Class::RecoverHash,
            (Form::Encode | Form::Update { .. }, true) => Class::EncodeHash,
        };
        Demand { class, inputs: transform.inputs(), outputs: transform.outputs() }
    }
}

/// The CPU's load, and its threads.
#[derive(Clone, Copy, Debug)]
pub struct CpuLoad {
    /// Threads that do jobs of this caller. 0 counts as 1: the caller's own.
    pub threads: usize,
    /// Bytes of the jobs that wait for them.
    pub waiting_bytes: usize,
}

/// Who does some work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Take,
    /// Too few bytes: even an idle device would be slower.
    Small,
    /// A device would be as fast, but has enough to do.
    Spill,
}

/// How much longer than a device is measured to take for a batch who waits for it waits: for the threads
/// and processes on the way, and for whatever else disturbs. In seconds; near the longest of a hundred
/// rather than the mean, since it is the slow ones that clients notice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Excess(f64);

/// The part of a longer delay that counts at once, and of a shorter one: so the estimate is exceeded by
/// one delay in some dozens.
const EXCESS_RISES: f64 = 0.25;
/// See [`EXCESS_RISES`].
const EXCESS_FALLS: f64 = 1.0 / 256.0;
/// By how much it falls when it alone keeps work from a device: or one bad moment would do so for ever. Work
/// goes there again a few times in some thousand, too seldom to show.
const EXCESS_FADES: f64 = 1.0 / 2048.0;

impl Excess {
    /// Learns from a batch that found the device idle: how long its jobs took, and how long they were to.
    pub(super) fn learn(&mut self, took: f64, expected: f64) {
        let beyond = (took - expected).max(0.0) - self.0;
        self.0 += beyond * if beyond > 0.0 { EXCESS_RISES } else { EXCESS_FALLS };
    }

    /// It alone has kept a batch from the device.
    pub(super) fn fade(&mut self) {
        self.0 *= 1.0 - EXCESS_FADES;
    }
}

/// Decides for one batch of `bytes`. `devices`: costs, load and excess of all that run; `waiting`: load
/// that waits for any of them.
pub(super) fn decide<'a>(
    devices: impl Iterator<Item = (&'a Costs, &'a Load, Excess)>,
    waiting: &Load,
    demand: Demand,
    bytes: u64,
    cpu: CpuLoad,
) -> Verdict {
    let (mut ahead, mut rates) = (*waiting, [0.0; Class::ALL.len()]);
    let (mut alone, mut on_cpu) = (f64::INFINITY, f64::INFINITY);
    let waiting_cpu = cpu.waiting_bytes as f64 + bytes as f64;
    for (costs, load, excess) in devices {
        for class in Class::ALL {
            ahead[class as usize] += load[class as usize];
            rates[class as usize] += costs.device_rate(class);
        }
        alone = alone.min(costs.device_seconds(demand.class, bytes) + excess.0);
        on_cpu = on_cpu.min(waiting_cpu * costs.cpu_seconds_per_byte(demand) / cpu.threads.max(1) as f64);
    }
    if alone.is_infinite() || alone > on_cpu {
        return Verdict::Small;
    }
    let backlog: f64 = ahead
        .iter()
        .zip(rates)
        .filter(|(bytes, _)| **bytes > 0)
        .map(|(&bytes, rate)| bytes as f64 / rate)
        .sum();
    if backlog + alone <= on_cpu { Verdict::Take } else { Verdict::Spill }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NOTHING: Load = [0; 4];

    /// 1 ms and 10 GB/s beside threads of 1 GB/s.
    fn costs() -> Costs {
        Costs::linear(1e-3, 10e9, 1e9)
    }

    fn verdict(load: Load, waiting: Load, bytes: u64, threads: usize, waiting_bytes: usize) -> Verdict {
        let demand = Demand { class: Class::EncodeHash, inputs: 8, outputs: 4 };
        let cpu = CpuLoad { threads, waiting_bytes };
        decide([(&costs(), &load, Excess::default())].into_iter(), &waiting, demand, bytes, cpu)
    }

    #[test]
    fn small_batches_stay_on_the_cpu_and_large_ones_go() {
        assert_eq!(verdict(NOTHING, NOTHING, 64 << 10, 1, 0), Verdict::Small);
        assert_eq!(verdict(NOTHING, NOTHING, 16 * MIB, 1, 0), Verdict::Take);
        // 16 threads do 16 GB/s: no size is worth it. None at all count as one.
        assert_eq!(verdict(NOTHING, NOTHING, 64 * MIB, 16, 0), Verdict::Small);
        assert_eq!(verdict(NOTHING, NOTHING, 16 * MIB, 0, 0), Verdict::Take);
    }

    #[test]
    fn what_waits_for_the_cpu_sends_even_small_work_to_a_device() {
        assert_eq!(verdict(NOTHING, NOTHING, 64 << 10, 1, 4 << 20), Verdict::Take);
        assert_eq!(verdict(NOTHING, NOTHING, 64 << 10, 1, 512 << 10), Verdict::Small);
    }

    #[test]
    fn a_device_with_more_to_do_than_the_cpu_would_take_is_spared() {
        // 16 MiB take 16.8 ms on a thread and 2.7 ms here: 14 ms may lie ahead, 117 MiB, wherever
        // they wait.
        let ahead = |mib: u64| [0, 0, mib * MIB, 0];
        assert_eq!(verdict(ahead(110), NOTHING, 16 * MIB, 1, 0), Verdict::Take);
        assert_eq!(verdict(ahead(160), NOTHING, 16 * MIB, 1, 0), Verdict::Spill);
        assert_eq!(verdict(ahead(80), ahead(80), 16 * MIB, 1, 0), Verdict::Spill);
        assert_eq!(verdict(ahead(160), NOTHING, 16 * MIB, 1, 16 << 20), Verdict::Take);
    }

    #[test]
    fn what_a_launch_costs_a_waiting_client_is_learnt_and_forgotten() {
        let demand = Demand { class: Class::Hash, inputs: 1, outputs: 0 };
        // 4 MiB take 1.42 ms on the device, and 2.1 ms on two threads.
        let verdict = |excess, waiting_bytes| {
            let cpu = CpuLoad { threads: 2, waiting_bytes };
            decide([(&costs(), &NOTHING, excess)].into_iter(), &NOTHING, demand, 4 * MIB, cpu)
        };
        let mut excess = Excess::default();
        assert_eq!(verdict(excess, 0), Verdict::Take);
        // One of twenty takes 3 ms longer: who waits alone is better off with the threads, who waits for
        // much is not.
        for nth in 0..400 {
            excess.learn(if nth % 20 == 0 { 4.4e-3 } else { 1.4e-3 }, 1.4e-3);
        }
        assert!((1e-3..3e-3).contains(&excess.0), "{excess:?}");
        assert_eq!((verdict(excess, 0), verdict(excess, 16 << 20)), (Verdict::Small, Verdict::Take));
        let fades = (0..).take_while(|_| {
            excess.fade();
            verdict(excess, 0) == Verdict::Small
        });
        assert!((1000..10_000).contains(&fades.count()), "it is tried again, but seldom");
    }

    #[test]
    fn a_second_device_halves_what_lies_ahead() {
        let (costs, demand) = (costs(), Demand { class: Class::Hash, inputs: 1, outputs: 0 });
        let (busy, cpu) = ([160 * MIB, 0, 0, 0], CpuLoad { threads: 1, waiting_bytes: 0 });
        let none = Excess::default();
        let alone = decide([(&costs, &busy, none)].into_iter(), &NOTHING, demand, 16 * MIB, cpu);
        let both = decide(
            [(&costs, &busy, none), (&costs, &NOTHING, none)].into_iter(),
            &NOTHING,
            demand,
            16 * MIB,
            cpu,
        );
        let nobody = decide(std::iter::empty(), &NOTHING, demand, 16 * MIB, cpu);
        assert_eq!((alone, both, nobody), (Verdict::Spill, Verdict::Take, Verdict::Small));
    }

    #[test]
    fn estimates_follow_the_table_between_below_and_beyond_its_sizes() {
        let mut costs = costs();
        let points = [(MIB, 1.0), (3 * MIB, 2.0)];
        costs.classes[1].batches = points.map(|(bytes, seconds)| Point { bytes, seconds }).to_vec();
        let seconds = |bytes| costs.device_seconds(Class::Encode, bytes);
        assert_eq!((seconds(1), seconds(MIB), seconds(2 * MIB), seconds(6 * MIB)), (1.0, 1.0, 1.5, 4.0));
    }

    #[test]
    fn more_outputs_cost_the_cpu_more() {
        let mut costs = costs();
        for (class, seconds) in [(Class::EncodeHash, 2.5), (Class::Encode, 1.0), (Class::Hash, 1.0)] {
            costs.classes[class as usize].cpu_seconds_per_byte = seconds;
        }
        let seconds = |inputs, outputs| {
            costs.cpu_seconds_per_byte(Demand { class: Class::EncodeHash, inputs, outputs })
        };
        assert!((seconds(8, 4) - 2.5).abs() < 1e-9);
        assert!((seconds(4, 2) - 2.0).abs() < 1e-9, "half the coding, as much hashing by input");
        assert!((seconds(8, 8) - 4.0).abs() < 1e-9, "twice the coding, half an input's hash more");
    }

    #[test]
    fn the_crossover_is_where_the_device_begins_to_win() {
        let crossovers = costs().crossovers();
        assert_eq!(crossovers.len(), 4 * REPORTED_THREADS.len());
        // 1 ms + n / 10 GB/s <= n / 1 GB/s from 1.11 MB on; against 16 threads never.
        let one = crossovers[0].bytes.expect("it wins against one thread");
        assert!((1_111_111..1_500_000).contains(&one), "{one}");
        assert_eq!((crossovers[2].threads, crossovers[2].bytes), (16, None));
    }

    #[test]
    fn sizes_that_no_device_has_have_crossovers_too() {
        let mut costs = costs();
        for class in &mut costs.classes {
            class.batches = vec![Point { bytes: 1, seconds: 1e9 }, Point { bytes: u64::MAX, seconds: 1e10 }];
            class.cpu_seconds_per_byte = 1e-300;
        }
        assert!(costs.are_usable());
        assert!(costs.crossovers().iter().all(|crossover| crossover.bytes.is_none()));
    }

    #[test]
    fn tables_that_mean_nothing_are_told() {
        assert!(costs().are_usable());
        let mut wrong = [costs(), costs(), costs(), costs()];
        wrong[0].classes[3].batches.clear();
        wrong[1].classes[2].batches[1].seconds = f64::NAN;
        wrong[2].classes[1].batches.swap(0, 1);
        wrong[3].classes[0].cpu_seconds_per_byte = 0.0;
        assert!(wrong.iter().all(|costs| !costs.are_usable()));
    }
}
