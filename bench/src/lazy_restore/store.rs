//! The sides with an object store: a real server on loopback, behind a wire with the rate of `cloud` on which each request takes
//! some milliseconds. The server is a separate program, `loopback-s3`: built into this one, it would add minutes to its compile
//! time.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use hearth_vmtest::TestVmBuilder;
use rustix::process::{Pid, setpriority_process};

use super::RestoreError;
use crate::host::profile::Profile;

/// The place of these sides, where others have a profile.
pub const STORE: &str = "store";

/// Nice value of the server and its wire, the lowest priority: they stand for other machines, so they should not take the guest's
/// processors.
const NICE: i32 = 19;
/// The server's only bucket.
const BUCKET: &str = "bucket";
const PROGRAM: &str = "loopback-s3";

/// The store. Its objects are files of the server, which the host may cache: only the wire is slow.
pub struct Far {
    server: Child,
    talk: Mutex<Talk>,
    folder: PathBuf,
}

impl Far {
    /// Starts the server, with its data in a folder of its own in `parent`.
    pub fn start(parent: &Path) -> Result<Self, RestoreError> {
        let folder = parent.join(STORE);
        let started = fs::create_dir(&folder).and_then(|()| start(&folder));
        let (server, talk, environment) =
            started.map_err(|source| RestoreError::File { path: PROGRAM.into(), source })?;
        let path = folder.join("s3.env");
        let far = Self { server, talk: Mutex::new(talk), folder };
        fs::write(&path, environment).map_err(|source| RestoreError::File { path, source })?;
        Ok(far)
    }

    fn ask(&self, line: &str) -> Result<String, RestoreError> {
        let mut talk = self.talk.lock().expect("no thread panics while it holds the lock");
        let (say, hear) = &mut *talk;
        let answer = writeln!(say, "{line}").and_then(|()| heard_line(hear));
        answer.map_err(|source| RestoreError::File { path: PROGRAM.into(), source })
    }

    /// Configures a machine so that it can be saved to the store.
    pub fn known_to(&self, builder: TestVmBuilder) -> TestVmBuilder {
        let mut section = toml::Table::new();
        section.insert("credentials".to_owned(), self.path("s3.env").into());
        section.insert("folder".to_owned(), self.path("keeper").into());
        builder.setting("object_store", section)
    }

    /// Address of the only snapshot.
    pub fn address(&self) -> PathBuf {
        format!("s3://{BUCKET}/snapshot").into()
    }

    /// Options of `hearth restore` and `hearth working-set` with this cache, which is empty under a new name.
    pub fn options(&self, cache: &str) -> Vec<String> {
        ["--credentials".to_owned(), self.path("s3.env"), "--cache".to_owned(), self.path(cache)].to_vec()
    }

    /// Sets the delay of each request, and the wire's rate for the measurements.
    pub fn move_away(&self, request: Duration) -> Result<(), RestoreError> {
        let rate = Profile::Cloud.rate().map_or(u64::MAX, |rate| rate.bytes_per_second());
        self.ask(&format!("line {rate} {}", request.as_millis())).map(drop)
    }

    /// Bytes that the server has sent, headers included.
    pub fn answer_bytes(&self) -> Result<u64, RestoreError> {
        let said = self.ask("answer-bytes")?;
        let failed = |error| RestoreError::File { path: PROGRAM.into(), source: io::Error::other(error) };
        said.parse().map_err(|_| failed(said.clone()))
    }

    /// Removes the cache of this name.
    pub fn forget(&self, cache: &str) -> Result<(), RestoreError> {
        let path = self.folder.join(cache);
        fs::remove_dir_all(&path).map_err(|source| RestoreError::File { path, source })
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        // The server's data is no longer needed.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

type Talk = (ChildStdin, BufReader<ChildStdout>);

/// Starts the server. Also returns the environment variables that its users need.
fn start(folder: &Path) -> io::Result<(Child, Talk, String)> {
    let program = std::env::current_exe()?.with_file_name(PROGRAM);
    let mut server = Command::new(program).arg(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    // Set before the server starts threads, which inherit the priority.
    setpriority_process(Some(Pid::from_child(&server)), NICE)?;
    let (say, hear) = server.stdin.take().zip(server.stdout.take()).expect("both are piped");
    let (mut hear, mut environment) = (BufReader::new(hear), String::new());
    loop {
        match heard_line(&mut hear)? {
            line if line.is_empty() => return Ok((server, (say, hear), environment)),
            line => environment += &(line + "\n"),
        }
    }
}

/// Reads a line, without its end.
fn heard_line(hear: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    match hear.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line.trim_end().to_owned()),
    }
}
