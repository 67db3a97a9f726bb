//! Restoring: what is needed of a snapshot while a guest's memory is loaded from it: the handler of its page faults,
//! its threads, the snapshot's files. When all memory is loaded only the figures stay.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_api::RestoreStatus;
use hearth_disk::gate::Gate;
use hearth_recovery::lazy_restore::{LazyRam, Mode};

use super::RestoreFailure;

/// The restore of one incarnation.
pub struct Restoring {
    began: Instant,
    /// The status without the figures of `lazy`; final once no page is missing.
    status: RestoreStatus,
    /// None once no page is missing.
    lazy: Option<Arc<LazyRam>>,
    threads: Vec<JoinHandle<()>>,
}

impl Restoring {
    /// `pages`: number of pages in the snapshot. Without `lazy` all of them are loaded.
    pub fn new(snapshot: &Path, mode: Mode, began: Instant, pages: u64, lazy: Option<LazyRam>) -> Self {
        let status = RestoreStatus {
            snapshot: snapshot.display().to_string(),
            mode: mode.name().to_owned(),
            pages,
            pages_prefetched: pages,
            pages_lazy: 0,
            pages_filled: 0,
            pages_missing: 0,
            faults: 0,
            fault_us_p50: None,
            fault_us_p99: None,
            fault_us_p50_stored: None,
            fault_us_p99_stored: None,
            fault_us_total: 0,
            complete: true,
            waits: Vec::new(),
        };
        Self { began, status, lazy: lazy.map(Arc::new), threads: Vec::new() }
    }

    pub fn is_complete(&self) -> bool {
        self.lazy.is_none()
    }

    pub fn is_far(&self) -> bool {
        self.lazy.as_ref().is_some_and(|lazy| lazy.is_far())
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// The gate that disks must use.
    pub fn gate(&self) -> Option<Gate> {
        self.lazy.as_ref().map(LazyRam::gate)
    }

    pub fn status(&self) -> RestoreStatus {
        let mut status = self.status.clone();
        let Some(lazy) = &self.lazy else { return status };
        let counts = lazy.counts();
        status.pages_prefetched = counts.prefetched;
        (status.pages_lazy, status.pages_filled) = (counts.lazy, counts.filled);
        (status.pages_missing, status.waits) = (counts.missing, lazy.stuck());
        (status.fault_us_p50, status.fault_us_p99) = (lazy.wait_us(50), lazy.wait_us(99));
        (status.fault_us_p50_stored, status.fault_us_p99_stored) = (lazy.wait_us_stored(50), lazy.wait_us_stored(99));
        (status.faults, status.fault_us_total) = (lazy.waits(), lazy.waited_us());
        status.complete = false;
        status
    }

    pub fn start(&mut self, name: String, work: impl FnOnce(&LazyRam) + Send + 'static) -> Result<(), RestoreFailure> {
        let Some(lazy) = self.lazy.clone() else { return Ok(()) };
        let thread = std::thread::Builder::new().name(name).spawn(move || work(&lazy));
        self.threads.push(thread.map_err(RestoreFailure::Thread)?);
        Ok(())
    }

    /// Releases the handler and the snapshot's files, because no page is missing. The threads end by themselves; the
    /// last one closes the files.
    pub fn complete(&mut self) {
        self.status = RestoreStatus { complete: true, waits: Vec::new(), ..self.status() };
        self.threads.clear();
        self.lazy = None;
    }

    /// Its threads go on until the process ends: nobody who waits for a missing page must get an error.
    pub fn leave(mut self) {
        self.threads.clear();
        self.lazy = None;
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        if let Some(lazy) = &self.lazy {
            lazy.stop();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a thread of the restore panicked");
            }
        }
    }
}
