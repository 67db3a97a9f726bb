//! Opening an image's file: around the page cache with O_DIRECT where that works, else through it, and why.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use rustix::fs::{Advice, AtFlags, OFlags, StatxFlags, fadvise, fcntl_getfl, fstatfs, statx};

use super::{Format, ImageOptions};
use crate::engine::transfer::ALIGNMENT_MAX;

/// Alignment for O_DIRECT where the kernel does not say (before 6.1, or some file systems): safe everywhere.
const ALIGNMENT_UNTOLD: u64 = 4096;

const TMPFS_MAGIC: i64 = 0x0102_1994;

pub(super) struct Opened {
    pub file: File,
    /// Unit of offsets and lengths; 1 through the page cache.
    pub alignment: u64,
    /// How data goes through or around the page cache, and why.
    pub cache: String,
}

pub(super) fn open_file(options: &ImageOptions, format: Format) -> io::Result<Opened> {
    let through = |why: &str| -> io::Result<Opened> {
        let file = open_options(options).open(&options.path)?;
        Ok(Opened { file, alignment: 1, cache: format!("through the page cache ({why})") })
    };
    if !options.direct {
        return through("as configured");
    }
    let file = match open_options(options).custom_flags(libc::O_DIRECT).open(&options.path) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            return through("the file system does not know O_DIRECT");
        }
        Err(error) => return Err(error),
    };
    // A device's node lies in a tmpfs too; its data does not.
    if file.metadata()?.is_file() && fstatfs(&file)?.f_type == TMPFS_MAGIC {
        return through("tmpfs is memory itself");
    }
    let alignment = direct_alignment(&file)?;
    if !alignment.is_power_of_two() || alignment > ALIGNMENT_MAX {
        return through("the file system does not take O_DIRECT for this file");
    }
    // qemu-img leaves qcow2 files that end anywhere; what lies behind the end is never asked for.
    if format != Format::Qcow2 && !file_bytes(&file)?.is_multiple_of(alignment) {
        return through(&format!("the image is not a multiple of {alignment} bytes long"));
    }
    Ok(Opened { file, alignment, cache: format!("O_DIRECT in units of {alignment} bytes") })
}

/// The same file, open once more: for reading, around the page cache if the first one is, and without the first one's lock.
pub(super) fn reopen(file: &File) -> io::Result<File> {
    let direct = fcntl_getfl(file)? & OFlags::DIRECT;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).custom_flags(direct.bits() as i32).open(path)
}

/// Of a file that goes through the page cache: the host reads what is asked for and no more. Guests read ahead themselves, and
/// what follows may be held in memory already.
pub(super) fn stop_read_ahead(file: &File) {
    if let Err(error) = fadvise(file, 0, None, Advice::Random) {
        tracing::debug!(%error, "the host reads ahead in a disk image");
    }
}

fn open_options(options: &ImageOptions) -> OpenOptions {
    let mut open = OpenOptions::new();
    open.read(true).write(!options.read_only);
    open
}

/// 0 if the file system refuses O_DIRECT for this file (encrypted or inline data).
fn direct_alignment(file: &File) -> io::Result<u64> {
    let answer = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    match StatxFlags::from_bits_retain(answer.stx_mask).contains(StatxFlags::DIOALIGN) {
        true => Ok(answer.stx_dio_offset_align.into()),
        false => Ok(ALIGNMENT_UNTOLD),
    }
}

/// Of a block device too, whose metadata says 0.
pub(super) fn file_bytes(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// Reads as much as fits and as there is. The file may be open with O_DIRECT, so buffer and offset are aligned.
pub(super) fn read_aligned(file: &File, aligned: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut length = 0;
    while length < aligned.len() {
        match file.read_at(&mut aligned[length..], offset + length as u64) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // An unaligned rest: with O_DIRECT the file ended in the middle of a unit.
            Err(error) if length > 0 && error.raw_os_error() == Some(libc::EINVAL) => break,
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}
