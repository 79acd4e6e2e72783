//! The configuration of arrays, while the daemon runs: which clients may use them, how fast they are rebuilt,
//! where members are looked for.
//!
//! Invariant: an array is never served by other rules than those that the configuration has for its name or
//! identity, however it came to be served. Must not know where configurations come from.

use crate::daemon::config::{ArrayChoice, ArrayConfig};
use crate::daemon::ranked::{Ranked, RankedGuard, lock};
use crate::member::TimeLimits;
use crate::tls::PeerRules;
use calpe_core::array::{self, FullStripe};
use std::path::PathBuf;
use std::sync::Arc;
use uuid::Uuid;

/// How an array is to be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServeOptions {
    /// Clients may only read.
    pub read_only: bool,
    /// Floor of background passes in bytes a second; none for the built-in one.
    pub rebuild_min: Option<u64>,
    /// Ceiling of background passes; none for no ceiling.
    pub rebuild_max: Option<u64>,
    /// What is done with writes of whole stripes; none for what suits the members.
    pub full_stripe: Option<FullStripe>,
    /// Bytes of memory for pages of checksums; none for what the memory of this host suggests.
    pub page_cache: Option<u64>,
    /// How patient to be with members.
    pub limits: TimeLimits,
    /// Serve although a replay of the log finds rows lost that nothing would tell from good ones.
    pub force: bool,
}

impl ServeOptions {
    /// As a section of the configuration says.
    pub(crate) fn of(config: &ArrayConfig) -> ServeOptions {
        ServeOptions {
            read_only: config.read_only,
            rebuild_min: config.rebuild_min,
            rebuild_max: config.rebuild_max,
            full_stripe: config.full_stripe,
            page_cache: config.page_cache,
            limits: config.limits,
            force: false,
        }
    }

    /// The same as the array's configuration. `rotational`: whether some member is a spinning disk.
    pub(crate) fn array_config(&self, rotational: bool) -> array::ArrayConfig {
        let defaults = array::ArrayConfig::default();
        // Sequential order on disk is worth a second write only where seeks are expensive.
        let suited = if rotational { FullStripe::Logged } else { FullStripe::Fresh };
        let page_cache = self.page_cache.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
        array::ArrayConfig {
            rebuild_min: self.rebuild_min.unwrap_or(defaults.rebuild_min),
            rebuild_max: self.rebuild_max.unwrap_or(defaults.rebuild_max),
            full_stripe: self.full_stripe.unwrap_or(suited),
            job_bytes_min: defaults.job_bytes_min,
            page_cache: page_cache.unwrap_or(defaults.page_cache),
            force: self.force,
            seed: random(),
            // The daemon's clock starts at 1970.
            unix_at_zero: 0,
        }
    }
}

/// The sections about arrays, and where members are looked for.
#[derive(Debug)]
pub(crate) struct Settings {
    sections: Ranked<Sections, 2>,
    search: Ranked<Vec<PathBuf>, 6>,
}

/// The sections that count.
#[derive(Debug, Default)]
pub(crate) struct Sections {
    arrays: Vec<ArrayConfig>,
    /// Sections in `arrays` that are no longer in the configuration.
    gone: Vec<ArrayChoice>,
    /// Sections that were in `gone` until their arrays were exported.
    over: Vec<ArrayChoice>,
}

impl Sections {
    /// The sections about an array: the one by uuid takes precedence over the one by name.
    pub(crate) fn of(&self, name: &str, uuid: Uuid) -> impl Iterator<Item = &ArrayConfig> {
        let wanted = [ArrayChoice::Uuid(uuid), ArrayChoice::Name(name.to_owned())];
        wanted.into_iter().filter_map(|which| self.arrays.iter().find(|config| config.which == which))
    }

    /// All that count.
    pub(crate) fn all(&self) -> &[ArrayConfig] {
        &self.arrays
    }

    /// The sections that are in the configuration: the next start uses them.
    pub(crate) fn configured(&self) -> impl Iterator<Item = &ArrayConfig> {
        self.arrays.iter().filter(|config| !self.gone.contains(&config.which))
    }

    /// Which certificates may use an array; none: all.
    pub(crate) fn rules(&self, name: &str, uuid: Uuid) -> Option<Arc<PeerRules>> {
        // Where both sections have rules, both must grant access.
        let mut rules = self.of(name, uuid).filter_map(|section| section.rules.clone());
        let first = rules.next()?;
        Some(rules.next().map_or(first.clone(), |second| Arc::new(first.both(&second))))
    }

    /// How an array is served if there is a section about it: by the first section, but read-only
    /// if any says so.
    fn options(&self, name: &str, uuid: Uuid) -> Option<ServeOptions> {
        let first = self.of(name, uuid).next().map(ServeOptions::of)?;
        Some(ServeOptions { read_only: self.of(name, uuid).any(|section| section.read_only), ..first })
    }

    /// Where members are looked for.
    fn search(&self) -> Vec<PathBuf> {
        let mut search: Vec<PathBuf> = Vec::new();
        for place in self.arrays.iter().flat_map(|array| &array.search) {
            if !search.contains(place) {
                search.push(place.clone());
            }
        }
        search
    }
}

impl Settings {
    /// No sections yet; members are looked for in these places.
    pub(crate) fn new(search: Vec<PathBuf>) -> Settings {
        Settings { sections: Ranked::default(), search: Ranked::new(search) }
    }

    /// The sections. They do not change while the guard lives.
    pub(crate) fn sections(&self) -> RankedGuard<'_, Sections> {
        lock(&self.sections)
    }

    /// Replaces the sections; those that are `gone` from the configuration count for as long as their arrays
    /// are served. Returns them, still locked.
    pub(crate) fn replace(&self, arrays: &[ArrayConfig], gone: &[ArrayConfig]) -> RankedGuard<'_, Sections> {
        let mut sections = lock(&self.sections);
        sections.over.retain(|which| arrays.iter().all(|config| config.which != *which));
        let is_held = |config: &&ArrayConfig| !sections.over.contains(&config.which);
        let held: Vec<ArrayConfig> = gone.iter().filter(is_held).cloned().collect();
        sections.arrays = [arrays, &held].concat();
        sections.gone = held.into_iter().map(|config| config.which).collect();
        *lock(&self.search) = sections.search();
        sections
    }

    /// Ends the sections about an exported array that are no longer in the configuration.
    pub(crate) fn end_section(&self, array: Uuid, name: &str) {
        let mut sections = lock(&self.sections);
        let over: Vec<ArrayChoice> = sections.gone.extract_if(.., |which| which.means(name, array)).collect();
        sections.arrays.retain(|config| !over.contains(&config.which));
        sections.over.extend(over);
        *lock(&self.search) = sections.search();
    }

    /// The options of an array that is imported by command: those of its section, if there is one.
    pub(crate) fn options_for(&self, name: &str, uuid: Uuid) -> ServeOptions {
        lock(&self.sections).options(name, uuid).unwrap_or_default()
    }

    /// The options of an array that is imported for a section.
    pub(crate) fn options_by(&self, section: &ArrayConfig, name: &str, uuid: Uuid) -> ServeOptions {
        lock(&self.sections).options(name, uuid).unwrap_or_else(|| ServeOptions::of(section))
    }

    /// Whether the configuration has a section about this array: then the next start serves it.
    pub(crate) fn is_configured(&self, array: Uuid, name: &str) -> bool {
        let settings = lock(&self.sections);
        settings.configured().any(|config| config.which.means(name, array))
    }

    /// The section about an array that the next start uses.
    pub(crate) fn configured(&self, which: &ArrayChoice) -> Option<ArrayConfig> {
        lock(&self.sections).configured().find(|config| config.which == *which).cloned()
    }

    /// The arrays that sections name by their identities, of the sections that the next start uses.
    pub(crate) fn configured_uuids(&self) -> Vec<Uuid> {
        let by_uuid = |config: &ArrayConfig| match config.which {
            ArrayChoice::Uuid(uuid) => Some(uuid),
            ArrayChoice::Name(_) => None,
        };
        lock(&self.sections).configured().filter_map(by_uuid).collect()
    }

    /// The section about an array as it is now.
    pub(crate) fn section(&self, which: &ArrayChoice) -> Option<ArrayConfig> {
        lock(&self.sections).arrays.iter().find(|config| config.which == *which).cloned()
    }

    /// Where members are looked for.
    pub(crate) fn search_places(&self) -> Vec<PathBuf> {
        lock(&self.search).clone()
    }
}

/// 64 random bits: a uuid's fixed bits lie in different places of its halves.
fn random() -> u64 {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    high ^ low
}
