//! libFuzzer on `calpe_fuzz::nbd::nbd_client`: what a server sends to our NBD client.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| calpe_fuzz::nbd::nbd_client(data));
