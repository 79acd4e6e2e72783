//! The command line: every command, option and help text. Must not know how anything is done.

use super::client::PATIENCE_SECS;
use crate::control::MemberRef;
use crate::daemon::config::gpu_mode;
use crate::daemon::gpu::HELPER_COMMAND;
use crate::daemon::logging::LogFormat;
use crate::daemon::startup::up::UP_DIR;
use calpe_core::codec::Engine;
use calpe_core::codec::bench::Geometry as BenchGeometry;
use calpe_core::format::{ChecksumKind, VolumeKind};
use calpe_core::units::ByteCount;
use calpe_gpu::Mode;
use clap::{ArgAction, Args, Parser, Subcommand};
use std::path::PathBuf;
use std::str::FromStr;

const EXIT_CODES: &str =
    "Exit codes: 0 done, 1 error, 2 usage. 'status --test' has its own: see 'calpe status --help'.
Sizes are bytes, or take KiB, MiB, GiB, TiB, PiB, fractions too (1.5TiB). A MEMBER is an index, a path or a uuid.";

/// Software RAID in user space: Reed-Solomon k+m over member disks, exported as NBD volumes.
#[derive(Debug, Parser)]
#[command(name = "calpe", version, after_help = EXIT_CODES, max_term_width = 110)]
pub(super) struct Cli {
    /// Control socket of the daemon; with 'serve' the one to make, in place of the configured one;
    /// not with 'up' [default of commands that ask a daemon: $CALPE_SOCKET where it is set,
    /// otherwise the first that exists of ./calpe-data/control.sock,
    /// $XDG_RUNTIME_DIR/calpe/control.sock, /run/calpe/control.sock]
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Seconds after which a daemon that does not answer at all is given up
    #[arg(long, global = true, value_name = "SECS", default_value_t = PATIENCE_SECS, value_parser = clap::value_parser!(u16).range(1..))]
    pub patience: u16,
    /// Form of the log on standard error: human or json
    #[arg(long, global = true, value_name = "FORMAT")]
    pub log_format: Option<LogFormat>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What can be done.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Create (the first time) and serve an array of sparse files in one directory
    #[command(after_help = "\
Examples:
  calpe up                                      4+2, 1 GiB, in ./calpe-data
  calpe up --data 8 --parity 3 --size 20GiB --dir /srv/tank
Ctrl-C stops cleanly; the next 'calpe up' with the same directory picks the array up again, with the geometry it has.")]
    Up(UpArgs),
    /// Create an array on devices or files; serve it with 'import'
    #[command(after_help = "\
Examples:
  calpe create tank --data 4 --parity 2 /dev/disk/by-id/ata-{a,b,c,d,e,f}
  calpe create test --data 2 --parity 1 --size 1GiB m0.img m1.img m2.img    (creates the files)
Recognised content (a filesystem, a partition table, another array...) is never created over without --force.")]
    Create(CreateArgs),
    /// Run the daemon in the foreground
    #[command(after_help = "\
Examples:
  calpe serve --config conf/calpe.toml
  calpe serve --config conf/calpe.toml --check      only validate the configuration")]
    Serve(ServeArgs),
    /// Find the members of an array by their superblocks and start it; alone: list what could be
    /// imported
    #[command(after_help = "\
Examples:
  calpe import --dir /srv/members               list the arrays found there
  calpe import tank --dir /srv/members
  calpe import -a")]
    Import(ImportArgs),
    /// Stop an array cleanly; unless it is configured, it is not served again until it is imported
    #[command(after_help = "\
Examples:
  calpe export tank -n        say what would happen
  calpe export tank")]
    Export(ExportArgs),
    /// Show arrays, their members, and what runs on them
    #[command(after_help = "\
Exit codes with --test: 0 healthy; 1 degraded: members out of service, their storage full or their errors without end, blocks \
that cannot be read, requests of clients that failed, or a last scrub that found errors, repaired or not; 2 failed or not served; \
4 cannot tell: no daemon answers, or it has no such array, or none.
Examples:
  calpe status tank
  calpe status --json | jq '.arrays[].state'
  calpe status --test || echo 'look at it'")]
    Status(StatusArgs),
    /// Take a member out for good, as if it had failed
    #[command(after_help = "\
Examples:
  calpe fail tank 3 -n        say what would be left
  calpe fail tank 3")]
    Fail(MemberArgs),
    /// Take a member out on purpose; 'online' brings it back
    #[command(after_help = "\
Examples:
  calpe offline tank 3 -n     say what would be left
  calpe offline tank 3")]
    Offline(MemberArgs),
    /// Bring a member back; what it missed is rebuilt
    #[command(after_help = "\
Examples:
  calpe online tank 3
  calpe online tank 3 --path /mnt/moved/m3.img      its device is at another path now")]
    Online(OnlineArgs),
    /// Rebuild a member onto a new device; the old one, if there, serves until the new one is
    /// complete
    #[command(after_help = "\
Examples:
  calpe replace tank 3 /dev/disk/by-id/ata-new
  calpe replace tank /srv/m3.img /srv/new3.img -w     wait until it is rebuilt
  calpe replace tank --cancel 3                       give the new device up; the old one stays")]
    Replace(ReplaceArgs),
    /// Read and verify everything, repair what is wrong
    #[command(after_help = "\
Examples:
  calpe scrub tank          start, or go on after a pause
  calpe scrub tank -w       start and wait for the result
  calpe scrub tank -p       pause; the position is kept")]
    Scrub(ScrubArgs),
    /// Look again at everything that is set aside or called lost, and say what is truly gone
    #[command(after_help = "\
Blocks that could not be read when the rest of their rows was written are set aside: their checksums stay, and they come \
back when their members can read them again. The array looks by itself now and then; this looks everywhere, now.
Examples:
  calpe repair tank -w      exit 0 only if everything known to be damaged can be read")]
    Repair(RepairArgs),
    /// Set the error counts of an array, or of one member, back to zero
    #[command(after_help = "\
Examples:
  calpe clear tank
  calpe clear tank 3")]
    Clear(ClearArgs),
    /// Wait until what runs on an array has ended; exit 0 only if it ended well
    #[command(after_help = "\
Where nothing runs any more and no rebuild was seen to complete, the array must not be DEGRADED, \
unless -t names no rebuild; a scrub or a repair that is named with -t is judged by what the last \
one left (errors that it found, blocks that cannot be read). Without -t they are not, and of a \
rebuild that was given up before the first look nothing is told: 'calpe replace -w', 'calpe scrub \
-w' and 'calpe repair -w' start one and tell how it ended, however fast that was.
Examples:
  calpe wait tank
  calpe wait tank -t rebuild,scrub")]
    Wait(WaitArgs),
    /// Show what happened
    #[command(after_help = "\
Examples:
  calpe events
  calpe events -f             go on as things happen
  calpe events --json")]
    Events(EventsArgs),
    /// Show what was done to an array and what state it was in, as far back as is known
    #[command(after_help = "\
Examples:
  calpe history tank
  calpe history tank --json | jq 'select(.kind == \"command\")'")]
    History(HistoryArgs),
    /// Show the superblocks of a member; read-only, also beside a daemon that serves it
    Inspect(InspectArgs),
    /// Prove offline that an array is good; read-only, its members must not be in use
    #[command(after_help = "\
Give every member of the array. The log is replayed in memory, then every block that is in use is read and compared with its \
checksum, parity with data, and the copies of metadata with each other.
Exit codes: 0 only if all is proved good and every member is there and in service; 1 otherwise, also when what is there is \
consistent and members are missing (with --json, 'consistent' and 'whole' tell the two apart), or where nothing could be \
compared: without checksums, fewer members than one more than hold data (then 'consistent' is false and 'errors' null); 2 usage.
Examples:
  calpe check /srv/m*.img
  calpe check --json /dev/disk/by-id/ata-{a,b,c,d,e,f} | jq .good")]
    Check(CheckArgs),
    /// Make an array a block device of this machine, /dev/nbdN; alone: list what is attached
    #[command(after_help = "\
A keeper stays in the background and connects the device again when the daemon was restarted: requests wait meanwhile. Needs root \
and the kernel's NBD driver ('modprobe nbd'). docs/attach.md tells about mounting at boot, swap and upgrades.
Examples:
  calpe attach tank /dev/nbd0
  calpe attach nbd://10.0.0.7/tank /dev/nbd1 --read-only
  calpe attach                                  what is attached")]
    Attach(AttachArgs),
    /// Take a block device away again: flushes it first, refuses while it is in use
    #[command(after_help = "\
Examples:
  calpe detach /dev/nbd0")]
    Detach(DetachArgs),
    /// Try what happens when a GPU fails
    #[command(subcommand)]
    Gpu(GpuCommand),
    /// Measure parts of the program on this machine
    #[command(subcommand)]
    Bench(BenchCommand),
    /// The process in which a daemon uses a GPU; started by it alone
    #[command(name = HELPER_COMMAND, hide = true)]
    GpuHelper(GpuHelperArgs),
}

/// Options of the process of a GPU.
#[derive(Debug, Clone, Args)]
pub(super) struct GpuHelperArgs {
    /// Lock its memory
    #[arg(long)]
    pub locked: bool,
    /// The process of its daemon
    pub daemon: u32,
}

/// Options of `attach`.
#[derive(Debug, Clone, Args)]
pub(super) struct AttachArgs {
    /// Name or uuid of the array, or an nbd:// or nbd+unix:// URI
    #[arg(requires = "device")]
    pub name: Option<String>,
    /// /dev/nbd0, /dev/nbd1, ...
    pub device: Option<PathBuf>,
    /// Connections [default: 4, or 1 where the server does not keep several coherent]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub connections: Option<u32>,
    /// Seconds without an answer after which a connection is given up and its requests are sent
    /// again
    #[arg(long, value_name = "SECS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub timeout: u64,
    /// Seconds that requests wait for the daemon to come back before they fail
    #[arg(long, value_name = "SECS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=31536000))]
    pub dead_timeout: u64,
    /// Refuse writes
    #[arg(long)]
    pub read_only: bool,
    /// Logical block of the device [default: the smallest that the array serves]
    #[arg(long, value_name = "SIZE")]
    pub block_size: Option<ByteCount>,
    /// Seconds to wait until the array is served
    #[arg(long, value_name = "SECS", default_value_t = 0)]
    pub wait: u64,
    /// Stay and keep the device, instead of leaving a process in the background (systemd
    /// Type=notify)
    #[arg(long)]
    pub foreground: bool,
    /// Only say what would be done
    #[arg(long, short = 'n', requires = "name")]
    pub dry_run: bool,
    /// List as JSON
    #[arg(long, conflicts_with = "name")]
    pub json: bool,
    /// Where keepers leave their state
    #[arg(long, value_name = "PATH", hide = true, default_value = crate::attach::STATE_DIR)]
    pub state_dir: PathBuf,
    /// Started by `attach` itself: how it went is written to standard output as JSON
    #[arg(long, hide = true)]
    pub keeper: bool,
}

/// Options of `detach`.
#[derive(Debug, Clone, Args)]
pub(super) struct DetachArgs {
    /// /dev/nbd0, /dev/nbd1, ...
    pub device: PathBuf,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Where keepers leave their state
    #[arg(long, value_name = "PATH", hide = true, default_value = crate::attach::STATE_DIR)]
    pub state_dir: PathBuf,
}

/// What can be done to GPUs.
#[derive(Debug, Clone, Subcommand)]
pub(super) enum GpuCommand {
    /// Make the next batch of work on a GPU go wrong, to see that clients notice nothing but a
    /// delay
    #[command(after_help = "\
The GPU is given up, what it had under way is done by the CPU, and it is opened again: nothing is lost, and nothing wrong is \
read. 'calpe events' tells what happened, 'calpe status -v' how long anybody waited for it.
After an error the driver may refuse this GPU to the process that met it: then the CPU goes on alone until the daemon is started \
again.
Examples:
  calpe gpu drill hang          the GPU stops answering, for 20 seconds
  calpe gpu drill error         a kernel traps")]
    Drill(DrillArgs),
}

/// Options of `gpu drill`.
#[derive(Debug, Clone, Args)]
pub(super) struct DrillArgs {
    /// How it goes wrong
    pub kind: DrillKind,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// How a GPU goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum DrillKind {
    /// A kernel traps
    Error,
    /// A kernel does not end
    Hang,
}

/// Options of `up`. Those about the shape of the array count only when it is created.
#[derive(Debug, Clone, Args)]
pub(super) struct UpArgs {
    /// Data chunks of a stripe [default: 4]
    #[arg(long, short = 'k', value_name = "K")]
    pub data: Option<u16>,
    /// Parity chunks of a stripe: this many members may be lost [default: 2]
    #[arg(long, short = 'm', value_name = "M")]
    pub parity: Option<u16>,
    /// Size of the volume, as clients see it [default: 1GiB]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteCount>,
    /// Bytes of a chunk [default: 64KiB]
    #[arg(long, value_name = "SIZE")]
    pub chunk: Option<ByteCount>,
    /// Lanes, 1 to 32, that work on the volume at the same time; new, see docs/lanes.md [default: 1]
    #[arg(long, value_name = "N")]
    pub lanes: Option<u16>,
    /// Kind of volume: plain (cas is planned) [default: plain]
    #[arg(long, value_name = "KIND")]
    pub volume: Option<VolumeKind>,
    /// Checksum of each block: blake3, crc32c or none [default: blake3]
    #[arg(long, value_name = "KIND")]
    pub checksum: Option<ChecksumKind>,
    /// Parity and hashes on GPUs: auto, off or require [default: auto]
    #[arg(long, value_name = "MODE", value_parser = gpu_mode)]
    pub gpu: Option<Mode>,
    /// Directory of the member files and sockets
    #[arg(long, value_name = "PATH", default_value = UP_DIR)]
    pub dir: PathBuf,
    /// Start even where the members cannot prove that they are the current ones
    #[arg(long)]
    pub force: bool,
}

/// Options of `create`.
#[derive(Debug, Clone, Args)]
pub(super) struct CreateArgs {
    /// Name of the array: 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit
    pub name: String,
    /// Data chunks of a stripe
    #[arg(long, short = 'k', value_name = "K")]
    pub data: u16,
    /// Parity chunks of a stripe: this many members may be lost
    #[arg(long, short = 'm', value_name = "M")]
    pub parity: u16,
    /// Bytes of a chunk: a power of two from 4KiB to 4MiB
    #[arg(long, value_name = "SIZE", default_value = "64KiB")]
    pub chunk: ByteCount,
    /// Lanes, 1 to 32, that work on the volume at the same time, each on a core of its own if there are as
    /// many; fixed at creation, and each takes a log of 16 MiB or more on every member
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub lanes: u16,
    /// Kind of volume: plain (cas is planned)
    #[arg(long, value_name = "KIND", default_value = "plain")]
    pub volume: VolumeKind,
    /// Checksum of each block: blake3, crc32c or none
    #[arg(long, value_name = "KIND", default_value = "blake3")]
    pub checksum: ChecksumKind,
    /// Size of the volume [default: the largest that fits]; members that do not exist are then
    /// created as sparse files
    #[arg(long, value_name = "SIZE")]
    pub size: Option<ByteCount>,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Also over recognised content, which is destroyed
    #[arg(long)]
    pub force: bool,
    /// K + M block devices or files
    #[arg(required = true, value_name = "MEMBER")]
    pub members: Vec<PathBuf>,
}

/// Options of `serve`.
#[derive(Debug, Clone, Args)]
pub(super) struct ServeArgs {
    /// Configuration [default: /etc/calpe/calpe.toml if there is one, otherwise built-in defaults]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Only validate the configuration
    #[arg(long)]
    pub check: bool,
}

/// Options of `import`.
#[derive(Debug, Clone, Args)]
pub(super) struct ImportArgs {
    /// Name or uuid of the array; without it and without -a, what could be imported is listed
    #[arg(conflicts_with = "all")]
    pub array: Option<String>,
    /// Import every array found
    #[arg(long, short)]
    pub all: bool,
    /// Look for members here, a directory or a device, beside the configured places; may be
    /// repeated
    #[arg(long = "dir", value_name = "PATH")]
    pub dirs: Vec<PathBuf>,
    /// Start even where the members present cannot prove that they are the current ones
    #[arg(long)]
    pub force: bool,
    /// Not again after a restart of the daemon, as otherwise until 'export'
    #[arg(long)]
    pub once: bool,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// List as JSON
    #[arg(long, conflicts_with_all = ["array", "all"])]
    pub json: bool,
}

/// Options of `export`.
#[derive(Debug, Clone, Args)]
pub(super) struct ExportArgs {
    /// Name or uuid of the array
    pub name: String,
    /// Also while clients are attached, which lose it
    #[arg(long)]
    pub force: bool,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// Options of `status`.
#[derive(Debug, Clone, Args)]
pub(super) struct StatusArgs {
    /// Name or uuid of the array; all without it
    pub name: Option<String>,
    /// Only arrays that are not healthy
    #[arg(short = 'x', long = "unhealthy")]
    pub unhealthy: bool,
    /// More about each member and the array
    #[arg(short, long)]
    pub verbose: bool,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Exit with the state: 0 healthy, 1 degraded or troubled, 2 failed, 4 cannot tell
    #[arg(long)]
    pub test: bool,
    /// Again and again, every second
    #[arg(long, conflicts_with = "test")]
    pub watch: bool,
}

/// An array and a member.
#[derive(Debug, Clone, Args)]
pub(super) struct MemberArgs {
    /// Name or uuid of the array
    pub name: String,
    /// Index, path or uuid of the member
    pub member: MemberRef,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// Options of `online`.
#[derive(Debug, Clone, Args)]
pub(super) struct OnlineArgs {
    /// The array and the member.
    #[command(flatten)]
    pub which: MemberArgs,
    /// Where its device is now
    #[arg(long, value_name = "PATH")]
    pub path: Option<PathBuf>,
}

/// Options of `replace`.
#[derive(Debug, Clone, Args)]
pub(super) struct ReplaceArgs {
    /// Name or uuid of the array
    pub name: String,
    /// Index, path or uuid of the member
    pub old: MemberRef,
    /// Block device or file that takes its place; a file that does not exist is created, unless
    /// the array is of block devices
    #[arg(required_unless_present = "cancel")]
    pub new: Option<PathBuf>,
    /// Give up the replacement that is being built; the old device stays in service
    #[arg(long, conflicts_with_all = ["new", "wait", "force"])]
    pub cancel: bool,
    /// Wait until it is rebuilt; exit 0 only if it then is in service
    #[arg(long, short, conflicts_with = "dry_run")]
    pub wait: bool,
    /// Also over recognised content, which is destroyed
    #[arg(long)]
    pub force: bool,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// Options of `scrub`.
#[derive(Debug, Clone, Args)]
pub(super) struct ScrubArgs {
    /// Name or uuid of the array
    pub name: String,
    /// Pause the one that runs; it keeps its position
    #[arg(long, short, conflicts_with_all = ["stop", "wait"])]
    pub pause: bool,
    /// Stop the one that runs and forget its position
    #[arg(long, short, conflicts_with = "wait")]
    pub stop: bool,
    /// Wait for its end; exit 0 only if it found no error
    #[arg(long, short, conflicts_with = "dry_run")]
    pub wait: bool,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// Options of `repair`.
#[derive(Debug, Clone, Args)]
pub(super) struct RepairArgs {
    /// Name or uuid of the array
    pub name: String,
    /// Wait for its end; exit 0 only if everything known to be damaged can be read
    #[arg(long, short, conflicts_with = "dry_run")]
    pub wait: bool,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// Options of `clear`.
#[derive(Debug, Clone, Args)]
pub(super) struct ClearArgs {
    /// Name or uuid of the array
    pub name: String,
    /// Index, path or uuid of a member; all of them and the array without it
    pub member: Option<MemberRef>,
    /// Only say what would be done
    #[arg(long, short = 'n')]
    pub dry_run: bool,
}

/// Options of `wait`.
#[derive(Debug, Clone, Args)]
pub(super) struct WaitArgs {
    /// Name or uuid of the array
    pub name: String,
    /// What to wait for: rebuild, scrub, repair, separated by commas [default: all of them]
    #[arg(short = 't', long = "types", value_name = "TYPES", value_delimiter = ',', action = ArgAction::Append)]
    pub types: Vec<WaitKind>,
}

/// What can be waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum WaitKind {
    /// Members that are re-created
    Rebuild,
    /// A scrub
    Scrub,
    /// A look at everything that is set aside or called lost
    Repair,
}

/// Options of `events`.
#[derive(Debug, Clone, Args)]
pub(super) struct EventsArgs {
    /// Go on with what happens from now on
    #[arg(long, short)]
    pub follow: bool,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Options of `history`.
#[derive(Debug, Clone, Args)]
pub(super) struct HistoryArgs {
    /// Name or uuid of the array
    pub name: String,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// Options of `inspect`.
#[derive(Debug, Clone, Args)]
pub(super) struct InspectArgs {
    /// Block device or file
    pub member: PathBuf,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// In this process, however long that takes
    #[arg(long, hide = true)]
    pub here: bool,
}

/// Options of `check`.
#[derive(Debug, Clone, Args)]
pub(super) struct CheckArgs {
    /// The block devices or files of all members
    #[arg(required = true, value_name = "MEMBER")]
    pub members: Vec<PathBuf>,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// What can be measured.
#[derive(Debug, Clone, Subcommand)]
pub(super) enum BenchCommand {
    /// Parity engines against the memory bandwidth of one core
    #[command(after_help = "\
Examples:
  calpe bench codec
  calpe bench codec --geometry 8+4 --block 64KiB --engine gfni --json
  calpe bench codec --engine cuda      the first GPU: on its own memory, from and to the host's, and from which size on it is worth it
The NBD server is measured against others by scripts/bench-nbd.")]
    Codec(BenchCodecArgs),
    /// Checksums of blocks against the memory bandwidth of one core
    #[command(after_help = "\
Examples:
  calpe bench hash
  calpe bench hash --seconds 2 --json
  calpe bench hash --engine cuda       the first GPU; the same run as that of bench codec")]
    Hash(BenchHashArgs),
}

/// What `bench codec` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BenchEngine {
    /// An engine of the CPU.
    Cpu(Engine),
    /// The first GPU.
    Cuda,
}

impl FromStr for BenchEngine {
    type Err = String;

    fn from_str(text: &str) -> Result<BenchEngine, String> {
        match text {
            "cuda" => Ok(BenchEngine::Cuda),
            engine => engine.parse().map(BenchEngine::Cpu).map_err(|error| format!("{error}, or cuda")),
        }
    }
}

/// Options of `bench hash`.
#[derive(Debug, Clone, Args)]
pub(super) struct BenchHashArgs {
    /// The CPU's, or 'cuda' for the first GPU
    #[arg(long, value_name = "ENGINE", default_value = "cpu", value_parser = ["cpu", "cuda"])]
    pub engine: String,
    /// Seconds that the run should take
    #[arg(long, default_value_t = 5.0)]
    pub seconds: f64,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

/// Options of `bench codec`.
#[derive(Debug, Clone, Args)]
pub(super) struct BenchCodecArgs {
    /// Only this engine; may be repeated [default: all of the CPU]. 'cuda', by itself, is the first
    /// GPU; its geometries and sizes are fixed
    #[arg(long = "engine", value_name = "ENGINE")]
    pub engines: Vec<BenchEngine>,
    /// With --engine cuda: try other ways to drive it, too
    #[arg(long)]
    pub sweep: bool,
    /// This geometry, data+parity; may be repeated [default: five common ones]
    #[arg(long = "geometry", value_name = "K+M")]
    pub geometries: Vec<BenchGeometry>,
    /// This many bytes of a column at a time; may be repeated [default: 4KiB and 64KiB]
    #[arg(long = "block", value_name = "SIZE")]
    pub blocks: Vec<ByteCount>,
    /// Seconds that the run should take
    #[arg(long, default_value_t = 20.0)]
    pub seconds: f64,
    /// As JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Command, clap::Error> {
        Cli::try_parse_from(line.split_whitespace()).map(|cli| cli.command)
    }

    #[test]
    fn definitions_are_consistent_and_every_command_has_help() {
        Cli::command().debug_assert();
        for command in Cli::command().get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for argument in command.get_arguments() {
                assert!(argument.get_help().is_some(), "{} {}", command.get_name(), argument.get_id());
            }
        }
    }

    #[test]
    fn paragraphs_of_help_break_only_where_the_terminal_ends() {
        const COLUMNS: usize = 100;
        fn check(command: &clap::Command) {
            let help = command.clone().term_width(COLUMNS).render_help().to_string();
            let lines: Vec<&str> = help.lines().collect();
            for pair in lines.windows(2) {
                let goes_on = pair[1].starts_with(|c: char| c.is_ascii_lowercase());
                let next = pair[1].split(' ').next().unwrap_or_default();
                let has_room = pair[0].chars().count() + 1 + next.len() <= COLUMNS;
                assert!(!goes_on || !has_room, "{}: {pair:?}", command.get_name());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn every_command_of_the_contract_parses() {
        for line in [
            "calpe up",
            "calpe up --data 4 --parity 3 --size 1GiB --dir x --volume plain",
            "calpe create tank --data 4 --parity 2 --chunk 64KiB --volume plain --checksum blake3 --size 1GiB -n --force a b c d e f",
            "calpe create tank --data 4 --parity 2 --checksum crc32c a b c d e f",
            "calpe create tank --data 4 --parity 2 --checksum none a b c d e f",
            "calpe create tank --data 4 --parity 2 --lanes 8 a b c d e f",
            "calpe up --lanes 4",
            "calpe up --checksum crc32c",
            "calpe serve --config conf/calpe.toml --check",
            "calpe import",
            "calpe import -a",
            "calpe import tank --dir /srv --dir /dev/sdb --force -n",
            "calpe export tank -n",
            "calpe status",
            "calpe status tank -x -v --json --test",
            "calpe status --watch",
            "calpe fail tank 3",
            "calpe offline tank /dev/sdb",
            "calpe online tank 3 --path /srv/m3",
            "calpe replace tank 3 /dev/sdc -w",
            "calpe attach",
            "calpe attach --json",
            "calpe attach tank /dev/nbd0",
            "calpe attach tank /dev/nbd0 --connections 4 --timeout 30 --dead-timeout 600 --read-only -n --foreground",
            "calpe attach nbd+unix:///tank?socket=/run/s /dev/nbd0 --block-size 4096 --wait 10",
            "calpe detach /dev/nbd0",
            "calpe detach /dev/nbd0 -n",
            "calpe scrub tank -w",
            "calpe scrub tank -p",
            "calpe scrub tank -s",
            "calpe wait tank -t rebuild,scrub",
            "calpe events -f --json",
            "calpe history tank --json",
            "calpe export tank --force",
            "calpe import tank --once",
            "calpe replace tank --cancel 3",
            "calpe replace tank 3 --cancel -n",
            "calpe inspect /dev/sdb --json",
            "calpe check /dev/sdb /dev/sdc --json",
            "calpe bench codec --json",
            "calpe bench hash --seconds 1 --json",
            "calpe --socket /run/x --log-format json status",
            "calpe status --socket /run/x",
        ] {
            parse(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        }
    }

    #[test]
    fn nonsense_is_a_usage_error() {
        for line in [
            "calpe",
            "calpe up --data x",
            "calpe up --size 1.5",
            "calpe up --size 1.5GB",
            "calpe up --volume zfs",
            "calpe create tank --data 4 a b",
            "calpe create tank --data 1 --parity 1 --lanes many a b",
            "calpe create tank --data 4 --parity 2",
            "calpe import -a tank",
            "calpe fail tank",
            "calpe scrub tank -p -s",
            "calpe replace tank 3 x -w -n",
            "calpe replace tank 3",
            "calpe replace tank 3 x --cancel",
            "calpe replace tank --cancel",
            "calpe wait tank -t lunch",
            "calpe status --watch --test",
            "calpe bench",
            "calpe attach tank",
            "calpe attach tank /dev/nbd0 --connections 0",
            "calpe attach tank /dev/nbd0 --json",
            "calpe attach -n",
            "calpe detach",
        ] {
            let error = parse(line).expect_err(line);
            assert_eq!(error.exit_code(), 2, "{line}");
        }
    }
}
