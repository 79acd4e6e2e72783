//! What `calpe inspect` shows of a device: its superblocks, those of every lane. The names of the fields are
//! a contract with scripts. Must not know of arrays that run.

use super::lanes::read_all;
use super::superblocks::windows_of;
use crate::member::Device;
use calpe_core::format::{CopyReport, Inspection, SuperblockReport};
use serde::Serialize;
use std::fmt;
use std::ops::Range;

/// See the head of this file.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct DeviceInspection {
    /// The device; of several lanes, with the superblock of the first one.
    #[serde(flatten)]
    first: Inspection,
    /// Every lane, the first one, too; absent where there is one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lanes: Vec<LaneInspection>,
}

/// One lane of several. Its offsets count from the start of its window.
#[derive(Clone, Debug, Serialize)]
struct LaneInspection {
    /// Where its window starts on the device.
    window_offset: u64,
    /// The size of its window.
    window_bytes: u64,
    /// Why it cannot serve, if so.
    error: Option<String>,
    #[serde(flatten)]
    inspection: Lane,
}

/// What differs from lane to lane, and what does not.
#[derive(Clone, Debug, Serialize)]
struct Lane {
    copies: Vec<CopyReport>,
    #[serde(flatten)]
    superblock: Option<SuperblockReport>,
    /// The same as text.
    #[serde(skip)]
    text: String,
}

impl DeviceInspection {
    /// Reads the superblocks of a device.
    pub(crate) fn of(device: &Device) -> DeviceInspection {
        let path = || device.path().display().to_string();
        let (part, copies) = read_all(device);
        let windows = windows_of(part, device.facts().bytes);
        if !part.is_cut() {
            let copies = copies.into_iter().next().expect("a device has a lane");
            let first = Inspection::new(path(), device.facts().exact_bytes, copies);
            return DeviceInspection { first, lanes: Vec::new() };
        }
        let inspect = |(window, copies): (&Range<u64>, _)| {
            (window.clone(), Inspection::new(path(), window.end - window.start, copies))
        };
        let all: Vec<_> = windows.iter().zip(copies).map(inspect).collect();
        let mut first = all[0].1.clone();
        first.device_bytes = device.facts().exact_bytes;
        let fault = |(at, (_, inspection)): (usize, &(_, Inspection))| {
            inspection.error.as_ref().map(|error| format!("lane {at}: {error}"))
        };
        first.error = all.iter().enumerate().find_map(fault);
        let lane = |(window, inspection): (Range<u64>, Inspection)| {
            let text = inspection.to_string();
            let Inspection { copies, error, superblock, .. } = inspection;
            LaneInspection {
                window_offset: window.start,
                window_bytes: window.end - window.start,
                error,
                inspection: Lane { copies, superblock, text },
            }
        };
        DeviceInspection { first, lanes: all.into_iter().map(lane).collect() }
    }

    /// Why it cannot serve as a member in every lane, if so.
    pub(crate) fn error(&self) -> Option<&String> {
        self.first.error.as_ref()
    }
}

impl fmt::Display for DeviceInspection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.first)?;
        let Some(first) = self.lanes.first() else { return Ok(()) };
        let lines_of_first: Vec<&str> = first.inspection.text.lines().collect();
        for (lane, at) in self.lanes.iter().zip(0..).skip(1) {
            writeln!(f, "\nlane {at}, from byte {} on, where it differs from lane 0:", lane.window_offset)?;
            let differs = |line: &&str| !lines_of_first.contains(line);
            for line in lane.inspection.text.lines().skip(1).filter(differs) {
                writeln!(f, "{line}")?;
            }
        }
        Ok(())
    }
}
