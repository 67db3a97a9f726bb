//! Run on a host with KVM whose kernel is about to be replaced, in three parts: before, the kexec itself, and after. What the
//! second part ends with the third one, under another kernel, begins with.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use hearth_vmtest::known::{count, counts_beyond, fill, start_counter, verify};
use hearth_vmtest::{Disk, Drives, Parked, Result, TestVm, artifacts};
use serde_json::{Value, json};

use crate::host::EMULATED;

/// On a disk that outlives the kernel.
const RECORD: &str = "/hearth/host-reload.json";
const EXPECTED: &str = "/hearth/expected.json";
/// On memory that does.
const MEMORY: &str = "/run/pmem";
const MACHINE: &str = "reload";

#[test]
#[ignore = "needs KVM and reserved memory: make test-nested"]
fn before() -> Result<()> {
    let memory_folder = format!("{MEMORY}/{MACHINE}");
    let vm = TestVm::busybox(MACHINE).memory_mib(256).disk(Disk::empty(16)).setting("memory_folder", memory_folder);
    let vm = vm.setting("accelerator", "kvm").setting("cpu_model", "host").boot()?;
    fill(&vm, 64)?;
    start_counter(&vm)?;
    vm.sh("probe fill /tmp/block 4194304 5 && dd if=/tmp/block of=/dev/vda bs=64k conv=fsync 2>&1")?;
    let checked = vm.cli_output(&["host-reload", "prepare", "--check", "--record", RECORD])?;
    assert!(checked.status == 1 && checked.text().contains("no kernel is loaded"), "{}", checked.text());
    load_kernel();
    vm.cli(&["host-reload", "prepare", "--check", "--record", RECORD])?;
    let runtime_root = vm.folder().join("run");
    let expected = json!({ "nonce": vm.nonce()?, "count": count(&vm)?, "runtime_root": runtime_root });
    fs::write(EXPECTED, expected.to_string()).unwrap();
    eprintln!("{}", vm.cli(&["host-reload", "prepare", "--record", RECORD])?);
    vm.wait_keeper_end()?;
    // Its files are for `after`.
    std::mem::forget(vm);
    Ok(())
}

/// Somebody who runs all ignored tests does not mean to end a real host.
fn must_be_emulated() {
    assert!(std::env::var_os(EMULATED).is_some(), "this is for the host that `make test-nested` emulates");
}

/// The kernel that this host was started with, as it was.
fn load_kernel() {
    must_be_emulated();
    let boot = artifacts::busybox(false).unwrap();
    let open = |path: &Path| File::open(path).unwrap();
    let (kernel, initrd) = (open(&boot.kernel), open(&boot.initrd));
    let mut cmdline = fs::read("/proc/cmdline").unwrap();
    *cmdline.last_mut().unwrap() = 0;
    // SAFETY: two open files, and a text that ends with a zero byte, which is counted.
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
    // SAFETY: the kernel that was loaded starts; nothing of this one goes on. File systems were looked after before.
    let error = unsafe { libc::reboot(libc::LINUX_REBOOT_CMD_KEXEC) };
    panic!("{error}: {}", std::io::Error::last_os_error());
}

#[test]
#[ignore = "needs KVM and reserved memory: make test-nested"]
fn after() -> Result<()> {
    let expected: Value = serde_json::from_slice(&fs::read(EXPECTED).unwrap()).unwrap();
    let runtime_root = PathBuf::from(expected["runtime_root"].as_str().unwrap());
    let vm = Parked::open(MACHINE, &runtime_root)?;
    eprintln!("{}", vm.cli(&["host-reload", "resume", "--record", RECORD])?);
    assert_eq!(vm.nonce()?, expected["nonce"].as_str().unwrap(), "it is the same guest");
    counts_beyond(&vm, expected["count"].as_u64().unwrap())?;
    verify(&vm)?;
    vm.sh("dd if=/dev/vda of=/tmp/back bs=64k count=64 iflag=direct 2>&1 && cmp /tmp/block /tmp/back")?;
    vm.sh("dd if=/dev/urandom of=/dev/vda bs=64k count=16 conv=fsync 2>&1")?;
    let said = vm.cli(&["host-reload", "status", "--record", RECORD, "--json"])?;
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["outcome"], "resumed", "{said}");
    let status: Value = serde_json::from_str(&vm.cli(&["status", MACHINE, "--json"])?).unwrap();
    assert_eq!(status["unparked"]["host_reloaded"], true, "{status}");
    eprintln!("stood still for {} ms over a kexec", said["stood_ms"]);
    vm.cli(&["stop", MACHINE, "--force"]).map(drop)
}
