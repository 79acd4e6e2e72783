//! Members that went away for something that passes come back by themselves: remote ones whose
//! connection was given up, and local ones whose storage was full, for which the host lacked
//! resources (rule T4), or that were missing while their array had failed or could not be served.
//! They are tried, with back-off, and when the device of the member answers again, and has room,
//! what `calpe online` does is done.
//!
//! Invariants: a member that an administrator took out stays out; nothing here waits for a server but threads of its own,
//! one for each member at a time; a device is handed over only after it has been reachable for a while, so that what an
//! earlier connection has left in its server's hands has landed. Must not know the state machine of an array.

use super::changes::Change;
use super::events::kinds;
use super::import::SETTLE;
use super::members::{ATTEMPT_WAIT, By, Own, identity_of, open_member, patience};
use super::ranked::lock;
use super::reactor::{ArrayFacts, ArrayId};
use super::search::{Hindrance, search};
use super::service::{Daemon, Done, Served};
use super::superblocks::{check_length, read_copies, words_for_damaged};
use super::target::Target;
use crate::control::{MemberRef, RequestError};
use crate::member::patience::within_apart;
use crate::member::{self, Access, Device, DeviceError, TimeLimits};
use calpe_core::format::{MemberState, NewestError, Role, Superblock, newest_read};
use calpe_core::units::{HumanSize, MemberIndex, shown};
use calpe_core::volume::{ArrayState, MemberCondition, MemberStatus, NoticeLevel};
use nix::sys::statvfs::statvfs;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Wait after the first attempt that failed; doubled with each further one, ...
const BACKOFF_FIRST: Duration = Duration::from_secs(1);
/// ... up to this.
const BACKOFF_MAX: Duration = Duration::from_secs(15);

/// The same where all places of an array are searched, which disks that rest may have to spin up
/// for.
const SEARCH_BACKOFF_MAX: Duration = Duration::from_secs(60);

/// A member that was full is tried again when its filesystem has so many bytes free.
const ROOM_MIN: u64 = 16 << 20;

/// A member of an array.
type Seat = (Uuid, u16);

/// What is known of members that are away.
#[derive(Debug, Default)]
pub(super) struct Returns {
    attempts: BTreeMap<Seat, Attempt>,
    /// Taken out by an administrator while they were away, and when.
    kept_out: BTreeMap<Seat, Instant>,
    /// Missing at a time when their array had failed, or could not be served: what took away so
    /// many at once may bring all of them back.
    were_missing: BTreeSet<Seat>,
    under_way: UnderWay,
}

/// How many threads look for members of an array, whether or not anybody waits for what they find.
#[derive(Clone, Debug, Default)]
struct UnderWay(Arc<Mutex<BTreeMap<Uuid, usize>>>);

/// One of them.
struct Looking(UnderWay, Uuid);

impl UnderWay {
    fn begin(&self, array: Uuid) -> Looking {
        *lock(&*self.0).entry(array).or_default() += 1;
        Looking(self.clone(), array)
    }

    fn has(&self, array: Uuid) -> bool {
        lock(&*self.0).contains_key(&array)
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        let mut all = lock(&*self.0.0);
        if let Some(count) = all.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                all.remove(&self.1);
            }
        }
    }
}

#[derive(Debug)]
struct Attempt {
    next: Instant,
    failures: u32,
    running: Option<Receiver<Attempted>>,
    /// What the last one has met in the place of the device.
    obstacle: Option<Obstacle>,
}

/// What an attempt came to: the member's device, locked, or why it is not had.
pub(super) type Attempted = Result<Own, NotBack>;

/// Why the device of a member is not had.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NotBack {
    /// Nothing answers, or what does is to be asked again.
    Away(String),
    /// Something is in the way that does not go away by waiting.
    Blocked(Obstacle),
}

/// What is in the way of a member that would come back by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// A server answers, and has something else in the place of the device, or it is not whole, or not writable.
    Displaced(String),
    /// A server answers, and does not give the device, or this host has nothing to ask it with.
    Refused(String),
}

impl Obstacle {
    /// For people.
    #[must_use]
    pub fn reason(&self) -> &str {
        let (Obstacle::Displaced(reason) | Obstacle::Refused(reason)) = self;
        reason
    }
}

impl std::fmt::Display for NotBack {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            NotBack::Away(reason) => f.write_str(reason),
            NotBack::Blocked(obstacle) => f.write_str(obstacle.reason()),
        }
    }
}

impl From<DeviceError> for NotBack {
    fn from(error: DeviceError) -> NotBack {
        let is_refusal = error.is_refusal();
        let reason = error.to_string();
        if is_refusal { NotBack::Blocked(Obstacle::Refused(reason)) } else { NotBack::Away(reason) }
    }
}

/// A member that comes back by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Returning {
    /// Which.
    pub index: MemberIndex,
    /// What is in its way, as far as that is known.
    pub obstacle: Option<Obstacle>,
    /// It is not tried yet, as writes of the connection that was lost may still land.
    pub is_quarantined: bool,
    /// Seconds until it is tried; none while it is.
    pub tried_in_s: Option<u64>,
}

/// A member that may come back.
struct Away {
    index: MemberIndex,
    /// Identity of its device.
    uuid: Uuid,
    /// Where it may be.
    places: Vec<PathBuf>,
    /// Where it is looked for besides, as this daemon has not had it open.
    sought: Option<Sought>,
    /// The first of its places is where its server was.
    has_own_place: bool,
    /// Why it went, as far as the connection tells, and until when it must stay away.
    lost: Option<member::Lost>,
    /// It went because its storage was full, or the host short.
    was_short: bool,
    /// It may well be gone for good, which is what people are told.
    is_local: bool,
    /// How patient to be with its server.
    limits: TimeLimits,
}

/// Where a local device is looked for that may have been copied while nobody had it open.
#[derive(Clone)]
struct Sought {
    /// Where it was last, if that is known: elsewhere it is not looked for then.
    own: Option<PathBuf>,
    /// Where a copy of it may be.
    around: Vec<PathBuf>,
}

impl Returns {
    /// The member, which is away, shall not come back by itself.
    pub fn keep_out(&mut self, array: Uuid, index: MemberIndex) {
        self.back(array, index);
        self.kept_out.insert((array, index.0), Instant::now());
    }

    /// Whether an administrator has said that the member shall not come back by itself.
    pub fn is_kept_out(&self, array: Uuid, index: MemberIndex) -> bool {
        self.kept_out.contains_key(&(array, index.0))
    }

    /// Takes note of what an array that was asked then says of its members: of those that are
    /// missing while it has failed, until they are back; and that those in service are not away, so
    /// that what was said of that is over.
    pub fn note(&mut self, array: Uuid, has_failed: bool, members: &[MemberStatus], asked: Instant) {
        for member in members {
            let seat = (array, member.index.0);
            match member.state {
                MemberState::Missing if has_failed => drop(self.were_missing.insert(seat)),
                MemberState::Missing => {}
                MemberState::Online | MemberState::Rebuilding => {
                    // One that is being built may go away again with the others.
                    if member.state == MemberState::Online {
                        self.were_missing.remove(&seat);
                    }
                    self.attempts.remove(&seat);
                    // What was said since is of a member that has left since.
                    if self.kept_out.get(&seat).is_some_and(|kept| *kept < asked) {
                        self.kept_out.remove(&seat);
                    }
                }
                _ => drop(self.were_missing.remove(&seat)),
            }
        }
    }

    /// Whether the member was missing when its array had failed, or could not be served, and is not
    /// back since.
    pub fn was_missing(&self, array: Uuid, index: MemberIndex) -> bool {
        self.were_missing.contains(&(array, index.0))
    }

    /// An administrator has brought the member back: when it goes away the next time, that is another story.
    pub fn back(&mut self, array: Uuid, index: MemberIndex) {
        self.attempts.remove(&(array, index.0));
        self.kept_out.remove(&(array, index.0));
    }

    /// The array is not served any more, or begins to be: what is known of its members is of its
    /// last time in service.
    pub fn forget(&mut self, array: Uuid) {
        self.attempts.retain(|(other, _), _| *other != array);
        self.kept_out.retain(|(other, _), _| *other != array);
        self.were_missing.retain(|(other, _)| *other != array);
    }

    /// Ends the attempt that is being made to bring the member back by itself. Returns what tells
    /// that it has let go of the device.
    pub fn interrupt(&mut self, array: Uuid, index: MemberIndex) -> Option<Receiver<Attempted>> {
        self.attempts.get_mut(&(array, index.0))?.running.take()
    }

    /// As [`Returns::interrupt`], for what goes on while others may change the array: no further
    /// attempt begins for a while.
    pub fn hold_off(&mut self, array: Uuid, index: MemberIndex) -> Option<Receiver<Attempted>> {
        let next = Instant::now() + BACKOFF_MAX;
        let none = Attempt { next, failures: 0, running: None, obstacle: None };
        let attempt = self.attempts.entry((array, index.0)).or_insert(none);
        attempt.next = attempt.next.max(next);
        attempt.running.take()
    }
}

impl Daemon {
    /// Waits until attempts to bring back members of an array that is not served any more have let
    /// go of their devices.
    pub(super) fn await_attempts(&self, array: Uuid) {
        let (under_way, until) = (self.returns().under_way.clone(), Instant::now() + ATTEMPT_WAIT);
        while under_way.has(array) && Instant::now() < until {
            sleep(Duration::from_millis(20));
        }
    }

    /// An array begins to be served, from devices at these paths, without these members (index and
    /// device). Those come back by themselves that were missing when it had failed, or while it
    /// could not be served without more of them; not where an administrator starts it by force,
    /// having given them up.
    pub(super) fn begin_returns(
        &self,
        (name, uuid): (&str, Uuid),
        paths: &[PathBuf],
        missing: &[(u16, Uuid)],
        is_forced: bool,
    ) {
        let lacked = self.lacked_members(name, uuid, paths);
        let before = self.failed_without(uuid);
        let mut returns = self.returns();
        returns.forget(uuid);
        let back = missing.iter().filter(|(_, device)| !is_forced && (lacked || before.contains(device)));
        returns.were_missing.extend(back.map(|(index, _)| (uuid, *index)));
    }

    /// Takes an attempt or a return further, for every member of an array that is away and may come
    /// back; to be called once a second or so, as a change of the array.
    pub(super) fn return_members(&self, array: ArrayId, facts: &ArrayFacts, _change: &Change) {
        let Some((uuid, away)) = self.with_served(array, |served| self.find_away(served, facts)) else {
            return;
        };
        for member in away {
            if let Some(own) = self.attempt(array, uuid, &member) {
                self.take_back(array, uuid, &member, own);
            }
        }
    }

    /// Brings back those members of a failed array that are where they were. What was in service
    /// when it failed is current, so nothing is overwritten by this; the array refuses all else,
    /// which comes back when it serves again.
    pub(super) fn bring_back(&self, array: ArrayId, facts: &ArrayFacts, change: &Change) {
        let gone = self.with_names(array, |names| {
            let members = facts.status.members.iter().zip(&names.seats);
            let missing = members.filter(|(member, _)| member.state == MemberState::Missing);
            let places = missing.filter_map(|(member, seat)| Some((member.index, seat.path.clone()?)));
            (names.uuid, places.collect::<Vec<(MemberIndex, PathBuf)>>())
        });
        let Some((uuid, gone)) = gone else { return };
        for (index, path) in gone {
            if self.returns().is_kept_out(uuid, index) {
                continue;
            }
            // What is not there is not looked for elsewhere, once a second.
            if member::is_remote(&path) || identity_of(&path).is_none() {
                continue;
            }
            let target = self.target(&uuid.to_string(), &MemberRef::Index(index.0));
            let back = target.and_then(|target| {
                let own = self.open_own(&target, Some(&path), change)?;
                self.bring_online(&target, own, By::Itself).map(drop)
            });
            if let Err(error) = back {
                tracing::debug!(%error, "a member of a failed array is not back");
            }
        }
    }

    /// Whether there is anything for [`Daemon::return_members`] to do.
    pub(super) fn has_away(&self, array: ArrayId, facts: &ArrayFacts) -> bool {
        let away = self.with_served(array, |served| self.find_away(served, facts));
        away.is_some_and(|(_, away)| !away.is_empty())
    }

    /// The members that come back by themselves.
    pub(super) fn returning(&self, array: ArrayId, facts: &ArrayFacts) -> Vec<Returning> {
        let away = self.with_served(array, |served| self.find_away(served, facts));
        let Some((uuid, away)) = away else { return Vec::new() };
        let returns = self.returns();
        let returning = |member: Away| {
            let attempt = returns.attempts.get(&(uuid, member.index.0));
            let not_before = member.lost.as_ref().map(|lost| lost.not_before);
            let (is_quarantined, tried_in_s) = when_tried(attempt, not_before, Instant::now());
            let attempt = attempt.filter(|_| member.has_own_place);
            let obstacle = match attempt {
                Some(attempt) if attempt.failures > 0 => attempt.obstacle.clone(),
                // What the connection met until it was given up is all that is known.
                _ => member.lost.filter(|lost| lost.is_refused).map(|lost| Obstacle::Refused(lost.reason)),
            };
            Returning { index: member.index, obstacle, is_quarantined, tried_in_s }
        };
        away.into_iter().filter(|member| !member.is_local).map(returning).collect()
    }

    fn find_away(&self, served: &Served, facts: &ArrayFacts) -> (Uuid, Vec<Away>) {
        let names = &served.names;
        let returns = self.returns();
        let used: Vec<&PathBuf> = names.seats.iter().filter_map(|seat| seat.path.as_ref()).collect();
        let places = self.search_places();
        let unused = places.iter().filter(|place| {
            member::is_remote(place) && !used.iter().any(|path| member::same_remote(path, place))
        });
        let unused: Vec<PathBuf> = unused.cloned().collect();
        let has_failed = facts.status.state == ArrayState::Failed;
        let mut away = Vec::new();
        for (status, seat) in facts.status.members.iter().zip(&names.seats) {
            let MemberStatus { index, state, returns: was_short, conditions, .. } = status;
            let cut_off = conditions.contains(&MemberCondition::CutOff);
            let remote = seat.path.as_ref().filter(|path| member::is_remote(path));
            let lost = remote.and_then(|path| member::lost(path));
            let may = match state {
                MemberState::Missing => true,
                // By errors of the device: those do not go away with a new connection.
                MemberState::Faulted => lost.is_some(),
                _ => false,
            };
            let is_meant = *state == MemberState::Missing
                && !has_failed
                && !cut_off
                && returns.was_missing(names.uuid, *index);
            // Which of several it is, and what becomes of what it holds, is for an administrator to
            // say.
            let hindrance = names.hindrances.get(&seat.uuid);
            let is_doubtful = matches!(hindrance, Some(Hindrance::Claimed | Hindrance::Kept));
            let sought = match is_meant && seat.found.is_none() && remote.is_none() && !is_doubtful {
                true => Some(Sought { own: seat.path.clone(), around: names.places_around(&places) }),
                false => None,
            };
            let places = match (&seat.path, remote) {
                // Where it was before the daemon started; it may be another host's by now.
                (_, Some(path)) if seat.found.is_none() => {
                    std::iter::once(path).chain(&unused).cloned().collect()
                }
                (_, Some(path)) => vec![path.clone()],
                (None, None) => unused.clone(),
                (Some(path), None) if *was_short => vec![path.clone()],
                (Some(_), None) if seat.found.is_none() => unused.clone(),
                // It was in service there, so that it is no copy. As long as the array has failed,
                // `bring_back` tries.
                (Some(path), None) if is_meant => vec![path.clone()],
                (Some(_), None) => Vec::new(),
            };
            let is_looked_for = !places.is_empty() || sought.is_some();
            if may && is_looked_for && !returns.is_kept_out(names.uuid, *index) {
                let (index, was_short, limits) = (*index, *was_short, served.limits);
                let (uuid, has_own_place) = (seat.uuid, remote.is_some());
                let is_local = !was_short && places.iter().all(|place| !member::is_remote(place));
                away.push(Away {
                    index,
                    uuid,
                    places,
                    sought,
                    has_own_place,
                    lost,
                    was_short,
                    is_local,
                    limits,
                });
            }
        }
        (names.uuid, away)
    }

    /// The device of a member, when an attempt has found it; begins one that is due.
    fn attempt(&self, array: ArrayId, uuid: Uuid, member: &Away) -> Option<Own> {
        let now = Instant::now();
        let key = (uuid, member.index.0);
        // A statement of its own: what is told asks for what comes before `returns` in the order of
        // locks.
        let is_known = self.returns().attempts.contains_key(&key);
        if let (false, Some(lost)) = (is_known, &member.lost) {
            let text = format!("the connection to it is given up: {}; it is tried again", lost.reason);
            self.notice_member(array, kinds::MEMBER_LOST, NoticeLevel::Warning, member.index, text);
        }
        let mut returns = self.returns();
        let first = Attempt { next: now, failures: 0, running: None, obstacle: None };
        let under_way = returns.under_way.clone();
        let attempt = returns.attempts.entry(key).or_insert(first);
        match attempt.running.as_ref().map(Receiver::try_recv) {
            Some(Ok(Ok(found))) => {
                attempt.running = None;
                return Some(found);
            }
            Some(Ok(Err(not_back))) => {
                tracing::debug!(member = member.index.0, reason = %not_back, "a member is not back");
                attempt.fail(now, member.backoff_max());
                let met = match not_back {
                    NotBack::Away(_) => None,
                    NotBack::Blocked(obstacle) => Some(obstacle),
                };
                let is_news = member.has_own_place && met != attempt.obstacle;
                attempt.obstacle = met.clone();
                if let (true, Some(obstacle)) = (is_news, met) {
                    drop(returns);
                    let text =
                        format!("it cannot come back for now: {}; it is tried again", obstacle.reason());
                    self.notice_member(
                        array,
                        kinds::MEMBER_BLOCKED,
                        NoticeLevel::Warning,
                        member.index,
                        text,
                    );
                }
            }
            Some(Err(TryRecvError::Disconnected)) => attempt.fail(now, member.backoff_max()),
            Some(Err(TryRecvError::Empty)) => {}
            None => {
                let due = member.lost.as_ref().map_or(attempt.next, |lost| attempt.next.max(lost.not_before));
                if now >= due {
                    let (sender, receiver) = channel();
                    let (places, device, limits) = (member.places.clone(), member.uuid, member.limits);
                    let (was_short, sought) = (member.was_short, member.sought.clone());
                    let thread = std::thread::Builder::new().name("member-return".into());
                    let is_under_way = under_way.begin(uuid);
                    // Without a thread the receiver tells of no sender, which is a failure.
                    let _ = thread.spawn(move || {
                        let _is_under_way = is_under_way;
                        // Who waits for it may have lost interest: then it is closed again.
                        let found = match was_short {
                            true => has_room(&places, limits).map_err(NotBack::Away),
                            false => Ok(()),
                        };
                        let place = found.and_then(|()| match sought {
                            Some(sought) => sought.place_of(limits, uuid, device),
                            None => Ok(None),
                        });
                        let found = place.and_then(|place| {
                            let places = place.map_or(places, |place| vec![place]);
                            look_for(&places, limits, uuid, device)
                        });
                        let _ = sender.send(found);
                    });
                    attempt.running = Some(receiver);
                }
            }
        }
        None
    }

    fn take_back(&self, array: ArrayId, uuid: Uuid, away: &Away, own: Own) {
        let (device, superblock, bad_copies) = own;
        let path = shown(device.path()).to_string();
        let target = self.target(&uuid.to_string(), &MemberRef::Index(away.index.0));
        let outcome: Result<Done, RequestError> = target.and_then(|target: Target| {
            let superblock = target.own(&device, Ok(superblock))?;
            self.bring_online(&target, (device, superblock, bad_copies), By::Itself)
        });
        match outcome {
            Ok(done) => {
                self.returns().attempts.remove(&(uuid, away.index.0));
                let how = match away {
                    Away { was_short: true, .. } => "has room again",
                    Away { is_local: true, .. } => "is there again",
                    _ => "answers again",
                };
                let text = format!("{path} {how}: {}", done.message);
                self.notice_member(array, kinds::MEMBER_RETURNED, NoticeLevel::Info, away.index, text);
            }
            Err(error) => {
                tracing::debug!(%error, "a member answers and is not taken back");
                if let Some(attempt) = self.returns().attempts.get_mut(&(uuid, away.index.0)) {
                    attempt.fail(Instant::now(), away.backoff_max());
                }
            }
        }
    }
}

impl Away {
    fn backoff_max(&self) -> Duration {
        if self.sought.is_none() { BACKOFF_MAX } else { SEARCH_BACKOFF_MAX }
    }
}

impl Attempt {
    fn fail(&mut self, now: Instant, max: Duration) {
        self.next = now + member::backoff(BACKOFF_FIRST, max, self.failures);
        self.failures += 1;
        self.running = None;
    }
}

/// Whether a member is not tried before the end of its quarantine, and in how many seconds it is
/// tried; none while it is.
fn when_tried(attempt: Option<&Attempt>, not_before: Option<Instant>, now: Instant) -> (bool, Option<u64>) {
    let quarantine = not_before.filter(|until| *until > now);
    if attempt.is_some_and(|attempt| attempt.running.is_some()) {
        return (false, None);
    }
    let next = attempt.map_or(now, |attempt| attempt.next).max(quarantine.unwrap_or(now));
    let seconds = next.saturating_duration_since(now).as_millis().div_ceil(1000) as u64;
    (quarantine.is_some(), Some(seconds))
}

/// Whether the filesystems of these files have room for more than what a member writes at once: a member that comes back to
/// a full one would leave again. Room on servers and below block devices shows only when it is used.
fn has_room(places: &[PathBuf], limits: TimeLimits) -> Result<(), String> {
    for place in places.iter().filter(|place| !member::is_remote(place)) {
        let own = place.clone();
        let room = within_apart(place, "ask for its free space", limits.local, move || {
            let is_file = own.is_file();
            is_file.then(|| statvfs(&own).ok()).flatten()
        });
        let room = room.map_err(|error| error.to_string())?;
        if room.is_some_and(|fs| fs.blocks_available() * fs.fragment_size() < ROOM_MIN) {
            let room = HumanSize(ROOM_MIN);
            return Err(format!("{}: its filesystem has less than {room} of free space", shown(place)));
        }
    }
    Ok(())
}

impl Sought {
    /// Where the device is, if it is there. Nothing else there may say that it is it.
    fn place_of(&self, limits: TimeLimits, array: Uuid, uuid: Uuid) -> Result<Option<PathBuf>, NotBack> {
        let claimants = |places: &[PathBuf]| -> Result<Vec<PathBuf>, NotBack> {
            let mut found = search(places, patience(limits));
            found.check_whole().map_err(|error| NotBack::Away(error.to_string()))?;
            let all = found.arrays.remove(&array).unwrap_or_default().into_iter();
            let is_own = |s: &Superblock| s.device == uuid && s.role == Role::Member;
            Ok(all.filter(|found| is_own(&found.superblock)).map(|found| found.path).collect())
        };
        let own = self.own.as_slice();
        if !own.is_empty() && claimants(own)?.is_empty() {
            return Ok(None);
        }
        let mut all = claimants(&[own, &self.around].concat())?;
        if all.len() > 1 {
            let paths: Vec<String> = all.iter().map(|path| shown(path).to_string()).collect();
            return Err(NotBack::Away(format!("{}: each of them claims to be it", paths.join(", "))));
        }
        Ok(all.pop())
    }
}

/// Opens the device of a member, wherever it is.
fn look_for(places: &[PathBuf], limits: TimeLimits, array: Uuid, uuid: Uuid) -> Attempted {
    let is_own = |s: &Superblock| s.array == array && s.device == uuid && s.role == Role::Member;
    let mut first = None;
    for place in places {
        // Looked at first: what belongs to others is not opened for writing.
        let looked = open_member(place, Access::ReadOnly, limits);
        let looked = looked.map(|(device, copies)| (device, newest_read(copies))).map_err(NotBack::from);
        let not_back = match looked {
            Ok((device, Ok(superblock))) if is_own(&superblock) => {
                check_length(&device, &superblock).map_err(|error| unfit(place, &error))?;
                drop(device);
                let device = Device::open(place, Access::Exclusive).map_err(|error| match error {
                    DeviceError::ReadOnly { .. } => unfit(place, &error),
                    error => error.into(),
                })?;
                device.set_limits(limits);
                sleep(SETTLE);
                let copies = read_copies(&device);
                let bad_copies = words_for_damaged(&copies);
                let superblock = newest_read(copies).map_err(|error| other_in(place, Err(error)))?;
                return Ok((device, superblock, bad_copies));
            }
            Ok((_, found)) => other_in(place, found),
            Err(not_back) => not_back,
        };
        // The first place is where it was, if that is known.
        first.get_or_insert(not_back);
    }
    Err(first.unwrap_or_else(|| NotBack::Away("it is not known where it may be".into())))
}

/// What is told of a place where the member's own device was found, and cannot serve.
fn unfit(place: &Path, error: &DeviceError) -> NotBack {
    blocked(place, Obstacle::Displaced(error.to_string()))
}

/// What is told of a place where something else was found.
fn other_in(place: &Path, found: Result<Superblock, NewestError>) -> NotBack {
    let what = match found {
        // Whether it is the member's device cannot be told.
        Err(error @ NewestError::Unreadable(_)) => {
            return blocked(place, Obstacle::Refused(format!("{} answers: {error}", shown(place))));
        }
        Ok(Superblock { name, member, role: Role::Replaced, .. }) => {
            format!("what is there was member {member} of array '{name}', and has been replaced since")
        }
        Ok(Superblock { name, member, .. }) => {
            format!("another device is there now, member {member} of array '{name}'")
        }
        Err(NewestError::NotAMember) => "what is there holds no Calpe superblock".to_owned(),
        Err(error) => error.to_string(),
    };
    blocked(place, Obstacle::Displaced(format!("{} answers: {what}", shown(place))))
}

/// Only what a server has is known to be in the way: a path may lead elsewhere at any time.
fn blocked(place: &Path, obstacle: Obstacle) -> NotBack {
    match member::is_remote(place) {
        true => NotBack::Blocked(obstacle),
        false => NotBack::Away(obstacle.reason().to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::import::tests::created_in;
    use super::super::superblocks::read_superblock;
    use super::*;

    fn member(state: MemberState) -> MemberStatus {
        calpe_core::testing::bare_member(MemberIndex(1), state)
    }

    #[test]
    fn what_was_said_of_a_member_that_is_away_is_over_when_it_is_in_service() {
        let (array, index) = (Uuid::from_u128(1), MemberIndex(1));
        for (state, is_over) in [
            (MemberState::Online, true),
            (MemberState::Rebuilding, true),
            (MemberState::Missing, false),
            (MemberState::Faulted, false),
        ] {
            let mut returns = Returns::default();
            let before = Instant::now();
            returns.keep_out(array, index);
            returns.note(array, false, &[member(state)], before);
            assert!(returns.is_kept_out(array, index), "it was taken out after the array had been asked");
            returns.note(array, false, &[member(state)], Instant::now());
            assert_eq!(returns.is_kept_out(array, index), !is_over, "{state:?}");
        }
    }

    #[test]
    fn of_an_array_that_begins_anew_nothing_is_known_and_others_are_left_alone() {
        let (tank, pond, index) = (Uuid::from_u128(1), Uuid::from_u128(2), MemberIndex(1));
        let mut returns = Returns::default();
        for array in [tank, pond] {
            returns.keep_out(array, index);
            returns.note(array, true, &[member(MemberState::Missing)], Instant::now());
        }
        returns.forget(tank);
        let is_known = |array| [returns.is_kept_out(array, index), returns.was_missing(array, index)];
        assert_eq!([is_known(tank), is_known(pond)], [[false; 2], [true; 2]]);
    }

    #[test]
    fn a_device_that_nobody_had_open_is_found_where_it_alone_says_that_it_is_it() {
        let dir = tempfile::tempdir().unwrap();
        let array = created_in(dir.path(), "tank", 1, 1);
        let path = |name: &str| dir.path().join(name);
        let device = Device::open(&path("m0"), Access::ReadOnly).unwrap();
        let uuid = read_superblock(&device).unwrap().device;
        drop(device);
        let find = |own: Option<&str>| {
            let sought = Sought { own: own.map(path), around: vec![dir.path().to_owned()] };
            sought.place_of(TimeLimits::default(), array, uuid)
        };
        for own in [Some("m0"), None] {
            assert_eq!(find(own), Ok(Some(path("m0"))), "{own:?}");
        }
        std::fs::copy(path("m0"), path("copy")).unwrap();
        for own in [Some("m0"), None] {
            let NotBack::Away(why) = find(own).unwrap_err() else { panic!("it may be moved away") };
            assert!(why.contains("copy") && why.contains("each of them claims to be it"), "{why}");
        }
        std::fs::remove_file(path("m0")).unwrap();
        assert_eq!(find(Some("m0")), Ok(None), "elsewhere it may be a copy");
        assert_eq!(find(None), Ok(Some(path("copy"))));
    }

    #[test]
    fn a_member_is_told_to_be_tried_when_it_is_and_not_while_its_host_is_left_alone() {
        let now = Instant::now();
        let after = |seconds: u64| now + Duration::from_secs(seconds);
        let attempt = |next, running| Attempt { next, failures: 1, running, obstacle: None };
        assert_eq!(when_tried(None, None, now), (false, Some(0)));
        assert_eq!(when_tried(None, Some(after(15)), now), (true, Some(15)), "whether it answers or not");
        assert_eq!(when_tried(Some(&attempt(after(4), None)), None, now), (false, Some(4)));
        assert_eq!(when_tried(Some(&attempt(after(4), None)), Some(after(9)), now), (true, Some(9)));
        assert_eq!(
            when_tried(Some(&attempt(after(4), None)), Some(now), now),
            (false, Some(4)),
            "it is over"
        );
        let (_sender, running) = channel();
        assert_eq!(when_tried(Some(&attempt(now, Some(running))), Some(now), now), (false, None));
    }
}
