//! `start`, `enable` and `disable`: a machine as a unit of systemd, of the system for root and of the user for others.
//!
//! machine -> checked -> `systemctl [--user] VERB hearth@NAME.service`
//!
//! `stop` is not among these: it asks the machine's keeper, whoever started that. The unit ends with the keeper. Only of a machine that
//! has failed there is none to ask, and a unit that tries again is stopped.
//!
//! The system's unit allows no namespaces. The unit of a machine with passt, which needs some, has a drop-in.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::text::shown;
use super::{CliError, Context, Exit};
use crate::check::{self, Purpose, life};
use crate::config::{Config, NetBackend};
use crate::home::Home;
use crate::problem::Problem;

/// Exists where systemd manages the system.
const BOOTED: &str = "/run/systemd/system";
/// The administrator's units and drop-ins.
const UNITS: &str = "/etc/systemd/system";
/// The drop-in of a machine with passt.
const PASST: &str = include_str!("../../../../packaging/passt.conf");
/// Lines of systemctl that an error shows.
const LINES_SHOWN: usize = 3;
/// What systemctl prints of a unit without a file: how that begins, and how it ends.
const NO_STATE: &str = "Failed to get unit file state for ";
const NO_FILE: &str = "No such file or directory";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Start,
    Enable,
    Disable,
}

impl Verb {
    fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Enable => "enable",
            Self::Disable => "disable",
        }
    }
}

/// Whether systemd manages this system.
pub fn is_there() -> bool {
    Path::new(BOOTED).is_dir()
}

/// The manager of this user's units.
pub struct Manager {
    is_users: bool,
    systemctl: PathBuf,
    loginctl: PathBuf,
    units: PathBuf,
}

impl Manager {
    pub fn of_this_user() -> Self {
        let is_users = !rustix::process::geteuid().is_root();
        Self { is_users, systemctl: "systemctl".into(), loginctl: "loginctl".into(), units: UNITS.into() }
    }

    fn systemctl(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.systemctl);
        command.args(self.is_users.then_some("--user")).args(words).env("LC_ALL", "C");
        command
    }

    fn output(&self, command: &mut Command) -> Result<Output, CliError> {
        command.output().map_err(|source| CliError::File { path: self.systemctl.clone(), source })
    }

    fn must(&self, verb: &str, home: &Home) -> Result<(), CliError> {
        let output = self.output(self.systemctl(&["--quiet", verb]).arg(unit(home)))?;
        if output.status.success() {
            return Ok(());
        }
        let what = self.explained(verb, home, &String::from_utf8_lossy(&output.stderr));
        Err(CliError::Machine { name: home.name().to_owned(), what })
    }

    /// Why systemctl failed, from what it printed, and what to do.
    fn explained(&self, verb: &str, home: &Home, said: &str) -> String {
        let lines: Vec<_> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let last = lines[lines.len().saturating_sub(LINES_SHOWN)..].join(" ");
        let foreground = foreground(home);
        if self.is_users && said.contains("Failed to connect") {
            let or = if verb == Verb::Start.name() { format!(", or {foreground}") } else { String::new() };
            return format!(
                "cannot reach your systemd ({last}): log in by ssh or at the console instead of with su or sudo{or}"
            );
        }
        if said.contains("not found") || said.contains("does not exist") {
            return format!(
                "systemd does not know the unit hearth@.service ({last}): install it as docs/first-machine.md says, or \
                 {foreground}"
            );
        }
        let user = if self.is_users { "--user " } else { "" };
        format!("systemctl {verb} failed: {last} `journalctl {user}-u {}` shows more", unit(home))
    }

    /// Whether this manager runs without a session of its user, and from the host's start on.
    fn stays(&self) -> bool {
        let user = rustix::process::getuid().as_raw().to_string();
        let asked = || Command::new(&self.loginctl).args(["show-user", &user, "--property=Linger", "--value"]).output();
        !self.is_users || asked().is_ok_and(|output| output.stdout.trim_ascii() == b"yes")
    }

    /// Has the machine no longer start with the host, if it did, and removes its drop-in.
    pub fn forget(&self, home: &Home) -> Result<(), CliError> {
        if self.is_enabled(home)? {
            self.must(Verb::Disable.name(), home)?;
        }
        self.allow_passt(false, home)
    }

    /// Has systemd no longer try to start a machine that fails. A manager that cannot be reached tries nothing.
    pub fn give_up(&self, home: &Home) -> Result<(), CliError> {
        let asked = self.output(self.systemctl(&["show", "--property=ActiveState", "--value"]).arg(unit(home)))?;
        match asked.stdout.trim_ascii() {
            b"activating" => self.must("stop", home),
            _ => Ok(()),
        }
    }

    /// Allows passt to what the machine's unit starts from now on, or no longer. A user's unit allows it in any case.
    fn allow_passt(&self, is_wanted: bool, home: &Home) -> Result<(), CliError> {
        let folder = self.units.join(format!("{}.d", unit(home)));
        let file = folder.join("passt.conf");
        let wanted = is_wanted.then_some(PASST);
        if self.is_users || fs::read_to_string(&file).ok().as_deref() == wanted {
            return Ok(());
        }
        let done = match wanted {
            Some(text) => fs::create_dir_all(&folder).and_then(|()| fs::write(&file, text)),
            // The folder may have drop-ins of others.
            None => fs::remove_file(&file).map(|()| drop(fs::remove_dir(&folder))),
        };
        done.map_err(|source| CliError::File { path: file, source })?;
        // Without it systemd reads the file when it starts the unit for the first time.
        self.output(&mut self.systemctl(&["daemon-reload"])).map(drop)
    }

    /// systemctl reads the units' files by itself, so this works also without a session (su, sudo).
    fn is_enabled(&self, home: &Home) -> Result<bool, CliError> {
        let output = self.output(self.systemctl(&["is-enabled"]).arg(unit(home)).env("SYSTEMD_OFFLINE", "1"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        // It prints the unit's state, such as `disabled`. systemd 252 prints no `not-found`.
        let has_no_file = said.lines().any(|line| line.starts_with(NO_STATE) && line.ends_with(NO_FILE));
        if output.status.success() || !output.stdout.trim_ascii().is_empty() || has_no_file {
            return Ok(output.status.success());
        }
        let what = self.explained("is-enabled", home, &said);
        Err(CliError::Machine { name: home.name().to_owned(), what })
    }
}

fn unit(home: &Home) -> String {
    // Systemctl takes a name that ends as a unit's does (`web.service`) as complete.
    format!("hearth@{}.service", home.name())
}

fn foreground(home: &Home) -> String {
    format!("run it in the foreground: hearth run {}", home.file().display())
}

pub fn perform(context: &mut Context<'_>, verb: Verb, name: &str) -> Result<Exit, CliError> {
    let home = super::existing_home(name)?;
    let name = name.to_owned();
    let is_done = verb == Verb::Start && life::has_keeper(&context.root.machine(&name));
    if !is_done && !is_there() {
        return Err(CliError::Machine { name, what: format!("systemd does not run here; {}", foreground(&home)) });
    }
    apply(context, &Manager::of_this_user(), verb, &home)
}

fn apply(context: &mut Context<'_>, manager: &Manager, verb: Verb, home: &Home) -> Result<Exit, CliError> {
    let name = home.name();
    let runs = life::has_keeper(&context.root.machine(name));
    let line = match verb {
        Verb::Start if runs => format!("{name} runs already"),
        Verb::Start => {
            let config = must_run(context, home)?;
            manager.allow_passt(has_passt(&config), home)?;
            manager.must("start", home)?;
            if !manager.stays() {
                eprintln!("note: {name} ends with your last session; `loginctl enable-linger` lets it stay");
            }
            format!("{name} runs; `hearth console {name}` connects to it")
        }
        Verb::Enable if !manager.stays() => {
            let what = "would start when you log in and end with your last session, because your user does not linger: \
                        `loginctl enable-linger`, then try again";
            return Err(CliError::Machine { name: name.to_owned(), what: what.to_owned() });
        }
        Verb::Enable => {
            // What is wrong in the file is told when the machine starts.
            if let Ok(config) = Config::load(&home.file(), &context.root) {
                manager.allow_passt(has_passt(&config), home)?;
            }
            manager.must("enable", home)?;
            let now = if runs { String::new() } else { format!("; to start it now: `hearth start {name}`") };
            format!("{name} starts with the host from now on{now}")
        }
        Verb::Disable => {
            manager.must("disable", home)?;
            format!("{name} no longer starts with the host{}", if runs { "; it still runs" } else { "" })
        }
    };
    context.write_done(name, &line)?;
    Ok(Exit::Done)
}

fn has_passt(config: &Config) -> bool {
    config.devices.nets.iter().any(|net| matches!(net.backend, NetBackend::Passt { .. }))
}

/// Refuses what the unit would refuse: its reasons would be in the journal only.
fn must_run(context: &Context<'_>, home: &Home) -> Result<Config, CliError> {
    let file = home.file();
    let config = Config::load(&file, &context.root)
        .map_err(|problems| CliError::Configuration { file: file.clone(), problems })?;
    let problems = check::check(&config, &context.root, Purpose::Check);
    if problems.iter().any(Problem::is_error) {
        return Err(CliError::Unready { file, problems });
    }
    problems.iter().for_each(|problem| eprintln!("{}", shown(&problem.to_string())));
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::order;
    use super::*;
    use crate::runtime_root::RuntimeRoot;
    use crate::{event_log, failure};

    /// A systemctl that is this script, and a loginctl that prints `linger`. Also returns the file with the words of each call of
    /// systemctl, and a machine's home in the folder of all this.
    fn manager(is_users: bool, linger: &str, script: &str) -> (PathBuf, Manager, Home, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let program = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let words = folder.path().join("words");
        let systemctl = program("systemctl", &format!("echo \"$@\" >>{}\n{script}", words.display()));
        let loginctl = program("loginctl", &format!("echo {linger}"));
        let manager = Manager { is_users, systemctl, loginctl, units: folder.path().join("units") };
        (words, manager, Home::in_folder("web", folder.path()), folder)
    }

    /// Performs a verb with such programs. Returns the words that systemctl got, and the output or error.
    fn check(verb: Verb, is_users: bool, linger: &str, script: &str) -> (String, Result<String, String>) {
        let (words, manager, home, folder) = manager(is_users, linger, script);
        let mut out = Vec::new();
        let root = RuntimeRoot::new(folder.path().join("run"));
        let done = apply(&mut Context { root, json: false, out: &mut out }, &manager, verb, &home);
        let said = done.map(|_| String::from_utf8(out).unwrap()).map_err(|error| error.to_string());
        (fs::read_to_string(words).unwrap_or_default().trim().to_owned(), said)
    }

    #[test]
    fn units_belong_to_the_system_or_to_the_user() {
        let (words, said) = check(Verb::Enable, false, "no", "exit 0");
        assert_eq!(words, "--quiet enable hearth@web.service");
        assert_eq!(said.unwrap(), "web starts with the host from now on; to start it now: `hearth start web`\n");
        let (words, said) = check(Verb::Disable, true, "no", "exit 0");
        assert_eq!(words, "--user --quiet disable hearth@web.service");
        assert_eq!(said.unwrap(), "web no longer starts with the host\n");
    }

    #[test]
    fn only_machines_with_passt_have_its_drop_in() {
        let (words, manager, home, folder) = manager(false, "no", "exit 0");
        let root = RuntimeRoot::new(folder.path().join("run"));
        let units = folder.path().join("units/hearth@web.service.d");
        let enable = |kind: &str, manager: &Manager| {
            let kernel = folder.path().join("vmlinuz");
            fs::write(&kernel, "").unwrap();
            let text = format!(
                "name = \"web\"\nmemory = \"256M\"\n[boot]\nkernel = \"{}\"\n[[nets]]\nkind = \"{kind}\"\n",
                kernel.display()
            );
            fs::create_dir_all(home.file().parent().unwrap()).unwrap();
            fs::write(home.file(), text).unwrap();
            apply(&mut Context { root: root.clone(), json: false, out: &mut Vec::new() }, manager, Verb::Enable, &home)
                .unwrap();
            let reloads = fs::read_to_string(&words).unwrap().matches("daemon-reload").count();
            (fs::read_to_string(units.join("passt.conf")).ok(), reloads)
        };
        assert_eq!(enable("user", &manager), (None, 0));
        for _ in 0..2 {
            assert_eq!(enable("passt", &manager), (Some(PASST.to_owned()), 1));
        }
        assert_eq!(enable("user", &manager), (None, 2));
        assert!(!units.exists());
        enable("passt", &manager);
        fs::write(units.join("own.conf"), "").unwrap();
        manager.forget(&home).unwrap();
        assert_eq!(fs::read_dir(&units).unwrap().count(), 1, "a drop-in of the administrator stays");
        let users = Manager { is_users: true, loginctl: "true".into(), ..manager };
        users.allow_passt(true, &home).unwrap();
        assert!(!units.join("passt.conf").exists());
    }

    #[test]
    fn enabled_unit_is_not_forgotten_without_its_manager() {
        let forget = |script: &str| {
            let (words, manager, home, _folder) = manager(true, "yes", script);
            let done = manager.forget(&home).map_err(|error| error.to_string());
            (fs::read_to_string(words).unwrap().lines().last().unwrap().to_owned(), done)
        };
        let [asks, disables] =
            ["is-enabled", "--quiet disable"].map(|verb| format!("--user {verb} hearth@web.service"));
        let unreachable =
            "[ \"$SYSTEMD_OFFLINE\" ] || { echo 'Failed to connect to bus: No such file or directory' >&2; exit 1; }";
        for no in [
            "echo disabled; exit 1",
            "echo not-found; exit 4",
            "echo 'Failed to get unit file state for hearth@web.service: No such file or directory' >&2; exit 1",
        ] {
            assert_eq!(forget(&format!("{unreachable}\n{no}")), (asks.clone(), Ok(())), "{no}");
        }
        assert_eq!(forget("echo enabled"), (disables.clone(), Ok(())));
        let (words, done) = forget(&format!("{unreachable}\necho enabled"));
        let said = done.unwrap_err();
        assert!(words == disables && said.contains("cannot reach your systemd (Failed to connect to bus: "), "{said}");
        assert!(forget("exit 1").1.unwrap_err().contains("systemctl is-enabled failed"));
    }

    #[test]
    fn stopped_machine_is_not_tried_again() {
        let check = |state: &str, expect: &[&str]| {
            let (words, manager, home, folder) = manager(false, "no", &format!("[ $1 != show ] || echo {state}"));
            let root = RuntimeRoot::new(folder.path().join("run"));
            let runtime = root.machine("web");
            failure::record("web", &runtime, "no such image");
            let error = CliError::NotRunning { name: "web".to_owned(), hint: String::new() };
            let mut context = Context { root, json: false, out: &mut Vec::new() };
            assert_eq!(order::stop_failed(&mut context, "web", 0, error, Some((manager, home))).unwrap(), Exit::Done);
            assert_eq!(event_log::last_failure(&runtime), None);
            assert_eq!(fs::read_to_string(words).unwrap().lines().collect::<Vec<_>>(), expect, "{state}");
        };
        let show = "show --property=ActiveState --value hearth@web.service";
        check("activating", &[show, "--quiet stop hearth@web.service"]);
        ["inactive", "failed"].into_iter().for_each(|state| check(state, &[show]));
    }

    #[test]
    fn user_must_linger_to_enable() {
        let (words, said) = check(Verb::Enable, true, "no", "exit 0");
        assert!(words.is_empty() && said.unwrap_err().contains("`loginctl enable-linger`"), "{words}");
        assert_eq!(check(Verb::Enable, true, "yes", "exit 0").0, "--user --quiet enable hearth@web.service");
    }

    #[test]
    fn errors_name_the_remedy() {
        let said = |is_users, said: &str| {
            let script = format!("echo '{said}' >&2; exit 1");
            check(Verb::Disable, is_users, "yes", &script).1.unwrap_err()
        };
        let missing = said(false, "Failed to disable unit: Unit file hearth@.service does not exist.");
        assert!(missing.contains("docs/first-machine.md") && missing.contains("hearth run "), "{missing}");
        let unreachable = said(true, "Failed to connect to bus: No medium found");
        assert!(unreachable.contains("cannot reach your systemd (Failed to connect to bus: No medium found)"));
        let other = said(true, "Job for hearth@web.service failed.");
        assert!(
            other.contains("failed: Job for hearth@web.service failed. `journalctl --user -u hearth@web.service`"),
            "{other}"
        );
    }
}
