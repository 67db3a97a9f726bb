//! The pages of a RAM file that disks have written to. QEMU's page tables do not show them, because the disks have mappings of
//! their own; a copy of a running guest's memory needs them.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::BLOCK_BYTES;

const PAGE_BYTES: u64 = BLOCK_BYTES as u64;
const BITS: u64 = u64::BITS as u64;

/// Pages of one RAM file. Disk threads mark them; one other thread takes them.
#[derive(Debug)]
pub struct WriteLog {
    ram_device: u64,
    ram_inode: u64,
    words: Vec<AtomicU64>,
}

impl WriteLog {
    /// A log of the RAM file with this device and inode number, which has `pages` pages.
    pub fn new((ram_device, ram_inode): (u64, u64), pages: u64) -> Self {
        Self { ram_device, ram_inode, words: (0..pages.div_ceil(BITS)).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(crate) fn is_of(&self, device: u64, inode: u64) -> bool {
        (self.ram_device, self.ram_inode) == (device, inode)
    }

    /// After the bytes are there: whoever takes the mark before them would copy what was there before.
    pub(crate) fn mark(&self, file: Range<u64>) {
        for page in file.start / PAGE_BYTES..file.end.div_ceil(PAGE_BYTES) {
            if let Some(word) = self.words.get((page / BITS) as usize) {
                word.fetch_or(1 << (page % BITS), Ordering::Release);
            }
        }
    }

    /// Calls `found` with each page that was marked since the last call, in ascending order.
    pub fn take(&self, mut found: impl FnMut(u64)) {
        for (word, first) in self.words.iter().zip((0..).step_by(BITS as usize)) {
            let mut bits = word.swap(0, Ordering::Acquire);
            while bits != 0 {
                found(first + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_touched_page_is_reported_once() {
        let log = WriteLog::new((1, 2), 200);
        let taken = || {
            let mut pages = Vec::new();
            log.take(|page| pages.push(page));
            pages
        };
        log.mark(4095..4097);
        log.mark(64 * PAGE_BYTES..65 * PAGE_BYTES);
        log.mark(199 * PAGE_BYTES..199 * PAGE_BYTES + 1);
        log.mark(5000 * PAGE_BYTES..5001 * PAGE_BYTES);
        log.mark(7..7);
        assert_eq!(taken(), [0, 1, 64, 199]);
        assert!(taken().is_empty());
        assert!(log.is_of(1, 2) && !log.is_of(2, 1));
    }
}
