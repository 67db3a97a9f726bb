//! Keyed 64-bit tags of 4 KiB blocks.
//!
//! block -> NH, two passes (see `nh`) -> 128 bits -> POLYVAL -> 64 bits
//!
//! Without the key, two different blocks can be made to collide with probability 2^-63 a try: 2^-64 that NH already
//! gives both the same 128 bits, and 2^-64 that POLYVAL (RFC 8452; here a single multiplication by a secret element of
//! GF(2^128), cut to half) does so with different ones. No nonce is needed because tags never leave the host.
//!
//! POLYVAL alone over the block is simpler and also fast enough to be hidden by a disk, but not by memory: it takes
//! 660 ns a block (and collides with 2^-56).

use std::sync::Arc;

use polyval::Polyval;
use polyval::universal_hash::UniversalHash;

use crate::block::BLOCK_BYTES;

mod nh;

use nh::NhKey;

/// Bytes of the secret behind a machine's tags: uniform random bytes.
pub const TAG_KEY_BYTES: usize = 16;

/// Purpose for which the secret is stretched. Another construction of tags gets another text, so that no key serves two.
const CONTEXT: &str = "hearth 2026-11-20 tags of disk blocks, NH and POLYVAL";

/// Tag of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag(pub u64);

/// Makes tags with a machine's secret. Cloning is cheap; the keys are made once.
#[derive(Clone)]
pub struct Tagger {
    first: Arc<NhKey>,
    last: Polyval,
}

impl Tagger {
    /// A tagger with this secret.
    pub fn new(key: &[u8; TAG_KEY_BYTES]) -> Self {
        let mut stretched = blake3::Hasher::new_derive_key(CONTEXT).update(key).finalize_xof();
        let first = NhKey::new(|bytes| stretched.fill(bytes));
        let mut last = [0; 16];
        stretched.fill(&mut last);
        Self { first: Arc::new(first), last: Polyval::new(&last.into()) }
    }

    /// The tag of a block. Takes 157 ns on a 2.6 GHz EPYC.
    pub fn tag(&self, block: &[u8; BLOCK_BYTES]) -> Tag {
        let [one, other] = self.first.hash(block);
        let mut words = [0; 16];
        words[..8].copy_from_slice(&one.to_le_bytes());
        words[8..].copy_from_slice(&other.to_le_bytes());
        let mut last = self.last.clone();
        last.update(&[words.into()]);
        let digest = last.finalize();
        Tag(u64::from_le_bytes(digest[..8].try_into().expect("a POLYVAL digest has 16 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_blocks_have_equal_tags() {
        let (a, b) = (Tagger::new(&[1; TAG_KEY_BYTES]), Tagger::new(&[2; TAG_KEY_BYTES]));
        let block = [7; BLOCK_BYTES];
        assert_eq!(a.tag(&block), a.clone().tag(&block));
        assert_ne!(a.tag(&block), b.tag(&block));
    }

    #[test]
    fn every_bit_of_a_block_counts() {
        let tagger = Tagger::new(b"a key like noise");
        let reference = tagger.tag(&[0; BLOCK_BYTES]);
        for bit in 0..BLOCK_BYTES * 8 {
            let mut block = [0; BLOCK_BYTES];
            block[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(tagger.tag(&block), reference, "bit {bit}");
        }
    }

    #[test]
    fn every_bit_of_the_key_counts() {
        let tag = |key: &[u8; TAG_KEY_BYTES]| Tagger::new(key).tag(&[7; BLOCK_BYTES]);
        let reference = tag(&[0; TAG_KEY_BYTES]);
        for bit in 0..TAG_KEY_BYTES * 8 {
            let mut key = [0; TAG_KEY_BYTES];
            key[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(tag(&key), reference, "bit {bit}");
        }
    }
}
