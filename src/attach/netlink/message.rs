//! Messages to and from the kernel's NBD driver over generic netlink, as bytes. Pure: must not know
//! sockets.
//!
//! Invariant: attributes have the numbers and widths of linux/nbd-netlink.h. Unknown attributes of
//! replies are skipped, since newer kernels may send more.

use netlink_packet_core::{
    DecodeError, Emitable, Nla, NlaBuffer, NlasIterator, ParseableParametrized, parse_u16, parse_u32,
};
use netlink_packet_generic::{GenlFamily, GenlHeader};
use std::os::fd::RawFd;

/// Name of the driver's family.
pub(crate) const FAMILY: &str = "nbd";

/// Name of the multicast group that reports dead connections.
pub(crate) const GROUP: &str = "nbd_mc_group";

/// Version of the family.
const VERSION: u8 = 1;

/// Commands, as the kernel numbers them.
mod command {
    pub(super) const CONNECT: u8 = 1;
    pub(super) const DISCONNECT: u8 = 2;
    pub(super) const RECONFIGURE: u8 = 3;
    pub(super) const LINK_DEAD: u8 = 4;
}

/// Attributes, as the kernel numbers them.
mod attribute {
    pub(super) const INDEX: u16 = 1;
    pub(super) const SIZE_BYTES: u16 = 2;
    pub(super) const BLOCK_SIZE_BYTES: u16 = 3;
    pub(super) const TIMEOUT: u16 = 4;
    pub(super) const SERVER_FLAGS: u16 = 5;
    pub(super) const CLIENT_FLAGS: u16 = 6;
    pub(super) const SOCKETS: u16 = 7;
    pub(super) const DEAD_CONN_TIMEOUT: u16 = 8;
    pub(super) const BACKEND_IDENTIFIER: u16 = 10;

    pub(super) const SOCK_ITEM: u16 = 1;
    pub(super) const SOCK_FD: u16 = 1;
}

/// Attributes of the controller, which numbers the families.
mod control {
    pub(super) const FAMILY_ID: u16 = 1;
    pub(super) const MCAST_GROUPS: u16 = 7;
    pub(super) const GROUP_NAME: u16 = 1;
    pub(super) const GROUP_ID: u16 = 2;
}

/// How to connect a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Connect {
    /// N of /dev/nbdN.
    pub index: u32,
    /// Bytes.
    pub size: u64,
    /// Logical block, bytes.
    pub block: u64,
    /// Seconds without an answer after which the kernel gives up a connection and sends its
    /// requests again.
    pub timeout_s: u64,
    /// Seconds that requests wait for a connection when there is none.
    pub dead_timeout_s: u64,
    /// What the server can do.
    pub server_flags: u64,
    /// Connected and negotiated sockets.
    pub sockets: Vec<RawFd>,
    /// The backend identifier: sysfs shows it, and [`Request::Reconfigure`] has to give it again.
    pub backend: String,
}

/// A request to the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// Connect a device.
    Connect(Connect),
    /// Disconnect a device.
    Disconnect {
        /// N of /dev/nbdN.
        index: u32,
    },
    /// Put sockets where connections have died. The driver ignores further sockets.
    Reconfigure {
        /// N of /dev/nbdN.
        index: u32,
        /// See [`Connect::timeout_s`].
        timeout_s: u64,
        /// See [`Connect::dead_timeout_s`].
        dead_timeout_s: u64,
        /// Connected and negotiated sockets.
        sockets: Vec<RawFd>,
        /// The backend identifier that it was connected with.
        backend: String,
    },
}

/// What the driver says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reply {
    /// A device was connected.
    Connected {
        /// Which.
        index: u32,
    },
    /// A connection of a device died.
    LinkDead {
        /// Which device.
        index: u32,
    },
    /// Anything else.
    Other,
}

/// One attribute of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Attribute {
    U32(u16, u32),
    U64(u16, u64),
    Text(u16, String),
    Nested(u16, Vec<Attribute>),
}

/// Marks attributes that hold attributes.
const NESTED: u16 = 1 << 15;

impl Nla for Attribute {
    fn value_len(&self) -> usize {
        match self {
            Attribute::U32(..) => 4,
            Attribute::U64(..) => 8,
            Attribute::Text(_, text) => text.len() + 1,
            Attribute::Nested(_, inner) => inner.as_slice().buffer_len(),
        }
    }

    fn kind(&self) -> u16 {
        match self {
            Attribute::U32(kind, _) | Attribute::U64(kind, _) | Attribute::Text(kind, _) => *kind,
            Attribute::Nested(kind, _) => kind | NESTED,
        }
    }

    fn emit_value(&self, buffer: &mut [u8]) {
        match self {
            Attribute::U32(_, value) => buffer.copy_from_slice(&value.to_ne_bytes()),
            Attribute::U64(_, value) => buffer.copy_from_slice(&value.to_ne_bytes()),
            Attribute::Text(_, text) => {
                buffer[..text.len()].copy_from_slice(text.as_bytes());
                buffer[text.len()] = 0;
            }
            Attribute::Nested(_, inner) => inner.as_slice().emit(buffer),
        }
    }
}

fn sockets(descriptors: &[RawFd]) -> Attribute {
    let item = |fd: &RawFd| {
        let fd = u32::try_from(*fd).expect("an open descriptor is not negative");
        Attribute::Nested(attribute::SOCK_ITEM, vec![Attribute::U32(attribute::SOCK_FD, fd)])
    };
    Attribute::Nested(attribute::SOCKETS, descriptors.iter().map(item).collect())
}

impl Request {
    fn attributes(&self) -> Vec<Attribute> {
        use Attribute::{Text, U32, U64};
        match self {
            Request::Connect(connect) => vec![
                U32(attribute::INDEX, connect.index),
                U64(attribute::SIZE_BYTES, connect.size),
                U64(attribute::BLOCK_SIZE_BYTES, connect.block),
                U64(attribute::TIMEOUT, connect.timeout_s),
                U64(attribute::DEAD_CONN_TIMEOUT, connect.dead_timeout_s),
                U64(attribute::SERVER_FLAGS, connect.server_flags),
                // Neither destroyed on disconnect nor disconnected on close: the keeper and
                // `detach` decide about both.
                U64(attribute::CLIENT_FLAGS, 0),
                Text(attribute::BACKEND_IDENTIFIER, connect.backend.clone()),
                sockets(&connect.sockets),
            ],
            Request::Disconnect { index } => vec![U32(attribute::INDEX, *index)],
            Request::Reconfigure { index, timeout_s, dead_timeout_s, sockets: fds, backend } => vec![
                U32(attribute::INDEX, *index),
                U64(attribute::TIMEOUT, *timeout_s),
                U64(attribute::DEAD_CONN_TIMEOUT, *dead_timeout_s),
                Text(attribute::BACKEND_IDENTIFIER, backend.clone()),
                sockets(fds),
            ],
        }
    }
}

/// A message of the driver's family: a request, or its outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// To the driver.
    Request(Request),
    /// From the driver.
    Reply(Reply),
}

impl GenlFamily for Message {
    fn family_name() -> &'static str {
        FAMILY
    }

    fn command(&self) -> u8 {
        match self {
            Message::Request(Request::Connect(_)) => command::CONNECT,
            Message::Request(Request::Disconnect { .. }) => command::DISCONNECT,
            Message::Request(Request::Reconfigure { .. }) => command::RECONFIGURE,
            Message::Reply(_) => unreachable!("replies are not sent"),
        }
    }

    fn version(&self) -> u8 {
        VERSION
    }
}

impl Emitable for Message {
    fn buffer_len(&self) -> usize {
        match self {
            Message::Request(request) => request.attributes().as_slice().buffer_len(),
            Message::Reply(_) => unreachable!("replies are not sent"),
        }
    }

    fn emit(&self, buffer: &mut [u8]) {
        match self {
            Message::Request(request) => request.attributes().as_slice().emit(buffer),
            Message::Reply(_) => unreachable!("replies are not sent"),
        }
    }
}

impl ParseableParametrized<[u8], GenlHeader> for Message {
    fn parse_with_param(bytes: &[u8], header: GenlHeader) -> Result<Message, DecodeError> {
        let mut index = None;
        each(bytes, |found| {
            if found.kind() == attribute::INDEX {
                index = Some(parse_u32(found.value())?);
            }
            Ok(())
        })?;
        Ok(Message::Reply(match (header.cmd, index) {
            (command::CONNECT, Some(index)) => Reply::Connected { index },
            (command::LINK_DEAD, Some(index)) => Reply::LinkDead { index },
            _ => Reply::Other,
        }))
    }
}

fn each(
    bytes: &[u8],
    mut visit: impl FnMut(NlaBuffer<&[u8]>) -> Result<(), DecodeError>,
) -> Result<(), DecodeError> {
    NlasIterator::new(bytes).try_for_each(|found| visit(found?))
}

/// What the controller says about a family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FamilyFacts {
    /// Its number.
    pub id: Option<u16>,
    /// The number of [`GROUP`].
    pub group: Option<u32>,
}

impl ParseableParametrized<[u8], GenlHeader> for FamilyFacts {
    fn parse_with_param(bytes: &[u8], _: GenlHeader) -> Result<FamilyFacts, DecodeError> {
        let mut facts = FamilyFacts::default();
        each(bytes, |found| {
            match found.kind() {
                control::FAMILY_ID => facts.id = Some(parse_u16(found.value())?),
                control::MCAST_GROUPS => each(found.value(), |group| {
                    let (mut id, mut ours) = (None, false);
                    each(group.value(), |part| {
                        match part.kind() {
                            control::GROUP_ID => id = Some(parse_u32(part.value())?),
                            control::GROUP_NAME => {
                                ours = part.value().strip_suffix(b"\0") == Some(GROUP.as_bytes());
                            }
                            _ => {}
                        }
                        Ok(())
                    })?;
                    if ours {
                        facts.group = id;
                    }
                    Ok(())
                })?,
                _ => {}
            }
            Ok(())
        })?;
        Ok(facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use netlink_packet_core::{NLM_F_ACK, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
    use netlink_packet_generic::GenlMessage;

    fn bytes_of(request: Request) -> Vec<u8> {
        let mut inner = GenlMessage::from_payload(Message::Request(request));
        inner.set_resolved_family_id(0x21);
        let mut message = NetlinkMessage::from(inner);
        message.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        message.header.sequence_number = 7;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes
    }

    /// The value of a constant of a C header: `#define NAME value`, or its place in an enum.
    fn constant(header: &str, name: &str) -> Option<u64> {
        let mut next = 0;
        for line in header.lines() {
            let line = line.trim();
            if line.starts_with("enum") {
                next = 0;
            }
            if let Some(define) = line.strip_prefix("#define") {
                let mut words = define.split_whitespace();
                if words.next() == Some(name) {
                    let value = words.next()?;
                    if let Some(shift) = define.split("<<").nth(1) {
                        let digits: String = shift.trim().chars().take_while(char::is_ascii_digit).collect();
                        return Some(1 << digits.parse::<u32>().ok()?);
                    }
                    return u64::from_str_radix(value.trim_start_matches("0x"), 16).ok();
                }
            }
            if let Some(found) = line.strip_suffix(',').map(|l| l.split('=').next().unwrap_or(l).trim())
                && found.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                && !found.is_empty()
            {
                if found == name {
                    return Some(next);
                }
                next += 1;
            }
        }
        None
    }

    #[test]
    fn numbers_are_those_of_the_kernels_header() {
        let path = "/usr/include/linux/nbd-netlink.h";
        let Ok(header) = std::fs::read_to_string(path) else {
            eprintln!("{path} is not there (package linux-libc-dev): not compared");
            return;
        };
        for (name, ours) in [
            ("NBD_GENL_VERSION", u64::from(VERSION)),
            ("NBD_ATTR_INDEX", attribute::INDEX.into()),
            ("NBD_ATTR_SIZE_BYTES", attribute::SIZE_BYTES.into()),
            ("NBD_ATTR_BLOCK_SIZE_BYTES", attribute::BLOCK_SIZE_BYTES.into()),
            ("NBD_ATTR_TIMEOUT", attribute::TIMEOUT.into()),
            ("NBD_ATTR_SERVER_FLAGS", attribute::SERVER_FLAGS.into()),
            ("NBD_ATTR_CLIENT_FLAGS", attribute::CLIENT_FLAGS.into()),
            ("NBD_ATTR_SOCKETS", attribute::SOCKETS.into()),
            ("NBD_ATTR_DEAD_CONN_TIMEOUT", attribute::DEAD_CONN_TIMEOUT.into()),
            ("NBD_ATTR_BACKEND_IDENTIFIER", attribute::BACKEND_IDENTIFIER.into()),
            ("NBD_SOCK_ITEM", attribute::SOCK_ITEM.into()),
            ("NBD_SOCK_FD", attribute::SOCK_FD.into()),
            ("NBD_CMD_CONNECT", command::CONNECT.into()),
            ("NBD_CMD_DISCONNECT", command::DISCONNECT.into()),
            ("NBD_CMD_RECONFIGURE", command::RECONFIGURE.into()),
            ("NBD_CMD_LINK_DEAD", command::LINK_DEAD.into()),
        ] {
            assert_eq!(constant(&header, name), Some(ours), "{name}");
        }
        assert!(header.contains(&format!("NBD_GENL_FAMILY_NAME\t\t\"{FAMILY}\"")));
        assert!(header.contains(&format!("NBD_GENL_MCAST_GROUP_NAME\t\"{GROUP}\"")));
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn a_connect_has_these_bytes() {
        let bytes = bytes_of(Request::Connect(Connect {
            index: 3,
            size: 0x4000_0000,
            block: 512,
            timeout_s: 30,
            dead_timeout_s: 600,
            server_flags: 0x16d,
            sockets: vec![5, 6],
            backend: "a/b".into(),
        }));
        #[rustfmt::skip]
        let expected = [
            // length, family, request and acknowledge, sequence, port
            0x88, 0, 0, 0,  0x21, 0, 5, 0,  7, 0, 0, 0,  0, 0, 0, 0,
            // command, version, reserved
            1, 1, 0, 0,
            8, 0, 1, 0,  3, 0, 0, 0,
            12, 0, 2, 0,  0, 0, 0, 0x40, 0, 0, 0, 0,
            12, 0, 3, 0,  0, 2, 0, 0, 0, 0, 0, 0,
            12, 0, 4, 0,  30, 0, 0, 0, 0, 0, 0, 0,
            12, 0, 8, 0,  0x58, 2, 0, 0, 0, 0, 0, 0,
            12, 0, 5, 0,  0x6d, 1, 0, 0, 0, 0, 0, 0,
            12, 0, 6, 0,  0, 0, 0, 0, 0, 0, 0, 0,
            8, 0, 10, 0,  b'a', b'/', b'b', 0,
            28, 0, 7, 0x80,
                12, 0, 1, 0x80,  8, 0, 1, 0,  5, 0, 0, 0,
                12, 0, 1, 0x80,  8, 0, 1, 0,  6, 0, 0, 0,
        ];
        assert_eq!(bytes, expected);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn a_disconnect_and_a_reconfigure_have_these_bytes() {
        let head = |length: u8, command: u8| {
            vec![length, 0, 0, 0, 0x21, 0, 5, 0, 7, 0, 0, 0, 0, 0, 0, 0, command, 1, 0, 0]
        };
        let mut expected = head(28, 2);
        expected.extend([8, 0, 1, 0, 1, 1, 0, 0]);
        assert_eq!(bytes_of(Request::Disconnect { index: 257 }), expected);
        let mut expected = head(80, 3);
        expected.extend([8, 0, 1, 0, 0, 0, 0, 0]);
        expected.extend([12, 0, 4, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([12, 0, 8, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend([9, 0, 10, 0, b'a', b'b', b'/', b'c', 0, 0, 0, 0]);
        expected.extend([16, 0, 7, 0x80, 12, 0, 1, 0x80, 8, 0, 1, 0, 9, 0, 0, 0]);
        let request = Request::Reconfigure {
            index: 0,
            timeout_s: 1,
            dead_timeout_s: 2,
            sockets: vec![9],
            backend: "ab/c".into(),
        };
        assert_eq!(bytes_of(request), expected);
    }

    fn parse(command: u8, attributes: &[u8]) -> Reply {
        let mut bytes = vec![0; 20];
        bytes.extend(attributes);
        let length = u32::try_from(bytes.len()).unwrap();
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes[4] = 0x21;
        bytes[16] = command;
        let message = NetlinkMessage::<GenlMessage<Message>>::deserialize(&bytes).unwrap();
        match message.payload {
            NetlinkPayload::InnerMessage(GenlMessage { payload: Message::Reply(reply), .. }) => reply,
            other => panic!("{other:?}"),
        }
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn replies_are_read_and_unknown_attributes_passed_over() {
        assert_eq!(parse(1, &[8, 0, 1, 0, 4, 0, 0, 0]), Reply::Connected { index: 4 });
        let later = [8, 0, 99, 0, 4, 0, 0, 0, 8, 0, 1, 0, 2, 0, 0, 0];
        assert_eq!(parse(4, &later), Reply::LinkDead { index: 2 });
        assert_eq!(parse(77, &[]), Reply::Other);
    }

    #[cfg(target_endian = "little")]
    #[test]
    fn the_controllers_answer_yields_family_and_group() {
        let mut attributes = vec![6, 0, 1, 0, 0x21, 0, 0, 0, 8, 0, 2, 0, b'n', b'b', b'd', 0];
        attributes.extend([36, 0, 7, 0, 32, 0, 1, 0, 8, 0, 2, 0, 6, 0, 0, 0, 17, 0, 1, 0]);
        attributes.extend(b"nbd_mc_group\0\0\0\0");
        let header = GenlHeader { cmd: 1, version: 2 };
        let facts = FamilyFacts::parse_with_param(&attributes, header).unwrap();
        assert_eq!(facts, FamilyFacts { id: Some(0x21), group: Some(6) });
    }
}
