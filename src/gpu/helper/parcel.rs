//! A batch as bytes: what a helper must know of it, written by the daemon into a slot and read there by
//! the helper. Both are of one executable, so there is no version in it.
//!
//! Invariant: bytes that were not written by [`write()`] are an error for [`read`], and never a place
//! outside of the memories. Must not know how the bytes travel.

use std::collections::VecDeque;

use calpe_core::codec::{Codec, Form, Transform};

/// Bytes of one range.
const RANGE_BYTES: usize = 24;

/// More than everything but the ranges takes: a code has at most 256 columns, each named by two bytes.
const HEAD_BYTES: usize = 4096;

/// Transforms that are kept: those of a few arrays, and of what they lack.
const TRANSFORMS_MAX: usize = 32;

/// Most bytes that the batches of a slot take.
pub(super) fn bytes_max(slot_bytes: usize) -> usize {
    HEAD_BYTES + slot_bytes / 4096 * RANGE_BYTES
}

/// A batch as it travels.
#[derive(Clone, Debug)]
pub(super) struct Parcel {
    pub(super) transform: Option<Transform>,
    pub(super) hash: bool,
    /// Whether the output columns are wanted, one after the other, at the start of the slot's data.
    pub(super) keep: bool,
    pub(super) columns: usize,
    pub(super) column_bytes: usize,
    pub(super) inputs: Vec<Piece>,
}

/// Some bytes of an input column, in a memory that both processes map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) column: usize,
    /// Offset in the column.
    pub(super) offset: usize,
    pub(super) bytes: usize,
    /// The number of the memory, and the offset there.
    pub(super) memory: usize,
    pub(super) at: usize,
}

impl Parcel {
    /// Bytes of the outputs that are wanted.
    pub(super) fn output_bytes(&self) -> usize {
        let outputs = self.transform.as_ref().map_or(0, Transform::outputs);
        if self.keep { outputs * self.column_bytes } else { 0 }
    }
}

/// The bytes of a parcel.
pub(super) fn write(parcel: &Parcel) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEAD_BYTES + parcel.inputs.len() * RANGE_BYTES);
    let mut put = |value: usize| out.extend_from_slice(&(value as u64).to_le_bytes());
    put(usize::from(parcel.hash));
    put(usize::from(parcel.keep));
    put(parcel.columns);
    put(parcel.column_bytes);
    put(parcel.inputs.len());
    for piece in &parcel.inputs {
        put(piece.column | piece.memory << 32);
        put(piece.offset | piece.bytes << 32);
        put(piece.at);
    }
    let Some(transform) = &parcel.transform else { return out };
    let (codec, form) = (transform.codec(), transform.form());
    let (kind, lists): (u16, [&[usize]; 2]) = match form {
        Form::Encode => (0, [&[], &[]]),
        Form::Recover { present, wanted } => (1, [present, wanted]),
        Form::Update { columns } => (2, [columns, &[]]),
    };
    let numbers = [kind, codec.data() as u16, codec.parity() as u16];
    let listed = lists.into_iter().flat_map(|list| [&[list.len()], list].concat());
    for number in numbers.into_iter().chain(listed.map(|number| number as u16)) {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out
}

/// The transforms of the last parcels: most batches have that of one before, and to make one takes longer
/// than to read all the rest.
#[derive(Default)]
pub(super) struct Transforms(VecDeque<(Vec<u8>, Transform)>);

impl Transforms {
    /// The transform in the last bytes of a parcel.
    fn get(&mut self, bytes: &[u8]) -> Option<Transform> {
        if let Some((_, known)) = self.0.iter().find(|(key, _)| key == bytes) {
            return Some(known.clone());
        }
        let transform = Reader(bytes).transform()?;
        self.0.truncate(TRANSFORMS_MAX - 1);
        self.0.push_front((bytes.to_owned(), transform.clone()));
        Some(transform)
    }
}

/// The parcel in some bytes. None if there is none; its pieces lie in memories of these lengths, and
/// with the outputs in a slot of this size.
pub(super) fn read(
    bytes: &[u8],
    memories: &[usize],
    slot_bytes: usize,
    transforms: &mut Transforms,
) -> Option<Parcel> {
    let mut reader = Reader(bytes);
    let (hash, keep) = (reader.number()? != 0, reader.number()? != 0);
    let (columns, column_bytes, count) = (reader.number()?, reader.number()?, reader.number()?);
    if column_bytes == 0 || !column_bytes.is_multiple_of(4096) || count > slot_bytes / 4096 {
        return None;
    }
    let mut inputs = Vec::with_capacity(count);
    for _ in 0..count {
        let (first, second, at) = (reader.number()?, reader.number()?, reader.number()?);
        let low = |word: usize| word & 0xffff_ffff;
        let piece =
            Piece { column: low(first), memory: first >> 32, offset: low(second), bytes: second >> 32, at };
        let inside = piece.column < columns
            && piece.offset.checked_add(piece.bytes)? <= column_bytes
            && at.checked_add(piece.bytes)? <= *memories.get(piece.memory)?;
        if !inside {
            return None;
        }
        inputs.push(piece);
    }
    let transform = if reader.0.is_empty() { None } else { Some(transforms.get(reader.0)?) };
    let outputs = transform.as_ref().map_or(0, Transform::outputs);
    let fits = columns.checked_add(outputs)?.checked_mul(column_bytes)? <= slot_bytes;
    let enough = transform.as_ref().is_none_or(|transform| transform.inputs() <= columns);
    (fits && enough).then_some(Parcel { transform, hash, keep, columns, column_bytes, inputs })
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn number(&mut self) -> Option<usize> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        usize::try_from(u64::from_le_bytes(*first)).ok()
    }

    fn short(&mut self) -> Option<usize> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(usize::from(u16::from_le_bytes(*first)))
    }

    fn list(&mut self) -> Option<Vec<usize>> {
        let length = self.short()?;
        (0..length).map(|_| self.short()).collect()
    }

    fn transform(&mut self) -> Option<Transform> {
        let kind = self.short()?;
        let codec = Codec::new(self.short()?, self.short()?).ok()?;
        let (first, second) = (self.list()?, self.list()?);
        let transform = match kind {
            0 => codec.encoding(),
            1 => codec.recovery(&first, &second).ok()?,
            2 => codec.updating(&first).ok()?,
            _ => return None,
        };
        self.0.is_empty().then_some(transform)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parcels() -> Vec<Parcel> {
        let codec = Codec::new(5, 3).expect("a geometry");
        let transforms = [
            None,
            Some(codec.encoding()),
            Some(codec.recovery(&[7, 1, 2, 5, 4], &[0, 6]).expect("a pattern")),
            Some(codec.updating(&[4, 0]).expect("data columns")),
        ];
        let of = |transform: Option<Transform>| {
            let columns = transform.as_ref().map_or(1, Transform::inputs);
            let piece = |column: usize, half: usize| Piece {
                column,
                offset: half * 4096,
                bytes: 4096,
                memory: (column + 1) % 2,
                at: 16 * (column + 1),
            };
            let inputs = (0..columns).flat_map(|column| [piece(column, 0), piece(column, 1)]).collect();
            let keep = transform.is_some() && columns != 5;
            Parcel { transform, hash: columns != 7, keep, columns, column_bytes: 8192, inputs }
        };
        transforms.into_iter().map(of).collect()
    }

    fn read(bytes: &[u8], memories: &[usize], slot_bytes: usize) -> Option<Parcel> {
        super::read(bytes, memories, slot_bytes, &mut Transforms::default())
    }

    const MEMORIES: [usize; 2] = [1 << 20, 5 << 10];

    #[test]
    fn what_is_written_is_read() {
        for parcel in parcels() {
            let bytes = write(&parcel);
            assert!(bytes.len() <= bytes_max(1 << 20));
            let found = read(&bytes, &MEMORIES, 1 << 20).expect("what was written");
            assert_eq!(format!("{found:?}"), format!("{parcel:?}"));
            let matrix = |parcel: &Parcel| parcel.transform.as_ref().map(|it| it.matrix().to_vec());
            assert_eq!((matrix(&found), found.output_bytes()), (matrix(&parcel), parcel.output_bytes()));
        }
    }

    #[test]
    fn transforms_are_kept_by_all_that_they_are() {
        let (mut transforms, codec) = (Transforms::default(), Codec::new(60, 4).expect("a geometry"));
        for round in 0..2 {
            for column in 0..TRANSFORMS_MAX + 3 {
                let mut parcel = parcels().remove(0);
                parcel.transform = Some(codec.updating(&[column]).expect("a column"));
                (parcel.columns, parcel.inputs) = (6, Vec::new());
                let found = super::read(&write(&parcel), &MEMORIES, 1 << 20, &mut transforms);
                let form = found.and_then(|found| found.transform).map(|it| it.form().clone());
                assert_eq!(form, Some(Form::Update { columns: vec![column] }), "round {round}");
                assert!(transforms.0.len() <= TRANSFORMS_MAX);
            }
        }
    }

    #[test]
    fn the_largest_code_and_the_most_pieces_fit() {
        let codec = Codec::new(200, 55).expect("a geometry");
        let present: Vec<usize> = (55..255).collect();
        let transform = codec.recovery(&present, &(0..55).collect::<Vec<_>>()).expect("a pattern");
        let piece = Piece { column: 0, offset: 0, bytes: 4096, memory: 0, at: 0 };
        let inputs = vec![piece; (16 << 20) / 4096];
        let parcel = Parcel {
            transform: Some(transform),
            hash: true,
            keep: true,
            columns: 200,
            column_bytes: 4096,
            inputs,
        };
        let bytes = write(&parcel);
        assert!(bytes.len() <= bytes_max(16 << 20), "{}", bytes.len());
        assert!(read(&bytes, &[4096], 16 << 20).is_some());
    }

    #[test]
    fn places_outside_and_bytes_that_mean_nothing_are_refused() {
        for parcel in parcels() {
            let bytes = write(&parcel);
            assert!(read(&bytes, &[1 << 20, 4096], 1 << 20).is_none(), "beyond its memory");
            assert!(read(&bytes, &MEMORIES[..1], 1 << 20).is_none(), "in a memory that is not there");
            assert!(read(&bytes, &MEMORIES, 4096).is_none(), "more than a slot");
            for length in 0..bytes.len() {
                // Without its last part a parcel may be one that only hashes.
                if let Some(short) = read(&bytes[..length], &MEMORIES, 1 << 20) {
                    assert!(short.transform.is_none() && parcel.transform.is_some());
                }
            }
            for at in 0..bytes.len() {
                for bit in 0..8 {
                    let mut other = bytes.clone();
                    other[at] ^= 1 << bit;
                    if let Some(found) = read(&other, &MEMORIES, 1 << 20) {
                        let inside = |piece: &Piece| piece.at + piece.bytes <= MEMORIES[piece.memory];
                        assert!(found.inputs.iter().all(inside));
                    }
                }
            }
        }
        assert!(read(&[], &MEMORIES, 1 << 20).is_none());
    }
}
