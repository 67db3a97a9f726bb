//! Persistent memory: NVRAM in the guest's address space. As a block device, as another file system's journal and mounted with
//! DAX it survives every death. Another QEMU cannot take it over, and Hearth says so.

use std::path::Path;

use hearth_api::{MachineState, NvramDevice::Pmem};
use hearth_vmtest::{Disk, Drives, Result, TestVm, TestVmBuilder, images};
use toml::Table;

use super::kill_all;

const MIB: u64 = 1 << 20;

/// A machine with one device without a mirror, and one for each of these mirrors.
fn machine(name: &str, mirrors: &[(&str, &Path)]) -> TestVmBuilder {
    let device = |name: &str, mib: u64| {
        let keys = [("device", "pmem".to_owned()), ("name", name.to_owned()), ("size", format!("{mib}MiB"))];
        Table::from_iter(keys.map(|(key, value)| (key.to_owned(), toml::Value::from(value))))
    };
    let mut nvram = vec![device("plain", 4)];
    nvram.extend(mirrors.iter().map(|(name, file)| {
        let mut device = device(name, std::fs::metadata(file).expect("our own file").len() / MIB);
        device.insert("mirror".into(), "sync".into());
        device.insert("mirror_file".into(), file.display().to_string().into());
        device
    }));
    TestVm::busybox(name).memory_mib(256).setting("nvram", nvram)
}

#[test]
fn flushed_persistent_memory_survives_every_death() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [volume, journal, data] = ["volume", "journal", "data"].map(|name| folder.path().join(name));
    images::ext4_with_journal_apart(&volume, &journal, 16, &[])?;
    let file = std::fs::File::options().write(true).open(&journal).expect("our own file");
    file.set_len(6 * MIB).expect("our own file");
    images::ext4_for_good(&data, 16, &[])?;
    let vm = machine("pmem", &[("log", &journal), ("data", &data)]).disk(Disk::in_place(&volume)).boot()?;
    let mount = || {
        vm.sh("mkdir -p /v /d && mount -t ext4 -o journal_path=/dev/pmem1 /dev/vda /v && mount -t ext4 -o dax /dev/pmem2 /d")
    };
    let write = |what: &str| {
        let raw = format!("echo {what} | dd of=/dev/pmem0 bs=512 seek=100 conv=fsync,notrunc 2>/dev/null");
        vm.sh(&format!("{raw} && echo {what} >>/v/f && echo {what} >>/d/f && sync"))
    };
    let read = || vm.sh("dd if=/dev/pmem0 bs=512 skip=100 count=1 2>/dev/null | head -n 1; cat /v/f; cat /d/f");
    let replayed = || vm.sh("dmesg | grep -c 'recovery complete'; true");
    mount()?;
    assert_eq!(vm.sh("grep -c ' /d ext4 .*dax' /proc/mounts")?.trim(), "1", "the file system is mounted with DAX");
    write("one")?;
    vm.panic()?;

    vm.wait_incarnation(2)?;
    mount()?;
    assert_eq!((replayed()?.trim(), read()?.as_str()), ("2", "one\none\none\n"));
    write("two")?;
    vm.kill_qemu()?;

    vm.wait_incarnation(3)?;
    mount()?;
    assert_eq!(read()?, "two\none\ntwo\none\ntwo\n");
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    vm.wait_running()?;
    write("three")?;
    assert_eq!(read()?, "three\none\ntwo\nthree\none\ntwo\nthree\n");
    vm.cli(&["upgrade-keeper", vm.name()])?;
    check_status(&vm)?;

    // The host's memory is lost with both, and with it the device without a mirror.
    kill_all(&vm)?;
    std::fs::remove_file(vm.memory_folder().join("nvram-plain")).expect("its memory is a file");
    vm.restart_keeper()?;
    vm.wait_incarnation(4)?;
    mount()?;
    assert_eq!(read()?.trim_start_matches('\0'), "one\ntwo\nthree\none\ntwo\nthree\n");
    vm.sh("umount /v /d")?;
    vm.stop()?;
    assert!(vm.memory_folder().join("nvram-plain").is_file(), "this file is the only copy");
    images::check_ext4(&data, 0)
}

fn check_status(vm: &TestVm) -> Result<()> {
    let status = vm.status()?;
    let shown = status.nvram.iter().map(|nvram| (nvram.name.as_str(), nvram.device, nvram.mirror.as_str()));
    let expect = [("plain", Pmem, "none"), ("log", Pmem, "sync"), ("data", Pmem, "sync")];
    assert_eq!(shown.collect::<Vec<_>>(), expect, "{status:?}");
    assert_eq!(status.memory.nvram_bytes, 4 * MIB, "{status:?}");
    let text = vm.cli(&["status", vm.name()])?;
    assert!(text.contains("pmem, in the guest's address space"), "{text}");
    Ok(())
}

#[test]
fn persistent_memory_stays_with_its_qemu() -> Result<()> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let vm = machine("stays", &[]).boot()?;
    let why = "another QEMU cannot take over nvram plain, which is persistent memory";
    let snapshot = folder.path().join("snapshot").display().to_string();
    let refused = [
        (vec!["rejuvenate", vm.name()], why),
        (vec!["host-reload", "prepare", "--drill"], why),
        (vec!["save", vm.name(), "-o", &snapshot], "snapshots do not include NVRAM"),
    ];
    vm.sh("echo mine | dd of=/dev/pmem0 bs=512 conv=fsync,notrunc 2>/dev/null")?;
    for (arguments, why) in refused {
        let output = vm.cli_output(&arguments)?;
        assert!(output.status != 0 && output.text().contains(why), "{arguments:?}: {}", output.text());
    }
    assert_eq!(vm.status()?.state, MachineState::Running);
    assert_eq!(vm.sh("head -n 1 /dev/pmem0")?, "mine\n", "the guest continues");
    Ok(())
}
