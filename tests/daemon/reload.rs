//! SIGHUP to a daemon of `calpe serve`: it never ends it, applies what can be applied, names what cannot, and
//! refuses a configuration with a problem whole.

use crate::support::{Up, calpe, run, try_run};
use crate::tls::until;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A folder with arrays, and the configuration that serves some of them.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new(arrays: &[&str]) -> World {
        let dir = tempfile::tempdir().expect("a folder");
        for name in arrays {
            let members = dir.path().join(name);
            fs::create_dir(&members).expect("a folder");
            let mut create = calpe();
            create.args(["create", name, "--data", "2", "--parity", "1", "--size", "32MiB"]);
            for member in 0..3 {
                let member = members.join(format!("m{member}"));
                fs::File::create(&member).expect("a file").set_len(256 << 20).expect("sparse");
                create.arg(member);
            }
            run(&mut create);
        }
        World { dir }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// `daemon`: lines for that section; each array is its name and lines for its section.
    fn configure(&self, daemon: &str, arrays: &[(&str, &str)]) -> PathBuf {
        let runtime = self.path().join("data");
        let mut text = format!("[daemon]\nruntime_dir = {runtime:?}\n{daemon}");
        for (name, lines) in arrays {
            let search = self.path().join(name);
            text.push_str(&format!("[[array]]\nname = {name:?}\nsearch = [{search:?}]\n{lines}"));
        }
        let file = self.path().join("calpe.toml");
        fs::write(&file, text).expect("a configuration");
        file
    }
}

const RELOADED: &str = "read the configuration and the files of TLS again";

/// Sends SIGHUP and waits for a line of the log; `times` it was there by then.
fn reload(up: &Up, line: &str, times: usize) {
    up.signal("HUP");
    until(line, || up.log().matches(line).count() == times);
}

fn arrays(up: &Up) -> Vec<serde_json::Value> {
    let status: serde_json::Value = serde_json::from_str(&up.calpe(&["status", "--json"])).expect("JSON");
    status["arrays"].as_array().expect("arrays").clone()
}

fn names(up: &Up) -> Vec<String> {
    arrays(up).iter().map(|array| array["name"].as_str().expect("a name").to_owned()).collect()
}

#[test]
fn sighup_reads_the_configuration_and_never_ends_the_daemon() {
    let world = World::new(&["one", "two"]);
    let config = world.configure("memory = \"64MiB\"\n", &[("one", "")]);
    let up = Up::serve(world.path(), &config);
    reload(&up, RELOADED, 1);
    assert!(!up.log().contains("without effect"), "nothing changed: {}", up.log());

    // A problem anywhere, and nothing counts.
    world.configure("memory = \"64MiB\"\n", &[("one", ""), ("two", "rebuild_max = \"much\"\n")]);
    reload(&up, "the configuration is refused, all stays as it was", 1);
    let place = format!("{}:10:", config.display());
    assert!(up.log().contains(&place) && up.log().contains("array[1].rebuild_max"), "{}", up.log());
    fs::remove_file(&config).expect("ours");
    reload(&up, "the configuration is refused, all stays as it was", 2);
    assert_eq!(names(&up), ["one"]);

    // A new array is served; what a running daemon cannot change is named, each time.
    world.configure("memory = \"32MiB\"\n", &[("one", "page_cache = \"2MiB\"\n"), ("two", "")]);
    let left = "without effect until the next start: daemon.memory; changed, and in effect for an array when it is imported \
                again ('calpe export', then 'calpe import'), or from the next start: page_cache of array 'one'";
    reload(&up, left, 1);
    until("the new array is served", || {
        names(&up) == ["one", "two"] && arrays(&up).iter().all(|array| array["state"] == "ONLINE")
    });
    reload(&up, left, 2);

    // One that an administrator stopped is not new, and one that is not configured any more is not stopped.
    up.calpe(&["export", "two"]);
    reload(&up, left, 3);
    world.configure("memory = \"64MiB\"\n", &[("two", "")]);
    reload(&up, "array 'one' is not in the configuration any more", 1);
    until("it has reloaded", || up.log().matches(RELOADED).count() == 5);
    assert_eq!(names(&up), ["one"]);
    up.stop();
}

#[test]
fn an_array_that_is_named_by_its_uuid_now_is_the_same_array() {
    let world = World::new(&["one"]);
    let config = world.configure("", &[("one", "")]);
    let up = Up::serve(world.path(), &config);
    until("it is served", || arrays(&up).first().is_some_and(|array| array["state"] == "ONLINE"));
    let uuid = arrays(&up)[0]["uuid"].as_str().expect("known").to_owned();
    let text = fs::read_to_string(&config).expect("ours");
    fs::write(&config, text.replace("name = \"one\"", &format!("uuid = {uuid:?}"))).expect("ours");
    reload(&up, &format!("array 'one' is called '{uuid}' in the configuration now"), 1);
    until("it has reloaded", || up.log().contains(RELOADED));
    assert!(!up.log().contains("not in the configuration any more"), "{}", up.log());
    assert_eq!(names(&up), ["one"]);
    up.stop();
}

/// Also one that was exported meanwhile, and one that had not been found.
#[test]
fn a_section_that_comes_back_is_new() {
    let world = World::new(&["one"]);
    let (away, members) = (world.path().join("away"), world.path().join("one"));
    let up = Up::serve(world.path(), &world.configure("", &[("one", "")]));
    let is_online = || arrays(&up).first().is_some_and(|array| array["state"] == "ONLINE");
    let mut reloads = 0;
    let mut reload_with = |arrays: &[(&str, &str)]| {
        world.configure("", arrays);
        reloads += 1;
        reload(&up, RELOADED, reloads);
    };
    until("it is served", is_online);
    up.calpe(&["export", "one"]);
    reload_with(&[]);
    reload_with(&[("one", "")]);
    until("it is served again", is_online);
    reload_with(&[]);
    up.calpe(&["export", "one"]);
    fs::rename(&members, &away).expect("moved");
    reload_with(&[("one", "")]);
    until("it is looked for", || arrays(&up).first().is_some_and(|array| array["state"] == "FAILED"));
    reload_with(&[]);
    fs::rename(&away, &members).expect("moved");
    reload_with(&[("one", "")]);
    until("it is served once more", is_online);
    up.stop();
}

#[test]
fn an_array_that_is_taken_out_of_the_configuration_is_told_once() {
    let world = World::new(&["one", "two"]);
    let up = Up::serve(world.path(), &world.configure("", &[("one", "")]));
    let told = || up.log().matches("array 'two' is not in the configuration any more").count();
    let mut reloads = 0;
    let mut reload_with = |arrays: &[(&str, &str)]| {
        world.configure("", arrays);
        reloads += 1;
        reload(&up, RELOADED, reloads);
    };
    // Put back and taken out again, it is news.
    for news in 1..=2 {
        reload_with(&[("one", ""), ("two", "")]);
        for _ in 0..3 {
            reload_with(&[("one", "")]);
            assert_eq!(told(), news, "{}", up.log());
        }
    }
    let said = |name: &str| {
        let output = try_run(&mut up.command(&["export", name, "-n"]));
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(said("one").contains("is in the configuration"), "{}", said("one"));
    assert!(!said("two").contains("is in the configuration"), "{}", said("two"));
    up.stop();
}

#[test]
fn a_pass_goes_on_at_the_pace_of_the_new_configuration() {
    let world = World::new(&["one"]);
    let config = world.configure("", &[("one", "rebuild_min = \"1MiB\"\nrebuild_max = \"1MiB\"\n")]);
    let up = Up::serve(world.path(), &config);
    let image = world.path().join("image");
    crate::support::disk_image(&image, 32 << 20, 7);
    run(Command::new("nbdcopy").arg("--flush").arg(&image).arg(up.uri()));
    let begun = Instant::now();
    up.calpe(&["scrub", "one"]);
    assert!(up.status()["scan"][0]["percent"].as_f64().expect("a pass") < 50.0);
    world.configure("", &[("one", "")]);
    reload(&up, RELOADED, 1);
    up.calpe(&["wait", "one", "-t", "scrub"]);
    assert!(begun.elapsed() < Duration::from_secs(15), "at its old pace it takes half a minute");
    up.stop();
}

/// The terminal of `calpe up` is gone: it ends in order.
#[test]
fn sighup_ends_a_daemon_of_up_in_order() {
    let dir = tempfile::tempdir().expect("a folder");
    let up = Up::start(dir.path(), &["--size", "16MiB"]);
    up.signal("HUP");
    let data = dir.path().join("data");
    assert!(up.ended().success());
    assert!(!data.join("control.sock").exists());
    assert!(!try_run(calpe().arg("--socket").arg(data.join("control.sock")).arg("status")).status.success());
}
