//! Lines of the log on their way to standard error, for processes that serve. A thread that logs hands its
//! line over and goes on; another thread writes. A reader that stops reading costs lines, never requests.
//!
//! Invariants: only its own thread ever waits for standard error; no more than a fixed number of lines wait;
//! lines without room are counted. Must not know what the lines say.

use nix::sys::signal::{SigSet, SigmaskHow};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Most lines that wait: those of a busy minute, about 1 MB.
const LINES_MAX: usize = 4096;

/// How often [`flush`] checks.
const FLUSH_POLL: Duration = Duration::from_millis(1);

/// The queue of this process, if it has one.
static QUEUE: OnceLock<Queue> = OnceLock::new();

/// See the head of this file.
#[derive(Clone, Debug)]
pub(crate) struct Queue {
    lines: SyncSender<Vec<u8>>,
    counts: Arc<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    /// Lines handed over and not written.
    waiting: AtomicU64,
    /// Lines dropped for lack of room since the log last said so.
    left_out: AtomicU64,
}

impl Queue {
    /// The queue to standard error of this process; the same one for every caller.
    ///
    /// # Errors
    /// Standard error is closed, or no thread can be started.
    pub(crate) fn to_stderr() -> io::Result<Queue> {
        if QUEUE.get().is_none() {
            // Not through the library's handle: other threads that print would wait for its lock.
            let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
            // If two threads come here at once, one queue stays unused.
            let _ = QUEUE.set(Queue::to(stderr)?);
        }
        Ok(QUEUE.get().expect("it was just set").clone())
    }

    fn to(out: impl Write + Send + 'static) -> io::Result<Queue> {
        let (lines, taken) = sync_channel(LINES_MAX);
        let counts = Arc::new(Counts::default());
        let queue = Queue { lines, counts: Arc::clone(&counts) };
        // This thread starts before signals are blocked for the process. It blocks all of them:
        // otherwise a signal would be delivered to it and end the process.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let thread = std::thread::Builder::new().name("log".into());
        let spawned = thread.spawn(move || write_all(&taken, out, &counts));
        before.thread_set_mask()?;
        spawned.map(|_| queue)
    }

    fn hand_over(&self, line: &[u8]) {
        self.counts.waiting.fetch_add(1, Ordering::AcqRel);
        if self.lines.try_send(line.to_vec()).is_err() {
            self.counts.waiting.fetch_sub(1, Ordering::AcqRel);
            self.counts.left_out.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn flush(&self, limit: Duration) {
        let started = Instant::now();
        while self.counts.waiting.load(Ordering::Acquire) > 0 && started.elapsed() < limit {
            std::thread::sleep(FLUSH_POLL);
        }
    }
}

/// Runs on the queue's thread.
fn write_all(lines: &Receiver<Vec<u8>>, mut out: impl Write, counts: &Counts) {
    for line in lines {
        // Errors of the log only cost its lines.
        let _ = out.write_all(&line);
        counts.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

/// One call of the log's formatter is one line.
impl Write for Queue {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.hand_over(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until the lines of this process are written, but not for longer than `limit`.
pub(crate) fn flush(limit: Duration) {
    if let Some(queue) = QUEUE.get() {
        queue.flush(limit);
    }
}

/// Lines dropped for lack of room since the last call. Zero while there is still no room: the line that says
/// so would be dropped as well.
pub(crate) fn take_left_out() -> u64 {
    let Some(Queue { counts, .. }) = QUEUE.get() else { return 0 };
    if counts.waiting.load(Ordering::Acquire) >= LINES_MAX as u64 {
        return 0;
    }
    counts.left_out.swap(0, Ordering::AcqRel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_reader_that_does_not_read_costs_lines_and_no_time() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut queue = Queue::to(writer).unwrap();
        let line = [b'x'; 1000];
        let pipe_holds = (1 << 20) / line.len();
        let count = LINES_MAX + pipe_holds + 100;
        for _ in 0..count {
            queue.write_all(&line).unwrap();
        }
        let left_out = queue.counts.left_out.load(Ordering::Acquire);
        assert!(left_out >= 100, "{left_out}");
        let started = Instant::now();
        queue.flush(Duration::from_millis(20));
        assert!(queue.counts.waiting.load(Ordering::Acquire) > 0 && started.elapsed().as_secs() < 10);
        // Once it is read again, everything that was taken comes.
        let expected = (count - left_out as usize) * line.len();
        let mut all = vec![0; expected];
        reader.read_exact(&mut all).unwrap();
        queue.flush(Duration::from_secs(60));
        assert_eq!(queue.counts.waiting.load(Ordering::Acquire), 0);
    }
}
