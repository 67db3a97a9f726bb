//! Runs all tests, several in parallel; then prints the slowest of them, and the sum as the last line: `N passed, N failed`.
//!
//! cargo would run one test binary after another, and processors would be idle at the end of each. So cargo builds them, and they
//! are run here: each test that starts machines is a process, and so is each other test binary.
//!
//! The sum is from the test binaries' own reports. A binary that dies has no report and counts as one failed test, so that the
//! line never looks better than the exit code.

mod binaries;
mod idle;
mod jobs;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::shell::ShellError;
use crate::{cargo, paths};
use binaries::Binary;
use jobs::{AtOnce, Job};

/// Environment variable with the path of a file that a test writes and the bench reads.
pub const HOST_RELOAD_FIGURES: &str = "HEARTH_HOST_RELOAD_FIGURES";

#[derive(Debug, Default, PartialEq)]
pub struct Summary {
    pub passed: u64,
    pub failed: u64,
}

impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

impl Summary {
    /// The sum of two runs.
    pub fn and(&self, other: Self) -> Self {
        Self { passed: self.passed + other.passed, failed: self.failed + other.failed }
    }

    /// Adds a line like `test result: ok. 5 passed; 0 failed; 0 ignored; ...`.
    fn add(&mut self, line: &str) {
        let Some(result) = line.strip_prefix("test result: ") else { return };
        let count_of = |word: &str| {
            let part = result.split([';', '.']).map(str::trim).find(|part| part.ends_with(word))?;
            part.split(' ').next()?.parse::<u64>().ok()
        };
        self.passed += count_of(" passed").unwrap_or(0);
        self.failed += count_of(" failed").unwrap_or(0);
    }
}

/// Results of a run, and the duration of each test.
#[derive(Default)]
pub struct Report {
    pub summary: Summary,
    /// Names of failed tests, and of processes that died without a report.
    pub failed: Vec<String>,
    times: Vec<(String, Duration)>,
}

impl Report {
    fn add(&mut self, other: Self) {
        self.summary = self.summary.and(other.summary);
        self.failed.extend(other.failed);
        self.times.extend(other.times);
    }

    /// A line for each of the slowest tests, slowest first.
    pub fn slowest(&self) -> Vec<String> {
        let mut times: Vec<_> = self.times.iter().collect();
        times.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        let line = |(name, took): &(String, Duration)| format!("{:7.1} s  {name}", took.as_secs_f64());
        times.into_iter().take(SLOWEST_SHOWN).map(line).collect()
    }
}

const SLOWEST_SHOWN: usize = 30;

/// Number of parallel processes: one more than processors, because machines wait for disks and wires that are slow on purpose;
/// more while all that run wait.
fn at_once() -> AtOnce {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    AtOnce { always: processors + 1, while_idle: 3 * processors }
}

/// Jobs that take longest, longest first. They start first, so that none of them runs alone at the end.
const LONG: [&str; 24] = [
    "nested outside::guests_continue_under_another_host_kernel",
    "lazy_restore arrivals::guest_reads_saved_disks_while_they_arrive",
    "lazy_restore arrivals::arrival_continues_after_keeper_is_killed",
    "rejuvenation firmware::seabios_booted_guest_hops_under_load",
    "pairs hostile::a_hostile_qemu_harms_only_itself",
    "warm_reboot ways::cache_survives_every_end_in_turn_on_xfs",
    "rejuvenation host_reload::one_failed_park_resumes_the_others",
    "rejuvenation host_reload::changed_parked_guest_boots_instead_of_resuming",
    "hearth_disk",
    "pairs every::a_share_of_all_pairs_leaves_nothing_behind",
    "lazy_restore uploads::interrupted_upload_leaves_the_guest_as_it_was",
    "lazy_restore object_store::guest_is_restored_from_store_in_each_mode",
    // Not beside the other one: each emulated host keeps a processor busy, and a hang must be told from a slow host.
    "nested outside::tests_inside_pass_under_kvm",
    "lazy_restore freeze::failing_agent_leaves_the_guest_as_it_was",
    "rejuvenation firmware::uefi_booted_guest_hops_under_load",
    "lazy_restore deaths::lazy_restore_survives_keeper_killed_anytime",
    "fast_remount nvram::kills_during_writes_lose_no_flushed_data",
    "lazy_restore saves::verifying_load_completes_in_guest_and_clone",
    "rejuvenation host_reload::guest_continues_after_keeper_dies_while_parking",
    "keeper guest_under_load_survives_killed_keepers",
    "hearth_recovery",
    "disk_simulation",
    "store",
    "hearth_keeper",
];

/// Ignored tests of a `vmtest` binary: its name, and a word in the names of the tests.
pub type Ignored = (&'static str, &'static str);

/// Builds all test binaries of the workspace, and the programs that they run.
pub fn build() -> Result<Vec<Binary>, ShellError> {
    binaries::build(&[])
}

/// Runs the tests of these binaries whose names contain one of these words, or all without words, and some ignored tests.
pub fn run(binaries: &[Binary], filter: &[String], ignored: Option<Ignored>) -> Result<Report, ShellError> {
    let mut jobs = vec![(0, examples(filter))];
    for binary in binaries {
        jobs.extend(binary.jobs(filter)?.into_iter().enumerate());
        if let Some((_, word)) = ignored.filter(|(name, _)| *name == binary.name) {
            jobs.extend(binary.ignored_jobs(&[word.to_owned()])?.into_iter().enumerate());
        }
    }
    // After the long ones, one test of each binary in turn, because tests of a binary often wait for the same resource. Short
    // ones come last, so that all processors are busy until the end.
    let rank = |job: &Job| LONG.iter().position(|name| *name == job.full_name()).unwrap_or(LONG.len());
    jobs.sort_by_cached_key(|(turn, job)| (rank(job), job.test.is_none(), *turn));
    Ok(jobs::run(jobs.into_iter().map(|(_, job)| job), at_once()))
}

/// The job for the examples in doc comments.
fn examples(filter: &[String]) -> Job {
    let mut command = cargo();
    command.args(["test", "--quiet", "--workspace", "--doc", "--"]).args(filter);
    Job { name: "examples".to_owned(), test: None, command }
}

/// Runs the ignored tests of a `vmtest` binary whose names contain one of these words.
pub fn run_ignored_at_once(binary: &str, filter: &[String], at_once: usize) -> Result<Report, ShellError> {
    let binaries = binaries::build(&["--test", "program", "--test", binary])?;
    let binary = binaries.iter().find(|built| built.name == binary).expect("cargo builds what it is asked for");
    Ok(jobs::run(binary.ignored_jobs(filter)?, AtOnce { always: at_once, while_idle: at_once }))
}

/// Runs the ignored tests of a `vmtest` binary one after another, and shows their output.
pub fn run_ignored(binary: &str, filter: &[String]) -> Result<Summary, ShellError> {
    binaries::build(&["--test", "program"])?;
    count(ignored(binary, filter, &binaries::hearth()))
}

/// The command for the ignored tests of a binary. `hearth` is the binary that they drive.
fn ignored(binary: &str, filter: &[String], hearth: &Path) -> Command {
    let mut command = cargo();
    command.args(["test", "--workspace", "--test", binary, "--", "--ignored", "--test-threads=1"]).args(filter);
    command.env("HEARTH_BIN", hearth);
    command
}

/// Runs the host reload of `make test-nested` with the release binary. It writes its figures to `figures` if it gets that far.
pub fn reload_host(figures: &Path) -> Result<Summary, ShellError> {
    let filter = ["outside::guests_continue_under_another_host_kernel".to_owned()];
    let mut command = ignored("nested", &filter, &paths::cargo_target().join("release/hearth"));
    command.env(HOST_RELOAD_FIGURES, figures);
    count(command)
}

fn count(mut command: Command) -> Result<Summary, ShellError> {
    let program = command.get_program().to_string_lossy().into_owned();
    let start_error = |source| ShellError::Start { program: program.clone(), source };
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(start_error)?;
    let mut summary = Summary::default();
    let output = BufReader::new(child.stdout.take().expect("stdout was piped"));
    // Split by bytes: a test may print what is not UTF-8.
    for line in output.split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        summary.add(&line);
    }
    let status = child.wait().map_err(start_error)?;
    if !status.success() && summary.failed == 0 {
        println!("cargo test ended with {status} although no test reported a failure: a test binary died");
        summary.failed = 1;
    }
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: AtOnce = AtOnce { always: 1, while_idle: 1 };

    fn check(script: &str, passed: u64, failed: u64) {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        assert_eq!(count(command).unwrap(), Summary { passed, failed });
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let report = jobs::run([Job { name: "sh".to_owned(), test: None, command }], ALONE);
        assert_eq!(report.summary, Summary { passed, failed });
    }

    #[test]
    fn results_of_all_binaries_are_summed() {
        let script =
            "echo 'test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; finished in 0.1s'
             echo 'noise 7 passed; 7 failed'
             echo 'test result: FAILED. 12 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out'; exit 101";
        check(script, 17, 3);
    }

    #[test]
    fn output_gives_times_and_failed_tests() {
        let script =
            "echo 'test a ... ok'; echo 'test b ... FAILED'; echo 'test c ... ignored'; echo 'no test d ... ok'
                      echo 'test result: FAILED. 1 passed; 1 failed; 1 ignored'; exit 101";
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let report = jobs::run([Job { name: "sh".to_owned(), test: None, command }], ALONE);
        assert_eq!(report.failed, ["sh b"]);
        assert_eq!(report.times.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["sh a", "sh b"]);
        let mut command = Command::new("sh");
        command.args(["-c", "exit 3"]);
        let report = jobs::run([Job { name: "sh".to_owned(), test: Some("dies".to_owned()), command }], ALONE);
        assert_eq!(report.failed, ["sh dies: reported no failure, but ended with an error"]);
        for (said, why) in [
            ("thread 'a' (7) panicked at a.rs:1:2:\nit is late\nstack backtrace:", "a.rs:1:2: it is late"),
            ("Error: NotFound", "Error: NotFound"),
        ] {
            let mut command = Command::new("sh");
            let script = "echo noise; echo \"$0\"; echo 'test result: FAILED. 0 passed; 1 failed'; exit 101";
            command.args(["-c", script, said]);
            let report = jobs::run([Job { name: "sh".to_owned(), test: Some("a".to_owned()), command }], ALONE);
            assert_eq!(report.failed, [format!("sh a: {why}")]);
        }
    }

    #[test]
    fn long_tests_exist() {
        for name in LONG {
            let Some((binary, test)) = name.split_once(' ') else { continue };
            let (module, function) = test.split_once("::").map_or((None, test), |(module, test)| (Some(module), test));
            let file = module.map_or_else(|| format!("{binary}.rs"), |module| format!("{binary}/{module}.rs"));
            let text = std::fs::read_to_string(paths::root().join("vmtest/tests").join(file)).expect(name);
            assert!(text.contains(&format!("fn {function}()")), "{name}");
        }
    }

    /// Each job waits until all have begun.
    #[test]
    fn as_many_jobs_run_as_may_always() {
        let home = tempfile::tempdir().unwrap();
        let job = |name: &str| {
            let mut command = Command::new("sh");
            let script = "touch $0; until [ -e a ] && [ -e b ] && [ -e c ]; do sleep 0.01; done
                          echo 'test result: ok. 1 passed; 0 failed'";
            command.current_dir(home.path()).args(["-c", script, name]);
            Job { name: name.to_owned(), test: None, command }
        };
        let report = jobs::run(["a", "b", "c"].map(job), AtOnce { always: 3, while_idle: 3 });
        assert_eq!(report.summary, Summary { passed: 3, failed: 0 });
    }

    #[test]
    fn binary_that_dies_counts_as_failed() {
        check("echo 'test result: ok. 2 passed; 0 failed; 0 ignored'; exit 101", 2, 1);
        check("kill -9 $$", 0, 1);
    }
}
