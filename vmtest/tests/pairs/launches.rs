//! A QEMU that takes long to start: the keeper answers meanwhile, and carries out what it is told at once.

use std::time::{Duration, Instant};

use hearth_vmtest::patience;
use serde_json::Value;

use crate::machine::{Bed, Keeper, kill, wait};

/// The start takes this long.
const START: Duration = Duration::from_millis(500);
const REST: Duration = Duration::from_millis(20);

fn post(keeper: &Keeper<'_>, path: &str, body: &str) -> (u16, Value) {
    keeper.api().ask("POST", path, body).unwrap_or_else(|| panic!("no answer to {path}"))
}

fn stall_ms(status: &Value) -> f64 {
    status["keeper"]["loop_stall_ms_max"].as_f64().expect("a number")
}

/// Makes a request that starts a QEMU. The QEMU has been started and is not heard of yet.
fn begin_slow_start(bed: &Bed, keeper: &Keeper<'_>, path: &str, body: &str) {
    bed.hand.arm(Some(1));
    let (number, said) = post(keeper, path, body);
    assert!(number < 300, "{said}");
    assert!(wait(patience(1), || bed.hand.held().is_some()), "no QEMU is started");
}

fn begin_slow_hop(bed: &Bed, keeper: &Keeper<'_>) {
    begin_slow_start(bed, keeper, "/v1/rejuvenate", "{}");
}

/// Ends the guest; the next one's QEMU is slow.
fn begin_slow_reboot(bed: &Bed, keeper: &Keeper<'_>) {
    begin_slow_start(bed, keeper, "/v1/reboot", r#"{"force": true}"#);
}

/// Asserts that the machine has come to rest, with one QEMU.
#[track_caller]
fn has_one_qemu(bed: &Bed, keeper: &mut Keeper<'_>) -> Value {
    let status = keeper.settled(REST).expect("it settles").expect("the keeper lives");
    let qemu = status["qemu"]["pid"].as_u64().expect("it runs") as u32;
    assert!(wait(patience(1), || bed.qemus().iter().eq([&qemu])), "{:?} beside {qemu}", bed.qemus());
    status
}

#[test]
fn status_is_answered_during_a_hops_launch() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    let before = keeper.status();
    begin_slow_hop(&bed, &keeper);
    let (began, mut asked) = (Instant::now(), 0);
    while began.elapsed() < START {
        let status = keeper.status();
        assert_eq!(status["state"], "running", "{status}");
        assert!(status["rejuvenating_since"].is_string(), "{status}");
        assert_eq!(status["qemu"], before["qemu"], "the guest is in the QEMU that it had");
        asked += 1;
    }
    assert!(asked > 5, "{asked} answers in {START:?}");
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert_eq!(after["last_rejuvenation"]["failure"], Value::Null, "{after}");
    assert_ne!(after["qemu"]["pid"], before["qemu"]["pid"]);
    assert_eq!(after["incarnation"], before["incarnation"]);
    assert!(stall_ms(&after) < START.as_secs_f64() * 1e3, "the loop stood still for {} ms", stall_ms(&after));
}

#[test]
fn orders_during_hop_launch_are_refused() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    begin_slow_hop(&bed, &keeper);
    let save = format!(r#"{{"folder": {:?}}}"#, bed.path("save"));
    let requests = [
        ("/v1/rejuvenate", "{}"),
        ("/v1/save", save.as_str()),
        ("/v1/park", "{}"),
        ("/v1/upgrade-keeper", "{}"),
        ("/v1/dump", "{}"),
        ("/v1/disks/root/resize", "{}"),
    ];
    for (path, body) in requests {
        let (number, said) = post(&keeper, path, body);
        let why = said["message"].as_str().unwrap_or_default().to_owned();
        assert!(number == 409 && why.ends_with("the guest is being moved to another QEMU"), "{path}: {number} {said}");
    }
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert_eq!(after["last_rejuvenation"]["failure"], Value::Null, "{after}");
}

/// Asserts that this, which ends the guest, gives the hop up, and that the next guest starts.
#[track_caller]
fn check_given_up(what: &str, end_guest: impl FnOnce(&Bed, &Keeper<'_>)) {
    let bed = Bed::make();
    let mut keeper = bed.running();
    begin_slow_hop(&bed, &keeper);
    end_guest(&bed, &keeper);
    // The new QEMU stays silent: it is killed.
    let reboots = wait(patience(1), || keeper.status()["incarnation"] == 2);
    assert!(reboots, "{what}: {}", keeper.status());
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    let failure = after["last_rejuvenation"]["failure"].as_str().unwrap_or_default();
    assert!(failure.starts_with("launch: "), "{what}: {after}");
}

#[test]
fn the_guests_end_gives_a_hop_up() {
    check_given_up("reboot", |_, keeper| drop(post(keeper, "/v1/reboot", r#"{"force": true}"#)));
    check_given_up("panic", |bed, _| bed.hand.guests("panic"));
    check_given_up("reset", |bed, _| bed.hand.guests("reset"));
}

#[test]
fn a_stop_ends_a_hops_launch() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    begin_slow_hop(&bed, &keeper);
    let (number, said) = post(&keeper, "/v1/stop", r#"{"force": true}"#);
    assert!(number < 300, "{said}");
    assert!(wait(patience(1), || keeper.ended().is_some()), "it does not stop");
    assert_eq!(bed.left_behind(), Vec::<String>::new());
}

#[test]
fn status_is_answered_while_the_next_guest_starts() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    begin_slow_reboot(&bed, &keeper);
    let (began, mut asked) = (Instant::now(), 0);
    while began.elapsed() < START {
        let status = keeper.status();
        assert_eq!((&status["state"], &status["qemu"]), (&"recovering".into(), &Value::Null), "{status}");
        asked += 1;
    }
    assert!(asked > 5, "{asked} answers in {START:?}");
    let (number, said) = post(&keeper, "/v1/reboot", "{}");
    assert!(number == 409 && said["message"] == "cannot reboot: the machine is recovering", "{number} {said}");
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert_eq!(after["incarnation"], 2, "{after}");
    assert!(stall_ms(&after) < START.as_secs_f64() * 1e3, "the loop stood still for {} ms", stall_ms(&after));
}

#[test]
fn a_stop_ends_the_next_guests_launch() {
    for body in ["{}", r#"{"force": true}"#] {
        let bed = Bed::make();
        let mut keeper = bed.running();
        begin_slow_reboot(&bed, &keeper);
        let (number, said) = post(&keeper, "/v1/stop", body);
        assert!(number < 300, "{said}");
        assert!(wait(patience(1), || keeper.ended().is_some()), "it does not stop");
        assert_eq!(keeper.wait().code(), Some(0));
        assert_eq!(bed.left_behind(), Vec::<String>::new());
    }
}

#[test]
fn a_launch_that_fails_is_tried_again() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    begin_slow_reboot(&bed, &keeper);
    kill(bed.hand.held().expect("it is held"));
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert_eq!(after["incarnation"], 2, "{after}");
}
