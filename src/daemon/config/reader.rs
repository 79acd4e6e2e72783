//! Reads values of configuration sections by key, and notes problems with their places. Must not
//! know which keys there are.

use calpe_core::units::{ByteCount, two_sizes};
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Line, from 1.
    pub line: usize,
    /// Column, from 1, in characters.
    pub column: usize,
    /// The key ("listen.tcp"), empty where the text is no TOML.
    pub key: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

/// Walks the tables and collects problems.
pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    pub(super) dir: &'a Path,
    /// Whether the files of TLS are read as well.
    pub(super) open_files: bool,
    pub(super) problems: Vec<Problem>,
}

/// A table, with its name for messages (`listen.`, `array[2].`) and its place.
pub(super) struct Section<'t, 'i> {
    pub(super) name: String,
    pub(super) table: &'t DeTable<'i>,
    pub(super) at: usize,
}

type Value<'i> = Spanned<DeValue<'i>>;

impl Reader<'_> {
    /// A value of the section; none when it is absent, or wrong, which is noted as a problem.
    pub(super) fn value<T>(
        &mut self,
        section: &Section<'_, '_>,
        key: &str,
        convert: impl FnOnce(&DeValue<'_>) -> Result<T, String>,
    ) -> Option<T> {
        let value: &Value<'_> = section.table.get(key)?;
        match convert(value.get_ref()) {
            Ok(converted) => Some(converted),
            Err(message) => {
                self.problem(value.span().start, &format!("{}{key}", section.name), &message);
                None
            }
        }
    }

    pub(super) fn path(&mut self, section: &Section<'_, '_>, key: &str) -> Option<PathBuf> {
        let dir = self.dir;
        self.value(section, key, |value| absolute(dir, string(value)?))
    }

    /// A size: a whole number of bytes, or a text with a binary suffix.
    pub(super) fn size(&mut self, section: &Section<'_, '_>, key: &str, min: u64, max: u64) -> Option<u64> {
        self.value(section, key, |value| {
            let bytes = match value {
                DeValue::String(text) => text.parse::<ByteCount>().map_err(|error| error.to_string())?.0,
                _ => u64::try_from(integer(value).map_err(|_| expected("a size like \"64MiB\"", value))?)
                    .map_err(|_| "a size is not negative".to_owned())?,
            };
            match bytes {
                _ if bytes < min => {
                    let (bytes, min) = two_sizes(bytes, min);
                    Err(format!("{bytes} is too little: use {min} or more"))
                }
                _ if bytes > max => {
                    let (bytes, max) = two_sizes(bytes, max);
                    Err(format!("{bytes} is too much: use {max} or less"))
                }
                _ => Ok(bytes),
            }
        })
    }

    pub(super) fn section<'t, 'i>(&mut self, root: &Section<'t, 'i>, key: &str) -> Option<Section<'t, 'i>> {
        let value = root.table.get(key)?;
        match value.get_ref().as_table() {
            Some(table) => Some(Section { name: format!("{key}."), table, at: value.span().start }),
            None => {
                self.problem(
                    value.span().start,
                    key,
                    &expected(&format!("a section [{key}]"), value.get_ref()),
                );
                None
            }
        }
    }

    pub(super) fn known(&mut self, section: &Section<'_, '_>, keys: &[&str]) {
        for key in section.table.keys() {
            if !keys.contains(&key.get_ref().as_ref()) {
                let name = format!("{}{}", section.name, key.get_ref());
                let message = format!("unknown key; known here are {}", keys.join(", "));
                self.problem(key.span().start, &name, &message);
            }
        }
    }

    pub(super) fn problem(&mut self, at: usize, key: &str, message: &str) {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        self.problems.push(Problem {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            key: key.to_owned(),
            message: message.to_owned(),
        });
    }
}

pub(super) fn absolute(dir: &Path, text: &str) -> Result<PathBuf, String> {
    if text.is_empty() || text.contains('\0') {
        return Err("is not a path".into());
    }
    // Removes the dot of "./members".
    Ok(dir.join(text).components().collect())
}

pub(super) fn string<'v>(value: &'v DeValue<'_>) -> Result<&'v str, String> {
    value.as_str().ok_or_else(|| expected("a text in quotes", value))
}

pub(super) fn boolean(value: &DeValue<'_>) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| expected("true or false", value))
}

pub(super) fn integer(value: &DeValue<'_>) -> Result<i128, String> {
    let number = value.as_integer().ok_or_else(|| expected("a whole number", value))?;
    i128::from_str_radix(number.as_str(), number.radix()).map_err(|_| format!("{number} is out of range"))
}

pub(super) fn expected(what: &str, found: &DeValue<'_>) -> String {
    let kind = found.type_str();
    format!("expected {what}, found {} {kind}", if kind.starts_with(['a', 'i']) { "an" } else { "a" })
}
