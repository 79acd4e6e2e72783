//! Simulated members and seeded workloads that drive the real array and volume code: no threads, no clocks,
//! no files. Used by the project's own tests. May use every layer but `daemon` and `cli`.

mod atlas;
mod beyond;
mod disk;
mod elsewhere;
mod explorer;
mod fate;
mod faults;
#[cfg(test)]
mod lane_model;
mod logs;
mod noise;
mod old_copies;
mod oracle;
mod outlook;
mod peace;
mod presence;
mod random;
mod reads;
mod refused;
mod regions;
#[cfg(test)]
mod round_model;
mod samples;
mod scenario;
mod scenarios;
mod sicken;
mod sickness;
mod sim;
mod superblocks;
mod watch;
mod workload;
mod wrong_reads;

pub use crate::array::mutation::Mutation;
pub use atlas::{Aim, AtlasTotals, Damage, Place, atlas};
pub use disk::{DiskCopy, DiskWrite, SimDisk, WriteFault};
pub use explorer::{Totals, Violation, explore, replay};
pub use fate::Fate;
pub use faults::{Lasts, OpKinds, PassingFault, Trouble};
pub use noise::Noise;
pub use oracle::{Floor, Oracle, Written, Wrong};
pub use random::Random;
pub use refused::Refused;
pub use regions::DiskRegion;
pub use samples::{bare_member, small_array};
pub use scenario::{Next, Scenario};
pub use scenarios::{FAULT_RULES, SCENARIOS, Standing, is_kept, scenario_of};
pub use sickness::{FaultCounts, FaultKind, FaultKinds};
pub use sim::{HungEnd, SimArray, SimShape, SimWorld, Wreck};
pub use superblocks::Claim;
pub use workload::{Run, Workload};
pub use wrong_reads::wrong_read_elsewhere;
