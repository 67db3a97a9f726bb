//! Blocks of an image that nobody changes, read from any thread, without an engine.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::{Contents, Format, Image, ImageError, ImageOptions};
use crate::block::BLOCK_BYTES;
use crate::engine::qcow2::Chain;

/// An image and its chain, locked against writers, through the page cache: who reads a snapshot is seldom alone.
pub struct ImageReader {
    image: Image,
    data: Data,
}

enum Data {
    Raw(File),
    Qcow2(Mutex<Chain>),
}

impl std::fmt::Debug for ImageReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageReader").field("image", &self.image).finish_non_exhaustive()
    }
}

impl ImageReader {
    /// `format` is not guessed: a guest can write into a raw disk what looks like another format.
    pub fn open(path: &Path, format: Format) -> Result<Self, ImageError> {
        let options = ImageOptions {
            path: path.to_owned(),
            format,
            read_only: true,
            direct: false,
            lock_patience: Duration::ZERO,
        };
        let image = Image::open(&options)?;
        let data = match &image.contents {
            Contents::Raw(raw) => Data::Raw(raw.file().map_err(|error| super::access_error(path, "read", error))?),
            Contents::Qcow2(qcow2) => Data::Qcow2(Mutex::new(qcow2.chain(true)?)),
        };
        Ok(Self { image, data })
    }

    pub fn path(&self) -> &Path {
        self.image.path()
    }

    /// Of the disk.
    pub fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    /// What its files take, those below it included.
    pub fn allocated_bytes(&self) -> io::Result<u64> {
        let of = |path: &Path| Ok(std::fs::metadata(path)?.blocks() * 512);
        match &self.image.contents {
            Contents::Raw(_) => of(self.image.path()),
            Contents::Qcow2(qcow2) => qcow2.paths().map(of).sum(),
        }
    }

    /// Whole blocks, from this one on. What lies behind the disk's end is an error.
    pub fn read(&self, block: u64, blocks: &mut [u8]) -> io::Result<()> {
        let start = block.checked_mul(BLOCK_BYTES as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        self.read_at(blocks, start)
    }

    /// Fills `into` from this offset on. What lies behind the disk's end is an error.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > self.image.bytes()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match &self.data {
            Data::Raw(file) => file.read_exact_at(into, offset),
            // Whoever panicked with it has changed nothing.
            Data::Qcow2(chain) => chain.lock().unwrap_or_else(PoisonError::into_inner).read(into, offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::create_overlay;
    use super::*;

    #[test]
    fn blocks_of_raw_and_qcow2_images_are_read_and_those_past_the_end_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let (base, top) = (folder.path().join("base.img"), folder.path().join("top.qcow2"));
        let bytes: Vec<u8> = (0..5 * BLOCK_BYTES).map(|at| (at / 512) as u8).collect();
        std::fs::write(&base, &bytes).unwrap();
        create_overlay(&top, &base, "raw").unwrap();
        for (path, format) in [(&base, Format::Raw), (&top, Format::Qcow2)] {
            let reader = ImageReader::open(path, format).unwrap();
            let mut two = vec![0; 2 * BLOCK_BYTES];
            reader.read(3, &mut two).unwrap();
            assert_eq!(two, bytes[3 * BLOCK_BYTES..]);
            for block in [4, 5, u64::MAX] {
                assert_eq!(reader.read(block, &mut two).unwrap_err().kind(), io::ErrorKind::UnexpectedEof, "{block}");
            }
        }
        let missing = ImageReader::open(&folder.path().join("none"), Format::Raw).unwrap_err();
        assert!(matches!(missing, ImageError::Missing { .. }), "{missing}");
    }
}
