//! Blocks of an image that nobody changes, read from any thread, without an engine.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use imago::{Mapping, Storage};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::guarded::GuardedFile;
use super::{Contents, Format, Image, ImageError, ImageOptions};
use crate::arrival::Arrivals;
use crate::block::BLOCK_BYTES;
use crate::engine::qcow2::Chain;

/// An image and its chain, locked against writers. Read through the page cache, because a snapshot seldom has only one reader.
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
    /// Opens an image. `format` is not guessed: a guest can write into a raw disk what looks like another format.
    pub fn open(path: &Path, format: Format) -> Result<Self, ImageError> {
        Self::open_over(path, format, &Arrivals::default())
    }

    /// As `open`, for an image of which bytes, or bytes of its backing images, may still be arriving.
    pub fn open_over(path: &Path, format: Format, arrivals: &Arrivals) -> Result<Self, ImageError> {
        let options = ImageOptions {
            path: path.to_owned(),
            format,
            read_only: true,
            direct: false,
            lock_patience: Duration::ZERO,
            owner: None,
        };
        let image = Image::open_over(&options, arrivals)?;
        let data = match &image.contents {
            Contents::Raw(raw) => Data::Raw(raw.file().map_err(|error| super::access_error(path, "read", error))?),
            Contents::Qcow2(qcow2) => Data::Qcow2(Mutex::new(qcow2.chain()?)),
        };
        Ok(Self { image, data })
    }

    /// Path of the image.
    pub fn path(&self) -> &Path {
        self.image.path()
    }

    /// Size of the disk.
    pub fn bytes(&self) -> u64 {
        self.image.bytes()
    }

    /// Reads whole blocks, beginning with `block`. Blocks past the disk's end are an error.
    pub fn read(&self, block: u64, blocks: &mut [u8]) -> io::Result<()> {
        let start = block.checked_mul(BLOCK_BYTES as u64).ok_or(io::ErrorKind::UnexpectedEof)?;
        self.read_at(blocks, start)
    }

    /// Fills `into` from this offset on. Bytes past the disk's end are an error.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64);
        if end.is_none_or(|end| end > self.image.bytes()) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match &self.data {
            Data::Raw(file) => {
                if let Contents::Raw(raw) = &self.image.contents
                    && let Some(arrival) = raw.arrival()
                {
                    arrival.wait(offset..offset + into.len() as u64)?;
                }
                file.read_exact_at(into, offset)
            }
            Data::Qcow2(chain) => lock(chain).read(into, offset),
        }
    }

    /// Offset of the next bytes, from this one on, that may not be zeroes. Nothing is read for that: bytes that no image of the
    /// chain holds, and holes of a raw one below, are zeroes. `None` if only zeroes are left.
    pub fn next_data(&self, from: u64) -> io::Result<Option<u64>> {
        let chain = match &self.data {
            Data::Raw(file) => return next_data(file, from),
            Data::Qcow2(chain) => lock(chain),
        };
        let mut at = from;
        while at < self.bytes() {
            let (mapping, length) = chain.get_mapping(at, self.bytes() - at)?;
            match mapping {
                Mapping::Eof { .. } => return Ok(None),
                Mapping::Zero { .. } => at += length,
                Mapping::Raw { storage, offset, .. } => match self.skipped(storage, offset)? {
                    Some(skipped) if skipped < length => return Ok(Some(at + skipped)),
                    _ => at += length,
                },
                _ => return Ok(Some(at)),
            }
        }
        Ok(None)
    }

    /// How many bytes from here on are a hole. None: all there are. A file with tables in it has none that says anything.
    fn skipped(&self, storage: &GuardedFile, offset: u64) -> io::Result<Option<u64>> {
        let Contents::Qcow2(qcow2) = &self.image.contents else { return Ok(Some(0)) };
        match qcow2.raw_base().filter(|(path, _)| storage.get_filename().as_deref() == Some(*path)) {
            None => Ok(Some(0)),
            Some((_, file)) => Ok(next_data(file, offset)?.map(|data| data - offset)),
        }
    }
}

/// A thread that panicked with the lock has changed nothing.
fn lock(chain: &Mutex<Chain>) -> MutexGuard<'_, Chain> {
    chain.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Offset of the next data of a file behind holes. `None` if only a hole is left.
pub fn next_data(file: &File, from: u64) -> io::Result<Option<u64>> {
    match seek(file, SeekFrom::Data(from)) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        // A block device does not tell: all of it is data.
        Err(Errno::INVAL) => Ok(Some(from)),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::create_overlay;
    use super::*;

    #[test]
    fn reads_stop_at_the_disks_end() {
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

    #[test]
    fn next_data_skips_what_no_image_holds() {
        const MIB: u64 = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let [base, middle, top] = ["base.img", "middle.qcow2", "top.qcow2"].map(|name| folder.path().join(name));
        let file = File::create_new(&base).unwrap();
        file.set_len(600 * MIB + 512).unwrap();
        file.write_all_at(&[7; 4096], 3 * MIB).unwrap();
        file.write_all_at(&[8; 512], 600 * MIB).unwrap();
        create_overlay(&middle, &base, "raw").unwrap();
        let write = |path: &Path, at: u64, zeroes: bool| {
            let (image, tables) = qcow2_of(path);
            match zeroes {
                true => image.write_zeroes(at, 64 << 10).unwrap(),
                false => image.write(&[9; 512][..], at).unwrap(),
            }
            image.flush().unwrap();
            tables.commit().unwrap();
        };
        write(&middle, 200 * MIB, false);
        create_overlay(&top, &middle, "qcow2").unwrap();
        write(&top, 300 * MIB, false);
        let look = || {
            let reader = ImageReader::open(&top, Format::Qcow2).unwrap();
            let mut found = Vec::new();
            let mut from = 0;
            // A MiB at a time, as a disk is sent.
            while let Some(at) = reader.next_data(from).unwrap() {
                found.push(at / MIB);
                from = (at / MIB + 1) * MIB;
            }
            found
        };
        assert_eq!(look(), [3, 200, 300, 600]);
        // A range that an upper image has as zeroes is not looked up below.
        write(&top, 200 * MIB, true);
        assert_eq!(look(), [3, 300, 600]);
        let raw = ImageReader::open(&base, Format::Raw).unwrap();
        assert_eq!(raw.next_data(4 * MIB).unwrap(), Some(600 * MIB));
        assert_eq!(raw.next_data(600 * MIB + 512).unwrap(), None);
    }

    /// To be written to.
    fn qcow2_of(path: &Path) -> (Chain, std::sync::Arc<crate::image::Tables>) {
        let (path, format) = (path.to_owned(), Format::Qcow2);
        let options =
            ImageOptions { path, format, read_only: false, direct: false, lock_patience: Duration::ZERO, owner: None };
        match Image::open(&options).unwrap().contents {
            Contents::Qcow2(qcow2) => qcow2.writable_chain().unwrap(),
            Contents::Raw(_) => unreachable!("it was opened as qcow2"),
        }
    }
}
