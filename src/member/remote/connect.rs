//! Makes connections, on which requests can be submitted, from a URI. Blocks, for a limited time, so call it
//! only from threads that may block.
//!
//! The steps are: address -> connected stream -> handshake -> [`Link`]. A stream is any descriptor that
//! carries bytes both ways, so an encrypting layer can replace the socket before the handshake or in the
//! middle of it. Must not know what the connections are for.

use super::link::{Link, LinkError, Sink};
use super::{RemoteError, RemoteLimits, secure};
use crate::tls::TlsFailure;
use calpe_core::nbd::{
    ClientConnection, ClientEvent, ClientOptions, Command, NbdAddress, NbdUri, RemoteExport, Request,
};
use calpe_core::units::Timestamp;
use calpe_host::polling;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_socket, setsockopt, socket, sockopt,
};
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Connections to a server that keeps several coherent: with more of them the server uses more cores, and TCP
/// more of a fast network. One is enough for most servers.
const CONNECTIONS: usize = 4;

/// A TCP connection without traffic is probed after this many seconds, ...
const KEEPALIVE_IDLE_SECONDS: u32 = 5;
/// ... again after this many, ...
const KEEPALIVE_INTERVAL_SECONDS: u32 = 2;
/// ... and given up after this many probes.
const KEEPALIVE_PROBES: u32 = 3;

/// Pause between two attempts to connect to a unix socket whose backlog is full.
const BACKLOG_WAIT: Duration = Duration::from_millis(10);

/// Checks the export of the first connection before the others are made.
pub(super) type Look<'a> = &'a mut dyn FnMut(&mut Reader<'_>) -> Result<(), RemoteError>;

/// Makes as many connections as the server benefits from. All of them describe the same export.
pub(super) fn connect(uri: &NbdUri, limits: &RemoteLimits, look: Look<'_>) -> Result<Vec<Link>, RemoteError> {
    let deadline = Deadline::after(limits.connect);
    let mut first = connect_one(uri, limits, &deadline)?;
    look(&mut Reader { link: &mut first, deadline: &deadline })?;
    let export = first.export().expect("ready").clone();
    let mut links = vec![first];
    while export.multi_conn && links.len() < CONNECTIONS {
        match connect_one(uri, limits, &deadline) {
            Ok(link) if same_export(link.export().expect("ready"), &export) => links.push(link),
            Ok(_) => {
                let what = "its connections describe different exports";
                return Err(RemoteError::Changed(what.into()));
            }
            // A server may allow fewer connections at a time.
            Err(error) => {
                tracing::debug!(%uri, %error, connections = links.len(), "no further connection");
                break;
            }
        }
    }
    Ok(links)
}

/// Whether two connections describe the same export. What each negotiated for itself may differ.
fn same_export(one: &RemoteExport, other: &RemoteExport) -> bool {
    let facts =
        |e: &RemoteExport| (e.size, e.read_only, e.flush, e.fua, e.multi_conn, e.block_min, e.block_max);
    facts(one) == facts(other)
}

/// Blocking reads on a connection that nothing else uses.
pub(super) struct Reader<'a> {
    link: &'a mut Link,
    deadline: &'a Deadline,
}

impl Reader<'_> {
    pub(super) fn export(&self) -> &RemoteExport {
        self.link.export().expect("the handshake is over")
    }

    /// Fills `target` from `offset`; both keep to the blocks of the export.
    pub(super) fn read(&mut self, offset: u64, target: &mut [u8]) -> Result<(), RemoteError> {
        let request = Request::new(Command::Read, offset, target.len() as u64);
        let refused = |source| RemoteError::Request { doing: "a read", source };
        self.link.submit(&request, None).map_err(|error| refused(io::Error::other(error)))?;
        let mut sink = OneRead { offset, target, done: None };
        drive(self.link, self.deadline, "reading from it", &mut sink, |sink| sink.done.is_some())?;
        let result = sink.done.expect("that is what was waited for");
        result.map_err(|text| refused(io::Error::other(text)))
    }
}

struct OneRead<'a> {
    offset: u64,
    target: &'a mut [u8],
    done: Option<Result<(), String>>,
}

impl Sink for OneRead<'_> {
    fn target(&mut self, _cookie: u64, offset: u64, len: usize) -> &mut [u8] {
        let at = (offset - self.offset) as usize;
        &mut self.target[at..at + len]
    }

    fn event(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Hole { cookie, offset, length } => {
                self.target(cookie, offset, length as usize).fill(0);
            }
            ClientEvent::Done { result, .. } => self.done = Some(result.map_err(|e| e.to_string())),
            _ => {}
        }
    }
}

fn connect_one(uri: &NbdUri, limits: &RemoteLimits, deadline: &Deadline) -> Result<Link, RemoteError> {
    let tls = secure::tls_of(uri)?;
    let stream = match &uri.address {
        NbdAddress::Tcp { host, port } => tcp(host, *port, limits, deadline)?,
        NbdAddress::Unix { path } => unix(path, deadline)?,
    };
    let mut options = ClientOptions::for_export(&uri.export)
        .map_err(|fault| RemoteError::Connect(io::Error::other(fault)))?;
    options.tls = tls.is_some();
    // The deadline is kept here, so the connection needs no clock.
    let nbd = ClientConnection::new(options, Timestamp(0))
        .map_err(|fault| RemoteError::Connect(io::Error::other(fault)))?;
    let mut link = Link::new(stream, nbd);
    let mut greeted = Greeted::default();
    drive(&mut link, deadline, "greeting it", &mut greeted, |greeted| greeted.ready || greeted.tls)?;
    if let (false, Some(tls)) = (greeted.ready, &tls) {
        link = link.secure(|stream| secure::start(uri, tls, stream))?;
        drive(&mut link, deadline, "setting up TLS with it", &mut greeted, |greeted| greeted.ready)?;
    }
    Ok(link)
}

/// State of a handshake.
#[derive(Default)]
struct Greeted {
    /// The server grants TLS.
    tls: bool,
    /// The handshake is over.
    ready: bool,
}

impl Sink for Greeted {
    fn target(&mut self, _: u64, _: u64, _: usize) -> &mut [u8] {
        unreachable!("a handshake has no payload")
    }

    fn event(&mut self, event: ClientEvent) {
        self.ready |= event == ClientEvent::Ready;
        self.tls |= event == ClientEvent::StartTls;
    }
}

/// Sends and receives until `over`.
fn drive<S: Sink>(
    link: &mut Link,
    deadline: &Deadline,
    doing: &'static str,
    sink: &mut S,
    over: impl Fn(&S) -> bool,
) -> Result<(), RemoteError> {
    loop {
        link.send().map_err(|error| lost(link, error))?;
        if over(sink) {
            return Ok(());
        }
        let left = deadline.left(doing)?;
        let mut events = PollFlags::POLLIN;
        if link.out_bytes() > 0 {
            events |= PollFlags::POLLOUT;
        }
        match poll(&mut [PollFd::new(link.fd(), events)], poll_timeout(left)) {
            Ok(0) => continue,
            Ok(_) => {}
            Err(errno) if polling::survives(errno as i32, "a connection to a remote member") => continue,
            Err(errno) => return Err(RemoteError::Lost(errno.into())),
        }
        link.receive(sink).map_err(|error| lost(link, error))?;
    }
}

fn lost(link: &Link, error: LinkError) -> RemoteError {
    match (error, link.tls_failure()) {
        (LinkError::Protocol(fatal), _) => RemoteError::Protocol(fatal),
        // An error of the network, not of the protocol.
        (_, Some(TlsFailure::Lost(errno))) => RemoteError::Lost((*errno).into()),
        (_, Some(failure)) => RemoteError::Tls(failure.to_string()),
        (LinkError::Closed | LinkError::Stopping, None) => {
            RemoteError::Lost(io::Error::from(io::ErrorKind::UnexpectedEof))
        }
        (LinkError::Io(source), None) => RemoteError::Lost(source),
    }
}

/// Rounded up, so that the deadline has passed when the wait ends.
pub(super) fn poll_timeout(left: Duration) -> PollTimeout {
    let millis = left.as_millis().saturating_add(1);
    PollTimeout::from(u16::try_from(millis).unwrap_or(u16::MAX))
}

fn tcp(host: &str, port: u16, limits: &RemoteLimits, deadline: &Deadline) -> Result<OwnedFd, RemoteError> {
    let resolve = |source| RemoteError::Resolve { host: host.into(), source };
    let addresses: Vec<_> = (host, port).to_socket_addrs().map_err(resolve)?.collect();
    let mut last = resolve(io::Error::from(io::ErrorKind::NotFound));
    for (at, address) in addresses.iter().enumerate() {
        // Each address gets an equal fraction of the time: one that swallows packets must not hide
        // the next.
        let left = deadline.left("connecting")? / (addresses.len() - at) as u32;
        match TcpStream::connect_timeout(address, left) {
            Ok(stream) => {
                stream.set_nonblocking(true).map_err(RemoteError::Connect)?;
                tune(&stream, limits).map_err(RemoteError::Connect)?;
                return Ok(stream.into());
            }
            Err(source) => last = RemoteError::Connect(source),
        }
    }
    Err(last)
}

/// Sets options so that small requests are sent at once and a vanished peer is noticed.
fn tune(stream: &TcpStream, limits: &RemoteLimits) -> io::Result<()> {
    setsockopt(stream, sockopt::TcpNoDelay, &true)?;
    setsockopt(stream, sockopt::KeepAlive, &true)?;
    setsockopt(stream, sockopt::TcpKeepIdle, &KEEPALIVE_IDLE_SECONDS)?;
    setsockopt(stream, sockopt::TcpKeepInterval, &KEEPALIVE_INTERVAL_SECONDS)?;
    setsockopt(stream, sockopt::TcpKeepCount, &KEEPALIVE_PROBES)?;
    let millis = u32::try_from(limits.unacknowledged().as_millis()).unwrap_or(u32::MAX);
    setsockopt(stream, sockopt::TcpUserTimeout, &millis)?;
    Ok(())
}

/// Connects without blocking in the kernel: a listener whose backlog is full would block for ever.
fn unix(path: &str, deadline: &Deadline) -> Result<OwnedFd, RemoteError> {
    let fail = |errno: Errno| RemoteError::Connect(errno.into());
    let address = UnixAddr::new(path).map_err(fail)?;
    loop {
        let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
        let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None).map_err(fail)?;
        match connect_socket(stream.as_fd().as_raw_fd(), &address) {
            Ok(()) => return Ok(stream),
            Err(Errno::EAGAIN | Errno::EINTR) => {
                std::thread::sleep(BACKLOG_WAIT.min(deadline.left("connecting")?));
            }
            Err(errno) => return Err(fail(errno)),
        }
    }
}

/// The time by which something must have ended.
#[derive(Debug)]
pub(super) struct Deadline {
    at: Instant,
    whole: Duration,
}

impl Deadline {
    pub(super) fn after(whole: Duration) -> Deadline {
        Deadline { at: Instant::now() + whole, whole }
    }

    fn left(&self, doing: &'static str) -> Result<Duration, RemoteError> {
        let left = self.at.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RemoteError::Timeout { doing, seconds: self.whole.as_secs().max(1) });
        }
        Ok(left)
    }
}
