//! Remount: the boot set of a machine, from the reset of a guest until it is ready, and on to the next one.
//!
//! reset -> the disks note what is read -> ready (`hearth ready`, or the time is over) -> kept current -> the next reset
//!
//! What is held outlives guests, QEMUs and keepers; it ends with the machine, with a cold reboot, and, disk by disk, where nobody
//! guarded an image and it is not what was noted of it (`images`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, EventKind, MissedRun, PlannedRun, RemountDisk, RemountPlan};
use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::{BootSet, DiskTally, PhaseTally};
use hearth_disk::server::DiskServer;
use hearth_disk::tag::Tagger;
use hearth_recovery::boot_set::saved::{self, Loaded};
use hearth_recovery::images::DiskNote;

use super::ready::{Question, ReadyWatch};
use super::volumes::{self, later, percent};
use super::{Machine, MachineError, Parts};
use crate::config::ReadySign;
use crate::event::{Event, ReadinessMessage};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// What an earlier keeper left. None: it is not wanted.
pub(super) fn open(parts: &Parts, tagger: &Tagger) -> Result<Option<Arc<BootSet>>, MachineError> {
    let folder = &parts.folders.memory;
    let Some(remount) = &parts.config.remount else {
        if let Err(error) = BootSet::discard(folder) {
            tracing::warn!(%error, "cannot remove an unused boot set");
        }
        return Ok(None);
    };
    let boot_set = BootSet::open(folder, remount.limit_bytes, tagger.clone()).map_err(MachineError::BootSet)?;
    Ok(Some(Arc::new(boot_set)))
}

impl Machine {
    fn boot_set(&self) -> Option<&Arc<BootSet>> {
        self.warm.boot_set.as_ref()
    }

    /// What was held when the machine was stopped, of the images that were not changed since. They are locked.
    pub(super) fn load_boot_set(&self, open: &[DiskNote]) {
        let (Some(boot_set), Some(path)) = (self.boot_set(), self.persist_file()) else { return };
        match saved::load(path, boot_set, open) {
            Ok(None) => {}
            Ok(Some(Loaded { blocks, void })) => {
                for (DiskId(id), why) in void {
                    let disk = self.parts.config.disks.get(usize::from(id)).map(|disk| disk.name.clone());
                    self.record(EventKind::DiskForgotten { disk: disk.unwrap_or_default(), why, blocks: 0 });
                }
                if blocks > 0 {
                    self.record(EventKind::BootSetLoaded { blocks });
                }
            }
            Err(error) => {
                self.clear_boot_set();
                self.record(EventKind::BootSetDropped { why: crate::chain(&error) });
            }
        }
    }

    /// What the images are that a boot set is about to be saved of, while they are locked. All of it is durable: else the host's
    /// crash would leave what is older than the copies. None: nothing will be saved.
    pub(super) fn settle_images(&self) -> Result<Option<Vec<DiskNote>>, String> {
        if self.persist_file().is_none() {
            return Ok(None);
        }
        self.flush_images().map_err(|error| crate::chain(&error))?;
        Ok(Some(self.images.look()))
    }

    /// What the last keeper held is more than the limit is now.
    pub(super) fn tell_what_is_left_out(&self) {
        let left_out = self.boot_set().map_or(0, |boot_set| boot_set.left_out());
        if left_out > 0 {
            self.record(EventKind::BootSetReduced { left_out });
        }
    }

    pub(super) fn holds_blocks(&self) -> bool {
        self.boot_set().is_some_and(|boot_set| !boot_set.is_empty())
    }

    /// The machine has stopped, and nobody writes to its images any more: they are what they were when they were `locked`.
    pub(super) fn save_boot_set(&self, locked: Result<Option<Vec<DiskNote>>, String>) {
        let (Some(boot_set), Some(path)) = (self.boot_set(), self.persist_file()) else { return };
        let saved = locked.and_then(|locked| {
            let (locked, mut disks) = (locked.unwrap_or_default(), self.images.at_rest());
            for (position, disk) in disks.iter_mut().enumerate() {
                disk.rest.take_if(|rest| locked.get(position).is_none_or(|locked| locked.rest.as_ref() != Some(rest)));
            }
            match disks.iter().any(|disk| disk.rest.is_some()) {
                true => saved::save(path, boot_set, &disks).map_err(|error| crate::chain(&error)),
                false => Err("every image is a block device or is written by another program".to_owned()),
            }
        });
        match saved {
            Ok(blocks) => self.record(EventKind::BootSetSaved { blocks }),
            Err(why) => self.record(EventKind::Error { message: format!("cannot save the boot set: {why}") }),
        }
    }

    fn persist_file(&self) -> Option<&PathBuf> {
        self.parts.config.remount.as_ref()?.persist_file.as_ref()
    }

    pub(super) fn clear_boot_set(&self) {
        if let Some(Err(error)) = self.boot_set().map(|boot_set| boot_set.clear()) {
            tracing::warn!(error = crate::chain(&error), "cannot release the boot set's memory");
        }
    }

    /// A guest is about to be reset.
    pub(super) fn boot_begins(&mut self) {
        let (Some(boot_set), Some(remount)) = (self.boot_set(), &self.parts.config.remount) else { return };
        boot_set.begin();
        self.ready_at = Some(Instant::now() + Duration::from_secs(remount.ready_after_s));
    }

    /// Has the guest that boots asked whether it is ready, if the configuration says how; through the QEMU that it has now.
    pub(super) fn watch_ready(&mut self) {
        let (Some(_), Some(life), Some(remount)) = (self.ready_at, &self.life, &self.parts.config.remount) else {
            return;
        };
        self.ready_watch = remount.ready_sign.clone().and_then(|sign| {
            let question = match sign {
                ReadySign::Port(forward) => Question::port(forward),
                ReadySign::Unit(unit) => Question::unit(unit, life.generation.agent(&self.parts.folders)),
            };
            let (tell, incarnation) = (self.parts.tell.clone(), self.journal.incarnation);
            // It fails only when the loop is gone, and then nobody wants to know.
            let say = move |message| drop(tell.send(Event::Readiness { incarnation, message }));
            let watch = ReadyWatch::start(&self.parts.config.name, question, say);
            watch.inspect_err(|error| tracing::warn!(%error, "cannot ask whether the guest is ready")).ok()
        });
    }

    pub(super) fn readiness_says(&mut self, message: ReadinessMessage) {
        match message {
            ReadinessMessage::Ready { why } => self.ready(why),
            ReadinessMessage::Unknown { why } => {
                let message = format!("cannot find out whether the guest is ready: {why}; mark it with `hearth ready`");
                self.record(EventKind::Error { message });
            }
        }
    }

    /// What the guest has read until now is not what a boot reads.
    pub(super) fn boot_cut_off(&mut self) {
        self.ready_at = None;
        self.ready_watch = None;
    }

    pub(super) fn ready_ordered(&mut self) -> Result<(), ApiError> {
        self.must_have_boot_set()?;
        self.must_live("mark the boot as finished")?;
        self.ready("marked by the operator");
        Ok(())
    }

    pub(super) fn ready(&mut self, why: &str) {
        self.boot_cut_off();
        if !self.boot_set().is_some_and(|boot_set| boot_set.ready()) {
            return;
        }
        self.divide_disks();
        if let Ok(RemountPlan { blocks, held_blocks, hit_pct, .. }) = self.remount_plan() {
            self.record(EventKind::Ready { why: why.to_owned(), blocks, held_blocks, hit_pct });
        }
    }

    /// From ready on, or where a keeper goes on with a guest: what is read is counted by volume.
    pub(super) fn divide_disks(&self) {
        let Some(boot_set) = self.boot_set() else { return };
        let disks = (0..self.parts.config.disks.len()).filter_map(|position| u8::try_from(position).ok()).map(DiskId);
        disks.for_each(|id| volumes::divide(boot_set, id, self.disk_bytes(id)));
    }

    fn disk_bytes(&self, DiskId(id): DiskId) -> u64 {
        self.disks.get(usize::from(id)).map_or(0, DiskServer::bytes)
    }

    fn must_have_boot_set(&self) -> Result<&Arc<BootSet>, ApiError> {
        self.boot_set().ok_or_else(|| {
            let message = format!("{} has no boot set", self.parts.config.name);
            ApiError::new(ErrorWord::WrongState, message)
                .hint("add [remount] to its configuration, then stop and start it")
        })
    }

    pub(super) fn remount_plan(&self) -> Result<RemountPlan, ApiError> {
        let boot_set = self.must_have_boot_set()?;
        let plan = boot_set.plan();
        let names: Vec<String> = self.parts.config.disks.iter().map(|disk| disk.name.clone()).collect();
        let name_of = |DiskId(id): DiskId| names.get(usize::from(id)).cloned().unwrap_or_default();
        let mut all = DiskTally::default();
        plan.disks.values().for_each(|disk| all += *disk);
        let disks = plan.disks.iter().map(|(&id, tally)| RemountDisk {
            disk: name_of(id),
            blocks: tally.blocks,
            held_blocks: tally.held,
            hits: tally.boot.hits,
            ember_hits: tally.boot.ember_hits,
            misses: tally.boot.misses,
            hit_pct: hit_pct(&tally.boot),
            late_blocks: tally.late,
            written_blocks: tally.written,
            later: later(&tally.later),
        });
        let volumes =
            plan.disks.keys().flat_map(|&id| volumes::of_disk(boot_set, id, &name_of(id), self.disk_bytes(id)));
        let reads = plan.reads.iter().map(|run| PlannedRun {
            disk: name_of(run.disk),
            offset: run.blocks.start * BLOCK,
            bytes: (run.blocks.end - run.blocks.start) * BLOCK,
            held: run.held,
        });
        let missed = plan.missed.iter().map(|(disk, run)| MissedRun {
            disk: name_of(*disk),
            offset: run.start * BLOCK,
            bytes: (run.end - run.start) * BLOCK,
        });
        Ok(RemountPlan {
            name: self.parts.config.name.clone(),
            ready: !plan.learning,
            limit_bytes: boot_set.limit_bytes(),
            resident_bytes: boot_set.resident_bytes(),
            blocks: all.blocks,
            held_blocks: all.held,
            no_room_blocks: all.no_room,
            expected_hit_pct: percent(all.held, all.blocks + all.no_room),
            hit_pct: hit_pct(&all.boot),
            late_blocks: all.late,
            written_blocks: all.written,
            later: later(&all.later),
            memory_reads: plan.answers.reads,
            in_line_pct: percent(plan.answers.in_line, plan.answers.reads),
            memory_reads_beside_writes: plan.answers.beside_writes,
            memory_read_us_p50: plan.answers.us(50.0),
            memory_read_us_p99: plan.answers.us(99.0),
            memory_read_beside_writes_us_p50: plan.answers.us_beside_writes(50.0),
            memory_read_beside_writes_us_p99: plan.answers.us_beside_writes(99.0),
            disks: disks.collect(),
            volumes: volumes.collect(),
            reads: reads.collect(),
            reads_unlisted_blocks: plan.reads_unlisted,
            missed: missed.collect(),
            missed_unlisted_blocks: plan.missed_unlisted,
            damaged_blocks: plan.damaged,
        })
    }
}

fn hit_pct(tally: &PhaseTally) -> Option<f64> {
    let hits = tally.hits + tally.ember_hits;
    percent(hits, hits + tally.misses)
}
