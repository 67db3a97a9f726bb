//! How far a save is: counted by its thread, told to whoever asks and, now and then, as an event.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hearth_api::{EventKind, SaveStatus, ScanStatus};
use hearth_memory::PAGE_BYTES;
use hearth_recovery::snapshot::save::{SaveError, Watcher};

use super::{Tell, Word};

const EVERY: Duration = Duration::from_secs(2);
/// While a scan waits it is looked so often whether it was called off.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const MIB: f64 = 1048576.0;

/// Seen from both sides.
pub struct Progress {
    folder: String,
    began: Instant,
    /// Until then nothing is copied.
    scan: Mutex<Option<ScanStatus>>,
    copying: OnceLock<Instant>,
    pages: AtomicU64,
    pages_done: AtomicU64,
    /// Of the images that have to be copied.
    disk_bytes: u64,
    disk_bytes_done: AtomicU64,
    /// Of a snapshot that goes to an object store.
    upload_bytes: AtomicU64,
    upload_bytes_done: AtomicU64,
    called_off: AtomicBool,
    why: Mutex<String>,
}

impl Progress {
    pub fn begin(folder: String, pages: u64, disk_bytes: u64, upload_bytes: u64) -> Self {
        Self {
            folder,
            began: Instant::now(),
            scan: Mutex::default(),
            copying: OnceLock::new(),
            pages: AtomicU64::new(pages),
            pages_done: AtomicU64::new(0),
            disk_bytes,
            disk_bytes_done: AtomicU64::new(0),
            upload_bytes: AtomicU64::new(upload_bytes),
            upload_bytes_done: AtomicU64::new(0),
            called_off: AtomicBool::new(false),
            why: Mutex::default(),
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn status(&self) -> SaveStatus {
        let (pages, pages_done) = (self.pages.load(Relaxed), self.pages_done.load(Relaxed));
        // What the guest lets grow meanwhile is copied, and was not foreseen.
        let disk_bytes_done = self.disk_bytes_done.load(Relaxed).min(self.disk_bytes);
        let upload_bytes = self.upload_bytes.load(Relaxed);
        let upload_bytes_done = self.upload_bytes_done.load(Relaxed).min(upload_bytes);
        let done = (pages_done * PAGE_BYTES + disk_bytes_done + upload_bytes_done) as f64;
        let all = (pages * PAGE_BYTES + self.disk_bytes + upload_bytes) as f64;
        let seconds = self.copying.get().map_or(0.0, |since| since.elapsed().as_secs_f64());
        let bytes_per_s = if seconds > 0.0 { done / seconds } else { 0.0 };
        SaveStatus {
            folder: self.folder.clone(),
            pages,
            pages_done,
            disk_bytes: self.disk_bytes,
            disk_bytes_done,
            upload_bytes,
            upload_bytes_done,
            percent: if all == 0.0 { 0.0 } else { done * 100.0 / all },
            mib_per_s: bytes_per_s / MIB,
            eta_s: (bytes_per_s > 0.0).then(|| (all - done).max(0.0) / bytes_per_s),
            scan: *self.scan.lock().expect("nobody panics with it"),
        }
    }

    /// So much there is to be sent, at most.
    pub fn begin_upload(&self, bytes: u64) {
        self.upload_bytes.store(bytes, Relaxed);
    }

    pub fn call_off(&self, why: &str) {
        *self.why.lock().expect("nobody panics with it") = why.to_owned();
        self.called_off.store(true, Relaxed);
    }

    pub fn must_go_on(&self) -> Result<(), SaveError> {
        if self.called_off.load(Relaxed) {
            return Err(SaveError::CalledOff { why: self.why.lock().expect("nobody panics with it").clone() });
        }
        Ok(())
    }
}

/// The thread's side.
pub struct Reporter<'a> {
    progress: &'a Progress,
    tell: &'a Tell,
    told: Instant,
}

impl<'a> Reporter<'a> {
    pub fn new(progress: &'a Progress, tell: &'a Tell) -> Self {
        Self { progress, tell, told: Instant::now() }
    }

    pub fn folder(&self) -> &str {
        &self.progress.folder
    }

    /// Waits for a round of a scan.
    pub fn scan(&self, scan: ScanStatus, period: Duration) -> Result<(), SaveError> {
        *self.progress.scan.lock().expect("nobody panics with it") = Some(scan);
        let deadline = Instant::now() + period;
        loop {
            self.progress.must_go_on()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(LOOK_EVERY.min(left));
        }
    }

    pub fn begin_copy(&self) {
        *self.progress.scan.lock().expect("nobody panics with it") = None;
        // It is set once: there is one copy.
        let _ = self.progress.copying.set(Instant::now());
    }

    pub fn disk_done(&mut self, bytes: u64) -> Result<(), SaveError> {
        self.progress.disk_bytes_done.fetch_add(bytes, Relaxed);
        self.report()
    }

    pub fn upload_done(&mut self, bytes: u64) -> Result<(), SaveError> {
        self.progress.upload_bytes_done.fetch_add(bytes, Relaxed);
        self.report()
    }

    fn report(&mut self) -> Result<(), SaveError> {
        if self.told.elapsed() >= EVERY {
            self.told = Instant::now();
            let SaveStatus { folder, percent, mib_per_s, eta_s, .. } = self.progress.status();
            self.tell.say(Word::Event(EventKind::SaveProgress { folder, percent, mib_per_s, eta_s }));
        }
        self.progress.must_go_on()
    }
}

impl Watcher for Reporter<'_> {
    fn more(&mut self, pages: u64) {
        self.progress.pages.fetch_add(pages, Relaxed);
    }

    fn done(&mut self, pages: u64) -> Result<(), SaveError> {
        self.progress.pages_done.fetch_add(pages, Relaxed);
        self.report()
    }
}
