//! A scan before the save: it finds the guest's working set, changes nothing, and can be interrupted at any time.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use hearth_recovery::snapshot::pages::PageReader;
use hearth_recovery::snapshot::{AgedPage, Snapshot, Source, aged_pages};
use hearth_vmtest::{Drives, Result, TestVm, event, patience};
use serde_json::Value;

use super::{SEED, fill, first_word, first_words, verify};

const MIB: usize = 1 << 20;
const ARENA_MIB: usize = 16;
const IDLE_MIB: usize = 64;

/// Starts a process that reads the arena again and again, beside memory that nothing uses.
fn start_reader(vm: &TestVm) -> Result<()> {
    fill(vm, IDLE_MIB as u64)?;
    vm.sh(&format!("probe fill /tmp/arena {} {SEED}", ARENA_MIB * MIB))?;
    vm.sh("(while :; do probe read /tmp/arena; done) >/dev/null 2>&1 &").map(drop)
}

fn verify_both(vm: &TestVm) -> Result<()> {
    verify(vm)?;
    vm.sh(&format!("probe verify /tmp/arena {SEED}")).map(drop)
}

/// Number of different pages of this pattern in a set.
fn count_of(set: &PageReader, pattern: &HashMap<u64, Vec<u8>>) -> usize {
    let (mut reading, mut found) = (set.reading(), HashSet::new());
    for page in set.pages() {
        let bytes = set.page(*page, &mut reading).expect("it is whole").expect("it is in the set");
        let word = first_word(bytes);
        if pattern.get(&word).is_some_and(|expect| expect[..] == bytes[..]) {
            found.insert(word);
        }
    }
    found.len()
}

#[test]
fn scan_finds_the_working_set_that_clones_prefetch() -> Result<()> {
    let vm = TestVm::busybox("scanned").running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    start_reader(&vm)?;
    vm.save_with(&snapshot, &["--scan"])?;
    assert_eq!(vm.nonce()?, nonce);
    verify_both(&vm)?;
    assert_eq!(vm.wait_event("the scan's end", event!(SaveScanned { rounds, .. } => rounds))?, 5);
    vm.stop_at_once()?;

    let set = Snapshot::open(&snapshot).expect("it was saved").working_set.expect("it is whole").expect("it was noted");
    let (arena, idle) = (first_words("arena", ARENA_MIB), first_words("memory", IDLE_MIB));
    let (used, unused, pages) = (count_of(&set, &arena), count_of(&set, &idle), set.pages().len());
    eprintln!("{used} of {} pages of the arena, {unused} idle ones, {pages} in all", arena.len());
    assert!(used * 100 >= arena.len() * 95, "{used} of {} pages", arena.len());
    assert!(unused * 100 <= idle.len(), "{unused} of {} unused pages", idle.len());
    assert!(pages <= 2 * arena.len(), "{pages} pages in the set, {} in the arena", arena.len());
    assert!(aged_pages(&set).all(|aged| (aged.age, aged.source) == (0, Source::Scan)));
    let shown: Value =
        serde_json::from_str(&vm.cli(&["working-set", &snapshot.display().to_string(), "--json"])?).expect("JSON");
    assert_eq!(shown["working_set"]["source"], "a scan before the save", "{shown}");

    let clone = vm.restore(&snapshot, "ahead", &[])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    verify_both(&clone)?;
    let prefetched = event!(RestoreComplete { pages_prefetched, .. } => pages_prefetched);
    assert_eq!(clone.wait_event("all memory is there", prefetched)?, pages as u64);
    Ok(())
}

/// Starts a save with a scan that would take hours, and waits for some rounds.
fn begin_scan(vm: &TestVm, folder: &std::path::Path) -> Result<()> {
    let folder = folder.display().to_string();
    vm.cli(&["save", vm.name(), "-o", &folder, "--scan", "100ms,1000", "--no-wait"])?;
    vm.wait_status("some rounds of the scan", |status| {
        status.save.as_ref().and_then(|save| save.scan).is_some_and(|scan| scan.rounds_done > 2)
    })
    .map(drop)
}

#[test]
fn cancelled_scan_leaves_guest_unchanged_and_no_files() -> Result<()> {
    let vm = TestVm::busybox("scanoff").running()?;
    let (nonce, folder) = (vm.nonce()?, vm.folder().join("snapshot"));
    start_reader(&vm)?;
    let refused = vm.cli_output(&["save", vm.name(), "-o", "/nowhere", "--scan", "1s,0"])?;
    assert!(refused.status != 0 && refused.text().contains("write PERIOD,ROUNDS"), "{}", refused.text());
    begin_scan(&vm, &folder)?;
    let again = vm.cli_output(&["save", vm.name(), "-o", "/nowhere", "--scan"])?;
    assert!(again.status != 0 && again.text().contains("another save is running"), "{}", again.text());
    vm.cli_output(&["save", vm.name(), "--cancel"])?;
    vm.wait_event("a cancelled save", event!(SaveFailed))?;
    assert!(!folder.exists());
    assert_eq!(vm.nonce()?, nonce);
    verify_both(&vm)?;
    vm.save(&folder)
}

#[test]
fn guest_that_dies_in_a_scan_reboots() -> Result<()> {
    let vm = TestVm::busybox("scandeath").running()?;
    let folder = vm.folder().join("snapshot");
    begin_scan(&vm, &folder)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(2)?;
    vm.wait_event("the save's end", event!(SaveFailed))?;
    assert!(!folder.exists());
    Ok(())
}

#[test]
fn next_keeper_scans_after_one_dies_scanning() -> Result<()> {
    let vm = TestVm::busybox("scankill").running()?;
    let nonce = vm.nonce()?;
    start_reader(&vm)?;
    begin_scan(&vm, &vm.folder().join("snapshot"))?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    vm.await_console()?;
    assert_eq!(vm.nonce()?, nonce);
    verify_both(&vm)?;
    let folder = vm.folder().join("another");
    vm.save_with(&folder, &["--scan", "500ms,3"])?;
    let set = Snapshot::open(&folder).expect("it was saved").working_set.expect("it is whole").expect("it was noted");
    assert!(count_of(&set, &first_words("arena", ARENA_MIB)) > 0);
    verify_both(&vm)
}

/// The scan includes the announcement that a restored guest sends, so that its pages are in the working set.
#[test]
fn scanned_guest_announces_itself_once() -> Result<()> {
    let vm = TestVm::busybox("announcing").net([("kind", "user".into())]).boot()?;
    vm.sh("echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null; net-up")?;
    // A packet is counted only when the next one is sent.
    let sent = || -> Result<u32> {
        let text = vm.sh("ping -c 1 10.0.2.2 >/dev/null; cat /sys/class/net/eth0/statistics/tx_packets")?;
        Ok(text.trim().parse().expect("a number"))
    };
    let counts = [sent()?, sent()?];
    vm.save_with(&vm.folder().join("scanned"), &["--scan", "500ms,2"])?;
    let announced = sent()?;
    assert!(announced - counts[1] > counts[1] - counts[0], "{counts:?}, {announced}");
    Ok(())
}

/// Pages of a snapshot's working set that `picks` accepts.
fn set(snapshot: &Path, picks: impl Fn(&AgedPage) -> bool) -> HashSet<u32> {
    let snapshot = Snapshot::open(snapshot).expect("it was just saved");
    let set = snapshot.working_set.expect("it is whole").expect("there is one");
    aged_pages(&set).filter(picks).map(|aged| aged.page).collect()
}

#[test]
fn scan_sees_code_translated_long_ago() -> Result<()> {
    let vm = TestVm::busybox("code").cmdline("nokaslr").boot()?;
    let snapshot = vm.folder().join("snapshot");
    let work =
        "(while :; do ls -la /bin /modules | md5sum; head -c 300000 /dev/urandom | md5sum; done) >/dev/null 2>&1 &";
    vm.sh(work)?;
    // Long enough for QEMU to have translated all of the code.
    vm.sh("for round in $(seq 40); do ls -la /bin /modules | md5sum; done")?;
    vm.save_with(&snapshot, &["--stop", "--scan", "1s,5"])?;
    vm.wait_keeper_end()?;
    let scanned = set(&snapshot, |_| true);
    let clone = vm.restore(&snapshot, "clone", &["--trace", "3"])?;
    clone.wait_event_within("a traced working set", patience(60), event!(WorkingSetTraced))?;
    clone.stop_at_once()?;
    // The kernel's code begins at 16 MiB and takes 14 MiB.
    let traced = set(&snapshot, |aged| aged.age == 0 && (4096..7680).contains(&aged.page));
    let missed = traced.difference(&scanned).count();
    eprintln!("{} pages of the kernel's code were used; the scan missed {missed}", traced.len());
    // A scan that sees only newly translated code misses nearly all of it. A restore uses some code that nothing else does, and a
    // slow host gets less done during the scan.
    assert!(traced.len() > 100 && missed * 4 < traced.len(), "{missed} of {}", traced.len());
    Ok(())
}
