//! `calpe check`: the proof, offline and read-only, that an array is good.
//!
//! The real array runs on the members, over a layer that keeps its writes in memory, so the check judges what
//! a start would make of them. The log is replayed, then a scrub reads every live row of every member, and
//! compares each block with its checksum, parity with data, and the copies of every page with each other.
//! Lanes are checked one after another, and one report is made of what was found in all of them.
//!
//! Invariants: the members are locked and never written; memory is bounded, see
//! [`REPLAY_BYTES_MAX`]. Free slots, unused log and unwritten blocks are not read, as no start
//! would read them.

mod layer;
mod merged;
mod report;

pub(crate) use report::{CheckReport, CheckedMember, LostPart};

use crate::daemon::clock;
use crate::daemon::config::DEFAULT_MEMORY;
use crate::daemon::devices::import;
use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::devices::superblocks::{check_answers, check_length};
use crate::daemon::drill;
use crate::member::{Access, Device, DeviceError};
use calpe_core::array::assembly::{Assembled, AssemblyError, Candidate, NotUsed, assemble};
use calpe_core::array::{ArrayConfig, OpenDevice};
use calpe_core::block_io::{DeviceId, Pool};
use calpe_core::codec::Codec;
use calpe_core::format::{LanePart, MemberState, ScrubRecord, Superblock, VolumeKind};
use calpe_core::units::{HumanSize, LaneIndex, MemberIndex, ROW_BYTES, Timestamp, VolumeOffset, shown};
use calpe_core::volume::{
    Activity, ActivityKind, AdminRequest, ArrayAction, ArrayNotice, ArrayState, LaneCut, LogState,
    MemberStatus, NoticeKind, PlainVolume, RequestId, Volume, VolumeEvent, VolumeOutput, VolumeStatus,
};
use layer::Layer;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;
use uuid::Uuid;

/// Most bytes that replay may write, which are kept in memory. A running array holds at most 128
/// MiB of images that are not in place, and as much again of metadata pages; a log that yields more
/// than this is not one of ours.
pub(crate) const REPLAY_BYTES_MAX: u64 = 1 << 30;

/// How often the volume gets a tick, and its status is checked.
const TICK: Duration = Duration::from_millis(100);

/// Completions between two checks of the status.
const COMPLETIONS_PER_LOOK: usize = 4096;

/// The administrator's requests.
const SCRUB: RequestId = RequestId(1);
const REPAIR: RequestId = RequestId(2);

/// Why nothing can be said about an array.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CheckError {
    /// A device cannot be opened. The devices of an array in service are in use: it has to be
    /// stopped first.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// One device twice.
    #[error("{} and {} are the same device", shown(first), shown(second))]
    Duplicate {
        /// One path.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// None of the devices is a member.
    #[error("none of these is a member of an array:\n{}", .0.join("\n"))]
    NoMembers(
        /// A line for each of them: what it is.
        Vec<String>,
    ),
    /// Members of several arrays.
    #[error(
        "{} is a member of array '{first}', {} of array '{second}': check one array at a time",
        shown(first_path),
        shown(second_path)
    )]
    SeveralArrays {
        /// A member.
        first_path: PathBuf,
        /// Name of its array.
        first: String,
        /// Another.
        second_path: PathBuf,
        /// Name of its array.
        second: String,
    },
    /// They do not form an array.
    #[error("{}{source}{}", in_lane(*lane), advice(source, unusable))]
    Assembly {
        /// In which of several lanes.
        lane: Option<LaneIndex>,
        /// Why not.
        source: AssemblyError,
        /// What was given and cannot be used, a line each.
        unusable: Vec<String>,
    },
    /// A kind of volume that is planned.
    #[error("array '{name}' is a {kind} volume: a newer version of calpe is needed")]
    Unsupported {
        /// Its name.
        name: String,
        /// Its kind.
        kind: VolumeKind,
    },
    /// Replay would write too much.
    #[error(
        "replay of the log would write more than {}, which is all that is kept in memory: import the array, which replays \
         it on the members, export it, and check it then",
        HumanSize(REPLAY_BYTES_MAX)
    )]
    TooMuch,
    /// A member has stopped answering.
    #[error(
        "{}: a read has not ended within {} s: its filesystem or disk does not answer",
        shown(path),
        drill::device_limit().as_secs()
    )]
    Hangs {
        /// Which.
        path: PathBuf,
    },
    /// The system refuses something that a check needs.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// No codec for this shape.
    #[error(transparent)]
    Codec(#[from] calpe_core::codec::CodecError),
}

/// What to do, where the error itself does not say it.
fn advice(error: &AssemblyError, unusable: &[String]) -> String {
    let lines = unusable.iter().map(|line| format!("\n{line}")).collect::<String>();
    match error {
        AssemblyError::TooFew { .. } if unusable.is_empty() => ": name them, too".into(),
        AssemblyError::TooFew { .. } => format!(
            ": name them, too, if they are elsewhere. These were given and cannot be used, so they may be the missing ones:{lines}"
        ),
        _ => lines,
    }
}

/// The head of a line about one of several lanes.
fn in_lane(lane: Option<LaneIndex>) -> String {
    lane.map_or_else(String::new, |lane| format!("lane {lane}: "))
}

/// A device that was given, locked until the end of the check.
struct GivenDevice {
    path: PathBuf,
    device: Device,
    lanes: DeviceLanes,
}

impl GivenDevice {
    /// What all lanes say of the array and of this device.
    fn superblock(&self) -> &Superblock {
        self.lanes.first().expect("only members are given")
    }

    /// Its part in a lane, if its superblock there can be used.
    fn lane(&self, at: usize) -> Option<Given> {
        let lane = self.lanes.lanes.get(at)?;
        let superblock = lane.superblock.as_ref().ok()?.clone();
        let window = &self.lanes.windows(self.device.facts().bytes)[at];
        let device = Some(self.device.window(window));
        Some(Given { path: self.path.clone(), device, superblock, damaged: lane.damaged.len() as u64 })
    }
}

/// What was given of one lane.
struct OfLane {
    /// Which of several.
    lane: Option<LaneIndex>,
    given: Vec<Given>,
    /// Devices whose superblock of this lane cannot be used, and why.
    unusable: Vec<(Uuid, String)>,
}

impl OfLane {
    fn new(lane: Option<LaneIndex>, devices: &[GivenDevice], at: usize) -> OfLane {
        let unusable = |device: &GivenDevice| {
            let error = device.lanes.lanes.get(at)?.superblock.as_ref().err()?;
            Some((device.superblock().device, error.to_string()))
        };
        OfLane {
            lane,
            given: devices.iter().filter_map(|device| device.lane(at)).collect(),
            unusable: devices.iter().filter_map(unusable).collect(),
        }
    }
}

/// A member in one lane.
struct Given {
    path: PathBuf,
    /// Its window, until the layer has it.
    device: Option<Device>,
    superblock: Superblock,
    damaged: u64,
}

/// Checks the array of these members. `progress` is called with the progress.
///
/// # Errors
/// When nothing can be said: no members, in use, too few. Faults of the array are in the report,
/// not errors.
pub(crate) fn check(
    members: &[PathBuf],
    progress: &mut dyn FnMut(&Activity),
) -> Result<CheckReport, CheckError> {
    let mut problems = Vec::new();
    let mut strangers = Vec::new();
    let given = open(members, &mut problems, &mut strangers)?;
    let heads: Vec<String> = strangers.iter().map(|path| format!("{}: ", shown(path))).collect();
    let is_strange = |line: &&String| heads.iter().any(|head| line.starts_with(head));
    let about_strangers: Vec<String> = problems.iter().filter(is_strange).cloned().collect();
    let part = given[0].superblock().part;
    let count = u64::from(part.lanes.count);
    let mut lanes = Vec::new();
    for lane in part.lanes.indices() {
        let at = usize::from(lane.0);
        let lane = part.is_cut().then_some(lane);
        let mut told = |activity: &Activity| {
            let total_bytes = activity.total_bytes * count;
            let done_bytes = activity.total_bytes * at as u64 + activity.done_bytes;
            progress(&Activity { total_bytes, done_bytes, ..*activity });
        };
        let of_lane = OfLane::new(lane, &given, at);
        lanes.push(check_lane(of_lane, &strangers, &about_strangers, &mut told)?);
    }
    let cut = LaneCut::of(given[0].superblock());
    let mut report = merged::merged(cut, lanes);
    problems.append(&mut report.problems);
    report.problems = problems;
    Ok(without_strangers(report.concluded(), &about_strangers))
}

/// Checks one lane of an array, as the array that it is.
fn check_lane(
    OfLane { lane, mut given, unusable }: OfLane,
    strangers: &[PathBuf],
    about_strangers: &[String],
    progress: &mut dyn FnMut(&Activity),
) -> Result<CheckReport, CheckError> {
    let (mut problems, mut notices) = (Vec::new(), Vec::new());
    let assembled = assembled(&given, &mut problems, &mut notices)
        .map_err(|source| CheckError::Assembly { lane, source, unusable: about_strangers.to_vec() })?;
    let superblock = assembled.superblock.clone();
    if superblock.volume != VolumeKind::Plain {
        return Err(CheckError::Unsupported { name: superblock.name, kind: superblock.volume });
    }
    let seats: Vec<Option<usize>> = assembled.seats.iter().map(|seat| seat.key).collect();
    let uuids: Vec<_> = assembled.seats.iter().map(|seat| seat.uuid).collect();
    let system = |action| move |source| CheckError::System { action, source };
    let pool = Pool::new(DEFAULT_MEMORY as usize).map_err(system("allocate memory"))?;
    let geometry = superblock.geometry;
    let codec = Codec::new(usize::from(geometry.data), usize::from(geometry.parity))?;
    let mut devices = Vec::new();
    let open = |key: usize| {
        let device = given[key].device.as_ref().expect("assembly seats what was opened");
        OpenDevice { id: DeviceId(key as u32), bytes: device.facts().bytes }
    };
    let assembled = import::with_handles(assembled, open);
    for key in seats.iter().flatten() {
        devices.extend(given[*key].device.take().map(|device| (DeviceId(*key as u32), device)));
    }
    let data = superblock.data_region();
    let layer =
        Layer::new(devices, data.offset.0..data.offset.0 + data.len).map_err(system("start threads"))?;
    let config = ArrayConfig { seed: 1, ..ArrayConfig::default() };
    let volume = PlainVolume::new(assembled, codec, pool, config);
    let mut run = Run {
        volume,
        layer,
        notices,
        unreadable_notices: Vec::new(),
        output: VolumeOutput::default(),
        phase: Phase::Replay,
        bad_copies: 0,
        aside: BTreeSet::new(),
    };
    let status = run.finish(progress)?;
    problems.extend(run.problem(&status));
    let scrub = status.last_scrub;
    let member = |(index, key): (usize, &Option<usize>)| {
        let found = key.map(|key| &given[key]);
        let own = || given.iter().find(|given| given.superblock.device == uuids[index]);
        let MemberStatus { counters, state, reason, .. } = status.members[index].clone();
        let is_given = found.or_else(own).is_some();
        let is_online = state == MemberState::Online;
        let is_checked = !scrub.is_some_and(|scrub| scrub.unchecked.contains(MemberIndex(index as u16)));
        let is_unusable = |(device, _): &&(Uuid, String)| *device == uuids[index];
        let unusable = unusable.iter().find(is_unusable).map(|(_, why)| why.clone());
        let why = || match reason {
            _ if !is_given => unusable.unwrap_or_else(|| not_given(strangers)),
            _ if is_online => "not all of it was read, for a lack of resources of this host".into(),
            Some(reason) => reason,
            None => state.as_str().into(),
        };
        CheckedMember {
            index: index as u16,
            path: found.or_else(own).map(|given| given.path.display().to_string()),
            uuid: uuids[index],
            verified: found.is_some() && is_online && is_checked,
            reason: (!is_online || !is_checked).then(why),
            read: counters.read_errors,
            cksum: counters.checksum_errors,
            superblock: found.map_or(0, |given| given.damaged),
        }
    };
    let [lost, set_aside, unreadable] =
        [&status.lost, &status.set_aside, &status.unreadable].map(|ranges| parts(ranges));
    let kept_aside = run.kept_aside([&lost, &set_aside, &unreadable]);
    let blocks_kept = kept_aside.iter().map(|part| part.bytes / ROW_BYTES).sum::<u64>();
    let notices = run.notices_beside([&lost, &set_aside, &unreadable, &kept_aside]);
    let errors = scrub.map(|scrub| scrub.errors + run.bad_copies);
    let repairable = scrub.map(|scrub| scrub.repaired + run.bad_copies + blocks_kept);
    let report = CheckReport {
        output_version: 0,
        good: false,
        consistent: false,
        whole: false,
        array: superblock.name.clone(),
        uuid: superblock.array,
        data: geometry.data,
        parity: geometry.parity,
        lanes: superblock.part.lanes.count,
        checksum: superblock.checksum.to_string(),
        clean: superblock.clean,
        members: seats.iter().enumerate().map(member).collect(),
        errors,
        repairable: repairable.min(errors),
        lost,
        set_aside,
        kept_aside,
        unreadable,
        problems,
        notices,
    };
    Ok(report)
}

/// The blocks of these parts, by their offsets.
fn blocks_of(parts: &[LostPart]) -> impl Iterator<Item = u64> + '_ {
    parts.iter().flat_map(|part| (part.offset..part.offset + part.bytes).step_by(ROW_BYTES as usize))
}

fn parts(ranges: &[(VolumeOffset, u64)]) -> Vec<LostPart> {
    ranges.iter().map(|&(at, bytes)| LostPart { offset: at.0, bytes }).collect()
}

/// A path that is no member is not a problem of an array whose members are all there.
fn without_strangers(mut report: CheckReport, about_strangers: &[String]) -> CheckReport {
    if report.whole {
        let (strange, problems) =
            report.problems.into_iter().partition(|line| about_strangers.contains(line));
        report.problems = problems;
        report.notices.extend::<Vec<String>>(strange);
    }
    report.concluded()
}

/// Why nothing is known of a member, if these paths were given and do not say which member they are.
fn not_given(strangers: &[PathBuf]) -> String {
    let paths: Vec<_> = strangers.iter().map(|path| shown(path).to_string()).collect();
    match &paths[..] {
        [] => "not given".into(),
        [path] => format!("not given, or it is {path}, which cannot be used"),
        _ => format!("not given, or it is one of {}, which cannot be used", paths.join(", ")),
    }
}

/// Opens and locks the members; a path that is no usable member is a problem, and one of the `strangers`.
fn open(
    paths: &[PathBuf],
    problems: &mut Vec<String>,
    strangers: &mut Vec<PathBuf>,
) -> Result<Vec<GivenDevice>, CheckError> {
    check_answers(paths, drill::device_limit())?;
    let mut given: Vec<GivenDevice> = Vec::new();
    for path in paths {
        let same = |given: &&GivenDevice| given.device.is_at(path);
        if let Some(first) = given.iter().find(same) {
            return Err(CheckError::Duplicate { first: first.path.clone(), second: path.clone() });
        }
        let device = Device::open(path, Access::Still)?;
        match look_at(path, device, problems) {
            Ok(member) => given.push(member),
            Err(problem) => {
                problems.push(problem);
                strangers.push(path.clone());
            }
        }
    }
    let Some(first) = given.first() else { return Err(CheckError::NoMembers(std::mem::take(problems))) };
    let superblock = first.superblock();
    if let Some(other) = given.iter().find(|member| member.superblock().array != superblock.array) {
        return Err(CheckError::SeveralArrays {
            first_path: first.path.clone(),
            first: superblock.name.clone(),
            second_path: other.path.clone(),
            second: other.superblock().name.clone(),
        });
    }
    let part = superblock.part;
    let is_alike = |device: &GivenDevice| {
        let other = device.superblock().part;
        LanePart { lane: part.lane, ..other } == part
    };
    let (alike, others): (Vec<_>, Vec<_>) = given.into_iter().partition(is_alike);
    for GivenDevice { path, .. } in others {
        let why = "it is cut into lanes in another way than the first member: it was not looked at";
        problems.push(format!("{}: {why}", shown(&path)));
        strangers.push(path);
    }
    Ok(alike)
}

/// Reads the superblock of a device; the error says why it is no member.
fn look_at(path: &Path, device: Device, problems: &mut Vec<String>) -> Result<GivenDevice, String> {
    let lanes = DeviceLanes::read(&device);
    let superblock =
        lanes.first().map_err(|error| format!("{}: {error}: it was not looked at", shown(path)))?;
    check_length(&device, superblock).map_err(|error| error.to_string())?;
    let damaged = lanes.words_for_damaged().into_iter();
    problems.extend(damaged.map(|fault| format!("{}: superblock copy {fault}", shown(path))));
    let unusable = lanes.unusable();
    problems.extend(unusable.map(|(lane, error)| {
        format!("{}: lane {lane}: {error}: that lane of it was not looked at", shown(path))
    }));
    Ok(GivenDevice { path: path.into(), device, lanes })
}

/// Assembles the members as a start would, except that no replacement is built on and the scrub
/// begins at slot 0.
fn assembled(
    given: &[Given],
    problems: &mut Vec<String>,
    notices: &mut Vec<String>,
) -> Result<Assembled<usize>, AssemblyError> {
    let candidates: Vec<_> = given
        .iter()
        .enumerate()
        .map(|(key, given)| Candidate { key, superblock: given.superblock.clone() })
        .collect();
    let mut assembled = match assemble(&candidates, false) {
        Ok(assembled) => assembled,
        Err(error @ AssemblyError::NoMajority { .. }) => {
            // Forced: a check does no harm.
            let assembled = assemble(&candidates, true)?;
            problems.push(error.to_string());
            assembled
        }
        Err(error) => return Err(error),
    };
    let path = |key: usize| shown(&given[key].path);
    for (key, NotUsed { why: reason, .. }) in &assembled.refused {
        let superblock = &given[*key].superblock;
        let seat = assembled.seats.iter_mut().find(|seat| seat.uuid == superblock.device);
        let is_copy = seat.as_ref().is_some_and(|seat| seat.key.is_some());
        if is_copy || superblock.unfit().is_some() {
            problems.push(format!("{}: would not be used: {reason}", path(*key)));
            continue;
        }
        // Its content says nothing about the current members.
        notices.push(format!("{}: is no current member: {reason}; it was not looked at", path(*key)));
        if let Some(seat) = seat {
            seat.reason = Some(reason.clone());
        }
    }
    for (index, seat) in assembled.seats.iter_mut().enumerate() {
        // The member itself is verified; nothing depends on its incomplete replacement.
        if let Some((key, ..)) = seat.replacement.take() {
            notices.push(format!("{}: is being built as member {index}; it was not looked at", path(key)));
        }
        if seat.state == MemberState::Rebuilding {
            seat.state = MemberState::Missing;
            seat.key = None;
            seat.reason = Some("is being rebuilt; it was not looked at".into());
        }
    }
    assembled.superblock.scrub = ScrubRecord::default();
    assembled.superblock.replacements.clear();
    // Replaced devices are reported above, and not marked.
    assembled.replaced.clear();
    Ok(assembled)
}

/// An array that runs over the layer.
struct Run {
    volume: PlainVolume,
    layer: Layer,
    notices: Vec<String>,
    /// Notices of slots that cannot be read.
    unreadable_notices: Vec<String>,
    output: VolumeOutput,
    phase: Phase,
    /// Copies of metadata pages that were found bad before the scrub. The scrub finds them rewritten.
    bad_copies: u64,
    /// Places of blocks that were set aside. The array reads these places by itself, also during the scrub.
    aside: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Until the log is replayed.
    Replay,
    Scrub,
    /// The places of blocks that are set aside are read, as a start would do soon.
    Repair,
    /// It has ended, or cannot go on.
    Over,
}

impl Run {
    fn finish(&mut self, progress: &mut dyn FnMut(&Activity)) -> Result<VolumeStatus, CheckError> {
        let mut ticked = Timestamp(0);
        let mut left = COMPLETIONS_PER_LOOK;
        self.step(VolumeEvent::Tick);
        while self.phase != Phase::Over {
            let has_work = self.volume.due().is_some_and(|due| due <= clock::now());
            match self.layer.done().recv_timeout(if has_work { Duration::ZERO } else { TICK }) {
                Ok(completion) => self.step(VolumeEvent::Io(completion)),
                Err(RecvTimeoutError::Timeout) => left = 0,
                Err(RecvTimeoutError::Disconnected) => unreachable!("the layer holds its workers"),
            }
            left = left.saturating_sub(1);
            let now = clock::now();
            if left == 0 || now.nanos_since(ticked) >= TICK.as_nanos() as u64 {
                (ticked, left) = (now, COMPLETIONS_PER_LOOK);
                self.step(VolumeEvent::Tick);
                self.look(progress)?;
            }
        }
        Ok(self.volume.status())
    }

    fn look(&mut self, progress: &mut dyn FnMut(&Activity)) -> Result<(), CheckError> {
        if self.layer.kept_bytes() > REPLAY_BYTES_MAX {
            return Err(CheckError::TooMuch);
        }
        if let Some(path) = self.layer.give_up_late(drill::device_limit()) {
            return Err(CheckError::Hangs { path });
        }
        let status = self.volume.status();
        let refused = matches!(status.log, LogState::Refused(_)) || status.state == ArrayState::Failed;
        self.aside.extend(blocks_of(&parts(&status.set_aside)));
        match self.phase {
            _ if refused => self.phase = Phase::Over,
            Phase::Replay if status.log == LogState::Serving => {
                self.phase = Phase::Scrub;
                // A scrub reads back at once what it rewrites; it need not be kept longer.
                self.layer.forget();
                self.step(VolumeEvent::Admin(SCRUB, AdminRequest::ScrubStart));
            }
            Phase::Scrub if status.last_scrub.is_some() && !self.aside.is_empty() => {
                self.phase = Phase::Repair;
                // Blocks that go back to their places are read again, with the rest of their rows.
                self.layer.keep_all();
                self.step(VolumeEvent::Admin(REPAIR, AdminRequest::Repair));
            }
            Phase::Scrub if status.last_scrub.is_some() => self.phase = Phase::Over,
            Phase::Replay | Phase::Scrub | Phase::Repair | Phase::Over => {}
        }
        if let Some(scrub) = status.activities.iter().find(|activity| activity.kind == ActivityKind::Scrub) {
            progress(scrub);
        }
        Ok(())
    }

    fn step(&mut self, event: VolumeEvent) {
        let mut output = std::mem::take(&mut self.output);
        self.volume.step(clock::now(), event, &mut output);
        assert!(output.replies.is_empty(), "there are no clients");
        let mut jobs = Vec::new();
        for action in output.actions.drain(..) {
            match action {
                ArrayAction::Io { device, token, op, .. } => self.layer.submit(device, token, op),
                // The report says what the places of set-aside blocks hold.
                ArrayAction::Notice(notice) if self.phase == Phase::Repair => {
                    if notice.kind == NoticeKind::RepairEnded {
                        self.phase = Phase::Over;
                    }
                }
                ArrayAction::Notice(notice) if notice.kind == NoticeKind::BlocksUnreadable => {
                    self.unreadable_notices.extend(worth_telling(notice));
                }
                ArrayAction::Notice(notice) => {
                    let is_bad_copy = matches!(notice.kind, NoticeKind::PageRepaired | NoticeKind::PageLost);
                    self.bad_copies += u64::from(is_bad_copy && self.phase == Phase::Replay);
                    self.notices.extend(worth_telling(notice));
                }
                ArrayAction::AdminDone(_, Err(error)) => {
                    self.notices.push(error.to_string());
                    self.phase = Phase::Over;
                }
                // A device that left service stays open and locked until the end.
                ArrayAction::AdminDone(_, Ok(_)) | ArrayAction::Release(_) | ArrayAction::WritesLost => {}
                ArrayAction::Work(job) => jobs.push(job),
            }
        }
        self.output = output;
        for job in jobs {
            self.step(VolumeEvent::Worked(job.run()));
        }
    }

    /// Set-aside blocks that their own members can read: they were noted in `aside` and are in none
    /// of these lists.
    fn kept_aside(&self, lists: [&Vec<LostPart>; 3]) -> Vec<LostPart> {
        let listed: BTreeSet<u64> = lists.into_iter().flat_map(|parts| blocks_of(parts)).collect();
        let mut kept: Vec<LostPart> = Vec::new();
        for &offset in self.aside.difference(&listed) {
            match kept.last_mut() {
                Some(part) if part.offset + part.bytes == offset => part.bytes += ROW_BYTES,
                _ => kept.push(LostPart { offset, bytes: ROW_BYTES }),
            }
        }
        kept
    }

    /// Notices of the run, except those about unreadable parts of the volume, which these lists hold more
    /// completely than the scrub reported them. Unreadable parity is in no list, so its notices stay.
    fn notices_beside(&mut self, lists: [&Vec<LostPart>; 4]) -> Vec<String> {
        let mut notices = std::mem::take(&mut self.notices);
        if lists.iter().all(|parts| parts.is_empty()) {
            notices.append(&mut self.unreadable_notices);
        }
        notices
    }

    /// Why the scrub has not reached its end.
    fn problem(&self, status: &VolumeStatus) -> Option<String> {
        match &status.log {
            LogState::Refused(reason) => Some(format!("the array could not be served: {reason}")),
            _ if status.last_scrub.is_none() => Some("not everything could be read".into()),
            _ => None,
        }
    }
}

/// A notice as a check reports it; none for the result of a scrub, which is in the report. An array in
/// service rewrites blocks; a check does not, so the end of such notices is replaced.
fn worth_telling(notice: ArrayNotice) -> Option<String> {
    let text = notice.text;
    let text = text.strip_prefix("scrub: ").unwrap_or(&text);
    Some(match notice.kind {
        NoticeKind::ScrubEnded => return None,
        NoticeKind::BlocksRepaired | NoticeKind::PageRepaired => DONE_BY_A_SCRUB
            .iter()
            .find_map(|(done, would)| Some(text.strip_suffix(done)?.to_owned() + would))
            .unwrap_or_else(|| text.to_owned()),
        NoticeKind::LogReplayed => text.replacen("was replayed", "was replayed in memory", 1),
        _ => text.to_owned(),
    })
}

/// How notices of a scrub end, and what a check says instead.
const DONE_BY_A_SCRUB: [(&str, &str); 3] = [
    ("they are rewritten", "they would be rewritten by a scrub"),
    ("it is rewritten", "it would be rewritten by a scrub"),
    ("it will be rewritten", "it would be rewritten by a scrub"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::format::{Epoch, ReplacementRecord, Role};
    use calpe_core::units::SlotIndex;

    /// Devices m0, m1, ... with these superblocks.
    fn given(superblocks: Vec<Superblock>) -> Vec<Given> {
        let device = |(at, superblock): (usize, Superblock)| Given {
            path: format!("m{at}").into(),
            device: None,
            superblock,
            damaged: 0,
        };
        superblocks.into_iter().enumerate().map(device).collect()
    }

    #[test]
    fn a_device_that_is_being_built_beside_its_member_is_no_problem() {
        let (devices, new) = ([1, 2, 3].map(Uuid::from_u128), Uuid::from_u128(4));
        let member = MemberIndex(1);
        let mut superblocks = calpe_core::testing::small_array(2, 1).superblocks(&devices);
        for superblock in &mut superblocks {
            superblock.replacements.push(ReplacementRecord { member, uuid: new, rebuilt: SlotIndex(0) });
        }
        superblocks.push(Superblock { device: new, role: Role::Replacement, ..superblocks[1].clone() });
        let given = given(superblocks);
        let (mut problems, mut notices) = (Vec::new(), Vec::new());
        let assembled = assembled(&given, &mut problems, &mut notices).expect("all are there");
        assert_eq!(assembled.live.len(), 3);
        assert!(problems.is_empty(), "{problems:?}");
        assert_eq!(notices, ["m3: is being built as member 1; it was not looked at"]);
    }

    /// A change of the given superblocks, the keys of the members that are to be in service then, and parts
    /// of the notice about the member that is not checked.
    type NotLookedAt = (fn(&mut Vec<Superblock>), &'static [usize], &'static str);

    #[test]
    fn what_is_no_current_member_is_named_and_no_problem() {
        let cases: [NotLookedAt; 2] = [
            (
                |superblocks| {
                    let former = Superblock { device: Uuid::from_u128(9), ..superblocks[1].clone() };
                    superblocks.push(former);
                },
                &[0, 1, 2],
                "m3: is no current member: it was member 1 before that was replaced",
            ),
            (
                |superblocks| {
                    let held = superblocks[0].epoch;
                    let live = [0, 1].map(MemberIndex).into_iter().collect();
                    let next = Epoch { number: held.number + 1, id: held.id + 1, parent: held.id, live };
                    superblocks[..2].iter_mut().for_each(|superblock| superblock.epoch = next);
                },
                &[0, 1],
                "m2: is no current member: stale",
            ),
        ];
        for (change, live, part) in cases {
            let mut superblocks =
                calpe_core::testing::small_array(2, 1).superblocks(&[1, 2, 3].map(Uuid::from_u128));
            change(&mut superblocks);
            let given = given(superblocks);
            let (mut problems, mut notices) = (Vec::new(), Vec::new());
            let assembled = assembled(&given, &mut problems, &mut notices).expect("enough are there");
            let seated: Vec<usize> = assembled.seats.iter().filter_map(|seat| seat.key).collect();
            assert_eq!(seated, live);
            assert!(problems.is_empty(), "{problems:?}");
            assert!(notices.len() == 1 && notices[0].contains(part), "{notices:?}");
            let reasons = assembled.seats.iter().filter(|seat| seat.key.is_none());
            assert!(
                reasons.clone().all(|seat| seat.reason.as_ref().is_some_and(|why| why.contains("stale")))
            );
        }
    }

    #[test]
    fn a_member_that_no_device_claims_to_be_may_be_one_that_cannot_be_read() {
        assert_eq!(not_given(&[]), "not given");
        assert_eq!(not_given(&["m2".into()]), "not given, or it is m2, which cannot be used");
        let two = not_given(&["m2".into(), "m3".into()]);
        assert_eq!(two, "not given, or it is one of m2, m3, which cannot be used");
    }
}
