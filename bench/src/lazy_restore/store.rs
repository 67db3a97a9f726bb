//! The sides out of an object store: a real server on loopback, behind a wire of `cloud`'s rate on which each request is under way
//! for some milliseconds. It is a program of its own, `loopback-s3`: with it this one would take minutes longer to compile.

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

/// The place of these sides, as the others have a profile.
pub const STORE: &str = "store";

/// Of the server and its wire, the lowest there is: they stand for other machines, and what they compute is not to take the guest's
/// processors.
const NICE: i32 = 19;
/// The one that the server has.
const BUCKET: &str = "bucket";
const PROGRAM: &str = "loopback-s3";

/// Its objects are in the server's files, which the host may cache: the wire is what is slow.
pub struct Far {
    server: Child,
    talk: Mutex<Talk>,
    folder: PathBuf,
}

impl Far {
    /// With what it keeps in a folder of its own in this one.
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
        let mut talk = self.talk.lock().expect("nobody panics with it");
        let (say, hear) = &mut *talk;
        let answer = writeln!(say, "{line}").and_then(|()| heard_line(hear));
        answer.map_err(|source| RestoreError::File { path: PROGRAM.into(), source })
    }

    /// A machine that can be saved to it.
    pub fn known_to(&self, builder: TestVmBuilder) -> TestVmBuilder {
        let mut section = toml::Table::new();
        section.insert("credentials".to_owned(), self.path("s3.env").into());
        section.insert("folder".to_owned(), self.path("keeper").into());
        builder.setting("object_store", section)
    }

    /// Of the one snapshot there is.
    pub fn address(&self) -> PathBuf {
        format!("s3://{BUCKET}/snapshot").into()
    }

    /// Of `hearth restore` and `hearth working-set`, for somebody who has fetched nothing yet if nobody has used this name.
    pub fn options(&self, cache: &str) -> Vec<String> {
        ["--credentials".to_owned(), self.path("s3.env"), "--cache".to_owned(), self.path(cache)].to_vec()
    }

    /// From now on a request is under way for so long, and the wire has the rate that it is measured at.
    pub fn move_away(&self, request: Duration) -> Result<(), RestoreError> {
        let rate = Profile::Cloud.rate().map_or(u64::MAX, |rate| rate.bytes_per_second());
        self.ask(&format!("line {rate} {}", request.as_millis())).map(drop)
    }

    /// Bytes that have come out of it, heads of answers included.
    pub fn answer_bytes(&self) -> Result<u64, RestoreError> {
        let said = self.ask("answer-bytes")?;
        let failed = |error| RestoreError::File { path: PROGRAM.into(), source: io::Error::other(error) };
        said.parse().map_err(|_| failed(said.clone()))
    }

    /// What was fetched under this name is not used any more.
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
        // It has nothing that anybody needs.
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

type Talk = (ChildStdin, BufReader<ChildStdout>);

/// With what whoever uses it has to have in the environment.
fn start(folder: &Path) -> io::Result<(Child, Talk, String)> {
    let program = std::env::current_exe()?.with_file_name(PROGRAM);
    let mut server = Command::new(program).arg(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    // Before it has other threads: they have what this one has.
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

/// Without its end.
fn heard_line(hear: &mut impl BufRead) -> io::Result<String> {
    let mut line = String::new();
    match hear.read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(line.trim_end().to_owned()),
    }
}
