//! Notices of failed requests, and of slots that cannot be read. The first is reported at once; those that
//! follow within moments are reported together, so that a client that goes on reading in spite of errors does
//! not flood the log. Must not know why a slot cannot be read, nor what is listed in the status.

use crate::array::blocks::Missing;
use crate::array::{Array, ArrayAction, ArrayNotice, ClientError, Core, NoticeKind, NoticeLevel};
use crate::units::{Count, ROW_BYTES, SlotIndex, StripeIndex, Timestamp, VolumeOffset};
use std::collections::BTreeMap;

/// Time between two notices.
const INTERVAL_NS: u64 = 10_000_000_000;

/// Most slots that are kept for one notice; the status lists everything that cannot be read.
const SLOTS_MAX: usize = 4096;

/// How many of them are named.
const SLOTS_NAMED: usize = 8;

/// What was reported of clients' failed requests and of slots that cannot be read, and what is to be reported
/// next.
#[derive(Default)]
pub(in crate::array) struct ClientNotices {
    /// Failed requests.
    errors: u64,
    /// When one was reported last, and how many have failed since.
    last_error: Option<Timestamp>,
    untold_errors: u64,
    /// When a slot was reported last, and which, if it was a single one.
    last_slot: Option<(Timestamp, Option<SlotIndex>)>,
    /// Slots met since then that cannot be read, each with a place that it lacks.
    untold_slots: BTreeMap<SlotIndex, VolumeOffset>,
}

impl ClientNotices {
    /// Failed requests so far.
    pub(in crate::array) fn errors(&self) -> u64 {
        self.errors
    }

    /// Counts an error that clients will get.
    pub(in crate::array) fn count_error(&mut self) {
        self.errors += 1;
    }

    /// Sets the count back to zero.
    pub(in crate::array) fn forget_errors(&mut self) {
        self.errors = 0;
    }

    fn is_due(&self, now: Timestamp) -> bool {
        self.last_slot.is_none_or(|(last, _)| now.nanos_since(last) >= INTERVAL_NS)
    }

    /// Records that a request of a client ends in an error. Reported now and then: one client that tries
    /// again and again makes one event each interval.
    fn note_error(
        &mut self,
        core: &mut Core,
        what: &'static str,
        place: Option<(VolumeOffset, u64)>,
        error: ClientError,
    ) {
        self.errors += 1;
        let due = self.last_error.is_none_or(|last| core.now.nanos_since(last) >= CLIENT_NOTICE_INTERVAL_NS);
        if !due {
            self.untold_errors += 1;
            return;
        }
        self.last_error = Some(core.now);
        let before = match std::mem::take(&mut self.untold_errors) {
            0 => String::new(),
            1 => ", as did 1 request since the last such event".to_owned(),
            more => format!(", as did {more} requests since the last such event"),
        };
        let of = place.map_or(String::new(), |(offset, len)| format!(" of {len} bytes at {}", offset.0));
        let why = match error {
            ClientError::NoSpace => format!("for lack of space{}", core.words_for_full()),
            _ => "in an I/O error".into(),
        };
        let text = format!("a client's {what}{of} ended {why}{before}");
        let offset = place.map(|(offset, _)| offset);
        let (kind, level) = (NoticeKind::ClientFailed, NoticeLevel::Error);
        core.actions.push(ArrayAction::Notice(ArrayNotice { kind, level, member: None, offset, text }));
    }

    /// Records that a slot was met that cannot be read.
    pub(in crate::array) fn note_unreadable(
        &mut self,
        core: &mut Core,
        slot: SlotIndex,
        offset: VolumeOffset,
    ) {
        if self.is_due(core.now) && self.untold_slots.is_empty() {
            self.last_slot = Some((core.now, Some(slot)));
            let text = format!(
                "slot {slot} cannot be read: more than {} of its chunks are missing or fail; reading what they lack gives EIO",
                core.map.m
            );
            core.notice_at(NoticeKind::BlocksUnreadable, NoticeLevel::Error, offset, text);
            return;
        }
        let is_told = self.last_slot.is_some_and(|(_, told)| told == Some(slot));
        if !is_told && self.untold_slots.len() < SLOTS_MAX {
            self.untold_slots.entry(slot).or_insert(offset);
        }
    }
}

/// Shortest time between two notices of failed requests.
const CLIENT_NOTICE_INTERVAL_NS: u64 = 10_000_000_000;

impl Array {
    /// Counts an error that ends a client's request, and reports it now and then.
    pub fn note_client_error(
        &mut self,
        what: &'static str,
        place: Option<(VolumeOffset, u64)>,
        error: ClientError,
    ) {
        self.client_notices.note_error(&mut self.core, what, place, error);
    }

    pub(in crate::array) fn notice_unreadable(&mut self, slot: SlotIndex, offset: VolumeOffset) {
        self.client_notices.note_unreadable(&mut self.core, slot, offset);
    }

    /// Reports blocks that cannot be had to the operator, and keeps them for the status.
    pub(in crate::array) fn note_missing(
        &mut self,
        stripe: StripeIndex,
        slot: SlotIndex,
        missing: &[Missing],
    ) {
        self.damage.note(stripe, missing);
        self.notice_unreadable(slot, self.core.offset_of(stripe, missing));
    }

    /// Tick: reports the slots that were met since the last notice.
    pub(in crate::array) fn judge_unreadable_notices(&mut self) {
        if self.client_notices.is_due(self.core.now) {
            self.tell_unreadable();
        }
    }

    /// Whether some block of a slot cannot be read, as far as is known.
    fn is_unreadable(&self, slot: SlotIndex) -> bool {
        // The list is not complete, or the stripe that was there is not known now.
        if self.damage.is_full() || !self.redo.is_serving() {
            return true;
        }
        let stripe = self.pages.stripes().stripe_at(slot);
        stripe.is_some_and(|stripe| self.damage.of_stripe(stripe).next().is_some())
    }

    /// Reports, now, the slots that were met since the last notice and still cannot be read.
    pub(in crate::array) fn tell_unreadable(&mut self) {
        let mut slots = std::mem::take(&mut self.client_notices.untold_slots);
        slots.retain(|slot, _| self.is_unreadable(*slot));
        let Some((_, &offset)) = slots.first_key_value() else { return };
        self.client_notices.last_slot = Some((self.core.now, None));
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

impl Core {
    /// Offset in the volume of the first of these blocks of a stripe. Blocks of parity count as the start of
    /// the stripe.
    pub(in crate::array) fn offset_of(&self, stripe: StripeIndex, missing: &[Missing]) -> VolumeOffset {
        let data = missing.iter().filter(|block| block.column < self.map.k);
        let within = data.map(|block| block.column * self.map.chunk + block.row * ROW_BYTES as usize).min();
        VolumeOffset(stripe.0 * self.map.stripe_bytes() as u64 + within.unwrap_or(0) as u64)
    }
}
