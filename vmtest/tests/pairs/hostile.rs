//! A QEMU that its guest controls, on QMP: valid and invalid messages in any order, silence, floods. It may end itself.
//! Its keeper must answer, or end with a reason, and must not grow; another machine must notice nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hearth_api::MachineState;
use hearth_vmtest::processes::figure;
use hearth_vmtest::{Random, patience};
use serde_json::json;

use crate::machine::{Bed, Keeper, NAMES, kill, wait};

const SEEDS: u64 = 24;
/// Growth of a keeper's memory beyond that of a keeper with an honest QEMU.
const GROWTH_BYTES_MAX: u64 = 64 << 20;
const THREADS_MAX: u64 = 40;
/// The longest wait for QEMU's answer, and some time for what follows.
const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// How soon another machine's keeper must answer.
const NEIGHBOUR_ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// Names of descriptors in /proc.
const USERFAULTFD: &str = "anon_inode:[userfaultfd]";
const EVENTFD: &str = "anon_inode:[eventfd]";

/// Kinds of descriptors that the stand-in can send.
const KINDS: [&str; 5] = ["sockets", "folders", "pipe", "counter", "lingering"];

/// A message that QEMU should not send now, or ever.
fn message(random: &mut Random) -> String {
    let event = |name: &str, data| format!("{}\r\n", json!({ "event": name, "data": data }));
    let status = random.of(&["setup", "active", "completed", "failed", "cancelled", "from-the-future"]);
    let odd = random.of(&[
        "\0",
        "}",
        "[[[[[[[[",
        "{\"event\": 5}",
        "{\"return\"",
        "null",
        "\u{fffd}",
        "\"\"",
        "{\"id\": -1}",
    ]);
    match random.below(13) {
        0 => event("STOP", json!({})),
        1 => event("RESUME", json!({})),
        2 => event("MIGRATION", json!({ "status": status })),
        3 => event("SHUTDOWN", json!({ "guest": true, "reason": random.of(&["guest-reset", "guest-shutdown", ""]) })),
        4 => event("GUEST_PANICKED", json!({ "action": "x".repeat(100_000) })),
        5 => event("WATCHDOG", json!({ "action": random.of(&["pause", "reset", "none", "\u{1b}[2J"]) })),
        6 => format!("{}\r\n", json!({ "return": {}, "id": random.below(40) })),
        7 => format!("{}\r\n", json!({ "error": { "desc": "x".repeat(500_000) }, "id": random.below(40) })),
        8 => format!(
            "{}\r\n",
            json!({ "event": "NEWS", "timestamp": { "seconds": u64::MAX, "microseconds": u64::MAX } })
        ),
        9 => format!("{}\r\n", "[".repeat(100_000)),
        10 => json!({ "return": {} }).to_string(),
        // In memory it is many times as large as on the wire.
        11 => format!("{{\"return\": [{}0]}}\r\n", "0,".repeat(500_000)),
        _ => format!("{odd}\r\n"),
    }
}

/// The stand-in's reaction to its next command.
fn order(random: &mut Random, silences: &AtomicU64) -> String {
    let times = random.of(&[1, 1, 1, 3, 3, 100]);
    match random.below(24) {
        0..10 => "go".to_owned(),
        10..13 => "refuse".to_owned(),
        13 if silences.fetch_add(1, Relaxed) == 0 => "silent".to_owned(),
        14 => format!("say 0 {}", json!("A".repeat(65_536))),
        15 => format!("say 0 {}", json!(message(random))),
        16 => format!("hand {}", random.of(&KINDS)),
        _ => format!("say {times} {}", json!(message(random))),
    }
}

const ORDERS: [(&str, &str); 8] = [
    ("/v1/rejuvenate", "{}"),
    ("/v1/save", r#"{"folder": "SAVE"}"#),
    ("/v1/dump", r#"{"pause": true}"#),
    ("/v1/dump", "{}"),
    ("/v1/park", "{}"),
    ("/v1/reboot", "{}"),
    ("/v1/crash", "{}"),
    ("/v1/upgrade-keeper", "{}"),
];

fn must_be_modest(keeper: &Keeper<'_>, rss_before: u64) -> Result<(), String> {
    let (rss, threads) = (figure(keeper.pid(), "RssAnon") << 10, figure(keeper.pid(), "Threads"));
    let grows = rss > rss_before + GROWTH_BYTES_MAX || threads > THREADS_MAX;
    if grows { Err(format!("{rss} bytes after {rss_before}, {threads} threads")) } else { Ok(()) }
}

fn play(bed: &Bed, seed: u64) -> Result<(), String> {
    let mut random = Random(seed);
    bed.hand.order(None);
    let mut keeper = bed.keeper(NAMES[0], &["run", "machine.toml"]);
    keeper.settled(Duration::ZERO)?.ok_or("it does not start")?;
    let rss_before = figure(keeper.pid(), "RssAnon") << 10;
    let (mut inner, silences) = (Random(seed ^ 0xabcd), AtomicU64::new(0));
    bed.hand.order(Some(Box::new(move |_| order(&mut inner, &silences))));
    for _ in 0..3 {
        let (path, body) = random.of(&ORDERS);
        let folder = bed.path(&format!("save-{seed}-{}", random.below(1000)));
        let body = body.replace("SAVE", &folder.display().to_string());
        // The keeper may be gone or busy.
        let _ = keeper.api().ask("POST", path, &body);
        let mut modest = Ok(());
        let answered = wait(ANSWERS_WITHIN, || {
            modest = must_be_modest(&keeper, rss_before);
            modest.is_err() || keeper.ended().is_some() || keeper.answers()
        });
        modest?;
        if !answered {
            return Err(format!("no answer after {path}"));
        }
    }
    // The operator's request counts in any state of the guest.
    let mut answer = None;
    if !wait(ANSWERS_WITHIN, || {
        // A keeper that is being replaced answers 503: ask again.
        if answer.as_ref().is_none_or(|(number, _)| *number == 503) {
            answer = keeper.api().ask("POST", "/v1/stop", r#"{"force": true}"#).ok();
        }
        keeper.ended().is_some()
    }) {
        return Err(format!("does not stop; the request was answered {answer:?}"));
    }
    // The next keeper takes over a parked guest, or one whose keeper ended, with a QEMU that behaves.
    bed.hand.order(None);
    let mut next = bed.keeper(NAMES[0], &["run", "machine.toml"]);
    next.settled(Duration::ZERO)?.ok_or("the next one does not start")?;
    let _ = next.api().ask("POST", "/v1/stop", r#"{"force": true}"#);
    if !wait(patience(1), || next.ended().is_some()) {
        return Err("the next one does not stop".to_owned());
    }
    let left = bed.left_behind();
    if left.is_empty() { Ok(()) } else { Err(format!("left behind: {left:?}")) }
}

/// A keeper's open descriptors by kind, without those of guests' memory and of the gate before it, and the number of its threads.
fn held(bed: &Bed, keeper: &Keeper<'_>) -> (BTreeMap<String, usize>, u64) {
    let mut kinds = BTreeMap::new();
    let entries = std::fs::read_dir(format!("/proc/{}/fd", keeper.pid())).into_iter().flatten().flatten();
    let files = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    // How much of the dead guest's memory is kept depends on how far its dump got.
    for file in files.filter(|file| !file.starts_with(bed.memory_of(NAMES[0]))) {
        let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy();
        *kinds.entry(name.replace(char::is_numeric, "")).or_default() += 1;
    }
    // Only a guest that starts while memory is short has a gate, which holds one descriptor of each of these kinds until its QEMU
    // ends. Whether memory is short depends on the dump, too.
    if kinds.get(USERFAULTFD) == Some(&2) {
        [USERFAULTFD, EVENTFD].into_iter().for_each(|kind| *kinds.get_mut(kind).expect("a gate has both") -= 1);
    }
    (kinds, figure(keeper.pid(), "Threads"))
}

/// Starts a machine, ends its QEMU in the given way, and waits until the next guest runs.
fn outlive<'a>(bed: &'a Bed, end: impl FnOnce(&Keeper<'_>, u32)) -> Keeper<'a> {
    let mut keeper = bed.running();
    let before = keeper.qemu().expect("it has a QEMU");
    end(&keeper, before);
    let is_replaced = || {
        let status = keeper.settled(Duration::ZERO).expect("it settles").expect("the keeper lives");
        status.state == MachineState::Running && status.qemu.is_some_and(|qemu| qemu.pid != before)
    };
    assert!(wait(ANSWERS_WITHIN, is_replaced), "{}", bed.log());
    keeper
}

/// QEMU is ended, and its keeper is left with as many descriptors and threads as after a kill.
#[test]
fn descriptors_from_qemu_are_closed_and_block_nobody() {
    // A stand-in that is confined could not make some of these kinds.
    let make = || Bed::make_with("sandbox = false");
    let killed_bed = make();
    let killed = outlive(&killed_bed, |_, qemu| kill(qemu));
    for kind in KINDS {
        let bed = make();
        let mut keeper = outlive(&bed, |keeper, _| {
            let mut orders = std::iter::once(format!("hand {kind}"));
            bed.hand.order(Some(Box::new(move |_| orders.next().unwrap_or_else(|| "go".to_owned()))));
            // The request fails, because its QEMU ends.
            let _ = keeper.api().ask("POST", "/v1/dump", "{}");
        });
        let both = || [held(&bed, &keeper), held(&killed_bed, &killed)];
        let is_as_after_a_kill = wait(patience(1), || both()[0] == both()[1]);
        assert!(is_as_after_a_kill, "{kind}: with descriptors, and after a kill: {:#?}", both());
        let events = std::fs::read_to_string(bed.runtime_of(NAMES[0]).join("events.jsonl")).expect("there are events");
        assert!(events.contains("its QMP sent file descriptors"), "{kind}: {events}");
        let _ = keeper.api().ask("POST", "/v1/stop", r#"{"force": true}"#);
        assert!(wait(ANSWERS_WITHIN, || keeper.ended().is_some()), "{kind}: it does not stop");
    }
}

#[test]
fn a_hostile_qemu_harms_only_itself() {
    let seeds = match std::env::var("HEARTH_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 1..SEEDS + 1,
    };
    let neighbour = Bed::make();
    let neighbour = neighbour.running();
    let before = neighbour.qemu();
    let (next, over, failed) = (AtomicU64::new(seeds.start), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let watch = scope.spawn(|| {
            while !over.load(Relaxed) {
                let asked = Instant::now();
                let qemu = neighbour.qemu();
                assert!(asked.elapsed() < NEIGHBOUR_ANSWERS_WITHIN, "the neighbour waits");
                assert_eq!(qemu, before, "the neighbour's guest goes on");
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let worker = || {
            let mut bed = Bed::make();
            while let Some(seed) = Some(next.fetch_add(1, Relaxed)).filter(|seed| seeds.contains(seed)) {
                if let Err(why) = play(&bed, seed) {
                    eprintln!("HEARTH_SEED={seed}: {why}\n{}", bed.log());
                    failed.fetch_add(1, Relaxed);
                    bed = Bed::make();
                }
            }
        };
        let workers: Vec<_> = (0..6).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().for_each(|worker| worker.join().expect("it says so if it fails"));
        over.store(true, Relaxed);
        watch.join().expect("the neighbour notices nothing");
    });
    assert_eq!(failed.into_inner(), 0, "seeds that failed");
}
