//! The disk server without a guest: a vhost-user client in this process reads 4 KiB blocks, one at a time.
//!
//! The ember is real: a RAM file full of disk blocks with its ledger, banked as a dead incarnation. The client's memory stands
//! for the new incarnation's RAM and has its own ledger, so every hit does the same work as in a machine: find, check the tag,
//! copy, record, release the old page. As in a machine, each block can be hit once.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_disk::block::{BLOCK_BYTES, DiskId, RamPage};
use hearth_disk::image::{Format, Image, ImageOptions};
use hearth_disk::server::{DiskOptions, DiskServer, Expected, RamPart, Tracking};
use hearth_disk::tag::Tagger;
use hearth_disk::warm::WarmMemory;
use hearth_recovery::ember::Ember;
use hearth_recovery::incarnation::{Incarnation, ram_path};

use super::Options;
use super::client::{Client, ClientError, Request};
use super::image;
use crate::host::profile::Profile;
use crate::host::scratch::Scratch;
use crate::record::Record;
use crate::stats;

const DISK: DiskId = DiskId(0);
/// Large enough that no CPU cache holds it, so memory is as cold as in a machine.
const IMAGE_BYTES: u64 = 128 << 20;
const BLOCKS: u64 = IMAGE_BYTES / BLOCK_BYTES as u64;

#[derive(Debug, thiserror::Error)]
pub enum HostSideError {
    #[error("cannot prepare {path}")]
    Prepare { path: PathBuf, source: io::Error },
    #[error("memory of an incarnation")]
    Incarnation(#[from] hearth_recovery::incarnation::IncarnationError),
    #[error("ember")]
    Ember(#[from] hearth_recovery::ember::EmberError),
    #[error("RAM file")]
    Memory(#[from] hearth_memory::MemoryError),
    #[error("disk image")]
    Image(#[from] hearth_disk::image::ImageError),
    #[error("disk server")]
    Server(#[from] hearth_disk::server::ServerError),
    #[error("overlay image")]
    Overlay(#[from] hearth_disk::image::OverlayError),
    #[error("cannot run {tool} (Debian package {package})")]
    Tool { tool: &'static str, package: &'static str, source: io::Error },
    #[error("client of the disk server")]
    Client(#[from] ClientError),
    #[error("the server returned wrong bytes for block {block}")]
    Wrong { block: u64 },
}

/// Source of a pass's blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// The ember; every block is moved.
    Hit,
    /// The image, with a record in the ledger.
    Miss,
    /// The image, as with `ember = "off"`.
    MissUntracked,
}

impl Way {
    fn case(self) -> &'static str {
        match self {
            Way::Hit => "host-side-hit",
            Way::Miss => "host-side-miss",
            Way::MissUntracked => "host-side-miss-ember-off",
        }
    }
}

pub fn measure(options: &Options, record: &mut Record) -> Result<(), HostSideError> {
    let rounds = if options.quick { 1 } else { 5 };
    let bench = Bench::prepare(&options.folder)?;
    for round in 1..=rounds {
        eprintln!("disk: host side, round {round} of {rounds}");
        // The order of ledger on and off alternates, so that a slow minute of the host affects both alike.
        let misses = if round % 2 == 0 { [Way::Miss, Way::MissUntracked] } else { [Way::MissUntracked, Way::Miss] };
        for way in [Way::Hit].into_iter().chain(misses) {
            let latencies_us = bench.pass(way, record)?;
            for (metric, percent) in [("rand4k_us_p50", 50.0), ("rand4k_us_p99", 99.0)] {
                let value = stats::percentile(&latencies_us, percent).expect("a pass reads many blocks");
                record.add(way.case(), metric, "us", value);
            }
        }
    }
    // Neither figure depends on the disk, so the keys of all profiles get the same one.
    for profile in Profile::ALL {
        let (hit, bytes) = (record.median(Way::Hit.case(), "rand4k_us_p50"), record.median("ledger", "bytes_per_page"));
        record.summarise(&profile.key("rand4k_hit_us_p50"), hit);
        record.summarise(&profile.key("ledger_bytes_per_page"), bytes);
    }
    Ok(())
}

/// The files of this part of the bench, which are removed with it.
struct Bench {
    memory: Scratch,
    work: Scratch,
    tagger: Tagger,
}

impl Bench {
    fn prepare(folder: &Path) -> Result<Self, HostSideError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| HostSideError::Prepare { path, source }
        };
        let shm = Path::new("/dev/shm");
        let memory = Scratch::new(shm, "host-side").map_err(at(shm))?;
        let work = Scratch::new(folder, "host-side").map_err(at(folder))?;
        let image = work.path().join("image");
        image::write(&image, IMAGE_BYTES).map_err(at(&image))?;
        Ok(Bench { memory, work, tagger: Tagger::new(b"key of the bench") })
    }

    fn image(&self) -> PathBuf {
        self.work.path().join("image")
    }

    /// Reads every block of the image once, in random order, one at a time. Returns the microseconds of each read.
    fn pass(&self, way: Way, record: &mut Record) -> Result<Vec<f64>, HostSideError> {
        let ember = match way {
            Way::Hit => Some(self.ember()?),
            _ => None,
        };
        let living = Incarnation::create(self.memory.path(), 2, IMAGE_BYTES, way != Way::MissUntracked)?;
        let warm = ember.map(|ember| WarmMemory::only_serving(ember));
        let server = DiskServer::start(
            disk_options(&self.work.path().join("disk.sock")),
            open_image(&self.image(), Format::Raw)?,
            tracking(&living, &self.tagger, warm),
        )?;
        let mut client = Client::connect(server.socket(), &ram_path(self.memory.path(), 2))?;
        let mut latencies_us = Vec::with_capacity(BLOCKS as usize);
        for (page, block) in shuffled(BLOCKS).into_iter().enumerate() {
            latencies_us.push(client.run(Request::Read { block, page })?);
            if client.first_word(page) != block {
                return Err(HostSideError::Wrong { block });
            }
        }
        if let Some(ledger) = &living.ledger {
            let ledger = ledger.lock().expect("the server's thread does not panic");
            record.add("ledger", "bytes_per_page", "B", ledger.bytes_per_page());
        }
        record.add(way.case(), "from_memory_pct", "%", {
            let counters = server.counters();
            let all = counters.bytes_read_warm + counters.bytes_read_image;
            counters.bytes_read_warm as f64 / all as f64 * 100.0
        });
        Ok(latencies_us)
    }

    /// A dead incarnation whose page `n` holds block `n`.
    fn ember(&self) -> Result<Arc<Ember>, HostSideError> {
        let folder = self.memory.path();
        let dead = Incarnation::create(folder, 1, IMAGE_BYTES, true)?;
        let path = ram_path(folder, 1);
        let failed = |source| HostSideError::Prepare { path: path.clone(), source };
        let (image, ram) = open_both(&self.image(), &path).map_err(failed)?;
        let ledger = dead.ledger.clone().expect("created with a ledger");
        let mut ledger = ledger.lock().expect("no other thread uses this ledger");
        let mut block = [0; BLOCK_BYTES];
        for number in 0..BLOCKS {
            let offset = number * BLOCK_BYTES as u64;
            image.read_exact_at(&mut block, offset).and_then(|()| ram.write_all_at(&block, offset)).map_err(failed)?;
            ledger.record(RamPage(number as u32), DISK, number, self.tagger.tag(&block));
        }
        drop(ledger);
        let ember = Ember::new(folder, self.tagger.clone());
        ember.bank(dead)?;
        ember.settle()?;
        Ok(Arc::new(ember))
    }
}

fn open_both(image: &Path, ram: &Path) -> io::Result<(File, File)> {
    Ok((File::open(image)?, File::options().write(true).open(ram)?))
}

/// Opens an image as the keeper does.
pub fn open_image(path: &Path, format: Format) -> Result<Image, HostSideError> {
    let options = ImageOptions {
        path: path.to_owned(),
        format,
        read_only: false,
        direct: true,
        lock_patience: Duration::from_secs(5),
        owner: None,
    };
    Ok(Image::open(&options)?)
}

/// The tracking of an incarnation's disk. `None` if it has no ledger.
pub fn tracking(living: &Incarnation, tagger: &Tagger, warm: Option<WarmMemory>) -> Option<Tracking> {
    let part = |((device, inode), pages)| RamPart { device, inode, pages };
    let ram = living.ram.identities().map(part).collect();
    let ledger = living.ledger.clone()?;
    Some(Tracking { ram, tagger: tagger.clone(), ledger, warm })
}

pub fn disk_options(socket: &Path) -> DiskOptions {
    DiskOptions { memory_slots: true, expected: Expected::anyone(), ..DiskOptions::new(DISK, "bench", socket) }
}

/// A random order that is the same in every pass, so that passes can be compared.
pub fn shuffled(count: u64) -> Vec<u64> {
    let mut order: Vec<u64> = (0..count).collect();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for last in (1..order.len()).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(last, (random % (last as u64 + 1)) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffle_keeps_every_block_out_of_order() {
        let mut order = shuffled(1000);
        assert!(order.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() < 20);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..1000));
    }
}
