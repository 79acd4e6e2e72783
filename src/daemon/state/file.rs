//! Files of a state directory: written whole, so that a reader finds the old content or the new
//! one, and read with care, so that a damaged file costs only its own content.
//!
//! Must not know what is in them, beyond their version.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Version of every file; rises when a field changes its meaning. New fields may come at any time.
const VERSION: u64 = 1;

/// Longest file that is read: a thousand arrays of the widest kind take less.
const FILE_BYTES_MAX: u64 = 64 << 20;

/// Suffix of a file that this process has not read: it is kept beside the new one.
const UNREAD: &str = "unread";

/// Reads a file. None when there is none, or it cannot be used: then it has been renamed, and
/// `warnings` has a line about it.
pub(crate) fn load<T: DeserializeOwned>(path: &Path, warnings: &mut Vec<String>) -> Option<T> {
    let text = match read(path) {
        Ok(text) => text?,
        Err(error) => {
            let fate = set_aside(path, UNREAD);
            warnings.push(format!(
                "{}: cannot be read, its content is not known: {error}: {fate}",
                path.display()
            ));
            return None;
        }
    };
    let parsed: Result<serde_json::Value, _> = serde_json::from_slice(&text);
    let (why, suffix) = match parsed {
        Err(error) => (format!("is damaged ({error})"), "damaged"),
        Ok(value) => match value["version"].as_u64() {
            Some(version) if version > VERSION => (
                format!(
                    "is of version {version}, and this program knows up to {VERSION}: a newer one wrote it"
                ),
                "newer",
            ),
            Some(_) => match serde_json::from_value(value["content"].clone()) {
                Ok(content) => return Some(content),
                Err(error) => (format!("is damaged ({error})"), "damaged"),
            },
            None => ("is damaged (it has no version)".to_owned(), "damaged"),
        },
    };
    warnings.push(format!("{} {why}: {}", path.display(), set_aside(path, suffix)));
    None
}

/// Reads a file and leaves it as it is. None when there is none, or it cannot be used.
pub(crate) fn peek<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let mut file: serde_json::Value = serde_json::from_slice(&read(path).ok()??).ok()?;
    let is_known = file["version"].as_u64().is_some_and(|version| version <= VERSION);
    if is_known { serde_json::from_value(file["content"].take()).ok() } else { None }
}

/// The bytes of a file; none when there is none.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        // A path that is no directory is reported when it is written to.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        file => file?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::other("it is longer than any that this program writes"));
    }
    Ok(Some(bytes))
}

/// Renames a file that this process has not read. Returns a line about it, if the file exists.
pub(crate) fn set_unread_aside(path: &Path) -> Option<String> {
    path.exists().then(|| set_aside(path, UNREAD))
}

/// Renames a file, over an earlier one of that name. Returns a line about it.
fn set_aside(path: &Path, suffix: &str) -> String {
    let aside = beside(path, suffix);
    match fs::rename(path, &aside) {
        Ok(()) => format!("it was set aside as {}", aside.display()),
        Err(error) => format!("it cannot be set aside ({error}), and stays until it can be overwritten"),
    }
}

fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    name.into()
}

/// The content of a file as it is written.
pub(crate) fn encode(content: &impl Serialize) -> Vec<u8> {
    let value = serde_json::json!({ "version": VERSION, "content": content });
    // JSON can express all types that are kept.
    let mut bytes = serde_json::to_vec_pretty(&value).expect("plain data");
    bytes.push(b'\n');
    bytes
}

/// Writes a file whole: after a crash it is the old one or the new one.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = beside(path, "new");
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all());
    let renamed = written.and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        // It takes space, and space may be what is missing.
        let _ = fs::remove_file(&temporary);
    }
    renamed?;
    sync_dir(path)
}

/// Appends to a file, and moves it to `older` first when it has become longer than `bytes_max`.
pub(crate) fn append(path: &Path, older: &Path, bytes: &[u8], bytes_max: u64) -> io::Result<()> {
    let open = || OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path);
    let mut file = open()?;
    let mut len = file.metadata()?.len();
    if len > 0 && len + bytes.len() as u64 > bytes_max {
        fs::rename(path, older)?;
        file = open()?;
        len = 0;
    }
    let mut last = *b"\n";
    if len > 0 {
        file.read_exact_at(&mut last, len - 1)?;
    }
    // A crash may have left half a line, which would spoil this one.
    let start: &[u8] = if last == *b"\n" { b"" } else { b"\n" };
    if let Err(error) = file.write_all(&[start, bytes].concat()) {
        // The lines are written again, whole, when there is room.
        let _ = file.set_len(len);
        return Err(error);
    }
    file.sync_data()?;
    if len == 0 { sync_dir(path) } else { Ok(()) }
}

fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_reads_back_and_nothing_is_left_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        let mut warnings = Vec::new();
        assert_eq!(load::<Vec<u32>>(&path, &mut warnings), None);
        for content in [vec![1, 2], vec![3]] {
            replace(&path, &encode(&content)).unwrap();
            assert_eq!(load::<Vec<u32>>(&path, &mut warnings), Some(content));
        }
        assert_eq!((warnings.len(), fs::read_dir(dir.path()).unwrap().count()), (0, 1));
    }

    #[test]
    fn damaged_and_newer_files_are_set_aside_with_a_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        for (text, aside, word) in [
            ("{\"version\":1,\"cont", "a.json.damaged", "is damaged"),
            ("{\"content\":[]}", "a.json.damaged", "no version"),
            ("{\"version\":1,\"content\":{\"a\":1}}", "a.json.damaged", "is damaged"),
            ("{\"version\":2,\"content\":[]}", "a.json.newer", "of version 2"),
        ] {
            fs::write(&path, text).unwrap();
            let mut warnings = Vec::new();
            assert_eq!(load::<Vec<u32>>(&path, &mut warnings), None, "{text}");
            assert!(warnings[0].contains(word) && warnings[0].contains(aside), "{warnings:?}");
            assert!(!path.exists() && dir.path().join(aside).exists(), "{text}");
        }
        fs::create_dir(&path).unwrap();
        let mut warnings = Vec::new();
        assert_eq!(load::<Vec<u32>>(&path, &mut warnings), None);
        assert!(warnings[0].contains("not a regular file"), "{warnings:?}");
    }

    #[test]
    fn a_file_that_is_appended_to_is_rotated() {
        let dir = tempfile::tempdir().unwrap();
        let (path, older) = (dir.path().join("log"), dir.path().join("log.1"));
        for at in 0..10 {
            append(&path, &older, format!("line {at}\n").as_bytes(), 30).unwrap();
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), "line 8\nline 9\n");
        assert_eq!(fs::read_to_string(&older).unwrap(), "line 4\nline 5\nline 6\nline 7\n");
        fs::write(&path, "half a l").unwrap();
        append(&path, &older, b"whole\n", 30).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "half a l\nwhole\n");
    }
}
