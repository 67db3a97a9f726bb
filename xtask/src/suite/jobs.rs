//! Jobs of a test run, several in parallel: each is a process that reports like Rust's test binaries.
//!
//! Machines often wait for disks and wires that are slow on purpose. While processors are idle, further jobs start, up to a
//! limit.
//!
//! A job's output is shown if it fails. A test's duration is the time between its line and the one before, so a process runs its
//! tests one after another.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::idle::Idle;
use super::{Report, Summary};

pub struct Job {
    /// Name of the test binary.
    pub name: String,
    /// The job's only test; `None` if it may have many.
    pub test: Option<String>,
    pub command: Command,
}

/// Number of parallel jobs.
#[derive(Clone, Copy)]
pub struct AtOnce {
    /// However busy the host is.
    pub always: usize,
    /// While processors are idle.
    pub while_idle: usize,
}

/// Time between two checks for idle processors. A job that has just started must show its load before the next one starts.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Runs jobs in this order.
pub fn run(jobs: impl IntoIterator<Item = Job>, at_once: AtOnce) -> Report {
    let (mut waiting, mut report) = (jobs.into_iter().peekable(), Report::default());
    let (ended, ends) = mpsc::channel();
    let (mut running, mut idle) = (0, Idle::since_now());
    std::thread::scope(|scope| {
        while running > 0 || waiting.peek().is_some() {
            let may_start = running < at_once.always || running < at_once.while_idle && idle.has_room(LOOK_EVERY);
            if let Some(job) = waiting.next_if(|_| may_start) {
                let ended = ended.clone();
                scope.spawn(move || ended.send(job.run()).expect("all ends are received"));
                running += 1;
                continue;
            }
            match ends.recv_timeout(LOOK_EVERY) {
                Ok(of_job) => {
                    report.add(of_job);
                    running -= 1;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("this function has a sender"),
            }
        }
    });
    report
}

impl Job {
    fn run(mut self) -> Report {
        let began = Instant::now();
        let mut report = Report::default();
        let mut child = match self.command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() {
            Ok(child) => child,
            Err(error) => return self.died(report, &format!("cannot start: {error}")),
        };
        let (mut said, mut since) = (String::new(), began);
        let output = BufReader::new(child.stdout.take().expect("stdout was piped"));
        // Split by bytes: a test may print what is not UTF-8.
        for line in output.split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            report.summary.add(&line);
            if let (None, Some((test, result))) = (&self.test, ended_test(&line)) {
                let name = format!("{} {test}", self.name);
                if result == "FAILED" {
                    report.failed.push(name.clone());
                }
                report.times.push((name, since.elapsed()));
                since = Instant::now();
            }
            said.push_str(&line);
            said.push('\n');
        }
        let success = child.wait().is_ok_and(|status| status.success());
        // A program that the test runs may have written into its line, so an only test is counted without it.
        if self.test.is_some() {
            report.times.push((self.full_name(), began.elapsed()));
            let failure =
                || reason(&said).map_or_else(|| self.full_name(), |why| format!("{}: {why}", self.full_name()));
            report.failed.extend((report.summary.failed > 0).then(failure));
        }
        self.tell(report, &said, success, began.elapsed())
    }

    /// Prints one line for a successful job, and the output of a failed one.
    fn tell(self, report: Report, said: &str, success: bool, took: Duration) -> Report {
        let Summary { passed, failed } = report.summary;
        if success && failed == 0 && (passed == 1 || self.test.is_none()) {
            println!("{}: {passed} passed, {:.1} s", self.full_name(), took.as_secs_f64());
            return report;
        }
        print!("{said}");
        if failed == 0 { self.died(report, "reported no failure, but ended with an error") } else { report }
    }

    pub fn full_name(&self) -> String {
        self.test.as_ref().map_or_else(|| self.name.clone(), |test| format!("{} {test}", self.name))
    }

    /// A job without a report counts as one failed test.
    fn died(&self, mut report: Report, how: &str) -> Report {
        report.failed.push(format!("{}: {how}", self.full_name()));
        report.summary.failed += 1;
        report
    }
}

/// Place and message of the first panic in a test's output, or the error that it returned, cut off where it becomes long.
fn reason(said: &str) -> Option<String> {
    let mut lines = said.lines();
    let found = lines.find(|line| line.contains(" panicked at ") || line.starts_with("Error: "))?;
    let whole = match found.split_once(" panicked at ") {
        Some((_, place)) => format!("{place} {}", lines.next().unwrap_or_default()),
        None => found.to_owned(),
    };
    Some(whole.chars().take(REASON_CHARS).collect())
}

/// Length of a reason in the list of failed tests.
const REASON_CHARS: usize = 300;

/// Name and result in `test NAME ... ok`.
fn ended_test(line: &str) -> Option<(&str, &str)> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    ["ok", "FAILED"].contains(&result).then_some((name, result))
}
