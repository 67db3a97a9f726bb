//! Faults: whatever goes wrong with a dump, the next guest serves, and memory is kept until it is in the file.

use hearth_api::{DumpState, EndCause, EventKind, EventRecord, MachineState};
use hearth_vmtest::{Disk, Drives, Result, TestVm, event};
use rustix::process::{Signal, kill_process};

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
        let why = vm.wait_event("a full disk", nth_wait(round))?;
        assert!(why.contains("No space left") || why.contains("min_free"), "{why}");
        vm.sh("dd if=/dev/zero of=/dev/vda bs=1M count=4 conv=fsync")?;
        let status = dump::status(&vm, 1)?;
        let held = status.held_bytes;
        assert_eq!(status.state, DumpState::Waiting, "{status:?}");
        assert!(held > 0 && held <= held_before, "{status:?}");
        held_before = held;
        folder.grow(size);
        vm.cli(&["dump", vm.name(), "--resume", "--no-wait"])?;
    }
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_nothing_held(&vm)
}

/// Why the dump waits for the `count`th time.
fn nth_wait(count: usize) -> impl Fn(&EventRecord) -> Option<String> {
    let seen = std::cell::RefCell::new(std::collections::BTreeSet::new());
    move |event| {
        let why = event!(DumpWaits { why, .. } => why)(event)?;
        let mut sequences = seen.borrow_mut();
        sequences.insert(event.sequence);
        (sequences.len() >= count).then_some(why)
    }
}

#[test]
fn discarded_dump_leaves_partial_file_and_frees_memory() -> Result<()> {
    let Some((vm, folder)) = small_folder::boot(dumping("given-up"), "given-up", "3M")? else { return Ok(()) };
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.wait_event("a full disk", event!(DumpWaits))?;
    let refused = vm.cli_output(&["dump", vm.name()])?;
    assert!(refused.status != 0 && refused.text().contains("another dump is waiting"), "{}", refused.text());
    vm.cli(&["dump", vm.name(), "--discard"])?;
    assert_nothing_held(&vm)?;
    let [file] = &dump::files(folder.path())[..] else { panic!("{:?}", dump::files(folder.path())) };
    assert!(file.to_string_lossy().ends_with(".incomplete"));
    assert_eq!(last_words(file), None);
    assert_eq!(dump::status(&vm, 1)?.state, DumpState::Incomplete);
    vm.sh("true").map(drop)
}

/// Kills the keeper at the given event, and asserts that the next keeper continues guest and dump.
fn dump_survives_keeper_killed_at(vm: &TestVm, moment: impl Fn(&EventRecord) -> Option<EventRecord>) -> Result<()> {
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
    vm.wait_event("the next incarnation", event!(|event| IncarnationStarted if event.incarnation == 2))?;
    let some = event!(DumpProgress { percent, .. } if percent > 5.0 => percent);
    let percent = vm.wait_event("some of the dump", some)?;
    assert!(percent < 100.0, "{percent}");
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_event("the new keeper", event!(KeeperTookOver))?;
    assert_ne!(dump::status(&vm, 1)?.state, DumpState::Complete, "the dump was complete before the keeper died");
    vm.wait_incarnation(2)?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(last_words(&file_of(&complete)).as_deref(), REASON);
    assert_eq!(dump::files(&vm.dump_folder()).len(), 1);
    assert_nothing_held(&vm)
}

#[test]
fn dump_survives_keeper_killed_after_registers() -> Result<()> {
    dump_survives_keeper_killed_at(&slow("killed-harvest").running()?, event!(RegistersTaken))
}

#[test]
fn dump_survives_keeper_killed_after_qemu_exit() -> Result<()> {
    dump_survives_keeper_killed_at(&slow("killed-ended").running()?, event!(QemuExited))
}

#[test]
fn dump_survives_keeper_killed_at_next_start() -> Result<()> {
    dump_survives_keeper_killed_at(&slow("killed-launch").running()?, |event| {
        event!(DumpStarted)(event).or_else(|| event!(QemuStarted { generation: 2, .. })(event))
    })
}

/// The dump is written except for its name, which another file has; the keeper dies at that point.
#[test]
fn dump_survives_keeper_killed_before_rename() -> Result<()> {
    let vm = slow("killed-finish").running()?;
    vm.panic()?;
    let file = file_of(&wait_event(&vm, event!(DumpProgress), 1)?);
    std::fs::write(&file, "in the way").expect("the folder is the test's");
    let waits = wait_event(&vm, event!(DumpWaits), 1)?;
    let renames = matches!(&waits.event, EventKind::DumpWaits { why, .. } if why.contains("cannot be renamed"));
    assert!(renames, "{waits:?}");
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
    vm.wait_event("some of the dump", event!(DumpProgress))?;
    let qemu = vm.qemu_pid()?;
    vm.freeze_keeper()?;
    kill_process(qemu, Signal::KILL).expect("QEMU runs");
    vm.restart_keeper()?;
    vm.wait_incarnation(3)?;
    assert_eq!(last_words(&file_of(&wait_complete(&vm, 1)?)).as_deref(), REASON);
    assert_eq!(vm.status()?.ember.pages_kept, 0, "memory of unguarded disks must not be used");
    assert_nothing_held(&vm)
}

/// The second guest crashes during the first one's dump. Both are dumped, one after the other.
#[test]
fn second_crash_during_a_dump_is_dumped() -> Result<()> {
    let vm = slow("twice").running()?;
    vm.panic()?;
    vm.wait_event("the next incarnation", event!(|event| IncarnationStarted if event.incarnation == 2))?;
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    let first = wait_complete(&vm, 1)?;
    let second = wait_complete(&vm, 2)?;
    assert_eq!(last_words(&file_of(&first)).as_deref(), REASON);
    assert!(file_of(&second).is_file());
    let died = vm.wait_event("the second death", event!(QemuExited { generation: 2, .. }))?;
    let began = wait_event(&vm, event!(DumpStarted), 2)?;
    let order = [&died, &first, &began, &second].map(|event| event.sequence);
    assert!(order.is_sorted(), "{order:?}");
    assert_nothing_held(&vm)
}

/// With too little memory for two dead guests and a living one, the second crash is recovered from without a dump.
#[test]
fn second_crash_without_memory_skips_its_dump() -> Result<()> {
    let builder = dumping("no-room").crash_setting("level", 1).crash_setting("headroom", "20%");
    let Some((vm, folder)) = small_folder::boot(builder, "no-room", "8M")? else { return Ok(()) };
    vm.panic()?;
    wait_event(&vm, event!(DumpWaits), 1)?;
    vm.wait_incarnation(2)?;
    fill_until_it_waits(&vm)?;
    vm.kill_qemu()?;
    let why = vm.wait_event("a skipped dump", event!(DumpSkipped { why } => why))?;
    assert!(why.contains("an earlier dump is still being written"), "{why}");
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
    vm.wait_event("a crash loop", event!(CrashLoop))?;
    let second = file_of(&wait_complete(&vm, 2)?);
    assert_eq!(last_words(&second).as_deref(), REASON);
    assert_eq!(vm.status()?.state, MachineState::Recovering);
    assert_nothing_held(&vm)?;
    vm.reboot()?;
    vm.wait_incarnation(3)?;
    let recovery = vm.explain()?.recovery.expect("the machine has recovered");
    assert_eq!((recovery.cause, recovery.warm), (EndCause::Panic, true), "{recovery:?}");
    assert_eq!(recovery.dump.map(|dump| dump.file), Some(second.display().to_string()));
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
    for incarnation in 1..=3u32 {
        vm.panic()?;
        vm.wait_incarnation(u64::from(incarnation) + 1)?;
        wait_event(&vm, event!(DumpComplete), incarnation)?;
    }
    let files = dump::files(&vm.dump_folder());
    assert_eq!(files.len(), 2, "{files:?}");
    assert!(files[0].to_string_lossy().contains("kept-2-") && files[1].to_string_lossy().contains("kept-3-"));
    Ok(())
}
