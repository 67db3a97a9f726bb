//! The host's page cache of a file: evicted before a cold run, and measured.
//!
//! `posix_fadvise(DONTNEED)` evicts one file and needs no root, unlike `drop_caches`. It does not drop dirty pages, hence the
//! sync
//! before it.

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{Advice, fadvise, fsync};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Writes the file's dirty pages out and drops all its pages.
pub fn evict(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    fsync(&file)?;
    fadvise(&file, 0, None, Advice::DontNeed)?;
    Ok(())
}

/// Evicts each file of a folder.
pub fn evict_all(folder: &Path) -> io::Result<()> {
    std::fs::read_dir(folder)?.try_for_each(|entry| evict(&entry?.path()))
}

/// Bytes of the file that the host holds in its page cache.
pub fn resident_bytes(path: &Path) -> io::Result<u64> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len() as usize;
    if bytes == 0 {
        return Ok(0);
    }
    let page_bytes = rustix::param::page_size();
    let mut resident = vec![0u8; bytes.div_ceil(page_bytes)];
    // SAFETY: a new shared mapping at an address that the kernel chooses; nothing reads through it.
    let map = unsafe { mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0)? };
    // SAFETY: `map` covers `bytes`, and `resident` has one byte for each page of it.
    let asked = match unsafe { libc::mincore(map, bytes, resident.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: `map` is the mapping made above, and no reference into it exists.
    unsafe { munmap(map, bytes)? };
    asked?;
    let pages = resident.iter().filter(|state| *state & 1 == 1).count();
    Ok((pages * page_bytes) as u64)
}

/// Bytes that a process read from disks rather than from the page cache.
pub fn disk_read_bytes(pid: u64) -> io::Result<u64> {
    let counts = std::fs::read_to_string(format!("/proc/{pid}/io"))?;
    let bytes = counts.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.trim().parse().ok());
    bytes.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no read_bytes in the process's I/O counters"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn eviction_drops_a_newly_written_file() {
        // In the checkout: the system's temporary folder may be a tmpfs, which never drops a page.
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, vec![7u8; 4 * MIB]).unwrap();
        assert_eq!(resident_bytes(&path).unwrap(), 4 * MIB as u64);
        evict(&path).unwrap();
        assert_eq!(resident_bytes(&path).unwrap(), 0);
    }

    #[test]
    fn empty_file_has_no_pages_missing_is_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        std::fs::write(&path, "").unwrap();
        assert_eq!(resident_bytes(&path).unwrap(), 0);
        assert_eq!(evict(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
