//! Tests with a made-up Linux, healthy and damaged in many ways.

use hearth_memory::PAGE_BYTES;
use proptest::prelude::*;

use super::super::memory::PhysicalMemory;
use super::super::{Bitmap, DumpLevel};
use super::synthetic::*;
use super::{ClassCounts, Classification, KERNELS_MAX, Linux, NotUnderstood, Vmcoreinfo};

const LRU: u64 = 1 << 4;
const SLAB_6_1: u64 = 1 << 9;
const SWAP_CACHE: u64 = 1 << 10;
const PRIVATE: u64 = 1 << 13;
const SWAP_BACKED: u64 = 1 << 19;
const POISONED_6_12: u64 = 1 << 20;
const FILE: u64 = 0xffff_8880_0100_0000;
const ANONYMOUS: u64 = FILE | 1;

const CACHED: Page = Page { flags: LRU, mapping: FILE, users: 2, ..KERNELS };
const PROGRAMS: Page = Page { flags: LRU | SWAP_BACKED, mapping: ANONYMOUS, mapcount: 0, ..KERNELS };

fn classify(linux: &Synthetic, level: u8) -> Result<Classification, NotUnderstood> {
    let level = DumpLevel::new(level).unwrap();
    let found = Linux::with(&linux.ram, linux.vmcoreinfo.clone()).unwrap().classify(level)?;
    let left_out = Bitmap::of(PAGES, linux.ram.ranges()).count() - found.kept.count();
    assert_eq!(left_out, found.counts.excluded(), "each page is counted once");
    Ok(found)
}

fn counts(linux: &Synthetic, level: u8) -> ClassCounts {
    classify(linux, level).unwrap().counts
}

/// Checks at which levels a page with this descriptor is left out.
#[track_caller]
fn check_levels(kinds: &[Kind], page: Page, expect: fn(u8) -> bool) {
    for kind in kinds {
        let mut linux = Synthetic::new(*kind);
        linux.put(1000, page);
        for level in 0..32 {
            let found = classify(&linux, level).unwrap();
            assert_eq!(!found.kept.contains(1000), expect(level), "{kind:?}, level {level}");
            assert_eq!(found.counts.unjudged, 0);
        }
    }
}

#[test]
fn pages_are_left_out_at_makedumpfiles_levels() {
    let all = &Kind::ALL;
    check_levels(all, KERNELS, |_| false);
    check_levels(all, CACHED, |level| level & 6 != 0);
    check_levels(all, Page { flags: LRU | PRIVATE, ..CACHED }, |level| level & 4 != 0);
    check_levels(all, Page { flags: SWAP_CACHE | SWAP_BACKED, ..CACHED }, |level| level & 6 != 0);
    // This flag alone has another meaning.
    check_levels(all, Page { flags: SWAP_CACHE, ..CACHED }, |_| false);
    check_levels(all, PROGRAMS, |level| level & 8 != 0);
    let free = |kind: Kind| Page { users: 0, mapcount: kind.buddy(), ..KERNELS };
    let offline = |kind: Kind| Page { mapcount: kind.offline(), ..KERNELS };
    for kind in Kind::ALL {
        check_levels(&[kind], free(kind), |level| level & 16 != 0);
        check_levels(&[kind], offline(kind), |level| level > 1);
    }
}

#[test]
fn slab_and_poison_are_read_for_each_kernel() {
    let slab = Page { mapping: ANONYMOUS, ..KERNELS };
    check_levels(&[Kind::Linux6_1], Page { flags: SLAB_6_1, ..slab }, |_| false);
    check_levels(&[Kind::Linux6_12], Page { mapcount: 0xf500_0000, ..slab }, |_| false);
    check_levels(&[Kind::Linux6_12], Page { mapcount: 0xf500_1234, ..slab }, |_| false);
    check_levels(&[Kind::Linux6_1], Page { flags: SLAB_6_1, mapcount: Kind::Linux6_1.buddy(), ..slab }, |_| false);
    check_levels(&[Kind::Linux6_12], Page { flags: POISONED_6_12, ..KERNELS }, |level| level > 1);
    check_levels(&[Kind::Linux6_1], Page { flags: POISONED_6_12, ..KERNELS }, |_| false);
}

#[test]
fn blocks_and_compounds_are_left_out_whole() {
    for kind in Kind::ALL {
        let mut linux = Synthetic::new(kind);
        linux.put_free(1024, 10);
        linux.put_compound(512, 4, CACHED, false);
        linux.put_compound(528, 3, PROGRAMS, false);
        linux.put_compound(2560, 9, Page { users: 0, ..KERNELS }, true);
        linux.put_compound(600, 3, KERNELS, false);
        let expect = ClassCounts { free: 1024, cache: 16, user: 8 + 512, ..ClassCounts::default() };
        assert_eq!(counts(&linux, 31), expect, "{kind:?}");
        let kept = classify(&linux, 31).unwrap().kept;
        assert!((600..608).all(|pfn| kept.contains(pfn)) && !kept.contains(2047) && kept.contains(2048));
        assert_eq!(counts(&linux, 8), ClassCounts { user: 8 + 512, ..ClassCounts::default() });
    }
}

#[test]
fn shared_descriptors_of_huge_pages_are_understood() {
    let mut linux = Synthetic::new(Kind::Linux6_12);
    linux.put_compound(2560, 9, Page { users: 0, ..KERNELS }, true);
    // The kernel gave back all pages of descriptors except the first, so every 64 descriptors look like the first ones.
    let first: Vec<u8> = linux.ram.bytes[(DESCRIPTORS + 2560 * 64) as usize..][..4096].to_vec();
    for page in 1..8 {
        linux.ram.write(DESCRIPTORS + 2560 * 64 + page * 4096, &first);
    }
    assert_eq!(counts(&linux, 31), ClassCounts { user: 512, ..ClassCounts::default() });
}

/// Checks that a page with this descriptor is kept and counted.
#[track_caller]
fn check_implausible(page: fn(Kind) -> Page) {
    for kind in Kind::ALL {
        let mut linux = Synthetic::new(kind);
        linux.put(1001, page(kind));
        let found = classify(&linux, 31).unwrap();
        assert!(found.kept.contains(1001));
        assert_eq!(found.counts, ClassCounts { unjudged: 1, ..ClassCounts::default() }, "{kind:?}");
    }
}

#[test]
fn implausible_descriptors_keep_their_pages() {
    check_implausible(|kind| Page { users: 0, mapcount: kind.buddy(), private: 11, ..KERNELS });
    check_implausible(|kind| Page { users: 0, mapcount: kind.buddy(), private: 60, ..KERNELS });
    check_implausible(|kind| Page { users: 0, mapcount: kind.buddy(), private: u64::MAX, ..KERNELS });
    // Page frame 1001 cannot begin a block of two.
    check_implausible(|kind| Page { users: 0, mapcount: kind.buddy(), private: 1, ..KERNELS });
    check_implausible(|kind| Page { users: 1, mapcount: kind.buddy(), ..KERNELS });
    check_implausible(|_| Page { mapping: 0x1234_5678_9abc_def0, ..CACHED });
    check_implausible(|_| Page { users: 0xdead_beef, ..CACHED });
    check_implausible(|_| Page { mapcount: 0xdead_beef, ..CACHED });
    check_implausible(|_| Page { mapping: 0xdead_0001, ..PROGRAMS });
    // In another zone than its neighbours.
    check_implausible(|_| Page { flags: LRU | 1 << 63, ..CACHED });
    // A compound page begins where none can.
    check_implausible(|_| Page { flags: LRU | 1 << 16, ..CACHED });
    // Tails without a head.
    check_implausible(|_| Page { compound_head: u64::MAX, ..KERNELS });
    check_implausible(|_| Page { compound_head: VMEMMAP + 2000 * DESCRIPTOR_BYTES + 1, ..KERNELS });
}

#[test]
fn page_that_denies_its_block_is_kept() {
    for kind in Kind::ALL {
        let mut linux = Synthetic::new(kind);
        linux.put_free(1024, 10);
        linux.put_compound(512, 4, CACHED, false);
        linux.put(1030, KERNELS);
        linux.put(515, KERNELS);
        let found = classify(&linux, 31).unwrap();
        assert!(found.kept.contains(1030) && found.kept.contains(515));
        let expect = ClassCounts { free: 1023, cache: 15, unjudged: 2, ..ClassCounts::default() };
        assert_eq!(found.counts, expect, "{kind:?}");
    }
}

#[test]
fn impossible_order_is_not_followed() {
    for kind in Kind::ALL {
        for order in [0, 19, 63, 64, 255] {
            let mut linux = Synthetic::new(kind);
            linux.put_compound(2048, 1, CACHED, false);
            let second = DESCRIPTORS + 2049 * DESCRIPTOR_BYTES;
            let offset = if kind == Kind::Linux6_1 { 17 } else { 0 };
            linux.ram.write(second + offset, &[order]);
            let found = classify(&linux, 31).unwrap();
            assert_eq!((found.counts.excluded(), found.counts.unjudged), (0, 1), "{kind:?}, order {order}");
        }
    }
}

#[test]
fn unreadable_descriptors_cost_only_their_pages() {
    let mut linux = Synthetic::new(Kind::Linux6_1);
    linux.put_free(1024, 10);
    linux.put_free(2048, 10);
    // Descriptors in pages of 4 KiB, one of which is missing and one of which is outside of RAM.
    let table = 0x10_f000;
    linux.ram.write_u64(TABLE_2, table | 0x63);
    for page in (0..64).filter(|page| *page != 20) {
        let at = if page == 40 { 1 << 40 } else { DESCRIPTORS + page * 4096 };
        linux.ram.write_u64(table + page * 8, at | 0x63);
    }
    let found = classify(&linux, 31).unwrap();
    let expect = ClassCounts { free: 2048 - 128, unjudged: 128, ..ClassCounts::default() };
    assert_eq!(found.counts, expect);
    assert!((20 * 64..21 * 64).chain(40 * 64..41 * 64).all(|pfn| found.kept.contains(pfn)));
}

#[test]
fn damaged_tables_keep_everything() {
    let damaged = |address, number| {
        let mut linux = Synthetic::new(Kind::Linux6_1);
        linux.put_free(1024, 10);
        linux.ram.write_u64(address, number);
        classify(&linux, 31)
    };
    let nothing_judged = Ok(ClassCounts { unjudged: PAGES, ..ClassCounts::default() });
    for garbage in [0, 0x1234_5678_9abc_def0, u64::MAX, 0x63, 0xffff_f000_0063] {
        let top = damaged(TOP_TABLE + (VMEMMAP >> 39 & 511) * 8, garbage).map(|found| found.counts);
        assert_eq!(top, nothing_judged, "top {garbage:#x}");
        let last = damaged(TABLE_2, garbage).map(|found| found.counts.excluded());
        assert_eq!(last, Ok(0), "last {garbage:#x}");
        let roots = damaged(ROOTS, garbage).map(|found| found.counts);
        assert_eq!(roots, Err(NotUnderstood::NoSections), "roots {garbage:#x}");
        let section = damaged(SECTIONS, garbage).map(|found| found.counts.excluded());
        assert!(matches!(section, Ok(0) | Err(NotUnderstood::NoSections)), "section {garbage:#x}: {section:?}");
    }
}

/// RAM of 32 MiB, of which the kernel uses 16 (`mem=`).
#[test]
fn memory_unused_by_the_kernel_is_not_damaged() {
    let linux = Synthetic::new(Kind::Linux6_1);
    let mut ram = Ram::new(2 * PAGES);
    ram.write(0, &linux.ram.bytes);
    let counts_of = |ram: &Ram| {
        let found = Linux::with(ram, linux.vmcoreinfo.clone()).unwrap().classify(DumpLevel::KERNEL).unwrap();
        assert_eq!(found.kept.count(), 2 * PAGES);
        found.counts
    };
    assert_eq!(counts_of(&ram), ClassCounts { undescribed: PAGES, ..ClassCounts::default() });
    ram.write_u64(SECTIONS + 16, 0x1234_5678_9abc_0000);
    assert_eq!(counts_of(&ram), ClassCounts { unjudged: PAGES, ..ClassCounts::default() });
}

#[test]
fn a_table_that_maps_itself_ends_the_walk() {
    let mut linux = Synthetic::new(Kind::Linux6_1);
    for entry in 0..512 {
        linux.ram.write_u64(TOP_TABLE + entry * 8, TOP_TABLE | 0x63);
    }
    assert_eq!(classify(&linux, 31).unwrap().counts.excluded(), 0);
}

#[test]
fn kernel_is_found_with_and_without_note() {
    let linux = Synthetic::new(Kind::Linux6_1);
    let text = linux.vmcoreinfo.text();
    let cpu = [&[5_u32, 8, 1].map(u32::to_le_bytes).concat()[..], b"CORE\0\0\0\0", &[0; 8]].concat();
    let found = Linux::find(&linux.ram, &[&cpu[..], &note(text)].concat()).unwrap();
    assert_eq!(found.utsname().unwrap().nodename, "guest");
    for notes in [&cpu[..], &[], &[0xff; 100], &note(b"OSRELEASE=forged\nNUMBER(phys_base)=0\n")] {
        assert_eq!(Linux::find(&linux.ram, notes).unwrap().vmcoreinfo().text(), text);
    }
}

#[test]
fn a_forged_note_does_not_hide_the_kernels() {
    let mut linux = Synthetic::new(Kind::Linux6_1);
    let forged = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap().replace("made-up", "forged-");
    linux.ram.write(0x5000, &note(forged.as_bytes()));
    assert_eq!(Linux::find(&linux.ram, &[]).unwrap().vmcoreinfo().release(), RELEASE);
}

/// Adds a kernel that the guest left by kexec: it has another phys_base, and its name is still where it says.
fn left_by_kexec(linux: &mut Synthetic) -> Vmcoreinfo {
    const MOVED: u64 = 0x8_0000;
    let text = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap();
    let text = text.replace("phys_base)=0", &format!("phys_base)=-{MOVED}")).replace(RELEASE, "5.10.0-left");
    linux.ram.write(0x4000, &note(text.as_bytes()));
    for (field, name) in ["Linux", "guest", "5.10.0-left", "#1 SMP", "x86_64", "(none)"].iter().enumerate() {
        linux.ram.write(NAMES - MOVED + 65 * field as u64, name.as_bytes());
    }
    Vmcoreinfo::parse(text.as_bytes()).unwrap()
}

#[test]
fn kernel_left_by_kexec_is_not_used() {
    let mut linux = Synthetic::new(Kind::Linux6_1);
    let left = left_by_kexec(&mut linux);
    assert!(Linux::with(&linux.ram, left.clone()).unwrap().utsname().is_some(), "it looks alive");
    let cpu = cpu_note(TOP_TABLE);
    // QEMU may have the note of the kernel that is gone, of the one that runs, or none.
    for told in [note(left.text()), note(linux.vmcoreinfo.text()), Vec::new()] {
        let found = Linux::find(&linux.ram, &[&cpu[..], &told].concat()).unwrap();
        assert_eq!(found.vmcoreinfo().release(), RELEASE);
    }
    // One of the processors was in a process, whose tables are one page above.
    let user = [cpu_note(0x20_0000), cpu_note(TOP_TABLE + 0x1000), note(left.text())].concat();
    assert_eq!(Linux::find(&linux.ram, &user).unwrap().vmcoreinfo().release(), RELEASE);
}

#[test]
fn without_proof_no_kernel_is_believed() {
    let mut linux = Synthetic::new(Kind::Linux6_1);
    let left = left_by_kexec(&mut linux);
    let both = format!("5.10.0-left, {RELEASE}");
    // The guest went on to a system without a VMCOREINFO.
    let elsewhere = [cpu_note(0x30_0000), note(left.text())].concat();
    let refused = Linux::find(&linux.ram, &elsewhere).map(drop);
    assert_eq!(refused, Err(NotUnderstood::NotRunning { releases: both.clone() }));
    // There are no registers at all, as after a QEMU that was killed.
    let refused = Linux::find(&linux.ram, &[]).map(drop);
    assert_eq!(refused, Err(NotUnderstood::Ambiguous { releases: both }));
}

/// A guest fills its memory with notes that differ and all name the kernel that runs.
#[test]
fn number_of_kernels_that_are_compared_is_bounded() {
    let mut linux = Synthetic::new(Kind::Linux6_1);
    let text = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap();
    for page in 0x300..PAGES {
        linux.ram.write(page * PAGE_BYTES, &note(format!("{text}NUMBER(page)={page}\n").as_bytes()));
    }
    let kernels = |notes: &[u8]| match Linux::find(&linux.ram, notes).map(drop) {
        Err(NotUnderstood::Ambiguous { releases } | NotUnderstood::NotRunning { releases }) => {
            releases.split(", ").count()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(kernels(&[]), 2);
    assert_eq!(kernels(&cpu_note(0x30_0000)), KERNELS_MAX);
}

#[test]
fn other_memory_is_refused_with_reason() {
    assert_eq!(Linux::find(&Ram::new(256), &[]).map(drop), Err(NotUnderstood::NoVmcoreinfo));
    let linux = Synthetic::new(Kind::Linux6_1);
    let text = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap();
    let check = |line: &str, other: &str, reason: &str| {
        let changed = Vmcoreinfo::parse(text.replace(line, other).as_bytes()).unwrap();
        let refused = Linux::with(&linux.ram, changed).and_then(|linux| linux.classify(DumpLevel::KERNEL)).unwrap_err();
        assert_eq!(refused.to_string(), reason);
    };
    check("NUMBER(PG_lru)=4\n", "", "the guest's kernel does not report NUMBER(PG_lru)");
    check("NUMBER(phys_base)=0\n", "", "the guest's kernel does not report NUMBER(phys_base)");
    check("SIZE(page)=64", "SIZE(page)=0", "the guest's kernel reports SIZE(page)=0, which is impossible");
    check(
        "OFFSET(page.private)=40",
        "OFFSET(page.private)=18446744073709551615",
        "the guest's kernel reports an offset in struct page=18446744073709551615, which is impossible",
    );
    check(
        "SECTION_SIZE_BITS)=24",
        "SECTION_SIZE_BITS)=64",
        "the guest's kernel reports NUMBER(SECTION_SIZE_BITS)=64, which is impossible",
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Random bytes in random places: over tables, descriptors, log and the kernel's own text.
    #[test]
    fn damage_only_makes_the_dump_larger(
        patches in prop::collection::vec((0_u64..0x30_0000, prop::collection::vec(any::<u8>(), 1..200)), 1..40),
        kind in prop::sample::select(&Kind::ALL[..]),
    ) {
        let mut linux = Synthetic::new(kind);
        linux.put_free(3072, 10);
        linux.put_record(0, 2, 0, 32, "a line");
        for (address, bytes) in patches {
            linux.ram.write(TOP_TABLE - 0x1000 + address, &bytes);
        }
        if let Ok(found) = Linux::find(&linux.ram, &note(linux.vmcoreinfo.text())) {
            let _ = found.log();
            if let Ok(found) = found.classify(DumpLevel::KERNEL) {
                prop_assert_eq!(PAGES - found.kept.count(), found.counts.excluded());
                // Hardly any of the kernel's own pages are excluded by random bytes.
                prop_assert!(found.counts.excluded() - found.counts.free.min(1024) < 16, "{:?}", found.counts);
            }
        }
    }

    /// Changes the numbers of VMCOREINFO at random.
    #[test]
    fn any_vmcoreinfo_is_safe(line in 0_usize..60, number in any::<u64>(), kind in prop::sample::select(&Kind::ALL[..])) {
        let linux = Synthetic::new(kind);
        let text = String::from_utf8(linux.vmcoreinfo.text().to_vec()).unwrap();
        let changed = text.lines().enumerate().map(|(at, text)| match text.split_once('=') {
            Some((name, _)) if at == line && name.starts_with("SYMBOL") => format!("{name}={number:x}\n"),
            Some((name, _)) if at == line => format!("{name}={number}\n"),
            _ => format!("{text}\n"),
        });
        let changed = Vmcoreinfo::parse(changed.collect::<String>().as_bytes());
        if let Some(found) = changed.and_then(|changed| Linux::with(&linux.ram, changed).ok()) {
            let _ = (found.utsname(), found.log(), found.classify(DumpLevel::KERNEL));
        }
    }
}
