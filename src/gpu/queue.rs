//! The jobs that wait for devices, and the load of each device. Several devices take from it, so
//! that a slower one takes less; the kind of jobs that has waited longest goes first.
//!
//! Invariant: jobs wait only while a device runs. Must not know of threads or clocks.

use std::collections::VecDeque;
use std::sync::Arc;

use calpe_core::codec::CodecJob;

use super::answer::Ticket;
use super::batch::{Batch, Kind};
use super::policy::{self, Class, Costs, CpuLoad, Demand, Excess, Load, Verdict};

/// See the module's head.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) lanes: Vec<LaneLoad>,
    kinds: Vec<WaitingKind>,
    waiting: Load,
    arrivals: u64,
    pub(super) closing: bool,
}

/// A device as the queue sees it.
#[derive(Default)]
pub(super) struct LaneLoad {
    /// Whether it runs.
    pub(super) up: bool,
    /// Whether it has an idle slot, found nothing to do and sleeps.
    pub(super) hungry: bool,
    pub(super) costs: Option<Arc<Costs>>,
    pub(super) slot_bytes: usize,
    load: Load,
    excess: Excess,
}

struct WaitingKind {
    kind: Kind,
    class: Class,
    jobs: VecDeque<Waiting>,
}

struct Waiting {
    arrival: u64,
    ticket: Ticket,
    job: CodecJob,
}

/// Jobs that a device gets at once.
pub(super) struct Taken {
    pub(super) batch: Batch,
    pub(super) tickets: Vec<Ticket>,
    pub(super) class: Class,
    pub(super) input_bytes: u64,
    /// The seconds that it should take, if the device had nothing else to do and nothing waits behind it.
    pub(super) expected: Option<f64>,
}

impl Queue {
    /// Whether any device runs.
    pub(super) fn is_up(&self) -> bool {
        self.lanes.iter().any(|lane| lane.up)
    }

    /// The most that a job may take of a slot, so that every running device can do it.
    pub(super) fn slot_bytes(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.up).map(|lane| lane.slot_bytes).min().unwrap_or(0)
    }

    /// Whether `bytes` more of a kind should wait here.
    pub(super) fn decide(&mut self, kind: &Kind, bytes: u64, cpu: CpuLoad) -> Verdict {
        let demand = Demand::of(kind);
        let verdict = self.verdict(demand, bytes, cpu, |lane| lane.excess);
        if verdict == Verdict::Small
            && self.verdict(demand, bytes, cpu, |_| Excess::default()) != Verdict::Small
        {
            self.lanes.iter_mut().for_each(|lane| lane.excess.fade());
        }
        verdict
    }

    fn verdict(
        &self,
        demand: Demand,
        bytes: u64,
        cpu: CpuLoad,
        excess: impl Fn(&LaneLoad) -> Excess,
    ) -> Verdict {
        let lanes = self.lanes.iter().filter(|lane| lane.up);
        let devices = lanes.filter_map(|lane| Some((&**lane.costs.as_ref()?, &lane.load, excess(lane))));
        policy::decide(devices, &self.waiting, demand, bytes, cpu)
    }

    /// The index of a kind, for [`Queue::push`] until the next [`Queue::take`].
    pub(super) fn place(&mut self, kind: &Kind) -> usize {
        if let Some(place) = self.kinds.iter().position(|waiting| waiting.kind.same(kind)) {
            return place;
        }
        let (kind, class) = (kind.clone(), Demand::of(kind).class);
        self.kinds.push(WaitingKind { kind, class, jobs: VecDeque::new() });
        self.kinds.len() - 1
    }

    /// Adds a job of the kind at `place`.
    pub(super) fn push(&mut self, place: usize, ticket: Ticket, job: CodecJob) {
        let waiting = &mut self.kinds[place];
        self.waiting[waiting.class as usize] += job.input_bytes() as u64;
        waiting.jobs.push_back(Waiting { arrival: self.arrivals, ticket, job });
        self.arrivals += 1;
    }

    /// All jobs of the kind that has waited longest, up to a slot of the device, but at least one
    /// job. If there is none, the device counts as hungry.
    pub(super) fn take(&mut self, lane: usize) -> Option<Taken> {
        let oldest = |waiting: &WaitingKind| waiting.jobs.front().map_or(u64::MAX, |job| job.arrival);
        let found =
            self.kinds.iter().enumerate().min_by_key(|(_, waiting)| oldest(waiting)).map(|(at, _)| at);
        let status = &mut self.lanes[lane];
        status.hungry = found.is_none();
        let at = found?;
        let WaitingKind { kind, class, jobs: waiting } = &mut self.kinds[at];
        let (class, mut room, mut input_bytes) = (*class, status.slot_bytes, 0);
        let (mut jobs, mut tickets) = (Vec::new(), Vec::new());
        while let Some(next) = waiting.front() {
            let bytes = kind.slot_bytes(&next.job);
            if bytes > room && !jobs.is_empty() {
                break;
            }
            room = room.saturating_sub(bytes);
            input_bytes += next.job.input_bytes() as u64;
            let Some(Waiting { ticket, job, .. }) = waiting.pop_front() else { break };
            jobs.push(job);
            tickets.push(ticket);
        }
        let batch = Batch::new(kind.clone(), jobs);
        if waiting.is_empty() {
            self.kinds.swap_remove(at);
        }
        self.waiting[class as usize] -= input_bytes;
        let alone = status.load == Load::default() && self.waiting == Load::default();
        let costs = status.costs.as_ref().filter(|_| alone);
        let expected = costs.map(|costs| costs.device_seconds(class, input_bytes));
        status.load[class as usize] += input_bytes;
        Some(Taken { batch, tickets, class, input_bytes, expected })
    }

    /// Counts a batch of a device as done.
    pub(super) fn finished(&mut self, lane: usize, class: Class, input_bytes: u64) {
        let load = &mut self.lanes[lane].load[class as usize];
        // The load is 0 when the device was given up meanwhile.
        *load = load.saturating_sub(input_bytes);
    }

    /// Learns how long the jobs of a batch took from their offer to their answer, in seconds.
    pub(super) fn learn(&mut self, lane: usize, took: f64, expected: f64) {
        self.lanes[lane].excess.learn(took, expected);
    }

    /// The hungry device that would be done first with the waiting jobs; it stops counting as
    /// hungry.
    pub(super) fn wake_one(&mut self) -> Option<usize> {
        let first = self.kinds.iter().find(|waiting| !waiting.jobs.is_empty())?;
        let (class, bytes) = (first.class, self.waiting[first.class as usize]);
        let seconds = |lane: &LaneLoad| {
            let costs = lane
                .costs
                .as_ref()
                .map(|costs| costs.device_seconds(class, bytes + lane.load.iter().sum::<u64>()));
            costs.unwrap_or(f64::INFINITY)
        };
        let hungry = self.lanes.iter().enumerate().filter(|(_, lane)| lane.up && lane.hungry);
        let (lane, _) = hungry.min_by(|(_, one), (_, other)| seconds(one).total_cmp(&seconds(other)))?;
        self.lanes[lane].hungry = false;
        Some(lane)
    }

    /// A device runs from now on.
    pub(super) fn up(&mut self, lane: usize, costs: Arc<Costs>, slot_bytes: usize) {
        self.lanes[lane] = LaneLoad { up: true, costs: Some(costs), slot_bytes, ..LaneLoad::default() };
    }

    /// A device runs no longer. Returns the waiting jobs when no other device runs.
    pub(super) fn down(&mut self, lane: usize) -> Vec<(Ticket, CodecJob)> {
        let status = &mut self.lanes[lane];
        (status.up, status.hungry, status.load) = (false, false, Load::default());
        if self.is_up() { Vec::new() } else { self.drain() }
    }

    /// All that waits.
    pub(super) fn drain(&mut self) -> Vec<(Ticket, CodecJob)> {
        self.waiting = Load::default();
        let kinds = std::mem::take(&mut self.kinds).into_iter();
        kinds.flat_map(|waiting| waiting.jobs).map(|waiting| (waiting.ticket, waiting.job)).collect()
    }

    /// How many jobs wait, and bytes of their inputs.
    pub(super) fn waiting(&self) -> (usize, u64) {
        (self.kinds.iter().map(|waiting| waiting.jobs.len()).sum(), self.waiting.iter().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::super::answer::{Answer, Tag};
    use super::*;
    use calpe_core::block_io::Pool;
    use calpe_core::codec::{BlockHasher, Codec, CodedColumns, Column, Outputs};
    use std::time::Instant;

    struct Nobody;
    impl Answer for Nobody {
        fn done(&self, _: Tag, _: CodedColumns) {}
    }

    fn queue(lanes: &[(f64, usize)]) -> Queue {
        let mut queue = Queue::default();
        for (lane, &(rate, slot_bytes)) in lanes.iter().enumerate() {
            queue.lanes.push(LaneLoad::default());
            queue.up(lane, Arc::new(Costs::linear(1e-5, rate, 1e9)), slot_bytes);
        }
        queue
    }

    fn push(queue: &mut Queue, tag: u64, job: CodecJob) {
        let place = queue.place(&Kind::of(&job).expect("fit"));
        queue.push(place, Ticket { tag: Tag(tag), answer: Arc::new(Nobody), since: Instant::now() }, job);
    }

    fn hash(pool: &Pool, blocks: usize) -> CodecJob {
        let inputs = vec![Column::Owned(pool.alloc(blocks * 4096))];
        CodecJob { transform: None, hasher: Some(BlockHasher::Blake3), inputs, outputs: Outputs::Hashed }
    }

    fn encode(pool: &Pool, parity: usize) -> CodecJob {
        CodecJob {
            transform: Some(Codec::new(2, parity).expect("a geometry").encoding()),
            hasher: None,
            inputs: (0..2).map(|_| Column::Owned(pool.alloc(4096))).collect(),
            outputs: Outputs::Into((0..parity).map(|_| pool.alloc(4096)).collect()),
        }
    }

    fn tags(taken: Option<Taken>) -> Vec<u64> {
        taken.map_or(Vec::new(), |taken| taken.tickets.iter().map(|ticket| ticket.tag.0).collect())
    }

    #[test]
    fn the_kind_that_has_waited_longest_goes_first_with_all_of_it() {
        let (pool, mut queue) = (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 1 << 20)]));
        let jobs = [encode(&pool, 2), hash(&pool, 1), encode(&pool, 1), encode(&pool, 2), hash(&pool, 2)];
        jobs.into_iter().zip(0..).for_each(|(job, tag)| push(&mut queue, tag, job));
        assert_eq!(queue.waiting(), (5, 9 * 4096));
        assert_eq!([(); 4].map(|()| tags(queue.take(0))), [vec![0, 3], vec![1, 4], vec![2], vec![]]);
        assert!(queue.lanes[0].hungry && queue.waiting() == (0, 0));
    }

    #[test]
    fn a_stream_of_one_kind_does_not_starve_another() {
        let (pool, mut queue) = (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 8 * 4096)]));
        (0..5).for_each(|tag| push(&mut queue, tag, hash(&pool, 4)));
        push(&mut queue, 100, encode(&pool, 1));
        assert_eq!(tags(queue.take(0)), [0, 1]);
        (5..9).for_each(|tag| push(&mut queue, tag, hash(&pool, 4)));
        assert_eq!([(); 3].map(|()| tags(queue.take(0))), [vec![2, 3], vec![4, 5], vec![100]]);
    }

    #[test]
    fn a_batch_fits_a_slot_and_is_never_empty() {
        let (pool, mut queue) = (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 4 * 4096)]));
        [3, 1, 2, 9, 1]
            .into_iter()
            .zip(0..)
            .for_each(|(blocks, tag)| push(&mut queue, tag, hash(&pool, blocks)));
        assert_eq!([(); 4].map(|()| tags(queue.take(0))), [vec![0, 1], vec![2], vec![3], vec![4]]);
    }

    #[test]
    fn the_hungry_device_that_is_through_first_is_woken_once() {
        let (pool, mut queue) =
            (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 1 << 20), (9e9, 1 << 20)]));
        assert!(queue.take(0).is_none() && queue.take(1).is_none() && queue.wake_one().is_none());
        push(&mut queue, 0, hash(&pool, 1));
        assert_eq!([queue.wake_one(), queue.wake_one(), queue.wake_one()], [Some(1), Some(0), None]);
        queue.lanes[1].hungry = true;
        queue.down(1);
        assert_eq!(queue.wake_one(), None, "it runs no longer");
    }

    #[test]
    fn what_waits_stays_until_the_last_device_is_down() {
        let (pool, mut queue) =
            (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 1 << 20), (2e9, 1 << 16)]));
        assert_eq!(queue.slot_bytes(), 1 << 16);
        push(&mut queue, 7, hash(&pool, 1));
        assert!(queue.down(1).is_empty());
        assert_eq!(queue.slot_bytes(), 1 << 20);
        assert_eq!(queue.down(0).len(), 1);
        assert_eq!((queue.waiting(), queue.is_up(), queue.slot_bytes()), ((0, 0), false, 0));
    }

    #[test]
    fn only_a_batch_that_has_the_device_to_itself_says_what_a_launch_costs() {
        let (pool, mut queue) = (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 1 << 20)]));
        push(&mut queue, 1, hash(&pool, 10));
        let alone = queue.take(0).expect("a job waits");
        let expected = alone.expected.expect("it is alone");
        assert!((expected - 5.1e-5).abs() < 1e-6, "{expected}");
        push(&mut queue, 2, hash(&pool, 10));
        assert!(queue.take(0).expect("a job waits").expected.is_none(), "another is under way");
        queue.finished(0, alone.class, alone.input_bytes * 2);
        push(&mut queue, 3, hash(&pool, 1));
        push(&mut queue, 4, encode(&pool, 1));
        assert!(queue.take(0).expect("a job waits").expected.is_none(), "another waits");
    }

    #[test]
    fn load_is_what_was_taken_and_is_not_finished() {
        let (pool, mut queue) = (Pool::new(1 << 20).expect("memory"), queue(&[(1e9, 1 << 20)]));
        push(&mut queue, 1, hash(&pool, 3));
        let taken = queue.take(0).expect("a job waits");
        assert_eq!(queue.lanes[0].load[Class::Hash as usize], 3 * 4096);
        queue.finished(0, taken.class, taken.input_bytes);
        queue.finished(0, taken.class, taken.input_bytes);
        assert_eq!(queue.lanes[0].load, Load::default());
    }
}
