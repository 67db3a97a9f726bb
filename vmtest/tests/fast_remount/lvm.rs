//! Volumes of LVM: a plan tells of them by their names. Their metadata are what LVM's own tools have written.

use super::*;

const STORE: &[u8] = include_bytes!("../../../crates/disk/tests/lvm/store-a.img");

#[test]
fn reads_are_told_by_logical_volume() -> Result<()> {
    let home = tempfile::tempdir().expect("a folder");
    let image = home.path().join("store.img");
    std::fs::write(&image, STORE).expect("an image");
    std::fs::File::options().append(true).open(&image).and_then(|file| file.set_len(64 << 20)).expect("a larger image");
    let vm = TestVm::busybox("lvm").memory_mib(256).setting("remount", remount([])).disk(Disk::in_place(&image));
    let vm = vm.boot()?;
    // So many MiB from the start, one of each.
    let read = |places: &str| {
        vm.sh(&format!(
            "echo 0 >/sys/block/vda/queue/read_ahead_kb
             for at in {places}; do dd if=/dev/vda of=/dev/null bs=1M count=1 skip=$at 2>/dev/null; done"
        ))
    };
    read("0 1 13")?;
    ready(&vm)?;
    vm.reset()?;
    vm.wait_incarnation(2)?;
    read("0 1 13 20")?;
    let plan = ready(&vm)?;
    let of = |name: &str, key: &str| {
        let volumes = plan["volumes"].as_array().into_iter().flatten();
        let sought = volumes.into_iter().find(|volume| volume["logical_volume"] == name);
        sought.and_then(|volume| volume[key].as_u64()).unwrap_or_else(|| panic!("no {key} of {name} in {plan}"))
    };
    for (name, mib, hits, misses) in [("mail", 1..11, 256, 0), ("stripes", 11..13, 0, 0), ("db-log", 13..16, 256, 0)] {
        let told = ["offset", "bytes", "hits", "misses"].map(|key| of(&format!("store/{name}"), key));
        assert_eq!(told, [mib.start << 20, (mib.end - mib.start) << 20, hits, misses], "{name} in {plan}");
    }
    assert!(of("store/web", "misses") >= 256, "{plan}");
    let page = vm.cli(&["remount-plan", vm.name()])?;
    assert!(page.contains("disk0 store/web") && page.contains("4 of 5 volumes without a miss"), "{page}");
    Ok(())
}
