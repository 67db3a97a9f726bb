//! Memory folders: shared by several machines, writable by everybody, used by a machine of the same name.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, patience, processes};
use toml::Value;

use super::take_over;

/// Runs `hearth ARGUMENTS` with another runtime root, which must be refused. If it is not, the time limit ends the keeper.
fn refused(root: &Path, arguments: &[&Path], says: &str) -> Result<()> {
    let mut command = Command::new("timeout");
    command.args(["-k", "1", "40"]).arg(artifacts::hearth()?).arg("--runtime-root").arg(root).args(arguments);
    let ended = command.output().expect("it can be started");
    let text = String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned();
    assert!(!ended.status.success() && text.contains(says), "{arguments:?}: {text}");
    Ok(())
}

#[test]
fn machines_can_share_a_memory_folder() -> Result<()> {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let shared = folder.path();
    fs::set_permissions(shared, Permissions::from_mode(0o1777)).expect("it is ours");
    let others = ["ram-notes.txt", "parked-cars.csv", "ledger-7", "owner"].map(|name| shared.join(name));
    others.iter().for_each(|file| fs::write(file, "precious").expect("it is writable"));
    let machine = |name| TestVm::busybox(name).memory_mib(128).setting("memory_folder", shared.display().to_string());
    let one = machine("one").boot()?;
    let nonce = one.nonce()?;
    let two = machine("two").beside(&one).boot()?;
    two.reboot_forced()?;
    two.wait_incarnation(2)?;
    assert!(two.stop_at_once()?.success());
    assert_eq!(one.nonce()?, nonce, "the other machine's end does not affect this one");
    one.kill_keeper()?;
    take_over(&one)?;
    assert_eq!(one.nonce()?, nonce, "it is the same guest");
    assert!(one.stop_at_once()?.success());
    assert!(others.iter().all(|file| fs::read(file).is_ok_and(|text| text == b"precious")));
    assert_eq!(fs::metadata(shared).expect("it is there").permissions().mode() & 0o7777, 0o1777);
    Ok(())
}

#[test]
fn second_machine_of_a_name_is_refused() -> Result<()> {
    let vm = TestVm::busybox("twice").memory_mib(128).boot()?;
    let nonce = vm.nonce()?;
    let (elsewhere, snapshot, clone) =
        (vm.folder().join("run2"), vm.folder().join("snapshot"), vm.folder().join("clone"));
    let config = vm.folder().join("machine.toml");
    vm.save(&snapshot)?;
    let run = [Path::new("run"), &config];
    let restore = [Path::new("restore"), &snapshot, Path::new("--folder"), &clone];
    let runs = "belongs to another machine: the keeper of ";
    refused(&elsewhere, &run, runs)?;
    refused(&elsewhere, &restore, runs)?;
    vm.kill_keeper()?;
    // The guest lives, so neither another guest nor a restored one may start.
    let qemu = "belongs to another machine: its QEMU (pid ";
    refused(&elsewhere, &run, qemu)?;
    refused(&elsewhere, &restore, qemu)?;
    refused(&vm.runtime_root(), &restore, "already has a guest, in a QEMU (pid ")?;
    assert!(!clone.exists());
    take_over(&vm)?;
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    Ok(())
}

/// Names in a folder, sorted.
fn files_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("it is there");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect();
    names.sort();
    names
}

#[test]
fn stopped_machine_leaves_only_listed_files() -> Result<()> {
    let nvram: Value =
        vec![Value::Table([("size".into(), "4MiB".into()), ("name".into(), "log".into())].into_iter().collect())]
            .into();
    let vm = TestVm::busybox("tidy")
        .memory_mib(128)
        .disk(Disk::empty(8))
        .setting("guest_agent", true)
        .setting("nvram", nvram);
    let vm = vm.boot()?;
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    vm.kill_qemu()?;
    vm.wait_incarnation(3)?;
    vm.rejuvenate()?;
    vm.cli(&["upgrade-keeper", vm.name()])?;
    vm.wait_running()?;
    vm.kill_foreign_keeper()?;
    take_over(&vm)?;
    let qemu = vm.qemu_pid()?;
    vm.kill_keeper()?;
    processes::kill(qemu).expect("it runs");
    assert!(processes::wait_end(qemu, patience(20)));
    vm.restart_keeper()?;
    vm.wait_incarnation(4)?;
    let runtime = vm.runtime_root().join(vm.name());
    let sockets = |name: &&String| name.starts_with("qmp-");
    assert_eq!(files_in(&runtime).iter().filter(sockets).count(), 1, "{:?}", files_in(&runtime));
    assert!(vm.stop_at_once()?.success());
    assert_eq!(vm.runtime_files(), ["events.jsonl", "journal.json", "keeper.lock", "preload.so"]);
    assert_eq!(files_in(vm.memory_folder()), ["nvram-log", "owner"]);
    Ok(())
}
