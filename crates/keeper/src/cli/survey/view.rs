//! What the page and `hearth top` show of a survey, as plain data.
//!
//! Only what is listed here leaves the host: nothing of a configuration, no addresses of object stores (`addresses`).

use hearth_api::{DumpState, MachineState, MachineStatus};
use serde::Serialize;

use super::addresses::hidden;
use super::rates::Rates;
use super::troubles::{Tone, Trouble, of_disk, troubles};
use super::{Machine, NO_ANSWER, Survey};
use crate::cli::describe;
use crate::cli::text::{bytes, milliseconds, uptime};
use crate::home::Home;
use crate::runtime_root::RuntimeRoot;

const HEARTH: &str = "hearth";

/// All machines.
#[derive(Clone, Debug, Serialize)]
pub struct View {
    pub taken_at: String,
    pub machines: Vec<MachineView>,
}

/// One machine.
#[derive(Clone, Debug, Serialize)]
pub struct MachineView {
    pub name: String,
    pub state: String,
    /// The guest runs; with the tone Bad it may hang.
    pub runs: bool,
    pub tone: Tone,
    /// What is wrong with it, why it is in this state, and what is under way.
    pub now: Vec<String>,
    pub incarnation: Option<u32>,
    pub up: String,
    pub qemu: Option<String>,
    pub last_recovery: Option<String>,
    pub memory: Option<Memory>,
    pub disks: Vec<Disk>,
    pub dumps: Vec<String>,
    pub snapshots: Vec<String>,
    /// Newest first.
    pub events: Vec<String>,
    pub commands: Vec<Command>,
}

/// Memory of a machine: its parts, and its budget.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Memory {
    pub guest_bytes: u64,
    pub ember_bytes: u64,
    /// The part of the ember that a dump has not written.
    pub held_bytes: u64,
    pub boot_set_bytes: u64,
    pub nvram_bytes: u64,
    pub budget_bytes: u64,
}

/// A disk.
#[derive(Clone, Debug, Serialize)]
pub struct Disk {
    pub name: String,
    pub bytes: u64,
    /// None: there are no two readings yet.
    pub rates: Option<Rates>,
    /// What is wrong with it.
    pub problem: Option<String>,
}

/// A command that acts on what is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Command {
    /// What it does.
    pub does: &'static str,
    pub line: String,
}

impl View {
    pub fn of(survey: &Survey, root: &RuntimeRoot) -> Self {
        let hearth = hearth_command(root);
        let machines = survey.machines.iter().map(|machine| MachineView::of(machine, &hearth)).collect();
        Self { taken_at: survey.taken_at.clone(), machines }
    }
}

/// The command's beginning: commands look for machines where these were found.
fn hearth_command(root: &RuntimeRoot) -> String {
    match *root == RuntimeRoot::for_this_user() {
        true => HEARTH.to_owned(),
        false => format!("{HEARTH} --runtime-root {}", root.path().display()),
    }
}

impl MachineView {
    fn of(machine: &Machine, hearth: &str) -> Self {
        let name = &machine.listed.name;
        let troubles = troubles(machine);
        let tone = troubles.iter().map(|trouble| trouble.tone).fold(tone(machine), Tone::max);
        let status = machine.listed.status.as_ref();
        let events = machine.events.iter().rev();
        Self {
            name: name.clone(),
            state: machine.state().to_owned(),
            runs: machine.state() == MachineState::Running.name(),
            tone,
            now: now(machine, troubles).iter().map(|text| hidden(text)).collect(),
            incarnation: status.map(|status| status.incarnation),
            up: status.filter(|status| status.uptime_s > 0.0).map(|status| uptime(status.uptime_s)).unwrap_or_default(),
            qemu: status.and_then(|it| it.qemu.as_ref()).map(|qemu| format!("{}, {}", qemu.version, qemu.accelerator)),
            last_recovery: status.and_then(last_recovery),
            memory: status.map(memory),
            disks: status.map(|status| disks(machine, status)).unwrap_or_default(),
            dumps: status.map(dumps).unwrap_or_default(),
            snapshots: machine
                .snapshots
                .iter()
                .rev()
                .map(|(time, place)| format!("{time}  {}", hidden(place)))
                .collect(),
            events: events.map(|event| format!("{}  {}", event.time, hidden(&describe(&event.event)))).collect(),
            commands: commands(machine, hearth),
        }
    }
}

/// What the state alone says; `troubles` may say worse.
fn tone(machine: &Machine) -> Tone {
    match machine.listed.status.as_ref().map(|status| status.state) {
        Some(MachineState::Running) => Tone::Good,
        Some(MachineState::Stopped) | None => Tone::Off,
        Some(_) => Tone::Busy,
    }
}

fn now(machine: &Machine, troubles: Vec<Trouble>) -> Vec<String> {
    let mut now: Vec<String> = troubles.into_iter().map(|trouble| trouble.text).collect();
    let status = machine.listed.status.as_ref();
    let parked = machine.listed.parked.as_ref().map(|parked| format!("since {}", parked.since));
    let why = status.and_then(|status| status.state_why.clone()).or(parked).filter(|why| !now.contains(why));
    now.extend(why);
    now.extend(status.map(phases).unwrap_or_default());
    now
}

fn last_recovery(status: &MachineStatus) -> Option<String> {
    let last = status.last_recovery.as_ref()?;
    let how = if last.warm { "warm" } else { "cold" };
    let panic = last.panic.as_ref().map(|panic| format!(": {panic}")).unwrap_or_default();
    Some(format!("{}{panic}; {how}, in {}", last.cause.words(), milliseconds(last.duration_ms)))
}

fn memory(status: &MachineStatus) -> Memory {
    let memory = &status.memory;
    Memory {
        guest_bytes: memory.resident_bytes,
        ember_bytes: memory.ember_bytes,
        held_bytes: memory.held_bytes,
        boot_set_bytes: memory.boot_set_bytes,
        nvram_bytes: memory.nvram_bytes,
        budget_bytes: memory.budget_bytes,
    }
}

fn disks(machine: &Machine, status: &MachineStatus) -> Vec<Disk> {
    let disks = status.disks.iter();
    disks
        .map(|disk| Disk {
            name: disk.name.clone(),
            bytes: disk.bytes,
            rates: machine.rates.get(&disk.name).copied(),
            problem: of_disk(status, disk).first().map(|trouble| hidden(&trouble.text)),
        })
        .collect()
}

fn phases(status: &MachineStatus) -> Vec<String> {
    let mut phases = Vec::new();
    phases.extend(status.parking_since.as_ref().map(|since| format!("parking since {since}")));
    phases.extend(status.rejuvenating_since.as_ref().map(|since| format!("replacing QEMU since {since}")));
    phases.extend(status.save.as_ref().map(|save| format!("saving, {}", progress(save.percent, save.eta_s))));
    let dump = |dump: &hearth_api::DumpStatus| match dump.state {
        DumpState::Planning | DumpState::Writing => Some(format!("dumping, {}", progress(dump.percent, dump.eta_s))),
        DumpState::Queued => Some("a dump waits for another one".to_owned()),
        DumpState::Waiting | DumpState::Complete | DumpState::Incomplete => None,
    };
    phases.extend(status.dumps.iter().filter_map(dump));
    if let Some(restore) = status.restore.as_ref().filter(|restore| !restore.complete) {
        let loaded = restore.pages.saturating_sub(restore.pages_missing);
        phases.push(format!("restoring, {loaded} of {} pages loaded", restore.pages));
    }
    let arriving = status.disks.iter().filter_map(|disk| Some((&disk.name, disk.arrival.as_ref()?)));
    phases
        .extend(arriving.map(|(name, arrival)| format!("fetching disk {name}, {} left", bytes(arrival.missing_bytes))));
    if let Some(admission) = status.memory.admission.filter(|admission| admission.waiting > 0) {
        phases.push(format!("{} threads of QEMU wait for memory", admission.waiting));
    }
    phases
}

fn progress(percent: f64, eta_s: Option<f64>) -> String {
    let left = eta_s.map_or_else(String::new, |eta_s| format!(", {} left", uptime(eta_s)));
    format!("{percent:.0} %{left}")
}

fn dumps(status: &MachineStatus) -> Vec<String> {
    let dump = |dump: &hearth_api::DumpStatus| {
        let why = dump.why.as_ref().map(|why| format!(": {}", hidden(why))).unwrap_or_default();
        format!("incarnation {}, {}{why}, {}", dump.incarnation, dump.state.name(), dump.file)
    };
    status.dumps.iter().rev().map(dump).collect()
}

/// The commands that somebody who sees this wants next.
fn commands(machine: &Machine, hearth: &str) -> Vec<Command> {
    let Some(status) = machine.listed.status.as_ref().filter(|_| machine.silent_for.is_none()) else {
        return without_answer(machine, hearth);
    };
    let of = |does, verb: &str| of_hearth(machine, hearth, does, verb);
    let runs = status.state == MachineState::Running && !machine.attached;
    let mut commands = mending(machine, status, hearth);
    if runs {
        commands.push(of("connect to its console", "console NAME"));
    }
    commands.push(of("show its state", "status NAME"));
    commands.push(of("follow its events", "events NAME --follow"));
    if status.last_recovery.is_some() {
        commands.push(of("show the last recovery", "explain NAME"));
    }
    if runs {
        commands.push(of("reboot the guest", "reboot NAME"));
        commands.push(of("save it to a folder", "save NAME -o FOLDER"));
        commands.push(of("stop it", "stop NAME"));
    }
    commands
}

fn of_hearth(machine: &Machine, hearth: &str, does: &'static str, verb: &str) -> Command {
    Command { does, line: format!("{hearth} {verb}").replace("NAME", &machine.listed.name) }
}

fn of_virsh(machine: &Machine, does: &'static str, verb: &str) -> Command {
    Command { does, line: format!("virsh {verb} {}", machine.listed.name) }
}

/// Commands for a machine whose keeper does not answer, or that has none.
fn without_answer(machine: &Machine, hearth: &str) -> Vec<Command> {
    let of = |does, verb: &str| of_hearth(machine, hearth, does, verb);
    let start = || start_keeper(&Home::of(&machine.listed.name), hearth);
    let events = of("show what happened", "events NAME");
    match &machine.listed {
        _ if machine.state() == NO_ANSWER => vec![events],
        it if it.forbidden => Vec::new(),
        it if it.orphaned => vec![start()],
        it if it.parked.is_some() => vec![of("resume all parked guests", "host-reload resume")],
        it if it.failure.is_some() => vec![events, start()],
        _ if machine.attached => vec![of_virsh(machine, "start the domain", "start")],
        _ => vec![events],
    }
}

/// The commands that end what the machine waits for.
fn mending(machine: &Machine, status: &MachineStatus, hearth: &str) -> Vec<Command> {
    let of = |does, verb: &str| of_hearth(machine, hearth, does, verb);
    let is_paused = status.state == MachineState::Paused;
    // A domain between two guests waits for `hearth host`.
    let waits = status.next_start.is_some() || machine.attached && status.state == MachineState::Recovering;
    let mut commands = Vec::new();
    if status.dumps.iter().any(|dump| dump.state == DumpState::Waiting) {
        commands.push(of("continue the dump", "dump NAME --resume"));
        commands.push(of("give the dump up", "dump NAME --discard"));
    }
    if is_paused && status.save.is_some() {
        commands.push(of("cancel the save", "save NAME --cancel"));
    } else if is_paused && machine.attached {
        commands.push(of_virsh(machine, "end the guest", "destroy"));
    } else if waits && machine.attached {
        commands.push(of_virsh(machine, "start the next guest now", "start"));
    } else if is_paused || waits {
        commands.push(of("start the next guest now", "reboot NAME"));
        commands.push(of("stop it", "stop NAME"));
    }
    commands
}

/// A unit of systemd runs machines whose file is where that looks for it, and under the runtime root that `hearth` has by itself.
fn start_keeper(home: &Home, hearth: &str) -> Command {
    let line = if hearth != HEARTH || !home.file().exists() {
        format!("{hearth} run FILE")
    } else {
        let user = if rustix::process::geteuid().is_root() { "" } else { "--user " };
        // A machine may have the name `web.service`.
        format!("systemctl {user}start hearth@{}.service", home.name())
    };
    Command { does: "start its keeper", line }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use hearth_api::EventKind;
    use rustix::process::{Uid, geteuid};

    use super::*;
    use crate::cli::host::web::metrics_text;
    use crate::cli::survey::Collector;
    use crate::cli::survey::fake::Keepers;
    use crate::event_log::EventLog;

    #[test]
    fn machine_that_failed_is_red_and_says_why() {
        let keepers = Keepers::start(&[]);
        let folder = keepers.root().machine("web");
        std::fs::create_dir(&folder).unwrap();
        let view = || View::of(&Collector::new(keepers.root()).survey(), &keepers.root()).machines[0].clone();
        assert_eq!((view().state.as_str(), view().tone), ("not running", Tone::Off));
        let log = EventLog::open("web", &folder).unwrap();
        log.record(EventKind::Error { message: "disk vda: no such file".to_owned() });
        log.record_state(MachineState::Failed);
        let web = view();
        assert_eq!(
            (web.state.as_str(), web.tone, web.now),
            ("failed", Tone::Bad, vec!["disk vda: no such file".to_owned()])
        );
        let metrics = metrics_text(&Collector::new(keepers.root()));
        assert!(metrics.contains("hearth_machine_failed{machine=\"web\"} 1\n"), "{metrics}");
    }

    #[test]
    fn failure_is_not_over_while_the_next_keeper_starts() {
        let keepers = Keepers::start(&["web"]);
        let log = EventLog::open("web", &keepers.root().machine("web")).unwrap();
        log.record(EventKind::Error { message: "QEMU does not answer".to_owned() });
        log.record_state(MachineState::Failed);
        log.record(EventKind::Started { pid: 1, version: "1".to_owned() });
        let check = |state, tone, failed| {
            keepers.enter("web", state);
            let collector = Collector::new(keepers.root());
            let metrics = metrics_text(&collector);
            assert!(metrics.contains(&format!("hearth_machine_failed{{machine=\"web\"}} {failed}\n")), "{metrics}");
            let web = View::of(&collector.survey(), &keepers.root()).machines[0].clone();
            assert_eq!((web.state.as_str(), web.tone), (state.name(), tone));
            assert_eq!(web.now[0] == "the last keeper failed: QEMU does not answer", failed == 1, "{:?}", web.now);
        };
        check(MachineState::Starting, Tone::Bad, 1);
        check(MachineState::Running, Tone::Good, 0);
    }

    /// A thread that root starts becomes another user.
    #[test]
    fn another_users_machine_is_not_said_to_be_off() {
        let keepers = Keepers::start(&["web"]);
        let mode = |folder: &Path, mode| std::fs::set_permissions(folder, Permissions::from_mode(mode)).unwrap();
        mode(keepers.root().path(), 0o755);
        mode(&keepers.root().machine("web"), if geteuid().is_root() { 0o700 } else { 0 });
        let look = || {
            if geteuid().is_root() {
                rustix::thread::set_thread_uid(Uid::from_raw(65534)).unwrap();
            }
            let collector = Collector::new(keepers.root());
            (View::of(&collector.survey(), &keepers.root()), metrics_text(&collector))
        };
        let (view, metrics) = std::thread::scope(|scope| scope.spawn(look).join().unwrap());
        let web = &view.machines[0];
        assert_eq!((web.state.as_str(), web.tone, &web.commands[..]), ("no permission", Tone::Busy, &[][..]));
        assert!(metrics.contains("hearth_machine_forbidden{machine=\"web\"} 1\n"), "{metrics}");
    }

    #[test]
    fn dead_keeper_is_started_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let home = Home::in_folder("web", folder.path());
        let line = |hearth: &str| start_keeper(&home, hearth).line;
        assert_eq!(line("hearth"), "hearth run FILE");
        std::fs::create_dir(folder.path().join("etc")).unwrap();
        std::fs::write(home.file(), "").unwrap();
        assert!(line("hearth").ends_with(" start hearth@web.service"), "{}", line("hearth"));
        assert_eq!(line("hearth --runtime-root /run/x"), "hearth --runtime-root /run/x run FILE");
    }

    #[test]
    fn view_shows_what_is_going_on_and_the_next_command() {
        let keepers = Keepers::start(&["web"]);
        let survey = Collector::new(keepers.root()).survey();
        let view = View::of(&survey, &keepers.root());
        let web = &view.machines[0];
        assert_eq!((web.state.as_str(), web.tone), ("running", Tone::Good));
        assert_eq!(web.now[0], "dumping, 25 %, 3 s left");
        assert!(web.events[0].ends_with("guest panicked"), "{:?}", web.events);
        let console = format!("hearth --runtime-root {} console web", keepers.root().path().display());
        assert!(web.commands.iter().any(|command| command.line == console), "{:?}", web.commands);
    }
    fn machine(attached: bool, change: impl FnOnce(&mut MachineStatus)) -> Machine {
        let keepers = Keepers::start(&["web"]);
        let mut machine = Collector::new(keepers.root()).survey().machines[0].clone();
        machine.attached = attached;
        change(machine.listed.status.as_mut().unwrap());
        machine
    }

    #[test]
    fn trouble_of_a_running_guest_is_shown_first_and_in_red() {
        let full = |status: &mut MachineStatus| {
            status.disks[0].waiting_for_space = 3;
            status.restore.as_mut().unwrap().waits.push("s3://bucket/web/memory: connection refused".to_owned());
        };
        let web = MachineView::of(&machine(false, full), "hearth");
        assert_eq!((web.state.as_str(), web.runs, web.tone), ("running", true, Tone::Bad));
        let expect = [
            "disk root: 3 requests wait for space",
            "a part of the snapshot cannot be loaded: [address]: connection refused",
            "dumping, 25 %, 3 s left",
        ];
        assert_eq!(web.now[..3], expect);
        assert_eq!(web.disks[0].problem.as_deref(), Some("3 requests wait for space"));
        assert!(web.commands.iter().any(|command| command.line == "hearth console web"), "{:?}", web.commands);
    }

    #[test]
    fn machine_that_waits_for_somebody_has_the_command_that_ends_it() {
        let check = |attached, change: fn(&mut MachineStatus), expect: &[&str]| {
            let web = MachineView::of(&machine(attached, change), "hearth");
            let lines: Vec<_> = web.commands.iter().map(|command| command.line.as_str()).collect();
            assert_eq!((web.tone, &lines[..expect.len()]), (Tone::Bad, expect));
            assert!(!attached || !lines.iter().any(|line| line.contains("reboot")), "{lines:?}");
        };
        let paused = |status: &mut MachineStatus| status.state = MachineState::Paused;
        let loops = |status: &mut MachineStatus| {
            (status.state, status.next_start) = (MachineState::Recovering, Some("2026-03-01T12:00:09.000Z".to_owned()));
        };
        let start_or_stop = ["hearth reboot web", "hearth stop web"];
        check(false, paused, &start_or_stop);
        check(false, loops, &start_or_stop);
        check(true, paused, &["virsh destroy web"]);
        check(true, loops, &["virsh start web"]);
        let waits = |status: &mut MachineStatus| status.dumps[0].state = DumpState::Waiting;
        check(false, waits, &["hearth dump web --resume", "hearth dump web --discard"]);
    }
}
