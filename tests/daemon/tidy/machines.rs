//! A machine of the array keeps its fields to itself: others ask it, and call its functions.

/// Machines with fields that other folders reach; each is still to be closed. An entry that is not needed
/// fails the test.
const OPEN: &[&str] = &["Damage", "Passes"];

/// What the machines stand on: its fields are for all of them.
const BENEATH: &str = "Core";

/// The body of a struct with named fields in a source that rustfmt has laid out.
fn body<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    let opens = format!("struct {name} {{\n");
    let (_, rest) = source.split_once(&opens)?;
    rest.split_once("\n}").map(|(body, _)| body)
}

/// The types of the fields of a struct, without what boxes them.
fn types_of_fields(body: &str) -> Vec<&str> {
    let fields = body.lines().map(str::trim_start).filter(|line| !line.starts_with("//"));
    let types = fields.filter_map(|line| line.split_once(": ")).map(|(_, kind)| kind.trim_end_matches(','));
    types
        .map(|kind| kind.strip_prefix("Box<").and_then(|kind| kind.strip_suffix('>')).unwrap_or(kind))
        .collect()
}

/// Whether a field is seen beyond the folder of its file.
fn is_open(line: &str) -> bool {
    let line = line.trim_start();
    line.starts_with("pub") && !line.starts_with("pub(super) ")
}

#[test]
fn the_machines_of_the_array_keep_their_fields_to_their_folders() {
    let files: Vec<_> = super::files().into_iter().filter(|(file, ..)| file.starts_with("array/")).collect();
    let (_, face, _) = files.iter().find(|(file, ..)| file == "array/mod.rs").expect("the face of the array");
    let machines = types_of_fields(body(face, "Array").expect("the array"));
    let (mut wrong, mut seen) = (Vec::new(), 0);
    for (file, code, _) in files.iter().filter(|(file, ..)| file.matches('/').count() > 1) {
        for machine in machines.iter().filter(|machine| **machine != BENEATH) {
            let Some(body) = body(code, machine) else { continue };
            seen += 1;
            if body.lines().any(is_open) {
                wrong.push((*machine, format!("src/{file}: {machine} has fields that other folders reach")));
            }
        }
    }
    assert!(seen > 5, "the machines were not found");
    let unneeded = OPEN.iter().filter(|machine| !wrong.iter().any(|(found, _)| found == *machine));
    let unneeded: Vec<_> =
        unneeded.map(|machine| format!("{machine} needs no exception any more: remove it")).collect();
    wrong.retain(|(machine, _)| !OPEN.contains(machine));
    let wrong: Vec<_> = wrong.into_iter().map(|(_, text)| text).chain(unneeded).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
