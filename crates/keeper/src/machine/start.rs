//! Start: how a guest comes to run. What takes long is done by a job's thread, one step after the other; the loop goes on meanwhile
//! and carries on when a step has ended.
//!
//! boot: launch -> run
//! restore: open the snapshot -> launch, and prefetch -> load the devices' state -> run
//! resume of a parked guest: verify -> launch, and load the devices' state -> run
//!
//! Orders that come meanwhile are the state's (`state`). A stop ends a start, unless that has a guest already: then the guest runs
//! first and is stopped as any other. What such a guest's QEMU says is kept until it runs.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::generation::{Generation, LaunchError};
use super::launch_job::{LaunchControl, LaunchJob};
use super::lazy_restore::LazyRestore;
use super::state::Input;
use super::{Machine, MachineError};
use crate::event::Event;

type Then = Box<dyn FnOnce(&mut Machine) -> Result<(), MachineError>>;

/// What a start is doing, for the operator. Clones share it.
#[derive(Clone)]
pub struct Activity(Arc<Mutex<String>>);

impl Activity {
    pub fn new(what: impl Into<String>) -> Self {
        Self(Arc::new(Mutex::new(what.into())))
    }

    pub fn is_now(&self, what: String) {
        *self.0.lock().expect("nobody panics with it") = what;
    }

    fn text(&self) -> String {
        self.0.lock().expect("nobody panics with it").clone()
    }
}

/// A step of a start. Dropping it ends the QEMU that it has started.
pub struct Start {
    generation: u32,
    /// When the first step began.
    began: Instant,
    step: Step,
    control: LaunchControl,
    /// Takes the job's result, and goes on.
    then: Then,
    /// What QEMU has said so far.
    held: Vec<Event>,
}

impl Start {
    /// Number of its QEMU's generation.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    pub fn doing(&self) -> String {
        self.step.doing.text()
    }

    fn of<T: Send + 'static>(
        job: LaunchJob<T>,
        step: Step,
        then: impl FnOnce(&mut Machine, T) -> Result<(), MachineError> + 'static,
    ) -> Self {
        Self {
            generation: job.number(),
            began: Instant::now(),
            step,
            control: job.control(),
            then: Box::new(move |machine| then(machine, job.end())),
            held: Vec::new(),
        }
    }

    /// Whether this event must wait until the start has ended.
    fn must_hold(&self, event: &Event) -> bool {
        match event {
            Event::Qmp { generation, .. } | Event::QemuEnded { generation, .. } => *generation == self.generation,
            // The keeper ends with a disk, and must not take the guest along.
            Event::DiskEnded { .. } => self.step.has == Has::Guest,
            _ => false,
        }
    }
}

/// What a step is about.
pub struct Step {
    doing: Activity,
    has: Has,
    restores: bool,
}

/// What a start has come to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Has {
    Nothing,
    /// The files of an incarnation.
    Incarnation,
    /// A guest, in a file or in its QEMU.
    Guest,
}

impl Step {
    pub fn boots(doing: &str) -> Self {
        Self { doing: Activity::new(doing), has: Has::Incarnation, restores: false }
    }

    pub fn opens_snapshot(doing: &str) -> Self {
        Self { doing: Activity::new(doing), has: Has::Nothing, restores: true }
    }

    pub fn restores(doing: Activity) -> Self {
        Self { doing, has: Has::Incarnation, restores: true }
    }

    pub fn has_guest(doing: &str) -> Self {
        Self { doing: Activity::new(doing), has: Has::Guest, restores: false }
    }
}

impl Machine {
    /// Begins to start the machine's first guest.
    pub(super) fn begin_start(&mut self) -> Result<(), MachineError> {
        match LazyRestore::order(&mut self.context)? {
            Some(order) => self.restore(order),
            None => self.forget_order().and_then(|()| self.resume_or_boot()),
        }
    }

    /// Has a thread do a step of a start; then the loop goes on.
    pub(super) fn begin_step<T: Send + 'static>(
        &mut self,
        step: Step,
        work: impl FnOnce(&LaunchControl) -> T + Send + 'static,
        then: impl FnOnce(&mut Self, T) -> Result<(), MachineError> + 'static,
    ) -> Result<(), MachineError> {
        let (context, number) = (&self.context, self.context.journal.generation);
        let job = LaunchJob::begin(&context.config.name, number, context.outside.tell.clone(), work);
        self.launches(Start::of(job.map_err(LaunchError::Thread)?, step, then))
    }

    /// As `begin_step`, for a step that needs a QEMU which has been started. It ends if the step is given up.
    pub(super) fn begin_step_with<T: Send + 'static>(
        &mut self,
        step: Step,
        generation: Generation,
        work: impl FnOnce(&Generation) -> T + Send + 'static,
        then: impl FnOnce(&mut Self, Generation, T) -> Result<(), MachineError> + 'static,
    ) -> Result<(), MachineError> {
        let (context, control) = (&self.context, LaunchControl::of(&generation.process));
        let (number, tell) = (generation.number, context.outside.tell.clone());
        let work = move |_: &LaunchControl| {
            let result = work(&generation);
            (generation, result)
        };
        let job = LaunchJob::begin_with(control, &context.config.name, number, tell, work);
        let then = move |machine: &mut Self, (generation, result)| then(machine, generation, result);
        self.launches(Start::of(job.map_err(LaunchError::Thread)?, step, then))
    }

    fn launches(&mut self, start: Start) -> Result<(), MachineError> {
        let holds_guest = start.step.has == Has::Guest;
        self.apply(Input::Launches { launch: start, holds_guest })
    }

    /// A step of a start has ended.
    pub(super) fn go_on_with_start(&mut self, start: Start) -> Result<(), MachineError> {
        let Start { began, then, held, .. } = start;
        let is_first = self.state.is_first_start();
        let result = then(self);
        if result.is_ok()
            && let Some(next) = self.state.launch_mut()
        {
            (next.began, next.held) = (began, held);
            return Ok(());
        }
        match is_first {
            true => result?,
            false => self.next_started(began, result)?,
        }
        held.into_iter().try_for_each(|event| self.handle(event))
    }

    /// Keeps what the QEMU of a start says until that has ended. Gives back anything else.
    pub(super) fn defer_start_event(&mut self, event: Event) -> Option<Event> {
        match self.state.launch_mut() {
            Some(start) if start.must_hold(&event) => {
                start.held.push(event);
                None
            }
            _ => Some(event),
        }
    }

    /// The machine was told to stop.
    pub(super) fn end_launch(&self) {
        if let Some(start) = self.state.launch() {
            start.control.give_up();
        }
    }

    pub(super) fn give_up_launch(&mut self, start: Start) {
        let Step { has, restores, .. } = start.step;
        drop(start.then);
        self.end_memory();
        if restores {
            self.lazy_restore.was_cancelled = true;
        }
        if has == Has::Incarnation {
            self.discard_unused();
        }
    }
}
