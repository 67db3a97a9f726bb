//! Pinned: files that are locked in the host's memory (mlock), so that a QEMU starts quickly while the disk is slow or
//! busy.
//!
//! A host that is short of memory, or reclaims idle pages, drops pages that only a start needs. The next start then
//! reads them piece by piece during an outage: beside a dump on a disk of 200 operations a second, QEMU took 2 to 4 s
//! to start instead of 0.2 s. The pages are in the page cache, so machines that use the same files share them.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mlock, mmap, munmap};

/// Files that stay locked until this is dropped.
#[derive(Debug, Default)]
pub struct Pinned {
    files: Vec<PinnedFile>,
}

#[derive(Debug)]
struct PinnedFile {
    device: u64,
    inode: u64,
    start: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: the mapping is read-only, never accessed, and not tied to a thread; only `drop` unmaps it.
unsafe impl Send for PinnedFile {}

impl Pinned {
    /// Locks these files and reads what is not in memory yet, which may take a second. Skips files that cannot be read,
    /// since QEMU reports them. Fails if this process may not lock so much memory (`RLIMIT_MEMLOCK`).
    pub fn pin(paths: &BTreeSet<PathBuf>) -> io::Result<Self> {
        let mut pinned = Self::default();
        for path in paths {
            let Ok(file) = File::open(path) else { continue };
            let Ok(metadata) = file.metadata() else { continue };
            let is_there = pinned.files.iter().any(|file| file.is(&metadata));
            if metadata.is_file() && metadata.len() > 0 && !is_there {
                pinned.files.push(PinnedFile::pin(&file, &metadata)?);
            }
        }
        Ok(pinned)
    }

    /// Size of the locked files in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes as u64).sum()
    }
}

impl PinnedFile {
    fn pin(file: &File, metadata: &fs::Metadata) -> io::Result<Self> {
        let bytes = usize::try_from(metadata.len()).map_err(|_| io::ErrorKind::FileTooLarge)?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
        let start = unsafe { mmap(ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
        let start = NonNull::new(start).expect("mmap never succeeds with a null address");
        let pinned = Self { device: metadata.dev(), inode: metadata.ino(), start, bytes };
        // SAFETY: the range is the mapping just made; locking changes no content.
        unsafe { mlock(start.as_ptr(), bytes)? };
        Ok(pinned)
    }

    fn is(&self, metadata: &fs::Metadata) -> bool {
        (self.device, self.inode) == (metadata.dev(), metadata.ino())
    }
}

impl Drop for PinnedFile {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `pin`, with this length, and there are no references into it.
        if let Err(errno) = unsafe { munmap(self.start.as_ptr(), self.bytes) } {
            debug_assert!(false, "unmapping a mapping of our own: {errno}");
        }
    }
}

/// The files that a process executes: its program and libraries. `process` is a pid or `self`.
pub fn program_files(process: &str) -> io::Result<BTreeSet<PathBuf>> {
    let maps = fs::read_to_string(Path::new("/proc").join(process).join("maps"))?;
    Ok(maps.lines().filter_map(program_file).collect())
}

/// Path in a line such as `7f3c2e000000-7f3c2e0a0000 r-xp 00002000 fe:00 131    /usr/lib/libc.so.6`.
fn program_file(line: &str) -> Option<PathBuf> {
    let mut fields = line.splitn(6, ' ');
    let rights = fields.nth(1)?;
    let path = fields.nth(3)?.trim_start();
    let is_file = path.starts_with('/') && !path.ends_with(" (deleted)");
    (rights.contains('x') && is_file).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked_bytes() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn files_are_pinned_once_and_released() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("kernel"), vec![1; 10_000]).unwrap();
        fs::write(path("empty"), "").unwrap();
        fs::hard_link(path("kernel"), path("same")).unwrap();
        let paths = ["kernel", "same", "empty", "none", "."].map(path).into();
        let pinned = Pinned::pin(&paths).unwrap();
        assert_eq!((pinned.bytes(), locked_bytes()), (10_000, 12_288));
        drop(pinned);
        assert_eq!(locked_bytes(), 0);
    }

    #[test]
    fn program_files_include_program_and_libraries() {
        let files = program_files("self").unwrap();
        assert!(files.contains(&std::env::current_exe().unwrap()), "{files:?}");
        assert!(files.iter().any(|file| file.to_string_lossy().contains("/libc")), "{files:?}");
    }

    #[test]
    fn mapped_data_is_not_a_program_file() {
        let check =
            |line: &str, expect: Option<&str>| assert_eq!(program_file(line), expect.map(PathBuf::from), "{line}");
        check("7f3c-7f3d r-xp 00002000 fe:00 131      /usr/lib/a b.so", Some("/usr/lib/a b.so"));
        check("7f3c-7f3d rw-s 00000000 00:1a 7        /dev/shm/web/ram-1", None);
        check("7f3c-7f3d r-xp 00000000 fe:00 9        /usr/bin/old (deleted)", None);
        check("7f3c-7f3d r-xp 00000000 00:00 0        [vdso]", None);
        check("7f3c-7f3d rwxp 00000000 00:00 0 ", None);
    }
}
