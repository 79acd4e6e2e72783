//! Where the four copies of a superblock lie, and which one counts.
//!
//! Two slots, A and B, each at both ends of the device. An update goes to one slot, chosen by the
//! parity of its sequence number, so a torn update leaves the other slot, which holds the update
//! before. Creating a member writes or wipes all four, so that no copy of an earlier array outranks
//! the new ones.

use super::{COPY_BYTES, FormatError, Role, Superblock};
use crate::units::{ByteOffset, LaneIndex, ROW_BYTES};
use std::fmt;
use uuid::Uuid;

const COPY: u64 = COPY_BYTES as u64;
/// Both slots of one end.
const END: u64 = 2 * COPY;

/// One of the four places of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CopyPlace {
    /// First copy of the device: even sequences.
    HeadA,
    /// Second copy: odd sequences.
    HeadB,
    /// Last but one copy: even sequences.
    TailA,
    /// Last copy: odd sequences.
    TailB,
}

impl CopyPlace {
    /// In the order of [`all_copy_offsets`].
    pub const ALL: [CopyPlace; 4] = [CopyPlace::HeadA, CopyPlace::HeadB, CopyPlace::TailA, CopyPlace::TailB];

    /// Words for people.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            CopyPlace::HeadA => "head A",
            CopyPlace::HeadB => "head B",
            CopyPlace::TailA => "tail A",
            CopyPlace::TailB => "tail B",
        }
    }
}

/// Offsets of the copies on a device of this size (rounded down to 4 KiB), in the order of
/// [`CopyPlace::ALL`]. On a device too small to be a member, below 64 KiB, the tail copies fall on the head
/// ones.
#[must_use]
pub fn all_copy_offsets(device_bytes: u64) -> [ByteOffset; 4] {
    let tail = (device_bytes & !(ROW_BYTES - 1)).saturating_sub(END);
    [0, COPY, tail, tail + COPY].map(ByteOffset)
}

/// The sequence that creation gives a superblock. Every later one has a higher sequence.
pub const FIRST_SEQUENCE: u64 = 1;

/// Offsets, head and tail, that the update with this sequence is written to.
#[must_use]
pub fn superblock_offsets(device_bytes: u64, sequence: u64) -> [ByteOffset; 2] {
    let [head_a, head_b, tail_a, tail_b] = all_copy_offsets(device_bytes);
    if sequence.is_multiple_of(2) { [head_a, tail_a] } else { [head_b, tail_b] }
}

/// Decodes the bytes read at a place.
///
/// # Errors
/// See [`Superblock::decode`]; [`FormatError::Misplaced`] if no update with this sequence goes to this place:
/// such a copy did not get there by an update, and the next update could overwrite the newest copy of the
/// device.
pub fn decode_copy(place: CopyPlace, bytes: &[u8]) -> Result<Superblock, FormatError> {
    let superblock = Superblock::decode(bytes)?;
    let is_even_place = matches!(place, CopyPlace::HeadA | CopyPlace::TailA);
    if superblock.sequence.is_multiple_of(2) == is_even_place {
        Ok(superblock)
    } else {
        Err(FormatError::Misplaced { place: place.word(), sequence: superblock.sequence })
    }
}

/// Why a device has no usable superblock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NewestError {
    /// No copy starts with Calpe's magic: this is no member.
    #[error("no Calpe superblock")]
    NotAMember,
    /// There are copies, and none is whole.
    #[error("every superblock copy is damaged: {}", list(.0))]
    Damaged(
        /// What is wrong with each copy that has the magic, in the order given.
        Vec<FormatError>,
    ),
    /// The newest whole copy was written by a newer version, so falling back to an older copy is
    /// not allowed.
    #[error(transparent)]
    Refused(FormatError),
    /// Neither copy of a slot can be read, and the newest may be there.
    #[error("the superblock cannot be read: {0}")]
    Unreadable(
        /// The error of the read.
        String,
    ),
    /// Whole copies of different arrays, devices or lanes: something was copied over part of this device.
    #[error(
        "superblock copies disagree on what this device is: {first}, or {second}; wipe the wrong ones first"
    )]
    Mixed {
        /// One of them.
        first: Identity,
        /// The other.
        second: Identity,
    },
}

/// The device, the array and the lane that a copy names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The array.
    pub array: Uuid,
    /// The device.
    pub device: Uuid,
    /// The lane, of an array of several.
    pub lane: Option<LaneIndex>,
}

impl Identity {
    fn of(superblock: &Superblock) -> Identity {
        let Superblock { array, device, ref part, .. } = *superblock;
        Identity { array, device, lane: part.is_cut().then_some(part.lane) }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(lane) = self.lane {
            write!(f, "lane {lane} of ")?;
        }
        write!(f, "device {} of array {}", self.device, self.array)
    }
}

/// The current superblock: of the whole copies the one with the highest sequence; among equals the first
/// given.
///
/// # Errors
/// When there is none, when the newest is refused ([`FormatError::refused_sequence`]), or when copies of
/// different devices or lanes are mixed.
pub fn newest(
    copies: impl IntoIterator<Item = Result<Superblock, FormatError>>,
) -> Result<Superblock, NewestError> {
    let mut best: Option<Superblock> = None;
    let mut refusal: Option<(u64, FormatError)> = None;
    let mut damaged = Vec::new();
    for copy in copies {
        match copy {
            Ok(copy) => {
                if let Some(best) = &best
                    && Identity::of(best) != Identity::of(&copy)
                {
                    return Err(NewestError::Mixed {
                        first: Identity::of(best),
                        second: Identity::of(&copy),
                    });
                }
                if best.as_ref().is_none_or(|best| copy.sequence > best.sequence) {
                    best = Some(copy);
                }
            }
            Err(FormatError::NoMagic | FormatError::Cleared) => {}
            Err(error) => match error.refused_sequence() {
                Some(sequence) => {
                    if refusal.as_ref().is_none_or(|(highest, _)| sequence > *highest) {
                        refusal = Some((sequence, error));
                    }
                }
                None => damaged.push(error),
            },
        }
    }
    match (best, refusal) {
        (Some(best), Some((sequence, _))) if best.sequence > sequence => Ok(best),
        (_, Some((_, error))) => Err(NewestError::Refused(error)),
        (Some(best), None) => Ok(best),
        (None, None) if damaged.is_empty() => Err(NewestError::NotAMember),
        (None, None) => Err(NewestError::Damaged(damaged)),
    }
}

/// As [`newest`], of a device's four copies as they were read: each with its I/O error as text, or decoded.
/// An update goes to one slot, at both ends. So where neither copy of a slot can be read, the newest may be
/// there: the newest is then unknown, and an older one does not take its place (rule T3). One readable end is
/// enough: an update that is not at both ends was not complete.
///
/// Where both copies of the other slot were read and are damaged, the newest may have been there, and may
/// have said that the array is not clean: the remaining one counts as not clean, and the log is read.
///
/// # Errors
/// As [`newest`], and [`NewestError::Unreadable`].
pub fn newest_read(
    copies: [Result<Result<Superblock, FormatError>, String>; 4],
) -> Result<Superblock, NewestError> {
    for slot in 0..2 {
        if let (Err(error), Err(_)) = (&copies[slot], &copies[slot + 2]) {
            return Err(NewestError::Unreadable(error.clone()));
        }
    }
    let both = |slot: usize, is: fn(&Result<Result<Superblock, FormatError>, String>) -> bool| {
        is(&copies[slot]) && is(&copies[slot + 2])
    };
    let is_blank = (0..2).any(|slot| both(slot, |copy| matches!(copy, Ok(Err(FormatError::NoMagic)))));
    let is_gone =
        (0..2).any(|slot| both(slot, |copy| !matches!(copy, Ok(Ok(_) | Err(FormatError::Cleared)))));
    let mut newest = newest(copies.into_iter().flatten())?;
    // The first update of a device, and no other, leaves the other slot unwritten.
    let is_unwritten = is_blank && newest.sequence <= FIRST_SEQUENCE;
    newest.clean &= !is_gone || is_unwritten;
    Ok(newest)
}

/// Copies that should be whole and are not, and why, of a device's four as they were read: each with its I/O
/// error as text, or decoded. An update is written to both ends of a device, so a copy is missing if only the
/// other end has it. Both copies of a slot are missing if a device has had two superblocks, because updates
/// go to the two slots in turn. The traces of a crash are no damage: a copy that is older than the other
/// end's, or that is cleared.
#[must_use]
pub fn damaged_copies(
    copies: &[Result<Result<Superblock, FormatError>, String>; 4],
) -> Vec<(CopyPlace, String)> {
    let valid = |at: usize| matches!(copies[at], Ok(Ok(_)));
    let newest = copies.iter().flatten().flatten().max_by_key(|copy| copy.sequence);
    // A device that is being built may have had its first superblock alone.
    let has_both_slots =
        newest.is_some_and(|copy| copy.sequence > FIRST_SEQUENCE && copy.role != Role::Replacement);
    let fault = |at: usize| match &copies[at] {
        Ok(Ok(_) | Err(FormatError::Cleared)) => None,
        // Two slots at each end: the same slot at the other end is two further.
        Ok(Err(FormatError::NoMagic)) => {
            (valid((at + 2) % 4) || has_both_slots).then(|| "it is not there".to_owned())
        }
        Ok(Err(error)) => Some(error.to_string()),
        Err(error) => Some(error.clone()),
    };
    (0..4).filter_map(|at| Some((CopyPlace::ALL[at], fault(at)?))).collect()
}

fn list(errors: &[FormatError]) -> String {
    errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::CLEARED_BYTE;
    use super::super::superblock_bytes::tests::example;
    use super::*;

    const DEVICE: u64 = 10 << 20;

    fn at_sequence(sequence: u64) -> Superblock {
        Superblock { sequence, ..example(Role::Member) }
    }

    fn update(device: &mut [u8], superblock: &Superblock, ends: &[usize]) {
        let offsets = superblock_offsets(DEVICE, superblock.sequence);
        for &end in ends {
            let at = offsets[end].0 as usize;
            device[at..at + COPY_BYTES].copy_from_slice(superblock.encode().as_slice());
        }
    }

    fn read(device: &[u8]) -> Result<Superblock, NewestError> {
        newest(all_copy_offsets(DEVICE).map(|at| {
            let at = at.0 as usize;
            Superblock::decode(&device[at..at + COPY_BYTES])
        }))
    }

    #[test]
    fn a_copy_in_a_slot_that_no_update_with_its_sequence_goes_to_does_not_count() {
        for sequence in [6, 7] {
            let copy = at_sequence(sequence).encode();
            let counts = CopyPlace::ALL.map(|place| decode_copy(place, &copy[..]).is_ok());
            let offsets = superblock_offsets(DEVICE, sequence);
            assert_eq!(counts, all_copy_offsets(DEVICE).map(|offset| offsets.contains(&offset)));
        }
        let error = decode_copy(CopyPlace::TailB, &at_sequence(6).encode()[..]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "superblock 6 does not belong at tail B: it was copied there, or altered"
        );
    }

    #[test]
    fn copies_lie_at_both_ends_of_the_device_rounded_down() {
        let offsets = all_copy_offsets(DEVICE + 4095);
        assert_eq!(offsets.map(|o| o.0), [0, 16384, DEVICE - 32768, DEVICE - 16384]);
        assert_eq!(superblock_offsets(DEVICE, 6), [offsets[0], offsets[2]]);
        assert_eq!(superblock_offsets(DEVICE, 7), [offsets[1], offsets[3]]);
        assert_eq!(all_copy_offsets(0).map(|o| o.0), [0, 16384, 0, 16384]);
    }

    #[test]
    fn an_update_torn_at_any_byte_leaves_the_old_or_the_new_superblock() {
        let (old, new) = (at_sequence(7), at_sequence(8));
        let mut before = vec![0; DEVICE as usize];
        update(&mut before, &at_sequence(6), &[0, 1]);
        update(&mut before, &old, &[0, 1]);
        let mut after = before.clone();
        update(&mut after, &new, &[0, 1]);
        // The head copy up to `torn`, then the tail one up to it, as a crash in mid-write leaves them.
        for torn in (0..=COPY_BYTES).step_by(512) {
            for end in 0..2 {
                let mut device = before.clone();
                let offsets = superblock_offsets(DEVICE, 8).map(|o| o.0 as usize);
                if end == 1 {
                    device[offsets[0]..offsets[0] + COPY_BYTES]
                        .copy_from_slice(&after[offsets[0]..offsets[0] + COPY_BYTES]);
                }
                let part = offsets[end]..offsets[end] + torn;
                device[part.clone()].copy_from_slice(&after[part]);
                let expected = if end == 1 || torn == COPY_BYTES { &new } else { &old };
                // A tear that only leaves out trailing zeroes leaves the whole new copy.
                let got = read(&device).unwrap();
                assert!(got == *expected || got == new, "end {end}, torn at {torn}");
            }
        }
    }

    #[test]
    fn a_first_update_cut_off_at_any_sector_is_no_damage() {
        let (older, old, new) = (at_sequence(6), at_sequence(7), at_sequence(8));
        let mut device = vec![0; DEVICE as usize];
        update(&mut device, &older, &[0, 1]);
        update(&mut device, &old, &[0, 1]);
        let copies = |device: &[u8]| {
            all_copy_offsets(DEVICE).map(|at| Ok(Superblock::decode(&device[at.0 as usize..][..COPY_BYTES])))
        };
        // Both ends are cleared, then each is written: every state that a crash can leave between two
        // sectors.
        for what in [&[CLEARED_BYTE; COPY_BYTES], &*new.encode()] {
            for end in superblock_offsets(DEVICE, 8).map(|offset| offset.0 as usize) {
                for sector in (0..COPY_BYTES).step_by(512) {
                    device[end + sector..][..512].copy_from_slice(&what[sector..][..512]);
                    let current = read(&device).expect("one of them is whole");
                    assert!(current == old || current == new);
                    assert_eq!(
                        damaged_copies(&copies(&device)),
                        [],
                        "sector at {sector} of the copy at {end}"
                    );
                }
            }
        }
        device[300] ^= 1;
        assert_eq!(damaged_copies(&copies(&device)).len(), 1);
    }

    #[test]
    fn one_end_is_enough() {
        for end in 0..2 {
            let mut device = vec![0; DEVICE as usize];
            update(&mut device, &at_sequence(7), &[end]);
            assert_eq!(read(&device), Ok(at_sequence(7)));
        }
    }

    #[test]
    fn nothing_and_damage_are_told_apart() {
        let mut device = vec![0; DEVICE as usize];
        assert_eq!(read(&device), Err(NewestError::NotAMember));
        update(&mut device, &at_sequence(8), &[0]);
        device[200] ^= 1;
        match read(&device) {
            Err(NewestError::Damaged(errors)) => assert_eq!(errors.len(), 1),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_older_superblock_is_not_taken_for_the_newest_because_that_cannot_be_read_now() {
        let copies = |unread: &[usize]| {
            let read = |at: usize| match unread.contains(&at) {
                true => Err("Input/output error".to_owned()),
                false => Ok(Ok(at_sequence(if at.is_multiple_of(2) { 6 } else { 7 }))),
            };
            [read(0), read(1), read(2), read(3)]
        };
        for (unread, sequence) in
            [(&[][..], Some(7)), (&[1], Some(7)), (&[0, 1], Some(7)), (&[1, 2], Some(7))]
        {
            let newest = newest_read(copies(unread)).ok().map(|superblock| superblock.sequence);
            assert_eq!(newest, sequence, "{unread:?}");
        }
        for unread in [&[1, 3][..], &[0, 2], &[0, 1, 2, 3]] {
            let error = newest_read(copies(unread)).unwrap_err();
            assert_eq!(error, NewestError::Unreadable("Input/output error".into()), "{unread:?}");
        }
    }

    #[test]
    fn an_older_superblock_counts_as_not_clean_where_the_newest_may_have_rotted() {
        let clean = |sequence| Ok(Ok(Superblock { clean: true, ..at_sequence(sequence) }));
        let damaged = || Ok(Err(FormatError::Checksum { expected: "1".into(), found: "2".into() }));
        let blank = || Ok(Err(FormatError::NoMagic));
        let is_clean = |copies| newest_read(copies).expect("one is whole").clean;
        assert!(is_clean([clean(6), clean(7), clean(6), clean(7)]));
        assert!(is_clean([clean(6), damaged(), damaged(), clean(7)]), "one of each is left");
        assert!(is_clean([blank(), clean(1), blank(), clean(1)]), "there was no other update");
        for rotten in [
            [clean(6), damaged(), clean(6), damaged()],
            [clean(6), damaged(), damaged(), blank()],
            [clean(6), blank(), clean(6), blank()],
            [damaged(), clean(7), damaged(), clean(7)],
        ] {
            assert!(!is_clean(rotten.clone()), "{rotten:?}");
        }
    }

    #[test]
    fn a_refused_copy_outranks_older_ones_only() {
        let newer = |sequence| Err(FormatError::NewerVersion { major: 2, minor: 0, sequence });
        assert_eq!(
            newest([Ok(at_sequence(5)), newer(6)]),
            Err(NewestError::Refused(FormatError::NewerVersion { major: 2, minor: 0, sequence: 6 }))
        );
        assert_eq!(newest([Ok(at_sequence(7)), newer(6)]), Ok(at_sequence(7)));
        assert!(matches!(newest([newer(6), Err(FormatError::NoMagic)]), Err(NewestError::Refused(_))));
    }

    #[test]
    fn copies_of_different_devices_are_not_mixed() {
        let other = Superblock { sequence: 99, ..example(Role::Replacement) };
        assert!(matches!(newest([Ok(at_sequence(5)), Ok(other)]), Err(NewestError::Mixed { .. })));
    }
}
