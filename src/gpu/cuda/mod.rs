//! Devices on NVIDIA's driver, which is loaded when it is first asked for: a machine without one
//! runs the same binary.
//!
//! `api`: the driver's calls. `memory`: the host memory that the driver knows. `plan`: how a batch
//! becomes copies. `kernels` and `programs`: the code on the device. `device`: the slots in which
//! batches run. `known`: answers that the CPU knows. `raw`: single kernels, for tests. `bench`:
//! measurements. `faults`: failures on purpose.
//!
//! Invariants: a call that fails is an error with the driver's own words; only `device` and `raw`
//! hold memory that the device writes. Must not know of queues, policies or jobs.

#[allow(unsafe_code)] // the driver's calls; each block argues for itself
mod api;
pub mod bench;
mod device;
mod faults;
mod kernels;
mod known;
mod memory;
mod plan;
mod programs;
pub mod raw;
mod tables;
mod tuning;

use std::sync::Arc;

use super::device::{Device, DeviceError, DeviceInfo, Drill, Driver};
use api::Gpu;
use calpe_core::block_io::Pool;

pub use device::CudaDevice;
use faults::Faults;
pub use faults::HANG_SECONDS;
pub use memory::Registered;
pub use tuning::{Method, Tuning};

/// Oldest device that the PTX is for, as 10 times the major number of its compute capability plus
/// the minor one.
const CAPABILITY_MIN: i32 = 80;

/// NVIDIA's devices.
#[derive(Clone, Debug, Default)]
pub struct CudaDriver {
    tuning: Tuning,
    faults: Arc<Faults>,
}

impl CudaDriver {
    /// A driver whose devices are used as `tuning` says.
    #[must_use]
    pub fn new(tuning: Tuning) -> CudaDriver {
        CudaDriver { tuning, faults: Arc::default() }
    }

    /// As [`Driver::open`], with the methods of a [`CudaDevice`].
    ///
    /// # Errors
    /// As [`Driver::open`].
    pub fn open_cuda(&self, index: usize, pools: &[Pool]) -> Result<CudaDevice, DeviceError> {
        CudaDevice::open(index, pools, self.tuning.clone(), Arc::clone(&self.faults))
    }
}

impl Driver for CudaDriver {
    fn devices(&self) -> Result<Vec<DeviceInfo>, DeviceError> {
        let count = Gpu::count()?;
        let mut found = Vec::with_capacity(count);
        for index in 0..count {
            if Gpu::nth(index)?.capability()? >= CAPABILITY_MIN {
                found.push(info(index)?);
            }
        }
        if found.is_empty() {
            let text = format!("none of {count} NVIDIA GPUs has compute capability 8.0 or later");
            return Err(DeviceError::Absent(text));
        }
        Ok(found)
    }

    fn open(&self, index: usize, pools: &[Pool]) -> Result<Box<dyn Device>, DeviceError> {
        Ok(Box::new(self.open_cuda(index, pools)?))
    }

    fn takes_read_only(&self, index: usize) -> bool {
        Gpu::nth(index).and_then(Gpu::takes_read_only).unwrap_or(false)
    }

    fn drill(&self, drill: Drill) {
        self.faults.put(drill);
    }
}

/// What a device is.
fn info(index: usize) -> Result<DeviceInfo, DeviceError> {
    let gpu = Gpu::nth(index)?;
    let version = api::initialise()?;
    let (major, minor) = (version / 1000, version % 1000 / 10);
    // Administrators know the version of the kernel's part; in a container it may be hidden.
    let kernel = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    let driver = format!("{} CUDA {major}.{minor}", kernel.trim()).trim_start().to_owned();
    let hex: String = gpu.uuid()?.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    Ok(DeviceInfo {
        index,
        name: gpu.name()?,
        uuid: format!("GPU-{}", parts.join("-")),
        driver,
        memory_bytes: gpu.memory_bytes()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_driver_says_so_and_nothing_else_happens() {
        match CudaDriver::default().devices() {
            Err(DeviceError::Absent(why)) => assert!(why.contains("NVIDIA"), "{why}"),
            Err(other) => panic!("not a reason to have no device: {other}"),
            Ok(devices) => assert!(!devices.is_empty()),
        }
    }
}
