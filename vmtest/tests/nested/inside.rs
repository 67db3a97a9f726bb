//! Tests for a host with KVM, run by `outside` or by hand: each capability on real virtualization.

use std::path::Path;

use hearth_recovery::vmcore::VmcoreFile;
use hearth_recovery::vmcore::linux::{Linux, log};
use hearth_vmtest::{Disk, Drives, Error, Result, TestVm, TestVmBuilder, artifacts, event, images, patience};

const SEED: u64 = 7;
const FILE_BYTES: usize = 16 << 20;

fn machine(name: &str) -> TestVmBuilder {
    let disk = Disk::ext4(48).with_files([images::File::pattern("a.bin", FILE_BYTES, SEED)]);
    let vm = TestVm::busybox(name).for_both_qemus().memory_mib(256).disk(disk);
    vm.setting("accelerator", "kvm").setting("cpu_model", "host")
}

fn boot(machine: TestVmBuilder) -> Result<TestVm> {
    let vm = machine.boot()?;
    let qemu = vm.qemu()?;
    assert_eq!(qemu.accelerator, "kvm", "{qemu:?}");
    Ok(vm)
}

fn verify_disk(vm: &TestVm) -> Result<()> {
    vm.sh(&format!(
        "mkdir -p /d; grep -q ' /d ' /proc/mounts || mount /dev/vda /d; probe drop-caches; probe verify /d/a.bin {SEED}"
    ))
    .map(drop)
}

/// Fills memory with known contents, and starts a process that counts.
fn fill_and_count(vm: &TestVm) -> Result<()> {
    vm.sh(&format!(
        "probe fill /tmp/memory {} {SEED}
        (i=0; while :; do i=$((i+1)); echo $i >/tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.05; done) \
        >/dev/null 2>&1 &",
        32 << 20
    ))
    .map(drop)
}

/// Asserts that the same guest continues from where it was.
fn goes_on(vm: &TestVm, nonce: &str) -> Result<()> {
    assert_eq!(vm.nonce()?, nonce, "it is the same guest");
    let counted = vm.sh("cat /tmp/count")?;
    vm.sh(&format!("while [ $(cat /tmp/count) -le {} ]; do sleep 0.1; done", counted.trim()))?;
    vm.sh(&format!("probe verify /tmp/memory {SEED}"))?;
    verify_disk(vm)
}

#[test]
#[ignore = "needs KVM: make test-nested"]
fn a_reboot_is_warm() -> Result<()> {
    let vm = boot(machine("warm"))?;
    verify_disk(&vm)?;
    let from_memory = |vm: &TestVm| Ok::<_, Error>(vm.status()?.disks[0].read_warm_bytes);
    let before = from_memory(&vm)?;
    vm.reboot_forced()?;
    vm.wait_incarnation(2)?;
    verify_disk(&vm)?;
    let served = from_memory(&vm)? - before;
    assert!(served >= FILE_BYTES as u64, "{served} bytes of {FILE_BYTES} came from memory");
    Ok(())
}

#[test]
#[ignore = "needs KVM: make test-nested"]
fn a_panic_is_recovered_from_and_dumped() -> Result<()> {
    let vm = boot(machine("crash").dumps())?;
    verify_disk(&vm)?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let file = vm.wait_event_within("the dump", patience(60), event!(DumpComplete { file, .. } => file))?;
    let vmcore = VmcoreFile::open(Path::new(&file)).unwrap();
    assert!(vmcore.is_complete());
    let linux = Linux::find(&vmcore, &vmcore.notes().to_bytes()).unwrap();
    let last_words = log::panic_reason(&linux.log().unwrap()).map(str::to_owned);
    assert!(last_words.as_deref().is_some_and(|words| words.contains("sysrq")), "{last_words:?}");
    verify_disk(&vm)
}

#[test]
#[ignore = "needs KVM: make test-nested"]
fn guest_hops_between_qemu_versions_under_kvm() -> Result<()> {
    let vm = boot(machine("hops"))?;
    fill_and_count(&vm)?;
    let nonce = vm.nonce()?;
    let (old, new) = (artifacts::installed_qemu()?, artifacts::qemu_10()?);
    for (hop, qemu) in [&old, &new, &new, &old].into_iter().enumerate() {
        let rejuvenated = vm.rejuvenate_to(qemu)?;
        assert_eq!(rejuvenated.status, 0, "hop {hop}: {}", rejuvenated.text());
        goes_on(&vm, &nonce)?;
    }
    let pauses: Vec<f64> = vm.events().iter().filter_map(event!(Rejuvenated { pause_ms, .. } => pause_ms)).collect();
    assert_eq!(pauses.len(), 4);
    eprintln!("pauses under KVM, ms: {pauses:?}");
    Ok(())
}

#[test]
#[ignore = "needs KVM: make test-nested"]
fn saved_guest_is_restored_in_each_mode() -> Result<()> {
    let vm = boot(machine("saved"))?;
    fill_and_count(&vm)?;
    let (nonce, snapshot) = (vm.nonce()?, vm.folder().join("snapshot"));
    vm.save_and_stop(&snapshot)?;
    for (name, option) in [("lazy", "--lazy"), ("eager", "--eager")] {
        let restored = vm.restore(&snapshot, name, &[option])?;
        restored.wait_running()?;
        goes_on(&restored, &nonce)?;
        restored.wait_event("all memory is there", event!(RestoreComplete))?;
        restored.stop_at_once()?;
    }
    Ok(())
}
