//! The requests to the daemon. Each request that changes something has a `dry_run`: the daemon checks
//! everything, changes nothing, and says what would be done. Paths are absolute: the daemon's working
//! directory is not the client's.

use calpe_core::units::shown;
use serde::{Deserialize, Serialize};
use std::convert::Infallible;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use uuid::Uuid;

/// One request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Asks whether a daemon is there, and of which version. Answered by `Pong`.
    Ping {
        /// The client's [`super::PROTOCOL_VERSION`].
        version: u32,
    },
    /// State of one array, or of all. Answered by `Status`.
    Status {
        /// Name or uuid of the array.
        array: Option<String>,
    },
    /// Events. Answered by `Events`.
    Events {
        /// Number of the first event wanted; 0 for all that are kept.
        since: u64,
    },
    /// Commands and states of one array. Answered by `Events`.
    History {
        /// Name or uuid of the array.
        array: String,
    },
    /// Arrays found by their superblocks that are not imported. Answered by `Importable`.
    ListImportable {
        /// Directories or devices to search beside the configured places.
        dirs: Vec<PathBuf>,
    },
    /// Find members by superblock and start arrays. Answered by `Done`.
    Import {
        /// Name or uuid of the array; none with `all`.
        array: Option<String>,
        /// Every array found.
        all: bool,
        /// Directories or devices to search beside the configured places.
        dirs: Vec<PathBuf>,
        /// Start even where the present members cannot prove that they are the current ones.
        force: bool,
        /// Do not import it again when the daemon restarts.
        #[serde(default)]
        once: bool,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Stop an array cleanly, and do not serve it again after a restart. Answered by `Done` when it
    /// is stopped.
    Export {
        /// Name or uuid of the array.
        array: String,
        /// Even while clients are attached: they lose it.
        #[serde(default)]
        force: bool,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Take a member out for good, as if it had failed. Answered by `Done`.
    Fail {
        /// Name or uuid of the array.
        array: String,
        /// Which member.
        member: MemberRef,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Take a member out on purpose. Answered by `Done`.
    Offline {
        /// Name or uuid of the array.
        array: String,
        /// Which member.
        member: MemberRef,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Bring a member back. Answered by `Done`; whether it is rebuilt shows in the status.
    Online {
        /// Name or uuid of the array.
        array: String,
        /// Which member.
        member: MemberRef,
        /// Path of its device, if that has changed.
        path: Option<PathBuf>,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Build a new device for a member. Answered by `Done` when the rebuild has begun.
    Replace {
        /// Name or uuid of the array.
        array: String,
        /// Which member.
        old: MemberRef,
        /// The new device. A file that does not exist is created where possible.
        new: PathBuf,
        /// Even over recognised data.
        force: bool,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Give up a replacement that is being built; the old device stays. Answered by `Done`.
    CancelReplace {
        /// Name or uuid of the array.
        array: String,
        /// Which member.
        member: MemberRef,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Start, pause or stop a scrub. Answered by `Done`.
    Scrub {
        /// Name or uuid of the array.
        array: String,
        /// Which.
        action: ScrubAction,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Read every block again that is set aside or called lost. Answered by `Done` when the pass has begun.
    Repair {
        /// Name or uuid of the array.
        array: String,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Forget the counts of a member, or of all members and the array. Answered by `Done`.
    Clear {
        /// Name or uuid of the array.
        array: String,
        /// None: all of them.
        member: Option<MemberRef>,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Make the next batch of a GPU go wrong. Answered by `Done`.
    GpuDrill {
        /// How.
        drill: GpuDrill,
        /// Only say what would be done.
        dry_run: bool,
    },
    /// Stop the daemon, every array cleanly first. Answered by `Done` before it ends.
    Shutdown {
        /// Only say what would be done.
        dry_run: bool,
    },
}

/// How a GPU is made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuDrill {
    /// A kernel traps, and the device with it.
    Error,
    /// A kernel does not end before the device is given up.
    Hang,
}

/// What to do with a scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScrubAction {
    /// Start one, or continue a paused one.
    Start,
    /// Pause it; it keeps its position, also over a restart.
    Pause,
    /// Stop it and forget its position.
    Stop,
}

/// A member as an administrator names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberRef {
    /// By its place in the array.
    Index(u16),
    /// By the identity of its device.
    Uuid(Uuid),
    /// By the path of its device.
    Path(PathBuf),
}

impl FromStr for MemberRef {
    type Err = Infallible;

    /// Digits are an index, a uuid with hyphens is a uuid, all else is a path; a file called `3` is
    /// `./3`.
    fn from_str(text: &str) -> Result<MemberRef, Infallible> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let index = if digits { text.parse().ok() } else { None };
        let uuid = if text.len() == 36 { text.parse().ok() } else { None };
        Ok(match (index, uuid) {
            (Some(index), _) => MemberRef::Index(index),
            (_, Some(uuid)) => MemberRef::Uuid(uuid),
            _ => MemberRef::Path(text.into()),
        })
    }
}

impl fmt::Display for MemberRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MemberRef::Index(index) => index.fmt(f),
            MemberRef::Uuid(uuid) => uuid.fmt(f),
            MemberRef::Path(path) => shown(path).fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_one_flat_object() {
        let request = Request::Replace {
            array: "tank".into(),
            old: MemberRef::Index(3),
            new: "/srv/new".into(),
            force: false,
            dry_run: true,
        };
        let json = serde_json::to_string(&request).unwrap();
        assert_eq!(
            json,
            r#"{"request":"replace","array":"tank","old":{"index":3},"new":"/srv/new","force":false,"dry_run":true}"#
        );
        assert_eq!(serde_json::from_str::<Request>(&json).unwrap(), request);
    }

    #[test]
    fn unknown_requests_and_fields_and_missing_dry_runs_are_refused() {
        for json in [
            r#"{"request":"format_everything"}"#,
            r#"{"request":"status","name":"x"}"#,
            r#"{"request":"shutdown"}"#,
            r#"{"request":"fail","array":"a","member":{"index":70000},"dry_run":false}"#,
            r#"[]"#,
            "7",
        ] {
            assert!(serde_json::from_str::<Request>(json).is_err(), "{json}");
        }
        let all = serde_json::from_str::<Request>(r#"{"request":"status"}"#).unwrap();
        assert_eq!(all, Request::Status { array: None });
    }

    #[test]
    fn members_are_told_apart_by_their_form() {
        let parse = |text: &str| text.parse::<MemberRef>().unwrap();
        assert_eq!(parse("12"), MemberRef::Index(12));
        let uuid = "01234567-89ab-4def-8000-0000000003e8";
        assert_eq!(parse(uuid), MemberRef::Uuid(uuid.parse().unwrap()));
        for path in ["./3", "/dev/sda", "+3", "99999999", ""] {
            assert_eq!(parse(path), MemberRef::Path(path.into()));
        }
        assert_eq!(parse(uuid).to_string(), uuid);
    }
}
