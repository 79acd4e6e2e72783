//! What Calpe asks of the host in small, for all crates that do I/O.

pub mod files;
pub mod polling;
pub mod reclaim;
