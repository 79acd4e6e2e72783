//! Checks that no two modules of one folder use each other, directly or round a circle.
//!
//! The modules of a folder are its siblings: `x` is `x.rs` or `x/mod.rs` with everything below `x/`. The face
//! of a folder (its `mod.rs`, or the `x.rs` beside it) is no sibling: it may use its children, and they may
//! use what it defines. A name that a face only re-exports is followed to the module that defines it.

use super::paths::{self, Module, Path};
use std::collections::{BTreeMap, BTreeSet};

/// Folders below src/ that still have circles, each with the reason. An entry that is not needed fails the
/// test.
const EXCEPTIONS: &[(&str, &str)] = &[];

/// For each module of one folder, the modules that it uses and the ties between the two.
type Graph = BTreeMap<String, BTreeMap<String, Ties>>;

/// For each pair of a file and one that it uses, the names that it takes from there.
type Ties = BTreeMap<(String, String), BTreeSet<String>>;

/// The modules of a crate.
struct Tree {
    modules: BTreeMap<Path, Module>,
    /// The file of each module, below src/.
    files: BTreeMap<Path, String>,
}

impl Tree {
    /// Reads (path below src/, text) pairs.
    fn new(sources: &[(String, String)]) -> Tree {
        let mut tree = Tree { modules: BTreeMap::new(), files: BTreeMap::new() };
        for (file, text) in sources {
            let module = module_of(file);
            for (path, found) in paths::read(&module, text) {
                tree.files.insert(path.clone(), file.clone());
                tree.modules.insert(path, found);
            }
        }
        let is_test = |path: &Path| {
            (1..=path.len()).any(|depth| {
                let (parent, name) = (&path[..depth - 1], &path[depth - 1]);
                name == "tests"
                    || tree.modules.get(parent).is_some_and(|found| found.test_children.contains(name))
            })
        };
        let tests: Vec<_> = tree.modules.keys().filter(|path| is_test(path)).cloned().collect();
        for path in tests {
            tree.modules.remove(&path);
        }
        tree
    }

    /// The module that a path leads to, re-exports followed, and the name that it names there.
    fn resolve(&self, path: &Path) -> (Path, Option<String>) {
        let mut path = path.clone();
        // No name is re-exported this often: a longer chain goes round a circle of its own.
        for _ in 0..16 {
            let is_module = |depth: &usize| self.modules.contains_key(&path[..*depth]);
            let depth = (0..=path.len()).rev().find(is_module).unwrap_or(0);
            let module = path[..depth].to_vec();
            let Some(name) = path.get(depth) else { return (module, None) };
            let followed =
                self.modules.get(&module).and_then(|found| found.imports.get(name)).map(|target| {
                    let mut followed = target.clone();
                    followed.extend_from_slice(&path[depth + 1..]);
                    followed
                });
            match followed.filter(|followed| *followed != path) {
                Some(followed) => path = followed,
                None => return (module, Some(name.clone())),
            }
        }
        (Path::new(), None)
    }

    /// The graph of each folder whose modules use one another.
    fn graphs(&self) -> BTreeMap<Path, Graph> {
        let mut graphs: BTreeMap<Path, Graph> = BTreeMap::new();
        for (module, found) in &self.modules {
            for path in &found.paths {
                let (target, name) = self.resolve(path);
                let shared = module.iter().zip(&target).take_while(|(a, b)| a == b).count();
                // One of the two modules contains the other.
                if shared == module.len() || shared == target.len() {
                    continue;
                }
                let graph = graphs.entry(module[..shared].to_vec()).or_default();
                let names = graph.entry(module[shared].clone()).or_default().entry(target[shared].clone());
                let files = (self.file(module).to_owned(), self.file(&target).to_owned());
                names.or_default().entry(files).or_default().extend(name);
            }
        }
        graphs
    }

    fn file(&self, module: &Path) -> &str {
        self.files.get(module).map_or("?", String::as_str)
    }
}

/// The module that a file below src/ is.
fn module_of(file: &str) -> Path {
    let name = file.strip_suffix(".rs").unwrap_or(file);
    let name = name.strip_suffix("/mod").unwrap_or(name);
    // The root of the library; the binary's root is no module of it.
    if name == "lib" { Path::new() } else { name.split('/').map(str::to_owned).collect() }
}

/// The modules that `start` uses, directly or through others.
fn reached<'a>(graph: &'a Graph, start: &str) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        for next in graph.get(module).into_iter().flat_map(BTreeMap::keys) {
            if reached.insert(next.as_str()) {
                open.push(next);
            }
        }
    }
    reached
}

/// The circles of a graph, each as a line that names its modules and a line for each tie between
/// two files.
fn circles(graph: &Graph) -> Vec<String> {
    let circle_of = |module: &String| -> BTreeSet<&str> {
        let others = reached(graph, module).into_iter();
        others.filter(|other| reached(graph, other).contains(module.as_str())).collect()
    };
    let all: BTreeSet<_> = graph.keys().map(circle_of).filter(|circle| !circle.is_empty()).collect();
    let describe = |circle: BTreeSet<&str>| {
        let names: Vec<_> = circle.iter().copied().collect();
        let mut text = format!("circle of {}", names.join(", "));
        for (_, used) in graph.iter().filter(|(from, _)| circle.contains(from.as_str())) {
            let used = used.iter().filter(|(to, _)| circle.contains(to.as_str()));
            for ((from, to), names) in used.flat_map(|(_, ties)| ties) {
                let names: Vec<_> = names.iter().map(String::as_str).collect();
                text.push_str(&format!("\n    {from} -> {to}: {}", names.join(", ")));
            }
        }
        text
    };
    all.into_iter().map(describe).collect()
}

/// The circles of each folder below src/ that has any.
fn found_in(sources: &[(String, String)]) -> BTreeMap<String, Vec<String>> {
    let graphs = Tree::new(sources).graphs();
    let found = graphs.into_iter().map(|(folder, graph)| (folder.join("/"), circles(&graph)));
    found.filter(|(_, circles)| !circles.is_empty()).collect()
}

#[test]
fn no_two_modules_of_one_folder_use_each_other() {
    let sources = super::files().into_iter().map(|(name, _, text)| (name, text));
    // Paths start at the root of their crate, and src/gpu is the root of one.
    let (gpu, others): (Vec<_>, Vec<_>) = sources.partition(|(name, _)| name.starts_with("gpu/"));
    let in_gpu = |(name, text): (String, String)| (name["gpu/".len()..].to_owned(), text);
    let gpu: Vec<_> = gpu.into_iter().map(in_gpu).collect();
    let mut found = found_in(&others);
    found.extend(found_in(&gpu).into_iter().map(|(folder, circles)| (format!("gpu/{folder}"), circles)));
    let mut wrong = Vec::new();
    for (folder, circles) in &found {
        if !EXCEPTIONS.iter().any(|(excepted, _)| excepted == folder) {
            wrong.extend(circles.iter().map(|circle| format!("src/{folder}: {circle}")));
        }
    }
    for (folder, reason) in EXCEPTIONS {
        assert!(!reason.is_empty(), "the exception for src/{folder} has no reason");
        if !found.contains_key(*folder) {
            wrong.push(format!("src/{folder} has no circle any more: remove its exception"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(sources: &[(&str, &str)]) -> BTreeMap<String, Vec<String>> {
        let own = |(file, text): &(&str, &str)| (file.to_string(), text.to_string());
        found_in(&sources.iter().map(own).collect::<Vec<_>>())
    }

    #[test]
    fn modules_that_use_each_other_are_found_with_what_ties_them() {
        let circles = found(&[
            ("lib.rs", "mod x;"),
            ("x/mod.rs", "mod a; mod b; mod c; pub struct Shared;"),
            ("x/a.rs", "use super::{b::B, Shared}; pub struct A;"),
            ("x/b.rs", "pub struct B; fn f() { super::a::A; }"),
            ("x/c.rs", "use super::a::A;"),
        ]);
        let expected = "circle of a, b\n    x/a.rs -> x/b.rs: B\n    x/b.rs -> x/a.rs: A";
        assert_eq!(circles, BTreeMap::from([("x".to_owned(), vec![expected.to_owned()])]));
    }

    #[test]
    fn a_longer_circle_is_one_circle() {
        let circles = found(&[
            ("x/mod.rs", ""),
            ("x/a.rs", "use super::b::B;"),
            ("x/b.rs", "use crate::x::c::C;"),
            ("x/c.rs", "use crate::x::a::A;"),
        ]);
        assert_eq!(circles["x"].len(), 1);
        assert!(circles["x"][0].starts_with("circle of a, b, c\n"));
    }

    #[test]
    fn a_name_that_the_face_hands_on_ties_to_where_it_is_defined() {
        let circles = found(&[
            ("x/mod.rs", "mod a; mod b; pub use b::B as Other;"),
            ("x/a.rs", "use super::Other; pub struct A;"),
            ("x/b.rs", "use crate::x::a::A; pub struct B;"),
        ]);
        assert!(circles["x"][0].contains("x/a.rs -> x/b.rs: B"), "{circles:?}");
    }

    #[test]
    fn a_folder_is_one_room_and_its_face_none() {
        let circles = found(&[
            ("x/mod.rs", "mod a; mod b; use a::A; pub struct Shared;"),
            ("x/a.rs", "mod deep; use deep::D; use super::Shared; pub struct A;"),
            ("x/a/deep.rs", "use super::A; use super::super::b::B; pub struct D;"),
            ("x/b.rs", "use super::a::A;"),
        ]);
        assert_eq!(circles.keys().collect::<Vec<_>>(), ["x"]);
        let expected = "circle of a, b\n    x/a/deep.rs -> x/b.rs: B\n    x/b.rs -> x/a.rs: A";
        assert_eq!(circles["x"], [expected]);
    }

    #[test]
    fn what_tests_use_ties_nothing() {
        let circles = found(&[
            ("x/mod.rs", "mod a; mod b; #[cfg(test)] mod suite; #[cfg(test)] pub use suite::S;"),
            ("x/a.rs", "pub struct A; #[cfg(test)] mod tests { use super::super::b::B; }"),
            ("x/b.rs", "use super::a::A; pub struct B;"),
            ("x/suite.rs", "use super::{a::A, b::B}; pub struct S;"),
            ("x/tests.rs", "use super::suite::S;"),
        ]);
        assert!(circles.is_empty(), "{circles:?}");
    }
}
