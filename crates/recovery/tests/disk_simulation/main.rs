//! A deterministic simulation of the disk server: one seed is one schedule of everything that can happen to a disk.
//!
//! The server is the real one, with the real ledger, boot set and ember; its loop is called turn by turn on the only thread, by a clock
//! that is moved by hand. Around it a guest, its QEMU, the storage and the keeper's death are simulated. Between any two steps
//! anything may happen: requests of all kinds on several queues, the start or end of an operation, well or not, words of QEMU,
//! stops, hops, a kill, a crash of the guest, another length of the disk, a copy of it. After each step it is compared with a
//! model what was answered, what is durable, what memory holds, and what passed a limit.
//!
//! A seed that fails is printed. `SEED=n cargo test -p hearth-recovery --test disk_simulation one` runs it again and tells what happens.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod counts;
mod guest;
mod memory;
mod model;
mod qemu;
mod random;
mod soak;
mod storage;
mod world;

use std::panic::catch_unwind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, Once};
use std::time::Instant;

use counts::Counts;
use storage::Killed;
use world::World;

/// Things that happen in a run before it comes to its end.
const STEPS: u32 = 400;
/// Seeds of each test run.
const SEEDS: u64 = 2000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Deaths of keepers are no failures, and are not to be told of.
fn say_nothing_of_kills() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<Killed>() {
                tell(info);
            }
        }));
    });
}

fn run(seed: u64, verbose: bool) -> Result<(Counts, u64), String> {
    let ended = catch_unwind(|| {
        let mut world = World::new(seed, verbose);
        world.run(STEPS).map(|()| (world.counts, world.trace))
    });
    match ended {
        Ok(ended) => ended,
        Err(payload) => {
            let text = payload.downcast_ref::<String>().cloned();
            let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            Err(format!("a panic: {}", text.unwrap_or_default()))
        }
    }
}

#[test]
fn no_schedule_shows_a_wrong_byte_or_loses_a_request() {
    run_seeds(number("SEEDS").unwrap_or(SEEDS));
}

/// On all processors. Seeds know nothing of each other.
fn run_seeds(seeds: u64) {
    say_nothing_of_kills();
    let (first, began) = (number("FIRST").unwrap_or(1), Instant::now());
    let (next, is_over) = (AtomicU64::new(first), AtomicBool::new(false));
    let counts = Mutex::new(Counts::default());
    let work = || {
        while !is_over.load(Relaxed) {
            let seed = next.fetch_add(1, Relaxed);
            if seed >= first + seeds {
                break;
            }
            match run(seed, false) {
                Ok((of_seed, _)) => counts.lock().unwrap().add(of_seed),
                Err(what) => {
                    eprintln!("SEED={seed}: {what}");
                    is_over.store(true, Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (0..processors).for_each(|_| drop(scope.spawn(work)));
    });
    let counts = *counts.lock().unwrap();
    println!("{seeds} seeds from {first} on in {:?}: {counts:?}", began.elapsed());
    assert!(!is_over.into_inner(), "a seed failed: see SEED= above");
    assert!(seeds < 100 || counts.has_all(), "the runs are about everything: {counts:?}");
}

#[test]
fn one_seed_is_one_run() {
    say_nothing_of_kills();
    if let Some(seed) = number("SEED") {
        run(seed, true).unwrap();
    }
    for seed in 1..20 {
        assert_eq!(run(seed, false).unwrap().1, run(seed, false).unwrap().1, "SEED={seed}");
    }
}
