//! The runtime of GPUs against devices in memory that fail in every way: each job is answered once, with the
//! bytes that the CPU computes, and nothing that a lost device does later is ever seen.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use calpe_core::block_io::{BufMut, Pool};
use calpe_core::codec::{BlockHasher, Codec, CodecJob, CodedColumns, Column, Outputs};
use calpe_gpu::fake::{FakeDevice, FakeDriver, Fault};
use calpe_gpu::{
    Answer, CalibrationSource, Costs, CpuLoad, DeviceReport, DeviceState, Drill, GpuConfig, GpuError,
    GpuEventKind, GpuReport, GpuRuntime, Mode, Tag,
};

const BLOCK: usize = 4096;

/// Longer than anything here takes on the slowest machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// Batches that the self-test of a device consists of.
const SELF_TEST_BATCHES: usize = 6;

/// Whoever looks at the threads of the process does so alone.
static THREADS: RwLock<()> = RwLock::new(());

pub(super) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Everything that was answered.
#[derive(Default)]
pub(super) struct Answers {
    done: Mutex<BTreeMap<u64, Vec<CodedColumns>>>,
    more: Condvar,
}

impl Answer for Answers {
    fn done(&self, tag: Tag, columns: CodedColumns) {
        self.done.lock().unwrap().entry(tag.0).or_default().push(columns);
        self.more.notify_all();
    }
}

impl Answers {
    pub(super) fn wait(&self, count: usize) {
        let done = self.done.lock().unwrap();
        let enough = self.more.wait_timeout_while(done, PATIENCE, |done| done.len() < count).unwrap();
        assert!(!enough.1.timed_out(), "{} of {count} jobs were answered", enough.0.len());
    }

    /// Takes all answers, each of which came once.
    pub(super) fn take(&self) -> Vec<(u64, CodedColumns)> {
        let done = std::mem::take(&mut *self.done.lock().unwrap());
        let once = |(tag, mut all): (u64, Vec<CodedColumns>)| {
            assert_eq!(all.len(), 1, "job {tag} was answered more than once");
            (tag, all.remove(0))
        };
        done.into_iter().map(once).collect()
    }
}

/// A runtime on fake devices, and who waits for it.
struct Bench {
    runtime: GpuRuntime,
    driver: FakeDriver,
    pool: Pool,
    answers: Arc<Answers>,
    answer: Arc<dyn Answer>,
}

/// Devices that are worth it for anything.
pub(super) fn eager() -> Vec<Costs> {
    vec![Costs::linear(1e-9, 1e15, 1.0)]
}

pub(super) fn config() -> GpuConfig {
    GpuConfig {
        hang_after: Duration::from_secs(20),
        reopen_after: ms(10),
        reopen_after_max: ms(80),
        given_up_max: u32::MAX,
        ..GpuConfig::default()
    }
}

fn bench(config: &GpuConfig, devices: Vec<FakeDevice>, costs: Vec<Costs>) -> Bench {
    let (driver, pool) = (FakeDriver::new(devices), Pool::new(64 << 20).expect("memory"));
    let given = CalibrationSource::Given(costs);
    let runtime = GpuRuntime::start(config, Arc::new(driver.clone()), std::slice::from_ref(&pool), given)
        .expect("devices");
    let answers = Arc::new(Answers::default());
    let answer: Arc<dyn Answer> = Arc::clone(&answers) as Arc<dyn Answer>;
    Bench { runtime, driver, pool, answers, answer }
}

const IDLE: CpuLoad = CpuLoad { threads: 1, waiting_bytes: 0 };

impl Bench {
    fn offer(&self, jobs: Vec<(Tag, CodecJob)>) -> Vec<(Tag, CodecJob)> {
        self.runtime.offer(jobs, IDLE, &self.answer)
    }

    /// Offers jobs that must be taken.
    fn give(&self, tags: impl IntoIterator<Item = u64>) {
        for tag in tags {
            assert!(self.offer(vec![(Tag(tag), job(&self.pool, tag))]).is_empty(), "job {tag} is taken");
        }
    }

    /// The same in one offer, before which nothing of it can fail.
    fn give_at_once(&self, tags: impl IntoIterator<Item = u64>) {
        let jobs = tags.into_iter().map(|tag| (Tag(tag), job(&self.pool, tag))).collect();
        assert!(self.offer(jobs).is_empty(), "all are taken");
    }

    /// Waits for so many answers, and checks them all.
    fn expect(&self, count: usize) -> Vec<(u64, CodedColumns)> {
        self.answers.wait(count);
        let answered = self.answers.take();
        assert_eq!(answered.len(), count);
        answered.iter().for_each(|(tag, columns)| check(*tag, columns));
        answered
    }

    fn until(&self, what: &str, holds: impl Fn(&Bench) -> bool) {
        let started = Instant::now();
        while !holds(self) {
            assert!(started.elapsed() < PATIENCE, "{what}: {:#?}", self.runtime.report());
            thread::sleep(ms(1));
        }
    }

    fn is_running(&self, device: usize) -> bool {
        self.runtime.report().devices[device].state == DeviceState::Running
    }

    fn kinds(&self) -> Vec<GpuEventKind> {
        self.runtime.events().into_iter().map(|event| event.kind).collect()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !thread::panicking() {
            assert_eq!(self.driver.violations(), Vec::<String>::new());
        }
    }
}

fn column(pool: &Pool, seed: u64, nth: usize, blocks: usize) -> BufMut {
    let (mut buf, mut state) = (pool.alloc(blocks * BLOCK), seed.wrapping_mul(977) + nth as u64);
    for chunk in buf.chunks_exact_mut(8) {
        chunk.copy_from_slice(&random(&mut state).to_le_bytes());
    }
    buf
}

/// The job of a number: each kind that arrays have, of lengths that differ.
pub(super) fn job(pool: &Pool, seed: u64) -> CodecJob {
    let codec = Codec::new(4, 2).expect("a geometry");
    let blocks = 1 + (seed / 7 % 4) as usize;
    let blake = Some(BlockHasher::Blake3);
    let (transform, hasher, extra, kept) = match seed % 7 {
        0 | 1 => (codec.encoding(), blake, 0, true),
        2 => (codec.encoding(), None, 0, true),
        3 => (codec.recovery(&[1, 2, 4, 5], &[0, 3]).expect("a pattern"), blake, 1, true),
        4 => (codec.updating(&[(seed / 28 % 2) as usize]).expect("a column"), blake, 0, true),
        5 => (codec.encoding(), blake, 2, false),
        _ => {
            let inputs = (0..3).map(|nth| Column::Owned(column(pool, seed, nth, blocks + nth))).collect();
            return CodecJob { transform: None, hasher: blake, inputs, outputs: Outputs::Hashed };
        }
    };
    let inputs = (0..transform.inputs() + extra).map(|nth| {
        let column = column(pool, seed, nth, blocks);
        if nth % 2 == 0 { Column::Owned(column) } else { Column::Shared(column.freeze()) }
    });
    let inputs = inputs.collect();
    let outputs = (0..transform.outputs()).map(|_| pool.alloc(blocks * BLOCK));
    let outputs = if kept { Outputs::Into(outputs.collect()) } else { Outputs::Hashed };
    CodecJob { transform: Some(transform), hasher, inputs, outputs }
}

/// Whether an answer is what the CPU makes of the job.
pub(super) fn check(tag: u64, columns: &CodedColumns) {
    let expected = job(&Pool::new(1 << 20).expect("memory"), tag).run();
    let inputs = |columns: &CodedColumns| columns.inputs.iter().map(|c| c.to_vec()).collect::<Vec<_>>();
    let outputs = |columns: &CodedColumns| columns.outputs.iter().map(|c| c.to_vec()).collect::<Vec<_>>();
    assert!(inputs(columns) == inputs(&expected), "inputs of job {tag}");
    assert!(outputs(columns) == outputs(&expected), "outputs of job {tag}");
    assert!(columns.hashes == expected.hashes, "hashes of job {tag}");
}

fn slow(latency: Duration) -> FakeDevice {
    FakeDevice { latency, ..FakeDevice::default() }
}

#[test]
fn jobs_of_all_kinds_and_lengths_are_done_in_batches_with_the_bytes_of_the_cpu() {
    let _threads = THREADS.read();
    let bench = bench(&config(), vec![slow(ms(20))], eager());
    let jobs = (0..200).map(|tag| (Tag(tag), job(&bench.pool, tag))).collect();
    assert!(bench.offer(jobs).is_empty());
    bench.give(200..280);
    bench.expect(280);
    let report = bench.runtime.report();
    let device = &report.devices[0];
    assert_eq!((report.decisions.taken, device.jobs, report.rerun_jobs), (280, 280, 0));
    assert!(device.batches < 100, "{} batches", device.batches);
    assert!(device.batch_latency.us_p50 >= 20_000 && device.batch_latency.us_max < 60_000_000);
    assert_eq!((report.waiting_jobs, report.waiting_bytes), (0, 0));
    let text = serde_json::to_string(&report).expect("a report is plain data");
    assert!(text.contains("\"state\":\"running\"") && text.contains("\"uuid\":\"fake-0\""), "{text}");
}

#[test]
fn what_no_device_can_do_or_should_do_comes_back_in_order() {
    let _threads = THREADS.read();
    let device = FakeDevice { slot_bytes: 1 << 20, ..slow(ms(150)) };
    // Said to take 0.1 ms and do 1 GB/s beside a CPU of 100 MB/s; in truth so slow that nothing ends
    // meanwhile.
    let bench = bench(&config(), vec![device], vec![Costs::linear(1e-4, 1e9, 1e8)]);
    let pool = &bench.pool;
    let of_blocks = |blocks: usize| {
        let inputs = vec![Column::Owned(pool.alloc_zeroed(blocks * BLOCK))];
        CodecJob { transform: None, hasher: Some(BlockHasher::Blake3), inputs, outputs: Outputs::Hashed }
    };
    let crc = || CodecJob { hasher: Some(BlockHasher::Crc32c), ..of_blocks(64) };
    let odd = || {
        let inputs = vec![Column::Owned(pool.alloc(64 * BLOCK - 1))];
        CodecJob { inputs, ..of_blocks(1) }
    };
    // A block takes 41 us on the CPU, and 104 us here.
    let jobs = [of_blocks(1), crc(), of_blocks(200), odd(), of_blocks(257)];
    let rest = bench.offer(jobs.into_iter().zip(0..).map(|(job, tag)| (Tag(tag), job)).collect());
    assert_eq!(
        rest.iter().map(|(tag, _)| tag.0).collect::<Vec<_>>(),
        [1, 3, 4],
        "small ones go with large ones"
    );
    let rest = bench.offer(vec![(Tag(9), of_blocks(1))]);
    assert_eq!(rest.len(), 1);
    let decisions = bench.runtime.report().decisions;
    assert_eq!((decisions.taken, decisions.hasher, decisions.shape, decisions.small), (2, 1, 2, 1));

    // The CPU would be through with one of these in 8.2 ms, in which the device does nine.
    let mut spilled = 0;
    for tag in 100..120 {
        spilled += bench.offer(vec![(Tag(tag), of_blocks(200))]).len() as u64;
    }
    let decisions = bench.runtime.report().decisions;
    assert!((9..=12).contains(&spilled), "{spilled} of 20");
    assert_eq!((decisions.spill, decisions.taken), (spilled, 22 - spilled));
    // With more waiting for the CPU it takes more.
    let busy = CpuLoad { threads: 1, waiting_bytes: 64 << 20 };
    assert!(bench.runtime.offer(vec![(Tag(200), of_blocks(1))], busy, &bench.answer).is_empty());
    bench.answers.wait(23 - spilled as usize);
}

#[test]
fn every_fault_costs_the_device_and_no_job() {
    let _threads = THREADS.read();
    let failing = [
        (Fault::Start, GpuEventKind::Failed),
        (Fault::Finish, GpuEventKind::Failed),
        (Fault::MissingDigest, GpuEventKind::Failed),
        (Fault::PanicStart, GpuEventKind::Failed),
        (Fault::PanicFinish, GpuEventKind::Failed),
        (Fault::Never, GpuEventKind::Hung),
        (Fault::Late(ms(500)), GpuEventKind::Hung),
        (Fault::BlockStart(ms(800)), GpuEventKind::Hung),
        (Fault::BlockFinish(ms(800)), GpuEventKind::Hung),
    ];
    for (fault, kind) in failing {
        // What fails may take long to say so: a panic prints where it came from.
        let hang_after = if kind == GpuEventKind::Hung { ms(300) } else { ms(30_000) };
        let config = GpuConfig { hang_after, ..config() };
        let bench = bench(&config, vec![FakeDevice::default()], eager());
        bench.driver.inject(0, 1, fault);
        bench.give([0]);
        bench.expect(1);
        // Jobs with hashes, so that each of them is a fault to it.
        bench.give_at_once([7, 14, 21]);
        bench.expect(3);
        bench.until("the fault is noticed", |bench| bench.runtime.report().devices[0].reopened == 1);
        assert!(bench.runtime.report().rerun_jobs > 0, "{fault:?}");
        assert_eq!(bench.kinds(), [kind, GpuEventKind::Reopened], "{fault:?}");
        let device = &bench.runtime.report().devices[0];
        let hung = u64::from(kind == GpuEventKind::Hung);
        assert_eq!((device.hangs, device.errors, device.mismatches), (hung, 1 - hung, 0), "{fault:?}");
        let before = bench.runtime.report().devices[0].jobs;
        bench.give(30..34);
        bench.expect(4);
        assert!(bench.runtime.report().devices[0].jobs > before, "it works again after {fault:?}");
    }
}

#[test]
fn a_batch_that_is_refused_goes_to_the_cpu_and_the_device_goes_on() {
    let _threads = THREADS.read();
    let bench = bench(&config(), vec![FakeDevice::default()], eager());
    bench.driver.inject(0, 0, Fault::Refuse);
    bench.give([3]);
    bench.expect(1);
    bench.give([4]);
    bench.expect(1);
    let report = bench.runtime.report();
    assert_eq!((report.rerun_jobs, report.devices[0].refused, report.devices[0].jobs), (1, 1, 1));
    assert!(bench.is_running(0) && bench.kinds().is_empty());
}

#[test]
fn what_a_lost_device_writes_later_is_never_seen() {
    let _threads = THREADS.read();
    let config = GpuConfig { hang_after: ms(60), ..config() };
    let bench = bench(&config, vec![FakeDevice::default()], eager());
    bench.driver.inject(0, 0, Fault::Late(ms(600)));
    // Encoding with outputs of four blocks; the first half keeps its answers, the other gives the memory
    // back.
    let tags: Vec<u64> = (0..40).map(|nth| 21 + nth * 28).collect();
    assert!(bench.offer(tags.iter().map(|&tag| (Tag(tag), job(&bench.pool, tag))).collect()).is_empty());
    let started = Instant::now();
    let mut answered = bench.expect(40);
    assert!(started.elapsed() < ms(600), "the machine is too slow for this test to say anything");
    drop(answered.split_off(20));
    // Whatever the pool has is given out and filled.
    let mut others: Vec<BufMut> = Vec::new();
    while bench.pool.overflows() == 0 {
        let mut buf = bench.pool.alloc(4 * BLOCK);
        buf.fill(0x11);
        others.push(buf);
    }
    thread::sleep(ms(700));
    answered.iter().for_each(|(tag, columns)| check(*tag, columns));
    assert!(
        others.iter().all(|buf| buf.iter().all(|&byte| byte == 0x11)),
        "a buffer was written by a lost device"
    );
}

#[test]
fn a_hang_is_noticed_in_time_and_a_slow_batch_is_none() {
    let _threads = THREADS.read();
    let config = GpuConfig { hang_after: ms(400), ..config() };
    let bench = bench(&config, vec![FakeDevice::default()], eager());
    bench.driver.inject(0, 0, Fault::Slow(ms(100)));
    bench.give([7]);
    bench.expect(1);
    assert!(bench.kinds().is_empty());
    bench.driver.inject(0, 0, Fault::Never);
    let started = Instant::now();
    bench.give([14]);
    bench.expect(1);
    let took = started.elapsed();
    assert!(took >= ms(400) && took < ms(3000), "{took:?}");
    assert_eq!(bench.kinds()[0], GpuEventKind::Hung);
}

#[test]
fn a_drill_costs_one_device_once_no_job_and_no_longer_than_a_hang() {
    let _threads = THREADS.read();
    for (drill, kind) in [(Drill::Hang, GpuEventKind::Hung), (Drill::Error, GpuEventKind::Failed)] {
        let config = GpuConfig { hang_after: ms(300), ..config() };
        let bench = bench(&config, vec![FakeDevice::default(), FakeDevice::default()], eager());
        assert!(bench.runtime.drill(drill));
        bench.give(0..40);
        bench.expect(40);
        bench.until("both run again", |bench| bench.is_running(0) && bench.is_running(1));
        bench.give(40..80);
        bench.expect(40);
        let events = bench.runtime.events();
        let kinds: Vec<_> = events.iter().map(|event| event.kind).collect();
        assert_eq!(kinds, [kind, GpuEventKind::Reopened], "{drill:?}");
        assert!(events[0].text.contains("done by the CPU"), "{}", events[0].text);
        let report = bench.runtime.report();
        assert!(report.rerun_jobs > 0 && report.rerun_us_max > 0);
        let waited = Duration::from_micros(report.rerun_us_max);
        if drill == Drill::Hang {
            assert!(waited >= ms(300) && waited < ms(3000), "{waited:?}");
        }
    }
}

#[test]
fn without_a_device_that_runs_there_is_no_drill() {
    let _threads = THREADS.read();
    let config = GpuConfig { reopen_after: PATIENCE, reopen_after_max: PATIENCE, ..config() };
    let bench = bench(&config, vec![FakeDevice::default()], eager());
    bench.driver.inject(0, 0, Fault::Start);
    bench.give([0]);
    bench.expect(1);
    // Its job may be done elsewhere before the device is given up.
    bench.until("there is no drill", |bench| !bench.runtime.drill(Drill::Error));
    assert!(!bench.is_running(0));
}

#[test]
fn offers_do_not_wait_for_a_device_that_is_stuck_in_a_call() {
    let _threads = THREADS.read();
    let bench = bench(&config(), vec![FakeDevice::default()], eager());
    bench.driver.inject(0, 0, Fault::BlockStart(ms(2000)));
    let before = bench.driver.batches(0);
    bench.give([0]);
    bench.until("it is stuck", |bench| bench.driver.batches(0) > before);
    let started = Instant::now();
    bench.give(1..50);
    assert_eq!(bench.runtime.report().waiting_jobs, 49);
    assert!(started.elapsed() < ms(1500), "{:?}", started.elapsed());
    bench.expect(50);
}

#[test]
fn a_device_is_tried_again_less_and_less_often_until_it_passes_its_test() {
    let _threads = THREADS.read();
    let config = GpuConfig { reopen_after: ms(20), reopen_after_max: ms(40), ..config() };
    let bench = bench(&config, vec![FakeDevice::default()], eager());
    bench.driver.fail_opens(0, 3);
    // After the batch that fails comes the test of the fourth attempt, which fails too.
    bench.driver.inject(0, 0, Fault::Start);
    bench.driver.inject(0, 2, Fault::WrongOutput);
    let started = Instant::now();
    bench.give([1]);
    bench.expect(1);
    bench.until("it is opened again", |bench| bench.is_running(0));
    // 20 + 40 + 40 + 40 + 40 ms of pauses.
    assert!(started.elapsed() >= ms(175), "{:?}", started.elapsed());
    assert_eq!((bench.driver.opens(0), bench.runtime.report().devices[0].reopened), (6, 1));
    assert_eq!(bench.kinds(), [GpuEventKind::Failed, GpuEventKind::Reopened]);
    bench.give([2]);
    bench.expect(1);
}

#[test]
fn a_device_that_fails_again_and_again_is_left_alone() {
    let _threads = THREADS.read();
    let config = GpuConfig { reopen_after: ms(2), reopen_after_max: ms(2), given_up_max: 3, ..config() };
    let bench = bench(&config, vec![FakeDevice::default()], eager());
    // At work, and then in two tests.
    bench.driver.inject(0, 0, Fault::Finish);
    bench.driver.inject(0, 1, Fault::WrongOutput);
    bench.driver.inject(0, 2, Fault::WrongOutput);
    bench.give([0]);
    bench.expect(1);
    bench.until("it is left alone", |bench| match &bench.runtime.report().devices[0].state {
        DeviceState::Failed { reason, .. } => reason.contains("3 times"),
        DeviceState::Running => false,
    });
    thread::sleep(ms(100));
    assert_eq!(bench.driver.opens(0), 3);
    assert_eq!(bench.kinds(), [GpuEventKind::Failed, GpuEventKind::Failed]);
    assert_eq!(bench.offer(vec![(Tag(1), job(&bench.pool, 1))]).len(), 1);
}

#[test]
fn a_wrong_result_is_found_by_comparing_and_never_answered() {
    let _threads = THREADS.read();
    for (fault, share) in [(Fault::WrongOutput, 1.0), (Fault::WrongDigest, 1.0), (Fault::WrongOutput, 0.0)] {
        let config = GpuConfig { verify: share, ..config() };
        let bench = bench(&config, vec![FakeDevice::default()], eager());
        bench.driver.inject(0, 0, fault);
        let jobs = [7, 14, 21].map(|tag| (Tag(tag), job(&bench.pool, tag)));
        assert!(bench.offer(jobs.into()).is_empty());
        if share == 0.0 {
            // Without comparing nobody would know: the fault is one.
            bench.answers.wait(3);
            let good = job(&bench.pool, 7).run().outputs[0].to_vec();
            assert!(bench.answers.take()[0].1.outputs[0][..] != good[..]);
            continue;
        }
        bench.expect(3);
        bench.until("it is out", |bench| !bench.is_running(0));
        assert_eq!(bench.kinds(), [GpuEventKind::Mismatch]);
        let report = bench.runtime.report();
        assert!(report.verified_rows >= 3, "{} rows", report.verified_rows);
        assert_eq!((report.rerun_jobs, report.devices[0].mismatches), (3, 1));
    }
}

#[test]
fn with_the_default_a_device_that_has_gone_wrong_is_out_at_its_first_batch_whatever_it_computes() {
    let _threads = THREADS.read();
    for kind in 0..7 {
        let bench = bench(&config(), vec![slow(ms(2))], eager());
        bench.give((0..20).map(|nth| 7 * nth));
        bench.expect(20);
        let before = bench.driver.batches(0);
        (0..400).for_each(|nth| bench.driver.inject(0, nth, Fault::WrongEverywhere));
        bench.give_at_once((100..160).map(|nth| 7 * nth + kind));
        // Checks that all of them are right, those too that were under way in other slots.
        bench.expect(60);
        bench.until("it is out", |bench| !bench.is_running(0));
        let slots = FakeDevice::default().slots;
        assert!(bench.driver.batches(0) <= before + slots, "kind {kind}: only what was under way");
        let events = bench.runtime.events();
        assert!(
            matches!(&events[..], [event] if event.kind == GpuEventKind::Mismatch
                && event.text.contains("not what the CPU computes") && event.text.contains("scrub")),
            "kind {kind}: {events:?}"
        );
        // It stays out for longer than the longest pause after other failures; the CPU does its work.
        thread::sleep(config().reopen_after_max * 2);
        assert_eq!((bench.is_running(0), bench.driver.opens(0)), (false, 1));
        assert_eq!(bench.offer(vec![(Tag(7), job(&bench.pool, 7))]).len(), 1);
    }
}

#[test]
fn with_the_default_one_wrong_block_in_each_batch_is_found_after_as_many_batches_as_they_have_rows() {
    const ROWS: usize = 64;
    let _threads = THREADS.read();
    let wide = |pool: &Pool, nth: u64| CodecJob {
        transform: Some(Codec::new(4, 2).expect("a geometry").encoding()),
        hasher: Some(BlockHasher::Blake3),
        inputs: (0..4).map(|column_nth| Column::Owned(column(pool, nth, column_nth, ROWS))).collect(),
        outputs: Outputs::Into((0..2).map(|_| pool.alloc(ROWS * BLOCK)).collect()),
    };
    for (seed, fault) in [(0, Fault::WrongOutput), (1, Fault::WrongOutput), (2, Fault::WrongDigest)] {
        let config = GpuConfig { verify_seed: seed, ..config() };
        let bench = bench(&config, vec![FakeDevice::default()], eager());
        let (mut batches, mut wrong) = (0, 0);
        while bench.is_running(0) {
            bench.driver.inject(0, 0, fault);
            let job = wide(&bench.pool, batches);
            if !bench.offer(vec![(Tag(batches), job)]).is_empty() {
                break;
            }
            bench.answers.wait(1);
            let (_, columns) = bench.answers.take().remove(0);
            let right = wide(&bench.pool, batches).run();
            let is_wrong = columns.hashes != right.hashes || columns.outputs[0][..] != right.outputs[0][..];
            wrong += u64::from(is_wrong);
            assert!(!is_wrong || bench.runtime.report().devices[0].mismatches == 0, "found and answered");
            batches += 1;
            // Wrong digests are those of one column of six.
            assert!(batches < 10 * ROWS as u64, "{fault:?}: {batches} batches and nothing found");
        }
        assert_eq!(wrong + 1, batches, "the batch in which it is found is answered rightly");
        assert_eq!(bench.kinds(), [GpuEventKind::Mismatch]);
    }
}

#[test]
fn what_is_compared_is_a_share_of_the_rows() {
    let _threads = THREADS.read();
    let verified = |verify| {
        let bench = bench(&GpuConfig { verify, ..config() }, vec![FakeDevice::default()], eager());
        // Jobs of kind 1 have as many rows as blocks: 1, 2, 3, 4 and so on.
        bench.give((0..300).map(|nth| 7 * nth + 1));
        bench.expect(300);
        let report = bench.runtime.report();
        (report.verified_rows, report.devices[0].batches)
    };
    let rows = 300 / 4 * (1 + 2 + 3 + 4);
    assert_eq!(verified(0.0).0, 0);
    assert_eq!(verified(1.0).0, rows);
    let (few, batches) = verified(1e-9);
    assert_eq!(few, batches, "one a batch");
    let (half, batches) = verified(0.5);
    assert!((rows / 2..=rows / 2 + batches).contains(&half), "{half} of {rows}");
}

#[test]
fn of_two_devices_the_slower_takes_less_and_one_can_be_lost() {
    let _threads = THREADS.read();
    let device = |us| FakeDevice { slots: 1, slot_bytes: 100 * BLOCK, ..slow(Duration::from_micros(us)) };
    let costs = vec![Costs::linear(4e-3, 1e15, 1.0), Costs::linear(3e-2, 1e15, 1.0)];
    let bench = bench(&config(), vec![device(4000), device(30_000)], costs);
    for tags in (0..400).collect::<Vec<u64>>().chunks(100) {
        bench.give(tags.iter().copied());
    }
    bench.expect(400);
    let report = bench.runtime.report();
    let (fast, slow) = (report.devices[0].batches, report.devices[1].batches);
    assert!(fast > slow && slow > 0, "{fast} and {slow} batches");
    bench.driver.inject(0, 0, Fault::Finish);
    bench.driver.fail_opens(0, usize::MAX);
    bench.driver.fail_opens(1, usize::MAX);
    bench.give(1000..1100);
    bench.expect(100);
    let decisions = bench.runtime.report().decisions;
    assert_eq!((decisions.taken, decisions.unavailable), (500, 0));
    assert!(bench.is_running(1) && !bench.is_running(0));
    // When the last one is lost, everything is handed back.
    bench.driver.inject(1, 0, Fault::Start);
    bench.give([2000]);
    bench.expect(1);
    bench.until("both are down", |bench| !bench.is_running(1));
    thread::sleep(ms(20));
    let rest = bench.offer((0..3).map(|tag| (Tag(tag), job(&bench.pool, tag))).collect());
    assert_eq!(rest.iter().map(|(tag, _)| tag.0).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(bench.runtime.report().decisions.unavailable, 3);
}

#[test]
fn what_was_left_to_a_device_that_is_lost_goes_to_another() {
    let _threads = THREADS.read();
    let config = GpuConfig { hang_after: ms(4000), ..config() };
    let costs = vec![Costs::linear(1e-9, 1e15, 1.0), Costs::linear(1e-3, 1e15, 1.0)];
    let bench = bench(&config, vec![FakeDevice::default(), FakeDevice::default()], costs);
    bench.driver.inject(0, 0, Fault::BlockFinish(ms(40_000)));
    // The other one does what comes before the faster one has first looked for work.
    let by_other = |bench: &Bench| bench.runtime.report().devices[1].jobs;
    let mut given = 0;
    while !bench.driver.is_stuck(0) {
        bench.give([given]);
        given += 1;
        bench.until("it is stuck, or the other has done it", |bench| {
            bench.driver.is_stuck(0) || by_other(bench) == given
        });
    }
    let done = by_other(&bench);
    assert_eq!(done, given - 1);
    // The faster device has idle slots, but is stuck with the result of a job when it is told of
    // the next.
    bench.give([given]);
    assert_eq!(bench.runtime.report().waiting_jobs, 1);
    let started = Instant::now();
    bench.expect(given as usize + 1);
    assert!(started.elapsed() < ms(30_000), "{:?}", started.elapsed());
    assert_eq!(by_other(&bench), done + 1);
}

#[test]
fn a_start_without_a_device_says_why() {
    let _threads = THREADS.read();
    let pool = [Pool::new(1 << 20).expect("memory")];
    let start = |config: &GpuConfig, driver: &FakeDriver| {
        GpuRuntime::start(config, Arc::new(driver.clone()), &pool, CalibrationSource::Given(eager()))
            .map(drop)
    };
    let two = || FakeDriver::new(vec![FakeDevice::default(), FakeDevice::default()]);
    for mode in [Mode::Auto, Mode::Require] {
        let config = GpuConfig { mode, ..config() };
        let none = start(&config, &FakeDriver::new(Vec::new()));
        assert!(matches!(none, Err(GpuError::NoDevice(reason)) if reason == "there is no fake device"));
        let driver = two();
        driver.fail_opens(0, 1);
        driver.inject(1, SELF_TEST_BATCHES - 1, Fault::WrongDigest);
        let error =
            start(&config, &driver).expect_err("one does not open, the other computes wrongly").to_string();
        assert!(error.contains("told to fail") && error.contains("hashing"), "{error}");
    }
    let beyond = start(&GpuConfig { devices: vec![1, 2], ..config() }, &two());
    assert!(matches!(beyond, Err(GpuError::NoSuchDevice { index: 2, count: 2 })));
    assert!(matches!(start(&GpuConfig { verify: 1.5, ..config() }, &two()), Err(GpuError::Verify(_))));
}

#[test]
fn only_chosen_devices_are_opened_and_one_that_fails_at_start_comes_later() {
    let _threads = THREADS.read();
    let driver = FakeDriver::new(vec![FakeDevice::default(); 3]);
    driver.fail_opens(2, 2);
    let config = GpuConfig { devices: vec![1, 2], ..config() };
    let source = CalibrationSource::Given(eager());
    let runtime =
        GpuRuntime::start(&config, Arc::new(driver.clone()), &[], source).expect("one of two is enough");
    let started = Instant::now();
    while runtime.report().devices[1].state != DeviceState::Running {
        assert!(started.elapsed() < PATIENCE);
        thread::sleep(ms(1));
    }
    let (report, events) = (runtime.report(), runtime.events());
    assert_eq!(report.devices.iter().map(|device| device.info.index).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(
        events.iter().map(|event| (event.device, event.kind)).collect::<Vec<_>>(),
        [(2, GpuEventKind::Failed), (2, GpuEventKind::Reopened)]
    );
    assert_eq!((driver.opens(0), driver.opens(1), driver.opens(2)), (0, 1, 3));
}

#[test]
fn the_end_of_the_runtime_answers_what_runs_waits_or_hangs() {
    let _threads = THREADS.read();
    for fault in [Fault::Slow(ms(100)), Fault::Never, Fault::Finish] {
        let config = GpuConfig { hang_after: ms(300), ..config() };
        let device = FakeDevice { slots: 1, ..FakeDevice::default() };
        let bench = bench(&config, vec![device], eager());
        bench.driver.inject(0, 0, fault);
        bench.give_at_once([7].into_iter().chain(100..130));
        bench.until("one batch is under way", |bench| bench.driver.batches(0) > SELF_TEST_BATCHES);
        drop(bench.runtime.clone());
        let answers = Arc::clone(&bench.answers);
        drop(bench);
        assert_eq!(answers.done.lock().unwrap().len(), 31, "all are answered when the last handle is gone");
        answers.take().iter().for_each(|(tag, columns)| check(*tag, columns));
        // Threads end, so nobody holds the answerer any more.
        let started = Instant::now();
        while Arc::strong_count(&answers) > 1 {
            assert!(started.elapsed() < PATIENCE, "somebody still holds the answerer");
            thread::sleep(ms(1));
        }
    }
}

#[test]
fn an_answerer_that_panics_or_ends_the_runtime_itself_harms_nobody() {
    struct Panics;
    impl Answer for Panics {
        fn done(&self, _: Tag, _: CodedColumns) {
            panic!("an answerer that was told to panic");
        }
    }
    /// Holds the last handle of the runtime, which so ends on a thread of its own.
    struct Holds(Mutex<Option<GpuRuntime>>, std::sync::mpsc::Sender<u64>);
    impl Answer for Holds {
        fn done(&self, tag: Tag, _: CodedColumns) {
            drop(self.0.lock().unwrap().take());
            self.1.send(tag.0).expect("the test listens");
        }
    }
    let _threads = THREADS.read();
    let bench = bench(&config(), vec![FakeDevice::default()], eager());
    let panics: Arc<dyn Answer> = Arc::new(Panics);
    let jobs = (0..5).map(|tag| (Tag(tag), job(&bench.pool, tag))).collect();
    assert!(bench.runtime.offer(jobs, IDLE, &panics).is_empty());
    bench.give(10..15);
    bench.expect(5);
    bench.until("all are told", |_| Arc::strong_count(&panics) == 1);
    assert_eq!(bench.kinds(), [GpuEventKind::Answer; 5]);
    assert!(bench.is_running(0));

    let driver = FakeDriver::new(vec![FakeDevice::default()]);
    let source = CalibrationSource::Given(eager());
    let runtime = GpuRuntime::start(&config(), Arc::new(driver), std::slice::from_ref(&bench.pool), source)
        .expect("a device");
    let (sender, told) = std::sync::mpsc::channel();
    let holds = Arc::new(Holds(Mutex::new(None), sender));
    let answer: Arc<dyn Answer> = Arc::clone(&holds) as Arc<dyn Answer>;
    let jobs = (0..20).map(|tag| (Tag(tag), job(&bench.pool, tag))).collect();
    *holds.0.lock().unwrap() = Some(runtime.clone());
    assert!(runtime.offer(jobs, IDLE, &answer).is_empty());
    drop((runtime, holds, answer));
    let mut tags: Vec<u64> = told.iter().collect();
    tags.sort_unstable();
    assert_eq!(tags, (0..20).collect::<Vec<_>>());
}

#[test]
fn threads_sleep_while_there_is_nothing_to_do() {
    let _threads = THREADS.write();
    let tasks =
        || std::fs::read_dir("/proc/self/task").expect("threads").map(|task| task.expect("a thread").path());
    // The suite of a real device may have left some, which are none of ours.
    let others: BTreeSet<_> = tasks().collect();
    let config = GpuConfig { hang_after: ms(50), ..config() };
    let bench = bench(&config, vec![FakeDevice::default(); 2], eager());
    bench.give(0..20);
    bench.expect(20);
    // The watchdog looks once more for what was under way.
    thread::sleep(ms(200));
    let switches = || {
        let mut counts = BTreeMap::new();
        for task in tasks().filter(|task| !others.contains(task)) {
            let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
            let status = std::fs::read_to_string(task.join("status")).unwrap_or_default();
            if name.starts_with("gpu-") {
                let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
                counts.insert((task, name), lines.map(str::to_owned).collect::<Vec<_>>());
            }
        }
        counts
    };
    // Two managers, two for the CPU, the watchdog: threads of other tests are gone.
    bench.until("five threads are left", |_| switches().len() == 5);
    let before = switches();
    thread::sleep(ms(300));
    assert_eq!(switches(), before);
}

/// Four threads offer jobs of all kinds while devices fail in all ways at once.
fn storm(seed: u64) -> GpuReport {
    let mut state = seed;
    let config = GpuConfig { hang_after: ms(60), verify: 1.0, reopen_after: ms(2), ..config() };
    let device =
        |slot_blocks, us| FakeDevice { slot_bytes: slot_blocks * BLOCK, ..slow(Duration::from_micros(us)) };
    let devices = vec![device(400, 300), device(120, 1500)];
    let bench = bench(&config, devices, eager());
    let faults = [
        Fault::Start,
        Fault::Refuse,
        Fault::Finish,
        Fault::WrongOutput,
        Fault::WrongDigest,
        Fault::MissingDigest,
        Fault::Slow(ms(5)),
        Fault::Never,
        Fault::Late(ms(90)),
        Fault::BlockStart(ms(80)),
        Fault::BlockFinish(ms(80)),
        Fault::PanicStart,
        Fault::PanicFinish,
    ];
    let wrong = [Fault::WrongOutput, Fault::WrongDigest];
    // A device that computes wrongly is out for good, and then little else happens to it.
    let computes_wrongly = seed.is_multiple_of(4);
    let faults: Vec<Fault> =
        faults.into_iter().filter(|fault| computes_wrongly || !wrong.contains(fault)).collect();
    for _ in 0..24 {
        let fault = faults[random(&mut state) as usize % faults.len()];
        // Tests of devices that are opened again are hit too.
        bench.driver.inject(random(&mut state) as usize % 2, random(&mut state) as usize % 40, fault);
    }
    bench.driver.fail_opens(0, random(&mut state) as usize % 3);
    let (bench, on_cpu) = (&bench, &Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for thread in 0..4u64 {
            let mut state = seed ^ (thread << 32);
            scope.spawn(move || {
                let (mut next, end) = (thread * 1000, thread * 1000 + 90);
                while next < end {
                    let count = (1 + random(&mut state) % 12).min(end - next);
                    let jobs = (next..next + count).map(|tag| (Tag(tag), job(&bench.pool, tag))).collect();
                    next += count;
                    let rest = bench.offer(jobs);
                    assert!(rest.windows(2).all(|pair| pair[0].0 < pair[1].0), "out of order");
                    on_cpu.lock().unwrap().extend(rest.into_iter().map(|(tag, _)| tag.0));
                    thread::sleep(Duration::from_micros(random(&mut state) % 3000));
                }
            });
        }
    });
    let mut tags = std::mem::take(&mut *on_cpu.lock().unwrap());
    let taken = 360 - tags.len();
    let answered = bench.expect(taken);
    tags.extend(answered.iter().map(|(tag, _)| *tag));
    tags.sort_unstable();
    let all: Vec<u64> = (0..4).flat_map(|thread| thread * 1000..thread * 1000 + 90).collect();
    assert_eq!(tags, all, "each job was either taken and answered, or handed back");
    let report = bench.runtime.report();
    assert_eq!(report.decisions.taken, taken as u64);
    assert!(report.decisions.taken > 0 && report.waiting_jobs == 0);
    bench.driver.calm();
    if !computes_wrongly {
        bench.until("both run again", |bench| bench.is_running(0) && bench.is_running(1));
        bench.driver.inject(0, 0, Fault::WrongOutput);
        for tag in (10_000..).step_by(7).take_while(|_| bench.is_running(0)) {
            bench.give([tag]);
            bench.expect(1);
        }
    }
    let report = bench.runtime.report();
    // Late devices are through by now, and nothing of theirs is seen.
    thread::sleep(ms(120));
    answered.iter().for_each(|(tag, columns)| check(*tag, columns));
    report
}

#[test]
fn jobs_are_answered_once_and_rightly_whatever_fails_whenever() {
    let _threads = THREADS.read();
    let reports: Vec<GpuReport> = (1..=8).map(storm).collect();
    let count = |of: fn(&DeviceReport) -> u64| -> u64 {
        reports.iter().flat_map(|report| &report.devices).map(of).sum()
    };
    let counts = [
        count(|device| device.errors),
        count(|device| device.hangs),
        count(|device| device.mismatches),
        count(|device| device.reopened),
        count(|device| device.jobs),
        reports.iter().map(|report| report.rerun_jobs).sum(),
    ];
    println!("errors, hangs, mismatches, reopened, done, done by the CPU: {counts:?}");
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
}
