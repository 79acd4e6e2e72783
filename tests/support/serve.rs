//! `calpe serve` as a process that a test configures, asks and restarts; it can be asked even when it serves
//! nothing.

use super::{calpe, signal, try_run};
use serde_json::Value;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Time limit for everything a test waits for; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Time between two checks while waiting.
const LOOK: Duration = Duration::from_millis(20);

/// A running `calpe serve` whose runtime directory is DIR/run and whose state directory is DIR/state.
pub(crate) struct Serve {
    dir: PathBuf,
    child: Child,
}

impl Serve {
    /// Starts `calpe serve` with these sections of a configuration, and waits until it answers.
    #[track_caller]
    pub(crate) fn start(dir: &Path, arrays: &str) -> Serve {
        Serve::start_with(dir, "", arrays)
    }

    /// The same, with these lines in section `[daemon]`.
    #[track_caller]
    pub(crate) fn start_with(dir: &Path, daemon: &str, arrays: &str) -> Serve {
        let config = dir.join("calpe.toml");
        let head = "[daemon]\nruntime_dir = \"run\"\nstate_dir = \"state\"\n";
        fs::write(&config, format!("{head}{daemon}[gpu]\nmode = \"off\"\n{arrays}")).expect("written");
        let mut command = calpe();
        command.arg("serve").arg("--config").arg(&config);
        Serve::run(dir, command)
    }

    /// Starts this command, with a runtime directory DIR/run, and waits until it answers.
    #[track_caller]
    pub(crate) fn run(dir: &Path, mut command: Command) -> Serve {
        let log =
            fs::File::options().create(true).append(true).open(dir.join("daemon.log")).expect("a log file");
        command.stdin(Stdio::null()).stdout(log.try_clone().expect("a second handle")).stderr(log);
        let mut serve = Serve { dir: dir.to_owned(), child: command.spawn().expect("the daemon starts") };
        let socket = serve.control();
        serve.until("it answers", |serve| {
            if let Some(status) = serve.child.try_wait().expect("ours") {
                panic!("the daemon ended: {status}\n{}", serve.log());
            }
            UnixStream::connect(&socket).is_ok()
        });
        serve
    }

    pub(crate) fn control(&self) -> PathBuf {
        self.dir.join("run/control.sock")
    }

    pub(crate) fn nbd(&self) -> PathBuf {
        self.dir.join("run/nbd.sock")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.join("daemon.log")).unwrap_or_default()
    }

    /// The process id of the daemon.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The number of file descriptors that the daemon has open.
    pub(crate) fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("it runs").count()
    }

    pub(crate) fn command(&self, line: &str) -> Command {
        let mut command = calpe();
        command.current_dir(&self.dir).arg("--socket").arg(self.control()).args(line.split_whitespace());
        command
    }

    pub(crate) fn ask(&self, line: &str) -> Output {
        try_run(&mut self.command(line))
    }

    /// Runs a command that must succeed; returns what it prints, errors included.
    #[track_caller]
    pub(crate) fn says(&self, line: &str) -> String {
        let output = self.ask(line);
        assert!(output.status.success(), "calpe {line}: {}\n{}", both(&output), self.log());
        both(&output)
    }

    /// The same for a command that brings a member back, tried again while it is refused because operations
    /// on the member have not ended.
    #[track_caller]
    pub(crate) fn brings_back(&mut self, line: &str) -> String {
        self.until("what was under way on the member has ended", |serve| {
            let output = serve.ask(line);
            let waits = both(&output).contains("operations on it from before it left service have not ended");
            assert!(output.status.success() || waits, "calpe {line}: {}\n{}", both(&output), serve.log());
            output.status.success()
        });
        self.log()
    }

    /// Runs a command that must be refused; returns what it prints.
    #[track_caller]
    pub(crate) fn refuses(&self, line: &str) -> String {
        let output = self.ask(line);
        assert_eq!(output.status.code(), Some(1), "calpe {line}: {}", both(&output));
        both(&output)
    }

    /// Every array, as JSON.
    #[track_caller]
    pub(crate) fn arrays(&self) -> Vec<Value> {
        let output = self.ask("status --json");
        let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        status["arrays"].as_array().expect("arrays").clone()
    }

    /// The first array, once `is_so` holds for it.
    #[track_caller]
    pub(crate) fn array_when(&mut self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        let mut found = Value::Null;
        self.until(what, |serve| {
            found = serve.arrays().first().cloned().unwrap_or_default();
            is_so(&found)
        });
        found
    }

    /// Every event, as JSON.
    #[track_caller]
    pub(crate) fn events(&self) -> Vec<Value> {
        let text = self.says("events --json");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    #[track_caller]
    pub(crate) fn until(&mut self, what: &str, mut reached: impl FnMut(&mut Serve) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !reached(self) {
            assert!(Instant::now() < deadline, "not reached: {what}\n{}", self.log());
            std::thread::sleep(LOOK);
        }
    }

    /// Stops the daemon cleanly.
    #[track_caller]
    pub(crate) fn stop(mut self) {
        signal(&self.child, "TERM");
        self.until("the daemon has ended", |serve| match serve.child.try_wait().expect("ours") {
            Some(status) => {
                assert!(status.success(), "{status}\n{}", serve.log());
                true
            }
            None => false,
        });
    }

    /// Sends a signal by name; the daemon may or may not survive it.
    pub(crate) fn signal(&self, name: &str) {
        signal(&self.child, name);
    }

    /// kill -9.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("killed");
        self.child.wait().expect("reaped");
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // So that a failed test leaves no daemon behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn both(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The section of a configuration for an array whose members lie in these places.
pub(crate) fn array(name: &str, search: &[&Path]) -> String {
    let search: Vec<String> = search.iter().map(|place| format!("\"{}\"", place.display())).collect();
    format!("[[array]]\nname = \"{name}\"\nsearch = [{}]\n", search.join(", "))
}

/// Creates an array on new files m0, m1, ... in a directory.
#[track_caller]
pub(crate) fn create(dir: &Path, name: &str, data: usize, parity: usize) {
    fs::create_dir_all(dir).expect("a directory");
    let (k, m) = (data.to_string(), parity.to_string());
    let members: Vec<PathBuf> = (0..data + parity).map(|index| dir.join(format!("m{index}"))).collect();
    let mut command = calpe();
    super::run(command.args(["create", name, "-k", &k, "-m", &m, "--size", "8MiB"]).args(members));
}
