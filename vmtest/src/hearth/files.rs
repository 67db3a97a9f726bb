//! The folders of one machine under test: images and configuration, runtime root, memory, logs.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hearth_api::EventRecord;
use tempfile::TempDir;

use crate::artifacts;
use crate::error::{Error, Result, at};
use crate::guest::Output;
use crate::processes;

/// Number of lines of each log that a failed test shows.
const LINES_SHOWN: usize = 80;

pub struct Files {
    folder: TempDir,
    /// `None` for a restored machine, whose memory folder is beside that of the saved machine.
    _memory: Option<TempDir>,
    memory_folder: PathBuf,
    config: PathBuf,
    runtime_root: PathBuf,
    has_own_root: bool,
}

impl Files {
    /// Makes the folders. Without a `runtime_root` the machine gets one of its own, on a tmpfs as `/run` is: on ext4 each write of
    /// the journal may wait for the disk.
    pub fn make(name: &str, runtime_root: Option<PathBuf>) -> Result<Self> {
        let make = |parent: &Path| {
            let made = tempfile::Builder::new().prefix(&format!("hearth-{name}-")).tempdir_in(parent);
            at("create a folder in", parent, made)
        };
        let (folder, memory) = (make(&std::env::temp_dir())?, make(Path::new("/dev/shm"))?);
        let has_own_root = runtime_root.is_none();
        let runtime_root = runtime_root.unwrap_or_else(|| memory.path().join("run"));
        let (config, memory_folder) = (folder.path().join("machine.toml"), memory.path().join(name));
        Self { config, folder, _memory: Some(memory), memory_folder, runtime_root, has_own_root }.with_root()
    }

    /// Makes the folders of a machine that `hearth restore` makes in one of them.
    pub fn make_restored(name: &str, runtime_root: Option<PathBuf>) -> Result<Self> {
        let files = Self::make(name, runtime_root)?;
        Ok(Self { config: files.folder().join("machine/machine.toml"), ..files })
    }

    /// Makes the folders of a machine that is restored from a snapshot of the machine with the files `saved`.
    pub fn make_beside(name: &str, saved: &Self) -> Result<Self> {
        let parent = std::env::temp_dir();
        let made = tempfile::Builder::new().prefix(&format!("hearth-{name}-")).tempdir_in(&parent);
        let folder = at("create a folder in", &parent, made)?;
        let (config, memory_folder) =
            (folder.path().join("machine/machine.toml"), saved.memory_folder.with_file_name(name));
        let runtime_root = saved.memory_folder.with_file_name(format!("run-{name}"));
        Self { config, folder, _memory: None, memory_folder, runtime_root, has_own_root: true }.with_root()
    }

    fn with_root(self) -> Result<Self> {
        let root = self.runtime_root();
        at("create", &root, fs::create_dir_all(&root))?;
        Ok(self)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn memory_folder(&self) -> &Path {
        &self.memory_folder
    }

    /// The machine's own runtime root, unless it was put beside another machine. Machines of the same name in two tests are
    /// apart.
    pub fn runtime_root(&self) -> PathBuf {
        self.runtime_root.clone()
    }

    pub fn has_own_root(&self) -> bool {
        self.has_own_root
    }

    pub fn console_socket(&self, name: &str) -> PathBuf {
        self.runtime_root().join(name).join("console.sock")
    }

    pub fn api_socket(&self, name: &str) -> PathBuf {
        self.runtime_root().join(name).join("api.sock")
    }

    /// The folder for dumps, which the keeper makes when it writes the first one.
    pub fn dump_folder(&self) -> PathBuf {
        self.folder().join("dumps")
    }

    /// `machine.toml`.
    pub fn config(&self) -> &Path {
        &self.config
    }

    pub fn write_config(&self, config: &toml::Table) -> Result<()> {
        at("write", self.config(), fs::write(self.config(), config.to_string()))
    }

    /// Files for a keeper's standard output and standard error. They are appended to, since a machine may have several keepers.
    pub fn keeper_output(&self) -> Result<(File, File)> {
        let path = self.folder().join("keeper.log");
        let file = at("open", &path, OpenOptions::new().create(true).append(true).open(&path))?;
        let other = at("open", &path, file.try_clone())?;
        Ok((file, other))
    }

    pub fn keeper_log(&self) -> String {
        fs::read_to_string(self.folder().join("keeper.log")).unwrap_or_default()
    }

    /// Runs a `hearth` command with this runtime root.
    pub fn cli(&self, arguments: &[&str]) -> Result<Output> {
        cli(&self.runtime_root, arguments)
    }

    pub fn end_processes(&self) {
        let own_root = self.has_own_root.then_some(&*self.runtime_root);
        for folder in [self.folder(), self.memory_folder()].into_iter().chain(own_root) {
            processes::end_all(folder);
        }
    }

    /// Prints the logs that help to understand a failure in CI.
    pub fn print_logs(&self, name: &str, console: &str, events: &[EventRecord]) {
        eprintln!("--- {name}: console\n{console}");
        eprintln!("--- {name}: events");
        events.iter().rev().take(LINES_SHOWN).rev().for_each(|event| eprintln!("{event:?}"));
        eprintln!("--- {name}: keeper\n{}", last_lines(&self.keeper_log()));
        let status = self.cli(&["--json", "status", name]).map_or_else(|error| error.to_string(), |said| said.text());
        eprintln!("--- {name}: status\n{status}");
        let runtime = fs::read_dir(self.runtime_root().join(name)).into_iter().flatten().flatten();
        let logs = runtime.map(|entry| entry.path()).filter(|path| path.extension().is_some_and(|end| end == "log"));
        for log in logs {
            eprintln!("--- {}\n{}", log.display(), last_lines(&fs::read_to_string(&log).unwrap_or_default()));
        }
    }
}

/// Runs any `hearth` command. Returns its standard output, followed by its standard error.
pub fn cli(runtime_root: &Path, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new(artifacts::hearth()?);
    command.args(arguments).env("HEARTH_RUNTIME_ROOT", runtime_root).stdin(Stdio::null());
    let output = command.output().map_err(|source| Error::Start { program: "hearth".into(), source })?;
    let bytes = [output.stdout, output.stderr].concat();
    // A command that was ended by a signal has no status; no command returns -1.
    Ok(Output { status: output.status.code().unwrap_or(-1), bytes })
}

fn last_lines(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES_SHOWN)..].join("\n")
}
