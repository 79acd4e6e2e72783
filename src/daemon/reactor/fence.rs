//! Who of an array's clients has hung up: the part of fencing (see `event_loop`) that reactors share.
//!
//! A request is checked on the reactor of its connection and handed to the reactor of its array. Between the
//! two, its session is *handing over*. Invariants:
//! - A session hands modifying requests over only while it says so, and only after a look that came after it
//!   said so has not found its client hung up. It counts them as modifying before it hands them over.
//! - A look takes in every session that has modifying requests or hands over. It waits until those whose
//!   clients have hung up hand nothing over any more, and then has their requests made orphans, before the
//!   request for which it looks is handed over, or carried out, itself.
//! - A read looks, too, unless no other session has modifying requests or hands over.
//! - What reactors post for an array keeps its order. The owner posts orphans to itself, and after each look
//!   it carries out what was posted by then before an order of its own.
//!
//! So if a client has hung up before another request was received, then either the look for that request
//! finds the session handing over or with modifying requests, or the session begins to hand over after that,
//! and its own look finds the client hung up. A session that waits for others does not hand over meanwhile:
//! two of them would wait for each other.
//!
//! Must not know what is requested, or who carries it out.

use super::link::Link;
use super::orders::Requester;
use super::sockets::{PollBits, hang_ups};
use crate::tls::Goodbye;
use calpe_core::nbd::{Command, Request};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, PoisonError, RwLock};

/// What clients did to an array since it was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    /// Reads that succeeded.
    pub reads: u64,
    /// Bytes they carried.
    pub read_bytes: u64,
    /// Writes that succeeded.
    pub writes: u64,
    /// Bytes they carried.
    pub written_bytes: u64,
}

/// A client of an array, as all reactors see it. Its own reactor changes it.
#[derive(Debug)]
pub(super) struct Session {
    requester: Requester,
    /// The sockets that show a hang-up, and the events that mean one.
    sockets: Vec<Arc<OwnedFd>>,
    hangup: PollBits,
    goodbye: Option<Goodbye>,
    is_broken: AtomicBool,
    /// The client was seen to have hung up, and its requests were made orphans.
    has_hung_up: AtomicBool,
    is_handing_over: AtomicBool,
    /// Modifying requests that its volume has, or that are on their way to it.
    modifying: AtomicUsize,
    traffic: Counters,
}

#[derive(Debug, Default)]
struct Counters {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
}

impl Counters {
    fn add(&self, more: Traffic) {
        self.reads.fetch_add(more.reads, Ordering::Relaxed);
        self.read_bytes.fetch_add(more.read_bytes, Ordering::Relaxed);
        self.writes.fetch_add(more.writes, Ordering::Relaxed);
        self.written_bytes.fetch_add(more.written_bytes, Ordering::Relaxed);
    }

    fn now(&self) -> Traffic {
        Traffic {
            reads: self.reads.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            writes: self.writes.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
        }
    }
}

impl Session {
    pub(super) fn new(requester: Requester, link: &Link) -> Session {
        Session {
            requester,
            sockets: link.watched_sockets().cloned().collect(),
            hangup: link.hangup(),
            goodbye: link.goodbye().cloned(),
            is_broken: AtomicBool::new(false),
            has_hung_up: AtomicBool::new(false),
            is_handing_over: AtomicBool::new(false),
            modifying: AtomicUsize::new(0),
            traffic: Counters::default(),
        }
    }

    /// Its socket is of no use any more.
    pub(super) fn break_off(&self) {
        self.is_broken.store(true, Ordering::SeqCst);
    }

    /// Whether its client was seen to have hung up.
    pub(super) fn has_hung_up(&self) -> bool {
        self.has_hung_up.load(Ordering::SeqCst)
    }

    /// Modifying requests that its volume has, or that are on their way to it.
    pub(super) fn modifying(&self) -> usize {
        self.modifying.load(Ordering::SeqCst)
    }

    /// Counts a request that has succeeded.
    pub(super) fn count(&self, request: &Request) {
        let length = request.length;
        match request.command {
            Command::Read => self.traffic.add(Traffic { reads: 1, read_bytes: length, ..Traffic::default() }),
            Command::Write => {
                self.traffic.add(Traffic { writes: 1, written_bytes: length, ..Traffic::default() });
            }
            _ => {}
        }
    }

    fn matters(&self) -> bool {
        !self.has_hung_up() && (self.is_handing_over.load(Ordering::SeqCst) || self.modifying() > 0)
    }

    /// Whether its client is known to have hung up without polling its sockets.
    fn has_ended(&self) -> bool {
        let said_goodbye = self.goodbye.as_ref().is_some_and(Goodbye::was_said);
        said_goodbye || self.is_broken.load(Ordering::SeqCst)
    }
}

/// The clients of one array.
#[derive(Debug, Default)]
pub(super) struct Fence {
    sessions: RwLock<Vec<Arc<Session>>>,
    /// Modifying requests of all, and sessions that hand over.
    modifying: AtomicUsize,
    /// What clients did that have gone.
    before: Counters,
}

impl Fence {
    pub(super) fn enter(&self, session: &Arc<Session>) {
        self.sessions.write().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(session));
    }

    pub(super) fn leave(&self, session: &Arc<Session>) {
        self.before.add(session.traffic.now());
        let mut sessions = self.sessions.write().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|other| !Arc::ptr_eq(other, session));
    }

    pub(super) fn clients(&self) -> usize {
        self.sessions.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    pub(super) fn traffic(&self) -> Traffic {
        let sum = Counters::default();
        sum.add(self.before.now());
        let sessions = self.sessions.read().unwrap_or_else(PoisonError::into_inner);
        sessions.iter().for_each(|session| sum.add(session.traffic.now()));
        sum.now()
    }

    /// Counts a modifying request of a session that is about to be handed over.
    pub(super) fn begin(&self, session: &Session) {
        session.modifying.fetch_add(1, Ordering::SeqCst);
        self.modifying.fetch_add(1, Ordering::SeqCst);
    }

    /// It has ended, or its volume does not have it.
    pub(super) fn end(&self, session: &Session) {
        session.modifying.fetch_sub(1, Ordering::SeqCst);
        self.modifying.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether clients other than this one have modifying requests, or are about to.
    pub(super) fn others_modify(&self, session: &Session) -> bool {
        // What was received was received before this is read: see the head of this file.
        fence(Ordering::SeqCst);
        let own = session.modifying() + usize::from(session.is_handing_over.load(Ordering::SeqCst));
        self.modifying.load(Ordering::SeqCst) > own
    }

    fn begin_handing_over(&self, session: &Session) {
        if !session.is_handing_over.swap(true, Ordering::SeqCst) {
            self.modifying.fetch_add(1, Ordering::SeqCst);
        }
        // The look comes after this for everybody: see the head of this file.
        fence(Ordering::SeqCst);
    }

    /// A session hands nothing over from here on, until the next look.
    pub(super) fn rest(&self, session: &Session) {
        if session.is_handing_over.load(Ordering::Relaxed) {
            session.is_handing_over.store(false, Ordering::SeqCst);
            self.modifying.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Looks which clients have hung up: the one of `own`, and those with modifying requests. Calls `orphan`
    /// for each of the latter before it returns. `hands_over`: `own` hands modifying requests over from here
    /// on, until it [rests](Fence::rest).
    pub(super) fn look(&self, own: &Arc<Session>, hands_over: bool, mut orphan: impl FnMut(Requester)) {
        let gone = loop {
            if hands_over {
                self.begin_handing_over(own);
            }
            fence(Ordering::SeqCst);
            let sessions = self.sessions.read().unwrap_or_else(PoisonError::into_inner);
            let matter = sessions
                .iter()
                .filter(|other| if Arc::ptr_eq(other, own) { !other.has_hung_up() } else { other.matters() });
            let matter: Vec<Arc<Session>> = matter.cloned().collect();
            drop(sessions);
            let gone = hung_up(matter);
            let busy = |other: &&Arc<Session>| {
                other.requester.reactor != own.requester.reactor
                    && other.is_handing_over.load(Ordering::SeqCst)
            };
            let busy: Vec<&Arc<Session>> = gone.iter().filter(busy).collect();
            if busy.is_empty() {
                break gone;
            }
            self.rest(own);
            for other in busy {
                while other.is_handing_over.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
            }
        };
        for session in gone {
            if session.modifying() > 0 {
                orphan(session.requester);
            }
            session.has_hung_up.store(true, Ordering::SeqCst);
        }
    }
}

/// Which of these sessions' clients have hung up by now.
fn hung_up(sessions: Vec<Arc<Session>>) -> Vec<Arc<Session>> {
    let watched = sessions.iter().map(|session| Watched {
        sockets: session.sockets.iter().map(|socket| socket.as_fd()).collect(),
        hangup: session.hangup,
        has_ended: session.has_ended(),
    });
    let gone = have_hung_up(watched.collect());
    sessions.into_iter().zip(gone).filter_map(|(session, gone)| gone.then_some(session)).collect()
}

/// A client whose sockets are looked at.
// Plain data: what a look for hang-ups goes by.
pub(super) struct Watched<'a> {
    pub(super) sockets: Vec<BorrowedFd<'a>>,
    /// Events on them that mean that the client has hung up.
    pub(super) hangup: PollBits,
    /// Whether it is known to have hung up without looking.
    pub(super) has_ended: bool,
}

/// Whether each of these clients, in their order, has hung up by now.
pub(super) fn have_hung_up(clients: Vec<Watched<'_>>) -> Vec<bool> {
    let sockets: Vec<BorrowedFd<'_>> = clients.iter().flat_map(|client| client.sockets.clone()).collect();
    // This host lacks memory for the answer: then every client counts as hung up.
    let seen = hang_ups(&sockets).unwrap_or_else(|| vec![libc::POLLERR; sockets.len()]);
    let mut seen = seen.into_iter();
    let has_hung_up = |client: &Watched<'_>| {
        let seen = seen.by_ref().take(client.sockets.len()).fold(0, |all, seen| all | seen);
        client.has_ended || seen & client.hangup != 0
    };
    clients.iter().map(has_hung_up).collect()
}

/// The rules at the head of this file, step by step, in every order: a client writes on one connection,
/// closes it, and writes the same block on another one, of another reactor. That may be the owner of the
/// array.
#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    /// A rule that is left out.
    #[derive(Clone, Copy, PartialEq)]
    enum Broken {
        Nothing,
        /// Handing over is not said.
        Unsaid,
        /// The client is looked at before handing over is said.
        LooksFirst,
        /// Handing over ends before the request is handed over.
        RestsEarly,
        /// Who finds the client hung up waits for nothing.
        DoesNotWait,
        /// Who finds the client hung up makes no orphans.
        NoOrphan,
        /// The owner carries out what it was handed before only later.
        OwnerOvertakes,
    }

    /// What the owner of the array is handed, in its order.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    enum Handed {
        Earlier,
        Orphan,
        Later,
    }

    #[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
    struct State {
        is_closed: bool,
        hands_over: bool,
        modifying: bool,
        /// Next steps of the reactors of the first and the second connection.
        first: u8,
        second: u8,
        mailbox: Vec<Handed>,
        carried_out: Vec<Handed>,
    }

    const ENDED: u8 = 9;

    impl State {
        /// The reactor of the connection that is closed.
        fn step_first(&mut self, broken: Broken) {
            let order: [u8; 5] = match broken {
                Broken::LooksFirst => [1, 0, 2, 3, 4],
                Broken::RestsEarly => [0, 1, 2, 4, 3],
                _ => [0, 1, 2, 3, 4],
            };
            match order[usize::from(self.first)] {
                0 => self.hands_over = broken != Broken::Unsaid,
                1 if self.is_closed => {
                    // Dropped. It rests.
                    (self.hands_over, self.first) = (false, ENDED);
                    return;
                }
                2 => self.modifying = true,
                3 => self.mailbox.push(Handed::Earlier),
                4 => self.hands_over = false,
                _ => {}
            }
            self.first = if self.first == 4 { ENDED } else { self.first + 1 };
        }

        /// The reactor of the connection that the client goes on with. False: it waits.
        fn step_second(&mut self, broken: Broken, is_owner: bool) -> bool {
            self.second = match self.second {
                // Which sessions matter; the poll, which finds the client hung up; whether it hands over.
                0 if self.hands_over || self.modifying => 1,
                0 => 3,
                1 if self.hands_over && broken != Broken::DoesNotWait => return false,
                1 => 2,
                2 => {
                    if self.modifying && broken != Broken::NoOrphan {
                        self.mailbox.push(Handed::Orphan);
                    }
                    3
                }
                3 if is_owner => {
                    if broken != Broken::OwnerOvertakes {
                        self.carry_out();
                    }
                    4
                }
                4 => {
                    self.carried_out.push(Handed::Later);
                    ENDED
                }
                _ => {
                    self.mailbox.push(Handed::Later);
                    ENDED
                }
            };
            true
        }

        /// The owner takes what is in its mailbox.
        fn carry_out(&mut self) {
            self.carried_out.append(&mut self.mailbox);
        }

        fn is_right(&self) -> bool {
            let at = |what| self.carried_out.iter().position(|&handed| handed == what);
            match (at(Handed::Earlier), at(Handed::Orphan), at(Handed::Later)) {
                (None, _, _) | (_, _, None) => true,
                (Some(earlier), Some(orphan), Some(later)) => earlier < orphan && orphan < later,
                (Some(_), None, Some(_)) => false,
            }
        }
    }

    /// Whether a write that was left behind comes before the later one, whatever the order of the steps.
    /// `is_owner`: the reactor of the second connection owns the array.
    fn holds(broken: Broken, is_owner: bool) -> bool {
        let mut seen = HashSet::new();
        let mut left = vec![State::default()];
        while let Some(state) = left.pop() {
            if !seen.insert(state.clone()) {
                continue;
            }
            if state.first == ENDED && state.second == ENDED {
                let mut end = state.clone();
                end.carry_out();
                if !end.is_right() {
                    return false;
                }
            }
            if !state.is_closed {
                left.push(State { is_closed: true, ..state.clone() });
            }
            // The owner does that whenever it begins a turn, so not amid the steps of its own look.
            if !is_owner || matches!(state.second, 0 | ENDED) {
                let mut next = state.clone();
                next.carry_out();
                left.push(next);
            }
            if state.first != ENDED {
                let mut next = state.clone();
                next.step_first(broken);
                left.push(next);
            }
            // The client goes on after it has closed the first connection.
            if state.is_closed && state.second != ENDED {
                let mut next = state.clone();
                if next.step_second(broken, is_owner) {
                    left.push(next);
                } else {
                    assert!(state.first != ENDED, "who is waited for goes on");
                }
            }
        }
        true
    }

    #[test]
    fn what_a_closed_connection_left_behind_never_comes_after_later_writes() {
        assert!(holds(Broken::Nothing, false) && holds(Broken::Nothing, true));
    }

    #[test]
    fn each_rule_of_handing_over_is_needed() {
        use Broken::{DoesNotWait, LooksFirst, NoOrphan, OwnerOvertakes, RestsEarly, Unsaid};
        let broken = [Unsaid, LooksFirst, RestsEarly, DoesNotWait, NoOrphan];
        assert_eq!(broken.map(|rule| !holds(rule, false)), [true; 5]);
        assert_eq!(broken.map(|rule| !holds(rule, true)), [true; 5]);
        assert!(!holds(OwnerOvertakes, true));
    }
}
