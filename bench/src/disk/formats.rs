//! The cost of image formats: raw, qcow2, and qcow2 over a base image, as every restored machine has it. Hearth and QEMU each
//! serve an image of every format, with the same contents, to a client that sends one request at a time.
//!
//! read data -> write into empty clusters (64 KiB; 4 KiB) -> overwrite what was written; each write is followed by a flush
//!
//! All images are served at the same time and take turns, so that a slow moment of the host affects all alike. A write and its
//! flush are one turn: the images share a file system, and a flush of one commits what others have allocated before it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hearth_disk::block::BLOCK_BYTES;
use hearth_disk::image::{Format, Unwritten, create_overlay};
use hearth_disk::server::DiskServer;
use hearth_disk::tag::Tagger;
use hearth_recovery::incarnation::{Incarnation, ram_path};

use super::client::{Client, Request};
use super::host_side::{HostSideError, disk_options, open_image, shuffled, tracking};
use super::storage_daemon::{PACKAGE, StorageDaemon, TOOL};
use super::{NAME, Options, Server, image};
use crate::host::scratch::Scratch;
use crate::record::Record;
use crate::stats::{self, ratio};
use crate::table::{Table, figure_or_dash};

const CLUSTER_BLOCKS: u64 = 16;
/// Blocks with data from the start; empty clusters follow.
const DATA_BLOCKS: u64 = (32 << 20) / BLOCK_BYTES as u64;
const READS: usize = 200;
/// Empty clusters per round for each size of write. As many blocks are overwritten.
const WRITES: usize = 32;
const RAM_BYTES: u64 = 4 << 20;
/// Page that the client reads to; writes come from the pages before it.
const READ_PAGE: usize = CLUSTER_BLOCKS as usize;

const READ: &str = "read4k";
const OVERWRITE: &str = "overwrite4k";
const OVERWRITE_FLUSH: &str = "flush_after_overwrite";
const FIRST_WRITE_4K: &str = "first_write4k";
const FIRST_WRITE_4K_FLUSH: &str = "flush_after_first_write4k";
const FIRST_WRITE_64K: &str = "first_write64k";
const FIRST_WRITE_64K_FLUSH: &str = "flush_after_first_write";
const METRICS: [&str; 7] =
    [READ, OVERWRITE, OVERWRITE_FLUSH, FIRST_WRITE_4K, FIRST_WRITE_4K_FLUSH, FIRST_WRITE_64K, FIRST_WRITE_64K_FLUSH];

/// A kind of image that is compared with the others.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    name: &'static str,
    format: Format,
    /// It lies over a raw image that has data everywhere.
    has_base: bool,
}

impl Kind {
    const RAW: Kind = Kind { name: "raw", format: Format::Raw, has_base: false };
    const QCOW2: Kind = Kind { name: "qcow2", format: Format::Qcow2, has_base: false };
    const OVERLAY: Kind = Kind { name: "overlay", format: Format::Qcow2, has_base: true };
    const ALL: [Kind; 3] = [Kind::RAW, Kind::QCOW2, Kind::OVERLAY];

    fn case(self, server: Server) -> String {
        format!("{}@{}", self.name, server.name())
    }
}

/// A served image and its client.
struct Target {
    case: String,
    // Order matters: the client must be dropped before its server.
    client: Client,
    _server: Running,
    latencies_us: BTreeMap<&'static str, Vec<f64>>,
}

enum Running {
    Hearth { _server: DiskServer },
    Qemu { _daemon: StorageDaemon },
}

/// The requests that a target gets before the next target's turn, each with its metric.
type Turn = Vec<(&'static str, Request)>;

pub fn measure(options: &Options, record: &mut Record) -> Result<(), HostSideError> {
    let rounds = if options.quick { 1 } else { 8 };
    let bench = Bench::prepare(&options.folder, rounds)?;
    let mut targets = bench.start(record)?;
    let mut empty = shuffled((rounds * 2 * WRITES) as u64);
    empty.iter_mut().for_each(|cluster| *cluster = DATA_BLOCKS + *cluster * CLUSTER_BLOCKS);
    let mut data = shuffled(DATA_BLOCKS);
    for round in 1..=rounds {
        eprintln!("{NAME}: image formats, round {round} of {rounds}");
        let turns = turns(&data.split_off(data.len() - READS), &empty.split_off(empty.len() - 2 * WRITES));
        for (number, turn) in turns.iter().enumerate() {
            // Each target is first in turn, and follows each of its neighbours.
            targets.rotate_left(1);
            if number % targets.len() == 0 {
                targets.reverse();
            }
            for target in &mut targets {
                target.take(turn)?;
            }
        }
        for target in &mut targets {
            target.check(&turns)?;
            target.report(record);
        }
    }
    summarise(record);
    Ok(())
}

/// The turns of one round: reads of these data blocks, and writes into these empty clusters.
fn turns(data: &[u64], empty: &[u64]) -> Vec<Turn> {
    let read = |&block: &u64| vec![(READ, Request::Read { block, page: READ_PAGE })];
    let write = |metric, block, blocks: u64, flush_metric| {
        let write = Request::Write { block, blocks: blocks as usize, page: 0 };
        vec![(metric, write), (flush_metric, Request::Flush)]
    };
    let (whole, partial) = empty.split_at(empty.len() / 2);
    let whole_turns = whole.iter().map(|&at| write(FIRST_WRITE_64K, at, CLUSTER_BLOCKS, FIRST_WRITE_64K_FLUSH));
    let partial_turns = partial.iter().map(|&at| write(FIRST_WRITE_4K, at + 5, 1, FIRST_WRITE_4K_FLUSH));
    let overwrites = whole.iter().map(|&at| write(OVERWRITE, at + 9, 1, OVERWRITE_FLUSH));
    data.iter().map(read).chain(whole_turns).chain(partial_turns).chain(overwrites).collect()
}

impl Target {
    fn new(kind: Kind, server: Server, client: Client, running: Running) -> Self {
        Target { case: kind.case(server), client, _server: running, latencies_us: BTreeMap::new() }
    }

    fn take(&mut self, turn: &Turn) -> Result<(), HostSideError> {
        for &(metric, request) in turn {
            if let Request::Write { block, blocks, page } = request {
                (0..blocks).for_each(|at| self.client.put(page + at, &image::block(block + at as u64)));
            }
            let took = match request {
                Request::Read { block, .. } => self.read(block)?,
                _ => self.client.run(request)?,
            };
            self.latencies_us.entry(metric).or_default().push(took);
        }
        Ok(())
    }

    fn read(&mut self, block: u64) -> Result<f64, HostSideError> {
        let took = self.client.run(Request::Read { block, page: READ_PAGE })?;
        match self.client.first_word(READ_PAGE) == block {
            true => Ok(took),
            false => Err(HostSideError::Wrong { block }),
        }
    }

    /// Checks that what the turns wrote is there.
    fn check(&mut self, turns: &[Turn]) -> Result<(), HostSideError> {
        for (_, request) in turns.iter().flatten() {
            if let Request::Write { block, .. } = request {
                self.read(*block)?;
            }
        }
        Ok(())
    }

    /// Records the medians of a finished round.
    fn report(&mut self, record: &mut Record) {
        for (metric, latencies_us) in std::mem::take(&mut self.latencies_us) {
            let value = stats::median(&latencies_us).expect("a round has each request many times");
            record.add(&self.case, &format!("{metric}_us_p50"), "us", value);
        }
    }
}

/// The files of this part of the bench, which are removed with it.
struct Bench {
    memory: Scratch,
    work: Scratch,
}

impl Bench {
    fn prepare(folder: &Path, rounds: usize) -> Result<Self, HostSideError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| HostSideError::Prepare { path, source }
        };
        let shm = Path::new("/dev/shm");
        let bench = Bench {
            memory: Scratch::new(shm, "formats").map_err(at(shm))?,
            // An overlay names its base by an absolute path.
            work: std::path::absolute(folder)
                .and_then(|folder| Scratch::new(&folder, "formats"))
                .map_err(at(folder))?,
        };
        let disk_bytes = (DATA_BLOCKS + (rounds * 2 * WRITES) as u64 * CLUSTER_BLOCKS) * BLOCK_BYTES as u64;
        // Each server has its own copies: otherwise one would get from the disk's cache what the other has read.
        for server in Server::BOTH {
            let (raw, base) = (bench.path(Kind::RAW, server), bench.base(server));
            image::write(&base, disk_bytes).map_err(at(&base))?;
            create_overlay(&bench.path(Kind::OVERLAY, server), &base, "raw")?;
            image::write(&raw, DATA_BLOCKS * BLOCK_BYTES as u64).map_err(at(&raw))?;
            let lengthened = File::options().write(true).open(&raw).and_then(|file| file.set_len(disk_bytes));
            lengthened.map_err(at(&raw))?;
            convert(&raw, &bench.path(Kind::QCOW2, server))?;
        }
        Ok(bench)
    }

    fn path(&self, kind: Kind, server: Server) -> PathBuf {
        self.work.path().join(kind.case(server))
    }

    fn base(&self, server: Server) -> PathBuf {
        self.work.path().join(format!("base@{}", server.name()))
    }

    fn start(&self, record: &mut Record) -> Result<Vec<Target>, HostSideError> {
        let mut targets = Vec::new();
        for (number, kind) in (1..).zip(Kind::ALL) {
            targets.push(self.start_hearth(kind, number)?);
        }
        let qemu = (4..).zip(Kind::ALL).map(|(number, kind)| self.start_qemu(kind, number));
        match qemu.collect::<Result<Vec<_>, _>>() {
            Err(HostSideError::Tool { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                record.left_out.push(format!("image formats with QEMU: no {TOOL} (Debian package {PACKAGE})"));
            }
            qemu => targets.extend(qemu?),
        }
        Ok(targets)
    }

    fn start_hearth(&self, kind: Kind, number: u32) -> Result<Target, HostSideError> {
        let living = Incarnation::create(self.memory.path(), number, RAM_BYTES, true)?;
        let path = self.path(kind, Server::Hearth);
        let mut image = open_image(&path, kind.format)?;
        image.note_changes_in(&self.memory.path().join(format!("tables-{number}")), Unwritten::Drop);
        let tracking = tracking(&living, &Tagger::new(b"key of the bench"), None);
        let server = DiskServer::start(disk_options(&path.with_extension("sock")), image, tracking)?;
        let client = Client::connect(server.socket(), &ram_path(self.memory.path(), number))?;
        Ok(Target::new(kind, Server::Hearth, client, Running::Hearth { _server: server }))
    }

    fn start_qemu(&self, kind: Kind, number: u32) -> Result<Target, HostSideError> {
        // Only its memory is used.
        Incarnation::create(self.memory.path(), number, RAM_BYTES, false)?;
        let path = self.path(kind, Server::Qemu);
        let socket = path.with_extension("sock");
        let driver = if kind.format == Format::Raw { "raw" } else { "qcow2" };
        let base = kind.has_base.then(|| self.base(Server::Qemu));
        let daemon = StorageDaemon::start(&socket, &path, driver, base.as_deref())
            .map_err(|source| HostSideError::Tool { tool: TOOL, package: PACKAGE, source })?;
        let client = Client::connect(&socket, &ram_path(self.memory.path(), number))?;
        Ok(Target::new(kind, Server::Qemu, client, Running::Qemu { _daemon: daemon }))
    }
}

/// Converts a raw image to qcow2, with clusters allocated where the raw image has data.
fn convert(raw: &Path, qcow2: &Path) -> Result<(), HostSideError> {
    let tool = "qemu-img";
    let failed = |source| HostSideError::Tool { tool, package: "qemu-utils", source };
    let mut command = Command::new(tool);
    command.args(["convert", "-f", "raw", "-O", "qcow2"]).args([raw, qcow2]).stdin(Stdio::null());
    let status = command.status().map_err(failed)?;
    if !status.success() {
        return Err(failed(io::Error::other(format!("ended with {status}"))));
    }
    fs::File::open(qcow2).and_then(|file| file.sync_all()).map_err(failed)
}

fn summarise(record: &mut Record) {
    let median = |record: &Record, kind: Kind, server: Server, metric: &str| {
        record.median(&kind.case(server), &format!("{metric}_us_p50"))
    };
    for kind in [Kind::QCOW2, Kind::OVERLAY] {
        for metric in [READ, OVERWRITE, FIRST_WRITE_4K, FIRST_WRITE_64K, FIRST_WRITE_64K_FLUSH] {
            let own = median(record, kind, Server::Hearth, metric);
            let raw = median(record, Kind::RAW, Server::Hearth, metric);
            let qemu = median(record, kind, Server::Qemu, metric);
            for (other, value) in [("raw", raw), ("qemu", qemu)] {
                record.summarise(&format!("{}_{metric}_vs_{other}_ratio", kind.name), ratio(own, value));
            }
        }
    }
}

pub fn is_case(case: &str) -> bool {
    Kind::ALL.iter().any(|kind| Server::BOTH.iter().any(|&server| kind.case(server) == case))
}

/// The table of medians in microseconds, with a row for each format and server.
pub fn table(record: &Record) -> Table {
    let head = [
        "format@server",
        "read 4K",
        "overwrite 4K",
        "flush after overwrite",
        "first write 4K",
        "flush after first 4K",
        "first write 64K",
        "flush after first 64K",
    ];
    let mut table = Table::new(head);
    for kind in Kind::ALL {
        for case in Server::BOTH.map(|server| kind.case(server)) {
            let medians = METRICS.map(|metric| figure_or_dash(record.median(&case, &format!("{metric}_us_p50"))));
            table.row([case.clone()].into_iter().chain(medians));
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_is_first_written_once() {
        let (data, empty): (Vec<u64>, Vec<u64>) = ((0..4).collect(), (0..6).map(|n| DATA_BLOCKS + n * 16).collect());
        let mut written = Vec::new();
        for turn in turns(&data, &empty) {
            match turn[..] {
                [(READ, Request::Read { block, .. })] => assert!(block < DATA_BLOCKS),
                [(OVERWRITE, Request::Write { block, blocks: 1, .. }), (OVERWRITE_FLUSH, Request::Flush)] => {
                    assert!(written.contains(&(block / CLUSTER_BLOCKS)), "{block} is not allocated yet");
                }
                [(_, Request::Write { block, blocks, .. }), (_, Request::Flush)] => {
                    assert_eq!(block / CLUSTER_BLOCKS, (block + blocks as u64 - 1) / CLUSTER_BLOCKS);
                    assert!(block >= DATA_BLOCKS && !written.contains(&(block / CLUSTER_BLOCKS)));
                    written.push(block / CLUSTER_BLOCKS);
                }
                _ => panic!("{turn:?}"),
            }
        }
        assert_eq!(written.len(), empty.len());
    }

    #[test]
    fn formats_are_compared_with_raw_and_qemu() {
        let medians = [("qcow2@hearth", 90.0), ("raw@hearth", 60.0), ("qcow2@qemu", 75.0)];
        let mut record = Record::of("disk", medians.map(|(case, us)| (case, "read4k_us_p50", us)));
        summarise(&mut record);
        assert_eq!(record.summary["qcow2_read4k_vs_raw_ratio"], 1.5);
        assert_eq!(record.summary["qcow2_read4k_vs_qemu_ratio"], 1.2);
        assert_eq!(record.summary.len(), 2, "ratios without a measurement are left out");
        assert!(is_case("qcow2@hearth") && !is_case("hearth@asis"));
    }
}
