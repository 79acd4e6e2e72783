//! Socket operations through io_uring, and the messages that they send: the one place where the reactor hands
//! memory to the kernel. A message is the reply headers and payloads of one wake-up, sent in one system call.
//!
//! Invariants: buffers, message headers and the descriptor of an operation are owned by its entry in
//! `flights` from submission to completion, whatever becomes of the connection, and are leaked if this table
//! is dropped under them. Every operation completes exactly once. Bytes of a message leave in the order in
//! which they were appended; once it is sealed, nothing is appended, and its header stays valid until it is
//! recycled. Must not know NBD.
#![allow(unsafe_code)] // raw io_uring entries; each block argues for itself

use crate::member::Ring;
use calpe_core::block_io::BufMut;
use calpe_host::polling;
use io_uring::{opcode, squeue, types};
use nix::errno::Errno;
use slab::Slab;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

/// Payloads of at least this many bytes are copied to and from sockets by a worker of the kernel, where there
/// is another core for it: copying them takes as long as a hundred small requests.
const COPIED_ELSEWHERE_BYTES_MIN: usize = 256 << 10;

/// Fewest cores with which the kernel's workers copy. With two, clients need the other core: 1 MiB reads lost
/// a sixth of their rate there, and gained half with sixteen.
const COPYING_CORES_MIN: usize = 3;

/// The outcome of one socket operation, with what it owned.
#[derive(Debug)]
pub(super) enum SocketEvent {
    /// Bytes arrived in `buf` behind those it held; 0 is the end of the stream.
    Received { owner: usize, buf: BufMut, result: io::Result<usize> },
    /// The whole of `message` was sent, or the connection broke.
    Sent { owner: usize, message: Box<Outgoing>, result: io::Result<()> },
    /// A client connected.
    Accepted { owner: usize, result: io::Result<OwnedFd> },
    /// The descriptor became readable (or failed: reading it tells).
    Readable,
}

/// The ring, and socket operations in the kernel.
#[derive(Debug)]
pub(super) struct Sockets {
    ring: Ring,
    tag: u64,
    flights: Slab<Flight>,
    /// Whether there are cores enough for the kernel's workers.
    has_workers: bool,
    /// Whether one is free for them at present.
    may_offload: bool,
}

#[derive(Debug)]
struct Flight {
    owner: usize,
    socket: Arc<OwnedFd>,
    work: Work,
}

#[derive(Debug)]
enum Work {
    Receive {
        buf: BufMut,
        filled: usize,
        whole: bool,
    },
    Send {
        message: Box<Outgoing>,
    },
    Accept {
        cancelled: bool,
    },
    /// Cancels the operation with this `user_data`.
    Cancel(u64),
    Poll,
}

/// The scattered bytes of a message, in the kernel's form. Only pointers: the caller that fills it in keeps
/// the bytes in place until they are sent.
#[derive(Debug)]
struct MessageHeader {
    iovecs: Vec<libc::iovec>,
    /// Vectors sent completely.
    sent: usize,
    header: libc::msghdr,
}

// SAFETY: nothing here follows the pointers; who hands them to the kernel argues for that.
unsafe impl Send for MessageHeader {}

/// Most vectors that one send may have: IOV_MAX of Linux.
const IOVECS_MAX: usize = 1024;

impl MessageHeader {
    pub(super) fn new() -> MessageHeader {
        // SAFETY: all zeroes is a valid msghdr: no address, no vectors, no control data.
        let header = unsafe { std::mem::zeroed() };
        MessageHeader { iovecs: Vec::new(), sent: 0, header }
    }

    /// Forgets all pointers, keeping the memory for the next ones.
    pub(super) fn clear(&mut self) {
        self.iovecs.clear();
        self.sent = 0;
        self.header.msg_iov = std::ptr::null_mut();
        self.header.msg_iovlen = 0;
    }

    /// Appends bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let iov_base = bytes.as_ptr().cast_mut().cast();
        self.iovecs.push(libc::iovec { iov_base, iov_len: bytes.len() });
    }

    /// The header of what is still to be sent. Points into this value, which must stay where it is.
    pub(super) fn header(&mut self) -> *const libc::msghdr {
        let end = self.iovecs.len().min(self.sent + IOVECS_MAX);
        let rest = &mut self.iovecs[self.sent..end];
        self.header.msg_iov = rest.as_mut_ptr();
        self.header.msg_iovlen = rest.len();
        &raw const self.header
    }

    /// Notes that the next `sent` bytes have left. Returns whether all have.
    pub(super) fn advance(&mut self, mut sent: usize) -> bool {
        while let Some(part) = self.iovecs.get_mut(self.sent) {
            if sent < part.iov_len {
                part.iov_base = part.iov_base.wrapping_byte_add(sent);
                part.iov_len -= sent;
                return false;
            }
            sent -= part.iov_len;
            self.sent += 1;
        }
        true
    }

    /// Vectors that the next send has.
    #[cfg(test)]
    pub(super) fn vectors(&mut self) -> usize {
        self.header();
        self.header.msg_iovlen
    }

    /// The bytes that the kernel would send now.
    #[cfg(test)]
    pub(super) fn gather(&self) -> Vec<u8> {
        let rest = &self.iovecs[self.sent..];
        // SAFETY: the caller that filled it in keeps the bytes in place.
        rest.iter()
            .flat_map(|p| unsafe { std::slice::from_raw_parts(p.iov_base.cast(), p.iov_len) })
            .copied()
            .collect()
    }
}

/// One message, being filled or being sent.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Headers and other small bytes, appended by the protocol.
    head: Vec<u8>,
    parts: Vec<Part>,
    /// Where in `head` the next head part starts.
    head_taken: usize,
    payload_bytes: usize,
    /// Bytes of memory for payloads that become free when this is sent.
    held_bytes: usize,
    /// The pointers of a sealed message.
    pointers: MessageHeader,
}

#[derive(Debug)]
enum Part {
    Head { start: usize, end: usize },
    Payload(BufMut),
}

impl Outgoing {
    pub(super) fn new() -> Outgoing {
        Outgoing {
            head: Vec::new(),
            parts: Vec::new(),
            head_taken: 0,
            payload_bytes: 0,
            held_bytes: 0,
            pointers: MessageHeader::new(),
        }
    }

    /// Where headers are appended.
    pub(super) fn head(&mut self) -> &mut Vec<u8> {
        &mut self.head
    }

    /// Bytes of headers.
    pub(super) fn head_bytes(&self) -> usize {
        self.head.len()
    }

    /// Appends a payload behind everything in `head` so far.
    pub(super) fn push_payload(&mut self, payload: BufMut) {
        self.close_head();
        self.payload_bytes += payload.len();
        self.held_bytes += payload.len();
        self.parts.push(Part::Payload(payload));
    }

    /// Counts memory that is held and not sent: its payloads are parts of a larger buffer.
    pub(super) fn hold(&mut self, bytes: usize) {
        self.held_bytes += bytes;
    }

    /// Bytes of headers and payloads.
    pub(super) fn bytes(&self) -> usize {
        self.head.len() + self.payload_bytes
    }

    /// Bytes of memory for payloads that become free when this is sent.
    pub(super) fn held_bytes(&self) -> usize {
        self.held_bytes
    }

    /// Whether there is nothing to send.
    pub(super) fn is_empty(&self) -> bool {
        self.head.is_empty() && self.parts.is_empty()
    }

    /// Whether one more reply may be appended after those of `expected` requests. Replies in several parts
    /// may go beyond; they cost a second send.
    pub(super) fn has_room_for(&self, expected: usize) -> bool {
        // A reply adds a head part and a payload; sealing may add one more part.
        self.parts.len() + 2 * (expected + 1) < IOVECS_MAX
    }

    /// Makes the message ready to be sent. `head` is not touched from here on.
    pub(super) fn seal(&mut self) {
        self.close_head();
        self.pointers.clear();
        for part in &mut self.parts {
            match part {
                Part::Head { start, end } => self.pointers.push(&self.head[*start..*end]),
                Part::Payload(buf) => self.pointers.push(buf),
            }
        }
    }

    /// The message header of what is still to be sent. Points into this message, which must stay where it is.
    pub(super) fn header(&mut self) -> *const libc::msghdr {
        self.pointers.header()
    }

    /// Notes that the next `sent` bytes have left. Returns whether all have.
    pub(super) fn advance(&mut self, sent: usize) -> bool {
        self.pointers.advance(sent)
    }

    /// Empties the message, keeping its memory for the next one.
    pub(super) fn recycle(&mut self) {
        self.head.clear();
        self.parts.clear();
        self.head_taken = 0;
        self.payload_bytes = 0;
        self.held_bytes = 0;
        self.pointers.clear();
    }

    fn close_head(&mut self) {
        if self.head.len() > self.head_taken {
            self.parts.push(Part::Head { start: self.head_taken, end: self.head.len() });
            self.head_taken = self.head.len();
        }
    }
}

/// How often polling is tried again where this host lacks memory for it: longer than a momentary lack lasts,
/// and shorter than clients would notice.
const POLL_TRIES: u32 = 50;

/// Pause between two tries.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// Events of poll on a socket: `libc::POLLHUP` and its like.
pub(super) type PollBits = libc::c_short;

/// Events on a socket that mean that nobody waits for replies any more.
pub(super) const fn hangup_bits(tcp: bool) -> PollBits {
    let always = libc::POLLHUP | libc::POLLERR | libc::POLLNVAL;
    if tcp { always | libc::POLLRDHUP } else { always }
}

/// The hang-up events of sockets, in their order: POLLHUP, POLLERR, POLLRDHUP. Does not wait. None where this
/// host lacks memory for the answer. Calls libc because `nix` has no POLLRDHUP.
pub(super) fn hang_ups(sockets: &[BorrowedFd<'_>]) -> Option<Vec<PollBits>> {
    poll_now(sockets, libc::POLLRDHUP)
}

/// Lets a TCP socket's receive buffer grow to `bytes` at once, within the system's limit: setting SO_RCVLOWAT
/// grows it for good. SO_RCVBUF would end automatic growth, and has a smaller limit.
pub(super) fn grow_receive_buffer(socket: &OwnedFd, bytes: libc::c_int) {
    for least in [bytes, 1] {
        let len = size_of_val(&least) as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `least`.
        let _ = unsafe {
            let least = (&raw const least).cast();
            libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, least, len)
        };
    }
}

fn poll_now(sockets: &[BorrowedFd<'_>], events: PollBits) -> Option<Vec<PollBits>> {
    let entry = |socket: &BorrowedFd<'_>| libc::pollfd { fd: socket.as_raw_fd(), events, revents: 0 };
    let mut entries: Vec<libc::pollfd> = sockets.iter().map(entry).collect();
    for _ in 0..POLL_TRIES {
        // SAFETY: the pointer and the number describe `entries`, which outlives the call.
        let result = unsafe { libc::poll(entries.as_mut_ptr(), entries.len() as libc::nfds_t, 0) };
        if result >= 0 {
            return Some(entries.iter().map(|entry| entry.revents).collect());
        }
        if Errno::last() != Errno::EINTR {
            polling::tell_short(Errno::last_raw(), "the reactor");
            std::thread::sleep(POLL_PAUSE);
        }
    }
    None
}

/// Whether each of these sockets, in their order, has something to receive, the end of the stream included.
/// Does not wait.
pub(super) fn has_input(sockets: &[BorrowedFd<'_>]) -> Vec<bool> {
    let seen = poll_now(sockets, libc::POLLIN);
    seen.map_or_else(|| vec![false; sockets.len()], |seen| seen.into_iter().map(|seen| seen != 0).collect())
}

impl Sockets {
    /// A table whose ring entries carry `tag` in the upper 32 bits of their `user_data`.
    pub(super) fn new(ring: Ring, tag: u32) -> Sockets {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Sockets {
            ring,
            tag: u64::from(tag) << 32,
            flights: Slab::new(),
            has_workers: cores >= COPYING_CORES_MIN,
            may_offload: cores >= COPYING_CORES_MIN,
        }
    }

    /// Has the kernel's workers copy large payloads from now on, or does not.
    pub(super) fn copy_elsewhere(&mut self, is_room: bool) {
        self.may_offload = self.has_workers && is_room;
    }

    /// The ring, for operations that are not of sockets.
    pub(super) fn ring(&mut self) -> &mut Ring {
        &mut self.ring
    }

    /// Receives into `buf` from `filled` on: what is there, or, if `whole`, until it is full.
    pub(super) fn receive(
        &mut self,
        owner: usize,
        socket: &Arc<OwnedFd>,
        buf: BufMut,
        filled: usize,
        whole: bool,
    ) {
        assert!(filled < buf.len(), "a receive of nothing would look like the end of the stream");
        self.start(owner, socket, Work::Receive { buf, filled, whole });
    }

    /// Sends the whole of a sealed message.
    pub(super) fn send(&mut self, owner: usize, socket: &Arc<OwnedFd>, message: Box<Outgoing>) {
        self.start(owner, socket, Work::Send { message });
    }

    /// Waits for a connection.
    pub(super) fn accept(&mut self, owner: usize, listener: &Arc<OwnedFd>) {
        self.start(owner, listener, Work::Accept { cancelled: false });
    }

    /// Ends an owner's waits for connections: each completes, with a connection that came just now or an
    /// error.
    pub(super) fn cancel_accepts(&mut self, owner: usize) {
        let mut targets = Vec::new();
        for (key, flight) in &mut self.flights {
            if let Work::Accept { cancelled } = &mut flight.work
                && flight.owner == owner
            {
                *cancelled = true;
                targets.push((self.tag | key as u64, Arc::clone(&flight.socket)));
            }
        }
        for (target, socket) in targets {
            self.start(owner, &socket, Work::Cancel(target));
        }
    }

    /// Waits until a descriptor is readable.
    pub(super) fn poll(&mut self, descriptor: &Arc<OwnedFd>) {
        self.start(0, descriptor, Work::Poll);
    }

    /// Takes a completion of the ring whose `user_data` carries this table's tag. None when the operation
    /// goes on.
    pub(super) fn complete(&mut self, user_data: u64, result: i32) -> Option<SocketEvent> {
        let key = (user_data & u64::from(u32::MAX)) as usize;
        let cancelled = matches!(self.flights[key].work, Work::Accept { cancelled: true } | Work::Cancel(_));
        if (result == -libc::EINTR || result == -libc::EAGAIN) && !cancelled {
            self.push(key);
            return None;
        }
        if let Work::Send { message } = &mut self.flights[key].work
            && result > 0
            && !message.advance(result as usize)
        {
            self.push(key);
            return None;
        }
        let result =
            if result < 0 { Err(io::Error::from_raw_os_error(-result)) } else { Ok(result as usize) };
        let Flight { owner, work, .. } = self.flights.remove(key);
        Some(match work {
            Work::Cancel(_) => return None,
            Work::Receive { buf, .. } => SocketEvent::Received { owner, buf, result },
            Work::Send { message } => {
                let result = match result {
                    // A stream socket does not do this with a message that is not empty; a retry could loop
                    // for ever.
                    Ok(0) => Err(io::ErrorKind::WriteZero.into()),
                    other => other.map(|_| ()),
                };
                SocketEvent::Sent { owner, message, result }
            }
            Work::Accept { .. } => SocketEvent::Accepted {
                owner,
                result: result.map(|fd| {
                    // SAFETY: a fresh descriptor that the kernel just gave to this process alone.
                    unsafe { OwnedFd::from_raw_fd(fd as i32) }
                }),
            },
            Work::Poll => SocketEvent::Readable,
        })
    }

    fn start(&mut self, owner: usize, socket: &Arc<OwnedFd>, work: Work) {
        let key = self.flights.insert(Flight { owner, socket: Arc::clone(socket), work });
        self.push(key);
    }

    fn push(&mut self, key: usize) {
        let flight = &mut self.flights[key];
        let offload = self.may_offload && flight.bytes() >= COPIED_ELSEWHERE_BYTES_MIN;
        let flags = if offload { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        let entry = flight.entry().flags(flags).user_data(self.tag | key as u64);
        // SAFETY: all that the entry points to belongs to the flight (a page of the pool, or the boxed
        // message), which stays in `flights` until the completion was taken and is leaked by `drop`
        // otherwise; the flight also keeps the descriptor open.
        unsafe { self.ring.push(entry) }
    }
}

impl Flight {
    /// Bytes that will certainly be copied.
    fn bytes(&self) -> usize {
        match &self.work {
            Work::Receive { buf, filled, whole: true } => buf.len() - filled,
            Work::Send { message } => message.bytes(),
            Work::Receive { .. } | Work::Accept { .. } | Work::Cancel(_) | Work::Poll => 0,
        }
    }

    fn entry(&mut self) -> squeue::Entry {
        let fd = types::Fd(self.socket.as_raw_fd());
        match &mut self.work {
            Work::Receive { buf, filled, whole } => {
                let target = &mut buf[*filled..];
                let flags = if *whole { libc::MSG_WAITALL } else { 0 };
                let len = u32::try_from(target.len()).unwrap_or(u32::MAX);
                opcode::Recv::new(fd, target.as_mut_ptr(), len).flags(flags).build()
            }
            Work::Send { message } => {
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                opcode::SendMsg::new(fd, message.header()).flags(flags).build()
            }
            Work::Cancel(target) => opcode::AsyncCancel::new(*target).build(),
            Work::Accept { .. } => opcode::Accept::new(fd, std::ptr::null_mut(), std::ptr::null_mut())
                .flags(libc::SOCK_CLOEXEC)
                .build(),
            Work::Poll => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
        }
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        for flight in self.flights.drain() {
            // The kernel may still use these buffers: losing the memory is the lesser evil.
            if matches!(flight.work, Work::Receive { .. } | Work::Send { .. }) {
                std::mem::forget(flight);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::block_io::Pool;

    #[test]
    fn more_parts_than_one_system_call_takes_leave_in_several() {
        let pool = Pool::new(1 << 16).unwrap();
        let mut message = Outgoing::new();
        let parts = 3 * IOVECS_MAX / 2;
        for part in 0..parts {
            message.head.push(part as u8);
            let mut payload = pool.alloc(1);
            payload[0] = !part as u8;
            message.push_payload(payload);
        }
        message.seal();
        let (mut sent, mut calls) = (0, 0);
        loop {
            let count = message.pointers.vectors();
            assert!(count <= IOVECS_MAX);
            (sent, calls) = (sent + count, calls + 1);
            if message.advance(count) {
                break;
            }
        }
        assert_eq!((sent, calls), (2 * parts, 3));
    }

    #[test]
    fn headers_and_payloads_keep_their_order_across_short_sends() {
        let pool = Pool::new(1 << 16).unwrap();
        let mut message = Outgoing::new();
        for round in 0..2 {
            let mut expected = Vec::new();
            for reply in 0..5u8 {
                message.head.extend_from_slice(&[reply; 3]);
                expected.extend_from_slice(&[reply; 3]);
                let mut payload = pool.alloc(100);
                payload.fill(0x80 | reply);
                expected.extend_from_slice(&payload);
                message.push_payload(payload);
            }
            message.head.push(round);
            expected.push(round);
            assert_eq!((message.bytes(), message.held_bytes()), (expected.len(), 500));
            message.seal();
            let mut seen = Vec::new();
            loop {
                let step = 37.min(expected.len() - seen.len());
                seen.extend_from_slice(&message.pointers.gather()[..step]);
                if message.advance(step) {
                    break;
                }
            }
            assert_eq!(seen, expected);
            message.recycle();
            assert!(message.is_empty());
        }
    }
}
