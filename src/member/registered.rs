//! The pool's memory as buffers that are registered with a ring, which speeds up small requests.
//! Must not know what is in them.
#![allow(unsafe_code)] // memory handed to the kernel; the block argues for itself

use super::Ring;
use calpe_core::block_io::Pool;

/// Most bytes of one registered buffer: what io_uring allows.
const REGISTERED_MAX: usize = 1 << 30;

/// State of the registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Registration {
    /// No device has needed it yet.
    Pending,
    /// The pool's slab is registered.
    Done,
    /// The system refused; plain transfers are used.
    Refused,
}

/// The registered buffer that holds a range wholly, if one does.
pub(super) fn fixed_index(
    registration: Registration,
    pool: &Pool,
    start: *const u8,
    len: usize,
) -> Option<u16> {
    if registration != Registration::Done || !pool.contains(start, len) {
        return None;
    }
    let first = start.addr() - pool.slab().0.as_ptr().addr();
    let (index, last) = (first / REGISTERED_MAX, (first + len.max(1) - 1) / REGISTERED_MAX);
    if index == last { u16::try_from(index).ok() } else { None }
}

/// Registers the pool's slab. Pins its memory, so it is done only when a device can use it.
pub(super) fn register(ring: &Ring, pool: &Pool) -> Registration {
    let (base, bytes) = pool.slab();
    raise_memlock(bytes as u64);
    let parts: Vec<libc::iovec> = (0..bytes)
        .step_by(REGISTERED_MAX)
        .map(|at| libc::iovec {
            iov_base: base.as_ptr().wrapping_add(at).cast(),
            iov_len: (bytes - at).min(REGISTERED_MAX),
        })
        .collect();
    // SAFETY: the kernel holds its own references to the pages, so they outlive even an unmapping.
    match unsafe { ring.register_buffers(&parts) } {
        Ok(()) => Registration::Done,
        Err(e) => {
            tracing::info!(bytes, error = %e, "buffers are not registered with io_uring: raise RLIMIT_MEMLOCK to speed up small requests");
            Registration::Refused
        }
    }
}

/// Raises the limit of locked memory as far as this process may, so that registration has a chance.
fn raise_memlock(bytes: u64) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK)
        && soft < bytes
    {
        // Raising the hard limit needs a privilege; failing that, take what there is.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, bytes, hard.max(bytes))
            .or_else(|_| setrlimit(Resource::RLIMIT_MEMLOCK, hard.min(bytes).max(soft), hard));
    }
}
