//! State: the machine's state, and every decision about what comes next.
//!
//! input (a request, QEMU's end, a time that has come) -> `step` -> the next state and actions -> `Machine::apply`
//! carries them out
//!
//! `step` is pure: it reads no clock and no file, and touches nothing. So a test can list every state with every input (`table`).
//! Nothing else changes the state.

mod step;
#[cfg(test)]
mod table;

use std::borrow::Cow;
use std::time::{Duration, Instant};

use hearth_api::{EndCause, EventKind, MachineState};
use hearth_recovery::journal::OrderNote;

use crate::config::OnPanic;
pub use step::step;

pub const WAITS_FOR_DUMPS: &str = "a dump is being written; `hearth stop --force` discards the rest of it";

/// Where the machine stands. `G` is the guest and its QEMU, `L` the start of a guest that is under way.
pub enum State<G, L> {
    /// The first guest is starting.
    Starting(Starting<L>),
    Running(Running<G>),
    /// A guest has ended; the next one is starting, or waits for its start.
    Recovering(Recovering<L>),
    /// The machine stops: it waits for the dumps of its dead guests.
    Dumping {
        told_to_stop: bool,
    },
    Stopped,
    /// The machine cannot continue. Its guest, if it had one, is being killed.
    Failed {
        guest: Option<G>,
    },
}

/// What exists only until the first guest runs.
pub struct Starting<L> {
    pub launch: Option<Launching<L>>,
    /// An order to stop that was given meanwhile.
    pub stop: Option<StopOrder>,
}

/// A start that is under way.
pub struct Launching<L> {
    pub launch: L,
    /// The guest exists already, in a file or in the QEMU that is being started. It runs before it is stopped.
    pub holds_guest: bool,
}

#[derive(Clone, Copy)]
pub struct StopOrder {
    pub force: bool,
    pub given: Instant,
}

/// Data that exists only while there is a guest.
pub struct Running<G> {
    pub guest: G,
    /// Why the guest is about to end, according to QEMU or a request. If QEMU ends without a cause, it died.
    pub cause: Option<EndCause>,
    /// Why the guest is paused, if it is.
    pub pause: Option<PauseReason>,
    pub order: Option<Order>,
    /// The guest crashed, and QEMU is asked for its registers, once: then it is killed.
    pub harvest_begun: bool,
}

/// Why a guest is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PauseReason {
    /// A save needs its state at one moment.
    Save,
    /// A dump is written, as requested with `--pause`.
    Dump,
    /// It crashed, and waits for the operator.
    Crash(EndCause),
    /// It did not continue after a save or dump; an event says why.
    CannotContinue,
    /// This keeper found it so.
    BeforeTakeOver,
}

/// A request of the operator that ends the guest and is not carried out yet.
#[derive(Clone, Copy)]
pub struct Order {
    pub note: OrderNote,
    pub power_off_at: Instant,
    /// A guest that has not booted yet ignores the power button.
    pub ask_again_at: Instant,
    /// The guest was asked to shut down; its power is cut if it does not.
    pub asked: bool,
}

/// What exists only between two guests.
pub struct Recovering<L> {
    /// Given while the machine waits, or the order that ended the dead guest.
    pub order: Option<OrderNote>,
    /// None: the next guest is starting.
    pub back_off: Option<BackOff>,
    /// The next guest's QEMU, while it is starting.
    pub launch: Option<L>,
    /// Why the machine waited last.
    pub waited_for: Option<String>,
}

/// A wait before the next start.
pub struct BackOff {
    pub began: Instant,
    pub until: Instant,
    /// `until` as text.
    pub next_start: String,
    pub why: String,
    /// Guests crash again and again. If not, the next one could not be started.
    pub crash_loop: bool,
}

/// What happens to the machine, reduced to what decides.
pub enum Input<G, L> {
    /// A guest runs: it was started, or taken over.
    Runs {
        guest: G,
    },
    /// The next step of a guest's start is under way. `holds_guest`: the guest must run before it can be stopped.
    Launches {
        launch: L,
        holds_guest: bool,
    },
    /// That step has ended, one way or the other.
    Launched,
    /// The next guest cannot be started yet.
    StartFails {
        why: String,
        back_off: BackOff,
    },
    Reboot {
        cold: bool,
        force: bool,
        now: Instant,
    },
    Stop {
        force: bool,
        now: Instant,
    },
    /// A signal: the first one stops the machine, the second one stops it at once.
    Terminate {
        now: Instant,
    },
    /// A dead keeper had accepted this request.
    OrderFound {
        order: OrderNote,
        now: Instant,
    },
    Paused {
        reason: PauseReason,
    },
    Continued,
    /// A save that stops the machine is complete.
    SavedToStop {
        now: Instant,
    },
    /// QEMU is about to end, for this reason unless there is a request.
    ShutsDown {
        cause: EndCause,
    },
    /// The guest crashed, and QEMU has paused it for good.
    Crashes {
        cause: EndCause,
        on_panic: OnPanic,
    },
    /// What only a living QEMU can tell about the crash is read, or cannot be.
    Harvested,
    /// The guest's watchdog resets it.
    WatchdogResets,
    /// QEMU breaks its protocol.
    Misbehaves,
    /// QEMU's process has ended.
    Ended {
        how: String,
        rehearses: bool,
    },
    /// The dead guest's memory is ready for the next guest. `back_off`: the machine is in a crash loop.
    LifeOver {
        back_off: Option<BackOff>,
    },
    TimeUp {
        now: Instant,
    },
    /// There is no dump to wait for.
    DumpsOver,
    /// The guest is in files. `event` is recorded once its QEMU has ended.
    Parked {
        event: EventKind,
    },
    /// An error that the machine cannot continue after.
    Fails,
}

/// What the machine does about it. An action that leads to another input is the last one of its list.
pub enum Action<G, L> {
    /// The order is refused: the machine's state does not permit it.
    Refuse,
    PressPowerButton,
    NoteOrder(OrderNote),
    /// Record that the guest did not shut down in time.
    TellPowerCut,
    KillQemu,
    /// Read what only a living QEMU can tell about a crash, if the guest can be dumped. Then `Harvested`.
    Harvest,
    /// Note the images before it is recorded that the guest is paused for good.
    NoteIdleDisks,
    DumpLiving,
    /// Keep the dead guest's memory as ember, or drop it. Then `LifeOver`.
    EndLife {
        guest: G,
        how: String,
        cause: EndCause,
        cold: bool,
    },
    /// Keep only what the dump of the last guest needs.
    EndLastLife {
        guest: G,
        how: String,
        cause: EndCause,
    },
    TellCrashLoop {
        delay: Duration,
        next_start: String,
    },
    /// Wait after a failed start. `tell`: the operator has not been told of this reason yet.
    WaitToStart {
        why: String,
        next_start: String,
        tell: bool,
    },
    EndBackOff {
        began: Instant,
    },
    ForgetBlocks,
    /// Start the next guest. Then `Launches` or `StartFails`.
    StartNext,
    /// Go on with a start whose step has ended. Then `Runs`, `Launches` for the next step or another try, or `StartFails`.
    LetRun {
        launch: L,
    },
    /// End the start that is under way. `Launched` comes sooner then.
    EndLaunch,
    /// Put away what is left of a QEMU that was started, or is being started.
    GiveUpLaunch {
        launch: L,
    },
    /// Then `DumpsOver`, at once if there is none.
    WaitForDumps,
    GiveUpDumps,
    /// Clean up: the machine stops.
    CleanUp,
    /// Clean up everything except the parked guest's files.
    LeaveParked {
        guest: G,
        event: EventKind,
    },
    /// Clean up what the next keeper cannot use: the machine has failed.
    GiveUp,
}

impl<L> Recovering<L> {
    /// After a guest that this order ended, if there was one.
    fn after(order: Option<OrderNote>) -> Self {
        Self { order, back_off: None, launch: None, waited_for: None }
    }
}

impl<L> Default for Starting<L> {
    fn default() -> Self {
        Self { launch: None, stop: None }
    }
}

impl<G, L> Default for State<G, L> {
    fn default() -> Self {
        Self::Starting(Starting::default())
    }
}

impl<G, L> State<G, L> {
    /// The state as the API and the events show it.
    pub fn shown(&self) -> MachineState {
        match self {
            Self::Starting(Starting { stop: Some(_), .. }) => MachineState::Stopping,
            Self::Starting(_) => MachineState::Starting,
            Self::Running(running) => running.shown(),
            Self::Recovering(Recovering { order: Some(OrderNote::Stop), .. }) => MachineState::Stopping,
            Self::Recovering(_) => MachineState::Recovering,
            Self::Dumping { .. } => MachineState::Stopping,
            Self::Stopped => MachineState::Stopped,
            Self::Failed { .. } => MachineState::Failed,
        }
    }

    /// Why the machine of this name is in this state, as text.
    pub fn why(&self, machine: &str) -> Option<Cow<'_, str>> {
        match self {
            Self::Running(Running { pause: Some(reason), .. }) => reason.text(machine),
            Self::Recovering(Recovering { back_off: Some(back_off), order, .. }) if *order != Some(OrderNote::Stop) => {
                Some(back_off.why.as_str().into())
            }
            Self::Dumping { .. } => Some(WAITS_FOR_DUMPS.into()),
            _ => None,
        }
    }

    /// The wait before the next start, if there is one.
    pub fn back_off(&self) -> Option<&BackOff> {
        match self {
            Self::Recovering(Recovering { back_off, .. }) => back_off.as_ref(),
            _ => None,
        }
    }

    /// When `TimeUp` is due.
    pub fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Running(running) => running.order.map(|order| order.power_off_at.min(order.ask_again_at)),
            Self::Recovering(recovering) => recovering.back_off.as_ref().map(|back_off| back_off.until),
            _ => None,
        }
    }

    pub fn guest(&self) -> Option<&G> {
        match self {
            Self::Running(running) => Some(&running.guest),
            Self::Failed { guest } => guest.as_ref(),
            _ => None,
        }
    }

    pub fn guest_mut(&mut self) -> Option<&mut G> {
        match self {
            Self::Running(running) => Some(&mut running.guest),
            Self::Failed { guest } => guest.as_mut(),
            _ => None,
        }
    }

    /// What of it outlasts the state.
    pub fn into_parts(self) -> (Option<G>, Option<L>) {
        match self {
            Self::Starting(starting) => (None, starting.launch.map(|launching| launching.launch)),
            Self::Running(running) => (Some(running.guest), None),
            Self::Failed { guest } => (guest, None),
            Self::Recovering(recovering) => (None, recovering.launch),
            _ => (None, None),
        }
    }

    /// The start of a guest that is under way.
    pub fn launch(&self) -> Option<&L> {
        match self {
            Self::Starting(starting) => starting.launch.as_ref().map(|launching| &launching.launch),
            Self::Recovering(recovering) => recovering.launch.as_ref(),
            _ => None,
        }
    }

    pub fn launch_mut(&mut self) -> Option<&mut L> {
        match self {
            Self::Starting(starting) => starting.launch.as_mut().map(|launching| &mut launching.launch),
            Self::Recovering(recovering) => recovering.launch.as_mut(),
            _ => None,
        }
    }

    /// No guest of this keeper has run yet.
    pub fn is_first_start(&self) -> bool {
        matches!(self, Self::Starting(_))
    }

    pub fn has_order(&self) -> bool {
        match self {
            Self::Starting(starting) => starting.stop.is_some(),
            Self::Running(running) => running.order.is_some(),
            Self::Recovering(recovering) => recovering.order.is_some(),
            _ => false,
        }
    }

    /// The guest was asked to shut down, and is given time for it.
    pub fn is_asked_to_shut_down(&self) -> bool {
        matches!(self, Self::Running(Running { order: Some(Order { asked: true, .. }), .. }))
    }

    /// Whether the guest runs and no request ends it.
    pub fn is_undisturbed(&self) -> bool {
        self.shown() == MachineState::Running && !self.has_order() && !self.harvest_begun()
    }

    /// Whether QEMU has reported that the running guest is about to end.
    pub fn is_ending(&self) -> bool {
        matches!(self, Self::Running(Running { cause: Some(_), pause: None, .. })) || self.harvest_begun()
    }

    fn harvest_begun(&self) -> bool {
        matches!(self, Self::Running(Running { harvest_begun: true, .. }))
    }
}

impl PauseReason {
    /// None if nothing more is known than that the guest is paused.
    fn text(self, machine: &str) -> Option<Cow<'static, str>> {
        match self {
            Self::Save => Some("the guest is being saved; `hearth save --cancel` cancels the save".into()),
            Self::Dump => {
                Some(format!("the guest is being dumped; `hearth dump {machine} --discard` ends the dump").into())
            }
            Self::Crash(cause) => {
                Some(format!("{}; continue with `hearth reboot` or `hearth stop`", cause.words()).into())
            }
            Self::CannotContinue | Self::BeforeTakeOver => None,
        }
    }
}

impl<G> Running<G> {
    fn is_told_to_stop(&self) -> bool {
        self.order.is_some_and(|order| order.note == OrderNote::Stop)
    }

    fn shown(&self) -> MachineState {
        match self.pause {
            Some(_) => MachineState::Paused,
            None if self.is_told_to_stop() => MachineState::Stopping,
            None => MachineState::Running,
        }
    }
}
