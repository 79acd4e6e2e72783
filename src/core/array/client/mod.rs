//! Requests of clients: reads, writes, discards, and where the bytes of a row come from.

pub(in crate::array) mod fetch;
pub(in crate::array) mod notices;
mod plan;
pub(in crate::array) mod read;
pub(in crate::array) mod write;
