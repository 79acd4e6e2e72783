//! The runtime's interface for the daemon: it offers jobs, gets answers, and reads reports.
//!
//! Invariants: every job taken is answered exactly once, whatever fails, the end of the runtime
//! included; an offer waits for one lock and never for a device.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use calpe_core::block_io::Pool;
use calpe_core::codec::CodecJob;

use super::answer::{Answer, Tag, Ticket};
use super::batch::{Kind, Unfit};
use super::calibrate::CalibrationSource;
use super::config::GpuConfig;
use super::device::{DeviceInfo, Drill, Driver};
use super::lane::{Event, Lane};
use super::manager;
use super::metrics::{GpuEvent, GpuReport};
use super::policy::{CpuLoad, Verdict};
use super::queue::Queue;
use super::rerun;
use super::shared::{Settings, Shared};
use super::watch;

/// How long the start waits for a device to open, pass its self-test and be measured.
const OPEN_MAX: Duration = Duration::from_secs(60);

/// Threads for the CPU's work for devices: few, since the cores have other work.
const RERUN_THREADS: usize = 2;

/// Why there is no runtime.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// No device can be used. An error only with `Mode::Require`.
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
    /// A fraction outside of 0 to 1.
    #[error("gpu.verify is {0}, but must be from 0 to 1")]
    Verify(f64),
    /// The system gives no thread.
    #[error("a thread for GPUs cannot be started")]
    Thread(#[source] std::io::Error),
    /// No memory to exchange with a device can be mapped.
    #[error("memory for GPUs cannot be mapped")]
    Memory(#[source] std::io::Error),
}

/// All devices in use. Clones share them. When the last clone is dropped, the jobs that were taken
/// are answered, and devices and threads end.
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
    /// Opens, tests and measures the devices, which takes a second or so. `pools`: the memory of
    /// most jobs, every reactor's; devices keep it alive. If another device can be used, one that
    /// fails now is opened again later.
    ///
    /// # Errors
    /// See [`GpuError`]; the mode says whether it keeps the daemon from starting.
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
            // A pool is needed for replacement buffers; beyond the slab they are ordinary memory.
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
        // From here on an early return closes the devices and threads that run.
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

    /// Waits until opening every device has been tried once.
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

    /// Takes the jobs that a device is expected to do as soon as the CPU or sooner, and returns the
    /// others at once, in order. `cpu`: the CPU's load. Taken jobs are answered at `answer`,
    /// possibly before this returns.
    pub fn offer(
        &self,
        jobs: Vec<(Tag, CodecJob)>,
        cpu: CpuLoad,
        answer: &Arc<dyn Answer>,
    ) -> Vec<(Tag, CodecJob)> {
        let shared = &*self.0.shared;
        let decisions = &shared.decisions;
        // Work outside the lock delays no other thread.
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
        // In order of arrival, so that each decision counts for the next.
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

    /// Makes the next batch on some device fail: its jobs are done by the CPU, and the device is
    /// given up and opened again. False, without any effect, when no device runs.
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

/// Checks, without opening any, that the devices of the configuration exist.
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

/// Jobs of one kind in one offer, as many as fit a slot: decided as a whole.
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
    /// The chunk of a job, or None, which is counted, if no device can do it.
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
