//! Starts that fail, and machines that crash again and again: the first start is an error, later ones are tried again.

use hearth_vmtest::images::File;
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, artifacts, processes, write_program};
use serde_json::Value;

use super::{last_sequence, memory_files};

/// A QEMU that was started ends with the start that fails, and the next one finds nothing in its way.
#[test]
fn a_start_that_fails_leaves_no_qemu_and_the_next_one_works() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let (qemu, runtime) = (folder.path().join("qemu"), folder.path().join("run"));
    let (once, journal) = (folder.path().join("once"), runtime.join("journal.json.new"));
    // When QEMU is started the journal cannot be written any more: a folder has its place.
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
    std::fs::remove_dir(&journal).expect("our own folder");
    vm.restart_keeper()?;
    vm.wait_boots(1).map(drop)
}

/// A QEMU that refuses ends a keeper at its first start. After that it counts as a crash, and costs neither keeper nor memory.
#[test]
fn refused_start_is_tried_again_once_a_guest_has_lived() -> Result<()> {
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

    relent();
    vm.restart_keeper()?;
    vm.wait_boots(1)?;
    vm.sh("mkdir -p /d && mount -o ro /dev/vda /d && probe verify /d/kept.bin 3")?;
    refuse();
    // This crash and the start that fails after it are a loop.
    vm.kill_qemu()?;
    let waits = vm.wait_event("the next start waits", |event| event["kind"] == "start_waits")?;
    assert!(waits["why"].as_str().is_some_and(|why| why.contains("no luck today")), "{waits}");
    let status = vm.wait_status("it waits", |status| status["next_start"].is_string())?;
    assert_eq!((&status["state"], &status["next_start"]), (&"recovering".into(), &waits["next_start"]), "{status}");
    assert!(status["state_why"].as_str().is_some_and(|why| why.contains("no luck today")), "{status}");
    vm.cli(&["reboot", vm.name(), "--no-wait"])?;
    let longer = |status: &Value| status["next_start"].is_string() && status["next_start"] != waits["next_start"];
    vm.wait_status("it waits longer", longer)?;

    relent();
    vm.reboot()?;
    vm.wait_boots(2)?;
    vm.sh("mkdir -p /d && mount -o ro /dev/vda /d && probe verify /d/kept.bin 3")?;
    let status = vm.status()?;
    assert!(status["ember"]["pages_served"].as_u64() >= Some((8 << 20) / 4096), "{status}");
    vm.has_no_disk_errors()?;
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    Ok(())
}

/// A loop is what the test makes of it, however slow the host: all guests together live less than a day.
fn crash_loop(name: &str, delay_s: i64) -> TestVmBuilder {
    let builder = TestVm::busybox(name).crash_setting("loop_count", 2).crash_setting("loop_window_s", 86_400);
    builder.crash_setting("loop_delay_s", delay_s).crash_setting("loop_delay_max_s", 86_400)
}

/// Crashes the incarnation that has just begun; returns the word of the loop that this closes.
fn crash_again(vm: &TestVm, incarnation: u64) -> Result<Value> {
    let began = |event: &Value| event["kind"] == "incarnation_started" && event["incarnation"] == incarnation;
    vm.wait_event("the next life", began)?;
    vm.kill_qemu()?;
    if incarnation == 1 {
        return Ok(Value::Null);
    }
    vm.wait_event("a crash loop", |event| event["kind"] == "crash_loop" && event["incarnation"] == incarnation)
}

#[test]
fn a_machine_that_keeps_crashing_waits_longer_each_time_or_for_an_order() -> Result<()> {
    let vm = crash_loop("loop", 3600).boot()?;
    crash_again(&vm, 1)?;
    let told = crash_again(&vm, 2)?;
    assert_eq!(told["delay_s"], 3600, "{told}");
    let status = vm.status()?;
    assert_eq!((&status["state"], &status["qemu"]), (&"recovering".into(), &Value::Null), "{status}");
    assert_eq!(status["next_start"], told["next_start"], "{status}");
    let page = vm.cli(&["status", "loop"])?;
    assert!(page.contains("crash loop") && page.contains("`hearth reboot`"), "{page}");
    let refused = vm.cli_output(&["crash", "loop"])?;
    assert!(refused.status != 0 && refused.text().contains("the machine is recovering"), "{}", refused.text());

    vm.reboot()?;
    let status = vm.status()?;
    assert_eq!((&status["state"], &status["next_start"]), (&"running".into(), &Value::Null), "{status}");
    assert_eq!(crash_again(&vm, 3)?["delay_s"], 7200, "it is still the same loop");
    assert_eq!(vm.stop()?.code(), Some(0));
    assert_eq!(memory_files(&vm), [] as [&str; 0]);
    let before = last_sequence(&vm);
    vm.restart_keeper()?;
    vm.wait_event("the next start", |event| {
        event["kind"] == "incarnation_started" && event["sequence"].as_u64() > Some(before)
    })
    .map(drop)
}

#[test]
fn a_machine_that_backed_off_starts_by_itself_when_its_time_has_come() -> Result<()> {
    let vm = crash_loop("loop-time", 1).boot()?;
    crash_again(&vm, 1)?;
    crash_again(&vm, 2)?;
    vm.wait_incarnation(3)?;
    let phases = vm.explain()?["recovery"]["phases"].to_string();
    assert!(phases.contains("back-off"), "{phases}");
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    Ok(())
}
