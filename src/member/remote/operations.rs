//! Operations on a remote device, and the requests that each is cut into.
//!
//! Invariants: an operation ends exactly once, when none of its requests is waiting or under way
//! any more; it owns its buffer until then; a write that has to be durable ends only after a FUA
//! write or a FLUSH has. Must not know connections.

use super::link::Sink;
use super::{INTERNAL_ERRNO, Submission, To};
use calpe_core::block_io::{Buf, Extent, IoFault, IoFaultKind, IoOp, IoValue};
use calpe_core::nbd::{ClientEvent, Command, Errno, Failure, RemoteExport, Request, STATE_HOLE, STATE_ZERO};
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

/// Most bytes zeroed with one request. Servers that zero by writing need a while for more, and a
/// request that takes too long costs the member.
const ZEROED_AT_ONCE: u64 = 64 << 20;

/// Most bytes of a block status request: a round number that fits in 32 bits.
const STATUS_AT_ONCE: u64 = 1 << 30;

/// Requests are cut at multiples of this where possible: a server would have to read what surrounds
/// a smaller range.
const PAGE: u32 = 4096;

/// Most extents in the answer to one question; the rest of the range is reported as data.
const EXTENTS_MAX: usize = 4096;

/// One request of an operation.
#[derive(Clone, Debug)]
pub(super) struct Part {
    operation: u64,
    pub request: Request,
    /// For a FLUSH: `writes` of the device when it was sent.
    writes: u64,
}

struct Operation {
    op: IoOp,
    to: To,
    began: Instant,
    /// Requests waiting or under way.
    parts: usize,
    fault: Option<IoFault>,
    /// A FLUSH has to follow the writes.
    flush_after: bool,
    extents: Vec<Extent>,
    covered: u64,
    /// The server refused to report more extents.
    extents_refused: bool,
}

/// A finished operation.
pub(super) type Finished = (To, Result<IoValue, IoFault>);

/// The operations of a device.
#[derive(Default)]
pub(super) struct Operations {
    /// In order of arrival.
    operations: BTreeMap<u64, Operation>,
    next: u64,
    /// Requests to be sent.
    waiting: VecDeque<Part>,
    pub finished: Vec<Finished>,
    /// Writes completed so far that were not durable by themselves.
    writes: u64,
    /// `writes` when the last successful FLUSH began.
    flushed: u64,
    /// A request was refused because the server is shutting down; it waits to be sent again.
    stopping: bool,
}

impl Operations {
    pub(super) fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// When the oldest operation arrived.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.operations.first_key_value().map(|(_, operation)| operation.began)
    }

    /// Whether a server that loses its memory would lose completed writes.
    pub(super) fn has_unflushed(&self) -> bool {
        self.flushed < self.writes
    }

    /// Cuts an operation into requests that the export takes.
    pub(super) fn add(&mut self, submission: Submission, export: &RemoteExport, now: Instant) {
        let Submission { op, to, fast } = submission;
        let block_max = block_max(export);
        let (mut fault, mut flush_after) = (None, false);
        let mut parts: Vec<Request> = Vec::new();
        match &op {
            IoOp::Read { offset, buf } => {
                parts.extend(cut(Command::Read, offset.0, buf.len() as u64, block_max));
            }
            IoOp::Write { offset, buf, fua } => {
                parts.extend(cut(Command::Write, offset.0, buf.len() as u64, block_max));
                parts.iter_mut().for_each(|request| request.fua = *fua && export.fua);
                flush_after = *fua && !export.fua;
            }
            IoOp::Flush => parts.push(Request::new(Command::Flush, 0, 0)),
            IoOp::Zero { offset, len, may_unmap } => {
                if !export.write_zeroes {
                    fault = Some(UNSUPPORTED);
                } else {
                    parts.extend(cut(Command::WriteZeroes, offset.0, *len, ZEROED_AT_ONCE));
                    for request in &mut parts {
                        (request.no_hole, request.fast_zero) = (!may_unmap, fast);
                    }
                }
            }
            IoOp::Extents { offset, len } => {
                if export.base_allocation.is_some() && *len > 0 {
                    parts.push(Request::new(Command::BlockStatus, offset.0, (*len).min(STATUS_AT_ONCE)));
                }
            }
        }
        let operation = Operation {
            op,
            to,
            began: now,
            parts: parts.len(),
            fault,
            flush_after,
            extents: Vec::new(),
            covered: 0,
            extents_refused: false,
        };
        let key = self.next;
        self.next += 1;
        self.operations.insert(key, operation);
        self.waiting.extend(parts.into_iter().map(|request| Part { operation: key, request, writes: 0 }));
        self.finish_if_over(key);
    }

    /// The next request to be sent, with its payload.
    pub(super) fn next_part(&mut self) -> Option<(Part, Option<Buf>)> {
        let mut part = self.waiting.pop_front()?;
        part.writes = self.writes;
        let payload = match &self.operations[&part.operation].op {
            IoOp::Write { offset, buf, .. } if part.request.command == Command::Write => {
                let from = (part.request.offset - offset.0) as usize;
                Some(buf.slice(from..from + part.request.length as usize))
            }
            _ => None,
        };
        Some((part, payload))
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Queues the unanswered requests of lost connections again. The announcements of their end are
    /// forgotten.
    pub(super) fn send_again(&mut self, parts: Vec<Part>) {
        self.stopping = false;
        for part in parts.into_iter().rev() {
            self.waiting.push_front(part);
        }
    }

    /// Whether the server has announced its end since the last call.
    pub(super) fn server_stops(&mut self) -> bool {
        std::mem::take(&mut self.stopping)
    }

    /// The end of a request.
    pub(super) fn done(&mut self, part: &Part, result: Result<(), Failure>) {
        if matches!(&result, Err(failure) if failure.errno == Errno::Shutdown) {
            // The server answered it, so it cannot land later, and may be sent again.
            self.stopping = true;
            self.waiting.push_front(part.clone());
            return;
        }
        let operation = self.operations.get_mut(&part.operation).expect("an operation outlives its requests");
        let request = &part.request;
        match result {
            Ok(()) if request.command == Command::Flush => self.flushed = self.flushed.max(part.writes),
            Ok(()) => self.writes += u64::from(request.command.modifies() && !request.fua),
            // Holes are only a hint: where the server cannot tell, the range is data.
            Err(_) if request.command == Command::BlockStatus => operation.extents_refused = true,
            Err(failure) => {
                tracing::debug!(?request, %failure, "a remote request failed");
                operation.fault.get_or_insert(fault_of(request, &failure));
            }
        }
        operation.parts -= 1;
        if operation.parts == 0 && operation.fault.is_none() {
            self.go_on(part.operation);
        }
        self.finish_if_over(part.operation);
    }

    /// Queues the requests that an operation needs after its first ones.
    fn go_on(&mut self, key: u64) {
        let operation = self.operations.get_mut(&key).expect("checked by the caller");
        let next = match &operation.op {
            IoOp::Write { .. } if std::mem::take(&mut operation.flush_after) => {
                Request::new(Command::Flush, 0, 0)
            }
            IoOp::Extents { offset, len }
                if !operation.extents_refused
                    && operation.covered < *len
                    && operation.extents.len() < EXTENTS_MAX =>
            {
                let left = len - operation.covered;
                Request::new(Command::BlockStatus, offset.0 + operation.covered, left.min(STATUS_AT_ONCE))
            }
            _ => return,
        };
        operation.parts = 1;
        self.waiting.push_back(Part { operation: key, request: next, writes: 0 });
    }

    /// Ends everything with a fault.
    pub(super) fn fail_all(&mut self, fault: IoFault) {
        self.waiting.clear();
        let operations = std::mem::take(&mut self.operations);
        self.finished.extend(operations.into_values().map(|operation| (operation.to, Err(fault))));
    }

    fn finish_if_over(&mut self, key: u64) {
        if self.operations[&key].parts > 0 {
            return;
        }
        let operation = self.operations.remove(&key).expect("looked up just now");
        let result = match (operation.fault, operation.op) {
            (Some(fault), _) => Err(fault),
            (None, IoOp::Read { buf, .. }) => Ok(IoValue::Data(buf)),
            (None, IoOp::Extents { len, .. }) => {
                Ok(IoValue::Extents(whole(operation.extents, operation.covered, len)))
            }
            (None, _) => Ok(IoValue::Done),
        };
        self.finished.push((operation.to, result));
    }

    fn extents(&mut self, part: &Part, extents: Vec<(u64, u32)>) {
        let Some(operation) = self.operations.get_mut(&part.operation) else { return };
        for (len, flags) in extents {
            if operation.extents.len() >= EXTENTS_MAX {
                break;
            }
            let hole = flags & STATE_HOLE != 0 && flags & STATE_ZERO != 0;
            match operation.extents.last_mut() {
                Some(last) if last.hole == hole => last.len += len,
                _ => operation.extents.push(Extent { len, hole }),
            }
            operation.covered += len;
        }
    }

    fn target(&mut self, part: &Part, at: u64, len: usize) -> &mut [u8] {
        match &mut self.operations.get_mut(&part.operation).expect("an operation outlives its requests").op {
            IoOp::Read { offset, buf } => {
                let from = (at - offset.0) as usize;
                &mut buf[from..from + len]
            }
            other => unreachable!("only reads have content: {other:?}"),
        }
    }
}

/// Takes the replies of one connection.
pub(super) struct Replies<'a> {
    pub operations: &'a mut Operations,
    /// The requests under way on it, by the low half of their cookies.
    pub under_way: &'a mut Vec<Option<Part>>,
}

impl Replies<'_> {
    fn part(&self, cookie: u64) -> Part {
        self.under_way[index_of(cookie)].clone().expect("the protocol half knows the cookie")
    }
}

/// The low half of a cookie is a dense index.
pub(super) fn index_of(cookie: u64) -> usize {
    (cookie & u64::from(u32::MAX)) as usize
}

impl Sink for Replies<'_> {
    fn target(&mut self, cookie: u64, offset: u64, len: usize) -> &mut [u8] {
        let part = self.part(cookie);
        self.operations.target(&part, offset, len)
    }

    fn event(&mut self, event: ClientEvent) {
        match event {
            ClientEvent::Hole { cookie, offset, length } => {
                self.target(cookie, offset, length as usize).fill(0);
            }
            ClientEvent::Extents { cookie, extents } => {
                let part = self.part(cookie);
                self.operations.extents(&part, extents);
            }
            ClientEvent::Done { cookie, result } => {
                let part = self.under_way[index_of(cookie)].take().expect("the protocol half knows it");
                self.operations.done(&part, result);
            }
            _ => {}
        }
    }
}

const UNSUPPORTED: IoFault = IoFault { kind: IoFaultKind::Unsupported, errno: libc::EOPNOTSUPP };

/// The longest READ or WRITE: whole pages where the server takes that much.
fn block_max(export: &RemoteExport) -> u64 {
    let unit = if export.block_max >= PAGE { PAGE.max(export.block_min) } else { export.block_min };
    u64::from(export.block_max - export.block_max % unit)
}

fn cut(command: Command, offset: u64, len: u64, at_once: u64) -> impl Iterator<Item = Request> {
    (0..len.div_ceil(at_once)).map(move |index| {
        let from = index * at_once;
        Request::new(command, offset + from, (len - from).min(at_once))
    })
}

/// The extents of a whole range: the uncovered rest is data.
fn whole(mut extents: Vec<Extent>, covered: u64, len: u64) -> Vec<Extent> {
    if covered < len {
        match extents.last_mut() {
            Some(last) if !last.hole => last.len += len - covered,
            _ => extents.push(Extent { len: len - covered, hole: false }),
        }
    }
    extents
}

fn fault_of(request: &Request, failure: &Failure) -> IoFault {
    let zero = request.command == Command::WriteZeroes;
    let (kind, errno) = match failure.errno {
        Errno::NoSpc => (IoFaultKind::NoSpace, libc::ENOSPC),
        Errno::Shutdown => (IoFaultKind::Gone, libc::ESHUTDOWN),
        Errno::NotSup => (IoFaultKind::Unsupported, libc::EOPNOTSUPP),
        Errno::Inval | Errno::Perm if zero => (IoFaultKind::Unsupported, libc::EINVAL),
        Errno::Inval => (IoFaultKind::Medium, INTERNAL_ERRNO),
        Errno::Perm => (IoFaultKind::Medium, libc::EPERM),
        Errno::NoMem => (IoFaultKind::Shortage, libc::ENOMEM),
        Errno::Overflow => (IoFaultKind::Medium, libc::EOVERFLOW),
        Errno::Io => (IoFaultKind::Medium, libc::EIO),
    };
    IoFault { kind, errno }
}
