//! Hold: the pages of a dead incarnation that its dump still needs, and that must not be released yet.
//!
//! all pages (the guest has just died) -> the pages that the dump keeps (`narrow`) -> those not yet written (`let_go`)
//! -> none -> over: the dump is complete or given up
//!
//! Between the last two steps the dump file gets its name. That needs no memory, but the incarnation's files must
//! exist: a new keeper continues a dump only if it finds its incarnation.
//!
//! A page of dead RAM has two claimants: the ledger (it may be a clean disk block) and the hold. The ember punches a
//! page only when neither claims it. Two threads may give up the two claims at the same moment. So each thread first
//! gives up its own claim and then checks the other one: one of them sees that nobody claims the page.
//!
//! Page numbers are those of the RAM file, as in the ledger, and not page frames of the guest.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};

use crate::vmcore::Bitmap;

/// Pages that the dump of one incarnation still needs. Its dump and its ember share it.
#[derive(Debug)]
pub struct Hold {
    pages: Mutex<Bitmap>,
    over: AtomicBool,
}

impl Hold {
    /// Holds all pages, because nothing is known of them yet.
    pub fn everything(ram_pages: u64) -> Self {
        let everything = 0..ram_pages;
        Self { pages: Mutex::new(Bitmap::of(ram_pages, &[everything])), over: AtomicBool::new(false) }
    }

    /// Lets go of all pages except `kept`. Never holds more than before.
    pub fn narrow(&self, kept: &Bitmap) {
        let mut pages = self.pages();
        let gone: Vec<_> = complement(kept, pages.pages()).collect();
        gone.into_iter().for_each(|range| pages.clear_range(range));
    }

    /// Lets go of pages that are written or that nobody needs any more.
    pub fn let_go(&self, range: Range<u64>) {
        self.pages().clear_range(range);
    }

    /// Ends the hold: no dump needs anything any more.
    pub fn end(&self) {
        self.let_go(0..u64::MAX);
        self.over.store(true, Relaxed);
    }

    /// Whether the dump is complete or given up.
    pub fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    /// Whether this page is held.
    pub fn holds(&self, page: u64) -> bool {
        self.pages().contains(page)
    }

    /// Runs of pages in `range` that are not held.
    pub(crate) fn free_in(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let pages = self.pages();
        let (mut free, end) = (Vec::new(), range.end.min(pages.pages()));
        let mut from = range.start;
        while let Some(start) = pages.next(from, false).filter(|start| *start < end) {
            from = pages.next(start, true).map_or(end, |next| next.min(end));
            free.push(start..from);
        }
        free
    }

    /// Number of held pages.
    pub fn count(&self) -> u64 {
        self.pages().count()
    }

    /// Whether no page is held.
    pub fn is_empty(&self) -> bool {
        self.pages().next(0, true).is_none()
    }

    fn pages(&self) -> MutexGuard<'_, Bitmap> {
        self.pages.lock().expect("holders of this lock do not panic")
    }
}

/// Runs below `end` that are not in the set.
fn complement(set: &Bitmap, end: u64) -> impl Iterator<Item = Range<u64>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        // Numbers past the end of the set are not in it.
        let start = (from < end).then(|| set.next(from, false).unwrap_or(set.pages().max(from)))?;
        from = set.next(start, true).unwrap_or(end);
        (start < end).then_some(start..from.min(end))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hold_only_ever_shrinks() {
        let hold = Hold::everything(100);
        assert_eq!(hold.count(), 100);
        hold.narrow(&Bitmap::of(100, &[10..20, 50..60]));
        assert_eq!((hold.count(), hold.holds(10), hold.holds(20)), (20, true, false));
        hold.narrow(&Bitmap::of(100, &[0..50, 50..100]));
        assert_eq!(hold.count(), 20);
        hold.let_go(0..15);
        assert_eq!(hold.free_in(12..70), [12..15, 20..50, 60..70]);
        assert_eq!(hold.free_in(90..400), [Range { start: 90, end: 100 }]);
        assert_eq!(hold.free_in(50..60), []);
        hold.end();
        assert!(hold.is_empty() && hold.is_over());
        assert_eq!(hold.free_in(0..100), [Range { start: 0, end: 100 }]);
    }

    #[test]
    fn pages_past_a_short_set_are_released() {
        let hold = Hold::everything(100);
        hold.narrow(&Bitmap::of(30, &[10..20, 20..30]));
        assert_eq!((hold.count(), hold.holds(29), hold.holds(30)), (20, true, false));
    }
}
