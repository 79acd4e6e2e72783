//! Escapes untrusted text for a terminal or a log, so that it can neither control the terminal nor
//! imitate a line of ours. Names of arrays, paths, superblocks, and text from remote servers and
//! daemons are untrusted.
//!
//! Invariants: the output has no control character, no character that changes the direction of
//! text, and no line break except those that [`PrintableLines`] is told to keep. Ordinary text is
//! unchanged.

use std::fmt::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Prints a text as a part of one line.
#[derive(Debug, Clone, Copy)]
pub struct Printable<'a>(pub &'a str);

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| put(f, c))
    }
}

/// Prints a text of several lines, each of them as [`Printable`] does.
#[derive(Debug, Clone, Copy)]
pub struct PrintableLines<'a>(pub &'a str);

impl fmt::Display for PrintableLines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| if c == '\n' { f.write_char(c) } else { put(f, c) })
    }
}

/// A path as it was given, as a part of one line.
#[must_use]
pub fn shown<P: AsRef<Path> + ?Sized>(path: &P) -> ShownPath<'_> {
    ShownPath(path.as_ref())
}

/// See [`shown`].
#[derive(Debug, Clone, Copy)]
pub struct ShownPath<'a>(&'a Path);

impl fmt::Display for ShownPath<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Printable(&self.0.to_string_lossy()).fmt(f)
    }
}

/// A path as one word of a shell's command line, for commands that people are told to type. It
/// never has single quotes around it, since those enclose whole commands.
#[must_use]
pub fn quoted<P: AsRef<Path> + ?Sized>(path: &P) -> String {
    let bytes = path.as_ref().as_os_str().as_bytes();
    if std::str::from_utf8(bytes).map_or(true, |text| text.contains(is_unprintable)) {
        return by_printf(bytes);
    }
    let text = shown(path).to_string();
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+@%=:,".contains(c);
    let escaped = |is_special: &dyn Fn(char) -> bool| -> String {
        text.chars().flat_map(|c| is_special(c).then_some('\\').into_iter().chain([c])).collect()
    };
    if !text.is_empty() && text.chars().all(is_plain) {
        text
    } else if text.contains('!') {
        // An interactive shell looks for its history even between double quotes.
        escaped(&|c| !is_plain(c))
    } else {
        format!("\"{}\"", escaped(&|c| "\"\\$`".contains(c)))
    }
}

/// A word of a shell's command line, written with escapes because its bytes cannot be shown. A
/// newline at its end is lost.
fn by_printf(bytes: &[u8]) -> String {
    let escaped = bytes.iter().map(|&byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => char::from(byte).to_string(),
        other => format!("\\{other:03o}"),
    });
    format!("\"$(printf \"{}\")\"", escaped.collect::<String>())
}

/// Whether a terminal would do anything but display the character in its place.
#[must_use]
pub fn is_unprintable(c: char) -> bool {
    // C0, DEL and C1.
    c.is_control()
        // What turns, embeds or isolates the direction of text, and the separators of lines and paragraphs.
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn put(f: &mut fmt::Formatter<'_>, c: char) -> fmt::Result {
    if is_unprintable(c) { write!(f, "{}", c.escape_default()) } else { f.write_char(c) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ordinary_text_stays_and_what_steers_a_terminal_is_escaped() {
        for (text, shown) in [
            ("tank", "tank"),
            ("/srv/für élise/日本", "/srv/für élise/日本"),
            ("C:\\x 'y' \"z\"", "C:\\x 'y' \"z\""),
            ("\x1b[2J", "\\u{1b}[2J"),
            ("a\r\nb\tc", "a\\r\\nb\\tc"),
            ("\x7f\u{9b}31m", "\\u{7f}\\u{9b}31m"),
            ("\u{202e}txt.exe\u{2066}\u{200f}", "\\u{202e}txt.exe\\u{2066}\\u{200f}"),
            ("\u{2028}", "\\u{2028}"),
        ] {
            assert_eq!(Printable(text).to_string(), shown);
        }
        assert_eq!(PrintableLines("a\n\x1bb\n").to_string(), "a\n\\u{1b}b\n");
        assert_eq!(shown(Path::new("./m\n0")).to_string(), "./m\\n0");
    }

    #[test]
    fn a_path_in_a_command_is_one_word_to_a_shell() {
        for path in
            ["/srv/tank", "my $HOME/`x`", "a\"b\\c", "it's; rm", "wow! it's $HOME", "nbd://h/x?a=b&c", ""]
        {
            let line = format!("printf %s {}", quoted(path));
            let output = std::process::Command::new("sh").arg("-c").arg(line).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), path);
        }
        assert!(!quoted("wow!").contains('"'));
        for bytes in [&b"/z\x1b[31m x"[..], b"a\nb!", b"\xff$HOME\"'`", "\u{202e}100%\\".as_bytes()] {
            let word = quoted(std::ffi::OsStr::from_bytes(bytes));
            assert!(word.is_ascii() && !word.contains(is_unprintable) && !word.contains('\''), "{word}");
            for shell in ["sh", "bash"] {
                let line = format!("printf %s {word}");
                let output = std::process::Command::new(shell).arg("-c").arg(line).output().unwrap();
                assert_eq!(output.stdout, bytes, "{shell}: {word}");
            }
        }
    }

    proptest! {
        #[test]
        fn nothing_unprintable_is_left(text in any::<String>()) {
            prop_assert!(!Printable(&text).to_string().chars().any(is_unprintable));
            prop_assert!(!PrintableLines(&text).to_string().chars().any(|c| c != '\n' && is_unprintable(c)));
        }
    }
}
