//! Why a reactor refuses something.

use calpe_core::volume::AdminRefusal;

/// Why a reactor refused or did not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReactorError {
    /// Its thread has ended.
    #[error("the daemon is stopping")]
    Gone,
    /// No array of that id is served.
    #[error("this array is not served any more")]
    NoSuchArray,
    /// The export cannot be offered to clients.
    #[error("array '{name}' cannot be exported: {fault}")]
    Export {
        /// Name of the array.
        name: String,
        /// What is wrong.
        fault: calpe_core::nbd::ExportFault,
    },
    /// Another array of that name is served.
    #[error("an array named '{name}' is served already: export that one first")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The volume refused a request of an administrator.
    #[error(transparent)]
    Refused(AdminRefusal),
    /// What a lane asked of a device before has not ended: it would land beside what it asks from now on.
    #[error("what was asked of this device before has not ended: it can come back when it has")]
    Unfinished,
    /// The volume was given up before it had stopped.
    #[error("the array did not stop in time: it will be checked at the next start")]
    NotStopped,
}
