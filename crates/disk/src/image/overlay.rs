//! A new, empty qcow2 image over another one: what is written goes here, the rest is read from there.
//!
//! cluster 0: header, what the backing image was like, its name | 1: refcount table | 2: refcount block | 3 ...: L1 table, empty |
//! a bitmap, if it has one: its directory, its table, its bits
//!
//! Over another file than the one that it was made over it is a disk that never was: some of its blocks are of one, some of the
//! other. So it notes its backing image's size and time of modification, in a header extension of our own (others' programs
//! leave it alone), and is not opened over one that is not like that.
//!
//! ```text
//! BACKING_MARK: u64 bytes | i64 seconds, u32 nanoseconds since 1970 | u32 0 | the backing image's name
//! ```
//! Big-endian, as all of the header. Of an image that has got another name for its backing since (`qemu-img rebase`) it says nothing.

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::header::{Header, L1_BYTES_MAX};
use super::{ImageError, access_error};

const CLUSTER_BYTES: u64 = 64 << 10;
const CLUSTER_BITS: u32 = 16;
const HEADER_BYTES: u32 = 104;
const VERSION: u32 = 3;
const REFCOUNT_ORDER: u32 = 4;
/// Header extension: format of the backing image.
pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Header extension: what the backing image was like.
pub(super) const BACKING_MARK: u32 = 0x4865_7274;
const MARK_BYTES: usize = 24;
/// Header extension: where the bitmaps are. Valid while its feature bit, of those that a program clears which does not know them, is set.
const BITMAPS: u32 = 0x2385_2875;
const BITMAPS_FEATURE: u64 = 1;
/// Of a bitmap: it says what was written.
const DIRTY_TRACKING: u8 = 1;
/// What one refcount block counts.
const CLUSTERS_MAX: u64 = CLUSTER_BYTES / 2;
/// Longest name that the format allows.
const NAME_BYTES_MAX: usize = 1023;
/// Bytes of the disk that one L1 entry leads to.
const L1_ENTRY_BYTES: u64 = CLUSTER_BYTES / 8 * CLUSTER_BYTES;
const DISK_BYTES_MAX: u64 = L1_BYTES_MAX / 8 * L1_ENTRY_BYTES;

/// Why an overlay cannot be made.
#[allow(missing_docs, reason = "each variant's message describes it")]
#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    #[error("{path}: cannot be made")]
    Make { path: PathBuf, source: io::Error },
    #[error("{path}: cannot be read")]
    Backing { path: PathBuf, source: io::Error },
    #[error("{path}: has a name that is too long for a backing image")]
    Name { path: PathBuf },
    #[error("no image can be made over {path}")]
    Refused { path: PathBuf, source: Box<ImageError> },
    #[error("{path}: has {bytes} bytes, too many for a qcow2 image over it (at most {DISK_BYTES_MAX})")]
    TooLarge { path: PathBuf, bytes: u64 },
}

/// Identity of a backing image: another image, or the same after a change, has another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    bytes: u64,
    pub seconds: i64,
    pub nanoseconds: u32,
}

impl Mark {
    pub fn of(metadata: &Metadata) -> Self {
        Self { bytes: metadata.len(), seconds: metadata.mtime(), nanoseconds: metadata.mtime_nsec() as u32 }
    }

    /// Of what an image has in its extension, if that is about the backing image of this name.
    pub fn read(extension: &[u8], name: &[u8]) -> Option<Self> {
        let (mark, of) = extension.split_at_checked(MARK_BYTES)?;
        let number = |at: usize| u64::from_be_bytes(mark[at..at + 8].try_into().expect("8 bytes"));
        let nanoseconds = (number(16) >> 32) as u32;
        (of == name).then_some(Self { bytes: number(0), seconds: number(8) as i64, nanoseconds })
    }

    fn written(self, name: &[u8]) -> Vec<u8> {
        let nanoseconds = u64::from(self.nanoseconds) << 32;
        let numbers = [self.bytes, self.seconds as u64, nanoseconds].map(u64::to_be_bytes);
        [numbers.as_flattened(), name].concat()
    }

    /// Whether a file that is like `now` is the one that was like this. File systems and archives may drop parts of a second.
    pub fn is_still(self, now: Self) -> bool {
        (now.bytes, now.seconds) == (self.bytes, self.seconds) && [0, self.nanoseconds].contains(&now.nanoseconds)
    }
}

/// Makes an image over `backing` (an absolute path; its `format` is `raw` or `qcow2`). The backing image must not change: the new
/// image refuses to open over one that has.
pub fn create_overlay(path: &Path, backing: &Path, format: &str) -> Result<(), OverlayError> {
    let metadata = fs::metadata(backing);
    let metadata = metadata.map_err(|source| OverlayError::Backing { path: backing.to_owned(), source })?;
    create(path, backing, format, Some(Mark::of(&metadata)), None)
}

/// The same with a bitmap of this name, which says which blocks of the disk were written: one bit for each of 64 KiB, the first in
/// the lowest bit of the first byte. For programs that read it soon: the backing image is not looked at again.
pub fn create_overlay_with_bitmap(
    path: &Path,
    backing: &Path,
    format: &str,
    (name, bits): (&str, &[u8]),
) -> Result<(), OverlayError> {
    create(path, backing, format, None, Some((name, bits)))
}

/// The same over an image that is still arriving, and belongs to this overlay alone.
pub fn create_overlay_over_arriving(path: &Path, backing: &Path, format: &str) -> Result<(), OverlayError> {
    create(path, backing, format, None, None)
}

/// Whether a file is an overlay of Hearth's over the image that it was made over. `qemu-img convert` and `qemu-img rebase` make another
/// image of it.
pub fn is_own_overlay(path: &Path) -> bool {
    let file = fs::metadata(path).ok().filter(Metadata::is_file).and_then(|_| fs::File::open(path).ok());
    let header = file.and_then(|file| Header::read_in_use(&file, path).ok());
    header.is_some_and(|header| header.backing_mark.is_some())
}

fn create(
    path: &Path,
    backing: &Path,
    format: &str,
    mark: Option<Mark>,
    bitmap: Option<(&str, &[u8])>,
) -> Result<(), OverlayError> {
    let disk_bytes = disk_bytes(backing, format)
        .map_err(|source| OverlayError::Refused { path: backing.to_owned(), source: Box::new(source) })?;
    if disk_bytes > DISK_BYTES_MAX {
        return Err(OverlayError::TooLarge { path: backing.to_owned(), bytes: disk_bytes });
    }
    let disk_bytes = disk_bytes.next_multiple_of(512);
    let name = backing.as_os_str().as_bytes();
    if name.len() > NAME_BYTES_MAX {
        return Err(OverlayError::Name { path: backing.to_owned() });
    }
    let mark = mark.map(|mark| (BACKING_MARK, mark.written(name)));
    let extensions: Vec<_> = [(BACKING_FORMAT, format.as_bytes().to_vec())].into_iter().chain(mark).collect();
    let image = empty_image(disk_bytes, name, &extensions, bitmap);
    let failed = |source| OverlayError::Make { path: path.to_owned(), source };
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
    file.write_all(&image).and_then(|()| file.sync_all()).map_err(|error| {
        // Half of an image is of no use. The first error is told.
        let _ = fs::remove_file(path);
        failed(error)
    })
}

/// As the guest sees it.
fn disk_bytes(path: &Path, format: &str) -> Result<u64, ImageError> {
    let unreadable = |error| access_error(path, "read", error);
    if format != "qcow2" {
        return Ok(fs::metadata(path).map_err(unreadable)?.len());
    }
    let file = fs::File::open(path).map_err(unreadable)?;
    Header::read(&file, path, None).map(|header| header.bytes)
}

/// `extensions`: of its header, each with its type.
fn empty_image(
    disk_bytes: u64,
    backing: &[u8],
    extensions: &[(u32, Vec<u8>)],
    bitmap: Option<(&str, &[u8])>,
) -> Vec<u8> {
    let l1_entries = disk_bytes.div_ceil(L1_ENTRY_BYTES).max(1);
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER_BYTES);
    let bitmap = bitmap.map(|(name, bits)| Bitmap::lay_out(name, bits, 3 + l1_clusters));
    let extensions: Vec<_> = extensions.iter().cloned().chain(bitmap.as_ref().map(Bitmap::extension)).collect();
    let clusters = 3 + l1_clusters + bitmap.as_ref().map_or(0, |bitmap| bitmap.clusters.len() as u64 / CLUSTER_BYTES);
    debug_assert!(clusters <= CLUSTERS_MAX, "a disk of the greatest size takes fewer");
    let mut image = vec![0; (clusters * CLUSTER_BYTES) as usize];
    if let Some(bitmap) = &bitmap {
        image[((3 + l1_clusters) * CLUSTER_BYTES) as usize..].copy_from_slice(&bitmap.clusters);
    }
    // The extensions, an empty one as their end, the name.
    let extension_bytes = |data: &[u8]| 8 + data.len().next_multiple_of(8);
    let extensions_bytes: usize = extensions.iter().map(|(_, data)| extension_bytes(data)).sum();
    let name_offset = u64::from(HEADER_BYTES) + (extensions_bytes + extension_bytes(&[])) as u64;
    let mut header = Vec::new();
    header.extend(b"QFI\xfb");
    header.extend(VERSION.to_be_bytes());
    header.extend(name_offset.to_be_bytes());
    header.extend((backing.len() as u32).to_be_bytes());
    header.extend(CLUSTER_BITS.to_be_bytes());
    header.extend(disk_bytes.to_be_bytes());
    header.extend(0_u32.to_be_bytes()); // not encrypted
    header.extend((l1_entries as u32).to_be_bytes());
    header.extend((3 * CLUSTER_BYTES).to_be_bytes());
    header.extend(CLUSTER_BYTES.to_be_bytes());
    header.extend(1_u32.to_be_bytes()); // clusters of the refcount table
    header.extend([0; 4 + 8 + 8 + 8]); // no internal snapshots, no features that must be known
    header.extend(if bitmap.is_some() { BITMAPS_FEATURE } else { 0 }.to_be_bytes());
    header.extend(REFCOUNT_ORDER.to_be_bytes());
    header.extend(HEADER_BYTES.to_be_bytes());
    for (kind, data) in &extensions {
        header.extend(kind.to_be_bytes());
        header.extend((data.len() as u32).to_be_bytes());
        header.extend(data);
        header.resize(header.len().next_multiple_of(8), 0);
    }
    header.resize(name_offset as usize, 0);
    header.extend(backing);
    image[..header.len()].copy_from_slice(&header);
    let cluster = CLUSTER_BYTES as usize;
    image[cluster..cluster + 8].copy_from_slice(&(2 * CLUSTER_BYTES).to_be_bytes());
    for used in 0..clusters as usize {
        image[2 * cluster + 2 * used..][..2].copy_from_slice(&1_u16.to_be_bytes());
    }
    image
}

/// A bitmap in the clusters behind everything else.
struct Bitmap {
    directory: u64,
    directory_bytes: u64,
    clusters: Vec<u8>,
}

impl Bitmap {
    /// Directory, table and bits, from this cluster on.
    fn lay_out(name: &str, bits: &[u8], cluster: u64) -> Self {
        let bits_clusters = (bits.len() as u64).div_ceil(CLUSTER_BYTES);
        let table_clusters = (bits_clusters * 8).div_ceil(CLUSTER_BYTES);
        let (directory, table, first) = (cluster, cluster + 1, cluster + 1 + table_clusters);
        let mut entry = Vec::new();
        entry.extend((table * CLUSTER_BYTES).to_be_bytes());
        entry.extend((bits_clusters as u32).to_be_bytes());
        entry.extend(0_u32.to_be_bytes()); // complete, and not written to
        entry.extend([DIRTY_TRACKING, CLUSTER_BITS as u8]); // a bit stands for as much as a cluster has
        entry.extend((name.len() as u16).to_be_bytes());
        entry.extend(0_u32.to_be_bytes()); // nothing more about it
        entry.extend(name.as_bytes());
        entry.resize(entry.len().next_multiple_of(8), 0);
        let directory_bytes = entry.len() as u64;
        let mut clusters = entry;
        clusters.resize(CLUSTER_BYTES as usize, 0);
        (0..bits_clusters).for_each(|number| clusters.extend(((first + number) * CLUSTER_BYTES).to_be_bytes()));
        clusters.resize(((first - cluster) * CLUSTER_BYTES) as usize, 0);
        clusters.extend(bits);
        clusters.resize(clusters.len().next_multiple_of(CLUSTER_BYTES as usize), 0);
        Self { directory: directory * CLUSTER_BYTES, directory_bytes, clusters }
    }

    fn extension(&self) -> (u32, Vec<u8>) {
        let count_and_nothing = 1_u64 << 32;
        let fields = [count_and_nothing, self.directory_bytes, self.directory].map(u64::to_be_bytes);
        (BITMAPS, fields.as_flattened().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn bitmap_is_one_of_qemus() {
        let folder = tempfile::tempdir().unwrap();
        let (base, over) = (folder.path().join("base"), folder.path().join("over"));
        // Its bits take two clusters.
        let bytes = (CLUSTER_BYTES * 8 + 3) * CLUSTER_BYTES;
        fs::File::create_new(&base).and_then(|file| file.set_len(bytes)).unwrap();
        let mut bits = vec![0; CLUSTER_BYTES as usize + 1];
        (bits[0], bits[CLUSTER_BYTES as usize]) = (0b101, 0b100);
        create_overlay_with_bitmap(&over, &base, "raw", ("monday", &bits)).unwrap();
        let qemu_img = |arguments: &[&str]| {
            let output = Command::new("qemu-img").args(arguments).arg(&over).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let checked = qemu_img(&["check"]);
        assert!(checked.contains("No errors"), "{checked}");
        let info = qemu_img(&["info", "--output=json"]);
        let bitmap = info.split_once("\"bitmaps\"").map(|(_, rest)| rest.split_whitespace().collect::<String>());
        let expected = ":[{\"flags\":[],\"name\":\"monday\",\"granularity\":65536}]";
        assert!(bitmap.is_some_and(|bitmap| bitmap.starts_with(expected)), "{info}");
    }
}
