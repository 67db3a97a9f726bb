//! Dumps written and read back: whole, torn at every write, on full disks, damaged.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use hearth_memory::{GuestPhysicalAddress, PAGE_BYTES};
use proptest::prelude::*;

use super::bytes::ReadAt;
use super::compress::PAGE;
use super::dump::{Dump, DumpError, Format, Plan, incomplete_path};
use super::file::{PageError, Survey, VmcoreFile};
use super::linux::Utsname;
use super::storage::{DumpFile, Storage};
use super::{Bitmap, Compression, DumpLevel, Notes, PhysicalMemory, Unreadable};

const CHUNK_BYTES: u64 = 2 << 20;
const RANGES: [Range<u64>; 2] = [0..700, 2048..2600];

/// Memory whose every page is known by its number. Some pages are zero.
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

    /// Text, noise, zeroes in long and in short stretches.
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

/// A disk that fails.
struct Flaky {
    file: DumpFile,
    /// Changes that still succeed. The one after them is torn.
    left: u32,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// No room, once; after that there is.
    Full,
    /// The writer is killed: of that change, one part in `of` was done, and nothing happens any more.
    Killed { part: usize, of: usize },
}

impl Flaky {
    /// How much of this change is done.
    fn change(&mut self, bytes: usize) -> (usize, io::Result<()>) {
        let Some(left) = self.left.checked_sub(1) else {
            return match self.fault {
                Fault::Full => {
                    self.left = u32::MAX;
                    (bytes / 2 / PAGE * PAGE, Err(io::ErrorKind::StorageFull.into()))
                }
                Fault::Killed { part, of } => {
                    self.fault = Fault::Killed { part: 0, of: 1 };
                    (bytes * part / of, Err(io::Error::other("killed")))
                }
            };
        };
        self.left = left;
        (bytes, Ok(()))
    }
}

impl ReadAt for Flaky {
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }

    fn file_bytes(&self) -> io::Result<u64> {
        self.file.file_bytes()
    }
}

impl Storage for Flaky {
    fn write_table(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        let (done, result) = self.change(bytes.len());
        self.file.write_table(&bytes[..done], at)?;
        result
    }

    fn write_data(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        let (done, result) = self.change(bytes.len());
        self.file.write_table(&bytes[..done], at)?;
        result
    }

    fn reserve(&mut self, at: u64, bytes: u64) -> io::Result<()> {
        self.change(0).1?;
        self.file.reserve(at, bytes)
    }

    fn set_bytes(&mut self, bytes: u64) -> io::Result<()> {
        self.change(0).1?;
        self.file.set_bytes(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.change(0).1
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
    assert!(notes.add_vmcoreinfo(b"OSRELEASE=6.1.0-test\nNUMBER(phys_base)=-4096\n"));
    let utsname = Utsname { sysname: "Linux".into(), release: "6.1.0-test".into(), ..Utsname::default() };
    Plan { ranges: RANGES.to_vec(), kept, level: DumpLevel::KERNEL, notes, utsname }
}

/// Writes all chunks and releases what is written, as the keeper does.
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

/// Every page of the file is what memory held; the others are excluded.
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
        assert_eq!((file.format(), file.is_flattened()), (format.name(), false));
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
fn long_stretches_of_zeroes_take_no_room_in_elf_files() {
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

/// Killed after every single change of the file, in the middle of it too: memory that was released is in the file, the
/// file opens, what is resumed reads no released page, and in the end nothing is missing.
#[test]
fn a_writer_may_be_killed_at_any_moment() {
    for format in [Format::Kdump(Compression::Lzo), Format::Elf] {
        let mut resumed = 0;
        for part in [0, 1, 2, 3] {
            let killed = (0..)
                .take_while(|after| killed_and_resumed(format, *after, Fault::Killed { part, of: 3 }, &mut resumed));
            assert!(killed.count() > 12);
        }
        assert!(resumed > 20, "{resumed} files could be resumed");
    }
}

/// False once the writer came to its end before it was killed.
fn killed_and_resumed(format: Format, after: u32, fault: Fault, resumed: &mut u32) -> bool {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let plan = plan();
    let mut ram = Ram::new(&plan.ranges);
    let file = DumpFile::create(&incomplete_path(&path)).unwrap();
    let storage = Box::new(Flaky { file, left: after, fault });
    let begun = Dump::begin(&path, storage, plan.clone(), format);
    let Ok(mut dump) = begun else {
        // Nothing was released, so that it may be begun anew; or it had come far enough.
        if let Ok(dump) = Dump::resume(&path) {
            assert_eq!((dump.kept(), dump.written().count()), (&plan.kept, 0));
        }
        return true;
    };
    if write_all(&mut dump, &mut ram).is_ok() && dump.finish().is_ok() {
        assert_whole(&path, &plan);
        return false;
    }
    let file = VmcoreFile::open(&incomplete_path(&path)).unwrap();
    let (missing, pages) = (file.survey().missing, plan.kept.count());
    assert!(missing == 0 || !file.is_complete());
    assert!(pages - missing >= ram.released.count());
    let mut dump = Dump::resume(&path).unwrap();
    assert!(ram.released.iter().all(|pfn| dump.written().contains(pfn)));
    assert_eq!((dump.kept(), dump.written().count()), (&plan.kept, pages - missing));
    // As a keeper does first of all.
    ram.released = dump.written().clone();
    write_all(&mut dump, &mut ram).unwrap();
    dump.finish().unwrap();
    assert_whole(&path, &plan);
    *resumed += 1;
    true
}

#[test]
fn a_full_disk_is_waited_out() {
    for format in [Format::Kdump(Compression::Lzo), Format::Elf] {
        let mut after = 0;
        while full_once(format, after) {
            after += 1;
        }
        assert!(after > 12, "{after} changes");
    }
}

/// The disk is full at one moment, and later it is not. False once there is no such moment any more.
fn full_once(format: Format, after: u32) -> bool {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let plan = plan();
    let mut ram = Ram::new(&plan.ranges);
    let file = DumpFile::create(&incomplete_path(&path)).unwrap();
    let storage = Box::new(Flaky { file, left: after, fault: Fault::Full });
    let mut dump = match Dump::begin(&path, storage, plan.clone(), format) {
        Ok(dump) => dump,
        Err(error) => {
            assert!(error.is_disk_full());
            return true;
        }
    };
    let mut failed = false;
    if let Err(error) = write_all(&mut dump, &mut ram) {
        assert!(error.is_disk_full(), "{error}");
        assert_eq!(*dump.written(), ram.released);
        failed = true;
        write_all(&mut dump, &mut ram).unwrap();
    }
    let finished = dump.finish();
    if let Err(error) = finished {
        assert!(error.is_disk_full(), "{error}");
        failed = true;
        // All that is left to do is to finish.
        Dump::resume(&path).unwrap().finish().unwrap();
    }
    assert_whole(&path, &plan);
    failed
}

#[test]
fn pages_that_cannot_be_read_are_missing_and_the_file_says_so() {
    for format in [Format::Kdump(Compression::Zstd), Format::Elf] {
        let folder = folder();
        let path = folder.path().join("vmcore");
        let mut ram = Ram::new(&RANGES);
        ram.unreadable = BTreeSet::from([35, 36, 2599]);
        let mut dump = Dump::create(&path, plan(), format).unwrap();
        write_all(&mut dump, &mut ram).unwrap();
        assert!(!ram.released.contains(35) && ram.released.contains(37));
        assert_eq!(dump.finish().unwrap().lost, 3);
        let file = VmcoreFile::open(&path).unwrap();
        assert_eq!((file.is_complete(), file.survey().missing), (false, 3));
        let mut page = [0; PAGE];
        assert!(matches!(file.read_page(36, &mut page), Err(PageError::Missing)));
        file.read_page(37, &mut page).unwrap();
        assert_eq!(page, *Ram::content(37));
    }
}

#[test]
fn nothing_is_replaced_and_nothing_unfinished_gets_the_name() {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let dump = Dump::create(&path, plan(), Format::Elf).unwrap();
    assert!(
        matches!(Dump::create(&path, plan(), Format::Elf), Err(DumpError::Exists { path }) if path.ends_with("vmcore.incomplete"))
    );
    assert!(matches!(dump.finish(), Err(DumpError::Unfinished { left, .. }) if left == plan().kept.count()));
    assert!(!path.exists());
    fs::write(&path, "precious").unwrap();
    assert!(
        matches!(Dump::create(&path, plan(), Format::Elf), Err(DumpError::Exists { path }) if path.ends_with("vmcore"))
    );
    let mut dump = Dump::resume(&path).unwrap();
    write_all(&mut dump, &mut Ram::new(&RANGES)).unwrap();
    assert!(matches!(dump.finish(), Err(DumpError::Io { what: "renamed", .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
}

#[test]
fn what_cannot_be_resumed_is_said() {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let refusal = |bytes: &[u8]| {
        fs::write(incomplete_path(&path), bytes).unwrap();
        Dump::resume(&path).map(drop).unwrap_err().to_string()
    };
    assert!(refusal(b"").ends_with("vmcore.incomplete: is no unfinished dump"));
    assert!(refusal(&[0; 9000]).ends_with("is no unfinished dump"));
    assert!(refusal(b"KDUMP   ").ends_with("cannot be resumed"));
    assert!(refusal(b"\x7fELF").ends_with("cannot be resumed"));
}

/// More program headers than the field for their number holds.
#[test]
fn an_elf_file_may_have_any_number_of_segments() {
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
fn a_flattened_dump_reads_as_the_plain_one() {
    let folder = folder();
    let (path, flat) = (folder.path().join("vmcore"), folder.path().join("flat"));
    write_file(&path, &plan(), Format::Kdump(Compression::Lzo));
    let plain = fs::read(&path).unwrap();
    let mut bytes = b"makedumpfile\0\0\0\0\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01".to_vec();
    bytes.resize(4096, 0);
    // Backwards, and the header first as rubbish.
    let mut pieces: Vec<_> = (0_u64..).step_by(10_000).zip(plain.chunks(10_000)).collect();
    pieces.push((0, &[0xaa; 4096]));
    for (offset, piece) in pieces.into_iter().rev() {
        bytes.extend(offset.to_be_bytes());
        bytes.extend((piece.len() as u64).to_be_bytes());
        bytes.extend(piece);
    }
    bytes.extend([0xff; 16]);
    fs::write(&flat, &bytes).unwrap();
    assert!(VmcoreFile::open(&flat).unwrap().is_flattened());
    assert_whole(&flat, &plan());
    fs::write(&flat, &bytes[..bytes.len() - 16]).unwrap();
    assert!(VmcoreFile::open(&flat).is_err());
}

/// One small file of each kind; damage is done to copies.
fn samples() -> Vec<Vec<u8>> {
    let folder = folder();
    let write = |name: String, format, finish| {
        let path: PathBuf = folder.path().join(name);
        let kept = Bitmap::of(80, &[10..20, 35..40, 60..66]);
        let plan = Plan { ranges: vec![0..30, 32..80], kept, ..plan() };
        let mut dump = Dump::create(&path, plan.clone(), format).unwrap();
        write_all(&mut dump, &mut Ram::new(&plan.ranges)).unwrap();
        match finish {
            true => fs::read(dump.finish().unwrap().path).unwrap(),
            false => fs::read(dump.incomplete_path()).unwrap(),
        }
    };
    let kinds = FORMATS.into_iter().flat_map(|format| [(format, true), (format, false)]).enumerate();
    kinds.map(|(number, (format, finish))| write(number.to_string(), format, finish)).collect()
}

/// Reads all there is to read, and resumes it if that is offered.
fn exercise(path: &Path) -> Option<Survey> {
    if let Ok(mut dump) = Dump::resume(path) {
        let ram = Zeroes::new(100);
        for chunk in dump.chunks(CHUNK_BYTES).iter().take(3) {
            let packed = dump.packer().pack(chunk, &ram);
            let _ = dump.write(&packed);
        }
    }
    let file = VmcoreFile::open(&incomplete_path(path)).ok()?;
    let mut page = [0; PAGE];
    for pfn in (0..100).chain([u64::MAX >> 12, u64::MAX >> 13]) {
        let _ = file.read_page(pfn, &mut page);
        let _ = file.read(GuestPhysicalAddress(pfn * PAGE_BYTES + 5), &mut [0; 5000]);
    }
    assert!(file.notes().registers().count() <= file.notes().cpus());
    Some(file.survey())
}

#[test]
fn files_cut_off_anywhere_are_refused_or_lack_pages() {
    let folder = folder();
    let path = folder.path().join("vmcore");
    for sample in samples() {
        for end in (0..sample.len()).step_by(997) {
            fs::write(incomplete_path(&path), &sample[..end]).unwrap();
            if let Some(survey) = exercise(&path) {
                assert!(survey.missing <= survey.pages);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn damaged_files_do_no_harm(damage in prop::collection::vec((0_usize..3000, any::<u8>()), 1..12), far in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6)) {
        let folder = folder();
        let path = folder.path().join("vmcore");
        for mut sample in SAMPLES.with(Clone::clone) {
            let signature = sample[..20].to_vec();
            // Mostly the headers, of which each byte means something.
            for (at, byte) in &damage {
                let second = if at % 3 == 0 { 4096.min(sample.len() - 464) } else { 0 };
                sample[at % 464 + second] = *byte;
            }
            // With its signature damaged a file is nothing at all, which is soon tested.
            if damage.len() % 8 != 0 {
                sample[..20].copy_from_slice(&signature);
            }
            for (at, byte) in &far {
                let at = at.index(sample.len());
                sample[at] = *byte;
            }
            fs::write(incomplete_path(&path), &sample).unwrap();
            exercise(&path);
        }
    }
}

thread_local! {
    static SAMPLES: Vec<Vec<u8>> = samples();
}
