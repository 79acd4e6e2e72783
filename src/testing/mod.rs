//! Simulated members and seeded workloads that drive the real array and volume code: no threads, no clocks, no
//! files. Used by the project's own tests. May use every layer but `daemon` and `cli`.

mod random;
mod sim;

pub use random::Random;
pub use sim::{SimArray, SimDisk, SimShape};
