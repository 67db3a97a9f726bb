//! Turns: in which order requests go to a store, of a guest that waits for some of them while others fetch what will be wanted.
//!
//! ```text
//! demand        at once
//! working set   up to 6 at once            \  none while there is a demand, but one at a time, a tenth of a second apart, so that
//! memory        up to 2 at once             > they come to their end; for a tenth of a second behind a demand one at a time.
//! disks         the same, behind all others /  The slower the wire, the further apart, and the longer none behind a demand
//! ```
//! A request that is under way is not called back, and all share one wire: whoever begins to wait finds two of 1 MiB ahead of what it
//! needs, at most. One wire, one `Turns`: all that a restore fetches has to go by it.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::store::run;

/// At a round trip of 10 ms two of 1 MiB use 110 of 125 MiB/s.
const BEHIND_MAX: usize = 2;
/// When nobody runs who could wait.
const WORKING_SET_MAX: usize = 6;
/// So long after a demand others are likely: a guest that touches one page touches more.
const CALM_AFTER: Duration = Duration::from_millis(100);
/// Beside demands that never end: 10 MiB/s of requests of 1 MiB, or of a slow wire about a tenth.
const SHARE_EVERY: Duration = Duration::from_millis(100);
const SHARE: u32 = 10;
/// A demand may well wait for a request that takes so long, as on any fast wire.
const SHORT: Duration = Duration::from_millis(50);
/// One that waits for a store to come back says nothing about the wire.
const LASTED_MAX: Duration = Duration::from_secs(1);
/// Time passes without anybody telling.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// Who needs what is asked for, the most urgent first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// Somebody who waits.
    Demand,
    /// A guest that is about to run.
    WorkingSet,
    /// Nobody yet, and memory is likelier to be.
    Memory,
    Disks,
}

#[derive(Debug, Default)]
struct State {
    demands: usize,
    /// When the last one ended.
    demanded: Option<Instant>,
    /// Those under way that are no demands, and when one last began.
    behind: usize,
    begun: Option<Instant>,
    /// So long the last of them was under way, and a demand that came meanwhile waited.
    lasted: Duration,
    /// By urgency, and then in the order in which they came.
    waiting: BTreeSet<(Urgency, u64)>,
    tickets: u64,
}

#[derive(Debug, Default)]
pub struct Turns {
    state: Mutex<State>,
    changed: Notify,
}

/// A request's, as long as it is under way.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    urgency: Urgency,
    began: Instant,
}

impl Turn {
    pub(crate) fn urgency(&self) -> Urgency {
        self.urgency
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        if self.urgency == Urgency::Demand {
            state.demands -= 1;
            state.demanded = Some(Instant::now());
        } else {
            state.behind -= 1;
            state.lasted = self.began.elapsed().min(LASTED_MAX);
        }
        drop(state);
        self.turns.changed.notify_waiters();
    }
}

/// A place among those who wait, as long as it is waited in.
struct Ticket<'a> {
    turns: &'a Arc<Turns>,
    place: (Urgency, u64),
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.turns.state().waiting.remove(&self.place);
        self.turns.changed.notify_waiters();
    }
}

impl Turns {
    /// Waits for it; a demand does not.
    pub fn take(self: &Arc<Self>, urgency: Urgency) -> Turn {
        run(self.wait(urgency))
    }

    /// None: it is somebody else's.
    pub fn try_take(self: &Arc<Self>, urgency: Urgency) -> Option<Turn> {
        let mut state = self.state();
        let is_first = state.waiting.first().is_none_or(|first| first.0 > urgency);
        (is_first && state.begin(urgency)).then(|| self.turn(urgency))
    }

    pub(crate) async fn wait(self: &Arc<Self>, urgency: Urgency) -> Turn {
        let ticket = self.ticket(urgency);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.begin(&ticket) {
                return self.turn(urgency);
            }
            // Looks again in both cases.
            let _ = tokio::time::timeout(LOOK_AGAIN, changed).await;
        }
    }

    fn ticket(self: &Arc<Self>, urgency: Urgency) -> Ticket<'_> {
        let mut state = self.state();
        state.tickets += 1;
        let place = (urgency, state.tickets);
        state.waiting.insert(place);
        Ticket { turns: self, place }
    }

    fn begin(&self, ticket: &Ticket<'_>) -> bool {
        let mut state = self.state();
        state.waiting.first() == Some(&ticket.place) && state.begin(ticket.place.0)
    }

    fn turn(self: &Arc<Self>, urgency: Urgency) -> Turn {
        Turn { turns: self.clone(), urgency, began: Instant::now() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// False: not now.
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

    fn most(&self, urgency: Urgency) -> usize {
        let is_ago = |at: Option<Instant>, time| at.is_none_or(|at| at.elapsed() >= time);
        let too_long = self.lasted.saturating_sub(SHORT);
        match urgency {
            _ if self.demands > 0 || !is_ago(self.demanded, too_long) => {
                usize::from(is_ago(self.begun, SHARE_EVERY.max(too_long * SHARE)))
            }
            _ if !is_ago(self.demanded, CALM_AFTER) => 1,
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

    /// As if it had just been, for as long as a test takes.
    fn just_now() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(3600))
    }

    #[test]
    fn nothing_keeps_a_demand_waiting_and_it_keeps_all_others() {
        let turns: Arc<Turns> = Arc::default();
        let behind = [(); BEHIND_MAX].map(|()| turns.take(Urgency::Memory));
        assert!(turns.try_take(Urgency::Memory).is_none() && turns.try_take(Urgency::Disks).is_none());
        let demands = [(); 20].map(|()| turns.take(Urgency::Demand));
        drop(behind);
        turns.state().begun = just_now();
        assert!(turns.try_take(Urgency::WorkingSet).is_none(), "there are demands");
        drop(demands);
        // Another one may follow.
        turns.state().demanded = just_now();
        let one = turns.try_take(Urgency::Memory);
        assert!(one.is_some() && turns.try_take(Urgency::Memory).is_none());
        turns.state().demanded = None;
        assert!(turns.try_take(Urgency::Memory).is_some());
    }

    #[test]
    fn demands_that_never_end_leave_the_others_a_share() {
        let turns: Arc<Turns> = Arc::default();
        let _demand = turns.take(Urgency::Demand);
        for _ in 0..3 {
            let one = turns.take(Urgency::Disks);
            turns.state().begun = None;
            assert!(turns.try_take(Urgency::Disks).is_none(), "one at a time");
            drop(one);
        }
    }

    #[test]
    fn on_a_slow_wire_who_has_waited_may_wait_again_before_others_go_on() {
        let turns: Arc<Turns> = Arc::default();
        drop(turns.take(Urgency::Memory));
        turns.state().lasted = LASTED_MAX;
        drop(turns.take(Urgency::Demand));
        turns.state().demanded = Instant::now().checked_sub(2 * CALM_AFTER);
        assert!(turns.try_take(Urgency::Memory).is_none(), "it is as long ago as a request on a fast wire takes");
        turns.state().begun = Instant::now().checked_sub(SHARE * LASTED_MAX + CALM_AFTER);
        assert!(turns.try_take(Urgency::Memory).is_some(), "the others' share");
        turns.state().lasted = LASTED_MAX;
        turns.state().demanded = Instant::now().checked_sub(LASTED_MAX + CALM_AFTER);
        assert!(turns.try_take(Urgency::Memory).is_some());
    }

    #[test]
    fn the_more_urgent_come_first_and_of_these_who_came_first() {
        let turns: Arc<Turns> = Arc::default();
        turns.state().demanded = just_now();
        let under_way = turns.take(Urgency::Disks);
        let (tell, hear) = mpsc::channel();
        let order = [(3, Urgency::Disks), (1, Urgency::Memory), (2, Urgency::Memory), (0, Urgency::WorkingSet)];
        thread::scope(|scope| {
            for (waiting, (number, urgency)) in order.into_iter().enumerate() {
                let (tell, turns) = (tell.clone(), &turns);
                scope.spawn(move || {
                    let _turn = turns.take(urgency);
                    tell.send(number).unwrap();
                });
                while turns.state().waiting.len() <= waiting {
                    thread::yield_now();
                }
            }
            assert!(turns.try_take(Urgency::Disks).is_none(), "others came before");
            drop(under_way);
            let heard: Vec<i32> = hear.iter().take(order.len()).collect();
            assert_eq!(heard, [0, 1, 2, 3]);
        });
    }
}
