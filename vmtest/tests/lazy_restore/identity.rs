//! Clones know that they are clones: each gets its own VM generation ID, and draws new randomness. The same guest in another
//! QEMU, or after a reboot, keeps its ID.

use std::fs;

use hearth_vmtest::{Drives, Result, TestVm, artifacts, event, patience};

/// Linux's message when its ID changes.
const RESEEDED: &str = "crng reseeded due to virtual machine fork";

/// The ID on QEMU's command line.
fn vmgenid(vm: &TestVm) -> Result<Option<String>> {
    let line = fs::read(format!("/proc/{}/cmdline", vm.qemu_pid()?.as_raw_nonzero())).unwrap_or_default();
    let words: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
    Ok(words.iter().find_map(|word| word.strip_prefix("vmgenid,guid=")).map(str::to_owned))
}

fn reseeds(vm: &TestVm) -> Result<usize> {
    let said = vm.sh(&format!("dmesg | grep -c '{RESEEDED}'; true"))?;
    Ok(said.trim().parse().expect("grep counts"))
}

fn await_reseed(vm: &TestVm) -> Result<()> {
    vm.sh(&format!("until dmesg | grep -q '{RESEEDED}'; do sleep 0.1; done")).map(drop)
}

/// Number of power management events, as Linux counts them.
fn acpi_events(vm: &TestVm) -> Result<String> {
    vm.sh("cat /sys/firmware/acpi/interrupts/sci")
}

fn draw(vm: &TestVm) -> Result<String> {
    vm.sh("head -c 32 /dev/urandom | od -An -tx1")
}

#[test]
fn clones_get_their_own_id_and_randomness() -> Result<()> {
    let vm = TestVm::busybox_on_linux_6_12("forked").boot()?;
    let (saved, snapshot) = (vmgenid(&vm)?.expect("every machine has one"), vm.folder().join("snapshot"));
    vm.save_and_stop(&snapshot)?;
    let (mut ids, mut drawn) = (vec![saved], Vec::new());
    for (name, option) in [("one", "--lazy"), ("other", "--eager"), ("forked-again", "--working-set")] {
        let clone = vm.restore(&snapshot, name, &[option])?;
        clone.wait_running()?;
        clone.await_console()?;
        await_reseed(&clone)?;
        assert_eq!(reseeds(&clone)?, 1, "{name}");
        drawn.push(draw(&clone)?);
        ids.push(vmgenid(&clone)?.expect("it was saved with one"));
        clone.wait_event("all memory is there", event!(RestoreComplete))?;
        clone.stop_at_once()?;
    }
    for all in [&mut ids, &mut drawn] {
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count, "{all:?}");
    }
    Ok(())
}

#[test]
fn guest_keeps_its_id_over_hops_and_reboot() -> Result<()> {
    let vm = TestVm::busybox_on_linux_6_12("same").for_both_qemus().boot()?;
    let (id, events) = (vmgenid(&vm)?, acpi_events(&vm)?);
    assert!(id.is_some());
    for qemu in [artifacts::qemu_10()?, artifacts::installed_qemu()?] {
        let hop = vm.rejuvenate_to(&qemu)?;
        assert!(hop.status == 0, "{hop:?}");
        assert_eq!((vmgenid(&vm)?, reseeds(&vm)?), (id.clone(), 0), "{}", qemu.display());
        assert_eq!(acpi_events(&vm)?, events, "an unchanged ID must cause no event: {}", qemu.display());
    }
    vm.reboot()?;
    vm.wait_boots(2)?;
    assert_eq!(vmgenid(&vm)?, id);
    Ok(())
}

#[test]
fn guest_saved_without_vmgenid_is_restored_without_it() -> Result<()> {
    // An argument for a device of this kind leaves the device to the operator, who adds none here.
    let setting = toml::Value::Array(vec!["-global".into(), "vmgenid.guid=auto".into()]);
    let vm = TestVm::busybox_on_linux_6_12("without").for_both_qemus().setting("extra_qemu_args", setting).boot()?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    assert_eq!(vmgenid(&vm)?, None);
    vm.save_and_stop(&snapshot)?;
    let clone = vm.restore(&snapshot, "clone", &[])?;
    clone.wait_running()?;
    clone.await_console()?;
    assert_eq!((vmgenid(&clone)?, reseeds(&clone)?, clone.nonce()?), (None, 0, nonce));
    clone.wait_event_within("all memory is there", patience(60), event!(RestoreComplete))?;
    let hop = clone.rejuvenate_to(&artifacts::qemu_10()?)?;
    assert!(hop.status == 0, "{hop:?}");
    assert_eq!(vmgenid(&clone)?, None);
    Ok(())
}
