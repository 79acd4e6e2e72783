//! libFuzzer on `calpe_fuzz::format::superblock`: a copy of a superblock.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| calpe_fuzz::format::superblock(data));
