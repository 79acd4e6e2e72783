//! `up`: one directory, one array of sparse files, no configuration. The first run creates the array, later
//! ones serve it again.
//!
//! Invariant: an existing array is never created over, whatever the options say. Must not know of command
//! lines.

use super::error::{RunError, create_dir, system};
use super::lifetime::{unless_stopped, until_stopped};
use super::signals::Signals;
use crate::control::{ArrayReport, ArrayState, LogState, MemberState};
use crate::daemon::arrays::serve::serve;
use crate::daemon::arrays::settings::ServeOptions;
use crate::daemon::clock;
use crate::daemon::config::{
    CONTROL_SOCKET_NAME, DEFAULT_CONNECTIONS, DEFAULT_MEMORY, NBD_SOCKET_NAME, STATE_DIR_NAME,
};
use crate::daemon::control_server::ControlServer;
use crate::daemon::devices::create::{CreatePlan, CreateRequest, DEFAULT_CHECKSUM, DEFAULT_CHUNK};
use crate::daemon::devices::import::{self, ImportError, Opened};
use crate::daemon::devices::leftovers::{self, Kept};
use crate::daemon::devices::search::{Found, Search, search_with};
use crate::daemon::gpu::Gpus;
use crate::daemon::imports::attempts::Imports;
use crate::daemon::imports::opening::lost_replacement_lines;
use crate::daemon::reactor::{ListenAddress, Listener};
use crate::daemon::service::{Daemon, ServiceConfig};
use crate::daemon::state::remembered_devices;
use crate::member::DEFAULT_MEMBER_TIMEOUT;
use calpe_core::format::{ChecksumKind, Superblock, VolumeKind};
use calpe_core::units::{ByteCount, Count, HumanSize, Printable, PrintableLines, quoted, shown, two_sizes};
use calpe_gpu::{GpuConfig, Mode};
use calpe_host::reclaim;
use std::fs::{File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;

/// Name of the array, and of its export.
pub(crate) const UP_NAME: &str = "calpe";

/// Data chunks by default.
pub(crate) const UP_DATA: u16 = 4;

/// Parity chunks by default.
pub(crate) const UP_PARITY: u16 = 2;

/// Directory by default: other commands find its daemon when they run in the same working
/// directory.
pub(crate) const UP_DIR: &str = "calpe-data";

/// Size of the volume by default, in bytes.
pub(crate) const UP_BYTES: u64 = 1 << 30;

/// The options of `up`. All but the directory and `gpu` and `force` count only when the array is created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UpOptions {
    /// Directory of members and sockets.
    pub dir: PathBuf,
    /// Data chunks of a stripe.
    pub data: Option<u16>,
    /// Parity chunks of a stripe.
    pub parity: Option<u16>,
    /// Size of the volume.
    pub size: Option<ByteCount>,
    /// Bytes of a chunk.
    pub chunk: Option<ByteCount>,
    /// Lanes that the volume is cut into.
    pub lanes: Option<u16>,
    /// Kind of volume.
    pub volume: Option<VolumeKind>,
    /// Checksum of each block.
    pub checksum: Option<ChecksumKind>,
    /// Whether GPUs are used.
    pub gpu: Option<Mode>,
    /// Start even where the members cannot prove that they are the current ones.
    pub force: bool,
}

/// Creates the array if there is none, serves it until told to stop, and says so on `out`.
///
/// # Errors
/// When it cannot be created or served, or could not be stopped cleanly.
pub(crate) fn run_up(options: &UpOptions, out: &mut dyn Write) -> Result<(), RunError> {
    let signals = Signals::take().map_err(system("take over signals"))?;
    // Only marked, not locked in memory: `up` is to run anywhere, with no more memory than it needs.
    if !reclaim::mark() {
        tracing::debug!("not marked as a process that memory reclaim depends on");
    }
    let missing = missing_dirs(&options.dir);
    create_dir(&options.dir)?;
    let dir = options.dir.canonicalize().map_err(system("find the directory"))?;
    let addresses = [CONTROL_SOCKET_NAME, NBD_SOCKET_NAME].map(|name| ListenAddress::Unix(dir.join(name)));
    let gpu = GpuConfig { mode: options.gpu.unwrap_or_default(), ..GpuConfig::default() };
    // Checked before anything is created: an array that cannot be served would be left behind.
    let possible = addresses.iter().try_for_each(Listener::check).map_err(RunError::from);
    let possible = possible.and_then(|()| Gpus::check(&gpu).map_err(system("start the reactor")));
    let opening = possible.and_then(|()| {
        let (options, dir) = (options.clone(), dir.clone());
        unless_stopped(&signals, move || open_or_create(&options, &dir))?
    });
    let (opened, origin) = opening.inspect_err(|_| {
        for made in &missing {
            // A directory that is not empty stays; the error is the answer.
            let _ = std::fs::remove_dir(made);
        }
    })?;
    let daemon = Arc::new(
        Daemon::start(ServiceConfig {
            memory: DEFAULT_MEMORY,
            metadata_memory: None,
            resident: false,
            reactors: None,
            connections_max: DEFAULT_CONNECTIONS as usize,
            search: vec![dir.clone()],
            gpu,
            runtime_dir: Some(dir.clone()),
            state_dir: Some(dir.join(STATE_DIR_NAME)),
        })
        .map_err(system("start the reactor"))?,
    );
    let control = ControlServer::start(Arc::clone(&daemon), &dir.join(CONTROL_SOCKET_NAME))?;
    let mut opened = opened;
    opened.warnings.extend(lost_replacement_lines(daemon.arrays(), &opened));
    let mut warnings = opened.warnings.clone();
    warnings.extend(opened.left_out.iter().map(|left| left.reason.clone()));
    let array = opened.first().superblock.array;
    let served = daemon.listen(&ListenAddress::Unix(dir.join(NBD_SOCKET_NAME))).map_err(RunError::from);
    let serve_options = ServeOptions { force: options.force, ..ServeOptions::default() };
    let served = served.and_then(|_| Ok(serve(daemon.arrays(), opened, serve_options)?));
    let screen = served.and_then(|first| {
        for index in 0..first.members.len() {
            daemon.arrays().served.expect_member_at(array, index, member_path(&options.dir, index));
        }
        let report = daemon.arrays().status(Some(&array.to_string()))?.into_iter().next().unwrap_or(first);
        print(out, &report, &origin, &warnings, &Words::new(options, &dir)).map_err(system("print"))
    });
    if let Err(error) = screen {
        // The error is the answer; the daemon is stopped cleanly as far as possible.
        let _ = daemon.shutdown();
        return Err(error);
    }
    // Serves the other arrays that a command has imported before.
    let _imports = Imports::start(daemon.arrays(), &[]);
    until_stopped(&daemon, &signals, control, None, &mut || true)?;
    let last = daemon.reports_at_stop().into_iter().find(|report| report.uuid == array);
    writeln!(out, "{}", last_words(last.as_ref(), &again(options))).map_err(system("print"))
}

/// The last line: the state of the array when the daemon was told to stop.
fn last_words(last: Option<&ArrayReport>, again: &str) -> String {
    let Some(report) = last else { return format!("Stopped cleanly. '{again}' picks it up again.") };
    let lacks = PrintableLines(&report.status);
    if report.log.state == LogState::Refused {
        let rest = match report.log.yields_to_force {
            true => format!("; or accept the loss with '{again} --force'."),
            false => ". Where that cannot be done, 'scripts/recover.py --force' gets out what is left (docs/faults.md).".into(),
        };
        return format!(
            "Stopped. {lacks} Bring back members that are missing, or as they were last, then '{again}' again{rest}"
        );
    }
    if report.state != ArrayState::Failed {
        return format!("Stopped cleanly. '{again}' picks it up again.");
    }
    let absent = report.members.iter().filter(|member| member.state != MemberState::Online);
    let lines = absent.map(|member| {
        let reason = member.reason.as_ref().map(|reason| format!("  ({})", Printable(reason)));
        let name = Printable(&member.name);
        format!("\n  {:>3}  {:<10} {name}{}", member.index, member.state, reason.unwrap_or_default())
    });
    format!(
        "Stopped, and the array is FAILED. {lacks} Bring these back, as many as it needs, then '{again}' again:{}",
        lines.collect::<String>()
    )
}

/// The command that serves the array again, from the same working directory.
fn again(options: &UpOptions) -> String {
    match options.dir == Path::new(UP_DIR) {
        true => "calpe up".into(),
        false => format!("calpe up --dir {}", quoted(&options.dir)),
    }
}

/// How other commands reach this daemon.
struct Words {
    /// The option that commands need, if they do not find the daemon by themselves.
    option: String,
    control: String,
}

impl Words {
    fn new(options: &UpOptions, dir: &Path) -> Words {
        let control = quoted(&dir.join(CONTROL_SOCKET_NAME));
        let is_found = options.dir == Path::new(UP_DIR) && std::env::var_os("CALPE_SOCKET").is_none();
        Words { option: if is_found { String::new() } else { format!(" --socket {control}") }, control }
    }

    /// Completes the commands in a text with the option.
    fn complete(&self, text: &str) -> String {
        text.replace("'calpe ", &format!("'calpe{} ", self.option))
    }
}

/// The directories that are to be created for `dir`, the innermost first.
fn missing_dirs(dir: &Path) -> Vec<PathBuf> {
    let named = dir.ancestors().filter(|path| !path.as_os_str().is_empty());
    named.take_while(|path| path.symlink_metadata().is_err()).map(Path::to_path_buf).collect()
}

/// What was done to create or find the array, a line each.
type Origin = Vec<String>;

fn member_path(dir: &Path, index: usize) -> PathBuf {
    dir.join(format!("member-{index:02}.img"))
}

fn open_or_create(options: &UpOptions, dir: &Path) -> Result<(Opened, Origin), RunError> {
    // Two processes at once would take each other's new files for those of an interrupted creation.
    // Filesystems that cannot lock directories are used without the lock.
    let lock = File::open(dir).map_err(system("open the directory"))?;
    if let Err(TryLockError::WouldBlock) = lock.try_lock() {
        let what = "another 'calpe up' starts there at this moment: try again when it has";
        return Err(RunError::Unclear { dir: options.dir.clone(), what: what.into() });
    }
    // A member may have been replaced by a device elsewhere. Other arrays that were imported by a command are
    // remembered, too; they do not belong to this directory.
    let devices = remembered_devices(&dir.join(STATE_DIR_NAME));
    let place = |index: usize| member_path(&options.dir, index);
    let mut remembered: Vec<PathBuf> = devices.iter().map(|(_, path)| path.clone()).collect();
    remembered.extend(leftovers::present(place));
    let mut found = search_with(std::slice::from_ref(&options.dir), &remembered, DEFAULT_MEMBER_TIMEOUT);
    found.arrays.retain(|_, members| members.iter().any(|member| !member.remembered));
    found.check_whole()?;
    let unclear = |what: String| Err(RunError::Unclear { dir: dir.into(), what });
    let arrays: Vec<Uuid> = found.arrays.keys().copied().collect();
    match arrays[..] {
        [] => {
            if let Some(warning) = found.warnings.first() {
                return unclear(format!("holds what is or was a member: {warning}"));
            }
            let cleared = clear(options, &found, None)?;
            create(options, cleared)
        }
        [array] => {
            let members = found.arrays.remove(&array).unwrap_or_default();
            if leftovers::is_unfinished(&members, UP_NAME, place)
                && let Ok(cleared) = clear(options, &found, Some(array))
            {
                return create(options, cleared);
            }
            let mut opened = import::open(&members, options.force, DEFAULT_MEMBER_TIMEOUT)
                .map_err(|error| name_files(error, options, &members, &found))?;
            let own: Vec<Uuid> = opened.first().seats.iter().map(|seat| seat.uuid).collect();
            opened.explain_missing(&found, |index, device| {
                let known = devices.iter().find(|(known, _)| *known == device).map(|(_, path)| path.clone());
                match own.contains(&device) {
                    true => {
                        Some(known.filter(|path| path.parent() != Some(dir)).unwrap_or_else(|| place(index)))
                    }
                    // A replacement that was being built is not in the member's place.
                    false => known,
                }
            });
            let told: Vec<String> = opened.not_told(&found.warnings).cloned().collect();
            opened.warnings.splice(0..0, told);
            let origin = picked_up(options, &opened.first().superblock);
            Ok((opened, origin))
        }
        _ => unclear(several(&found)),
    }
}

/// Removes what an interrupted creation has left. Returns a line about it.
fn clear(options: &UpOptions, found: &Search, array: Option<Uuid>) -> Result<Option<String>, RunError> {
    let files = leftovers::present(|index| member_path(&options.dir, index));
    let unclear = |what: String| RunError::Unclear { dir: options.dir.clone(), what };
    leftovers::remove(&files, array).map_err(|kept| match kept {
        Kept::Device(error) => unclear(format!("holds what may be a member: {error}")),
        Kept::Used(path) => match found.unusable.iter().find(|unusable| unusable.path == path) {
            Some(unusable) => {
                unclear(format!("{}: move it away, or choose another directory with --dir", unusable.reason))
            }
            None => unclear(format!(
                "{} is there and holds no superblock: move it away, or choose another directory with --dir",
                shown(&path)
            )),
        },
    })?;
    Ok((!files.is_empty()).then(|| {
        let left = Count::of(files.len(), "file");
        format!("an earlier creation was interrupted: its {left} {} removed", left.were())
    }))
}

/// The error text for a directory with members of several arrays. All arrays of `up` have one name,
/// so no daemon serves two of them.
fn several(found: &Search) -> String {
    let line = |(array, members): (&Uuid, &Vec<Found>)| {
        let name = members.first().map_or("", |member| member.superblock.name.as_str());
        let files: Vec<String> = members.iter().map(|member| shown(&member.path).to_string()).collect();
        format!("\n'{}' ({array}): {}", Printable(name), files.join(", "))
    };
    format!(
        "holds members of {} arrays: move those of each array but one to a directory of their own, and name that with --dir{}",
        found.arrays.len(),
        found.arrays.iter().map(line).collect::<String>()
    )
}

/// Adds the missing files to the error of an array that cannot start: people know files, not uuids.
fn name_files(error: ImportError, options: &UpOptions, members: &[Found], found: &Search) -> RunError {
    let width = members.first().map_or(0, |found| found.superblock.members.len());
    let gone: Vec<String> = (0..width)
        .map(|index| member_path(&options.dir, index))
        .filter(|path| !path.exists())
        .map(|path| shown(&path).to_string())
        .collect();
    let ImportError::Assembly { lane, source, left_out } = &error else { return error.into() };
    // A member that was moved or replaced may be elsewhere.
    let is_member = |path: &PathBuf| members.iter().any(|member| member.path == *path);
    let unusable: Vec<&String> = found
        .unusable
        .iter()
        .filter(|unusable| !is_member(&unusable.path))
        .map(|unusable| &unusable.reason)
        .filter(|reason| !left_out.contains(reason))
        .collect();
    if gone.is_empty() && left_out.is_empty() && unusable.is_empty() {
        return error.into();
    }
    let again = again(options);
    let force = match error.needs_force() {
        true => format!(", or start without them with '{again} --force'"),
        false => String::new(),
    };
    let lane = lane.map_or_else(String::new, |lane| format!("lane {lane}: "));
    let mut lines = vec![format!("{lane}{source}")];
    if !gone.is_empty() {
        lines.push(format!("files that are not there: {}", gone.join(", ")));
    }
    lines.extend(left_out.iter().chain(unusable).map(|line| format!("left out: {line}")));
    lines.push(format!("bring them back, then '{again}' again{force}"));
    let what = lines.join("\n");
    RunError::Unclear { dir: options.dir.clone(), what }
}

/// `cleared`: a line about leftovers that were removed before, if any were.
fn create(options: &UpOptions, cleared: Option<String>) -> Result<(Opened, Origin), RunError> {
    let (data, parity) = (options.data.unwrap_or(UP_DATA), options.parity.unwrap_or(UP_PARITY));
    let width = usize::from(data) + usize::from(parity);
    let members: Vec<PathBuf> = (0..width).map(|index| member_path(&options.dir, index)).collect();
    let chunk = options.chunk.map_or(u64::from(DEFAULT_CHUNK), |chunk| chunk.0);
    let plan = CreatePlan::new(CreateRequest {
        name: UP_NAME.into(),
        data,
        parity,
        // A value out of range is refused, not wrapped.
        chunk: u32::try_from(chunk).unwrap_or(u32::MAX),
        checksum: options.checksum.unwrap_or(DEFAULT_CHECKSUM),
        volume: options.volume.unwrap_or(VolumeKind::Plain),
        volume_bytes: Some(options.size.map_or(UP_BYTES, |size| size.0)),
        lanes: options.lanes.unwrap_or(1),
        members,
        force: false,
    })?;
    let created = plan.execute(clock::unix_seconds())?;
    let bytes = created.members.first().map_or(0, |(device, _)| device.facts().bytes);
    let mut origin = vec![format!(
        "created {} of {} in {}",
        Count::of(width, "sparse file"),
        HumanSize(bytes),
        shown(&options.dir)
    )];
    origin.extend(cleared);
    origin.extend(space_note(&options.dir, bytes.saturating_mul(width as u64)));
    Ok((import::opened_new(created)?, origin))
}

/// A warning when the filesystem cannot hold the members at their full size.
fn space_note(dir: &Path, bytes: u64) -> Option<String> {
    let fs = nix::sys::statvfs::statvfs(dir).ok()?;
    let free = fs.blocks_available() as u64 * fs.fragment_size() as u64;
    (free < bytes).then(|| {
        let (has, may) = two_sizes(free, bytes);
        format!("the filesystem has {has} free, the files may grow to {may}: writes fail with 'no space' when it is full")
    })
}

/// Which options do not count because the array exists.
fn picked_up(options: &UpOptions, superblock: &Superblock) -> Origin {
    let geometry = &superblock.geometry;
    let mut ignored = Vec::new();
    let mut compare = |option: &str, asked: Option<String>, is: String| {
        if let Some(asked) = asked.filter(|asked| *asked != is) {
            ignored.push(format!("{option} {asked} does not count: the array has {is}, and keeps it"));
        }
    };
    compare("--data", options.data.map(|n| n.to_string()), geometry.data.to_string());
    compare("--parity", options.parity.map(|n| n.to_string()), geometry.parity.to_string());
    compare("--lanes", options.lanes.map(|n| n.to_string()), superblock.part.lanes.count.to_string());
    let sizes = [
        ("--size", options.size, superblock.volume_bytes()),
        ("--chunk", options.chunk, u64::from(geometry.chunk)),
    ];
    for (option, asked, is) in sizes {
        let (told, is) = two_sizes(asked.map_or(is, |asked| asked.0), is);
        compare(option, asked.map(|_| told.to_string()), is.to_string());
    }
    compare("--checksum", options.checksum.map(|kind| kind.to_string()), superblock.checksum.to_string());
    let mut origin =
        vec![format!("picked up the array in {}, with the geometry it has", shown(&options.dir))];
    origin.extend(ignored);
    origin
}

fn print(
    out: &mut dyn Write,
    report: &ArrayReport,
    origin: &[String],
    warnings: &[String],
    words: &Words,
) -> io::Result<()> {
    let uri = Printable(report.uris.first().map_or("", String::as_str));
    writeln!(
        out,
        "Array '{}': {} data + {} parity, {} volume, {}",
        report.name,
        report.data,
        report.parity,
        HumanSize(report.volume.bytes),
        report.state
    )?;
    for line in origin {
        writeln!(out, "  {line}")?;
    }
    writeln!(out, "\n  {uri}\n")?;
    writeln!(out, "Use it:")?;
    writeln!(out, "  nbdinfo '{uri}'")?;
    writeln!(out, "  nbdcopy disk.img '{uri}'")?;
    writeln!(out, "  qemu-img convert -n -O raw disk.qcow2 '{uri}'")?;
    writeln!(out, "  sudo calpe --socket {} attach {} /dev/nbd0", words.control, report.name)?;
    writeln!(out, "\nMembers:")?;
    for member in &report.members {
        let reason =
            member.reason.as_ref().map(|reason| format!("  ({})", Printable(reason))).unwrap_or_default();
        let state = if member.state == MemberState::Online { "" } else { "  <--" };
        writeln!(
            out,
            "  {:>3}  {:<10} {}{reason}{state}",
            member.index,
            member.state,
            Printable(&member.name)
        )?;
    }
    writeln!(out, "  parity by {}", report.engine.codec)?;
    for line in [&report.status, &report.action].into_iter().filter(|line| !line.is_empty()).chain(warnings) {
        writeln!(out, "\n{}", PrintableLines(&words.complete(line)))?;
    }
    writeln!(out, "\n{} tells more, Ctrl-C stops cleanly.", words.complete("'calpe status'"))?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_members_of_two_arrays_is_told_which_are_whose() {
        let dir = tempfile::tempdir().unwrap();
        let array = import::tests::created_in(dir.path(), UP_NAME, 1, 1);
        for index in 0..2 {
            std::fs::rename(dir.path().join(format!("m{index}")), dir.path().join(format!("n{index}")))
                .unwrap();
        }
        import::tests::created_in(dir.path(), UP_NAME, 1, 1);
        let found = search_with(&[dir.path().into()], &[], DEFAULT_MEMBER_TIMEOUT);
        let told = several(&found);
        assert!(told.starts_with("holds members of 2 arrays: move those of each array but one"), "{told}");
        let files = ["n0", "n1"].map(|name| dir.path().join(name).display().to_string()).join(", ");
        assert!(told.contains(&format!("'calpe' ({array}): {files}")), "{told}");
        assert!(!told.contains("calpe serve"), "{told}");
    }
}
