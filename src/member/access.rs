//! How a member is reached: for what, and over a path or a URI. Must not know how either is opened.

use std::path::Path;

/// How to open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading and writing, locked against all other users.
    Exclusive,
    /// For reading only, locked against all other users: nothing changes meanwhile.
    Still,
    /// For reading only; works while a daemon serves the device.
    ReadOnly,
}

impl Access {
    /// Whether the device is locked against other openings as a member.
    pub(super) fn locks(self) -> bool {
        self != Access::ReadOnly
    }
}

/// Whether a member is given as a URI instead of a path.
#[must_use]
pub(crate) fn is_remote(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().windows(3).any(|part| part == b"://")
}
