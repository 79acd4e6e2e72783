//! Calpe without I/O: everything that decides, as state machines and pure functions.
//!
//! Time, randomness and the outcomes of I/O come in as arguments, so that the simulator in [`testing`]
//! drives the code that serves. See ARCHITECTURE.md for the map of the layers.

pub mod array;
pub mod block_io;
pub mod codec;
pub mod format;
pub mod nbd;
pub mod testing;
pub mod units;
pub mod volume;
