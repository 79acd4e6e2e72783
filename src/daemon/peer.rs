//! The user at the other end of a control socket, which users are trusted there, and how to connect to a unix
//! socket within a time limit.
//!
//! Invariant: an identity comes from the kernel, never from the peer's own words. Must not know what is
//! spoken.

use calpe_core::units::{Printable, shown};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use nix::unistd::{Uid, User};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Most bytes of a socket's path: the size of `sun_path` in `sockaddr_un`, less the final zero
/// byte.
pub(crate) const SOCKET_PATH_MAX: usize = 107;

/// A user of this host. Prints as name and number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner(pub Uid);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match User::from_uid(self.0) {
            Ok(Some(user)) => write!(f, "user {} ({})", Printable(&user.name), self.0),
            Ok(None) | Err(_) => write!(f, "user {}", self.0),
        }
    }
}

impl Owner {
    /// The user that this process acts as.
    #[must_use]
    pub(crate) fn own() -> Owner {
        Owner(Uid::effective())
    }

    /// The user at the other end of a connected unix socket: the one that connected, or the one
    /// that began to listen.
    ///
    /// # Errors
    /// When the system does not say.
    pub(crate) fn of_peer(socket: &impl AsFd) -> io::Result<Owner> {
        Ok(Owner(Uid::from_raw(getsockopt(socket, sockopt::PeerCredentials)?.uid())))
    }

    /// Whether this user may administer a process of `own`: it is the same user, or root, who could
    /// become it anyway.
    #[must_use]
    pub(crate) fn may_administer(self, own: Owner) -> bool {
        self == own || self.0.is_root()
    }
}

/// A path that belongs to a user who is not trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stranger {
    /// The path.
    pub path: PathBuf,
    /// Its owner.
    pub owner: Owner,
}

impl fmt::Display for Stranger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} belongs to {}", shown(&self.path), self.owner)
    }
}

/// Which owners of a default control socket a client trusts: its own user and root; for the socket
/// of the system, also the user that root gave its directory to.
#[derive(Clone, Debug)]
pub(crate) struct Trust {
    own: Owner,
    appointed: Option<Owner>,
}

impl Trust {
    /// Trust of a process that runs as `own`. `system_dir`: the directory of the socket, where only
    /// root can have made it.
    #[must_use]
    pub(crate) fn new(own: Owner, system_dir: Option<&Path>) -> Trust {
        Trust { own, appointed: system_dir.and_then(appointed_by_root) }
    }

    fn includes(&self, owner: Owner) -> bool {
        owner.may_administer(self.own) || self.appointed == Some(owner)
    }

    /// Checks that a socket and its directory belong to trusted users, and so do links in their
    /// places.
    ///
    /// # Errors
    /// The path that belongs to somebody else. A path that does not exist is no error: connecting
    /// to it fails.
    pub(crate) fn check_path(&self, socket: &Path) -> Result<(), Stranger> {
        let dir = socket.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        for path in [dir, socket] {
            let (itself, target) = (path.symlink_metadata(), path.metadata());
            for owner in [itself, target].into_iter().flatten().map(|meta| Owner(Uid::from_raw(meta.uid()))) {
                if !self.includes(owner) {
                    return Err(Stranger { path: path.into(), owner });
                }
            }
        }
        Ok(())
    }

    /// Checks that the server that was reached is of a trusted user.
    ///
    /// # Errors
    /// When the server belongs to another user.
    pub(crate) fn check_server(&self, socket: &Path, server: Owner) -> Result<(), Stranger> {
        if self.includes(server) { Ok(()) } else { Err(Stranger { path: socket.into(), owner: server }) }
    }
}

/// The owner of a directory that only root can have made or given away: the directory above it is
/// root's, and nobody else may write to that.
fn appointed_by_root(dir: &Path) -> Option<Owner> {
    let above = dir.parent()?.metadata().ok()?;
    let only_root = above.uid() == 0 && above.mode() & 0o022 == 0;
    let itself = dir.symlink_metadata().ok().filter(|itself| itself.is_dir() && only_root)?;
    Some(Owner(Uid::from_raw(itself.uid())))
}

/// Connects to a unix socket. Waits for a listener with a full backlog no longer than `patience`; the error
/// is then of the kind `WouldBlock`.
///
/// # Errors
/// What the system says.
pub(crate) fn connect_within(path: &Path, patience: Duration) -> io::Result<UnixStream> {
    let address = UnixAddr::new(path)?;
    let stream = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let limit =
        TimeVal::new(patience.as_secs().try_into().unwrap_or(i64::MAX), patience.subsec_micros().into());
    setsockopt(&stream, sockopt::SendTimeout, &limit)?;
    connect(stream.as_raw_fd(), &address)?;
    Ok(stream.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::net::UnixStream;

    const ALICE: Owner = Owner(Uid::from_raw(54321));
    const BOB: Owner = Owner(Uid::from_raw(54322));
    const ROOT: Owner = Owner(Uid::from_raw(0));

    #[test]
    fn root_and_the_same_user_may_and_nobody_else() {
        assert!(ROOT.may_administer(ALICE) && ALICE.may_administer(ALICE) && ROOT.may_administer(ROOT));
        assert!(!BOB.may_administer(ALICE) && !ALICE.may_administer(ROOT));
        assert_eq!(ALICE.to_string(), "user 54321");
        assert!(ROOT.to_string().contains("root"));
    }

    #[test]
    fn the_kernel_says_who_a_peer_is() {
        let (one, _two) = UnixStream::pair().unwrap();
        assert_eq!(Owner::of_peer(&one).unwrap(), Owner::own());
    }

    #[test]
    fn a_socket_is_believed_when_it_and_its_directory_are_of_somebody_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        fs::write(&socket, "").unwrap();
        assert_eq!(Trust::new(Owner::own(), None).check_path(&socket), Ok(()));
        // As another user than the owner of these files sees it, unless the owner is root, whom everybody
        // trusts.
        let seen_by_alice = Trust::new(ALICE, None).check_path(&socket);
        let expected = Stranger { path: dir.path().into(), owner: Owner::own() };
        assert_eq!(seen_by_alice, if Owner::own() == ROOT { Ok(()) } else { Err(expected) });
        assert_eq!(Trust::new(ALICE, None).check_server(&socket, ROOT), Ok(()));
        let told = Trust::new(ROOT, None).check_server(&socket, BOB).unwrap_err().to_string();
        assert_eq!(told, format!("{} belongs to user 54322", socket.display()));
    }

    #[test]
    fn an_owner_is_appointed_by_root_alone() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        fs::create_dir(&run).unwrap();
        let roots = Owner::own() == ROOT;
        assert_eq!(appointed_by_root(&run), roots.then_some(ROOT), "the directory above is this user's");
        // /tmp is root's, and everybody may write to it.
        assert_eq!(appointed_by_root(dir.path()).is_some(), {
            let above = dir.path().parent().unwrap().metadata().unwrap();
            above.uid() == 0 && above.mode() & 0o022 == 0
        });
        if roots {
            std::os::unix::fs::chown(&run, Some(54321), None).unwrap();
            assert_eq!(appointed_by_root(&run), Some(ALICE));
            let trust = Trust::new(ROOT, Some(&run));
            assert_eq!(trust.check_server(&run.join("s"), ALICE), Ok(()));
            assert!(trust.check_server(&run.join("s"), BOB).is_err());
            assert!(Trust::new(ROOT, None).check_path(&run.join("s")).is_err());
        }
    }
}
