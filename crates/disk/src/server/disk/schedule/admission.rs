//! Admission: the disk's limits, and the credit on which a queue that is being stopped passes them.

use std::time::{Duration, Instant};

use crate::limit::{Limits, RateLimiter};
use crate::server::connection::Stop;
use crate::server::counters::add;
use crate::server::disk::context::Context;

pub struct Admission {
    limiter: RateLimiter,
    /// The stop whose requests passed on credit that is not paid yet.
    lent_to: Option<Stop>,
    throttled_since: Option<Instant>,
}

impl Admission {
    pub fn new(limits: Limits, now: Instant) -> Self {
        Self { limiter: RateLimiter::new(limits, now), lent_to: None, throttled_since: None }
    }

    /// Admits an operation of so many bytes now, or returns how long to wait before asking again.
    ///
    /// `stop`: the one that waits for the operation, and QEMU as a whole with it. So all that waits in its queues passes at
    /// once, on credit, and what comes later pays for that. There is no second credit before the first is paid: a guest that
    /// stops its queues again and again gets no more than the limit, and waits for it with all of its QEMU.
    pub fn admit(&mut self, context: &Context, bytes: u64, stop: Option<Stop>) -> Result<(), Duration> {
        let now = context.now();
        match self.limiter.admit(now, bytes) {
            Ok(()) => self.lent_to = None,
            Err(_) if stop.is_some() && self.lent_to.is_none_or(|lent_to| Some(lent_to) == stop) => {
                self.lent_to = stop;
                self.limiter.charge(now, bytes);
            }
            Err(wait) => {
                self.throttled_since.get_or_insert(now);
                return Err(wait);
            }
        }
        if let Some(since) = self.throttled_since.take() {
            add(&context.counters.throttled_us, now.duration_since(since).as_micros() as u64);
        }
        Ok(())
    }

    /// Nobody waits for the limits any more: the connection is gone.
    pub fn abandon(&mut self) {
        self.throttled_since = None;
    }
}
