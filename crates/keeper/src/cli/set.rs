//! `set`: changes keys of a machine's file, and says when each takes effect.
//!
//! file -> locked -> edited text -> checked as `check` does -> when each change takes effect -> replaced

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, fchown};
use std::path::{Path, PathBuf};

use clap::Args;
use hearth_memory::{Durability, replace_file};
use serde::Serialize;

use super::{CliError, Context, Exit, file_lock};
use crate::check::{self, Purpose, life};
use crate::config::{Config, Effect, Owner, Setting, edit};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

#[derive(Debug, Args)]
pub struct SetArguments {
    /// Name of the machine.
    #[arg(add = super::complete::machines())]
    name: String,
    /// Key and value, such as cpus=2 or nets[0].forward=["8080:80"]; without a value, the key is removed. See docs/config.md.
    #[arg(required = true, value_name = "KEY=VALUE", value_parser = Setting::parse, add = super::complete::keys())]
    settings: Vec<Setting>,
}

/// What `set --json` prints.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    file: &'a Path,
    changes: Vec<Change>,
    problems: &'a [Problem],
}

#[derive(Serialize)]
struct Change {
    key: String,
    /// What it waits for: `next keeper`, `next guest` or `next start`.
    takes_effect: &'static str,
}

pub fn set(context: &mut Context<'_>, arguments: &SetArguments) -> Result<Exit, CliError> {
    let SetArguments { name, settings } = arguments;
    let file = file_of(context, name)?;
    let _lock = file_lock::take(&file)?;
    let unusable = |source| CliError::File { path: file.clone(), source };
    let text = fs::read_to_string(&file).map_err(unusable)?;
    let wrong = |problems| CliError::NotSet { file: file.clone(), problems };
    let (edited, is_changed) = edit_all(text.clone(), settings).map_err(wrong)?;
    let config = Config::parse(&edited, &file, &context.root).map_err(wrong)?;
    must_be_this_machine(name, &config)?;
    let problems = check::check(&config, &context.root, Purpose::Check);
    if keeps_from_running(&problems, || known_problems(&text, &file, &context.root)) {
        return Err(CliError::NotRunnable { file, problems });
    }
    let effects = settings.iter().map(effect).collect::<Result<Vec<_>, _>>().map_err(wrong)?;
    replace(&file, &edited).map_err(unusable)?;
    let effects = effects.into_iter().zip(is_changed).map(|(effect, is_changed)| is_changed.then_some(effect));
    let told: Vec<_> = settings.iter().zip(effects).collect();
    tell(context, &config, &told, &problems)?;
    Ok(Exit::Done)
}

/// Whether a change keeps the machine from running: for good, or by something that is missing and is not `known` to be. What only its
/// surroundings lack for now, such as memory, does not count.
fn keeps_from_running(problems: &[Problem], known: impl FnOnce() -> Option<Vec<Problem>>) -> bool {
    if problems.iter().any(|problem| problem.is_error() && !problem.may_pass) {
        return true;
    }
    let missing: Vec<_> = problems.iter().filter(|problem| problem.is_error() && problem.is_missing).collect();
    !missing.is_empty() && known().is_some_and(|known| missing.iter().any(|problem| !known.contains(problem)))
}

/// Problems of the unchanged file. None if it is wrong: then it is being corrected.
fn known_problems(text: &str, file: &Path, root: &RuntimeRoot) -> Option<Vec<Problem>> {
    let config = Config::parse(text, file, root).ok()?;
    Some(check::check(&config, root, Purpose::Check))
}

/// The text with these settings, and for each whether it has changed the text.
fn edit_all(mut text: String, settings: &[Setting]) -> Result<(String, Vec<bool>), Vec<Problem>> {
    let mut is_changed = Vec::new();
    for setting in settings {
        let edited = edit(&text, setting)?;
        is_changed.push(edited != text);
        text = edited;
    }
    Ok((text, is_changed))
}

/// When the setting takes effect.
fn effect(setting: &Setting) -> Result<Effect, Vec<Problem>> {
    let unknown = || vec![Problem::error(&setting.key, "no such key", "see docs/config.md")];
    setting.effect().ok_or_else(unknown)
}

/// The file of a machine in its home, or of one that runs.
fn file_of(context: &Context<'_>, name: &str) -> Result<PathBuf, CliError> {
    let home = super::home(name)?;
    // A link must lead to the changed file afterwards, too.
    if let Ok(file) = fs::canonicalize(home.file()) {
        return Ok(file);
    }
    let running = context.client(name).config().ok();
    let file = running.and_then(|config| Some(PathBuf::from(config.get("file")?.as_str()?)));
    file.ok_or_else(|| super::no_machine(&home))
}

fn must_be_this_machine(name: &str, config: &Config) -> Result<(), CliError> {
    let refuse = |what: &str| Err(CliError::Machine { name: name.to_owned(), what: what.to_owned() });
    match config.owner {
        _ if config.name != name => refuse("cannot be renamed: its files and sockets have its name"),
        Owner::Libvirt => refuse("is a domain of libvirt: edit its file, and run `hearth attach` again"),
        Owner::Hearth => Ok(()),
    }
}

/// The new file has the old one's owner, group and mode.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    let old = fs::metadata(file)?;
    replace_file(file, Durability::PowerCut, |fresh| {
        fresh.write_all(text.as_bytes())?;
        let new = fresh.metadata()?;
        if (new.uid(), new.gid()) != (old.uid(), old.gid()) {
            let kept = fchown(&*fresh, Some(old.uid()), Some(old.gid()));
            kept.map_err(|error| io::Error::other(format!("its owner and group cannot be kept: {error}")))?;
        }
        fresh.set_permissions(old.permissions())
    })
}

/// `effects`: None for a setting that changed nothing.
fn tell(
    context: &mut Context<'_>,
    config: &Config,
    effects: &[(&Setting, Option<Effect>)],
    problems: &[Problem],
) -> Result<(), CliError> {
    let name = &config.name;
    if context.json {
        let change =
            |setting: &Setting, effect: Effect| Change { key: setting.key.clone(), takes_effect: effect.words() };
        let changes =
            effects.iter().filter_map(|(setting, effect)| effect.map(|effect| change(setting, effect))).collect();
        return context.write_json(&Report { name, file: &config.file, changes, problems });
    }
    let runs = life::has_keeper(&config.folders.runtime);
    // That it runs is said with each key.
    for problem in problems.iter().filter(|problem| problem.subject != *name) {
        context.write_line(&problem.to_string())?;
    }
    for (setting, effect) in effects {
        let line = match effect {
            None => setting.words_if_unchanged(),
            Some(effect) if runs => format!("{}: {}", setting.words(), while_running(name, *effect)),
            Some(_) => format!("{}: takes effect at its next start", setting.words()),
        };
        context.write_line(&line)?;
    }
    Ok(())
}

/// When a change takes effect in a machine that runs, and how to have it now.
fn while_running(name: &str, effect: Effect) -> String {
    let words = effect.words();
    match effect {
        Effect::AtTakeOver => format!("waits for the {words}: `hearth upgrade-keeper {name}`"),
        Effect::WithNextGuest => {
            format!("waits for the {words}: `hearth upgrade-keeper {name} && hearth reboot {name}`")
        }
        Effect::WithNextStart => format!("waits for the {words}: stop and start the machine"),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown};

    use super::*;

    #[test]
    fn file_keeps_its_mode_owner_and_group() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web.toml");
        fs::write(&file, "cpus = 1\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        let own = fs::metadata(&file).unwrap();
        // Only root can give a file away.
        let ids = if own.uid() == 0 { (65534, 100) } else { (own.uid(), own.gid()) };
        chown(&file, Some(ids.0), Some(ids.1)).unwrap();
        replace(&file, "cpus = 2\n").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "cpus = 2\n");
        let after = fs::metadata(&file).unwrap();
        assert_eq!((after.permissions().mode() & 0o777, after.uid(), after.gid()), (0o640, ids.0, ids.1));
    }

    #[test]
    fn new_problem_is_refused_and_known_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (file, root) = (folder.path().join("web.toml"), RuntimeRoot::new(folder.path().join("run")));
        fs::write(folder.path().join("vmlinuz"), [&[0; 0x202], &b"HdrS"[..]].concat()).unwrap();
        let text = |kernel: &str, qemu: &str| {
            let keys = format!("name = \"web\"\nmemory = \"32MiB\"\nqemu = \"{qemu}\"\n");
            format!("{keys}memory_folder = \"/dev/shm/hearth-set-test\"\n[boot]\nkernel = \"{kernel}\"\n")
        };
        let is_refused = |before: &str, after: &str| {
            let problems = known_problems(after, &file, &root).unwrap();
            assert!(problems.iter().all(|problem| !problem.is_error() || problem.may_pass), "{problems:?}");
            keeps_from_running(&problems, || known_problems(before, &file, &root))
        };
        let none = text("vmlinuz", "/nowhere/qemu");
        assert!(is_refused(&none, &text("vmlinuz", "/nowhere/kvm")), "another one is missing now");
        assert!(is_refused(&none, &text("/nowhere/vmlinuz", "/nowhere/qemu")));
        assert!(!is_refused(&none, &none.replace("32MiB", "64MiB")), "it could not run before");
        assert!(!is_refused(&none.replace("memory", "memori"), &none), "the file is corrected");
    }

    #[test]
    fn settings_that_change_nothing_are_known() {
        let settings = ["memory=", "cpus=2", "cpus=", "cpus="].map(|text| Setting::parse(text).unwrap());
        let (text, is_changed) = edit_all("name = \"web\"\ncpus = 2\n".to_owned(), &settings).unwrap();
        assert_eq!((&*text, &*is_changed), ("name = \"web\"\n", &[false, false, true, false][..]));
        assert_eq!(settings[0].words_if_unchanged(), "memory has its default already");
        assert_eq!(settings[1].words_if_unchanged(), "cpus is 2 already");
    }

    #[test]
    fn each_effect_has_its_command() {
        let commands = [Effect::AtTakeOver, Effect::WithNextGuest, Effect::WithNextStart];
        let words = commands.map(|effect| while_running("web", effect));
        assert!(words[0].ends_with("next keeper: `hearth upgrade-keeper web`"), "{words:?}");
        assert!(words[1].ends_with("next guest: `hearth upgrade-keeper web && hearth reboot web`"), "{words:?}");
        assert!(words[2].ends_with("next start: stop and start the machine"), "{words:?}");
    }
}
