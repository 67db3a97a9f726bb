//! Waiting: a value under a lock that threads change, and the time limits of tests.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Time limit for something that takes `seconds` on a quiet machine with emulated processors.
///
/// A limit exists only for hangs, so it is generous: the same guest boots ten times slower when every processor is busy.
/// `HEARTH_PATIENCE` multiplies it, for even slower machines.
pub fn patience(seconds: u64) -> Duration {
    let factor = std::env::var("HEARTH_PATIENCE").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    Duration::from_secs(seconds * 12 * factor)
}

/// A value that threads change and tests wait on.
#[derive(Default)]
pub struct Watched<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Watched<T> {
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// Locks the value, even after a panic: a panic of one test thread must not hide its cause behind poisoned locks in others.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `look` returns a value; returns `None` after `limit`.
    pub fn wait<R>(&self, limit: Duration, mut look: impl FnMut(&mut T) -> Option<R>) -> Option<R> {
        let deadline = Instant::now() + limit;
        let mut value = self.lock();
        loop {
            if let Some(found) = look(&mut value) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            value = self.changed.wait_timeout(value, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
