//! What messages tell people to do: typed as it stands, it works.

use super::support::load::Client;
use super::support::serve::{Serve, both, create};
use super::support::{Up, calpe, run, try_run};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

/// Runs a line in a shell that finds calpe by its name, in this directory.
fn typed(dir: &Path, line: &str) -> Output {
    let binary = Path::new(env!("CARGO_BIN_EXE_calpe"));
    let path = format!("{}:/usr/bin:/bin", binary.parent().unwrap().display());
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(line).env("PATH", path).env_remove("CALPE_SOCKET").current_dir(dir);
    try_run(&mut shell)
}

/// The commands that stand between quotes in a text.
fn commands(text: &str) -> Vec<String> {
    let quoted = text.split('\'').skip(1).step_by(2);
    quoted.filter(|text| text.starts_with("calpe ")).map(str::to_owned).collect()
}

const UP: [&str; 6] = ["--data", "2", "--parity", "1", "--size", "8MiB"];

#[test]
fn what_up_says_works_as_it_stands_in_any_directory() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    fs::create_dir(&place).unwrap();
    let up = Up::start(&place, &UP);
    let member = up.member(1);
    up.stop();
    fs::remove_file(place.join("data").join(member.file_name().unwrap())).unwrap();
    let up = Up::start(&place, &[]);
    let told = up.log();
    let found = commands(&told);
    let replace = found.iter().find(|line| line.ends_with("replace calpe 1 NEW")).expect(&told);
    let status = found.iter().find(|line| line.ends_with(" status")).expect(&told);
    assert!(typed(dir.path(), status).status.success(), "{status}");
    let output = typed(dir.path(), &replace.replace("NEW", "new.img"));
    assert!(output.status.success(), "{replace}: {}", both(&output));
    up.stop();
    let told = fs::read_to_string(place.join("daemon.log")).unwrap();
    let again = commands(&told).pop().expect("a last word");
    assert!(again.starts_with("calpe up --dir "), "{told}");
    // With too few members it is refused, and the advice is the same command.
    fs::remove_file(place.join("data/member-02.img")).unwrap();
    fs::remove_file(dir.path().join("new.img")).unwrap();
    let refused = typed(dir.path(), &again);
    let told = both(&refused);
    assert!(!refused.status.success() && told.contains(&format!("then '{again}' again")), "{told}");
    assert!(!told.contains("import"), "{told}");
}

/// As the action of an array whose log is refused has it (`control/verdict.rs`).
#[test]
fn an_array_is_stopped_and_imported_by_force_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    create(&dir.path().join("there"), "tank", 2, 1);
    let serve = Serve::start(dir.path(), "");
    serve.says("import tank --dir there --once");
    let with_socket = |line: &str| line.replace("calpe ", "calpe --socket run/control.sock ");
    let line = "calpe export tank && calpe import --force tank";
    let output = typed(dir.path(), &with_socket(line));
    assert!(output.status.success() && both(&output).contains("is ONLINE"), "{}", both(&output));
    let client = Client::connect(&serve.nbd()).unwrap();
    let output = typed(dir.path(), &with_socket(line));
    assert!(!output.status.success() && both(&output).contains("export --force tank"), "{}", both(&output));
    let output = typed(dir.path(), &with_socket("calpe export --force tank && calpe import --force tank"));
    assert!(output.status.success() && both(&output).contains("is ONLINE"), "{}", both(&output));
    drop(client);
    serve.stop();
}

#[test]
fn advice_with_paths_is_typed_as_it_stands() {
    let dir = tempfile::tempdir().unwrap();
    for (name, folder) in [("one", "my $HOME/`it's`"), ("two", "wow! \"so\" \\many")] {
        let place = dir.path().join(folder);
        fs::create_dir_all(&place).unwrap();
        let mut create = calpe();
        create.args(["create", name, "--data", "1", "--parity", "1", "--size", "8MiB"]);
        let told = run(create.arg(place.join("a")).arg(place.join("b")));
        // The path itself may hold what ends a quotation.
        let (_, command) = told.split_once("serve it with '").expect(&told);
        let (command, _) = command.split_once("', or by").expect(&told);
        let serve = Serve::start(dir.path(), "");
        let with_socket = |line: &str| line.replacen("calpe ", "calpe --socket run/control.sock ", 1);
        let output = typed(dir.path(), &with_socket(command));
        assert!(output.status.success(), "{command}: {}", both(&output));
        serve.says(&format!("export {name}"));
        let mut list = serve.command("import");
        let listed = both(&try_run(list.arg("--dir").arg(&place)));
        // Of the lines of the listing, the action may take several.
        let begin = format!("import it with 'calpe import {name}");
        let (_, action) = listed.split_once(&begin).expect(&listed);
        let (action, _) = action.split_once("'\nmembers:").expect(&listed);
        let action = format!("calpe import {name}{action}");
        let action = action.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        let output = typed(dir.path(), &with_socket(&action));
        assert!(output.status.success(), "{action}: {}", both(&output));
        serve.says(&format!("export {name}"));
        serve.stop();
    }
}

#[test]
fn import_lists_what_it_finds_and_prints_whole_uris() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(dir.path(), "");
    fs::create_dir_all(dir.path().join("m")).unwrap();
    run(calpe().current_dir(dir.path()).args("create tank -k 1 -m 1 --size 8MiB m/0 img".split(' ')));
    serve.says("import tank --dir m --dir img");
    serve.says("export tank");
    let listed = serve.says("import --dir m");
    assert!(!listed.contains("not found") && listed.contains("/img"), "{listed}");
    let told = serve.says("import tank --dir .");
    let uri = told.split_whitespace().find(|word| word.starts_with("nbd+unix://")).expect(&told);
    assert!(uri.ends_with(&format!("?socket={}", serve.nbd().display())), "{told}");
    // Two are away on purpose: each is named.
    serve.says("export tank");
    run(calpe().current_dir(dir.path()).args("create pond -k 1 -m 2 --size 8MiB p0 p1 p2".split(' ')));
    serve.says("import pond --dir .");
    serve.says("offline pond 1");
    serve.says("offline pond 2");
    let told = serve.says("status pond");
    assert!(told.contains("'calpe online pond 1', 'calpe online pond 2'"), "{told}");
    assert!(serve.says("fail pond 2").contains("FAULTED"));
    let told = serve.refuses("import nothing --dir m");
    assert!(told.contains("check its name") && !told.contains("name the directory"), "{told}");
}

#[test]
fn an_import_of_several_arrays_tells_what_was_done_apart_from_what_was_refused() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(dir.path(), "");
    for name in ["pond", "tank"] {
        create(&dir.path().join(name), name, 2, 1);
    }
    for gone in ["m0", "m1"] {
        fs::remove_file(dir.path().join("pond").join(gone)).unwrap();
    }
    let output = serve.ask("import -a --dir pond --dir tank");
    let [told, complaints] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert_eq!(output.status.code(), Some(1), "{told}{complaints}");
    assert!(told.starts_with("array 'tank' (2+1") && told.lines().count() == 1, "{told}");
    assert!(complaints.contains("calpe: array 'pond' (2+1) cannot start"), "{complaints}");
    assert!(!complaints.contains("'tank'"), "{complaints}");
    let events = serve.events();
    let command = events.iter().find(|event| event["kind"] == "command").expect("the command");
    let text = command["text"].as_str().unwrap();
    assert!(text.contains("array 'tank' (2+1") && text.contains("refused: array 'pond'"), "{text}");
    assert!(!text.contains("was refused"), "{text}");
    serve.stop();
}

#[test]
fn of_two_arrays_of_one_name_each_is_imported_by_its_uuid() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(dir.path(), "");
    for place in ["a", "b"] {
        create(&dir.path().join(place), "tank", 2, 1);
    }
    let listed = serve.says("import --dir a --dir b");
    let advice = commands(&listed.split_whitespace().collect::<Vec<_>>().join(" "));
    assert_eq!(advice.len(), 2, "{listed}");
    assert_ne!(advice[0], advice[1], "{listed}");
    let line = advice[0].strip_prefix("calpe ").unwrap();
    assert!(serve.says(line).starts_with("array 'tank' (2+1"), "{listed}");
    serve.stop();
}

#[test]
fn up_finds_a_member_that_was_replaced_by_a_device_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let up = Up::start(dir.path(), &UP);
    let elsewhere = dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    up.calpe(&["replace", "calpe", "1", elsewhere.join("new.img").to_str().unwrap(), "-w"]);
    up.stop();
    let up = Up::start(dir.path(), &[]);
    assert_eq!(up.status()["state"], "ONLINE", "{}", up.log());
    up.stop();
}

#[test]
fn what_looks_offline_at_files_says_what_to_do_there() {
    let dir = tempfile::tempdir().unwrap();
    let told = |line: &str, code: i32| {
        let output = try_run(calpe().current_dir(dir.path()).args(line.split(' ')));
        assert_eq!(output.status.code(), Some(code), "{line}: {}", both(&output));
        both(&output)
    };
    told("create tank -k 2 -m 1 --size 8MiB 0 1 2", 0);
    let fresh = told("inspect 0", 0);
    assert!(fresh.contains("not written yet") && !fresh.contains("no Calpe superblock"), "{fresh}");
    let created = fresh.lines().find(|line| line.contains("created: ")).expect(&fresh);
    assert!(created.contains(" UTC ("), "{created}");
    let few = told("check 0", 1);
    assert!(few.contains("name them, too") && !few.contains("import"), "{few}");
    let two = told("check 0 1", 1);
    assert!(two.contains("not given") && !two.contains("at start"), "{two}");
    let whole = told("check 0 1 2", 0);
    assert!(whole.contains("marked clean"), "{whole}");
    // One whose superblocks were overwritten was given, and does not say which it is.
    let bytes = fs::metadata(dir.path().join("2")).unwrap().len();
    let file = fs::File::options().write(true).open(dir.path().join("2")).unwrap();
    for at in [0, bytes - (64 << 10)] {
        file.write_all_at(&[0x55; 64 << 10], at).unwrap();
    }
    let overwritten = told("check 0 1 2", 1);
    assert!(overwritten.contains("not given, or it is 2, which cannot be used"), "{overwritten}");
    for line in ["inspect nope", "check nope"] {
        let nothing = told(line, 1);
        assert!(nothing.contains("nope: no such file") && !nothing.contains("create"), "{nothing}");
    }
}

#[test]
fn a_benchmark_that_cannot_be_meant_is_refused_at_once() {
    for (line, said) in [
        ("codec --seconds 1 --geometry 4+2 --block 3", "a block of 3 bytes"),
        ("codec --block 0", "a block of 0 bytes"),
        ("codec --sweep", "--engine cuda"),
        ("codec --engine cuda --block 4KiB", "leave --geometry and --block out"),
        ("codec --seconds 0", "a run of 0 seconds"),
        ("codec --seconds NaN", "a run of NaN seconds"),
        ("hash --seconds=-1", "a run of -1 seconds"),
    ] {
        let output = try_run(calpe().arg("bench").args(line.split(' ')));
        assert_eq!(output.status.code(), Some(2), "{line}: {}", both(&output));
        assert!(both(&output).contains(said), "{line}: {}", both(&output));
    }
}

#[test]
fn more_memory_than_the_host_has_is_refused_with_both_figures() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("calpe.toml");
    let host = nix::sys::sysinfo::sysinfo().unwrap().ram_total();
    // No more than may be configured anywhere.
    let asked = (host + (1 << 30)).min(1 << 40);
    if asked <= host {
        return;
    }
    for key in ["memory", "metadata_memory"] {
        fs::write(&config, format!("[daemon]\nruntime_dir = \"run\"\n{key} = {asked}\n")).unwrap();
        for option in ["--check", "--log-format=human"] {
            let output = try_run(calpe().arg("serve").arg("--config").arg(&config).arg(option));
            let told = both(&output);
            assert_eq!(output.status.code(), Some(1), "{told}");
            assert!(told.contains(&format!("daemon.{key}: ")) && told.contains("is more than the"), "{told}");
        }
    }
    assert!(!dir.path().join("run").exists());
}

/// Its file is smaller than it was: nothing brings it back, whatever it was taken out for.
#[test]
fn a_member_that_was_cut_off_is_to_be_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let there = dir.path().join("there");
    create(&there, "tank", 2, 1);
    let file = fs::File::options().write(true).open(there.join("m1")).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let mut serve = Serve::start(dir.path(), "");
    for state in ["MISSING", "FAULTED", "OFFLINE"] {
        serve.says("import tank --dir there --once");
        let tank = serve.arrays().remove(0);
        assert_eq!(tank["members"][1]["state"], state);
        let reason = tank["members"][1]["reason"].as_str().unwrap();
        assert!(reason.contains("it was cut off"), "{state}: {reason}");
        let told = commands(tank["action"].as_str().unwrap());
        assert_eq!(told, ["calpe replace tank 1 NEW"], "{state}: {}", tank["action"]);
        assert!(serve.refuses("online tank 1").contains("cannot come back from there"));
        match state {
            "MISSING" => drop(serve.says("fail tank 1")),
            "FAULTED" => drop(serve.says("offline tank 1")),
            _ => {}
        }
        serve.says("export tank");
    }
    // One that is cut off while it is served.
    let file = fs::File::options().write(true).open(there.join("m2")).unwrap();
    let whole = file.metadata().unwrap().len();
    serve.says("import tank --dir there --once");
    serve.says("replace tank 1 spare -w");
    for cut in [whole - (1 << 20), whole / 2] {
        serve.says("wait tank");
        file.set_len(cut).unwrap();
        serve.array_when("the cut is seen", |array| array["state"] == "DEGRADED");
        for state in ["", "fail tank 2", "offline tank 2"] {
            if !state.is_empty() {
                serve.says(state);
            }
            let tank = serve.arrays().remove(0);
            let member = &tank["members"][2];
            assert_eq!(member["conditions"], serde_json::json!(["cut_off"]), "{state}: {member}");
            let told = commands(tank["action"].as_str().unwrap());
            assert_eq!(told, ["calpe replace tank 2 NEW"], "{state}: {}", tank["action"]);
        }
        // Its file has its length again: it is found to be whole, and comes back.
        file.set_len(whole).unwrap();
        serve.says("online tank 2");
        serve.says("wait tank");
        let tank = serve.arrays().remove(0);
        assert_eq!(tank["state"], "ONLINE", "{tank}");
        let conditions = tank["members"][2]["conditions"].as_array().unwrap();
        assert!(!conditions.contains(&"cut_off".into()), "{conditions:?}");
    }
    serve.says("export tank");
    // One that was cut off while the array was served is known when it is to be brought back.
    let file = fs::File::options().write(true).open(there.join("m2")).unwrap();
    let said = serve.says("import tank --dir there --once");
    assert!(
        said.contains("m1: has") && !said.contains("replace the member"),
        "it serves from another: {said}"
    );
    serve.says("replace tank 1 new -w");
    serve.says("offline tank 2");
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let refused = serve.refuses("online tank 2");
    assert!(refused.contains("calpe replace tank 2 NEW"), "{refused}");
    let told = commands(serve.arrays()[0]["action"].as_str().unwrap());
    assert_eq!(told, ["calpe replace tank 2 NEW"]);
    serve.stop();
}

#[test]
fn of_two_arrays_of_one_name_a_dry_run_says_how_the_other_one_is_imported() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(dir.path(), "");
    for place in ["a", "b"] {
        create(&dir.path().join(place), "tank", 2, 1);
    }
    let told = both(&serve.ask("import -a -n --dir a --dir b"));
    let [advice] = &commands(&told)[..] else { panic!("{told}") };
    let typed = typed(dir.path(), &advice.replacen("calpe ", "calpe --socket run/control.sock ", 1));
    assert!(typed.status.success(), "{advice}: {}", both(&typed));
    serve.stop();
}

#[test]
fn an_array_that_needs_more_memory_than_is_left_is_refused_alike_by_list_dry_run_and_import() {
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start_with(dir.path(), "metadata_memory = \"24MiB\"\n", "");
    let ask = |line: &str| both(&serve.ask(line)).split_whitespace().collect::<Vec<_>>().join(" ");
    // The map of the first is too large; that of the second is not, with a small cache.
    for (name, size, can_shrink) in [("map", "3GiB", false), ("cache", "2GiB", true)] {
        let mut create = calpe();
        create.current_dir(dir.path()).args(["create", name, "-k1", "-m0", "--chunk", "4KiB"]);
        fs::create_dir(dir.path().join(name)).unwrap();
        run(create.args(["--size", size, &format!("{name}/m")]));
        for line in ["import -n NAME --dir NAME", "import NAME --dir NAME", "import --dir NAME"] {
            let told = ask(&line.replace("NAME", name));
            assert!(told.contains("of memory, and 24 MiB of 24 MiB are left"), "{told}");
            assert_eq!(told.contains("page_cache"), can_shrink, "{told}");
            assert!(!told.contains("can be imported"), "{told}");
        }
    }
    serve.stop();
}
