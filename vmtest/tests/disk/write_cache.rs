//! A write cache that the guest has switched off. From then on the guest sends no flushes, and each write must be durable when it
//! is answered.
//!
//! The disk is a qcow2 image, which tells from outside: the tables that make a new cluster part of the image are written with
//! the next flush.

use std::path::{Path, PathBuf};

use hearth_vmtest::{Disk, Drives, Result, TestVm};
use serde_json::Value;

use super::tool;

const CLUSTER_BYTES: u64 = 64 << 10;

fn new_image(folder: &Path) -> PathBuf {
    let image = folder.join("disk.qcow2");
    tool("qemu-img", &["create", "-q", "-f", "qcow2", image.to_str().expect("a path of ours"), "16M"]);
    image
}

/// The guest has written this cluster, which must be new, and has its answer. Whether the image has it, too.
fn is_durable(vm: &TestVm, image: &Path, cluster: u64) -> Result<bool> {
    vm.sh(&format!(
        "tr '\\0' x </dev/zero | dd of=/dev/vda bs=64k seek={cluster} count=1 iflag=fullblock oflag=direct"
    ))?;
    let map = tool("qemu-img", &["map", "-U", "--output=json", "-f", "qcow2", image.to_str().expect("a path of ours")]);
    let extents: Vec<Value> = serde_json::from_str(&map).expect("a list of extents");
    let at = cluster * CLUSTER_BYTES;
    let has = |extent: &&Value| {
        let start = extent["start"].as_u64().expect("a number");
        (start..start + extent["length"].as_u64().expect("a number")).contains(&at)
    };
    Ok(extents.iter().find(has).expect("extents cover the image")["data"] == true)
}

fn image_of(vm: &TestVm) -> Result<PathBuf> {
    Ok(super::disk_status(vm, 0)?.path.into())
}

fn host_reload(vm: &TestVm, verb: &str, options: &[&str]) -> Result<()> {
    let record = vm.folder().join("record.json").display().to_string();
    vm.cli(&[&["host-reload", verb, "--record", &record], options].concat()).map(drop)
}

#[test]
fn write_cache_stays_off_in_every_qemu() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = new_image(home.path());
    let vm = TestVm::busybox("cache").disk(Disk::in_place(&image).setting("format", "qcow2")).boot()?;
    let nonce = vm.nonce()?;
    assert!(!is_durable(&vm, &image, 1)?, "the cache is on, and there was no flush");
    vm.sh("echo 'write through' >/sys/block/vda/cache_type")?;
    assert!(is_durable(&vm, &image, 2)?, "the cache is off");

    vm.rejuvenate()?;
    assert!(is_durable(&vm, &image, 3)?, "after a hop");

    for (drill, cluster) in [("commit", 4), ("resume", 5)] {
        vm.restart_keeper_with(&[("HEARTH_DRILL_DIE_AFTER", drill)])?;
        vm.wait_running()?;
        vm.cli_output(&["rejuvenate", vm.name()])?;
        vm.wait_keeper_end()?;
        vm.restart_keeper()?;
        vm.wait_running()?;
        assert!(is_durable(&vm, &image, cluster)?, "after a hop whose keeper died: {drill}");
    }

    host_reload(&vm, "prepare", &["--drill"])?;
    vm.wait_keeper_end()?;
    host_reload(&vm, "resume", &[])?;
    vm.wait_running()?;
    assert!(is_durable(&vm, &image, 6)?, "after parking");

    let snapshot = vm.folder().join("snapshot");
    vm.save(&snapshot)?;
    let clone = vm.restore(&snapshot, "copy", &[])?;
    clone.wait_running()?;
    assert!(is_durable(&clone, &image_of(&clone)?, 7)?, "in a restored guest");
    for vm in [&vm, &clone] {
        assert_eq!(vm.nonce()?, nonce, "it is the same guest");
        vm.has_no_disk_errors()?;
    }

    vm.reset()?;
    vm.wait_incarnation(2)?;
    assert!(!is_durable(&vm, &image, 8)?, "the next guest begins with the cache on");
    Ok(())
}

/// A reset of the device may leave the cache off or switch it on. The driver is told which.
#[test]
fn driver_and_disk_agree_on_the_write_cache() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = new_image(home.path());
    let vm = TestVm::busybox("agree").disk(Disk::in_place(&image).setting("format", "qcow2")).boot()?;
    vm.sh("echo 'write through' >/sys/block/vda/cache_type")?;
    vm.sh("d=$(basename $(readlink /sys/block/vda/device)); cd /sys/bus/virtio/drivers/virtio_blk && echo $d >unbind && echo $d >bind")?;
    let told = vm.sh("cat /sys/block/vda/cache_type")?;
    assert_eq!(is_durable(&vm, &image, 1)?, told.trim() == "write through", "the driver was told: {told}");
    vm.sh("echo 'write back' >/sys/block/vda/cache_type")?;
    assert!(!is_durable(&vm, &image, 2)?, "the cache is on again");
    Ok(())
}
