//! Crashes: what happens to a guest that crashed, as `on_panic` says, and to the dumps of dead guests.
//!
//! guest crashed -> harvest -> QEMU ends -> bank with a hold -> dump (a job, one at a time) -> over
//!
//! The journal names the incarnations to be dumped, and each dump's file, before QEMU is ended. The registers are in a
//! file beside the journal. So if a keeper is killed at any moment, the next one starts or continues the dump, even if
//! QEMU is gone too: dead memory can be dumped without a QEMU.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use std::{fs, io};

use hearth_api::{ApiError, DumpState, EndCause, ErrorWord, EventKind};
use hearth_recovery::crash_recovery::{Claim, HARVEST_PATIENCE, Phase};
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::DumpNote;
use hearth_recovery::vmcore::DeadRam;
use hearth_recovery::vmcore::dump::incomplete_path;

use super::crash_loop::Crashes;
use super::disks::Disks;
use super::dump::{Job, NoThread, Order, Task};
use super::dumps::{Dumps, Request, Subject, dump_folder};
use super::state::Input;
use super::timeline::LastRecovery;
use super::warm_reboot::WarmReboot;
use super::{Context, Machine, MachineError};
use crate::config::OnPanic;
use crate::event::{DumpMessage, Event};

/// A second crash is dumped only if the next guest can boot in this part of the budget (one eighth) before any dead
/// memory is written. Otherwise the guest would wait for the first dump.
const BOOT_PART_OF_BUDGET: u64 = 8;

/// Crashes of the machine's guests, and their dumps.
#[derive(Default)]
pub struct CrashRecovery {
    pub dumps: Dumps,
    /// Dead incarnations that an earlier keeper left and that must be dumped.
    pub unfinished: Vec<(Incarnation, Arc<Hold>)>,
    pub crashes: Crashes,
    /// Registers of the guest that will end.
    pub harvest: Option<Harvest>,
    /// How the last guest ended.
    pub last_end: Option<EndCause>,
}

/// When the registers were read, successfully or not; for the timeline of the recovery that follows.
#[derive(Clone, Copy, Debug)]
pub struct Harvest {
    pub began: Instant,
    pub took: Duration,
}

impl CrashRecovery {
    /// Notes in the journal that this incarnation must be dumped, so that a new keeper dumps it too.
    pub fn note_dump(context: &mut Context, incarnation: u32) {
        if note_of(context, incarnation).is_none() {
            context.journal.dumps.push(DumpNote { incarnation, file: None });
        }
        context.save_journal();
    }

    pub fn forget_dump(context: &mut Context, incarnation: u32) {
        context.journal.dumps.retain(|note| note.incarnation != incarnation);
        context.save_journal();
        // Most dumps of living guests have no note.
        let _ = fs::remove_file(context.folders.registers(incarnation));
    }

    /// Starts the next dump if none is under way.
    pub fn start_next_dump(&mut self, context: &Context) {
        let (tell, log) = (context.outside.tell.clone(), context.outside.event_log.clone());
        let Some((incarnation, task, progress)) = self.dumps.next() else { return };
        let tell = move |message| {
            // Start at once: a machine that ends waits for its dumps without running its loop.
            if let DumpMessage::Event(event) = &message {
                log.record(event.clone());
            }
            // Fails only when the loop has ended; then nobody needs the message.
            let _ = tell.send(Event::Dump { incarnation, message });
        };
        match Job::start(task, progress.clone(), tell.clone()) {
            Ok(job) => self.dumps.started(job),
            Err(NoThread { task, .. }) if progress.is_given_up() => Job::end_without_thread(*task, &progress, &tell),
            Err(NoThread { task, error }) => {
                let (file, why) = (incomplete_path(&task.file), format!("cannot start the dump thread: {error}"));
                context.record(EventKind::DumpWaits { file: file.display().to_string(), why: why.clone() });
                self.dumps.not_started(*task, why);
            }
        }
    }

    /// Ends the dump of a living guest. Memory that will be reused cannot be dumped as a living guest's.
    pub fn end_living_dump(&mut self, context: &Context, why: &str) {
        self.dumps.end_living(why);
        // Handle its end here if it has no thread.
        self.start_next_dump(context);
    }

    /// Whether the machine waits for its dumps before it stops. It does not wait for a dump that waits for the
    /// operator.
    pub fn must_wait_for_dumps(&self) -> bool {
        self.dumps.current().is_some_and(|status| !status.live && status.state != DumpState::Waiting)
    }

    /// The living guest's registers are in the file from which its dump takes them, with so many bytes, or there are none. `began`:
    /// the reading of them.
    pub fn registers_read(&mut self, context: &Context, began: Instant, kept: Result<u64, String>) {
        let took = began.elapsed();
        self.harvest = Some(Harvest { began, took });
        context.record(match kept {
            Ok(bytes) => EventKind::RegistersTaken { bytes, duration_ms: took.as_secs_f64() * 1e3 },
            Err(why) => EventKind::DumpWarning { message: format!("no registers: {why}") },
        });
    }

    /// Records the phase that preceded QEMU's end.
    pub fn record_harvest(&mut self, context: &Context, recovery: &mut LastRecovery) {
        let Some(Harvest { began, took }) = self.harvest.take() else { return };
        if let Some(timeline) = &mut recovery.timeline {
            timeline.began(began);
        }
        recovery.phase_ended(context, Phase::Harvest.name(), began, took);
    }

    /// The hold with which a dead incarnation is banked. None if it will not be dumped.
    pub fn hold(context: &mut Context, warm_reboot: &WarmReboot, dead: &Incarnation) -> Option<Arc<Hold>> {
        note_of(context, dead.number)?;
        if let Some(why) = no_room_for(warm_reboot, dead) {
            context.record(EventKind::DumpSkipped { why });
            Self::forget_dump(context, dead.number);
            return None;
        }
        Some(Arc::new(Hold::everything(dead.ram.pages())))
    }

    /// Queues the dump of an incarnation that was banked with this hold.
    pub fn queue_dump(
        &mut self,
        context: &mut Context,
        warm_reboot: &WarmReboot,
        disks: &Disks,
        dead: &Incarnation,
        hold: Arc<Hold>,
    ) {
        let claim = Claim::new(warm_reboot.ember.clone(), hold, dead.number, &dead.ram);
        let noted = note_of(context, dead.number).and_then(|note| note.file.clone());
        let begun = noted.is_some();
        let file = noted.unwrap_or_else(|| dump_folder(&context.config).name(dead.number, SystemTime::now()));
        if let Some(note) = context.journal.dumps.iter_mut().find(|note| note.incarnation == dead.number) {
            note.file = Some(file.clone());
        }
        context.save_journal();
        let request = Request { file: Some(file), ..Request::default() };
        let subject = Subject {
            incarnation: dead.number,
            memory: DeadRam::new(dead.ram.clone()),
            claim: Some(claim),
            registers: context.harvested_registers(dead.number),
        };
        let (task, progress) = Dumps::task(context, warm_reboot, disks, request, subject);
        self.dumps.queue(dead.number, (Task { begun, ..task }, progress));
        self.start_next_dump(context);
    }

    /// Handles a message from a dump. Returns whether that dump is over.
    pub fn handle_dump(
        &mut self,
        context: &mut Context,
        recovery: &mut LastRecovery,
        incarnation: u32,
        message: DumpMessage,
    ) -> bool {
        match message {
            DumpMessage::Event(EventKind::CrashReason { message }) => {
                if let Some(recovery) = recovery.from(incarnation) {
                    recovery.crash_reason(&message);
                }
            }
            DumpMessage::Event(_) => {}
            DumpMessage::Phase { phase, began, took } => {
                if let Some(recovery) = recovery.from(incarnation) {
                    recovery.phase_ended(context, phase.name(), began, took);
                }
            }
            DumpMessage::Over => {
                self.dumps.over();
                Self::forget_dump(context, incarnation);
                return true;
            }
        }
        false
    }

    /// Goes on with a dump that waits for the operator.
    pub fn resume_dump(&mut self, context: &Context) -> Result<(), ApiError> {
        match self.dumps.current() {
            Some(status) if status.state == DumpState::Waiting => {
                self.dumps.tell(Order::Resume);
                // Starts the dump again if no thread could be created before.
                self.start_next_dump(context);
                Ok(())
            }
            _ => {
                Err(ApiError::new(ErrorWord::WrongState, "no dump is waiting").hint("`hearth status` shows all dumps"))
            }
        }
    }

    /// Gives up all dumps.
    pub fn discard_dumps(&mut self, context: &Context) -> Result<(), ApiError> {
        if !self.dumps.is_busy() {
            return Err(ApiError::new(ErrorWord::WrongState, "no dump is running or waiting"));
        }
        self.dumps.give_up_all();
        // A dump without a thread must end too.
        self.start_next_dump(context);
        Ok(())
    }

    /// Waits for the dumps of a machine that ends, except those that wait for the operator.
    pub fn finish_dumps(&mut self, context: &mut Context) {
        while let Some(first) = self.dumps.first().cloned() {
            if first.wait_still() == DumpState::Waiting {
                first.tell(Order::GiveUp);
            } else {
                self.dumps.over();
                Self::forget_dump(context, first.status().incarnation);
            }
            // Starts the next dump, or the same one if it had no thread.
            self.start_next_dump(context);
        }
    }
}

impl Context {
    /// What QEMU has told of this guest's registers; or why it has not.
    pub(super) fn harvested_registers(&self, incarnation: u32) -> Result<Vec<u8>, String> {
        let path = self.folders.registers(incarnation);
        fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => "QEMU had exited or did not provide them".to_owned(),
            _ => format!("{}: {error}", path.display()),
        })
    }
}

fn note_of(context: &Context, incarnation: u32) -> Option<&DumpNote> {
    context.journal.dumps.iter().find(|note| note.incarnation == incarnation)
}

/// Whether the journal says that this incarnation must be dumped.
pub fn is_noted(context: &Context, incarnation: u32) -> bool {
    note_of(context, incarnation).is_some()
}

/// Whether a guest can be dumped at all. A full disk may be freed later; a folder that cannot be used stays unusable.
pub fn can_dump(context: &Context) -> bool {
    let prepared = dump_folder(&context.config).prepare();
    if let Err(error) = &prepared {
        context.record(EventKind::DumpSkipped { why: crate::chain(error) });
    }
    prepared.is_ok()
}

/// Why there is not enough memory for an earlier dump, this one and the next guest. None if there is.
fn no_room_for(warm_reboot: &WarmReboot, dead: &Incarnation) -> Option<String> {
    let held_bytes = warm_reboot.ember.held_bytes();
    if held_bytes == 0 {
        return None;
    }
    let limit_bytes = warm_reboot.budget.limit_bytes(true);
    let wanted_bytes = held_bytes + dead.ram.residency_bytes().unwrap_or(u64::MAX / 2);
    let (wanted_mib, allowed_mib) = (wanted_bytes >> 20, (limit_bytes - limit_bytes / BOOT_PART_OF_BUDGET) >> 20);
    (wanted_mib > allowed_mib).then(|| {
        format!(
            "an earlier dump is still being written; {wanted_mib} MiB of dead memory would leave the next guest too \
             little (at most {allowed_mib} MiB allowed)"
        )
    })
}

impl Machine {
    fn can_dump(&self) -> bool {
        if !self.lazy_restore.is_complete() {
            let why = "its memory was still being loaded from the snapshot".to_owned();
            self.context.record(EventKind::DumpSkipped { why });
            return false;
        }
        can_dump(&self.context)
    }

    /// Dumps a guest that crashed and stays paused.
    pub(super) fn dump_crashed(&mut self) {
        // The state must be Paused before the dump starts.
        self.tell_state();
        if let Err(refusal) = self.dump_living(Request::default(), None) {
            self.context.record(EventKind::DumpSkipped { why: refusal.message });
        }
    }

    /// Has a thread read what only a living QEMU can tell; `harvested` follows. If QEMU hangs or lies, only the registers are lost.
    pub(super) fn harvest(&mut self) -> Result<(), MachineError> {
        if !self.can_dump() {
            return self.apply(Input::Harvested);
        }
        let Some(life) = self.state.guest() else { return Ok(()) };
        let (began, incarnation, generation) = (Instant::now(), life.incarnation.number, life.generation.number);
        let (tell, qmp) = (self.context.outside.tell.clone(), life.generation.qmp.clone());
        CrashRecovery::note_dump(&mut self.context, incarnation);
        let ask = move || {
            let registers = qmp.registers(HARVEST_PATIENCE).map_err(|error| crate::chain(&error));
            // Fails only when the loop is gone.
            let _ = tell.send(Event::Harvested { generation, began, registers });
        };
        match std::thread::Builder::new().name(format!("harvest-{}", self.context.config.name)).spawn(ask) {
            Ok(_) => Ok(()),
            Err(error) => self.harvested(began, Err(format!("cannot start a thread: {error}"))),
        }
    }

    /// QEMU has told all that is needed of it.
    pub(super) fn harvested(&mut self, began: Instant, registers: Result<Vec<u8>, String>) -> Result<(), MachineError> {
        let kept = registers.and_then(|bytes| {
            let path = self.context.folders.registers(self.context.journal.incarnation);
            let written = fs::write(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()));
            written.map(|()| bytes.len() as u64)
        });
        self.crash_recovery.registers_read(&self.context, began, kept);
        self.apply(Input::Harvested)
    }

    /// Notes a dump, without registers, of a guest whose QEMU died by itself.
    pub(super) fn note_death(&mut self, dead: &Incarnation, cause: EndCause) {
        if cause == EndCause::QemuDied && self.context.config.on_panic == OnPanic::DumpAndRecover && self.can_dump() {
            CrashRecovery::note_dump(&mut self.context, dead.number);
        }
    }

    pub(super) fn handle_dump(&mut self, incarnation: u32, message: DumpMessage) -> Result<(), MachineError> {
        if self.crash_recovery.handle_dump(&mut self.context, &mut self.recovery, incarnation, message) {
            return self.dump_over();
        }
        Ok(())
    }

    fn dump_over(&mut self) -> Result<(), MachineError> {
        // While a guest is paused for a dump there is no other dump.
        self.resume_after_dump();
        self.crash_recovery.start_next_dump(&self.context);
        if self.crash_recovery.dumps.is_busy() { Ok(()) } else { self.apply(Input::DumpsOver) }
    }
}
