//! Working set: the pages that the guest used before it was saved, and those that restored guests used first, over
//! several traces.
//!
//! Each trace gives the pages that it saw the age 0, and makes all others one trace older; a page that stays unseen too
//! long leaves. So the set follows what the machine is used for, and does not grow for ever. Pages that a scan saw have
//! age 0 at the save. A trace that sees such a page too takes it over, because a trace knows the order of use.

use std::collections::HashSet;
use std::path::Path;

use hearth_store::Urgency;

use super::SnapshotError;
use super::pages::{Compression, PageReader, PageWriter, Sealed};

/// A page leaves after this many traces in a row that did not see it. A page read ahead in vain costs 4 KiB of a
/// sequential read. A page that is missed costs a read of a whole chunk, 64 KiB, while the guest waits. So a page that
/// every eighth run uses is worth it.
pub const AGE_END: u32 = 8;

/// How the use of a page was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A restored guest used it.
    Trace,
    /// The guest used it before the save.
    Scan,
}

/// A page of the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgedPage {
    /// Number of the page.
    pub page: u32,
    /// Number of traces since it was seen to be used: 0 for the last one.
    pub age: u32,
    /// How its use was found.
    pub source: Source,
}

/// All pages of a working set, youngest first.
pub fn aged_pages(set: &PageReader) -> impl Iterator<Item = AgedPage> {
    (0..set.chunks()).flat_map(|chunk| {
        let (age, source) = set.mark_of(chunk);
        set.pages_of(chunk).iter().map(move |&page| AgedPage { page, age, source })
    })
}

/// Writes a set with the contents of its pages, compressed: a restored guest waits for all of it, and unpacking takes
/// less time than reading. Pages that the snapshot does not have are zeroes, and are left out. Pages that it has and
/// that became zeroes during the save are kept, because a guest waits for them as for any other.
pub(super) fn write(
    path: &Path,
    set: impl IntoIterator<Item = AgedPage>,
    ram: &PageReader,
) -> Result<Sealed, SnapshotError> {
    let mut writer = PageWriter::create_for(path, ram, Compression::Zstd)?;
    let mut reading = ram.reading_for(Urgency::Memory);
    for AgedPage { page, age, source } in set {
        if let Some(bytes) = ram.page(page, &mut reading)? {
            writer.set_mark(age, source)?;
            writer.add_any(page, bytes)?;
        }
    }
    writer.finish()
}

/// The set after one more trace: youngest first, the pages of one age in order of use. No page is twice in `used` or in
/// `before`.
pub(super) fn merge(used: &[u32], before: impl IntoIterator<Item = AgedPage>) -> Vec<AgedPage> {
    let seen: HashSet<u32> = used.iter().copied().collect();
    let mut merged: Vec<_> = used.iter().map(|&page| AgedPage { page, age: 0, source: Source::Trace }).collect();
    let unseen = before.into_iter().filter(|old| !seen.contains(&old.page));
    merged.extend(unseen.map(|old| AgedPage { age: old.age.saturating_add(1), ..old }).filter(|old| old.age < AGE_END));
    merged
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(traces: &[&[u32]], expect: &[(u32, u32)]) {
        let set = traces.iter().fold(Vec::new(), |set, used| merge(used, set));
        let set: Vec<_> = set.iter().map(|aged| (aged.page, aged.age)).collect();
        assert_eq!(set, expect, "{traces:?}");
    }

    #[test]
    fn last_trace_comes_first_each_in_order() {
        check(&[&[5, 3, 9]], &[(5, 0), (3, 0), (9, 0)]);
        check(&[&[5, 3, 9], &[9, 1]], &[(9, 0), (1, 0), (5, 1), (3, 1)]);
        check(&[&[5, 3, 9], &[9, 1], &[3]], &[(3, 0), (9, 1), (1, 1), (5, 2)]);
        check(&[&[5, 3], &[]], &[(5, 1), (3, 1)]);
    }

    #[test]
    fn long_unseen_page_leaves_and_returns_young() {
        let mut traces: Vec<&[u32]> = vec![&[7, 1]];
        traces.resize(AGE_END as usize, &[7]);
        check(&traces, &[(7, 0), (1, AGE_END - 1)]);
        traces.push(&[7]);
        check(&traces, &[(7, 0)]);
        traces.push(&[1]);
        check(&traces, &[(1, 0), (7, 1)]);
    }

    #[test]
    fn page_that_became_zero_stays_in_the_set() {
        let home = tempfile::tempdir().unwrap();
        let [ram, set] = ["ram", "working-set"].map(|name| home.path().join(name));
        let mut writer = PageWriter::create_changeable(&ram, 64).unwrap();
        for (page, byte) in [(7, 7), (8, 8), (7, 0)] {
            writer.put(page, &[byte; 4096]).unwrap();
        }
        writer.finish().unwrap();
        let used = [8, 9, 7].map(|page| AgedPage { page, age: 0, source: Source::Trace });
        write(&set, used, &PageReader::open(&ram).unwrap()).unwrap();
        let set = PageReader::open(&set).unwrap();
        assert_eq!(set.pages(), [8, 7]);
        assert_eq!(set.page(7, &mut set.reading()).unwrap(), Some(&[0; 4096]));
    }

    proptest! {
        /// After any number of traces, the set holds what the last ones saw, each page once, and nothing else.
        #[test]
        fn the_set_is_what_the_last_traces_saw(
            traces in proptest::collection::vec(proptest::collection::hash_set(0..40_u32, 0..12), 0..20)
        ) {
            let set = traces.iter().fold(Vec::new(), |set, used| {
                merge(&used.iter().copied().collect::<Vec<_>>(), set)
            });
            for page in 0..40 {
                let age = traces.iter().rev().take(AGE_END as usize).position(|used| used.contains(&page));
                let found: Vec<_> = set.iter().filter(|aged| aged.page == page).map(|aged| aged.age as usize).collect();
                prop_assert_eq!(found, Vec::from_iter(age));
            }
            prop_assert!(set.is_sorted_by_key(|aged| aged.age));
        }
    }
}
