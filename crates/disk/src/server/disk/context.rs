//! Context: what every part of a disk may use, and none owns.

use std::sync::Arc;
use std::time::Instant;

use crate::clock::Clock;
use crate::server::counters::Counters;
use crate::server::{Notice, Tell};

/// A disk's name, clock and counters, and its line to the keeper.
pub struct Context {
    pub name: String,
    pub clock: Clock,
    pub counters: Arc<Counters>,
    pub keeper: Option<Tell>,
}

impl Context {
    pub fn now(&self) -> Instant {
        self.clock.now()
    }

    /// Sends the keeper a notice.
    pub fn tell(&self, notice: Notice) {
        if let Some(tell) = &self.keeper {
            tell(notice);
        }
    }
}
