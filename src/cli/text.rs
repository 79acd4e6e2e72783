//! Text for people: how status, progress and events look. Pure: facts in, text out.
//!
//! Invariant: what comes from a daemon, names and paths above all, is made printable before it is
//! laid out.

use crate::control::{
    ArrayReport, CertificateReport, Condition, EngineReport, Event, Importable, LastScrub, MemberReport,
    PageCacheReport, ScanReport, StartReport, is_healthy,
};
use calpe_core::units::{Count, HumanSize, Printable, PrintableLines, UnixTime, quoted};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

/// Width that sentences are folded to.
const FOLD_COLUMNS: usize = 100;
/// Width of the labels before the colon.
const LABEL_COLUMNS: usize = 8;
/// Fields of reports that may have several lines. A line break in any other field would forge a
/// line, so it is escaped.
const FIELDS_OF_LINES: [&str; 3] = ["status", "action", "problem"];

/// A copy of a report with every text in it made printable.
fn printable<T: Serialize + DeserializeOwned>(report: &T) -> T {
    fn clean(value: &mut Value, may_have_lines: bool) {
        match value {
            Value::String(text) if may_have_lines => *text = PrintableLines(text).to_string(),
            Value::String(text) => *text = Printable(text).to_string(),
            Value::Array(items) => items.iter_mut().for_each(|item| clean(item, false)),
            Value::Object(fields) => {
                for (name, field) in fields {
                    clean(field, FIELDS_OF_LINES.contains(&name.as_str()));
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
    let mut value = serde_json::to_value(report).expect("it came as JSON");
    clean(&mut value, false);
    serde_json::from_value(value).expect("its form is the same")
}

/// The status of all arrays, or of the one that was asked for. `unhealthy`: only those that are not
/// healthy.
#[must_use]
pub(super) fn status(arrays: &[ArrayReport], asked: Option<&str>, unhealthy: bool, verbose: bool) -> String {
    let shown: Vec<_> = arrays.iter().filter(|array| !unhealthy || !is_healthy(array)).collect();
    if arrays.is_empty() {
        return "no arrays are imported: 'calpe import' lists what could be\n".into();
    }
    if shown.is_empty() {
        return match (asked, arrays) {
            (Some(_), [array]) => format!("array '{}' is healthy\n", Printable(&array.name)),
            _ => "all arrays are healthy\n".into(),
        };
    }
    let text = |array: &ArrayReport| one_array(&printable(array), verbose);
    shown.into_iter().map(text).collect::<Vec<_>>().join("\n")
}

/// Problems of the daemon itself; empty when there are none.
#[must_use]
pub(super) fn problems(problems: &[String]) -> String {
    if problems.is_empty() {
        return String::new();
    }
    let mut text = String::from("\n");
    let lines: Vec<_> = problems.iter().map(|line| Printable(line).to_string()).collect();
    labelled(&mut text, "daemon", &lines.join("\n"));
    text
}

/// What to do about certificates; empty when there is nothing to do.
#[must_use]
pub(super) fn certificates(certificates: &[CertificateReport], now_unix: u64) -> String {
    let advice = certificates.iter().filter_map(|certificate| certificate.advice(certificates, now_unix));
    let advice: Vec<_> = advice.collect();
    if advice.is_empty() {
        return String::new();
    }
    let mut text = String::from("\n");
    labelled(&mut text, "tls", &advice.join("\n"));
    text
}

fn one_array(array: &ArrayReport, verbose: bool) -> String {
    let mut text = String::new();
    labelled(&mut text, "array", &array.name);
    if verbose {
        let uuid = if array.uuid.is_nil() { "not known".into() } else { array.uuid.to_string() };
        labelled(&mut text, "uuid", &uuid);
    }
    labelled(&mut text, "state", array.state.as_str());
    labelled(&mut text, "status", &array.status);
    labelled(&mut text, "action", &array.action);
    if let Some(start) = &array.start {
        not_served(&mut text, array, start, verbose);
        return text;
    }
    let mut scans: Vec<_> = array.scan.iter().map(scan_line).collect();
    scans.extend(array.last_scrub.map(|scrub| last_scrub_line(&scrub, array)));
    if scans.is_empty() {
        scans.push("never scrubbed".into());
    }
    labelled(&mut text, "scan", &scans.join("\n"));
    text.push_str("members:\n\n");
    text.push_str(&member_table(array, verbose));
    text.push('\n');
    labelled(&mut text, "volume", &volume_line(array));
    if verbose {
        let chunk = HumanSize(u64::from(array.chunk));
        let dirty = if array.dirty { "writes under way" } else { "clean" };
        let shape = format!("{} data + {} parity, chunk {chunk}", array.data, array.parity);
        labelled(&mut text, "shape", &format!("{shape}, epoch {}, {dirty}", array.epoch));
        let log = array.log.state.word();
        labelled(
            &mut text,
            "log",
            &array.log.reason.as_ref().map_or(log.into(), |why| format!("{log}: {why}")),
        );
        if let Some(cache) = &array.page_cache {
            labelled(&mut text, "cache", &cache_line(cache));
        }
    }
    labelled(&mut text, "engine", &engine_lines(&array.engine, verbose));
    let access = if array.read_only { "\nread-only: clients cannot write" } else { "" };
    labelled(&mut text, "uri", &format!("{}{access}", array.uris.join("\n")));
    if verbose {
        let clients = match array.clients {
            0 => "none is connected".to_owned(),
            1 => "1 connection".to_owned(),
            many => format!("{many} connections"),
        };
        labelled(&mut text, "clients", &clients);
    }
    let errors = match array.errors.client {
        0 => "none seen by clients".to_owned(),
        1 => "1 client request failed".to_owned(),
        count => format!("{count} client requests failed"),
    };
    labelled(&mut text, "errors", &errors);
    let lists = [
        ("blocks beyond repair:", &array.lost),
        ("blocks set aside, until their members can read them again or they are written:", &array.set_aside),
        ("blocks unreadable for now:", &array.unreadable),
        (
            "blocks that could not be read when the daemon ended, and that are being looked at:",
            &array.unconfirmed,
        ),
    ];
    for (title, parts) in lists.into_iter().filter(|(_, parts)| verbose && !parts.is_empty()) {
        let _ = writeln!(text, "{title}\n");
        let _ = writeln!(text, "        {:>16}  {:>12}", "OFFSET", "BYTES");
        for part in parts {
            let _ = writeln!(text, "        {:>16}  {:>12}", part.offset, part.bytes);
        }
    }
    text
}

/// What is known of an array that should be served and is not.
fn not_served(text: &mut String, array: &ArrayReport, start: &StartReport, verbose: bool) {
    labelled(text, "looked", &format!("in {}", start.searched.join(", ")));
    labelled(text, "found", &start.notes.join("\n"));
    if !array.members.is_empty() {
        text.push_str("members:\n\n");
        text.push_str(&member_table(array, verbose));
        text.push('\n');
        // Only the place of a member that was not found is known.
        if !array.volume.kind.is_empty() {
            labelled(text, "volume", &volume_line(array));
        }
    }
}

/// The CPU's engine, then a line for each GPU.
fn engine_lines(engine: &EngineReport, verbose: bool) -> String {
    let gpu = &engine.gpu;
    let mut text = engine.codec.clone();
    if let Some(reason) = gpu.reason.as_ref().filter(|_| verbose) {
        let _ = write!(text, "\nno GPU: {reason}");
    }
    for device in &gpu.devices {
        let _ = write!(text, "\nGPU {} {}: ", device.index, device.name);
        let _ = match &device.failed {
            None => write!(text, "{} jobs, {}", device.jobs, HumanSize(device.bytes)),
            Some(reason) => write!(text, "not in use ({reason})"),
        };
        let trouble = device.errors + device.hangs;
        if trouble > 0 {
            let _ = write!(text, ", failed {}", Count(trouble, "time"));
        }
        if verbose && device.batches > 0 {
            let _ = write!(
                text,
                ", {} launches, {} us each (99 of 100 within {} us)",
                device.batches, device.batch_us_p50, device.batch_us_p99
            );
        }
        for crossover in device.crossovers.iter().filter(|_| verbose) {
            let _ = write!(text, "\n    {} with {} threads: ", crossover.work, crossover.threads);
            let _ = match crossover.bytes {
                Some(bytes) => write!(text, "GPU from {} on", HumanSize(bytes)),
                None => write!(text, "CPU at any size"),
            };
        }
    }
    if verbose && !gpu.devices.is_empty() {
        let d = &gpu.decisions;
        let _ = write!(
            text,
            "\njobs to GPUs {}; to the CPU: too small {}, GPUs busy {}, checksum {}, form {}, no GPU in use {}",
            d.taken, d.small, d.spill, d.hasher, d.shape, d.unavailable
        );
        if gpu.rerun_jobs > 0 {
            let _ = write!(
                text,
                "\njobs of failed GPUs done by the CPU {}, after {:.3} s at most",
                gpu.rerun_jobs,
                gpu.rerun_us_max as f64 / 1e6
            );
        }
    }
    text
}

/// The cache for checksums in one line.
fn cache_line(cache: &PageCacheReport) -> String {
    let whole = match cache.whole.saturating_sub(cache.bytes) {
        0 => "all checksums fit".to_owned(),
        _ => format!("{} would hold all checksums", HumanSize(cache.whole)),
    };
    let hits = match cache.hit_percent {
        Some(percent) => {
            format!("{percent:.1} % of {} found in it", Count(cache.hits + cache.misses, "page"))
        }
        None => "no page was needed yet".to_owned(),
    };
    format!("{} of {}, {hits}; {whole}", HumanSize(cache.used), HumanSize(cache.bytes))
}

fn volume_line(array: &ArrayReport) -> String {
    let volume = &array.volume;
    let mut line = format!("{}, {}, checksum {}", volume.kind, HumanSize(volume.bytes), array.checksum);
    if let (Some(logical), Some(stored)) = (volume.logical, volume.stored) {
        let _ = write!(line, ", {} logical, {} stored", HumanSize(logical), HumanSize(stored));
        if stored > 0 {
            let _ = write!(line, ", ratio {:.2}", logical as f64 / stored as f64);
        }
    }
    line
}

fn member_table(array: &ArrayReport, verbose: bool) -> String {
    let sum = |count: fn(&MemberReport) -> u64| {
        array.members.iter().fold(0u64, |total, member| total.saturating_add(count(member)))
    };
    let mut rows = vec![[
        array.name.clone(),
        array.state.as_str().to_owned(),
        sum(|m| m.read).to_string(),
        sum(|m| m.write).to_string(),
        sum(|m| m.cksum).to_string(),
        sum(|m| m.repaired).to_string(),
        String::new(),
    ]];
    for member in &array.members {
        rows.push([
            format!("  {} {}", member.index, member.name),
            member.state.as_str().to_owned(),
            member.read.to_string(),
            member.write.to_string(),
            member.cksum.to_string(),
            member.repaired.to_string(),
            remarks(member),
        ]);
        if verbose {
            rows.push(name_only(format!("      {}", member.uuid)));
        }
        if let Some(replacement) = &member.replacement {
            rows.push(name_only(format!("      being replaced by {}", replacement.name)));
        }
    }
    let header = ["NAME", "STATE", "READ", "WRITE", "CKSUM", "REPAIRED", ""].map(str::to_owned);
    let counted = rows.iter().chain([&header]).filter(|row| !row[1].is_empty());
    let width = |column: usize| counted.clone().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<_> = (0..6).map(width).collect();
    let mut table = String::new();
    for row in [&header].into_iter().chain(&rows) {
        let line = format!(
            "        {:<name$}  {:<state$}  {:>read$}  {:>write$}  {:>cksum$}  {:>repaired$}  {}",
            row[0],
            row[1],
            row[2],
            row[3],
            row[4],
            row[5],
            row[6],
            name = widths[0],
            state = widths[1],
            read = widths[2],
            write = widths[3],
            cksum = widths[4],
            repaired = widths[5],
        );
        table.push_str(line.trim_end());
        table.push('\n');
    }
    table
}

/// Why a member is not online, and other remarks.
fn remarks(member: &MemberReport) -> String {
    // The count of repaired blocks already says it.
    let conditions = member.conditions.iter().filter(|condition| **condition != Condition::Repaired);
    // A remark that the reason contains is left out.
    let reason = member.reason.as_deref().unwrap_or_default();
    let says = |condition: &Condition| {
        let is_gone = *condition == Condition::Overwritten && reason.contains("holds no Calpe superblock");
        is_gone || reason.contains(condition.word())
    };
    let conditions = conditions.filter(|condition| !says(condition));
    let conditions = conditions.map(|condition| condition.word().to_owned());
    member.reason.iter().cloned().chain(conditions).collect::<Vec<_>>().join("; ")
}

fn name_only(name: String) -> [String; 7] {
    let mut row = <[String; 7]>::default();
    row[0] = name;
    row
}

/// A pass in one line: "rebuild 41.3 %, 1.2 GiB of 3 GiB, 210 MiB/s, 0:08:35 left".
#[must_use]
pub(super) fn scan_line(scan: &ScanReport) -> String {
    scan_line_in(scan, scan.kind.word(), "repaired")
}

/// The same line with other words: `pass` for the pass, `repaired` for what becomes of errors.
#[must_use]
pub(super) fn scan_line_in(scan: &ScanReport, pass: &str, repaired: &str) -> String {
    let mut line = format!(
        "{pass} {:.1} %, {} of {}",
        // A listed pass is not over: it is never shown as complete.
        scan.percent.min(ScanReport::RUNNING_PERCENT_MAX),
        HumanSize(scan.done),
        HumanSize(scan.total)
    );
    if let Some(words) = scan.state.words() {
        let _ = write!(line, ", {words}");
    } else {
        if let Some(rate) = scan.rate_bytes_per_s {
            let _ = write!(line, ", {}/s", HumanSize(rate));
        }
        if let Some(eta) = scan.eta_s {
            let _ = write!(line, ", {} left", duration(eta));
        }
    }
    if let Some(retried) = retried(scan) {
        let _ = write!(line, ", {retried}");
    }
    if scan.errors > 0 || scan.repaired > 0 {
        let _ = write!(line, ", {}, {} {repaired}", Count(scan.errors, "error"), scan.repaired);
    }
    line
}

/// Places that a rebuild could not build at first, or a scrub could not read, and that are tried
/// again.
pub(super) fn retried(scan: &ScanReport) -> Option<String> {
    let slots = match scan.retried {
        0 => None,
        1 => Some("1 slot is tried again, as blocks of it cannot be read".into()),
        many => Some(format!("{many} slots are tried again, as blocks of them cannot be read")),
    };
    let pages = match scan.retried_pages {
        0 => None,
        1 => Some("1 metadata page is tried again, as it cannot be read".into()),
        many => Some(format!("{many} metadata pages are tried again, as they cannot be read")),
    };
    let both: Vec<String> = [slots, pages].into_iter().flatten().collect();
    (!both.is_empty()).then(|| both.join(", "))
}

/// The last scrub in one line.
#[must_use]
pub(super) fn last_scrub_line(scrub: &LastScrub, array: &ArrayReport) -> String {
    let unchecked = &array.last_scrub_unchecked[..];
    let when = timestamp(scrub.finished_unix);
    let counts = format!("{}, {} repaired", Count(scrub.errors, "error"), Count(scrub.repaired, "block"));
    let found = match (scrub.errors, scrub.repaired) {
        _ if !array.last_scrub_compared() => {
            format!("last scrub ended {when} and verified nothing, as there are no checksums")
        }
        (0, 0) => format!("last scrub ended {when} and found no errors"),
        _ => format!("last scrub ended {when} with {counts}"),
    };
    let members: Vec<String> = unchecked.iter().map(u16::to_string).collect();
    let line = match unchecked {
        [] => found,
        _ => format!(
            "{found}, without all of member{} {} (out of service, or not read for a lack of resources)",
            if members.len() == 1 { "" } else { "s" },
            members.join(", ")
        ),
    };
    match scrub.errors {
        1.. if !array.last_scrub_compared() => {
            format!("{line}; what stands, also of an earlier one: {counts}")
        }
        _ => line,
    }
}

/// An event in one line.
#[must_use]
pub(super) fn event_line(event: &Event) -> String {
    // An event is one line, however many lines its message has.
    let text = event.text.lines().map(str::trim).collect::<Vec<_>>().join("; ");
    let event = printable(&Event { text, ..event.clone() });
    let subject = match (&event.array, event.member) {
        (Some(array), Some(member)) => format!("{array}/{member}: "),
        (Some(array), None) => format!("{array}: "),
        (None, _) => String::new(),
    };
    let times = match event.count {
        0 | 1 => String::new(),
        count if event.is_of_many() => {
            format!(" (and {} more like it since {})", count - 1, timestamp(event.first_unix))
        }
        count => format!(" ({count} times since {})", timestamp(event.first_unix)),
    };
    format!("{} {:<7} {subject}{}{times}", timestamp(event.unix), event.severity.word(), event.text)
}

/// Arrays that could be imported.
#[must_use]
pub(super) fn importable(arrays: &[Importable]) -> String {
    if arrays.is_empty() {
        return "no arrays found that are not imported: name more places with --dir\n".into();
    }
    let one = |array: &Importable| {
        let mut text = String::new();
        labelled(&mut text, "array", &array.name);
        labelled(&mut text, "uuid", &array.uuid.to_string());
        let size = HumanSize(array.volume_bytes);
        labelled(
            &mut text,
            "shape",
            &format!("{} data + {} parity, volume of {size}", array.data, array.parity),
        );
        let has_twin = arrays.iter().any(|other| other.name == array.name && other.uuid != array.uuid);
        let which = if has_twin { array.uuid.to_string() } else { array.name.clone() };
        let action = format!("import it with 'calpe import {which}{}'", dirs_of(array));
        let can_be = match usize::from(array.usable) {
            some if some > 0 && some < array.members.len() => {
                format!("can be imported, with {some} of {} members", array.members.len())
            }
            _ => "can be imported".to_owned(),
        };
        labelled(&mut text, "status", array.problem.as_deref().unwrap_or(&can_be));
        if array.problem.is_none() {
            labelled(&mut text, "action", &action);
        }
        text.push_str("members:\n\n");
        for member in &array.members {
            let path =
                member.path.as_ref().map_or_else(|| "not found".to_owned(), |p| p.display().to_string());
            let note = member.note.as_ref().map(|note| format!("  ({note})")).unwrap_or_default();
            let _ = writeln!(text, "        {:>3}  {path}{note}", member.index);
        }
        text
    };
    arrays.iter().map(|array| one(&printable(array))).collect::<Vec<_>>().join("\n")
}

/// Where the members of an array are, as options of `calpe import`.
fn dirs_of(array: &Importable) -> String {
    let paths = array.members.iter().filter_map(|member| member.path.as_deref());
    let remote = |path: &Path| path.to_str().is_some_and(|path| path.contains("://"));
    let places = paths.filter_map(|path| if remote(path) { Some(path) } else { path.parent() });
    let places: BTreeSet<&Path> = places.filter(|place| !place.as_os_str().is_empty()).collect();
    places.iter().map(|place| format!(" --dir {}", quoted(place))).collect()
}

/// `label: text`. Further lines, and text that does not fit the width, are indented below. Nothing
/// for an empty text.
fn labelled(out: &mut String, label: &str, text: &str) {
    let mut label = format!("{label:>width$}:", width = LABEL_COLUMNS - 1);
    for line in text.lines().flat_map(fold) {
        let _ = writeln!(out, "{label} {line}");
        label = " ".repeat(LABEL_COLUMNS);
    }
}

/// Breaks a sentence at spaces. A word that is too long (a URI) stays whole, and so does a path in
/// quotes.
fn fold(line: &str) -> Vec<String> {
    let room = FOLD_COLUMNS - LABEL_COLUMNS - 1;
    let mut lines = vec![String::new()];
    for word in words(line) {
        let last = lines.last_mut().expect("never empty");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= room {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// Splits a sentence at its spaces, except inside quotes.
fn words(line: &str) -> Vec<&str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    let at_space = move |c| {
        let is_space = c == ' ' && !is_quoted && !is_escaped;
        is_quoted ^= c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_space
    };
    // Without a partner for each quote, no quote counts.
    match line.matches('"').count().is_multiple_of(2) {
        true => line.split(at_space).collect(),
        false => line.split(' ').collect(),
    }
}

/// `1:02:03`, with days before it when there are any.
#[must_use]
pub(super) fn duration(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    let clock = format!("{}:{:02}:{:02}", rest / 3600, rest / 60 % 60, rest % 60);
    if days == 0 { clock } else { format!("{days} days {clock}") }
}

/// `2025-11-21 12:25:00 UTC` for seconds since 1970.
#[must_use]
pub(super) fn timestamp(unix: u64) -> String {
    UnixTime(unix).to_string()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::control::{
        ArrayState, ErrorReport, GpuReport, ImportableMember, LogReport, LogState, LostReport, MemberState,
        ReplacementReport, ScanKind, ScanState, Severity, VolumeReport, running,
    };
    use uuid::Uuid;

    pub(in crate::cli) fn array(name: &str) -> ArrayReport {
        ArrayReport {
            name: name.into(),
            uuid: Uuid::from_u128(1),
            state: ArrayState::Online,
            status: String::new(),
            action: String::new(),
            volume: VolumeReport { kind: "plain".into(), bytes: 1 << 30, logical: None, stored: None },
            data: 2,
            parity: 1,
            chunk: 65536,
            checksum: "blake3".into(),
            log: LogReport { state: LogState::Serving, reason: None, yields_to_force: false },
            epoch: 3,
            dirty: false,
            uris: vec![format!("nbd+unix:///{name}?socket=/run/calpe/nbd.sock")],
            read_only: false,
            clients: 0,
            members: (0..3)
                .map(|index| MemberReport {
                    index,
                    name: format!("/srv/m{index}"),
                    uuid: Uuid::from_u128(10 + u128::from(index)),
                    state: MemberState::Online,
                    read: 0,
                    write: 0,
                    cksum: 0,
                    repaired: 0,
                    reason: None,
                    conditions: Vec::new(),
                    cached: false,
                    replacement: None,
                    tried_in_s: None,
                })
                .collect(),
            scan: vec![],
            last_scrub: None,
            last_scrub_unchecked: Vec::new(),
            engine: EngineReport { codec: "gfni".into(), gpu: GpuReport::default() },
            page_cache: None,
            errors: ErrorReport::default(),
            lost: Vec::new(),
            set_aside: Vec::new(),
            set_aside_members: Vec::new(),
            failed_lanes: Vec::new(),
            unreadable: Vec::new(),
            unreadable_pages: 0,
            unconfirmed: Vec::new(),
            start: None,
        }
    }

    pub(in crate::cli) fn scan(kind: ScanKind, done: u64, total: u64) -> ScanReport {
        ScanReport { rate_bytes_per_s: Some(100 << 20), eta_s: Some(3725), ..running(kind, done, total) }
    }

    #[test]
    fn a_healthy_array_looks_like_this() {
        let expected = "  array: tank
  state: ONLINE
   scan: never scrubbed
members:

        NAME         STATE   READ  WRITE  CKSUM  REPAIRED
        tank         ONLINE     0      0      0         0
          0 /srv/m0  ONLINE     0      0      0         0
          1 /srv/m1  ONLINE     0      0      0         0
          2 /srv/m2  ONLINE     0      0      0         0

 volume: plain, 1 GiB, checksum blake3
 engine: gfni
    uri: nbd+unix:///tank?socket=/run/calpe/nbd.sock
 errors: none seen by clients
";
        assert_eq!(status(&[array("tank")], None, false, false), expected);
    }

    #[test]
    fn a_degraded_array_tells_all() {
        let mut array = array("tank");
        array.state = ArrayState::Degraded;
        array.status = "One member is gone. ".to_owned() + &"word ".repeat(40);
        array.action = "Replace it.".into();
        array.members[1].state = MemberState::Faulted;
        array.members[1].reason = Some("write: input/output error".into());
        array.members[1].write = 12345;
        array.members[1].replacement = Some(ReplacementReport { name: "/srv/new".into(), uuid: None });
        array.scan.push(scan(ScanKind::Rebuild, 1 << 29, 1 << 30));
        array.lost.push(LostReport { offset: 4096, bytes: 8192 });
        array.last_scrub = Some(LastScrub { finished_unix: 1_763_727_900, errors: 0, repaired: 0 });
        array.page_cache = Some(PageCacheReport::new([64 << 20, 1 << 20, 128 << 20], 2001, 999));
        let text = status(&[array], None, true, true);
        for part in [
            "  cache: 1 MiB of 64 MiB, 66.7 % of 3000 pages found in it; 128 MiB would hold all checksums\n",
            "  state: DEGRADED\n",
            "   scan: rebuild 50.0 %, 512 MiB of 1 GiB, 100 MiB/s, 1:02:05 left\n         last scrub ended 2025-11-21 12:25:00 UTC and found no errors\n",
            "  1 /srv/m1  FAULTED      0  12345      0         0  write: input/output error\n",
            "              being replaced by /srv/new\n",
            "00000000-0000-0000-0000-00000000000b\n",
            "  shape: 2 data + 1 parity, chunk 64 KiB, epoch 3, clean\n",
            "    log: serving\n",
            "blocks beyond repair:\n\n                  OFFSET         BYTES\n                    4096          8192\n",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= FOLD_COLUMNS), "{text}");
    }

    #[test]
    fn a_cache_without_requests_has_no_rate_and_one_that_holds_everything_says_so() {
        let line = cache_line(&PageCacheReport::new([64 << 20, 0, 1 << 20], 0, 0));
        assert_eq!(line, "0 B of 64 MiB, no page was needed yet; all checksums fit");
    }

    #[test]
    fn errors_of_an_earlier_scrub_are_not_those_of_one_that_compared_nothing() {
        let mut array = array("tank");
        let last = LastScrub { finished_unix: 0, errors: 2, repaired: 0 };
        assert!(last_scrub_line(&last, &array).ends_with("UTC with 2 errors, 0 blocks repaired"));
        array.checksum = "none".into();
        array.last_scrub_unchecked = vec![1];
        let line = last_scrub_line(&last, &array);
        assert!(
            line.contains("verified nothing, as there are no checksums, without all of member 1"),
            "{line}"
        );
        assert!(
            line.ends_with("; what stands, also of an earlier one: 2 errors, 0 blocks repaired"),
            "{line}"
        );
    }

    #[test]
    fn only_the_unhealthy_are_shown_when_asked_for() {
        let mut bad = array("bad");
        bad.state = ArrayState::Failed;
        let text = status(&[array("good"), bad], None, true, false);
        assert!(text.contains("bad") && !text.contains("good"));
        assert_eq!(status(&[array("good")], None, true, false), "all arrays are healthy\n");
        assert_eq!(status(&[array("good")], Some("good"), true, false), "array 'good' is healthy\n");
        let mut had_errors = array("good");
        had_errors.status = "Member 1 (/srv/m1) had errors; nothing is known to be unreadable now.".into();
        assert_eq!(status(&[had_errors], None, true, false), "all arrays are healthy\n", "as --test says");
        assert!(status(&[], None, true, false).contains("calpe import"));
    }

    #[test]
    fn nothing_is_said_of_a_volume_that_is_not_known() {
        let mut waiting = array("tank");
        waiting.state = ArrayState::Waiting;
        let (problem, advice) = (None, String::new());
        let (searched, notes) = (vec!["/srv".to_owned()], Vec::new());
        waiting.start = Some(StartReport { attempts: 0, problem, advice, searched, notes });
        assert!(status(&[waiting.clone()], None, false, false).contains("volume: plain, 1 GiB"));
        waiting.volume.kind = String::new();
        let text = status(&[waiting], None, false, false);
        assert!(text.contains("looked: in /srv") && !text.contains("volume"), "{text}");
    }

    #[test]
    fn progress_never_says_done_before_it_is() {
        let total = 1 << 40;
        assert!(scan_line(&scan(ScanKind::Scrub, total - 1, total)).starts_with("scrub 99.9 %"));
        let mut paused = scan(ScanKind::Scrub, 0, 10);
        (paused.paused, paused.state) = (true, ScanState::Paused);
        paused.errors = 2;
        assert_eq!(scan_line(&paused), "scrub 0.0 %, 0 B of 10 B, paused, 2 errors, 0 repaired");
        (paused.state, paused.errors) = (ScanState::WaitsForRebuild, 0);
        assert_eq!(scan_line(&paused), "scrub 0.0 %, 0 B of 10 B, waits for the rebuild");
    }

    #[test]
    fn a_path_in_quotes_is_never_broken() {
        let long = "x".repeat(FOLD_COLUMNS);
        let line = format!("import it with 'calpe import tank --dir \"/srv/my {long} members\" --dir /mnt'");
        let lines = fold(&line);
        assert!(lines.contains(&format!("\"/srv/my {long} members\"")), "{lines:?}");
        assert_eq!(fold(&format!("/a\\ {long}\\ b c"))[0], format!("/a\\ {long}\\ b"));
        let odd = format!("12\" disks {long} are slow");
        assert_eq!(fold(&odd), ["12\" disks", &long, "are slow"]);
    }

    #[test]
    fn times_are_read_by_people() {
        assert_eq!(timestamp(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(timestamp(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(timestamp(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(timestamp(1_709_251_199), "2024-02-29 23:59:59 UTC");
        assert_eq!(timestamp(4_107_542_400), "2100-03-01 00:00:00 UTC");
        assert_eq!(duration(59), "0:00:59");
        assert_eq!(duration(3 * 86400 + 3661), "3 days 1:01:01");
    }

    #[test]
    fn events_and_importable_arrays_are_lines() {
        let event = Event {
            first_unix: 0,
            count: 1,
            kind: String::new(),
            offset: None,
            uid: None,
            sequence: 1,
            unix: 0,
            severity: Severity::Warning,
            array: Some("tank".into()),
            array_uuid: None,
            member: Some(3),
            text: "taken out".into(),
        };
        assert_eq!(event_line(&event), "1970-01-01 00:00:00 UTC warning tank/3: taken out");
        let of_lines = Event { text: "refused: no room\n  left out: m1".into(), ..event };
        assert!(event_line(&of_lines).ends_with("refused: no room; left out: m1"));
        let many = Event { kind: "blocks_repaired".into(), count: 3, ..of_lines };
        assert!(event_line(&many).ends_with("(and 2 more like it since 1970-01-01 00:00:00 UTC)"));
        let found = |index, path: Option<&str>, note: Option<&str>| ImportableMember {
            index,
            uuid: Uuid::nil(),
            path: path.map(Into::into),
            note: note.map(Into::into),
        };
        let text = importable(&[Importable {
            name: "tank".into(),
            uuid: Uuid::nil(),
            data: 1,
            parity: 1,
            volume_bytes: 1 << 20,
            problem: None,
            usable: 1,
            members: vec![found(0, Some("/srv/m0"), Some("stale")), found(1, None, None)],
        }]);
        assert!(text.contains("  0  /srv/m0  (stale)\n") && text.contains("  1  not found\n"), "{text}");
        assert!(text.contains("calpe import tank") && text.contains("can be imported, with 1 of 2 members"));
        assert!(importable(&[]).contains("--dir"));
    }
}
