//! Metadata pages: stripe map and checksums, their copies on the members, and who holds them.

pub(in crate::array) mod copies;
pub(in crate::array) mod hold;
pub(in crate::array) mod pass;
pub(in crate::array) mod patience;
pub(in crate::array) mod store;
pub(in crate::array) mod stripe_map;
