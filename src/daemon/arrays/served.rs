//! The arrays in service: what the daemon knows of each. Must not know how an array comes to be
//! here.

use super::awaited::InService;
use super::names::Names;
use crate::daemon::ranked::{Ranked, lock};
use crate::daemon::reactor::ArrayId;
use crate::member::TimeLimits;
use calpe_core::format::Superblock;
use std::path::PathBuf;
use uuid::Uuid;

/// An array in service.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) id: ArrayId,
    /// One of its superblocks, for what never changes.
    pub(crate) superblock: Superblock,
    pub(crate) names: Names,
    pub(crate) limits: TimeLimits,
    /// Bytes of memory for its metadata.
    pub(crate) memory: u64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct ServedArrays(Ranked<Vec<Served>, 3>);

impl ServedArrays {
    /// Adds an array.
    pub(super) fn add(&self, served: Served) {
        lock(&self.0).push(served);
    }

    /// Removes an array. Returns its identity.
    pub(super) fn remove(&self, id: ArrayId) -> Option<Uuid> {
        let mut all = lock(&self.0);
        let at = all.iter().position(|served| served.id == id)?;
        Some(all.remove(at).names.uuid)
    }

    /// Removes all.
    pub(crate) fn clear(&self) {
        lock(&self.0).clear();
    }

    /// The ids of all.
    pub(crate) fn ids(&self) -> Vec<ArrayId> {
        self.list(|served| served.id)
    }

    /// The identities of all.
    pub(crate) fn uuids(&self) -> Vec<Uuid> {
        self.list(|served| served.names.uuid)
    }

    /// One value for each.
    pub(crate) fn list<T>(&self, take: impl FnMut(&Served) -> T) -> Vec<T> {
        lock(&self.0).iter().map(take).collect()
    }

    /// Name, identity and places of each.
    pub(crate) fn in_service(&self) -> Vec<InService> {
        self.list(|served| {
            let names = &served.names;
            (names.name.clone(), names.uuid, names.paths().cloned().collect())
        })
    }

    /// Looks an array up by name or uuid.
    ///
    /// # Errors
    /// The names of those in service.
    pub(super) fn find<T>(&self, array: &str, take: impl FnOnce(&Served) -> T) -> Result<T, Vec<String>> {
        let by_uuid = array.parse::<Uuid>().ok();
        let all = lock(&self.0);
        let is_it = |served: &&Served| served.names.name == array || Some(served.names.uuid) == by_uuid;
        match all.iter().find(is_it) {
            Some(served) => Ok(take(served)),
            None => Err(all.iter().map(|served| served.names.name.clone()).collect()),
        }
    }

    /// Runs `action` with an array, if it is in service.
    pub(crate) fn with<T>(&self, id: ArrayId, action: impl FnOnce(&Served) -> T) -> Option<T> {
        lock(&self.0).iter().find(|served| served.id == id).map(action)
    }

    /// Runs `action` with the names of an array, if it is in service.
    pub(crate) fn with_names<T>(&self, id: ArrayId, action: impl FnOnce(&mut Names) -> T) -> Option<T> {
        let mut all = lock(&self.0);
        all.iter_mut().find(|served| served.id == id).map(|served| action(&mut served.names))
    }

    /// Remembers where the device of a missing member should be, for messages and for `online`.
    pub(crate) fn expect_member_at(&self, array: Uuid, index: usize, path: PathBuf) {
        let mut all = lock(&self.0);
        let served = all.iter_mut().find(|served| served.names.uuid == array);
        if let Some(served) = served {
            served.names.expect_member_at(index, path);
        }
    }
}
