//! Pumps: a thread per connection that runs TLS between a network socket and one end of a plain
//! socket pair.
//!
//! Invariants: what is held between the two sides is bounded by [`CHUNK_BYTES`] a stage, and a side
//! is read only when the bytes read before have left. The bytes that TLS authenticated reach the
//! plain side in order; no others do. When the network is gone, the plain socket is shut down at
//! once, with the bytes that it could not take, so that its reader does not believe that a client
//! is still there. The thread ends with either side, and within a time limit if the peer does
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

/// How long a peer may take none of the last bytes after the plain side is closed.
const STALL_MAX: Duration = Duration::from_secs(2);

/// How long a peer that has all last bytes is given to close first: closing earlier could destroy
/// them on the way.
const FAREWELL_MAX: Duration = Duration::from_millis(500);

/// The first bytes and the length of a record that holds an alert: TLS 1.3's, where alerts look
/// like data, and TLS 1.2's with AES-GCM and with ChaCha20-Poly1305 (RFC 8446 5.2, RFC 5246
/// 6.2.3.3, RFC 7905).
const GOODBYES: [([u8; 5], usize); 3] =
    [([23, 3, 3, 0, 19], 24), ([21, 3, 3, 0, 26], 31), ([21, 3, 3, 0, 18], 23)];

/// Number of pumps up to which a peer that failed gets time to read why. Beyond it, somebody may be
/// trying to keep all pumps busy.
const EXPLAINED_MAX: usize = 32;

/// Why a TLS connection ended other than in order.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TlsFailure {
    /// The peers did not agree, or one could not prove its identity.
    #[error("the TLS handshake failed: {0}")]
    Handshake(rustls::Error),
    /// The peer closed during the handshake.
    #[error("the peer closed the connection during the TLS handshake")]
    HandshakeClosed,
    /// The peer did not finish the handshake in time.
    #[error("the peer took more than {} s for the TLS handshake", HANDSHAKE_MAX.as_secs())]
    HandshakeOverdue,
    /// The peer refused this side.
    #[error("the peer refused the connection by TLS: {0:?}")]
    Refused(rustls::AlertDescription),
    /// The bytes are not TLS, or were tampered with.
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

/// The plain end of a TLS connection.
#[derive(Debug)]
pub struct Tunnel {
    /// A connected unix stream socket: bytes written to it arrive at the peer, and the other way
    /// round.
    pub socket: OwnedFd,
    failure: Arc<OnceLock<TlsFailure>>,
    goodbye: Goodbye,
    peer: ProvenPeer,
}

/// The client of a server's tunnel, once it has proved its identity. Set before the first byte of
/// the client comes out at the plain end, unless clients need no certificate.
#[derive(Clone, Debug, Default)]
pub struct ProvenPeer(Arc<OnceLock<Arc<Peer>>>);

impl ProvenPeer {
    /// The client; none before it has proved its identity.
    #[must_use]
    pub fn get(&self) -> Option<&Arc<Peer>> {
        self.0.get()
    }
}

/// How a server's pump checks its client.
struct Judge {
    tls: Arc<ServerTls>,
    /// The configuration that the handshake began with.
    begun_with: Arc<Current>,
    peer: ProvenPeer,
}

impl Judge {
    /// Publishes the client's identity. The files may have been replaced since its handshake began.
    /// A reload publishes its files first and then checks the clients that are known, so either the
    /// reload or this call sees a client that is not trusted any more.
    fn established(&self, tls: &Connection) -> Result<(), rustls::Error> {
        if let Some(chain) = tls.peer_certificates() {
            let chain = chain.iter().map(|certificate| certificate.clone().into_owned()).collect();
            let peer = Arc::new(Peer::new(chain, UnixTime::now()));
            // The value is set once: a handshake ends once.
            let _ = self.peer.0.set(Arc::clone(&peer));
            let renewed = !Arc::ptr_eq(&self.begun_with, &self.tls.current());
            return if renewed { self.tls.trusts(&peer) } else { Ok(()) };
        }
        if self.tls.demands_certificates() { Err(rustls::Error::NoCertificatesPresented) } else { Ok(()) }
    }
}

/// Whether the peer has said that no more bytes come from it. Earlier bytes may still be on their
/// way to the plain end.
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
    /// Why the tunnel ended, if TLS was the reason; set before `socket` ends.
    #[must_use]
    pub fn failure(&self) -> Option<&TlsFailure> {
        self.failure.get()
    }

    /// A handle on the client's identity.
    #[must_use]
    pub fn peer(&self) -> ProvenPeer {
        self.peer.clone()
    }

    /// A handle on the peer's goodbye.
    #[must_use]
    pub fn goodbye(&self) -> Goodbye {
        self.goodbye.clone()
    }
}

/// Starts pumps and counts those that run. Clones share the count.
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
    /// Runs TLS as a server on a connected socket, and returns the plain end. The handshake
    /// continues in the pump's thread.
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

    /// Runs TLS as a client of the server at `host`, and returns the plain end. The handshake
    /// continues in the pump's thread.
    ///
    /// # Errors
    /// When `host` is no name that a certificate can have, or the system is out of descriptors or
    /// threads.
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

    /// Waits until all pumps have ended, or `patience` is over. Returns whether all have.
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
            // The privileged option is not bound by the system's default maximum. Neither is vital.
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
            // The guard is dropped last, also by a panic.
            let guard = guard;
            pump.run(&failure, || running_of(&guard.0));
        })?;
        Ok(tunnel)
    }
}

/// A socket whose calls do not block.
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

/// Bytes in transit: added at the end, taken from the front.
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

/// Result of a read or write that does not block.
enum Moved {
    Bytes(usize),
    End,
    /// The socket has nothing, or no room.
    Wait,
}

/// Sorts the results of a socket's calls.
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
    /// Received from the network, not yet decrypted.
    arrived: Chunk,
    /// Decrypted, for the plain side.
    opened: Chunk,
    /// From the plain side, to be encrypted; empty between turns.
    outgoing: Chunk,
    begun: Instant,
    established: bool,
    /// Tells the owner of the plain end at once that the peer said goodbye.
    goodbye: Goodbye,
    ends: Ends,
    /// When the end that has begun is to be over.
    deadline: Option<Instant>,
}

/// Which half of which side has ended, and which sides were told.
#[derive(Default)]
struct Ends {
    /// The peer's goodbye was authenticated: nothing more comes from the peer.
    peer_done: bool,
    /// The plain side has been told that nothing more comes from the peer.
    peer_done_told: bool,
    /// What was not received yet seems to end in a goodbye of the peer.
    peer_leaves: bool,
    /// The network has no more bytes.
    network_end: bool,
    /// The plain side has no more bytes, and the peer is being told.
    plain_end: bool,
    /// The plain side takes nothing any more.
    plain_gone: bool,
    /// All bytes for the peer were sent, the goodbye included.
    said_all: bool,
}

impl Pump {
    fn new(
        network: OwnedFd,
        plain: OwnedFd,
        mut tls: Connection,
        judge: Option<Judge>,
        goodbye: Goodbye,
    ) -> Pump {
        // The library gets one chunk at a time, and only when the last one has left.
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
            goodbye,
            ends: Ends::default(),
            deadline: None,
        }
    }

    /// `running`: returns the number of pumps.
    fn run(mut self, failure: &OnceLock<TlsFailure>, running: impl Fn() -> usize) {
        let result = self.carry();
        let running = running();
        if let Err(fault) = &result {
            // Set before the plain side sees the end.
            let _ = failure.set(fault.clone());
            match fault {
                // Logged for the administrator of this host: certificates are a common mistake.
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

    /// Carries bytes until both sides are done.
    fn carry(&mut self) -> Result<(), TlsFailure> {
        let (mut network_ready, mut plain_ready) = (true, true);
        loop {
            if network_ready && self.wants_network() {
                self.receive()?;
            }
            self.open()?;
            self.deliver();
            while !self.arrived.is_empty() && self.has_room() && !self.ends.plain_gone {
                // The plain side took the bytes that were in the way.
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
        !self.ends.network_end && (self.ends.plain_gone || self.arrived.is_empty() && !self.ends.peer_done)
    }

    fn wants_plain(&self) -> bool {
        !self.ends.plain_end && !self.tls.is_handshaking() && !self.tls.wants_write()
    }

    fn receive(&mut self) -> Result<(), TlsFailure> {
        self.arrived.clear();
        match moved(self.network.read(self.arrived.room())).map_err(|errno| self.lost(errno))? {
            Moved::Wait => {}
            // The plain side is gone, so the bytes are dropped; only the end behind them matters.
            Moved::Bytes(_) if self.ends.plain_gone => {}
            Moved::Bytes(count) => self.arrived.filled(count),
            Moved::End => self.ends.network_end = true,
        }
        Ok(())
    }

    fn lost(&self, errno: Errno) -> TlsFailure {
        if self.established { TlsFailure::Lost(errno) } else { TlsFailure::HandshakeClosed }
    }

    /// Decrypts what arrived, as far as there is room.
    fn open(&mut self) -> Result<(), TlsFailure> {
        while !self.arrived.is_empty() && !self.ends.peer_done && self.has_room() {
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
                // One read returns at most a record and the rest of the one before, for which there
                // is room.
                let Ok(count @ 1..) = self.tls.reader().read(self.opened.room()) else { break };
                self.opened.filled(count);
                waiting = waiting.saturating_sub(count);
            }
            self.ends.peer_done = state.peer_has_closed();
            if count == 0 && !self.ends.peer_done {
                return Err(broken(self, rustls::Error::General("a message without end".into())));
            }
        }
        if self.ends.peer_done {
            self.goodbye.0.store(true, Ordering::Release);
            self.arrived.clear();
        }
        Ok(())
    }

    /// Whether another record can be decrypted.
    fn has_room(&self) -> bool {
        self.opened.bytes.len() - self.opened.end >= RECORD_BYTES_MAX
    }

    /// Writes decrypted bytes to the plain side, as many as it takes.
    fn deliver(&mut self) {
        while !self.opened.is_empty() && !self.ends.plain_gone {
            match moved(self.plain.write(self.opened.held())) {
                Ok(Moved::Bytes(count)) => self.opened.taken(count),
                Ok(Moved::Wait) => break,
                Ok(Moved::End) | Err(_) => self.plain_is_gone(),
            }
        }
    }

    /// Reads bytes to be encrypted from the plain side.
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
        self.ends.plain_end = true;
        self.tls.send_close_notify();
    }

    /// Sends encrypted bytes, as many as the network takes.
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
        if self.ends.plain_end && !self.ends.said_all {
            self.ends.said_all = true;
            self.network.shut(Shutdown::Write);
            if self.ends.plain_gone {
                self.deadline = Some(Instant::now() + FAREWELL_MAX);
            }
        }
        Ok(())
    }

    /// Passes the peer's end on to the plain side.
    fn end_halves(&mut self) {
        if self.ends.peer_done && self.opened.is_empty() && !self.ends.peer_done_told {
            self.ends.peer_done_told = true;
            self.plain.shut(Shutdown::Write);
        }
    }

    fn plain_is_gone(&mut self) {
        self.ends.plain_gone = true;
        self.opened.clear();
        self.arrived.clear();
        let patience = if self.ends.said_all { FAREWELL_MAX } else { STALL_MAX };
        self.deadline.get_or_insert_with(|| Instant::now() + patience);
    }

    fn is_over(&self) -> bool {
        let heard_all = self.ends.peer_done_told || self.ends.network_end && self.ends.plain_gone;
        self.ends.said_all && (heard_all || self.ends.plain_gone && self.ends.peer_done)
            || self.ends.plain_gone && !self.established
    }

    /// Waits for either side. Returns which of the two, network and plain, can be read.
    fn wait(&mut self) -> Result<(bool, bool), TlsFailure> {
        if self.ends.network_end && !self.ends.peer_done && !self.ends.plain_gone {
            // The connection was cut: the rest of the peer's bytes is not known, so nothing may
            // wait for it.
            return Err(if self.established { TlsFailure::Truncated } else { TlsFailure::HandshakeClosed });
        }
        let now = Instant::now();
        let handshake_end = (!self.established).then(|| self.begun + HANDSHAKE_MAX);
        let end = [handshake_end, self.deadline].into_iter().flatten().min();
        if end.is_some_and(|end| end <= now) {
            return match (self.established, self.ends.said_all) {
                (false, _) => Err(TlsFailure::HandshakeOverdue),
                (true, false) => Err(TlsFailure::Stalled),
                (true, true) => {
                    // The peer has everything, and has only not hung up.
                    self.ends.network_end = true;
                    self.ends.peer_done_told = true;
                    Ok((false, false))
                }
            };
        }
        let (from_network, from_plain) = (self.wants_network(), self.wants_plain());
        let flag = |set: bool, flag| if set { flag } else { PollFlags::empty() };
        let network_flags = flag(from_network, PollFlags::IN)
            | flag(self.tls.wants_write(), PollFlags::OUT)
            | flag(
                !from_network && !self.ends.peer_done && !self.ends.said_all && !self.ends.peer_leaves,
                PollFlags::RDHUP,
            );
        let plain_flags = flag(from_plain, PollFlags::IN)
            | flag(!self.opened.is_empty() && !self.ends.plain_gone, PollFlags::OUT);
        let mut fds = Vec::with_capacity(2);
        // Ends that are known already must not wake this again and again: a plain side that hung
        // up, or a peer that hung up after all was sent to it, while its last bytes are being
        // delivered.
        let watch_plain = !self.ends.plain_gone || !plain_flags.is_empty();
        let watch_network = !self.ends.said_all || !network_flags.is_empty();
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
        if !from_network && !self.ends.said_all {
            let ended = network.intersects(PollFlags::RDHUP);
            self.ends.peer_leaves |= ended && self.goodbye_is_on_its_way();
            if network.intersects(PollFlags::HUP | PollFlags::ERR) || ended && !self.ends.peer_leaves {
                // The network is gone while the plain side has not taken earlier bytes: report it
                // at once.
                return Err(self.lost(Errno::EPIPE));
            }
        }
        let readable = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        Ok((network.intersects(readable), plain.intersects(readable)))
    }

    /// Whether the unread bytes, in `arrived` and in the socket whose stream has ended, end with
    /// what looks like a goodbye. Nothing proves it before it is decrypted; but a peer that can
    /// forge it can as well hide that the stream has ended.
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

    /// Tells the peer what was wrong: sends TLS's alert, and closes only after the peer could read
    /// it.
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
