//! The command line, as operators type it, against a real keeper with a simulated machine.

use std::os::unix::net::UnixListener;
use std::path::Path;

use clap::CommandFactory;
use hearth_api::{
    ApiError, DiskSize, EndCause, ErrorWord, EventKind, MachineState, Order, RejuvenateRequest, UpgradeRequest,
};
use hearth_recovery::journal::{GuestNote, Journal, QemuIdentity};
use tempfile::TempDir;

use super::*;
use crate::control::{Answer, Command, Control};
use crate::event_log::EventLog;
use crate::folders::Folders;
use crate::http::{self, Server};
use crate::sample;

mod documents;

/// One machine named web, in a runtime root of its own.
struct Fixture {
    folder: TempDir,
    events: EventLog,
    server: Option<Server>,
}

fn fixture() -> Fixture {
    fixture_that(answer)
}

fn fixture_that(answer: impl Fn(&Command, &EventLog) -> Result<Answer, ApiError> + Send + Sync + 'static) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let runtime_folder = folder.path().join("web");
    std::fs::create_dir(&runtime_folder).unwrap();
    let events = EventLog::open("web", &runtime_folder).unwrap();
    events.set_incarnation(2);
    let control = Control::new({
        let events = events.clone();
        move |command, reply| reply.send(answer(&command, &events)).unwrap()
    });
    let context = http::Context {
        control,
        events: events.clone(),
        config: std::sync::Arc::new(std::sync::Mutex::new(serde_json::json!({"cpus": 2, "qemu": null}))),
    };
    let server = Server::start(&runtime_folder.join("api.sock"), context).unwrap();
    Fixture { folder, events, server: Some(server) }
}

fn answer(command: &Command, events: &EventLog) -> Result<Answer, ApiError> {
    match command {
        Command::Status => Ok(Answer::Status(Box::new(sample::status()))),
        Command::Age => Ok(Answer::Age(Box::new(sample::signs()))),
        Command::RemountPlan => Ok(Answer::RemountPlan(Box::new(sample::remount_plan()))),
        Command::Resize { disk } if disk == "root" => {
            Ok(Answer::Resized(DiskSize { disk: disk.clone(), bytes: 3 << 30 }))
        }
        Command::Resize { disk } => {
            Err(ApiError::new(ErrorWord::NoSuchDisk, format!("web has no disk {disk}")).hint("its disks are: root"))
        }
        Command::Order(order) => {
            carry_out(order, events);
            Ok(Answer::Accepted)
        }
    }
}

/// Does at once what a machine would do over time.
fn carry_out(order: &Order, events: &EventLog) {
    let entered = |from, to| events.record(EventKind::StateChanged { from, to });
    match order {
        Order::Ready(_)
        | Order::DomainStarts(_)
        | Order::DomainReset(_)
        | Order::DomainCrashed(_)
        | Order::DomainHarvested(_)
        | Order::DomainEnded(_) => {}
        Order::Reboot(request) => {
            events.record(EventKind::IncarnationEnded { cause: EndCause::OperatorReboot });
            events.set_incarnation(3);
            events.record(EventKind::IncarnationStarted { generation: 3, warm: !request.cold });
        }
        // Its keeper dies.
        Order::Stop(request) if request.force => events.close(),
        Order::Stop(_) => {
            entered(MachineState::Running, MachineState::Stopping);
            entered(MachineState::Stopping, MachineState::Stopped);
        }
        Order::Dump(request) if request.pause => {
            events.record(EventKind::DumpWaits { file: "/d.incomplete".into(), why: "the disk is full".into() });
        }
        Order::Dump(_) | Order::DumpResume(_) => {
            let file = "/d".to_owned();
            events.record(EventKind::DumpComplete { file, pages: 1, bytes: 1 << 20, duration_ms: 5.0 });
        }
        Order::DumpDiscard(_) => {
            events.record(EventKind::DumpIncomplete { file: "/d.incomplete".into(), why: "it was given up".into() });
        }
        Order::Crash(_) => {
            entered(MachineState::Running, MachineState::Failed);
        }
        Order::Rejuvenate(RejuvenateRequest { qemu: None }) => {
            let (from_version, version) = ("7.2.0".to_owned(), "10.0.2".to_owned());
            events.record(EventKind::Rejuvenated { generation: 3, from_version, version, pause_ms: 3.2 });
        }
        Order::Rejuvenate(_) => {
            let (phase, why) = ("launch".to_owned(), "there is no such program".to_owned());
            events.record(EventKind::RejuvenationFailed { phase, why, guest_lost: false });
        }
        Order::UpgradeKeeper(UpgradeRequest { program: None }) => {
            let (program, version) = ("/usr/bin/hearth".to_owned(), "0.2.0".to_owned());
            events.record(EventKind::KeeperHandsOver { program, version });
            events.record(EventKind::KeeperTookOver { qemu_pid: 4712, generation: 2 });
        }
        Order::Park(_) => {
            events.record(EventKind::ParkFailed { phase: "hold".into(), why: "QEMU hangs".into() });
        }
        Order::UpgradeKeeper(_) => {
            events.record(EventKind::KeeperUpgradeFailed { why: "it cannot be started".into() });
        }
        Order::Save(request) if request.compress => {
            events.record(EventKind::SaveFailed { folder: "/s".into(), why: "the disk is full".into() });
        }
        Order::Save(_) => {
            events.record(EventKind::Saved {
                folder: "/s".into(),
                pages: 256,
                bytes: 1 << 20,
                pause_ms: 700.0,
                duration_ms: 800.0,
                rounds: 3,
                settled: true,
                pages_held: 9,
                pages_on_disks: 0,
            });
        }
        Order::CopyDisk(request) if request.disk == "full" => {
            let (disk, file) = (request.disk.clone(), request.file.display().to_string());
            events.record(EventKind::DiskCopyFailed { disk, file, why: "no space left in /b".into() });
        }
        Order::CopyDisk(request) => {
            let (disk, file) = (request.disk.clone(), request.file.display().to_string());
            events.record(EventKind::DiskCopyTaken {
                disk: disk.clone(),
                file: file.clone(),
                shared: true,
                held_ms: 2.0,
                file_systems: None,
                not_frozen: Some("it has no guest agent".into()),
            });
            let (format, backing) = ("raw".into(), None);
            events.record(EventKind::DiskCopied { disk, file, format, bytes: 1 << 20, backing, duration_ms: 3.0 });
        }
        Order::CopyDiskTake(_) | Order::CopyDiskCancel(_) => {}
        Order::SaveCancel(_) => {
            events.record(EventKind::SaveFailed { folder: "/s".into(), why: "it was cancelled".into() });
        }
    }
}

impl Fixture {
    /// The verb's output and result.
    fn run(&self, arguments: &[&str]) -> (String, Result<Exit, CliError>) {
        let root = self.folder.path().to_str().unwrap();
        let cli = Cli::parse_from([&["hearth", "--runtime-root", root], arguments].concat());
        let mut out = Vec::new();
        let done = perform(cli.verb, cli.json, cli.runtime_root, &mut out);
        (String::from_utf8(out).unwrap(), done)
    }

    fn output(&self, arguments: &[&str]) -> String {
        let (output, done) = self.run(arguments);
        assert_eq!(done.unwrap(), Exit::Done);
        output
    }

    fn json(&self, arguments: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.output(&[&["--json"], arguments].concat())).unwrap()
    }

    fn check_error(&self, arguments: &[&str], exit: Exit, text: &str) {
        let error = self.run(arguments).1.unwrap_err();
        assert_eq!((error.exit(), crate::chain(&error).as_str()), (exit, text));
    }
}

#[test]
fn command_line_definition_is_valid() {
    Cli::command().debug_assert();
}

#[test]
fn every_verb_is_parsed_as_documented() {
    for line in [
        "run web.toml",
        "check web.toml --json",
        "attach web --check --json",
        "attach web --yes",
        "import web",
        "import web --folder /srv/web --json",
        "copy-disk web root /srv/root.img --json",
        "export web root --json",
        "detach web",
        "host",
        "hook web prepare begin -",
        "ls --json",
        "status web",
        "console web",
        "reboot web --cold --force --no-wait",
        "stop web --force",
        "crash web --method sysrq --wait",
        "events web --follow --since 7 --json",
        "explain web",
        "age web --json",
        "ready web",
        "remount-plan web --json",
        "rejuvenate web --qemu qemu --no-wait",
        "rejuvenate --plan --boot 20s --alpha 0.5 --json",
        "rejuvenate --all --parallel 4 --stagger 10s --keep-going",
        "upgrade-keeper web --program /opt/hearth --no-wait",
        "check web.toml --take-over --json",
        "resize web data",
        "config web",
        "completions zsh",
        "man out",
    ] {
        Cli::try_parse_from(["hearth"].into_iter().chain(line.split(' ')))
            .unwrap_or_else(|error| panic!("{line}: {error}"));
    }
    for line in [
        "",
        "status",
        "reboot",
        "resize web",
        "frobnicate web",
        "crash web --method boot",
        "events web --since x",
        "rejuvenate",
        "rejuvenate web --all",
        "rejuvenate web --parallel 2",
        "rejuvenate --all --no-wait",
        "rejuvenate web --plan",
        "rejuvenate --all --boot 5s",
        "rejuvenate --plan --alpha 2",
        "rejuvenate --plan --parallel 2",
        "rejuvenate --plan --stagger 1s",
        "rejuvenate --plan --keep-going",
        "rejuvenate --all --stagger soon",
        "rejuvenate --all --stagger 36526d",
        "restore snapshot --trace 18446744073709551615",
        "rehearse snapshot --for 3155760001",
    ] {
        assert!(Cli::try_parse_from(["hearth"].into_iter().chain(line.split_whitespace())).is_err(), "{line}");
    }
}

/// The commands named in the route table must exist.
#[test]
fn every_command_that_the_api_page_names_exists() {
    let cli = Cli::command();
    for route in hearth_api::ROUTES.iter().filter(|route| !route.cli.is_empty()) {
        let mut words = route.cli.split_whitespace().skip(1);
        let verb = words.next().unwrap();
        let command = cli.find_subcommand(verb).unwrap_or_else(|| panic!("{}", route.cli));
        for flag in words.filter_map(|word| word.strip_prefix("[--")) {
            let flag = flag.trim_end_matches(']');
            assert!(command.get_arguments().any(|argument| argument.get_long() == Some(flag)), "{} {flag}", route.cli);
        }
    }
}

#[test]
fn status_is_a_page_or_json() {
    let fixture = fixture();
    let page = fixture.output(&["status", "web"]);
    let expect = "web  running, incarnation 2, up 1 min 15 s
  last end      guest panicked
  recovery      warm, in 131 ms (`hearth explain web`)
  restore       11000 of 90000 pages prefetched, 40 loaded on fault, 8960 missing; /srv/snapshots/web-1 (working-set)
  waits for     /srv/snapshots/web-1/ram: pages 7 to 22 of the guest's memory are damaged
  frozen        2 file systems, for a save, for 1.50 s
  qemu          7.2.9, pid 4712, generation 2
  accelerator   tcg (/dev/kvm does not exist)
  userfault     handed over
  pending       boot.cmdline: from the next reboot or crash
  pending       disks.root.queues: after stopping and starting the machine
  keeper        0.1.0, pid 4711, up 1 h 1 min

memory
  RAM             1.00 GiB
  budget          1.03 GiB
  living         300.0 MiB    28.5 %
  ember          500.0 MiB    47.4 %
  held           100.0 MiB     9.5 %
  peak            1.02 GiB    98.7 %
  ledger                              50000 pages known to hold a disk block
  boot set        24.0 MiB     2.3 %
  nvram           64.0 MiB     6.1 %
  granted        320.0 MiB    31.2 %  the guest waited 1.25 s for memory, 2 wait now

ember
  kept           512.0 MiB   100.0 %  131072 pages
  served           3.9 MiB     0.8 %  1000 pages
  refused          240 KiB     0.0 %  60 pages: 10 tag mismatch, 20 overwritten, 30 trimmed
  remaining      507.9 MiB    99.2 %  130012 pages

dump of incarnation 1
  state         writing
  panic         sysrq triggered crash
  file          /dumps/web-1-20260301T120000123Z.vmcore (level 31, kdump, zstd)
  written         12.0 MiB    25.0 %  10000 of 40000 pages, 40.0 MiB/s, 3.00 s to go
  held           117.2 MiB            memory not yet released
  warning       no registers: QEMU was gone

disk root
  image         /machines/root.img, raw, io_uring, O_DIRECT
  size          2.00 GiB, connected
  read             5.0 MiB            in 1200 requests
  from memory      4.0 MiB    80.0 %
  from image       1.0 MiB    20.0 %
  written          2.0 MiB            in 300 requests, 4 flushes, 1 discards
  arriving      1023.0 MiB    99.9 %  of 1.00 GiB fetched; s3://bucket/web-1/disk-root
  throttled     15 ms

nvram journal
  size          64.0 MiB, connected
  requests      12 reads, 34 writes, 5 flushes
  mirror        sync: /srv/journal
  not mirrored  8 KiB

nets
  user          52:54:00:12:34:56, 127.0.0.1:8080:80
";
    assert_eq!(page, expect, "\n{page}");
    assert_eq!(fixture.json(&["status", "web"]), serde_json::to_value(sample::status()).unwrap());
}

#[test]
fn explain_draws_the_phases() {
    let fixture = fixture();
    let expect =
        "web: incarnation 2 runs 131 ms after the one before it ended (guest panicked, 2026-03-01T12:00:00.123Z); warm
crash message: sysrq triggered crash
dump writing: 25 %, 12.0 MiB in 2.50 s, /dumps/web-1-20260301T120000123Z.vmcore
512.0 MiB of disk blocks kept in 131072 pages, 100.0 MiB released

phase    start    took
drain   0.0 ms  1.0 ms  |█                                               |
bank    1.0 ms  0.5 ms  |█                                               |
attach  1.5 ms  0.1 ms  | █                                              |
settle  2.0 ms   60 ms  | ██████████████████████                         |
launch   11 ms  120 ms  |    ████████████████████████████████████████████|
";
    let page = fixture.output(&["explain", "web"]);
    assert_eq!(page, expect, "\n{page}");
    assert_eq!(fixture.json(&["explain", "web"])["recovery"]["cause"], "panic");
}

#[test]
fn remount_plan_shows_held_and_missed_blocks() {
    let fixture = fixture();
    let page = fixture.output(&["remount-plan", "web"]);
    let expect = "web  ready; memory 24.0 MiB of 64.0 MiB
  next boot  6000 of 6100 blocks held, 98.2 % hits expected
  last boot  hits 97.5 %
             2100 reads from memory, 100.0 % in line, median 4.5 us
             120 of them during writes to the same disk, median 5.2 us
  since ready  70 hits, 800 from the ember, 90 misses
  also held  31 often-read blocks
  10 blocks not held: `remount.limit` is reached

  disk  blocks  held  hits  from ember  misses  hit rate
  root    6100  6000  5850          10     150    97.5 %

  volume               size  blocks  held  hits  misses  hit rate  since ready: hits  misses
  root 6 (mail)    10.0 MiB    3000  2900  3000     129    95.2 %                870      90
  root 5           10.0 MiB    3000  2900  3000      20    95.2 %                870      90
  root, no volume  10.0 MiB    3000  2900  3000       1    95.2 %                870      90
  1 of 4 volumes without misses

read from the images
  root  8 KiB at 1048576
";
    assert_eq!(page, expect, "\n{page}");
    let list = "disk  at byte   size  where
root        0  4 KiB  held
root  1048576  8 KiB  in the image
and 3 more blocks
";
    assert_eq!(fixture.output(&["remount-plan", "web", "--list"]), list);
    assert_eq!(fixture.json(&["remount-plan", "web"])["disks"][0]["misses"], 150);
    assert_eq!(fixture.output(&["ready", "web"]), "");
}

#[test]
fn age_says_what_speaks_for_another_qemu() {
    let fixture = fixture();
    let expect = "web  QEMU 7.2.9, pid 4712, generation 2, up 31 d 6 h
  installed      unknown  the running program was replaced or removed
  own memory   400.0 MiB  50.0 MiB at its start
  descriptors         33  31 at its start

reasons to rejuvenate (`hearth rejuvenate web`)
  QEMU is 2700000 s old, and rejuvenate.every is 2592000 s
  the QEMU program was replaced or removed since it started, perhaps by an update
  QEMU's own memory has grown by 350 MiB since its start
obstacles
  /nowhere/qemu: there is no such program; set `qemu` to a qemu-system-x86_64
";
    let page = fixture.output(&["age", "web"]);
    assert_eq!(page, expect, "\n{page}");
    assert_eq!(fixture.json(&["age", "web"])["qemu"]["own_bytes"]["now"], 400 << 20);
}

#[test]
fn machines_are_listed_running_or_not() {
    let fixture = fixture();
    std::fs::create_dir(fixture.folder.path().join("db")).unwrap();
    let expect = "\
NAME  STATE        INCARNATION  UP               RAM       HELD  ACCELERATOR
db    not running
web   running                2  1 min 15 s  1.00 GiB  800.0 MiB  tcg
";
    assert_eq!(fixture.output(&["ls"]), expect);
    let list = fixture.json(&["ls"]);
    assert_eq!((&list[0]["status"], &list[1]["status"]["state"]), (&serde_json::Value::Null, &"running".into()));
}

#[test]
fn hung_and_failed_machines_are_listed_as_such() {
    let fixture = fixture();
    let hung = fixture.folder.path().join("hung");
    let _lock = keepers_lock(&hung);
    take_and_close(&hung);
    let failed = fixture.folder.path().join("failed");
    std::fs::create_dir(&failed).unwrap();
    let log = EventLog::open("failed", &failed).unwrap();
    log.record(EventKind::Error { message: "disk vda: no such file".into() });
    log.record_state(MachineState::Failed);
    let list = fixture.output(&["ls"]);
    let states: Vec<_> = list.lines().skip(1).map(|line| line.split("  ").collect::<Vec<_>>()).collect();
    assert_eq!((&states[0][..2], states[1].last()), (&["failed", "failed"][..], Some(&"no answer")), "{list}");
    let list = fixture.json(&["ls"]);
    assert_eq!((&list[0]["failure"], &list[1]["silent"]), (&"disk vda: no such file".into(), &true.into()), "{list}");
}

/// A keeper's socket at which requests are taken and closed without an answer.
fn take_and_close(runtime_folder: &Path) {
    let listener = UnixListener::bind(runtime_folder.join("api.sock")).unwrap();
    std::thread::spawn(move || listener.incoming().for_each(drop));
}

#[test]
fn orders_wait_for_their_end() {
    let fixture = fixture();
    let output = fixture.output(&["reboot", "web", "--cold"]);
    let words: Vec<&str> = output.lines().map(|line| line.split_once("  ").unwrap().1.trim_start()).collect();
    assert_eq!(words, ["1  [2]  incarnation ended: reboot was ordered", "2  [3]  incarnation started, cold"]);
    assert!(
        fixture
            .output(&["upgrade-keeper", "web"])
            .ends_with("keeper took over the running QEMU, pid 4712, generation 2\n")
    );
    let output = fixture.output(&["stop", "web", "--json"]);
    assert!(output.lines().last().unwrap().contains("\"to\":\"stopped\""), "{output}");
    let output = fixture.output(&["stop", "web", "--no-wait"]);
    assert_eq!(output, "web: accepted; `hearth events web --follow` shows progress\n");
    assert_eq!(fixture.json(&["reboot", "web", "--no-wait"]), serde_json::json!({"since": 8}));
}

#[test]
fn stop_fails_when_the_keeper_dies_first() {
    let fixture = fixture();
    let expect = "web: its keeper ended before this was complete; `hearth status web` shows the machine's state";
    fixture.check_error(&["stop", "web", "--force"], Exit::Failed, expect);
}

#[test]
fn crash_wait_ends_if_guest_does_not_crash() {
    let fixture = fixture();
    let mut out = Vec::new();
    let context = Context { root: RuntimeRoot::new(fixture.folder.path()), json: false, out: &mut out };
    let must_crash = |method| order::must_crash(&context, "web", 0, (method, std::time::Duration::ZERO));
    let error = must_crash(CrashMethod::Nmi).unwrap_err().to_string();
    assert!(error.contains("did not crash within 0 s") && error.contains("unknown_nmi_panic"), "{error}");
    fixture.events.record(EventKind::GuestPanicked);
    must_crash(CrashMethod::Nmi).unwrap();
}

/// Holds a machine's lock, as its keeper would.
fn keepers_lock(folder: &Path) -> std::fs::File {
    std::fs::create_dir_all(folder).unwrap();
    let lock = std::fs::File::create(folder.join("keeper.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    lock
}

#[test]
fn all_machines_are_rejuvenated_until_one_fails() {
    let fixture = fixture();
    assert!(fixture.output(&["rejuvenate", "--all"]).starts_with("no machine runs in "));
    let _locks = ["web", "db"].map(|name| keepers_lock(&fixture.folder.path().join(name)));
    let socket = fixture.folder.path().join("db/api.sock");
    let (output, done) = fixture.run(&["rejuvenate", "--all"]);
    assert_eq!(done.unwrap(), Exit::Failed);
    let expect = format!(
        "1/2  db: started
1/2  db: failed, no keeper answers at {socket}

NAME  OUTCOME    FROM  TO  PAUSE  WHY
db    failed                      no keeper answers at {socket}
web   not tried                   another machine failed earlier
0 rejuvenated, 1 failed, 1 not tried
",
        socket = socket.display()
    );
    assert_eq!(output, expect, "\n{output}");
    let (output, done) = fixture.run(&["rejuvenate", "--all", "--keep-going", "--json"]);
    assert_eq!(done.unwrap(), Exit::Failed);
    let web: serde_json::Value = serde_json::from_str(output.lines().nth(1).unwrap()).unwrap();
    assert_eq!((&web["outcome"], &web["pause_ms"]), (&"rejuvenated".into(), &3.2.into()), "{output}");
}

#[test]
fn failed_requests_return_the_reason() {
    let fixture = fixture();
    let expect = "web: the machine is now failed; `hearth events web` shows why";
    fixture.check_error(&["crash", "web", "--wait"], Exit::Failed, expect);
    assert_eq!(fixture.output(&["resize", "web", "root"]), "web: disk root now has 3.00 GiB\n");
    let expect = "web: the upgrade failed and the old keeper continues";
    fixture.check_error(&["upgrade-keeper", "web", "--program", "/opt/hearth"], Exit::Failed, expect);
    fixture.check_error(&["resize", "web", "data"], Exit::Failed, "web has no disk data; its disks are: root");
}

#[test]
fn error_names_the_machines_that_run() {
    let mut fixture = fixture();
    for verb in [&["status", "db"][..], &["reboot", "db"], &["console", "db"], &["events", "db"], &["config", "db"]] {
        fixture.check_error(verb, Exit::NotRunning, "db is not running; web is");
    }
    fixture.server = None;
    let expect = format!(
        "web is not running; no machine runs in {}; start one with `hearth run FILE`",
        fixture.folder.path().display()
    );
    fixture.check_error(&["status", "web"], Exit::NotRunning, &expect);
}

#[test]
fn guest_is_parked_before_keeper_ends() {
    let mut fixture = fixture();
    let runtime = fixture.folder.path().join("web");
    fixture.server = None;
    // The loop has ended, and the process holds its lock for another moment.
    let context = http::Context {
        control: Control::new(|_, reply| drop(reply)),
        events: fixture.events.clone(),
        config: Default::default(),
    };
    fixture.server = Some(Server::start(&runtime.join("api.sock"), context).unwrap());
    let lock = std::fs::File::create(runtime.join("keeper.lock")).unwrap();
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let expect = format!("web is not running; no machine runs in {};", fixture.folder.path().display());
    let error = fixture.run(&["status", "web"]).1.unwrap_err();
    assert!(crate::chain(&error).starts_with(&expect), "{error}");

    let memory = tempfile::tempdir().unwrap();
    sample::parked("web").commit(memory.path()).unwrap();
    let mut journal = Journal::new("web", 1 << 30);
    journal.guest = GuestNote::Parked { folder: memory.path().to_owned() };
    journal.save(&runtime.join("journal.json")).unwrap();
    let (page, ended) = fixture.run(&["status", "web"]);
    assert_eq!(ended.unwrap(), Exit::NotRunning);
    assert!(page.starts_with("web  parked since"), "{page}");
    assert!(fixture.output(&["ls"]).contains("web   parked"));
}

#[test]
fn dead_keeper_differs_from_dead_machine() {
    let mut fixture = fixture();
    fixture.server = None;
    let mut journal = Journal::new("web", 1 << 30);
    journal.qemu = Some(sample::this_process());
    journal.save(&fixture.folder.path().join("web/journal.json")).unwrap();
    let pid = std::process::id();
    let expect =
        format!("the keeper of web has died but its QEMU (pid {pid}) still runs; take it over with `hearth run FILE`");
    fixture.check_error(&["status", "web"], Exit::NotRunning, &expect);
    assert!(fixture.output(&["ls"]).contains("web   keeper died"));
    // Another process with the same pid is not it.
    journal.qemu.as_mut().unwrap().start_ticks += 1;
    journal.save(&fixture.folder.path().join("web/journal.json")).unwrap();
    assert!(fixture.output(&["ls"]).contains("web   not running"));
}

#[test]
fn events_outlive_the_keeper() {
    let mut fixture = fixture();
    for kind in [EventKind::GuestPanicked, EventKind::IncarnationEnded { cause: EndCause::Panic }] {
        fixture.events.record(kind);
    }
    let alive = fixture.output(&["events", "web", "--json"]);
    fixture.server = None;
    assert_eq!(fixture.output(&["events", "web", "--json"]), alive);
    assert_eq!(alive.lines().count(), 2);
    let words = fixture.output(&["events", "web", "--since", "1"]);
    assert!(words.ends_with("     2  [2]  incarnation ended: guest panicked\n"), "{words}");
    let (output, done) = fixture.run(&["events", "web", "--follow", "--json"]);
    assert_eq!((output, done.unwrap_err().exit()), (alive, Exit::NotRunning));
}

#[test]
fn events_of_a_silent_keeper_come_from_its_file() {
    let mut fixture = fixture();
    fixture.events.record(EventKind::GuestPanicked);
    let alive = fixture.output(&["events", "web", "--json"]);
    fixture.server = None;
    take_and_close(&fixture.folder.path().join("web"));
    assert_eq!(fixture.output(&["events", "web", "--json"]), alive);
    let (output, done) = fixture.run(&["events", "web", "--follow", "--json"]);
    assert_eq!(output, alive);
    let error = done.unwrap_err();
    assert!(error.to_string().contains("does not answer") && error.exit() == Exit::Failed, "{error}");
    let report = fixture.output(&["report", "web", "-o", "-"]);
    assert!(report.contains("No keeper of web answers at the moment."), "{report}");
    // A machine without events is not known from its file.
    std::fs::remove_file(fixture.folder.path().join("web/events.jsonl")).unwrap();
    assert_eq!(fixture.run(&["events", "web"]).1.unwrap_err().exit(), Exit::Failed);
}

#[test]
fn events_are_followed_until_the_keeper_ends() {
    let fixture = fixture();
    fixture.events.record(EventKind::GuestPanicked);
    fixture.events.close();
    let output = fixture.output(&["events", "web", "--follow"]);
    assert!(output.ends_with("  guest panicked\n"), "{output}");
}

#[test]
fn config_shows_files_and_running_machines() {
    let fixture = fixture();
    assert_eq!(fixture.output(&["config", "web"]), "cpus = 2\n");
    let file = fixture.folder.path().join("db.toml");
    std::fs::write(&file, "name = \"db\"\nmemory = \"64MiB\"\n[boot]\nkernel = \"vmlinuz\"\n").unwrap();
    let file = file.to_str().unwrap();
    let output = fixture.output(&["config", file]);
    assert!(output.contains("memory_bytes = 67108864\n"), "{output}");
    let kernel = fixture.folder.path().join("vmlinuz");
    assert_eq!(fixture.json(&["config", file])["boot"]["kernel"]["kernel"], kernel.to_str().unwrap());
}

#[test]
fn a_wrong_configuration_ends_with_its_problems() {
    let fixture = fixture();
    let file = fixture.folder.path().join("bad.toml");
    std::fs::write(&file, "name = \"db\"\nmemroy = \"64MiB\"\n[boot]\nkernel = \"k\"\n").unwrap();
    let path = file.to_str().unwrap();
    let (output, done) = fixture.run(&["check", path]);
    assert_eq!(done.unwrap(), Exit::Wrong);
    let expect =
        format!("error: memroy (line 2): no such key; did you mean memory?\n{path}: the machine cannot run: 1 error\n");
    assert_eq!(output, expect);
    let (output, done) = fixture.run(&["check", path, "--json"]);
    assert_eq!(done.unwrap(), Exit::Wrong);
    assert!(output.starts_with(r#"[{"severity":"error","subject":"memroy (line 2)","#), "{output}");
    let error = configuration::for_run(&file, &RuntimeRoot::new(fixture.folder.path())).unwrap_err();
    assert_eq!((error.exit(), error.to_string()), (Exit::Wrong, format!("{path}: the machine cannot run")));
    assert_eq!(fixture.run(&["config", path]).1.unwrap_err().exit(), Exit::Wrong);
}

#[test]
fn exit_code_2_only_without_a_living_guest() {
    let fixture = fixture();
    let root = RuntimeRoot::new(fixture.folder.path());
    let file = fixture.folder.path().join("db.toml");
    let exit = |text: &str| {
        std::fs::write(&file, text).unwrap();
        configuration::for_run(&file, &root).unwrap_err().exit()
    };
    let named = "name = \"db2\"\nmemroy = \"64MiB\"\n";
    assert_eq!(exit(named), Exit::Wrong);
    assert_eq!(exit("name = \"db2\"\nmemory = \"64MiB\"\n[boot]\nkernel = \"no-kernel\"\n"), Exit::Later);
    // An edit mends one of the problems, and the other one may pass.
    let two_problems = "name = \"db2\"\nmemory = \"64MiB\"\nmachine_type = \"q35\"\n[boot]\nkernel = \"no-kernel\"\n";
    assert_eq!(exit(two_problems), Exit::Wrong);
    assert_eq!(fixture.run(&["check", file.to_str().unwrap()]).1.unwrap(), Exit::Wrong);
    let (memory, image) = (tempfile::tempdir_in("/dev/shm").unwrap(), fixture.folder.path().join("root.img"));
    std::fs::write(&image, [0; 4096]).unwrap();
    let shared_image = format!(
        "name = \"db2\"\nmemory = \"64MiB\"\nmemory_folder = \"{}\"\n[[disks]]\nname = \"a\"\npath = \"{file}\"\n[[disks]]\n\
         name = \"b\"\npath = \"{file}\"\n",
        memory.path().display(),
        file = image.display()
    );
    assert_eq!(exit(&shared_image), Exit::Wrong);

    // This process in the place of its QEMU.
    for machine in ["db", "db2"] {
        let folder = root.machine(machine);
        std::fs::create_dir_all(&folder).unwrap();
        let pid = std::process::id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let start_ticks = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap().parse().unwrap();
        let qemu = QemuIdentity { start_ticks, ..crate::sample::qemu_identity(pid) };
        let journal = Journal { qemu: Some(qemu), ..Journal::new(machine, 64 << 20) };
        journal.save(&folder.join("journal.json")).unwrap();
        // Without a readable name, the file's own name counts.
        assert_eq!(exit("nonsense"), Exit::Later, "{machine}");
        let expect = if machine == "db2" { Exit::Later } else { Exit::Wrong };
        assert_eq!((exit(named), exit(&shared_image)), (expect, expect), "{machine}");
    }
}

/// Neither check sees the other's keeper when both start at the same moment; the lock decides.
#[test]
fn later_of_two_keepers_may_try_again() {
    let (folder, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
    let prepare = |name: &str| {
        let runtime = folder.path().join(name);
        Folders::prepare(name, &runtime, &memory.path().join("shared")).map_err(CliError::from)
    };
    let first = prepare("web").unwrap();
    let second = prepare("web").unwrap_err();
    assert!(second.to_string().contains("another keeper holds "), "{second}");
    assert_eq!(second.exit(), Exit::Later);
    let neighbour = prepare("db").unwrap_err();
    assert!(neighbour.to_string().contains("belongs to another machine"), "{neighbour}");
    assert_eq!(neighbour.exit(), Exit::Later);
    drop(first);
}

#[test]
fn completions_and_manual_pages_know_every_verb() {
    let fixture = fixture();
    // The script asks the program for the words.
    assert!(fixture.output(&["completions", "bash"]).contains("COMPLETE=\"bash\""));
    let typed = ["hearth", ""].map(Into::into).to_vec();
    let offered = clap_complete::engine::complete(&mut Cli::command(), typed, 1, None).unwrap();
    let folder = fixture.folder.path().join("man");
    std::fs::create_dir(&folder).unwrap();
    fixture.output(&["man", folder.to_str().unwrap()]);
    let main = std::fs::read_to_string(folder.join("man1/hearth.1")).unwrap();
    for section in ["EXAMPLES", "\"EXIT STATUS\"", "ENVIRONMENT", "FILES", "\"SEE ALSO\""] {
        assert!(main.contains(&format!("\n.SH {section}\n")), "{section}: {main}");
    }
    for verb in Cli::command().get_subcommands() {
        let is_offered = offered.iter().any(|word| word.get_value() == verb.get_name());
        assert_eq!(is_offered, !verb.is_hide_set(), "{}", verb.get_name());
        let page = std::fs::read_to_string(folder.join(format!("man1/hearth-{}.1", verb.get_name())));
        assert_eq!(page.is_ok(), is_offered, "{}", verb.get_name());
        let Ok(page) = page else { continue };
        assert!(page.contains(verb.get_name()) && page.contains("\n.SH \"EXIT STATUS\"\n"), "{page}");
        let page = page.replace("\\-", "-");
        for of_it in verb.get_subcommands().flat_map(clap::Command::get_opts) {
            let option = format!("--{}", of_it.get_long().unwrap());
            assert!(page.contains(&option), "{option}: {page}");
        }
    }
    check_references(&folder);
    let keys = std::fs::read_to_string(folder.join("man5/hearth.toml.5")).unwrap();
    for field in crate::config::FIELDS {
        let entry = format!("\n.TP\n\\fB{}\\fR (", field.key);
        assert!(keys.contains(&entry), "{}: {keys}", field.key);
    }
    let nowhere = Path::new("/nowhere");
    fixture.check_error(
        &["man", "/nowhere"],
        Exit::Failed,
        &format!("cannot use {}: No such file or directory (os error 2)", nowhere.display()),
    );
}

#[test]
fn verbs_without_json_are_verbs() {
    let command = Cli::command();
    assert!(WITHOUT_JSON.iter().all(|name| command.find_subcommand(name).is_some()));
}

#[test]
fn what_was_done_is_a_line_or_json() {
    let said = |json| {
        let mut out = Vec::new();
        let mut context = Context { root: RuntimeRoot::new("/run/hearth"), json, out: &mut out };
        context.write_done("web", "web is detached").unwrap();
        String::from_utf8(out).unwrap()
    };
    assert_eq!(said(false), "web is detached\n");
    let json: serde_json::Value = serde_json::from_str(&said(true)).unwrap();
    assert_eq!((&json["name"], &json["message"]), (&"web".into(), &"web is detached".into()));
}

/// Each page that one of Hearth's pages refers to, as hearth-run(1), must exist.
#[track_caller]
fn check_references(folder: &Path) {
    let mut found = 0;
    for section in ["man1", "man5"] {
        for page in std::fs::read_dir(folder.join(section)).unwrap() {
            let page = page.unwrap().path();
            let text =
                std::fs::read_to_string(&page).unwrap().replace("\\-", "-").replace("\\fB", "").replace("\\fR", "");
            for (at, _) in text.match_indices("hearth") {
                let Some((name, rest)) = text[at..].split_once('(') else { continue };
                let is_name = name.bytes().all(|byte| byte.is_ascii_lowercase() || b"-.".contains(&byte));
                let Some(number) = rest.strip_prefix(['1', '5']).filter(|rest| is_name && rest.starts_with(')')) else {
                    continue;
                };
                let number = &rest[..rest.len() - number.len()];
                let other = folder.join(format!("man{number}/{name}.{number}"));
                assert!(other.exists(), "{}: {name}({number})", page.display());
                found += 1;
            }
        }
    }
    assert!(found > 40, "{found}");
}

#[test]
fn every_name_of_a_machine_is_completed() {
    for verb in Cli::command().get_subcommands().filter(|verb| verb.get_name() != "new") {
        let names = verb.get_positionals().filter(|argument| argument.get_id() == "name");
        for name in names {
            assert!(name.get::<clap_complete::ArgValueCandidates>().is_some(), "hearth {}", verb.get_name());
        }
    }
}

#[test]
fn closed_output_is_not_a_failure() {
    let error = CliError::Output(io::ErrorKind::BrokenPipe.into());
    assert_eq!(error.exit(), Exit::Done);
    assert_eq!(CliError::Output(io::ErrorKind::StorageFull.into()).exit(), Exit::Failed);
}

/// This program must accept the commands in the unit files.
#[test]
fn the_systemd_units_use_verbs_that_exist() {
    check_unit(include_str!("../../../../packaging/hearth@.service"));
    check_unit(include_str!("../../../../packaging/user/hearth@.service"));
}

fn check_unit(unit: &str) {
    let commands: Vec<&str> = unit
        .lines()
        .filter_map(|line| line.strip_prefix("Exec")?.split_once('='))
        .map(|(_, command)| command)
        .collect();
    assert_eq!(commands.len(), 2, "{commands:?}");
    for command in commands {
        // A shell may ask first whether it is needed.
        let command = command.rsplit_once("exec ").map_or(command, |(_, command)| command.trim_end_matches('\''));
        let words = command.trim_start_matches('-').split_whitespace();
        Cli::try_parse_from(words).unwrap_or_else(|error| panic!("{command}: {error}"));
    }
}

/// What may pass, and what ends one process of a machine, must not make systemd give up the others.
#[test]
fn the_systemd_unit_gives_up_only_a_wrong_file() {
    let unit = include_str!("../../../../packaging/hearth@.service");
    let all_of = |key: &str| {
        let values = unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        values.flat_map(str::split_whitespace).collect::<Vec<_>>()
    };
    assert_eq!(all_of("RestartPreventExitStatus"), [(Exit::Wrong as u8).to_string()]);
    assert_eq!((all_of("SuccessExitStatus"), all_of("RestartForceExitStatus")), (vec![], vec![]));
    assert_eq!((all_of("Restart"), all_of("KillMode")), (vec!["on-failure"], vec!["process"]));
    assert_eq!(all_of("OOMPolicy"), ["continue"]);
}

/// A start that systemd ends, or no longer tries, powers a parked guest off, or leaves it where it is. A keeper that systemd stops
/// before libvirt has shut its domains down leaves these without disks.
#[test]
fn the_systemd_units_wait_for_guests() {
    let check = |unit: &str, words: &[&str]| {
        for word in words {
            assert!(unit.lines().any(|line| line == *word), "{word}: {unit}");
        }
    };
    let machine = include_str!("../../../../packaging/hearth@.service");
    let after = "After=network-online.target local-fs.target remote-fs.target";
    check(machine, &["TimeoutStartSec=infinity", "StartLimitIntervalSec=0", after, "Before=libvirt-guests.service"]);
    let all = include_str!("../../../../packaging/hearth-host-reload.service");
    check(all, &["Restart=on-failure", "StartLimitIntervalSec=0"]);
}

#[test]
fn save_waits_and_can_be_cancelled() {
    let fixture = fixture();
    let output = fixture.output(&["save", "web", "-o", "/s"]);
    assert!(output.ends_with("saved, 256 pages in 1.0 MiB; the guest paused for 700 ms; /s\n"), "{output}");
    let (output, done) = fixture.run(&["save", "web", "-o", "/s", "--compress"]);
    assert!(output.ends_with("save failed: the disk is full (/s)\n"), "{output}");
    assert_eq!(done.unwrap_err().exit(), Exit::Failed);
    let output = fixture.output(&["save", "web", "--cancel"]);
    assert!(output.ends_with("save failed: it was cancelled (/s)\n"), "{output}");
}

#[test]
fn copy_of_a_disk_says_how_consistent_it_is() {
    let fixture = fixture();
    let output = fixture.output(&["copy-disk", "web", "root", "/b/root.img"]);
    let lines: Vec<_> = output.lines().filter_map(|line| line.split_once("]  ")).map(|(_, said)| said).collect();
    assert_eq!(
        lines,
        [
            "disk root held for 2.0 ms, crash-consistent, as after a power cut (it has no guest agent); sharing the image's blocks",
            "disk root copied to /b/root.img in 3.0 ms, 1.0 MiB (raw)",
        ]
    );
    let (_, done) = fixture.run(&["copy-disk", "web", "full", "/b/root.img"]);
    let error = done.unwrap_err();
    assert_eq!(error.to_string(), "web: copy of disk full failed: no space left in /b (/b/root.img)");
}

/// Also without a signal: nobody would wait for it any more.
#[test]
fn copy_that_nobody_waits_for_is_cancelled() {
    let (heard, orders) = std::sync::mpsc::channel();
    let fixture = fixture_that(move |command, events| {
        if let Command::Order(order @ (Order::CopyDisk(_) | Order::CopyDiskCancel(_))) = command {
            heard.send(order.clone()).unwrap();
            match order {
                Order::CopyDisk(request) if request.disk == "busy" => {
                    return Err(ApiError::new(ErrorWord::WrongState, "cannot copy a disk: a disk is being copied"));
                }
                // The stream of events ends.
                Order::CopyDisk(_) => events.close(),
                _ => {}
            }
        }
        Ok(Answer::Accepted)
    });
    let copy = |disk: &str| fixture.run(&["copy-disk", "web", disk, "/b/root.img"]).1.unwrap_err();
    // Whose copy runs is not known.
    assert!(copy("busy").to_string().contains("a disk is being copied"));
    assert!(matches!(orders.try_recv(), Ok(Order::CopyDisk(_))) && orders.try_recv().is_err());
    copy("root");
    assert!(matches!(orders.try_recv(), Ok(Order::CopyDisk(_))));
    match orders.try_recv() {
        Ok(Order::CopyDiskCancel(cancel)) => assert_eq!(cancel.file, Path::new("/b/root.img")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn non_dump_file_is_refused_by_name() {
    let fixture = fixture();
    let path = fixture.folder.path().join("notes.txt");
    std::fs::write(&path, "no dump at all").unwrap();
    for verb in ["info", "dmesg"] {
        let (_, done) = fixture.run(&["vmcore", verb, path.to_str().unwrap()]);
        let error = done.unwrap_err();
        assert!(error.to_string().ends_with("notes.txt: is neither a kdump file nor an ELF core"), "{error}");
        assert_eq!(error.exit(), Exit::Failed);
    }
}

#[test]
fn dump_without_kernel_info_is_shown() {
    use hearth_recovery::vmcore::linux::Utsname;
    use hearth_recovery::vmcore::{Bitmap, Compression, Dump, DumpLevel, Format, Notes, Plan};
    let fixture = fixture();
    let path = fixture.folder.path().join("empty.vmcore");
    let plan = Plan {
        ranges: Vec::new(),
        kept: Bitmap::new(0),
        level: DumpLevel::KERNEL,
        notes: Notes::default(),
        utsname: Utsname::default(),
    };
    Dump::create(&path, plan, Format::Kdump(Compression::Lzo)).unwrap().finish().unwrap();
    let words = fixture.output(&["vmcore", "info", path.to_str().unwrap()]);
    assert!(words.contains("empty.vmcore: kdump, lzo, level 31, complete"), "{words}");
    assert!(words.contains("not understood: no Linux kernel was found in the guest's memory"), "{words}");
    assert!(words.contains("no registers in the dump"), "{words}");
    let json = fixture.output(&["--json", "vmcore", "info", path.to_str().unwrap()]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((json["format"].as_str(), json["pages"]["missing"].as_u64()), (Some("kdump"), Some(0)));
}
