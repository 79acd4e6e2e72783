//! The arrays of a daemon: which are served, which are awaited, what is remembered of them, what
//! the configuration says of them.
//!
//! Invariant: each file keeps its state behind locks of its own, which a thread takes in the order
//! of their ranks (`daemon/ranked.rs`). Must not know what administrators ask for.
//!
//! The ranks of the daemon's locks, in that order: 0 the giving up of awaited arrays (`awaited`), 1
//! the handing over of members that come back (`returns`), 2 the sections of the configuration
//! (`settings`), 3 the arrays in service (`served`), 4 the awaited arrays (`awaited`), 5 the
//! records of members that are away (`returns`), 6 the places of searches (`settings`), 7 what is
//! remembered (`memory`), 8 the certificates (`daemon/service.rs`), 9 the addresses of listeners
//! (`registry`), 10 the reports at the stop (`daemon/service.rs`), 11 the exported arrays
//! (`awaited`).

pub(crate) mod awaited;
pub(crate) mod away;
pub(crate) mod changes;
pub(crate) mod configure;
pub(crate) mod held;
pub(crate) mod memory;
pub(crate) mod meters;
pub(crate) mod names;
pub(crate) mod outcome;
pub(crate) mod registry;
mod report;
pub(crate) mod returns;
pub(crate) mod serve;
pub(crate) mod served;
pub(crate) mod settings;
pub(crate) mod waiting;
