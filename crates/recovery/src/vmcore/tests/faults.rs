//! Tests with killed writers, full disks and unreadable memory: what is in the file is right, and what is missing is
//! reported.

use std::io;

use super::*;
use crate::vmcore::bytes::ReadAt;
use crate::vmcore::storage::{DumpFile, Storage};

/// A disk that fails at a chosen change.
struct Flaky {
    file: DumpFile,
    /// Number of changes that still succeed. The next one is torn.
    left: u32,
    fault: Fault,
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    /// There is no space, once; after that there is.
    Full,
    /// The writer is killed: of that change one part in `of` was made, and nothing happens any more.
    Killed { part: usize, of: usize },
}

impl Flaky {
    /// How many bytes of this change are made, and its result.
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

/// The writer is killed at every single change of the file, also in the middle of one. Released memory is in the file,
/// the file opens, a resumed dump reads no released page, and in the end nothing is missing.
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

/// Returns false once the writer finishes before it is killed.
fn killed_and_resumed(format: Format, after: u32, fault: Fault, resumed: &mut u32) -> bool {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let plan = plan();
    let mut ram = Ram::new(&plan.ranges);
    let file = DumpFile::create(&incomplete_path(&path)).unwrap();
    let storage = Box::new(Flaky { file, left: after, fault });
    let begun = Dump::begin(&path, storage, plan.clone(), format);
    let Ok(mut dump) = begun else {
        // Nothing was released, so the dump may be begun anew, unless it had come far enough to be resumed.
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
    // A keeper does this first.
    ram.released = dump.written().clone();
    write_all(&mut dump, &mut ram).unwrap();
    dump.finish().unwrap();
    assert_whole(&path, &plan);
    *resumed += 1;
    true
}

#[test]
fn writing_continues_after_a_full_disk() {
    for format in [Format::Kdump(Compression::Lzo), Format::Elf] {
        let mut after = 0;
        while full_once(format, after) {
            after += 1;
        }
        assert!(after > 12, "{after} changes");
    }
}

/// The disk is full once. Returns false if the dump ends before that.
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
        // Only `finish` is left to do.
        Dump::resume(&path).unwrap().finish().unwrap();
    }
    assert_whole(&path, &plan);
    failed
}

#[test]
fn unreadable_pages_are_missing_and_file_says_so() {
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
fn no_file_is_replaced_or_named_too_early() {
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
fn unresumable_files_are_refused() {
    let folder = folder();
    let path = folder.path().join("vmcore");
    let refusal = |bytes: &[u8]| {
        fs::write(incomplete_path(&path), bytes).unwrap();
        Dump::resume(&path).map(drop).unwrap_err().to_string()
    };
    assert!(refusal(b"").ends_with("vmcore.incomplete: is not an unfinished dump"));
    assert!(refusal(&[0; 9000]).ends_with("is not an unfinished dump"));
    assert!(refusal(b"KDUMP   ").ends_with("cannot be resumed"));
    assert!(refusal(b"\x7fELF").ends_with("cannot be resumed"));
}
