//! Requests: reboot, stop, crash, dump, rejuvenate, save, resize. By default they wait for completion and print
//! progress.

use std::path::Path;
use std::time::{Duration, Instant};

use hearth_api::{
    Accepted, CrashMethod, CrashRequest, DumpDiscard, DumpRequest, DumpResume, EndCause, EventKind, EventRecord,
    MachineState, RebootRequest, RejuvenateRequest, SaveCancel, SaveRequest, SaveThen, StopRequest,
};

use signal_hook::consts::SIGINT;
use signal_hook::iterator::Signals;

use crate::check::life;
use crate::client::ClientError;
use crate::failure;
use crate::home::Home;
use crate::machine::GUEST_DIED_WITH_QEMU;
use crate::runtime_root::RuntimeRoot;

use super::service::{self, Manager};
use super::text::bytes;
use super::{CliError, Context, Exit, events, words};

/// A crash shows within this time. Under emulation on a busy host a panic takes seconds.
const CRASH_PATIENCE: Duration = Duration::from_secs(60);
/// A keeper gives its clients two seconds to receive its last events.
const FAREWELL_PATIENCE: Duration = Duration::from_secs(5);
const CRASH_LOOK: Duration = Duration::from_millis(200);
const FAREWELL_STEP: Duration = Duration::from_millis(5);

/// The goal that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    /// An incarnation with a greater number runs.
    NextAfter(u32),
    Stopped,
    /// A dump is complete.
    Dumped,
    /// A dump is over, complete or not.
    DumpOver,
    Rejuvenated,
    Saved,
    /// A save is complete, and the machine has stopped.
    SavedAndStopped,
    /// No save is running any more.
    SaveOver,
}

/// An event's meaning for a goal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Relevance {
    Reached,
    /// The goal can no longer be reached.
    Lost,
    Open,
}

pub fn reboot(context: &mut Context<'_>, name: &str, request: RebootRequest, wait: bool) -> Result<Exit, CliError> {
    let goal = next_incarnation(context, name, wait)?;
    let accepted = context.ask(name, |client| client.send(&request))?;
    conclude(context, name, accepted, goal)
}

pub fn stop(context: &mut Context<'_>, name: &str, request: StopRequest, wait: bool) -> Result<Exit, CliError> {
    let before = recorded(context, name).last().map_or(0, |record| record.sequence);
    match context.ask(name, |client| client.send(&request)) {
        // The watchdog of a keeper that hangs ends the machine, and nobody is left to answer.
        Err(error @ CliError::Client(ClientError::Silent { .. })) => {
            wait_for_keepers_end(&context.root.machine(name));
            stopped_since(context, name, before, error)
        }
        Err(error @ (CliError::NotRunning { .. } | CliError::Off { .. })) if !is_systemds() => {
            // Units know no other runtime root.
            let is_units = context.root == RuntimeRoot::for_this_user();
            let unit = super::home(name).ok().filter(|_| is_units && service::is_there());
            stop_failed(context, name, before, error, unit.map(|home| (Manager::of_this_user(), home)))
        }
        accepted => conclude(context, name, accepted?, wait.then_some(Goal::Stopped)),
    }
}

/// Whether systemd calls this to stop a unit. It also does that after the unit has failed, of which the operator is to take note.
fn is_systemds() -> bool {
    std::env::var_os("SERVICE_RESULT").is_some()
}

/// Takes note of a failure: the machine counts as stopped from then on. `unit`: what might start it again before that, with its manager.
pub(super) fn stop_failed(
    context: &mut Context<'_>,
    name: &str,
    before: u64,
    error: CliError,
    unit: Option<(Manager, Home)>,
) -> Result<Exit, CliError> {
    if let Some((manager, home)) = unit {
        manager.give_up(&home)?;
    }
    failure::acknowledge(name, &context.root.machine(name));
    stopped_since(context, name, before, error)
}

/// Shows the events after `before` in a machine's log. The error holds if they do not say that it has stopped.
fn stopped_since(context: &mut Context<'_>, name: &str, before: u64, error: CliError) -> Result<Exit, CliError> {
    let events: Vec<_> = recorded(context, name).into_iter().filter(|record| record.sequence > before).collect();
    if !events.iter().any(shows_stopped) {
        return Err(error);
    }
    events.iter().try_for_each(|record| show(context, record))?;
    Ok(Exit::Done)
}

fn recorded(context: &Context<'_>, name: &str) -> Vec<EventRecord> {
    crate::event_log::read_file(&context.root.machine(name)).unwrap_or_default()
}

fn shows_stopped(record: &EventRecord) -> bool {
    matches!(record.event, EventKind::StateChanged { to: MachineState::Stopped, .. })
}

pub(super) fn show(context: &mut Context<'_>, record: &EventRecord) -> Result<(), CliError> {
    if context.json { context.write_json(record) } else { context.write_line(&events::line(record)) }
}

pub fn crash(context: &mut Context<'_>, name: &str, request: CrashRequest, wait: bool) -> Result<Exit, CliError> {
    let goal = next_incarnation(context, name, wait)?;
    let accepted = context.ask(name, |client| client.send(&request))?;
    if goal.is_some() {
        must_crash(context, name, accepted.since, (request.method, CRASH_PATIENCE))?;
    }
    conclude(context, name, accepted, goal)
}

/// Waits for the first sign of a crash. A guest that ignores the request never shows one.
pub(super) fn must_crash(
    context: &Context<'_>,
    name: &str,
    since: u64,
    (method, patience): (CrashMethod, Duration),
) -> Result<(), CliError> {
    let deadline = Instant::now() + patience;
    loop {
        let events = context.ask(name, |client| client.events(since))?;
        if events.iter().any(|record| shows_a_crash(&record.event)) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(CRASH_LOOK);
    }
    let set_up = match method {
        CrashMethod::Nmi => {
            "Linux panics on an NMI only after `sysctl kernel.unknown_nmi_panic=1` there; `echo c >/proc/sysrq-trigger` there crashes it at once"
        }
        CrashMethod::Sysrq => "check that it has a keyboard driver and SysRq enabled (`sysctl kernel.sysrq=1`)",
    };
    let what = format!("the guest did not crash within {} s; {set_up}", patience.as_secs());
    Err(CliError::Machine { name: name.to_owned(), what })
}

fn shows_a_crash(event: &EventKind) -> bool {
    matches!(
        event,
        EventKind::GuestPanicked
            | EventKind::WatchdogExpired { .. }
            | EventKind::QemuExited { .. }
            | EventKind::IncarnationEnded { .. }
            | EventKind::StateChanged { .. }
    )
}

pub fn dump(context: &mut Context<'_>, name: &str, request: &DumpRequest, wait: bool) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(request))?;
    conclude(context, name, accepted, wait.then_some(Goal::Dumped))
}

pub fn resume_dump(context: &mut Context<'_>, name: &str, wait: bool) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(&DumpResume {}))?;
    conclude(context, name, accepted, wait.then_some(Goal::Dumped))
}

pub fn discard_dump(context: &mut Context<'_>, name: &str, wait: bool) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(&DumpDiscard {}))?;
    conclude(context, name, accepted, wait.then_some(Goal::DumpOver))
}

pub fn rejuvenate(
    context: &mut Context<'_>,
    name: &str,
    request: RejuvenateRequest,
    wait: bool,
) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(&request))?;
    conclude(context, name, accepted, wait.then_some(Goal::Rejuvenated))
}

pub fn save(context: &mut Context<'_>, name: &str, request: &SaveRequest, wait: bool) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(request))?;
    let goal = if request.then == SaveThen::Stop { Goal::SavedAndStopped } else { Goal::Saved };
    if wait {
        cancel_when_interrupted(context, name)?;
    }
    conclude(context, name, accepted, wait.then_some(goal))
}

/// Ctrl-C cancels the save and waits for its end; a second Ctrl-C exits at once.
fn cancel_when_interrupted(context: &Context<'_>, name: &str) -> Result<(), CliError> {
    let client = context.client(name);
    let mut signals = Signals::new([SIGINT]).map_err(CliError::Signals)?;
    let listen = move || {
        for (nth, signal) in signals.forever().enumerate() {
            // A save that has ended cannot be cancelled, and need not be.
            if nth > 0 || client.send(&SaveCancel {}).is_err() {
                let _ = signal_hook::low_level::emulate_default_handler(signal);
            }
        }
    };
    let listening = std::thread::Builder::new().name("interrupts".into()).spawn(listen);
    listening.map(drop).map_err(CliError::Signals)
}

pub fn cancel_save(context: &mut Context<'_>, name: &str, wait: bool) -> Result<Exit, CliError> {
    let accepted = context.ask(name, |client| client.send(&SaveCancel {}))?;
    conclude(context, name, accepted, wait.then_some(Goal::SaveOver))
}

pub fn resize(context: &mut Context<'_>, name: &str, disk: &str) -> Result<Exit, CliError> {
    let size = context.ask(name, |client| client.resize(disk))?;
    if context.json {
        context.write_json(&size)?;
    } else {
        context.write_line(&format!("{name}: disk {disk} now has {}", bytes(size.bytes)))?;
    }
    Ok(Exit::Done)
}

fn next_incarnation(context: &Context<'_>, name: &str, wait: bool) -> Result<Option<Goal>, CliError> {
    if !wait {
        return Ok(None);
    }
    Ok(Some(Goal::NextAfter(context.ask(name, |client| client.status())?.incarnation)))
}

/// Reports that the request was accepted, or waits for its goal. With JSON: prints every event meanwhile, one per line.
fn conclude(context: &mut Context<'_>, name: &str, accepted: Accepted, goal: Option<Goal>) -> Result<Exit, CliError> {
    match goal {
        None if context.json => context.write_json(&accepted)?,
        None => context.write_line(&format!("{name}: accepted; `hearth events {name} --follow` shows progress"))?,
        Some(goal) => wait_for(context, name, accepted, goal)?,
    }
    Ok(Exit::Done)
}

fn wait_for(context: &mut Context<'_>, name: &str, accepted: Accepted, goal: Goal) -> Result<(), CliError> {
    let stream = match context.client(name).follow(accepted.since) {
        Ok(stream) => stream,
        Err(error) => {
            // A machine that stops at once may be gone before its events can be followed.
            let error = context.explained(name, error);
            let gone = goal.stops() && matches!(error, CliError::NotRunning { .. } | CliError::Off { .. });
            return if gone { must_have_stopped(context, name, accepted.since) } else { Err(error) };
        }
    };
    let mut stopped = false;
    for record in stream {
        let record = record.map_err(|error| context.explained(name, error))?;
        show(context, &record)?;
        match goal.relevance(&record) {
            Relevance::Reached if goal.stops() => {
                stopped = true;
                break;
            }
            Relevance::Reached => return Ok(()),
            Relevance::Lost => return Err(lost(name, &record.event)),
            Relevance::Open => {}
        }
    }
    // The keeper has ended or is about to. The next start of the machine must not find it.
    if !goal.stops() {
        return Err(cut_off(context, name));
    }
    wait_for_keepers_end(&context.root.machine(name));
    if stopped { Ok(()) } else { must_have_stopped(context, name, accepted.since) }
}

/// A missing keeper may have died while its guest lives on. Its log shows whether the machine has stopped.
fn must_have_stopped(context: &Context<'_>, name: &str, since: u64) -> Result<(), CliError> {
    let stopped = recorded(context, name).iter().any(|record| record.sequence > since && shows_stopped(record));
    if stopped { Ok(()) } else { Err(cut_off(context, name)) }
}

/// The keeper ended before the goal was reached.
pub(super) fn cut_off(context: &Context<'_>, name: &str) -> CliError {
    match context.not_running(name) {
        orphaned @ CliError::Orphaned { .. } => orphaned,
        _ => {
            let what =
                format!("its keeper ended before this was complete; `hearth status {name}` shows the machine's state");
            CliError::Machine { name: name.to_owned(), what }
        }
    }
}

/// A keeper releases the machine's lock when its process ends, moments after its last event.
pub(super) fn wait_for_keepers_end(runtime_folder: &Path) {
    let deadline = Instant::now() + FAREWELL_PATIENCE;
    while life::has_keeper(runtime_folder) && Instant::now() < deadline {
        std::thread::sleep(FAREWELL_STEP);
    }
}

/// `by`: the event that decided it.
fn lost(name: &str, by: &EventKind) -> CliError {
    let what = match by {
        EventKind::IncarnationEnded { cause: EndCause::QemuDied }
        | EventKind::RejuvenationFailed { guest_lost: true, .. } => GUEST_DIED_WITH_QEMU.to_owned(),
        EventKind::StateChanged { to, .. } => {
            format!("the machine is now {}; `hearth events {name}` shows why", to.name())
        }
        event => words::describe(event),
    };
    CliError::Machine { name: name.to_owned(), what }
}

impl Goal {
    /// Whether the keeper ends when the goal is reached.
    fn stops(self) -> bool {
        matches!(self, Self::Stopped | Self::SavedAndStopped)
    }

    fn relevance(self, record: &EventRecord) -> Relevance {
        match (self, &record.event) {
            (Self::NextAfter(number), EventKind::IncarnationStarted { .. }) if record.incarnation > number => {
                Relevance::Reached
            }
            (Self::Stopped | Self::SavedAndStopped, EventKind::StateChanged { to: MachineState::Stopped, .. }) => {
                Relevance::Reached
            }
            (Self::Dumped | Self::DumpOver, EventKind::DumpComplete { .. })
            | (Self::DumpOver, EventKind::DumpIncomplete { .. }) => Relevance::Reached,
            (Self::Dumped, EventKind::DumpIncomplete { .. } | EventKind::DumpWaits { .. }) => Relevance::Lost,
            (Self::NextAfter(_), EventKind::StateChanged { to: MachineState::Stopped | MachineState::Paused, .. }) => {
                Relevance::Lost
            }
            (Self::Rejuvenated, EventKind::Rejuvenated { .. }) => Relevance::Reached,
            (Self::Rejuvenated, EventKind::RejuvenationFailed { .. } | EventKind::IncarnationEnded { .. }) => {
                Relevance::Lost
            }
            (Self::Saved | Self::SaveOver, EventKind::Saved { .. })
            | (Self::SaveOver, EventKind::SaveFailed { .. }) => Relevance::Reached,
            (Self::Saved | Self::SavedAndStopped, EventKind::SaveFailed { .. }) => Relevance::Lost,
            (_, EventKind::StateChanged { to: MachineState::Failed, .. }) => Relevance::Lost,
            _ => Relevance::Open,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(goal: Goal, incarnation: u32, event: EventKind, expect: Relevance) {
        let record = EventRecord { sequence: 1, time: String::new(), machine: "web".into(), incarnation, event };
        assert_eq!(goal.relevance(&record), expect, "{goal:?} {:?}", record.event);
    }

    #[test]
    fn goals_are_reached_and_lost() {
        let started = || EventKind::IncarnationStarted { generation: 3, warm: true };
        let entered = |to| EventKind::StateChanged { from: MachineState::Running, to };
        check(Goal::NextAfter(2), 3, started(), Relevance::Reached);
        check(Goal::NextAfter(2), 2, started(), Relevance::Open);
        check(Goal::NextAfter(2), 2, entered(MachineState::Failed), Relevance::Lost);
        check(Goal::NextAfter(2), 2, entered(MachineState::Stopped), Relevance::Lost);
        check(Goal::NextAfter(2), 2, entered(MachineState::Paused), Relevance::Lost);
        check(Goal::NextAfter(2), 2, entered(MachineState::Recovering), Relevance::Open);
        check(Goal::Stopped, 2, entered(MachineState::Stopped), Relevance::Reached);
        check(Goal::Stopped, 2, entered(MachineState::Failed), Relevance::Lost);
        check(Goal::Stopped, 2, EventKind::GuestPanicked, Relevance::Open);
        check(Goal::SavedAndStopped, 2, entered(MachineState::Stopped), Relevance::Reached);
        let waits = || EventKind::DumpWaits { file: String::new(), why: String::new() };
        let complete = EventKind::DumpComplete { file: String::new(), pages: 1, bytes: 1, duration_ms: 1.0 };
        let incomplete = || EventKind::DumpIncomplete { file: String::new(), why: String::new() };
        check(Goal::Dumped, 2, waits(), Relevance::Lost);
        check(Goal::DumpOver, 2, waits(), Relevance::Open);
        check(Goal::Dumped, 2, complete, Relevance::Reached);
        check(Goal::Dumped, 2, incomplete(), Relevance::Lost);
        check(Goal::DumpOver, 2, incomplete(), Relevance::Reached);
        check(Goal::NextAfter(2), 2, waits(), Relevance::Open);
        let not_saved = || EventKind::SaveFailed { folder: String::new(), why: String::new() };
        let saved = || EventKind::Saved {
            folder: String::new(),
            pages: 1,
            bytes: 1,
            pause_ms: 1.0,
            duration_ms: 2.0,
            rounds: 1,
            settled: true,
            pages_held: 1,
            pages_on_disks: 0,
        };
        check(Goal::Saved, 2, saved(), Relevance::Reached);
        check(Goal::Saved, 2, not_saved(), Relevance::Lost);
        check(Goal::Stopped, 2, saved(), Relevance::Open);
        // The stop has called the save off.
        check(Goal::Stopped, 2, not_saved(), Relevance::Open);
        check(Goal::SavedAndStopped, 2, saved(), Relevance::Open);
        check(Goal::SavedAndStopped, 2, not_saved(), Relevance::Lost);
        check(Goal::SaveOver, 2, not_saved(), Relevance::Reached);
    }

    #[test]
    fn lost_goal_names_its_reason() {
        let failed =
            |guest_lost| EventKind::RejuvenationFailed { phase: "hand".into(), why: "it ended".into(), guest_lost };
        let ended = |cause| EventKind::IncarnationEnded { cause };
        let check_words = |event: EventKind, expect: &str| {
            check(Goal::Rejuvenated, 2, event.clone(), Relevance::Lost);
            let words = lost("web", &event).to_string();
            assert!(words.contains(expect), "{words}");
        };
        check_words(failed(true), GUEST_DIED_WITH_QEMU);
        check_words(failed(false), "rejuvenation failed in phase hand, the guest continues on the old QEMU: it ended");
        check_words(ended(EndCause::QemuDied), GUEST_DIED_WITH_QEMU);
        check_words(ended(EndCause::Panic), "incarnation ended: guest panicked");
    }
}
