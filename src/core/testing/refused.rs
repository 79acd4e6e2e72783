//! The refusal of an administrator's request, as tests look at it.

use crate::volume::AdminRefusal;
use std::fmt;

/// A refusal: the text that the administrator reads, and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused(pub String, pub AdminRefusal);

impl From<AdminRefusal> for Refused {
    fn from(refusal: AdminRefusal) -> Refused {
        Refused(refusal.to_string(), refusal)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
