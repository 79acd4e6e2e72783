//! Calls that a filesystem or a device may never answer (open, stat, close, a first read), made on threads of their own and
//! waited for within a limit, so that what hangs costs its own member and nothing else (rule T7).
//!
//! A thread that hangs stays until its call ends, and what the call yields then is dropped there. While one hangs for a path,
//! no other is started for it: attempts that are repeated do not pile up. Must not know what calls are for.

use super::DeviceError;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Calls that are made at one time for a list of paths: an array on a filesystem that hangs costs the limit once or a few times,
/// not once for each member.
const AT_ONCE: usize = 32;

/// Time between attempts to begin a thread.
const THREAD_RETRY: Duration = Duration::from_millis(20);

/// How long a thread is tried for: most shortages pass, and somebody may wait for the answer.
const THREAD_PATIENCE: Duration = Duration::from_secs(2);

/// For so long after a thread was tried for in vain, each further one is tried for once: a list of paths costs the patience once,
/// not once for each path.
const SHORTAGE_REMEMBERED: Duration = Duration::from_secs(5);

/// When a thread was last tried for in vain.
static SHORT_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// Calls that were given up and have not ended, by path.
static HANGING: LazyLock<Mutex<HashMap<PathBuf, usize>>> = LazyLock::new(Mutex::default);

fn hanging() -> MutexGuard<'static, HashMap<PathBuf, usize>> {
    HANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a call about a path was given up and has not ended.
#[must_use]
pub fn hangs(path: &Path) -> bool {
    hanging().contains_key(path)
}

/// Makes a call about `path` on a thread of its own. `action` is for the error ("open it").
///
/// # Errors
/// When it has not ended within the limit, or an earlier one still hangs, or there is no thread to make it.
pub fn within<T: Send + 'static>(
    path: &Path,
    action: &str,
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DeviceError> {
    let fail = |source| DeviceError::Io { path: path.into(), action: action.into(), source };
    let unanswered = |what: &str| fail(io::Error::new(io::ErrorKind::TimedOut, what.to_owned()));
    if hangs(path) {
        return Err(unanswered("it does not answer: an earlier attempt hangs still"));
    }
    let (sender, receiver) = sync_channel(1);
    let ended = Arc::new(Ended { path: path.into(), state: Mutex::default() });
    let in_thread = Arc::clone(&ended);
    let begun = begin(limit, move || {
        let value = call();
        // Whoever gave up gets nothing: then the value ends here, and only after that the call.
        let _ = sender.send(value);
        in_thread.end();
    });
    begun.map_err(|source| DeviceError::NoThread { path: path.into(), source })?;
    match receiver.recv_timeout(limit) {
        Ok(value) => Ok(value),
        Err(RecvTimeoutError::Timeout) => {
            ended.give_up();
            // It may have ended at the last moment.
            receiver.try_recv().map_err(|_| unanswered(&format!("no answer within {} s", limit.as_secs())))
        }
        Err(RecvTimeoutError::Disconnected) => panic!("a call that was waited for panicked"),
    }
}

/// Makes a call about each path, several at a time; as [`within`] for each of them. The answers come in the order of the paths.
pub fn each_within<T: Send + 'static>(
    paths: &[PathBuf],
    action: &str,
    limit: Duration,
    call: impl Fn(&Path) -> T + Send + Sync + 'static,
) -> Vec<Result<T, DeviceError>> {
    each_within_own(paths, action, &|_| limit, call)
}

/// As [`each_within`], where each path has a limit of its own.
pub fn each_within_own<T: Send + 'static>(
    paths: &[PathBuf],
    action: &str,
    limit: &(dyn Fn(&Path) -> Duration + Sync),
    call: impl Fn(&Path) -> T + Send + Sync + 'static,
) -> Vec<Result<T, DeviceError>> {
    let call = Arc::new(call);
    let next = AtomicUsize::new(0);
    let answers: Mutex<Vec<_>> = Mutex::new(paths.iter().map(|_| None).collect());
    let work = || {
        while let Some((at, path)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|at| Some((at, paths.get(at)?)))
        {
            let (call, own) = (Arc::clone(&call), path.clone());
            let answer = within(path, action, limit(path), move || call(&own));
            answers.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(answer);
        }
    };
    std::thread::scope(|scope| {
        // The caller's own thread is one of them: without others it takes longer.
        for _ in 1..paths.len().min(AT_ONCE) {
            let _ = new_thread().and_then(|thread| thread.spawn_scoped(scope, work));
        }
        work();
    });
    let answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
    answers.into_iter().map(|answer| answer.expect("every path was taken")).collect()
}

/// Makes a call about each item, all at the same time as far as there are threads; the caller's own thread makes those that
/// have none. The results come in the order of the items.
pub fn each_at_once<T: Sync, U: Send>(items: &[T], call: impl Fn(&T) -> U + Sync) -> Vec<U> {
    let call = &call;
    std::thread::scope(|scope| {
        let begun: Vec<_> = items
            .iter()
            .map(|item| new_thread().and_then(|thread| thread.spawn_scoped(scope, move || call(item))))
            .collect();
        // Those of this thread come when all others are under way.
        let results = begun.into_iter().zip(items).map(|(thread, item)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => call(item),
        });
        results.collect()
    })
}

/// Begins a thread, and tries again for a while, within the limit, where there is none to be had.
fn begin(limit: Duration, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let short_at = || SHORT_AT.lock().unwrap_or_else(PoisonError::into_inner);
    let is_short = short_at().is_some_and(|at| at.elapsed() < SHORTAGE_REMEMBERED);
    let deadline = Instant::now() + if is_short { Duration::ZERO } else { limit.min(THREAD_PATIENCE) };
    // A closure that found no thread is gone: the work stays here until one takes it.
    let work = Arc::new(Mutex::new(Some(work)));
    loop {
        let own = Arc::clone(&work);
        let take = move || {
            let work = own.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(work) = work {
                work();
            }
        };
        match new_thread().and_then(|thread| thread.name("patience".into()).spawn(take)) {
            Ok(_) => {
                *short_at() = None;
                return Ok(());
            }
            Err(error) if Instant::now() >= deadline => {
                if !is_short {
                    *short_at() = Some(Instant::now());
                }
                return Err(error);
            }
            Err(_) => {
                std::thread::sleep(THREAD_RETRY.min(deadline.saturating_duration_since(Instant::now())))
            }
        }
    }
}

/// What begins a thread.
///
/// # Errors
/// Where a test has taken all threads away; the system says so only when the thread is begun.
fn new_thread() -> io::Result<std::thread::Builder> {
    #[cfg(test)]
    if tests::NO_THREADS.get() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok(std::thread::Builder::new())
}

/// Runs something that can begin no threads here.
#[cfg(test)]
pub(crate) fn without_threads<T>(run: impl FnOnce() -> T) -> T {
    tests::NO_THREADS.set(true);
    let value = run();
    tests::NO_THREADS.set(false);
    value
}

/// Where a call and its caller agree on whether it was given up.
struct Ended {
    path: PathBuf,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum State {
    #[default]
    Waited,
    GivenUp,
    Over,
}

impl Ended {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_up(&self) {
        let mut state = self.state();
        if *state == State::Waited {
            *state = State::GivenUp;
            *hanging().entry(self.path.clone()).or_default() += 1;
        }
    }

    fn end(&self) {
        let mut state = self.state();
        if std::mem::replace(&mut *state, State::Over) == State::GivenUp {
            let mut hanging = hanging();
            if let Some(count) = hanging.get_mut(&self.path) {
                *count -= 1;
                if *count == 0 {
                    hanging.remove(&self.path);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::mpsc::channel;

    thread_local! {
        /// This thread can begin no others.
        pub(super) static NO_THREADS: Cell<bool> = const { Cell::new(false) };
    }

    #[test]
    fn a_shortage_of_threads_is_told_as_one_and_nothing_counts_as_hanging() {
        NO_THREADS.set(true);
        let answer = within(Path::new("/short"), "open it", Duration::from_millis(50), || 7);
        NO_THREADS.set(false);
        assert!(matches!(answer, Err(DeviceError::NoThread { .. })), "{answer:?}");
        assert!(!hangs(Path::new("/short")));
    }

    #[test]
    fn a_lasting_shortage_of_threads_is_told_within_seconds_however_many_paths_there_are() {
        let paths: Vec<PathBuf> = (0..50).map(|at| format!("/none/{at}").into()).collect();
        let begun = Instant::now();
        NO_THREADS.set(true);
        let answers = each_within(&paths, "open it", Duration::from_secs(30), |_| ());
        NO_THREADS.set(false);
        assert!(answers.iter().all(|answer| matches!(answer, Err(DeviceError::NoThread { .. }))));
        // Other tests may have begun threads in between, and have it forgotten; each path by itself would take 100 s.
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    }

    #[test]
    fn what_has_no_thread_is_done_by_the_caller() {
        let items: Vec<u32> = (0..5).collect();
        let square = |&item: &u32| (item * item, std::thread::current().id());
        for has_threads in [true, false] {
            NO_THREADS.set(!has_threads);
            let results = each_at_once(&items, square);
            NO_THREADS.set(false);
            let (values, threads): (Vec<u32>, Vec<_>) = results.into_iter().unzip();
            assert_eq!(values, [0, 1, 4, 9, 16]);
            let own = std::thread::current().id();
            assert!(threads.iter().all(|&thread| (thread == own) != has_threads));
        }
    }

    #[test]
    fn a_call_that_ends_in_time_gives_its_value() {
        let value = within(Path::new("/a"), "count", Duration::from_secs(10), || 7).unwrap();
        assert_eq!(value, 7);
        assert!(!hangs(Path::new("/a")));
    }

    #[test]
    fn answers_come_in_the_order_of_the_paths() {
        let paths: Vec<PathBuf> = (0..100).map(|at| format!("/list/{at}").into()).collect();
        let answers = each_within(&paths, "read it", Duration::from_secs(10), Path::to_path_buf);
        let answers: Vec<PathBuf> = answers.into_iter().map(Result::unwrap).collect();
        assert_eq!(answers, paths);
    }

    #[test]
    fn a_call_that_hangs_is_given_up_and_not_tried_again_before_it_has_ended() {
        let path = Path::new("/hangs");
        let (release, wait) = channel::<()>();
        let (dropped, was_dropped) = channel();
        struct Value(std::sync::mpsc::Sender<()>);
        impl Drop for Value {
            fn drop(&mut self) {
                self.0.send(()).unwrap();
            }
        }
        let limit = Duration::from_millis(20);
        let error = within(path, "open it", limit, move || {
            let _ = wait.recv();
            Value(dropped)
        });
        assert!(
            error.is_err_and(|error| error.to_string() == "/hangs: cannot open it: no answer within 0 s")
        );
        let error = within(path, "open it", limit, || ()).unwrap_err();
        assert!(error.to_string().contains("an earlier attempt hangs still"), "{error}");
        within(Path::new("/another"), "open it", Duration::from_secs(10), || ()).unwrap();
        drop(release);
        was_dropped.recv().unwrap();
        while hangs(path) {
            std::thread::yield_now();
        }
        within(path, "open it", Duration::from_secs(10), || ()).unwrap();
    }
}
