//! The audit of a running volume: what it keeps in memory and on its pages, compared with what follows from
//! its maps. The oracle of the simulator.

use super::ledger::audit;
use super::place::PageAccess;
use super::{CasVolume, Stage};
use crate::format::cas::{PageName, SegmentEntry, SegmentIndex};
use std::collections::BTreeSet;

impl CasVolume {
    /// What the volume says of itself that is not so. None while something is under way: pages are read for
    /// the audit, which needs all of them in memory.
    pub fn audit(&mut self) -> Option<Vec<String>> {
        if !self.is_quiet() {
            return None;
        }
        let absent: Vec<PageName> = self.store.pages.absent();
        if !absent.is_empty() {
            absent.into_iter().for_each(|name| self.load_page(name));
            return None;
        }
        let (pages, ledger) = (&self.store.pages, &self.store.ledger);
        let page = |name: PageName| pages.page(name);
        let differences = audit(&ledger.bounds(), ledger.next_number(), page, &pages.map_numbers());
        let mut found: Vec<String> = differences.iter().map(ToString::to_string).collect();
        self.audit_segments(&mut found);
        self.audit_work(&mut found);
        Some(found)
    }

    /// Whether nothing is under way.
    fn is_quiet(&self) -> bool {
        matches!(self.stage, Stage::Serving)
            && self.work.requests.is_empty()
            && self.work.ready.is_empty()
            && self.work.retries.is_empty()
            && self.store.journal.is_idle()
            && self.store.journal.is_open_empty()
            && self.checkpoint.is_idle()
            && self.compaction.is_idle()
            && self.io.purposes.is_empty()
    }

    fn audit_segments(&self, found: &mut Vec<String>) {
        let store = &self.store;
        let metadata = store.pages.metadata_segments();
        if metadata != store.segments.pages() {
            found.push(format!("pages lie in {metadata:?}, and {:?} are counted", store.segments.pages()));
        }
        let (mut live, mut free) = (0, BTreeSet::new());
        for segment in (0..self.facts.segments).map(SegmentIndex) {
            let entry = store.segment(segment);
            live += u64::from(entry.live.get()) / 256;
            match (entry.kind, metadata.contains_key(&segment)) {
                (SegmentEntry::FREE, false) => drop(free.insert(segment)),
                (SegmentEntry::FREE, true) => {}
                (kind, true) => found.push(format!("segment {} has pages and kind {kind}", segment.0)),
                (_, false) if store.is_unused(segment) && store.segments.free() > 1 => {
                    found.push(format!("segment {} holds nothing and is not given up", segment.0));
                }
                (_, false) => {}
            }
        }
        if free != *store.segments.free_ones() {
            found.push(format!("{free:?} are free, and {:?} count as free", store.segments.free_ones()));
        }
        if live != store.live {
            found.push(format!("{live} chunks are live, not {}", store.live));
        }
    }

    /// Without requests, nothing is kept for any.
    fn audit_work(&self, found: &mut Vec<String>) {
        let work = &self.work;
        let left = [
            ("operations", work.ops.len()),
            ("chunks without a place", work.pending.len()),
            ("hashes of such chunks", work.placing.len()),
            ("segments being filled", work.filling.len()),
            ("operations without space", work.starved.len()),
            ("locked ranges", work.locks.len()),
            ("reserved ids", self.store.ids.reserved()),
            ("held segments", self.store.segments.held()),
        ];
        for (what, count) in left.into_iter().filter(|(_, count)| *count > 0) {
            found.push(format!("{count} {what} are left"));
        }
    }
}
