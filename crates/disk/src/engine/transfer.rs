//! One operation as a chain of kernel calls, shared by the raw engines. The engine makes each call (through io_uring or
//! a worker thread) and reports its result; the transfer says what comes next.
//!
//! operation -> call -> result -> short? continue : next piece? next call : done
//!
//! An operation that does not fit the file's alignment (512 bytes where O_DIRECT wants 4096) reads the surrounding
//! blocks into a bounce buffer, patches them and writes them back. Such an operation runs alone (see `order`), so nobody
//! writes the neighbours meanwhile. A second, buffered descriptor would look simpler, but page cache and O_DIRECT on
//! one file may collide (the kernel warns of "possible data corruption"), and its I/O would not hold the image's lock.

use std::io;
use std::ptr::NonNull;

use super::target::Target;
use super::{Operation, Submission};
use crate::buffer::{BufferPool, Pages, SLOT_BYTES_MAX};

/// A unit larger than any known device's; an image that wants more is served through the page cache.
pub const ALIGNMENT_MAX: u64 = 65536;
/// Zeroes written by one call, where they must be written.
const ZEROES_BYTES: usize = 128 << 10;

/// Memory beside the pool that transfers need: made once an engine.
pub(super) struct Scratch {
    /// Buffer of the one transfer that runs alone.
    bounce: Pages,
    /// Never written: the source of written zeroes.
    zeroes: Pages,
}

impl Scratch {
    pub(super) fn new(target: &Target) -> io::Result<Self> {
        // Mapped, not touched: costs nothing until an unaligned operation comes.
        let bounce = SLOT_BYTES_MAX + 2 * target.alignment as usize;
        Ok(Self { bounce: Pages::new(bounce)?, zeroes: Pages::new(ZEROES_BYTES)? })
    }
}

/// An operation waiting for its turn.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub submission: Submission,
    /// The file system knows no ZERO_RANGE (tmpfs), or not for this range: zeroes are written like data.
    pub zeroes_by_writing: bool,
}

impl Job {
    /// Whether this job needs the bounce buffer, and so must run alone.
    pub(super) fn is_unaligned(&self, alignment: u64) -> bool {
        let moves_bytes = match self.submission.operation {
            Operation::Read(_) | Operation::Write(_) => true,
            Operation::WriteZeroes { .. } => self.zeroes_by_writing,
            Operation::Flush | Operation::Discard => false,
        };
        moves_bytes && !(self.submission.offset | self.submission.bytes).is_multiple_of(alignment)
    }
}

/// One call to the kernel. Its result is a byte count for `Read` and `Write`, 0 for the others.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    /// `pooled`: the memory belongs to the buffer pool.
    Read {
        memory: NonNull<u8>,
        bytes: u32,
        offset: u64,
        pooled: bool,
    },
    Write {
        memory: NonNull<u8>,
        bytes: u32,
        offset: u64,
        pooled: bool,
    },
    Allocate {
        mode: i32,
        offset: u64,
        bytes: u64,
    },
    DiscardDevice {
        offset: u64,
        bytes: u64,
    },
    SyncData,
}

/// The next step after a call has ended.
#[derive(Debug)]
pub(super) enum Next {
    Call(Call),
    /// Not in this way: the job waits for its turn again.
    Again(Job),
    Done(io::Result<()>),
}

/// Purpose of the current call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Between the image and the slot (or the zeroes).
    Direct,
    /// Surrounding blocks into the bounce buffer.
    BounceIn,
    /// The patched bounce buffer to the image.
    BounceOut,
    /// A call without data.
    Plain,
}

/// A contiguous run of bytes between memory and image, continued until it is whole.
#[derive(Clone, Copy, Debug)]
struct Run {
    purpose: Purpose,
    memory: NonNull<u8>,
    offset: u64,
    bytes: usize,
    done: usize,
}

/// A job on its way.
pub(super) struct Transfer {
    pub job: Job,
    /// Bytes of the operation that are finished.
    finished: u64,
    /// Bytes of the piece under way.
    piece: u64,
    run: Run,
    /// Number of events on the target's tape when it began.
    #[cfg(test)]
    begun: usize,
}

// SAFETY: the pointers go to the pool and the scratch of the engine that owns the transfer and keeps both alive; the
// contract of `Engine::push` gives it the slot's bytes.
unsafe impl Send for Transfer {}

impl Transfer {
    /// The transfer and its first call.
    pub(super) fn start(job: Job, target: &Target, pool: &BufferPool, scratch: &Scratch) -> (Self, Next) {
        let run = Run { purpose: Purpose::Plain, memory: scratch.zeroes.pointer(), offset: 0, bytes: 0, done: 0 };
        let mut transfer = Self {
            job,
            finished: 0,
            piece: 0,
            run,
            #[cfg(test)]
            begun: crate::image::tape::length(&target.tape),
        };
        let next = match transfer.check(target) {
            Ok(()) => transfer.next_piece(target, pool, scratch),
            Err(error) => Next::Done(Err(error)),
        };
        (transfer, next)
    }

    /// The result of the last call; what comes now.
    pub(super) fn ended(
        &mut self,
        result: io::Result<usize>,
        target: &Target,
        pool: &BufferPool,
        scratch: &Scratch,
    ) -> Next {
        #[cfg(test)]
        if let (Ok(count), Next::Call(call)) = (&result, self.current_call(target)) {
            target.note(call, *count, self.begun);
        }
        match result {
            Err(error) if is_transient(&error) => self.current_call(target),
            Err(error) => self.failed(error, target),
            Ok(_) if self.run.purpose == Purpose::Plain => Next::Done(Ok(())),
            Ok(count) => match self.advance(count, target) {
                Err(error) => Next::Done(Err(error)),
                Ok(false) => self.current_call(target),
                Ok(true) => self.run_ended(target, pool, scratch),
            },
        }
    }

    fn check(&self, target: &Target) -> io::Result<()> {
        let Submission { operation, offset, bytes, .. } = self.job.submission;
        let is_change = !matches!(operation, Operation::Read(_) | Operation::Flush);
        operation.fits(bytes)?;
        if offset.checked_add(bytes).is_none_or(|end| end > i64::MAX as u64) {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        if is_change && target.read_only {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        Ok(())
    }

    fn next_piece(&mut self, target: &Target, pool: &BufferPool, scratch: &Scratch) -> Next {
        let Submission { operation, bytes, .. } = self.job.submission;
        if operation != Operation::Flush && self.finished == bytes {
            return Next::Done(Ok(()));
        }
        match operation {
            Operation::Read(slot) | Operation::Write(slot) => {
                self.piece = bytes;
                self.begin_run(pool.pointer(slot), target, scratch)
            }
            Operation::WriteZeroes { .. } if self.job.zeroes_by_writing => {
                self.piece = self.zero_piece(target.alignment);
                self.begin_run(scratch.zeroes.pointer(), target, scratch)
            }
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } => self.plain_call(target),
        }
    }

    /// How many zeroes to write next: whole units where it can be, so that only the edges go through the bounce buffer.
    fn zero_piece(&self, alignment: u64) -> u64 {
        let rest = self.job.submission.bytes - self.finished;
        let past_boundary = (self.job.submission.offset + self.finished) % alignment;
        if past_boundary != 0 {
            rest.min(alignment - past_boundary)
        } else if rest >= alignment {
            (rest - rest % alignment).min(ZEROES_BYTES as u64)
        } else {
            rest
        }
    }

    fn begin_run(&mut self, memory: NonNull<u8>, target: &Target, scratch: &Scratch) -> Next {
        let offset = self.job.submission.offset + self.finished;
        self.run = if (offset | self.piece).is_multiple_of(target.alignment) {
            Run { purpose: Purpose::Direct, memory, offset, bytes: self.piece as usize, done: 0 }
        } else {
            let start = offset - offset % target.alignment;
            let end = (offset + self.piece).next_multiple_of(target.alignment);
            let memory = scratch.bounce.pointer();
            Run { purpose: Purpose::BounceIn, memory, offset: start, bytes: (end - start) as usize, done: 0 }
        };
        self.current_call(target)
    }

    /// A run is whole: take the piece out of the bounce buffer, or patch it in and write the buffer.
    fn run_ended(&mut self, target: &Target, pool: &BufferPool, scratch: &Scratch) -> Next {
        if self.run.purpose == Purpose::BounceIn {
            let inside = (self.job.submission.offset + self.finished - self.run.offset) as usize;
            let piece = self.piece as usize;
            debug_assert!(inside + piece <= self.run.bytes, "the bounce buffer holds the whole piece");
            // SAFETY: the bounce buffer holds `inside + piece` bytes (run's size, above) and is this transfer's alone;
            // slot and zeroes hold `piece` bytes (checked at the start, bounded by `zero_piece`); they do not overlap.
            unsafe {
                let bounced = scratch.bounce.pointer().add(inside);
                match self.job.submission.operation {
                    Operation::Read(slot) => bounced.copy_to_nonoverlapping(pool.pointer(slot), piece),
                    Operation::Write(slot) => bounced.copy_from_nonoverlapping(pool.pointer(slot), piece),
                    _ => bounced.write_bytes(0, piece),
                }
            }
            if !self.is_read() {
                self.run = Run { purpose: Purpose::BounceOut, done: 0, ..self.run };
                return self.current_call(target);
            }
        }
        self.finished += self.piece;
        self.next_piece(target, pool, scratch)
    }

    /// Counts what a call moved; true when the run is whole.
    fn advance(&mut self, count: usize, target: &Target) -> io::Result<bool> {
        let run = &mut self.run;
        run.done += count;
        let is_input = run.purpose == Purpose::BounceIn
            || matches!((run.purpose, self.job.submission.operation), (Purpose::Direct, Operation::Read(_)));
        let odd = run.done % target.alignment as usize;
        if run.done >= run.bytes {
            return Ok(true);
        }
        if is_input && (count == 0 || odd != 0) {
            // The file ends here: the rest of the virtual disk reads as zeroes. (With O_DIRECT only the end of the file
            // stops between two units.)
            // SAFETY: `done..bytes` lies in the run's memory, which is ours while the operation is in flight.
            unsafe { run.memory.add(run.done).write_bytes(0, run.bytes - run.done) };
            return Ok(true);
        }
        if count == 0 {
            return Err(io::Error::from(io::ErrorKind::WriteZero));
        }
        // A write that stopped inside a unit repeats that unit: O_DIRECT cannot start in the middle.
        run.done -= odd;
        Ok(false)
    }

    fn failed(&mut self, error: io::Error, target: &Target) -> Next {
        let Submission { operation, offset, bytes, .. } = self.job.submission;
        let unsupported = matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS));
        if self.run.purpose != Purpose::Plain || !unsupported {
            return Next::Done(Err(error));
        }
        match operation {
            // A discard is a hint: where nothing can be given up, nothing is.
            Operation::Discard if self.run.done > 0 || target.device_sector_bytes.is_none() => Next::Done(Ok(())),
            Operation::Discard => {
                self.run.done = 1;
                Next::Call(Call::DiscardDevice { offset, bytes })
            }
            Operation::WriteZeroes { .. } => Next::Again(Job { zeroes_by_writing: true, ..self.job }),
            _ => Next::Done(Err(error)),
        }
    }

    fn plain_call(&mut self, target: &Target) -> Next {
        let Submission { operation, offset, bytes, .. } = self.job.submission;
        let device_misfit = target.device_sector_bytes.is_some_and(|sector| !(offset | bytes).is_multiple_of(sector));
        match operation {
            Operation::Flush => Next::Call(Call::SyncData),
            Operation::Discard if device_misfit => Next::Done(Ok(())),
            Operation::WriteZeroes { .. } if device_misfit => Next::Again(Job { zeroes_by_writing: true, ..self.job }),
            Operation::Discard | Operation::WriteZeroes { unmap: true } => {
                let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
                Next::Call(Call::Allocate { mode, offset, bytes })
            }
            _ => {
                let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
                Next::Call(Call::Allocate { mode, offset, bytes })
            }
        }
    }

    /// The call that continues where the last one stopped.
    fn current_call(&mut self, target: &Target) -> Next {
        let run = self.run;
        if run.purpose == Purpose::Plain {
            return self.plain_call(target);
        }
        // SAFETY: `done` is less than the size of the run's memory.
        let memory = unsafe { run.memory.add(run.done) };
        let bytes = (run.bytes - run.done) as u32;
        let offset = run.offset + run.done as u64;
        let is_slot = matches!(self.job.submission.operation, Operation::Read(_) | Operation::Write(_));
        let pooled = run.purpose == Purpose::Direct && is_slot;
        let is_input = run.purpose == Purpose::BounceIn || run.purpose == Purpose::Direct && self.is_read();
        Next::Call(match is_input {
            true => Call::Read { memory, bytes, offset, pooled },
            false => Call::Write { memory, bytes, offset, pooled },
        })
    }

    fn is_read(&self) -> bool {
        matches!(self.job.submission.operation, Operation::Read(_))
    }
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::tests::{Noise, SLOT_BYTES, bytes_of, fill, pool_of, slot_at};

    const DISK_BYTES: usize = 1 << 20;

    /// A kernel that stops short, is interrupted, and knows no ZERO_RANGE; its file ends before the disk does.
    struct Kernel {
        file: Vec<u8>,
        alignment: usize,
        noise: Noise,
        calls: usize,
    }

    impl Kernel {
        fn call(&mut self, call: Call) -> io::Result<usize> {
            self.calls += 1;
            match self.noise.below(8) {
                0 => return Err(io::Error::from_raw_os_error(libc::EINTR)),
                1 => return Err(io::Error::from_raw_os_error(libc::EAGAIN)),
                _ => {}
            }
            match call {
                Call::Read { memory, bytes, offset, .. } => {
                    let (start, count) = (offset as usize, self.short(bytes, offset));
                    // With O_DIRECT only the file's end stops a read between two units.
                    let count = (count - count % self.alignment).min(self.file.len().saturating_sub(start));
                    if count > 0 {
                        let held = &self.file[start..start + count];
                        // SAFETY: the transfer owns `bytes` bytes of memory during its call.
                        unsafe { memory.copy_from_nonoverlapping(NonNull::from(held).cast(), count) };
                    }
                    Ok(count)
                }
                Call::Write { memory, bytes, offset, .. } => {
                    let (start, count) = (offset as usize, self.short(bytes, offset));
                    if self.file.len() < start + count {
                        self.file.resize(start + count, 0);
                    }
                    let held = &mut self.file[start..start + count];
                    // SAFETY: as above.
                    unsafe { memory.copy_to_nonoverlapping(NonNull::from(held).cast(), count) };
                    Ok(count)
                }
                Call::Allocate { .. } => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
                Call::DiscardDevice { .. } => panic!("this is not a device"),
                Call::SyncData => Ok(0),
            }
        }

        /// Part of what was asked for, and not always a whole number of units.
        fn short(&mut self, bytes: u32, offset: u64) -> usize {
            let bytes = bytes as usize;
            assert!(bytes > 0 && (bytes | offset as usize).is_multiple_of(self.alignment), "{bytes} at {offset}");
            match self.noise.below(3) {
                0 => bytes,
                1 => (self.noise.below(bytes) / self.alignment * self.alignment).max(self.alignment),
                _ => bytes.min(self.alignment + self.noise.below(self.alignment)),
            }
        }
    }

    struct Rig {
        kernel: Kernel,
        target: Target,
        pool: std::sync::Arc<BufferPool>,
        scratch: Scratch,
    }

    fn rig(alignment: u64) -> Rig {
        let file = tempfile::tempfile().unwrap();
        let target = Target { file, device_sector_bytes: None, read_only: false, alignment, tape: None };
        let kernel = Kernel { file: Vec::new(), alignment: alignment as usize, noise: Noise(alignment), calls: 0 };
        Rig { kernel, scratch: Scratch::new(&target).unwrap(), pool: pool_of(1), target }
    }

    fn carry_out(rig: &mut Rig, operation: Operation, range: std::ops::Range<usize>) -> io::Result<()> {
        let (offset, bytes) = (range.start as u64, range.len() as u64);
        let submission = Submission { token: 0, operation, offset, bytes };
        let mut job = Job { submission, zeroes_by_writing: false };
        loop {
            let (mut transfer, mut next) = Transfer::start(job, &rig.target, &rig.pool, &rig.scratch);
            loop {
                match next {
                    Next::Call(call) => {
                        let result = rig.kernel.call(call);
                        next = transfer.ended(result, &rig.target, &rig.pool, &rig.scratch);
                    }
                    Next::Again(again) => {
                        job = again;
                        break;
                    }
                    Next::Done(result) => return result,
                }
            }
        }
    }

    #[test]
    fn short_calls_are_continued_to_the_last_byte() {
        for alignment in [1, 512, 4096] {
            let mut rig = rig(alignment);
            let mut noise = Noise(alignment + 1);
            let mut model = vec![0; DISK_BYTES];
            for step in 0..400 {
                let bytes = (1 + noise.below(SLOT_BYTES / 512)) * 512;
                let start = noise.below((DISK_BYTES - bytes) / 512) * 512;
                let range = start..start + bytes;
                match noise.below(3) {
                    0 => {
                        let data = fill(&rig.pool, slot_at(0), bytes, &mut noise);
                        carry_out(&mut rig, Operation::Write(slot_at(0)), range.clone()).unwrap();
                        model[range].copy_from_slice(&data);
                    }
                    1 => {
                        carry_out(&mut rig, Operation::WriteZeroes { unmap: step % 2 == 0 }, range.clone()).unwrap();
                        model[range].fill(0);
                    }
                    _ => {
                        carry_out(&mut rig, Operation::Read(slot_at(0)), range.clone()).unwrap();
                        assert!(bytes_of(&rig.pool, slot_at(0), bytes) == &model[range], "{alignment}, step {step}");
                    }
                }
            }
            rig.kernel.file.resize(DISK_BYTES, 0);
            assert!(rig.kernel.file == model, "alignment {alignment}");
        }
    }

    #[test]
    fn unsupported_discard_changes_nothing() {
        let mut rig = rig(1);
        rig.kernel.file = vec![7; 8192];
        carry_out(&mut rig, Operation::Discard, 0..4096).unwrap();
        assert!(rig.kernel.file.iter().all(|&byte| byte == 7));
    }

    #[test]
    fn an_empty_operation_needs_no_call() {
        let mut rig = rig(4096);
        for operation in [Operation::Read(slot_at(0)), Operation::Discard, Operation::WriteZeroes { unmap: true }] {
            carry_out(&mut rig, operation, 512..512).unwrap();
        }
        assert_eq!(rig.kernel.calls, 0);
        carry_out(&mut rig, Operation::Flush, 0..0).unwrap();
        assert!(rig.kernel.calls > 0);
    }
}
