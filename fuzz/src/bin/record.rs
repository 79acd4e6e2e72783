//! Records what NBD clients and servers say to each other, as inputs of the targets `nbd_server` and
//! `nbd_client`. scripts/record-seeds runs it.
//!
//!     record proxy LISTEN SERVER FOLDER NAME    between clients and a server, until killed; a file for each direction
//!                                               of each connection: FOLDER/nbd_server/NAME-N, FOLDER/nbd_client/NAME-N
//!     record client SERVER EXPORT FOLDER NAME   the conversation of the fuzz target's own client with a server;
//!                                               the server's side alone is kept
//!
//! An input starts with the size of pieces into which its stream is cut, 0 for one; see the targets.

use calpe_core::nbd::{ClientConnection, ClientEvent, ClientOptions, Command};
use calpe_core::units::Timestamp;
use calpe_fuzz::nbd::requests;
use calpe_fuzz::{RECORDED_BYTES_MAX, recording};
use std::error::Error;
use std::fs;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["proxy", listen, server, folder, name] => proxy(listen, server, Path::new(folder), name),
        ["client", server, export, folder, name] => client(server, export, Path::new(folder), name),
        _ => {
            Err("usage: record proxy LISTEN SERVER FOLDER NAME | record client SERVER EXPORT FOLDER NAME"
                .into())
        }
    }
}

fn proxy(listen: &str, server: &str, folder: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let listener = UnixListener::bind(listen)?;
    for (number, client) in listener.incoming().enumerate() {
        let (client, server) = (client?, UnixStream::connect(server)?);
        let file = |target: &str| folder.join(target).join(format!("{name}-{number}"));
        pass_on(client.try_clone()?, server.try_clone()?, file("nbd_server"));
        pass_on(server, client, file("nbd_client"));
    }
    Ok(())
}

/// Carries one direction on a thread of its own and writes down how it began.
fn pass_on(mut from: UnixStream, mut to: UnixStream, file: PathBuf) {
    std::thread::spawn(move || {
        let mut seen = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            let room = RECORDED_BYTES_MAX.saturating_sub(seen.len());
            seen.extend_from_slice(&buffer[..count.min(room)]);
            // Written down as it comes: the proxy ends by being killed.
            if room > 0
                && let Err(error) = keep(&file, &seen)
            {
                eprintln!("{}: {error}", file.display());
            }
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        // Either end may be gone already.
        let _ = to.shutdown(Shutdown::Write);
    });
}

fn client(server: &str, export: &str, folder: &Path, name: &str) -> Result<(), Box<dyn Error>> {
    let mut stream = UnixStream::connect(server)?;
    let mut connection = ClientConnection::new(ClientOptions::for_export(export)?, Timestamp(0))?;
    let (mut seen, mut out) = (Vec::new(), Vec::new());
    let (mut taking, mut missing) = (0, None::<usize>);
    while missing != Some(0) {
        let mut buffer = vec![0; 64 << 10];
        let count = stream.read(&mut buffer)?;
        if count == 0 {
            return Err("the server closed the connection".into());
        }
        let mut rest = &buffer[..count];
        seen.extend_from_slice(rest);
        while !rest.is_empty() {
            if taking > 0 {
                let here = rest.len().min(taking);
                rest = &rest[here..];
                taking -= here;
                if taking == 0 {
                    connection.payload_taken()?;
                }
            } else {
                let taken = connection.receive(rest, &mut out)?;
                rest = &rest[taken..];
            }
            while let Some(event) = connection.poll_event() {
                match event {
                    ClientEvent::Ready => {
                        let mut sent = 0;
                        for request in requests() {
                            if connection.submit(&request, &mut out).is_ok() {
                                sent += 1;
                                if request.command == Command::Write {
                                    out.extend([9; 512]);
                                }
                            }
                        }
                        missing = Some(sent);
                    }
                    ClientEvent::Data { length, .. } => taking = length as usize,
                    ClientEvent::Done { .. } => missing = missing.map(|count| count - 1),
                    _ => {}
                }
            }
        }
        stream.write_all(&out)?;
        out.clear();
    }
    seen.truncate(RECORDED_BYTES_MAX);
    keep(&folder.join("nbd_client").join(name), &seen)?;
    Ok(())
}

fn keep(file: &Path, stream: &[u8]) -> std::io::Result<()> {
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(file, recording(stream))
}
