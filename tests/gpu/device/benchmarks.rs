//! The benchmark of the first device, printed. Ignored unless asked for; `scripts/gpu-test` runs it, and with
//! CALPE_GPU_JSON=FILE it writes the same figures there.

use calpe_gpu::cuda::Tuning;
use calpe_gpu::cuda::bench::{BenchOptions, run};

use super::bed::{driver, turn};

fn measured(options: &BenchOptions) {
    let _turn = turn();
    if driver(Tuning::default()).is_none() {
        return;
    }
    let report = run(options).unwrap_or_else(|error| panic!("the benchmark failed: {error}"));
    println!("{report}");
    if let Some(path) = std::env::var_os("CALPE_GPU_JSON") {
        let text = serde_json::to_string_pretty(&report).expect("figures");
        std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}

#[test]
#[ignore = "takes the device for a minute; scripts/gpu-test runs it"]
fn benchmark() {
    measured(&BenchOptions::default());
}

#[test]
#[ignore = "takes the device for a minute; scripts/gpu-test --sweep runs it"]
fn benchmark_with_other_tunings() {
    measured(&BenchOptions { sweep: true, ..BenchOptions::default() });
}
