//! Connections to an export, negotiated as the kernel's driver needs them: simple replies, compact
//! headers.
//!
//! Invariant: a socket that leaves here blocks, has no timeouts, and is at its first request: this
//! process holds no unread bytes of the server's. Must not know the kernel's driver.

use calpe_core::nbd::{
    ClientConnection, ClientEvent, ClientFatal, ClientOptions, NbdAddress, NbdUri, RemoteExport,
};
use calpe_core::units::Timestamp;
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// How long one step of connecting and negotiating may take.
const STEP_SECONDS: i64 = 10;

/// Send buffer asked of the kernel: a few of the driver's largest requests, so that it does not
/// wait in the middle of one.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DialError {
    /// Nobody is there.
    #[error("cannot connect to {uri}: {source}")]
    Connect {
        /// Where.
        uri: Box<NbdUri>,
        /// What the system said.
        source: io::Error,
    },
    /// The connection broke during the negotiation.
    #[error("{uri}: the server hung up while the export was negotiated: {source}")]
    Lost {
        /// Where.
        uri: Box<NbdUri>,
        /// What the system said.
        source: io::Error,
    },
    /// The server does not grant the export, or breaks the protocol.
    #[error("{uri}: {source}")]
    Server {
        /// Where.
        uri: Box<NbdUri>,
        /// How.
        source: ClientFatal,
    },
    /// The server sent bytes before the first request.
    #[error("{uri}: the server sent {bytes} bytes that nobody asked for")]
    Chatter {
        /// Where.
        uri: Box<NbdUri>,
        /// How many.
        bytes: usize,
    },
    /// The URI demands TLS, which the kernel's driver does not have.
    #[error(
        "{uri}: devices cannot be attached by TLS, which the kernel's driver does not have: attach over a unix socket or plain TCP, \
         through a tunnel of this host's where the way is not to be trusted"
    )]
    Tls {
        /// Where.
        uri: Box<NbdUri>,
    },
    /// The protocol cannot carry the export's name.
    #[error("{uri}: the export's name is {fault}")]
    Name {
        /// Where.
        uri: Box<NbdUri>,
        /// What is wrong with it.
        fault: calpe_core::nbd::StringFault,
    },
}

/// A connection at its first request.
#[derive(Debug)]
pub(super) struct Dialled {
    /// Its socket.
    pub socket: OwnedFd,
    /// What the server said about the export.
    pub export: RemoteExport,
}

/// A server's address, with names resolved: no name is looked up while a device waits for its
/// server.
#[derive(Clone, Debug)]
pub(super) struct Address {
    uri: Box<NbdUri>,
    tcp: Vec<SocketAddr>,
}

impl Address {
    /// Resolves the host of the URI.
    ///
    /// # Errors
    /// When the name is unknown, or TLS is demanded.
    pub(super) fn resolve(uri: &NbdUri) -> Result<Address, DialError> {
        let tls = uri.tls;
        let address = &uri.address;
        let uri = || Box::new(uri.clone());
        if tls {
            return Err(DialError::Tls { uri: uri() });
        }
        let tcp = match address {
            NbdAddress::Tcp { host, port } => (host.as_str(), *port)
                .to_socket_addrs()
                .map_err(|source| DialError::Connect { uri: uri(), source })?
                .collect(),
            NbdAddress::Unix { .. } => Vec::new(),
        };
        Ok(Address { uri: uri(), tcp })
    }

    /// Connects and negotiates. `timeout_s`: after that many seconds without an answer the kernel
    /// gives the connection up.
    ///
    /// # Errors
    /// When the server does not answer in time, or does not grant the export.
    pub(super) fn dial(&self, timeout_s: u64) -> Result<Dialled, DialError> {
        let lost = |source| DialError::Connect { uri: self.uri.clone(), source };
        match &self.uri.address {
            NbdAddress::Unix { path } => {
                let mut stream = UnixStream::connect(path).map_err(lost)?;
                let export = self.negotiate(&mut stream)?;
                Ok(Dialled { socket: ready(stream.into()).map_err(lost)?, export })
            }
            NbdAddress::Tcp { .. } => {
                let mut stream = self.connect_tcp().map_err(lost)?;
                // Bytes that the server has not acknowledged within this time are not sent any
                // more: so no write arrives after the kernel has sent it again on another
                // connection.
                let half_ms = u32::try_from(timeout_s.saturating_mul(500)).unwrap_or(u32::MAX);
                setsockopt(&stream, sockopt::TcpUserTimeout, &half_ms).map_err(|errno| lost(errno.into()))?;
                let export = self.negotiate(&mut stream)?;
                Ok(Dialled { socket: ready(stream.into()).map_err(lost)?, export })
            }
        }
    }

    fn connect_tcp(&self) -> io::Result<TcpStream> {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in &self.tcp {
            match TcpStream::connect_timeout(address, Duration::from_secs(STEP_SECONDS as u64)) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    setsockopt(&stream, sockopt::KeepAlive, &true)?;
                    return Ok(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn negotiate<S: Read + Write + AsFd>(&self, stream: &mut S) -> Result<RemoteExport, DialError> {
        let uri = || self.uri.clone();
        let lost = |source| DialError::Lost { uri: uri(), source };
        limit(stream, STEP_SECONDS).map_err(lost)?;
        let options = ClientOptions::simple_replies(&self.uri.export)
            .map_err(|fault| DialError::Name { uri: uri(), fault })?;
        let mut connection = ClientConnection::new(options, Timestamp(0))
            .map_err(|fault| DialError::Name { uri: uri(), fault })?;
        let mut input = [0; 4096];
        let mut out = Vec::new();
        loop {
            let got = stream.read(&mut input).map_err(lost)?;
            if got == 0 {
                return Err(lost(io::ErrorKind::UnexpectedEof.into()));
            }
            let mut rest = &input[..got];
            while !rest.is_empty() {
                let taken = connection.receive(rest, &mut out);
                let taken = taken.map_err(|source| DialError::Server { uri: uri(), source })?;
                rest = &rest[taken..];
                if connection.poll_event() == Some(ClientEvent::Ready) {
                    if !rest.is_empty() {
                        return Err(DialError::Chatter { uri: uri(), bytes: rest.len() });
                    }
                    let export = connection.export().expect("the handshake is over");
                    return Ok(export.clone());
                }
            }
            stream.write_all(&out).map_err(lost)?;
            out.clear();
        }
    }
}

/// Makes a socket fit for the kernel.
fn ready(socket: OwnedFd) -> io::Result<OwnedFd> {
    // The driver takes the end of a read timeout for a dead connection.
    limit(&socket, 0)?;
    // The privileged option is not bound by the system's default maximum; neither is vital.
    if setsockopt(&socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        let _ = setsockopt(&socket, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    }
    Ok(socket)
}

/// Limits how long a call may block; 0 means for ever.
fn limit(socket: &impl AsFd, seconds: i64) -> io::Result<()> {
    setsockopt(socket, sockopt::ReceiveTimeout, &TimeVal::seconds(seconds))?;
    setsockopt(socket, sockopt::SendTimeout, &TimeVal::seconds(seconds))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::nbd::{ExportInfo, Exports, ServerConnection};
    use nix::sys::socket::getsockopt;
    use std::os::unix::net::UnixListener;
    use std::thread;

    struct One(ExportInfo);

    impl Exports for One {
        fn list(&self) -> Vec<ExportInfo> {
            vec![self.0.clone()]
        }

        fn find(&self, name: &str) -> Option<ExportInfo> {
            (name == self.0.name).then(|| self.0.clone())
        }
    }

    fn export() -> ExportInfo {
        ExportInfo {
            name: "tank".into(),
            description: "somebody's".into(),
            size: 1 << 20,
            read_only: false,
            block_min: 512,
            block_preferred: 65536,
            block_max: 32 << 20,
            rotational: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
        }
    }

    /// Serves handshakes until the client is gone; `chatter` follows the last one's reply.
    fn serve(path: &std::path::Path, chatter: &'static [u8]) -> thread::JoinHandle<()> {
        let listener = UnixListener::bind(path).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut connection = ServerConnection::new(Timestamp(0));
            let mut out = Vec::new();
            connection.start(&mut out);
            let mut input = [0; 4096];
            loop {
                if stream.write_all(&out).is_err() {
                    return;
                }
                out.clear();
                let Ok(got @ 1..) = stream.read(&mut input) else { return };
                let mut rest = &input[..got];
                while !rest.is_empty() {
                    let (taken, incoming) = connection.receive(rest, &One(export()), &mut out).unwrap();
                    rest = &rest[taken..];
                    if incoming.is_some() {
                        out.extend_from_slice(chatter);
                    }
                }
            }
        })
    }

    fn dial(path: &std::path::Path, name: &str) -> Result<Dialled, DialError> {
        let uri = format!("nbd+unix:///{name}?socket={}", path.display()).parse().unwrap();
        Address::resolve(&uri).unwrap().dial(30)
    }

    #[test]
    fn tls_that_was_asked_for_is_not_left_out() {
        for uri in ["nbds://localhost/a", "nbds+unix:///a?socket=/nowhere"] {
            assert!(matches!(Address::resolve(&uri.parse().unwrap()), Err(DialError::Tls { .. })), "{uri}");
        }
    }

    #[test]
    fn a_socket_for_the_kernel_has_simple_replies_and_no_time_limits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let server = serve(&path, b"");
        let dialled = dial(&path, "tank").unwrap();
        assert!(!dialled.export.structured && dialled.export.base_allocation.is_none());
        assert!(dialled.export.multi_conn && dialled.export.rotational && !dialled.export.read_only);
        assert_eq!(dialled.export.size, 1 << 20);
        for limit in [
            getsockopt(&dialled.socket, sockopt::ReceiveTimeout).unwrap(),
            getsockopt(&dialled.socket, sockopt::SendTimeout).unwrap(),
        ] {
            assert_eq!((limit.tv_sec(), limit.tv_usec()), (0, 0));
        }
        drop(dialled);
        server.join().unwrap();
    }

    #[test]
    fn what_goes_wrong_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(matches!(dial(&path, "tank"), Err(DialError::Connect { .. })));
        let server = serve(&path, b"");
        let error = dial(&path, "tonk").unwrap_err();
        assert!(matches!(&error, DialError::Server { .. }), "{error}");
        server.join().unwrap();
        std::fs::remove_file(&path).unwrap();
        let server = serve(&path, b"hello");
        let error = dial(&path, "tank").unwrap_err();
        assert!(matches!(&error, DialError::Chatter { bytes: 5, .. }), "{error}");
        server.join().unwrap();
    }
}
