//! Which clients see which exports, and what they may do with them.
//!
//! Invariants: a client sees an export only where it may use it; for an export that it may not use it gets
//! the same answer as for a name that does not exist. Certificates were verified by the pumps; no
//! cryptography happens here. Must not know volumes.

use super::directory::Directory;
use super::link::Link;
use crate::daemon::logging;
use crate::tls::{Peer, PeerRules, Right};
use calpe_core::nbd::{ExportInfo, Exports};
use std::sync::Arc;

/// How a client's identity is known.
#[derive(Clone, Debug)]
pub(super) enum Viewer {
    /// On a unix socket, without TLS: the mode of the socket let it in.
    Local,
    /// It proved that a certificate is its own.
    Proven(Arc<Peer>),
    /// Anything else: plaintext TCP, TLS without a certificate.
    Stranger,
}

impl Viewer {
    /// The identity of the client at the other end of a link, as known now.
    pub(super) fn of(link: &Link) -> Viewer {
        match link.has_tls() {
            false if link.origin().is_unix() => Viewer::Local,
            false => Viewer::Stranger,
            true => link.peer().cloned().map_or(Viewer::Stranger, Viewer::Proven),
        }
    }

    /// What it may do with an array that has these rules; none: nothing.
    fn right(&self, rules: Option<&PeerRules>) -> Option<Right> {
        match (rules, self) {
            (None, _) | (_, Viewer::Local) => Some(Right::Write),
            (Some(rules), Viewer::Proven(peer)) => rules.right_of(peer.names()),
            (Some(_), Viewer::Stranger) => None,
        }
    }
}

/// What one client can see of the arrays.
pub(super) struct ExportView<'a> {
    pub(super) directory: &'a Directory,
    pub(super) link: &'a Link,
}

impl ExportView<'_> {
    fn visible(&self) -> impl Iterator<Item = ExportInfo> {
        let serving = self.directory.all().into_iter().filter(|listed| listed.is_serving());
        let viewer = Viewer::of(self.link);
        serving.filter_map(move |listed| {
            let right = viewer.right(listed.rules().as_deref())?;
            let export = listed.export();
            Some(ExportInfo { read_only: export.read_only || right == Right::Read, ..export.clone() })
        })
    }

    /// Logs that rules keep a certificate from an export, and the subject that they saw. The client is not
    /// told.
    fn tell_of_refused(&self, name: &str) {
        let Viewer::Proven(peer) = Viewer::of(self.link) else { return };
        let is_there = self.directory.all().iter().any(|listed| listed.export().name == name);
        if is_there && logging::NOT_ALLOWED.admits() {
            tracing::info!(
                array = name,
                "not allowed by tls_allow or tls_allow_read_only: a client whose certificate has the subject {}",
                peer.names()
            );
        }
    }
}

impl Exports for ExportView<'_> {
    fn list(&self) -> Vec<ExportInfo> {
        self.visible().collect()
    }

    fn find(&self, name: &str) -> Option<ExportInfo> {
        let mut visible = self.visible();
        if name.is_empty() {
            // The default export is the only one; with several the client has to choose.
            let only = visible.next();
            return if visible.next().is_none() { only } else { None };
        }
        let found = visible.find(|export| export.name == name);
        if found.is_none() {
            self.tell_of_refused(name);
        }
        found
    }
}

/// Whether a session goes beyond what these rules grant. `writes`: whether it may write. A session that may
/// only read stays, even if the rules would now let it write.
pub(super) fn exceeds(link: &Link, writes: bool, rules: Option<&PeerRules>) -> bool {
    match Viewer::of(link).right(rules) {
        Some(Right::Write) => false,
        Some(Right::Read) => writes,
        None => true,
    }
}
