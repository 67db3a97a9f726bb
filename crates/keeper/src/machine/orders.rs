//! Orders: what the operator asks of a machine, and what becomes of it until QEMU has ended.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use hearth_api::{
    ApiError, CrashMethod, DiskSize, EndCause, ErrorWord, EventKind, MachineState, ParkRequest, RebootRequest,
    RejuvenateRequest,
};

use hearth_recovery::journal::OrderNote;

use super::{DRAIN_PATIENCE, Life, Machine, MachineError, SHUTDOWN_PATIENCE, Wanted};
use crate::control::{Answer, Command};

/// Work of an accepted request that begins when the operator has the answer: it keeps the loop busy.
enum Work {
    Rejuvenate(RejuvenateRequest),
    Park,
}

impl Work {
    fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Rejuvenate(request) => Some(Self::Rejuvenate(request.clone())),
            Command::Park(ParkRequest { check: false }) => Some(Self::Park),
            _ => None,
        }
    }
}

impl Machine {
    /// Obeys, answers, and then does the work that takes long.
    pub(super) fn requested(
        &mut self,
        command: Command,
        answer: &Sender<Result<Answer, ApiError>>,
    ) -> Result<(), MachineError> {
        let work = Work::of(&command);
        let reply = self.obey(command);
        let is_accepted = reply.is_ok();
        // The client may have hung up.
        let _ = answer.send(reply);
        match work.filter(|_| is_accepted) {
            Some(Work::Rejuvenate(request)) => self.rejuvenate(&request),
            Some(Work::Park) => self.park(),
            None => Ok(()),
        }
    }

    fn obey(&mut self, command: Command) -> Result<Answer, ApiError> {
        match command {
            Command::Status => Ok(Answer::Status(Box::new(self.status()))),
            Command::Reboot(request) => self.accept("reboot", |machine| machine.reboot(request)),
            Command::Stop(request) => self.accept("stop", |machine| machine.stop(request.force)),
            Command::Crash(request) => self.accept("crash", |machine| machine.crash(request.method)),
            Command::Dump(request) => self.accept("dump", |machine| machine.dump_ordered(request)),
            Command::ResumeDump => self.accept("resume the dump", Self::resume_dump),
            Command::DiscardDump => self.accept("discard the dump", Self::discard_dumps),
            Command::Rejuvenate(_) => self.accept("rejuvenate", |machine| machine.may_rejuvenate()),
            Command::UpgradeKeeper(request) => {
                self.accept("upgrade the keeper", |machine| machine.begin_upgrade(&request))
            }
            Command::Park(_) => self.accept("park", |machine| machine.may_park()),
            Command::Age => self.age().map(|signs| Answer::Age(Box::new(signs))),
            Command::Save(request) => self.accept("save", |machine| machine.begin_save(request)),
            Command::CancelSave => self.accept("cancel the save", Self::call_save_off),
            Command::Ready => self.accept("mark the boot as finished", Self::ready_ordered),
            Command::RemountPlan => self.remount_plan().map(|plan| Answer::RemountPlan(Box::new(plan))),
            Command::Resize { disk } => self.resize(&disk).map(Answer::Resized),
        }
    }

    /// What was asked is on its way, or cannot be done now; either way it is in the events.
    fn accept(
        &mut self,
        verb: &str,
        begin: impl FnOnce(&mut Self) -> Result<(), ApiError>,
    ) -> Result<Answer, ApiError> {
        self.record(EventKind::Request { verb: verb.to_owned() });
        begin(self).map(|()| Answer::Accepted)
    }

    fn reboot(&mut self, request: RebootRequest) -> Result<(), ApiError> {
        if self.cut_back_off_short(Wanted::Reboot { cold: request.cold, power_off_at: Instant::now() }) {
            return Ok(());
        }
        self.cancel_save("the machine was told to reboot");
        self.end_held_dump("the machine was told to reboot");
        let paused = self.state == MachineState::Paused;
        self.must_live("reboot")?;
        let patience = if request.force || paused { Duration::ZERO } else { SHUTDOWN_PATIENCE };
        self.wanted = Wanted::Reboot { cold: request.cold, power_off_at: Instant::now() + patience };
        if !patience.is_zero() {
            self.press_power_button();
        }
        self.note_order(Some(OrderNote::Reboot { cold: request.cold }));
        Ok(())
    }

    /// For a keeper that comes after this one: the guest may yet take its minute.
    fn note_order(&mut self, order: Option<OrderNote>) {
        self.journal.ordered = order;
        self.save_journal();
    }

    /// What a keeper that died had been ordered to do with the living guest, which may have been asked already.
    pub(super) fn go_on_with_order(&mut self) {
        let power_off_at = Instant::now() + SHUTDOWN_PATIENCE;
        match self.journal.ordered {
            None => return,
            Some(OrderNote::Reboot { cold }) => self.wanted = Wanted::Reboot { cold, power_off_at },
            Some(OrderNote::Stop) => {
                self.wanted = Wanted::Stop { power_off_at };
                self.enter(MachineState::Stopping);
            }
        }
        self.press_power_button();
    }

    pub(super) fn stop(&mut self, force: bool) -> Result<(), ApiError> {
        if force && self.stops_after_dumps {
            self.dumps.give_up_all();
            return Ok(());
        }
        if self.cut_back_off_short(Wanted::Stop { power_off_at: Instant::now() }) {
            self.enter(MachineState::Stopping);
            return Ok(());
        }
        self.cancel_save("the machine was told to stop");
        self.end_held_dump("the machine was told to stop");
        let paused = self.state == MachineState::Paused;
        if self.state != MachineState::Stopping {
            self.must_live("stop")?;
        }
        let patience = if force || paused { Duration::ZERO } else { SHUTDOWN_PATIENCE };
        self.wanted = Wanted::Stop { power_off_at: Instant::now() + patience };
        if !patience.is_zero() {
            self.press_power_button();
        }
        self.note_order(Some(OrderNote::Stop));
        self.enter(MachineState::Stopping);
        Ok(())
    }

    fn press_power_button(&mut self) {
        self.asked_to_shut_down = true;
        if let Some(life) = &self.life
            && let Err(error) = life.generation.qmp.system_powerdown()
        {
            tracing::warn!(%error, "cannot ask the guest to shut down; its power is cut after the timeout");
        }
    }

    fn crash(&mut self, method: CrashMethod) -> Result<(), ApiError> {
        self.cancel_save("the guest was told to crash");
        self.end_held_dump("the guest was told to crash");
        let life = self.must_live("crash")?;
        let qmp = &life.generation.qmp;
        let crashed = match method {
            CrashMethod::Nmi => qmp.inject_nmi(),
            CrashMethod::Sysrq => qmp.type_sysrq_crash(),
        };
        crashed.map_err(|error| {
            ApiError::new(ErrorWord::Failed, format!("cannot crash the guest: {error}"))
                .hint("check with `hearth status` whether QEMU responds")
        })
    }

    fn resize(&mut self, name: &str) -> Result<DiskSize, ApiError> {
        // A disk that waits for memory does not answer, and this loop would wait for it.
        self.must_be_complete("resize")?;
        // NVRAM is served behind them, and stays as large as it is.
        let disks = &self.disks[..self.disks.len().min(self.parts.config.disks.len())];
        let Some(disk) = disks.iter().find(|disk| disk.name() == name) else {
            let names: Vec<_> = disks.iter().map(|disk| disk.name()).collect();
            let message = format!("{} has no disk {name}", self.parts.config.name);
            return Err(
                ApiError::new(ErrorWord::NoSuchDisk, message).hint(format!("its disks are: {}", names.join(", ")))
            );
        };
        let bytes = disk.resize().map_err(|error| ApiError::new(ErrorWord::Failed, crate::chain(&error)))?;
        self.record(EventKind::DiskResized { disk: name.to_owned(), bytes });
        Ok(DiskSize { disk: name.to_owned(), bytes })
    }

    pub(super) fn must_live(&self, what: &str) -> Result<&Life, ApiError> {
        let living = matches!(self.state, MachineState::Running | MachineState::Paused);
        self.life.as_ref().filter(|_| living).ok_or_else(|| {
            ApiError::new(ErrorWord::WrongState, format!("cannot {what}: the machine is {}", self.state.name()))
                .hint("wait until it runs; `hearth events --follow` shows when")
        })
    }

    pub(super) fn power_off_at(&self) -> Option<Instant> {
        match self.wanted {
            _ if self.life.is_none() => None,
            Wanted::Run => None,
            Wanted::Reboot { power_off_at, .. } | Wanted::Stop { power_off_at } => Some(power_off_at),
        }
    }

    /// The guest did not go by itself, or need not be asked.
    pub(super) fn power_off(&mut self) -> Result<(), MachineError> {
        if std::mem::take(&mut self.asked_to_shut_down) {
            let why = format!("it did not shut down within {} s", SHUTDOWN_PATIENCE.as_secs());
            self.record(EventKind::PowerCut { why });
        }
        let cause = match self.wanted {
            Wanted::Stop { .. } => EndCause::OperatorStop,
            Wanted::Reboot { .. } | Wanted::Run => EndCause::OperatorReboot,
        };
        // Past its deadline, and the process takes a moment to go: do not come back at once.
        let later = Instant::now() + DRAIN_PATIENCE;
        match &mut self.wanted {
            Wanted::Reboot { power_off_at, .. } | Wanted::Stop { power_off_at } => *power_off_at = later,
            Wanted::Run => {}
        }
        self.end_qemu(cause);
        Ok(())
    }

    pub(super) fn end_qemu(&mut self, cause: EndCause) {
        if let Some(life) = &mut self.life {
            life.cause.get_or_insert(cause);
            life.generation.process.kill();
        }
    }
}
