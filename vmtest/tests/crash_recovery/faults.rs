//! Faults: whatever goes wrong with a dump, the next guest serves, and nothing that is not in the file is lost.

use hearth_vmtest::{Disk, Drives, Result, TestVm};
use rustix::process::{Signal, kill_process};
use serde_json::Value;

use crate::dump::{self, assert_nothing_held, dumping, file_of, last_words, slow, wait_complete, wait_event};
use crate::memory::fill_until_it_waits;
use crate::small_folder;

const REASON: Option<&str> = Some("sysrq triggered crash");

/// The disk is full: at first there is not even room for the headers, then in the middle of the pages.
#[test]
fn a_full_disk_stops_the_dump_and_not_the_recovery() -> Result<()> {
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

/// An event of this kind, once it has come so often.
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
fn a_dump_that_is_given_up_leaves_what_it_has_and_its_memory() -> Result<()> {
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

/// Kills the keeper when the dump has come so far; the next keeper carries guest and dump on.
fn survives_the_keeper(vm: &TestVm, moment: impl Fn(&Value) -> bool) -> Result<()> {
    vm.panic()?;
    vm.wait_event("the moment", moment)?;
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    assert_eq!(last_words(&file_of(&wait_complete(vm, 1)?)).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    assert_nothing_held(vm)
}

#[test]
fn a_keeper_killed_in_the_middle_of_a_dump_is_carried_on() -> Result<()> {
    let vm = slow("killed-writing").boot()?;
    vm.panic()?;
    vm.wait_event("the next life", |event| event["kind"] == "incarnation_started" && event["incarnation"] == 2)?;
    let progress = vm.wait_event("some of the dump", |event| {
        event["kind"] == "dump_progress" && event["percent"].as_f64() > Some(5.0)
    })?;
    assert!(progress["percent"].as_f64() < Some(100.0), "{progress}");
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_event("the new keeper", |event| event["kind"] == "keeper_took_over")?;
    assert_ne!(dump::status(&vm, 1)?["state"], "complete", "nothing was left to be carried on");
    vm.wait_incarnation(2)?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(last_words(&file_of(&complete)).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    assert_nothing_held(&vm)
}

#[test]
fn a_keeper_killed_as_soon_as_it_has_the_registers_dumps_all_the_same() -> Result<()> {
    survives_the_keeper(&slow("killed-harvest").boot()?, |event| event["kind"] == "registers_taken")
}

#[test]
fn a_keeper_killed_as_soon_as_qemu_has_ended_dumps_all_the_same() -> Result<()> {
    survives_the_keeper(&slow("killed-ended").boot()?, |event| event["kind"] == "qemu_exited")
}

#[test]
fn a_keeper_killed_while_the_next_guest_starts_dumps_all_the_same() -> Result<()> {
    survives_the_keeper(&slow("killed-launch").boot()?, |event| {
        event["kind"] == "dump_started" || event["kind"] == "qemu_started" && event["generation"] == 2
    })
}

/// All is in the file but its name, which is taken; the keeper dies at that point.
#[test]
fn a_keeper_killed_while_the_dump_gets_its_name_is_carried_on() -> Result<()> {
    let vm = slow("killed-finish").boot()?;
    vm.panic()?;
    let file = file_of(&wait_event(&vm, "dump_progress", 1)?);
    std::fs::write(&file, "in the way").expect("the folder is the test's");
    let waits = wait_event(&vm, "dump_waits", 1)?;
    assert!(waits["why"].to_string().contains("cannot be renamed"), "{waits}");
    assert_nothing_held(&vm)?;
    vm.kill_keeper()?;
    std::fs::remove_file(&file).expect("it was left alone");
    vm.restart_keeper()?;
    assert_eq!(file_of(&wait_complete(&vm, 1)?), file);
    assert_eq!(last_words(&file).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()), [file]);
    assert_nothing_held(&vm)
}

/// Keeper and QEMU die together in the middle of a dump: nothing guards the disks, but the dump needs no guard.
#[test]
fn a_dump_outlives_both_keeper_and_qemu() -> Result<()> {
    let vm = slow("both").boot()?;
    vm.panic()?;
    vm.wait_event("some of the dump", |event| event["kind"] == "dump_progress")?;
    let qemu = vm.qemu_pid()?;
    vm.freeze_keeper()?;
    kill_process(qemu, Signal::KILL).expect("QEMU runs");
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_eq!(vm.status()?["ember"]["pages_kept"], 0, "an ember would not be trusted");
    assert_nothing_held(&vm)
}

/// The second guest crashes while the first one's dump is written: both are dumped, one after the other.
#[test]
fn a_second_crash_during_the_dump_is_dumped_too() -> Result<()> {
    let vm = slow("twice").boot()?;
    vm.panic()?;
    vm.wait_event("the next life", |event| event["kind"] == "incarnation_started" && event["incarnation"] == 2)?;
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

/// With too little memory for two dead guests and a living one the second crash is recovered from without a dump.
#[test]
fn a_second_crash_without_room_is_recovered_from_and_says_so() -> Result<()> {
    let builder = dumping("no-room").crash_setting("level", 1).crash_setting("headroom", "20%");
    let Some((vm, folder)) = small_folder::boot(builder, "no-room", "8M")? else { return Ok(()) };
    vm.panic()?;
    wait_event(&vm, "dump_waits", 1)?;
    vm.wait_incarnation(2)?;
    fill_until_it_waits(&vm)?;
    vm.kill_qemu()?;
    let skipped = vm.wait_event("word of it", |event| event["kind"] == "dump_skipped")?;
    assert!(skipped["why"].to_string().contains("an earlier dump is still being written"), "{skipped}");
    vm.wait_incarnation(3)?;
    folder.grow("512M");
    vm.cli(&["dump", vm.name(), "--resume", "--no-wait"])?;
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_eq!(dump::files(folder.path()).len(), 1);
    Ok(())
}

/// The machine waits before its next start, and its dump does not.
#[test]
fn the_crash_that_closes_a_crash_loop_is_dumped_too() -> Result<()> {
    let builder = dumping("looped").crash_setting("loop_count", 2).crash_setting("loop_window_s", 86_400);
    let builder = builder.crash_setting("loop_delay_s", 3600).crash_setting("loop_delay_max_s", 86_400);
    let vm = builder.disk(Disk::empty(8)).boot()?;
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
fn a_machine_that_is_stopped_ends_after_its_dump() -> Result<()> {
    let vm = slow("stopped").boot()?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    assert!(vm.stop_at_once()?.success());
    let files = dump::files(&vm.dump_folder());
    assert_eq!(files.iter().map(|file| last_words(file)).collect::<Vec<_>>(), [REASON.map(str::to_owned)]);
    Ok(())
}

#[test]
fn only_the_last_dumps_are_kept() -> Result<()> {
    let vm = dumping("kept").crash_setting("keep_last", 2).boot()?;
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
