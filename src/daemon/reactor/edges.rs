//! Requests that do not begin or end on a block: clients that did not ask for the block size may
//! send them. A read asks for the blocks around it, and the reply has the middle of them. A write
//! reads the blocks at its ends first, and writes them back with its own bytes in them.
//!
//! Invariant: from the first of these reads to the end of the write no other write of the same blocks is in the volume; what
//! overlaps waits like a request behind an orphan (see `fence`). So nobody's bytes are put back to what they were. Must not know
//! what volumes do.

use super::clients::RANGE_OF_VOLUME;
use super::{ArrayId, Pending, Reactor};
use calpe_core::block_io::BufMut;
use calpe_core::nbd::Request;
use calpe_core::units::VolumeOffset;
use calpe_core::volume::{ClientRequest, RequestId, VolumeEvent};
use std::ops::Range;

/// A write with incomplete blocks.
#[derive(Debug)]
pub(super) struct Edges {
    /// Whole blocks, with the payload in their middle; none once they are being written.
    blocks: Option<BufMut>,
    range: Range<u64>,
    /// Where the blocks are that are still to be read; the last of them is being read.
    reads: Vec<u64>,
}

/// The blocks that a request touches, as a range of bytes.
pub(super) fn blocks_of(request: &Request, block: u64) -> Range<u64> {
    let end = request.offset.saturating_add(request.length);
    request.offset / block * block..end.checked_next_multiple_of(block).expect(RANGE_OF_VOLUME)
}

/// The bytes that a read asked for, of the blocks around them.
pub(super) fn middle(mut blocks: BufMut, request: &Request, block: u64) -> BufMut {
    if blocks.len() as u64 == request.length {
        return blocks;
    }
    let mut bytes = blocks.split_off((request.offset % block) as usize);
    drop(bytes.split_off(request.length as usize));
    bytes
}

impl Reactor {
    /// The minimum block of an array's export, in bytes.
    pub(super) fn block_of(&self, array: ArrayId) -> u64 {
        let hosted = self.arrays.get(array.0 as usize).and_then(Option::as_ref);
        hosted.map_or(1, |hosted| u64::from(hosted.export.block_min))
    }

    /// Whether a request begins or ends within a block.
    pub(super) fn has_edges(&self, array: ArrayId, request: &Request) -> bool {
        blocks_of(request, self.block_of(array)) != (request.offset..request.offset + request.length)
    }

    /// What a write with incomplete blocks needs.
    pub(super) fn edges_of(&self, array: ArrayId, request: &Request, payload: &BufMut) -> Edges {
        let block = self.block_of(array);
        let range = blocks_of(request, block);
        let mut blocks = self.config.pool.alloc((range.end - range.start) as usize);
        let at = (request.offset - range.start) as usize;
        blocks[at..at + payload.len()].copy_from_slice(payload);
        let end = request.offset + request.length;
        let mut reads = Vec::with_capacity(2);
        if end != range.end {
            reads.push(range.end - block);
        }
        if request.offset != range.start && reads.first() != Some(&range.start) {
            reads.push(range.start);
        }
        Edges { blocks: Some(blocks), range, reads }
    }

    /// Reads the next block of a write's ends, or, when all are there, writes it. `read`: the block that was asked for last.
    pub(super) fn continue_edges(&mut self, mut pending: Pending, read: Option<BufMut>) {
        let (array, request) = (pending.array, pending.request);
        let block = self.block_of(array);
        let edges = pending.edges.as_mut().expect("a write with edges");
        if let Some(read) = read
            && let Some(at) = edges.reads.pop()
            && let Some(blocks) = &mut edges.blocks
        {
            // All of the block that is not the client's.
            let end = request.offset + request.length;
            for keep in [at..request.offset.clamp(at, at + block), end.clamp(at, at + block)..at + block] {
                let from = (keep.start - at) as usize..(keep.end - at) as usize;
                let to = (keep.start - edges.range.start) as usize..(keep.end - edges.range.start) as usize;
                blocks[to].copy_from_slice(&read[from]);
            }
        }
        let client_request = match edges.reads.last() {
            Some(&at) => {
                let buf = self.config.pool.alloc(block as usize);
                ClientRequest::Read { offset: VolumeOffset(at), buf }
            }
            None => {
                let blocks = edges.blocks.take().expect("it is written once");
                let offset = VolumeOffset(edges.range.start);
                ClientRequest::Write { offset, data: blocks.freeze(), fua: request.fua }
            }
        };
        let id = self.requests.insert(pending);
        self.step(array, VolumeEvent::Client(RequestId(id as u64), client_request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::block_io::Pool;
    use calpe_core::nbd::Command;

    #[test]
    fn a_read_gets_the_middle_of_its_blocks() {
        let request = Request::new(Command::Read, 1000, 600);
        assert_eq!(blocks_of(&request, 512), 512..2048);
        let mut blocks = Pool::new(4096).unwrap().alloc(1536);
        blocks.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 8) as u8);
        let bytes = middle(blocks, &request, 512);
        assert_eq!((bytes.len(), bytes[0], bytes[599]), (600, 61, 135));
        let whole = Request::new(Command::Read, 512, 1024);
        assert_eq!(blocks_of(&whole, 512), 512..1536);
    }
}
