//! The records of a logged write: what goes into a batch, and what changes in memory once it has joined.

use super::{BLOCK, LoggedWrite, Stage, Way, Work, parity};
use crate::array::client::fetch::Blended;
use crate::array::client::plan::ParityPath;
use crate::array::log::journal::record_bytes;
use crate::array::mutation::{Mutation, is_off};
use crate::array::pages::hold::PagesHeld;
use crate::array::{Array, ClientError, Flow};
use crate::block_io::{Buf, BufMut};
use crate::format::{FreshRecord, InPlaceRecord, LogRecord};
use crate::units::{BlockHash, ColumnIndex, SlotIndex, StripeIndex};
use std::ops::Range;

impl Array {
    /// Makes new parity, hashes and records of every band.
    pub(in crate::array) fn make_records(&mut self, write: &mut LoggedWrite) {
        let Work::Data { offset, data } = &write.task.work else { return };
        let first = !self.pages.holds_data(write.stripe);
        let missing = write.fetch.take_missing();
        let aside: Vec<(usize, usize)> = missing
            .iter()
            .filter(|block| !block.why.counts_as_zeroes())
            .map(|block| (block.column, block.row))
            .collect();
        let mut blended = write.fetch.take_blended();
        let mut old = write.fetch.take().into_iter();
        for (at, (band, path)) in write.parity.plans.iter().enumerate() {
            let rows = band.rows.start / BLOCK..band.rows.end / BLOCK;
            let count = match path {
                _ if first => 0,
                ParityPath::ReadModifyWrite => band.columns.len() + self.core.map.m,
                ParityPath::ReconstructWrite => self.core.map.k - band.columns.len(),
                _ => 0,
            };
            let mut olds: Vec<(usize, BufMut)> =
                old.by_ref().take(count).map(|(column, _, buf)| (column, buf)).collect();
            for &(column, row) in aside.iter().filter(|(_, row)| rows.contains(row)) {
                if let Some((_, buf)) = olds.iter_mut().find(|(c, _)| *c == column) {
                    buf[(row - rows.start) * BLOCK..(row - rows.start + 1) * BLOCK].fill(0);
                }
            }
            let new_bytes = |column: usize| self.core.new_bytes(band, *offset, data, column);
            let (parity, hashes) = match blended.take() {
                Some(Blended { known_hashes, outputs, output_hashes }) => {
                    (outputs, Some([known_hashes, output_hashes].concat()))
                }
                None => {
                    let buf = |_| self.core.pool.alloc(band.rows.len());
                    let mut parity: Vec<BufMut> = (0..self.core.map.m).map(buf).collect();
                    let mut targets: Vec<(usize, &mut [u8])> =
                        parity.iter_mut().enumerate().map(|(p, buf)| (p, &mut buf[..])).collect();
                    parity::of_band(&self.core.shape.codec, band, path, &mut olds, new_bytes, &mut targets);
                    (parity, None)
                }
            };
            let mut images: Vec<(u16, Buf)> =
                band.columns.clone().map(|c| (c as u16, new_bytes(c))).collect();
            let parities = parity.into_iter().enumerate();
            images.extend(parities.map(|(p, buf)| ((self.core.map.k + p) as u16, buf.freeze())));
            let first = first && at == 0;
            self.add_records(
                write.stripe,
                write.slot,
                &rows,
                first,
                (images, hashes),
                &aside,
                &mut write.records,
            );
        }
    }

    /// Adds the records of a band: one, or one for each row where blocks, (column, row), are set aside.
    /// `hashes` are those of its images in the order of their columns; none are given where blocks are set
    /// aside.
    #[expect(clippy::too_many_arguments, reason = "the fields of the records it makes")]
    fn add_records(
        &self,
        stripe: StripeIndex,
        slot: SlotIndex,
        rows: &Range<usize>,
        first: bool,
        (images, hashed): (Vec<(u16, Buf)>, Option<Vec<BlockHash>>),
        aside: &[(usize, usize)],
        records: &mut Vec<(LogRecord, Vec<(u16, Buf)>)>,
    ) {
        let runs: Vec<Range<usize>> = if aside.iter().any(|(_, row)| rows.contains(row)) {
            rows.clone().map(|row| row..row + 1).collect()
        } else {
            vec![rows.clone()]
        };
        assert!(
            hashed.is_none() || runs.len() == 1,
            "what is blended has no row with blocks that are set aside"
        );
        for (nth, run) in runs.into_iter().enumerate() {
            let bytes = (run.start - rows.start) * BLOCK..(run.end - rows.start) * BLOCK;
            let images: Vec<(u16, Buf)> =
                images.iter().map(|(c, buf)| (*c, buf.slice(bytes.clone()))).collect();
            let aside_here = aside.iter().filter(|(_, row)| *row == run.start).map(|(c, _)| *c as u16);
            let mut columns: Vec<u16> = images.iter().map(|(column, _)| *column).collect();
            columns.extend(aside_here.filter(|c| !images.iter().any(|(other, _)| other == c)));
            columns.sort_unstable();
            let hashes =
                hashed.clone().unwrap_or_else(|| {
                    let mut hashes = Vec::with_capacity(columns.len() * run.len());
                    for column in &columns {
                        match images.iter().find(|(c, _)| c == column) {
                            Some((_, image)) => self.pages.log_hasher().hash_blocks(image, &mut hashes),
                            None if is_off(Mutation::LostWithoutEvidence) => {
                                hashes.extend(std::iter::repeat_n(BlockHash::LOST, run.len()));
                            }
                            None => hashes.extend(run.clone().map(|row| {
                                self.pages.store().hash(slot, row, ColumnIndex(*column)).set_aside()
                            })),
                        }
                    }
                    hashes
                });
            let record = InPlaceRecord {
                stripe,
                slot,
                first: first && nth == 0,
                row: run.start as u32,
                rows: run.len() as u32,
                columns,
                hashes,
            };
            records.push((LogRecord::InPlace(record), images));
        }
    }

    /// Puts the records into the open batch and makes their content what all operations read.
    pub(in crate::array) fn join_write(&mut self, key: usize, write: &mut LoggedWrite) -> Flow {
        match self.hold_pages(key, &mut write.pages) {
            PagesHeld::Wait => return Flow::Wait,
            // Those of the free slot are not needed in place.
            PagesHeld::Unreadable if self.goes_through_log(key, write) => return Flow::Wait,
            PagesHeld::Unreadable => return self.end_logged_write(key, write, Err(ClientError::Io)),
            PagesHeld::All { .. } => {}
        }
        let payload: usize = write
            .records
            .iter()
            .filter(|(record, _)| matches!(record, LogRecord::InPlace(_)))
            .map(|(_, images)| images.first().map_or(0, |(_, buf)| buf.len()))
            .sum();
        let fits = write.records.iter().all(|(record, _)| {
            debug_assert!(record_bytes(record) > 0);
            self.redo.open_has_room(record, payload)
        });
        if !fits {
            self.redo.wait_for_next_batch(key);
            return Flow::Wait;
        }
        let records = std::mem::take(&mut write.records);
        for (record, images) in records {
            self.apply_record(&record, &images);
            let payload = match &record {
                LogRecord::InPlace(record) => images
                    .into_iter()
                    .map(|(column, buf)| (self.core.member_at(record.slot, usize::from(column)), buf))
                    .collect(),
                LogRecord::Fresh(_) | LogRecord::Discard { .. } => Vec::new(),
            };
            let width = self.core.map.width();
            self.redo.join(record, payload, width);
        }
        let promised = std::mem::take(&mut write.promised);
        self.redo.take_back(promised);
        if let Work::Discard { left } = &write.task.work
            && *left > 1
        {
            return self.next_discard(key, write);
        }
        if let Some((offset, data)) = write.task.rest.take() {
            self.release_write(key, write);
            (write.task.work, write.task.asked) = (Work::Data { offset, data }, None);
            (write.parity.way, write.parity.unreadable_since, write.stage) = (Way::Usual, None, Stage::Room);
            write.whole.writes.clear();
            self.cut_write(write);
            return Flow::Wait;
        }
        self.redo.wait_for_open(key, write.request.fua);
        write.stage = Stage::Logged;
        self.release_write(key, write);
        Flow::Wait
    }

    /// Makes the content of a record true in memory.
    fn apply_record(&mut self, record: &LogRecord, images: &[(u16, Buf)]) {
        let rows = self.core.map.chunk / BLOCK;
        self.forget_lost(record);
        self.tell_log();
        self.redo.apply(&mut self.pages, record, images, rows);
    }

    /// Takes blocks that are written again off the list of those that are lost.
    fn forget_lost(&mut self, record: &LogRecord) {
        if self.damage.is_empty() {
            return;
        }
        match record {
            LogRecord::InPlace(record) => {
                for (at, &column) in record.columns.iter().enumerate() {
                    let is_known = |&row: &u32| {
                        let hash = record.hash(at, row as usize);
                        hash.is_stored() || hash == BlockHash::UNWRITTEN
                    };
                    for row in (0..record.rows).filter(is_known) {
                        self.damage.forget((record.stripe, column, record.row + row));
                    }
                }
            }
            LogRecord::Fresh(FreshRecord { stripe, .. }) | LogRecord::Discard { stripe, .. } => {
                self.damage.forget_stripe(*stripe);
            }
        }
    }
}
