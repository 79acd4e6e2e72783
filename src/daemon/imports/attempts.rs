//! Attempts to serve arrays that are configured or were imported by a command before. Each array is tried
//! until it is served, on a thread of its own, so that a member that does not answer holds up no other array
//! and no signal. Must not know how arrays are opened.

use super::opening::{open_and_serve_awaited, served_line};
use crate::control::ErrorCode;
use crate::daemon::arrays::outcome::refusal;
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::arrays::waiting::{NotServed, Waiting};
use crate::daemon::config::{ArrayChoice, ArrayConfig};
use crate::daemon::devices::import::{ImportError, newest_found};
use crate::daemon::devices::search::{Search, search_with};
use crate::daemon::ranked::lock;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Time between attempts to import an array: disks may appear late.
const RETRY: Duration = Duration::from_secs(5);

/// Time between two checks whether an array that comes first has been tried.
const LOOK: Duration = Duration::from_millis(20);

/// Time between attempts to start a thread for an array.
const THREAD_RETRY: Duration = Duration::from_secs(1);

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Imports {
    arrays: Arc<Arrays>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Arrays whose first attempt is under way.
    untried: AtomicUsize,
    /// Arrays in the latest configuration.
    configured: Mutex<HashSet<ArrayChoice>>,
    /// Those that a thread tries to import.
    under_way: Mutex<HashSet<ArrayChoice>>,
    /// Arrays of `under_way` that wait for a thread.
    threadless: Mutex<Vec<(Instant, Attempts)>>,
}

/// An array that is not served yet.
#[derive(Clone, Debug)]
struct Attempts {
    config: ArrayConfig,
    /// Arrays that are tried before it: two of one name are not served at once.
    behind: Vec<ArrayChoice>,
}

impl Imports {
    /// Makes the status list the arrays that [`Imports::start`] will import.
    pub(crate) fn announce(arrays: &Arrays, sections: &[ArrayConfig]) {
        for config in sections.iter().chain(&arrays.memory.imports_of_before(sections)) {
            let waiting = Waiting::new(config.which.clone(), config.search.clone());
            arrays.awaited.await_array(waiting, &arrays.memory);
        }
    }

    /// Begins to import arrays, these and those that a command imported before, and goes on until each is
    /// served or the daemon ends. Each attempt uses the section that the daemon has at that time
    /// ([`configure`](crate::daemon::arrays::configure::configure)).
    #[must_use]
    pub(crate) fn start(arrays: &Arc<Arrays>, sections: &[ArrayConfig]) -> Imports {
        let before = arrays.memory.imports_of_before(sections);
        let imports = Imports { arrays: Arc::clone(arrays), shared: Arc::default() };
        imports.update(sections, sections);
        for config in &before {
            imports.begin(config, arrays.memory.configured_namesakes(&config.which, sections));
        }
        imports
    }

    /// Begins to import the arrays of `new`, and gives up those that were configured and are not in `all`.
    pub(crate) fn update(&self, all: &[ArrayConfig], new: &[ArrayConfig]) {
        let configured: HashSet<ArrayChoice> = all.iter().map(|config| config.which.clone()).collect();
        let before = std::mem::replace(&mut *lock(&self.shared.configured), configured.clone());
        before.difference(&configured).for_each(|which| _ = self.arrays.awaited.give_up(which));
        new.iter().for_each(|config| self.begin(config, Vec::new()));
    }

    fn begin(&self, config: &ArrayConfig, behind: Vec<ArrayChoice>) {
        let waiting = Waiting::new(config.which.clone(), config.search.clone());
        self.arrays.awaited.await_array(waiting, &self.arrays.memory);
        if !lock(&self.shared.under_way).insert(config.which.clone()) {
            // It was given up a moment ago, and its thread has not noticed: that thread goes on.
            return;
        }
        self.shared.untried.fetch_add(1, Ordering::Release);
        self.begin_attempts(Attempts { config: config.clone(), behind });
    }

    fn begin_attempts(&self, mut attempts: Attempts) {
        let (arrays, shared) = (Arc::clone(&self.arrays), Arc::clone(&self.shared));
        let which = attempts.config.which.clone();
        let again = attempts.clone();
        let work = move || {
            let which = attempts.config.which.clone();
            while arrays.is_alive() && attempts.behind.iter().any(|first| arrays.awaited.is_untried(first)) {
                std::thread::sleep(LOOK);
            }
            let mut over = !arrays.awaited.is_awaited(&which) || attempts.try_import(&arrays);
            shared.untried.fetch_sub(1, Ordering::Release);
            loop {
                if over || !arrays.is_alive() {
                    // It may be awaited again: no new thread was started for it while this one ran.
                    let mut under_way = lock(&shared.under_way);
                    if !arrays.is_alive() || !arrays.awaited.is_awaited(&which) {
                        under_way.remove(&which);
                        return;
                    }
                }
                std::thread::sleep(RETRY);
                over = !arrays.awaited.is_awaited(&which) || attempts.try_import(&arrays);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("import".into()).spawn(work) {
            tracing::warn!(array = %which, %error, "no thread for the import of an array: it is tried again");
            lock(&self.shared.threadless).push((Instant::now() + THREAD_RETRY, again));
        }
    }

    /// Starts the imports that had no thread before; to be called about once a second.
    pub(crate) fn begin_threadless(&self) {
        let now = Instant::now();
        let due: Vec<_> = lock(&self.shared.threadless).extract_if(.., |(at, _)| *at <= now).collect();
        for (_, attempts) in due {
            if self.arrays.awaited.is_awaited(&attempts.config.which) {
                self.begin_attempts(attempts);
            } else {
                // It was given up meanwhile.
                self.shared.untried.fetch_sub(1, Ordering::Release);
                lock(&self.shared.under_way).remove(&attempts.config.which);
            }
        }
    }

    /// Whether every array has been tried at least once.
    #[must_use]
    pub(crate) fn all_tried(&self) -> bool {
        self.shared.untried.load(Ordering::Acquire) == 0
    }
}

impl Attempts {
    /// Tries once. Returns whether no further attempt is needed.
    fn try_import(&mut self, arrays: &Arrays) -> bool {
        if let Some(config) = arrays.settings.section(&self.config.which) {
            self.config = config;
        }
        let earlier = arrays.awaited.remembered_paths(&self.config.which);
        let found = search_with(&self.config.search, &earlier, self.config.limits.local);
        match self.import(arrays, &found) {
            Ok(line) => {
                tracing::info!("{line}");
                arrays.awaited.not_awaited(&self.config.which);
                true
            }
            Err(error) => {
                let told = (&found, error);
                arrays.awaited.still_awaited(&self.config.which, told, &arrays.memory, &arrays.events);
                false
            }
        }
    }

    fn import(&self, arrays: &Arrays, found: &Search) -> Result<String, NotServed> {
        let config = &self.config;
        let uuid = match found.choose(&config.which.to_string(), &config.search) {
            Err(ImportError::Ambiguous { name, uuids }) => {
                let is_there = |uuid: &Uuid| found.arrays[uuid].iter().any(|member| !member.remembered);
                arrays.memory.settle(&uuids, is_there, None).ok_or(ImportError::Ambiguous { name, uuids })
            }
            chosen => chosen,
        }?;
        if !arrays.awaited.is_awaited(&config.which) {
            // It was served meanwhile, and may be exported again.
            return Ok(format!("array '{}' is not awaited any more", config.which));
        }
        if arrays.served.uuids().contains(&uuid)
            && let Some(report) = arrays.status(Some(&uuid.to_string()))?.first()
        {
            // A command has imported it meanwhile.
            return Ok(served_line(report));
        }
        if arrays.awaited.was_exported(&config.which, uuid) {
            let text = format!("array '{}' was exported, and stays out of service", config.which);
            return match arrays.awaited.is_another(&config.which, uuid) {
                true => Err(refusal(ErrorCode::Refused, text).into()),
                false => Ok(text),
            };
        }
        let superblock = newest_found(&found.arrays[&uuid]);
        let options = superblock.map(|superblock| arrays.settings.options_by(config, &superblock.name, uuid));
        let options = options.unwrap_or_else(|| ServeOptions::of(config));
        match open_and_serve_awaited(arrays, &config.which, found, uuid, options) {
            Ok(report) => Ok(served_line(&report)),
            // The attempt for another section about the same array has succeeded meanwhile.
            Err(error) => match arrays.status(Some(&uuid.to_string())) {
                Ok(reports) if arrays.served.uuids().contains(&uuid) && !reports.is_empty() => {
                    Ok(served_line(&reports[0]))
                }
                _ => Err(error),
            },
        }
    }
}
