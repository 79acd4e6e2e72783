//! Why an array cannot be recovered, in words for its administrator.

use crate::array::pages::stripe_map::MapFault;
use crate::units::{Count, MemberIndex, SlotIndex};

/// Why an array cannot be recovered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecoveryError {
    /// Batches that were noted as durable are on no usable member.
    #[error(
        "the log breaks off before batch {sequence}, and all batches below {noted} were durable: more members have \
         lost their log than the array survives; bring back members that are missing, or force the start and lose \
         the last writes"
    )]
    LogBroken {
        /// The first batch that is not there.
        sequence: u64,
        /// Batches below were durable.
        noted: u64,
    },
    /// A batch verifies and cannot be in this array's log.
    #[error(
        "batch {sequence} of the log names blocks that the array does not have: it was written by another version or a defect"
    )]
    Impossible {
        /// The batch.
        sequence: u64,
    },
    /// The end of the log is not known, because of blocks that could not be read (rule R5).
    #[error(
        "whether the log goes on with batch {sequence} is not known, as the log of {members} cannot be read there: writes that \
         were flushed may be in it. Start the array again when it can be read, bring back members that are missing, or force \
         the start and lose the last writes"
    )]
    EndUnreadable {
        /// The first batch that may be there.
        sequence: u64,
        /// Members whose logs could not be read, in words.
        members: String,
    },
    /// Blocks of the log that could not be read hold content that was flushed (rule T3).
    #[error(
        "rows that were flushed cannot be decoded without blocks of the log of {members} that cannot be read: start the array again \
         when they can, bring back members that are missing, or force the start and lose these rows"
    )]
    LogUnreadable {
        /// Members whose logs could not be read, in words.
        members: String,
    },
    /// Members that are missing may have flushed content that others have lost (rule T1).
    #[error(
        "rows that were flushed cannot be decoded with the members that are here, as blocks of their logs are wrong or gone, and \
         {members}, missing now, may have them: bring back members that are missing, or force the start and lose these rows"
    )]
    RowsAbsent {
        /// The members, in words.
        members: String,
    },
    /// A row of the log cannot be decoded because of blocks that could not be read (rule T3).
    #[error(
        "what the log holds of row {row} of slot {slot} cannot be put in place, as blocks that it takes cannot be read: start \
         the array again when they can, bring back members that are missing, or force the start and lose these blocks"
    )]
    RowUnreadable {
        /// The slot.
        slot: SlotIndex,
        /// The row.
        row: usize,
    },
    /// Rows are lost, and without checksums nothing would reveal their wrong content.
    #[error(
        "{} of durable writes cannot be decoded, the first is row {row} of slot {slot}, and without checksums \
         what is there would be read as if it were right: bring back members that are missing, or force the start",
        Count::of(*rows, "row")
    )]
    RowsLost {
        /// The fewest that are lost.
        rows: usize,
        /// The slot of the first.
        slot: SlotIndex,
        /// The first of them.
        row: usize,
    },
    /// There is no room for the note.
    #[error(
        "the log of member {member} has no room for the note that recovery writes: the array kept no reserve"
    )]
    NoRoom {
        /// The member whose log it is.
        member: MemberIndex,
    },
    /// No usable member has a copy of a page.
    #[error(
        "no member in use has a copy of metadata page {page}: more members are missing than the array survives"
    )]
    PageUnavailable {
        /// The page.
        page: u64,
    },
    /// The newest version of a page is not known, because of copies that could not be read (rule T3).
    #[error(
        "what metadata page {page} says last is not known ({why}), and an older version is not taken for it: start the array \
         again when these members can be read, bring back those that are missing, or force the start and lose what is \
         only there"
    )]
    PageUnreadable {
        /// The page.
        page: u64,
        /// The copies that could not be read, in words.
        why: String,
    },
    /// A page of the stripe map is lost.
    #[error("page {page} of the stripe map is lost: more of its copies are bad than the array survives")]
    MapLost {
        /// The page.
        page: u64,
    },
    /// Pages of the stripe map look as if they were never written, but they were.
    #[error(
        "{gone} of {counted} pages of the stripe map that were written look on all members that are here as if they never were: \
         these copies were overwritten, and stripes would read as zeroes. Bring back members that are missing and were in service \
         until the array was stopped: with one good copy of each page nothing is lost. Forced, the start gives up what was in these \
         stripes"
    )]
    MapGone {
        /// The fewest that are gone.
        gone: u64,
        /// The number that were written.
        counted: u64,
    },
    /// A page of the stripe map may be an old one.
    #[error(
        "page {page} of the stripe map may be behind: every copy of it is missing or damaged in one of its two places, and \
         the newer version may have been there; bring back members that are missing, or force the start, and stripes may \
         read as they were before"
    )]
    MapBehind {
        /// The page.
        page: u64,
    },
    /// The pages of the stripe map make no map.
    #[error(transparent)]
    Map(#[from] MapFault),
}

impl RecoveryError {
    /// Whether a forced start goes on all the same, and gives up the content that prevents it.
    #[must_use]
    pub(crate) fn yields_to_force(&self) -> bool {
        match self {
            RecoveryError::LogBroken { .. }
            | RecoveryError::EndUnreadable { .. }
            | RecoveryError::LogUnreadable { .. }
            | RecoveryError::RowsAbsent { .. }
            | RecoveryError::RowUnreadable { .. }
            | RecoveryError::RowsLost { .. }
            | RecoveryError::PageUnreadable { .. }
            | RecoveryError::MapGone { .. }
            | RecoveryError::MapBehind { .. } => true,
            RecoveryError::Impossible { .. }
            | RecoveryError::NoRoom { .. }
            | RecoveryError::PageUnavailable { .. }
            | RecoveryError::MapLost { .. }
            | RecoveryError::Map(_) => false,
        }
    }
}
