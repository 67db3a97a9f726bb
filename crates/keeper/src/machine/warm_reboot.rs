//! Warm reboot of a machine: what is kept of dead guests' memory, and the budget that limits it.

use std::sync::Arc;
use std::time::Duration;

use hearth_api::EventKind;
use hearth_disk::block::DiskId;
use hearth_disk::boot_set::BootSet;
use hearth_disk::server::DiskServer;
use hearth_disk::tag::Tagger;
use hearth_memory::PAGE_BYTES;
use hearth_recovery::admission::AdmissionInputs;
use hearth_recovery::budget::Budget;
use hearth_recovery::ember::Ember;
use hearth_recovery::fast_remount::WarmSources;
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::warm_reboot::{Phase, RebootContext};

use super::cache_map::{Awaited, CacheMapFile, Reading};
use super::disks::Disks;
use super::memory_monitor::{Kept, MemoryMonitor};
use super::status::cache_map_read_bytes;
use super::timeline::LastRecovery;
use super::{Context, DRAIN_PATIENCE, MachineError, dump};
use crate::config::{AdmissionMode, Config};
use crate::event::{CacheMapSize, Event, MemoryMessage};

/// How long a machine that stops waits for the map of its last guest's page cache.
const KEEP_PATIENCE: Duration = Duration::from_secs(15);

/// The kept memory of dead guests, and its budget.
pub struct WarmReboot {
    pub tagger: Tagger,
    pub ember: Arc<Ember>,
    /// The ember, and the boot set if there is one.
    pub sources: Arc<WarmSources>,
    pub budget: Budget,
    pub monitor: MemoryMonitor,
    /// What the next guest is told of the last one's page cache. None: nothing.
    cache_map: Option<Arc<CacheMapFile>>,
    /// The reading of the last guest's map, while the machine stops.
    keeping: Option<Reading>,
    /// Bytes of the cache map's disk that earlier incarnations have read under this keeper. None: the current one is older than that.
    pub read_before: Option<u64>,
}

impl WarmReboot {
    pub fn start(context: &Context) -> Result<Self, MachineError> {
        let (config, folder) = (&context.config, &context.folders.memory);
        let tagger = context.folders.tagger()?;
        let ember = Arc::new(Ember::new(folder, tagger.clone()));
        let boot_set = open_boot_set(context, &tagger)?;
        let sources = Arc::new(WarmSources { ember: ember.clone(), boot_set: boot_set.clone() });
        let budget = budget(config);
        let open = |kept| CacheMapFile::open(folder, kept, config.guest.memory_bytes);
        let cache_map = config.guest.refill.clone().map(open).transpose();
        let cache_map = cache_map.map_err(MachineError::CacheMap)?.map(Arc::new);
        let tell = context.outside.tell.clone();
        let kept = Kept { boot_set, cache_map: cache_map.clone() };
        let monitor = MemoryMonitor::start(&config.name, budget, ember.clone(), kept, move |message| {
            // Fails only when the loop has ended; then nobody needs the message.
            let _ = tell.send(Event::Memory(message));
        })
        .map_err(MachineError::MemoryMonitor)?;
        Ok(Self { tagger, ember, sources, budget, monitor, cache_map, keeping: None, read_before: None })
    }

    pub fn handle_memory(&self, context: &Context, disks: &Disks, recovery: &mut LastRecovery, message: MemoryMessage) {
        let counts = self.ember.counts();
        match message {
            MemoryMessage::Settled { released_bytes, began, took } => {
                if let Some(timeline) = &mut recovery.timeline {
                    timeline.released(released_bytes);
                }
                recovery.phase_ended(context, Phase::Settle.name(), began, took);
                context.record(EventKind::EmberSettled { released_bytes, remaining_pages: counts.remaining });
            }
            MemoryMessage::CacheMap { read: Ok(CacheMapSize { pages, files, bytes }), took } => {
                let duration_ms = took.as_secs_f64() * 1e3;
                context.record(EventKind::CacheMapRead { pages, files, bytes, duration_ms });
            }
            MemoryMessage::CacheMap { read: Err(why), .. } => context.record(EventKind::CacheMapMissing { why }),
            MemoryMessage::Trimmed { bytes } => {
                context.record(EventKind::EmberTrimmed { pages: bytes / PAGE_BYTES, bytes });
            }
            MemoryMessage::EmberEmpty => {
                let pages_refused = counts.tag_mismatch + counts.overwritten + counts.trimmed;
                context.record(EventKind::EmberEmpty { pages_served: counts.served, pages_refused });
            }
            MemoryMessage::Held { living, resident_bytes, dead_bytes, limit_bytes } => {
                let (read_warm_bytes, read_image_bytes) = disks.bytes_read();
                context.record(EventKind::MemoryHeld {
                    living,
                    resident_bytes,
                    dead_bytes,
                    limit_bytes,
                    read_warm_bytes,
                    read_image_bytes,
                });
            }
            MemoryMessage::OverBudget { used_bytes, limit_bytes } => {
                context.record(EventKind::BudgetWarning { used_bytes, budget_bytes: limit_bytes });
            }
        }
    }

    /// Drops all disk blocks that the keeper holds in memory.
    pub fn forget_disks(&self) {
        self.ember.extinguish();
        self.clear_boot_set();
    }

    /// Size of the cache map for the current guest, 0 if there is none yet. None: the machine has no cache map.
    pub fn cache_map_bytes(&self) -> Option<u64> {
        // What cannot be read, the guest cannot read either.
        self.cache_map.as_ref().map(|file| file.map_bytes().ok().flatten().unwrap_or(0) as u64)
    }

    /// Tells the next guest that a map of this guest's page cache is being made. Call it before the guest is banked. `registers`: as
    /// QEMU has told them, if it has; asked for only if there is to be a map.
    pub fn begin_cache_map(&self, dead: &Incarnation, registers: impl FnOnce() -> Option<Vec<u8>>) {
        if let Some(file) = &self.cache_map {
            file.begin(Awaited::new(dead, &self.sources, registers()));
        }
    }

    /// Begins to read the map of a guest whose memory the next one is about to get, and puts it into the file.
    pub fn begin_reading_cache_map(&self, dead: &Incarnation) -> Option<Reading> {
        let file = self.cache_map.as_ref()?;
        file.begin(Awaited::new(dead, &self.sources, None));
        Reading::begin_of(file, dead.ram.clone(), dead.ledger.clone()?)
    }

    /// Begins to keep the map of the machine's last guest for its next start. Call it before the guest is banked.
    pub fn begin_keeping_cache_map(&mut self, dead: &Incarnation, registers: impl FnOnce() -> Option<Vec<u8>>) {
        let Some(file) = self.cache_map.clone() else { return };
        let awaited = Awaited::new(dead, &self.sources, registers());
        self.keeping = Reading::begin_keeping(file, dead, awaited, self.ember.clone());
    }

    /// Waits until that is done, but not for long.
    pub fn end_keeping_cache_map(&mut self, context: &Context, disks: &Disks, recovery: &mut LastRecovery) {
        let ended = self.keeping.take().and_then(|reading| reading.end_within(KEEP_PATIENCE, "the machine stops"));
        if let Some(message) = ended {
            self.handle_memory(context, disks, recovery, message);
        }
    }

    /// The guest runs, so the map that was kept for this start is of no more use.
    pub fn forget_kept_cache_map(&self) {
        if let Some(file) = &self.cache_map {
            file.forget_kept();
        }
    }

    /// Counts what the next incarnation reads of the cache map. Call it before its guest runs.
    pub fn begin_incarnation(&mut self, disks: &Disks) {
        self.read_before = Some(cache_map_read_bytes(disks));
    }

    /// There was no guest to take over, so an earlier keeper's map is not of pages in memory.
    pub fn begin_without_memory(&self) {
        if let Some(file) = &self.cache_map {
            file.memory_is_gone();
        }
    }

    /// Tells the next guest that there is no cache map.
    pub fn clear_cache_map(&self) {
        if let Some(file) = &self.cache_map {
            file.clear();
        }
    }

    pub fn clear_boot_set(&self) {
        if let Some(Err(error)) = self.boot_set().map(|boot_set| boot_set.clear()) {
            tracing::warn!(error = crate::chain(&error), "cannot release the boot set's memory");
        }
    }

    pub fn boot_set(&self) -> Option<&Arc<BootSet>> {
        self.sources.boot_set.as_ref()
    }

    /// The steps from a dead guest to the next one: drain the disks, keep the memory.
    pub fn succession<'a>(&'a self, disks: &'a [DiskServer]) -> RebootContext<'a> {
        RebootContext { disks, warm: &self.sources, tagger: &self.tagger, patience: DRAIN_PATIENCE }
    }

    /// Keeps a dead incarnation as ember. If that fails, the next guest starts cold.
    pub fn bank(&self, context: &Context, recovery: &mut LastRecovery, disks: &Disks, dead: Incarnation) {
        match self.succession(&disks.servers).bank(&context.folders.memory, dead) {
            Ok(()) => recovery.kept(context, &self.ember),
            Err(error) => {
                let why = crate::chain(&error);
                tracing::warn!(why, "the reboot will be cold");
                recovery.set_cold(why);
                self.clear_cache_map();
            }
        }
    }

    /// Keeps a dead incarnation for its dump, and, unless the reboot is cold, as ember. Returns whether it is kept.
    pub fn bank_held(
        &self,
        context: &Context,
        recovery: &mut LastRecovery,
        dead: &Incarnation,
        hold: &Arc<Hold>,
        is_cold: bool,
    ) -> bool {
        self.sources.part(dead);
        let banked = self.ember.bank_held(dead.clone(), hold.clone());
        match &banked {
            Ok(()) if is_cold => self.forget_disks(),
            Ok(()) => recovery.kept(context, &self.ember),
            Err(error) => context.record(EventKind::DumpSkipped { why: crate::chain(error) }),
        }
        banked.is_ok()
    }

    /// Drops all blocks of this disk that are in memory. `living`: an incarnation whose ledger may hold some.
    pub fn forget_disk(&self, context: &Context, position: usize, why: String, living: Option<&Incarnation>) {
        let Ok(id) = u8::try_from(position).map(DiskId) else { return };
        let blocks = self.sources.forget_disk(id) + living.map_or(0, |living| living.forget_disk(id));
        if blocks > 0 {
            let disk = context.config.devices.disks[position].name.clone();
            tracing::warn!(disk, why, "dropped the blocks of this disk held in memory");
            context.record(EventKind::DiskForgotten { disk, why, blocks });
        }
    }

    /// Whether memory must be granted unit by unit: dead memory is held for a dump, or `admission = "always"` and there
    /// is dead memory.
    pub fn wants_gate(&self, config: &Config) -> bool {
        let always = config.memory.admission == AdmissionMode::Always;
        self.ember.is_held() || always && !self.ember.incarnations().is_empty()
    }

    /// AdmissionInputs for granting memory to the next guest.
    pub fn terms(&self, context: &Context) -> AdmissionInputs {
        AdmissionInputs {
            folder: context.folders.memory.clone(),
            budget: self.budget,
            ember: self.ember.clone(),
            only_for_dumps: context.config.memory.admission == AdmissionMode::Dump,
        }
    }

    /// Removes the memory files.
    pub fn discard_memory(&self, context: &Context) {
        self.monitor.note_images(None);
        self.ember.extinguish();
        if let Err(error) = context.folders.discard_memory() {
            tracing::warn!(%error, folder = %context.folders.memory.display(), "cannot remove memory files");
        }
    }

    /// Sets the budget again after the guest's size may have changed.
    pub fn set_budget(&mut self, config: &Config) {
        self.budget = budget(config);
        self.monitor.set_budget(self.budget);
    }
}

/// Opens the boot set that an earlier keeper left, or creates a new one. None if the configuration has none.
fn open_boot_set(context: &Context, tagger: &Tagger) -> Result<Option<Arc<BootSet>>, MachineError> {
    let folder = &context.folders.memory;
    let Some(remount) = &context.config.remount else {
        if let Err(error) = BootSet::discard(folder) {
            tracing::warn!(%error, "cannot remove an unused boot set");
        }
        return Ok(None);
    };
    let boot_set = BootSet::open(folder, remount.limit_bytes, tagger.clone()).map_err(MachineError::BootSet)?;
    Ok(Some(Arc::new(boot_set)))
}

/// The host memory that a machine may use.
fn budget(config: &Config) -> Budget {
    let slack_bytes = config.memory.slack_bytes;
    Budget {
        ram_bytes: config.guest.memory_bytes,
        slack_bytes,
        headroom_bytes: config.crash.headroom_bytes,
        dump_buffer_bytes: dump::buffer_bytes(slack_bytes, config.crash.threads),
    }
}
