//! Simulated members and seeded workloads that drive the real array and volume code: no threads, no clocks, no
//! files. Used by the project's own tests. May use every layer but `daemon` and `cli`.

mod disk;
mod oracle;
mod random;
mod sim;
mod superblocks;

pub use disk::{DiskWrite, Fate, SimDisk, WriteFault};
pub use oracle::{Floor, Oracle, Written, Wrong};
pub use random::Random;
pub use sim::{SimArray, SimShape, SimWorld, Wreck};
