//! Order: operations go to the kernel in the order they came, as many at once as the engine's depth allows.
//! One that needs the bounce buffer waits until nothing else runs, and nothing starts beside it; that is rare (a guest
//! that writes 512 bytes to a disk with 4096-byte blocks), so a full stop is cheaper than tracking ranges.

use std::collections::VecDeque;

use super::Submission;
use super::transfer::Job;

pub(super) struct Order {
    waiting: VecDeque<Job>,
    running: usize,
    running_alone: bool,
    depth: usize,
    alignment: u64,
}

impl Order {
    pub(super) fn new(depth: usize, alignment: u64) -> Self {
        let waiting = VecDeque::with_capacity(depth.min(256));
        Self { waiting, running: 0, running_alone: false, depth, alignment }
    }

    pub(super) fn push(&mut self, submission: Submission) {
        self.waiting.push_back(Job { submission, zeroes_by_writing: false });
    }

    /// The next job that may start now.
    pub(super) fn next(&mut self) -> Option<Job> {
        if self.running_alone || self.running == self.depth {
            return None;
        }
        let alone = self.waiting.front()?.is_unaligned(self.alignment);
        if alone && self.running > 0 {
            return None;
        }
        self.running += 1;
        self.running_alone = alone;
        self.waiting.pop_front()
    }

    /// A job that `next` gave out has ended.
    pub(super) fn ended(&mut self) {
        self.running -= 1;
        self.running_alone = false;
    }

    /// A job that `next` gave out must start over, before all others.
    pub(super) fn again(&mut self, job: Job) {
        self.ended();
        self.waiting.push_front(job);
    }

    /// Forgets what has not started.
    pub(super) fn drop_waiting(&mut self) {
        self.waiting.clear();
    }

    /// Operations that wait or run.
    pub(super) fn taken(&self) -> usize {
        self.waiting.len() + self.running
    }

    pub(super) fn running(&self) -> usize {
        self.running
    }
}
