//! Outgoing: a file that is sent to an object store in parts while it is written. The writer reports what is present
//! and what has changed; the sender asks which part is due.
//!
//! written -> sent, in order -> changed meanwhile, perhaps -> the file is finished -> sent again, if it has changed
//!
//! A part that was sent is not sent again before the file is finished, because it may change any number of times.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use hearth_memory::PAGE_BYTES;
use hearth_store::part_bytes;

/// Bytes beside each page in a file of pages: its number, its share of an index entry, and some to spare.
const BESIDE_PAGE_BYTES: u64 = 16;

/// Tracks which parts of the file are due.
#[derive(Debug)]
pub struct Outgoing {
    part_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Bytes that are present so far.
    bytes: u64,
    finished: bool,
    /// Parts below this one have been taken.
    next: u64,
    /// Taken parts that have changed since.
    changed: BTreeSet<u64>,
}

/// A part of the file that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    /// Number of the part, from 0.
    pub number: usize,
    /// Its place in the file, in bytes.
    pub bytes: Range<u64>,
}

impl Outgoing {
    /// A file of pages of a machine with `ram_pages` pages of RAM.
    pub fn of_pages(ram_pages: u64) -> Self {
        Self { part_bytes: part_bytes(ram_pages * (PAGE_BYTES + BESIDE_PAGE_BYTES)), state: Mutex::default() }
    }

    /// Reports that everything below offset `bytes` is in the file.
    pub(super) fn wrote(&self, bytes: u64) {
        self.lock().bytes = bytes;
    }

    /// Reports a replacement at `offset`. This comes after it, so that nobody takes a half of it for the final
    /// contents.
    pub(super) fn changed(&self, offset: u64) {
        let part = offset / self.part_bytes;
        let mut state = self.lock();
        if part < state.next {
            state.changed.insert(part);
        }
    }

    /// Reports that the file has `bytes` bytes and does not change any more.
    pub(super) fn finish(&self, bytes: u64) {
        let mut state = self.lock();
        (state.bytes, state.finished) = (bytes, true);
    }

    /// Takes the next part that is due. Its bytes must be read after that.
    pub(crate) fn take_due(&self) -> Option<Due> {
        let mut state = self.lock();
        let next = self.bytes_of(state.next, state.bytes);
        let number = if next.end - next.start == self.part_bytes || (state.finished && !next.is_empty()) {
            state.next += 1;
            state.next - 1
        } else if state.finished {
            state.changed.pop_first()?
        } else {
            return None;
        };
        Some(Due { number: number as usize, bytes: self.bytes_of(number, state.bytes) })
    }

    /// Bytes of all parts that are due, or will be.
    pub fn bytes_left(&self) -> u64 {
        let state = self.lock();
        state.bytes.saturating_sub(state.next * self.part_bytes) + state.changed.len() as u64 * self.part_bytes
    }

    fn bytes_of(&self, part: u64, bytes: u64) -> Range<u64> {
        let start = (part * self.part_bytes).min(bytes);
        start..(start + self.part_bytes).min(bytes)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(outgoing: &Outgoing) -> Vec<(usize, u64)> {
        std::iter::from_fn(|| outgoing.take_due()).map(|due| (due.number, due.bytes.end - due.bytes.start)).collect()
    }

    #[test]
    fn parts_are_due_when_whole_again_if_changed() {
        let outgoing = Outgoing::of_pages(10);
        let part = outgoing.part_bytes;
        outgoing.wrote(part - 1);
        assert!(taken(&outgoing).is_empty());
        outgoing.wrote(2 * part + 5);
        // Nobody has taken this part yet.
        outgoing.changed(part + 3);
        assert_eq!(taken(&outgoing), [(0, part), (1, part)]);
        for offset in [part - 1, 7, 2 * part + 1] {
            outgoing.changed(offset);
        }
        assert!(taken(&outgoing).is_empty(), "it may change again");
        outgoing.wrote(3 * part);
        assert_eq!(taken(&outgoing), [(2, part)]);
        outgoing.changed(2 * part);
        outgoing.finish(3 * part + 9);
        assert_eq!(outgoing.bytes_left(), 2 * part + 9);
        assert_eq!(taken(&outgoing), [(3, 9), (0, part), (2, part)]);
        assert!(taken(&outgoing).is_empty() && outgoing.bytes_left() == 0);
    }

    #[test]
    fn no_empty_part_follows_a_full_one() {
        for parts in 0..3 {
            let outgoing = Outgoing::of_pages(10);
            outgoing.finish(parts * outgoing.part_bytes);
            assert_eq!(taken(&outgoing).len() as u64, parts);
        }
    }
}
