//! For tests: runs a test of the same binary in a child process under strace. First to see which system calls it makes, then
//! with one of them failing, or with SIGKILL in place of the call.

#![warn(missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Selects the calls of a child that are traced.
#[derive(Clone, Copy, Debug)]
pub struct Strace<'a> {
    /// Names of the calls.
    pub calls: &'a [&'a str],
    /// Only calls on these paths; with none, calls on any. A descriptor has the path that its file has during the call.
    pub paths: &'a BTreeSet<String>,
    /// The file to which strace writes.
    pub log: &'a Path,
}

/// The call that fails, and how.
#[derive(Clone, Copy, Debug)]
pub struct Injection<'a> {
    /// Name of the system call, as strace spells it.
    pub call: &'a str,
    /// From 1. Every thread counts its own calls of this name.
    pub number: usize,
    /// In strace's words: `error=EIO`, `signal=KILL`.
    pub what: &'a str,
}

impl Strace<'_> {
    /// Runs an ignored test of this binary, given by its full name, and waits for its end.
    pub fn run_test(&self, name: &str, environment: &[(&str, &OsStr)], injection: Option<&Injection<'_>>) -> Output {
        let mut strace = Command::new("strace");
        strace.args(["-f", "-qq", "-y", "-e", "signal=none", "-e"]).arg(format!("trace={}", self.calls.join(",")));
        strace.arg("-o").arg(self.log);
        strace.args(self.paths.iter().flat_map(|path| ["-P", path]));
        if let Some(Injection { call, number, what }) = injection {
            strace.args(["-e", &format!("inject={call}:{what}:when={number}")]);
        }
        let program = std::env::current_exe().expect("a running test has a path");
        strace.arg(program).args(["--exact", name, "--ignored", "--nocapture"]).envs(environment.iter().copied());
        strace.output().expect("strace is installed: `cargo xtask setup` does that")
    }

    /// The lines of the last run's log, without the process that each begins with.
    pub fn lines(&self) -> Vec<String> {
        self.entries().into_iter().map(|(_, line)| line).collect()
    }

    /// Every number that an `Injection` can have, by call: the most calls of a name in one thread.
    pub fn calls_made(&self) -> BTreeMap<String, usize> {
        let (mut by_thread, mut calls) = (BTreeMap::<_, usize>::new(), BTreeMap::new());
        for (thread, line) in self.entries() {
            // A line without a name tells how an earlier call ended.
            let name = line.split('(').next().filter(|name| self.calls.contains(name));
            if let Some(name) = name {
                let count = by_thread.entry((thread, name.to_owned())).or_default();
                *count += 1;
                let most: &mut usize = calls.entry(name.to_owned()).or_default();
                *most = (*most).max(*count);
            }
        }
        calls
    }

    /// Paths below a folder that the calls name or have open.
    pub fn paths_below(&self, folder: &Path) -> BTreeSet<String> {
        let folder = folder.display().to_string();
        let lines = self.lines();
        let texts = lines.iter().flat_map(|line| line.split(['"', '<', '>']));
        texts.filter(|text| text.starts_with(&folder)).map(str::to_owned).collect()
    }

    fn entries(&self) -> Vec<(String, String)> {
        let log = fs::read_to_string(self.log).expect("strace wrote its log");
        let entry = |line: &str| {
            let (process, line) = line.split_once(' ')?;
            Some((process.to_owned(), line.trim_start().to_owned()))
        };
        log.lines().filter_map(entry).collect()
    }
}
