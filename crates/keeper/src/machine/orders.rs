//! Requests of the operator, until they are carried out or QEMU has ended.

use std::sync::mpsc::Sender;
use std::time::Instant;

use hearth_api::{
    ApiError, CrashMethod, ErrorWord, EventKind, MachineState, ParkRequest, RebootRequest, RejuvenateRequest,
};

use hearth_recovery::journal::OrderNote;

use super::state::Input;
use super::{Life, Machine, MachineError};
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
        let RebootRequest { cold, force } = request;
        self.make_way("the machine was told to reboot");
        self.ordered("reboot", Input::Reboot { cold, force, now: Instant::now() })
    }

    pub(super) fn stop(&mut self, force: bool) -> Result<(), ApiError> {
        self.make_way("the machine was told to stop");
        self.ordered("stop", Input::Stop { force, now: Instant::now() })
    }

    /// A signal stops the machine, the second one at once.
    pub(super) fn terminate(&mut self) -> Result<(), ApiError> {
        self.make_way("the machine was told to stop");
        self.ordered("stop", Input::Terminate { now: Instant::now() })
    }

    /// A guest that is paused for a save or a dump goes on first.
    fn make_way(&mut self, why: &str) {
        self.cancel_save(why);
        self.end_held_dump(why);
    }

    /// For a keeper that comes after this one: the guest may yet take its minute.
    pub(super) fn note_order(&mut self, order: Option<OrderNote>) {
        self.context.journal.ordered = order;
        self.context.save_journal();
    }

    /// Carries out a request that the dead keeper had accepted. The guest may have been asked to shut down already.
    pub(super) fn go_on_with_order(&mut self) {
        if let Some(order) = self.context.journal.ordered {
            self.must_happen(Input::OrderFound { order, now: Instant::now() });
        }
    }

    fn crash(&mut self, method: CrashMethod) -> Result<(), ApiError> {
        self.make_way("the guest was told to crash");
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
        let living = matches!(self.state.shown(), MachineState::Running | MachineState::Paused);
        self.state.guest().filter(|_| living).ok_or_else(|| self.wrong_state(what))
    }

    pub(super) fn wrong_state(&self, what: &str) -> ApiError {
        let message = format!("cannot {what}: the machine is {}", self.state.shown().name());
        ApiError::new(ErrorWord::WrongState, message).hint("wait until it runs; `hearth events --follow` shows when")
    }
}
