//! Bulk codec jobs on GPUs: a runtime that takes jobs only where a device is measured to be faster,
//! answers every job that it takes, and survives any failure of a device.
//!
//! Invariants: a job that was taken is answered exactly once, by a device or by the CPU, with the
//! same bytes; memory that a device may still touch is neither freed nor reused. All unsafe code
//! about CUDA is below this folder. Must not know of arrays, members or clients.

mod alarm;
mod answer;
mod batch;
mod calibrate;
mod config;
pub mod cuda;
pub mod device;
pub mod fake;
pub mod helper;
mod lane;
mod manager;
mod metrics;
mod policy;
mod ptx;
mod queue;
mod rerun;
mod runtime;
mod self_test;
mod shared;
mod tasks;
mod trial;
mod verify;
mod watch;
mod xor_program;

pub use answer::{Answer, Tag};
pub use calibrate::CalibrationSource;
pub use config::{GpuConfig, Mode};
pub use device::Drill;
pub use metrics::{Decisions, DeviceReport, DeviceState, GpuEvent, GpuEventKind, GpuReport, Latency};
pub use policy::{Class, ClassCosts, Costs, CpuLoad, Crossover, Point};
pub use runtime::check_devices;
pub use runtime::{GpuError, GpuRuntime};
