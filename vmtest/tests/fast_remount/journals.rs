//! Journals in NVRAM: what ext4 was told is durable is replayed from host memory, and from the mirror once that is lost.

use hearth_vmtest::{Blocks, Drives, Result, Volumes};

use super::{kill_all, machine, ready};

/// Behind one disk of volumes.
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
    // The journals' memory goes with keeper and QEMU: what was flushed to them is in the mirror.
    kill_all(&vm)?;
    std::fs::remove_file(vm.memory_folder().join("nvram-journals-0")).expect("its memory is a file");
    vm.restart_keeper()?;

    vm.wait_incarnation(3)?;
    volumes.mount(&vm)?;
    assert_eq!((replayed()?.trim(), volumes.read(&vm)?), ("6", volumes.expected(&["one", "two"])));
    volumes.unmount_and_check(&vm)
}
