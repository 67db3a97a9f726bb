//! Lives: how incarnations begin, end and follow each other.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_api::{EmberMode, EndCause, EventKind, MachineState};
use hearth_disk::arrival::Conduct;
use hearth_disk::image::Unwritten;
use hearth_disk::server::{DiskServer, Expected, Peer};
use hearth_recovery::crash_recovery;
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::{Incarnation, discard_files};
use hearth_recovery::journal::{GuestNote, QemuIdentity};
use hearth_recovery::rejuvenation::{ClockDebt, parked};
use hearth_recovery::warm_reboot::{Phase, Succession};

use super::crash::Harvest;
use super::dumps::Dumps;
use super::generation::{Devices, Generation};
use super::leftovers::Needed;
use super::timeline::Timeline;
use super::{DRAIN_PATIENCE, Life, Machine, MachineError, Wanted, access, launch, leftovers};
use crate::config::Configured;
use crate::folders::own_user;

impl Machine {
    pub(super) fn start_afresh(&mut self) -> Result<(), MachineError> {
        self.take_next_configuration();
        let incarnation = self.next_incarnation()?;
        self.open_disks(&incarnation, Unwritten::Drop)?;
        self.launch(incarnation)
    }

    /// QEMU's process is gone: its memory is dead.
    pub(super) fn qemu_ended(&mut self, how: String) -> Result<(), MachineError> {
        let Some(Life { incarnation, generation, began, cause, .. }) = self.life.take() else { return Ok(()) };
        // It sees no error any more, and its disks are to be drained.
        self.arrivals.set_conduct(Conduct::Refuse);
        self.cancel_save("the guest ended");
        self.forget_frozen();
        self.boot_cut_off();
        self.drop_gate();
        self.expect_nobody();
        let cause = cause.unwrap_or(EndCause::QemuDied);
        self.last_end = Some(cause);
        self.record(EventKind::QemuExited { generation: generation.number, how });
        self.record(EventKind::IncarnationEnded { cause });
        self.parts.folders.discard_generation(generation.number);
        // Now, and not when all is done: its passt may still hold the ports that the next one is going to forward.
        drop(generation);
        self.journal.qemu = None;
        self.forget_greeting();
        self.journal.guest = GuestNote::Runs;
        let stops = matches!(self.wanted, Wanted::Stop { .. })
            || cause == EndCause::GuestShutdown && self.wanted == Wanted::Run
            || self.parts.rehearses;
        self.end_living_dump();
        self.note_death(&incarnation, cause);
        self.drop_restore();
        if stops {
            return self.stop_after_dumps(incarnation);
        }
        let delay = self.crashes.ended(began.elapsed(), cause, &self.parts.config.crash);
        // Who asked for the next guest gets it.
        let delay = delay.filter(|_| self.wanted == Wanted::Run);
        self.bury(incarnation, cause)?;
        match delay {
            Some(delay) => {
                self.back_off(delay);
                Ok(())
            }
            None => self.start_next(),
        }
    }

    /// What the dead incarnation leaves is made ready for the next one.
    fn bury(&mut self, dead: Incarnation, cause: EndCause) -> Result<(), MachineError> {
        let why_cold = self.why_cold(&dead);
        self.wanted = Wanted::Run;
        self.enter(MachineState::Recovering);
        self.timeline = Some(Timeline::start(dead.number + 1, cause, why_cold.clone()));
        self.harvested();
        self.phase(Phase::Drain, |machine| machine.succession().drain())?;
        self.arrivals.set_conduct(Conduct::Wait);
        let hold = self.hold_for(&dead);
        match (hold, &why_cold) {
            (Some(hold), _) => {
                let is_cold = why_cold.is_some();
                self.phase(Phase::Bank, |machine| machine.bank_held(dead, hold, is_cold));
            }
            (None, Some(_)) => self.drop_memory(&dead),
            (None, None) => self.phase(Phase::Bank, |machine| machine.bank(dead)),
        }
        // Beside all that follows: the next guest is going to need the memory.
        self.warden.settle();
        Ok(())
    }

    /// The next incarnation starts from what the dead one left; from less, or later, if that fails.
    pub(super) fn start_next(&mut self) -> Result<(), MachineError> {
        match self.try_next() {
            Err(error) if self.may_wait_for_space(&error) => self.wait_for_space(&error),
            tried => self.or_try_again(tried),
        }
    }

    pub(super) fn try_next(&mut self) -> Result<(), MachineError> {
        self.take_next_configuration();
        match self.try_as_configured() {
            Err(error @ MachineError::Launch(_))
                if !self.may_wait_for_space(&error) && self.take_back_configuration(&error) =>
            {
                self.discard_unused();
                self.try_as_configured()
            }
            tried => tried,
        }
    }

    /// The incarnation that did not begin: the next one has its number.
    pub(super) fn discard_unused(&mut self) {
        self.boot_cut_off();
        self.drop_gate();
        self.expect_nobody();
        self.warden.watch(None);
        self.parts.folders.discard_generation(self.journal.generation);
        discard_files(&self.parts.folders.memory, self.journal.incarnation);
        self.journal.incarnation -= 1;
    }

    fn try_as_configured(&mut self) -> Result<(), MachineError> {
        self.wanted = Wanted::Run;
        let next = self.next_incarnation()?;
        self.renew_images(&next)?;
        self.phase(Phase::Attach, |machine| machine.succession().attach(&next))?;
        self.phase(Phase::Launch, |machine| machine.launch(next))?;
        self.parts.next.last = None;
        if let Some(began) = self.waits_since.take() {
            self.phase_ended("back-off", began, began.elapsed());
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.recovered();
        }
        Ok(())
    }

    fn why_cold(&self, dead: &Incarnation) -> Option<String> {
        match self.wanted {
            Wanted::Reboot { cold: true, .. } => Some("requested by the operator".to_owned()),
            _ if dead.ledger.is_none() => Some("ember = \"off\"".to_owned()),
            _ => None,
        }
    }

    fn bank(&mut self, dead: Incarnation) {
        let banked = self.succession().bank(&self.parts.folders.memory, dead);
        match banked {
            Ok(()) => self.record_ember(),
            Err(error) => {
                let why = crate::chain(&error);
                tracing::warn!(why, "the reboot will be cold");
                if let Some(timeline) = &mut self.timeline {
                    timeline.turned_cold(why);
                }
            }
        }
    }

    /// The phase that came before QEMU's end.
    fn harvested(&mut self) {
        let Some(Harvest { began, took }) = self.harvest.take() else { return };
        if let Some(timeline) = &mut self.timeline {
            timeline.began(began);
        }
        self.phase_ended(crash_recovery::Phase::Harvest.name(), began, took);
    }

    /// Keeps the dead incarnation for its dump, and, unless the reboot is cold, as ember.
    pub(super) fn bank_held(&mut self, dead: Incarnation, hold: Arc<Hold>, is_cold: bool) {
        self.warm.part(&dead);
        match self.ember.bank_held(dead.clone(), hold.clone()) {
            Ok(()) => {
                if is_cold {
                    self.forget_disks();
                } else {
                    self.record_ember();
                }
                self.queue_dump(&dead, hold);
            }
            Err(error) => {
                self.record(EventKind::DumpSkipped { why: crate::chain(&error) });
                self.bank(dead);
            }
        }
    }

    /// A machine that is to stop ends once the dead guest's dump is over.
    fn stop_after_dumps(&mut self, dead: Incarnation) -> Result<(), MachineError> {
        self.warden.watch(None);
        self.succession().drain()?;
        if let Some(hold) = self.hold_for(&dead) {
            self.bank_held(dead, hold, true);
        }
        self.stop_when_dumped()
    }

    pub(super) fn stop_when_dumped(&mut self) -> Result<(), MachineError> {
        if !self.must_wait_for_dumps() {
            return self.stopped();
        }
        self.note_idle_images();
        self.stops_after_dumps = true;
        self.enter(MachineState::Stopping);
        self.state_why = Some("a dump is being written; `hearth stop --force` discards the rest of it".to_owned());
        Ok(())
    }

    fn drop_memory(&self, dead: &Incarnation) {
        self.forget_disks();
        discard_files(&self.parts.folders.memory, dead.number);
    }

    /// No block of the disks is held any more.
    pub(super) fn forget_disks(&self) {
        self.ember.extinguish();
        self.clear_boot_set();
    }

    fn succession(&self) -> Succession<'_> {
        Succession { disks: &self.disks, warm: &self.warm, tagger: &self.tagger, patience: DRAIN_PATIENCE }
    }

    /// Runs one phase of a recovery and notes its duration, whether it succeeds or not.
    fn phase<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Self) -> T) -> T {
        let began = Instant::now();
        let result = work(self);
        self.phase_ended(phase.name(), began, began.elapsed());
        result
    }

    /// Nothing is noted of the tries of a machine that waits: there may be thousands.
    pub(super) fn phase_ended(&mut self, phase: &str, began: Instant, took: Duration) {
        if self.waits_since.is_some() {
            return;
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.ended(phase, began, took);
        }
        self.record(EventKind::Phase { phase: phase.to_owned(), duration_ms: took.as_secs_f64() * 1e3 });
    }

    pub(super) fn next_incarnation(&mut self) -> Result<Incarnation, MachineError> {
        self.journal.incarnation += 1;
        (self.journal.ordered, self.asked_to_shut_down) = (None, false);
        self.journal.clock_debt = ClockDebt::default();
        self.forget_frozen();
        self.parts.event_log.set_incarnation(self.journal.incarnation);
        let tracked = self.parts.config.ember == EmberMode::On;
        let (folder, ram_bytes) = (&self.parts.folders.memory, self.parts.config.memory_bytes);
        Ok(Incarnation::create(folder, self.journal.incarnation, ram_bytes, tracked)?)
    }

    /// A disk that nobody serves ends this keeper: the next one serves it.
    pub(super) fn watch_disk(&self, server: &DiskServer) {
        self.parts.watchdog.watch_disk(server.name(), server.pulse());
        let (tell, disk) = (self.parts.tell.clone(), server.name().to_owned());
        server.watch(move |why| {
            // Fails only when the loop is gone, and the keeper with it.
            let _ = tell.send(crate::event::Event::DiskEnded { disk, why });
        });
    }

    /// Of keepers and QEMUs that were killed.
    pub(super) fn remove_leftovers(&self) {
        let generation = self.life.as_ref().map(|life| life.generation.number);
        // Of a guest that crashed a moment ago as well.
        let dead = self.journal.dumps.iter().map(|note| note.incarnation);
        let dumps = dead.chain([self.journal.incarnation]).collect();
        leftovers::remove(&self.parts.folders.runtime, &Needed { generation, dumps });
    }

    /// The number of a QEMU that is about to be started, and everything noted that a new keeper must know of it.
    pub(super) fn next_generation(&mut self, incarnation: &Incarnation) -> Result<u32, MachineError> {
        self.journal.generation += 1;
        leftovers::remove_old_logs(&self.parts.folders.runtime);
        self.journal.ember = self.ember.incarnations();
        self.journal.disks = launch::disk_identities(&self.parts.config);
        self.journal.ram_bytes = self.parts.config.memory_bytes;
        self.journal.started_with = Some(self.started_with());
        self.journal.save(&self.parts.folders.journal())?;
        // Before QEMU: its guest fills memory while the keeper still waits for QMP.
        self.warden.watch(Some(incarnation.clone()));
        Ok(self.journal.generation)
    }

    /// What a later keeper knows the guest's configuration by.
    pub(super) fn started_with(&self) -> String {
        Configured { config: self.parts.config.clone(), typed: self.parts.typed.clone() }.for_journal()
    }

    fn launch(&mut self, incarnation: Incarnation) -> Result<(), MachineError> {
        self.boot_begins();
        let devices = Devices { vmgenid: self.vmgenid_of_boot(), guest_agent: self.parts.config.guest_agent };
        let number = self.next_generation(&incarnation)?;
        let generation = Generation::launch(&self.parts, &self.disks, &incarnation, number, devices)?;
        self.record_qemu(&generation);
        if self.gate_wanted() {
            self.shut_gate(&incarnation, &generation);
        }
        generation.run()?;
        self.admit(generation.identity().pid);
        self.adopt(incarnation, generation)?;
        self.watch_ready();
        let warm = self.timeline.as_ref().is_some_and(|timeline| timeline.recovery().warm);
        self.record(EventKind::IncarnationStarted { generation: number, warm });
        Ok(())
    }

    /// Lets a QEMU of another user in to its disks, for the time when it has to connect to them again.
    pub(super) fn admit(&self, pid: u32) {
        if let Err(error) = access::admit(pid, &self.parts.folders.runtime, &self.disks) {
            let message = format!("QEMU (pid {pid}) cannot reconnect to its disks: {error}");
            self.record(EventKind::Error { message });
        }
    }

    pub(super) fn record_qemu(&self, generation: &Generation) {
        let status = generation.status();
        self.record(EventKind::QemuStarted {
            pid: status.pid,
            generation: status.generation,
            version: status.version,
            accelerator: status.accelerator,
            accelerator_why: status.accelerator_why,
        });
        self.record(EventKind::Userfault { generation: generation.number, userfault: status.userfault });
    }

    /// From here on this QEMU, which was just started, is the machine's. It ends if that cannot be noted.
    fn adopt(&mut self, incarnation: Incarnation, generation: Generation) -> Result<(), MachineError> {
        (self.journal.qemu, self.journal.guest) = (Some(generation.identity()), GuestNote::Runs);
        self.journal.save(&self.parts.folders.journal())?;
        self.hold(incarnation, generation);
        self.enter(MachineState::Running);
        Ok(())
    }

    /// As `adopt`, for a QEMU which the journal names already: its guest need not end if that cannot be noted again.
    pub(super) fn hold(&mut self, incarnation: Incarnation, mut generation: Generation) {
        self.journal.qemu = Some(generation.identity());
        if self.journal.guest.parked_in().is_some() {
            self.journal.guest = GuestNote::Runs;
        }
        self.journal.machine_type.clone_from(&self.parts.config.machine_type);
        self.save_journal();
        generation.settle();
        self.parts.console.attach(generation.console(&self.parts.folders));
        self.pin(&generation);
        self.life = Some(Life { incarnation, generation, began: Instant::now(), cause: None });
    }

    /// The QEMU has ended. A connection that it gave to somebody else ends too.
    fn expect_nobody(&self) {
        self.disks.iter().for_each(|disk| disk.tell_expected(Expected::and_another([])));
    }

    /// Who may connect to the disks from now on: a QEMU that was found, or went on, and no other.
    pub(super) fn expect_only(&self, qemu: &QemuIdentity) {
        let peer = Peer { pid: qemu.pid, start_ticks: qemu.start_ticks };
        self.disks.iter().for_each(|disk| disk.tell_expected(Expected::these([peer])));
    }

    pub(super) fn pin(&self, generation: &Generation) {
        let config = &self.parts.config;
        self.pins.renew(&config.name, generation.identity().pid, &config.boot);
    }

    pub(super) fn stopped(&mut self) -> Result<(), MachineError> {
        self.dumps = Dumps::default();
        self.abandon_save();
        self.warden.watch(None);
        self.arrivals.set_conduct(Conduct::Refuse);
        self.judge_idle_images();
        let images = self.settle_images();
        for disk in std::mem::take(&mut self.disks) {
            disk.stop();
        }
        self.give_back_nvram();
        self.save_boot_set(images);
        self.discard_memory();
        own_user::release(&self.parts.folders.runtime);
        leftovers::remove(&self.parts.folders.runtime, &Needed::default());
        self.journal = self.journal.without_guest(self.parts.config.memory_bytes);
        self.journal.save(&self.parts.folders.journal())?;
        self.enter(MachineState::Stopped);
        Ok(())
    }

    /// What is held was good for this start, and no guest has come of it: it is saved again, for the next one.
    pub(super) fn fail_to_start(&mut self, error: &MachineError) {
        let is_parked = parked::is_there(&self.parts.folders.memory);
        let is_wanted = self.life.is_none() && self.images.are_judged() && self.holds_blocks() && !is_parked;
        let images = is_wanted.then(|| self.settle_images());
        self.fail(error);
        if let Some(images) = images {
            self.disks.drain(..).for_each(DiskServer::stop);
            self.save_boot_set(images);
        }
    }

    pub(super) fn fail(&mut self, error: &MachineError) {
        let message = crate::chain(error);
        self.record(EventKind::Error { message });
        self.end_qemu(EndCause::QemuDied);
        self.arrivals.set_conduct(Conduct::Refuse);
        self.drop_gate();
        self.drop_restore();
        self.enter(MachineState::Failed);
        self.see_dumps_through();
        // With keeper and QEMU gone the next start is cold, unless a guest is parked here: until then this would only hold the
        // host's memory.
        if !parked::is_there(&self.parts.folders.memory) {
            self.discard_memory();
        }
    }

    pub(super) fn discard_memory(&self) {
        self.warden.note_images(None);
        self.ember.extinguish();
        if let Err(error) = self.parts.folders.discard_memory() {
            tracing::warn!(%error, folder = %self.parts.folders.memory.display(), "cannot remove memory files");
        }
    }
}
