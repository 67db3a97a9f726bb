//! One keeper hands its machine over to the next: a request at that moment is carried out by one of them, and the next
//! keeper has all of its files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use hearth_vmtest::patience;
use rustix::fs::{FlockOperation, flock};
use serde_json::{Value, json};

use crate::machine::{Bed, Keeper, NAMES, wait};

/// A hand-over takes some 30 ms. The first keeper's loop is gone for one or two of them.
const ROUNDS: u64 = 40;
const NOT_RUNNING: i32 = 3;
const STOPS: u64 = 8;
const STEP: Duration = Duration::from_millis(1);

fn stop(bed: &Bed) -> Output {
    bed.hearth(&["stop", NAMES[0], "--force"]).output().expect("hearth can be run")
}

#[test]
fn a_stop_during_an_upgrade_reaches_a_keeper() {
    let bed = Bed::make();
    for round in 0..ROUNDS {
        let mut keeper = bed.running();
        let api = keeper.api();
        let upgrade = std::thread::spawn(move || api.ask("POST", "/v1/upgrade-keeper", "{}"));
        std::thread::sleep(STEP * round as u32);
        let mut told = String::new();
        let stopped = wait(patience(1), || {
            let output = stop(&bed);
            told = String::from_utf8_lossy(&output.stderr).into_owned();
            // For a moment there is no keeper, and the command says so.
            output.status.code() != Some(NOT_RUNNING)
        });
        assert!(stopped && told.is_empty(), "round {round}: {told}");
        assert!(wait(patience(1), || keeper.ended().is_some()), "round {round}: it still runs");
        drop(upgrade.join().unwrap());
        assert_eq!(bed.left_behind(), Vec::<String>::new(), "round {round}");
    }
}

/// Names of the files in the machine's folders.
fn files(bed: &Bed) -> BTreeSet<PathBuf> {
    let folders = [bed.runtime_of(NAMES[0]), bed.memory_of(NAMES[0])].into_iter();
    let entries = folders.flat_map(|folder| fs::read_dir(folder).expect("it is there"));
    entries.map(|entry| entry.expect("an entry").path()).collect()
}

/// The next keeper creates its files, with the same names, as soon as it has the lock.
#[test]
fn a_stopped_keeper_unlocks_last() {
    let bed = Bed::make();
    for round in 0..STOPS {
        let mut keeper = bed.running();
        let (api, lock) = (keeper.api(), File::open(bed.runtime_of(NAMES[0]).join("keeper.lock")).unwrap());
        let stop = std::thread::spawn(move || api.ask("POST", "/v1/stop", r#"{"force": true}"#));
        let asked = Instant::now();
        while flock(&lock, FlockOperation::NonBlockingLockShared).is_err() {
            assert!(asked.elapsed() < patience(1), "round {round}: it keeps its lock");
        }
        let unlocked = files(&bed);
        assert!(wait(patience(1), || keeper.ended().is_some()), "round {round}: it does not stop");
        assert_eq!(unlocked, files(&bed), "round {round}");
        drop(stop.join().unwrap());
    }
}

/// Hops, and waits until the guest is in another QEMU.
#[track_caller]
fn hop(keeper: &mut Keeper<'_>) {
    let before = keeper.qemu();
    let (number, said) = keeper.api().ask("POST", "/v1/rejuvenate", "{}").expect("an answer");
    assert!(number < 300, "{said}");
    let after = keeper.settled(Duration::ZERO).expect("it comes to rest").expect("the keeper lives");
    assert!(after.last_rejuvenation.as_ref().is_some_and(|hop| hop.failure.is_none()), "{after:?}");
    assert_ne!(keeper.qemu(), before);
}

#[test]
fn command_to_a_new_keeper_waits_for_the_disks_to_be_used() {
    let bed = Bed::make();
    let mut keeper = bed.running();
    bed.hand.guests("greets-slowly");
    keeper.kill();
    hop(&mut bed.running());
}

/// The new QEMU has begun, and has no inflight region yet, which would tell the next keeper of the write cache.
#[test]
fn keeper_after_a_cut_off_hop_knows_the_write_cache() {
    for off in [false, true] {
        let bed = Bed::make();
        let mut keeper = bed.running_with(&[("HEARTH_DRILL_DIE_AFTER", "resume")]);
        if off {
            bed.hand.guests("write-through");
        }
        let before = keeper.qemu();
        // The keeper dies before it answers.
        let _ = keeper.api().ask("POST", "/v1/rejuvenate", "{}");
        assert!(wait(patience(1), || keeper.ended().is_some()), "it does not die");
        let mut next = bed.running();
        assert_ne!(next.qemu(), before, "the guest is in the new QEMU");
        // The next hop's note is of what the disks know.
        hop(&mut next);
        let journal = fs::read(bed.runtime_of(NAMES[0]).join("journal.json")).expect("a living machine has one");
        let journal: Value = serde_json::from_slice(&journal).expect("a journal");
        assert_eq!(journal["write_through"], if off { json!(["root"]) } else { Value::Null });
    }
}
