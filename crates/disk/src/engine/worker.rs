//! Worker threads of an engine: `file` has several, which make calls in any order; `qcow2` has one, which owns the image's
//! metadata.
//!
//! submit -> todo -> a worker performs -> ended -> doorbell -> reap

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::notify::Doorbell;
use super::order::Order;
use super::transfer::Job;
use super::{Completion, Engine, Operation, Submission};

/// Carries out jobs for a worker, and blocks meanwhile.
pub(super) trait Perform: Send + 'static {
    fn perform(&mut self, job: Job) -> Outcome;

    /// Called after changes and before they are reported: makes them outlive this process.
    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// How many changes may be settled together.
    const SETTLED_TOGETHER: usize = 1;
}

#[derive(Debug)]
pub(super) enum Outcome {
    /// Must start over, for instance alone.
    Again(Job),
    Done(io::Result<()>),
}

struct Ended {
    token: u64,
    outcome: Outcome,
}

#[derive(Default)]
struct Queues {
    todo: VecDeque<Job>,
    ended: Vec<Ended>,
    stop: bool,
}

struct Shared {
    queues: Mutex<Queues>,
    has_todo: Condvar,
    has_ended: Condvar,
    doorbell: Doorbell,
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        // Workers catch panics outside the lock: the queues are whole.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct WorkerEngine {
    order: Order,
    shared: Arc<Shared>,
    /// Swapped with the workers' list, so that neither is allocated anew.
    taken: Vec<Ended>,
    threads: Vec<JoinHandle<()>>,
}

impl WorkerEngine {
    pub(super) fn start<P: Perform>(name: &str, workers: Vec<P>, alignment: u64) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            has_todo: Condvar::new(),
            has_ended: Condvar::new(),
            doorbell: Doorbell::new()?,
        });
        let mut engine =
            Self { order: Order::new(usize::MAX, alignment), shared, taken: Vec::new(), threads: Vec::new() };
        for worker in workers {
            let shared = engine.shared.clone();
            // If this fails, dropping `engine` ends the threads that did start.
            engine.threads.push(thread::Builder::new().name(name.into()).spawn(move || work(worker, &shared))?);
        }
        Ok(engine)
    }

    /// Takes over what the workers finished; starts what that made room for.
    fn collect(&mut self, completions: &mut Vec<Completion>) {
        std::mem::swap(&mut self.shared.queues().ended, &mut self.taken);
        for Ended { token, outcome } in self.taken.drain(..) {
            match outcome {
                Outcome::Again(job) => self.order.again(job),
                Outcome::Done(result) => {
                    self.order.ended();
                    completions.push(Completion { token, result });
                }
            }
        }
        self.start_waiting();
    }

    fn start_waiting(&mut self) {
        let mut queues = self.shared.queues();
        let mut started = 0;
        while let Some(job) = self.order.next() {
            queues.todo.push_back(job);
            started += 1;
        }
        drop(queues);
        match started {
            0 => {}
            1 => self.shared.has_todo.notify_one(),
            _ => self.shared.has_todo.notify_all(),
        }
    }
}

fn work<P: Perform>(worker: P, shared: &Shared) {
    thread_filter::deny_unneeded();
    let mut worker = Some(worker);
    let mut batch = Vec::with_capacity(P::SETTLED_TOGETHER);
    let mut ended = Vec::with_capacity(P::SETTLED_TOGETHER);
    while take_batch(shared, &mut batch, P::SETTLED_TOGETHER) {
        // A fault in an image format's code costs this image its service, not the machine its keeper. The state of such
        // a worker is not to be trusted with another write, not even the one that dropping it would do.
        let performed =
            worker.as_mut().map(|worker| catch_unwind(AssertUnwindSafe(|| perform_batch(worker, &batch, &mut ended))));
        if !matches!(performed, Some(Ok(()))) {
            std::mem::forget(worker.take());
            fail_unanswered(&batch, &mut ended);
        }
        batch.clear();
        shared.queues().ended.append(&mut ended);
        shared.has_ended.notify_one();
        shared.doorbell.ring();
    }
}

/// Waits for jobs; false at the end of the engine. A change is followed by the changes behind it, up to `most`.
fn take_batch(shared: &Shared, batch: &mut Vec<Job>, most: usize) -> bool {
    let mut queues = shared.queues();
    while queues.todo.is_empty() && !queues.stop {
        queues = shared.has_todo.wait(queues).unwrap_or_else(PoisonError::into_inner);
    }
    batch.extend(queues.todo.pop_front());
    while batch.len() < most && batch.last().is_some_and(is_change) && queues.todo.front().is_some_and(is_change) {
        batch.extend(queues.todo.pop_front());
    }
    !batch.is_empty()
}

fn is_change(job: &Job) -> bool {
    !matches!(job.submission.operation, Operation::Read(_) | Operation::Flush)
}

fn perform_batch<P: Perform>(worker: &mut P, batch: &[Job], ended: &mut Vec<Ended>) {
    for &job in batch {
        ended.push(Ended { token: job.submission.token, outcome: worker.perform(job) });
    }
    if !batch.iter().any(is_change) {
        return;
    }
    if let Err(error) = worker.settle() {
        for Ended { outcome, .. } in ended {
            if matches!(outcome, Outcome::Done(Ok(()))) {
                *outcome = Outcome::Done(Err(io::Error::new(error.kind(), error.to_string())));
            }
        }
    }
}

/// After a panic nothing of the batch counts as done: its changes were not settled.
fn fail_unanswered(batch: &[Job], ended: &mut Vec<Ended>) {
    let error = || io::Error::other("this disk's worker panicked earlier; the keeper's log has the place");
    ended.clear();
    let failed = |job: &Job| Ended { token: job.submission.token, outcome: Outcome::Done(Err(error())) };
    ended.extend(batch.iter().map(failed));
}

impl Engine for WorkerEngine {
    fn push(&mut self, submission: Submission) {
        self.order.push(submission);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.start_waiting();
        Ok(())
    }

    fn reap(&mut self, completions: &mut Vec<Completion>) {
        self.shared.doorbell.clear();
        self.collect(completions);
    }

    fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        let deadline = Instant::now() + at_most;
        self.start_waiting();
        let mut queues = self.shared.queues();
        while queues.ended.is_empty() && self.order.running() > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            queues = self.shared.has_ended.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.shared.doorbell.as_fd()
    }

    fn in_flight(&self) -> usize {
        self.order.taken()
    }
}

impl Drop for WorkerEngine {
    /// Workers finish what they were given: no write outlives the engine.
    fn drop(&mut self) {
        self.shared.queues().stop = true;
        self.shared.has_todo.notify_all();
        for thread in self.threads.drain(..) {
            // A worker catches its panics; an error here has nothing to tell.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Slot;

    /// Panics at offset 13; settles with an error when told so.
    struct Brittle {
        settle_error: Option<i32>,
        dropped: Arc<std::sync::atomic::AtomicBool>,
    }

    impl Perform for Brittle {
        fn perform(&mut self, job: Job) -> Outcome {
            assert_ne!(job.submission.offset, 13, "provoked");
            Outcome::Done(Ok(()))
        }

        fn settle(&mut self) -> io::Result<()> {
            self.settle_error.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
        }

        const SETTLED_TOGETHER: usize = 4;
    }

    impl Drop for Brittle {
        fn drop(&mut self) {
            self.dropped.store(true, std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn engine(settle_error: Option<i32>) -> (WorkerEngine, Arc<std::sync::atomic::AtomicBool>) {
        let dropped = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let worker = Brittle { settle_error, dropped: dropped.clone() };
        (WorkerEngine::start("brittle", vec![worker], 1).unwrap(), dropped)
    }

    fn run(engine: &mut WorkerEngine, operations: &[(Operation, u64)]) -> Vec<bool> {
        for (token, &(operation, offset)) in (0..).zip(operations) {
            engine.push(Submission { token, operation, offset, bytes: 1 });
        }
        engine.submit().unwrap();
        let mut ended = Vec::new();
        while ended.len() < operations.len() {
            engine.wait(Duration::from_secs(60)).unwrap();
            engine.reap(&mut ended);
        }
        ended.sort_by_key(|completion| completion.token);
        ended.iter().map(|completion| completion.result.is_ok()).collect()
    }

    const SLOT: Slot = Slot::at(0, 1);
    const READ: Operation = Operation::Read(SLOT);
    const WRITE: Operation = Operation::Write(SLOT);

    #[test]
    fn panic_fails_the_image_not_the_caller() {
        let (mut engine, dropped) = engine(None);
        assert_eq!(run(&mut engine, &[(READ, 0), (WRITE, 0)]), [true, true]);
        assert_eq!(run(&mut engine, &[(READ, 13)]), [false]);
        assert_eq!(run(&mut engine, &[(READ, 0), (WRITE, 0), (Operation::Flush, 0)]), [false; 3], "no trust any more");
        drop(engine);
        assert!(!dropped.load(std::sync::atomic::Ordering::Relaxed), "not even its destructor runs");
    }

    #[test]
    fn unsettled_operation_is_not_reported_done() {
        let (mut engine, dropped) = engine(Some(libc::ENOSPC));
        let operations = [(READ, 0), (WRITE, 0), (WRITE, 1), (Operation::Discard, 2), (READ, 3)];
        assert_eq!(run(&mut engine, &operations), [true, false, false, false, true]);
        drop(engine);
        assert!(dropped.load(std::sync::atomic::Ordering::Relaxed));
    }
}
