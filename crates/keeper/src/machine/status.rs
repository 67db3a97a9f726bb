//! What the machine says of itself.

use hearth_api::{
    DiskStatus, DumpStatus, EmberStatus, KeeperStatus, MachineStatus, MemoryStatus, NetStatus, Recovery, Refused,
};
use hearth_disk::server::DiskServer;
use hearth_memory::PAGE_BYTES;

use super::gate::MemoryGate;
use super::{Machine, save};
use crate::config::{DiskConfig, NetConfig};

impl Machine {
    pub(super) fn status(&self) -> MachineStatus {
        let config = &self.parts.config;
        let life = self.life.as_ref();
        let disks = config.disks.iter().zip(&self.disks);
        let dumps = self.dump_statuses();
        MachineStatus {
            name: config.name.clone(),
            state: self.state,
            state_why: self.state_why.clone(),
            next_start: self.next_start(),
            incarnation: self.journal.incarnation,
            cause_of_last_end: self.last_end,
            uptime_s: life.map_or(0.0, |life| life.began.elapsed().as_secs_f64()),
            keeper: KeeperStatus {
                pid: std::process::id(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                uptime_s: self.started.elapsed().as_secs_f64(),
            },
            qemu: life.map(|life| life.generation.status()),
            memory: self.memory_status(),
            disks: disks
                .map(|(config, server)| DiskStatus {
                    arrival: self.arrivals.status(&config.name),
                    ..disk_status(config, server)
                })
                .collect(),
            nvram: self.nvram_statuses(),
            nets: config.nets.iter().map(net_status).collect(),
            ledger_pages: life.map_or(0, |life| life.incarnation.ledger_pages()),
            ember: self.ember_status(),
            last_rejuvenation: self.last_rejuvenation.clone(),
            unparked: self.unparked.clone(),
            restore: self.restore_status(),
            pending: self.parts.pending.clone(),
            frozen: self.frozen_status(),
            save: self.saving.as_ref().map(save::Saving::status),
            last_recovery: self.recovery(&dumps),
            dumps,
        }
    }

    /// With the dump of the guest that was recovered from.
    fn recovery(&self, dumps: &[DumpStatus]) -> Option<Recovery> {
        let mut recovery = self.timeline.as_ref()?.recovery().clone();
        recovery.dump = dumps.iter().find(|dump| !dump.live && dump.incarnation + 1 == recovery.incarnation).cloned();
        Some(recovery)
    }

    fn memory_status(&self) -> MemoryStatus {
        let usage = self.warden.usage();
        let nvram_bytes = self.nvram_bytes();
        MemoryStatus {
            ram_bytes: self.parts.config.memory_bytes,
            resident_bytes: usage.live_bytes,
            ember_bytes: usage.ember_bytes,
            held_bytes: self.ember.held_bytes(),
            dump_buffer_bytes: usage.buffer_bytes,
            boot_set_bytes: self.warm.boot_set.as_ref().map_or(0, |boot_set| boot_set.resident_bytes()),
            nvram_bytes,
            budget_bytes: self.budget.limit_bytes(false)
                + self.parts.config.remount_bytes()
                + self.parts.config.nvram_bytes(),
            headroom_bytes: self.budget.headroom_bytes,
            // What NVRAM takes it takes before the first guest, and gives back after the last one.
            peak_bytes: self.warden.peak_bytes() + nvram_bytes,
            admission: self.gate.as_ref().map(MemoryGate::status),
        }
    }

    fn ember_status(&self) -> EmberStatus {
        let counts = self.ember.counts();
        EmberStatus {
            mode: self.parts.config.ember,
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
        reads: counters.reads,
        writes: counters.writes,
        flushes: counters.flushes,
        flushes_spared: counters.flushes_spared,
        gaps_filled: counters.gaps_filled,
        gap_bytes: counters.gap_bytes,
        discards: counters.discards,
        read_warm_bytes: counters.bytes_read_warm,
        read_image_bytes: counters.bytes_read_image,
        written_bytes: counters.bytes_written,
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
