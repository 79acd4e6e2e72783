//! Administrators' requests about members: taking them out, bringing them back, replacing them.
//!
//! Invariants: a device is handed to an array only opened, locked, large enough and with sectors that fit; nothing
//! recognised is overwritten without force; when the array refuses, a file created for it is removed. What may wait for a device
//! that does not answer has a limit, or is done before others have to wait for it: a member is failed or taken offline at
//! once, whatever else goes on. Must not know how requests arrive.

use super::changes::Change;
use super::import::SETTLE;
use super::peer::Owner;
use super::preparation::{prepare, remove};
use super::ranked::lock;
use super::reactor::ArrayId;
use super::report::{Names, Place};
use super::room::{Wanted, check_room};
use super::search::{Hindrance, overwritten};
use super::service::{Daemon, Done, Outcome, refusal};
use super::superblocks::{
    Copies, open_and_recognise, read_copies, reserved_bytes, witness, words_for_damaged,
};
use super::target::Target;
use crate::control::{ErrorCode, MemberRef, RequestError};
use crate::member::patience::{within, within_apart};
use crate::member::{
    self, Access, CreatedFile, DEFAULT_MEMBER_TIMEOUT, Device, DeviceError, DeviceKind, Identity, TimeLimits,
};
use calpe_core::array::assembly::NOWHERE_ELSE;
use calpe_core::block_io::DeviceId;
use calpe_core::format::{MemberState, NewestError, Signature, Superblock, newest_read};
use calpe_core::units::{HumanSize, MemberIndex, Printable, ROW_BYTES, quoted, shown};
use calpe_core::volume::{AdminRequest, ArrayState, NewDevice};
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// How long it may take to find out what a path leads to.
const GLANCE: Duration = Duration::from_secs(2);

/// How long an attempt to bring a member back by itself may take to let go of its device, once it has that open.
pub(super) const ATTEMPT_WAIT: Duration = SETTLE.saturating_mul(2);

/// The device of a member, its superblock, and copies of it that are damaged, in words.
pub(super) type Own = (Device, Superblock, Vec<String>);

/// What brings a member back.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    /// A command of an administrator, whatever was said before.
    Command,
    /// Nothing but that it is there again: not where an administrator has taken it out.
    Itself,
}

impl From<DeviceError> for RequestError {
    fn from(error: DeviceError) -> RequestError {
        // Whoever asks may be another user, who may do all this.
        let text = match &error {
            DeviceError::Permission { path } => format!(
                "{}: permission denied to the daemon, which runs as {}: let that user read and write it, and pass the directories above it",
                shown(path),
                Owner::own()
            ),
            _ => error.to_string(),
        };
        refusal(ErrorCode::Device, text)
    }
}

/// A file cannot be created by the daemon.
pub(super) fn uncreatable(path: &Path) -> RequestError {
    let what = format!(
        "{}: the daemon, which runs as {}, may not create a file there: let that user write to the directory, or create the file and \
         give it to that user",
        shown(path),
        Owner::own()
    );
    refusal(ErrorCode::Device, what)
}

impl Daemon {
    /// Sets error counts back to zero.
    pub(super) fn clear(&self, array: &str, member: Option<&MemberRef>, dry_run: bool) -> Outcome {
        let (id, name) = self.find(array, |served| (served.id, served.names.name.clone()))?;
        let target = member.map(|member| self.target(array, member)).transpose()?;
        let member = target.map(|target| target.index);
        if dry_run {
            return self.would(id, &name, AdminRequest::Clear { member });
        }
        let outcome = self.reactor.admin(id, AdminRequest::Clear { member }, Vec::new())?;
        self.with_names(id, |names| names.clear(member));
        self.remember_now(id);
        let unkept = self.await_kept().map(|why| format!("a restart may bring the counts back: {why}"));
        let message = format!("array '{name}': {}", outcome.0);
        Ok(Done { message, warnings: unkept.into_iter().collect(), ..Done::default() })
    }

    pub(super) fn take_out(&self, array: &str, member: &MemberRef, failed: bool, dry_run: bool) -> Outcome {
        let target = self.target(array, member)?;
        let member = target.index;
        let returns = self.returns_by_itself(&target)?;
        let (state, is_away) = {
            // What is away now stays away: nothing comes back by itself meanwhile.
            let _alone = lock(&self.returning);
            let state = self.state_of(&target)?;
            let is_away = matches!(state, MemberState::Missing | MemberState::Faulted);
            if returns && is_away && !dry_run {
                self.returns().keep_out(target.superblock.array, member);
            }
            (state, is_away)
        };
        let request = if failed { AdminRequest::Fail { member } } else { AdminRequest::Offline { member } };
        if dry_run {
            let would = self.would(target.array, &target.name, request);
            return match would {
                // As below.
                Err(_) if returns && is_away => Ok(Done::line(format!(
                    "would be done on array '{}': member {member} is {}{}",
                    target.name,
                    state.as_str(),
                    self.stays_away(&target)?
                ))),
                would => would,
            };
        }
        let outcome = match self.reactor.admin(target.array, request, Vec::new()) {
            Ok(outcome) => outcome.0,
            // It stays as it is, and away.
            Err(_) if returns && is_away => {
                self.note_kept_away(&target)?;
                format!("member {member} is {}", state.as_str())
            }
            Err(error) => return Err(error.into()),
        };
        let stays = if is_away { self.stays_away(&target)? } else { "" };
        Ok(Done::line(format!(
            "array '{}': {outcome}{stays} ({})",
            target.name,
            Printable(&target.seat.name())
        )))
    }

    /// The array cannot tell of it; its status does.
    fn note_kept_away(&self, target: &Target) -> Result<(), RequestError> {
        let facts = self.facts(target.array)?;
        let reason = facts.status.members[usize::from(target.index.0)].reason.as_deref().unwrap_or("");
        let kept = "kept away by an administrator until 'calpe online' brings it back";
        let text = if reason.is_empty() { kept.to_owned() } else { format!("{kept}; {reason}") };
        self.with_names(target.array, |names| names.findings.insert(target.seat.uuid, text));
        Ok(())
    }

    /// What is said of a member that is kept away. An array that has failed records nothing of it.
    fn stays_away(&self, target: &Target) -> Result<&'static str, RequestError> {
        let has_failed = self.facts(target.array)?.status.state == ArrayState::Failed;
        Ok(match has_failed {
            true => {
                ", and stays away until 'calpe online' brings it back; a start of the array forgets that, as nothing can be \
                     recorded while it has FAILED"
            }
            false => ", and stays away until 'calpe online' brings it back",
        })
    }

    pub(super) fn online(
        &self,
        array: &str,
        member: &MemberRef,
        path: Option<&Path>,
        dry_run: bool,
    ) -> Outcome {
        let target = self.target(array, member)?;
        let change = self.begin_change(target.superblock.array)?;
        let state = self.state_of(&target)?;
        if matches!(state, MemberState::Online | MemberState::Rebuilding) {
            return match path.filter(|path| !target.seat.is_at(path, identity_of(path))) {
                Some(_) => Err(refusal(
                    ErrorCode::Refused,
                    format!(
                        "{} is {} already; another device takes its place with 'calpe replace'",
                        target.describe(),
                        state.as_str()
                    ),
                )),
                None => Ok(Done::line(format!("{} is {} already", target.describe(), state.as_str()))),
            };
        }
        let own = self.open_own(&target, path, &change)?;
        if dry_run {
            let (device, superblock, _) = own;
            let new = self.new_device(&device, Some(superblock));
            let request = AdminRequest::Online { member: target.index, device: new };
            let done = self.would(target.array, &target.name, request);
            let done = done.inspect_err(|error| self.note_kept(&target, device.path(), error))?;
            return Ok(Done::line(format!("{} ({})", done.message, shown(device.path()))));
        }
        let done = self.bring_online(&target, own, By::Command)?;
        self.returns().back(target.superblock.array, target.index);
        Ok(done)
    }

    /// Opens the own device of a member that is out: at this path, or wherever it is.
    pub(super) fn open_own(
        &self,
        target: &Target,
        path: Option<&Path>,
        _change: &Change,
    ) -> Result<Own, RequestError> {
        // Known without asking it; what it leads to now may be something else.
        let leaving = target.seat.found.and_then(|found| found.identity).is_some_and(Identity::is_leaving);
        if let (true, None, Some(path)) = (leaving, path, &target.seat.path) {
            return Err(DeviceError::Unfinished { path: path.clone() }.into());
        }
        let path = match path {
            Some(path) => {
                self.check_unused(target, path, &format!("name the device of member {}", target.index))?;
                path.to_owned()
            }
            None => self.where_is(target)?,
        };
        // An attempt of the daemon's own may have the device locked. The next one waits for this change of
        // the array.
        let attempt = self.returns().interrupt(target.superblock.array, target.index);
        drop(attempt.map(|attempt| attempt.recv_timeout(ATTEMPT_WAIT)));
        // Locked in a dry run, too: whether it can be is part of what is to be known.
        let (device, copies) = open_member(&path, Access::Exclusive, target.limits)?;
        let bad_copies = words_for_damaged(&copies);
        let superblock = target.own(&device, newest_read(copies))?;
        check_fit(target, &device)?;
        Ok((device, superblock, bad_copies))
    }

    /// Hands a member's own device to its array again.
    pub(super) fn bring_online(&self, target: &Target, own: Own, by: By) -> Outcome {
        let (device, superblock, bad_copies) = own;
        check_fit(target, &device)?;
        let new = NewDevice { bad_copies, ..self.new_device(&device, Some(superblock)) };
        let path = device.path().to_owned();
        self.hand_over(target, new, device, by, |member, device| AdminRequest::Online { member, device })
            .inspect_err(|error| self.note_kept(target, &path, error))
    }

    /// A member was not taken back. Where its device holds what may be nowhere else, the status
    /// says so from now on: the array itself knows of no device that it has refused.
    fn note_kept(&self, target: &Target, path: &Path, error: &RequestError) {
        if error.message.contains(NOWHERE_ELSE) {
            let reason = format!("not taken back: {}: {}", shown(path), error.message);
            self.with_names(target.array, |names| names.hinder(target.seat.uuid, Hindrance::Kept, reason));
        }
    }

    pub(super) fn replace(
        &self,
        array: &str,
        old: &MemberRef,
        new: &Path,
        force: bool,
        dry_run: bool,
    ) -> Outcome {
        let target = self.target(array, old)?;
        self.check_unused(&target, new, "name a device that is no member")?;
        // Before anything is opened or created. A device that is large enough is checked for the rest.
        let id = self.reactor.next_device_id();
        let fitting = NewDevice::new(id, Uuid::new_v4(), target.needed_bytes());
        let request = AdminRequest::Replace { member: target.index, device: fitting };
        let would = self.would(target.array, &target.name, request)?;
        let mut warnings = Vec::new();
        // It may be the member's own device, which an attempt of the daemon's own has locked.
        let attempt = self.returns().hold_off(target.superblock.array, target.index);
        drop(attempt.map(|attempt| attempt.recv_timeout(ATTEMPT_WAIT)));
        // Locked in a dry run, too: whether it can be is part of what is to be known.
        let (device, created) = match open_and_recognise(new, patience(target.limits)) {
            Ok((device, found)) => {
                check_fit(&target, &device)?;
                warnings = check_worthless(&device, found?, force)?;
                (Some(device), false)
            }
            Err(DeviceError::NotFound { .. }) => {
                self.check_creatable(&target, new)?;
                (None, true)
            }
            Err(error) => return Err(error.into()),
        };
        if dry_run {
            let allocated = reserved_bytes(&target.superblock);
            let new_file = created.then(|| self.file_bytes(&target));
            let wanted = [Wanted { path: new.to_owned(), new_file, allocated }];
            within_apart(new, "see what room there is", patience(target.limits), move || {
                check_room(&wanted)
            })??;
            let reserved = HumanSize(allocated);
            let is_file = device.is_none_or(|device| device.facts().kind == DeviceKind::File);
            let what = match created {
                true => format!(
                    "a new sparse file of {}, {reserved} of it allocated at once",
                    HumanSize(self.file_bytes(&target))
                ),
                false if is_file => {
                    format!("what it holds is overwritten, {reserved} of it allocated at once")
                }
                false => "what it holds is overwritten".into(),
            };
            let message = format!("{} ({}: {what})", would.message, shown(new));
            warnings.extend(self.outside_search(target.superblock.array, &target.name, new));
            return Ok(Done { message, warnings, ..Done::default() });
        }
        let limit = patience(target.limits);
        let file_bytes = self.file_bytes(&target);
        let (device, known_zero) =
            prepare(new, device, file_bytes, &target.superblock, limit).map_err(|error| match error {
                DeviceError::Permission { path } if created => uncreatable(&path),
                error => error.into(),
            })?;
        let created = if created { Some(CreatedFile::of(&device)?) } else { None };
        let uuid = Uuid::new_v4();
        let outcome = self.put_in_place(&target, device, uuid, known_zero);
        match (outcome, created) {
            // What the member may come back with stays, and what nobody says is none.
            (Err(mut error), created) if self.may_be_of(&target, uuid) => {
                self.note_without_superblock(&target, uuid, new);
                if created.is_some() {
                    error.message += &format!(" ({} stays)", shown(new));
                }
                Err(error)
            }
            (Err(error), Some(created)) => {
                // The reason is the answer; a file that stays behind is empty.
                remove(new, created, limit);
                Err(error)
            }
            (Err(error), None) => Err(error),
            (Ok(mut done), _) => {
                done.warnings.splice(0..0, warnings);
                Ok(done)
            }
        }
    }

    /// Has a device that is [prepared](prepare) take the place of a member.
    fn put_in_place(&self, target: &Target, device: Device, uuid: Uuid, known_zero: bool) -> Outcome {
        check_fit(target, &device)?;
        let _change = self.begin_change(target.superblock.array)?;
        let id = self.reactor.next_device_id();
        let bytes = device.facts().bytes;
        let new = NewDevice { known_zero, ..NewDevice::new(id, uuid, bytes) };
        let request = |member, device| AdminRequest::Replace { member, device };
        self.hand_over(target, new, device, By::Command, request)
    }

    /// A device that became a member's has left again: without a superblock it cannot come back.
    fn note_without_superblock(&self, target: &Target, device: Uuid, path: &Path) {
        let read = open_member(path, Access::ReadOnly, target.limits);
        if let Ok((_, copies)) = read
            && matches!(newest_read(copies), Err(NewestError::NotAMember))
        {
            self.with_names(target.array, |names| {
                names.hinder(device, Hindrance::Overwritten, overwritten(path));
            });
        }
    }

    /// Whether the array has, or may have, this device for a member's, in service or not.
    fn may_be_of(&self, target: &Target, device: Uuid) -> bool {
        let facts = self.facts(target.array);
        facts.map_or(true, |facts| facts.status.members.iter().any(|member| member.uuid == device))
    }

    /// Refuses a device that serves an array of this daemon, by the name of the member that it is, with this advice.
    fn check_unused(&self, target: &Target, new: &Path, advice: &str) -> Result<(), RequestError> {
        // With the patience of the opening that follows: what hangs now would hang then.
        let identity = look_at(new, patience(target.limits))?;
        let ids: Vec<ArrayId> = lock(&self.served).iter().map(|served| served.id).collect();
        for id in ids {
            let Ok(facts) = self.facts(id) else { continue };
            let user = self.with_names(id, |names| {
                let is_it = |device: Option<DeviceId>| {
                    device
                        .and_then(|id| names.devices.get(&id))
                        .is_some_and(|place| place.is_at(new, identity))
                };
                let mut members = facts.status.members.iter();
                let member = members.find(|member| is_it(member.device) || is_it(member.replacement))?;
                let role = if is_it(member.device) { "is" } else { "is being built as" };
                Some(format!("{} {role} member {} of array '{}'", shown(new), member.index, names.name))
            });
            if let Some(user) = user.flatten() {
                return Err(refusal(ErrorCode::Refused, format!("{user}: {advice}")));
            }
        }
        Ok(())
    }

    /// What the array says to a request, which it does not carry out.
    pub(super) fn would(&self, id: ArrayId, name: &str, request: AdminRequest) -> Outcome {
        let outcome = self.reactor.check(id, request)?;
        Ok(Done::line(format!("would be done on array '{name}': {}", outcome.0)))
    }

    fn new_device(&self, device: &Device, superblock: Option<Superblock>) -> NewDevice {
        let uuid = superblock.as_ref().map_or_else(Uuid::new_v4, |superblock| superblock.device);
        let new = NewDevice::new(self.reactor.next_device_id(), uuid, device.facts().bytes);
        NewDevice { superblock: superblock.map(Box::new), ..new }
    }

    /// Gives up a replacement that is being built.
    pub(super) fn cancel_replace(&self, array: &str, member: &MemberRef, dry_run: bool) -> Outcome {
        let target = self.target(array, member)?;
        let request = AdminRequest::CancelReplace { member: target.index };
        if dry_run {
            return self.would(target.array, &target.name, request);
        }
        let outcome = self.reactor.admin(target.array, request, Vec::new())?;
        self.remember_now(target.array);
        Ok(Done::line(format!("array '{}': {} ({})", target.name, outcome.0, Printable(&target.seat.name()))))
    }

    /// Hands an open device to an array, and remembers where it is.
    fn hand_over(
        &self,
        target: &Target,
        new: NewDevice,
        device: Device,
        by: By,
        request: impl FnOnce(MemberIndex, NewDevice) -> AdminRequest,
    ) -> Outcome {
        let id = new.device;
        let path = device.path().to_owned();
        device.set_limits(target.limits);
        device.set_remote_witness(witness(device.facts().bytes, target.superblock.array, new.uuid, 0));
        let place = Place::of(new.uuid, &device);
        let since = device.since();
        // Before it is in service: a status may be asked for while it is being recorded that it is.
        self.with_names(target.array, |names| names.devices.insert(id, place.clone()));
        let outcome = {
            // Whoever takes a member out that is away is told that it stays away.
            let _alone = (by == By::Itself).then(|| lock(&self.returning));
            // A statement of its own: nothing is asked of the array under that lock.
            let stays_out =
                by == By::Itself && self.returns().is_kept_out(target.superblock.array, target.index);
            match stays_out {
                true => Err(refusal(ErrorCode::Refused, "an administrator has taken it out")),
                false => {
                    let request = request(target.index, new);
                    self.reactor.admin(target.array, request, vec![(id, device)]).map_err(RequestError::from)
                }
            }
        };
        let outcome = outcome.inspect_err(|_| {
            // It may have become the member's, and left again: then it is what comes back.
            let at = usize::from(target.index.0);
            let is_members = self.facts(target.array).is_ok_and(|f| f.status.members[at].uuid == place.uuid);
            self.with_names(target.array, |names| {
                names.devices.remove(&id);
                if is_members && names.seats[at].uuid != place.uuid {
                    names.seats[at] = place;
                }
            });
            self.remember_now(target.array);
        })?;
        // It may have been lost again meanwhile, which is no reason to keep it out.
        member::forget_lost(&path, since);
        self.remember_now(target.array);
        let message = format!("array '{}': {} ({})", target.name, outcome.0, shown(&path));
        let warnings = self.outside_search(target.superblock.array, &target.name, &path);
        let warnings = warnings.into_iter().collect();
        Ok(Done { message, warnings, ..Done::default() })
    }

    pub(super) fn target(&self, array: &str, member: &MemberRef) -> Result<Target, RequestError> {
        let id = self.find(array, |served| served.id)?;
        let facts = self.facts(id)?;
        // Not while others have to wait: the path may lead to what does not answer.
        let identity = match member {
            MemberRef::Path(path) if !self.find(array, |served| served.names.is_known(path))? => {
                identity_of(path)
            }
            _ => None,
        };
        self.find(array, |served| {
            let names = &served.names;
            let current = |index: usize| {
                let status = &facts.status.members[index];
                status.device.and_then(|device| names.devices.get(&device)).unwrap_or(&names.seats[index])
            };
            let width = names.seats.len();
            let index = match member {
                MemberRef::Index(index) => Some(usize::from(*index)).filter(|index| *index < width),
                MemberRef::Uuid(uuid) => (0..width).find(|index| current(*index).uuid == *uuid),
                MemberRef::Path(path) => (0..width).find(|index| current(*index).is_at(path, identity)),
            };
            let index = index.ok_or_else(|| {
                refusal(
                    ErrorCode::NoSuchMember,
                    format!(
                        "array '{}' has no member {}: name it by its index (0 to {}), its path or its uuid, as \
                         'calpe status {}' shows them",
                        names.name,
                        name_of(member),
                        width - 1,
                        names.name
                    ),
                )
            })?;
            Ok(Target {
                array: id,
                name: names.name.clone(),
                superblock: served.superblock.clone(),
                index: MemberIndex(index as u16),
                seat: current(index).clone(),
                limits: served.limits,
            })
        })?
    }

    /// Whether the daemon brings the member back when it can, if nobody says that it is to stay away.
    fn returns_by_itself(&self, target: &Target) -> Result<bool, RequestError> {
        let is_remote = target.seat.path.as_deref().is_some_and(member::is_remote);
        let was_missing = self.returns().was_missing(target.superblock.array, target.index);
        let status = self.facts(target.array)?.status;
        let member = &status.members[usize::from(target.index.0)];
        // As `Returns::note` will have it with the next look.
        let is_missing = status.state == ArrayState::Failed && member.state == MemberState::Missing;
        Ok(is_remote || was_missing || is_missing || member.returns)
    }

    fn state_of(&self, target: &Target) -> Result<MemberState, RequestError> {
        Ok(self.facts(target.array)?.status.members[usize::from(target.index.0)].state)
    }

    /// Where the own device of a member is: where it was, or beside its fellows, or in the configured places.
    fn where_is(&self, target: &Target) -> Result<PathBuf, RequestError> {
        let places = self.search_places();
        let wider = self.with_names(target.array, |names| names.places_around(&places)).unwrap_or_default();
        let mut own: Vec<PathBuf> = target.seat.path.clone().into_iter().collect();
        let begun = Instant::now();
        let there = target.seek(&own);
        // Where it was in service since the daemon started, it is no copy.
        if target.seat.found.is_some() && !there.copies.is_empty() {
            return target.current_of(&there.copies);
        }
        if there.copies.is_empty() {
            own.clear();
            // It gave no answer in time, nor would it in a search of the places around it.
            if begun.elapsed() >= patience(target.limits) && there.cut_off.is_none() && !there.is_overwritten
            {
                return Err(target.not_found(&there));
            }
        }
        let places: Vec<PathBuf> = own.into_iter().chain(wider).collect();
        let all = target.seek(&places);
        if !all.copies.is_empty() {
            return target.current_of(&all.copies);
        }
        if let Some(why) = there.cut_off.clone().or(all.cut_off) {
            self.with_names(target.array, |names| {
                names.hinder(target.seat.uuid, Hindrance::CutOff, why.clone());
            });
            let (name, index) = (&target.name, target.index);
            return Err(refusal(
                ErrorCode::Device,
                format!(
                    "{why}; {} cannot come back from there. To replace it: 'calpe replace {name} {index} NEW', unless the array has \
                     FAILED; if its device is at another path now: 'calpe online {name} {index} --path PATH'",
                    target.describe()
                ),
            ));
        }
        if let (true, Some(path)) = (there.is_overwritten, &target.seat.path) {
            self.with_names(target.array, |names| {
                names.hinder(target.seat.uuid, Hindrance::Overwritten, overwritten(path));
            });
            let (name, index) = (&target.name, target.index);
            return Err(refusal(
                ErrorCode::Device,
                format!(
                    "{}; {} cannot come back from there. To build it anew: 'calpe replace {name} {index} {}', unless the array has \
                     FAILED; if its device is at another path now: 'calpe online {name} {index} --path PATH'",
                    overwritten(path),
                    target.describe(),
                    quoted(path)
                ),
            ));
        }
        Err(target.not_found(&there))
    }
    /// Whether a file may be created as a replacement: not under /dev, and not where all that this host has of the array are
    /// block devices.
    fn check_creatable(&self, target: &Target, new: &Path) -> Result<(), RequestError> {
        let facts = self.facts(target.array)?;
        let kinds = self.with_names(target.array, |names| {
            let devices = facts.status.members.iter().filter_map(|member| member.device);
            let places = devices.filter_map(|device| names.devices.get(&device));
            places.filter_map(|place| place.found).map(|found| found.facts.kind).collect::<Vec<_>>()
        });
        let kinds = kinds.unwrap_or_default();
        let may_be_file = kinds.contains(&DeviceKind::File) || !kinds.contains(&DeviceKind::Block);
        let parent = new.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let (own, path) = (parent.to_path_buf(), new.to_owned());
        let look = move || -> Result<_, DeviceError> {
            Device::check_new_name(&path)?;
            let in_dev = |real: PathBuf| real.starts_with("/dev") && !real.starts_with("/dev/shm");
            let may_write = access(&own, AccessFlags::W_OK | AccessFlags::X_OK) != Err(Errno::EACCES);
            Ok((own.is_dir() && !own.canonicalize().is_ok_and(in_dev), may_write))
        };
        let (may_hold_files, may_write) = within_apart(parent, "look at it", patience(target.limits), look)??;
        if !may_be_file || !may_hold_files {
            return Err(DeviceError::NotFound { path: new.to_owned() }.into());
        }
        if !may_write {
            return Err(uncreatable(new));
        }
        Ok(())
    }

    /// Size of a file that takes the place of a member: that of its fellows, so that they stay alike.
    fn file_bytes(&self, target: &Target) -> u64 {
        let smallest = self.with_names(target.array, |names| {
            let found = names.seats.iter().chain(names.devices.values()).filter_map(|place| place.found);
            found.filter(|found| found.facts.kind == DeviceKind::File).map(|found| found.facts.bytes).min()
        });
        smallest.flatten().unwrap_or(0).max(target.needed_bytes())
    }
}

fn name_of(member: &MemberRef) -> String {
    match member {
        MemberRef::Index(index) => index.to_string(),
        MemberRef::Uuid(uuid) => uuid.to_string(),
        MemberRef::Path(path) => shown(path).to_string(),
    }
}

/// What a local path leads to, if that is known soon.
pub(super) fn identity_of(path: &Path) -> Option<Identity> {
    look_at(path, GLANCE).ok().flatten()
}

/// What a local path leads to, if there is anything.
///
/// # Errors
/// When that is not answered within the limit.
fn look_at(path: &Path, limit: Duration) -> Result<Option<Identity>, DeviceError> {
    if member::is_remote(path) {
        return Ok(None);
    }
    let own = path.to_path_buf();
    within_apart(path, "look at it", limit, move || Identity::of(&own))
}

impl Names {
    /// Whether a path is that of a member, as it is written.
    fn is_known(&self, path: &Path) -> bool {
        self.seats.iter().chain(self.devices.values()).any(|place| place.is_at(path, None))
    }
}

impl Place {
    /// Whether a path names this place, or leads to what was found there.
    fn is_at(&self, path: &Path, identity: Option<Identity>) -> bool {
        let Some(known) = &self.path else { return false };
        if member::is_remote(known) || member::is_remote(path) {
            return known.as_os_str() == path.as_os_str() || member::same_remote(known, path);
        }
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let found = self.found.and_then(|found| found.identity);
        absolute(known) == absolute(path) || (identity.is_some() && identity == found)
    }
}

/// A device, and what it says of itself.
type Opened = (Device, Copies);

/// Opens a device, and reads the copies of its superblock. What does not answer in time is given up.
pub(super) fn open_member(path: &Path, access: Access, limits: TimeLimits) -> Result<Opened, DeviceError> {
    let open = move |path: &Path| {
        let device = Device::open(path, access)?;
        device.set_limits(limits);
        let copies = read_copies(&device);
        Ok((device, copies))
    };
    if member::is_remote(path) {
        // Every step has a limit of its own.
        return open(path);
    }
    let own = path.to_path_buf();
    within(path, "open it", patience(limits), move || open(&own))?
}

/// How long a device that is to be opened is waited for: an administrator waits, too.
pub(super) fn patience(limits: TimeLimits) -> Duration {
    limits.local.min(DEFAULT_MEMBER_TIMEOUT)
}

/// Whether a device can hold what a member holds.
fn check_fit(target: &Target, device: &Device) -> Result<(), RequestError> {
    let facts = device.facts();
    let needed = target.needed_bytes();
    if facts.bytes < needed {
        return Err(
            DeviceError::TooShort { path: device.path().into(), bytes: facts.exact_bytes, needed }.into()
        );
    }
    // Whatever sector the array shows to clients: members are read and written by whole blocks.
    if u64::from(facts.sector) > ROW_BYTES {
        let what = match facts.kind {
            DeviceKind::Block => "device",
            DeviceKind::File => "filesystem",
            DeviceKind::Remote => "server",
        };
        return Err(refusal(
            ErrorCode::Device,
            format!(
                "{}: the {what} has sectors of {} bytes, members are read and written in blocks of {ROW_BYTES}: use another one",
                shown(device.path()),
                facts.sector
            ),
        ));
    }
    Ok(())
}

/// Refuses what is recognised on a device, or lists it when forced.
fn check_worthless(device: &Device, found: Vec<Signature>, force: bool) -> Result<Vec<String>, RequestError> {
    let path = shown(device.path());
    if found.is_empty() || force {
        return Ok(found.iter().map(|signature| format!("{path}: {signature} is destroyed")).collect());
    }
    let lines: Vec<_> = found.iter().map(|signature| format!("{path}: holds {signature}")).collect();
    Err(refusal(
        ErrorCode::NeedsForce,
        format!("{}\nnothing was changed; use --force to overwrite it, which destroys it", lines.join("\n")),
    ))
}
