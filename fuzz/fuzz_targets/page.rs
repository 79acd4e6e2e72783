//! libFuzzer on `calpe_fuzz::format::page`: a metadata page.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| calpe_fuzz::format::page(data));
