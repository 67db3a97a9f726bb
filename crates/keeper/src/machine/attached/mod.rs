//! Attached: a domain of libvirt. libvirt starts and ends its QEMU; the keeper serves its disks and keeps its memory.
//!
//! ```text
//!         libvirt is about to start QEMU        QEMU has told a disk of its memory
//!   Off ---------------------------------> Awaited -------------------------------> Running
//!    ^                                        | libvirt could not start it             | QEMU has ended
//!    +----------------------------------------+----------------------------------------+
//!
//!   Off, with the order to stop, a changed file, or a detached domain ---> Stopped: the keeper ends once its dumps are written
//! ```
//!
//! It is made of the same parts as a `Machine`, and does with a dead guest what that does: drain, bank, settle. QEMU's memory has no
//! name (memfd): it outlives QEMU because the keeper has a descriptor of it, and ends with the keeper. While the domain is off its
//! images are closed, so that other programs can use them, and nothing is fetched of a disk that is still arriving; they are compared
//! with their notes before the next start. The dead guest's memory is kept for a time, and then only boot set and cache map are left.
//!
//! A guest that is reset inside its QEMU is the other way (`in_place`). One that has crashed is dumped beside the next one (`crash`).
//!
//! libvirt's hook tells when a start begins and when QEMU has ended (`hearth hook`); libvirt's file with QEMU's pid tells which
//! process may connect. Nothing here speaks with libvirt.

mod crash;
mod in_place;
mod libvirt_state;
mod orders;
mod qemu;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_api::{EmberMode, EndCause, EventKind, MachineState};
use hearth_disk::arrival::MissPolicy;
use hearth_disk::image::Unwritten;
use hearth_disk::ledger::Ledger;
use hearth_disk::server::{DiskServer, MemoryPlace, Peer, Question, ToldMemory};
use hearth_memory::room::HostMemory;
use hearth_memory::{FileOffset, GuestPhysicalAddress, Layout, PAGE_BYTES, Place, PlacedFile, RamFile};
use hearth_qemu::{Process, ProcessId, memory_file_of};
use hearth_recovery::incarnation::{Incarnation, discard_files, discard_ram, numbers_in};
use hearth_recovery::journal::{MemoryNote, QemuIdentity};
use hearth_recovery::warm_reboot::restored::{CarriedOver, carry_over};
use hearth_recovery::warm_reboot::{Phase, tracking};

use super::backfill::{Backfill, handle_backfill};
use super::crash_recovery::CrashRecovery;
use super::disk_copy::DiskCopies;
use super::disks::Disks;
use super::fast_remount::FastRemount;
use super::leftovers::{self, Needed};
use super::takeover::{must_find_the_same_files, must_serve_the_same_disks};
use super::timeline::{LastRecovery, Timeline};
use super::warm_reboot::WarmReboot;
use super::{Context, End, MachineError, access, begin_keeping, launch};
use crate::attachment::Attachment;
use crate::config::OnPanic;
use crate::event::Event;
use crash::{Crash, NextStart};
use in_place::Resets;
use qemu::LastVersion;

/// libvirt's files with the pids of its QEMUs, each there before its QEMU runs, and with their states.
const QEMU_FOLDER: &str = "/run/libvirt/qemu";
/// How often to look for the QEMU that libvirt is starting. It connects to its disks about 0.1 s after it has its pid.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long a restored guest waits at most until its blocks are found: 6,671 took 125 ms on a busy host, without optimizations.
const CARRY_OVER: Duration = Duration::from_secs(2);

/// A domain of libvirt under its keeper.
pub struct Attached {
    context: Context,
    warm_reboot: WarmReboot,
    fast_remount: FastRemount,
    disks: Disks,
    state: State,
    recovery: LastRecovery,
    crash_recovery: CrashRecovery,
    /// The last guest has crashed, and the next one does not run yet.
    next_start: Option<NextStart>,
    /// When the dead guest's memory is released, if the domain is still off then.
    release_at: Option<Instant>,
    resets: Resets,
    /// What was known of the last guest's memory, while a QEMU restores that guest into its own.
    saved: Option<Arc<Mutex<Ledger>>>,
    version: LastVersion,
    copies: DiskCopies,
    /// By a signal, when its dumps are written. Its guest, if it has one, waits for the next keeper.
    is_told_to_end: bool,
}

enum State {
    /// The domain has no QEMU. The images are closed.
    Off,
    /// The disks are served, and libvirt is starting QEMU: a process that is not older than this.
    Awaited {
        since_ticks: u64,
        process: Option<Process>,
    },
    Running(Life),
    Stopped,
}

/// A QEMU of libvirt's that has told its memory.
struct Life {
    process: Process,
    /// None: nothing of its memory is kept.
    incarnation: Option<Incarnation>,
    began: Instant,
    /// Why nothing is kept was reported.
    is_reported: bool,
    crash: Option<Crash>,
}

impl Life {
    fn new(process: Process, incarnation: Option<Incarnation>) -> Self {
        let began = process.began().unwrap_or_else(Instant::now);
        Self { process, incarnation, began, is_reported: false, crash: None }
    }
}

impl Attached {
    /// Takes over the QEMU that a dead keeper has served, if there is one.
    pub fn begin(context: Context) -> Result<Self, MachineError> {
        let (warm_reboot, disks) = begin_keeping(&context)?;
        let mut attached = Self {
            context,
            warm_reboot,
            fast_remount: FastRemount::default(),
            disks,
            state: State::Off,
            recovery: LastRecovery::default(),
            crash_recovery: CrashRecovery::default(),
            next_start: None,
            release_at: None,
            resets: Resets::default(),
            saved: None,
            version: LastVersion::default(),
            copies: DiskCopies::default(),
            is_told_to_end: false,
        };
        let taken_over = match attached.take_over() {
            Err(error) if !attached.disks.backfill.is_complete() => {
                attached.leave(DiskServer::abandon);
                return Err(error);
            }
            taken_over => taken_over?,
        };
        attached.take_over_crash();
        if taken_over {
            attached.warm_reboot.divide_disks(&attached.context, &attached.disks);
        } else {
            let folder = &attached.context.folders.memory;
            numbers_in(folder).into_iter().for_each(|number| discard_files(folder, number));
            leftovers::remove(&attached.context.folders.runtime, &Needed::default());
            attached.disks.images.begin_start();
            attached.warm_reboot.begin_without_memory();
            // The last keeper may have died while libvirt was starting a QEMU.
            if attached.find_qemu(0).is_some() {
                attached.serve(0)?;
            } else if Attachment::of(&attached.context.config.name).is_detached() {
                // Its guest has ended meanwhile.
                attached.state = State::Stopped;
            }
        }
        attached.tell_state();
        Ok(attached)
    }

    /// Handles events until the keeper is told to end. `tell_ready`: what follows once it takes requests.
    pub fn run(mut self, events: &Receiver<Event>, tell_ready: impl FnOnce()) -> Result<End, MachineError> {
        tell_ready();
        while !self.is_over() {
            let event = match self.deadline() {
                None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(deadline) => events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
            };
            self.context.outside.watchdog.main().begin();
            let handled = match event {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => self.time_is_up(),
                Err(RecvTimeoutError::Disconnected) => unreachable!("the machine itself holds a sender"),
            };
            self.tell_state();
            if let Err(error) = handled {
                self.context.record(EventKind::Error { message: crate::chain(&error) });
                self.context.outside.event_log.record_state(MachineState::Failed);
                self.crash_recovery.dumps.give_up_for("its keeper ended, and the dead guest's memory with it");
                self.end(DiskServer::abandon);
                return Err(error);
            }
            self.context.outside.watchdog.main().end();
        }
        self.end(DiskServer::leave);
        Ok(End::Stopped)
    }

    fn is_over(&self) -> bool {
        let ends = matches!(self.state, State::Stopped) || self.is_told_to_end;
        ends && !self.crash_recovery.must_wait_for_dumps()
    }

    fn deadline(&self) -> Option<Instant> {
        let own = match self.state {
            State::Off => {
                let next_start = self.next_start.as_ref().and_then(NextStart::deadline);
                [self.release_at, next_start].into_iter().flatten().min()
            }
            State::Awaited { .. } => Some(Instant::now() + LOOK_EVERY),
            State::Running(_) | State::Stopped => None,
        };
        [own, self.fast_remount.ready_at, self.resets.deadline()].into_iter().flatten().min()
    }

    fn time_is_up(&mut self) -> Result<(), MachineError> {
        let now = Instant::now();
        if self.fast_remount.ready_at.is_some_and(|ready_at| ready_at <= now) {
            self.fast_remount.ready(&self.context, &self.warm_reboot, &self.disks, "`remount.ready_after` has passed");
        }
        if self.resets.deadline().is_some_and(|deadline| deadline <= now) {
            return self.go_on_with_reset();
        }
        match self.state {
            State::Off if self.release_at.is_some_and(|at| at <= now) => self.release_memory(),
            State::Off if self.next_start.as_ref().and_then(NextStart::deadline).is_some_and(|at| at <= now) => {
                self.end_back_off();
            }
            State::Awaited { .. } => self.look_for_qemu(),
            _ => {}
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Result<(), MachineError> {
        match event {
            Event::Request { command, answer } => {
                if let Some(reply) = self.obey(command, &answer) {
                    // The client may have hung up.
                    let _ = answer.send(reply);
                }
            }
            Event::Terminate => {
                if self.is_told_to_end {
                    self.crash_recovery.dumps.give_up_all();
                }
                self.is_told_to_end = true;
            }
            Event::DiskAsks(Question::Memory(told)) => return self.told_memory(&told),
            Event::DiskAsks(Question::Driver { is_simple }) => return self.new_driver(is_simple),
            Event::QemuEnded { generation, how } if generation == self.context.journal.generation => {
                return self.qemu_ended(how);
            }
            Event::Disk { disk, notice } => Disks::handle_disk(&self.context, disk, notice),
            Event::Backfill(message) => handle_backfill(&self.context, message),
            Event::DiskCopy { number, message } => self.copies.handle(&self.context, number, message),
            Event::DiskEnded { disk, why } => return Err(MachineError::DiskEnded { disk, why }),
            Event::Dump { incarnation, message } => {
                let (context, recovery) = (&mut self.context, &mut self.recovery);
                if self.crash_recovery.handle_dump(context, recovery, incarnation, message) {
                    self.crash_recovery.start_next_dump(context);
                }
            }
            Event::Memory(message) => {
                self.warm_reboot.handle_memory(&self.context, &self.disks, &mut self.recovery, message)
            }
            // Of a QEMU that has ended, or from parts that a domain of libvirt does not have.
            _ => {}
        }
        Ok(())
    }

    /// Opens the images and serves them to a QEMU that is not older than this.
    fn serve(&mut self, since_ticks: u64) -> Result<(), MachineError> {
        self.fast_remount.boot_begins(&self.context, &self.warm_reboot);
        // What arrives changes an image, so nothing is to arrive before the images are compared that they do not need to be opened.
        self.disks.find_backfill(&self.context, MissPolicy::Urge)?;
        self.disks.open(&mut self.context, &self.warm_reboot, None, None, Unwritten::Drop)?;
        self.disks.judge_idle(&self.context, &self.warm_reboot, &mut self.recovery);
        self.disks.backfill.set_miss_policy(MissPolicy::Wait);
        self.state = State::Awaited { since_ticks, process: None };
        Ok(())
    }

    /// The domain has no QEMU: closes the images. The dead guest's memory stays for now.
    fn close(&mut self) {
        self.fast_remount.boot_cut_off();
        if self.saved.take().is_some() {
            self.recovery.set_cold("libvirt did not restore the guest that it had saved".to_owned());
        }
        // Before the images are noted: what arrives changes them.
        self.disks.backfill = Backfill::default();
        self.disks.close_for_wait(&mut self.context, &self.warm_reboot);
        self.state = State::Off;
        if Attachment::of(&self.context.config.name).is_detached() {
            self.state = State::Stopped;
        }
    }

    /// Lets the QEMU that libvirt has started connect to its disks.
    fn look_for_qemu(&mut self) {
        let State::Awaited { since_ticks, process } = &self.state else { return };
        let since_ticks = *since_ticks;
        if process.is_none() {
            let Some(process) = self.find_qemu(since_ticks) else { return };
            let ProcessId { pid, start_ticks } = process.id();
            if let Err(error) = self.watch(&process, self.context.journal.generation + 1) {
                tracing::warn!(%error, "cannot watch QEMU; trying again");
                return;
            }
            self.context.journal.generation += 1;
            self.disks.expect_only(Peer { pid, start_ticks });
            self.state = State::Awaited { since_ticks, process: Some(process) };
        }
        // The process becomes QEMU's user before it becomes QEMU.
        let State::Awaited { process: Some(process), .. } = &self.state else { return };
        let id = process.id();
        if let Err(error) = access::admit(id.pid, &self.context.folders.runtime, &self.disks.servers) {
            tracing::debug!(%error, "cannot give QEMU access to its disks; trying again");
        }
        self.begin_restore(id);
    }

    /// The domain's process, if it is not older than this.
    fn find_qemu(&self, since_ticks: u64) -> Option<Process> {
        let file = Path::new(QEMU_FOLDER).join(format!("{}.pid", self.context.config.name));
        let pid = fs::read_to_string(file).ok()?.trim().parse().ok()?;
        let Peer { pid, start_ticks } = Peer::of(pid).ok()?;
        if start_ticks < since_ticks {
            return None;
        }
        Process::adopt_foreign(ProcessId { pid, start_ticks }).ok()
    }

    fn watch(&self, process: &Process, generation: u32) -> std::io::Result<()> {
        let tell = self.context.outside.tell.clone();
        // Fails only when the loop has ended.
        process.watch(move |how| drop(tell.send(Event::QemuEnded { generation, how })))
    }

    /// QEMU waits until the disks know what to track.
    fn told_memory(&mut self, told: &ToldMemory) -> Result<(), MachineError> {
        let state = std::mem::replace(&mut self.state, State::Off);
        let (state, is_new) = match state {
            State::Awaited { process: Some(process), .. } if process.id().pid == told.pid => {
                self.next_incarnation();
                (State::Running(Life::new(process, None)), true)
            }
            other => (other, false),
        };
        self.state = state;
        // A QEMU that has ended may have left its question behind.
        let State::Running(life) = &self.state else { return Ok(()) };
        let is_kept = is_tracked(&self.context) || self.context.config.on_panic == OnPanic::DumpAndRecover;
        let pid = life.process.id();
        if life.incarnation.is_none() && is_kept {
            self.keep_memory(told, pid);
        }
        let incarnation = if let State::Running(life) = &self.state { life.incarnation.clone() } else { None };
        self.forget_unless_tracked(incarnation.as_ref());
        self.warm_reboot.monitor.watch(incarnation.clone());
        if is_new {
            self.begin_life(pid)?;
        } else {
            self.context.save_journal();
        }
        self.track(incarnation.as_ref())
    }

    /// Tracks the memory that QEMU has told of, or reports why not.
    fn keep_memory(&mut self, told: &ToldMemory, pid: ProcessId) {
        let found = incarnation_in(&self.context, told);
        if let Ok(incarnation) = &found {
            self.take_size(&incarnation.ram);
            let further = incarnation.ram.identities().skip(1).map(|(identity, _)| identity);
            self.context.journal.memory = Some(MemoryNote {
                identity: incarnation.ram.identity(),
                further: further.collect(),
                low_bytes: incarnation.ram.layout().low_bytes(),
                devices: incarnation.ram.layout().devices().map(|guest| guest.0).collect(),
            });
            self.begin_restore(pid);
            self.carry_over(incarnation);
        }
        let State::Running(life) = &mut self.state else { return };
        match found {
            Ok(incarnation) => life.incarnation = Some(incarnation),
            Err(why) => self.report_not_kept(&why),
        }
    }

    /// Reports once why nothing of the living guest's memory is kept.
    fn report_not_kept(&mut self, why: &str) {
        let State::Running(life) = &mut self.state else { return };
        if !std::mem::replace(&mut life.is_reported, true) {
            let message = format!("nothing of this guest's memory will be kept: {why}");
            self.context.record(EventKind::Error { message });
        }
    }

    /// The domain has as much memory as its QEMU has made.
    fn take_size(&mut self, ram: &RamFile) {
        self.context.config.guest.memory_bytes = ram.bytes();
        self.warm_reboot.set_budget(&self.context.config);
    }

    /// Its memory is the ember's no longer, and will soon be in a QEMU that restores it.
    fn begin_restore(&mut self, process: ProcessId) {
        if self.saved.is_none() && qemu::restores(process) {
            self.saved = self.warm_reboot.ember.leave_ledger();
        }
    }

    /// Finds the blocks of the last guest in the memory that it was restored into.
    fn carry_over(&mut self, restored: &Incarnation) {
        let Some(saved) = self.saved.take() else { return };
        let began = Instant::now();
        match carry_over(&saved, restored, &self.warm_reboot.tagger, began + CARRY_OVER) {
            Ok(CarriedOver { taken, refused, left }) => {
                let duration_ms = began.elapsed().as_secs_f64() * 1e3;
                self.context.record(EventKind::BlocksCarriedOver { pages: taken, refused, left, duration_ms });
            }
            Err(error) => tracing::warn!(error = crate::chain(&error), "the restored guest's blocks are not known"),
        }
    }

    /// Answers the disks that wait.
    fn track(&mut self, incarnation: Option<&Incarnation>) -> Result<(), MachineError> {
        self.forget_unless_tracked(incarnation);
        let tracking = incarnation.and_then(|it| tracking(it, &self.warm_reboot.tagger, &self.warm_reboot.sources));
        self.disks.servers.iter().try_for_each(|disk| {
            let failed = |source| MachineError::Server { disk: disk.name().to_owned(), source };
            disk.answer(tracking.clone()).map_err(failed)
        })
    }

    /// Drops what is held of the disks if nobody will note what this guest writes to them.
    fn forget_unless_tracked(&mut self, incarnation: Option<&Incarnation>) {
        if incarnation.is_none_or(|it| it.ledger.is_none()) {
            self.warm_reboot.forget_disks();
            self.saved = None;
        }
    }

    fn next_incarnation(&mut self) {
        self.context.journal.incarnation += 1;
        self.context.journal.write_through.clear();
        self.context.outside.event_log.set_incarnation(self.context.journal.incarnation);
        self.warm_reboot.begin_incarnation(&self.disks);
    }

    /// Notes a QEMU for the next keeper, before its guest can use the disks.
    fn begin_life(&mut self, process: ProcessId) -> Result<(), MachineError> {
        self.resets = Resets::default();
        self.next_start = None;
        let identity = qemu::identity(process, self.context.journal.generation, &mut self.version);
        let journal = &mut self.context.journal;
        journal.ordered = None;
        journal.disks = launch::disk_identities(&self.context.config.devices);
        journal.ram_bytes = self.context.config.guest.memory_bytes;
        journal.qemu = Some(identity.clone());
        self.context.journal.started_with = Some(self.context.started_with());
        self.context.must_save_journal()?;
        self.warm_reboot.forget_kept_cache_map();
        if let Some(timeline) = &mut self.recovery.timeline {
            timeline.recovered();
        }
        let warm = !self.warm_reboot.ember.incarnations().is_empty();
        let QemuIdentity { pid, generation, version, accelerator, accelerator_why, .. } = identity;
        self.context.record(EventKind::QemuStarted { pid, generation, version, accelerator, accelerator_why });
        self.context.record(EventKind::IncarnationStarted { generation, warm });
        Ok(())
    }

    fn qemu_ended(&mut self, how: String) -> Result<(), MachineError> {
        match std::mem::replace(&mut self.state, State::Off) {
            State::Running(life) => self.end_life(life, how),
            // It has ended before it used its disks. libvirt says why.
            State::Awaited { process: Some(process), .. } if process.has_ended() => {
                self.start_failed();
                Ok(())
            }
            other => {
                self.state = other;
                Ok(())
            }
        }
    }

    /// Makes the dead guest's memory ready for the next one.
    fn end_life(&mut self, life: Life, how: String) -> Result<(), MachineError> {
        let Life { incarnation, began: lived_since, crash, .. } = life;
        let cause = if crash.is_some() { EndCause::Panic } else { EndCause::QemuEnded };
        self.resets = Resets::default();
        // The guest can see no error any more, and its disks must be drained.
        self.disks.backfill.set_miss_policy(MissPolicy::Refuse);
        self.crash_recovery.last_end = Some(cause);
        self.disks.expect_nobody();
        self.copies.make_way("the guest ended");
        self.context.record(EventKind::QemuExited { generation: self.context.journal.generation, how });
        self.context.record(EventKind::IncarnationEnded { cause });
        (self.context.journal.qemu, self.context.journal.memory) = (None, None);
        let why_cold = match &incarnation {
            None => Some("its memory was not tracked".to_owned()),
            Some(dead) if dead.ledger.is_none() => Some("ember = \"off\"".to_owned()),
            Some(_) => None,
        };
        self.recovery.timeline = Some(Timeline::start(self.context.journal.incarnation + 1, cause, why_cold));
        self.crash_recovery.record_harvest(&self.context, &mut self.recovery);
        let began = Instant::now();
        self.warm_reboot.succession(&self.disks.servers).drain()?;
        self.recovery.phase_ended(&self.context, Phase::Drain.name(), began, began.elapsed());
        self.warm_reboot.monitor.watch(None);
        match incarnation {
            Some(dead) => self.bank(dead),
            None => self.warm_reboot.clear_cache_map(),
        }
        self.plan_next_start(crash, lived_since.elapsed(), cause);
        self.context.save_journal();
        // A crash loop's wait does not count.
        let waits = self.next_start.as_ref().is_some_and(|next| next.deadline().is_some());
        self.release_at = if waits { None } else { self.keep_until() };
        self.close();
        Ok(())
    }

    /// When memory is released that is kept from now on.
    fn keep_until(&self) -> Option<Instant> {
        self.context.config.memory.keep_memory_s.map(|s| Instant::now() + Duration::from_secs(s))
    }

    fn bank(&mut self, dead: Incarnation) {
        let began = Instant::now();
        let is_cold = dead.ledger.is_none();
        let hold = CrashRecovery::hold(&mut self.context, &self.warm_reboot, &dead);
        match is_cold {
            false => self.warm_reboot.begin_cache_map(&dead, || self.context.harvested_registers(dead.number).ok()),
            true => self.warm_reboot.clear_cache_map(),
        }
        let (context, recovery) = (&mut self.context, &mut self.recovery);
        let held = hold.filter(|hold| self.warm_reboot.bank_held(context, recovery, &dead, hold, is_cold));
        match held {
            Some(hold) => {
                self.crash_recovery.queue_dump(context, &self.warm_reboot, &self.disks, &dead, hold);
            }
            // Its memory goes with it.
            None if is_cold => {}
            None => self.warm_reboot.bank(context, recovery, &self.disks, dead),
        }
        self.recovery.phase_ended(&self.context, Phase::Bank.name(), began, began.elapsed());
        self.warm_reboot.monitor.settle();
    }

    /// The domain has been off for so long that the host gets the memory back.
    fn release_memory(&mut self) {
        if self.crash_recovery.must_wait_for_dumps() {
            self.release_at = self.keep_until();
            return;
        }
        self.release_at = None;
        self.warm_reboot.ember.extinguish();
        self.warm_reboot.begin_without_memory();
        self.recovery.set_cold("the domain was off for longer than `keep_memory`".to_owned());
    }

    /// Takes over the QEMU that the journal names, if it lives.
    fn take_over(&mut self) -> Result<bool, MachineError> {
        let Some(qemu) = self.context.journal.qemu.clone() else { return Ok(false) };
        let id = ProcessId { pid: qemu.pid, start_ticks: qemu.start_ticks };
        let Ok(process) = Process::adopt_foreign(id) else {
            (self.context.journal.qemu, self.context.journal.memory) = (None, None);
            return Ok(false);
        };
        must_serve_the_same_disks(&self.context.journal, &self.context.config, id.pid)?;
        must_find_the_same_files(&self.context.config, id.pid, self.disks.images.begin_take_over())?;
        let (folder, living) = (&self.context.folders.memory, self.context.journal.incarnation);
        self.context.outside.event_log.set_incarnation(living);
        // What the dead keeper had of earlier guests has lost its memory, or its guard.
        numbers_in(folder)
            .into_iter()
            .filter(|number| *number != living)
            .for_each(|number| discard_files(folder, number));
        // The living guest's memory has no name: this was to be its ember when that keeper died in a reset.
        discard_ram(folder, living);
        let incarnation = self.reopen(id.pid);
        self.forget_unless_tracked(incarnation.as_ref());
        self.disks.find_backfill(&self.context, MissPolicy::Wait)?;
        self.disks.open(&mut self.context, &self.warm_reboot, None, incarnation.as_ref(), Unwritten::Keep)?;
        self.disks.expect_only(Peer { pid: id.pid, start_ticks: id.start_ticks });
        self.disks.admit(&self.context, id.pid);
        self.watch(&process, qemu.generation).map_err(MachineError::Watch)?;
        self.warm_reboot.monitor.watch(incarnation.clone());
        self.context.record(EventKind::KeeperTookOver { qemu_pid: id.pid, generation: qemu.generation });
        self.state = State::Running(Life::new(process, incarnation));
        Ok(true)
    }

    /// Memory and ledger of the living guest. None: its memory was not tracked, or cannot be found.
    fn reopen(&mut self, pid: u32) -> Option<Incarnation> {
        let note = self.context.journal.memory.clone()?;
        let name = memory_name(&self.context);
        let find = |identity| {
            let file = memory_file_of(pid, identity).map_err(|error| error.to_string())?;
            file.map(fs::File::from).ok_or_else(|| "QEMU has no such memory any more".to_owned())
        };
        let files: Result<Vec<_>, _> = std::iter::once(note.identity).chain(note.further).map(find).collect();
        let opened = files.and_then(|files| {
            let layout = layout_of(&files, note.low_bytes, &note.devices)?;
            let ram = RamFile::adopt(files, &name, layout);
            let ram = ram.map_err(|error| crate::chain(&error))?;
            let (folder, number) = (&self.context.folders.memory, self.context.journal.incarnation);
            Incarnation::open_with_ram(folder, number, ram).map_err(|error| crate::chain(&error))
        });
        match opened {
            Ok(incarnation) => {
                self.take_size(&incarnation.ram);
                Some(incarnation)
            }
            Err(why) => {
                tracing::warn!(why, "the guest's memory is not known any more: tracking begins anew");
                None
            }
        }
    }

    fn tell_state(&self) {
        self.context.outside.event_log.record_state(self.shown());
    }

    fn shown(&self) -> MachineState {
        match &self.state {
            State::Off if self.next_start.is_some() => MachineState::Recovering,
            State::Stopped if self.crash_recovery.must_wait_for_dumps() => MachineState::Stopping,
            State::Off | State::Stopped => MachineState::Stopped,
            State::Awaited { .. } => MachineState::Starting,
            State::Running(life) if life.crash.is_some() => MachineState::Paused,
            State::Running(_) => MachineState::Running,
        }
    }

    /// Leaves the guest to the next keeper, which finds it as after a kill of this one.
    fn leave(mut self, leave_disks: fn(Vec<DiskServer>)) {
        self.context.folders.stay_locked();
        leave_disks(std::mem::take(&mut self.disks.servers));
        std::mem::take(&mut self.disks.backfill).leave();
        self.warm_reboot.monitor.leave();
    }

    /// Leaves a QEMU to the next keeper; without one, gives back all memory. `leave_disks`: how the disks' servers are left.
    fn end(mut self, leave_disks: fn(Vec<DiskServer>)) {
        // Its memory ends with this keeper.
        self.crash_recovery.finish_dumps(&mut self.context);
        let serves = !self.disks.servers.is_empty();
        let is_detached = Attachment::of(&self.context.config.name).is_detached();
        if serves && self.context.journal.qemu.is_some() {
            // A read that waits for a missing block would hold up the others.
            let is_complete = self.disks.backfill.is_complete();
            self.leave(if is_complete { leave_disks } else { DiskServer::abandon });
            return;
        }
        if serves {
            self.disks.backfill = Backfill::default();
            self.disks.close_for_wait(&mut self.context, &self.warm_reboot);
        }
        self.warm_reboot.monitor.watch(None);
        // The images are closed: what is saved must fit the notes from the beginning of the wait, so take these before they are compared.
        let are_judged = self.disks.images.are_judged();
        let images = are_judged.then(|| self.warm_reboot.sync_images(&self.context, &self.disks));
        self.disks.judge_idle(&self.context, &self.warm_reboot, &mut self.recovery);
        if let Some(images) = images {
            self.warm_reboot.save_boot_set(&self.context, &self.disks, images);
        }
        self.warm_reboot.discard_memory(&self.context);
        leftovers::remove(&self.context.folders.runtime, &Needed::default());
        // A start that `hearth host` is to make goes on with the next keeper.
        let ordered = self.context.journal.ordered.filter(|_| !is_detached);
        self.context.journal = self.context.journal.without_guest(self.context.config.guest.memory_bytes);
        self.context.journal.ordered = ordered;
        self.context.save_journal();
        if is_detached {
            Attachment::of(&self.context.config.name).remove();
        }
    }
}

/// What the memory is called in errors.
fn memory_name(context: &Context) -> String {
    format!("memory of {}", context.config.name)
}

/// The next incarnation, in the memory that QEMU has told of; or why none of it can be kept.
fn incarnation_in(context: &Context, told: &ToldMemory) -> Result<Incarnation, String> {
    let files: Result<Vec<_>, _> = told.files.iter().map(|told| told.file.try_clone()).collect();
    let files = files.map_err(|error| error.to_string())?;
    let bytes = bytes_of(&files)?;
    let placed: Result<Vec<_>, String> = told
        .files
        .iter()
        .zip(&files)
        .map(|(told, file)| {
            let place = |place: &MemoryPlace| Place {
                guest: GuestPhysicalAddress(place.guest),
                file: FileOffset(place.file_offset),
                bytes: place.bytes,
            };
            let bytes = bytes_of(std::slice::from_ref(file))?;
            Ok(PlacedFile { bytes, places: told.places.iter().map(place).collect() })
        })
        .collect();
    let layout = Layout::of_files(&placed?).ok_or("it is laid out in an unknown way")?;
    let ram = RamFile::adopt(files, &memory_name(context), layout).map_err(|error| crate::chain(&error))?;
    // Its files cannot shrink.
    if ram.bytes() != bytes {
        return Err("it grows meanwhile".to_owned());
    }
    let (folder, number) = (&context.folders.memory, context.journal.incarnation);
    Incarnation::with_ram(folder, number, Arc::new(ram), is_tracked(context)).map_err(|error| crate::chain(&error))
}

/// Layout of memory that an earlier keeper has noted. `devices`: addresses of the memory devices, whose files are the last.
fn layout_of(files: &[fs::File], low_bytes: u64, devices: &[u64]) -> Result<Layout, String> {
    // Of all files: a sum that no memory can have is refused.
    bytes_of(files)?;
    let at = files.len().checked_sub(devices.len()).ok_or("it has more devices than files")?;
    let (board, plugged) = files.split_at(at);
    let board = Layout::split_at(low_bytes, bytes_of(board)?);
    plugged.iter().zip(devices).try_fold(board, |layout, (file, guest)| {
        let layout = layout.with_device(GuestPhysicalAddress(*guest), bytes_of(std::slice::from_ref(file))?);
        layout.ok_or_else(|| "its devices overlap".to_owned())
    })
}

/// Whether the guest's blocks are noted, for the next guest. Otherwise its memory is kept only for a dump.
fn is_tracked(context: &Context) -> bool {
    context.config.memory.ember == EmberMode::On
}

/// Size of all files together, if they can be one memory. QEMU may claim any size; with swap a guest may have more than the host.
fn bytes_of(files: &[fs::File]) -> Result<u64, String> {
    let bytes = files.iter().try_fold(0_u64, |sum, file| {
        let bytes = file.metadata().map_err(|error| error.to_string())?.len();
        Ok::<_, String>(sum.saturating_add(bytes))
    })?;
    let host_bytes = HostMemory::now().map_err(|error| crate::chain(&error))?.total_bytes;
    match bytes > 2 * host_bytes || bytes / PAGE_BYTES > u64::from(u32::MAX) {
        true => Err(format!("it claims to have {} MiB, and the host has {}", bytes >> 20, host_bytes >> 20)),
        false => Ok(bytes),
    }
}
