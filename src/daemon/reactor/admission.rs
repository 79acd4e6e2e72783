//! Admission: clients that have chosen no export yet are strangers. They have places of their own, so that
//! they take none from clients; and no stranger can shut out the others.
//!
//! Every stranger is let in. When the places of its kind, or those of its address, are taken, one of the
//! strangers in them is dropped at random: real clients are strangers for milliseconds, so the one dropped is
//! nearly always one that stays without choosing an export. (OpenSSH's MaxStartups refuses newcomers at
//! random instead; once silent connections hold all places, nobody gets in.) Strangers on unix sockets have
//! places of their own, and so have clients there: connections from the network never lock out this host.
//!
//! Must not know sockets, or what a client says.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv6Addr};

/// Most strangers at one time, on unix sockets and over the network, each. Handshakes take a few
/// milliseconds, so that this allows a thousand new clients a second.
pub(super) const STRANGERS_MAX: usize = 64;

/// Most of them from one address.
const STRANGERS_OF_ADDRESS_MAX: usize = STRANGERS_MAX / 4;

/// Part of the clients' places that only unix sockets get, as a divisor.
const UNIX_RESERVE: usize = 10;

/// Where a connection comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// A unix socket.
    Unix,
    /// The network. Of an IPv6 address the first half: its owner chooses the other one freely.
    Network(IpAddr),
}

impl Origin {
    pub(super) fn network(address: IpAddr) -> Origin {
        Origin::Network(match address.to_canonical() {
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
            }
            address => address,
        })
    }

    pub(super) fn is_unix(self) -> bool {
        self == Origin::Unix
    }
}

/// A connection's standing for places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Guest {
    pub(super) key: usize,
    pub(super) origin: Origin,
    pub(super) stage: Stage,
}

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// It has chosen no export yet.
    Stranger,
    /// It has an export.
    Client,
    /// It is being closed, and takes no place.
    Leaving,
}

/// The stranger to drop so that a new one from `origin` gets in; none where there is room.
pub(super) fn stranger_to_drop(guests: impl Iterator<Item = Guest>, origin: Origin) -> Option<usize> {
    let kind: Vec<Guest> = guests
        .filter(|guest| guest.stage == Stage::Stranger && guest.origin.is_unix() == origin.is_unix())
        .collect();
    let neighbours: Vec<Guest> = kind.iter().copied().filter(|guest| guest.origin == origin).collect();
    let from = if !origin.is_unix() && neighbours.len() >= STRANGERS_OF_ADDRESS_MAX {
        neighbours
    } else if kind.len() >= STRANGERS_MAX {
        kind
    } else {
        return None;
    };
    let random = RandomState::new().hash_one(from.len());
    Some(from[(random % from.len() as u64) as usize].key)
}

/// Whether one more client may come from a unix socket, or from the network. `most`: all places; `reserve`:
/// whether some are kept for a unix socket.
pub(super) fn has_place(guests: impl Iterator<Item = Guest>, unix: bool, most: usize, reserve: bool) -> bool {
    let (mut all, mut network) = (0, 0);
    for guest in guests.filter(|guest| guest.stage == Stage::Client) {
        all += 1;
        network += usize::from(!guest.origin.is_unix());
    }
    let network_most = if reserve { network_places(most) } else { most };
    all < most && (unix || network < network_most)
}

/// How many of `most` clients may come from the network where there is a unix socket; the rest is for that
/// socket.
#[must_use]
pub(crate) fn network_places(most: usize) -> usize {
    most - (most / UNIX_RESERVE).max(1).min(most - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(last: u8) -> Origin {
        Origin::network(IpAddr::from([10, 0, 0, last]))
    }

    fn guests(strangers: &[Origin]) -> Vec<Guest> {
        let guest = |(key, &origin)| Guest { key, origin, stage: Stage::Stranger };
        strangers.iter().enumerate().map(guest).collect()
    }

    #[test]
    fn strangers_of_the_network_never_cost_a_unix_socket_its_places() {
        let many: Vec<Origin> = (0..STRANGERS_MAX as u8).map(network).collect();
        let many = guests(&many);
        assert_eq!(stranger_to_drop(many.iter().copied(), Origin::Unix), None);
        assert!(stranger_to_drop(many.iter().copied(), network(200)).is_some());
        assert_eq!(stranger_to_drop(many[1..].iter().copied(), network(200)), None);
    }

    #[test]
    fn an_address_with_many_strangers_loses_its_own() {
        let mut origins = vec![network(1); STRANGERS_OF_ADDRESS_MAX];
        origins.extend([network(2); 3]);
        let guests = guests(&origins);
        for _ in 0..100 {
            let dropped = stranger_to_drop(guests.iter().copied(), network(1)).unwrap();
            assert!(dropped < STRANGERS_OF_ADDRESS_MAX);
            assert_eq!(stranger_to_drop(guests.iter().copied(), network(2)), None);
        }
    }

    #[test]
    fn which_one_is_left_to_chance() {
        let guests = guests(&[Origin::Unix; STRANGERS_MAX]);
        let dropped: std::collections::BTreeSet<usize> =
            (0..2000).filter_map(|_| stranger_to_drop(guests.iter().copied(), Origin::Unix)).collect();
        assert!(dropped.len() > STRANGERS_MAX / 2, "{dropped:?}");
    }

    #[test]
    fn the_last_places_are_for_unix_sockets() {
        let mut clients: Vec<Guest> = Vec::new();
        while has_place(clients.iter().copied(), false, 20, true) {
            clients.push(Guest { key: clients.len(), origin: network(1), stage: Stage::Client });
        }
        assert_eq!(clients.len(), 18);
        while has_place(clients.iter().copied(), true, 20, true) {
            clients.push(Guest { key: clients.len(), origin: Origin::Unix, stage: Stage::Client });
        }
        assert_eq!(clients.len(), 20);
        assert!(has_place([].into_iter(), false, 1, true), "a single place is for whoever comes first");
    }

    #[test]
    fn without_a_unix_socket_the_network_has_all_places() {
        let client = |key| Guest { key, origin: network(1), stage: Stage::Client };
        let places = |most| (0..).take_while(|&n| has_place((0..n).map(client), false, most, false)).count();
        assert_eq!([places(1), places(2), places(10)], [1, 2, 10]);
    }

    #[test]
    fn one_owner_of_ipv6_addresses_is_one() {
        let of = |text: &str| Origin::network(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2:3::4"), of("2001:db8:1:2:ffff::"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.7"), network(7));
    }
}
