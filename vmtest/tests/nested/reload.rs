//! Tests for a host with KVM whose kernel is replaced, in three parts: before, the kexec itself, and after, under the new kernel.
//!
//! Memory is checked twice: in each guest, where a third of it has known contents, and from outside, where a checksum of all RAM
//! of the parked guest is taken under the old kernel and under the new one.

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use hearth_api::MachineStatus;
use hearth_vmtest::clock::Reading;
use hearth_vmtest::host_reload::{Figures, Reloaded};
use hearth_vmtest::known::{count, counts_beyond, fill, start_counter, verify};
use hearth_vmtest::{Disk, Drives, Parked, Result, TestVm, artifacts};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::host::EMULATED;

/// Files on a disk, which survive the kernel.
const RECORD: &str = "/hearth/host-reload.json";
const EXPECTED: &str = "/hearth/expected.json";
/// A folder in 512 MiB of memory that survives the kernel.
const MEMORY: &str = "/run/pmem";
const MACHINES: [&str; 2] = ["reload-1", "reload-2"];
const MACHINE_MIB: u64 = 192;
const KNOWN_MIB: u64 = 64;

/// State that must be unchanged afterwards.
#[derive(Serialize, Deserialize)]
struct Expected {
    runtime_root: PathBuf,
    machines: Vec<Left>,
}

/// One guest when it was parked.
#[derive(Serialize, Deserialize)]
struct Left {
    name: String,
    nonce: String,
    count: u64,
    clock: Reading,
    ram: PathBuf,
    /// Checksum of the whole RAM file.
    ram_sum: u64,
}

#[test]
#[ignore = "needs KVM and reserved memory: make test-nested"]
fn before() -> Result<()> {
    let mut machines: Vec<TestVm> = Vec::new();
    for name in MACHINES {
        let vm = TestVm::busybox(name).memory_mib(MACHINE_MIB).disk(Disk::empty(16));
        let vm = vm.setting("memory_folder", format!("{MEMORY}/{name}"));
        let vm = vm.setting("accelerator", "kvm").setting("cpu_model", "host");
        let vm = if let Some(first) = machines.first() { vm.beside(first) } else { vm }.boot()?;
        fill(&vm, KNOWN_MIB)?;
        start_counter(&vm)?;
        vm.sh("probe fill /tmp/block 4194304 5 && dd if=/tmp/block of=/dev/vda bs=64k conv=fsync 2>&1")?;
        machines.push(vm);
    }
    let first = &machines[0];
    let checked = first.cli_output(&["host-reload", "prepare", "--check", "--record", RECORD])?;
    assert!(checked.status == 1 && checked.text().contains("no kernel is loaded"), "{}", checked.text());
    load_kernel();
    first.cli(&["host-reload", "prepare", "--check", "--record", RECORD])?;
    let counted: Vec<u64> = machines.iter().map(count).collect::<Result<_>>()?;
    let nonces: Vec<String> = machines.iter().map(Drives::nonce).collect::<Result<_>>()?;
    let clocks: Vec<Reading> = machines.iter().map(Reading::take).collect::<Result<_>>()?;
    eprintln!("{}", first.cli(&["host-reload", "prepare", "--record", RECORD])?);
    let mut left = Vec::new();
    for (((vm, count), nonce), clock) in machines.iter().zip(counted).zip(nonces).zip(clocks) {
        vm.wait_keeper_end()?;
        let ram = Path::new(MEMORY).join(vm.name()).join("ram-1");
        left.push(Left { name: vm.name().to_owned(), nonce, count, clock, ram_sum: sum(&ram), ram });
    }
    let expected = Expected { runtime_root: first.runtime_root(), machines: left };
    fs::write(EXPECTED, serde_json::to_vec(&expected).unwrap()).unwrap();
    // `after` needs the machines' files.
    machines.into_iter().for_each(std::mem::forget);
    Ok(())
}

/// Checksum of a whole file, by code that is not Hearth's own: a word at a time (FxHash), because the host is emulated.
fn sum(file: &Path) -> u64 {
    let (mut file, mut piece, mut sum) = (File::open(file).unwrap(), vec![0; 1 << 20], 0_u64);
    loop {
        match file.read(&mut piece).unwrap() {
            0 => return sum,
            length => {
                for word in piece[..length].chunks_exact(8) {
                    let word = u64::from_ne_bytes(word.try_into().unwrap());
                    sum = (sum.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
                }
            }
        }
    }
}

/// Fails on a real host: a user who runs all ignored tests does not want to end it.
fn must_be_emulated() {
    assert!(std::env::var_os(EMULATED).is_some(), "this test is only for the host that `make test-nested` emulates");
}

/// Loads the kernel that this host runs, with the same command line.
fn load_kernel() {
    must_be_emulated();
    let boot = artifacts::busybox(false).unwrap();
    let open = |path: &Path| File::open(path).unwrap();
    let (kernel, initrd) = (open(&boot.kernel), open(&boot.initrd));
    let mut cmdline = fs::read("/proc/cmdline").unwrap();
    *cmdline.last_mut().unwrap() = 0;
    // SAFETY: two open files, and a text that ends with a zero byte, which is included in its length.
    let loaded = unsafe {
        libc::syscall(
            libc::SYS_kexec_file_load,
            kernel.as_raw_fd(),
            initrd.as_raw_fd(),
            cmdline.len(),
            cmdline.as_ptr(),
            0_u64,
        )
    };
    assert_eq!(loaded, 0, "{}", std::io::Error::last_os_error());
}

#[test]
#[ignore = "ends the host it runs on: make test-nested"]
fn kexec() {
    must_be_emulated();
    // SAFETY: the loaded kernel starts and nothing of this one continues; `before` has synced the file systems.
    let error = unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    panic!("{error}: {}", std::io::Error::last_os_error());
}

/// Prints the figures before any assertion: a guest that did not continue is a figure, too.
#[test]
#[ignore = "needs KVM and reserved memory: make test-nested"]
fn after() -> Result<()> {
    let expected: Expected = serde_json::from_slice(&fs::read(EXPECTED).unwrap()).unwrap();
    let same_outside: Vec<bool> = expected.machines.iter().map(|left| sum(&left.ram) == left.ram_sum).collect();
    let open = |left: &Left| Parked::open(&left.name, &expected.runtime_root);
    let machines: Vec<Parked> = expected.machines.iter().map(open).collect::<Result<_>>()?;
    let first = &machines[0];
    eprintln!("{}", first.cli_output(&["host-reload", "resume", "--record", RECORD])?.text());
    let said = first.cli(&["host-reload", "status", "--record", RECORD, "--json"])?;
    let said: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut figures = Figures::default();
    for ((vm, left), same_outside) in machines.iter().zip(&expected.machines).zip(same_outside) {
        let said = said.iter().find(|said| said["name"] == left.name.as_str()).unwrap();
        let resumed = said["outcome"] == "resumed" && vm.nonce()? == left.nonce;
        figures.machines.push(Reloaded {
            name: left.name.clone(),
            resumed,
            ram_same: same_outside && resumed && verify(vm).is_ok(),
            stood_ms: said["stood_ms"].as_u64(),
        });
    }
    eprintln!("{}", figures.line());
    assert!(figures.machines.len() == MACHINES.len() && figures.all_well(), "{said:?}");
    for (vm, left) in machines.iter().zip(&expected.machines) {
        let behind_s = Reading::take(vm)?.behind_s(&left.clock);
        let status = vm.cli(&["status", &left.name, "--json"])?;
        let unparked = serde_json::from_str::<MachineStatus>(&status).unwrap().unparked.unwrap();
        let stood_s = unparked.stood_ms.unwrap() / 1e3;
        eprintln!("{}: paused for {stood_s} s, its clock is behind by {behind_s:?} s", left.name);
        assert!(*behind_s.start() < stood_s / 2.0 && *behind_s.end() > -stood_s / 2.0);
        counts_beyond(vm, left.count)?;
        vm.sh("dd if=/dev/vda of=/tmp/back bs=64k count=64 iflag=direct 2>&1 && cmp /tmp/block /tmp/back")?;
        vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
        assert!(unparked.host_reloaded);
        vm.cli(&["stop", &left.name, "--force"])?;
    }
    Ok(())
}
