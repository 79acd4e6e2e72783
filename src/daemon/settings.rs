//! What the configuration says of arrays, while the daemon runs: who may use them, how fast they are rebuilt,
//! where members are looked for.
//!
//! Invariant: an array is never served by other rules than those that the configuration has for its name or
//! identity, however it came to be served. Must not know where configurations come from.

use super::config::{ArrayChoice, ArrayConfig};
use super::memory::covers;
use super::ranked::lock;
use super::service::{Daemon, Served};
use crate::control::{CertificateReport, RequestError};
use crate::member::{DEFAULT_MEMBER_TIMEOUT, TimeLimits, is_remote};
use crate::tls::{CertificateFacts, Peer, PeerRules, ServerTls};
use calpe_core::array::{self, FullStripe};
use calpe_core::volume::AdminRequest;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// How an array is to be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServeOptions {
    /// Clients may only read.
    pub read_only: bool,
    /// Floor of background passes in bytes a second; none for the built-in one.
    pub rebuild_min: Option<u64>,
    /// Ceiling of background passes; none for no ceiling.
    pub rebuild_max: Option<u64>,
    /// What is done with writes of whole stripes; none for what suits the members.
    pub full_stripe: Option<FullStripe>,
    /// Bytes of memory for metadata pages; none for the built-in amount.
    pub page_cache: Option<u64>,
    /// How patient to be with members.
    pub limits: TimeLimits,
    /// Serve although a replay of the log finds rows lost that nothing would tell from good ones.
    pub force: bool,
}

impl ServeOptions {
    /// As a section of the configuration says.
    pub(super) fn of(config: &ArrayConfig) -> ServeOptions {
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

    /// What an array is told of them; `rotational`: some member spins.
    pub(super) fn array_config(&self, rotational: bool) -> array::ArrayConfig {
        let defaults = array::ArrayConfig::default();
        // Order on disk is worth a second write only where a seek costs more than that.
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
            // The daemon's clock counts from 1970.
            unix_at_zero: 0,
        }
    }
}

/// What becomes of a section that is new or has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Its array is not served.
    NotServed,
    /// Its array goes by it.
    Counts,
    /// Its array goes by it, but by the rules of this other section, too.
    Before(ArrayChoice),
    /// Another section about the same array goes first: of this one, who may use the array and whether it is read-only count.
    Behind(ArrayChoice),
}

/// Settings of a daemon's arrays.
#[derive(Debug, Default)]
pub(super) struct Settings {
    arrays: Vec<ArrayConfig>,
    /// Those of them that are not in the configuration any more.
    gone: Vec<ArrayChoice>,
    /// Those that were, and whose arrays have been exported since: they count no more.
    over: Vec<ArrayChoice>,
}

impl Settings {
    /// The sections about an array: that of its identity goes before that of its name.
    fn of(&self, name: &str, uuid: Uuid) -> impl Iterator<Item = &ArrayConfig> {
        let wanted = [ArrayChoice::Uuid(uuid), ArrayChoice::Name(name.to_owned())];
        wanted.into_iter().filter_map(|which| self.arrays.iter().find(|config| config.which == which))
    }

    /// The sections that the next start goes by, too.
    pub(super) fn configured(&self) -> impl Iterator<Item = &ArrayConfig> {
        self.arrays.iter().filter(|config| !self.gone.contains(&config.which))
    }

    /// Which certificates may use an array; none: all.
    pub(super) fn rules(&self, name: &str, uuid: Uuid) -> Option<Arc<PeerRules>> {
        // A section lifts no rule of the other one: where both have some, both must grant it.
        let mut rules = self.of(name, uuid).filter_map(|section| section.rules.clone());
        let first = rules.next()?;
        Some(rules.next().map_or(first.clone(), |second| Arc::new(first.both(&second))))
    }

    /// How an array is served, if there is a section about it: as the first one says, and read-only if any of them says so.
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

impl Daemon {
    /// Goes by these sections from now on, also for arrays that are served, and by those that are `gone` from the
    /// configuration for as long as their arrays are served. Returns how many sessions end by it.
    pub fn configure(&self, arrays: &[ArrayConfig], gone: &[ArrayConfig]) -> usize {
        let mut settings = lock(&self.settings);
        settings.over.retain(|which| arrays.iter().all(|config| config.which != *which));
        let is_held = |config: &&ArrayConfig| !settings.over.contains(&config.which);
        let held: Vec<ArrayConfig> = gone.iter().filter(is_held).cloned().collect();
        settings.arrays = [arrays, &held].concat();
        settings.gone = held.into_iter().map(|config| config.which).collect();
        *lock(&self.search) = settings.search();
        let served: Vec<_> =
            lock(&self.served).iter().map(|s| (s.id, s.names.name.clone(), s.names.uuid)).collect();
        // Under the lock: an array that is about to be served has either these rules or is in the list.
        let ended = served.into_iter().map(|(id, name, uuid)| {
            // One that is being stopped has no clients left.
            self.reactor.set_rules(id, settings.rules(&name, uuid)).unwrap_or(0)
        });
        ended.sum()
    }

    /// An array was exported: a section about it that is not in the configuration any more counts no longer.
    pub(super) fn end_section(&self, array: Uuid, name: &str) {
        let mut settings = lock(&self.settings);
        let over: Vec<ArrayChoice> = settings.gone.extract_if(.., |which| which.means(name, array)).collect();
        settings.arrays.retain(|config| !over.contains(&config.which));
        settings.over.extend(over);
        *lock(&self.search) = settings.search();
    }

    /// Paces rebuild and scrub of an array as its section says, if it is served. Returns what becomes of the section.
    ///
    /// # Errors
    /// When the array refuses.
    pub(super) fn pace(&self, config: &ArrayConfig) -> Result<Standing, RequestError> {
        let served = |served: &Served| (served.id, served.names.name.clone(), served.names.uuid);
        let Ok((id, name, uuid)) = self.find(&config.which.to_string(), served) else {
            return Ok(Standing::NotServed);
        };
        let mut sections: Vec<ArrayChoice> =
            lock(&self.settings).of(&name, uuid).map(|section| section.which.clone()).collect();
        if let Some(first) = sections.first().filter(|first| **first != config.which) {
            return Ok(Standing::Behind(first.clone()));
        }
        let defaults = array::ArrayConfig::default();
        let request = AdminRequest::Pace {
            rebuild_min: config.rebuild_min.unwrap_or(defaults.rebuild_min),
            rebuild_max: config.rebuild_max.unwrap_or(defaults.rebuild_max),
        };
        self.reactor.admin(id, request, Vec::new())?;
        Ok(if sections.len() > 1 { Standing::Before(sections.swap_remove(1)) } else { Standing::Counts })
    }

    /// How an array is served that is imported by command: as its section says, if there is one.
    pub(super) fn options_for(&self, name: &str, uuid: Uuid) -> ServeOptions {
        lock(&self.settings).options(name, uuid).unwrap_or_default()
    }

    /// How an array is served that is imported for a section.
    pub(super) fn options_by(&self, section: &ArrayConfig, name: &str, uuid: Uuid) -> ServeOptions {
        lock(&self.settings).options(name, uuid).unwrap_or_else(|| ServeOptions::of(section))
    }

    /// How long an import by command waits for each path that it looks at: for places of sections, and where devices of their
    /// arrays were, as these say (the longest, of several); elsewhere as the section about the array says that is wanted. Servers
    /// have limits of their own.
    pub(super) fn look_limits(&self, wanted: Option<&str>) -> impl Fn(&Path) -> Duration + Sync + use<> {
        let sections = lock(&self.settings).arrays.clone();
        let own = wanted.and_then(|wanted| sections.iter().find(|config| config.which.to_string() == wanted));
        let own = own.map_or(DEFAULT_MEMBER_TIMEOUT, |config| config.limits.local);
        let places = sections.into_iter().map(|config| {
            let mut places = self.earlier_paths(Some(&config.which.to_string()));
            places.extend(config.search);
            (places, config.limits.local)
        });
        let places: Vec<(Vec<PathBuf>, Duration)> = places.collect();
        move |path| {
            if is_remote(path) {
                return DEFAULT_MEMBER_TIMEOUT;
            }
            let of_it = places.iter().filter(|(places, _)| places.iter().any(|place| covers(place, path)));
            of_it.map(|(_, limit)| *limit).max().unwrap_or(own)
        }
    }

    /// Whether the configuration has a section about this array: then the next start serves it.
    pub(super) fn is_configured(&self, array: Uuid, name: &str) -> bool {
        let settings = lock(&self.settings);
        settings.configured().any(|config| config.which.means(name, array))
    }

    /// The section about an array that the next start goes by.
    pub(super) fn configured(&self, which: &ArrayChoice) -> Option<ArrayConfig> {
        lock(&self.settings).configured().find(|config| config.which == *which).cloned()
    }

    /// The arrays that sections name by their identities, of those that the next start goes by.
    pub(super) fn configured_uuids(&self) -> Vec<Uuid> {
        let by_uuid = |config: &ArrayConfig| match config.which {
            ArrayChoice::Uuid(uuid) => Some(uuid),
            ArrayChoice::Name(_) => None,
        };
        lock(&self.settings).configured().filter_map(by_uuid).collect()
    }

    /// The section about an array as it is now.
    pub(super) fn section(&self, which: &ArrayChoice) -> Option<ArrayConfig> {
        lock(&self.settings).arrays.iter().find(|config| config.which == *which).cloned()
    }

    /// Ends the sessions of clients that a server's files do not let in any more. Returns who they were, and how many had no
    /// certificate.
    pub(super) fn end_untrusted(&self, tls: &ServerTls) -> (Vec<Arc<Peer>>, usize) {
        let mut peers = self.reactor.peers().unwrap_or_default();
        peers.retain(|peer| tls.trusts(peer).is_err());
        // A reactor that has ended has no sessions.
        let _ = self.reactor.end_sessions(peers.clone(), false);
        let anonymous = tls.demands_certificates().then(|| self.reactor.end_sessions(Vec::new(), true));
        (peers, anonymous.and_then(Result::ok).unwrap_or(0))
    }

    /// Tells from now on when these certificates end.
    pub(super) fn watch_certificates(&self, server: Vec<CertificateFacts>, remote: Vec<CertificateFacts>) {
        lock(&self.certificates).watch(server, remote);
    }

    /// The certificates that it shows and trusts.
    pub(super) fn certificates(&self) -> Vec<CertificateReport> {
        lock(&self.certificates).report(super::clock::unix_seconds())
    }
}

/// 64 random bits: a uuid's fixed bits lie in different places of its halves.
fn random() -> u64 {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    high ^ low
}
