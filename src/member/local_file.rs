//! The open file behind a local device: what closes it, and when that is told. Must not know what is in it.

use super::device::Node;
use super::held::{Held, Stage};
use std::fs::File;
use std::sync::Arc;

/// An open file or block device.
#[derive(Debug)]
pub(super) struct LocalFile {
    /// There until it is closed, or a ring beside the engine's has it.
    file: Option<File>,
    pub node: Node,
    /// When it is locked; a ring that has the file shares it.
    pub held: Option<Arc<Held>>,
    /// Closing it may take long.
    pub closes_slowly: bool,
    /// Whoever begins an operation on it may have to wait for its filesystem.
    pub holds_up: bool,
}

impl LocalFile {
    pub fn new(file: File, node: Node, held: Option<Held>, closes_slowly: bool, holds_up: bool) -> LocalFile {
        LocalFile { file: Some(file), node, held: held.map(Arc::new), closes_slowly, holds_up }
    }

    pub fn file(&self) -> &File {
        self.file.as_ref().expect("open until it is dropped or handed over")
    }

    /// A ring beside the engine's has a descriptor of its own: this one would be in the way when
    /// the process is killed.
    pub fn hand_over(&mut self) {
        if let Some(file) = self.file.take() {
            let held = self.held.clone();
            // It has the lock, too, until it is closed.
            close(move || {
                drop(file);
                drop(held);
            });
        }
    }
}

impl Drop for LocalFile {
    fn drop(&mut self) {
        let (file, held) = (self.file.take(), self.held.take());
        if !self.closes_slowly {
            // Not forgotten before the lock is gone.
            drop(file);
            drop(held);
            return;
        }
        if let Some(held) = &held {
            held.set(Stage::Closing);
        }
        if file.is_some() {
            close(move || {
                drop(file);
                drop(held);
            });
        }
    }
}

/// Closes something on a thread of its own. Without a thread that is done here: when the closure is dropped.
fn close(close: impl FnOnce() + Send + 'static) {
    let _ = std::thread::Builder::new().name("close".into()).spawn(close);
}
