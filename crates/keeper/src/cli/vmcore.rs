//! `hearth vmcore`: shows what a dump contains, without a debugger.
//!
//! file -> headers and notes -> the kernel found in its memory -> classes of pages, panic, log
//!
//! Dumps of any program are read. Neither the file nor the guest's text in it is trusted: characters that could control
//! a terminal are not printed.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use hearth_recovery::vmcore::linux::{ClassCounts, Linux, NotUnderstood, log};
use hearth_recovery::vmcore::{DumpLevel, PhysicalMemory, VmcoreFile};
use plain_text::printable;
use serde::Serialize;

use super::text::{Side, bytes, table};
use super::{CliError, Context, Exit};

/// Lines of the kernel log in `info`: a panic with its backtrace is about as long.
const TAIL_LINES: usize = 30;
/// The end of the year 9999, because a file may contain any time.
const SECONDS_MAX: i64 = 253_402_300_799;

#[derive(Debug, Serialize)]
struct Info {
    file: String,
    format: &'static str,
    /// None if pages are not compressed, or the compression is unknown.
    compression: Option<&'static str>,
    /// Pages left out, as makedumpfile's level; unknown for ELF files.
    level: Option<u32>,
    begun_at: Option<String>,
    /// Whether it was finished and no page is missing.
    complete: bool,
    file_bytes: u64,
    pages: Pages,
    /// All of the guest's pages by class, classified again from the kernel's descriptors in the dump.
    classes: Option<Classes>,
    kernel: Option<Kernel>,
    /// Why the kernel was not found or understood.
    not_understood: Option<String>,
    panic: Option<String>,
    cpus: Vec<Cpu>,
    /// The kernel's panic message.
    log: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Pages {
    /// Pages of the guest's RAM, as far as the file says.
    ram: u64,
    /// Pages that the dump should contain.
    kept: u64,
    /// Pages of these that are missing from the file.
    missing: u64,
    /// Zero pages of these, which have no data; unknown for ELF files.
    zero: Option<u64>,
    stored_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Classes {
    cache: u64,
    private_cache: u64,
    user: u64,
    free: u64,
    poisoned: u64,
    offline: u64,
    /// Pages without a class, because their descriptors are invalid or missing from the dump.
    unjudged: u64,
    /// Memory that the guest's kernel does not use, and has no descriptors for.
    undescribed: u64,
    /// All others.
    kernel: u64,
}

#[derive(Debug, Serialize)]
struct Kernel {
    release: String,
    version: String,
    host: String,
}

#[derive(Debug, Serialize)]
struct Cpu {
    cpu: usize,
    /// Registers by name, in hexadecimal.
    registers: serde_json::Map<String, serde_json::Value>,
}

pub fn info(context: &mut Context<'_>, path: &Path) -> Result<Exit, CliError> {
    let file = VmcoreFile::open(path)?;
    let info = Info::of(path, &file);
    if context.json {
        context.write_json(&info)?;
    } else {
        context.write_line(&page(&info))?;
    }
    Ok(Exit::Done)
}

pub fn dmesg(context: &mut Context<'_>, path: &Path) -> Result<Exit, CliError> {
    let file = VmcoreFile::open(path)?;
    let notes = file.notes().to_bytes();
    let lines = Linux::find(&file, &notes).and_then(|linux| linux.log());
    let lines = lines.map_err(|source| CliError::NoLog { path: path.to_owned(), source })?;
    if context.json {
        let lines: Vec<_> =
            lines.iter().map(|line| serde_json::json!({"nanoseconds": line.nanoseconds, "text": line.text})).collect();
        context.write_json(&lines)?;
    } else {
        for line in &lines {
            context.write_line(&line.to_string())?;
        }
    }
    Ok(Exit::Done)
}

impl Info {
    fn of(path: &Path, file: &VmcoreFile) -> Self {
        let survey = file.survey();
        let mut info = Self {
            file: path.display().to_string(),
            format: file.format(),
            compression: file.compression().map(|compression| compression.name()),
            level: file.level(),
            begun_at: file.unix_seconds().and_then(date),
            complete: file.is_complete() && survey.missing == 0,
            file_bytes: file.file_bytes(),
            pages: Pages {
                ram: file.ram_pages(),
                kept: survey.pages,
                missing: survey.missing,
                zero: file.level().map(|_| survey.zero),
                stored_bytes: survey.stored_bytes,
            },
            classes: None,
            kernel: None,
            not_understood: None,
            panic: None,
            cpus: cpus(file),
            log: Vec::new(),
        };
        if let Err(why) = info.ask_kernel(file) {
            info.not_understood = Some(crate::chain(&why));
        }
        info
    }

    /// Shows what can be read, even if other parts cannot.
    fn ask_kernel(&mut self, file: &VmcoreFile) -> Result<(), NotUnderstood> {
        let notes = file.notes().to_bytes();
        let linux = Linux::find(file, &notes)?;
        let name = linux.utsname();
        self.kernel = Some(Kernel {
            release: printable(name.as_ref().map_or(linux.vmcoreinfo().release(), |name| &name.release)),
            version: name.as_ref().map_or_else(String::new, |name| printable(&name.version)),
            host: name.as_ref().map_or_else(String::new, |name| printable(&name.nodename)),
        });
        let lines = linux.log()?;
        self.panic = log::panic_reason(&lines).map(printable);
        let tail = lines.len().saturating_sub(TAIL_LINES);
        self.log = lines[tail..].iter().map(ToString::to_string).collect();
        // ELF files describe only the RAM that they contain, and classes of that part would mislead.
        if file.level().is_some() {
            let judged = linux.classify(DumpLevel::KERNEL)?;
            self.classes = Some(Classes::of(&judged.counts, file.ram_pages()));
        }
        Ok(())
    }
}

impl Classes {
    fn of(counts: &ClassCounts, ram_pages: u64) -> Self {
        let ClassCounts { cache, private_cache, user, free, poisoned, offline, unjudged, undescribed } = *counts;
        let kernel = ram_pages.saturating_sub(counts.excluded() + unjudged + undescribed);
        Self { cache, private_cache, user, free, poisoned, offline, unjudged, undescribed, kernel }
    }

    fn named(&self) -> [(&'static str, u64); 9] {
        [
            ("cache", self.cache),
            ("private cache", self.private_cache),
            ("user", self.user),
            ("free", self.free),
            ("poisoned", self.poisoned),
            ("offline", self.offline),
            ("unjudged", self.unjudged),
            ("undescribed", self.undescribed),
            ("kernel", self.kernel),
        ]
    }
}

fn cpus(file: &VmcoreFile) -> Vec<Cpu> {
    let hexadecimal = |(name, value): (&str, u64)| (name.to_owned(), format!("{value:#x}").into());
    let cpus = file.notes().registers().enumerate();
    cpus.map(|(cpu, registers)| Cpu { cpu, registers: registers.iter().map(hexadecimal).collect() }).collect()
}

fn date(seconds: i64) -> Option<String> {
    let seconds = u64::try_from(seconds.min(SECONDS_MAX)).ok()?;
    Some(hearth_api::rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)))
}

fn page(info: &Info) -> String {
    let mut rows = vec![row("file", kind(info))];
    rows.extend(info.begun_at.iter().map(|date| row("begun", date.clone())));
    if let Some(kernel) = &info.kernel {
        rows.push(row("kernel", format!("{} {} on {}", kernel.release, kernel.version, kernel.host)));
    }
    rows.extend(info.not_understood.iter().map(|why| row("kernel", format!("not understood: {why}"))));
    rows.extend(info.panic.iter().map(|reason| row("panic", reason.clone())));
    rows.push(row("pages", pages(&info.pages)));
    if let Some(classes) = &info.classes {
        let classes: Vec<_> = classes.named().map(|(name, pages)| format!("{pages} {name}")).into();
        rows.push(row("classes", classes.join(", ")));
    }
    if info.cpus.is_empty() {
        rows.push(row("cpus", "no registers in the dump".to_owned()));
    }
    for cpu in &info.cpus {
        let shown = ["rip", "rsp", "rflags", "cs"].map(|name| {
            let value = cpu.registers.get(name).and_then(|value| value.as_str()).unwrap_or("?");
            format!("{name} {value}")
        });
        rows.push(row(&format!("cpu {}", cpu.cpu), shown.join("  ")));
    }
    let mut lines = table(&[Side::Left, Side::Left], &rows);
    if !info.log.is_empty() {
        lines.push(String::new());
        lines.extend(info.log.iter().cloned());
    }
    lines.join("\n")
}

fn row(name: &str, value: String) -> Vec<String> {
    vec![name.to_owned(), value]
}

fn kind(info: &Info) -> String {
    let mut words = vec![info.format.to_owned()];
    words.extend(info.compression.map(str::to_owned));
    words.extend(info.level.map(|level| format!("level {level}")));
    words.push(if info.complete { "complete" } else { "INCOMPLETE" }.to_owned());
    words.push(bytes(info.file_bytes));
    format!("{}: {}", info.file, words.join(", "))
}

fn pages(pages: &Pages) -> String {
    let zero = pages.zero.map_or_else(String::new, |zero| format!(", {zero} of them zero"));
    let missing = match pages.missing {
        0 => "none missing".to_owned(),
        missing => format!("{missing} MISSING"),
    };
    let (ram, stored) = (bytes(pages.ram * hearth_memory::PAGE_BYTES), bytes(pages.stored_bytes));
    format!("{} of RAM ({ram}), {} kept{zero}, {missing}; {stored} stored", pages.ram, pages.kept)
}
