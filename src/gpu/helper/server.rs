//! The helper itself: opens a device for its daemon and puts batches into it until the daemon ends, tells it
//! to, or the device fails. A failure is a message and the end of the process: a new one is clean.
//!
//! Invariants: request memory is mapped to be read; every batch that was ordered is answered once, or the
//! process ends. Must not know what batches are for.
#![allow(unsafe_code)] // hands addresses to a device; the block argues for itself

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use calpe_core::block_io::{Access, Pool, SharedMemory};
use calpe_host::polling;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::exchange::{Exchange, Layout};
use super::link::{Outcome, Word, drill_in, note_for};
use super::messages::{self, Order, Received, Reply};
use super::parcel::{self, Parcel, Transforms};
use super::ring::{Pusher, Taker};
use super::sandbox;
use crate::cuda::{CudaDriver, Tuning};
use crate::device::{Device, DeviceError, Driver, HostRange, Work};

/// Pinned bytes for memory that the device does not know: all that it gets it knows.
const STAGING_BYTES: usize = 1 << 20;

/// Helps the daemon `daemon`, whose socket is standard input, to the end of this process.
pub fn serve(daemon: u32) -> ! {
    let code = match sandbox::enter(daemon).and_then(|()| help()) {
        Ok(()) => 0,
        Err(error) => {
            tracing::debug!(%error, "this helper ends");
            1
        }
    };
    sandbox::leave(code)
}

/// What devices there are here.
fn local(layout: Option<Layout>) -> Arc<dyn Driver> {
    #[cfg(debug_assertions)]
    if let Some(driver) = super::drill::driver() {
        return driver;
    }
    let mut tuning = Tuning { staging_bytes: STAGING_BYTES, ..Tuning::default() };
    if let Some(Layout { slots, slot_bytes }) = layout {
        (tuning.slots, tuning.slot_bytes_max) = (slots, slot_bytes);
    }
    Arc::new(CudaDriver::new(tuning))
}

fn help() -> io::Result<()> {
    let socket = io::stdin().as_fd().try_clone_to_owned()?;
    loop {
        wait(&mut [PollFd::new(&socket, PollFlags::IN)])?;
        match messages::receive(&socket)? {
            Received::Nothing => {}
            Received::End => return Ok(()),
            Received::Message(Order::List, _) => {
                let devices = local(None).devices().map_err(|error| error.to_string());
                messages::send(socket.as_fd(), &Reply::Devices(devices), &[])?;
            }
            Received::Message(Order::Open { index, layout, memories }, descriptors) => {
                let failed = match Server::open(&socket, index, layout, &memories, descriptors) {
                    // Never closed: a device that has failed may hang when it is.
                    Ok(server) => match ManuallyDrop::new(server).run() {
                        Ok(()) => return Ok(()),
                        Err(reason) => reason,
                    },
                    Err(reason) => reason,
                };
                messages::send(socket.as_fd(), &Reply::Failed(failed), &[])?;
                return Err(io::Error::other("the device has failed"));
            }
        }
    }
}

fn wait(waits: &mut [PollFd<'_>]) -> io::Result<()> {
    loop {
        match poll(waits, None) {
            Ok(_) => return Ok(()),
            Err(error) if polling::survives(error.raw_os_error(), "a GPU helper") => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A device that is served. Errors are why it cannot be, in words for the daemon's events.
struct Server {
    socket: OwnedFd,
    driver: Arc<dyn Driver>,
    device: Box<dyn Device>,
    exchange: Exchange,
    memories: Vec<Pool>,
    transforms: Transforms,
    orders: (OwnedFd, Taker),
    answers: (OwnedFd, Pusher),
    /// The slots whose batches have ended, and the bell that their end rings.
    ended: (Sender<usize>, Receiver<usize>),
    bell: Arc<OwnedFd>,
    /// The number of the batch in each slot.
    serials: Vec<u64>,
}

impl Server {
    fn open(
        socket: &OwnedFd,
        index: usize,
        layout: Layout,
        memories: &[usize],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Server, String> {
        let failed = |error: io::Error| format!("its helper cannot begin: {error}");
        let mut descriptors = descriptors.into_iter();
        let (Some(exchange), Some(orders), Some(answers)) =
            (descriptors.next(), descriptors.next(), descriptors.next())
        else {
            return Err("its helper was given too little".to_owned());
        };
        let driver = local(Some(layout));
        // Where the device takes only what this process may write, it may until the device has it.
        let read_only = driver.takes_read_only(index);
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let map = |(file, &bytes)| SharedMemory::map(file, bytes, access).map(Pool::of_another);
        let memories: Vec<Pool> =
            descriptors.zip(memories).map(map).collect::<io::Result<_>>().map_err(failed)?;
        let exchange = Exchange::map(exchange, layout).map_err(failed)?;
        let mut known = memories.clone();
        known.push(exchange.pool().clone());
        let device = driver.open(index, &known).map_err(|error| error.to_string())?;
        let shared = memories.iter().filter_map(Pool::shared_memory);
        shared.filter(|_| !read_only).try_for_each(SharedMemory::make_read_only).map_err(failed)?;
        let slots = device.slots().min(layout.slots);
        let reply = Reply::Opened {
            info: device.info().clone(),
            slots,
            slot_bytes: device.slot_bytes().min(layout.slot_bytes),
        };
        messages::send(socket.as_fd(), &reply, &[]).map_err(failed)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Server {
            socket: socket.try_clone().map_err(failed)?,
            driver,
            device,
            exchange,
            memories,
            transforms: Transforms::default(),
            orders: (orders, Taker::default()),
            answers: (answers, Pusher::default()),
            ended: channel(),
            bell: Arc::new(bell.map_err(|error| failed(error.into()))?),
            serials: vec![0; slots],
        })
    }

    /// Until the daemon ends, or something fails.
    fn run(&mut self) -> Result<(), String> {
        loop {
            let (socket, orders, bell) = (&self.socket, &self.orders.0, &*self.bell);
            let mut waits = [socket, orders, bell].map(|waited| PollFd::new(waited, PollFlags::IN));
            wait(&mut waits).map_err(|error| format!("its helper cannot wait: {error}"))?;
            let [message, ordered, ended] = waits.map(|waited| !waited.revents().is_empty());
            if message {
                match messages::receive::<Order>(&self.socket) {
                    Ok(Received::Nothing) => {}
                    Ok(Received::End) | Err(_) => return Ok(()),
                    Ok(Received::Message(..)) => return Err("its helper was asked too much".to_owned()),
                }
            }
            if ended {
                clear(&self.bell);
                while let Ok(slot) = self.ended.1.try_recv() {
                    self.finish(slot)?;
                }
            }
            if ordered {
                clear(&self.orders.0);
                while let Some(word) = self.order()? {
                    self.start(word)?;
                }
            }
        }
    }

    fn order(&mut self) -> Result<Option<Word>, String> {
        let word = self.orders.1.take(&self.exchange.orders());
        Ok(word.map_err(|_| "its orders came to more than there can be")?.map(Word::unpack))
    }

    fn start(&mut self, word: Word) -> Result<(), String> {
        #[cfg(debug_assertions)]
        if let Some(deed) = super::drill::deed() {
            self.carry_out(deed, word);
            return Ok(());
        }
        let Word { slot, note, serial } = word;
        if slot >= self.serials.len() {
            return Err(format!("its helper was given a batch for slot {slot}"));
        }
        let work = self.work(slot).ok_or("its helper was given a batch that is none")?;
        if let Some(drill) = drill_in(note) {
            self.driver.drill(drill);
        }
        self.serials[slot] = serial;
        let (ended, bell) = (self.ended.0.clone(), Arc::clone(&self.bell));
        let wake = Box::new(move || {
            // The loop outlives its device.
            let _ = ended.send(slot);
            ring(&bell);
        });
        // SAFETY: all ranges lie in mappings of this process, which stay to its end. Inputs are unchanged
        // while the daemon waits for the batch; when it does not any more, they may be anything, and nobody
        // wants the result. Outputs lie in the slot, which nobody else uses until it is answered.
        match unsafe { self.device.start(slot, work, wake) } {
            Ok(()) => Ok(()),
            Err(DeviceError::Unsupported(_)) => {
                self.answer(slot, Outcome::Refused);
                Ok(())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// The work of the parcel in a slot, with addresses of this process.
    fn work(&mut self, slot: usize) -> Option<Work> {
        let slot_bytes = self.exchange.layout().slot_bytes;
        let mut lengths: Vec<usize> = self.memories.iter().map(|memory| memory.slab().1).collect();
        lengths.push(slot_bytes);
        let bytes = self.exchange.parcel(slot);
        let parcel = parcel::read(&bytes, &lengths, slot_bytes, &mut self.transforms)?;
        let keep = parcel.keep;
        let Parcel { transform, hash, columns, column_bytes, inputs, .. } = parcel;
        let place = |memory: usize, at: usize, bytes: usize| -> NonNull<u8> {
            match self.memories.get(memory) {
                // SAFETY: the range lies in the memory, as was checked when it was read.
                Some(memory) => unsafe { memory.slab().0.add(at) },
                None => self.exchange.data(slot, at, bytes),
            }
        };
        let inputs = inputs.into_iter().map(|piece| HostRange {
            column: piece.column,
            offset: piece.offset,
            start: place(piece.memory, piece.at, piece.bytes),
            bytes: piece.bytes,
        });
        let inputs = inputs.collect();
        let kept = if keep { transform.as_ref().map_or(0, |transform| transform.outputs()) } else { 0 };
        let output = |column| {
            let start = self.exchange.data(slot, column * column_bytes, column_bytes);
            HostRange { column, offset: 0, start, bytes: column_bytes }
        };
        Some(Work {
            transform,
            hash,
            columns,
            column_bytes,
            inputs,
            outputs: (0..kept).map(output).collect(),
        })
    }

    fn finish(&mut self, slot: usize) -> Result<(), String> {
        match self.device.finish(slot) {
            Ok(digests) => {
                // SAFETY: the slot's data are this process's until the answer.
                unsafe { self.device.deliver(slot) };
                self.exchange.put_digests(slot, &digests);
                self.answer(slot, Outcome::Done);
                Ok(())
            }
            Err(DeviceError::Unsupported(_)) => {
                self.answer(slot, Outcome::Refused);
                Ok(())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    fn answer(&mut self, slot: usize, outcome: Outcome) {
        self.push(Word { slot, note: note_for(outcome), serial: self.serials[slot] }.pack());
    }

    /// Fails as a test wants it.
    #[cfg(debug_assertions)]
    fn carry_out(&mut self, deed: super::drill::Deed, word: Word) {
        use super::drill::Deed;
        use std::sync::atomic::Ordering;
        let right = Word { note: note_for(Outcome::Done), ..word };
        match deed {
            Deed::Die => std::process::abort(),
            Deed::Hang => super::drill::sleep(),
            Deed::Slot => self.push(Word { slot: word.slot + 1, ..right }.pack()),
            Deed::Serial => self.push(Word { serial: word.serial + 1, ..right }.pack()),
            Deed::Note => self.push(Word { note: 77, ..right }.pack()),
            Deed::Count => {
                // At once: the first of many right words would be an answer.
                super::ring::Word::set(self.exchange.answers().pushed, 1000, Ordering::Release);
                ring(&self.answers.0);
            }
            Deed::Bells => loop {
                ring(&self.answers.0);
            },
            Deed::Message => drop(messages::send(self.socket.as_fd(), &"no reply", &[])),
            Deed::Flood => loop {
                eprintln!("{}", "flood ".repeat(100));
            },
            Deed::Scribble => {
                for memory in &self.memories {
                    let start = memory.slab().0;
                    // SAFETY: it is not: the mapping is read-only, and this ends the process.
                    unsafe { start.as_ptr().write_volatile(!start.as_ptr().read_volatile()) };
                }
            }
        }
    }

    /// Puts a word into the ring of answers.
    fn push(&mut self, word: u64) {
        self.answers.1.push(&self.exchange.answers(), word);
        ring(&self.answers.0);
    }
}

/// Fails only where it has rung 2^64 times unheard: then it rings anyway.
fn ring(bell: &OwnedFd) {
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

/// Fails only where it has not rung.
fn clear(bell: &OwnedFd) {
    let _ = rustix::io::read(bell, &mut [0; 8]);
}
