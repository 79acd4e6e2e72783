//! Devices in processes of their own, so that a driver that crashes, hangs or leaks costs a process that is
//! started again, and never the daemon.
//!
//! The daemon's side: `driver` and `remote` are a [`Driver`](crate::device::Driver) and its devices like any
//! others; `process` starts and attends a process, `link` is what is known of its batches. The helper's side:
//! `server`, after `sandbox` has cut it off; `drill` makes it fail in tests. Between them: `messages` on a
//! socket, and batches as `parcel`s in an `exchange` with two `ring`s and a bell for each.
//!
//! Invariants: the daemon never waits for a helper and believes nothing that it writes: every word, length
//! and message is checked, and everything is copied before it is used. A helper maps request memory to read
//! it, and writes to the exchange alone; the daemon copies outputs from there once a batch is no longer the
//! helper's. So a batch can be taken back at any time, whatever its helper still does.

#[cfg(debug_assertions)]
mod drill;
mod driver;
mod exchange;
mod lines;
mod link;
mod messages;
mod parcel;
mod process;
mod remote;
mod ring;
mod sandbox;
mod server;

pub use driver::HelperDriver;
pub use process::HelperCommand;
pub use server::serve;
