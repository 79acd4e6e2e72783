//! The thread of one remote device: its connections, the requests under way on them, and what
//! happens when they are lost.
//!
//! Invariants: the thread waits in one poll and nowhere else; a request is sent again only when
//! that cannot do harm (see [`Worker::resume_or_give_up`]); a device that was given up stays so,
//! and every operation on it fails at once. Must not know arrays.
//!
//! # What is sent again, and what never
//!
//! A request that a lost connection has not answered may be executed at any time until its server
//! has finished with that connection, and nothing on the wire proves when that is: a server that
//! closes may still have requests in its block layer (qemu's does), or be a proxy. So a write of
//! which any byte may have been sent is never sent again. When a connection is lost with a write
//! unanswered, the device is given up: its member leaves service, and is caught up after a
//! quarantine. The same holds when answered writes were not flushed: the server may have lost them
//! with its memory, and a FLUSH on a new connection would not tell. Other requests are replayed:
//! reads, block status, flushes of nothing, and requests that no connection has been given.

use super::super::inbox::{Inbox, Returned};
use super::connect::{connect, poll_timeout};
use super::link::{Link, LinkError};
use super::operations::{Operations, Part, Replies, index_of};
use super::registry::{self, Hold};
use super::{Lost, RemoteError, RemoteLimits, Shared, To, Witness, backoff, check_export};
use calpe_core::block_io::{IoFault, IoFaultKind};
use calpe_core::nbd::{NbdUri, RemoteExport};
use calpe_host::polling;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Requests under way on one connection.
const UNDER_WAY_MAX: usize = 256;

/// Bytes handed to one connection before the server takes some: a few of the largest writes.
const OUT_BYTES_MAX: usize = 4 << 20;

/// How long at most to wait for answers on a lost connection: answered requests need not be given
/// up.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Wait before the first attempt to reconnect, and the longest between two.
const BACKOFF_FIRST: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// One connection, and the requests under way on it.
struct Lane {
    link: Link,
    /// By the low half of their cookies.
    under_way: Vec<Option<Part>>,
}

enum Phase {
    Up(Vec<Lane>),
    /// Lost; answers that were sent before are still taken.
    Leaving {
        lanes: Vec<Lane>,
        until: Instant,
        lost: Vec<Part>,
        why: String,
    },
    /// Lost, and being replaced, which can do no harm.
    Reconnecting {
        until: Instant,
        next: Instant,
        attempt: u32,
        result: Option<Receiver<Result<Vec<Link>, RemoteError>>>,
        why: String,
    },
    GivenUp(IoFault),
}

/// What the thread owns.
pub(super) struct Worker {
    uri: NbdUri,
    /// The export when the device was opened; it must not change.
    export: RemoteExport,
    limits: RemoteLimits,
    /// By the places where their windows begin.
    witnesses: BTreeMap<u64, Arc<Witness>>,
    shared: Arc<Shared>,
    operations: Operations,
    phase: Phase,
    /// None for a device that is only read.
    hold: Option<Hold>,
    /// The last attempt to reconnect met a server that refused.
    is_refused: bool,
}

impl Worker {
    pub(super) fn new(
        uri: NbdUri,
        links: Vec<Link>,
        limits: RemoteLimits,
        shared: Arc<Shared>,
        hold: Option<Hold>,
    ) -> Worker {
        let export = links[0].export().expect("connected").clone();
        Worker {
            uri,
            export,
            limits,
            witnesses: BTreeMap::new(),
            shared,
            operations: Operations::default(),
            phase: Phase::Up(lanes(links)),
            hold,
            is_refused: false,
        }
    }

    /// Runs until the device is closed.
    pub(super) fn run(mut self) {
        loop {
            let closing = self.take_submissions();
            self.send();
            self.hand_back();
            if closing {
                return self.close();
            }
            self.wait();
            self.receive();
            self.keep_time();
        }
    }

    /// Returns whether the device is closed.
    fn take_submissions(&mut self) -> bool {
        // All submissions at once: any that came between two looks would be lost with the rest.
        let queue = std::mem::take(&mut *self.shared.queue());
        self.limits = queue.limits.unwrap_or(self.limits);
        self.witnesses.extend(queue.witnesses);
        let now = Instant::now();
        for submission in queue.submissions {
            if let Phase::GivenUp(fault) = self.phase {
                self.operations.finished.push((submission.to, Err(fault)));
                continue;
            }
            self.operations.add(submission, &self.export, now);
        }
        queue.closing
    }

    fn take_settings(&mut self) {
        let mut queue = self.shared.queue();
        self.limits = queue.limits.take().unwrap_or(self.limits);
        self.witnesses.extend(queue.witnesses.drain(..));
    }

    /// Hands requests to the connection with the least to do, as long as one has room.
    fn send(&mut self) {
        let Phase::Up(lanes) = &mut self.phase else { return };
        while self.operations.has_waiting() {
            let free = lanes
                .iter_mut()
                .filter(|lane| lane.link.in_flight() < UNDER_WAY_MAX && lane.link.out_bytes() < OUT_BYTES_MAX)
                .min_by_key(|lane| (lane.link.out_bytes(), lane.link.in_flight()));
            let Some(lane) = free else { break };
            let Some((part, payload)) = self.operations.next_part() else { break };
            match lane.link.submit(&part.request, payload) {
                Ok(cookie) => {
                    let index = index_of(cookie);
                    if lane.under_way.len() <= index {
                        lane.under_way.resize(index + 1, None);
                    }
                    lane.under_way[index] = Some(part);
                }
                // Ranges and alignment were checked before; the server does not take this request,
                // so it cannot be done.
                Err(error) => {
                    tracing::error!(uri = %self.uri, %error, "a request that cannot be sent");
                    let failure = calpe_core::nbd::Failure {
                        errno: calpe_core::nbd::Errno::Inval,
                        message: error.to_string(),
                    };
                    self.operations.done(&part, Err(failure));
                }
            }
        }
        let error =
            lanes.iter_mut().filter(|lane| lane.link.out_bytes() > 0).find_map(|lane| lane.link.send().err());
        if let Some(error) = error {
            self.lost(&error);
        }
    }

    fn hand_back(&mut self) {
        // A group for each inbox, in which one wake-up tells of all.
        let mut groups: Vec<(Arc<Inbox>, Vec<Returned>)> = Vec::new();
        for (to, result) in self.operations.finished.drain(..) {
            match to {
                To::Engine { inbox, owner, device, token } => {
                    let returned = (owner, device, token, result);
                    match groups.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &inbox)) {
                        Some((_, group)) => group.push(returned),
                        None => groups.push((inbox, vec![returned])),
                    }
                }
                // The caller may have given up waiting.
                To::Caller(reply) => drop(reply.send(result)),
            }
        }
        groups.into_iter().for_each(|(inbox, group)| inbox.give(group));
    }

    fn wait(&mut self) {
        let timeout = self.until_due().map_or(PollTimeout::NONE, poll_timeout);
        let mut fds = vec![PollFd::new(self.shared.wake.as_fd(), PollFlags::POLLIN)];
        if let Phase::Up(lanes) | Phase::Leaving { lanes, .. } = &self.phase {
            fds.extend(lanes.iter().map(|lane| {
                let mut events = PollFlags::POLLIN;
                if lane.link.out_bytes() > 0 && matches!(self.phase, Phase::Up(_)) {
                    events |= PollFlags::POLLOUT;
                }
                PollFd::new(lane.link.fd(), events)
            }));
        }
        match poll(&mut fds, timeout) {
            Ok(_) => {}
            Err(errno) if polling::survives(errno as i32, "the thread of a remote member") => {}
            // All that can be done is to try again.
            Err(error) => {
                tracing::error!(%error, "poll failed");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        if fds[0].any() == Some(true) {
            // An error means that there was nothing to read, which is harmless.
            let _ = self.shared.wake.read();
        }
    }

    /// The time until something has to be done although nothing arrives.
    fn until_due(&self) -> Option<Duration> {
        let now = Instant::now();
        let requests = self.operations.oldest().map(|began| began + self.limits.request);
        let phase = match &self.phase {
            Phase::Up(_) | Phase::GivenUp(_) => None,
            Phase::Leaving { until, .. } => Some(*until),
            Phase::Reconnecting { until, next, result, .. } => {
                Some(if result.is_some() { *until } else { (*next).min(*until) })
            }
        };
        requests.into_iter().chain(phase).min().map(|at| at.saturating_duration_since(now))
    }

    fn receive(&mut self) {
        match &mut self.phase {
            Phase::Up(lanes) => {
                let error = lanes.iter_mut().find_map(|lane| lane.receive(&mut self.operations).err());
                if let Some(error) = error {
                    self.lost(&error);
                } else if self.operations.server_stops() {
                    self.lost(&LinkError::Stopping);
                }
            }
            Phase::Leaving { lanes, lost, .. } => {
                let operations = &mut self.operations;
                lanes.retain_mut(|lane| {
                    let over = lane.receive(operations).is_err() || lane.link.in_flight() == 0;
                    if over {
                        lost.extend(lane.under_way.drain(..).flatten());
                    }
                    !over
                });
                if lanes.is_empty() {
                    self.resume_or_give_up();
                }
            }
            Phase::Reconnecting { .. } | Phase::GivenUp(_) => {}
        }
    }

    fn keep_time(&mut self) {
        let now = Instant::now();
        if let Some(began) = self.operations.oldest()
            && now.duration_since(began) >= self.limits.request
        {
            let seconds = self.limits.request.as_secs();
            self.give_up(libc::ETIMEDOUT, format!("a request was not answered for {seconds} s"));
        }
        match &mut self.phase {
            Phase::Leaving { until, lanes, lost, .. } if now >= *until => {
                lanes.iter().for_each(|lane| lane.link.cut());
                lost.extend(lanes.drain(..).flat_map(|lane| lane.under_way).flatten());
                self.resume_or_give_up();
            }
            Phase::Reconnecting { .. } => self.reconnect(now),
            _ => {}
        }
    }

    /// A connection is over: nothing more is sent on any, and their remaining answers are taken.
    fn lost(&mut self, error: &LinkError) {
        let why = error.to_string();
        if let LinkError::Protocol(_) = error {
            // The server broke the protocol: no connection of it is believed.
            return self.give_up(libc::EPROTO, why);
        }
        let Phase::Up(lanes) = &mut self.phase else { return };
        let lanes = std::mem::take(lanes);
        tracing::warn!(uri = %self.uri, "{why}");
        let until = Instant::now() + LAST_ANSWERS.min(self.limits.grace / 2);
        lanes.iter().for_each(|lane| lane.link.end_asking());
        self.phase = Phase::Leaving { lanes, until, lost: Vec::new(), why };
        self.receive();
    }

    /// All connections are gone. Continues with new ones if no sent request can do harm; see the
    /// head of this file.
    fn resume_or_give_up(&mut self) {
        // Limits that were set just now count.
        self.take_settings();
        let Phase::Leaving { lost, why, .. } = &mut self.phase else { return };
        let (lost, why) = (std::mem::take(lost), std::mem::take(why));
        let writes = lost.iter().filter(|part| part.request.command.modifies()).count();
        self.operations.send_again(lost);
        let reason = if writes > 0 {
            format!("{why}, with {writes} writes unanswered")
        } else if self.operations.has_unflushed() {
            format!("{why}, with writes not yet flushed")
        } else if self.witnesses.is_empty() {
            why
        } else {
            let now = Instant::now();
            self.phase = Phase::Reconnecting {
                until: now + self.limits.grace,
                next: now,
                attempt: 0,
                result: None,
                why,
            };
            return self.reconnect(now);
        };
        self.finish_giving_up(libc::ENOTCONN, reason, writes > 0);
    }

    /// Starts an attempt that is due, or takes the result of one.
    fn reconnect(&mut self, now: Instant) {
        let Phase::Reconnecting { until, next, attempt, result, why } = &mut self.phase else { return };
        let outcome = match result.as_ref().map(Receiver::try_recv) {
            Some(Ok(outcome)) => Some(outcome),
            Some(Err(TryRecvError::Disconnected)) => {
                Some(Err(RemoteError::Lost(std::io::Error::other("no thread to connect"))))
            }
            Some(Err(TryRecvError::Empty)) | None => None,
        };
        if let Some(outcome) = &outcome {
            // The export has changed; that is judged when the member is to come back.
            let is_refusal =
                |error: &RemoteError| error.is_refusal() && !matches!(error, RemoteError::Changed(_));
            self.is_refused = outcome.as_ref().is_err_and(is_refusal);
        }
        match outcome {
            Some(Ok(links)) => {
                tracing::info!(uri = %self.uri, "connected again");
                self.phase = Phase::Up(lanes(links));
                self.send();
                return;
            }
            Some(Err(error @ RemoteError::Changed(_))) => {
                return self.finish_giving_up(libc::ESTALE, error.to_string(), false);
            }
            Some(Err(error)) => {
                *result = None;
                *next = now + backoff(BACKOFF_FIRST, BACKOFF_MAX, *attempt);
                *attempt += 1;
                tracing::debug!(uri = %self.uri, %error, attempt, "not connected again");
                *why = error.to_string();
            }
            None => {}
        }
        if now >= *until {
            let reason = format!("not reached again within {} s: {why}", self.limits.grace.as_secs());
            return self.finish_giving_up(libc::ENOTCONN, reason, false);
        }
        if result.is_none() && now >= *next {
            let begun = self.begin_attempt();
            if let Phase::Reconnecting { result, .. } = &mut self.phase {
                *result = Some(begun);
            }
        }
    }

    /// Connects on a thread of its own: resolving names takes time, and requests must not wait
    /// beyond their limit for it.
    fn begin_attempt(&self) -> Receiver<Result<Vec<Link>, RemoteError>> {
        let (sender, receiver) = channel();
        let (uri, expected, limits) = (self.uri.clone(), self.export.clone(), self.limits);
        let (witnesses, shared) = (self.witnesses.clone(), Arc::clone(&self.shared));
        let spawned = std::thread::Builder::new().name("remote-connect".into()).spawn(move || {
            let result = connect(&uri, &limits, &mut |reader| {
                check_same(&expected, reader.export())?;
                check_export(reader.export(), false)?;
                witnesses.iter().try_for_each(|(start, witness)| {
                    witness(&mut |offset, target| reader.read(start + offset, target))
                })
            });
            // If this device is gone, the connections are closed again.
            let _ = sender.send(result);
            shared.rouse();
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "no thread to connect");
        }
        receiver
    }

    fn give_up(&mut self, errno: i32, reason: String) {
        let lanes = match &mut self.phase {
            Phase::Up(lanes) | Phase::Leaving { lanes, .. } => std::mem::take(lanes),
            Phase::Reconnecting { .. } | Phase::GivenUp(_) => Vec::new(),
        };
        let gathered = match &self.phase {
            Phase::Leaving { lost, .. } => lost.iter().any(|part| part.request.command.modifies()),
            _ => false,
        };
        let under_way = lanes.iter().flat_map(|lane| lane.under_way.iter().flatten());
        let writes = gathered || under_way.into_iter().any(|part| part.request.command.modifies());
        lanes.iter().for_each(|lane| lane.link.cut());
        drop(lanes);
        self.finish_giving_up(errno, reason, writes);
    }

    fn finish_giving_up(&mut self, errno: i32, reason: String, writes_unanswered: bool) {
        if let Phase::GivenUp(_) = self.phase {
            return;
        }
        tracing::warn!(uri = %self.uri, "given up: {reason}");
        if self.hold.is_some() {
            let quarantine = if writes_unanswered { self.limits.quarantine() } else { Duration::ZERO };
            let at = Instant::now();
            let returns = self.shared.in_use.load(Ordering::Acquire) > 0;
            let (not_before, is_refused) = (at + quarantine, self.is_refused);
            registry::note_lost(&self.uri, Lost { reason, is_refused, at, not_before, returns });
        }
        let fault = IoFault { kind: IoFaultKind::Gone, errno };
        self.phase = Phase::GivenUp(fault);
        self.operations.fail_all(fault);
        self.shared.note_given_up(errno);
        self.hand_back();
    }

    fn close(mut self) {
        if let Phase::Up(lanes) = &mut self.phase
            && self.operations.is_empty()
        {
            lanes.iter_mut().for_each(|lane| lane.link.farewell());
        } else if !self.operations.is_empty() {
            self.give_up(libc::ECANCELED, "it was closed with requests under way".into());
        }
        // The connections end before another opening in this process may take the export.
        self.phase = Phase::GivenUp(IoFault { kind: IoFaultKind::Gone, errno: libc::ESHUTDOWN });
        drop(self.hold.take());
        self.hand_back();
    }
}

impl Lane {
    fn receive(&mut self, operations: &mut Operations) -> Result<(), LinkError> {
        self.link.receive(&mut Replies { operations, under_way: &mut self.under_way })
    }
}

fn lanes(links: Vec<Link>) -> Vec<Lane> {
    links.into_iter().map(|link| Lane { link, under_way: Vec::new() }).collect()
}

/// Whether the export that answers has the description of the one that was opened.
fn check_same(was: &RemoteExport, is: &RemoteExport) -> Result<(), RemoteError> {
    let changed = [
        ("size", was.size, is.size),
        ("least block", was.block_min.into(), is.block_min.into()),
        ("largest block", was.block_max.into(), is.block_max.into()),
        ("read-only flag", was.read_only.into(), is.read_only.into()),
        ("FLUSH", was.flush.into(), is.flush.into()),
        ("FUA", was.fua.into(), is.fua.into()),
    ];
    match changed.into_iter().find(|(_, was, is)| was != is) {
        Some((what, was, is)) => Err(RemoteError::Changed(format!("its {what} was {was} and is {is}"))),
        None => Ok(()),
    }
}
