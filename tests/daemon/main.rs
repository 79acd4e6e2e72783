//! The daemon and the command line as processes, against real NBD clients and servers; and the rules that the
//! sources themselves keep.

mod absent;
mod access;
mod administration;
mod advice;
mod bad_input;
mod blank_pages;
mod changeover;
mod check;
mod clients;
mod command_line;
mod create_failures;
mod damage;
mod durability;
mod first_creation;
mod floods;
mod full_storage;
mod gpu;
mod hostile_clients;
mod hung_members;
mod lanes;
mod malformed;
mod older_copies;
mod recover;
mod refused_start;
mod reload;
mod remembered;
mod remote;
mod replacements;
mod scrubs;
mod shortage;
mod silent;
mod spread;
#[path = "../support/mod.rs"]
mod support;
mod telling;
mod tidy;
mod tls;
mod units;
mod unreadable;
mod unwritable;
