//! A host on which Hearth has no machine yet, for commands as an operator types them: folders of its own in place of `/etc/hearth`,
//! `/var/lib/hearth`, `/run/hearth` and `/dev/shm`, a home, and `hearth` on the path. systemd does not run there.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::artifacts;
use crate::console::Line;
use crate::error::{Error, Result, at};
use crate::guest::{Drives, Guest, Output};
use crate::slots::{self, Slot};

/// Folders of Hearth that this host has for itself.
const PRIVATE: [&str; 3] = ["/etc/hearth", "/var/lib/hearth", "/run/hearth"];

/// Everything that runs there ends when this is dropped.
pub struct FreshHost {
    folder: TempDir,
    /// The first process of the namespaces.
    inside: Child,
    /// The console of the machine `web`.
    guest: Guest,
    _slot: Slot,
}

impl FreshHost {
    /// Without root it prints a message and returns `None`.
    pub fn make() -> Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can give a command folders of its own in /etc");
            return Ok(None);
        }
        let slot = slots::take();
        let parent = std::env::temp_dir();
        let folder = at("create a folder in", &parent, tempfile::Builder::new().prefix("hearth-fresh-").tempdir())?;
        let mut script = "set -e\nmount -t tmpfs -o mode=1777 tmpfs /dev/shm\n\
                          [ ! -d /run/systemd ] || mount -t tmpfs tmpfs /run/systemd\n"
            .to_owned();
        for path in PRIVATE {
            let own = folder.path().join(path.trim_start_matches('/'));
            at("create", Path::new(path), std::fs::create_dir_all(path))?;
            at("create", &own, std::fs::create_dir_all(&own))?;
            script += &format!("mount --bind {} {path}\n", own.display());
        }
        script += &format!("touch {}/ready\nwhile :; do sleep 1000; done\n", folder.path().display());
        let home = folder.path().join("home");
        at("create", &home, std::fs::create_dir_all(home.join("bin")))?;
        at("link", &home, std::os::unix::fs::symlink(artifacts::hearth()?, home.join("bin/hearth")))?;
        let guest = Guest::open("web", Line::Call(folder.path().join("run/hearth/web/console.sock")))?;
        let unshare = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"];
        let started = Command::new("unshare").args(unshare).args(["sh", "-c", &script]).spawn();
        let inside = started.map_err(|source| Error::Start { program: "unshare".into(), source })?;
        let host = Self { folder, inside, guest, _slot: slot };
        host.wait_console("its folders", crate::patience(10), |_| {
            host.folder.path().join("ready").exists().then_some(())
        })?;
        Ok(Some(host))
    }

    /// The operator's home, in which commands run.
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("home")
    }

    /// Where a path of this host that begins as one of its own folders is seen from outside.
    pub fn folder(&self, path: &str) -> PathBuf {
        self.folder.path().join(path.trim_start_matches('/'))
    }

    /// Runs a line of shell. Returns its standard output, followed by its standard error.
    pub fn shell(&self, line: &str) -> Result<Output> {
        let output = self.command(line).output();
        let output = output.map_err(|source| Error::Start { program: "nsenter".into(), source })?;
        let bytes = [output.stdout, output.stderr].concat();
        Ok(Output { status: output.status.code().unwrap_or(-1), bytes })
    }

    /// Runs a line of shell that must succeed. Returns what it printed.
    pub fn must(&self, line: &str) -> Result<String> {
        let output = self.shell(line)?;
        assert_eq!(output.status, 0, "{line}: {}", output.text());
        Ok(output.text())
    }

    /// Starts a line of shell, whose output goes to a file in the home.
    pub fn start(&self, line: &str, output: &str) -> Result<()> {
        let started = self.command(&format!("exec {line} >{output} 2>&1")).spawn();
        started.map(drop).map_err(|source| Error::Start { program: "nsenter".into(), source })
    }

    fn command(&self, line: &str) -> Command {
        let pid = self.inside.id();
        let mut command = Command::new("nsenter");
        command.args([format!("--mount=/proc/{pid}/ns/mnt"), format!("--pid=/proc/{pid}/ns/pid_for_children")]);
        command.arg(format!("--wd={}", self.home().display())).args(["--", "bash", "-c", line]);
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("HOME", self.home()).env("PATH", format!("{}/bin:{path}", self.home().display()));
        command.env_remove("HEARTH_RUNTIME_ROOT").env("LC_ALL", "C").stdin(Stdio::null());
        command
    }
}

impl Drives for FreshHost {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn check_alive(&self, _: &str) -> Result<()> {
        Ok(())
    }
}

impl Drop for FreshHost {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- console\n{}", self.guest.console_tail());
        }
        let _ = self.inside.kill();
        let _ = self.inside.wait();
    }
}
