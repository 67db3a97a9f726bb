//! Domains of libvirt: attached, started and ended in every way, and detached.
//!
//! - `attach`: what attaching and detaching change, what libvirt keeps, and a domain that becomes a machine of its own.
//! - `ends`: QEMU or the keeper ends, and what is kept.
//! - `resets`: the guest is reset inside its QEMU.
//! - `crashes`: the guest panics, and who ends or restarts it.
//! - `arrivals`: a disk that is fetched from an object store while the domain runs.
//! - `copies`: copies of a disk, with a frozen guest.
//! - `package`: the package's unit, and its removal.
//! - `kills`: keeper, QEMU, libvirtd and `hearth host` are killed at random moments.

#[path = "libvirt/arrivals.rs"]
mod arrivals;
#[path = "libvirt/attach.rs"]
mod attach;
#[path = "libvirt/copies.rs"]
mod copies;
#[path = "libvirt/crashes.rs"]
mod crashes;
#[path = "libvirt/ends.rs"]
mod ends;
#[path = "libvirt/kills.rs"]
mod kills;
#[path = "libvirt/package.rs"]
mod package;
#[path = "libvirt/resets.rs"]
mod resets;
#[path = "libvirt/silence.rs"]
mod silence;

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use hearth_api::{DumpStatus, EmberStatus, MachineState};
use hearth_vmtest::artifacts;
use hearth_vmtest::images::{self, File};
use hearth_vmtest::libvirt::{Domain, DomainDisk, LibvirtVm};
use hearth_vmtest::{Drives, Result};
use tempfile::TempDir;

const FILES: usize = 16;
const FILE_BYTES: usize = 1 << 20;
const PAGES: u64 = (FILES * FILE_BYTES / 4096) as u64;
const SEED: u64 = 1;
/// So much that the next guest's own memory does not take the ember's place, also after several resets.
const MEMORY_MIB: u64 = 768;

/// What is done to a domain.
type Deed = fn(&LibvirtVm) -> Result<()>;

/// A domain with one disk of files, not yet attached.
struct Files {
    vm: LibvirtVm,
    image: PathBuf,
    _images: TempDir,
}

/// A folder for images. A QEMU without Hearth opens them as a user of its own.
fn image_folder() -> TempDir {
    let images = tempfile::tempdir().expect("a folder");
    std::fs::set_permissions(images.path(), Permissions::from_mode(0o755)).expect("our own folder");
    images
}

/// An image with all files.
fn make_files(image: &Path) -> Result<()> {
    let files: Vec<_> = (0..FILES).map(|file| File::pattern(&format!("f{file}"), FILE_BYTES, SEED)).collect();
    images::ext4(image, FILES as u64 + 64, &files)
}

impl Files {
    fn define(name: &str) -> Result<Option<Self>> {
        Self::define_as(name, false)
    }

    /// With an empty second disk, and a guest that has fio.
    fn define_with_load(name: &str) -> Result<Option<Self>> {
        Self::define_as(name, true)
    }

    fn define_as(name: &str, has_load: bool) -> Result<Option<Self>> {
        let images = image_folder();
        let [image, load] = ["data.img", "load.img"].map(|name| images.path().join(name));
        make_files(&image)?;
        images::empty(&load, 48)?;
        let disk = |target, image| DomainDisk { target, image, format: "raw", limits: None };
        let both = [disk("vda", &image), disk("vdb", &load)];
        let disks = if has_load { &both[..] } else { &both[..1] };
        let boot = artifacts::busybox(has_load)?;
        let domain = Domain { boot: Some(boot), ..Domain::of_busybox(name, MEMORY_MIB, disks)? };
        Ok(LibvirtVm::define_domain(domain)?.map(|vm| Self { vm, image, _images: images }))
    }

    /// Attached and started.
    fn running(name: &str) -> Result<Option<Self>> {
        let Some(files) = Self::define(name)? else { return Ok(None) };
        files.vm.hearth(&["attach", name, "--yes"])?;
        files.vm.start()?;
        Ok(Some(files))
    }

    /// Attached and started, with these keys in its file, and these of `[crash]`.
    fn running_with(name: &str, keys: &str, crash: &str) -> Result<Option<Self>> {
        let Some(files) = Self::define(name)? else { return Ok(None) };
        files.start_with(keys, crash)?;
        Ok(Some(files))
    }

    /// Attaches and starts it, with these keys in its file, and these of `[crash]`.
    fn start_with(&self, keys: &str, crash: &str) -> Result<()> {
        let folder = self.dump_folder();
        self.vm.attach_with(keys, &format!("[crash]\ndump_folder = \"{}\"\n{crash}", folder.display()))?;
        self.vm.start()
    }

    /// Where its dumps are, with keys of its own.
    fn dump_folder(&self) -> PathBuf {
        self.vm.folder().join("dumps")
    }

    /// Waits for the dump of an incarnation. Returns its status.
    fn wait_dump(&self, incarnation: u32) -> Result<DumpStatus> {
        let find = || {
            let mut dumps = self.vm.status()?.dumps.into_iter();
            Ok::<_, hearth_vmtest::Error>(dumps.find(|dump| dump.incarnation == incarnation && dump.state.is_over()))
        };
        self.vm.wait_until("the dump", || Ok(find()?.is_some()))?;
        Ok(find()?.expect("it was just there"))
    }

    /// Reads and checks all files.
    fn verify(&self) -> Result<()> {
        verify(&self.vm, "vda")
    }

    /// Ends the guest's writes, and waits until the keeper has noted the last one: only then the next keeper knows the image as this
    /// one has left it.
    fn wait_noted(&self) -> Result<()> {
        self.vm.sh("mount -o remount,ro /mnt")?;
        let notes = format!("/dev/shm/hearth/{}/image-notes", self.vm.status()?.name);
        self.vm.wait_until("a note of the last write", || {
            images::is_noted(&self.vm.command(&["cat", &notes], "")?.stdout, &self.image)
        })
    }

    fn ember(&self) -> Result<EmberStatus> {
        Ok(self.vm.status()?.ember)
    }

    #[track_caller]
    fn assert_warm(&self) -> Result<()> {
        assert_warm(&self.vm, "vda")
    }
}

/// Reads and checks all files of this disk.
fn verify(vm: &LibvirtVm, disk: &str) -> Result<()> {
    vm.sh(&format!("grep -q ' /mnt ' /proc/mounts || mount -o noatime /dev/{disk} /mnt"))?;
    vm.sh(&format!("for f in /mnt/f*; do probe verify $f {SEED} || {{ echo in $f; exit 1; }}; done")).map(drop)
}

/// Reads and checks all files of `vda` and `vdb`, which a new guest has not mounted.
fn verify_both(vm: &LibvirtVm) -> Result<()> {
    for disk in ["vda", "vdb"] {
        vm.sh(&format!("mkdir -p /{disk} && mount -o noatime /dev/{disk} /{disk}"))?;
        vm.sh(&format!("for f in /{disk}/f*; do probe verify $f {SEED} || {{ echo in $f; exit 1; }}; done"))?;
    }
    Ok(())
}

/// The next guest reads all files of this disk, and the memory of the last one answers.
#[track_caller]
fn assert_warm(vm: &LibvirtVm, disk: &str) -> Result<()> {
    assert_warm_with(vm, disk, PAGES)
}

/// The same, of at least so many pages.
#[track_caller]
fn assert_warm_with(vm: &LibvirtVm, disk: &str, pages_kept: u64) -> Result<()> {
    let before = vm.status()?.ember;
    assert!(before.pages_kept >= pages_kept, "{before:?}");
    verify(vm, disk)?;
    let after = vm.status()?.ember;
    assert!(after.pages_served >= PAGES * 9 / 10, "{after:?}");
    // A guest that was killed had some dirty blocks.
    assert!(after.refused.tag_mismatch <= PAGES / 50, "{after:?}");
    Ok(())
}

#[track_caller]
fn assert_within_budget(vm: &LibvirtVm) -> Result<()> {
    let memory = vm.status()?.memory;
    assert!(memory.peak_bytes <= memory.budget_bytes * 103 / 100, "{memory:?}");
    Ok(())
}

/// The next keeper of the same guest, which has nothing cached any more.
fn replace_keeper(vm: &LibvirtVm) -> Result<()> {
    vm.kill_keeper()?;
    vm.start_keeper()?;
    vm.wait_until("QEMU is connected", || Ok(vm.status()?.disks.iter().all(|disk| disk.connected)))?;
    vm.sh("echo 3 >/proc/sys/vm/drop_caches").map(drop)
}

/// Waits until the domain is off, and its keeper waits for nothing.
fn wait_off(vm: &LibvirtVm) -> Result<()> {
    vm.wait_until("the domain is off", || Ok(vm.status()?.state == MachineState::Stopped))
}

/// Puts a script in the place of virsh, beside libvirt only. `$real` is virsh itself.
fn wrap_virsh(vm: &LibvirtVm, script: &str) -> Result<()> {
    let [real, wrapper] = ["virsh.real", "virsh.wrapper"].map(|name| vm.folder().join(name).display().to_string());
    vm.must(&["cp", "/usr/bin/virsh", &real], "")?;
    vm.must(&["tee", &wrapper], &format!("#!/bin/sh\nreal='{real}'\n{script}"))?;
    vm.must(&["chmod", "755", &wrapper], "")?;
    vm.must(&["mount", "--bind", &wrapper, "/usr/bin/virsh"], "").map(drop)
}
