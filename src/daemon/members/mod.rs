//! Administrators' requests about members, and members that come back by themselves.
//!
//! Invariant: a device is handed to an array only when it is opened, locked, large enough and has sectors
//! that fit. Must not know how requests arrive.

pub(crate) mod hand_over;
pub(crate) mod in_step;
pub(crate) mod online;
pub(crate) mod own_device;
pub(crate) mod replace;
pub(crate) mod returning;
pub(crate) mod take_out;
pub(crate) mod target;
