//! The restored guest is the one that was saved: its memory, its processes, its files.

use std::collections::{BTreeSet, HashSet};
use std::path::Path;

use hearth_api::RestoreStatus;
use hearth_recovery::snapshot::Snapshot;
use hearth_vmtest::known::counts_beyond;
use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, event, page_cache};
use serde_json::Value;

use super::{MOST_MIB, boot_filled, count, fill, first_word, first_words, start_counter, verify};

fn wait_complete(vm: &TestVm) -> Result<RestoreStatus> {
    vm.wait_event("all memory is there", event!(RestoreComplete))?;
    let restore = vm.status()?.restore.expect("it was restored");
    assert_eq!((restore.complete, restore.pages_missing), (true, 0), "{restore:?}");
    Ok(restore)
}

pub const WAYS: [(&str, &[&str]); 3] = [("lazy", &["--lazy"]), ("eager", &["--eager"]), ("set", &["--working-set"])];

/// Restores a clone and waits for all its memory. `warm`: the snapshot is in the host's page cache before that.
pub fn comes_back(vm: &TestVm, snapshot: &Path, way: (&str, &[&str]), warm: bool, nonce: &str) -> Result<TestVm> {
    let name = format!("{}-{}", way.0, if warm { "warm" } else { "cold" });
    match warm {
        true => drop(std::fs::read(snapshot.join("ram")).expect("it was saved")),
        false => page_cache::evict_all(snapshot).expect("files"),
    }
    let clone = vm.restore(snapshot, &name, way.1)?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce, "{name}: it is the same guest");
    counts_beyond(&clone, count(&clone)?)?;
    verify(&clone)?;
    let restore = wait_complete(&clone)?;
    let prefetched = restore.pages_prefetched == restore.pages;
    assert_eq!(prefetched, way.0 == "eager", "{name}: {restore:?}");
    // None of these changes once all memory has arrived.
    for (metric, pages) in [
        ("hearth_restore_pages", restore.pages),
        ("hearth_restore_prefetched_pages", restore.pages_prefetched),
        ("hearth_restore_lazy_pages", restore.pages_lazy),
        ("hearth_restore_filled_pages", restore.pages_filled),
        ("hearth_restore_missing_pages", restore.pages_missing),
    ] {
        assert_eq!(clone.metric(metric)?, Some(pages as f64), "{name}: {metric} and {restore:?}");
    }
    assert_eq!(clone.metric("hearth_restore_complete")?, Some(1.0), "{name}");
    let has_faults = clone.metric("hearth_restore_fault_seconds")?.is_some();
    assert_eq!(has_faults, restore.faults > 0, "{name}: {restore:?}");
    Ok(clone)
}

#[test]
fn each_restore_mode_returns_the_same_guest() -> Result<()> {
    let vm = boot_filled(TestVm::busybox("three"))?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    start_counter(&vm)?;
    count(&vm)?;
    vm.save(&snapshot)?;
    vm.stop_at_once()?;
    for way in WAYS {
        for warm in [true, false] {
            let clone = comes_back(&vm, &snapshot, way, warm, &nonce)?;
            let restore = clone.status()?.restore.expect("it was restored");
            assert!(restore.pages > (MOST_MIB << 20) / 4096, "{restore:?}");
            clone.stop_at_once()?;
        }
    }
    Ok(())
}

#[test]
fn two_clones_run_on_own_disks() -> Result<()> {
    let vm = TestVm::busybox("two").disk(Disk::empty(32)).running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 16)?;
    // The clones read this from disk into memory that is still arriving, which the disk's server maps itself.
    vm.sh("dd if=/tmp/memory of=/dev/vda bs=64k conv=fsync 2>&1")?;
    vm.save_and_stop(&snapshot)?;
    let clones = [vm.restore(&snapshot, "one", &["--lazy"])?, vm.restore(&snapshot, "other", &["--lazy"])?];
    for clone in &clones {
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce);
        clone.sh(
            "dd if=/dev/vda of=/tmp/back bs=64k count=256 iflag=direct 2>&1 && cmp -n 16777216 /tmp/memory /tmp/back",
        )?;
        clone.sh(&format!("echo {} | dd of=/dev/vda bs=512 seek=40000 conv=notrunc,fsync,sync 2>&1", clone.name()))?;
        verify(clone)?;
    }
    for clone in &clones {
        wait_complete(clone)?;
        let mine = clone.sh("dd if=/dev/vda bs=512 skip=40000 count=1 iflag=direct 2>/dev/null | head -n 1")?;
        assert_eq!(mine.trim(), clone.name(), "each clone writes to its own disk");
        let status = clone.status()?;
        assert_eq!(status.disks[0].io_errors, 0, "{status:?}");
        // The clone is a normal machine now.
        clone.reboot_forced()?;
        clone.wait_incarnation(2)?;
        assert_ne!(clone.nonce()?, nonce);
    }
    Ok(())
}

#[test]
fn simultaneous_clones_read_shared_memory_once() -> Result<()> {
    let vm = boot_filled(TestVm::busybox("cached"))?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    vm.save_and_stop(&snapshot)?;
    let ram = snapshot.join("ram");
    page_cache::evict_all(&snapshot).expect("files");
    if page_cache::resident_bytes(&ram).expect("it was saved") > 0 {
        eprintln!("skipped: {} lies in memory", ram.display());
        return Ok(());
    }
    let clones = [vm.restore(&snapshot, "one", &["--lazy"])?, vm.restore(&snapshot, "other", &["--lazy"])?];
    let (mut read, saved) = (0, std::fs::metadata(&ram).expect("it was saved").len());
    for clone in &clones {
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce);
        wait_complete(clone)?;
        let keeper = clone.status()?.keeper.pid;
        read += page_cache::disk_read_bytes(keeper.into()).expect("it lives");
    }
    let cached = page_cache::resident_bytes(&ram).expect("it was saved");
    eprintln!("{saved} bytes of memory: {read} were read from the disk for both, {cached} are in the page cache");
    assert!(cached > saved / 10 * 9 && (saved / 10 * 9..saved / 10 * 12).contains(&read), "{read} of {saved}");
    clones.iter().try_for_each(verify)
}

#[test]
fn traced_working_set_is_prefetched_next_time() -> Result<()> {
    let vm = TestVm::busybox("traced").running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 64)?;
    vm.save(&snapshot)?;
    vm.stop_at_once()?;
    let verified = vm.folder().join("verified");
    let until = format!("test -e {}", verified.display());
    let traced = vm.restore(&snapshot, "first", &["--trace", "3600", "--until", &until])?;
    traced.wait_running()?;
    verify(&traced)?;
    std::fs::write(&verified, "").expect("a file");
    let pages = traced.wait_event("a noted working set", event!(WorkingSetTraced { pages } => pages))?;
    assert!(pages > (64 << 20) / 4096, "the working set lacks verified pages: {pages}");
    wait_complete(&traced)?;
    traced.stop_at_once()?;
    let shown: Value =
        serde_json::from_str(&vm.cli(&["working-set", &snapshot.display().to_string(), "--json"])?).expect("JSON");
    assert_eq!(shown["working_set"]["pages"], pages, "{shown}");
    let again = vm.restore(&snapshot, "again", &[])?;
    again.wait_running()?;
    assert_eq!(again.nonce()?, nonce);
    verify(&again)?;
    let restore = wait_complete(&again)?;
    assert_eq!(restore.pages_prefetched, pages, "{restore:?}");
    again.stop_at_once()?;
    Ok(())
}

#[test]
fn rehearsal_notes_the_working_set_leaving_nothing_else() -> Result<()> {
    let vm = TestVm::busybox("rehearsed").disk(Disk::empty(16)).running()?;
    let (snapshot, scratch) = (vm.folder().join("snapshot"), vm.folder().join("scratch"));
    vm.save_and_stop(&snapshot)?;
    std::fs::create_dir(&scratch).expect("a folder");
    let [path, into] = [&snapshot, &scratch].map(|path| path.display().to_string());
    let rehearse = ["rehearse", path.as_str(), "--scratch", into.as_str(), "--for", "600", "--until", "sleep 3"];
    let said = vm.cli(&rehearse)?;
    let shown: Value = serde_json::from_str(&vm.cli(&["working-set", &path, "--json"])?).expect("JSON");
    let pages = shown["working_set"]["pages"].as_u64().expect("a set was noted");
    assert!(pages > 0 && said.contains(&format!("{pages} pages in the working set")), "{said}");
    assert_eq!(std::fs::read_dir(&scratch).expect("it is there").count(), 0);
    let machines = vm.cli(&["ls"])?;
    assert!(!machines.contains("rehearsal"), "{machines}");
    Ok(())
}

#[test]
fn restored_guest_is_saved_again_with_unchanged_pages() -> Result<()> {
    let vm = boot_filled(TestVm::busybox("again").disk(Disk::empty(16)))?;
    let (nonce, first) = (vm.nonce()?, vm.folder().join("first"));
    // Without this the kernel would move pages by itself.
    vm.sh("echo 0 >/proc/sys/vm/compaction_proactiveness")?;
    vm.sh("echo kept | dd of=/dev/vda bs=512 seek=7 conv=notrunc,fsync,sync 2>&1")?;
    let disk = vm.sh("md5sum </dev/vda")?;
    vm.save_and_stop(&first)?;
    let clone = vm.restore(&first, "second", &["--lazy"])?;
    clone.wait_running()?;
    let second = vm.folder().join("second");
    wait_complete(&clone)?;
    clone.save_and_stop(&second)?;
    compare(&first, &second);
    let last = vm.restore(&second, "third", &["--lazy"])?;
    last.wait_running()?;
    assert_eq!(last.nonce()?, nonce);
    verify(&last)?;
    last.sh("probe drop-caches")?;
    assert_eq!(last.sh("md5sum </dev/vda")?, disk, "the disk is unchanged through two overlays");
    Ok(())
}

/// Compares two snapshots. The guest of the second did nothing between its restore and the save, but it ran, so some pages
/// differ.
fn compare(first: &Path, second: &Path) {
    let [first, second] = [first, second].map(|folder| Snapshot::open(folder).expect("it was saved").ram);
    let pattern = first_words("memory", MOST_MIB as usize);
    let (mut one, mut other) = (first.reading(), second.reading());
    let (mut same, mut differing, mut kept) = (0, 0, HashSet::new());
    for page in first.pages().iter().chain(second.pages()).copied().collect::<BTreeSet<_>>() {
        let was = first.page(page, &mut one).expect("each chunk is whole");
        if was != second.page(page, &mut other).expect("each chunk is whole") {
            differing += 1;
            continue;
        }
        same += 1;
        let Some(bytes) = was else { continue };
        if pattern.get(&first_word(bytes)).is_some_and(|expect| expect[..] == bytes[..]) {
            kept.insert(first_word(bytes));
        }
    }
    eprintln!("{same} pages are the same, {differing} differ");
    assert_eq!(kept.len(), pattern.len(), "each page of the pattern is where it was");
    assert!(differing * 10 < same, "{differing} pages differ, {same} are the same");
}

#[test]
fn snapshot_moves_between_qemu_versions_and_back() -> Result<()> {
    let programs = [artifacts::installed_qemu()?, artifacts::qemu_10()?].map(|path| path.display().to_string());
    let [old, new] = &programs;
    let vm = TestVm::busybox("versions").disk(Disk::empty(16)).setting("qemu", old.as_str()).boot()?;
    let nonce = vm.nonce()?;
    fill(&vm, 32)?;
    start_counter(&vm)?;
    vm.sh("echo kept | dd of=/dev/vda bs=512 seek=7 conv=notrunc,fsync,sync 2>&1")?;
    let version = |vm: &TestVm| vm.qemu().map(|qemu| qemu.version);
    let (first, mut snapshot) = (version(&vm)?, vm.folder().join("first"));
    vm.save_and_stop(&snapshot)?;
    for (name, qemu, is_first) in [("newer", new, false), ("back", old, true)] {
        // The second has no configuration file to be compared with: the clone's was removed with it.
        let clone = vm.restore(&snapshot, name, &["--lazy", "--qemu", qemu, "--trust-config"])?;
        clone.wait_running()?;
        assert_eq!(clone.nonce()?, nonce, "{name}: it is the same guest");
        let now = version(&clone)?;
        assert_eq!(now == first, is_first, "{name}: {now} after {first}");
        counts_beyond(&clone, count(&clone)?)?;
        verify(&clone)?;
        let kept = clone.sh("dd if=/dev/vda bs=512 skip=7 count=1 iflag=direct 2>/dev/null | head -n 1")?;
        assert_eq!(kept.trim(), "kept", "{name}");
        wait_complete(&clone)?;
        clone.has_no_disk_errors()?;
        snapshot = vm.folder().join(name);
        clone.save_and_stop(&snapshot)?;
    }
    Ok(())
}
