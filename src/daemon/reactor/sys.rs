//! Socket operations through io_uring: the one place where the reactor hands memory to the kernel.
//!
//! Invariants: buffers, message headers and the descriptor of an operation are owned by its entry in `flights`
//! from submission to completion, whatever becomes of the connection, and are leaked if this table is dropped
//! under them. Every operation completes exactly once. Must not know NBD.
#![allow(unsafe_code)] // raw io_uring entries; each block argues for itself

use super::outgoing::Outgoing;
use crate::member::Ring;
use calpe_core::block_io::BufMut;
use calpe_host::polling;
use io_uring::{opcode, squeue, types};
use nix::errno::Errno;
use slab::Slab;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

/// Payloads of at least this many bytes are copied to and from sockets by a worker of the kernel's, where there is another
/// core for it: the copying takes the time of a hundred small requests.
const COPIED_ELSEWHERE_BYTES_MIN: usize = 256 << 10;

/// Cores from which on there is one for that. With two, clients have the other: 1 MiB reads lost a sixth of their rate there,
/// and gained half with sixteen.
const COPYING_CORES_MIN: usize = 3;

/// How much sooner than its clients the reactor gets a core, where the system allows it: as a nice value. All of them wait
/// for this one thread, and where cores are few, a fair share would be one client's.
const NICE: i32 = -10;

/// Ends the process without a word to its other threads: none of them is waited for, and nothing is cleaned up.
pub fn exit_at_once(status: i32) -> ! {
    // SAFETY: no memory involved; nothing of this process runs afterwards.
    unsafe { libc::_exit(status) }
}

/// Asks the system to run this thread before others. A refusal changes nothing but speed.
pub(super) fn go_first() {
    set_nice(NICE);
}

/// Has this thread run like any other, although the one that started it goes first.
pub(super) fn go_like_others() {
    set_nice(0);
}

fn set_nice(nice: i32) {
    // SAFETY: no memory involved; 0 names the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
}

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

/// A descriptor that this process was started with, to own from now on; none when it is not open.
pub(super) fn inherited(descriptor: RawFd) -> Option<OwnedFd> {
    // SAFETY: the call only asks for the flags of a number, valid or not.
    let open = unsafe { libc::fcntl(descriptor, libc::F_GETFD) } >= 0;
    // SAFETY: it is open, and the caller says that the supervisor passed it for this process to own.
    open.then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Socket operations in the kernel.
#[derive(Debug)]
pub(super) struct Sockets {
    tag: u64,
    flights: Slab<Flight>,
    /// There is a core for the kernel's workers.
    may_offload: bool,
}

#[derive(Debug)]
struct Flight {
    owner: usize,
    socket: Rc<OwnedFd>,
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
    /// Of the operation with this `user_data`.
    Cancel(u64),
    Poll,
}

/// The scattered bytes of a message, as the kernel wants them named. Only pointers: whoever fills it in keeps the
/// bytes where they are until they are sent.
#[derive(Debug)]
pub(super) struct MessageHeader {
    iovecs: Vec<libc::iovec>,
    /// Vectors sent completely.
    sent: usize,
    header: libc::msghdr,
}

/// Most vectors that one send may have: IOV_MAX of Linux.
pub(super) const IOVECS_MAX: usize = 1024;

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
        // SAFETY: whoever filled it in keeps the bytes where they are.
        rest.iter()
            .flat_map(|p| unsafe { std::slice::from_raw_parts(p.iov_base.cast(), p.iov_len) })
            .copied()
            .collect()
    }
}

/// How often sockets are looked at again where this host lacks memory for that: longer than a
/// moment of it lasts, and shorter than clients would notice.
const POLL_TRIES: u32 = 50;

/// How long after the last time.
const POLL_PAUSE: Duration = Duration::from_millis(1);

/// What poll says of a socket: `libc::POLLHUP` and its like.
pub(super) type PollBits = libc::c_short;

/// What has happened to sockets at their other ends, in their order: POLLHUP, POLLERR, POLLRDHUP. Waits for nothing.
/// None where this host lacks memory for the answer. Not by way of `nix`, which knows no POLLRDHUP.
pub(super) fn hang_ups(sockets: &[BorrowedFd<'_>]) -> Option<Vec<PollBits>> {
    poll_now(sockets, libc::POLLRDHUP)
}

/// Lets a TCP socket's receive buffer grow to so many bytes at once, as far as the system's limit goes: it grows with the least
/// that a receiver waits for, and stays so. SO_RCVBUF would end its growing, and has a smaller limit.
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

/// Whether there is something to receive on sockets, in their order, be it the end. Waits for nothing.
pub(super) fn has_input(sockets: &[BorrowedFd<'_>]) -> Vec<bool> {
    let seen = poll_now(sockets, libc::POLLIN);
    seen.map_or_else(|| vec![false; sockets.len()], |seen| seen.into_iter().map(|seen| seen != 0).collect())
}

impl Sockets {
    /// A table whose ring entries carry `tag` in the upper 32 bits of their `user_data`.
    pub(super) fn new(tag: u32) -> Sockets {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Sockets { tag: u64::from(tag) << 32, flights: Slab::new(), may_offload: cores >= COPYING_CORES_MIN }
    }

    /// Receives into `buf` from `filled` on: what there is, or, if `whole`, until it is full.
    pub(super) fn receive(
        &mut self,
        ring: &mut Ring,
        owner: usize,
        socket: &Rc<OwnedFd>,
        buf: BufMut,
        filled: usize,
        whole: bool,
    ) {
        assert!(filled < buf.len(), "a receive of nothing would look like the end of the stream");
        self.start(ring, owner, socket, Work::Receive { buf, filled, whole });
    }

    /// Sends the whole of a sealed message.
    pub(super) fn send(
        &mut self,
        ring: &mut Ring,
        owner: usize,
        socket: &Rc<OwnedFd>,
        message: Box<Outgoing>,
    ) {
        self.start(ring, owner, socket, Work::Send { message });
    }

    /// Waits for a connection.
    pub(super) fn accept(&mut self, ring: &mut Ring, owner: usize, listener: &Rc<OwnedFd>) {
        self.start(ring, owner, listener, Work::Accept { cancelled: false });
    }

    /// Ends the waits for connections of an owner: each completes, with a connection that came just now or an error.
    pub(super) fn cancel_accepts(&mut self, ring: &mut Ring, owner: usize) {
        let mut targets = Vec::new();
        for (key, flight) in &mut self.flights {
            if let Work::Accept { cancelled } = &mut flight.work
                && flight.owner == owner
            {
                *cancelled = true;
                targets.push((self.tag | key as u64, Rc::clone(&flight.socket)));
            }
        }
        for (target, socket) in targets {
            self.start(ring, owner, &socket, Work::Cancel(target));
        }
    }

    /// Waits until a descriptor is readable.
    pub(super) fn poll(&mut self, ring: &mut Ring, descriptor: &Rc<OwnedFd>) {
        self.start(ring, 0, descriptor, Work::Poll);
    }

    /// Takes a completion of the ring whose `user_data` carries this table's tag. None when the operation goes on.
    pub(super) fn complete(&mut self, ring: &mut Ring, user_data: u64, result: i32) -> Option<SocketEvent> {
        let key = (user_data & u64::from(u32::MAX)) as usize;
        let cancelled = matches!(self.flights[key].work, Work::Accept { cancelled: true } | Work::Cancel(_));
        if (result == -libc::EINTR || result == -libc::EAGAIN) && !cancelled {
            self.push(ring, key);
            return None;
        }
        if let Work::Send { message } = &mut self.flights[key].work
            && result > 0
            && !message.advance(result as usize)
        {
            self.push(ring, key);
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
                    // Not what a stream socket does with a message that is not empty; never spin on it.
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

    fn start(&mut self, ring: &mut Ring, owner: usize, socket: &Rc<OwnedFd>, work: Work) {
        let key = self.flights.insert(Flight { owner, socket: Rc::clone(socket), work });
        self.push(ring, key);
    }

    fn push(&mut self, ring: &mut Ring, key: usize) {
        let flight = &mut self.flights[key];
        let offload = self.may_offload && flight.bytes() >= COPIED_ELSEWHERE_BYTES_MIN;
        let flags = if offload { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        let entry = flight.entry().flags(flags).user_data(self.tag | key as u64);
        // SAFETY: all that the entry points to belongs to the flight (a page of the pool, or the boxed message),
        // which stays in `flights` until the completion was taken and is leaked by `drop` otherwise; the flight
        // also keeps the descriptor open.
        unsafe { ring.push(entry) }
    }
}

impl Flight {
    /// Bytes that are sure to be copied.
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
