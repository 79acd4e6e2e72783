//! Attaching a device and keeping it attached: the checks, the driver's CONNECT, and the loop that
//! carries out what the keeper decides.
//!
//! Invariants: nothing is changed before every check has passed; one process keeps a device; when
//! the keeper ends for any reason but a detach, the device stays attached, and the next keeper
//! takes it over. Single-threaded; no data passes through.

use super::device::{Attached, DeviceIndex, Host};
use super::keeper::{Action, End, Event, Identity, Keeper, Tell};
use super::netlink::message::{Connect, Reply, Request};
use super::netlink::{Driver, NetlinkError, Notice, Notices};
use super::server::{
    Directory, Line, PREFIX, Server, Target, block_size, flag, identity, may_come, server_flags,
};
use super::state::{KeeperLock, Kept, StateDir};
use super::{AttachError, system};
use calpe_core::nbd::RemoteExport;
use calpe_core::units::{Count, HumanSize, Timestamp};
use calpe_host::polling;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// Default number of connections.
const CONNECTIONS: u32 = 4;

/// Time between two attempts to find an array that is waited for.
const WAIT_STEP: Duration = Duration::from_millis(500);

/// What to attach, and how.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// Where.
    pub device: DeviceIndex,
    /// What.
    pub target: Target,
    /// Number of connections; none for the best number.
    pub connections: Option<u32>,
    /// Seconds without an answer after which the kernel gives up a connection and sends its
    /// requests again.
    pub timeout_s: u64,
    /// Seconds that requests wait for a server before they fail.
    pub dead_timeout_s: u64,
    /// Refuse writes.
    pub read_only: bool,
    /// Bytes of a logical block; none for the smallest that the export allows.
    pub block_size: Option<u64>,
    /// Seconds to wait for the array to be served.
    pub wait_s: u64,
}

/// A device that can be attached as requested.
#[derive(Debug)]
pub(crate) struct Plan {
    options: Options,
    server: Server,
    /// What the server said about the export.
    export: RemoteExport,
    connections: u32,
    block: u64,
    flags: u64,
    /// The device is attached already and only needs a keeper.
    adopt: bool,
}

/// Checks everything that can be checked without changing anything.
///
/// # Errors
/// When the device cannot be attached, and why.
pub(crate) fn plan(
    host: &Host,
    options: &Options,
    directory: &mut dyn Directory,
) -> Result<Plan, AttachError> {
    let device = options.device;
    host.exists(device)?;
    // This connection is only for the checks; those for the driver are opened when they are needed.
    let (server, export) = find(options, directory)?;
    let attached = host.attached(device);
    let adopt = match &attached {
        None => false,
        Some(found) if found.backend.as_deref() == Some(server.backend.as_str()) => true,
        Some(found) => return Err(taken(device, found)),
    };
    if !options.read_only
        && let Some(other) = host.twins(device, &server.backend).first()
    {
        return Err(AttachError::Twin { what: server.name, other: *other });
    }
    let connections = connections(options, &server, &export)?;
    let block = block_size(&server.name, &export, options.block_size)?;
    let flags = server_flags(&export, options.read_only);
    if let Some(found) = attached {
        let differs = |differs: String| Err(AttachError::Differs { device, differs });
        if found.size != export.size {
            return differs(format!("{} bytes instead of {}", found.size, export.size));
        }
        if found.read_only != (flags & flag::READ_ONLY != 0) {
            return differs(if found.read_only { "no writes allowed" } else { "writes allowed" }.into());
        }
    } else {
        // Nothing is attached, but another process may have the device open.
        drop(host.claim(device, false)?);
    }
    Ok(Plan { options: options.clone(), server, export, connections, block, flags, adopt })
}

impl Plan {
    /// What will be done, in one line, or with `done` what was done.
    #[must_use]
    pub(crate) fn describe(&self, done: bool) -> String {
        let Plan { options, server, export, .. } = self;
        let what = match (done, self.adopt) {
            (true, true) => "keeping again",
            (true, false) => "attached",
            (false, true) => "would keep again",
            (false, false) => "would attach",
        };
        format!(
            "{what} {} as {}: {}, {}{}",
            server.name,
            options.device,
            HumanSize(export.size),
            Count(self.connections as u64, "connection"),
            if self.flags & flag::READ_ONLY != 0 { ", read-only" } else { "" }
        )
    }

    /// Warnings, a line each.
    #[must_use]
    pub(crate) fn warnings(&self) -> Vec<String> {
        let cached = &self.server.cached;
        let line = format!(
            "{} is in this host's page cache: when memory is short, writing it back may need memory; use members with \
             O_DIRECT, and no swap on {}",
            cached.join(", "),
            self.options.device
        );
        if cached.is_empty() { Vec::new() } else { vec![line] }
    }
}

/// A device that is attached, and the right to keep it.
#[derive(Debug)]
pub(crate) struct Attachment {
    plan: Plan,
    host: Host,
    driver: Driver,
    notices: Notices,
    signals: SignalFd,
    lock: KeeperLock,
    state: StateDir,
    /// The kernel shows what is attached to the device.
    shown: bool,
}

impl Attachment {
    /// Attaches a device, or becomes the keeper of one that is attached to the same export.
    ///
    /// # Errors
    /// When that is not possible: then nothing is attached.
    pub(crate) fn start(
        host: &Host,
        state: &StateDir,
        options: &Options,
        directory: &mut dyn Directory,
    ) -> Result<Attachment, AttachError> {
        host.exists(options.device)?;
        let mut driver = Driver::open()?;
        let lock = state.lock(options.device)?;
        let plan = plan(host, options, directory)?;
        let mask: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        mask.thread_block().map_err(|errno| system("take over signals")(errno.into()))?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(|errno| system("take over signals")(errno.into()))?;
        // Before any connection exists whose end could go unnoticed.
        let notices = driver.listen()?;
        if !plan.adopt {
            connect(host, &mut driver, &plan)?;
        }
        let shown = host.attached(options.device).is_some_and(|found| found.backend.is_some());
        let (host, state) = (host.clone(), state.clone());
        Ok(Attachment { plan, host, driver, notices, signals, lock, state, shown })
    }

    /// What was done, in one line.
    #[must_use]
    pub(crate) fn describe(&self) -> String {
        self.plan.describe(true)
    }

    /// Warnings, a line each.
    #[must_use]
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.plan.warnings()
    }
}

/// Keeps a device until it is detached or this process is told to end, which leaves the device
/// attached.
///
/// # Errors
/// When the device was taken away, or the driver does not answer any more.
pub(crate) fn keep(attachment: Attachment, directory: &mut dyn Directory) -> Result<(), AttachError> {
    let clock = Instant::now();
    let now = move || Timestamp(u64::try_from(clock.elapsed().as_nanos()).unwrap_or(u64::MAX));
    let identity = Identity {
        backend: attachment.plan.server.backend.clone(),
        size: attachment.plan.export.size,
        shown: attachment.shown,
    };
    let mut keeper = Keeper::new(identity, attachment.plan.adopt, now());
    let mut attachment = attachment;
    attachment.publish(keeper.is_down());
    loop {
        let wait = keeper.deadline().nanos_since(now());
        let event = match attachment.wait(wait)? {
            Woken::Signal(signal) => {
                tracing::info!(%signal, device = %attachment.plan.options.device, "keeper ends, the device stays");
                return Ok(());
            }
            Woken::LinkDead => Some(Event::LinkDead),
            Woken::Time => None,
        };
        let was_down = keeper.is_down();
        let mut actions = keeper.step(event, now());
        while !actions.is_empty() {
            let mut next = Vec::new();
            for action in actions {
                if let Some(event) = attachment.perform(action, directory)? {
                    next.extend(keeper.step(Some(event), now()));
                }
            }
            actions = next;
        }
        if keeper.is_down() != was_down {
            attachment.publish(keeper.is_down());
        }
    }
}

enum Woken {
    Signal(Signal),
    LinkDead,
    Time,
}

impl Attachment {
    /// Waits for a signal, a notice about this device, or the end of `nanos` nanoseconds.
    fn wait(&self, nanos: u64) -> Result<Woken, AttachError> {
        let mut fds = [
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.notices.descriptor(), PollFlags::POLLIN),
        ];
        let millis = u16::try_from(nanos.div_ceil(1_000_000)).unwrap_or(u16::MAX);
        match poll(&mut fds, PollTimeout::from(millis)) {
            Ok(_) => {}
            Err(errno) if polling::survives(errno as i32, "the keeper") => {}
            Err(errno) => return Err(system("wait")(errno.into())),
        }
        if let Ok(Some(info)) = self.signals.read_signal()
            && let Ok(signal) = Signal::try_from(info.ssi_signo as i32)
        {
            return Ok(Woken::Signal(signal));
        }
        let ours = |notice: &Notice| match notice {
            Notice::Told(Reply::LinkDead { index }) => *index == self.plan.options.device.0,
            Notice::Told(_) => false,
            Notice::Lost => true,
        };
        Ok(if self.notices.take()?.iter().any(ours) { Woken::LinkDead } else { Woken::Time })
    }

    fn perform(
        &mut self,
        action: Action,
        directory: &mut dyn Directory,
    ) -> Result<Option<Event>, AttachError> {
        let device = self.plan.options.device;
        match action {
            Action::Look => Ok(Some(Event::Looked(self.host.attached(device)))),
            Action::Tell(tell) => {
                let name = &self.plan.server.name;
                match tell {
                    Tell::Lost => tracing::warn!(%device, array = %name, "connections lost: requests wait"),
                    Tell::Again(nanos) => {
                        let ms = nanos / 1_000_000;
                        tracing::info!(%device, array = %name, ms, "connected again");
                    }
                    Tell::Waiting(why) => tracing::warn!(%device, array = %name, "waiting: {why}"),
                    Tell::Stranger(why) => tracing::error!(%device, array = %name, "not connected: {why}"),
                }
                Ok(None)
            }
            Action::Reconnect => Ok(Some(match self.reconnect(directory) {
                Ok(()) => Event::Connected,
                Err(error) if may_come(&error) => Event::NoServer { why: error.to_string() },
                // The driver may be busy disconnecting; the next look at the device tells.
                Err(error @ AttachError::Netlink(_)) => Event::NoServer { why: error.to_string() },
                Err(error) => Event::Stranger { why: error.to_string() },
            })),
            Action::End(end) => {
                self.state.remove(device);
                let why = match end {
                    End::Detached => "detached by somebody else".to_owned(),
                    End::TakenOver { backend } => format!("attached to {backend} by somebody else"),
                    End::Resized { size } => format!("resized to {size} bytes by somebody else"),
                };
                Err(AttachError::Lost { device, why })
            }
        }
    }

    /// Offers the driver a fresh socket for each connection.
    fn reconnect(&mut self, directory: &mut dyn Directory) -> Result<(), AttachError> {
        // The kernel compares the backend only where it was given one when the device was
        // connected.
        let found = self.host.attached(self.plan.options.device);
        if self.shown && found.is_none_or(|found| found.backend.is_none()) {
            return Err(self.plan.server.stranger("the device is somebody else's now".into()));
        }
        let (server, line) = self.plan.server.again(self.plan.connections, directory)?;
        if server.backend != self.plan.server.backend {
            return Err(server.stranger(format!("it is {} now", server.backend)));
        }
        if line.export.size != self.plan.export.size {
            return Err(server.stranger(format!(
                "it has {} bytes, the device {}",
                line.export.size, self.plan.export.size
            )));
        }
        if identity(&line.export) != identity(&self.plan.export) {
            return Err(server.stranger(format!("it is another array: '{}'", line.export.description)));
        }
        // The driver was given these flags at CONNECT and does not ask for them again.
        let promised = self.plan.flags & !flag::ROTATIONAL;
        let offered = server_flags(&line.export, self.plan.options.read_only);
        if offered & promised != promised
            || (offered ^ promised) & flag::READ_ONLY != 0
            || u64::from(line.export.block_min) > self.plan.block
        {
            return Err(server.stranger("it offers less than when it was attached".into()));
        }
        let Options { device, timeout_s, dead_timeout_s, .. } = self.plan.options;
        self.driver.ask(Request::Reconfigure {
            index: device.0,
            timeout_s,
            dead_timeout_s,
            sockets: raw(&line),
            backend: server.backend.clone(),
        })?;
        self.plan.server = server;
        Ok(())
    }

    /// Publishes whether connections are missing, for administrators and the supervisor.
    fn publish(&self, waiting: bool) {
        let Plan { options, server, export, connections, flags, .. } = &self.plan;
        let kept = Kept {
            version: Kept::version(),
            device: options.device,
            target: server.name.clone(),
            backend: server.backend.clone(),
            size: export.size,
            read_only: flags & flag::READ_ONLY != 0,
            connections: *connections,
            keeper: std::process::id(),
            waiting,
        };
        if let Err(error) = self.lock.write(&kept) {
            tracing::warn!(%error, "cannot tell what is kept");
        }
        let line = if waiting { "waiting for the daemon" } else { "connected" };
        // An error means that there is no supervisor.
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Status(&format!("{}: {line}", server.name))]);
    }
}

/// Finds the server and the export, and waits for them as long as requested.
fn find(options: &Options, directory: &mut dyn Directory) -> Result<(Server, RemoteExport), AttachError> {
    let begun = Instant::now();
    loop {
        let found = Server::find(&options.target, options.timeout_s, directory).and_then(|server| {
            let line = server.connect(1)?;
            Ok((server, line.export))
        });
        match found {
            Err(error) if may_come(&error) && begun.elapsed().as_secs() < options.wait_s => {
                std::thread::sleep(WAIT_STEP);
            }
            other => return other,
        }
    }
}

/// How many connections to open: as requested, or the best number that the server allows.
fn connections(options: &Options, server: &Server, export: &RemoteExport) -> Result<u32, AttachError> {
    let unfit = |why: &str| Err(AttachError::Unfit { what: server.name.clone(), why: why.into() });
    match options.connections {
        Some(0) => unfit("no connections at all"),
        Some(2..) if !export.multi_conn => {
            unfit("the server does not keep several connections coherent: use --connections 1")
        }
        Some(wished) => Ok(wished),
        None => Ok(if export.multi_conn { CONNECTIONS } else { 1 }),
    }
}

fn taken(device: DeviceIndex, found: &Attached) -> AttachError {
    let backend = match &found.backend {
        Some(backend) => backend.strip_prefix(PREFIX).unwrap_or(backend).to_owned(),
        None => format!("something, by process {}", found.pid),
    };
    AttachError::Taken { device, backend }
}

fn raw(line: &Line) -> Vec<RawFd> {
    line.sockets.iter().map(AsRawFd::as_raw_fd).collect()
}

/// Makes the driver connect the device.
fn connect(host: &Host, driver: &mut Driver, plan: &Plan) -> Result<(), AttachError> {
    let device = plan.options.device;
    let line = plan.server.connect(plan.connections)?;
    if line.export != plan.export {
        return Err(plan.server.stranger("the export changed while it was being attached".into()));
    }
    let asked = driver.ask(Request::Connect(Connect {
        index: device.0,
        size: line.export.size,
        block: plan.block,
        timeout_s: plan.options.timeout_s,
        dead_timeout_s: plan.options.dead_timeout_s,
        server_flags: plan.flags,
        sockets: raw(&line),
        backend: plan.server.backend.clone(),
    }));
    match asked {
        Ok(_) => {}
        Err(NetlinkError::Refused { source }) if source.raw_os_error() == Some(libc::EBUSY) => {
            return Err(AttachError::Taken { device, backend: "something, just now".into() });
        }
        Err(error) => return Err(error.into()),
    }
    let size = host.attached(device).map(|found| found.size);
    if size != Some(line.export.size) {
        // The device is not what was requested: nothing may use it.
        let _ = driver.ask(Request::Disconnect { index: device.0 });
        let source =
            io::Error::other(format!("the device has {size:?} bytes instead of {}", line.export.size));
        return Err(NetlinkError::Refused { source }.into());
    }
    host.tune(device, line.export.block_max);
    host.announce(device);
    Ok(())
}
