//! What a daemon and a helper tell each other beside the batches: rare messages, each a packet of JSON on
//! a socket, some with descriptors. The end of either process is the end of the stream.
//!
//! Must not know what a message leads to.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::exchange::Layout;
use crate::device::DeviceInfo;

/// Longest message: the list of as many devices as any machine has.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Most descriptors of a message.
pub(super) const DESCRIPTORS_MAX: usize = 16;

/// Most memories that are handed to a helper, beside its exchange and its two bells.
pub(super) const MEMORIES_MAX: usize = DESCRIPTORS_MAX - 3;

/// What a daemon wants of a helper.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// Say which devices there are.
    List,
    /// Open one, and serve it from now on. With it come the exchange, the bell of its orders and that of its
    /// answers, and the memories.
    Open {
        /// The device's number.
        index: usize,
        /// The slots of the exchange.
        layout: Layout,
        /// Bytes of each memory.
        memories: Vec<usize>,
    },
}

/// What a helper tells its daemon.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// The devices, or why there is none.
    Devices(Result<Vec<DeviceInfo>, String>),
    /// The device is open.
    Opened {
        /// What it is.
        info: DeviceInfo,
        /// Batches at a time.
        slots: usize,
        /// Most bytes of one.
        slot_bytes: usize,
    },
    /// The device cannot be opened, or has failed; the helper ends.
    Failed(String),
}

/// A connected pair, closed in programs that are started later.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message; never waits.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > MESSAGE_BYTES_MAX || descriptors.len() > DESCRIPTORS_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(&text)], &mut ancillary, flags)?;
    Ok(())
}

/// What came from a socket.
#[derive(Debug)]
pub(super) enum Received<M> {
    /// A message, with its descriptors.
    Message(M, Vec<OwnedFd>),
    /// Nothing yet.
    Nothing,
    /// The other side is gone.
    End,
}

/// The next message; never waits.
///
/// # Errors
/// When the other side sent something that is no message, or the socket fails.
pub(super) fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Received<M>> {
    let mut text = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut ancillary, flags);
    let received = match received {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(Received::Nothing),
        Err(Errno::CONNRESET) => return Ok(Received::End),
        Err(error) => return Err(error.into()),
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a message is too long"));
    }
    if received.bytes == 0 {
        return Ok(Received::End);
    }
    let message = serde_json::from_slice(&text[..received.bytes])?;
    Ok(Received::Message(message, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};

    #[test]
    fn messages_arrive_with_their_descriptors_and_the_end_is_seen() {
        let (one, other) = pair().expect("a pair");
        assert!(matches!(receive::<Order>(&other), Ok(Received::Nothing)));
        let (mut read, write) = io::pipe().expect("a pipe");
        let layout = Layout { slots: 4, slot_bytes: 1 << 20 };
        let order = Order::Open { index: 3, layout, memories: vec![4096, 8192] };
        send(one.as_fd(), &order, &[write.as_fd()]).expect("sent");
        send(one.as_fd(), &Order::List, &[]).expect("sent");
        drop(write);
        match receive::<Order>(&other) {
            Ok(Received::Message(found, mut descriptors)) => {
                assert_eq!((found, descriptors.len()), (order, 1));
                File::from(descriptors.remove(0)).write_all(b"x").expect("written");
            }
            wrong => panic!("{wrong:?}"),
        }
        let mut text = String::new();
        read.read_to_string(&mut text).expect("read");
        assert_eq!(text, "x");
        assert!(
            matches!(receive::<Order>(&other), Ok(Received::Message(Order::List, none)) if none.is_empty())
        );
        drop(one);
        assert!(matches!(receive::<Order>(&other), Ok(Received::End)));
        assert!(send(other.as_fd(), &Reply::Failed("x".into()), &[]).is_err());
    }

    #[test]
    fn what_is_no_message_is_an_error() {
        let (one, other) = pair().expect("a pair");
        for bytes in [&b"{"[..], b"{\"devices\":7}", b"\xff", &[b' '; 70 << 10]] {
            rustix::net::send(&one, bytes, SendFlags::NOSIGNAL).expect("sent");
            assert!(receive::<Reply>(&other).is_err(), "{} bytes", bytes.len());
        }
        send(other.as_fd(), &"x".repeat(MESSAGE_BYTES_MAX), &[]).expect_err("too long");
    }
}
