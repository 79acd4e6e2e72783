//! Certificates of the daemon, and when to renew them.

use serde::{Deserialize, Serialize};

/// How many seconds before its end a certificate counts as about to expire: time to have a new one
/// signed even in a holiday.
pub(super) const EXPIRY_NOTICE_SECONDS: u64 = 30 * 86_400;

/// A certificate that the daemon shows or trusts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateReport {
    /// What it is for.
    pub role: CertificateRole,
    /// Its file.
    pub file: String,
    /// Subject of the certificate.
    pub subject: String,
    /// Its last second, since 1970.
    pub not_after_unix: u64,
    /// Whether it is valid, and for how long.
    pub state: CertificateState,
}

/// What a certificate is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertificateRole {
    /// Shown to NBD clients.
    Server,
    /// Signs the certificates of NBD clients.
    ClientCa,
    /// Shown to the servers of remote members.
    Remote,
    /// Signs the certificates of the servers of remote members.
    RemoteCa,
}

/// Whether a certificate is valid, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertificateState {
    /// It has more than `EXPIRY_NOTICE_SECONDS` left.
    Valid,
    /// It has less.
    Expiring,
    /// It has none.
    Expired,
}

impl CertificateState {
    /// The state at the time `now_unix`, in seconds since 1970.
    #[must_use]
    pub const fn at(not_after_unix: u64, now_unix: u64) -> CertificateState {
        if now_unix > not_after_unix {
            CertificateState::Expired
        } else if not_after_unix - now_unix < EXPIRY_NOTICE_SECONDS {
            CertificateState::Expiring
        } else {
            CertificateState::Valid
        }
    }
}

impl CertificateReport {
    /// What to do about it, in a sentence; none while there is nothing to do. `all`: the daemon's
    /// certificates, this one among them.
    #[must_use]
    pub fn advice(&self, all: &[CertificateReport], now_unix: u64) -> Option<String> {
        let when = match self.state {
            CertificateState::Valid => return None,
            CertificateState::Expired => {
                format!("expired {} ago", span(now_unix.saturating_sub(self.not_after_unix)))
            }
            CertificateState::Expiring => {
                format!("expires in {}", span(self.not_after_unix.saturating_sub(now_unix)))
            }
        };
        let outlives = |other: &&CertificateReport| {
            other.role == self.role && other.not_after_unix > self.not_after_unix.max(now_unix)
        };
        let is_last = !all.iter().any(|other| outlives(&other));
        let (what, then) = match self.role {
            CertificateRole::Server => ("the daemon's certificate", "clients refuse it"),
            CertificateRole::ClientCa if is_last => ("the CA of the clients", "no client is let in"),
            CertificateRole::ClientCa => {
                ("a CA of the clients", "clients with certificates that only it has signed are not let in")
            }
            CertificateRole::Remote => ("the certificate for remote members", "their servers refuse it"),
            CertificateRole::RemoteCa if is_last => {
                ("the CA of remote members", "their servers are not trusted")
            }
            CertificateRole::RemoteCa => (
                "a CA of remote members",
                "servers with certificates that only it has signed are not trusted",
            ),
        };
        let (file, subject) = (&self.file, &self.subject);
        let after = if self.state == CertificateState::Expired { "" } else { "after that " };
        Some(format!(
            "{what} ({subject}, {file}) {when}; {after}{then}: renew it, then 'systemctl reload calpe' or SIGHUP"
        ))
    }
}

/// A time in the units that people use.
fn span(seconds: u64) -> String {
    match (seconds / 86_400, seconds / 3600) {
        (days @ 2.., _) => format!("{days} days"),
        (_, hours @ 2..) => format!("{hours} h"),
        _ => format!("{} min", seconds / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_warned_about_thirty_days_before_its_end_and_after_it() {
        const END: u64 = 2_000_000_000;
        let at = |now: u64| {
            let state = CertificateState::at(END, now);
            let (role, file, subject) = (CertificateRole::Server, "s.pem".into(), "CN=s".into());
            CertificateReport { role, file, subject, not_after_unix: END, state }.advice(&[], now)
        };
        let day = 86_400;
        assert_eq!(at(END - 30 * day), None);
        let soon = at(END - 30 * day + 1).expect("advice");
        assert!(soon.contains("the daemon's certificate (CN=s, s.pem) expires in 29 days"), "{soon}");
        assert!(at(END - 3 * 3600).expect("advice").contains("in 3 h"));
        assert!(at(END).expect("advice").contains("expires in 0 min"));
        assert!(at(END + 3 * day).expect("advice").contains("expired 3 days ago"));
    }

    #[test]
    fn nobody_is_let_in_only_when_the_last_of_several_cas_has_expired() {
        const END: u64 = 2_000_000_000;
        const DAY: u64 = 86_400;
        let told = |role, now: u64| -> Vec<String> {
            let report = |(subject, not_after_unix): (&str, u64)| CertificateReport {
                role,
                file: "both.pem".into(),
                subject: subject.into(),
                not_after_unix,
                state: CertificateState::at(not_after_unix, now),
            };
            let all = [("CN=old", END), ("CN=new", END + 10 * DAY)].map(report);
            all.iter().filter_map(|report| report.advice(&all, now)).collect()
        };
        let of_clients = |now| told(CertificateRole::ClientCa, now);
        let few = "clients with certificates that only it has signed are not let in: renew it";
        let soon = of_clients(END - 25 * DAY);
        assert!(
            soon.len() == 1 && soon[0].contains(&format!("expires in 25 days; after that {few}")),
            "{soon:?}"
        );
        let old = of_clients(END + DAY);
        assert!(old[0].contains(&format!("(CN=old, both.pem) expired 24 h ago; {few}")), "{old:?}");
        assert!(old[1].contains("expires in 9 days; after that no client is let in"), "{old:?}");
        for advice in of_clients(END + 11 * DAY) {
            assert!(advice.contains("ago; no client is let in"), "{advice}");
        }
        let servers = told(CertificateRole::RemoteCa, END + DAY);
        assert!(
            servers[0].contains("servers with certificates that only it has signed are not trusted"),
            "{servers:?}"
        );
        assert!(servers[1].contains("after that their servers are not trusted"), "{servers:?}");
    }
}
