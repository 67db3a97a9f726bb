//! Crash handling, and when QEMU is replaced.

use hearth_api::{DumpCompression, DumpFormat};

use super::{MEMORY_BYTES_MIN, Resolver, default_dump_folder, default_dump_threads};
use crate::config::file::{CrashSection, RejuvenateSection};
use crate::config::quantity::{daily_window, seconds, slack_bytes};
use crate::config::{CrashConfig, CrashLoopConfig, DiskTime, RejuvenateConfig};

const DEFAULT_DUMP_LEVEL: u8 = 31;
const DEFAULT_KEEP_LAST: u32 = 5;
const DEFAULT_MIN_FREE: &str = "1GiB";
const DEFAULT_HEADROOM: &str = "0%";
/// Memory is released in steps of this size, as soon as it is written.
const DEFAULT_CHUNK: &str = "4MiB";
/// Only whole huge pages are released.
const CHUNK_BYTES_MIN: u64 = 2 << 20;
const CHUNK_BYTES_MAX: u64 = 4 << 30;
const DEFAULT_LOOP_COUNT: u32 = 5;
const DEFAULT_LOOP_WINDOW_S: u64 = 60;
const DEFAULT_LOOP_DELAY_S: u64 = 10;
const DEFAULT_LOOP_DELAY_MAX_S: u64 = 300;

impl Resolver<'_> {
    pub(super) fn crash(
        &mut self,
        typed: CrashSection,
        machine: &str,
        memory_bytes: Option<u64>,
    ) -> Option<CrashConfig> {
        let min_free_bytes = self.size("crash.min_free", typed.min_free.as_deref().unwrap_or(DEFAULT_MIN_FREE))?;
        let chunk = typed.chunk.as_deref().unwrap_or(DEFAULT_CHUNK);
        let chunk_bytes = self.size("crash.chunk", chunk)?;
        if !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes) {
            self.problem("crash.chunk", format!("{chunk} is out of range"), "choose 2MiB to 4GiB");
            return None;
        }
        let headroom = typed.headroom.unwrap_or_else(|| DEFAULT_HEADROOM.to_owned());
        let headroom_bytes = match slack_bytes(&headroom, memory_bytes.unwrap_or(MEMORY_BYTES_MIN)) {
            Ok(bytes) => bytes,
            Err(hint) => {
                self.problem("crash.headroom", format!("\"{headroom}\" is not a size or percentage"), hint);
                return None;
            }
        };
        Some(CrashConfig {
            dump_folder: self.path_or(typed.dump_folder, || default_dump_folder(machine)),
            level: typed.level.unwrap_or(DEFAULT_DUMP_LEVEL),
            format: if typed.format.as_deref() == Some("elf") { DumpFormat::Elf } else { DumpFormat::Kdump },
            compression: match typed.compression.as_deref() {
                Some("lzo") => DumpCompression::Lzo,
                Some("zlib") => DumpCompression::Zlib,
                Some("none") => DumpCompression::None,
                _ => DumpCompression::Zstd,
            },
            keep_last: typed.keep_last.unwrap_or(DEFAULT_KEEP_LAST),
            min_free_bytes,
            chunk_bytes,
            threads: typed.threads.unwrap_or_else(default_dump_threads),
            headroom_bytes,
            disk_time: match typed.disk_time.as_deref() {
                Some("balanced") => DiskTime::Balanced,
                Some("dump-first") => DiskTime::DumpFirst,
                _ => DiskTime::RecoveryFirst,
            },
            mib_per_second: typed.mib_per_second,
            crash_loop: CrashLoopConfig {
                loop_count: typed.loop_count.unwrap_or(DEFAULT_LOOP_COUNT),
                loop_window_s: typed.loop_window_s.unwrap_or(DEFAULT_LOOP_WINDOW_S),
                loop_delay_s: typed.loop_delay_s.unwrap_or(DEFAULT_LOOP_DELAY_S),
                loop_delay_max_s: typed.loop_delay_max_s.unwrap_or(DEFAULT_LOOP_DELAY_MAX_S),
            },
        })
    }

    pub(super) fn rejuvenate(&mut self, typed: RejuvenateSection) -> RejuvenateConfig {
        let blamed = self.blamed;
        let given = |key: &str| blamed.contains(&format!("rejuvenate.{key}"));
        let is_ever_due =
            typed.every.is_some() || typed.rss_growth_mib.is_some() || given("every") || given("rss_growth_mib");
        if !is_ever_due {
            self.problem(
                "rejuvenate",
                "has neither every nor rss_growth_mib",
                "set every, for example \"30d\", or rss_growth_mib",
            );
        }
        let every_s = typed.every.and_then(|text| {
            let time = seconds(&text).filter(|&seconds| seconds > 0);
            if time.is_none() {
                let hint = "write a number with s, m, h or d: \"12h\", \"30d\"";
                self.problem("rejuvenate.every", format!("\"{text}\" is not a time"), hint);
            }
            time
        });
        let window = typed.window.and_then(|text| {
            let window = daily_window(&text);
            if window.is_none() {
                let hint = "write FROM-TO, for example \"02:00-05:00\"";
                self.problem("rejuvenate.window", format!("\"{text}\" is not a time range"), hint);
            }
            window
        });
        RejuvenateConfig { every_s, rss_growth_mib: typed.rss_growth_mib, window }
    }
}
