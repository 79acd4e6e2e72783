//! What a check found, as text and as JSON. The names of the fields are a contract with scripts.

use calpe_core::units::{Count, HumanSize, Printable, ROW_BYTES};
use serde::Serialize;
use std::fmt;
use uuid::Uuid;

/// Version of the JSON fields; rises when one changes its meaning or goes.
const OUTPUT_VERSION: u32 = 1;

/// Lost parts of the volume that the text lists; the JSON has them all.
const LOST_SHOWN: usize = 20;

// More than 15 fields: it is the JSON output of `calpe check`, whose flat fields scripts rely on.
/// The complete result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CheckReport {
    /// Version of these fields.
    pub output_version: u32,
    /// Everything is proved good, and no member is missing.
    pub good: bool,
    /// What is there is proved good, as far as its checksums and parity can prove it.
    pub consistent: bool,
    /// Every member is there and in service.
    pub whole: bool,
    /// Name of the array.
    pub array: String,
    /// Its identity.
    pub uuid: Uuid,
    /// Data chunks of a stripe.
    pub data: u16,
    /// Parity chunks of a stripe.
    pub parity: u16,
    /// Lanes that the volume is cut into.
    pub lanes: u16,
    /// "blake3", "crc32c" or "none".
    pub checksum: String,
    /// Its members are marked clean, by a stop or while it was idle; otherwise its log was
    /// replayed, in memory only.
    pub clean: bool,
    /// Every member, in order of index.
    pub members: Vec<CheckedMember>,
    /// Wrong or unreadable blocks, and rows whose parity does not match their data; none when
    /// nothing was compared.
    pub errors: Option<u64>,
    /// Of these, blocks that could be decoded from others, or that were set aside and can be read
    /// again.
    pub repairable: Option<u64>,
    /// Parts of the volume that are beyond repair: everything that could give them was read, and is wrong.
    pub lost: Vec<LostPart>,
    /// Parts of the volume that only their own members can give. Those members could not read them when the
    /// rest of their rows was written, and now were not given, or still give errors.
    pub set_aside: Vec<LostPart>,
    /// Parts that were set aside and that their own members can read: a start puts them back.
    pub kept_aside: Vec<LostPart>,
    /// Parts of the volume that cannot be read now. Members that were not given, or blocks that
    /// give errors, may still hold them.
    pub unreadable: Vec<LostPart>,
    /// Other obstacles to a proof.
    pub problems: Vec<String>,
    /// Notices of the run.
    pub notices: Vec<String>,
}

/// One member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct CheckedMember {
    /// Its place.
    pub index: u16,
    /// Where its device is, if it was given.
    pub path: Option<String>,
    /// Identity of the device that belongs here.
    pub uuid: Uuid,
    /// It is in service, and all of it was read.
    pub verified: bool,
    /// Why not.
    pub reason: Option<String>,
    /// Number of reads that failed.
    pub read: u64,
    /// Blocks found wrong: data, parity, metadata pages, log.
    pub cksum: u64,
    /// Copies of the superblock found damaged.
    pub superblock: u64,
}

/// A part of the volume, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LostPart {
    /// Where it starts.
    pub offset: u64,
    /// How long it is.
    pub bytes: u64,
}

impl CheckReport {
    /// Sets `good`, `consistent` and `whole` from all other fields.
    #[must_use]
    pub(crate) fn concluded(mut self) -> CheckReport {
        self.output_version = OUTPUT_VERSION;
        if !self.has_compared() && self.errors == Some(0) {
            (self.errors, self.repairable) = (None, None);
        }
        self.consistent = self.is_faultless() && self.errors == Some(0);
        self.whole = self.members.iter().all(|member| member.verified);
        self.good = self.consistent && self.whole;
        self
    }

    /// Whether there was anything to compare: checksums, or, without them, data with parity.
    fn has_compared(&self) -> bool {
        self.checksum != "none" || self.verified() > usize::from(self.data)
    }

    /// Number of members that were read completely.
    fn verified(&self) -> usize {
        self.members.iter().filter(|member| member.verified).count()
    }

    /// Whether nothing that was read is wrong.
    fn is_faultless(&self) -> bool {
        let faultless = |member: &CheckedMember| member.read + member.cksum + member.superblock == 0;
        self.members.iter().all(faultless)
            && self.errors.unwrap_or(0) == 0
            && [&self.lost, &self.set_aside, &self.kept_aside, &self.unreadable]
                .iter()
                .all(|parts| parts.is_empty())
            && self.problems.is_empty()
    }

    /// Why parts cannot be read, for people.
    fn why_unreadable(&self) -> String {
        let absent: Vec<String> =
            self.members.iter().filter(|member| !member.verified).map(|m| m.index.to_string()).collect();
        match &absent[..] {
            [] => "cannot be read for now, as reads of members give errors".into(),
            [member] => format!(
                "cannot be read without member {member}, which was not looked at and may be able to give them"
            ),
            _ => format!(
                "cannot be read without members {}, which were not looked at and may be able to give them",
                absent.join(", ")
            ),
        }
    }

    /// The verdict in a sentence. The text form ends with it when it is good; otherwise it is the
    /// error of the command.
    #[must_use]
    pub(crate) fn verdict(&self) -> String {
        let proof = match self.checksum.as_str() {
            "none" => "every row's parity matches its data",
            _ => "every block matches its checksum and every row's parity its data",
        };
        let absent = self.members.iter().filter(|member| !member.verified).count();
        let were = if absent == 1 { "was" } else { "were" };
        match (self.consistent, absent) {
            (true, 0) => format!("array '{}' is good: {proof}", self.array),
            (true, _) => format!(
                "array '{}' is consistent, not whole: {absent} of {} members {were} not verified; of the others, {proof}",
                self.array,
                self.members.len()
            ),
            (false, _) if !self.has_compared() && self.is_faultless() => format!(
                "whether array '{}' is good cannot be told: without checksums, data is compared with parity, which takes {} members \
                 at least, and {} of {} {} verified",
                self.array,
                self.data + 1,
                self.verified(),
                self.members.len(),
                if self.verified() == 1 { "was" } else { "were" }
            ),
            (false, _) => format!("array '{}' is not good", self.array),
        }
    }
}

/// Lists parts of the volume.
fn list(f: &mut fmt::Formatter<'_>, parts: &[LostPart], what: &str) -> fmt::Result {
    if parts.is_empty() {
        return Ok(());
    }
    let bytes = parts.iter().map(|part| part.bytes).sum();
    writeln!(f, "{} of the volume {what}, at (offset, bytes):", HumanSize(bytes))?;
    for part in parts.iter().take(LOST_SHOWN) {
        writeln!(f, "  {:>16} {:>10}", part.offset, part.bytes)?;
    }
    if parts.len() > LOST_SHOWN {
        writeln!(f, "  and {} more: see --json", parts.len() - LOST_SHOWN)?;
    }
    Ok(())
}

impl fmt::Display for CheckReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "array {} ({})", Printable(&self.array), self.uuid)?;
        let mark = if self.clean { "marked clean" } else { "not marked clean" };
        let lanes = if self.lanes == 1 { String::new() } else { format!(", {} lanes", self.lanes) };
        let CheckReport { data, parity, checksum, .. } = self;
        writeln!(f, "{data} data + {parity} parity, checksum {checksum}{lanes}, {mark}\n")?;
        let name = |member: &CheckedMember| {
            let path = member
                .path
                .as_ref()
                .map_or_else(|| member.uuid.to_string(), |path| Printable(path).to_string());
            format!("{} {path}", member.index)
        };
        let width = self.members.iter().map(|m| name(m).chars().count()).max().unwrap_or(0);
        writeln!(f, "  {:<width$}  {:>6}  {:>6}  {:>10}", "MEMBER", "READ", "CKSUM", "SUPERBLOCK")?;
        for member in &self.members {
            let CheckedMember { read, cksum, superblock, .. } = member;
            let why =
                member.reason.as_ref().map(|reason| format!("  {}", Printable(reason))).unwrap_or_default();
            writeln!(f, "  {:<width$}  {read:>6}  {cksum:>6}  {superblock:>10}{why}", name(member))?;
        }
        writeln!(f)?;
        for notice in &self.notices {
            writeln!(f, "{notice}")?;
        }
        list(f, &self.lost, "are beyond repair")?;
        list(f, &self.set_aside, "are set aside, and only their own members can give them")?;
        let kept = "were set aside, and their own members have them: an array that is imported reads them, and writes them back";
        list(f, &self.kept_aside, kept)?;
        list(f, &self.unreadable, &self.why_unreadable())?;
        if let Some(errors @ 1..) = self.errors {
            let repairable = self.repairable.unwrap_or(0);
            let kept = self.kept_aside.iter().map(|part| part.bytes / ROW_BYTES).sum::<u64>().min(repairable);
            let (found, mended) = (Count(errors, "error"), Count(repairable - kept, "block"));
            write!(f, "{found}; {mended} can be decoded from others")?;
            match kept {
                0 => writeln!(f)?,
                kept => writeln!(f, "; {} can be read again", Count(kept, "block"))?,
            }
        }
        for problem in &self.problems {
            writeln!(f, "{problem}")?;
        }
        if self.good { writeln!(f, "{}", self.verdict()) } else { Ok(()) }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    const PART: LostPart = LostPart { offset: 0, bytes: 4096 };

    pub(in crate::daemon::check) fn report() -> CheckReport {
        let member = |index| CheckedMember {
            index,
            path: Some(format!("/srv/m{index}")),
            uuid: Uuid::from_u128(u128::from(index)),
            verified: true,
            reason: None,
            read: 0,
            cksum: 0,
            superblock: 0,
        };
        CheckReport {
            output_version: 0,
            good: false,
            consistent: false,
            whole: false,
            array: "tank".into(),
            uuid: Uuid::nil(),
            data: 2,
            parity: 1,
            lanes: 1,
            checksum: "blake3".into(),
            clean: true,
            members: (0..3).map(member).collect(),
            errors: Some(0),
            repairable: Some(0),
            lost: Vec::new(),
            set_aside: Vec::new(),
            kept_aside: Vec::new(),
            unreadable: Vec::new(),
            problems: Vec::new(),
            notices: Vec::new(),
        }
    }

    #[test]
    fn only_what_is_whole_and_faultless_is_good() {
        let good = report().concluded();
        assert!(good.good && good.consistent && good.whole);
        assert!(good.to_string().contains("array 'tank' is good: every block matches its checksum"));

        let mut absent = report();
        absent.members[1].verified = false;
        let absent = absent.concluded();
        assert!(!absent.good && absent.consistent && !absent.whole);
        assert!(absent.verdict().contains("1 of 3 members was not verified"), "{absent}");

        let faults: [fn(&mut CheckReport); 10] = [
            |report| report.members[0].read = 1,
            |report| report.members[0].cksum = 1,
            |report| report.members[0].superblock = 1,
            |report| report.errors = Some(1),
            |report| report.errors = None,
            |report| report.lost = vec![PART],
            |report| report.set_aside = vec![PART],
            |report| report.kept_aside = vec![PART],
            |report| report.unreadable = vec![PART],
            |report| report.problems = vec!["why".into()],
        ];
        for (at, fault) in faults.into_iter().enumerate() {
            let mut report = report();
            fault(&mut report);
            let report = report.concluded();
            assert!(!report.good && !report.consistent && report.whole, "fault {at}");
            assert!(report.verdict().contains("not good"), "fault {at}");
        }
    }

    #[test]
    fn without_checksums_and_parity_nothing_is_said_to_be_consistent() {
        let mut report = report();
        report.checksum = "none".into();
        assert!(report.clone().concluded().good);
        report.members[1].verified = false;
        let told = report.clone().concluded();
        assert!(!told.good && !told.consistent && told.errors.is_none(), "{told:?}");
        let verdict = told.concluded().verdict();
        assert!(verdict.contains("cannot be told") && verdict.contains("takes 3 members"), "{verdict}");
        assert!(verdict.ends_with("2 of 3 were verified"), "{verdict}");
        report.members[0].read = 1;
        let told = report.concluded();
        assert!(!told.consistent && told.verdict().contains("not good"), "{told:?}");
    }

    #[test]
    fn what_a_member_that_was_not_looked_at_may_give_is_not_called_beyond_repair() {
        let mut report = report();
        report.unreadable = vec![PART];
        let text = report.clone().concluded().to_string();
        assert!(text.contains("4 KiB of the volume cannot be read for now, as reads"), "{text}");
        report.members[1].verified = false;
        let text = report.clone().concluded().to_string();
        assert!(text.contains("4 KiB of the volume cannot be read without member 1, which"), "{text}");
        assert!(!text.contains("beyond repair"), "{text}");
        report.members[2].verified = false;
        report.lost = vec![PART, LostPart { offset: 8192, ..PART }];
        let text = report.concluded().to_string();
        assert!(text.contains("cannot be read without members 1, 2, which were not"), "{text}");
        assert!(text.contains("8 KiB of the volume are beyond repair"), "{text}");
    }

    #[test]
    fn json_has_the_promised_names() {
        let json = serde_json::to_value(report().concluded()).unwrap();
        assert_eq!(json["output_version"], 1);
        for field in ["good", "consistent", "whole", "array", "uuid", "data", "parity", "checksum", "clean"] {
            assert!(!json[field].is_null(), "{field}");
        }
        for field in ["index", "path", "uuid", "verified", "read", "cksum", "superblock"] {
            assert!(!json["members"][0][field].is_null(), "{field}");
        }
        for field in
            ["errors", "repairable", "lost", "set_aside", "kept_aside", "unreadable", "problems", "notices"]
        {
            assert!(json.get(field).is_some(), "{field}");
        }
    }
}
