//! Fuzz targets: everything in Calpe that reads bytes from outside, as plain functions that panic when a
//! promise is broken. libFuzzer drives them through `fuzz_targets/`, and `bin/driver.rs` where there is no
//! libFuzzer.
//!
//! Hashes would stop a fuzzer at the door. So a target first gives the bytes to the decoder as they are, then
//! makes the hashes right, by what docs/on-disk-format.md says of them rather than by Calpe's code, and tries
//! again.

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
        bytes_max: calpe_core::format::COPY_BYTES,
        run: format::superblock,
        seeds: seeds::superblock,
    },
    Target { name: "log_segment", bytes_max: 8192, run: format::log_segment, seeds: seeds::log_segment },
    Target { name: "page", bytes_max: 4096, run: format::page, seeds: seeds::page },
    Target {
        name: "nbd_server",
        bytes_max: 1 + RECORDED_BYTES_MAX,
        run: nbd::nbd_server,
        seeds: seeds::nbd_server,
    },
    Target {
        name: "nbd_client",
        bytes_max: 1 + RECORDED_BYTES_MAX,
        run: nbd::nbd_client,
        seeds: seeds::nbd_client,
    },
];

/// Bytes of a recorded stream that are kept.
pub const RECORDED_BYTES_MAX: usize = (16 << 10) - 1;

/// A recorded stream as an input of the targets of the NBD protocol, in one piece.
#[must_use]
pub fn recording(stream: &[u8]) -> Vec<u8> {
    [&[0], stream].concat()
}

/// The folder with what scripts/record-seeds recorded for a target; not every target has one.
#[must_use]
pub fn recorded_folder(target: &Target) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("recorded").join(target.name)
}

/// What is in [`recorded_folder`], by file name.
///
/// # Errors
/// When it is there and cannot be read.
pub fn recorded(target: &Target) -> std::io::Result<Vec<(String, Vec<u8>)>> {
    let folder = recorded_folder(target);
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.push((name, std::fs::read(path)?));
    }
    found.sort();
    Ok(found)
}

/// The folder with the seeds of a target, which `driver seeds` writes.
#[must_use]
pub fn seed_folder(target: &Target) -> std::path::PathBuf {
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds").join(target.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_streams_pass_and_reach_the_transmission_phase() {
        for name in ["nbd_server", "nbd_client"] {
            let target = TARGETS.iter().find(|target| target.name == name).expect("it is there");
            let streams = recorded(target).expect("readable");
            assert!(streams.len() >= 5, "{name}: {} streams", streams.len());
            let mut served = 0;
            for (file, stream) in &streams {
                assert!(stream.len() <= target.bytes_max, "{name}/{file}");
                (target.run)(stream);
                served += usize::from(match name {
                    "nbd_server" => nbd::requests_in(&stream[1..]) > 0,
                    _ => nbd::talk(&stream[1..], 0).0.iter().any(|event| event.starts_with("Done")),
                });
            }
            assert!(served >= 3, "{name}: {served} of {} streams hold requests", streams.len());
        }
    }

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
