//! Superblock updates: epochs, the dirty mark, progress; and the gate that writes and acknowledgements pass.
//!
//! One update at a time goes to every device in use: first a flush where progress is recorded, then both
//! copies of the new sequence number, one after the other, each with a flush; the slot of the first update
//! after a start is cleared before. A device that was replaced gets the update that records its replacement,
//! as its last. Without it, together with other devices that have missed it, it could pass for the array. It
//! gets the update after the others, because until then it counts.
//!
//! Rules E1-E3 of the crash-safety design: while a loss is not yet recorded durably on all remaining members,
//! no write starts and none is acknowledged. Rule T6: each update has a number and names the newest one that
//! was complete when it began, so that a device that was rolled back is recognised. A statement about the
//! content of all members (that they are clean, that their log starts here, that one joins whose log is void)
//! takes two updates: the first is made when it is true, the second records it, and that the first was
//! complete. So a copy of a device from before it was true is recognised as well.

mod update;

use crate::array::base::members::{Device, Member, Progress, Replaced, Which};
use crate::array::log::permits::Standing;
use crate::array::members::assembly::{Assembled, CLAIM_STEP_MAX};
use crate::array::members::current::{Mark, why_kept};
use crate::array::members::departed::Departed;
use crate::array::members::supers::update::{Job, Update, UpdateStep};
use crate::array::mutation::{Mutation, is_off};
use crate::array::refusal::{Behind, Overclaim};
use crate::array::{Array, Core, Stopping};
use crate::array::{NoticeKind, NoticeLevel};
use crate::block_io::{Buf, DeviceId};
use crate::format::{
    Epoch, LogStart, MemberRecord, MemberSet, MemberState, ReplacementRecord, Role, ScrubRecord, Superblock,
};
use crate::units::{MemberIndex, SlotIndex, Timestamp};
use uuid::Uuid;

pub(in crate::array) struct Supers {
    /// The content written last, or being written; per-device fields are filled in for each device.
    template: Superblock,
    /// Highest epoch number and sequence in use anywhere.
    epoch_number: u64,
    random: u64,
    /// The epoch of `template` is on every member of its live set that is in service. Until it is, no other
    /// epoch may follow it (E2, A4): members that hold its parent would fall out of the line.
    epoch_is_complete: bool,
    /// A new epoch is due although the live set is the same: after a start, or because a member has a new
    /// device.
    bump_due: bool,
    /// The newest update that every device in use has.
    update_complete: u64,
    log: LogState,
    /// Where the log is to start once replay is over, and the first update that was made since.
    new_log_start: Option<(LogStart, Option<u64>)>,
    /// What members that are out of service held when they left.
    departed: Departed,
    /// Losses of devices so far.
    losses: u64,
    /// The mark "writes may be under way".
    dirty: bool,
    /// Whether something has changed that the next update should record.
    wanted: bool,
    job: Option<Job>,
    durable: Durable,
    saved: Saved,
}

/// What the superblocks know of the log.
#[derive(Default)]
struct LogState {
    /// How it stands, by its last answer.
    standing: Standing,
    /// The first update made since everything in it is in place. Once it is complete, the next may
    /// record that.
    quiet_update: Option<u64>,
}

/// The content of the last complete update, on all devices in use.
struct Durable {
    /// How many losses of devices are recorded.
    losses: u64,
    /// The mark "writes may be under way".
    dirty: bool,
    /// Where the log starts; none while that is being changed.
    log_start: Option<LogStart>,
}

/// When progress was last recorded, and the state of the passes then.
struct Saved {
    at: Timestamp,
    /// See [`Array::progress_mark`].
    progress: u64,
}

/// A device as it was when the update began; its state may have changed since.
struct Participant {
    member: MemberIndex,
    device: DeviceId,
    bytes: u64,
    uuid: Uuid,
    role: Role,
    /// The sequence of its superblock. Its parity differs from that of the one it has, so that it goes to the
    /// other slot.
    sequence: u64,
    /// Its superblock, once it has been encoded: the same at both ends.
    encoded: Option<Buf>,
}

impl Participant {
    /// Whether it was replaced, and the update is to mark it as such.
    fn is_marked(&self) -> bool {
        self.role == Role::Replaced
    }
}

/// How often progress of passes is recorded: a restart has to repeat the rest. Likewise for new pages of the
/// stripe map, whose loss a restart notices only if they are counted.
const SAVE_INTERVAL_NS: u64 = 5_000_000_000;

/// An array without writes for this long is marked clean, so that the next start after a crash has nothing to
/// replay.
const IDLE_CLEAN_NS: u64 = 2_000_000_000;

impl Supers {
    /// Starts with everything to be recorded: a new epoch over the members that are here (A4).
    pub(in crate::array) fn new<K>(assembled: &Assembled<K>, seed: u64) -> Supers {
        let Assembled { sequence, update, update_complete, epoch_number, epoch_is_complete, .. } = *assembled;
        let template = Superblock { sequence, update, ..assembled.superblock.clone() };
        let dirty = !template.clean;
        let departed = Departed::new(&template.left, &template.epoch, assembled.rolled_back);
        Supers {
            template,
            epoch_number,
            random: seed,
            epoch_is_complete,
            update_complete,
            log: LogState::default(),
            new_log_start: None,
            departed,
            bump_due: true,
            losses: 1,
            // A log that was not empty keeps its mark until it is replayed.
            dirty,
            wanted: true,
            job: None,
            durable: Durable { losses: 0, dirty, log_start: None },
            saved: Saved { at: Timestamp(0), progress: 0 },
        }
    }

    /// Records that a device has left service: the superblocks must say so before anything is acknowledged
    /// again.
    pub(in crate::array) fn note_loss(&mut self) {
        self.losses += 1;
        self.wanted = true;
    }

    /// Has the next update say that no write is under way.
    pub(super) fn mark_clean(&mut self) {
        self.dirty = false;
    }

    /// Takes back that the array is clean, unless its members say so already.
    pub(in crate::array) fn unmark_clean(&mut self) {
        self.dirty |= !self.template.clean;
    }

    /// Records that a member leaves service. `tail`: batches below are in place on it, as far as that is
    /// known.
    pub(in crate::array) fn note_leaving(&mut self, member: MemberIndex, tail: Option<u64>) {
        let Epoch { parent, live, .. } = self.template.epoch;
        let is_between = !self.epoch_is_complete && live.contains(member);
        self.departed.leave(member, tail, if is_between { parent } else { 0 });
    }

    /// What members that are out of service held when they left.
    pub(super) fn departed(&self) -> &Departed {
        &self.departed
    }

    /// See [`Departed`].
    pub(in crate::array) fn departed_mut(&mut self) -> &mut Departed {
        &mut self.departed
    }

    /// The number of the last epoch in which a member was current; none where that is not known.
    pub(in crate::array) fn current_until(&self, member: MemberIndex) -> Option<u64> {
        self.departed.current_until(member, &self.template.epoch)
    }

    /// The first update that will record the present state, and the number of losses that must be recorded by
    /// then.
    pub(super) fn next_record(&self) -> (u64, u64) {
        (self.template.update + 1, self.losses)
    }

    /// Whether all devices have this update, or a later one, and that many losses are recorded.
    pub(super) fn is_recorded(&self, (update, losses): (u64, u64)) -> bool {
        self.update_complete >= update && self.durable.losses >= losses
    }

    /// The mark that a device must show if it was in service when the last update was complete.
    pub(super) fn mark(&self) -> Mark {
        Mark { epoch: self.template.epoch, update: self.update_complete, tail: 0 }
    }

    /// Has a new epoch record that a member has a new device, so that the old one never counts again.
    pub(super) fn note_exchange(&mut self) {
        self.bump_due = true;
        self.note_loss();
    }

    /// Records that a device that was built is in service; the log is empty. Earlier pieces in the ring of
    /// the device are void from here on, whichever update first records the device: it may be one of the
    /// log's next life, in which it is not known any more that it was empty.
    pub(in crate::array) fn note_join(&mut self) {
        let epoch = self.epoch_number + 1;
        if let Some(sequence) = self.log.standing.needless {
            self.template.log_start = LogStart { sequence, epoch };
        }
        self.note_exchange();
    }

    /// A number that a device claims and that cannot have been reached by counting. It is not believed (T6).
    pub(super) fn unbelievable(&self, superblock: &Superblock) -> Option<Overclaim> {
        let claims = [
            ("epoch", superblock.epoch.number, self.epoch_number),
            ("superblock", superblock.sequence, self.template.sequence),
        ];
        let (what, claimed, known) =
            claims.into_iter().find(|&(_, claimed, known)| claimed > known.saturating_add(CLAIM_STEP_MAX))?;
        Some(Overclaim { what, claimed, known })
    }

    /// Why a device must not be built over although it is not part of the array that is served (A3).
    pub(super) fn apart(&self, superblock: &Superblock) -> Option<Behind> {
        let mut line = self.template.clone();
        // The present record: the template has that of the last update.
        line.left.iter_mut().zip(self.departed.all()).for_each(|(left, now)| *left = now);
        // The device is out of service, even while no update says so yet.
        if line.epoch.live.remove(superblock.member) {
            line.left[usize::from(superblock.member.0)].update = line.update;
        }
        why_kept(superblock, &line)
    }

    /// Records that a device comes in that was in the array before, perhaps on the other side of a divided
    /// one that was forced to start. Everything left on it must be older than what is written from now on:
    /// its superblocks by their sequence, the pieces in its ring by the epoch that it joins with. That epoch
    /// number is passed at once, so that a restart knows it too.
    pub(super) fn note_return(&mut self, superblock: &Superblock) {
        self.template.sequence = self.template.sequence.max(superblock.sequence);
        if superblock.epoch.number > self.epoch_number {
            self.epoch_number = superblock.epoch.number;
            self.bump_due = true;
        }
        self.note_loss();
    }

    /// Has every member record, before anything is served, that the log is empty below this start (R9).
    pub(in crate::array) fn set_log_start(&mut self, start: LogStart) {
        self.new_log_start = Some((start, None));
        self.durable.log_start = None;
        self.wanted = true;
    }

    /// Forgets where the log is to start, because it is read again.
    pub(in crate::array) fn forget_log_start(&mut self) {
        self.new_log_start = None;
    }

    /// Records that the log has issued a batch: its content is no longer in place everywhere.
    pub(in crate::array) fn note_batch(&mut self) {
        self.log.quiet_update = None;
    }

    /// Records how the log stands.
    pub(in crate::array) fn note_standing(&mut self, standing: Standing) {
        self.log.standing = standing;
    }

    /// Pages of the stripe map that have a version, by the last answer.
    fn map_pages(&self) -> u64 {
        self.log.standing.map_pages.unwrap_or(0)
    }

    /// Whether a replay would find nothing to do, by the last answer.
    pub(in crate::array) fn is_log_needless(&self) -> bool {
        self.log.standing.needless.is_some()
    }

    /// Whether that is so, and no copies of pages have to be written again.
    pub(in crate::array) fn is_log_drained(&self) -> bool {
        self.log.standing.is_drained
    }

    /// Asks for the mark that the array is not clean, if it is missing.
    pub(in crate::array) fn want_dirty(&mut self) {
        if !self.dirty {
            self.dirty = true;
            self.wanted = true;
        }
    }

    /// Whether the members have that mark, and it is not being taken back.
    pub(in crate::array) fn is_durably_dirty(&self) -> bool {
        let marking_clean = self.job.as_ref().is_some_and(Job::says_clean);
        self.durable.dirty && !marking_clean
    }

    /// Whether all devices have an update that was made since everything in the log is in place.
    pub(in crate::array) fn is_known_quiet(&self) -> bool {
        self.log.quiet_update.is_some_and(|quiet| quiet <= self.update_complete)
    }

    /// Asks for the update that lets the array be known to be quiet, unless it is under way.
    pub(in crate::array) fn want_quiet(&mut self) {
        self.wanted |= self.log.quiet_update.is_none() && self.job.is_none();
    }

    /// Whether all members record that the log starts here.
    pub(in crate::array) fn have_log_start(&self, start: LogStart) -> bool {
        self.durable.log_start == Some(start)
    }

    /// Losses of devices so far.
    pub(in crate::array) fn losses(&self) -> u64 {
        self.losses
    }

    /// Asks for an update that no operation waits for.
    pub(in crate::array) fn want(&mut self) {
        self.wanted = true;
    }

    pub(in crate::array) fn is_dirty(&self) -> bool {
        self.dirty
    }

    pub(in crate::array) fn epoch_number(&self) -> u64 {
        self.template.epoch.number
    }

    pub(in crate::array) fn epoch(&self) -> Epoch {
        self.template.epoch
    }

    /// The live set of the last epoch.
    pub(in crate::array) fn live(&self) -> MemberSet {
        self.template.epoch.live
    }

    pub(in crate::array) fn template(&self) -> &Superblock {
        &self.template
    }

    pub(in crate::array) fn is_busy(&self) -> bool {
        self.job.is_some()
    }

    /// Whether finished writes and flushes may be acknowledged: every loss is on disk.
    pub(in crate::array) fn acknowledgements_allowed(&self, core: &Core) -> bool {
        self.losses == self.durable.losses && !core.is_failed()
    }

    /// Whether blocks and pages may be written in place, and log space be given back.
    pub(in crate::array) fn in_place_allowed(&self, core: &Core) -> bool {
        self.acknowledgements_allowed(core) || (is_off(Mutation::InPlaceBeforeBump) && !core.is_failed())
    }

    /// Whether an update is wanted and may begin.
    fn is_due(&self, core: &Core) -> bool {
        self.wanted && self.job.is_none() && !core.is_failed() && !core.is_stopped()
    }

    /// Whether the last record of progress is old enough for another one.
    fn is_save_due(&self, core: &Core) -> bool {
        core.now.nanos_since(self.saved.at) >= SAVE_INTERVAL_NS
    }

    /// Asks for an update if there is progress to record.
    fn save(&mut self, progress: u64) {
        self.wanted |= progress != self.saved.progress;
    }

    /// Whether the array has been quiet for so long that it is marked clean once its log is empty.
    fn is_idle(&self, core: &Core) -> bool {
        let quiet = core.load.write_ops == 0 && core.now.nanos_since(core.load.last_write) >= IDLE_CLEAN_NS;
        // In a clean array a start believes what was built, so it would have to record less.
        let is_proven = !core.has_open_proofs();
        let is_free = self.job.is_none() && core.stop.stopping.is_none() && !core.is_failed();
        quiet && self.dirty && is_free && is_proven
    }

    /// Begins an update that records the present state.
    fn start(&mut self, core: &mut Core, scrub: ScrubRecord, progress: u64) {
        let before = self.before();
        let template = self.next_superblock(core, scrub);
        self.begin(core, template, before, progress);
    }

    /// The content of the next update: the present states and progress, in a new epoch when the live set
    /// differs. While the present epoch is not complete the update only finishes that one.
    fn next_superblock(&mut self, core: &Core, scrub: ScrubRecord) -> Superblock {
        let (online, finishes) = (core.online(), !self.epoch_is_complete);
        let mut next = self.template.clone();
        // Of each pair of numbers a device gets the one whose slot does not hold its newest superblock.
        // Otherwise one that has missed an update, or has it at one end only, would be left with an older one
        // when this one is torn.
        next.sequence = next.sequence.saturating_add(2) & !1;
        if (!finishes || is_off(Mutation::BumpNotFinishedFirst))
            && (self.bump_due || next.epoch.live != online)
        {
            self.begin_epoch(&mut next, online);
        }
        // A device that is being built gets the updates too; one that joins may be the only device to get the
        // one after.
        for (at, _) in
            core.roster.members.iter().enumerate().filter(|(_, m)| m.state == MemberState::Rebuilding)
        {
            self.departed.gets_updates(MemberIndex(at as u16), next.update + 1);
        }
        next.left = self.departed.records(next.epoch.live);
        next.update += 1;
        next.update_complete =
            if is_off(Mutation::CompleteOfItself) { next.update } else { self.update_complete };
        self.record_log(&mut next);
        next.scrub = scrub;
        (next.members, next.replacements) = core.records(&next, finishes);
        next
    }

    /// `next` begins an epoch over the members that are `online`.
    fn begin_epoch(&mut self, next: &mut Superblock, online: MemberSet) {
        self.epoch_number += 1;
        self.epoch_is_complete = false;
        self.bump_due = false;
        let before = next.epoch;
        next.epoch =
            Epoch { number: self.epoch_number, id: self.next_random(), parent: before.id, live: online };
        self.departed.begin_epoch(&before, online, next.update);
    }

    /// Sets in `next` what it says of the log, by its last answer, and whether the array is clean.
    fn record_log(&mut self, next: &mut Superblock) {
        let Standing { needless, map_pages, .. } = self.log.standing;
        next.map_pages = map_pages.unwrap_or(next.map_pages);
        self.log.quiet_update = needless.and(self.log.quiet_update.or(Some(next.update)));
        if let (Some(sequence), true) = (needless, self.is_known_quiet()) {
            next.log_start = LogStart { sequence, epoch: next.epoch.number };
        }
        match &mut self.new_log_start {
            Some((start, Some(since))) if *since <= self.update_complete => {
                next.log_start = *start;
                self.new_log_start = None;
            }
            Some((_, since)) => *since = since.or(Some(next.update)),
            None => {}
        }
        next.clean = !self.dirty && (next.clean || self.is_known_quiet());
    }

    /// SplitMix64: epoch identities only have to differ.
    fn next_random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)).max(1)
    }
}

impl Array {
    /// Starts an update when one is wanted and none is running.
    pub(in crate::array) fn pump_supers(&mut self) {
        if !self.supers.is_due(&self.core) || self.is_epoch_late() || self.is_unjudged() {
            return;
        }
        self.ask_log();
        let progress = self.progress_mark();
        self.supers.start(&mut self.core, self.passes.scrub_record(), progress);
    }

    /// Takes the end of an I/O of an update. Its fault, if any, was judged before.
    pub(in crate::array) fn super_io(&mut self) {
        match self.supers.io_ended(&mut self.core) {
            UpdateStep::Nothing => {}
            // Members that have come back meanwhile hold the epoch before: no device has this one.
            UpdateStep::EpochGivenUp => self.startup.forget_behind(),
            UpdateStep::Written(update) => self.super_written(&update),
        }
    }

    fn super_written(&mut self, update: &Update) {
        self.scrub_recorded(update.scrub_position());
        let says_all = self.supers.complete(&mut self.core, update);
        self.waiting.end_recordings(&mut self.core, &self.supers, false);
        if let (true, Some(Stopping::Marking(id))) = (says_all, self.core.stop.stopping) {
            self.finish_stop(id);
        }
    }

    /// Tick: records the progress of passes.
    pub(in crate::array) fn save_progress(&mut self) {
        if self.supers.is_save_due(&self.core) {
            self.ask_log();
            self.supers.save(self.progress_mark());
        }
    }

    /// Tick: an array that has been quiet for a while is marked clean.
    pub(in crate::array) fn mark_idle_clean(&mut self) {
        if !self.supers.is_idle(&self.core) {
            return;
        }
        self.ask_log();
        if self.supers.is_log_drained() {
            self.supers.mark_clean();
            self.supers.want();
        }
    }

    /// A number that changes whenever a pass makes progress, or a page of the stripe map gets its first
    /// version, by the log's last answer.
    fn progress_mark(&self) -> u64 {
        let builds = self.core.roster.members.iter().map(|member| {
            // Grows with each slot that is built, and with each that was compared.
            let of = |progress: &Progress| (2 * progress.done()).wrapping_sub(progress.proofs.open());
            let own = member.progress.as_ref().map_or(0, of);
            let other = member.replacement.as_ref().map_or(0, |r| of(&r.progress));
            own.wrapping_add(other)
        });
        let scrub = self.passes.scrub_record().position.map_or(0, |p| p.0);
        let builds = builds.fold(0, u64::wrapping_add);
        builds.wrapping_add(scrub).wrapping_add(self.supers.map_pages())
    }
}

impl Core {
    /// What an update records of the members and of the devices that are to replace them.
    fn records(&self, next: &Superblock, finishes: bool) -> (Vec<MemberRecord>, Vec<ReplacementRecord>) {
        // An epoch keeps the devices that it began with: the next one names a new device.
        let keeps = |at: usize, member: &Member| {
            finishes
                && next.epoch.live.contains(MemberIndex(at as u16))
                && member.state != MemberState::Online
                && member.uuid != next.members[at].uuid
                && !is_off(Mutation::NewDeviceInOldEpoch)
        };
        let record = |(at, member): (usize, &Member)| match keeps(at, member) {
            true => next.members[at],
            false => MemberRecord {
                uuid: member.uuid,
                state: member.state,
                rebuilt: SlotIndex(member.progress.as_ref().map_or(0, |p| p.recorded(next.clean))),
            },
        };
        let replacement = |(at, member): (usize, &Member)| {
            let at_index = MemberIndex(at as u16);
            if keeps(at, member) {
                // This may be the device that now takes the member's place.
                return next.replacements.iter().find(|replacement| replacement.member == at_index).cloned();
            }
            let replacement = member.replacement.as_ref()?;
            Some(ReplacementRecord {
                member: at_index,
                uuid: replacement.uuid,
                rebuilt: SlotIndex(replacement.progress.recorded(next.clean)),
            })
        };
        let all = || self.roster.members.iter().enumerate();
        (all().map(record).collect(), all().filter_map(replacement).collect())
    }

    /// `pair`: the lower of the two sequences that the update may have on a device.
    fn participants(&self, pair: u64) -> Vec<Participant> {
        let participant = |(index, which, device): (MemberIndex, Which, Device)| {
            let member = self.member(index);
            let (uuid, role) = match (which, &member.replacement) {
                (Which::Replacement, Some(replacement)) => (replacement.uuid, Role::Replacement),
                _ => (member.uuid, Role::Member),
            };
            let sequence = pair + u64::from(device.sequence.is_multiple_of(2));
            Participant {
                member: index,
                device: device.id,
                bytes: device.bytes,
                uuid,
                role,
                sequence,
                encoded: None,
            }
        };
        let replaced = self.roster.exchanged.iter().map(|&Replaced { member, uuid, device }| Participant {
            member,
            device: device.id,
            bytes: device.bytes,
            uuid,
            role: Role::Replaced,
            sequence: pair + u64::from(device.sequence.is_multiple_of(2)),
            encoded: None,
        });
        self.devices().into_iter().map(participant).chain(replaced).collect()
    }

    /// Reports to the operator that a returned or new device makes the array whole.
    pub(in crate::array) fn notice_if_whole(&mut self) {
        if self.roster.members.iter().all(|member| member.state == MemberState::Online) {
            self.notice(
                NoticeKind::ArrayWhole,
                NoticeLevel::Info,
                None,
                "every member is online again".into(),
            );
        }
    }
}
