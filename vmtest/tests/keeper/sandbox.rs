//! What a machine's QEMU and the threads that read its guest's bytes may do. What the confinement of QEMU denies is tested
//! with QEMU alone (`crates/qemu/tests/real_qemu.rs`).

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use hearth_vmtest::{Disk, Result, TestVm};

/// A number in the `status` of a process or thread.
fn number(status: &str, key: &str) -> u32 {
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("every kernel has it");
    line.trim().parse().expect("a number")
}

/// Whether each thread of a process has a filter of system calls, by name.
fn filtered(pid: u32) -> BTreeMap<String, bool> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the keeper runs").flatten();
    let read = |thread: &fs::DirEntry, what| fs::read_to_string(thread.path().join(what)).ok();
    // A thread may end meanwhile.
    let status = |thread| Some((read(&thread, "comm")?.trim().to_owned(), read(&thread, "status")?));
    threads.filter_map(status).map(|(name, status)| (name, number(&status, "Seccomp:") == 2)).collect()
}

#[test]
fn threads_that_read_foreign_bytes_are_filtered() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = home.path().join("image.qcow2").display().to_string();
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &image, "8M"]).status();
    assert!(made.expect("qemu-img is installed").success());
    let second = Disk::in_place(image.as_ref()).setting("format", "qcow2");
    let vm = TestVm::busybox("filtered").disk(Disk::empty(8)).disk(second).boot()?;
    let threads = filtered(vm.keeper_pid().expect("it runs"));
    let reads_foreign_bytes = |name: &str| name.starts_with("disk-") || name.starts_with("qmp-");
    for (name, filtered) in &threads {
        assert_eq!(*filtered, reads_foreign_bytes(name), "{name} of {threads:?}");
    }
    let images_workers = threads.keys().filter(|name| name.ends_with("-qcow2")).count();
    assert_eq!((images_workers, threads.contains_key("disk-disk0")), (1, true), "{threads:?}");
    // The loop is not affected: it starts a QEMU for the next guest.
    vm.reboot()?;
    vm.wait_incarnation(2)?;
    let qemu = fs::read_to_string(format!("/proc/{}/status", vm.qemu_pid()?.as_raw_nonzero())).expect("QEMU runs");
    assert_eq!((number(&qemu, "NoNewPrivs:"), number(&qemu, "Seccomp:")), (1, 2));
    Ok(())
}
