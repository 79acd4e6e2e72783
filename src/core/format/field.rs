//! Fields of a superblock with impossible values, told by the name of the field. Must not know where fields
//! lie.

/// A field with an impossible value: an error when read, a panic when about to be written.
pub(super) struct Fault {
    pub field: &'static str,
    pub found: String,
    pub expected: String,
}

pub(super) fn fault(field: &'static str, found: impl ToString, expected: impl ToString) -> Fault {
    Fault { field, found: found.to_string(), expected: expected.to_string() }
}

pub(super) fn ensure(
    holds: bool,
    field: &'static str,
    found: impl ToString,
    expected: impl ToString,
) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(fault(field, found, expected)) }
}

pub(super) fn coded<T>(field: &'static str, byte: u8, decode: fn(u8) -> Option<T>) -> Result<T, Fault> {
    decode(byte).ok_or_else(|| fault(field, byte, "a code this version knows"))
}

pub(super) fn boolean(field: &'static str, byte: u8) -> Result<bool, Fault> {
    ensure(byte <= 1, field, byte, "0 or 1").map(|()| byte == 1)
}
