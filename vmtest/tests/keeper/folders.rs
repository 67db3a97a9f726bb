//! Memory folders: one that several machines name, one that belongs to everybody, one of a machine with the same name.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use hearth_vmtest::{Drives, Result, TestVm, artifacts};

use super::take_over;

/// `hearth ARGUMENTS` for another runtime root: it must refuse. Without the refusal a keeper would run until it is ended.
fn refused(root: &Path, arguments: &[&Path], says: &str) -> Result<()> {
    let mut command = Command::new("timeout");
    command.args(["-k", "1", "40"]).arg(artifacts::hearth()?).arg("--runtime-root").arg(root).args(arguments);
    let ended = command.output().expect("it can be started");
    let text = String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()).into_owned();
    assert!(!ended.status.success() && text.contains(says), "{arguments:?}: {text}");
    Ok(())
}

#[test]
fn machines_share_a_memory_folder_without_harm() -> Result<()> {
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
    assert_eq!(one.nonce()?, nonce, "the other machine's life and end are nothing to it");
    one.kill_keeper()?;
    take_over(&one)?;
    assert_eq!(one.nonce()?, nonce, "it is the same guest");
    assert!(one.stop_at_once()?.success());
    assert!(others.iter().all(|file| fs::read(file).is_ok_and(|text| text == b"precious")));
    assert_eq!(fs::metadata(shared).expect("it is there").permissions().mode() & 0o7777, 0o1777);
    Ok(())
}

#[test]
fn a_machine_of_the_same_name_is_kept_out() -> Result<()> {
    let vm = TestVm::busybox("twice").memory_mib(128).boot()?;
    let nonce = vm.nonce()?;
    let (elsewhere, snapshot, clone) =
        (vm.folder().join("run2"), vm.folder().join("snapshot"), vm.folder().join("clone"));
    let config = vm.folder().join("machine.toml");
    vm.save(&snapshot)?;
    let run = [Path::new("run"), &config];
    let restore = [Path::new("restore"), &snapshot, Path::new("--folder"), &clone];
    let runs = "is another machine's: the keeper of ";
    refused(&elsewhere, &run, runs)?;
    refused(&elsewhere, &restore, runs)?;
    vm.kill_keeper()?;
    // Its guest lives: there is nothing to be restored, and nobody else's guest to be begun.
    let qemu = "is another machine's: its QEMU (pid ";
    refused(&elsewhere, &run, qemu)?;
    refused(&elsewhere, &restore, qemu)?;
    refused(&vm.runtime_root(), &restore, "has a guest already, in a QEMU (pid ")?;
    assert!(!clone.exists());
    take_over(&vm)?;
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    Ok(())
}
