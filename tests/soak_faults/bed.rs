//! An array over exports that go wrong, and some local files, with the daemon that serves it. Must not know
//! what is tried on it, or why.

use crate::fault_server::{Door, Export, Keep, Offer, Rule, Server};
use crate::load::until;
use crate::plan::{Event, Part};
use crate::support::run;
use calpe::control::{
    ArrayReport, MAX_REPLY_BYTES, MemberRef, Reply, Request, ScrubAction, Status, read_message, write_message,
};
use calpe_core::format::{
    ArrayShape, COPY_BYTES, RegionKind, all_copy_offsets, geometry_for, member_bytes_for,
};
use calpe_core::testing::Random;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Name of the array.
const NAME: &str = "soak";

/// Size of the volume: small, for it is compared after each round, and large enough for hundreds of stripes.
pub(crate) const VOLUME: u64 = 32 << 20;

const BLOCK: u64 = 4096;

/// Hosts without a member, to replace those of others.
const SPARE_HOSTS: usize = 2;

/// Seconds that a server may take to answer; what docs/remote.md promises is derived from it.
pub(crate) const REMOTE_TIMEOUT_S: u64 = 2;

/// A daemon that is told to stop has this long, however its members behave.
pub(crate) const STOP_LIMIT: Duration = Duration::from_secs(10);

/// Longest that an administrator waits for an answer.
const ADMIN_PATIENCE: Duration = Duration::from_secs(60);

/// k+m.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub data: usize,
    pub parity: usize,
}

impl Shape {
    pub(crate) fn width(self) -> usize {
        self.data + self.parity
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Shape, String> {
        let wrong = || format!("'{text}' is not a geometry: write it like 4+2");
        let (data, parity) = text.split_once('+').ok_or_else(wrong)?;
        let number = |text: &str| text.parse().ok().filter(|number| (1..=16).contains(number));
        Ok(Shape { data: number(data).ok_or_else(wrong)?, parity: number(parity).ok_or_else(wrong)? })
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&format!("{}+{}", self.data, self.parity))
    }
}

/// What array.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Build {
    pub shape: Shape,
    pub chunk: u64,
    pub checksum: &'static str,
    pub full_stripe: &'static str,
    /// The last so many members are local files.
    pub locals: usize,
}

impl Build {
    pub(crate) fn draw(shape: Shape, seed: u64) -> Build {
        let mut random = Random::new(seed);
        Build {
            shape,
            chunk: [8 << 10, 16 << 10, 64 << 10][random.index(3)],
            checksum: ["blake3", "blake3", "crc32c"][random.index(3)],
            full_stripe: ["fresh", "logged"][random.index(2)],
            locals: 1 + random.index(2),
        }
    }

    pub(crate) fn stripe_bytes(&self) -> u64 {
        self.shape.data as u64 * self.chunk
    }

    fn layout(&self) -> ArrayShape {
        let Shape { data, parity } = self.shape;
        ArrayShape {
            data: data as u16,
            parity: parity as u16,
            chunk: self.chunk as u32,
            sector: 512,
            lanes: 1,
        }
    }

    fn member_bytes(&self) -> u64 {
        member_bytes_for(VOLUME, self.layout()).expect("a layout")
    }
}

struct Host {
    server: Server,
    export: Option<Export>,
    /// A door that is to open again.
    reopens: Option<Instant>,
}

/// Where the device of a member is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host(usize),
    Local(PathBuf),
}

/// See the head of this file.
pub(crate) struct Bed {
    pub build: Build,
    pub dir: PathBuf,
    binary: PathBuf,
    hosts: Vec<Host>,
    members: Vec<Place>,
    /// Devices that are being built in the place of members, with the identity of the old one.
    building: BTreeMap<usize, (Place, Uuid)>,
    copies: BTreeMap<usize, Vec<u8>>,
    daemon: Option<Child>,
    log: File,
    /// When all times of its log begin.
    pub begun: Instant,
    random: Random,
    /// Files that were made so far.
    files: usize,
    struck_before: BTreeMap<String, u64>,
}

impl Bed {
    /// Creates the array; nothing serves it yet.
    pub(crate) fn new(dir: &Path, binary: &Path, build: Build, seed: u64) -> Bed {
        fs::create_dir_all(dir.join("members")).expect("a directory");
        let mut random = Random::new(seed);
        let log = File::create(dir.join("faults.log")).expect("a log");
        let width = build.shape.width();
        let remote = width - build.locals;
        let mut hosts = Vec::new();
        for at in 0..remote + SPARE_HOSTS {
            let server = Server::start(&dir.join(format!("h{at}")));
            hosts.push(Host { server, export: None, reopens: None });
        }
        let mut bed = Bed {
            build,
            dir: dir.to_owned(),
            binary: binary.to_owned(),
            hosts,
            members: Vec::new(),
            building: BTreeMap::new(),
            copies: BTreeMap::new(),
            daemon: None,
            log,
            begun: Instant::now(),
            random: Random::new(random.next_u64()),
            files: 0,
            struck_before: BTreeMap::new(),
        };
        for at in 0..remote {
            bed.offer_blank(at);
            bed.members.push(Place::Host(at));
        }
        for _ in remote..width {
            let path = bed.new_file();
            bed.members.push(Place::Local(path));
        }
        let names: Vec<String> = (0..width).map(|member| bed.name_of(&bed.members[member])).collect();
        let Shape { data, parity } = build.shape;
        run(bed
            .calpe()
            .args(["create", NAME, "--data", &data.to_string(), "--parity", &parity.to_string()])
            .args(["--size", &VOLUME.to_string(), "--chunk", &build.chunk.to_string()])
            .args(["--checksum", build.checksum])
            .args(&names));
        bed.configure();
        bed.note(&format!("{build:?}, members {names:?}"));
        bed
    }

    fn configure(&self) {
        let mut search: Vec<String> = (0..self.hosts.len()).map(|host| self.uri(host)).collect();
        search.push(self.dir.join("members").display().to_string());
        let search: Vec<String> = search.iter().map(|place| format!("\"{place}\"")).collect();
        let text = format!(
            "[daemon]\nruntime_dir = \"{}\"\nmemory = \"64MiB\"\nreclaim_safe = false\n[gpu]\nmode = \"off\"\n\
             [[array]]\nname = \"{NAME}\"\nsearch = [{}]\nremote_timeout = {REMOTE_TIMEOUT_S}\nremote_grace = 1\n\
             page_cache = \"1MiB\"\nfull_stripe = \"{}\"\n",
            self.dir.join("run").display(),
            search.join(", "),
            self.build.full_stripe
        );
        fs::write(self.dir.join("calpe.toml"), text).expect("written");
    }

    fn calpe(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.env_remove("CALPE_SOCKET");
        command
    }

    fn offer_blank(&mut self, host: usize) {
        let offer = Offer {
            structured: !self.random.one_in(3),
            fua: !self.random.one_in(3),
            trim: !self.random.one_in(4),
            zeroes: !self.random.one_in(3),
            multi_conn: !self.random.one_in(3),
        };
        let export = Export::new(self.build.member_bytes(), self.random.next_u64(), offer);
        self.hosts[host].server.offer("", &export);
        self.hosts[host].export = Some(export);
    }

    fn new_file(&mut self) -> PathBuf {
        self.files += 1;
        self.dir.join(format!("members/local-{}.img", self.files))
    }

    fn uri(&self, host: usize) -> String {
        self.hosts[host].server.uri("")
    }

    fn name_of(&self, place: &Place) -> String {
        match place {
            Place::Host(host) => self.uri(*host),
            Place::Local(path) => path.display().to_string(),
        }
    }

    /// Writes a line to the log of what was done.
    pub(crate) fn note(&mut self, text: &str) {
        let at = self.begun.elapsed().as_secs_f64();
        for line in text.lines() {
            writeln!(self.log, "{at:10.3} {line}").expect("logged");
        }
    }

    /// Where clients connect.
    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("run/nbd.sock")
    }

    /// Members behind a server.
    pub(crate) fn remote(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&member| matches!(self.members[member], Place::Host(_))).collect()
    }

    fn export_at(&self, place: &Place) -> Option<&Export> {
        match place {
            Place::Host(host) => self.hosts[*host].export.as_ref(),
            Place::Local(_) => None,
        }
    }

    /// Exports that hold a member, or are to hold it.
    fn exports_of(&self, member: usize) -> Vec<&Export> {
        let places = [Some(&self.members[member]), self.building.get(&member).map(|(place, _)| place)];
        places.into_iter().flatten().filter_map(|place| self.export_at(place)).collect()
    }
}

/// The daemon.
impl Bed {
    /// Starts it; it is there when [`Bed::report`] says something.
    pub(crate) fn start(&mut self) {
        assert!(self.daemon.is_none(), "it runs");
        let options = File::options().create(true).append(true).open(self.dir.join("daemon.log"));
        let log = options.expect("a log");
        let mut command = self.calpe();
        command.arg("serve").arg("--config").arg(self.dir.join("calpe.toml"));
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a handle")).stderr(log);
        self.daemon = Some(command.spawn().expect("the daemon starts"));
        self.note("daemon started");
    }

    /// How it ended, if it did so by itself.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.daemon.as_mut()?.try_wait().expect("ours")?;
        self.daemon = None;
        self.note(&format!("the daemon ended: {status}"));
        Some(status)
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            child.kill().expect("killed");
            child.wait().expect("reaped");
            self.note("daemon killed");
        }
    }

    /// Tells it to stop, as Ctrl-C does. Returns how it ended; none if it did not within its time, after
    /// which it is killed.
    pub(crate) fn stop(&mut self) -> Option<ExitStatus> {
        let mut child = self.daemon.take()?;
        self.note("daemon told to stop");
        crate::support::signal(&child, "INT");
        let mut status = None;
        let limit = STOP_LIMIT + Duration::from_secs(2);
        if !until(limit, || {
            status = child.try_wait().expect("ours");
            status.is_some()
        }) {
            child.kill().expect("killed");
            child.wait().expect("reaped");
        }
        self.note(&format!("daemon stopped: {status:?}"));
        status
    }

    /// Asks the daemon; none if it does not answer.
    pub(crate) fn ask(&self, request: &Request) -> Option<Reply> {
        let mut stream = UnixStream::connect(self.dir.join("run/control.sock")).ok()?;
        stream.set_read_timeout(Some(ADMIN_PATIENCE)).ok()?;
        write_message(&mut stream, request).ok()?;
        read_message(&mut BufReader::new(stream), MAX_REPLY_BYTES).ok()?
    }

    /// The state of the array; none while it is not served.
    pub(crate) fn report(&self) -> Option<ArrayReport> {
        match self.ask(&Request::Status { array: Some(NAME.into()) })? {
            Reply::Status(Status { mut arrays, .. }) => arrays.pop(),
            _ => None,
        }
    }

    /// Carries out what an administrator wants, as far as it is granted. Returns whether it was.
    pub(crate) fn admin(&mut self, request: &Request) -> bool {
        let reply = self.ask(request);
        self.note(&format!("{request:?}: {reply:?}"));
        matches!(reply, Some(Reply::Done { .. }))
    }

    pub(crate) fn online(&mut self, member: usize) -> bool {
        let member = MemberRef::Index(member as u16);
        self.admin(&Request::Online { array: NAME.into(), member, path: None, dry_run: false })
    }

    pub(crate) fn offline(&mut self, member: usize) -> bool {
        let member = MemberRef::Index(member as u16);
        self.admin(&Request::Offline { array: NAME.into(), member, dry_run: false })
    }

    pub(crate) fn scrub(&mut self) -> bool {
        self.admin(&Request::Scrub { array: NAME.into(), action: ScrubAction::Start, dry_run: false })
    }

    /// Events since one, and which is the next.
    pub(crate) fn events(&self, since: u64) -> (Vec<String>, u64) {
        match self.ask(&Request::Events { since }) {
            Some(Reply::Events { events, next }) => {
                (events.into_iter().map(|event| event.text).collect(), next)
            }
            _ => (Vec::new(), since),
        }
    }

    fn fail(&mut self, member: usize) {
        let member = MemberRef::Index(member as u16);
        self.admin(&Request::Fail { array: NAME.into(), member, dry_run: false });
    }

    fn replace(&mut self, member: usize) {
        if self.building.contains_key(&member) {
            return;
        }
        let Some(old_uuid) = self.report().map(|report| report.members[member].uuid) else { return };
        let place = match &self.members[member] {
            Place::Host(_) => {
                let Some(host) = (0..self.hosts.len()).find(|&host| self.hosts[host].export.is_none()) else {
                    return;
                };
                self.offer_blank(host);
                Place::Host(host)
            }
            Place::Local(_) => Place::Local(self.new_file()),
        };
        let (old, new) = (MemberRef::Index(member as u16), PathBuf::from(self.name_of(&place)));
        self.building.insert(member, (place, old_uuid));
        // Whether it is granted or not, the state tells in the end who is the member.
        self.admin(&Request::Replace { array: NAME.into(), old, new, force: false, dry_run: false });
    }
}

/// What goes wrong.
impl Bed {
    /// Makes something happen to a member.
    pub(crate) fn do_event(&mut self, member: usize, event: Event) {
        self.note(&format!("member {member}: {event:?}"));
        match event {
            Event::Fault { ops, part, act, one_in, count, ms } => {
                let ranges = self.ranges(part);
                let rule = Rule::new(ops, act).within(ranges).one_in(one_in).times(count);
                for export in self.exports_of(member) {
                    export.inject(rule.clone().lasting(Duration::from_millis(ms)));
                }
            }
            Event::Cut => self.exports_of(member).into_iter().for_each(Export::cut),
            Event::Door(door, ms) => self.shut(member, door, ms),
            Event::Power(keep, ms) => {
                self.shut(member, Door::Shut, ms);
                self.exports_of(member).into_iter().for_each(|export| export.power_cut(keep));
            }
            Event::Offline => drop(self.offline(member)),
            Event::Fail => self.fail(member),
            Event::Online => drop(self.online(member)),
            Event::Replace => self.replace(member),
            Event::Rot(part, bits) => self.rot(member, part, bits),
            Event::Copy => {
                let place = self.members[member].clone();
                let copy = match &place {
                    Place::Host(_) => self.export_at(&place).expect("a member").stable(),
                    Place::Local(path) => fs::read(path).expect("read"),
                };
                self.copies.insert(member, copy);
            }
        }
    }

    fn shut(&mut self, member: usize, door: Door, ms: u64) {
        let Place::Host(host) = self.members[member] else { return };
        let host = &mut self.hosts[host];
        host.reopens = Some(Instant::now() + Duration::from_millis(ms));
        host.server.set_door(door);
        if let Some(export) = &host.export {
            export.cut();
        }
    }

    /// Opens doors whose time is over; to be called often.
    pub(crate) fn tick(&mut self) {
        let now = Instant::now();
        for host in &mut self.hosts {
            if host.reopens.is_some_and(|at| at <= now) {
                host.reopens = None;
                host.server.set_door(Door::Open);
            }
        }
    }

    /// All faults are off.
    pub(crate) fn heal(&mut self) {
        self.note("faults off");
        for host in &mut self.hosts {
            host.reopens = None;
            host.server.set_door(Door::Open);
            if let Some(export) = &host.export {
                export.clear();
            }
        }
    }

    /// Every server loses its power.
    pub(crate) fn power_cut(&mut self, keep: Keep) {
        self.note(&format!("power cut of all servers, {keep:?}"));
        for host in &self.hosts {
            if let Some(export) = &host.export {
                export.power_cut(keep);
            }
        }
    }

    /// The copy of a member takes its place.
    pub(crate) fn roll_back(&mut self, member: usize) {
        let Some(copy) = self.copies.remove(&member) else { return };
        self.note(&format!("member {member} is rolled back to its copy"));
        let place = self.members[member].clone();
        match &place {
            Place::Host(_) => self.export_at(&place).expect("a member").restore(&copy),
            Place::Local(path) => {
                let file = File::options().write(true).open(path).expect("opened");
                file.write_all_at(&copy, 0).expect("written");
                file.sync_all().expect("flushed");
                *self.struck_before.entry("rollback".into()).or_default() += 1;
            }
        }
    }

    /// The devices of two members change places; nothing serves the array.
    pub(crate) fn swap(&mut self, one: usize, other: usize) {
        let (Place::Host(one_host), Place::Host(other_host)) = (&self.members[one], &self.members[other])
        else {
            return;
        };
        let (one_host, other_host) = (*one_host, *other_host);
        self.note(&format!("members {one} and {other} change places"));
        let first = self.hosts[one_host].server.withdraw("").expect("a member");
        let second = self.hosts[other_host].server.withdraw("").expect("a member");
        self.hosts[one_host].server.offer("", &second);
        self.hosts[other_host].server.offer("", &first);
        self.hosts[one_host].export = Some(second);
        self.hosts[other_host].export = Some(first);
        self.members.swap(one, other);
    }

    fn rot(&mut self, member: usize, part: Part, bits: u64) {
        let ranges = self.ranges(part);
        let place = self.members[member].clone();
        for _ in 0..bits {
            let range = &ranges[self.random.index(ranges.len())];
            let at = range.start + self.random.below(range.end - range.start);
            let bit = self.random.below(8) as u8;
            match &place {
                Place::Host(_) => self.export_at(&place).expect("a member").flip(at, bit),
                Place::Local(path) => {
                    // Beside the page cache, as the daemon does.
                    crate::support::image::Image::open(path).flip_at(at, 1 << bit);
                    *self.struck_before.entry("rot".into()).or_default() += 1;
                }
            }
        }
    }

    /// Byte ranges of a part of a member; none for all of it.
    fn ranges(&self, part: Part) -> Vec<Range<u64>> {
        let bytes = self.build.member_bytes();
        let (_, regions) = geometry_for(bytes, self.build.layout(), Some(VOLUME)).expect("a layout");
        let region = |kind: RegionKind| {
            let region = regions.iter().find(|region| region.kind == kind).expect("a logged array");
            region.offset.0..region.offset.0 + region.len
        };
        match part {
            Part::All => Vec::new(),
            Part::Superblocks => {
                all_copy_offsets(bytes).iter().map(|at| at.0..at.0 + COPY_BYTES as u64).collect()
            }
            Part::Log => vec![region(RegionKind::Log)],
            Part::Pages => vec![region(RegionKind::Pages)],
            Part::Data => vec![region(RegionKind::Data)],
            Part::Spots(count, seed) => {
                let mut random = Random::new(seed);
                let mut spot = |_| {
                    let kind = if random.one_in(4) { RegionKind::Pages } else { RegionKind::Data };
                    let Range { start, end } = region(kind);
                    let at = start + random.below((end - start) / BLOCK) * BLOCK;
                    at..at + BLOCK
                };
                (0..count).map(&mut spot).collect()
            }
        }
    }

    /// How often each kind of fault has struck.
    pub(crate) fn struck(&self) -> BTreeMap<String, u64> {
        let mut all = self.struck_before.clone();
        for export in self.hosts.iter().filter_map(|host| host.export.as_ref()) {
            for (kind, count) in export.struck() {
                *all.entry(kind.to_owned()).or_default() += count;
            }
        }
        all
    }

    /// How often requests to a member were answered with an error that a device may be given up for.
    pub(crate) fn errors_of(&self, member: usize) -> u64 {
        let errors = ["EIO", "ENOSPC", "ENOMEM", "EPERM", "EINVAL"];
        let count = |export: &Export| -> u64 {
            let struck = export.struck();
            errors.iter().filter_map(|kind| struck.get(kind)).sum()
        };
        self.exports_of(member).into_iter().map(count).sum()
    }

    /// The server of a member, if it has one, owes no answer for long, and is connected.
    pub(crate) fn server_is_well(&self, member: usize) -> bool {
        let well = |export: &Export| export.is_well() && export.connections() > 0;
        match &self.members[member] {
            place @ Place::Host(_) => self.export_at(place).is_some_and(well),
            Place::Local(_) => true,
        }
    }

    /// Takes note of who took whose place, and clears away what is not used any more.
    pub(crate) fn settle_replacements(&mut self, report: &ArrayReport) {
        for (member, (new, old_uuid)) in std::mem::take(&mut self.building) {
            let seat = &report.members[member];
            if seat.replacement.is_some() {
                self.building.insert(member, (new, old_uuid));
                continue;
            }
            let unused =
                if seat.uuid == old_uuid { new } else { std::mem::replace(&mut self.members[member], new) };
            self.note(&format!("member {member} is {}, {unused:?} is not used any more", seat.name));
            match unused {
                Place::Host(host) => {
                    self.hosts[host].server.withdraw("");
                    if let Some(export) = self.hosts[host].export.take() {
                        for (kind, count) in export.struck() {
                            *self.struck_before.entry(kind.to_owned()).or_default() += count;
                        }
                    }
                }
                // A replacement that was refused was never made.
                Place::Local(path) => drop(fs::remove_file(path)),
            }
        }
    }

    /// Leaves everything for people to look at, and says what an offline check finds.
    pub(crate) fn keep(&mut self, to: &Path) {
        if let Some(report) = self.report() {
            let json = serde_json::to_string_pretty(&report).expect("JSON");
            fs::write(self.dir.join("status.json"), json).expect("written");
            let (events, _) = self.events(0);
            fs::write(self.dir.join("events.txt"), events.join("\n")).expect("written");
        }
        self.kill();
        let mut paths = Vec::new();
        for member in 0..self.members.len() {
            match self.members[member].clone() {
                Place::Local(path) => paths.push(path),
                place @ Place::Host(_) => {
                    let export = self.export_at(&place).expect("a member");
                    let path = self.dir.join(format!("member-{member}.img"));
                    let bytes = export.read(0, export.bytes() as usize);
                    fs::write(&path, bytes).expect("written");
                    paths.push(path);
                }
            }
        }
        let check = self.calpe().arg("check").args(&paths).output().expect("it runs");
        let text = [&check.stdout[..], &check.stderr[..]].concat();
        fs::write(self.dir.join("check.txt"), text).expect("written");
        fs::create_dir_all(to).expect("a directory");
        for entry in fs::read_dir(&self.dir).expect("listed").flatten() {
            let path = entry.path();
            if path.is_file() {
                fs::copy(&path, to.join(entry.file_name())).expect("copied");
            }
        }
        for path in paths.iter().filter(|path| path.starts_with(self.dir.join("members"))) {
            fs::copy(path, to.join(path.file_name().expect("a name"))).expect("copied");
        }
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(mut child) = self.daemon.take() {
            // A test that failed leaves no daemon behind.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
