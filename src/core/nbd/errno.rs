//! The error numbers that may travel in an NBD reply. They are the protocol's, whatever the host calls them.
//!
//! Invariant: a server never sends a number outside this list, and ENOTSUP and EOVERFLOW only where the
//! protocol allows them ([`Errno::allowed_for`], in `transmission.rs`). It must not know where an error came
//! from.

/// An error of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Errno {
    /// EPERM: the export is read-only.
    #[error("operation not permitted")]
    Perm,
    /// EIO: the bytes cannot be read or written.
    #[error("input/output error")]
    Io,
    /// ENOMEM: the peer ran out of memory. Never sent by this server.
    #[error("cannot allocate memory")]
    NoMem,
    /// EINVAL: the request makes no sense here.
    #[error("invalid argument")]
    Inval,
    /// ENOSPC: past the end of the export, or no room behind it.
    #[error("no space left on device")]
    NoSpc,
    /// EOVERFLOW: an unfragmented read is too large.
    #[error("value too large")]
    Overflow,
    /// ENOTSUP: zeroing here is not fast.
    #[error("operation not supported")]
    NotSup,
    /// ESHUTDOWN: the server is stopping.
    #[error("server is shutting down")]
    Shutdown,
}

impl Errno {
    /// The number on the wire.
    #[must_use]
    pub fn code(self) -> u32 {
        match self {
            Errno::Perm => 1,
            Errno::Io => 5,
            Errno::NoMem => 12,
            Errno::Inval => 22,
            Errno::NoSpc => 28,
            Errno::Overflow => 75,
            Errno::NotSup => 95,
            Errno::Shutdown => 108,
        }
    }

    /// What a peer's non-zero number means. Numbers outside the protocol's list read as EINVAL, as it
    /// advises.
    #[must_use]
    pub fn from_code(code: u32) -> Errno {
        match code {
            1 => Errno::Perm,
            5 => Errno::Io,
            12 => Errno::NoMem,
            28 => Errno::NoSpc,
            75 => Errno::Overflow,
            95 => Errno::NotSup,
            108 => Errno::Shutdown,
            _ => Errno::Inval,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Command, Request};
    use super::*;

    const ALL: [Errno; 8] = [
        Errno::Perm,
        Errno::Io,
        Errno::NoMem,
        Errno::Inval,
        Errno::NoSpc,
        Errno::Overflow,
        Errno::NotSup,
        Errno::Shutdown,
    ];

    #[test]
    fn codes_round_trip_and_are_never_zero() {
        for errno in ALL {
            assert_ne!(errno.code(), 0);
            assert_eq!(Errno::from_code(errno.code()), errno);
        }
        assert_eq!(Errno::from_code(9999), Errno::Inval);
    }

    #[test]
    fn enotsup_is_only_for_fast_zero_and_eoverflow_only_for_df() {
        let mut zeroes = Request::new(Command::WriteZeroes, 0, 512);
        assert_eq!(Errno::NotSup.allowed_for(&zeroes), Errno::Inval);
        zeroes.fast_zero = true;
        assert_eq!(Errno::NotSup.allowed_for(&zeroes), Errno::NotSup);
        let mut read = Request::new(Command::Read, 0, 512);
        assert_eq!(Errno::Overflow.allowed_for(&read), Errno::Inval);
        assert_eq!(Errno::NotSup.allowed_for(&read), Errno::Inval);
        read.df = true;
        assert_eq!(Errno::Overflow.allowed_for(&read), Errno::Overflow);
        assert_eq!(Errno::Io.allowed_for(&read), Errno::Io);
    }
}
