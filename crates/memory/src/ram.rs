//! RamFile: the RAM of one incarnation.
//!
//! The file is sparse: untouched memory costs nothing, and a punched hole returns to the host at once. Its size in host
//! memory comes from the file itself (`st_blocks`), so no counter of Hearth can be wrong.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, SealFlags, SeekFrom, fallocate, fcntl_get_seals, seek};
use rustix::io::Errno;

use crate::{FileOffset, Layout, PAGE_BYTES, RamView};

/// Unit of `st_blocks` in bytes, independent of the file system's block size.
const STAT_BLOCK_BYTES: u64 = 512;

/// An open RAM file. Dropping it keeps the file, which must outlive its keeper.
#[derive(Debug)]
pub struct RamFile {
    /// Usually one. Memory of several NUMA cells and memory devices is one file after the other.
    parts: Vec<Part>,
    path: PathBuf,
    bytes: u64,
    layout: Layout,
}

#[derive(Debug)]
struct Part {
    file: File,
    /// Its first byte in the RAM.
    start: u64,
    bytes: u64,
    identity: (u64, u64),
}

/// Errors of RAM files; each names the file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum MemoryError {
    #[error("{path}: cannot be created as RAM file")]
    Create { path: PathBuf, source: io::Error },
    #[error("{path}: cannot be opened as RAM file")]
    Open { path: PathBuf, source: io::Error },
    #[error("{path}: RAM cannot have {bytes} bytes: its size must be a multiple of {PAGE_BYTES} and not 0")]
    Size { path: PathBuf, bytes: u64 },
    #[error("{path}: its allocated pages cannot be read")]
    Measure { path: PathBuf, source: io::Error },
    #[error("{path}: pages {} to {} cannot be released", pages.start, pages.end)]
    Release { path: PathBuf, pages: Range<u64>, source: io::Error },
    #[error("{path}: has {has} pages, so pages {} to {} do not exist", pages.start, pages.end)]
    OutOfRange { path: PathBuf, pages: Range<u64>, has: u64 },
    #[error("{path}: {bytes} bytes at {offset} cannot be read")]
    Read { path: PathBuf, offset: u64, bytes: usize, source: io::Error },
    #[error("{path}: {bytes} bytes at {offset} cannot be written")]
    Write { path: PathBuf, offset: u64, bytes: usize, source: io::Error },
    #[error("{path}: cannot be mapped")]
    Map { path: PathBuf, source: io::Error },
    #[error("{path}: is not sealed, so it may shrink while it is read")]
    Unsealed { path: PathBuf },
    #[error("{path}: cannot be removed")]
    Remove { path: PathBuf, source: io::Error },
}

impl RamFile {
    /// Creates an empty file with mode 0600. Fails if the path exists: an old file may be another guest's RAM.
    pub fn create(path: &Path, bytes: u64) -> Result<Self, MemoryError> {
        check_size(path, bytes)?;
        let failed = |source| MemoryError::Create { path: path.to_owned(), source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)
            .map_err(failed)?;
        if let Err(source) = file.set_len(bytes) {
            // The new file is empty and useless; the first error is the one to report.
            let _ = fs::remove_file(path);
            return Err(failed(source));
        }
        Self::wrap(file, path)
    }

    /// Opens a file that a dead keeper left behind.
    pub fn open(path: &Path) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Open { path: path.to_owned(), source };
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path);
        Self::wrap(file.map_err(failed)?, path)
    }

    /// Takes over memory without a name (memfd) that another program has made for its guest, and cannot shrink: one or more files,
    /// the second after the first. `name`: what it is called in errors.
    pub fn adopt(files: Vec<File>, name: &str, layout: Layout) -> Result<Self, MemoryError> {
        let is_sealed = |file| fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if !files.iter().all(is_sealed) {
            return Err(MemoryError::Unsealed { path: name.into() });
        }
        Ok(Self { layout, ..Self::of_files(files, Path::new(name))? })
    }

    fn wrap(file: File, path: &Path) -> Result<Self, MemoryError> {
        Self::of_files(vec![file], path)
    }

    fn of_files(files: Vec<File>, path: &Path) -> Result<Self, MemoryError> {
        let (mut parts, mut start) = (Vec::new(), 0_u64);
        for file in files {
            let metadata = file.metadata().map_err(|source| MemoryError::Open { path: path.to_owned(), source })?;
            let (bytes, identity) = (metadata.len(), (metadata.dev(), metadata.ino()));
            check_size(path, bytes)?;
            parts.push(Part { file, start, bytes, identity });
            start = start.saturating_add(bytes);
        }
        check_size(path, start)?;
        Ok(Self { parts, path: path.to_owned(), bytes: start, layout: Layout::q35(start) })
    }

    /// The pieces of a range of bytes: each with its file, and where it is in the file.
    fn pieces(&self, range: Range<u64>) -> impl Iterator<Item = (&File, Range<u64>)> {
        self.parts.iter().filter_map(move |part| {
            let (from, to) = (range.start.max(part.start), range.end.min(part.start + part.bytes));
            (from < to).then(|| (&part.file, from - part.start..to - part.start))
        })
    }

    /// Path under which the file was created or opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the RAM in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Size of the RAM in pages.
    pub fn pages(&self) -> u64 {
        self.bytes / PAGE_BYTES
    }

    /// Where its pages are in the guest's memory.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Device and inode, which identify the file in another process's mappings and behind a received descriptor.
    pub fn identity(&self) -> (u64, u64) {
        self.parts[0].identity
    }

    /// Device and inode of each file, in the order of their pages, with the number of pages.
    pub fn identities(&self) -> impl Iterator<Item = ((u64, u64), u64)> {
        self.parts.iter().map(|part| (part.identity, part.bytes / PAGE_BYTES))
    }

    /// Host memory that the file holds now, in bytes.
    pub fn residency_bytes(&self) -> Result<u64, MemoryError> {
        self.parts.iter().try_fold(0, |sum, part| {
            let measured = part.file.metadata().map_err(|source| self.unmeasured(source))?;
            Ok(sum + measured.blocks() * STAT_BLOCK_BYTES)
        })
    }

    /// Returns pages to the host; they read as zeroes from now on. On a file system with huge pages, only whole huge
    /// pages return to the host; the rest is zeroed and stays.
    pub fn release(&self, pages: Range<u64>) -> Result<(), MemoryError> {
        if pages.is_empty() {
            return Ok(());
        }
        if pages.end > self.pages() {
            return Err(MemoryError::OutOfRange { path: self.path.clone(), pages, has: self.pages() });
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for (file, piece) in self.pieces(pages.start * PAGE_BYTES..pages.end * PAGE_BYTES) {
            let punched = rustix::io::retry_on_intr(|| fallocate(file, punch, piece.start, piece.end - piece.start));
            punched.map_err(|errno| MemoryError::Release {
                path: self.path.clone(),
                pages: pages.clone(),
                source: errno.into(),
            })?;
        }
        Ok(())
    }

    /// Releases pages, given in ascending order, in the longest possible runs: punching 2 MiB at once is 6 times faster
    /// than page by page. Returns the number of pages released.
    pub fn release_pages(&self, sorted: impl Iterator<Item = u64>) -> Result<u64, MemoryError> {
        let mut released = 0;
        let mut run = 0..0;
        for page in sorted {
            if page == run.end && !run.is_empty() {
                run.end += 1;
            } else if !run.contains(&page) {
                self.release(run.clone())?;
                released += run.end - run.start;
                run = page..page + 1;
            }
        }
        self.release(run.clone())?;
        Ok(released + run.end - run.start)
    }

    /// The pages that hold memory, as ascending runs of page numbers.
    pub fn resident_ranges(&self) -> Result<Vec<Range<u64>>, MemoryError> {
        let mut ranges = Vec::new();
        for Part { file, start: first, bytes, .. } in &self.parts {
            let mut offset = 0;
            while offset < *bytes {
                let start = match seek(file, SeekFrom::Data(offset)) {
                    // What it has grown by is not of this RAM.
                    Ok(start) if start >= *bytes => break,
                    Ok(start) => start,
                    Err(Errno::NXIO) => break,
                    Err(errno) => return Err(self.unmeasured(errno.into())),
                };
                let end = seek(file, SeekFrom::Hole(start)).map_err(|errno| self.unmeasured(errno.into()))?;
                let end = end.min(*bytes);
                ranges.push((first + start) / PAGE_BYTES..(first + end).div_ceil(PAGE_BYTES));
                offset = end;
            }
        }
        Ok(ranges)
    }

    /// Reads bytes from the file. Unlike a read through a `RamView`, this fills no holes: they read as zeroes and stay
    /// holes. Safe while another thread releases the pages.
    pub fn read(&self, offset: FileOffset, into: &mut [u8]) -> Result<(), MemoryError> {
        let (bytes, mut rest) = (into.len(), into);
        let read = self.pieces(self.range(offset, bytes)).try_for_each(|(file, piece)| {
            let (now, later) = std::mem::take(&mut rest).split_at_mut((piece.end - piece.start) as usize);
            rest = later;
            file.read_exact_at(now, piece.start)
        });
        let read = read.and_then(|()| match rest.is_empty() {
            true => Ok(()),
            false => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "failed to fill whole buffer")),
        });
        read.map_err(|source| MemoryError::Read { path: self.path.clone(), offset: offset.0, bytes, source })
    }

    /// Writes bytes into RAM that no guest uses yet.
    pub fn write(&self, offset: FileOffset, bytes: &[u8]) -> Result<(), MemoryError> {
        let mut rest = bytes;
        let written = self.pieces(self.range(offset, bytes.len())).try_for_each(|(file, piece)| {
            let (now, later) = rest.split_at((piece.end - piece.start) as usize);
            rest = later;
            file.write_all_at(now, piece.start)
        });
        let written =
            written.and_then(|()| if rest.is_empty() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) });
        let bytes = bytes.len();
        written.map_err(|source| MemoryError::Write { path: self.path.clone(), offset: offset.0, bytes, source })
    }

    /// Maps the file read-only. The mapping stays valid when the file is removed.
    pub fn map(&self) -> Result<RamView, MemoryError> {
        let files: Vec<_> = self.parts.iter().map(|part| (&part.file, part.bytes)).collect();
        RamView::of(&files).map_err(|errno| MemoryError::Map { path: self.path.clone(), source: errno.into() })
    }

    /// Removes the file. Its memory is freed when the last process unmaps it.
    pub fn remove(self) -> Result<(), MemoryError> {
        fs::remove_file(&self.path).map_err(|source| MemoryError::Remove { path: self.path.clone(), source })
    }

    fn range(&self, offset: FileOffset, bytes: usize) -> Range<u64> {
        offset.0..offset.0.saturating_add(bytes as u64)
    }

    fn unmeasured(&self, source: io::Error) -> MemoryError {
        MemoryError::Measure { path: self.path.clone(), source }
    }
}

fn check_size(path: &Path, bytes: u64) -> Result<(), MemoryError> {
    if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
        return Err(MemoryError::Size { path: path.to_owned(), bytes });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use error_text::chain;
    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};

    use super::*;

    const PAGES: u64 = 1024;

    /// A folder on tmpfs: `/dev/shm` is tmpfs on every Linux system, `/tmp` may not be.
    fn folder() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").unwrap()
    }

    fn ram(folder: &tempfile::TempDir) -> RamFile {
        RamFile::create(&folder.path().join("ram-1"), PAGES * PAGE_BYTES).unwrap()
    }

    fn touch(ram: &RamFile, pages: Range<u64>) {
        for page in pages {
            ram.write(FileOffset(page * PAGE_BYTES), &[page as u8 | 1; PAGE_BYTES as usize]).unwrap();
        }
    }

    #[test]
    fn untouched_ram_uses_no_memory_and_is_private() {
        let folder = folder();
        let ram = ram(&folder);
        assert_eq!(ram.residency_bytes().unwrap(), 0);
        assert_eq!(ram.resident_ranges().unwrap(), []);
        assert_eq!(fs::metadata(ram.path()).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn residency_follows_touch_and_release() {
        let folder = folder();
        let ram = ram(&folder);
        touch(&ram, 10..20);
        touch(&ram, 1023..1024);
        assert_eq!(ram.residency_bytes().unwrap(), 11 * PAGE_BYTES);
        assert_eq!(ram.resident_ranges().unwrap(), [10..20, 1023..1024]);
        ram.release(12..14).unwrap();
        assert_eq!(ram.resident_ranges().unwrap(), [10..12, 14..20, 1023..1024]);
        assert_eq!(ram.residency_bytes().unwrap(), 9 * PAGE_BYTES);
    }

    #[test]
    fn pages_are_released_in_runs_and_counted_once() {
        let folder = folder();
        let ram = ram(&folder);
        touch(&ram, 0..8);
        assert_eq!(ram.release_pages([0, 1, 1, 2, 5, 6].into_iter()).unwrap(), 5);
        assert_eq!(ram.resident_ranges().unwrap(), [3..5, 7..8]);
        assert_eq!(ram.release_pages(std::iter::empty()).unwrap(), 0);
        assert_eq!(ram.residency_bytes().unwrap(), 3 * PAGE_BYTES);
    }

    #[test]
    fn view_shows_current_pages_and_outlives_file() {
        let folder = folder();
        let ram = ram(&folder);
        touch(&ram, 3..5);
        let view = ram.map().unwrap();
        assert_eq!(view.pages(), PAGES);
        let mut copy = [0; PAGE_BYTES as usize];
        view.copy_page(3, &mut copy);
        assert_eq!(copy, [3; PAGE_BYTES as usize]);
        ram.release(4..5).unwrap();
        view.copy_page(4, &mut copy);
        assert_eq!(copy, [0; PAGE_BYTES as usize]);
        ram.remove().unwrap();
        view.copy_page(3, &mut copy);
        assert_eq!(copy, [3; PAGE_BYTES as usize]);
    }

    #[test]
    fn reading_fills_no_holes() {
        let folder = folder();
        let ram = ram(&folder);
        touch(&ram, 3..4);
        let mut bytes = [7; 3 * PAGE_BYTES as usize];
        ram.read(FileOffset(2 * PAGE_BYTES), &mut bytes).unwrap();
        let pages: Vec<_> =
            bytes.chunks(PAGE_BYTES as usize).map(|page| (page[0], page[PAGE_BYTES as usize - 1])).collect();
        assert_eq!(pages, [(0, 0), (3, 3), (0, 0)]);
        assert_eq!(ram.residency_bytes().unwrap(), PAGE_BYTES);
        let refusal = chain(&ram.read(FileOffset(PAGES * PAGE_BYTES - 1), &mut [0; 2]).unwrap_err());
        assert!(
            refusal.ends_with("ram-1: 2 bytes at 4194303 cannot be read: failed to fill whole buffer"),
            "{refusal}"
        );
    }

    #[test]
    #[should_panic(expected = "page 1024 of 1024")]
    fn view_panics_past_end_of_ram() {
        let folder = folder();
        ram(&folder).map().unwrap().copy_page(PAGES, &mut [0; PAGE_BYTES as usize]);
    }

    #[test]
    fn reopened_file_keeps_identity_and_contents() {
        let folder = folder();
        let first = ram(&folder);
        touch(&first, 7..8);
        let again = RamFile::open(first.path()).unwrap();
        assert_eq!(again.identity(), first.identity());
        assert_eq!((again.bytes(), again.residency_bytes().unwrap()), (first.bytes(), PAGE_BYTES));
    }

    #[test]
    fn only_memory_that_cannot_shrink_is_adopted() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = File::from(memfd_create("pc.ram", flags).unwrap());
        memory.set_len(1 << 20).unwrap();
        let adopt = || RamFile::adopt(vec![memory.try_clone().unwrap()], "memory of web", Layout::q35(1 << 20));
        assert!(chain(&adopt().unwrap_err()).contains("memory of web: is not sealed"));
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let ram = adopt().unwrap();
        touch(&ram, 3..4);
        ram.release(3..4).unwrap();
        assert_eq!((ram.pages(), ram.residency_bytes().unwrap(), ram.layout()), (256, 0, &Layout::q35(1 << 20)));
        assert!(RamFile::adopt(vec![File::open("/dev/null").unwrap()], "null", Layout::q35(1 << 20)).is_err());
    }

    #[test]
    fn files_of_several_cells_are_one_memory() {
        let sizes = [4, 1, 3];
        let files = sizes.map(|pages| {
            let file = File::from(memfd_create("cell", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
            file.set_len(pages * PAGE_BYTES).unwrap();
            fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
            file
        });
        let copies = files.iter().map(|file| file.try_clone().unwrap()).collect();
        let ram = RamFile::adopt(copies, "memory of web", Layout::q35(8 * PAGE_BYTES)).unwrap();
        assert_eq!((ram.pages(), ram.identities().map(|(_, pages)| pages).collect::<Vec<_>>()), (8, sizes.to_vec()));
        assert!(ram.identities().all(|(identity, _)| files.iter().any(|file| {
            let file = file.metadata().unwrap();
            (file.dev(), file.ino()) == identity
        })));
        // One write over all three.
        let noise: Vec<u8> = (0..3 * PAGE_BYTES).map(|byte| (byte / 7) as u8 | 1).collect();
        let offset = FileOffset(3 * PAGE_BYTES + 100);
        ram.write(offset, &noise).unwrap();
        let mut read = vec![0; noise.len()];
        ram.read(offset, &mut read).unwrap();
        assert_eq!(read, noise);
        let (view, mut page) = (ram.map().unwrap(), [0; PAGE_BYTES as usize]);
        view.copy_page(4, &mut page);
        assert_eq!(page[..], noise[PAGE_BYTES as usize - 100..2 * PAGE_BYTES as usize - 100]);
        assert_eq!(ram.resident_ranges().unwrap(), [3..4, 4..5, 5..7]);
        assert_eq!(ram.release_pages(3..6).unwrap(), 3);
        let resident: Vec<_> = ram.resident_ranges().unwrap().into_iter().flatten().collect();
        assert_eq!((resident, ram.residency_bytes().unwrap()), (vec![6], PAGE_BYTES));
        view.copy_page(4, &mut page);
        assert_eq!(page, [0; PAGE_BYTES as usize]);
        assert!(ram.read(FileOffset(7 * PAGE_BYTES), &mut vec![0; 4097]).is_err());
        assert!(ram.write(FileOffset(8 * PAGE_BYTES), &[1]).is_err());
        assert!(RamFile::adopt(vec![], "nothing", Layout::q35(PAGE_BYTES)).is_err());
    }

    #[test]
    fn create_refuses_existing_file() {
        let folder = folder();
        let first = ram(&folder);
        touch(&first, 0..1);
        let refusal = chain(&RamFile::create(first.path(), PAGE_BYTES).unwrap_err());
        assert!(refusal.ends_with("ram-1: cannot be created as RAM file: File exists (os error 17)"), "{refusal}");
        assert_eq!(first.residency_bytes().unwrap(), PAGE_BYTES);
    }

    #[test]
    fn invalid_sizes_are_refused_and_leave_no_file() {
        let folder = folder();
        let path = folder.path().join("ram-1");
        for bytes in [0, 4095, PAGE_BYTES + 1] {
            let refusal = RamFile::create(&path, bytes).unwrap_err().to_string();
            assert!(refusal.contains(&format!("RAM cannot have {bytes} bytes")), "{refusal}");
        }
        // Larger than the largest possible file: the host reports the error.
        let refusal = RamFile::create(&path, u64::MAX - PAGE_BYTES + 1).unwrap_err().to_string();
        assert!(refusal.contains("cannot be created"), "{refusal}");
        assert!(!path.exists());
    }

    #[test]
    fn damaged_or_missing_file_is_refused() {
        let folder = folder();
        let path = folder.path().join("ram-1");
        fs::write(&path, b"torn").unwrap();
        let refusal = RamFile::open(&path).unwrap_err().to_string();
        assert!(refusal.contains("RAM cannot have 4 bytes"), "{refusal}");
        let missing = chain(&RamFile::open(&folder.path().join("ram-2")).unwrap_err());
        assert!(missing.contains("ram-2: cannot be opened as RAM file: No such file"), "{missing}");
    }

    #[test]
    fn symlink_is_not_followed() {
        let folder = folder();
        let target = ram(&folder);
        let link = folder.path().join("ram-2");
        std::os::unix::fs::symlink(target.path(), &link).unwrap();
        assert!(matches!(RamFile::open(&link), Err(MemoryError::Open { .. })));
    }

    #[test]
    fn pages_past_the_end_are_not_released() {
        let folder = folder();
        let ram = ram(&folder);
        let refusal = ram.release(1000..1025).unwrap_err().to_string();
        assert!(refusal.ends_with("has 1024 pages, so pages 1000 to 1025 do not exist"), "{refusal}");
        assert!(ram.release_pages([3, 2000].into_iter()).is_err());
        assert_eq!(fs::metadata(ram.path()).unwrap().len(), PAGES * PAGE_BYTES);
    }

    #[test]
    fn missing_file_cannot_be_removed() {
        let folder = folder();
        let ram = ram(&folder);
        let again = RamFile::open(ram.path()).unwrap();
        ram.remove().unwrap();
        assert!(matches!(again.remove(), Err(MemoryError::Remove { .. })));
    }
}
