//! Checks the project's own rules over its sources: which layer may use which, a head on every file, no long
//! files.

mod circles;
mod fields;
mod machines;
mod paths;
mod width;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a file before its tests.
const LINES_MAX: usize = 800;

/// For each room under src/, the rooms that it may name besides itself: the table of ARCHITECTURE.md.
fn allowed() -> BTreeMap<&'static str, &'static [&'static str]> {
    BTreeMap::from([
        ("units", &[] as &[&str]),
        ("block_io", &["units"]),
        ("format", &["units"]),
        ("codec", &["units", "block_io"]),
        ("polling", &["units"]),
        ("files", &["polling"]),
        ("gpu", &["units", "block_io", "codec", "files", "polling"]),
        ("member", &["units", "block_io", "nbd", "tls", "polling"]),
        ("nbd", &["units"]),
        ("tls", &["units", "files", "polling"]),
        ("view", &[]),
        ("array", &["units", "block_io", "format", "codec", "view"]),
        ("volume", &["units", "block_io", "format", "codec", "array"]),
        ("control", &["units"]),
        ("reclaim", &[]),
        ("no_alternate_stack", &[]),
        ("attach", &["units", "nbd", "control", "files", "polling"]),
        (
            "daemon",
            &[
                "units", "block_io", "format", "codec", "gpu", "member", "nbd", "tls", "array", "volume",
                "control", "reclaim", "files", "polling",
            ],
        ),
        // The command line opens members for create and inspect and runs the daemon.
        (
            "cli",
            &[
                "units", "block_io", "format", "codec", "gpu", "member", "nbd", "array", "control",
                "reclaim", "attach", "daemon",
            ],
        ),
        ("testing", &["units", "block_io", "format", "codec", "member", "nbd", "array", "volume", "control"]),
        // The interface for models outside this tree.
        ("lib", &["codec", "units"]),
        ("main", &["cli"]),
    ])
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a source folder") {
        let path = entry.expect("a folder entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// (path below src/, text before the tests, whole text)
fn files() -> Vec<(String, String, String)> {
    let root = project().join("src");
    let mut found = Vec::new();
    sources(&root, &mut found);
    assert!(found.len() > 20, "the sources were not found");
    found
        .into_iter()
        .map(|path| {
            let name = path.strip_prefix(&root).expect("below src").display().to_string();
            // The crates below src/ that hold several rooms.
            let name = ["core/", "host/"]
                .iter()
                .find_map(|crate_of| name.strip_prefix(crate_of))
                .unwrap_or(&name)
                .to_owned();
            let text = fs::read_to_string(&path).expect("readable");
            let code = without_tests(&text);
            (name, code, text)
        })
        .collect()
}

/// A source text without its items for tests: declarations of one line, or blocks up to the closing brace.
fn without_tests(text: &str) -> String {
    let mut parts = text.split("\n#[cfg(test)]\n");
    let mut code = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (first, rest) = part.split_once('\n').unwrap_or((part, ""));
        let after =
            if first.ends_with(';') { Some(rest) } else { rest.split_once("\n}\n").map(|(_, after)| after) };
        code.push('\n');
        code.push_str(after.unwrap_or_default());
    }
    code
}

#[test]
fn items_for_tests_are_left_out_and_what_comes_behind_them_is_not() {
    let text = "use a;\n#[cfg(test)]\nmod suite;\nuse b;\n#[cfg(test)]\nimpl X {\n    fn x() {\n    }\n}\nfn c() {}\n\
                #[cfg(test)]\nmod tests {\n    use d;\n}\n";
    assert_eq!(without_tests(text), "use a;\nuse b;\nfn c() {}\n");
}

fn room_of(name: &str) -> &str {
    name.split(['/', '.']).next().unwrap_or_default()
}

/// The rooms that a source text names by paths from the root of their crates, grouped imports included.
fn named_rooms(code: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let word = |text: &str| -> String { text.chars().take_while(|c| is_word(*c)).collect() };
    for root in ["crate::", "calpe_core::", "calpe_host::", "calpe_gpu::", "calpe_view::"] {
        for (at, _) in code.match_indices(root) {
            if code[..at].chars().next_back().is_some_and(is_word) {
                continue;
            }
            let rest = &code[at + root.len()..];
            if let "calpe_gpu::" | "calpe_view::" = root {
                rooms.push(root["calpe_".len()..root.len() - 2].to_owned());
            } else if let Some(group) = rest.strip_prefix('{') {
                let end = group.find('}').unwrap_or(group.len());
                rooms.extend(group[..end].split(',').map(|part| word(part.trim())).filter(|w| !w.is_empty()));
            } else {
                rooms.push(word(rest));
            }
        }
    }
    rooms
}

#[test]
fn every_layer_names_only_the_layers_it_may_use() {
    let allowed = allowed();
    let mut wrong = Vec::new();
    for (name, code, _) in files() {
        let room = room_of(&name).to_owned();
        let may = allowed
            .get(room.as_str())
            .unwrap_or_else(|| panic!("src/{name}: no row for '{room}' in the table"));
        // Test modules may use the rooms that are for tests.
        let is_test = name.contains("/tests/") || name.ends_with("/tests.rs") || name.ends_with("/suite.rs");
        for named in named_rooms(&code) {
            if is_test && named == "testing" {
                continue;
            }
            if named != room && allowed.contains_key(named.as_str()) && !may.contains(&named.as_str()) {
                wrong.push(format!("src/{name} uses crate::{named}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_table_of_the_map_is_the_table_of_this_test() {
    let map = fs::read_to_string(project().join("ARCHITECTURE.md")).expect("ARCHITECTURE.md");
    for (room, may) in allowed() {
        if room == "lib" || room == "main" {
            continue;
        }
        let row = map
            .lines()
            .find(|line| {
                line.starts_with(&format!("| `{room}/`")) || line.starts_with(&format!("| `{room}.rs`"))
            })
            .unwrap_or_else(|| panic!("ARCHITECTURE.md has no row for {room}"));
        let last = row.trim_end_matches('|').rsplit('|').next().unwrap_or_default().trim();
        let mut listed: Vec<&str> = last.split(", ").filter(|word| *word != "-").collect();
        let mut expected = may.to_vec();
        listed.sort_unstable();
        expected.sort_unstable();
        assert_eq!(listed, expected, "ARCHITECTURE.md, row {room}");
    }
}

#[test]
fn every_file_opens_with_a_head_and_stays_short() {
    for (name, code, text) in files() {
        assert!(text.starts_with("//!"), "src/{name} has no //! head");
        let lines = code.lines().count();
        assert!(
            lines <= LINES_MAX,
            "src/{name} has {lines} lines before its tests, at most {LINES_MAX} are allowed"
        );
    }
}

#[test]
fn unsafe_code_lives_only_where_it_may() {
    for (name, code, _) in files() {
        let opens = code.contains("allow(unsafe_code)");
        let may = matches!(name.as_str(), "block_io/buffer.rs" | "block_io/shared_memory.rs")
            || matches!(name.as_str(), "codec/guarded.rs" | "gpu/device.rs")
            || ["exchange", "remote", "sandbox", "server"]
                .iter()
                .any(|file| name == format!("gpu/helper/{file}.rs"))
            || name.starts_with("gpu/cuda/")
            || name.starts_with("member/")
            || matches!(name.as_str(), "gpu/device.rs" | "gpu/fake.rs" | "gpu/manager.rs" | "gpu/trial.rs")
            || name.starts_with("gpu/cuda/")
            || name.starts_with("codec/engine/")
            || name.starts_with("daemon/reactor/")
            || matches!(name.as_str(), "reclaim.rs" | "no_alternate_stack.rs");
        assert!(!opens || may, "src/{name} allows unsafe code");
    }
}

#[test]
fn nothing_is_left_to_do_in_the_sources() {
    for (name, code, _) in files() {
        for word in ["todo!(", "unimplemented!(", "dbg!(", "FIXME", "TODO"] {
            assert!(!code.contains(word), "src/{name} contains {word}");
        }
    }
}
