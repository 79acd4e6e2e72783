//! TLS to the servers of remote members: chooses the certificates, and starts the encrypted stream.
//!
//! Invariant: a URI that demands TLS is never connected to without. Must not know the protocol on
//! the stream.

use super::RemoteError;
use crate::tls::{ClientFiles, ClientTls, Pumps, Tunnel};
use calpe_core::nbd::{NbdAddress, NbdUri};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{LazyLock, PoisonError, RwLock};

/// The name in the certificate of a server behind a unix socket, unless the URI gives another.
const LOCAL_NAME: &str = "localhost";

static CONFIGURED: RwLock<Configured> = RwLock::new(Configured::Nowhere);

/// Source of certificates for URIs that name none.
enum Configured {
    /// This process has no configuration.
    Nowhere,
    /// The configuration of this process, if it names some.
    Here(Option<ClientTls>),
}

static PUMPS: LazyLock<Pumps> = LazyLock::new(Pumps::default);

/// Sets the certificates of this process for URIs that name none.
pub(crate) fn set_remote_tls(tls: Option<ClientTls>) {
    *CONFIGURED.write().unwrap_or_else(PoisonError::into_inner) = Configured::Here(tls);
}

/// The certificates for a URI; none where it does not demand TLS.
pub(super) fn tls_of(uri: &NbdUri) -> Result<Option<ClientTls>, RemoteError> {
    if !uri.tls {
        return Ok(None);
    }
    let tls = match &uri.certificates {
        Some(directory) => ClientTls::load(&files_in(Path::new(directory)))
            .map_err(|error| RemoteError::Certificates(error.to_string()))?,
        None => configured(&CONFIGURED.read().unwrap_or_else(PoisonError::into_inner))?,
    };
    Ok(Some(match &uri.server_name {
        Some(name) => tls.for_server(name),
        None => tls,
    }))
}

/// The certificates for a URI that names none.
fn configured(source: &Configured) -> Result<ClientTls, RemoteError> {
    let advice = match source {
        Configured::Here(Some(tls)) => return Ok(tls.clone()),
        Configured::Here(None) => ", or set tls_ca in section [remote] of the daemon's configuration",
        Configured::Nowhere => {
            ", with ca-cert.pem in it and, where the server wants them, client-cert.pem and client-key.pem"
        }
    };
    let what = format!("there are none for it: add '?tls-certificates=DIR' to the URI{advice}");
    Err(RemoteError::Certificates(what))
}

/// The file names that libnbd and nbdkit use, so that one directory serves all.
fn files_in(directory: &Path) -> ClientFiles {
    let (certificate, key) = (directory.join("client-cert.pem"), directory.join("client-key.pem"));
    ClientFiles {
        ca: directory.join("ca-cert.pem"),
        identity: certificate.exists().then_some((certificate, key)),
        server_name: None,
    }
}

/// Starts TLS on a connected stream.
pub(super) fn start(uri: &NbdUri, tls: &ClientTls, stream: OwnedFd) -> Result<Tunnel, RemoteError> {
    let host = match &uri.address {
        NbdAddress::Tcp { host, .. } => host,
        NbdAddress::Unix { .. } => LOCAL_NAME,
    };
    let tunnel = PUMPS.connect(stream, tls, host).map_err(RemoteError::Connect)?;
    set_nonblocking(&tunnel.socket).map_err(|errno| RemoteError::Connect(errno.into()))?;
    Ok(tunnel)
}

fn set_nonblocking(socket: &OwnedFd) -> nix::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(socket, FcntlArg::F_GETFL)?);
    fcntl(socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_reads_a_configuration_is_told_to_set_a_key_in_it() {
        let said = |source| configured(&source).map(drop).unwrap_err().to_string();
        assert!(said(Configured::Here(None)).contains("or set tls_ca in section [remote]"));
        let said = said(Configured::Nowhere);
        assert!(said.contains("'?tls-certificates=DIR'") && !said.contains("tls_ca"), "{said}");
    }
}
