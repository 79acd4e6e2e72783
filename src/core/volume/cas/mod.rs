//! The cas volume: distinct blocks, stored once, on an array of one lane. See docs/cas.md for how it is built
//! and for the rules that the code names.
//!
//! `place` says which page holds what. Must not know of members.

mod place;
