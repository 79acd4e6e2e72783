//! The client half of the control socket: find the daemon, speak its version, ask. Must not know what is printed.
//!
//! Invariant: a socket that nobody named is spoken to only if it belongs to this user, to root, or to the user that root
//! gave the system's runtime directory to. A socket that was named is believed: whoever names it knows whose it is.

use super::args::SOCKET_VARIABLE;
use crate::control::{
    MAX_REPLY_BYTES, PROTOCOL_VERSION, Reply, Request, RequestError, Status, WireError, read_message,
    write_message,
};
use crate::daemon::config::{CONTROL_SOCKET_NAME, DEFAULT_RUNTIME_DIR};
use crate::daemon::peer::{Owner, Stranger, Trust};
use crate::units::shown;
use std::io::{self, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a reply may take. An export that drains, or an import that looks at a thousand devices, takes seconds;
/// who waits longer than this waits for a daemon that hangs.
const REPLY_TIMEOUT: Duration = Duration::from_secs(120);

/// Where `calpe up` listens, seen from where it was started.
const PLACE_HERE: &str = "calpe-data/control.sock";

/// Why the daemon did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no socket anywhere.
    #[error(
        "no daemon found (looked for {}): start one with 'calpe up' or 'calpe serve', or name its socket with --socket",
        list(tried)
    )]
    NoDaemon {
        /// Where was looked.
        tried: Vec<PathBuf>,
    },
    /// There is a socket, and nobody behind it.
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
    /// Somebody else's socket, which nobody named.
    #[error(
        "{}: not trusted: {stranger}, and this command runs as {own}; whoever owns a socket decides what is reported and what is done: if you mean that daemon, name it with --socket {}",
        shown(socket),
        shown(socket)
    )]
    Untrusted {
        /// The socket.
        socket: PathBuf,
        /// What is whose.
        stranger: Stranger,
        /// Who asks.
        own: Owner,
    },
    /// The conversation broke off.
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
pub struct Done {
    /// One line: what was done.
    pub message: String,
    /// More to know, a line each.
    pub warnings: Vec<String>,
}

/// A socket to find a daemon at.
#[derive(Clone, Debug)]
pub struct Server {
    socket: PathBuf,
    /// Whom it may belong to; none where somebody named it, and knows.
    trust: Option<Trust>,
}

impl Server {
    /// The socket that the user named on the command line or in the environment, or else the first place that exists.
    ///
    /// # Errors
    /// When there is none.
    pub fn choose(given: Option<&Path>) -> Result<Server, ClientError> {
        let environment = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(socket) = given.map(Path::to_owned).or_else(|| environment(SOCKET_VARIABLE)) {
            return Ok(Server { socket, trust: None });
        }
        let socket = find(places(environment("XDG_RUNTIME_DIR")))?;
        let system_dir = Path::new(DEFAULT_RUNTIME_DIR);
        let is_system = socket.parent() == Some(system_dir);
        let trust = Some(Trust::new(Owner::own(), is_system.then_some(system_dir)));
        Ok(Server { socket, trust })
    }
}

/// A conversation with the daemon.
#[derive(Debug)]
pub struct Client {
    server: Server,
    stream: BufReader<UnixStream>,
}

impl Client {
    /// Finds the daemon and agrees on the version. `given` is what the user said.
    ///
    /// # Errors
    /// When there is none, one of somebody else that was not named, or one of another version.
    pub fn connect(given: Option<&Path>) -> Result<Client, ClientError> {
        Client::open(Server::choose(given)?)
    }

    /// Connects to a server that was chosen, and agrees on the version.
    ///
    /// # Errors
    /// When nobody answers, somebody who is not trusted, or a daemon of another version.
    pub fn open(server: Server) -> Result<Client, ClientError> {
        let Server { socket, trust } = &server;
        let untrusted =
            |stranger| ClientError::Untrusted { socket: socket.clone(), stranger, own: Owner::own() };
        let no_answer = |source| ClientError::NoAnswer { socket: socket.clone(), source };
        if let Some(trust) = trust {
            trust.check_path(socket).map_err(untrusted)?;
        }
        let stream = UnixStream::connect(socket).map_err(no_answer)?;
        if let Some(trust) = trust {
            // The path may be another one's by now; who answers stays.
            let owner = Owner::of_peer(&stream).map_err(no_answer)?;
            trust.check_server(socket, owner).map_err(untrusted)?;
        }
        stream.set_read_timeout(Some(REPLY_TIMEOUT)).map_err(no_answer)?;
        stream.set_write_timeout(Some(REPLY_TIMEOUT)).map_err(no_answer)?;
        let mut client = Client { server, stream: BufReader::new(stream) };
        match client.ask(&Request::Ping { version: PROTOCOL_VERSION })? {
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
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Asks, and takes any answer but a refusal.
    ///
    /// # Errors
    /// When the conversation breaks off, or the daemon refuses.
    pub fn ask(&mut self, request: &Request) -> Result<Reply, ClientError> {
        let reply = self.exchange(request).map_err(|error| self.broken(error))?;
        match reply {
            Reply::Error(error) => Err(error.into()),
            reply => Ok(reply),
        }
    }

    /// Asks for a change.
    ///
    /// # Errors
    /// See [`Client::ask`].
    pub fn change(&mut self, request: &Request) -> Result<Done, ClientError> {
        match self.ask(request)? {
            Reply::Done { message, warnings } => Ok(Done { message, warnings }),
            other => Err(self.unexpected(&other)),
        }
    }

    /// Asks for the status of one array or of all.
    ///
    /// # Errors
    /// See [`Client::ask`].
    pub fn status(&mut self, array: Option<&str>) -> Result<Status, ClientError> {
        match self.ask(&Request::Status { array: array.map(str::to_owned) })? {
            Reply::Status(status) => Ok(status),
            other => Err(self.unexpected(&other)),
        }
    }

    /// The error for a reply of the wrong kind.
    pub fn unexpected(&self, reply: &Reply) -> ClientError {
        let kind =
            serde_json::to_value(reply).ok().and_then(|value| Some(value["reply"].as_str()?.to_owned()));
        let text = format!("the daemon's answer has the wrong kind ({})", kind.unwrap_or_default());
        self.broken(WireError::Io(io::Error::new(io::ErrorKind::InvalidData, text)))
    }

    fn exchange(&mut self, request: &Request) -> Result<Reply, WireError> {
        let sent = write_message(self.stream.get_mut(), request);
        match read_message(&mut self.stream, MAX_REPLY_BYTES) {
            // A daemon that turns a client away says why before it is asked.
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(sent.err().map_or(WireError::Cut, WireError::Io)),
            Err(error) => Err(sent.err().map_or(error, WireError::Io)),
        }
    }

    fn broken(&self, source: WireError) -> ClientError {
        ClientError::Wire { socket: self.server.socket.clone(), source }
    }
}

/// The places to look in, in order.
fn places(xdg_runtime_dir: Option<PathBuf>) -> Vec<PathBuf> {
    let here = PathBuf::from(PLACE_HERE);
    let system = Path::new(DEFAULT_RUNTIME_DIR).join(CONTROL_SOCKET_NAME);
    let session = xdg_runtime_dir.map(|dir| dir.join("calpe/control.sock"));
    [Some(here), session, Some(system)].into_iter().flatten().collect()
}

/// The first place that exists. One that exists and does not answer is not passed over: the next daemon might have an
/// array of the same name.
fn find(places: Vec<PathBuf>) -> Result<PathBuf, ClientError> {
    match places.iter().find(|place| place.exists()) {
        Some(place) => Ok(place.clone()),
        None => Err(ClientError::NoDaemon { tried: places }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{ErrorCode, MAX_REQUEST_BYTES, Pong};
    use std::os::unix::net::UnixListener;
    use std::thread;

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
            Reply::Done { message: "ok".into(), warnings: vec![] },
            Reply::Error(refusal),
            pong(PROTOCOL_VERSION),
        ];
        let server = daemon(&socket, replies);
        let mut client = Client::connect(Some(&socket)).unwrap();
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
        let error = Client::connect(Some(&socket)).unwrap_err().to_string();
        assert!(error.contains("calpe 9.9.9") && error.contains("77"), "{error}");
        server.join().unwrap();
    }

    #[test]
    fn nobody_and_a_daemon_that_dies_are_told_apart() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        assert!(matches!(Client::connect(Some(&socket)), Err(ClientError::NoAnswer { .. })));
        drop(UnixListener::bind(&socket).unwrap());
        assert!(matches!(Client::connect(Some(&socket)), Err(ClientError::NoAnswer { .. })));
        std::fs::remove_file(&socket).unwrap();
        let server = daemon(&socket, vec![pong(PROTOCOL_VERSION)]);
        let mut client = Client::connect(Some(&socket)).unwrap();
        server.join().unwrap();
        assert!(matches!(client.status(None), Err(ClientError::Wire { .. })));
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
