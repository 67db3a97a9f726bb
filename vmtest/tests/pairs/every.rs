//! Every operation with every other: the first one is held at its n-th QMP command, for each n. Then the second one
//! begins, and then one process dies, or QEMU refuses the command, or nothing happens.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use hearth_api::MachineState;
use hearth_vmtest::{Random, patience};

use crate::machine::{Bed, Keeper, NAMES, kill, wait};

/// An operation, and how it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    // --- by the guest
    Reset,
    Panic,
    Off,
    Watchdog,
    // --- by the operator, through the API
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
    /// `hearth check`. It sends QEMU no command, so it is never the first operation.
    Check,
    // --- by a keeper that starts
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

    /// A second keeper of any other kind does the same as one of these.
    fn may_be_second(self) -> bool {
        !matches!(self, TakeOver | Resume)
    }

    /// How long the operation takes to begin; longer if a process is started.
    fn begins_within(self) -> Duration {
        if matches!(self, Park | Check | Boot | Restore) { PROCESS_BEGINS } else { SECOND_BEGINS }
    }

    /// Whether the keeper starts its first guest, so that the keeper ends if that fails.
    fn is_a_first_start(self) -> bool {
        matches!(self, Boot | Resume | Restore)
    }

    /// Whether a keeper may end by itself because of the operation.
    fn may_end(self) -> bool {
        matches!(self, Off | Stop | StopForced | SaveAndStop | Park)
    }
}

/// Event after the second operation has begun.
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
    /// Number of the first operation's QMP command, from 1.
    step: usize,
    second: Operation,
    then: Then,
}

impl Case {
    /// Whether the keeper may die after it has accepted a stop, and before it has carried that out.
    fn may_leave_a_stop(&self) -> bool {
        let stops = |operation| matches!(operation, Stop | StopForced);
        self.then == Then::KeeperDies && (stops(self.first) || stops(self.second))
    }
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

/// `make test` plays one case in this many.
const SHARE: usize = 16;
/// After this time the second operation has begun, or waits for the first.
const SECOND_BEGINS: Duration = Duration::from_millis(15);
const PROCESS_BEGINS: Duration = Duration::from_millis(40);
/// A restore begins its check within this time, unless it is refused earlier.
const CHECK_BEGINS: Duration = Duration::from_millis(500);
/// An expected command of the first operation arrives within this time, if at all.
const STEP_COMES: Duration = Duration::from_secs(1);
/// After this time an operation that was begun shows in the status.
const REST: Duration = Duration::from_millis(20);
/// An upgrade first asks another program for its version.
const REST_OF_UPGRADES: Duration = Duration::from_millis(150);
/// Time limit for a machine whose QEMU answers at once.
fn limit() -> Duration {
    patience(1)
}

/// Plays cases one after another on the same folders, so each case meets what the last one left.
struct Stage {
    bed: Bed,
    /// Number for the names of saves and records.
    numbers: AtomicUsize,
}

impl Stage {
    fn new() -> Self {
        let stage = Self { bed: Bed::make(), numbers: AtomicUsize::new(0) };
        stage.save_once().unwrap_or_else(|why| panic!("a machine that is left alone: {why}\n{}", stage.bed.log()));
        stage
    }

    /// Creates a snapshot to restore machines from.
    fn save_once(&self) -> Result<(), String> {
        let stage = self;
        let mut keeper = stage.run()?;
        let snapshot = format!(r#"{{"folder": {:?}}}"#, stage.bed.path("snapshot"));
        keeper.api().ask("POST", "/v1/save", &snapshot).map_err(|error| format!("no save: {error}"))?;
        keeper.settled(REST)?;
        stage.end(keeper, false)
    }

    /// A keeper whose machine runs.
    fn run(&self) -> Result<Keeper<'_>, String> {
        let mut keeper = self.begin_keeper(Boot);
        match keeper.settled(REST)? {
            Some(status) if status.state == MachineState::Running => Ok(keeper),
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

    /// Starts a keeper for a machine that exists, or existed.
    fn begin_next_keeper(&self, name: &'static str) -> Keeper<'_> {
        self.bed.keeper(name, &["run", file_of(name)])
    }

    /// Restores a snapshot under a machine's name. That machine may be alive.
    fn begin_restore_over(&self, name: &'static str) -> Keeper<'_> {
        if name == NAMES[0] {
            let _ = std::fs::remove_dir_all(self.bed.path(name));
        }
        self.bed.keeper(name, &["restore", "snapshot", "--as", name, "--trust-config"])
    }

    fn new_path(&self, what: &str) -> String {
        self.bed.path(&format!("{what}-{}", self.numbers.fetch_add(1, Relaxed))).display().to_string()
    }

    /// Prepares for an operation: returns a keeper, unless the operation starts one itself.
    fn before(&self, operation: Operation) -> Result<Option<Keeper<'_>>, String> {
        match operation {
            Boot | Restore => Ok(None),
            TakeOver => {
                self.run()?.kill();
                Ok(None)
            }
            Resume => {
                let mut keeper = self.run()?;
                keeper.api().ask("POST", "/v1/park", "{}").map_err(|error| format!("no park: {error}"))?;
                let parked = wait(limit(), || keeper.ended().is_some());
                if parked { Ok(None) } else { Err("it is not parked".to_owned()) }
            }
            _ => self.run().map(Some),
        }
    }

    /// Begins an operation. Waits for the API's answer or the command's end, not for the operation's end. Returns the
    /// second keeper, if the operation starts one.
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
            Status => drop(keeper.api().status()),
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
                // The file is valid, unless it does not exist yet.
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

    /// Number of QMP commands of the operation when it runs alone.
    fn steps(&self, operation: Operation) -> Result<usize, String> {
        let keeper = self.before(operation)?;
        self.bed.hand.arm(None);
        let mut keeper = keeper.unwrap_or_else(|| self.begin_keeper(operation));
        if !operation.starts_a_keeper() {
            self.begin(operation, &keeper);
        }
        keeper.settled(if operation == Upgrade { REST_OF_UPGRADES } else { REST })?;
        let heard = self.bed.hand.heard();
        self.end(keeper, false)?;
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
            // Random choices may lead to fewer commands than expected; then the case has no held step.
            wait(STEP_COMES, || hand.held().is_some());
            let begun = scope.spawn(|| self.begin(second, &keeper));
            if second == Restore && keeper.name == NAMES[0] {
                // Wait until the restore has created its machine. Its check then waits a second for the keeper of this
                // name.
                wait(CHECK_BEGINS, || self.bed.path(NAMES[0]).join("machine.toml").exists());
            }
            // A keeper's process may have been started long before the keeper does anything.
            wait(second.begins_within(), || begun.is_finished() && !second.starts_a_keeper());
            let held = hand.heard().get(step - 1).cloned().unwrap_or_default();
            match then {
                Then::Nothing => hand.release("go"),
                // A refused shutdown request would make the keeper wait a minute for the guest.
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
        self.end(keeper, case.may_leave_a_stop())
    }

    /// Checks that one of two keepers ends at once. It is the second one, with a reason, unless the second found no
    /// keeper.
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

    /// Checks what must be true of any machine at rest.
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
        // A replaced QEMU may be about to end.
        let (mut qemu, mut qemus) = Default::default();
        let alone = wait(limit(), || {
            qemu = keeper.api().status().and_then(|status| status.qemu).map(|qemu| qemu.pid);
            qemus = self.bed.qemus();
            qemus.iter().copied().eq(qemu) || keeper.ended().is_some()
        });
        if !alone {
            return Err(format!("QEMUs {qemus:?} are there, and the machine's is {qemu:?}"));
        }
        if status.state == MachineState::Paused
            && !matches!((case.first, case.second), (DumpPaused, _) | (_, DumpPaused))
        {
            return Err(format!("the guest stands still: {status:?}"));
        }
        Ok(())
    }

    /// Checks that the next start works, and that a stopped machine leaves nothing behind. `may_stop`: the next keeper may
    /// find an order to stop.
    fn end<'a>(&'a self, mut keeper: Keeper<'a>, may_stop: bool) -> Result<(), String> {
        // `hearth host-reload prepare` starts the machine again if it could not park it.
        let has_another = keeper.ended().is_some() && keeper.answers();
        if keeper.ended().is_some() && !has_another {
            let name = keeper.name;
            keeper = self.begin_next_keeper(name);
            let mut again = keeper.settled(REST).map_err(|why| format!("the next keeper: {why}"))?;
            if again.is_none() && may_stop && keeper.ended().is_some_and(|how| how.success()) {
                // It has carried out the stop that the dead keeper had accepted.
                keeper = self.begin_next_keeper(name);
                again = keeper.settled(REST).map_err(|why| format!("the keeper after a stop: {why}"))?;
            }
            if again.is_none() && self.is_made(name) {
                return Err(format!("the next keeper ended: {:?}", keeper.ended()));
            }
        }
        // A keeper that has ended meanwhile does not answer.
        let _ = keeper.api().ask("POST", "/v1/stop", r#"{"force": true}"#);
        if !wait(limit(), || keeper.ended().is_some() && !keeper.answers()) {
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

/// Path of the machine's file, relative to the bed's folder.
fn file_of(name: &str) -> &'static str {
    if name == NAMES[0] { "machine.toml" } else { "copy/machine.toml" }
}

/// All cases, or those whose name contains `HEARTH_PAIR`.
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
    // More workers than processors, because the cases mostly wait.
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
