//! The certificates that the daemon shows and trusts, and when they end: for status, and an event
//! 30 days before and again at the end. Must not read files.

use crate::control::{CertificateReport, CertificateRole, CertificateState};
use crate::daemon::clock;
use crate::daemon::events::{EventLog, News, kinds};
use crate::tls::{CertificateFacts, FileRole};
use calpe_core::volume::NoticeLevel;

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Certificates(Vec<Watched>);

#[derive(Debug)]
struct Watched {
    role: CertificateRole,
    facts: CertificateFacts,
    /// What the last event reported of it.
    told: CertificateState,
}

impl Certificates {
    /// Replaces the certificates: `server` are shown to clients, `remote` to the servers of
    /// members.
    pub(super) fn watch(&mut self, server: Vec<CertificateFacts>, remote: Vec<CertificateFacts>) {
        let role = |facts: &CertificateFacts, own, ca| if facts.role == FileRole::Ca { ca } else { own };
        let server = server
            .into_iter()
            .map(|facts| (role(&facts, CertificateRole::Server, CertificateRole::ClientCa), facts));
        let remote = remote
            .into_iter()
            .map(|facts| (role(&facts, CertificateRole::Remote, CertificateRole::RemoteCa), facts));
        // A certificate that stays is not reported again.
        let told = |facts: &CertificateFacts| {
            let known = self.0.iter().find(|watched| watched.facts == *facts);
            known.map_or(CertificateState::Valid, |watched| watched.told)
        };
        self.0 =
            server.chain(remote).map(|(role, facts)| Watched { role, told: told(&facts), facts }).collect();
    }

    /// All of them, at a time in seconds since 1970.
    pub(super) fn report(&self, now_unix: u64) -> Vec<CertificateReport> {
        self.0.iter().map(|watched| watched.report(now_unix)).collect()
    }

    /// Reports certificates that end soon or have ended since the last call. Call it about once a second.
    pub(super) fn tell(&mut self, events: &EventLog) {
        let now = clock::unix_seconds();
        for (level, text) in self.news(now) {
            events.tell(News::new(None, kinds::CERTIFICATE, level, text));
        }
    }

    fn news(&mut self, now_unix: u64) -> Vec<(NoticeLevel, String)> {
        let mut news = Vec::new();
        let reports = self.report(now_unix);
        for (watched, report) in self.0.iter_mut().zip(&reports) {
            if report.state == watched.told {
                continue;
            }
            watched.told = report.state;
            let level = match report.state {
                CertificateState::Expired => NoticeLevel::Error,
                CertificateState::Expiring | CertificateState::Valid => NoticeLevel::Warning,
            };
            news.extend(report.advice(&reports, now_unix).map(|advice| (level, advice)));
        }
        news
    }
}

impl Watched {
    fn report(&self, now_unix: u64) -> CertificateReport {
        CertificateReport {
            role: self.role,
            file: self.facts.file.display().to_string(),
            subject: self.facts.subject.clone(),
            not_after_unix: self.facts.not_after_unix,
            state: CertificateState::at(self.facts.not_after_unix, now_unix),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const END: u64 = 2_000_000_000;

    fn facts(role: FileRole, end: u64) -> CertificateFacts {
        CertificateFacts { role, file: "x.pem".into(), subject: "CN=x".into(), not_after_unix: end }
    }

    #[test]
    fn each_stage_is_told_once_and_a_renewed_certificate_begins_anew() {
        let mut certificates = Certificates::default();
        let own = facts(FileRole::Certificate, END);
        certificates.watch(vec![own.clone(), facts(FileRole::Ca, END + 10_000_000)], Vec::new());
        let day = 86_400;
        assert_eq!(certificates.news(END - 31 * day), []);
        let soon = certificates.news(END - 29 * day);
        assert!(soon.len() == 1 && soon[0].0 == NoticeLevel::Warning, "{soon:?}");
        assert_eq!(certificates.news(END - 28 * day), []);
        // The same certificate is read again.
        certificates.watch(vec![own], Vec::new());
        assert_eq!(certificates.news(END - 27 * day), []);
        let over = certificates.news(END + 1);
        assert!(over.len() == 1 && over[0].0 == NoticeLevel::Error, "{over:?}");
        certificates.watch(vec![facts(FileRole::Certificate, END + 31 * day)], Vec::new());
        assert_eq!(certificates.news(END + 1), []);
        assert_eq!(certificates.news(END + 2 * day).len(), 1);
    }

    #[test]
    fn roles_come_from_what_the_file_is_for() {
        let mut certificates = Certificates::default();
        let both = || vec![facts(FileRole::Certificate, END), facts(FileRole::Ca, END)];
        certificates.watch(both(), both());
        let roles: Vec<_> = certificates.report(0).iter().map(|report| report.role).collect();
        use CertificateRole::{ClientCa, Remote, RemoteCa, Server};
        assert_eq!(roles, [Server, ClientCa, Remote, RemoteCa]);
    }
}
