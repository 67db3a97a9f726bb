//! Schedule: which request goes to the image next, how many go as one, and what has to wait.
//!
//! wait in the order of arrival -> a small read waits for neighbours (`hold_back`) -> merged with those beside it (`merge`) ->
//! within the limits (`admission`)
//!
//! It decides, and hands nothing over: that is `dispatch`.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::overlap::RequestId;
use crate::limit::Limits;
use admission::Admission;
use hold_back::{HeldBack, HoldBack};
use view::View;

pub mod admission;
pub mod hold_back;
pub mod merge;
pub mod view;

/// Why a request cannot go on now.
#[derive(Clone, Copy)]
pub enum Stall {
    /// Until an operation ends.
    Busy,
    /// Until the limiter allows it.
    Limited(Duration),
}

pub struct Schedule {
    /// Requests that wait for the image, in the order in which they go on.
    pub waiting: VecDeque<RequestId>,
    pub admission: Admission,
    pub hold_back: HoldBack,
}

impl Schedule {
    pub fn new(limits: Limits, hold_back: Duration, now: Instant) -> Self {
        Self { waiting: VecDeque::new(), admission: Admission::new(limits, now), hold_back: HoldBack::new(hold_back) }
    }

    /// Requests that are held back for neighbours now.
    pub fn held_back(&self, view: View<'_>, now: Instant) -> HeldBack {
        self.hold_back.held_back(view, &self.waiting, now)
    }

    /// Takes a request out of those that wait.
    pub fn withdraw(&mut self, id: RequestId) {
        self.waiting.retain(|&waiting| waiting != id);
    }
}
