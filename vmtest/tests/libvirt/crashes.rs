//! The guest panics: dump, next guest, and who ends that.

use std::path::Path;

use hearth_api::{DumpState, EndCause, EventKind, MachineState};
use hearth_recovery::vmcore::VmcoreFile;
use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_vmtest::libvirt::LibvirtVm;
use hearth_vmtest::{Drives, Result};

use super::{Files, assert_within_budget, wait_off, wrap_virsh};

#[test]
fn panic_is_dumped_beside_the_next_guest() -> Result<()> {
    let loops = "loop_count = 2\nloop_delay_s = 3";
    let Some(files) = Files::running_with("panics", "", loops)? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    files.verify()?;
    let pid = vm.qemu_pid()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    assert_ne!(vm.qemu_pid()?, pid);
    files.assert_warm()?;
    let dumped = files.wait_dump(1)?;
    assert_eq!((dumped.state, dumped.level, dumped.excluded.unjudged), (DumpState::Complete, 31, 0), "{dumped:?}");
    assert!(dumped.panic.as_deref().is_some_and(|why| why.contains("sysrq triggered crash")), "{dumped:?}");
    assert_eq!(dumped.warnings, [""; 0], "{dumped:?}");
    assert_dump(Path::new(&dumped.file), 1);
    let status = vm.status()?;
    assert_eq!((status.incarnation, status.memory.held_bytes), (2, 0), "{status:?}");
    assert_within_budget(vm)?;
    let recovery = status.last_recovery.expect("it has recovered");
    assert_eq!((recovery.cause, recovery.warm), (EndCause::Panic, true), "{recovery:?}");
    assert_eq!(recovery.dump.map(|dump| dump.file), Some(dumped.file));
    let harvest = recovery.phases.iter().find(|phase| phase.phase == "harvest");
    assert!(harvest.is_some_and(|harvest| harvest.duration_ms < recovery.duration_ms), "{:?}", recovery.phases);
    let named = |name: &str| recovery.phases.iter().any(|phase| phase.phase == name);
    assert!(["harvest", "drain", "bank", "plan", "write", "finish"].into_iter().all(named), "{:?}", recovery.phases);
    // The second crash is a loop: the domain is off for a while.
    vm.panic()?;
    vm.wait_state("shut off")?;
    let waits = vm.status()?;
    assert_eq!(waits.state, MachineState::Recovering);
    assert!(waits.next_start.is_some() && waits.state_why.is_some_and(|why| why.contains("virsh start panics")));
    vm.wait_next_boot()?;
    files.assert_warm()?;
    assert!(vm.events()?.iter().any(|record| matches!(record.event, EventKind::CrashLoop { delay_s: 3, .. })));
    assert_eq!(files.wait_dump(2)?.state, DumpState::Complete);
    let left = vm.must(&["ls", "/run/hearth/panics"], "")?;
    assert!(!left.contains("registers") && !left.contains("harvest"), "{left}");
    Ok(())
}

/// The dump is read with Hearth's own reader.
#[track_caller]
pub fn assert_dump(file: &Path, processors: usize) {
    let dump = VmcoreFile::open(file).expect("the dump can be read");
    assert!(dump.is_complete());
    let registers: Vec<_> = dump.notes().registers().collect();
    assert!(
        registers.len() == processors && registers[0].get("rip").is_some_and(|rip| rip >> 63 == 1),
        "{registers:x?}"
    );
    let linux = Linux::find(&dump, &dump.notes().to_bytes()).expect("it holds a Linux kernel");
    let lines = linux.log().expect("the kernel's log is in it");
    assert_eq!(log::panic_reason(&lines), Some("sysrq triggered crash"));
}

/// Nobody looks after it, its keeper is another one, and its QEMU hangs.
#[test]
fn crashed_guest_waits_for_the_host_daemon() -> Result<()> {
    let crash = "loop_count = 2\nloop_delay_s = 5";
    let Some(files) = Files::running_with("waits", "", crash)? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    files.wait_noted()?;
    vm.panic()?;
    vm.wait_state("crashed")?;
    vm.kill_keeper()?;
    vm.start_keeper()?;
    let status = vm.status()?;
    assert_eq!((status.state, status.incarnation), (MachineState::Paused, 1));
    let why = status.state_why.unwrap_or_default();
    assert!(why.contains("systemctl start hearth-host") && why.contains("virsh destroy waits"), "{why}");
    vm.must(&["kill", "-STOP", &vm.qemu_pid()?], "")?;
    vm.start_host()?;
    vm.wait_next_boot()?;
    files.assert_warm()?;
    let dumped = files.wait_dump(1)?;
    assert_eq!(dumped.state, DumpState::Complete);
    assert!(dumped.warnings.iter().any(|warning| warning.contains("no registers")), "{dumped:?}");
    let dump = VmcoreFile::open(Path::new(&dumped.file)).expect("the dump can be read");
    assert!(dump.is_complete() && dump.notes().registers().count() == 0);
    // Its next keeper dies before its next start.
    vm.panic()?;
    vm.wait_until("the wait of a crash loop", || Ok(vm.status()?.next_start.is_some()))?;
    vm.kill_keeper()?;
    vm.wait_next_boot()?;
    files.verify()
}

/// Its definition is libvirt's own again, and its keeper ends with the crashed guest.
#[test]
fn domain_detached_while_it_ran_comes_back_from_its_crash() -> Result<()> {
    let Some(files) = Files::running("left")? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    files.verify()?;
    vm.hearth(&["detach", "left"])?;
    vm.panic()?;
    vm.wait_next_boot()?;
    files.verify()?;
    assert_eq!(vm.try_hearth(&["status", "left"])?.0, 3, "it has no keeper");
    Ok(())
}

const SLOW_LOOP: &str = "loop_count = 2\nloop_delay_s = 1000\ncompression = \"none\"";

/// The operator ends the crashed guest while `hearth host` has its registers read. That is no next start, whatever becomes of the keeper.
#[test]
fn crashed_domain_that_is_destroyed_early_stays_off() -> Result<()> {
    let name = "early";
    let Some(files) = Files::running_with(name, "", SLOW_LOOP)? else { return Ok(()) };
    let vm = &files.vm;
    // Reading the registers takes as long as `hearth host` waits.
    wrap_virsh(vm, "case \" $* \" in *' dump '*) exec sleep 60 ;; esac\nexec \"$real\" \"$@\"\n")?;
    vm.start_host()?;
    let is_read = || Ok(vm.must(&["ls", "/run/hearth/early"], "")?.contains("harvest"));
    for keeper_dies in [false, true] {
        files.verify()?;
        vm.panic()?;
        vm.wait_until("the registers are read", is_read)?;
        assert_eq!(vm.status()?.state, MachineState::Paused);
        if keeper_dies {
            vm.kill_keeper()?;
        }
        vm.virsh("destroy", &[])?;
        if keeper_dies {
            vm.start_keeper()?;
        }
        vm.wait_until("`hearth host` gives up", || Ok(!is_read()?))?;
        assert_stays_off(vm, name)?;
        vm.start()?;
    }
    Ok(())
}

/// A full folder holds up the dump, and with it the dead guest's memory. The domain is ended once more meanwhile.
#[test]
fn domain_that_is_destroyed_during_its_dump_stays_off() -> Result<()> {
    let name = "during";
    let Some(files) = Files::running_with(name, "", SLOW_LOOP)? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    let dumps = files.dump_folder().display().to_string();
    vm.must(&["mkdir", "-p", &dumps], "")?;
    vm.must(&["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", &dumps], "")?;
    files.verify()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    vm.wait_until("the dump waits", || Ok(vm.status()?.dumps.iter().any(|dump| dump.state == DumpState::Waiting)))?;
    vm.virsh("destroy", &[])?;
    wait_off(vm)?;
    assert!(vm.status()?.memory.held_bytes > 0, "the dump goes on");
    assert_stays_off(vm, name)
}

/// There is no QEMU to end then, so it is Hearth that cancels the start.
#[test]
fn stop_cancels_the_start_after_a_crash() -> Result<()> {
    let name = "cancels";
    let Some(files) = Files::running_with(name, "", SLOW_LOOP)? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    vm.panic()?;
    vm.wait_until("the wait of a crash loop", || Ok(vm.status()?.next_start.is_some()))?;
    assert!(vm.virsh("destroy", &[]).is_err(), "libvirt has nothing to end");
    vm.hearth(&["stop", name, "--force"])?;
    assert_stays_off(vm, name)?;
    vm.start()?;
    files.verify()
}

/// The domain is off, nobody is to start it, and `hearth stop` leaves no keeper and no memory.
#[track_caller]
fn assert_stays_off(vm: &LibvirtVm, name: &str) -> Result<()> {
    if let (0, said) = vm.try_hearth(&["status", name, "--json"])? {
        assert!(said.contains(r#""state":"stopped""#) && !said.contains(r#""next_start":""#), "{said}");
        vm.hearth(&["stop", name, "--force"])?;
    }
    assert_eq!(vm.try_hearth(&["status", name])?.0, 3, "it has no keeper");
    vm.wait_state("shut off")?;
    let journal = vm.must(&["cat", &format!("/run/hearth/{name}/journal.json")], "")?;
    assert!(!journal.contains("reboot"), "no start is noted: {journal}");
    let left = vm.must(&["sh", "-c", "ls -R /dev/shm /run/hearth; pgrep -l qemu-system || true"], "")?;
    assert!(!left.contains("ledger") && !left.contains("registers") && !left.contains("qemu-system"), "{left}");
    Ok(())
}

/// Runs instead of the guest's init. The kernel panics when it ends, and has no driver for the disk yet.
const EARLY_PANIC: &str =
    "rdinit=/bin/busybox -- sh -c &quot;for m in pvpanic pvpanic_mmio; do insmod /modules/$m.ko; done&quot;";

/// Firmware does not use the disk either: it boots from elsewhere. Nothing is known of the guest, and it comes back all the same.
#[test]
fn guest_that_panics_before_it_uses_its_disk_comes_back() -> Result<()> {
    let Some(files) = Files::define("soon")? else { return Ok(()) };
    let vm = &files.vm;
    vm.hearth(&["attach", "soon", "--yes"])?;
    vm.start_host()?;
    let attached = vm.virsh("dumpxml", &["--inactive"])?;
    let drive = "<disk type='file' device='cdrom'><target dev='sda' bus='sata'/><boot order='1'/></disk></devices>";
    let next = attached.replace("<boot dev='hd'/>", "").replace("</devices>", drive);
    let panics = next.replace("</cmdline>", &format!(" {EARLY_PANIC}</cmdline>"));
    assert!(next != attached && panics != next, "{attached}");
    vm.must(&["virsh", "define", "/dev/stdin"], &panics)?;
    vm.virsh("start", &[])?;
    // Only the guest that runs already panics.
    vm.must(&["virsh", "define", "/dev/stdin"], &next)?;
    vm.wait_next_boot()?;
    files.verify()?;
    let events = vm.events()?;
    let any = |is: fn(&EventKind) -> bool| events.iter().any(|record| is(&record.event));
    assert!(any(|event| matches!(event, EventKind::GuestPanicked)), "{events:?}");
    assert!(
        any(|event| matches!(event, EventKind::DumpSkipped { why } if why.contains("had not used its disks"))),
        "{events:?}"
    );
    let status = vm.status()?;
    assert_eq!((status.state, status.incarnation), (MachineState::Running, 1), "{status:?}");
    Ok(())
}

/// Its daemon dies before it notes the start, and after it, when it does not know QEMU's pid yet.
#[test]
fn domain_comes_back_though_libvirt_dies_while_it_starts_it() -> Result<()> {
    let name = "unfinished";
    let Some(files) = Files::running_with(name, "", "loop_count = 2\nloop_delay_s = 3")? else { return Ok(()) };
    let vm = &files.vm;
    vm.start_host()?;
    vm.panic()?;
    vm.wait_next_boot()?;
    let note = format!("/run/libvirt/qemu/{name}.xml.new");
    for number in [1, 2] {
        files.verify()?;
        vm.panic()?;
        vm.wait_until("the wait of a crash loop", || Ok(vm.status()?.next_start.is_some()))?;
        vm.wait_state("shut off")?;
        vm.kill_libvirt_at(("rename", number), &note)?;
        vm.wait_libvirt_end()?;
        vm.start_libvirt()?;
        if number == 2 {
            vm.wait_until("what to do", || vm.mend_lost_start())?;
        }
        vm.wait_next_boot()?;
        files.assert_warm()?;
    }
    Ok(())
}
