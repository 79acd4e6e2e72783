//! A new device in the place of a member.
//!
//! Invariants: recognised data is never overwritten without force; when the array refuses, a file created for
//! it is removed; steps that may wait for a device that does not answer come before others have to wait for
//! this request. Must not know how requests arrive.

use super::hand_over::{By, check_fit, check_unused, hand_over, new_devices, outside_search};
use super::target::{self, Target};
use crate::control::{ErrorCode, MemberRef, RequestError};
use crate::daemon::arrays::outcome::{Done, Outcome, refusal};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::returns::ATTEMPT_WAIT;
use crate::daemon::devices::looking::{open_member, patience};
use crate::daemon::devices::preparation::{prepare, remove};
use crate::daemon::devices::room::{Wanted, check_room};
use crate::daemon::devices::search::{Hindrance, overwritten};
use crate::daemon::devices::superblocks::{open_and_recognise, reserved_bytes};
use crate::daemon::peer::Owner;
use crate::member::patience::within_apart;
use crate::member::{Access, CreatedFile, Device, DeviceError, DeviceKind, is_remote};
use calpe_core::format::{NewestError, Signature};
use calpe_core::units::{HumanSize, Printable, shown};
use calpe_core::volume::{AdminRequest, NewDevice, ReplacementOrder, ReplacementStep, new_device_of};
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// Puts a new device in the place of a member, or only says what would happen.
pub(crate) fn replace(
    arrays: &Arrays,
    array: &str,
    old: &MemberRef,
    new: &Path,
    force: bool,
    dry_run: bool,
) -> Outcome {
    let target = target::find(arrays, array, old)?;
    let checked = check(arrays, &target, new, force)?;
    if dry_run {
        return foretell(arrays, &target, new, checked);
    }
    let Checked { device, warnings, .. } = checked;
    let created = device.is_none();
    let limit = patience(target.limits);
    let file_bytes = file_bytes(arrays, &target);
    let (device, known_zero) =
        prepare(new, device, file_bytes, &target.superblock, limit).map_err(|error| match error {
            DeviceError::Permission { path } if created => uncreatable(&path),
            error => error.into(),
        })?;
    let created = if created { Some(CreatedFile::of(&device)?) } else { None };
    let uuid = Uuid::new_v4();
    let outcome = put_in_place(arrays, &target, device, uuid, known_zero);
    match (outcome, created) {
        // A file that the member may come back with stays.
        // Of several lanes some may be building it.
        (Err(mut error), created) if target.superblock.part.is_cut() || may_be_of(arrays, &target, uuid) => {
            note_without_superblock(arrays, &target, uuid, new);
            if created.is_some() {
                error.message += &format!(" ({} stays)", shown(new));
            }
            Err(error)
        }
        (Err(error), Some(created)) => {
            // The error is the answer; a file that cannot be removed is empty.
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

/// A device that may take the place of a member, as far as its array and the daemon can tell.
struct Checked {
    /// The array's plan for it.
    would: String,
    /// None: a file is to be created.
    device: Option<Device>,
    /// What would be destroyed, a line each.
    warnings: Vec<String>,
}

/// Checks whether a new device may take the place of a member, for a dry run and for the real thing.
fn check(arrays: &Arrays, target: &Target, new: &Path, force: bool) -> Result<Checked, RequestError> {
    check_unused(arrays, target, new, "name a device that is no member")?;
    if target.superblock.part.is_cut() && is_remote(new) {
        let what = format!("{}: an array of several lanes takes devices of this host only", shown(new));
        return Err(refusal(ErrorCode::Refused, what));
    }
    // The array is asked before anything is opened or created, with a stand-in for a device that fits.
    let fitting = new_devices(arrays, target, Uuid::new_v4(), target.needed_bytes());
    let request = |device| AdminRequest::Replace { member: target.index, device };
    let would = arrays.would(target.array, &target.name, fitting.map(request).collect())?;
    // `new` may be the member's own device, which an attempt to bring it back has locked.
    let attempt = arrays.returns.hold_off(target.superblock.array, target.index);
    drop(attempt.map(|attempt| attempt.recv_timeout(ATTEMPT_WAIT)));
    // Locked even in a dry run: whether that works is part of the answer.
    match open_and_recognise(new, patience(target.limits)) {
        Ok((device, found)) => {
            check_fit(target, &device)?;
            let warnings = check_worthless(&device, found?, force)?;
            Ok(Checked { would, device: Some(device), warnings })
        }
        Err(DeviceError::NotFound { .. }) => {
            check_creatable(arrays, target, new)?;
            Ok(Checked { would, device: None, warnings: Vec::new() })
        }
        Err(error) => Err(error.into()),
    }
}

/// Says what a replacement would come to, if there is room for it.
fn foretell(arrays: &Arrays, target: &Target, new: &Path, checked: Checked) -> Outcome {
    let Checked { would, device, mut warnings } = checked;
    let allocated = reserved_bytes(&target.superblock);
    let new_file = device.is_none().then(|| file_bytes(arrays, target));
    let wanted = [Wanted { path: new.to_owned(), new_file, allocated }];
    within_apart(new, "see what room there is", patience(target.limits), move || check_room(&wanted))??;
    let reserved = HumanSize(allocated);
    let what = match (new_file, device) {
        (Some(bytes), _) => {
            format!("a new sparse file of {}, {reserved} of it allocated at once", HumanSize(bytes))
        }
        (None, Some(device)) if device.facts().kind != DeviceKind::File => {
            "what it holds is overwritten".into()
        }
        _ => format!("what it holds is overwritten, {reserved} of it allocated at once"),
    };
    warnings.extend(outside_search(arrays, target, new));
    Ok(Done { message: format!("{would} ({}: {what})", shown(new)), warnings, ..Done::default() })
}

/// Puts a [prepared](prepare) device in the place of a member.
fn put_in_place(arrays: &Arrays, target: &Target, device: Device, uuid: Uuid, known_zero: bool) -> Outcome {
    // A file that was created is checked here for the first time.
    check_fit(target, &device)?;
    let _change = arrays.begin_change(target.superblock.array)?;
    let new = new_devices(arrays, target, uuid, device.facts().bytes);
    let new = new.map(|new| NewDevice { known_zero, ..new }).collect();
    let request = |member, device| AdminRequest::Replace { member, device };
    Ok(hand_over(arrays, target, &device, new, By::Command, request)?)
}

/// Gives up a replacement that is being built, in every lane or in none.
pub(crate) fn cancel_replace(arrays: &Arrays, array: &str, member: &MemberRef, dry_run: bool) -> Outcome {
    let target = target::find(arrays, array, member)?;
    // Lanes are told to change over as a change of the array.
    let is_cut = target.superblock.part.is_cut() && !dry_run;
    let _change = is_cut.then(|| arrays.begin_change(target.superblock.array)).transpose()?;
    let device = new_device_of(&arrays.facts(target.array)?.of_lane, target.index);
    let request = AdminRequest::CancelReplace { member: target.index, device };
    let order = |step, device| ReplacementOrder { member: target.index, device, step };
    let device = device.filter(|_| is_cut);
    device.inspect(|device| arrays.reactor.order_all(target.array, &order(ReplacementStep::Stay, *device)));
    let asked = arrays.ask(target.array, &target.name, request, dry_run);
    device.inspect(|device| arrays.reactor.order_all(target.array, &order(ReplacementStep::GoOn, *device)));
    let message = asked?;
    if dry_run {
        return Ok(Done::line(message));
    }
    arrays.remember_now(target.array);
    Ok(Done::line(format!("{message} ({})", Printable(&target.seat.name()))))
}

/// Records that a device that became a member's has left again. Without a superblock it cannot come back, and
/// a status says so.
fn note_without_superblock(arrays: &Arrays, target: &Target, device: Uuid, path: &Path) {
    let read = open_member(path, Access::ReadOnly, target.limits);
    if let Ok((_, lanes)) = read
        && matches!(lanes.first(), Err(NewestError::NotAMember))
    {
        arrays.served.with_names(target.array, |names| {
            names.hinder(device, Hindrance::Overwritten, overwritten(path));
        });
    }
}

/// Whether this device is a member's, in service or not, or may be.
fn may_be_of(arrays: &Arrays, target: &Target, device: Uuid) -> bool {
    let facts = arrays.facts(target.array);
    facts.map_or(true, |facts| facts.status.members.iter().any(|member| member.uuid == device))
}

/// Checks that a file may be created as a replacement: not under /dev, and not where all members on
/// this host are block devices.
fn check_creatable(arrays: &Arrays, target: &Target, new: &Path) -> Result<(), RequestError> {
    let facts = arrays.facts(target.array)?;
    let kinds = arrays.served.with_names(target.array, |names| {
        let devices = facts.status.members.iter().filter_map(|member| member.device);
        let places = devices.filter_map(|device| names.place_of(device));
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

/// Size of a new file for a member: that of the smallest other file.
fn file_bytes(arrays: &Arrays, target: &Target) -> u64 {
    let smallest = arrays.served.with_names(target.array, |names| {
        let found = names.all_places().filter_map(|place| place.found);
        found.filter(|found| found.facts.kind == DeviceKind::File).map(|found| found.facts.bytes).min()
    });
    smallest.flatten().unwrap_or(0).max(target.needed_bytes())
}

/// The refusal for a file that the daemon may not create.
pub(crate) fn uncreatable(path: &Path) -> RequestError {
    let what = format!(
        "{}: the daemon, which runs as {}, may not create a file there: let that user write to the directory, or create the file and \
         give it to that user",
        shown(path),
        Owner::own()
    );
    refusal(ErrorCode::Device, what)
}

/// Refuses to overwrite recognised data, or lists it when forced.
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
