//! Requests of the operator, until they are carried out or QEMU has ended.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use hearth_api::{
    ApiError, CrashMethod, EndCause, ErrorWord, EventKind, MachineState, ParkRequest, RebootRequest, RejuvenateRequest,
};

use hearth_recovery::journal::OrderNote;

use super::{DRAIN_PATIENCE, Life, Machine, MachineError, SHUTDOWN_PATIENCE, Wanted};
use crate::control::{Answer, Command};

/// Work of an accepted request that begins when the operator has the answer: it keeps the loop busy.
pub(super) enum Work {
    Rejuvenate(RejuvenateRequest),
    Park,
}

impl Work {
    pub fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Rejuvenate(request) => Some(Self::Rejuvenate(request.clone())),
            Command::Park(ParkRequest { check: false }) => Some(Self::Park),
            _ => None,
        }
    }
}

impl Machine {
    /// Obeys, answers, and then does what takes long.
    pub(super) fn requested(
        &mut self,
        command: Command,
        answer: &Sender<Result<Answer, ApiError>>,
    ) -> Result<(), MachineError> {
        let work = Work::of(&command);
        let reply = self.obey(command);
        let is_accepted = reply.is_ok();
        // The asker may have hung up.
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
            Command::RemountPlan => self
                .warm_reboot
                .remount_plan(&self.context, &self.disks)
                .map(|plan| Answer::RemountPlan(Box::new(plan))),
            Command::Resize { disk } => {
                // A disk that waits for memory does not answer, and this loop would wait for it.
                self.memory.must_be_complete("resize")?;
                self.disks.resize(&self.context, &disk).map(Answer::Resized)
            }
        }
    }

    /// Records the request and begins it, or says why it cannot be done now.
    fn accept(
        &mut self,
        verb: &str,
        begin: impl FnOnce(&mut Self) -> Result<(), ApiError>,
    ) -> Result<Answer, ApiError> {
        self.context.record(EventKind::Request { verb: verb.to_owned() });
        begin(self).map(|()| Answer::Accepted)
    }

    fn ready_ordered(&mut self) -> Result<(), ApiError> {
        self.warm_reboot.must_have_boot_set(&self.context)?;
        self.must_live("mark the boot as finished")?;
        self.fast_remount.ready(&self.context, &self.warm_reboot, &self.disks, "marked by the operator");
        Ok(())
    }

    fn reboot(&mut self, request: RebootRequest) -> Result<(), ApiError> {
        if self.cut_back_off_short(Wanted::Reboot { cold: request.cold, power_off_at: Instant::now() }) {
            return Ok(());
        }
        self.cancel_save("the machine was told to reboot");
        self.end_held_dump("the machine was told to reboot");
        let paused = self.stand.state == MachineState::Paused;
        self.must_live("reboot")?;
        let patience = if request.force || paused { Duration::ZERO } else { SHUTDOWN_PATIENCE };
        self.stand.wanted = Wanted::Reboot { cold: request.cold, power_off_at: Instant::now() + patience };
        if !patience.is_zero() {
            self.press_power_button();
        }
        self.note_order(Some(OrderNote::Reboot { cold: request.cold }));
        Ok(())
    }

    /// For a keeper that comes after this one: the guest may yet take its minute.
    pub(super) fn note_order(&mut self, order: Option<OrderNote>) {
        self.context.journal.ordered = order;
        self.context.save_journal();
    }

    /// Carries out a request that the dead keeper had accepted. The guest may have been asked to shut down already.
    pub(super) fn go_on_with_order(&mut self) {
        let power_off_at = Instant::now() + SHUTDOWN_PATIENCE;
        match self.context.journal.ordered {
            None => return,
            Some(OrderNote::Reboot { cold }) => self.stand.wanted = Wanted::Reboot { cold, power_off_at },
            Some(OrderNote::Stop) => {
                self.stand.wanted = Wanted::Stop { power_off_at };
                self.enter(MachineState::Stopping);
            }
        }
        self.press_power_button();
    }

    pub(super) fn stop(&mut self, force: bool) -> Result<(), ApiError> {
        if force && self.stand.stops_after_dumps {
            self.crash_recovery.dumps.give_up_all();
            return Ok(());
        }
        if self.cut_back_off_short(Wanted::Stop { power_off_at: Instant::now() }) {
            self.enter(MachineState::Stopping);
            return Ok(());
        }
        self.cancel_save("the machine was told to stop");
        self.end_held_dump("the machine was told to stop");
        let paused = self.stand.state == MachineState::Paused;
        if self.stand.state != MachineState::Stopping {
            self.must_live("stop")?;
        }
        let patience = if force || paused { Duration::ZERO } else { SHUTDOWN_PATIENCE };
        self.stand.wanted = Wanted::Stop { power_off_at: Instant::now() + patience };
        if !patience.is_zero() {
            self.press_power_button();
        }
        self.note_order(Some(OrderNote::Stop));
        self.enter(MachineState::Stopping);
        Ok(())
    }

    fn press_power_button(&mut self) {
        self.stand.asked_to_shut_down = true;
        if let Some(life) = &self.stand.life
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

    pub(super) fn must_live(&self, what: &str) -> Result<&Life, ApiError> {
        let living = matches!(self.stand.state, MachineState::Running | MachineState::Paused);
        self.stand.life.as_ref().filter(|_| living).ok_or_else(|| {
            ApiError::new(ErrorWord::WrongState, format!("cannot {what}: the machine is {}", self.stand.state.name()))
                .hint("wait until it runs; `hearth events --follow` shows when")
        })
    }

    pub(super) fn power_off_at(&self) -> Option<Instant> {
        match self.stand.wanted {
            _ if self.stand.life.is_none() => None,
            Wanted::Run => None,
            Wanted::Reboot { power_off_at, .. } | Wanted::Stop { power_off_at } => Some(power_off_at),
        }
    }

    /// The guest did not go by itself, or need not be asked.
    pub(super) fn power_off(&mut self) -> Result<(), MachineError> {
        if std::mem::take(&mut self.stand.asked_to_shut_down) {
            let why = format!("it did not shut down within {} s", SHUTDOWN_PATIENCE.as_secs());
            self.context.record(EventKind::PowerCut { why });
        }
        let cause = match self.stand.wanted {
            Wanted::Stop { .. } => EndCause::OperatorStop,
            Wanted::Reboot { .. } | Wanted::Run => EndCause::OperatorReboot,
        };
        // Past its deadline, and the process takes a moment to go: do not come back at once.
        let later = Instant::now() + DRAIN_PATIENCE;
        match &mut self.stand.wanted {
            Wanted::Reboot { power_off_at, .. } | Wanted::Stop { power_off_at } => *power_off_at = later,
            Wanted::Run => {}
        }
        self.end_qemu(cause);
        Ok(())
    }

    pub(super) fn end_qemu(&mut self, cause: EndCause) {
        if let Some(life) = &mut self.stand.life {
            life.cause.get_or_insert(cause);
            life.generation.process.kill();
        }
    }
}
