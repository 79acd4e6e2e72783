//! Scenes that tests play with every rule kept, and that `mutations` plays with one rule broken.
#![allow(dead_code)] // with debug assertions alone all of them are played

pub mod page_faults;
pub mod returning;
pub mod rollback;
pub mod trouble;
