//! Faults: whatever goes wrong with a dump, the next guest serves, and memory is kept until it is in the file.

use hearth_vmtest::{Disk, Drives, Result, TestVm};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::dump::{self, assert_nothing_held, dumping, file_of, last_words, slow, wait_complete, wait_event};
use crate::memory::fill_until_it_waits;
use crate::small_folder;

const REASON: Option<&str> = Some("sysrq triggered crash");

/// The disk is full: at first there is no space even for the headers, then in the middle of the pages.
#[test]
fn full_disk_stops_the_dump_not_the_recovery() -> Result<()> {
    let Some((vm, folder)) = small_folder::boot(dumping("full"), "full", "64K")? else { return Ok(()) };
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let mut held_before = u64::MAX;
    for (round, size) in [(1, "1M"), (2, "4M"), (3, "512M")] {
        let waits = vm.wait_event("a full disk", count_of("dump_waits", round))?;
        assert!(waits["why"].to_string().contains("No space left") || waits["why"].to_string().contains("min_free"));
        vm.sh("dd if=/dev/zero of=/dev/vda bs=1M count=4 conv=fsync")?;
        let status = dump::status(&vm, 1)?;
        let held = status["held_bytes"].as_u64().unwrap_or_default();
        assert_eq!(status["state"], "waiting", "{status}");
        assert!(held > 0 && held <= held_before, "{status}");
        held_before = held;
        folder.grow(size);
        vm.cli(&["dump", vm.name(), "--resume", "--no-wait"])?;
    }
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_nothing_held(&vm)
}

/// Accepts an event of this kind once `count` of them have come.
fn count_of(kind: &'static str, count: usize) -> impl Fn(&Value) -> bool {
    let seen = std::cell::Cell::new(std::collections::BTreeSet::new());
    move |event| {
        let mut sequences = seen.take();
        if event["kind"] == kind {
            sequences.insert(event["sequence"].as_u64());
        }
        let enough = sequences.len() >= count;
        seen.set(sequences);
        enough && event["kind"] == kind
    }
}

#[test]
fn discarded_dump_leaves_partial_file_and_frees_memory() -> Result<()> {
    let Some((vm, folder)) = small_folder::boot(dumping("given-up"), "given-up", "3M")? else { return Ok(()) };
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.wait_event("a full disk", |event| event["kind"] == "dump_waits")?;
    let refused = vm.cli_output(&["dump", vm.name()])?;
    assert!(refused.status != 0 && refused.text().contains("another dump is waiting"), "{}", refused.text());
    vm.cli(&["dump", vm.name(), "--discard"])?;
    assert_nothing_held(&vm)?;
    let [file] = &dump::files(folder.path())[..] else { panic!("{:?}", dump::files(folder.path())) };
    assert!(file.to_string_lossy().ends_with(".incomplete"));
    assert_eq!(last_words(file), None);
    assert_eq!(dump::status(&vm, 1)?["state"], "incomplete");
    vm.sh("true").map(drop)
}

/// Kills the keeper at the given event, and asserts that the next keeper continues guest and dump.
fn dump_survives_keeper_killed_at(vm: &TestVm, moment: impl Fn(&Value) -> bool) -> Result<()> {
    vm.panic()?;
    vm.wait_event("the event to kill the keeper at", moment)?;
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    assert_eq!(last_words(&file_of(&wait_complete(vm, 1)?)).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    assert_nothing_held(vm)
}

#[test]
fn dump_continues_after_keeper_is_killed() -> Result<()> {
    let vm = slow("killed-writing").running()?;
    vm.panic()?;
    vm.wait_event("the next incarnation", |event| event["kind"] == "incarnation_started" && event["incarnation"] == 2)?;
    let progress = vm.wait_event("some of the dump", |event| {
        event["kind"] == "dump_progress" && event["percent"].as_f64() > Some(5.0)
    })?;
    assert!(progress["percent"].as_f64() < Some(100.0), "{progress}");
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_event("the new keeper", |event| event["kind"] == "keeper_took_over")?;
    assert_ne!(dump::status(&vm, 1)?["state"], "complete", "the dump was complete before the keeper died");
    vm.wait_incarnation(2)?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(last_words(&file_of(&complete)).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    assert_nothing_held(&vm)
}

#[test]
fn dump_survives_keeper_killed_after_registers() -> Result<()> {
    dump_survives_keeper_killed_at(&slow("killed-harvest").running()?, |event| event["kind"] == "registers_taken")
}

#[test]
fn dump_survives_keeper_killed_after_qemu_exit() -> Result<()> {
    dump_survives_keeper_killed_at(&slow("killed-ended").running()?, |event| event["kind"] == "qemu_exited")
}

#[test]
fn dump_survives_keeper_killed_at_next_start() -> Result<()> {
    dump_survives_keeper_killed_at(&slow("killed-launch").running()?, |event| {
        event["kind"] == "dump_started" || event["kind"] == "qemu_started" && event["generation"] == 2
    })
}

/// The dump is written except for its name, which another file has; the keeper dies at that point.
#[test]
fn dump_survives_keeper_killed_before_rename() -> Result<()> {
    let vm = slow("killed-finish").running()?;
    vm.panic()?;
    let file = file_of(&wait_event(&vm, "dump_progress", 1)?);
    std::fs::write(&file, "in the way").expect("the folder is the test's");
    let waits = wait_event(&vm, "dump_waits", 1)?;
    assert!(waits["why"].to_string().contains("cannot be renamed"), "{waits}");
    assert_nothing_held(&vm)?;
    vm.kill_keeper()?;
    std::fs::remove_file(&file).expect("the dump has not replaced this file");
    vm.restart_keeper()?;
    assert_eq!(file_of(&wait_complete(&vm, 1)?), file);
    assert_eq!(last_words(&file).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()), [file]);
    assert_nothing_held(&vm)
}

/// Keeper and QEMU die together in the middle of a dump. Then nothing guards the disks, but a dump needs no guard.
#[test]
fn dump_survives_death_of_keeper_and_qemu() -> Result<()> {
    let vm = slow("both").running()?;
    vm.panic()?;
    vm.wait_event("some of the dump", |event| event["kind"] == "dump_progress")?;
    let qemu = vm.qemu_pid()?;
    vm.freeze_keeper()?;
    kill_process(qemu, Signal::KILL).expect("QEMU runs");
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_eq!(vm.status()?["ember"]["pages_kept"], 0, "memory of unguarded disks must not be used");
    assert_nothing_held(&vm)
}

/// The second guest crashes during the first one's dump. Both are dumped, one after the other.
#[test]
fn second_crash_during_a_dump_is_dumped() -> Result<()> {
    let vm = slow("twice").running()?;
    vm.panic()?;
    vm.wait_event("the next incarnation", |event| event["kind"] == "incarnation_started" && event["incarnation"] == 2)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    let first = wait_complete(&vm, 1)?;
    let second = wait_complete(&vm, 2)?;
    assert_eq!(last_words(&file_of(&first)).as_deref(), REASON);
    assert!(file_of(&second).is_file());
    let died = vm.wait_event("the second death", |event| event["kind"] == "qemu_exited" && event["generation"] == 2)?;
    let began = wait_event(&vm, "dump_started", 2)?;
    let order = [&died, &first, &began, &second].map(|event| event["sequence"].as_u64());
    assert!(order.is_sorted(), "{order:?}");
    assert_nothing_held(&vm)
}

/// With too little memory for two dead guests and a living one, the second crash is recovered from without a dump.
#[test]
fn second_crash_without_memory_skips_its_dump() -> Result<()> {
    let builder = dumping("no-room").crash_setting("level", 1).crash_setting("headroom", "20%");
    let Some((vm, folder)) = small_folder::boot(builder, "no-room", "8M")? else { return Ok(()) };
    vm.panic()?;
    wait_event(&vm, "dump_waits", 1)?;
    vm.wait_incarnation(2)?;
    fill_until_it_waits(&vm)?;
    vm.kill_qemu()?;
    let skipped = vm.wait_event("a skipped dump", |event| event["kind"] == "dump_skipped")?;
    assert!(skipped["why"].to_string().contains("an earlier dump is still being written"), "{skipped}");
    vm.wait_incarnation(3)?;
    folder.grow("512M");
    vm.cli(&["dump", vm.name(), "--resume", "--no-wait"])?;
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_eq!(dump::files(folder.path()).len(), 1);
    Ok(())
}

/// The machine waits before its next start, but its dump starts at once.
#[test]
fn crash_that_starts_a_crash_loop_is_dumped() -> Result<()> {
    let builder = dumping("looped").crash_setting("loop_count", 2).crash_setting("loop_window_s", 86_400);
    let builder = builder.crash_setting("loop_delay_s", 3600).crash_setting("loop_delay_max_s", 86_400);
    let vm = builder.disk(Disk::empty(8)).running()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    wait_complete(&vm, 1)?;
    vm.panic()?;
    vm.wait_event("a crash loop", |event| event["kind"] == "crash_loop")?;
    let second = file_of(&wait_complete(&vm, 2)?);
    assert_eq!(last_words(&second).as_deref(), REASON);
    assert_eq!(vm.status()?["state"], "recovering");
    assert_nothing_held(&vm)?;
    vm.reboot()?;
    vm.wait_incarnation(3)?;
    let recovery = &vm.explain()?["recovery"];
    assert_eq!((&recovery["cause"], &recovery["warm"]), (&"panic".into(), &true.into()), "{recovery}");
    assert_eq!(recovery["dump"]["file"], second.display().to_string());
    Ok(())
}

#[test]
fn stopped_machine_ends_after_its_dump() -> Result<()> {
    let vm = slow("stopped").running()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    assert!(vm.stop_at_once()?.success());
    let files = dump::files(&vm.dump_folder());
    assert_eq!(files.iter().map(|file| last_words(file)).collect::<Vec<_>>(), [REASON.map(str::to_owned)]);
    Ok(())
}

#[test]
fn only_the_last_dumps_are_kept() -> Result<()> {
    let vm = dumping("kept").crash_setting("keep_last", 2).running()?;
    for incarnation in 1..=3 {
        vm.panic()?;
        vm.wait_incarnation(incarnation + 1)?;
        wait_event(&vm, "dump_complete", incarnation)?;
    }
    let files = dump::files(&vm.dump_folder());
    assert_eq!(files.len(), 2, "{files:?}");
    assert!(files[0].to_string_lossy().contains("kept-2-") && files[1].to_string_lossy().contains("kept-3-"));
    Ok(())
}
