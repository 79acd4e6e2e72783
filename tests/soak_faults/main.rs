//! Faults that pass, against the real daemon: members behind servers that err, hang, cut connections and lose
//! their caches at random, at most m of them sick at any moment, with the daemon killed and restarted in
//! between. When all faults are over every block must be readable and right, and the array whole again.
//! `scripts/soak-faults` runs it for as long as asked; without its variables it is a run of half a minute.
//!
//! CALPE_SOAK_FAULTS_MINUTES, _GEOMETRIES ("2+2 4+2"), _SEED, _ROUND (one round over and over), _KINDS
//! ("all", "all -rot", "storms", or names of plan.rs), _BINARY (another calpe), _KEEP (where violations are
//! kept).

mod bed;
#[path = "../support/fault_server/mod.rs"]
mod fault_server;
mod load;
mod plan;
mod server;
#[path = "../support/mod.rs"]
mod support;
mod tally;
mod trial;

use bed::Shape;
use plan::{KINDS, Kind};
use std::time::{Duration, Instant};
use tally::table;
use trial::{Settings, keep_dir, trial};

/// What is tried when nobody says for how long.
const SMOKE_MINUTES: f64 = 0.25;
const GEOMETRIES: &str = "2+2 4+2 3+3";

fn setting(name: &str) -> Option<String> {
    std::env::var(format!("CALPE_SOAK_FAULTS_{name}")).ok().filter(|value| !value.is_empty())
}

fn number(name: &str) -> Option<u64> {
    setting(name).map(|text| {
        let parsed = match text.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => text.parse(),
        };
        parsed.unwrap_or_else(|error| panic!("{name}={text}: {error}"))
    })
}

fn kinds() -> Vec<&'static Kind> {
    match setting("KINDS").as_deref() {
        None => KINDS.iter().collect(),
        Some(text) => {
            let mut kinds: Vec<&'static Kind> = Vec::new();
            for name in text.split_whitespace() {
                let known = |name: &str| {
                    let found = KINDS.iter().find(|kind| kind.name == name);
                    found.unwrap_or_else(|| panic!("there is no kind of fault called '{name}'"))
                };
                match (name, name.strip_prefix('-')) {
                    ("all", _) => kinds.extend(KINDS.iter().filter(|kind| !kind.what.is_storm())),
                    ("storms", _) => kinds.extend(KINDS.iter().filter(|kind| kind.what.is_storm())),
                    (_, Some(left_out)) => kinds.retain(|kind| kind.name != known(left_out).name),
                    _ => kinds.push(known(name)),
                }
            }
            kinds
        }
    }
}

#[test]
fn faults_that_pass_leave_nothing_behind() {
    let minutes = setting("MINUTES").map_or(SMOKE_MINUTES, |text| text.parse().expect("a number of minutes"));
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let seed = number("SEED").unwrap_or(1);
    let settings = Settings {
        seed,
        round: number("ROUND"),
        kinds: kinds(),
        binary: setting("BINARY").unwrap_or_else(|| env!("CARGO_BIN_EXE_calpe").into()).into(),
        keep: keep_dir(),
        until,
    };
    let geometries = setting("GEOMETRIES").unwrap_or_else(|| GEOMETRIES.into());
    let shapes: Vec<Shape> = geometries
        .split_whitespace()
        .map(|text| text.parse().unwrap_or_else(|error| panic!("{error}")))
        .collect();
    let tallies: Vec<_> = std::thread::scope(|scope| {
        let running: Vec<_> = shapes
            .iter()
            .map(|&shape| {
                (
                    shape,
                    scope.spawn({
                        let settings = &settings;
                        move || trial(shape, settings)
                    }),
                )
            })
            .collect();
        let ended = running.into_iter().map(|(shape, thread)| {
            let tally = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (shape.to_string(), tally)
        });
        ended.collect()
    });
    let names: Vec<&str> = settings.kinds.iter().map(|kind| kind.name).collect();
    println!("{minutes} minutes from seed {seed}, faults: {}", names.join(", "));
    println!("{}", table(&tallies));
    let told: Vec<&str> = tallies.iter().flat_map(|(_, tally)| &tally.told).map(String::as_str).collect();
    assert!(told.is_empty(), "{} violations:\n{}", told.len(), told.join("\n"));
}

#[test]
fn every_kind_is_known_by_one_name() {
    let mut names: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), KINDS.len());
}
