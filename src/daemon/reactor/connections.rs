//! All connections, with the share of each in the turn and in the memory. Must not know what they ask for.

use super::admission::Guest;
use super::connection::Connection;
use super::orders::{ConnectionId, ReactorId, Requester};
use super::shares::{Accounts, Memory, Turn};
use super::sockets::Sockets;
use calpe_core::block_io::BufMut;
use calpe_core::nbd::Request;
use calpe_core::units::Timestamp;
use slab::Slab;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// See the head of this file.
#[derive(Debug)]
pub(super) struct Connections {
    /// The reactor that they belong to.
    reactor: ReactorId,
    all: Slab<Connection>,
    turn: Turn,
    accounts: Accounts,
}

impl Index<ConnectionId> for Connections {
    type Output = Connection;

    fn index(&self, key: ConnectionId) -> &Connection {
        &self.all[key.0]
    }
}

impl IndexMut<ConnectionId> for Connections {
    fn index_mut(&mut self, key: ConnectionId) -> &mut Connection {
        &mut self.all[key.0]
    }
}

impl Connections {
    /// No connections yet. `memory`: for the payloads of all.
    pub(super) fn new(reactor: ReactorId, memory: Arc<Memory>) -> Connections {
        Connections { reactor, all: Slab::new(), turn: Turn::default(), accounts: Accounts::new(memory) }
    }

    /// A connection as a requester.
    pub(super) fn requester(&self, connection: ConnectionId) -> Requester {
        Requester { reactor: self.reactor, connection }
    }

    pub(super) fn turn(&mut self) -> &mut Turn {
        &mut self.turn
    }

    pub(super) fn accounts(&mut self) -> &mut Accounts {
        &mut self.accounts
    }

    pub(super) fn held(&self, key: ConnectionId) -> usize {
        self.accounts.held(key)
    }

    pub(super) fn allowed(&self, key: ConnectionId) -> usize {
        self.accounts.allowed(key)
    }

    pub(super) fn is_hoarding(&self, key: ConnectionId) -> bool {
        self.accounts.is_hoarding(key)
    }

    pub(super) fn turns(&self) -> u64 {
        self.turn.number()
    }

    pub(super) fn has_work(&self) -> bool {
        self.turn.has_work()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn contains(&self, key: ConnectionId) -> bool {
        self.all.contains(key.0)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (ConnectionId, &Connection)> {
        self.all.iter().map(|(key, connection)| (ConnectionId(key), connection))
    }

    /// The connections that meet a condition.
    pub(super) fn which(&self, is: impl Fn(ConnectionId, &Connection) -> bool) -> Vec<ConnectionId> {
        self.iter().filter(|(key, connection)| is(*key, connection)).map(|(key, _)| key).collect()
    }

    /// Their standings for places.
    pub(super) fn guests(&self) -> impl Iterator<Item = Guest> {
        self.iter().map(|(key, connection)| connection.guest(key))
    }

    /// Adds a connection, to be parsed and settled.
    pub(super) fn insert(&mut self, connection: Connection) -> ConnectionId {
        let key = ConnectionId(self.all.insert(connection));
        self.turn.enter(key);
        self.accounts.enter(key);
        self.turn.mark(key);
        key
    }

    /// Removes a connection: its number may be used again.
    pub(super) fn remove(&mut self, key: ConnectionId) -> Connection {
        self.turn.leave(key);
        self.accounts.leave(key);
        self.all.remove(key.0)
    }

    /// Breaks a connection off; what is left of it is dropped when this turn ends.
    pub(super) fn break_off(&mut self, key: ConnectionId) {
        self[key].break_off();
        self.turn.mark(key);
    }

    /// Receives a payload into `buf`, of which `have` bytes are there.
    pub(super) fn receive_payload(
        &mut self,
        sockets: &mut Sockets,
        now: Timestamp,
        key: ConnectionId,
        request: Request,
        (buf, have): (BufMut, usize),
    ) {
        let connection = &mut self[key];
        connection.receives_payload(request, have, now);
        sockets.receive(key.0, connection.link().socket(), buf, have, true);
    }
}
