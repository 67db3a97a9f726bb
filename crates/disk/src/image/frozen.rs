//! Frozen: copies an image's file as it was at one moment into another file, while its guest goes on writing.
//!
//! ```text
//! freeze (nothing is in flight) -> `copy` reads all of it                           -> queue -> a thread writes -> the other file
//!                                  whoever is about to change a part reads it first ->
//! ```
//!
//! A part is copied, as far as the guest is concerned, once it is in the queue. The thread that writes owns the other file and is
//! the only one that touches it: where that file's storage hangs, this thread hangs alone. A change waits only while the queue
//! is full, and only for a short time; then the copy fails.
//!
//! The chain of images stays as it is, and nothing has to be merged afterwards. A copy that fails (the other disk is full)
//! fails alone: the guest writes on. When it is dropped the image is asked for nothing any more. One copy at a time is made of an
//! image. It fails if the image is closed meanwhile, because nobody keeps then what others change. It reads through a descriptor without
//! the image's lock, so that a copy that hangs locks nobody out of a closed image.

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::open::{file_bytes, read_aligned};
use crate::buffer::Pages;

/// The least that is copied before a change.
const GRANULE_BYTES: u64 = 64 << 10;
/// Read and written at a time.
const STEP_BYTES: u64 = 256 << 10;
/// Number of pieces, each of `STEP_BYTES` at most, that may wait to be written: 16 MiB.
const QUEUE_PIECES: usize = 64;
/// Number of pieces that `copy` leaves waiting: the rest of the queue is for those who change the image.
const QUEUE_PIECES_OF_COPY: usize = 2;
/// How long a change of the image waits while the other file takes nothing, before the copy fails.
const CHANGE_PATIENCE: Duration = Duration::from_secs(2);
/// How long one change waits at most. A guest may discard some GiB at once, all of which are copied first.
const LARGE_CHANGE_PATIENCE: Duration = Duration::from_secs(20);
/// `copy` asks this often whether to go on while it waits for the other file.
const LOOK_EVERY: Duration = Duration::from_millis(100);
const BITS: u64 = u64::BITS as u64;

/// Asked before each change of an image's file. Clones are of the same image.
#[derive(Clone, Debug, Default)]
pub struct Guard(Arc<Mutex<Weak<FrozenImage>>>);

impl Guard {
    pub fn freeze(&self, source: File, target: File) -> io::Result<Arc<FrozenImage>> {
        self.freeze_into(source, Box::new(target))
    }

    fn freeze_into(&self, source: File, target: Box<dyn Target>) -> io::Result<Arc<FrozenImage>> {
        let mut current = self.frozen();
        if current.strong_count() > 0 {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another copy of it is being made"));
        }
        let frozen = Arc::new(FrozenImage::new(source, target, Arc::downgrade(&self.0))?);
        *current = Arc::downgrade(&frozen);
        Ok(frozen)
    }

    pub fn before_change(&self, offset: u64, bytes: u64) {
        let frozen = self.frozen().upgrade();
        if let Some(frozen) = frozen {
            frozen.preserve(offset..offset.saturating_add(bytes));
        }
    }

    fn frozen(&self) -> MutexGuard<'_, Weak<FrozenImage>> {
        self.0.lock().expect("nobody panics with it")
    }
}

/// The file that a copy is written to. It is new: what is not written reads as zeroes.
trait Target: Send {
    fn set_length(&mut self, bytes: u64) -> io::Result<()>;
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;
    fn sync(&mut self) -> io::Result<()>;
}

impl Target for File {
    fn set_length(&mut self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// A copy of an image in progress.
pub struct FrozenImage {
    source: File,
    /// Of the image: gone when that is closed.
    guard: Weak<Mutex<Weak<FrozenImage>>>,
    bytes: u64,
    shared: Arc<Shared>,
}

/// What the writing thread has in common with the others.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// One bit a granule that is not in the queue yet.
    pending: Vec<u64>,
    left: u64,
    /// Granules that somebody is reading.
    busy: Vec<Range<u64>>,
    queue: VecDeque<Piece>,
    spare: Vec<Pages>,
    /// Whether the writing thread does something.
    is_writing: bool,
    /// When it began with the piece that it writes.
    writes_since: Instant,
    /// All of it is in the queue.
    is_all: bool,
    /// All of it is on the disk.
    is_durable: bool,
    /// Nobody wants it any more.
    is_dropped: bool,
    has_failed: bool,
    /// Until the owner of the copy has taken it.
    failure: Option<io::Error>,
}

/// A part of the image, to be written.
struct Piece {
    offset: u64,
    bytes: usize,
    buffer: Pages,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, at_most: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, at_most).expect("nobody panics with it").0
    }
}

impl State {
    fn is_pending(&self, granule: u64) -> bool {
        self.pending[(granule / BITS) as usize] >> (granule % BITS) & 1 == 1
    }

    fn is_busy(&self, granule: u64) -> bool {
        self.busy.iter().any(|busy| busy.contains(&granule))
    }

    fn settle(&mut self, granule: u64) {
        if self.is_pending(granule) {
            self.pending[(granule / BITS) as usize] &= !(1 << (granule % BITS));
            self.left -= 1;
        }
    }

    fn buffer(&mut self) -> io::Result<Pages> {
        self.spare.pop().map_or_else(|| Pages::new(STEP_BYTES as usize), Ok)
    }

    /// The first reason stays.
    fn fail(&mut self, error: io::Error) {
        if !self.has_failed {
            self.has_failed = true;
            self.failure = Some(error);
            self.queue.clear();
            self.spare.clear();
        }
    }

    /// The owner gets the error itself, anybody else its kind.
    fn must_go_on(&mut self) -> io::Result<()> {
        match self.failure.take() {
            Some(error) => Err(error),
            None if self.has_failed => Err(io::Error::other("the copy has failed")),
            None => Ok(()),
        }
    }
}

/// The next step for a granule.
enum Next {
    /// It is copied, or need not be.
    Done,
    /// This run, beginning with it, is the caller's to copy.
    Copy(Range<u64>),
}

impl FrozenImage {
    fn new(source: File, target: Box<dyn Target>, guard: Weak<Mutex<Weak<Self>>>) -> io::Result<Self> {
        let bytes = file_bytes(&source)?;
        let granules = bytes.div_ceil(GRANULE_BYTES);
        let mut pending = vec![u64::MAX; granules.div_ceil(BITS) as usize];
        if let Some(last) = pending.last_mut().filter(|_| !granules.is_multiple_of(BITS)) {
            *last = (1 << (granules % BITS)) - 1;
        }
        let state = State {
            pending,
            left: granules,
            busy: Vec::new(),
            queue: VecDeque::new(),
            spare: Vec::new(),
            is_writing: true,
            writes_since: Instant::now(),
            is_all: false,
            is_durable: false,
            is_dropped: false,
            has_failed: false,
            failure: None,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let of_writer = shared.clone();
        let write = move || write(&of_writer, target, bytes);
        std::thread::Builder::new().name("copy-writer".into()).spawn(write)?;
        Ok(Self { source, guard, bytes, shared })
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are not copied yet.
    pub fn bytes_left(&self) -> u64 {
        (self.lock().left * GRANULE_BYTES).min(self.bytes)
    }

    /// Copies what is left, and makes all of it durable. `step` gets the number of bytes copied, perhaps none, and returns whether
    /// to go on. The error comes soon, also where the other file's storage hangs.
    pub fn copy(&self, mut step: impl FnMut(u64) -> bool) -> io::Result<()> {
        let granules = self.bytes.div_ceil(GRANULE_BYTES);
        let mut granule = 0;
        while granule < granules {
            let data = self.skip_hole(granule)?;
            if data > granule {
                granule = data;
                continue;
            }
            self.wait_until(&mut step, |state| state.queue.len() < QUEUE_PIECES_OF_COPY)?;
            let copied = match self.claim(granule, granules)? {
                Next::Done => granule..granule + 1,
                Next::Copy(run) => {
                    self.carry_out(run.clone());
                    run
                }
            };
            granule = copied.end;
            if !step((copied.end - copied.start) * GRANULE_BYTES) {
                return Err(cancelled());
            }
        }
        let mut state = self.lock();
        state.must_go_on()?;
        state.is_all = true;
        drop(state);
        self.shared.changed.notify_all();
        self.wait_until(&mut step, |state| state.is_durable)
    }

    /// Waits until all that was read so far is written, or the copy has failed. For simulations, in which no thread may be ahead.
    pub fn settle(&self) {
        let mut state = self.lock();
        while !state.has_failed && (state.is_writing || !state.queue.is_empty()) {
            state = self.shared.changed.wait(state).expect("nobody panics with it");
        }
    }

    /// Waits for the writing thread.
    fn wait_until(&self, step: &mut impl FnMut(u64) -> bool, mut holds: impl FnMut(&State) -> bool) -> io::Result<()> {
        loop {
            let mut state = self.lock();
            state.must_go_on()?;
            if holds(&state) {
                return Ok(());
            }
            if !state.is_all {
                self.must_be_guarded()?;
            }
            drop(self.shared.wait(state, LOOK_EVERY));
            if !step(0) {
                return Err(cancelled());
            }
        }
    }

    /// This part of the file is about to be changed.
    fn preserve(&self, bytes: Range<u64>) {
        let granules = bytes.start / GRANULE_BYTES..bytes.end.min(self.bytes).div_ceil(GRANULE_BYTES);
        let is_needed = |state: &State| !state.has_failed && granules.clone().any(|granule| state.is_pending(granule));
        if !is_needed(&self.lock()) {
            return;
        }
        let until = Instant::now() + LARGE_CHANGE_PATIENCE;
        let mut granule = granules.start;
        while granule < granules.end && self.wait_for_room(until) {
            match self.claim(granule, granules.end) {
                // The copy has failed already, and its owner will hear of it.
                Err(_) => return,
                Ok(Next::Done) => granule += 1,
                Ok(Next::Copy(run)) => {
                    self.carry_out(run.clone());
                    granule = run.end;
                }
            }
        }
    }

    /// Waits while the queue is full: until then, as long as the other file takes what is written. False: the copy has failed.
    fn wait_for_room(&self, until: Instant) -> bool {
        let mut state = self.lock();
        if state.queue.len() < QUEUE_PIECES {
            return !state.has_failed;
        }
        // Not for the next piece alone: each wait costs the guest a wake-up.
        while !state.has_failed && state.queue.len() > QUEUE_PIECES / 2 {
            let now = Instant::now();
            let end = until.min(state.writes_since + CHANGE_PATIENCE);
            let Some(rest) = end.checked_duration_since(now).filter(|rest| !rest.is_zero()) else {
                let what = "its storage hangs or is too slow: the guest's writes waited too long for it";
                state.fail(io::Error::new(io::ErrorKind::TimedOut, what));
                self.shared.changed.notify_all();
                return false;
            };
            state = self.shared.wait(state, rest);
        }
        !state.has_failed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }

    /// Waits for whoever reads this granule; if nobody has, it and what follows below `end` is the caller's.
    fn claim(&self, granule: u64, end: u64) -> io::Result<Next> {
        let mut state = self.lock();
        loop {
            if state.has_failed {
                return Err(state.must_go_on().expect_err("it has failed"));
            }
            if !state.is_pending(granule) {
                return Ok(Next::Done);
            }
            if !state.is_busy(granule) {
                break;
            }
            state = self.shared.changed.wait(state).expect("nobody panics with it");
        }
        let limit = end.min(granule + STEP_BYTES / GRANULE_BYTES);
        let free = |other: &u64| state.is_pending(*other) && !state.is_busy(*other);
        let run = granule..(granule + 1..limit).find(|other| !free(other)).unwrap_or(limit);
        state.busy.push(run.clone());
        Ok(Next::Copy(run))
    }

    /// Reads granules that were claimed, for the writing thread.
    fn carry_out(&self, run: Range<u64>) {
        let buffer = self.lock().buffer();
        let read = buffer.and_then(|buffer| self.read(&run, buffer));
        let mut state = self.lock();
        state.busy.retain(|busy| *busy != run);
        match read {
            Ok(_) if state.has_failed => {}
            Ok(piece) => {
                state.queue.push_back(piece);
                run.for_each(|granule| state.settle(granule));
            }
            Err(error) => state.fail(error),
        }
        self.shared.changed.notify_all();
    }

    fn read(&self, run: &Range<u64>, mut buffer: Pages) -> io::Result<Piece> {
        let (start, end) = (run.start * GRANULE_BYTES, (run.end * GRANULE_BYTES).min(self.bytes));
        let wanted = (end - start) as usize;
        let aligned = &mut buffer.bytes_mut()[..((run.end - run.start) * GRANULE_BYTES) as usize];
        if read_aligned(&self.source, aligned, start)? < wanted {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the image has become shorter"));
        }
        self.must_be_guarded()?;
        Ok(Piece { offset: start, bytes: wanted, buffer })
    }

    /// What was read until now is of the moment that counts.
    fn must_be_guarded(&self) -> io::Result<()> {
        if self.guard.strong_count() > 0 {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::NotConnected, "the image was closed before all of it was copied"))
    }

    /// The first granule from this one on that may hold data; what lies before it is settled. A hole now was one at the
    /// moment that counts, for a granule that is still pending: nobody changes it before it is copied.
    fn skip_hole(&self, granule: u64) -> io::Result<u64> {
        let end = self.bytes.div_ceil(GRANULE_BYTES);
        let data = match seek(&self.source, SeekFrom::Data(granule * GRANULE_BYTES)) {
            Ok(offset) => (offset / GRANULE_BYTES).min(end),
            Err(Errno::NXIO) => end,
            // It does not tell: all of it is data.
            Err(_) => granule,
        };
        self.must_be_guarded()?;
        let mut state = self.lock();
        state.must_go_on()?;
        for hole in granule..data {
            if !state.is_busy(hole) {
                state.settle(hole);
            }
        }
        Ok(data)
    }
}

impl Drop for FrozenImage {
    fn drop(&mut self) {
        self.lock().is_dropped = true;
        self.shared.changed.notify_all();
    }
}

impl fmt::Debug for FrozenImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrozenImage").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

fn cancelled() -> io::Error {
    io::Error::new(io::ErrorKind::Interrupted, "it was cancelled")
}

/// Writes what comes through the queue until all of it is on the disk, or nobody wants it. Closes the file, which may hang as
/// well.
fn write(shared: &Shared, mut target: Box<dyn Target>, bytes: u64) {
    let mut written = target.set_length(bytes);
    loop {
        let mut state = shared.lock();
        if let Err(error) = written {
            state.fail(error);
        }
        let piece = loop {
            state.is_writing = false;
            if state.has_failed || state.is_dropped {
                drop(state);
                return shared.changed.notify_all();
            }
            if let Some(piece) = state.queue.pop_front() {
                (state.is_writing, state.writes_since) = (true, Instant::now());
                break Some(piece);
            }
            if state.is_all {
                break None;
            }
            shared.changed.notify_all();
            state = shared.changed.wait(state).expect("nobody panics with it");
        };
        drop(state);
        shared.changed.notify_all();
        let Some(mut piece) = piece else {
            let synced = target.sync();
            let mut state = shared.lock();
            match synced {
                Ok(()) => state.is_durable = true,
                Err(error) => state.fail(error),
            }
            drop(state);
            return shared.changed.notify_all();
        };
        written = write_piece(&mut *target, &mut piece);
        let mut state = shared.lock();
        if !state.has_failed {
            state.spare.push(piece.buffer);
        }
    }
}

fn write_piece(target: &mut dyn Target, piece: &mut Piece) -> io::Result<()> {
    let chunks = piece.buffer.bytes_mut()[..piece.bytes].chunks(GRANULE_BYTES as usize);
    for (chunk, offset) in chunks.zip((piece.offset..).step_by(GRANULE_BYTES as usize)) {
        if chunk.iter().any(|byte| *byte != 0) {
            target.write_at(chunk, offset)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::sync::mpsc::{self, Receiver};

    use super::*;

    const BYTES: u64 = (5 << 20) + 4096 * 3 + 512;

    struct Stand {
        folder: tempfile::TempDir,
        image: File,
        guard: Guard,
    }

    impl Stand {
        /// Data, a hole, data up to an odd end.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let open = |name| {
                File::options()
                    .read(true)
                    .write(true)
                    .create(true)
                    .truncate(false)
                    .open(folder.path().join(name))
                    .unwrap()
            };
            let image = open("image");
            image.set_len(BYTES).unwrap();
            let data: Vec<u8> = (0..BYTES).map(|at| (at / 4096 % 251) as u8 + 1).collect();
            image.write_all_at(&data[..1 << 20], 0).unwrap();
            image.write_all_at(&data[4 << 20..], 4 << 20).unwrap();
            Self { folder, image, guard: Guard::default() }
        }

        fn freeze(&self) -> Arc<FrozenImage> {
            let target = File::create_new(self.folder.path().join("copy")).unwrap();
            self.guard.freeze(self.image.try_clone().unwrap(), target).unwrap()
        }

        fn read(&self, name: &str) -> Vec<u8> {
            fs::read(self.folder.path().join(name)).unwrap()
        }

        /// As an engine does.
        fn write(&self, offset: u64, bytes: &[u8]) {
            self.guard.before_change(offset, bytes.len() as u64);
            self.image.write_all_at(bytes, offset).unwrap();
        }
    }

    #[test]
    fn later_writes_are_not_in_the_copy() {
        let stand = Stand::new();
        let before = stand.read("image");
        let frozen = stand.freeze();
        // Before the thread has begun: data, in the hole, over the end.
        stand.write(100, &[0xee; 5000]);
        stand.write(2 << 20, &[0xee; 300_000]);
        stand.write(BYTES - 10, &[0xee; 20]);
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut at = 7_u64;
                while !over.load(Relaxed) {
                    at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    stand.write((at >> 16) % (BYTES - 70_000), &vec![at as u8; (at >> 50) as usize]);
                }
            });
            let mut copied = 0;
            let ended = frozen.copy(|bytes| {
                copied += bytes;
                true
            });
            over.store(true, Relaxed);
            ended.unwrap();
            assert!(copied > 0);
        });
        assert!(stand.read("copy") == before, "the copy is of another moment");
        assert!(stand.read("image") != before);
        assert_eq!((frozen.bytes_left(), frozen.bytes()), (0, BYTES));
    }

    #[test]
    fn holes_stay_holes_and_dropped_copy_blocks_nobody() {
        let stand = Stand::new();
        let frozen = stand.freeze();
        frozen.copy(|_| true).unwrap();
        let copy = fs::metadata(stand.folder.path().join("copy")).unwrap();
        assert!(copy.blocks() * 512 < 3 << 20, "{}", copy.blocks());
        drop(frozen);
        stand.write(0, &[1]);
        assert!(stand.guard.frozen().upgrade().is_none());
    }

    #[test]
    fn failed_copy_does_not_stop_the_guest() {
        let stand = Stand::new();
        let called_off = stand.freeze().copy(|_| false).unwrap_err();
        assert_eq!(called_off.kind(), io::ErrorKind::Interrupted);
        fs::remove_file(stand.folder.path().join("copy")).unwrap();
        // Its target cannot be written to.
        let unwritable = File::open(stand.folder.path().join("image")).unwrap();
        let frozen = stand.guard.freeze(stand.image.try_clone().unwrap(), unwritable).unwrap();
        stand.write(0, &[9; 4096]);
        assert_eq!(stand.read("image")[0], 9);
        assert!(frozen.copy(|_| true).is_err());
        drop(frozen);
        stand.image.set_len(4096).unwrap();
        let guard = Arc::downgrade(&stand.guard.0);
        let target = Box::new(tempfile::tempfile().unwrap());
        let short = FrozenImage::new(stand.image.try_clone().unwrap(), target, guard).unwrap();
        stand.image.set_len(100).unwrap();
        assert!(short.copy(|_| true).unwrap_err().to_string().contains("shorter"));
    }

    /// A target whose storage takes nothing until its other end is dropped.
    struct Hung(Receiver<()>);

    impl Target for Hung {
        fn set_length(&mut self, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn write_at(&mut self, _: &[u8], _: u64) -> io::Result<()> {
            let _ = self.0.recv();
            Ok(())
        }

        fn sync(&mut self) -> io::Result<()> {
            self.write_at(&[], 0)
        }
    }

    /// Data, twice as much as the queue takes.
    fn large() -> (Stand, u64) {
        let stand = Stand::new();
        let bytes = QUEUE_PIECES as u64 * STEP_BYTES * 2;
        let data = vec![7; STEP_BYTES as usize];
        (0..bytes).step_by(data.len()).for_each(|offset| stand.image.write_all_at(&data, offset).unwrap());
        (stand, bytes)
    }

    #[test]
    fn hung_target_holds_the_guest_up_for_a_time_only() {
        let (stand, bytes) = large();
        let (answers, hangs) = mpsc::channel();
        let frozen = stand.guard.freeze_into(stand.image.try_clone().unwrap(), Box::new(Hung(hangs))).unwrap();
        let copied = std::thread::scope(|scope| {
            let copy = scope.spawn(|| frozen.copy(|_| true));
            // They end, although the target never answers.
            (0..bytes).step_by(32 << 10).for_each(|offset| stand.write(offset, &[8; 4096]));
            copy.join().unwrap()
        });
        let error = copied.unwrap_err();
        assert!(error.kind() == io::ErrorKind::TimedOut && error.to_string().contains("hangs"), "{error}");
        // So does a change of all of it at once.
        drop(frozen);
        let (_answers, hangs) = mpsc::channel();
        let frozen = stand.guard.freeze_into(stand.image.try_clone().unwrap(), Box::new(Hung(hangs))).unwrap();
        stand.guard.before_change(0, bytes);
        assert_eq!(frozen.copy(|_| true).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(answers);
    }

    #[test]
    fn copy_to_a_hung_target_ends_when_the_image_is_closed() {
        let (stand, _) = large();
        let (_answers, hangs) = mpsc::channel();
        let frozen = stand.guard.freeze_into(stand.image.try_clone().unwrap(), Box::new(Hung(hangs))).unwrap();
        let Stand { folder, guard, .. } = stand;
        let (mut guard, mut copied, began) = (Some(guard), 0, Instant::now());
        let error = frozen.copy(|bytes| {
            copied += bytes;
            // The target hangs in one piece, and the others that may wait for it are there.
            guard.take_if(|_| bytes == 0 && copied == (1 + QUEUE_PIECES_OF_COPY as u64) * STEP_BYTES);
            began.elapsed() < Duration::from_secs(60)
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::NotConnected);
        drop(folder);
    }

    #[test]
    fn copy_to_a_hung_target_can_be_cancelled() {
        let stand = Stand::new();
        let (_answers, hangs) = mpsc::channel();
        let frozen = stand.guard.freeze_into(stand.image.try_clone().unwrap(), Box::new(Hung(hangs))).unwrap();
        let mut looks = 0..3;
        let error = frozen.copy(|_| looks.next().is_some()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::Interrupted);
    }

    /// Takes some time for each write.
    struct Slow(File);

    impl Target for Slow {
        fn set_length(&mut self, bytes: u64) -> io::Result<()> {
            self.0.set_length(bytes)
        }

        fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
            std::thread::sleep(Duration::from_millis(3));
            Target::write_at(&mut self.0, bytes, offset)
        }

        fn sync(&mut self) -> io::Result<()> {
            self.0.sync()
        }
    }

    #[test]
    fn slow_target_slows_the_guest_and_gets_all_of_it() {
        let (stand, bytes) = large();
        let before = stand.read("image");
        let slow = Slow(File::create_new(stand.folder.path().join("copy")).unwrap());
        let frozen = stand.guard.freeze_into(stand.image.try_clone().unwrap(), Box::new(slow)).unwrap();
        std::thread::scope(|scope| {
            let copy = scope.spawn(|| frozen.copy(|_| true));
            (0..bytes).step_by(64 << 10).for_each(|offset| stand.write(offset, &[8; 4096]));
            copy.join().unwrap().unwrap();
        });
        assert!(stand.read("copy") == before, "the copy is of another moment");
    }

    #[test]
    fn one_copy_at_a_time_and_none_of_a_closed_image() {
        let stand = Stand::new();
        let frozen = stand.freeze();
        let second = stand.guard.freeze(stand.image.try_clone().unwrap(), tempfile::tempfile().unwrap()).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::ResourceBusy);
        let Stand { folder, image, guard } = stand;
        // Closed, and changed by somebody else.
        drop(guard);
        image.write_all_at(&[0xee; 4096], 0).unwrap();
        let error = frozen.copy(|_| true).unwrap_err();
        assert!(error.to_string().contains("was closed"), "{error}");
        drop(folder);
    }
}
