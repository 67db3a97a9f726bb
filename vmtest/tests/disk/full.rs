//! A full file system of the host: the guest waits for space and sees no error.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hearth_api::EventRecord;
use hearth_vmtest::{Disk, Drives, Result, TestVm, event};

use super::{MIB, disk_status};

/// A small tmpfs. Dropping it unmounts it.
struct Small(tempfile::TempDir);

impl Small {
    /// Mounts it, or returns `None` without permission.
    fn mount(mib: u64) -> Option<Self> {
        let small = Self(tempfile::tempdir().expect("a folder"));
        small.run_mount(&["-t", "tmpfs", "-o", &format!("size={mib}m"), "tmpfs"]).then_some(small)
    }

    fn grow(&self, mib: u64) {
        assert!(self.run_mount(&["-o", &format!("remount,size={mib}m")]));
    }

    fn run_mount(&self, arguments: &[&str]) -> bool {
        Command::new("mount").args(arguments).arg(self.0.path()).status().is_ok_and(|status| status.success())
    }

    fn image(&self, bytes: u64) -> PathBuf {
        let path = self.0.path().join("disk.img");
        std::fs::File::create(&path).and_then(|file| file.set_len(bytes)).expect("our own image");
        path
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.0.path()).status();
    }
}

/// Command that fills the disk in the background.
const FILL: &str = "(yes hearth | dd of=/dev/vda bs=64k count=256 iflag=fullblock oflag=direct) >/dev/null 2>&1 &";

#[test]
fn full_file_system_makes_the_guest_wait() -> Result<()> {
    let Some(small) = Small::mount(8) else {
        eprintln!("skipped: only root can mount a small file system");
        return Ok(());
    };
    let image = small.image(32 * MIB as u64);
    let vm = TestVm::busybox("full").disk(Disk::in_place(&image).setting("name", "data")).boot()?;
    let write = vm.guest().start("yes hearth | dd of=/dev/vda bs=64k count=256 iflag=fullblock oflag=direct")?;
    let is_full =
        event!(|event| DiskFull { disk, folder, .. } if disk == "data" => (PathBuf::from(folder), event.sequence));
    let (folder, since) = vm.wait_event("a full disk", is_full)?;
    assert_eq!(folder, small.path());
    assert_ne!(disk_status(&vm, 0)?.waiting_for_space, 0);
    let refused = vm.cli_output(&["save", "full", "-o", "/nowhere"])?.text();
    assert!(refused.contains("cannot save: requests to disk data are waiting for space in"), "{refused}");

    // The next keeper inherits the waiting request.
    vm.kill_keeper()?;
    vm.restart_keeper()?;
    let again = |event: &EventRecord| is_full(event).filter(|(_, sequence)| *sequence > since);
    vm.wait_event("a full disk under the next keeper", again)?;

    small.grow(64);
    vm.wait_event("space again", event!(DiskSpaceAgain { disk, .. } if disk == "data"))?;
    let written = std::iter::repeat_with(|| vm.guest().take_answer(write)).take(120).flatten().next();
    assert_eq!(written.expect("the guest's command ends").status, 0);
    vm.has_no_disk_errors()?;
    assert_eq!(vm.sh("yes hearth | head -c 16777216 | cmp -n 16777216 - /dev/vda && echo same")?, "same\n");
    Ok(())
}

#[test]
fn machine_with_full_disk_can_be_stopped() -> Result<()> {
    let Some(small) = Small::mount(4) else {
        eprintln!("skipped: only root can mount a small file system");
        return Ok(());
    };
    let image = small.image(32 * MIB as u64);
    let vm = TestVm::busybox("filled").disk(Disk::in_place(&image)).boot()?;
    vm.sh(FILL)?;
    vm.wait_event_within("a full disk", Duration::from_secs(120), event!(DiskFull))?;
    // QEMU stops the queues of a panicked guest, but not of one whose power is cut.
    vm.panic()?;
    vm.wait_incarnation(2)?;
    vm.sh(FILL)?;
    let again = event!(|event| DiskFull if event.incarnation == 2);
    vm.wait_event_within("a full disk again", Duration::from_secs(120), again)?;
    assert_eq!(vm.stop_at_once()?.code(), Some(0));
    Ok(())
}
