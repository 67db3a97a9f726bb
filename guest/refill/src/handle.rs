//! Opens a file by the number of its inode (`open_by_handle_at`).

use std::ffi::{CStr, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use rustix::fs::{FileType, Mode, OFlags, fstat, openat};

use crate::mounts::Kind;

/// `FILEID_INO32_GEN` (`include/linux/exportfs.h`): inode and generation of 32 bits each.
const INODE_32: c_int = 1;
/// The same with an inode of 64 bits (`fs/xfs/xfs_export.h`: `XFS_FILEID_TYPE_64FLAG`).
const XFS_INODE_64: c_int = 0x81;
/// Inode, subvolume and generation (`FILEID_BTRFS_WITHOUT_PARENT`; `struct btrfs_fid` in fs/btrfs/export.h).
const BTRFS: c_int = 0x4d;
const HANDLE_BYTES: usize = 20;

/// `struct file_handle` with room for the handles above.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: c_int,
    handle: [u8; HANDLE_BYTES],
}

impl Handle {
    /// `None` if this file system has no such inode.
    fn new(kind: Kind, inode: u64, generation: u32) -> Option<Self> {
        let generation = generation.to_ne_bytes();
        let (kind, parts): (_, &[&[u8]]) = match (kind, u32::try_from(inode)) {
            (Kind::Btrfs { subvolume }, _) => (BTRFS, &[&inode.to_ne_bytes(), &subvolume.to_ne_bytes(), &generation]),
            (Kind::Ext | Kind::Xfs, Ok(inode)) => (INODE_32, &[&inode.to_ne_bytes(), &generation]),
            (Kind::Xfs, Err(_)) => (XFS_INODE_64, &[&inode.to_ne_bytes(), &generation]),
            (Kind::Ext, Err(_)) => return None,
        };
        let bytes = parts.concat();
        let mut handle = [0; HANDLE_BYTES];
        handle[..bytes.len()].copy_from_slice(&bytes);
        Some(Self { bytes: bytes.len() as u32, kind, handle })
    }
}

/// Opens a regular file for reading. Anything else, and an inode that is now another file, is an error.
pub fn open(root: &File, kind: Kind, inode: u64, generation: u32) -> io::Result<File> {
    let mut handle = Handle::new(kind, inode, generation).ok_or(io::ErrorKind::NotFound)?;
    // SAFETY: the handle is a `struct file_handle` with as many bytes as it says, and outlives the call.
    let opened = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            root.as_raw_fd(),
            std::ptr::from_mut(&mut handle),
            libc::O_PATH | libc::O_CLOEXEC,
        )
    };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has returned a new descriptor, which nobody else owns.
    let named = unsafe { OwnedFd::from_raw_fd(opened as c_int) };
    // Only now: to open a device may do something.
    if FileType::from_raw_mode(fstat(&named)?.st_mode) != FileType::RegularFile {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let path = format!("/proc/self/fd/{}\0", named.as_fd().as_raw_fd());
    let path = CStr::from_bytes_with_nul(path.as_bytes()).expect("it ends with its only zero");
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOATIME | OFlags::NONBLOCK;
    Ok(openat(rustix::fs::CWD, path, flags, Mode::empty())?.into())
}
