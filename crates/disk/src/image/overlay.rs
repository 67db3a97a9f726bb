//! A new, empty qcow2 image over another one: what is written goes here, the rest is read from there.
//!
//! cluster 0: header and the backing image's name | 1: refcount table | 2: refcount block | 3 ...: L1 table, empty

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const CLUSTER_BYTES: u64 = 64 << 10;
const CLUSTER_BITS: u32 = 16;
const HEADER_BYTES: u32 = 104;
const VERSION: u32 = 3;
const REFCOUNT_ORDER: u32 = 4;
/// Header extension: format of the backing image.
const BACKING_FORMAT: u32 = 0xe279_2aca;
/// The format knows no longer ones.
const NAME_BYTES_MAX: usize = 1023;
/// One L1 entry leads to so many bytes of the disk.
const L1_ENTRY_BYTES: u64 = CLUSTER_BYTES / 8 * CLUSTER_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum OverlayError {
    #[error("{path}: cannot be made")]
    Make { path: PathBuf, source: io::Error },
    #[error("{path}: cannot be read")]
    Backing { path: PathBuf, source: io::Error },
    #[error("{path}: has a name that is too long for a backing image")]
    Name { path: PathBuf },
}

/// Makes an image that shows what `backing` (an absolute path; `raw` or `qcow2`) holds. The backing image must not change.
pub fn create_overlay(path: &Path, backing: &Path, format: &str) -> Result<(), OverlayError> {
    let disk_bytes = disk_bytes(backing, format)
        .map_err(|source| OverlayError::Backing { path: backing.to_owned(), source })?
        .next_multiple_of(512);
    let name = backing.as_os_str().as_bytes();
    if name.len() > NAME_BYTES_MAX {
        return Err(OverlayError::Name { path: backing.to_owned() });
    }
    let image = empty_image(disk_bytes, name, format);
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| {
        file.write_all(&image)?;
        file.sync_all()
    });
    written.map_err(|source| OverlayError::Make { path: path.to_owned(), source })
}

/// As the guest sees it.
fn disk_bytes(path: &Path, format: &str) -> io::Result<u64> {
    if format != "qcow2" {
        return Ok(fs::metadata(path)?.len());
    }
    let mut header = [0; 32];
    std::os::unix::fs::FileExt::read_exact_at(&fs::File::open(path)?, &mut header, 0)?;
    Ok(u64::from_be_bytes(header[24..32].try_into().expect("8 bytes")))
}

fn empty_image(disk_bytes: u64, backing: &[u8], format: &str) -> Vec<u8> {
    let l1_entries = disk_bytes.div_ceil(L1_ENTRY_BYTES).max(1);
    let l1_clusters = (l1_entries * 8).div_ceil(CLUSTER_BYTES);
    let clusters = 3 + l1_clusters;
    let mut image = vec![0; (clusters * CLUSTER_BYTES) as usize];
    // The extension, an empty one as the end, the name.
    let extension_bytes = 8 + format.len().next_multiple_of(8) + 8;
    let name_offset = u64::from(HEADER_BYTES) + extension_bytes as u64;
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
    header.extend([0; 4 + 8 + 8 + 8 + 8]); // no internal snapshots, no features
    header.extend(REFCOUNT_ORDER.to_be_bytes());
    header.extend(HEADER_BYTES.to_be_bytes());
    header.extend(BACKING_FORMAT.to_be_bytes());
    header.extend((format.len() as u32).to_be_bytes());
    header.extend(format.as_bytes());
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
