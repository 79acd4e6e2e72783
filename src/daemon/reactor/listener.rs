//! Listening sockets: unix sockets of mode 0600, TCP, and what a supervisor hands over. Must not know what is
//! spoken on them, but that it may be under TLS.
//!
//! Invariants: a path is taken over only from a socket that nobody answers on; a socket file is removed with
//! its listener unless another one has taken its place. The file of a socket that a supervisor handed over
//! stays: it is the supervisor's.

use super::super::peer::{SOCKET_PATH_MAX, connect_within};
use super::sys;
use crate::member::{is_dead_and_there, is_stopped, words_for_dead};
use crate::tls::ServerTls;
use calpe_core::nbd::TlsMode;
use calpe_core::units::shown;
use nix::errno::Errno;
use nix::sys::socket::{Backlog, SockType, UnixAddr, getsockopt, sockopt};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::Pid;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the process that listens on a path may take to let a connection in. The kernel does that at once,
/// unless the listener's backlog is full because its process is stopped or hangs.
const TAKEOVER_WAIT: Duration = Duration::from_secs(2);

/// How long to retry a TCP address that is taken. The kernel frees the address of a killed daemon within a
/// fraction of a second.
const RELEASE_WAIT: Duration = Duration::from_secs(2);

/// Between two tries.
const RELEASE_RETRY: Duration = Duration::from_millis(20);

/// Where clients connect.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ListenAddress {
    /// A unix socket at this path.
    Unix(PathBuf),
    /// A TCP port.
    Tcp(SocketAddr),
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddress::Unix(path) => write!(f, "unix socket {}", shown(path)),
            ListenAddress::Tcp(address) => write!(f, "tcp {address}"),
        }
    }
}

/// Why clients cannot be listened for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ListenError {
    /// The path does not fit into a socket address.
    #[error(
        "{}: a socket's path may have at most {SOCKET_PATH_MAX} bytes: choose a shorter one",
        shown(path)
    )]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// Something else is there.
    #[error("{}: exists and is not a socket: choose another path, or remove it", shown(path))]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// Another process serves it.
    #[error("{}: another daemon answers there: stop it first, or choose another path", shown(path))]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// The process that served it was killed and has not ended yet.
    #[error(
        "{}: {}. Let that answer, or abort it (a FUSE filesystem: 'echo 1 >/sys/fs/fuse/connections/N/abort'), and start again",
        shown(path),
        words_for_dead(pid.unsigned_abs(), "which listens there")
    )]
    Dying {
        /// The path.
        path: PathBuf,
        /// Number of the process.
        pid: i32,
    },
    /// The process that serves it is stopped, and answers nothing until it is continued.
    #[error(
        "{}: process {pid}, which listens there, is stopped by a signal: let it go on ('kill -CONT {pid}'), end it, or choose another path",
        shown(path)
    )]
    Stopped {
        /// The path.
        path: PathBuf,
        /// Number of the process.
        pid: i32,
    },
    /// A process listens there and lets nobody in.
    #[error(
        "{}: a process listens there and does not answer: it is stopped or hangs: end it first, or choose another path",
        shown(path)
    )]
    Silent {
        /// The path.
        path: PathBuf,
    },
    /// Other users could put a socket of theirs in its place.
    #[error(
        "{}: every user may replace files in this directory, and a socket with them: chmod o-w it (or +t), or choose another directory",
        shown(dir)
    )]
    OpenDirectory {
        /// The directory.
        dir: PathBuf,
    },
    /// A supervisor handed over something that cannot be used.
    #[error("descriptor {descriptor} of the supervisor {fault}")]
    Unfit {
        /// Its number.
        descriptor: RawFd,
        /// What is wrong with it.
        fault: &'static str,
    },
    /// Any other error of the operating system.
    #[error("cannot listen on {address}: {source}")]
    Io {
        /// The address.
        address: ListenAddress,
        /// What the system said.
        source: io::Error,
    },
}

/// What TLS means to the clients of a listener.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListenTls {
    /// Whether clients may or must use TLS.
    pub mode: TlsMode,
    /// The server's side of TLS; there unless the mode is off.
    pub server: Option<Arc<ServerTls>>,
}

/// A bound, listening socket. Dropping it removes its socket file.
#[derive(Debug)]
pub(crate) struct Listener {
    address: ListenAddress,
    socket: OwnedFd,
    /// Device and inode of the socket file, where it is to be removed.
    file: Option<(u64, u64)>,
    /// Whether a supervisor has it, too.
    adopted: bool,
    tls: ListenTls,
}

impl Listener {
    /// Starts listening.
    ///
    /// # Errors
    /// When the address is taken or not allowed.
    pub(crate) fn bind(address: &ListenAddress) -> Result<Listener, ListenError> {
        let fail = |source: io::Error| ListenError::Io { address: address.clone(), source };
        match address {
            ListenAddress::Unix(path) => bind_unix(path, fail),
            ListenAddress::Tcp(wanted) => {
                let listener = bind_tcp(*wanted).map_err(fail)?;
                // The port may have been left to the system.
                let address = ListenAddress::Tcp(listener.local_addr().map_err(fail)?);
                Ok(Listener {
                    address,
                    socket: listener.into(),
                    file: None,
                    adopted: false,
                    tls: ListenTls::default(),
                })
            }
        }
    }

    /// Takes over a descriptor that a supervisor bound and handed to this process. Call it once for each
    /// descriptor.
    ///
    /// # Errors
    /// When it is not a listening stream socket, or its address is none that is served.
    pub(crate) fn adopt(descriptor: RawFd) -> Result<Listener, ListenError> {
        let unfit = |fault| ListenError::Unfit { descriptor, fault };
        let socket = sys::inherited(descriptor).ok_or_else(|| unfit("is not open"))?;
        match getsockopt(&socket, sockopt::SockType) {
            Ok(SockType::Stream) => {}
            Ok(_) => return Err(unfit("is not a stream socket")),
            Err(_) => return Err(unfit("is not a socket")),
        }
        if getsockopt(&socket, sockopt::AcceptConn) != Ok(true) {
            return Err(unfit("does not listen: pass listening sockets (Accept=no), not connections"));
        }
        let copy = || socket.try_clone().map_err(|_| unfit("cannot be duplicated"));
        let unix = UnixListener::from(copy()?).local_addr();
        let address = match (unix, TcpListener::from(copy()?).local_addr()) {
            // Every user of the host may connect to a socket without a file.
            (Ok(name), _) => ListenAddress::Unix(
                name.as_pathname()
                    .ok_or_else(|| unfit("is a unix socket without a path, open to every user"))?
                    .into(),
            ),
            (_, Ok(address)) => ListenAddress::Tcp(address),
            _ => return Err(unfit("is neither a unix nor a TCP socket")),
        };
        Ok(Listener { address, socket, file: None, adopted: true, tls: ListenTls::default() })
    }

    /// The same listener, with what TLS means to its clients.
    #[must_use]
    pub(crate) fn with_tls(mut self, tls: ListenTls) -> Listener {
        assert!(tls.mode == TlsMode::Off || tls.server.is_some(), "TLS without a certificate");
        self.tls = tls;
        self
    }

    /// What TLS means to its clients.
    #[must_use]
    pub(crate) fn tls(&self) -> &ListenTls {
        &self.tls
    }

    /// Whether the address could be bound, as far as the path and its directory show; binds nothing.
    ///
    /// # Errors
    /// When the path is too long, something that is not a socket is there, or others may write to its
    /// directory.
    pub(crate) fn check(address: &ListenAddress) -> Result<(), ListenError> {
        match address {
            ListenAddress::Unix(path) => check_directory(path).and_then(|()| socket_file(path)).map(|_| ()),
            ListenAddress::Tcp(_) => Ok(()),
        }
    }

    /// Where it listens; for TCP with the port that the system chose.
    #[must_use]
    pub(crate) fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Whether a supervisor handed it over and keeps it when this process ends.
    pub(super) fn is_adopted(&self) -> bool {
        self.adopted
    }

    /// Another descriptor of the socket, for the reactor.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// The socket as a standard listener, for a thread that waits on it.
    ///
    /// # Errors
    /// When the descriptor cannot be duplicated. Panics for a TCP listener.
    pub(crate) fn unix_listener(&self) -> io::Result<UnixListener> {
        assert!(matches!(self.address, ListenAddress::Unix(_)), "not a unix socket");
        Ok(self.socket.try_clone()?.into())
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let (ListenAddress::Unix(path), Some(file)) = (&self.address, self.file)
            && std::fs::symlink_metadata(path).is_ok_and(|meta| (meta.dev(), meta.ino()) == file)
        {
            // Harmless if it fails: the next daemon takes over a stale socket.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Binds a TCP address. The io_uring of a killed daemon listens until the kernel has taken it apart, so an
/// address that is taken is tried again.
fn bind_tcp(wanted: SocketAddr) -> io::Result<TcpListener> {
    let deadline = Instant::now() + RELEASE_WAIT;
    loop {
        match TcpListener::bind(wanted) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                std::thread::sleep(RELEASE_RETRY);
            }
            result => return result,
        }
    }
}

/// Whether there is a socket at the path.
fn socket_file(path: &Path) -> Result<bool, ListenError> {
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        return Err(ListenError::PathTooLong { path: path.into() });
    }
    match std::fs::symlink_metadata(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(ListenError::Io { address: ListenAddress::Unix(path.into()), source }),
        Ok(meta) if !meta.file_type().is_socket() => Err(ListenError::NotASocket { path: path.into() }),
        Ok(_) => Ok(true),
    }
}

/// The process that listens at the other end of a connection.
#[derive(Debug, PartialEq, Eq)]
enum Peer {
    Alive,
    /// It was stopped, and may go on.
    Stopped(i32),
    /// It was killed, and the kernel cannot end it yet.
    Dying(i32),
    /// A killed daemon's io_uring listens until the kernel has taken it apart; nobody will ever answer.
    Gone,
}

impl Peer {
    fn of(stream: &UnixStream) -> Peer {
        use nix::sys::signal::kill;
        let Ok(peer) = getsockopt(stream, sockopt::PeerCredentials) else { return Peer::Alive };
        match peer.pid() {
            // The process is not visible from here (another PID namespace).
            0 => Peer::Alive,
            pid if kill(Pid::from_raw(pid), None) == Err(Errno::ESRCH) => Peer::Gone,
            pid if is_dead_and_there(pid.unsigned_abs()) => Peer::Dying(pid),
            pid if is_stopped(pid.unsigned_abs()) => Peer::Stopped(pid),
            _ => Peer::Alive,
        }
    }
}

/// Makes way for a socket at a path whose socket nobody serves any more.
fn take_over(path: &Path, fail: &impl Fn(io::Error) -> ListenError) -> Result<(), ListenError> {
    let deadline = Instant::now() + RELEASE_WAIT;
    loop {
        match connect_within(path, TAKEOVER_WAIT) {
            Ok(stream) => match Peer::of(&stream) {
                Peer::Alive => return Err(ListenError::InUse { path: path.into() }),
                Peer::Stopped(pid) => return Err(ListenError::Stopped { path: path.into(), pid }),
                Peer::Gone => break,
                // Most end within a moment.
                Peer::Dying(_) if Instant::now() < deadline => std::thread::sleep(RELEASE_RETRY),
                Peer::Dying(pid) => return Err(ListenError::Dying { path: path.into(), pid }),
            },
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => break,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Err(ListenError::Silent { path: path.into() });
            }
            Err(e) => return Err(fail(e)),
        }
    }
    std::fs::remove_file(path).map_err(fail)
}

fn bind_unix(path: &Path, fail: impl Fn(io::Error) -> ListenError) -> Result<Listener, ListenError> {
    use nix::sys::socket::listen;
    check_directory(path)?;
    if socket_file(path)? {
        take_over(path, &fail)?;
    }
    let fd = bind_private(path).map_err(&fail)?;
    listen(&fd, Backlog::MAXCONN).map_err(|e| fail(e.into()))?;
    let meta = std::fs::symlink_metadata(path).map_err(&fail)?;
    Ok(Listener {
        address: ListenAddress::Unix(path.into()),
        socket: fd,
        file: Some((meta.dev(), meta.ino())),
        adopted: false,
        tls: ListenTls::default(),
    })
}

/// Binds a new socket, whose file has mode 0600 from the moment it exists, less what the umask takes away.
///
/// The kernel gives the file the mode of the descriptor's own inode (`unix_bind_bsd`), so that mode is set
/// first. A chmod of the path afterwards would come too late: until then others may open the file, and by
/// then the path may be a link to something else.
fn bind_private(path: &Path) -> io::Result<OwnedFd> {
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, bind, socket};
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

/// Refuses a directory in which others than its owner could replace this socket by one of theirs. A missing
/// directory is not refused here: binding fails.
fn check_directory(path: &Path) -> Result<(), ListenError> {
    const OTHERS_WRITE: u32 = 0o002;
    const STICKY: u32 = 0o1000;
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match std::fs::metadata(dir) {
        Ok(meta) if meta.mode() & (OTHERS_WRITE | STICKY) == OTHERS_WRITE => {
            Err(ListenError::OpenDirectory { dir: dir.into() })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_unix_socket_is_private_and_goes_with_its_listener() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&ListenAddress::Unix(path.clone())).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn the_file_of_a_socket_is_private_from_the_moment_that_it_exists() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // Nothing between bind and this check changes the mode.
        let _socket = bind_private(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_directory_that_everybody_may_write_to_is_refused_unless_it_is_sticky() {
        let dir = tempfile::tempdir().unwrap();
        let open = dir.path().join("open");
        std::fs::create_dir(&open).unwrap();
        let address = ListenAddress::Unix(open.join("s"));
        let set_mode = |mode| std::fs::set_permissions(&open, std::fs::Permissions::from_mode(mode)).unwrap();
        set_mode(0o777);
        for result in [Listener::bind(&address).map(|_| ()), Listener::check(&address)] {
            let said = result.unwrap_err().to_string();
            assert!(
                said.contains("open: every user may replace files") && said.contains("chmod o-w"),
                "{said}"
            );
        }
        set_mode(0o1777);
        drop(Listener::bind(&address).unwrap());
        set_mode(0o755);
        drop(Listener::bind(&address).unwrap());
    }

    #[test]
    fn a_stale_socket_is_taken_over_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = ListenAddress::Unix(path.clone());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let listener = Listener::bind(&address).unwrap();
        assert!(matches!(Listener::bind(&address), Err(ListenError::InUse { .. })));
        UnixStream::connect(&path).unwrap();
        drop(listener);
    }

    #[test]
    fn a_socket_of_a_process_that_was_killed_and_is_not_at_an_end_is_told_as_that() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        // The socket stays open here; the process that began to listen has died, and the kernel does not
        // update the peer's credentials.
        let script = "import os, socket, sys; s = socket.socket(fileno=0); s.bind(sys.argv[1]); s.listen()";
        let socket = nix::sys::socket::socket(
            nix::sys::socket::AddressFamily::Unix,
            SockType::Stream,
            nix::sys::socket::SockFlag::empty(),
            None,
        )
        .unwrap();
        let mut child = std::process::Command::new("python3")
            .args(["-c", script])
            .arg(&path)
            .stdin(socket.try_clone().unwrap())
            .spawn()
            .unwrap();
        let pid = child.id();
        while !is_dead_and_there(pid) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = Listener::bind(&ListenAddress::Unix(path.clone())).unwrap_err();
        assert!(
            matches!(error, ListenError::Dying { pid: told, .. } if told.unsigned_abs() == pid),
            "{error}"
        );
        assert!(path.exists());
        child.wait().unwrap();
        drop(Listener::bind(&ListenAddress::Unix(path)).unwrap());
    }

    #[test]
    fn a_socket_of_a_process_that_is_stopped_is_told_as_that_and_stays() {
        use nix::sys::signal::{Signal, kill};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let script = "import os, signal, socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); \
                      os.kill(os.getpid(), signal.SIGSTOP)";
        let mut child =
            std::process::Command::new("python3").args(["-c", script]).arg(&path).spawn().unwrap();
        while !is_stopped(child.id()) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = Listener::bind(&ListenAddress::Unix(path.clone())).unwrap_err();
        let told = format!("process {}, which listens there, is stopped", child.id());
        assert!(error.to_string().contains(&told), "{error}");
        assert!(path.exists());
        kill(Pid::from_raw(child.id() as i32), Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        drop(Listener::bind(&ListenAddress::Unix(path)).unwrap());
    }

    #[test]
    fn a_socket_whose_process_lets_nobody_in_is_given_up_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        nix::sys::socket::listen(&listener, Backlog::new(1).unwrap()).unwrap();
        let mut waiting = Vec::new();
        while let Ok(stream) = connect_within(&path, Duration::from_millis(50)) {
            waiting.push(stream);
            assert!(waiting.len() < 10, "the backlog is never full");
        }
        let error = Listener::bind(&ListenAddress::Unix(path.clone())).unwrap_err();
        assert!(matches!(error, ListenError::Silent { .. }), "{error}");
        assert!(path.exists());
    }

    #[test]
    fn what_is_not_a_socket_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        std::fs::write(&path, "precious").unwrap();
        let error = Listener::bind(&ListenAddress::Unix(path.clone())).unwrap_err();
        assert!(matches!(error, ListenError::NotASocket { .. }));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(120));
        assert!(matches!(Listener::bind(&ListenAddress::Unix(long)), Err(ListenError::PathTooLong { .. })));
    }

    #[test]
    fn a_tcp_address_is_waited_for_and_one_that_stays_taken_is_told() {
        let dying = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = ListenAddress::Tcp(dying.local_addr().unwrap());
        let until = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(200));
            drop(dying);
        });
        let listener = Listener::bind(&address).unwrap();
        until.join().unwrap();
        let error = Listener::bind(&address).unwrap_err().to_string();
        assert!(error.contains("Address already in use"), "{error}");
        drop(listener);
    }

    #[test]
    fn a_tcp_listener_tells_its_port() {
        let listener = Listener::bind(&ListenAddress::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        match listener.address() {
            ListenAddress::Tcp(address) => assert_ne!(address.port(), 0),
            other => panic!("{other}"),
        }
    }
}
