//! Journals in NVRAM: what ext4 and XFS were told is durable is replayed from host memory, and from the mirror if that is lost.

use hearth_vmtest::{Blocks, Disk, Drives, Result, TestVm, Volumes, images, patience};
use toml::{Table, Value};

use super::{kill_all, machine, ready, remount};

/// Letter of the first NVRAM device, behind one disk of volumes.
const DEVICE: char = 'b';

#[test]
fn journals_in_nvram_are_replayed() -> Result<()> {
    let volumes = Volumes::make_with_journals_apart(&std::env::temp_dir(), 6, &[], Blocks::Needed, DEVICE)?;
    let vm = machine("journals", &volumes).setting("nvram", volumes.nvram("sync")?).boot()?;
    let replayed = || vm.sh("dmesg | grep -c 'recovery complete'; true");
    volumes.mount(&vm)?;
    ready(&vm)?;
    volumes.append(&vm, "one")?;
    vm.panic()?;

    vm.wait_incarnation(2)?;
    volumes.mount(&vm)?;
    assert_eq!((replayed()?.trim(), volumes.read(&vm)?), ("6", volumes.expected(&["one"])));
    ready(&vm)?;
    volumes.append(&vm, "two")?;
    // The journals' memory is lost with keeper and QEMU; flushed data is in the mirror.
    kill_all(&vm)?;
    std::fs::remove_file(vm.memory_folder().join("nvram-journals-0")).expect("the device's memory is a file");
    vm.restart_keeper()?;

    vm.wait_incarnation(3)?;
    volumes.mount(&vm)?;
    assert_eq!((replayed()?.trim(), volumes.read(&vm)?), ("6", volumes.expected(&["one", "two"])));
    volumes.unmount_and_check(&vm)
}

/// XFS with external logs in NVRAM.
#[test]
fn logs_of_xfs_in_nvram_are_replayed() -> Result<()> {
    const VOLUMES: [(&str, &str); 2] = [("vda", "vdc"), ("vdb", "vdd")];
    let folder = tempfile::tempdir().expect("a temporary folder");
    let image = |name: &str| folder.path().join(name);
    let mut builder = TestVm::busybox("xfs-logs").memory_mib(256).setting("remount", remount([]));
    let mut logs = Vec::new();
    for (device, log) in VOLUMES {
        images::xfs_with_log_apart(&image(device), &image(log))?;
        builder = builder.disk(Disk::copy_of(&image(device)));
        let keys =
            [("name", log), ("size", "64MiB"), ("mirror", "sync"), ("mirror_file", &image(log).display().to_string())]
                .map(|(key, value)| (key.to_owned(), Value::from(value)));
        logs.push(Value::from(Table::from_iter(keys)));
    }
    let vm = builder.setting("nvram", logs).boot()?;
    let each = |command: &str| -> Result<String> {
        let all = VOLUMES.map(|(device, log)| format!("v={device}; l={log}; {command} || exit"));
        vm.sh_within(&all.join("\n"), patience(60))
    };
    let mount = || each("mkdir -p /v/$v && mount -t xfs -o logdev=/dev/$l /dev/$v /v/$v");
    // A new folder and file each time, so that the replay covers more than one inode.
    let write = |what: &str| {
        each(&format!("mkdir /v/$v/{what} && echo {what} $v >/v/$v/{what}/line && sync /v/$v/{what}/line"))
    };
    let read = || each("cat /v/$v/*/line");
    let replayed = || vm.sh("dmesg | grep -c 'Starting recovery'; true");
    mount()?;
    ready(&vm)?;
    write("one")?;
    vm.panic()?;

    vm.wait_incarnation(2)?;
    mount()?;
    assert_eq!((replayed()?.trim(), read()?.as_str()), ("2", "one vda\none vdb\n"));
    ready(&vm)?;
    write("two")?;
    kill_all(&vm)?;
    for (_, log) in VOLUMES {
        std::fs::remove_file(vm.memory_folder().join(format!("nvram-{log}"))).expect("the device's memory is a file");
    }
    vm.restart_keeper()?;

    vm.wait_incarnation(3)?;
    mount()?;
    assert_eq!((replayed()?.trim(), read()?.as_str()), ("2", "one vda\ntwo vda\none vdb\ntwo vdb\n"));
    vm.sh("umount /v/*")?;
    vm.stop()?;
    let disks = (0..).map(|disk| vm.folder().join(format!("disk{disk}.img")));
    VOLUMES.iter().zip(disks).try_for_each(|((_, log), disk)| images::check_xfs_with_log_apart(&disk, &image(log)))
}
