//! Stored disk: a disk in an object store, as its blocks of 1 MiB that are not all zeroes, one after the other, and an
//! index.
//!
//! ```text
//! disk-NAME          blocks, in their order; the last one may be shorter
//! disk-NAME.index    24 a block: 0 u64 number of the block in the disk | 8 first 16 bytes of its BLAKE3
//! ```
//! All numbers are little-endian. The manifest has the checksum of the index. So holes cost nothing, and each block is
//! checked when it is fetched.
//!
//! The disk is the disk's file. If it lies over a backing image, it is what its guest sees: a raw disk that needs no
//! other file.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_disk::arrival::{Arrival, CHECKSUM_BYTES, Checksum, UNIT_BYTES as BLOCK_BYTES};
use hearth_disk::image::{Format, ImageReader, next_data};

use super::manifest::{DiskPart, StoredDisk, disk_file};
use super::place::Far;
use super::{SnapshotError, check_part, disk as image};

const ENTRY_BYTES: usize = 24;
/// Maximum size of an index: enough for 2.6 TiB that are not zeroes.
pub const INDEX_BYTES_MAX: u64 = 64 << 20;

/// Names of a disk's objects in a store: its blocks and their index.
pub fn disk_objects(disk: &str) -> [String; 2] {
    [disk_file(disk), index_file(disk)]
}

/// Name of the object with a disk's index.
pub fn index_file(disk: &str) -> String {
    format!("{}.index", disk_file(disk))
}

/// How the disk is stored. A snapshot in a folder does not say. A copy of one in a store is refused, because it has no
/// checksums of its disks and lacks their backing images.
pub fn of<'a>(disk: &'a DiskPart, path: &Path) -> Result<&'a StoredDisk, SnapshotError> {
    disk.stored.as_ref().ok_or_else(|| SnapshotError::CopiedFolder { path: path.to_owned() })
}

/// Bytes of a disk that are sent.
pub enum Content {
    /// The disk's file.
    Alone(File),
    /// The contents of the disk's file together with its backing images.
    Over(Box<ImageReader>),
}

impl Content {
    /// Opens a disk to be sent. `disk` tells its format, because a guest can write into a raw disk what looks like
    /// another one.
    pub fn open(path: &Path, disk: &DiskPart) -> Result<Self, SnapshotError> {
        let opened = File::open(path).and_then(|file| Ok((image::backing(&file, &disk.format)?, file)));
        match opened.map_err(SnapshotError::io(path, "read"))? {
            (None, file) => Ok(Self::Alone(file)),
            (Some(_), _) => Ok(Self::Over(Box::new(ImageReader::open(path, Format::Qcow2)?))),
        }
    }

    /// The disk's entry in the manifest that goes to the store.
    pub fn part(&self, disk: &DiskPart) -> io::Result<DiskPart> {
        let format = match self {
            Self::Alone(_) => disk.format.clone(),
            Self::Over(_) => "raw".to_owned(),
        };
        Ok(DiskPart { format, bytes: self.bytes()?, modified: None, ..disk.clone() })
    }

    fn bytes(&self) -> io::Result<u64> {
        match self {
            Self::Alone(file) => Ok(file.metadata()?.len()),
            Self::Over(chain) => Ok(chain.bytes()),
        }
    }

    /// Offset of the next data from `from` on; `None` if only zeroes are left. It skips what is known to be zeroes
    /// without being read.
    fn next_data(&self, from: u64) -> io::Result<Option<u64>> {
        match self {
            Self::Alone(file) => next_data(file, from),
            Self::Over(chain) => chain.next_data(from),
        }
    }

    fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Self::Alone(file) => file.read_exact_at(into, offset),
            Self::Over(chain) => chain.read_at(into, offset),
        }
    }
}

/// A disk's blocks that are not all zeroes, one after the other. The disk is read once, so its index is known at the
/// end.
pub struct Blocks<'a> {
    content: &'a Content,
    disk_bytes: u64,
    /// Index of the blocks so far.
    index: Vec<u8>,
    next: u64,
    block: Vec<u8>,
    /// Bytes of `block` that have been passed on.
    passed: usize,
}

impl<'a> Blocks<'a> {
    /// Starts at the disk's beginning.
    pub fn of(content: &'a Content) -> io::Result<Self> {
        let disk_bytes = content.bytes()?;
        Ok(Self { content, disk_bytes, index: Vec::new(), next: 0, block: Vec::new(), passed: 0 })
    }

    /// Maximum number of bytes to come: all that is not known to be zeroes without being read.
    pub fn bytes_max(&self) -> io::Result<u64> {
        let (mut bytes, mut from) = (0, 0);
        while let Some(number) = self.find(from)? {
            bytes += length_of(number, self.disk_bytes) as u64;
            from = number + 1;
        }
        Ok(bytes)
    }

    /// Index of the blocks that were read.
    pub fn into_index(self) -> Vec<u8> {
        self.index
    }

    /// First block from `from` on that may hold data.
    fn find(&self, from: u64) -> io::Result<Option<u64>> {
        if from * BLOCK_BYTES >= self.disk_bytes {
            return Ok(None);
        }
        // A block may hold data behind a hole.
        let data = self.content.next_data(from * BLOCK_BYTES)?;
        Ok(data.map(|data| from.max(data / BLOCK_BYTES)))
    }

    /// Reads the next block. Returns false if there is none.
    fn read_next(&mut self) -> io::Result<bool> {
        let Some(number) = self.find(self.next)? else { return Ok(false) };
        self.next = number + 1;
        self.passed = 0;
        self.block.resize(length_of(number, self.disk_bytes), 0);
        self.content.read_at(&mut self.block, number * BLOCK_BYTES)?;
        if self.block.iter().all(|byte| *byte == 0) {
            self.block.clear();
        } else {
            if (self.index.len() + ENTRY_BYTES) as u64 > INDEX_BYTES_MAX {
                return Err(io::Error::other("it is too large for an object store"));
            }
            self.index.extend(number.to_le_bytes());
            self.index.extend(&blake3::hash(&self.block).as_bytes()[..CHECKSUM_BYTES]);
        }
        Ok(true)
    }
}

impl Read for Blocks<'_> {
    /// Fails with `WouldBlock` after a block of zeroes, because there are no bytes yet.
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.passed == self.block.len() {
            match self.read_next()? {
                false => return Ok(0),
                true if self.block.is_empty() => return Err(io::ErrorKind::WouldBlock.into()),
                true => {}
            }
        }
        let length = into.len().min(self.block.len() - self.passed);
        into[..length].copy_from_slice(&self.block[self.passed..][..length]);
        self.passed += length;
        Ok(length)
    }
}

fn length_of(block: u64, disk_bytes: u64) -> usize {
    BLOCK_BYTES.min(disk_bytes - block * BLOCK_BYTES) as usize
}

/// Parses a store's index; `None` if it makes no sense.
pub(super) fn parse(index: &[u8], disk: &DiskPart, stored: &StoredDisk) -> Option<Vec<(u64, Checksum)>> {
    let entries = index.chunks_exact(ENTRY_BYTES);
    if !entries.remainder().is_empty() {
        return None;
    }
    let block = |entry: &[u8]| {
        let (block, checksum) = entry.split_at(8);
        (
            u64::from_le_bytes(block.try_into().expect("8 bytes")),
            checksum.try_into().expect("as many as a checksum has"),
        )
    };
    let blocks: Vec<(u64, Checksum)> = entries.map(block).collect();
    let ascends = blocks.is_sorted_by(|one, next| one.0 < next.0);
    let fits = blocks.last().is_none_or(|last| last.0 < disk.bytes.div_ceil(BLOCK_BYTES));
    if !ascends || !fits {
        return None;
    }
    let bytes: u64 = blocks.iter().map(|(block, _)| length_of(*block, disk.bytes) as u64).sum();
    (bytes == stored.bytes).then_some(blocks)
}

/// Makes `target` the disk of a snapshot in a store. All of its data is still to come (`arriving_disk`).
pub fn expect(far: &Far, disk: &DiskPart, target: &Path) -> Result<(), SnapshotError> {
    let (name, index_name) = (disk_file(&disk.name), index_file(&disk.name));
    let url = |name: &str| std::path::PathBuf::from(far.store.url(name));
    let stored = of(disk, &url(&name))?;
    let index = far.store.read(&index_name, INDEX_BYTES_MAX)?;
    let index = index.ok_or_else(|| SnapshotError::damaged(&url(&index_name), "it is not there"))?;
    let index = check_part(&url(&index_name), &stored.index, index)?;
    let blocks = parse(&index, disk, stored);
    let blocks = blocks.ok_or_else(|| SnapshotError::damaged(&url(&index_name), "its blocks make no sense"))?;
    Arrival::make(target, disk.bytes, &far.store.url(&name), &blocks).map_err(SnapshotError::io(target, "made"))
}

#[cfg(test)]
pub(super) mod tests {
    use hearth_disk::image::create_overlay;

    use super::*;
    use crate::snapshot::Part;

    /// Numbers of the blocks that are sent, their bytes, and the index.
    pub fn sent(content: &Content) -> (Vec<u64>, Vec<u8>, Vec<u8>) {
        let (mut blocks, mut sent, mut piece) = (Blocks::of(content).unwrap(), Vec::new(), vec![0; 300_000]);
        let bytes_max = blocks.bytes_max().unwrap();
        loop {
            match blocks.read(&mut piece) {
                Ok(0) => break,
                Ok(length) => sent.extend(&piece[..length]),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        assert!(sent.len() as u64 <= bytes_max, "{} bytes of {bytes_max}", sent.len());
        let index = blocks.into_index();
        let numbers = index.chunks(ENTRY_BYTES).map(|entry| u64::from_le_bytes(entry[..8].try_into().unwrap()));
        (numbers.collect(), sent, index)
    }

    #[test]
    fn disk_over_a_base_is_sent_as_seen() {
        let folder = tempfile::tempdir().unwrap();
        let (base, top) = (folder.path().join("base"), folder.path().join("top"));
        let mut bytes = vec![0; 5 * BLOCK_BYTES as usize + 512];
        bytes[BLOCK_BYTES as usize] = 1;
        bytes[5 * BLOCK_BYTES as usize + 511] = 5;
        std::fs::write(&base, &bytes).unwrap();
        create_overlay(&top, &base, "raw").unwrap();
        let part = |format: &str| DiskPart {
            name: "root".into(),
            format: format.into(),
            bytes: 7,
            modified: None,
            stored: None,
        };
        let content = Content::open(&top, &part("qcow2")).unwrap();
        let told = content.part(&part("qcow2")).unwrap();
        assert_eq!((told.format.as_str(), told.bytes), ("raw", bytes.len() as u64));
        let whole =
            [&bytes[BLOCK_BYTES as usize..2 * BLOCK_BYTES as usize], &bytes[5 * BLOCK_BYTES as usize..]].concat();
        let (numbers, bytes, _) = sent(&content);
        assert!(numbers == [1, 5] && bytes == whole);
        // A raw disk that looks like qcow2 is what its guest wrote.
        let header = std::fs::read(&top).unwrap();
        let content = Content::open(&top, &part("raw")).unwrap();
        assert_eq!(content.part(&part("raw")).unwrap().format, "raw");
        assert!(sent(&content).1.starts_with(&header[..100]));
        std::fs::remove_file(&base).unwrap();
        let missing = Content::open(&top, &part("qcow2")).err().map(|error| error.to_string());
        assert!(missing.is_some_and(|said| said.contains("backing image")));
    }

    #[test]
    fn only_blocks_with_data_are_sent_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let image = File::options().read(true).write(true).create_new(true).open(folder.path().join("disk")).unwrap();
        let content = Content::Alone(image.try_clone().unwrap());
        assert!(sent(&content).0.is_empty(), "an empty one");
        image.set_len(10 * BLOCK_BYTES + 5).unwrap();
        assert!(sent(&content).0.is_empty(), "one of holes");
        image.write_all_at(&[0; 4096], 2 * BLOCK_BYTES).unwrap();
        image.write_all_at(&[7; 4096], 4 * BLOCK_BYTES - 4096).unwrap();
        image.write_all_at(&[9], 10 * BLOCK_BYTES + 4).unwrap();
        let (numbers, sent, index) = sent(&content);
        assert_eq!((&numbers[..], sent.len() as u64), (&[3, 10][..], BLOCK_BYTES + 5));
        assert_eq!(
            (sent[BLOCK_BYTES as usize - 4096], sent[BLOCK_BYTES as usize - 4097], sent[sent.len() - 1]),
            (7, 0, 9)
        );
        let bytes = sent.len() as u64;
        let disk = DiskPart {
            name: "root".into(),
            format: "raw".into(),
            bytes: 10 * BLOCK_BYTES + 5,
            modified: None,
            stored: None,
        };
        let part = |bytes| StoredDisk { bytes, index: Part { bytes: 0, blake3: String::new() } };
        let parsed = parse(&index, &disk, &part(bytes)).unwrap();
        assert_eq!(parsed.iter().map(|(block, _)| *block).collect::<Vec<_>>(), [3, 10]);
        assert!(parse(&index, &disk, &part(bytes + 1)).is_none(), "not so long");
        assert!(parse(&index[1..], &disk, &part(bytes)).is_none(), "cut off");
        let turned = [&index[24..], &index[..24]].concat();
        assert!(parse(&turned, &disk, &part(bytes)).is_none(), "out of order");
        let beyond = DiskPart { bytes: 10 * BLOCK_BYTES, ..disk };
        assert!(parse(&index, &beyond, &part(bytes)).is_none(), "behind the disk's end");
    }
}
