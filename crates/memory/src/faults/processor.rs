//! Processor: who serves the faults of a QEMU stays on the processor of the thread that last waited.
//!
//! Whoever waits has just left that processor, so it is free; on another one, which sleeps, both the server and then the thread that
//! waited are woken by an interrupt between processors. Under a hypervisor each takes some 50 us, ten times what a page takes.
//!
//! Not for a thread that starts others: they would stay there too, for good.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Between two looks where the waiting thread is, each of which takes 10 us: the scheduler moves threads no faster than this. So two
/// threads that wait in turn do not have the server move for each, which takes longer than it spares.
const LOOK_EVERY: Duration = Duration::from_millis(4);
/// In /proc/PID/task/TID/stat, counted from the field behind the name (proc_pid_stat(5): 39, and 3).
const PROCESSOR_FIELD: usize = 36;

/// Of the thread that made it, which is back where it may be when this is dropped.
pub struct Follower {
    qemu_pid: u32,
    /// Where this thread may be. None: it cannot be told, and it stays where the scheduler has it.
    allowed: Option<CpuSet>,
    at: Option<usize>,
    looked: Option<Instant>,
}

impl Follower {
    pub fn new(qemu_pid: u32) -> Self {
        Self { qemu_pid, allowed: sched_getaffinity(None).ok(), at: None, looked: None }
    }

    /// This thread of QEMU's waited, and goes on. Where it cannot be followed nothing happens.
    pub fn follow(&mut self, thread: u32) {
        let Some(allowed) = self.allowed else { return };
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return;
        }
        self.looked = Some(Instant::now());
        let there = processor_of(self.qemu_pid, thread).filter(|there| allowed.is_set(*there));
        if let Some(there) = there.filter(|_| there != self.at) {
            let mut only = CpuSet::new();
            only.set(there);
            self.at = sched_setaffinity(None, &only).is_ok().then_some(there).or(self.at);
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        if let Some(allowed) = self.allowed.filter(|_| self.at.is_some()) {
            // It was there before. If the host has taken those processors away since, the kernel has moved it.
            let _ = sched_setaffinity(None, &allowed);
        }
    }
}

/// On which it runs, or last did.
fn processor_of(pid: u32, thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
    // The name may hold anything.
    let (_, fields) = stat.rsplit_once(") ")?;
    let processor = fields.split_ascii_whitespace().nth(PROCESSOR_FIELD)?.parse().ok()?;
    (processor < CpuSet::MAX_CPU).then_some(processor)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread::JoinHandle;

    use rustix::thread::{gettid, sched_getcpu};

    use super::*;

    /// A thread that stays on a processor until it is dropped.
    struct Waiter {
        id: u32,
        stays: Option<Sender<()>>,
        thread: Option<JoinHandle<()>>,
    }

    impl Waiter {
        fn on(processor: usize) -> Self {
            let ((said, heard), (stays, stayed)): (_, (_, Receiver<()>)) = (channel(), channel());
            let thread = std::thread::spawn(move || {
                stay_on(processor);
                said.send(gettid().as_raw_nonzero().get() as u32).unwrap();
                stayed.recv().unwrap_err();
            });
            Self { id: heard.recv().unwrap(), stays: Some(stays), thread: Some(thread) }
        }
    }

    impl Drop for Waiter {
        fn drop(&mut self) {
            drop(self.stays.take());
            self.thread.take().unwrap().join().unwrap();
        }
    }

    fn processors() -> Vec<usize> {
        let allowed = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect()
    }

    fn stay_on(processor: usize) {
        let mut only = CpuSet::new();
        only.set(processor);
        sched_setaffinity(None, &only).unwrap();
    }

    #[test]
    fn a_server_is_where_the_thread_is_and_afterwards_where_it_may_be() {
        let before = processors();
        for &there in &before {
            let waiter = Waiter::on(there);
            let mut follower = Follower::new(std::process::id());
            follower.follow(waiter.id);
            assert_eq!((processors(), sched_getcpu()), (vec![there], there));
            drop(follower);
            assert_eq!(processors(), before);
        }
    }

    #[test]
    fn two_threads_that_wait_in_turn_do_not_have_it_move_for_each() {
        let allowed = processors();
        let [one, other] = [allowed[0], *allowed.last().unwrap()];
        let waiters = [one, other].map(Waiter::on);
        let mut follower = Follower::new(std::process::id());
        follower.follow(waiters[0].id);
        follower.looked = Some(Instant::now() + Duration::from_secs(3600));
        follower.follow(waiters[1].id);
        assert_eq!(processors(), [one]);
        follower.looked = Instant::now().checked_sub(LOOK_EVERY);
        follower.follow(waiters[1].id);
        assert_eq!(processors(), [other]);
    }

    #[test]
    fn who_is_not_there_or_where_the_server_may_not_be_is_not_followed() {
        let allowed = processors();
        let mut follower = Follower::new(std::process::id());
        follower.follow(0);
        assert_eq!((follower.at, processors()), (None, allowed.clone()));
        let waiter = Waiter::on(*allowed.last().unwrap());
        stay_on(allowed[0]);
        let mut follower = Follower::new(std::process::id());
        follower.follow(waiter.id);
        assert_eq!(processors(), [allowed[0]]);
    }
}
