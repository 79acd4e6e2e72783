//! The configured arrays on their way into service: each is tried until it comes, on a thread of its own, so that a member
//! that does not answer holds up no other array, and no signal. Must not know how arrays are opened.

use super::config::ArrayConfig;
use super::search::search;
use super::service::{Daemon, ServeOptions, served_line};
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
struct Waiting {
    config: ArrayConfig,
    /// What was in the way last time; told once.
    told: Option<String>,
}

impl Imports {
    /// Begins to import arrays, and goes on until each is served or the daemon ends.
    #[must_use]
    pub fn start(daemon: &Arc<Daemon>, arrays: &[ArrayConfig]) -> Imports {
        let untried = Arc::new(AtomicUsize::new(arrays.len()));
        for config in arrays {
            let mut waiting = Waiting { config: config.clone(), told: None };
            let (daemon, untried) = (Arc::clone(daemon), Arc::clone(&untried));
            let work = move || {
                let mut served = waiting.try_import(&daemon);
                untried.fetch_sub(1, Ordering::Release);
                while !served && daemon.is_alive() {
                    std::thread::sleep(RETRY);
                    served = waiting.try_import(&daemon);
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

impl Waiting {
    /// Whether it need not be tried again.
    fn try_import(&mut self, daemon: &Daemon) -> bool {
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
