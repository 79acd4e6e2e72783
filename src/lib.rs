//! Calpe: a software RAID in user space. See ARCHITECTURE.md for the map of the layers.

pub mod array;
pub mod attach;
pub mod block_io;
pub mod cli;
pub mod codec;
pub mod control;
pub mod daemon;
pub mod files;
pub mod format;
pub mod gpu;
pub mod member;
pub mod nbd;
pub mod polling;
pub mod reclaim;
pub mod testing;
pub mod tls;
pub mod units;
pub mod volume;
