//! The entry of an array in the list of those that could be imported. Must not know which arrays
//! are served.

use super::import::{self, ImportError};
use super::search::{Found, Search};
use crate::control::{Importable, ImportableMember};
use calpe_core::array::assembly::AssemblyError;
use calpe_core::units::shown;
use std::path::PathBuf;
use uuid::Uuid;

/// The entry of the array of these members in a list. `earlier`: where a device of an array was
/// before.
pub(crate) fn importable(
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
        Ok(lanes) => {
            let refused = lanes.iter().flat_map(|assembled| &assembled.refused);
            let mut own = refused.filter(|(key, _)| members[*key].path == found.path);
            own.next().map(|(_, not_used)| not_used.why.clone())
        }
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
        volume_bytes: superblock.volume_bytes(),
        problem: verdict.as_ref().err().map(ToString::to_string),
        usable: verdict
            .as_ref()
            .map_or(0, |lanes| lanes.iter().map(|assembled| assembled.live.len() as u16).min().unwrap_or(0)),
        members: superblock.members.iter().zip(0..).map(&mut member).collect(),
    })
}
