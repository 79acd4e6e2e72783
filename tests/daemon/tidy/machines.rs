//! A machine of the array keeps its fields to itself: what others need of it they ask for, and what they tell
//! it they say.
//!
//! So a type of src/core/array has no visible field, unless it is plain data that is handed from one to the
//! other; then all of its fields are visible, and the source says what it is. A `pub` type with `pub` fields
//! alone is part of the interface. Helpers of unit tests (recovery/tests) are no machines: tests set the
//! scene in them field by field.

use super::fields::{indent, is_field, without_visibility};

const ARRAY: &str = "array/";

/// What is beneath the machines: `Core`, and what it consists of.
const BENEATH: &str = "array/base/";

/// What unit tests alone use.
const OF_TESTS: &str = "array/recovery/tests/";

/// How the line above a type of plain data begins.
const DATA: &str = "// Plain data: ";

/// What is wrong with the types of a source that rustfmt has laid out.
fn found_in(source: &str) -> Vec<String> {
    let lines: Vec<&str> = source.lines().collect();
    let mut wrong = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let opens = without_visibility(line.trim_start()).strip_prefix("struct ");
        let Some(item) = opens.filter(|_| line.ends_with('{')) else { continue };
        let name = item.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or_default();
        let depth = indent(line);
        let body = lines[at + 1..].iter().take_while(|line| **line != format!("{:depth$}}}", ""));
        let fields = body.filter(|line| indent(line) == depth + 4 && is_field(line.trim_start()));
        let (visible, hidden): (Vec<&str>, Vec<&str>) =
            fields.map(|line| line.trim_start()).partition(|field| field.starts_with("pub"));
        let Some(first) = visible.first() else { continue };
        let first = without_visibility(first).split(':').next().unwrap_or_default();
        let above = lines[..at].iter().rev().map(|line| line.trim_start());
        let mut above = above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
        let is_data = above.any(|line| line.len() > DATA.len() && line.starts_with(DATA));
        let is_interface = line.trim_start().starts_with("pub struct")
            && visible.iter().all(|field| field.starts_with("pub "));
        if !hidden.is_empty() {
            wrong.push(format!("{name} shows {first} and hides others"));
        } else if !is_data && !is_interface {
            wrong.push(format!("{name} shows {first}, and nothing says that it is plain data"));
        }
    }
    wrong
}

#[test]
fn machines_of_the_array_keep_their_fields_to_themselves() {
    let sources = super::files().into_iter();
    let is_apart = |file: &str| file.starts_with(BENEATH) || file.starts_with(OF_TESTS);
    let of_array = sources.filter(|(file, ..)| file.starts_with(ARRAY) && !is_apart(file));
    let wrong: Vec<_> = of_array
        .flat_map(|(file, code, _)| {
            found_in(&code).into_iter().map(move |text| format!("src/core/{file}: {text}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

mod tests {
    use super::*;

    #[test]
    fn a_visible_field_is_found_unless_the_type_is_data() {
        let source = "\
pub(super) struct Machine {
    /// Hidden.
    first: u8,
    pub(super) second: u8,
}

struct Unmarked {
    pub first: u8,
}

/// Handed over.
// Plain data: what a round has found.
#[derive(Debug)]
pub(super) struct Found {
    pub first: u8,
    pub(super) second: Vec<(u8, u8)>,
}

pub struct Shown {
    pub first: u8,
}

pub struct Hidden {
    first: u8,
}
struct Unit;
struct Tuple(pub u8);
";
        let expected = [
            "Machine shows second and hides others",
            "Unmarked shows first, and nothing says that it is plain data",
        ];
        assert_eq!(found_in(source), expected);
    }
}
