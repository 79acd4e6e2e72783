//! Which paths a search of a place covers. Must not read anything.

use crate::member::{is_remote, same_remote};
use std::path::{Path, PathBuf};

/// Whether a search of this place covers this path.
pub(crate) fn covers(place: &Path, path: &Path) -> bool {
    if is_remote(place) || is_remote(path) {
        return is_remote(place) && is_remote(path) && same_remote(place, path);
    }
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let (place, path) = (absolute(place), absolute(path));
    place == path || path.parent() == Some(&place)
}

/// The directory of a member file; none for a remote member, or for a device in /dev, which is not
/// searched as a whole.
pub(crate) fn directory_of(path: &Path) -> Option<PathBuf> {
    let directory = path.parent().filter(|parent| !is_remote(path) && !parent.starts_with("/dev"));
    directory.map(Path::to_owned)
}
