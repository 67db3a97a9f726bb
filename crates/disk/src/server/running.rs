//! An operation that the engine has.

use std::ops::Range;
use std::time::Instant;

use super::overlap::RequestId;
use crate::buffer::Slot;

pub struct Running {
    pub job: RequestId,
    pub slot: Option<Slot>,
    /// Of the request's data: where this part of it begins, and how long it is.
    pub position: u64,
    pub bytes: u64,
    pub around: Around,
    pub begun: Instant,
}

/// Bytes of the image before and after those that the request asks for, read along so that blocks are whole.
#[derive(Clone, Copy, Default)]
pub struct Around {
    pub before: u64,
    pub after: u64,
}

impl Running {
    pub fn without_data(job: RequestId) -> Self {
        Self { job, slot: None, position: 0, bytes: 0, around: Around::default(), begun: Instant::now() }
    }

    /// How much of the slot the operation fills.
    pub fn all_bytes(&self) -> usize {
        self.around.with(self.bytes) as usize
    }

    /// Where in the slot the request's own bytes are.
    pub fn own_bytes(&self) -> Range<usize> {
        let start = self.around.before as usize;
        start..start + self.bytes as usize
    }
}

impl Around {
    pub fn with(self, bytes: u64) -> u64 {
        self.before + bytes + self.after
    }
}
