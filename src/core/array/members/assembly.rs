//! Which of the devices that carry an array's superblock may serve it: rules A1-A4 and T6 of the crash-safety
//! design.
//!
//! A record that one device has and no other supports is a claim: an epoch, a sequence or an update far
//! beyond those of all others ([`CLAIM_STEP_MAX`]), or one that would leave no array of the others. It is
//! neither believed nor ignored: the start is refused and the member named; a forced start goes on without
//! the member. Pure: superblocks in, a verdict out. Must not know of paths or open devices; `K` is the
//! caller's handle.

mod error;
mod words;

pub use error::AssemblyError;
pub use words::NotUsed;

use crate::array::members::current::{
    Mark, has_update, holds, is_apart, is_current, was_in_service, why_kept,
};
use crate::array::mutation::{Mutation, is_off};
use crate::array::recovery::log_start;
use crate::array::refusal::Behind;
use crate::format::{Epoch, Geometry, MemberSet, MemberState, Role, Superblock};
use crate::units::{MemberIndex, SlotIndex};
use std::collections::HashMap;
use uuid::Uuid;

/// A device with a valid superblock of the array to assemble.
#[derive(Clone, Debug)]
pub struct Candidate<K> {
    /// The caller's handle.
    pub key: K,
    /// Its newest valid superblock.
    pub superblock: Superblock,
}

/// The seat of a member after assembly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat<K> {
    /// Identity of the device that belongs here.
    pub uuid: Uuid,
    /// Online, Rebuilding, or why not: Faulted, Offline, Missing.
    pub state: MemberState,
    /// The device, when it is online or being rebuilt.
    pub key: Option<K>,
    /// While rebuilding.
    pub built: Built,
    /// A replacement under construction: its device, identity and progress.
    pub replacement: Option<(K, Uuid, Built)>,
    /// Why the member is not online.
    pub reason: Option<String>,
}

/// How far a device under construction is built, by its own superblock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Built {
    /// Slots below are complete.
    pub slots: SlotIndex,
    /// Whether that superblock says that the array is clean. The last one before does not, and may count
    /// slots as built that were not compared since an earlier unclean stop.
    pub is_clean: bool,
}

/// An array that can be served.
#[derive(Clone, Debug)]
pub struct Assembled<K> {
    /// The superblock of the chosen epoch with the highest sequence. Its log starts where enough members in
    /// service record it (R2, T6), and it is clean if all of them record that.
    pub superblock: Superblock,
    /// Per member, by index.
    pub seats: Vec<Seat<K>>,
    /// The members in service now.
    pub live: MemberSet,
    /// Every member in service has the chosen epoch already, and the device it replaced is marked; otherwise
    /// that must be written before the next epoch is made (A4).
    pub epoch_is_complete: bool,
    /// Highest superblock sequence seen on any device in use: the next one must be above it.
    pub sequence: u64,
    /// Highest update seen on any device in use: the next one is above it.
    pub update: u64,
    /// The newest update that is known to have reached every member that the next epoch is made of.
    pub update_complete: u64,
    /// Members in service that hold only the parent of the chosen epoch. They are current as long as nothing
    /// was written under the chosen one (A1), which their rings show.
    pub behind: MemberSet,
    /// Members of the chosen epoch with devices that were rolled back to an older state: none of their
    /// content counts.
    pub rolled_back: MemberSet,
    /// The sequence of the newest superblock of every device: the next one must not overwrite it.
    pub sequences: HashMap<Uuid, u64>,
    /// Highest epoch number seen on any device.
    pub epoch_number: u64,
    /// Devices of the array that must not be used, and why.
    pub refused: Vec<(K, NotUsed)>,
    /// Those of them that the chosen epoch has replaced and that are not marked so, with their former seats:
    /// a crash came before they were marked.
    pub replaced: Vec<(K, MemberIndex, Uuid)>,
}

/// How far one device may be ahead of all others before its numbers count as a claim. An update is one step
/// ahead of devices that it did not reach; a member that served alone is some starts ahead.
pub const CLAIM_STEP_MAX: u64 = 1 << 20;

/// Why devices cannot be served; where a claim prevents it, with the place of the device that makes it.
type Refusal = (AssemblyError, Option<usize>);

/// Decides how the array on these devices may be served. All candidates carry the same array uuid.
///
/// `force` accepts a minority that can still decode, and goes on without members whose claims no other
/// confirms.
///
/// # Errors
/// When no epoch is admissible, or the devices contradict each other; nothing may be written then.
pub fn assemble<K: Clone>(candidates: &[Candidate<K>], force: bool) -> Result<Assembled<K>, AssemblyError> {
    // A device that must not be written to is as good as absent: the array starts without it, or not at all.
    let (mut fit, mut unfit) = (Vec::new(), Vec::new());
    for candidate in candidates {
        match candidate.superblock.unfit() {
            None => fit.push(candidate.clone()),
            Some(why) => unfit.push((candidate, why)),
        }
    }
    let mut left_out: Vec<(K, NotUsed)> = Vec::new();
    let outcome = loop {
        match assemble_claims(&fit, force) {
            Err((error, Some(claimant))) if force => {
                left_out.push((fit.remove(claimant).key, error.left_out_by_force()));
            }
            outcome => break outcome.map_err(|(error, _)| error),
        }
    };
    match (outcome, unfit.first()) {
        (Err(without), Some((candidate, why))) => {
            let Superblock { name, member, .. } = &candidate.superblock;
            let (name, why, without) = (name.clone(), why.clone(), Box::new(without));
            Err(AssemblyError::Unfit { name, member: *member, why, without })
        }
        (outcome, _) => {
            let mut assembled = outcome?;
            assembled.refused.extend(left_out);
            assembled.refused.extend(unfit.into_iter().map(|(c, why)| (c.key.clone(), NotUsed::merely(why))));
            Ok(assembled)
        }
    }
}

/// T6: refuses what a single device claims; otherwise like [`assemble_current`].
fn assemble_claims<K: Clone>(candidates: &[Candidate<K>], force: bool) -> Result<Assembled<K>, Refusal> {
    let all: Vec<usize> = (0..candidates.len()).collect();
    check_claim(candidates, &all, "epoch", |s| s.epoch.number)?;
    let error = match assemble_current(candidates, force) {
        Ok((assembled, used)) => {
            check_claim(candidates, &used, "superblock", |s| s.sequence)?;
            check_claim(candidates, &used, "update", |s| s.update)?;
            // With a log in use a member may be far behind in this number, and so may a device under
            // construction: the update that calls the array clean need not have reached it. Its own start
            // judges that.
            let in_service = |&at: &usize| is_in_service(&candidates[at], &assembled);
            let in_service: Vec<usize> = used.iter().copied().filter(in_service).collect();
            if assembled.superblock.clean {
                check_claim(candidates, &in_service, "batch", |s| s.log_start.sequence)?;
            }
            check_log_start(candidates, &used, &assembled, force)?;
            return Ok(assembled);
        }
        Err(error) => error,
    };
    // Would there be an array without the device that knows of the newest epoch, or of the newest update?
    let newest = |value: fn(&Superblock) -> u64| {
        let top = candidates.iter().map(|c| value(&c.superblock)).max()?;
        let mut holders = all.iter().copied().filter(|&at| value(&candidates[at].superblock) == top);
        holders.next().filter(|_| holders.next().is_none())
    };
    let claim = |s: &Superblock| match &error {
        AssemblyError::RolledBack { which, .. } => {
            format!("has update {} of the superblocks ({which})", s.update)
        }
        _ => format!("holds epoch {}, of which the others are no array ({error})", s.epoch.number),
    };
    let claimant = match error {
        AssemblyError::RolledBack { .. } => newest(|s| s.update_complete),
        AssemblyError::TooFew { .. } | AssemblyError::NoMajority { .. } => newest(|s| s.epoch.number),
        _ => None,
    };
    let Some(claimant) = claimant else { return Err((error, None)) };
    let mut others = candidates.to_vec();
    let Superblock { name, member, device, .. } = &others.remove(claimant).superblock;
    // Force goes on without it only where the refusal names it: not where the others are a minority as well,
    // and nobody was told that an older state would be served.
    if assemble_claims(&others, false).is_err() {
        return Err((error, None));
    }
    let claim = claim(&candidates[claimant].superblock);
    let (name, member, device) = (name.clone(), *member, *device);
    let older = match error {
        AssemblyError::RolledBack { members, .. } => members,
        _ => Box::default(),
    };
    Err((AssemblyError::Unconfirmed { name, member, device, claim, older }, Some(claimant)))
}

/// T6: checks that no single device is so far ahead of all others that only a claim explains it.
fn check_claim<K>(
    candidates: &[Candidate<K>],
    used: &[usize],
    what: &str,
    value: impl Fn(&Superblock) -> u64,
) -> Result<(), Refusal> {
    let mut values: Vec<(u64, usize)> =
        used.iter().map(|&at| (value(&candidates[at].superblock), at)).collect();
    values.sort_unstable();
    let [.., (known, _), (claimed, claimant)] = values[..] else { return Ok(()) };
    if claimed - known <= CLAIM_STEP_MAX {
        return Ok(());
    }
    let Superblock { name, member, device, .. } = &candidates[claimant].superblock;
    let claim = format!("claims {what} {claimed}, when the others know of none after {known}");
    let (name, member, device) = (name.clone(), *member, *device);
    Err((AssemblyError::Unconfirmed { name, member, device, claim, older: Box::default() }, Some(claimant)))
}

/// T6: checks that no log starts in an epoch that has not begun yet, and that all devices with the same
/// update record the same start, since one update writes the same to all. The claim is the start that fewer
/// record, or the later of two with as many: believing it would skip content of the log. Updates of one
/// number in two epochs are two updates: the device that alone got the first was not there for the second.
///
/// Two starts with different members, both cut off while they finished one epoch, can also have made two
/// updates of one number. So a start goes on where a member in service records the start of the log that is
/// believed and none contradicts it; forced, and if there is no array without the claimant, from the one that
/// most record.
///
/// The same comes about when one of the two reached only a device under construction, which the other start
/// was without. That must not stand in the way of the members in service. An update names in its table all
/// devices that it goes to: so a device that is not in service is compared with another one only where the
/// tables of both name both.
fn check_log_start<K: Clone>(
    candidates: &[Candidate<K>],
    used: &[usize],
    assembled: &Assembled<K>,
    force: bool,
) -> Result<(), Refusal> {
    let of = |at: usize| &candidates[at].superblock;
    let epoch = assembled.superblock.epoch;
    let refuse = |claimant: usize, claim: String| {
        let Superblock { name, member, device, .. } = of(claimant);
        let (name, member, device) = (name.clone(), *member, *device);
        Err((
            AssemblyError::Unconfirmed { name, member, device, claim, older: Box::default() },
            Some(claimant),
        ))
    };
    if let Some(&claimant) = used.iter().find(|&&at| of(at).log_start.epoch > epoch.number) {
        let start = of(claimant).log_start.epoch;
        let claim = format!("claims that the log starts in epoch {start} and holds epoch {}", epoch.number);
        return refuse(claimant, claim);
    }
    // Earlier builds did not count updates.
    let counted = used.iter().copied().filter(|&at| of(at).update > 0);
    let update = |at: usize| (of(at).epoch.id, of(at).update);
    let is_in_service = |at: usize| is_in_service(&candidates[at], assembled);
    let are_fellows = &|at: usize, other: usize| {
        let are_named = || goes_to(of(at), of(other)) && goes_to(of(other), of(at));
        update(at) == update(other) && (is_in_service(at) && is_in_service(other) || are_named())
    };
    let fellows = |at: usize| used.iter().copied().filter(move |&other| are_fellows(at, other));
    let is_contradicted = |at: usize| fellows(at).any(|other| of(other).log_start != of(at).log_start);
    let confirmed = |at: usize| fellows(at).filter(|&other| of(other).log_start == of(at).log_start).count();
    let least = counted
        .filter(|&at| is_contradicted(at))
        .min_by_key(|&at| (confirmed(at), std::cmp::Reverse(of(at).log_start)));
    let Some(claimant) = least else { return Ok(()) };
    let believed = assembled.superblock.log_start;
    let mut in_service = used.iter().copied().filter(|&at| is_in_service(at));
    if in_service.any(|at| of(at).log_start == believed && !is_contradicted(at)) {
        return Ok(());
    }
    let mut others = candidates.to_vec();
    others.remove(claimant);
    if force && assemble_claims(&others, false).is_err() {
        return Ok(());
    }
    let start = of(claimant).log_start.sequence;
    let text = format!(
        "claims that the log starts at batch {start}, and others with the same update of the superblocks do not"
    );
    refuse(claimant, text)
}

/// Whether a candidate is the device of a member in service.
fn is_in_service<K>(candidate: &Candidate<K>, assembled: &Assembled<K>) -> bool {
    let Superblock { member, device, .. } = candidate.superblock;
    let has_seat = assembled.seats.get(usize::from(member.0)).is_some_and(|seat| seat.uuid == device);
    has_seat && assembled.live.contains(member)
}

/// Whether the update with this table went to a device: one that it names as online, under construction, or
/// the replacement of a member.
fn goes_to(update: &Superblock, device: &Superblock) -> bool {
    let Superblock { device: uuid, member, .. } = *device;
    let of_member = update.members.get(usize::from(member.0)).filter(|record| record.uuid == uuid);
    of_member.is_some_and(|record| matches!(record.state, MemberState::Online | MemberState::Rebuilding))
        || update.replacements.iter().any(|record| record.uuid == uuid)
}

/// A1-A4, and which members were rolled back (T6). Also returns the places of the candidates in use.
fn assemble_current<K: Clone>(
    candidates: &[Candidate<K>],
    force: bool,
) -> Result<(Assembled<K>, Vec<usize>), AssemblyError> {
    let first = candidates.first().ok_or(AssemblyError::Nothing)?;
    check_agreement(first, candidates)?;
    let name = first.superblock.name.clone();
    let epoch = choose_epoch(candidates, &name, force)?;
    let chosen = candidates
        .iter()
        .filter(|c| c.superblock.epoch == epoch)
        .max_by_key(|c| (c.superblock.update, c.superblock.sequence))
        .ok_or(AssemblyError::Nothing)?;
    let record = &chosen.superblock;
    // A device that has an update proves that the one before had reached all devices that it went to.
    let of_line = |s: &&Superblock| s.role != Role::Replaced && holds(s, &epoch);
    let line = candidates.iter().map(|c| &c.superblock).filter(of_line);
    let known_complete = line.map(|s| s.update_complete).max().unwrap_or(0);
    let mark = Mark { epoch, update: known_complete, tail: 0 };
    let current = |at: usize| {
        let superblock = &candidates[at].superblock;
        is_current(superblock, 0, &mark)?;
        // A device may know of a later epoch that was not complete, and record what the members of this one
        // had when that was begun.
        let later = candidates.iter().map(|c| &c.superblock).filter(|s| s.epoch.parent == epoch.id);
        let complete = later.filter(|s| lives_in(superblock, s)).map(|s| s.update_complete).max();
        has_update(superblock, complete.unwrap_or(0))
    };

    let mut seats: Vec<Seat<K>> = Vec::with_capacity(record.members.len());
    let (mut live, mut rolled_back) = (MemberSet::default(), MemberSet::default());
    let mut rolled_back_words = Vec::new();
    let mut taken = vec![false; candidates.len()];
    for (at, member) in record.members.iter().enumerate() {
        let index = MemberIndex(at as u16);
        let mut seat = Seat {
            uuid: member.uuid,
            state: member.state,
            key: None,
            built: Built::default(),
            replacement: None,
            reason: None,
        };
        // A replacement that the epoch counts as the member is complete: it only lacks the update that says
        // so.
        let device = candidates.iter().position(|c| {
            let role = c.superblock.role;
            c.superblock.device == member.uuid
                && c.superblock.member == index
                && role != Role::Replaced
                && (role == Role::Member || epoch.live.contains(index))
        });
        let is_live = epoch.live.contains(index);
        match device.map(|at| (at, current(at))) {
            Some((at, Ok(()))) if is_live && was_in_service(&candidates[at].superblock) => {
                seat.state = MemberState::Online;
                seat.key = Some(candidates[at].key.clone());
                live.insert(index);
                taken[at] = true;
            }
            Some((at, Ok(()))) if member.state == MemberState::Rebuilding => {
                seat.key = Some(candidates[at].key.clone());
                seat.built = built_by_itself(&candidates[at].superblock);
                seat.reason = Some("being rebuilt since before the start".into());
                taken[at] = true;
            }
            Some((at, Err(why))) if is_live && holds(&candidates[at].superblock, &epoch) => {
                seat.state = MemberState::Missing;
                seat.reason = Some(why.to_string());
                rolled_back.insert(index);
                rolled_back_words.push(format!("member {index}: {why}"));
            }
            _ => {
                if matches!(member.state, MemberState::Online | MemberState::Rebuilding) {
                    seat.state = MemberState::Missing;
                    seat.reason = Some("not found at start".into());
                } else {
                    seat.reason =
                        Some(format!("recorded as {} when the array last ran", member.state.as_str()));
                }
            }
        }
        seats.push(seat);
    }
    // The epoch has its majority, including these members: they are here, so no other half can be served with
    // them.
    if !rolled_back.is_empty() && live.len() < usize::from(record.geometry.data) {
        let which = rolled_back_words.join("; ");
        return Err(AssemblyError::RolledBack {
            name,
            members: Box::new(rolled_back),
            which,
            found: live.len(),
        });
    }
    for replacement in &record.replacements {
        let device = (0..candidates.len()).find(|&at| {
            let superblock = &candidates[at].superblock;
            superblock.device == replacement.uuid
                && superblock.role == Role::Replacement
                && current(at).is_ok()
        });
        if let (Some(at), Some(seat)) = (device, seats.get_mut(usize::from(replacement.member.0))) {
            let built = built_by_itself(&candidates[at].superblock);
            seat.replacement = Some((candidates[at].key.clone(), replacement.uuid, built));
            taken[at] = true;
        }
    }
    let refused = (0..candidates.len())
        .filter(|&at| !taken[at])
        .map(|at| {
            let superblock = &candidates[at].superblock;
            let seat = seats.get(usize::from(superblock.member.0));
            let is_replaced = seat.is_some_and(|seat| seat.replacement.is_some());
            (candidates[at].key.clone(), refusal(superblock, record, current(at).err(), is_replaced))
        })
        .collect();

    // Only a device that holds the parent: one that holds anything else may be of another line, which a start
    // must not end.
    let is_unmarked = |s: &Superblock| {
        s.role == Role::Member
            && epoch.parent != 0
            && s.epoch.id == epoch.parent
            && s.epoch.live.contains(s.member)
            && record.members[usize::from(s.member.0)].uuid != s.device
            && record.replacements.iter().all(|r| r.uuid != s.device)
    };
    let unmarked = (0..candidates.len()).filter(|&at| is_unmarked(&candidates[at].superblock));
    let unmarked: Vec<usize> = unmarked.collect();
    let replaced: Vec<_> = unmarked
        .iter()
        .map(|&at| &candidates[at])
        .map(|c| (c.key.clone(), c.superblock.member, c.superblock.device))
        .collect();

    let seated = |c: &Candidate<K>| {
        let seat = &record.members[usize::from(c.superblock.member.0)];
        live.contains(c.superblock.member) && seat.uuid == c.superblock.device
    };
    let epoch_is_complete = candidates
        .iter()
        .filter(|c| seated(c))
        .all(|c| c.superblock.epoch == epoch && c.superblock.role == Role::Member)
        && replaced.is_empty();
    let seated_behind = candidates.iter().filter(|c| seated(c) && c.superblock.epoch != epoch);
    let behind = seated_behind.map(|c| c.superblock.member).collect();
    // The next update must record the log start that the replay uses. The newest superblock may be that of a
    // device under construction, the only one to get the mark of a replay that was over: if its start went to
    // all members and the replay were cut off again, the next start would find an empty log and half-written
    // pages that no record names.
    let mut superblock = record.clone();
    let in_service: Vec<&Superblock> =
        candidates.iter().filter(|c| seated(c)).map(|c| &c.superblock).collect();
    let all: Vec<&Superblock> = candidates.iter().map(|c| &c.superblock).collect();
    log_start::record(&mut superblock, &in_service, &all, record);
    let used: Vec<usize> = (0..candidates.len()).filter(|at| taken[*at] || unmarked.contains(at)).collect();
    let highest = |value: fn(&Superblock) -> u64| {
        used.iter().map(|&at| value(&candidates[at].superblock)).max().unwrap_or(0)
    };
    // Whether the newest update is complete shows only where all devices are here that it went to.
    let update = highest(|s| s.update);
    let all_have_it =
        live == epoch.live && candidates.iter().filter(|c| seated(c)).all(|c| c.superblock.update == update);
    // With some missing it shows the state of those that are here, since the next epoch is of these alone.
    // But an update that finishes this epoch concerns the missing ones too.
    let least =
        (0..candidates.len()).filter(|&at| taken[at]).map(|at| candidates[at].superblock.update).min();
    let shown = least.filter(|_| epoch_is_complete).unwrap_or(0).max(known_complete);
    let assembled = Assembled {
        seats,
        live,
        epoch_is_complete,
        sequence: highest(|s| s.sequence),
        update,
        update_complete: if all_have_it { update } else { shown },
        behind,
        rolled_back,
        sequences: candidates.iter().map(|c| (c.superblock.device, c.superblock.sequence)).collect(),
        epoch_number: candidates.iter().map(|c| c.superblock.epoch.number).max().unwrap_or(0),
        refused,
        replaced,
        superblock,
    };
    Ok((assembled, used))
}

/// How far a device under construction is built, by its own record. The records of others may come from a
/// newer state.
fn built_by_itself(superblock: &Superblock) -> Built {
    let Superblock { member, device, .. } = *superblock;
    let replacements = superblock.replacements.iter().filter(|record| record.uuid == device);
    let of_replacement = replacements.map(|record| record.rebuilt).next();
    let of_member = superblock.members.get(usize::from(member.0));
    let of_member =
        of_member.filter(|record| record.uuid == device && record.state == MemberState::Rebuilding);
    let slots = of_replacement.or(of_member.map(|record| record.rebuilt)).unwrap_or_default();
    Built { slots, is_clean: superblock.clean }
}

/// A2: whether these members of an epoch may serve it.
fn is_enough(members: MemberSet, epoch: &Epoch, geometry: Geometry, force: bool) -> bool {
    let (k, width) = (usize::from(geometry.data), usize::from(geometry.width()));
    let found = members.len();
    let enough = if is_off(Mutation::DynamicMajority) {
        2 * found > epoch.live.len()
    } else {
        found > width / 2 || found == epoch.live.len() || is_off(Mutation::NoQuorum)
    };
    found >= k && (force || enough)
}

fn check_agreement<K>(first: &Candidate<K>, candidates: &[Candidate<K>]) -> Result<(), AssemblyError> {
    let a = &first.superblock;
    let mut identities: HashMap<Uuid, MemberIndex> = HashMap::new();
    for candidate in candidates {
        let b = &candidate.superblock;
        let same = a.geometry == b.geometry
            && a.part == b.part
            && a.matrix == b.matrix
            && a.checksum == b.checksum
            && a.volume == b.volume
            && a.members.len() == b.members.len();
        let (first_lane, second_lane) = (a.part.lane, b.part.lane);
        if first_lane != second_lane && a.part.lanes == b.part.lanes {
            let (name, first, second) = (a.name.clone(), a.member, b.member);
            return Err(AssemblyError::OtherLane { name, first, first_lane, second, second_lane });
        }
        if !same {
            return Err(AssemblyError::Inconsistent {
                name: a.name.clone(),
                first: a.member,
                second: b.member,
            });
        }
        if identities.insert(b.device, b.member).is_some() {
            return Err(AssemblyError::Duplicate { name: a.name.clone(), member: b.member, uuid: b.device });
        }
    }
    Ok(())
}

/// Whether this device is one of those that the update in `of` went to, by the table in `of`.
fn lives_in(device: &Superblock, of: &Superblock) -> bool {
    let named = of.members.get(usize::from(device.member.0)).is_some_and(|m| m.uuid == device.device);
    named && of.epoch.live.contains(device.member)
}

/// A1-A3: the epoch to serve.
fn choose_epoch<K>(candidates: &[Candidate<K>], name: &str, force: bool) -> Result<Epoch, AssemblyError> {
    struct Choice {
        epoch: Epoch,
        usable: MemberSet,
        complete: bool,
    }
    let geometry = candidates[0].superblock.geometry;
    let (k, width) = (usize::from(geometry.data), usize::from(geometry.data) + usize::from(geometry.parity));
    let mut choices: Vec<Choice> = Vec::new();
    // Content acknowledged under an epoch must not be rolled back silently, forced or not: no epoch is served
    // that is older than the newest which may have been complete. An epoch that a device of its live set
    // never held was not complete. But a device that was rolled back proves nothing by that (T6): it lacks an
    // update that had reached all members when that epoch was made, and so was not here for any since.
    let may_be_complete = |s: &&Superblock| {
        let lacks_it = |other: &Superblock| lives_in(other, s) && other.epoch.number < s.epoch.number;
        let others = candidates.iter().map(|c| &c.superblock);
        !others.filter(|other| lacks_it(other)).any(|other| has_update(other, s.update_complete).is_ok())
    };
    let superblocks = candidates.iter().map(|c| &c.superblock);
    let oldest = superblocks.filter(may_be_complete).map(|s| s.epoch.number).max().unwrap_or(0);
    for epoch in candidates.iter().map(|c| c.superblock.epoch).filter(|epoch| epoch.number >= oldest) {
        if choices.iter().any(|c| c.epoch == epoch) {
            continue;
        }
        let record = candidates
            .iter()
            .map(|c| &c.superblock)
            .filter(|s| s.epoch == epoch)
            .max_by_key(|s| s.sequence)
            .ok_or(AssemblyError::Nothing)?;
        // Only the device that the epoch's own table names counts for a member: not one that was replaced.
        let members = |test: &dyn Fn(&Superblock) -> bool| -> MemberSet {
            candidates
                .iter()
                .map(|c| &c.superblock)
                .filter(|s| epoch.live.contains(s.member) && s.role != Role::Replaced && test(s))
                .filter(|s| record.members.get(usize::from(s.member.0)).is_some_and(|m| m.uuid == s.device))
                .map(|s| s.member)
                .collect()
        };
        let holders = members(&|s| s.epoch == epoch);
        choices.push(Choice {
            epoch,
            usable: members(&|s| holds(s, &epoch) && was_in_service(s)),
            complete: holders.len() == epoch.live.len(),
        });
    }
    let admissible = |choice: &Choice| is_enough(choice.usable, &choice.epoch, geometry, force);
    let best = choices
        .iter()
        .filter(|c| admissible(c))
        .max_by_key(|c| (c.epoch.number, c.complete, c.usable.len()))
        .map(|c| (c.epoch, c.complete));
    let Some((epoch, complete)) = best else {
        // Name what the newest epoch lacks: that is the one a person would want back.
        let newest = choices.iter().max_by_key(|c| (c.epoch.number, c.usable.len()));
        let (epoch, usable) = newest.map(|c| (c.epoch, c.usable)).ok_or(AssemblyError::Nothing)?;
        let of_epoch = candidates.iter().map(|c| &c.superblock).filter(|s| s.epoch == epoch);
        let record = of_epoch.max_by_key(|s| s.update_complete);
        let record = record.ok_or(AssemblyError::Nothing)?;
        let mut missing_of_live = MemberSet::default();
        for at in 0..width as u16 {
            if usable.contains(MemberIndex(at)) || !epoch.live.contains(MemberIndex(at)) {
                missing_of_live.insert(MemberIndex(at));
            }
        }
        // The members that are here and were rolled back are more helpful to name than a list of missing
        // ones.
        let named = candidates.iter().map(|c| &c.superblock).filter(|s| lives_in(s, record));
        let words = |s: &Superblock| {
            let why = has_update(s, record.update_complete).err()?;
            Some((s.member, format!("member {}: {why}", s.member)))
        };
        let (old, words): (Vec<MemberIndex>, Vec<String>) = named.filter_map(words).unzip();
        if !old.is_empty() {
            return Err(AssemblyError::RolledBack {
                name: name.into(),
                members: Box::new(old.into_iter().collect()),
                which: words.join("; "),
                found: usable.len(),
            });
        }
        let missing = describe_missing(record, &missing_of_live);
        let (data, parity) = (geometry.data, geometry.parity);
        return Err(if usable.len() < k {
            AssemblyError::TooFew { name: name.into(), data, parity, found: usable.len(), needed: k, missing }
        } else {
            AssemblyError::NoMajority { name: name.into(), found: usable.len(), width, missing }
        });
    };
    let rival = choices.iter().find(|c| {
        c.epoch != epoch && c.epoch.number == epoch.number && c.complete && complete && admissible(c)
    });
    if let Some(rival) = rival.map(|c| c.epoch).or_else(|| history_apart(candidates, &epoch)) {
        let words = |epoch: &Epoch| format!("members {} (epoch {})", epoch.live, epoch.number);
        return Err(AssemblyError::Diverged { name: name.into(), one: words(&epoch), other: words(&rival) });
    }
    Ok(epoch)
}

/// A3: an epoch whose members are all here and served apart from those of `chosen`, however many epochs
/// either has made since.
fn history_apart<K>(candidates: &[Candidate<K>], chosen: &Epoch) -> Option<Epoch> {
    let superblocks = || candidates.iter().map(|c| &c.superblock);
    let line = superblocks().filter(|s| s.epoch == *chosen).max_by_key(|s| (s.update, s.sequence))?;
    let mut epochs = superblocks().map(|s| s.epoch);
    epochs.find(|epoch| {
        let apart = superblocks().filter(|s| s.epoch == *epoch && is_apart(s, line));
        !epoch.live.is_empty() && apart.count() == epoch.live.len()
    })
}

/// "member 2 (uuid ...), member 5 (uuid ...)": the members outside `present`.
fn describe_missing(record: &Superblock, present: &MemberSet) -> String {
    let list: Vec<String> = record
        .members
        .iter()
        .enumerate()
        .filter(|(at, _)| !present.contains(MemberIndex(*at as u16)))
        .map(|(at, member)| format!("member {at} (device {})", member.uuid))
        .collect();
    list.join(", ")
}

/// `is_replaced`: another device is being built for its member.
fn refusal(superblock: &Superblock, record: &Superblock, why: Option<Behind>, is_replaced: bool) -> NotUsed {
    let index = superblock.member;
    let current = record.members.get(usize::from(index.0)).map(|m| m.uuid);
    if superblock.role == Role::Replacement {
        return NotUsed::merely(format!(
            "a replacement of member {index} that was given up; 'calpe replace --force' can use it again"
        ));
    }
    if current != Some(superblock.device) {
        let why = format!("it was member {index} before that was replaced; it holds nothing current");
        return NotUsed::merely(why);
    }
    let (held, current) = (superblock.epoch.number, record.epoch.number);
    if let Some(why) = why_kept(superblock, record) {
        return NotUsed::kept(why);
    }
    let stale = Behind::Epoch { held, current };
    // A member that the array went on without lacks things for that reason: this is no sign that it was
    // rolled back.
    let is_out = !record.epoch.live.contains(index);
    let what = if is_out { stale } else { why.unwrap_or(stale) };
    NotUsed::merely(match (is_replaced, is_out) {
        (true, _) => format!(
            "{what}; the device that is being built takes its place; 'calpe replace --cancel' gives that up, so that 'calpe online' can \
             bring it back"
        ),
        (false, true) => format!("{what}; 'calpe online' brings it back"),
        (false, false) => format!("{what}; it must be rebuilt ('calpe online')"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::refusal::NOWHERE_ELSE;
    use crate::format::{COUNT_END, COUNTED_IN_A_LIFE, LanePart, Lanes, Left, LogStart, ReplacementRecord};
    use crate::units::LaneIndex;
    use proptest::prelude::*;

    /// The first superblocks of a k+m array.
    fn fresh(data: u16, parity: u16) -> Vec<Superblock> {
        let devices: Vec<Uuid> =
            (0..data + parity).map(|at| Uuid::from_u128(1000 + u128::from(at))).collect();
        crate::testing::small_array(data, parity).superblocks(&devices)
    }

    /// Moves `members` to a new epoch whose live set they are.
    fn bump(superblocks: &mut [Superblock], members: &[usize], id: u64) {
        let live: MemberSet = members.iter().map(|&at| MemberIndex(at as u16)).collect();
        bump_partly(superblocks, members, live, id);
    }

    /// Writes an epoch with live set `live` on `written` only, as a bump cut short does.
    fn bump_partly(superblocks: &mut [Superblock], written: &[usize], live: MemberSet, id: u64) {
        let before = superblocks[written[0]].epoch;
        for &at in written {
            let superblock = &mut superblocks[at];
            superblock.epoch = Epoch { number: before.number + 1, id, parent: before.id, live };
            superblock.sequence += 1;
            for (index, member) in superblock.members.iter_mut().enumerate() {
                if !live.contains(MemberIndex(index as u16)) {
                    member.state = MemberState::Faulted;
                }
            }
        }
    }

    fn candidates(superblocks: &[Superblock], present: &[usize]) -> Vec<Candidate<usize>> {
        present.iter().map(|&at| Candidate { key: at, superblock: superblocks[at].clone() }).collect()
    }

    fn live(assembled: &Assembled<usize>) -> Vec<usize> {
        assembled.live.iter().map(|member| usize::from(member.0)).collect()
    }

    #[test]
    fn a_lane_is_assembled_from_its_own_superblocks_alone() {
        let part = |lane| LanePart {
            lane: LaneIndex(lane),
            lanes: Lanes { count: 8, group: 4 },
            stride: 64 << 20,
            volume_bytes: 128 << 20,
        };
        let mut superblocks = fresh(2, 1);
        for superblock in &mut superblocks {
            superblock.part = part(3);
        }
        let own = assemble(&candidates(&superblocks, &[0, 1, 2]), false).expect("all of one lane");
        assert_eq!(own.superblock.part, part(3));
        superblocks[1].part = part(4);
        for force in [false, true] {
            let error = assemble(&candidates(&superblocks, &[0, 1, 2]), force).expect_err("refused");
            let said = error.to_string();
            assert!(
                said.contains("members 0 and 1") && said.contains("lanes 3 and 4 in one place"),
                "{said}"
            );
        }
        superblocks[1].part = LanePart { stride: 65 << 20, ..part(3) };
        let error = assemble(&candidates(&superblocks, &[0, 1, 2]), true).expect_err("refused");
        assert!(matches!(error, AssemblyError::Inconsistent { .. }), "{error}");
    }

    #[test]
    fn in_a_clean_array_one_member_does_not_say_alone_that_the_log_starts_far_beyond_that_of_the_others() {
        let mut superblocks = logged(2, 1, LogStart { epoch: 1, sequence: 5 });
        for superblock in &mut superblocks {
            (superblock.clean, superblock.update) = (true, 10);
        }
        superblocks[1].update = 11;
        for (ahead, is_claim) in
            [(0, false), (CLAIM_STEP_MAX, false), (CLAIM_STEP_MAX + 1, true), (1 << 60, true)]
        {
            superblocks[1].log_start.sequence = 5 + ahead;
            let assembled = assemble(&candidates(&superblocks, &[0, 1, 2]), false);
            let refused = matches!(assembled, Err(AssemblyError::Unconfirmed { member: MemberIndex(1), .. }));
            assert_eq!(refused, is_claim, "{ahead}: {assembled:?}");
            let forced = assemble(&candidates(&superblocks, &[0, 1, 2]), true).expect("without it");
            assert_eq!(forced.live.contains(MemberIndex(1)), !is_claim, "{ahead}");
        }
    }

    #[test]
    fn updates_of_one_number_in_two_epochs_may_differ_in_the_start_of_the_log() {
        // An update that lets a device join reached that device alone; a start without it made one of the
        // same number.
        let mut superblocks = logged(2, 1, LogStart { epoch: 1, sequence: 1 });
        for superblock in &mut superblocks {
            (superblock.clean, superblock.update, superblock.update_complete) = (false, 9, 8);
        }
        let parent = superblocks[0].epoch;
        superblocks[0].epoch =
            Epoch { number: parent.number + 1, id: 77, parent: parent.id, live: parent.live };
        superblocks[0].log_start = LogStart { epoch: parent.number + 1, sequence: 6 };
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2]), false).expect("two updates");
        assert_eq!(assembled.live.len(), 3);
        superblocks[0].epoch = parent;
        superblocks[0].log_start.epoch = parent.number;
        let refused = assemble(&candidates(&superblocks, &[0, 1, 2]), false);
        assert!(
            matches!(refused, Err(AssemblyError::Unconfirmed { member: MemberIndex(0), .. })),
            "{refused:?}"
        );
    }

    #[test]
    fn a_member_that_the_array_went_on_without_is_stale_and_not_rolled_back() {
        let mut superblocks = fresh(2, 1);
        for superblock in &mut superblocks {
            (superblock.update, superblock.update_complete) = (5, 4);
        }
        bump(&mut superblocks, &[0, 2], 7);
        for at in [0, 2] {
            (superblocks[at].update, superblocks[at].update_complete) = (7, 6);
        }
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2]), false).expect("two of three");
        let (key, NotUsed { why, .. }) = &assembled.refused[0];
        assert!(
            *key == 1 && why.contains("stale: it holds epoch") && why.contains("brings it back"),
            "{why}"
        );
    }

    #[test]
    fn all_members_of_a_clean_array_serve() {
        let superblocks = fresh(4, 2);
        let assembled = assemble(&candidates(&superblocks, &[5, 1, 3, 0, 4, 2]), false).unwrap();
        assert_eq!(live(&assembled), [0, 1, 2, 3, 4, 5]);
        assert!(assembled.refused.is_empty());
        assert!(assembled.seats.iter().enumerate().all(|(at, seat)| seat.key == Some(at)));
    }

    /// The superblocks of an array whose log starts here, as all of them record.
    fn logged(data: u16, parity: u16, start: LogStart) -> Vec<Superblock> {
        let mut superblocks = fresh(data, parity);
        for superblock in &mut superblocks {
            superblock.log_start = start;
        }
        superblocks
    }

    /// Has member 0 replaced: all record that, and the superblock of the device under construction comes
    /// last.
    fn add_replacement(superblocks: &mut Vec<Superblock>, rebuilt: u64) {
        let uuid = Uuid::from_u128(5000);
        let record = ReplacementRecord { uuid, rebuilt: SlotIndex(rebuilt), member: MemberIndex(0) };
        superblocks.iter_mut().for_each(|superblock| superblock.replacements = vec![record]);
        superblocks.push(Superblock { device: uuid, role: Role::Replacement, ..superblocks[0].clone() });
    }

    #[test]
    fn a_member_that_is_out_while_its_replacement_is_built_is_not_said_to_come_back_by_online_alone() {
        let mut superblocks = fresh(2, 1);
        add_replacement(&mut superblocks, 0);
        let live = MemberSet::from_iter([1, 2].map(MemberIndex));
        bump_partly(&mut superblocks, &[1, 2, 3], live, 7);
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).expect("two of three");
        assert!(assembled.seats[0].replacement.is_some(), "{:?}", assembled.seats[0]);
        let (key, NotUsed { why, .. }) = &assembled.refused[0];
        assert!(*key == 0 && why.contains("'calpe replace --cancel' gives that up"), "{why}");
    }

    #[test]
    fn the_log_starts_where_more_than_one_member_in_service_says() {
        let start = |epoch, sequence| LogStart { epoch, sequence };
        let mut superblocks = logged(2, 1, start(1, 5));
        superblocks.iter_mut().for_each(|superblock| superblock.clean = false);
        add_replacement(&mut superblocks, 0);
        // The mark of a replay that was over has reached the device under construction alone.
        superblocks.iter_mut().for_each(|superblock| superblock.epoch.number = 2);
        superblocks[3].sequence += 2;
        superblocks[3].update += 1;
        superblocks[3].log_start = start(2, 50);
        let begins = |superblocks: &[Superblock], present: &[usize]| {
            assemble(&candidates(superblocks, present), false).unwrap().superblock.log_start
        };
        assert_eq!(begins(&superblocks, &[0, 1, 2, 3]), start(1, 5));
        // The mark has reached a member as well, as its own superblock shows.
        let mut told = |at: usize, sequence| {
            superblocks[at].log_start = start(2, sequence);
            superblocks[at].sequence += 2;
            superblocks[at].update += 1 + at as u64;
            superblocks.clone()
        };
        let one = told(1, 9);
        assert_eq!(begins(&one, &[0, 1, 2, 3]), start(1, 5));
        assert_eq!(begins(&one, &[0, 2, 3]), start(1, 5), "that member is missing");
        let two = told(2, 7);
        assert_eq!(begins(&two, &[0, 1, 2, 3]), start(2, 7), "two are past that");
        assert_eq!(begins(&two, &[2, 1]), start(2, 7), "two are past that");
        // The record of a stale member proves nothing, nor does that of a device that was replaced.
        let mut stale = one;
        bump(&mut stale, &[0, 2], 200);
        stale[2].log_start = start(2, 90);
        stale[2].update += 1;
        assert_eq!(begins(&stale, &[0, 1, 2]), start(1, 5));
        // With more to spare, more must record it; a clean array needs no log.
        let mut many = logged(4, 2, start(1, 5));
        for (at, superblock) in (0..).zip(&mut many) {
            superblock.log_start = start(1, 5 + at);
            superblock.update = 10 + at;
            superblock.clean = false;
        }
        assert_eq!(begins(&many, &[0, 1, 2, 3, 4, 5]), start(1, 8));
        assert_eq!(begins(&many, &[0, 1, 2, 4, 5]), start(1, 9));
        assert_eq!(begins(&many, &[0, 2, 4, 5]), start(1, 9));
        many.iter_mut().for_each(|superblock| superblock.clean = true);
        assert_eq!(begins(&many, &[0, 1, 2, 3, 4, 5]), start(1, 10));
    }

    #[test]
    fn a_log_that_was_empty_when_a_device_joined_is_read_from_there_on() {
        let start = |epoch, sequence| LogStart { epoch, sequence };
        let mut superblocks = logged(2, 2, start(1, 5));
        superblocks.iter_mut().for_each(|superblock| superblock.clean = false);
        bump(&mut superblocks, &[0, 1, 2], 200);
        // Member 3 is built. The update that lets it join reaches one device only: it, another, or one under
        // construction.
        let live = MemberSet::first(4);
        for only in [3, 0, 4] {
            let mut cut = superblocks.clone();
            cut[3] = Superblock { device: cut[3].device, member: MemberIndex(3), ..cut[0].clone() };
            add_replacement(&mut cut, 0);
            bump_partly(&mut cut, &[only], live, 300);
            cut[only].log_start = start(3, 106);
            cut[only].update += 1;
            let assembled = assemble(&candidates(&cut, &[0, 1, 2, 3, 4]), false)
                .unwrap_or_else(|e| panic!("{only}: {e}"));
            assert_eq!((assembled.live, assembled.superblock.log_start), (live, start(3, 106)), "{only}");
        }
        // An epoch that only leaves a member out proves nothing about the log.
        bump_partly(&mut superblocks, &[0], MemberSet::first(2), 400);
        superblocks[0].log_start = start(3, 106);
        superblocks[0].update += 1;
        let assembled = assemble(&candidates(&superblocks, &[0, 1]), true).unwrap();
        assert_eq!(assembled.superblock.log_start, start(1, 5));
    }

    #[test]
    fn a_log_start_that_others_with_the_same_update_do_not_confirm_is_refused_by_name() {
        let start = |sequence| LogStart { epoch: 1, sequence };
        // One against two, later or earlier; and the later of two.
        for (claim, present, named) in [(90, vec![0, 1, 2], 1), (2, vec![0, 1, 2], 1), (90, vec![0, 1], 1)] {
            let mut superblocks = logged(2, 1, start(5));
            superblocks.iter_mut().for_each(|superblock| superblock.update = 7);
            superblocks[1].log_start = start(claim);
            let error = assemble(&candidates(&superblocks, &present), false).unwrap_err();
            let AssemblyError::Unconfirmed { member, .. } = error else { panic!("{error}") };
            assert_eq!(member, MemberIndex(named), "{claim}");
            if present.len() == 3 {
                let assembled = assemble(&candidates(&superblocks, &present), true).expect("forced");
                assert_eq!(assembled.superblock.log_start, start(5));
            }
        }
    }

    #[test]
    fn two_updates_that_finish_one_epoch_may_differ_in_the_start_of_the_log() {
        let (early, late) = (LogStart { epoch: 1, sequence: 1 }, LogStart { epoch: 1, sequence: 9 });
        let mut superblocks = logged(2, 1, early);
        for superblock in &mut superblocks {
            (superblock.clean, superblock.update, superblock.update_complete) = (false, 9, 8);
        }
        let write = |superblock: &mut Superblock, by: &Assembled<usize>| {
            let Superblock { epoch, ref members, log_start, .. } = by.superblock;
            (superblock.epoch, superblock.members) = (epoch, members.clone());
            superblock.log_start = log_start;
            (superblock.update, superblock.update_complete) = (by.update + 1, by.update_complete);
            superblock.sequence = by.sequence + 2;
        };
        // Each of these is cut off: the update with a new start of the log does not reach member 2; the next
        // epoch reaches member 0 alone; and that is finished by a start without member 2, on member 1, and by
        // one without member 1.
        for at in [0, 1] {
            let superblock = &mut superblocks[at];
            (superblock.log_start, superblock.update, superblock.update_complete) = (late, 10, 9);
            superblock.sequence += 2;
        }
        let all = assemble(&candidates(&superblocks, &[0, 1, 2]), false).expect("all");
        bump_partly(&mut superblocks, &[0], MemberSet::first(3), 77);
        let epoch = superblocks[0].epoch;
        write(&mut superblocks[0], &all);
        superblocks[0].epoch = epoch;
        let without_2 = assemble(&candidates(&superblocks, &[0, 1]), false).expect("without member 2");
        let without_1 = assemble(&candidates(&superblocks, &[0, 2]), false).expect("without member 1");
        assert!(!without_2.epoch_is_complete && !without_1.epoch_is_complete);
        write(&mut superblocks[1], &without_2);
        write(&mut superblocks[2], &without_1);
        let starts: Vec<_> = superblocks.iter().map(|s| (s.epoch.id, s.update, s.log_start)).collect();
        assert_eq!((starts[1].0, starts[1].1), (starts[2].0, starts[2].1));
        assert_ne!(starts[1].2, starts[2].2);

        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2]), false).expect("all of them again");
        assert_eq!((live(&assembled), assembled.superblock.log_start), (vec![0, 1, 2], late));
        // With the two alone the start cannot be known; forced, the log is read from the earlier one.
        let error = assemble(&candidates(&superblocks, &[1, 2]), false).unwrap_err();
        assert!(matches!(error, AssemblyError::Unconfirmed { .. }), "{error}");
        let forced = assemble(&candidates(&superblocks, &[1, 2]), true).expect("forced");
        assert_eq!((live(&forced), forced.superblock.log_start), (vec![1, 2], early));
    }

    /// An update that was cut off reached the device under construction alone; a start without it finished
    /// the epoch with another one of the same number.
    #[test]
    fn an_update_that_a_device_under_construction_was_not_given_does_not_contradict_it() {
        let (early, late) = (LogStart { epoch: 1, sequence: 1 }, LogStart { epoch: 1, sequence: 9 });
        for is_replacement in [false, true] {
            // The device under construction is that of member 1, or is to replace member 0.
            let mut superblocks = logged(2, 1, early);
            let built = if is_replacement {
                add_replacement(&mut superblocks, 0);
                3
            } else {
                bump(&mut superblocks, &[0, 2], 7);
                (superblocks[1].epoch, superblocks[1].sequence) =
                    (superblocks[0].epoch, superblocks[0].sequence);
                superblocks.iter_mut().for_each(|s| s.members[1].state = MemberState::Rebuilding);
                1
            };
            for superblock in &mut superblocks {
                (superblock.clean, superblock.update, superblock.update_complete) = (false, 5, 4);
            }
            superblocks[built].log_start = late;
            let all: Vec<usize> = (0..superblocks.len()).collect();
            let start = |superblocks: &[Superblock], present: &[usize]| {
                assemble(&candidates(superblocks, present), false)
                    .map(|assembled| (live(&assembled), assembled.superblock.log_start))
            };
            // With the same table it is one update, of which the device claims something else.
            let refused = start(&superblocks, &all).expect_err("refused");
            assert!(matches!(refused, AssemblyError::Unconfirmed { .. }), "{refused}");
            let serving: Vec<usize> = all.iter().copied().filter(|&at| at != built).collect();
            let mut two = superblocks.clone();
            for &at in &serving {
                match is_replacement {
                    true => two[at].replacements.clear(),
                    false => two[at].members[1].state = MemberState::Missing,
                }
            }
            // The order decides whose table is taken, where updates and sequences are the same.
            let last: Vec<usize> = serving.iter().copied().chain([built]).collect();
            for order in [all.clone(), all.iter().rev().copied().collect(), last] {
                assert_eq!(start(&two, &order), Ok((serving.clone(), early)), "{order:?}");
            }
            // Members in service are compared with one another, whatever that device says.
            two[2].log_start = late;
            assert!(start(&two, &all).is_err());
        }
        // A member that serves alone is still compared with the device that has its update.
        let mut alone = logged(1, 1, early);
        bump(&mut alone, &[0], 7);
        alone[1].epoch = alone[0].epoch;
        for superblock in &mut alone {
            (superblock.clean, superblock.update) = (false, 5);
            superblock.members[1].state = MemberState::Rebuilding;
        }
        alone[0].log_start = late;
        assert!(assemble(&candidates(&alone, &[0, 1]), false).is_err());
    }

    #[test]
    fn a_device_under_construction_that_missed_much_makes_no_claim_of_the_member_that_served_alone() {
        let mut superblocks = logged(1, 1, LogStart { epoch: 1, sequence: 5 });
        bump(&mut superblocks, &[0], 7);
        superblocks[1].epoch = superblocks[0].epoch;
        superblocks[1].members = superblocks[0].members.clone();
        for superblock in &mut superblocks {
            superblock.members[1].state = MemberState::Rebuilding;
            (superblock.clean, superblock.update, superblock.update_complete) = (false, 10, 9);
        }
        // The update that calls the array clean reaches the member in service alone.
        let alone = &mut superblocks[0];
        (alone.clean, alone.update, alone.update_complete) = (true, 11, 10);
        alone.log_start = LogStart { epoch: 2, sequence: 6 + CLAIM_STEP_MAX };
        let start = alone.log_start;
        for present in [vec![0, 1], vec![0]] {
            let assembled = assemble(&candidates(&superblocks, &present), false).expect("it starts");
            assert_eq!((live(&assembled), assembled.superblock.log_start), (vec![0], start));
        }
    }

    #[test]
    fn progress_comes_from_the_newest_superblock_of_the_epoch_and_all_members_must_call_it_clean() {
        let mut superblocks = logged(2, 1, LogStart { epoch: 1, sequence: 5 });
        superblocks.iter_mut().for_each(|superblock| superblock.clean = false);
        add_replacement(&mut superblocks, 0);
        // Everything was flushed before this update, which only the device under construction has.
        let newest = &mut superblocks[3];
        newest.sequence += 3;
        newest.clean = true;
        newest.replacements[0].rebuilt = SlotIndex(7);
        let sequence = newest.sequence;
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).unwrap();
        assert!(!assembled.superblock.clean);
        assert_eq!(
            assembled.seats[0].replacement,
            Some((3, superblocks[3].device, Built { slots: SlotIndex(7), is_clean: superblocks[3].clean })),
            "progress counts that was recorded"
        );
        assert_eq!(assembled.seats[0].key, Some(0), "the old device serves");
        assert_eq!((assembled.sequence, live(&assembled)), (sequence, vec![0, 1, 2]));
        for at in 0..3 {
            assert!(!assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).unwrap().superblock.clean);
            superblocks[at].clean = true;
        }
        assert!(assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).unwrap().superblock.clean);
        // A superblock of another epoch proves nothing, however new it is.
        bump(&mut superblocks, &[0, 1, 2], 200);
        superblocks[3].sequence += 100;
        superblocks[3].epoch.id = 300;
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).unwrap();
        assert!(assembled.seats[0].replacement.is_none());
        assert_eq!(assembled.sequence, superblocks[0].sequence);
        assert_eq!(assembled.sequences[&superblocks[1].device], superblocks[1].sequence);
    }

    #[test]
    fn fewer_than_k_members_are_refused_and_the_missing_named() {
        let superblocks = fresh(4, 2);
        let error = assemble(&candidates(&superblocks, &[0, 1, 2]), true).unwrap_err();
        assert!(matches!(error, AssemblyError::TooFew { found: 3, needed: 4, .. }));
        let text = error.to_string();
        for member in ["member 3 ", "member 4 ", "member 5 "] {
            assert!(text.contains(member), "{text}");
        }
        assert!(!text.contains("member 0 "), "{text}");
    }

    #[test]
    fn a_member_that_missed_an_epoch_is_never_current() {
        let mut superblocks = fresh(3, 2);
        bump(&mut superblocks, &[0, 1, 2, 4], 200);
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3, 4]), false).unwrap();
        assert_eq!(live(&assembled), [0, 1, 2, 4]);
        assert_eq!(assembled.refused.len(), 1);
        assert!(assembled.refused[0].1.why.contains("stale"), "{:?}", assembled.refused);
    }

    #[test]
    fn an_epoch_that_was_being_written_counts_with_its_parents() {
        // The daemon died while it recorded the loss of member 3: only 0 and 1 have the new epoch.
        let mut superblocks = fresh(3, 2);
        let survivors: MemberSet = [0, 1, 2, 4].into_iter().map(MemberIndex).collect();
        bump_partly(&mut superblocks, &[0, 1], survivors, 200);
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3, 4]), false).unwrap();
        assert_eq!(
            live(&assembled),
            [0, 1, 2, 4],
            "2 and 4 hold the parent and are in the live set; 3 is not"
        );
        assert_eq!(assembled.superblock.epoch.id, 200);
    }

    #[test]
    fn an_unfinished_epoch_on_a_device_that_was_away_does_not_stand_in_the_way() {
        // The daemon died while it recorded the loss of member 0: only 1 has that record. 2, 3 and 4 then
        // served without 1.
        let mut superblocks = fresh(3, 2);
        let survivors: MemberSet = [1, 2, 3, 4].into_iter().map(MemberIndex).collect();
        bump_partly(&mut superblocks, &[1], survivors, 300);
        superblocks[1].epoch.number += 1;
        bump(&mut superblocks, &[2, 3, 4], 200);
        assert!(superblocks[1].epoch.number > superblocks[2].epoch.number);
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3, 4]), false).unwrap();
        assert_eq!((assembled.superblock.epoch.id, live(&assembled)), (200, vec![2, 3, 4]));
        assert!(assembled.epoch_number >= superblocks[1].epoch.number, "the next number is beyond all seen");
        // Where no device proves that it was not complete, nothing older is served.
        let mut superblocks = fresh(2, 3);
        bump(&mut superblocks, &[3, 4], 400);
        let error = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).unwrap_err();
        assert!(matches!(error, AssemblyError::Unconfirmed { member: MemberIndex(3), .. }), "{error}");
        assert!(error.to_string().contains("missing: member 4"), "{error}");
        // Forced, it starts without the member that records it; where two record it, it does not start.
        let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), true).unwrap();
        assert_eq!((assembled.superblock.epoch.id, live(&assembled)), (100, vec![0, 1, 2]));
        let mut superblocks = fresh(3, 2);
        bump(&mut superblocks, &[2, 3, 4], 400);
        assert!(assemble(&candidates(&superblocks, &[0, 1, 2, 3]), true).is_err());
    }

    /// Members 1 and 2 show the state of some starts ago; member 0 alone knows of later ones.
    #[test]
    fn members_that_were_rolled_back_do_not_show_that_an_epoch_was_not_complete() {
        let update = |superblocks: &mut [Superblock], members: &[usize], id| {
            bump(superblocks, members, id);
            for &at in members {
                let before = superblocks[at].update;
                (superblocks[at].update, superblocks[at].update_complete) = (before + 1, before);
            }
        };
        let mut superblocks = fresh(2, 1);
        update(&mut superblocks, &[0, 1, 2], 200);
        let old = superblocks.clone();
        for id in [300, 400] {
            update(&mut superblocks, &[0, 1, 2], id);
        }
        let refused = |superblocks: &[Superblock], present: &[usize]| {
            let error = assemble(&candidates(superblocks, present), false).unwrap_err();
            assert!(matches!(error, AssemblyError::Unconfirmed { member: MemberIndex(0), .. }), "{error}");
            error.to_string()
        };
        superblocks[1..].clone_from_slice(&old[1..]);
        let text = refused(&superblocks, &[0, 1, 2]);
        assert!(text.contains("member 1: it was rolled back") && text.contains("member 2: it was"), "{text}");
        assert!(text.contains("members 1, 2 are older copies of themselves. Member 0 ("), "{text}");
        assert!(text.contains("Put the current device or file of members 1, 2 back"), "{text}");
        let forced = assemble(&candidates(&superblocks, &[0, 1, 2]), true).unwrap();
        let (_, NotUsed { why, is_kept }) = &forced.refused[0];
        assert!(why.starts_with("left out by force, although it is newer: members 1, 2 are older"), "{why}");
        assert!(*is_kept && why.contains(NOWHERE_ELSE) && !why.contains("calpe online"), "{why}");
        assert_eq!((forced.superblock.epoch.id, live(&forced)), (200, vec![1, 2]));
        // A bump that reached one member alone, with the others as they were before it: it was not complete.
        let mut superblocks = old.clone();
        let all = MemberSet::first(3);
        bump_partly(&mut superblocks, &[0], all, 500);
        (superblocks[0].update, superblocks[0].update_complete) = (old[0].update + 1, old[0].update);
        assert_eq!(live(&assemble(&candidates(&superblocks, &[0, 1, 2]), false).unwrap()), [0, 1, 2]);
        // Nor was it complete where the others went on without it, to an epoch that it does not know.
        bump(&mut superblocks, &[1, 2], 600);
        superblocks[0].epoch.number += 1;
        assert_eq!(live(&assemble(&candidates(&superblocks, &[0, 1, 2]), false).unwrap()), [1, 2]);
    }

    /// The start that made the newest epoch found one member missing, and was cut off.
    #[test]
    fn an_epoch_records_the_state_of_the_members_that_were_here_when_it_was_made() {
        let update = |superblocks: &mut [Superblock], written: &[usize], id, (update, complete)| {
            bump_partly(superblocks, written, MemberSet::first(5), id);
            for &at in written {
                (superblocks[at].update, superblocks[at].update_complete) = (update, complete);
            }
        };
        let mut superblocks = fresh(4, 2);
        update(&mut superblocks, &[0, 1, 2, 3, 4, 5], 200, (5, 4));
        let old = superblocks.clone();
        update(&mut superblocks, &[0, 1, 2, 3, 4], 300, (6, 5));
        let of = |present: &[usize], superblocks: &[Superblock]| {
            assemble(&candidates(superblocks, present), false).map(|assembled| assembled.update_complete)
        };
        assert_eq!(of(&[0, 1, 2, 3, 4], &superblocks), Ok(6));
        assert_eq!(of(&[0, 1, 3, 4], &superblocks), Ok(6), "the next epoch is of these");
        // An update that finishes this epoch does not concern these members alone: member 3 may be as it was
        // before.
        let mut partly = superblocks.clone();
        partly[1] = old[1].clone();
        assert_eq!(of(&[0, 1, 2, 4], &partly), Ok(5));
        // The next epoch reached member 0 alone, and all others show the state before the last one.
        update(&mut superblocks, &[0], 400, (7, 6));
        superblocks[1..].clone_from_slice(&old[1..]);
        let error = of(&[0, 1, 2, 3, 4, 5], &superblocks).unwrap_err();
        assert!(matches!(error, AssemblyError::Unconfirmed { member: MemberIndex(0), .. }), "{error}");
    }

    /// Members 1 to 3 show the epoch before, member 4 one before that; member 0 records that this epoch had
    /// that one too.
    #[test]
    fn a_later_epoch_that_was_not_complete_shows_which_members_of_this_one_were_rolled_back() {
        let mut superblocks = fresh(3, 2);
        let all: Vec<usize> = (0..5).collect();
        let mut before = Vec::new();
        for (id, update) in [(200, 5), (300, 6), (400, 7)] {
            before.push(superblocks.clone());
            let written = if id == 400 { &all[..1] } else { &all[..] };
            let live = if id == 400 {
                [0, 1, 2, 4].into_iter().map(MemberIndex).collect()
            } else {
                MemberSet::first(5)
            };
            bump_partly(&mut superblocks, written, live, id);
            for &at in written {
                (superblocks[at].update, superblocks[at].update_complete) = (update, update - 1);
            }
        }
        let line = |superblocks: &[Superblock]| {
            let assembled = assemble(&candidates(superblocks, &[0, 2, 3, 4]), false)?;
            Ok((assembled.superblock.epoch.id, live(&assembled)))
        };
        assert_eq!(line(&superblocks), Ok((400, vec![0, 2, 4])));
        superblocks[4] = before[1].clone()[4].clone();
        assert_eq!(superblocks[4].epoch.id, 200);
        let error: Result<_, AssemblyError> = line(&superblocks);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("member 4: it was rolled back"), "{error}");
    }

    #[test]
    fn two_halves_of_a_mirror_do_not_both_serve() {
        let superblocks = fresh(1, 3);
        let error = assemble(&candidates(&superblocks, &[0, 1]), false).unwrap_err();
        assert!(matches!(error, AssemblyError::NoMajority { found: 2, width: 4, .. }), "{error}");
        assert!(assemble(&candidates(&superblocks, &[0, 1]), true).is_ok(), "unless forced");
        // The exact set that was last in service may always serve.
        let mut superblocks = superblocks;
        bump(&mut superblocks, &[0, 1], 200);
        assert_eq!(live(&assemble(&candidates(&superblocks, &[0, 1]), false).unwrap()), [0, 1]);
    }

    #[test]
    fn two_forced_histories_are_refused_as_diverged() {
        let mut superblocks = fresh(1, 3);
        let before = superblocks.clone();
        bump(&mut superblocks, &[0, 1], 200);
        let mut other = before;
        bump(&mut other, &[2, 3], 300);
        superblocks[2] = other[2].clone();
        superblocks[3] = other[3].clone();
        let error = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false).unwrap_err();
        assert!(matches!(error, AssemblyError::Diverged { .. }), "{error}");
    }

    /// However often either was started since, two histories stay two: neither becomes the rest of the other.
    #[test]
    fn histories_that_were_started_a_different_number_of_times_are_refused_as_diverged() {
        for (starts, force) in [(2, false), (2, true), (5, false)] {
            let mut superblocks = fresh(2, 2);
            let mut other = superblocks.clone();
            (0..starts).for_each(|start| bump(&mut superblocks, &[0, 1], 200 + start));
            bump(&mut other, &[2, 3], 300);
            superblocks.splice(2.., other.split_off(2));
            let error = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), force).unwrap_err();
            assert!(matches!(error, AssemblyError::Diverged { .. }), "{starts} starts: {error}");
            let words = error.to_string();
            assert!(words.contains("members 2, 3 (epoch 2)"), "{words}");
            // With a part of the other history here, the one is served, and no advice would destroy the
            // other.
            let assembled = assemble(&candidates(&superblocks, &[0, 1, 2]), force).unwrap();
            assert_eq!(live(&assembled), [0, 1]);
            let (_, NotUsed { why, .. }) = &assembled.refused[0];
            assert!(why.contains("another history") && !why.contains("calpe online"), "{why}");
        }
    }

    /// A majority that went on without force, and the rest, which was forced.
    #[test]
    fn the_history_of_a_majority_and_one_that_was_forced_are_two() {
        for forced_starts in [1, 2, 3] {
            let mut superblocks = fresh(2, 3);
            let mut other = superblocks.clone();
            (0..2).for_each(|start| bump(&mut superblocks, &[0, 1, 2], 200 + start));
            (0..forced_starts).for_each(|start| bump(&mut other, &[3, 4], 300 + start));
            superblocks.splice(3.., other.split_off(3));
            let error = assemble(&candidates(&superblocks, &[0, 1, 2, 3, 4]), false).unwrap_err();
            assert!(matches!(error, AssemblyError::Diverged { .. }), "{forced_starts}: {error}");
        }
    }

    /// All that were in service when a member left have left since, and those that serve came later.
    #[test]
    fn members_that_none_remembers_are_stale_and_no_history_of_their_own() {
        let mut superblocks = fresh(1, 2);
        bump(&mut superblocks, &[0, 1], 200);
        bump(&mut superblocks, &[1], 300);
        for at in [1, 2] {
            superblocks[at].left[0] = Left { epoch: 200, tail: 1, update: 0 };
        }
        superblocks[2] =
            Superblock { member: MemberIndex(2), device: superblocks[2].device, ..superblocks[1].clone() };
        bump(&mut superblocks, &[1, 2], 400);
        bump(&mut superblocks, &[2], 500);
        let assembled = assemble(&candidates(&superblocks, &[0, 2]), false).unwrap();
        assert_eq!(live(&assembled), [2]);
        assert!(assembled.refused[0].1.why.contains("missed writes"), "{:?}", assembled.refused);
    }

    /// As before, and the members that left last are here as they were long before.
    #[test]
    fn older_copies_of_members_that_none_remembers_are_no_history_of_their_own() {
        for (tail, apart) in [(9, false), (8, true)] {
            let mut superblocks = fresh(2, 2);
            bump(&mut superblocks, &[0, 1], 200);
            let old = superblocks.clone();
            bump(&mut superblocks, &[0, 1, 2, 3], 300);
            bump(&mut superblocks, &[2, 3], 400);
            for at in [2, 3] {
                superblocks[at].left[..2].fill(Left { epoch: 300, tail, update: 0 });
            }
            superblocks[0] = old[0].clone();
            superblocks[1] = old[1].clone();
            superblocks[..2].iter_mut().for_each(|s| s.log_start.sequence = 8);
            let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3]), false);
            assert_eq!(assembled.is_err(), apart, "{assembled:?}");
        }
    }

    #[test]
    fn a_copy_of_a_member_is_refused() {
        let superblocks = fresh(2, 1);
        let mut all = candidates(&superblocks, &[0, 1, 2]);
        all.push(Candidate { key: 9, superblock: superblocks[1].clone() });
        assert!(matches!(
            assemble(&all, false),
            Err(AssemblyError::Duplicate { member: MemberIndex(1), .. })
        ));
    }

    #[test]
    fn a_replaced_device_is_not_its_successor() {
        let mut superblocks = fresh(2, 1);
        let old = superblocks[1].clone();
        bump(&mut superblocks, &[0, 1, 2], 200);
        for superblock in &mut superblocks {
            superblock.members[1].uuid = Uuid::from_u128(5000);
            superblock.members[1].state = MemberState::Online;
        }
        superblocks[1].device = Uuid::from_u128(5000);
        let mut all = candidates(&superblocks, &[0, 1, 2]);
        all.push(Candidate { key: 9, superblock: old });
        let assembled = assemble(&all, false).unwrap();
        assert_eq!(assembled.seats[1].key, Some(1));
        assert!(assembled.refused.iter().any(|(key, unused)| *key == 9 && unused.why.contains("replaced")));
        // A crash came before it was marked.
        assert_eq!(assembled.replaced, [(9, MemberIndex(1), Uuid::from_u128(1001))]);
        assert!(!assembled.epoch_is_complete);
        // A device that holds something else is left as it is: it may be of another line.
        all[3].superblock.epoch.id = 77;
        let assembled = assemble(&all, false).unwrap();
        assert!(assembled.replaced.is_empty() && assembled.epoch_is_complete);
    }

    /// A newer version has set a bit on it, or its numbers are at their limit: it must not be written to.
    #[test]
    fn a_member_that_must_not_be_written_to_is_left_out_and_named() {
        type Change = fn(&mut Superblock);
        let changes: [(Change, &str); 3] = [
            (|s| s.features_ro_compat = 1 << 7, "ro-compat bit 7"),
            (|s| s.sequence = COUNT_END - 2, "'sequence' is 4611686018427387902"),
            (|s| s.epoch.number = COUNT_END - COUNTED_IN_A_LIFE, "'epoch number'"),
        ];
        for (change, what) in changes {
            let mut superblocks = fresh(3, 2);
            change(&mut superblocks[1]);
            let assembled = assemble(&candidates(&superblocks, &[0, 1, 2, 3, 4]), false).unwrap();
            assert_eq!(live(&assembled), [0, 2, 3, 4]);
            assert!(
                assembled.refused.iter().any(|(key, unused)| *key == 1 && unused.why.contains(what)),
                "{what}"
            );
            assert!(assembled.sequence < 10 && assembled.epoch_number < 10, "{what}: nothing it says counts");
            // Where the others are too few, it is named, whether the start is forced or not.
            for force in [false, true] {
                let error = assemble(&candidates(&superblocks, &[0, 1, 2]), force).unwrap_err().to_string();
                assert!(error.contains("cannot start with member 1: ") && error.contains(what), "{error}");
                assert!(error.contains("missing: "), "{error}");
            }
        }
    }

    #[test]
    fn members_of_arrays_that_differ_are_refused() {
        let mut superblocks = fresh(2, 1);
        superblocks[2].geometry.volume_bytes -= 4096;
        assert!(matches!(
            assemble(&candidates(&superblocks, &[0, 1, 2]), true),
            Err(AssemblyError::Inconsistent { .. })
        ));
    }

    proptest! {
        /// Whatever was lost and bumped in whatever order: any array that serves afterwards holds the newest
        /// complete epoch.
        #[test]
        fn no_member_that_missed_a_complete_epoch_serves(
            losses in prop::collection::vec(0usize..6, 0..2),
            absent in prop::collection::vec(0usize..6, 0..2),
        ) {
            let mut superblocks = fresh(4, 2);
            let mut serving: Vec<usize> = (0..6).collect();
            for (round, lost) in losses.iter().enumerate() {
                serving.retain(|at| at != lost);
                bump(&mut superblocks, &serving.clone(), 200 + round as u64);
            }
            let present: Vec<usize> = (0..6).filter(|at| !absent.contains(at)).collect();
            match assemble(&candidates(&superblocks, &present), false) {
                Ok(assembled) => {
                    for member in live(&assembled) {
                        prop_assert!(serving.contains(&member) && present.contains(&member));
                    }
                }
                Err(error) => {
                    let enough = serving.iter().filter(|at| present.contains(at)).count() >= 4;
                    prop_assert!(!enough, "{error}");
                }
            }
        }
    }
}
