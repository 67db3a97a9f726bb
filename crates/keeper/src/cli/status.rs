//! `hearth status`: one page on a machine's state.

use std::fmt::Display;
use std::path::Path;

use hearth_api::{
    AdmissionStatus, DiskStatus, DumpFormat, DumpStatus, EmberMode, FrozenStatus, MachineStatus, NvramDevice,
    NvramStatus, PendingUntil, Recovery, Rejuvenation, Unparked, UserfaultStatus,
};
use serde::Serialize;

use super::parked::ParkedGuest;
use super::text::{bytes, milliseconds, percent, uptime};
use super::{CliError, Context, Exit};

/// Makes a line of 100 columns with its heading.
const BRIEF_CHARS: usize = 78;

pub fn show(context: &mut Context<'_>, name: &str) -> Result<Exit, CliError> {
    let status = match context.ask(name, |client| client.status()) {
        Err(CliError::Parked { name, guest }) => return show_parked(context, &name, &guest),
        asked => asked?,
    };
    if context.json {
        context.write_json(&status)?;
    } else {
        context.write_line(&page(&status))?;
    }
    Ok(Exit::Done)
}

/// The machine does not run, but its guest may be parked.
fn show_parked(context: &mut Context<'_>, name: &str, parked: &ParkedGuest) -> Result<Exit, CliError> {
    #[derive(Serialize)]
    struct Shown<'a> {
        name: &'a str,
        parked: &'a ParkedGuest,
    }
    if context.json {
        context.write_json(&Shown { name, parked })?
    } else {
        context.write_line(&parked.page(name))?
    }
    Ok(Exit::NotRunning)
}

pub fn page(status: &MachineStatus) -> String {
    let mut lines = vec![headline(status)];
    lines.extend(section("", &machine(status)));
    lines.extend(section("memory", &memory(status)));
    lines.extend(section("ember", &ember(status)));
    for dump in &status.dumps {
        lines.extend(section(&format!("dump of incarnation {}", dump.incarnation), &one_dump(dump)));
    }
    for disk in &status.disks {
        lines.extend(section(&format!("disk {}", disk.name), &one_disk(disk)));
    }
    for nvram in &status.nvram {
        lines.extend(section(&format!("nvram {}", nvram.name), &one_nvram(nvram)));
    }
    if !status.nets.is_empty() {
        lines.extend(section("nets", &nets(status)));
    }
    lines.join("\n")
}

fn headline(status: &MachineStatus) -> String {
    let why = status.state_why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let state = status.state.name();
    format!("{}  {state}{why}, incarnation {}, up {}", status.name, status.incarnation, uptime(status.uptime_s))
}

fn section(heading: &str, rows: &[String]) -> Vec<String> {
    let mut lines = if heading.is_empty() { Vec::new() } else { vec![String::new(), heading.to_owned()] };
    lines.extend(rows.iter().map(|row| format!("  {}", row.trim_end())));
    lines
}

/// A row with a text.
fn words(name: &str, text: impl Display) -> String {
    format!("{name:<12}  {text}")
}

/// A row with numbers. Columns have the same width on the whole page; the largest amount is `1023.9 MiB`.
fn row(name: &str, amount: String, share: String, remark: String) -> String {
    format!("{name:<12}  {amount:>10}  {share:>8}  {remark}")
}

fn rejuvenation_text(rejuvenation: &Rejuvenation) -> String {
    match (&rejuvenation.failure, rejuvenation.pause_ms) {
        (Some(failure), None) => format!("failed, {failure}"),
        (Some(failure), Some(pause)) => {
            format!("failed, {failure}; the guest paused for {} and continued on the old QEMU", milliseconds(pause))
        }
        (None, pause) => format!(
            "QEMU {} to {}, the guest paused for {}",
            rejuvenation.from_version,
            rejuvenation.version.as_deref().unwrap_or("?"),
            milliseconds(pause.unwrap_or_default())
        ),
    }
}

fn unparked_text(unparked: &Unparked) -> String {
    let host = if unparked.host_reloaded { "another host kernel" } else { "the same kernel as before" };
    match &unparked.lost {
        Some(why) => format!("could not resume under {host}, so the machine booted: {why}"),
        None => {
            format!("paused for {}, resumed under {host}", milliseconds(unparked.stood_ms.unwrap_or_default()))
        }
    }
}

fn frozen_text(frozen: &FrozenStatus) -> String {
    let what = frozen.file_systems.map_or_else(|| "the guest's".to_owned(), |count| count.to_string());
    let long = frozen.for_ms.map_or_else(String::new, |for_ms| format!(", for {}", milliseconds(for_ms)));
    let problem = frozen.problem.as_ref().map_or_else(String::new, |why| format!("; not thawed: {why}"));
    format!("{what} file systems, for a save{long}{problem}")
}

fn machine(status: &MachineStatus) -> Vec<String> {
    let mut rows = Vec::new();
    if let Some(cause) = status.cause_of_last_end {
        rows.push(words("last end", cause.words()));
    }
    if let Some(recovery) = &status.last_recovery {
        rows.push(words("recovery", recovery_text(&status.name, recovery)));
    }
    if let Some(since) = &status.parking_since {
        rows.push(words("parking", format!("since {since}")));
    }
    if let Some(since) = &status.rejuvenating_since {
        rows.push(words("rejuvenating", format!("the new QEMU is starting, since {since}")));
    }
    if let Some(rejuvenation) = &status.last_rejuvenation {
        rows.push(words("rejuvenation", rejuvenation_text(rejuvenation)));
    }
    if let Some(unparked) = &status.unparked {
        rows.push(words("parked", unparked_text(unparked)));
    }
    if let Some(restore) = &status.restore {
        let left = if restore.complete { "complete".to_owned() } else { format!("{} missing", restore.pages_missing) };
        let text = format!(
            "{} of {} pages prefetched, {} loaded on fault, {left}; {} ({})",
            restore.pages_prefetched, restore.pages, restore.pages_lazy, restore.snapshot, restore.mode
        );
        rows.push(words("restore", text));
        rows.extend(restore.waits.iter().map(|why| words("waits for", why)));
    }
    if let Some(save) = &status.save {
        let how_far = match &save.scan {
            Some(scan) => format!("scan, {} of {} rounds", scan.rounds_done, scan.rounds),
            None => format!("{:.0} % of {} pages, {:.1} MiB/s", save.percent, save.pages, save.mib_per_s),
        };
        rows.push(words("save", format!("{how_far}, {}", save.folder)));
    }
    if let Some(frozen) = &status.frozen {
        rows.push(words("frozen", frozen_text(frozen)));
    }
    match &status.qemu {
        None => rows.push(words("qemu", "none")),
        Some(qemu) => {
            let text = format!("{}, pid {}, generation {}", qemu.version, qemu.pid, qemu.generation);
            rows.push(words("qemu", text));
            rows.push(words("accelerator", format!("{} ({})", qemu.accelerator, brief(&qemu.accelerator_why))));
            let userfault = match &qemu.userfault {
                UserfaultStatus::HandedOver => "handed over".to_owned(),
                UserfaultStatus::Absent { why } => format!("absent ({why})"),
            };
            rows.push(words("userfault", userfault));
        }
    }
    for (until, when) in [
        (PendingUntil::NextGuest, "from the next reboot or crash"),
        (PendingUntil::NextStart, "after stopping and starting the machine"),
    ] {
        let keys = status.pending.iter().filter(|change| change.until == until).map(|change| change.key.as_str());
        let keys: Vec<_> = keys.collect();
        if !keys.is_empty() {
            rows.push(words("pending", format!("{}: {when}", keys.join(", "))));
        }
    }
    let keeper = &status.keeper;
    rows.push(words("keeper", format!("{}, pid {}, up {}", keeper.version, keeper.pid, uptime(keeper.uptime_s))));
    rows
}

/// QEMU prints whole assertions, with source files and lines. The full text is in the events and with `--json`.
fn brief(why: &str) -> String {
    if why.chars().count() <= BRIEF_CHARS {
        return why.to_owned();
    }
    let cut: String = why.chars().take(BRIEF_CHARS).collect();
    // Cut at the end of a word, unless that would leave nothing.
    let cut = cut.rsplit_once(' ').map_or(cut.as_str(), |(head, _)| head);
    format!("{cut} ...")
}

fn recovery_text(name: &str, recovery: &Recovery) -> String {
    let warmth = match (&recovery.why_cold, recovery.warm) {
        (_, true) => "warm".to_owned(),
        (Some(why), false) => format!("cold ({why})"),
        (None, false) => "cold".to_owned(),
    };
    format!("{warmth}, in {} (`hearth explain {name}`)", milliseconds(recovery.duration_ms))
}

fn memory(status: &MachineStatus) -> Vec<String> {
    let memory = &status.memory;
    let part = |name, part| row(name, bytes(part), percent(part, memory.budget_bytes), String::new());
    let known = format!("{} pages known to hold a disk block", status.ledger_pages);
    vec![
        row("RAM", bytes(memory.ram_bytes), String::new(), String::new()),
        row("budget", bytes(memory.budget_bytes), String::new(), headroom(memory.headroom_bytes)),
        part("living", memory.resident_bytes),
        part("ember", memory.ember_bytes),
        part("held", memory.held_bytes),
        part("peak", memory.peak_bytes),
        row("ledger", String::new(), String::new(), known),
    ]
    .into_iter()
    .chain((memory.boot_set_bytes > 0).then(|| part("boot set", memory.boot_set_bytes)))
    .chain((memory.nvram_bytes > 0).then(|| part("nvram", memory.nvram_bytes)))
    .chain(memory.admission.map(|admission| granted(&admission, memory.ram_bytes)))
    .collect()
}

fn headroom(headroom_bytes: u64) -> String {
    if headroom_bytes == 0 {
        return String::new();
    }
    format!("and {} more while a dump holds memory", bytes(headroom_bytes))
}

fn granted(admission: &AdmissionStatus, ram_bytes: u64) -> String {
    let waited = milliseconds(admission.guest_wait_ms as f64);
    let now = if admission.waiting > 0 { format!(", {} wait now", admission.waiting) } else { String::new() };
    let remark = format!("the guest waited {waited} for memory{now}");
    row("granted", bytes(admission.granted_bytes), percent(admission.granted_bytes, ram_bytes), remark)
}

fn ember(status: &MachineStatus) -> Vec<String> {
    let ember = &status.ember;
    if ember.mode == EmberMode::Off {
        return vec![words("off", "every reboot is cold")];
    }
    if ember.pages_kept == 0 {
        return vec![words("none", "no memory of an earlier incarnation is kept")];
    }
    let refused = ember.refused;
    let page_bytes = ember.kept_bytes.checked_div(ember.pages_kept).unwrap_or(0);
    let part = |name, pages: u64, held, remark: String| {
        row(name, bytes(held), percent(pages, ember.pages_kept), format!("{pages} pages{remark}"))
    };
    let reasons = format!(
        ": {} tag mismatch, {} overwritten, {} trimmed",
        refused.tag_mismatch, refused.overwritten, refused.trimmed
    );
    vec![
        part("kept", ember.pages_kept, ember.kept_bytes, String::new()),
        part("served", ember.pages_served, ember.served_bytes, String::new()),
        part("refused", refused.total(), refused.total() * page_bytes, reasons),
        part("remaining", ember.pages_remaining, ember.remaining_bytes, String::new()),
    ]
}

fn one_dump(dump: &DumpStatus) -> Vec<String> {
    let why = dump.why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
    let mut rows = vec![words("state", format!("{}{why}", dump.state.name()))];
    rows.extend(dump.panic.as_ref().map(|panic| words("panic", panic)));
    let how = match dump.format {
        DumpFormat::Kdump => format!("kdump, {}", dump.compression.name()),
        DumpFormat::Elf => "elf".to_owned(),
    };
    rows.push(words("file", format!("{} (level {}, {how})", dump.file, dump.level)));
    let share = percent(dump.pages_written, dump.pages);
    let to_go = dump.eta_s.map(|eta| format!(", {} to go", milliseconds(eta * 1e3))).unwrap_or_default();
    let pace = format!("{} of {} pages, {:.1} MiB/s{to_go}", dump.pages_written, dump.pages, dump.mib_per_s);
    rows.push(row("written", bytes(dump.written_bytes), share, pace));
    if dump.held_bytes > 0 {
        rows.push(row("held", bytes(dump.held_bytes), String::new(), "memory not yet released".to_owned()));
    }
    rows.extend(dump.warnings.iter().map(|warning| words("warning", warning)));
    rows
}

fn one_disk(disk: &DiskStatus) -> Vec<String> {
    let read = disk.read_warm_bytes + disk.read_image_bytes;
    let connected = match (disk.connected, disk.silent) {
        (false, _) => "not connected",
        (true, false) => "connected",
        (true, true) => "connected, but QEMU does not use it",
    };
    let access = if disk.read_only { "read-only, " } else { "" };
    let mut rows = vec![
        words("image", format!("{}, {}", disk.path, disk.engine)),
        words("size", format!("{}, {access}{connected}", bytes(disk.bytes))),
        row("read", bytes(read), String::new(), format!("in {} requests", disk.reads)),
        row("from memory", bytes(disk.read_warm_bytes), percent(disk.read_warm_bytes, read), String::new()),
        row("from image", bytes(disk.read_image_bytes), percent(disk.read_image_bytes, read), String::new()),
        row(
            "written",
            bytes(disk.written_bytes),
            String::new(),
            format!("in {} requests, {} flushes, {} discards", disk.writes, disk.flushes, disk.discards),
        ),
    ];
    if let Some(arrival) = &disk.arrival {
        let there = arrival.bytes.saturating_sub(arrival.missing_bytes);
        let remark = format!("of {} fetched; {}", bytes(arrival.bytes), arrival.source);
        rows.push(row("arriving", bytes(there), percent(there, arrival.bytes), remark));
        rows.extend(arrival.waits.iter().map(|why| words("waits for", why)));
    }
    if disk.throttled_ms > 0 {
        rows.push(words("throttled", milliseconds(disk.throttled_ms as f64)));
    }
    if disk.waiting_for_space > 0 {
        let folder = Path::new(&disk.path).parent().unwrap_or(Path::new("/"));
        let requests = format!("{} requests wait for space in {}", disk.waiting_for_space, folder.display());
        rows.push(words("full", requests));
    }
    if disk.io_errors > 0 {
        rows.push(words("I/O errors", disk.io_errors));
    }
    if disk.bad_requests > 0 {
        rows.push(words("bad requests", disk.bad_requests));
    }
    rows
}

fn one_nvram(nvram: &NvramStatus) -> Vec<String> {
    let connected = if nvram.connected { "connected" } else { "not connected" };
    let mirror = match &nvram.mirror_file {
        Some(file) => format!("{}: {file}", nvram.mirror),
        None => nvram.mirror.clone(),
    };
    let requests = match nvram.device {
        NvramDevice::Disk => {
            words("requests", format!("{} reads, {} writes, {} flushes", nvram.reads, nvram.writes, nvram.flushes))
        }
        NvramDevice::Pmem => words("device", "pmem, in the guest's address space"),
    };
    let size = words("size", format!("{}, {connected}", bytes(nvram.bytes)));
    let mut rows = vec![size, requests, words("mirror", mirror)];
    if let Some(unmirrored) = nvram.unmirrored_bytes.filter(|&unmirrored| unmirrored > 0) {
        rows.push(words("not mirrored", bytes(unmirrored)));
    }
    rows.extend(nvram.problem.iter().map(|problem| words("problem", problem)));
    rows
}

fn nets(status: &MachineStatus) -> Vec<String> {
    let net = |net: &hearth_api::NetStatus| {
        let forward = if net.forward.is_empty() { String::new() } else { format!(", {}", net.forward.join(", ")) };
        words(&net.kind, format!("{}{forward}", net.mac))
    };
    status.nets.iter().map(net).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_reasons_are_cut_at_a_word() {
        assert_eq!(brief("it works"), "it works");
        let long = format!("KVM does not work here: {}", "error ".repeat(30));
        let cut = brief(&long);
        assert!(cut.starts_with("KVM does not work here: error error") && cut.ends_with("error ..."), "{cut}");
        assert!(cut.chars().count() <= BRIEF_CHARS + 4, "{cut}");
    }

    #[test]
    fn status_shows_no_ember_before_first_death() {
        let mut status = crate::sample::status();
        status.ember.pages_kept = 0;
        assert!(page(&status).contains("ember\n  none          no memory of an earlier incarnation is kept\n"));
    }
}
