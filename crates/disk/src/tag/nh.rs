//! NH, the first layer of UMAC: 4096 bytes to 128 bits with one multiplication for every 8 bytes and pass.
//!
//! The block is 1024 words m of 32 bits, the key a little more words k:
//!
//! ```text
//! pass p:  sum over i of  (m[2i] + k[2i + 2p] mod 2^32) * (m[2i+1] + k[2i+1 + 2p] mod 2^32)   mod 2^64
//! ```
//!
//! Two different blocks of this one length agree in one pass with probability at most 2^-32 and in both with 2^-64,
//! although the passes share all but two words of their key (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, CRYPTO
//! 1999; RFC 4418 orders the words differently, which changes nothing in the proof).
//!
//! The sums do not depend on order, so the compiler multiplies two pairs at once with what every x86-64 has: 157 ns a
//! block, the last step of the tag included. Written by hand for AVX2 it took 115 ns: not worth unsafe code and a choice
//! at run time, where fetching a block from memory alone takes that long.

use crate::block::BLOCK_BYTES;

const WORDS: usize = BLOCK_BYTES / 4;
const PASSES: usize = 2;
const KEY_WORDS: usize = WORDS + 2 * (PASSES - 1);

pub(super) struct NhKey {
    words: [u32; KEY_WORDS],
}

impl NhKey {
    /// `fill` gives uniform random bytes.
    pub(super) fn new(fill: impl FnOnce(&mut [u8])) -> Self {
        let mut bytes = [0; KEY_WORDS * 4];
        fill(&mut bytes);
        let mut words = [0; KEY_WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        Self { words }
    }

    pub(super) fn hash(&self, block: &[u8; BLOCK_BYTES]) -> [u64; PASSES] {
        let mut sums = [0u64; PASSES];
        for (pair, bytes) in block.as_chunks::<8>().0.iter().enumerate() {
            let [a, b, c, d, e, f, g, h] = *bytes;
            let (even, odd) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
            for (pass, sum) in sums.iter_mut().enumerate() {
                let at = 2 * (pair + pass);
                let even = even.wrapping_add(self.words[at]);
                let odd = odd.wrapping_add(self.words[at + 1]);
                *sum = sum.wrapping_add(u64::from(even) * u64::from(odd));
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::Noise;

    fn noise_key(noise: &mut Noise) -> NhKey {
        NhKey::new(|bytes| bytes.fill_with(|| noise.next() as u8))
    }

    fn noise_block(noise: &mut Noise) -> [u8; BLOCK_BYTES] {
        std::array::from_fn(|_| noise.next() as u8)
    }

    /// The formula in the head of this file, as it stands there.
    fn by_definition(key: &NhKey, block: &[u8; BLOCK_BYTES], pass: usize) -> u64 {
        let m = |i: usize| u128::from(u32::from_le_bytes(block[4 * i..4 * i + 4].try_into().unwrap()));
        let k = |i: usize| u128::from(key.words[i]);
        let term = |i: usize| {
            ((m(2 * i) + k(2 * i + 2 * pass)) % (1 << 32)) * ((m(2 * i + 1) + k(2 * i + 1 + 2 * pass)) % (1 << 32))
        };
        ((0..WORDS / 2).map(term).sum::<u128>() % (1 << 64)) as u64
    }

    #[test]
    fn hashes_as_the_definition_says() {
        let mut noise = Noise(4418);
        for round in 0..200 {
            let (key, block) = match round {
                0 => (NhKey::new(|bytes| bytes.fill(0xff)), [0xff; BLOCK_BYTES]),
                1 => (NhKey::new(|bytes| bytes.fill(0xff)), [0; BLOCK_BYTES]),
                2 => (NhKey::new(|bytes| bytes.fill(0)), [0xff; BLOCK_BYTES]),
                _ => (noise_key(&mut noise), noise_block(&mut noise)),
            };
            let expected = [by_definition(&key, &block, 0), by_definition(&key, &block, 1)];
            assert_eq!(key.hash(&block), expected, "round {round}");
        }
    }

    #[test]
    fn a_small_case_computed_by_hand() {
        // Only the first pair of the block is not zero, and only six words of the key.
        let key = NhKey::new(|bytes| {
            for (place, word) in [3u32, 5, 7, 11, 13, 17].into_iter().enumerate() {
                bytes[4 * place..][..4].copy_from_slice(&word.to_le_bytes());
            }
        });
        let mut block = [0; BLOCK_BYTES];
        block[0] = 2;
        block[4] = 10;
        // Pass 0: (2+3)(10+5) + 7*11 + 13*17; pass 1: (2+7)(10+11) + 13*17.
        assert_eq!(key.hash(&block), [75 + 77 + 221, 189 + 221]);
    }
}
