//! Table: every state with every input.
//!
//! A row names states and inputs, and what follows: `state; actions`. `same` is the state that it was. Groups of inputs are in
//! `GROUPS`. "at 30 s" is when power is cut, "within 60 s" also says that the guest was asked to shut down before.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hearth_api::{EndCause, EventKind};
use hearth_recovery::journal::OrderNote;

use super::{
    Action, BackOff, Input, Launching, Order, PauseReason, Recovering, Running, Starting, State, StopOrder, step,
};
use crate::config::OnPanic;

const TABLE: &str = "
    starting                                                           | launches                                               | starting, launching
    starting                                                           | launches with a guest                                  | starting, launching with a guest
    starting                                                           | runs                                                   | running
    starting                                                           | launched                                               | same
    starting                                                           | stop, signal                                           | starting, stop
    starting                                                           | forced stop                                            | starting, forced stop
    starting, first launch, first resume, first told to end, told to stop resumed | reboot, cold reboot, forced reboot          | same; refuse
    starting, first launch, first resume, first told to end, told to stop resumed | guest's, recovery's, dumps over, too early, time is up | same
    first launch, first resume, first told to end, told to stop resumed | runs                                                  | same
    first launch, first resume, first told to end, told to stop resumed | launches, launches with a guest                       | same; give up launch
    first launch                                                       | stop, signal                                           | starting, stop, launching; end launch
    first launch                                                       | forced stop                                            | starting, forced stop, launching; end launch
    first launch                                                       | launched                                               | starting; let run
    first resume                                                       | stop, signal                                           | starting, stop, launching with a guest
    first resume                                                       | forced stop                                            | starting, forced stop, launching with a guest
    first resume                                                       | launched                                               | starting; let run
    first told to end                                                  | stop                                                   | starting, stop, launching; end launch
    first told to end                                                  | forced stop, signal                                    | starting, forced stop, launching; end launch
    first told to end                                                  | launched                                               | dumping, told to stop; give up launch, wait for dumps
    told to stop resumed                                               | stop                                                   | starting, stop, launching with a guest
    told to stop resumed                                               | forced stop, signal                                    | starting, forced stop, launching with a guest
    told to stop resumed                                               | launched                                               | starting, stop; let run
    first resumed                                                      | runs                                                   | running, stop within 60 s; press power button, note stop
    first resumed                                                      | launches                                               | starting, stop, launching
    first resumed                                                      | launches with a guest                                  | starting, stop, launching with a guest
    first resumed                                                      | reboot, cold reboot, forced reboot                     | same; refuse
    first resumed                                                      | stop                                                   | starting, stop
    first resumed                                                      | forced stop, signal                                    | starting, forced stop
    first resumed                                                      | launched, guest's, recovery's, dumps over, too early, time is up | same

    recovering, rebooted, retrying | runs                                                             | running
    stopped, failed                | orders                                                           | same; refuse
    stopped, failed                | guest's, recovery's, launched, dumps over, too early, time is up | same
    stopped, failed                | launches, launches with a guest                                  | same; give up launch
    stopped, failed                | runs                                                             | same

    running, ending, paused, rebooting, stopping, harvesting | launched | same
    running, ending, paused, rebooting, stopping, harvesting | launches, launches with a guest | same; give up launch

    running, ending, paused | runs, recovery's, dumps over, too early, time is up | same

    running                 | reboot                                              | running, reboot within 60 s; press power button, note reboot
    running                 | cold reboot                                         | running, cold reboot within 60 s; press power button, note cold reboot
    running                 | forced reboot                                       | running, reboot at 0 s; note reboot
    running                 | stop, signal                                        | running, stop within 60 s; press power button, note stop
    running                 | forced stop                                         | running, stop at 0 s; note stop
    running                 | reboot found                                        | running, reboot within 60 s; press power button
    running                 | stop found                                          | running, stop within 60 s; press power button
    running                 | paused                                              | paused
    running                 | continued                                           | same
    running                 | saved to stop                                       | running, stop at 60 s, stop was ordered; kill QEMU
    running                 | shuts down                                          | running, guest powered off
    running                 | crashes to dump and recover                         | running, guest panicked, harvest begun; harvest
    running                 | crashes to recover                                  | running, guest panicked; kill QEMU
    running                 | crashes to dump                                     | paused, guest panicked; note idle disks, dump it
    running                 | crashes to pause                                    | paused, guest panicked; note idle disks
    running                 | watchdog resets                                     | running, guest stopped feeding its watchdog
    running                 | misbehaves                                          | running, QEMU died; kill QEMU
    running                 | ended                                               | recovering; end life: QEMU died
    running                 | rehearsal ended                                     | dumping; end last life: QEMU died, wait for dumps

    ending | reboot                         | running, reboot within 60 s, guest powered off; press power button, note reboot
    ending | cold reboot                    | running, cold reboot within 60 s, guest powered off; press power button, note cold reboot
    ending | forced reboot                  | running, reboot at 0 s, guest powered off; note reboot
    ending | stop, signal                   | running, stop within 60 s, guest powered off; press power button, note stop
    ending | forced stop                    | running, stop at 0 s, guest powered off; note stop
    ending | reboot found                   | running, reboot within 60 s, guest powered off; press power button
    ending | stop found                     | running, stop within 60 s, guest powered off; press power button
    ending | paused                         | paused, guest powered off
    ending | continued, shuts down          | same
    ending | saved to stop                  | running, stop at 60 s, guest powered off; kill QEMU
    ending | crashes to dump and recover    | running, guest powered off, harvest begun; harvest
    ending | crashes to recover, misbehaves | same; kill QEMU
    ending | crashes to dump                | paused, guest panicked; note idle disks, dump it
    ending | crashes to pause               | paused, guest panicked; note idle disks
    ending | watchdog resets                | running, guest stopped feeding its watchdog
    ending | ended                          | dumping; end last life: guest powered off, wait for dumps
    ending | rehearsal ended                | dumping; end last life: guest powered off, wait for dumps

    paused | reboot, forced reboot       | paused, reboot at 0 s; note reboot
    paused | cold reboot                 | paused, cold reboot at 0 s; note cold reboot
    paused | stop, forced stop, signal   | running, stop at 0 s; note stop
    paused | reboot found                | paused, reboot within 60 s; press power button
    paused | stop found                  | running, stop within 60 s; press power button
    paused | paused                      | same
    paused | continued                   | running
    paused | saved to stop               | running, stop at 60 s, stop was ordered; kill QEMU
    paused | shuts down                  | paused, guest powered off
    paused | crashes to dump and recover | paused, guest panicked, harvest begun; harvest
    paused | crashes to recover          | paused, guest panicked; kill QEMU
    paused | crashes to dump             | paused, guest panicked; note idle disks, dump it
    paused | crashes to pause            | paused, guest panicked; note idle disks
    paused | watchdog resets             | paused, guest stopped feeding its watchdog
    paused | misbehaves                  | paused, QEMU died; kill QEMU
    paused | ended                       | recovering; end life: QEMU died
    paused | rehearsal ended             | dumping; end last life: QEMU died, wait for dumps

    rebooting, stopping | runs, recovery's, dumps over, too early, continued | same

    rebooting           | reboot                                             | running, reboot within 60 s; press power button, note reboot
    rebooting           | cold reboot                                        | running, cold reboot within 60 s; press power button, note cold reboot
    rebooting           | forced reboot                                      | running, reboot within 0 s; note reboot
    rebooting           | stop, signal                                       | running, stop within 60 s; press power button, note stop
    rebooting           | forced stop                                        | running, stop within 0 s; note stop
    rebooting           | reboot found                                       | running, reboot within 60 s; press power button
    rebooting           | stop found                                         | running, stop within 60 s; press power button
    rebooting           | paused                                             | paused, reboot within 30 s
    rebooting           | saved to stop                                      | running, stop within 60 s, stop was ordered; kill QEMU
    rebooting           | shuts down                                         | running, reboot within 30 s, reboot was ordered
    rebooting           | crashes to dump and recover                        | running, reboot within 30 s, guest panicked, harvest begun; harvest
    rebooting           | crashes to recover                                 | running, reboot within 30 s, guest panicked; kill QEMU
    rebooting           | crashes to dump                                    | running, reboot within 30 s, guest panicked; dump it
    rebooting           | crashes to pause                                   | running, reboot within 30 s, guest panicked
    rebooting           | watchdog resets                                    | running, reboot within 30 s, guest stopped feeding its watchdog
    rebooting           | misbehaves                                         | running, reboot within 30 s, QEMU died; kill QEMU
    rebooting           | time is up                                         | running, reboot at 160 s, reboot was ordered; tell power cut, kill QEMU
    rebooting           | ended                                              | recovering, reboot; end life: QEMU died
    rebooting           | rehearsal ended                                    | dumping; end last life: QEMU died, wait for dumps

    stopping | reboot, cold reboot, forced reboot | same; refuse
    stopping | stop                               | running, stop within 60 s; press power button, note stop
    stopping | forced stop, signal                | running, stop within 0 s; note stop
    stopping | reboot found                       | running, reboot within 60 s; press power button
    stopping | stop found                         | running, stop within 60 s; press power button
    stopping | paused                             | paused, stop within 30 s
    stopping | saved to stop                      | running, stop within 60 s, stop was ordered; kill QEMU
    stopping | shuts down                         | running, stop within 30 s, stop was ordered
    stopping | crashes to dump and recover        | running, stop within 30 s, guest panicked, harvest begun; harvest
    stopping | crashes to recover                 | running, stop within 30 s, guest panicked; kill QEMU
    stopping | crashes to dump                    | running, stop within 30 s, guest panicked; dump it
    stopping | crashes to pause                   | running, stop within 30 s, guest panicked
    stopping | watchdog resets                    | running, stop within 30 s, guest stopped feeding its watchdog
    stopping | misbehaves                         | running, stop within 30 s, QEMU died; kill QEMU
    stopping | time is up                         | running, stop at 160 s, stop was ordered; tell power cut, kill QEMU
    stopping | ended, rehearsal ended             | dumping, told to stop; end last life: QEMU died, wait for dumps

    harvesting | reboot                                          | running, reboot within 60 s, guest panicked, harvest begun; press power button, note reboot
    harvesting | cold reboot                                     | running, cold reboot within 60 s, guest panicked, harvest begun; press power button, note cold reboot
    harvesting | forced reboot                                   | running, reboot at 0 s, guest panicked, harvest begun; note reboot
    harvesting | stop, signal                                    | running, stop within 60 s, guest panicked, harvest begun; press power button, note stop
    harvesting | forced stop                                     | running, stop at 0 s, guest panicked, harvest begun; note stop
    harvesting | reboot found                                    | running, reboot within 60 s, guest panicked, harvest begun; press power button
    harvesting | stop found                                      | running, stop within 60 s, guest panicked, harvest begun; press power button
    harvesting | paused                                          | paused, guest panicked, harvest begun
    harvesting | saved to stop                                   | running, stop at 60 s, guest panicked, harvest begun; kill QEMU
    harvesting | continued, shuts down                           | same
    harvesting | crashes to dump and recover                     | same
    harvesting | crashes to recover, misbehaves                  | same; kill QEMU
    harvesting | crashes to dump                                 | paused, guest panicked, harvest begun; note idle disks, dump it
    harvesting | crashes to pause                                | paused, guest panicked, harvest begun; note idle disks
    harvesting | watchdog resets                                 | running, guest stopped feeding its watchdog, harvest begun
    harvesting | ended                                           | recovering; end life: guest panicked
    harvesting | rehearsal ended                                 | dumping; end last life: guest panicked, wait for dumps
    harvesting | runs, recovery's, dumps over, too early, time is up | same

    running, ending, paused, rebooting, stopping, harvesting | harvested | same; kill QEMU
    running, ending, paused, rebooting, stopping, harvesting | parked    | stopped; leave parked

    recovering, rebooted, retrying | orders                                     | same; refuse
    recovering, rebooted, retrying | guest's, dumps over, too early, time is up | same
    recovering, rebooted, retrying | launched                                   | same
    recovering, retrying           | launches, launches with a guest | recovering, launching
    rebooted                       | launches, launches with a guest | recovering, reboot, launching
    recovering                     | life over                                  | recovering; start next
    recovering                     | life over in a loop                        | recovering, until 10 s; tell crash loop
    rebooted                       | life over, life over in a loop             | recovering; start next
    recovering                     | start fails                                | recovering, until 10 s; wait to start, told
    retrying                       | life over                                  | recovering; start next
    retrying                       | life over in a loop                        | recovering, until 10 s; tell crash loop
    retrying                       | start fails                                | recovering, until 10 s; wait to start
    rebooted                       | start fails                                | recovering, reboot, until 10 s; wait to start, told

    launching, told to end early | runs, guest's, recovery's, dumps over, too early, time is up | same
    launching, told to end early | reboot, cold reboot, forced reboot                           | same; refuse
    launching, told to end early | stop, forced stop, signal                                    | recovering, stop, launching; end launch
    launching, told to end early | launches, launches with a guest | same; give up launch
    launching                    | launched                                                     | recovering; let run
    told to end early            | launched                                                     | dumping, told to stop; give up launch, wait for dumps

    waiting, told to start, told to start cold, told to end | launches, launches with a guest | same; give up launch
    waiting, told to start, told to start cold, told to end | launched                        | same
    waiting, told to start, told to start cold, told to end | runs                            | running
    waiting, told to start, told to start cold, told to end | guest's, recovery's, dumps over | same
    waiting, told to start, told to start cold, told to end | reboot, forced reboot           | recovering, reboot, until 0 s
    waiting, told to start, told to start cold, told to end | cold reboot                     | recovering, cold reboot, until 0 s
    waiting, told to start, told to start cold, told to end | stop, forced stop, signal       | recovering, stop, until 0 s
    waiting                                                 | too early                       | same
    waiting                                                 | time is up                      | recovering; end back-off, start next
    told to start                                           | too early, time is up           | recovering; end back-off, start next
    told to start cold                                      | too early, time is up           | recovering; end back-off, forget blocks, start next
    told to end                                             | too early, time is up           | dumping, told to stop; end back-off, wait for dumps

    dumping, dumping to stop | runs, guest's, recovery's, launched, too early, time is up | same
    dumping, dumping to stop | launches, launches with a guest | same; give up launch
    dumping, dumping to stop | reboot, cold reboot, forced reboot               | same; refuse
    dumping, dumping to stop | stop                                             | dumping, told to stop; note stop
    dumping, dumping to stop | forced stop                                      | same; give up dumps
    dumping                  | signal                                           | dumping, told to stop; note stop
    dumping to stop          | signal                                           | same; give up dumps
    dumping, dumping to stop | dumps over                                       | stopped; clean up

    starting, first resumed, recovering, rebooted, retrying, waiting, told to start, told to start cold, told to end | fails | failed; give up
    first launch, first resume, first told to end, told to stop resumed, launching, told to end early | fails | failed; give up launch, give up
    dumping, dumping to stop, stopped                                                                 | fails | failed; give up
    running, ending, paused, rebooting, stopping, harvesting                                          | fails | failed with its guest; give up
    failed                                                                                            | fails | same; give up
";

/// Inputs that most states treat alike.
const GROUPS: [(&str, &str); 3] = [
    ("orders", "reboot, cold reboot, forced reboot, stop, forced stop, signal"),
    (
        "guest's",
        "reboot found, stop found, paused, continued, saved to stop, shuts down, crashes to dump and recover, \
         crashes to recover, crashes to dump, crashes to pause, harvested, watchdog resets, misbehaves, ended, rehearsal ended, parked",
    ),
    ("recovery's", "start fails, life over, life over in a loop"),
];

/// Stands for the guest and its QEMU.
type Guest = ();
/// Stands for a QEMU that is being started.
type Launch = ();

/// All states, each with a name for the table. Orders in them are due at 30 s, waits end at 10 s.
fn states(start: Instant) -> Vec<(&'static str, State<Guest, Launch>)> {
    const REBOOT: OrderNote = OrderNote::Reboot { cold: false };
    let due = start + Duration::from_secs(30);
    let order = |note| Some(Order { note, power_off_at: due, ask_again_at: due, asked: true });
    let launch = |holds_guest| Some(Launching { launch: (), holds_guest });
    let starting = |launch, stops: bool| {
        State::Starting(Starting { launch, stop: stops.then_some(StopOrder { force: false, given: start }) })
    };
    let running = |order, cause| State::Running(Running { guest: (), cause, pause: None, order, harvest_begun: false });
    let harvesting = State::Running(Running {
        guest: (),
        cause: Some(EndCause::Panic),
        pause: None,
        order: None,
        harvest_begun: true,
    });
    let pause = Some(PauseReason::Save);
    let recovering =
        |order, back_off, waited_for| State::Recovering(Recovering { order, back_off, launch: None, waited_for });
    let launching = |order| State::Recovering(Recovering { order, back_off: None, launch: Some(()), waited_for: None });
    let waiting = |order, seconds| recovering(order, Some(back_off(start, seconds)), Some(WHY.to_owned()));
    vec![
        ("starting", starting(None, false)),
        ("first launch", starting(launch(false), false)),
        ("first resume", starting(launch(true), false)),
        ("first told to end", starting(launch(false), true)),
        ("told to stop resumed", starting(launch(true), true)),
        ("first resumed", starting(None, true)),
        ("running", running(None, None)),
        ("ending", running(None, Some(EndCause::GuestShutdown))),
        ("paused", State::Running(Running { guest: (), cause: None, pause, order: None, harvest_begun: false })),
        ("harvesting", harvesting),
        ("rebooting", running(order(REBOOT), None)),
        ("stopping", running(order(OrderNote::Stop), None)),
        ("recovering", recovering(None, None, None)),
        ("rebooted", recovering(Some(REBOOT), None, None)),
        ("retrying", recovering(None, None, Some(WHY.to_owned()))),
        ("launching", launching(None)),
        ("told to end early", launching(Some(OrderNote::Stop))),
        ("waiting", waiting(None, 10)),
        ("told to start", waiting(Some(REBOOT), 0)),
        ("told to start cold", waiting(Some(OrderNote::Reboot { cold: true }), 0)),
        ("told to end", waiting(Some(OrderNote::Stop), 0)),
        ("dumping", State::Dumping { told_to_stop: false }),
        ("dumping to stop", State::Dumping { told_to_stop: true }),
        ("stopped", State::Stopped),
        ("failed", State::Failed { guest: None }),
    ]
}

const WHY: &str = "cannot start the next guest yet: no memory";

fn back_off(start: Instant, seconds: u64) -> BackOff {
    let until = start + Duration::from_secs(seconds);
    BackOff { began: start, until, next_start: "soon".to_owned(), why: WHY.to_owned(), crash_loop: false }
}

/// All inputs, each with a name for the table.
fn inputs(now: Instant) -> Vec<(&'static str, Input<Guest, Launch>)> {
    let crashes = |on_panic| Input::Crashes { cause: EndCause::Panic, on_panic };
    let found = |order| Input::OrderFound { order, now };
    let reboot = |cold, force| Input::Reboot { cold, force, now };
    let ended = |rehearses| Input::Ended { how: "exit status 0".to_owned(), rehearses };
    vec![
        ("runs", Input::Runs { guest: () }),
        ("launches", Input::Launches { launch: (), holds_guest: false }),
        ("launches with a guest", Input::Launches { launch: (), holds_guest: true }),
        ("launched", Input::Launched),
        ("start fails", Input::StartFails { why: "no memory".to_owned(), back_off: back_off(now, 10) }),
        ("reboot", reboot(false, false)),
        ("cold reboot", reboot(true, false)),
        ("forced reboot", reboot(false, true)),
        ("stop", Input::Stop { force: false, now }),
        ("forced stop", Input::Stop { force: true, now }),
        ("signal", Input::Terminate { now }),
        ("reboot found", found(OrderNote::Reboot { cold: false })),
        ("stop found", found(OrderNote::Stop)),
        ("paused", Input::Paused { reason: PauseReason::Save }),
        ("continued", Input::Continued),
        ("saved to stop", Input::SavedToStop { now }),
        ("shuts down", Input::ShutsDown { cause: EndCause::GuestShutdown }),
        ("crashes to dump and recover", crashes(OnPanic::DumpAndRecover)),
        ("crashes to recover", crashes(OnPanic::Recover)),
        ("crashes to dump", crashes(OnPanic::Dump)),
        ("crashes to pause", crashes(OnPanic::Pause)),
        ("harvested", Input::Harvested),
        ("watchdog resets", Input::WatchdogResets),
        ("misbehaves", Input::Misbehaves),
        ("ended", ended(false)),
        ("rehearsal ended", ended(true)),
        ("life over", Input::LifeOver { back_off: None }),
        ("life over in a loop", Input::LifeOver { back_off: Some(back_off(now, 10)) }),
        ("too early", Input::TimeUp { now }),
        ("time is up", Input::TimeUp { now: now + Duration::from_secs(100) }),
        ("dumps over", Input::DumpsOver),
        ("parked", Input::Parked { event: EventKind::GuestPanicked }),
        ("fails", Input::Fails),
    ]
}

/// A state as the table describes it.
fn describe(state: &State<Guest, Launch>, start: Instant) -> String {
    let seconds = |at: Instant| (at - start).as_secs();
    let mut words = Vec::new();
    match state {
        State::Starting(Starting { launch, stop }) => {
            words.push("starting".to_owned());
            words.extend(stop.map(|stop| if stop.force { "forced stop" } else { "stop" }.to_owned()));
            let with = |holds_guest: bool| if holds_guest { " with a guest" } else { "" };
            words.extend(launch.as_ref().map(|launching| format!("launching{}", with(launching.holds_guest))));
        }
        State::Running(Running { cause, pause, order, harvest_begun, .. }) => {
            words.push(if pause.is_some() { "paused" } else { "running" }.to_owned());
            words.extend(order.map(|Order { note, power_off_at, asked, .. }| {
                let by = if asked { "within" } else { "at" };
                format!("{} {by} {} s", word(note), seconds(power_off_at))
            }));
            words.extend(cause.map(|cause| cause.words().to_owned()));
            words.extend(harvest_begun.then(|| "harvest begun".to_owned()));
        }
        State::Recovering(Recovering { order, back_off, launch, .. }) => {
            words.push("recovering".to_owned());
            words.extend(order.map(|note| word(note).to_owned()));
            words.extend(launch.map(|()| "launching".to_owned()));
            words.extend(back_off.as_ref().map(|back_off| format!("until {} s", seconds(back_off.until))));
        }
        State::Dumping { told_to_stop } => {
            words.push("dumping".to_owned());
            words.extend(told_to_stop.then(|| "told to stop".to_owned()));
        }
        State::Stopped => words.push("stopped".to_owned()),
        State::Failed { guest } => {
            words.push(if guest.is_some() { "failed with its guest" } else { "failed" }.to_owned())
        }
    }
    words.join(", ")
}

fn word(note: OrderNote) -> &'static str {
    match note {
        OrderNote::Reboot { cold: false } => "reboot",
        OrderNote::Reboot { cold: true } => "cold reboot",
        OrderNote::Stop => "stop",
    }
}

fn name(action: &Action<Guest, Launch>) -> String {
    match action {
        Action::Refuse => "refuse".to_owned(),
        Action::PressPowerButton => "press power button".to_owned(),
        Action::NoteOrder(note) => format!("note {}", word(*note)),
        Action::TellPowerCut => "tell power cut".to_owned(),
        Action::KillQemu => "kill QEMU".to_owned(),
        Action::Harvest => "harvest".to_owned(),
        Action::NoteIdleDisks => "note idle disks".to_owned(),
        Action::DumpLiving => "dump it".to_owned(),
        Action::EndLife { cause, cold, .. } => {
            format!("end life{}: {}", if *cold { " cold" } else { "" }, cause.words())
        }
        Action::EndLastLife { cause, .. } => format!("end last life: {}", cause.words()),
        Action::TellCrashLoop { .. } => "tell crash loop".to_owned(),
        Action::WaitToStart { tell, .. } => if *tell { "wait to start, told" } else { "wait to start" }.to_owned(),
        Action::EndBackOff { .. } => "end back-off".to_owned(),
        Action::ForgetBlocks => "forget blocks".to_owned(),
        Action::StartNext => "start next".to_owned(),
        Action::LetRun { .. } => "let run".to_owned(),
        Action::EndLaunch => "end launch".to_owned(),
        Action::GiveUpLaunch { .. } => "give up launch".to_owned(),
        Action::WaitForDumps => "wait for dumps".to_owned(),
        Action::GiveUpDumps => "give up dumps".to_owned(),
        Action::CleanUp => "clean up".to_owned(),
        Action::LeaveParked { .. } => "leave parked".to_owned(),
        Action::GiveUp => "give up".to_owned(),
    }
}

/// What follows from a state and an input, as the table says it.
fn follows(state: State<Guest, Launch>, input: Input<Guest, Launch>, start: Instant) -> String {
    let (state, actions) = step(state, input);
    let actions: Vec<_> = actions.iter().map(name).collect();
    let state = describe(&state, start);
    if actions.is_empty() { state } else { format!("{state}; {}", actions.join(", ")) }
}

fn group(input: &'static str) -> &'static str {
    GROUPS.iter().find(|(name, _)| *name == input).map_or(input, |(_, inputs)| *inputs)
}

/// Rows of the table, by state and input.
fn rows() -> HashMap<(&'static str, &'static str), &'static str> {
    let mut rows = HashMap::new();
    for line in TABLE.lines().filter(|line| !line.is_empty()) {
        let columns: Vec<_> = line.split('|').map(str::trim).collect();
        let [states, inputs, expect] = columns[..] else { panic!("three columns: {line}") };
        for state in states.split(", ") {
            for input in inputs.split(", ").flat_map(|input| group(input).split(", ")) {
                let earlier = rows.insert((state, input), expect);
                assert_eq!(earlier, None, "two rows for {state} | {input}");
            }
        }
    }
    rows
}

#[test]
fn every_state_answers_every_input() {
    let (mut rows, start) = (rows(), Instant::now());
    let mut wrong = Vec::new();
    for number in 0..states(start).len() {
        for (input_name, input) in inputs(start) {
            let (state_name, state) = states(start).swap_remove(number);
            let Some(expect) = rows.remove(&(state_name, input_name)) else {
                wrong.push(format!("{state_name} | {input_name}: no row"));
                continue;
            };
            let expect = expect.replace("same", &describe(&state, start));
            let found = follows(state, input, start);
            if found != expect {
                wrong.push(format!("{state_name} | {input_name} | {found}, but the table says {expect}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(rows.is_empty(), "rows of no state or no input: {rows:?}");
}

#[test]
fn api_shows_one_word_for_each_state() {
    let mut shown: HashMap<_, Vec<_>> = HashMap::new();
    for (name, state) in states(Instant::now()) {
        shown.entry(state.shown().name()).or_default().push(name);
    }
    let expect = [
        ("starting", "starting, first launch, first resume"),
        ("running", "running, ending, harvesting, rebooting"),
        ("paused", "paused"),
        ("recovering", "recovering, rebooted, retrying, launching, waiting, told to start, told to start cold"),
        (
            "stopping",
            "first told to end, told to stop resumed, first resumed, stopping, told to end early, told to end, dumping, dumping to stop",
        ),
        ("stopped", "stopped"),
        ("failed", "failed"),
    ];
    let expect = expect.map(|(word, names)| (word, names.split(", ").collect()));
    assert_eq!(shown, HashMap::from(expect));
}

/// The machine relies on this where an error could not be reported (`Machine::apply_infallible`).
#[test]
fn orders_lead_to_nothing_that_can_fail() {
    let start = Instant::now();
    let certain = ["runs", "reboot found", "stop found", "paused", "continued", "saved to stop", "fails"];
    let certain: Vec<_> = certain.into_iter().chain(GROUPS[0].1.split(", ")).collect();
    for number in 0..states(start).len() {
        for (input_name, input) in inputs(start).into_iter().filter(|(name, _)| certain.contains(name)) {
            let (state_name, state) = states(start).swap_remove(number);
            let can_fail = |action: &Action<Guest, Launch>| {
                use Action::{CleanUp, EndLastLife, EndLife, Harvest, LeaveParked, LetRun, StartNext, WaitForDumps};
                matches!(
                    action,
                    EndLife { .. }
                        | EndLastLife { .. }
                        | CleanUp
                        | Harvest
                        | LeaveParked { .. }
                        | LetRun { .. }
                        | StartNext
                        | WaitForDumps
                )
            };
            assert!(!step(state, input).1.iter().any(can_fail), "{state_name} | {input_name}");
        }
    }
}

#[test]
fn pause_reason_says_what_ends_the_pause() {
    let check = |reason: PauseReason, expect: Option<&str>| assert_eq!(reason.text("web").as_deref(), expect);
    check(PauseReason::Save, Some("the guest is being saved; `hearth save --cancel` cancels the save"));
    check(PauseReason::Dump, Some("the guest is being dumped; `hearth dump web --discard` ends the dump"));
    let crashed = "guest panicked; continue with `hearth reboot` or `hearth stop`";
    check(PauseReason::Crash(EndCause::Panic), Some(crashed));
    check(PauseReason::CannotContinue, None);
    check(PauseReason::BeforeTakeOver, None);
}
