//! Translates a volume's status into what users see: adds names, paths, rates and sentences.
//!
//! Pure: facts in, report out.

use super::names::{Names, Place};
use super::returns::{Obstacle, Returning};
use crate::control::{
    self, ArrayReport, Condition, EngineReport, ErrorReport, GpuReport, LastScrub, LogReport, LostReport,
    MemberReport, PageCacheReport, ReplacementReport, VolumeReport, explain,
};
use crate::daemon::devices::search::Hindrance;
use crate::daemon::reactor::{ArrayFacts, ListenAddress};
use crate::daemon::state::Counts;
use crate::member::Identity;
use calpe_core::array::PageCacheStatus;
use calpe_core::format::{MemberState, PAGE_BYTES, VolumeKind};
use calpe_core::nbd::TlsMode;
use calpe_core::units::{MemberIndex, VolumeOffset};
use calpe_core::volume::{ArrayState, LogState, MemberCondition, MemberStatus};
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

impl Names {
    /// The report of an array; `returning` are the members that come back by themselves, `held` those that
    /// lanes must let go of first.
    #[must_use]
    pub(crate) fn report(
        &self,
        facts: &ArrayFacts,
        addresses: &[(ListenAddress, TlsMode)],
        gpu: &GpuReport,
        (returning, held): (&[Returning], &[MemberIndex]),
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
                    let mut report = self.member(seat, member, returning);
                    report.conditions.extend(held.contains(&member.index).then_some(Condition::HeldAlone));
                    report
                })
                .collect(),
            failed_lanes: failed_lanes(facts),
            scan: status.activities.iter().map(|activity| self.meters.scan(activity)).collect(),
            last_scrub: status.last_scrub.map(|scrub| LastScrub {
                finished_unix: scrub.finished_unix,
                errors: scrub.errors,
                repaired: scrub.repaired,
            }),
            last_scrub_unchecked: self.unchecked(status),
            engine: EngineReport { codec: status.engine.into(), gpu: gpu.clone() },
            page_cache: (status.page_cache.pages_needed > 0).then(|| page_cache(&status.page_cache)),
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
            replacement: member.replacement.map(|new| match self.devices.get(&new.device) {
                Some(place) => ReplacementReport { name: place.name(), uuid: Some(place.uuid) },
                None => ReplacementReport { name: format!("device {}", new.device.0), uuid: Some(new.uuid) },
            }),
        }
    }
}

/// The lanes that have failed, if others have not.
fn failed_lanes(facts: &ArrayFacts) -> Vec<u16> {
    let lanes = (0..).zip(&facts.of_lane).filter(|(_, lane)| lane.state == ArrayState::Failed);
    let failed: Vec<u16> = lanes.map(|(lane, _)| lane).collect();
    if failed.len() < facts.of_lane.len() { failed } else { Vec::new() }
}

/// The conditions of a member. `blocked`: an attempt to bring the member back has met an obstacle.
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
        MemberCondition::NewDeviceWaits => Condition::NewDeviceWaits,
        MemberCondition::ShortOfResources => Condition::HostShort,
        MemberCondition::KeptDespiteErrors => Condition::KeptDespiteErrors,
        MemberCondition::KeptByLanes => Condition::KeptByLanes,
        MemberCondition::NotMended => Condition::NotMended,
        MemberCondition::LacksBlocks => Condition::LacksBlocks,
        MemberCondition::Slow => Condition::Slow,
        MemberCondition::ServedLast => Condition::ServedLast,
        MemberCondition::CutOff => Condition::CutOff,
        MemberCondition::Split => Condition::Split,
    });
    let repaired = (counts.repaired > 0).then_some(Condition::Repaired);
    let of_place = hindrance.and_then(|hindrance| match hindrance {
        // The obstacle is newer.
        _ if blocked && hindrance.is_for_good() => None,
        Hindrance::Overwritten => Some(Condition::Overwritten),
        Hindrance::CutOff => Some(Condition::CutOff),
        Hindrance::Claimed => Some(Condition::Claimed),
        Hindrance::Forbidden => Some(Condition::Forbidden),
        Hindrance::Kept => Some(Condition::Kept),
        Hindrance::Stranger => None,
    });
    let mut all: Vec<Condition> = of_array.chain(returning.iter().copied()).chain(repaired).collect();
    // The array itself reports members that were cut off in service.
    all.extend(of_place.filter(|of_place| !all.contains(of_place)));
    all
}

fn log_report(log: &LogState, array: ArrayState) -> LogReport {
    let (state, reason) = match log {
        // The log is not replayed before the members are back.
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

/// The NBD URI of an export.
#[must_use]
pub(super) fn uri(address: &ListenAddress, tls: TlsMode, export: &str) -> String {
    let scheme = if tls == TlsMode::Required { "nbds" } else { "nbd" };
    match address {
        ListenAddress::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            format!("{scheme}+unix:///{}?socket={}", escape(Path::new(export)), escape(&path))
        }
        ListenAddress::Tcp(address) => format!("{scheme}://{address}/{}", escape(Path::new(export))),
    }
}

/// Leaves out addresses where clients cannot show certificates: an array with rules for clients is not
/// exported there.
pub(crate) fn only_proven(addresses: &mut Vec<(ListenAddress, TlsMode)>) {
    let is_tcp = |address: &ListenAddress| matches!(address, ListenAddress::Tcp(_));
    addresses.retain(|(address, tls)| !is_tcp(address) || *tls != TlsMode::Off);
    for (_, tls) in addresses.iter_mut().filter(|(address, _)| is_tcp(address)) {
        *tls = TlsMode::Required;
    }
}

/// Percent-encodes every character that is not plain in the path or query of a URI.
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

fn page_cache(cache: &PageCacheStatus) -> PageCacheReport {
    let sizes = [cache.pages_max, cache.pages, cache.pages_needed].map(|pages| pages * PAGE_BYTES as u64);
    PageCacheReport::new(sizes, cache.hits, cache.misses)
}

fn parts(ranges: &[(VolumeOffset, u64)]) -> Vec<LostReport> {
    ranges.iter().map(|&(at, bytes)| LostReport { offset: at.0, bytes }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use calpe_core::units::MemberIndex;

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
