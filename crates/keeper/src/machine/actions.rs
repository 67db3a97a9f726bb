//! Actions: carries out what `state::step` decides.
//!
//! A change of the state is recorded (`StateChanged`) after the actions of its step. Long actions record it themselves
//! where the events' order needs it.

use hearth_api::{ApiError, EventKind};

use super::start::Start;
use super::state;
use super::{Life, Machine, MachineError, SHUTDOWN_PATIENCE};

type Input = state::Input<Life, Start>;
type Action = state::Action<Life, Start>;

impl Machine {
    /// Takes the machine to its next state, and carries out what that asks for.
    pub(super) fn apply(&mut self, input: Input) -> Result<(), MachineError> {
        for action in self.step(input) {
            self.carry_out(action)?;
        }
        self.tell_state();
        Ok(())
    }

    /// As `apply`, for an order. `verb`: what it is called.
    pub(super) fn ordered(&mut self, verb: &str, input: Input) -> Result<(), ApiError> {
        let actions = self.step(input);
        if let [Action::Refuse] = actions[..] {
            return Err(self.wrong_state(verb));
        }
        self.must_carry_out(actions);
        Ok(())
    }

    /// As `apply`, for what leads to nothing that can fail.
    pub(super) fn apply_infallible(&mut self, input: Input) {
        let actions = self.step(input);
        self.must_carry_out(actions);
    }

    fn must_carry_out(&mut self, actions: Vec<Action>) {
        for action in actions {
            self.carry_out(action).expect("`state::table` lists what follows, and none of it can fail");
        }
        self.tell_state();
    }

    fn step(&mut self, input: Input) -> Vec<Action> {
        let (state, actions) = state::step(std::mem::take(&mut self.state), input);
        self.state = state;
        actions
    }

    /// Records the state if it has changed since it was last recorded.
    pub(super) fn tell_state(&self) {
        self.context.outside.event_log.record_state(self.state.shown());
    }

    fn carry_out(&mut self, action: Action) -> Result<(), MachineError> {
        match action {
            // Nobody waits for an answer.
            Action::Refuse => {}
            Action::PressPowerButton => self.press_power_button(),
            Action::NoteOrder(note) => self.note_order(Some(note)),
            Action::TellPowerCut => {
                let why = format!("it did not shut down within {} s", SHUTDOWN_PATIENCE.as_secs());
                self.context.record(EventKind::PowerCut { why });
            }
            Action::KillQemu => self.kill_qemu(),
            Action::Harvest => return self.harvest(),
            Action::NoteIdleDisks => self.disks.note_idle(&self.context, &self.warm_reboot),
            Action::DumpLiving => self.dump_crashed(),
            Action::EndLife { guest, how, cause, cold } => return self.end_life(guest, how, cause, cold),
            Action::EndLastLife { guest, how, cause } => return self.end_last_life(guest, how, cause),
            Action::TellCrashLoop { delay, next_start } => self.begin_crash_loop(delay, next_start),
            Action::WaitToStart { why, next_start, tell } => self.wait_to_start(why, next_start, tell),
            Action::EndBackOff { began } => {
                self.recovery.phase_ended(&self.context, "back-off", began, began.elapsed());
            }
            Action::ForgetBlocks => {
                self.warm_reboot.forget_disks();
                self.recovery.set_cold("requested by the operator".to_owned());
            }
            Action::StartNext => return self.start_next(),
            Action::LetRun { launch } => return self.go_on_with_start(launch),
            Action::EndLaunch => self.end_launch(),
            Action::GiveUpLaunch { launch } => self.give_up_launch(launch),
            Action::WaitForDumps => return self.wait_for_dumps(),
            Action::GiveUpDumps => self.crash_recovery.dumps.give_up_all(),
            Action::CleanUp => return self.clean_up(),
            Action::LeaveParked { guest, event } => return self.leave(guest, event),
            Action::GiveUp => self.give_up(),
        }
        Ok(())
    }

    /// Gives the guest to work that also needs other parts of the machine. The state does not change meanwhile.
    pub(super) fn with_guest<T>(&mut self, work: impl FnOnce(&mut Self, &mut Life) -> T) -> Option<T> {
        let mut state = std::mem::take(&mut self.state);
        let result = state.guest_mut().map(|guest| work(self, guest));
        self.state = state;
        result
    }

    pub(super) fn press_power_button(&mut self) {
        if self.rejuvenation.parking.is_some() {
            // The guest stands still, or is about to: it is asked when it goes on.
            return;
        }
        fn failed(error: &dyn std::fmt::Display) {
            tracing::warn!(%error, "cannot ask the guest to shut down; its power is cut after the timeout");
        }
        let Some(life) = self.state.guest_mut() else { return };
        let told = life.generation.tell(|qmp| {
            if let Err(error) = qmp.system_powerdown() {
                failed(&error);
            }
        });
        if let Err(error) = told {
            failed(&error);
        }
    }

    pub(super) fn kill_qemu(&self) {
        if let Some(life) = self.state.guest() {
            life.generation.process.kill();
        }
    }
}
