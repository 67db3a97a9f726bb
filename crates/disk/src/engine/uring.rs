//! The io_uring engine: batches to the kernel without a thread per request.
//!
//! push -> order -> submit (one system call for the batch) -> kernel -> reap (continue, or complete)
//!
//! The file and the buffer pool are registered, so that a request neither looks up a descriptor nor pins pages. Where
//! the kernel takes it (6.1), completions are worked off by the engine's own thread when it asks for them
//! (DEFER_TASKRUN) instead of interrupting it. That mode binds the ring to the first thread that submits; the ring is
//! therefore made disabled and enabled by that thread, so that an engine may be built elsewhere.
//!
//! A ring that is made disabled also takes nothing but the six operations below, on the image. System calls can be filtered
//! (`thread-filter`), and a ring's operations are none.
//!
//! A flush is a data sync of the file: it covers what completed before it was pushed. Operations in flight may
//! overtake it; virtio asks for no more.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::register::Restriction;
use io_uring::types::{Fixed, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};

use super::notify::Doorbell;
use super::order::Order;
use super::target::Target;
use super::transfer::{Call, Next, Scratch, Transfer};
use super::{Completion, Engine, Submission};
use crate::buffer::BufferPool;

/// The image is file 0 of the ring, the pool buffer 0.
const IMAGE: Fixed = Fixed(0);
const POOL: u16 = 0;
/// All that `entry` makes.
const OPERATIONS: [u8; 6] = [
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fallocate::CODE,
    opcode::Fsync::CODE,
];
/// IORING_REGISTER_BUFFERS: the pool is registered once the ring is enabled.
const REGISTER_BUFFERS: u8 = 0;

pub struct UringEngine {
    ring: IoUring,
    /// Still to be enabled by the thread that will use it.
    disabled: bool,
    /// `None` until the thread that will use the ring pins the pool: it takes the kernel milliseconds.
    pool_is_registered: Option<bool>,
    doorbell: Doorbell,
    pool: Arc<BufferPool>,
    target: Arc<Target>,
    scratch: Arc<Scratch>,
    order: Order,
    /// Running transfers; the index is the kernel's user data.
    transfers: Vec<Option<Transfer>>,
    vacant: Vec<usize>,
    ended: Vec<Completion>,
}

impl UringEngine {
    pub fn new(target: Arc<Target>, pool: Arc<BufferPool>, depth: u32) -> io::Result<Self> {
        let depth = depth.max(1);
        let (ring, mode) = new_ring(depth)?;
        Self::over(ring, mode, target, pool, depth)
    }

    fn over(ring: IoUring, mode: Mode, target: Arc<Target>, pool: Arc<BufferPool>, depth: u32) -> io::Result<Self> {
        let doorbell = Doorbell::new()?;
        ring.submitter().register_files(&[target.fd()])?;
        ring.submitter().register_eventfd(doorbell.as_fd().as_raw_fd())?;
        if mode == Mode::Deferred {
            restrict(&ring)?;
        }
        let depth = depth as usize;
        Ok(Self {
            ring,
            disabled: mode == Mode::Deferred,
            pool_is_registered: None,
            doorbell,
            scratch: Arc::new(Scratch::new(&target)?),
            order: Order::new(depth, target.alignment),
            transfers: (0..depth).map(|_| None).collect(),
            vacant: (0..depth).collect(),
            ended: Vec::with_capacity(depth),
            pool,
            target,
        })
    }

    /// Pins the buffers once, before the first request. If the limit of locked memory is below the pool's size, each request pins
    /// its own.
    fn register_pool(&mut self) {
        // SAFETY: the iovec spans the pool's mapping, which the engine keeps alive longer than the ring (field order,
        // and `drop` waits for what is in flight).
        let registered = unsafe { self.ring.submitter().register_buffers(&self.pool.as_iovecs()) };
        if let Err(error) = &registered {
            tracing::info!(%error, "I/O buffers are not pinned, so requests take longer (raise the limit of locked memory)");
        }
        self.pool_is_registered = Some(registered.is_ok());
    }

    /// Brings every job that may start before the kernel (without telling it yet).
    fn start_waiting(&mut self) {
        while let Some(job) = self.order.next() {
            let (transfer, next) = Transfer::start(job, &self.target, &self.pool, &self.scratch);
            let place = self.vacant.pop().expect("no more jobs run than the engine has places");
            self.transfers[place] = Some(transfer);
            self.follow(place, next);
        }
    }

    /// Does what a transfer asks for next.
    fn follow(&mut self, place: usize, mut next: Next) {
        loop {
            match next {
                Next::Call(Call::DiscardDevice { offset, bytes }) => {
                    // The ring has no such call before 6.12. Reached only where punching a device is not supported, and
                    // then it holds up the disk's thread.
                    let result = self.target.discard_device(offset, bytes).map(|()| 0);
                    next = self.report(place, result);
                }
                Next::Call(call) => return self.enqueue(place, call),
                Next::Again(job) => {
                    self.vacate(place);
                    return self.order.again(job);
                }
                Next::Done(result) => {
                    let token = self.vacate(place);
                    self.order.ended();
                    return self.ended.push(Completion { token, result });
                }
            }
        }
    }

    fn report(&mut self, place: usize, result: io::Result<usize>) -> Next {
        let transfer = self.transfers[place].as_mut().expect("a call belongs to a running transfer");
        transfer.ended(result, &self.target, &self.pool, &self.scratch)
    }

    fn vacate(&mut self, place: usize) -> u64 {
        let transfer = self.transfers[place].take().expect("only a running transfer ends");
        self.vacant.push(place);
        transfer.job.submission.token
    }

    fn enqueue(&mut self, place: usize, call: Call) {
        let entry = self.entry(call).user_data(place as u64);
        // SAFETY: the memory in the entry belongs to pool or scratch, which outlive the request: `drop` waits for all.
        unsafe { self.ring.submission().push(&entry) }.expect("the queue has a place for every running transfer");
    }

    fn entry(&self, call: Call) -> squeue::Entry {
        match call {
            Call::Read { memory, bytes, offset, pooled } if pooled && self.pool_is_registered == Some(true) => {
                opcode::ReadFixed::new(IMAGE, memory.as_ptr(), bytes, POOL).offset(offset).build()
            }
            Call::Read { memory, bytes, offset, .. } => {
                opcode::Read::new(IMAGE, memory.as_ptr(), bytes).offset(offset).build()
            }
            Call::Write { memory, bytes, offset, pooled } if pooled && self.pool_is_registered == Some(true) => {
                opcode::WriteFixed::new(IMAGE, memory.as_ptr(), bytes, POOL).offset(offset).build()
            }
            Call::Write { memory, bytes, offset, .. } => {
                opcode::Write::new(IMAGE, memory.as_ptr(), bytes).offset(offset).build()
            }
            Call::Allocate { mode, offset, bytes } => {
                opcode::Fallocate::new(IMAGE, bytes).offset(offset).mode(mode).build()
            }
            Call::SyncData => opcode::Fsync::new(IMAGE).flags(FsyncFlags::DATASYNC).build(),
            Call::DiscardDevice { .. } => unreachable!("followed without the ring"),
        }
    }

    /// Tells the kernel about new requests, and lets it work off what has ended.
    fn enter(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.disabled) {
            self.ring.submitter().register_enable_rings()?;
        }
        match self.ring.submit() {
            Ok(_) => Ok(()),
            // Interrupted, or the kernel is short of memory for the moment: what was not taken stays in the queue, and
            // the next entry takes it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Follows up every completion of the kernel; starts what they made room for.
    fn collect(&mut self) -> io::Result<()> {
        if self.ring.submission().taskrun() {
            self.enter()?;
        }
        while let Some(event) = self.next_event() {
            let result = match event.result() {
                error if error < 0 => Err(io::Error::from_raw_os_error(-error)),
                count => Ok(count as usize),
            };
            let place = event.user_data() as usize;
            let next = self.report(place, result);
            self.follow(place, next);
        }
        self.start_waiting();
        if !self.ring.submission().is_empty() {
            self.enter()?;
        }
        Ok(())
    }

    fn next_event(&mut self) -> Option<cqueue::Entry> {
        self.ring.completion().next()
    }

    /// Sleeps until the kernel has a completion, or the time is over.
    fn sleep(&mut self, at_most: Duration) -> io::Result<()> {
        let time = Timespec::from(at_most);
        match self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time)) {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }
}

impl Engine for UringEngine {
    fn push(&mut self, submission: Submission) {
        if self.pool_is_registered.is_none() {
            self.register_pool();
        }
        self.order.push(submission);
    }

    fn submit(&mut self) -> io::Result<()> {
        self.start_waiting();
        if !self.ring.submission().is_empty() {
            self.enter()?;
        }
        if !self.ended.is_empty() {
            self.doorbell.ring();
        }
        Ok(())
    }

    fn reap(&mut self, ended: &mut Vec<Completion>) {
        self.doorbell.clear();
        if let Err(error) = self.collect() {
            // The ring itself fails only by misuse (another thread). The requests stay in flight and the caller
            // sees no completion: say so, and look again when asked again.
            tracing::error!(%error, "io_uring does not take requests");
        }
        ended.append(&mut self.ended);
    }

    fn wait(&mut self, at_most: Duration) -> io::Result<()> {
        let deadline = Instant::now() + at_most;
        self.submit()?;
        loop {
            self.collect()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if !self.ended.is_empty() || self.order.running() == 0 || left.is_zero() {
                return Ok(());
            }
            self.sleep(left)?;
        }
    }

    fn notifier(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    fn in_flight(&self) -> usize {
        self.order.taken() + self.ended.len()
    }
}

impl Drop for UringEngine {
    /// The kernel may still write into the pool: no request outlives the engine.
    fn drop(&mut self) {
        self.order.drop_waiting();
        let is_kernel_busy = |engine: &Self| engine.order.running() > 0;
        while is_kernel_busy(self) {
            let waited = self.collect().and_then(|()| match is_kernel_busy(self) {
                true => self.sleep(Duration::from_secs(1)),
                false => Ok(()),
            });
            if let Err(error) = waited {
                // Dropped by a foreign thread with requests in flight: their memory must stay, whatever it costs.
                tracing::error!(%error, "io_uring engine dropped with requests in flight; its buffers are leaked");
                std::mem::forget(self.pool.clone());
                std::mem::forget(self.scratch.clone());
                return;
            }
        }
    }
}

/// Forbids a disabled ring all operations but those that the engine uses, and all files but the registered one.
fn restrict(ring: &IoUring) -> io::Result<()> {
    let mut allowed: Vec<_> = OPERATIONS.map(Restriction::sqe_op).into();
    allowed.push(Restriction::sqe_flags_required(squeue::Flags::FIXED_FILE.bits()));
    allowed.push(Restriction::register_op(REGISTER_BUFFERS));
    ring.submitter().register_restrictions(&mut allowed)
}

/// Checks whether this process can use io_uring. Containers often forbid it.
pub fn check_available() -> io::Result<()> {
    new_ring(1).map(drop)
}

/// How completions reach the thread; the best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Worked off by the one submitting thread, when it asks (6.1).
    Deferred,
    /// Worked off by the thread at its next system call (5.19).
    Cooperative,
    /// The kernel interrupts the thread.
    Plain,
}

impl Mode {
    pub(super) const ALL: [Self; 3] = [Self::Deferred, Self::Cooperative, Self::Plain];

    fn ring(self, entries: u32) -> io::Result<IoUring> {
        let mut builder = IoUring::builder();
        builder.dontfork();
        match self {
            Self::Deferred => {
                builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_r_disabled()
            }
            Self::Cooperative => builder.setup_coop_taskrun().setup_taskrun_flag(),
            Self::Plain => &mut builder,
        };
        builder.build(entries)
    }
}

/// A ring in the best mode that the kernel takes.
fn new_ring(entries: u32) -> io::Result<(IoUring, Mode)> {
    let mut refused = None;
    for mode in Mode::ALL {
        match mode.ring(entries) {
            Ok(ring) => return Ok((ring, mode)),
            // An unknown flag; other errors will not go away by asking for less.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refused = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(refused.expect("there are modes, and each was refused"))
}

#[cfg(test)]
impl UringEngine {
    /// As an older kernel would have it, where a test runs on a newer one.
    pub(super) fn in_mode(
        mode: Mode,
        registered: bool,
        target: Arc<Target>,
        pool: Arc<BufferPool>,
        depth: u32,
    ) -> io::Result<Self> {
        let mut engine = Self::over(mode.ring(depth)?, mode, target, pool, depth)?;
        if !registered {
            engine.pool_is_registered = Some(false);
        }
        Ok(engine)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a ring of this mode answers to an operation: 0, or an error number.
    fn answer(mode: Mode, entry: &squeue::Entry) -> i32 {
        let mut ring = mode.ring(1).unwrap();
        if mode == Mode::Deferred {
            ring.submitter().register_files(&[tempfile::tempfile().unwrap().as_raw_fd()]).unwrap();
            restrict(&ring).unwrap();
            ring.submitter().register_enable_rings().unwrap();
        }
        // SAFETY: the operations of this test name memory that is constant, or none.
        unsafe { ring.submission().push(entry) }.unwrap();
        ring.submit_and_wait(1).unwrap();
        -ring.completion().next().unwrap().result().min(0)
    }

    #[test]
    fn ring_takes_only_operations_on_its_image() {
        if Mode::Deferred.ring(1).is_err() {
            return eprintln!("skipped: this kernel has no rings of that mode");
        }
        let null = io_uring::types::Fd(libc::AT_FDCWD);
        let path = c"/dev/null".as_ptr();
        let flush = opcode::Fsync::new(IMAGE).build();
        let by_number = opcode::Fsync::new(io_uring::types::Fd(0)).build();
        let foreign = [
            opcode::OpenAt::new(null, path).flags(libc::O_RDONLY).build(),
            opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
            opcode::Nop::new().build(),
        ];
        assert_eq!(answer(Mode::Deferred, &flush), 0);
        assert_eq!(answer(Mode::Deferred, &by_number), libc::EACCES, "a file that is not the image");
        for entry in foreign {
            assert_eq!(answer(Mode::Deferred, &entry), libc::EACCES, "{entry:?}");
            assert_eq!(answer(Mode::Plain, &entry), 0, "{entry:?} works in a ring without restrictions");
        }
    }
}
