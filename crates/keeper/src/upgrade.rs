//! Upgrade: the keeper switches to another program, in the same process and with the same QEMU running.
//!
//! ```text
//! ask the new program --> its disks disconnect --> exec --> the new keeper takes over, as from a dead one
//!   | it cannot                                     | it cannot be started, or ends before it has the machine
//!   v                                               v
//! nothing was changed                               exec of the old program, which takes over and reports why
//! ```
//! The process stays the same because whoever started the keeper (systemd, a shell) knows it by its process id. The new
//! keeper learns about the machine from the files that any take-over reads. The journal has a version; a program that
//! does not know it says so before the upgrade. The new program gets facts about the upgrade itself in its
//! environment: the old program, as an open descriptor, because most upgrades replace its file.
//!
//! If the new program dies after the take-over, that is an ordinary death of a keeper.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use hearth_qemu::bounded;
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::runtime_root::RuntimeRoot;

/// Environment variable with a `Word`.
const VARIABLE: &str = "HEARTH_UPGRADE";
/// How long the new program may take to answer. It reads two small files, which may take a second on a swapping host.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Suffix that Linux adds to the path of a replaced program.
const REPLACED: &str = " (deleted)";

/// A message from one program to the next one in the same process.
#[derive(Debug, Serialize, Deserialize)]
struct Word {
    /// The addressed process; its children inherit the variable too.
    pid: u32,
    what: What,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// If you cannot take over the machine, start this program again.
    TakeOver { program: RawFd, arguments: Vec<OsString> },
    /// The other program could not take over.
    GoOn { why: String },
}

/// The answer of a program that can take over a machine: `hearth check FILE --take-over --json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct TakeOverAnswer {
    pub machine: String,
    /// Version of Hearth.
    pub version: String,
}

#[derive(Debug, thiserror::Error)]
pub enum UpgradeError {
    #[error("program {program} does not exist")]
    Missing { program: PathBuf },
    #[error("cannot run {program}")]
    NotRunnable { program: PathBuf, source: io::Error },
    #[error("{program} cannot take over the machine: {why}")]
    Refuses { program: PathBuf, why: String },
    #[error("{program} is not hearth: it answers {said:?}")]
    NotHearth { program: PathBuf, said: String },
    #[error("cannot keep a copy of the keeper's own program")]
    OwnProgram(#[source] io::Error),
}

/// A program that has confirmed that it can take over the machine.
#[derive(Debug)]
pub struct Successor {
    pub program: PathBuf,
    pub version: String,
    arguments: Vec<OsString>,
    /// The running program.
    own: File,
}

impl Successor {
    /// Asks `program`, or the program that is now at this keeper's own path.
    pub fn ask(program: Option<&Path>, config: &Config, root: &RuntimeRoot) -> Result<Self, UpgradeError> {
        let program = match program {
            Some(program) => program.to_owned(),
            None => installed().map_err(UpgradeError::OwnProgram)?,
        };
        if !program.exists() {
            return Err(UpgradeError::Missing { program });
        }
        let answer = ask_take_over(&program, config, root)?;
        let own = File::open("/proc/self/exe").map_err(UpgradeError::OwnProgram)?;
        let arguments = vec!["--runtime-root".into(), root.path().into(), "run".into(), config.file.clone().into()];
        Ok(Self { program, version: answer.version, arguments, own })
    }

    /// Returns only if neither the new program nor the running one can be started.
    pub fn start(self) -> io::Error {
        // Without this, exec would close the descriptor.
        if let Err(error) = fcntl_setfd(&self.own, FdFlags::empty()) {
            tracing::warn!(%error, "if the new keeper fails, the old one cannot be started again");
        }
        let what = What::TakeOver { program: self.own.as_raw_fd(), arguments: self.arguments.clone() };
        let error = exec(&self.program, &self.arguments, what);
        let why = format!("cannot start {}: {error}", self.program.display());
        exec_descriptor(&self.own, &self.arguments, why)
    }
}

/// The message that the previous program of this process left.
#[derive(Debug, Default)]
pub struct Inheritance {
    predecessor: Option<Predecessor>,
    /// Why the next program did not take over.
    failure: Option<String>,
}

#[derive(Debug)]
struct Predecessor {
    program: OwnedFd,
    arguments: Vec<OsString>,
}

impl Inheritance {
    /// Must be called once, before anything is opened.
    pub fn of_this_process() -> Self {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        let word = serde_json::from_str::<Word>(&text).ok().filter(|word| word.pid == std::process::id());
        match word.map(|word| word.what) {
            None => Self::default(),
            Some(What::GoOn { why }) => Self { predecessor: None, failure: Some(why) },
            Some(What::TakeOver { program, arguments }) => {
                // SAFETY: the previous program left the descriptor open for this, and nothing else uses it.
                let program = unsafe { OwnedFd::from_raw_fd(program) };
                // QEMU must not inherit it.
                let own = fcntl_setfd(&program, FdFlags::CLOEXEC).is_ok();
                Self { predecessor: own.then_some(Predecessor { program, arguments }), failure: None }
            }
        }
    }

    /// Why an upgrade of this keeper failed; returned once.
    pub fn take_failure(&mut self) -> Option<String> {
        self.failure.take()
    }

    /// This program has taken over the machine.
    pub fn forget_predecessor(&mut self) {
        self.predecessor = None;
    }

    /// This program cannot take over the machine, so the previous one starts again. Returns if there is none.
    pub fn give_back(&mut self, why: &str) {
        if let Some(predecessor) = self.predecessor.take() {
            let error = exec_descriptor(&predecessor.program, &predecessor.arguments, why.to_owned());
            tracing::error!(%error, "cannot start the previous keeper again");
        }
    }
}

fn exec(program: &Path, arguments: &[OsString], what: What) -> io::Error {
    let word = Word { pid: std::process::id(), what };
    let text = serde_json::to_string(&word).expect("a word is plain data");
    Command::new(program).arg0("hearth").args(arguments).env(VARIABLE, text).exec()
}

fn exec_descriptor(program: &impl AsFd, arguments: &[OsString], why: String) -> io::Error {
    let path = format!("/proc/self/fd/{}", program.as_fd().as_raw_fd());
    exec(Path::new(&path), arguments, What::GoOn { why })
}

/// The path that this program was started from; its file may have been replaced.
fn installed() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let text = path.to_string_lossy();
    Ok(text.strip_suffix(REPLACED).map_or_else(|| path.clone(), PathBuf::from))
}

fn ask_take_over(program: &Path, config: &Config, root: &RuntimeRoot) -> Result<TakeOverAnswer, UpgradeError> {
    let program = program.to_owned();
    let mut question = Command::new(&program);
    question.args(["--json", "--runtime-root"]).arg(root.path()).arg("check").arg(&config.file).arg("--take-over");
    let answer = match bounded::run(question.env_remove(VARIABLE), ANSWER_PATIENCE) {
        Ok(answer) => answer,
        Err(source) => return Err(UpgradeError::NotRunnable { program, source }),
    };
    if !answer.succeeded() {
        let said: Vec<_> = answer.stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let why = if said.is_empty() { answer.how() } else { said.join(" / ") };
        return Err(UpgradeError::Refuses { program, why });
    }
    match serde_json::from_str::<TakeOverAnswer>(answer.stdout.trim()) {
        Ok(answer) if answer.machine == config.name => Ok(answer),
        _ => {
            let said = answer.stdout.lines().next().unwrap_or_default().to_owned();
            Err(UpgradeError::NotHearth { program, said })
        }
    }
}
