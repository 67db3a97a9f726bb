//! Events and errors as sentences.

use std::path::Path;

use hearth_api::{EventKind, UserfaultStatus};

use super::text::{bytes, milliseconds};

/// An event in words; its time, machine and incarnation stand elsewhere.
pub fn describe(event: &EventKind) -> String {
    match event {
        EventKind::Started { pid, version } => format!("keeper {version} started, pid {pid}"),
        EventKind::KeeperTookOver { qemu_pid, generation } => {
            format!("keeper took over the living QEMU, pid {qemu_pid}, generation {generation}")
        }
        EventKind::KeeperHandsOver { program, version } => format!("keeper hands over to {program}, {version}"),
        EventKind::KeeperUpgradeFailed { why } => {
            format!("the other keeper did not take over, the old one goes on: {why}")
        }
        EventKind::StateChanged { from, to } => format!("{} -> {}", from.name(), to.name()),
        EventKind::Request { verb } => format!("asked to {verb}"),
        EventKind::PowerCut { why } => format!("the guest's power is cut: {why}"),
        EventKind::StartWaits { why, next_start } => {
            format!("the next guest cannot be started, tried again at {next_start}, or with `hearth reboot`: {why}")
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
        EventKind::GuestPanicked => "guest panicked".to_owned(),
        EventKind::WatchdogExpired { action } => format!("guest stopped feeding its watchdog ({action})"),
        EventKind::CrashLoop { delay_s, next_start } => {
            let delay = milliseconds(*delay_s as f64 * 1e3);
            format!("crash loop: the next guest starts in {delay}, at {next_start}, or with `hearth reboot`")
        }
        EventKind::RegistersTaken { bytes, duration_ms } => {
            format!("registers taken in {}, {bytes} bytes", milliseconds(*duration_ms))
        }
        EventKind::DumpStarted { file, level, ram_pages, pages } => {
            format!("dump started, level {level}, {pages} of {ram_pages} pages, {file}")
        }
        EventKind::CrashReason { message } => format!("guest said: {message}"),
        EventKind::DumpWarning { message } => format!("dump: {message}"),
        EventKind::DumpProgress { percent, mib_per_s, eta_s, .. } => {
            format!("dump {}", progress(*percent, *mib_per_s, *eta_s))
        }
        EventKind::DumpWaits { file, why } => {
            format!("dump waits for `hearth dump --resume` or `--discard`: {why} ({file})")
        }
        EventKind::DumpComplete { file, pages, bytes: size, duration_ms } => {
            format!("dump complete in {}, {pages} pages in {}, {file}", milliseconds(*duration_ms), bytes(*size))
        }
        EventKind::DumpIncomplete { file, why } => format!("dump is incomplete: {why} ({file})"),
        EventKind::DumpSkipped { why } => format!("this crash is not dumped: {why}"),
        EventKind::RejuvenationDue { why } => format!("another QEMU is due: {why}"),
        EventKind::Rejuvenated { generation, from_version, version, pause_ms } => format!(
            "guest goes on with QEMU {version}, generation {generation}, from {from_version}; it stood still for {}",
            milliseconds(*pause_ms)
        ),
        EventKind::RejuvenationFailed { phase, why, guest_lost: false } => {
            format!("no other QEMU, the guest goes on with the one it has; {phase}: {why}")
        }
        EventKind::RejuvenationFailed { phase, why, guest_lost: true } => {
            format!("the guest has lost its QEMU and cannot be continued, a warm reboot follows; {phase}: {why}")
        }
        EventKind::Parked { duration_ms, state_bytes } => {
            format!("guest is parked after {}, {} of state", milliseconds(*duration_ms), bytes(*state_bytes))
        }
        EventKind::ParkFailed { phase, why } => format!("guest is not parked and goes on; {phase}: {why}"),
        EventKind::Unparked { version, stood_ms, duration_ms, .. } => format!(
            "parked guest goes on with QEMU {version} after {}, {} of it here",
            milliseconds(*stood_ms),
            milliseconds(*duration_ms)
        ),
        EventKind::ParkedLost { why } => format!("the parked guest cannot go on, the machine boots instead: {why}"),
        EventKind::SaveStarted { folder, held_why: None } => format!("guest is saved to {folder} while it runs"),
        EventKind::SaveStarted { folder, held_why: Some(why) } => {
            format!("guest stands still and is saved to {folder}: {why}")
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
            format!("memory is read before the guest runs, {}", progress(*percent, *mib_per_s, *eta_s))
        }
        EventKind::Saved { folder, pages, bytes: size, pause_ms, pages_on_disks, .. } => {
            let elsewhere = match pages_on_disks {
                0 => String::new(),
                count => format!(", {count} of them where the disks hold them"),
            };
            format!(
                "saved, {pages} pages in {}{elsewhere}; the guest stood still for {}; {folder}",
                bytes(*size),
                milliseconds(*pause_ms)
            )
        }
        EventKind::SaveFailed { folder, why } => format!("not saved: {why} ({folder})"),
        EventKind::RestoreStarted { snapshot, mode } => format!("guest comes out of {snapshot} ({mode})"),
        EventKind::Restored { pages, pages_prefetched, duration_ms } => format!(
            "restored guest runs after {}, {pages_prefetched} of {pages} pages are there",
            milliseconds(*duration_ms)
        ),
        EventKind::RestoreWaits { why } => format!("whoever touches this waits until it can be read: {why}"),
        EventKind::RestoreComplete { pages, pages_prefetched, pages_lazy, duration_ms } => format!(
            "all memory is there after {}, {pages} pages: {pages_prefetched} prefetched, {pages_lazy} waited for",
            milliseconds(*duration_ms)
        ),
        EventKind::DiskComplete { disk, bytes: size, duration_ms } => {
            format!("all of disk {disk} is there after {}, {}", milliseconds(*duration_ms), bytes(*size))
        }
        EventKind::Ready { why, blocks, held_blocks, hit_pct } => {
            let hits = hit_pct.map_or_else(String::new, |share| format!(", {share:.1} % of its reads were in memory"));
            format!("ready ({why}): the boot read {blocks} blocks, {held_blocks} are held for the next{hits}")
        }
        EventKind::NvramOpened { nvram, from } => format!("nvram {nvram}: its content is from {from}"),
        EventKind::BootSetReduced { left_out } => {
            format!("`remount.limit` is lower than it was: {left_out} blocks are not held for the next boot any more")
        }
        EventKind::BootSetLoaded { blocks } => format!("{blocks} blocks are held again for the next boot"),
        EventKind::BootSetSaved { blocks } => format!("{blocks} blocks are saved for the next boot"),
        EventKind::BootSetDropped { why } => format!("what was held for the next boot is dropped: {why}"),
        EventKind::DiskForgotten { disk, why, .. } => format!("what memory held of disk {disk} is dropped: {why}"),
        EventKind::WorkingSetTraced { pages } => {
            format!("working set noted, {pages} pages with those of earlier traces")
        }
        EventKind::Phase { phase, duration_ms } => format!("{phase} took {}", milliseconds(*duration_ms)),
        EventKind::EmberKept { pages, bytes: kept } => format!("ember kept, {} in {pages} pages", bytes(*kept)),
        EventKind::EmberSettled { released_bytes, remaining_pages } => {
            format!("ember settled, {} given back, {remaining_pages} pages remain", bytes(*released_bytes))
        }
        EventKind::EmberTrimmed { pages, bytes: trimmed } => {
            format!("ember trimmed by {}, {pages} pages", bytes(*trimmed))
        }
        EventKind::EmberEmpty { pages_served, pages_refused } => {
            format!("ember empty, {pages_served} pages served, {pages_refused} refused")
        }
        EventKind::DiskFull { disk, folder, why } => {
            format!("disk {disk} is full, the guest's requests wait until there is space in {folder}: {why}")
        }
        EventKind::DiskSpaceAgain { disk, waited_ms } => {
            format!("disk {disk} has space again, the guest's requests went on after {}", milliseconds(*waited_ms))
        }
        EventKind::DiskResized { disk, bytes: size } => format!("disk {disk} now has {}", bytes(*size)),
        EventKind::BudgetWarning { used_bytes, budget_bytes } => {
            format!("over budget: {} used, {} allowed", bytes(*used_bytes), bytes(*budget_bytes))
        }
        EventKind::GuestWaits { threads } => {
            format!("the guest stands still: {threads} threads of QEMU wait for memory, and none comes free")
        }
        EventKind::Error { message } => format!("error: {message}"),
        EventKind::Gap { missed } => format!("{missed} events are no longer kept"),
        EventKind::Unknown { what } => {
            format!("{what}: another version of Hearth wrote this, and this one does not know it")
        }
    }
}

fn progress(percent: f64, mib_per_s: f64, eta_s: Option<f64>) -> String {
    let eta = eta_s.map_or_else(String::new, |eta_s| format!(", {} to go", milliseconds(eta_s * 1e3)));
    format!("at {percent:.0} %, {mib_per_s:.1} MiB/s{eta}")
}

/// Which machines run instead of the one that was asked for.
pub fn others(others: &[String], root: &Path) -> String {
    match others {
        [] => format!("no machine runs in {}; start one with `hearth run FILE`", root.display()),
        [one] => format!("{one} does"),
        many => format!("these do: {}", many.join(", ")),
    }
}
