//! Frozen: copies an image's file as it was at one moment into another file, while its guest goes on writing.
//!
//! freeze (nothing is in flight) -> a thread copies all of it, and whoever is about to change a part that is not copied yet
//! copies that part first -> nothing is left
//!
//! The chain of images stays as it is, and nothing has to be merged afterwards. A copy that fails (the other disk is full)
//! fails alone: the guest writes on. When it is dropped the image is asked for nothing any more. One copy at a time is made of an
//! image. It fails if the image is closed meanwhile, because nobody keeps then what others change.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::open::{file_bytes, read_aligned};
use crate::buffer::Pages;

/// The least that is copied before a change.
const GRANULE_BYTES: u64 = 64 << 10;
/// Copied at a time: a guest that writes there waits for all of it.
const STEP_BYTES: u64 = 256 << 10;
const BITS: u64 = u64::BITS as u64;

/// Asked before each change of an image's file. Clones are of the same image.
#[derive(Clone, Debug, Default)]
pub struct Guard(Arc<Mutex<Weak<FrozenImage>>>);

impl Guard {
    pub fn freeze(&self, source: File, target: File) -> io::Result<Arc<FrozenImage>> {
        let frozen = Arc::new(FrozenImage::new(source, target, Arc::downgrade(&self.0))?);
        let mut current = self.frozen();
        if current.strong_count() > 0 {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "another copy of it is being made"));
        }
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

/// A copy of an image in progress.
#[derive(Debug)]
pub struct FrozenImage {
    source: File,
    target: File,
    /// Of the image: gone when that is closed.
    guard: Weak<Mutex<Weak<FrozenImage>>>,
    bytes: u64,
    state: Mutex<State>,
    /// Something of `busy` is over.
    changed: Condvar,
    /// Of those who change the image.
    buffer: Mutex<Buffer>,
}

struct Buffer(Pages);

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Buffer")
    }
}

#[derive(Debug)]
struct State {
    /// One bit a granule that is not in the target yet.
    pending: Vec<u64>,
    left: u64,
    /// Granules that somebody is copying.
    busy: Vec<Range<u64>>,
    failed: Option<io::Error>,
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
}

/// The next step for a granule.
enum Next {
    /// It is copied, or need not be.
    Done,
    /// This run, beginning with it, is the caller's to copy.
    Copy(Range<u64>),
}

impl FrozenImage {
    fn new(source: File, target: File, guard: Weak<Mutex<Weak<Self>>>) -> io::Result<Self> {
        let bytes = file_bytes(&source)?;
        target.set_len(bytes)?;
        let granules = bytes.div_ceil(GRANULE_BYTES);
        let mut pending = vec![u64::MAX; granules.div_ceil(BITS) as usize];
        if let Some(last) = pending.last_mut().filter(|_| !granules.is_multiple_of(BITS)) {
            *last = (1 << (granules % BITS)) - 1;
        }
        Ok(Self {
            source,
            target,
            guard,
            bytes,
            state: Mutex::new(State { pending, left: granules, busy: Vec::new(), failed: None }),
            changed: Condvar::new(),
            buffer: Mutex::new(Buffer(Pages::new(STEP_BYTES as usize)?)),
        })
    }

    /// Length of the file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are not copied yet.
    pub fn bytes_left(&self) -> u64 {
        (self.lock().left * GRANULE_BYTES).min(self.bytes)
    }

    /// Copies what is left, and makes all of it durable. `step` gets the number of bytes copied, and returns whether to go on.
    pub fn copy(&self, mut step: impl FnMut(u64) -> bool) -> io::Result<()> {
        let mut buffer = Pages::new(STEP_BYTES as usize)?;
        let granules = self.bytes.div_ceil(GRANULE_BYTES);
        let mut granule = 0;
        while granule < granules {
            let data = self.skip_hole(granule)?;
            if data > granule {
                granule = data;
                continue;
            }
            let copied = match self.claim(granule, granules)? {
                Next::Done => granule..granule + 1,
                Next::Copy(run) => {
                    self.carry_out(run.clone(), buffer.bytes_mut());
                    run
                }
            };
            granule = copied.end;
            if !step((copied.end - copied.start) * GRANULE_BYTES) {
                return Err(io::Error::new(io::ErrorKind::Interrupted, "it was cancelled"));
            }
        }
        let failed = self.lock().failed.take();
        match failed {
            Some(error) => Err(error),
            None => self.target.sync_all(),
        }
    }

    /// This part of the file is about to be changed.
    fn preserve(&self, bytes: Range<u64>) {
        let granules = bytes.start / GRANULE_BYTES..bytes.end.min(self.bytes).div_ceil(GRANULE_BYTES);
        let is_needed =
            |state: &State| state.failed.is_none() && granules.clone().any(|granule| state.is_pending(granule));
        if !is_needed(&self.lock()) {
            return;
        }
        let mut buffer = self.buffer.lock().expect("nobody panics with it");
        let mut granule = granules.start;
        while granule < granules.end {
            match self.claim(granule, granules.end) {
                // The copy has failed already, and its owner will hear of it.
                Err(_) => return,
                Ok(Next::Done) => granule += 1,
                Ok(Next::Copy(run)) => {
                    self.carry_out(run.clone(), buffer.0.bytes_mut());
                    granule = run.end;
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with it")
    }

    /// Waits for whoever copies this granule; if nobody has, it and what follows below `end` is the caller's.
    fn claim(&self, granule: u64, end: u64) -> io::Result<Next> {
        let mut state = self.lock();
        loop {
            if let Some(error) = &state.failed {
                return Err(error.kind().into());
            }
            if !state.is_pending(granule) {
                return Ok(Next::Done);
            }
            if !state.is_busy(granule) {
                break;
            }
            state = self.changed.wait(state).expect("nobody panics with it");
        }
        let limit = end.min(granule + STEP_BYTES / GRANULE_BYTES);
        let free = |other: &u64| state.is_pending(*other) && !state.is_busy(*other);
        let run = granule..(granule + 1..limit).find(|other| !free(other)).unwrap_or(limit);
        state.busy.push(run.clone());
        Ok(Next::Copy(run))
    }

    /// Copies granules that were claimed.
    fn carry_out(&self, run: Range<u64>, buffer: &mut [u8]) {
        let copied = self.copy_run(&run, buffer);
        let mut state = self.lock();
        state.busy.retain(|busy| *busy != run);
        match copied {
            Ok(()) => run.for_each(|granule| state.settle(granule)),
            Err(error) => state.failed = Some(error),
        }
        self.changed.notify_all();
    }

    fn copy_run(&self, run: &Range<u64>, buffer: &mut [u8]) -> io::Result<()> {
        let (start, end) = (run.start * GRANULE_BYTES, (run.end * GRANULE_BYTES).min(self.bytes));
        let wanted = (end - start) as usize;
        let aligned = &mut buffer[..((run.end - run.start) * GRANULE_BYTES) as usize];
        if read_aligned(&self.source, aligned, start)? < wanted {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the image has become shorter"));
        }
        self.must_be_guarded()?;
        for (piece, offset) in
            aligned[..wanted].chunks(GRANULE_BYTES as usize).zip((start..).step_by(GRANULE_BYTES as usize))
        {
            // The target is new: what is not written reads as zeroes.
            if piece.iter().any(|byte| *byte != 0) {
                self.target.write_all_at(piece, offset)?;
            }
        }
        Ok(())
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
        if let Some(error) = state.failed.take() {
            state.failed = Some(error.kind().into());
            return Err(error);
        }
        for hole in granule..data {
            if !state.is_busy(hole) {
                state.settle(hole);
            }
        }
        Ok(data)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

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
        let frozen = stand.freeze();
        let unwritable = File::open(stand.folder.path().join("copy")).unwrap();
        let frozen = FrozenImage { target: unwritable, ..Arc::into_inner(frozen).unwrap() };
        let frozen = Arc::new(frozen);
        *stand.guard.frozen() = Arc::downgrade(&frozen);
        stand.write(0, &[9; 4096]);
        assert_eq!(stand.read("image")[0], 9);
        assert!(frozen.copy(|_| true).is_err());
        stand.image.set_len(4096).unwrap();
        let guard = Arc::downgrade(&stand.guard.0);
        let short = FrozenImage::new(stand.image.try_clone().unwrap(), tempfile::tempfile().unwrap(), guard).unwrap();
        stand.image.set_len(100).unwrap();
        assert!(short.copy(|_| true).unwrap_err().to_string().contains("shorter"));
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
