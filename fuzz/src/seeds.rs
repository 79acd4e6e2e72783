//! Inputs to start from: what Calpe's own encoders write, without the zeroes at the end.

use crate::format::{ARRAY, MEMBER, PAGE, PLACE, SECRET};
use crate::nbd::{TwoExports, requests, serve, talk};
use calpe_core::array::NewArray;
use calpe_core::format::{
    ArrayShape, Batch, BatchHash, ChecksumKind, EpochStamp, FreshRecord, InPlaceRecord, LogKey, LogRecord,
    MapEntry, NO_PLACE, Page, layout_for, member_bytes_for,
};
use calpe_core::nbd::{Command, Exports};
use calpe_core::units::{BlockHash, LaneIndex, SlotIndex, StripeIndex};
use uuid::Uuid;

type Seeds = Vec<(&'static str, Vec<u8>)>;

/// Superblocks of an array with checksums, of one without, and of a lane of one that is cut.
#[must_use]
pub fn superblock() -> Seeds {
    let first = |data, parity, checksum, lanes| {
        let shape = ArrayShape { data, parity, chunk: 65536, sector: 512, lanes };
        let volume = 64 << 20;
        let bytes = member_bytes_for(volume, shape).expect("a possible shape");
        let layout = layout_for(bytes, shape, Some(volume)).expect("a layout");
        let lane = LaneIndex(lanes - 1);
        let (geometry, regions) = layout.of_lane[usize::from(lane.0)].clone();
        let array = NewArray {
            name: "tank".into(),
            uuid: ARRAY,
            created_unix: 1_750_000_000,
            epoch_id: 0xdead_beef_0123_4567,
            part: layout.part(lane),
            geometry,
            regions,
            checksum,
            secret: SECRET,
        };
        let devices: Vec<_> =
            (0..u128::from(data + parity)).map(|i| Uuid::from_u128(ARRAY.as_u128() + 1 + i)).collect();
        trimmed(array.superblocks(&devices)[0].encode().as_slice())
    };
    vec![
        ("checksums", first(3, 2, ChecksumKind::Blake3, 1)),
        ("bare", first(1, 1, ChecksumKind::None, 1)),
        ("lane", first(2, 1, ChecksumKind::Crc32c, 4)),
    ]
}

/// Headers of a batch without records, and of one with a record of each kind.
#[must_use]
pub fn log_segment() -> Seeds {
    let hash = |number: u8| BlockHash([number; 16]);
    let empty = Batch {
        lane: 0,
        sequence: 1001,
        epoch: EpochStamp { number: 9, id: 0xdead_beef_0123_4567 },
        durable_upto: 1000,
        tail: 990,
        previous: BatchHash([0x3c; 32]),
        places: vec![17, 17, PLACE, NO_PLACE, 4000],
        records: Vec::new(),
    };
    let in_place = InPlaceRecord {
        stripe: StripeIndex(7),
        slot: SlotIndex(410),
        first: true,
        row: 3,
        rows: 2,
        columns: vec![1, 3, 4],
        hashes: vec![BlockHash::UNWRITTEN, BlockHash::LOST, hash(1), hash(2), hash(3), hash(4)],
    };
    let fresh = FreshRecord {
        stripe: StripeIndex(8),
        slot: SlotIndex(411),
        old_slot: SlotIndex(8),
        hashes: (5..10).map(hash).collect(),
    };
    let records = vec![
        LogRecord::InPlace(in_place),
        LogRecord::Fresh(fresh),
        LogRecord::Discard { stripe: StripeIndex(9), slot: SlotIndex(9) },
    ];
    let full = Batch { records, ..empty.clone() };
    let key = LogKey::derive(ARRAY, SECRET);
    let header = |batch: &Batch, payload| trimmed(&batch.encode(&key, ARRAY, MEMBER, payload));
    vec![("empty", header(&empty, 0)), ("records", header(&full, 2))]
}

/// A page of hashes and one of the map.
#[must_use]
pub fn page() -> Seeds {
    let key = LogKey::derive(ARRAY, SECRET);
    let mut hashes = Page { sequence: 77, epoch: 9, ..Page::blank() };
    hashes.entries[1] = BlockHash::LOST.0;
    hashes.entries[2] = [0x5a; 16];
    let mut map = Page { sequence: 78, epoch: 9, ..Page::blank() };
    for (stripe, slot) in [(1, 1), (2, 4100)] {
        map.entries[stripe as usize - 1] =
            MapEntry { slot: SlotIndex(slot), holds_data: true, epoch: 8 }.encode(stripe);
    }
    vec![
        ("hashes", trimmed(&hashes.encode(&key, ARRAY, PAGE))),
        ("map", trimmed(&map.encode(&key, ARRAY, PAGE))),
    ]
}

/// What our client sends to our server.
#[must_use]
pub fn nbd_server() -> Seeds {
    let (client, _) = conversation();
    vec![("whole", with_cut(0, &client)), ("cut", with_cut(7, &client))]
}

/// What our server sends to our client.
#[must_use]
pub fn nbd_client() -> Seeds {
    let (_, server) = conversation();
    vec![("whole", with_cut(0, &server)), ("cut", with_cut(7, &server))]
}

/// Both directions of a conversation in which every request is made and answered. Each side answers the whole
/// of what the other has sent so far, until nothing new comes.
fn conversation() -> (Vec<u8>, Vec<u8>) {
    assert_eq!(TwoExports.list().len(), 2);
    let (mut client, mut server) = (Vec::new(), serve(&[], 0));
    loop {
        let sent = talk(&server, 0).1;
        if sent == client {
            break;
        }
        client = sent;
        server = serve(&client, 0);
    }
    let done = talk(&server, 0).0.iter().filter(|event| event.starts_with("Done")).count();
    assert_eq!(done, requests().len(), "every request is answered");
    assert!(requests().iter().any(|request| request.command == Command::Read));
    (client, server)
}

fn with_cut(cut: u8, stream: &[u8]) -> Vec<u8> {
    [&[cut], stream].concat()
}

fn trimmed(bytes: &[u8]) -> Vec<u8> {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    bytes[..end].to_vec()
}
