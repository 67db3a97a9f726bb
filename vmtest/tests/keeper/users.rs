//! `qemu_user = "auto"`: every machine's QEMU runs as a user of its own.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hearth_vmtest::{Disk, Drives, Result, TestVm, artifacts, write_program};

use super::take_over;

/// The user of a machine's QEMU, which has the same number as its group.
fn user_of(vm: &TestVm) -> Result<u32> {
    let qemu = vm.qemu_pid()?.as_raw_nonzero();
    let status = fs::read_to_string(format!("/proc/{qemu}/status")).expect("QEMU runs");
    let ids = |key: &str| -> Vec<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("every kernel has it");
        line.split_whitespace().map(|id| id.parse().expect("a number")).collect()
    };
    let users = ids("Uid:");
    let all = [&users[..], &ids("Gid:"), &ids("Groups:")].concat();
    assert!(all.len() == 9 && all.iter().all(|id| *id == users[0]), "QEMU has one user and one group: {status:?}");
    Ok(users[0])
}

/// The users that machines have claimed on this host, each with the runtime folder of its machine.
fn claims() -> Vec<(String, String)> {
    let claims = fs::read_dir("/run/hearth-users").into_iter().flatten().flatten();
    let claims = claims.filter_map(|claim| Some((claim.path(), fs::read_to_string(claim.path()).ok()?)));
    claims.map(|(path, owner)| (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), owner)).collect()
}

/// Whether a process of this user can write to the path.
fn can_write(user: u32, path: &Path) -> bool {
    let mut command = Command::new("test");
    command.arg("-w").arg(path).uid(user).gid(user);
    command.status().expect("every host has test(1)").success()
}

#[test]
fn machines_have_users_of_their_own() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make QEMU become another user");
        return Ok(());
    }
    let machine = |name| TestVm::busybox(name).memory_mib(128).setting("qemu_user", "auto").disk(Disk::empty(8));
    let one = machine("alone").boot()?;
    let two = machine("apart").beside(&one).boot()?;
    let (first, second) = (user_of(&one)?, user_of(&two)?);
    assert_ne!(first, second);
    let runtime = |vm: &TestVm| vm.runtime_root().join(vm.name());
    let disk = |vm: &TestVm| runtime(vm).join("disk-disk0.sock");
    // The operator gives access to the parents of a machine's folders; the keeper to the folders themselves.
    let open = |folder: &Path| fs::set_permissions(folder, Permissions::from_mode(0o711)).expect("our own folder");
    for vm in [&one, &two] {
        open(vm.folder());
        open(vm.memory_folder().parent().expect("a folder of this test"));
    }
    assert!(can_write(first, &disk(&one)) && can_write(second, &disk(&two)), "each QEMU can reconnect to its disk");
    let files = |vm: &TestVm| -> Vec<PathBuf> {
        let folders = [runtime(vm), vm.memory_folder().to_owned()];
        let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).expect("it is there"));
        entries.map(|entry| entry.expect("an entry").path()).collect()
    };
    for file in files(&two) {
        assert!(!can_write(first, &file), "{}", file.display());
    }
    // A machine keeps its user under its next keeper, in its next QEMU and in its next incarnation.
    let nonce = one.nonce()?;
    one.kill_keeper()?;
    take_over(&one)?;
    assert_eq!((one.nonce()?, user_of(&one)?), (nonce, first), "QEMU reconnects to its disks");
    one.sh("dd if=/dev/zero of=/dev/vda bs=1M count=4 conv=fsync")?;
    one.rejuvenate()?;
    assert_eq!(user_of(&one)?, first);
    one.reboot_forced()?;
    one.wait_incarnation(2)?;
    assert_eq!(user_of(&one)?, first);
    assert!(one.stop_at_once()?.success());
    let users: Vec<_> = claims().into_iter().map(|(user, _)| user).collect();
    assert!(users.contains(&second.to_string()) && !users.contains(&first.to_string()), "{users:?}");
    one.restart_keeper()?;
    one.wait_running()?;
    assert_eq!(user_of(&one)?, first);
    Ok(())
}

#[test]
fn failed_start_gives_its_user_back() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can make QEMU become another user");
        return Ok(());
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (qemu, program) = (folder.path().join("qemu"), artifacts::qemu()?.display().to_string());
    let refusal = "echo no luck today >&2; exit 1";
    let script = format!("#!/bin/sh\ncase \"$*\" in *memory-backend-file*) {refusal};; esac\nexec {program} \"$@\"\n");
    write_program(&qemu, &script);
    fs::set_permissions(folder.path(), Permissions::from_mode(0o711)).expect("our own folder");
    let builder = TestVm::busybox("unlucky").memory_mib(128).setting("qemu_user", "auto");
    let vm = builder.setting("qemu", qemu.display().to_string()).start()?;
    assert_eq!(vm.wait_keeper_end()?.code(), Some(1), "{}", vm.keeper_log());
    assert!(vm.keeper_log().contains("no luck today"), "{}", vm.keeper_log());
    let root = vm.runtime_root().display().to_string();
    assert_eq!(claims().into_iter().find(|(_, owner)| owner.starts_with(&root)), None);
    Ok(())
}
