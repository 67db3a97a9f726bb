//! `rm`: removes a machine that does not run, with the files that Hearth made for it.
//!
//! machine -> does it rest? -> what goes, what stays -> asked -> unit disabled -> files removed, the configuration last
//!
//! What goes has names that Hearth gives. An image that it did not make is never among it.

use std::fs;
use std::io::{self, BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use clap::Args;
use hearth_recovery::journal::Journal;
use serde::Serialize;

use super::service::{self, Manager};
use super::{CliError, Context, Exit, parked};
use crate::check::life::Life;
use crate::config::{Config, Owner};
use crate::folders::CACHE_MAP;
use crate::home::Home;
use crate::host_reload::Record;

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
}

pub fn remove(context: &mut Context<'_>, arguments: &RemoveArguments) -> Result<Exit, CliError> {
    let home = super::existing_home(&arguments.name)?;
    let file = home.file();
    let config = Config::load(&file, &context.root).map_err(|problems| CliError::Configuration { file, problems })?;
    must_rest(context, &home, &config)?;
    let plan = plan(&home, &config);
    if !context.json {
        tell(context, &plan)?;
    }
    if !arguments.yes && !confirmed(context, home.name())? {
        return Ok(Exit::Failed);
    }
    // It may have been started meanwhile.
    must_rest(context, &home, &config)?;
    if service::is_there() {
        Manager::of_this_user().forget(&home)?;
    }
    carry_out(&plan, home.folder())?;
    match context.json {
        true => context.write_json(&plan)?,
        false => context.write_line(&format!("{} is removed", home.name()))?,
    }
    Ok(Exit::Done)
}

/// Refuses a machine with a guest, with memory of one that somebody wants, or that is not Hearth's own.
fn must_rest(context: &Context<'_>, home: &Home, config: &Config) -> Result<(), CliError> {
    let name = home.name();
    let refuse = |what: String| Err(CliError::Machine { name: name.to_owned(), what });
    if config.owner == Owner::Libvirt {
        return refuse(format!("is a domain of libvirt; give its disks back: `hearth detach {name}`"));
    }
    match Life::of(config) {
        Life::Kept => return refuse(format!("is running; stop it first: `hearth stop {name}`")),
        Life::Orphaned => return Err(context.not_running(name)),
        Life::None => {}
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

fn plan(home: &Home, config: &Config) -> Plan {
    let own = OWN.iter().map(|name| home.folder().join(name));
    let mut removed = vec![home.disk(), home.seed(), home.variables()];
    removed.extend(own);
    // Folders with another name may be shared.
    let folders = [&config.folders.runtime, &config.folders.memory];
    removed.extend(folders.into_iter().filter(|folder| folder.ends_with(home.name())).cloned());
    removed.push(home.file());
    removed.retain(|path| path.symlink_metadata().is_ok());
    let devices = &config.devices;
    let mirrors = devices.nvram.iter().filter_map(|device| device.mirror.as_ref()).map(|mirror| &mirror.file);
    let mirrors = mirrors.chain(devices.pmem.iter().filter_map(|device| device.mirror_file.as_ref()));
    let mut kept: Vec<_> = devices.disks.iter().map(|disk| &disk.path).chain(mirrors).cloned().collect();
    kept.extend(fs::read_dir(home.folder()).into_iter().flatten().flatten().map(|entry| entry.path()));
    kept.retain(|path| !removed.contains(path));
    kept.sort();
    kept.dedup();
    Plan { removed, kept }
}

fn tell(context: &mut Context<'_>, plan: &Plan) -> Result<(), CliError> {
    for (what, paths) in [("removes", &plan.removed), ("keeps", &plan.kept)] {
        for path in paths {
            context.write_line(&format!("{what:<8} {}", path.display()))?;
        }
    }
    Ok(())
}

fn confirmed(context: &mut Context<'_>, name: &str) -> Result<bool, CliError> {
    if context.json || !io::stdin().is_terminal() {
        let what = "is not removed: nobody can be asked here; add --yes".to_owned();
        return Err(CliError::Machine { name: name.to_owned(), what });
    }
    write!(context.out, "\nRemove {name}? [y/N] ")?;
    context.out.flush()?;
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn carry_out(plan: &Plan, folder: &Path) -> Result<(), CliError> {
    for path in &plan.removed {
        let is_folder = path.symlink_metadata().is_ok_and(|found| found.is_dir());
        let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.map_err(|source| CliError::File { path: path.clone(), source })?;
    }
    // Files that are kept may be there.
    let _ = fs::remove_dir(folder);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime_root::RuntimeRoot;

    #[test]
    fn only_what_hearth_made_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::in_folder("web", folder.path());
        let (image, memory) = (folder.path().join("data.img"), folder.path().join("memory"));
        let own = [home.disk(), home.seed(), home.folder().join("dumps/1.vmcore"), memory.join("web/tag.key")];
        let others = [image.clone(), home.folder().join("notes.txt"), memory.join("db/tag.key")];
        for path in own.iter().chain(&others).chain([&home.file()]) {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let text = format!(
            "name = \"web\"\nmemory = \"64MiB\"\nmemory_folder = \"{}\"\n[[disks]]\npath = \"{}\"\n[[disks]]\npath = \"{}\"\n",
            memory.display(),
            home.disk().display(),
            image.display()
        );
        let root = RuntimeRoot::new(folder.path().join("run"));
        let plan = plan(&home, &Config::parse(&text, &home.file(), &root).unwrap());
        assert_eq!(plan.removed.last(), Some(&home.file()));
        assert_eq!(plan.kept, [image, home.folder().join("notes.txt")]);
        carry_out(&plan, home.folder()).unwrap();
        assert!(own.iter().chain([&home.file()]).all(|path| !path.exists()));
        assert!(others.iter().all(|path| path.exists()));
    }
}
