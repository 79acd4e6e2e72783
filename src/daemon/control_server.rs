//! The control socket: takes administrators' requests, a line each, and answers them in turn.
//!
//! Invariants: only the user of the daemon and root may give orders; a client that is slow, silent or sends
//! nonsense occupies one of a limited number of threads, and never displaces a client whose request is being
//! carried out. Must not know what requests mean.

use crate::control::{
    ErrorCode, MAX_REQUEST_BYTES, Reply, Request, RequestError, WireError, read_message, write_message,
};
use crate::daemon::drill;
use crate::daemon::logging;
use crate::daemon::peer::Owner;
use crate::daemon::reactor::{ListenAddress, ListenError, Listener};
use crate::daemon::service::Daemon;
use nix::sys::socket::{Shutdown, shutdown};
use slab::Slab;
use std::io::{self, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most administrators at one time: people and scripts, not load.
const CLIENTS_MAX: usize = 64;

/// How long a client may take for its first request: programs send it at once, and people do not
/// type it.
const FIRST_REQUEST_MAX: Duration = Duration::from_secs(5);

/// How long a client may take for each further request, and for taking a reply.
const SILENCE_MAX: Duration = Duration::from_secs(600);

/// How long writing the reason to a client that is turned away may take: long enough to fill the socket's
/// buffer.
const REFUSAL_MAX: Duration = Duration::from_millis(100);

/// How long a client that does not read its replies can delay the stop that it ordered.
const REPLY_TO_STOP_MAX: Duration = Duration::from_secs(1);

/// A control socket being served. Dropping it stops taking clients and removes the socket.
#[derive(Debug)]
pub(super) struct ControlServer {
    listener: Listener,
    socket: UnixListener,
    thread: Option<JoinHandle<()>>,
}

impl ControlServer {
    /// Serves `daemon` on a socket at `path`.
    ///
    /// # Errors
    /// When the socket cannot be bound.
    pub(super) fn start(daemon: Arc<Daemon>, path: &Path) -> Result<ControlServer, ListenError> {
        ControlServer::on(daemon, Listener::bind(&ListenAddress::Unix(path.into()))?)
    }

    /// Serves `daemon` on a unix socket that is bound already.
    ///
    /// # Errors
    /// When the system is out of descriptors or threads.
    ///
    /// # Panics
    /// When it is not a unix socket.
    pub(super) fn on(daemon: Arc<Daemon>, listener: Listener) -> Result<ControlServer, ListenError> {
        let address = listener.address().clone();
        let fail = |source: io::Error| ListenError::Io { address: address.clone(), source };
        let socket = listener.unix_listener().map_err(fail)?;
        let accepting = socket.try_clone().map_err(fail)?;
        let thread = std::thread::Builder::new()
            .name("control".into())
            .spawn(move || accept(&daemon, &accepting))
            .map_err(fail)?;
        Ok(ControlServer { listener, socket, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub(super) fn address(&self) -> &ListenAddress {
        self.listener.address()
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        // Wakes the accepting thread; an error means that it is awake already.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

fn accept(daemon: &Arc<Daemon>, listener: &UnixListener) {
    let places = Arc::new(Places::default());
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            // The socket was shut down.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return,
            Err(error) => {
                if logging::ACCEPT_FAILURES.admits() {
                    tracing::warn!(%error, "control socket");
                }
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        match admit(&places, stream) {
            Ok((place, stream)) => begin(daemon, &places, place, stream),
            Err(turned_away) => turned_away.tell(),
        }
    }
}

/// A client that gets no place, and why.
struct TurnedAway {
    stream: UnixStream,
    reason: String,
}

impl TurnedAway {
    /// Writes the reason to the client and the log.
    fn tell(self) {
        if logging::CONTROL_REFUSALS.admits() {
            tracing::warn!("a client of the control socket was turned away: {}", self.reason);
        }
        let reply = Reply::Error(RequestError { code: ErrorCode::Refused, message: self.reason });
        let mut writer = &self.stream;
        // A client that does not read only misses the reason.
        let _ = self
            .stream
            .set_write_timeout(Some(REFUSAL_MAX))
            .and_then(|()| write_message(&mut writer, &reply));
    }
}

/// Gives a client a place, if it may have one.
fn admit(places: &Places, stream: UnixStream) -> Result<(usize, Arc<UnixStream>), TurnedAway> {
    let own = Owner::own();
    match Owner::of_peer(&stream) {
        Ok(peer) if peer.may_administer(own) => {}
        Ok(peer) => {
            let reason = format!(
                "this daemon belongs to {own}, and takes orders from that user and root, not from {peer}"
            );
            return Err(TurnedAway { stream, reason });
        }
        Err(error) => {
            let reason = format!("the system does not say who asks: {error}");
            return Err(TurnedAway { stream, reason });
        }
    }
    let stream = Arc::new(stream);
    match places.take(Arc::clone(&stream), Instant::now()) {
        Some(place) => Ok((place, stream)),
        None => {
            let reason = format!("{CLIENTS_MAX} requests are being carried out at once: try again later");
            let stream = Arc::into_inner(stream).expect("nobody else has it");
            Err(TurnedAway { stream, reason })
        }
    }
}

/// Serves a client on a thread of its own.
fn begin(daemon: &Arc<Daemon>, places: &Arc<Places>, place: usize, stream: Arc<UnixStream>) {
    let (daemon, shared) = (Arc::clone(daemon), Arc::clone(places));
    let spawned = std::thread::Builder::new().name("admin".into()).spawn(move || {
        let uid = Owner::of_peer(&stream).map_or(0, |peer| peer.0.as_raw());
        let handle = |request| shared.carry_out(place, || daemon.handle_from(request, uid));
        if let Err(error) = converse(handle, || daemon.begin_stop(), &stream) {
            tracing::debug!(%error, "control client");
        }
        shared.leave(place);
    });
    if let Err(error) = spawned {
        places.leave(place);
        if logging::ACCEPT_FAILURES.admits() {
            tracing::warn!(%error, "no thread for a control client");
        }
    }
}

/// The clients that are served. When all places are taken, an idle client makes room for the next
/// one.
#[derive(Debug, Default)]
struct Places(Mutex<Slab<Client>>);

#[derive(Debug)]
struct Client {
    stream: Arc<UnixStream>,
    /// It has sent a request before.
    has_spoken: bool,
    /// Since when it is idle; none while a request of it is carried out.
    silent_since: Option<Instant>,
    /// It was disconnected, and its thread has not noticed yet.
    dropped: bool,
}

impl Places {
    fn lock(&self) -> MutexGuard<'_, Slab<Client>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place. When none is free, disconnects the client that has been idle longest, of
    /// those that never sent a request if there are any. None when requests of all clients are
    /// being carried out.
    fn take(&self, stream: Arc<UnixStream>, now: Instant) -> Option<usize> {
        let mut clients = self.lock();
        if clients.iter().filter(|(_, client)| !client.dropped).count() >= CLIENTS_MAX {
            let waited_for = |client: &Client| Some((client.has_spoken, client.silent_since?));
            let idle = clients.iter_mut().filter(|(_, client)| !client.dropped);
            let idle = idle.filter_map(|(_, client)| Some((waited_for(client)?, client)));
            let (_, longest) = idle.min_by_key(|(key, _)| *key)?;
            longest.dropped = true;
            // Wakes its thread; an error means that the client is gone already.
            let _ = longest.stream.shutdown(std::net::Shutdown::Both);
        }
        Some(clients.insert(Client { stream, has_spoken: false, silent_since: Some(now), dropped: false }))
    }

    fn carry_out<T>(&self, place: usize, request: impl FnOnce() -> T) -> T {
        {
            let mut clients = self.lock();
            clients[place].has_spoken = true;
            clients[place].silent_since = None;
        }
        let reply = request();
        self.lock()[place].silent_since = Some(Instant::now());
        reply
    }

    fn leave(&self, place: usize) {
        self.lock().remove(place);
    }
}

/// Reads until a deadline, however few bytes come at a time.
struct Until<'s> {
    stream: &'s UnixStream,
    deadline: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut stream = self.stream;
        stream.read(buffer)
    }
}

/// Carries out the requests of a client one by one. `begin_stop` passes on an order to stop after its reply
/// was written, because the end of the process would cut the reply off, or when the client does not take the
/// reply in time.
fn converse(
    mut handle: impl FnMut(Request) -> Reply,
    mut begin_stop: impl FnMut(),
    stream: &UnixStream,
) -> Result<(), WireError> {
    stream.set_write_timeout(Some(SILENCE_MAX))?;
    let mut reader = BufReader::new(Until { stream, deadline: Instant::now() + FIRST_REQUEST_MAX });
    let mut writer = stream;
    loop {
        let mut stops = false;
        let reply = match read_message::<Request>(&mut reader, MAX_REQUEST_BYTES) {
            Ok(None) => return Ok(()),
            Ok(Some(request)) => {
                drill::point("admin");
                stops = matches!(request, Request::Shutdown { dry_run: false });
                handle(request)
            }
            Err(error @ WireError::Malformed(_)) => {
                Reply::Error(RequestError { code: ErrorCode::BadRequest, message: error.to_string() })
            }
            Err(error) => return Err(error),
        };
        if stops {
            // When that fails, the longer limit stays.
            let _ = stream.set_write_timeout(Some(REPLY_TO_STOP_MAX));
        }
        let sent = write_message(&mut writer, &reply);
        if stops {
            begin_stop();
        }
        sent?;
        reader.get_mut().deadline = Instant::now() + SILENCE_MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    struct Scene {
        places: Places,
        clients: Vec<UnixStream>,
        now: Instant,
    }

    impl Scene {
        fn new() -> Scene {
            Scene { places: Places::default(), clients: Vec::new(), now: Instant::now() }
        }

        /// A client that comes a second after the one before.
        fn come(&mut self) -> Option<usize> {
            let (ours, theirs) = UnixStream::pair().unwrap();
            self.now += Duration::from_secs(1);
            let place = self.places.take(Arc::new(ours), self.now);
            self.clients.push(theirs);
            place
        }

        fn is_dropped(&self, client: usize) -> bool {
            let mut theirs = &self.clients[client];
            theirs.set_nonblocking(true).unwrap();
            matches!(theirs.read(&mut [0]), Ok(0))
        }
    }

    #[test]
    fn the_longest_silent_client_makes_room_and_those_that_spoke_or_are_answered_stay() {
        let mut scene = Scene::new();
        for _ in 0..CLIENTS_MAX {
            scene.come().unwrap();
        }
        // The first has spoken; a request of the second is being carried out.
        scene.places.carry_out(0, || ());
        scene.places.lock()[0].silent_since = Some(scene.now - Duration::from_secs(1000));
        scene.places.lock()[1].silent_since = None;
        for client in 2..CLIENTS_MAX {
            scene.come().unwrap();
            assert!(scene.is_dropped(client), "{client}");
        }
        assert!(!scene.is_dropped(0) && !scene.is_dropped(1) && !scene.is_dropped(CLIENTS_MAX));
        scene.come().unwrap();
        assert!(scene.is_dropped(CLIENTS_MAX), "newer than the one that spoke, and without a word");
    }

    #[test]
    fn when_all_are_being_answered_the_next_one_waits() {
        let mut scene = Scene::new();
        for _ in 0..CLIENTS_MAX {
            let place = scene.come().unwrap();
            scene.places.lock()[place].silent_since = None;
        }
        assert_eq!(scene.come(), None);
        scene.places.leave(7);
        assert_eq!(scene.come(), Some(7));
    }

    #[test]
    fn the_reply_to_an_order_to_stop_is_there_before_the_stop_begins() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        write_message(&mut theirs, &Request::Shutdown { dry_run: true }).unwrap();
        write_message(&mut theirs, &Request::Shutdown { dry_run: false }).unwrap();
        theirs.shutdown(std::net::Shutdown::Write).unwrap();
        theirs.set_nonblocking(true).unwrap();
        let done = |request| Reply::Done {
            message: format!("{request:?}"),
            warnings: Vec::new(),
            failures: Vec::new(),
        };
        let mut replies = vec![0; 4096];
        let mut got = 0;
        let mut begun = 0;
        let begin_stop = || {
            begun += 1;
            got = theirs.read(&mut replies).unwrap();
        };
        converse(done, begin_stop, &ours).unwrap();
        assert_eq!(begun, 1, "a dry run stops nothing");
        let lines = String::from_utf8_lossy(&replies[..got]).matches('\n').count();
        assert_eq!(lines, 2, "the reply was sent first");
    }

    #[test]
    fn who_does_not_take_the_reply_is_no_reason_not_to_stop() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        write_message(&mut theirs, &Request::Shutdown { dry_run: false }).unwrap();
        drop(theirs);
        let done = |_| Reply::Done { message: String::new(), warnings: Vec::new(), failures: Vec::new() };
        let mut begun = 0;
        converse(done, || begun += 1, &ours).unwrap_err();
        assert_eq!(begun, 1);
    }

    #[test]
    fn a_byte_now_and_then_does_not_prolong_the_deadline() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut until = Until { stream: &ours, deadline: Instant::now() + Duration::from_secs(60) };
        theirs.write_all(b"ab").unwrap();
        assert_eq!(until.read(&mut [0]).unwrap(), 1);
        until.deadline = Instant::now();
        assert_eq!(until.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
