//! Processor: the thread that serves QEMU's faults moves to the processor of the thread that waited last.
//!
//! A thread that waits for a page has just left its processor, so that processor is free. From another, sleeping
//! processor, two wake-ups need an interrupt between processors: that of the server, and then that of the thread. Under
//! a hypervisor each costs about 50 us, ten times as much as the page itself.
//!
//! Not for a thread that starts other threads: they inherit the affinity and keep it.

use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Minimum time between two lookups of the waiting thread's processor. A lookup takes 10 us, and the scheduler moves
/// threads no faster than this. So the server does not move back and forth between two threads that wait in turn, which
/// costs more than it saves.
const LOOK_EVERY: Duration = Duration::from_millis(4);
/// Index of the processor in /proc/PID/task/TID/stat, counted from the field after the name (proc_pid_stat(5): field
/// 39; counting starts at field 3).
const PROCESSOR_FIELD: usize = 36;

/// Moves the thread that created it. Dropping it restores that thread's affinity.
pub struct Follower {
    qemu_pid: u32,
    /// Original affinity of this thread. None if the kernel did not report it; then the thread never moves.
    allowed: Option<CpuSet>,
    at: Option<usize>,
    looked: Option<Instant>,
}

impl Follower {
    /// Reads the calling thread's affinity; the thread does not move yet.
    pub fn new(qemu_pid: u32) -> Self {
        Self { qemu_pid, allowed: sched_getaffinity(None).ok(), at: None, looked: None }
    }

    /// Moves to the processor of this thread of QEMU, which has just waited. Does nothing if that is not possible.
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
            // The thread was allowed there before. If the host has taken those processors away since, the kernel has
            // moved it.
            let _ = sched_setaffinity(None, &allowed);
        }
    }
}

/// The processor on which a thread runs or last ran.
fn processor_of(pid: u32, thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/stat")).ok()?;
    // The name may contain any character, parentheses included.
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

    /// A thread that is pinned to a processor until it is dropped.
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
    fn server_follows_the_thread_and_restores_its_affinity() {
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
    fn server_does_not_alternate_between_two_threads() {
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
    fn unknown_threads_and_forbidden_processors_are_not_followed() {
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
