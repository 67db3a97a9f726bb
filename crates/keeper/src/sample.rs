//! A machine's status and age with a value in every field, for tests.

use std::time::{Duration, SystemTime};

use hearth_api::{
    AdmissionStatus, ArrivalStatus, DiskStatus, DumpCompression, DumpExcluded, DumpFormat, DumpState, DumpStatus,
    EmberMode, EmberStatus, EndCause, FrozenStatus, Growth, KeeperStatus, MachineState, MachineStatus, MemoryStatus,
    MissedRun, NetStatus, NvramDevice, NvramStatus, PendingChange, PendingUntil, PhaseTime, PlannedRun, QemuAge,
    QemuStatus, Recovery, RefillStatus, Refused, RemountDisk, RemountLater, RemountPlan, RemountVolume, RestoreStatus,
    UserfaultStatus,
};
use hearth_recovery::journal::QemuIdentity;
use hearth_recovery::rejuvenation::parked::{PARKED_VERSION, Parked};
use hearth_recovery::snapshot::Part;

use crate::age::Signs;
use crate::config::RejuvenateConfig;

pub fn status() -> MachineStatus {
    MachineStatus {
        name: "web".into(),
        state: MachineState::Running,
        state_why: None,
        next_start: None,
        crash_loop: false,
        incarnation: 2,
        cause_of_last_end: Some(EndCause::Panic),
        uptime_s: 75.5,
        keeper: KeeperStatus { pid: 4711, version: "0.1.0".into(), uptime_s: 3700.0, loop_stall_ms_max: 2.5 },
        qemu: Some(QemuStatus {
            pid: 4712,
            version: "7.2.9".into(),
            generation: 2,
            accelerator: "tcg".into(),
            accelerator_why: "/dev/kvm does not exist".into(),
            userfault: UserfaultStatus::HandedOver,
        }),
        memory: MemoryStatus {
            ram_bytes: 1 << 30,
            resident_bytes: 300 << 20,
            ember_bytes: 500 << 20,
            held_bytes: 100 << 20,
            dump_buffer_bytes: 8 << 20,
            boot_set_bytes: 24 << 20,
            nvram_bytes: 64 << 20,
            budget_bytes: 1054 << 20,
            headroom_bytes: 0,
            peak_bytes: 1040 << 20,
            admission: Some(AdmissionStatus {
                on: true,
                granted_bytes: 320 << 20,
                faults: 150,
                waiting: 2,
                guest_wait_ms: 1250,
            }),
        },
        disks: vec![disk()],
        nvram: vec![nvram()],
        nets: vec![NetStatus {
            kind: "user".into(),
            mac: "52:54:00:12:34:56".into(),
            forward: vec!["127.0.0.1:8080:80".into()],
        }],
        ledger_pages: 50_000,
        ember: EmberStatus {
            mode: EmberMode::On,
            pages_kept: 131_072,
            kept_bytes: 512 << 20,
            pages_served: 1000,
            served_bytes: 1000 * 4096,
            pages_served_in_part: 3,
            refused: Refused { tag_mismatch: 10, overwritten: 20, trimmed: 30 },
            pages_remaining: 130_012,
            remaining_bytes: 130_012 * 4096,
        },
        dumps: vec![dump()],
        last_recovery: Some(recovery()),
        parking_since: None,
        rejuvenating_since: None,
        last_rejuvenation: None,
        unparked: None,
        save: None,
        frozen: Some(FrozenStatus { file_systems: Some(2), for_ms: Some(1500.0), problem: None }),
        pending: vec![
            PendingChange { key: "boot.cmdline".into(), until: PendingUntil::NextGuest },
            PendingChange { key: "disks.root.queues".into(), until: PendingUntil::NextStart },
        ],
        restore: Some(restore()),
        refill: Some(RefillStatus { map_bytes: 70_000, read_bytes: 74_096, incarnation_read_bytes: Some(74_096) }),
    }
}

/// The same machine without what is wrong with it.
pub fn healthy() -> MachineStatus {
    let status = status();
    let restore = status.restore.map(|restore| RestoreStatus { waits: Vec::new(), ..restore });
    MachineStatus { restore, ..status }
}

/// A restore with a damaged part.
fn restore() -> RestoreStatus {
    RestoreStatus {
        snapshot: "/srv/snapshots/web-1".into(),
        mode: "working-set".into(),
        pages: 90_000,
        pages_prefetched: 11_000,
        pages_lazy: 40,
        pages_filled: 70_000,
        pages_missing: 8_960,
        faults: 45,
        fault_us_p50: Some(14),
        fault_us_p99: Some(2500),
        fault_us_p50_stored: None,
        fault_us_p99_stored: None,
        fault_us_total: 9_000,
        complete: false,
        waits: vec!["/srv/snapshots/web-1/ram: pages 7 to 22 of the guest's memory are damaged".into()],
    }
}

/// The QEMU that a rejuvenation would start does not exist.
pub fn signs() -> Signs {
    Signs {
        machine: "web".into(),
        qemu: QemuAge {
            pid: 4712,
            generation: 2,
            uptime_s: 2_700_000.0,
            version: "7.2.9".into(),
            installed_version: None,
            program_is_gone: true,
            own_bytes: Growth { at_start: Some(50 << 20), now: Some(400 << 20) },
            descriptors: Growth { at_start: Some(31), now: Some(33) },
        },
        program: Some("/nowhere/qemu".into()),
        hindrance: None,
        policy: Some(RejuvenateConfig { every_s: Some(2_592_000), rss_growth_mib: None, window: None }),
    }
}

fn nvram() -> NvramStatus {
    NvramStatus {
        name: "journal".into(),
        device: NvramDevice::Disk,
        bytes: 64 << 20,
        mirror: "sync".into(),
        mirror_file: Some("/srv/journal".into()),
        unmirrored_bytes: Some(8192),
        problem: None,
        connected: true,
        reads: 12,
        writes: 34,
        flushes: 5,
    }
}

fn disk() -> DiskStatus {
    DiskStatus {
        name: "root".into(),
        path: "/machines/root.img".into(),
        format: "raw".into(),
        engine: "raw, io_uring, O_DIRECT".into(),
        read_only: false,
        bytes: 2 << 30,
        connected: true,
        silent: false,
        reads: 1200,
        writes: 300,
        flushes: 4,
        flushes_spared: 1,
        discards: 1,
        read_warm_bytes: 4 << 20,
        read_image_bytes: 1 << 20,
        written_bytes: 2 << 20,
        image_operations: 900,
        image_us: 720_000,
        io_errors: 0,
        waiting_for_space: 0,
        bad_requests: 0,
        throttled_ms: 15,
        arrival: Some(ArrivalStatus {
            source: "s3://bucket/web-1/disk-root".into(),
            bytes: 1 << 30,
            missing_bytes: 1 << 20,
            waits: Vec::new(),
        }),
    }
}

fn recovery() -> Recovery {
    let phase = |phase: &str, started_ms, duration_ms| PhaseTime { phase: phase.into(), started_ms, duration_ms };
    Recovery {
        incarnation: 2,
        cause: EndCause::Panic,
        warm: true,
        why_cold: None,
        started_at: "2026-03-01T12:00:00.123Z".into(),
        duration_ms: 131.0,
        phases: vec![
            phase("drain", 0.0, 1.0),
            phase("bank", 1.0, 0.5),
            phase("attach", 1.5, 0.1),
            phase("launch", 11.0, 120.0),
            phase("settle", 2.0, 60.0),
        ],
        pages_kept: 131_072,
        kept_bytes: 512 << 20,
        released_bytes: 100 << 20,
        panic: Some("sysrq triggered crash".into()),
        dump: Some(dump()),
    }
}

const LATER: RemountLater = RemountLater { hits: 70, ember_hits: 800, misses: 90 };

pub fn remount_plan() -> RemountPlan {
    let disk = RemountDisk {
        disk: "root".into(),
        blocks: 6100,
        held_blocks: 6000,
        hits: 5850,
        ember_hits: 10,
        misses: 150,
        hit_pct: Some(97.5),
        late_blocks: 31,
        later: LATER,
    };
    let volume = |partition, misses| RemountVolume {
        disk: "root".into(),
        partition,
        offset: 1 << 20,
        bytes: 10 << 20,
        blocks: 3000,
        held_blocks: 2900,
        hits: 3000,
        misses,
        hit_pct: Some(95.2),
        label: partition.filter(|&number| number == 6).map(|_| "mail".to_owned()),
        later: LATER,
    };
    RemountPlan {
        name: "web".into(),
        ready: true,
        limit_bytes: 64 << 20,
        resident_bytes: 24 << 20,
        blocks: 6100,
        held_blocks: 6000,
        no_room_blocks: 10,
        expected_hit_pct: Some(98.2),
        hit_pct: Some(97.5),
        late_blocks: 31,
        later: LATER,
        memory_reads: 2100,
        in_line_pct: Some(100.0),
        memory_reads_beside_writes: 120,
        memory_read_us_p50: Some(4.5),
        memory_read_us_p99: Some(61.25),
        memory_read_beside_writes_us_p50: Some(5.25),
        memory_read_beside_writes_us_p99: Some(64.5),
        disks: vec![disk],
        volumes: vec![volume(Some(1), 0), volume(Some(5), 20), volume(Some(6), 129), volume(None, 1)],
        reads: vec![
            PlannedRun { disk: "root".into(), offset: 0, bytes: 4 << 10, held: true },
            PlannedRun { disk: "root".into(), offset: 1 << 20, bytes: 8 << 10, held: false },
        ],
        reads_unlisted_blocks: 3,
        missed: vec![MissedRun { disk: "root".into(), offset: 1 << 20, bytes: 8 << 10 }],
        missed_unlisted_blocks: 0,
        damaged_blocks: 0,
    }
}

pub fn dump() -> DumpStatus {
    DumpStatus {
        incarnation: 1,
        state: DumpState::Writing,
        why: None,
        live: false,
        file: "/dumps/web-1-20260301T120000123Z.vmcore".into(),
        level: 31,
        format: DumpFormat::Kdump,
        compression: DumpCompression::Zstd,
        panic: Some("sysrq triggered crash".into()),
        warnings: vec!["no registers: QEMU was gone".into()],
        started_at: "2026-03-01T12:00:00.123Z".into(),
        duration_s: 2.5,
        pages: 40_000,
        pages_written: 10_000,
        excluded: DumpExcluded { cache: 100_000, free: 90_000, user: 50_000, ..DumpExcluded::default() },
        held_bytes: 30_000 * 4096,
        written_bytes: 12 << 20,
        percent: 25.0,
        mib_per_s: 40.0,
        eta_s: Some(3.0),
    }
}

/// QEMU as a journal describes it.
pub fn qemu_identity(pid: u32) -> QemuIdentity {
    QemuIdentity {
        pid,
        start_ticks: 1,
        generation: 1,
        version: "7.2.0".into(),
        accelerator: "tcg".into(),
        accelerator_why: String::new(),
        userfault_fd: None,
        helper_fd: None,
        stale: false,
        at_start: None,
        vmgenid: None,
        guest_agent: false,
    }
}

/// This process stands for the QEMU in a dead keeper's journal.
pub fn this_process() -> QemuIdentity {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let start_ticks = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
    QemuIdentity { start_ticks, ..qemu_identity(std::process::id()) }
}

/// The note of a guest that was parked before the host's last start.
pub fn parked(machine: &str) -> Parked {
    Parked {
        version: PARKED_VERSION,
        machine: machine.to_owned(),
        stopped_at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_772_366_400_123),
        boot_id: "7c1d8a7e-0000-4000-8000-000000000001".into(),
        qemu_version: "7.2.9".into(),
        accelerator: "tcg".into(),
        incarnation: 3,
        generation: 5,
        hardware: Vec::new(),
        ram_bytes: 64 << 20,
        ram_sum: String::new(),
        nvram: Vec::new(),
        state: Part { bytes: 3, blake3: String::new() },
        vmgenid: None,
        guest_agent: false,
        started_with: None,
        write_through: Vec::new(),
        frozen: false,
        disks: Vec::new(),
        images: Vec::new(),
    }
}
