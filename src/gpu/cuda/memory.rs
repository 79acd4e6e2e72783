//! Host memory that the driver knows: slabs of pools, registered once for the whole process however
//! many devices use them, with a count of their users.
//!
//! Invariants: a slab is unregistered when its last user is dropped and never before; the user of a device
//! that was given up is never dropped, so memory that the device may still touch stays registered and mapped.
//! It is no error when a slab cannot be registered: its ranges are copied then. Must not know of batches.
#![allow(unsafe_code)] // registering is a promise about memory; see each block

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::api::{ALREADY_REGISTERED, Context, DevicePtr};
use super::plan::Run;
use calpe_core::block_io::{Access, Pool, SharedMemory};

/// A slab that the driver knows, whichever context registered it.
struct Shared {
    base: usize,
    users: usize,
    /// The context that registered it, which must live as long.
    owner: Arc<Context>,
}

static SHARED: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

struct Region {
    base: usize,
    bytes: usize,
    device: DevicePtr,
    /// Whether this device is among the slab's users in [`SHARED`].
    counted: bool,
    /// Keeps the slab mapped.
    _pool: Pool,
}

/// The slabs that one device reaches.
pub(super) struct Slabs {
    regions: Vec<Region>,
    report: Registered,
}

/// The result of registering slabs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Registered {
    /// Bytes that this device reaches directly.
    pub bytes: usize,
    /// How long it took.
    pub took: Duration,
    /// Why some slabs are not registered.
    pub refusals: Vec<String>,
}

impl Slabs {
    /// Registers the slabs of all pools, each once.
    #[must_use]
    pub(super) fn register(context: &Arc<Context>, pools: &[Pool]) -> Slabs {
        let begun = Instant::now();
        let mut slabs = Slabs { regions: Vec::new(), report: Registered::default() };
        for pool in pools {
            let (start, bytes) = pool.slab();
            let base = start.as_ptr().expose_provenance();
            if slabs.regions.iter().any(|region| region.base == base) {
                continue;
            }
            match slab_pointer(context, pool) {
                Ok((device, counted)) => {
                    slabs.regions.push(Region { base, bytes, device, counted, _pool: pool.clone() });
                    slabs.report.bytes += bytes;
                }
                Err(why) => slabs.report.refusals.push(format!("{bytes} bytes: {why}")),
            }
        }
        slabs.report.took = begun.elapsed();
        slabs
    }

    /// The result of registering.
    #[must_use]
    pub(super) fn report(&self) -> &Registered {
        &self.report
    }

    /// The region that a range lies in, when it is also aligned for the kernels.
    #[must_use]
    pub(super) fn region_of(&self, host: usize, bytes: usize) -> Option<usize> {
        if !host.is_multiple_of(16) {
            return None;
        }
        let inside = |region: &Region| host >= region.base && host + bytes <= region.base + region.bytes;
        self.regions.iter().position(inside)
    }

    /// Where the device sees the first byte of a run in one of these regions.
    ///
    /// # Panics
    /// When it lies in none.
    #[must_use]
    pub(super) fn device_pointer(&self, run: &Run) -> DevicePtr {
        let region = &self.regions[run.region.expect("a run in a region")];
        region.device + (run.host - region.base) as u64
    }
}

/// Registers a slab unless it is registered already, and counts this user. Returns where the device
/// sees it, and whether this user was counted.
fn slab_pointer(context: &Arc<Context>, pool: &Pool) -> Result<(DevicePtr, bool), String> {
    let (start, bytes) = pool.slab();
    let (start, access) =
        (start.as_ptr(), pool.shared_memory().map_or(Access::ReadWrite, SharedMemory::access));
    let base = start.addr();
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let known = shared.iter().position(|slab| slab.base == base);
    if let Some(slab) = known.map(|at| &mut shared[at])
        && let Ok(pointer) = context.device_pointer(start)
    {
        slab.users += 1;
        return Ok((pointer, true));
    }
    // Not registered, or registered by a context that has failed, which ended the registration; users of
    // failed contexts are never dropped. SAFETY: every user keeps the pool, and so the mapping, until the
    // last of them has unregistered it.
    let ours = match unsafe { context.register(start, bytes, access) } {
        Ok(()) => true,
        // Registered, but by no device known here: another part of this process did so and may undo it at any
        // time. Usable, but not counted here.
        Err((ALREADY_REGISTERED, _)) => false,
        Err((_, error)) => return Err(error.to_string()),
    };
    let found = context.device_pointer(start).map_err(|error| error.to_string());
    match (found.is_ok(), known, ours) {
        (true, Some(at), _) => shared[at].users += 1,
        (true, None, true) => shared.push(Shared { base, users: 1, owner: Arc::clone(context) }),
        (false, _, true) => {
            // SAFETY: just registered, and not used by anything yet.
            let _ = unsafe { context.unregister(start) };
        }
        (_, _, false) => {}
    }
    found.map(|pointer| (pointer, known.is_some() || ours))
}

impl Drop for Slabs {
    fn drop(&mut self) {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        for region in self.regions.iter().filter(|region| region.counted) {
            let Some(at) = shared.iter().position(|slab| slab.base == region.base) else { continue };
            shared[at].users -= 1;
            if shared[at].users == 0 {
                let slab = shared.swap_remove(at);
                let start = std::ptr::with_exposed_provenance_mut(region.base);
                // SAFETY: this was the last device that used it, and it waited for its work before
                // it dropped this.
                if let Err(error) = unsafe { slab.owner.unregister(start) } {
                    tracing::warn!("{} bytes of memory stay pinned: {error}", region.bytes);
                }
            }
        }
    }
}
