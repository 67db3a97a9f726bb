//! Bench `restore`: a web server and database with most of its memory in use is restored from a snapshot on disk, in each mode.
//!
//! a small guest reads its memory, timed by its own clock, while that is missing -> one guest under Hearth and one under QEMU
//! alone are filled and saved, Hearth's after a scan -> another one under a newer QEMU -> Hearth's is traced twice, with requests
//! in two orders -> for each disk profile, each side in turn: the host's cache is dropped, the guest is restored and gets
//! requests, in an order of the round's own, until all memory has arrived and some seconds longer -> the same from an object
//! store, which is traced as well
//!
//! A quick run has the same sides with a guest that boots in seconds and has a web server but no database.
//!
//! `qemu-file` is QEMU's own way: all memory goes through a file (`exec:`) before the guest runs. `qemu-mapped-ram` is the same
//! with a
//! fixed place in the file for each page, which QEMU has from version 9 on.

mod guest;
mod hearth;
mod page;
mod plain;
mod store;
mod summary;
mod touch;
mod waits;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hearth_vmtest::patience;

use crate::host::profile::Profile;
use crate::load::{Load, LoadError};
use crate::record::Record;
use crate::sides::{Rig, RigError};

pub use summary::table;

pub const NAME: &str = "restore";
const MIB: f64 = 1048576.0;

/// Requests of a window. Its mean shows one long wait even among many short ones.
const WINDOW_REQUESTS: usize = 20;
/// Requests that page and fault counts are for, as in the paper's table.
const COUNTED_REQUESTS: usize = 100;
const LOOK_EVERY: Duration = Duration::from_millis(2);

#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    Rig(#[from] RigError),
    #[error("machine {side}")]
    Machine { side: &'static str, source: hearth_vmtest::Error },
    #[error("web load on {side}")]
    Load { side: &'static str, source: LoadError },
    #[error("{side} answered only {answered} of {wanted} requests")]
    Silent { side: &'static str, answered: usize, wanted: usize },
    #[error("cannot use {path}, or evict it from the host's cache")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{side} did not report {figure}: {said}")]
    NoFigure { side: &'static str, figure: &'static str, said: String },
    #[error("the bench needs two processors: it prepares two guests at the same time")]
    OneProcessor,
}

pub struct Options {
    pub quick: bool,
    /// A folder on the disk that is measured.
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
}

/// Sizes and counts of one run.
#[derive(Clone, Copy, Debug)]
struct Shape {
    memory_mib: u64,
    /// Files of the web server in the file cache.
    web_files: usize,
    file_kib: usize,
    anonymous_mib: u64,
    /// Rows of the database's table in its buffers. 0: no database.
    rows: u64,
    /// Number of files, and of parts of the table, that are requested.
    hot_files: usize,
    trace_s: u64,
    /// Delay of each request to the store, beside the server's own time.
    store_request: Duration,
    /// Rounds of a scan, of a second each. A scanned guest answers a third of its usual requests, and all measured ones must come
    /// during the scan, on a slow host too.
    scan_rounds: u32,
    slowdown_window: Duration,
    /// Number of windows with and without a scan, in turn.
    slowdown_rounds: u32,
    /// Requests after all memory has arrived, which give the steady state.
    steady_requests: usize,
    pause_rounds: u32,
    /// Size of the disk that a save copies; a quarter of it is in use.
    pause_disk_mib: u64,
    /// Size of a file in the guest's memory, and the number of its pages that are read one by one.
    touched_mib: u64,
    touch_reads: u32,
    touch_rounds: u32,
    rounds: u32,
}

impl Shape {
    fn of(quick: bool) -> Self {
        if quick {
            Shape {
                memory_mib: 384,
                web_files: 512,
                file_kib: 64,
                anonymous_mib: 48,
                rows: 0,
                hot_files: 24,
                trace_s: 2,
                store_request: Duration::from_millis(2),
                scan_rounds: 1,
                slowdown_window: Duration::from_millis(500),
                slowdown_rounds: 2,
                steady_requests: 40,
                pause_rounds: 1,
                pause_disk_mib: 64,
                touched_mib: 64,
                touch_reads: 200,
                touch_rounds: 1,
                rounds: 1,
            }
        } else {
            Shape {
                memory_mib: 2048,
                web_files: 512,
                file_kib: 1024,
                anonymous_mib: 750,
                rows: 1_600_000,
                hot_files: 24,
                trace_s: 12,
                // About the delay of a store in the same region.
                store_request: Duration::from_millis(10),
                scan_rounds: 20,
                slowdown_window: Duration::from_secs(10),
                slowdown_rounds: 4,
                steady_requests: 80,
                pause_rounds: 3,
                pause_disk_mib: 256,
                touched_mib: 256,
                touch_reads: 1000,
                touch_rounds: 5,
                rounds: 4,
            }
        }
    }

    fn web_files_mib(&self) -> u64 {
        (self.web_files * self.file_kib) as u64 / 1024
    }

    fn has_database(&self) -> bool {
        self.rows > 0
    }
}

/// Resources that all sides share.
struct Bench<'a> {
    rig: &'a Rig,
    shape: Shape,
}

impl Bench<'_> {
    /// Adds the figures of every side. Times are from the request to restore, which is the load's time zero.
    fn add_service(&self, load: &Load, side: &str, place: &str, first_answer_s: f64, record: &mut Record) {
        let case = case(side, place);
        let service = summary::Service::of(&load.trace(), self.shape.steady_requests);
        record.add(&case, "first_answer_ms", "ms", first_answer_s * 1e3);
        record.add(&case, "usable_s", "s", service.usable_s);
        record.add(&case, "steady_ms", "ms", service.steady_ms);
        eprintln!(
            "{NAME}: [{place}] {side}: answers after {first_answer_s:.2} s, usable after {:.2} s, {:.1} ms an answer in the end",
            service.usable_s, service.steady_ms
        );
    }
}

pub fn run(options: &Options, record: &mut Record) -> Result<(), RestoreError> {
    if std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1) {
        return Err(RestoreError::OneProcessor);
    }
    // Relative paths in machine.toml are relative to its own folder.
    let folder = std::path::absolute(&options.folder);
    let folder = folder.map_err(|source| RestoreError::File { path: options.folder.clone(), source })?;
    let rig = Rig::prepare(&folder, record.machine.accelerator)?;
    record.profile_by = rig.profile_by();
    let bench = Bench { rig: &rig, shape: Shape::of(options.quick) };
    hearth::measure_pause(&bench, record)?;
    touch::measure(&bench, record)?;
    let (hearth, plain) = std::thread::scope(|scope| {
        let plain = scope.spawn(|| plain::Saved::make(&bench, plain::Format::Stream));
        (hearth::Saved::make(&bench, record), plain.join().expect("a panic was printed when it happened"))
    });
    let hearth = hearth?;
    // This save may run beside the traces, which are not timed; the saves above are.
    let (traced, mapped) = std::thread::scope(|scope| {
        let mapped = scope.spawn(|| plain::Saved::make(&bench, plain::Format::Mapped));
        (hearth.trace(record), mapped.join().expect("a panic was printed when it happened"))
    });
    traced?;
    let plain = [plain, mapped].map(|saved| saved.map_err(|error| leave_out(&error, record)).ok());
    hearth.measure_scan(record)?;
    let mut lives = Vec::new();
    for &profile in &options.profiles {
        // Readers of a snapshot have no limits of their own.
        if let Err(error) = rig.must_limit_all(profile, NAME) {
            record.left_out.push(crate::chain(&error));
            continue;
        }
        for round in 0..bench.shape.rounds {
            let sides = hearth::SIDES.into_iter().filter(|side| is_whole(round) || side.is_lazy());
            for side in sides {
                let waits = hearth.restore(side, profile, round, record)?;
                lives.push((round, page::Life { side: side.name, place: profile.name(), waits }));
            }
            for plain in plain.iter().flatten().filter(|_| is_whole(round)) {
                match plain.restore(profile, round, record) {
                    Ok(waits) => lives.push((round, page::Life { side: plain.side(), place: profile.name(), waits })),
                    Err(error) => leave_out(&error, record),
                }
            }
        }
    }
    if let Err(error) = restore_from_store(&hearth, bench.shape.rounds, &mut lives, record) {
        leave_out(&error, record);
    }
    summary::summarise(record, &options.profiles);
    let first: Vec<page::Life> = lives.into_iter().filter(|life| life.0 == 0).map(|life| life.1).collect();
    let path = folder.join(format!("{NAME}.html"));
    let written = crate::report::write_whole(&path, &page::html(record, bench.shape, &first));
    written.map_err(|source| RestoreError::File { path: path.clone(), source })?;
    eprintln!("report: {}", path.display());
    Ok(())
}

fn restore_from_store(
    hearth: &hearth::Saved<'_>,
    rounds: u32,
    lives: &mut Vec<(u32, page::Life)>,
    record: &mut Record,
) -> Result<(), RestoreError> {
    hearth.trace_in_store()?;
    for round in (0..rounds).filter(|&round| is_whole(round)) {
        for side in hearth::STORE_SIDES {
            let waits = hearth.restore_from_store(side, round, record)?;
            lives.push((round, page::Life { side: side.name, place: store::STORE, waits }));
        }
    }
    Ok(())
}

/// Whether a round includes all sides. Every second one has only the sides that answer while memory is still arriving, whose
/// times vary most.
fn is_whole(round: u32) -> bool {
    round.is_multiple_of(2)
}

/// Records a side that does not run here as left out; it does not end the bench.
fn leave_out(error: &RestoreError, record: &mut Record) {
    let why = crate::chain(error);
    eprintln!("{NAME}: left out: {why}");
    record.left_out.push(why);
}

/// The case of a side at a place: a profile of the disk, or the store.
fn case(side: &str, place: &str) -> String {
    format!("{side}@{place}")
}

/// The places in the order of the report.
fn places() -> impl Iterator<Item = &'static str> {
    Profile::ALL.into_iter().map(Profile::name).chain([store::STORE])
}

/// Waits until `wanted` requests were answered.
fn await_answers(load: &Load, wanted: usize, side: &'static str) -> Result<(), RestoreError> {
    let deadline = Instant::now() + patience(20);
    loop {
        let answered = load.answered();
        if answered >= wanted {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(RestoreError::Silent { side, answered, wanted });
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
