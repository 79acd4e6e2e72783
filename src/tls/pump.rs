//! Pumps: a thread per connection that runs TLS between a network socket and one end of a plain socket pair.
//!
//! Invariants: what is held between the two sides is bounded by [`CHUNK_BYTES`] a stage, and a side is read only when
//! what was read before has left. What TLS authenticated reaches the plain side in order; nothing else does. When the
//! network is gone, the plain socket is shut down at once, with what it could not take: whoever reads it must not
//! believe that a client is still there. The thread ends with either side, and in bounded time with a peer that does
//! nothing. Must not know NBD.

use super::identity::{ClientTls, Current, ServerTls};
use super::peer::Peer;
use super::refusals::tell_refusal;
use calpe_host::polling;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, Shutdown, SockFlag, SockType, recv, send, sendmsg, setsockopt, shutdown,
    socketpair, sockopt,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::pki_types::UnixTime;
use rustls::{ClientConnection, Connection, ServerConnection};
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Bytes read at once from either side, and held on the way.
const CHUNK_BYTES: usize = 128 << 10;

/// Room that a TLS record may need when it is opened.
const RECORD_BYTES_MAX: usize = 17 << 10;

/// Buffer asked of the kernel for the socket pair, each way, in bytes.
const PAIR_BUFFER_BYTES: usize = 1 << 20;

/// Stack of a pump: rustls needs some ten KiB, unoptimised builds more.
const STACK_BYTES: usize = 512 << 10;

/// How long a peer may take for the TLS handshake; real ones need milliseconds.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

/// How long a peer may take nothing of the last bytes after the plain side is closed.
const STALL_MAX: Duration = Duration::from_secs(2);

/// How long a peer that has all last bytes is given to close, so that closing first does not destroy them on the way.
const FAREWELL_MAX: Duration = Duration::from_millis(500);

/// What a record that holds an alert begins with, and its length in bytes: TLS 1.3's, where alerts look like data, and
/// TLS 1.2's with AES-GCM and with ChaCha20-Poly1305 (RFC 8446 5.2, RFC 5246 6.2.3.3, RFC 7905).
const GOODBYES: [([u8; 5], usize); 3] =
    [([23, 3, 3, 0, 19], 24), ([21, 3, 3, 0, 26], 31), ([21, 3, 3, 0, 18], 23)];

/// Pumps up to which a peer that failed is given the time to read why: with more, somebody may be trying to keep all of them
/// busy.
const EXPLAINED_MAX: usize = 32;

/// Why a connection by TLS ended other than in order.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TlsFailure {
    /// The peers did not agree, or one could not prove who it is.
    #[error("the TLS handshake failed: {0}")]
    Handshake(rustls::Error),
    /// The peer ended during the handshake without a word.
    #[error("the peer closed the connection during the TLS handshake")]
    HandshakeClosed,
    /// The peer did not finish the handshake.
    #[error("the peer took more than {} s for the TLS handshake", HANDSHAKE_MAX.as_secs())]
    HandshakeOverdue,
    /// The peer did not accept this side.
    #[error("the peer refused the connection by TLS: {0:?}")]
    Refused(rustls::AlertDescription),
    /// Something that is not TLS, or was tampered with.
    #[error("the TLS stream is broken: {0}")]
    Stream(rustls::Error),
    /// The network connection ended before TLS did.
    #[error("the connection was cut: it ended without TLS's goodbye")]
    Truncated,
    /// The peer took none of the last bytes.
    #[error("the peer stalled")]
    Stalled,
    /// The network connection broke.
    #[error("the connection is lost: {0}")]
    Lost(Errno),
}

/// The plain end of a connection by TLS.
#[derive(Debug)]
pub struct Tunnel {
    /// A connected unix stream socket; what is written to it arrives at the peer, and the other way round.
    pub socket: OwnedFd,
    failure: Arc<OnceLock<TlsFailure>>,
    goodbye: Goodbye,
    peer: ProvenPeer,
}

/// Who the client of a server's tunnel has proved to be; set before the first of its bytes comes out at the
/// plain end, unless clients need no certificate.
#[derive(Clone, Debug, Default)]
pub struct ProvenPeer(Arc<OnceLock<Arc<Peer>>>);

impl ProvenPeer {
    /// The client; none before it has proved who it is.
    #[must_use]
    pub fn get(&self) -> Option<&Arc<Peer>> {
        self.0.get()
    }
}

/// What a server's pump judges its client by.
struct Judge {
    tls: Arc<ServerTls>,
    /// What the handshake began with.
    begun_with: Arc<Current>,
    peer: ProvenPeer,
}

impl Judge {
    /// Makes known who the client is. What it was let in by may have been replaced since its handshake began:
    /// whoever replaces it asks for the clients that are known afterwards, so one of both sees a client that
    /// is trusted no more.
    fn established(&self, tls: &Connection) -> Result<(), rustls::Error> {
        if let Some(chain) = tls.peer_certificates() {
            let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
            let peer = Arc::new(Peer::new(chain, UnixTime::now()));
            // Once only: a handshake ends once.
            let _ = self.peer.0.set(Arc::clone(&peer));
            let renewed = !Arc::ptr_eq(&self.begun_with, &self.tls.current());
            return if renewed { self.tls.trusts(&peer) } else { Ok(()) };
        }
        if self.tls.demands_certificates() { Err(rustls::Error::NoCertificatesPresented) } else { Ok(()) }
    }
}

/// Whether the peer has said that nothing more comes from it, though what it said before may still be on its way to the
/// plain end.
#[derive(Clone, Debug, Default)]
pub struct Goodbye(Arc<AtomicBool>);

impl Goodbye {
    /// Whether it has.
    #[must_use]
    pub fn was_said(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Tunnel {
    /// Why it ended, when TLS was the reason; told by the time that `socket` ends.
    #[must_use]
    pub fn failure(&self) -> Option<&TlsFailure> {
        self.failure.get()
    }

    /// What tells who the client is.
    #[must_use]
    pub fn peer(&self) -> ProvenPeer {
        self.peer.clone()
    }

    /// What tells of the peer's goodbye.
    #[must_use]
    pub fn goodbye(&self) -> Goodbye {
        self.goodbye.clone()
    }
}

/// Starts pumps, and knows how many run. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct Pumps(Arc<Running>);

#[derive(Debug, Default)]
struct Running {
    count: Mutex<usize>,
    ended: Condvar,
}

fn running_of(running: &Running) -> usize {
    *running.count.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One running pump.
struct Guard(Arc<Running>);

impl Drop for Guard {
    fn drop(&mut self) {
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_all();
    }
}

impl Pumps {
    /// Runs TLS as a server on a connected socket, and returns its plain end. The handshake goes on by itself.
    ///
    /// # Errors
    /// When the system is out of descriptors or threads.
    pub fn serve(&self, socket: OwnedFd, tls: &Arc<ServerTls>) -> io::Result<Tunnel> {
        let begun_with = tls.current();
        let config = Arc::clone(&begun_with.config);
        let connection = ServerConnection::new(config).map_err(io::Error::other)?;
        let judge = Judge { tls: Arc::clone(tls), begun_with, peer: ProvenPeer::default() };
        self.start("tls-server", socket, connection.into(), Some(judge))
    }

    /// Runs TLS as a client of the server at `host`, and returns its plain end. The handshake goes on by itself.
    ///
    /// # Errors
    /// When `host` is no name that a certificate could have, or the system is out of descriptors or threads.
    pub fn connect(&self, socket: OwnedFd, tls: &ClientTls, host: &str) -> io::Result<Tunnel> {
        let name = tls.name_of(host)?;
        let connection = ClientConnection::new(tls.config(), name).map_err(io::Error::other)?;
        self.start("tls-client", socket, connection.into(), None)
    }

    /// How many run.
    #[must_use]
    pub fn running(&self) -> usize {
        running_of(&self.0)
    }

    /// Waits until all have ended, or `patience` is over. Returns whether all have.
    pub fn wait(&self, patience: Duration) -> bool {
        let count = self.0.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.ended.wait_timeout_while(count, patience, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
    }

    fn start(
        &self,
        thread: &str,
        network: OwnedFd,
        tls: Connection,
        judge: Option<Judge>,
    ) -> io::Result<Tunnel> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::Stream, None, SockFlag::SOCK_CLOEXEC)?;
        for end in [&ours, &theirs] {
            // The privileged form is not bound by the system's default maximum. Neither is vital.
            if setsockopt(end, sockopt::SndBufForce, &PAIR_BUFFER_BYTES).is_err() {
                let _ = setsockopt(end, sockopt::SndBuf, &PAIR_BUFFER_BYTES);
            }
        }
        let failure = Arc::new(OnceLock::new());
        let goodbye = Goodbye::default();
        let peer = judge.as_ref().map(|judge| judge.peer.clone()).unwrap_or_default();
        let tunnel = Tunnel { socket: theirs, failure: Arc::clone(&failure), goodbye: goodbye.clone(), peer };
        *self.0.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let guard = Guard(Arc::clone(&self.0));
        let pump = Pump::new(network, ours, tls, judge, goodbye);
        std::thread::Builder::new().name(thread.into()).stack_size(STACK_BYTES).spawn(move || {
            // Dropped last, and also by a panic.
            let guard = guard;
            pump.run(&failure, || running_of(&guard.0));
        })?;
        Ok(tunnel)
    }
}

/// A socket that is never waited for.
#[derive(Debug)]
struct Socket(OwnedFd);

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT)?)
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(send(self.0.as_raw_fd(), buf, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL)?)
    }

    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        Ok(sendmsg::<()>(self.0.as_raw_fd(), bufs, &[], flags, None)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Socket {
    fn shut(&self, how: Shutdown) {
        // An error means that it is shut already.
        let _ = shutdown(self.0.as_raw_fd(), how);
    }
}

/// Bytes on their way: filled at the end, emptied from the front.
#[derive(Debug)]
struct Chunk {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

impl Chunk {
    fn new() -> Chunk {
        Chunk { bytes: vec![0; CHUNK_BYTES].into(), start: 0, end: 0 }
    }

    fn is_empty(&self) -> bool {
        self.start == self.end
    }

    fn held(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    fn taken(&mut self, count: usize) {
        self.start += count;
        if self.is_empty() {
            self.clear();
        }
    }

    fn room(&mut self) -> &mut [u8] {
        &mut self.bytes[self.end..]
    }

    fn filled(&mut self, count: usize) {
        self.end += count;
    }

    fn clear(&mut self) {
        (self.start, self.end) = (0, 0);
    }
}

/// What an attempt to read or write without waiting came to.
enum Moved {
    Bytes(usize),
    End,
    /// The socket has nothing, or no room.
    Wait,
}

/// Sorts out what a socket said.
fn moved(result: io::Result<usize>) -> Result<Moved, Errno> {
    match result {
        Ok(0) => Ok(Moved::End),
        Ok(count) => Ok(Moved::Bytes(count)),
        Err(error) => match Errno::from_raw(error.raw_os_error().unwrap_or(0)) {
            Errno::EAGAIN | Errno::EINTR => Ok(Moved::Wait),
            errno if polling::survives(errno as i32, "a TLS connection") => Ok(Moved::Wait),
            errno => Err(errno),
        },
    }
}

struct Pump {
    tls: Connection,
    /// For the server's half.
    judge: Option<Judge>,
    network: Socket,
    plain: Socket,
    /// Received from the network, not yet opened.
    arrived: Chunk,
    /// Opened, for the plain side.
    opened: Chunk,
    /// From the plain side, to be sealed; empty between turns.
    outgoing: Chunk,
    begun: Instant,
    established: bool,
    /// The peer's goodbye was authenticated: nothing more comes from it.
    peer_done: bool,
    /// Tells so at once.
    goodbye: Goodbye,
    /// The plain side has been told so.
    peer_done_told: bool,
    /// The peer has ended its half in order, as it seems, in what was not received yet.
    peer_leaves: bool,
    /// The network has no more bytes.
    network_end: bool,
    /// The plain side has no more bytes, and the peer is being told.
    plain_end: bool,
    /// The plain side takes nothing any more.
    plain_gone: bool,
    /// All that there was for the peer was sent, the goodbye included.
    said_all: bool,
    /// When the end that has begun is to be over.
    deadline: Option<Instant>,
}

impl Pump {
    fn new(
        network: OwnedFd,
        plain: OwnedFd,
        mut tls: Connection,
        judge: Option<Judge>,
        goodbye: Goodbye,
    ) -> Pump {
        // What is given to it is one chunk at a time, and only when the last one has left.
        tls.set_buffer_limit(None);
        Pump {
            tls,
            judge,
            network: Socket(network),
            plain: Socket(plain),
            arrived: Chunk::new(),
            opened: Chunk::new(),
            outgoing: Chunk::new(),
            begun: Instant::now(),
            established: false,
            peer_done: false,
            goodbye,
            peer_done_told: false,
            peer_leaves: false,
            network_end: false,
            plain_end: false,
            plain_gone: false,
            said_all: false,
            deadline: None,
        }
    }

    /// `running`: tells how many pumps there are.
    fn run(mut self, failure: &OnceLock<TlsFailure>, running: impl Fn() -> usize) {
        let result = self.carry();
        let running = running();
        if let Err(fault) = &result {
            // Before the plain side learns that it is over.
            let _ = failure.set(fault.clone());
            match fault {
                // Told whoever administers this host: certificates are a common mistake.
                TlsFailure::Handshake(_) | TlsFailure::Refused(_) => tell_refusal(fault),
                _ => tracing::debug!("a connection by TLS ended: {fault}"),
            }
        }
        self.plain.shut(Shutdown::Both);
        if running <= EXPLAINED_MAX && matches!(result, Err(TlsFailure::Handshake(_) | TlsFailure::Stream(_)))
        {
            self.explain();
        }
    }

    /// Carries bytes until it is over.
    fn carry(&mut self) -> Result<(), TlsFailure> {
        let (mut network_ready, mut plain_ready) = (true, true);
        loop {
            if network_ready && self.wants_network() {
                self.receive()?;
            }
            self.open()?;
            self.deliver();
            while !self.arrived.is_empty() && self.has_room() && !self.plain_gone {
                // The plain side took what was in the way.
                self.open()?;
                self.deliver();
            }
            if plain_ready && self.wants_plain() {
                self.take();
            }
            self.send()?;
            self.end_halves();
            if self.is_over() {
                return Ok(());
            }
            (network_ready, plain_ready) = self.wait()?;
        }
    }

    fn wants_network(&self) -> bool {
        !self.network_end && (self.plain_gone || self.arrived.is_empty() && !self.peer_done)
    }

    fn wants_plain(&self) -> bool {
        !self.plain_end && !self.tls.is_handshaking() && !self.tls.wants_write()
    }

    fn receive(&mut self) -> Result<(), TlsFailure> {
        self.arrived.clear();
        match moved(self.network.read(self.arrived.room())).map_err(|errno| self.lost(errno))? {
            Moved::Wait => {}
            // Nobody is there to get it; what matters is the end behind it.
            Moved::Bytes(_) if self.plain_gone => {}
            Moved::Bytes(count) => self.arrived.filled(count),
            Moved::End => self.network_end = true,
        }
        Ok(())
    }

    fn lost(&self, errno: Errno) -> TlsFailure {
        if self.established { TlsFailure::Lost(errno) } else { TlsFailure::HandshakeClosed }
    }

    /// Opens what arrived, as far as there is room.
    fn open(&mut self) -> Result<(), TlsFailure> {
        while !self.arrived.is_empty() && !self.peer_done && self.has_room() {
            let broken = |pump: &Pump, error| match error {
                rustls::Error::AlertReceived(alert) => TlsFailure::Refused(alert),
                error if pump.established => TlsFailure::Stream(error),
                error => TlsFailure::Handshake(error),
            };
            let count = self
                .tls
                .read_tls(&mut self.arrived.held())
                .map_err(|error| broken(self, rustls::Error::General(error.to_string())))?;
            self.arrived.taken(count);
            let state = self.tls.process_new_packets().map_err(|error| broken(self, error))?;
            if !self.established && !self.tls.is_handshaking() {
                if let Some(judge) = &self.judge {
                    judge.established(&self.tls).map_err(TlsFailure::Handshake)?;
                }
                self.established = true;
                tracing::debug!(version = ?self.tls.protocol_version(), "TLS established");
            }
            let mut waiting = state.plaintext_bytes_to_read();
            while waiting > 0 {
                // What one read hands over is at most a record and what was left of the one before: there is room.
                let Ok(count @ 1..) = self.tls.reader().read(self.opened.room()) else { break };
                self.opened.filled(count);
                waiting = waiting.saturating_sub(count);
            }
            self.peer_done = state.peer_has_closed();
            if count == 0 && !self.peer_done {
                return Err(broken(self, rustls::Error::General("a message without end".into())));
            }
        }
        if self.peer_done {
            self.goodbye.0.store(true, Ordering::Release);
            self.arrived.clear();
        }
        Ok(())
    }

    /// Whether another record can be opened.
    fn has_room(&self) -> bool {
        self.opened.bytes.len() - self.opened.end >= RECORD_BYTES_MAX
    }

    /// Hands what was opened to the plain side, as much as it takes.
    fn deliver(&mut self) {
        while !self.opened.is_empty() && !self.plain_gone {
            match moved(self.plain.write(self.opened.held())) {
                Ok(Moved::Bytes(count)) => self.opened.taken(count),
                Ok(Moved::Wait) => break,
                Ok(Moved::End) | Err(_) => self.plain_is_gone(),
            }
        }
    }

    /// Takes from the plain side what is to be sealed.
    fn take(&mut self) {
        match moved(self.plain.read(self.outgoing.room())) {
            Ok(Moved::Wait) => return,
            Ok(Moved::Bytes(count)) => {
                self.outgoing.filled(count);
                let sealed = self.tls.writer().write_all(self.outgoing.held());
                debug_assert!(sealed.is_ok(), "writing to TLS's buffer, which has no limit");
                self.outgoing.clear();
                return;
            }
            Ok(Moved::End) => {}
            Err(_) => self.plain_is_gone(),
        }
        self.plain_end = true;
        self.tls.send_close_notify();
    }

    /// Sends what was sealed, as much as the network takes.
    fn send(&mut self) -> Result<(), TlsFailure> {
        while self.tls.wants_write() {
            match moved(self.tls.write_tls(&mut self.network)).map_err(|errno| self.lost(errno))? {
                Moved::Bytes(_) => {
                    if self.deadline.is_some() {
                        self.deadline = Some(Instant::now() + STALL_MAX);
                    }
                }
                Moved::Wait => return Ok(()),
                Moved::End => return Err(self.lost(Errno::EPIPE)),
            }
        }
        if self.plain_end && !self.said_all {
            self.said_all = true;
            self.network.shut(Shutdown::Write);
            if self.plain_gone {
                self.deadline = Some(Instant::now() + FAREWELL_MAX);
            }
        }
        Ok(())
    }

    /// Passes the end of what the peer says on to the plain side.
    fn end_halves(&mut self) {
        if self.peer_done && self.opened.is_empty() && !self.peer_done_told {
            self.peer_done_told = true;
            self.plain.shut(Shutdown::Write);
        }
    }

    fn plain_is_gone(&mut self) {
        self.plain_gone = true;
        self.opened.clear();
        self.arrived.clear();
        let patience = if self.said_all { FAREWELL_MAX } else { STALL_MAX };
        self.deadline.get_or_insert_with(|| Instant::now() + patience);
    }

    fn is_over(&self) -> bool {
        let heard_all = self.peer_done_told || self.network_end && self.plain_gone;
        self.said_all && (heard_all || self.plain_gone && self.peer_done)
            || self.plain_gone && !self.established
    }

    /// Waits for either side. Returns which may be read.
    fn wait(&mut self) -> Result<(bool, bool), TlsFailure> {
        if self.network_end && !self.peer_done && !self.plain_gone {
            // Cut off, by whomever: what it was about to say is not known, so nothing of it may be waited for.
            return Err(if self.established { TlsFailure::Truncated } else { TlsFailure::HandshakeClosed });
        }
        let now = Instant::now();
        let handshake_end = (!self.established).then(|| self.begun + HANDSHAKE_MAX);
        let end = [handshake_end, self.deadline].into_iter().flatten().min();
        if end.is_some_and(|end| end <= now) {
            return match (self.established, self.said_all) {
                (false, _) => Err(TlsFailure::HandshakeOverdue),
                (true, false) => Err(TlsFailure::Stalled),
                (true, true) => {
                    // It has everything, and merely does not hang up.
                    self.network_end = true;
                    self.peer_done_told = true;
                    Ok((false, false))
                }
            };
        }
        let (from_network, from_plain) = (self.wants_network(), self.wants_plain());
        let flag = |set: bool, flag| if set { flag } else { PollFlags::empty() };
        let network_flags = flag(from_network, PollFlags::IN)
            | flag(self.tls.wants_write(), PollFlags::OUT)
            | flag(!from_network && !self.peer_done && !self.said_all && !self.peer_leaves, PollFlags::RDHUP);
        let plain_flags = flag(from_plain, PollFlags::IN)
            | flag(!self.opened.is_empty() && !self.plain_gone, PollFlags::OUT);
        let mut fds = Vec::with_capacity(2);
        // What is known already is not to be told again and again: that the plain side hung up, or that the peer did
        // after all was said to it, while the last of what it said is being delivered.
        let watch_plain = !self.plain_gone || !plain_flags.is_empty();
        let watch_network = !self.said_all || !network_flags.is_empty();
        if watch_plain {
            fds.push(PollFd::new(&self.plain.0, plain_flags));
        }
        if watch_network {
            fds.push(PollFd::new(&self.network.0, network_flags));
        }
        match poll(&mut fds, end.map(|end| timespec(end - now)).as_ref()) {
            Ok(_) => {}
            Err(errno) if polling::survives(errno.raw_os_error(), "a TLS connection") => {}
            Err(errno) => return Err(self.lost(Errno::from_raw(errno.raw_os_error()))),
        }
        let mut seen = fds.iter().map(PollFd::revents);
        let mut of = |watched: bool| watched.then(|| seen.next()).flatten().unwrap_or(PollFlags::empty());
        let (plain, network) = (of(watch_plain), of(watch_network));
        if plain.intersects(PollFlags::HUP | PollFlags::ERR) {
            self.plain_is_gone();
        }
        if !from_network && !self.said_all {
            let ended = network.intersects(PollFlags::RDHUP);
            self.peer_leaves |= ended && self.goodbye_is_on_its_way();
            if network.intersects(PollFlags::HUP | PollFlags::ERR) || ended && !self.peer_leaves {
                // Nobody is there any more, while the plain side has not taken what came before: it is told at once.
                return Err(self.lost(Errno::EPIPE));
            }
        }
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok((network.intersects(readable), plain.intersects(readable)))
    }

    /// Whether what was received and not opened, and what waits in the socket, whose stream has ended, ends in what
    /// has the form of a goodbye. Nothing proves it before it is opened; whoever could forge it could as well hide
    /// that the stream has ended.
    fn goodbye_is_on_its_way(&self) -> bool {
        let mut bytes = self.arrived.held().to_vec();
        let waiting = rustix::io::ioctl_fionread(&self.network.0);
        let Some(waiting) = waiting.ok().and_then(|count| usize::try_from(count).ok()) else { return false };
        let held = bytes.len();
        if bytes.try_reserve_exact(waiting).is_err() {
            return false;
        }
        bytes.resize(held + waiting, 0);
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        if waiting > 0 && recv(self.network.0.as_raw_fd(), &mut bytes[held..], flags) != Ok(waiting) {
            return false;
        }
        GOODBYES.iter().any(|&(header, bytes_long)| {
            bytes.len().checked_sub(bytes_long).is_some_and(|start| bytes[start..].starts_with(&header))
        })
    }

    /// Lets the peer know what was wrong: sends TLS's alert, and does not close before the peer could read it.
    fn explain(&mut self) {
        let end = Instant::now() + FAREWELL_MAX;
        let sent = self.tls.write_tls(&mut self.network);
        self.network.shut(Shutdown::Write);
        if sent.is_err() {
            return;
        }
        self.arrived.clear();
        while let Some(left) = end.checked_duration_since(Instant::now()) {
            let mut fds = [PollFd::new(&self.network.0, PollFlags::IN)];
            if !matches!(poll(&mut fds, Some(&timespec(left))), Ok(1)) {
                return;
            }
            if !matches!(moved(self.network.read(self.arrived.room())), Ok(Moved::Bytes(_))) {
                return;
            }
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
