//! A test of a device before it gets real work: parities, missing columns, parities after a change
//! and hashes, each with results that the CPU knows.

use std::time::Duration;

use calpe_core::block_io::Pool;
use calpe_core::codec::{BlockHasher, Codec, CodecJob, Column, Outputs, Transform};

use super::batch::{Batch, Kind};
use super::device::{Device, DeviceError};
use super::trial;

/// Bytes of the columns of each job: one block, and several, not a power of two.
const LENGTHS: [usize; 2] = [4096, 5 * 4096];

/// Enough blocks for the way in which devices hash many: together 2115 in three columns.
const MANY: [usize; 2] = [700 * 4096, 5 * 4096];

/// Tests whether the device computes what the CPU does. Any useful device needs much less than
/// `hang_after`.
///
/// # Errors
/// The test that failed. The device must be abandoned then.
pub(super) fn run(device: &mut dyn Device, pool: &Pool, hang_after: Duration) -> Result<(), DeviceError> {
    for Question { what, transform, hash, keep, lengths } in questions() {
        let jobs: Vec<CodecJob> =
            lengths.map(|length| job(pool, transform.clone(), hash, keep, length)).into();
        let kind = Kind::of(&jobs[0]).expect("jobs that devices do");
        if jobs.iter().map(|job| kind.slot_bytes(job)).sum::<usize>() > device.slot_bytes() {
            // Work that the device never gets needs no test.
            continue;
        }
        let (batch, digests, _) = trial::run(device, Batch::new(kind, jobs), hang_after)?;
        let wrong = |text: String| Err(DeviceError::Failed { operation: "self-test", text });
        let hashes = match batch.hashes(&digests) {
            Ok(hashes) => hashes,
            Err(expected) => return wrong(format!("{what}: {} digests, not {expected}", digests.len())),
        };
        for ((done, hashes), length) in batch.into_jobs().into_iter().zip(hashes).zip(lengths) {
            let expected = job(pool, transform.clone(), hash, keep, length).run();
            let same = match &done.outputs {
                Outputs::Into(outputs) => {
                    outputs.iter().map(|c| &c[..]).eq(expected.outputs.iter().map(|c| &c[..]))
                }
                Outputs::Hashed => true,
            };
            if !same || hashes != expected.hashes {
                return wrong(format!("{what} of columns of {length} bytes is wrong"));
            }
        }
    }
    Ok(())
}

/// What a device is asked.
struct Question {
    what: &'static str,
    transform: Option<Transform>,
    /// Whether blocks are hashed.
    hash: bool,
    /// Whether outputs are kept.
    keep: bool,
    /// Bytes of the columns of each job.
    lengths: [usize; 2],
}

fn questions() -> [Question; 7] {
    let codec = Codec::new(10, 4).expect("a geometry");
    let recovery = codec.recovery(&[1, 2, 3, 4, 5, 6, 8, 9, 10, 13], &[7, 0]).expect("a pattern");
    let update = codec.updating(&[9, 3]).expect("data columns");
    let ask = |what, transform, hash, keep| Question { what, transform, hash, keep, lengths: LENGTHS };
    [
        ask("encoding", Some(codec.encoding()), false, true),
        ask("encoding with hashes", Some(codec.encoding()), true, true),
        ask("recovery", Some(recovery.clone()), true, true),
        ask("recovery for its hashes", Some(recovery), true, false),
        ask("update", Some(update), true, true),
        ask("hashing", None, true, false),
        Question { lengths: MANY, ..ask("hashing many blocks", None, true, false) },
    ]
}

fn job(pool: &Pool, transform: Option<Transform>, hash: bool, keep: bool, length: usize) -> CodecJob {
    let columns = transform.as_ref().map_or(3, Transform::inputs);
    let input = |column: usize| {
        let mut buf = pool.alloc(length);
        let byte = |at: usize| (31 * column + 7 * at + (column * at) % 251) as u8;
        buf.iter_mut().enumerate().for_each(|(at, target)| *target = byte(at));
        Column::Shared(buf.freeze())
    };
    // Poisoned, so that a device that writes nothing does not pass by what the memory held before.
    let output = || {
        let mut buf = pool.alloc(length);
        buf.fill(0xa5);
        buf
    };
    let outputs = transform.as_ref().filter(|_| keep).map(|transform| transform.outputs());
    CodecJob {
        hasher: hash.then_some(BlockHasher::Blake3),
        inputs: (0..columns).map(input).collect(),
        outputs: outputs
            .map_or(Outputs::Hashed, |count| Outputs::Into((0..count).map(|_| output()).collect())),
        transform,
    }
}

#[cfg(test)]
mod tests {
    use super::super::device::Driver;
    use super::super::fake::{FakeDevice, FakeDriver, Fault};
    use super::*;

    fn test(nth: usize, fault: Fault) -> Result<(), DeviceError> {
        let pool = Pool::new(32 << 20).expect("memory");
        let driver = FakeDriver::new(vec![FakeDevice { slot_bytes: 16 << 20, ..FakeDevice::default() }]);
        driver.inject(0, nth, fault);
        let mut device = driver.open(0, std::slice::from_ref(&pool)).expect("it opens");
        run(&mut *device, &pool, Duration::from_secs(5))
    }

    #[test]
    fn a_device_that_computes_rightly_passes() {
        assert_eq!(test(100, Fault::WrongOutput), Ok(()));
    }

    #[test]
    fn every_test_finds_what_it_is_for() {
        for (nth, Question { hash, keep, .. }) in questions().into_iter().enumerate() {
            if keep {
                assert!(test(nth, Fault::WrongOutput).is_err(), "output of test {nth}");
            }
            if hash {
                assert!(test(nth, Fault::WrongDigest).is_err(), "digest of test {nth}");
            }
            assert!(test(nth, Fault::MissingDigest).is_err() == hash, "number of digests of test {nth}");
            assert!(test(nth, Fault::Finish).is_err() && test(nth, Fault::Start).is_err());
        }
    }
}
