//! File contents that reveal any misplaced block. They are the bytes that `probe fill` writes in the guest, so the guest can
//! check a file made on the host with `probe verify NAME SEED`.

use std::path::Path;

/// The finaliser of splitmix64.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// FNV-1a.
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The contents of a pattern file. They depend on the file's name without its folder, the offset and the seed.
pub fn bytes(path: &str, length: usize, seed: u64) -> Vec<u8> {
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or(path);
    let key = seed ^ mix(name_hash(name));
    let words = (0..length.div_ceil(8) as u64).map(|word| mix(key ^ mix(word)));
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(length);
    bytes
}

/// The offset at which two contents first differ.
pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    let differ = one.iter().zip(other).position(|(a, b)| a != b);
    differ.or_else(|| (one.len() != other.len()).then(|| one.len().min(other.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probe_writes_the_same_bytes() {
        let probe = crate::artifacts::probe().unwrap();
        let home = tempfile::tempdir().unwrap();
        let file = home.path().join("some name.bin");
        // The length exceeds the probe's buffer, and is not a multiple of a word.
        let (length, seed) = ((2 << 20) + 13, u64::MAX - 5);
        let arguments = [file.to_str().unwrap(), &length.to_string(), &seed.to_string()];
        let filled = std::process::Command::new(probe).arg("fill").args(arguments).output().unwrap();
        assert!(filled.status.success(), "{filled:?}");
        let expected = bytes("/elsewhere/some name.bin", length, seed);
        assert_eq!(first_difference(&std::fs::read(file).unwrap(), &expected), None);
    }

    #[test]
    fn name_offset_and_seed_change_the_pattern() {
        let block = |name, seed, index: usize| bytes(name, 8192, seed)[index * 4096..][..4096].to_vec();
        let base = block("a", 1, 0);
        for other in [block("b", 1, 0), block("a", 2, 0), block("a", 1, 1)] {
            assert!(base.iter().zip(&other).filter(|(a, b)| a == b).count() < 4096 / 64);
        }
    }

    #[test]
    fn first_difference_sees_contents_and_length() {
        assert_eq!(first_difference(b"abc", b"abc"), None);
        assert_eq!(first_difference(b"abc", b"axc"), Some(1));
        assert_eq!(first_difference(b"abc", b"ab"), Some(2));
    }
}
