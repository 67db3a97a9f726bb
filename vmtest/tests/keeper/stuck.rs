//! A keeper with a thread that hangs in its work: its watchdog ends it, or the machine where that was asked for.

use std::io::Write;
use std::os::unix::net::UnixStream;

use hearth_api::MachineState;
use hearth_vmtest::{Disk, Drives, Result, TestVm, event, hung, processes};
use rustix::process::Pid;

use super::{last_sequence, memory_files, signal, take_over};

/// Exit code of a keeper that its watchdog has ended (docs/commands.md).
const ENDED_BY_WATCHDOG: i32 = 70;

/// A running machine whose keeper's watchdog is so much hastier.
fn watched(name: &str, haste: &str) -> Result<TestVm> {
    let vm = TestVm::busybox(name).disk(Disk::empty(16)).running()?;
    vm.restart_keeper_with(&[("HEARTH_DRILL_HASTE", haste)])?;
    vm.wait_running()?;
    vm.await_console()?;
    Ok(vm)
}

fn keeper_of(vm: &TestVm) -> Pid {
    vm.keeper_pid().and_then(|pid| Pid::from_raw(pid as i32)).expect("the keeper runs")
}

/// The loop hangs in the answer to a request.
fn hang_main_loop(vm: &TestVm) {
    let socket = vm.runtime_root().join(vm.name()).join("api.sock");
    let ask = || {
        let mut stream = UnixStream::connect(&socket).expect("the keeper listens");
        stream.write_all(b"GET /v1/status HTTP/1.0\r\n\r\n").expect("the keeper reads");
    };
    hung::hang(keeper_of(vm), ask).expect("the keeper is our child");
}

fn hang_disk(vm: &TestVm, disk: &str) {
    let thread = hung::thread_of(keeper_of(vm), &format!("disk-{disk}")).expect("each disk has a thread");
    let read = || vm.guest().start("dd if=/dev/vda of=/dev/null bs=4k count=1 iflag=direct").map(|_| ());
    hung::hang(thread, || read().expect("the guest has a console")).expect("the keeper is our child");
}

/// The watchdog names the thread and ends the keeper; the next one goes on with the same guest.
fn keeper_ends_and_the_next_takes_over(vm: &TestVm, thread: &str, hang: impl FnOnce(&TestVm)) -> Result<()> {
    let (nonce, qemu) = (vm.nonce()?, vm.qemu_pid()?);
    hang(vm);
    assert_eq!(vm.wait_keeper_end()?.code(), Some(ENDED_BY_WATCHDOG), "{}", vm.keeper_log());
    let log = vm.keeper_log();
    let told = log.lines().find(|line| line.contains("has not responded for")).unwrap_or(&log);
    assert!(told.contains("ERROR") && told.contains(thread), "{told}");
    take_over(vm)?;
    vm.await_console()?;
    assert_eq!((vm.nonce()?, vm.qemu_pid()?), (nonce, qemu), "it is the same guest");
    vm.sh("dd if=/dev/vda of=/dev/null bs=1M count=1 iflag=direct")?;
    vm.has_no_disk_errors()
}

#[test]
fn hung_main_loop_ends_only_its_keeper() -> Result<()> {
    let vm = watched("main-hangs", "40")?;
    keeper_ends_and_the_next_takes_over(&vm, "main", hang_main_loop)
}

#[test]
fn hung_disk_thread_ends_only_its_keeper() -> Result<()> {
    let vm = watched("disk-hangs", "20")?;
    keeper_ends_and_the_next_takes_over(&vm, "disk-disk0", |vm| hang_disk(vm, "disk0"))
}

/// QEMU and keeper are gone, nothing of the guest is left, and the machine can be started again.
fn machine_has_stopped(vm: &TestVm, before: u64) -> Result<()> {
    assert_eq!(vm.wait_keeper_end()?.code(), Some(0), "{}", vm.keeper_log());
    assert!(processes::mentioning(vm.memory_folder()).is_empty(), "a QEMU without a keeper");
    let events = vm.events();
    let since: Vec<_> = events.iter().filter(|event| event.sequence > before).collect();
    let cut = since.iter().copied().find_map(event!(PowerCut { why } => why)).unwrap_or_else(|| panic!("{since:?}"));
    assert!(cut.contains("has not responded"), "{cut}");
    let stopped = event!(StateChanged { to: MachineState::Stopped, .. });
    assert!(since.iter().any(|event| stopped(event).is_some()), "{since:?}");
    let files = memory_files(vm);
    assert!(!files.iter().any(|name| name.starts_with("ram-") || name.starts_with("ledger-")), "{files:?}");
    vm.restart_keeper()?;
    vm.wait_boots(2).map(drop)
}

#[test]
fn forced_stop_works_while_main_loop_hangs() -> Result<()> {
    let vm = watched("stop-hangs", "10")?;
    let before = last_sequence(&vm);
    hang_main_loop(&vm);
    let said = vm.cli(&["stop", vm.name(), "--force"])?;
    assert!(said.contains("main loop has not responded"), "{said}");
    machine_has_stopped(&vm, before)
}

/// As systemd does it: one SIGTERM, and a good minute until it would be SIGKILL.
#[test]
fn sigterm_ends_a_machine_whose_main_loop_hangs() -> Result<()> {
    let vm = watched("term-hangs", "40")?;
    let before = last_sequence(&vm);
    hang_main_loop(&vm);
    signal(&vm);
    machine_has_stopped(&vm, before)
}

/// QEMU is gone by the time, so a next keeper would start the machine that was to stop.
#[test]
fn forced_stop_ends_a_machine_whose_disk_hangs() -> Result<()> {
    let vm = watched("stop-disk-hangs", "20")?;
    let before = last_sequence(&vm);
    hang_disk(&vm, "disk0");
    vm.cli(&["stop", vm.name(), "--force"])?;
    machine_has_stopped(&vm, before)
}
