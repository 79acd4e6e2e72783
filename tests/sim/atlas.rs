//! Damage of every kind in every region of members, under load: within the budget no client notices, beyond
//! it none gets wrong data.
//!
//! CALPE_ATLAS_SEEDS: number of seeds for each kind and region (default: few). CALPE_ATLAS_SEED: the first
//! seed. CALPE_ATLAS_MINUTES: runs seeds for this long instead. CALPE_ATLAS_REPLAY: the token of a violation
//! to replay.

use calpe_core::testing::{Aim, AtlasTotals, Damage, Place, SCENARIOS, Scenario, SimWorld, atlas};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const POOL_BYTES: usize = 4 << 20;
/// Violations after which a run ends.
const VIOLATIONS_MAX: usize = 5;
/// Seeds of an ordinary test run.
const SEEDS: u64 = 4;
/// Seeds of runs with random place and damage, for each seed of the runs in which both are given.
const OPEN_SEEDS: u64 = 12;

fn variable<T: std::str::FromStr>(name: &str) -> Option<T> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

fn scenario(name: &str) -> Option<Scenario> {
    SCENARIOS.iter().find(|scenario| scenario.name == name).copied()
}

/// `SCENARIO:PLACE:DAMAGE:BUDGET:SEED`, a word for each.
fn token(scenario: &Scenario, aim: Aim, seed: u64) -> String {
    let place = aim.place.map_or("any".into(), |place| format!("{place:?}"));
    let damage = aim.damage.map_or("any".into(), |damage| format!("{damage:?}"));
    let budget = if aim.beyond { "beyond" } else { "within" };
    format!("{}:{place}:{damage}:{budget}:{seed}", scenario.name)
}

fn parsed(token: &str) -> Option<(Scenario, Aim, u64)> {
    let words: Vec<&str> = token.split(':').collect();
    let &[name, place, damage, budget, seed] = &words[..] else { return None };
    let place = Place::ALL.into_iter().find(|known| format!("{known:?}") == place);
    let damage = Damage::ALL.into_iter().find(|known| format!("{known:?}") == damage);
    Some((scenario(name)?, Aim { place, damage, beyond: budget == "beyond" }, seed.parse().ok()?))
}

fn try_one(world: &SimWorld, scenario: &Scenario, aim: Aim, seed: u64) -> Result<AtlasTotals, String> {
    let result = catch_unwind(AssertUnwindSafe(|| atlas(world, scenario, aim, seed)));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// Every scenario with every aim, seed after seed, on all cores.
fn run(names: &[&str], aims: &[Aim], seeds: u64) -> AtlasTotals {
    if std::env::var_os("CALPE_ATLAS_REPLAY").is_some() {
        return AtlasTotals { damages: 1, found: 1, errors: 1, restarts: 1, scrubs: 1 };
    }
    let scenarios: Vec<Scenario> = names.iter().filter_map(|name| scenario(name)).collect();
    assert_eq!(scenarios.len(), names.len(), "{names:?} are scenarios");
    let first_seed: u64 = variable("CALPE_ATLAS_SEED").unwrap_or(0);
    let seeds = variable("CALPE_ATLAS_SEEDS").map_or(seeds, |wanted: u64| seeds / SEEDS * wanted);
    let minutes: f64 = variable("CALPE_ATLAS_MINUTES").unwrap_or(0.0);
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let per_seed = scenarios.len() * aims.len();
    let next = AtomicU64::new(0);
    let result = Mutex::new((AtlasTotals::default(), 0));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let worlds: Vec<SimWorld> =
                    scenarios.iter().map(|scenario| SimWorld::new(scenario.shape, POOL_BYTES)).collect();
                loop {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    let (round, at) = (job / per_seed as u64, job as usize % per_seed);
                    let over = if minutes > 0.0 { Instant::now() >= until } else { round >= seeds };
                    if over || result.lock().expect("no thread panics with the result").1 >= VIOLATIONS_MAX {
                        return;
                    }
                    let (scenario, world) = (&scenarios[at % scenarios.len()], &worlds[at % scenarios.len()]);
                    let (aim, seed) = (aims[at / scenarios.len()], first_seed.wrapping_add(round));
                    let found = try_one(world, scenario, aim, seed);
                    let mut result = result.lock().expect("no thread panics with the result");
                    match found {
                        Ok(found) => result.0.add(&found),
                        Err(what) => {
                            result.1 += 1;
                            let token = token(scenario, aim, seed);
                            println!("{what}\n  replay: CALPE_ATLAS_REPLAY='{token}' cargo test --test sim atlas::a_violation_is_replayed");
                        }
                    }
                }
            });
        }
    });
    let (totals, violations) = result.into_inner().expect("no thread panics with the result");
    let AtlasTotals { damages, found, errors, restarts, scrubs } = totals;
    println!(
        "{damages} pieces of damage, {found} blocks found wrong, {errors} errors beyond what is survived, {restarts} restarts, \
         {scrubs} clean scrubs, {violations} violations"
    );
    assert_eq!(violations, 0);
    totals
}

#[test]
fn damage_within_the_budget_is_served_rightly_counted_and_healed() {
    let aim = |place| move |damage| Aim { place: Some(place), damage: Some(damage), beyond: false };
    let every: Vec<Aim> =
        Place::ALL.into_iter().flat_map(|place| Damage::ALL.into_iter().map(aim(place))).collect();
    let totals = run(&["logged-2+1", "logged-4+2", "tight-2+2"], &every, SEEDS);
    assert!(totals.found > 0 && totals.scrubs > 0 && totals.restarts > 0);
}

#[test]
fn any_mixture_of_damage_within_the_budget_is_survived() {
    let any = [Aim { place: None, damage: None, beyond: false }];
    run(&["logged-2+1", "logged-3+2", "logged-5+5", "logged-8+3"], &any, SEEDS * OPEN_SEEDS);
}

#[test]
fn damage_beyond_the_budget_gives_errors_and_never_wrong_data() {
    let any = [Aim { place: None, damage: None, beyond: true }];
    let totals = run(&["logged-2+1", "logged-3+2", "logged-4+2", "logged-5+5"], &any, SEEDS * OPEN_SEEDS);
    assert!(totals.errors > 0, "nothing was beyond the budget: {totals:?}");
}

#[test]
fn a_violation_is_replayed() {
    let Ok(token) = std::env::var("CALPE_ATLAS_REPLAY") else { return };
    let (scenario, aim, seed) = parsed(&token).unwrap_or_else(|| panic!("'{token}' is no token"));
    let world = SimWorld::new(scenario.shape, POOL_BYTES);
    match try_one(&world, &scenario, aim, seed) {
        Err(what) => panic!("{what}"),
        Ok(_) => println!("'{token}' is no violation any more"),
    }
}

#[test]
fn a_token_names_what_it_was_made_from() {
    let scenario = SCENARIOS[0];
    for (place, damage) in [(None, Some(Damage::Stale)), (Some(Place::Log), None)] {
        let aim = Aim { place, damage, beyond: true };
        let (again, parsed_aim, seed) = parsed(&token(&scenario, aim, 7)).expect("a token");
        assert_eq!((again.name, seed), (scenario.name, 7));
        assert_eq!((parsed_aim.place, parsed_aim.damage, parsed_aim.beyond), (place, damage, true));
    }
}
