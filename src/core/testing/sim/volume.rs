//! The volume of a lane, of either kind.

use crate::units::{BlockHash, Timestamp, VolumeOffset};
use crate::volume::{
    AdminOutcome, AdminRefusal, AdminRequest, CasVolume, PlainVolume, ViewReader, Volume, VolumeEvent,
    VolumeOutput, VolumeStatus,
};

/// See the head of this file.
pub(in crate::testing) enum SimVolume {
    Plain(Box<PlainVolume>),
    Cas(Box<CasVolume>),
}

impl SimVolume {
    fn volume(&self) -> &dyn Volume {
        match self {
            SimVolume::Plain(volume) => &**volume,
            SimVolume::Cas(volume) => &**volume,
        }
    }

    fn volume_mut(&mut self) -> &mut dyn Volume {
        match self {
            SimVolume::Plain(volume) => &mut **volume,
            SimVolume::Cas(volume) => &mut **volume,
        }
    }

    /// As [`Volume::take`].
    pub(super) fn take(&mut self, now: Timestamp, event: VolumeEvent) {
        self.volume_mut().take(now, event);
    }

    /// As [`Volume::settle`].
    pub(super) fn settle(&mut self, now: Timestamp, out: &mut VolumeOutput) {
        self.volume_mut().settle(now, out);
    }

    /// As [`Volume::status`].
    pub(super) fn status(&self) -> VolumeStatus {
        self.volume().status()
    }

    /// As [`Volume::would`].
    pub(super) fn would(&self, request: &AdminRequest) -> Result<AdminOutcome, AdminRefusal> {
        self.volume().would(request)
    }

    /// As [`Volume::due`].
    pub(super) fn due(&self) -> Option<Timestamp> {
        self.volume().due()
    }

    /// As [`Volume::view_reader`].
    pub(super) fn view_reader(&self) -> Option<ViewReader> {
        self.volume().view_reader()
    }

    /// As [`PlainVolume::expect_damage`].
    pub(super) fn expect_damage(&mut self, ranges: &[(VolumeOffset, u64)], is_beyond_repair: bool) {
        match self {
            SimVolume::Plain(volume) => volume.expect_damage(ranges, is_beyond_repair),
            SimVolume::Cas(volume) => volume.expect_damage(ranges, is_beyond_repair),
        }
    }

    /// As [`PlainVolume::cached_hash`]; none of a cas volume, whose blocks lie anywhere.
    pub(super) fn cached_hash(&self, offset: VolumeOffset) -> Option<BlockHash> {
        match self {
            SimVolume::Plain(volume) => volume.cached_hash(offset),
            SimVolume::Cas(_) => None,
        }
    }

    /// As [`CasVolume::audit`].
    pub(super) fn audit(&mut self) -> Option<Vec<String>> {
        match self {
            SimVolume::Plain(_) => Some(Vec::new()),
            SimVolume::Cas(volume) => volume.audit(),
        }
    }

    /// The plain volume.
    pub(in crate::testing) fn plain(&mut self) -> &mut PlainVolume {
        match self {
            SimVolume::Plain(volume) => volume,
            SimVolume::Cas(_) => panic!("this is for plain volumes"),
        }
    }

    /// The cas volume.
    #[cfg(test)]
    pub(super) fn cas(&mut self) -> &mut CasVolume {
        match self {
            SimVolume::Cas(volume) => volume,
            SimVolume::Plain(_) => panic!("this is for cas volumes"),
        }
    }

    /// Checks that readers on other threads are shown the pages as they are.
    #[cfg(test)]
    pub(super) fn check_shown(&self) {
        if let SimVolume::Plain(volume) = self {
            volume.check_shown();
        }
    }
}
