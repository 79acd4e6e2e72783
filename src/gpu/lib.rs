//! Bulk codec jobs on GPUs: a runtime that takes jobs only where a device is measured to be worth it, gives every one of
//! them back done, and survives whatever becomes of a device.
//!
//! Invariants: a job that was taken is answered exactly once, by a device or by the CPU, with the same bytes; memory
//! that a device may still touch is neither given back nor reused. All that is unsafe about CUDA is below this folder.
//! Must not know of arrays, members or clients.

mod batch;
mod calibrate;
pub mod cuda;
pub mod device;
pub mod fake;
mod manager;
mod metrics;
mod policy;
pub mod ptx;
mod queue;
mod rerun;
mod runtime;
mod self_test;
mod shared;
mod trial;
mod verify;
mod watch;
pub mod xor_program;

pub use calibrate::CalibrationSource;
pub use device::Drill;
pub use metrics::{Decisions, DeviceReport, DeviceState, GpuEvent, GpuEventKind, GpuReport, Latency};
pub use policy::{Class, ClassCosts, Costs, CpuLoad, Crossover, Point};
pub use runtime::{Answer, GpuConfig, GpuError, GpuRuntime, Mode, Tag, check_devices};
