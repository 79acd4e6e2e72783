//! How long a device and this CPU take for batches of several sizes: measured at start, or read
//! from a file of an earlier start. Must not know what the figures decide.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use calpe_core::block_io::{Buf, BufMut, Pool};
use calpe_core::codec::{BlockHasher, Codec, CodecJob, Column, Outputs, Transform};
use calpe_host::files::{self, Source};

use super::batch::{Batch, Kind};
use super::device::{Device, DeviceError, DeviceInfo};
use super::policy::{Class, ClassCosts, Costs, MEASURED_DATA, MEASURED_PARITY, Point};
use super::trial;

/// Sizes of the batches that are measured, in bytes of input.
const SIZES: [usize; 6] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];

/// Bytes of the columns of jobs in larger batches: the most that the array puts in one job.
const COLUMN_BYTES_MAX: usize = 64 << 10;

/// Bytes of input for the CPU's measurement: more than its inner caches hold.
const CPU_BYTES: usize = 4 << 20;

/// How often a batch is repeated; the fastest counts, since nothing makes a device faster than it
/// is.
const REPEATS: usize = 4;

/// Time after which measuring ends, with the sizes that it has by then.
const BUDGET: Duration = Duration::from_millis(900);

/// Most bytes of input memory; larger batches read them several times.
const INPUT_BYTES_MAX: usize = 16 << 20;

/// Longest file of figures that is read: a device has a few KiB of them.
const KEPT_BYTES_MAX: u64 = 4 << 20;

/// Version of the file's format.
const FORM: u32 = 1;

/// Where figures come from.
#[derive(Clone, Debug)]
pub enum CalibrationSource {
    /// They are measured now.
    Measure,
    /// From this file, if it has figures for the same device, driver, version and CPU; else
    /// measured and written there.
    Cache(PathBuf),
    /// Given: one entry per device, by the driver's number; the last entry for all further devices.
    Given(Vec<Costs>),
}

/// What figures are valid for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    uuid: String,
    name: String,
    driver: String,
    calpe: String,
    cpu: String,
    threads_available: usize,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    key: Key,
    costs: Costs,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    form: u32,
    entries: Vec<Entry>,
}

impl Key {
    fn new(info: &DeviceInfo) -> Key {
        Key {
            uuid: info.uuid.clone(),
            name: info.name.clone(),
            driver: info.driver.clone(),
            calpe: env!("CARGO_PKG_VERSION").to_owned(),
            cpu: cpu_model(),
            threads_available: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// The costs of a device, and why they could not be stored for the next start, if so.
///
/// # Errors
/// When the device fails during the measurement; it must be abandoned then.
pub(super) fn costs(
    source: &CalibrationSource,
    device: &mut dyn Device,
    pool: &Pool,
    hang_after: Duration,
) -> Result<(Costs, Option<io::Error>), DeviceError> {
    let info = device.info().clone();
    match source {
        CalibrationSource::Given(given) => match given.get(info.index).or(given.last()) {
            Some(costs) => Ok((costs.clone(), None)),
            None => Ok((measure(device, pool, hang_after)?, None)),
        },
        CalibrationSource::Measure => Ok((measure(device, pool, hang_after)?, None)),
        CalibrationSource::Cache(path) => {
            let key = Key::new(&info);
            let mut entries = read(path);
            if let Some(kept) = entries.iter().find(|entry| entry.key == key) {
                return Ok((kept.costs.clone(), None));
            }
            let costs = measure(device, pool, hang_after)?;
            // Figures of the same device under another driver or version are useless.
            entries.retain(|entry| entry.key.uuid != key.uuid);
            entries.push(Entry { key, costs: costs.clone() });
            Ok((costs, write(path, entries).err()))
        }
    }
}

/// The entries of the file; none if it does not exist or cannot be parsed, since they can be
/// measured again.
fn read(path: &Path) -> Vec<Entry> {
    let kept = files::read(path, Source::File, KEPT_BYTES_MAX)
        .ok()
        .and_then(|text| serde_json::from_slice::<Kept>(&text).ok());
    let entries = kept.filter(|kept| kept.form == FORM).map_or(Vec::new(), |kept| kept.entries);
    entries.into_iter().filter(|entry| entry.costs.are_usable()).collect()
}

/// Replaces the file as a whole, so that a crash leaves the old or the new one.
fn write(path: &Path, entries: Vec<Entry>) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let text = serde_json::to_vec_pretty(&Kept { form: FORM, entries })?;
    let next = path.with_extension("next");
    fs::write(&next, text)?;
    fs::rename(&next, path)
}

fn cpu_model() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text.lines().find(|line| line.starts_with("model name"));
    let model = model.and_then(|line| line.split_once(':')).map(|(_, name)| name.trim().to_owned());
    model.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Measures in well under a second on any useful device.
fn measure(device: &mut dyn Device, pool: &Pool, hang_after: Duration) -> Result<Costs, DeviceError> {
    let until = Instant::now() + BUDGET;
    let memory = Memory::new(pool);
    let mut tables: [Vec<Point>; Class::ALL.len()] = Default::default();
    // Small sizes first for all classes: if time runs out, large ones can be extrapolated.
    for bytes in SIZES {
        for class in Class::ALL {
            let table = &mut tables[class as usize];
            // The first size is measured however long that takes, since there must be one.
            if !table.is_empty() && Instant::now() >= until {
                continue;
            }
            if let Some(seconds) = batch_seconds(device, &memory, class, bytes, until, hang_after)? {
                table.push(Point { bytes: bytes as u64, seconds });
            }
        }
    }
    let mut costs = Class::ALL.into_iter().zip(tables).map(|(class, batches)| ClassCosts {
        class,
        batches: rising(batches),
        cpu_seconds_per_byte: cpu_seconds_per_byte(&memory, class),
    });
    let costs = Costs { classes: [(); Class::ALL.len()].map(|()| costs.next().expect("one a class")) };
    if costs.are_usable() {
        return Ok(costs);
    }
    let text =
        format!("a slot of {} bytes or the pool is too small to measure anything", device.slot_bytes());
    Err(DeviceError::Failed { operation: "calibration", text })
}

/// A larger batch cannot take less time; where it was measured to, something disturbed the smaller
/// one.
fn rising(mut points: Vec<Point>) -> Vec<Point> {
    for at in (1..points.len()).rev() {
        points[at - 1].seconds = points[at - 1].seconds.min(points[at].seconds);
    }
    points
}

/// Seconds of a batch, the fastest of several runs; None when a slot cannot hold it.
fn batch_seconds(
    device: &mut dyn Device,
    memory: &Memory,
    class: Class,
    bytes: usize,
    until: Instant,
    hang_after: Duration,
) -> Result<Option<f64>, DeviceError> {
    let jobs = memory.jobs(class, bytes);
    let kind = Kind::of(&jobs[0]).expect("jobs that devices do");
    if jobs.iter().map(|job| kind.slot_bytes(job)).sum::<usize>() > device.slot_bytes() {
        return Ok(None);
    }
    let mut batch = Batch::new(kind, jobs);
    let mut fastest = Duration::MAX;
    for repeat in 0..REPEATS {
        let (again, _, took) = match trial::run(device, batch, hang_after) {
            Ok(result) => result,
            // In memory that the device does not know, a batch is limited further.
            Err(DeviceError::Unsupported(_)) => return Ok(None),
            Err(error) => return Err(error),
        };
        (batch, fastest) = (again, fastest.min(took));
        if repeat > 0 && Instant::now() >= until {
            break;
        }
    }
    Ok(Some(fastest.as_secs_f64().max(1e-9)))
}

fn cpu_seconds_per_byte(memory: &Memory, class: Class) -> f64 {
    let mut fastest = Duration::MAX;
    for _ in 0..2 {
        let jobs = memory.jobs(class, CPU_BYTES);
        let started = Instant::now();
        let done: Vec<_> = jobs.into_iter().map(CodecJob::run).collect();
        fastest = fastest.min(started.elapsed());
        drop(done);
    }
    fastest.as_secs_f64().max(1e-9) / CPU_BYTES as f64
}

/// Bytes to measure with, in memory that the device knows as far as available.
struct Memory {
    input: Buf,
    pool: Pool,
    codec: Codec,
    recovery: Transform,
}

impl Memory {
    fn new(pool: &Pool) -> Memory {
        let (mut bytes, mut input) = (INPUT_BYTES_MAX, pool.alloc(INPUT_BYTES_MAX));
        while !pool.contains(input.as_ptr(), bytes) && bytes > SIZES[0] {
            bytes /= 2;
            input = pool.alloc(bytes);
        }
        let mut state = 0x9E37_79B9_7F4A_7C15u64;
        for chunk in input.chunks_exact_mut(8) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        let codec = Codec::new(MEASURED_DATA, MEASURED_PARITY).expect("a geometry");
        let present: Vec<usize> = (1..=MEASURED_DATA).collect();
        let recovery = codec.recovery(&present, &[0]).expect("a pattern");
        Memory { input: input.freeze(), pool: pool.clone(), codec, recovery }
    }

    /// Jobs with `bytes` of input.
    fn jobs(&self, class: Class, bytes: usize) -> Vec<CodecJob> {
        let transform = match class {
            Class::EncodeHash | Class::Encode => Some(self.codec.encoding()),
            Class::RecoverHash => Some(self.recovery.clone()),
            Class::Hash => None,
        };
        let columns = transform.as_ref().map_or(1, Transform::inputs);
        let length = (bytes / columns).min(COLUMN_BYTES_MAX);
        let outputs = transform.as_ref().map_or(0, Transform::outputs);
        (0..bytes / (columns * length))
            .map(|nth| {
                let at = |column: usize| ((nth * columns + column) * length) % self.input.len();
                let input = |column| Column::Shared(self.input.slice(at(column)..at(column) + length));
                let targets: Vec<BufMut> = (0..outputs).map(|_| self.pool.alloc(length)).collect();
                CodecJob {
                    transform: transform.clone(),
                    hasher: (class != Class::Encode).then_some(BlockHasher::Blake3),
                    inputs: (0..columns).map(input).collect(),
                    outputs: if outputs > 0 { Outputs::Into(targets) } else { Outputs::Hashed },
                }
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::Driver;
    use super::super::fake::{FakeDevice, FakeDriver, Fault};
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn device(slot_bytes: usize) -> (FakeDriver, Pool) {
        let pool = Pool::new(32 << 20).expect("memory");
        (FakeDriver::new(vec![FakeDevice { slot_bytes, ..FakeDevice::default() }]), pool)
    }

    #[test]
    fn what_fits_a_slot_is_measured_for_every_class() {
        let (driver, pool) = device(2 << 20);
        let mut device = driver.open(0, std::slice::from_ref(&pool)).expect("it opens");
        let (costs, unkept) = costs(&CalibrationSource::Measure, &mut *device, &pool, LONG).expect("figures");
        assert!(costs.are_usable() && unkept.is_none());
        for class in &costs.classes {
            assert!(class.batches.iter().all(|point| point.bytes <= 2 << 20), "{:?}", class.batches);
            assert!(class.batches.windows(2).all(|pair| pair[0].seconds <= pair[1].seconds));
        }
        assert_eq!(driver.violations(), Vec::<String>::new());
    }

    #[test]
    fn figures_are_kept_for_the_same_device_and_measured_for_another() {
        let folder = tempfile::tempdir().expect("a folder");
        let source = CalibrationSource::Cache(folder.path().join("below/gpu.json"));
        let (driver, pool) = device(200 << 10);
        let mut device = driver.open(0, std::slice::from_ref(&pool)).expect("it opens");
        let mut costs = || costs(&source, &mut *device, &pool, LONG).expect("figures").0;
        let first = costs();
        let measured = driver.batches(0);
        // Text may lose the last bit of a figure.
        let near = |(one, other): (&ClassCosts, &ClassCosts)| {
            one.batches.len() == other.batches.len()
                && (one.cpu_seconds_per_byte / other.cpu_seconds_per_byte - 1.0).abs() < 1e-9
        };
        assert!(costs().classes.iter().zip(&first.classes).all(near));
        assert_eq!(driver.batches(0), measured, "nothing was measured again");
        let CalibrationSource::Cache(path) = &source else { unreachable!() };
        let text = fs::read_to_string(path).expect("kept");
        fs::write(path, text.replace("\"driver\": \"fake\"", "\"driver\": \"older\"")).expect("written");
        costs();
        assert!(driver.batches(0) > measured, "another driver has other figures");
        assert_eq!(read(path).len(), 1);
    }

    #[test]
    fn a_file_that_means_nothing_is_measured_again_and_one_that_cannot_be_written_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("gpu.json");
        let (driver, pool) = device(200 << 10);
        let mut device = driver.open(0, std::slice::from_ref(&pool)).expect("it opens");
        fs::write(&path, "{\"form\": 1, \"entries\": [{}]}").expect("written");
        let source = CalibrationSource::Cache(path.clone());
        assert!(costs(&source, &mut *device, &pool, LONG).expect("figures").1.is_none());
        assert_eq!(read(&path).len(), 1);
        let source = CalibrationSource::Cache(path.join("not a folder"));
        assert!(costs(&source, &mut *device, &pool, LONG).expect("figures").1.is_some());
    }

    #[test]
    fn a_device_that_fails_or_holds_nothing_has_no_figures() {
        for (slot_bytes, fault) in [(200 << 10, Fault::Finish), (4096, Fault::None)] {
            let (driver, pool) = device(slot_bytes);
            driver.inject(0, 0, fault);
            let mut device = driver.open(0, std::slice::from_ref(&pool)).expect("it opens");
            assert!(costs(&CalibrationSource::Measure, &mut *device, &pool, LONG).is_err());
        }
    }
}
