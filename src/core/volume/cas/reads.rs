//! Reads: blocks are looked up, read from their segments and compared with their hashes. Rule D3.

use super::ledger::Found as Mapped;
use super::pages::PageLoad;
use super::place;
use super::store::Chunk;
use super::work::{Extents, Op, PART_BLOCKS, Piece, Read, Reader, RequestKind};
use super::{BLOCK, CasVolume, Purpose};
use crate::array::StripeReply;
use crate::array::mutation::{Mutation, is_off};
use crate::block_io::{BufMut, Pool};
use crate::codec::whole_hash_each;
use crate::format::cas::{CAS_BLOCK_BYTES, CatalogueSlot, PageName, PageSpace};
use crate::volume::api::{ClientError, RequestId};

/// A block whose chunk is never what the table says is given up after so many looks.
const ATTEMPTS_MAX: u32 = 16;

impl CasVolume {
    /// Begins a client's read.
    pub(super) fn read(
        &mut self,
        id: RequestId,
        volume: CatalogueSlot,
        offset: u64,
        buf: BufMut,
        sparse: bool,
    ) {
        let request = self.start_request(id, RequestKind::Read { parts: Vec::new(), sparse });
        let (mut at, mut rest, mut keys) = (offset, buf, Vec::new());
        while !rest.is_empty() {
            let end = (at / BLOCK / PART_BLOCKS + 1) * PART_BLOCKS * BLOCK;
            let len = ((end - at) as usize).min(rest.len());
            let tail = rest.split_off(len);
            let buf = std::mem::replace(&mut rest, tail);
            let reader = Reader::Client { request, place: keys.len() };
            keys.push(self.add_read(reader, volume, at, buf));
            at += len as u64;
        }
        let pending = keys.len();
        let state = &mut self.work.requests[request];
        state.pending = pending;
        if let RequestKind::Read { parts, .. } = &mut state.kind {
            parts.resize_with(pending, || None);
        }
        self.work.ready.extend(keys);
    }

    /// Adds a read of `buf.len()` bytes at `offset` of a volume.
    pub(super) fn add_read(
        &mut self,
        reader: Reader,
        volume: CatalogueSlot,
        offset: u64,
        buf: BufMut,
    ) -> usize {
        let (first, skip, len) = (offset / BLOCK, (offset % BLOCK) as usize, buf.len());
        let blocks = (skip + len).div_ceil(CAS_BLOCK_BYTES);
        let (whole, target) = match skip == 0 && len == blocks * CAS_BLOCK_BYTES {
            true => (buf, None),
            false => (self.pool.alloc(blocks * CAS_BLOCK_BYTES), Some(buf)),
        };
        let pieces = vec![Piece { buf: Some(whole), chunks: Vec::new() }];
        self.work.ops.insert(Op::Read(Read {
            reader,
            volume,
            first,
            skip,
            target,
            len,
            pieces,
            pending: 0,
            error: None,
            attempts: 0,
        }))
    }

    fn read_of(&mut self, key: usize) -> &mut Read {
        match &mut self.work.ops[key] {
            Op::Read(read) => read,
            _ => unreachable!("operation {key} is a read"),
        }
    }

    /// The chunk of a block; none for a hole, `Err` for a page that is not in memory.
    fn chunk_of(&self, volume: CatalogueSlot, block: u64) -> Result<Option<Chunk>, PageName> {
        match self.store.ledger.lookup(&self.store.pages, volume, block) {
            // A volume that went meanwhile has no blocks.
            Ok(Mapped::Hole) | Err(_) => Ok(None),
            Ok(Mapped::NotHere(name)) => Err(name),
            Ok(Mapped::Chunk(id)) => self.store.chunk(id),
        }
    }

    /// Looks the blocks up, and reads what is found.
    pub(super) fn advance_read(&mut self, key: usize) {
        let read = self.read_of(key);
        if read.pending > 0 {
            return;
        }
        let (volume, first) = (read.volume, read.first);
        let bytes: usize = read.pieces.iter().flat_map(|piece| &piece.buf).map(|buf| buf.len()).sum();
        let blocks = (bytes / CAS_BLOCK_BYTES) as u64;
        let found: Vec<_> = (first..first + blocks).map(|block| self.chunk_of(volume, block)).collect();
        let mut missing: Vec<PageName> = found.iter().filter_map(|found| found.err()).collect();
        if !missing.is_empty() {
            missing.dedup();
            return missing.into_iter().for_each(|name| self.wait_for_page(name, key));
        }
        let mut runs: Vec<(usize, Option<Chunk>, Vec<_>)> = Vec::new();
        for chunk in found.into_iter().flatten() {
            let follows = runs.last().is_some_and(|(len, first, _)| match (first, &chunk) {
                (None, None) => true,
                (Some(first), Some(chunk)) => {
                    chunk.segment == first.segment && chunk.block == first.block + *len as u32
                }
                _ => false,
            });
            match runs.last_mut().filter(|_| follows) {
                Some((len, _, chunks)) => {
                    *len += 1;
                    chunks.extend(chunk.map(|chunk| (chunk.id, chunk.hash)));
                }
                None => {
                    let chunks = chunk.iter().map(|chunk| (chunk.id, chunk.hash)).collect();
                    runs.push((1, chunk, chunks));
                }
            }
        }
        let read = self.read_of(key);
        let pieces = std::mem::take(&mut read.pieces);
        let mut rest = self.pool.join(pieces.into_iter().filter_map(|piece| piece.buf));
        let mut asked = Vec::new();
        for (at, (len, place, chunks)) in runs.into_iter().enumerate() {
            let tail = rest.split_off(len * CAS_BLOCK_BYTES);
            let mut buf = std::mem::replace(&mut rest, tail);
            let buf = match place {
                None => {
                    buf.fill(0);
                    Some(buf)
                }
                Some(place) => {
                    asked.push((at, place, buf));
                    None
                }
            };
            self.read_of(key).pieces.push(Piece { buf, chunks });
        }
        self.read_of(key).pending = asked.len();
        for (at, place, mut buf) in asked {
            let blocks = place.block..place.block + (buf.len() / CAS_BLOCK_BYTES) as u32;
            let journal = &self.store.journal;
            if blocks.clone().any(|block| journal.chunk(place.segment, block).is_some()) {
                // Not on the members yet.
                for (block, to) in blocks.zip(buf.chunks_exact_mut(CAS_BLOCK_BYTES)) {
                    match journal.chunk(place.segment, block) {
                        Some(chunk) => to.copy_from_slice(chunk),
                        None => to.fill(0),
                    }
                }
                let read = self.read_of(key);
                (read.pieces[at].buf, read.pending) = (Some(buf), read.pending - 1);
                continue;
            }
            self.ask_blocks(Purpose::Chunk(key, at), place.segment, place.block, buf);
        }
        if self.read_of(key).pending == 0 {
            self.end_read(key);
        }
    }

    /// A piece of a read is there.
    pub(super) fn chunk_read(&mut self, key: usize, at: usize, result: Result<StripeReply, ClientError>) {
        let read = self.read_of(key);
        read.pending -= 1;
        match result {
            Ok(reply) => read.pieces[at].buf = Some(filled(reply)),
            Err(error) => read.error = Some(error),
        }
        if read.pending == 0 {
            self.end_read(key);
        }
    }

    /// Everything was read: it is compared, and answered.
    fn end_read(&mut self, key: usize) {
        let read = self.read_of(key);
        let is_right = read.error.is_none() && read.pieces.iter().all(is_as_hashed);
        if !is_right && read.error.is_none() {
            read.attempts += 1;
            if read.attempts < ATTEMPTS_MAX {
                // The block may have another chunk by now, or the chunk lie elsewhere.
                return self.work.ready.push_back(key);
            }
            read.error = Some(ClientError::Io);
        }
        let Op::Read(read) = self.work.ops.remove(key) else { unreachable!("operation {key} is a read") };
        let (reader, error) = (read.reader, read.error);
        let part = error.is_none().then(|| answer(&self.pool, read));
        match reader {
            Reader::Client { request, place } => {
                if let RequestKind::Read { parts, .. } = &mut self.work.requests[request].kind {
                    parts[place] = part;
                }
                self.part_ended(request, error);
            }
            Reader::Edge { op, at } => self.edge_read(op, at, part.map(|(buf, _)| buf), error),
        }
    }

    /// Begins to look which blocks of a range are holes.
    pub(super) fn extents(&mut self, id: RequestId, volume: CatalogueSlot, offset: u64, len: u64) {
        let request = self.start_request(id, RequestKind::Extents(Vec::new()));
        let state = &mut self.work.requests[request];
        (state.pending, state.len) = (1, len);
        let op = Op::Extents(Extents { request, volume, range: offset..offset + len });
        let key = self.work.ops.insert(op);
        self.work.ready.push_back(key);
    }

    pub(super) fn advance_extents(&mut self, key: usize) {
        let Op::Extents(Extents { request, volume, range }) = &self.work.ops[key] else {
            unreachable!("operation {key} looks for holes")
        };
        let (request, volume, range) = (*request, *volume, range.clone());
        let mut runs: Vec<(u64, bool)> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let end = ((at / BLOCK + 1) * BLOCK).min(range.end);
            let is_hole = match self.store.ledger.lookup(&self.store.pages, volume, at / BLOCK) {
                Ok(Mapped::Hole) | Err(_) => true,
                Ok(Mapped::Chunk(_)) => false,
                Ok(Mapped::NotHere(name)) => return self.wait_for_page(name, key),
            };
            match runs.last_mut().filter(|(_, hole)| *hole == is_hole) {
                Some((bytes, _)) => *bytes += end - at,
                None => runs.push((end - at, is_hole)),
            }
            at = end;
        }
        self.work.ops.remove(key);
        if let RequestKind::Extents(found) = &mut self.work.requests[request].kind {
            *found = runs;
        }
        self.part_ended(request, None);
    }

    /// A page was read.
    pub(super) fn page_read(&mut self, load: PageLoad, result: Result<StripeReply, ClientError>) {
        let bytes = match result {
            Ok(reply) => filled(reply),
            Err(_) => {
                self.store.pages.load_failed(load);
                return self.page_lost(load.name);
            }
        };
        let name = load.name;
        if self.store.pages.loaded(load, &bytes).is_err() {
            return self.page_lost(name);
        }
        self.work.ready.extend(self.work.page_waiters.remove(&name).into_iter().flatten());
        self.work.ready.extend(self.work.starved.drain(..));
        self.start_goes_on();
    }

    /// A page cannot be read. What needs it ends with an error.
    fn page_lost(&mut self, name: PageName) {
        let waiters = self.work.page_waiters.remove(&name).unwrap_or_default();
        if self.is_starting() {
            return self.fail();
        }
        if waiters.is_empty() {
            self.give_up_look();
            self.set_aside_segments(name);
        }
        waiters.into_iter().for_each(|key| self.give_up_op(key));
        if matches!(name.space, PageSpace::States | PageSpace::Table) {
            self.scan_passes_over();
        }
    }

    /// Free segments whose part of the directory cannot be read are not opened before the next start.
    fn set_aside_segments(&mut self, name: PageName) {
        if name.space == PageSpace::Directory {
            let whole = self.facts.segment_blocks;
            let is_in = |segment, block| place::of_directory(segment, whole, block).0 == name;
            let segments = &mut self.store.segments;
            segments.set_aside(|segment| (0..whole).any(|block| is_in(segment, block)));
        }
    }

    /// Ends an operation that needs what cannot be read.
    fn give_up_op(&mut self, key: usize) {
        match self.work.ops.get(key) {
            Some(Op::Read(read)) if read.pending == 0 => {
                self.read_of(key).error = Some(ClientError::Io);
                self.end_read(key);
            }
            Some(Op::Extents(extents)) => {
                let request = extents.request;
                self.work.ops.remove(key);
                self.part_ended(request, Some(ClientError::Io));
            }
            Some(Op::Write(_)) => self.end_write(key, Some(ClientError::Io)),
            _ => {}
        }
    }
}

/// Whether the bytes of a piece have the hashes of its chunks.
fn is_as_hashed(piece: &Piece) -> bool {
    let Some(buf) = &piece.buf else { return false };
    if piece.chunks.is_empty() || is_off(Mutation::CasReadNotCompared) {
        return true;
    }
    let mut hashes = piece.chunks.iter().map(|(_, hash)| hash);
    let mut is_right = true;
    whole_hash_each(buf.as_chunks::<CAS_BLOCK_BYTES>().0.iter(), |hash| {
        is_right &= hashes.next() == Some(hash);
    });
    is_right
}

/// What a client gets of a read: its bytes, and those ranges of them that are zeroes.
fn answer(pool: &Pool, read: Read) -> crate::volume::reply::Part {
    let (mut zeroes, mut at) = (Vec::new(), 0);
    for piece in &read.pieces {
        let len = piece.buf.as_ref().map_or(0, |buf| buf.len());
        if piece.chunks.is_empty() {
            zeroes.push(at..at + len);
        }
        at += len;
    }
    let whole = pool.join(read.pieces.into_iter().filter_map(|piece| piece.buf));
    match read.target {
        None => (whole, zeroes),
        Some(mut target) => {
            let range = read.skip..read.skip + read.len;
            target.copy_from_slice(&whole[range]);
            (target, Vec::new())
        }
    }
}

/// The buffer of a read, with its zeroes filled in.
pub(super) fn filled(reply: StripeReply) -> BufMut {
    match reply {
        StripeReply::Data(buf) => buf,
        StripeReply::Sparse(mut buf, zeroes) => {
            zeroes.into_iter().for_each(|zeroes| buf[zeroes].fill(0));
            buf
        }
        _ => unreachable!("a read is answered with bytes"),
    }
}
