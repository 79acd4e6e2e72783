//! Administrators' requests about whole arrays: import, export, scrub, repair, and the list of what could be
//! imported.
//!
//! Invariants: an import that fails has changed nothing; one failure among several neither hides what worked
//! nor passes for success. Must not know how requests arrive, nor how arrays are assembled.

use super::config::{ArrayChoice, ArrayConfig};
use super::events::kinds;
use super::import::{self, ImportError, Opened};
use super::memory::{covers, directory_of};
use super::search::{Found, Search, search_patiently};
use super::service::{CLOSING_WAIT, Daemon, Done, Outcome, ServeOptions, Served, refusal};
use super::waiting::Waiting;
use crate::control::{
    ArrayReport, ErrorCode, Event, Importable, ImportableMember, LogState, Reply, RequestError, ScrubAction,
    Severity,
};
use crate::member::{await_closings, is_held_by_calpe, is_remote};
use calpe_core::array::assembly::AssemblyError;
use calpe_core::format::{MemberState, Superblock};
use calpe_core::units::{HumanSize, MemberIndex, quoted, shown};
use calpe_core::volume::{AdminRequest, NoticeKind, NoticeLevel, STOPPED_CLEANLY};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Lines about what could not be looked at that are told where members are missing.
const UNREAD_TOLD: usize = 8;

/// How long an import waits for its log to be replayed, so that its answer says what could not be. Replay takes milliseconds to
/// seconds, and longer where a member does not answer: that is not waited for.
const REPLAY_WAIT: Duration = Duration::from_secs(5);

/// Time between two looks whether it is.
const REPLAY_LOOK: Duration = Duration::from_millis(5);

/// What is to be imported, and how.
pub(super) struct ImportOrder {
    /// Name or uuid of the array; none with `all`.
    pub array: Option<String>,
    /// Every array found.
    pub all: bool,
    /// Where to look beside the configured places.
    pub dirs: Vec<PathBuf>,
    /// Start even where the present members cannot prove that they are the current ones.
    pub force: bool,
    /// Not again after a restart of the daemon.
    pub once: bool,
    /// Only tell.
    pub dry_run: bool,
}

impl Daemon {
    fn places(&self, dirs: &[PathBuf]) -> Vec<PathBuf> {
        let configured = self.search_places();
        match (dirs, &configured[..]) {
            ([], []) => vec![import::DEFAULT_SEARCH.into()],
            ([], configured) => configured.to_vec(),
            (asked, configured) => asked.iter().chain(configured).cloned().collect(),
        }
    }

    pub(super) fn importable(&self, dirs: &[PathBuf]) -> Reply {
        // Where `import` looks, too: devices that served an array are part of it wherever they are.
        let found = search_patiently(&self.places(dirs), &self.earlier_paths(None), &self.look_limits(None));
        if let Err(error) = found.check_whole() {
            return Reply::Error(error.into());
        }
        let served: Vec<Uuid> = self.served_uuids();
        let not_served = found.arrays.iter().filter(|(uuid, _)| !served.contains(uuid));
        let listed = |members: &[Found]| {
            let earlier = |array, device| self.earlier_path(array, device);
            let array = importable(members, &found, earlier)?;
            let problem = array
                .problem
                .or_else(|| in_use(members))
                .or_else(|| self.is_name_taken(&array.name, array.uuid, dirs))
                .or_else(|| self.is_unservable(members));
            Some(Importable { problem, ..array })
        };
        let mut arrays: Vec<Importable> = not_served.filter_map(|(_, members)| listed(members)).collect();
        arrays.sort_by(|a, b| (&a.name, a.uuid).cmp(&(&b.name, b.uuid)));
        let warnings = match arrays[..] {
            [] => found.not_used(dirs),
            _ => {
                let forbidden = found.forbidden_in(|_| true);
                found.warnings.into_iter().chain(forbidden).collect()
            }
        };
        Reply::Importable { arrays, warnings }
    }

    /// What keeps an array, found in these directories, from being imported while another of its name is served.
    fn is_name_taken(&self, name: &str, uuid: Uuid, dirs: &[PathBuf]) -> Option<String> {
        let other = self.find(name, |served| served.names.uuid).ok()?;
        Some(format!(
            "an array named '{name}' ({other}) is served: this one can be imported only when that is exported, with 'calpe export \
             {name}', then 'calpe import {uuid}{}'",
            options_of(dirs)
        ))
    }

    /// Why the array of these members cannot be served by this daemon, by the check that an import
    /// makes.
    fn is_unservable(&self, members: &[Found]) -> Option<String> {
        let superblock = import::newest_found(members)?;
        let options = self.options_for(&superblock.name, superblock.array);
        self.check_servable(superblock, options).err().map(|error| error.message)
    }

    pub(super) fn import(&self, order: &ImportOrder) -> Outcome {
        let ImportOrder { array, all, dirs, force, once, dry_run } = order;
        let (array, all, force, dry_run) = (array.as_deref(), *all, *force, *dry_run);
        if let (Some(array), false) = (array, all)
            && (dirs.is_empty() || array.parse::<Uuid>().is_ok())
            && self.find(array, |_| ()).is_ok()
        {
            // Known without a look at anything. Another one of its name would have to be in the places that are named.
            return Err(refusal(ErrorCode::Refused, format!("array '{array}' is served already")));
        }
        let places = self.places(dirs);
        // Devices that served an array are part of it wherever they are.
        let earlier = self.earlier_paths(array.filter(|_| !all));
        let limits = self.look_limits(array.filter(|_| !all));
        let found = search_patiently(&places, &earlier, &limits);
        found.check_whole()?;
        let is_served = |uuid: &Uuid| self.served_uuids().contains(uuid);
        let is_there = |members: &[Found]| members.iter().any(|member| !member.remembered);
        let chosen: Vec<Uuid> = match (array, all) {
            (Some(array), false) => {
                let uuid = found.choose(array, &places).map_err(|error| match error {
                    ImportError::Ambiguous { uuids, .. } if uuids.iter().any(is_served) => {
                        let others = uuids.iter().filter(|uuid| !is_served(uuid));
                        let others = others.map(|uuid| format!("{uuid}{}", options_of(dirs)));
                        refusal(ErrorCode::Refused, format!(
                            "array '{array}' is served already; another one of that name, which was found besides, can be \
                             imported only when that is exported: 'calpe export {array}', then 'calpe import {}'",
                            others.collect::<Vec<_>>().join("' or 'calpe import ")
                        ))
                    }
                    error => error.into(),
                })?;
                if is_served(&uuid) {
                    return Err(refusal(ErrorCode::Refused, format!("array '{array}' is served already")));
                }
                vec![uuid]
            }
            (None, true) => {
                // Without directories, also what served once and is remembered: all that is listed
                // then.
                let is_meant = |members: &[Found]| dirs.is_empty() || is_there(members);
                let not_served = found.arrays.iter().filter(|(uuid, _)| !is_served(uuid));
                not_served.filter(|(_, members)| is_meant(members)).map(|(uuid, _)| *uuid).collect()
            }
            _ => {
                return Err(refusal(
                    ErrorCode::BadRequest,
                    "name one array to import, or ask for all of them",
                ));
            }
        };
        let mut done = Done { warnings: found.warnings.clone(), ..Done::default() };
        if all {
            // Others may be among it.
            done.warnings.extend(found.forbidden_in(|_| true));
        }
        let mut lines = Vec::new();
        let mut failures = Vec::new();
        // Names that arrays have which a dry run would have imported before.
        let mut taken: Vec<String> = Vec::new();
        for uuid in chosen {
            let name = name_of(&found.arrays[&uuid]).to_owned();
            let imported = match dry_run {
                true => self.would_import(&found, uuid, force, &taken, dirs),
                false => self.import_one(&found, uuid, force),
            };
            match imported {
                Ok(Done { message, warnings, failures: refused }) => {
                    failures.extend(refused);
                    lines.push(message);
                    for warning in warnings {
                        if !done.warnings.contains(&warning) {
                            done.warnings.push(warning);
                        }
                    }
                    let is_configured = self.is_configured(uuid, &name);
                    let unkept = if dry_run && *once {
                        self.not_again(uuid)
                    } else if dry_run {
                        let why = self.state_trouble();
                        why.map(|why| format!("the import would not be remembered: {why}"))
                    } else {
                        let places = with_members(&places, &found.arrays[&uuid]);
                        let again = Some(&places).filter(|_| !once).map(Vec::as_slice);
                        let unkept = self.import_again(uuid, again);
                        if *once { self.not_again(uuid) } else { unkept }
                    };
                    // What is configured is served after a restart all the same, where its members
                    // are found.
                    let members = found.arrays[&uuid].iter().map(|member| &*member.path);
                    let is_found = is_configured && self.is_found_again(uuid, &name, members);
                    done.warnings.extend(unkept.filter(|_| !is_found));
                    done.warnings.extend(match once {
                        true => self.served_all_the_same(&found, uuid, &name),
                        false => self.not_the_configured(&found, uuid),
                    });
                    taken.push(name);
                }
                Err(error) => failures.push(error),
            }
        }
        // One failure among several must not hide what worked, nor pass for success.
        match (lines.is_empty(), failures.last()) {
            (true, Some(error)) => {
                let texts: Vec<_> = failures.iter().map(|error| error.message.as_str()).collect();
                return Err(refusal(error.code, texts.join("\n")));
            }
            (true, None) => lines.push("nothing to import".into()),
            (false, _) => {}
        }
        done.message = lines.join("\n");
        done.failures = failures;
        Ok(done)
    }

    /// Whether all its members are where the daemon and a section of the array look, whatever is
    /// remembered.
    fn is_found_again<'a>(
        &self,
        array: Uuid,
        name: &str,
        mut members: impl Iterator<Item = &'a Path>,
    ) -> bool {
        let by_uuid = self.configured(&ArrayChoice::Uuid(array));
        let section = by_uuid.or_else(|| self.configured(&ArrayChoice::Name(name.to_owned())));
        let mut places = self.search_places();
        places.extend(section.map(|section| section.search).unwrap_or_default());
        members.all(|member| places.iter().any(|place| covers(place, member)))
    }

    /// What keeps the next start from finding a configured array with these members.
    fn may_not_be_found<'a>(
        &self,
        array: Uuid,
        name: &str,
        members: impl Iterator<Item = &'a Path>,
    ) -> Option<String> {
        let why = self.cannot_remember()?;
        if self.is_found_again(array, name, members) {
            return None;
        }
        Some(format!(
            "array '{name}' is in the configuration, but the next start may not find it: by their paths, members of it are where neither its \
             section nor the daemon looks ('search'), and that is not remembered ({why})"
        ))
    }

    /// What is told of an import where the configuration has another array of that name.
    fn not_the_configured(&self, found: &Search, array: Uuid) -> Option<String> {
        let name = name_of(&found.arrays[&array]);
        if self.configured(&ArrayChoice::Uuid(array)).is_some() {
            return None;
        }
        let is_named = |uuid: &Uuid| found.arrays.get(uuid).is_some_and(|members| name_of(members) == name);
        let by_uuid = self.configured_uuids().into_iter().find(is_named);
        if let Some(other) = by_uuid {
            return Some(format!(
                "in the configuration, array '{name}' is {other}: the next start serves that one, and not {array}, as two of one \
                 name are not served at once, unless its section says uuid = \"{array}\""
            ));
        }
        let section = self.configured(&ArrayChoice::Name(name.to_owned()))?;
        let others =
            in_places_of(&section, found).into_iter().filter(|uuid| *uuid != array && is_named(uuid));
        let other = others.into_iter().next()?;
        if in_places_of(&section, found).contains(&array) {
            return None;
        }
        Some(format!(
            "in the configuration, array '{name}' is {other}, which is where its section looks: the next start serves that one, and \
             not {array}, unless its section says uuid = \"{array}\""
        ))
    }

    /// What is told of an import that is to end with the daemon, where the array is in the configuration.
    fn served_all_the_same(&self, found: &Search, array: Uuid, name: &str) -> Option<String> {
        if !self.is_configured(array, name) {
            return None;
        }
        let members = found.arrays[&array].iter().map(|member| &*member.path);
        if let Some(text) = self.may_not_be_found(array, name, members) {
            return Some(text);
        }
        let section = match self.configured(&ArrayChoice::Uuid(array)) {
            Some(_) => None,
            None => self.configured(&ArrayChoice::Name(name.to_owned())),
        };
        let again = section.map_or(Some(array), |section| {
            let mut there = in_places_of(&section, found);
            there.retain(|uuid| name_of(&found.arrays[uuid]) == name);
            self.meant_by_name(name, &there, array)
        });
        Some(match again {
            Some(again) if again == array => format!(
                "array '{name}' is in the configuration: the next start serves it all the same ('--once' or not)"
            ),
            Some(other) => format!(
                "array '{name}' is in the configuration, and the next start takes {other} for it: this one is served all the same \
                 ('--once' or not) only where its section says uuid = \"{array}\""
            ),
            None => format!(
                "array '{name}' is in the configuration, which can mean several arrays of that name: unless one alone is there then, \
                 the next start serves none of them; uuid = \"{array}\" in its section says that this one is meant"
            ),
        })
    }

    fn import_one(&self, found: &Search, array: Uuid, force: bool) -> Outcome {
        let options = ServeOptions { force, ..self.options_for(name_of(&found.arrays[&array]), array) };
        let before = self.events.next();
        let (report, mut warnings) = self.open_and_serve(found, array, options, &[])?;
        let report = self.when_replayed(report);
        warnings.extend(self.losses(&report, before));
        let refused = report.log.reason.as_ref().filter(|_| report.log.state == LogState::Refused);
        let failure = |reason| {
            let name = &report.name;
            let what =
                format!("array '{name}' cannot be served: {reason}; 'calpe status {name}' says what to do");
            refusal(ErrorCode::Refused, what)
        };
        let failures = refused.map(failure).into_iter().collect();
        Ok(Done { message: served_line(&report), warnings, failures })
    }

    /// The report of an array that has just begun to be served, when its log is replayed, as far as that takes no longer than
    /// [`REPLAY_WAIT`].
    fn when_replayed(&self, mut report: ArrayReport) -> ArrayReport {
        let begun = Instant::now();
        while report.log.state == LogState::Replaying && begun.elapsed() < REPLAY_WAIT {
            std::thread::sleep(REPLAY_LOOK);
            match self.status(Some(&report.uuid.to_string())).map(|mut reports| reports.pop()) {
                Ok(Some(now)) => report = now,
                // Somebody was faster, and has stopped it.
                Ok(None) | Err(_) => break,
            }
        }
        report
    }

    /// What the start of an array has cost, a line each, as its events from number `since` on tell it.
    pub(super) fn losses(&self, report: &ArrayReport, since: u64) -> Vec<String> {
        let name = &report.name;
        let is_loss = |event: &Event| {
            let is_dropped = event.kind == NoticeKind::LogDropped.name();
            // That is the failure of the command.
            let is_refusal = event.kind == NoticeKind::ArrayRefused.name();
            let is_told = event.severity == Severity::Error && !is_refusal;
            event.array.as_deref() == Some(name) && (is_told || is_dropped)
        };
        let events = self.events.since(since).into_iter().filter(is_loss);
        let mut lines: Vec<String> = events.map(|event| format!("array '{name}': {}", event.text)).collect();
        if report.log.state == LogState::Replaying {
            lines.push(format!(
                "array '{name}': its redo log is still being replayed; 'calpe events' tells what cannot be, if anything cannot"
            ));
        }
        lines
    }

    /// What an import would do. Devices are opened and locked for it, too: whether they can be is
    /// part of what is to be known. `taken` are names that others would have then, `dirs` the
    /// directories that were named.
    fn would_import(
        &self,
        found: &Search,
        array: Uuid,
        force: bool,
        taken: &[String],
        dirs: &[PathBuf],
    ) -> Outcome {
        let members = &found.arrays[&array];
        let options = ServeOptions { force, ..self.options_for(name_of(members), array) };
        let _change = self.begin_change(array)?;
        let opened = import::open(members, force, options.limits.local);
        let mut opened = opened.map_err(|error| self.explained(error, found, array))?;
        opened.explain_missing(found, |_, device| self.earlier_path(array, device));
        opened.warnings.extend(unread_lines(found, &opened));
        let superblock = &opened.assembled.superblock;
        self.check_servable(superblock, options)?;
        let Superblock { name, .. } = superblock;
        if taken.contains(name) {
            let text = format!(
                "another array named '{name}' would be imported before it, and two of one name are not served at once: import the \
                 one that you want by its uuid, this one with 'calpe import {array}{}'",
                options_of(dirs)
            );
            return Err(refusal(ErrorCode::Refused, text));
        }
        if self.find(name, |_| ()).is_ok() {
            let text = format!("an array named '{name}' is served already: export that one first");
            return Err(refusal(ErrorCode::Refused, text));
        }
        let replay = match superblock.clean {
            true => "",
            false => "; whether its redo log can be replayed shows only when it is imported",
        };
        let message = format!(
            "would import array '{name}' with {} of {} members{replay}",
            opened.assembled.live.len(),
            superblock.members.len()
        );
        let left_out = opened.left_out.iter().map(|left| left.reason.clone());
        let warnings = opened.warnings.iter().cloned().chain(left_out).collect();
        drop(opened);
        await_closings(CLOSING_WAIT);
        Ok(Done { message, warnings, ..Done::default() })
    }

    /// Opens an array that was found, and begins to serve it. Returns what a person should know, too, a line
    /// each. `told` becomes events of the array beside that.
    ///
    /// # Errors
    /// As [`import::open`] and [`Daemon::serve`].
    pub fn open_and_serve(
        &self,
        found: &Search,
        array: Uuid,
        options: ServeOptions,
        told: &[String],
    ) -> Result<(ArrayReport, Vec<String>), RequestError> {
        let _change = self.begin_change(array)?;
        let (opened, warnings) = self.open_found(found, array, options, told)?;
        Ok((self.serve(opened, options)?, warnings))
    }

    /// As [`Daemon::open_and_serve`], of an array that is awaited, unless it is given up meanwhile.
    /// What the search has told becomes events of it.
    pub(super) fn open_and_serve_awaited(
        &self,
        which: &ArrayChoice,
        found: &Search,
        array: Uuid,
        options: ServeOptions,
    ) -> Result<ArrayReport, RequestError> {
        let _change = self.begin_change(array)?;
        if self.was_exported(which, array) {
            return Err(refusal(ErrorCode::Refused, format!("array '{which}' was exported meanwhile")));
        }
        let (opened, _) = self.open_found(found, array, options, &found.warnings)?;
        let _not_meanwhile = self.keep_awaiting();
        if !self.is_awaited(which) {
            return Err(refusal(ErrorCode::Refused, format!("array '{which}' is not awaited any more")));
        }
        self.serve(opened, options)
    }

    /// Opens an array that was found. Returns what a person should know, too.
    fn open_found(
        &self,
        found: &Search,
        array: Uuid,
        options: ServeOptions,
        told: &[String],
    ) -> Result<(Opened, Vec<String>), RequestError> {
        self.await_attempts(array);
        let opened = import::open(&found.arrays[&array], options.force, options.limits.local);
        let mut opened = opened.map_err(|error| self.explained(error, found, array))?;
        opened.explain_missing(found, |_, device| self.earlier_path(array, device));
        opened.warnings.extend(self.lost_replacement_lines(&opened));
        opened.warnings.extend(unread_lines(found, &opened));
        let mut warnings = opened.warnings.clone();
        warnings.extend(opened.left_out.iter().map(|left| left.reason.clone()));
        let told: Vec<String> = opened.not_told(told).cloned().collect();
        opened.warnings.splice(0..0, told);
        Ok((opened, warnings))
    }

    /// With what is known of members that are missing.
    fn explained(&self, error: ImportError, found: &Search, array: Uuid) -> ImportError {
        let members = &found.arrays[&array];
        let earlier = |device| self.earlier_path(array, device);
        error.explained(|| {
            let newest = import::newest_found(members);
            newest.map_or_else(BTreeMap::new, |newest| found.about_missing(members, newest, earlier))
        })
    }

    /// What to tell of replacements whose devices are not there, a line each.
    pub(super) fn lost_replacement_lines(&self, opened: &Opened) -> Vec<String> {
        let name = &opened.assembled.superblock.name;
        let line = |(member, why): (MemberIndex, String)| {
            format!(
                "the replacement of member {member} that was being built is given up: {why}; begin again with 'calpe replace {name} \
                 {member} NEW'"
            )
        };
        self.lost_replacements(&opened.assembled, &opened.left_out).into_iter().map(line).collect()
    }

    pub(super) fn export(&self, array: &str, force: bool, dry_run: bool) -> Outcome {
        let about = |served: &Served| (served.id, served.names.uuid, served.names.name.clone());
        let (id, uuid, name) = match (self.find(array, about), self.find_awaited(array)) {
            (Ok(found), _) => found,
            (Err(_), Some(waiting)) => match self.forget(&waiting, dry_run) {
                Some(done) => return Ok(done),
                // An attempt was faster.
                None => self.find(array, about)?,
            },
            (Err(error), None) => return Err(error),
        };
        let clients = match self.facts(id)?.clients {
            0 => None,
            1 => Some(("1 connection of a client is open".to_owned(), "loses")),
            many => Some((format!("{many} connections of clients are open"), "lose")),
        };
        if let (Some((clients, _)), false) = (&clients, force) {
            let what = format!(
                "array '{name}': {clients}: detach first ('calpe detach', or end what uses it), or take it away from under them \
                 with 'calpe export --force {name}'"
            );
            return Err(refusal(ErrorCode::NeedsForce, what));
        }
        let mut note: Vec<String> =
            clients.into_iter().map(|(clients, lose)| format!("{clients} and {lose} it")).collect();
        if self.is_configured(uuid, &name) {
            let is_certain = self.configured(&ArrayChoice::Uuid(uuid)).is_some();
            let again = match !is_certain && self.has_namesake(uuid, &name) {
                false => "it",
                true => "the array of that name that it finds in its places, if that is one,",
            };
            let seats = self.find(array, |served| served.names.seats.clone())?;
            let members = seats.iter().filter_map(|seat| seat.path.as_deref());
            note.push(
                self.may_not_be_found(uuid, &name, members)
                    .unwrap_or_else(|| kept_in_configuration(&name, &format!("serves {again}"))),
            );
        }
        if dry_run {
            let how = self.reactor.check(id, AdminRequest::Stop)?.0;
            if how != STOPPED_CLEANLY {
                note.insert(0, format!("array '{name}' would be {how}"));
            }
            let unkept = self.state_trouble();
            note.extend(unkept.map(|why| {
                format!("the export would not be remembered, and a restart may serve the array: {why}")
            }));
            let message = format!("would stop array '{name}'");
            return Ok(Done { message, warnings: note, ..Done::default() });
        }
        let _change = self.begin_change(uuid)?;
        self.note_exported(&name, uuid);
        self.remember_now(id);
        let result = self.reactor.stop_array(id);
        self.forget_served(id);
        await_closings(CLOSING_WAIT);
        let unkept = self.import_again(uuid, None);
        self.end_section(uuid, &name);
        let how = result?.0;
        let cleanly = how == STOPPED_CLEANLY;
        let level = if cleanly { NoticeLevel::Info } else { NoticeLevel::Warning };
        self.notice(&name, kinds::EXPORTED, level, format!("exported, {how}"));
        let how = (!cleanly).then(|| format!("array '{name}' was {how}"));
        let warnings = note.into_iter().chain(how).chain(unkept).collect();
        Ok(Done { message: format!("array '{name}' is stopped"), warnings, ..Done::default() })
    }

    /// An array that was imported by a command or is configured, and could not be served since, is
    /// no longer tried. None: it is served.
    fn forget(&self, waiting: &Waiting, dry_run: bool) -> Option<Done> {
        let (name, uuid) = (waiting.name(), waiting.uuid());
        let is_configured = self.configured(waiting.which()).is_some() || self.is_configured(uuid, &name);
        let (until, mut warnings) = match is_configured {
            false => ("", Vec::new()),
            true => (" until the next start", vec![kept_in_configuration(&name, "tries to import it")]),
        };
        if dry_run {
            let message = format!("would no longer try to import array '{name}'{until}");
            return Some(Done { message, warnings, ..Done::default() });
        }
        self.note_exported(&name, uuid);
        if !self.give_up(waiting.which()) {
            return None;
        }
        warnings.extend(self.import_again(uuid, None));
        let message = format!("array '{name}' is no longer tried to be imported{until}");
        Some(Done { message, warnings, ..Done::default() })
    }

    pub(super) fn scrub(&self, array: &str, action: ScrubAction, dry_run: bool) -> Outcome {
        let (id, name) = self.find(array, |served| (served.id, served.names.name.clone()))?;
        let request = match action {
            ScrubAction::Start => AdminRequest::ScrubStart,
            ScrubAction::Pause => AdminRequest::ScrubPause,
            ScrubAction::Stop => AdminRequest::ScrubStop,
        };
        if dry_run {
            let mut done = self.would(id, &name, request)?;
            let why = self.cannot_remember().filter(|_| matches!(action, ScrubAction::Pause));
            done.warnings.extend(why.map(|why| format!("the pause would not be remembered: {why}")));
            return Ok(done);
        }
        let outcome = self.reactor.admin(id, request, Vec::new())?;
        let warnings = self.remember_scrub(id).into_iter().collect();
        Ok(Done { message: format!("array '{name}': {}", outcome.0), warnings, ..Done::default() })
    }

    pub(super) fn repair(&self, array: &str, dry_run: bool) -> Outcome {
        let (id, name) = self.find(array, |served| (served.id, served.names.name.clone()))?;
        if dry_run {
            return self.would(id, &name, AdminRequest::Repair);
        }
        let outcome = self.reactor.admin(id, AdminRequest::Repair, Vec::new())?;
        Ok(Done::line(format!("array '{name}': {}", outcome.0)))
    }
}

/// The arrays that have members where a section looks for them.
fn in_places_of(section: &ArrayConfig, found: &Search) -> Vec<Uuid> {
    let is_its_place = |member: &Found| section.search.iter().any(|place| covers(place, &member.path));
    let is_there = |members: &[Found]| members.iter().any(is_its_place);
    found.arrays.iter().filter(|(_, members)| is_there(members)).map(|(uuid, _)| *uuid).collect()
}

/// What is told of a configured array that is taken out of service: what the next start does with it.
fn kept_in_configuration(name: &str, does: &str) -> String {
    format!(
        "array '{name}' is in the configuration: the next start {does} again; to keep it out of service, take its [[array]] section \
         out of the file"
    )
}

/// The name of an array. It has one for its life, so any superblock has it.
fn name_of(members: &[Found]) -> &str {
    members.first().map_or("", |member| member.superblock.name.as_str())
}

/// Why these members cannot be had: another daemon has one of them.
fn in_use(members: &[Found]) -> Option<String> {
    let local = members.iter().filter(|member| !is_remote(&member.path));
    let mut held = local.filter(|member| is_held_by_calpe(&member.path));
    held.next().map(|member| {
        format!("{}: is in use by another daemon or check: stop that first", shown(&member.path))
    })
}

/// The places, and the directories of members that were found elsewhere: where an import is to look again after a restart.
fn with_members(places: &[PathBuf], members: &[Found]) -> Vec<PathBuf> {
    let mut all = places.to_vec();
    for member in members {
        if !all.iter().any(|place| covers(place, &member.path)) {
            all.extend(directory_of(&member.path));
        }
    }
    all
}

/// One line on an array that has just begun to be served.
#[must_use]
pub fn served_line(report: &ArrayReport) -> String {
    let shape = format!("{}+{}, {}", report.data, report.parity, HumanSize(report.volume.bytes));
    let uri = report.uris.first().map(|uri| format!(", {uri}")).unwrap_or_default();
    let replay = match report.log.state {
        LogState::Replaying => ", and its redo log is being replayed",
        _ => "",
    };
    format!("array '{}' ({shape}) is {}{replay}{uri}", report.name, report.state)
}

/// What could not be looked at, a line each, where members are missing: these may be they.
fn unread_lines(found: &Search, opened: &Opened) -> Vec<String> {
    let is_missing = opened.assembled.seats.iter().any(|seat| seat.state == MemberState::Missing);
    let lines = opened.not_told(&found.unread).take(UNREAD_TOLD).cloned();
    if is_missing { lines.collect() } else { Vec::new() }
}

/// Directories to look in, as options of `calpe import`.
fn options_of(dirs: &[PathBuf]) -> String {
    dirs.iter().map(|dir| format!(" --dir {}", quoted(dir))).collect()
}

/// What a list says of the array of these members. `earlier`: where a device of an array was before.
pub(super) fn importable(
    members: &[Found],
    found: &Search,
    earlier: impl Fn(Uuid, Uuid) -> Option<PathBuf>,
) -> Option<Importable> {
    let superblock = import::newest_found(members)?;
    let mut about = found.about_missing(members, superblock, |device| earlier(superblock.array, device));
    let verdict = import::preview(members, false);
    let twins = import::twins_among(members);
    let note = |found: &Found| match &verdict {
        _ if found.unwritable.is_some() => {
            let reason = found.unwritable.as_deref()?;
            Some(reason.strip_prefix(&format!("{}: ", shown(&found.path))).unwrap_or(reason).to_owned())
        }
        Ok(assembled) => assembled
            .refused
            .iter()
            .find(|(key, _)| members[*key].path == found.path)
            .map(|(_, not_used)| not_used.why.clone()),
        Err(ImportError::Assembly { source: AssemblyError::Unconfirmed { older, member, .. }, .. })
            if !older.is_empty() =>
        {
            let own = found.superblock.member;
            match own == *member {
                true => Some("newer than the others".into()),
                false => older.contains(own).then(|| "an older copy of itself".into()),
            }
        }
        Err(_) => None,
    };
    let mut member = |(record, index): (&calpe_core::format::MemberRecord, u16)| {
        let twin = twins.iter().find(|(twins, _)| twins.device == record.uuid);
        let used = twin.and_then(|(twins, _)| twins.used).map(|at| &members[at]);
        let own = members.iter().filter(|found| found.superblock.device == record.uuid);
        let found = used.or_else(|| own.min_by_key(|found| found.unwritable.is_some()));
        ImportableMember {
            index,
            uuid: record.uuid,
            path: found.map(|found| found.path.clone()),
            note: match (twin, found) {
                (Some((_, reason)), _) => Some(reason.clone()),
                (None, Some(found)) => note(found),
                (None, None) => about.remove(&record.uuid),
            },
        }
    };
    Some(Importable {
        name: superblock.name.clone(),
        uuid: superblock.array,
        data: superblock.geometry.data,
        parity: superblock.geometry.parity,
        volume_bytes: superblock.geometry.volume_bytes,
        problem: verdict.as_ref().err().map(ToString::to_string),
        usable: verdict.as_ref().map_or(0, |assembled| assembled.live.len() as u16),
        members: superblock.members.iter().zip(0..).map(&mut member).collect(),
    })
}
