//! The redo log while the array serves: batches, what they hold until it is in place, checkpoints.

mod checkpoint;
pub(in crate::array) mod facts;
pub(in crate::array) mod journal;
pub(in crate::array) mod life;
mod overlay;
pub(in crate::array) mod redo;
mod settle;
pub(in crate::array) mod state;
