//! The CUDA driver's calls as types that free what they own; each failure is an error that names
//! the call.
//!
//! Invariants: no call is made before [`initialise`] has found a driver that is new enough; a value
//! that belongs to a context keeps the context alive and makes it current before each call, so any
//! thread may own and drop it. Must not know of columns, batches or kernels.

mod module;

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUresult};

use crate::device::DeviceError;
use calpe_core::block_io::Access;

pub(super) use module::{Function, Module};

/// The oldest driver that loads our PTX: that of CUDA 12.0, as the driver numbers it.
const DRIVER_VERSION_MIN: i32 = 12_000;

/// The driver's number for "registered already".
pub(super) const ALREADY_REGISTERED: u32 = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as u32;

const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;

/// An address on the device.
pub(super) type DevicePtr = u64;

fn text_of(code: CUresult) -> String {
    let read = |call: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = ptr::null();
        // SAFETY: the call writes a pointer to a string that lives as long as the driver, or leaves
        // it null.
        let known = unsafe { call(code, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
        // SAFETY: a string that ends with zero, see above.
        known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    };
    let name = read(sys::cuGetErrorName).unwrap_or_else(|| "an error".to_owned());
    let meaning = read(sys::cuGetErrorString).unwrap_or_else(|| "unknown to the driver".to_owned());
    format!("{name} ({}): {meaning}", code as u32)
}

fn check(operation: &'static str, code: CUresult) -> Result<(), DeviceError> {
    if code == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(DeviceError::Failed { operation, text: text_of(code) })
}

/// Loads the driver once and tells its version, as 1000 times the major number plus 10 times the
/// minor one.
///
/// # Errors
/// `Absent` with the reason when there is none that can be used.
pub(super) fn initialise() -> Result<i32, DeviceError> {
    static DRIVER: OnceLock<Result<i32, String>> = OnceLock::new();
    let found = DRIVER.get_or_init(|| {
        // SAFETY: loading libcuda runs its initialisers, which is what a driver library is for.
        if !unsafe { sys::is_culib_present() } {
            return Err("no NVIDIA driver: libcuda.so.1 was not found".to_owned());
        }
        let mut version = 0;
        // SAFETY: writes one integer. This call exists in every driver.
        let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(format!("the NVIDIA driver does not tell its version: {}", text_of(code)));
        }
        if version < DRIVER_VERSION_MIN {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(format!("the NVIDIA driver is of CUDA {major}.{minor}; 12.0 or later is needed"));
        }
        // SAFETY: no arguments to get wrong; may be called any number of times.
        let code = unsafe { sys::cuInit(0) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(format!("the NVIDIA driver cannot be used: cuInit: {}", text_of(code)));
        }
        Ok(version)
    });
    found.clone().map_err(DeviceError::Absent)
}

/// One of the driver's devices, before anything is opened on it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    device: sys::CUdevice,
}

impl Gpu {
    /// How many there are.
    ///
    /// # Errors
    /// As [`initialise`].
    pub(super) fn count() -> Result<usize, DeviceError> {
        initialise()?;
        let mut count = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// The device of a number below [`Gpu::count`].
    ///
    /// # Errors
    /// When there is no such device.
    pub(super) fn nth(index: usize) -> Result<Gpu, DeviceError> {
        let count = Gpu::count()?;
        if index >= count {
            return Err(DeviceError::Absent(format!("there is no GPU {index}: the driver has {count}")));
        }
        let mut device = 0;
        // SAFETY: writes one integer.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index as i32) })?;
        Ok(Gpu { device })
    }

    /// The vendor's name.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn name(self) -> Result<String, DeviceError> {
        let mut name = [0 as c_char; 128];
        let length = name.len() as i32;
        // SAFETY: writes at most `length` bytes, the last of them zero.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), length, self.device) })?;
        let bytes: Vec<u8> = name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The identity of this device, 16 bytes.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn uuid(self) -> Result<[u8; 16], DeviceError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes one identity.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        Ok(uuid.bytes.map(|byte| byte as u8))
    }

    /// Its memory in bytes.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn memory_bytes(self) -> Result<u64, DeviceError> {
        let mut bytes = 0usize;
        // SAFETY: writes one size.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, self.device) })?;
        Ok(bytes as u64)
    }

    fn attribute(self, which: sys::CUdevice_attribute) -> Result<i32, DeviceError> {
        let mut value = 0;
        // SAFETY: writes one integer.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, self.device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Number of multiprocessors.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn multiprocessors(self) -> Result<u32, DeviceError> {
        let count = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(u32::try_from(count).unwrap_or(1).max(1))
    }

    /// Compute capability as 10 times the major number plus the minor one.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn capability(self) -> Result<i32, DeviceError> {
        let major = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(10 * major + minor)
    }

    /// Whether it can be given memory that this process may only read.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn takes_read_only(self) -> Result<bool, DeviceError> {
        let supported = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        Ok(self.attribute(supported)? != 0)
    }
}

/// A context of our own: failures in it do not affect other contexts.
#[derive(Debug)]
pub(super) struct Context {
    raw: sys::CUcontext,
}

// SAFETY: the driver's contexts may be used from any thread, by several at a time.
unsafe impl Send for Context {}
// SAFETY: as for Send.
unsafe impl Sync for Context {}

impl Context {
    /// A new context, current on this thread.
    ///
    /// # Errors
    /// When the driver has no memory for it or the device is not available.
    pub(super) fn new(gpu: Gpu) -> Result<Arc<Context>, DeviceError> {
        let mut raw = ptr::null_mut();
        let flags =
            sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC as u32 | sys::CUctx_flags::CU_CTX_MAP_HOST as u32;
        // SAFETY: writes one handle.
        check("cuCtxCreate", unsafe { sys::cuCtxCreate_v2(&raw mut raw, flags, gpu.device) })?;
        Ok(Arc::new(Context { raw }))
    }

    /// Makes it the context of this thread's calls.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the handle is valid until drop.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.raw) })
    }

    /// Waits until nothing runs in it.
    ///
    /// # Errors
    /// When the work in it has failed.
    pub(super) fn synchronise(&self) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: of the context just made current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Free bytes of device memory.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn free_bytes(&self) -> Result<usize, DeviceError> {
        self.bind()?;
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: writes two sizes.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok(free)
    }

    /// The least and the greatest priority of a stream; greater is the smaller number.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn priorities(&self) -> Result<(i32, i32), DeviceError> {
        self.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two integers.
        let code = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", code)?;
        Ok((least, greatest))
    }

    /// Pins memory of another owner, so that every context reaches it. The error has the driver's
    /// number.
    ///
    /// # Errors
    /// The number and text of the driver's error.
    ///
    /// # Safety
    /// The range must stay mapped until it is unregistered or the process ends.
    pub(super) unsafe fn register(
        &self,
        start: *mut u8,
        bytes: usize,
        access: Access,
    ) -> Result<(), (u32, DeviceError)> {
        self.bind().map_err(|error| (0, error))?;
        let mut flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        if access == Access::ReadOnly {
            flags |= sys::CU_MEMHOSTREGISTER_READ_ONLY;
        }
        // SAFETY: the caller keeps the range mapped.
        let code = unsafe { sys::cuMemHostRegister_v2(start.cast(), bytes, flags) };
        check("cuMemHostRegister", code).map_err(|error| (code as u32, error))
    }

    /// Undoes [`Context::register`].
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// Nothing may be under way on the device that reads or writes the range.
    pub(super) unsafe fn unregister(&self, start: *mut u8) -> Result<(), DeviceError> {
        self.bind()?;
        // SAFETY: the caller guarantees that nothing uses the range.
        check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(start.cast()) })
    }

    /// The device's address of registered or pinned host memory.
    ///
    /// # Errors
    /// When this context cannot reach it.
    pub(super) fn device_pointer(&self, start: *mut u8) -> Result<DevicePtr, DeviceError> {
        self.bind()?;
        let mut pointer = 0;
        // SAFETY: writes one address; `start` is only looked up.
        let code = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut pointer, start.cast(), 0) };
        check("cuMemHostGetDevicePointer", code)?;
        Ok(pointer)
    }
}

impl Context {
    /// Ends a failed context, although values that belong to it still exist. None of them may be
    /// used, or dropped, from now on.
    pub(super) fn destroy(&self) {
        // SAFETY: the caller has forgotten all owners of values that belong to it, so no handle is used
        // again.
        unsafe { sys::cuCtxDestroy_v2(self.raw) };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: everything that belongs to the context held it, so this is the last use. Errors
        // leave nothing to do.
        unsafe { sys::cuCtxDestroy_v2(self.raw) };
    }
}

/// A queue of work on the device, independent of the others.
#[derive(Debug)]
pub(super) struct Stream {
    raw: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of a priority as [`Context::priorities`] has them.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn new(context: &Arc<Context>, priority: i32) -> Result<Stream, DeviceError> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one handle.
        let code = unsafe { sys::cuStreamCreateWithPriority(&raw mut raw, flags, priority) };
        check("cuStreamCreateWithPriority", code)?;
        Ok(Stream { raw, context: Arc::clone(context) })
    }

    /// Makes later work wait for the event.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        // SAFETY: both handles are valid.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Waits until all queued work is done.
    ///
    /// # Errors
    /// When some of it failed.
    pub(super) fn synchronise(&self) -> Result<(), DeviceError> {
        // SAFETY: a valid handle.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Queues a copy from host to device.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// Both ranges must be valid until the copy is done, the source pinned and unchanged.
    pub(super) unsafe fn copy_in(
        &self,
        to: DevicePtr,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the ranges valid.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw) };
        check("cuMemcpyHtoDAsync", code)
    }

    /// Queues a copy from device to host.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// Both ranges must be valid until the copy is done, the target pinned and not otherwise used.
    pub(super) unsafe fn copy_out(
        &self,
        to: *mut u8,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the ranges valid.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw) };
        check("cuMemcpyDtoHAsync", code)
    }

    /// Queues a copy inside the device.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// Both ranges must be valid until the copy is done.
    pub(super) unsafe fn copy_within(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the ranges valid.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) };
        check("cuMemcpyDtoDAsync", code)
    }

    /// Queues filling a range with one byte.
    ///
    /// # Errors
    /// When the driver fails.
    ///
    /// # Safety
    /// The range must be valid until that is done.
    pub(super) unsafe fn fill(&self, to: DevicePtr, byte: u8, bytes: usize) -> Result<(), DeviceError> {
        // SAFETY: the caller keeps the range valid.
        check("cuMemsetD8Async", unsafe { sys::cuMemsetD8Async(to, byte, bytes, self.raw) })
    }

    /// Queues a kernel. A parameter of 32 bits is the low half of its number.
    ///
    /// # Errors
    /// When it cannot be launched, or earlier work has failed.
    ///
    /// # Safety
    /// `arguments` must be those of the kernel, and all they point to valid until it is done.
    pub(super) unsafe fn launch(
        &self,
        function: &Function,
        blocks: u32,
        threads: u32,
        arguments: &mut [u64],
    ) -> Result<(), DeviceError> {
        let mut places: Vec<*mut c_void> =
            arguments.iter_mut().map(|argument| ptr::from_mut(argument).cast()).collect();
        // SAFETY: the driver copies as many bytes of each argument as the kernel declares, at most
        // eight; the caller vouches for their meaning. Little-endian, so the low half comes first.
        let code = unsafe {
            sys::cuLaunchKernel(
                function.raw,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                self.raw,
                places.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        if code == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let text = format!("{}: {}", function.name, text_of(code));
        Err(DeviceError::Failed { operation: "cuLaunchKernel", text })
    }

    /// Calls `wake` when all queued work has ended, with or without success. If this fails, `wake`
    /// is called at most once.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn call(&self, wake: Box<dyn FnOnce() + Send>) -> Result<(), DeviceError> {
        let boxed = Box::into_raw(Box::new(wake));
        // SAFETY: the driver calls it once, even after an error, and hands back the box that is
        // made here. An error told here may be that of an earlier launch, with the call queued all
        // the same: the box is leaked then, not freed.
        let code = unsafe { sys::cuStreamAddCallback(self.raw, Some(woken), boxed.cast(), 0) };
        check("cuStreamAddCallback", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: of this context and not used again; queued work still runs to its end.
        unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

unsafe extern "C" fn woken(_stream: sys::CUstream, _status: CUresult, wake: *mut c_void) {
    // SAFETY: the box of `Stream::call`, handed over once.
    let wake = unsafe { Box::from_raw(wake.cast::<Box<dyn FnOnce() + Send>>()) };
    // Unwinding must not enter the driver; the panic has been reported on standard error.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(wake));
}

/// A mark in a stream.
#[derive(Debug)]
pub(super) struct Event {
    raw: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// An event; `timed` ones cost more and can be measured between.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn new(context: &Arc<Context>, timed: bool) -> Result<Event, DeviceError> {
        context.bind()?;
        let mut raw = ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: writes one handle.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, if timed { 0 } else { flags }) })?;
        Ok(Event { raw, context: Arc::clone(context) })
    }

    /// Queues the event at the end of the stream.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn record(&self, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: both handles are valid.
        check("cuEventRecord", unsafe { sys::cuEventRecord(self.raw, stream.raw) })
    }

    /// Whether all work before it is done.
    ///
    /// # Errors
    /// When some of it failed.
    pub(super) fn is_done(&self) -> Result<bool, DeviceError> {
        self.context.bind()?;
        // SAFETY: a valid handle.
        let code = unsafe { sys::cuEventQuery(self.raw) };
        if code as u32 == NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", code).map(|()| true)
    }

    /// Seconds from this event to a later one; both are timed and done.
    ///
    /// # Errors
    /// When the driver fails.
    pub(super) fn seconds_to(&self, later: &Event) -> Result<f64, DeviceError> {
        let mut milliseconds = 0f32;
        // SAFETY: writes one number.
        let code = unsafe { sys::cuEventElapsedTime(&raw mut milliseconds, self.raw, later.raw) };
        check("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: of this context and not used again.
        unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

/// Memory on the device.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    start: DevicePtr,
    bytes: usize,
    context: Arc<Context>,
}

impl DeviceMemory {
    /// Fresh memory of unspecified content, aligned to 256 bytes.
    ///
    /// # Errors
    /// When there is too little.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        context.bind()?;
        let mut start = 0;
        // SAFETY: writes one address.
        check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut start, bytes.max(1)) })?;
        Ok(DeviceMemory { start, bytes, context: Arc::clone(context) })
    }

    /// Its first byte.
    #[must_use]
    pub(super) fn start(&self) -> DevicePtr {
        self.start
    }

    /// Its length.
    #[must_use]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated here and not used again; the driver waits for what still uses it.
        unsafe { sys::cuMemFree_v2(self.start) };
    }
}

/// Pinned host memory that the device reaches at [`PinnedMemory::device`].
#[derive(Debug)]
pub(super) struct PinnedMemory {
    start: *mut u8,
    bytes: usize,
    device: DevicePtr,
    context: Arc<Context>,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// Fresh zeroed memory, page-aligned.
    ///
    /// # Errors
    /// When there is too little, or pinning is forbidden.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        context.bind()?;
        let bytes = bytes.max(1);
        let mut start = ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: writes one address.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, flags) })?;
        let start = start.cast::<u8>();
        // SAFETY: just allocated with this length.
        unsafe { start.write_bytes(0, bytes) };
        let mut memory = PinnedMemory { start, bytes, device: 0, context: Arc::clone(context) };
        memory.device = context.device_pointer(start)?;
        Ok(memory)
    }

    /// The first byte for the host; the caller must make sure that host and device do not write the same
    /// bytes at a time.
    #[must_use]
    pub(super) fn start(&self) -> *mut u8 {
        self.start
    }

    /// The first byte for the device.
    #[must_use]
    pub(super) fn device(&self) -> DevicePtr {
        self.device
    }

    /// Its length.
    #[must_use]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: allocated here and not used again.
        unsafe { sys::cuMemFreeHost(self.start.cast()) };
    }
}
