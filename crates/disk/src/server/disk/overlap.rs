//! Requests in flight that touch the same blocks.
//!
//! If two are in flight at once and one of them changes a block, nobody here knows which bytes end up on the disk, or
//! which of them a read returns: a read may carry old data and complete after the write. Such requests are tainted:
//! they are carried out, but nothing is recorded from them.

use std::ops::Range;

/// Names a request while it is in flight.
pub type RequestId = usize;

struct Active {
    id: RequestId,
    blocks: Range<u64>,
    changes: bool,
    tainted: bool,
}

/// All requests in flight of one disk. A plain list: there are few, and most disks have none at most times.
#[derive(Default)]
pub struct Overlaps {
    active: Vec<Active>,
}

impl Overlaps {
    /// A request starts. Taints it and those it meets, where needed.
    pub fn begin(&mut self, id: RequestId, blocks: Range<u64>, changes: bool) {
        let mut tainted = false;
        for other in &mut self.active {
            if meets(&other.blocks, &blocks) && (other.changes || changes) {
                other.tainted = true;
                tainted = true;
            }
        }
        self.active.push(Active { id, blocks, changes, tainted });
    }

    /// Something else has changed these blocks: what is in flight there may carry the bytes of before.
    pub fn taint(&mut self, blocks: &Range<u64>) {
        for active in self.active.iter_mut().filter(|active| meets(&active.blocks, blocks)) {
            active.tainted = true;
        }
    }

    pub fn end(&mut self, id: RequestId) {
        if let Some(at) = self.active.iter().position(|active| active.id == id) {
            self.active.swap_remove(at);
        }
    }

    pub fn is_tainted(&self, id: RequestId) -> bool {
        self.active.iter().any(|active| active.id == id && active.tainted)
    }

    /// Whether any block is being changed right now.
    pub fn is_changing(&self) -> bool {
        self.active.iter().any(|active| active.changes)
    }

    /// Whether any of these blocks is being changed right now.
    pub fn changing(&self, blocks: &Range<u64>) -> bool {
        self.active.iter().any(|active| active.changes && meets(&active.blocks, blocks))
    }
}

fn meets(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (blocks, changes) of requests in flight together -> which are tainted.
    fn check(requests: &[(Range<u64>, bool)], expected: &[bool]) {
        let mut overlaps = Overlaps::default();
        for (id, (blocks, changes)) in requests.iter().enumerate() {
            overlaps.begin(id as RequestId, blocks.clone(), *changes);
        }
        let tainted: Vec<bool> = (0..requests.len()).map(|id| overlaps.is_tainted(id as RequestId)).collect();
        assert_eq!(tainted, expected);
    }

    #[test]
    fn both_sides_of_a_conflict_are_tainted() {
        check(&[(0..4, false), (3..5, true)], &[true, true]);
        check(&[(3..5, true), (0..4, false)], &[true, true]);
        check(&[(0..4, true), (0..4, true)], &[true, true]);
        check(&[(0..4, false), (0..4, false)], &[false, false]);
        check(&[(0..4, true), (4..8, true)], &[false, false]);
        check(&[(0..4, false), (8..9, true), (2..9, false)], &[false, true, true]);
    }

    #[test]
    fn change_from_elsewhere_taints_reads_too() {
        let mut overlaps = Overlaps::default();
        overlaps.begin(1, 0..4, false);
        overlaps.begin(2, 4..8, false);
        overlaps.begin(3, 7..9, true);
        overlaps.taint(&(8..100));
        assert_eq!([1, 2, 3].map(|id| overlaps.is_tainted(id)), [false, true, true], "2 met 3");
        overlaps.taint(&(3..4));
        assert!(overlaps.is_tainted(1));
    }

    #[test]
    fn taint_stays_after_its_cause_has_ended() {
        let mut overlaps = Overlaps::default();
        overlaps.begin(1, 0..1, false);
        overlaps.begin(2, 0..1, true);
        assert!(overlaps.changing(&(0..1)));
        overlaps.end(2);
        assert!(!overlaps.changing(&(0..1)));
        assert!(overlaps.is_tainted(1), "the read may still return the old data");
        overlaps.end(1);
        overlaps.begin(1, 0..1, false);
        assert!(!overlaps.is_tainted(1));
    }
}
