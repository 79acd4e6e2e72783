//! Simulated members and seeded workloads that drive the real array and volume code: no threads, no clocks, no
//! files. Used by the project's own tests. May use every layer but `daemon` and `cli`.

mod atlas;
mod disk;
mod explorer;
mod logs;
mod oracle;
mod presence;
mod random;
mod scenarios;
mod sim;
mod superblocks;
mod workload;

pub use crate::array::mutation::Mutation;
pub use atlas::{Aim, AtlasTotals, Damage, Place, atlas};
pub use disk::{DiskWrite, Fate, SimDisk, WriteFault};
pub use explorer::{Next, Promise, Scenario, Totals, Violation, explore, replay};
pub use oracle::{Floor, Oracle, Written, Wrong};
pub use random::Random;
pub use scenarios::{SCENARIOS, WRITE_HOLE, scenario_of};
pub use sim::{SimArray, SimShape, SimWorld, Wreck};
pub use workload::{Run, Workload};
