//! Notices of slots that cannot be read: one at a time is told at once, others that follow within moments together, so that a
//! client that reads on in spite of errors does not flood the log. Must not know why a slot cannot be read, nor what is listed
//! in the status.

use crate::array::{Array, ArrayAction, ArrayNotice, ClientError, NoticeKind, NoticeLevel};
use crate::units::{Count, SlotIndex, Timestamp, VolumeOffset};
use std::collections::BTreeMap;

/// Time between two notices.
const INTERVAL_NS: u64 = 10_000_000_000;

/// Slots that are told of at one time; the status lists what cannot be read of all.
const SLOTS_MAX: usize = 4096;

/// How many of them are named.
const SLOTS_NAMED: usize = 8;

/// What was told of slots that cannot be read, and what is to be told next.
#[derive(Default)]
pub(in crate::array) struct UnreadableNotices {
    /// When it was told last, and the slot that was named if it was one.
    last: Option<(Timestamp, Option<SlotIndex>)>,
    /// Slots that were met since, each with a place that it lacks.
    untold: BTreeMap<SlotIndex, VolumeOffset>,
}

impl UnreadableNotices {
    fn is_due(&self, now: Timestamp) -> bool {
        self.last.is_none_or(|(last, _)| now.nanos_since(last) >= INTERVAL_NS)
    }
}

/// Failed requests of clients are told at most this often.
const CLIENT_NOTICE_INTERVAL_NS: u64 = 10_000_000_000;

impl Array {
    /// A client's request ends in an error. Told now and then: one client that tries again and again is one event a while.
    pub fn note_client_error(
        &mut self,
        what: &'static str,
        place: Option<(VolumeOffset, u64)>,
        error: ClientError,
    ) {
        self.client_errors += 1;
        let due = self
            .last_client_notice
            .is_none_or(|last| self.core.now.nanos_since(last) >= CLIENT_NOTICE_INTERVAL_NS);
        if !due {
            self.untold_client_errors += 1;
            return;
        }
        self.last_client_notice = Some(self.core.now);
        let before = match std::mem::take(&mut self.untold_client_errors) {
            0 => String::new(),
            1 => ", as did 1 request since the last such event".to_owned(),
            more => format!(", as did {more} requests since the last such event"),
        };
        let of = place.map_or(String::new(), |(offset, len)| format!(" of {len} bytes at {}", offset.0));
        let why = match error {
            ClientError::NoSpace => format!("for lack of space{}", self.core.words_for_full()),
            _ => "in an I/O error".into(),
        };
        let text = format!("a client's {what}{of} ended {why}{before}");
        let offset = place.map(|(offset, _)| offset);
        let (kind, level) = (NoticeKind::ClientFailed, NoticeLevel::Error);
        self.core.actions.push(ArrayAction::Notice(ArrayNotice { kind, level, member: None, offset, text }));
    }

    pub(in crate::array) fn notice_unreadable(&mut self, slot: SlotIndex, offset: VolumeOffset) {
        let notices = &mut self.unreadable_notices;
        if notices.is_due(self.core.now) && notices.untold.is_empty() {
            notices.last = Some((self.core.now, Some(slot)));
            let text = format!(
                "slot {slot} cannot be read: more than {} of its chunks are missing or fail; reading what they lack gives EIO",
                self.core.map.m
            );
            self.core.notice_at(NoticeKind::BlocksUnreadable, NoticeLevel::Error, offset, text);
            return;
        }
        let is_told = notices.last.is_some_and(|(_, told)| told == Some(slot));
        if !is_told && notices.untold.len() < SLOTS_MAX {
            notices.untold.entry(slot).or_insert(offset);
        }
    }

    /// Tick: tells of the slots that were met since the last notice.
    pub(in crate::array) fn judge_unreadable_notices(&mut self) {
        if self.unreadable_notices.is_due(self.core.now) {
            self.tell_unreadable();
        }
    }

    /// Whether some block of a slot cannot be read, as far as is known.
    fn is_unreadable(&self, slot: SlotIndex) -> bool {
        let redo = self.redo();
        // Not all is listed, or which stripe was there is not known now.
        if self.damage.is_full() || !redo.is_serving() {
            return true;
        }
        let stripe = redo.stripes.stripe_at(slot);
        stripe.is_some_and(|stripe| self.damage.of_stripe(stripe).next().is_some())
    }

    /// Tells of the slots that were met since the last notice and cannot be read still, now.
    pub(in crate::array) fn tell_unreadable(&mut self) {
        let mut slots = std::mem::take(&mut self.unreadable_notices.untold);
        slots.retain(|slot, _| self.is_unreadable(*slot));
        let Some((_, &offset)) = slots.first_key_value() else { return };
        self.unreadable_notices.last = Some((self.core.now, None));
        let named: Vec<String> = slots.keys().take(SLOTS_NAMED).map(SlotIndex::to_string).collect();
        let text = format!(
            "{}{} cannot be read: {}{}; 'calpe status -v {}' lists which parts of the volume",
            if slots.len() == SLOTS_MAX { "at least " } else { "" },
            Count::of(slots.len(), "more slot"),
            named.join(", "),
            if slots.len() > SLOTS_NAMED { " and so on" } else { "" },
            self.supers.template().name
        );
        self.core.notice_at(NoticeKind::BlocksUnreadable, NoticeLevel::Error, offset, text);
    }
}
