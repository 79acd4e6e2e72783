//! Calls that a filesystem or a device may never answer (open, stat, close, a first read). They are
//! made on threads of their own and waited for within a limit, so that a call that hangs costs its
//! own member and nothing else (rule T7).
//!
//! A thread that hangs stays until its call ends, and then drops the result. While a call about a
//! path hangs, no other is started for that path, so repeated attempts do not pile up.
//!
//! A call that returns only data is made with a descriptor table of its own ([`within_apart`]), so that a
//! hanging call keeps nothing of a killed process. Must not know what calls are for.

use super::access::is_remote;
use super::{DeviceError, own_table};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::{Duration, Instant};

/// Calls made at one time for a list of paths: an array on a filesystem that hangs costs the limit
/// once or a few times, not once for each member.
const AT_ONCE: usize = 32;

/// Time between attempts to start a thread.
const THREAD_RETRY: Duration = Duration::from_millis(20);

/// How long to try to start a thread: most shortages pass, and somebody may wait for the answer.
const THREAD_PATIENCE: Duration = Duration::from_secs(2);

/// How long after a failure to start a thread each further one is tried only once: a list of paths
/// costs the patience once, not once for each path.
const SHORTAGE_REMEMBERED: Duration = Duration::from_secs(5);

/// When no thread could be started last.
static SHORT_AT: Mutex<Option<Instant>> = Mutex::new(None);

/// Calls that were given up and have not ended, by path.
static HANGING: LazyLock<Mutex<HashMap<PathBuf, usize>>> = LazyLock::new(Mutex::default);

fn hanging() -> MutexGuard<'static, HashMap<PathBuf, usize>> {
    HANGING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a call about a path was given up and has not ended.
#[must_use]
pub(crate) fn hangs(path: &Path) -> bool {
    hanging().contains_key(path)
}

thread_local! {
    /// Until when the caller waits for this thread.
    static WAITED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
    /// The call that this thread makes step by step.
    static STEPPING: RefCell<Option<Arc<Ended>>> = const { RefCell::new(None) };
}

/// To be called before each step of a call that [`step_by_step`] makes; elsewhere it does nothing.
///
/// # Errors
/// When the call was given up: no caller waits for the rest, and nothing further may be changed.
pub(crate) fn begin_step() -> io::Result<()> {
    STEPPING.with_borrow(|ended| ended.as_ref().map_or(Ok(()), |ended| ended.begin_step()))
}

/// How long the caller of this thread still waits; none without a limit.
pub(super) fn time_left() -> Option<Duration> {
    WAITED_UNTIL.get().map(|until| until.saturating_duration_since(Instant::now()))
}

/// Makes a call about `path` on a thread of its own. `action` is for the error ("open it").
///
/// # Errors
/// When it has not ended within the limit, an earlier call still hangs, or no thread can be
/// started.
pub(crate) fn within<T: Send + 'static>(
    path: &Path,
    action: &str,
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DeviceError> {
    make(path, action, limit, Manner::Shared, call)
}

/// As [`within`], for a call of many steps, such as one that writes: each step has the limit. A
/// call that was given up does nothing after the step that hangs. A call about a remote path, whose
/// steps have limits of their own, is made in this thread.
///
/// # Errors
/// As [`within`].
pub(crate) fn step_by_step<T: Send + 'static>(
    path: &Path,
    action: &str,
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DeviceError> {
    if is_remote(path) {
        return Ok(call());
    }
    make(path, action, limit, Manner::Stepping, call)
}

/// As [`within`], for a call that uses only descriptors that it opens itself, and returns none:
/// other threads' descriptors mean nothing to it. For a remote path it is as [`within`].
///
/// # Errors
/// As [`within`].
pub(crate) fn within_apart<T: Send + 'static>(
    path: &Path,
    action: &str,
    limit: Duration,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DeviceError> {
    // Other threads may use the descriptors of a connection to a server.
    let manner = if is_remote(path) { Manner::Shared } else { Manner::Apart };
    make(path, action, limit, manner, call)
}

/// How a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Manner {
    /// With the descriptors of all threads.
    Shared,
    /// With its own.
    Apart,
    /// As `Shared`, for as long as its steps end.
    Stepping,
}

fn make<T: Send + 'static>(
    path: &Path,
    action: &str,
    limit: Duration,
    manner: Manner,
    call: impl FnOnce() -> T + Send + 'static,
) -> Result<T, DeviceError> {
    let fail = |source| DeviceError::Io { path: path.into(), action: action.into(), source };
    let unanswered = |what: &str| fail(io::Error::new(io::ErrorKind::TimedOut, what.to_owned()));
    if hangs(path) {
        return Err(unanswered("it does not answer: an earlier attempt hangs still"));
    }
    let (sender, receiver) = sync_channel(1);
    let last_step = Mutex::new(Instant::now());
    let ended = Arc::new(Ended { path: path.into(), state: Mutex::default(), last_step });
    let in_thread = Arc::clone(&ended);
    let until = Instant::now() + limit;
    let begun = begin(limit, move || {
        if manner == Manner::Apart
            && let Err(error) = own_table::leave(&[])
        {
            tracing::debug!(%error, "a thread has no descriptor table of its own");
        }
        WAITED_UNTIL.set(Some(until));
        if manner == Manner::Stepping {
            STEPPING.set(Some(Arc::clone(&in_thread)));
        }
        let value = call();
        // A caller that gave up gets nothing: the value is dropped first, and then the call ends.
        let _ = sender.send(value);
        in_thread.end();
    });
    begun.map_err(|source| DeviceError::NoThread { path: path.into(), source })?;
    let mut wait = limit;
    let answer = loop {
        let answer = receiver.recv_timeout(wait);
        wait = limit.saturating_sub(ended.last_step().elapsed());
        let is_late = matches!(answer, Err(RecvTimeoutError::Timeout));
        if !is_late || manner != Manner::Stepping || wait.is_zero() {
            break answer;
        }
    };
    match answer {
        Ok(value) => Ok(value),
        Err(RecvTimeoutError::Timeout) => {
            ended.give_up();
            // It may have ended at the last moment.
            receiver.try_recv().map_err(|_| unanswered(&format!("no answer within {} s", limit.as_secs())))
        }
        Err(RecvTimeoutError::Disconnected) => panic!("a call that was waited for panicked"),
    }
}

/// Makes a call about each path, several at a time; as [`within`] for each. The answers are in the
/// order of the paths.
pub(crate) fn each_within<T: Send + 'static>(
    paths: &[PathBuf],
    action: &str,
    limit: Duration,
    call: impl Fn(&Path) -> T + Send + Sync + 'static,
) -> Vec<Result<T, DeviceError>> {
    make_each(paths, action, limit, |_| Manner::Shared, call)
}

/// As [`each_within`], for calls as in [`within_apart`].
pub(crate) fn each_within_apart<T: Send + 'static>(
    paths: &[PathBuf],
    action: &str,
    limit: Duration,
    call: impl Fn(&Path) -> T + Send + Sync + 'static,
) -> Vec<Result<T, DeviceError>> {
    let manner = |path: &Path| if is_remote(path) { Manner::Shared } else { Manner::Apart };
    make_each(paths, action, limit, manner, call)
}

fn make_each<T: Send + 'static>(
    paths: &[PathBuf],
    action: &str,
    limit: Duration,
    manner: impl Fn(&Path) -> Manner + Sync,
    call: impl Fn(&Path) -> T + Send + Sync + 'static,
) -> Vec<Result<T, DeviceError>> {
    let call = Arc::new(call);
    let answers: Mutex<Vec<_>> = Mutex::new(paths.iter().map(|_| None).collect());
    work_off((0..paths.len()).collect(), |at| {
        let (call, own) = (Arc::clone(&call), paths[at].clone());
        let answer = make(&paths[at], action, limit, manner(&paths[at]), move || call(&own));
        answers.lock().unwrap_or_else(PoisonError::into_inner)[at] = Some(answer);
        Vec::new()
    });
    let answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
    answers.into_iter().map(|answer| answer.expect("every path was taken")).collect()
}

/// Runs tasks, several at a time. A task returns further tasks: they start when it has ended, and
/// do not wait for others that hang.
pub(crate) fn work_off<T: Send>(tasks: Vec<T>, run: impl Fn(T) -> Vec<T> + Sync) {
    let first = tasks.len();
    let tasks = Tasks { waiting: tasks.into(), under_way: 0, workers: 1 };
    let work = Work { tasks: Mutex::new(tasks), changed: Condvar::new(), run };
    // The caller's own thread works, too: without further threads it takes longer.
    std::thread::scope(|scope| {
        work.begin_workers(scope, first.saturating_sub(1));
        work.work(scope);
    });
}

struct Work<T, F> {
    tasks: Mutex<Tasks<T>>,
    changed: Condvar,
    run: F,
}

struct Tasks<T> {
    waiting: VecDeque<T>,
    under_way: usize,
    workers: usize,
}

impl<T: Send, F: Fn(T) -> Vec<T> + Sync> Work<T, F> {
    fn tasks(&self) -> MutexGuard<'_, Tasks<T>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts up to `wanted` more workers, within the limit and as far as threads are available.
    fn begin_workers<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, wanted: usize) {
        for _ in 0..wanted {
            if self.tasks().workers >= AT_ONCE {
                return;
            }
            if new_thread().and_then(|thread| thread.spawn_scoped(scope, || self.work(scope))).is_err() {
                return;
            }
            self.tasks().workers += 1;
        }
    }

    fn work<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) {
        while let Some(task) = self.next() {
            // Counted down also when the task panics, since other workers wait for it.
            let under_way = UnderWay(self);
            let more = (self.run)(task);
            let count = more.len();
            self.tasks().waiting.extend(more);
            drop(under_way);
            self.begin_workers(scope, count.saturating_sub(1));
        }
    }

    /// The next task; none when none waits and none is running that could return more.
    fn next(&self) -> Option<T> {
        let mut tasks = self.tasks();
        loop {
            if let Some(task) = tasks.waiting.pop_front() {
                tasks.under_way += 1;
                return Some(task);
            }
            if tasks.under_way == 0 {
                return None;
            }
            tasks = self.changed.wait(tasks).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct UnderWay<'w, T: Send, F: Fn(T) -> Vec<T> + Sync>(&'w Work<T, F>);

impl<T: Send, F: Fn(T) -> Vec<T> + Sync> Drop for UnderWay<'_, T, F> {
    fn drop(&mut self) {
        self.0.tasks().under_way -= 1;
        self.0.changed.notify_all();
    }
}

/// Makes a call about each item, all at the same time as far as threads are available; this thread
/// makes the others. The results are in the order of the items.
pub(crate) fn each_at_once<T: Sync, U: Send>(items: &[T], call: impl Fn(&T) -> U + Sync) -> Vec<U> {
    let call = &call;
    std::thread::scope(|scope| {
        let begun: Vec<_> = items
            .iter()
            .map(|item| new_thread().and_then(|thread| thread.spawn_scoped(scope, move || call(item))))
            .collect();
        // The calls of this thread begin when all others have been started.
        let results = begun.into_iter().zip(items).map(|(thread, item)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => call(item),
        });
        results.collect()
    })
}

/// Starts a thread, and retries for a while, within the limit, where none is available.
fn begin(limit: Duration, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let short_at = || SHORT_AT.lock().unwrap_or_else(PoisonError::into_inner);
    let is_short = short_at().is_some_and(|at| at.elapsed() < SHORTAGE_REMEMBERED);
    let deadline = Instant::now() + if is_short { Duration::ZERO } else { limit.min(THREAD_PATIENCE) };
    // A closure that got no thread is dropped: the work stays here until a thread takes it.
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
/// In tests, fails where a test has taken all threads away; the system fails only when the thread
/// is started.
fn new_thread() -> io::Result<std::thread::Builder> {
    #[cfg(test)]
    if tests::NO_THREADS.get() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok(std::thread::Builder::new())
}

/// Calls `run` while no thread can be started.
#[cfg(test)]
pub(crate) fn without_threads<T>(run: impl FnOnce() -> T) -> T {
    tests::NO_THREADS.set(true);
    let value = run();
    tests::NO_THREADS.set(false);
    value
}

/// A call and its caller agree here whether it was given up.
struct Ended {
    path: PathBuf,
    state: Mutex<State>,
    last_step: Mutex<Instant>,
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

    fn last_step(&self) -> Instant {
        *self.last_step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin_step(&self) -> io::Result<()> {
        let state = self.state();
        if *state == State::GivenUp {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it was given up"));
        }
        *self.last_step.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        Ok(())
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
        // Other tests may have begun threads in between, and have it forgotten; each path by itself
        // would take 100 s.
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
    fn a_call_whose_steps_end_takes_as_long_as_it_needs_and_stops_after_one_that_hangs() {
        let path = Path::new("/steps");
        let limit = Duration::from_millis(500);
        let value = step_by_step(path, "write it", limit, move || {
            for _ in 0..10 {
                begin_step().unwrap();
                std::thread::sleep(limit / 5);
            }
            7
        });
        assert_eq!(value.unwrap(), 7);
        let (release, wait) = channel::<()>();
        let (told, further) = channel();
        let error = step_by_step(path, "write it", limit, move || {
            begin_step().unwrap();
            let _ = wait.recv();
            told.send(begin_step().is_err()).unwrap();
        });
        assert!(error.unwrap_err().to_string().contains("cannot write it: no answer within"));
        drop(release);
        assert!(further.recv().unwrap(), "it goes on");
        begin_step().unwrap();
    }

    #[test]
    fn jobs_that_others_bring_up_do_not_wait_for_one_that_hangs() {
        // The first ends only when one that the second brings up has run.
        let (release, wait) = channel::<()>();
        let wait = Mutex::new(wait);
        let done = Mutex::new(Vec::new());
        work_off(vec![0, 1], |task| {
            match task {
                0 => {
                    wait.lock().unwrap().recv_timeout(Duration::from_secs(60)).expect("nothing waits for it")
                }
                5 => release.send(()).unwrap(),
                _ => {}
            }
            done.lock().unwrap().push(task);
            if task == 1 { (2..100).collect() } else { Vec::new() }
        });
        let mut done = done.into_inner().unwrap();
        done.sort_unstable();
        assert_eq!(done, (0..100).collect::<Vec<i32>>());
        work_off(Vec::<i32>::new(), |_| unreachable!());
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
