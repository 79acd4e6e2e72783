//! Members that come, leave and are judged: superblocks and epochs, administration, bad blocks, assembly.

pub(in crate::array) mod admin;
pub mod assembly;
pub(in crate::array) mod bad_blocks;
mod check;
mod current;
mod departed;
mod endless_errors;
mod faults;
mod outlook;
pub(in crate::array) mod ring_check;
pub(in crate::array) mod supers;
pub(in crate::array) mod waiting;
