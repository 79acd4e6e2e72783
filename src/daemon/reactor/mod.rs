//! The reactor: one thread, one io_uring, any number of arrays, their clients and their members.
//!
//! `event_loop` carries orders from `clients` to `arrays` and their outcomes back. Other threads talk to it
//! through `handle`. Modules depend on one another in one direction: `clients` reads what arrays export,
//! `arrays` knows no connection.
//!
//! Invariants: `sockets` and the members of `arrays` own the memory that the kernel works on; a request given
//! to a volume is answered exactly once, or its array is gone.

mod access;
mod administration;
mod admission;
mod arrays;
mod clients;
mod connection;
mod connections;
mod edges;
mod event_loop;
mod handle;
mod jobs;
mod large;
mod link;
mod listener;
mod listeners;
mod long;
mod long_line;
mod mailbox;
mod order;
mod orders;
mod ranges;
mod seats;
mod shares;
mod sockets;
mod stopping;
mod sys;
#[cfg(test)]
mod tests;
mod tunnels;
mod watchdog;

pub(crate) use admission::network_places;
pub(crate) use event_loop::ReactorConfig;
pub(crate) use handle::ReactorHandle;
pub(crate) use listener::{ListenAddress, ListenError, ListenTls, Listener};
pub(crate) use mailbox::{ArrayFacts, NewArray, ReactorError};
pub(crate) use orders::ArrayId;

pub(crate) use sys::exit_at_once;
