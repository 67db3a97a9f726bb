//! The disk behind the connections: requests in, operations on the image out, answers back.
//!
//! | what | part | owns |
//! |---|---|---|
//! | speaks virtio | `intake` | the device that the guest sees, requests that wait for guest memory (`parked`) |
//! | asks memory | `blocks` | ledger and warm memory (`recorder`), requests that meet on the disk (`overlap`) |
//! | schedules | `schedule` | requests that wait, limits, merging of reads |
//! | has an image | `operations` | image, engine, what it was given (`running`), flushes, tries when there is no space |
//!
//! taken (`intake`) -> what it changes is void, hits answered in line (`blocks`) -> misses wait (`schedule`) -> `dispatch` ->
//! image (`operations`) -> `completion`: tagged, noted, copied to the guest -> answered (`parts`)
//!
//! Each of these files uses only those below it: `intake`, then `dispatch` and `completion`, `parts`, `schedule`, `blocks` and
//! `operations`, and at the bottom `job`, `running`, `overlap` and `context`.
//!
//! Requests wait in the order they came, so that small ones cannot starve a large one; an exception are those that wait for
//! something of their own. RAM hits do not wait. A contiguous read or write is one operation on the image, and so are
//! requests that wait side by side and flushes that can be one; only what is longer than the longest slot is carried out piece
//! by piece. A request that waits for a slot waits for operations that have begun, and these need nothing more: that ends. Requests of
//! a connection that is gone are finished towards the image (the bytes are ours) and forgotten: nothing is copied, nothing
//! recorded.

mod blocks;
mod completion;
mod context;
mod dispatch;
mod intake;
mod job;
mod operations;
mod overlap;
mod parked;
mod parts;
mod running;
mod schedule;

use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use super::config::Device;
use super::connection::Connection;
use super::counters::Counters;
use super::recorder::{RamPart, Recorder, Tracking};
use super::{Backing, DiskOptions};
use crate::clock::Clock;
use crate::gate::Gate;
use crate::image::FrozenImage;
use crate::pressure::Pressure;
use crate::write_log::WriteLog;
use blocks::Blocks;
use context::Context;
use intake::Intake;
use job::{BLOCK, Jobs};
use operations::Operations;
use parts::Parts;
use schedule::Schedule;

pub struct Disk {
    intake: Intake,
    parts: Parts,
    /// Log of guest memory that is written to, while somebody copies that memory.
    pub write_log: Option<Arc<WriteLog>>,
}

impl Disk {
    pub fn new(
        options: &DiskOptions,
        backing: Backing,
        tracking: Option<Tracking>,
        counters: Arc<Counters>,
        pressure: Pressure,
        clock: Clock,
    ) -> Self {
        let Backing { image, pool, engine, depth, hold_back } = backing;
        let read_only = options.read_only || image.read_only();
        let mut device = Device::of(&image, read_only, options.queues, options.queue_size);
        if options.memory_slots {
            device.offer_memory_slots();
        }
        let recorder = Recorder::new(options.id, tracking.filter(|_| options.tracked));
        let schedule = Schedule::new(options.limits, hold_back, clock.now());
        let context = Context { name: options.name.clone(), clock, counters, keeper: options.tell.clone() };
        let parts = Parts {
            context,
            jobs: Jobs::default(),
            blocks: Blocks::new(recorder, options.tracked),
            schedule,
            operations: Operations::new(image, pool, engine, depth, pressure),
        };
        let intake = Intake::new(device, &options.serial, read_only, options.gate.clone());
        Self { intake, parts, write_log: None }
    }

    pub fn notifier(&self) -> BorrowedFd<'_> {
        self.parts.operations.notifier()
    }

    pub fn counters(&self) -> &Counters {
        &self.parts.context.counters
    }

    /// The device as the guest sees it.
    pub fn device(&self) -> Device {
        self.intake.device
    }

    /// The gate before the guest's memory, while that is short.
    pub fn gate(&self) -> Option<Gate> {
        self.intake.gate.clone()
    }

    pub fn set_gate(&mut self, gate: Option<Gate>) {
        self.intake.gate = gate;
    }

    /// The RAM whose pages are recorded; empty if none are.
    pub fn ram(&self) -> Arc<[RamPart]> {
        self.parts.blocks.ram()
    }

    /// Takes requests off one queue, at most a queue's worth. True: there was something.
    pub fn take_requests(&mut self, connection: &mut Connection, queue: u16) -> bool {
        self.intake.take(&mut self.parts, connection, queue)
    }

    /// Lets waiting requests go on. Returns how long to wait if limits, memory or space are the reason that it ends. `held`: none
    /// begins that has not.
    pub fn pump(&mut self, connection: &mut Connection, held: bool) -> Option<Duration> {
        if !held {
            self.intake.begin_parked(&mut self.parts, connection);
        }
        let limited = self.parts.go_on(connection);
        let Parts { operations, context, .. } = &mut self.parts;
        let kept = operations.try_kept(context, connection.is_waiting());
        limited.into_iter().chain(self.intake.wait()).chain(kept).min()
    }

    /// Starts what was handed over. An engine that cannot start it now is asked again.
    pub fn submit(&mut self) -> io::Result<()> {
        self.parts.operations.submit()
    }

    /// Takes what the engine has ended, if it has anything or has rung. True: there was something.
    pub fn reap(&mut self, connection: Option<&mut Connection>, rung: bool) -> bool {
        self.parts.reap(connection, rung)
    }

    /// Whether nothing is in flight towards the image, and no request waits for it.
    pub fn is_idle(&self) -> bool {
        self.is_still() && self.intake.is_empty()
    }

    /// Whether nothing that has begun may still change the image.
    pub fn is_still(&self) -> bool {
        self.parts.operations.is_empty() && self.parts.jobs.is_empty()
    }

    /// The image as it is now, on its way into another file. `None`: something is in flight, and would be half in it.
    pub fn freeze(&self, target: File) -> Option<io::Result<Arc<FrozenImage>>> {
        self.is_still().then(|| self.parts.operations.image.freeze(target))
    }

    /// Sets what the next connection's requests are recorded in.
    pub fn attach(&mut self, tracking: Option<Tracking>) {
        self.parts.blocks.attach(tracking);
    }

    /// Reads the size of the image again; what lay past a new end is void, also what is on its way from there.
    pub fn resize(&mut self) -> io::Result<u64> {
        let image = &mut self.parts.operations.image;
        let before = image.bytes();
        let after = image.refresh_bytes()?;
        if after < before {
            self.parts.blocks.cut_off(after / BLOCK..before.div_ceil(BLOCK));
        }
        self.intake.device.resize(after);
        Ok(after)
    }

    /// A connection is gone: its requests are not carried any further.
    pub fn abandon(&mut self, connection: u32) {
        self.parts.abandon(connection);
        self.intake.abandon(connection);
    }

    /// Waits for operations without taking part in anything else; for the end of the thread.
    pub fn drain(&mut self, at_most: Duration) {
        self.parts.drain(at_most);
    }
}
