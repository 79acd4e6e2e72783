//! Conversation with the kernel's NBD driver: requests and their answers, and the group that
//! reports dead connections.
//!
//! Invariant: one request is under way at a time and its answer belongs to it. Must not know why a
//! request is made.

pub(super) mod message;

use message::{FAMILY, FamilyFacts, Message, Reply, Request};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_REQUEST, NetlinkDeserializable, NetlinkMessage, NetlinkPayload, NetlinkSerializable,
};
use netlink_packet_generic::GenlMessage;
use netlink_packet_generic::ctrl::nlas::GenlCtrlAttrs;
use netlink_packet_generic::ctrl::{GenlCtrl, GenlCtrlCmd};
use netlink_sys::protocols::NETLINK_GENERIC;
use netlink_sys::{Socket, SocketAddr};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Larger than any datagram of the driver: a thousand devices in one list.
const DATAGRAM_BYTES: usize = 64 << 10;

/// How long the driver may take to answer. It flushes nothing and waits for no server.
const ANSWER_SECONDS: i64 = 30;

/// Why the driver did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NetlinkError {
    /// The driver's family does not exist.
    #[error("the kernel has no NBD driver loaded: run 'modprobe nbd' first")]
    NoDriver,
    /// The process may not.
    #[error("the kernel refuses it to this user: root is needed (CAP_SYS_ADMIN)")]
    NotPermitted,
    /// The driver refused.
    #[error("the kernel's NBD driver refuses: {source} (its reason may be in 'dmesg')")]
    Refused {
        /// Its error.
        source: io::Error,
    },
    /// Talking to it failed.
    #[error("cannot talk to the kernel's NBD driver: {source}")]
    Io {
        /// What the system said.
        #[from]
        source: io::Error,
    },
    /// The answer is no netlink message of the driver.
    #[error("the kernel's NBD driver answers with something unknown: {what}")]
    Garbled {
        /// What is wrong with it.
        what: String,
    },
}

/// A way to the driver.
#[derive(Debug)]
pub(super) struct Driver {
    socket: Socket,
    family: u16,
    group: Option<u32>,
    sequence: u32,
}

impl Driver {
    /// Finds the driver.
    ///
    /// # Errors
    /// When it is not loaded.
    pub(super) fn open() -> Result<Driver, NetlinkError> {
        let socket = bound()?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))
            .map_err(io::Error::from)?;
        let mut driver = Driver { socket, family: 0, group: None, sequence: 0 };
        let question = GenlMessage::from_payload(GenlCtrl {
            cmd: GenlCtrlCmd::GetFamily,
            nlas: vec![GenlCtrlAttrs::FamilyName(FAMILY.to_owned())],
        });
        let facts = match driver.exchange::<_, FamilyFacts>(question) {
            Err(NetlinkError::Refused { source }) if source.raw_os_error() == Some(libc::ENOENT) => {
                return Err(NetlinkError::NoDriver);
            }
            other => other?,
        };
        let facts = facts.unwrap_or_default();
        driver.family = facts.id.ok_or(NetlinkError::NoDriver)?;
        driver.group = facts.group;
        Ok(driver)
    }

    /// Sends a request and waits for its answer; some requests have only an acknowledgement.
    ///
    /// # Errors
    /// When the driver refuses, or does not answer.
    pub(super) fn ask(&mut self, request: Request) -> Result<Option<Reply>, NetlinkError> {
        let mut message = GenlMessage::from_payload(Message::Request(request));
        message.set_resolved_family_id(self.family);
        Ok(match self.exchange(message)? {
            Some(Message::Reply(reply)) => Some(reply),
            _ => None,
        })
    }

    /// Subscribes to the driver's notices.
    ///
    /// # Errors
    /// When the kernel does not allow it.
    pub(super) fn listen(&self) -> Result<Notices, NetlinkError> {
        let socket = bound()?;
        let group = self.group.ok_or_else(|| NetlinkError::Garbled { what: "it has no group".into() })?;
        socket.add_membership(group)?;
        socket.set_non_blocking(true)?;
        Ok(Notices { socket })
    }

    fn exchange<Q, A>(&mut self, question: GenlMessage<Q>) -> Result<Option<A>, NetlinkError>
    where
        GenlMessage<Q>: NetlinkSerializable,
        Q: std::fmt::Debug,
        A: std::fmt::Debug,
        GenlMessage<A>: NetlinkDeserializable,
    {
        self.sequence += 1;
        let mut message = NetlinkMessage::from(question);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        let mut answer = None;
        loop {
            let datagram = receive(&self.socket)?;
            for message in split::<A>(&datagram)? {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => answer = Some(inner.into_parts().1),
                    NetlinkPayload::Error(error) => match error.raw_code() {
                        0 => return Ok(answer),
                        code if code == -libc::EPERM => return Err(NetlinkError::NotPermitted),
                        _ => return Err(NetlinkError::Refused { source: error.to_io() }),
                    },
                    _ => {}
                }
            }
        }
    }
}

/// The driver's notices to every listener.
#[derive(Debug)]
pub(super) struct Notices {
    socket: Socket,
}

/// One notice of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// From the driver.
    Told(Reply),
    /// Some notices were lost: anything may have happened.
    Lost,
}

impl Notices {
    /// The descriptor to poll for reading.
    #[must_use]
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The notices since the last call; does not wait.
    ///
    /// # Errors
    /// When receiving fails.
    pub(super) fn take(&self) -> Result<Vec<Notice>, NetlinkError> {
        let mut notices = Vec::new();
        loop {
            match receive(&self.socket) {
                Ok(datagram) => {
                    for message in split::<Message>(&datagram)? {
                        if let NetlinkPayload::InnerMessage(inner) = message.payload
                            && let Message::Reply(reply) = inner.into_parts().1
                        {
                            notices.push(Notice::Told(reply));
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(notices),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => notices.push(Notice::Lost),
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
                    notices.push(Notice::Lost);
                    return Ok(notices);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn bound() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_GENERIC)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

fn receive(socket: &Socket) -> io::Result<Vec<u8>> {
    let mut datagram = Vec::with_capacity(DATAGRAM_BYTES);
    loop {
        match socket.recv(&mut datagram, 0) {
            Ok(_) => return Ok(datagram),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The messages of a datagram.
fn split<A>(datagram: &[u8]) -> Result<Vec<NetlinkMessage<GenlMessage<A>>>, NetlinkError>
where
    GenlMessage<A>: NetlinkDeserializable,
{
    let mut messages = Vec::new();
    let mut rest = datagram;
    while !rest.is_empty() {
        let message = NetlinkMessage::deserialize(rest)
            .map_err(|error| NetlinkError::Garbled { what: error.to_string() })?;
        let length = (message.header.length as usize).next_multiple_of(4);
        if length == 0 {
            return Err(NetlinkError::Garbled { what: "a message without length".into() });
        }
        rest = rest.get(length..).unwrap_or_default();
        messages.push(message);
    }
    Ok(messages)
}
