//! Operations that walk over all slots: rebuild, scrub of data, pages and superblocks, repair; and how a
//! device that was rebuilt takes its place.

pub(in crate::array) mod changeover;
pub(in crate::array) mod page_pass;
pub(in crate::array) mod page_scrub;
pub(in crate::array) mod rebuild;
pub(in crate::array) mod repair;
pub(in crate::array) mod schedule;
mod slot_hold;
pub(in crate::array) mod super_scrub;
mod verify;
pub(in crate::array) mod walk;
