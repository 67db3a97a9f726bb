//! Requests that were taken off their queue and wait for memory to answer into. Nothing of them has begun: they are read
//! again from their first descriptor, and judged anew.

use std::time::{Duration, Instant};

use super::job::Origin;

/// How often memory is asked for again. Only while a request waits for it.
pub const ASK_EVERY: Duration = Duration::from_millis(2);

#[derive(Clone, Copy)]
pub struct Parked {
    pub origin: Origin,
    /// When it was taken off its queue.
    pub taken: Instant,
}

/// All that waits for memory at one disk.
#[derive(Default)]
pub struct Parking {
    requests: Vec<Parked>,
    /// A queue whose used ring has no memory yet.
    rings: bool,
}

impl Parking {
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn len(&self) -> usize {
        self.requests.len()
    }

    pub fn park(&mut self, request: Parked) {
        self.requests.push(request);
    }

    pub fn park_ring(&mut self) {
        self.rings = true;
    }

    /// Everything that waits; what still has to wait is parked again.
    pub fn leave(&mut self) -> Vec<Parked> {
        std::mem::take(&mut self.requests)
    }

    pub fn abandon(&mut self, connection: u32) {
        self.requests.retain(|request| request.origin.connection != connection);
    }

    /// When to ask again.
    pub fn wait(&mut self) -> Option<Duration> {
        let rings = std::mem::take(&mut self.rings);
        (rings || !self.requests.is_empty()).then_some(ASK_EVERY)
    }
}
