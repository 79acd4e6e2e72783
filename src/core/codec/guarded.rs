//! Test memory that ends (and begins) at inaccessible pages, so that a read or write one byte too
//! far crashes.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// At least as large as any page of the machines that run the tests.
const PAGE_BYTES: usize = 64 << 10;

/// The end of the bytes at which the inaccessible page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Edge {
    Before,
    After,
}

/// `length` bytes, prefilled with garbage, that touch an inaccessible page at one edge.
pub(super) struct Guarded {
    mapping: NonNull<c_void>,
    mapped_bytes: usize,
    start: usize,
    length: usize,
}

impl Guarded {
    pub(super) fn new(length: usize, edge: Edge) -> Guarded {
        let inner = length.next_multiple_of(PAGE_BYTES).max(PAGE_BYTES);
        let mapped_bytes = inner + 2 * PAGE_BYTES;
        let size = NonZeroUsize::new(mapped_bytes).expect("two pages at least");
        let start = match edge {
            Edge::Before => PAGE_BYTES,
            Edge::After => PAGE_BYTES + inner - length,
        };
        // SAFETY: a fresh private mapping; only its middle is made accessible.
        let mapping = unsafe {
            let mapping =
                mmap_anonymous(None, size, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE).expect("mmap");
            let middle = mapping.byte_add(PAGE_BYTES);
            mprotect(middle, inner, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE).expect("mprotect");
            mapping
        };
        let mut guarded = Guarded { mapping, mapped_bytes, start, length };
        guarded.fill(0xEE);
        guarded
    }
}

impl Deref for Guarded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes lie in the accessible middle of a mapping that `self` owns.
        unsafe { std::slice::from_raw_parts(self.mapping.cast::<u8>().add(self.start).as_ptr(), self.length) }
    }
}

impl DerefMut for Guarded {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes the access exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.cast::<u8>().add(self.start).as_ptr(), self.length)
        }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly what `new` mapped; no borrow outlives `self`.
        unsafe { munmap(self.mapping, self.mapped_bytes) }.expect("munmap");
    }
}
