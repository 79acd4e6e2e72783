//! How the runtime is to use devices. Plain values, filled in by the reader of the configuration
//! file.

use std::time::Duration;

/// Beyond the one row that any fraction above 0 means. The results of a device are stored, so a
/// faulty one must be found soon. A row costs the CPU 5 to 20 microseconds, so the batches of a
/// busy daemon, some megabytes each, cost it milliseconds.
const VERIFY_FRACTION: f64 = 0.001;

/// Settings of the runtime.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuConfig {
    /// Whether they are used.
    pub mode: Mode,
    /// Numbers of the devices to use, as the driver counts; empty for all.
    pub devices: Vec<usize>,
    /// The fraction of the rows of each batch that the CPU computes again and compares, 0 to 1:
    /// above 0 at least one row.
    pub verify: f64,
    /// How long a batch may take before its device counts as hung.
    pub hang_after: Duration,
    /// Together with the number of a batch, it determines which rows are compared.
    pub verify_seed: u64,
    /// The first wait before a failed device is opened again.
    pub reopen_after: Duration,
    /// The longest wait. The wait doubles with every failure, until a device has run for as long as
    /// this; in a process of its own, for ten times the first wait.
    pub reopen_after_max: Duration,
    /// How often a device may be given up before it is left alone. In this process each time leaks the
    /// memory that it may still be using, pinned memory of the host and memory of the device, so there
    /// this is until the next start. In a process of its own it is for `rest`, and a device that has run
    /// for `reopen_after_max` begins anew.
    pub given_up_max: u32,
    /// How long a device in a process of its own is left alone.
    pub rest: Duration,
}

/// Whether devices are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// If there are any.
    #[default]
    Auto,
    /// Never. The runtime is not started.
    Off,
    /// The daemon does not start without one.
    Require,
}

impl Default for GpuConfig {
    fn default() -> GpuConfig {
        GpuConfig {
            mode: Mode::Auto,
            devices: Vec::new(),
            verify: VERIFY_FRACTION,
            hang_after: Duration::from_secs(2),
            verify_seed: 0,
            reopen_after: Duration::from_millis(250),
            reopen_after_max: Duration::from_secs(60),
            given_up_max: 16,
            rest: Duration::from_secs(600),
        }
    }
}
