//! Runs the tools that read dumps, and parses their output.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hearth_vmtest::artifacts::{self, Linux};

use super::panics::Panic;

/// Kernels that `crash` can read. Debian 12's is older than Linux 6.12, and thinks that its dumps belong to another kernel.
const CRASH_READS: [Linux; 1] = [Linux::Stable];

const LOOK: &str = include_str!("look.py");
const PAGES: &str = include_str!("pages.py");

/// Pages of each class, as makedumpfile names them.
pub type Counts = BTreeMap<String, u64>;

/// Output of drgn's script for a dump.
#[derive(Debug, serde::Deserialize)]
pub struct Seen {
    pub release: String,
    /// The task that panicked.
    pub crashed: String,
    /// That task's functions, innermost first.
    pub stack: Vec<String>,
    pub tasks: Vec<String>,
    pub log: Vec<String>,
}

/// Opens a dump with every tool, and asserts that it shows this panic. `task` is another task that ran.
pub fn check_traces(linux: Linux, dump: &Path, panic: Panic, task: &str) {
    let traces = panic.traces();
    let seen = drgn(linux, dump);
    assert!(seen.log.iter().any(|line| line.contains(traces.log)), "{panic:?}: {seen:#?}");
    assert!(seen.stack.iter().any(|name| name == traces.function), "{panic:?}: {seen:#?}");
    assert!(traces.task.is_none_or(|task| task == seen.crashed), "{panic:?}: {seen:#?}");
    assert!(seen.tasks.iter().any(|name| name == task), "{panic:?}: {:?}", seen.tasks);
    assert!(seen.release.ends_with("-cloud-amd64"), "{}", seen.release);
    if CRASH_READS.contains(&linux) {
        let said = crash(linux, dump, "sys\nbt\nlog");
        let command = traces.task.map(|task| format!("COMMAND: \"{task}\""));
        for expected in [traces.log, traces.function, command.as_deref().unwrap_or("PANIC: "), seen.release.as_str()] {
            assert!(said.contains(expected), "{panic:?}: no {expected} in {said}");
        }
    }
}

pub fn drgn(linux: Linux, dump: &Path) -> Seen {
    let said = run_drgn(linux, dump, LOOK, &[]);
    serde_json::from_str(said.trim()).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// The contents of the pages at these guest-physical addresses.
pub fn read_pages(linux: Linux, dump: &Path, addresses: &[u64]) -> Vec<u8> {
    let (_folder, file) = scratch();
    let (list, pages) = (file("addresses"), file("pages"));
    let text: String = addresses.iter().map(|address| format!("{address}\n")).collect();
    std::fs::write(&list, text).unwrap();
    run_drgn(linux, dump, PAGES, &[&list, &pages]);
    std::fs::read(&pages).unwrap()
}

fn run_drgn(linux: Linux, dump: &Path, script_text: &str, arguments: &[&Path]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.py");
    std::fs::write(&script, script_text).unwrap();
    let mut command = Command::new(artifacts::vmcore("drgn/bin/python3"));
    command
        .args(["-m", "drgn", "--quiet"])
        .arg("-c")
        .arg(dump)
        .arg("-s")
        .arg(linux.vmcore_kernel("vmlinux"))
        .arg(&script);
    output(command.args(arguments))
}

/// Output of `crash` for these commands.
pub fn crash(linux: Linux, dump: &Path, commands: &str) -> String {
    let mut command = Command::new("crash");
    command.args(["-s", "--no_crashrc"]).arg(linux.vmcore_kernel("vmlinux")).arg(dump);
    // This terminal has no pager and no line editing.
    command.env("TERM", "dumb").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("`make test-vmcore` installs crash");
    let mut input = child.stdin.take().unwrap();
    input.write_all(format!("set scroll off\n{commands}\nquit\n").as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "crash: {said}\n{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// Filters a dump at a level with compression `-c` or `-l`, or to ELF (`-E`). Returns its counts of pages.
///
/// Debian 12's version (1.7.2) knows Linux 6.1; it takes large folios of 6.12 for single pages.
pub fn makedumpfile(linux: Linux, compression: &str, level: u8, dump: &Path, filtered: &Path) -> Counts {
    let mut command = match linux {
        Linux::Stable => Command::new("makedumpfile"),
        Linux::Newer => Command::new(artifacts::vmcore("makedumpfile/makedumpfile")),
    };
    command.args([compression, "-d", &level.to_string(), "--message-level", "31"]).arg(dump).arg(filtered);
    counts(&output(&mut command))
}

/// Standard output and error of a command that must succeed.
pub fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; run `make test-vmcore`"));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{command:?}: {said}\n{}", String::from_utf8_lossy(&output.stderr));
    said.into_owned()
}

/// Parses lines like `    Pages filled with zero  : 0x0000000000000f42`.
pub fn counts(report: &str) -> Counts {
    let count = |line: &str| {
        let (name, value) = line.rsplit_once(':')?;
        let value = u64::from_str_radix(value.trim().strip_prefix("0x")?, 16).ok()?;
        Some((name.trim().to_owned(), value))
    };
    report.lines().filter_map(count).collect()
}

#[test]
fn counts_are_parsed_from_makedumpfiles_output() {
    let report = "Original pages  : 0x0000000000080000\n  Excluded pages   : 0x000000000007abfe\n\
                  \x20   Pages filled with zero  : 0x0000000000000f42\nMemory Hole     : 0x0\ntext: 12\n";
    let counts = counts(report);
    assert_eq!((counts.len(), counts["Pages filled with zero"]), (4, 0xf42));
}

pub fn scratch() -> (tempfile::TempDir, impl Fn(&str) -> PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    (folder, move |name: &str| path.join(name))
}
