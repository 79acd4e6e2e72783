//! The server's side of a device: finds the export, opens several connections to it, and checks
//! that it is the right one. Must not know the kernel's driver.

use super::AttachError;
use super::dial::{Address, DialError, Dialled};
use crate::control::ArrayReport;
use calpe_core::nbd::{NbdAddress, NbdUri, RemoteExport};
use std::os::fd::OwnedFd;
use uuid::Uuid;

/// Prefix of all our backend identifiers in sysfs.
pub(super) const PREFIX: &str = "calpe:";

/// The block sizes that the driver takes, in bytes.
const BLOCK_BYTES_MIN: u64 = 512;
const BLOCK_BYTES_MAX: u64 = 4096;

/// Flags of exports, numbered as in the kernel's linux/nbd.h and in the protocol.
pub(super) mod flag {
    pub(crate) const HAS_FLAGS: u64 = 1 << 0;
    pub(crate) const READ_ONLY: u64 = 1 << 1;
    pub(crate) const FLUSH: u64 = 1 << 2;
    pub(crate) const FUA: u64 = 1 << 3;
    pub(crate) const ROTATIONAL: u64 = 1 << 4;
    pub(crate) const TRIM: u64 = 1 << 5;
    pub(crate) const WRITE_ZEROES: u64 = 1 << 6;
    pub(crate) const MULTI_CONN: u64 = 1 << 8;
}

/// Why a daemon cannot say where an array is served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LookupError {
    /// It cannot be asked.
    #[error("{0}")]
    Daemon(String),
    /// It does not serve the array.
    #[error("{0}")]
    NoArray(String),
}

/// Looks up arrays.
pub(crate) trait Directory {
    /// The array of that name or uuid.
    ///
    /// # Errors
    /// When no daemon answers, or it has no such array.
    fn find(&mut self, array: &str) -> Result<ArrayReport, LookupError>;
}

/// What is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// An array of a daemon on this host, by name or uuid.
    Array(String),
    /// Any server's export.
    Uri(NbdUri),
}

/// An export, found.
#[derive(Clone, Debug)]
pub(super) struct Server {
    /// As users call it.
    pub name: String,
    /// The backend that the kernel is given, and shows.
    pub backend: String,
    /// The array's identity, if it is an array of a daemon that can be asked.
    array: Option<Uuid>,
    /// The array's size in bytes, if it is an array of a daemon that can be asked.
    bytes: Option<u64>,
    /// Members whose transfers go through this host's page cache.
    pub cached: Vec<String>,
    address: Address,
    /// Seconds after which the kernel gives a connection up.
    timeout_s: u64,
}

/// An export, connected to.
#[derive(Debug)]
pub(super) struct Line {
    pub sockets: Vec<OwnedFd>,
    pub export: RemoteExport,
}

impl Server {
    /// Finds what is named.
    pub(super) fn find(
        target: &Target,
        timeout_s: u64,
        directory: &mut dyn Directory,
    ) -> Result<Server, AttachError> {
        match target {
            Target::Array(name) => Server::of(&directory.find(name)?, timeout_s),
            Target::Uri(uri) => Ok(Server {
                name: uri.to_string(),
                backend: format!("{PREFIX}{uri}"),
                array: None,
                bytes: None,
                cached: Vec::new(),
                address: Address::resolve(uri)?,
                timeout_s,
            }),
        }
    }

    /// Connects again: to the same address, or else, by its identity, to wherever the daemon serves
    /// it now. A daemon that was upgraded may not understand our questions any more, but its
    /// exports still say which array they are.
    pub(super) fn again(
        &self,
        connections: u32,
        directory: &mut dyn Directory,
    ) -> Result<(Server, Line), AttachError> {
        let there = match self.connect(connections) {
            Ok(line) => return Ok((self.clone(), line)),
            Err(error) => error,
        };
        let Some(server) = self.array.and_then(|uuid| {
            let report = directory.find(&uuid.to_string()).ok()?;
            Server::of(&report, self.timeout_s).ok()
        }) else {
            return Err(there);
        };
        let line = server.connect(connections)?;
        Ok((server, line))
    }

    fn of(report: &ArrayReport, timeout_s: u64) -> Result<Server, AttachError> {
        let uris: Vec<NbdUri> = report.uris.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
        // A unix socket costs less than TCP, and cannot belong to another host.
        let uri = uris.iter().min_by_key(|uri| matches!(uri.address, NbdAddress::Tcp { .. }));
        let uri = uri.ok_or_else(|| AttachError::NoAddress { array: report.name.clone() })?;
        Ok(Server {
            name: report.name.clone(),
            backend: format!("{PREFIX}{}/{}", report.uuid, report.name),
            array: Some(report.uuid),
            bytes: Some(report.volume.bytes),
            cached: report.members.iter().filter(|m| m.cached).map(|m| m.name.clone()).collect(),
            address: Address::resolve(uri)?,
            timeout_s,
        })
    }

    /// Opens `connections` connections to it.
    pub(super) fn connect(&self, connections: u32) -> Result<Line, AttachError> {
        let Dialled { socket, export } = self.address.dial(self.timeout_s)?;
        self.check(&export)?;
        let mut line = Line { sockets: vec![socket], export };
        for _ in 1..connections {
            let next = self.address.dial(self.timeout_s)?;
            if next.export != line.export {
                return Err(self.stranger("its connections describe different exports".into()));
            }
            line.sockets.push(next.socket);
        }
        Ok(line)
    }

    /// Whether an export is the array that was found.
    fn check(&self, export: &RemoteExport) -> Result<(), AttachError> {
        if let Some(uuid) = self.array
            && !export.description.contains(&uuid.to_string())
        {
            return Err(self.stranger(format!("the export is not array {uuid}: '{}'", export.description)));
        }
        if let Some(bytes) = self.bytes
            && bytes != export.size
        {
            return Err(self.stranger(format!("the export has {} bytes, the array {bytes}", export.size)));
        }
        Ok(())
    }

    pub(super) fn stranger(&self, differs: String) -> AttachError {
        AttachError::Stranger { what: self.name.clone(), differs }
    }
}

/// The array that an export says it is, if any; also works for a daemon that cannot be asked.
pub(super) fn identity(export: &RemoteExport) -> Option<Uuid> {
    export.description.split([' ', ',']).find_map(|word| Uuid::try_parse(word).ok())
}

/// The block size for the driver: the requested one, or the smallest that the export allows.
pub(super) fn block_size(what: &str, export: &RemoteExport, wished: Option<u64>) -> Result<u64, AttachError> {
    let unfit = |why: String| Err(AttachError::Unfit { what: what.to_owned(), why });
    let least = u64::from(export.block_min).max(BLOCK_BYTES_MIN);
    let block = wished.unwrap_or(least);
    if !block.is_power_of_two() || !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block) {
        return unfit(format!(
            "blocks of {block} bytes; the kernel takes powers of two from {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}"
        ));
    }
    if block < least {
        return unfit(format!("blocks of {block} bytes; the export demands {least}"));
    }
    if export.size == 0 || !export.size.is_multiple_of(block) {
        return unfit(format!("{} bytes are not a whole number of blocks of {block}", export.size));
    }
    Ok(block)
}

/// The flags of an export for the driver.
pub(super) fn server_flags(export: &RemoteExport, read_only: bool) -> u64 {
    let writable = !read_only && !export.read_only;
    [
        (true, flag::HAS_FLAGS),
        (!writable, flag::READ_ONLY),
        (export.flush, flag::FLUSH),
        (export.fua, flag::FUA),
        (export.rotational, flag::ROTATIONAL),
        (export.trim && writable, flag::TRIM),
        (export.write_zeroes && writable, flag::WRITE_ZEROES),
        (export.multi_conn, flag::MULTI_CONN),
    ]
    .into_iter()
    .fold(0, |flags, (set, flag)| if set { flags | flag } else { flags })
}

/// Whether an attempt failed because no server is there yet, rather than because a wrong one is.
pub(super) fn may_come(error: &AttachError) -> bool {
    match error {
        AttachError::Lookup(_) | AttachError::NoAddress { .. } => true,
        AttachError::Dial(DialError::Chatter { .. }) => false,
        AttachError::Dial(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn export() -> RemoteExport {
        RemoteExport {
            size: 1 << 20,
            flush: true,
            fua: true,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            multi_conn: true,
            cache: true,
            block_min: 512,
            ..RemoteExport::default()
        }
    }

    #[test]
    fn the_driver_is_told_what_the_export_can_do_and_nothing_it_does_not_know() {
        assert_eq!(server_flags(&export(), false), 0b1_0110_1101);
        assert_eq!(server_flags(&export(), true), 0b1_0000_1111);
        let spinning = RemoteExport { rotational: true, read_only: true, ..export() };
        assert_eq!(server_flags(&spinning, false), 0b1_0001_1111);
        assert_eq!(server_flags(&RemoteExport::default(), false), 1);
    }

    #[test]
    fn an_export_of_an_array_is_known_by_what_it_says() {
        let uuid = Uuid::from_u128(0x1234_5678);
        let says = |description: String| RemoteExport { description, ..export() };
        assert_eq!(identity(&says(format!("Calpe array 4+2, {uuid}"))), Some(uuid));
        assert_eq!(identity(&says("nbdkit file".into())), None);
    }

    #[test]
    fn flags_are_those_of_the_kernels_header() {
        let path = "/usr/include/linux/nbd.h";
        let Ok(header) = std::fs::read_to_string(path) else {
            eprintln!("{path} is not there (package linux-libc-dev): not compared");
            return;
        };
        for (name, value) in [
            ("NBD_FLAG_HAS_FLAGS", flag::HAS_FLAGS),
            ("NBD_FLAG_READ_ONLY", flag::READ_ONLY),
            ("NBD_FLAG_SEND_FLUSH", flag::FLUSH),
            ("NBD_FLAG_SEND_FUA", flag::FUA),
            ("NBD_FLAG_SEND_TRIM", flag::TRIM),
            ("NBD_FLAG_CAN_MULTI_CONN", flag::MULTI_CONN),
        ] {
            let line = header.lines().find(|line| line.split_whitespace().nth(1) == Some(name)).unwrap();
            assert!(line.contains(&format!("(1 << {})", value.trailing_zeros())), "{line}");
        }
    }

    #[test]
    fn block_sizes_keep_to_what_the_kernel_and_the_export_take() {
        let size = |export: &RemoteExport, wished| block_size("x", export, wished).map_err(|e| e.to_string());
        assert_eq!(size(&export(), None), Ok(512));
        assert_eq!(size(&export(), Some(4096)), Ok(4096));
        let large = RemoteExport { block_min: 4096, ..export() };
        assert_eq!(size(&large, None), Ok(4096));
        assert!(size(&large, Some(512)).unwrap_err().contains("demands 4096"));
        assert!(size(&RemoteExport { block_min: 8192, ..export() }, None).is_err());
        assert!(size(&export(), Some(1000)).is_err());
        assert!(size(&RemoteExport { size: 512 * 9, ..export() }, Some(4096)).is_err());
        assert!(size(&RemoteExport { size: 0, ..export() }, None).is_err());
        assert_eq!(size(&RemoteExport { block_min: 1, ..export() }, None), Ok(512));
    }
}
