//! The atomics of the view: those of std, or of the model checker in its builds; and memory full of them.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::AtomicU64;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::AtomicU64;
#[cfg(not(loom))]
use zerocopy::{FromZeros, KnownLayout};

/// `count` zeroes. The host gives the memory as it is touched.
#[cfg(not(loom))]
pub(crate) fn zeroes<T>(count: usize) -> Box<[T]>
where
    [T]: FromZeros + KnownLayout<PointerMetadata = usize>,
{
    <[T]>::new_box_zeroed_with_elems(count).expect("memory for the view")
}

/// `count` zeroes.
#[cfg(loom)]
pub(crate) fn zeroes<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}
