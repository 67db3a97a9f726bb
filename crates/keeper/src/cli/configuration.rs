//! `check`, `config`, and what `run` does before it runs.

use std::path::Path;

use hearth_api::{PendingChange, PendingUntil};
use hearth_recovery::lazy_restore::Mode;
use serde_json::Value;

use super::{CliError, Context, Exit};
use crate::check::{self, Purpose, life};
use crate::config::{Config, Configured, InForce, is_name};
use crate::failure;
use crate::folders::Folders;
use crate::in_force::{in_force, kept_machine_type};
use crate::machine::could_take_over;
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;
use crate::upgrade::TakeOverAnswer;

/// The checked configuration, also for a running guest, and the machine's locked folders. The error lists everything that
/// keeps the machine from running.
pub fn for_run(file: &Path, root: &RuntimeRoot) -> Result<(InForce, Folders), CliError> {
    let configured = match Configured::load(file, root) {
        Ok(today) => in_force(today, root),
        Err(problems) => without_file(file, root, &problems).ok_or(problems),
    };
    let (in_force, folders) = must_run(configured.map_err(|problems| wrong(file, root, problems))?, file, root)?;
    if !in_force.pending.is_empty() {
        let keys: Vec<_> = in_force.pending.iter().map(|change| change.key.as_str()).collect();
        tracing::warn!(keys = keys.join(", "), "changed in the file, but not in effect while the current guest lives");
    }
    Ok((in_force, folders))
}

/// Records that the machine of this file could not be run, with the error as text. Without a file there is no machine.
pub fn record_failure(file: &Path, root: &RuntimeRoot, why: &str) {
    let (name, runtime) = match Config::load(file, root) {
        Ok(config) => (config.name, config.folders.runtime),
        Err(_) => {
            let name = probable_name(file);
            let runtime = root.machine(&name);
            (name, runtime)
        }
    };
    if !is_name(&name) || !file.exists() {
        return;
    }
    match root.enter(&name, &runtime) {
        Ok(()) => failure::record(&name, &runtime, why),
        Err(error) => tracing::warn!(name, %error, "cannot record why the machine does not run"),
    }
}

/// A running guest keeps the configuration that it was started with. A file that cannot be understood must not keep a
/// keeper from taking the guest over, so the whole file waits for the next start.
fn without_file(file: &Path, root: &RuntimeRoot, problems: &[Problem]) -> Option<InForce> {
    let name = probable_name(file);
    let started_with = life::living_guest(&root.machine(&name))?.started_with?;
    let now = Configured::of_journal(&started_with, &std::path::absolute(file).ok()?, root).ok()?;
    let key = file.file_name()?.to_string_lossy().into_owned();
    let pending = vec![PendingChange { key, until: PendingUntil::NextStart }];
    let problems: Vec<_> = problems.iter().map(ToString::to_string).collect();
    let misread = format!(
        "cannot understand {}; the guest and its reboots keep the configuration that they started with, until you \
         correct the file and restart the keeper: {}",
        file.display(),
        problems.join("; ")
    );
    (now.config.name == name).then_some(InForce { pending, misread: Some(misread), ..now.into() })
}

/// The checked configuration of a file that was just created, for a guest that does not run yet, and the machine's locked
/// folders.
pub fn for_new(file: &Path, root: &RuntimeRoot) -> Result<(InForce, Folders), CliError> {
    let configured = Configured::load(file, root).map_err(|problems| wrong(file, root, problems))?;
    let must_be_free = |config: &Config| match check::guest_in_the_way(config, root) {
        Some(problem) => Err(CliError::Unready { file: file.to_owned(), problems: vec![problem] }),
        None => Ok(()),
    };
    if !life::has_keeper(&configured.config.folders.runtime) {
        must_be_free(&configured.config)?;
    }
    let (in_force, folders) = must_run(configured.into(), file, root)?;
    // Another keeper may have come and died during the check. It cannot while this one has the lock.
    must_be_free(&in_force.now.config)?;
    Ok((in_force, folders))
}

/// Refuses a machine to be made with this configuration `text` whose memory folder does not allow the restore.
pub fn must_allow_restore(text: &str, file: &Path, mode: Mode, root: &RuntimeRoot) -> Result<(), CliError> {
    let file = file.to_owned();
    match Config::parse(text, &file, root) {
        Ok(config) => match check::no_restore(&config, mode) {
            Some(problem) => Err(CliError::Unready { file, problems: vec![problem] }),
            None => Ok(()),
        },
        Err(problems) => Err(CliError::Configuration { file, problems }),
    }
}

fn must_run(in_force: InForce, file: &Path, root: &RuntimeRoot) -> Result<(InForce, Folders), CliError> {
    let config = &in_force.now.config;
    let (problems, qemu) = check::check_and_find_qemu(config, root, Purpose::Run);
    match (Exit::of(&problems), life::living_qemu(&config.folders.runtime)) {
        (Exit::Done, _) => {}
        // As in `wrong`: a service manager must not give up while the guest lives.
        (Exit::Wrong, Some(qemu)) => {
            return Err(CliError::CannotTakeOver { file: file.to_owned(), qemu_pid: qemu.pid, problems });
        }
        _ => return Err(CliError::Unready { file: file.to_owned(), problems }),
    }
    for problem in problems {
        tracing::warn!("{}: {}; {}", problem.subject, problem.message, problem.hint);
    }
    root.enter(&config.name, &config.folders.runtime)
        .map_err(|source| CliError::File { path: root.machine(&config.name), source })?;
    let folders = Folders::prepare(&config.name, &config.folders.runtime, &config.folders.memory)?;
    Ok((InForce { qemu, ..in_force }, folders))
}

/// The error for a wrong file. A service manager gives up on the exit code for a wrong file, and must not while the
/// guest lives.
fn wrong(file: &Path, root: &RuntimeRoot, problems: Vec<Problem>) -> CliError {
    let file = file.to_owned();
    match life::living_qemu(&root.machine(&probable_name(&file))) {
        Some(qemu) => CliError::CannotTakeOver { file, qemu_pid: qemu.pid, problems },
        None => CliError::Configuration { file, problems },
    }
}

/// The machine's name in a file that may be unparsable, or the file's own name.
fn probable_name(file: &Path) -> String {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    let named = text.lines().map_while(|line| (!line.trim_start().starts_with('[')).then_some(line)).find_map(|line| {
        let value = line.trim_start().strip_prefix("name")?.trim_start().strip_prefix('=')?.trim_start();
        Some(value.strip_prefix(['"', '\''])?.split(['"', '\'']).next()?.to_owned())
    });
    named.unwrap_or_else(|| file.file_stem().unwrap_or_default().to_string_lossy().into_owned())
}

pub fn check(context: &mut Context<'_>, file: &Path) -> Result<Exit, CliError> {
    let problems = match Config::load(file, &context.root) {
        Ok(mut config) => {
            config.guest.machine_type =
                config.guest.machine_type.take().or_else(|| kept_machine_type(&config, &context.root));
            check::check(&config, &context.root, Purpose::Check)
        }
        Err(problems) => problems,
    };
    let errors = problems.iter().filter(|problem| problem.is_error()).count();
    if context.json {
        context.write_json(&problems)?;
    } else {
        for problem in &problems {
            context.write_line(&problem.to_string())?;
        }
        context.write_line(&verdict(file, errors, problems.len() - errors))?;
    }
    Ok(Exit::of(&problems))
}

/// Whether this program could take over the machine, as far as can be known beforehand.
pub fn check_take_over(context: &mut Context<'_>, file: &Path) -> Result<Exit, CliError> {
    let wrong = |problems| CliError::Configuration { file: file.to_owned(), problems };
    let today = Configured::load(file, &context.root);
    let config = today.and_then(|today| in_force(today, &context.root)).map_err(wrong)?.now.config;
    let mut problems = check::check(&config, &context.root, Purpose::TakeOver);
    problems.retain(Problem::is_error);
    if !problems.is_empty() {
        return Err(CliError::Unready { file: file.to_owned(), problems });
    }
    if !could_take_over(&config).map_err(CliError::TakeOver)? {
        return Err(context.not_running(&config.name));
    }
    let answer = TakeOverAnswer { machine: config.name, version: env!("CARGO_PKG_VERSION").to_owned() };
    if context.json {
        context.write_json(&answer)?;
    } else {
        context.write_line(&format!("{}: hearth {} can take it over", answer.machine, answer.version))?;
    }
    Ok(Exit::Done)
}

fn verdict(file: &Path, errors: usize, warnings: usize) -> String {
    let count = |number, what| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    let file = file.display();
    match (errors, warnings) {
        (0, 0) => format!("{file}: the machine can run"),
        (0, _) => format!("{file}: the machine can run, with {}", count(warnings, "warning")),
        (_, 0) => format!("{file}: the machine cannot run: {}", count(errors, "error")),
        _ => format!("{file}: the machine cannot run: {}, {}", count(errors, "error"), count(warnings, "warning")),
    }
}

/// The configuration of a file, or of a running machine.
pub fn show(context: &mut Context<'_>, of: &str) -> Result<Exit, CliError> {
    let value = if of.contains('/') || of.ends_with(".toml") {
        let file = Path::new(of);
        let config = Config::load(file, &context.root)
            .map_err(|problems| CliError::Configuration { file: file.to_owned(), problems })?;
        serde_json::to_value(config).expect("a configuration is plain data with text keys")
    } else {
        context.ask(of, |client| client.config())?
    };
    if context.json {
        context.write_json(&value)?;
    } else {
        let text = toml::to_string(&without_nulls(value)).expect("JSON without nulls has a form in TOML");
        context.write_line(text.trim_end())?;
    }
    Ok(Exit::Done)
}

/// TOML has no null.
fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .into_iter()
            .filter(|(_, value)| !value.is_null())
            .map(|(key, value)| (key, without_nulls(value)))
            .collect(),
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}
