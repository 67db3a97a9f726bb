//! Progress of a save: counted by its thread, shown to whoever asks and, now and then, as an event.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use hearth_api::{EventKind, SaveStatus, ScanStatus};
use hearth_memory::PAGE_BYTES;
use hearth_recovery::snapshot::save::{SaveError, Watcher};

use super::super::work::{TELL_EVERY, Work};
use super::Tell;
use crate::event::SaveMessage;

/// How often a waiting scan checks whether the save was cancelled.
const LOOK_EVERY: Duration = Duration::from_millis(50);
const MIB: f64 = 1048576.0;

/// Progress shared by the save's threads and the machine's loop.
pub struct Progress {
    folder: String,
    began: Instant,
    /// The scan that is under way. Nothing is copied until it ends.
    scan: Mutex<Option<ScanStatus>>,
    copying: OnceLock<Instant>,
    pages: AtomicU64,
    pages_done: AtomicU64,
    /// Size of the images that have to be copied.
    disk_bytes: u64,
    disk_bytes_done: AtomicU64,
    upload: Upload,
    /// Why the save was called off.
    cancelled: OnceLock<String>,
    /// One of the save's threads has failed, and reports the reason itself.
    abandoned: AtomicBool,
    /// Time of the last progress event.
    told: Mutex<Instant>,
}

/// Progress of a snapshot that goes to an object store.
struct Upload {
    bytes: AtomicU64,
    bytes_done: AtomicU64,
    /// When the first bytes had arrived, and how many. How long these took is not known.
    arriving: OnceLock<(Instant, u64)>,
}

impl Upload {
    fn work(&self) -> Work {
        let since = self.arriving.get().map(|(since, arrived)| (since.elapsed(), *arrived));
        Work::of(self.bytes_done.load(Relaxed), self.bytes.load(Relaxed), since)
    }
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
            upload: Upload {
                bytes: AtomicU64::new(upload_bytes),
                bytes_done: AtomicU64::new(0),
                arriving: OnceLock::new(),
            },
            cancelled: OnceLock::new(),
            abandoned: AtomicBool::new(false),
            told: Mutex::new(Instant::now()),
        }
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn status(&self) -> SaveStatus {
        let (pages, pages_done) = (self.pages.load(Relaxed), self.pages_done.load(Relaxed));
        // The guest's disks may grow during the copy, so more may be copied than was expected.
        let disk_bytes_done = self.disk_bytes_done.load(Relaxed).min(self.disk_bytes);
        let (copied, to_copy) = (pages_done * PAGE_BYTES + disk_bytes_done, pages * PAGE_BYTES + self.disk_bytes);
        let since = self.copying.get().map(|since| (since.elapsed(), 0));
        let copy = Work::of(copied, to_copy, since);
        let upload = self.upload.work();
        // Copy and upload run at the same time.
        let both = Work::of(copy.done + upload.done, copy.all + upload.all, since);
        let eta_s = copy.left_s().zip(upload.left_s()).map(|(copy, upload)| copy.max(upload));
        SaveStatus {
            folder: self.folder.clone(),
            pages,
            pages_done,
            disk_bytes: self.disk_bytes,
            disk_bytes_done,
            upload_bytes: upload.all,
            upload_bytes_done: upload.done,
            percent: both.percent(),
            mib_per_s: both.per_s.unwrap_or(0.0) / MIB,
            eta_s,
            scan: *self.scan.lock().expect("nobody panics with it"),
        }
    }

    /// Makes the save's other thread stop.
    pub fn abandon(&self) {
        self.abandoned.store(true, Relaxed);
    }

    pub fn cancel(&self, why: &str) {
        // The first reason stays.
        let _ = self.cancelled.set(why.to_owned());
    }

    pub fn must_go_on(&self) -> Result<(), SaveError> {
        if let Some(why) = self.cancelled.get() {
            return Err(SaveError::CalledOff { why: why.clone() });
        }
        if self.abandoned.load(Relaxed) { Err(SaveError::Abandoned) } else { Ok(()) }
    }
}

/// Progress as the save's threads report it.
pub struct Reporter<'a> {
    progress: &'a Progress,
    tell: &'a Tell,
}

impl<'a> Reporter<'a> {
    pub fn new(progress: &'a Progress, tell: &'a Tell) -> Self {
        Self { progress, tell }
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
        // It is set only once, because there is one copy.
        let _ = self.progress.copying.set(Instant::now());
        // The first moment of a copy says nothing about its rate.
        *self.progress.told.lock().expect("nobody panics with it") = Instant::now();
    }

    pub fn disk_done(&mut self, bytes: u64) -> Result<(), SaveError> {
        self.progress.disk_bytes_done.fetch_add(bytes, Relaxed);
        self.report()
    }

    /// Notes how many bytes have arrived in the store, and how many there will be as far as is known.
    pub fn uploaded(&mut self, arrived: u64, of: u64) -> Result<(), SaveError> {
        let upload = &self.progress.upload;
        upload.bytes_done.store(arrived, Relaxed);
        upload.bytes.store(of, Relaxed);
        if arrived > 0 {
            upload.arriving.get_or_init(|| (Instant::now(), arrived));
        }
        self.report()
    }

    fn report(&self) -> Result<(), SaveError> {
        let is_time = {
            let mut told = self.progress.told.lock().expect("nobody panics with it");
            let is_time = told.elapsed() >= TELL_EVERY;
            if is_time {
                *told = Instant::now();
            }
            is_time
        };
        if is_time {
            let SaveStatus { folder, percent, mib_per_s, eta_s, .. } = self.progress.status();
            self.tell.say(SaveMessage::Event(EventKind::SaveProgress { folder, percent, mib_per_s, eta_s }));
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn unsent_bytes_count_in_the_estimate() {
        let progress = Progress::begin("s3://bucket/one".into(), 100, 0, 8 << 20);
        let (tell, _events) = mpsc::channel();
        let tell = Tell { tell, number: 1 };
        let mut reporter = Reporter::new(&progress, &tell);
        reporter.begin_copy();
        reporter.done(100).unwrap();
        assert_eq!(progress.status().eta_s, None, "nothing has arrived");
        reporter.uploaded(1 << 20, 8 << 20).unwrap();
        assert_eq!(progress.status().eta_s, None, "one part says nothing of the rate");
        reporter.uploaded(2 << 20, 6 << 20).unwrap();
        let status = progress.status();
        assert!(status.eta_s > Some(0.0), "{status:?}");
        assert_eq!((status.upload_bytes_done, status.upload_bytes), (2 << 20, 6 << 20));
        reporter.uploaded(6 << 20, 6 << 20).unwrap();
        let status = progress.status();
        assert_eq!((status.eta_s, status.percent), (Some(0.0), 100.0));
    }

    #[test]
    fn failed_thread_ends_the_other_cancel_wins() {
        let progress = Progress::begin("s3://bucket/one".into(), 100, 0, 8 << 20);
        progress.must_go_on().unwrap();
        progress.abandon();
        assert!(matches!(progress.must_go_on(), Err(SaveError::Abandoned)));
        progress.cancel("a test");
        assert!(matches!(progress.must_go_on(), Err(SaveError::CalledOff { .. })));
    }
}
