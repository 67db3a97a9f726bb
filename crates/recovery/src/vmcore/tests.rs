//! Tests of dumps that are written and read back, whole and in both formats.
//!
//! `faults` has writers killed at every write, and full disks. `damage` has files that were cut off or altered.

mod damage;
mod faults;

use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::Path;

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};

use super::compress::PAGE;
use super::dump::{Dump, DumpError, Format, Plan, incomplete_path};
use super::file::{PageError, VmcoreFile};
use super::linux::Utsname;
use super::{Bitmap, Compression, DumpLevel, Notes, PhysicalMemory, Unreadable};

const CHUNK_BYTES: u64 = 2 << 20;
const RANGES: [Range<u64>; 2] = [0..700, 2048..2600];

/// Memory in which each page's contents follow from its number. Some pages are zero.
#[derive(Clone)]
struct Ram {
    ranges: Vec<Range<u64>>,
    unreadable: BTreeSet<u64>,
    /// Given back to the host.
    released: Bitmap,
}

impl Ram {
    fn new(ranges: &[Range<u64>]) -> Self {
        let end = ranges.last().unwrap().end;
        Self { ranges: ranges.to_vec(), unreadable: BTreeSet::new(), released: Bitmap::new(end) }
    }

    /// Text, noise, and zeroes in long and in short runs.
    fn content(pfn: u64) -> Vec<u8> {
        let mut state = pfn as u32 + 1;
        let mut noise = || {
            state = state.wrapping_mul(0x915f_77f5).wrapping_add(1);
            (state >> 24) as u8
        };
        match pfn % 64 {
            0..20 | 40 => vec![0; PAGE],
            20..30 => (0..PAGE).map(|_| noise()).collect(),
            _ => format!("page frame {pfn} of a guest; ").into_bytes().into_iter().cycle().take(PAGE).collect(),
        }
    }
}

impl PhysicalMemory for Ram {
    fn read(&self, address: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable> {
        assert!(address.0.is_multiple_of(PAGE_BYTES), "dumps are read page by page");
        for (pfn, page) in (address.0 / PAGE_BYTES..).zip(into.chunks_mut(PAGE)) {
            assert!(!self.released.contains(pfn), "page frame {pfn} was read after it was released");
            if self.unreadable.contains(&pfn) || !self.ranges.iter().any(|range| range.contains(&pfn)) {
                return Err(Unreadable::at(pfn * PAGE_BYTES));
            }
            page.copy_from_slice(&Self::content(pfn)[..page.len()]);
        }
        Ok(())
    }

    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

const FORMATS: [Format; 5] = [
    Format::Kdump(Compression::Zstd),
    Format::Kdump(Compression::Lzo),
    Format::Kdump(Compression::Zlib),
    Format::Kdump(Compression::None),
    Format::Elf,
];

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn plan() -> Plan {
    let end = RANGES[1].end;
    let mut kept = Bitmap::of(end, &RANGES);
    kept.clear_range(30..33);
    kept.clear_range(520..690);
    kept.clear_range(2500..2501);
    let mut notes = Notes::default();
    assert!(notes.set_vmcoreinfo(b"OSRELEASE=6.1.0-test\nNUMBER(phys_base)=-4096\n"));
    let utsname = Utsname { sysname: "Linux".into(), release: "6.1.0-test".into(), ..Utsname::default() };
    Plan { ranges: RANGES.to_vec(), kept, level: DumpLevel::KERNEL, notes, utsname }
}

/// Writes all chunks and releases what was written, as the keeper does.
fn write_all(dump: &mut Dump, ram: &mut Ram) -> Result<(), DumpError> {
    let mut packer = dump.packer();
    for chunk in dump.chunks(CHUNK_BYTES).into_iter().rev() {
        let packed = packer.pack(&chunk, ram);
        let written = dump.write(&packed)?;
        written.pages.into_iter().for_each(|run| ram.released.set_range(run));
    }
    Ok(())
}

fn write_file(path: &Path, plan: &Plan, format: Format) {
    let mut dump = Dump::create(path, plan.clone(), format).unwrap();
    write_all(&mut dump, &mut Ram::new(&plan.ranges)).unwrap();
    assert_eq!(dump.finish().unwrap().lost, 0);
}

/// Checks that every kept page of the file is what memory held, and that the others are excluded.
#[track_caller]
fn assert_whole(path: &Path, plan: &Plan) {
    let file = VmcoreFile::open(path).unwrap();
    assert!(file.is_complete());
    assert_eq!((file.survey().pages, file.survey().missing), (plan.kept.count(), 0));
    let mut page = [0; PAGE];
    for pfn in 0..plan.kept.pages() + 1 {
        let read = file.read_page(pfn, &mut page);
        match plan.kept.contains(pfn) {
            true => assert!(read.is_ok() && page == *Ram::content(pfn), "page frame {pfn}: {read:?}"),
            false => assert!(matches!(read, Err(PageError::Excluded)), "page frame {pfn}: {read:?}"),
        }
    }
}

#[test]
fn a_dump_reads_back_as_memory() {
    for format in FORMATS {
        let folder = folder();
        let path = folder.path().join("vmcore");
        let plan = plan();
        write_file(&path, &plan, format);
        assert_whole(&path, &plan);
        let file = VmcoreFile::open(&path).unwrap();
        assert_eq!(file.format(), format.name());
        assert_eq!(*file.notes(), plan.notes);
        let mut across = [0; 3 * PAGE];
        file.read(GuestPhysicalAddress(2060 * PAGE_BYTES + 9), &mut across).unwrap();
        assert_eq!(across[PAGE - 9..][..PAGE], Ram::content(2061));
        assert_eq!(file.read(GuestPhysicalAddress(u64::MAX - 3), &mut [0; 9]), Err(Unreadable::at(u64::MAX - 3)));
        assert!(!incomplete_path(&path).exists());
        match format {
            Format::Kdump(compression) => {
                assert_eq!((file.compression(), file.level()), (Some(compression), Some(31)));
                assert_eq!(file.ranges(), RANGES);
                assert_eq!(file.utsname().unwrap().machine, "(none)");
                let zero = plan.kept.iter().filter(|pfn| Ram::content(*pfn) == [0; PAGE]).count() as u64;
                assert_eq!(file.survey().zero, zero);
            }
            Format::Elf => assert_eq!(file.ranges(), plan.kept.runs().collect::<Vec<_>>()),
        }
    }
}

#[test]
fn long_zero_runs_are_holes_in_elf_files() {
    use std::os::unix::fs::MetadataExt;
    let folder = folder();
    let path = folder.path().join("vmcore");
    write_file(&path, &plan(), Format::Elf);
    let file = fs::metadata(&path).unwrap();
    let holes = file.len() - file.blocks() * 512;
    let stretches = (plan().kept.count() / 64 - 3) * 20 * PAGE_BYTES;
    assert!(holes > stretches, "{holes} bytes of holes");
}

#[test]
fn chunks_are_whole_blocks_and_bounded() {
    let folder = folder();
    let dump = Dump::create(&folder.path().join("vmcore"), plan(), Format::Elf).unwrap();
    let chunks: Vec<_> = dump.chunks(CHUNK_BYTES).iter().map(|chunk| (chunk.pfns.clone(), chunk.pages)).collect();
    assert_eq!(chunks, [(0..512, 509), (512..1024, 18), (2048..2560, 511), (2560..2600, 40)]);
    let chunks: Vec<_> = dump.chunks(1 << 30).iter().map(|chunk| (chunk.pfns.clone(), chunk.pages)).collect();
    assert_eq!(chunks, [(0..2600, dump.kept().count())]);
    let packed = dump.packer().pack(&dump.chunks(CHUNK_BYTES)[2], &Ram::new(&RANGES));
    assert!(packed.bytes() <= CHUNK_BYTES);
}

/// There are more program headers than the header's field can count.
#[test]
fn elf_files_may_have_many_segments() {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let end = 2 * 66_000;
    let mut kept = Bitmap::new(end);
    (0..end).step_by(2).for_each(|pfn| kept.set(pfn));
    let ram = Zeroes::new(end);
    let plan = Plan { kept, ranges: ram.ranges.to_vec(), ..plan() };
    let mut dump = Dump::create(&path, plan.clone(), Format::Elf).unwrap();
    for chunk in dump.chunks(CHUNK_BYTES) {
        dump.write(&dump.packer().pack(&chunk, &ram)).unwrap();
    }
    dump.finish().unwrap();
    let file = VmcoreFile::open(&path).unwrap();
    assert_eq!((file.ranges().len(), file.ram_pages()), (66_000, 66_000));
    assert_eq!(file.read_u64(GuestPhysicalAddress(131_998 * PAGE_BYTES)), Ok(0));
    assert_eq!(*file.notes(), plan.notes);
    let header = fs::read(&path).unwrap();
    assert_eq!(header[56..58], [0xff, 0xff]);
    assert_eq!(header[64 + 56 + 48..][..8], [0; 8], "crash takes an aligned segment for a netdump's");
}

struct Zeroes {
    ranges: [Range<u64>; 1],
}

impl Zeroes {
    fn new(end: u64) -> Self {
        Self { ranges: std::array::from_fn(|_| 0..end) }
    }
}

impl PhysicalMemory for Zeroes {
    fn read(&self, _: GuestPhysicalAddress, into: &mut [u8]) -> Result<(), Unreadable> {
        into.fill(0);
        Ok(())
    }

    fn ranges(&self) -> &[Range<u64>] {
        &self.ranges
    }
}

#[test]
fn flattened_dump_is_refused_with_remedy() {
    let folder = folder();
    let path = folder.path().join("flat");
    fs::write(&path, [&b"makedumpfile\0\0\0\0"[..], &[0; 4096]].concat()).unwrap();
    let refused = VmcoreFile::open(&path).err().unwrap().to_string();
    assert!(refused.contains("makedumpfile -R"), "{refused}");
}
