//! Images with contents: no block is zero, sparse or like another, so that no layer can shorten a read.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use hearth_disk::block::BLOCK_BYTES;

/// Writes an image that is made of [`block`]s.
pub fn write(path: &Path, bytes: u64) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    for number in 0..bytes / BLOCK_BYTES as u64 {
        file.write_all(&block(number))?;
    }
    file.into_inner()?.sync_all()
}

/// The contents of a block: its number, and then words that all differ.
pub fn block(number: u64) -> [u8; BLOCK_BYTES] {
    let mut bytes = [0; BLOCK_BYTES];
    let words = BLOCK_BYTES as u64 / 8;
    for (word, target) in (number * words..).zip(bytes.chunks_exact_mut(8)) {
        target.copy_from_slice(&word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
    }
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn blocks_begin_with_their_numbers_and_differ() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        super::write(&path, 3 * 4096).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        let numbers: Vec<u8> = bytes.chunks(4096).map(|block| block[0]).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert_ne!(bytes[8..4096], bytes[4096 + 8..8192]);
    }
}
