//! An operation that the engine has: for one request or a part of it, or for several requests side by side.

use std::ops::Range;
use std::time::Instant;

use super::overlap::RequestId;
use crate::buffer::Slot;
use crate::engine::{Operation, Submission};

pub struct Running {
    /// In the order of the disk. One, unless requests were merged.
    pub parts: Vec<Part>,
    pub operation: Operation,
    /// All of its bytes on the disk.
    pub place: Range<u64>,
    /// When the engine was given it.
    pub begun: Instant,
    /// It failed because there was no space, and is tried again.
    pub waited_for_space: bool,
}

/// A request's share of an operation.
#[derive(Clone, Copy)]
pub struct Part {
    pub job: RequestId,
    /// Where this part begins in the request's data, and how long it is.
    pub position: u64,
    pub bytes: u64,
    pub around: Around,
    /// Where in the slot the request's own bytes begin.
    pub start: u64,
}

/// Bytes of the image before and after those that the request asks for, read along so that blocks are whole.
#[derive(Clone, Copy, Default)]
pub struct Around {
    pub before: u64,
    pub after: u64,
}

impl Running {
    pub fn new(parts: Vec<Part>, operation: Operation, place: Range<u64>, begun: Instant) -> Self {
        Self { parts, operation, place, begun, waited_for_space: false }
    }

    /// The operation given to the engine. `place`: its index among those that run.
    pub fn submission(&self, place: usize) -> Submission {
        let offset = self.place.start;
        Submission { token: place as u64, operation: self.operation, offset, bytes: self.place.end - offset }
    }

    pub fn slot(&self) -> Option<Slot> {
        match self.operation {
            Operation::Read(slot) | Operation::Write(slot) => Some(slot),
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } => None,
        }
    }

    /// Whether what begins at `start` follows on it, or lies in it.
    pub fn is_read_before(&self, start: u64, gap_max: u64) -> bool {
        let Range { start: own, end } = self.place;
        matches!(self.operation, Operation::Read(_)) && own <= start && start <= end + gap_max
    }

    /// Whether it changes what is on the disk.
    pub fn changes_blocks(&self) -> bool {
        !matches!(self.operation, Operation::Read(_) | Operation::Flush)
    }

    /// Bytes of all requests.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

impl Part {
    pub fn without_data(job: RequestId) -> Self {
        Self { job, position: 0, bytes: 0, around: Around::default(), start: 0 }
    }

    /// Where in the slot the request's bytes are, and those around them.
    pub fn all_bytes(&self) -> Range<usize> {
        (self.start - self.around.before) as usize..(self.start + self.bytes + self.around.after) as usize
    }

    /// Where in the slot the request's own bytes are.
    pub fn own_bytes(&self) -> Range<usize> {
        self.start as usize..(self.start + self.bytes) as usize
    }
}

impl Around {
    pub fn with(self, bytes: u64) -> u64 {
        self.before + bytes + self.after
    }
}
