//! Fuzz targets: everything in Calpe that reads bytes from outside, as plain functions that panic when a promise is
//! broken. libFuzzer drives them through `fuzz_targets/`, and `bin/driver.rs` where there is no libFuzzer.
//!
//! Hashes would stop a fuzzer at the door. So a target first gives the bytes to the decoder as they are, then makes
//! the hashes right, by what docs/on-disk-format.md says of them rather than by Calpe's code, and tries again.

pub mod format;
pub mod nbd;
pub mod seeds;

/// A fuzz target.
pub struct Target {
    /// Its name, also of its libFuzzer binary and its folder of seeds.
    pub name: &'static str,
    /// Longest input worth trying, in bytes.
    pub bytes_max: usize,
    /// Tries an input; panics when a promise is broken.
    pub run: fn(&[u8]),
    /// Inputs to start from, by name.
    pub seeds: fn() -> Vec<(&'static str, Vec<u8>)>,
}

/// Every target.
pub const TARGETS: [Target; 5] = [
    Target {
        name: "superblock",
        bytes_max: calpe::format::COPY_BYTES,
        run: format::superblock,
        seeds: seeds::superblock,
    },
    Target { name: "log_segment", bytes_max: 8192, run: format::log_segment, seeds: seeds::log_segment },
    Target { name: "page", bytes_max: 4096, run: format::page, seeds: seeds::page },
    Target { name: "nbd_server", bytes_max: 4096, run: nbd::nbd_server, seeds: seeds::nbd_server },
    Target { name: "nbd_client", bytes_max: 4096, run: nbd::nbd_client, seeds: seeds::nbd_client },
];

/// The folder with the seeds of a target, which `driver seeds` writes.
#[must_use]
pub fn seed_folder(target: &Target) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_seeds_are_what_the_encoders_write_and_pass() {
        for target in &TARGETS {
            let folder = seed_folder(target);
            let seeds = (target.seeds)();
            for (name, seed) in &seeds {
                let committed = std::fs::read(folder.join(name)).unwrap_or_default();
                assert!(committed == *seed, "{}/{name} is out of date: scripts/fuzz --seeds", target.name);
                assert!(seed.len() <= target.bytes_max, "{}/{name}", target.name);
                (target.run)(seed);
            }
            assert_eq!(
                std::fs::read_dir(folder).expect("the folder").count(),
                seeds.len(),
                "{}",
                target.name
            );
        }
    }
}
