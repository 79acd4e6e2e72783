//! The first superblocks of a new array. Pure: identities, time and randomness come from the caller.

use crate::format::{
    ArrayLayout, ChecksumKind, Epoch, FIRST_SEQUENCE, Geometry, LanePart, Left, LogStart, MatrixId,
    MemberRecord, MemberSet, MemberState, Region, Role, ScrubRecord, Superblock, VolumeKind,
};
use crate::units::{MemberIndex, SlotIndex};
use std::collections::HashSet;
use uuid::Uuid;

/// The parameters of a new array of any number of lanes.
#[derive(Clone, Debug)]
pub struct NewLanes {
    /// Its name, valid by `format::check_array_name`.
    pub name: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Seconds since 1970.
    pub created_unix: u64,
    /// Where its lanes lie.
    pub layout: ArrayLayout,
    /// Checksum of each block.
    pub checksum: ChecksumKind,
    /// What is random about each lane.
    pub seeds: Vec<LaneSeed>,
}

/// What is random about a lane of a new array.
#[derive(Clone, Copy, Debug)]
pub struct LaneSeed {
    /// Identity of its first epoch, not 0.
    pub epoch_id: u64,
    /// 16 random bytes that the key of its log and pages is derived from.
    pub secret: [u8; 16],
}

impl NewLanes {
    /// The superblocks of each lane, of all devices in member order, for a plain volume.
    ///
    /// # Panics
    /// When the number of devices is not k + m, that of seeds not that of lanes, or when two lanes have one
    /// secret: what is misdirected from one to the other would count as its own.
    #[must_use]
    pub fn superblocks(&self, devices: &[Uuid]) -> Vec<Vec<Superblock>> {
        let NewLanes { layout, seeds, .. } = self;
        assert_eq!(seeds.len(), layout.of_lane.len(), "a seed for each lane");
        let secrets: HashSet<[u8; 16]> = seeds.iter().map(|seed| seed.secret).collect();
        assert_eq!(secrets.len(), seeds.len(), "a secret for each lane");
        let lanes = layout.lanes.indices().zip(&layout.of_lane).zip(seeds);
        let of_lane = lanes.map(|((lane, (geometry, regions)), seed)| NewArray {
            name: self.name.clone(),
            uuid: self.uuid,
            created_unix: self.created_unix,
            epoch_id: seed.epoch_id,
            part: layout.part(lane),
            geometry: *geometry,
            regions: regions.clone(),
            checksum: self.checksum,
            secret: seed.secret,
        });
        of_lane.map(|lane| lane.superblocks(devices)).collect()
    }
}

/// The parameters of a new array that is not cut, or of one lane of a new array.
#[derive(Clone, Debug)]
pub struct NewArray {
    /// Its name, valid by `format::check_array_name`.
    pub name: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Seconds since 1970.
    pub created_unix: u64,
    /// Identity of its first epoch, not 0.
    pub epoch_id: u64,
    /// The part of it that the superblocks are about.
    pub part: LanePart,
    /// Its shape; with several lanes that of this lane.
    pub geometry: Geometry,
    /// Regions of every member.
    pub regions: Vec<Region>,
    /// Checksum of each block.
    pub checksum: ChecksumKind,
    /// 16 random bytes that the key of log and pages is derived from.
    pub secret: [u8; 16],
}

impl NewArray {
    /// The superblock of each device, in member order, for a plain volume.
    ///
    /// # Panics
    /// When the number of devices is not k + m.
    #[must_use]
    pub fn superblocks(&self, devices: &[Uuid]) -> Vec<Superblock> {
        let width = self.geometry.data + self.geometry.parity;
        assert_eq!(devices.len(), usize::from(width), "one device for each member");
        let live: MemberSet = (0..width).map(MemberIndex).collect();
        let record =
            |uuid: &Uuid| MemberRecord { uuid: *uuid, state: MemberState::Online, rebuilt: SlotIndex(0) };
        let members: Vec<MemberRecord> = devices.iter().map(record).collect();
        // The first epoch and the first batch are both number 1: 0 is neither.
        let log_start = LogStart { epoch: 1, sequence: 1 };
        let superblock = |(at, device): (usize, &Uuid)| Superblock {
            features_compat: 0,
            features_ro_compat: 0,
            features_incompat: Superblock::incompat_features(self.checksum, self.part.lanes.count),
            array: self.uuid,
            name: self.name.clone(),
            created_unix: self.created_unix,
            device: *device,
            member: MemberIndex(at as u16),
            role: Role::Member,
            geometry: self.geometry,
            matrix: MatrixId::Vandermonde11d,
            checksum: self.checksum,
            volume: VolumeKind::Plain,
            regions: self.regions.clone(),
            sequence: FIRST_SEQUENCE,
            update: 1,
            update_complete: 0,
            epoch: Epoch { number: 1, id: self.epoch_id, parent: 0, live },
            clean: true,
            members: members.clone(),
            replacements: Vec::new(),
            scrub: ScrubRecord::default(),
            log_secret: self.secret,
            part: self.part,
            log_start,
            map_pages: 0,
            left: vec![Left::default(); usize::from(width)],
        };
        devices.iter().enumerate().map(superblock).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ArrayShape, layout_for, member_bytes_for};

    fn new_lanes(lanes: u16) -> (NewLanes, Vec<Uuid>) {
        let shape = ArrayShape { data: 2, parity: 1, chunk: 65536, sector: 512, lanes };
        let volume = 64 << 20;
        let bytes = member_bytes_for(volume, shape).expect("a possible shape");
        let new = NewLanes {
            name: "rock".into(),
            uuid: Uuid::from_u128(7),
            created_unix: 1,
            layout: layout_for(bytes, shape, Some(volume)).expect("a layout"),
            checksum: ChecksumKind::Crc32c,
            seeds: (1..=lanes).map(|i| LaneSeed { epoch_id: i.into(), secret: [i as u8; 16] }).collect(),
        };
        (new, (0..3).map(|at| Uuid::from_u128(1000 + at)).collect())
    }

    #[test]
    fn lanes_share_what_identifies_the_array_and_have_secrets_of_their_own() {
        let (new, devices) = new_lanes(4);
        let superblocks = new.superblocks(&devices);
        assert_eq!(superblocks.len(), 4);
        for (lane, of_lane) in (0..).zip(&superblocks) {
            for (superblock, device) in of_lane.iter().zip(&devices) {
                assert_eq!(Superblock::decode(superblock.encode().as_slice()).as_ref(), Ok(superblock));
                assert_eq!(
                    (superblock.device, superblock.array, superblock.part.lane.0),
                    (*device, new.uuid, lane)
                );
                assert_eq!(
                    (superblock.log_secret, superblock.epoch.id),
                    ([lane as u8 + 1; 16], u64::from(lane) + 1)
                );
                assert_eq!(superblock.volume_bytes(), 64 << 20);
            }
        }
        let shares: u64 = superblocks.iter().map(|of_lane| of_lane[0].geometry.volume_bytes).sum();
        assert_eq!(shares, 64 << 20);
    }

    #[test]
    fn an_array_that_is_not_cut_is_created_as_ever() {
        let (new, devices) = new_lanes(1);
        let (geometry, regions) = new.layout.of_lane[0].clone();
        let NewLanes { name, uuid, created_unix, checksum, .. } = new.clone();
        let part = LanePart::WHOLE;
        let whole = NewArray {
            name,
            uuid,
            created_unix,
            epoch_id: 1,
            part,
            geometry,
            regions,
            checksum,
            secret: [1; 16],
        };
        assert_eq!(new.superblocks(&devices), [whole.superblocks(&devices)]);
    }

    #[test]
    #[should_panic(expected = "a secret for each lane")]
    fn lanes_with_one_secret_are_not_created() {
        let (mut new, devices) = new_lanes(2);
        new.seeds[1].secret = new.seeds[0].secret;
        let _ = new.superblocks(&devices);
    }
}
