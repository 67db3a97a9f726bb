//! Requests of the operator: how each is checked, answered and carried out.

use std::time::Instant;

use hearth_api::{ApiError, CrashMethod, DiskSize, ErrorWord, EventKind, MachineState, Order, RebootRequest};

use hearth_recovery::journal::OrderNote;

use super::state::Input;
use super::{Life, Machine};
use crate::control::{Answer, Command, Reply};

const TOLD_TO_STOP: &str = "the machine was told to stop";

fn not_crashed(error: &dyn std::fmt::Display) -> ApiError {
    ApiError::new(ErrorWord::Failed, format!("cannot crash the guest: {error}"))
        .hint("check with `hearth status` whether QEMU responds")
}

impl Machine {
    /// Obeys, answers, and then does what takes long.
    pub(super) fn requested(&mut self, command: Command, answer: &Reply) {
        let to_rejuvenate = match &command {
            Command::Order(Order::Rejuvenate(request)) => Some(request.clone()),
            _ => None,
        };
        let Some(reply) = self.obey(command, answer) else { return };
        let is_accepted = reply.is_ok();
        // The client may have hung up.
        let _ = answer.send(reply);
        if let Some(request) = to_rejuvenate.filter(|_| is_accepted) {
            self.rejuvenate(&request);
        }
    }

    /// None: a thread is at it, and the answer comes later.
    fn obey(&mut self, command: Command, answer: &Reply) -> Option<Result<Answer, ApiError>> {
        Some(match command {
            Command::Status => Ok(Answer::Status(Box::new(self.status()))),
            Command::Age => self.age().map(|signs| Answer::Age(Box::new(signs))),
            Command::RemountPlan => self
                .warm_reboot
                .remount_plan(&self.context, &self.disks)
                .map(|plan| Answer::RemountPlan(Box::new(plan))),
            Command::Resize { disk } => self.resize(&disk).map(Answer::Resized),
            Command::Order(order) => return self.execute_order(order, answer),
        })
    }

    /// None: a thread is at it, and the answer comes later.
    fn execute_order(&mut self, order: Order, answer: &Reply) -> Option<Result<Answer, ApiError>> {
        Some(match order {
            Order::Reboot(request) => self.accept("reboot", |machine| machine.reboot(request)),
            Order::Stop(request) => self.accept("stop", |machine| machine.stop(request.force)),
            Order::Crash(request) => {
                return self.accept("crash", |machine| machine.crash(request.method, answer)).err().map(Err);
            }
            Order::Dump(request) => {
                return self.accept("dump", |machine| machine.dump_ordered(request, answer)).err().map(Err);
            }
            Order::DumpResume(_) => self.accept("resume the dump", Self::resume_dump),
            Order::DumpDiscard(_) => self.accept("discard the dump", Self::discard_dumps),
            Order::Rejuvenate(_) => self.accept("rejuvenate", |machine| machine.may_rejuvenate()),
            Order::UpgradeKeeper(request) => {
                let begun = self.accept("upgrade the keeper", |machine| machine.begin_upgrade(request, answer));
                return begun.err().map(Err);
            }
            Order::Park(request) => {
                return self.accept("park", |machine| machine.flush_to_park(request.check, answer)).err().map(Err);
            }
            Order::Save(request) => {
                return self.accept("save", |machine| machine.begin_save(request, answer)).err().map(Err);
            }
            Order::CopyDisk(request) => {
                return self.accept("copy a disk", |machine| machine.begin_disk_copy(request, answer)).err().map(Err);
            }
            Order::CopyDiskTake(request) => self.take_disk_copy(request).map(|()| Answer::Accepted),
            Order::CopyDiskCancel(request) => {
                self.accept("cancel the copy of a disk", |machine| machine.cancel_disk_copy(&request.file))
            }
            Order::SaveCancel(_) => self.accept("cancel the save", Self::cancel_save_on_request),
            Order::Ready(_) => self.accept("mark the boot as finished", Self::ready_ordered),
            Order::DomainStarts(_)
            | Order::DomainReset(_)
            | Order::DomainCrashed(_)
            | Order::DomainHarvested(_)
            | Order::DomainEnded(_) => {
                let message = format!("{} is not a domain of libvirt", self.context.config.name);
                Err(ApiError::new(ErrorWord::NotPossible, message).hint("its keeper starts and ends its QEMU"))
            }
        })
    }

    fn resize(&self, disk: &str) -> Result<DiskSize, ApiError> {
        self.must_not_be_parked("resize")?;
        if self.state.is_first_start() {
            return Err(self.wrong_state("resize"));
        }
        // A disk that waits for memory does not answer, and this loop would wait for it.
        self.lazy_restore.must_be_complete("resize")?;
        // The next QEMU may have read the size already.
        self.rejuvenation.must_not_hop("resize")?;
        self.disks.resize(&self.context, disk)
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
        let why = "the machine was told to reboot";
        self.cancel_park("reboot", why)?;
        self.make_way(why);
        self.ordered("reboot", Input::Reboot { cold, force, now: Instant::now() })
    }

    pub(super) fn stop(&mut self, force: bool) -> Result<(), ApiError> {
        self.cancel_park("stop", TOLD_TO_STOP)?;
        self.make_way(TOLD_TO_STOP);
        self.ordered("stop", Input::Stop { force, now: Instant::now() })
    }

    /// A signal: the first one stops the machine, the second one stops it at once.
    pub(super) fn terminate(&mut self) -> Result<(), ApiError> {
        // A guest that is parked by now has stopped as well.
        let _ = self.cancel_park("stop", TOLD_TO_STOP);
        self.make_way(TOLD_TO_STOP);
        self.ordered("stop", Input::Terminate { now: Instant::now() })
    }

    /// A guest that is paused for a save or a dump goes on first, and in the QEMU that it has.
    fn make_way(&mut self, why: &str) {
        self.cancel_save(why);
        self.copies.make_way(why);
        self.give_up_hop(why);
        self.end_held_dump(why);
    }

    /// Notes the request in the journal for a new keeper: the guest may take a minute to shut down.
    pub(super) fn note_order(&mut self, order: Option<OrderNote>) {
        self.context.journal.ordered = order;
        self.context.save_journal();
    }

    /// Carries out a request that a dead keeper had accepted. The guest may already have been asked to shut down.
    pub(super) fn go_on_with_order(&mut self) {
        if let Some(order) = self.context.journal.ordered {
            self.apply_infallible(Input::OrderFound { order, now: Instant::now() });
        }
    }

    /// A thread tells QEMU, and answers.
    fn crash(&mut self, method: CrashMethod, answer: &Reply) -> Result<(), ApiError> {
        self.make_way("the guest was told to crash");
        self.must_live("crash")?;
        let Some(life) = self.state.guest_mut() else { return Ok(()) };
        let answer = answer.clone();
        let told = life.generation.tell(move |qmp| {
            let crashed = match method {
                CrashMethod::Nmi => qmp.inject_nmi(),
                CrashMethod::Sysrq => qmp.type_sysrq_crash(),
            };
            // The asker may have hung up.
            let _ = answer.send(crashed.map(|()| Answer::Accepted).map_err(|error| not_crashed(&error)));
        });
        told.map_err(|error| not_crashed(&error))
    }

    pub(super) fn must_live(&self, what: &str) -> Result<&Life, ApiError> {
        self.must_not_be_parked(what)?;
        let living = matches!(self.state.shown(), MachineState::Running | MachineState::Paused);
        self.state.guest().filter(|_| living).ok_or_else(|| self.wrong_state(what))
    }

    pub(super) fn wrong_state(&self, what: &str) -> ApiError {
        let message = format!("cannot {what}: the machine is {}", self.state.shown().name());
        ApiError::new(ErrorWord::WrongState, message).hint("wait until it runs; `hearth events --follow` shows when")
    }
}
