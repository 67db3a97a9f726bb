//! Guests that die with their memory kept: the RAM file, and QEMU's notes.

use std::path::Path;
use std::sync::Arc;

use hearth_memory::RamFile;
use hearth_recovery::vmcore::DeadRam;
use hearth_vmtest::{Drives, PlainVm, PlainVmBuilder, Result, patience};
use serde_json::json;

/// Memory and notes of a dead guest.
pub struct Dead {
    pub ram: DeadRam,
    /// ELF notes: the registers, and VMCOREINFO if the guest passed it to QEMU.
    pub notes: Vec<u8>,
    _folder: tempfile::TempDir,
}

impl Dead {
    /// Boots a guest, runs `work` in it, and makes it panic.
    pub fn of(vm: PlainVmBuilder, mib: u64, work: impl FnOnce(&PlainVm) -> Result<()>) -> Result<Self> {
        Self::that_died(vm, mib, |vm| work(vm).and_then(|()| vm.panic()))
    }

    /// Boots a guest, and waits for the panic that `die` causes.
    pub fn that_died(vm: PlainVmBuilder, mib: u64, die: impl FnOnce(&PlainVm) -> Result<()>) -> Result<Self> {
        // A tmpfs, as a machine's memory folder is.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram_path = folder.path().join("ram");
        let backend = format!("memory-backend-file,id=ram,share=on,size={mib}M,mem-path={}", ram_path.display());
        let vm = vm.memory_mib(mib).machine("q35,memory-backend=ram").args(["-object", &backend]);
        let vm = vm.args(["-device", "vmcoreinfo", "-action", "panic=pause"]).boot()?;
        die(&vm)?;
        vm.qmp().wait_event("GUEST_PANICKED", patience(60))?;
        let dump = folder.path().join("notes.elf");
        let protocol = format!("file:{}", dump.display());
        let arguments = json!({ "paging": false, "protocol": protocol, "begin": 0, "length": 1 });
        vm.qmp().execute("dump-guest-memory", arguments)?;
        drop(vm);
        let ram = DeadRam::new(Arc::new(RamFile::open(&ram_path).unwrap()));
        Ok(Self { ram, notes: notes(&dump), _folder: folder })
    }
}

/// Gives the guest pages of each class: file cache, programs, huge pages, freed memory.
pub fn work(vm: &PlainVm) -> Result<()> {
    vm.sh("probe fill /tmp/cached 30000000 3 && probe fill /tmp/freed 40000000 5 && rm /tmp/freed")?;
    vm.sh("echo 8 >/proc/sys/vm/nr_hugepages")?;
    vm.sh("probe hog 32 >/run/hog 2>&1 & until grep -q hogging= /run/hog; do sleep 0.1; done").map(drop)
}

/// The contents of a dump's PT_NOTE.
fn notes(dump: &Path) -> Vec<u8> {
    const PT_NOTE: u64 = 4;
    let dump = std::fs::read(dump).unwrap();
    let number = |at: usize, bytes: usize| {
        let mut number = [0; 8];
        number[..bytes].copy_from_slice(&dump[at..at + bytes]);
        u64::from_le_bytes(number)
    };
    let headers = (0..number(56, 2)).map(|header| (number(32, 8) + header * 56) as usize);
    let note = headers.into_iter().find(|header| number(*header, 4) == PT_NOTE).expect("QEMU writes notes");
    let (start, bytes) = (number(note + 8, 8) as usize, number(note + 32, 8) as usize);
    dump[start..start + bytes].to_vec()
}
