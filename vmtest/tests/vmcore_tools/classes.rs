//! Classes of pages compared with makedumpfile's: each class must have the same number of pages, at every kind of level.
//!
//! makedumpfile gets the dead guest's RAM as an ELF file that is made here.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_memory::PAGE_BYTES;
use hearth_recovery::vmcore::linux::{ClassCounts, Classification, Linux};
use hearth_recovery::vmcore::memory::address_of_pfn;
use hearth_recovery::vmcore::{DeadRam, DumpLevel, PhysicalMemory};
use hearth_vmtest::artifacts::{Debian, Linux as Kernel};
use hearth_vmtest::{Drives, PlainVm, Result, images};

use super::dead::{Dead, work};
use super::tools;

/// Hearth's counts under makedumpfile's names.
fn named(ram: &DeadRam, found: &Classification, level: DumpLevel) -> tools::Counts {
    let ClassCounts { cache, private_cache, user, free, poisoned, offline, unjudged, undescribed } = found.counts;
    assert_eq!((unjudged, undescribed), (0, 0));
    let zero = if level.excludes_zero() { zero_pages(ram, found) } else { 0 };
    [
        ("Non-private cache pages", cache),
        ("Private cache pages", private_cache),
        ("User process data pages", user),
        ("Free pages", free),
        ("Hwpoison pages", poisoned),
        ("Offline pages", offline),
        ("Pages filled with zero", zero),
        ("Remaining pages", found.kept.count() - zero),
    ]
    .map(|(name, count)| (name.to_owned(), count))
    .into()
}

fn zero_pages(ram: &DeadRam, found: &Classification) -> u64 {
    let mut page = [0; PAGE_BYTES as usize];
    let is_zero = |pfn: &u64| {
        ram.read(address_of_pfn(*pfn), &mut page).unwrap();
        page.iter().all(|byte| *byte == 0)
    };
    found.kept.iter().filter(is_zero).count() as u64
}

fn check(kernel: Kernel, dead: &Dead, levels: &[u8]) {
    let (_folder, file) = tools::scratch();
    let (dump, filtered) = (file("ram.elf"), file("filtered"));
    write_elf(&dump, dead);
    let linux = Linux::find(&dead.ram, &dead.notes).unwrap();
    for level in levels {
        let theirs = tools::makedumpfile(kernel, "-l", *level, &dump, &filtered);
        std::fs::remove_file(&filtered).unwrap();
        let level = DumpLevel::new(*level).unwrap();
        let ours = named(&dead.ram, &linux.classify(level).unwrap(), level);
        println!("{kernel:?}, {level:?}: {ours:?}");
        for (name, count) in &ours {
            assert_eq!(*count, theirs[name], "{kernel:?}, {level:?}: {name}\nours: {ours:#?}\ntheirs: {theirs:#?}");
        }
    }
}

/// Writes an ELF file with notes and RAM. The program headers follow the ELF header, where makedumpfile expects them.
fn write_elf(path: &Path, dead: &Dead) {
    const EHDR_BYTES: u64 = 64;
    const PHDR_BYTES: u64 = 56;
    const CHUNK_BYTES: u64 = 1 << 20;
    let ranges = dead.ram.ranges();
    let headers = ranges.len() as u64 + 1;
    let notes_start = EHDR_BYTES + headers * PHDR_BYTES;
    let mut ram_start = (notes_start + dead.notes.len() as u64).next_multiple_of(PAGE_BYTES);
    // 64 bits, little endian, a core file of x86-64.
    let mut head = b"\x7fELF\x02\x01\x01".to_vec();
    head.resize(16, 0);
    head.extend([4_u16, 62].map(u16::to_le_bytes).concat());
    head.extend(1_u32.to_le_bytes());
    head.extend([0, EHDR_BYTES, 0].map(u64::to_le_bytes).concat());
    head.extend(0_u32.to_le_bytes());
    head.extend([EHDR_BYTES as u16, PHDR_BYTES as u16, headers as u16, 0, 0, 0].map(u16::to_le_bytes).concat());
    let mut program = |kind: u32, offset: u64, address: u64, bytes: u64| {
        head.extend([kind, 0].map(u32::to_le_bytes).concat());
        head.extend([offset, 0, address, bytes, bytes, 0].map(u64::to_le_bytes).concat());
    };
    program(4, notes_start, 0, dead.notes.len() as u64);
    let file = File::create(path).unwrap();
    let mut chunk = vec![0; CHUNK_BYTES as usize];
    for range in ranges {
        let (start, bytes) = (range.start * PAGE_BYTES, (range.end - range.start) * PAGE_BYTES);
        program(1, ram_start, start, bytes);
        for offset in (0..bytes).step_by(CHUNK_BYTES as usize) {
            let chunk = &mut chunk[..CHUNK_BYTES.min(bytes - offset) as usize];
            dead.ram.read(hearth_memory::GuestPhysicalAddress(start + offset), chunk).unwrap();
            if chunk.iter().any(|byte| *byte != 0) {
                file.write_all_at(chunk, ram_start + offset).unwrap();
            }
        }
        ram_start += bytes;
    }
    file.write_all_at(&head, 0).unwrap();
    file.write_all_at(&dead.notes, notes_start).unwrap();
    file.set_len(ram_start).unwrap();
}

/// Uses several file systems in the guest: each keeps other data beside its pages, and xfs has large folios.
fn disks(vm: &PlainVm) -> Result<()> {
    for (device, kind) in [("vda", "ext4"), ("vdb", "xfs")] {
        let place = format!("mkdir /{kind} && mount -t {kind} /dev/{device} /{kind} && cd /{kind}");
        vm.sh(&format!("{place} && probe fill clean 20000000 1 && sync && probe fill dirty 3000000 2"))?;
        vm.sh(&format!("cat /{kind}/clean >/dev/null; ls -lR /{kind} /bin >/{kind}/names"))?;
    }
    Ok(())
}

#[track_caller]
fn check_busybox(kernel: Kernel, mib: u64, levels: &[u8]) -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let (ext4, xfs) = (home.path().join("ext4.img"), home.path().join("xfs.img"));
    images::ext4(&ext4, 64, &[])?;
    images::xfs(&xfs, images::XFS_MIB_MIN, &[])?;
    let vm = PlainVm::busybox_on("classes", kernel).cpus(2).drive(&ext4, "").drive(&xfs, "");
    let dead = Dead::of(vm, mib, |vm| disks(vm).and_then(|()| work(vm)))?;
    check(kernel, &dead, levels);
    Ok(())
}

#[test]
#[ignore = "make test-vmcore"]
fn linux_6_1_classes_match_makedumpfile() -> Result<()> {
    check_busybox(Kernel::Stable, 512, &(0..32).collect::<Vec<_>>())
}

#[test]
#[ignore = "make test-vmcore"]
fn linux_6_12_classes_match_makedumpfile() -> Result<()> {
    check_busybox(Kernel::Newer, 512, &[31, 30, 29, 27, 23, 17, 15, 8])
}

#[test]
#[ignore = "make test-vmcore"]
fn classes_above_4_gib_match_makedumpfile() -> Result<()> {
    check_busybox(Kernel::Stable, 3328, &[31])
}

#[test]
#[ignore = "make test-vmcore"]
fn debian_classes_match_makedumpfile() -> Result<()> {
    let home = tempfile::tempdir().unwrap();
    let root = home.path().join("root.img");
    images::copy(&Debian::Web.root()?, &root)?;
    let vm = PlainVm::debian("classes", Debian::Web).cpus(2).drive(&root, "");
    let dead = Dead::of(vm, 2048, |vm| {
        vm.sh("cat /var/www/html/files/*.bin >/dev/null; echo always >/sys/kernel/mm/transparent_hugepage/enabled")?;
        work(vm)
    })?;
    check(Kernel::Stable, &dead, &[31, 17]);
    Ok(())
}
