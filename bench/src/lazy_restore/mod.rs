//! Bench `restore`: a web server and database with most of its memory in use comes out of a snapshot on disk, in each way.
//!
//! a small guest reads its memory, by its own clock, while that is missing -> one guest under Hearth, one under QEMU alone, both filled
//! and saved, Hearth's after a scan -> one more under a newer QEMU -> Hearth's is traced twice, with requests in one order and in another
//! -> for each disk profile, each side in turn: the host's cache is dropped, the guest is restored and asked for files, in an order of its
//! own, until all memory is there and some seconds longer -> the same out of an object store, which is traced as well
//!
//! A quick run has the same sides of a guest that boots in seconds, which has a web server and no database.
//!
//! `qemu-file` is what QEMU alone does: all of memory through a file (`exec:`), and then the guest runs. `qemu-mapped-ram`: the same with
//! a place in the file for each page, which QEMU has from 9 on.

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
use crate::sides::{Rig, RigError, free_port};

pub use summary::table;

pub const NAME: &str = "restore";
const MIB: f64 = 1048576.0;

/// Whose mean is looked at: one that waits long counts, also among many that do not.
const WINDOW_REQUESTS: usize = 20;
/// The paper's table, and this one, stop here.
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
    #[error("{side} answered {answered} of {wanted} requests and then no more")]
    Silent { side: &'static str, answered: usize, wanted: usize },
    #[error("{path}: cannot be used, or dropped from the host's cache")]
    File { path: PathBuf, source: std::io::Error },
    #[error("{side} says no {figure}: {said}")]
    NoFigure { side: &'static str, figure: &'static str, said: String },
    #[error("the two guests are made at once, which takes two processors")]
    OneProcessor,
}

pub struct Options {
    pub quick: bool,
    /// On the disk that is to be measured.
    pub folder: PathBuf,
    pub profiles: Vec<Profile>,
}

/// Sizes and counts of one run.
#[derive(Clone, Copy, Debug)]
struct Shape {
    memory_mib: u64,
    /// Files of the web server that are in the file cache.
    web_files: usize,
    file_kib: usize,
    anonymous_mib: u64,
    /// Of the database's table, in its buffers. 0: there is no database.
    rows: u64,
    /// How many of the files are asked for, and parts of the table.
    hot_files: usize,
    trace_s: u64,
    /// What a request to the store takes before its answer begins, beside what the server takes.
    store_request: Duration,
    /// Of a second each. A guest that is scanned answers a third of the requests that it answers otherwise, and all that are measured have
    /// to come up while it is looked at, on a slow host too.
    scan_rounds: u32,
    slowdown_window: Duration,
    /// Windows with and without a scan, in turn.
    slowdown_rounds: u32,
    /// After all memory is there: what the steady state is measured by.
    steady_requests: usize,
    pause_rounds: u32,
    /// To be copied in a save, a quarter of it in use.
    pause_disk_mib: u64,
    /// A file in the guest's memory, and how many of its pages are read one by one.
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
                // Of the order of a store in the same region.
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

/// Of this host, that lead to the guest's services.
#[derive(Clone, Copy)]
struct Ports {
    web: u16,
    database: u16,
}

impl Ports {
    fn free() -> Self {
        Ports { web: free_port(), database: free_port() }
    }

    /// As (port of this host, port of the guest).
    fn forwards(self) -> [(u16, u16); 2] {
        [(self.web, 80), (self.database, 5432)]
    }
}

/// What every side is started on.
struct Bench<'a> {
    rig: &'a Rig,
    shape: Shape,
}

impl Bench<'_> {
    /// What every side has in common: from the order to restore, which is the load's time zero.
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
    // Relative paths in machine.toml start in its own folder.
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
    // Beside traces, of which no time is measured, as it is of the saves above.
    let (traced, mapped) = std::thread::scope(|scope| {
        let mapped = scope.spawn(|| plain::Saved::make(&bench, plain::Format::Mapped));
        (hearth.trace(record), mapped.join().expect("a panic was printed when it happened"))
    });
    traced?;
    let plain = [plain, mapped].map(|saved| saved.map_err(|error| leave_out(&error, record)).ok());
    hearth.measure_scan(record)?;
    let mut lives = Vec::new();
    for &profile in &options.profiles {
        // Whoever reads a snapshot has no limits of its own.
        if let Err(error) = rig.must_limit_all(profile, NAME) {
            record.left_out.push(crate::chain(&error));
            continue;
        }
        for round in 0..bench.shape.rounds {
            let sides = hearth::SIDES.into_iter().filter(|side| is_whole(round) || side.comes_bit_by_bit());
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

/// Every second round is of the sides alone that answer while memory is still on its way: how long that takes differs most.
fn is_whole(round: u32) -> bool {
    round.is_multiple_of(2)
}

/// A side that does not run here is a finding, not the end of the bench.
fn leave_out(error: &RestoreError, record: &mut Record) {
    let why = crate::chain(error);
    eprintln!("{NAME}: left out: {why}");
    record.left_out.push(why);
}

/// `place`: a profile of the disk, or the store.
fn case(side: &str, place: &str) -> String {
    format!("{side}@{place}")
}

/// In the order in which they are told.
fn places() -> impl Iterator<Item = &'static str> {
    Profile::ALL.into_iter().map(Profile::name).chain([store::STORE])
}

/// Waits until so many requests were answered, of a machine that lives.
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
