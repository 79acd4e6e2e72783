//! TLS of the listeners of a daemon. Must not know what is served on them.

use super::error::RunError;
use crate::daemon::config::{Config, ListenConfig};
use crate::daemon::reactor::{ListenAddress, ListenTls, Listener};
use crate::daemon::service::Daemon;
use crate::member::set_remote_tls;
use crate::tls::{ClientTls, ServerTls, TlsFileError};
use calpe_core::nbd::TlsMode;
use std::sync::Arc;

/// TLS of the listeners of this daemon.
pub(super) struct Tls {
    tcp: ListenTls,
    unix: ListenTls,
    pub(super) server: Option<Arc<ServerTls>>,
}

impl Tls {
    pub(super) fn load(config: &Config) -> Result<Tls, TlsFileError> {
        set_remote_tls(config.remote.as_ref().map(ClientTls::load).transpose()?);
        let Some(tls) = &config.listen.tls else {
            return Ok(Tls { tcp: ListenTls::default(), unix: ListenTls::default(), server: None });
        };
        let server = Some(Arc::new(ServerTls::load(&tls.files)?));
        let with = |mode| ListenTls { mode, server: server.clone() };
        Ok(Tls { tcp: with(tls.tcp), unix: with(tls.unix), server })
    }

    /// Refuses an address that other hosts can reach without certificates.
    pub(super) fn check_exposure(
        &self,
        config: &ListenConfig,
        address: &ListenAddress,
    ) -> Result<(), RunError> {
        let ListenAddress::Tcp(tcp) = address else { return Ok(()) };
        let proven = self.tcp.mode == TlsMode::Required
            && self.server.as_ref().is_some_and(|server| server.demands_certificates());
        if tcp.ip().to_canonical().is_loopback() || proven || config.plaintext {
            return Ok(());
        }
        Err(RunError::Exposed { address: address.clone() })
    }

    /// Has the daemon accept NBD clients on a listener.
    pub(super) fn listen(&self, daemon: &Daemon, listener: Listener) {
        let tls = match listener.address() {
            ListenAddress::Tcp(_) => &self.tcp,
            ListenAddress::Unix(_) => &self.unix,
        };
        let mode = tls.mode;
        let address = daemon.arrays().accept_on(listener.with_tls(tls.clone()));
        tracing::info!(%address, tls = ?mode, "listening for NBD clients");
    }
}
