//! The daemon's replies.

use super::Status;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use uuid::Uuid;

/// One reply.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The daemon is there.
    Pong(Pong),
    /// State of arrays.
    Status(Status),
    /// Events.
    Events {
        /// Oldest first.
        events: Vec<Event>,
        /// The `since` of the next request, which then gets only newer events.
        next: u64,
    },
    /// Arrays that could be imported.
    Importable {
        /// In order of name.
        arrays: Vec<Importable>,
        /// Paths that look like members and cannot be used, one line for each.
        #[serde(default)]
        warnings: Vec<String>,
    },
    /// The request is done, or with `dry_run` it would have been.
    Done {
        /// One line for a person: what was done.
        message: String,
        /// Warnings for a person, one line each.
        #[serde(default)]
        warnings: Vec<String>,
        /// What was refused or failed while the rest of a request was done.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        failures: Vec<RequestError>,
    },
    /// The request was refused, or failed.
    Error(RequestError),
}

/// The daemon that answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// The daemon's [`super::PROTOCOL_VERSION`].
    pub version: u32,
    /// Version of the program.
    pub program: String,
    /// Its process.
    pub pid: u32,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct RequestError {
    /// The class of the error, for scripts.
    pub code: ErrorCode,
    /// What failed, where, and what to do.
    pub message: String,
}

/// Class of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// Not a request, or a request of another version.
    BadRequest,
    /// No array of this name or uuid.
    NoSuchArray,
    /// No such member in the array.
    NoSuchMember,
    /// Not allowed in the present state; nothing was changed.
    Refused,
    /// Needs `force`.
    NeedsForce,
    /// A device cannot be used.
    Device,
    /// The operation failed on the way.
    Failed,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Number of the event; numbering continues after a restart.
    pub sequence: u64,
    /// Seconds since 1970; of the last occurrence, where there were several.
    pub unix: u64,
    /// Time of the first occurrence.
    #[serde(default)]
    pub first_unix: u64,
    /// How often it happened in a row; for some kinds, how many events like it there were.
    #[serde(default = "once")]
    pub count: u64,
    /// Kind of the event: a name that never changes its meaning.
    #[serde(default)]
    pub kind: String,
    /// How severe.
    pub severity: Severity,
    /// Name of the array it is about.
    pub array: Option<String>,
    /// Identity of that array, where it is known: another array may have its name later.
    #[serde(default)]
    pub array_uuid: Option<Uuid>,
    /// The member it is about.
    pub member: Option<u16>,
    /// Offset in the volume, in bytes, if the event is about one place.
    #[serde(default)]
    pub offset: Option<u64>,
    /// The user that requested it, if a command of an administrator caused it.
    #[serde(default)]
    pub uid: Option<u32>,
    /// One sentence: what, where, what to do.
    pub text: String,
}

/// Kinds of events that one bad device causes by the hundred, one for each of its bad places.
const KINDS_OF_MANY: [&str; 4] =
    ["blocks_repaired", "blocks_unreadable", "page_repaired", "scrub_unresolved"];

impl Event {
    /// Whether its kind comes by the hundred: then one event stands for all of its kind in one pass
    /// over a member, and its text is the last one's.
    #[must_use]
    pub fn is_of_many(&self) -> bool {
        KINDS_OF_MANY.contains(&self.kind.as_str())
    }
}

fn once() -> u64 {
    1
}

/// How severe an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Progress and completion.
    Info,
    /// Redundancy is reduced or something was repaired: check it.
    Warning,
    /// Data cannot be served: act.
    Error,
}

impl Severity {
    /// The word for it.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// An array that was found and is not imported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Importable {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Data chunks of a stripe.
    pub data: u16,
    /// Parity chunks of a stripe.
    pub parity: u16,
    /// Size of its volume.
    pub volume_bytes: u64,
    /// Why it cannot be imported as it is, if so.
    pub problem: Option<String>,
    /// Members that an import would have in service; 0 where it cannot be imported, or an older
    /// daemon does not say.
    #[serde(default)]
    pub usable: u16,
    /// Every member, in order of index.
    pub members: Vec<ImportableMember>,
}

/// A member of an array that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportableMember {
    /// Its place.
    pub index: u16,
    /// Identity of its device.
    pub uuid: Uuid,
    /// Where it was found, if it was.
    pub path: Option<PathBuf>,
    /// A remark about it ("stale: will be rebuilt").
    pub note: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_read_back_and_are_tagged() {
        let uuid = Uuid::from_u128(7);
        let member = ImportableMember { index: 0, uuid, path: Some("/srv/m0".into()), note: None };
        let replies = [
            Reply::Pong(Pong { version: 1, program: "0.1.0".into(), pid: 4 }),
            Reply::Status(Status::new(Vec::new())),
            Reply::Events {
                events: vec![Event {
                    sequence: 1,
                    unix: 2,
                    first_unix: 1,
                    count: 2,
                    kind: "member_out".into(),
                    severity: Severity::Warning,
                    array: Some("tank".into()),
                    array_uuid: Some(uuid),
                    member: Some(3),
                    offset: Some(4096),
                    uid: None,
                    text: "member 3 failed".into(),
                }],
                next: 2,
            },
            Reply::Importable {
                arrays: vec![Importable {
                    name: "tank".into(),
                    uuid,
                    data: 4,
                    parity: 2,
                    volume_bytes: 1 << 30,
                    problem: None,
                    usable: 0,
                    members: vec![member],
                }],
                warnings: vec!["m4: damaged".into()],
            },
            Reply::Done { message: "done".into(), warnings: vec!["but".into()], failures: vec![] },
            Reply::Done {
                message: "one".into(),
                warnings: vec![],
                failures: vec![RequestError { code: ErrorCode::Refused, message: "the other".into() }],
            },
            Reply::Error(RequestError { code: ErrorCode::NeedsForce, message: "no".into() }),
        ];
        for reply in replies {
            let json = serde_json::to_value(&reply).unwrap();
            assert!(json["reply"].is_string(), "{json}");
            assert_eq!(serde_json::from_value::<Reply>(json).unwrap(), reply);
        }
    }

    #[test]
    fn severities_rise() {
        assert!(Severity::Info < Severity::Warning && Severity::Warning < Severity::Error);
        assert_eq!(
            serde_json::to_string(&Severity::Warning).unwrap(),
            format!("\"{}\"", Severity::Warning.word())
        );
    }
}
