//! Which clients see which exports, and may do what with them.
//!
//! Invariants: a client sees an export only where it may use it, and an answer to one that may not
//! is the same as for a name that there is not; it is a client of the very array that it was told
//! of, or of none; what is taken away ends the sessions that have it. Certificates were verified by
//! the pumps; no cryptography happens here. Must not know volumes.

use super::super::logging;
use super::admission::{Origin, has_place};
use super::arrays::Hosted;
use super::connection::{Connection, Receiving};
use super::fence::hangup_bits;
use super::sys::hang_ups;
use super::{ArrayId, Reactor, ReactorError};
use crate::tls::{Peer, PeerRules, Right};
use calpe_core::nbd::{ExportInfo, Exports};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// That clients wait for places is told at most this often.
const WAITING_TOLD_EVERY: Duration = Duration::from_secs(60);

/// How a client is known.
#[derive(Clone, Debug)]
pub(super) enum Viewer {
    /// On a unix socket, without TLS: it got past the mode of the socket.
    Local,
    /// It proved that a certificate is its own.
    Proven(Arc<Peer>),
    /// Anything else: plaintext TCP, TLS without a certificate.
    Stranger,
}

impl Viewer {
    /// What it may do with an array of these rules; none: nothing.
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
    pub(super) arrays: &'a [Option<Hosted>],
    pub(super) viewer: Viewer,
}

impl ExportView<'_> {
    fn visible(&self) -> impl Iterator<Item = ExportInfo> {
        self.arrays.iter().flatten().filter(|array| array.is_serving()).filter_map(|array| {
            let right = self.viewer.right(array.rules.as_deref())?;
            let read_only = array.export.read_only || right == Right::Read;
            Some(ExportInfo { read_only, ..array.export.clone() })
        })
    }
}

impl ExportView<'_> {
    /// Tells the log, and nobody else, that rules keep a certificate from an export, and what its subject is for them.
    fn tell_of_refused(&self, name: &str) {
        let Viewer::Proven(peer) = &self.viewer else { return };
        let is_there = self.arrays.iter().flatten().any(|array| array.export.name == name);
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

impl Connection {
    /// How its client is known by now.
    pub(super) fn viewer(&self) -> Viewer {
        match &self.network {
            None if self.origin.is_unix() => Viewer::Local,
            None => Viewer::Stranger,
            Some(network) => network.peer.get().cloned().map_or(Viewer::Stranger, Viewer::Proven),
        }
    }

    /// Whether its session goes beyond what these rules grant. One that may only read, and might write by
    /// now, goes on.
    fn exceeds(&self, rules: Option<&PeerRules>) -> bool {
        let writes = self.nbd.export().is_some_and(|export| !export.read_only);
        match self.viewer().right(rules) {
            Some(Right::Write) => false,
            Some(Right::Read) => writes,
            None => true,
        }
    }
}

impl Reactor {
    /// Whether a session goes beyond what an array grants its client.
    pub(super) fn exceeds_rules(&self, key: usize, id: ArrayId) -> bool {
        let hosted = self.arrays.get(id.0 as usize).and_then(Option::as_ref);
        hosted.is_none_or(|hosted| self.connections[key].exceeds(hosted.rules.as_deref()))
    }

    /// Replaces the rules of an array. Returns how many sessions end by it.
    pub(super) fn set_rules(
        &mut self,
        id: ArrayId,
        rules: Option<Arc<PeerRules>>,
    ) -> Result<usize, ReactorError> {
        self.hosted(id).ok_or(ReactorError::NoSuchArray)?.rules.clone_from(&rules);
        Ok(self
            .close_where(|connection| connection.chosen == Some(id) && connection.exceeds(rules.as_deref())))
    }

    /// Everybody who is connected and has proved who it is.
    pub(super) fn peers(&self) -> Vec<Arc<Peer>> {
        let networks = self.connections.iter().filter_map(|(_, connection)| connection.network.as_ref());
        networks.filter_map(|network| network.peer.get().cloned()).collect()
    }

    /// Ends the connections of these, and, if nobody may be `anonymous` any more, those with TLS and without a certificate.
    /// Returns how many there were.
    pub(super) fn end_sessions(&mut self, peers: &[Arc<Peer>], anonymous: bool) -> usize {
        self.close_where(|connection| match connection.viewer() {
            Viewer::Proven(peer) => peers.iter().any(|ended| Arc::ptr_eq(ended, &peer)),
            Viewer::Stranger => anonymous && connection.network.is_some(),
            Viewer::Local => false,
        })
    }
}

impl Reactor {
    /// A connection has chosen its export. Without a place for one more client it waits for one, and is a stranger until then.
    pub(super) fn selected(&mut self, key: usize) {
        let name = self.connections[key].nbd.export().map(|export| export.name.clone()).unwrap_or_default();
        self.connections[key].chosen = self.array_of_export(&name);
        self.seat(key);
    }

    fn seat(&mut self, key: usize) {
        let unix = self.connections[key].guest(key).origin == Origin::Unix;
        let guests = self.connections.iter().map(|(key, connection)| connection.guest(key));
        let reserve = self.listeners.iter().any(|(_, listener)| listener.is_unix());
        if !has_place(guests, unix, self.config.connections_max, reserve) {
            tracing::debug!(connection = key, "there are enough clients: it waits");
            self.tell_waiting();
            self.connections[key].waits_for_place = true;
            self.waiting.push_back(key);
            return;
        }
        self.connections[key].waits_for_place = false;
        let array = self.connections[key].chosen;
        self.connections[key].array = array;
        // Its array may be for it no more, or going: it may have waited.
        let is_served = |id| self.hosted(id).is_some_and(|hosted| hosted.is_serving());
        if !array.is_some_and(is_served) || array.is_none_or(|id| self.exceeds_rules(key, id)) {
            self.dismiss(key);
        }
        self.count_clients();
        tracing::debug!(connection = key, "client attached");
    }

    /// Tells that clients wait, which they do in silence: a place is missing, or one that has it does not leave.
    fn tell_waiting(&mut self) {
        if self.waiting_told.is_some_and(|told| told.elapsed() < WAITING_TOLD_EVERY) {
            return;
        }
        self.waiting_told = Some(Instant::now());
        tracing::warn!(
            "a client waits for a place: of {} (max_connections in [listen]) none is free for it",
            self.config.connections_max
        );
    }

    /// Closes those that have left while they waited for a place: nothing is received from them meanwhile.
    pub(super) fn leave_waiting(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        let left = self.hung_up(self.waiting.iter().copied());
        for key in left {
            tracing::debug!(connection = key, "client left before there was a place for it");
            self.connections[key].broken = true;
            self.mark(key);
        }
    }

    /// Drops what is left to do for clients that have gone while nothing was received from them, for they had asked for a lot, or
    /// wait: nobody reads the replies, and others may wait for their places.
    pub(super) fn leave_unheard(&mut self) {
        let unheard = self.connections.iter().filter(|(_, connection)| {
            connection.array.is_some() && !connection.broken && connection.receiving == Receiving::Nothing
        });
        let (keys, sockets): (Vec<usize>, Vec<_>) =
            unheard.map(|(key, connection)| (key, connection.socket.as_fd())).unzip();
        // The end of a stream is not the end of its client: one that has closed one half still reads.
        // What is not known now is looked at again at the next tick.
        let Some(seen) = hang_ups(&sockets) else { return };
        let gone = seen.into_iter().map(|seen| seen & hangup_bits(false) != 0);
        let gone: Vec<usize> =
            keys.into_iter().zip(gone).filter_map(|(key, gone)| gone.then_some(key)).collect();
        for key in gone {
            tracing::debug!(connection = key, "client gone: what it asked for is dropped");
            self.connections[key].broken = true;
            self.mark(key);
        }
    }

    /// Gives places to those that wait for one, in the order in which they came.
    pub(super) fn seat_waiting(&mut self) {
        for key in std::mem::take(&mut self.waiting) {
            self.seat(key);
            self.mark(key);
        }
    }
}
