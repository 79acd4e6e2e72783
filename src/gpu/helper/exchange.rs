//! The memory through which a daemon and a helper exchange batches: two rings of words, and for each slot
//! its parcel, its digests, and its data (outputs, then inputs that lie in no other shared memory).
//!
//! Invariants: all that is read here is copied out before anybody looks at it, since the other side may
//! write at any time; no offset here comes from the other side. Must not know what the bytes mean.
#![allow(unsafe_code)] // memory that another process writes; each block argues for itself

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use calpe_core::block_io::{Access, Pool, SharedMemory};

use super::parcel;
use super::ring::{PLACES, Ring};
use crate::device::Digest;

const PAGE: usize = 4096;

/// Where the rings begin, each a count on a cache line of its own and then its places.
const ORDERS: usize = 0;
const ANSWERS: usize = 1024;
const PLACES_AFTER: usize = 64;

/// How many slots there are, and how large they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Layout {
    pub(super) slots: usize,
    /// Bytes of data of each slot.
    pub(super) slot_bytes: usize,
}

impl Layout {
    fn parcel_bytes(self) -> usize {
        (size_of::<u64>() + parcel::bytes_max(self.slot_bytes)).next_multiple_of(PAGE)
    }

    fn digests_bytes(self) -> usize {
        (self.slot_bytes / PAGE * size_of::<Digest>()).next_multiple_of(PAGE)
    }

    fn parcel(self, slot: usize) -> usize {
        assert!(slot < self.slots, "slot {slot} of {}", self.slots);
        PAGE + slot * (self.parcel_bytes() + self.digests_bytes() + self.slot_bytes)
    }

    fn digests(self, slot: usize) -> usize {
        self.parcel(slot) + self.parcel_bytes()
    }

    /// Where the data of a slot begins.
    pub(super) fn data(self, slot: usize) -> usize {
        self.digests(slot) + self.digests_bytes()
    }

    /// Bytes of all.
    pub(super) fn bytes(self) -> usize {
        self.data(self.slots - 1) + self.slot_bytes
    }

    /// Whether it is one that this program makes.
    pub(super) fn is_sound(self) -> bool {
        (1..=PLACES).contains(&self.slots) && (PAGE..=1 << 30).contains(&self.slot_bytes)
    }
}

/// See the module's head.
pub(super) struct Exchange {
    layout: Layout,
    /// So that a device can be told of it.
    pool: Pool,
}

impl Exchange {
    /// Fresh memory, all zero.
    pub(super) fn create(layout: Layout) -> io::Result<Exchange> {
        let memory = SharedMemory::create(c"calpe-gpu", layout.bytes().next_multiple_of(PAGE))?;
        Ok(Exchange { layout, pool: Pool::of_another(memory) })
    }

    /// The memory that the daemon has made.
    pub(super) fn map(file: OwnedFd, layout: Layout) -> io::Result<Exchange> {
        if !layout.is_sound() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "slots that cannot be"));
        }
        let memory = SharedMemory::map(file, layout.bytes().next_multiple_of(PAGE), Access::ReadWrite)?;
        Ok(Exchange { layout, pool: Pool::of_another(memory) })
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.pool.shared_memory().expect("it is made of it").file()
    }

    /// The ring of words for the helper.
    pub(super) fn orders(&self) -> Ring<'_, AtomicU64> {
        self.ring(ORDERS)
    }

    /// The ring of words for the daemon.
    pub(super) fn answers(&self) -> Ring<'_, AtomicU64> {
        self.ring(ANSWERS)
    }

    fn ring(&self, at: usize) -> Ring<'_, AtomicU64> {
        let start = self.place(at, PLACES_AFTER + PLACES * size_of::<AtomicU64>());
        // SAFETY: mapped for as long as `self`, aligned to 64 bytes, and both processes reach these words as
        // atomics only.
        unsafe {
            let places = start.add(PLACES_AFTER).cast::<[AtomicU64; PLACES]>();
            Ring { pushed: start.cast::<AtomicU64>().as_ref(), places: places.as_ref() }
        }
    }

    /// A range of the memory, which must lie in it.
    fn place(&self, at: usize, bytes: usize) -> NonNull<u8> {
        let (start, length) = self.pool.slab();
        assert!(at <= length && bytes <= length - at, "{bytes} bytes at {at} of {length}");
        // SAFETY: inside the mapping by the assertion.
        unsafe { start.add(at) }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        let place = self.place(at, bytes.len());
        // SAFETY: both are as long, and the mapping is no memory of Rust's that a slice could lie in.
        unsafe { place.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn get(&self, at: usize, bytes: usize) -> Vec<u8> {
        let (place, mut copy) = (self.place(at, bytes), Vec::with_capacity(bytes));
        // SAFETY: as long as the reservation, of which every byte is then initialised. A copy that the other
        // side disturbs holds some bytes or others; every one is valid.
        unsafe {
            place.as_ptr().copy_to_nonoverlapping(copy.as_mut_ptr(), bytes);
            copy.set_len(bytes);
        }
        copy
    }

    /// Writes the parcel of a slot.
    pub(super) fn put_parcel(&self, slot: usize, parcel: &[u8]) {
        let at = self.layout.parcel(slot);
        assert!(parcel.len() <= parcel::bytes_max(self.layout.slot_bytes), "a parcel of {}", parcel.len());
        self.put(at, &(parcel.len() as u64).to_le_bytes());
        self.put(at + size_of::<u64>(), parcel);
    }

    /// The parcel of a slot, as far as it can be one.
    pub(super) fn parcel(&self, slot: usize) -> Vec<u8> {
        let at = self.layout.parcel(slot);
        let length = self.get(at, size_of::<u64>()).try_into().map_or(0, u64::from_le_bytes);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        self.get(at + size_of::<u64>(), length.min(parcel::bytes_max(self.layout.slot_bytes)))
    }

    /// Writes the digests of a slot: no more than it has blocks.
    pub(super) fn put_digests(&self, slot: usize, digests: &[Digest]) {
        let bytes = digests.as_flattened();
        assert!(bytes.len() <= self.layout.digests_bytes(), "{} digests", digests.len());
        self.put(self.layout.digests(slot), bytes);
    }

    /// The digests of a slot.
    pub(super) fn digests(&self, slot: usize, count: usize) -> Vec<Digest> {
        let bytes = self.get(self.layout.digests(slot), count * size_of::<Digest>());
        bytes.as_chunks().0.to_vec()
    }

    /// The first byte of a part of a slot's data.
    pub(super) fn data(&self, slot: usize, at: usize, bytes: usize) -> NonNull<u8> {
        assert!(at <= self.layout.slot_bytes && bytes <= self.layout.slot_bytes - at, "{bytes} at {at}");
        self.place(self.layout.data(slot) + at, bytes)
    }

    /// Copies bytes into a slot's data.
    ///
    /// # Safety
    /// They must be mapped and unchanged meanwhile.
    pub(super) unsafe fn copy_in(&self, slot: usize, at: usize, from: NonNull<u8>, bytes: usize) {
        let to = self.data(slot, at, bytes).cast::<MaybeUninit<u8>>();
        // SAFETY: the source is the caller's promise; the target is as long, and no memory of Rust's.
        unsafe { to.as_ptr().copy_from_nonoverlapping(from.as_ptr().cast(), bytes) };
    }

    /// Copies bytes out of a slot's data.
    ///
    /// # Safety
    /// The target must be mapped, and neither read nor written by anybody else meanwhile.
    pub(super) unsafe fn copy_out(&self, slot: usize, at: usize, to: NonNull<u8>, bytes: usize) {
        let from = self.data(slot, at, bytes);
        // SAFETY: the target is the caller's promise; the source is as long, and whatever the other side does
        // to it meanwhile, it holds bytes.
        unsafe { from.as_ptr().copy_to_nonoverlapping(to.as_ptr(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::{Pusher, Taker};
    use super::*;

    #[test]
    fn what_one_side_puts_the_other_gets_and_nothing_overlaps() {
        let layout = Layout { slots: 3, slot_bytes: 64 << 10 };
        let ours = Exchange::create(layout).expect("memory");
        let file = ours.file().try_clone_to_owned().expect("a descriptor");
        let theirs = Exchange::map(file, layout).expect("the same memory");
        let (mut pusher, mut taker) = (Pusher::default(), Taker::default());
        for slot in 0..3 {
            let fill = slot as u8 + 1;
            ours.put_parcel(slot, &vec![fill; parcel::bytes_max(layout.slot_bytes)]);
            ours.put_digests(slot, &[[fill ^ 0x80; 16]; 16]);
            let data = vec![fill ^ 0x40; layout.slot_bytes];
            // SAFETY: the vector is held.
            unsafe { ours.copy_in(slot, 0, NonNull::from(&data[..]).cast(), data.len()) };
            pusher.push(&ours.orders(), slot as u64);
            Pusher::default().push(&theirs.answers(), 77);
        }
        for slot in 0..3 {
            let fill = slot as u8 + 1;
            assert_eq!(taker.take(&theirs.orders()), Ok(Some(slot as u64)));
            assert_eq!(theirs.parcel(slot), vec![fill; parcel::bytes_max(layout.slot_bytes)]);
            assert_eq!(theirs.digests(slot, 16), [[fill ^ 0x80; 16]; 16]);
            let mut data = vec![0; layout.slot_bytes];
            // SAFETY: only this holds the vector.
            unsafe { theirs.copy_out(slot, 0, NonNull::from(&mut data[..]).cast(), data.len()) };
            assert!(data.iter().all(|byte| *byte == fill ^ 0x40));
        }
        assert_eq!(Taker::default().take(&ours.answers()), Ok(Some(77)));
    }

    #[test]
    fn a_length_that_cannot_be_is_cut_and_slots_that_cannot_be_are_refused() {
        let layout = Layout { slots: 1, slot_bytes: 8192 };
        let exchange = Exchange::create(layout).expect("memory");
        exchange.put(layout.parcel(0), &u64::MAX.to_le_bytes());
        assert_eq!(exchange.parcel(0).len(), parcel::bytes_max(8192));
        for wrong in [
            Layout { slots: 0, ..layout },
            Layout { slots: PLACES + 1, ..layout },
            Layout { slots: 9, ..layout },
        ] {
            let file = exchange.file().try_clone_to_owned().expect("a descriptor");
            assert!(Exchange::map(file, wrong).is_err());
        }
    }
}
