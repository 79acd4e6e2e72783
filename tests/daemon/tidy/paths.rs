//! Reads the paths that a Rust source names: `use` declarations, groups included, and paths written
//! out in code.
//!
//! Knows modules and names only. Comments, literals and items for tests are left out; macros are
//! read as code.

use std::collections::{BTreeMap, BTreeSet};

/// Segments of a path, from the root of the crate.
pub(super) type Path = Vec<String>;

/// The names that one module uses.
#[derive(Debug, Default)]
pub(super) struct Module {
    /// Name that a `use` declaration brings in, and the path that it stands for.
    pub imports: BTreeMap<String, Path>,
    /// Every path below the crate that the module names, `use` declarations included.
    pub paths: BTreeSet<Path>,
    /// Child modules that are declared for tests only.
    pub test_children: BTreeSet<String>,
}

/// Reads the source of `module`; returns an entry for it and for each of its inline modules.
pub(super) fn read(module: &[String], source: &str) -> Vec<(Path, Module)> {
    let tokens = tokens(source);
    let mut reader = Reader { tokens: &tokens, at: 0, found: BTreeMap::new(), open: vec![] };
    reader.found.insert(module.to_vec(), Module::default());
    reader.read(module.to_vec());
    reader.found.into_iter().collect()
}

/// Identifiers, `::`, and every other character by itself; no comments, no literals.
fn tokens(source: &str) -> Vec<String> {
    let chars: Vec<char> = source.chars().collect();
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < chars.len() {
        let next = chars.get(at + 1).copied();
        match chars[at] {
            c if c.is_whitespace() => at += 1,
            '/' if next == Some('/') => at = end_of_line(&chars, at),
            '/' if next == Some('*') => at = end_of_comment(&chars, at),
            '"' => at = end_of_string(&chars, at),
            '\'' => at = end_of_quote(&chars, at),
            ':' if next == Some(':') => {
                tokens.push("::".to_owned());
                at += 2;
            }
            c if c.is_alphanumeric() || c == '_' => {
                let start = at;
                while chars.get(at).is_some_and(|c| c.is_alphanumeric() || *c == '_') {
                    at += 1;
                }
                let word: String = chars[start..at].iter().collect();
                match end_of_raw_string(&chars, at).filter(|_| ["r", "br", "cr"].contains(&word.as_str())) {
                    Some(end) => at = end,
                    // The prefix of a literal.
                    None if ["b", "c"].contains(&word.as_str())
                        && matches!(chars.get(at), Some('"' | '\'')) => {}
                    None => tokens.push(word),
                }
            }
            c => {
                tokens.push(c.to_string());
                at += 1;
            }
        }
    }
    tokens
}

fn end_of_line(chars: &[char], mut at: usize) -> usize {
    while chars.get(at).is_some_and(|c| *c != '\n') {
        at += 1;
    }
    at
}

/// Block comments nest.
fn end_of_comment(chars: &[char], mut at: usize) -> usize {
    let mut depth = 0;
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn end_of_string(chars: &[char], mut at: usize) -> usize {
    at += 1;
    while at < chars.len() && chars[at] != '"' {
        at += if chars[at] == '\\' { 2 } else { 1 };
    }
    at + 1
}

/// The end of a character, or of the quote before a lifetime's name.
fn end_of_quote(chars: &[char], at: usize) -> usize {
    if chars.get(at + 1) == Some(&'\\') {
        // The character behind the backslash may be a quote.
        return (at + 3..chars.len()).find(|at| chars[*at] == '\'').map_or(chars.len(), |at| at + 1);
    }
    if chars.get(at + 2) == Some(&'\'') { at + 3 } else { at + 1 }
}

/// The end of the raw string whose hashes or quote are at `at`, if there is one.
fn end_of_raw_string(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at..].iter().take_while(|c| **c == '#').count();
    if chars.get(at + hashes) != Some(&'"') {
        return None;
    }
    let body = at + hashes + 1;
    let ends = |quote: &usize| {
        chars[*quote] == '"'
            && chars.len() > quote + hashes
            && chars[quote + 1..=quote + hashes].iter().all(|c| *c == '#')
    };
    Some((body..chars.len()).find(ends).map_or(chars.len(), |quote| quote + hashes + 1))
}

/// The words that an item starts with, after its visibility.
const ITEM_KEYWORDS: [&str; 12] = [
    "use",
    "mod",
    "fn",
    "impl",
    "struct",
    "enum",
    "trait",
    "type",
    "const",
    "static",
    "macro_rules",
    "unsafe",
];

struct Reader<'a> {
    tokens: &'a [String],
    at: usize,
    found: BTreeMap<Path, Module>,
    /// For each open brace whether it opened an inline module.
    open: Vec<bool>,
}

impl Reader<'_> {
    fn token(&self, ahead: usize) -> &str {
        self.tokens.get(self.at + ahead).map_or("", String::as_str)
    }

    fn starts_with(&self, expected: &[&str]) -> bool {
        expected.iter().enumerate().all(|(ahead, token)| self.token(ahead) == *token)
    }

    fn read(&mut self, mut module: Path) {
        while self.at < self.tokens.len() {
            if self.starts_with(&["#", "[", "cfg", "(", "test", ")", "]"]) {
                self.at += 7;
                self.skip_test_item(&module);
            } else if self.starts_with(&["use"]) && self.token(1) != "<" {
                self.at += 1;
                let prefix = Vec::new();
                self.read_use(&module, &prefix);
            } else if self.starts_with(&["mod"]) && self.token(2) == "{" {
                module.push(self.token(1).to_owned());
                self.found.entry(module.clone()).or_default();
                self.open.push(true);
                self.at += 3;
            } else if self.starts_with(&["{"]) {
                self.open.push(false);
                self.at += 1;
            } else if self.starts_with(&["}"]) {
                if self.open.pop() == Some(true) {
                    module.pop();
                }
                self.at += 1;
            } else if self.token(1) == "::" && self.is_start_of_path() {
                self.read_path(&module);
            } else {
                self.at += 1;
            }
        }
    }

    /// Whether a path starts here: at a word without `::` before it.
    fn is_start_of_path(&self) -> bool {
        is_word(self.token(0)) && (self.at == 0 || self.tokens[self.at - 1] != "::")
    }

    /// Skips something for tests only: an item up to its semicolon or closing brace; a field, a variant or an
    /// argument up to its comma.
    fn skip_test_item(&mut self, module: &[String]) {
        let mut depth = 0;
        let mut keyword = None;
        while self.at < self.tokens.len() {
            let token = self.token(0).to_owned();
            if depth == 0 && ITEM_KEYWORDS.contains(&token.as_str()) {
                keyword.get_or_insert(token.clone());
            }
            if depth == 0 && token == "mod" && self.token(2) == ";" {
                let child = self.token(1).to_owned();
                self.found.entry(module.to_vec()).or_default().test_children.insert(child);
            }
            match token.as_str() {
                "{" | "(" | "[" => depth += 1,
                "}" | ")" | "]" => depth -= 1,
                _ => {}
            }
            // A brace that was open before belongs to the parent of the item.
            if depth < 0 {
                return;
            }
            self.at += 1;
            let ends = match token.as_str() {
                ";" => true,
                "," => keyword.is_none(),
                "}" => keyword.as_deref() != Some("use"),
                _ => false,
            };
            if ends && depth == 0 {
                return;
            }
        }
    }

    /// Reads a tree of a `use` declaration after `prefix`.
    fn read_use(&mut self, module: &[String], prefix: &[String]) {
        let mut path = prefix.to_vec();
        loop {
            match self.token(0) {
                "{" => {
                    self.at += 1;
                    while !["}", ""].contains(&self.token(0)) {
                        self.read_use(module, &path);
                        if self.token(0) != "}" {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    return;
                }
                "::" => self.at += 1,
                "*" => {
                    self.at += 1;
                    self.note(module, &path, None);
                    return;
                }
                "as" => {
                    let name = self.token(1).to_owned();
                    self.at += 2;
                    self.note(module, &path, Some(name));
                    return;
                }
                word if is_word(word) => {
                    path.push(word.to_owned());
                    self.at += 1;
                }
                _ => {
                    let is_self = path.len() > 1 && path.last().is_some_and(|last| last == "self");
                    if is_self {
                        path.pop();
                    }
                    let name = path.last().cloned();
                    self.note(module, &path, name);
                    return;
                }
            }
        }
    }

    fn read_path(&mut self, module: &[String]) {
        let mut path = vec![self.token(0).to_owned()];
        self.at += 1;
        while self.token(0) == "::" && is_word(self.token(1)) {
            path.push(self.token(1).to_owned());
            self.at += 2;
        }
        self.note(module, &path, None);
    }

    /// Notes that `module` names `written`, and imports it as `name`.
    fn note(&mut self, module: &[String], written: &[String], name: Option<String>) {
        let path = absolute(module, written);
        let found = self.found.entry(module.to_vec()).or_default();
        if let Some(name) = name {
            found.imports.insert(name, path.clone());
        }
        found.paths.insert(path);
    }
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// A written path from the root of the crate. A path that starts with neither `crate`, `super` nor `self` is
/// taken as relative to its module; if it starts with the name of a crate, it then leads to no module.
fn absolute(module: &[String], written: &[String]) -> Path {
    let mut path = module.to_vec();
    let mut rest = written;
    while let Some((first, after)) = rest.split_first() {
        match first.as_str() {
            "crate" => path.clear(),
            "super" => drop(path.pop()),
            "self" => {}
            _ => break,
        }
        rest = after;
    }
    path.extend(rest.iter().cloned());
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> Path {
        text.split("::").filter(|segment| !segment.is_empty()).map(str::to_owned).collect()
    }

    fn named(module: &str, source: &str) -> Vec<String> {
        let modules = read(&path(module), source);
        modules.iter().flat_map(|(_, found)| &found.paths).map(|found| found.join("::")).collect()
    }

    #[test]
    fn groups_and_renamed_imports_and_paths_in_code_are_read() {
        let source = "use super::{b::{self, One, Two as Other}, c};\nfn f(x: crate::d::X) { super::super::e::f::<u8>(); }";
        let expected = ["a::b", "a::b::One", "a::b::Two", "a::c", "d::X", "e::f"];
        assert_eq!(named("a::here", source), expected);
        let modules = read(&path("a::here"), source);
        let imports = &modules[0].1.imports;
        assert_eq!(imports.keys().map(String::as_str).collect::<Vec<_>>(), ["One", "Other", "b", "c"]);
        assert_eq!(imports["Other"], path("a::b::Two"));
    }

    #[test]
    fn comments_literals_lifetimes_and_items_for_tests_name_nothing() {
        let source = r##"
            // super::a::A
            /* super::b::B /* nested */ super::c::C */
            const X: &str = "super::d::D \" super::e::E";
            const Y: &[u8] = br#"super::f::F " super::g::G"#;
            fn f<'a>(x: &'a str) -> char { '"'; '\''; b'"' ; super::real::R }
            #[cfg(test)]
            use super::{h::H, i::I};
            #[cfg(test)]
            mod suite;
            struct S { #[cfg(test)] x: super::l::L, #[cfg(test)] y: super::m::M }
            #[cfg(test)]
            impl<A, B> X<A, B> for super::n::N {}
            #[cfg(test)]
            mod tests { use super::j::J; fn t() { super::k::K; } }
            use super::last::L;
        "##;
        assert_eq!(named("a::here", source), ["a::last::L", "a::real::R"]);
        let modules = read(&path("a::here"), source);
        assert_eq!(modules[0].1.test_children, BTreeSet::from(["suite".to_owned()]));
    }

    #[test]
    fn a_module_inside_a_file_is_a_module() {
        let modules = read(&path("a"), "mod b { use super::c::C; fn f() {} } use crate::d::D;");
        let found: Vec<_> =
            modules.iter().map(|(name, found)| (name.join("::"), found.paths.len())).collect();
        assert_eq!(found, [("a".to_owned(), 1), ("a::b".to_owned(), 1)]);
        assert!(modules[1].1.paths.contains(&path("a::c::C")));
    }
}
