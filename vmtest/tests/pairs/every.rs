//! Every operation with every other: the first is held at its n-th QMP command, for each n, then the second begins, and then
//! one of them dies, or QEMU refuses, or nothing.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use hearth_vmtest::{Random, patience};

use crate::machine::{Bed, Keeper, NAMES, kill, wait};

/// What is begun, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    // --- of the guest
    Reset,
    Panic,
    Off,
    Watchdog,
    // --- of an operator, at the API
    Status,
    Reboot,
    RebootForced,
    Crash,
    Stop,
    StopForced,
    Save,
    SaveCancel,
    SaveAndStop,
    Rejuvenate,
    Upgrade,
    Dump,
    DumpPaused,
    DumpDiscard,
    /// `hearth host-reload prepare`.
    Park,
    /// `hearth check`; it gives QEMU no command, so it is never the first.
    Check,
    // --- a keeper that starts
    Boot,
    TakeOver,
    Resume,
    Restore,
}
use Operation::*;

impl Operation {
    const ALL: [Self; 24] = [
        Reset,
        Panic,
        Off,
        Watchdog,
        Status,
        Reboot,
        RebootForced,
        Crash,
        Stop,
        StopForced,
        Save,
        SaveCancel,
        SaveAndStop,
        Rejuvenate,
        Upgrade,
        Dump,
        DumpPaused,
        DumpDiscard,
        Park,
        Check,
        Boot,
        TakeOver,
        Resume,
        Restore,
    ];

    fn starts_a_keeper(self) -> bool {
        matches!(self, Boot | TakeOver | Resume | Restore)
    }

    /// A second keeper of any other kind is one of these.
    fn may_be_second(self) -> bool {
        !matches!(self, TakeOver | Resume)
    }

    /// It begins with the start of a process.
    fn begins_within(self) -> Duration {
        if matches!(self, Park | Check | Boot | Restore) { PROCESS_BEGINS } else { SECOND_BEGINS }
    }

    /// The keeper's first guest is started, and it ends if that fails.
    fn is_a_first_start(self) -> bool {
        matches!(self, Boot | Resume | Restore)
    }

    /// A keeper may end on it by itself.
    fn may_end(self) -> bool {
        matches!(self, Off | Stop | StopForced | SaveAndStop | Park)
    }
}

/// What happens when the second has begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    Nothing,
    Refused,
    KeeperDies,
    QemuDies,
}

impl Then {
    const ALL: [Self; 4] = [Self::Nothing, Self::Refused, Self::KeeperDies, Self::QemuDies];
}

#[derive(Clone, Copy, Debug)]
struct Case {
    first: Operation,
    /// The QMP command of the first, from 1.
    step: usize,
    second: Operation,
    then: Then,
}

impl fmt::Display for Case {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{:?} at its command {}, meanwhile {:?}, then {:?}",
            self.first, self.step, self.second, self.then
        )
    }
}

/// `make test` plays one of so many.
const SHARE: usize = 16;
/// The second has begun, or waits for the first, after this.
const SECOND_BEGINS: Duration = Duration::from_millis(15);
const PROCESS_BEGINS: Duration = Duration::from_millis(40);
/// A restore begins its check within this, unless it is refused before.
const CHECK_BEGINS: Duration = Duration::from_millis(500);
/// A command of the first that is expected comes within this, if it comes at all.
const STEP_COMES: Duration = Duration::from_secs(1);
/// What was begun has begun to show by then.
const REST: Duration = Duration::from_millis(20);
/// Another program is asked first.
const REST_OF_UPGRADES: Duration = Duration::from_millis(150);
/// Of a machine whose QEMU answers at once.
fn limit() -> Duration {
    patience(1)
}

/// One machine after the other on the same folders: what a case leaves, the next one finds.
struct Stage {
    bed: Bed,
    /// Names that were given to saves and records.
    numbers: AtomicUsize,
}

impl Stage {
    fn new() -> Self {
        let stage = Self { bed: Bed::make(), numbers: AtomicUsize::new(0) };
        stage.save_once().unwrap_or_else(|why| panic!("a machine that is left alone: {why}\n{}", stage.bed.log()));
        stage
    }

    /// A snapshot that machines are restored from.
    fn save_once(&self) -> Result<(), String> {
        let stage = self;
        let mut keeper = stage.run()?;
        let snapshot = format!(r#"{{"folder": {:?}}}"#, stage.bed.path("snapshot"));
        keeper.api().ask("POST", "/v1/save", &snapshot).ok_or("no save")?;
        keeper.settled(REST)?;
        stage.end(keeper)
    }

    /// A keeper that has its machine running.
    fn run(&self) -> Result<Keeper<'_>, String> {
        let mut keeper = self.begin_keeper(Boot);
        match keeper.settled(REST)? {
            Some(status) if status["state"] == "running" => Ok(keeper),
            other => Err(format!("the machine does not start: {other:?}")),
        }
    }

    fn begin_keeper(&self, operation: Operation) -> Keeper<'_> {
        if operation != Restore {
            return self.bed.keeper(NAMES[0], &["run", "machine.toml"]);
        }
        let _ = std::fs::remove_dir_all(self.bed.path(NAMES[1]));
        self.bed.keeper(NAMES[1], &["restore", "snapshot", "--as", NAMES[1], "--trust-config"])
    }

    /// For a machine that is there, or has been.
    fn begin_next_keeper(&self, name: &'static str) -> Keeper<'_> {
        self.bed.keeper(name, &["run", file_of(name)])
    }

    /// Restores a snapshot under the name of a machine that may live.
    fn begin_restore_over(&self, name: &'static str) -> Keeper<'_> {
        if name == NAMES[0] {
            let _ = std::fs::remove_dir_all(self.bed.path(name));
        }
        self.bed.keeper(name, &["restore", "snapshot", "--as", name, "--trust-config"])
    }

    fn new_path(&self, what: &str) -> String {
        self.bed.path(&format!("{what}-{}", self.numbers.fetch_add(1, Relaxed))).display().to_string()
    }

    /// The state in which an operation can begin: a keeper, unless it starts one itself.
    fn before(&self, operation: Operation) -> Result<Option<Keeper<'_>>, String> {
        match operation {
            Boot | Restore => Ok(None),
            TakeOver => {
                self.run()?.kill();
                Ok(None)
            }
            Resume => {
                let mut keeper = self.run()?;
                keeper.api().ask("POST", "/v1/park", "{}").ok_or("no park")?;
                let parked = wait(limit(), || keeper.ended().is_some());
                if parked { Ok(None) } else { Err("it is not parked".to_owned()) }
            }
            _ => self.run().map(Some),
        }
    }

    /// Begins it; does not wait for its end, except for the API's answer, or the command's. A second keeper, if that is what it is.
    fn begin(&self, operation: Operation, keeper: &Keeper<'_>) -> Option<Keeper<'_>> {
        let post = |path: &str, body: &str| drop(keeper.api().ask("POST", path, body));
        let save = |then: &str| {
            let folder = self.new_path("save");
            post("/v1/save", &format!(r#"{{"folder": {folder:?}, "then": "{then}"}}"#));
        };
        let command = |arguments: &[&str]| self.bed.keeper(keeper.name, arguments).wait();
        match operation {
            Reset => self.bed.hand.guests("reset"),
            Panic => self.bed.hand.guests("panic"),
            Off => self.bed.hand.guests("off"),
            Watchdog => self.bed.hand.guests("watchdog"),
            Status => drop(keeper.api().ask("GET", "/v1/status", "")),
            Reboot => post("/v1/reboot", "{}"),
            RebootForced => post("/v1/reboot", r#"{"force": true}"#),
            Crash => post("/v1/crash", "{}"),
            Stop => post("/v1/stop", "{}"),
            StopForced => post("/v1/stop", r#"{"force": true}"#),
            Save => save("continue"),
            SaveCancel => post("/v1/save/cancel", "{}"),
            SaveAndStop => save("stop"),
            Rejuvenate => post("/v1/rejuvenate", "{}"),
            Upgrade => post("/v1/upgrade-keeper", "{}"),
            Dump => post("/v1/dump", "{}"),
            DumpPaused => post("/v1/dump", r#"{"pause": true}"#),
            DumpDiscard => post("/v1/dump/discard", "{}"),
            Park => drop(command(&["host-reload", "prepare", "--drill", "--record", &self.new_path("record")])),
            Check => {
                let said = command(&["check", file_of(keeper.name)]).code();
                // The file is right, unless it has not been made yet.
                let expected = [Some(0), Some(75), Some(2).filter(|_| !self.is_made(keeper.name))];
                assert!(said.is_some() && expected.contains(&said), "`hearth check` ended with {said:?}");
            }
            Boot | TakeOver | Resume => return Some(self.begin_next_keeper(keeper.name)),
            Restore => return Some(self.begin_restore_over(keeper.name)),
        }
        None
    }

    fn is_made(&self, name: &str) -> bool {
        self.bed.path(file_of(name)).exists()
    }

    /// How many QMP commands it takes alone.
    fn steps(&self, operation: Operation) -> Result<usize, String> {
        let keeper = self.before(operation)?;
        self.bed.hand.arm(None);
        let mut keeper = keeper.unwrap_or_else(|| self.begin_keeper(operation));
        if !operation.starts_a_keeper() {
            self.begin(operation, &keeper);
        }
        keeper.settled(if operation == Upgrade { REST_OF_UPGRADES } else { REST })?;
        let heard = self.bed.hand.heard();
        self.end(keeper)?;
        Ok(heard.len())
    }

    fn play(&self, case: Case) -> Result<(), String> {
        let Case { first, step, second, then } = case;
        let keeper = self.before(first)?;
        let hand = &self.bed.hand;
        hand.arm(Some(step));
        let mut keeper = keeper.unwrap_or_else(|| self.begin_keeper(first));
        let other = std::thread::scope(|scope| {
            if !first.starts_a_keeper() {
                scope.spawn(|| self.begin(first, &keeper));
            }
            // A step that does not come this time, for what is random in it, is no step.
            wait(STEP_COMES, || hand.held().is_some());
            let begun = scope.spawn(|| self.begin(second, &keeper));
            if second == Restore && keeper.name == NAMES[0] {
                // It has made its machine, and its check waits a second for the keeper that has this name.
                wait(CHECK_BEGINS, || self.bed.path(NAMES[0]).join("machine.toml").exists());
            }
            // That it was started says nothing of how far a keeper is.
            wait(second.begins_within(), || begun.is_finished() && !second.starts_a_keeper());
            let held = hand.heard().get(step - 1).cloned().unwrap_or_default();
            match then {
                Then::Nothing => hand.release("go"),
                // A guest that cannot be asked to shut down has a minute to do so all the same.
                Then::Refused => hand.release(if held == "system_powerdown" { "go" } else { "refuse" }),
                Then::KeeperDies => {
                    kill(keeper.pid());
                    hand.release("go");
                }
                Then::QemuDies => {
                    if let Some(qemu) = hand.held() {
                        kill(qemu);
                    }
                    hand.release("go");
                }
            }
            begun.join().map_err(|_| format!("{second:?} panicked"))
        })?;
        if let Some(other) = other {
            keeper = self.one_of(keeper, other, second)?;
        }
        self.judge(case, &mut keeper)?;
        self.end(keeper)
    }

    /// One of two keepers ends at once: the second, with a reason, unless it found the machine without one.
    fn one_of<'a>(
        &self,
        mut keeper: Keeper<'a>,
        mut other: Keeper<'a>,
        second: Operation,
    ) -> Result<Keeper<'a>, String> {
        if !wait(limit(), || other.ended().is_some() || keeper.ended().is_some()) {
            return Err("two keepers have the machine".to_owned());
        }
        if keeper.ended().is_some() && other.settled(REST)?.is_some() {
            return Ok(other);
        }
        let (ended, said) = (other.wait(), other.said());
        let has_reason = matches!(ended.code(), Some(1 | 75)) && said.lines().any(|line| line.starts_with("hearth: "));
        if !has_reason {
            return Err(format!("{second:?} ended with {ended} and said {said:?}"));
        }
        if second == Restore && keeper.name == NAMES[0] && self.bed.path(NAMES[0]).exists() {
            return Err("a restore that was refused left its machine's folder".to_owned());
        }
        Ok(keeper)
    }

    /// What is true of any machine when it has come to rest.
    fn judge(&self, case: Case, keeper: &mut Keeper<'_>) -> Result<(), String> {
        let upgrades = case.first == Upgrade || case.second == Upgrade;
        let Some(status) = keeper.settled(if upgrades { REST_OF_UPGRADES } else { REST })? else {
            let status = keeper.ended().expect("it has");
            let may_end = status.success() && (case.first.may_end() || case.second.may_end());
            let may_fail = case.first.is_a_first_start() && case.then != Then::Nothing;
            return if case.then == Then::KeeperDies || may_end || may_fail {
                Ok(())
            } else {
                Err(format!("the keeper ended: {status}"))
            };
        };
        // One that was replaced may be about to end.
        let (mut qemu, mut qemus) = Default::default();
        let alone = wait(limit(), || {
            qemu = keeper.api().ask("GET", "/v1/status", "").and_then(|(_, status)| status["qemu"]["pid"].as_u64());
            qemus = self.bed.qemus();
            qemus.iter().copied().map(u64::from).eq(qemu) || keeper.ended().is_some()
        });
        if !alone {
            return Err(format!("QEMUs {qemus:?} are there, and the machine's is {qemu:?}"));
        }
        if status["state"] == "paused" && !matches!((case.first, case.second), (DumpPaused, _) | (_, DumpPaused)) {
            return Err(format!("the guest stands still: {status}"));
        }
        Ok(())
    }

    /// The next start works, and a machine that has been stopped leaves nothing.
    fn end<'a>(&'a self, mut keeper: Keeper<'a>) -> Result<(), String> {
        // `hearth host-reload prepare` brings a machine back that it could not park.
        let has_another = keeper.ended().is_some() && keeper.api().ask("GET", "/v1/status", "").is_some();
        if keeper.ended().is_some() && !has_another {
            let name = keeper.name;
            keeper = self.begin_next_keeper(name);
            let again = keeper.settled(REST).map_err(|why| format!("the next keeper: {why}"))?;
            if again.is_none() && self.is_made(name) {
                return Err(format!("the next keeper ended: {:?}", keeper.ended()));
            }
        }
        let api = keeper.api();
        api.ask("POST", "/v1/stop", r#"{"force": true}"#);
        if !wait(limit(), || keeper.ended().is_some() && api.ask("GET", "/v1/status", "").is_none()) {
            return Err("does not stop".to_owned());
        }
        let mut left = Vec::new();
        wait(Duration::from_millis(500), || {
            left = self.bed.left_behind();
            left.is_empty()
        });
        if left.is_empty() { Ok(()) } else { Err(format!("left behind: {left:?}")) }
    }
}

/// As seen from the folder of the bed.
fn file_of(name: &str) -> &'static str {
    if name == NAMES[0] { "machine.toml" } else { "copy/machine.toml" }
}

/// All of them; with `HEARTH_PAIR` those whose names contain it.
fn cases() -> Vec<Case> {
    let stage = Stage::new();
    let mut cases = Vec::new();
    for first in Operation::ALL {
        let steps = stage.steps(first).unwrap_or_else(|why| panic!("{first:?} alone: {why}\n{}", stage.bed.log()));
        for step in 1..=steps {
            let seconds = Operation::ALL.into_iter().filter(|second| second.may_be_second());
            cases.extend(seconds.flat_map(|second| Then::ALL.map(|then| Case { first, step, second, then })));
        }
    }
    let wanted = std::env::var("HEARTH_PAIR").unwrap_or_default();
    cases.retain(|case| case.to_string().contains(&wanted));
    cases
}

fn play_all(cases: &[Case]) {
    let (next, failures) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let play_some = || {
        let mut stage = Stage::new();
        while let Some(&case) = cases.get(next.fetch_add(1, Relaxed)) {
            if let Err(why) = stage.play(case) {
                eprintln!("{case}: {why}\n{}", stage.bed.log());
                failures.fetch_add(1, Relaxed);
                stage = Stage::new();
            }
        }
    };
    // They wait most of the time.
    let workers = 4 * std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..workers).for_each(|_| drop(scope.spawn(play_some))));
    let failures = failures.into_inner();
    assert_eq!(failures, 0, "of {} pairs; HEARTH_PAIR='...' plays the one with this name", cases.len());
}

#[test]
fn a_share_of_all_pairs_leaves_nothing_behind() {
    let first = Random::seeded().below(SHARE);
    let cases = cases();
    assert!(cases.len() > 7000 || std::env::var_os("HEARTH_PAIR").is_some(), "{} cases", cases.len());
    play_all(&cases.into_iter().skip(first).step_by(SHARE).collect::<Vec<_>>());
}

#[test]
#[ignore = "a soak: make soak NAME=pairs"]
fn every_pair_leaves_nothing_behind() {
    play_all(&cases());
}
