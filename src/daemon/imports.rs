//! The configured arrays on their way into service: each is tried until it comes, on a thread of its own, so that a member
//! that does not answer holds up no other array, and no signal. Must not know how arrays are opened.

use super::config::{ArrayChoice, ArrayConfig};
use super::search::search;
use super::service::{Daemon, ServeOptions, lock, served_line};
use crate::control::RequestError;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Time between attempts to import an array that could not be: disks may be late.
const RETRY: Duration = Duration::from_secs(5);

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
    /// Arrays that the configuration names.
    wanted: Mutex<HashSet<ArrayChoice>>,
    /// Those that a thread tries to import.
    under_way: Mutex<HashSet<ArrayChoice>>,
}

/// A configured array that is not served yet.
struct Waiting {
    config: ArrayConfig,
    /// What was in the way last time; told once.
    told: Option<String>,
}

impl Imports {
    /// Begins to import arrays, and goes on until each is served or the daemon ends. Each attempt goes by the
    /// section that the daemon has then ([`Daemon::configure`]).
    #[must_use]
    pub fn start(daemon: &Arc<Daemon>, arrays: &[ArrayConfig]) -> Imports {
        let imports = Imports { daemon: Arc::clone(daemon), shared: Arc::default() };
        imports.update(arrays, arrays);
        imports
    }

    /// Begins to import the arrays of `new`, and gives up on those that are not in `all`.
    pub fn update(&self, all: &[ArrayConfig], new: &[ArrayConfig]) {
        *lock(&self.shared.wanted) = all.iter().map(|config| config.which.clone()).collect();
        for config in new {
            if !lock(&self.shared.under_way).insert(config.which.clone()) {
                // It was given up a moment ago, and its thread has not noticed.
                continue;
            }
            self.shared.untried.fetch_add(1, Ordering::Release);
            let mut waiting = Waiting { config: config.clone(), told: None };
            let (daemon, shared) = (Arc::clone(&self.daemon), Arc::clone(&self.shared));
            let work = move || {
                let mut over = waiting.try_import(&daemon);
                shared.untried.fetch_sub(1, Ordering::Release);
                while !over && daemon.is_alive() {
                    std::thread::sleep(RETRY);
                    over = !waiting.is_wanted(&shared) || waiting.try_import(&daemon);
                }
                lock(&shared.under_way).remove(&waiting.config.which);
            };
            let spawned = std::thread::Builder::new().name("import".into()).spawn(work);
            spawned.unwrap_or_else(|error| panic!("no thread for the import of an array: {error}"));
        }
    }

    /// Whether every array has been tried at least once.
    #[must_use]
    pub fn all_tried(&self) -> bool {
        self.shared.untried.load(Ordering::Acquire) == 0
    }
}

impl Waiting {
    fn is_wanted(&self, shared: &Shared) -> bool {
        lock(&shared.wanted).contains(&self.config.which)
    }

    /// Whether it need not be tried again.
    fn try_import(&mut self, daemon: &Daemon) -> bool {
        if let Some(config) = daemon.section(&self.config.which) {
            self.config = config;
        }
        match self.import(daemon) {
            Ok(line) => {
                tracing::info!("{line}");
                true
            }
            Err(error) => {
                let text = error.to_string();
                if self.told.as_ref() != Some(&text) {
                    tracing::error!(array = %self.config.which, "cannot import: {text}");
                    self.told = Some(text);
                }
                false
            }
        }
    }

    fn import(&self, daemon: &Daemon) -> Result<String, RequestError> {
        let found = search(&self.config.search, self.config.limits.local);
        let uuid = found.choose(&self.config.which.to_string(), &self.config.search)?;
        if let Ok(reports) = daemon.status(Some(&uuid.to_string()))
            && let Some(report) = reports.first()
        {
            // An administrator was faster.
            return Ok(served_line(report));
        }
        let options = ServeOptions {
            read_only: self.config.read_only,
            rebuild_min: self.config.rebuild_min,
            rebuild_max: self.config.rebuild_max,
            full_stripe: self.config.full_stripe,
            page_cache: self.config.page_cache,
            limits: self.config.limits,
            force: false,
        };
        let (report, _) = daemon.open_and_serve(&found, uuid, options, &found.warnings)?;
        Ok(served_line(&report))
    }
}
