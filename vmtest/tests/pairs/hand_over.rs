//! One keeper hands its machine over to the next: a request at that moment is carried out by one of them, and the next
//! keeper has all of its files.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Output;
use std::time::{Duration, Instant};

use hearth_vmtest::patience;
use rustix::fs::{FlockOperation, flock};

use crate::machine::{Bed, NAMES, wait};

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
        upgrade.join().unwrap();
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
        stop.join().unwrap();
    }
}
