//! The best rates of the link and the device's memory: large copies by the copy engines between pinned memory
//! and device, one way and both ways at once, and inside the device.
#![allow(unsafe_code)] // copies between memory that this file owns

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use super::{REPETITIONS, Rate};
use crate::cuda::api::{Context, DeviceMemory, Event, Gpu, PinnedMemory, Stream};
use crate::device::DeviceError;

/// Bytes of a copy over the link.
const LINK_BYTES: usize = 512 << 20;

/// Number of copies into which each direction is divided when both run at once.
const PIECES: usize = 64;

/// Bytes of a copy inside the device.
const DEVICE_BYTES: usize = 1 << 30;

/// Bytes that come back for every 100 that go in.
const BACK_PERCENT: [usize; 5] = [13, 25, 40, 50, 100];

/// The highest rates that can be expected.
#[derive(Clone, Debug, Serialize)]
pub struct Ceilings {
    /// Host to device, nothing else under way.
    pub host_to_device: Rate,
    /// Device to host.
    pub device_to_host: Rate,
    /// Host to device while bytes come back.
    pub concurrent: Vec<Concurrent>,
    /// Inside the device, bytes read and written.
    pub device_copy: Rate,
}

/// Both directions at once.
#[derive(Clone, Debug, Serialize)]
pub struct Concurrent {
    /// Bytes that come back for every 100 that go in.
    pub back_percent: usize,
    /// Bytes that go in.
    pub host_to_device: Rate,
}

impl Ceilings {
    /// GB/s into the device while `back` bytes come back for each byte: interpolated between the
    /// measurements.
    #[must_use]
    pub fn link(&self, back: f64) -> f64 {
        let mut below = (0.0, self.host_to_device.gb_per_s_median);
        for concurrent in &self.concurrent {
            let here = (concurrent.back_percent as f64 / 100.0, concurrent.host_to_device.gb_per_s_median);
            if back <= here.0 {
                return below.1 + (here.1 - below.1) * (back - below.0) / (here.0 - below.0);
            }
            below = here;
        }
        below.1
    }
}

pub(super) fn measure(index: usize) -> Result<Ceilings, DeviceError> {
    let context = Context::new(Gpu::nth(index)?)?;
    let (input, output) = (Stream::new(&context, 0)?, Stream::new(&context, 0)?);
    let (begin, end) = (Event::new(&context, true)?, Event::new(&context, true)?);
    let (source, target) =
        (PinnedMemory::new(&context, LINK_BYTES)?, PinnedMemory::new(&context, LINK_BYTES)?);
    let here = DeviceMemory::new(&context, DEVICE_BYTES)?;
    let there = DeviceMemory::new(&context, DEVICE_BYTES)?;

    let timed = |bytes: usize, queue: &dyn Fn() -> Result<(), DeviceError>| {
        let mut rates = Vec::new();
        // The first copy wakes the link; its rate is dropped.
        for repetition in 0..=REPETITIONS {
            begin.record(&input)?;
            queue()?;
            end.record(&input)?;
            input.synchronise()?;
            if repetition > 0 {
                rates.push(bytes as f64 / begin.seconds_to(&end)?);
            }
        }
        Ok::<Rate, DeviceError>(Rate::of(rates))
    };
    let host_to_device = timed(LINK_BYTES, &|| {
        // SAFETY: between memory of this function, of at least this length, waited for by `timed`.
        unsafe { input.copy_in(here.start(), source.start(), LINK_BYTES) }
    })?;
    let device_to_host = timed(LINK_BYTES, &|| {
        // SAFETY: as above.
        unsafe { input.copy_out(target.start(), here.start(), LINK_BYTES) }
    })?;
    let device_copy = timed(2 * DEVICE_BYTES, &|| {
        // SAFETY: as above.
        unsafe { input.copy_within(there.start(), here.start(), DEVICE_BYTES) }
    })?;

    let mut concurrent = Vec::new();
    for back_percent in BACK_PERCENT {
        let piece = LINK_BYTES / PIECES;
        let back = (piece * back_percent / 100) & !4095;
        let mut rates = Vec::new();
        for repetition in 0..=REPETITIONS {
            let begun = Instant::now();
            for at in 0..PIECES {
                // SAFETY: as above; the two directions use different memory.
                unsafe {
                    input.copy_in(
                        here.start() + (at * piece) as u64,
                        source.start().add(at * piece),
                        piece,
                    )?;
                    output.copy_out(
                        target.start().add(at * back),
                        there.start() + (at * back) as u64,
                        back,
                    )?;
                }
            }
            input.synchronise()?;
            output.synchronise()?;
            if repetition > 0 {
                rates.push(LINK_BYTES as f64 / begun.elapsed().as_secs_f64());
            }
        }
        concurrent.push(Concurrent { back_percent, host_to_device: Rate::of(rates) });
    }
    Ok(Ceilings { host_to_device, device_to_host, concurrent, device_copy })
}

impl fmt::Display for Ceilings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "host to device                     {}", self.host_to_device)?;
        writeln!(f, "device to host                     {}", self.device_to_host)?;
        for Concurrent { back_percent, host_to_device } in &self.concurrent {
            writeln!(f, "host to device, {back_percent:>3} % comes back {host_to_device}")?;
        }
        writeln!(f, "device copy, read + written        {}", self.device_copy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_between_two_measurements_is_between_their_rates() {
        let rate = |gb: f64| Rate::of(vec![gb * 1e9]);
        let concurrent = [(50, 40.0), (100, 30.0)]
            .map(|(back_percent, gb)| Concurrent { back_percent, host_to_device: rate(gb) });
        let ceilings = Ceilings {
            host_to_device: rate(50.0),
            device_to_host: rate(50.0),
            concurrent: concurrent.to_vec(),
            device_copy: rate(1000.0),
        };
        let near = |back: f64, gb: f64| assert!((ceilings.link(back) - gb).abs() < 1e-9, "{back}");
        near(0.0, 50.0);
        near(0.25, 45.0);
        near(0.5, 40.0);
        near(0.75, 35.0);
        near(2.0, 30.0);
    }
}
