//! Progress: a dump's status for whoever asks, and the orders to it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use hearth_api::{DumpState, DumpStatus, rfc3339};
use hearth_memory::PAGE_BYTES;
use hearth_recovery::crash_recovery::Claim;
use hearth_recovery::vmcore::dump::Written;

/// An order that the dump has not carried out yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Try again: what prevented the failed step may be gone.
    Resume,
    /// Give the dump up: the file stays incomplete, its memory is released.
    GiveUp,
}

/// Shared by the dump's threads and the machine.
pub struct Progress {
    state: Mutex<Tracked>,
    /// Notified when there is an order or a new state.
    changed: Condvar,
    /// The memory that is not released yet.
    claim: Option<Claim>,
    /// Counter of the machine, for all of its dumps.
    buffer_bytes: Arc<AtomicU64>,
}

struct Tracked {
    status: DumpStatus,
    order: Option<Order>,
    began: Instant,
    /// What this keeper wrote: what another keeper wrote must not count in the rate.
    writing: Option<Writing>,
    ended: Option<Instant>,
}

struct Writing {
    began: Instant,
    pages_before: u64,
    /// Zero pages among those written since `began`. They cost nothing, so a rate that counts them would promise too
    /// much.
    zero: u64,
}

impl Progress {
    pub fn new(status: DumpStatus, claim: Option<Claim>, buffer_bytes: Arc<AtomicU64>) -> Self {
        let tracked = Tracked { status, order: None, began: Instant::now(), writing: None, ended: None };
        Self { state: Mutex::new(tracked), changed: Condvar::new(), claim, buffer_bytes }
    }

    /// The status at this moment.
    pub fn status(&self) -> DumpStatus {
        let tracked = self.tracked();
        let mut status = tracked.status.clone();
        let until = tracked.ended.unwrap_or_else(Instant::now);
        status.duration_s = until.saturating_duration_since(tracked.began).as_secs_f64();
        status.held_bytes = self.claim.as_ref().map_or(0, Claim::held_bytes);
        status.percent = percent(status.state, status.pages_written, status.pages);
        if let Some(writing) = &tracked.writing {
            let seconds = until.saturating_duration_since(writing.began).as_secs_f64();
            let rate = |pages: u64| if seconds > 0.0 { pages as f64 / seconds } else { 0.0 };
            let pages = status.pages_written.saturating_sub(writing.pages_before);
            status.mib_per_s = rate(pages.saturating_sub(writing.zero)) * PAGE_BYTES as f64 / f64::from(1 << 20);
            let left = status.pages.saturating_sub(status.pages_written) as f64;
            let pages_per_s = rate(pages);
            status.eta_s = (!status.state.is_over() && pages_per_s > 0.0).then(|| left / pages_per_s);
        }
        status
    }

    pub fn update(&self, change: impl FnOnce(&mut DumpStatus)) {
        change(&mut self.tracked().status);
    }

    /// Notes that an earlier keeper began the dump this long ago.
    pub fn began_before(&self, ago: Duration) {
        let mut tracked = self.tracked();
        // Nothing was dumped before the host's start.
        if let Some(began) = Instant::now().checked_sub(ago).filter(|began| *began < tracked.began) {
            tracked.began = began;
            tracked.status.started_at = rfc3339(SystemTime::now() - ago);
        }
    }

    pub fn wrote(&self, written: &Written) {
        let mut tracked = self.tracked();
        tracked.status.pages_written += written.page_count;
        tracked.status.written_bytes += written.bytes;
        if let Some(writing) = &mut tracked.writing {
            writing.zero += written.zero;
        }
    }

    pub fn enter(&self, state: DumpState, why: Option<String>) {
        let mut tracked = self.tracked();
        tracked.status.state = state;
        tracked.status.why = why;
        if state == DumpState::Writing && tracked.writing.is_none() {
            let pages_before = tracked.status.pages_written;
            tracked.writing = Some(Writing { began: Instant::now(), pages_before, zero: 0 });
        }
        if state.is_over() {
            tracked.ended = Some(Instant::now());
        }
        self.changed.notify_all();
    }

    pub fn tell(&self, order: Order) {
        let mut tracked = self.tracked();
        // A dump that was given up stays given up.
        if tracked.order != Some(Order::GiveUp) {
            tracked.order = Some(order);
        }
        self.changed.notify_all();
    }

    pub fn is_given_up(&self) -> bool {
        self.tracked().order == Some(Order::GiveUp)
    }

    /// Waits until there is an order, however long it takes.
    pub fn wait_order(&self) -> Order {
        let tracked = self.tracked();
        let mut tracked = self.changed.wait_while(tracked, |tracked| tracked.order.is_none()).expect(NO_PANIC);
        let order = tracked.order.expect("just waited for");
        if order == Order::Resume {
            tracked.order = None;
        }
        order
    }

    /// Waits until the dump has ended, or waits for the operator and is not given up.
    pub fn wait_still(&self) -> DumpState {
        let goes_on = |tracked: &mut Tracked| {
            let waits = tracked.status.state == DumpState::Waiting && tracked.order != Some(Order::GiveUp);
            !waits && !tracked.status.state.is_over()
        };
        let tracked = self.changed.wait_while(self.tracked(), goes_on).expect(NO_PANIC);
        tracked.status.state
    }

    /// Sleeps, but not longer than until the dump is given up.
    pub fn pause(&self, time: Duration) {
        let tracked = self.tracked();
        let given_up = |tracked: &mut Tracked| tracked.order != Some(Order::GiveUp);
        drop(self.changed.wait_timeout_while(tracked, time, given_up).expect(NO_PANIC));
    }

    pub fn buffers_grow(&self, bytes: u64) {
        self.buffer_bytes.fetch_add(bytes, Relaxed);
    }

    pub fn buffers_shrink(&self, bytes: u64) {
        self.buffer_bytes.fetch_sub(bytes, Relaxed);
    }

    fn tracked(&self) -> MutexGuard<'_, Tracked> {
        self.state.lock().expect(NO_PANIC)
    }
}

const NO_PANIC: &str = "holders of this lock do not panic";

fn percent(state: DumpState, done: u64, all: u64) -> f64 {
    match (state, all) {
        (DumpState::Complete, _) => 100.0,
        (_, 0) => 0.0,
        _ => (done as f64 / all as f64 * 100.0).min(100.0),
    }
}
