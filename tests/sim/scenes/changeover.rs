//! Scenes of a member that is replaced in an array of several lanes, while the last lane cannot write its
//! part of the new device.

use calpe_core::block_io::{DeviceId, IoOp};
use calpe_core::format::{ChecksumKind, MemberState};
use calpe_core::testing::{DiskRegion, Fate, Random, SimArray, SimShape, SimWorld, Wreck};
use calpe_core::units::{MemberIndex, Timestamp};
use calpe_core::volume::{
    AdminRequest, ArrayState, ClientRequest, MemberCondition, NoticeKind, ReplacementStatus,
};
use std::collections::BTreeSet;
use std::ops::Range;

pub(crate) const CHUNK: usize = 4096;
const STRIPE: usize = 2 * CHUNK;
pub(crate) const MEMBER: MemberIndex = MemberIndex(1);
/// The disk of the member before it is replaced.
pub(crate) const OLD: u32 = 1;

/// See the head of this file.
pub(crate) struct Replacing {
    pub sim: SimArray,
    pub shape: SimShape,
    /// The new disk.
    pub new: u32,
    /// The content of the volume.
    pub bytes: Vec<u8>,
    /// Where each lane has its data on a disk.
    pub data: Vec<Range<u64>>,
}

/// An array of several lanes with this many stripes in each.
pub(crate) fn shape(lanes: u16, parity: u16, stripes: u64) -> SimShape {
    let shape = SimShape::new(2, parity, CHUNK as u32, stripes * u64::from(lanes)).in_lanes(lanes, 1);
    shape.logged(ChecksumKind::Crc32c, 128 << 10)
}

impl Replacing {
    /// The replacement was requested and is recorded; nothing is in the data of the last lane.
    pub(crate) fn begin(shape: SimShape, seed: u64) -> Replacing {
        let mut sim = SimArray::create(shape, seed);
        let mut bytes = vec![0; shape.volume_bytes as usize];
        Random::new(seed).fill(&mut bytes);
        sim.write(0, &bytes).expect("written");
        sim.settle();
        sim.notices.clear();
        let device = sim.add_blank_disk();
        let (new, data) = (device.device.0, DiskRegion::Data.ranges(&sim.disks[&0]));
        let mut replacing = Replacing { sim, shape, new, bytes, data };
        replacing.admin(AdminRequest::Replace { member: MEMBER, device });
        replacing
    }

    /// Makes an administrator's request, which must be taken, while the last lane is held up.
    pub(crate) fn admin(&mut self, request: AdminRequest) {
        let id = self.sim.submit_admin(request);
        let outcome = self.step_until(|sim| sim.poll_admin(id));
        outcome.expect("it is taken");
    }

    /// Makes a client's request, which must succeed, while the last lane is held up.
    pub(crate) fn client(&mut self, request: ClientRequest) {
        let id = self.sim.submit(request);
        let result = self.step_until(|sim| sim.poll(id));
        result.expect("it is done");
    }

    fn step_until<T>(&mut self, mut reached: impl FnMut(&mut SimArray) -> Option<T>) -> T {
        let until = Timestamp(self.sim.now().0 + 60_000_000_000);
        loop {
            if let Some(found) = reached(&mut self.sim) {
                return found;
            }
            assert!(self.sim.now() < until, "it hangs: {:?}", self.sim.status().members);
            if !self.step() {
                self.sim.sleep(100);
            }
        }
    }

    /// Executes an operation, but none that writes data of the last lane on the new disk.
    fn step(&mut self) -> bool {
        let (new, last) = (self.new, self.data.last().expect("lanes").clone());
        self.sim.step_where(|disk, op| !(disk == new && writes_in(op, &last)))
    }

    /// Executes everything else, until the other lanes have nothing to do.
    pub(crate) fn run(&mut self) {
        let mut quiet = 0;
        while quiet < 60 {
            match self.step() {
                true => quiet = 0,
                false => {
                    quiet += 1;
                    self.sim.sleep(100);
                }
            }
        }
    }

    /// As [`Replacing::run`]. Returns how many writes of data on the new disk the lanes but the last have
    /// asked for.
    pub(crate) fn run_counting(&mut self) -> usize {
        let (new, data) = (self.new, self.data.clone());
        let (last, others) = data.split_last().expect("lanes");
        let (mut quiet, mut writes) = (0, 0);
        while quiet < 60 {
            let mut is_write = false;
            let stepped = self.sim.step_where(|disk, op| {
                let wanted = !(disk == new && writes_in(op, last));
                if wanted {
                    is_write = disk == new && others.iter().any(|of_lane| writes_in(op, of_lane));
                }
                wanted
            });
            writes += usize::from(stepped && is_write);
            match stepped {
                true => quiet = 0,
                false => {
                    quiet += 1;
                    self.sim.sleep(100);
                }
            }
        }
        writes
    }

    /// The old disk fails before any lane has built its part, and each lane is about to notice it.
    pub(crate) fn lose_old_early(&mut self) {
        self.sim.disks.get_mut(&OLD).expect("a disk").dead = true;
        let _ = self.sim.submit_write(0, &self.bytes, false);
    }

    /// What lanes say of the replacement.
    pub(crate) fn kinds(&self) -> Vec<NoticeKind> {
        self.sim.notices.iter().map(|notice| notice.kind).collect()
    }

    /// Checks that the old disk is the member in every lane, and that the others wait for the last one.
    ///
    /// # Errors
    /// When that is not so.
    pub(crate) fn check_held(&self) -> Result<(), String> {
        let status = self.sim.status();
        let member = &status.members[1];
        let (old, new) = (DeviceId(OLD), DeviceId(self.new));
        let is_new = |of: ReplacementStatus| of.device == new && !of.is_held;
        let is_held = member.device == Some(old)
            && member.replacement.is_some_and(is_new)
            && member.conditions.contains(&MemberCondition::NewDeviceWaits)
            && self.sim.serving()[1].iter().all(|disk| *disk == OLD);
        match is_held && status.state == ArrayState::Online {
            true => Ok(()),
            false => Err(format!("{:?} {member:?} {:?}", self.sim.serving(), self.sim.notices)),
        }
    }

    /// Checks that the member is on one disk in every lane and that it has all of its content: another one is
    /// away.
    ///
    /// # Errors
    /// When that is not so.
    pub(crate) fn check_whole(mut self, disk: u32) -> Result<(), String> {
        check_whole(&mut self.sim, disk, &self.bytes)?;
        let world = SimWorld::new(self.shape, 8 << 20);
        let mut disks = self.sim.disks;
        disks.get_mut(&0).expect("a disk").dead = true;
        let mut sim = world.start(disks, false, Random::new(3)).map_err(|error| error.to_string())?;
        read_all(&mut sim, &self.bytes)
    }
}

fn writes_in(op: &IoOp, range: &Range<u64>) -> bool {
    match op {
        IoOp::Write { offset, .. } | IoOp::Zero { offset, .. } => range.contains(&offset.0),
        IoOp::Read { .. } | IoOp::Flush | IoOp::Extents { .. } => false,
    }
}

fn read_all(sim: &mut SimArray, bytes: &[u8]) -> Result<(), String> {
    match sim.read(0, bytes.len()) {
        Ok(read) if read == bytes => Ok(()),
        Ok(_) => Err("wrong bytes were read".into()),
        Err(error) => Err(format!("{error}: {:?}", sim.notices)),
    }
}

fn check_whole(sim: &mut SimArray, disk: u32, bytes: &[u8]) -> Result<(), String> {
    read_all(sim, bytes)?;
    let status = sim.status();
    let member = &status.members[1];
    let is_whole = status.state == ArrayState::Online
        && member.device == Some(DeviceId(disk))
        && member.replacement.is_none()
        && sim.serving()[1].iter().all(|of_lane| *of_lane == disk);
    match is_whole {
        true => Ok(()),
        false => Err(format!("{:?} {member:?} {:?}", sim.serving(), sim.notices)),
    }
}

/// The new disk fails before the last lane has built its part: the old one stays in every lane.
///
/// # Errors
/// When it does not.
pub(crate) fn new_disk_fails_in_the_last_lane(lanes: u16, seed: u64) -> Result<(), String> {
    let mut replacing = Replacing::begin(shape(lanes, 1, 3), seed);
    replacing.run();
    replacing.sim.disks.get_mut(&replacing.new).expect("a disk").dead = true;
    replacing.sim.settle();
    let serving = &replacing.sim.serving()[1];
    if serving.len() != usize::from(lanes) || serving.iter().any(|disk| *disk != OLD) {
        return Err(format!("the lanes are on disks {serving:?}: {:?}", replacing.sim.notices));
    }
    let reason = replacing.sim.status().members[1].reason.clone().unwrap_or_default();
    if !reason.contains("its replacement was given up: ") || !replacing.sim.released.contains(&replacing.new)
    {
        return Err(format!("{reason}: {:?}", replacing.sim.notices));
    }
    let wanted = [NoticeKind::ReplacementWaits, NoticeKind::ReplacementGivenUp];
    if replacing.kinds() != wanted {
        return Err(format!("{:?}", replacing.sim.notices));
    }
    replacing.check_whole(OLD)
}

/// The replacement is cancelled at one moment after the other ([`cancelled_in_the_changeover`]). Returns how
/// often it was given up, and how often that was refused.
///
/// # Errors
/// As that.
pub(crate) fn cancelled_at_any_moment(
    lanes: u16,
    has_old: bool,
    seed: u64,
) -> Result<(usize, usize), String> {
    let mut counts = (0, 0);
    for steps in (0..160).map(|steps| steps * usize::from(lanes) / 2) {
        let result = cancelled_in_the_changeover(lanes, has_old, (seed, steps));
        match result.map_err(|what| format!("{steps} steps: {what}"))? {
            true => counts.0 += 1,
            false => counts.1 += 1,
        }
    }
    Ok(counts)
}

/// The replacement is cancelled this many steps after the last lane was let go on: it is given up in every
/// lane, or refused. Or the old disk fails early, so that each lane changes over when it has built its part.
/// Returns whether it was given up.
///
/// # Errors
/// When the lanes stay on different disks, or the answer is not what has happened.
fn cancelled_in_the_changeover(
    lanes: u16,
    has_old: bool,
    (seed, steps): (u64, usize),
) -> Result<bool, String> {
    let mut replacing = Replacing::begin(shape(lanes, 1, 3), seed);
    match has_old {
        true => replacing.run(),
        false => replacing.lose_old_early(),
    }
    for _ in 0..steps {
        if !replacing.sim.step() {
            replacing.sim.sleep(100);
        }
    }
    let cancel = AdminRequest::CancelReplace { member: MEMBER, device: None };
    let outcome = replacing.sim.admin(cancel);
    replacing.sim.settle();
    let about = |sim: &SimArray| format!("{outcome:?}: {:?} {:?}", sim.serving()[1], sim.notices);
    let serving = replacing.sim.serving()[1].clone();
    match &outcome {
        Ok(_) if has_old => replacing.check_whole(OLD).map(|()| true),
        Ok(_) if serving.is_empty() => Ok(true),
        Err(_) if serving.len() == usize::from(lanes) => {
            let new = replacing.new;
            replacing.check_whole(new).map(|()| false)
        }
        _ => Err(about(&replacing.sim)),
    }
}

/// A crash at one in so many moments of the changeover: the member ends on the new disk in every lane, if
/// that is there, and nothing is lost if it is not, or if the old one is not. Returns how many crashes were
/// tried, and how many of them between the first changeover and the last.
///
/// # Errors
/// When something else happens.
pub(crate) fn crashes_in_the_changeover(
    lanes: u16,
    seed: u64,
    one_in: u64,
) -> Result<(usize, usize), String> {
    let mut replacing = Replacing::begin(shape(lanes, 1, 3), seed);
    replacing.run();
    replacing.check_held()?;
    let mut random = Random::new(seed);
    let (mut quiet, mut seen, mut tried, mut between) = (0, 0, 0, 0);
    while quiet < 20 {
        match replacing.sim.step() {
            true => quiet = 0,
            false => {
                quiet += 1;
                replacing.sim.sleep(100);
            }
        }
        if replacing.sim.changes() != seen && random.one_in(one_in) {
            seen = replacing.sim.changes();
            tried += 1;
            between += usize::from(crash(&replacing, replacing.sim.wreck(), &mut random)?);
        }
    }
    let new = replacing.new;
    replacing.check_whole(new)?;
    Ok((tried, between))
}

/// Starts again after a crash. Returns whether some lanes had changed over and others had not.
fn crash(replacing: &Replacing, wreck: Wreck, random: &mut Random) -> Result<bool, String> {
    let (power, flavour) = (random.one_in(2), random.below(4));
    let mut fates = random.clone();
    let disks = wreck.settle(power, |_, _| match (flavour, fates.below(3)) {
        (0, _) | (1, 0) => Fate::Lost,
        (2, _) | (1, 1) => Fate::Kept,
        _ => Fate::Torn(fates.next_u64()),
    });
    random.next_u64();
    let absent = [None, None, None, Some(replacing.new), Some(OLD)][random.below(5) as usize];
    let mut present = disks;
    if let Some(absent) = absent {
        present.get_mut(&absent).expect("a disk").dead = true;
    }
    let about = |what: String| format!("power {power}, flavour {flavour}, without {absent:?}: {what}");
    let world = SimWorld::new(replacing.shape, 8 << 20);
    let started = world.start(present, false, Random::new(random.next_u64()));
    let mut sim = started.map_err(|error| about(error.to_string()))?;
    let of_lanes: BTreeSet<u32> = sim.serving()[1].iter().copied().collect();
    let is_between = of_lanes.len() > 1 || absent.is_some() && sim.status().state == ArrayState::Degraded;
    sim.settle();
    match absent {
        Some(new) if new == replacing.new => {
            read_all(&mut sim, &replacing.bytes).map_err(about)?;
            // No lane waits for a disk that is not there.
            let member = &sim.status().members[1];
            if member.replacement.is_some()
                || !matches!(member.state, MemberState::Online | MemberState::Missing)
            {
                return Err(about(format!("{member:?}")));
            }
        }
        _ => check_whole(&mut sim, replacing.new, &replacing.bytes).map_err(about)?,
    }
    sim.assert_scrub_clean();
    Ok(is_between && of_lanes.len() > 1)
}

/// A member of this array is replaced, its lanes but the last hold the new disk, and clients have just
/// written into these.
pub(crate) fn written_while_held(shape: SimShape, seed: u64) -> Replacing {
    let mut replacing = Replacing::begin(shape, seed);
    replacing.run();
    write_some(&mut replacing, 1);
    replacing
}

/// Overwrites part of a stripe, and a whole one, in every lane but the last, whose slots are locked.
pub(crate) fn write_some(replacing: &mut Replacing, salt: u8) {
    let lanes = usize::from(replacing.shape.lanes.count);
    for (at, len) in [(512, 3 * CHUNK / 2), (lanes * STRIPE, STRIPE)] {
        for lane in 0..lanes - 1 {
            let at = at + lane * STRIPE;
            replacing.bytes[at..at + len].fill(salt.wrapping_add(lane as u8));
            let id = replacing.sim.submit_write(at as u64, &replacing.bytes[at..at + len], false);
            replacing.step_until(|sim| sim.poll(id)).expect("written");
        }
    }
}
