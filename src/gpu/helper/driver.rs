//! A driver whose devices each lie in a helper of their own: a failed device is one process that is gone, and
//! touches no other device. What devices there are, another helper says once. Must not know of queues.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use calpe_core::block_io::Pool;
use rustix::event::{EventfdFlags, eventfd};

use super::exchange::{Exchange, Layout};
use super::link::{Link, NextDrill};
use super::messages::{MEMORIES_MAX, Order, Reply};
use super::process::{Alive, Helper, HelperCommand, Wires};
use super::remote::{Line, RemoteDevice};
use crate::device::{Device, DeviceError, DeviceInfo, Drill, Driver};

/// Slots of a device, and bytes of each: with four, one batch comes in, one is computed, one goes out and
/// one waits. A link takes 0.3 ms for a slot, a launch a twentieth of that; the slots' memory is pinned.
const LAYOUT: Layout = Layout { slots: 4, slot_bytes: 16 << 20 };

/// Most helpers that may not be gone, beyond those in use: some drivers hold a process that is killed.
const LINGERING_MAX: usize = 4;

/// See the module's head.
pub struct HelperDriver {
    command: HelperCommand,
    found: Mutex<Option<Vec<DeviceInfo>>>,
    drill: Arc<NextDrill>,
    alive: Alive,
}

impl HelperDriver {
    /// Starts nothing yet.
    #[must_use]
    pub fn new(command: HelperCommand) -> HelperDriver {
        HelperDriver { command, found: Mutex::default(), drill: Arc::default(), alive: Alive::default() }
    }

    /// How many helpers run or have not been reaped.
    #[must_use]
    pub fn processes(&self) -> usize {
        self.alive.load(Ordering::SeqCst)
    }

    fn list(&self) -> Result<Vec<DeviceInfo>, DeviceError> {
        let link = Arc::new(Link::new(0));
        let helper = Helper::start(&self.command, link, None, &self.alive)
            .map_err(|error| DeviceError::Absent(format!("no helper can be started: {error}")))?;
        match helper.ask(&Order::List, &[], self.command.within()) {
            Ok(Reply::Devices(Ok(devices))) if !devices.is_empty() => Ok(devices),
            Ok(Reply::Devices(Err(reason))) | Err(reason) => Err(DeviceError::Absent(reason)),
            Ok(_) => Err(DeviceError::Absent("the helper has named no device".to_owned())),
        }
    }
}

impl Driver for HelperDriver {
    fn devices(&self) -> Result<Vec<DeviceInfo>, DeviceError> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(devices) = &*found {
            return Ok(devices.clone());
        }
        let devices = self.list()?;
        *found = Some(devices.clone());
        Ok(devices)
    }

    fn open(&self, index: usize, pools: &[Pool]) -> Result<Box<dyn Device>, DeviceError> {
        let failed = |text: String| DeviceError::Failed { operation: "opening", text };
        let devices = self.found.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(1, Vec::len);
        if self.processes() >= devices + LINGERING_MAX {
            return Err(failed(format!("{LINGERING_MAX} helpers of before are not gone")));
        }
        let memories: Vec<Pool> =
            pools.iter().filter(|pool| pool.shared_memory().is_some()).cloned().collect();
        if memories.len() > MEMORIES_MAX {
            return Err(failed(format!("more than {MEMORIES_MAX} memories")));
        }
        let exchange = Exchange::create(LAYOUT).map_err(|error| failed(error.to_string()))?;
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (orders, answers) =
            bell().and_then(|orders| Ok((orders, bell()?))).map_err(|error| failed(error.to_string()))?;
        let (exchange, link) = (Arc::new(exchange), Arc::new(Link::new(LAYOUT.slots)));
        let wires = Wires { exchange: Arc::clone(&exchange), answers: Arc::new(answers) };
        let for_helper = Arc::clone(&wires.answers);
        let helper = Helper::start(&self.command, Arc::clone(&link), Some(wires), &self.alive)
            .map_err(|error| failed(format!("no helper can be started: {error}")))?;
        let order = Order::Open {
            index,
            layout: LAYOUT,
            memories: memories.iter().map(|memory| memory.slab().1).collect(),
        };
        let mut descriptors = vec![exchange.file(), orders.as_fd(), for_helper.as_fd()];
        descriptors.extend(memories.iter().filter_map(|memory| Some(memory.shared_memory()?.file())));
        match helper.ask(&order, &descriptors, self.command.within()) {
            Ok(Reply::Opened { info, slots, slot_bytes })
                if (1..=LAYOUT.slots).contains(&slots) && slot_bytes <= LAYOUT.slot_bytes =>
            {
                let line = Line { helper, link, exchange, orders, memories };
                let drill = Arc::clone(&self.drill);
                Ok(Box::new(RemoteDevice::new(info, (slots, slot_bytes), line, drill)))
            }
            Ok(_) => {
                helper.give_up();
                Err(failed("the helper has not answered what it was asked".to_owned()))
            }
            Err(reason) => {
                helper.give_up();
                Err(DeviceError::Lost(reason))
            }
        }
    }

    fn drill(&self, drill: Drill) {
        self.drill.put(drill);
    }

    fn is_isolated(&self) -> bool {
        true
    }
}
