//! `hearth restore` and `hearth working-set`: machines from snapshots.
//!
//! snapshot -> a folder for the new machine: machine.toml and overlay disks -> `hearth run`, with the order to start
//! from the snapshot; or, for a domain of libvirt, a folder with the overlay disks alone

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use hearth_api::rfc3339;
use hearth_disk::image::{create_overlay, create_overlay_over_arriving};
use hearth_recovery::lazy_restore::{Mode, Order, Step};
use hearth_recovery::snapshot::pages::PageReader;
use hearth_recovery::snapshot::{AGE_END, Snapshot, Source, aged_pages};
use serde::Serialize;
use toml::Value;

use super::object_store::{StoreArguments, place};
use super::text::{Side, bytes, table};
use super::trust::Trust;
use super::{CliError, Context, Exit, absolute, configuration};
use crate::config::{ConfigFile, InForce, ObjectStoreSection, SECONDS_MAX, Setting};
use crate::drill::drill;
use crate::folders::{Folders, restored_disk};
use crate::machine::lazy_restore::{Probe, RestoreOrder, Trace};
use crate::object_store::saved_disks;
use crate::runtime_root::RuntimeRoot;

/// Interval of progress messages on a disk.
const SAY_EVERY: Duration = Duration::from_secs(2);
/// The key that `--forward` sets.
const FORWARD: &str = "nets[0].forward";
/// The key that follows it.
const READY_PORT: &str = "remount.ready.port";
/// Width of the picture of memory.
const COLUMNS: usize = 64;
const LINES: usize = 16;
/// From empty to full.
const SHADES: [char; 5] = ['.', '-', '+', '#', '@'];
/// Names of a working set's sources.
const TRACE: &str = "trace";
const SCAN: &str = "scan";

#[derive(Debug, Args)]
pub struct RestoreArguments {
    /// Snapshot folder, or an address such as s3://BUCKET/PREFIX.
    ///
    /// Addresses of gs, az, abfs and https work too; see docs/object-store.md.
    #[arg(add = super::complete::snapshots())]
    snapshot: PathBuf,
    /// Name of the new machine (default: the saved machine's).
    #[arg(long = "as", value_name = "NAME")]
    name: Option<String>,
    /// Folder to create for the machine (default: its name).
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Load all memory before the guest runs.
    #[arg(long, group = "mode")]
    eager: bool,
    /// Load no memory before the guest runs.
    #[arg(long, group = "mode")]
    lazy: bool,
    /// Load the recorded working set before the guest runs (default).
    #[arg(long, group = "mode")]
    working_set: bool,
    /// Record in the snapshot what the guest uses in its first SECONDS.
    ///
    /// This is added to the working set recorded before.
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["eager", "working_set"], value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX))]
    trace: Option<u64>,
    /// End the trace early, once this host command succeeds.
    ///
    /// The command is retried until then.
    #[arg(long, value_name = "COMMAND", requires = "trace")]
    until: Option<String>,
    /// Let the snapshot name this host's programs, files, users and ports.
    ///
    /// Use this only if you trust whoever made the snapshot.
    #[arg(long)]
    trust_config: bool,
    /// Override a configuration key, such as memory_folder=/dev/shm/web2.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = Setting::parse)]
    settings: Vec<Setting>,
    /// Host port forwarded into the guest, as HOSTIP:PORT:GUESTPORT.
    ///
    /// Replaces the forwards of the snapshot's first network. A ready port that is asked through them moves along.
    #[arg(long, value_name = "FORWARD")]
    forward: Vec<String>,
    /// QEMU program to use (default: the saved machine's).
    ///
    /// It must have the saved machine's machine type.
    #[arg(long, value_name = "PATH")]
    qemu: Option<PathBuf>,
    /// Create only the disks, for a domain of libvirt: no machine, no memory.
    ///
    /// See docs/libvirt.md.
    #[arg(long, requires = "folder", conflicts_with_all = ["name", "mode", "trace", "until", "settings", "forward", "qemu"])]
    pub disks_only: bool,
    #[command(flatten)]
    store: StoreArguments,
}

impl RestoreArguments {
    fn mode(&self) -> Mode {
        match (self.eager, self.lazy, self.working_set) {
            (true, _, _) => Mode::Eager,
            (_, true, _) => Mode::Lazy,
            // A trace cannot see the use of prefetched pages.
            (_, _, false) if self.trace.is_some() => Mode::Lazy,
            _ => Mode::WorkingSet,
        }
    }
}

/// Creates the machine, and returns what `hearth run` needs to start it.
pub fn prepare(arguments: RestoreArguments, root: &RuntimeRoot) -> Result<(InForce, Folders, RestoreOrder), CliError> {
    let mode = arguments.mode();
    let until = arguments.until.map(Probe::Command);
    let trace = arguments.trace.map(|seconds| Trace { window: Duration::from_secs(seconds), until, then_stop: false });
    let path = place(arguments.snapshot);
    let snapshot = arguments.store.open(&path)?;
    let name = arguments.name.unwrap_or_else(|| snapshot.manifest.machine.clone());
    let folder = absolute(arguments.folder.unwrap_or_else(|| PathBuf::from(&name)));
    let typed = typed(&snapshot)?.without_object_store();
    let settings = with_forwards(&typed, arguments.settings, arguments.forward);
    let trust = Trust::of(&snapshot, root, arguments.trust_config);
    trust.check(&snapshot, &typed, |key| {
        settings.iter().any(|setting| setting.key == key) || key == "qemu" && arguments.qemu.is_some()
    })?;
    let typed = typed.with_object_store(arguments.store.section()).with_qemu(arguments.qemu.map(absolute));
    let order = RestoreOrder { snapshot: path, seal: Some(snapshot.seal().to_owned()), mode, trace };
    let draft = Draft { snapshot: &snapshot, typed, settings, trust };
    let (in_force, folders) = make_machine(draft, &name, &folder, &order, root)?;
    drill(Step::Make.name());
    Ok((in_force, folders, order))
}

/// The given settings, and those that `--forward` implies.
fn with_forwards(typed: &ConfigFile, mut settings: Vec<Setting>, forward: Vec<String>) -> Vec<Setting> {
    if let Some(port) = typed.ready_port_through(&forward) {
        // First, so that an explicit `--set` of it counts.
        settings.insert(0, Setting::new(READY_PORT, i64::from(port).into()));
    }
    if !forward.is_empty() {
        settings.push(Setting::new(FORWARD, forward.into_iter().map(Value::from).collect::<Vec<_>>().into()));
    }
    settings
}

/// The snapshot's configuration.
pub fn typed(snapshot: &Snapshot) -> Result<ConfigFile, CliError> {
    let file = || snapshot.path("machine.toml");
    ConfigFile::parse(&snapshot.machine).map_err(|problems| CliError::Configuration { file: file(), problems })
}

/// A machine to create.
pub struct Draft<'a> {
    pub snapshot: &'a Snapshot,
    /// Checked.
    pub typed: ConfigFile,
    pub settings: Vec<Setting>,
    pub trust: Trust,
}

/// Creates the machine, checks it as `hearth run` does, and locks its folders. If it cannot run, it is removed again.
pub fn make_machine(
    draft: Draft<'_>,
    name: &str,
    folder: &Path,
    order: &RestoreOrder,
    root: &RuntimeRoot,
) -> Result<(InForce, Folders), CliError> {
    let folder = folder.to_owned();
    let Draft { snapshot, typed, settings, trust } = draft;
    let disks: Vec<PathBuf> = snapshot.manifest.disks.iter().map(|disk| restored_disk(&folder, &disk.name)).collect();
    let file = folder.join("machine.toml");
    let wrong = |problems| CliError::Configuration { file: file.clone(), problems };
    let text = typed.for_restored(name, &disks).with_settings(&settings).map_err(wrong)?.to_text();
    // Before anything is fetched or written.
    configuration::must_allow_restore(&text, &file, order.mode, root)?;
    DirBuilder::new().mode(0o700).create(&folder).map_err(|source| CliError::File { path: folder.clone(), source })?;
    let made = create_files(snapshot, trust, &text, &file, order);
    let made = made.and_then(|()| configuration::for_new(&file, root));
    // This command has just created the folder.
    made.inspect_err(|_| remove_machine(&folder))
}

fn remove_machine(folder: &Path) {
    if let Err(error) = fs::remove_dir_all(folder) {
        tracing::warn!(%error, folder = %folder.display(), "cannot remove");
    }
}

/// Creates disks, the order to start from the snapshot, and last the configuration `file` with this text, so that whoever
/// finds it finds the others.
fn create_files(
    snapshot: &Snapshot,
    trust: Trust,
    text: &str,
    file: &Path,
    order: &RestoreOrder,
) -> Result<(), CliError> {
    let folder = file.parent().expect("it is in the machine's folder");
    let disks = create_disks(snapshot, &trust, folder, order.mode == Mode::Eager)?;
    Order::new(file, &order.snapshot, snapshot.seal(), order.mode, &disks)?.write()?;
    let written = OpenOptions::new().write(true).create_new(true).mode(0o600).open(file);
    let written = written.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let written = written.and_then(|()| fs::File::open(folder)?.sync_all());
    written.map_err(|source| CliError::File { path: file.to_owned(), source })
}

/// Creates images over the snapshot's disks in this folder, and returns their paths. `whole`: they are fetched now.
fn create_disks(snapshot: &Snapshot, trust: &Trust, folder: &Path, whole: bool) -> Result<Vec<PathBuf>, CliError> {
    let (mut disks, saved) = (Vec::new(), saved_disks(folder));
    if snapshot.is_far() && !snapshot.manifest.disks.is_empty() {
        let made = DirBuilder::new().mode(0o700).create(&saved);
        made.map_err(|source| CliError::File { path: saved.clone(), source })?;
    }
    for disk in &snapshot.manifest.disks {
        let path = restored_disk(folder, &disk.name);
        let mut said = Instant::now();
        let image = snapshot.expect_disk(disk, &saved, whole, &mut |bytes, all| {
            if said.elapsed() >= SAY_EVERY {
                said = Instant::now();
                eprintln!("hearth: disk {}: {} of {} MiB", disk.name, bytes >> 20, all >> 20);
            }
        })?;
        trust.check_disk(disk, &image)?;
        // An image from a store changes until it is complete.
        let create = if snapshot.is_far() { create_overlay_over_arriving } else { create_overlay };
        create(&path, &image, &disk.format)?;
        disks.push(path);
    }
    Ok(disks)
}

/// What `restore --disks-only --json` prints.
#[derive(Debug, Serialize)]
struct RestoredDisks {
    /// Paths of the images, in the order of the snapshot.
    disks: Vec<PathBuf>,
    /// Whether they are fetched while they are used.
    arriving: bool,
}

/// Creates a folder with images over the snapshot's disks.
pub fn restore_disks(context: &mut Context<'_>, arguments: RestoreArguments) -> Result<Exit, CliError> {
    let snapshot = arguments.store.open(&place(arguments.snapshot))?;
    let folder = absolute(arguments.folder.expect("clap requires it"));
    let trust = Trust::of(&snapshot, &context.root, arguments.trust_config);
    DirBuilder::new().mode(0o700).create(&folder).map_err(|source| CliError::File { path: folder.clone(), source })?;
    let made = create_disks(&snapshot, &trust, &folder, false);
    // This command has just created the folder.
    let disks = made.inspect_err(|_| remove_machine(&folder))?;
    let made = RestoredDisks { disks, arriving: snapshot.is_far() };
    if context.json {
        context.write_json(&made)?;
    } else {
        tell_disks(context, &made, arguments.store.section())?;
    }
    Ok(Exit::Done)
}

fn tell_disks(
    context: &mut Context<'_>,
    made: &RestoredDisks,
    object_store: Option<ObjectStoreSection>,
) -> Result<(), CliError> {
    made.disks.iter().try_for_each(|disk| context.write_line(&disk.display().to_string()))?;
    context.write_line("\nName them in the domain's definition as qcow2 images on the virtio bus.")?;
    if !made.arriving {
        return Ok(());
    }
    context.write_line(
        "They are fetched while the domain runs. Until then every program but Hearth's keeper reads zeroes in them: \
         run `hearth attach DOMAIN` before the domain's first start.",
    )?;
    let section = ConfigFile { object_store, ..ConfigFile::default() }.to_text();
    if section.is_empty() {
        return Ok(());
    }
    context.write_line(&format!("Then add to /etc/hearth/DOMAIN.toml:\n\n{}", section.trim_end()))
}

#[derive(Debug, Serialize)]
struct WorkingSet {
    snapshot: String,
    /// Stored pages of the guest's memory, without zero pages.
    stored_pages: u64,
    stored_bytes: u64,
    /// None if not recorded yet.
    working_set: Option<Noted>,
}

#[derive(Debug, Serialize)]
struct Noted {
    source: &'static str,
    noted_at: String,
    pages: u64,
    bytes: u64,
    /// Number of contiguous ranges, in the order of use.
    runs: u64,
    /// Youngest first; ages without pages are left out.
    ages: Vec<Age>,
}

#[derive(Debug, Serialize)]
struct Age {
    /// Number of traces since these pages were last used: 0 for the last trace, or for a scan that no trace has
    /// followed.
    age: u32,
    /// `trace`: by a restored guest; `scan`: before the save.
    source: &'static str,
    pages: u64,
}

impl Age {
    fn words(&self) -> String {
        match (self.source, self.age) {
            (SCAN, 0) => "used before the save".to_owned(),
            (SCAN, 1) => "used before the save, but not in the trace since".to_owned(),
            (SCAN, age) => {
                format!("used before the save, but not in the {age} traces since; dropped after {AGE_END}")
            }
            (_, 0) => "used in the last trace".to_owned(),
            (_, 1) => "used in the trace before the last".to_owned(),
            (_, age) => format!("not used in the last {age} traces; dropped after {AGE_END}"),
        }
    }
}

pub fn working_set(context: &mut Context<'_>, folder: &Path, store: &StoreArguments) -> Result<Exit, CliError> {
    let snapshot = store.open(folder)?;
    let noted = match &snapshot.working_set {
        Ok(noted) => noted.as_ref(),
        Err(_) => return Err(snapshot.working_set.expect_err("as was just seen").into()),
    };
    let page_bytes = hearth_memory::PAGE_BYTES;
    let mut said = WorkingSet {
        snapshot: folder.display().to_string(),
        stored_pages: snapshot.manifest.ram.pages,
        stored_bytes: snapshot.manifest.ram.pages * page_bytes,
        working_set: None,
    };
    if let Some(set) = noted {
        let pages = set.pages();
        let at = snapshot.working_set_version()?.map_or(SystemTime::UNIX_EPOCH, |(at, _)| at);
        let ages = ages(set);
        said.working_set = Some(Noted {
            source: sources(&ages),
            noted_at: rfc3339(at),
            pages: pages.len() as u64,
            bytes: pages.len() as u64 * page_bytes,
            runs: pages.chunk_by(|one, next| one + 1 == *next).count() as u64,
            ages,
        });
    }
    if context.json {
        context.write_json(&said)?;
        return Ok(Exit::Done);
    }
    let mut rows = vec![vec!["memory".to_owned(), format!("{} pages", said.stored_pages), bytes(said.stored_bytes)]];
    match &said.working_set {
        None => rows.push(vec![
            "working set".into(),
            "not recorded; use `hearth rehearse` or `hearth save --scan`".into(),
            String::new(),
        ]),
        Some(set) => {
            rows.push(vec![
                "working set".into(),
                format!("{} pages in {} runs", set.pages, set.runs),
                bytes(set.bytes),
            ]);
            for age in &set.ages {
                let text = format!("{} pages {}", age.pages, age.words());
                rows.push(vec![String::new(), text, bytes(age.pages * page_bytes)]);
            }
            rows.push(vec!["noted".into(), set.source.into(), set.noted_at.clone()]);
        }
    }
    for line in table(&[Side::Left, Side::Left, Side::Right], &rows) {
        context.write_line(&line)?;
    }
    if let Some(set) = noted {
        context.write_line(&format!("\n{}", picture(set.pages(), set.ram_pages())))?;
    }
    Ok(Exit::Done)
}

/// Traces record the order of use, so they come first among pages of one age.
fn ages(set: &PageReader) -> Vec<Age> {
    let mut counts = BTreeMap::new();
    for aged in aged_pages(set) {
        *counts.entry((aged.age, aged.source == Source::Scan)).or_default() += 1;
    }
    let age = |((age, scanned), pages)| Age { age, source: if scanned { SCAN } else { TRACE }, pages };
    counts.into_iter().map(age).collect()
}

fn sources(ages: &[Age]) -> &'static str {
    let is_from = |source| ages.iter().any(|age| age.source == source);
    match (is_from(SCAN), is_from(TRACE)) {
        (true, true) => "a scan before the save, and traces of restored guests",
        (true, false) => "a scan before the save",
        (false, _) => "traces of restored guests",
    }
}

/// The address space from left to right and top to bottom; darker cells have more pages in the set.
fn picture(pages: &[u32], ram_pages: u64) -> String {
    let cells = COLUMNS * LINES;
    let mut counts = vec![0_u64; cells];
    for &page in pages {
        counts[(u64::from(page) * cells as u64 / ram_pages.max(1)) as usize] += 1;
    }
    let full = (ram_pages / cells as u64).max(1);
    let shade =
        |count: &u64| SHADES[(count * (SHADES.len() as u64 - 1)).div_ceil(full).min(SHADES.len() as u64 - 1) as usize];
    let lines: Vec<String> = counts.chunks(COLUMNS).map(|line| line.iter().map(shade).collect()).collect();
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forward_moves_ready_port_unless_set() {
        let text = "name = \"web\"\nmemory = \"64MiB\"\n[boot]\nkernel = \"k\"\n[[nets]]\nforward = [\"8080:80\"]\n\
                    [remount]\nready = { port = 8080 }\n";
        let check = |set: &[&str], forward: &str, expect: &str| {
            let typed = ConfigFile::parse(text).unwrap();
            let settings = set.iter().map(|text| Setting::parse(text).unwrap()).collect();
            let settings = with_forwards(&typed, settings, vec![forward.to_owned()]);
            let text = typed.with_settings(&settings).unwrap().to_text();
            assert!(text.contains(&format!("port = {expect}\n")) && text.contains(forward), "{text}");
        };
        check(&[], "127.0.0.1:9080:80", "9080");
        check(&["remount.ready.port=9443"], "127.0.0.1:9080:80", "9443");
    }

    #[test]
    fn the_picture_shows_where_the_set_lies() {
        let ram_pages = (COLUMNS * LINES * 8) as u64;
        let pages: Vec<u32> = (0..8).chain([9, 16]).chain(ram_pages as u32 - 3..ram_pages as u32).collect();
        let picture = picture(&pages, ram_pages);
        assert_eq!(picture.lines().count(), LINES);
        assert!(picture.starts_with("@--...") && picture.ends_with("...+"), "{picture}");
    }
}
