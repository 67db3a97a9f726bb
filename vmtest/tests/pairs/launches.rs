//! A QEMU that takes long to start: the keeper answers meanwhile, and carries out what it is told at once.

use std::time::{Duration, Instant};

use hearth_api::{MachineState, MachineStatus};
use hearth_vmtest::patience;

use crate::machine::{Bed, Keeper, kill, refusal, wait};

/// The start takes this long.
const START: Duration = Duration::from_millis(500);
const REST: Duration = Duration::from_millis(20);

fn post(keeper: &Keeper<'_>, path: &str, body: &str) -> (u16, String) {
    keeper.api().ask("POST", path, body).unwrap_or_else(|error| panic!("no answer to {path}: {error}"))
}

#[track_caller]
fn must_not_have_stalled(status: &MachineStatus) {
    let stall_ms = status.keeper.loop_stall_ms_max;
    assert!(stall_ms < START.as_secs_f64() * 1e3, "the loop stood still for {stall_ms} ms");
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
fn has_one_qemu(bed: &Bed, keeper: &mut Keeper<'_>) -> MachineStatus {
    let status = keeper.settled(REST).expect("it settles").expect("the keeper lives");
    let qemu = status.qemu.as_ref().expect("it runs").pid;
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
        assert!(status.state == MachineState::Running && status.rejuvenating_since.is_some(), "{status:?}");
        assert_eq!(status.qemu, before.qemu, "the guest is in the QEMU that it had");
        asked += 1;
    }
    assert!(asked > 5, "{asked} answers in {START:?}");
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert!(after.last_rejuvenation.as_ref().is_some_and(|hop| hop.failure.is_none()), "{after:?}");
    assert_ne!(after.qemu.as_ref().map(|qemu| qemu.pid), before.qemu.map(|qemu| qemu.pid));
    assert_eq!(after.incarnation, before.incarnation);
    must_not_have_stalled(&after);
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
        let why = refusal(post(&keeper, path, body));
        assert!(why.ends_with("the guest is being moved to another QEMU"), "{path}: {why}");
    }
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert!(after.last_rejuvenation.as_ref().is_some_and(|hop| hop.failure.is_none()), "{after:?}");
}

/// Asserts that this, which ends the guest, gives the hop up, and that the next guest starts.
#[track_caller]
fn check_given_up(what: &str, end_guest: impl FnOnce(&Bed, &Keeper<'_>)) {
    let bed = Bed::make();
    let mut keeper = bed.running();
    begin_slow_hop(&bed, &keeper);
    end_guest(&bed, &keeper);
    // The new QEMU stays silent: it is killed.
    let reboots = wait(patience(1), || keeper.status().incarnation == 2);
    assert!(reboots, "{what}: {:?}", keeper.status());
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    let failure = after.last_rejuvenation.and_then(|hop| hop.failure);
    assert!(failure.as_ref().is_some_and(|why| why.starts_with("launch: ")), "{what}: {failure:?}");
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
        assert!(status.state == MachineState::Recovering && status.qemu.is_none(), "{status:?}");
        asked += 1;
    }
    assert!(asked > 5, "{asked} answers in {START:?}");
    assert_eq!(refusal(post(&keeper, "/v1/reboot", "{}")), "cannot reboot: the machine is recovering");
    bed.hand.release("go");
    let after = has_one_qemu(&bed, &mut keeper);
    assert_eq!(after.incarnation, 2, "{after:?}");
    must_not_have_stalled(&after);
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
    assert_eq!(after.incarnation, 2, "{after:?}");
}
