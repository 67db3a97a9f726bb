//! Fast remount: the boot set of a machine, from a guest's reset until it is ready, and on to the next guest.
//!
//! reset -> the disks record what is read -> ready (`hearth ready`, or the time is over) -> kept current -> the next
//! reset
//!
//! The boot set outlives guests, QEMUs and keepers. It ends with the machine and with a cold reboot; a disk's part of
//! it ends when its image was unguarded and no longer matches its note (`images`).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hearth_api::{ApiError, ErrorWord, EventKind, MissedRun, PlannedRun, RemountDisk, RemountPlan};
use hearth_disk::block::{BLOCK_BYTES, DiskId};
use hearth_disk::boot_set::{BootSet, DiskTally, PhaseTally};
use hearth_disk::server::DiskServer;
use hearth_recovery::fast_remount::saved::{self, Loaded};
use hearth_recovery::images::DiskNote;

use super::Context;
use super::disks::Disks;
use super::generation::Generation;
use super::ready::{Question, ReadyWatch};
use super::volumes::{self, later, percent};
use super::warm_reboot::WarmReboot;
use crate::config::ReadySign;
use crate::event::{Event, ReadinessMessage};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// How long the boot of the living guest is recorded, and the probe that asks whether it is over.
#[derive(Default)]
pub struct FastRemount {
    /// When the guest counts as ready if nobody has said so.
    pub ready_at: Option<Instant>,
    /// Asks the guest whether it is ready.
    pub probe: Option<ReadyWatch>,
}

impl FastRemount {
    /// Starts to record a boot. Call it before a guest is reset.
    pub fn boot_begins(&mut self, context: &Context, warm: &WarmReboot) {
        let (Some(boot_set), Some(remount)) = (warm.boot_set(), &context.config.remount) else { return };
        boot_set.begin();
        self.ready_at = Some(Instant::now() + Duration::from_secs(remount.ready_after_s));
    }

    /// Starts to ask the booting guest whether it is ready, if the configuration says how, through its current QEMU.
    pub fn watch(&mut self, context: &Context, generation: &Generation) {
        let (Some(_), Some(remount)) = (self.ready_at, &context.config.remount) else { return };
        self.probe = remount.ready_sign.clone().and_then(|sign| {
            let question = match sign {
                ReadySign::Port(forward) => Question::port(forward),
                ReadySign::Unit(unit) => Question::unit(unit, generation.agent(&context.folders)),
            };
            let (tell, incarnation) = (context.outside.tell.clone(), context.journal.incarnation);
            // Fails only when the loop has ended; then nobody needs the message.
            let say = move |message| drop(tell.send(Event::Readiness { incarnation, message }));
            let probe = ReadyWatch::start(&context.config.name, question, say);
            probe.inspect_err(|error| tracing::warn!(%error, "cannot ask whether the guest is ready")).ok()
        });
    }

    pub fn handle_readiness(&mut self, context: &Context, warm: &WarmReboot, disks: &Disks, message: ReadinessMessage) {
        match message {
            ReadinessMessage::Ready { why } => self.ready(context, warm, disks, why),
            ReadinessMessage::Unknown { why } => {
                let message = format!("cannot find out whether the guest is ready: {why}; mark it with `hearth ready`");
                context.record(EventKind::Error { message });
            }
        }
    }

    /// Call it when the boot ends before the guest was ready: what was read until now is not a whole boot.
    pub fn boot_cut_off(&mut self) {
        *self = Self::default();
    }

    pub fn ready(&mut self, context: &Context, warm: &WarmReboot, disks: &Disks, why: &str) {
        self.boot_cut_off();
        if !warm.boot_set().is_some_and(|boot_set| boot_set.ready()) {
            return;
        }
        warm.divide_disks(context, disks);
        if let Ok(RemountPlan { blocks, held_blocks, hit_pct, .. }) = warm.remount_plan(context, disks) {
            context.record(EventKind::Ready { why: why.to_owned(), blocks, held_blocks, hit_pct });
        }
    }
}

impl WarmReboot {
    /// Loads the boot set that was saved when the machine stopped, for images that have not changed since. Call it
    /// while they are locked.
    pub fn load_boot_set(&self, context: &Context, open: &[DiskNote]) {
        let (Some(boot_set), Some(path)) = (self.boot_set(), persist_file(context)) else { return };
        match saved::load(path, boot_set, open) {
            Ok(None) => {}
            Ok(Some(Loaded { blocks, void })) => {
                for (DiskId(id), why) in void {
                    let disk = context.config.devices.disks.get(usize::from(id)).map(|disk| disk.name.clone());
                    context.record(EventKind::DiskForgotten { disk: disk.unwrap_or_default(), why, blocks: 0 });
                }
                if blocks > 0 {
                    context.record(EventKind::BootSetLoaded { blocks });
                }
            }
            Err(error) => {
                self.clear_boot_set();
                context.record(EventKind::BootSetDropped { why: crate::chain(&error) });
            }
        }
    }

    /// Syncs the images before their boot set is saved, and returns notes of them, which are from the beginning of a wait if that
    /// is not over. Without the sync a crash of the host could leave images that are older than the copies. None if no boot set will
    /// be saved.
    pub fn sync_images(&self, context: &Context, disks: &Disks) -> Result<Option<Vec<DiskNote>>, String> {
        if persist_file(context).is_none() {
            return Ok(None);
        }
        disks.flush(context).map_err(|error| crate::chain(&error))?;
        Ok(Some(disks.images.look()))
    }

    /// Reports that the last keeper's boot set exceeds the current limit.
    pub fn report_left_out(&self, context: &Context) {
        let left_out = self.boot_set().map_or(0, |boot_set| boot_set.left_out());
        if left_out > 0 {
            context.record(EventKind::BootSetReduced { left_out });
        }
    }

    pub fn holds_blocks(&self) -> bool {
        self.boot_set().is_some_and(|boot_set| !boot_set.is_empty())
    }

    /// Saves the boot set. The machine has stopped, and nobody writes to its images any more. `locked`: notes from when
    /// they were still locked, or from the beginning of the wait; an image that differs now is left out.
    pub fn save_boot_set(&self, context: &Context, disks: &Disks, locked: Result<Option<Vec<DiskNote>>, String>) {
        let (Some(boot_set), Some(path)) = (self.boot_set(), persist_file(context)) else { return };
        let saved = locked.and_then(|locked| {
            let (locked, mut disks) = (locked.unwrap_or_default(), disks.images.at_rest());
            for (position, disk) in disks.iter_mut().enumerate() {
                disk.rest.take_if(|rest| locked.get(position).is_none_or(|locked| locked.rest.as_ref() != Some(rest)));
            }
            match disks.iter().any(|disk| disk.rest.is_some()) {
                true => saved::save(path, boot_set, &disks).map_err(|error| crate::chain(&error)),
                false => Err("every image is a block device or is written by another program".to_owned()),
            }
        });
        match saved {
            Ok(blocks) => context.record(EventKind::BootSetSaved { blocks }),
            Err(why) => context.record(EventKind::Error { message: format!("cannot save the boot set: {why}") }),
        }
    }

    /// Counts reads by volume from now on: once the guest is ready, or when a keeper takes over a guest.
    pub fn divide_disks(&self, context: &Context, disks: &Disks) {
        let Some(boot_set) = self.boot_set() else { return };
        let ids =
            (0..context.config.devices.disks.len()).filter_map(|position| u8::try_from(position).ok()).map(DiskId);
        ids.for_each(|id| volumes::divide(boot_set, id, disk_bytes(disks, id)));
    }

    pub fn must_have_boot_set(&self, context: &Context) -> Result<&Arc<BootSet>, ApiError> {
        self.boot_set().ok_or_else(|| {
            let message = format!("{} has no boot set", context.config.name);
            ApiError::new(ErrorWord::WrongState, message)
                .hint("add [remount] to its configuration, then stop and start it")
        })
    }

    pub fn remount_plan(&self, context: &Context, servers: &Disks) -> Result<RemountPlan, ApiError> {
        let boot_set = self.must_have_boot_set(context)?;
        let plan = boot_set.plan();
        let names: Vec<String> = context.config.devices.disks.iter().map(|disk| disk.name.clone()).collect();
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
            later: later(&tally.later),
        });
        let volumes =
            plan.disks.keys().flat_map(|&id| volumes::of_disk(boot_set, id, &name_of(id), disk_bytes(servers, id)));
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
            name: context.config.name.clone(),
            ready: !plan.learning,
            limit_bytes: boot_set.limit_bytes(),
            resident_bytes: boot_set.resident_bytes(),
            blocks: all.blocks,
            held_blocks: all.held,
            no_room_blocks: all.no_room,
            expected_hit_pct: percent(all.held, all.blocks + all.no_room),
            hit_pct: hit_pct(&all.boot),
            late_blocks: all.late,
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

fn persist_file(context: &Context) -> Option<&PathBuf> {
    context.config.remount.as_ref()?.persist_file.as_ref()
}

fn disk_bytes(disks: &Disks, DiskId(id): DiskId) -> u64 {
    disks.servers.get(usize::from(id)).map_or(0, DiskServer::bytes)
}

fn hit_pct(tally: &PhaseTally) -> Option<f64> {
    let hits = tally.hits + tally.ember_hits;
    percent(hits, hits + tally.misses)
}
