//! Truth: what a dump holds is what the dead guest's memory held.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hearth_recovery::vmcore::VmcoreFile;
use hearth_vmtest::{Drives, Result, TestVm, patience};

use crate::dump::{dumping, file_of, wait_complete};

const PAGE: usize = 4096;
const PAGES_COMPARED: usize = 1000;
/// With 256 MiB guest-physical addresses are offsets in the file.
const RAM_PAGES: u64 = (256 << 20) / PAGE as u64;
const LAST_WORDS: &str = "Kernel panic - not syncing: sysrq triggered crash";

/// The guest panics while its keeper cannot look: its QEMU holds it still, and its memory can be copied.
fn crash_and_copy_memory(vm: &TestVm) -> Result<PathBuf> {
    vm.sh("(sleep 2; echo c >/proc/sysrq-trigger) </dev/null >/dev/null 2>&1 &")?;
    vm.freeze_keeper()?;
    let copy = vm.folder().join("dead-ram");
    let deadline = std::time::Instant::now() + patience(20);
    let mut before = Vec::new();
    loop {
        let is_dead = holds(&vm.ram_file(1), LAST_WORDS);
        if is_dead {
            let memory = fs::read(vm.ram_file(1)).expect("the guest's memory is a file");
            // A kernel that runs counts its ticks somewhere.
            if memory == before {
                fs::write(&copy, memory).expect("the test's folder has room");
                break;
            }
            before = memory;
        }
        assert!(std::time::Instant::now() < deadline, "the guest does not die: {is_dead}");
        std::thread::sleep(Duration::from_millis(300));
    }
    vm.thaw_keeper()?;
    Ok(copy)
}

/// grep reads a guest's memory in a tenth of a second; window by window it took a minute a test. The memory's "lines" end
/// in zeroes, so that none is as long as the memory.
fn holds(memory: &Path, words: &str) -> bool {
    let grep = Command::new("grep").args(["-qzaF", words]).arg(memory).env("LC_ALL", "C").status();
    grep.expect("every system has grep").success()
}

/// Page frames all over the memory, the same in every run.
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

/// How many pages were compared; all were equal.
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
    let vm = dumping(name).crash_setting("level", level).crash_setting("format", format).boot()?;
    vm.sh("echo 1 >/proc/sys/kernel/sysrq; dd if=/dev/urandom of=/tmp/noise bs=1M count=40")?;
    let memory = crash_and_copy_memory(&vm)?;
    vm.wait_incarnation(2)?;
    let complete = wait_complete(&vm, 1)?;
    assert_eq!(compare(&file_of(&complete), &memory), PAGES_COMPARED);
    Ok(())
}

#[test]
fn pages_that_are_kept_are_the_dead_guests() -> Result<()> {
    dump_holds_the_dead_memory("kept", 31, "kdump")
}

#[test]
fn all_pages_are_the_dead_guests() -> Result<()> {
    dump_holds_the_dead_memory("all", 1, "kdump")
}

#[test]
fn all_pages_of_an_elf_dump_are_the_dead_guests() -> Result<()> {
    dump_holds_the_dead_memory("all-elf", 0, "elf")
}
