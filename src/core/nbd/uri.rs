//! NBD URIs: `nbd://host[:port]/export` and `nbd+unix:///export?socket=/path`, and `nbds` for the same under
//! TLS.
//!
//! Invariant: what [`NbdUri`] prints parses to the same value. It must not know how to connect.
//!
//! Source: the NBD project's doc/uri.md; percent-encoding of RFC 3986, section 2.

use std::fmt;
use std::str::FromStr;

use super::wire::{DEFAULT_PORT, StringFault, check_string};

/// Location of an export: the server to connect to, and the name to request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdUri {
    /// The server.
    pub address: NbdAddress,
    /// The export's name; "" for the server's default.
    pub export: String,
    /// TLS is demanded.
    pub tls: bool,
    /// The name that the server's certificate must have, where that is not the host; only with TLS.
    pub server_name: Option<String>,
    /// A directory with ca-cert.pem, and with client-cert.pem and client-key.pem where clients must
    /// authenticate; only with TLS.
    pub certificates: Option<String>,
}

/// A server's address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum NbdAddress {
    /// TCP.
    Tcp {
        /// Name or address; IPv6 without brackets.
        host: String,
        /// Port.
        port: u16,
    },
    /// A socket in the filesystem.
    Unix {
        /// Its path.
        path: String,
    },
}

/// Why a text is not an NBD URI that can be used here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UriError {
    /// No scheme, or not one of NBD's.
    #[error("'{uri}' does not start with nbd://, nbds://, nbd+unix:// or nbds+unix://")]
    Scheme {
        /// The text.
        uri: String,
    },
    /// A user, which only TLS with pre-shared keys has.
    #[error(
        "'{uri}' names a user, as for TLS with pre-shared keys, which is not supported: use certificates, and no 'USER@'"
    )]
    User {
        /// The text.
        uri: String,
    },
    /// TCP needs a host.
    #[error("'{uri}' names no host: write nbd://HOST[:PORT]/EXPORT")]
    Host {
        /// The text.
        uri: String,
    },
    /// Not a port.
    #[error("'{uri}': '{port}' is not a port between 1 and 65535")]
    Port {
        /// The text.
        uri: String,
        /// The part in question.
        port: String,
    },
    /// A unix socket needs a path, and has neither host nor port.
    #[error("'{uri}': write nbd+unix:///EXPORT?socket=PATH, with nothing between the second and third slash")]
    Authority {
        /// The text.
        uri: String,
    },
    /// A unix socket needs a path.
    #[error("'{uri}' names no socket: append ?socket=PATH")]
    Socket {
        /// The text.
        uri: String,
    },
    /// A parameter that is unknown, or given twice.
    #[error(
        "'{uri}': parameter '{parameter}' is unknown or repeated; known are socket=PATH, of nbd+unix and nbds+unix, and tls-hostname=NAME and tls-certificates=DIR, of nbds and nbds+unix"
    )]
    Parameter {
        /// The text.
        uri: String,
        /// Its name.
        parameter: String,
    },
    /// A broken percent sequence.
    #[error("'{uri}': in '{part}', a '%' is not followed by two hexadecimal digits")]
    Percent {
        /// The text.
        uri: String,
        /// The export name, socket or host it stands in, still encoded.
        part: String,
    },
    /// A character that has to be encoded.
    #[error("'{uri}': {character:?} must be percent-encoded")]
    Character {
        /// The text.
        uri: String,
        /// Which.
        character: char,
    },
    /// A decoded part that cannot be used.
    #[error("'{uri}': the {part} is {fault}")]
    Text {
        /// The text.
        uri: String,
        /// Export, socket or host.
        part: &'static str,
        /// What is wrong with it.
        fault: StringFault,
    },
}

impl FromStr for NbdUri {
    type Err = UriError;

    fn from_str(text: &str) -> Result<NbdUri, UriError> {
        let uri = || text.to_owned();
        let (scheme, rest) = text.split_once("://").ok_or_else(|| UriError::Scheme { uri: uri() })?;
        let (unix, tls) = match scheme.to_ascii_lowercase().as_str() {
            "nbd" => (false, false),
            "nbd+unix" => (true, false),
            "nbds" => (false, true),
            "nbds+unix" => (true, true),
            _ => return Err(UriError::Scheme { uri: uri() }),
        };
        let bad = |c: &char| c.is_control() || c.is_whitespace() || *c == '#';
        if let Some(character) = text.chars().find(bad) {
            return Err(UriError::Character { uri: uri(), character });
        }
        let (before_query, query) = match rest.split_once('?') {
            Some((before, query)) => (before, Some(query)),
            None => (rest, None),
        };
        let (authority, path) = before_query.split_once('/').unwrap_or((before_query, ""));
        let decoder = Decoder { text };
        let export = decoder.decode(path, "export name")?;

        let (mut socket, mut server_name, mut certificates) = (None, None, None);
        for pair in query.unwrap_or("").split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (slot, what) = match name {
                "socket" if unix && socket.is_none() => (&mut socket, "socket path"),
                "tls-hostname" if tls && server_name.is_none() => (&mut server_name, "server name"),
                "tls-certificates" if tls && certificates.is_none() => (&mut certificates, "directory"),
                _ => return Err(UriError::Parameter { uri: uri(), parameter: name.to_owned() }),
            };
            *slot = Some(decoder.decode(value, what)?);
        }
        let address = if unix {
            if !authority.is_empty() {
                return Err(UriError::Authority { uri: uri() });
            }
            let path =
                socket.filter(|path| !path.is_empty()).ok_or_else(|| UriError::Socket { uri: uri() })?;
            NbdAddress::Unix { path }
        } else {
            decoder.tcp(authority)?
        };
        Ok(NbdUri { address, export, tls, server_name, certificates })
    }
}

/// Decodes parts of `text`, which errors quote whole.
struct Decoder<'a> {
    text: &'a str,
}

impl Decoder<'_> {
    fn tcp(&self, authority: &str) -> Result<NbdAddress, UriError> {
        let uri = || self.text.to_owned();
        let no_host = || UriError::Host { uri: uri() };
        // A user name would only matter to pre-shared keys.
        if authority.contains('@') {
            return Err(UriError::User { uri: uri() });
        }
        let (host, port) = if let Some(bracketed) = authority.strip_prefix('[') {
            let (host, after) = bracketed.split_once(']').ok_or_else(no_host)?;
            if host.parse::<std::net::Ipv6Addr>().is_err() {
                return Err(no_host());
            }
            match after.strip_prefix(':') {
                Some(port) => (host.to_owned(), Some(port)),
                None if after.is_empty() => (host.to_owned(), None),
                None => return Err(UriError::Port { uri: uri(), port: after.to_owned() }),
            }
        } else {
            let (host, port) = match authority.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            };
            (self.decode(host, "host")?, port)
        };
        if host.is_empty() {
            return Err(no_host());
        }
        let port = match port {
            None | Some("") => DEFAULT_PORT,
            Some(digits) => match digits.parse::<u16>() {
                Ok(port) if port > 0 && digits.bytes().all(|byte| byte.is_ascii_digit()) => port,
                _ => return Err(UriError::Port { uri: uri(), port: digits.to_owned() }),
            },
        };
        Ok(NbdAddress::Tcp { host, port })
    }

    /// Resolves percent sequences of `part`, a piece of the text.
    fn decode(&self, part: &str, what: &'static str) -> Result<String, UriError> {
        let mut bytes = Vec::with_capacity(part.len());
        let mut rest = part.as_bytes();
        while let Some((&byte, after)) = rest.split_first() {
            rest = after;
            if byte != b'%' {
                bytes.push(byte);
                continue;
            }
            let digit = |index: usize| rest.get(index).and_then(|&digit| char::from(digit).to_digit(16));
            let (Some(high), Some(low)) = (digit(0), digit(1)) else {
                return Err(UriError::Percent { uri: self.text.to_owned(), part: part.to_owned() });
            };
            bytes.push((high << 4 | low) as u8);
            rest = &rest[2..];
        }
        match check_string(&bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(fault) => Err(UriError::Text { uri: self.text.to_owned(), part: what, fault }),
        }
    }
}

impl fmt::Display for NbdUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "nbds" } else { "nbd" };
        match &self.address {
            NbdAddress::Tcp { host, port } => {
                if host.contains(':') {
                    write!(f, "{scheme}://[{host}]")?;
                } else {
                    write!(f, "{scheme}://")?;
                    encode(host, "", f)?;
                }
                if *port != DEFAULT_PORT {
                    write!(f, ":{port}")?;
                }
                f.write_str("/")?;
                encode(&self.export, "/", f)?;
            }
            NbdAddress::Unix { path } => {
                write!(f, "{scheme}+unix:///")?;
                encode(&self.export, "/", f)?;
                f.write_str("?socket=")?;
                encode(path, "/", f)?;
            }
        }
        let mut separator = if matches!(self.address, NbdAddress::Tcp { .. }) { '?' } else { '&' };
        for (name, value) in [("tls-hostname", &self.server_name), ("tls-certificates", &self.certificates)] {
            if let Some(value) = value {
                write!(f, "{separator}{name}=")?;
                encode(value, "/", f)?;
                separator = '&';
            }
        }
        Ok(())
    }
}

/// Writes text with everything encoded but RFC 3986's unreserved characters and those in `keep`.
fn encode(text: &str, keep: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    for byte in text.bytes() {
        let character = char::from(byte);
        if byte.is_ascii_alphanumeric() || "-._~".contains(character) || keep.contains(character) {
            write!(f, "{character}")?;
        } else {
            write!(f, "%{byte:02X}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tcp(host: &str, port: u16, export: &str) -> NbdUri {
        let address = NbdAddress::Tcp { host: host.into(), port };
        NbdUri { address, export: export.into(), tls: false, server_name: None, certificates: None }
    }

    fn unix(path: &str, export: &str) -> NbdUri {
        let address = NbdAddress::Unix { path: path.into() };
        NbdUri { address, export: export.into(), tls: false, server_name: None, certificates: None }
    }

    fn secured(uri: NbdUri, server_name: Option<&str>) -> NbdUri {
        NbdUri { tls: true, server_name: server_name.map(str::to_owned), ..uri }
    }

    #[test]
    fn the_examples_of_the_uri_document_mean_what_it_says() {
        for (text, want) in [
            ("nbd://example.com:10809/export", tcp("example.com", 10809, "export")),
            ("nbd://example.com/disk", tcp("example.com", 10809, "disk")),
            ("nbd://example.com/", tcp("example.com", 10809, "")),
            ("nbd://example.com", tcp("example.com", 10809, "")),
            ("nbd://example.com//disk", tcp("example.com", 10809, "/disk")),
            ("nbd://example.com/hello%20world", tcp("example.com", 10809, "hello world")),
            ("nbd://[::1]:123/a", tcp("::1", 123, "a")),
            ("NBD://h:/x", tcp("h", 10809, "x")),
            ("nbd+unix:///export?socket=nbd.sock", unix("nbd.sock", "export")),
            ("nbds://example.com/disk", secured(tcp("example.com", 10809, "disk"), None)),
            ("nbds://10.0.0.1/?tls-hostname=store", secured(tcp("10.0.0.1", 10809, ""), Some("store"))),
            ("nbds+unix:///a?tls-hostname=h&socket=/s", secured(unix("/s", "a"), Some("h"))),
            ("nbd+unix://?socket=/run/s", unix("/run/s", "")),
            ("nbd+unix:///gr%C3%B6%c3%9fe?socket=/a%26b", unix("/a&b", "größe")),
        ] {
            assert_eq!(text.parse(), Ok(want), "{text}");
        }
    }

    #[test]
    fn every_mistake_has_its_own_error() {
        fn parse(text: &str) -> UriError {
            text.parse::<NbdUri>().expect_err(text)
        }
        for text in ["", "nbd:", "/dev/sda", "http://h/", "nbd:/h"] {
            assert!(matches!(parse(text), UriError::Scheme { .. }), "{text}");
        }
        for text in ["nbds://user@h/", "nbd://user@h/"] {
            assert!(matches!(parse(text), UriError::User { .. }), "{text}");
        }
        for text in ["nbd:///x", "nbd://:99/x", "nbd://[::1/x", "nbd://[zz]/x"] {
            assert!(matches!(parse(text), UriError::Host { .. }), "{text}");
        }
        for text in
            ["nbd://h:0/", "nbd://h:65536/", "nbd://h:+1/", "nbd://h:x/", "nbd://fe80::1/", "nbd://[::1]9/"]
        {
            assert!(matches!(parse(text), UriError::Port { .. }), "{text}");
        }
        assert!(matches!(parse("nbd+unix://host/x?socket=/s"), UriError::Authority { .. }));
        for text in ["nbd+unix:///x", "nbd+unix:///x?socket=", "nbd+unix:///x?"] {
            assert!(matches!(parse(text), UriError::Socket { .. }), "{text}");
        }
        for text in [
            "nbd+unix:///?socket=a&socket=b",
            "nbd://h/?socket=/s",
            "nbd+unix:///?sock=/s",
            "nbd://h/?tls-hostname=h",
            "nbds://h/?tls-psk-file=f",
        ] {
            assert!(matches!(parse(text), UriError::Parameter { .. }), "{text}");
        }
        assert_eq!(parse("nbd://h/a%2"), UriError::Percent { uri: "nbd://h/a%2".into(), part: "a%2".into() });
        assert_eq!(
            parse("nbd://h/%zzé"),
            UriError::Percent { uri: "nbd://h/%zzé".into(), part: "%zzé".into() }
        );
        for text in ["nbd://h/a b", "nbd://h/a#b", "nbd://h/a\n"] {
            assert!(matches!(parse(text), UriError::Character { .. }), "{text}");
        }
        let fault = |text| match parse(text) {
            UriError::Text { fault, .. } => fault,
            other => panic!("{other}"),
        };
        assert_eq!(fault("nbd://h/a%00"), StringFault::Nul);
        assert_eq!(fault("nbd+unix:///?socket=%00abstract"), StringFault::Nul);
        assert_eq!(fault("nbd://h/%ff"), StringFault::Utf8);
        assert_eq!(fault(&format!("nbd://h/{}", "x".repeat(4097))), StringFault::TooLong);
    }

    proptest! {
        #[test]
        fn what_is_printed_parses_to_the_same(host in "[a-z0-9.é-]{1,20}", port in 1u16.., export in "[^\0]{0,40}", path in "[^\0]{1,40}") {
            for uri in [tcp(&host, port, &export), tcp("fe80::1", port, &export), unix(&path, &export)] {
                prop_assert_eq!(uri.to_string().parse(), Ok(uri.clone()));
                let uri = secured(uri, Some(&host));
                prop_assert_eq!(uri.to_string().parse(), Ok(uri));
            }
        }

        #[test]
        fn no_text_panics(text in "(nbd(s|\\+unix)?://)?[\\[\\]@:/?&=%#a-f0-9é]{0,30}") {
            let _ = text.parse::<NbdUri>();
        }
    }
}
