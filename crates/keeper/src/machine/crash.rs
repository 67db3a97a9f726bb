//! Crashes: what becomes of a guest that crashed, by `on_panic`, and of the dumps of dead guests.
//!
//! guest crashed -> harvest -> QEMU ends -> bank, held -> dump (a job of its own, one at a time) -> over
//!
//! What a new keeper must know stands in the journal before QEMU is ended: which incarnations are to be dumped, and the
//! file once there is one. The registers are in a file beside the journal. So a keeper killed at any moment leaves a dump
//! that the next one begins or goes on with, also when QEMU is gone as well: dead memory needs no guard to be dumped.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

use hearth_api::{DumpState, DumpStatus, EndCause, EventKind, MachineState};
use hearth_memory::{Layout, RamFile};
use hearth_recovery::crash_recovery::{Claim, HARVEST_PATIENCE};
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::DumpNote;
use hearth_recovery::vmcore::DeadRam;
use hearth_recovery::vmcore::dump::incomplete_path;

use super::dump::{Job, NoThread, Order, Task};
use super::dumps::Request;
use super::{Machine, MachineError, Wanted};
use crate::config::OnPanic;
use crate::event::{DumpMessage, Event};

/// A second crash is dumped only if the next guest is left this part of the budget to boot in, before any of the dead
/// memory is written. Without it the guest would wait for the first dump.
const BOOT_PART_OF_BUDGET: u64 = 8;

/// Registers were taken, or not; for the timeline of the recovery that follows.
#[derive(Clone, Copy, Debug)]
pub struct Harvest {
    pub began: Instant,
    pub took: Duration,
}

impl Machine {
    /// The guest is held still by QEMU and will do no more.
    pub(super) fn guest_crashed(&mut self, cause: EndCause) {
        self.cancel_save("the guest crashed");
        match self.parts.config.on_panic {
            OnPanic::DumpAndRecover => {
                if self.can_dump() {
                    self.harvest();
                }
                self.end_qemu(cause);
            }
            OnPanic::Recover => self.end_qemu(cause),
            OnPanic::Dump => {
                self.hold_still(cause);
                if let Err(refusal) = self.dump_living(Request::default()) {
                    self.record(EventKind::DumpSkipped { why: refusal.message });
                }
            }
            OnPanic::Pause => self.hold_still(cause),
        }
    }

    /// A full disk is something to wait for; a folder that cannot be had is not.
    fn can_dump(&self) -> bool {
        if self.restoring.as_ref().is_some_and(|restoring| !restoring.is_complete()) {
            let why = "its memory was still being loaded from the snapshot".to_owned();
            self.record(EventKind::DumpSkipped { why });
            return false;
        }
        let prepared = self.shelf().prepare();
        if let Err(error) = &prepared {
            self.record(EventKind::DumpSkipped { why: crate::chain(error) });
        }
        prepared.is_ok()
    }

    fn hold_still(&mut self, cause: EndCause) {
        if let Some(life) = &mut self.life {
            life.cause = Some(cause);
        }
        // An order that was given before goes on.
        if self.wanted == Wanted::Run {
            // Before anybody is told that it stands still, and may think that he can change its images.
            self.note_idle_images();
            self.enter(MachineState::Paused);
            self.state_why = Some(format!("{}; continue with `hearth reboot` or `hearth stop`", cause.words()));
        }
    }

    /// Takes what only a living QEMU can tell. One that hangs, or lies, costs the registers and no more.
    fn harvest(&mut self) {
        let Some(life) = &self.life else { return };
        let (began, incarnation) = (Instant::now(), life.incarnation.number);
        let registers = life.generation.qmp.registers(HARVEST_PATIENCE).map_err(|error| crate::chain(&error));
        let took = began.elapsed();
        let kept = registers.and_then(|bytes| {
            let path = self.parts.folders.registers(incarnation);
            fs::write(&path, &bytes)
                .map(|()| bytes.len() as u64)
                .map_err(|error| format!("{}: {error}", path.display()))
        });
        self.harvest = Some(Harvest { began, took });
        self.record(match kept {
            Ok(bytes) => EventKind::RegistersTaken { bytes, duration_ms: took.as_secs_f64() * 1e3 },
            Err(why) => EventKind::DumpWarning { message: format!("no registers: {why}") },
        });
        self.note_dump(incarnation);
    }

    /// From here on a new keeper would dump this incarnation too.
    fn note_dump(&mut self, incarnation: u32) {
        if self.note_of(incarnation).is_none() {
            self.journal.dumps.push(DumpNote { incarnation, file: None });
        }
        self.save_journal();
    }

    fn note_of(&self, incarnation: u32) -> Option<&DumpNote> {
        self.journal.dumps.iter().find(|note| note.incarnation == incarnation)
    }

    pub(super) fn save_journal(&self) {
        if let Err(error) = self.journal.save(&self.parts.folders.journal()) {
            tracing::warn!(
                error = crate::chain(&error),
                "journal cannot be written: a new keeper would not know the machine's state"
            );
        }
    }

    /// A QEMU that died by itself has a guest worth looking at, without registers.
    pub(super) fn note_death(&mut self, dead: &Incarnation, cause: EndCause) {
        if cause == EndCause::QemuDied && self.parts.config.on_panic == OnPanic::DumpAndRecover && self.can_dump() {
            self.note_dump(dead.number);
        }
    }

    /// The hold under which a dead incarnation is to be banked; none if it is not to be dumped.
    pub(super) fn hold_for(&mut self, dead: &Incarnation) -> Option<Arc<Hold>> {
        self.note_of(dead.number)?;
        if let Some(why) = self.no_room_for(dead) {
            self.record(EventKind::DumpSkipped { why });
            self.forget_dump(dead.number);
            return None;
        }
        Some(Arc::new(Hold::everything(dead.ram.pages())))
    }

    /// With an earlier dump on its way the memory may not suffice for both and the next guest.
    fn no_room_for(&self, dead: &Incarnation) -> Option<String> {
        let held_bytes = self.ember.held_bytes();
        if held_bytes == 0 {
            return None;
        }
        let limit_bytes = self.budget.limit_bytes(true);
        let wanted_bytes = held_bytes + dead.ram.residency_bytes().unwrap_or(u64::MAX / 2);
        let (wanted_mib, allowed_mib) = (wanted_bytes >> 20, (limit_bytes - limit_bytes / BOOT_PART_OF_BUDGET) >> 20);
        (wanted_mib > allowed_mib).then(|| {
            format!(
                "an earlier dump is still being written; {wanted_mib} MiB of dead memory would leave the next guest \
                 too little (at most {allowed_mib} MiB allowed)"
            )
        })
    }

    /// Queues the dump of an incarnation that was banked with this hold.
    pub(super) fn queue_dump(&mut self, dead: &Incarnation, hold: Arc<Hold>) {
        let claim = self.claim(&dead.ram, hold, dead.number);
        let noted = self.note_of(dead.number).and_then(|note| note.file.clone());
        let begun = noted.is_some();
        let file = noted.unwrap_or_else(|| self.shelf().name(dead.number, SystemTime::now()));
        if let Some(note) = self.journal.dumps.iter_mut().find(|note| note.incarnation == dead.number) {
            note.file = Some(file.clone());
        }
        self.save_journal();
        let path = self.parts.folders.registers(dead.number);
        let registers = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "QEMU had exited or did not provide them".to_owned(),
            _ => format!("{}: {error}", path.display()),
        });
        let memory = self.dead_ram(&dead.ram);
        let request = Request { file: Some(file), ..Request::default() };
        let (task, progress) = self.task(request, dead.number, memory, Some(claim), registers);
        self.dumps.queue(dead.number, (Task { begun, ..task }, progress));
        self.start_next_dump();
    }

    fn claim(&self, ram: &RamFile, hold: Arc<Hold>, incarnation: u32) -> Claim {
        // The dead guest's: the next one may have another size.
        let layout = Layout::q35(ram.bytes());
        Claim::new(self.ember.clone(), hold, incarnation, layout, ram.pages())
    }

    pub(super) fn dead_ram(&self, ram: &Arc<RamFile>) -> DeadRam {
        DeadRam::new(ram.clone(), Layout::q35(ram.bytes()))
    }

    pub(super) fn start_next_dump(&mut self) {
        let (tell, log) = (self.parts.tell.clone(), self.parts.event_log.clone());
        let Some((incarnation, task, progress)) = self.dumps.next() else { return };
        let tell = move |message| {
            // At once: a machine that ends sees its dumps through without its loop.
            if let DumpMessage::Event(event) = &message {
                log.record(event.clone());
            }
            // Fails only when the loop is gone, and then nobody wants to know.
            let _ = tell.send(Event::Dump { incarnation, message });
        };
        match Job::start(task, progress.clone(), tell.clone()) {
            Ok(job) => self.dumps.started(job),
            Err(NoThread { task, .. }) if progress.is_given_up() => Job::end_without_thread(*task, &progress, &tell),
            Err(NoThread { task, error }) => {
                let (file, why) = (incomplete_path(&task.file), format!("cannot start the dump thread: {error}"));
                self.record(EventKind::DumpWaits { file: file.display().to_string(), why: why.clone() });
                self.dumps.not_started(*task, why);
            }
        }
    }

    pub(super) fn dump_says(&mut self, incarnation: u32, message: DumpMessage) -> Result<(), MachineError> {
        match message {
            DumpMessage::Event(EventKind::CrashReason { message }) => {
                if let Some(timeline) = &mut self.timeline {
                    timeline.crash_reason(incarnation, &message);
                }
            }
            DumpMessage::Event(_) => {}
            DumpMessage::Phase { phase, began, took } => self.phase_ended(phase.name(), began, took),
            DumpMessage::Over => return self.dump_over(incarnation),
        }
        Ok(())
    }

    fn dump_over(&mut self, incarnation: u32) -> Result<(), MachineError> {
        self.dumps.over();
        self.forget_dump(incarnation);
        // No other dump is there while a guest stands still for one.
        self.let_go_from_dump();
        self.start_next_dump();
        if self.stops_after_dumps && !self.dumps.is_busy() {
            return self.stopped();
        }
        Ok(())
    }

    fn forget_dump(&mut self, incarnation: u32) {
        self.journal.dumps.retain(|note| note.incarnation != incarnation);
        self.save_journal();
        // Most dumps of living guests have none.
        let _ = fs::remove_file(self.parts.folders.registers(incarnation));
    }

    /// Waits for the dumps of a machine that ends, as long as they go on by themselves.
    pub(super) fn see_dumps_through(&mut self) {
        while let Some(first) = self.dumps.first().cloned() {
            if first.wait_still() == DumpState::Waiting {
                first.tell(Order::GiveUp);
            } else {
                self.dumps.over();
                self.forget_dump(first.status().incarnation);
            }
            // The one that comes next, or the same one if there was no thread for it.
            self.start_next_dump();
        }
    }

    pub(super) fn dump_statuses(&self) -> Vec<DumpStatus> {
        self.dumps.statuses()
    }

    /// Memory that is about to be reused cannot be dumped as if it lived.
    pub(super) fn end_living_dump(&mut self) {
        self.dumps.end_living("the guest ended during the dump");
        // It ends also where there was no thread for it.
        self.start_next_dump();
    }

    /// A dump that goes on keeps the machine from stopping, unless it waits for somebody.
    pub(super) fn must_wait_for_dumps(&self) -> bool {
        self.dumps.current().is_some_and(|status| !status.live && status.state != DumpState::Waiting)
    }
}
