//! The daemon: the only owner of threads, sockets, clocks and signals.
//!
//! A reactor thread drives clients and members; control threads open devices, answer administrators and talk
//! to the reactor through a mailbox. Everything below this folder gets the time and its bytes as arguments.

pub(crate) mod arrays;
mod certificates;
pub(crate) mod check;
pub(crate) mod clock;
mod commands;
pub(crate) mod config;
mod control_server;
pub(crate) mod devices;
pub(crate) mod drill;
mod events;
pub(crate) mod gpu;
mod host_memory;
mod imports;
pub(crate) mod logging;
mod members;
mod passes;
pub(crate) mod peer;
mod ranked;
pub(crate) mod reactor;
mod service;
pub(crate) mod startup;
mod state;
#[cfg(test)]
mod tests;

pub use devices::superblocks::read_superblock;
