//! Rules of the crash-safety design that a test can switch off, one at a time, to prove that breaking them is
//! noticed.
//!
//! In a release build no rule can be broken: `is_off` is false at compile time and its branches vanish. In a
//! build with debug assertions the choice is the thread's, so tests that run side by side do not disturb each
//! other. Invariant: nothing but a test calls [`Mutation::with`].

use std::cell::Cell;

thread_local! {
    static BROKEN: Cell<Option<Mutation>> = const { Cell::new(None) };
}

macro_rules! mutations {
    ($($(#[$doc:meta])* $variant:ident $name:literal),* $(,)?) => {
        /// A rule that is not kept.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Mutation { $($(#[$doc])* $variant),* }

        impl Mutation {
            /// All of them.
            pub const ALL: &[Mutation] = &[$(Mutation::$variant),*];

            /// Its name, that of the model where that has it.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Mutation::$variant => $name),* }
            }
        }
    };
}

mutations! {
    /// E4: pieces of epochs before the last complete one are ignored; writes acknowledged before a bump are
    /// lost.
    OldEpochPiecesIgnored "old-epoch-pieces-ignored",
    /// A1: only members that hold an epoch itself are usable; a bump that a crash cut short leaves too few.
    EpochOnlyHighestNumber "epoch-only-highest-number",
    /// E1: epochs are compared by number; two that were made apart from each other are taken for one.
    EpochWithoutId "epoch-without-id",
    /// T2: writes that were acknowledged before the array failed are gone when it serves again, and the next
    /// flush succeeds.
    LostWritesUntold "lost-writes-untold",
    /// A3: a member that served apart from the others is taken for one that missed writes; data written there
    /// is built over.
    OtherHistoryIsStale "other-history-is-stale",
    /// A3: a member that is newer than the older copies which the array was started from is taken for one
    /// that missed writes; the only copy of the data that they lack is built over.
    NewerIsStale "newer-is-stale",
    /// A start that finds fewer pages of the stripe map than were written takes the others for never written.
    MapPagesNotCounted "map-pages-not-counted",
    /// A page of the stripe map is counted before its first version is flushed; a start after a power cut
    /// misses a page that never was there.
    MapPagesCountedUnflushed "map-pages-counted-unflushed",
    /// A2: k members are enough; with k <= m two halves serve, and each lacks writes that the other
    /// acknowledged.
    NoQuorum "no-quorum",
    /// A2: more than half of the last live set is enough; members that were left out cannot outvote it
    /// together.
    DynamicMajority "dynamic-majority",
    /// E2: the update that finishes an epoch also goes to devices that are being built for its members, and
    /// names them; after a crash they count as holding what those members held.
    NewDeviceInOldEpoch "new-device-in-old-epoch",
    /// T6: a device that has just joined is caught up from the epoch before, in which it was being built; it
    /// never gets the data that it lacked then.
    CaughtUpFromBeforeJoin "caught-up-from-before-join",
    /// E2: the next epoch is begun before the last is complete; members that hold the one before fall out of
    /// the line.
    BumpNotFinishedFirst "bump-not-finished-first",
    /// A4: replay goes ahead of its new epoch; after a crash within it other members replay differently.
    EpochAfterRedo "epoch-after-redo",
    /// A4 and R7: neither the new epoch nor the note is durable before replay goes in place.
    EpochAfterRedoNorNote "epoch-after-redo-nor-note",
    /// E3: blocks go in place while a loss is not recorded; the member that missed them counts as current.
    InPlaceBeforeBump "in-place-before-bump",
    /// E3: writes are acknowledged while a loss is not recorded; the member that missed them may be all that
    /// returns.
    AckBeforeBump "ack-before-bump",
    /// R1: data that is read before deciding may be in caches only; a power cut takes it after it was served.
    /// The flushes of the new epoch's superblocks and, where nothing is written again, that of R6 would have
    /// the same effect: they are left out with it.
    NoFlushBeforeDecide "no-flush-before-decide",
    /// R6: pieces that are missing on some members stay so; with other members gone next time the batch is
    /// lost half redone.
    NoRelog "no-relog",
    /// R4: the first prefix that cannot be recovered ends the log, though later images heal it; durable
    /// writes are lost, where images are damaged that no row needs any more.
    BatchByBatch "batch-by-batch",
    /// R3, R5: a batch that cannot be recovered does not end the log; rows it left undecodable are served.
    NoPrefix "no-prefix",
    /// R9: the log does not start anew; a batch that was dropped counts after the next crash.
    NoCut "no-cut",
    /// W2: blocks go in place before the note; if the log is damaged, rows that are half in place are rolled
    /// back.
    NoNoteBeforeDestage "no-note-before-destage",
    /// R7: replay goes in place before its decision is durable; if the log is damaged then, the next decides
    /// otherwise.
    NoNoteBeforeRedo "no-note-before-redo",
    /// R7: the note shares the flush of the pieces that it promises; it may survive without them.
    NoteWithRelog "note-with-relog",
    /// R6: missing columns of fresh slots are written with the redo; the note may survive without them.
    RebuildAfterNote "rebuild-after-note",
    /// R5: a log that breaks off before what was noted is served; durable writes are gone without a word.
    NoteNotChecked "note-not-checked",
    /// W4: log space is used again before the new tail is durable; a crash finds the old tail and no batch
    /// there.
    OverwriteBeforeTailDurable "overwrite-before-tail-durable",
    /// W2: blocks go in place before their batch is durable; a crash leaves torn rows and no log of them.
    DestageBeforeDurable "destage-before-durable",
    /// W4: the tail moves before what is in place is flushed; a crash loses it in both places.
    TruncateBeforeFlush "truncate-before-flush",
    /// W3: a slot is used again before the record that freed it is durable; a crash finds the new data under
    /// the old stripe.
    ReuseBeforeDurable "reuse-before-durable",
    /// T2: a write that takes the rest of its stripe along takes what it could not read, too; blocks that are
    /// lost read as zeroes.
    TakesAlongWhatIsMissing "takes-along-what-is-missing",
    /// R4: a fresh record leaves older images of its slot in force; replay overwrites the fresh data with
    /// them.
    FreshDoesNotVoid "fresh-does-not-void",
    /// W3: images of a slot go in place though it was given up since; they overwrite data that was written
    /// there afresh.
    DestageBySlotNumber "destage-by-slot-number",
    /// R8: replay leaves copies of pages as they are; the next start reads an older stripe map. Loading a
    /// page also mends copies that are behind, which would have the same effect: it is left out with it.
    PagesNotRewritten "pages-not-rewritten",
    /// W2: pages are written back before the batches that they depend on are durable; a crash leaves a map to
    /// data that is not there.
    PagesBeforeDurable "pages-before-durable",
    /// T3: a page is taken as a copy shows it although another copy, which may be newer, could not be read;
    /// stripes are read, and written again, as they were before.
    UnreadTakenForOld "unread-page-taken-for-old",
    /// T1, T3: a page whose copies cannot be read for a moment is lost, and its blocks with it.
    UnreadTakenForLost "unread-page-taken-for-lost",
    /// T3: both places of a copy that could not be read are written at once; a crash leaves no version of
    /// those that could be read again.
    UnreadWrittenOver "unread-copy-written-over",
    /// T3: a page is taken from one copy although that shows another version than the one that is remembered;
    /// changes that an old copy has missed are gone.
    AnyVersionBelieved "any-version-believed",
    /// A page that was read from one copy is written next in the places of its newest version; a power cut
    /// within that write leaves none.
    NewestWrittenOver "newest-written-over",
    /// A device that joins without a page counts as having it in the place where the one before had it; it
    /// never gets the page, and the loss of others leaves none.
    PlacesOutliveReturn "places-outlive-return",
    /// T6: updates of the superblocks are not counted; a member rolled back to an earlier start counts as
    /// current.
    NoUpdateCount "no-update-count",
    /// T6: an update that is being written counts as complete; it convicts the honest members that it did not
    /// reach.
    CompleteOfItself "complete-of-itself",
    /// T6: a member whose ring lacks batches that no member has any more counts as current, although their
    /// space was reused.
    NoReusedSpace "no-reused-space",
    /// A1, T6: a member that holds only the parent of an epoch counts as current although batches were
    /// written in that epoch.
    WritesInEpochPassedOver "writes-in-epoch-passed-over",
    /// T6: replay starts at the highest tail for all; a member whose tail is lower keeps its old content.
    NoOwnRedo "no-own-redo",
    /// T6: pieces that replay writes again in a member's log count as the member's own; its tail is believed
    /// before it is true.
    RewrittenTailBelieved "rewritten-tail-believed",
    /// T6: a member that left is caught up whatever its log shows; data that it held before it was rolled
    /// back is not written again.
    LeftTailNotChecked "left-tail-not-checked",
    /// T6: a member that leaves need not show a tail that it was not given, and blocks that were put in place
    /// since are not marked.
    ToldTailAlone "told-tail-alone",
    /// R2, T6: one device alone is believed about where the log starts; content of the log is skipped.
    LoneLogStartBelieved "lone-log-start-believed",
    /// R5, T3: the end of the log is dropped although parts of the rings that cannot be read for a moment may
    /// hold it.
    UnreadTailDropped "unread-tail-dropped",
    /// T1: a start gives up rows that were flushed although a member that is not here may have blocks that
    /// others have lost.
    AbsentTakenForLost "absent-taken-for-lost",
    /// Old parity enters new parity without being verified: damage of one block becomes damage of its row.
    OldParityNotVerified "old-parity-not-verified",
    /// T4: a passing shortage of the host is taken for a fault of the member; a shortage of all takes all
    /// out.
    ShortageIsAFault "shortage-is-a-fault",
    /// T5: read errors take a member out although a row is listed as bad on another; its last copy is gone.
    LastCopyNotSpared "last-copy-not-spared",
    /// T5: errors that were healed count; bad sectors that cost nothing take a member out.
    HealedErrorsCount "healed-errors-count",
    /// New parity that a job computed counts although old blocks that it was computed from turned out wrong.
    BlendNotVerified "blend-not-verified",
    /// T1: a write sets aside at once what it cannot read; other blocks that could soon decode it no longer
    /// do.
    NoPatience "no-patience",
    /// T1: a block that could not be read is called lost; its hash, which would recognise its content when it
    /// can be read again, is gone.
    LostWithoutEvidence "lost-without-evidence",
    /// T1: a rebuild also writes blocks that it could not read; the device had the only copy.
    RebuildWritesWhatItLacks "rebuild-writes-what-it-lacks",
    /// T1: the copy of a page on a returning member is marked as damaged although it is the last one and
    /// right.
    ReturningCopyVoided "returning-copy-voided",
    /// T3: the copy of a page on a returning member is taken for the newest version though it has a fault of
    /// its own.
    OfferNotWeighed "offer-not-weighed",
    /// T4: a pass that waits for room on a member keeps clients from the stripe meanwhile.
    HeldThroughShortage "held-through-shortage",
    /// T6: a device under construction that was rolled back over an unclean stop goes into service with old
    /// blocks.
    BelievesWhatWasBuilt "believes-what-was-built",
    /// T6: where the others call the array clean, what the superblock of a device under construction calls
    /// built is believed, though that superblock is older and not clean.
    CleanOfOthersBelieved "clean-of-others-believed",
    /// T1: a device joins although it lacks blocks that cannot be read for a moment; the one that it replaces
    /// had the only copy.
    JoinsLacking "joins-lacking",
    /// T2: a write that released its rows writes old bytes that it had read of them before; newer writes of
    /// others are undone.
    WritesWhatItReadBefore "writes-what-it-read-before",
    /// Readers on other threads are not shown what a write has changed, and read what it has replaced.
    ViewWriteLate "view-write-late",
    /// Readers on other threads are not shown that a slot has images, and read what is still in place.
    ViewImagesLate "view-images-late",
    /// Readers on other threads are not shown that a stripe has moved, and read its old slot.
    ViewMoveLate "view-move-late",
    /// Readers on other threads are not shown that a stripe was discarded, and read what it held.
    ViewDiscardLate "view-discard-late",
    /// Readers on other threads are not shown that a member has left, and read what it has missed.
    ViewMembersLate "view-members-late",
    /// Readers on other threads do not look at their ticket after the read, and take another stripe's bytes
    /// where no hash tells.
    ViewTicketNotCompared "view-ticket-not-compared",
    /// Readers on other threads are shown the old version of a page, and where it is, while the page is
    /// cached and changes; they take old bytes that it vouches for.
    ViewPagePlaceKept "view-page-place-kept",
    /// Readers on other threads take the hashes of a page from a copy that shows another version than the one
    /// that the view names; they take old bytes that it vouches for.
    ViewPageVersionNotCompared "view-page-version-not-compared",
    /// Lanes: a flush goes to one lane only; a power cut takes what the others have acknowledged.
    FlushForgetsALane "flush-forgets-a-lane",
    /// Lanes: a request that reads nothing is answered when the first of its parts has ended.
    AnsweredByFirstPart "answered-by-first-part",
    /// Lanes: of a request over several lanes the last part alone is carried out.
    LastPartAlone "last-part-alone",
    /// Lanes: of zeroes over several lanes that must be fast the last part alone is carried out.
    FastZeroesInLastLane "fast-zeroes-in-last-lane",
    /// Lanes: zeroes that must be fast are refused by a lane after others have written theirs.
    LanesRefuseAlone "lanes-refuse-alone",
    /// Lanes: a request succeeds although a part of it has failed.
    PartErrorForgotten "part-error-forgotten",
    /// Lanes: what parts have read is joined in the order in which they ended.
    JoinedAsTheyEnd "joined-as-they-end",
    /// Lanes: a lane reads where the next one lies.
    ReadsOtherWindow "reads-other-window",
    /// Lanes: a lane writes data where the next one lies.
    WritesOtherWindow "writes-other-window",
    /// Lanes: after a restart stripes are looked for in other lanes than they were written to.
    CutForgotten "cut-forgotten",
    /// Lanes: clients are not told of writes that another lane than the first has lost.
    LostWritesOfALaneUntold "lost-writes-of-a-lane-untold",
    /// Lanes: each changes over to a new device when it has built its part; the device fails in another one,
    /// and the lanes stay on different devices.
    LaneChangesOverAlone "lane-changes-over-alone",
    /// Lanes: one lets go of a device that another is without, although that alone has the last copies of
    /// blocks there.
    LetsGoOfWhatItNeeds "lets-go-of-what-it-needs",
    /// Lanes: a replacement is cancelled in those that have not changed over yet; the lanes stay on different
    /// devices.
    CancelledInSomeLanes "cancelled-in-some-lanes",
    /// Lanes: all have the same secret; a log or page that was written into another lane's verifies there.
    LanesShareASecret "lanes-share-a-secret",
    /// J2 of docs/cas.md: an entry names chunks whose segment is not answered.
    CasEntryBeforeChunks "cas-entry-before-chunks",
    /// J3: a write is answered when its records join the journal.
    CasAnsweredBeforeEntry "cas-answered-before-entry",
    /// J3: a write is answered when its entry is, though one before is not.
    CasEntriesNotInOrder "cas-entries-not-in-order",
    /// J5: clients are served before the entry of the start is answered.
    CasNoStartEntry "cas-no-start-entry",
    /// J5: no random number tells the entries of a start from those of others, and it has no entry of its
    /// own.
    CasNoRandomNumber "cas-no-random-number",
    /// K1: a root is written before its pages are answered.
    CasRootBeforePages "cas-root-before-pages",
    /// K1: a root is written before entries that it contains are answered.
    CasRootBeforeEntries "cas-root-before-entries",
    /// K1: a start leaves the place as it is that lacks the newest root.
    CasRootNotMended "cas-root-not-mended",
    /// K2: a segment is free before the entry that gives it up is answered.
    CasReuseBeforeEntry "cas-reuse-before-entry",
    /// K2: metadata that only the older root names is overwritten before the newer one is on both places.
    CasPagesReusedEarly "cas-pages-reused-early",
    /// K3: journal segments are given up before a root is past them.
    CasJournalGivenUpEarly "cas-journal-given-up-early",
    /// D1: a duplicate is not looked at once more when its record joins.
    CasDuplicateNotCheckedAgain "cas-duplicate-not-checked-again",
    /// D1: a duplicate counts by its bits in the index alone.
    CasDuplicateByItsTag "cas-duplicate-by-its-tag",
    /// D2: a chunk moves although it is gone or elsewhere.
    CasMoveNotChecked "cas-move-not-checked",
    /// D3: what is read is not compared with the hash.
    CasReadNotCompared "cas-read-not-compared",
}

impl Mutation {
    /// Runs with this rule switched off in the calling thread. Has no effect in a release build.
    pub fn with<T>(self, run: impl FnOnce() -> T) -> T {
        struct Restore(Option<Mutation>);
        impl Drop for Restore {
            fn drop(&mut self) {
                BROKEN.set(self.0);
            }
        }
        let _restore = Restore(BROKEN.replace(Some(self)));
        run()
    }
}

/// Whether a test has switched this rule off.
#[inline]
pub(crate) fn is_off(rule: Mutation) -> bool {
    cfg!(debug_assertions) && BROKEN.get() == Some(rule)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_off_while_a_test_says_so_and_in_its_thread_only() {
        assert!(!is_off(Mutation::NoCut));
        Mutation::NoCut.with(|| {
            assert!(is_off(Mutation::NoCut) && !is_off(Mutation::NoRelog));
            std::thread::scope(|scope| scope.spawn(|| assert!(!is_off(Mutation::NoCut))).join()).unwrap();
        });
        assert!(!is_off(Mutation::NoCut));
        let panicked = std::panic::catch_unwind(|| Mutation::NoCut.with(|| panic!("as tests do")));
        assert!(panicked.is_err() && !is_off(Mutation::NoCut));
    }
}
