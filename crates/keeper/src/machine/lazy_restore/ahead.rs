//! Ahead: pages that are read before the guest runs, while its QEMU is starting. If that takes long, events and the machine's status
//! report the progress.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_api::EventKind;
use hearth_memory::{PAGE_BYTES, RamFile};
use hearth_recovery::lazy_restore::{Mode, RestoreError, Step, prefetch};
use hearth_recovery::snapshot::Snapshot;
use hearth_recovery::snapshot::pages::PageReader;

use super::super::generation::{Generation, Plan};
use super::super::launch_job::LaunchControl;
use super::super::start::Activity;
use super::super::work::{TELL_EVERY, Work};
use super::RestoreFailure;
use crate::drill::drill;
use crate::event_log::EventLog;

const MIB: f64 = 1048576.0;

/// The pages to read before the guest runs, if there are any.
pub(super) fn ahead(snapshot: &Snapshot, mode: Mode) -> Option<&PageReader> {
    match mode {
        Mode::Eager => Some(&snapshot.ram),
        Mode::Lazy => None,
        Mode::WorkingSet => snapshot.working_set.as_ref().ok().and_then(Option::as_ref),
    }
}

/// What comes before the guest runs.
pub(super) struct Ahead {
    pub snapshot: Arc<Snapshot>,
    pub mode: Mode,
    pub ram: Arc<RamFile>,
    /// Name of the machine.
    pub machine: String,
    /// The machine's file.
    pub file: PathBuf,
    pub log: EventLog,
    pub doing: Activity,
}

impl Ahead {
    /// Starts QEMU and prefetches memory at the same time: QEMU's start takes as long as reading a working set.
    pub fn launch_and_prefetch(&self, plan: Plan, control: &LaunchControl) -> Result<Generation, RestoreFailure> {
        let pages = ahead(&self.snapshot, self.mode);
        std::thread::scope(|scope| {
            let builder = std::thread::Builder::new().name(format!("prefetch-{}", self.machine));
            let read = || pages.map_or(Ok(0), |pages| self.read(pages, control));
            let reader = builder.spawn_scoped(scope, read);
            let reader = reader.map_err(RestoreFailure::Thread)?;
            let generation = plan.start(control);
            let read = reader.join().expect("reading pages does not panic");
            if let Err(RestoreError::CalledOff) = read {
                return Err(RestoreFailure::CalledOff { file: self.file.clone() });
            }
            let generation = generation?;
            match read {
                // Missing pages of the working set are loaded when they are touched.
                Err(error) if self.mode == Mode::WorkingSet => {
                    let message = format!("cannot use the working set: {}", crate::chain(&error));
                    self.log.record(EventKind::Error { message });
                }
                read => drop(read?),
            }
            Ok(generation)
        })
    }

    /// Reads the pages, unless the start is given up. This may take as long as reading all of a guest's memory from the disk.
    fn read(&self, pages: &PageReader, control: &LaunchControl) -> Result<u64, RestoreError> {
        let (began, mut told, mut done) = (Instant::now(), Duration::ZERO, 0);
        prefetch(pages, &self.ram, |chunk| {
            if chunk >= pages.chunks() / 2 {
                drill(Step::Prefetch.name());
            }
            let took = began.elapsed();
            if took - told >= TELL_EVERY {
                told = took;
                self.tell(&Work::of(done, pages.pages().len() as u64, Some((took, 0))));
            }
            done += pages.pages_of(chunk).len() as u64;
            !control.is_given_up()
        })
    }

    /// `work` counts pages.
    fn tell(&self, work: &Work) {
        let (percent, eta_s) = (work.percent(), work.left_s());
        let mib_per_s = work.per_s.unwrap_or(0.0) * PAGE_BYTES as f64 / MIB;
        let eta = eta_s.map_or_else(String::new, |eta_s| format!(", {eta_s:.0} s to go"));
        self.doing.is_now(format!("loading its memory before the guest runs: {percent:.0} %{eta}"));
        self.log.record(EventKind::RestoreProgress { percent, mib_per_s, eta_s });
    }
}
