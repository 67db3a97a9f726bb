//! The keeper is killed after each phase. The journal says which QEMU has the guest; if the new QEMU was just getting the end of
//! the guest's state, it knows itself. The next keeper ends the other QEMU, and the guest continues.

use hearth_recovery::rejuvenation::Phase;
use hearth_vmtest::{Disk, Drives, Result, TestVm};

/// The QEMU that has the guest afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Old,
    New,
}

fn owner_after(phase: Phase) -> Owner {
    match phase {
        Phase::Launch | Phase::Admit | Phase::Prepare | Phase::Hand => Owner::Old,
        Phase::Resume | Phase::Retire => Owner::New,
    }
}

fn check(vm: &TestVm, drill: &str, expect: Owner) -> Result<()> {
    let (nonce, before) = (vm.nonce()?, vm.qemu_pid()?);
    vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", drill)])?;
    vm.wait_running()?;
    let hop = vm.cli_output(&["rejuvenate", vm.name()])?;
    assert_ne!(hop.status, 0, "{drill}: the keeper should have died: {}", hop.text());
    vm.wait_keeper_end()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    let owner = if vm.qemu_pid()? == before { Owner::Old } else { Owner::New };
    assert_eq!(owner, expect, "{drill}");
    assert_eq!(vm.nonce()?, nonce, "{drill}: it is the same guest");
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1 && sync")?;
    Ok(())
}

#[test]
fn next_keeper_finds_guest_after_any_phase() -> Result<()> {
    let vm = TestVm::busybox("deaths").disk(Disk::empty(16)).running()?;
    for phase in Phase::ALL {
        check(&vm, phase.name(), owner_after(phase))?;
    }
    // The journal gives the guest to the new QEMU, which has not received all of it.
    check(&vm, "commit", Owner::Old)?;
    vm.rejuvenate()?;
    assert_eq!(vm.status()?.incarnation, 1);
    Ok(())
}
