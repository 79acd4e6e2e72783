//! Requests that do not begin or end on a block: clients that did not ask for the block size may send them. A
//! read asks for the blocks around it, and the reply carries the middle of them. A write first reads the
//! blocks at its ends, then writes them back with its own bytes in them.
//!
//! Invariant: from the first of these reads to the end of the write no other write of the same blocks is in
//! the volume; requests that overlap it wait as they do behind an orphan (see `order`). So nobody's bytes are
//! put back to an older version. Must not know what volumes do.

use super::order::blocks_of;
use calpe_core::block_io::{BufMut, Pool};
use calpe_core::nbd::Request;
use calpe_core::units::VolumeOffset;
use calpe_core::volume::ClientRequest;
use std::ops::Range;

/// A write with incomplete blocks.
#[derive(Debug)]
pub(super) struct Edges {
    /// Whole blocks, with the payload in their middle; none once they are being written.
    blocks: Option<BufMut>,
    range: Range<u64>,
    /// Offsets of the blocks that are still to be read; the last of them is being read.
    reads: Vec<u64>,
}

/// Cuts the bytes that a read asked for out of the blocks around them.
pub(super) fn middle(mut blocks: BufMut, request: &Request, block: u64) -> BufMut {
    if blocks.len() as u64 == request.length {
        return blocks;
    }
    let mut bytes = blocks.split_off((request.offset % block) as usize);
    drop(bytes.split_off(request.length as usize));
    bytes
}

impl Edges {
    /// Prepares a write that does not lie on blocks of `block` bytes.
    pub(super) fn new(request: &Request, payload: &BufMut, block: u64, pool: &Pool) -> Edges {
        let range = blocks_of(request, block);
        let mut blocks = pool.alloc((range.end - range.start) as usize);
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

    /// Takes the block that was asked for last, if one was. Returns what to ask of the volume next: the next
    /// block of the write's ends, or, when all are there, the write.
    pub(super) fn next(
        &mut self,
        request: &Request,
        read: Option<BufMut>,
        block: u64,
        pool: &Pool,
    ) -> ClientRequest {
        if let Some(read) = read
            && let Some(at) = self.reads.pop()
            && let Some(blocks) = &mut self.blocks
        {
            // The bytes of the block that are not the client's.
            let end = request.offset + request.length;
            for keep in [at..request.offset.clamp(at, at + block), end.clamp(at, at + block)..at + block] {
                let from = (keep.start - at) as usize..(keep.end - at) as usize;
                let to = (keep.start - self.range.start) as usize..(keep.end - self.range.start) as usize;
                blocks[to].copy_from_slice(&read[from]);
            }
        }
        match self.reads.last() {
            Some(&at) => ClientRequest::Read { offset: VolumeOffset(at), buf: pool.alloc(block as usize) },
            None => {
                let blocks = self.blocks.take().expect("it is written once");
                let offset = VolumeOffset(self.range.start);
                ClientRequest::Write { offset, data: blocks.freeze(), fua: request.fua }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
