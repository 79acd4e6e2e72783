//! Applies a changed configuration to arrays in service: which clients may use them, and how fast they are
//! rebuilt.
//!
//! Invariant: an array is never served by other rules than those that the configuration has for its name or
//! identity, however it came to be served. Must not know where configurations come from.

use super::registry::Arrays;
use super::served::Served;
use crate::control::RequestError;
use crate::daemon::config::{ArrayChoice, ArrayConfig};
use calpe_core::array;
use calpe_core::volume::AdminRequest;

/// The standing of a section that is new or has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Its array is not served.
    NotServed,
    /// Its array is served by it.
    Counts,
    /// Its array is served by it, and by the rules of this other section besides.
    Before(ArrayChoice),
    /// Another section about the same array takes precedence. Of this one, only the rules for
    /// clients and `read_only` count.
    Behind(ArrayChoice),
}

/// Replaces the sections, also for arrays in service. The sections that are `gone` from the configuration
/// count for as long as their arrays are served. Returns how many sessions end as a result.
pub(crate) fn configure(arrays: &Arrays, sections: &[ArrayConfig], gone: &[ArrayConfig]) -> usize {
    let sections = arrays.settings.replace(sections, gone);
    let served = arrays.served.list(|s| (s.id, s.names.name.clone(), s.names.uuid));
    // Under the lock: an array that is about to be served either has these rules or is in the list.
    let ended = served.into_iter().map(|(id, name, uuid)| {
        // An array that is being stopped has no clients left.
        arrays.reactor.set_rules(id, sections.rules(&name, uuid)).unwrap_or(0)
    });
    ended.sum()
}

/// Applies the rates of a section for rebuild and scrub to its array, if that is served. Returns the standing
/// of the section.
///
/// # Errors
/// When the array refuses.
pub(crate) fn pace(arrays: &Arrays, config: &ArrayConfig) -> Result<Standing, RequestError> {
    let served = |served: &Served| (served.id, served.names.name.clone(), served.names.uuid);
    let Ok((id, name, uuid)) = arrays.find(&config.which.to_string(), served) else {
        return Ok(Standing::NotServed);
    };
    let mut sections: Vec<ArrayChoice> =
        arrays.settings.sections().of(&name, uuid).map(|section| section.which.clone()).collect();
    if let Some(first) = sections.first().filter(|first| **first != config.which) {
        return Ok(Standing::Behind(first.clone()));
    }
    let defaults = array::ArrayConfig::default();
    let request = AdminRequest::Pace {
        rebuild_min: config.rebuild_min.unwrap_or(defaults.rebuild_min),
        rebuild_max: config.rebuild_max.unwrap_or(defaults.rebuild_max),
    };
    arrays.reactor.admin_all(id, &request)?;
    Ok(if sections.len() > 1 { Standing::Before(sections.swap_remove(1)) } else { Standing::Counts })
}
