//! Bounded: runs a short-lived program with a time limit and keeps its output.
//!
//! The output goes to unnamed files in memory and not to pipes. So no thread has to read it, and a grandchild that
//! keeps it open cannot block the caller.

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

/// Maximum size of the output that is read: more than any version text or error message.
const OUTPUT_LIMIT_BYTES: usize = 64 << 10;

/// Result of the program.
#[derive(Debug)]
pub struct Finished {
    /// None if the program was killed at the time limit.
    pub status: Option<ExitStatus>,
    /// Standard output, at most 64 KiB; invalid UTF-8 is replaced.
    pub stdout: String,
    /// Standard error, likewise.
    pub stderr: String,
}

impl Finished {
    /// Whether the program ended with code 0.
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }

    /// How the program ended, as text for an error message.
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

/// Runs a program without input and kills it after `at_most`.
pub fn run(command: &mut Command, at_most: Duration) -> io::Result<Finished> {
    run_with(command, Stdio::null(), at_most)
}

/// As `run`, with `input` as the standard input.
pub(crate) fn run_with_input(command: &mut Command, input: &str, at_most: Duration) -> io::Result<Finished> {
    let stdin = capture()?;
    // This write does not move the position from which the program reads.
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

/// Whether the child ended in time. It is not reaped here, so its pid stays valid.
fn wait(pid: u32, at_most: Duration) -> io::Result<bool> {
    let pid = Pid::from_raw(pid.cast_signed()).expect("a child's pid is positive");
    wait_pidfd(&pidfd_open(pid, PidfdFlags::empty())?, Some(at_most))
}

/// Waits until the process behind the pidfd has ended. Returns false at the time limit; None waits for ever.
pub(crate) fn wait_pidfd(pidfd: &impl AsFd, at_most: Option<Duration>) -> io::Result<bool> {
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
    fn output_and_exit_status_are_kept() {
        let finished = run(Command::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]), LONG).unwrap();
        assert_eq!((finished.stdout.as_str(), finished.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(finished.how(), "it ended with code 3");
        assert!(!finished.succeeded());
        assert_eq!(run(Command::new("sh").args(["-c", "kill -6 $$"]), LONG).unwrap().how(), "it was ended by signal 6");
    }

    #[test]
    fn input_reaches_the_program() {
        let finished = run_with_input(&mut Command::new("cat"), "one\ntwo\n", LONG).unwrap();
        assert_eq!(finished.stdout, "one\ntwo\n");
    }

    #[test]
    fn hanging_program_is_killed() {
        let finished = run(Command::new("sleep").arg("1000"), Duration::from_millis(1)).unwrap();
        assert_eq!(finished.how(), "it did not end in time");
    }

    #[test]
    fn failed_start_is_an_error() {
        assert_eq!(run(&mut Command::new("/no/such"), LONG).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
