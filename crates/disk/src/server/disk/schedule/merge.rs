//! Merging: requests that wait for the image at the same time and lie side by side on it are one operation there.
//!
//! Guests ask for neighbours one by one: a kernel that reads ahead in a journal of 1 KiB blocks sends a request for each, 128
//! in a row. A disk with a limit on operations counts them: the mount of 400 such volumes took twice as long on one with 200 a
//! second as with QEMU's own disk, which merges them too.
//!
//! Reads are merged over a short gap as well, and where they are widened to whole blocks, also those of one block; writes only
//! where nothing lies between them, or what memory holds (`gaps`), and none of those that wait overlaps another. What fails
//! together is carried out one by one.

use std::collections::VecDeque;
use std::ops::Range;

use super::gaps::{blocks_of, may_fill, meets_filled};
use super::view::View;
use crate::server::disk::blocks::GAP_BYTES;
use crate::server::disk::job::{BLOCK, Job};
use crate::server::disk::overlap::RequestId;
use crate::server::disk::running::Part;
use crate::server::request::Kind;

/// The number of waiting requests that are looked at: a queue of QEMU's default length, half full.
pub const LOOKED_AT_MAX: usize = 128;

/// What an operation would carry out for one request.
pub struct Share {
    pub part: Part,
    /// On the disk, with what is read around it.
    pub bytes: Range<u64>,
}

/// Finds the requests that wait and lie beside this one. Returns their shares and its own, in the order of the disk (none if it
/// is alone), and the gaps that keep others out because memory does not hold them.
pub fn neighbours(view: View<'_>, waiting: &VecDeque<RequestId>, id: RequestId) -> (Vec<Share>, Vec<Range<u64>>) {
    let nobody = || (Vec::new(), Vec::new());
    let Some(job) = view.jobs.get(id).filter(|_| waiting.len() > 1) else { return nobody() };
    let Some(own) = share(view, id, job) else { return nobody() };
    let (kind, connection) = (job.request.kind, job.origin.connection);
    let others = waiting.iter().take(LOOKED_AT_MAX).filter(|&&other| other != id);
    let shares = others.filter_map(|&other| {
        let job = view.jobs.get(other)?;
        let is_alike = job.request.kind == kind && job.origin.connection == connection;
        is_alike.then(|| share(view, other, job)).flatten()
    });
    let mut shares: Vec<Share> = shares.collect();
    if shares.is_empty() {
        return nobody();
    }
    shares.push(own);
    shares.sort_unstable_by_key(|share| share.bytes.start);
    // Which of two writes of the same bytes came last is seen on the disk: they go one by one, as they came.
    if kind == Kind::Write && shares.windows(2).any(|pair| pair[0].bytes.end > pair[1].bytes.start) {
        return nobody();
    }
    if kind == Kind::Write {
        shares.retain(|share| !meets_filled(view.operations, &share.bytes));
    }
    let at = shares.iter().position(|share| share.part.job == id).unwrap_or_default();
    let ranges: Vec<Range<u64>> = shares.iter().map(|share| share.bytes.clone()).collect();
    let mut missing = Vec::new();
    let go_over = |gap: Range<u64>, all: Range<u64>| match kind {
        Kind::Read => gap.end <= gap.start + GAP_BYTES,
        _ if gap.is_empty() => true,
        _ if !may_fill(view, &gap, all) => false,
        _ if view.blocks.recorder.holds_all(blocks_of(&gap)) => true,
        _ => {
            missing.push(gap);
            false
        }
    };
    let merged = stretch(&ranges, at, go_over, view.operations.pool.slot_bytes_max() as u64);
    shares.truncate(merged.end);
    shares.drain(..merged.start);
    (shares, missing)
}

/// All that is left of a request, if it has data, was looked at to its end and may be merged.
pub fn share(view: View<'_>, id: RequestId, job: &Job) -> Option<Share> {
    let is_last = !job.alone && !job.is_single() && job.next == job.work() && !job.run.is_empty();
    let bytes = job.run.end - job.run.start;
    if !is_last || bytes > view.operations.pool.slot_bytes_max() as u64 / 2 {
        return None;
    }
    let offset = job.request.offset + job.run.start;
    let wanted = job.request.kind == Kind::Read && view.blocks.recorder.wants(job.request.bytes);
    let around = view.operations.around(wanted, offset, bytes);
    let part = Part { job: id, position: job.run.start, bytes, around, start: 0 };
    Some(Share { part, bytes: offset - around.before..offset + bytes + around.after })
}

/// What lies between requests in the order of the disk.
pub fn gaps(shares: &[Share]) -> Vec<Range<u64>> {
    let between = shares.windows(2).map(|pair| pair[0].bytes.end..pair[1].bytes.start);
    between.filter(|gap| !gap.is_empty()).collect()
}

/// Of ranges sorted by their start, finds those around the one at `at` that can be one operation of at most `bytes_max`.
/// `go_over`: whether what lies between two of them (nothing, if they touch or overlap) may be part of an operation on all this.
fn stretch(
    ranges: &[Range<u64>],
    at: usize,
    mut go_over: impl FnMut(Range<u64>, Range<u64>) -> bool,
    bytes_max: u64,
) -> Range<usize> {
    let mut all = ranges[at].clone();
    let (mut from, mut to) = (at, at + 1);
    while let Some(next) = ranges.get(to) {
        let end = all.end.max(next.end);
        if end - all.start > bytes_max || !go_over(all.end..next.start, all.start..end) {
            break;
        }
        all.end = end;
        to += 1;
    }
    while let Some(before) = from.checked_sub(1).map(|at| &ranges[at]) {
        let end = all.end.max(before.end);
        if end - before.start > bytes_max || !go_over(before.end..all.start, before.start..end) {
            break;
        }
        all = before.start..end;
        from -= 1;
    }
    debug_assert!(all.end - all.start <= bytes_max.max(BLOCK), "an operation fits its slot");
    from..to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(ranges: &[Range<u64>], at: usize, is_read: bool, expected: Range<usize>) {
        let go_over = |gap: Range<u64>, _: Range<u64>| gap.end <= gap.start + if is_read { GAP_BYTES } else { 0 };
        assert_eq!(stretch(ranges, at, go_over, 64 << 10), expected);
    }

    #[test]
    fn neighbours_are_one_operation() {
        let ranges = [0..1024, 1024..2048, 2048..4096, 8192..9216];
        (0..3).for_each(|at| check(&ranges, at, false, 0..3));
        check(&ranges, 3, false, 3..4);
        (0..4).for_each(|at| check(&ranges, at, true, 0..4));
    }

    #[test]
    fn reads_may_overlap() {
        let ranges = [0..4096, 0..4096, 2048..3072, 4096..8192];
        check(&ranges, 0, true, 0..4);
        check(&ranges, 3, true, 0..4);
    }

    #[test]
    fn a_long_gap_ends_an_operation_and_so_does_its_length() {
        let kib = |from: u64, to: u64| from << 10..to << 10;
        check(&[kib(0, 4), kib(36, 40), kib(73, 76)], 0, true, 0..2);
        check(&[kib(0, 4), kib(36, 40), kib(73, 76)], 2, true, 2..3);
        let long = [kib(0, 32), kib(32, 64), kib(64, 96)];
        check(&long, 0, false, 0..2);
        check(&long, 1, false, 1..3);
        check(&long, 2, true, 1..3);
    }
}
