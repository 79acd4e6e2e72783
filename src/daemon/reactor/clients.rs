//! The reactor's clients: accepting them, taking their requests, sending their replies.
//!
//! Invariants: a connection parses only while it may start requests; bytes of payloads are counted from their
//! request until their reply has left; whatever a client does costs nothing but its connection. Must not know
//! what volumes do.

use super::arrays::ExportView;
use super::connection::{Connection, Next, Receiving};
use super::fence::hangup_bits;
use super::listener::Listener;
use super::outgoing::Outgoing;
use super::{ArrayId, FAREWELL_NANOS, Pending, Reactor};
use crate::block_io::BufMut;
use crate::nbd::{
    Command, Errno, Extents, HEALTH_DEGRADED, HEALTH_LOST, ReadPart, Request, STATE_HOLE, STATE_ZERO,
    ServerConnection,
};
use crate::units::VolumeOffset;
use crate::volume::{
    ClientError, ClientReply, ClientRequest, Health, ReadRun, RequestId, VolumeEvent, VolumeExtent,
};
use nix::sys::socket::{Shutdown, setsockopt, shutdown, sockopt};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

/// Send buffer asked of the kernel for each client, in bytes: a few large replies, so that the client has
/// something to read while the next are gathered.
const SEND_BUFFER_BYTES: usize = 2 << 20;

/// Replies gathered beyond this many bytes are sent before the next request is looked at, so that a client can
/// read them meanwhile.
const EARLY_SEND_BYTES: usize = 256 << 10;

/// Payload memory, in multiples of what is configured for it, that the connections together may take by having one
/// request each beyond it: the whole memory of the daemon by default. Beyond that, large requests wait.
const PAYLOAD_OVERSHOOT: usize = 2;

/// How long a client may keep payload memory that large requests of others wait for, by not sending the rest of a
/// payload or not taking its replies, in nanoseconds. The largest message needs 3 MB/s to be in time; while nobody
/// waits, nobody is hurried.
const HOARD_NANOS_MAX: u64 = 10_000_000_000;

/// A listening socket of the reactor.
#[derive(Debug)]
pub(super) struct ListenerState {
    /// Removes the socket file when dropped.
    listener: Listener,
    socket: Rc<OwnedFd>,
    /// An accept is in the kernel.
    armed: bool,
    closing: bool,
}

/// Payload bytes that a request keeps in memory.
pub(super) fn payload_len(request: &Request) -> usize {
    match request.command {
        Command::Read | Command::Write => request.length as usize,
        _ => 0,
    }
}

impl Reactor {
    pub(super) fn add_listener(&mut self, listener: Listener) {
        match listener.descriptor() {
            Ok(socket) => {
                let socket = Rc::new(socket);
                self.listeners.insert(ListenerState { listener, socket, armed: false, closing: false });
                self.resume_listeners();
            }
            Err(error) => tracing::error!(address = %listener.address(), %error, "cannot listen"),
        }
    }

    /// Waits for clients again where it was given up, unless there are too many. Beyond the limit they wait in
    /// the socket's backlog.
    pub(super) fn resume_listeners(&mut self) {
        for (key, listener) in &mut self.listeners {
            if !listener.armed && !listener.closing && self.connections.len() < self.config.connections_max {
                listener.armed = true;
                self.sockets.accept(&mut self.ring, key, &listener.socket);
            }
        }
    }

    pub(super) fn close_listeners(&mut self) {
        self.listeners.retain(|_, listener| {
            listener.closing = true;
            // Wakes the accept that is in the kernel; an error means that there is none to wake.
            let _ = shutdown(listener.socket.as_raw_fd(), Shutdown::Both);
            listener.armed
        });
    }

    pub(super) fn on_accepted(&mut self, key: usize, result: io::Result<OwnedFd>) {
        self.listeners[key].armed = false;
        if self.listeners[key].closing {
            self.listeners.remove(key);
            return;
        }
        match result {
            Ok(socket) => {
                let now = self.now;
                let listener = &self.listeners[key].listener;
                let tcp = matches!(listener.address(), super::ListenAddress::Tcp(_));
                tune(&socket, tcp);
                let connection = Connection::new(socket, hangup_bits(tcp), now, listener.tls());
                let connection = self.connections.insert(connection);
                tracing::debug!(connection, address = %self.listeners[key].listener.address(), "client connected");
                self.mark(connection);
                self.resume_listeners();
            }
            // Out of descriptors, or the client is gone already: the next tick tries again.
            Err(error) => tracing::warn!(%error, "cannot accept a client"),
        }
    }

    /// Has a connection parsed and settled in this turn.
    pub(super) fn mark(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.dirty {
            connection.dirty = true;
            self.dirty.push_back(key);
        }
        self.touch(key);
    }

    /// Has a connection settled at the end of this turn.
    fn touch(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.touched {
            connection.touched = true;
            self.touched.push(key);
        }
    }

    pub(super) fn on_received(&mut self, key: usize, buf: BufMut, result: io::Result<usize>) {
        self.mark(key);
        let connection = &mut self.connections[key];
        let receiving = std::mem::replace(&mut connection.receiving, Receiving::Nothing);
        let len = match result {
            Ok(len) => len,
            Err(error) => {
                tracing::debug!(connection = key, %error, "client lost");
                connection.broken = true;
                0
            }
        };
        match receiving {
            Receiving::Payload { request, have } => {
                let have = have + len;
                if len == 0 || connection.broken {
                    // The stream ended inside a payload: there is nobody to tell.
                    connection.broken = true;
                    self.free_payload(payload_len(&request));
                } else if have < buf.len() {
                    self.receive_payload(key, request, buf, have);
                } else {
                    connection.nbd.payload_taken();
                    self.begin(key, request, Some(buf), &mut false);
                }
            }
            Receiving::Inbox | Receiving::Nothing => {
                if len == 0 {
                    connection.read_closed = true;
                } else {
                    connection.received(buf, len);
                }
            }
        }
    }

    pub(super) fn on_sent(&mut self, key: usize, mut message: Box<Outgoing>, result: io::Result<()>) {
        self.free_payload(message.held_bytes());
        message.recycle();
        self.mark(key);
        let connection = &mut self.connections[key];
        connection.sending = None;
        connection.spare = Some(message);
        if let Err(error) = result {
            tracing::debug!(connection = key, %error, "client lost");
            connection.broken = true;
        }
    }

    /// Hands a connection's socket to TLS, and goes on with the plain end of it.
    fn start_tls(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        let tls = connection.tls.as_ref().expect("TLS is granted only where there is a certificate");
        // The pump gets a descriptor of its own: entries of this turn may still name the other one.
        let tunnel = connection.socket.try_clone().and_then(|socket| self.pumps.serve(socket, tls));
        match tunnel {
            Ok(tunnel) => {
                set_send_buffer(&tunnel.socket);
                connection.swap_socket(tunnel);
            }
            Err(error) => {
                tracing::warn!(connection = key, %error, "cannot start TLS");
                connection.broken = true;
            }
        }
    }

    /// Sends what there is for a connection, receives more, and sees whether it is over.
    pub(super) fn settle(&mut self, key: usize) {
        let now = self.now;
        let connection = &mut self.connections[key];
        connection.touched = false;
        if let Some(message) = connection.message_to_send(now) {
            self.sockets.send(&mut self.ring, key, &connection.socket, message);
        }
        if connection.may_swap_socket() {
            self.start_tls(key);
        }
        let connection = &mut self.connections[key];
        if let Some(buf) = connection.buffer_to_receive(&self.config.pool) {
            connection.receiving = Receiving::Inbox;
            self.sockets.receive(&mut self.ring, key, &connection.socket, buf, 0, false);
        }
        if connection.waits_for_room() && !self.starved.contains(&key) {
            self.mark(key);
        }
        self.close_if_done(key);
    }

    /// Takes the requests that a connection has received, as far as it may start them.
    pub(super) fn parse(&mut self, key: usize) {
        self.connections[key].dirty = false;
        let mut looked = false;
        loop {
            let connection = &mut self.connections[key];
            if connection.broken || connection.read_closed || connection.receiving != Receiving::Nothing {
                return;
            }
            if self.payload_bytes > self.config.payload_bytes && connection.in_flight > 0 {
                if !self.starved.contains(&key) {
                    self.starved.push_back(key);
                }
                return;
            }
            let room = self.payload_bytes <= PAYLOAD_OVERSHOOT * self.config.payload_bytes;
            match connection.next(&ExportView(&self.arrays), &self.config.pool, room) {
                Next::Receive | Next::Full => return,
                Next::Starved => {
                    if !self.starved.contains(&key) {
                        self.starved.push_back(key);
                    }
                    return;
                }
                Next::Selected => self.selected(key),
                Next::Request(request) => {
                    self.payload_bytes += payload_len(&request);
                    self.begin(key, request, None, &mut looked);
                }
                Next::Write(request, buf) => {
                    self.payload_bytes += payload_len(&request);
                    self.begin(key, request, Some(buf), &mut looked);
                }
                Next::Payload { request, buf, have } => {
                    self.payload_bytes += payload_len(&request);
                    connection.payload_since = self.now;
                    self.receive_payload(key, request, buf, have);
                }
                Next::StartTls => connection.starting_tls = true,
                Next::Leave => {
                    connection.read_closed = true;
                    connection.discard_input();
                }
                Next::Fatal(fault) => {
                    tracing::debug!(connection = key, %fault, "client broke the protocol");
                    connection.read_closed = true;
                    connection.discard_input();
                }
            }
        }
    }

    fn receive_payload(&mut self, key: usize, request: Request, buf: BufMut, have: usize) {
        let connection = &mut self.connections[key];
        connection.receiving = Receiving::Payload { request, have };
        self.sockets.receive(&mut self.ring, key, &connection.socket, buf, have, true);
    }

    fn selected(&mut self, key: usize) {
        let name = self.connections[key].nbd.export().map(|export| export.name.clone()).unwrap_or_default();
        let array = self.array_of_export(&name);
        self.connections[key].array = array;
        if array.is_none() {
            // It was stopped since the client asked for it.
            self.dismiss(key);
        }
        tracing::debug!(connection = key, export = %name, "client attached");
    }

    /// Hands a request to its volume.
    pub(super) fn start(&mut self, key: usize, request: Request, payload: Option<BufMut>) {
        let connection = &mut self.connections[key];
        let offset = VolumeOffset(request.offset);
        let len = request.length;
        let client_request = match (request.command, payload) {
            (Command::Read, _) => {
                let buf = self.config.pool.alloc(request.length as usize);
                if connection.nbd.takes_parts(&request) {
                    ClientRequest::ReadSparse { offset, buf }
                } else {
                    ClientRequest::Read { offset, buf }
                }
            }
            (Command::Write, Some(buf)) => {
                ClientRequest::Write { offset, data: buf.freeze(), fua: request.fua }
            }
            (Command::Write, None) => unreachable!("a write starts with its payload"),
            (Command::Flush, _) => ClientRequest::Flush,
            (Command::Trim, _) => ClientRequest::Trim { offset, len, fua: request.fua },
            (Command::WriteZeroes, _) => ClientRequest::WriteZeroes {
                offset,
                len,
                may_unmap: !request.no_hole,
                fast_only: request.fast_zero,
                fua: request.fua,
            },
            (Command::BlockStatus, _) if request.contexts.allocation => {
                ClientRequest::BlockStatus { offset, len }
            }
            (Command::BlockStatus, _) => ClientRequest::Health { offset, len },
            (Command::Cache, _) => {
                // Advisory, and there is no cache to fill.
                connection.nbd.reply_done(&request, &mut connection.filling.head);
                return;
            }
        };
        let array = connection.array.filter(|id| self.arrays[id.0 as usize].is_some());
        let Some(array) = array else {
            self.payload_bytes -= payload_len(&request);
            self.dismiss(key);
            return;
        };
        connection.in_flight += 1;
        if let Some(hosted) = self.hosted(array) {
            hosted.in_flight += 1;
        }
        if request.command.modifies() {
            self.modifies_more(key, array);
        }
        let id = self.requests.insert(Pending { connection: key, array, request, allocation: Vec::new() });
        self.step(array, VolumeEvent::Client(RequestId(id as u64), client_request));
    }

    /// Takes a volume's answer.
    pub(super) fn client_done(&mut self, id: RequestId, result: Result<ClientReply, ClientError>) {
        let Pending { connection: key, array, request, allocation } = self.requests.remove(id.0 as usize);
        let result = match result {
            // Asked about both contexts: the other is another question, to the same volume.
            Ok(ClientReply::Extents(extents)) if request.contexts.health => {
                let allocation = extents.iter().map(|e| (e.len, allocation_flags(e))).collect();
                let id = self.requests.insert(Pending { connection: key, array, request, allocation });
                let question =
                    ClientRequest::Health { offset: VolumeOffset(request.offset), len: request.length };
                self.step(array, VolumeEvent::Client(RequestId(id as u64), question));
                return;
            }
            result => result,
        };
        let succeeded = result.is_ok();
        if let Some(hosted) = self.hosted(array) {
            hosted.in_flight -= 1;
            match request.command {
                Command::Read if succeeded => {
                    hosted.traffic.reads += 1;
                    hosted.traffic.read_bytes += request.length;
                }
                Command::Write if succeeded => {
                    hosted.traffic.writes += 1;
                    hosted.traffic.written_bytes += request.length;
                }
                _ => {}
            }
        }
        if request.command.modifies() {
            self.modifies_less(key, array);
        }
        if matches!(result, Err(ClientError::Stopping)) {
            self.dismiss(key);
        }
        let now = self.now;
        let connection = &mut self.connections[key];
        connection.in_flight -= 1;
        // The time to take the last replies begins with the last reply.
        connection.dismissed = connection.dismissed.map(|_| now);
        if connection.waits_for_room() {
            self.mark(key)
        } else {
            self.touch(key)
        }
        let connection = &mut self.connections[key];
        if connection.broken {
            self.free_payload(payload_len(&request));
            return;
        }
        let nbd = &connection.nbd;
        let head = &mut connection.filling.head;
        match result {
            Ok(ClientReply::Data(buf)) => {
                assert_eq!(buf.len() as u64, request.length, "a volume answered with another length");
                nbd.reply_read_header(&request, head);
                // Counted until it is sent.
                connection.filling.push_payload(buf);
                if connection.sending.is_none() && connection.filling.bytes() >= EARLY_SEND_BYTES {
                    self.urgent = true;
                }
                return;
            }
            Ok(ClientReply::Sparse(runs)) => {
                let sent = append_runs(nbd, &request, runs, &mut connection.filling);
                let held = if sent > 0 { payload_len(&request) } else { 0 };
                connection.filling.hold(held - sent);
                if connection.sending.is_none() && connection.filling.bytes() >= EARLY_SEND_BYTES {
                    self.urgent = true;
                }
                self.free_payload(payload_len(&request) - held);
                return;
            }
            Ok(ClientReply::Done) => nbd.reply_done(&request, head),
            Ok(ClientReply::Extents(extents)) => {
                let extents: Vec<(u64, u32)> = extents.iter().map(|e| (e.len, allocation_flags(e))).collect();
                nbd.reply_block_status(&request, Extents { allocation: &extents, health: &[] }, head);
            }
            Ok(ClientReply::Health(runs)) => {
                let health: Vec<(u64, u32)> =
                    runs.iter().map(|&(len, health)| (len, health_flags(health))).collect();
                nbd.reply_block_status(&request, Extents { allocation: &allocation, health: &health }, head);
            }
            // Dismissed: it learns by the end of the connection that its request was not served.
            Err(ClientError::Stopping) => {}
            Err(error) => {
                let errno = match error {
                    ClientError::Io | ClientError::Stopping => Errno::Io,
                    ClientError::NoSpace => Errno::NoSpc,
                    ClientError::NotSupported => Errno::NotSup,
                };
                nbd.reply_error(&request, errno, &error.to_string(), head);
            }
        }
        self.free_payload(payload_len(&request));
    }

    /// Payload memory is free again: lets those go on who waited for it.
    pub(super) fn free_payload(&mut self, bytes: usize) {
        self.payload_bytes -= bytes;
        if self.payload_bytes <= self.config.payload_bytes {
            while let Some(key) = self.starved.pop_front() {
                if self.connections.contains(key) {
                    self.mark(key);
                }
            }
        }
    }

    fn close_if_done(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        if !connection.is_done() && !connection.broken {
            return;
        }
        if connection.broken && !connection.filling.is_empty() {
            let bytes = connection.filling.held_bytes();
            connection.filling.recycle();
            self.free_payload(bytes);
        }
        let connection = &mut self.connections[key];
        if !connection.is_idle_in_kernel() {
            // Ends what the kernel has of it; an error means that the socket is dead already.
            let _ = shutdown(connection.socket.as_raw_fd(), Shutdown::Both);
        } else if connection.is_done() {
            tracing::debug!(connection = key, "client gone");
            self.connections.remove(key);
            // Its number may be used again: forget all that names it.
            self.dirty.retain(|&dirty| dirty != key);
            self.touched.retain(|&touched| touched != key);
            self.starved.retain(|&starved| starved != key);
            self.resume_listeners();
        }
    }

    /// Closes connections that never came to the point, or do not take their last replies, or keep memory that others
    /// wait for.
    pub(super) fn close_overdue(&mut self) {
        let now = self.now;
        let scarce = self.connections.iter().any(|(_, c)| c.is_parked());
        let is_overdue = |connection: &Connection| {
            let dismissed = connection.in_flight == 0
                && connection.dismissed.is_some_and(|since| now.nanos_since(since) > FAREWELL_NANOS);
            let hoards =
                || connection.keeps_memory_since().is_some_and(|at| now.nanos_since(at) > HOARD_NANOS_MAX);
            !connection.broken && (dismissed || connection.nbd.handshake_overdue(now) || scarce && hoards())
        };
        let overdue: Vec<usize> =
            self.connections.iter().filter(|(_, c)| is_overdue(c)).map(|(key, _)| key).collect();
        for key in overdue {
            tracing::debug!(connection = key, "client took too long");
            self.connections[key].broken = true;
            self.mark(key);
        }
    }

    /// Says goodbye to the clients of an array that is gone.
    pub(super) fn close_clients_of(&mut self, array: ArrayId) {
        self.close_where(|connection| connection.array == Some(array));
    }

    /// Says goodbye to the clients that chose no array.
    pub(super) fn close_unattached(&mut self) {
        self.close_where(|connection| connection.array.is_none());
    }

    fn close_where(&mut self, which: impl Fn(&Connection) -> bool) {
        let keys: Vec<usize> =
            self.connections.iter().filter(|(_, c)| which(c)).map(|(key, _)| key).collect();
        keys.into_iter().for_each(|key| self.dismiss(key));
    }

    /// Takes no more requests of a client, and closes its connection once it has its replies. What it asked for and does
    /// not get is not answered with an error: a filesystem would take that for a broken disk, where the end of the
    /// connection makes its driver wait for the next daemon, and ask again.
    fn dismiss(&mut self, key: usize) {
        let connection = &mut self.connections[key];
        connection.read_closed = true;
        connection.discard_input();
        connection.dismissed.get_or_insert(self.now);
        self.mark(key);
    }
}

/// Appends what a read found, in parts; says how many bytes of payload are sent.
fn append_runs(
    nbd: &ServerConnection,
    request: &Request,
    runs: Vec<ReadRun>,
    filling: &mut Outgoing,
) -> usize {
    let end = request.offset + request.length;
    let (mut offset, mut sent) = (request.offset, 0);
    for run in runs {
        let length = match &run {
            ReadRun::Zeroes(length) => *length,
            ReadRun::Data(buf) => buf.len() as u64,
        };
        let part = ReadPart { offset, length, last: offset + length == end };
        offset += length;
        match run {
            ReadRun::Zeroes(_) => nbd.reply_read_hole(request, part, &mut filling.head),
            ReadRun::Data(buf) => {
                nbd.reply_read_data(request, part, &mut filling.head);
                sent += buf.len();
                filling.push_payload(buf);
            }
        }
    }
    assert_eq!(offset, end, "a volume answered with another length");
    sent
}

fn allocation_flags(extent: &VolumeExtent) -> u32 {
    if extent.hole { STATE_HOLE | STATE_ZERO } else { 0 }
}

fn health_flags(health: Health) -> u32 {
    match health {
        Health::Clean => 0,
        Health::Degraded => HEALTH_DEGRADED,
        Health::Lost => HEALTH_LOST,
    }
}

/// Socket options of a client; none of them is vital.
fn tune(socket: &OwnedFd, tcp: bool) {
    if tcp {
        let _ = setsockopt(socket, sockopt::TcpNoDelay, &true);
        let _ = setsockopt(socket, sockopt::KeepAlive, &true);
    }
    set_send_buffer(socket);
}

fn set_send_buffer(socket: &OwnedFd) {
    // The privileged form is not bound by the system's default maximum.
    if setsockopt(socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        let _ = setsockopt(socket, sockopt::SndBuf, &SEND_BUFFER_BYTES);
    }
}
