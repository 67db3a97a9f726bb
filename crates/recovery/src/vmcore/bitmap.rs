//! Bitmap: a set of page frames, in memory and as kdump files store it (one bit a page frame, lowest bit first).
//!
//! The set is bounded: page frames past its end are in no set and cannot be added. So numbers read from a guest or a
//! file need no check of their own.

use std::ops::Range;

const BITS: u64 = u64::BITS as u64;

/// A set of page frames below `pages()`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    pages: u64,
    words: Vec<u64>,
}

impl Bitmap {
    /// The empty set.
    pub fn new(pages: u64) -> Self {
        Self { pages, words: vec![0; pages.div_ceil(BITS) as usize] }
    }

    /// The set of all page frames in these ranges.
    pub fn of(pages: u64, ranges: &[Range<u64>]) -> Self {
        let mut bitmap = Self::new(pages);
        for range in ranges {
            bitmap.set_range(range.clone());
        }
        bitmap
    }

    /// Reads the bitmap of a kdump file. Missing bytes count as empty, and bits past `pages` are ignored.
    pub(crate) fn from_kdump(bytes: &[u8], pages: u64) -> Self {
        let mut bitmap = Self::new(pages);
        for (word, bytes) in bitmap.words.iter_mut().zip(bytes.chunks(size_of::<u64>())) {
            let mut whole = [0; size_of::<u64>()];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(whole);
        }
        if let Some(last) = bitmap.words.last_mut() {
            *last &= mask(0..(pages - 1) % BITS + 1);
        }
        bitmap
    }

    /// The set as a kdump file stores it, in as many bytes as `pages()` needs.
    pub(crate) fn to_kdump(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.words.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.truncate(self.pages.div_ceil(8) as usize);
        bytes
    }

    /// One past the last page frame that can be in the set.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether this page frame is in the set.
    pub fn contains(&self, pfn: u64) -> bool {
        pfn < self.pages && self.words[(pfn / BITS) as usize] & (1 << (pfn % BITS)) != 0
    }

    /// Adds a page frame.
    pub fn set(&mut self, pfn: u64) {
        if pfn < self.pages {
            self.words[(pfn / BITS) as usize] |= 1 << (pfn % BITS);
        }
    }

    /// Removes a page frame.
    pub fn clear(&mut self, pfn: u64) {
        if pfn < self.pages {
            self.words[(pfn / BITS) as usize] &= !(1 << (pfn % BITS));
        }
    }

    /// Adds these page frames.
    pub(crate) fn set_range(&mut self, pfns: Range<u64>) {
        self.for_each_word(pfns, |word, mask| *word |= mask);
    }

    /// Removes these page frames.
    pub(crate) fn clear_range(&mut self, pfns: Range<u64>) {
        self.for_each_word(pfns, |word, mask| *word &= !mask);
    }

    /// Number of page frames in the set.
    pub fn count(&self) -> u64 {
        self.words.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Number of these page frames that are in the set.
    pub(crate) fn count_in(&self, pfns: Range<u64>) -> u64 {
        words_of(pfns, self.pages).map(|(at, mask)| u64::from((self.words[at] & mask).count_ones())).sum()
    }

    /// The page frames in the set, in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        self.iter_in(0..self.pages)
    }

    /// The page frames in the set that are within a range.
    pub(crate) fn iter_in(&self, pfns: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        words_of(pfns, self.pages).flat_map(|(at, mask)| {
            let mut left = self.words[at] & mask;
            std::iter::from_fn(move || {
                let bit = u64::from(left.trailing_zeros());
                left &= left.wrapping_sub(1);
                (bit < BITS).then_some(at as u64 * BITS + bit)
            })
        })
    }

    /// The set as ascending runs, each as long as possible.
    pub fn runs(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut from = 0;
        std::iter::from_fn(move || {
            let start = self.next(from, true)?;
            from = self.next(start, false).unwrap_or(self.pages);
            Some(start..from)
        })
    }

    /// The first page frame at or after `from` that is in the set, or that is not.
    pub fn next(&self, from: u64, in_set: bool) -> Option<u64> {
        let flip = if in_set { 0 } else { u64::MAX };
        let (at, bits) = words_of(from..self.pages, self.pages)
            .map(|(at, mask)| (at, (self.words[at] ^ flip) & mask))
            .find(|(_, bits)| *bits != 0)?;
        Some(at as u64 * BITS + u64::from(bits.trailing_zeros()))
    }

    fn for_each_word(&mut self, pfns: Range<u64>, change: impl Fn(&mut u64, u64)) {
        for (at, mask) in words_of(pfns, self.pages) {
            change(&mut self.words[at], mask);
        }
    }
}

/// The words that hold a range's bits, each with the mask of those bits.
fn words_of(pfns: Range<u64>, pages: u64) -> impl Iterator<Item = (usize, u64)> {
    let (start, end) = (pfns.start.min(pages), pfns.end.min(pages));
    let words = if start < end { start / BITS..end.div_ceil(BITS) } else { 0..0 };
    words.map(move |at| {
        let first = at * BITS;
        (at as usize, mask(start.saturating_sub(first)..(end - first).min(BITS)))
    })
}

/// A mask of these bits, of which there is at least one.
fn mask(bits: Range<u64>) -> u64 {
    (u64::MAX >> (BITS - (bits.end - bits.start))) << bits.start
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_from_outside_are_harmless() {
        let mut bitmap = Bitmap::new(70);
        bitmap.set(70);
        bitmap.clear(u64::MAX);
        bitmap.set_range(60..u64::MAX);
        bitmap.set_range(Range { start: 9, end: 3 });
        assert_eq!(bitmap.count(), 10);
        assert!(!bitmap.contains(70) && bitmap.contains(69));
        assert_eq!(Bitmap::new(0).count() + Bitmap::from_kdump(&[255], 0).count(), 0);
    }

    #[test]
    fn bytes_are_lowest_bit_first() {
        let bitmap = Bitmap::of(12, &[0..1, 9..11]);
        assert_eq!(bitmap.to_kdump(), [1, 6]);
        assert_eq!(Bitmap::from_kdump(&[1, 6], 12), bitmap);
        assert_eq!(Bitmap::from_kdump(&[1, 0xf6, 0xff], 12), bitmap);
        assert_eq!(Bitmap::from_kdump(&[1], 12), Bitmap::of(12, &[0..1, 5..5]));
    }

    proptest! {
        #[test]
        fn bitmap_behaves_as_a_set(pages in 1_u64..300, changes in prop::collection::vec((0_u64..320, 0_u64..320, any::<bool>()), 0..12)) {
            let mut bitmap = Bitmap::new(pages);
            let mut model = vec![false; pages as usize];
            for (one, other, set) in changes {
                let range = one.min(other)..one.max(other);
                if set { bitmap.set_range(range.clone()) } else { bitmap.clear_range(range.clone()) };
                for pfn in range.filter(|pfn| *pfn < pages) {
                    model[pfn as usize] = set;
                }
            }
            let expect: Vec<u64> = (0..pages).filter(|pfn| model[*pfn as usize]).collect();
            prop_assert_eq!(bitmap.iter().collect::<Vec<_>>(), expect.clone());
            prop_assert_eq!(bitmap.runs().flatten().collect::<Vec<_>>(), expect.clone());
            prop_assert_eq!(bitmap.count(), expect.len() as u64);
            prop_assert_eq!(bitmap.count_in(pages / 3..pages / 2), bitmap.iter_in(pages / 3..pages / 2).count() as u64);
            let single: Vec<u64> = (0..320).filter(|pfn| bitmap.contains(*pfn)).collect();
            prop_assert_eq!(single, expect);
            prop_assert_eq!(Bitmap::from_kdump(&bitmap.to_kdump(), pages), bitmap);
        }
    }
}
