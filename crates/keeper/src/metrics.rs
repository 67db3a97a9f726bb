//! The status of one machine, or of all machines of a host, as metrics in Prometheus' text format.
//!
//! The text and `docs/metrics.md` come from one table. The format is written by hand: it has three lines per metric,
//! and a registry would need a copy of every value that the status holds already.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use hearth_api::{
    ArrivalStatus, DiskStatus, DumpState, DumpStatus, MachineState, MachineStatus, NvramStatus, RefillStatus,
    RestoreStatus,
};

pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4";

/// A metric: name, meaning, and its values in a status.
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    pub meaning: &'static str,
    values: Values,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, except when the keeper restarts.
    Counter,
    Gauge,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// Source of a metric's values, which also determines its labels. Every metric has the label `machine`.
enum Values {
    Machine(fn(&MachineStatus) -> f64),
    /// None if the value does not exist now; then no line is written.
    Sometimes(fn(&MachineStatus) -> Option<f64>),
    /// From the dump that is under way, or else the last one.
    Dump(fn(&DumpStatus) -> f64),
    /// From a restored guest.
    Restore(fn(&RestoreStatus) -> f64),
    /// From a machine with a cache map.
    Refill(fn(&RefillStatus) -> Option<f64>),
    /// Label `percentile`.
    Faults,
    /// One value per state, 1 for the current one.
    States,
    /// Label `reason`.
    Refused,
    /// Label `disk`.
    Disks(fn(&DiskStatus) -> f64),
    /// Label `disk`; only for disks that are being fetched.
    Arrivals(fn(&ArrivalStatus) -> u64),
    /// Label `nvram`; only for devices with a mirror.
    Mirrors(fn(&NvramStatus) -> f64),
    /// Label `phase`.
    Phases,
    /// Labels `version`, `qemu_version`, `accelerator`; the value is 1.
    Info,
}

impl Values {
    fn labels(&self) -> &'static [&'static str] {
        match self {
            Self::Machine(_) | Self::Sometimes(_) | Self::Dump(_) | Self::Restore(_) | Self::Refill(_) => &[],
            Self::Faults => &["percentile"],
            Self::States => &["state"],
            Self::Refused => &["reason"],
            Self::Disks(_) | Self::Arrivals(_) => &["disk"],
            Self::Mirrors(_) => &["nvram"],
            Self::Phases => &["phase"],
            Self::Info => &["version", "qemu_version", "accelerator"],
        }
    }
}

const fn gauge(name: &'static str, meaning: &'static str, value: fn(&MachineStatus) -> f64) -> Metric {
    Metric { name, kind: Kind::Gauge, meaning, values: Values::Machine(value) }
}

/// A metric of the dump that is under way, or else the last one.
const fn dump(name: &'static str, meaning: &'static str, value: fn(&DumpStatus) -> f64) -> Metric {
    Metric { name, kind: Kind::Gauge, meaning, values: Values::Dump(value) }
}

/// A metric of the current incarnation, if it was restored from a snapshot.
const fn restore(name: &'static str, meaning: &'static str, value: fn(&RestoreStatus) -> f64) -> Metric {
    Metric { name, kind: Kind::Gauge, meaning, values: Values::Restore(value) }
}

const fn disk(name: &'static str, meaning: &'static str, value: fn(&DiskStatus) -> f64) -> Metric {
    Metric { name, kind: Kind::Counter, meaning, values: Values::Disks(value) }
}

fn is_under_way(dump: &DumpStatus) -> bool {
    matches!(dump.state, DumpState::Planning | DumpState::Writing)
}

/// The dump that is under way, or else the last one that was.
fn current_dump(status: &MachineStatus) -> Option<&DumpStatus> {
    let last = || status.dumps.iter().rfind(|dump| dump.state != DumpState::Queued);
    status.dumps.iter().find(|dump| is_under_way(dump)).or_else(last)
}

/// All metrics of a machine, in the order of the text.
pub static METRICS: &[Metric] = &[
    Metric {
        name: "hearth_info",
        kind: Kind::Gauge,
        meaning: "Versions and accelerator of the machine; the value is 1",
        values: Values::Info,
    },
    Metric {
        name: "hearth_state",
        kind: Kind::Gauge,
        meaning: "1 for the machine's current state, 0 for all others",
        values: Values::States,
    },
    gauge(
        "hearth_waiting_after_crash",
        "1 if the machine crashes again and again, and waits before its next guest starts",
        |status| f64::from(u8::from(status.crash_loop)),
    ),
    gauge(
        "hearth_waiting_after_failed_start",
        "1 if the next guest could not be started, and the machine waits",
        |status| f64::from(u8::from(status.next_start.is_some() && !status.crash_loop)),
    ),
    gauge("hearth_incarnation", "Number of the current incarnation", |status| f64::from(status.incarnation)),
    gauge("hearth_uptime_seconds", "Time since the current incarnation started", |status| status.uptime_s),
    gauge("hearth_keeper_uptime_seconds", "Time since the keeper started", |status| status.keeper.uptime_s),
    gauge(
        "hearth_keeper_loop_stall_seconds_max",
        "Longest time in which the keeper's main loop handled one event",
        |status| status.keeper.loop_stall_ms_max / 1e3,
    ),
    Metric {
        name: "hearth_qemu_generation",
        kind: Kind::Gauge,
        meaning: "Generation of the current QEMU process",
        values: Values::Sometimes(|status| status.qemu.as_ref().map(|qemu| f64::from(qemu.generation))),
    },
    gauge("hearth_memory_ram_bytes", "RAM as the guest sees it", |status| status.memory.ram_bytes as f64),
    gauge("hearth_memory_resident_bytes", "Host memory used by the current incarnation", |status| {
        status.memory.resident_bytes as f64
    }),
    gauge("hearth_memory_ember_bytes", "Host memory used by dead incarnations", |status| {
        status.memory.ember_bytes as f64
    }),
    gauge("hearth_memory_budget_bytes", "Host memory that the machine's files may use", |status| {
        status.memory.budget_bytes as f64
    }),
    gauge("hearth_memory_headroom_bytes", "Memory that they may use in addition while a dump holds memory", |status| {
        status.memory.headroom_bytes as f64
    }),
    gauge("hearth_memory_peak_bytes", "Peak host memory of the machine's files since the keeper started", |status| {
        status.memory.peak_bytes as f64
    }),
    Metric {
        name: "hearth_memory_granted_bytes",
        kind: Kind::Gauge,
        meaning: "RAM granted to the guest so far, while admission is on",
        values: Values::Sometimes(|status| status.memory.admission.map(|granted| granted.granted_bytes as f64)),
    },
    Metric {
        name: "hearth_memory_waiting_threads",
        kind: Kind::Gauge,
        meaning: "QEMU threads waiting for memory",
        values: Values::Sometimes(|status| status.memory.admission.map(|granted| granted.waiting as f64)),
    },
    Metric {
        name: "hearth_memory_guest_wait_seconds",
        kind: Kind::Gauge,
        meaning: "Total time that threads of the current QEMU waited for memory",
        values: Values::Sometimes(|status| {
            status.memory.admission.map(|granted| granted.guest_wait_ms as f64 / 1000.0)
        }),
    },
    gauge("hearth_memory_held_bytes", "Memory of dead incarnations that dumps have not written yet", |status| {
        status.memory.held_bytes as f64
    }),
    gauge("hearth_memory_boot_set_bytes", "Host memory used by the boot set", |status| {
        status.memory.boot_set_bytes as f64
    }),
    gauge("hearth_memory_nvram_bytes", "Host memory used by NVRAM devices", |status| status.memory.nvram_bytes as f64),
    gauge("hearth_memory_dump_buffer_bytes", "Memory used by the buffers of running dumps", |status| {
        status.memory.dump_buffer_bytes as f64
    }),
    gauge("hearth_dumps_waiting", "Dumps that wait for `hearth dump --resume` or `--discard`", |status| {
        status.dumps.iter().filter(|dump| dump.state == DumpState::Waiting).count() as f64
    }),
    gauge("hearth_dumps_queued", "Dumps that wait for another dump to end", |status| {
        status.dumps.iter().filter(|dump| dump.state == DumpState::Queued).count() as f64
    }),
    gauge("hearth_dumps_running", "Dumps that are being written or prepared", |status| {
        status.dumps.iter().filter(|dump| is_under_way(dump)).count() as f64
    }),
    dump("hearth_dump_pages", "Pages that belong in the dump that is under way, or else in the last one", |dump| {
        dump.pages as f64
    }),
    dump("hearth_dump_written_pages", "Pages written to that dump's file", |dump| dump.pages_written as f64),
    dump("hearth_dump_written_bytes", "Bytes written to that dump's file", |dump| dump.written_bytes as f64),
    dump("hearth_dump_duration_seconds", "Duration of that dump, so far or in all", |dump| dump.duration_s),
    gauge("hearth_ledger_pages", "Guest pages whose disk block the ledger knows", |status| status.ledger_pages as f64),
    gauge("hearth_ember_kept_pages", "Ember pages kept when the last incarnation ended", |status| {
        status.ember.pages_kept as f64
    }),
    gauge("hearth_ember_served_pages", "Ember pages moved to the current incarnation", |status| {
        status.ember.pages_served as f64
    }),
    Metric {
        name: "hearth_ember_refused_pages",
        kind: Kind::Gauge,
        meaning: "Ember pages that were not used, by reason",
        values: Values::Refused,
    },
    gauge("hearth_ember_remaining_pages", "Ember pages not used yet", |status| status.ember.pages_remaining as f64),
    Metric {
        name: "hearth_recovery_duration_seconds",
        kind: Kind::Gauge,
        meaning: "Duration of the last recovery, until the next incarnation ran",
        values: Values::Sometimes(|status| status.last_recovery.as_ref().map(|last| last.duration_ms / 1000.0)),
    },
    Metric {
        name: "hearth_recovery_phase_seconds",
        kind: Kind::Gauge,
        meaning: "Duration of each phase of the last recovery",
        values: Values::Phases,
    },
    Metric {
        name: "hearth_refill_map_bytes",
        kind: Kind::Gauge,
        meaning: "Size of the list of what the last guest had in its page cache; 0 if there is none yet",
        values: Values::Refill(|refill| Some(refill.map_bytes as f64)),
    },
    Metric {
        name: "hearth_refill_read_bytes_total",
        kind: Kind::Counter,
        meaning: "Bytes of that list's disk that guests have read",
        values: Values::Refill(|refill| Some(refill.read_bytes as f64)),
    },
    Metric {
        name: "hearth_refill_incarnation_read_bytes",
        kind: Kind::Gauge,
        meaning: "The part of it that the current incarnation has read; no value if it is older than the keeper",
        values: Values::Refill(|refill| refill.incarnation_read_bytes.map(|bytes| bytes as f64)),
    },
    restore("hearth_restore_complete", "1 if all of the snapshot's memory is loaded", |restore| {
        f64::from(u8::from(restore.complete))
    }),
    restore("hearth_restore_pages", "4 KiB pages stored in the snapshot", |restore| restore.pages as f64),
    restore("hearth_restore_prefetched_pages", "Pages loaded before the guest ran", |restore| {
        restore.pages_prefetched as f64
    }),
    restore("hearth_restore_lazy_pages", "Pages loaded on a page fault", |restore| restore.pages_lazy as f64),
    restore("hearth_restore_filled_pages", "Pages loaded beside a faulting one, or in the background", |restore| {
        restore.pages_filled as f64
    }),
    restore("hearth_restore_missing_pages", "Pages not loaded yet", |restore| restore.pages_missing as f64),
    restore("hearth_restore_faults", "Guest page faults served", |restore| restore.faults as f64),
    restore("hearth_restore_guest_wait_seconds", "Total time that guest page faults took", |restore| {
        restore.fault_us_total as f64 / 1e6
    }),
    Metric {
        name: "hearth_restore_fault_seconds",
        kind: Kind::Gauge,
        meaning: "Median and 99th percentile of guest page-fault times",
        values: Values::Faults,
    },
    restore("hearth_restore_stuck", "Problems that keep missing pages from being loaded", |restore| {
        restore.waits.len() as f64
    }),
    Metric {
        name: "hearth_disk_connected",
        kind: Kind::Gauge,
        meaning: "1 if a QEMU is connected to the disk",
        values: Values::Disks(|disk| f64::from(u8::from(disk.connected))),
    },
    Metric {
        name: "hearth_disk_silent",
        kind: Kind::Gauge,
        meaning: "1 if the connected QEMU has sent the disk nothing, so that the guest may wait for it",
        values: Values::Disks(|disk| f64::from(u8::from(disk.silent))),
    },
    Metric {
        name: "hearth_disk_size_bytes",
        kind: Kind::Gauge,
        meaning: "Size of the disk as the guest sees it",
        values: Values::Disks(|disk| disk.bytes as f64),
    },
    Metric {
        name: "hearth_disk_missing_bytes",
        kind: Kind::Gauge,
        meaning: "Bytes of the disk not yet fetched from its object store",
        values: Values::Arrivals(|arrival| arrival.missing_bytes),
    },
    Metric {
        name: "hearth_disk_stuck",
        kind: Kind::Gauge,
        meaning: "Problems that keep missing parts of the disk from being fetched; reads of them wait",
        values: Values::Arrivals(|arrival| arrival.waits.len() as u64),
    },
    disk("hearth_disk_reads_total", "Read requests", |disk| disk.reads as f64),
    disk("hearth_disk_writes_total", "Write requests", |disk| disk.writes as f64),
    disk("hearth_disk_flushes_total", "Flush requests", |disk| disk.flushes as f64),
    disk("hearth_disk_discards_total", "Discard and write-zeroes requests", |disk| disk.discards as f64),
    disk("hearth_disk_read_warm_bytes_total", "Bytes read that came from memory", |disk| disk.read_warm_bytes as f64),
    disk("hearth_disk_read_image_bytes_total", "Bytes read that came from the image", |disk| {
        disk.read_image_bytes as f64
    }),
    disk("hearth_disk_written_bytes_total", "Bytes written", |disk| disk.written_bytes as f64),
    disk("hearth_disk_image_operations_total", "Operations on the image that have ended", |disk| {
        disk.image_operations as f64
    }),
    disk("hearth_disk_image_seconds_total", "Sum of the times of these operations", |disk| disk.image_us as f64 / 1e6),
    disk("hearth_disk_io_errors_total", "Requests that failed with an I/O error of the image", |disk| {
        disk.io_errors as f64
    }),
    Metric {
        name: "hearth_disk_waiting_for_space",
        kind: Kind::Gauge,
        meaning: "Requests waiting for space in the image's file system",
        values: Values::Disks(|disk| disk.waiting_for_space as f64),
    },
    disk("hearth_disk_bad_requests_total", "Malformed guest requests", |disk| disk.bad_requests as f64),
    disk("hearth_disk_throttled_seconds_total", "Time that requests waited for the disk's rate limits", |disk| {
        disk.throttled_ms as f64 / 1e3
    }),
    Metric {
        name: "hearth_nvram_mirror_failing",
        kind: Kind::Gauge,
        meaning: "1 if the NVRAM device's mirror cannot be written",
        values: Values::Mirrors(|nvram| f64::from(u8::from(nvram.problem.is_some()))),
    },
    gauge(
        "hearth_file_systems_stuck_frozen",
        "1 if the guest's file systems were frozen for a save and could not be thawed so far",
        |status| f64::from(u8::from(status.frozen.as_ref().is_some_and(|frozen| frozen.problem.is_some()))),
    ),
];

/// What a host knows of a machine, with or without its keeper's answer.
pub struct HostMetric {
    name: &'static str,
    meaning: &'static str,
    /// The fact whose value is 1.
    fact: fn(&Seen) -> bool,
}

/// One machine, as the host sees it.
#[derive(Default)]
pub struct Seen<'a> {
    pub name: &'a str,
    /// None: its keeper does not answer.
    pub status: Option<&'a MachineStatus>,
    /// The guest runs without a keeper.
    pub orphaned: bool,
    /// A keeper lives, but does not answer.
    pub silent: bool,
    /// The guest is parked in memory.
    pub parked: bool,
    /// An error ended the last keeper, and no guest runs since.
    pub failed: bool,
    /// It belongs to another user.
    pub forbidden: bool,
}

/// All metrics that `hearth host` has in addition, in the order of the text.
static HOST_METRICS: &[HostMetric] = &[
    HostMetric {
        name: "hearth_keeper_up",
        meaning: "1 if the machine's keeper answers",
        fact: |seen| seen.status.is_some(),
    },
    HostMetric {
        name: "hearth_guest_without_keeper",
        meaning: "1 if the guest runs, its keeper has died, and nobody serves its disks",
        fact: |seen| seen.orphaned,
    },
    HostMetric {
        name: "hearth_keeper_silent",
        meaning: "1 if the machine's keeper lives, but does not answer",
        fact: |seen| seen.silent,
    },
    HostMetric { name: "hearth_guest_parked", meaning: "1 if the guest is parked in memory", fact: |seen| seen.parked },
    HostMetric {
        name: "hearth_machine_failed",
        meaning: "1 if an error ended the machine's last keeper or kept it from starting, and no guest runs since",
        fact: |seen| seen.failed,
    },
    HostMetric {
        name: "hearth_machine_forbidden",
        meaning: "1 if the machine belongs to another user than `hearth host`, so that nothing else is known of it",
        fact: |seen| seen.forbidden,
    },
];

const HOST_TIME: &str = "hearth_host_time_seconds";
const HOST_TIME_MEANING: &str = "When `hearth host` looked at the machines, in seconds since 1970";

/// The status of one machine in Prometheus' text format.
pub fn text(status: &MachineStatus) -> String {
    let mut text = String::with_capacity(8192);
    write_machines(&mut text, &[status]);
    text
}

/// All machines of a host in Prometheus' text format. The samples of a metric are together, as the format demands.
pub fn text_of_host(machines: &[Seen<'_>], now: SystemTime) -> String {
    let mut text = String::with_capacity(8192 * (machines.len() + 1));
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    write_family(&mut text, (HOST_TIME, HOST_TIME_MEANING, Kind::Gauge), |text| {
        line(text, format_args!("{HOST_TIME} {seconds}"));
    });
    for metric in HOST_METRICS {
        write_family(&mut text, (metric.name, metric.meaning, Kind::Gauge), |text| {
            for seen in machines {
                write_sample(text, metric.name, &[("machine", seen.name)], f64::from(u8::from((metric.fact)(seen))));
            }
        });
    }
    let statuses: Vec<_> = machines.iter().filter_map(|seen| seen.status).collect();
    write_machines(&mut text, &statuses);
    text
}

fn write_machines(text: &mut String, statuses: &[&MachineStatus]) {
    for metric in METRICS {
        write_family(text, (metric.name, metric.meaning, metric.kind), |text| {
            statuses.iter().for_each(|status| metric.write_values(text, status));
        });
    }
}

/// Writes a metric's head and samples; nothing if it has no samples.
fn write_family(text: &mut String, (name, meaning, kind): (&str, &str, Kind), write_samples: impl FnOnce(&mut String)) {
    let start = text.len();
    line(text, format_args!("# HELP {name} {meaning}."));
    line(text, format_args!("# TYPE {name} {}", kind.name()));
    let head = text.len();
    write_samples(text);
    if text.len() == head {
        text.truncate(start);
    }
}

impl Metric {
    fn write_values(&self, text: &mut String, status: &MachineStatus) {
        let mut sample = |labels: &[&str], value: f64| self.write_sample(text, &status.name, labels, value);
        match &self.values {
            Values::Machine(value) => sample(&[], value(status)),
            Values::Sometimes(value) => value(status).into_iter().for_each(|value| sample(&[], value)),
            Values::Dump(value) => current_dump(status).into_iter().for_each(|dump| sample(&[], value(dump))),
            Values::Restore(value) => status.restore.iter().for_each(|restore| sample(&[], value(restore))),
            Values::Refill(value) => status.refill.iter().filter_map(value).for_each(|value| sample(&[], value)),
            Values::Faults => {
                let restore = status.restore.iter();
                let percentiles = restore.flat_map(|now| [("50", now.fault_us_p50), ("99", now.fault_us_p99)]);
                let known = percentiles.filter_map(|(percentile, us)| Some((percentile, us?)));
                known.for_each(|(percentile, us)| sample(&[percentile], us as f64 / 1e6));
            }
            Values::States => MachineState::ALL
                .iter()
                .for_each(|state| sample(&[state.name()], f64::from(u8::from(*state == status.state)))),
            Values::Refused => {
                let refused = status.ember.refused;
                sample(&["tag_mismatch"], refused.tag_mismatch as f64);
                sample(&["overwritten"], refused.overwritten as f64);
                sample(&["trimmed"], refused.trimmed as f64);
            }
            Values::Disks(value) => status.disks.iter().for_each(|disk| sample(&[&disk.name], value(disk))),
            Values::Arrivals(value) => {
                let arrivals = status.disks.iter().filter_map(|disk| Some((&disk.name, disk.arrival.as_ref()?)));
                arrivals.for_each(|(name, arrival)| sample(&[name], value(arrival) as f64));
            }
            Values::Mirrors(value) => {
                let mirrored = status.nvram.iter().filter(|nvram| nvram.mirror_file.is_some());
                mirrored.for_each(|nvram| sample(&[&nvram.name], value(nvram)));
            }
            Values::Phases => {
                let mut sums_ms = BTreeMap::new();
                // An attempt to start that failed has the same phases.
                for phase in status.last_recovery.iter().flat_map(|recovery| &recovery.phases) {
                    *sums_ms.entry(phase.phase.as_str()).or_insert(0.0) += phase.duration_ms;
                }
                sums_ms.into_iter().for_each(|(phase, ms): (_, f64)| sample(&[phase], ms / 1000.0));
            }
            Values::Info => {
                let (version, accelerator) =
                    status.qemu.as_ref().map_or(("", ""), |qemu| (qemu.version.as_str(), qemu.accelerator.as_str()));
                sample(&[&status.keeper.version, version, accelerator], 1.0);
            }
        }
    }

    fn write_sample(&self, text: &mut String, machine: &str, values: &[&str], value: f64) {
        let labels = self.values.labels().iter().copied().zip(values.iter().copied());
        let labels: Vec<_> = std::iter::once(("machine", machine)).chain(labels).collect();
        write_sample(text, self.name, &labels, value);
    }
}

fn write_sample(text: &mut String, name: &str, labels: &[(&str, &str)], value: f64) {
    let labels: Vec<_> = labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).collect();
    line(text, format_args!("{name}{{{}}} {value}", labels.join(",")));
}

fn line(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    writeln!(text, "{arguments}").expect("a string takes everything");
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

const HEAD: &str = "# Metrics

*Generated from the table of metrics in `crates/keeper/src/metrics.rs`. Do not edit: `UPDATE=1 cargo test -p hearth
generated` rewrites it.*

[`hearth host`](host-page.md) has the metrics of all machines of a host, in Prometheus' text format. Every metric has the
label `machine`. Counters count since the machine's keeper started.

    hearth host --web 127.0.0.1:9180       # Prometheus reads http://127.0.0.1:9180/metrics
    hearth host --textfile /var/lib/prometheus/node-exporter/hearth.prom      # or node_exporter reads this file

Alert rules and a Grafana dashboard are in `packaging/prometheus/` and `packaging/grafana/` (installed in
`/usr/share/doc/hearth/examples`); they load as they are. One machine alone, without `hearth host`:

    curl --unix-socket /run/hearth/web/api.sock http://localhost/metrics

| Metric | Type | More labels | Meaning |
|---|---|---|---|
";

const HOST_HEAD: &str = "
Only `hearth host` has these, also of machines without a keeper:

| Metric | Type | Meaning |
|---|---|---|
";

/// The page `docs/metrics.md`. Ends with a newline.
pub fn page() -> String {
    let mut page = HEAD.to_owned();
    for metric in METRICS {
        let labels: Vec<String> = metric.values.labels().iter().map(|label| format!("`{label}`")).collect();
        let (name, kind, meaning) = (metric.name, metric.kind.name(), metric.meaning);
        line(&mut page, format_args!("| `{name}` | {kind} | {} | {meaning} |", labels.join(", ")));
    }
    page.push_str(HOST_HEAD);
    line(&mut page, format_args!("| `{HOST_TIME}` | gauge | {HOST_TIME_MEANING}; without the label `machine` |"));
    for HostMetric { name, meaning, .. } in HOST_METRICS {
        line(&mut page, format_args!("| `{name}` | gauge | {meaning} |"));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn every_metric_has_values_in_a_full_status() {
        let text = text(&sample::status());
        for metric in METRICS {
            let values = text.lines().filter(|line| line.starts_with(&format!("{}{{", metric.name))).count();
            assert!(values > 0, "{} has no value", metric.name);
            assert!(metric.name.starts_with("hearth_"));
            assert_eq!(metric.kind == Kind::Counter, metric.name.ends_with("_total"), "{}", metric.name);
        }
    }

    #[test]
    fn lines_are_what_prometheus_reads() {
        let mut status = sample::status();
        status.name = "we\"b".into();
        status.disks[0].silent = true;
        status.nvram[0].problem = Some("no space".into());
        status.frozen.as_mut().unwrap().problem = Some("no answer".into());
        let text = text(&status);
        for line in [
            "# TYPE hearth_disk_reads_total counter",
            r#"hearth_disk_reads_total{machine="we\"b",disk="root"} 1200"#,
            r#"hearth_state{machine="we\"b",state="running"} 1"#,
            r#"hearth_state{machine="we\"b",state="failed"} 0"#,
            r#"hearth_ember_refused_pages{machine="we\"b",reason="trimmed"} 30"#,
            r#"hearth_recovery_phase_seconds{machine="we\"b",phase="launch"} 0.12"#,
            r#"hearth_restore_missing_pages{machine="we\"b"} 8960"#,
            r#"hearth_restore_fault_seconds{machine="we\"b",percentile="99"} 0.0025"#,
            r#"hearth_restore_complete{machine="we\"b"} 0"#,
            r#"hearth_disk_missing_bytes{machine="we\"b",disk="root"} 1048576"#,
            r#"hearth_disk_silent{machine="we\"b",disk="root"} 1"#,
            r#"hearth_nvram_mirror_failing{machine="we\"b",nvram="journal"} 1"#,
            r#"hearth_file_systems_stuck_frozen{machine="we\"b"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "no line {line} in\n{text}");
        }
    }

    #[test]
    fn failed_start_is_no_crash_loop() {
        let check = |crash_loop: bool, looping: u8, failed: u8| {
            let text = text(&MachineStatus { next_start: Some("soon".into()), crash_loop, ..sample::status() });
            for (reason, value) in [("crash", looping), ("failed_start", failed)] {
                let line = format!("hearth_waiting_after_{reason}{{machine=\"web\"}} {value}\n");
                assert!(text.contains(&line), "no line {line} in\n{text}");
            }
        };
        check(true, 1, 0);
        check(false, 0, 1);
    }

    #[test]
    fn dump_under_way_is_reported_while_another_is_queued() {
        let mut status = sample::status();
        let queued = DumpStatus { state: DumpState::Queued, pages_written: 0, ..sample::dump() };
        let complete = DumpStatus { state: DumpState::Complete, pages_written: 7, ..sample::dump() };
        status.dumps = vec![complete.clone(), sample::dump(), queued.clone()];
        let check = |status: &MachineStatus, queued: u32, running: u32, written: u32| {
            let text = text(status);
            for (metric, value) in [("s_queued", queued), ("s_running", running), ("_written_pages", written)] {
                let line = format!("hearth_dump{metric}{{machine=\"web\"}} {value}\n");
                assert!(text.contains(&line), "no line {line} in\n{text}");
            }
        };
        check(&status, 1, 1, 10_000);
        status.dumps = vec![complete, queued];
        check(&status, 1, 0, 7);
    }

    #[test]
    fn samples_of_all_machines_are_together() {
        let (web, mut db) = (sample::status(), sample::status());
        db.name = "db".into();
        let seen = |name, status| Seen { name, status, ..Seen::default() };
        let text = text_of_host(&[seen("web", Some(&web)), seen("db", Some(&db)), seen("dead", None)], UNIX_EPOCH);
        let families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        assert_eq!(families.len(), METRICS.len() + HOST_METRICS.len() + 1);
        let mut family = "";
        for line in text.lines().filter(|line| !line.starts_with("# HELP ")) {
            match line.strip_prefix("# TYPE ") {
                Some(rest) => family = rest.split(' ').next().unwrap(),
                None => assert!(
                    line.starts_with(&format!("{family}{{")) || family == HOST_TIME,
                    "{line} is in the family {family}"
                ),
            }
        }
        for line in [
            "hearth_host_time_seconds 0",
            r#"hearth_keeper_up{machine="db"} 1"#,
            r#"hearth_keeper_up{machine="dead"} 0"#,
            r#"hearth_disk_image_seconds_total{machine="db",disk="root"} 0.72"#,
            r#"hearth_disk_image_seconds_total{machine="web",disk="root"} 0.72"#,
        ] {
            assert!(text.lines().any(|found| found == line), "no line {line} in\n{text}");
        }
    }

    #[test]
    fn promtool_finds_nothing_to_complain_about() {
        let mut promtool = std::process::Command::new("promtool");
        promtool.args(["check", "metrics"]).stdin(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        let Ok(mut promtool) = promtool.stdout(std::process::Stdio::piped()).spawn() else {
            eprintln!("not tested: there is no promtool (Debian: package prometheus)");
            return;
        };
        let status = sample::status();
        let seen = Seen { name: "web", status: Some(&status), ..Seen::default() };
        let text = text_of_host(&[seen], SystemTime::now());
        std::io::Write::write_all(&mut promtool.stdin.take().unwrap(), text.as_bytes()).unwrap();
        let output = promtool.wait_with_output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        assert!(output.status.success() && said.is_empty(), "{said}");
    }

    #[test]
    fn phase_that_took_place_twice_has_one_line() {
        let mut status = sample::status();
        let phases = &mut status.last_recovery.as_mut().unwrap().phases;
        let again = phases.clone();
        phases.extend(again);
        let text = text(&status);
        let lines: Vec<_> = text.lines().filter(|line| line.contains("phase=\"launch\"")).collect();
        assert_eq!(lines, [r#"hearth_recovery_phase_seconds{machine="web",phase="launch"} 0.24"#]);
    }

    #[test]
    fn missing_values_have_no_line() {
        let mut status = sample::status();
        status.qemu = None;
        status.last_recovery = None;
        status.restore = None;
        status.refill = status.refill.map(|refill| RefillStatus { incarnation_read_bytes: None, ..refill });
        status.disks[0].arrival = None;
        let text = text(&status);
        for name in [
            "hearth_qemu_generation",
            "hearth_recovery_duration_seconds",
            "hearth_recovery_phase_seconds",
            "hearth_restore",
            "hearth_refill_incarnation_read_bytes",
            "hearth_disk_missing_bytes",
        ] {
            assert!(!text.contains(name), "{name}");
        }
        assert!(text.contains("hearth_uptime_seconds"));
    }
}
