//! The cas volume: distinct blocks, stored once, on an array of one lane. See docs/cas.md for how it is built
//! and for the rules that the code names.
//!
//! `place` says which page holds what; `pages` has them in memory and knows where they lie. Must not know of
//! members.

mod pages;
//! `place` says which page holds what, `ledger` what records do to the pages. Must not know of members.

mod ledger;
mod place;
