//! Events and errors as sentences.

use std::path::Path;

use hearth_api::{EventKind, UserfaultStatus};

use super::text::{bytes, milliseconds};

/// An event in words, without its time, machine and incarnation.
pub fn describe(event: &EventKind) -> String {
    match event {
        EventKind::Started { pid, version } => format!("keeper {version} started, pid {pid}"),
        EventKind::KeeperTookOver { qemu_pid, generation } => {
            format!("keeper took over the running QEMU, pid {qemu_pid}, generation {generation}")
        }
        EventKind::KeeperHandsOver { program, version } => format!("keeper hands over to {program}, version {version}"),
        EventKind::KeeperUpgradeFailed { why } => {
            format!("keeper upgrade failed, the old keeper continues: {why}")
        }
        EventKind::StateChanged { from, to } => format!("{} -> {}", from.name(), to.name()),
        EventKind::Request { verb } => format!("request: {verb}"),
        EventKind::PowerCut { why } => format!("cutting the guest's power: {why}"),
        EventKind::StartWaits { why, next_start } => {
            format!("cannot start the next guest; next attempt at {next_start}: {why}")
        }
        EventKind::QemuStarted { pid, generation, version, accelerator, accelerator_why } => {
            format!("QEMU {version} started, pid {pid}, generation {generation}, {accelerator} ({accelerator_why})")
        }
        EventKind::Userfault { userfault: UserfaultStatus::HandedOver, .. } => "userfaultfd handed over".to_owned(),
        EventKind::Userfault { userfault: UserfaultStatus::Absent { why }, .. } => format!("no userfaultfd: {why}"),
        EventKind::QemuExited { generation, how } => format!("QEMU generation {generation} ended: {how}"),
        EventKind::IncarnationStarted { warm, .. } => {
            format!("incarnation started, {}", if *warm { "warm" } else { "cold" })
        }
        EventKind::IncarnationEnded { cause } => format!("incarnation ended: {}", cause.words()),
        EventKind::BlocksRescued { pages, refused, left, released, duration_ms } => {
            let how = if *released { "moved" } else { "copied" };
            let after = milliseconds(*duration_ms);
            format!("{pages} blocks of the reset guest {how} in {after}, {refused} refused, {left} left behind")
        }
        EventKind::BlocksCarriedOver { pages, refused, left, duration_ms } => {
            let after = milliseconds(*duration_ms);
            format!("{pages} blocks found in the restored guest's memory in {after}, {refused} refused, {left} left")
        }
        EventKind::GuestPanicked => "guest panicked".to_owned(),
        EventKind::WatchdogExpired { action } => format!("guest stopped feeding its watchdog ({action})"),
        EventKind::CrashLoop { delay_s, next_start } => {
            let delay = milliseconds(*delay_s as f64 * 1e3);
            format!("crash loop: the next guest starts in {delay}, at {next_start}")
        }
        EventKind::RegistersTaken { bytes, duration_ms } => {
            format!("registers read in {}, {bytes} bytes", milliseconds(*duration_ms))
        }
        EventKind::DumpStarted { file, level, ram_pages, pages } => {
            format!("dump started, level {level}, {pages} of {ram_pages} pages, {file}")
        }
        EventKind::CrashReason { message } => format!("guest's crash message: {message}"),
        EventKind::DumpWarning { message } => format!("dump: {message}"),
        EventKind::DumpProgress { percent, mib_per_s, eta_s, .. } => {
            format!("dump {}", progress(*percent, *mib_per_s, *eta_s))
        }
        EventKind::DumpWaits { file, why } => {
            format!("dump paused: {why} ({file}); continue with `hearth dump --resume`, or end it with `--discard`")
        }
        EventKind::DumpComplete { file, pages, bytes: size, duration_ms } => {
            format!("dump complete in {}, {pages} pages in {}, {file}", milliseconds(*duration_ms), bytes(*size))
        }
        EventKind::DumpIncomplete { file, why } => format!("dump incomplete: {why} ({file})"),
        EventKind::DumpSkipped { why } => format!("crash not dumped: {why}"),
        EventKind::RejuvenationDue { why } => format!("rejuvenation is due: {why}"),
        EventKind::Rejuvenated { generation, from_version, version, pause_ms } => format!(
            "guest moved to QEMU {version}, generation {generation}, from {from_version}; paused for {}",
            milliseconds(*pause_ms)
        ),
        EventKind::RejuvenationFailed { phase, why, guest_lost: false } => {
            format!("rejuvenation failed in phase {phase}, the guest continues on the old QEMU: {why}")
        }
        EventKind::RejuvenationFailed { phase, why, guest_lost: true } => {
            format!("rejuvenation failed in phase {phase}, the guest was lost and reboots warm: {why}")
        }
        EventKind::Parked { duration_ms, state_bytes } => {
            format!("guest parked in {}, {} of state", milliseconds(*duration_ms), bytes(*state_bytes))
        }
        EventKind::ParkFailed { phase, why } => format!("parking failed in phase {phase}, the guest continues: {why}"),
        EventKind::Unparked { version, stood_ms, duration_ms, .. } => format!(
            "parked guest resumed on QEMU {version}; paused for {}, {} of it in this keeper",
            milliseconds(*stood_ms),
            milliseconds(*duration_ms)
        ),
        EventKind::ParkedLost { why } => format!("the parked guest cannot resume; the machine boots instead: {why}"),
        EventKind::SaveStarted { folder, held_why: None } => format!("saving the running guest to {folder}"),
        EventKind::SaveStarted { folder, held_why: Some(why) } => {
            format!("saving the paused guest to {folder}: {why}")
        }
        EventKind::SaveScanned { pages, rounds, duration_ms, .. } => {
            format!("guest used {pages} pages in {rounds} rounds, {}", milliseconds(*duration_ms))
        }
        EventKind::SaveFrozen { file_systems, duration_ms, .. } => {
            format!("{file_systems} file systems of the guest frozen in {}", milliseconds(*duration_ms))
        }
        EventKind::Thawed { file_systems, frozen_ms } => {
            let after = frozen_ms.map_or_else(String::new, |frozen_ms| format!(" after {}", milliseconds(frozen_ms)));
            format!("{file_systems} file systems of the guest thawed{after}")
        }
        EventKind::SaveProgress { percent, mib_per_s, eta_s, .. } => {
            format!("save {}", progress(*percent, *mib_per_s, *eta_s))
        }
        EventKind::RestoreProgress { percent, mib_per_s, eta_s } => {
            format!("loading memory before the guest runs, {}", progress(*percent, *mib_per_s, *eta_s))
        }
        EventKind::Saved { folder, pages, bytes: size, pause_ms, pages_on_disks, .. } => {
            let elsewhere = match pages_on_disks {
                0 => String::new(),
                count => format!(", {count} of them stored on the disks"),
            };
            format!(
                "saved, {pages} pages in {}{elsewhere}; the guest paused for {}; {folder}",
                bytes(*size),
                milliseconds(*pause_ms)
            )
        }
        EventKind::DiskCopyTaken { disk, shared, held_ms, file_systems, not_frozen, .. } => {
            let state = match (not_frozen, file_systems) {
                (Some(why), _) => format!("crash-consistent, as after a power cut ({why})"),
                (None, Some(count)) => format!("{count} file systems frozen"),
                (None, None) => "file systems frozen".to_owned(),
            };
            let how = if *shared { "sharing the image's blocks" } else { "copying it while the guest goes on" };
            format!("disk {disk} held for {}, {state}; {how}", milliseconds(*held_ms))
        }
        EventKind::DiskCopyProgress { disk, percent, mib_per_s, eta_s, .. } => {
            format!("copy of disk {disk} {}", progress(*percent, *mib_per_s, *eta_s))
        }
        EventKind::DiskCopied { disk, file, format, bytes: size, backing, duration_ms } => {
            let over = backing.as_ref().map_or_else(String::new, |base| format!(", over {base}, which it needs"));
            format!("disk {disk} copied to {file} in {}, {} ({format}{over})", milliseconds(*duration_ms), bytes(*size))
        }
        EventKind::DiskCopyFailed { disk, file, why } => format!("copy of disk {disk} failed: {why} ({file})"),
        EventKind::SaveFailed { folder, why } => format!("save failed: {why} ({folder})"),
        EventKind::RestoreStarted { snapshot, mode } => format!("restoring the guest from {snapshot} ({mode})"),
        EventKind::Restored { pages, pages_prefetched, duration_ms } => format!(
            "restored guest runs after {}, {pages_prefetched} of {pages} pages loaded",
            milliseconds(*duration_ms)
        ),
        EventKind::RestoreWaits { why } => {
            format!("cannot load a part of the snapshot, accesses wait until it can be read: {why}")
        }
        EventKind::RestoreComplete { pages, pages_prefetched, pages_lazy, duration_ms } => format!(
            "all memory loaded after {}, {pages} pages: {pages_prefetched} prefetched, {pages_lazy} on fault",
            milliseconds(*duration_ms)
        ),
        EventKind::DiskComplete { disk, bytes: size, duration_ms } => {
            format!("disk {disk} fully fetched after {}, {}", milliseconds(*duration_ms), bytes(*size))
        }
        EventKind::Ready { why, blocks, held_blocks, hit_pct } => {
            let hits =
                hit_pct.map_or_else(String::new, |share| format!(", {share:.1} % of its reads came from memory"));
            format!("ready ({why}): the boot read {blocks} blocks, {held_blocks} held for the next boot{hits}")
        }
        EventKind::NvramOpened { nvram, from } => format!("nvram {nvram}: content comes from {from}"),
        EventKind::BootSetReduced { left_out } => {
            format!("`remount.limit` was lowered: {left_out} blocks are no longer held for the next boot")
        }
        EventKind::BootSetLoaded { blocks } => format!("loaded {blocks} saved blocks for the next boot"),
        EventKind::BootSetSaved { blocks } => format!("saved {blocks} blocks for the next boot"),
        EventKind::BootSetDropped { why } => format!("dropped the blocks held for the next boot: {why}"),
        EventKind::DiskForgotten { disk, why, .. } => {
            format!("dropped the blocks of disk {disk} held in memory: {why}")
        }
        EventKind::WorkingSetTraced { pages } => {
            format!("working set recorded, {pages} pages including earlier traces")
        }
        EventKind::Phase { phase, duration_ms } => format!("{phase} took {}", milliseconds(*duration_ms)),
        EventKind::EmberKept { pages, bytes: kept } => format!("ember kept, {} in {pages} pages", bytes(*kept)),
        EventKind::EmberSettled { released_bytes, remaining_pages } => {
            format!("ember settled, {} released, {remaining_pages} pages remain", bytes(*released_bytes))
        }
        EventKind::CacheMapRead { pages, files, duration_ms, .. } => {
            format!("cache map read, {pages} pages of {files} files in {}", milliseconds(*duration_ms))
        }
        EventKind::CacheMapMissing { why } => format!("no cache map for the next guest: {why}"),
        EventKind::EmberTrimmed { pages, bytes: trimmed } => {
            format!("ember trimmed by {}, {pages} pages", bytes(*trimmed))
        }
        EventKind::MemoryHeld { living, resident_bytes, dead_bytes, limit_bytes, .. } => {
            let (held, dead, limit) = (bytes(*resident_bytes), bytes(*dead_bytes), bytes(*limit_bytes));
            format!("incarnation {living} holds {held}, dead ones {dead}; the limit is {limit}")
        }
        EventKind::EmberEmpty { pages_served, pages_refused } => {
            format!("ember empty, {pages_served} pages served, {pages_refused} refused")
        }
        EventKind::DiskFull { disk, folder, why } => {
            format!("disk {disk} is full, requests wait for space in {folder}: {why}")
        }
        EventKind::DiskSpaceAgain { disk, waited_ms } => {
            format!("disk {disk} has space again, requests waited for {}", milliseconds(*waited_ms))
        }
        EventKind::DiskResized { disk, bytes: size } => format!("disk {disk} now has {}", bytes(*size)),
        EventKind::BudgetWarning { used_bytes, budget_bytes } => {
            format!("over budget: {} used, {} allowed", bytes(*used_bytes), bytes(*budget_bytes))
        }
        EventKind::GuestWaits { threads } => {
            format!(
                "the guest is stuck: {threads} QEMU threads wait for memory, and none becomes free; end the dump, if \
                 one is being written"
            )
        }
        EventKind::Error { message } => format!("error: {message}"),
        EventKind::Gap { missed } => format!("{missed} events were dropped or are no longer kept"),
        EventKind::Unknown { what } => {
            format!("{what}: event from another version of Hearth, unknown to this one")
        }
    }
}

fn progress(percent: f64, mib_per_s: f64, eta_s: Option<f64>) -> String {
    let eta = eta_s.map_or_else(String::new, |eta_s| format!(", {} to go", milliseconds(eta_s * 1e3)));
    format!("at {percent:.0} %, {mib_per_s:.1} MiB/s{eta}")
}

/// Which machines run, for an error about one that does not.
pub fn others(others: &[String], root: &Path) -> String {
    match others {
        [] => format!("no machine runs in {}; start one with `hearth run FILE`", root.display()),
        [one] => format!("{one} is"),
        many => format!("these are: {}", many.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A domain's command is another one; the state's reason has it.
    #[test]
    fn event_of_a_wait_names_no_command() {
        let next_start = "2026-03-01T12:00:09.000Z".to_owned();
        let words = describe(&EventKind::CrashLoop { delay_s: 10, next_start: next_start.clone() });
        assert_eq!(words, "crash loop: the next guest starts in 10.0 s, at 2026-03-01T12:00:09.000Z");
        let words = describe(&EventKind::StartWaits { why: "no space".to_owned(), next_start });
        assert_eq!(words, "cannot start the next guest; next attempt at 2026-03-01T12:00:09.000Z: no space");
    }
}
