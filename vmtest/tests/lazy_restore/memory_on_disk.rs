//! A memory folder that is not on a tmpfs: what needs page faults is refused before anything is made, and the rest works.

use hearth_vmtest::{Disk, Drives, Mounted, Result, TestVm, event};

use super::faults::saved;
use super::{fill, verify};

#[test]
fn lazy_restore_onto_a_disk_is_refused_at_once() -> Result<()> {
    let Some(disk) = Mounted::ext4(1024)? else { return Ok(()) };
    let (vm, nonce, snapshot) = saved("to-disk")?;
    let (folder, memory) = (vm.folder().join("clone"), disk.path().join("refused"));
    let runtime = vm.runtime_root().join("refused");
    let set = |name: &str| format!("memory_folder={}", disk.path().join(name).display());
    let [snapshot_path, folder_path] = [&snapshot, &folder].map(|path| path.display().to_string());
    let common = ["restore", &snapshot_path, "--as", "refused", "--folder", &folder_path, "--set", &set("refused")];
    for mode in [&[][..], &["--lazy"], &["--working-set"], &["--trace", "1"]] {
        let refused = vm.cli_output(&[&common[..], mode].concat())?;
        assert_eq!(refused.status, 2, "{mode:?}: {}", refused.text());
        let expect = format!("error: memory_folder: {} is on ext4, ", memory.display());
        assert!(refused.text().contains(&expect), "{mode:?}: {}", refused.text());
        assert!(refused.text().contains("tmpfs") && refused.text().contains("--eager"), "{}", refused.text());
        for made in [&folder, &memory, &runtime] {
            assert!(!made.exists(), "{mode:?}: {} was made", made.display());
        }
    }
    let clone = vm.restore(&snapshot, "eager", &["--eager", "--set", &set("eager")])?;
    clone.wait_running()?;
    assert_eq!(clone.nonce()?, nonce);
    verify(&clone)?;
    assert!(clone.keeper_log().contains("is on ext4, where Linux reports no page faults"), "{}", clone.keeper_log());
    clone.stop_at_once().map(drop)
}

/// The machine runs, is saved, rebooted and dumped; only its budget is not kept while it starts beside a dump.
#[test]
fn machine_on_a_disk_does_without_page_faults() -> Result<()> {
    let Some(disk) = Mounted::ext4(1024)? else { return Ok(()) };
    let memory = disk.path().join("on-disk").display().to_string();
    let builder = TestVm::busybox("on-disk").setting("memory_folder", memory).setting("admission", "always");
    let vm = builder.dumps().disk(Disk::empty(8)).boot()?;
    assert!(vm.keeper_log().contains("is on ext4, where Linux reports no page faults"), "{}", vm.keeper_log());
    fill(&vm, 16)?;
    vm.save_with(&vm.folder().join("snapshot"), &["--scan"])?;
    verify(&vm)?;
    vm.sh("head -c 4194304 /dev/vda >/dev/null")?;
    vm.panic()?;
    vm.wait_incarnation(2)?;
    let without = "cannot control memory by page faults, so the machine may exceed its budget";
    vm.wait_event("its memory is not controlled", event!(Error { message } if message.contains(without)))?;
    vm.wait_event("the dump is complete", event!(DumpComplete))?;
    vm.has_no_disk_errors()
}
