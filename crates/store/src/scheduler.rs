//! Scheduler: the order of requests to a store, while a guest waits for some of them and others fetch ahead.
//!
//! ```text
//! demand        at once
//! working set   up to 6 at once
//! memory        up to 2 at once
//! disks         up to 2 at once, after all others
//! ```
//! During a demand, the others start one at a time, a tenth of a second apart, so that they still make progress. For a
//! tenth of a second after a demand, they run one at a time. On a slow wire, they start further apart and wait longer.
//!
//! A request in flight is not cancelled, and all requests share one wire. So while the guest runs, a demand finds at
//! most two requests of 1 MiB ahead of it. A restore must use one `Scheduler` for all of its requests.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::store::run;

/// Background requests at once while the guest runs. At a round trip of 10 ms, two of 1 MiB use 110 of 125 MiB/s.
const BEHIND_MAX: usize = 2;
/// Requests at once before the guest runs.
const WORKING_SET_MAX: usize = 6;
/// Time after a demand in which more are likely: a guest that touches one page touches more.
const IDLE_AFTER: Duration = Duration::from_millis(100);
/// Interval between background requests during demands: 10 MiB/s with requests of 1 MiB, or about a tenth of a slow
/// wire.
const SHARE_EVERY: Duration = Duration::from_millis(100);
const SHARE: u32 = 10;
/// Duration of a request that a demand may wait for, as on any fast wire.
const SHORT: Duration = Duration::from_millis(50);
/// Maximum duration that counts. A request that waits for a store to come back says nothing about the wire.
const LASTED_MAX: Duration = Duration::from_secs(1);
/// Interval between checks, because no event announces that time has passed.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Purposes of a request, most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// A caller that waits, such as a guest's page fault.
    Demand,
    /// A guest that is about to run.
    WorkingSet,
    /// Memory that nobody needs yet.
    Memory,
    /// Disk blocks that nobody needs yet; less likely to be needed than memory.
    Disks,
}

#[derive(Debug, Default)]
struct State {
    demands: usize,
    /// When the last demand ended.
    demanded: Option<Instant>,
    /// Other requests in flight, and when the last of them began.
    behind: usize,
    begun: Option<Instant>,
    /// How long the last of them was in flight; a demand that came meanwhile had to wait.
    lasted: Duration,
    /// Ordered by urgency, then by arrival.
    waiting: BTreeSet<(Urgency, u64)>,
    tickets: u64,
}

/// Scheduler of the requests over one wire.
#[derive(Debug, Default)]
pub struct Scheduler {
    state: Mutex<State>,
    changed: Notify,
}

/// The right to one request, until it is dropped.
#[derive(Debug)]
pub struct Slot {
    scheduler: Arc<Scheduler>,
    urgency: Urgency,
    began: Instant,
}

impl Slot {
    pub(crate) fn urgency(&self) -> Urgency {
        self.urgency
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.scheduler.state();
        if self.urgency == Urgency::Demand {
            state.demands -= 1;
            state.demanded = Some(Instant::now());
        } else {
            state.behind -= 1;
            state.lasted = self.began.elapsed().min(LASTED_MAX);
        }
        drop(state);
        self.scheduler.changed.notify_waiters();
    }
}

/// A place in the queue, until it is dropped.
struct Ticket<'a> {
    scheduler: &'a Arc<Scheduler>,
    place: (Urgency, u64),
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.scheduler.state().waiting.remove(&self.place);
        self.scheduler.changed.notify_waiters();
    }
}

impl Scheduler {
    /// Waits for a slot; a demand gets it at once.
    pub fn take(self: &Arc<Self>, urgency: Urgency) -> Slot {
        run(self.wait(urgency))
    }

    /// Takes a slot. Returns None if an equally or more urgent request waits or too many are in flight.
    pub fn try_take(self: &Arc<Self>, urgency: Urgency) -> Option<Slot> {
        let mut state = self.state();
        let is_first = state.waiting.first().is_none_or(|first| first.0 > urgency);
        (is_first && state.begin(urgency)).then(|| self.slot(urgency))
    }

    /// Waits for a slot.
    pub(crate) async fn wait(self: &Arc<Self>, urgency: Urgency) -> Slot {
        let ticket = self.ticket(urgency);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.begin(&ticket) {
                return self.slot(urgency);
            }
            // After a change and after the timeout, the loop checks again.
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }

    fn ticket(self: &Arc<Self>, urgency: Urgency) -> Ticket<'_> {
        let mut state = self.state();
        state.tickets += 1;
        let place = (urgency, state.tickets);
        state.waiting.insert(place);
        Ticket { scheduler: self, place }
    }

    fn begin(&self, ticket: &Ticket<'_>) -> bool {
        let mut state = self.state();
        state.waiting.first() == Some(&ticket.place) && state.begin(ticket.place.0)
    }

    fn slot(self: &Arc<Self>, urgency: Urgency) -> Slot {
        Slot { scheduler: self.clone(), urgency, began: Instant::now() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Counts a request as begun. Returns false if it must wait.
    fn begin(&mut self, urgency: Urgency) -> bool {
        if urgency == Urgency::Demand {
            self.demands += 1;
            return true;
        }
        let may = self.behind < self.most(urgency);
        if may {
            self.behind += 1;
            self.begun = Some(Instant::now());
        }
        may
    }

    /// Maximum number of background requests in flight now.
    fn most(&self, urgency: Urgency) -> usize {
        let is_ago = |at: Option<Instant>, time| at.is_none_or(|at| at.elapsed() >= time);
        let too_long = self.lasted.saturating_sub(SHORT);
        match urgency {
            _ if self.demands > 0 || !is_ago(self.demanded, too_long) => {
                usize::from(is_ago(self.begun, SHARE_EVERY.max(too_long * SHARE)))
            }
            _ if !is_ago(self.demanded, IDLE_AFTER) => 1,
            Urgency::Demand | Urgency::WorkingSet => WORKING_SET_MAX,
            Urgency::Memory | Urgency::Disks => BEHIND_MAX,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// A time that counts as just passed for the whole test.
    fn just_now() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(3600))
    }

    #[test]
    fn demands_never_wait_and_hold_back_others() {
        let scheduler: Arc<Scheduler> = Arc::default();
        let behind = [(); BEHIND_MAX].map(|()| scheduler.take(Urgency::Memory));
        assert!(scheduler.try_take(Urgency::Memory).is_none() && scheduler.try_take(Urgency::Disks).is_none());
        let demands = [(); 20].map(|()| scheduler.take(Urgency::Demand));
        drop(behind);
        scheduler.state().begun = just_now();
        assert!(scheduler.try_take(Urgency::WorkingSet).is_none(), "there are demands");
        drop(demands);
        // Another demand may follow.
        scheduler.state().demanded = just_now();
        let one = scheduler.try_take(Urgency::Memory);
        assert!(one.is_some() && scheduler.try_take(Urgency::Memory).is_none());
        scheduler.state().demanded = None;
        assert!(scheduler.try_take(Urgency::Memory).is_some());
    }

    #[test]
    fn endless_demands_leave_others_a_share() {
        let scheduler: Arc<Scheduler> = Arc::default();
        let _demand = scheduler.take(Urgency::Demand);
        for _ in 0..3 {
            let one = scheduler.take(Urgency::Disks);
            scheduler.state().begun = None;
            assert!(scheduler.try_take(Urgency::Disks).is_none(), "one at a time");
            drop(one);
        }
    }

    #[test]
    fn slow_wire_delays_others_after_a_demand() {
        let scheduler: Arc<Scheduler> = Arc::default();
        drop(scheduler.take(Urgency::Memory));
        scheduler.state().lasted = LASTED_MAX;
        drop(scheduler.take(Urgency::Demand));
        scheduler.state().demanded = Instant::now().checked_sub(2 * IDLE_AFTER);
        assert!(scheduler.try_take(Urgency::Memory).is_none(), "it is as long ago as a request on a fast wire takes");
        scheduler.state().begun = Instant::now().checked_sub(SHARE * LASTED_MAX + IDLE_AFTER);
        assert!(scheduler.try_take(Urgency::Memory).is_some(), "the others' share");
        scheduler.state().lasted = LASTED_MAX;
        scheduler.state().demanded = Instant::now().checked_sub(LASTED_MAX + IDLE_AFTER);
        assert!(scheduler.try_take(Urgency::Memory).is_some());
    }

    #[test]
    fn urgency_decides_first_and_arrival_second() {
        let scheduler: Arc<Scheduler> = Arc::default();
        scheduler.state().demanded = just_now();
        let under_way = scheduler.take(Urgency::Disks);
        let (tell, hear) = mpsc::channel();
        let order = [(3, Urgency::Disks), (1, Urgency::Memory), (2, Urgency::Memory), (0, Urgency::WorkingSet)];
        thread::scope(|scope| {
            for (waiting, (number, urgency)) in order.into_iter().enumerate() {
                let (tell, scheduler) = (tell.clone(), &scheduler);
                scope.spawn(move || {
                    let _slot = scheduler.take(urgency);
                    tell.send(number).unwrap();
                });
                while scheduler.state().waiting.len() <= waiting {
                    thread::yield_now();
                }
            }
            assert!(scheduler.try_take(Urgency::Disks).is_none(), "others came before");
            drop(under_way);
            let heard: Vec<i32> = hear.iter().take(order.len()).collect();
            assert_eq!(heard, [0, 1, 2, 3]);
        });
    }
}
