//! The NBD protocol, sans-IO: bytes in, events and bytes out.
//!
//! Invariants: nothing a peer sends makes this code panic, allocate without bound or lose step with the
//! stream; payloads of READ and WRITE never pass through it; time enters as an argument. It must not know
//! sockets, rings, buffers, volumes, or how a request is executed.
//!
//! # Driving a server connection
//!
//! ```
//! # use calpe_core::nbd::{ExportInfo, Exports, Fatal, Incoming, ServerConnection};
//! # use calpe_core::units::Timestamp;
//! # fn drive(received: &[u8], exports: &dyn Exports) -> Result<(), Fatal> {
//! let mut out = Vec::new(); // what is to be sent next; one send for all replies of a wake-up
//! let mut connection = ServerConnection::new(Timestamp(0));
//! connection.start(&mut out);
//! // On every receive, with the bytes that came:
//! let mut rest = received;
//! while !rest.is_empty() {
//!     let (consumed, incoming) = connection.receive(rest, exports, &mut out)?;
//!     rest = &rest[consumed..];
//!     match incoming {
//!         None | Some(Incoming::Selected) => {}
//!         Some(Incoming::Request(request)) => {
//!             // Execute it; when done, in any order: reply_done, reply_error, reply_read_header + payload, ...
//!             connection.reply_done(&request, &mut out);
//!         }
//!         Some(Incoming::Write { request }) => {
//!             // The front of `rest` is payload; receive what is missing of it straight into the stripe's buffer.
//!             let here = rest.len().min(request.length as usize);
//!             rest = &rest[here..];
//!             connection.payload_taken(); // when all of it came
//!             connection.reply_done(&request, &mut out); // when it is written
//!         }
//!         // Send `out`, end here, swap the stream, go on with `tls_started` and what comes out of TLS.
//!         Some(Incoming::StartTls) => break,
//!         Some(Incoming::Disconnect) => break, // answer what is in flight, send, close
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A READ may also be answered in parts, some of them holes: [`ServerConnection::takes_parts`].
//!
//! The driver also closes a connection whose handshake is overdue, stops calling `receive` while more than
//! [`UNREAD_BYTES_MAX`] wait to be sent, and accepts at most [`CONNECTIONS_MAX`]. A connection that vanishes
//! needs nothing but to be dropped.
//!
//! # Driving a client connection
//!
//! [`ClientConnection`] is the mirror image. Feed what arrives to `receive` and take the events after every
//! call. After [`ClientEvent::Ready`], `submit` requests, each WRITE followed by its payload on the stream.
//! [`ClientEvent::Data`] announces payload that the driver takes off the stream itself; [`ClientEvent::Done`]
//! ends a request.
//!
//! # What is left out, and where it would go
//!
//! More metadata contexts are more names beside [`BASE_ALLOCATION`] and [`CALPE_HEALTH`]. The client half
//! never names contexts in a BLOCK_STATUS, and asks for base:allocation alone. docs/nbd-support.md lists what
//! is served, each with the test that shows it.

mod client;
mod errno;
mod events;
mod export;
mod handshake;
mod server;
#[cfg(test)]
mod tests;
mod transmission;
mod uri;
mod wire;

pub use client::{
    ClientConnection, ClientEvent, ClientFatal, ClientOptions, Failure, IN_FLIGHT_MAX, Refusal, RemoteExport,
    SubmitError,
};
pub use errno::Errno;
pub use events::{Extents, Fatal, Incoming, ReadPart};
pub use export::{
    BLOCK_BYTES_MAX, BLOCK_MIN_BYTES_ASSUMED, BLOCK_MIN_BYTES_MAX, ExportFault, ExportInfo, Exports,
};
pub use handshake::{OPTION_BYTES_MAX, OPTIONS_MAX, TlsMode};
pub use server::{CONNECTIONS_MAX, HANDSHAKE_NANOS_MAX, ServerConnection, UNREAD_BYTES_MAX};
pub use transmission::{BLOCK_STATUS_EXTENTS_MAX, ERROR_MESSAGE_BYTES_MAX, WRITE_DRAIN_BYTES_MAX};
pub use uri::{NbdAddress, NbdUri, UriError};
pub use wire::{
    BASE_ALLOCATION, CALPE_HEALTH, Command, Contexts, DEFAULT_PORT, HEALTH_DEGRADED, HEALTH_LOST, Request,
    STATE_HOLE, STATE_ZERO, STRING_BYTES_MAX, StringFault,
};
