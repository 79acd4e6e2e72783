//! Damage of every kind at every region of members, under load: within what the array survives nobody notices, beyond
//! it nobody gets wrong data.
//!
//! CALPE_ATLAS_SEEDS: how many seeds of each kind and region (default: few).

use calpe::testing::{Aim, AtlasTotals, Damage, Place, SCENARIOS, Scenario, SimWorld, atlas};
use std::panic::{AssertUnwindSafe, catch_unwind};

const POOL_BYTES: usize = 4 << 20;
/// Violations that are printed.
const PRINTED_MAX: usize = 5;

fn seeds() -> u64 {
    std::env::var("CALPE_ATLAS_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(4)
}

fn scenario(name: &str) -> Scenario {
    *SCENARIOS.iter().find(|scenario| scenario.name == name).expect("a scenario")
}

fn run(names: &[&str], aims: impl Fn() -> Vec<Aim>) -> AtlasTotals {
    let mut totals = AtlasTotals::default();
    let mut violations = Vec::new();
    for scenario in names.iter().map(|name| scenario(name)) {
        let world = SimWorld::new(scenario.shape, POOL_BYTES);
        for aim in aims() {
            for seed in 0..seeds() {
                let result = catch_unwind(AssertUnwindSafe(|| atlas(&world, &scenario, aim, seed)));
                match result {
                    Ok(Ok(found)) => totals.add(&found),
                    Ok(Err(what)) => violations.push(what),
                    Err(_) => violations.push(format!("panic at seed {seed}, {aim:?} on {}", scenario.name)),
                }
            }
        }
    }
    println!("{totals:?}");
    for violation in violations.iter().take(PRINTED_MAX) {
        println!("{violation}");
    }
    assert!(violations.is_empty(), "{} violations", violations.len());
    totals
}

#[test]
fn damage_within_the_budget_is_served_rightly_counted_and_healed() {
    let every = || {
        let aim = |place| move |damage| Aim { place: Some(place), damage: Some(damage), beyond: false };
        Place::ALL.into_iter().flat_map(|place| Damage::ALL.into_iter().map(aim(place))).collect()
    };
    let totals = run(&["logged-2+1", "logged-4+2", "tight-2+2"], every);
    assert!(totals.found > 0 && totals.scrubs > 0 && totals.restarts > 0);
}

#[test]
fn any_mixture_of_damage_within_the_budget_is_survived() {
    let any = || vec![Aim { place: None, damage: None, beyond: false }; 12];
    run(&["logged-2+1", "logged-3+2", "logged-5+5", "logged-8+3"], any);
}

#[test]
fn damage_beyond_the_budget_gives_errors_and_never_wrong_data() {
    let any = || vec![Aim { place: None, damage: None, beyond: true }; 12];
    let totals = run(&["logged-2+1", "logged-3+2", "logged-4+2", "logged-5+5"], any);
    assert!(totals.errors > 0, "nothing was beyond the budget: {totals:?}");
}
