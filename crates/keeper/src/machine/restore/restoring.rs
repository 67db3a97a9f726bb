//! Restoring: what is held of a snapshot while a guest's memory comes out of it: the handler of its page faults, its threads, the
//! snapshot's files. When all of it is there only the figures are left.

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hearth_api::RestoreStatus;
use hearth_disk::gate::Gate;
use hearth_recovery::lazy_restore::{LazyRam, Mode};

use super::RestoreFailure;

/// The way of one incarnation out of a snapshot.
pub struct Restoring {
    began: Instant,
    /// As it was when nothing was missing, or there was nothing to be brought lazily.
    status: RestoreStatus,
    /// None: nothing is missing.
    lazy: Option<Arc<LazyRam>>,
    threads: Vec<JoinHandle<()>>,
}

impl Restoring {
    /// `pages`: of the snapshot. Without `lazy` all of them are there.
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

    /// What the disks have to ask.
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

    /// Nothing is missing: the handler and the snapshot's files are let go of. The threads are ending by themselves, and whoever is
    /// last closes them.
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
