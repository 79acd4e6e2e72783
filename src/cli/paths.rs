//! Makes the paths of the command line absolute for the daemon, which has another working directory, and
//! restores them in its messages as they were typed. Must not know what the paths lead to.

use super::CliError;
use super::client::ClientError;
use crate::control::MemberRef;
use calpe_core::units::shown;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The error for a path that cannot be sent to a daemon.
pub(super) fn not_utf8(path: &Path) -> CliError {
    let bytes = path.as_os_str().as_bytes().escape_ascii();
    CliError::Usage(format!("{bytes}: is not UTF-8, and a daemon takes only paths that are: rename it"))
}

/// The paths of a command: as typed, and as sent to the daemon.
#[derive(Debug, Default)]
pub(super) struct Paths {
    /// Pairs of the absolute path and the typed one, as text.
    said: Vec<(String, String)>,
}

impl Paths {
    /// A path as the daemon needs it: independent of the working directory, links kept. URIs stay
    /// as they are.
    ///
    /// # Errors
    /// When the path is empty or not UTF-8, or there is no working directory.
    pub(super) fn absolute(&mut self, path: &Path) -> Result<PathBuf, CliError> {
        if path.as_os_str().is_empty() {
            return Err(CliError::Usage("'' is empty: name a path".into()));
        }
        let check = |path: &Path| if path.to_str().is_none() { Err(not_utf8(path)) } else { Ok(()) };
        check(path)?;
        if path.to_string_lossy().contains("://") {
            return Ok(path.to_owned());
        }
        let absolute = std::path::absolute(path)
            .map_err(|error| CliError::Outcome(format!("{}: {error}", shown(path))))?;
        check(&absolute)?;
        if absolute.as_os_str() != path.as_os_str() {
            self.said.push((shown(&absolute).to_string(), shown(path).to_string()));
            // A path below a directory that was typed starts with that directory: longer paths
            // first.
            self.said.sort_by_key(|(absolute, _)| std::cmp::Reverse(absolute.len()));
        }
        Ok(absolute)
    }

    /// The same for a member.
    ///
    /// # Errors
    /// See [`Paths::absolute`].
    pub(super) fn member(&mut self, member: MemberRef) -> Result<MemberRef, CliError> {
        match member {
            MemberRef::Path(path) => self.absolute(&path).map(MemberRef::Path),
            other => Ok(other),
        }
    }

    /// A text of the daemon, with each path as it was typed.
    #[must_use]
    pub(super) fn as_given(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        'text: while let Some(next) = rest.chars().next() {
            let before = out.chars().next_back();
            // A path inside a URI stays as it is.
            if before.is_none_or(ends_word) {
                let word = &rest[..rest.find(ends_word).unwrap_or(rest.len())];
                if word.contains("://") {
                    out.push_str(word);
                    rest = &rest[word.len()..];
                    continue;
                }
            }
            for (absolute, given) in &self.said {
                if let Some(after) = rest.strip_prefix(absolute.as_str())
                    && !before.is_some_and(belongs_to_path)
                    && is_end(after)
                {
                    out.push_str(given);
                    rest = after;
                    continue 'text;
                }
            }
            out.push(next);
            rest = &rest[next.len_utf8()..];
        }
        out
    }

    /// An error of the daemon, with each path as it was typed.
    pub(super) fn error(&self, error: ClientError) -> ClientError {
        match error {
            ClientError::Refused(mut refused) => {
                refused.message = self.as_given(&refused.message);
                ClientError::Refused(refused)
            }
            other => other,
        }
    }
}

/// Whether a URI ends before this character.
fn ends_word(c: char) -> bool {
    c.is_whitespace() || "'\"(),;".contains(c)
}

fn belongs_to_path(c: char) -> bool {
    c.is_alphanumeric() || "/._-+@~%".contains(c)
}

/// Whether a path that stands before `after` ends there, or continues with a name below it.
fn is_end(after: &str) -> bool {
    let mut chars = after.chars();
    match (chars.next(), chars.next()) {
        (None | Some('/'), _) => true,
        // A full stop ends a path; any other dot belongs to a name.
        (Some('.'), second) => second.is_none_or(char::is_whitespace),
        (Some(first), _) => !belongs_to_path(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_absolute_and_uris_stay() {
        let here = std::env::current_dir().unwrap();
        let mut paths = Paths::default();
        assert_eq!(paths.absolute(Path::new("m0")).unwrap(), here.join("m0"));
        assert_eq!(paths.absolute(Path::new("/dev/disk/by-id/x")).unwrap(), Path::new("/dev/disk/by-id/x"));
        assert_eq!(paths.absolute(Path::new("nbd://host/x")).unwrap(), Path::new("nbd://host/x"));
        assert_eq!(paths.member(MemberRef::Index(3)).unwrap(), MemberRef::Index(3));
        let member = paths.member(MemberRef::Path("./3".into())).unwrap();
        assert_eq!(member, MemberRef::Path(here.join("3")));
    }

    #[test]
    fn what_is_not_utf8_is_refused_with_its_bytes() {
        use std::os::unix::ffi::OsStrExt;
        let bad = Path::new(std::ffi::OsStr::from_bytes(b"dir/bad\xff\n"));
        let said = Paths::default().absolute(bad).unwrap_err();
        assert!(
            matches!(&said, CliError::Usage(text) if text.starts_with("dir/bad\\xff\\n: is not UTF-8")),
            "{said}"
        );
        let uri = Path::new(std::ffi::OsStr::from_bytes(b"nbd://host/\xff"));
        assert!(matches!(Paths::default().absolute(uri), Err(CliError::Usage(_))));
    }

    #[test]
    fn people_read_the_paths_that_they_wrote() {
        let here = std::env::current_dir().unwrap();
        let here = here.display();
        let mut paths = Paths::default();
        for given in ["./a.img", "dir", "dir/m"] {
            paths.absolute(Path::new(given)).unwrap();
        }
        for (said, read) in [
            (format!("{here}/a.img: is a directory"), "./a.img: is a directory".to_owned()),
            (format!("replaced by {here}/a.img."), "replaced by ./a.img.".to_owned()),
            (format!("not {here}/a.img2, {here}/a.img.bak"), format!("not {here}/a.img2, {here}/a.img.bak")),
            (format!("/other{here}/a.img"), format!("/other{here}/a.img")),
            (format!("{here}/dir/m ({here}/dir/n)"), "dir/m (dir/n)".to_owned()),
            (
                format!("is ONLINE, nbd+unix:///a?socket={here}/dir/nbd.sock, in {here}/dir"),
                format!("is ONLINE, nbd+unix:///a?socket={here}/dir/nbd.sock, in dir"),
            ),
            ("nothing of ours, für alle".to_owned(), "nothing of ours, für alle".to_owned()),
        ] {
            assert_eq!(paths.as_given(&said), read);
        }
    }
}
