//! The facts about an array that its log is made with.

use crate::array::ArrayConfig;
use crate::array::log::journal::{Journal, LogSite};
use crate::array::pages::Pages;
use crate::block_io::Pool;
use crate::codec::BlockHasher;
use crate::format::{
    BatchHash, ChecksumKind, Geometry, LOG_BLOCK_BYTES, LogKey, LogStart, PAGE_BYTES, Region, RegionKind,
    Superblock,
};
use crate::units::ByteOffset;
use uuid::Uuid;

/// Facts about a log that never change, except for where it starts.
// Plain data: given to a log when it is made, and by it to a replay.
#[derive(Clone)]
pub(in crate::array) struct LogFacts {
    pub key: LogKey,
    /// Checksums of blocks, if the array has any.
    pub checksums: Option<BlockHasher>,
    pub log: Region,
    pub pages_offset: ByteOffset,
    pub overlay_max: usize,
    /// The fewest members that get an image of each row that is written: that of the data, and those of the
    /// parity.
    pub members_of_write: usize,
    pub cache_pages_max: usize,
    /// The newest log start of the members when this life of the log began, and whether the log was empty
    /// then.
    pub start: LogStart,
    pub clean: bool,
    /// Serve although replay finds rows lost whose wrong content nothing would reveal.
    pub force: bool,
}

/// Most bytes of images that wait to go in place: as many as a checkpoint writes in a second or so.
const OVERLAY_MAX: usize = 64 << 20;

impl LogFacts {
    pub(in crate::array) fn new(superblock: &Superblock, config: &ArrayConfig, pool: &Pool) -> LogFacts {
        let region = |kind| superblock.region(kind).expect("a logged array has log and pages regions");
        let (log, pages) = (region(RegionKind::Log), region(RegionKind::Pages));
        let secret = superblock.log_secret;
        let (_, slab) = pool.slab();
        LogFacts {
            key: LogKey::derive(superblock.array, secret),
            checksums: match superblock.checksum {
                ChecksumKind::None => None,
                ChecksumKind::Crc32c => Some(BlockHasher::Crc32c),
                ChecksumKind::Blake3 => Some(BlockHasher::Blake3),
            },
            log,
            pages_offset: pages.offset,
            overlay_max: OVERLAY_MAX.min(slab / 4),
            members_of_write: 1 + usize::from(superblock.geometry.parity),
            cache_pages_max: (config.page_cache / PAGE_BYTES).max(1),
            start: superblock.log_start,
            clean: superblock.clean,
            force: config.force,
        }
    }

    /// The pages of such an array, none of them loaded.
    pub(in crate::array) fn empty_pages(&self, geometry: Geometry, array: Uuid) -> Pages {
        Pages::new(geometry, self.checksums, self.key, array, self.cache_pages_max, self.pages_offset)
    }

    /// An empty log of such an array, of `width` members.
    pub(in crate::array) fn empty_journal(&self, array: Uuid, width: usize) -> Journal {
        let heads = vec![0; width];
        let first = self.start.sequence;
        self.journal(array, heads, first, BatchHash::default())
    }

    /// A log of such an array whose next batch is `next`; `heads`: where it goes in each ring.
    pub(in crate::array) fn journal(
        &self,
        array: Uuid,
        heads: Vec<u32>,
        next: u64,
        previous: BatchHash,
    ) -> Journal {
        let site = LogSite { key: self.key, array, ring_blocks: self.ring_blocks() };
        Journal::new(site, heads, next, previous)
    }

    pub(in crate::array) fn ring_blocks(&self) -> u32 {
        // The format bounds the log region far below 2^32 blocks; blocks beyond that would go unused.
        u32::try_from(self.log.len / LOG_BLOCK_BYTES as u64).unwrap_or(u32::MAX - 1)
    }
}
