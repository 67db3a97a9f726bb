//! Operations: those that the image's engine has been given, until they have ended.
//!
//! start -> submit -> ended (no space: kept and tried again, `space`) -> taken off

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slab::Slab;

use super::context::Context;
use super::job::{BLOCK, Jobs};
use super::overlap::RequestId;
use super::running::{Around, Part, Running};
use crate::buffer::BufferPool;
use crate::engine::{Completion, Engine, Operation};
use crate::image::Image;
use crate::pressure::Pressure;
use crate::server::counters::add;
use flushes::Flushes;
use space::Space;

mod flushes;
mod space;

pub struct Operations {
    pub image: Image,
    pub pool: Arc<BufferPool>,
    engine: Box<dyn Engine>,
    depth: usize,
    running: Slab<Running>,
    flushes: Flushes,
    space: Space,
    pressure: Pressure,
    /// The engine was given something since the last `submit`.
    unsubmitted: bool,
    /// Reused, so that a look needs no allocation.
    ended: Vec<Completion>,
}

impl Operations {
    pub fn new(image: Image, pool: Arc<BufferPool>, engine: Box<dyn Engine>, depth: u32, pressure: Pressure) -> Self {
        Self {
            image,
            pool,
            engine,
            depth: depth as usize,
            running: Slab::default(),
            flushes: Flushes::default(),
            space: Space::default(),
            pressure,
            unsubmitted: false,
            ended: Vec::new(),
        }
    }

    pub fn notifier(&self) -> BorrowedFd<'_> {
        self.engine.notifier()
    }

    pub fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    pub fn len(&self) -> usize {
        self.running.len()
    }

    /// Whether the engine takes no more now.
    pub fn is_full(&self) -> bool {
        self.running.len() >= self.depth
    }

    pub fn iter(&self) -> impl Iterator<Item = &Running> {
        self.running.iter().map(|(_, running)| running)
    }

    /// Bytes of the image to read along with these: none, unless memory is to hold the blocks.
    pub fn around(&self, wanted: bool, offset: u64, bytes: u64) -> Around {
        if !wanted {
            return Around::default();
        }
        let end = offset + bytes;
        let whole = end.next_multiple_of(BLOCK).min(self.image.bytes().max(end));
        Around { before: offset % BLOCK, after: whole - end }
    }

    /// Gives the engine an operation. Returns its place among those that run.
    pub fn start(&mut self, jobs: &mut Jobs, running: Running) -> usize {
        for part in &running.parts {
            if let Some(job) = jobs.get_mut(part.job) {
                job.pending += 1;
            }
        }
        let entry = self.running.vacant_entry();
        let place = entry.key();
        self.engine.push(entry.insert(running).submission(place));
        self.unsubmitted = true;
        place
    }

    /// Makes all changes that have ended durable before this request is answered. If that needs an operation, the request
    /// has one pending then.
    pub fn flush(&mut self, context: &Context, jobs: &mut Jobs, id: RequestId) {
        if self.flushes.is_clean() {
            return add(&context.counters.flushes_spared, 1);
        }
        if let Some(running) = self.flushes.newest().and_then(|place| self.running.get_mut(place))
            && let Some(job) = jobs.get_mut(id)
        {
            job.pending += 1;
            running.parts.push(Part::without_data(id));
            return add(&context.counters.flushes_spared, 1);
        }
        let flush = Running::new(vec![Part::without_data(id)], Operation::Flush, 0..0, context.now());
        let place = self.start(jobs, flush);
        self.flushes.begun(place);
    }

    /// Starts what the engine was given. An engine that cannot start it now is asked again.
    pub fn submit(&mut self) -> io::Result<()> {
        if self.unsubmitted {
            self.engine.submit()?;
            self.unsubmitted = false;
        }
        Ok(())
    }

    /// Waits until the engine has ended something.
    pub fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        self.engine.wait(at_most)
    }

    /// Takes what the engine has ended since the last call. Give the list back with `looked`.
    pub fn take_ended(&mut self) -> Vec<Completion> {
        let mut ended = std::mem::take(&mut self.ended);
        self.engine.reap(&mut ended);
        ended
    }

    /// All of `take_ended` has been seen to.
    pub fn looked(&mut self, context: &Context, ended: Vec<Completion>) {
        self.ended = ended;
        let in_flight = (self.running.len() - self.space.kept.len()) as u64;
        context.counters.in_flight.store(in_flight, Ordering::Relaxed);
        self.pressure.set_in_flight(in_flight);
    }

    /// Whether the operation that has ended is for a request of this connection.
    pub fn is_for(&self, jobs: &Jobs, completion: &Completion, connection: u32) -> bool {
        let running = usize::try_from(completion.token).ok().and_then(|place| self.running.get(place));
        let is_own = |part: &Part| jobs.get(part.job).is_some_and(|job| job.origin.connection == connection);
        running.is_some_and(|running| running.parts.iter().any(is_own))
    }

    /// Takes an operation off that has ended. `None`: it was kept for another try, or is none of ours.
    /// `stopping`: it is not kept, because its queue is being stopped or its connection is gone.
    pub fn end(&mut self, context: &Context, completion: &Completion, now: Instant, stopping: bool) -> Option<Running> {
        let place = usize::try_from(completion.token).ok();
        if let (Some(place), Err(error), false) = (place, &completion.result, stopping)
            && self.space.keep(context, &mut self.running, place, error)
        {
            return None;
        }
        let Some((place, running)) = place.and_then(|place| Some((place, self.running.try_remove(place)?))) else {
            tracing::error!(token = completion.token, "the engine ended an operation that it was not given");
            return None;
        };
        self.pressure.ended(running.begun, now, running.bytes());
        add(&context.counters.image_operations, 1);
        add(&context.counters.image_us, now.saturating_duration_since(running.begun).as_micros() as u64);
        let went_well = completion.result.is_ok();
        self.flushes.note(place, &running, went_well);
        if running.waited_for_space {
            self.space.ended(context, &self.running, went_well);
        }
        Some(running)
    }

    /// Tries again what was kept because there was no space, if it is time. Returns how long until the next try.
    pub fn try_kept(&mut self, context: &Context, stopping: bool) -> Option<Duration> {
        if self.space.kept.is_empty() {
            return None;
        }
        let now = context.now();
        for place in self.space.due(now, stopping) {
            let Some(running) = self.running.get_mut(place) else { continue };
            running.begun = now;
            self.engine.push(running.submission(place));
            self.unsubmitted = true;
        }
        self.space.wait(now)
    }

    /// Gives up what is kept for a connection that is gone, as failed.
    pub fn give_up_kept(&mut self, jobs: &Jobs, connection: u32) -> Vec<Completion> {
        self.space.give_up(&self.running, jobs, connection)
    }
}
