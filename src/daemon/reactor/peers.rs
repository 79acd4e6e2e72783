//! What the reactors of a daemon share, and to which of them a client is dealt. Must not know what is posted.

use super::directory::Directory;
use super::job_pool::JobPool;
use super::large::LargeToken;
use super::mailbox::{Bell, Mailbox, Post};
use super::orders::{ConnectionId, ReactorId};
use super::shares::Memory;
use calpe_core::units::Timestamp;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The reactor that accepts connections and has the places of all clients.
pub(super) const ACCEPTOR: ReactorId = ReactorId(0);

/// See the head of this file.
// Plain data: each part is shared by itself.
#[derive(Debug)]
pub(super) struct Peers {
    /// By reactor.
    pub(super) mailboxes: Vec<Arc<Mailbox>>,
    pub(super) directory: Arc<Directory>,
    pub(super) bell: Arc<Bell>,
    /// Memory for the requests and unread replies of clients.
    pub(super) memory: Arc<Memory>,
    pub(super) large_place: Arc<LargeToken>,
    pub(super) jobs: Arc<JobPool>,
    pub(super) pulse: Pulse,
    /// Reactors that have ended.
    ended: AtomicUsize,
    /// Reactors that work, or have others work for them.
    awake: AtomicUsize,
    cores: usize,
}

impl Peers {
    /// For `count` reactors, whose clients share `payload_bytes` of memory.
    ///
    /// # Errors
    /// When the system has no descriptors for them.
    pub(super) fn new(count: usize, payload_bytes: usize) -> io::Result<Peers> {
        let mailboxes: io::Result<Vec<_>> = (0..count).map(|_| Mailbox::new().map(Arc::new)).collect();
        Ok(Peers {
            mailboxes: mailboxes?,
            directory: Arc::default(),
            bell: Arc::default(),
            memory: Arc::new(Memory::new(payload_bytes, count)),
            large_place: Arc::default(),
            jobs: Arc::new(JobPool::new()?),
            pulse: Pulse { turned: (0..count).map(|_| AtomicU64::new(0)).collect() },
            ended: AtomicUsize::new(0),
            awake: AtomicUsize::new(count),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
        })
    }

    pub(super) fn mailbox(&self, reactor: ReactorId) -> &Arc<Mailbox> {
        &self.mailboxes[reactor.0]
    }

    /// Sends a post to another reactor. Gives it back when that reactor has ended.
    pub(super) fn post(&self, to: ReactorId, post: Post) -> Option<Post> {
        self.mailboxes[to.0].post(post)
    }

    /// A reactor is about to wait, and nobody works for it.
    pub(super) fn falls_asleep(&self) {
        self.awake.fetch_sub(1, Ordering::Relaxed);
    }

    /// A reactor has waited.
    pub(super) fn wakes(&self) {
        self.awake.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether reactors leave half of the cores or more to others. Where they do not, a thread that codes or
    /// copies for a reactor takes a core from another one, and finds in no cache what it works on.
    pub(super) fn leaves_cores(&self) -> bool {
        self.awake.load(Ordering::Relaxed) * 2 <= self.cores
    }

    /// A reactor has ended: nobody waits for its turns any more.
    pub(super) fn ends(&self, reactor: ReactorId) {
        self.pulse.beat(reactor, Timestamp(0));
        self.falls_asleep();
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether all have ended but the one that asks.
    pub(super) fn others_have_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst) + 1 >= self.mailboxes.len()
    }

    /// All reactors but one.
    pub(super) fn others(&self, me: ReactorId) -> impl Iterator<Item = ReactorId> + use<> {
        (0..self.mailboxes.len()).map(ReactorId).filter(move |&other| other != me)
    }
}

/// When the loop of each reactor last turned, in nanoseconds.
#[derive(Debug)]
pub(super) struct Pulse {
    turned: Vec<AtomicU64>,
}

impl Pulse {
    pub(super) fn beat(&self, reactor: ReactorId, now: Timestamp) {
        self.turned[reactor.0].store(now.0, Ordering::Relaxed);
    }

    /// Whether all have turned within this time, or not begun yet.
    pub(super) fn is_regular(&self, now: Timestamp, within: Duration) -> bool {
        let within = within.as_nanos() as u64;
        self.turned
            .iter()
            .map(|turned| turned.load(Ordering::Relaxed))
            .all(|turned| turned == 0 || now.nanos_since(Timestamp(turned)) <= within)
    }
}

/// Deals clients out: each goes to the reactor that has the fewest, if possible to the one that owns its
/// array.
#[derive(Debug)]
pub(super) struct Dealer {
    /// Clients of each reactor.
    clients: Vec<usize>,
    /// Where connections go that have a place and cannot be handed over yet.
    moving: HashMap<ConnectionId, ReactorId>,
}

impl Dealer {
    pub(super) fn new(reactors: usize) -> Dealer {
        Dealer { clients: vec![0; reactors], moving: HashMap::new() }
    }

    /// Chooses the reactor of a new client of an array with this owner.
    pub(super) fn choose(&mut self, owner: ReactorId) -> ReactorId {
        let least = self.clients.iter().copied().min().unwrap_or(0);
        let first = self.clients.iter().position(|&clients| clients == least).unwrap_or(0);
        let chosen = if self.clients[owner.0] == least { owner } else { ReactorId(first) };
        self.clients[chosen.0] += 1;
        chosen
    }

    /// A client stays here whatever was chosen.
    pub(super) fn keep(&mut self, here: ReactorId) {
        self.clients[here.0] += 1;
    }

    /// A connection is to be handed to a reactor.
    pub(super) fn moves(&mut self, key: ConnectionId, to: ReactorId) {
        self.moving.insert(key, to);
    }

    /// Where it goes, now that it can be handed over or has gone; none where it was not to be handed over.
    pub(super) fn moved(&mut self, key: ConnectionId) -> Option<ReactorId> {
        self.moving.remove(&key)
    }

    /// A client of a reactor has gone.
    pub(super) fn gone(&mut self, from: ReactorId) {
        self.clients[from.0] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_dealt_out_evenly_and_to_the_owner_of_their_array_first() {
        let mut dealer = Dealer::new(3);
        let dealt: Vec<usize> = (0..4).map(|_| dealer.choose(ReactorId(1)).0).collect();
        assert_eq!(dealt, [1, 0, 2, 1]);
        dealer.gone(ReactorId(2));
        assert_eq!(dealer.choose(ReactorId(1)), ReactorId(2));
        assert_eq!(dealer.choose(ReactorId(0)), ReactorId(0));
    }
}
