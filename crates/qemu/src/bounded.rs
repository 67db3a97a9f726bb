//! Bounded: runs a short-lived program, keeps what it said, and never waits longer than told.
//!
//! Its output goes to nameless files in memory rather than pipes: no threads are needed to drain it, and a child of the
//! child that keeps them open cannot hold us up.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::AsFd;

/// More than any version text or last words; what is beyond is not read.
const OUTPUT_LIMIT_BYTES: usize = 64 << 10;

/// What became of the program.
#[derive(Debug)]
pub struct Finished {
    /// None: the time was up, and it was killed.
    pub status: Option<ExitStatus>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// How it ended, in words.
    pub fn how(&self) -> String {
        match self.status {
            None => "it did not end in time".to_owned(),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("it ended with code {code}"),
                (None, signal) => format!("it was ended by signal {}", signal.unwrap_or(0)),
            },
        }
    }
}

pub fn run(command: &mut Command, at_most: Duration) -> io::Result<Finished> {
    run_with(command, Stdio::null(), at_most)
}

/// The same of a program that reads this.
pub fn run_with_input(command: &mut Command, input: &str, at_most: Duration) -> io::Result<Finished> {
    let stdin = capture()?;
    // Does not move to where the program begins to read.
    stdin.write_all_at(input.as_bytes(), 0)?;
    run_with(command, stdin.into(), at_most)
}

fn run_with(command: &mut Command, stdin: Stdio, at_most: Duration) -> io::Result<Finished> {
    let (stdout, stderr) = (capture()?, capture()?);
    command.stdin(stdin).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?).process_group(0);
    let mut child = command.spawn()?;
    let ended = wait(child.id(), at_most);
    if !matches!(ended, Ok(true)) {
        child.kill()?;
    }
    let status = child.wait()?;
    let status = ended?.then_some(status);
    Ok(Finished { status, stdout: read(&stdout)?, stderr: read(&stderr)? })
}

fn capture() -> io::Result<File> {
    Ok(File::from(memfd_create("output", MemfdFlags::CLOEXEC)?))
}

fn read(file: &File) -> io::Result<String> {
    let mut bytes = vec![0; (file.metadata()?.len() as usize).min(OUTPUT_LIMIT_BYTES)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// True if the child ended in time. It is not collected here, so the pid stays its own.
fn wait(pid: u32, at_most: Duration) -> io::Result<bool> {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a child's pid is positive");
    wait_pidfd(&pidfd_open(pid, PidfdFlags::empty())?, Some(at_most))
}

/// Waits until the process behind the pidfd has ended; true if it has. None waits for ever.
pub fn wait_pidfd(pidfd: &impl AsFd, at_most: Option<Duration>) -> io::Result<bool> {
    let deadline = at_most.map(|at_most| Instant::now() + at_most);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
        match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], timeout.as_ref()) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(ready) => return Ok(ready > 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn what_it_said_and_how_it_ended_are_kept() {
        let finished = run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]), LONG).unwrap();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(finished.how(), "it ended with code 3");
        assert!(!finished.succeeded());
        assert_eq!(run(Command::new("sh").args(["-c", "kill -6 $$"]), LONG).unwrap().how(), "it was ended by signal 6");
    }

    #[test]
    fn what_is_given_to_it_is_read() {
        let finished = run_with_input(&mut Command::new("cat"), "one\ntwo\n", LONG).unwrap();
        assert_eq!(finished.stdout, "one\ntwo\n");
    }

    #[test]
    fn what_hangs_is_killed() {
        let finished = run(Command::new("sleep").arg("1000"), Duration::from_millis(1)).unwrap();
        assert_eq!(finished.how(), "it did not end in time");
    }

    #[test]
    fn what_cannot_start_says_so() {
        assert_eq!(run(&mut Command::new("/no/such"), LONG).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
