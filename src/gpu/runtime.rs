//! What the daemon has of all devices: it offers jobs, is answered, and asks how things are.
//!
//! Invariants: every job taken is answered exactly once, whatever fails, the end of the runtime included; an offer waits
//! for one lock and never for a device.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use calpe_core::block_io::Pool;
use calpe_core::codec::{CodecJob, CodedColumns};

use super::batch::{Kind, Unfit};
use super::calibrate::CalibrationSource;
use super::device::{DeviceInfo, Drill, Driver};
use super::manager::{self, Event};
use super::metrics::{GpuEvent, GpuReport};
use super::policy::{CpuLoad, Verdict};
use super::queue::{Queue, Ticket};
use super::rerun;
use super::shared::{Lane, Settings, Shared};
use super::watch;

/// How long a device may take to open, pass its self-test and be measured before the start goes on without it.
const OPEN_MAX: Duration = Duration::from_secs(60);

/// Threads that do on the CPU what devices could not, and compare: few, since the cores have other work.
const RERUN_THREADS: usize = 2;

/// Of each batch, beside the row at least that any share above 0 means: what a device computes is
/// stored, so one that goes wrong must be found soon. A row costs the CPU 5 to 20 microseconds; the
/// batches of a busy daemon, some megabytes, cost it milliseconds.
const VERIFY_SHARE: f64 = 0.001;

/// What is wanted of devices.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuConfig {
    /// Whether they are used.
    pub mode: Mode,
    /// Which, by the driver's numbers; empty: all.
    pub devices: Vec<usize>,
    /// The share of the rows of each batch that the CPU computes again to compare, 0 to 1: above 0 at least one, 1 all of it.
    pub verify: f64,
    /// How long a batch may take before its device counts as hung.
    pub hang_after: Duration,
    /// Which rows are compared follows from it and the number of the batch.
    pub verify_seed: u64,
    /// How long after a failure a device is opened again.
    pub reopen_after: Duration,
    /// The most that this becomes; it doubles with every failure until a device has run for as long.
    pub reopen_after_max: Duration,
    /// How often a device may be given up before it is left alone until the next start: each time leaks what it may
    /// still be using, which is pinned memory of the host and memory of the device.
    pub given_up_max: u32,
}

/// Whether devices are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// If there are any.
    #[default]
    Auto,
    /// Never. The runtime is not started.
    Off,
    /// The daemon does not start without one.
    Require,
}

impl Default for GpuConfig {
    fn default() -> GpuConfig {
        GpuConfig {
            mode: Mode::Auto,
            devices: Vec::new(),
            verify: VERIFY_SHARE,
            hang_after: Duration::from_secs(2),
            verify_seed: 0,
            reopen_after: Duration::from_secs(1),
            reopen_after_max: Duration::from_secs(60),
            given_up_max: 16,
        }
    }
}

/// Why there is no runtime.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// No device can be used. Without `Mode::Require` this is no fault.
    #[error("no GPU can be used: {0}")]
    NoDevice(String),
    /// The configuration names a device that is not there.
    #[error("there is no GPU {index}: the driver has {count}, numbered from 0; correct gpu.devices")]
    NoSuchDevice {
        /// The number.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A share that is none.
    #[error("gpu.verify is {0}, but must be from 0 to 1")]
    Verify(f64),
    /// The system has no thread to give.
    #[error("a thread for GPUs cannot be started")]
    Thread(#[source] std::io::Error),
    /// There is no memory to exchange with a device.
    #[error("memory for GPUs cannot be mapped")]
    Memory(#[source] std::io::Error),
}

/// What tells a job from others of the same answerer; the runtime only hands it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u64);

/// Who waits for jobs.
pub trait Answer: Send + Sync {
    /// A job is done. Called once for each job taken, from any thread, in any order; must not wait.
    fn done(&self, tag: Tag, columns: CodedColumns);

    /// A job panicked on the CPU, as it would have anywhere, and its columns are gone: an invariant is broken. Called
    /// instead of [`Answer::done`].
    fn lost(&self, tag: Tag) {
        let _ = tag;
    }
}

/// All devices in use. Clones are the same; when the last one goes, what was taken is done and answered, and devices and
/// threads end.
#[derive(Clone)]
pub struct GpuRuntime(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for GpuRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuRuntime").field("devices", &self.0.shared.lanes.len()).finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl GpuRuntime {
    /// Opens, tests and measures the devices, which takes a second or so. `pools`: where the bytes of most jobs lie, every
    /// reactor's; devices keep them alive. A device that fails now while another does not is opened again later.
    ///
    /// # Errors
    /// See [`GpuError`]; whether it keeps the daemon from starting is for the mode to say.
    pub fn start(
        config: &GpuConfig,
        driver: Arc<dyn Driver>,
        pools: &[Pool],
        calibration: CalibrationSource,
    ) -> Result<GpuRuntime, GpuError> {
        if !(0.0..=1.0).contains(&config.verify) {
            return Err(GpuError::Verify(config.verify));
        }
        let infos = chosen(config, &*driver)?;
        let mut pools = pools.to_vec();
        if pools.is_empty() {
            // Buffers to replace others with have to come from somewhere; beyond the slab they are ordinary memory.
            pools.push(Pool::new(1 << 20).map_err(GpuError::Memory)?);
        }
        let mut queue = Queue::default();
        let (mut lanes, mut inboxes) = (Vec::new(), Vec::new());
        for info in infos {
            let (events, inbox) = mpsc::channel();
            queue.lanes.push(Default::default());
            lanes.push(Lane::new(info, events));
            inboxes.push(inbox);
        }
        let settings = Settings { config: config.clone(), driver, pools, calibration };
        let shared = Arc::new(Shared::new(settings, lanes, queue));
        // From here on an early return closes what runs already.
        let runtime = GpuRuntime(Arc::new(Handle { shared: Arc::clone(&shared) }));
        for number in 0..RERUN_THREADS {
            runtime.spawn(format!("gpu-rerun-{number}"), rerun::run)?;
        }
        runtime.spawn("gpu-watch".to_owned(), watch::run)?;
        let (first, opened) = mpsc::channel();
        for (lane, inbox) in inboxes.into_iter().enumerate() {
            let first = first.clone();
            let run = move |shared: &Arc<Shared>| manager::run(shared, lane, &inbox, first);
            runtime.spawn(format!("gpu-{lane}"), run)?;
        }
        drop(first);
        runtime.await_devices(&opened)?;
        Ok(runtime)
    }

    fn spawn(&self, name: String, run: impl FnOnce(&Arc<Shared>) + Send + 'static) -> Result<(), GpuError> {
        let shared = Arc::clone(&self.0.shared);
        let body = move || {
            Shared::mark_own_thread();
            run(&shared);
        };
        thread::Builder::new().name(name).spawn(body).map(drop).map_err(GpuError::Thread)
    }

    /// Waits until every device has been tried once.
    fn await_devices(&self, opened: &mpsc::Receiver<Result<(), String>>) -> Result<(), GpuError> {
        let until = Instant::now() + OPEN_MAX;
        let (mut any, mut reasons) = (false, Vec::new());
        for _ in &self.0.shared.lanes {
            match opened.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Ok(())) => any = true,
                Ok(Err(reason)) => reasons.push(reason),
                Err(_) => reasons.push(format!("a device has not opened in {OPEN_MAX:?}")),
            }
        }
        if any { Ok(()) } else { Err(GpuError::NoDevice(reasons.join("; "))) }
    }

    /// Takes what a device does sooner than the CPU would, or as soon, and hands the others back at once, in order. `cpu`:
    /// what would do them otherwise. Jobs taken are done at `answer`, which may happen before this returns.
    pub fn offer(
        &self,
        jobs: Vec<(Tag, CodecJob)>,
        cpu: CpuLoad,
        answer: &Arc<dyn Answer>,
    ) -> Vec<(Tag, CodecJob)> {
        let shared = &*self.0.shared;
        let decisions = &shared.decisions;
        // What is made of jobs is made outside the lock, where it costs nobody else.
        let slot_bytes = shared.slot_bytes.load(Ordering::Relaxed);
        if slot_bytes == 0 {
            decisions.unavailable.fetch_add(jobs.len() as u64, Ordering::Relaxed);
            return jobs;
        }
        let mut chunks = Chunks::default();
        let chosen: Vec<Option<usize>> =
            jobs.iter().map(|(_, job)| chunks.add(job, slot_bytes, shared)).collect();
        if chunks.0.is_empty() {
            return jobs;
        }

        let (mut rest, since) = (Vec::new(), Instant::now());
        let mut queue = shared.queue();
        if !queue.is_up() || queue.closing {
            drop(queue);
            let count = chunks.0.iter().map(|chunk| chunk.jobs).sum();
            decisions.unavailable.fetch_add(count, Ordering::Relaxed);
            return jobs;
        }
        let mut cpu = cpu;
        let mut taken = 0;
        // In order of arrival, so that what was decided about one is known to the next.
        for ((tag, job), chunk) in jobs.into_iter().zip(chosen) {
            let Some(chunk) = chunk.map(|chunk| &mut chunks.0[chunk]) else {
                cpu.waiting_bytes += job.input_bytes();
                rest.push((tag, job));
                continue;
            };
            let verdict = *chunk.verdict.get_or_insert_with(|| {
                let verdict = queue.decide(&chunk.kind, chunk.bytes, cpu);
                decisions.count(verdict, chunk.jobs);
                if verdict != Verdict::Take {
                    cpu.waiting_bytes += chunk.bytes as usize;
                }
                verdict
            });
            if verdict == Verdict::Take {
                let place = *chunk.place.get_or_insert_with(|| queue.place(&chunk.kind));
                queue.push(place, Ticket { tag, answer: Arc::clone(answer), since }, job);
                taken += 1;
            } else {
                rest.push((tag, job));
            }
        }
        shared.unanswered.fetch_add(taken, Ordering::Relaxed);
        let hungry = queue.wake_one();
        drop(queue);
        if let Some(lane) = hungry {
            shared.lanes[lane].send(Event::More);
        }
        rest
    }

    /// Makes the next batch of some device go wrong, as it might by itself: its jobs are done by the CPU, the device is given up
    /// and opened again. False, and nothing happens, when no device runs.
    pub fn drill(&self, drill: Drill) -> bool {
        let shared = &*self.0.shared;
        let runs = shared.slot_bytes.load(Ordering::Relaxed) > 0;
        if runs {
            shared.settings.driver.drill(drill);
        }
        runs
    }

    /// How everything is.
    #[must_use]
    pub fn report(&self) -> GpuReport {
        self.0.shared.report()
    }

    /// What happened since the last call.
    #[must_use]
    pub fn events(&self) -> Vec<GpuEvent> {
        self.0.shared.take_events()
    }
}

/// Whether there are devices such as a configuration asks for, as far as that can be told without opening them.
///
/// # Errors
/// Why not.
pub fn check_devices(config: &GpuConfig, driver: &dyn Driver) -> Result<(), GpuError> {
    chosen(config, driver).map(|_| ())
}

/// The devices that the configuration names.
fn chosen(config: &GpuConfig, driver: &dyn Driver) -> Result<Vec<DeviceInfo>, GpuError> {
    let all = driver.devices().map_err(|error| GpuError::NoDevice(error.to_string()))?;
    let count = all.len();
    if let Some(&index) = config.devices.iter().find(|index| all.iter().all(|info| info.index != **index)) {
        return Err(GpuError::NoSuchDevice { index, count });
    }
    let named = |info: &DeviceInfo| config.devices.is_empty() || config.devices.contains(&info.index);
    let chosen: Vec<DeviceInfo> = all.into_iter().filter(named).collect();
    if chosen.is_empty() {
        return Err(GpuError::NoDevice("the driver has none".to_owned()));
    }
    Ok(chosen)
}

/// Jobs of one kind in one offer, as many as fit a slot: what is decided about as a whole.
struct Chunk {
    kind: Kind,
    bytes: u64,
    slot_bytes: usize,
    jobs: u64,
    verdict: Option<Verdict>,
    place: Option<usize>,
}

#[derive(Default)]
struct Chunks(Vec<Chunk>);

impl Chunks {
    /// The chunk of a job, or None if no device can do it; that is counted.
    fn add(&mut self, job: &CodecJob, slot_bytes: usize, shared: &Shared) -> Option<usize> {
        let unfit = |counter: &std::sync::atomic::AtomicU64| {
            counter.fetch_add(1, Ordering::Relaxed);
            None
        };
        let kind = match Kind::of(job) {
            Ok(kind) => kind,
            Err(Unfit::Hasher) => return unfit(&shared.decisions.hasher),
            Err(Unfit::Shape) => return unfit(&shared.decisions.shape),
        };
        let needed = kind.slot_bytes(job);
        if needed > slot_bytes {
            return unfit(&shared.decisions.shape);
        }
        let bytes = job.input_bytes() as u64;
        let last = self.0.iter_mut().enumerate().rev().find(|(_, chunk)| chunk.kind.same(&kind));
        if let Some((at, chunk)) = last.filter(|(_, chunk)| chunk.slot_bytes + needed <= slot_bytes) {
            (chunk.bytes, chunk.slot_bytes, chunk.jobs) =
                (chunk.bytes + bytes, chunk.slot_bytes + needed, chunk.jobs + 1);
            return Some(at);
        }
        self.0.push(Chunk { kind, bytes, slot_bytes: needed, jobs: 1, verdict: None, place: None });
        Some(self.0.len() - 1)
    }
}
