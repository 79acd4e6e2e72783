//! libFuzzer on `calpe_fuzz::format::log_segment`: the header of a segment of the redo log.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| calpe_fuzz::format::log_segment(data));
