//! Step: which state and which actions follow from a state and an input.

use std::time::Instant;

use hearth_api::{EndCause, MachineState};
use hearth_recovery::journal::OrderNote;

use super::super::{ASK_AGAIN, DRAIN_PATIENCE, SHUTDOWN_PATIENCE};
use super::{Action, BackOff, Input, Launching, Order, PauseReason, Recovering, Running, Starting, State, StopOrder};
use crate::config::OnPanic;

type Next<G, L> = (State<G, L>, Vec<Action<G, L>>);

/// The machine's transitions: the only ones there are.
pub fn step<G, L>(state: State<G, L>, input: Input<G, L>) -> Next<G, L> {
    match (state, input) {
        (state, Input::Fails) => {
            let (guest, launch) = state.into_parts();
            let give_up_launch = launch.map(|launch| Action::GiveUpLaunch { launch });
            (State::Failed { guest }, give_up_launch.into_iter().chain([Action::GiveUp]).collect())
        }
        (State::Recovering(Recovering { launch: None, .. }), Input::Runs { guest }) => {
            (State::Running(Running::of(guest)), vec![])
        }
        (State::Starting(starting), input) => starting.step(input),
        (State::Running(running), input) => running.step(input),
        (State::Recovering(recovering), input) => recovering.step(input),
        (State::Dumping { told_to_stop }, input) => step_dumping(told_to_stop, input),
        (state, Input::Launches { launch, .. }) => (state, vec![Action::GiveUpLaunch { launch }]),
        (state, Input::Reboot { .. } | Input::Stop { .. } | Input::Terminate { .. }) => (state, vec![Action::Refuse]),
        (state, _) => (state, vec![]),
    }
}

impl<L> Starting<L> {
    fn step<G>(mut self, input: Input<G, L>) -> Next<G, L> {
        let mut actions = Vec::new();
        match input {
            Input::Runs { guest } if self.launch.is_none() => return self.run(guest),
            Input::Launches { launch, holds_guest } if self.launch.is_none() => {
                self.launch = Some(Launching { launch, holds_guest });
            }
            Input::Launches { launch, .. } => actions.push(Action::GiveUpLaunch { launch }),
            Input::Launched => return self.go_on(),
            Input::Stop { force, now } => actions = self.stop(force, now),
            Input::Terminate { now } => actions = self.stop(self.stop.is_some(), now),
            Input::Reboot { .. } => actions.push(Action::Refuse),
            _ => {}
        }
        (State::Starting(self), actions)
    }

    fn stop<G>(&mut self, force: bool, given: Instant) -> Vec<Action<G, L>> {
        self.stop = Some(StopOrder { force, given });
        let ends = self.launch.as_ref().is_some_and(|launching| !launching.holds_guest);
        if ends { vec![Action::EndLaunch] } else { vec![] }
    }

    fn go_on<G>(mut self) -> Next<G, L> {
        match self.launch.take() {
            Some(Launching { launch, holds_guest: false }) if self.stop.is_some() => {
                let actions = vec![Action::GiveUpLaunch { launch }, Action::WaitForDumps];
                (State::Dumping { told_to_stop: true }, actions)
            }
            Some(Launching { launch, .. }) => (State::Starting(self), vec![Action::LetRun { launch }]),
            None => (State::Starting(self), vec![]),
        }
    }

    fn run<G>(self, guest: G) -> Next<G, L> {
        let mut running = Running::of(guest);
        let stop = self.stop.map(|StopOrder { force, given }| running.obey(OrderNote::Stop, force, given));
        (State::Running(running), stop.unwrap_or_default())
    }
}

impl<G> Running<G> {
    fn of(guest: G) -> Self {
        Self { guest, cause: None, pause: None, order: None, harvest_begun: false }
    }

    fn step<L>(mut self, input: Input<G, L>) -> Next<G, L> {
        let mut actions = Vec::new();
        match input {
            Input::Reboot { .. } if self.shown() == MachineState::Stopping => actions.push(Action::Refuse),
            Input::Reboot { cold, force, now } => actions = self.obey(OrderNote::Reboot { cold }, force, now),
            Input::Stop { force, now } => actions = self.obey(OrderNote::Stop, force, now),
            Input::Terminate { now } => actions = self.obey(OrderNote::Stop, self.is_told_to_stop(), now),
            Input::OrderFound { order, now } => {
                self.set_order(order, now + SHUTDOWN_PATIENCE, true);
                actions.push(Action::PressPowerButton);
            }
            Input::Paused { reason } => self.pause = Some(reason),
            Input::Continued => self.pause = None,
            Input::SavedToStop { now } => {
                self.set_order(OrderNote::Stop, now + DRAIN_PATIENCE, false);
                actions.push(self.kill(EndCause::OperatorStop));
            }
            Input::ShutsDown { cause } => {
                let ordered = self.order.map(Order::cause);
                self.cause.get_or_insert(ordered.unwrap_or(cause));
            }
            Input::Crashes { cause, on_panic } => actions = self.crash(cause, on_panic),
            Input::Harvested => actions.push(Action::KillQemu),
            Input::WatchdogResets => self.cause = Some(EndCause::Watchdog),
            Input::Misbehaves => actions.push(self.kill(EndCause::QemuDied)),
            Input::Ended { how, rehearses } => return self.end(how, rehearses),
            Input::TimeUp { now } => actions = self.time_up(now),
            Input::Parked { event } => {
                return (State::Stopped, vec![Action::LeaveParked { guest: self.guest, event }]);
            }
            Input::Launches { launch, .. } => actions.push(Action::GiveUpLaunch { launch }),
            Input::Runs { .. } | Input::Launched | Input::StartFails { .. } | Input::LifeOver { .. } => {}
            Input::DumpsOver | Input::Fails => {}
        }
        (State::Running(self), actions)
    }

    /// An order is carried out by the guest, or at once where that is wanted or the guest is paused.
    fn obey<L>(&mut self, note: OrderNote, force: bool, now: Instant) -> Vec<Action<G, L>> {
        let at_once = force || self.pause.is_some();
        self.set_order(note, if at_once { now } else { now + SHUTDOWN_PATIENCE }, !at_once);
        let note = Action::NoteOrder(note);
        if at_once { vec![note] } else { vec![Action::PressPowerButton, note] }
    }

    fn set_order(&mut self, note: OrderNote, power_off_at: Instant, asks: bool) {
        let asked = asks || self.order.is_some_and(|order| order.asked);
        let ask_again_at = if asks { power_off_at - SHUTDOWN_PATIENCE + ASK_AGAIN } else { power_off_at };
        self.order = Some(Order { note, power_off_at, ask_again_at, asked });
        if note == OrderNote::Stop {
            self.pause = None;
        }
    }

    fn kill<L>(&mut self, cause: EndCause) -> Action<G, L> {
        self.cause.get_or_insert(cause);
        Action::KillQemu
    }

    fn crash<L>(&mut self, cause: EndCause, on_panic: OnPanic) -> Vec<Action<G, L>> {
        let mut actions = match on_panic {
            OnPanic::DumpAndRecover => {
                self.cause.get_or_insert(cause);
                // A QEMU that repeats itself is not asked again.
                let begun = std::mem::replace(&mut self.harvest_begun, true);
                return if begun { vec![] } else { vec![Action::Harvest] };
            }
            OnPanic::Recover => return vec![self.kill(cause)],
            OnPanic::Dump => vec![Action::DumpLiving],
            OnPanic::Pause => vec![],
        };
        self.cause = Some(cause);
        // An earlier request continues.
        if self.order.is_none() {
            self.pause = Some(PauseReason::Crash(cause));
            actions.insert(0, Action::NoteIdleDisks);
        }
        actions
    }

    /// The guest did not go by itself yet, or need not be asked.
    fn time_up<L>(&mut self, now: Instant) -> Vec<Action<G, L>> {
        let Some(order) = self.order.as_mut() else { return vec![] };
        if order.power_off_at > now {
            let is_due = order.ask_again_at <= now;
            if is_due {
                order.ask_again_at = now + ASK_AGAIN;
            }
            return if is_due { vec![Action::PressPowerButton] } else { vec![] };
        }
        let (cause, asked) = (order.cause(), std::mem::take(&mut order.asked));
        // The process takes a moment to end: check again later.
        order.power_off_at = now + DRAIN_PATIENCE;
        order.ask_again_at = order.power_off_at;
        let kill = self.kill(cause);
        if asked { vec![Action::TellPowerCut, kill] } else { vec![kill] }
    }

    fn end<L>(self, how: String, rehearses: bool) -> Next<G, L> {
        let (guest, cause) = (self.guest, self.cause.unwrap_or(EndCause::QemuDied));
        let order = self.order.map(|order| order.note);
        let told_to_stop = order == Some(OrderNote::Stop);
        let went_off = cause == EndCause::GuestShutdown && order.is_none();
        if told_to_stop || went_off || rehearses {
            let actions = vec![Action::EndLastLife { guest, how, cause }, Action::WaitForDumps];
            return (State::Dumping { told_to_stop }, actions);
        }
        let cold = order == Some(OrderNote::Reboot { cold: true });
        (State::Recovering(Recovering::after(order)), vec![Action::EndLife { guest, how, cause, cold }])
    }
}

impl Order {
    fn cause(self) -> EndCause {
        match self.note {
            OrderNote::Stop => EndCause::OperatorStop,
            OrderNote::Reboot { .. } => EndCause::OperatorReboot,
        }
    }
}

impl<L> Recovering<L> {
    fn step<G>(mut self, input: Input<G, L>) -> Next<G, L> {
        if let Some(launch) = self.launch.take() {
            return self.step_launching(launch, input);
        }
        let actions = match input {
            Input::Reboot { cold, now, .. } => self.obey(OrderNote::Reboot { cold }, now),
            Input::Stop { now, .. } | Input::Terminate { now } => self.obey(OrderNote::Stop, now),
            Input::LifeOver { back_off } if self.back_off.is_none() => self.follow(back_off),
            Input::Launches { launch, .. } if self.back_off.is_none() => {
                self.launch = Some(launch);
                vec![]
            }
            Input::Launches { launch, .. } => vec![Action::GiveUpLaunch { launch }],
            Input::StartFails { why, back_off } if self.back_off.is_none() => {
                let tell = self.waited_for.as_ref() != Some(&back_off.why);
                let next_start = back_off.next_start.clone();
                self.wait(back_off);
                vec![Action::WaitToStart { why, next_start, tell }]
            }
            Input::TimeUp { now } => return self.end_back_off(now),
            _ => vec![],
        };
        (State::Recovering(self), actions)
    }

    /// The next guest's QEMU is starting. It soon runs and can be rebooted; but it need not run to be stopped.
    fn step_launching<G>(mut self, launch: L, input: Input<G, L>) -> Next<G, L> {
        let is_told_to_stop = self.order == Some(OrderNote::Stop);
        let mut actions = Vec::new();
        match input {
            Input::Launched if is_told_to_stop => {
                let actions = vec![Action::GiveUpLaunch { launch }, Action::WaitForDumps];
                return (State::Dumping { told_to_stop: true }, actions);
            }
            Input::Launched => return (State::Recovering(self), vec![Action::LetRun { launch }]),
            Input::Stop { .. } | Input::Terminate { .. } => {
                self.order = Some(OrderNote::Stop);
                actions.push(Action::EndLaunch);
            }
            Input::Reboot { .. } => actions.push(Action::Refuse),
            Input::Launches { launch, .. } => actions.push(Action::GiveUpLaunch { launch }),
            _ => {}
        }
        self.launch = Some(launch);
        (State::Recovering(self), actions)
    }

    /// An order ends the wait.
    fn obey<G>(&mut self, order: OrderNote, now: Instant) -> Vec<Action<G, L>> {
        let Some(back_off) = &mut self.back_off else { return vec![Action::Refuse] };
        back_off.until = now;
        self.order = Some(order);
        vec![]
    }

    /// A guest that the operator asked for starts at once.
    fn follow<G>(&mut self, back_off: Option<BackOff>) -> Vec<Action<G, L>> {
        let Some(back_off) = back_off.filter(|_| self.order.is_none()) else {
            self.order = None;
            return vec![Action::StartNext];
        };
        let (delay, next_start) = (back_off.until - back_off.began, back_off.next_start.clone());
        self.wait(back_off);
        vec![Action::TellCrashLoop { delay, next_start }]
    }

    fn wait(&mut self, back_off: BackOff) {
        self.waited_for = Some(back_off.why.clone());
        self.back_off = Some(back_off);
    }

    fn end_back_off<G>(mut self, now: Instant) -> Next<G, L> {
        let Some(BackOff { began, .. }) = self.back_off.take_if(|back_off| back_off.until <= now) else {
            return (State::Recovering(self), vec![]);
        };
        let mut actions = vec![Action::EndBackOff { began }];
        match self.order.take() {
            Some(OrderNote::Stop) => {
                actions.push(Action::WaitForDumps);
                return (State::Dumping { told_to_stop: true }, actions);
            }
            Some(OrderNote::Reboot { cold: true }) => actions.push(Action::ForgetBlocks),
            Some(OrderNote::Reboot { cold: false }) | None => {}
        }
        actions.push(Action::StartNext);
        (State::Recovering(self), actions)
    }
}

fn step_dumping<G, L>(told_to_stop: bool, input: Input<G, L>) -> Next<G, L> {
    let force = match input {
        Input::Stop { force, .. } => force,
        Input::Terminate { .. } => told_to_stop,
        Input::DumpsOver => return (State::Stopped, vec![Action::CleanUp]),
        Input::Reboot { .. } => return (State::Dumping { told_to_stop }, vec![Action::Refuse]),
        Input::Launches { launch, .. } => {
            return (State::Dumping { told_to_stop }, vec![Action::GiveUpLaunch { launch }]);
        }
        _ => return (State::Dumping { told_to_stop }, vec![]),
    };
    match force {
        true => (State::Dumping { told_to_stop }, vec![Action::GiveUpDumps]),
        false => (State::Dumping { told_to_stop: true }, vec![Action::NoteOrder(OrderNote::Stop)]),
    }
}
