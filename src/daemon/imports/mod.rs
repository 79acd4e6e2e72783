//! How arrays come into service and leave it: by a command, or because the configuration or an
//! earlier import says so.
//!
//! Must not know how requests arrive, nor how arrays are assembled.

pub(crate) mod attempts;
mod configured;
pub(crate) mod export;
pub(crate) mod list;
pub(crate) mod opening;
pub(crate) mod order;
