//! A disk that is fetched from an object store while the domain runs: its files are right before and after all of it is there, whether
//! keeper, QEMU or store go away; and libvirt's own QEMU does not get it before.

use std::path::Path;

use hearth_api::{ArrivalStatus, EventKind};
use hearth_vmtest::libvirt::{DomainDisk, LibvirtVm};
use hearth_vmtest::{Disk, Drives, Result, TestVm};
use loopback_s3::{BUCKET, S3Server, Wire};

use super::{FILES, MEMORY_MIB, SEED, image_folder, make_files, verify, wait_off};

const NAME: &str = "arrivals";
const MIB: u64 = 1 << 20;

/// Saves a machine with a disk of files to a folder and to the store.
fn save(server: &S3Server, folder: &Path) -> Result<()> {
    let (image, credentials) = (folder.join("data.img"), folder.join("s3.env"));
    make_files(&image)?;
    let lines = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
    std::fs::write(&credentials, lines.collect::<String>()).expect("it can be written");
    let section: toml::Table = [("credentials", &credentials), ("folder", &folder.join("staging"))]
        .map(|(key, path)| (key.to_owned(), path.display().to_string().into()))
        .into_iter()
        .collect();
    let disk = Disk::in_place(&image).setting("name", "data");
    let vm = TestVm::busybox("saved").disk(disk).setting("object_store", section).boot()?;
    vm.save(&folder.join("saved"))?;
    vm.save(Path::new(&format!("s3://{BUCKET}/one")))?;
    vm.stop_at_once().map(drop)
}

fn arrival(vm: &LibvirtVm) -> Result<Option<ArrivalStatus>> {
    Ok(vm.status()?.disks.swap_remove(0).arrival)
}

/// Runs `hearth`, which must fail and say this.
#[track_caller]
fn refused(vm: &LibvirtVm, words: &[&str], why: &str) -> Result<()> {
    let (code, said) = vm.try_hearth(words)?;
    assert!(code != 0 && said.contains("still being fetched") && said.contains(why), "{code}: {said}");
    Ok(())
}

#[test]
fn domain_runs_while_its_disk_arrives() -> Result<()> {
    let (server, images) = (S3Server::start(), image_folder());
    let disks = images.path().join("disks");
    let image = disks.join("disk-data.qcow2");
    let disk = DomainDisk { target: "vda", image: &image, format: "qcow2", limits: None };
    let Some(vm) = LibvirtVm::define(NAME, MEMORY_MIB, &[disk])? else { return Ok(()) };
    save(&server, images.path())?;
    let at = |name: &str| images.path().join(name).display().to_string();

    let said = vm.hearth(&["restore", &at("saved"), "--disks-only", "--folder", &at("local")])?;
    assert!(said.contains(&at("local/disk-data.qcow2")) && !said.contains("attach"), "{said}");
    vm.must(&["qemu-img", "compare", &at("local/disk-data.qcow2"), &at("data.img")], "")?;

    // So slow that much is missing also after a slow boot.
    let slow = Wire::Slow(MIB);
    server.set_wire(slow);
    let (from, path) = (format!("s3://{BUCKET}/one"), at("disks"));
    let store = ["--credentials", &at("s3.env"), "--cache", &at("cache")];
    let said = vm.hearth(&[&["restore", &from, "--disks-only", "--folder", &path][..], &store].concat())?;
    let (paths, section) = said.split_once("[object_store]").expect("what to add to the machine's file");
    assert!(paths.contains(&image.display().to_string()), "{said}");
    assert!(!disks.join("machine.toml").exists() && !disks.join("machine.restore.json").exists());

    refused(&vm, &["import", NAME, "--folder", &at("own")], "hearth attach")?;
    let on_sata = ["--targetbus", "sata", "--subdriver", "qcow2", "--config"];
    let other = at("other.qcow2");
    std::fs::copy(&image, &other).expect("a small image");
    vm.virsh("attach-disk", &[&[other.as_str(), "sda"][..], &on_sata].concat())?;
    refused(&vm, &["attach", NAME, "--yes"], "its bus is sata")?;
    vm.virsh("detach-disk", &["sda", "--config"])?;

    vm.attach_with("", &format!("[object_store]{section}"))?;
    vm.start()?;
    let nonce = vm.nonce()?;
    let missing =
        |vm: &LibvirtVm| Ok::<_, hearth_vmtest::Error>(arrival(vm)?.map_or(0, |arrival| arrival.missing_bytes));
    assert!(missing(&vm)? > FILES as u64 / 4 * MIB, "it arrived too early for this test");
    let early = format!("mount -o noatime /dev/vda /mnt && probe verify /mnt/f{} {SEED}", FILES - 1);
    vm.sh(&early)?;
    let (code, said) = vm.try_hearth(&["copy-disk", NAME, "vda", &at("copy")])?;
    assert!(code != 0 && said.contains("still being fetched"), "{said}");
    refused(&vm, &["detach", NAME], "disk_complete")?;

    vm.kill_keeper()?;
    vm.start_keeper()?;
    vm.sh(&format!(
        "echo 1 >/proc/sys/vm/drop_caches; probe verify /mnt/f{} {SEED} && echo new >/mnt/new && sync",
        FILES / 2
    ))?;
    assert_eq!(vm.nonce()?, nonce);
    assert!(missing(&vm)? > 0, "it arrived too early for this test");

    // A read waits, also for the next keeper, until its guest has ended.
    server.set_wire(Wire::Dead);
    vm.sh("(cat /mnt/f* >/dev/null; echo $? >/tmp/ended) >/dev/null 2>&1 </dev/null &")?;
    let waits = |vm: &LibvirtVm| Ok(arrival(vm)?.is_some_and(|arrival| !arrival.waits.is_empty()));
    vm.wait_until("a waiting read", || waits(&vm))?;
    let pid = vm.status()?.keeper.pid.to_string();
    vm.must(&["kill", &pid], "")?;
    vm.wait_until("the keeper's end", || Ok(!vm.command(&["kill", "-0", &pid], "")?.status.success()))?;
    vm.start_keeper()?;
    vm.wait_until("a waiting read", || waits(&vm))?;
    vm.sh("[ ! -e /tmp/ended ]")?;
    assert_eq!((vm.nonce()?, vm.status()?.disks[0].io_errors), (nonce, 0));
    vm.virsh("destroy", &[])?;
    wait_off(&vm)?;
    refused(&vm, &["detach", NAME], "disk_complete")?;

    server.set_wire(Wire::Whole);
    vm.start()?;
    verify(&vm, "vda")?;
    let is_complete = |vm: &LibvirtVm| {
        Ok(vm
            .events()?
            .iter()
            .any(|record| matches!(&record.event, EventKind::DiskComplete { disk, .. } if disk == "vda")))
    };
    vm.wait_until("a complete disk", || is_complete(&vm))?;
    server.set_wire(Wire::Dead);
    assert_eq!(arrival(&vm)?, None);
    vm.sh("echo 1 >/proc/sys/vm/drop_caches; [ \"$(cat /mnt/new)\" = new ]")?;
    verify(&vm, "vda")?;
    assert_eq!(vm.status()?.disks[0].io_errors, 0);
    vm.virsh("destroy", &[])?;
    wait_off(&vm)?;
    vm.hearth(&["detach", NAME]).map(drop)
}
