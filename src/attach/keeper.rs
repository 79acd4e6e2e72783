//! Keeps a device going while its server is restarted, upgraded or killed: a state machine that
//! takes events and returns actions. Sans-IO: time is an argument; the caller owns netlink and the
//! sockets.
//!
//! Invariants: a device is connected again only to an export of the same identity and size; no two
//! attempts are closer than the back-off allows; one attempt offers a socket for every connection
//! of the device, and the kernel takes as many as are dead, so the next attempt makes up for any
//! lost notice.

use super::device::Attached;
use calpe_core::units::Timestamp;

/// Time from the notice of a dead connection to the first attempt, nanoseconds: the other
/// connections die at about the same time.
const SETTLE_NANOS: u64 = 30_000_000;

/// Wait after the first failed attempt, nanoseconds; it doubles with each further one.
const BACKOFF_NANOS_MIN: u64 = 100_000_000;

/// Longest wait between attempts, nanoseconds.
const BACKOFF_NANOS_MAX: u64 = 2_000_000_000;

/// Wait after an attempt that found another export than the attached one, nanoseconds.
const STRANGER_NANOS: u64 = 10_000_000_000;

/// Time from a successful attempt to the one that confirms it, nanoseconds: a connection that the
/// kernel gave up during the attempt got no socket.
const SURE_NANOS: u64 = 1_000_000_000;

/// How often the device is checked when nothing happens, nanoseconds.
const LOOK_NANOS: u64 = 5_000_000_000;

/// What a device is attached to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// The backend that the kernel was given.
    pub backend: String,
    /// Bytes.
    pub size: u64,
    /// Whether the kernel shows the backend; if it does, a device that shows another is attached to
    /// something else.
    pub shown: bool,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The kernel gave up a connection of the device, or may have.
    LinkDead,
    /// The attempt put sockets where they were needed.
    Connected,
    /// The attempt failed; the server may come back.
    NoServer {
        /// In words.
        why: String,
    },
    /// Another export answers at the server's address.
    Stranger {
        /// In words.
        why: String,
    },
    /// What sysfs says about the device.
    Looked(Option<Attached>),
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Offer the kernel a fresh socket for each connection; answer with `Connected`, `NoServer` or
    /// `Stranger`.
    Reconnect,
    /// Check the device; answer with `Looked`.
    Look,
    /// Log something.
    Tell(Tell),
    /// There is nothing left to keep.
    End(End),
}

/// A line for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tell {
    /// Connections died.
    Lost,
    /// The connections are there again, after this many nanoseconds.
    Again(u64),
    /// No server, and why.
    Waiting(String),
    /// Another export answers, and how it differs.
    Stranger(String),
}

/// Why keeping a device ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Nothing is attached to it any more.
    Detached,
    /// Something else is attached to it.
    TakenOver {
        /// The backend that it shows, if any.
        backend: String,
    },
    /// Its size is not that of the attached export.
    Resized {
        /// Bytes.
        size: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Up,
    /// The last attempt succeeded; one more follows to confirm it.
    Unsure,
    Down {
        since: Timestamp,
        backoff: u64,
        told: Option<String>,
    },
}

/// Keeps one device.
#[derive(Debug)]
pub(super) struct Keeper {
    identity: Identity,
    state: State,
    /// When the next attempt is due.
    attempt: Option<Timestamp>,
    /// An attempt is under way.
    attempting: bool,
    /// A connection died during the attempt.
    again: bool,
    look: Timestamp,
    out: Vec<Action>,
}

impl Keeper {
    /// Keeps a device that was just attached, or, if `adopted`, one that was attached earlier and
    /// whose connections may be dead.
    #[must_use]
    pub(super) fn new(identity: Identity, adopted: bool, now: Timestamp) -> Keeper {
        Keeper {
            identity,
            state: if adopted { State::Unsure } else { State::Up },
            attempt: adopted.then_some(now),
            attempting: false,
            again: false,
            look: after(now, LOOK_NANOS),
            out: Vec::new(),
        }
    }

    /// Whether connections are missing, as far as is known.
    #[must_use]
    pub(super) fn is_down(&self) -> bool {
        matches!(self.state, State::Down { .. })
    }

    /// When to call [`Keeper::step`] next at the latest.
    #[must_use]
    pub(super) fn deadline(&self) -> Timestamp {
        self.attempt.map_or(self.look, |attempt| attempt.min(self.look))
    }

    /// Takes an event and returns what to do now, in order.
    pub(super) fn step(&mut self, event: Option<Event>, now: Timestamp) -> Vec<Action> {
        match event {
            None => {}
            Some(Event::LinkDead) => self.link_dead(now),
            Some(Event::Connected) => self.connected(now),
            Some(Event::NoServer { why }) => self.failed(why, None, now),
            Some(Event::Stranger { why }) => self.failed(why, Some(STRANGER_NANOS), now),
            Some(Event::Looked(found)) => self.looked(found),
        }
        if !self.attempting && self.attempt.is_some_and(|at| at <= now) {
            self.attempt = None;
            self.attempting = true;
            self.out.push(Action::Reconnect);
        }
        if self.look <= now {
            self.look = after(now, LOOK_NANOS);
            self.out.push(Action::Look);
        }
        std::mem::take(&mut self.out)
    }

    fn link_dead(&mut self, now: Timestamp) {
        if self.attempting {
            self.again = true;
        }
        if self.is_down() {
            return;
        }
        self.out.push(Action::Tell(Tell::Lost));
        self.state = State::Down { since: now, backoff: BACKOFF_NANOS_MIN, told: None };
        self.attempt = Some(after(now, SETTLE_NANOS));
    }

    fn connected(&mut self, now: Timestamp) {
        self.attempting = false;
        if std::mem::take(&mut self.again) {
            self.attempt = Some(after(now, SETTLE_NANOS));
            return;
        }
        if let State::Down { since, .. } = self.state {
            self.out.push(Action::Tell(Tell::Again(now.nanos_since(since))));
            self.state = State::Unsure;
            self.attempt = Some(after(now, SURE_NANOS));
        } else {
            self.state = State::Up;
        }
    }

    fn failed(&mut self, why: String, wait: Option<u64>, now: Timestamp) {
        self.attempting = false;
        self.again = false;
        if !self.is_down() {
            self.state = State::Down { since: now, backoff: BACKOFF_NANOS_MIN, told: None };
        }
        let State::Down { backoff, told, .. } = &mut self.state else { return };
        if told.as_ref() != Some(&why) {
            let tell = if wait.is_some() { Tell::Stranger } else { Tell::Waiting };
            self.out.push(Action::Tell(tell(why.clone())));
            *told = Some(why);
        }
        self.attempt = Some(after(now, wait.unwrap_or(*backoff)));
        *backoff = (*backoff * 2).min(BACKOFF_NANOS_MAX);
    }

    fn looked(&mut self, found: Option<Attached>) {
        let end = match found {
            None => End::Detached,
            Some(Attached { backend: Some(backend), .. }) if backend != self.identity.backend => {
                End::TakenOver { backend }
            }
            Some(Attached { backend: None, pid, .. }) if self.identity.shown => {
                End::TakenOver { backend: format!("something, by process {pid}") }
            }
            Some(found) if found.size != self.identity.size => End::Resized { size: found.size },
            Some(_) => return,
        };
        self.out.push(Action::End(end));
    }
}

fn after(now: Timestamp, nanos: u64) -> Timestamp {
    Timestamp(now.0.saturating_add(nanos))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    const SECOND: u64 = 1_000_000_000;

    fn identity() -> Identity {
        Identity { backend: "uuid/tank".into(), size: 1 << 30, shown: true }
    }

    fn attached(backend: &str) -> Option<Attached> {
        Some(Attached { pid: "1".into(), backend: Some(backend.into()), size: 1 << 30, read_only: false })
    }

    fn no_server() -> Event {
        Event::NoServer { why: "refused".into() }
    }

    /// A kernel with some connections and a server that comes and goes, under a keeper.
    struct World {
        keeper: Keeper,
        now: Timestamp,
        /// Whether each connection is alive.
        links: Vec<bool>,
        server: bool,
        stranger: bool,
        /// Notices on their way.
        notices: VecDeque<Event>,
        attempts: Vec<u64>,
        told: Vec<Tell>,
        ended: Option<End>,
        device: Option<Attached>,
    }

    impl World {
        fn new(links: usize) -> World {
            World {
                keeper: Keeper::new(identity(), false, Timestamp(0)),
                now: Timestamp(0),
                links: vec![true; links],
                server: true,
                stranger: false,
                notices: VecDeque::new(),
                attempts: Vec::new(),
                told: Vec::new(),
                ended: None,
                device: attached("uuid/tank"),
            }
        }

        fn kill(&mut self, link: usize) {
            if std::mem::replace(&mut self.links[link], false) {
                self.notices.push_back(Event::LinkDead);
            }
        }

        fn kill_server(&mut self) {
            self.server = false;
            (0..self.links.len()).for_each(|link| self.kill(link));
        }

        fn perform(&mut self, mut actions: VecDeque<Action>) {
            while let Some(action) = actions.pop_front() {
                let event = match action {
                    Action::Tell(tell) => {
                        self.told.push(tell);
                        continue;
                    }
                    Action::End(end) => {
                        self.ended = Some(end);
                        continue;
                    }
                    Action::Look => Event::Looked(self.device.clone()),
                    Action::Reconnect => {
                        self.attempts.push(self.now.0);
                        if self.stranger {
                            Event::Stranger { why: "another size".into() }
                        } else if self.server {
                            self.links.fill(true);
                            Event::Connected
                        } else {
                            no_server()
                        }
                    }
                };
                actions.extend(self.keeper.step(Some(event), self.now));
            }
        }

        /// Lets time pass as a driver would.
        fn run(&mut self, nanos: u64) {
            let end = self.now.0 + nanos;
            loop {
                let actions = match self.notices.pop_front() {
                    Some(event) => self.keeper.step(Some(event), self.now),
                    None if self.keeper.deadline().0 > end => break,
                    None => {
                        self.now = self.now.max(self.keeper.deadline());
                        self.keeper.step(None, self.now)
                    }
                };
                self.perform(actions.into());
            }
            self.now = Timestamp(end);
        }
    }

    #[test]
    fn a_restarted_server_is_found_again_and_told_once() {
        let mut world = World::new(4);
        world.kill_server();
        world.run(5 * SECOND);
        assert!(world.keeper.is_down() && world.attempts.len() > 3);
        assert_eq!(world.told, [Tell::Lost, Tell::Waiting("refused".into())]);
        world.server = true;
        world.run(3 * SECOND);
        assert_eq!(world.links, [true; 4]);
        assert!(!world.keeper.is_down());
        assert!(matches!(world.told[2..], [Tell::Again(nanos)] if nanos >= 5 * SECOND));
    }

    #[test]
    fn attempts_back_off_and_do_not_stop() {
        let mut world = World::new(1);
        world.kill_server();
        world.run(60 * SECOND);
        let gaps: Vec<u64> = world.attempts.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(gaps.iter().all(|gap| (BACKOFF_NANOS_MIN..=BACKOFF_NANOS_MAX).contains(gap)), "{gaps:?}");
        assert!(gaps.is_sorted());
        assert!(world.attempts.len() > 30);
    }

    #[test]
    fn a_good_attempt_is_followed_by_one_that_makes_sure() {
        let mut world = World::new(2);
        world.kill(0);
        world.run(SECOND / 2);
        assert_eq!(world.attempts.len(), 1);
        // Died without a notice, just after the attempt.
        world.links[1] = false;
        world.run(SECOND);
        assert_eq!((world.links.as_slice(), world.attempts.len()), (&[true, true][..], 2));
        world.run(30 * SECOND);
        assert_eq!(world.attempts.len(), 2, "what is up is left alone");
    }

    #[test]
    fn a_stranger_is_reported_and_never_connected() {
        let mut world = World::new(2);
        world.kill_server();
        world.stranger = true;
        world.run(60 * SECOND);
        assert_eq!(world.links, [false, false]);
        assert_eq!(world.told, [Tell::Lost, Tell::Stranger("another size".into())]);
        assert!((4..=8).contains(&world.attempts.len()), "{}", world.attempts.len());
        world.stranger = false;
        world.server = true;
        world.run(15 * SECOND);
        assert_eq!(world.links, [true, true], "the right one may still come back");
    }

    #[test]
    fn an_adopted_device_is_offered_sockets_at_once() {
        let mut keeper = Keeper::new(identity(), true, Timestamp(7));
        assert_eq!(keeper.step(None, Timestamp(7)), [Action::Reconnect]);
        assert_eq!(keeper.step(Some(Event::Connected), Timestamp(8)), []);
        assert!(!keeper.is_down());
    }

    #[test]
    fn a_link_that_dies_during_an_attempt_gets_another() {
        let mut keeper = Keeper::new(identity(), false, Timestamp(0));
        assert_eq!(keeper.step(Some(Event::LinkDead), Timestamp(0)), [Action::Tell(Tell::Lost)]);
        assert_eq!(keeper.step(None, Timestamp(SETTLE_NANOS)), [Action::Reconnect]);
        assert_eq!(keeper.step(Some(Event::LinkDead), Timestamp(SETTLE_NANOS)), []);
        assert_eq!(keeper.step(Some(Event::Connected), Timestamp(SETTLE_NANOS)), []);
        assert!(keeper.is_down());
        assert_eq!(keeper.step(None, Timestamp(2 * SETTLE_NANOS)), [Action::Reconnect]);
    }

    #[test]
    fn a_device_that_is_detached_or_taken_over_ends_it() {
        for (device, end) in [
            (None, End::Detached),
            (attached("uuid/other"), End::TakenOver { backend: "uuid/other".into() }),
            // As nbd-client does it.
            (
                attached("uuid/tank").map(|found| Attached { backend: None, ..found }),
                End::TakenOver { backend: "something, by process 1".into() },
            ),
            (attached("uuid/tank").map(|found| Attached { size: 7, ..found }), End::Resized { size: 7 }),
        ] {
            let mut world = World::new(1);
            world.run(6 * SECOND);
            assert_eq!(world.ended, None);
            world.device = device;
            world.run(6 * SECOND);
            assert_eq!(world.ended, Some(end));
        }
    }

    proptest! {
        /// Whatever connections die and come back, and when: some time after the server stays up, every
        /// connection is alive.
        #[test]
        fn in_the_end_every_connection_is_alive(steps in prop::collection::vec((0u8..4, 0usize..4, 0u64..4_000_000_000), 1..40)) {
            let mut world = World::new(4);
            for (what, link, nanos) in steps {
                match what {
                    0 => world.kill(link),
                    1 => world.kill_server(),
                    _ => world.server = true,
                }
                world.run(nanos);
            }
            world.server = true;
            world.run(10 * SECOND);
            prop_assert_eq!(&world.links[..], &[true; 4][..]);
            prop_assert!(!world.keeper.is_down());
        }
    }
}
