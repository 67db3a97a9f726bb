//! Flushes: decides which flushes of the guest are an operation on the image, and which need none.
//!
//! nothing has changed since the last one -> answered | nothing has changed since one that runs began -> ends with that |
//! else: an operation
//!
//! A flush is about the changes that had ended when it came; what is on its way may be durable afterwards or not.

use crate::engine::Operation;
use crate::server::disk::running::Running;

/// A disk's changes and flushes, as far as they decide whether a flush is needed.
#[derive(Default)]
pub struct Flushes {
    /// Changes that the image has ended, well or not.
    ended: u64,
    /// The number of them that a flush has made durable. `None`: unknown, or a flush has failed.
    durable: Option<u64>,
    /// The last flush that was begun, if it runs: its place among the operations, and how many changes had ended by then.
    running: Option<(usize, u64)>,
}

impl Flushes {
    /// Whether all changes that have ended are durable.
    pub fn is_clean(&self) -> bool {
        self.durable == Some(self.ended)
    }

    /// The flush that runs, if no change has ended since it began.
    pub fn newest(&self) -> Option<usize> {
        self.running.filter(|(_, covered)| *covered == self.ended).map(|(place, _)| place)
    }

    /// A flush was given to the engine.
    pub fn begun(&mut self, place: usize) {
        self.running = Some((place, self.ended));
    }

    /// The image has ended an operation.
    pub fn note(&mut self, place: usize, running: &Running, went_well: bool) {
        if running.changes_blocks() {
            self.ended += 1;
        } else if running.operation == Operation::Flush {
            let newest = self.running.take_if(|(newest, _)| *newest == place);
            match newest {
                // A kernel reports a failed write once: the next flush goes to the image, whatever is known.
                _ if !went_well => self.durable = None,
                Some((_, covered)) => self.durable = Some(covered),
                None => {}
            }
        }
    }
}
