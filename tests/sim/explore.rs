//! Crashes at every moment of seeded loads over small arrays; what clients see afterwards is checked.
//!
//! CALPE_SIM_POINTS: crash points of a run (default: few, for an ordinary `cargo test`). CALPE_SIM_SEED: the
//! first seed. CALPE_SIM_SCENARIO: only the scenarios of these names, separated by commas. CALPE_SIM_LANES:
//! only those with so many lanes. CALPE_SIM_MINUTES: runs seeds for this long instead of a number of points.
//! CALPE_SIM_REPLAY: the token of a violation to replay; with CALPE_MUTATION, one that a broken rule causes,
//! in a build with debug assertions.

use calpe_core::testing::{
    FAULT_RULES, Mutation, SCENARIOS, Scenario, SimWorld, Standing, Totals, Violation, explore, is_kept,
    replay, scenario_of,
};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Crash points of an ordinary test run.
const POINTS: u64 = 20_000;
/// Most crash points of one seed; a load that runs to its end has a fifth of that.
const POINTS_OF_SEED_MAX: u64 = 20_000;
/// Violations after which a run ends.
const VIOLATIONS_MAX: usize = 5;
/// Minutes between two progress reports of a long run.
const PROGRESS_MINUTES: u64 = 5;
/// Memory for the buffers of one array; buffers that do not fit come from the heap.
const POOL_BYTES: usize = 4 << 20;

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

/// Explores the scenarios in turn, seed after seed, on all cores, until `enough`.
fn campaign(
    scenarios: &[Scenario],
    first_seed: u64,
    enough: impl Fn(u64) -> bool + Sync,
) -> (Totals, Vec<Violation>) {
    let next = AtomicU64::new(0);
    let points = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    let result = Mutex::new((Totals::default(), Vec::new()));
    let (started, told) = (Instant::now(), AtomicU64::new(0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let worlds: Vec<SimWorld> =
                    scenarios.iter().map(|scenario| SimWorld::new(scenario.shape, POOL_BYTES)).collect();
                while !over.load(Ordering::Relaxed) {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    let at = job as usize % scenarios.len();
                    let seed = first_seed.wrapping_add(job / scenarios.len() as u64);
                    let (totals, violation) = explore(&worlds[at], &scenarios[at], seed, POINTS_OF_SEED_MAX);
                    let all = points.fetch_add(totals.points, Ordering::Relaxed) + totals.points;
                    let mut result = result.lock().expect("no thread panics with the result");
                    result.0.add(&totals);
                    let minutes = started.elapsed().as_secs() / 60;
                    if minutes >= told.load(Ordering::Relaxed) + PROGRESS_MINUTES {
                        told.store(minutes, Ordering::Relaxed);
                        println!("after {minutes} minutes: {all} points, {} violations", result.1.len());
                    }
                    if let Some(violation) = violation {
                        println!("{violation}");
                        result.1.push(violation);
                    }
                    if enough(all) || result.1.len() >= VIOLATIONS_MAX {
                        over.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    result.into_inner().expect("no thread panics with the result")
}

fn chosen() -> Vec<Scenario> {
    let wanted = std::env::var("CALPE_SIM_SCENARIO").ok();
    let is_wanted = |scenario: &&Scenario| match &wanted {
        Some(wanted) => wanted.split(',').any(|name| name == scenario.name),
        None => is_kept(scenario),
    };
    let lanes = number("CALPE_SIM_LANES", 0);
    let is_wanted = |scenario: &&Scenario| {
        is_wanted(scenario) && (lanes == 0 || lanes == u64::from(scenario.shape.lanes.count))
    };
    let chosen: Vec<Scenario> = SCENARIOS.iter().filter(is_wanted).copied().collect();
    assert!(!chosen.is_empty(), "no scenario is called {wanted:?}");
    chosen
}

fn report(totals: &Totals, violations: &[Violation], took: Duration) {
    let Totals { runs, moments, points, repeated, refused, scrubs, errors, peaces, faults } = totals;
    println!(
        "{points} crash points ({repeated} after another crash, {refused} rightly refused) at {moments} moments of \
         {runs} runs, {scrubs} clean scrubs, {errors} errors beyond what is survived, {} violations, {:.0} s",
        violations.len(),
        took.as_secs_f64()
    );
    println!(
        "faults besides: {faults}; {peaces} times all had passed, nothing was left, and m members could be spared"
    );
    for (kind, rules, standing) in FAULT_RULES {
        if *standing == Standing::Pending {
            println!("left out: {} ({rules})", kind.name());
        }
    }
}

#[test]
fn crashes_lose_nothing_and_mix_nothing() {
    if std::env::var_os("CALPE_SIM_REPLAY").is_some() {
        return;
    }
    let minutes: f64 = std::env::var("CALPE_SIM_MINUTES")
        .map_or(0.0, |text| text.parse().unwrap_or_else(|_| panic!("CALPE_SIM_MINUTES={text} is no number")));
    let wanted = number("CALPE_SIM_POINTS", POINTS);
    let started = Instant::now();
    let until = started + Duration::from_secs_f64(minutes * 60.0);
    let enough = |points| if minutes > 0.0 { Instant::now() >= until } else { points >= wanted };
    let (totals, violations) = campaign(&chosen(), number("CALPE_SIM_SEED", 1), enough);
    report(&totals, &violations, started.elapsed());
    assert!(violations.is_empty(), "{} violations", violations.len());
}

/// The explorer finds a violation that exists, and the token it prints replays that violation. Rules can be
/// broken in builds with debug assertions only; `mutations.rs` breaks every one of them.
#[cfg(debug_assertions)]
#[test]
fn a_violation_is_found_and_its_token_replays_it() {
    let scenario = scenario_of("lost-2+1").expect("a scenario");
    let world = SimWorld::new(scenario.shape, POOL_BYTES);
    Mutation::AckBeforeBump.with(|| {
        for seed in 0..100 {
            let (_, violation) = explore(&world, &scenario, seed, POINTS_OF_SEED_MAX);
            if let Some(violation) = violation {
                let again = replay(&world, &scenario, &violation.token).expect("a violation replays");
                assert_eq!(again.to_string(), violation.to_string());
                return;
            }
        }
        panic!("no violation found");
    });
}

#[test]
fn a_violation_is_replayed() {
    let Ok(token) = std::env::var("CALPE_SIM_REPLAY") else { return };
    let scenario = scenario_of(&token).unwrap_or_else(|| panic!("'{token}' names no scenario"));
    let world = SimWorld::new(scenario.shape, POOL_BYTES);
    let again = || replay(&world, &scenario, &token);
    let broken = std::env::var("CALPE_MUTATION").ok();
    let broken = broken.and_then(|name| Mutation::ALL.iter().find(|mutation| mutation.name() == name));
    match broken.map_or_else(again, |mutation| mutation.with(again)) {
        Some(violation) => panic!("{violation}"),
        None => println!("'{token}' is no violation any more"),
    }
}
