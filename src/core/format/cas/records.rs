//! Records of the journal: what each does to the pages of a cas volume.
//!
//! Invariant: `decode` accepts exactly what `encode` writes, and never reads or allocates beyond the bytes
//! that it is given, whatever they are.

use super::{CatalogueSlot, ChunkHash, ChunkId, ID_BITS, SegmentIndex, VOLUME_NAME_BYTES};

/// One command to the pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CasRecord {
    /// New chunks that are not compressed, one block after another.
    Store {
        /// The segment.
        segment: SegmentIndex,
        /// Block of the segment in which the first lies.
        block: u32,
        /// Their names and hashes.
        chunks: Vec<(ChunkId, ChunkHash)>,
    },
    /// Blocks of a volume, one after another, get these chunks.
    Map {
        /// The volume.
        volume: CatalogueSlot,
        /// First block.
        block: u64,
        /// Its chunk, and those of the blocks after it.
        ids: Vec<ChunkId>,
    },
    /// Blocks of a volume become holes.
    Unmap {
        /// The volume.
        volume: CatalogueSlot,
        /// First block.
        block: u64,
        /// How many.
        count: u64,
    },
    /// Chunks were copied, one block after another.
    Move {
        /// The segment that has them now.
        segment: SegmentIndex,
        /// Block of it in which the first lies.
        block: u32,
        /// What was copied.
        chunks: Vec<Moved>,
    },
    /// A free segment holds chunks, or entries of the journal, from now on.
    Open {
        /// The segment.
        segment: SegmentIndex,
        /// [`super::SegmentEntry::DATA`] or [`super::SegmentEntry::JOURNAL`].
        kind: u8,
    },
    /// A segment is free.
    GiveUp {
        /// The segment.
        segment: SegmentIndex,
    },
    /// A new volume.
    Create {
        /// A free slot.
        slot: CatalogueSlot,
        /// Seconds since 1970.
        created: u64,
        /// Blocks.
        blocks: u64,
        /// Its name.
        name: String,
    },
    /// A volume gets another size. Blocks beyond it were unmapped before.
    Resize {
        /// The volume.
        slot: CatalogueSlot,
        /// Blocks.
        blocks: u64,
    },
    /// A snapshot of a volume as it is.
    Snapshot {
        /// The volume.
        volume: CatalogueSlot,
        /// A free slot.
        slot: CatalogueSlot,
        /// Seconds since 1970.
        created: u64,
        /// Its name.
        name: String,
    },
    /// A new volume that begins as a snapshot.
    Clone {
        /// The snapshot.
        origin: CatalogueSlot,
        /// A free slot.
        slot: CatalogueSlot,
        /// Seconds since 1970.
        created: u64,
        /// Its name.
        name: String,
    },
    /// A volume becomes its newest snapshot again.
    Rollback {
        /// The volume.
        volume: CatalogueSlot,
        /// A free slot, for what it was.
        slot: CatalogueSlot,
    },
    /// A snapshot, or a volume without snapshots, is to be deleted.
    Delete {
        /// What is deleted.
        slot: CatalogueSlot,
    },
    /// The deletion has gone on.
    DeleteStep {
        /// What is deleted.
        slot: CatalogueSlot,
        /// Blocks below have been dealt with.
        upto: u64,
    },
}

/// A chunk that was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Its name.
    pub id: ChunkId,
    /// The segment that it was copied from.
    pub segment: SegmentIndex,
    /// Where in it, in blocks.
    pub block: u32,
}

/// Why bytes are not records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a record of a cas volume, at byte {at}")]
pub struct RecordError {
    /// Where.
    pub at: usize,
}

const STORE: u8 = 1;
const MAP: u8 = 2;
const UNMAP: u8 = 3;
const MOVE: u8 = 4;
const OPEN: u8 = 5;
const GIVE_UP: u8 = 6;
const CREATE: u8 = 7;
const RESIZE: u8 = 8;
const SNAPSHOT: u8 = 9;
const CLONE: u8 = 10;
const ROLLBACK: u8 = 11;
const DELETE: u8 = 12;
const DELETE_STEP: u8 = 13;

const ID_BYTES: usize = ID_BITS as usize / 8;

/// Bytes of a chunk in a record of kind `Store`.
pub(super) const STORED_BYTES: usize = ID_BYTES + 32;

impl CasRecord {
    /// Bytes that it takes in an entry.
    #[must_use]
    pub fn bytes(&self) -> usize {
        1 + match self {
            CasRecord::Store { chunks, .. } => 4 + 4 + 4 + chunks.len() * STORED_BYTES,
            CasRecord::Map { ids, .. } => 2 + 8 + 4 + ids.len() * ID_BYTES,
            CasRecord::Unmap { .. } => 2 + 8 + 8,
            CasRecord::Move { chunks, .. } => 4 + 4 + 4 + chunks.len() * (ID_BYTES + 8),
            CasRecord::Open { .. } => 4 + 1,
            CasRecord::GiveUp { .. } | CasRecord::Rollback { .. } => 4,
            CasRecord::Create { name, .. } => 2 + 8 + 8 + 1 + name.len(),
            CasRecord::Resize { .. } | CasRecord::DeleteStep { .. } => 2 + 8,
            CasRecord::Snapshot { name, .. } | CasRecord::Clone { name, .. } => 2 + 2 + 8 + 1 + name.len(),
            CasRecord::Delete { .. } => 2,
        }
    }

    /// Appends its bytes.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        match self {
            CasRecord::Store { segment, block, chunks } => {
                out.push(STORE);
                out.extend(segment.0.to_le_bytes());
                out.extend(block.to_le_bytes());
                out.extend((chunks.len() as u32).to_le_bytes());
                for (id, hash) in chunks {
                    put_id(out, *id);
                    out.extend(hash);
                }
            }
            CasRecord::Map { volume, block, ids } => {
                out.push(MAP);
                out.extend(volume.0.to_le_bytes());
                out.extend(block.to_le_bytes());
                out.extend((ids.len() as u32).to_le_bytes());
                ids.iter().for_each(|id| put_id(out, *id));
            }
            CasRecord::Unmap { volume, block, count } => {
                out.push(UNMAP);
                out.extend(volume.0.to_le_bytes());
                out.extend(block.to_le_bytes());
                out.extend(count.to_le_bytes());
            }
            CasRecord::Move { segment, block, chunks } => {
                out.push(MOVE);
                out.extend(segment.0.to_le_bytes());
                out.extend(block.to_le_bytes());
                out.extend((chunks.len() as u32).to_le_bytes());
                for moved in chunks {
                    put_id(out, moved.id);
                    out.extend(moved.segment.0.to_le_bytes());
                    out.extend(moved.block.to_le_bytes());
                }
            }
            CasRecord::Open { segment, kind } => {
                out.push(OPEN);
                out.extend(segment.0.to_le_bytes());
                out.push(*kind);
            }
            CasRecord::GiveUp { segment } => {
                out.push(GIVE_UP);
                out.extend(segment.0.to_le_bytes());
            }
            CasRecord::Create { slot, created, blocks, name } => {
                out.push(CREATE);
                out.extend(slot.0.to_le_bytes());
                out.extend(created.to_le_bytes());
                out.extend(blocks.to_le_bytes());
                put_name(out, name);
            }
            CasRecord::Resize { slot, blocks } => {
                out.push(RESIZE);
                out.extend(slot.0.to_le_bytes());
                out.extend(blocks.to_le_bytes());
            }
            CasRecord::Snapshot { volume: of, slot, created, name }
            | CasRecord::Clone { origin: of, slot, created, name } => {
                out.push(if matches!(self, CasRecord::Snapshot { .. }) { SNAPSHOT } else { CLONE });
                out.extend(of.0.to_le_bytes());
                out.extend(slot.0.to_le_bytes());
                out.extend(created.to_le_bytes());
                put_name(out, name);
            }
            CasRecord::Rollback { volume, slot } => {
                out.push(ROLLBACK);
                out.extend(volume.0.to_le_bytes());
                out.extend(slot.0.to_le_bytes());
            }
            CasRecord::Delete { slot } => {
                out.push(DELETE);
                out.extend(slot.0.to_le_bytes());
            }
            CasRecord::DeleteStep { slot, upto } => {
                out.push(DELETE_STEP);
                out.extend(slot.0.to_le_bytes());
                out.extend(upto.to_le_bytes());
            }
        }
        debug_assert_eq!(out.len() - start, self.bytes());
    }

    /// Reads records that fill `bytes`.
    ///
    /// # Errors
    /// When they are not records.
    pub fn decode_all(bytes: &[u8]) -> Result<Vec<CasRecord>, RecordError> {
        let mut reader = Reader { bytes, at: 0 };
        let mut records = Vec::new();
        while reader.at < bytes.len() {
            let at = reader.at;
            records.push(reader.record().ok_or(RecordError { at })?);
        }
        Ok(records)
    }
}

fn put_id(out: &mut Vec<u8>, id: ChunkId) {
    debug_assert!(id.0 < 1 << ID_BITS);
    out.extend(&id.0.to_le_bytes()[..ID_BYTES]);
}

fn put_name(out: &mut Vec<u8>, name: &str) {
    out.push(u8::try_from(name.len()).expect("names are checked"));
    out.extend(name.as_bytes());
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let taken = self.bytes.get(self.at..self.at.checked_add(len)?)?;
        self.at += len;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn slot(&mut self) -> Option<CatalogueSlot> {
        self.u16().map(CatalogueSlot)
    }

    fn segment(&mut self) -> Option<SegmentIndex> {
        self.u32().map(SegmentIndex)
    }

    fn id(&mut self) -> Option<ChunkId> {
        let mut id = [0; 8];
        id[..ID_BYTES].copy_from_slice(self.take(ID_BYTES)?);
        Some(ChunkId(u64::from_le_bytes(id)))
    }

    fn name(&mut self) -> Option<String> {
        let len = usize::from(self.array::<1>()?[0]);
        if len > VOLUME_NAME_BYTES {
            return None;
        }
        Some(str::from_utf8(self.take(len)?).ok()?.to_owned())
    }

    /// A list of things of `each` bytes.
    fn list<T>(&mut self, each: usize, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.u32()? as usize;
        if count.checked_mul(each)? > self.bytes.len() - self.at {
            return None;
        }
        (0..count).map(|_| read(self)).collect()
    }

    fn record(&mut self) -> Option<CasRecord> {
        Some(match self.array::<1>()?[0] {
            STORE => CasRecord::Store {
                segment: self.segment()?,
                block: self.u32()?,
                chunks: self.list(STORED_BYTES, |r| Some((r.id()?, r.array()?)))?,
            },
            MAP => CasRecord::Map {
                volume: self.slot()?,
                block: self.u64()?,
                ids: self.list(ID_BYTES, Reader::id)?,
            },
            UNMAP => CasRecord::Unmap { volume: self.slot()?, block: self.u64()?, count: self.u64()? },
            MOVE => CasRecord::Move {
                segment: self.segment()?,
                block: self.u32()?,
                chunks: self.list(ID_BYTES + 8, |r| {
                    Some(Moved { id: r.id()?, segment: r.segment()?, block: r.u32()? })
                })?,
            },
            OPEN => CasRecord::Open { segment: self.segment()?, kind: self.array::<1>()?[0] },
            GIVE_UP => CasRecord::GiveUp { segment: self.segment()? },
            CREATE => CasRecord::Create {
                slot: self.slot()?,
                created: self.u64()?,
                blocks: self.u64()?,
                name: self.name()?,
            },
            RESIZE => CasRecord::Resize { slot: self.slot()?, blocks: self.u64()? },
            SNAPSHOT => CasRecord::Snapshot {
                volume: self.slot()?,
                slot: self.slot()?,
                created: self.u64()?,
                name: self.name()?,
            },
            CLONE => CasRecord::Clone {
                origin: self.slot()?,
                slot: self.slot()?,
                created: self.u64()?,
                name: self.name()?,
            },
            ROLLBACK => CasRecord::Rollback { volume: self.slot()?, slot: self.slot()? },
            DELETE => CasRecord::Delete { slot: self.slot()? },
            DELETE_STEP => CasRecord::DeleteStep { slot: self.slot()?, upto: self.u64()? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id() -> impl Strategy<Value = ChunkId> {
        (0u64..1 << ID_BITS).prop_map(ChunkId)
    }

    fn slot() -> impl Strategy<Value = CatalogueSlot> {
        any::<u16>().prop_map(CatalogueSlot)
    }

    fn segment() -> impl Strategy<Value = SegmentIndex> {
        any::<u32>().prop_map(SegmentIndex)
    }

    pub(crate) fn record() -> impl Strategy<Value = CasRecord> {
        let name = "[a-z0-9-]{0,64}";
        prop_oneof![
            (segment(), any::<u32>(), prop::collection::vec((id(), any::<[u8; 32]>()), 0..70))
                .prop_map(|(segment, block, chunks)| CasRecord::Store { segment, block, chunks }),
            (slot(), any::<u64>(), prop::collection::vec(id(), 0..70))
                .prop_map(|(volume, block, ids)| CasRecord::Map { volume, block, ids }),
            (slot(), any::<u64>(), any::<u64>()).prop_map(|(volume, block, count)| CasRecord::Unmap {
                volume,
                block,
                count
            }),
            (segment(), any::<u32>(), prop::collection::vec((id(), segment(), any::<u32>()), 0..70))
                .prop_map(|(segment, block, chunks)| {
                    let moved = |(id, segment, block)| Moved { id, segment, block };
                    CasRecord::Move { segment, block, chunks: chunks.into_iter().map(moved).collect() }
                }),
            (segment(), any::<u8>()).prop_map(|(segment, kind)| CasRecord::Open { segment, kind }),
            segment().prop_map(|segment| CasRecord::GiveUp { segment }),
            (slot(), any::<u64>(), any::<u64>(), name).prop_map(|(slot, created, blocks, name)| {
                CasRecord::Create { slot, created, blocks, name }
            }),
            (slot(), any::<u64>()).prop_map(|(slot, blocks)| CasRecord::Resize { slot, blocks }),
            (slot(), slot(), any::<u64>(), name).prop_map(|(volume, slot, created, name)| {
                CasRecord::Snapshot { volume, slot, created, name }
            }),
            (slot(), slot(), any::<u64>(), name).prop_map(|(origin, slot, created, name)| CasRecord::Clone {
                origin,
                slot,
                created,
                name
            }),
            (slot(), slot()).prop_map(|(volume, slot)| CasRecord::Rollback { volume, slot }),
            slot().prop_map(|slot| CasRecord::Delete { slot }),
            (slot(), any::<u64>()).prop_map(|(slot, upto)| CasRecord::DeleteStep { slot, upto }),
        ]
    }

    proptest! {
        #[test]
        fn records_come_back(records in prop::collection::vec(record(), 0..8)) {
            let mut bytes = Vec::new();
            records.iter().for_each(|record| record.encode(&mut bytes));
            prop_assert_eq!(bytes.len(), records.iter().map(CasRecord::bytes).sum::<usize>());
            prop_assert_eq!(CasRecord::decode_all(&bytes), Ok(records));
        }

        #[test]
        fn what_is_cut_off_is_refused(record in record(), cut in 1usize..40) {
            let mut bytes = Vec::new();
            record.encode(&mut bytes);
            let keep = bytes.len().saturating_sub(cut);
            prop_assume!(keep > 0);
            prop_assert!(CasRecord::decode_all(&bytes[..keep]).is_err());
        }

        #[test]
        fn any_bytes_are_records_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(records) = CasRecord::decode_all(&bytes) {
                let mut again = Vec::new();
                records.iter().for_each(|record| record.encode(&mut again));
                prop_assert_eq!(again, bytes);
            }
        }
    }
}
