//! Flushing: which flushes of the guest are an operation on the image, and which need none.
//!
//! nothing has changed since the last one -> answered | nothing has changed since one that runs began -> ends with that |
//! else: an operation
//!
//! A flush is about the changes that had ended when it came; what is on its way may be durable afterwards or not.

use super::Disk;
use crate::engine::Operation;
use crate::server::counters::add;
use crate::server::overlap::RequestId;
use crate::server::running::{Part, Running};

/// What is known of a disk's changes and flushes.
#[derive(Default)]
pub(super) struct Flushes {
    /// Changes that the image has ended, well or not.
    ended: u64,
    /// So many of them a flush has made durable. None: it is not known of any, or a flush has failed.
    durable: Option<u64>,
    /// The last flush that was begun, if it runs: its place among the operations, and how many changes had ended by then.
    running: Option<(usize, u64)>,
}

impl Disk {
    /// All changes that have ended are durable when this request is answered. What needs an operation is pending then.
    pub(super) fn flush(&mut self, id: RequestId) {
        let covered = self.flushes.ended;
        if self.flushes.durable == Some(covered) {
            return add(&self.counters.flushes_spared, 1);
        }
        let newest = self.flushes.running.filter(|(_, newest)| *newest == covered);
        if let Some(running) = newest.and_then(|(place, _)| self.running.get_mut(place))
            && let Some(job) = self.jobs.get_mut(id)
        {
            job.pending += 1;
            running.parts.push(Part::without_data(id));
            return add(&self.counters.flushes_spared, 1);
        }
        let place = self.push(vec![Part::without_data(id)], Operation::Flush, Vec::new(), 0..0);
        self.flushes.running = Some((place, covered));
    }

    /// The image has ended an operation.
    pub(super) fn note_for_flushes(&mut self, place: usize, running: &Running, went_well: bool) {
        let flushes = &mut self.flushes;
        if running.changes_blocks() {
            flushes.ended += 1;
        } else if running.operation == Operation::Flush {
            let newest = flushes.running.take_if(|(newest, _)| *newest == place);
            match newest {
                // A kernel tells of a failed write once: the next flush goes to the image, whatever is known.
                _ if !went_well => flushes.durable = None,
                Some((_, covered)) => flushes.durable = Some(covered),
                None => {}
            }
        }
    }
}
