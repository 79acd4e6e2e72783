//! What the configuration says of an array that a command imports or exports: whether the next start serves
//! it, and which array of its name. Must not change anything.

use crate::daemon::arrays::registry::Arrays;
use crate::daemon::config::{ArrayChoice, ArrayConfig};
use crate::daemon::devices::places::covers;
use crate::daemon::devices::search::{Found, Search};
use std::path::Path;
use uuid::Uuid;

/// Whether all members of an array are where the daemon or the section about it looks, so that the
/// next start finds them without its memory.
pub(crate) fn is_found_again<'a>(
    arrays: &Arrays,
    array: Uuid,
    name: &str,
    mut members: impl Iterator<Item = &'a Path>,
) -> bool {
    let by_uuid = arrays.settings.configured(&ArrayChoice::Uuid(array));
    let section = by_uuid.or_else(|| arrays.settings.configured(&ArrayChoice::Name(name.to_owned())));
    let mut places = arrays.settings.search_places();
    places.extend(section.map(|section| section.search).unwrap_or_default());
    members.all(|member| places.iter().any(|place| covers(place, member)))
}

/// Why the next start may not find a configured array with these members.
pub(crate) fn may_not_be_found<'a>(
    arrays: &Arrays,
    array: Uuid,
    name: &str,
    members: impl Iterator<Item = &'a Path>,
) -> Option<String> {
    let why = arrays.memory.cannot_remember()?;
    if is_found_again(arrays, array, name, members) {
        return None;
    }
    Some(format!(
        "array '{name}' is in the configuration, but the next start may not find it: by their paths, members of it are where neither its \
         section nor the daemon looks ('search'), and that is not remembered ({why})"
    ))
}

/// A warning about an import if the configuration means another array of the same name.
pub(crate) fn not_the_configured(arrays: &Arrays, found: &Search, array: Uuid) -> Option<String> {
    let name = name_of(&found.arrays[&array]);
    if arrays.settings.configured(&ArrayChoice::Uuid(array)).is_some() {
        return None;
    }
    let is_named = |uuid: &Uuid| found.arrays.get(uuid).is_some_and(|members| name_of(members) == name);
    let by_uuid = arrays.settings.configured_uuids().into_iter().find(is_named);
    if let Some(other) = by_uuid {
        return Some(format!(
            "in the configuration, array '{name}' is {other}: the next start serves that one, and not {array}, as two of one \
             name are not served at once, unless its section says uuid = \"{array}\""
        ));
    }
    let section = arrays.settings.configured(&ArrayChoice::Name(name.to_owned()))?;
    let others = in_places_of(&section, found).into_iter().filter(|uuid| *uuid != array && is_named(uuid));
    let other = others.into_iter().next()?;
    if in_places_of(&section, found).contains(&array) {
        return None;
    }
    Some(format!(
        "in the configuration, array '{name}' is {other}, which is where its section looks: the next start serves that one, and \
         not {array}, unless its section says uuid = \"{array}\""
    ))
}

/// A warning about `--once` for an array that is in the configuration.
pub(crate) fn served_all_the_same(
    arrays: &Arrays,
    found: &Search,
    array: Uuid,
    name: &str,
) -> Option<String> {
    if !arrays.settings.is_configured(array, name) {
        return None;
    }
    let members = found.arrays[&array].iter().map(|member| &*member.path);
    if let Some(text) = may_not_be_found(arrays, array, name, members) {
        return Some(text);
    }
    let section = match arrays.settings.configured(&ArrayChoice::Uuid(array)) {
        Some(_) => None,
        None => arrays.settings.configured(&ArrayChoice::Name(name.to_owned())),
    };
    let again = section.map_or(Some(array), |section| {
        let mut there = in_places_of(&section, found);
        there.retain(|uuid| name_of(&found.arrays[uuid]) == name);
        arrays.memory.meant_by_name(name, &there, array)
    });
    Some(match again {
        Some(again) if again == array => format!(
            "array '{name}' is in the configuration: the next start serves it all the same ('--once' or not)"
        ),
        Some(other) => format!(
            "array '{name}' is in the configuration, and the next start takes {other} for it: this one is served all the same \
             ('--once' or not) only where its section says uuid = \"{array}\""
        ),
        None => format!(
            "array '{name}' is in the configuration, which can mean several arrays of that name: unless one alone is there then, \
             the next start serves none of them; uuid = \"{array}\" in its section says that this one is meant"
        ),
    })
}

/// The arrays with members in the places of a section.
fn in_places_of(section: &ArrayConfig, found: &Search) -> Vec<Uuid> {
    let is_its_place = |member: &Found| section.search.iter().any(|place| covers(place, &member.path));
    let is_there = |members: &[Found]| members.iter().any(is_its_place);
    found.arrays.iter().filter(|(_, members)| is_there(members)).map(|(uuid, _)| *uuid).collect()
}

/// A warning about the export of a configured array: what the next start does with it.
pub(crate) fn kept_in_configuration(name: &str, does: &str) -> String {
    format!(
        "array '{name}' is in the configuration: the next start {does} again; to keep it out of service, take its [[array]] section \
         out of the file"
    )
}

/// The name of an array. It never changes, so any superblock has it.
pub(crate) fn name_of(members: &[Found]) -> &str {
    members.first().map_or("", |member| member.superblock.name.as_str())
}
