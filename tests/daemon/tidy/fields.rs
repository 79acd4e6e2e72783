//! Checks that no type has more fields than a reader can remember, unless the source gives a reason.

/// Most fields of a type without a stated reason for more.
const FIELDS_MAX: usize = 15;

/// How a reason begins: a line of its own above the type.
const REASON: &str = "// More than 15 fields: ";

/// Folders and files below src/ that still have types to be split or given a reason. An entry that is not
/// needed fails the test.
const EXCEPTIONS: &[&str] = &[];

/// A struct in a source that rustfmt has laid out.
#[derive(Debug, PartialEq, Eq)]
struct Struct {
    name: String,
    fields: usize,
    has_reason: bool,
}

/// The structs with named fields in a source.
fn structs(source: &str) -> Vec<Struct> {
    let lines: Vec<&str> = source.lines().collect();
    let opens = |line: &str| {
        let item = without_visibility(line.trim_start()).strip_prefix("struct ")?;
        let name = item.split(|c: char| !c.is_alphanumeric() && c != '_').next()?;
        line.ends_with('{').then(|| name.to_owned())
    };
    let found = lines.iter().enumerate().filter_map(|(at, line)| Some((at, opens(line)?)));
    found
        .map(|(at, name)| {
            let indent = indent(lines[at]);
            let body = lines[at + 1..].iter().take_while(|line| **line != format!("{:indent$}}}", ""));
            let fields = body.filter(|line| self::indent(line) == indent + 4 && is_field(line.trim_start()));
            let above = lines[..at].iter().rev().map(|line| line.trim_start());
            let mut above = above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
            let has_reason = above.any(|line| line.len() > REASON.len() && line.starts_with(REASON));
            Struct { name, fields: fields.count(), has_reason }
        })
        .collect()
}

pub(super) fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// What follows `pub` or `pub(...)`.
pub(super) fn without_visibility(item: &str) -> &str {
    let Some(rest) = item.strip_prefix("pub") else { return item };
    let rest = rest.strip_prefix('(').and_then(|rest| rest.split_once(')')).map_or(rest, |(_, rest)| rest);
    rest.trim_start()
}

pub(super) fn is_field(line: &str) -> bool {
    let name = without_visibility(line).split(':').next().unwrap_or_default();
    line.contains(": ") && !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_')
}

#[test]
fn no_type_has_more_than_15_fields_without_a_reason() {
    let mut wrong = Vec::new();
    for (file, code, _) in super::files() {
        for Struct { name, fields, has_reason } in structs(&code) {
            if fields > FIELDS_MAX && !has_reason {
                wrong.push((file.clone(), format!("src/{file}: {name} has {fields} fields")));
            }
        }
    }
    let in_folder = |folder: &str, (file, _): &(String, String)| file.starts_with(folder);
    let unneeded = EXCEPTIONS.iter().filter(|folder| !wrong.iter().any(|found| in_folder(folder, found)));
    let unneeded: Vec<_> =
        unneeded.map(|folder| format!("src/{folder} needs no exception any more: remove it")).collect();
    wrong.retain(|found| !EXCEPTIONS.iter().any(|folder| in_folder(folder, found)));
    let wrong: Vec<_> = wrong.into_iter().map(|(_, text)| text).chain(unneeded).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_and_reasons_are_seen() {
        let source = "\
/// Shown to people.
// More than 15 fields: the columns of a table.
#[derive(Debug)]
pub(crate) struct Table<T> {
    /// first: one.
    pub first: T,
    #[serde(default)]
    pub(super) second: Vec<(String, T)>,
}

struct Unit;
struct Tuple(u8, u8);
pub struct Short {
    third: u8,
}
impl Short {
    fn f() -> Short {
        Short { third: 1 }
    }
}
";
        let found = structs(source);
        let expected = [("Table", 2, true), ("Short", 1, false)];
        let expected =
            expected.map(|(name, fields, has_reason)| Struct { name: name.to_owned(), fields, has_reason });
        assert_eq!(found, expected);
    }
}
