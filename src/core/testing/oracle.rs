//! The content that clients may see: the history of every 4 KiB block since its content was last known, and
//! whether given bytes fit that history.
//!
//! Writes of one sector never overlap in time, so each sector has its versions in order. A block may show any
//! set of its writes that is consistent in time: with a write also every write that had ended before it
//! began, and each write wholly or not at all. After a crash the floor is every flushed write or, after a
//! mere process death, every acknowledged one. The version that a read has shown after a crash is the only
//! one allowed from then on. Every sector names its write and its place, so that garbage, mixes and other
//! blocks' data are recognised. Must not know of arrays.

use std::fmt;

/// Bytes of a block.
pub(super) const BLOCK_BYTES: usize = 4096;
/// Bytes of a sector: the smallest unit that a client writes.
pub(super) const SECTOR_BYTES: usize = 512;
/// Sectors of a block.
const SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;

/// Versions of a block that are kept although newer ones are stable: a log damaged beyond what the array
/// survives may bring them back, as far back as the log goes. There are at most 64 of them in the largest
/// ring that is damaged, an image in each block, and at most 16 that no ring has yet, one for each request
/// under way.
const VERSIONS_KEPT: usize = 80;

/// Write number of zeroes.
const ZEROES: u64 = 0;
/// From here on, numbers of common content: the same bytes in every block, again and again.
const COMMON: u64 = 1 << 40;
const IN_FLIGHT: u64 = u64::MAX;

/// The writes that must have survived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Floor {
    /// Every write that had been answered by this moment of the oracle's clock.
    Answered(u64),
    /// Every write that was flushed.
    Flushed,
    /// None: more is damaged than the array survives. Any recent version may be shown, but no garbage and no
    /// mix.
    Anything,
}

impl Floor {
    /// Every write that has been answered.
    pub const ALL_ANSWERED: Floor = Floor::Answered(IN_FLIGHT - 1);
}

/// A write that has begun.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// First sector of the volume.
    pub first: usize,
    /// Sectors.
    pub count: usize,
    /// Its number, 0 for zeroes.
    pub value: u64,
    began: u64,
}

/// Bytes that fit no allowed history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Sector of the volume.
    pub sector: usize,
    /// What is wrong with it.
    pub what: String,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} sector {}: {}", self.sector / SECTORS, self.sector % SECTORS, self.what)
    }
}

/// See the head of this file.
#[derive(Clone, Debug)]
pub struct Oracle {
    blocks: Vec<History>,
    clock: u64,
    last_value: u64,
    /// When each read under way began.
    readers: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
struct History {
    /// Version 0 of each sector.
    base: [u64; SECTORS],
    /// The write at index `i` is version `i + 1` of the sectors it covers.
    writes: Vec<Version>,
    /// For each sector, the newest version known to be on stable storage.
    flushed: [usize; SECTORS],
}

#[derive(Clone, Copy, Debug)]
struct Version {
    value: u64,
    sectors: u8,
    began: u64,
    ended: u64,
    /// A trim, which may have no effect.
    optional: bool,
}

impl Version {
    fn covers(&self, sector: usize) -> bool {
        self.sectors >> sector & 1 == 1
    }
}

impl Oracle {
    /// A volume of zeroes.
    #[must_use]
    pub fn new(volume_bytes: u64) -> Oracle {
        let blocks = (volume_bytes as usize).div_ceil(BLOCK_BYTES);
        Oracle { blocks: vec![History::default(); blocks], clock: 1, last_value: 0, readers: Vec::new() }
    }

    /// Blocks of the volume.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Sectors of the volume.
    #[must_use]
    pub fn sectors(&self) -> usize {
        self.blocks.len() * SECTORS
    }

    /// The present moment; the clock advances with each call.
    pub fn now(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Begins a read; versions that it may show are kept until it ends.
    pub fn begin_read(&mut self) -> u64 {
        let now = self.now();
        self.readers.push(now);
        now
    }

    /// Ends a read that began at `since`.
    pub fn end_read(&mut self, since: u64) {
        self.readers.retain(|began| *began != since);
    }

    fn oldest_reader(&self) -> u64 {
        self.readers.iter().copied().min().unwrap_or(u64::MAX)
    }

    /// Whether a write to one of these sectors is under way.
    #[must_use]
    pub fn is_busy(&self, first: usize, count: usize) -> bool {
        pieces(first, count).any(|(block, sectors)| {
            let under_way = |w: &&Version| w.ended == IN_FLIGHT && w.sectors & sectors != 0;
            self.blocks[block].writes.iter().rev().find(under_way).is_some()
        })
    }

    /// Begins a write; no other may be under way in its sectors.
    pub fn begin_write(&mut self, first: usize, count: usize) -> Written {
        self.last_value += 1;
        self.begin(first, count, self.last_value, false)
    }

    /// Begins a write of common content, of which there are many kinds: whole blocks of a kind are equal
    /// wherever they lie. No other write may be under way in its sectors.
    pub fn begin_common_write(&mut self, first: usize, count: usize, kind: u64) -> Written {
        self.begin(first, count, COMMON + kind, false)
    }

    /// Begins a zeroing; an advisory one may have no effect.
    pub fn begin_zeroes(&mut self, first: usize, count: usize, advisory: bool) -> Written {
        self.begin(first, count, ZEROES, advisory)
    }

    fn begin(&mut self, first: usize, count: usize, value: u64, optional: bool) -> Written {
        debug_assert!(!self.is_busy(first, count));
        let began = self.now();
        for (block, sectors) in pieces(first, count) {
            self.blocks[block].writes.push(Version { value, sectors, began, ended: IN_FLIGHT, optional });
        }
        Written { first, count, value, began }
    }

    /// The bytes that a write writes.
    #[must_use]
    pub fn bytes_of(written: &Written) -> Vec<u8> {
        let mut bytes = vec![0; written.count * SECTOR_BYTES];
        for (at, sector) in bytes.chunks_mut(SECTOR_BYTES).enumerate() {
            fill(written.value, written.first + at, sector);
        }
        bytes
    }

    /// Ends a write that succeeded.
    pub fn end_write(&mut self, written: &Written, fua: bool) {
        let now = self.now();
        let oldest = self.oldest_reader();
        for (block, _) in pieces(written.first, written.count) {
            let history = &mut self.blocks[block];
            let Some(at) = history.writes.iter().rposition(|w| w.began == written.began) else { continue };
            history.writes[at].ended = now;
            if fua && !history.writes[at].optional {
                history.flush_to(at);
                history.forget(oldest);
            }
        }
    }

    /// Ends a write that failed: it may or may not have taken effect.
    pub fn fail_write(&mut self, written: &Written) {
        let now = self.now();
        for (block, _) in pieces(written.first, written.count) {
            let failed = self.blocks[block].writes.iter_mut().rfind(|w| w.began == written.began);
            if let Some(write) = failed {
                (write.ended, write.optional) = (now, true);
            }
        }
    }

    /// Ends all reads.
    pub fn end_all_reads(&mut self) {
        self.readers.clear();
    }

    /// Ends a flush that began at `began` and succeeded.
    pub fn end_flush(&mut self, began: u64) {
        let oldest = self.oldest_reader();
        for history in self.blocks.iter_mut().filter(|history| !history.writes.is_empty()) {
            for at in 0..history.writes.len() {
                if history.writes[at].ended < began && !history.writes[at].optional {
                    history.flush_to(at);
                }
            }
            history.forget(oldest);
        }
    }

    /// Whether bytes read from `first_block` on are allowed.
    ///
    /// # Errors
    /// With the first sector that is not.
    pub fn check(&self, first_block: usize, bytes: &[u8], floor: Floor) -> Result<(), Wrong> {
        self.check_sectors(first_block * SECTORS, bytes, floor)
    }

    /// Whether bytes read from sector `first` on are allowed.
    ///
    /// # Errors
    /// With the first sector that is not.
    pub fn check_sectors(&self, first: usize, bytes: &[u8], floor: Floor) -> Result<(), Wrong> {
        let mut at = 0;
        for (block, sectors) in pieces(first, bytes.len() / SECTOR_BYTES) {
            let len = sectors.count_ones() as usize * SECTOR_BYTES;
            self.check_block(block, sectors, &bytes[at..at + len], floor)?;
            at += len;
        }
        Ok(())
    }

    fn check_block(&self, block: usize, sectors: u8, bytes: &[u8], floor: Floor) -> Result<(), Wrong> {
        let history = &self.blocks[block];
        let first = sectors.trailing_zeros() as usize;
        let mut shown = [Shown { newest: 0, certain: false }; SECTORS];
        for (at, bytes) in bytes.chunks(SECTOR_BYTES).enumerate() {
            let place = block * SECTORS + first + at;
            let wrong = |what| Wrong { sector: place, what };
            shown[first + at] = history.version_of(first + at, place, bytes).map_err(wrong)?;
            if history.writes.is_empty() {
                continue;
            }
            let needed = history.floor(first + at, floor);
            if shown[first + at].newest < needed {
                return Err(wrong(format!(
                    "shows {}, which {} has replaced for good ({floor:?})",
                    history.name(shown[first + at].newest, first + at),
                    history.name(needed, first + at)
                )));
            }
        }
        if !history.writes.is_empty() {
            history
                .check_mix(sectors, &shown)
                .map_err(|(sector, what)| Wrong { sector: block * SECTORS + sector, what })?;
        }
        Ok(())
    }

    /// Records that these bytes were served after a crash: from now on no others may be.
    pub fn observe(&mut self, first_block: usize, bytes: &[u8]) {
        for (block, bytes) in self.blocks[first_block..].iter_mut().zip(bytes.chunks(BLOCK_BYTES)) {
            let mut base = [ZEROES; SECTORS];
            for (base, sector) in base.iter_mut().zip(bytes.chunks(SECTOR_BYTES)) {
                *base = number_of(sector);
            }
            *block = History { base, ..History::default() };
        }
    }
}

/// The version of its sector that some bytes are.
#[derive(Clone, Copy)]
struct Shown {
    /// The newest version that the bytes can be.
    newest: usize,
    /// The bytes can be no other version.
    certain: bool,
}

impl History {
    /// Records that everything up to write `at` is on stable storage.
    fn flush_to(&mut self, at: usize) {
        for sector in (0..SECTORS).filter(|sector| self.writes[at].covers(*sector)) {
            self.flushed[sector] = self.flushed[sector].max(at + 1);
        }
    }

    /// Drops the oldest versions when there are many, they are stable, and no read that began at `oldest` or
    /// later may show them.
    fn forget(&mut self, oldest: u64) {
        let old = self.writes.len() / 2;
        if old < VERSIONS_KEPT || self.writes[..old].iter().any(|w| w.ended >= oldest) {
            return;
        }
        let newest =
            |sector| self.writes[..old].iter().rposition(|w| w.covers(sector)).map_or(0, |at| at + 1);
        if (0..SECTORS).any(|sector| self.flushed[sector] < newest(sector)) {
            return;
        }
        for sector in 0..SECTORS {
            if let Some(at) = newest(sector).checked_sub(1) {
                self.base[sector] = self.writes[at].value;
            }
            self.flushed[sector] = self.flushed[sector].saturating_sub(old);
        }
        self.writes.drain(..old);
    }

    fn floor(&self, sector: usize, floor: Floor) -> usize {
        match floor {
            Floor::Anything => 0,
            Floor::Flushed => self.flushed[sector],
            Floor::Answered(since) => {
                let answered = |w: &Version| w.covers(sector) && w.ended <= since && !w.optional;
                self.writes.iter().rposition(answered).map_or(0, |at| at + 1)
            }
        }
    }

    fn name(&self, version: usize, sector: usize) -> String {
        match version.checked_sub(1) {
            None => format!("the old content (write {})", self.base[sector]),
            Some(at) => format!("write {}", self.writes[at].value),
        }
    }

    fn version_of(&self, sector: usize, place: usize, bytes: &[u8]) -> Result<Shown, String> {
        let number = number_of(bytes);
        if number == ZEROES {
            if bytes.iter().any(|byte| *byte != 0) {
                return Err("garbage".into());
            }
            let zeroes = self.writes.iter().rposition(|w| w.value == ZEROES && w.covers(sector));
            return match zeroes {
                Some(at) => Ok(Shown { newest: at + 1, certain: false }),
                None if self.base[sector] == ZEROES => Ok(Shown { newest: 0, certain: false }),
                None => Err(format!("zeroes in place of {}", self.candidates(sector))),
            };
        }
        let place = place_in_content(number, place);
        let version = match self.writes.iter().rposition(|w| w.value == number && w.covers(sector)) {
            Some(at) => at + 1,
            None if self.base[sector] == number => 0,
            None => {
                let there = u64::from_le_bytes(bytes[8..16].try_into().expect("eight bytes"));
                let mut expected = [0; SECTOR_BYTES];
                fill(number, there as usize, &mut expected);
                return Err(if expected != *bytes {
                    format!("garbage in place of {}", self.candidates(sector))
                } else if there != place as u64 {
                    format!(
                        "write {number} of sector {there} of the volume, in place of {}",
                        self.candidates(sector)
                    )
                } else {
                    format!("write {number}, gone before, in place of {}", self.candidates(sector))
                });
            }
        };
        if !is_filled(number, place, bytes) {
            return Err(format!("garbage that begins like write {number}"));
        }
        Ok(Shown { newest: version, certain: number < COMMON })
    }

    fn candidates(&self, sector: usize) -> String {
        let mut all = vec![self.base[sector].to_string()];
        all.extend(self.writes.iter().filter(|w| w.covers(sector)).map(|w| w.value.to_string()));
        format!("one of the writes {}", all.join(", "))
    }

    /// Whether the sectors show one set of writes that is consistent in time.
    fn check_mix(&self, sectors: u8, shown: &[Shown; SECTORS]) -> Result<(), (usize, String)> {
        let seen = (0..SECTORS).filter(|sector| sectors >> sector & 1 == 1);
        let certain = seen.clone().filter(|sector| shown[*sector].certain && shown[*sector].newest > 0);
        let Some(latest) = certain.clone().map(|sector| self.writes[shown[sector].newest - 1].began).max()
        else {
            return Ok(());
        };
        let is_shown = |at: usize| certain.clone().any(|sector| shown[sector].newest == at + 1);
        for (at, write) in self.writes.iter().enumerate() {
            if !(is_shown(at) || (write.ended < latest && !write.optional)) {
                continue;
            }
            if let Some(sector) = seen.clone().find(|s| write.covers(*s) && shown[*s].newest <= at) {
                let name = self.name(shown[sector].newest, sector);
                return Err((sector, format!("a mix: {name} beside, or older than, write {}", write.value)));
            }
        }
        Ok(())
    }
}

/// Blocks that a range of sectors touches: (block, bit set of its sectors).
fn pieces(first: usize, count: usize) -> impl Iterator<Item = (usize, u8)> {
    let end = first + count;
    (first / SECTORS..end.div_ceil(SECTORS)).map(move |block| {
        let from = first.max(block * SECTORS) - block * SECTORS;
        let to = end.min((block + 1) * SECTORS) - block * SECTORS;
        (block, ((1u16 << to) - (1 << from)) as u8)
    })
}

fn number_of(sector: &[u8]) -> u64 {
    u64::from_le_bytes(sector[..8].try_into().expect("eight bytes"))
}

/// The place that content names: that of its sector, within the block where the content is common.
fn place_in_content(value: u64, sector: usize) -> usize {
    if value < COMMON { sector } else { sector % SECTORS }
}

fn word(value: u64, sector: usize, at: usize) -> u64 {
    let seed =
        value.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (sector as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
    (seed ^ at as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

/// Content of one sector: the write's number, the sector's, and words that follow from both.
fn fill(value: u64, sector: usize, bytes: &mut [u8]) {
    if value == ZEROES {
        bytes.fill(0);
        return;
    }
    let sector = place_in_content(value, sector);
    for (at, piece) in bytes.chunks_mut(8).enumerate() {
        let number = match at {
            0 => value,
            1 => sector as u64,
            _ => word(value, sector, at),
        };
        piece.copy_from_slice(&number.to_le_bytes());
    }
}

fn is_filled(value: u64, sector: usize, bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(16);
    head[8..] == (sector as u64).to_le_bytes()
        && rest.chunks(8).enumerate().all(|(at, piece)| *piece == word(value, sector, at + 2).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(parts: &[(&Written, std::ops::Range<usize>)]) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        for (written, sectors) in parts {
            for sector in sectors.clone() {
                fill(written.value, sector, &mut bytes[sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES]);
            }
        }
        bytes
    }

    #[test]
    fn a_crash_may_show_any_version_from_the_floor_on_and_none_before() {
        let mut oracle = Oracle::new(8192);
        let one = oracle.begin_write(0, 8);
        oracle.end_write(&one, true);
        let two = oracle.begin_write(0, 8);
        oracle.end_write(&two, false);
        let three = oracle.begin_write(0, 8);
        let now = Floor::Answered(oracle.now());
        let [one, two, three] = [one, two, three].map(|w| Oracle::bytes_of(&w));
        for (bytes, flushed, answered) in [
            (&[0; 4096].to_vec(), false, false),
            (&one, true, false),
            (&two, true, true),
            (&three, true, true),
        ] {
            assert_eq!(oracle.check(0, bytes, Floor::Flushed).is_ok(), flushed);
            assert_eq!(oracle.check(0, bytes, now).is_ok(), answered);
        }
    }

    #[test]
    fn a_flush_raises_the_floor_to_the_writes_answered_before_it_began() {
        let mut oracle = Oracle::new(4096);
        let one = oracle.begin_write(0, 8);
        oracle.end_write(&one, false);
        let began = oracle.now();
        let two = oracle.begin_write(0, 8);
        oracle.end_write(&two, false);
        oracle.end_flush(began);
        assert!(oracle.check(0, &[0; 4096], Floor::Flushed).is_err());
        assert!(oracle.check(0, &Oracle::bytes_of(&one), Floor::Flushed).is_ok());
        oracle.observe(0, &Oracle::bytes_of(&one));
        assert!(oracle.check(0, &Oracle::bytes_of(&one), Floor::Flushed).is_ok());
        assert!(oracle.check(0, &Oracle::bytes_of(&two), Floor::Flushed).is_err(), "what was seen stays");
    }

    #[test]
    fn mixes_are_found_and_independent_writes_are_none() {
        let mut oracle = Oracle::new(4096);
        let whole = oracle.begin_write(0, 8);
        oracle.end_write(&whole, false);
        // Two writes at the same time, then one after both.
        let left = oracle.begin_write(0, 2);
        let right = oracle.begin_write(4, 2);
        oracle.end_write(&left, false);
        oracle.end_write(&right, false);
        let last = oracle.begin_write(7, 1);
        let fits = |parts: &[(&Written, std::ops::Range<usize>)]| {
            oracle.check(0, &block(parts), Floor::Flushed).is_ok()
        };
        assert!(fits(&[(&whole, 0..8)]));
        assert!(fits(&[(&whole, 0..8), (&left, 0..2)]));
        assert!(fits(&[(&whole, 0..8), (&right, 4..6)]));
        assert!(fits(&[(&whole, 0..8), (&left, 0..2), (&right, 4..6), (&last, 7..8)]));
        assert!(!fits(&[(&whole, 0..8), (&left, 0..1)]), "half a write");
        assert!(!fits(&[(&whole, 0..8), (&left, 0..2), (&last, 7..8)]), "the last without what came before");
        assert!(!fits(&[(&whole, 0..4)]), "half a write beside zeroes");
    }

    #[test]
    fn garbage_and_other_places_are_told_apart() {
        let mut oracle = Oracle::new(8192);
        let one = oracle.begin_write(0, 16);
        oracle.end_write(&one, false);
        let bytes = Oracle::bytes_of(&one);
        let swapped = [&bytes[4096..], &bytes[..4096]].concat();
        let wrong = oracle.check(0, &swapped, Floor::Flushed).unwrap_err();
        assert!(wrong.what.contains("garbage that begins like write 1"), "{wrong}");
        let mut rotten = bytes.clone();
        rotten[700] ^= 1;
        assert_eq!(oracle.check(0, &rotten, Floor::Flushed).unwrap_err().sector, 1);
        oracle.end_flush(u64::MAX);
        assert!(oracle.check(0, &bytes, Floor::Flushed).is_ok());
    }

    #[test]
    fn common_content_is_the_same_in_all_blocks_and_garbage_elsewhere_is_found() {
        let mut oracle = Oracle::new(8192);
        let common = oracle.begin_common_write(0, 16, 3);
        let bytes = Oracle::bytes_of(&common);
        assert_eq!(bytes[..4096], bytes[4096..]);
        oracle.end_write(&common, true);
        assert!(oracle.check(0, &bytes, Floor::Flushed).is_ok());
        let shifted = [&bytes[512..], &bytes[..512]].concat();
        assert!(oracle.check(0, &shifted, Floor::Flushed).is_err(), "a sector of another place");
        let other = oracle.begin_write(0, 8);
        oracle.end_write(&other, true);
        assert!(oracle.check(0, &bytes, Floor::Flushed).is_err(), "it was replaced for good");
        let again = oracle.begin_common_write(0, 8, 3);
        oracle.end_write(&again, true);
        assert!(oracle.check(0, &bytes, Floor::Flushed).is_ok());
        assert!(oracle.check(0, &Oracle::bytes_of(&other), Floor::Flushed).is_err());
    }

    #[test]
    fn a_trim_may_or_may_not_have_happened() {
        let mut oracle = Oracle::new(4096);
        let one = oracle.begin_write(0, 8);
        oracle.end_write(&one, true);
        let trim = oracle.begin_zeroes(0, 8, true);
        oracle.end_write(&trim, true);
        let now = Floor::Answered(oracle.now());
        for floor in [now, Floor::Flushed] {
            assert!(oracle.check(0, &Oracle::bytes_of(&one), floor).is_ok());
            assert!(oracle.check(0, &[0; 4096], floor).is_ok());
        }
        let zeroes = oracle.begin_zeroes(0, 8, false);
        oracle.end_write(&zeroes, true);
        assert!(oracle.check(0, &Oracle::bytes_of(&one), Floor::Flushed).is_err());
    }
}
