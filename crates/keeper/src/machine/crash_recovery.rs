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

use hearth_api::{DumpState, EndCause, EventKind};
use hearth_recovery::crash_recovery::{Claim, HARVEST_PATIENCE};
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::DumpNote;
use hearth_recovery::vmcore::DeadRam;
use hearth_recovery::vmcore::dump::incomplete_path;

use super::crash_loop::Crashes;
use super::dump::{Job, NoThread, Order, Task};
use super::dumps::{Dumps, Request, dump_folder};
use super::lazy_restore::LazyRestore;
use super::state::Input;
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
    fn note_dump(context: &mut Context, incarnation: u32) {
        if note_of(context, incarnation).is_none() {
            context.journal.dumps.push(DumpNote { incarnation, file: None });
        }
        context.save_journal();
    }

    fn forget_dump(context: &mut Context, incarnation: u32) {
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

/// Whether a guest can be dumped at all. A full disk may be freed later; a folder that cannot be used stays unusable.
fn can_dump(context: &Context, restore: &LazyRestore) -> bool {
    if !restore.is_complete() {
        let why = "its memory was still being loaded from the snapshot".to_owned();
        context.record(EventKind::DumpSkipped { why });
        return false;
    }
    let prepared = dump_folder(&context.config).prepare();
    if let Err(error) = &prepared {
        context.record(EventKind::DumpSkipped { why: crate::chain(error) });
    }
    prepared.is_ok()
}

impl Machine {
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
        if !can_dump(&self.context, &self.lazy_restore) {
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
        let took = began.elapsed();
        let kept = registers.and_then(|bytes| {
            let path = self.context.folders.registers(self.context.journal.incarnation);
            let written = fs::write(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()));
            written.map(|()| bytes.len() as u64)
        });
        self.crash_recovery.harvest = Some(Harvest { began, took });
        self.context.record(match kept {
            Ok(bytes) => EventKind::RegistersTaken { bytes, duration_ms: took.as_secs_f64() * 1e3 },
            Err(why) => EventKind::DumpWarning { message: format!("no registers: {why}") },
        });
        self.apply(Input::Harvested)
    }

    /// Notes a dump, without registers, of a guest whose QEMU died by itself.
    pub(super) fn note_death(&mut self, dead: &Incarnation, cause: EndCause) {
        if cause == EndCause::QemuDied
            && self.context.config.on_panic == OnPanic::DumpAndRecover
            && can_dump(&self.context, &self.lazy_restore)
        {
            CrashRecovery::note_dump(&mut self.context, dead.number);
        }
    }

    /// The hold with which a dead incarnation is banked. None if it will not be dumped.
    pub(super) fn dump_hold(&mut self, dead: &Incarnation) -> Option<Arc<Hold>> {
        note_of(&self.context, dead.number)?;
        if let Some(why) = self.no_room_for(dead) {
            self.context.record(EventKind::DumpSkipped { why });
            CrashRecovery::forget_dump(&mut self.context, dead.number);
            return None;
        }
        Some(Arc::new(Hold::everything(dead.ram.pages())))
    }

    /// Why there is not enough memory for an earlier dump, this one and the next guest. None if there is.
    fn no_room_for(&self, dead: &Incarnation) -> Option<String> {
        let held_bytes = self.warm_reboot.ember.held_bytes();
        if held_bytes == 0 {
            return None;
        }
        let limit_bytes = self.warm_reboot.budget.limit_bytes(true);
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
        let claim = Claim::new(self.warm_reboot.ember.clone(), hold, dead.number, &dead.ram);
        let noted = note_of(&self.context, dead.number).and_then(|note| note.file.clone());
        let begun = noted.is_some();
        let file = noted.unwrap_or_else(|| dump_folder(&self.context.config).name(dead.number, SystemTime::now()));
        if let Some(note) = self.context.journal.dumps.iter_mut().find(|note| note.incarnation == dead.number) {
            note.file = Some(file.clone());
        }
        self.context.save_journal();
        let registers = self.context.harvested_registers(dead.number);
        let memory = DeadRam::new(dead.ram.clone());
        let request = Request { file: Some(file), ..Request::default() };
        let (task, progress) = self.task(request, dead.number, memory, Some(claim), registers);
        self.crash_recovery.dumps.queue(dead.number, (Task { begun, ..task }, progress));
        self.crash_recovery.start_next_dump(&self.context);
    }

    pub(super) fn handle_dump(&mut self, incarnation: u32, message: DumpMessage) -> Result<(), MachineError> {
        match message {
            DumpMessage::Event(EventKind::CrashReason { message }) => {
                if let Some(timeline) = &mut self.recovery.timeline {
                    timeline.crash_reason(incarnation, &message);
                }
            }
            DumpMessage::Event(_) => {}
            DumpMessage::Phase { phase, began, took } => {
                self.recovery.phase_ended(&self.context, phase.name(), began, took)
            }
            DumpMessage::Over => return self.dump_over(incarnation),
        }
        Ok(())
    }

    fn dump_over(&mut self, incarnation: u32) -> Result<(), MachineError> {
        self.crash_recovery.dumps.over();
        CrashRecovery::forget_dump(&mut self.context, incarnation);
        // While a guest is paused for a dump there is no other dump.
        self.resume_after_dump();
        self.crash_recovery.start_next_dump(&self.context);
        if self.crash_recovery.dumps.is_busy() { Ok(()) } else { self.apply(Input::DumpsOver) }
    }

    /// Waits for the dumps of a machine that ends, except those that wait for the operator.
    pub(super) fn finish_dumps(&mut self) {
        while let Some(first) = self.crash_recovery.dumps.first().cloned() {
            if first.wait_still() == DumpState::Waiting {
                first.tell(Order::GiveUp);
            } else {
                self.crash_recovery.dumps.over();
                CrashRecovery::forget_dump(&mut self.context, first.status().incarnation);
            }
            // Starts the next dump, or the same one if it had no thread.
            self.crash_recovery.start_next_dump(&self.context);
        }
    }
}
