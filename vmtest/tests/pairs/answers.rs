//! A keeper whose QEMU hangs answers all the same: what waits for QEMU is on a thread of its own.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use hearth_api::{EventRecord, MachineState, MachineStatus};
use hearth_vmtest::{event, patience};

use crate::machine::{Bed, Keeper, NAMES, refusal, wait};

/// An answer that waits for nobody comes within milliseconds; this is for a busy host.
const AT_ONCE: Duration = Duration::from_secs(3);
/// More than a park has QMP commands.
const STEPS_MAX: usize = 40;
/// How often a QEMU repeats that its guest has crashed.
const REPEATS: usize = 5;

fn status(keeper: &Keeper<'_>) -> MachineStatus {
    let asked = Instant::now();
    let status = keeper.status();
    assert!(asked.elapsed() < AT_ONCE, "an answer after {:?}", asked.elapsed());
    status
}

#[track_caller]
fn must_not_have_stalled(status: &MachineStatus, step: usize) {
    let stall_ms = status.keeper.loop_stall_ms_max;
    assert!(stall_ms < AT_ONCE.as_secs_f64() * 1e3, "step {step}: {stall_ms}");
}

fn post(keeper: &Keeper<'_>, path: &str, body: &str) -> (u16, String) {
    let asked = Instant::now();
    let answer = keeper.api().ask("POST", path, body).expect("the keeper lives");
    assert!(asked.elapsed() < AT_ONCE, "{path}: an answer after {:?}", asked.elapsed());
    answer
}

/// Begins a park, and holds it at its n-th QMP command; false if it has none with this number.
fn parks_until(bed: &Bed, keeper: &Keeper<'_>, step: usize) -> bool {
    bed.hand.arm(Some(step));
    assert_eq!(post(keeper, "/v1/park", "{}").0, 200);
    wait(patience(1), || bed.hand.held().is_some() || !keeper.answers());
    bed.hand.held().is_some()
}

/// Number of a keeper's threads whose names begin like this.
fn threads(keeper: &Keeper<'_>, name: &str) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", keeper.pid())).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.filter(|found| found.starts_with(name)).count()
}

/// What `look` finds in the events since the keeper was started first.
fn events<T>(bed: &Bed, look: impl Fn(&EventRecord) -> Option<T>) -> Vec<T> {
    let text = std::fs::read_to_string(bed.runtime_of(NAMES[0]).join("events.jsonl"));
    let text = text.expect("a keeper writes its events");
    text.lines().filter_map(|line| look(&serde_json::from_str(line).ok()?)).collect()
}

fn is_parked(bed: &Bed) -> bool {
    bed.memory_of(NAMES[0]).join("parked.json").exists()
}

fn must_end(bed: &Bed, keeper: &mut Keeper<'_>) {
    assert!(wait(patience(1), || keeper.ended().is_some()), "it does not stop");
    assert!(keeper.ended().is_some_and(|how| how.success()), "{}", keeper.said());
    assert_eq!(bed.left_behind(), Vec::<String>::new());
}

#[test]
fn keeper_answers_at_each_step_of_a_park() {
    let bed = Bed::make();
    for step in 1..STEPS_MAX {
        let mut keeper = bed.running();
        if !parks_until(&bed, &keeper, step) {
            assert!(step > 4, "a park has more commands than that");
            assert!(wait(patience(1), || keeper.ended().is_some()) && is_parked(&bed), "it is parked");
            return;
        }
        let status = status(&keeper);
        let parks = status.parking_since.is_some() && status.state == MachineState::Running;
        assert!(parks, "step {step}: {status:?}");
        must_not_have_stalled(&status, step);
        for (path, body) in [("/v1/rejuvenate", "{}"), ("/v1/dump", "{}"), ("/v1/park", "{}"), ("/v1/crash", "{}")] {
            let why = refusal(post(&keeper, path, body));
            assert!(why.ends_with("the guest is being parked"), "step {step}, {path}: {why}");
        }
        assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200, "step {step}");
        must_end(&bed, &mut keeper);
        assert!(!is_parked(&bed), "step {step}");
        let why = events(&bed, event!(ParkFailed { why, .. } => why)).pop().expect("an event");
        assert_eq!(why, "the machine was told to stop", "step {step}");
        bed.hand.release("go");
    }
    panic!("a park with {STEPS_MAX} commands");
}

#[test]
fn cancelled_park_lets_guest_shut_down() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    assert!(parks_until(&bed, &keeper, 4));
    assert_eq!(post(&keeper, "/v1/stop", "{}").0, 200);
    assert_eq!(status(&keeper).state, MachineState::Stopping);
    bed.hand.release("go");
    must_end(&bed, &mut keeper);
    assert!(!is_parked(&bed));
    assert_eq!(events(&bed, event!(PowerCut)), [], "the guest was asked when it ran again");
}

#[test]
fn guest_that_crashes_during_a_park_recovers() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    assert!(parks_until(&bed, &keeper, 1));
    bed.hand.guests("panic");
    // The keeper has heard of it.
    wait(Duration::from_millis(50), || false);
    bed.hand.release("go");
    keeper.settled(Duration::from_millis(50)).unwrap().expect("it goes on");
    assert!(wait(patience(1), || status(&keeper).incarnation == 2), "{:?}", status(&keeper));
    assert!(!is_parked(&bed) && !events(&bed, event!(ParkFailed)).is_empty());
    assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200);
    must_end(&bed, &mut keeper);
}

#[test]
fn keeper_answers_during_save_and_paused_dump() {
    let bed = Bed::make();
    let folder = |number: usize| bed.path(&format!("save-{number}"));
    let save = |number| format!(r#"{{"folder": {:?}}}"#, folder(number));
    let save = ("/v1/save", &save as &dyn Fn(usize) -> String);
    let scan =
        |number| format!(r#"{{"folder": {:?}, "scan": {{"period_ms": 50, "rounds": 1}}}}"#, folder(number + STEPS_MAX));
    let scan = ("/v1/save", &scan as &dyn Fn(usize) -> String);
    let dump = ("/v1/dump", &(|_| r#"{"pause": true}"#.to_owned()) as &dyn Fn(usize) -> String);
    for (path, body) in [save, scan, dump] {
        let mut keeper = bed.running();
        bed.hand.arm(None);
        assert_eq!(post(&keeper, path, &body(0)).0, 200);
        keeper.settled(Duration::from_millis(50)).expect("it comes to rest").expect("it goes on");
        let mut heard = bed.hand.heard();
        // QEMU is asked for its progress until it has ended: on a busy host more often this time than later.
        heard.dedup();
        let steps = heard.len();
        assert!(steps >= 3, "{path}: {heard:?}");
        for step in 1..=steps {
            bed.hand.arm(Some(step));
            let (api, body) = (keeper.api(), body(step));
            // A dump is answered when it begins.
            let asker = std::thread::spawn(move || api.ask("POST", path, &body));
            assert!(wait(patience(1), || bed.hand.held().is_some()), "{path}: no step {step}");
            must_not_have_stalled(&status(&keeper), step);
            assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200, "{path}, step {step}");
            must_end(&bed, &mut keeper);
            bed.hand.release("go");
            assert!(asker.join().is_ok());
            keeper = bed.running();
        }
        assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200);
        must_end(&bed, &mut keeper);
    }
}

/// Whether a start is held at its next step. If not, the machine runs. One that is held answers that it is starting.
#[track_caller]
fn is_held_while_starting(bed: &Bed, keeper: &Keeper<'_>, step: usize) -> bool {
    let runs = || keeper.api().status().is_some_and(|status| status.state == MachineState::Running);
    assert!(wait(patience(1), || bed.hand.held().is_some() || runs()), "step {step}: {}", keeper.said());
    let is_held = bed.hand.held().is_some();
    if is_held {
        let status = status(keeper);
        assert!(status.state == MachineState::Starting && status.state_why.is_some(), "step {step}: {status:?}");
        must_not_have_stalled(&status, step);
    }
    is_held
}

/// Stops a machine at each step of its first start. `ends`: the stop ends the start, and need not wait for QEMU.
#[track_caller]
fn check_first_start(bed: &Bed, begin: &dyn Fn(&Bed) -> Keeper<'_>, ends: bool) {
    for step in 1..STEPS_MAX {
        bed.hand.arm(Some(step));
        let mut keeper = begin(bed);
        if !is_held_while_starting(bed, &keeper, step) {
            assert!(step > 2, "a start has more commands than that");
            assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200);
            return must_end(bed, &mut keeper);
        }
        for (path, body) in [("/v1/reboot", "{}"), ("/v1/crash", "{}"), ("/v1/disks/root/resize", "{}")] {
            let why = refusal(post(&keeper, path, body));
            assert!(why.ends_with("the machine is starting"), "step {step}, {path}: {why}");
        }
        assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200, "step {step}");
        if !ends {
            assert_eq!(status(&keeper).state, MachineState::Stopping, "step {step}");
            bed.hand.release("go");
        }
        must_end(bed, &mut keeper);
        bed.hand.release("go");
    }
    panic!("a start with {STEPS_MAX} commands");
}

#[test]
fn keeper_answers_at_each_step_of_a_boot() {
    check_first_start(&Bed::make(), &|bed| bed.keeper(NAMES[0], &["run", "machine.toml"]), true);
}

#[test]
fn keeper_answers_at_each_step_of_a_resume() {
    let park = |bed: &Bed| {
        let hold_at = bed.hand.disarm();
        let mut parked = bed.running();
        assert_eq!(post(&parked, "/v1/park", "{}").0, 200);
        assert!(wait(patience(1), || parked.ended().is_some()) && is_parked(bed), "it is parked");
        bed.hand.arm(hold_at);
    };
    check_first_start(
        &Bed::make(),
        &|bed| {
            park(bed);
            bed.keeper(NAMES[0], &["run", "machine.toml"])
        },
        false,
    );
}

#[test]
fn keeper_answers_at_each_step_of_a_restore() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    let save = format!(r#"{{"folder": {:?}, "then": "stop"}}"#, bed.path("snapshot"));
    assert_eq!(post(&keeper, "/v1/save", &save).0, 200);
    must_end(&bed, &mut keeper);
    let restore = || {
        let _ = std::fs::remove_dir_all(bed.path(NAMES[1]));
        bed.keeper(NAMES[1], &["restore", "snapshot", "--as", NAMES[1], "--trust-config"])
    };
    for step in 1..STEPS_MAX {
        bed.hand.arm(Some(step));
        let mut keeper = restore();
        let is_held = is_held_while_starting(&bed, &keeper, step);
        assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200, "step {step}");
        // A guest that is there already runs before it is stopped.
        if bed.hand.heard().last().is_some_and(|command| command == "cont") {
            bed.hand.release("go");
        }
        must_end(&bed, &mut keeper);
        if !is_held {
            assert!(step > 3, "a restore has more commands than that");
            return;
        }
        bed.hand.release("go");
    }
    panic!("a restore with {STEPS_MAX} commands");
}

#[test]
fn keeper_answers_while_registers_are_read() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    bed.hand.arm(Some(1));
    bed.hand.guests("panic");
    assert!(wait(patience(1), || bed.hand.held().is_some()), "no registers are asked for");
    for _ in 0..REPEATS {
        bed.hand.guests("panic-again");
    }
    let panics = || events(&bed, event!(GuestPanicked));
    assert!(wait(patience(1), || panics().len() == REPEATS + 1), "{:?}", panics());
    assert_eq!(threads(&keeper, "harvest-"), 1);
    let status_now = status(&keeper);
    assert!(bed.hand.held().is_some() && status_now.incarnation == 1, "{status_now:?}");
    // QEMU is waited for twice as long.
    assert!(status_now.keeper.loop_stall_ms_max < 1e3, "{status_now:?}");
    bed.hand.release("go");
    assert!(wait(patience(1), || status(&keeper).incarnation == 2), "{:?}", status(&keeper));
    assert_eq!(events(&bed, event!(RegistersTaken)).len(), 1);
    assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200);
    must_end(&bed, &mut keeper);
}

#[test]
fn keeper_answers_while_it_asks_another_program() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    let (program, begun) = (bed.path("slow"), bed.path("begun"));
    std::fs::write(&program, format!("#!/bin/sh\n: > {begun:?}\nexec sleep 9\n")).expect("a new file");
    std::fs::set_permissions(&program, Permissions::from_mode(0o755)).expect("it is ours");
    let (api, body) = (keeper.api(), format!(r#"{{"program": {program:?}}}"#));
    let asker = std::thread::spawn(move || api.ask("POST", "/v1/upgrade-keeper", &body));
    assert!(wait(patience(1), || begun.exists()), "the program is not asked");
    must_not_have_stalled(&status(&keeper), 1);
    assert_eq!(post(&keeper, "/v1/stop", r#"{"force": true}"#).0, 200);
    must_end(&bed, &mut keeper);
    assert!(asker.join().is_ok());
}
