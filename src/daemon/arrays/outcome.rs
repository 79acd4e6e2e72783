//! The outcome of a request that changes something, and the refusal for each error of a lower layer. Must not
//! know how requests arrive.

use crate::control::{ErrorCode, RequestError};
use crate::daemon::devices::import::ImportError;
use crate::daemon::peer::Owner;
use crate::daemon::reactor::ReactorError;
use crate::member::DeviceError;
use calpe_core::units::shown;
use calpe_core::volume::AdminRefusal;
use std::time::Duration;

/// How long the stop of an array waits for its devices to close; devices that hang are left behind.
pub(crate) const CLOSING_WAIT: Duration = Duration::from_secs(1);

/// Outcome of a request that changes something.
pub(crate) type Outcome = Result<Done, RequestError>;

/// A request that was carried out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// One line for the administrator.
    pub message: String,
    /// More lines.
    pub warnings: Vec<String>,
    /// Parts that were refused or failed while others succeeded.
    pub failures: Vec<RequestError>,
}

impl Done {
    pub(crate) fn line(message: impl Into<String>) -> Done {
        Done { message: message.into(), ..Done::default() }
    }
}

pub(crate) fn refusal(code: ErrorCode, message: impl Into<String>) -> RequestError {
    RequestError { code, message: message.into() }
}

impl From<ReactorError> for RequestError {
    fn from(error: ReactorError) -> RequestError {
        let code = match &error {
            ReactorError::Gone | ReactorError::Export { .. } => ErrorCode::Failed,
            ReactorError::NoSuchArray => ErrorCode::NoSuchArray,
            ReactorError::NameTaken { .. } | ReactorError::NotStopped | ReactorError::Unfinished => {
                ErrorCode::Refused
            }
            ReactorError::Refused(refusal) => code_of(refusal),
        };
        refusal(code, error.to_string())
    }
}

/// The error code of an array's refusal. Each reason is listed, so that a new one must be given a code.
fn code_of(refusal: &AdminRefusal) -> ErrorCode {
    use AdminRefusal as Why;
    match refusal {
        Why::NoSuchMember { .. } => ErrorCode::NoSuchMember,
        Why::TooSmall { .. } => ErrorCode::Device,
        Why::Stopping
        | Why::StoppingAlready
        | Why::NotServed { .. }
        | Why::NotServedWhole { .. }
        | Why::NotServedUnwritten
        | Why::NotServingYet
        | Why::OutAlready { .. }
        | Why::NotRecorded { .. }
        | Why::Needed { .. }
        | Why::HasOtherDevice { .. }
        | Why::InAlready { .. }
        | Why::Unfit { .. }
        | Why::OtherLane { .. }
        | Why::Unbelievable { .. }
        | Why::Kept { .. }
        | Why::ReplacedJustNow
        | Why::BeingReplaced { .. }
        | Why::OthersFirst { .. }
        | Why::MayLackUnflushed { .. }
        | Why::NotAsItLeft { .. }
        | Why::NothingToBuildFrom
        | Why::BeingReplacedAlready { .. }
        | Why::NewDeviceLeft
        | Why::ReplacementGivenUp
        | Why::NoOldDevice { .. }
        | Why::ChangesOver { .. }
        | Why::NotBeingReplaced { .. }
        | Why::NothingToScrub
        | Why::ScrubAlready { .. }
        | Why::ScrubPausedAlready { .. }
        | Why::NoScrub
        | Why::NothingToLookAt
        | Why::RepairAlready => ErrorCode::Refused,
    }
}

impl From<ImportError> for RequestError {
    fn from(error: ImportError) -> RequestError {
        let code = match &error {
            ImportError::NotFound { .. } | ImportError::Ambiguous { .. } => ErrorCode::NoSuchArray,
            ImportError::Device(_) | ImportError::Threadless(_) => ErrorCode::Device,
            ImportError::Assembly { .. } if error.needs_force() => ErrorCode::NeedsForce,
            ImportError::Assembly { .. } => ErrorCode::Refused,
        };
        refusal(code, error.to_string())
    }
}

impl From<DeviceError> for RequestError {
    fn from(error: DeviceError) -> RequestError {
        // The requester may be another user, who has these permissions.
        let text = match &error {
            DeviceError::Permission { path } => format!(
                "{}: permission denied to the daemon, which runs as {}: let that user read and write it, and pass the directories above it",
                shown(path),
                Owner::own()
            ),
            _ => error.to_string(),
        };
        refusal(ErrorCode::Device, text)
    }
}
