//! Messages as lines: one JSON value and one newline, with a limit on the length in each direction.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, BufRead, Read, Write};

/// Longest request: a few hundred paths of the longest kind.
pub const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Longest reply: the status of a thousand wide arrays, or all events kept, with room to spare.
pub const MAX_REPLY_BYTES: usize = 64 << 20;

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection.
    #[error("connection failed: {0}")]
    Io(#[from] io::Error),
    /// The peer went away in the middle of a line.
    #[error("connection ended in the middle of a message")]
    Cut,
    /// The line is longer than allowed; the connection cannot be used any more.
    #[error("message is longer than {limit} bytes")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// The line is not a message. The next line may be one.
    #[error("message is not understood: {0}")]
    Malformed(#[from] serde_json::Error),
}

/// Reads one message; none when the peer ended the connection between messages.
///
/// # Errors
/// When the connection fails, or the line is too long or no message.
pub fn read_message<T: DeserializeOwned>(
    reader: &mut impl BufRead,
    limit: usize,
) -> Result<Option<T>, WireError> {
    let mut line = Vec::new();
    reader.take(limit as u64 + 1).read_until(b'\n', &mut line)?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) if line.len() >= limit => Err(WireError::TooLong { limit }),
        Some(_) => Err(WireError::Cut),
    }
}

/// Writes one message and flushes.
///
/// # Errors
/// When the connection fails.
pub fn write_message<T: Serialize>(writer: &mut impl Write, message: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    writer.write_all(&line)?;
    writer.flush()
}

#[cfg(test)]
mod tests {
    use super::super::{Request, ScrubAction};
    use super::*;
    use proptest::prelude::*;

    fn read(bytes: &[u8], limit: usize) -> Result<Option<Request>, WireError> {
        read_message(&mut &bytes[..], limit)
    }

    #[test]
    fn messages_follow_each_other_and_end() {
        let first = Request::Ping { version: 1 };
        let second = Request::Scrub { array: "a\nb".into(), action: ScrubAction::Pause, dry_run: false };
        let mut bytes = Vec::new();
        write_message(&mut bytes, &first).unwrap();
        write_message(&mut bytes, &second).unwrap();
        assert_eq!(bytes.iter().filter(|&&byte| byte == b'\n').count(), 2, "newlines are escaped");
        let mut reader = &bytes[..];
        assert_eq!(read_message(&mut reader, 100).unwrap(), Some(first));
        assert_eq!(read_message(&mut reader, 100).unwrap(), Some(second));
        assert_eq!(read_message::<Request>(&mut reader, 100).unwrap(), None);
    }

    #[test]
    fn a_bad_line_does_not_spoil_the_next() {
        let mut reader = &b"nonsense\n{\"request\":\"ping\",\"version\":1}\n"[..];
        assert!(matches!(read_message::<Request>(&mut reader, 100), Err(WireError::Malformed(_))));
        assert_eq!(read_message(&mut reader, 100).unwrap(), Some(Request::Ping { version: 1 }));
    }

    #[test]
    fn cut_and_overlong_lines_are_told_apart() {
        let line = b"{\"request\":\"ping\",\"version\":1}\n";
        assert!(matches!(read(&line[..10], 100), Err(WireError::Cut)));
        assert!(matches!(read(line, line.len() - 2), Err(WireError::TooLong { .. })));
        assert!(read(line, line.len() - 1).is_ok(), "the limit does not count the newline");
        assert!(matches!(read(&[b'x'; 1000], 100), Err(WireError::TooLong { limit: 100 })));
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..300), limit in 1usize..200) {
            let _ = read(&bytes, limit);
        }
    }
}
