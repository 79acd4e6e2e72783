//! Kernels made for one matrix: a thread compiles them once a matrix is used repeatedly, and they
//! are kept while they are used. Nothing waits for them: until one is ready, other kernels compute
//! the same bytes.
//!
//! Invariants: a program is ready only once it has given answers that the CPU knows; at most
//! [`KEPT_MAX`] matrices are known at a time, and the least recently used one is dropped; a program
//! that a batch holds is not unloaded. Must not know of slots.
#![allow(unsafe_code)] // kernels are given addresses

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::api::{Context, DeviceMemory, Function, Module, Stream};
use super::kernels::Columns;
use super::known::{self, Layout};
use crate::device::DeviceError;
use crate::ptx;

/// Matrices that are remembered. A module takes device memory; an array in use has one matrix for
/// writing and one for each set of lost members.
const KEPT_MAX: usize = 64;

/// Most factors of a matrix that is compiled: larger ones take seconds, and their straight code
/// outgrows the instruction caches.
const FACTORS_MAX: usize = 2048;

/// The kernels of one matrix.
pub(super) struct Program {
    passes: Vec<Pass>,
    /// How long compiling and assembling took.
    pub took: Duration,
    /// Operations on each word of a column.
    pub operations: usize,
}

struct Pass {
    function: Function,
    row: usize,
    threads: u32,
    block_bytes: usize,
    /// Dropped after the function, which must not outlive it.
    _module: Module,
}

impl Program {
    /// Compiles, prints and assembles a matrix of `outputs` rows of `inputs` factors.
    ///
    /// # Errors
    /// When the driver does not take the kernels.
    pub(super) fn compile(
        context: &Arc<Context>,
        matrix: &[u8],
        inputs: usize,
        outputs: usize,
    ) -> Result<Program, DeviceError> {
        let begun = Instant::now();
        let mut operations = 0;
        let passes = ptx::kernels_for(matrix, inputs, outputs)
            .into_iter()
            .map(|pass| {
                operations += pass.program.counts().operations();
                let name = format!("rs_xor of {inputs} inputs, rows from {} of {outputs}", pass.row);
                let module = Module::assembled(context, &name, &pass.text)?;
                Ok(Pass {
                    function: module.function(ptx::ENTRY)?,
                    row: pass.row,
                    threads: pass.shape.block as u32,
                    block_bytes: pass.shape.block_bytes(),
                    _module: module,
                })
            })
            .collect::<Result<_, DeviceError>>()?;
        Ok(Program { passes, took: begun.elapsed(), operations })
    }

    /// Computes all outputs. Lengths and distances are multiples of 16.
    ///
    /// # Errors
    /// When it cannot be launched.
    ///
    /// # Safety
    /// The columns must be valid and not otherwise written until it is done, and the program kept
    /// until then.
    pub(super) unsafe fn launch(&self, stream: &Stream, columns: &Columns) -> Result<(), DeviceError> {
        if columns.bytes == 0 {
            return Ok(());
        }
        for pass in &self.passes {
            let output = columns.output + (pass.row * columns.output_ld) as u64;
            let mut arguments = [
                columns.input,
                columns.input_ld as u64,
                output,
                columns.output_ld as u64,
                columns.bytes as u64,
            ];
            let blocks = columns.bytes.div_ceil(pass.block_bytes) as u32;
            // SAFETY: the parameters of every printed kernel, in order; the caller vouches for the
            // columns.
            unsafe { stream.launch(&pass.function, blocks, pass.threads, &mut arguments) }?;
        }
        Ok(())
    }
}

/// Bytes between the columns of a trial, which show writes outside the columns.
const TRIAL_GAP: usize = 16;

/// Memory on which programs are tried before they are used: its own, so that nothing waits for an
/// allocation.
struct Trial {
    stream: Stream,
    inputs: DeviceMemory,
    outputs: DeviceMemory,
}

impl Trial {
    fn new(context: &Arc<Context>) -> Result<Trial, DeviceError> {
        let (least, _) = context.priorities()?;
        // Several blocks and a part of one, of as many columns as a code has.
        let bytes = 255 * (2 * ptx::BLOCK_BYTES_MAX + 8 * TRIAL_GAP);
        Ok(Trial {
            stream: Stream::new(context, least)?,
            inputs: DeviceMemory::new(context, bytes)?,
            outputs: DeviceMemory::new(context, bytes)?,
        })
    }

    /// Compares a program's answer with the CPU's, between and behind the columns too.
    fn run(&self, program: &Program, matrix: &[u8], inputs: usize) -> Result<(), DeviceError> {
        let block = program.passes.iter().map(|pass| pass.block_bytes).max().unwrap_or(0);
        let bytes = 2 * block + 5 * TRIAL_GAP;
        let ld = bytes + TRIAL_GAP;
        let layout =
            Layout { skip: 0, input_ld: ld, output_ld: ld, bytes, inputs, outputs: matrix.len() / inputs };
        let mut state = 0x2545_F491u32;
        let mut noise = || {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            (state >> 16) as u8
        };
        let given: Vec<u8> = (0..inputs * ld).map(|_| noise()).collect();
        let expected = known::reference(matrix, &layout, &given);
        known::upload(&self.stream, &self.inputs, &given)?;
        known::poison(&self.stream, &self.outputs, expected.len())?;
        let columns = Columns {
            input: self.inputs.start(),
            input_ld: ld,
            output: self.outputs.start(),
            output_ld: ld,
            bytes,
            inputs,
            outputs: layout.outputs,
        };
        // SAFETY: all columns lie in the memory of this trial, as `upload` and `poison` have
        // checked, and the program is kept until `download` has waited.
        unsafe { program.launch(&self.stream, &columns) }?;
        let found = known::download(&self.stream, &self.outputs, expected.len())?;
        match found.iter().zip(&expected).position(|(is, should)| is != should) {
            None => Ok(()),
            Some(at) => {
                let text = format!("output {} differs from the CPU's from byte {} on", at / ld, at % ld);
                Err(DeviceError::Failed { operation: "trying a compiled matrix", text })
            }
        }
    }
}

/// Inputs, and the factors row by row.
type Key = (usize, Arc<[u8]>);

enum State {
    /// The number of batches in which the matrix was seen.
    Seen(u32),
    Asked,
    Ready(Arc<Program>),
    /// Not to be tried again.
    Refused,
}

struct Known {
    state: State,
    used: u64,
}

#[derive(Default)]
struct Cache {
    known: HashMap<Key, Known>,
    clock: u64,
}

impl Cache {
    /// The entry of a key, new or old, and the entry that was dropped for it.
    fn touch(&mut self, key: &Key) -> (&mut Known, Option<Known>) {
        self.clock += 1;
        let mut gone = None;
        if !self.known.contains_key(key) {
            if self.known.len() >= KEPT_MAX {
                let oldest =
                    self.known.iter().min_by_key(|(_, known)| known.used).map(|(key, _)| key.clone());
                gone = oldest.and_then(|oldest| self.known.remove(&oldest));
            }
            self.known.insert(key.clone(), Known { state: State::Seen(0), used: 0 });
        }
        let known = self.known.get_mut(key).expect("inserted above");
        known.used = self.clock;
        (known, gone)
    }
}

/// A program that has passed its trial.
fn compiled(
    context: &Arc<Context>,
    trial: &Mutex<Trial>,
    matrix: &[u8],
    inputs: usize,
) -> Result<Program, DeviceError> {
    let program = Program::compile(context, matrix, inputs, matrix.len() / inputs)?;
    trial.lock().unwrap_or_else(PoisonError::into_inner).run(&program, matrix, inputs)?;
    Ok(program)
}

/// The programs of one context.
pub(super) struct Programs {
    context: Arc<Context>,
    /// Held while compiling.
    trial: Arc<Mutex<Trial>>,
    cache: Arc<Mutex<Cache>>,
    requests: Option<Sender<Key>>,
    thread: Option<JoinHandle<()>>,
    /// Requested compilations are not needed any more.
    over: Arc<AtomicBool>,
}

impl Programs {
    /// None yet.
    ///
    /// # Errors
    /// When no thread can be started.
    pub(super) fn new(context: &Arc<Context>) -> Result<Programs, DeviceError> {
        let cache = Arc::new(Mutex::new(Cache::default()));
        let (requests, received) = mpsc::channel::<Key>();
        let over = Arc::new(AtomicBool::new(false));
        let trial = Arc::new(Mutex::new(Trial::new(context)?));
        let (theirs, shared, stop) = (Arc::clone(context), Arc::clone(&cache), Arc::clone(&over));
        let tried = Arc::clone(&trial);
        let work = move || {
            for key in received {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let outputs = key.1.len() / key.0;
                let state = match compiled(&theirs, &tried, &key.1, key.0) {
                    Ok(program) => State::Ready(Arc::new(program)),
                    Err(error) => {
                        tracing::warn!("a matrix of {outputs} rows is computed by tables: {error}");
                        State::Refused
                    }
                };
                let mut cache = shared.lock().unwrap_or_else(PoisonError::into_inner);
                // The matrix was dropped meanwhile: the next batch that needs it requests it again.
                if let Some(known) = cache.known.get_mut(&key) {
                    known.state = state;
                }
            }
        };
        let thread =
            std::thread::Builder::new().name("gpu-compile".to_owned()).spawn(work).map_err(|error| {
                DeviceError::Failed { operation: "starting a thread", text: error.to_string() }
            })?;
        Ok(Programs {
            context: Arc::clone(context),
            trial,
            cache,
            requests: Some(requests),
            thread: Some(thread),
            over,
        })
    }

    /// The program of a matrix if it is ready. Requests it when the matrix was seen `after` times
    /// before.
    #[must_use]
    pub(super) fn get(&self, matrix: &[u8], inputs: usize, after: u32) -> Option<Arc<Program>> {
        if matrix.is_empty() || matrix.len() > FACTORS_MAX {
            return None;
        }
        let key: Key = (inputs, matrix.into());
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, gone) = cache.touch(&key);
        let mut ask = false;
        let found = match &mut known.state {
            State::Ready(program) => Some(Arc::clone(program)),
            State::Seen(times) => {
                *times += 1;
                ask = *times > after;
                None
            }
            State::Asked | State::Refused => None,
        };
        if ask {
            let sent = self.requests.as_ref().is_some_and(|requests| requests.send(key).is_ok());
            known.state = if sent { State::Asked } else { State::Refused };
        }
        drop(cache);
        // Unloading calls the driver, which must not happen while the cache is locked.
        drop(gone);
        found
    }

    /// The program of a matrix, compiled now unless it is ready.
    ///
    /// # Errors
    /// When the driver does not take the kernels, or they do not compute what the CPU does.
    pub(super) fn get_now(&self, matrix: &[u8], inputs: usize) -> Result<Arc<Program>, DeviceError> {
        let key: Key = (inputs, matrix.into());
        {
            let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
            if let State::Ready(program) = &cache.touch(&key).0.state {
                return Ok(Arc::clone(program));
            }
        }
        let program = Arc::new(compiled(&self.context, &self.trial, matrix, inputs)?);
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.touch(&key).0.state = State::Ready(Arc::clone(&program));
        Ok(program)
    }

    /// Asks the thread to end, without waiting for it; the owner of the handle waits.
    pub(super) fn give_up(&mut self) -> Option<JoinHandle<()>> {
        self.over.store(true, Ordering::Relaxed);
        self.requests = None;
        self.thread.take()
    }
}

impl Drop for Programs {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            // The thread panics only if a matrix breaks an invariant, and has reported that.
            let _ = thread.join();
        }
    }
}
