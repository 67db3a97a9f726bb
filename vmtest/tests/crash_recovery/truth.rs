//! Truth: a dump's pages equal the dead guest's memory.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use hearth_recovery::vmcore::VmcoreFile;
use hearth_vmtest::{Drives, Qmp, Result, TestVm, patience};
use serde_json::json;

use crate::dump::{dumping, file_of, wait_complete};

const PAGE: usize = 4096;
const PAGES_COMPARED: usize = 1000;
/// With 256 MiB guest-physical addresses are offsets in the file.
const RAM_PAGES: u64 = (256 << 20) / PAGE as u64;

/// Makes the guest panic while its keeper is frozen and so does not react. QEMU keeps the guest stopped, and its memory is
/// copied.
fn crash_and_copy_memory(vm: &TestVm, qmp: &Qmp) -> Result<PathBuf> {
    vm.freeze_keeper()?;
    qmp.execute("inject-nmi", json!({}))?;
    qmp.wait_event("GUEST_PANICKED", patience(20))?;
    // The guest's processors have stopped.
    qmp.wait_event("STOP", patience(20))?;
    let copy = vm.folder().join("dead-ram");
    fs::copy(vm.ram_file(1), &copy).expect("the test's folder has space");
    vm.thaw_keeper()?;
    Ok(copy)
}

/// Page frames spread over the memory, the same in every run.
fn scattered(count: usize) -> impl Iterator<Item = u64> {
    let mut state = 88_172_645_463_325_252_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % RAM_PAGES
    })
    .take(count)
}

/// Compares pages of dump and memory, which must be equal. Returns the number of pages compared.
fn compare(vmcore: &Path, memory: &Path) -> usize {
    let vmcore = VmcoreFile::open(vmcore).expect("the dump can be read");
    let memory = File::open(memory).expect("the copy is there");
    let mut compared = 0;
    for pfn in scattered(200_000) {
        let (mut dumped, mut dead) = ([0; PAGE], [0; PAGE]);
        if vmcore.read_page(pfn, &mut dumped).is_err() {
            continue;
        }
        memory.read_exact_at(&mut dead, pfn * PAGE as u64).expect("the copy is whole");
        assert!(dumped == dead, "page frame {pfn:#x} differs");
        compared += 1;
        if compared == PAGES_COMPARED {
            break;
        }
    }
    compared
}

fn dump_holds_the_dead_memory(name: &str, level: i64, format: &str) -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("qmp.sock");
    let monitor = ["-qmp".to_owned(), format!("unix:{},server=on,wait=off", socket.display())];
    let builder = dumping(name).crash_setting("level", level).crash_setting("format", format);
    let vm = builder.setting("extra_qemu_args", monitor.to_vec()).boot()?;
    let qmp = Qmp::connect(&socket)?;
    vm.sh("echo 1 >/proc/sys/kernel/unknown_nmi_panic; dd if=/dev/urandom of=/tmp/noise bs=1M count=40")?;
    // A frozen keeper reads no console: after about 300 characters the kernel would wait 10 ms for each.
    vm.sh("echo N >/sys/class/tty/ttyS0/console")?;
    let memory = crash_and_copy_memory(&vm, &qmp)?;
    vm.wait_incarnation(2)?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(compare(&file_of(&complete), &memory), PAGES_COMPARED);
    Ok(())
}

#[test]
fn dumped_pages_equal_the_dead_memory() -> Result<()> {
    dump_holds_the_dead_memory("kept", 31, "kdump")
}

#[test]
fn all_dumped_pages_equal_the_dead_memory() -> Result<()> {
    dump_holds_the_dead_memory("all", 1, "kdump")
}

#[test]
fn all_elf_pages_equal_the_dead_memory() -> Result<()> {
    dump_holds_the_dead_memory("all-elf", 0, "elf")
}
