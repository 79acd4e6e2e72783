//! Calpe: a software RAID in user space. See ARCHITECTURE.md for the map of the layers.

pub mod block_io;
pub mod control;
pub mod daemon;
pub mod format;
pub mod member;
pub mod nbd;
pub mod units;
pub mod volume;
