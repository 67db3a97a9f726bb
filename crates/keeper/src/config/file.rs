//! What was typed: the file's keys as they stand there, nothing filled in, nothing understood.

use serde::{Deserialize, Serialize};

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConfigFile {
    pub name: Option<String>,
    pub memory: Option<String>,
    pub cpus: Option<u32>,
    pub cpu_model: Option<String>,
    pub accelerator: Option<String>,
    pub machine_type: Option<String>,
    pub qemu: Option<String>,
    pub qemu_user: Option<String>,
    pub runtime_folder: Option<String>,
    pub memory_folder: Option<String>,
    pub ember: Option<String>,
    pub on_panic: Option<String>,
    pub budget_slack: Option<String>,
    pub admission: Option<String>,
    pub sandbox: Option<bool>,
    pub guest_agent: Option<bool>,
    pub extra_qemu_args: Option<Vec<String>>,
    pub boot: Option<BootSection>,
    pub crash: Option<CrashSection>,
    pub watchdog: Option<WatchdogSection>,
    pub rejuvenate: Option<RejuvenateSection>,
    pub remount: Option<RemountSection>,
    pub object_store: Option<ObjectStoreSection>,
    pub disks: Vec<DiskSection>,
    pub nvram: Vec<NvramSection>,
    pub nets: Vec<NetSection>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BootSection {
    pub kernel: Option<String>,
    pub initrd: Option<String>,
    pub cmdline: Option<String>,
    pub firmware: Option<String>,
    pub firmware_vars: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CrashSection {
    pub dump_folder: Option<String>,
    pub level: Option<u8>,
    pub format: Option<String>,
    pub compression: Option<String>,
    pub keep_last: Option<u32>,
    pub min_free: Option<String>,
    pub chunk: Option<String>,
    pub threads: Option<u32>,
    pub headroom: Option<String>,
    pub disk_time: Option<String>,
    pub mib_per_second: Option<u64>,
    pub loop_count: Option<u32>,
    pub loop_window_s: Option<u64>,
    pub loop_delay_s: Option<u64>,
    pub loop_delay_max_s: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WatchdogSection {
    pub action: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RejuvenateSection {
    pub every: Option<String>,
    pub rss_growth_mib: Option<u64>,
    pub window: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RemountSection {
    pub limit: Option<String>,
    pub ready_after: Option<String>,
    pub persist: Option<bool>,
    pub persist_file: Option<String>,
    pub join_writes: Option<bool>,
    pub ready: Option<ReadySection>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ObjectStoreSection {
    pub credentials: Option<String>,
    pub folder: Option<String>,
    pub cache_size: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ReadySection {
    pub port: Option<u16>,
    pub unit: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NvramSection {
    pub name: Option<String>,
    pub size: Option<String>,
    pub device: Option<String>,
    pub mirror: Option<String>,
    pub mirror_file: Option<String>,
    pub serial: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DiskSection {
    pub name: Option<String>,
    pub path: Option<String>,
    pub format: Option<String>,
    pub read_only: Option<bool>,
    pub serial: Option<String>,
    pub queues: Option<u16>,
    pub mib_per_second: Option<u64>,
    pub iops: Option<u64>,
    pub direct: Option<bool>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NetSection {
    pub kind: Option<String>,
    pub forward: Option<Vec<String>>,
    pub isolated: Option<bool>,
    pub ifname: Option<String>,
    pub mac: Option<String>,
}
