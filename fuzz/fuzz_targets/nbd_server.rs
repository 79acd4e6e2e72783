//! libFuzzer on `calpe_fuzz::nbd::nbd_server`: what a client sends to our NBD server.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| calpe_fuzz::nbd::nbd_server(data));
