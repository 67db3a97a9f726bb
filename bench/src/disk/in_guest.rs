//! Misses in a guest: two disks of one machine with the same contents, one served by Hearth, one by QEMU itself (io_uring,
//! cache=none, its own thread), are read in turn, with caches dropped before each read.
//!
//! QEMU's disk is also the baseline for the ledger's cost. It is measured in machines with and without ember, and the figure is
//! how Hearth's disk compares with it in each, so that a change of the host's load between them cancels out.

use std::path::{Path, PathBuf};
use std::time::Duration;

use hearth_vmtest::{Disk, Drives, TestVm};

use super::image;
use super::{NAME, Options, Server};
use crate::host::facts::Accelerator;
use crate::host::profile::Profile;
use crate::host::scratch::Scratch;
use crate::host::throttle::{Throttle, ThrottleError};
use crate::record::Record;
use crate::stats::{self, degradation_pct};

const IMAGE_BYTES: u64 = 256 << 20;
const LIMIT: Duration = Duration::from_secs(300);

#[derive(Debug, thiserror::Error)]
pub enum InGuestError {
    #[error("cannot prepare {path}")]
    Prepare { path: PathBuf, source: std::io::Error },
    #[error("machine")]
    Machine(#[from] hearth_vmtest::Error),
    #[error("disk profile")]
    Throttle(#[from] ThrottleError),
    #[error("the guest has no disk with serial number {0}")]
    NoDisk(&'static str),
    #[error("in the guest, `{command}` did not report {figure}")]
    NoFigure { command: String, figure: &'static str },
}

impl Server {
    /// Serial number by which the guest finds the disk.
    fn serial(self) -> &'static str {
        match self {
            Server::Hearth => "hearth-side",
            Server::Qemu => "qemu-side",
        }
    }
}

/// Two ways of reading that miss, each with its figure. More is better in both.
#[derive(Clone, Copy)]
pub enum Read {
    Sequential,
    Random4k,
}

impl Read {
    pub const BOTH: [Read; 2] = [Read::Sequential, Read::Random4k];

    pub fn word(self) -> &'static str {
        match self {
            Read::Sequential => "seq",
            Read::Random4k => "rand4k",
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            Read::Sequential => "MiB/s",
            Read::Random4k => "1/s",
        }
    }
}

struct Images {
    folder: Scratch,
}

impl Images {
    fn prepare(folder: &Path) -> Result<Self, InGuestError> {
        let failed = |source| InGuestError::Prepare { path: folder.to_owned(), source };
        let images = Images { folder: Scratch::new(folder, "in-guest").map_err(failed)? };
        for server in Server::BOTH {
            image::write(&images.path(server), IMAGE_BYTES).map_err(failed)?;
        }
        Ok(images)
    }

    fn path(&self, server: Server) -> PathBuf {
        self.folder.path().join(format!("{}.img", server.serial()))
    }
}

pub fn measure(options: &Options, record: &mut Record) -> Result<(), InGuestError> {
    let images = Images::prepare(&options.folder)?;
    let throttle = Throttle::new(&options.folder);
    record.profile_by = match &throttle {
        Ok(throttle) => throttle.describe(),
        Err(error) => format!("nothing: {error}"),
    };
    let turns = if options.quick { 1 } else { 2 };
    for turn in 1..=turns {
        for ember in [true, false] {
            let word = if ember { "on" } else { "off" };
            eprintln!("{NAME}: in the guest, turn {turn} of {turns}, ember {word}");
            measure_machine(&images, &throttle, ember, options, record)?;
        }
    }
    if let Err(error) = throttle {
        record.left_out.push(format!("profiles cloud and paper: {error}"));
    }
    for profile in profiles(options.quick) {
        summarise(record, profile);
    }
    Ok(())
}

fn profiles(quick: bool) -> Vec<Profile> {
    if quick { vec![Profile::Paper, Profile::Asis] } else { Profile::ALL.to_vec() }
}

fn measure_machine(
    images: &Images,
    throttle: &Result<Throttle, ThrottleError>,
    ember: bool,
    options: &Options,
    record: &mut Record,
) -> Result<(), InGuestError> {
    let start = || boot(images, ember, record.machine.accelerator);
    let vm = match throttle {
        Ok(throttle) => throttle.within(start)??,
        Err(_) => start()?,
    };
    for profile in profiles(options.quick) {
        match throttle {
            Ok(throttle) => throttle.limit(profile)?,
            Err(_) if profile != Profile::Asis => continue,
            Err(_) => {}
        }
        for round in 0..rounds(profile, options.quick) {
            measure_round(&vm, profile, ember, round, record)?;
        }
    }
    // The machine's end should not be throttled.
    throttle.as_ref().map_or(Ok(()), |throttle| throttle.limit(Profile::Asis))?;
    Ok(())
}

/// Number of rounds. A throttled disk gives the same figure each time; an unlimited one needs many.
fn rounds(profile: Profile, quick: bool) -> u32 {
    match profile {
        _ if quick => 1,
        Profile::Asis => 12,
        Profile::Cloud => 3,
        Profile::Paper => 2,
    }
}

fn boot(images: &Images, ember: bool, accelerator: Accelerator) -> hearth_vmtest::Result<TestVm> {
    let drive =
        format!("file={},if=none,id=bench,format=raw,cache=none,aio=io_uring", images.path(Server::Qemu).display());
    let device = format!("virtio-blk-pci,drive=bench,serial={},iothread=bench-io", Server::Qemu.serial());
    let extra = ["-object", "iothread,id=bench-io", "-drive", &drive, "-device", &device];
    let disk = Disk::in_place(&images.path(Server::Hearth)).setting("serial", Server::Hearth.serial());
    let extra: Vec<String> = extra.map(str::to_owned).to_vec();
    let vm = TestVm::busybox("bench").disk(disk).setting("extra_qemu_args", extra);
    let vm = if ember { vm } else { vm.without_ember() };
    vm.setting("accelerator", accelerator.name()).boot()
}

/// Reads both disks in both ways. The disk that goes first alternates.
fn measure_round(
    vm: &TestVm,
    profile: Profile,
    ember: bool,
    round: u32,
    record: &mut Record,
) -> Result<(), InGuestError> {
    let servers = if round.is_multiple_of(2) { Server::BOTH } else { [Server::Qemu, Server::Hearth] };
    for read in Read::BOTH {
        let mut figures = [0.0; 2];
        for server in servers {
            let figure = read_once(vm, server, read, profile)?;
            record.add(&case(server, ember, profile), &format!("{}_miss", read.word()), read.unit(), figure);
            figures[usize::from(server == Server::Qemu)] = figure;
        }
        let ratio = figures[0] / figures[1];
        record.add(&case(Server::Hearth, ember, profile), &format!("{}_miss_vs_qemu", read.word()), "ratio", ratio);
    }
    Ok(())
}

fn read_once(vm: &TestVm, server: Server, read: Read, profile: Profile) -> Result<f64, InGuestError> {
    let serial = server.serial();
    let find =
        format!("for d in /sys/block/vd*; do [ \"$(cat $d/serial)\" = {serial} ] && echo ${{d##*/}}; done; true");
    let disk = vm.sh(&find)?;
    let disk = disk.trim();
    if disk.is_empty() {
        return Err(InGuestError::NoDisk(serial));
    }
    let count = if profile == Profile::Paper { 400 } else { 4000 };
    read_disk(vm, disk, read, count)
}

/// Drops the guest's caches and reads a disk: all of it, in MiB/s, or so many blocks in random order, in blocks a second.
pub fn read_disk(vm: &impl Drives, disk: &str, read: Read, count: u32) -> Result<f64, InGuestError> {
    let command = match read {
        Read::Sequential => format!("probe drop-caches && probe read /dev/{disk}"),
        Read::Random4k => format!("probe drop-caches && probe direct-randread /dev/{disk} {count}"),
    };
    let output = vm.run_within(&command, LIMIT)?;
    let figure = match read {
        Read::Sequential => output.number("mib_per_second"),
        Read::Random4k => output.number("seconds").map(|seconds| f64::from(count) / seconds),
    };
    let wanted = if matches!(read, Read::Sequential) { "mib_per_second" } else { "seconds" };
    figure.ok_or(InGuestError::NoFigure { command, figure: wanted })
}

fn case(server: Server, ember: bool, profile: Profile) -> String {
    let side = match (server, ember) {
        (Server::Qemu, true) => "qemu-direct",
        (Server::Qemu, false) => "qemu-direct-beside-ember-off",
        (Server::Hearth, true) => "hearth",
        (Server::Hearth, false) => "hearth-ember-off",
    };
    format!("{side}@{}", profile.name())
}

fn summarise(record: &mut Record, profile: Profile) {
    let ratio = |record: &Record, read: Read, ember: bool| {
        record.median(&case(Server::Hearth, ember, profile), &format!("{}_miss_vs_qemu", read.word()))
    };
    let mut costs = Vec::new();
    for read in Read::BOTH {
        let (on, off) = (ratio(record, read, true), ratio(record, read, false));
        record.summarise(&profile.key(&format!("{}_miss_vs_qemu_ratio", read.word())), on);
        costs.extend(off.zip(on).map(|(off, on)| degradation_pct(off, on)));
    }
    // The more expensive of the two ways of reading.
    record.summarise(&profile.key("ledger_cost_pct"), stats::percentile(&costs, 100.0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_cost_is_the_more_expensive_reads() {
        let rows = [
            ("hearth@paper", "seq_miss_vs_qemu", 0.96),
            ("hearth-ember-off@paper", "seq_miss_vs_qemu", 1.0),
            ("hearth@paper", "rand4k_miss_vs_qemu", 1.1),
            ("hearth-ember-off@paper", "rand4k_miss_vs_qemu", 1.1),
        ];
        let mut record = Record::of("disk", rows);
        summarise(&mut record, Profile::Paper);
        assert_eq!(record.summary["seq_miss_vs_qemu_ratio"], 0.96);
        assert_eq!(record.summary["rand4k_miss_vs_qemu_ratio"], 1.1);
        assert_eq!(record.summary["ledger_cost_pct"], 4.0);
    }
}
