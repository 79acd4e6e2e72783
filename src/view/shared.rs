//! The memory that the publisher and the readers share, and what its words mean.
//!
//! Must not know the order in which they are read or written: see `look.rs` and `publish.rs`.

use crate::atomics::{AtomicU64, zeroes};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, SeqCst};

/// How much a view can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Stripes of the array.
    pub stripes: u64,
    /// Slots that these may be in.
    pub slots: u64,
    /// Pages of hashes that exist; 0 for an array without.
    pub pages: u64,
    /// Pages of hashes that are shown at a time, at most.
    pub frames: u32,
    /// Entries of a page.
    pub entries: u32,
    /// Members of the array.
    pub members: u16,
}

/// Most words for generations of slots: 8 MiB. With more slots several share a word, at the cost of more
/// questions to the owner: a slot with images hides those that share its word.
const GENERATIONS_MAX: u64 = 1 << 20;

/// Of the word of a page, which is 0 while readers have to ask for it: it is not in memory, and the other
/// bits are the owner's name for its newest version and for where that is on the members. Without this bit
/// the word is the frame that shows the page + 1.
pub(crate) const ON_MEMBERS: u64 = 1 << 63;

/// Words of a frame before its hashes: its sequence, which is odd while it changes, and its page + 1.
const FRAME_HEAD: usize = 2;
/// Words of a cache line, to which frames are rounded up.
const LINE_WORDS: usize = 8;

/// Of the word of a stripe, which is 0 while the stripe is not shown: it holds data.
const HOLDS_DATA: u64 = 1;
/// Of the same: readers always ask the owner.
const OWNER_ONLY: u64 = 2;
/// Above these bits: the slot + 1.
const SLOT_SHIFT: u32 = 2;

/// Of the word of a slot: it is being changed.
pub(crate) const BUSY: u64 = 1;
/// Of the same: one slot of this word has images. The count of them goes up to the generation.
pub(crate) const IMAGES: u64 = 2;
/// Above the count: the generation. 2^40 changes do not happen during a look-up.
pub(crate) const GENERATION: u64 = 1 << 24;

/// Of the word of service: nothing may be read here. The rest counts changes.
pub(crate) const CLOSED: u64 = 1;

/// See the head of the crate.
#[derive(Debug)]
pub struct View {
    pub(crate) size: Size,
    pub(crate) service: AtomicU64,
    orphans: AtomicU64,
    pub(crate) map: Box<[AtomicU64]>,
    pub(crate) slots: Box<[AtomicU64]>,
    /// For each page where its hashes are; see [`ON_MEMBERS`].
    pub(crate) pages: Box<[AtomicU64]>,
    pub(crate) frames: Box<[AtomicU64]>,
    /// For each member the device that serves it + 1, or 0.
    pub(crate) members: Box<[AtomicU64]>,
}

/// A request of a client that is gone, still under way to the owner: nothing is read here while one exists.
#[derive(Debug)]
pub struct Orphan(Arc<View>);

impl Size {
    /// Bytes of memory that the view takes once all of it was used.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let words = [self.stripes, self.generations(), self.pages, u64::from(self.members)];
        let words = words.into_iter().fold(0, u64::saturating_add).saturating_mul(8);
        let frames = u64::from(self.frames).saturating_mul(self.frame_bytes());
        words.saturating_add(frames)
    }

    /// Bytes of each page that is shown.
    #[must_use]
    pub fn frame_bytes(&self) -> u64 {
        self.frame_words() as u64 * 8
    }

    fn generations(&self) -> u64 {
        self.slots.min(GENERATIONS_MAX)
    }

    fn frame_words(&self) -> usize {
        (FRAME_HEAD + 2 * self.entries as usize).next_multiple_of(LINE_WORDS)
    }
}

impl View {
    /// Memory for all of `size`, in which nothing is shown and the service is closed.
    pub(crate) fn new(size: Size) -> View {
        let len = |count: u64| usize::try_from(count).expect("what is shown fits memory");
        let frames = if size.pages == 0 { 0 } else { size.frames as usize };
        View {
            size,
            service: AtomicU64::new(CLOSED),
            orphans: AtomicU64::new(0),
            map: zeroes(len(size.stripes)),
            slots: zeroes(len(size.generations())),
            pages: zeroes(len(size.pages)),
            frames: zeroes(frames * size.frame_words()),
            members: zeroes(usize::from(size.members)),
        }
    }

    /// Has all reads go to the owner until what is returned is dropped.
    #[must_use]
    pub fn orphan(self: &Arc<View>) -> Orphan {
        self.orphans.fetch_add(1, SeqCst);
        Orphan(Arc::clone(self))
    }

    /// Whether a request of a client that is gone is under way.
    pub(crate) fn has_orphans(&self) -> bool {
        self.orphans.load(SeqCst) > 0
    }

    /// The word of a slot's generation.
    pub(crate) fn slot(&self, slot: u64) -> &AtomicU64 {
        &self.slots[self.slot_at(slot)]
    }

    /// Which word that is.
    pub(crate) fn slot_at(&self, slot: u64) -> usize {
        (slot % self.slots.len() as u64) as usize
    }

    /// The words of a frame.
    pub(crate) fn frame(&self, frame: u32) -> Frame<'_> {
        let words = self.size.frame_words();
        let start = frame as usize * words;
        Frame(&self.frames[start..start + words])
    }

    /// The frame that shows a page.
    pub(crate) fn frame_of(&self, page: u64) -> Option<u32> {
        let word = self.pages[page as usize].load(Acquire);
        if word & ON_MEMBERS == 0 { Some(word.checked_sub(1)? as u32) } else { None }
    }

    /// The owner's name for the newest version of a page that is not in memory.
    pub(crate) fn on_members(&self, page: u64) -> Option<u64> {
        let word = self.pages[page as usize].load(Acquire);
        (word & ON_MEMBERS != 0).then_some(word)
    }

    /// Pages of hashes that are shown at a time, at most.
    #[must_use]
    pub fn frames(&self) -> u32 {
        self.size.frames
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.0.orphans.fetch_sub(1, SeqCst);
    }
}

/// The words of a frame.
pub(crate) struct Frame<'a>(&'a [AtomicU64]);

impl<'a> Frame<'a> {
    pub(crate) fn sequence(&self) -> &AtomicU64 {
        &self.0[0]
    }

    /// The page that it shows + 1, or 0.
    pub(crate) fn page(&self) -> &AtomicU64 {
        &self.0[1]
    }

    pub(crate) fn entry(&self, entry: usize) -> [&'a AtomicU64; 2] {
        let at = FRAME_HEAD + 2 * entry;
        [&self.0[at], &self.0[at + 1]]
    }
}

/// The word of a stripe in this slot.
pub(crate) fn map_word(slot: u64, holds_data: bool, owner_only: bool) -> u64 {
    let bits = (u64::from(holds_data) * HOLDS_DATA) | (u64::from(owner_only) * OWNER_ONLY);
    ((slot + 1) << SLOT_SHIFT) | bits
}

/// The slot that the word of a stripe names, if it names one.
pub(crate) fn slot_of(word: u64) -> Option<u64> {
    (word >> SLOT_SHIFT).checked_sub(1)
}

/// The same, if readers may read it.
pub(crate) fn readable_slot(word: u64) -> Option<u64> {
    slot_of(word).filter(|_| word & (HOLDS_DATA | OWNER_ONLY) == HOLDS_DATA)
}
