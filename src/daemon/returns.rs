//! Remote members that went away come back by themselves: their servers are tried, with back-off, and when the device of the
//! member answers again, what `calpe online` does is done.
//!
//! Invariants: a member that an administrator took out stays out; nothing here waits for a server but threads of its own,
//! one for each member at a time; a device is handed over only after it has been reachable for a while, so that what an
//! earlier connection has left in its server's hands has landed. Must not know the state machine of an array.

use super::import::SETTLE;
use super::members::Target;
use super::reactor::{ArrayFacts, ArrayId};
use super::service::{Daemon, Done, Served};
use super::superblocks::read_superblock;
use crate::control::{MemberRef, RequestError};
use crate::format::{MemberState, Role, Superblock};
use crate::member::{self, Access, Device, RemoteLimits};
use crate::units::MemberIndex;
use crate::volume::{MemberStatus, NoticeLevel};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Wait after the first attempt that failed; doubled with each further one, ...
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
/// ... up to this.
const BACKOFF_MAX: Duration = Duration::from_secs(15);

/// A member of an array.
type Seat = (Uuid, u16);

/// What is known of members that are away.
#[derive(Debug, Default)]
pub(super) struct Returns {
    attempts: BTreeMap<Seat, Attempt>,
    /// Taken out by an administrator while they were away.
    kept_out: BTreeSet<Seat>,
}

#[derive(Debug)]
struct Attempt {
    next: Instant,
    failures: u32,
    running: Option<Receiver<Result<Device, String>>>,
}

/// A member that may come back.
struct Away {
    index: MemberIndex,
    /// Identity of its device.
    uuid: Uuid,
    /// Where it may be.
    places: Vec<PathBuf>,
    /// Why it went, as far as the connection tells, and until when it must stay away.
    lost: Option<member::Lost>,
    /// How patient to be with its server.
    limits: RemoteLimits,
}

impl Returns {
    /// The member shall not come back by itself.
    pub fn keep_out(&mut self, array: Uuid, index: MemberIndex) {
        self.back(array, index);
        self.kept_out.insert((array, index.0));
    }

    /// The member is there again: when it goes away the next time, that is another story.
    pub fn back(&mut self, array: Uuid, index: MemberIndex) {
        self.attempts.remove(&(array, index.0));
        self.kept_out.remove(&(array, index.0));
    }
}

impl Daemon {
    /// Takes an attempt or a return further, for every remote member of an array that is away; to be called once a second
    /// or so, while nothing else is changed.
    pub(super) fn return_members(&self, array: ArrayId, facts: &ArrayFacts) {
        let Some((uuid, away)) = self.with_served(array, |served| self.find_away(served, facts)) else {
            return;
        };
        for member in away {
            if let Some(device) = self.attempt(array, uuid, &member) {
                self.take_back(array, uuid, &member, device);
            }
        }
    }

    fn find_away(&self, served: &Served, facts: &ArrayFacts) -> (Uuid, Vec<Away>) {
        let names = &served.names;
        let returns = self.returns();
        let used: Vec<&PathBuf> = names.seats.iter().filter_map(|seat| seat.path.as_ref()).collect();
        let unused = self.search_places().iter().filter(|place| {
            member::is_remote(place) && !used.iter().any(|path| member::same_remote(path, place))
        });
        let unused: Vec<PathBuf> = unused.cloned().collect();
        let mut away = Vec::new();
        for (status, seat) in facts.status.members.iter().zip(&names.seats) {
            let MemberStatus { index, state, .. } = status;
            let key = (names.uuid, index.0);
            let remote = seat.path.as_ref().filter(|path| member::is_remote(path));
            let lost = remote.and_then(|path| member::lost(path));
            let may = match state {
                MemberState::Missing => true,
                // By errors of the device: those do not go away with a new connection.
                MemberState::Faulted => lost.is_some(),
                _ => false,
            };
            let places = match (&seat.path, remote) {
                (_, Some(path)) => vec![path.clone()],
                (None, None) => unused.clone(),
                (Some(_), None) => Vec::new(),
            };
            if may && !places.is_empty() && !returns.kept_out.contains(&key) {
                away.push(Away { index: *index, uuid: seat.uuid, places, lost, limits: served.remote });
            }
        }
        (names.uuid, away)
    }

    /// The device of a member, when an attempt has found it; begins one that is due.
    fn attempt(&self, array: ArrayId, uuid: Uuid, member: &Away) -> Option<Device> {
        let now = Instant::now();
        let key = (uuid, member.index.0);
        if let (false, Some(lost)) = (self.returns().attempts.contains_key(&key), &member.lost) {
            let text = format!("the connection to it is given up: {}; it is tried again", lost.reason);
            self.notice_member(array, NoticeLevel::Warning, member.index, text);
        }
        let mut returns = self.returns();
        let attempt =
            returns.attempts.entry(key).or_insert(Attempt { next: now, failures: 0, running: None });
        match attempt.running.as_ref().map(Receiver::try_recv) {
            Some(Ok(Ok(device))) => {
                attempt.running = None;
                return Some(device);
            }
            Some(Ok(Err(reason))) => {
                tracing::debug!(member = member.index.0, %reason, "a remote member is not back");
                attempt.fail(now);
            }
            Some(Err(TryRecvError::Disconnected)) => attempt.fail(now),
            Some(Err(TryRecvError::Empty)) => {}
            None => {
                let due = member.lost.as_ref().map_or(attempt.next, |lost| attempt.next.max(lost.not_before));
                if now >= due {
                    let (sender, receiver) = channel();
                    let (places, device, limits) = (member.places.clone(), member.uuid, member.limits);
                    let thread = std::thread::Builder::new().name("remote-return".into());
                    // Without a thread the receiver tells of no sender, which is a failure.
                    let _ = thread.spawn(move || {
                        // Who waits for it may have lost interest: then it is closed again.
                        let _ = sender.send(look_for(&places, limits, uuid, device));
                    });
                    attempt.running = Some(receiver);
                }
            }
        }
        None
    }

    fn take_back(&self, array: ArrayId, uuid: Uuid, away: &Away, device: Device) {
        let path = device.path().display().to_string();
        let target = self.target(&uuid.to_string(), &MemberRef::Index(away.index.0));
        let outcome: Result<Done, RequestError> = target.and_then(|target: Target| {
            let superblock = target.own_superblock(&device)?;
            self.bring_online(&target, device, superblock)
        });
        match outcome {
            Ok(done) => {
                let text = format!("{path} answers again: {}", done.message);
                self.notice_member(array, NoticeLevel::Info, away.index, text);
            }
            Err(error) => {
                tracing::debug!(%error, "a remote member answers and is not taken back");
                if let Some(attempt) = self.returns().attempts.get_mut(&(uuid, away.index.0)) {
                    attempt.fail(Instant::now());
                }
            }
        }
    }
}

impl Attempt {
    fn fail(&mut self, now: Instant) {
        self.next = now + member::backoff(BACKOFF_FIRST, BACKOFF_MAX, self.failures);
        self.failures += 1;
        self.running = None;
    }
}

/// Opens the device of a member, wherever it is.
fn look_for(places: &[PathBuf], limits: RemoteLimits, array: Uuid, uuid: Uuid) -> Result<Device, String> {
    let is_own = |s: &Superblock| s.array == array && s.device == uuid && s.role == Role::Member;
    let mut last = String::new();
    for place in places {
        // Looked at first: what belongs to others is not opened for writing.
        let found = Device::open(place, Access::ReadOnly).map_err(|error| error.to_string());
        let superblock = found.and_then(|device| {
            device.set_remote_limits(limits);
            read_superblock(&device).map_err(|error| error.to_string())
        });
        match superblock {
            Ok(superblock) if is_own(&superblock) => {
                let device = Device::open(place, Access::Exclusive).map_err(|error| error.to_string())?;
                device.set_remote_limits(limits);
                sleep(SETTLE);
                // What is read next is waited for by others: a server that hangs is found here.
                return read_superblock(&device).map(|_| device).map_err(|error| error.to_string());
            }
            Ok(_) => last = format!("{}: belongs to something else", place.display()),
            Err(error) => last = error,
        }
    }
    Err(last)
}
