//! The arrays that are awaited, and those that commands have exported: what is known of each, and whether it
//! is still to be served.
//!
//! Invariant: an attempt that has its devices open serves its array before the array is given up,
//! or not at all. Must not know how arrays are opened, or when they are tried.

use super::memory::Memory;
use super::waiting::{NotServed, Waiting};
use crate::daemon::config::ArrayChoice;
use crate::daemon::devices::search::Search;
use crate::daemon::events::{EventLog, News, kinds};
use crate::daemon::ranked::{Held, Ranked, lock};
use calpe_core::volume::NoticeLevel;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;
use uuid::Uuid;

/// An array in service: its name, its identity, and where its devices are.
pub(crate) type InService = (String, Uuid, Vec<PathBuf>);

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    /// Read while an awaited array begins to be served, written while one is given up. Of rank 0: taken
    /// before all others.
    giving_up: RwLock<()>,
    waiting: Ranked<Vec<Waiting>, 4>,
    /// Names of arrays that a command has exported, and when.
    exported: Ranked<BTreeMap<Uuid, (String, Instant)>, 11>,
}

impl Awaited {
    /// Begins to await an array: it is part of the status from now on, even while nothing of it is known.
    /// Does nothing for one that is awaited already.
    pub(crate) fn await_array(&self, mut waiting: Waiting, memory: &Memory) {
        let (earlier, remembered) = memory.known_as(&waiting.which().to_string());
        waiting.recall(earlier, remembered);
        let mut all = lock(&self.waiting);
        if !all.iter().any(|known| known.which() == waiting.which()) {
            all.push(waiting);
        }
    }

    /// Records a failed attempt to serve an awaited array, with the members that it lacks. An event reports
    /// it if its problem is new.
    pub(crate) fn still_awaited(
        &self,
        which: &ArrayChoice,
        (found, problem): (&Search, NotServed),
        memory: &Memory,
        events: &EventLog,
    ) {
        let (told, lacks) = {
            let mut all = lock(&self.waiting);
            let Some(waiting) = all.iter_mut().find(|waiting| waiting.which() == which) else { return };
            let is_new = waiting.note(found, problem);
            let lacks =
                waiting.has_lacked().then(|| (waiting.name(), waiting.uuid(), waiting.missing_devices()));
            let told = is_new.then(|| {
                let names = (waiting.name(), waiting.uuid());
                (names, waiting.problem().unwrap_or_default(), waiting.notes().to_vec())
            });
            (told, lacks)
        };
        if let Some((name, uuid, missing)) = lacks {
            memory.remember_lack(&name, uuid, &missing);
        }
        if let Some(((name, uuid), problem, notes)) = told {
            let notes = notes.iter().map(|line| format!("\n{line}")).collect::<String>();
            let text = format!("cannot import it: {problem}; it is tried again{notes}");
            let news = News::new(Some(&name), kinds::IMPORT_FAILED, NoticeLevel::Error, text);
            // Another array of the same name may be in service, so the event carries the uuid.
            events.tell(News { uuid: Some(uuid), ..news });
        }
    }

    /// Stops awaiting an array: it is in service, or need not be.
    pub(crate) fn not_awaited(&self, which: &ArrayChoice) {
        lock(&self.waiting).retain(|waiting| waiting.which() != which);
    }

    /// Gives an array up. An attempt that has its devices open serves it before this, or not at all. Returns
    /// whether it was still awaited.
    pub(crate) fn give_up(&self, which: &ArrayChoice) -> bool {
        let _nothing_begins = self.keep_from_serving();
        let was_awaited = self.is_awaited(which);
        self.not_awaited(which);
        was_awaited
    }

    /// Records that a command takes an array out of service: no awaited section brings it back, however its
    /// members' paths are spelled there.
    pub(crate) fn note_exported(&self, name: &str, uuid: Uuid) {
        lock(&self.exported).insert(uuid, (name.to_owned(), Instant::now()));
    }

    /// Whether a command has exported the array after `which` began to be awaited.
    pub(crate) fn was_exported(&self, which: &ArrayChoice, uuid: Uuid) -> bool {
        let since = self.about(which, Waiting::since);
        let exported = lock(&self.exported).get(&uuid).map(|(_, at)| *at);
        since.zip(exported).is_some_and(|(since, exported)| since <= exported)
    }

    /// Whether the awaited array is known to be another one of this name.
    pub(crate) fn is_another(&self, which: &ArrayChoice, uuid: Uuid) -> bool {
        self.about(which, |waiting| waiting.is_another(uuid)).unwrap_or(false)
    }

    /// Records that an array is served from devices at these paths: awaited arrays that it may be are no
    /// longer awaited.
    pub(crate) fn now_served(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) {
        lock(&self.waiting).retain(|waiting| !waiting.is_met_by(name, uuid, paths));
    }

    /// Whether an attempt to serve this array has failed for lack of members while it was awaited.
    pub(crate) fn lacked_members(&self, name: &str, uuid: Uuid, paths: &[PathBuf]) -> bool {
        let waiting = lock(&self.waiting);
        waiting.iter().any(|waiting| waiting.is_met_by(name, uuid, paths) && waiting.has_lacked())
    }

    /// Former places of devices that an awaited array may have. An array that was served under its name since
    /// is another one.
    pub(crate) fn remembered_paths(&self, which: &ArrayChoice) -> Vec<PathBuf> {
        self.about(which, |waiting| waiting.remembered().to_vec()).unwrap_or_default()
    }

    /// Whether the first attempt to serve an awaited array has not ended.
    pub(crate) fn is_untried(&self, which: &ArrayChoice) -> bool {
        self.about(which, Waiting::is_untried).unwrap_or(false)
    }

    /// Whether an array is to be served and is not.
    pub(crate) fn is_awaited(&self, which: &ArrayChoice) -> bool {
        self.about(which, |_| ()).is_some()
    }

    /// The awaited arrays that a status lists, beside those in service. An array that a command has imported
    /// meanwhile is left out. So is an array of which only the name is known while an array of that name is
    /// in service, because it may be that one; once that is exported, it is listed again after the next
    /// attempt.
    pub(crate) fn told(&self, served: &[InService]) -> Vec<Waiting> {
        let is_served = |waiting: &Waiting| {
            served.iter().any(|(name, uuid, paths)| waiting.may_be_met_by(name, *uuid, paths))
        };
        let waiting = lock(&self.waiting);
        let exported = lock(&self.exported);
        let may_be_exported = |waiting: &Waiting| {
            exported.iter().any(|(uuid, (name, at))| waiting.may_be_exported(name, *uuid, *at))
        };
        let is_told = |waiting: &&Waiting| !is_served(waiting) && !may_be_exported(waiting);
        waiting.iter().filter(is_told).cloned().collect()
    }

    /// The awaited array of that name or uuid, among those that a status lists.
    pub(crate) fn find(&self, array: &str, served: &[InService]) -> Option<Waiting> {
        let by_uuid = array.parse::<Uuid>().ok();
        let is_it = |waiting: &Waiting| waiting.name() == array || by_uuid == Some(waiting.uuid());
        let mut told = self.told(served).into_iter();
        told.find(|waiting| is_it(waiting) || waiting.which().to_string() == array)
    }

    /// No awaited array is given up while the guard lives.
    pub(crate) fn keep_awaiting(&self) -> (RwLockReadGuard<'_, ()>, Held) {
        let held = Held::new(0);
        (self.giving_up.read().unwrap_or_else(PoisonError::into_inner), held)
    }

    /// No awaited array begins to be served while the guard lives.
    fn keep_from_serving(&self) -> (RwLockWriteGuard<'_, ()>, Held) {
        let held = Held::new(0);
        (self.giving_up.write().unwrap_or_else(PoisonError::into_inner), held)
    }

    fn about<T>(&self, which: &ArrayChoice, take: impl FnOnce(&Waiting) -> T) -> Option<T> {
        lock(&self.waiting).iter().find(|waiting| waiting.which() == which).map(take)
    }
}
