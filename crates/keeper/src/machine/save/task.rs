//! The thread of a save: a scan, if requested; memory while the guest runs; the last pages while the guest is paused;
//! then images and manifest. The loop pauses the guest when the thread asks for it, and describes the devices and
//! disks.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use hearth_api::{EventKind, ScanStatus};
use hearth_disk::image::FrozenImage;
use hearth_disk::ledger::Ledger;
use hearth_disk::pressure::Pressure;
use hearth_memory::RamFile;
use hearth_qemu::{Qmp, QmpError};
use hearth_recovery::snapshot::LocalDisks;
use hearth_recovery::snapshot::blocks::DiskBlocks;
use hearth_recovery::snapshot::dedup::{Candidate, candidates, compare};
use hearth_recovery::snapshot::pages::{Compression, PageReader, Sealed};
use hearth_recovery::snapshot::save::{Approach, RamCopy, SaveError, Writers, pack};
use hearth_recovery::snapshot::scan::{AccessScan, ScanPlan, Used};
use hearth_recovery::snapshot::upload::Order;
use hearth_recovery::snapshot::{DiskPart, Draft, Manifest, RamPart};

use super::super::work::give_way;
use super::Tell;
use super::freeze::Freezer;
use super::progress::{Progress, Reporter};
use super::upload::{CompleteSnapshot, Orders, Upload};
use crate::event::SaveMessage;

/// Message from the loop to the thread.
pub enum SaveCommand {
    /// The journal says that file systems may be frozen, or that the guest is scanned.
    Noted,
    /// The guest is paused.
    Held,
    PausedState(Box<PausedState>),
}

/// The paused guest without its memory: what the snapshot shows.
pub struct PausedState {
    pub machine: String,
    pub state: Vec<u8>,
    /// Manifest without the parts that still have to be written.
    pub manifest: Manifest,
    pub images: Vec<ImageCopy>,
}

/// A disk's image in the snapshot, in the order of the manifest.
pub struct ImageCopy {
    pub path: PathBuf,
    pub way: CopyWay,
}

pub enum CopyWay {
    /// A clone: complete, but perhaps not on the disk yet.
    Shared(File),
    Frozen(Arc<FrozenImage>),
}

pub struct Task {
    pub draft: Draft,
    pub ram: Arc<RamFile>,
    pub sight: AccessTracking,
    pub compress: bool,
    /// Freezes the guest's file systems, if requested.
    pub freezer: Option<Freezer>,
    /// Ledger that says which pages may be blocks of disks. Such pages are stored as the block's location.
    pub dedup: Option<Arc<Mutex<Ledger>>>,
    pub commands: Receiver<SaveCommand>,
    pub progress: Arc<Progress>,
    pub tell: Tell,
    /// Load of the guest's disks.
    pub disks: Vec<Pressure>,
    /// Upload to an object store. None if the snapshot stays on this host.
    pub upload: Option<Upload>,
}

/// How accesses to the guest's memory are observed.
pub enum AccessTracking {
    /// First all accesses, then writes.
    Uses(AccessScan, ScanPlan, ScannedQemu),
    Writes(Writers),
    /// Not at all: the guest is paused from the beginning.
    Nothing,
}

/// The QEMU of a guest that is scanned.
pub struct ScannedQemu {
    pub qmp: Arc<Qmp>,
    pub emulates: bool,
}

impl ScannedQemu {
    /// Makes QEMU translate emulated code again: code that is already translated is not read
    /// again, so the scan would miss it. Makes the guest announce itself on its networks, as after a restore: this wakes whatever
    /// watches its links, and the scan sees the pages that they use. Both come after the scan has begun to look.
    fn prepare(&self) {
        if self.emulates
            && let Err(error) = self.qmp.set_fresh_translation(true)
        {
            tracing::warn!(%error, "the scan misses code that QEMU translated earlier");
        }
        if let Err(error) = self.qmp.announce() {
            tracing::warn!(%error, "the scan misses pages that a guest uses to announce itself");
        }
    }
}

/// Ends what `ScannedQemu::prepare` began.
pub fn end_fresh_translation(qmp: &Qmp) {
    match qmp.set_fresh_translation(false) {
        Ok(()) | Err(QmpError::Ended) => {}
        Err(error) => {
            tracing::warn!(%error, "cannot restore QEMU's translation mode; the guest runs slower until the next QEMU");
        }
    }
}

impl AccessTracking {
    /// Scans, if requested. Returns the pages that were used, and the watch on writes from now on, if writes can be
    /// watched.
    fn scan(
        self,
        commands: &Receiver<SaveCommand>,
        progress: &Progress,
        tell: &Tell,
        reporter: &Reporter<'_>,
    ) -> Result<(Option<Used>, Option<Writers>), SaveError> {
        let (scan, plan, qemu) = match self {
            Self::Uses(scan, plan, qemu) => (scan, plan, qemu),
            Self::Writes(writers) => return Ok((None, Some(writers))),
            Self::Nothing => return Ok((None, None)),
        };
        let (began, rounds) = (Instant::now(), plan.rounds);
        tell.say(SaveMessage::Scanning);
        next(commands, progress)?;
        let used = scan.run(plan, |rounds_done, period| {
            if rounds_done == 0 {
                qemu.prepare();
            }
            reporter.scan(ScanStatus { rounds, rounds_done }, period)
        });
        if qemu.emulates {
            end_fresh_translation(&qemu.qmp);
        }
        let used = used?;
        tell.say(SaveMessage::Scanned(EventKind::SaveScanned {
            folder: reporter.folder().to_owned(),
            pages: used.count(),
            rounds,
            duration_ms: began.elapsed().as_secs_f64() * 1e3,
        }));
        Ok((Some(used), Some(scan.then_writes()?)))
    }
}

/// Figures of a finished save.
#[derive(Debug)]
pub struct Written {
    pub ram: Sealed,
    pub approach: Option<Approach>,
    /// Pages of memory copied while the guest was paused.
    pub pages_held: u64,
    pub pages_on_disks: u64,
}

impl Task {
    pub fn run(mut self) -> Result<Written, SaveError> {
        match self.upload.take() {
            None => {
                let CompleteSnapshot { written, manifest, draft } = self.write(&Orders::to_nobody())?;
                draft.finish(&manifest)?;
                Ok(written)
            }
            Some(upload) => {
                let (progress, tell, keeps_disks) = (self.progress.clone(), self.tell.clone(), self.dedup.is_some());
                upload.send(&progress, &tell, keeps_disks, |orders| self.write(orders))
            }
        }
    }

    fn write(self, orders: &Orders) -> Result<CompleteSnapshot, SaveError> {
        let Self { upload: _, mut draft, ram, sight, compress, freezer, dedup, commands, progress, tell, disks } = self;
        let mut reporter = Reporter::new(&progress, &tell);
        if let Some(freezer) = &freezer {
            freezer.must_be_answered(&progress)?;
        }
        let (mut used, writers) = sight.scan(&commands, &progress, &tell, &reporter)?;
        reporter.begin_copy();
        let is_packed = compress || dedup.is_some();
        let path = if is_packed { draft.plain_ram_path() } else { draft.ram_path() };
        let ram_pages = ram.pages();
        let outgoing = if is_packed { None } else { orders.outgoing(ram_pages) };
        let mut copy = RamCopy::begin(ram, &path)?.going_out(outgoing);
        let mut approach = match &writers {
            Some(writers) => {
                copy.copy_all(&mut reporter)?;
                Some(copy.approach(writers, &mut reporter)?)
            }
            None => None,
        };
        if let Some((used, writers)) = used.as_mut().zip(writers.as_ref()) {
            // Do this while the guest runs: it takes milliseconds.
            used.add_mapped(writers)?;
        }
        if let Some(freezer) = &freezer {
            freezer.freeze(&commands, &progress, &tell, &reporter)?;
            if let (Some(writers), Some(approach)) = (&writers, &mut approach) {
                // Pages that the guest has written while the thread waited for its agent.
                approach.add(copy.approach(writers, &mut reporter)?);
            }
        }
        orders.give(Order::Hold);
        tell.say(SaveMessage::Settled);
        next(&commands, &progress)?;
        let mut pages_held = match &writers {
            Some(writers) => copy.keep_rest(writers, &mut reporter)?,
            None => copy.copy_all(&mut reporter)?,
        };
        let Some(paused) = next(&commands, &progress)? else { return Err(SaveError::Abandoned) };
        if let Some(writers) = &writers {
            // QEMU has handed over its state, and nobody writes any more.
            pages_held += copy.keep_rest(writers, &mut reporter)?;
        }
        tell.say(SaveMessage::Taken);
        orders.give(Order::GoOn);
        drop(writers);
        let candidates = dedup.map(|ledger| candidates(&ledger));
        let PausedState { machine, state, mut manifest, images } = *paused;
        // Images first: the guest's own writes have to wait for them.
        for (image, part) in images.into_iter().zip(&mut manifest.disks) {
            part.bytes = image.complete(&disks, &mut reporter)?;
            part.modified = Some(draft.disk_modified(&part.name)?);
            orders.give(Order::Disk(part.clone()));
        }
        let (mut sealed, mut pages_on_disks) = (copy.finish()?, 0);
        if is_packed {
            let compression = if compress { Compression::Zstd } else { Compression::None };
            (sealed, pages_on_disks) =
                pack_ram(&mut draft, &manifest.disks, candidates, compression, orders, &mut reporter)?;
        }
        let Sealed { bytes, pages, seal } = sealed.clone();
        manifest.ram = RamPart { bytes, pages, seal };
        manifest.machine_file = draft.write_machine(&machine)?;
        manifest.state = draft.write_state(&state)?;
        if let Some(used) = used.map(|used| used.best_first()).filter(|used| !used.is_empty()) {
            draft.write_working_set(&used, &manifest.disks)?;
        }
        progress.must_go_on()?;
        Ok(CompleteSnapshot { written: Written { ram: sealed, approach, pages_held, pages_on_disks }, manifest, draft })
    }
}

/// Replaces the plain copy of memory by a packed one. `candidates`: pages that may be on the disks as well. Returns the
/// number of those that are.
fn pack_ram(
    draft: &mut Draft,
    disks: &[DiskPart],
    candidates: Option<Vec<Candidate>>,
    compression: Compression,
    orders: &Orders,
    reporter: &mut Reporter<'_>,
) -> Result<(Sealed, u64), SaveError> {
    let plain = PageReader::open(&draft.plain_ram_path())?;
    let elsewhere = match candidates {
        Some(candidates) => {
            let disks = DiskBlocks::open(&LocalDisks::complete(draft.folder()), disks)?;
            compare(&candidates, &plain, &disks, reporter)?
        }
        None => Vec::new(),
    };
    let pages_on_disks = elsewhere.iter().map(|chunk| chunk.pages().len() as u64).sum();
    let outgoing = orders.outgoing(plain.ram_pages());
    let sealed = pack(&plain, &draft.ram_path(), compression, &elsewhere, outgoing, reporter)?;
    draft.remove_plain_ram()?;
    Ok((sealed, pages_on_disks))
}

/// Waits for the loop's next command. The loop drops its end of the channel when it cancels the save.
pub fn next(commands: &Receiver<SaveCommand>, progress: &Progress) -> Result<Option<Box<PausedState>>, SaveError> {
    let command = commands.recv();
    progress.must_go_on()?;
    match command {
        Ok(SaveCommand::Noted | SaveCommand::Held) => Ok(None),
        Ok(SaveCommand::PausedState(paused)) => Ok(Some(paused)),
        Err(_) => Err(SaveError::Abandoned),
    }
}

impl ImageCopy {
    /// Waits until the whole file is on the disk. Returns its length in bytes.
    fn complete(self, disks: &[Pressure], reporter: &mut Reporter<'_>) -> Result<u64, SaveError> {
        let failed = |source: io::Error| SaveError::Image { path: self.path.clone(), source };
        match &self.way {
            CopyWay::Shared(clone) => {
                let synced = clone.sync_all().and_then(|()| clone.metadata());
                Ok(synced.map_err(failed)?.len())
            }
            CopyWay::Frozen(image) => {
                let mut stopped = Ok(());
                let copied = image.copy(|bytes| {
                    give_way(disks);
                    stopped = reporter.disk_done(bytes);
                    stopped.is_ok()
                });
                stopped?;
                copied.map_err(failed)?;
                Ok(image.bytes())
            }
        }
    }
}
