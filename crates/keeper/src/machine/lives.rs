//! Lives: how incarnations begin, end and follow each other.

use std::sync::Arc;
use std::time::Instant;

use hearth_api::{EmberMode, EndCause, EventKind, QemuStatus};
use hearth_disk::arrival::MissPolicy;
use hearth_disk::image::Unwritten;
use hearth_disk::server::DiskServer;
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::{Incarnation, discard_files};
use hearth_recovery::journal::GuestNote;
use hearth_recovery::rejuvenation::{ClockDebt, parked};
use hearth_recovery::warm_reboot::Phase;

use super::crash_recovery::CrashRecovery;
use super::dumps::Dumps;
use super::generation::{Devices, Generation, Plan};
use super::leftovers::Needed;
use super::start::Step;
use super::state::Input;
use super::timeline::Timeline;
use super::{Life, Machine, MachineError, launch, leftovers};
use crate::event_log::EventLog;
use crate::folders::own_user;

impl Machine {
    pub(super) fn start_afresh(&mut self) -> Result<(), MachineError> {
        self.take_next_configuration();
        let incarnation = self.next_incarnation()?;
        self.open_disks(&incarnation, Unwritten::Drop)?;
        self.begin_launch(incarnation)
    }

    /// Opens the disks' images and serves them to the guest of this incarnation.
    pub(super) fn open_disks(&mut self, incarnation: &Incarnation, unwritten: Unwritten) -> Result<(), MachineError> {
        let gate = self.lazy_restore.gate().or_else(|| self.memory.disk_gate());
        self.disks.open(&mut self.context, &self.warm_reboot, gate.as_ref(), Some(incarnation), unwritten)
    }

    /// Starts to thaw the guest's file systems, through its current QEMU.
    pub(super) fn thaw(&mut self) {
        if let Some(life) = self.state.guest() {
            self.saves.thaw(&self.context, &life.generation);
        }
    }

    /// Starts to ask the guest whether it is ready, through its current QEMU.
    pub(super) fn watch_ready(&mut self) {
        if let Some(life) = self.state.guest() {
            self.fast_remount.watch(&self.context, &life.generation);
        }
    }

    /// Ends what gave memory to a QEMU that has ended.
    pub(super) fn end_memory(&mut self) {
        self.memory.end(&self.warm_reboot, &self.disks);
        self.lazy_restore.end(&mut self.context, &self.disks);
    }

    /// Ends everything that served the guest, because QEMU's process has ended. What remains is the dead incarnation.
    fn tear_down(&mut self, guest: Life, how: String, cause: EndCause) -> Incarnation {
        let Life { incarnation, generation, .. } = guest;
        // The guest can see no error any more, and its disks must be drained.
        self.disks.backfill.set_miss_policy(MissPolicy::Refuse);
        self.cancel_save("the guest ended");
        self.copies.make_way("the guest ended");
        self.give_up_hop("QEMU, which was to be replaced, has ended");
        self.saves.forget_frozen(&mut self.context);
        self.fast_remount.boot_cut_off();
        self.disks.expect_nobody();
        self.crash_recovery.last_end = Some(cause);
        self.context.record(EventKind::QemuExited { generation: generation.number, how });
        self.context.record(EventKind::IncarnationEnded { cause });
        self.context.folders.discard_generation(generation.number);
        // Drop it now: its passt may still hold the ports that the next guest's passt will forward.
        drop(generation);
        self.context.journal.qemu = None;
        self.disks.forget_greeting(&mut self.context);
        self.context.journal.guest = GuestNote::Runs;
        self.crash_recovery.end_living_dump(&self.context, "the guest ended during the dump");
        self.note_death(&incarnation, cause);
        self.end_memory();
        incarnation
    }

    /// Makes the dead incarnation's memory ready for the next guest.
    pub(super) fn end_life(
        &mut self,
        guest: Life,
        how: String,
        cause: EndCause,
        cold: bool,
    ) -> Result<(), MachineError> {
        let began = guest.began;
        let dead = self.tear_down(guest, how, cause);
        let delay = self.crash_recovery.crashes.ended(began.elapsed(), cause, &self.context.config.crash.crash_loop);
        self.tell_state();
        let why_cold = match cold {
            true => Some("requested by the operator".to_owned()),
            false if dead.ledger.is_none() => Some("ember = \"off\"".to_owned()),
            false => None,
        };
        self.recovery.timeline = Some(Timeline::start(dead.number + 1, cause, why_cold.clone()));
        self.crash_recovery.record_harvest(&self.context, &mut self.recovery);
        self.phase(Phase::Drain, |machine| machine.warm_reboot.succession(&machine.disks.servers).drain())?;
        self.disks.backfill.set_miss_policy(MissPolicy::Wait);
        let hold = CrashRecovery::hold(&mut self.context, &self.warm_reboot, &dead);
        match why_cold {
            None => self.warm_reboot.begin_cache_map(&dead, || self.context.harvested_registers(dead.number).ok()),
            Some(_) => self.warm_reboot.clear_cache_map(),
        }
        match (hold, &why_cold) {
            (Some(hold), _) => {
                let is_cold = why_cold.is_some();
                self.phase(Phase::Bank, |machine| machine.bank_held(dead, hold, is_cold));
            }
            (None, Some(_)) => self.drop_memory(&dead),
            (None, None) => self.phase(Phase::Bank, |machine| machine.bank(dead)),
        }
        // Settle in parallel with the start: the next guest will need the memory.
        self.warm_reboot.monitor.settle();
        self.life_over(delay)
    }

    /// Begins the next incarnation, from what the dead one left; from less, or later, if that fails.
    pub(super) fn start_next(&mut self) -> Result<(), MachineError> {
        self.take_next_configuration();
        self.start_as_configured()
    }

    fn start_as_configured(&mut self) -> Result<(), MachineError> {
        self.begin_next().or_else(|error| self.not_started(error))
    }

    fn begin_next(&mut self) -> Result<(), MachineError> {
        let next = self.next_incarnation()?;
        let gate = self.memory.disk_gate();
        self.disks.renew(&mut self.context, &self.warm_reboot, &mut self.recovery, gate.as_ref(), &next)?;
        self.phase(Phase::Attach, |machine| machine.warm_reboot.succession(&machine.disks.servers).attach(&next))?;
        self.begin_launch(next)
    }

    /// The next incarnation runs, or does not. `began`: its launch.
    pub(super) fn next_started(&mut self, began: Instant, runs: Result<(), MachineError>) -> Result<(), MachineError> {
        self.recovery.phase_ended(&self.context, Phase::Launch.name(), began, began.elapsed());
        if let Err(error) = runs {
            return self.not_started(error);
        }
        self.context.file.next.last = None;
        if let Some(began) = self.recovery.waits_since.take() {
            self.recovery.phase_ended(&self.context, "back-off", began, began.elapsed());
        }
        if let Some(timeline) = &mut self.recovery.timeline {
            timeline.recovered();
        }
        Ok(())
    }

    fn not_started(&mut self, error: MachineError) -> Result<(), MachineError> {
        if self.may_wait_for_space(&error) {
            return self.wait_for_space(&error);
        }
        if matches!(error, MachineError::Launch(_)) && self.take_back_configuration(&error) {
            self.discard_unused();
            return self.start_as_configured();
        }
        self.try_again_later(error)
    }

    /// The incarnation that did not begin: the next one has its number.
    pub(super) fn discard_unused(&mut self) {
        self.fast_remount.boot_cut_off();
        self.end_memory();
        self.disks.expect_nobody();
        self.warm_reboot.monitor.watch(None);
        self.context.folders.discard_generation(self.context.journal.generation);
        discard_files(&self.context.folders.memory, self.context.journal.incarnation);
        self.context.journal.incarnation -= 1;
    }

    fn bank(&mut self, dead: Incarnation) {
        self.warm_reboot.bank(&self.context, &mut self.recovery, &self.disks, dead);
    }

    /// Keeps the dead incarnation for its dump, and, unless the reboot is cold, as ember.
    pub(super) fn bank_held(&mut self, dead: Incarnation, hold: Arc<Hold>, is_cold: bool) {
        if self.warm_reboot.bank_held(&self.context, &mut self.recovery, &dead, &hold, is_cold) {
            self.crash_recovery.queue_dump(&mut self.context, &self.warm_reboot, &self.disks, &dead, hold);
        } else {
            self.bank(dead);
        }
    }

    /// Ends the machine's last guest: only the memory that its dump needs is kept.
    pub(super) fn end_last_life(&mut self, guest: Life, how: String, cause: EndCause) -> Result<(), MachineError> {
        let dead = self.tear_down(guest, how, cause);
        self.warm_reboot.monitor.watch(None);
        self.warm_reboot.succession(&self.disks.servers).drain()?;
        self.warm_reboot.begin_keeping_cache_map(&dead, || self.context.harvested_registers(dead.number).ok());
        if let Some(hold) = CrashRecovery::hold(&mut self.context, &self.warm_reboot, &dead) {
            self.bank_held(dead, hold, true);
        }
        Ok(())
    }

    pub(super) fn wait_for_dumps(&mut self) -> Result<(), MachineError> {
        if !self.crash_recovery.unfinished.is_empty() {
            // No guest has run since they were found.
            self.go_on_with_dumps();
        }
        if !self.crash_recovery.must_wait_for_dumps() {
            return self.apply(Input::DumpsOver);
        }
        self.disks.note_idle(&self.context, &self.warm_reboot);
        Ok(())
    }

    fn drop_memory(&self, dead: &Incarnation) {
        self.warm_reboot.forget_disks();
        discard_files(&self.context.folders.memory, dead.number);
    }

    /// Runs one phase of a recovery and notes its duration, whether it succeeds or not.
    fn phase<T>(&mut self, phase: Phase, work: impl FnOnce(&mut Self) -> T) -> T {
        let began = Instant::now();
        let result = work(self);
        self.recovery.phase_ended(&self.context, phase.name(), began, began.elapsed());
        result
    }

    pub(super) fn next_incarnation(&mut self) -> Result<Incarnation, MachineError> {
        self.context.journal.incarnation += 1;
        self.context.journal.ordered = None;
        self.context.journal.clock_debt = ClockDebt::default();
        self.context.journal.write_through.clear();
        self.saves.forget_frozen(&mut self.context);
        self.context.outside.event_log.set_incarnation(self.context.journal.incarnation);
        self.warm_reboot.begin_incarnation(&self.disks);
        let tracked = self.context.config.memory.ember == EmberMode::On;
        let (folder, ram_bytes) = (&self.context.folders.memory, self.context.config.guest.memory_bytes);
        Ok(Incarnation::create(folder, self.context.journal.incarnation, ram_bytes, tracked)?)
    }

    /// Removes files that killed keepers and QEMUs left.
    pub(super) fn remove_leftovers(&self) {
        self.remove_all_but(self.state.guest().map(|life| life.generation.number));
    }

    /// Removes files of QEMUs other than the one of this generation.
    fn remove_all_but(&self, generation: Option<u32>) {
        // A guest that has just crashed may still be dumped.
        let dead = self.context.journal.dumps.iter().map(|note| note.incarnation);
        let dumps = dead.chain([self.context.journal.incarnation]).collect();
        leftovers::remove(&self.context.folders.runtime, &Needed { generation, dumps });
    }

    /// Number for the next QEMU. Notes in the journal what a new keeper must know before that QEMU is started.
    pub(super) fn next_generation(&mut self, incarnation: &Incarnation) -> Result<u32, MachineError> {
        self.context.journal.generation += 1;
        leftovers::remove_old_logs(&self.context.folders.runtime);
        self.context.journal.ember = self.warm_reboot.ember.incarnations();
        self.context.journal.disks = launch::disk_identities(&self.context.config.devices);
        self.context.journal.ram_bytes = self.context.config.guest.memory_bytes;
        self.context.journal.started_with = Some(self.context.started_with());
        self.context.must_save_journal()?;
        // Watch before QEMU is started: its guest fills memory while the keeper still waits for QMP.
        self.warm_reboot.monitor.watch(Some(incarnation.clone()));
        Ok(self.context.journal.generation)
    }

    fn begin_launch(&mut self, incarnation: Incarnation) -> Result<(), MachineError> {
        self.fast_remount.boot_begins(&self.context, &self.warm_reboot);
        let devices = Devices { vmgenid: self.context.vmgenid_of_boot(), guest_agent: self.context.config.guest.agent };
        let number = self.next_generation(&incarnation)?;
        let plan = Plan::first(&self.context, &self.disks.servers, &incarnation, number, devices)?;
        self.begin_step(
            Step::boots("QEMU is starting"),
            move |control| plan.start(control),
            move |machine, generation| machine.let_run(incarnation, generation?),
        )
    }

    fn let_run(&mut self, incarnation: Incarnation, generation: Generation) -> Result<(), MachineError> {
        self.record_qemu(generation.status());
        if self.warm_reboot.wants_gate(&self.context.config) {
            self.memory.shut(&self.context, &self.warm_reboot, &self.disks, &incarnation, &generation);
        }
        let step = Step::boots("its guest begins to run");
        self.begin_step_with(step, generation, Generation::run, move |machine, generation, runs| {
            runs?;
            machine.boots(incarnation, generation)
        })
    }

    fn boots(&mut self, incarnation: Incarnation, generation: Generation) -> Result<(), MachineError> {
        let number = generation.number;
        self.disks.admit(&self.context, generation.identity().pid);
        self.adopt(incarnation, generation)?;
        self.warm_reboot.forget_kept_cache_map();
        self.watch_ready();
        let warm = self.recovery.timeline.as_ref().is_some_and(|timeline| timeline.recovery().warm);
        self.context.record(EventKind::IncarnationStarted { generation: number, warm });
        Ok(())
    }

    pub(super) fn record_qemu(&self, status: QemuStatus) {
        record_qemu(&self.context.outside.event_log, status);
    }

    /// Makes a QEMU that was just started the machine's. QEMU ends if the journal cannot be written.
    fn adopt(&mut self, incarnation: Incarnation, generation: Generation) -> Result<(), MachineError> {
        (self.context.journal.qemu, self.context.journal.guest) = (Some(generation.identity()), GuestNote::Runs);
        self.context.must_save_journal()?;
        let life = self.take_guest(incarnation, generation, None);
        self.apply_infallible(Input::Runs { guest: life });
        Ok(())
    }

    /// Takes the guest of a QEMU that the journal already names. The guest lives on if the journal cannot be written.
    /// `began`: when an earlier keeper started QEMU.
    pub(super) fn take_guest(
        &mut self,
        incarnation: Incarnation,
        mut generation: Generation,
        began: Option<Instant>,
    ) -> Life {
        self.context.journal.qemu = Some(generation.identity());
        if self.context.journal.guest.parked_in().is_some() {
            self.context.journal.guest = GuestNote::Runs;
        }
        self.context.journal.machine_type.clone_from(&self.context.config.guest.machine_type);
        self.context.save_journal();
        generation.keep_running();
        self.context.outside.console.attach(generation.console(&self.context.folders));
        self.context.show_screen_of(generation.number);
        self.pin(generation.identity().pid);
        Life { incarnation, generation, began: began.unwrap_or_else(Instant::now), going_on: 0 }
    }

    pub(super) fn pin(&self, qemu: u32) {
        let config = &self.context.config;
        self.locked_files.renew(&config.name, qemu, &config.guest.boot);
    }

    pub(super) fn clean_up(&mut self) -> Result<(), MachineError> {
        self.crash_recovery.dumps = Dumps::default();
        self.abandon_save();
        // Before their files are removed.
        self.context.qemu.given_up.clear();
        self.warm_reboot.monitor.watch(None);
        self.disks.backfill.set_miss_policy(MissPolicy::Refuse);
        self.disks.judge_idle(&self.context, &self.warm_reboot, &mut self.recovery);
        let images = self.warm_reboot.sync_images(&self.context, &self.disks);
        // From now on, any change may be another program's.
        self.warm_reboot.monitor.note_images(None);
        for disk in std::mem::take(&mut self.disks.servers) {
            disk.stop();
        }
        self.disks.give_back_nvram(&self.context);
        self.warm_reboot.save_boot_set(&self.context, &self.disks, images);
        self.warm_reboot.end_keeping_cache_map(&self.context, &self.disks, &mut self.recovery);
        self.warm_reboot.discard_memory(&self.context);
        own_user::release(&self.context.folders.runtime);
        leftovers::remove(&self.context.folders.runtime, &Needed::default());
        self.context.journal = self.context.journal.without_guest(self.context.config.guest.memory_bytes);
        Ok(self.context.must_save_journal()?)
    }

    /// The start has failed. The loaded boot set is saved again for the next start.
    pub(super) fn fail_to_start(&mut self, error: &MachineError) {
        let is_parked = parked::is_there(&self.context.folders.memory);
        let is_wanted = self.state.guest().is_none()
            && self.disks.images.are_judged()
            && self.warm_reboot.holds_blocks()
            && !is_parked;
        let images = is_wanted.then(|| self.warm_reboot.sync_images(&self.context, &self.disks));
        self.fail(error);
        if let Some(images) = images {
            self.warm_reboot.save_boot_set(&self.context, &self.disks, images);
        }
    }

    pub(super) fn fail(&mut self, error: &MachineError) {
        let message = crate::chain(error);
        self.context.record(EventKind::Error { message });
        self.apply_infallible(Input::Fails);
    }

    pub(super) fn give_up(&mut self) {
        // A guest that is parked by now is left to the next keeper.
        let _ = self.cancel_park("continue", "the machine failed");
        self.kill_qemu();
        self.give_up_hop("the machine failed");
        self.disks.backfill.set_miss_policy(MissPolicy::Refuse);
        self.end_memory();
        self.tell_state();
        self.crash_recovery.finish_dumps(&mut self.context);
        // Without keeper and QEMU the next start is cold, so the memory would only be held for nothing; unless a guest
        // is parked here.
        if !parked::is_there(&self.context.folders.memory) {
            // Stop the servers first: a qcow2 image's server needs the log of its tables, which is in memory.
            self.disks.servers.drain(..).for_each(DiskServer::stop);
            self.warm_reboot.discard_memory(&self.context);
            // The next QEMU of a parked guest is the same user as the last one.
            own_user::release(&self.context.folders.runtime);
        }
        self.remove_all_but(None);
    }
}

/// Records that a QEMU has been started.
pub(super) fn record_qemu(log: &EventLog, status: QemuStatus) {
    log.record(EventKind::QemuStarted {
        pid: status.pid,
        generation: status.generation,
        version: status.version,
        accelerator: status.accelerator,
        accelerator_why: status.accelerator_why,
    });
    log.record(EventKind::Userfault { generation: status.generation, userfault: status.userfault });
}
