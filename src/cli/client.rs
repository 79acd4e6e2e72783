//! The client half of the control socket: finds the daemon, agrees on the version, asks. Must not
//! know what is printed.
//!
//! Invariants: a daemon that does not answer is given up within a time limit; one that works on a
//! request is not, however long that takes. A socket found by default is used only if it belongs to
//! this user, to root, or to the user to whom root gave the system's runtime directory. A socket
//! that the user named is trusted.

use crate::control::{
    MAX_REPLY_BYTES, PROTOCOL_VERSION, Reply, Request, RequestError, Status, WireError, read_message,
    write_message,
};
use crate::daemon::config::{CONTROL_SOCKET_NAME, DEFAULT_RUNTIME_DIR};
use crate::daemon::peer::{Owner, Stranger, Trust, connect_within};
use calpe_core::units::shown;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, BufReader, Read};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Environment variable that names the daemon's control socket.
const SOCKET_VARIABLE: &str = "CALPE_SOCKET";

/// Seconds that a daemon may take to accept a connection and to answer a ping, unless the command
/// line says otherwise. A daemon does both at once, whatever its arrays do; a machine that swaps or
/// is overloaded may need seconds.
pub(super) const PATIENCE_SECS: u16 = 10;

/// Divisor of the patience: after this fraction of it, a daemon that has not answered a request is
/// pinged.
const WAITED_BEFORE_PING: u32 = 4;

/// How long a request that needs no device may take while pings are answered. Reports come from the threads
/// that serve clients within milliseconds, under load within a few seconds: a longer wait means that a thread
/// of the daemon hangs.
const QUESTION_MAX: Duration = Duration::from_secs(60);

/// How long the rest of a reply may take once its first byte has arrived: the daemon has the whole
/// reply by then.
const REST_OF_REPLY_MAX: Duration = Duration::from_secs(60);

/// Where `calpe up` listens, relative to the directory that it was started in.
const PLACE_HERE: &str = "calpe-data/control.sock";

/// Why the daemon did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    /// There is no socket anywhere.
    #[error(
        "no daemon found (looked for {}): start one with 'calpe up' or 'calpe serve', or name its socket with --socket",
        list(tried)
    )]
    NoDaemon {
        /// The places that were searched.
        tried: Vec<PathBuf>,
    },
    /// There is a socket, and no process behind it.
    #[error(
        "{}: no daemon answers ({source}): start it, or name another socket with --socket",
        shown(socket)
    )]
    NoAnswer {
        /// The socket.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is a socket that this user may not use.
    #[error(
        "{}: {own} may not use the daemon's socket ({source}): run this command as the user that the daemon runs as, or as root",
        shown(socket)
    )]
    Forbidden {
        /// The socket.
        socket: PathBuf,
        /// The user of this command.
        own: Owner,
        /// What the system said.
        source: io::Error,
    },
    /// A process has the socket open and does not answer.
    #[error(
        "{}: the daemon does not answer (waited {} s): it is stopped, hangs, or has not started yet: look at its process and its log, restart it if it stays so, or name another socket with --socket",
        shown(socket),
        waited.as_secs()
    )]
    Silent {
        /// The socket.
        socket: PathBuf,
        /// How long this command waited.
        waited: Duration,
    },
    /// The daemon answers pings, but not this request.
    #[error(
        "{}: the daemon is there and has not answered this question for {} s: a part of it hangs: look at its log, and restart it if it stays so",
        shown(socket),
        waited.as_secs()
    )]
    Stuck {
        /// The socket.
        socket: PathBuf,
        /// How long this command waited.
        waited: Duration,
    },
    /// The socket belongs to another user, and the user of this command did not name it.
    #[error(
        "{}: not trusted: {stranger}, and this command runs as {own}; whoever owns a socket decides what is reported and what is done: if you mean that daemon, name it with --socket {}",
        shown(socket),
        shown(socket)
    )]
    Untrusted {
        /// The socket.
        socket: PathBuf,
        /// The path, and its owner.
        stranger: Stranger,
        /// The user of this command.
        own: Owner,
    },
    /// Something other than a daemon's control listens there.
    #[error(
        "{}: what listens there is no control socket of a daemon (is it the socket for NBD clients?): name the control socket with --socket",
        shown(socket)
    )]
    NotControl {
        /// The socket.
        socket: PathBuf,
    },
    /// The connection broke.
    #[error("{}: {source}", shown(socket))]
    Wire {
        /// The socket.
        socket: PathBuf,
        /// How.
        source: WireError,
    },
    /// The daemon speaks another version.
    #[error(
        "{}: the daemon (calpe {program}) speaks version {found} of the control protocol, this command version {PROTOCOL_VERSION}: use the calpe of the daemon, or restart the daemon",
        shown(socket)
    )]
    Version {
        /// The socket.
        socket: PathBuf,
        /// The daemon's program version.
        program: String,
        /// The daemon's protocol version.
        found: u32,
    },
    /// The daemon refused, or failed.
    #[error(transparent)]
    Refused(#[from] RequestError),
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| shown(path).to_string()).collect::<Vec<_>>().join(", ")
}

/// What a change did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Done {
    /// One line that says what was done.
    pub message: String,
    /// Warnings, a line each.
    pub warnings: Vec<String>,
    /// What was refused or failed while the rest was done.
    pub failures: Vec<RequestError>,
}

/// A socket to find a daemon at.
#[derive(Clone, Debug)]
pub(super) struct Server {
    socket: PathBuf,
    /// Which users it may belong to; none where the user named the socket.
    trust: Option<Trust>,
    /// How long connecting may take, and answering a ping.
    patience: Duration,
}

impl Server {
    /// The socket that the user named on the command line or in the environment, or else the first
    /// default place that exists. `patience`: how long its daemon may take to answer a ping.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn choose(given: Option<&Path>, patience: Duration) -> Result<Server, ClientError> {
        let environment = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(socket) = given.map(Path::to_owned).or_else(|| environment(SOCKET_VARIABLE)) {
            return Ok(Server { socket, trust: None, patience });
        }
        let socket = find(places(environment("XDG_RUNTIME_DIR")))?;
        let system_dir = Path::new(DEFAULT_RUNTIME_DIR);
        let is_system = socket.parent() == Some(system_dir);
        let trust = Some(Trust::new(Owner::own(), is_system.then_some(system_dir)));
        Ok(Server { socket, trust, patience })
    }

    /// Connects to the process that listens there, if its user is trusted.
    fn connect(&self) -> Result<UnixStream, ClientError> {
        let socket = &self.socket;
        let untrusted =
            |stranger| ClientError::Untrusted { socket: socket.clone(), stranger, own: Owner::own() };
        let no_answer = |source| ClientError::NoAnswer { socket: socket.clone(), source };
        if let Some(trust) = &self.trust {
            trust.check_path(socket).map_err(untrusted)?;
        }
        let stream = connect_within(socket, self.patience).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => self.silent(self.patience),
            io::ErrorKind::PermissionDenied => {
                ClientError::Forbidden { socket: socket.clone(), own: Owner::own(), source }
            }
            _ => no_answer(source),
        })?;
        if let Some(trust) = &self.trust {
            // The path may lead to another socket by now; the daemon behind this connection stays
            // the same.
            let owner = Owner::of_peer(&stream).map_err(no_answer)?;
            trust.check_server(socket, owner).map_err(untrusted)?;
        }
        stream.set_write_timeout(Some(self.patience)).map_err(no_answer)?;
        Ok(stream)
    }

    /// Whether a new connection is answered within this time. A daemon that has no place for
    /// another connection says so, which is an answer.
    fn answers(&self, patience: Duration) -> bool {
        let begun = Instant::now();
        let mut server = Server { patience, ..self.clone() };
        let Ok(stream) = server.connect() else { return false };
        server.patience = patience.saturating_sub(begun.elapsed());
        let mut client = Client { server, stream: BufReader::new(Timed::new(stream)) };
        client.exchange(&Request::Ping { version: PROTOCOL_VERSION }).is_ok()
    }

    fn silent(&self, waited: Duration) -> ClientError {
        ClientError::Silent { socket: self.socket.clone(), waited }
    }

    fn broken(&self, source: WireError) -> ClientError {
        ClientError::Wire { socket: self.socket.clone(), source }
    }
}

/// A conversation with the daemon.
#[derive(Debug)]
pub(super) struct Client {
    server: Server,
    stream: BufReader<Timed>,
}

/// A stream that is read until a deadline, however slowly bytes arrive.
#[derive(Debug)]
struct Timed {
    stream: UnixStream,
    until: Instant,
}

impl Timed {
    fn new(stream: UnixStream) -> Timed {
        Timed { stream, until: Instant::now() }
    }
}

impl Read for Timed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout(Some(left))?;
        self.stream.read(buffer).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => io::ErrorKind::TimedOut.into(),
            _ => error,
        })
    }
}

impl Client {
    /// Finds the daemon and agrees on the version. `given` is what the user said.
    ///
    /// # Errors
    /// When there is none, its user is not trusted, or it has another version.
    pub(super) fn connect(given: Option<&Path>, patience: Duration) -> Result<Client, ClientError> {
        Client::open(Server::choose(given, patience)?)
    }

    /// Connects to a server that was chosen, and agrees on the version.
    ///
    /// # Errors
    /// When nothing answers, its user is not trusted, or it has another version.
    pub(super) fn open(server: Server) -> Result<Client, ClientError> {
        let stream = server.connect()?;
        let mut client = Client { server, stream: BufReader::new(Timed::new(stream)) };
        let pong = client.ask(&Request::Ping { version: PROTOCOL_VERSION }).map_err(|error| match error {
            ClientError::Wire { socket, source: WireError::Cut | WireError::Malformed(_) } => {
                ClientError::NotControl { socket }
            }
            error => error,
        })?;
        match pong {
            Reply::Pong(pong) if pong.version == PROTOCOL_VERSION => Ok(client),
            Reply::Pong(pong) => Err(ClientError::Version {
                socket: client.server.socket,
                program: pong.program,
                found: pong.version,
            }),
            other => Err(client.unexpected(&other)),
        }
    }

    /// Where the daemon was found.
    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    /// Sends a request, and takes any answer but a refusal.
    ///
    /// # Errors
    /// When the connection breaks, or the daemon refuses.
    pub(super) fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        match self.exchange(request)? {
            Reply::Error(error) => Err(error.into()),
            reply => Ok(reply),
        }
    }

    /// Asks for a change.
    ///
    /// # Errors
    /// See [`Client::ask`].
    pub(super) fn change(&mut self, request: &Request) -> Result<Done, ClientError> {
        match self.ask(request)? {
            Reply::Done { message, warnings, failures } => Ok(Done { message, warnings, failures }),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Asks for the status of one array or of all.
    ///
    /// # Errors
    /// See [`Client::ask`].
    pub(super) fn status(&mut self, array: Option<&str>) -> Result<Status, ClientError> {
        match self.ask(&Request::Status { array: array.map(str::to_owned) })? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The error for a reply of the wrong kind.
    pub(super) fn unexpected(&self, reply: &Reply) -> ClientError {
        let kind =
            serde_json::to_value(reply).ok().and_then(|value| Some(value["reply"].as_str()?.to_owned()));
        let text = format!("the daemon's answer has the wrong kind ({})", kind.unwrap_or_default());
        self.server.broken(WireError::Io(io::Error::new(io::ErrorKind::InvalidData, text)))
    }

    fn exchange(&mut self, request: &Request) -> Result<Reply, ClientError> {
        let began = Instant::now();
        let sent = write_message(&mut self.stream.get_mut().stream, request);
        if let Err(error) = &sent
            && error.kind() == io::ErrorKind::InvalidData
        {
            // The request cannot be encoded: nothing was sent, and no answer will come.
            let error = io::Error::new(error.kind(), format!("the request cannot be sent: {error}"));
            return Err(self.server.broken(error.into()));
        }
        self.wait_for_reply(request, sent.is_ok())?;
        // The answer to a ping is a few bytes.
        let is_ping = matches!(request, Request::Ping { .. });
        let limit = if is_ping { self.server.patience } else { REST_OF_REPLY_MAX };
        self.stream.get_mut().until = if is_ping { began } else { Instant::now() } + limit;
        let failed = match read_message(&mut self.stream, MAX_REPLY_BYTES) {
            // A daemon that turns a client away says why before it reads a request.
            Ok(Some(reply)) => return Ok(reply),
            Ok(None) => WireError::Cut,
            Err(WireError::Io(error)) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(self.server.silent(began.elapsed()));
            }
            Err(error) => error,
        };
        Err(self.server.broken(sent.err().map_or(failed, WireError::Io)))
    }

    /// Waits until a reply begins. A request that changes something may take any time, as long as
    /// the daemon answers pings.
    fn wait_for_reply(&self, request: &Request, was_sent: bool) -> Result<(), ClientError> {
        let began = Instant::now();
        let patience = self.server.patience;
        let is_ping = matches!(request, Request::Ping { .. });
        // The ping is sent early enough that its answer is known when the patience is over.
        let is_last = is_ping || !was_sent;
        let first = if is_last { patience } else { patience / WAITED_BEFORE_PING };
        let is_readable = |time| self.is_readable(time).map_err(|error| self.server.broken(error.into()));
        while !is_readable(first)? {
            // A reply that has arrived meanwhile counts, whatever became of the ping.
            if is_last || (!self.server.answers(patience - first) && !is_readable(Duration::ZERO)?) {
                return Err(self.server.silent(began.elapsed().min(patience)));
            }
            let waited = began.elapsed();
            let is_question =
                matches!(request, Request::Status { .. } | Request::Events { .. } | Request::History { .. });
            if is_question && waited >= QUESTION_MAX {
                return Err(ClientError::Stuck { socket: self.server.socket.clone(), waited });
            }
        }
        Ok(())
    }

    /// Whether there are bytes to read, or the end, within this time.
    fn is_readable(&self, time: Duration) -> io::Result<bool> {
        if !self.stream.buffer().is_empty() {
            return Ok(true);
        }
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // Rounded up, so that the rest of a millisecond is not waited for in a busy loop.
            let left = PollTimeout::try_from(left.as_micros().div_ceil(1000)).unwrap_or(PollTimeout::MAX);
            match poll(&mut [PollFd::new(self.stream.get_ref().stream.as_fd(), PollFlags::POLLIN)], left) {
                Err(Errno::EINTR) => {}
                Ok(0) if Instant::now() < end => {}
                Ok(ready) => return Ok(ready > 0),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// The places to look in, in order.
fn places(xdg_runtime_dir: Option<PathBuf>) -> Vec<PathBuf> {
    let here = PathBuf::from(PLACE_HERE);
    let system = Path::new(DEFAULT_RUNTIME_DIR).join(CONTROL_SOCKET_NAME);
    let session = xdg_runtime_dir.map(|dir| dir.join("calpe/control.sock"));
    [Some(here), session, Some(system)].into_iter().flatten().collect()
}

/// The first place that exists. One that exists and does not answer is not passed over: the next
/// daemon might have an array of the same name. A place in a directory that this user may not enter
/// comes last.
fn find(places: Vec<PathBuf>) -> Result<PathBuf, ClientError> {
    let is_there = |place: &&PathBuf| place.exists();
    let is_hidden = |place: &&PathBuf| matches!(place.try_exists(), Err(error) if error.kind() == io::ErrorKind::PermissionDenied);
    match places.iter().find(is_there).or_else(|| places.iter().rfind(is_hidden)) {
        Some(place) => Ok(place.clone()),
        None => Err(ClientError::NoDaemon { tried: places }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{ErrorCode, MAX_REQUEST_BYTES, Pong};
    use std::io::Write;
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Far longer than anything here takes.
    const PATIENCE: Duration = Duration::from_secs(60);
    /// For daemons that never answer.
    const SHORT: Duration = Duration::from_millis(50);

    /// Answers each request of one connection with the next reply.
    fn daemon(socket: &Path, replies: Vec<Reply>) -> thread::JoinHandle<Vec<Request>> {
        let listener = UnixListener::bind(socket).unwrap();
        thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut stream = BufReader::new(stream);
            let mut seen = Vec::new();
            for reply in replies {
                seen.push(read_message(&mut stream, MAX_REQUEST_BYTES).unwrap().unwrap());
                write_message(stream.get_mut(), &reply).unwrap();
            }
            seen
        })
    }

    fn pong(version: u32) -> Reply {
        Reply::Pong(Pong { version, program: "9.9.9".into(), pid: 1 })
    }

    #[test]
    fn asks_in_turn_and_gets_what_it_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let refusal = RequestError { code: ErrorCode::NoSuchArray, message: "no array 'x'".into() };
        let replies = vec![
            pong(PROTOCOL_VERSION),
            Reply::Status(Status::new(vec![])),
            Reply::Done { message: "ok".into(), warnings: vec![], failures: vec![] },
            Reply::Error(refusal),
            pong(PROTOCOL_VERSION),
        ];
        let server = daemon(&socket, replies);
        let mut client = Client::connect(Some(&socket), PATIENCE).unwrap();
        assert_eq!(client.status(None).unwrap().arrays, vec![]);
        let export = Request::Export { array: "x".into(), force: false, dry_run: false };
        assert_eq!(client.change(&export).unwrap().message, "ok");
        let refused = client.change(&export).unwrap_err();
        assert!(matches!(&refused, ClientError::Refused(error) if error.code == ErrorCode::NoSuchArray));
        assert_eq!(refused.to_string(), "no array 'x'");
        assert!(client.status(None).unwrap_err().to_string().contains("wrong kind (pong)"));
        assert_eq!(server.join().unwrap()[2], export);
    }

    #[test]
    fn another_version_is_told_with_both_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let server = daemon(&socket, vec![pong(77)]);
        let error = Client::connect(Some(&socket), PATIENCE).unwrap_err().to_string();
        assert!(error.contains("calpe 9.9.9") && error.contains("77"), "{error}");
        server.join().unwrap();
    }

    #[test]
    fn nobody_and_a_daemon_that_dies_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        assert!(matches!(Client::connect(Some(&socket), PATIENCE), Err(ClientError::NoAnswer { .. })));
        drop(UnixListener::bind(&socket).unwrap());
        assert!(matches!(Client::connect(Some(&socket), PATIENCE), Err(ClientError::NoAnswer { .. })));
        std::fs::remove_file(&socket).unwrap();
        let server = daemon(&socket, vec![pong(PROTOCOL_VERSION)]);
        let mut client = Client::connect(Some(&socket), PATIENCE).unwrap();
        server.join().unwrap();
        assert!(matches!(client.status(None), Err(ClientError::Wire { .. })));
    }

    #[test]
    fn a_daemon_that_does_not_accept_is_given_up_also_when_its_backlog_is_full() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(1).unwrap()).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match connect_within(&socket, SHORT) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            let told = Client::connect(Some(&socket), SHORT).unwrap_err();
            assert!(matches!(told, ClientError::Silent { .. }), "{told}");
            assert!(waiting.len() < 10, "the backlog is never full");
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let told = Client::connect(Some(&socket), SHORT).unwrap_err();
        assert!(matches!(told, ClientError::Silent { .. }), "{told}");
        assert!(told.to_string().contains("does not answer"), "{told}");
    }

    #[test]
    fn a_user_who_may_not_use_the_socket_is_told_so() {
        use std::os::unix::fs::PermissionsExt;
        const NOBODY: nix::unistd::Uid = nix::unistd::Uid::from_raw(65534);
        let dir = tempfile::tempdir().unwrap();
        let hidden = dir.path().join("hidden");
        std::fs::create_dir(&hidden).unwrap();
        let socket = hidden.join("s");
        let _listener = UnixListener::bind(&socket).unwrap();
        std::fs::set_permissions(&hidden, PermissionsExt::from_mode(0o000)).unwrap();
        let looked_for = vec![dir.path().join("nowhere"), socket.clone()];
        let told = thread::spawn(move || {
            // For this thread alone. Root acts as another user on files; other threads do not.
            nix::unistd::setfsuid(NOBODY);
            assert_eq!(find(looked_for).unwrap(), socket, "it is there, as far as can be seen");
            Client::connect(Some(&socket), PATIENCE).unwrap_err()
        });
        let told = told.join().unwrap();
        std::fs::set_permissions(&hidden, PermissionsExt::from_mode(0o700)).unwrap();
        assert!(matches!(told, ClientError::Forbidden { .. }), "{told}");
        assert!(!told.to_string().contains("no daemon"), "{told}");
    }

    /// Takes a connection and answers its ping.
    fn greet(listener: &UnixListener) -> BufReader<UnixStream> {
        let mut stream = BufReader::new(listener.accept().unwrap().0);
        let asked = read_message(&mut stream, MAX_REQUEST_BYTES).unwrap();
        assert_eq!(asked, Some(Request::Ping { version: PROTOCOL_VERSION }));
        write_message(stream.get_mut(), &pong(PROTOCOL_VERSION)).unwrap();
        stream
    }

    #[test]
    fn an_order_takes_as_long_as_it_takes_while_pings_are_answered() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = thread::spawn(move || {
            let mut orders = greet(&listener);
            let order: Request = read_message(&mut orders, MAX_REQUEST_BYTES).unwrap().unwrap();
            // It answers pings, again and again, while it works on the request.
            (0..3).for_each(|_| drop(greet(&listener)));
            let message = format!("done: {order:?}");
            let reply = Reply::Done { message, warnings: vec![], failures: vec![] };
            write_message(orders.get_mut(), &reply).unwrap();
            // From now on nothing is answered any more.
            (listener, orders)
        });
        // Time enough for the thread to answer a ping on a busy machine.
        let mut client = Client::connect(Some(&socket), 20 * SHORT).unwrap();
        client.server.patience = 4 * SHORT;
        let order = Request::Repair { array: "tank".into(), dry_run: false };
        assert!(client.change(&order).unwrap().message.starts_with("done: Repair"));
        let _silent = daemon.join().unwrap();
        let told = client.change(&order).unwrap_err();
        assert!(matches!(told, ClientError::Silent { .. }), "{told}");
    }

    #[test]
    fn a_daemon_that_stops_answering_is_given_up_when_patience_is_over_and_not_later() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let daemon = thread::spawn(move || (greet(&listener), listener));
        let mut client = Client::connect(Some(&socket), PATIENCE).unwrap();
        let _silent = daemon.join().unwrap();
        client.server.patience = 20 * SHORT;
        let began = Instant::now();
        let told = client.status(None).unwrap_err();
        let took = began.elapsed();
        assert!(took >= 20 * SHORT && took < 30 * SHORT, "{took:?}");
        assert!(matches!(&told, ClientError::Silent { waited, .. } if *waited == 20 * SHORT), "{told}");
        // A request that cannot be sent fails at once.
        let bad = std::ffi::OsString::from_vec(b"/bad\xff".to_vec());
        let told = client.ask(&Request::ListImportable { dirs: vec![bad.into()] }).unwrap_err();
        assert!(told.to_string().contains("cannot be sent") && began.elapsed() < 30 * SHORT, "{told}");
    }

    #[test]
    fn an_answer_that_trickles_is_given_up_when_patience_is_over() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let begun = Instant::now();
            while begun.elapsed() < PATIENCE && stream.write_all(b" ").is_ok() {
                thread::sleep(SHORT / 10);
            }
            begun.elapsed()
        });
        let told = Client::connect(Some(&socket), 4 * SHORT).unwrap_err();
        assert!(matches!(told, ClientError::Silent { .. }), "{told}");
        assert!(server.join().unwrap() < PATIENCE / 2);
    }

    #[test]
    fn the_first_place_that_exists_counts() {
        let dir = tempfile::tempdir().unwrap();
        let places: Vec<_> = ["a", "b", "c"].map(|name| dir.path().join(name)).to_vec();
        match find(places.clone()) {
            Err(error @ ClientError::NoDaemon { .. }) => assert!(error.to_string().contains("calpe up")),
            other => panic!("{other:?}"),
        }
        std::fs::write(&places[1], "").unwrap();
        std::fs::write(&places[2], "").unwrap();
        assert_eq!(find(places.clone()).unwrap(), places[1]);
    }

    #[test]
    fn places_are_looked_at_in_the_documented_order() {
        let found = places(Some("/run/user/7".into()));
        assert_eq!(
            found,
            ["calpe-data/control.sock", "/run/user/7/calpe/control.sock", "/run/calpe/control.sock"]
                .map(PathBuf::from)
        );
        assert_eq!(places(None).len(), 2);
    }
}
