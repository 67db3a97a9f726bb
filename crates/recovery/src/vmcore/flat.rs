//! Flattened dumps: what makedumpfile -F and QEMU's kdump formats write to a pipe, where no writer can seek back.
//!
//! ```text
//! 0     "makedumpfile", type 1, version 1 (big endian), filled up to 4096 bytes
//! ..    offset i64, length i64 (big endian), bytes; again and again, later pieces over earlier ones
//! end   offset -1
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use super::bytes::ReadAt;

const SIGNATURE: &[u8; 16] = b"makedumpfile\0\0\0\0";
const HEADER_BYTES: u64 = 4096;
const END: i64 = -1;
/// Maximum number of pieces, 8 million. QEMU writes one a page at most, so they cover 32 GiB of a guest; they take 400
/// MB of memory.
const PIECES_MAX: usize = 8 << 20;

/// Why a flattened dump cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum FlatError {
    #[error("version {version} of type {kind} is not known")]
    Version { kind: u64, version: u64 },
    #[error("it is cut off or damaged at byte {0}")]
    Damaged(u64),
    #[error("it has more than {PIECES_MAX} pieces; makedumpfile -R makes a plain file of it")]
    TooMany,
    #[error("it cannot be read")]
    Unreadable(#[from] io::Error),
}

/// A flattened dump, read as the plain one that it represents.
pub struct Flattened {
    file: File,
    /// Sorted by their offset in the plain file, without overlap.
    pieces: BTreeMap<u64, Piece>,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    bytes: u64,
    /// Offset in the flattened file.
    at: u64,
}

/// Whether the file begins as a flattened dump does.
pub fn is_flattened(file: &File) -> bool {
    let mut signature = [0; SIGNATURE.len()];
    ReadAt::read_exact_at(file, &mut signature, 0).is_ok() && signature == *SIGNATURE
}

impl Flattened {
    /// Reads the headers of all pieces.
    pub fn open(file: File) -> Result<Self, FlatError> {
        let file_bytes = file.file_bytes()?;
        let mut reader = BufReader::with_capacity(1 << 16, file);
        reader.seek(SeekFrom::Start(SIGNATURE.len() as u64))?;
        let (kind, version) = pair(&mut reader)?;
        if (kind, version) != (1, 1) {
            return Err(FlatError::Version { kind, version });
        }
        let mut pieces = BTreeMap::new();
        let mut bytes = 0;
        let mut at = HEADER_BYTES;
        reader.seek(SeekFrom::Start(at))?;
        loop {
            let (offset, length) = pair(&mut reader).map_err(|_| FlatError::Damaged(at))?;
            if offset.cast_signed() == END {
                break;
            }
            at += 16;
            let end = at.checked_add(length).filter(|end| *end <= file_bytes);
            let sane = length > 0 && offset.cast_signed() >= 0 && offset.checked_add(length).is_some();
            let end = end.filter(|_| sane).ok_or(FlatError::Damaged(at))?;
            insert(&mut pieces, offset, Piece { bytes: length, at });
            if pieces.len() > PIECES_MAX {
                return Err(FlatError::TooMany);
            }
            bytes = bytes.max(offset + length);
            let skip = i64::try_from(length).map_err(|_| FlatError::Damaged(at))?;
            reader.seek_relative(skip)?;
            at = end;
        }
        Ok(Self { file: reader.into_inner(), pieces, bytes })
    }
}

fn pair(reader: &mut impl Read) -> io::Result<(u64, u64)> {
    let mut bytes = [0; 16];
    reader.read_exact(&mut bytes)?;
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    Ok((number(0), number(8)))
}

/// Adds a piece, and cuts what it covers out of earlier ones.
fn insert(pieces: &mut BTreeMap<u64, Piece>, offset: u64, piece: Piece) {
    let end = offset + piece.bytes;
    while let Some((&start, &old)) = pieces.range(..end).next_back().filter(|(start, old)| *start + old.bytes > offset)
    {
        pieces.remove(&start);
        let old_end = start + old.bytes;
        if old_end > end {
            pieces.insert(end, Piece { bytes: old_end - end, at: old.at + (end - start) });
        }
        if start < offset {
            pieces.insert(start, Piece { bytes: offset - start, at: old.at });
        }
    }
    pieces.insert(offset, piece);
}

impl ReadAt for Flattened {
    /// Bytes that no piece covers read as zeroes, as in a file with holes.
    fn read_exact_at(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let end = at.checked_add(into.len() as u64).filter(|end| *end <= self.bytes);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        into.fill(0);
        let first = self.pieces.range(..=at).next_back().map_or(at, |(start, _)| *start);
        for (start, piece) in self.pieces.range(first..end) {
            let (from, to) = (at.max(*start), end.min(start + piece.bytes));
            if from < to {
                let part = &mut into[(from - at) as usize..(to - at) as usize];
                ReadAt::read_exact_at(&self.file, part, piece.at + (from - start))?;
            }
        }
        Ok(())
    }

    fn file_bytes(&self) -> io::Result<u64> {
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn flattened(pieces: &[(i64, &[u8])], end: bool) -> File {
        let mut file = tempfile::tempfile().unwrap();
        let mut header = vec![0; HEADER_BYTES as usize];
        header[..16].copy_from_slice(SIGNATURE);
        header[23] = 1;
        header[31] = 1;
        file.write_all(&header).unwrap();
        for (offset, bytes) in pieces {
            file.write_all(&offset.to_be_bytes()).unwrap();
            file.write_all(&(bytes.len() as i64).to_be_bytes()).unwrap();
            file.write_all(bytes).unwrap();
        }
        if end {
            file.write_all(&[0xff; 16]).unwrap();
        }
        file
    }

    #[test]
    fn later_pieces_lie_over_earlier_ones() {
        let file = flattened(&[(0, b"aaaaaaaa"), (10, b"bb"), (2, b"cc"), (3, b"ddd"), (11, b"eee")], true);
        assert!(is_flattened(&file));
        let flat = Flattened::open(file).unwrap();
        assert_eq!(flat.read_part(0, 14).unwrap(), b"aacdddaa\0\0beee");
        assert_eq!(flat.read_part(4, 7).unwrap(), b"ddaa\0\0b");
        assert_eq!(flat.file_bytes().unwrap(), 14);
        assert!(flat.read_part(10, 5).is_err());
    }

    #[test]
    fn torn_and_foreign_files_are_refused() {
        assert!(matches!(Flattened::open(flattened(&[(0, b"aa")], false)), Err(FlatError::Damaged(_))));
        assert!(matches!(Flattened::open(flattened(&[(-5, b"aa")], true)), Err(FlatError::Damaged(_))));
        assert!(matches!(Flattened::open(flattened(&[(i64::MAX, b"aa")], true)), Ok(_) | Err(FlatError::Damaged(_))));
        let file = flattened(&[], true);
        std::os::unix::fs::FileExt::write_all_at(&file, &[9], 31).unwrap();
        assert!(matches!(Flattened::open(file), Err(FlatError::Version { version: 9, .. })));
        assert!(!is_flattened(&tempfile::tempfile().unwrap()));
    }
}
