//! Outgoing: a file that goes to an object store in parts while it is written. Who writes says what is there, and what of it has
//! changed; who sends is told which part is due.
//!
//! written -> sent, in order -> changed meanwhile, perhaps -> the file is finished -> sent again, if it has changed
//!
//! What has been sent is not sent again before the file is finished: it may change any number of times.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard};

use hearth_memory::PAGE_BYTES;
use hearth_store::part_bytes;

/// In a file of pages, beside the page itself: its number, its share of an entry of the index, and then some.
const BESIDE_PAGE_BYTES: u64 = 16;

#[derive(Debug)]
pub struct Outgoing {
    part_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// There so far.
    bytes: u64,
    finished: bool,
    /// Parts below this one have been taken.
    next: u64,
    /// Of these, what the file holds now is not what it held then.
    changed: BTreeSet<u64>,
}

/// A part that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    pub number: usize,
    pub bytes: Range<u64>,
}

impl Outgoing {
    /// A file of pages of a machine with so many.
    pub fn of_pages(ram_pages: u64) -> Self {
        Self { part_bytes: part_bytes(ram_pages * (PAGE_BYTES + BESIDE_PAGE_BYTES)), state: Mutex::default() }
    }

    /// All that comes before this is in the file.
    pub(super) fn wrote(&self, bytes: u64) {
        self.lock().bytes = bytes;
    }

    /// What was there has been replaced: told afterwards, so that nobody takes what is half of it for the last word.
    pub(super) fn changed(&self, offset: u64) {
        let part = offset / self.part_bytes;
        let mut state = self.lock();
        if part < state.next {
            state.changed.insert(part);
        }
    }

    /// It has so many bytes, and nobody changes them any more.
    pub(super) fn finish(&self, bytes: u64) {
        let mut state = self.lock();
        (state.bytes, state.finished) = (bytes, true);
    }

    /// To be read after that.
    pub fn take_due(&self) -> Option<Due> {
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

    /// Of all parts that are due, or will be.
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
    fn parts_are_due_once_they_are_whole_and_again_at_the_end_if_they_have_changed() {
        let outgoing = Outgoing::of_pages(10);
        let part = outgoing.part_bytes;
        outgoing.wrote(part - 1);
        assert!(taken(&outgoing).is_empty());
        outgoing.wrote(2 * part + 5);
        // Nobody has taken it yet.
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
    fn a_file_that_ends_with_a_part_has_no_empty_one() {
        for parts in 0..3 {
            let outgoing = Outgoing::of_pages(10);
            outgoing.finish(parts * outgoing.part_bytes);
            assert_eq!(taken(&outgoing).len() as u64, parts);
        }
    }
}
