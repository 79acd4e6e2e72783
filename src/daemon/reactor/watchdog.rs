//! Tells a supervisor that the reactor's loop turns (WATCHDOG_USEC of sd_notify(3)). The loop itself sends
//! the message, so a stuck loop is silent whatever other threads do. Never waits for the supervisor.

use calpe_core::units::Timestamp;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Watchdog {
    socket: UnixDatagram,
    /// Half of the time that the supervisor waits.
    every: Duration,
    last: Option<Timestamp>,
}

impl Watchdog {
    /// The watchdog that the environment asks for, if any.
    pub(super) fn from_environment() -> Option<Watchdog> {
        let limit = sd_notify::watchdog_enabled()?;
        let address = std::env::var_os("NOTIFY_SOCKET")?;
        let told = Watchdog::new(address.as_bytes(), limit);
        told.inspect_err(|error| tracing::warn!(%error, "the supervisor cannot be told that all is well"))
            .ok()
    }

    /// `limit`: the supervisor acts after this long without a message.
    fn new(address: &[u8], limit: Duration) -> io::Result<Watchdog> {
        let address = match address.strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name)?,
            None => SocketAddr::from_pathname(std::path::Path::new(std::ffi::OsStr::from_bytes(address)))?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_nonblocking(true)?;
        socket.connect_addr(&address)?;
        Ok(Watchdog { socket, every: limit / 2, last: None })
    }

    /// Called at each turn of the loop.
    pub(super) fn turn(&mut self, now: Timestamp) {
        let due = self.last.is_none_or(|last| now.nanos_since(last) >= self.every.as_nanos() as u64);
        // If the send fails, the next turn tries again.
        if due && self.socket.send(b"WATCHDOG=1").is_ok() {
            self.last = Some(now);
        }
    }

    /// The longest that the loop may wait.
    pub(super) fn wait_max(&self) -> Duration {
        self.every / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_supervisor_hears_of_a_loop_that_turns_and_no_more_often_than_it_needs() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let supervisor = UnixDatagram::bind(&path).unwrap();
        supervisor.set_nonblocking(true).unwrap();
        let mut watchdog = Watchdog::new(path.as_os_str().as_bytes(), Duration::from_secs(10)).unwrap();
        let mut heard = Vec::new();
        for tenth in 0..200 {
            watchdog.turn(Timestamp(1 + tenth * 100_000_000));
            let mut message = [0; 64];
            if let Ok(len) = supervisor.recv(&mut message) {
                assert_eq!(&message[..len], b"WATCHDOG=1");
                heard.push(tenth);
            }
        }
        assert_eq!(heard, [0, 50, 100, 150]);
    }

    #[test]
    fn a_supervisor_that_does_not_listen_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let supervisor = UnixDatagram::bind(&path).unwrap();
        let mut watchdog = Watchdog::new(path.as_os_str().as_bytes(), Duration::from_nanos(2)).unwrap();
        (1..100_000).for_each(|nanos| watchdog.turn(Timestamp(nanos)));
        drop(supervisor);
        watchdog.turn(Timestamp(200_000));
    }
}
