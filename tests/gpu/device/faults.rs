//! Faults on purpose: a device that traps and one that hangs are given up, and the next one opened on the
//! same GPU and memory computes as if nothing had been. Ignored unless asked for, since a context that was
//! given up stays for as long as the process lives: `scripts/gpu-test` runs each by itself.

use std::time::{Duration, Instant};

use calpe_gpu::Drill;
use calpe_gpu::cuda::Method;
use calpe_gpu::device::Driver;

use super::bed::{Bed, Case};
use super::{KIB, codec, small};
use calpe_core::testing::Random;

/// What a device must come back in: opening, and one batch.
const BACK_WITHIN: Duration = Duration::from_secs(10);

fn comes_back(bed: &mut Bed, noise: &mut Random, after_trap: bool) {
    let begun = Instant::now();
    bed.abandon();
    println!("given up in {:?}", begun.elapsed());
    let begun = Instant::now();
    // A failed context is ended in the background; until then the driver makes no other.
    while let Err(error) = bed.again() {
        if begun.elapsed() > BACK_WITHIN {
            // Some drivers take no context any more in a process in which a kernel trapped. The runtime then
            // leaves everything to the CPU and goes on trying; what must hold is what was checked before.
            assert!(after_trap, "the next device: {error}");
            println!("not opened again in {:?}: {error}", begun.elapsed());
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("opened again in {:?}", begun.elapsed());
    let transform = codec(8, 4).encoding();
    for at in 0..20 {
        let case = Case::of(bed, Some(transform.clone()), 0, 64 * KIB, true, noise);
        bed.submit(case.named(format!("batch {at} of the next device")));
    }
    bed.drain();
    println!("and computed 20 batches, {:?} after it was given up", begun.elapsed());
    assert!(begun.elapsed() < BACK_WITHIN, "{:?}", begun.elapsed());
}

#[test]
#[ignore = "leaves a failed context behind; scripts/gpu-test runs it"]
fn a_device_that_traps_fails_and_the_next_one_computes() {
    let Some(mut bed) = Bed::open(small(Method::Table)) else { return };
    let mut noise = Random::new(20);
    let transform = codec(8, 4).encoding();
    bed.submit(Case::of(&bed, Some(transform.clone()), 0, 64 * KIB, true, &mut noise));
    bed.drain();
    bed.driver().drill(Drill::Error);
    let case = Case::of(&bed, Some(transform), 0, 64 * KIB, true, &mut noise);
    match bed.doomed(case) {
        Ok(slot) => {
            let begun = Instant::now();
            let woken = bed.woken_within(Duration::from_secs(5));
            println!("woken: {woken:?} after {:?}", begun.elapsed());
            let outcome = bed.outcome(slot);
            println!("finish says: {outcome:?}");
            assert!(outcome.is_err(), "a trap is no result");
            assert_eq!(woken, Some(slot), "who waits for a failed batch is woken");
        }
        // The trap may be over before the rest of the batch is queued.
        Err(error) => println!("start says: {error}"),
    }
    comes_back(&mut bed, &mut noise, true);
}

#[test]
#[ignore = "leaves a hung context behind; scripts/gpu-test runs it"]
fn a_device_that_hangs_is_given_up_and_the_next_one_computes() {
    let Some(mut bed) = Bed::open(small(Method::Table)) else { return };
    let mut noise = Random::new(21);
    let transform = codec(8, 4).encoding();
    bed.driver().drill(Drill::Hang);
    let case = Case::of(&bed, Some(transform), 0, 64 * KIB, true, &mut noise);
    let slot = bed.doomed(case).unwrap_or_else(|error| panic!("starting does not wait: {error}"));
    assert_eq!(bed.woken_within(Duration::from_secs(2)), None, "slot {slot} hangs");
    comes_back(&mut bed, &mut noise, false);
}
