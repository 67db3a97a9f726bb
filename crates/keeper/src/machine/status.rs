//! The machine's status, as the API shows it.

use std::borrow::Cow;

use hearth_api::{
    AdmissionStatus, DiskStatus, EmberStatus, KeeperStatus, MachineStatus, MemoryStatus, NetStatus, RefillStatus,
    Refused,
};
use hearth_disk::server::DiskServer;
use hearth_memory::PAGE_BYTES;

use super::disks::{Disks, is_silent};
use super::gate::MemoryGate;
use super::nvram::nvram_bytes;
use super::start::Start;
use super::warm_reboot::WarmReboot;
use super::{Context, Machine, save};
use crate::config::{DiskConfig, NetConfig};
use crate::folders::CACHE_MAP;

impl Machine {
    pub(super) fn status(&self) -> MachineStatus {
        let config = &self.context.config;
        let life = self.state.guest();
        let dumps = self.crash_recovery.dumps.statuses();
        MachineStatus {
            name: config.name.clone(),
            state: self.state.shown(),
            state_why: self.state_why(),
            next_start: self.state.back_off().map(|back_off| back_off.next_start.clone()),
            crash_loop: self.state.back_off().is_some_and(|back_off| back_off.crash_loop),
            incarnation: self.context.journal.incarnation,
            cause_of_last_end: self.crash_recovery.last_end,
            uptime_s: life.map_or(0.0, |life| life.began.elapsed().as_secs_f64()),
            keeper: self.context.keeper_status(),
            qemu: life.map(|life| life.generation.status()),
            memory: self.warm_reboot.memory_status(&self.context, self.memory.gate.as_ref().map(MemoryGate::status)),
            disks: self.disks.statuses(&self.context),
            nvram: self.disks.nvram_statuses(&self.context, life.is_some()),
            nets: config.devices.nets.iter().map(net_status).collect(),
            ledger_pages: life.map_or(0, |life| life.incarnation.ledger_pages()),
            ember: self.warm_reboot.ember_status(&self.context),
            parking_since: self.rejuvenation.parking.as_ref().map(|parking| parking.since.clone()),
            rejuvenating_since: self.rejuvenation.hops_since(),
            last_rejuvenation: self.rejuvenation.last.clone(),
            unparked: self.rejuvenation.unparked.clone(),
            restore: self.lazy_restore.status(),
            refill: self.warm_reboot.refill_status(&self.disks),
            pending: self.context.file.pending.clone(),
            frozen: self.saves.frozen_status(),
            save: self.saves.current.as_ref().map(save::Saving::status),
            last_recovery: self.recovery.shown(&dumps),
            dumps,
        }
    }

    fn state_why(&self) -> Option<String> {
        let first = self.state.launch().filter(|_| self.state.is_first_start());
        self.state.why(&self.context.config.name).map(Cow::into_owned).or_else(|| first.map(Start::doing))
    }
}

impl Context {
    pub fn keeper_status(&self) -> KeeperStatus {
        KeeperStatus {
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: self.outside.started.elapsed().as_secs_f64(),
            loop_stall_ms_max: self.outside.watchdog.main().longest().as_secs_f64() * 1e3,
        }
    }
}

impl Disks {
    pub fn statuses(&self, context: &Context) -> Vec<DiskStatus> {
        let disks = context.config.devices.disks.iter().zip(&self.servers);
        disks
            .map(|(config, server)| DiskStatus {
                arrival: self.backfill.status(&config.name),
                ..disk_status(config, server)
            })
            .collect()
    }

    /// Bytes that guests have read from memory and from the images, since this keeper serves the disks.
    pub fn bytes_read(&self) -> (u64, u64) {
        let counters = self.servers.iter().map(DiskServer::counters);
        counters.fold((0, 0), |(warm, image), disk| (warm + disk.bytes_read_warm, image + disk.bytes_read_image))
    }
}

/// Bytes of the cache map's disk that guests have read since it is served.
pub fn cache_map_read_bytes(disks: &Disks) -> u64 {
    let server = disks.servers.iter().find(|server| server.name() == CACHE_MAP);
    server.map_or(0, |server| server.counters().bytes_read_image)
}

impl WarmReboot {
    pub fn memory_status(&self, context: &Context, admission: Option<AdmissionStatus>) -> MemoryStatus {
        let usage = self.monitor.usage();
        let nvram_bytes = nvram_bytes(context);
        MemoryStatus {
            ram_bytes: context.config.guest.memory_bytes,
            resident_bytes: usage.live_bytes,
            ember_bytes: usage.ember_bytes,
            held_bytes: self.ember.held_bytes(),
            dump_buffer_bytes: usage.buffer_bytes,
            boot_set_bytes: self.boot_set().map_or(0, |boot_set| boot_set.resident_bytes()),
            nvram_bytes,
            budget_bytes: self.budget.limit_bytes(false)
                + context.config.remount_bytes()
                + context.config.devices.nvram_bytes(),
            headroom_bytes: self.budget.headroom_bytes,
            // NVRAM takes its memory before the first guest starts, and releases it after the last one.
            peak_bytes: self.monitor.peak_bytes() + nvram_bytes,
            admission,
        }
    }

    /// None: the machine has no cache map.
    pub fn refill_status(&self, disks: &Disks) -> Option<RefillStatus> {
        let map_bytes = self.cache_map_bytes()?;
        let read_bytes = cache_map_read_bytes(disks);
        let incarnation_read_bytes = self.read_before.map(|before| read_bytes.saturating_sub(before));
        Some(RefillStatus { map_bytes, read_bytes, incarnation_read_bytes })
    }

    pub fn ember_status(&self, context: &Context) -> EmberStatus {
        let counts = self.ember.counts();
        EmberStatus {
            mode: context.config.memory.ember,
            pages_kept: counts.kept,
            kept_bytes: counts.kept * PAGE_BYTES,
            pages_served: counts.served,
            served_bytes: counts.served * PAGE_BYTES,
            pages_served_in_part: counts.served_in_part,
            refused: Refused {
                tag_mismatch: counts.tag_mismatch,
                overwritten: counts.overwritten,
                trimmed: counts.trimmed,
            },
            pages_remaining: counts.remaining,
            remaining_bytes: counts.remaining * PAGE_BYTES,
        }
    }
}

fn disk_status(config: &DiskConfig, server: &DiskServer) -> DiskStatus {
    let counters = server.counters();
    DiskStatus {
        name: config.name.clone(),
        path: config.path.display().to_string(),
        format: config.format.name().to_owned(),
        engine: server.description().to_owned(),
        read_only: config.read_only,
        bytes: server.bytes(),
        connected: counters.connected,
        silent: is_silent(server),
        reads: counters.reads,
        writes: counters.writes,
        flushes: counters.flushes,
        flushes_spared: counters.flushes_spared,
        discards: counters.discards,
        read_warm_bytes: counters.bytes_read_warm,
        read_image_bytes: counters.bytes_read_image,
        written_bytes: counters.bytes_written,
        image_operations: counters.image_operations,
        image_us: counters.image_us,
        io_errors: counters.io_errors,
        waiting_for_space: counters.waiting_for_space,
        bad_requests: counters.bad_requests,
        throttled_ms: counters.throttled_us / 1000,
        arrival: None,
    }
}

fn net_status(net: &NetConfig) -> NetStatus {
    NetStatus {
        kind: net.backend.kind().to_owned(),
        mac: net.mac.clone(),
        forward: net.backend.forward().iter().map(ToString::to_string).collect(),
    }
}
