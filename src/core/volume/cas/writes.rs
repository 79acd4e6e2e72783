//! Writes: edges are filled up, blocks hashed, duplicates looked for, and records made. Rules D1 and J1.

use super::ledger::Found as Mapped;
use super::place::{self, PageAccess};
use super::space::Need;
use super::work::{Body, Found, NewBlock, Op, PART_BLOCKS, Reader, RequestKind, Write, WriteStage};
use super::{BLOCK, CasVolume, VOLUME_WINDOW_BITS};
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::{Buf, BufMut};
use crate::codec::whole_hash_each;
use crate::format::cas::{
    CAS_BLOCK_BYTES, CasRecord, CatalogueSlot, ChunkHash, ChunkId, PageName, SegmentIndex,
};
use crate::volume::api::{ClientError, RequestId};
use std::collections::HashMap;
use std::ops::Range;

/// A chunk that is used more often is stored once more: the count would end.
const COUNT_MAX: u16 = u16::MAX - 2 * PART_BLOCKS as u16;

impl CasVolume {
    /// Most blocks of an operation: their records fit an entry of the journal.
    fn part_blocks(&self) -> u64 {
        PART_BLOCKS.min(8 * u64::from(self.facts.segment_blocks))
    }

    /// Begins a client's write.
    pub(super) fn write(&mut self, id: RequestId, volume: CatalogueSlot, offset: u64, data: &Buf, fua: bool) {
        let blocks = (offset % BLOCK + data.len() as u64).div_ceil(BLOCK);
        if !self.has_room_for(blocks) {
            return self.ended.push((id, Err(ClientError::NoSpace)));
        }
        let request = self.start_request(id, RequestKind::Change { fua });
        let (mut at, mut taken) = (offset, 0);
        let span = self.part_blocks() * BLOCK;
        while taken < data.len() {
            let len = (((at / span + 1) * span - at) as usize).min(data.len() - taken);
            self.add_write(request, volume, at, &data.slice(taken..taken + len));
            (at, taken) = (at + len as u64, taken + len);
        }
    }

    /// Begins a client's zeroing.
    pub(super) fn zero(&mut self, id: RequestId, volume: CatalogueSlot, range: Range<u64>, fua: bool) {
        let request = self.start_request(id, RequestKind::Change { fua });
        // Ends with the last part, of which there may be none.
        self.work.requests[request].pending += 1;
        let (whole_start, whole_end) = (range.start.next_multiple_of(BLOCK), range.end / BLOCK * BLOCK);
        if whole_start > whole_end {
            self.add_zeroes(request, volume, range);
        } else {
            self.add_zeroes(request, volume, range.start..whole_start);
            self.add_zeroes(request, volume, whole_end..range.end);
            if whole_start < whole_end {
                let (first, count) = (whole_start / BLOCK, (whole_end - whole_start) / BLOCK);
                self.add_op(request, volume, first, Body::Holes(count));
            }
        }
        self.part_ended(request, None);
    }

    /// Adds a write of zeroes within a block.
    fn add_zeroes(&mut self, request: usize, volume: CatalogueSlot, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let zeroes = self.pool.alloc_zeroed((range.end - range.start) as usize).freeze();
        self.add_write(request, volume, range.start, &zeroes);
    }

    /// Adds a part of a write.
    fn add_write(&mut self, request: usize, volume: CatalogueSlot, offset: u64, data: &Buf) {
        let first = offset / BLOCK;
        let (mut blocks, mut taken) = (Vec::new(), 0);
        while taken < data.len() {
            let within = ((offset + taken as u64) % BLOCK) as usize;
            let len = (CAS_BLOCK_BYTES - within).min(data.len() - taken);
            blocks.push(NewBlock {
                data: data.slice(taken..taken + len),
                edge: (len < CAS_BLOCK_BYTES).then_some(within),
                hash: [0; 32],
                found: Found::Unknown,
                is_fresh: false,
            });
            taken += len;
        }
        self.add_op(request, volume, first, Body::Blocks(blocks));
    }

    fn add_op(&mut self, request: usize, volume: CatalogueSlot, first: u64, body: Body) {
        let count = match &body {
            Body::Blocks(blocks) => blocks.len() as u64,
            Body::Holes(count) => *count,
        };
        self.work.requests[request].pending += 1;
        let start = u64::from(volume.0) << (VOLUME_WINDOW_BITS - BLOCK.trailing_zeros()) | first;
        let range = start..start + count;
        let stage = WriteStage::Lock;
        let write =
            Write { request, volume, first, body, stage, range: range.clone(), pending: 0, failed: None };
        let key = self.work.ops.insert(Op::Write(write));
        if self.work.locks.lock(range, key) {
            self.write_of(key).stage = WriteStage::Edges;
            self.work.ready.push_back(key);
        }
    }

    pub(super) fn write_of(&mut self, key: usize) -> &mut Write {
        match &mut self.work.ops[key] {
            Op::Write(write) => write,
            _ => unreachable!("operation {key} is a write"),
        }
    }

    pub(super) fn blocks_of_write(&mut self, key: usize) -> &mut [NewBlock] {
        match &mut self.write_of(key).body {
            Body::Blocks(blocks) => blocks,
            Body::Holes(_) => &mut [],
        }
    }

    /// Advances a write until it waits.
    pub(super) fn advance_write(&mut self, key: usize) {
        if self.write_of(key).failed.is_some() && self.write_of(key).pending == 0 {
            return self.end_write(key, None);
        }
        loop {
            let before = self.write_of(key).stage;
            match before {
                WriteStage::Lock | WriteStage::Place | WriteStage::Logged => return,
                WriteStage::Edges => self.fill_edges(key),
                WriteStage::Find => self.find(key),
                WriteStage::Join => self.try_join(key),
            }
            if !self.work.ops.contains(key) || self.write_of(key).stage == before {
                return;
            }
        }
    }

    /// Reads the blocks that are changed in part; without such blocks, everything is hashed.
    fn fill_edges(&mut self, key: usize) {
        if self.write_of(key).pending > 0 {
            return;
        }
        let (volume, first) = (self.write_of(key).volume, self.write_of(key).first);
        let blocks = self.blocks_of_write(key);
        let edges: Vec<usize> =
            blocks.iter().enumerate().filter(|(_, b)| b.edge.is_some()).map(|(at, _)| at).collect();
        if edges.is_empty() {
            hash_all(blocks);
            self.write_of(key).stage = WriteStage::Find;
            return;
        }
        self.write_of(key).pending = edges.len();
        for at in edges {
            let buf = self.pool.alloc(CAS_BLOCK_BYTES);
            let reader = Reader::Edge { op: key, at };
            let read = self.add_read(reader, volume, (first + at as u64) * BLOCK, buf);
            self.work.ready.push_back(read);
        }
    }

    /// A block that is changed in part was read.
    pub(super) fn edge_read(
        &mut self,
        key: usize,
        at: usize,
        old: Option<BufMut>,
        error: Option<ClientError>,
    ) {
        self.write_of(key).pending -= 1;
        let block = &mut self.blocks_of_write(key)[at];
        if let (Some(mut whole), Some(within)) = (old, block.edge.take()) {
            whole[within..within + block.data.len()].copy_from_slice(&block.data);
            block.data = whole.freeze();
        }
        let write = self.write_of(key);
        write.failed = write.failed.or(error);
        if write.pending == 0 {
            self.work.ready.push_back(key);
        }
    }

    /// Looks for chunks that are stored already, and takes ids for the others.
    fn find(&mut self, key: usize) {
        let mut missing: Vec<PageName> = Vec::new();
        for at in 0..self.blocks_of_write(key).len() {
            let block = &self.blocks_of_write(key)[at];
            if block.found != Found::Unknown {
                continue;
            }
            let (hash, is_fresh) = (block.hash, block.is_fresh);
            if let Some(id) = self.work.placing.get(&hash).and_then(|users| users.first()).copied() {
                let id = self.pending_id(id);
                self.store.ids.share(id);
                self.work.placing.entry(hash).or_default().push((key, at));
                self.blocks_of_write(key)[at].found = Found::Pending(id);
                self.write_of(key).pending += 1;
                continue;
            }
            match if is_fresh { Ok(None) } else { self.duplicate(&hash) } {
                Err(name) => missing.push(name),
                Ok(Some(id)) => self.blocks_of_write(key)[at].found = Found::Stored(id),
                Ok(None) => {
                    let chunks = self.store.chunks;
                    let Some(id) = self.store.ids.take(&self.store.pages, chunks, &mut missing) else {
                        if missing.is_empty() {
                            return self.end_write(key, Some(ClientError::NoSpace));
                        }
                        continue;
                    };
                    self.work.placing.insert(hash, vec![(key, at)]);
                    self.work.pending.push_back((key, at));
                    self.blocks_of_write(key)[at].found = Found::Pending(id);
                    self.write_of(key).pending += 1;
                }
            }
        }
        if !missing.is_empty() {
            missing.sort_unstable();
            missing.dedup();
            return missing.into_iter().for_each(|name| self.wait_for_page(name, key));
        }
        let write = self.write_of(key);
        write.stage = if write.pending > 0 { WriteStage::Place } else { WriteStage::Join };
    }

    /// The id that a block that waits for its place will have.
    pub(super) fn pending_id(&mut self, (key, at): (usize, usize)) -> ChunkId {
        match self.blocks_of_write(key)[at].found {
            Found::Pending(id) => id,
            other => unreachable!("a block without a place, not {other:?}"),
        }
    }

    /// A chunk with this hash that may be used once more (D1).
    fn duplicate(&self, hash: &ChunkHash) -> Result<Option<ChunkId>, PageName> {
        for id in self.store.index.find(hash) {
            if self.matches(id, hash)? {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    fn matches(&self, id: ChunkId, hash: &ChunkHash) -> Result<bool, PageName> {
        let Some(chunk) = self.store.chunk(id)? else { return Ok(false) };
        if is_off(Mutation::CasDuplicateByItsTag) {
            return Ok(true);
        }
        Ok(chunk.hash == *hash && chunk.count <= COUNT_MAX)
    }

    /// Joins the journal, if all pages are in memory and what was found still holds.
    fn try_join(&mut self, key: usize) {
        match self.check(key) {
            Err(missing) => missing.into_iter().for_each(|name| self.wait_for_page(name, key)),
            Ok(false) => self.write_of(key).stage = WriteStage::Find,
            Ok(true) => {
                let records = self.records_of(key, |found| found);
                let missing = self.missing_for(&records);
                if !missing.is_empty() {
                    return missing.into_iter().for_each(|name| self.wait_for_page(name, key));
                }
                let bytes: usize = records.iter().map(CasRecord::bytes).sum();
                let need = match self.write_of(key).body {
                    Body::Holes(_) => Need::Room,
                    Body::Blocks(_) => Need::Data,
                };
                if !self.make_room(need, bytes, 0) {
                    return self.work.starved.push(key);
                }
                self.join_write(key, records);
            }
        }
    }

    /// Whether all chunks that the records would name without storing them still count, and do so until they
    /// are named (D1); those that do not are looked for again. `Err`: pages that are missing.
    pub(super) fn check(&mut self, key: usize) -> Result<bool, Vec<PageName>> {
        let (mut missing, mut stale) = (Vec::new(), Vec::new());
        for at in 0..self.blocks_of_write(key).len() {
            let NewBlock { found, hash, .. } = self.blocks_of_write(key)[at];
            let holds = match found {
                Found::Stored(_) if is_off(Mutation::CasDuplicateNotCheckedAgain) => continue,
                Found::Stored(id) => self.matches(id, &hash),
                Found::Placed(id, segment, block) => self.may_place(id, (segment, block)),
                Found::Unknown => Ok(false),
                Found::Hole | Found::Pending(_) => continue,
            };
            match holds {
                Err(name) => missing.push(name),
                Ok(true) => {}
                Ok(false) => stale.push(at),
            }
        }
        self.overtaken(key, &mut stale, &mut missing);
        missing.sort_unstable();
        missing.dedup();
        if !missing.is_empty() {
            return Err(missing);
        }
        for at in &stale {
            let found = std::mem::replace(&mut self.blocks_of_write(key)[*at].found, Found::Unknown);
            if let Found::Placed(id, segment, _) = found {
                self.store.ids.release(id);
                self.let_go(segment);
            }
        }
        Ok(stale.is_empty())
    }

    /// Whether a chunk that has its place may join: it is stored by another write and counts, or no chunk was
    /// stored in its place yet. What another has stored may be gone again.
    fn may_place(&self, id: ChunkId, (segment, block): (SegmentIndex, u32)) -> Result<bool, PageName> {
        let count = self.store.count(id)?;
        if count > 0 {
            return Ok(count <= COUNT_MAX);
        }
        let (name, at) = place::of_directory(segment, self.facts.segment_blocks, block);
        Ok(self.store.pages.page(name).ok_or(name)?.directory_id(at) == 0)
    }

    /// Adds blocks to `stale` whose chunk goes before it is named: a write with holes has several records,
    /// and one of them may take off what a later one names. Such a block is stored anew.
    fn overtaken(&mut self, key: usize, stale: &mut Vec<usize>, missing: &mut Vec<PageName>) {
        let (volume, first) = (self.write_of(key).volume, self.write_of(key).first);
        let found: Vec<Found> = self.blocks_of_write(key).iter().map(|block| block.found).collect();
        let has_holes = found.contains(&Found::Hole);
        if !has_holes || !found.iter().any(|found| matches!(found, Found::Stored(_) | Found::Placed(..))) {
            return;
        }
        let mut change: HashMap<ChunkId, i64> = HashMap::new();
        let mut at = 0;
        while at < found.len() {
            let is_hole = |found: &Found| *found == Found::Hole;
            let run = found[at..].iter().take_while(|next| is_hole(next) == is_hole(&found[at])).count();
            for (block, found) in found.iter().enumerate().skip(at).take(run) {
                let (Found::Stored(id) | Found::Placed(id, ..)) = *found else { continue };
                let counted = match self.store.count(id) {
                    Ok(count) => i64::from(count),
                    Err(name) => {
                        missing.push(name);
                        continue;
                    }
                };
                let change = change.entry(id).or_default();
                // Without a count it is stored by this write itself.
                if counted > 0 && counted + *change <= 0 && !stale.contains(&block) {
                    self.blocks_of_write(key)[block].is_fresh = true;
                    stale.push(block);
                } else {
                    *change += 1;
                }
            }
            for block in at..at + run {
                match self.store.ledger.lookup(&self.store.pages, volume, first + block as u64) {
                    Ok(Mapped::Chunk(id)) => *change.entry(id).or_default() -= 1,
                    Ok(Mapped::NotHere(name)) => missing.push(name),
                    Ok(Mapped::Hole) | Err(_) => {}
                }
            }
            at += run;
        }
    }

    /// Pages that records need and that are not in memory.
    pub(super) fn missing_for(&self, records: &[CasRecord]) -> Vec<PageName> {
        let mut missing = Vec::new();
        for record in records {
            self.store.ledger.missing(&self.store.pages, record, &mut missing);
        }
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// The records of a write. `placed` says where its chunks lie.
    pub(super) fn records_of(
        &mut self,
        key: usize,
        mut placed: impl FnMut(Found) -> Found,
    ) -> Vec<CasRecord> {
        let write = self.write_of(key);
        let (volume, first) = (write.volume, write.first);
        let blocks = match &write.body {
            Body::Holes(count) => return vec![CasRecord::Unmap { volume, block: first, count: *count }],
            Body::Blocks(blocks) => blocks,
        };
        let mut found: Vec<(Found, ChunkHash)> =
            blocks.iter().map(|block| (placed(block.found), block.hash)).collect();
        let mut stores: Vec<CasRecord> = Vec::new();
        let mut stored: Vec<ChunkId> = Vec::new();
        for (found, hash) in &mut found {
            let Found::Placed(id, segment, block) = *found else { continue };
            *found = Found::Stored(id);
            if stored.contains(&id) || self.store.count(id).is_ok_and(|count| count > 0) {
                continue;
            }
            stored.push(id);
            add_stored(&mut stores, segment, block, (id, *hash));
        }
        let mut maps: Vec<CasRecord> = Vec::new();
        for ((found, _), block) in found.iter().zip(first..) {
            match (*found, maps.last_mut()) {
                (Found::Hole, Some(CasRecord::Unmap { count, .. })) => *count += 1,
                (Found::Hole, _) => maps.push(CasRecord::Unmap { volume, block, count: 1 }),
                (Found::Stored(id), Some(CasRecord::Map { ids, .. })) => ids.push(id),
                (Found::Stored(id), _) => maps.push(CasRecord::Map { volume, block, ids: vec![id] }),
                (other, _) => unreachable!("a block that joins is not {other:?}"),
            }
        }
        stores.extend(maps);
        stores
    }

    /// The records join, and the write waits for its entry.
    pub(super) fn join_write(&mut self, key: usize, records: Vec<CasRecord>) {
        records.into_iter().for_each(|record| self.store.join(record));
        if !is_off(Mutation::CasAnsweredBeforeEntry) {
            self.store.journal.wait(key);
        }
        for at in 0..self.blocks_of_write(key).len() {
            if let Found::Placed(id, segment, _) = self.blocks_of_write(key)[at].found {
                self.store.ids.release(id);
                self.let_go(segment);
            }
        }
        let write = self.write_of(key);
        write.stage = WriteStage::Logged;
        let range = write.range.clone();
        write.body = Body::Holes(0);
        self.unlock(&range);
        if is_off(Mutation::CasAnsweredBeforeEntry) {
            self.write_logged(key);
        }
    }

    pub(super) fn let_go(&mut self, segment: SegmentIndex) {
        if self.store.segments.let_go(segment) {
            self.store.look_at(segment);
        }
    }

    fn unlock(&mut self, range: &Range<u64>) {
        for key in self.work.locks.unlock(range) {
            self.write_of(key).stage = WriteStage::Edges;
            self.work.ready.push_back(key);
        }
    }

    /// The entry of a write is answered.
    pub(super) fn write_logged(&mut self, key: usize) {
        let Op::Write(write) = self.work.ops.remove(key) else { unreachable!("a write waits for its entry") };
        self.part_ended(write.request, None);
    }

    /// Ends a write that cannot be done, whose records have not joined, as soon as nothing of it is under
    /// way: others may wait for its chunks.
    pub(super) fn end_write(&mut self, key: usize, error: Option<ClientError>) {
        let write = self.write_of(key);
        if matches!(write.stage, WriteStage::Lock | WriteStage::Logged) {
            return;
        }
        write.failed = write.failed.or(error).or(Some(ClientError::Io));
        self.withdraw_chunks(key);
        if self.write_of(key).pending > 0 {
            return;
        }
        for at in 0..self.blocks_of_write(key).len() {
            if let Found::Placed(id, segment, _) = self.blocks_of_write(key)[at].found {
                self.store.ids.release(id);
                self.let_go(segment);
            }
        }
        let Op::Write(write) = self.work.ops.remove(key) else { unreachable!("operation {key} is a write") };
        self.unlock(&write.range);
        self.part_ended(write.request, write.failed);
    }

    /// Chunks of a write that ends need no place, unless one is being written, or others want them.
    fn withdraw_chunks(&mut self, key: usize) {
        for at in 0..self.blocks_of_write(key).len() {
            let NewBlock { found: Found::Pending(id), hash, .. } = self.blocks_of_write(key)[at] else {
                continue;
            };
            let waiting = self.work.pending.iter().position(|other| *other == (key, at));
            let users = self.work.placing.entry(hash).or_default();
            let is_first = users.first() == Some(&(key, at));
            if is_first && waiting.is_none() {
                continue;
            }
            users.retain(|other| *other != (key, at));
            match (waiting, users.first().copied()) {
                (Some(place), Some(next)) => self.work.pending[place] = next,
                (Some(place), None) => {
                    self.work.pending.remove(place);
                    self.work.placing.remove(&hash);
                }
                (None, _) => {}
            }
            self.store.ids.release(id);
            self.blocks_of_write(key)[at].found = Found::Unknown;
            self.write_of(key).pending -= 1;
        }
    }

    /// A chunk has its place: so have all blocks that wait for it.
    pub(super) fn placed(&mut self, hash: &ChunkHash, segment: SegmentIndex, block: u32) {
        let users = self.work.placing.remove(hash).unwrap_or_default();
        for (key, at) in users {
            let id = self.pending_id((key, at));
            self.blocks_of_write(key)[at].found = Found::Placed(id, segment, block);
            self.store.segments.hold(segment, 1);
            let write = self.write_of(key);
            write.pending -= 1;
            if write.pending == 0 {
                if write.stage == WriteStage::Place {
                    write.stage = WriteStage::Join;
                }
                self.work.ready.push_back(key);
            }
        }
    }
}

/// Hashes blocks, and finds those of zeroes.
fn hash_all(blocks: &mut [NewBlock]) {
    for block in blocks.iter_mut().filter(|block| is_zero(&block.data)) {
        block.found = Found::Hole;
    }
    let data: Vec<Buf> =
        blocks.iter().filter(|b| b.found == Found::Unknown).map(|b| b.data.clone()).collect();
    let mut rest = blocks.iter_mut().filter(|block| block.found == Found::Unknown);
    let whole = data.iter().map(|data| data[..].try_into().expect("a whole block"));
    whole_hash_each(whole, |hash| {
        if let Some(block) = rest.next() {
            block.hash = *hash;
        }
    });
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.as_chunks::<32>().0.iter().all(|chunk| *chunk == [0; 32])
}

/// Adds a chunk to the record before it, if it lies behind that one's.
fn add_stored(records: &mut Vec<CasRecord>, segment: SegmentIndex, block: u32, chunk: (ChunkId, ChunkHash)) {
    if let Some(CasRecord::Store { segment: last, block: first, chunks }) = records.last_mut()
        && *last == segment
        && *first + chunks.len() as u32 == block
    {
        return chunks.push(chunk);
    }
    records.push(CasRecord::Store { segment, block, chunks: vec![chunk] });
}
