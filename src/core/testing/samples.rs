//! Sample values for tests: a small array, a member with default status.

use crate::array::{MemberCounters, MemberStatus, NewArray};
use crate::format::{ArrayShape, ChecksumKind, MemberState, geometry_for, member_bytes_for};
use crate::units::MemberIndex;
use uuid::Uuid;

/// An array of 16 MiB, without checksums.
#[must_use]
pub fn small_array(data: u16, parity: u16) -> NewArray {
    let shape = ArrayShape { data, parity, chunk: 65536, sector: 512, lanes: 1 };
    let volume_bytes = 1 << 24;
    let bytes = member_bytes_for(volume_bytes, shape).expect("a shape that is possible");
    let (geometry, regions) =
        geometry_for(bytes, shape, Some(volume_bytes)).expect("a device that is large enough");
    NewArray {
        part: crate::format::LanePart::WHOLE,
        name: "rock".into(),
        uuid: Uuid::from_u128(7),
        created_unix: 1,
        epoch_id: 100,
        geometry,
        regions,
        checksum: ChecksumKind::None,
        secret: [3; 16],
    }
}

/// The status of a member of which only the index and the state are known.
#[must_use]
pub fn bare_member(index: MemberIndex, state: MemberState) -> MemberStatus {
    MemberStatus {
        index,
        uuid: Uuid::nil(),
        state,
        device: None,
        replacement: None,
        counters: MemberCounters::default(),
        reason: None,
        conditions: Vec::new(),
        has_left: false,
        returns: false,
        lacking: Vec::new(),
    }
}
