//! Failed starts, and machines that crash again and again: a failed first start is an error, later ones are tried again.

use hearth_api::MachineState;
use hearth_vmtest::images::File;
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, artifacts, event, processes, write_program};

use super::{last_sequence, memory_files};

/// A QEMU whose start fails later is ended, and does not disturb the next start.
#[test]
fn failed_start_leaves_no_qemu_behind() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let (qemu, runtime) = (folder.path().join("qemu"), folder.path().join("run"));
    let (once, journal) = (folder.path().join("once"), runtime.join("journal.json.new"));
    // Once QEMU starts, the journal cannot be written: a folder has its name.
    let spoil = format!("(unset LD_PRELOAD; rm {} && mkdir {})", once.display(), journal.display());
    let guest_of = format!("case \"$*\" in *memory-backend-file*) {spoil};; esac");
    let program = artifacts::qemu()?.display().to_string();
    write_program(&qemu, &format!("#!/bin/sh\n{guest_of}\nexec {program} \"$@\"\n"));
    std::fs::write(&once, "").expect("our own folder");
    let builder = TestVm::busybox("failed").setting("qemu", qemu.display().to_string());
    let vm = builder.setting("runtime_folder", runtime.display().to_string()).start()?;
    assert_eq!(vm.wait_keeper_end()?.code(), Some(1), "{}", vm.keeper_log());
    assert!(vm.keeper_log().contains("journal.json: cannot be read or written"), "{}", vm.keeper_log());
    assert!(processes::mentioning(vm.memory_folder()).is_empty(), "a QEMU without a keeper");
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    // It has gone with what else is left of a guest.
    assert!(!journal.exists());
    vm.restart_keeper()?;
    vm.wait_boots(1).map(drop)
}

/// Firmware and a kernel in its first seconds ignore the power button.
#[test]
fn guest_in_its_boot_is_asked_again_to_shut_down() -> Result<()> {
    let vm = TestVm::busybox("early-stop").start()?;
    vm.wait_event("the guest", event!(IncarnationStarted { .. }))?;
    vm.cli(&["stop", vm.name()])?;
    assert_eq!(vm.wait_keeper_end()?.code(), Some(0), "{}", vm.keeper_log());
    let events = vm.events();
    assert!(events.iter().all(|record| event!(PowerCut { why } => why)(record).is_none()), "{events:?}");
    Ok(())
}

/// A QEMU that refuses at the first start ends the keeper. After that it counts as a crash, and costs neither keeper nor memory.
#[test]
fn refused_start_is_retried_after_a_first_guest() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let (qemu, refuses) = (folder.path().join("qemu"), folder.path().join("refuses"));
    let program = artifacts::qemu()?.display().to_string();
    let refusal = format!("[ -e {} ] && {{ echo no luck today >&2; exit 1; }}", refuses.display());
    let script = format!("#!/bin/sh\ncase \"$*\" in *memory-backend-file*) {refusal};; esac\nexec {program} \"$@\"\n");
    write_program(&qemu, &script);
    let refuse = || std::fs::write(&refuses, "").expect("our own folder");
    let relent = || std::fs::remove_file(&refuses).expect("our own folder");

    refuse();
    let disk = Disk::ext4(64).with_files([File::pattern("kept.bin", 8 << 20, 3)]);
    let vm = crash_loop("refused", 3600).disk(disk).setting("qemu", qemu.display().to_string()).start()?;
    assert_eq!(vm.wait_keeper_end()?.code(), Some(1), "{}", vm.keeper_log());
    assert!(vm.keeper_log().contains("its last message: no luck today"), "{}", vm.keeper_log());
    assert!(processes::mentioning(vm.memory_folder()).is_empty(), "a QEMU without a keeper");
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    assert_eq!(vm.runtime_files(), ["events.jsonl", "journal.json", "keeper.lock", "preload.so"]);

    relent();
    vm.restart_keeper()?;
    vm.wait_boots(1)?;
    vm.sh("mkdir -p /d && mount -o ro /dev/vda /d && probe verify /d/kept.bin 3")?;
    refuse();
    // This crash and the failed start after it are a crash loop.
    vm.kill_qemu()?;
    let (why, next_start) =
        vm.wait_event("the next start waits", event!(StartWaits { why, next_start } => (why, next_start)))?;
    assert!(why.contains("no luck today"), "{why}");
    let status = vm.wait_status("a waiting start", |status| status.next_start.is_some())?;
    assert_eq!((status.state, &status.next_start), (MachineState::Recovering, &Some(next_start)), "{status:?}");
    assert!(!status.crash_loop, "{status:?}");
    assert!(status.state_why.as_ref().is_some_and(|why| why.contains("no luck today")), "{status:?}");
    vm.cli(&["reboot", vm.name(), "--no-wait"])?;
    vm.wait_status("a later start", |later| later.next_start.is_some() && later.next_start != status.next_start)?;

    relent();
    vm.reboot()?;
    vm.wait_boots(2)?;
    vm.sh("mkdir -p /d && mount -o ro /dev/vda /d && probe verify /d/kept.bin 3")?;
    let status = vm.status()?;
    assert!(status.ember.pages_served >= ((8 << 20) / 4096), "{status:?}");
    vm.has_no_disk_errors()?;
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    Ok(())
}

/// A machine whose crash loop depends on the number of crashes only, not on the host's speed: all its guests together live less
/// than a day.
fn crash_loop(name: &str, delay_s: i64) -> TestVmBuilder {
    let builder = TestVm::busybox(name).crash_setting("loop_count", 2).crash_setting("loop_window_s", 86_400);
    builder.crash_setting("loop_delay_s", delay_s).crash_setting("loop_delay_max_s", 86_400)
}

/// Crashes the incarnation that has just begun. Returns the delay of the crash loop and its end, unless it is the first crash.
fn crash_again(vm: &TestVm, incarnation: u32) -> Result<Option<(u64, String)>> {
    let began = event!(|event| IncarnationStarted if event.incarnation == incarnation);
    vm.wait_event("the next incarnation", began)?;
    vm.kill_qemu()?;
    if incarnation == 1 {
        return Ok(None);
    }
    let waits =
        event!(|event| CrashLoop { delay_s, next_start } if event.incarnation == incarnation => (delay_s, next_start));
    vm.wait_event("a crash loop", waits).map(Some)
}

#[test]
fn crash_loop_delay_doubles_until_a_reboot_request() -> Result<()> {
    let vm = crash_loop("loop", 3600).boot()?;
    crash_again(&vm, 1)?;
    let waits = crash_again(&vm, 2)?;
    let status = vm.status()?;
    assert_eq!((status.state, &status.qemu), (MachineState::Recovering, &None), "{status:?}");
    assert!(status.crash_loop, "{status:?}");
    assert_eq!(waits, status.next_start.map(|next_start| (3600, next_start)));
    let page = vm.cli(&["status", "loop"])?;
    assert!(page.contains("crash loop") && page.contains("`hearth reboot`"), "{page}");
    let refused = vm.cli_output(&["crash", "loop"])?;
    assert!(refused.status != 0 && refused.text().contains("the machine is recovering"), "{}", refused.text());

    vm.reboot()?;
    let status = vm.status()?;
    assert_eq!((status.state, &status.next_start), (MachineState::Running, &None), "{status:?}");
    assert_eq!(crash_again(&vm, 3)?.map(|(delay_s, _)| delay_s), Some(7200), "the crash loop continues");
    assert_eq!(vm.stop()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    let before = last_sequence(&vm);
    vm.restart_keeper()?;
    vm.wait_event("the next start", event!(|event| IncarnationStarted if event.sequence > before)).map(drop)
}

#[test]
fn machine_starts_by_itself_after_its_delay() -> Result<()> {
    let vm = crash_loop("loop-time", 1).boot()?;
    crash_again(&vm, 1)?;
    crash_again(&vm, 2)?;
    vm.wait_incarnation(3)?;
    let recovery = vm.explain()?.recovery.expect("the machine has recovered");
    assert!(recovery.phases.iter().any(|phase| phase.phase.contains("back-off")), "{recovery:?}");
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    Ok(())
}
