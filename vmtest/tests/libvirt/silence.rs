//! A QEMU that does not notice the next keeper.

use hearth_api::EventKind;
use hearth_vmtest::{Drives, Result};

use super::{Files, replace_keeper, wrap_virsh};

/// The keeper's answer to the memory table, when firmware of QEMU 7.2 starts the first disk.
const DISK_STARTS: (&str, u32) = ("sendmsg", 9);
/// Its second answer to a QEMU that connects to the disk.
const QEMU_CONNECTS: (&str, u32) = ("sendmsg", 2);

#[test]
fn guest_whose_keeper_died_while_a_disk_was_started_is_woken() -> Result<()> {
    let Some(files) = Files::define("silence")? else { return Ok(()) };
    let vm = &files.vm;
    vm.hearth(&["attach", "silence", "--yes"])?;
    vm.start_keeper_killed_at(DISK_STARTS)?;
    vm.virsh("start", &[])?;
    vm.wait_until("the keeper's end", || Ok(vm.try_hearth(&["status", "silence"])?.0 == 3))?;
    vm.start_keeper()?;
    vm.wait_until("QEMU is silent", || Ok(vm.status()?.disks.iter().any(|disk| disk.silent)))?;
    assert!(vm.guest().ready().is_empty());
    vm.start_host()?;
    vm.wait_next_boot()?;
    files.verify()?;
    // This QEMU notices no later keeper either.
    replace_keeper(vm)?;
    vm.wait_until("QEMU is silent", || Ok(vm.status()?.disks.iter().any(|disk| disk.silent)))?;
    vm.must(&["pkill", "-f", "hearth host"], "")?;
    vm.start_host()?;
    files.verify()?;
    let starts = vm.events()?.iter().filter(|record| matches!(record.event, EventKind::QemuStarted { .. })).count();
    assert_eq!(starts, 1);
    Ok(())
}

#[test]
fn qemu_that_cannot_use_its_disk_again_is_replaced() -> Result<()> {
    let Some(files) = Files::running("replaced")? else { return Ok(()) };
    let vm = &files.vm;
    files.verify()?;
    files.wait_noted()?;
    // QEMU's end is known to its keeper before libvirt says so.
    let resumed = vm.folder().join("resumed").display().to_string();
    let says_late = format!(
        "case \" $* \" in\n\
         *' resume '*) touch {resumed} ;;\n\
         *' domstate --reason '*) [ -e {resumed} ] && rm {resumed} && sleep 2 && exec echo 'running (unpaused)' ;;\n\
         esac\nexec \"$real\" \"$@\"\n"
    );
    wrap_virsh(vm, &says_late)?;
    // The next keeper dies while QEMU connects, which is not before somebody sees that keeper.
    let qemu = vm.qemu_pid()?;
    vm.must(&["kill", "-STOP", &qemu], "")?;
    vm.kill_keeper()?;
    vm.start_keeper_killed_at(QEMU_CONNECTS)?;
    vm.must(&["kill", "-CONT", &qemu], "")?;
    vm.wait_until("the keeper's end", || Ok(vm.try_hearth(&["status", "replaced"])?.0 == 3))?;
    vm.start_keeper()?;
    vm.wait_until("QEMU is silent", || Ok(vm.status()?.disks.iter().any(|disk| disk.silent)))?;
    vm.start_host()?;
    vm.wait_next_boot()?;
    files.assert_warm()
}

/// `hearth host` was killed between suspending and resuming it.
#[test]
fn domain_that_was_left_suspended_is_resumed() -> Result<()> {
    let Some(files) = Files::running("suspended")? else { return Ok(()) };
    let vm = &files.vm;
    vm.must(&["touch", "/run/hearth/suspended/resume"], "")?;
    vm.virsh("suspend", &[])?;
    vm.start_host()?;
    vm.wait_state("running")?;
    files.verify()?;
    // Whoever suspends it otherwise means it.
    vm.virsh("suspend", &[])?;
    vm.must(&["pkill", "-f", "hearth host"], "")?;
    vm.start_host()?;
    std::thread::sleep(std::time::Duration::from_secs(3));
    vm.wait_state("paused")
}
