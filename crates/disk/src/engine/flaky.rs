//! A disk that misbehaves on command, around any real engine: for tests of the layers above.
//!
//! The plan is shared with the test, which may change it while the engine works on another thread. Operations are
//! counted from 0 as they are pushed, over all engines of the plan, so that a plan outlives a reconnect. All randomness
//! follows from the plan's seed and the order of the calls, nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, epoll, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::notify::Doorbell;
use super::{Completion, Engine, Operation, Submission};

/// The fault that one operation meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Does not reach the image until released.
    HoldStart,
    /// Reaches the image, but is not reported until released.
    HoldEnd,
    /// Does not reach the image and ends with this errno.
    Fail(i32),
    /// Does not reach the image and ends with this errno once it is released.
    HoldFail(i32),
    /// A torn write: only the first bytes reach the image.
    Tear {
        /// Bytes that reach the image.
        bytes: u64,
        /// The errno that it ends with.
        errno: i32,
    },
    /// Reported this much later.
    Delay(Duration),
    /// Reported after this many later operations, or when nothing else is left.
    Overtaken(u32),
}

/// Which operations misbehave, and how. Shared by the test and its engines.
#[derive(Clone)]
pub struct Plan(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    faults: BTreeMap<u64, Fault>,
    sometimes: Option<(u64, Fault)>,
    shuffle: bool,
    random: u64,
    seen: u64,
    held: BTreeSet<u64>,
    released: BTreeSet<u64>,
    doorbells: Vec<Weak<Doorbell>>,
}

impl Plan {
    /// A plan without faults.
    pub fn new(seed: u64) -> Self {
        let state = State {
            faults: BTreeMap::new(),
            sometimes: None,
            shuffle: false,
            random: seed,
            seen: 0,
            held: BTreeSet::new(),
            released: BTreeSet::new(),
            doorbells: Vec::new(),
        };
        Self(Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Makes the operation with this number misbehave.
    pub fn on(&self, number: u64, fault: Fault) {
        self.state().faults.insert(number, fault);
    }

    /// Makes one operation in `one_in` misbehave, chosen by the seed.
    pub fn sometimes(&self, one_in: u64, fault: Fault) {
        self.state().sometimes = Some((one_in.max(1), fault));
    }

    /// Reports completions that are reaped together in random order.
    pub fn shuffle(&self) {
        self.state().shuffle = true;
    }

    /// Lets a held operation go on.
    pub fn release(&self, number: u64) {
        let mut state = self.state();
        state.released.insert(number);
        state.ring();
    }

    /// Lets all held operations go on.
    pub fn release_all(&self) {
        let mut state = self.state();
        let held = state.held.clone();
        state.released.extend(held);
        state.ring();
    }

    /// Operations pushed so far.
    pub fn seen(&self) -> u64 {
        self.state().seen
    }

    /// Numbers of the operations that are held now.
    pub fn held(&self) -> Vec<u64> {
        self.state().held.iter().copied().collect()
    }

    /// Waits for another thread's engine to hold the operation; false if the time is over.
    pub fn wait_until_held(&self, number: u64, at_most: Duration) -> bool {
        let waited = self.0.changed.wait_timeout_while(self.state(), at_most, |state| !state.held.contains(&number));
        waited.unwrap_or_else(PoisonError::into_inner).0.held.contains(&number)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A test that panicked holding it has failed anyway; the engine's thread need not fail with it.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hold(&self, number: u64) {
        self.state().held.insert(number);
        self.0.changed.notify_all();
    }

    /// True once: the operation was released.
    fn let_go(&self, number: u64) -> bool {
        let mut state = self.state();
        let released = state.released.remove(&number);
        if released {
            state.held.remove(&number);
        }
        released
    }
}

impl State {
    fn next_fault(&mut self) -> (u64, Option<Fault>) {
        let number = self.seen;
        self.seen += 1;
        let by_chance = self.sometimes.and_then(|(one_in, fault)| (self.roll(one_in) == 0).then_some(fault));
        (number, self.faults.remove(&number).or(by_chance))
    }

    fn roll(&mut self, sides: u64) -> u64 {
        // xorshift64* (Vigna 2014), kept from the fixed point 0.
        let mut random = self.random | 1;
        random ^= random >> 12;
        random ^= random << 25;
        random ^= random >> 27;
        self.random = random;
        random.wrapping_mul(0x2545_f491_4f6c_dd1d) % sides
    }

    fn ring(&mut self) {
        self.doorbells.retain(|doorbell| doorbell.upgrade().map(|doorbell| doorbell.ring()).is_some());
    }
}

/// An operation between push and reap.
struct Pending {
    submission: Submission,
    fault: Option<Fault>,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    HeldStart,
    AtTheImage,
    /// Ended at the image, not reported yet.
    Ended {
        result: io::Result<()>,
        due: Instant,
        overtakers: u32,
    },
}

/// An engine that misbehaves as its plan says.
pub struct FlakyEngine {
    inner: Box<dyn Engine>,
    plan: Plan,
    /// By number.
    pending: BTreeMap<u64, Pending>,
    ready: Vec<Completion>,
    inner_ended: Vec<Completion>,
    doorbell: Arc<Doorbell>,
    timer: OwnedFd,
    /// Readable when the inner notifier, the doorbell or the timer is.
    any: OwnedFd,
}

impl FlakyEngine {
    /// Wraps an engine.
    pub fn new(inner: Box<dyn Engine>, plan: Plan) -> io::Result<Self> {
        let doorbell = Arc::new(Doorbell::new()?);
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let any = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [inner.notifier(), (*doorbell).as_fd(), timer.as_fd()] {
            epoll::add(&any, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        plan.state().doorbells.push(Arc::downgrade(&doorbell));
        let (pending, ready, inner_ended) = (BTreeMap::new(), Vec::new(), Vec::new());
        Ok(Self { inner, plan, pending, ready, inner_ended, doorbell, timer, any })
    }

    fn start(&mut self, number: u64, submission: Submission, fault: Option<Fault>) {
        let bytes = match (fault, submission.operation) {
            (Some(Fault::Tear { bytes, .. }), Operation::Write(_)) => bytes.min(submission.bytes),
            _ => submission.bytes,
        };
        self.inner.push(Submission { token: number, bytes, ..submission });
        self.pending.insert(number, Pending { submission, fault, stage: Stage::AtTheImage });
    }

    fn fail(&mut self, token: u64, errno: i32) {
        self.ready.push(Completion { token, result: Err(io::Error::from_raw_os_error(errno)) });
    }

    /// Moves every operation as far as it may go now.
    fn collect(&mut self) {
        self.doorbell.clear();
        // Empty if it has not fired.
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        self.start_released();
        self.inner.reap(&mut self.inner_ended);
        for Completion { token, result } in std::mem::take(&mut self.inner_ended) {
            self.ended_at_the_image(token, result);
        }
        while let Some(number) = self.next_to_report() {
            self.report(number);
        }
        self.set_timer();
    }

    fn start_released(&mut self) {
        let is_held = |pending: &Pending| matches!(pending.stage, Stage::HeldStart);
        let held: Vec<u64> = self.pending.iter().filter(|(_, p)| is_held(p)).map(|(&number, _)| number).collect();
        for number in held {
            if self.plan.let_go(number)
                && let Some(Pending { submission, fault, .. }) = self.pending.remove(&number)
            {
                match fault {
                    Some(Fault::HoldFail(errno)) => self.fail(submission.token, errno),
                    _ => self.start(number, submission, None),
                }
            }
        }
        if let Err(error) = self.inner.submit() {
            tracing::error!(%error, "the engine under the flaky one does not take requests");
        }
    }

    fn ended_at_the_image(&mut self, number: u64, result: io::Result<()>) {
        let pending = self.pending.get_mut(&number).expect("the inner engine ends what was pushed, once");
        let (mut due, mut overtakers) = (Instant::now(), 0);
        let mut result = result;
        match pending.fault {
            Some(Fault::Delay(time)) => due += time,
            Some(Fault::Overtaken(count)) => overtakers = count,
            Some(Fault::Tear { errno, .. }) => result = Err(io::Error::from_raw_os_error(errno)),
            Some(Fault::HoldEnd) => self.plan.hold(number),
            Some(Fault::HoldStart | Fault::Fail(_) | Fault::HoldFail(_)) | None => {}
        }
        pending.stage = Stage::Ended { result, due, overtakers };
    }

    /// The first operation that nothing holds back any more.
    fn next_to_report(&self) -> Option<u64> {
        let now = Instant::now();
        let waits_for_release =
            |number, pending: &Pending| pending.fault == Some(Fault::HoldEnd) && !self.plan.let_go(number);
        let is_free = |(&number, pending): (&u64, &Pending)| match pending.stage {
            Stage::Ended { due, overtakers: 0, .. } => {
                (due <= now && !waits_for_release(number, pending)).then_some(number)
            }
            _ => None,
        };
        // An operation that waits to be overtaken, when only held ones are left, would wait for ever.
        let is_overtaken = |pending: &Pending| matches!(pending.stage, Stage::Ended { overtakers: 1.., .. });
        let is_held =
            |pending: &Pending| matches!(pending.fault, Some(Fault::HoldStart | Fault::HoldFail(_) | Fault::HoldEnd));
        let is_stuck = |pending: &Pending| is_overtaken(pending) || is_held(pending);
        let first_overtaken = || self.pending.iter().find(|(_, p)| is_overtaken(p)).map(|(&number, _)| number);
        self.pending.iter().find_map(is_free).or_else(|| match self.pending.values().all(is_stuck) {
            true => first_overtaken(),
            false => None,
        })
    }

    fn report(&mut self, number: u64) {
        let Some(Pending { submission, stage: Stage::Ended { result, .. }, .. }) = self.pending.remove(&number) else {
            unreachable!("only what ended is reported");
        };
        self.ready.push(Completion { token: submission.token, result });
        for (_, pending) in self.pending.range_mut(..number) {
            if let Stage::Ended { overtakers, .. } = &mut pending.stage {
                *overtakers = overtakers.saturating_sub(1);
            }
        }
    }

    /// Wakes us when the next delay is over.
    fn set_timer(&self) {
        let now = Instant::now();
        // One that became due since we looked is not forgotten: it rings at once.
        let left = |due: Instant| due.saturating_duration_since(now).max(Duration::from_nanos(1));
        let next_due = self.pending.values().filter_map(|pending| match (pending.fault, &pending.stage) {
            (Some(Fault::Delay(_)), Stage::Ended { due, .. }) => Some(left(*due)),
            _ => None,
        });
        // All zero disarms the timer.
        let wait = next_due.min().unwrap_or_default();
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let times = Itimerspec { it_interval: zero, it_value: value };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &times).expect("a valid time for our own timer");
    }
}

impl Engine for FlakyEngine {
    fn push(&mut self, submission: Submission) {
        let (number, fault) = self.plan.state().next_fault();
        match fault {
            Some(Fault::HoldStart | Fault::HoldFail(_)) => {
                self.pending.insert(number, Pending { submission, fault, stage: Stage::HeldStart });
                self.plan.hold(number);
            }
            Some(Fault::Fail(errno)) => self.fail(submission.token, errno),
            _ => self.start(number, submission, fault),
        }
    }

    fn submit(&mut self) -> io::Result<()> {
        if !self.ready.is_empty() {
            self.doorbell.ring();
        }
        self.inner.submit()
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        self.collect();
        let mut state = self.plan.state();
        while !self.ready.is_empty() {
            let next = if state.shuffle { state.roll(self.ready.len() as u64) as usize } else { 0 };
            ended.push(self.ready.remove(next));
        }
    }

    fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        let deadline = Instant::now() + at_most;
        self.submit()?;
        loop {
            self.collect();
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.ready.is_empty() || self.pending.is_empty() || left.is_zero() {
                return Ok(());
            }
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.any, PollFlags::IN)], Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.any.as_fd()
    }

    fn in_flight(&self) -> usize {
        self.pending.len() + self.ready.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::BufferPool;
    use crate::engine::file::FileEngine;
    use crate::engine::target::Target;
    use crate::engine::tests::{Noise, bytes_of, fill, is_readable, pool_of, run, slot_at};
    use std::os::unix::fs::FileExt;

    const LONG: Duration = Duration::from_secs(60);

    struct Rig {
        engine: FlakyEngine,
        plan: Plan,
        pool: Arc<BufferPool>,
        file: std::fs::File,
    }

    fn rig() -> Rig {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let target = Target {
            file: file.try_clone().unwrap(),
            device_sector_bytes: None,
            read_only: false,
            alignment: 1,
            tape: None,
        };
        let pool = pool_of(8);
        let plan = Plan::new(1);
        let inner = FileEngine::start(Arc::new(target), pool.clone()).unwrap();
        Rig { engine: FlakyEngine::new(inner, plan.clone()).unwrap(), plan, pool, file }
    }

    fn push_writes(rig: &mut Rig, tokens: std::ops::Range<u64>) {
        for token in tokens {
            let slot = slot_at(token as u16);
            fill(&rig.pool, slot, 4096, &mut Noise(token));
            rig.engine.push(Submission { token, operation: Operation::Write(slot), offset: token * 4096, bytes: 4096 });
        }
        rig.engine.submit().unwrap();
    }

    fn reap(engine: &mut FlakyEngine, count: usize) -> Vec<Completion> {
        let mut ended = Vec::new();
        while ended.len() < count {
            engine.wait(LONG).unwrap();
            engine.reap(&mut ended);
        }
        ended
    }

    fn tokens(ended: &[Completion]) -> Vec<u64> {
        ended.iter().map(|completion| completion.token).collect()
    }

    fn is_written(rig: &Rig, token: u64) -> bool {
        let mut block = [0; 4096];
        rig.file.read_exact_at(&mut block, token * 4096).unwrap();
        bytes_of(&rig.pool, slot_at(token as u16), 4096) == block
    }

    #[test]
    fn held_operations_wait_for_their_release() {
        for (fault, reaches_the_image) in [(Fault::HoldStart, false), (Fault::HoldEnd, true)] {
            let mut rig = rig();
            rig.plan.on(1, fault);
            push_writes(&mut rig, 0..3);
            let mut others = tokens(&reap(&mut rig.engine, 2));
            others.sort();
            assert_eq!(others, [0, 2], "{fault:?}");
            // All that is left is held: nothing to report, and nothing to wake up for.
            while rig.plan.held().is_empty() {
                rig.engine.wait(Duration::from_millis(1)).unwrap();
            }
            assert_eq!((rig.plan.held(), rig.engine.in_flight()), (vec![1], 1), "{fault:?}");
            rig.engine.reap(&mut Vec::new());
            assert!(!is_readable(&rig.engine, 0), "{fault:?}");
            assert_eq!(is_written(&rig, 1), reaches_the_image, "{fault:?}");
            rig.plan.release(1);
            assert!(is_readable(&rig.engine, 60_000), "{fault:?}");
            assert_eq!(tokens(&reap(&mut rig.engine, 1)), [1], "{fault:?}");
            assert!(is_written(&rig, 1) && rig.plan.held().is_empty() && rig.engine.in_flight() == 0, "{fault:?}");
        }
    }

    #[test]
    fn another_thread_can_release_a_held_operation() {
        let mut rig = rig();
        rig.plan.on(0, Fault::HoldEnd);
        let plan = rig.plan.clone();
        std::thread::scope(|scope| {
            let director = scope.spawn(move || {
                assert!(plan.wait_until_held(0, LONG));
                plan.release_all();
            });
            push_writes(&mut rig, 0..1);
            assert_eq!(tokens(&reap(&mut rig.engine, 1)), [0]);
            director.join().unwrap();
        });
        assert!(!rig.plan.wait_until_held(5, Duration::ZERO));
    }

    #[test]
    fn failed_writes_change_nothing_torn_ones_part() {
        let mut rig = rig();
        rig.plan.on(0, Fault::Fail(libc::ENOSPC));
        rig.plan.on(1, Fault::Tear { bytes: 1000, errno: libc::EIO });
        push_writes(&mut rig, 0..2);
        let mut ended = reap(&mut rig.engine, 2);
        ended.sort_by_key(|completion| completion.token);
        let errnos: Vec<_> =
            ended.iter().map(|completion| completion.result.as_ref().unwrap_err().raw_os_error()).collect();
        assert_eq!(errnos, [Some(libc::ENOSPC), Some(libc::EIO)]);
        let mut image = [0; 8192];
        rig.file.read_exact_at(&mut image, 0).unwrap();
        assert_eq!(image[..4096], [0; 4096]);
        assert_eq!(image[4096..5096], bytes_of(&rig.pool, slot_at(1), 4096)[..1000]);
        assert_eq!(image[5096..], [0; 3096]);
        run(&mut rig.engine, Operation::Flush, 0, 0).unwrap();
    }

    #[test]
    fn an_overtaken_operation_comes_late_but_comes() {
        let mut rig = rig();
        rig.plan.on(0, Fault::Overtaken(2));
        rig.plan.on(4, Fault::Overtaken(9));
        push_writes(&mut rig, 0..5);
        let order = tokens(&reap(&mut rig.engine, 5));
        let place = |token| order.iter().position(|&t| t == token).unwrap();
        assert!(place(0) >= 2, "{order:?}");
        assert_eq!(place(4), 4, "{order:?}");
    }

    #[test]
    fn delayed_operation_wakes_caller_when_due() {
        let mut rig = rig();
        rig.plan.on(0, Fault::Delay(Duration::from_millis(3)));
        let started = Instant::now();
        push_writes(&mut rig, 0..1);
        let mut ended = Vec::new();
        while ended.is_empty() {
            assert!(is_readable(&rig.engine, 60_000), "the timer rings");
            rig.engine.reap(&mut ended);
        }
        assert!(started.elapsed() >= Duration::from_millis(3));
    }

    #[test]
    fn chance_and_order_follow_the_seed() {
        let outcome = |seed| {
            let mut rig = rig();
            rig.plan = Plan::new(seed);
            let inner = FileEngine::start(
                Arc::new(Target {
                    file: rig.file.try_clone().unwrap(),
                    device_sector_bytes: None,
                    read_only: false,
                    alignment: 1,
                    tape: None,
                }),
                rig.pool.clone(),
            );
            rig.engine = FlakyEngine::new(inner.unwrap(), rig.plan.clone()).unwrap();
            rig.plan.sometimes(2, Fault::Fail(libc::EIO));
            rig.plan.shuffle();
            push_writes(&mut rig, 0..8);
            let failed = reap(&mut rig.engine, 8).into_iter().filter(|completion| completion.result.is_err());
            failed.map(|completion| completion.token).collect::<std::collections::BTreeSet<u64>>()
        };
        assert_eq!(outcome(7), outcome(7));
        assert!((1..50).any(|seed| outcome(seed) != outcome(7)));
        assert!((1..4).any(|seed| (1..8).contains(&outcome(seed).len())));
    }
}
