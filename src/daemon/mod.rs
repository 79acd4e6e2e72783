//! The daemon: the only owner of threads, sockets, clocks and signals.
//!
//! A reactor thread drives clients and members; control threads open devices, answer administrators and talk to
//! the reactor through a mailbox. Everything below this folder is told the time and handed its bytes.

mod activation;
mod arrays;
mod certificates;
mod changes;
pub mod check;
pub mod clock;
mod commands;
pub mod config;
mod control_server;
mod copies;
pub mod create;
pub(crate) mod drill;
pub mod events;
pub mod gpu;
mod host_memory;
pub mod import;
mod imports;
mod leftovers;
mod log_queue;
pub mod logging;
mod members;
mod memory;
pub mod panic;
pub mod peer;
mod preparation;
mod ranked;
pub mod reactor;
mod reload;
pub mod report;
mod returns;
mod room;
pub mod search;
pub mod serve;
pub mod service;
mod settings;
mod signals;
mod state;
pub mod superblocks;
mod target;
#[cfg(test)]
mod tests;
mod undo;
pub mod up;
mod waiting;

pub use control_server::ControlServer;
pub use reload::certificate_advice;
