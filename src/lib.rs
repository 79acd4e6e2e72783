//! Calpe: a software RAID in user space. See ARCHITECTURE.md for the map of the layers.

mod attach;
pub mod cli;
pub mod control;
pub mod daemon;
pub mod member;
pub mod tls;

pub use calpe_core::{codec, units};
