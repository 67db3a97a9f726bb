//! Hops of a guest that is still in its firmware, whose flash goes along, and of guests that UEFI or SeaBIOS booted from a disk.
//! (In all other tests QEMU loads the kernel.)

use std::path::{Path, PathBuf};

use hearth_vmtest::known::{fio_ends_well, fio_goes_on, start_fio_on};
use hearth_vmtest::{Disk, Drives, Ready, Result, TestVm, artifacts, boot_disk, images, patience};
use toml::{Table, Value};

/// Makes the firmware's shell print its variable, and waits until it has for the `nth` time.
fn knows(vm: &TestVm, nth: usize) -> Result<()> {
    vm.guest().type_line("set hearth\r")?;
    vm.wait_console("the variable of the shell", patience(20), |heard| {
        let says = |line: &&String| line.contains("= ") && line.contains("4711");
        (heard.lines().iter().filter(says).count() >= nth).then_some(())
    })
}

/// The section `boot`, and the file of the variables; `None` on a host without this firmware.
fn uefi(home: &Path) -> Option<(Table, PathBuf)> {
    let vars = home.join("vars.fd");
    images::firmware_vars(&vars)?;
    let boot = [("firmware", "uefi".to_owned()), ("firmware_vars", vars.display().to_string())];
    Some((Table::from_iter(boot.map(|(key, value)| (key.to_owned(), Value::from(value)))), vars))
}

/// A guest that waits in the firmware's shell, and the file of its variables; `None` on a host without this firmware.
fn in_its_firmware(home: &Path) -> Result<Option<(TestVm, PathBuf)>> {
    let Some((boot, vars)) = uefi(home) else { return Ok(None) };
    let vm = TestVm::busybox("firmware").for_both_qemus().setting("boot", boot).disk(Disk::empty(8)).start()?;
    vm.wait_console("the firmware's shell", patience(60), |heard| heard.tail(60).contains("Shell>").then_some(()))?;
    // This variable is in memory only.
    vm.guest().type_line("set -v hearth 4711\r")?;
    knows(&vm, 1)?;
    Ok(Some((vm, vars)))
}

/// Writes a variable to flash, which only the guest's current QEMU may write.
fn writes_flash(vm: &TestVm, vars: &Path, nth: usize) -> Result<()> {
    let before = std::fs::read(vars).expect("the test made this file");
    vm.guest().type_line(&format!("set kept {nth}\r"))?;
    vm.wait_console("a changed store of variables", patience(20), |_| {
        (std::fs::read(vars).expect("the store") != before).then_some(())
    })
}

#[test]
fn guest_in_its_firmware_survives_a_hop() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let Some((vm, vars)) = in_its_firmware(home.path())? else { return Ok(()) };
    for (nth, qemu) in [artifacts::qemu_10()?, artifacts::installed_qemu()?].into_iter().enumerate() {
        let hop = vm.rejuvenate_to(&qemu)?;
        assert_eq!(hop.status, 0, "{}", hop.text());
        knows(&vm, nth + 2)?;
        writes_flash(&vm, &vars, nth)?;
    }
    Ok(())
}

#[test]
fn guest_in_its_firmware_survives_parking() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let Some((vm, vars)) = in_its_firmware(home.path())? else { return Ok(()) };
    writes_flash(&vm, &vars, 0)?;
    let record = home.path().join("record.json").display().to_string();
    let verbs: [&[&str]; 2] = [&["prepare", "--drill"], &["resume"]];
    for verb in verbs {
        vm.cli(&[&["host-reload"], verb, &["--record", &record]].concat())?;
        if verb[0] == "prepare" {
            assert!(vm.wait_keeper_end()?.success());
        }
    }
    let unparked = vm.wait_running()?.unparked;
    assert!(unparked.as_ref().is_some_and(|unparked| unparked.stood_ms.is_some()), "{unparked:?}");
    knows(&vm, 2)?;
    writes_flash(&vm, &vars, 1)?;
    vm.kill_foreign_keeper()
}

#[test]
fn uefi_booted_guest_hops_under_load() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let Some((boot, _)) = uefi(home.path()) else { return Ok(()) };
    let image = home.path().join("boot.img");
    boot_disk::uefi(&image, &artifacts::busybox(true)?)?;
    let vm = TestVm::busybox("booted").for_both_qemus().memory_mib(768).cpus(2).setting("boot", boot);
    let vm = vm.disk(Disk::empty(48)).disk(Disk::in_place(&image)).start()?;
    let booted = vm.wait_boots(1)?;
    assert!(vm.sh("ls -d /sys/firmware/efi")?.contains("efi"), "the guest was booted by UEFI");
    hop_through_both_versions_and_back(&vm, &booted, "/dev/vda")
}

/// A boot loader reads Linux through the firmware from the disk that is under load. After the hops the guest reboots and crashes;
/// the boot loader's reads are served from memory, too.
#[test]
fn seabios_booted_guest_hops_under_load() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let (image, linux) = (home.path().join("boot.img"), artifacts::busybox(true)?);
    boot_disk::bios(&image, &linux)?;
    let boot = Table::from_iter([("firmware".to_owned(), Value::from("bios"))]);
    let vm = TestVm::busybox("loaded").for_both_qemus().memory_mib(768).cpus(2).setting("boot", boot);
    let vm = vm.disk(Disk::in_place(&image)).start()?;
    let booted = vm.wait_boots(1)?;
    hop_through_both_versions_and_back(&vm, &booted, "/dev/vda2")?;
    let whole_disk = "md5sum </dev/vda";
    let sum = vm.sh(whole_disk)?;
    let loaded_bytes: u64 =
        [linux.kernel, linux.initrd].map(|file| file.metadata().expect("it was read").len()).iter().sum();
    let reboot: fn(&TestVm) -> Result<()> = |vm| vm.guest().start("reboot -f").map(drop);
    for (end, incarnation) in [reboot, Drives::panic].into_iter().zip(2..) {
        let (nonce, before) = (vm.nonce()?, read_warm_bytes(&vm)?);
        end(&vm)?;
        assert_ne!(vm.wait_incarnation(incarnation)?.nonce, nonce, "the guest rebooted");
        let warm_bytes = read_warm_bytes(&vm)? - before;
        assert!(warm_bytes >= loaded_bytes * 9 / 10, "{warm_bytes} of {loaded_bytes} came from memory");
        assert_eq!(vm.sh(whole_disk)?, sum, "the disk is unchanged");
    }
    vm.has_no_disk_errors()
}

fn read_warm_bytes(vm: &TestVm) -> Result<u64> {
    Ok(vm.status()?.disks[0].read_warm_bytes)
}

/// Hops through both versions under a load on `device`.
fn hop_through_both_versions_and_back(vm: &TestVm, booted: &Ready, device: &str) -> Result<()> {
    start_fio_on(vm, device)?;
    let (old, new) = (artifacts::installed_qemu()?, artifacts::qemu_10()?);
    for (round, qemu) in [&new, &old, &new, &new, &old].into_iter().enumerate() {
        let hop = vm.rejuvenate_to(qemu)?;
        assert_eq!(hop.status, 0, "hop {round}: {}", hop.text());
        assert_eq!(vm.nonce()?, booted.nonce, "hop {round}: it is the same guest");
    }
    fio_goes_on(vm)?;
    fio_ends_well(vm)?;
    vm.has_no_disk_errors()
}
