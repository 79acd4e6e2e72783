//! Compaction: chunks of segments in which little is used move to one, and these become free. Rules D2 and
//! K3.
//!
//! One round at a time: some victims are read and verified, what is used of them is written to free segments,
//! and records say so. A segment whose chunks cannot be read is left alone.

use super::place::{self, PageAccess};
use super::reads::filled;
use super::space::{Need, VICTIMS_MAX};
use super::{CasVolume, Purpose};
use crate::array::mutation::{Mutation, is_off};
use crate::array::{StripeReply, StripeRequest};
use crate::block_io::Buf;
use crate::codec::whole_hash_each;
use crate::format::cas::{
    CAS_BLOCK_BYTES, CasRecord, ChunkHash, ChunkId, Moved, PageName, SegmentEntry, SegmentIndex,
};
use crate::units::StripeIndex;
use crate::volume::api::ClientError;
use std::collections::HashSet;

/// The round under way.
#[derive(Default)]
pub(super) struct Compaction {
    stage: Stage,
    victims: Vec<SegmentIndex>,
    /// Segments that get what is used of them.
    targets: Vec<SegmentIndex>,
    /// Reads or writes that have not ended.
    in_flight: usize,
    /// What is used of the victims, with its bytes once they are read.
    chunks: Vec<Moving>,
    /// Segments with chunks that could not be read.
    bad: HashSet<SegmentIndex>,
    /// There was nothing to gain when it was looked at last, at this state of the journal.
    idle_at: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    /// Finds out what is used.
    Look,
    Read,
    /// Waits for free segments.
    Write,
    Join,
}

/// A chunk on its way.
struct Moving {
    id: ChunkId,
    hash: ChunkHash,
    from: (SegmentIndex, u32),
    data: Option<Buf>,
    to: Option<(SegmentIndex, u32)>,
}

impl Compaction {
    /// Whether no round is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.stage == Stage::Idle
    }

    /// Whether it could gain nothing at this state of the journal.
    pub(super) fn is_idle_at(&self, sequence: u64) -> bool {
        self.stage == Stage::Idle && self.idle_at == Some(sequence)
    }
}

impl CasVolume {
    /// Advances the round, or begins one that pays.
    pub(super) fn pump_compaction(&mut self) {
        loop {
            let before = self.compaction.stage;
            match before {
                Stage::Idle => self.choose_victims(),
                Stage::Look => self.look_at_victims(),
                Stage::Read => {}
                Stage::Write => self.write_moved(),
                Stage::Join => self.join_moved(),
            }
            if self.compaction.stage == before {
                return;
            }
        }
    }

    fn choose_victims(&mut self) {
        let sequence = self.store.journal.sequence();
        if !self.is_short() || self.compaction.idle_at == Some(sequence) {
            return;
        }
        let whole = self.facts.segment_blocks;
        let mut found: Vec<(u32, SegmentIndex)> = (0..self.facts.segments)
            .map(SegmentIndex)
            .filter_map(|segment| {
                let entry = self.store.segment(segment);
                let is_victim = match entry.kind {
                    SegmentEntry::DATA => true,
                    SegmentEntry::JOURNAL => !self.store.journal.is_needed(segment),
                    _ => false,
                };
                let live = entry.live.get() / 256;
                let may_move = is_victim && live > 0 && live < whole && !self.store.segments.is_held(segment);
                (may_move && !self.compaction.bad.contains(&segment)).then_some((live, segment))
            })
            .collect();
        found.sort_unstable();
        let (mut victims, mut live) = (Vec::new(), 0);
        // One of the free segments is for the journal.
        let targets = self.store.segments.free().saturating_sub(self.reserve(Need::Room) + 1) as u32;
        for (used, segment) in found.into_iter().take(VICTIMS_MAX) {
            if (live + used).div_ceil(whole) > targets {
                break;
            }
            // More than one segment of chunks only where that frees more.
            if live + used > whole && victims.len() as u32 > live.div_ceil(whole) {
                break;
            }
            live += used;
            victims.push(segment);
        }
        if victims.len() as u32 <= live.div_ceil(whole) {
            self.compaction.idle_at = Some(sequence);
            self.spread_metadata();
            return;
        }
        self.compaction.victims = victims;
        self.compaction.stage = Stage::Look;
    }

    /// Has the next root write pages of metadata segments with much room elsewhere.
    fn spread_metadata(&mut self) {
        let half = u64::from(self.facts.segment_blocks / 2);
        let sparse: HashSet<SegmentIndex> = self.store.segments.sparse(half + 1).into_iter().collect();
        if sparse.len() < 2 {
            return;
        }
        let names = self.store.pages.pages_at(|segment| sparse.contains(&segment));
        let mut touched = false;
        for name in names {
            if self.store.pages.touch(name) {
                touched = true;
            } else {
                self.load_page(name);
            }
        }
        if touched {
            self.checkpoint.want();
        }
    }

    /// A page cannot be read that may have been wanted to find out what is used of the victims.
    pub(super) fn give_up_look(&mut self) {
        if self.compaction.stage == Stage::Look {
            let victims = std::mem::take(&mut self.compaction.victims);
            self.compaction.bad.extend(victims);
            self.compaction.stage = Stage::Idle;
        }
    }

    /// Finds out what is used of the victims, and reads them.
    fn look_at_victims(&mut self) {
        let whole = self.facts.segment_blocks;
        let mut missing: Vec<PageName> = Vec::new();
        let mut chunks: Vec<Moving> = Vec::new();
        for segment in self.compaction.victims.clone() {
            for block in 0..whole {
                let (name, at) = place::of_directory(segment, whole, block);
                let Some(page) = self.store.pages.page(name) else {
                    missing.push(name);
                    continue;
                };
                let id = ChunkId(page.directory_id(at));
                if id.0 == 0 || id.0 >= self.store.chunks {
                    continue;
                }
                match self.store.chunk(id) {
                    Err(name) => missing.push(name),
                    Ok(Some(chunk)) if (chunk.segment, chunk.block) == (segment, block) => {
                        let from = (segment, block);
                        chunks.push(Moving { id, hash: chunk.hash, from, data: None, to: None });
                    }
                    Ok(_) => {}
                }
            }
        }
        if !missing.is_empty() {
            missing.sort_unstable();
            missing.dedup();
            return missing.into_iter().for_each(|name| self.load_page(name));
        }
        self.compaction.chunks = chunks;
        self.compaction.stage = Stage::Read;
        self.compaction.in_flight = self.compaction.victims.len();
        for (at, segment) in self.compaction.victims.clone().into_iter().enumerate() {
            let buf = self.pool.alloc(whole as usize * CAS_BLOCK_BYTES);
            self.ask_blocks(Purpose::Victim(at), segment, 0, buf);
        }
    }

    /// A victim was read.
    pub(super) fn victim_read(&mut self, at: usize, result: Result<StripeReply, ClientError>) {
        let segment = self.compaction.victims[at];
        self.compaction.in_flight -= 1;
        let mine = self.compaction.chunks.iter_mut().filter(|chunk| chunk.from.0 == segment);
        if let Ok(reply) = result {
            let buf = filled(reply).freeze();
            for chunk in mine {
                let from = chunk.from.1 as usize * CAS_BLOCK_BYTES;
                let data = buf.slice(from..from + CAS_BLOCK_BYTES);
                let mut is_right = false;
                let block: &[u8; CAS_BLOCK_BYTES] = data[..].try_into().expect("a whole block");
                whole_hash_each(std::iter::once(block), |hash| is_right = *hash == chunk.hash);
                chunk.data = is_right.then_some(data);
            }
        }
        if self.compaction.in_flight > 0 {
            return;
        }
        let bad: Vec<SegmentIndex> =
            self.compaction.chunks.iter().filter(|c| c.data.is_none()).map(|c| c.from.0).collect();
        self.compaction.bad.extend(bad);
        self.compaction.chunks.retain(|chunk| chunk.data.is_some());
        self.compaction.stage = Stage::Write;
    }

    /// Writes what is used to free segments.
    fn write_moved(&mut self) {
        let whole = self.facts.segment_blocks as usize;
        while let Some(first) = self.compaction.chunks.iter().position(|chunk| chunk.to.is_none()) {
            let record_bytes = CasRecord::Open { segment: SegmentIndex(0), kind: 0 }.bytes();
            let record = match self.make_room(Need::Room, record_bytes, 0) {
                true => self.open_next(Need::Room, SegmentEntry::DATA),
                false => None,
            };
            let Some(record) = record else {
                self.want_root_for_room(Need::Room);
                if self.is_stuck() {
                    // Those that have a place move.
                    self.compaction.chunks.retain(|chunk| chunk.to.is_some());
                    continue;
                }
                return;
            };
            let CasRecord::Open { segment, .. } = record else { unreachable!("it opens a segment") };
            self.store.join(record);
            self.store.segments.hold(segment, 1);
            self.compaction.targets.push(segment);
            let mut parts: Vec<Buf> = Vec::new();
            for (block, chunk) in self.compaction.chunks[first..].iter_mut().take(whole).enumerate() {
                chunk.to = Some((segment, block as u32));
                parts.extend(chunk.data.clone());
            }
            let left = whole - parts.len();
            if left > 0 {
                parts.push(self.pool.alloc_zeroed(left * CAS_BLOCK_BYTES).freeze());
            }
            self.compaction.in_flight += 1;
            let stripe = StripeIndex(segment.0.into());
            let request = StripeRequest::WriteStripe { stripe, parts: parts.clone(), fua: false };
            self.ask(Purpose::Moved(segment, parts), request);
        }
        if self.compaction.in_flight == 0 {
            self.compaction.stage = Stage::Join;
        }
    }

    /// A segment of moved chunks is written.
    pub(super) fn moved_written(&mut self) {
        self.compaction.in_flight -= 1;
    }

    /// The records join, of those chunks that are still where they were.
    fn join_moved(&mut self) {
        while let Some(first) = self.compaction.chunks.first() {
            let Some((segment, block)) = first.to else { unreachable!("all have their places") };
            let most = self.facts.segment_blocks as usize / 2;
            let mut record: Vec<Moved> = Vec::new();
            let mut taken = 0;
            for chunk in self.compaction.chunks.iter().take(most) {
                let found = match self.store.chunk(chunk.id) {
                    Ok(found) => found,
                    Err(name) => return self.load_page(name),
                };
                let is_there = is_off(Mutation::CasMoveNotChecked)
                    || found.is_some_and(|found| {
                        (found.segment, found.block) == chunk.from && found.hash == chunk.hash
                    });
                let follows = chunk.to == Some((segment, block + record.len() as u32));
                if (!record.is_empty() && !follows) || (record.is_empty() && taken > 0) {
                    break;
                }
                taken += 1;
                if !is_there {
                    break;
                }
                record.push(Moved { id: chunk.id, segment: chunk.from.0, block: chunk.from.1 });
            }
            if !record.is_empty() {
                let records = [CasRecord::Move { segment, block, chunks: record }];
                let missing = self.missing_for(&records);
                if !missing.is_empty() {
                    return missing.into_iter().for_each(|name| self.load_page(name));
                }
                if !self.make_room(Need::Room, records[0].bytes(), 0) {
                    if self.is_stuck() {
                        self.compaction.chunks.clear();
                        break;
                    }
                    return;
                }
                records.into_iter().for_each(|record| self.store.join(record));
            }
            self.compaction.chunks.drain(..taken);
        }
        let victims = std::mem::take(&mut self.compaction.victims);
        victims.into_iter().for_each(|segment| self.store.look_at(segment));
        let targets = std::mem::take(&mut self.compaction.targets);
        targets.into_iter().for_each(|segment| self.let_go(segment));
        self.compaction.stage = Stage::Idle;
    }
}
