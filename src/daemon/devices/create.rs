//! Creating an array, in two steps: [`CreatePlan::new`] opens and locks every device, refuses what
//! must not be overwritten, and changes nothing; [`CreatePlan::execute`] writes. Between the two
//! the plan can be shown.
//!
//! Invariants: nothing is written before everything is checked; a creation that fails on the way restores
//! what the devices held, and their space; no device holds a superblock of the new array while an older copy
//! of another array could outrank it. Must not know of running arrays.

use crate::daemon::devices::lanes::DeviceLanes;
use crate::daemon::devices::preparation::{advise, create_file, step};
use crate::daemon::devices::room::{Wanted, check_room};
use crate::daemon::devices::superblocks::{
    allocated_on, check_answers, reserve_regions, reserved_of, reserved_ranges, signatures, windows_of,
    wipe_ends, wiped_ranges, write_first_superblocks,
};
use crate::daemon::devices::undo::Undo;
use crate::daemon::drill;
use crate::member::{Access, Device, DeviceError, DeviceKind, RemoteError, is_remote};
use calpe_core::array::NewArray;
use calpe_core::format::{
    ArrayLayout, ArrayShape, ChecksumKind, Geometry, LanePart, LayoutError, Region, Signature, Superblock,
    VolumeKind, check_array_name, layout_for, member_bytes_for,
};
use calpe_core::units::{Count, HumanSize, LaneIndex, SECTOR_BYTES, quoted, shown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use uuid::Uuid;

/// Chunk size when none is asked for.
pub(crate) const DEFAULT_CHUNK: u32 = 64 * 1024;

/// Sector of an array that has a member with larger sectors than [`SECTOR_BYTES`].
const LARGE_SECTOR: u32 = 4096;

/// Checksum when none is asked for.
pub(crate) const DEFAULT_CHECKSUM: ChecksumKind = ChecksumKind::Blake3;

/// What is to be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CreateRequest {
    /// Name of the array.
    pub name: String,
    /// Data chunks of a stripe.
    pub data: u16,
    /// Parity chunks of a stripe.
    pub parity: u16,
    /// Bytes of a chunk.
    pub chunk: u32,
    /// Checksum of each block.
    pub checksum: ChecksumKind,
    /// Kind of volume.
    pub volume: VolumeKind,
    /// Size of the volume; none for the largest that fits. With a size, members that do not exist
    /// are created as sparse files.
    pub volume_bytes: Option<u64>,
    /// Lanes that the volume is cut into.
    pub lanes: u16,
    /// `data + parity` devices, in order of member index.
    pub members: Vec<PathBuf>,
    /// Overwrite recognised data.
    pub force: bool,
}

/// Why an array cannot be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    /// The name is not allowed.
    #[error("{0}")]
    Name(
        /// What is wrong with it.
        String,
    ),
    /// The shape or size is not possible.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Not as many members as chunks in a stripe.
    #[error("{data} data and {parity} parity need {}, {found} given", Count(u64::from(*.data) + u64::from(*.parity), "member"))]
    MemberCount {
        /// Data chunks.
        data: u16,
        /// Parity chunks.
        parity: u16,
        /// Members given.
        found: usize,
    },
    /// A kind of volume that is planned.
    #[error("{what} is not supported by this version")]
    Unsupported {
        /// What was asked for.
        what: String,
    },
    /// One device twice.
    #[error(
        "{} and {} are the same device: each member needs a device of its own",
        shown(first),
        shown(second)
    )]
    Duplicate {
        /// One path.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A path that does not exist, and no size to create a file with.
    #[error("{}: does not exist: create it first, or give --size to have a sparse file created", shown(path))]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// A path under /dev that does not exist.
    #[error(
        "{}: does not exist, and no file is created under /dev: check the name of the device",
        shown(path)
    )]
    MissingDevice {
        /// The path.
        path: PathBuf,
    },
    /// A device cannot be opened or used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The devices hold data.
    #[error("{}", list_recognised(.0))]
    Recognised(
        /// For each device that is not blank, what was found.
        Vec<(PathBuf, Vec<Signature>)>,
    ),
    /// An empty file at the path of a member that could be created.
    #[error(
        "{}: has 0 B, as a file that an interrupted creation leaves: remove it to have it created, or give it its size",
        shown(path)
    )]
    Empty {
        /// The path.
        path: PathBuf,
    },
    /// A pseudo file of the kernel.
    #[error("{}: is a view of the kernel, and no storage: name a file or a block device", shown(path))]
    NoStorage {
        /// The path.
        path: PathBuf,
    },
    /// A step failed, and everything was restored.
    #[error("creation of '{name}' failed and was taken back: {source}")]
    TakenBack {
        /// Name of the array.
        name: String,
        /// What failed.
        source: DeviceError,
    },
    /// A step failed, and not everything could be restored.
    #[error("creation of '{name}' failed: {source}\nand not everything could be taken back:\n{}", left.join("\n"))]
    LeftBehind {
        /// Name of the array.
        name: String,
        /// What failed.
        source: Box<DeviceError>,
        /// What could not be restored, a line each.
        left: Vec<String>,
    },
}

impl CreateError {
    /// Whether the request is wrong in itself, whatever the devices are: its name, shape, size or number of
    /// members.
    #[must_use]
    pub(crate) fn is_usage(&self) -> bool {
        match self {
            CreateError::Name(_) | CreateError::MemberCount { .. } | CreateError::Unsupported { .. } => true,
            CreateError::Layout(LayoutError::TooSmall { .. } | LayoutError::Sector { .. }) => false,
            CreateError::Layout(_) => true,
            _ => false,
        }
    }
}

fn list_recognised(found: &[(PathBuf, Vec<Signature>)]) -> String {
    let lines: Vec<_> =
        each_once(found).map(|(path, what)| format!("{}: holds {what}", shown(path))).collect();
    format!("{}\nnothing was changed; use --force to create over it, which destroys it", lines.join("\n"))
}

/// Each signature once for each device: most formats leave several.
fn each_once(found: &[(PathBuf, Vec<Signature>)]) -> impl Iterator<Item = (&Path, &Signature)> {
    found.iter().flat_map(|(path, signatures)| {
        let first = |at: &usize| !signatures[..*at].iter().any(|before| before.name == signatures[*at].name);
        (0..signatures.len()).filter(first).map(|at| (path.as_path(), &signatures[at]))
    })
}

/// One device of a plan.
#[derive(Debug)]
struct Planned {
    path: PathBuf,
    /// Open and locked; none for a file that is to be created.
    device: Option<Device>,
}

/// A creation that has been checked. Holds the locks of its devices.
#[derive(Debug)]
pub(crate) struct CreatePlan {
    request: CreateRequest,
    members: Vec<Planned>,
    layout: ArrayLayout,
    /// Size of files to be created.
    file_bytes: Option<u64>,
    overwritten: Vec<(PathBuf, Vec<Signature>)>,
}

/// What was created.
#[derive(Debug)]
pub(crate) struct Created {
    /// Identity of the array.
    pub array: Uuid,
    /// Its shape, with all lanes together.
    pub geometry: Geometry,
    /// Its devices, still open and locked, with the superblocks of their lanes, in order of member index.
    pub members: Vec<(Device, Vec<Superblock>)>,
}

impl CreatePlan {
    /// Checks everything. Opens and locks what exists, changes nothing.
    ///
    /// # Errors
    /// Why it cannot be created.
    pub(crate) fn new(request: CreateRequest) -> Result<CreatePlan, CreateError> {
        check_array_name(&request.name).map_err(CreateError::Name)?;
        let mut shape = request.shape();
        shape.check()?;
        request.check_supported()?;
        if request.members.len() != usize::from(shape.width()) {
            let CreateRequest { data, parity, .. } = request;
            return Err(CreateError::MemberCount { data, parity, found: request.members.len() });
        }
        let file_bytes = request.volume_bytes.map(|bytes| member_bytes_for(bytes, shape)).transpose()?;
        check_answers(&request.members, drill::device_limit())?;
        let members = open_all(&request.members, file_bytes.is_some())?;
        let overwritten = find_signatures(&members)?;
        if !overwritten.is_empty() && !request.force {
            return Err(CreateError::Recognised(overwritten));
        }
        let opened = || members.iter().filter_map(|member| member.device.as_ref());
        shape.sector = sector_for(opened());
        let Some(smallest) = opened().map(|device| device.facts().bytes).chain(file_bytes).min() else {
            return Err(LayoutError::NoData.into());
        };
        let layout = layout_for(smallest, shape, request.volume_bytes)
            .map_err(|error| name_smallest(error, opened(), smallest))?;
        Ok(CreatePlan { request, members, layout, file_bytes, overwritten })
    }

    /// The regions of each lane.
    fn regions(&self) -> &[Region] {
        &self.layout.of_lane[0].1
    }

    /// Whether there is room for what [`CreatePlan::execute`] would take, as far as can be determined without
    /// taking it.
    ///
    /// # Errors
    /// For which member there is none.
    pub(crate) fn check_room(&self) -> Result<(), CreateError> {
        let allocated = reserved_of(self.layout.lanes, self.regions());
        let wanted = |member: &Planned| Wanted {
            path: member.path.clone(),
            new_file: if member.device.is_none() { self.file_bytes } else { None },
            allocated,
        };
        Ok(check_room(&self.members.iter().map(wanted).collect::<Vec<_>>())?)
    }

    /// What would be done, a line each, the array first.
    #[must_use]
    pub(crate) fn describe(&self) -> Vec<String> {
        let CreateRequest { data, parity, chunk, .. } = self.request;
        let volume_bytes = self.layout.volume_bytes;
        let lanes = match self.layout.lanes.count {
            1 => String::new(),
            lanes => format!(", {lanes} lanes"),
        };
        let mut lines = vec![format!(
            "array '{}': {data} data + {parity} parity, chunk {}, checksum {}, volume of {} ({volume_bytes} bytes){lanes}",
            self.request.name,
            HumanSize(u64::from(chunk)),
            self.request.checksum,
            HumanSize(volume_bytes),
        )];
        for (member, index) in self.members.iter().zip(0..) {
            let path = shown(&member.path);
            lines.push(match (&member.device, self.file_bytes) {
                (Some(device), _) => {
                    format!("member {index}: {path}, {}", HumanSize(device.facts().exact_bytes))
                }
                (None, bytes) => {
                    format!("member {index}: {path}, a new sparse file of {}", HumanSize(bytes.unwrap_or(0)))
                }
            });
        }
        // Allocation on a server is the server's own matter.
        let allocated = |member: &Planned| match &member.device {
            Some(device) if device.facts().kind == DeviceKind::File => {
                Some(allocated_on(device, self.layout.part(LaneIndex(0)), self.regions()))
            }
            Some(_) => None,
            None => Some(reserved_of(self.layout.lanes, self.regions())),
        };
        let files: Vec<u64> = self.members.iter().filter_map(allocated).collect();
        if let (Some(least), Some(most)) = (files.iter().min(), files.iter().max()) {
            let each =
                if files.len() == self.members.len() { "each member" } else { "each member that is a file" };
            let up_to = if least < most { "up to " } else { "" };
            let most = HumanSize(*most);
            lines.push(format!("{up_to}{most} of {each} allocated at once, for superblocks and log"));
        }
        lines.extend(self.notes());
        lines
    }

    /// What to do next, a line each: a command that serves the array, and what makes every start of the
    /// daemon serve it.
    #[must_use]
    pub(crate) fn next_steps(&self) -> Vec<String> {
        let mut places: Vec<PathBuf> = Vec::new();
        for member in &self.members {
            let path = &member.path;
            let absolute = || std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let place = match is_remote(path) {
                true => path.clone(),
                // A member in /dev is no reason to search all of it.
                false => match absolute().parent() {
                    Some(parent) if parent != Path::new("/dev") => parent.to_path_buf(),
                    _ => absolute(),
                },
            };
            if !places.contains(&place) {
                places.push(place);
            }
        }
        let name = &self.request.name;
        let dirs: Vec<String> = places.iter().map(|place| format!(" --dir {}", quoted(place))).collect();
        // A JSON string is a TOML string.
        let search: Vec<String> = places
            .iter()
            .map(|place| serde_json::Value::from(place.display().to_string()).to_string())
            .collect();
        vec![
            format!(
                "serve it with 'calpe import {name}{}', or by the configuration of 'calpe serve':",
                dirs.concat()
            ),
            "  [[array]]".to_owned(),
            format!("  name = \"{name}\""),
            format!("  search = [{}]", search.join(", ")),
        ]
    }

    /// Warnings, a line each: data that is destroyed, bytes that are left over.
    #[must_use]
    pub(crate) fn notes(&self) -> Vec<String> {
        let destroyed =
            each_once(&self.overwritten).map(|(path, what)| format!("{}: {what} is destroyed", shown(path)));
        let left_over = self.members.iter().filter_map(|member| {
            let left = self.layout.leftover_bytes(member.device.as_ref()?.facts().bytes);
            // Less than a slot could not be used anyway.
            (left >= u64::from(self.request.chunk) && left > LEFTOVER_TOLD)
                .then(|| format!("{}: {} at its end are left over", shown(&member.path), HumanSize(left)))
        });
        destroyed.chain(left_over).collect()
    }

    /// Creates the files, writes the superblocks, discards the old content.
    ///
    /// # Errors
    /// When a device fails. Then files that were created are removed again, and what existed is as
    /// it was, in content and in space; where even that fails, the error says so.
    pub(crate) fn execute(self, created_unix: u64) -> Result<Created, CreateError> {
        let name = self.request.name.clone();
        let mut taken = Vec::new();
        match self.write(created_unix, &mut taken) {
            Ok(superblocks) => Ok(Created {
                array: superblocks[0][0].array,
                geometry: superblocks[0][0].array_geometry(),
                members: taken.into_iter().map(Taken::into_device).zip(superblocks).collect(),
            }),
            Err(source) => {
                let left: Vec<_> = taken.into_iter().filter_map(|taken| taken.give_back().err()).collect();
                if left.is_empty() {
                    return Err(CreateError::TakenBack { name, source });
                }
                Err(CreateError::LeftBehind { name, source: Box::new(source), left })
            }
        }
    }

    /// Adds the devices that it reaches to `taken`, also on failure. Steps that may fail for lack of space
    /// come before anything is written; steps that cannot be undone come last, when the array exists.
    fn write(self, created_unix: u64, taken: &mut Vec<Taken>) -> Result<Vec<Vec<Superblock>>, DeviceError> {
        drill::look();
        for member in self.members {
            taken.push(match member.device {
                Some(device) => {
                    Taken { device: Arc::new(device), before: Before::Existed(Arc::new(Undo::default())) }
                }
                None => {
                    let bytes = self.file_bytes.expect("files are created only with a size");
                    let device = create_file(&member.path, bytes, drill::device_limit())?;
                    Taken { device: Arc::new(device), before: Before::Missing }
                }
            });
        }
        let sector = sector_for(taken.iter().map(|taken| &*taken.device));
        let superblocks = new_superblocks(&self.request, &self.layout, sector, created_unix);
        let (part, regions) = (self.layout.part(LaneIndex(0)), Arc::new(self.layout.of_lane[0].1.clone()));
        for taken in taken.iter_mut().filter(|taken| taken.existed()) {
            let regions = Arc::clone(&regions);
            let undo = taken.step("read what it holds", move |device| {
                Undo::of(device, &wiped_ranges(device, part), &reserved_ranges(device, part, &regions))
            });
            taken.before = Before::Existed(Arc::new(undo?));
        }
        for taken in &*taken {
            let regions = Arc::clone(&regions);
            taken.step("set space aside", move |device| reserve_regions(device, part, &regions))?;
        }
        for (taken, superblocks) in taken.iter().zip(&superblocks) {
            let (existed, superblocks) = (taken.existed(), superblocks.clone());
            taken.step("write to it", move |device| {
                if existed {
                    wipe_ends(device, part)?;
                }
                write_first_superblocks(device, &superblocks)
            })?;
            drill::point("create");
        }
        for (taken, superblocks) in taken.iter().zip(&superblocks) {
            let superblock = superblocks[0].clone();
            taken.step("read it again", move |device| check_own(device, &superblock))?;
        }
        for taken in taken.iter().filter(|taken| taken.existed()) {
            let regions = Arc::clone(&regions);
            taken.step("give up its old content", move |device| give_up_content(device, part, &regions))?;
        }
        Ok(superblocks)
    }
}

/// A device that a creation has changed or is about to change.
#[derive(Debug)]
struct Taken {
    /// Shared with the thread that carries out a step on it.
    device: Arc<Device>,
    before: Before,
}

/// What was there before.
#[derive(Debug)]
enum Before {
    Missing,
    Existed(Arc<Undo>),
}

impl Taken {
    fn existed(&self) -> bool {
        matches!(self.before, Before::Existed(_))
    }

    /// Carries out a step on it, with a time limit.
    fn step<T: Send + 'static>(
        &self,
        action: &str,
        call: impl FnOnce(&Device) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<T, DeviceError> {
        step(&self.device, action, drill::device_limit(), call)
    }

    /// The device itself, when all steps have ended.
    fn into_device(self) -> Device {
        Arc::into_inner(self.device).expect("a step that has ended has let go of it")
    }

    /// Restores it after a failure. The error names the device.
    fn give_back(self) -> Result<(), String> {
        let result = match &self.before {
            Before::Missing => self
                .step("remove it again", |device| {
                    let removed = device.remove_file();
                    removed.map_err(|source| DeviceError::from_io(device.path(), "remove it again", source))
                })
                .map_err(|error| advise(error, "remove it when that answers")),
            Before::Existed(undo) => {
                let undo = Arc::clone(undo);
                self.step("give back what it held", move |device| undo.give_back(device)).map_err(|error| {
                    let advice =
                        "what it held may be overwritten: when that answers, --force creates over it";
                    advise(error, advice)
                })
            }
        };
        result.map_err(|error| error.to_string())
    }
}

/// Fewest bytes left over on a member that are reported: rounding to regions and blocks leaves up to a few
/// MiB on every member.
const LEFTOVER_TOLD: u64 = 4 << 20;

impl CreateRequest {
    fn shape(&self) -> ArrayShape {
        let &CreateRequest { data, parity, chunk, lanes, .. } = self;
        ArrayShape { data, parity, chunk, sector: SECTOR_BYTES as u32, lanes }
    }

    fn check_supported(&self) -> Result<(), CreateError> {
        match self.volume {
            VolumeKind::Cas => Err(CreateError::Unsupported { what: "a volume of kind cas".into() }),
            // Lanes would share one connection, on which a server tells once what concerns them all.
            VolumeKind::Plain if self.lanes > 1 && self.members.iter().any(|path| is_remote(path)) => {
                Err(CreateError::Unsupported { what: "an array of several lanes with remote members".into() })
            }
            VolumeKind::Plain => Ok(()),
        }
    }
}

fn open_all(paths: &[PathBuf], may_create: bool) -> Result<Vec<Planned>, CreateError> {
    let mut members: Vec<Planned> = Vec::with_capacity(paths.len());
    for path in paths {
        if let Some(first) = members.iter().find(|member| member.is(path)) {
            return Err(CreateError::Duplicate { first: first.path.clone(), second: path.clone() });
        }
        let device = match Device::open(path, Access::Exclusive) {
            // Its size, and whether it can be written, mean nothing.
            Ok(_)
            | Err(DeviceError::Permission { .. } | DeviceError::ReadOnly { .. } | DeviceError::Io { .. })
                if is_of_the_kernel(path) =>
            {
                return Err(CreateError::NoStorage { path: path.clone() });
            }
            Ok(device)
                if device.facts().exact_bytes == 0
                    && device.facts().kind == DeviceKind::File
                    && may_create =>
            {
                return Err(CreateError::Empty { path: path.clone() });
            }
            Ok(device) => Some(device),
            Err(DeviceError::NotFound { .. }) => {
                check_creatable(path, may_create)?;
                None
            }
            Err(error) => return Err(error.into()),
        };
        members.push(Planned { path: path.clone(), device });
    }
    Ok(members)
}

/// Whether a file is a pseudo file of the kernel, not storage.
fn is_of_the_kernel(path: &Path) -> bool {
    use nix::sys::statfs::{PROC_SUPER_MAGIC, SYSFS_MAGIC, statfs};
    let is_view =
        |path| statfs(path).is_ok_and(|fs| [PROC_SUPER_MAGIC, SYSFS_MAGIC].contains(&fs.filesystem_type()));
    path.is_file() && is_view(path)
}

impl Planned {
    fn is(&self, path: &Path) -> bool {
        match &self.device {
            Some(device) => device.is_at(path),
            // Neither exists: they would be one file if their paths are one, spelled in two ways.
            None => same_place(&self.path, path),
        }
    }
}

/// Whether two paths of files that do not exist would be the same file.
fn same_place(first: &Path, second: &Path) -> bool {
    let place = |path: &Path| {
        let absolute = std::path::absolute(path).ok()?;
        Some((absolute.parent()?.canonicalize().ok()?, absolute.file_name()?.to_owned()))
    };
    first == second || place(first).is_some_and(|first| Some(first) == place(second))
}

fn check_creatable(path: &Path, may_create: bool) -> Result<(), CreateError> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let parent = absolute.parent().unwrap_or(Path::new("/"));
    let real_parent = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
    // Files in /dev/shm are ordinary files.
    let among_devices = |path: &Path| path.starts_with("/dev") && !path.starts_with("/dev/shm");
    if among_devices(&absolute) || among_devices(&real_parent) {
        return Err(CreateError::MissingDevice { path: path.to_owned() });
    }
    Device::check_new_name(path)?;
    if !may_create {
        return Err(CreateError::Missing { path: path.to_owned() });
    }
    if !parent.is_dir() {
        return Err(DeviceError::NotFound { path: path.to_owned() }.into());
    }
    Ok(())
}

fn find_signatures(members: &[Planned]) -> Result<Vec<(PathBuf, Vec<Signature>)>, CreateError> {
    let mut found = Vec::new();
    for member in members {
        if let Some(device) = &member.device {
            let signatures = signatures(device)?;
            if !signatures.is_empty() {
                found.push((member.path.clone(), signatures));
            }
        }
    }
    Ok(found)
}

fn sector_for<'d>(devices: impl Iterator<Item = &'d Device>) -> u32 {
    let small = |device: &Device| u64::from(device.facts().sector) <= SECTOR_BYTES;
    let mut devices = devices;
    if devices.all(small) { SECTOR_BYTES as u32 } else { LARGE_SECTOR }
}

/// Adds to the error which device is too small.
fn name_smallest<'d>(
    error: LayoutError,
    mut devices: impl Iterator<Item = &'d Device>,
    smallest: u64,
) -> CreateError {
    match (&error, devices.find(|device| device.facts().bytes == smallest)) {
        (&LayoutError::TooSmall { needed, .. }, Some(device)) => {
            let bytes = device.facts().exact_bytes;
            DeviceError::TooShort { path: device.path().to_owned(), bytes, needed }.into()
        }
        _ => error.into(),
    }
}

/// Discards what the regions of all lanes hold, and sets space aside again where it has to be.
fn give_up_content(device: &Device, part: LanePart, regions: &[Region]) -> Result<(), DeviceError> {
    for window in windows_of(part, device.facts().bytes) {
        let window = device.window(&window);
        for region in regions {
            // A device that cannot discard keeps old content there, which does no harm.
            window.discard(region.offset.0, region.len)?;
        }
    }
    reserve_regions(device, part, regions)
}

/// The first superblocks of each member, one for each lane.
fn new_superblocks(
    request: &CreateRequest,
    layout: &ArrayLayout,
    sector: u32,
    created_unix: u64,
) -> Vec<Vec<Superblock>> {
    let uuid = Uuid::new_v4();
    let devices: Vec<_> = request.members.iter().map(|_| Uuid::new_v4()).collect();
    let mut members = vec![Vec::new(); devices.len()];
    for (lane, (geometry, regions)) in layout.lanes.indices().zip(&layout.of_lane) {
        // A uuid has a few fixed bits, at different places of its halves; the XOR of both halves has none.
        let (high, low) = Uuid::new_v4().as_u64_pair();
        let of_lane = NewArray {
            name: request.name.clone(),
            uuid,
            created_unix,
            epoch_id: (high ^ low).max(1),
            part: layout.part(lane),
            geometry: Geometry { sector, ..*geometry },
            regions: regions.clone(),
            checksum: request.checksum,
            secret: random_secret(),
        };
        for (member, superblock) in members.iter_mut().zip(of_lane.superblocks(&devices)) {
            member.push(superblock);
        }
    }
    members
}

/// 16 random bytes. The fixed bits of a uuid lie at different places of its halves: the XOR of two
/// uuids, one with its halves swapped, has none.
fn random_secret() -> [u8; 16] {
    (Uuid::new_v4().as_u128() ^ Uuid::new_v4().as_u128().rotate_left(64)).to_ne_bytes()
}

/// Checks that a device still holds the superblocks that were written to it. Two URIs, or a URI and a path,
/// may lead to one place, and a server may lose writes.
fn check_own(device: &Device, superblock: &Superblock) -> Result<(), DeviceError> {
    let path = device.path().into();
    let lanes = DeviceLanes::read(device);
    // What is wrong with the first lane of which anything is.
    let found = lanes.unusable().next().map_or_else(|| lanes.first(), |(_, error)| Err(error));
    match found {
        Ok(found) if found.device == superblock.device => Ok(()),
        Ok(found) if found.array == superblock.array => Err(DeviceError::NamedTwice { path }),
        _ if device.facts().kind == DeviceKind::Remote => {
            let what = "the server does not keep what is written to it";
            Err(DeviceError::Remote { path, source: RemoteError::Changed(what.into()) })
        }
        Err(error) => Err(DeviceError::NotKept { path, what: error.to_string() }),
        Ok(_) => Err(DeviceError::NotKept { path, what: "it is a member of another array now".into() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::devices::superblocks::{read_copies, read_superblock, write_superblock};
    use calpe_core::format::{MemberSet, region_end};
    use std::fs::{self, File};

    const MIB: u64 = 1 << 20;

    fn request(dir: &Path, data: u16, parity: u16) -> CreateRequest {
        CreateRequest {
            name: "tank".into(),
            data,
            parity,
            chunk: DEFAULT_CHUNK,
            checksum: ChecksumKind::Blake3,
            volume: VolumeKind::Plain,
            volume_bytes: Some(8 * MIB),
            lanes: 1,
            members: (0..data + parity).map(|i| dir.join(format!("m{i}"))).collect(),
            force: false,
        }
    }

    fn make_files(request: &CreateRequest, bytes: u64) {
        for path in &request.members {
            File::create(path).unwrap().set_len(bytes).unwrap();
        }
    }

    fn refusal(request: CreateRequest) -> CreateError {
        CreatePlan::new(request).unwrap_err()
    }

    fn listing(dir: &Path) -> Vec<PathBuf> {
        let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        names
    }

    #[test]
    fn new_files_become_members_that_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path(), 4, 2);
        let plan = CreatePlan::new(request.clone()).unwrap();
        assert_eq!(listing(dir.path()), Vec::<PathBuf>::new(), "a plan changes nothing");
        assert!(plan.describe()[1].contains("m0, a new sparse file of"), "{:?}", plan.describe());
        let created = plan.execute(1234).unwrap();
        assert_eq!(created.geometry.volume_bytes, 8 * MIB);
        for (index, (device, superblocks)) in created.members.iter().enumerate() {
            let [superblock] = &superblocks[..] else { panic!("one lane") };
            assert_eq!(device.path(), request.members[index]);
            assert_eq!(read_superblock(device).as_ref(), Ok(superblock));
            assert_eq!(usize::from(superblock.member.0), index);
            assert_eq!((superblock.array, superblock.created_unix), (created.array, 1234));
            assert!(superblock.clean && superblock.epoch.live == MemberSet::first(6));
            assert_eq!(read_copies(device).iter().filter(|copy| matches!(copy, Ok(Ok(_)))).count(), 2);
        }
        let inodes: std::collections::HashSet<_> = created.members.iter().map(|(_, s)| s[0].device).collect();
        assert_eq!(inodes.len(), 6);
    }

    #[test]
    fn lanes_have_superblocks_of_their_own_and_keep_nothing_of_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let request = CreateRequest { lanes: 4, ..request(dir.path(), 2, 1) };
        let old = CreatePlan::new(request.clone()).unwrap();
        assert!(old.describe()[0].ends_with(", 4 lanes"), "{:?}", old.describe());
        let old = old.execute(0).unwrap();
        assert_eq!(old.geometry.volume_bytes, 8 * MIB);
        let (device, superblocks) = &old.members[1];
        assert_eq!(superblocks.len(), 4);
        let secrets: std::collections::HashSet<_> =
            superblocks.iter().map(|superblock| (superblock.log_secret, superblock.epoch.id)).collect();
        assert_eq!(secrets.len(), 4, "each lane has its own");
        // A superblock in the middle of the device that would outrank a new one.
        let window = &windows_of(superblocks[0].part, device.facts().bytes)[2];
        let newer = Superblock { sequence: 99, ..superblocks[2].clone() };
        write_superblock(&device.window(window), &newer).unwrap();
        drop(old);
        let again = CreatePlan::new(CreateRequest { force: true, ..request }).unwrap().execute(7).unwrap();
        for (device, superblocks) in &again.members {
            let found = DeviceLanes::read(device);
            assert!(found.superblocks().eq(superblocks.iter().map(Some)));
            assert!(found.is_new() && !found.is_unfinished() && found.words_for_damaged().is_empty());
        }
    }

    #[test]
    fn a_creation_of_lanes_that_fails_gives_back_what_was_between_the_ends() {
        let dir = tempfile::tempdir().unwrap();
        let request = CreateRequest { lanes: 3, force: true, ..request(dir.path(), 2, 1) };
        let bytes = member_bytes_for(8 * MIB, request.shape()).unwrap();
        let content: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8 | 1).collect();
        fs::write(&request.members[0], &content).unwrap();
        let plan = CreatePlan::new(request.clone()).unwrap();
        // Another process takes the last name in between.
        File::create(&request.members[2]).unwrap();
        assert!(matches!(plan.execute(0).unwrap_err(), CreateError::TakenBack { .. }));
        assert!(fs::read(&request.members[0]).unwrap() == content);
        fs::remove_file(&request.members[2]).unwrap();
        // What was written is given back, too, when a later device fails.
        let device = Arc::new(Device::open(&request.members[0], Access::Exclusive).unwrap());
        let layout = layout_for(bytes, request.shape(), request.volume_bytes).unwrap();
        let (part, regions) = (layout.part(LaneIndex(1)), &layout.of_lane[0].1);
        let reserved = reserved_ranges(&device, part, regions);
        let undo = Undo::of(&device, &wiped_ranges(&device, part), &reserved).unwrap();
        wipe_ends(&device, part).unwrap();
        let superblocks = new_superblocks(&request, &layout, 512, 0).swap_remove(0);
        write_first_superblocks(&device, &superblocks).unwrap();
        assert!(fs::read(&request.members[0]).unwrap() != content);
        undo.give_back(&device).unwrap();
        assert!(fs::read(&request.members[0]).unwrap() == content);
    }

    #[test]
    fn remote_members_of_several_lanes_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut request = CreateRequest { lanes: 4, ..request(dir.path(), 2, 1) };
        request.members[1] = "nbd://localhost/export".into();
        let error = refusal(request).to_string();
        assert!(error.contains("an array of several lanes with remote members"), "{error}");
    }

    #[test]
    fn lanes_out_of_range_and_too_small_a_volume_are_refused_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let good = request(dir.path(), 2, 1);
        let refuse = |lanes, volume_bytes| {
            let error = refusal(CreateRequest { lanes, volume_bytes: Some(volume_bytes), ..good.clone() });
            assert!(error.is_usage(), "{error}");
            error.to_string()
        };
        for lanes in [0, 33] {
            assert!(refuse(lanes, 64 * MIB).contains("use 1 to 32"), "{}", refuse(lanes, 64 * MIB));
        }
        assert!(refuse(32, 8 * MIB).contains("too small for 32 lanes: use fewer"), "{}", refuse(32, 8 * MIB));
        assert_eq!(listing(dir.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn existing_files_of_unequal_size_use_the_smallest_and_tell_what_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let request = CreateRequest { volume_bytes: None, ..request(dir.path(), 2, 1) };
        make_files(&request, 40 * MIB);
        File::options().write(true).open(&request.members[1]).unwrap().set_len(100 * MIB).unwrap();
        let plan = CreatePlan::new(request).unwrap();
        let notes = plan.notes();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains("m1: 60.") && notes[0].contains("left over"), "{notes:?}");
        let created = plan.execute(0).unwrap();
        let (device, superblocks) = &created.members[1];
        let superblock = &superblocks[0];
        assert!(region_end(&superblock.regions).0 < 40 * MIB);
        assert_eq!(read_superblock(device).as_ref(), Ok(superblock), "tail copies at the real end");
    }

    #[test]
    fn recognised_content_is_told_and_kept_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path(), 2, 1);
        make_files(&request, 64 * MIB);
        fs::write(&request.members[2], {
            let mut image = vec![0xaa; 64 * MIB as usize];
            image[65536 + 64..65536 + 72].copy_from_slice(b"_BHRfS_M");
            image
        })
        .unwrap();
        let before = fs::read(&request.members[2]).unwrap();
        let error = refusal(request.clone()).to_string();
        assert!(error.contains("m2: holds btrfs at byte 65600") && error.contains("--force"), "{error}");
        assert!(fs::read(&request.members[2]).unwrap() == before, "nothing was changed");

        let plan = CreatePlan::new(CreateRequest { force: true, ..request.clone() }).unwrap();
        assert!(plan.notes()[0].contains("btrfs at byte 65600 is destroyed"), "{:?}", plan.notes());
        drop(plan.execute(0).unwrap());
        let device = Device::open(&request.members[2], Access::ReadOnly).unwrap();
        let found: Vec<_> = signatures(&device).unwrap().into_iter().map(|found| found.name).collect();
        assert!(found.iter().all(|name| name.starts_with("Calpe member 2 of 'tank'")), "{found:?}");
    }

    #[test]
    fn members_of_another_array_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path(), 2, 1);
        let created = CreatePlan::new(request.clone()).unwrap().execute(0).unwrap();
        assert!(matches!(refusal(request.clone()), CreateError::Device(DeviceError::Locked { .. })));
        drop(created);
        match refusal(request) {
            error @ CreateError::Recognised(_) => {
                let text = error.to_string();
                assert_eq!(text.matches("holds Calpe member").count(), 3, "{text}");
            }
            other => panic!("{other}"),
        }
    }

    #[test]
    fn one_device_under_two_names_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut request = request(dir.path(), 2, 1);
        request.members[2] = dir.path().join("./m0");
        assert!(matches!(refusal(request.clone()), CreateError::Duplicate { .. }), "not yet existing");
        make_files(&request, 64 * MIB);
        assert!(matches!(refusal(request.clone()), CreateError::Duplicate { .. }), "existing");
        request.members[2] = dir.path().join("link");
        std::os::unix::fs::symlink("m1", &request.members[2]).unwrap();
        assert!(matches!(refusal(request.clone()), CreateError::Duplicate { .. }), "through a link");
        fs::remove_file(&request.members[2]).unwrap();
        fs::hard_link(&request.members[0], &request.members[2]).unwrap();
        assert!(matches!(refusal(request), CreateError::Duplicate { .. }), "through a second name");
    }

    #[test]
    fn missing_members_are_created_only_with_a_size_and_not_under_dev() {
        let dir = tempfile::tempdir().unwrap();
        let good = request(dir.path(), 2, 1);
        let sizeless = CreateRequest { volume_bytes: None, ..good.clone() };
        assert!(matches!(refusal(sizeless), CreateError::Missing { .. }));
        let mut device = good.clone();
        device.members[1] = "/dev/calpe-test-nonexistent".into();
        assert!(matches!(refusal(device), CreateError::MissingDevice { .. }));
        let mut elsewhere = good.clone();
        elsewhere.members[1] = dir.path().join("no/such/dir/m1");
        assert!(matches!(refusal(elsewhere), CreateError::Device(DeviceError::NotFound { .. })));
        let mut link = good.clone();
        link.members[1] = dir.path().join("link");
        std::os::unix::fs::symlink("nowhere", &link.members[1]).unwrap();
        assert!(matches!(refusal(link.clone()), CreateError::Device(DeviceError::DanglingLink { .. })));
        fs::remove_file(&link.members[1]).unwrap();
        let mut directory = good;
        directory.members[0] = dir.path().to_owned();
        assert!(matches!(refusal(directory), CreateError::Device(DeviceError::WrongType { .. })));
        assert_eq!(listing(dir.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn impossible_requests_are_refused_before_anything_is_touched() {
        let dir = tempfile::tempdir().unwrap();
        let good = request(dir.path(), 2, 1);
        let refuse = |change: &dyn Fn(&mut CreateRequest)| {
            let mut bad = good.clone();
            change(&mut bad);
            refusal(bad).to_string()
        };
        assert!(refuse(&|r| r.name = "a b".into()).contains("cannot name an array"));
        assert!(refuse(&|r| r.data = 0).contains("at least one data chunk"));
        assert!(refuse(&|r| r.parity = 254).contains("at most 255"));
        assert!(refuse(&|r| r.chunk = 5000).contains("5000 bytes"));
        assert!(refuse(&|r| r.volume_bytes = Some(1000)).contains("multiple of 4 KiB"));
        assert!(refuse(&|r| r.parity = 2).contains("need 4 members, 3 given"));
        assert!(refuse(&|r| r.volume = VolumeKind::Cas).contains("cas is not supported"));
        assert_eq!(listing(dir.path()), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_member_that_is_too_small_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path(), 2, 1);
        make_files(&request, 64 * MIB);
        File::options().write(true).open(&request.members[1]).unwrap().set_len(5000).unwrap();
        let error = refusal(request).to_string();
        assert!(error.contains("m1") && error.contains("needed"), "{error}");
    }

    #[test]
    fn a_short_note_is_never_called_empty() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path(), 2, 1);
        for bytes in [1, 19, 511, 513] {
            fs::write(&request.members[1], vec![b'x'; bytes]).unwrap();
            for force in [false, true] {
                let error = refusal(CreateRequest { force, ..request.clone() }).to_string();
                assert!(error.contains(&format!("m1: has {bytes} B, but ")), "{error}");
                assert!(!error.contains("remove it"), "{error}");
            }
        }
        fs::write(&request.members[1], "").unwrap();
        assert!(matches!(refusal(request), CreateError::Empty { .. }));
    }

    #[test]
    fn a_creation_that_fails_on_the_way_leaves_no_member_behind() {
        let dir = tempfile::tempdir().unwrap();
        let request = request(dir.path(), 2, 1);
        File::create(&request.members[0]).unwrap().set_len(64 * MIB).unwrap();
        let plan = CreatePlan::new(request.clone()).unwrap();
        // Another process takes the last name in between.
        File::create(&request.members[2]).unwrap();
        let error = plan.execute(0).unwrap_err();
        assert!(matches!(error, CreateError::TakenBack { .. }), "{error}");
        assert!(!request.members[1].exists(), "the file that was created is gone");
        assert!(request.members[2].exists(), "the file of somebody else is not");
        let device = Device::open(&request.members[0], Access::ReadOnly).unwrap();
        assert_eq!(signatures(&device).unwrap(), []);
    }
}
