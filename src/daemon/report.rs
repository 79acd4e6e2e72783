//! Translates what a volume says of itself into what users see: adds names, paths, rates and sentences.
//!
//! Must not ask anybody anything: facts in, report out. Rates come from samples that are handed in with their time.

use super::reactor::{ArrayFacts, ListenAddress};
use super::returns::{Obstacle, Returning};
use super::search::Hindrance;
use super::state::{Counts, MemberReason};
use crate::control::{
    self, ArrayReport, Condition, EngineReport, ErrorReport, GpuReport, LastScrub, LogReport, LostReport,
    MemberReport, ReplacementReport, ScanKind, ScanReport, ScanState, VolumeReport, explain,
};
use crate::member::{Device, DeviceFacts, Identity, is_remote};
use calpe_core::block_io::DeviceId;
use calpe_core::format::{MemberState, VolumeKind};
use calpe_core::nbd::TlsMode;
use calpe_core::units::{MemberIndex, Timestamp, VolumeOffset};
use calpe_core::volume::{
    Activity, ActivityKind, ArrayState, LogState, MemberCondition, MemberStatus, Rest, VolumeStatus,
};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Rates are averages over this long, in nanoseconds: long enough to be steady, short enough to be of today.
const RATE_NANOS: u64 = 10_000_000_000;

/// A shorter time tells no rate.
const RATE_NANOS_MIN: u64 = 500_000_000;

/// A device as people know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Identity of the device.
    pub uuid: Uuid,
    /// Where it is, or was last; none if it was not seen since the daemon started.
    pub path: Option<PathBuf>,
    /// What was found there when it was opened.
    pub found: Option<FoundThere>,
}

/// A device as it was when it was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundThere {
    /// What it is.
    pub facts: DeviceFacts,
    /// Tells whether other paths lead to it; not of remote ones.
    pub identity: Option<Identity>,
}

impl Place {
    /// The place of an open device.
    #[must_use]
    pub fn of(uuid: Uuid, device: &Device) -> Place {
        let found = FoundThere { facts: device.facts(), identity: device.identity() };
        Place { uuid, path: Some(device.path().to_owned()), found: Some(found) }
    }

    /// The place of a device that was not opened.
    #[must_use]
    pub fn unseen(uuid: Uuid, path: Option<PathBuf>) -> Place {
        Place { uuid, path, found: None }
    }

    /// Whether its transfers go through this host's page cache.
    #[must_use]
    pub fn is_cached(&self) -> bool {
        self.found.is_some_and(|found| found.facts.is_cached())
    }

    /// Its path, or its uuid when no path is known.
    #[must_use]
    pub fn name(&self) -> String {
        self.path.as_ref().map_or_else(|| self.uuid.to_string(), |path| path.display().to_string())
    }
}

/// What the daemon knows of an array beside what its volume says.
#[derive(Debug)]
pub struct Names {
    /// Name of the array.
    pub name: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Kind of its volume.
    pub kind: VolumeKind,
    /// Clients may only read.
    pub read_only: bool,
    /// Per member: its device, or the last it had.
    pub seats: Vec<Place>,
    /// Every device handed to the array.
    pub devices: HashMap<DeviceId, Place>,
    /// Counts of earlier runs, by member.
    pub(super) earlier: Vec<Counts>,
    /// Requests of clients that failed in earlier runs.
    pub(super) earlier_client_errors: u64,
    /// Members that a scrub of an earlier run could not check, and when it ended.
    pub(super) earlier_unchecked: (u64, Vec<u16>),
    /// Copies of the superblock that were found damaged when the array was opened, by device.
    pub damaged: HashMap<Uuid, u64>,
    /// What keeps devices of members from coming back from where they had been.
    pub hindrances: HashMap<Uuid, Hindrance>,
    /// What was found out about devices since the array said why they are out.
    pub findings: HashMap<Uuid, String>,
    /// Of devices whose members were out of service at the start: the reason that the array was
    /// given, and the cause that an earlier run knew.
    pub causes: HashMap<Uuid, (Option<String>, Option<String>)>,
    /// Progress lately.
    pub meters: Meters,
}

impl Names {
    /// Takes note of the devices that members have now, and of progress.
    pub fn observe(&mut self, now: Timestamp, facts: &ArrayFacts) {
        for (at, (seat, member)) in self.seats.iter_mut().zip(&facts.status.members).enumerate() {
            if let Some(place) = member.device.and_then(|device| self.devices.get(&device)) {
                if seat.uuid != place.uuid {
                    // What an earlier run counted was of the device that was replaced.
                    self.earlier.get_mut(at).into_iter().for_each(|counts| *counts = Counts::default());
                    self.damaged.remove(&seat.uuid);
                }
                self.hindrances.remove(&place.uuid);
                self.findings.remove(&place.uuid);
                self.causes.remove(&place.uuid);
                *seat = place.clone();
            }
        }
        self.meters.observe(now, &facts.status.activities);
    }

    /// Where the devices of its members are, or were.
    pub(super) fn paths(&self) -> impl Iterator<Item = &PathBuf> {
        self.seats.iter().filter_map(|seat| seat.path.as_ref())
    }

    /// Takes note of what keeps a device from coming back. `found`, a line, is told in place of the
    /// reason for which its member is out, if that is another.
    pub(super) fn hinder(&mut self, device: Uuid, hindrance: Hindrance, found: String) {
        let before = self.hindrances.insert(device, hindrance);
        // What an earlier look has shown there is over; why it left service is not.
        if hindrance == Hindrance::Kept || before.is_some_and(|before| before != hindrance) {
            self.findings.insert(device, found);
        }
    }

    /// Where a device of the array may be besides where it was: beside its fellows, and in these
    /// places. All of /dev is not searched only because a member is there.
    pub(super) fn places_around(&self, configured: &[PathBuf]) -> Vec<PathBuf> {
        let known = self.seats.iter().chain(self.devices.values()).filter_map(|place| place.path.as_ref());
        let local = known.filter(|path| !is_remote(path));
        let mut around: Vec<PathBuf> =
            local.filter_map(|path| path.parent()).map(Path::to_path_buf).collect();
        around.sort();
        around.dedup();
        around.extend_from_slice(configured);
        around.retain(|place| place != Path::new("/dev"));
        around
    }

    /// The report of an array; `returning` are the members that come back by themselves.
    #[must_use]
    pub fn report(
        &self,
        facts: &ArrayFacts,
        addresses: &[(ListenAddress, TlsMode)],
        gpu: &GpuReport,
        returning: &[Returning],
    ) -> ArrayReport {
        let status = &facts.status;
        let mut report = ArrayReport {
            name: self.name.clone(),
            uuid: self.uuid,
            state: state_of(status.state),
            status: String::new(),
            action: String::new(),
            volume: VolumeReport {
                kind: match self.kind {
                    VolumeKind::Plain => "plain".into(),
                    VolumeKind::Cas => "cas".into(),
                },
                bytes: status.geometry.volume_bytes,
                logical: None,
                stored: None,
            },
            data: status.geometry.data,
            parity: status.geometry.parity,
            chunk: status.geometry.chunk,
            checksum: status.checksum.to_string(),
            log: LogReport {
                yields_to_force: status.yields_to_force,
                ..log_report(&status.log, status.state)
            },
            epoch: status.epoch,
            dirty: status.dirty,
            uris: addresses.iter().map(|(address, tls)| uri(address, *tls, &self.name)).collect(),
            read_only: self.read_only,
            clients: facts.clients as u64,
            members: self
                .seats
                .iter()
                .zip(&status.members)
                .map(|(seat, member)| {
                    let returning = returning.iter().find(|returning| returning.index == member.index);
                    self.member(seat, member, returning)
                })
                .collect(),
            scan: status.activities.iter().map(|activity| self.meters.scan(activity)).collect(),
            last_scrub: status.last_scrub.map(|scrub| LastScrub {
                finished_unix: scrub.finished_unix,
                errors: scrub.errors,
                repaired: scrub.repaired,
            }),
            last_scrub_unchecked: self.unchecked(status),
            engine: EngineReport { codec: status.engine.into(), gpu: gpu.clone() },
            errors: ErrorReport { client: self.client_errors(status) },
            lost: parts(&status.lost),
            set_aside: parts(&status.set_aside),
            set_aside_members: status.set_aside_on.iter().map(|member| member.0).collect(),
            unreadable: parts(&status.unreadable),
            unreadable_pages: status.unreadable_pages,
            unconfirmed: parts(&both(&status.unconfirmed_lost, &status.unconfirmed)),
            start: None,
        };
        let explanation = explain(&report);
        report.status = explanation.status;
        report.action = explanation.action;
        report
    }

    /// Members that the last scrub could not check.
    #[must_use]
    pub(super) fn unchecked(&self, status: &VolumeStatus) -> Vec<u16> {
        let Some(scrub) = status.last_scrub else { return Vec::new() };
        let (finished_unix, members) = &self.earlier_unchecked;
        match scrub.unchecked.is_empty() && *finished_unix == scrub.finished_unix {
            true => members.clone(),
            false => scrub.unchecked.iter().map(|member| member.0).collect(),
        }
    }

    /// What devices of members went into service without, by device, as runs of slots: the first,
    /// and how many.
    #[must_use]
    pub(super) fn lacking(status: &VolumeStatus) -> BTreeMap<Uuid, Vec<(u64, u64)>> {
        let devices = status.members.iter().flat_map(|member| &member.lacking);
        devices
            .map(|(device, runs)| (*device, runs.iter().map(|(first, many)| (first.0, *many)).collect()))
            .collect()
    }

    /// The counts of all members, those of earlier runs included.
    #[must_use]
    pub(super) fn counts(&self, status: &VolumeStatus) -> Vec<Counts> {
        self.seats.iter().zip(&status.members).map(|(seat, member)| self.counts_of(seat, member)).collect()
    }

    /// Requests of clients that failed, those of earlier runs included.
    #[must_use]
    pub(super) fn client_errors(&self, status: &VolumeStatus) -> u64 {
        self.earlier_client_errors.saturating_add(status.client_errors)
    }

    /// Replacements that were given up while their members stayed in service.
    #[must_use]
    pub(super) fn given_up(&self, status: &VolumeStatus) -> Vec<MemberReason> {
        let members = self.seats.iter().zip(&status.members);
        // A member in service has no other reason.
        let in_service = members.filter(|(_, member)| member.state == MemberState::Online);
        let given_up = in_service.filter_map(|(seat, member)| {
            let reason = member.reason.clone()?;
            Some(MemberReason { member: member.index.0, device: seat.uuid, reason })
        });
        given_up.collect()
    }

    /// Why members are out of service that the superblocks record as that, so that a restart can
    /// tell. What a start says of them is not the cause.
    pub(super) fn out(&self, status: &VolumeStatus) -> Vec<MemberReason> {
        let members = self.seats.iter().zip(&status.members);
        let out = members.filter_map(|(seat, member)| {
            if !matches!(member.state, MemberState::Faulted | MemberState::Offline) {
                return None;
            }
            let reason = match self.causes.get(&seat.uuid) {
                Some((at_start, cause)) if *at_start == member.reason => cause.clone()?,
                _ => member.reason.clone()?,
            };
            Some(MemberReason { member: member.index.0, device: seat.uuid, reason })
        });
        out.collect()
    }

    fn counts_of(&self, seat: &Place, member: &MemberStatus) -> Counts {
        let cksum = self.damaged.get(&seat.uuid).copied().unwrap_or(0);
        let earlier = self.earlier.get(usize::from(member.index.0)).copied().unwrap_or_default();
        earlier + Counts::from(member.counters) + Counts { cksum, ..Counts::default() }
    }

    /// Forgets the counts of a member, or of all, but for those that the volume keeps.
    pub fn clear(&mut self, member: Option<MemberIndex>) {
        if member.is_none() {
            self.earlier_client_errors = 0;
        }
        let is_meant = |at: usize| member.is_none_or(|member| usize::from(member.0) == at);
        for (_, counts) in self.earlier.iter_mut().enumerate().filter(|(at, _)| is_meant(*at)) {
            *counts = Counts::default();
        }
        for (at, seat) in self.seats.iter().enumerate() {
            if is_meant(at) {
                self.damaged.remove(&seat.uuid);
            }
        }
    }

    fn member(&self, seat: &Place, member: &MemberStatus, returning: Option<&Returning>) -> MemberReport {
        let obstacle = returning.and_then(|returning| returning.obstacle.as_ref());
        let counts = self.counts_of(seat, member);
        let troubled = counts.read + counts.write + counts.cksum > 0;
        let is_out = member.device.is_none();
        let finding = self.findings.get(&seat.uuid).filter(|_| is_out);
        let reason = finding.or(member.reason.as_ref()).cloned();
        MemberReport {
            index: member.index.0,
            name: seat.name(),
            uuid: seat.uuid,
            state: match member.state {
                MemberState::Online if troubled => control::MemberState::Degraded,
                MemberState::Online => control::MemberState::Online,
                MemberState::Rebuilding => control::MemberState::Rebuilding,
                MemberState::Faulted => control::MemberState::Faulted,
                MemberState::Offline => control::MemberState::Offline,
                MemberState::Missing => control::MemberState::Missing,
            },
            read: counts.read,
            write: counts.write,
            cksum: counts.cksum,
            repaired: counts.repaired,
            conditions: {
                let returning = returning.map_or(&[][..], |returning| match obstacle {
                    Some(Obstacle::Displaced(_)) => &[Condition::Displaced],
                    Some(Obstacle::Refused(_)) => &[Condition::Refused],
                    None if returning.is_quarantined => &[Condition::Returning, Condition::Quarantined],
                    None => &[Condition::Returning],
                });
                let hindrance = self.hindrances.get(&seat.uuid).filter(|_| is_out).copied();
                let mut all = conditions(member, &counts, returning, hindrance, obstacle.is_some());
                let last = seat.found.and_then(|found| found.identity).filter(|_| is_out);
                if last.is_some_and(Identity::is_leaving) {
                    all.push(Condition::Unanswered);
                }
                all
            },
            reason: obstacle.map(|obstacle| obstacle.reason().to_owned()).or(reason),
            cached: member.device.and_then(|id| self.devices.get(&id)).is_some_and(Place::is_cached),
            tried_in_s: returning.and_then(|returning| returning.tried_in_s),
            replacement: member.replacement.map(|device| match self.devices.get(&device) {
                Some(place) => ReplacementReport { name: place.name(), uuid: Some(place.uuid) },
                None => ReplacementReport { name: format!("device {}", device.0), uuid: None },
            }),
        }
    }
}

/// `blocked`: an attempt to bring it back has met something.
fn conditions(
    member: &MemberStatus,
    counts: &Counts,
    returning: &[Condition],
    hindrance: Option<Hindrance>,
    blocked: bool,
) -> Vec<Condition> {
    let of_array = member.conditions.iter().map(|condition| match condition {
        MemberCondition::Full => Condition::Full,
        MemberCondition::NewDeviceFull => Condition::NewDeviceFull,
        MemberCondition::ShortOfResources => Condition::HostShort,
        MemberCondition::KeptDespiteErrors => Condition::KeptDespiteErrors,
        MemberCondition::NotMended => Condition::NotMended,
        MemberCondition::LacksBlocks => Condition::LacksBlocks,
        MemberCondition::Slow => Condition::Slow,
        MemberCondition::ServedLast => Condition::ServedLast,
        MemberCondition::CutOff => Condition::CutOff,
    });
    let repaired = (counts.repaired > 0).then_some(Condition::Repaired);
    let of_place = hindrance.and_then(|hindrance| match hindrance {
        // What the attempt has met is newer.
        _ if blocked && hindrance.is_for_good() => None,
        Hindrance::Overwritten => Some(Condition::Overwritten),
        Hindrance::CutOff => Some(Condition::CutOff),
        Hindrance::Claimed => Some(Condition::Claimed),
        Hindrance::Forbidden => Some(Condition::Forbidden),
        Hindrance::Kept => Some(Condition::Kept),
        Hindrance::Stranger => None,
    });
    let mut all: Vec<Condition> = of_array.chain(returning.iter().copied()).chain(repaired).collect();
    // The array knows of some that were cut off in service.
    all.extend(of_place.filter(|of_place| !all.contains(of_place)));
    all
}

fn log_report(log: &LogState, array: ArrayState) -> LogReport {
    let (state, reason) = match log {
        // It waits for members: nothing is replayed before they are back.
        LogState::Replaying if array == ArrayState::Failed => (control::LogState::NotStarted, None),
        LogState::Replaying => (control::LogState::Replaying, None),
        LogState::Settling => (control::LogState::Settling, None),
        LogState::Serving => (control::LogState::Serving, None),
        LogState::Refused(reason) => (control::LogState::Refused, Some(reason.clone())),
    };
    LogReport { state, reason, yields_to_force: false }
}

fn state_of(array: ArrayState) -> control::ArrayState {
    match array {
        ArrayState::Online => control::ArrayState::Online,
        ArrayState::Degraded => control::ArrayState::Degraded,
        ArrayState::Failed => control::ArrayState::Failed,
    }
}

/// Progress of passes over the last seconds.
#[derive(Debug, Default)]
pub struct Meters(BTreeMap<ActivityKind, VecDeque<(Timestamp, u64)>>);

impl Meters {
    /// Takes note of how far passes are.
    pub fn observe(&mut self, now: Timestamp, activities: &[Activity]) {
        self.0.retain(|kind, _| {
            activities.iter().any(|activity| activity.kind == *kind && activity.rest.is_none())
        });
        for activity in activities.iter().filter(|activity| activity.rest.is_none()) {
            let samples = self.0.entry(activity.kind).or_default();
            if samples.back().is_some_and(|(_, done)| *done > activity.done_bytes) {
                // It began again.
                samples.clear();
            }
            samples.push_back((now, activity.done_bytes));
            // One sample older than the window stays, so that the window is full.
            while samples.get(1).is_some_and(|(at, _)| now.nanos_since(*at) >= RATE_NANOS) {
                samples.pop_front();
            }
        }
    }

    /// Bytes a second lately.
    fn rate(&self, kind: ActivityKind) -> Option<u64> {
        let samples = self.0.get(&kind)?;
        let ((start, from), (end, to)) = (samples.front()?, samples.back()?);
        let nanos = end.nanos_since(*start);
        (nanos >= RATE_NANOS_MIN).then(|| (u128::from(to - from) * 1_000_000_000 / u128::from(nanos)) as u64)
    }

    /// A pass with its rate.
    #[must_use]
    pub fn scan(&self, activity: &Activity) -> ScanReport {
        let rate = self.rate(activity.kind).filter(|_| activity.rest.is_none());
        let left = activity.total_bytes.saturating_sub(activity.done_bytes);
        ScanReport {
            kind: match activity.kind {
                ActivityKind::Rebuild => ScanKind::Rebuild,
                ActivityKind::Scrub => ScanKind::Scrub,
                ActivityKind::Repair => ScanKind::Repair,
            },
            // What is listed is not over: metadata and superblocks come after the last slot.
            percent: ScanReport::percent_of(activity.done_bytes, activity.total_bytes)
                .min(ScanReport::RUNNING_PERCENT_MAX),
            done: activity.done_bytes,
            total: activity.total_bytes,
            rate_bytes_per_s: rate,
            // How long what is tried again takes is up to what makes its reads fail.
            eta_s: rate
                .filter(|rate| *rate > 0 && activity.retried + activity.retried_pages == 0)
                .map(|rate| left.div_ceil(rate)),
            retried: activity.retried,
            retried_pages: activity.retried_pages,
            paused: activity.rest.is_some(),
            state: match activity.rest {
                None => ScanState::Running,
                Some(Rest::Paused) => ScanState::Paused,
                Some(Rest::ForRebuild) => ScanState::WaitsForRebuild,
                Some(Rest::ForRoom) => ScanState::WaitsForRoom,
                Some(Rest::ForMembers) => ScanState::WaitsForMembers,
            },
            errors: activity.errors,
            repaired: activity.repaired,
        }
    }
}

/// The NBD URI of an export.
#[must_use]
pub fn uri(address: &ListenAddress, tls: TlsMode, export: &str) -> String {
    let scheme = if tls == TlsMode::Required { "nbds" } else { "nbd" };
    match address {
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            format!("{scheme}+unix:///{}?socket={}", escape(Path::new(export)), escape(&path))
        }
        ListenAddress::Tcp(address) => format!("{scheme}://{address}/{}", escape(Path::new(export))),
    }
}

/// Leaves out where clients cannot prove who they are: an array with rules for clients is not there for them.
pub(super) fn only_proven(addresses: &mut Vec<(ListenAddress, TlsMode)>) {
    let is_tcp = |address: &ListenAddress| matches!(address, ListenAddress::Tcp(_));
    addresses.retain(|(address, tls)| !is_tcp(address) || *tls != TlsMode::Off);
    for (_, tls) in addresses.iter_mut().filter(|(address, _)| is_tcp(address)) {
        *tls = TlsMode::Required;
    }
}

/// Percent-encodes all that is not plain in the path or query of a URI.
fn escape(path: &Path) -> String {
    let mut text = String::new();
    for &byte in path.as_os_str().as_bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

/// Two lists of ranges as one, ascending.
fn both(some: &[(VolumeOffset, u64)], others: &[(VolumeOffset, u64)]) -> Vec<(VolumeOffset, u64)> {
    let mut all = [some, others].concat();
    all.sort_unstable_by_key(|(start, _)| start.0);
    all
}

fn parts(ranges: &[(VolumeOffset, u64)]) -> Vec<LostReport> {
    ranges.iter().map(|&(at, bytes)| LostReport { offset: at.0, bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_replayed_while_an_array_waits_for_members() {
        let state = |array| log_report(&LogState::Replaying, array).state;
        assert_eq!(state(ArrayState::Failed), control::LogState::NotStarted);
        assert_eq!(state(ArrayState::Degraded), control::LogState::Replaying);
    }

    #[test]
    fn a_member_that_is_there_and_not_taken_has_a_condition_that_says_so() {
        let member = calpe_core::testing::bare_member(MemberIndex(1), MemberState::Missing);
        let of = |hindrance, blocked| conditions(&member, &Counts::default(), &[], hindrance, blocked);
        assert_eq!(of(None, false), []);
        for (hindrance, condition) in [
            (Hindrance::Claimed, Some(Condition::Claimed)),
            (Hindrance::Forbidden, Some(Condition::Forbidden)),
            (Hindrance::Kept, Some(Condition::Kept)),
            (Hindrance::Overwritten, Some(Condition::Overwritten)),
            (Hindrance::CutOff, Some(Condition::CutOff)),
            (Hindrance::Stranger, None),
        ] {
            assert_eq!(of(Some(hindrance), false), condition.into_iter().collect::<Vec<_>>());
            let is_told = condition.filter(|_| !hindrance.is_for_good());
            let newer = of(Some(hindrance), true);
            assert_eq!(newer, is_told.into_iter().collect::<Vec<_>>(), "an attempt has met something else");
        }
        let cut_off = MemberStatus { conditions: vec![MemberCondition::CutOff], ..member.clone() };
        let once = conditions(&cut_off, &Counts::default(), &[], Some(Hindrance::CutOff), false);
        assert_eq!(once, [Condition::CutOff]);
    }

    fn rebuild(done: u64, paused: bool) -> Activity {
        Activity {
            kind: ActivityKind::Rebuild,
            done_bytes: done,
            total_bytes: 1000,
            retried: 0,
            retried_pages: 0,
            rest: paused.then_some(Rest::Paused),
            errors: 0,
            repaired: 0,
        }
    }

    #[test]
    fn a_pass_that_is_listed_is_never_told_as_done() {
        let scan = Meters::default().scan(&Activity { retried: 2, ..rebuild(1000, false) });
        assert_eq!((scan.percent, scan.retried), (ScanReport::RUNNING_PERCENT_MAX, 2));
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * 1_000_000_000)
    }

    #[test]
    fn a_rate_needs_two_samples_and_tells_the_time_left() {
        let mut meters = Meters::default();
        meters.observe(at(1), &[rebuild(100, false)]);
        assert_eq!(meters.scan(&rebuild(100, false)).rate_bytes_per_s, None);
        meters.observe(at(3), &[rebuild(300, false)]);
        let scan = meters.scan(&rebuild(300, false));
        assert_eq!((scan.rate_bytes_per_s, scan.eta_s, scan.percent), (Some(100), Some(7), 30.0));
        let paused = meters.scan(&rebuild(300, true));
        assert_eq!((paused.rate_bytes_per_s, paused.eta_s), (None, None));
    }

    #[test]
    fn old_samples_and_earlier_passes_do_not_count() {
        let mut meters = Meters::default();
        for second in 0..30 {
            meters.observe(at(second), &[rebuild(if second < 15 { second } else { second * 10 }, false)]);
        }
        assert_eq!(meters.scan(&rebuild(290, false)).rate_bytes_per_s, Some(10));
        meters.observe(at(30), &[rebuild(5, false)]);
        assert_eq!(meters.scan(&rebuild(5, false)).rate_bytes_per_s, None);
        meters.observe(at(31), &[]);
        meters.observe(at(32), &[rebuild(6, false)]);
        assert_eq!(meters.scan(&rebuild(6, false)).rate_bytes_per_s, None);
    }

    #[test]
    fn of_an_array_with_rules_no_address_is_told_where_nobody_may_use_it() {
        let (unix, tcp) =
            (ListenAddress::Unix("/s".into()), ListenAddress::Tcp("[::1]:10809".parse().unwrap()));
        let mut addresses = vec![
            (unix.clone(), TlsMode::Off),
            (tcp.clone(), TlsMode::Off),
            (tcp.clone(), TlsMode::Optional),
            (tcp.clone(), TlsMode::Required),
        ];
        only_proven(&mut addresses);
        let told: Vec<String> = addresses.iter().map(|(address, tls)| uri(address, *tls, "tank")).collect();
        let tcp = "nbds://[::1]:10809/tank";
        assert_eq!(told, ["nbd+unix:///tank?socket=/s", tcp, tcp]);
    }

    #[test]
    fn uris_escape_what_is_not_plain() {
        let unix = ListenAddress::Unix("/tmp/a dir/n&d.sock".into());
        assert_eq!(uri(&unix, TlsMode::Optional, "tank"), "nbd+unix:///tank?socket=/tmp/a%20dir/n%26d.sock");
        let tcp = ListenAddress::Tcp("[::1]:10809".parse().unwrap());
        assert_eq!(uri(&tcp, TlsMode::Off, "tank"), "nbd://[::1]:10809/tank");
        assert_eq!(uri(&tcp, TlsMode::Required, "tank"), "nbds://[::1]:10809/tank");
    }
}
