//! Tries operations again that fail because this host lacks something, or because the storage under a member
//! is full (rule T4 of the crash-safety design).
//!
//! Such a fault proves nothing about the member. The owner of the operation does not see it: the operation
//! stays in flight and takes longer. So the order of operations that depend on it stays the same, and no rule
//! about failures applies. A member that alone stays short leaves after [`ALONE_NS`], if the array can spare
//! it; it may return when its shortage is over. Where members are needed, clients wait for [`PATIENCE_NS`]
//! and then get an error; operations of the array itself wait on.
//!
//! Invariants: a write or flush that an operation relies on fails with a passing fault only after its device
//! has left service, or after the work it belonged to is void (the array has failed, its replay has ended). A
//! token that waits is not with the driver.

use crate::array::Core;
use crate::array::base::inflight::{Inflight, Short};
use crate::array::base::members::{Member, Which};
use crate::array::status::MemberCondition;
use crate::array::{
    Array, ClientError, NoticeKind, NoticeLevel, Op, Owner, RequestId, Stopping, StripeRequest,
};
use crate::block_io::{DeviceId, IoFault, IoFaultKind, IoToken};
use crate::format::{MemberSet, MemberState};
use crate::units::{MemberIndex, Timestamp};
use std::collections::{BTreeMap, BTreeSet};

/// The first wait before an operation is tried again; doubled with each further one. Memory is often
/// available again as soon as the kernel has written something back.
const RETRY_FIRST_NS: u64 = 10_000_000;

/// The longest wait: how long a person who has made room is willing to wait until the array notices.
const RETRY_MAX_NS: u64 = 1_000_000_000;

/// How long a member may stay short alone before it leaves: early enough before clients lose their patience
/// that they do not notice.
const ALONE_NS: u64 = 20_000_000_000;

/// How long clients wait, and operations whose owners can do without the result: as long as common clients
/// give a request.
const PATIENCE_NS: u64 = 30_000_000_000;

/// How long a replay waits for room before reads are served without it.
const LIFT_NS: u64 = 1_000_000_000;

/// How long a read waits for its member where others can serve. Decoding is faster, but costs reads of the
/// others.
const READ_PATIENCE_NS: u64 = 200_000_000;

/// A shortage is over when no operation has met it for this long.
const QUIET_NS: u64 = 1_000_000_000;

/// How long writes that can do without a free slot take none after one had no room.
const SLOTS_PAUSE_NS: u64 = 10_000_000_000;

/// How long a stop waits for members that are short. The next start replays what is left in the log.
const STOP_PATIENCE_NS: u64 = 2_000_000_000;

/// Operations of one device that have met a shortage and are not over.
#[derive(Debug)]
struct Episode {
    member: MemberIndex,
    fault: IoFault,
    since: Timestamp,
    newest: Timestamp,
    /// Whether the operation that ended last had not succeeded.
    is_given_up: bool,
    tokens: BTreeSet<IoToken>,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(in crate::array) struct Shortages {
    /// When each is due, and its token.
    waiting: BTreeSet<(Timestamp, IoToken)>,
    episodes: BTreeMap<DeviceId, Episode>,
    /// When a free slot had no room last, for a write that does not need one.
    slots_without_room: Option<Timestamp>,
    /// The losses that were known when void operations were last looked for.
    seen: Era,
}

/// Changes whenever operations may have become void.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Era {
    losses: u64,
    lives: u64,
    is_failed: bool,
    is_recovering: bool,
}

impl Shortages {
    /// Counts the end of an operation that has met a shortage, and whether it has succeeded.
    pub(in crate::array) fn ended(
        &mut self,
        device: DeviceId,
        token: IoToken,
        short: Short,
        has_succeeded: bool,
    ) {
        if let Some(due) = short.due {
            self.waiting.remove(&(due, token));
        }
        if let Some(episode) = self.episodes.get_mut(&device) {
            episode.tokens.remove(&token);
            episode.is_given_up = !has_succeeded;
        }
    }

    /// When the next operation is to be submitted again.
    pub(in crate::array) fn due(&self) -> Option<Timestamp> {
        self.waiting.first().map(|(due, _)| *due)
    }
}

impl Array {
    /// Takes a passing fault of an operation in flight. True: the operation stays in flight and is tried
    /// again. False: its owner gets the fault.
    pub(in crate::array) fn tries_again(&mut self, token: IoToken, fault: IoFault) -> bool {
        if !self.core.is_passing(fault) || self.core.is_stopped() {
            return false;
        }
        let now = self.core.now;
        let Some(flight) = self.core.inflight.get(token) else { return false };
        let (entry, known) = (flight.entry, flight.short);
        if self.is_void(&entry) {
            return false;
        }
        let mut short = known.unwrap_or(Short { since: now, tries: 0, fault, due: None });
        if self.patience(token).is_some_and(|patience| now.nanos_since(short.since) >= patience) {
            return false;
        }
        let wait =
            RETRY_FIRST_NS.checked_shl(short.tries).map_or(RETRY_MAX_NS, |wait| wait.min(RETRY_MAX_NS));
        let due = Timestamp(now.0 + wait);
        short = Short { tries: (short.tries + 1).min(32), fault, due: Some(due), ..short };
        self.core.set_short(token, short);
        self.core.shortages.waiting.insert((due, token));
        let episode = self.core.shortages.episodes.entry(entry.device);
        let is_new = matches!(episode, std::collections::btree_map::Entry::Vacant(_));
        let tokens = BTreeSet::new();
        let episode = episode.or_insert(Episode {
            member: entry.member,
            fault,
            since: now,
            newest: now,
            is_given_up: false,
            tokens,
        });
        episode.newest = now;
        // No room is the worse problem: a person has to make some.
        if episode.fault.kind != IoFaultKind::NoSpace {
            episode.fault = fault;
        }
        episode.tokens.insert(token);
        if is_new {
            self.core.notice_shortage(entry.member, entry.device, fault);
            // Operations that wait for a checkpoint hold stripes that clients want.
            self.redo.wake_waiting_for_checkpoint(&mut self.core);
        }
        true
    }

    /// How long an operation may be tried again before its owner gets the fault; none where the owner relies
    /// on the operation.
    fn patience(&self, token: IoToken) -> Option<u64> {
        let flight = self.core.inflight.get(token)?;
        let entry = &flight.entry;
        let patience = match entry.owner {
            // Recovery takes for damaged what it cannot read: it waits for the full time.
            Owner::Recovery { .. } if flight.again.changes_nothing() => PATIENCE_NS,
            _ if flight.again.changes_nothing() && self.core.others_serve(entry) => READ_PATIENCE_NS,
            _ if flight.again.changes_nothing() => PATIENCE_NS,
            Owner::Punch => PATIENCE_NS,
            // A write to a device under construction must succeed; otherwise the device is given up.
            Owner::Op { key, .. } => match &self.ops[key] {
                Op::LoggedPass(pass) if pass.is_rebuild() => return None,
                // In place there is room, unless its stripe never held anything.
                Op::LoggedWrite(write) if write.has_way_through_log() => 0,
                _ => PATIENCE_NS,
            },
            Owner::Super if self.core.find_device(entry.device).is_none() => PATIENCE_NS,
            _ => return None,
        };
        Some(if self.core.stop.hurried || self.core.stop.stopping.is_some() {
            patience.min(STOP_PATIENCE_NS / 2)
        } else {
            patience
        })
    }

    /// Whether no operation relies on this I/O any more.
    fn is_void(&self, entry: &Inflight) -> bool {
        let is_replaced =
            self.core.roster.exchanged.iter().any(|replaced| replaced.device.id == entry.device);
        if self.core.is_failed() || (!is_replaced && self.core.find_device(entry.device).is_none()) {
            return true;
        }
        matches!(entry.owner, Owner::Recovery { .. }) && !self.is_recovering()
    }

    fn is_recovering(&self) -> bool {
        self.redo.is_recovering()
    }

    /// Submits again the operations that are due, and ends those that are void. True: some have ended.
    pub(in crate::array) fn pump_shortages(&mut self) -> bool {
        if self.core.shortages.waiting.is_empty() {
            return false;
        }
        let has_ended = self.end_void();
        while let Some(&(due, token)) =
            self.core.shortages.waiting.first().filter(|(due, _)| *due <= self.core.now)
        {
            self.core.submit_again(token, due);
        }
        has_ended
    }

    /// Ends operations that wait and are void. True: some have ended.
    fn end_void(&mut self) -> bool {
        let era = Era {
            losses: self.supers.losses(),
            lives: self.redo.lives(),
            is_failed: self.core.is_failed(),
            is_recovering: self.is_recovering(),
        };
        if std::mem::replace(&mut self.core.shortages.seen, era) == era {
            return false;
        }
        let waiting: Vec<IoToken> = self.core.shortages.waiting.iter().map(|(_, token)| *token).collect();
        let mut has_ended = false;
        for token in waiting {
            let Some(flight) = self.core.inflight.get(token) else { continue };
            let (entry, short) = (flight.entry, flight.short);
            if let Some(Short { fault, .. }) = short.filter(|_| self.is_void(&entry)) {
                self.end_flight(token, Err(fault));
                has_ended = true;
            }
        }
        has_ended
    }

    /// Tick: handles shortages. One that lasts takes members out, or ends the requests of clients; others
    /// end.
    pub(in crate::array) fn judge_shortages(&mut self) {
        let now = self.core.now;
        let over =
            |episode: &Episode| episode.tokens.is_empty() && now.nanos_since(episode.newest) >= QUIET_NS;
        let episodes = std::mem::take(&mut self.core.shortages.episodes).into_iter();
        let (ended, go_on): (Vec<_>, Vec<_>) = episodes.partition(|(_, episode)| over(episode));
        self.core.shortages.episodes = go_on.into_iter().collect();
        for (device, Episode { member, since, is_given_up, .. }) in ended {
            if self.core.find_device(device).is_some() && !is_given_up {
                let seconds = now.nanos_since(since) as f64 / 1e9;
                let what = if self.core.is_replacement(device) { "the new device of " } else { "" };
                let text = format!("operations on {what}member {member} succeed again, after {seconds:.1} s");
                self.core.notice(NoticeKind::ShortageEnded, NoticeLevel::Info, Some(member), text);
            }
        }
        if self.core.is_failed() {
            return;
        }
        while let Some((member, device, fault)) = self.core.spared_by_shortage() {
            let reason = match fault.kind {
                IoFaultKind::NoSpace => format!("its storage is full: {fault}"),
                _ => format!("this host lacks resources for operations on it: {fault}"),
            };
            self.fault_device(member, device, MemberState::Missing, reason);
            if self.core.member(member).state == MemberState::Missing {
                self.core.member_mut(member).away = Some(condition_of(fault));
            }
        }
        self.lift_replay();
        let patience = if self.core.stop.hurried { STOP_PATIENCE_NS } else { PATIENCE_NS };
        if self.core.oldest_shortage().is_some_and(|since| now.nanos_since(since) >= patience) {
            self.end_patience_of_clients(patience);
        }
    }

    /// Whether an operation that a stop waits for is being tried again, and the stop will not be clean if it
    /// goes on without it. An operation whose patience ends before that gets an error, and the stop goes on.
    pub(in crate::array) fn stops_short(&self) -> bool {
        let mut tokens = self.core.shortages.episodes.values().flat_map(|episode| &episode.tokens);
        tokens.any(|&token| self.core.inflight.get(token).is_some() && self.patience(token).is_none())
    }

    /// Ends requests with an error that have waited this long. Those that have joined a batch stay in it, and
    /// are carried out later. Before a stop they have not waited for as long as clients are kept waiting, so
    /// their error does not say that there is no space.
    fn end_patience_of_clients(&mut self, patience: u64) {
        let error = if self.core.stop.hurried { ClientError::Stopping } else { self.core.shortage_error() };
        let now = self.core.now;
        let mut late = Vec::new();
        for (key, op) in &mut self.ops {
            if let Op::LoggedWrite(write) = op
                && write.loses_patience(now, patience, error)
            {
                late.push(key);
            }
        }
        for key in late {
            self.redo.forget_waiting(key);
            self.core.work.gated.retain(|other| *other != key);
            self.core.work.ready.push_back(key);
        }
        for id in self.redo.take_late_flushes(now, patience) {
            self.core.load.client_ops -= 1;
            self.core.done(id, Err(error));
        }
        for (id, request, _) in self.startup.take_late(now, patience) {
            let is_full = changes_nothing(&request) && error == ClientError::NoSpace;
            self.core.done(id, Err(if is_full { ClientError::Io } else { error }));
        }
    }

    /// Begins a replay again that lacks room to put its content in place, and leaves that to a checkpoint
    /// while reads are served.
    fn lift_replay(&mut self) {
        let is_long = |token: &IoToken| {
            self.core.short(*token).is_some_and(|short| {
                short.fault.kind == IoFaultKind::NoSpace && self.core.now.nanos_since(short.since) >= LIFT_NS
            })
        };
        let mut tokens = self.core.shortages.episodes.values().flat_map(|episode| &episode.tokens);
        if self.startup.may_lift() && self.core.stop.stopping.is_none() && tokens.any(is_long) {
            // Its writes are void from here on.
            self.begin_lifting();
        }
    }

    /// Ends a stop that has waited long enough for members that are short; they are left as they are. True:
    /// the array has stopped.
    pub(in crate::array) fn stop_without_short(&mut self, id: RequestId) -> bool {
        let due = self
            .core
            .stop
            .stop_begun
            .is_some_and(|begun| self.core.now.nanos_since(begun) >= STOP_PATIENCE_NS);
        if !due || !self.core.is_short_of_host() {
            return false;
        }
        self.end_patience_of_clients(0);
        let only_short = self.core.inflight.awaited() == self.core.shortages.waiting.len();
        if !only_short
            || self.core.load.jobs_out > 0
            || self.core.load.client_ops > 0
            || !self.core.work.ready.is_empty()
            || self.pages.has_gone()
        {
            return false;
        }
        let text =
            "the array stops although members lack room or resources: its log is replayed at the next start";
        self.core.notice(NoticeKind::StoppedShort, NoticeLevel::Warning, None, text.into());
        for (_, token) in std::mem::take(&mut self.core.shortages).waiting {
            self.core.inflight.forget(token);
        }
        for (id, ..) in self.startup.take_queued() {
            self.core.done(id, Err(ClientError::Stopping));
        }
        self.core.stop.stopping = Some(Stopping::Marking(id));
        self.stop_now(id, false);
        true
    }

    /// Whether everything that passes have under way waits for room on a member that is full: their own
    /// operations are tried again for that, or they wait for something that may depend on such operations of
    /// others (a lock, a checkpoint).
    pub(in crate::array) fn passes_wait_for_room(&self) -> bool {
        let episodes =
            || self.core.shortages.episodes.values().filter(|e| e.fault.kind == IoFaultKind::NoSpace);
        if episodes().next().is_none() {
            return false;
        }
        let owner = |token: &IoToken| match self.core.inflight.get(*token)?.entry.owner {
            Owner::Op { key, .. } => Some(key),
            _ => None,
        };
        let short: BTreeSet<usize> =
            episodes().flat_map(|episode| &episode.tokens).filter_map(owner).collect();
        let mut waits = self.ops.iter().filter_map(|(key, op)| match op {
            Op::LoggedPass(pass) if pass.unreadable_build().is_some() => Some(false),
            Op::LoggedPass(pass) => Some(pass.waits() || short.contains(&key)),
            Op::PageScrub(scrub) => Some(scrub.waits_for_checkpoint() || short.contains(&key)),
            Op::PagePass(_) | Op::SuperScrub(_) => Some(short.contains(&key)),
            _ => None,
        });
        let settles = self.passes.waits_for_checkpoint();
        waits.next().map_or(settles, |first| first && waits.all(|waits| waits))
    }
}

impl Core {
    fn set_short(&mut self, token: IoToken, short: Short) {
        self.inflight.get_mut(token).expect("it is in flight").short = Some(short);
    }

    fn short(&self, token: IoToken) -> Option<Short> {
        self.inflight.get(token)?.short
    }

    /// A free slot had no room, or this host lacked resources to write it.
    pub(in crate::array) fn note_no_room_for_slots(&mut self) {
        self.shortages.slots_without_room = Some(self.now);
    }

    /// Whether free slots have had room of late, as far as is known.
    pub(in crate::array) fn has_room_for_slots(&self) -> bool {
        let last = self.shortages.slots_without_room;
        last.is_none_or(|last| self.now.nanos_since(last) >= SLOTS_PAUSE_NS)
    }

    /// Whether it is the device that is being built as the replacement of a member.
    fn is_replacement(&self, device: DeviceId) -> bool {
        matches!(self.find_device(device), Some((_, Which::Replacement)))
    }

    /// The shortages of a member and of the device that is being built for it.
    pub(in crate::array) fn lacks_of(&self, member: &Member) -> impl Iterator<Item = MemberCondition> {
        let own = member.away.or(self.shortage_of(member.device.map(|device| device.id)));
        let new = member.replacement.as_ref().and_then(|new| self.shortage_of(Some(new.device.id)));
        let new = new.filter(|new| *new == MemberCondition::Full).map(|_| MemberCondition::NewDeviceFull);
        own.into_iter().chain(new)
    }

    fn notice_shortage(&mut self, member: MemberIndex, device: DeviceId, fault: IoFault) {
        let (kind, level, text) = match fault.kind {
            IoFaultKind::NoSpace if self.is_replacement(device) => (
                NoticeKind::MemberFull,
                NoticeLevel::Error,
                format!(
                    "the storage under the new device of member {member} is full ({fault}): make room there. If it stays full for \
                     {} s, the new device is given up; member {member} is not concerned, and what was written is safe",
                    ALONE_NS / 1_000_000_000
                ),
            ),
            IoFaultKind::NoSpace if self.member(member).state == MemberState::Rebuilding => (
                NoticeKind::MemberFull,
                NoticeLevel::Error,
                format!(
                    "the storage under the device that is being built for member {member} is full ({fault}): make room there. If it \
                     stays full for {} s, it leaves, and comes back when there is room; what was written is safe",
                    ALONE_NS / 1_000_000_000
                ),
            ),
            IoFaultKind::NoSpace => (
                NoticeKind::MemberFull,
                NoticeLevel::Error,
                format!(
                    "the storage under member {member} is full ({fault}): make room there. What fails is tried again until \
                     there is room; what was written is safe"
                ),
            ),
            _ => (
                NoticeKind::HostShort,
                NoticeLevel::Warning,
                format!(
                    "this host lacks resources for an operation on member {member} ({fault}); it is tried again until it \
                     succeeds"
                ),
            ),
        };
        self.notice(kind, level, Some(member), text);
    }

    /// Whether other members can make up for the member of a read, and it has had its time.
    fn others_serve(&self, entry: &Inflight) -> bool {
        let mut others = self.online();
        for member in self.short_members().iter().chain([entry.member]) {
            others.remove(member);
        }
        others.len() >= self.map.k
    }

    /// Members in service with operations that are being tried again.
    fn short_members(&self) -> MemberSet {
        let episodes = self.shortages.episodes.iter();
        let short = episodes.filter(|(_, episode)| !episode.tokens.is_empty());
        let short = short.filter_map(|(device, _)| self.find_device(*device));
        let serves = |(member, which): &(MemberIndex, Which)| {
            *which == Which::Primary && self.member(*member).state == MemberState::Online
        };
        short.filter(serves).map(|(member, _)| member).collect()
    }

    fn submit_again(&mut self, token: IoToken, due: Timestamp) {
        self.shortages.waiting.remove(&(due, token));
        let flight = self.inflight.get_mut(token).expect("what waits is in flight");
        flight.short.as_mut().expect("it waits because it is short").due = None;
        let (device, op) = (flight.entry.device, flight.again.op(&self.pool));
        self.actions.push(crate::array::ArrayAction::Io { device, token, op, may_wait: false });
    }

    /// A device that has been short for too long and that the array does without.
    fn spared_by_shortage(&self) -> Option<(MemberIndex, DeviceId, IoFault)> {
        let is_long = |episode: &Episode| {
            let since = episode.tokens.iter().filter_map(|&token| Some(self.short(token)?.since));
            since.min().is_some_and(|since| self.now.nanos_since(since) >= ALONE_NS)
        };
        let sound = self.online().len() - self.short_members().len();
        let mut long = self.shortages.episodes.iter().filter(|(_, episode)| is_long(episode));
        long.find_map(|(&device, episode)| {
            let (member, which) = self.find_device(device)?;
            let is_online = which == Which::Primary && self.member(member).state == MemberState::Online;
            (!is_online || (sound >= self.map.k && self.online().len() > self.map.k)).then_some((
                member,
                device,
                episode.fault,
            ))
        })
    }

    /// Whether a shortage has held up what clients wait for since then, for longer than they are kept
    /// waiting.
    pub(in crate::array) fn is_lasting_shortage(&self, since: Timestamp) -> bool {
        self.now.nanos_since(since) >= PATIENCE_NS
    }

    /// Since when the operation that has waited longest has been tried again.
    fn oldest_shortage(&self) -> Option<Timestamp> {
        let tokens = self.shortages.episodes.values().flat_map(|episode| &episode.tokens);
        tokens.filter_map(|&token| Some(self.short(token)?.since)).min()
    }

    /// Whether some operation is being tried again.
    pub(in crate::array) fn is_short_of_host(&self) -> bool {
        self.shortages.episodes.values().any(|episode| !episode.tokens.is_empty())
    }

    /// The error of clients that have waited in vain for the end of a shortage, if it has lasted long enough
    /// to give it at once.
    pub(in crate::array) fn lasting_shortage(&self) -> Option<ClientError> {
        let is_long = self.oldest_shortage().is_some_and(|since| self.now.nanos_since(since) >= PATIENCE_NS);
        is_long.then(|| self.shortage_error())
    }

    /// The members whose storage is known to be full, in words.
    pub(in crate::array) fn words_for_full(&self) -> String {
        let episodes = self.shortages.episodes.iter().filter(|(device, _)| !self.is_replacement(**device));
        let full = episodes.filter(|(_, episode)| episode.fault.kind == IoFaultKind::NoSpace);
        let full: BTreeSet<MemberIndex> = full.map(|(_, episode)| episode.member).collect();
        let full: Vec<String> = full.into_iter().map(|member| member.to_string()).collect();
        if full.is_empty() {
            return String::new();
        }
        format!(
            ": the storage under member {} is full, and what was tried again there for a while did not succeed",
            full.join(", ")
        )
    }

    fn shortage_error(&self) -> ClientError {
        let mut episodes = self.shortages.episodes.values();
        match episodes.any(|episode| episode.fault.kind == IoFaultKind::NoSpace) {
            true => ClientError::NoSpace,
            false => ClientError::Io,
        }
    }

    /// The condition that a shortage causes for a member, for the status.
    pub(super) fn shortage_of(&self, device: Option<DeviceId>) -> Option<MemberCondition> {
        self.shortages.episodes.get(&device?).map(|episode| condition_of(episode.fault))
    }
}

pub(in crate::array) fn changes_nothing(request: &StripeRequest) -> bool {
    match request {
        StripeRequest::Read { .. } | StripeRequest::Extents { .. } | StripeRequest::Health { .. } => true,
        StripeRequest::Write { .. }
        | StripeRequest::WriteStripe { .. }
        | StripeRequest::Zero { .. }
        | StripeRequest::Flush => false,
    }
}

fn condition_of(fault: IoFault) -> MemberCondition {
    match fault.kind {
        IoFaultKind::NoSpace => MemberCondition::Full,
        _ => MemberCondition::ShortOfResources,
    }
}
