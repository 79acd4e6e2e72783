//! Prose keeps to the width of the code: comments of sources, scripts and settings, and paragraphs of
//! documents. Tables, code, and lines that cannot be broken are excepted.

use std::fs;
use std::path::{Path, PathBuf};

/// Columns of a line of prose, as rustfmt.toml has them for code.
const COLUMNS_MAX: usize = 110;

/// Folders with sources, scripts and settings.
const FOLDERS: [&str; 5] = ["src", "tests", "fuzz", "scripts", "conf"];

/// Folders in these that are written by programs.
const GENERATED: [&str; 4] = ["target", "corpus", "recorded", "seeds"];

/// The file's text, if it is text.
fn text_of(path: &Path) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("a folder entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            if !GENERATED.contains(&name) && name != "golden" && name != "__pycache__" {
                files_below(&path, found);
            }
        } else {
            found.push(path);
        }
    }
}

/// Whether a line is too long and has a space at which it could be broken; `prefix`: bytes before its text.
fn is_wide(line: &str, prefix: usize) -> bool {
    line.chars().count() > COLUMNS_MAX && line[prefix..].trim().contains(' ')
}

/// Bytes before the text of a comment; none for a line without one, and for a comment that is laid out.
fn before_comment(line: &str, marks: &[&str]) -> Option<usize> {
    let indent = line.len() - line.trim_start().len();
    let mark = marks.iter().find(|mark| line[indent..].starts_with(**mark))?;
    let prefix = indent + mark.len();
    let is_laid_out = line[prefix..].starts_with("  ") || line[prefix..].starts_with('|');
    (!is_laid_out).then_some(prefix)
}

/// Numbers of the lines of a source or script whose comments are too wide.
fn wide_comments(text: &str, marks: &[&str]) -> Vec<usize> {
    let mut is_code = false;
    let mut wide = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let Some(prefix) = before_comment(line, marks) else { continue };
        is_code ^= line[prefix..].starts_with("```");
        if !is_code && is_wide(line, prefix) {
            wide.push(at + 1);
        }
    }
    wide
}

/// Numbers of the lines of a document that are too wide.
fn wide_prose(text: &str) -> Vec<usize> {
    let mut is_code = false;
    let mut wide = Vec::new();
    for (at, line) in text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        let is_laid_out = line.trim_start().starts_with('|') || line.starts_with("    ");
        if !is_code && !is_laid_out && is_wide(line, 0) {
            wide.push(at + 1);
        }
    }
    wide
}

#[test]
fn prose_keeps_to_the_width_of_code() {
    let root = super::project();
    let mut found = Vec::new();
    FOLDERS.iter().for_each(|folder| files_below(&root.join(folder), &mut found));
    let mut wrong = Vec::new();
    for path in found {
        let name = path.strip_prefix(&root).expect("below the root").display().to_string();
        let Some(text) = text_of(&path) else { continue };
        let marks: &[&str] = if name.ends_with(".rs") { &["//! ", "/// ", "// "] } else { &["# "] };
        wrong.extend(wide_comments(&text, marks).into_iter().map(|line| (name.clone(), line)));
    }
    for dir in [root.clone(), root.join("docs")] {
        for entry in fs::read_dir(dir).expect("a folder") {
            let path = entry.expect("a folder entry").path();
            if path.extension().is_some_and(|extension| extension == "md") {
                let name = path.strip_prefix(&root).expect("below the root").display().to_string();
                let text = text_of(&path).expect("a document");
                wrong.extend(wide_prose(&text).into_iter().map(|line| (name.clone(), line)));
            }
        }
    }
    let lines: Vec<_> = wrong.iter().map(|(name, line)| format!("{name}:{line}")).collect();
    assert!(lines.is_empty(), "more than {COLUMNS_MAX} columns:\n{}", lines.join("\n"));
}

#[test]
fn laid_out_lines_and_lines_that_cannot_be_broken_may_be_wide() {
    let long = "word ".repeat(30);
    let name = "n".repeat(120);
    let source =
        format!("/// {long}\n/// | {long}\n///     {long}\n/// {name}\nlet x = 1; // {long}\n    // {long}");
    assert_eq!(wide_comments(&source, &["/// ", "// "]), [1, 6]);
    let document = format!("{long}\n| {long} |\n    {long}\n- {long}\n```\n{long}\n```\n{name}");
    assert_eq!(wide_prose(&document), [1, 4]);
}
