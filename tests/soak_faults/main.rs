//! Members that err, hang and lose what was not flushed: the server of the tests' own that makes them do so, and its tests.

#[path = "../support/fault_server/mod.rs"]
mod fault_server;
mod server;
#[path = "../support/mod.rs"]
mod support;
