//! The first superblocks of a new array. Pure: identities, time and randomness come from the caller.

use crate::format::{
    ChecksumKind, Epoch, FIRST_SEQUENCE, Geometry, LanePart, Left, LogStart, MatrixId, MemberRecord,
    MemberSet, MemberState, Region, Role, ScrubRecord, Superblock, VolumeKind,
};
use crate::units::{MemberIndex, SlotIndex};
use uuid::Uuid;

/// The parameters of a new array.
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
