//! Step: which state and which actions follow from a state and an input.

use std::time::Instant;

use hearth_api::{EndCause, MachineState};
use hearth_recovery::journal::OrderNote;

use super::super::{DRAIN_PATIENCE, SHUTDOWN_PATIENCE};
use super::{Action, BackOff, Input, Order, Pause, Recovering, Running, State};
use crate::config::OnPanic;

type Next<G> = (State<G>, Vec<Action<G>>);

/// The machine's transitions: the only ones there are.
pub fn step<G>(state: State<G>, input: Input<G>) -> Next<G> {
    match (state, input) {
        (state, Input::Fails) => (State::Failed { guest: state.into_guest() }, vec![Action::GiveUp]),
        (State::Starting | State::Recovering(_), Input::Runs { guest }) => {
            (State::Running(Running { guest, cause: None, pause: None, order: None }), vec![])
        }
        (State::Running(running), input) => running.step(input),
        (State::Recovering(recovering), input) => recovering.step(input),
        (State::Dumping { told_to_stop }, input) => step_dumping(told_to_stop, &input),
        (state, Input::Reboot { .. } | Input::Stop { .. } | Input::Terminate { .. }) => (state, vec![Action::Refuse]),
        (state, _) => (state, vec![]),
    }
}

impl<G> Running<G> {
    fn step(mut self, input: Input<G>) -> Next<G> {
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
            Input::Paused { why } => self.pause = Some(Pause { why }),
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
            Input::WatchdogResets => self.cause = Some(EndCause::Watchdog),
            Input::Misbehaves => actions.push(self.kill(EndCause::QemuDied)),
            Input::Ended { how, rehearses } => return self.end(how, rehearses),
            Input::TimeUp { now } => actions = self.cut_power(now),
            Input::Parked { event } => {
                return (State::Stopped, vec![Action::LeaveParked { guest: self.guest, event }]);
            }
            Input::Runs { .. } | Input::StartFails { .. } | Input::Buried { .. } => {}
            Input::DumpsOver | Input::Fails => {}
        }
        (State::Running(self), actions)
    }

    /// An order is carried out by the guest, or at once where that is wanted or the guest is paused.
    fn obey(&mut self, note: OrderNote, force: bool, now: Instant) -> Vec<Action<G>> {
        let at_once = force || self.pause.is_some();
        self.set_order(note, if at_once { now } else { now + SHUTDOWN_PATIENCE }, !at_once);
        let note = Action::NoteOrder(note);
        if at_once { vec![note] } else { vec![Action::PressPowerButton, note] }
    }

    fn set_order(&mut self, note: OrderNote, power_off_at: Instant, asks: bool) {
        let asked = asks || self.order.is_some_and(|order| order.asked);
        self.order = Some(Order { note, power_off_at, asked });
        if note == OrderNote::Stop {
            self.pause = None;
        }
    }

    fn kill(&mut self, cause: EndCause) -> Action<G> {
        self.cause.get_or_insert(cause);
        Action::KillQemu
    }

    fn crash(&mut self, cause: EndCause, on_panic: OnPanic) -> Vec<Action<G>> {
        let mut actions = match on_panic {
            OnPanic::DumpAndRecover => return vec![Action::Harvest, self.kill(cause)],
            OnPanic::Recover => return vec![self.kill(cause)],
            OnPanic::Dump => vec![Action::DumpLiving],
            OnPanic::Pause => vec![],
        };
        self.cause = Some(cause);
        // An earlier request continues.
        if self.order.is_none() {
            let why = format!("{}; continue with `hearth reboot` or `hearth stop`", cause.words());
            self.pause = Some(Pause { why: Some(why) });
            actions.insert(0, Action::NoteIdleDisks);
        }
        actions
    }

    /// The guest did not go by itself, or need not be asked.
    fn cut_power(&mut self, now: Instant) -> Vec<Action<G>> {
        let Some(order) = self.order.as_mut().filter(|order| order.power_off_at <= now) else { return vec![] };
        let (cause, asked) = (order.cause(), std::mem::take(&mut order.asked));
        // The process takes a moment to end: check again later.
        order.power_off_at = now + DRAIN_PATIENCE;
        let kill = self.kill(cause);
        if asked { vec![Action::TellPowerCut, kill] } else { vec![kill] }
    }

    fn end(self, how: String, rehearses: bool) -> Next<G> {
        let (guest, cause) = (self.guest, self.cause.unwrap_or(EndCause::QemuDied));
        let order = self.order.map(|order| order.note);
        let told_to_stop = order == Some(OrderNote::Stop);
        let went_off = cause == EndCause::GuestShutdown && order.is_none();
        if told_to_stop || went_off || rehearses {
            let actions = vec![Action::BuryLast { guest, how, cause }, Action::WaitForDumps];
            return (State::Dumping { told_to_stop }, actions);
        }
        let cold = order == Some(OrderNote::Reboot { cold: true });
        let recovering = Recovering { order, ..Recovering::default() };
        (State::Recovering(recovering), vec![Action::Bury { guest, how, cause, cold }])
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

impl Recovering {
    fn step<G>(mut self, input: Input<G>) -> Next<G> {
        let actions = match input {
            Input::Reboot { cold, now, .. } => self.obey(OrderNote::Reboot { cold }, now),
            Input::Stop { now, .. } | Input::Terminate { now } => self.obey(OrderNote::Stop, now),
            Input::Buried { back_off } if self.back_off.is_none() => self.follow(back_off),
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

    /// An order ends the wait.
    fn obey<G>(&mut self, order: OrderNote, now: Instant) -> Vec<Action<G>> {
        let Some(back_off) = &mut self.back_off else { return vec![Action::Refuse] };
        back_off.until = now;
        self.order = Some(order);
        vec![]
    }

    /// A guest that the operator asked for starts at once.
    fn follow<G>(&mut self, back_off: Option<BackOff>) -> Vec<Action<G>> {
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

    fn end_back_off<G>(mut self, now: Instant) -> Next<G> {
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

fn step_dumping<G>(told_to_stop: bool, input: &Input<G>) -> Next<G> {
    let force = match input {
        Input::Stop { force, .. } => *force,
        Input::Terminate { .. } => told_to_stop,
        Input::DumpsOver => return (State::Stopped, vec![Action::CleanUp]),
        Input::Reboot { .. } => return (State::Dumping { told_to_stop }, vec![Action::Refuse]),
        _ => return (State::Dumping { told_to_stop }, vec![]),
    };
    match force {
        true => (State::Dumping { told_to_stop }, vec![Action::GiveUpDumps]),
        false => (State::Dumping { told_to_stop: true }, vec![Action::NoteOrder(OrderNote::Stop)]),
    }
}
