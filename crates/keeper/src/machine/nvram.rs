//! NVRAM of a machine: opened with its disks, served like one of them, and followed by nobody.

use std::path::Path;

use hearth_api::{EventKind, NvramStatus};
use hearth_disk::block::DiskId;
use hearth_disk::nvram::{MirrorPolicy, Nvram, NvramOptions, Origin, resident_bytes};
use hearth_disk::server::{DiskOptions, DiskServer};

use super::{Machine, MachineError, launch};
use crate::config::{self, NvramConfig};

impl NvramConfig {
    pub fn options(&self, memory_folder: &Path) -> NvramOptions {
        let mirror = self.mirror.as_ref().map(|mirror| (mirror.file.clone(), policy(mirror.policy)));
        NvramOptions { name: self.name.clone(), folder: memory_folder.to_owned(), bytes: self.bytes, mirror }
    }
}

impl Machine {
    /// After the disks: the guest sees them behind these.
    pub(super) fn open_nvram(&mut self) -> Result<(), MachineError> {
        let disks = self.parts.config.disks.len();
        for (position, device) in self.parts.config.nvram.iter().enumerate() {
            let (nvram, backing) = Nvram::open(&device.options(&self.parts.folders.memory))?;
            let from = match nvram.origin {
                Origin::Memory => "memory",
                Origin::Mirror => "mirror",
                Origin::Zeroes => "nothing",
            };
            self.record(EventKind::NvramOpened { nvram: device.name.clone(), from: from.to_owned() });
            let socket = self.parts.folders.disk_socket(&device.name);
            let id = DiskId(u8::try_from(disks + position).expect("a machine has fewer disks than PCI slots"));
            let options = DiskOptions { gate: self.disk_gate(), ..launch::nvram_options(id, device, socket) };
            let server = DiskServer::start_with(options, backing, None)
                .map_err(|source| MachineError::Server { disk: device.name.clone(), source })?;
            self.disks.push(server);
            self.nvram.push(nvram);
        }
        Ok(())
    }

    /// The machine has stopped, and its disks' servers have ended: memory that is mirrored is given back.
    pub(super) fn give_back_nvram(&mut self) {
        for (device, nvram) in self.parts.config.nvram.iter().zip(std::mem::take(&mut self.nvram)) {
            let problem = nvram.problem();
            if let (Ok(false), Some(problem)) = (nvram.give_back(), problem) {
                let message = format!("nvram {} stays in memory: its mirror was not written: {problem}", device.name);
                self.record(EventKind::Error { message });
            }
        }
    }

    /// Host memory that the devices take.
    pub(super) fn nvram_bytes(&self) -> u64 {
        let folder = &self.parts.folders.memory;
        self.parts.config.nvram.iter().map(|device| resident_bytes(folder, &device.name)).sum()
    }

    pub(super) fn nvram_statuses(&self) -> Vec<NvramStatus> {
        let servers = self.disks.iter().skip(self.parts.config.disks.len());
        let devices = self.parts.config.nvram.iter().zip(&self.nvram).zip(servers);
        devices.map(|((device, nvram), server)| nvram_status(device, nvram, server)).collect()
    }
}

fn nvram_status(device: &NvramConfig, nvram: &Nvram, server: &DiskServer) -> NvramStatus {
    let counters = server.counters();
    NvramStatus {
        name: device.name.clone(),
        bytes: device.bytes,
        mirror: device.mirror.as_ref().map_or("none", |mirror| mirror.policy.name()).to_owned(),
        mirror_file: device.mirror.as_ref().map(|mirror| mirror.file.display().to_string()),
        unmirrored_bytes: nvram.dirty_bytes(),
        problem: nvram.problem(),
        connected: counters.connected,
        reads: counters.reads,
        writes: counters.writes,
        flushes: counters.flushes,
    }
}

fn policy(policy: config::MirrorPolicy) -> MirrorPolicy {
    match policy {
        config::MirrorPolicy::Async => MirrorPolicy::Async,
        config::MirrorPolicy::Sync => MirrorPolicy::Sync,
    }
}
