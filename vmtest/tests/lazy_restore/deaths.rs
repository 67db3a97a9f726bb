//! Keepers killed or stopped during a restore: the next one starts over or continues, and the guest is the one that was saved.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use hearth_recovery::lazy_restore::Step;
use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, event, patience, processes};
use loopback_s3::Wire;

use super::faults::saved;
use super::object_store::Stand;
use super::{SEED, comes_whole, fill, verify, wait_restore};

/// Whether the guest may have run after this step.
fn may_have_run(step: Step) -> bool {
    match step {
        Step::Make | Step::Note | Step::Prefetch | Step::Launch | Step::LetIn => false,
        Step::Begin | Step::Run | Step::Fill | Step::Finish => true,
    }
}

fn check(vm: &TestVm, snapshot: &Path, step: Step, mode: &str, nonce: &str) -> Result<()> {
    let what = format!("{} {mode}", step.name());
    let clone = vm.restore_with(snapshot, step.name(), &[mode], &[("HEARTH_DRILL_DIE_AFTER", step.name())])?;
    let ended = clone.wait_keeper_end()?;
    assert_eq!(ended.code(), None, "{what}: the keeper should have killed itself: {ended}");
    if matches!(step, Step::Make | Step::Note) {
        // As after a power cut: the runtime folder holds nothing that the restore needs.
        let _ = fs::remove_file(clone.runtime_root().join(clone.name()).join("journal.json"));
    }
    clone.restart_keeper()?;
    clone.wait_running()?;
    // The event comes shortly after the machine runs.
    let took_over = event!(KeeperTookOver);
    if may_have_run(step) {
        clone.wait_event("a keeper that took over", took_over)?;
    } else {
        clone.wait_event("a restored guest", event!(Restored))?;
    }
    let took_over = clone.events().iter().find_map(took_over).is_some();
    assert_eq!(took_over, may_have_run(step), "{what}");
    clone.await_console()?;
    assert_eq!(clone.nonce()?, nonce, "{what}: it is the same guest");
    verify(&clone)?;
    clone.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    clone.wait_event("all memory is there", event!(RestoreComplete))?;
    clone.stop_at_once()?;
    Ok(())
}

fn check_all(name: &str, mode: &str, happens: impl Fn(Step) -> bool) -> Result<()> {
    let vm = TestVm::busybox(name).disk(Disk::empty(16)).running()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    fill(&vm, 64)?;
    vm.save_and_stop(&snapshot)?;
    for step in Step::ALL.into_iter().filter(|step| happens(*step)) {
        check(&vm, &snapshot, step, mode, &nonce)?;
    }
    Ok(())
}

#[test]
fn lazy_restore_survives_keeper_killed_anytime() -> Result<()> {
    check_all("lazydeaths", "--lazy", |step| step != Step::Prefetch)
}

#[test]
fn eager_restore_survives_keeper_killed_anytime() -> Result<()> {
    check_all("eagerdeaths", "--eager", |step| !matches!(step, Step::Fill | Step::Finish))
}

#[test]
fn next_keeper_restores_the_missing_memory() -> Result<()> {
    let (vm, nonce, snapshot) = saved("killed")?;
    // A trace prevents the backfill, so that some memory is always missing.
    let clone = vm.restore(&snapshot, "orphan", &["--trace", "600"])?;
    clone.wait_running()?;
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {}", SEED))?;
    wait_restore(&clone, "touched pages", |restore| restore.pages_lazy > 2000)?;
    clone.restart_keeper()?;
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn guest_silent_to_its_next_keeper_boots_without_the_restore() -> Result<()> {
    const WRITES: &str = "dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1";
    let vm = TestVm::busybox("silent").disk(Disk::empty(16)).running()?;
    let snapshot = vm.folder().join("snapshot");
    fill(&vm, 64)?;
    vm.save_and_stop(&snapshot)?;
    // A trace prevents the backfill, so that the next keeper continues the restore.
    let clone = vm.restore(&snapshot, "mute", &["--trace", "600"])?;
    clone.wait_running()?;
    clone.freeze_qemu()?;
    // Without its socket nobody waits a minute for QEMU.
    let socket = clone.runtime_root().join(clone.name()).join("qmp-1.sock");
    fs::remove_file(socket).expect("QEMU listens there");
    clone.restart_keeper()?;
    let why = clone.wait_event("a power cut", event!(PowerCut { why } => why))?;
    assert!(why.ends_with("stopped by SIGSTOP or a debugger"), "{why}");
    clone.wait_boots(1)?;
    assert_eq!(clone.status()?.restore, None);
    clone.sh(WRITES)?;
    // The note of the restore is gone too.
    clone.restart_keeper()?;
    clone.wait_running()?;
    clone.await_console()?;
    clone.sh(WRITES).map(drop)
}

#[test]
fn keeper_stops_while_it_loads_all_memory() -> Result<()> {
    let stand = Stand::new();
    let (vm, nonce) = stand.saved("stopped", 64)?;
    // This takes about half a minute.
    stand.server.set_wire(Wire::Slow(2 << 20));
    let clone = stand.clone(&vm, "slow", "cache", &["--eager"])?;
    let percent = clone.wait_event("progress", event!(RestoreProgress { percent, .. } => percent))?;
    assert!(percent < 100.0, "{percent}");
    let asked = clone.cli_output(&["status", clone.name()])?;
    assert!(
        asked.status == 0 && asked.text().contains("starting (loading its memory before the guest runs"),
        "{}",
        asked.text()
    );
    clone.terminate_keeper()?;
    assert_eq!(clone.wait_keeper_end()?.code(), Some(1));
    let (said, began) = (clone.keeper_log(), clone.events().iter().find_map(event!(IncarnationStarted)));
    assert!(
        began.is_none() && said.contains("cancelled before the guest ran; start again with `hearth run "),
        "{said}"
    );
    stand.server.set_wire(Wire::Whole);
    another_machine_of_its_name_boots(&vm, &clone, &nonce)?;
    clone.restart_keeper()?;
    clone.wait_running()?;
    clone.await_console()?;
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)
}

/// After a cancelled restore another file of the machine's name is another machine: it boots from its own disk, and knows nothing
/// of the snapshot.
fn another_machine_of_its_name_boots(saved: &TestVm, cancelled: &TestVm, nonce: &str) -> Result<()> {
    let [file, image] = ["another.toml", "another.img"].map(|name| cancelled.folder().join(name));
    fs::write(&image, [b"its own disk\n".to_vec(), vec![0; 1 << 20]].concat()).expect("our own folder");
    let text = fs::read_to_string(saved.config_file()).expect("the saved machine has one");
    let mut another: toml::Table = text.parse().expect("it was a configuration");
    another.insert("name".into(), cancelled.name().into());
    another.insert("memory_folder".into(), cancelled.memory_folder().display().to_string().into());
    let disk = [("name", "own"), ("path", &image.display().to_string())].map(|(key, value)| (key.into(), value.into()));
    another.insert("disks".into(), vec![toml::Value::Table(disk.into_iter().collect())].into());
    fs::write(&file, another.to_string()).expect("our own folder");
    cancelled.run_configuration(&file)?;
    cancelled.wait_boots(1)?;
    assert_ne!(cancelled.nonce()?, nonce, "the guest of the snapshot");
    assert_eq!(cancelled.sh("head -n 1 /dev/vda; ls /tmp")?.trim(), "its own disk", "it has memory of the snapshot");
    cancelled.stop_at_once().map(drop)
}

#[test]
fn keeper_refuses_another_snapshot_in_its_place() -> Result<()> {
    let vm = TestVm::busybox("exchanged").running()?;
    let nonce = vm.nonce()?;
    let [snapshot, other, away] = ["snapshot", "other", "away"].map(|name| vm.folder().join(name));
    fill(&vm, 64)?;
    vm.save(&snapshot)?;
    vm.save(&other)?;
    vm.stop_at_once()?;
    // A trace prevents the backfill, so that some memory is always missing.
    let clone = vm.restore(&snapshot, "orphan", &["--trace", "600"])?;
    clone.wait_running()?;
    clone.kill_keeper()?;
    let exchange = |from: &Path, to: &Path| fs::rename(from, to).expect("it is there");
    exchange(&snapshot, &away);
    exchange(&other, &snapshot);
    clone.restart_keeper()?;
    assert_eq!(clone.wait_keeper_end()?.code(), Some(1));
    let said = clone.keeper_log();
    assert!(said.contains("is not the snapshot that this machine is being restored from"), "{said}");
    exchange(&snapshot, &other);
    exchange(&away, &snapshot);
    clone.restart_keeper()?;
    clone.wait_running()?;
    clone.await_console()?;
    let verifying = clone.guest().start(&format!("probe verify /tmp/memory {SEED}"))?;
    comes_whole(&clone, verifying, &nonce)
}

#[test]
fn next_rehearsal_removes_what_a_killed_one_left() -> Result<()> {
    let vm = TestVm::busybox("rehearser").memory_mib(128).disk(Disk::empty(16)).boot()?;
    let (snapshot, scratch) = (vm.folder().join("snapshot"), vm.folder().join("scratch"));
    vm.save_and_stop(&snapshot)?;
    fs::create_dir(&scratch).expect("a folder");
    let mut rehearsal = Command::new(artifacts::hearth()?);
    rehearsal.arg("--runtime-root").arg(vm.runtime_root()).arg("rehearse").arg(&snapshot);
    let mut rehearsal = rehearsal.args(["--for", "600", "--scratch"]).arg(&scratch).spawn().expect("it can be started");
    let memory = vm.memory_folder().with_file_name(format!("rehearsal-{}", rehearsal.id()));
    let deadline = Instant::now() + patience(20);
    while processes::mentioning(&memory).is_empty() {
        assert!(Instant::now() < deadline, "the rehearsal starts no QEMU");
        std::thread::sleep(Duration::from_millis(20));
    }
    rehearsal.kill().and_then(|()| rehearsal.wait()).expect("it is a child of this process");
    assert!(!processes::mentioning(&memory).is_empty() && memory.exists(), "the QEMU of the killed rehearsal lives on");
    vm.cli(&["rehearse", &snapshot.display().to_string(), "--scratch", &scratch.display().to_string(), "--for", "1"])?;
    assert!(processes::mentioning(&memory).is_empty());
    for folder in [scratch, vm.runtime_root(), memory.parent().expect("the folder of all").to_owned()] {
        let left = fs::read_dir(&folder).expect("it is there").flatten().map(|entry| entry.file_name());
        let left: Vec<_> = left.filter(|name| name.to_string_lossy().contains("rehearsal")).collect();
        assert!(left.is_empty(), "{}: {left:?}", folder.display());
    }
    Ok(())
}
