//! Kernels from PTX, assembled by the driver in one of two ways. Must not know what they compute.

use std::ffi::{CStr, CString, c_void};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use super::{Context, DevicePtr, check, text_of};
use crate::device::DeviceError;

/// Bytes for the assembler's messages about a kernel.
const LOG_BYTES: usize = 8 << 10;

/// Kernels that the driver has assembled for the device.
#[derive(Debug)]
pub(crate) struct Module {
    raw: sys::CUmodule,
    context: Arc<Context>,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as for Send; a module is only looked up in.
unsafe impl Sync for Module {}

/// A kernel; must not outlive its module.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(super) raw: sys::CUfunction,
    pub(super) name: String,
}

// SAFETY: handles of the driver may be used from any thread.
unsafe impl Send for Function {}
// SAFETY: as for Send.
unsafe impl Sync for Function {}

/// Options that make an assembler explain errors, and the buffer for its text.
struct Log {
    text: Vec<u8>,
    options: [sys::CUjit_option; 2],
    values: [*mut c_void; 2],
}

impl Log {
    fn new() -> Log {
        let mut text = vec![0u8; LOG_BYTES];
        // A size is passed as the pointer's value itself.
        let values = [text.as_mut_ptr().cast(), ptr::without_provenance_mut(LOG_BYTES)];
        let options = [
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ];
        Log { text, options, values }
    }

    fn said(&self) -> String {
        let said: Vec<u8> = self.text.iter().copied().take_while(|&byte| byte != 0).collect();
        String::from_utf8_lossy(&said).trim().to_owned()
    }
}

/// An assembler at work.
struct Linker(sys::CUlinkState);

impl Drop for Linker {
    fn drop(&mut self) {
        // SAFETY: made by cuLinkCreate and not used again.
        unsafe { sys::cuLinkDestroy(self.0) };
    }
}

impl Module {
    /// Assembles PTX, or takes from the driver's cache what was assembled before. Meanwhile the driver
    /// launches nothing in the whole process: while batches run, use [`Module::assembled`]. `name` is for
    /// messages.
    ///
    /// # Errors
    /// With the assembler's messages about the text.
    pub(crate) fn new(context: &Arc<Context>, name: &str, ptx: &str) -> Result<Module, DeviceError> {
        context.bind()?;
        let failed = |text: String| DeviceError::Failed { operation: "cuModuleLoadDataEx", text };
        let text = CString::new(ptx).map_err(|_| failed(format!("{name}: the PTX holds a zero byte")))?;
        let mut log = Log::new();
        let mut raw = ptr::null_mut();
        // SAFETY: the text ends with zero, the options are as many as said, and the log has the
        // length said.
        let code = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                text.as_ptr().cast(),
                log.options.len() as u32,
                log.options.as_mut_ptr(),
                log.values.as_mut_ptr(),
            )
        };
        if code != CUresult::CUDA_SUCCESS {
            return Err(failed(format!("{name}: {} {}", text_of(code), log.said())));
        }
        Ok(Module { raw, context: Arc::clone(context) })
    }

    /// As [`Module::new`], but assembled by the driver's linker, which holds up no launches; loading its
    /// result takes a tenth of a millisecond. (An H200 with driver 580: a launch beside `new` waited for all
    /// of its 95 ms, beside this one for 0.15 ms at most.) Nothing is cached.
    ///
    /// # Errors
    /// With the assembler's messages about the text.
    pub(crate) fn assembled(context: &Arc<Context>, name: &str, ptx: &str) -> Result<Module, DeviceError> {
        context.bind()?;
        let failed = |text: String| DeviceError::Failed { operation: "cuLinkAddData", text };
        let text = CString::new(ptx).map_err(|_| failed(format!("{name}: the PTX holds a zero byte")))?;
        let label = CString::new(name).map_err(|_| failed(format!("{name}: no name of a kernel")))?;
        // Declared before the linker, so dropped after it: the linker writes there as long as it lives.
        let mut log = Log::new();
        let mut state = ptr::null_mut();
        // SAFETY: the options are as many as said, and the log has the length said and outlives the
        // linker.
        let code = unsafe {
            sys::cuLinkCreate_v2(
                log.options.len() as u32,
                log.options.as_mut_ptr(),
                log.values.as_mut_ptr(),
                &raw mut state,
            )
        };
        check("cuLinkCreate", code)?;
        let linker = Linker(state);
        let bytes = text.as_bytes_with_nul();
        // SAFETY: a valid linker, and a text of the given length that ends with zero and is only read.
        let code = unsafe {
            sys::cuLinkAddData_v2(
                linker.0,
                sys::CUjitInputType::CU_JIT_INPUT_PTX,
                bytes.as_ptr().cast_mut().cast(),
                bytes.len(),
                label.as_ptr(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        if code != CUresult::CUDA_SUCCESS {
            return Err(failed(format!("{name}: {} {}", text_of(code), log.said())));
        }
        let (mut image, mut image_bytes) = (ptr::null_mut(), 0usize);
        // SAFETY: a valid linker; writes an address, which is valid as long as the linker, and a
        // length.
        let code = unsafe { sys::cuLinkComplete(linker.0, &raw mut image, &raw mut image_bytes) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(failed(format!("{name}: {} {}", text_of(code), log.said())));
        }
        let mut raw = ptr::null_mut();
        // SAFETY: an image of the driver's own, kept by the linker until after this call.
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut raw, image) })?;
        Ok(Module { raw, context: Arc::clone(context) })
    }

    /// The kernel of a name.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn function(&self, name: &str) -> Result<Function, DeviceError> {
        self.context.bind()?;
        let failed = |text: String| DeviceError::Failed { operation: "cuModuleGetFunction", text };
        let text = CString::new(name).map_err(|_| failed(format!("{name}: no name of a kernel")))?;
        let mut raw = ptr::null_mut();
        // SAFETY: a valid module and a string that ends with zero; writes one handle.
        let code = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw, text.as_ptr()) };
        if code != CUresult::CUDA_SUCCESS {
            return Err(failed(format!("{name}: {}", text_of(code))));
        }
        Ok(Function { raw, name: name.to_owned() })
    }

    /// Address and length of a variable of the module.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn variable(&self, name: &'static CStr) -> Result<(DevicePtr, usize), DeviceError> {
        self.context.bind()?;
        let (mut start, mut bytes) = (0, 0usize);
        // SAFETY: a valid module and a string that ends with zero; writes an address and a size.
        let code =
            unsafe { sys::cuModuleGetGlobal_v2(&raw mut start, &raw mut bytes, self.raw, name.as_ptr()) };
        check("cuModuleGetGlobal", code)?;
        Ok((start, bytes))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind();
        // SAFETY: of this context; callers that launch its functions keep the module until they are done.
        unsafe { sys::cuModuleUnload(self.raw) };
    }
}
