//! Superblocks in a scrub: every copy of every member's superblock is read, and compared with the one written
//! last. The scrub begins with this, and its first slots follow beside it.
//!
//! A copy that is damaged or overwritten, or that cannot be read, costs nothing while the array runs, but may
//! keep its member from being found at the next start. The next update that goes to its slot rewrites it;
//! then all copies are read again, and those that are whole count as repaired. The scrub records its own
//! progress only after the first look. Must not know when updates are made otherwise, nor their content.

use crate::array::Core;
use crate::array::base::members::{Device, Which};
use crate::array::members::supers::Supers;
use crate::array::passes::schedule::Passes;
use crate::array::{Array, Flow, NoticeKind, NoticeLevel, Op, Owner};
use crate::block_io::{DeviceId, IoFault, IoOp, IoValue};
use crate::format::{
    COPY_BYTES, CopyPlace, FormatError, Superblock, all_copy_offsets, damaged_copies, decode_copy,
};
use crate::units::{MemberIndex, Timestamp};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Time between two checks whether an update under way is over.
const RETRY_NS: u64 = 100_000_000;

/// How long copies are read again that cannot be read for a shortage of the host.
const SHORT_PATIENCE_NS: u64 = 30_000_000_000;

/// The result of reading a copy: an I/O error as text, or the result of decoding it.
type CopyRead = Result<Result<Superblock, FormatError>, String>;

/// A damaged copy: its device, and which of [`CopyPlace::ALL`] it is.
type BadCopy = (DeviceId, usize);

/// See the head of this file.
pub(in crate::array) struct SuperScrub {
    /// How many scrubs had been stopped when it began; after another stop it belongs to no scrub under way.
    scrubs_stopped: u64,
    life: u64,
    stage: Stage,
    devices: Vec<OfDevice>,
    pending: usize,
    /// The latest update when the copies were asked for.
    update: u64,
    /// Since when copies cannot be read for a shortage.
    short_since: Option<Timestamp>,
    /// The bad copies that the first look has found.
    found: Option<BTreeMap<BadCopy, String>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The copies have to be read.
    Look,
    Read,
    /// The bad copies that were found have to be rewritten.
    Update,
}

/// The copies of a device.
struct OfDevice {
    device: DeviceId,
    uuid: Uuid,
    sequence: u64,
    written: [Option<u64>; 2],
    /// None: not known, for a reason that is not the device's.
    copies: [Option<CopyRead>; 4],
}

/// The state that a look at superblocks depends on.
pub(super) struct Around<'a> {
    core: &'a mut Core,
    supers: &'a mut Supers,
    passes: &'a mut Passes,
    /// The life of the log, while it serves.
    life: Option<u64>,
}

impl Array {
    pub(super) fn start_super_scrub(&mut self) {
        let scrub = SuperScrub::new(self.redo.lives(), self.passes.scrubs_stopped());
        let key = self.ops.insert(Op::SuperScrub(Box::new(scrub)));
        self.core.work.ready.push_back(key);
    }

    pub(in crate::array) fn advance_super_scrub(&mut self, key: usize, scrub: &mut SuperScrub) -> Flow {
        scrub.advance(&mut self.around_supers(), key)
    }

    pub(in crate::array) fn super_scrub_io(
        &mut self,
        key: usize,
        scrub: &mut SuperScrub,
        item: usize,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        scrub.io_ended(&mut self.around_supers(), key, item, result)
    }

    pub(super) fn end_super_scrub(&mut self, key: usize, scrub: &SuperScrub) -> Flow {
        scrub.end(&mut self.around_supers(), key, false)
    }

    fn around_supers(&mut self) -> Around<'_> {
        let life = self.redo.is_serving().then_some(self.redo.lives());
        Around { core: &mut self.core, supers: &mut self.supers, passes: &mut self.passes, life }
    }
}

impl SuperScrub {
    /// `life`: the log's. `scrubs_stopped`: how many scrubs were stopped so far.
    fn new(life: u64, scrubs_stopped: u64) -> SuperScrub {
        SuperScrub {
            scrubs_stopped,
            life,
            stage: Stage::Look,
            devices: Vec::new(),
            pending: 0,
            update: 0,
            short_since: None,
            found: None,
        }
    }

    /// Whether it has nothing in flight.
    pub(super) fn waits(&self) -> bool {
        self.pending == 0
    }

    fn advance(&mut self, around: &mut Around<'_>, key: usize) -> Flow {
        if self.pending > 0 {
            return Flow::Wait;
        }
        let is_void = around.core.is_failed() || around.life != Some(self.life);
        if is_void || around.core.stop.stopping.is_some() || self.is_of_another_scrub(around) {
            return self.end(around, key, false);
        }
        if around.passes.scrub_is_paused()
            && let Some(since) = &mut self.short_since
        {
            *since = around.core.now;
            return around.core.look_later(key);
        }
        match self.stage {
            Stage::Look if !around.supers.is_busy() => self.read_copies(around, key),
            Stage::Look => around.core.look_later(key),
            Stage::Read => self.judge_copies(around, key),
            Stage::Update
                if self.found.iter().flatten().all(|(copy, _)| around.core.is_rewritten(self, *copy)) =>
            {
                self.stage = Stage::Look;
                self.advance(around, key)
            }
            Stage::Update => {
                if !around.supers.is_busy() {
                    around.supers.want();
                }
                around.core.look_later(key)
            }
        }
    }

    /// Whether the scrub that it belongs to was stopped.
    fn is_of_another_scrub(&self, around: &Around<'_>) -> bool {
        self.scrubs_stopped != around.passes.scrubs_stopped()
    }

    fn read_copies(&mut self, around: &mut Around<'_>, key: usize) -> Flow {
        self.stage = Stage::Read;
        let update = around.supers.template().update;
        if self.short_since.is_some() && self.update == update {
            around.core.read_missing_copies(key, self);
            return if self.pending > 0 { Flow::Wait } else { self.judge_copies(around, key) };
        }
        self.update = update;
        self.devices = around.core.recorded_devices();
        around.core.read_missing_copies(key, self);
        if self.pending > 0 { Flow::Wait } else { self.end(around, key, true) }
    }

    /// Takes the end of a read of a copy. A fault that counts for its device was judged before.
    fn io_ended(
        &mut self,
        around: &mut Around<'_>,
        key: usize,
        item: usize,
        result: Result<IoValue, IoFault>,
    ) -> Flow {
        self.pending -= 1;
        self.devices[item / 4].copies[item % 4] = match result {
            Ok(IoValue::Data(bytes)) => Some(Ok(decode_copy(CopyPlace::ALL[item % 4], &bytes))),
            Ok(_) => unreachable!("a read yields data"),
            Err(fault) if fault.kind.passes() => None,
            Err(fault) => Some(Err(fault.to_string())),
        };
        self.advance(around, key)
    }

    /// Judges the copies, once all were read.
    fn judge_copies(&mut self, around: &mut Around<'_>, key: usize) -> Flow {
        self.stage = Stage::Look;
        let is_short = self.waits_for_copies(around);
        if is_short == Some(true) {
            return around.core.look_later(key);
        }
        if around.supers.is_busy() || around.supers.template().update != self.update {
            // The copies were being written. A look that takes long would be in vain each time.
            return match is_short {
                None => around.core.look_later(key),
                Some(_) => self.end(around, key, true),
            };
        }
        let core = &mut *around.core;
        let template = around.supers.template();
        let bad: BTreeMap<BadCopy, String> = self
            .devices
            .iter()
            .filter(|of| core.find_device(of.device).is_some())
            .flat_map(|of| of.bad(template).into_iter().map(|(copy, why)| ((of.device, copy), why)))
            .collect();
        let Some(found) = self.found.take() else {
            core.note_bad_copies_of_supers(self, &bad);
            if bad.is_empty() {
                return self.end(around, key, true);
            }
            self.stage = Stage::Update;
            self.found = Some(bad);
            return self.advance(around, key);
        };
        let is_whole = |copy: &&BadCopy| !bad.contains_key(*copy) && core.find_device(copy.0).is_some();
        let mended: Vec<DeviceId> = found.keys().filter(is_whole).map(|(device, _)| *device).collect();
        if let Some(pass) = around.passes.scrub_mut() {
            pass.note_errors(found.len() as u64);
            pass.note_repaired(mended.len() as u64);
        }
        for device in mended {
            if let Some((member, Which::Primary)) = core.find_device(device) {
                core.member_mut(member).counters.repaired += 1;
            }
        }
        for ((device, copy), why) in bad.iter().filter(|(copy, _)| found.contains_key(*copy)) {
            let Some((index, _)) = core.find_device(*device) else { continue };
            let text = format!(
                "member {index}: superblock copy {} was written anew, and is bad again: {why}",
                CopyPlace::ALL[*copy].word()
            );
            core.notice(NoticeKind::SuperblockDamaged, NoticeLevel::Error, Some(index), text);
        }
        self.end(around, key, true)
    }

    /// Whether copies are read again that could not be read for a shortage; none if there are no such copies.
    /// When that was done for long enough, their members count as not checked everywhere.
    fn waits_for_copies(&mut self, around: &mut Around<'_>) -> Option<bool> {
        let is_short = |of: &&OfDevice| of.copies.iter().any(Option::is_none);
        let short = self.devices.iter().filter(is_short).map(|of| of.device);
        let short: Vec<(MemberIndex, Which)> =
            short.filter_map(|device| around.core.find_device(device)).collect();
        if short.is_empty() {
            self.short_since = None;
            return None;
        }
        let since = *self.short_since.get_or_insert(around.core.now);
        if around.core.now.nanos_since(since) < SHORT_PATIENCE_NS {
            return Some(true);
        }
        if let Some(pass) = around.passes.scrub_mut() {
            for (member, _) in short.into_iter().filter(|(_, which)| *which == Which::Primary) {
                pass.note_unchecked(member);
            }
        }
        Some(false)
    }

    fn end(&self, around: &mut Around<'_>, key: usize, complete: bool) -> Flow {
        around.core.work.patient.retain(|(_, other)| *other != key);
        if !self.is_of_another_scrub(around) {
            around.passes.verified_supers(complete);
        }
        if complete {
            // The scrub has held back its own update.
            around.supers.want();
        }
        Flow::Finished
    }
}

impl Core {
    /// Whether a bad copy was written since it was read, or its device has left.
    fn is_rewritten(&self, scrub: &SuperScrub, (device, copy): BadCopy) -> bool {
        let mut devices = self.devices().into_iter().map(|(_, _, device)| device);
        let Some(now) = devices.find(|other| other.id == device) else { return true };
        let then = scrub.devices.iter().find(|of| of.device == device).map(|of| of.sequence);
        now.written[copy % 2] > then
    }

    fn look_later(&mut self, key: usize) -> Flow {
        self.work.patient.retain(|(_, other)| *other != key);
        self.work.patient.push((Timestamp(self.now.0 + RETRY_NS), key));
        Flow::Wait
    }

    /// The devices in use whose superblocks are looked at.
    fn recorded_devices(&self) -> Vec<OfDevice> {
        let recorded = self.devices().into_iter().filter(|(_, _, device)| device.recorded);
        let of_device = |(index, which, device): (MemberIndex, Which, Device)| {
            let member = self.member(index);
            let uuid = match (which, &member.replacement) {
                (Which::Replacement, Some(replacement)) => replacement.uuid,
                _ => member.uuid,
            };
            let copies = [const { None }; 4];
            let (device, sequence, written) = (device.id, device.sequence, device.written);
            OfDevice { device, uuid, sequence, written, copies }
        };
        recorded.map(of_device).collect()
    }

    /// Asks for the copies that were not read yet.
    fn read_missing_copies(&mut self, key: usize, scrub: &mut SuperScrub) {
        for (index, _, device) in self.devices() {
            let Some(at) = scrub.devices.iter().position(|of| of.device == device.id) else { continue };
            for (copy, offset) in all_copy_offsets(device.bytes).into_iter().enumerate() {
                if scrub.devices[at].copies[copy].is_none() {
                    let read = IoOp::Read { offset, buf: self.pool.alloc(COPY_BYTES) };
                    self.submit_io(Owner::Op { key, item: at * 4 + copy }, index, device.id, read);
                    scrub.pending += 1;
                }
            }
        }
    }

    /// Reports that copies of the superblock of a member that comes back were damaged while it was away:
    /// which, and what is wrong, in words.
    pub(in crate::array) fn note_bad_supers(&mut self, index: MemberIndex, copies: &[String]) {
        self.member_mut(index).counters.checksum_errors += copies.len() as u64;
        for copy in copies {
            let text = format!("member {index}: superblock copy {copy}; it is written anew");
            self.notice(NoticeKind::SuperblockDamaged, NoticeLevel::Warning, Some(index), text);
        }
    }

    fn note_bad_copies_of_supers(&mut self, scrub: &SuperScrub, bad: &BTreeMap<BadCopy, String>) {
        for ((device, copy), why) in bad {
            let Some((index, which)) = self.find_device(*device) else { continue };
            let of = scrub.devices.iter().find(|of| of.device == *device);
            // An error of the device was counted when it happened.
            let was_read = of.is_some_and(|of| matches!(of.copies[*copy], Some(Ok(_))));
            if was_read && which == Which::Primary {
                self.member_mut(index).counters.checksum_errors += 1;
            }
            let what = if was_read { "is damaged" } else { "cannot be read" };
            let text = format!(
                "member {index}: superblock copy {} {what}: {why}; it is written anew",
                CopyPlace::ALL[*copy].word()
            );
            self.notice(NoticeKind::SuperblockDamaged, NoticeLevel::Warning, Some(index), text);
        }
    }
}

impl OfDevice {
    /// The bad copies, and why each is bad. `of` is a superblock of the array.
    fn bad(&self, of: &Superblock) -> Vec<(usize, String)> {
        // A copy that is not known counts as right.
        let known: Vec<bool> = self.copies.iter().map(Option::is_some).collect();
        let as_read = |copy: &Option<CopyRead>| copy.clone().unwrap_or(Ok(Err(FormatError::Cleared)));
        let copies = [0, 1, 2, 3].map(|at: usize| as_read(&self.copies[at]));
        let damaged: BTreeMap<usize, String> = damaged_copies(&copies)
            .into_iter()
            .filter_map(|(place, why)| Some((CopyPlace::ALL.iter().position(|other| *other == place)?, why)))
            .collect();
        let why = |at: usize| match &copies[at] {
            Ok(Ok(copy)) if (copy.array, copy.device) != (of.array, self.uuid) => {
                Some("it is that of another device".to_owned())
            }
            Ok(Ok(copy)) if copy.part != of.part => {
                Some(format!("it is that of lane {} in the place of lane {}", copy.part.lane, of.part.lane))
            }
            Ok(Ok(copy)) if at % 2 == (self.sequence % 2) as usize && copy.sequence != self.sequence => {
                Some(format!("it is that of update {}, and {} is the newest", copy.sequence, self.sequence))
            }
            Ok(Ok(copy)) if copy.sequence > self.sequence => {
                Some(format!("it is that of update {}, and {} is the newest", copy.sequence, self.sequence))
            }
            Ok(Err(FormatError::NoMagic)) if self.written[at % 2].is_some() => {
                Some("it is not there".to_owned())
            }
            Ok(Err(FormatError::NoMagic | FormatError::Cleared))
                if at % 2 == (self.sequence % 2) as usize =>
            {
                Some("it is not there".to_owned())
            }
            _ => damaged.get(&at).cloned(),
        };
        (0..4).filter(|at| known[*at]).filter_map(|at| Some((at, why(at)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{LanePart, Lanes};
    use crate::units::LaneIndex;

    #[test]
    fn a_copy_of_another_lane_is_bad_although_its_device_and_update_are_right() {
        let uuids: Vec<Uuid> = (0..3).map(|at| Uuid::from_u128(1000 + at)).collect();
        let mut own = crate::testing::small_array(2, 1).superblocks(&uuids)[0].clone();
        let lanes = Lanes { count: 4, group: 4 };
        own.part = LanePart { lane: LaneIndex(1), lanes, stride: 64 << 20, volume_bytes: 64 << 20 };
        own.sequence = 8;
        let mut other = own.clone();
        other.part.lane = LaneIndex(2);
        let older = Superblock { sequence: 7, ..own.clone() };
        let of = |copies: [&Superblock; 4]| OfDevice {
            device: DeviceId(0),
            uuid: own.device,
            sequence: 8,
            written: [Some(8), Some(7)],
            copies: copies.map(|copy| Some(Ok(Ok(copy.clone())))),
        };
        assert_eq!(of([&own, &older, &own, &older]).bad(&own), []);
        let bad = of([&own, &older, &other, &older]).bad(&own);
        assert_eq!(bad, [(2, "it is that of lane 2 in the place of lane 1".to_owned())]);
    }
}
