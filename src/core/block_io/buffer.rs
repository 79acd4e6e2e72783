//! Page-aligned buffers from one slab, split and shared without copying.
//!
//! Invariants: a [`BufMut`] is the only handle to its range; a [`Buf`] range is never written while
//! a handle exists; memory returns to the slab when the last handle of an allocation goes.
//! `Pool::alloc` never fails: past the slab it takes ordinary memory, so that work in flight can
//! always finish. Callers limit what they have in flight. Must not know what the bytes mean.
#![allow(unsafe_code)] // raw memory shared with the kernel; each block argues for itself

use super::shelf::{self, Shelves};
use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::shared_memory::SharedMemory;

/// Alignment and smallest size of an allocation in bytes: a page, and what O_DIRECT wants at most.
const PAGE: usize = 4096;

/// A slab of page-aligned memory with a buddy allocator. Clones share it.
#[derive(Clone)]
pub struct Pool {
    slab: Arc<Slab>,
    holders: Arc<[Arc<Holder>]>,
}

/// What holds the slab for the buffers of some threads. Were they counted in the slab itself, the core that
/// counts would take the place of the count from all others.
#[repr(align(128))]
struct Holder(Arc<Slab>);

struct Slab {
    base: NonNull<u8>,
    bytes: usize,
    memory: Memory,
    buddy: Mutex<Buddy>,
    /// Free ranges that are not with the buddy allocator.
    shelves: Shelves,
    overflows: AtomicU64,
}

/// Whose mapping the slab is.
enum Memory {
    /// The slab's own.
    Private,
    /// Shared with other processes.
    Shared(SharedMemory),
}

// SAFETY: the slab is plain memory; the buddy state is behind its mutex, and ranges given out are disjoint.
unsafe impl Send for Slab {}
// SAFETY: as for Send; no method touches the given-out bytes through the slab.
unsafe impl Sync for Slab {}

impl Pool {
    /// A pool over `bytes` of fresh anonymous memory, rounded up to a power of two times 4 KiB.
    ///
    /// # Errors
    /// When the address space cannot be mapped.
    pub fn new(bytes: usize) -> std::io::Result<Pool> {
        let bytes = bytes.max(PAGE).next_power_of_two();
        let length = NonZeroUsize::new(bytes).expect("at least a page");
        // SAFETY: a fresh private anonymous mapping aliases nothing.
        let base = unsafe {
            nix::sys::mman::mmap_anonymous(
                None,
                length,
                nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE,
                nix::sys::mman::MapFlags::MAP_PRIVATE | nix::sys::mman::MapFlags::MAP_NORESERVE,
            )
        }?;
        // Large pages make copies of a MiB cheaper; a kernel without them serves small ones.
        // SAFETY: advice about a mapping of ours does not change what it holds.
        let _ = unsafe { nix::sys::mman::madvise(base, bytes, nix::sys::mman::MmapAdvise::MADV_HUGEPAGE) };
        Ok(Pool::of(base.cast(), bytes, Memory::Private, Buddy::new(bytes / PAGE)))
    }

    /// As [`Pool::new`], of memory that other processes can map too.
    ///
    /// # Errors
    /// When the system has no descriptor or address space for it.
    pub fn shared(bytes: usize) -> std::io::Result<Pool> {
        let bytes = bytes.max(PAGE).next_power_of_two();
        let memory = SharedMemory::create(c"calpe-buffers", bytes)?;
        Ok(Pool::of(memory.start(), bytes, Memory::Shared(memory), Buddy::new(bytes / PAGE)))
    }

    /// Memory whose buffers another process gives out: here it can be named, but all that is allocated
    /// here is ordinary memory.
    #[must_use]
    pub fn of_another(memory: SharedMemory) -> Pool {
        Pool::of(memory.start(), memory.bytes(), Memory::Shared(memory), Buddy::empty())
    }

    fn of(base: NonNull<u8>, bytes: usize, memory: Memory, buddy: Buddy) -> Pool {
        let (shelves, overflows) = (Shelves::new(bytes / PAGE), AtomicU64::new(0));
        let slab = Arc::new(Slab { base, bytes, memory, buddy: Mutex::new(buddy), shelves, overflows });
        let holders = (0..shelf::THREADS).map(|_| Arc::new(Holder(Arc::clone(&slab)))).collect();
        Pool { slab, holders }
    }

    /// The memory of the slab, where other processes can map it.
    #[must_use]
    pub fn shared_memory(&self) -> Option<&SharedMemory> {
        match &self.slab.memory {
            Memory::Private => None,
            Memory::Shared(memory) => Some(memory),
        }
    }

    /// Allocates the memory of every page of the slab now, so that no later page fault needs
    /// memory.
    ///
    /// # Errors
    /// When there is not enough, or the kernel is older than 5.14 and cannot.
    pub fn make_resident(&self) -> std::io::Result<()> {
        // SAFETY: the whole of a mapping of ours; populating it does not change what it holds.
        let result = unsafe {
            libc::madvise(self.slab.base.as_ptr().cast(), self.slab.bytes, libc::MADV_POPULATE_WRITE)
        };
        if result != 0 {
            return Err(std::io::Error::last_os_error());
        }
        if let Memory::Shared(memory) = &self.slab.memory {
            memory.collapse();
        }
        Ok(())
    }

    /// A buffer of exactly `len` bytes, page-aligned, of unspecified (but initialised) content.
    #[must_use]
    pub fn alloc(&self, len: usize) -> BufMut {
        let pages = len.div_ceil(PAGE).max(1);
        let order = pages.next_power_of_two().trailing_zeros();
        let region = match self.slab.take(order) {
            Some(page) => {
                // SAFETY: the buddy gave out pages [page, page + 2^order) inside the mapping.
                let start = unsafe { self.slab.base.add(page * PAGE) };
                Region {
                    start,
                    home: Home::Slab { holder: Arc::clone(&self.holders[shelf::mine()]), page, order },
                }
            }
            None => {
                self.slab.overflows.fetch_add(1, Ordering::Relaxed);
                let layout = Layout::from_size_align(pages * PAGE, PAGE).expect("buffer size in range");
                // SAFETY: the layout has a non-zero size. Zeroed by the allocator, which leaves the pages of
                // a large range to the kernel: what is announced and never arrives costs no memory.
                let start = unsafe { alloc_zeroed(layout) };
                let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
                Region { start, home: Home::Heap(layout) }
            }
        };
        BufMut { start: region.start, len, region: Arc::new(region) }
    }

    /// A buffer of `len` zero bytes.
    #[must_use]
    pub fn alloc_zeroed(&self, len: usize) -> BufMut {
        let mut buf = self.alloc(len);
        buf.fill(0);
        buf
    }

    /// Joins buffers, in this order, into one. Bytes are copied only where the buffers are not neighbours in
    /// memory.
    ///
    /// # Panics
    /// When there is none.
    #[must_use]
    pub fn join(&self, parts: impl IntoIterator<Item = BufMut>) -> BufMut {
        let mut parts = parts.into_iter();
        let mut first = parts.next().expect("there is a buffer");
        // Most are one: then this takes no memory.
        let mut apart: Vec<BufMut> = Vec::new();
        for part in parts {
            let rest = apart.last_mut().unwrap_or(&mut first).try_unsplit(part).err();
            apart.extend(rest);
        }
        if apart.is_empty() {
            return first;
        }
        let mut whole = self.alloc(first.len() + apart.iter().map(|run| run.len()).sum::<usize>());
        let mut at = 0;
        for run in std::iter::once(first).chain(apart) {
            whole[at..at + run.len()].copy_from_slice(&run);
            at += run.len();
        }
        whole
    }

    /// The slab as (address, length), to register it with a kernel or a device once.
    #[must_use]
    pub fn slab(&self) -> (NonNull<u8>, usize) {
        (self.slab.base, self.slab.bytes)
    }

    /// Whether the range lies in the slab, as opposed to overflow memory.
    #[must_use]
    pub fn contains(&self, start: *const u8, len: usize) -> bool {
        let base = self.slab.base.as_ptr().addr();
        let start = start.addr();
        start >= base && start + len <= base + self.slab.bytes
    }

    /// How many allocations did not fit into the slab so far.
    #[must_use]
    pub fn overflows(&self) -> u64 {
        self.slab.overflows.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("bytes", &self.slab.bytes).finish_non_exhaustive()
    }
}

impl Slab {
    /// A free range of 2^`order` pages.
    fn take(&self, order: u32) -> Option<usize> {
        if let Some(page) = self.shelves.take(order) {
            return Some(page);
        }
        let mut buddy = self.buddy.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(page) = buddy.alloc(order) {
            // Some for the shelf at once, so that its threads do not meet others here for each.
            for _ in 0..self.shelves.refill(order) {
                let Some(more) = buddy.alloc(order) else { break };
                if !self.shelves.put(more, order) {
                    buddy.free(more, order);
                    break;
                }
            }
            return Some(page);
        }
        self.shelves.clear(|page, order| buddy.free(page, order));
        buddy.alloc(order)
    }

    fn give_back(&self, page: usize, order: u32) {
        if !self.shelves.put(page, order) {
            let (surplus, of_order) = self.shelves.take_surplus(order);
            let mut buddy = self.buddy.lock().unwrap_or_else(PoisonError::into_inner);
            surplus.into_iter().for_each(|page| buddy.free(page, of_order));
            buddy.free(page, order);
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        if let Memory::Shared(_) = self.memory {
            return;
        }
        // SAFETY: every region holds the slab, so none is left; base and length are those of the
        // mapping.
        let unmapped = unsafe { nix::sys::mman::munmap(self.base.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping");
    }
}

struct Region {
    start: NonNull<u8>,
    home: Home,
}

enum Home {
    Slab { holder: Arc<Holder>, page: usize, order: u32 },
    Heap(Layout),
}

// SAFETY: a region is an address range; access goes through BufMut (unique) or Buf (shared, read-only).
unsafe impl Send for Region {}
// SAFETY: as for Send.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.home {
            Home::Slab { holder, page, order } => {
                holder.0.give_back(*page, *order);
            }
            Home::Heap(layout) => {
                // SAFETY: allocated with this layout in `Pool::alloc`, and this is the last handle.
                unsafe { dealloc(self.start.as_ptr(), *layout) }
            }
        }
    }
}

/// The unique, writable handle of a byte range. Splits into disjoint handles, joins again, freezes into
/// [`Buf`].
pub struct BufMut {
    region: Arc<Region>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: unique access to its range; the region is Send + Sync.
unsafe impl Send for BufMut {}
// SAFETY: `&BufMut` only gives `&[u8]`.
unsafe impl Sync for BufMut {}

impl BufMut {
    /// Splits in two: `self` keeps `[0, at)`, the returned handle has `[at, len)`. Panics when `at > len`.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> BufMut {
        assert!(at <= self.len, "split at {at} of a buffer of {}", self.len);
        // SAFETY: `at <= len`, so the result is within or one past the end of this range.
        let start = unsafe { self.start.add(at) };
        let tail = BufMut { region: Arc::clone(&self.region), start, len: self.len - at };
        self.len = at;
        tail
    }

    /// Joins `tail` back, which must start where `self` ends in the same allocation. Panics otherwise.
    pub fn unsplit(&mut self, tail: BufMut) {
        assert!(self.try_unsplit(tail).is_ok(), "unsplit of ranges that are not neighbours");
    }

    /// Joins `tail` back when it starts where `self` ends in the same allocation; hands it back otherwise.
    ///
    /// # Errors
    /// The tail, when the two are not neighbours.
    pub fn try_unsplit(&mut self, tail: BufMut) -> Result<(), BufMut> {
        let end = self.start.as_ptr().addr() + self.len;
        if !Arc::ptr_eq(&self.region, &tail.region) || end != tail.start.as_ptr().addr() {
            return Err(tail);
        }
        self.len += tail.len;
        Ok(())
    }

    /// Gives up writing; the result can be cloned and sliced.
    #[must_use]
    pub fn freeze(self) -> Buf {
        Buf { region: self.region, start: self.start, len: self.len }
    }

    /// Never frees the whole allocation, even after its last handle is dropped: a device that no
    /// longer answers may still read the memory.
    pub fn keep_mapped(&self) {
        std::mem::forget(Arc::clone(&self.region));
    }

    /// Address of the first byte, for a kernel that fills the range while this handle is kept in flight.
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is initialised memory that only this handle can write.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialised memory, and this is the unique handle of the range.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

/// A shared, read-only handle of a byte range.
#[derive(Clone)]
pub struct Buf {
    region: Arc<Region>,
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: read-only access to a range that nobody writes; the region is Send + Sync.
unsafe impl Send for Buf {}
// SAFETY: as for Send.
unsafe impl Sync for Buf {}

impl Buf {
    /// A handle of a part of this range. Panics when `range` is not inside.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Buf {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of {} bytes", self.len);
        // SAFETY: inside this range by the assertion.
        let start = unsafe { self.start.add(range.start) };
        Buf { region: Arc::clone(&self.region), start, len: range.end - range.start }
    }

    /// As [`BufMut::keep_mapped`].
    pub fn keep_mapped(&self) {
        std::mem::forget(Arc::clone(&self.region));
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: initialised memory that nobody writes while a Buf exists.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// Buddy allocator over pages. Free lists are stacks whose stale entries are recognised by `state` on
/// popping.
struct Buddy {
    free: Vec<Vec<u32>>,
    state: Vec<u8>,
}

const FREE: u8 = 0x80;
const INNER: u8 = 0x7f;

impl Buddy {
    /// Nothing is free, and nothing will be.
    fn empty() -> Buddy {
        Buddy { free: Vec::new(), state: Vec::new() }
    }

    fn new(pages: usize) -> Buddy {
        let top = pages.trailing_zeros();
        let mut free = vec![Vec::new(); top as usize + 1];
        let mut state = vec![INNER; pages];
        free[top as usize].push(0);
        state[0] = FREE | top as u8;
        Buddy { free, state }
    }

    fn alloc(&mut self, order: u32) -> Option<usize> {
        let mut found = None;
        for candidate in order as usize..self.free.len() {
            while let Some(page) = self.free[candidate].pop() {
                if self.state[page as usize] == FREE | candidate as u8 {
                    found = Some((page as usize, candidate));
                    break;
                }
            }
            if found.is_some() {
                break;
            }
        }
        let (page, mut at) = found?;
        while at > order as usize {
            at -= 1;
            let buddy = page + (1 << at);
            self.state[buddy] = FREE | at as u8;
            self.free[at].push(u32::try_from(buddy).expect("page number fits"));
        }
        self.state[page] = at as u8;
        Some(page)
    }

    fn free(&mut self, mut page: usize, order: u32) {
        debug_assert_eq!(self.state[page], order as u8, "freeing what is not allocated");
        let mut order = order as usize;
        while order + 1 < self.free.len() {
            let buddy = page ^ (1 << order);
            if self.state[buddy] != FREE | order as u8 {
                break;
            }
            self.state[page.max(buddy)] = INNER;
            page = page.min(buddy);
            order += 1;
        }
        self.state[page] = FREE | order as u8;
        self.free[order].push(u32::try_from(page).expect("page number fits"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn split_ranges_are_disjoint_and_join_again() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut head = pool.alloc(10_000);
        let mut tail = head.split_off(4096);
        head.fill(1);
        tail.fill(2);
        head.unsplit(tail);
        assert_eq!(head.len(), 10_000);
        assert!(head[..4096].iter().all(|&b| b == 1) && head[4096..].iter().all(|&b| b == 2));
    }

    #[test]
    #[should_panic(expected = "not neighbours")]
    fn joining_out_of_order_is_refused() {
        let pool = Pool::new(1 << 20).unwrap();
        let mut a = pool.alloc(4096);
        let mut b = a.split_off(1024);
        let c = b.split_off(1024);
        a.unsplit(c);
    }

    #[test]
    fn the_slab_is_whole_again_after_all_handles_are_gone() {
        let pool = Pool::new(1 << 20).unwrap();
        let shared = pool.alloc(5000).freeze();
        let part = shared.slice(100..200);
        drop(shared);
        assert_eq!(part.len(), 100);
        drop(part);
        let whole = pool.alloc(1 << 20);
        assert!(pool.contains(whole.as_ptr(), whole.len()));
        assert_eq!(pool.overflows(), 0);
    }

    #[test]
    fn a_full_slab_overflows_into_ordinary_memory() {
        let pool = Pool::new(8192).unwrap();
        let first = pool.alloc(8192);
        let second = pool.alloc(4096);
        assert!(pool.contains(first.as_ptr(), 8192) && !pool.contains(second.as_ptr(), 4096));
        assert_eq!(second.as_ptr().addr() % PAGE, 0);
        assert_eq!(pool.overflows(), 1);
    }

    #[test]
    fn a_shared_slab_is_a_slab_and_another_process_gets_no_buffers_of_it() {
        let pool = Pool::shared(1 << 20).unwrap();
        pool.make_resident().unwrap();
        let mut buf = pool.alloc(8192);
        buf.fill(9);
        assert!(pool.contains(buf.as_ptr(), 8192));
        let memory = pool.shared_memory().unwrap();
        let file = memory.file().try_clone_to_owned().unwrap();
        let mapped = SharedMemory::map(file, 1 << 20, crate::block_io::Access::ReadOnly).unwrap();
        let other = Pool::of_another(mapped);
        let own = other.alloc(4096);
        assert!(!other.contains(own.as_ptr(), 4096) && other.overflows() == 1);
        assert!(other.slab().1 == 1 << 20 && Pool::new(4096).unwrap().shared_memory().is_none());
        drop(buf);
        assert!(pool.contains(pool.alloc(1 << 20).as_ptr(), 1 << 20));
    }

    #[test]
    fn what_is_kept_mapped_never_returns_to_the_slab() {
        let pool = Pool::new(8192).unwrap();
        let (shared, owned) = (pool.alloc(4096).freeze(), pool.alloc(4096));
        let (first, second) = (shared.as_ptr(), owned.as_ptr());
        shared.keep_mapped();
        drop((shared, owned));
        let again = pool.alloc(4096);
        assert_eq!(again.as_ptr(), second);
        again.keep_mapped();
        drop(again);
        let neither = pool.alloc(4096);
        assert!(neither.as_ptr() != first && neither.as_ptr() != second && pool.overflows() == 1);
    }

    #[test]
    #[ignore = "measures"]
    fn what_shared_memory_costs() {
        const BYTES: usize = 256 << 20;
        let resident = |pool: Pool| {
            pool.make_resident().expect("memory");
            pool
        };
        let small_pages = || {
            let pool = Pool::shared(BYTES).expect("memory");
            let (start, bytes) = pool.slab();
            // SAFETY: advice about a mapping of ours does not change what it holds.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_NOHUGEPAGE) };
            // Page by page, and never collapsed.
            pool.alloc(BYTES).chunks_mut(PAGE).for_each(|page| page[0] = 1);
            pool
        };
        let started = std::time::Instant::now();
        let shared = resident(Pool::shared(BYTES).expect("memory"));
        println!("shared memory of {BYTES} bytes is there after {:?}", started.elapsed());
        let private = resident(Pool::new(BYTES).expect("memory"));
        let pools = [("private", private), ("shared", shared), ("shared, small pages", small_pages())];
        for round in 0..5 {
            for (name, pool) in &pools {
                let mut all = pool.alloc(BYTES);
                let (mut at, started) = (1u64, std::time::Instant::now());
                for _ in 0..20_000 {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let (from, to) = ((at >> 33) as usize % 8000, (at >> 20) as usize % 8000);
                    all.copy_within(from * (32 << 10)..(from + 2) * (32 << 10), to * (32 << 10));
                }
                let copied = 20_000.0 * f64::from(64 << 10) / started.elapsed().as_secs_f64() / 1e9;
                let (mut sum, started) = (0u64, std::time::Instant::now());
                for _ in 0..4_000_000 {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1 + (sum & 1));
                    sum += u64::from(all[(at >> 36) as usize % BYTES]);
                }
                let ns = started.elapsed().as_secs_f64() * 1e9 / 4e6;
                println!(
                    "round {round}, {name}: copies of 64 KiB {copied:.2} GB/s, a byte anywhere {ns:.1} ns"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn live_allocations_never_overlap(steps in prop::collection::vec((1usize..70_000, any::<prop::sample::Index>(), any::<bool>()), 1..120)) {
            let pool = Pool::new(1 << 20).unwrap();
            let mut live: Vec<(u8, BufMut)> = Vec::new();
            for (stamp, (len, pick, release)) in steps.into_iter().enumerate() {
                if release && !live.is_empty() {
                    let (expected, buf) = live.swap_remove(pick.index(live.len()));
                    prop_assert!(buf.iter().all(|&b| b == expected));
                } else {
                    let mut buf = pool.alloc(len);
                    buf.fill(stamp as u8);
                    live.push((stamp as u8, buf));
                }
            }
            for (expected, buf) in live.drain(..) {
                prop_assert!(buf.iter().all(|&b| b == expected));
            }
            let whole = pool.alloc(1 << 20);
            prop_assert!(pool.contains(whole.as_ptr(), whole.len()), "everything coalesced");
        }
    }
}
