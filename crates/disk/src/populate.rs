//! Memory behind a mapped file of a memory file system, taken before anything is stored there.
//!
//! A store into a hole of a full file system ends the process (SIGBUS); this fails instead. Pages are of 4 KiB also where the
//! file system fills huge ones (`huge=always`): a write to the file, or `fallocate`, takes 2 MiB there for one of them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};

/// From now on what is stored through this mapping fills no huge pages.
///
/// # Safety
/// The bytes are a mapping.
pub(crate) unsafe fn in_small_pages(base: NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's. A kernel without huge pages knows no such advice, and needs none.
    let _ = unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxNoHugepage) };
}

/// Takes the memory of whole pages of a mapping of this file from its start on; what has some keeps it as it is.
///
/// # Safety
/// The range lies in the mapping that begins at `base`, and begins with a page.
pub(crate) unsafe fn take(file: &File, base: NonNull<u8>, range: Range<usize>) -> io::Result<()> {
    // SAFETY: the caller's. No byte changes, so whoever else looks at them sees what was there.
    let taken = unsafe { madvise(base.as_ptr().add(range.start).cast(), range.len(), Advice::LinuxPopulateWrite) };
    match taken {
        Ok(()) => Ok(()),
        // An access would have raised SIGBUS.
        Err(Errno::FAULT) => Err(Errno::NOSPC.into()),
        // Before Linux 5.14.
        Err(Errno::INVAL) => Ok(fallocate(file, FallocateFlags::KEEP_SIZE, range.start as u64, range.len() as u64)?),
        Err(error) => Err(error.into()),
    }
}

/// A file system in memory, for tests of what becomes of it when it is full, or has huge pages.
#[cfg(test)]
pub(crate) struct Small(tempfile::TempDir);

#[cfg(test)]
impl Small {
    /// None, with a word, without the rights to make one.
    pub(crate) fn new(test: &str, options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mut mount = std::process::Command::new("mount");
        let made = mount.args(["-t", "tmpfs", "-o", options, "none"]).arg(folder.path()).output();
        let made = made.is_ok_and(|made| made.status.success()).then_some(Self(folder));
        if made.is_none() {
            eprintln!("{test}: skipped: a tmpfs cannot be mounted here with {options}");
        }
        made
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        self.0.path()
    }
}

#[cfg(test)]
impl Drop for Small {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).status();
    }
}
