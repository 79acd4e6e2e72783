//! The shape of a simulated array: the arguments of `create`, and deviations that a test asks for.

use crate::format::{ChecksumKind, Lanes};
use crate::volume::LaneCut;

/// Shape of a simulated array.
#[derive(Clone, Copy, Debug)]
pub struct SimShape {
    /// k.
    pub data: u16,
    /// m.
    pub parity: u16,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Bytes of the volume.
    pub volume_bytes: u64,
    /// Checksum of each block.
    pub checksum: ChecksumKind,
    /// Bytes of the log region instead of those that `create` would choose, for a ring that is soon full.
    pub log_bytes: Option<u64>,
    /// Bytes from which on work on fetched blocks and new parity becomes a job. None: chosen by the seed, so
    /// that half of all runs make jobs of one or a few blocks, and the others hardly any jobs.
    pub job_bytes: Option<usize>,
    /// Slots beyond those of the stripes instead of those that `create` would choose, so that slots are soon
    /// reused.
    pub free_slots: Option<u64>,
    /// Bytes of memory for pages of checksums instead of the default, so that pages are read again and again.
    pub page_cache: Option<usize>,
    /// How it is cut into lanes.
    pub lanes: Lanes,
    /// The volume is of kind cas, on an array with so many bytes of user data.
    pub cas: Option<u64>,
}

impl SimShape {
    /// An array of `stripes` whole stripes.
    #[must_use]
    pub const fn new(data: u16, parity: u16, chunk: u32, stripes: u64) -> SimShape {
        let volume_bytes = stripes * data as u64 * chunk as u64;
        SimShape {
            data,
            parity,
            chunk,
            volume_bytes,
            checksum: ChecksumKind::None,
            log_bytes: None,
            job_bytes: None,
            free_slots: None,
            page_cache: None,
            lanes: Lanes::ONE,
            cas: None,
        }
    }

    /// The same with checksums of this kind and a ring of `log_bytes` on every member.
    #[must_use]
    pub const fn logged(self, checksum: ChecksumKind, log_bytes: u64) -> SimShape {
        SimShape { checksum, log_bytes: Some(log_bytes), ..self }
    }

    /// The same in so many lanes, which get `group` stripes in turn.
    #[must_use]
    pub const fn in_lanes(self, count: u16, group: u32) -> SimShape {
        SimShape { lanes: Lanes { count, group }, ..self }
    }

    /// The same with a volume of kind cas, on an array of `stripes` stripes.
    #[must_use]
    pub const fn cas_on(self, stripes: u64) -> SimShape {
        SimShape { cas: Some(stripes * self.data as u64 * self.chunk as u64), ..self }
    }

    /// How its volume is cut.
    pub(in crate::testing) fn cut(&self) -> LaneCut {
        LaneCut::new(
            self.lanes,
            u64::from(self.data) * u64::from(self.chunk),
            self.cas.unwrap_or(self.volume_bytes),
        )
    }

    /// Members.
    #[must_use]
    pub fn width(&self) -> u16 {
        self.data + self.parity
    }
}
