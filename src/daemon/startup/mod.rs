//! The life of the process: from a configuration, or the options of `up`, to a clean stop; signals,
//! sockets of a supervisor, a configuration that is read again, panics.
//!
//! Must not know what administrators' requests do.

mod activation;
pub(crate) mod error;
mod lifetime;
pub(crate) mod panic;
pub(crate) mod reload;
pub(crate) mod serve;
mod signals;
mod tls;
pub(crate) mod up;
