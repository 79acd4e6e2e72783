//! Requests of clients: reads, writes, discards, and the fetches that give them the bytes of a row.

pub(in crate::array) mod fetch;
pub(in crate::array) mod notices;
mod plan;
pub(in crate::array) mod read;
pub(in crate::array) mod write;
