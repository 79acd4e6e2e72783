//! The list of what could be imported. Must not open anything for writing.

use crate::control::{Importable, Reply};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::serve::check_servable;
use crate::daemon::devices::import;
use crate::daemon::devices::importable::importable;
use crate::daemon::devices::search::{Found, search_patiently};
use crate::member::{is_held_by_calpe, is_remote};
use calpe_core::units::{quoted, shown};
use std::path::PathBuf;
use uuid::Uuid;

pub(crate) fn places(arrays: &Arrays, dirs: &[PathBuf]) -> Vec<PathBuf> {
    let configured = arrays.settings.search_places();
    match (dirs, &configured[..]) {
        ([], []) => vec![import::DEFAULT_SEARCH.into()],
        ([], configured) => configured.to_vec(),
        (asked, configured) => asked.iter().chain(configured).cloned().collect(),
    }
}

/// The arrays that could be imported, and the obstacle of each, if any.
pub(crate) fn list(arrays: &Arrays, dirs: &[PathBuf]) -> Reply {
    // As `import` does: devices that served an array belong to it wherever they are.
    let found = search_patiently(
        &places(arrays, dirs),
        &arrays.memory.earlier_paths(None),
        &arrays.look_limits(None),
    );
    if let Err(error) = found.check_whole() {
        return Reply::Error(error.into());
    }
    let served: Vec<Uuid> = arrays.served.uuids();
    let not_served = found.arrays.iter().filter(|(uuid, _)| !served.contains(uuid));
    let listed = |members: &[Found]| {
        let earlier = |array, device| arrays.memory.earlier_path(array, device);
        let array = importable(members, &found, earlier)?;
        let problem = array
            .problem
            .or_else(|| in_use(members))
            .or_else(|| is_name_taken(arrays, &array.name, array.uuid, dirs))
            .or_else(|| is_unservable(arrays, members));
        Some(Importable { problem, ..array })
    };
    let mut arrays: Vec<Importable> = not_served.filter_map(|(_, members)| listed(members)).collect();
    arrays.sort_by(|a, b| (&a.name, a.uuid).cmp(&(&b.name, b.uuid)));
    let warnings = match arrays[..] {
        [] => found.not_used(dirs),
        _ => {
            let forbidden = found.forbidden_in(|_| true);
            found.warnings.into_iter().chain(forbidden).collect()
        }
    };
    Reply::Importable { arrays, warnings }
}

/// Why an array in these directories cannot be imported while another of the same name is served.
fn is_name_taken(arrays: &Arrays, name: &str, uuid: Uuid, dirs: &[PathBuf]) -> Option<String> {
    let other = arrays.find(name, |served| served.names.uuid).ok()?;
    Some(format!(
        "an array named '{name}' ({other}) is served: this one can be imported only when that is exported, with 'calpe export \
         {name}', then 'calpe import {uuid}{}'",
        options_of(dirs)
    ))
}

/// Why this daemon cannot serve the array of these members, by the check of an import.
fn is_unservable(arrays: &Arrays, members: &[Found]) -> Option<String> {
    let superblock = import::newest_found(members)?;
    let options = arrays.settings.options_for(&superblock.name, superblock.array);
    check_servable(arrays, superblock, options).err().map(|error| error.message)
}

/// Why these members are not available: another daemon has one of them.
fn in_use(members: &[Found]) -> Option<String> {
    let local = members.iter().filter(|member| !is_remote(&member.path));
    let mut held = local.filter(|member| is_held_by_calpe(&member.path));
    held.next().map(|member| {
        format!("{}: is in use by another daemon or check: stop that first", shown(&member.path))
    })
}

/// These directories as options of `calpe import`.
pub(crate) fn options_of(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| format!(" --dir {}", quoted(dir))).collect()
}
