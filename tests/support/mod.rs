//! A daemon in a temporary directory, driven through the binary and real NBD clients. Shared by the
//! integration tests, each of which uses only a part of it.
#![allow(dead_code)]

pub(crate) mod fuse;
pub(crate) mod image;
pub(crate) mod load;
pub(crate) mod pki;
pub(crate) mod process;
pub(crate) mod serve;
pub(crate) mod tmpfs;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit for everything a test waits for; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Whether a process has ended: only what the kernel cannot end of it may be left.
pub(crate) fn is_over(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    state.is_none_or(|state| matches!(state, 'Z' | 'X'))
}

/// Runs a command to its end and returns what it printed; panics when it fails.
#[track_caller]
pub(crate) fn run(command: &mut Command) -> String {
    let output = try_run(command);
    assert!(
        output.status.success(),
        "{command:?} failed: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a command to its end.
#[track_caller]
pub(crate) fn try_run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap_or_else(|error| {
        panic!("{command:?} could not be run: {error}; 'scripts/test clients' installs the NBD clients")
    })
}

/// The calpe binary.
pub(crate) fn calpe() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_calpe"));
    command.env_remove("CALPE_SOCKET");
    command
}

/// A running `calpe up`.
pub(crate) struct Up {
    pub dir: PathBuf,
    child: Child,
}

impl Up {
    /// Starts `calpe up --dir DIR/data EXTRA...` and waits until it answers.
    #[track_caller]
    pub(crate) fn start(dir: &Path, extra: &[&str]) -> Up {
        let data = dir.join("data");
        let mut command = calpe();
        command.arg("up").arg("--dir").arg(&data).args(extra);
        Up::spawn(dir, command)
    }

    /// Starts `calpe up` as [`Up::start`] does and copies a disk image to the volume, flushed. The image
    /// stays in `dir`.
    #[track_caller]
    pub(crate) fn start_with_image(dir: &Path, extra: &[&str], bytes: usize, seed: u64) -> (Up, PathBuf) {
        let image = dir.join("image");
        disk_image(&image, bytes, seed);
        let up = Up::start(dir, extra);
        run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(up.uri()));
        (up, image)
    }

    /// Starts `calpe serve` with a configuration whose runtime directory is DIR/data, and waits until it
    /// answers.
    #[track_caller]
    pub(crate) fn serve(dir: &Path, config: &Path) -> Up {
        let mut command = calpe();
        command.arg("serve").arg("--config").arg(config);
        Up::spawn(dir, command)
    }

    #[track_caller]
    pub(crate) fn spawn(dir: &Path, command: Command) -> Up {
        let mut up = Up::begin(dir, command);
        let deadline = Instant::now() + PATIENCE;
        while !up.is_serving() {
            if let Ok(Some(status)) = up.child.try_wait() {
                panic!("the daemon ended: {status}\n{}", up.log());
            }
            assert!(Instant::now() < deadline, "the daemon does not answer:\n{}", up.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        up
    }

    /// Starts a daemon without waiting for anything.
    #[track_caller]
    pub(crate) fn begin(dir: &Path, mut command: Command) -> Up {
        let log = fs::File::create(dir.join("daemon.log")).expect("a log file");
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .expect("the daemon starts");
        Up { dir: dir.to_owned(), child }
    }

    fn is_serving(&self) -> bool {
        self.socket().exists()
            && try_run(Command::new("nbdinfo").arg("--size").arg(self.uri())).status.success()
            // Clients may be served a moment before administrators are answered.
            && try_run(&mut self.command(&["status", "--test"])).status.code() != Some(4)
    }

    /// What the daemon has printed.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("daemon.log")).unwrap_or_default()
    }

    /// The process id of the daemon.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.join("data/nbd.sock")
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket().display())
    }

    /// Path of a member file.
    pub(crate) fn member(&self, index: usize) -> PathBuf {
        let members = self.status();
        let name = members["members"][index]["name"].as_str().expect("a member name");
        PathBuf::from(name)
    }

    /// A `calpe` command addressed to this daemon.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = calpe();
        command.arg("--socket").arg(self.dir.join("data/control.sock")).args(args);
        command
    }

    /// Runs a command that must succeed.
    #[track_caller]
    pub(crate) fn calpe(&self, args: &[&str]) -> String {
        run(&mut self.command(args))
    }

    /// The status of the array as JSON.
    #[track_caller]
    pub(crate) fn status(&self) -> serde_json::Value {
        let text = self.calpe(&["status", "--json"]);
        let status: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(status["output_version"], 1);
        status["arrays"][0].clone()
    }

    /// Name of the array.
    pub(crate) fn name(&self) -> String {
        self.status()["name"].as_str().expect("a name").to_owned()
    }

    /// Waits until the array has no rebuild left.
    #[track_caller]
    pub(crate) fn wait_quiet(&self) {
        self.calpe(&["wait", &self.name()]);
    }

    /// Scrubs, and returns (errors, repaired).
    #[track_caller]
    pub(crate) fn scrub(&self) -> (u64, u64) {
        self.calpe(&["scrub", &self.name(), "-w"]);
        let status = self.status();
        let last = &status["last_scrub"];
        (last["errors"].as_u64().expect("errors"), last["repaired"].as_u64().expect("repaired"))
    }

    /// Stops the daemon as Ctrl-C would, and expects a clean end.
    #[track_caller]
    pub(crate) fn stop(mut self) {
        signal(&self.child, "INT");
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("the daemon is ours") {
                assert!(status.success(), "the daemon ended with {status}:\n{}", self.log());
                return;
            }
            assert!(Instant::now() < deadline, "the daemon does not stop:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a signal by name; the daemon may or may not survive it.
    pub(crate) fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    /// Waits for the daemon to end by itself.
    #[track_caller]
    pub(crate) fn ended(mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("the daemon is ours") {
                return status;
            }
            assert!(Instant::now() < deadline, "the daemon does not stop:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// kill -9.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        // So that a failed test leaves no daemon behind; after a clean stop there is nothing left to kill.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a signal by name.
pub(crate) fn signal(child: &Child, name: &str) {
    run(Command::new("kill").arg(format!("-{name}")).arg(child.id().to_string()));
}

/// A file of pseudo-random bytes with runs of zeroes in it, as disk images have.
pub(crate) fn disk_image(path: &Path, bytes: usize, seed: u64) {
    let mut random = calpe_core::testing::Random::new(seed);
    let mut content = vec![0; bytes];
    for block in content.chunks_mut(64 * 1024) {
        if !random.one_in(3) {
            random.fill(block);
        }
    }
    fs::write(path, content).expect("an image");
}

/// Runs fio with checksums in every block, with mixed sizes and a queue: writes, then reads back and
/// compares.
#[track_caller]
pub(crate) fn fio_verify(uri: &str, megabytes: u64, seed: u64) {
    run(Command::new("fio").args([
        "--name=verify",
        "--ioengine=nbd",
        &format!("--uri={uri}"),
        "--rw=randwrite",
        "--bsrange=4k-1m",
        "--iodepth=16",
        &format!("--size={megabytes}M"),
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--do_verify=1",
        "--end_fsync=1",
        &format!("--randseed={seed}"),
        "--output-format=terse",
    ]));
}
