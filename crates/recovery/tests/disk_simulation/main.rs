//! A deterministic simulation of the disk server: one seed is one schedule of everything that can happen to a disk.
//!
//! The server is the real one, with the real ledger, boot set and ember. Its loop is called step by step on the only
//! thread, and the clock is advanced by hand. A guest, its QEMU and the storage are simulated around it. Between any
//! two steps anything may happen:
//!
//! - requests of all kinds on several queues; the start or end of an operation, successful or not; a full file system;
//! - messages of QEMU, some of them hostile; stops and hops; the guest switches its write cache on and off;
//! - a kill of the keeper, also during its work and between the steps of an answer (there only with debug assertions);
//!   a crash of the guest; a power cut, after which any subset of the unsynced changes is on the disk;
//! - a resize of the disk; a copy of the image to a disk that may fail; a save or a migration of guest memory, with a
//!   log of the pages that the disk's server writes.
//!
//! A model checks every answer, what is durable, what is held in memory, what was logged, and the rate limits.
//!
//! A failing seed is printed. `SEED=n cargo test -p hearth-recovery --test disk_simulation one` repeats its run and
//! prints the events.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod counts;
mod guest;
mod memory;
mod memory_copy;
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
use hearth_disk::fault_point;
use storage::Killed;
use world::World;

/// Steps of a run before it is brought to its end.
const STEPS: u32 = 400;
/// Seeds in each test run.
const SEEDS: u64 = 2000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number")))
}

/// Silences panics that end a simulated keeper: they are not failures.
fn hide_kills() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !info.payload().is::<Killed>() {
                print(info);
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
fn no_schedule_corrupts_or_loses_a_request() {
    run_seeds(number("SEEDS").unwrap_or(SEEDS));
}

/// Runs the seeds on all processors. No seed depends on another.
fn run_seeds(seeds: u64) {
    hide_kills();
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
    let kills_at_fault_points = counts.kills_at_fault_points.max(u64::from(!fault_point::ENABLED));
    let has_all = Counts { kills_at_fault_points, ..counts }.has_all();
    assert!(seeds < 100 || has_all, "something never happened: {counts:?}");
}

#[test]
fn one_seed_is_one_run() {
    hide_kills();
    if let Some(seed) = number("SEED") {
        run(seed, true).unwrap();
    }
    for seed in 1..20 {
        assert_eq!(run(seed, false).unwrap().1, run(seed, false).unwrap().1, "SEED={seed}");
    }
}
