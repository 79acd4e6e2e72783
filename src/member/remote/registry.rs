//! What this process knows of remote exports beyond their connections: which are open as members,
//! and which were lost, how, and until when they must not come back.
//!
//! Exports have no locks, so a second opening of a URI in this process is refused here; other
//! processes and hosts are not seen. Must not know connections.

use super::{Lost, RemoteError};
use calpe_core::nbd::NbdUri;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

#[derive(Default)]
struct Entry {
    held: bool,
    lost: Option<Lost>,
}

static ENTRIES: LazyLock<Mutex<HashMap<NbdUri, Entry>>> = LazyLock::new(Mutex::default);

fn entries() -> MutexGuard<'static, HashMap<NbdUri, Entry>> {
    ENTRIES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to use an export as a member; given back when dropped.
#[derive(Debug)]
pub(super) struct Hold(NbdUri);

impl Hold {
    /// None when this process has the export open as a member already.
    pub(super) fn take(uri: &NbdUri) -> Option<Hold> {
        let mut entries = entries();
        let entry = entries.entry(uri.clone()).or_default();
        (!std::mem::replace(&mut entry.held, true)).then(|| Hold(uri.clone()))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut entries = entries();
        let lost = entries.get_mut(&self.0).is_some_and(|entry| {
            entry.held = false;
            entry.lost.is_some()
        });
        if !lost {
            entries.remove(&self.0);
        }
    }
}

/// Records that an export was lost while it was a member.
pub(super) fn note_lost(uri: &NbdUri, lost: Lost) {
    entries().entry(uri.clone()).or_default().lost = Some(lost);
}

/// How an export was lost, unless that was [forgotten](forget).
pub(super) fn lost(uri: &NbdUri) -> Option<Lost> {
    entries().get(uri)?.lost.clone()
}

/// Forgets losses until `until`: the export is in service again, or is not to come back by itself.
/// Later losses stay, and so does the time until which writes may land.
pub(super) fn forget(uri: &NbdUri, until: Instant) {
    let mut entries = entries();
    if let Some(entry) = entries.get_mut(uri)
        && entry.lost.as_ref().is_none_or(|lost| lost.at <= until)
    {
        entry.lost = entry.lost.take().filter(|lost| lost.not_before > Instant::now());
        if let Some(lost) = &mut entry.lost {
            lost.returns = false;
        }
        if !entry.held && entry.lost.is_none() {
            entries.remove(uri);
        }
    }
}

/// Whether writes of a lost connection may still land.
pub(super) fn check_quarantine(uri: &NbdUri) -> Result<(), RemoteError> {
    let left = lost(uri).map(|lost| lost.not_before.saturating_duration_since(Instant::now()));
    match left.filter(|left| !left.is_zero()) {
        Some(left) => Err(RemoteError::Quarantine { seconds: left.as_secs() + 1 }),
        None => Ok(()),
    }
}
