//! Kernels on columns that are already in device memory: their rate compared with that of a copy inside the
//! device.
#![allow(unsafe_code)] // kernels on memory that this file owns

use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::{GEOMETRIES, REPETITIONS, Rate, codec, method_name, noise, recovery};
use crate::cuda::api::{Context, DeviceMemory, Event, Gpu, Stream};
use crate::cuda::kernels::{Columns, Kernels, TABLES_BYTES_MAX};
use crate::cuda::programs::Program;
use crate::cuda::tables::push_tables;
use crate::cuda::tuning::Method;
use crate::device::DeviceError;
use calpe_core::codec::Transform;

/// Bytes of all columns of a computation: many times the caches.
const COLUMNS_BYTES: usize = 1 << 30;

/// Fewest launches of one measurement.
const LAUNCHES: usize = 3;

/// Fewest bytes of one measurement: the first launch on an idle device takes longer than the next.
const MEASURED_BYTES: usize = 64 << 20;

/// Numbers of streams that launches for hashing use in turn, as batches on a device do.
const HASH_STREAMS: [usize; 2] = [1, 4];

/// Bytes hashed at a time.
const HASHED: [usize; 5] = [1 << 30, 64 << 20, 16 << 20, 4 << 20, 1 << 20];

/// Random bytes that the columns repeat.
const NOISE_BYTES: usize = 64 << 20;

/// One matrix applied by one method.
#[derive(Clone, Debug, Serialize)]
pub struct ResidentRow {
    /// Data and parity columns.
    pub geometry: String,
    /// Whether all parities are encoded or as many lost data columns recovered.
    pub operation: &'static str,
    /// The method.
    pub method: &'static str,
    /// Bytes of all columns read and written.
    pub moved: Rate,
    /// `moved` as a fraction of the rate of a copy inside the device.
    pub of_copy: f64,
    /// GB/s of user data.
    pub user_gb_per_s: f64,
    /// Milliseconds that compiling the matrix took; 0 if nothing was compiled.
    pub compile_ms: f64,
    /// Operations on each word of a column; 0 if nothing was compiled.
    pub operations: usize,
}

/// Hashing by one kernel.
#[derive(Clone, Debug, Serialize)]
pub struct HashRow {
    /// Bytes of a launch.
    pub bytes: usize,
    /// The kernel.
    pub kernel: &'static str,
    /// Launches under way at a time.
    pub streams: usize,
    /// Bytes hashed.
    pub rate: Rate,
}

struct Bench {
    context: Arc<Context>,
    kernels: Kernels,
    stream: Stream,
    /// Further streams for launches beside those of `stream`, each with the event of its end.
    beside: Vec<(Stream, Event)>,
    begin: Event,
    end: Event,
    columns: DeviceMemory,
    control: DeviceMemory,
    digests: DeviceMemory,
}

pub(super) fn measure(index: usize, copy: f64) -> Result<(Vec<ResidentRow>, Vec<HashRow>), DeviceError> {
    let gpu = Gpu::nth(index)?;
    let context = Context::new(gpu)?;
    let mut kernels = Kernels::load(&context, gpu)?;
    kernels.load_logexp()?;
    let bench = Bench {
        kernels,
        stream: Stream::new(&context, 0)?,
        beside: (1..HASH_STREAMS[1])
            .map(|_| Ok((Stream::new(&context, 0)?, Event::new(&context, false)?)))
            .collect::<Result<_, DeviceError>>()?,
        begin: Event::new(&context, true)?,
        end: Event::new(&context, true)?,
        columns: DeviceMemory::new(&context, COLUMNS_BYTES)?,
        control: DeviceMemory::new(&context, TABLES_BYTES_MAX)?,
        digests: DeviceMemory::new(&context, COLUMNS_BYTES / 256)?,
        context,
    };
    let mut random = vec![0; NOISE_BYTES];
    noise(&mut random);
    for at in (0..COLUMNS_BYTES).step_by(NOISE_BYTES) {
        // SAFETY: inside the columns; waited for.
        unsafe { bench.stream.copy_in(bench.columns.start() + at as u64, random.as_ptr(), NOISE_BYTES) }?;
        bench.stream.synchronise()?;
    }
    let mut coded = Vec::new();
    for (data, parity) in GEOMETRIES {
        let codec = codec(data, parity);
        for (operation, transform) in [("encode", codec.encoding()), ("recover", recovery(&codec, parity))] {
            for method in [Method::Xor, Method::LogExp, Method::Table] {
                let mut row = bench.code(&transform, method)?;
                row.of_copy = row.moved.gb_per_s_median / copy;
                coded.push(ResidentRow { geometry: format!("{data}+{parity}"), operation, ..row });
            }
        }
    }
    let mut hashed = Vec::new();
    for bytes in HASHED {
        for (kernel, lanes) in [("blake3_4k", false), ("blake3_4k_lanes", true)] {
            for streams in HASH_STREAMS {
                let blocks = bytes / 4096;
                let rate = bench.timed(bytes, streams, &|stream, nth| {
                    // Different bytes each time, which no cache holds.
                    let offset = (nth * bytes % COLUMNS_BYTES) as u64;
                    let (input, digests) =
                        (bench.columns.start() + offset, bench.digests.start() + offset / 256);
                    // SAFETY: the columns hold that many blocks from there on, and there is room for their
                    // digests.
                    unsafe { bench.kernels.blake3_4k(stream, input, blocks, digests, lanes) }
                })?;
                hashed.push(HashRow { bytes, kernel, streams, rate });
            }
        }
    }
    Ok((coded, hashed))
}

impl Bench {
    /// Measures launches on `streams` streams in turn. Each launch gets its stream and its number.
    fn timed(
        &self,
        bytes: usize,
        streams: usize,
        queue: &dyn Fn(&Stream, usize) -> Result<(), DeviceError>,
    ) -> Result<Rate, DeviceError> {
        let launches = LAUNCHES.max(MEASURED_BYTES / bytes);
        let beside = &self.beside[..streams - 1];
        let mut rates = Vec::new();
        for repetition in 0..=REPETITIONS {
            self.begin.record(&self.stream)?;
            for (stream, _) in beside {
                stream.wait(&self.begin)?;
            }
            for nth in 0..launches {
                let stream = match nth % streams {
                    0 => &self.stream,
                    other => &beside[other - 1].0,
                };
                queue(stream, nth)?;
            }
            for (stream, done) in beside {
                done.record(stream)?;
                self.stream.wait(done)?;
            }
            self.end.record(&self.stream)?;
            self.stream.synchronise()?;
            if repetition > 0 {
                rates.push((bytes * launches) as f64 / self.begin.seconds_to(&self.end)?);
            }
        }
        Ok(Rate::of(rates))
    }

    fn code(&self, transform: &Transform, method: Method) -> Result<ResidentRow, DeviceError> {
        let (inputs, outputs) = (transform.inputs(), transform.outputs());
        let bytes = (COLUMNS_BYTES / (inputs + outputs)) & !0xFFFF;
        let columns = Columns {
            input: self.columns.start(),
            input_ld: bytes,
            output: self.columns.start() + (inputs * bytes) as u64,
            output_ld: bytes,
            bytes,
            inputs,
            outputs,
        };
        let mut factors = Vec::new();
        match method {
            Method::LogExp => factors.extend_from_slice(transform.matrix()),
            _ => push_tables(transform.matrix().iter().copied(), &mut factors),
        }
        // SAFETY: no more than a code's factors, for which there is room; waited for.
        unsafe { self.stream.copy_in(self.control.start(), factors.as_ptr(), factors.len()) }?;
        self.stream.synchronise()?;
        let program = match method {
            Method::Xor => Some(Program::compile(&self.context, transform.matrix(), inputs, outputs)?),
            _ => None,
        };
        let moved = self.timed((inputs + outputs) * bytes, 1, &|stream, _| {
            let control = self.control.start();
            // SAFETY: all columns lie in this bench's memory, and program and factors stay until it
            // has been waited for.
            unsafe {
                match &program {
                    Some(program) => program.launch(stream, &columns),
                    None if method == Method::LogExp => {
                        self.kernels.logexp(stream, &columns, control, transform.matrix().len())
                    }
                    None => self.kernels.table(stream, &columns, control),
                }
            }
        })?;
        Ok(ResidentRow {
            geometry: String::new(),
            operation: "",
            method: method_name(method),
            of_copy: 0.0,
            user_gb_per_s: moved.gb_per_s_median * inputs as f64 / (inputs + outputs) as f64,
            compile_ms: program.as_ref().map_or(0.0, |program| program.took.as_secs_f64() * 1e3),
            operations: program.as_ref().map_or(0, |program| program.operations),
            moved,
        })
    }
}

impl fmt::Display for ResidentRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ResidentRow { geometry, operation, method, moved, of_copy, user_gb_per_s, .. } = self;
        write!(
            f,
            "{geometry:>7} {operation:<14} {method:<11} {moved:<26} {of_copy:>5.3} {user_gb_per_s:>11.0}"
        )?;
        if self.operations > 0 {
            write!(f, "   {:.0} ms, {} operations", self.compile_ms, self.operations)?;
        }
        Ok(())
    }
}

impl fmt::Display for HashRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let HashRow { bytes, kernel, streams, rate } = self;
        write!(f, "{:>6} MiB {kernel:<16} {streams} at a time   {rate}", bytes >> 20)
    }
}
