//! The server's half of the fixed newstyle handshake: from the greeting to a chosen export.
//!
//! Invariants: an option's data is kept only up to [`OPTION_KEPT_BYTES_MAX`] and drained beyond;
//! lengths inside it are checked against what was received before anything is copied; every option
//! is answered exactly once, or the connection is closed. State from before TLS is dropped when TLS
//! starts, and bytes that arrived before it never count as protected. It must not know of requests:
//! [`Negotiated`] is all that outlives it, nor of cryptography: the driver swaps the stream.

use super::events::Fatal;
use super::export::{ExportInfo, Exports};
use super::wire::{self, Contexts, Gather, Headers, Reader, StringFault, check_string, info, option, reply};

/// Option data that is kept to be understood: two strings of the maximum length and as much again in lists.
pub(super) const OPTION_KEPT_BYTES_MAX: u32 = 16 << 10;

/// Option data that is drained unread, so that an unknown option can be refused politely. No option that
/// exists needs more; a client that announces more is not worth listening to.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;

/// Options per handshake. Clients send about five; a listing tool some per export.
pub const OPTIONS_MAX: u32 = 1024;

/// Whether one listener offers or demands TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TlsMode {
    /// There is none (NOTLS in the protocol's words).
    #[default]
    Off,
    /// Clients may have it (SELECTIVETLS, with no export that demands it).
    Optional,
    /// Nothing is told to a client, and nothing taken from it, before it (FORCEDTLS).
    Required,
}

/// State of TLS on one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tls {
    Plain(TlsMode),
    /// STARTTLS was acknowledged: received bytes belong to TLS until the driver reports that it is
    /// up.
    Starting,
    Secured,
}

/// Result of the handshake.
#[derive(Debug)]
pub(super) struct Negotiated {
    pub export: ExportInfo,
    pub headers: Headers,
    pub contexts: Contexts,
    /// The client asked for the block sizes, so that they bind it.
    pub told_block_sizes: bool,
}

/// What one call of [`Handshake::receive`] came to.
#[derive(Debug)]
pub(super) enum Progress {
    /// Nothing that the driver must know.
    Continue,
    /// An export was chosen; transmission begins with the next byte.
    Selected(Box<Negotiated>),
    /// The client said goodbye.
    Aborted,
    /// The client gets TLS; the next bytes of the stream are not for this layer.
    StartTls,
}

#[derive(Debug)]
enum State {
    ClientFlags,
    Header,
    /// Collecting `length` bytes of data.
    Data {
        option: u32,
        length: u32,
    },
    /// Discarding data, then answering with an error.
    Drain {
        option: u32,
        left: u32,
        refusal: Refusal,
    },
}

/// An error reply to an option.
#[derive(Clone, Copy, Debug)]
struct Refusal {
    kind: u32,
    message: &'static str,
}

const fn refuse(kind: u32, message: &'static str) -> Refusal {
    Refusal { kind, message }
}

impl From<StringFault> for Refusal {
    fn from(fault: StringFault) -> Refusal {
        match fault {
            StringFault::TooLong => refuse(reply::ERR_TOO_BIG, "a string is longer than 4096 bytes"),
            StringFault::Nul => refuse(reply::ERR_INVALID, "a string contains a NUL byte"),
            StringFault::Utf8 => refuse(reply::ERR_INVALID, "a string is not UTF-8"),
        }
    }
}

const MALFORMED: Refusal = refuse(reply::ERR_INVALID, "the lengths inside the option contradict its size");
const NO_EXPORT: Refusal = refuse(reply::ERR_UNKNOWN, "no export of that name");
const STOPPING: Refusal = refuse(reply::ERR_SHUTDOWN, "the server is shutting down");
const TLS_REQUIRED: Refusal =
    refuse(reply::ERR_TLS_REQD, "this server serves nothing without TLS: send STARTTLS first");
const NO_TLS: Refusal = refuse(reply::ERR_UNSUP, "this server is not configured for TLS");
const TLS_TWICE: Refusal = refuse(reply::ERR_INVALID, "the connection has TLS already");

/// State of one handshake.
#[derive(Debug)]
pub(super) struct Handshake {
    state: State,
    tls: Tls,
    header: Gather<{ wire::OPTION_HEADER_BYTES }>,
    data: Vec<u8>,
    options_seen: u32,
    fixed_newstyle: bool,
    no_zeroes: bool,
    headers: Headers,
    /// The export for which metadata contexts were selected, and which; void for any other.
    contexts_for: Option<(String, Contexts)>,
    /// The export whose block sizes the client asked for, and thus knows.
    block_size_told_for: Option<String>,
    pub stopping: bool,
}

impl Handshake {
    pub(super) fn new(tls: TlsMode) -> Handshake {
        Handshake {
            state: State::ClientFlags,
            tls: Tls::Plain(tls),
            header: Gather::new(),
            data: Vec::new(),
            options_seen: 0,
            fixed_newstyle: false,
            no_zeroes: false,
            headers: Headers::Simple,
            contexts_for: None,
            block_size_told_for: None,
            stopping: false,
        }
    }

    /// Appends the greeting.
    pub(super) fn greet(out: &mut Vec<u8>) {
        out.extend_from_slice(&wire::MAGIC_GREETING.to_be_bytes());
        out.extend_from_slice(&wire::MAGIC_OPTION.to_be_bytes());
        let flags = wire::HANDSHAKE_FIXED_NEWSTYLE | wire::HANDSHAKE_NO_ZEROES;
        out.extend_from_slice(&flags.to_be_bytes());
    }

    /// Handles the client's flags or one option, or as much of one as there is; advances `input` past it.
    pub(super) fn receive(
        &mut self,
        input: &mut &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Fatal> {
        if self.tls == Tls::Starting {
            return Err(Fatal::BytesBeforeTls);
        }
        loop {
            match &mut self.state {
                State::ClientFlags => {
                    let Some(flags) = self.header.take::<4>(input) else {
                        return Ok(Progress::Continue);
                    };
                    self.client_flags(u32::from_be_bytes(flags))?;
                    self.state = State::Header;
                    return Ok(Progress::Continue);
                }
                State::Header => {
                    let Some(bytes) = self.header.take::<{ wire::OPTION_HEADER_BYTES }>(input) else {
                        return Ok(Progress::Continue);
                    };
                    let (option, length) =
                        wire::decode_option_header(&bytes).map_err(|found| Fatal::OptionMagic { found })?;
                    self.state = self.admit(option, length)?;
                }
                State::Data { option, length } => {
                    let (option, length) = (*option, *length as usize);
                    let (front, rest) = input.split_at(input.len().min(length - self.data.len()));
                    self.data.extend_from_slice(front);
                    *input = rest;
                    if self.data.len() < length {
                        return Ok(Progress::Continue);
                    }
                    self.state = State::Header;
                    let data = std::mem::take(&mut self.data);
                    if option == option::STARTTLS {
                        return self.start_tls(!input.is_empty(), out);
                    }
                    return self.option(option, &data, exports, out);
                }
                State::Drain { option, left, refusal } => {
                    let count = input.len().min(*left as usize);
                    *input = &input[count..];
                    *left -= count as u32;
                    if *left > 0 {
                        return Ok(Progress::Continue);
                    }
                    append_refusal(*option, *refusal, out);
                    self.state = State::Header;
                    return Ok(Progress::Continue);
                }
            }
        }
    }

    fn client_flags(&mut self, flags: u32) -> Result<(), Fatal> {
        let fixed = u32::from(wire::HANDSHAKE_FIXED_NEWSTYLE);
        let no_zeroes = u32::from(wire::HANDSHAKE_NO_ZEROES);
        if flags & !(fixed | no_zeroes) != 0 {
            return Err(Fatal::ClientFlags { flags });
        }
        self.fixed_newstyle = flags & fixed != 0;
        self.no_zeroes = flags & no_zeroes != 0;
        Ok(())
    }

    /// Decides from an option's header how its data is handled.
    fn admit(&mut self, option: u32, length: u32) -> Result<State, Fatal> {
        self.options_seen += 1;
        if self.options_seen > OPTIONS_MAX {
            return Err(Fatal::TooManyOptions { limit: OPTIONS_MAX });
        }
        let locked = self.tls == Tls::Plain(TlsMode::Required);
        if option == option::EXPORT_NAME {
            if locked {
                return Err(Fatal::TlsRequired);
            }
            // The one option that has no error reply: what cannot be granted ends the connection.
            if length as usize > wire::STRING_BYTES_MAX {
                return Err(Fatal::ExportName { fault: StringFault::TooLong });
            }
            return Ok(State::Data { option, length });
        }
        if !self.fixed_newstyle {
            return Err(Fatal::NotFixedNewstyle { option });
        }
        if length > OPTION_BYTES_MAX {
            return Err(Fatal::OptionLength { option, length, limit: OPTION_BYTES_MAX });
        }
        let drain = |kind, message| State::Drain { option, left: length, refusal: refuse(kind, message) };
        let refused = |Refusal { kind, message }| drain(kind, message);
        Ok(match option {
            option::STARTTLS => match self.tls {
                Tls::Plain(TlsMode::Off) => refused(NO_TLS),
                Tls::Secured | Tls::Starting => refused(TLS_TWICE),
                Tls::Plain(_) if length > 0 => drain(reply::ERR_INVALID, "the option takes no data"),
                Tls::Plain(_) if self.stopping => refused(STOPPING),
                Tls::Plain(_) => State::Data { option, length },
            },
            option::ABORT if locked && length <= OPTION_KEPT_BYTES_MAX => State::Data { option, length },
            _ if locked => refused(TLS_REQUIRED),
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS if length > 0 => {
                drain(reply::ERR_INVALID, "the option takes no data")
            }
            option::ABORT
            | option::LIST
            | option::STRUCTURED_REPLY
            | option::EXTENDED_HEADERS
            | option::INFO
            | option::GO
            | option::LIST_META_CONTEXT
            | option::SET_META_CONTEXT => {
                if option == option::SET_META_CONTEXT {
                    // The option replaces what was selected before even if it fails.
                    self.contexts_for = None;
                }
                if length > OPTION_KEPT_BYTES_MAX {
                    drain(reply::ERR_TOO_BIG, "the option has more than 16 KiB of data")
                } else {
                    State::Data { option, length }
                }
            }
            _ => drain(reply::ERR_UNSUP, "the option is not supported"),
        })
    }

    /// Grants STARTTLS and drops everything received in the clear, because an attacker on the network could
    /// have sent it. `followed`: whether bytes came right behind the option, which an honest client sends
    /// only after the answer.
    fn start_tls(&mut self, followed: bool, out: &mut Vec<u8>) -> Result<Progress, Fatal> {
        if followed {
            return Err(Fatal::BytesBeforeTls);
        }
        let kept = Handshake {
            options_seen: self.options_seen,
            fixed_newstyle: self.fixed_newstyle,
            no_zeroes: self.no_zeroes,
            stopping: self.stopping,
            ..Handshake::new(TlsMode::Off)
        };
        *self = Handshake { state: State::Header, tls: Tls::Starting, ..kept };
        wire::encode_option_reply(option::STARTTLS, reply::ACK, &[], out);
        Ok(Progress::StartTls)
    }

    /// Bytes received from now on came through TLS.
    pub(super) fn tls_started(&mut self) {
        assert!(self.tls == Tls::Starting, "TLS that nobody asked for");
        self.tls = Tls::Secured;
    }

    /// Executes an option whose data is whole.
    fn option(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Fatal> {
        let refusal = match option {
            option::EXPORT_NAME => return self.export_name(data, exports, out),
            option::ABORT => {
                wire::encode_option_reply(option, reply::ACK, &[], out);
                return Ok(Progress::Aborted);
            }
            _ if self.stopping => Err(STOPPING),
            option::LIST => {
                list(exports, out);
                Ok(())
            }
            // They take precedence, and cannot be given up again.
            option::STRUCTURED_REPLY if self.headers == Headers::Extended => {
                Err(refuse(reply::ERR_EXT_HEADER_REQD, "extended headers are negotiated already"))
            }
            option::STRUCTURED_REPLY => {
                self.headers = Headers::Structured;
                Ok(())
            }
            option::EXTENDED_HEADERS if self.headers == Headers::Extended => {
                Err(refuse(reply::ERR_INVALID, "extended headers are negotiated already"))
            }
            option::EXTENDED_HEADERS => {
                self.headers = Headers::Extended;
                Ok(())
            }
            option::INFO | option::GO => match self.info(option, data, exports, out) {
                Ok(export) if option == option::GO => {
                    wire::encode_option_reply(option, reply::ACK, &[], out);
                    return Ok(self.select(export));
                }
                Ok(_) => Ok(()),
                Err(refusal) => Err(refusal),
            },
            _ => self.meta_context(option, data, exports, out),
        };
        match refusal {
            Ok(()) => wire::encode_option_reply(option, reply::ACK, &[], out),
            Err(refusal) => append_refusal(option, refusal, out),
        }
        Ok(Progress::Continue)
    }

    fn export_name(
        &mut self,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<Progress, Fatal> {
        let name = check_string(data).map_err(|fault| Fatal::ExportName { fault })?;
        if self.stopping {
            return Err(Fatal::Stopping);
        }
        if self.headers == Headers::Extended {
            return Err(Fatal::ExportNameAfterExtendedHeaders);
        }
        let export = find(exports, name).ok_or_else(|| Fatal::UnknownExport { name: name.to_owned() })?;
        out.extend_from_slice(&export.size.to_be_bytes());
        out.extend_from_slice(&export.transmission_flags(self.headers, false).to_be_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; wire::EXPORT_NAME_PADDING_BYTES]);
        }
        Ok(self.select(export))
    }

    /// INFO and GO up to, but without, the final acknowledgement.
    fn info(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<ExportInfo, Refusal> {
        let mut reader = Reader(data);
        let name = counted_string(&mut reader)?;
        let count = reader.u16().ok_or(MALFORMED)?;
        if reader.0.len() != usize::from(count) * 2 {
            return Err(MALFORMED);
        }
        let mut asked = [false; 4];
        while let Some(kind) = reader.u16() {
            // Kinds that a later protocol may define are ignored, as it demands.
            if let Some(slot) = asked.get_mut(usize::from(kind)) {
                *slot = true;
            }
        }
        let export = find(exports, name).ok_or(NO_EXPORT)?;
        if asked[usize::from(info::BLOCK_SIZE)] {
            self.block_size_told_for = Some(export.name.clone());
        }

        // Before anything is chosen, INFO reports what would be available.
        let filter = option == option::INFO || !self.contexts_of(&export).is_empty();
        let flags = export.transmission_flags(self.headers, filter);
        let mut put = |kind: u16, parts: [&[u8]; 3]| {
            let [a, b, c] = parts;
            wire::encode_option_reply(option, reply::INFO, &[&kind.to_be_bytes(), a, b, c], out);
        };
        put(info::EXPORT, [&export.size.to_be_bytes(), &flags.to_be_bytes(), &[]]);
        if asked[usize::from(info::NAME)] {
            put(info::NAME, [export.name.as_bytes(), &[], &[]]);
        }
        if asked[usize::from(info::DESCRIPTION)] && !export.description.is_empty() {
            put(info::DESCRIPTION, [export.description.as_bytes(), &[], &[]]);
        }
        if asked[usize::from(info::BLOCK_SIZE)] {
            let (min, preferred, max) = (export.block_min, export.block_preferred, export.block_max);
            put(info::BLOCK_SIZE, [&min.to_be_bytes(), &preferred.to_be_bytes(), &max.to_be_bytes()]);
        }
        Ok(export)
    }

    /// LIST_META_CONTEXT and SET_META_CONTEXT up to, but without, the final acknowledgement.
    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        exports: &dyn Exports,
        out: &mut Vec<u8>,
    ) -> Result<(), Refusal> {
        if self.headers == Headers::Simple {
            return Err(refuse(reply::ERR_INVALID, "negotiate structured replies or extended headers first"));
        }
        let setting = option == option::SET_META_CONTEXT;
        let mut reader = Reader(data);
        let name = counted_string(&mut reader)?;
        let count = reader.u32().ok_or(MALFORMED)?;
        // No queries at all select everything when listing, nothing when setting. A namespace lists its
        // contexts.
        let everything = count == 0 && !setting;
        let mut contexts = Contexts { allocation: everything, health: everything };
        for _ in 0..count {
            match counted_string(&mut reader)? {
                wire::BASE_ALLOCATION => contexts.allocation = true,
                wire::CALPE_HEALTH => contexts.health = true,
                "base:" if !setting => contexts.allocation = true,
                "calpe:" if !setting => contexts.health = true,
                _ => {}
            }
        }
        if !reader.is_empty() {
            return Err(MALFORMED);
        }
        let export = find(exports, name).ok_or(NO_EXPORT)?;
        for (chosen, id, context) in [
            (contexts.allocation, BASE_ALLOCATION_ID, wire::BASE_ALLOCATION),
            (contexts.health, CALPE_HEALTH_ID, wire::CALPE_HEALTH),
        ] {
            if chosen {
                let id = if setting { id } else { 0 };
                let parts: [&[u8]; 2] = [&id.to_be_bytes(), context.as_bytes()];
                wire::encode_option_reply(option, reply::META_CONTEXT, &parts, out);
            }
        }
        if setting {
            self.contexts_for = Some((export.name, contexts));
        }
        Ok(())
    }

    /// The contexts selected for an export.
    fn contexts_of(&self, export: &ExportInfo) -> Contexts {
        match &self.contexts_for {
            Some((name, contexts)) if *name == export.name => *contexts,
            _ => Contexts::default(),
        }
    }

    fn select(&mut self, export: ExportInfo) -> Progress {
        let contexts = self.contexts_of(&export);
        let told_block_sizes = self.block_size_told_for.as_ref() == Some(&export.name);
        Progress::Selected(Box::new(Negotiated { export, headers: self.headers, contexts, told_block_sizes }))
    }
}

/// The identifiers under which contexts travel after SET_META_CONTEXT.
pub(super) const BASE_ALLOCATION_ID: u32 = 1;
pub(super) const CALPE_HEALTH_ID: u32 = 2;

/// An export that cannot be described by the protocol's rules counts as absent rather than mislead a client.
fn find(exports: &dyn Exports, name: &str) -> Option<ExportInfo> {
    exports.find(name).filter(|export| export.check().is_ok())
}

fn list(exports: &dyn Exports, out: &mut Vec<u8>) {
    for export in exports.list().iter().filter(|export| export.check().is_ok()) {
        let name = export.name.as_bytes();
        let length = u32::try_from(name.len()).expect("a checked name has at most 4096 bytes");
        let parts = [&length.to_be_bytes(), name, export.description.as_bytes()];
        wire::encode_option_reply(option::LIST, reply::SERVER, &parts, out);
    }
}

fn counted_string<'a>(reader: &mut Reader<'a>) -> Result<&'a str, Refusal> {
    let bytes = reader.counted().ok_or(MALFORMED)?;
    Ok(check_string(bytes)?)
}

fn append_refusal(option: u32, refusal: Refusal, out: &mut Vec<u8>) {
    wire::encode_option_reply(option, refusal.kind, &[refusal.message.as_bytes()], out);
}
