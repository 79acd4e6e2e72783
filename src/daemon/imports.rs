//! The arrays on their way into service, configured or imported by a command before: each is tried until it comes, on a
//! thread of its own, so that a member that does not answer holds up no other array, and no signal. Must not know how
//! arrays are opened.

use super::arrays::served_line;
use super::config::{ArrayChoice, ArrayConfig};
use super::import::{ImportError, newest_found};
use super::ranked::lock;
use super::search::{Search, search_with};
use super::service::{Daemon, ServeOptions, refusal};
use super::waiting::Waiting;
use crate::control::{ErrorCode, RequestError};
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Time between attempts to import an array that could not be: disks may be late.
const RETRY: Duration = Duration::from_secs(5);

/// Time between two looks whether another one has been tried.
const LOOK: Duration = Duration::from_millis(20);

/// Time between attempts to begin a thread for one.
const THREAD_RETRY: Duration = Duration::from_secs(1);

/// See the head of this file.
#[derive(Debug)]
pub struct Imports {
    daemon: Arc<Daemon>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Arrays whose first attempt is under way.
    untried: AtomicUsize,
    /// Arrays that the configuration named last.
    configured: Mutex<HashSet<ArrayChoice>>,
    /// Those that a thread tries to import.
    under_way: Mutex<HashSet<ArrayChoice>>,
    /// Those of them that wait until the system has a thread for them.
    threadless: Mutex<Vec<(Instant, Attempts)>>,
}

/// An array that is not served yet.
#[derive(Clone, Debug)]
struct Attempts {
    config: ArrayConfig,
    /// Those that are tried first: two of one name are not served at once.
    behind: Vec<ArrayChoice>,
}

impl Imports {
    /// Has the status list the arrays that [`Imports::start`] will import.
    pub fn announce(daemon: &Daemon, arrays: &[ArrayConfig]) {
        for config in arrays.iter().chain(&daemon.imports_of_before(arrays)) {
            daemon.await_array(Waiting::new(config.which.clone(), config.search.clone()));
        }
    }

    /// Begins to import arrays, these and those that were imported by a command before, and goes on until each is
    /// served or the daemon ends. Each attempt goes by the section that the daemon has then
    /// ([`Daemon::configure`]).
    #[must_use]
    pub fn start(daemon: &Arc<Daemon>, arrays: &[ArrayConfig]) -> Imports {
        let before = daemon.imports_of_before(arrays);
        let imports = Imports { daemon: Arc::clone(daemon), shared: Arc::default() };
        imports.update(arrays, arrays);
        for config in &before {
            imports.begin(config, daemon.configured_namesakes(&config.which, arrays));
        }
        imports
    }

    /// Begins to import the arrays of `new`, and gives up on those that were configured and are not in `all`.
    pub fn update(&self, all: &[ArrayConfig], new: &[ArrayConfig]) {
        let configured: HashSet<ArrayChoice> = all.iter().map(|config| config.which.clone()).collect();
        let before = std::mem::replace(&mut *lock(&self.shared.configured), configured.clone());
        before.difference(&configured).for_each(|which| _ = self.daemon.give_up(which));
        new.iter().for_each(|config| self.begin(config, Vec::new()));
    }

    fn begin(&self, config: &ArrayConfig, behind: Vec<ArrayChoice>) {
        self.daemon.await_array(Waiting::new(config.which.clone(), config.search.clone()));
        if !lock(&self.shared.under_way).insert(config.which.clone()) {
            // It was given up a moment ago, and its thread has not noticed.
            return;
        }
        self.shared.untried.fetch_add(1, Ordering::Release);
        self.begin_attempts(Attempts { config: config.clone(), behind });
    }

    fn begin_attempts(&self, mut attempts: Attempts) {
        let (daemon, shared) = (Arc::clone(&self.daemon), Arc::clone(&self.shared));
        let which = attempts.config.which.clone();
        let again = attempts.clone();
        let work = move || {
            let which = attempts.config.which.clone();
            while daemon.is_alive() && attempts.behind.iter().any(|first| daemon.is_untried(first)) {
                std::thread::sleep(LOOK);
            }
            let mut over = !daemon.is_awaited(&which) || attempts.try_import(&daemon);
            shared.untried.fetch_sub(1, Ordering::Release);
            loop {
                if over || !daemon.is_alive() {
                    // It may have been asked for again meanwhile, while this thread counted as
                    // being at it.
                    let mut under_way = lock(&shared.under_way);
                    if !daemon.is_alive() || !daemon.is_awaited(&which) {
                        under_way.remove(&which);
                        return;
                    }
                }
                std::thread::sleep(RETRY);
                over = !daemon.is_awaited(&which) || attempts.try_import(&daemon);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("import".into()).spawn(work) {
            tracing::warn!(array = %which, %error, "no thread for the import of an array: it is tried again");
            lock(&self.shared.threadless).push((Instant::now() + THREAD_RETRY, again));
        }
    }

    /// Begins the imports for which there was no thread before; to be called every second or so.
    pub fn begin_threadless(&self) {
        let now = Instant::now();
        let due: Vec<_> = lock(&self.shared.threadless).extract_if(.., |(at, _)| *at <= now).collect();
        for (_, attempts) in due {
            if self.daemon.is_awaited(&attempts.config.which) {
                self.begin_attempts(attempts);
            } else {
                // Given up meanwhile.
                self.shared.untried.fetch_sub(1, Ordering::Release);
                lock(&self.shared.under_way).remove(&attempts.config.which);
            }
        }
    }

    /// Whether every array has been tried at least once.
    #[must_use]
    pub fn all_tried(&self) -> bool {
        self.shared.untried.load(Ordering::Acquire) == 0
    }
}

impl Attempts {
    /// Whether it need not be tried again.
    fn try_import(&mut self, daemon: &Daemon) -> bool {
        if let Some(config) = daemon.section(&self.config.which) {
            self.config = config;
        }
        let earlier = daemon.remembered_paths(&self.config.which);
        let found = search_with(&self.config.search, &earlier, self.config.limits.local);
        match self.import(daemon, &found) {
            Ok(line) => {
                tracing::info!("{line}");
                daemon.not_awaited(&self.config.which);
                true
            }
            Err(error) => {
                daemon.still_awaited(&self.config.which, &found, error);
                false
            }
        }
    }

    fn import(&self, daemon: &Daemon, found: &Search) -> Result<String, RequestError> {
        let config = &self.config;
        let uuid = match found.choose(&config.which.to_string(), &config.search) {
            Err(ImportError::Ambiguous { name, uuids }) => {
                let is_there = |uuid: &Uuid| found.arrays[uuid].iter().any(|member| !member.remembered);
                daemon.settle(&uuids, is_there, None).ok_or(ImportError::Ambiguous { name, uuids })
            }
            chosen => chosen,
        }?;
        if !daemon.is_awaited(&config.which) {
            // It was served meanwhile, and perhaps exported.
            return Ok(format!("array '{}' is not awaited any more", config.which));
        }
        if daemon.served_uuids().contains(&uuid)
            && let Some(report) = daemon.status(Some(&uuid.to_string()))?.first()
        {
            // An administrator was faster.
            return Ok(served_line(report));
        }
        if daemon.was_exported(&config.which, uuid) {
            let text = format!("array '{}' was exported, and stays out of service", config.which);
            return match daemon.is_another(&config.which, uuid) {
                true => Err(refusal(ErrorCode::Refused, text)),
                false => Ok(text),
            };
        }
        let superblock = newest_found(&found.arrays[&uuid]);
        let options = superblock.map(|superblock| daemon.options_by(config, &superblock.name, uuid));
        let options = options.unwrap_or_else(|| ServeOptions::of(config));
        match daemon.open_and_serve_awaited(&config.which, found, uuid, options) {
            Ok(report) => Ok(served_line(&report)),
            // Another section about it was faster.
            Err(error) => match daemon.status(Some(&uuid.to_string())) {
                Ok(reports) if daemon.served_uuids().contains(&uuid) && !reports.is_empty() => {
                    Ok(served_line(&reports[0]))
                }
                _ => Err(error),
            },
        }
    }
}
