//! Bytes: little-endian numbers at fixed offsets of headers, and sources that are read by offset.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// A source that is read at any offset, like a file.
pub trait ReadAt {
    /// Fills `into` with the bytes at offset `at`.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> io::Result<()>;

    /// Length of the source, in bytes.
    fn file_bytes(&self) -> io::Result<u64>;

    /// Reads `bytes` bytes at offset `at`. This length is checked against the source before memory is taken for it.
    fn read_part(&self, at: u64, bytes: u64) -> io::Result<Vec<u8>> {
        if at.checked_add(bytes).is_none_or(|end| self.file_bytes().is_ok_and(|whole| end > whole)) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut part = vec![0; usize::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?];
        self.read_exact_at(&mut part, at)?;
        Ok(part)
    }
}

impl ReadAt for File {
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, into, at)
    }

    fn file_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

impl ReadAt for [u8] {
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let part = usize::try_from(at).ok().and_then(|at| self.get(at..at.checked_add(into.len())?));
        into.copy_from_slice(part.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn file_bytes(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
}

/// The 16-bit number at an offset of a header. The caller has checked that the header is that long.
pub fn u16_at(header: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array_at(header, at))
}

/// The 32-bit number at an offset, as in `u16_at`.
pub fn u32_at(header: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(header, at))
}

/// The 64-bit number at an offset, as in `u16_at`.
pub fn u64_at(header: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(header, at))
}

/// Writes `bytes` at an offset of a header that is long enough.
pub fn put(header: &mut [u8], at: usize, bytes: &[u8]) {
    header[at..at + bytes.len()].copy_from_slice(bytes);
}

fn array_at<const N: usize>(header: &[u8], at: usize) -> [u8; N] {
    header[at..at + N].try_into().expect("as many bytes as were cut out")
}
