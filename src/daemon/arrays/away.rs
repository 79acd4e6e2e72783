//! Which members of an array are away and come back by themselves, and where each may be.
//!
//! Must not look at devices: names, facts and the records of returns in, answers out.

use super::returns::{BACKOFF_MAX, Obstacle, Returning, Returns, SEARCH_BACKOFF_MAX, Terms};
use super::served::Served;
use crate::daemon::devices::search::Hindrance;
use crate::daemon::reactor::ArrayFacts;
use crate::member::{self, TimeLimits};
use calpe_core::format::MemberState;
use calpe_core::units::MemberIndex;
use calpe_core::volume::{ArrayState, MemberCondition, MemberStatus};
use std::path::PathBuf;
use uuid::Uuid;

/// A member that may come back by itself.
#[derive(Debug)]
pub(crate) struct Away {
    /// The array it is of.
    pub(crate) array: Uuid,
    pub(crate) index: MemberIndex,
    /// Identity of its device.
    pub(crate) uuid: Uuid,
    /// Where it may be.
    pub(crate) places: Vec<PathBuf>,
    /// Where else it is looked for. Only for a device that this daemon has not had open.
    pub(crate) sought: Option<Sought>,
    /// Whether the first of its places is where its server was.
    has_own_place: bool,
    /// Why its connection was given up, and until when the member must stay away.
    pub(crate) lost: Option<member::Lost>,
    /// It left service because its storage was full or the host lacked resources.
    pub(crate) was_short: bool,
    /// Whether its places are all on this host. It may be gone for good, so a status does not promise its
    /// return.
    pub(crate) is_local: bool,
    /// How patient to be with its server.
    pub(crate) limits: TimeLimits,
}

/// Where a local device is looked for that may have been copied while nobody had it open.
#[derive(Clone, Debug)]
pub(crate) struct Sought {
    /// Where it was last. If that is known, a copy elsewhere is not accepted.
    pub(crate) own: Option<PathBuf>,
    /// Where a copy of it may be.
    pub(crate) around: Vec<PathBuf>,
}

impl Away {
    /// How it is to be tried.
    pub(crate) fn terms(&self) -> Terms {
        Terms {
            seat: (self.array, self.index.0),
            not_before: self.lost.as_ref().map(|lost| lost.not_before),
            backoff_max: if self.sought.is_none() { BACKOFF_MAX } else { SEARCH_BACKOFF_MAX },
            tells: self.has_own_place,
        }
    }

    /// Its entry in a status.
    fn returning(self, returns: &Returns) -> Returning {
        let (is_quarantined, tried_in_s, met) = returns.outlook(self.terms());
        let obstacle = match met.filter(|_| self.has_own_place) {
            Some(met) => met,
            // The only obstacle known is the one that the connection met before it was given up.
            None => self.lost.filter(|lost| lost.is_refused).map(|lost| Obstacle::Refused(lost.reason)),
        };
        Returning { index: self.index, obstacle, is_quarantined, tried_in_s }
    }
}

/// Entries of a status for members that come back by themselves.
pub(super) fn returning(away: Vec<Away>, returns: &Returns) -> Vec<Returning> {
    let told = away.into_iter().filter(|member| !member.is_local);
    told.map(|member| member.returning(returns)).collect()
}

/// The members of an array that are away and may come back by themselves. `places`: where members
/// are looked for.
pub(crate) fn find_away(
    served: &Served,
    facts: &ArrayFacts,
    returns: &Returns,
    places: &[PathBuf],
) -> Vec<Away> {
    let names = &served.names;
    let used: Vec<&PathBuf> = names.paths().collect();
    let unused = places.iter().filter(|place| {
        member::is_remote(place) && !used.iter().any(|path| member::same_remote(path, place))
    });
    let unused: Vec<PathBuf> = unused.cloned().collect();
    let has_failed = facts.status.state == ArrayState::Failed;
    let mut away = Vec::new();
    for (status, seat) in facts.status.members.iter().zip(names.seats()) {
        let MemberStatus { index, state, returns: was_short, conditions, .. } = status;
        let cut_off = conditions.contains(&MemberCondition::CutOff);
        let remote = seat.path.as_ref().filter(|path| member::is_remote(path));
        let lost = remote.and_then(|path| member::lost(path));
        let may = match state {
            MemberState::Missing => true,
            // Errors of the device do not go away with a new connection.
            MemberState::Faulted => lost.is_some(),
            _ => false,
        };
        let is_meant = *state == MemberState::Missing
            && !has_failed
            && !cut_off
            && returns.was_missing(names.uuid, *index);
        // An administrator must say which of several devices it is, or what is to be done with its content.
        let hindrance = names.hindrance(seat.uuid);
        let is_doubtful = matches!(hindrance, Some(Hindrance::Claimed | Hindrance::Kept));
        let sought = match is_meant && seat.found.is_none() && remote.is_none() && !is_doubtful {
            true => Some(Sought { own: seat.path.clone(), around: names.places_around(places) }),
            false => None,
        };
        let places = match (&seat.path, remote) {
            // Where it was before the daemon started. Its server may have given that place to another host
            // since.
            (_, Some(path)) if seat.found.is_none() => {
                std::iter::once(path).chain(&unused).cloned().collect()
            }
            (_, Some(path)) => vec![path.clone()],
            (None, None) => unused.clone(),
            (Some(path), None) if *was_short => vec![path.clone()],
            (Some(_), None) if seat.found.is_none() => unused.clone(),
            // It was in service there, so it is no copy. While the array has FAILED, `bring_back` tries it.
            (Some(path), None) if is_meant => vec![path.clone()],
            (Some(_), None) => Vec::new(),
        };
        let is_looked_for = !places.is_empty() || sought.is_some();
        if may && is_looked_for && !returns.is_kept_out(names.uuid, *index) {
            let (index, was_short, limits) = (*index, *was_short, served.limits);
            let (array, uuid, has_own_place) = (names.uuid, seat.uuid, remote.is_some());
            let is_local = !was_short && places.iter().all(|place| !member::is_remote(place));
            away.push(Away {
                array,
                index,
                uuid,
                places,
                sought,
                has_own_place,
                lost,
                was_short,
                is_local,
                limits,
            });
        }
    }
    away
}
