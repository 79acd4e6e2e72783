//! Reactors: each is one thread, one io_uring, any number of arrays, their members, and any number of
//! clients, also of arrays that other reactors own.
//!
//! `event_loop` carries orders from `clients` to `arrays` and their outcomes back; between reactors they are
//! posts (`mailbox`). The first reactor accepts connections, and deals clients out to all (`peers`). All
//! see the arrays of all in the `directory`. Other threads talk to reactors through `handle`. Modules depend
//! on one another in one direction: `clients` reads what is listed of arrays, `arrays` knows no connection.
//!
//! Invariants: `sockets` and the members of `arrays` own the memory that the kernel works on; a request given
//! to a volume is answered exactly once, or its array is gone. With one reactor nothing is ever posted.

mod access;
mod administration;
mod admission;
mod arrays;
mod clients;
mod connection;
mod connections;
mod departures;
mod directory;
mod edges;
mod error;
mod event_loop;
mod fence;
mod handle;
mod hosted;
mod job_pool;
mod jobs;
mod joins;
mod large;
mod link;
mod listener;
mod listeners;
mod long;
mod long_line;
mod mailbox;
mod order;
mod orders;
mod peers;
mod ranges;
mod reads;
mod seats;
mod shares;
mod sockets;
mod stopping;
mod sys;
#[cfg(test)]
mod tests;
mod touched;
mod tunnels;
mod watchdog;

pub(crate) use admission::network_places;
pub(crate) use error::ReactorError;
pub(crate) use event_loop::ReactorConfig;
pub(crate) use handle::ReactorHandle;
pub(crate) use listener::{ListenAddress, ListenError, ListenTls, Listener};
pub(crate) use mailbox::{ArrayFacts, NewArray, NewLane};
pub(crate) use orders::ArrayId;

pub(crate) use sys::exit_at_once;
