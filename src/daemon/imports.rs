//! The configured arrays on their way into service: each is tried until it comes, on a thread of its own, so that a member
//! that does not answer holds up no other array, and no signal. Must not know how arrays are opened.

use super::arrays::served_line;
use super::config::ArrayConfig;
use super::search::{Search, search_with};
use super::service::{Daemon, ServeOptions};
use super::waiting::Waiting;
use crate::control::RequestError;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Time between attempts to import an array that could not be: disks may be late.
const RETRY: Duration = Duration::from_secs(5);

/// See the head of this file.
#[derive(Debug)]
pub struct Imports {
    /// Arrays whose first attempt is under way.
    untried: Arc<AtomicUsize>,
}

/// A configured array that is not served yet.
struct Attempts(ArrayConfig);

impl Imports {
    /// Begins to import arrays, these and those that were imported by a command before, and goes on until
    /// each is served or the daemon ends.
    #[must_use]
    pub fn start(daemon: &Arc<Daemon>, arrays: &[ArrayConfig]) -> Imports {
        let before = daemon.imports_of_before(arrays);
        let untried = Arc::new(AtomicUsize::new(arrays.len() + before.len()));
        for config in arrays.iter().chain(&before) {
            daemon.await_array(Waiting::new(config.which.clone(), config.search.clone()));
            let attempts = Attempts(config.clone());
            let (daemon, untried) = (Arc::clone(daemon), Arc::clone(&untried));
            let work = move || {
                let mut served = attempts.try_import(&daemon);
                untried.fetch_sub(1, Ordering::Release);
                while !served && daemon.is_alive() && daemon.is_awaited(&attempts.0.which) {
                    std::thread::sleep(RETRY);
                    served = !daemon.is_awaited(&attempts.0.which) || attempts.try_import(&daemon);
                }
            };
            let spawned = std::thread::Builder::new().name("import".into()).spawn(work);
            spawned.unwrap_or_else(|error| panic!("no thread for the import of an array: {error}"));
        }
        Imports { untried }
    }

    /// Whether every array has been tried at least once.
    #[must_use]
    pub fn all_tried(&self) -> bool {
        self.untried.load(Ordering::Acquire) == 0
    }
}

impl Attempts {
    /// Whether it need not be tried again.
    fn try_import(&self, daemon: &Daemon) -> bool {
        let earlier = daemon.earlier_paths(Some(&self.0.which.to_string()));
        let found = search_with(&self.0.search, &earlier, self.0.limits.local);
        match self.import(daemon, &found) {
            Ok(line) => {
                tracing::info!("{line}");
                daemon.not_awaited(&self.0.which);
                true
            }
            Err(error) => {
                daemon.still_awaited(&self.0.which, &found, error);
                false
            }
        }
    }

    fn import(&self, daemon: &Daemon, found: &Search) -> Result<String, RequestError> {
        let config = &self.0;
        let uuid = found.choose(&config.which.to_string(), &config.search)?;
        if daemon.served_uuids().contains(&uuid)
            && let Some(report) = daemon.status(Some(&uuid.to_string()))?.first()
        {
            // An administrator was faster.
            return Ok(served_line(report));
        }
        let options = ServeOptions {
            read_only: config.read_only,
            rebuild_min: config.rebuild_min,
            rebuild_max: config.rebuild_max,
            full_stripe: config.full_stripe,
            page_cache: config.page_cache,
            limits: config.limits,
            force: false,
        };
        let (report, _) = daemon.open_and_serve(found, uuid, options, &found.warnings)?;
        Ok(served_line(&report))
    }
}
