//! Metadata pages: stripe map and checksums, their copies on the members, and the operations that hold them.
//!
//! Invariants: an operation sees only pages that it holds; a page that several operations ask for is loaded
//! once; nothing is decided about a page that cannot be read. Must not know of batches, checkpoints, passes
//! or administrators.

pub(in crate::array) mod ahead;
pub(in crate::array) mod copies;
pub(in crate::array) mod hold;
pub(in crate::array) mod patience;
pub(in crate::array) mod store;
pub(in crate::array) mod stripe_map;

use crate::array::Core;
use crate::array::base::members::Which;
use crate::block_io::DeviceId;
use crate::codec::BlockHasher;
use crate::format::{Geometry, LogKey, MapEntry, MemberSet, PageIndex};
use crate::units::{
    BlockHash, ByteOffset, ColumnIndex, MemberIndex, ROW_BYTES, SlotIndex, StripeIndex, Timestamp,
};
use ahead::Ahead;
use calpe_view::View;
use hold::{Arrival, PageTask};
use patience::UnreadablePages;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use store::PageStore;
use stripe_map::StripeMap;
use uuid::Uuid;

/// Pages whose writes are encoded at one time.
const PAGES_AT_ONCE: usize = 8;

/// See the head of this file.
pub(in crate::array) struct Pages {
    store: PageStore,
    stripes: StripeMap,
    /// Checksums of blocks, if the array has any.
    checksums: Option<BlockHasher>,
    /// Where the pages region of every member starts.
    offset: ByteOffset,
    /// Pages that were loaded for operations which have not seen them yet.
    arrivals: Vec<Arrival>,
    /// Pages that cannot be read for now.
    unreadable: UnreadablePages,
    /// Operations that wait for pages, by the ticket of their hold; see `hold.rs`.
    tickets: HashMap<usize, usize>,
    next_ticket: usize,
    /// I/O for devices that left service before it was sent.
    gone: VecDeque<PageTask>,
    /// Pages that are loaded before they are needed, and how often the cache had a page.
    ahead: Ahead,
}

impl Pages {
    /// An empty cache. It keeps at most `cache_pages_max` pages of hashes, unless more are in use.
    pub(in crate::array) fn new(
        geometry: Geometry,
        checksums: Option<BlockHasher>,
        key: LogKey,
        array: Uuid,
        cache_pages_max: usize,
        offset: ByteOffset,
    ) -> Pages {
        Pages {
            store: PageStore::new(geometry, checksums.is_some(), key, array, cache_pages_max),
            stripes: StripeMap::default(),
            checksums,
            offset,
            arrivals: Vec::new(),
            unreadable: UnreadablePages::default(),
            tickets: HashMap::new(),
            next_ticket: 0,
            gone: VecDeque::new(),
            ahead: Ahead::default(),
        }
    }

    /// The page store, for reading.
    pub(in crate::array) fn store(&self) -> &PageStore {
        &self.store
    }

    /// Which stripe is in which slot, for reading.
    pub(in crate::array) fn stripes(&self) -> &StripeMap {
        &self.stripes
    }

    /// The page store for a replay, which loads and changes pages while no other operation does.
    pub(in crate::array) fn store_for_replay(&mut self) -> &mut PageStore {
        &mut self.store
    }

    /// What readers on other threads see.
    pub(in crate::array) fn view(&self) -> &Arc<View> {
        self.store.view()
    }

    /// Goes on with the view of pages that these replace. It shows nothing any more.
    pub(in crate::array) fn take_over_view(&mut self, other: &mut Pages) {
        self.store.take_over_view(&mut other.store);
    }

    /// Shows readers on other threads that a slot has images that are not in place, or has none any more.
    pub(in crate::array) fn show_images(&mut self, slot: SlotIndex, has_images: bool) {
        self.store.publisher().set_images(slot.0, has_images);
    }

    /// Shows readers on other threads the device that serves each member.
    pub(in crate::array) fn show_members(&mut self, devices: impl Iterator<Item = Option<DeviceId>>) {
        self.store.publisher().set_members(devices.map(|device| device.map(|device| device.0)));
    }

    /// Lets readers on other threads read, or sends them all here.
    pub(in crate::array) fn serve_elsewhere(&mut self, is_open: bool) {
        self.store.publisher().serve(is_open);
    }

    /// Takes over the map of stripes that a replay has found.
    pub(in crate::array) fn replayed(&mut self, stripes: StripeMap) {
        self.stripes = stripes;
    }

    /// Checksums of blocks, if the array has any.
    pub(in crate::array) fn checksums(&self) -> Option<BlockHasher> {
        self.checksums
    }

    /// The hasher of the blocks that go into the log.
    pub(in crate::array) fn log_hasher(&self) -> BlockHasher {
        self.checksums.unwrap_or(BlockHasher::Crc32c)
    }

    /// Where the pages region starts in a member.
    pub(in crate::array) fn offset(&self) -> ByteOffset {
        self.offset
    }

    /// The pages with the hashes of these rows; none where there are no checksums.
    pub(in crate::array) fn hash_pages(&self, slot: SlotIndex, rows: Range<usize>) -> Range<u64> {
        if self.checksums.is_some() { self.store.layout().hash_pages(slot, rows) } else { 0..0 }
    }

    /// The expected hash of the block; none where the array has no checksums.
    pub(in crate::array) fn block_hash(
        &self,
        slot: SlotIndex,
        row: usize,
        column: usize,
    ) -> Option<BlockHash> {
        self.checksums.map(|_| self.store.hash(slot, row, ColumnIndex(column as u16)))
    }

    /// Whether bytes read from a member match their checksum.
    pub(in crate::array) fn verifies(
        &self,
        slot: SlotIndex,
        row: usize,
        column: usize,
        bytes: &[u8],
    ) -> bool {
        self.checksums
            .is_none_or(|hasher| hasher.hash(bytes) == self.store.hash(slot, row, ColumnIndex(column as u16)))
    }

    /// Which of the blocks of a column, from this row on, match their checksums.
    pub(in crate::array) fn verify_blocks(
        &self,
        slot: SlotIndex,
        row: usize,
        column: usize,
        bytes: &[u8],
    ) -> Vec<bool> {
        let Some(hasher) = self.checksums else { return vec![true; bytes.len() / ROW_BYTES as usize] };
        let mut hashes = Vec::with_capacity(bytes.len() / ROW_BYTES as usize);
        hasher.hash_blocks(bytes, &mut hashes);
        let wanted = self.store.hashes(slot, row..row + hashes.len(), ColumnIndex(column as u16));
        wanted.zip(hashes).map(|(wanted, hash)| wanted == hash).collect()
    }

    /// Sets the entries of blocks, where the array has checksums.
    pub(in crate::array) fn set_hashes(
        &mut self,
        slot: SlotIndex,
        rows: Range<usize>,
        columns: impl ExactSizeIterator<Item = ColumnIndex> + Clone,
        hashes: &[BlockHash],
    ) {
        if self.checksums.is_some() {
            self.store.set_hashes(slot, rows, columns, hashes);
        }
    }

    /// Records that no block of the slot was written, where the array has checksums.
    pub(in crate::array) fn clear_slot(&mut self, slot: SlotIndex) {
        if self.checksums.is_some() {
            self.store.clear_slot(slot);
        }
    }

    /// The stripe map's entry of a stripe.
    pub(in crate::array) fn map_entry(&self, stripe: StripeIndex) -> MapEntry {
        self.store.map_entry(stripe)
    }

    /// Changes the map entry of a stripe that stays where it is.
    pub(in crate::array) fn set_map_entry(&mut self, stripe: StripeIndex, entry: MapEntry) {
        // Most writes in place change nothing here, and an unchanged page need not be written.
        if self.store.map_entry(stripe) != entry {
            self.store.set_map_entry(stripe, entry);
        }
    }

    /// Whether a stripe holds data; otherwise it reads as zeroes.
    pub(in crate::array) fn holds_data(&self, stripe: StripeIndex) -> bool {
        self.map_entry(stripe).holds_data
    }

    /// See [`StripeMap::take_free`].
    pub(in crate::array) fn take_free_slot(&mut self) -> Option<SlotIndex> {
        self.stripes.take_free()
    }

    /// See [`StripeMap::give_back`].
    pub(in crate::array) fn give_back_slot(&mut self, slot: SlotIndex) {
        self.stripes.give_back(slot);
    }

    /// See [`StripeMap::free`].
    pub(in crate::array) fn free_slot(&mut self, slot: SlotIndex) {
        self.stripes.free(slot);
    }

    /// See [`StripeMap::moved`].
    pub(in crate::array) fn move_stripe(
        &mut self,
        stripe: StripeIndex,
        slot: SlotIndex,
        epoch: u64,
    ) -> SlotIndex {
        self.stripes.moved(&mut self.store, stripe, slot, epoch)
    }

    /// See [`PageStore::freeze`].
    pub(in crate::array) fn freeze(&mut self, epoch: u64) {
        self.store.freeze(epoch);
    }

    /// Sends writes of frozen pages to every device in service or being built, while fewer than
    /// `in_flight_max` are under way.
    pub(in crate::array) fn write_back(&mut self, core: &mut Core, in_flight_max: usize) {
        if self.store.writes_pending() >= in_flight_max || self.store.all_sent() {
            return;
        }
        let (mut primaries, mut replacements) = (MemberSet::new(), MemberSet::new());
        for (member, which, _) in core.devices() {
            match which {
                Which::Primary => primaries.insert(member),
                Which::Replacement => replacements.insert(member),
            };
        }
        let targets = |member, which| match which {
            Which::Primary => primaries.contains(member),
            Which::Replacement => replacements.contains(member),
        };
        let pool = core.pool.clone();
        while self.store.writes_pending() < in_flight_max {
            let mut io = Vec::new();
            self.store.frozen_writes(PAGES_AT_ONCE, &targets, &pool, &mut io);
            if io.is_empty() && self.store.all_sent() {
                return;
            }
            self.send(core, io);
        }
    }

    /// See [`PageStore::thaw`].
    pub(in crate::array) fn thaw(&mut self) {
        self.store.thaw();
        self.store.show_late();
    }

    /// Records that a member is out of service.
    pub(in crate::array) fn left(&mut self, member: MemberIndex) {
        self.store.left(member);
    }

    /// Records that the device that was being built to replace a member is given up.
    pub(in crate::array) fn given_up(&mut self, member: MemberIndex) {
        self.store.given_up(member);
    }

    /// Records that a device that was built for a member is in service. Pages that were given up are looked
    /// at again, since there are new copies.
    pub(in crate::array) fn joined(&mut self, member: MemberIndex, which: Which, now: Timestamp) {
        self.store.joined(member, which);
        self.unreadable.look_soon(now);
    }

    /// See [`PageStore::rebuild`].
    pub(in crate::array) fn rebuild(&mut self, page: PageIndex, member: MemberIndex, which: Which) {
        self.store.rebuild(page, member, which);
    }

    /// See [`PageStore::void`].
    pub(in crate::array) fn void(&mut self, page: PageIndex, member: MemberIndex, which: Which) {
        self.store.void(page, member, which);
    }

    /// See [`PageStore::leave_alone`].
    pub(in crate::array) fn leave_alone(&mut self, page: PageIndex, member: MemberIndex) {
        self.store.leave_alone(page, member);
    }

    /// See [`PageStore::offer`].
    pub(in crate::array) fn offer(
        &mut self,
        page: PageIndex,
        member: MemberIndex,
        since: u64,
        places: [Option<&[u8]>; 2],
    ) -> bool {
        self.store.offer(page, member, since, places)
    }
}
