//! `rm`: removes a machine that does not run, with the files that Hearth made for it.
//!
//! machine -> does it rest? -> what goes, what stays -> asked -> locked -> is all of that still so? -> unit disabled -> files removed,
//! the configuration last
//!
//! What goes has names that Hearth gives. An image that it did not make is never among it, whatever its name: the disk must have the mark
//! that Hearth's overlays have.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use clap::Args;
use hearth_disk::image::{ImageError, add_backing_images, is_own_overlay, lock_alone};
use hearth_recovery::journal::Journal;
use serde::Serialize;

use super::service::{self, Manager};
use super::{CliError, Context, Exit, file_lock, parked};
use crate::check::life::Life;
use crate::config::{Config, DiskConfig, DiskFormat, Owner};
use crate::folders::{self, CACHE_MAP, Folders, KEEPER_LOCK, memory_owner};
use crate::home::Home;
use crate::host_reload::Record;
use crate::machine::leftovers;
use crate::runtime_root::RuntimeRoot;

/// Files and folders in a machine's own folder that Hearth makes, beside its disk and seed.
const OWN: [&str; 3] = ["boot-set", CACHE_MAP, "dumps"];

#[derive(Debug, Args)]
pub struct RemoveArguments {
    /// Name of the machine.
    #[arg(add = super::complete::machines())]
    name: String,
    /// Do not ask.
    #[arg(long, short)]
    yes: bool,
}

/// What becomes of a machine's files.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Plan {
    /// The configuration is the last one.
    removed: Vec<PathBuf>,
    /// Files of the machine that Hearth did not make.
    kept: Vec<PathBuf>,
    /// Folders that go if nothing is left in them.
    #[serde(skip)]
    folders: Vec<PathBuf>,
    /// They are locked until the end, and go after the configuration.
    #[serde(skip)]
    locks: Vec<PathBuf>,
}

pub fn remove(context: &mut Context<'_>, arguments: &RemoveArguments) -> Result<Exit, CliError> {
    let home = super::home(&arguments.name)?;
    let config = configuration(&home, &context.root)?;
    must_rest(context, &home, &config, Life::of(&config))?;
    let plan = plan(&home, &config)?;
    must_be_unused(&home, &context.root, &plan.removed)?;
    if !context.json {
        tell(context, &plan)?;
    }
    if !arguments.yes && !context.confirmed("Remove", "removed", home.name())? {
        return Ok(Exit::Failed);
    }
    // A `set` under way would bring the file back.
    let _lock = home.file().exists().then(|| file_lock::take(&home.file())).transpose()?;
    let _locks = lock(&home, &config)?;
    // It may have been started meanwhile.
    must_rest(context, &home, &config, Life::without_keeper(&config))?;
    must_be_as_told(&home, &context.root, &config, &plan)?;
    if service::is_there() {
        Manager::of_this_user().forget(&home)?;
    }
    carry_out(&plan)?;
    match context.json {
        true => context.write_json(&plan)?,
        false => context.write_line(&format!("{} is removed", home.name()))?,
    }
    Ok(Exit::Done)
}

/// The machine's configuration. An interrupted `hearth new` leaves none: then that of a machine with the disk alone.
fn configuration(home: &Home, root: &RuntimeRoot) -> Result<Config, CliError> {
    let file = home.file();
    let config = match fs::read_to_string(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && made(home).iter().any(|path| path.exists()) => {
            let disk = toml::Value::from(home.disk().display().to_string());
            let text = format!("name = \"{}\"\nmemory = \"1GiB\"\n[[disks]]\npath = {disk}\n", home.name());
            Config::parse(&text, &file, root)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(super::no_machine(home)),
        _ => Config::load(&file, root),
    };
    config.map_err(|problems| CliError::Configuration { file, problems })
}

/// The files that `hearth new` made, except for the configuration: none if another disk has the place of its own. The disk is the last one:
/// an interrupted removal leaves it, and can be repeated.
fn made(home: &Home) -> Vec<PathBuf> {
    match is_own_overlay(&home.disk()) {
        true => vec![home.seed(), home.variables(), home.disk()],
        false => Vec::new(),
    }
}

/// Refuses a machine with a guest, with memory of one that somebody wants, or that is not Hearth's own.
fn must_rest(context: &Context<'_>, home: &Home, config: &Config, life: Life) -> Result<(), CliError> {
    let name = home.name();
    let refuse = |what: String| Err(CliError::Machine { name: name.to_owned(), what });
    if config.owner == Owner::Libvirt {
        return refuse(format!("is a domain of libvirt; give its disks back: `hearth detach {name}`"));
    }
    match life {
        Life::Kept => return refuse(format!("is running; stop it first: `hearth stop {name}`")),
        Life::Orphaned => return Err(context.not_running(name)),
        Life::None => {}
    }
    // A keeper with another XDG_RUNTIME_DIR has another runtime folder and this memory folder.
    if let Some(why) = memory_owner::look(&config.folders.runtime, &config.folders.memory) {
        let memory = config.folders.memory.display();
        return refuse(format!("is not removed: its memory folder {memory} is in use: {why}; {}", memory_owner::HINT));
    }
    if let Some(guest) = parked::find(&context.root, Record::of_this_host().as_ref(), name) {
        return Err(CliError::Parked { name: name.to_owned(), guest: Box::new(guest) });
    }
    let journal = Journal::load(&config.folders.runtime.join("journal.json")).ok().flatten();
    if journal.is_some_and(|journal| !journal.dumps.is_empty()) {
        let run = format!("`hearth run {}`", config.file.display());
        return refuse(format!("has a crash that is not dumped yet; {run} writes the dump, and may then be stopped"));
    }
    Ok(())
}

/// Refuses if something else would go now than what was shown, or something that others need by now.
fn must_be_as_told(home: &Home, root: &RuntimeRoot, config: &Config, told: &Plan) -> Result<(), CliError> {
    let is_as_told = configuration(home, root)? == *config && plan(home, config)? == *told;
    if !is_as_told {
        let name = home.name().to_owned();
        let what = format!("is not removed: its files have changed meanwhile; `hearth rm {name}` shows what goes now");
        return Err(CliError::Machine { name, what });
    }
    must_be_unused(home, root, &told.removed)
}

/// Locks the machine's folders and files, so that no keeper can start it and no program uses its images.
fn lock(home: &Home, config: &Config) -> Result<(Vec<File>, Folders), CliError> {
    let images = made(home).into_iter().filter(|path| path.exists());
    let images = images.map(|path| lock_alone(&path)).collect::<Result<_, _>>()?;
    Ok((images, Folders::prepare(home.name(), &config.folders.runtime, &config.folders.memory)?))
}

fn plan(home: &Home, config: &Config) -> Result<Plan, CliError> {
    let (runtime, memory) = (&config.folders.runtime, &config.folders.memory);
    // Folders with another name may be shared.
    let own = [
        (memory, folders::is_in_memory as fn(&str) -> bool, memory_owner::FILE),
        (runtime, leftovers::is_ours, KEEPER_LOCK),
    ];
    let own: Vec<_> = own.into_iter().filter(|(folder, ..)| folder.ends_with(home.name())).collect();
    let locks: Vec<_> = own.iter().map(|(folder, _, lock)| folder.join(lock)).collect();
    let mut removed = made(home).to_vec();
    // Without a configuration here, they may be those of a machine that has it elsewhere.
    if home.file().exists() {
        removed.extend(OWN.iter().map(|name| home.folder().join(name)));
        for (folder, is_ours, _) in &own {
            let is_ours = |path: &PathBuf| path.file_name().and_then(OsStr::to_str).is_some_and(is_ours);
            removed.extend(entries(folder).filter(is_ours));
        }
    }
    removed.push(home.file());
    removed.retain(|path| path.symlink_metadata().is_ok() && !locks.contains(path));
    let folders: Vec<_> = own.iter().map(|own| own.0.clone()).chain([home.folder().to_owned()]).collect();
    let devices = &config.devices;
    let mirrors = devices.nvram.iter().filter_map(|device| device.mirror.as_ref()).map(|mirror| &mirror.file);
    let mirrors = mirrors.chain(devices.pmem.iter().filter_map(|device| device.mirror_file.as_ref()));
    let mut kept: Vec<_> = devices.disks.iter().map(|disk| &disk.path).chain(mirrors).cloned().collect();
    kept.retain(|path| !made(home).contains(path));
    let others = folders.iter().flat_map(|folder| entries(folder));
    kept.extend(others.filter(|path| !removed.contains(path) && !locks.contains(path)));
    kept.sort();
    kept.dedup();
    must_keep(home, &removed, &kept)?;
    Ok(Plan { removed, kept, folders, locks })
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect::<BTreeSet<_>>().into_iter()
}

/// Refuses a removal that would take a file that is to be kept with it.
fn must_keep(home: &Home, removed: &[PathBuf], kept: &[PathBuf]) -> Result<(), CliError> {
    for kept in kept {
        if let Some(removed) = goes_with(kept, removed) {
            let (kept, removed) = (kept.display(), removed.display());
            let what =
                format!("is not removed: {kept}, which Hearth did not make, would go with {removed}; move it first");
            return Err(CliError::Machine { name: home.name().to_owned(), what });
        }
    }
    Ok(())
}

/// Refuses to remove an image that another machine in the same folder needs, or may need. Of stopped machines with files elsewhere nothing
/// is known.
fn must_be_unused(home: &Home, root: &RuntimeRoot, removed: &[PathBuf]) -> Result<(), CliError> {
    let refuse =
        |why: String| Err(CliError::Machine { name: home.name().to_owned(), what: format!("is not removed: {why}") });
    for other in home.others() {
        let (name, file) = (other.name(), other.file());
        let unknown = |why: String| match home.disk() {
            disk if removed.contains(&disk) => {
                let (disk, file) = (disk.display(), file.display());
                refuse(format!("a disk of {name} may need {disk}: {why}; mend that, or remove {name} or {file} first"))
            }
            // Nothing goes that another image may lie over.
            _ => Ok(()),
        };
        let disks = match Config::load(&file, root) {
            Ok(config) => config.devices.disks,
            Err(_) if file.exists() => {
                unknown(format!("{} is not valid", file.display()))?;
                continue;
            }
            Err(_) => continue,
        };
        for disk in &disks {
            let (images, end) = images_of(disk);
            if let Some(removed) = images.iter().find_map(|image| goes_with(image, removed)) {
                return refuse(format!("a disk of {name} needs {}; remove {name} first", removed.display()));
            }
            end.or_else(|error| unknown(crate::chain(&error)))?;
        }
    }
    Ok(())
}

/// The disk's image and those beneath it, and why there may be more.
fn images_of(disk: &DiskConfig) -> (Vec<PathBuf>, Result<(), ImageError>) {
    let mut beneath = Vec::new();
    let end = match disk.format {
        // A guest can write any header into its raw disk.
        DiskFormat::Raw => Ok(()),
        DiskFormat::Qcow2 => add_backing_images(&disk.path, &mut beneath),
    };
    (std::iter::once(disk.path.clone()).chain(beneath.into_iter().map(|(path, _)| path)).collect(), end)
}

/// The removed path with which this one would go.
fn goes_with<'a>(path: &Path, removed: &'a [PathBuf]) -> Option<&'a PathBuf> {
    let names = [itself(path), fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())];
    removed.iter().find(|removed| names.iter().any(|name| name.starts_with(itself(removed))))
}

/// The path without links, except for the last part: a link is removed, and what it leads to is not.
fn itself(path: &Path) -> PathBuf {
    let parent = path.parent().and_then(|parent| fs::canonicalize(parent).ok());
    parent.zip(path.file_name()).map_or_else(|| path.to_owned(), |(parent, name)| parent.join(name))
}

fn tell(context: &mut Context<'_>, plan: &Plan) -> Result<(), CliError> {
    for (what, paths) in [("removes", &plan.removed), ("keeps", &plan.kept)] {
        for path in paths {
            context.write_line(&format!("{what:<8} {}", path.display()))?;
        }
    }
    Ok(())
}

fn carry_out(plan: &Plan) -> Result<(), CliError> {
    for path in plan.removed.iter().chain(&plan.locks) {
        let is_folder = path.symlink_metadata().is_ok_and(|found| found.is_dir());
        let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        match removed {
            // A folder may be a mount point. It is empty now.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy) => {}
            removed => removed.map_err(|source| CliError::File { path: path.clone(), source })?,
        }
    }
    // Files that are kept may be there.
    plan.folders.iter().for_each(|folder| drop(fs::remove_dir(folder)));
    Ok(())
}

#[cfg(test)]
mod tests {
    use hearth_disk::image::create_overlay;

    use super::*;

    /// A machine whose files are all in one folder, with these disks, and the two folders of its keeper in `parent`.
    fn machine(folder: &Path, parent: &Path, disks: &[&Path]) -> (Home, Config) {
        let home = Home::in_folder("web", folder);
        let parent = parent.display();
        let mut text = format!(
            "name = \"web\"\nmemory = \"64MiB\"\nmemory_folder = \"{parent}/memory\"\nruntime_folder = \"{parent}/web\"\n"
        );
        for disk in disks {
            text += &format!("[[disks]]\npath = \"{}\"\n", disk.display());
        }
        let config = Config::parse(&text, &home.file(), &RuntimeRoot::new(folder.join("run"))).unwrap();
        (home, config)
    }

    /// Makes empty files, and a machine's own disk as `hearth new` does.
    fn make(paths: &[PathBuf]) {
        for path in paths {
            let folder = path.parent().unwrap();
            fs::create_dir_all(folder).unwrap();
            fs::write(path, "").unwrap();
            if path.ends_with("disk.qcow2") {
                let base = folder.with_extension("base");
                File::create(&base).unwrap().set_len(1 << 20).unwrap();
                fs::remove_file(path).unwrap();
                create_overlay(path, &base, "raw").unwrap();
            }
        }
    }

    #[test]
    fn only_what_hearth_made_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (image, disk) = (folder.path().join("web/data.img"), Home::in_folder("web", folder.path()).disk());
        let (home, config) = machine(folder.path(), folder.path(), &[&disk, &image]);
        let memory = folder.path().join("memory");
        let own = [
            [disk, home.seed(), home.folder().join("dumps/1.vmcore")],
            [memory.join("web/tag.key"), memory.join("web/ram-1"), memory.join("web/nvram-log")],
            ["journal.json", "qemu-1.log", "api.sock"].map(|name| folder.path().join("web").join(name)),
            [home.file(), memory.join("web/owner"), folder.path().join("web/keeper.lock")],
        ]
        .concat();
        let others = [image.clone(), home.folder().join("notes.txt"), memory.join("db/tag.key")];
        make(&own);
        make(&others);
        let plan = plan(&home, &config).unwrap();
        assert_eq!(plan.removed.last(), Some(&home.file()));
        assert_eq!(plan.kept, [home.folder().join("notes.txt"), image]);
        carry_out(&plan).unwrap();
        assert!(own.iter().all(|path| !path.exists()) && !memory.join("web").exists());
        assert!(others.iter().all(|path| path.exists()));
    }

    #[test]
    fn own_image_with_the_disks_name_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::in_folder("web", folder.path());
        let (_, config) = machine(folder.path(), folder.path(), &[&home.disk()]);
        make(&[home.disk(), home.seed(), home.file()]);
        let check = |is_made: bool| {
            let plan = plan(&home, &config).unwrap();
            let own = if is_made { &plan.removed } else { &plan.kept };
            assert!([home.disk(), home.seed()].iter().all(|path| own.contains(path)), "{plan:?}");
            assert!(plan.removed.contains(&home.file()));
        };
        check(true);
        let qemu_img = |arguments: &str| {
            let arguments = arguments.replace("DISK", home.disk().to_str().unwrap());
            let done = std::process::Command::new("sh").args(["-ec", &arguments]).output().unwrap();
            assert!(done.status.success(), "{done:?}");
        };
        qemu_img("qemu-img resize -q DISK 2M");
        check(true);
        qemu_img("qemu-img rebase -b '' DISK");
        check(false);
        for make in ["qemu-img create -q -f qcow2 DISK 1M", "truncate -s 1M DISK", "printf 'QFI\\373' >DISK"] {
            qemu_img(&format!("rm DISK; {make}"));
            check(false);
        }
    }

    #[test]
    fn machine_under_another_runtime_root_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (home, config) = machine(folder.path(), folder.path(), &[&folder.path().join("lib/web/disk.qcow2")]);
        let context = Context { root: RuntimeRoot::new(folder.path().join("run")), json: true, out: &mut Vec::new() };
        let rests = || must_rest(&context, &home, &config, Life::of(&config)).map_err(|error| error.to_string());
        rests().unwrap();
        let elsewhere = folder.path().join("elsewhere");
        let keeper = Folders::prepare("web", &elsewhere, &config.folders.memory).unwrap();
        let said = rests().unwrap_err();
        assert!(said.contains(&format!("the keeper of {} runs", elsewhere.display())), "{said}");
        drop(keeper);
        rests().unwrap();
    }

    #[test]
    fn machine_is_locked_while_its_files_go() {
        let folder = tempfile::tempdir().unwrap();
        let (home, config) = machine(folder.path(), folder.path(), &[&folder.path().join("lib/web/disk.qcow2")]);
        make(&[home.disk()]);
        let Folders { runtime, memory, .. } = lock(&home, &config).unwrap().1;
        let locks = lock(&home, &config).unwrap();
        assert_eq!(Life::without_keeper(&config), Life::None);
        assert!(Folders::prepare("web", &runtime, &memory).is_err(), "a keeper that starts now is refused");
        let said = lock(&home, &config).unwrap_err().to_string();
        assert!(said.contains("disk.qcow2 is in use by process"), "{said}");
        drop(locks);
        lock(&home, &config).unwrap();
    }

    #[test]
    fn disk_beneath_another_machines_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(1 << 20).unwrap();
        let (web, db) = (Home::in_folder("web", folder.path()), Home::in_folder("db", folder.path()));
        make(&[db.file(), db.folder().join("notes")]);
        fs::create_dir_all(web.folder()).unwrap();
        let base = folder.path().join("base.qcow2");
        create_overlay(&base, &image, "raw").unwrap();
        create_overlay(&web.disk(), &base, "qcow2").unwrap();
        create_overlay(&db.disk(), &web.disk(), "qcow2").unwrap();
        let configure = |format: &str| {
            let disk = db.disk().display().to_string();
            let text =
                format!("name = \"db\"\nmemory = \"64MiB\"\n[[disks]]\npath = \"{disk}\"\nformat = \"{format}\"\n");
            fs::write(db.file(), text).unwrap();
        };
        let root = RuntimeRoot::new(folder.path().join("run"));
        let disk = web.disk();
        let check = |removed: &[PathBuf]| must_be_unused(&web, &root, removed).map_err(|error| error.to_string());
        let refused =
            || check(std::slice::from_ref(&disk)).unwrap_err().replace(folder.path().to_str().unwrap(), "DIR");
        configure("qcow2");
        let needs = "web: is not removed: a disk of db needs DIR/lib/web/disk.qcow2; remove db first";
        assert_eq!(refused(), needs);
        // Such as on a file system that is not mounted.
        fs::remove_file(&base).unwrap();
        assert_eq!(refused(), needs);
        // What a guest has written into its raw disk.
        configure("raw");
        check(std::slice::from_ref(&disk)).unwrap();
        configure("qcow2");
        fs::remove_file(db.disk()).unwrap();
        let unknown = "web: is not removed: a disk of db may need DIR/lib/web/disk.qcow2: disk image DIR/lib/db/disk.qcow2 does \
            not exist; mend that, or remove db or DIR/etc/db.toml first";
        assert_eq!(refused(), unknown);
        check(&[web.file()]).unwrap();
        fs::write(db.file(), "name = 1\n").unwrap();
        assert!(refused().contains("disk.qcow2: DIR/etc/db.toml is not valid; mend that"), "{}", refused());
        fs::remove_file(db.file()).unwrap();
        check(&[disk]).unwrap();
    }

    #[test]
    fn what_changes_behind_the_question_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (web, db) = (Home::in_folder("web", folder.path()), Home::in_folder("db", folder.path()));
        let root = RuntimeRoot::new(folder.path().join("run"));
        let write = |home: &Home, disk: PathBuf| {
            let disk = toml::Value::from(disk.display().to_string());
            let (name, memory) = (home.name(), folder.path().join("memory"));
            let head = format!("name = \"{name}\"\nmemory = \"64MiB\"\nmemory_folder = \"{}\"\n", memory.display());
            fs::write(home.file(), format!("{head}[[disks]]\npath = {disk}\n")).unwrap();
        };
        make(&[web.file(), web.disk(), web.folder().join("dumps/1.vmcore")]);
        write(&web, web.disk());
        let config = configuration(&web, &root).unwrap();
        let told = plan(&web, &config).unwrap();
        let check = || must_be_as_told(&web, &root, &config, &told).map_err(|error| error.to_string());
        let _locks = lock(&web, &config).unwrap();
        check().unwrap();
        let image = web.folder().join("dumps/data.img");
        make(std::slice::from_ref(&image));
        write(&db, image);
        let said = check().unwrap_err();
        assert!(said.contains("a disk of db needs") && said.contains("web/dumps; remove db first"), "{said}");
        fs::remove_file(db.file()).unwrap();
        make(&[web.seed()]);
        assert!(check().unwrap_err().contains("its files have changed meanwhile"));
        fs::remove_file(web.seed()).unwrap();
        write(&web, folder.path().join("another"));
        assert!(check().unwrap_err().contains("its files have changed meanwhile"));
        write(&web, web.disk());
        check().unwrap();
    }

    #[test]
    fn interrupted_new_is_removed_without_configuration() {
        let folder = tempfile::tempdir().unwrap();
        let (home, root) = (Home::in_folder("unfinished", folder.path()), RuntimeRoot::new(folder.path().join("run")));
        let said = configuration(&home, &root).unwrap_err().to_string();
        assert!(said.contains("there is no "), "{said}");
        let dump = home.folder().join("dumps/1.vmcore");
        make(&[home.disk(), home.seed(), dump.clone()]);
        let plan = plan(&home, &configuration(&home, &root).unwrap()).unwrap();
        assert_eq!((plan.removed, plan.kept), (vec![home.seed(), home.disk()], vec![home.folder().join("dumps")]));
    }

    #[test]
    fn files_to_keep_must_not_go_with_others() {
        let folder = tempfile::tempdir().unwrap();
        let check = |image: PathBuf, with: &str| {
            make(std::slice::from_ref(&image));
            let (home, config) = machine(folder.path(), folder.path(), &[&image]);
            make(&[home.file()]);
            let said = plan(&home, &config).unwrap_err().to_string();
            let expect = format!("would go with {}; move it first", folder.path().join(with).display());
            assert!(said.contains(&expect) && image.exists(), "{said}");
        };
        check(folder.path().join("lib/web/dumps/data.img"), "lib/web/dumps");
        check(folder.path().join("memory/web/nvram-data.img"), "memory/web/nvram-data.img");
        check(folder.path().join("lib/web/../web/disk.qcow2"), "lib/web/disk.qcow2");
    }
}
