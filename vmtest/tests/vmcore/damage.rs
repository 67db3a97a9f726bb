//! Damage to a dead guest's own tables: the dump gets larger, but still holds every page that it held without the damage. The list of
//! cached pages, which is only a hint, stays within its bounds.

use std::collections::BTreeMap;
use std::ops::Range;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};
use hearth_recovery::vmcore::linux::page_cache::PageCache;
use hearth_recovery::vmcore::linux::{Classification, Linux, NotUnderstood};
use hearth_recovery::vmcore::{DeadRam, DumpLevel, PhysicalMemory, Unreadable};
use hearth_vmtest::artifacts::Linux as Kernel;
use hearth_vmtest::{PlainVm, Result, pattern};

use super::dead::{Dead, work};

const DESCRIPTOR_BYTES: u64 = 64;
const KERNEL_IMAGE: u64 = 0xffff_ffff_8000_0000;
const HUGE_BYTES: u64 = 2 << 20;
const IMAGE_BYTES_MAX: u64 = 64 << 20;

/// Dead RAM with changed bytes.
struct Damaged<'a> {
    ram: &'a DeadRam,
    pages: BTreeMap<u64, Vec<u8>>,
}

impl<'a> Damaged<'a> {
    fn none(ram: &'a DeadRam) -> Self {
        Self { ram, pages: BTreeMap::new() }
    }

    fn at(mut self, address: u64, bytes: &[u8]) -> Self {
        for (offset, byte) in bytes.iter().enumerate() {
            let address = address + offset as u64;
            let page = self.pages.entry(address / PAGE_BYTES).or_insert_with_key(|pfn| {
                let mut page = vec![0; PAGE_BYTES as usize];
                self.ram.read(GuestPhysicalAddress(pfn * PAGE_BYTES), &mut page).unwrap();
                page
            });
            page[(address % PAGE_BYTES) as usize] = *byte;
        }
        self
    }
}

impl PhysicalMemory for Damaged<'_> {
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> std::result::Result<(), Unreadable> {
        self.ram.read(address, into)?;
        let (start, end) = (address.0, address.0 + into.len() as u64);
        for (pfn, page) in self.pages.range(start / PAGE_BYTES..end.div_ceil(PAGE_BYTES)) {
            let (first, last) = (start.max(pfn * PAGE_BYTES), end.min((pfn + 1) * PAGE_BYTES));
            let bytes = &page[(first - pfn * PAGE_BYTES) as usize..][..(last - first) as usize];
            into[(first - start) as usize..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn ranges(&self) -> &[Range<u64>] {
        self.ram.ranges()
    }
}

/// Addresses in a healthy guest.
struct Places {
    /// Page table entries that lead to the first descriptors, top level first.
    table_entries: Vec<u64>,
    root: u64,
    section: u64,
    descriptors: u64,
    /// Page frames of the kernel's image, and some more.
    image: Range<u64>,
}

impl Places {
    fn of(linux: &Linux<'_, DeadRam>, ram: &DeadRam) -> Self {
        let info = linux.vmcoreinfo();
        let physical = |address| linux.space().translate(address).unwrap().address.0;
        let root = info.symbol("mem_section").unwrap();
        let section = linux.space().read_u64(root).unwrap();
        let map = linux.space().read_u64(section).unwrap() & !(PAGE_BYTES - 1);
        let phys_base = info.number("phys_base").unwrap().cast_unsigned();
        let mut table = (info.symbol("init_top_pgt").unwrap() - KERNEL_IMAGE).wrapping_add(phys_base);
        let levels = if info.number("pgtable_l5_enabled") == Some(1) { 5 } else { 4 };
        let table_entries = (1..levels).rev().map(|level| {
            let entry = table + (map >> (12 + 9 * level) & 511) * 8;
            table = ram.read_u64(GuestPhysicalAddress(entry)).unwrap() & 0x000f_ffff_ffff_f000;
            entry
        });
        let table_entries = table_entries.collect();
        let start = physical(info.symbol("_stext").unwrap()) / PAGE_BYTES;
        Self {
            table_entries,
            root: physical(root),
            section: physical(section),
            descriptors: physical(map),
            image: start..start + IMAGE_BYTES_MAX / PAGE_BYTES,
        }
    }
}

type Classified = std::result::Result<Classification, NotUnderstood>;

fn classify(dead: &Dead, damaged: &Damaged<'_>) -> Classified {
    Linux::find(damaged, &dead.notes)?.classify(DumpLevel::KERNEL)
}

/// Asserts that every page kept of the healthy guest is kept of the damaged one, and also the pages whose descriptors are `lost`.
fn check(dead: &Dead, healthy: &Classification, what: &str, damaged: Damaged<'_>, lost: Range<u64>) -> Classification {
    let found = classify(dead, &damaged).unwrap_or_else(|error| panic!("{what}: {error}"));
    let missing: Vec<u64> = healthy.kept.iter().filter(|pfn| !found.kept.contains(*pfn)).collect();
    assert!(missing.is_empty(), "{what}: {} pages are no longer in the dump: {:x?}", missing.len(), missing.first());
    let left_out = lost.clone().filter(|pfn| !found.kept.contains(*pfn)).count();
    assert_eq!(left_out, 0, "{what}: pages of {lost:x?}");
    println!("{what}: {:?}", found.counts);
    found
}

/// Random numbers for a change.
fn numbers<const COUNT: usize>(what: &str, hit: u64) -> [u64; COUNT] {
    let bytes = pattern::bytes(what, COUNT * 8, hit);
    std::array::from_fn(|at| u64::from_le_bytes(bytes[at * 8..][..8].try_into().expect("eight bytes")))
}

/// A hundred random changes: half of them to descriptors, the rest to any words.
fn random_hits<'a>(intact: Damaged<'a>, descriptors: u64, seed: u64) -> Damaged<'a> {
    let ram_bytes = intact.ram.end_pfn() * PAGE_BYTES;
    (seed * 1000..).take(100).fold(intact, |damaged, hit| {
        let [place, size] = numbers("where", hit);
        let (address, bytes) = if hit % 2 == 0 {
            // Whole descriptors: a single flipped flag could not be noticed.
            let count = size % 30 + 1;
            let first = place % (4 * HUGE_BYTES / DESCRIPTOR_BYTES - count);
            (descriptors + first * DESCRIPTOR_BYTES, count * DESCRIPTOR_BYTES)
        } else {
            let bytes = size % 2000 / 8 * 8 + 8;
            (place % (ram_bytes - bytes) / 8 * 8, bytes)
        };
        damaged.at(address, &pattern::bytes("random", bytes as usize, hit))
    })
}

/// Random changes to these pages of the kernel.
fn hits_in_kernel<'a>(intact: Damaged<'a>, kernel: &[u64], hits: u64, seed: u64) -> Damaged<'a> {
    (seed * 10_000..).take(hits as usize).fold(intact, |damaged, hit| {
        let [page, size, place] = numbers("in the kernel", hit);
        let page = kernel[(page % kernel.len() as u64) as usize];
        let bytes = 8 << (size % 8);
        let address = page * PAGE_BYTES + place % (PAGE_BYTES - bytes) / 8 * 8;
        damaged.at(address, &pattern::bytes("random", bytes as usize, hit))
    })
}

/// Asserts that a list of cached pages is not too long, and names only RAM, files and file systems that there are.
fn check_bounds(cache: &PageCache, end_pfn: u64) {
    let max = |pages_per_item: u64| (end_pfn / pages_per_item).max(1 << 14) as usize;
    assert!(cache.runs.len() <= max(4) && cache.files.len() <= max(8) && cache.file_systems.len() <= 1 << 12);
    for run in &cache.runs {
        assert!(run.pfn + u64::from(run.pages) <= end_pfn && (run.file as usize) < cache.files.len(), "{run:?}");
    }
    assert!(cache.files.iter().all(|file| (file.file_system as usize) < cache.file_systems.len()));
}

/// Damages the kernel's image, which has its types (BTF), and the memory that it has allocated, which has inodes, file systems and
/// page tables. `kernel`: the pages of both; `image`: where the image is.
fn check_damage_to_cached_pages(dead: &Dead, kernel: impl Iterator<Item = u64>, image: &Range<u64>) {
    let read = |damaged: &Damaged<'_>| Linux::find(damaged, &dead.notes)?.page_cache();
    let intact = read(&Damaged::none(&dead.ram)).unwrap();
    assert!(intact.runs.len() > 10 && intact.unknown_pages == 0, "{} runs", intact.runs.len());
    let (of_image, allocated): (Vec<_>, Vec<_>) = kernel.partition(|pfn| image.contains(pfn));
    let mut changed = 0;
    for seed in 0..24 {
        let (hits, pages) = (1 << (seed / 2), if seed % 2 == 0 { &of_image } else { &allocated });
        match read(&hits_in_kernel(Damaged::none(&dead.ram), pages, hits, seed)) {
            Ok(cache) => {
                check_bounds(&cache, dead.ram.end_pfn());
                changed += u32::from(cache != intact);
                println!("{hits} hits: {} runs, {} unknown pages", cache.runs.len(), cache.unknown_pages);
            }
            Err(error) => println!("{hits} hits: {error}"),
        }
    }
    assert!(changed > 0, "damage to inodes shows");
}

fn check_damage_to(kernel: Kernel) -> Result<()> {
    let dead = Dead::of(PlainVm::busybox_on("damage", kernel), 512, work)?;
    let linux = Linux::find(&dead.ram, &dead.notes).unwrap();
    let healthy = linux.classify(DumpLevel::KERNEL).unwrap();
    let places = Places::of(&linux, &dead.ram);
    let intact = || Damaged::none(&dead.ram);
    let check = |what: &str, damaged: Damaged<'_>, lost| check(&dead, &healthy, what, damaged, lost);
    let garbage = |bytes| pattern::bytes("garbage", bytes, 7);

    assert_eq!(check("nothing", intact(), 0..0), healthy);
    let of_page = PAGE_BYTES / DESCRIPTOR_BYTES;
    let ones = intact().at(places.descriptors + PAGE_BYTES, &[0xff; PAGE_BYTES as usize]);
    check("a page of descriptors is all ones", ones, of_page..2 * of_page);
    let of_huge_page = HUGE_BYTES / DESCRIPTOR_BYTES;
    let random = intact().at(places.descriptors, &garbage(HUGE_BYTES as usize));
    check("2 MiB of descriptors are random", random, 0..of_huge_page);

    let [.., last] = places.table_entries[..] else { panic!("no tables") };
    for (what, entry) in [("zero", 0), ("garbage", 0x1234_5678_9abc_def0), ("no RAM", 0xf_f000_0000_00e3_u64)] {
        let damaged = intact().at(last, &entry.to_le_bytes());
        let found = check(&format!("the table entry of 2 MiB of descriptors is {what}"), damaged, 0..of_huge_page);
        assert_eq!(found.counts.unjudged, of_huge_page);
        let damaged = intact().at(places.table_entries[0], &entry.to_le_bytes());
        let found = check(&format!("the top table's entry is {what}"), damaged, 0..0);
        assert_eq!(found.counts.excluded(), 0);
        let damaged = intact().at(places.section, &(entry | 3).to_le_bytes());
        check(&format!("a section's map is {what}"), damaged, 0..of_huge_page);
    }
    let refused = classify(&dead, &intact().at(places.root, &garbage(8)));
    assert_eq!(refused, Err(NotUnderstood::NoSections));

    for seed in 0..20 {
        let damaged = random_hits(intact(), places.descriptors, seed);
        // The names by which the kernel is found may be hit; then it is not found.
        match classify(&dead, &damaged) {
            Ok(_) => drop(check(&format!("random hits, seed {seed}"), damaged, 0..0)),
            Err(error) => println!("random hits, seed {seed}: {error}"),
        }
    }
    check_damage_to_cached_pages(&dead, healthy.kept.iter(), &places.image);
    Ok(())
}

#[test]
fn damaged_linux_6_1_keeps_every_page() -> Result<()> {
    check_damage_to(Kernel::Stable)
}

#[test]
fn damaged_linux_6_12_keeps_every_page() -> Result<()> {
    check_damage_to(Kernel::Newer)
}
