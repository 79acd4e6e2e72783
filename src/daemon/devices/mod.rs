//! Devices before they serve an array: looking for members, reading and writing their superblocks,
//! making new members, opening an array from what was found.
//!
//! Invariant: nothing here needs a running daemon; commands without one use it, too. Must not know
//! of reactors, or of arrays in service.

mod copies;
pub(crate) mod create;
pub(crate) mod import;
pub(crate) mod importable;
pub(crate) mod inspection;
pub(crate) mod lanes;
pub(crate) mod leftovers;
pub(crate) mod looking;
pub(crate) mod places;
pub(crate) mod preparation;
pub(crate) mod room;
pub(crate) mod search;
pub(crate) mod superblocks;
mod undo;
