//! `calpe export`: stops an array in service, or gives up one that is awaited. Must not know how requests
//! arrive.

use super::configured::{kept_in_configuration, may_not_be_found};
use crate::control::ErrorCode;
use crate::daemon::arrays::outcome::{CLOSING_WAIT, Done, Outcome, refusal};
use crate::daemon::arrays::registry::Arrays;
use crate::daemon::arrays::served::Served;
use crate::daemon::arrays::waiting::Waiting;
use crate::daemon::config::ArrayChoice;
use crate::daemon::events::kinds;
use crate::member::await_closings;
use calpe_core::volume::{AdminRequest, NoticeLevel, STOPPED_CLEANLY};

/// Takes an array out of service, or only says what would happen.
pub(crate) fn export(arrays: &Arrays, array: &str, force: bool, dry_run: bool) -> Outcome {
    let about = |served: &Served| (served.id, served.names.uuid, served.names.name.clone());
    let (id, uuid, name) = match (arrays.find(array, about), arrays.find_awaited(array)) {
        (Ok(found), _) => found,
        (Err(_), Some(waiting)) => match forget(arrays, &waiting, dry_run) {
            Some(done) => return Ok(done),
            // An attempt has served it meanwhile.
            None => arrays.find(array, about)?,
        },
        (Err(error), None) => return Err(error),
    };
    let clients = match arrays.facts(id)?.clients {
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
    if arrays.settings.is_configured(uuid, &name) {
        let is_certain = arrays.settings.configured(&ArrayChoice::Uuid(uuid)).is_some();
        let again = match !is_certain && arrays.memory.has_namesake(uuid, &name) {
            false => "it",
            true => "the array of that name that it finds in its places, if that is one,",
        };
        let seats = arrays.find(array, |served| served.names.seats().to_vec())?;
        let members = seats.iter().filter_map(|seat| seat.path.as_deref());
        note.push(
            may_not_be_found(arrays, uuid, &name, members)
                .unwrap_or_else(|| kept_in_configuration(&name, &format!("serves {again}"))),
        );
    }
    if dry_run {
        let how = arrays.reactor.would_all(id, &AdminRequest::Stop)?.0;
        if how != STOPPED_CLEANLY {
            note.insert(0, format!("array '{name}' would be {how}"));
        }
        let unkept = arrays.memory.trouble();
        note.extend(unkept.map(|why| {
            format!("the export would not be remembered, and a restart may serve the array: {why}")
        }));
        let message = format!("would stop array '{name}'");
        return Ok(Done { message, warnings: note, ..Done::default() });
    }
    let _change = arrays.begin_change(uuid)?;
    arrays.awaited.note_exported(&name, uuid);
    arrays.remember_now(id);
    let result = arrays.reactor.stop_array(id);
    arrays.forget_served(id);
    await_closings(CLOSING_WAIT);
    let unkept = arrays.memory.import_again(uuid, None);
    arrays.settings.end_section(uuid, &name);
    let how = result?.0;
    let cleanly = how == STOPPED_CLEANLY;
    let level = if cleanly { NoticeLevel::Info } else { NoticeLevel::Warning };
    arrays.notice(&name, kinds::EXPORTED, level, format!("exported, {how}"));
    let how = (!cleanly).then(|| format!("array '{name}' was {how}"));
    let warnings = note.into_iter().chain(how).chain(unkept).collect();
    Ok(Done { message: format!("array '{name}' is stopped"), warnings, ..Done::default() })
}

/// Gives up an awaited array. None if it has been served meanwhile.
fn forget(arrays: &Arrays, waiting: &Waiting, dry_run: bool) -> Option<Done> {
    let (name, uuid) = (waiting.name(), waiting.uuid());
    let is_configured =
        arrays.settings.configured(waiting.which()).is_some() || arrays.settings.is_configured(uuid, &name);
    let (until, mut warnings) = match is_configured {
        false => ("", Vec::new()),
        true => (" until the next start", vec![kept_in_configuration(&name, "tries to import it")]),
    };
    if dry_run {
        let message = format!("would no longer try to import array '{name}'{until}");
        return Some(Done { message, warnings, ..Done::default() });
    }
    arrays.awaited.note_exported(&name, uuid);
    if !arrays.awaited.give_up(waiting.which()) {
        return None;
    }
    warnings.extend(arrays.memory.import_again(uuid, None));
    let message = format!("array '{name}' is no longer tried to be imported{until}");
    Some(Done { message, warnings, ..Done::default() })
}
