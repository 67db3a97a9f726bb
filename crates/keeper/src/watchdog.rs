//! Watchdog over the keeper's own threads: one that is dead or stuck ends the keeper, with its name, so that a service manager
//! starts the next one. The guest runs on, as it does whenever a keeper dies.
//!
//! ```text
//! a thread panics                                    -> its name in the log -> exit
//! a loop does not come back from one piece of work   -> its name in the log -> exit
//! the main loop does not take a stop request         -> QEMU is killed      -> exit
//! a loop hangs when QEMU has ended for a stop        ->                     -> exit
//! ```
//! Loops that others wait for have a heartbeat: the main loop and each disk's thread. What legitimately takes long is excused: the
//! disks of a restored guest, which wait for its memory. A thread that hangs in the kernel can hold up the end of the process;
//! nothing can be done about that.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_api::{EventKind, MachineState};
use hearth_disk::heartbeat::Heartbeat;
use hearth_recovery::incarnation::{discard_files, numbers_in};
use hearth_recovery::journal::{Journal, OrderNote};
use hearth_recovery::rejuvenation::parked;

use crate::check::life;
use crate::drill;
use crate::event_log::EventLog;
use crate::folders::memory_owner::qemus_of;
use crate::notify::{Notice, notify};

/// EX_SOFTWARE of sysexits.h.
pub const EXIT_CODE: i32 = 70;
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Time to write the last events; the hung thread may hold the log's lock.
const FAREWELL: Duration = Duration::from_millis(500);

/// Disk threads handle their own panics: the end of a server thread is an event, and a panic in an image's worker fails
/// only that image (`hearth_disk`).
const CONTAINED: &str = "disk-";

/// From now on a panic in any thread ends this process.
pub fn end_with_any_thread() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or("without a name");
        if !name.starts_with(CONTAINED) {
            die(name, "has panicked");
        }
    }));
}

fn die(thread: &str, what: &str) -> ! {
    tracing::error!(thread, "keeper thread {what}: the keeper ends and its guest keeps running");
    std::process::exit(EXIT_CODE);
}

/// How long a loop may be at one piece of work.
#[derive(Clone, Copy)]
struct Limits {
    main: Duration,
    disk: Duration,
    /// The main loop, once a stop request waits for it.
    stop: Duration,
    forced_stop: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            // Each wait of the main loop has its own limit (QMP 20 s, draining a disk 60 s), and an event has a few of them.
            main: Duration::from_secs(600),
            // A disk's thread does not wait for storage, except for writes to a file system without O_DIRECT.
            disk: Duration::from_secs(120),
            stop: Duration::from_secs(80),
            forced_stop: Duration::from_secs(10),
        }
    }
}

impl Limits {
    fn divided_by(self, watchdog_divisor: u32) -> Self {
        let Self { main, disk, stop, forced_stop } = self;
        Self {
            main: main / watchdog_divisor,
            disk: disk / watchdog_divisor,
            stop: stop / watchdog_divisor,
            forced_stop: forced_stop / watchdog_divisor,
        }
    }
}

/// Watches one machine's keeper. Clones share it.
#[derive(Clone, Default)]
pub struct Watchdog {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    limits: Limits,
    main: Heartbeat,
    disks: Mutex<Vec<(String, Heartbeat)>>,
    disks_excused: AtomicBool,
    stop: Mutex<Option<StopOrder>>,
}

#[derive(Clone, Copy)]
struct StopOrder {
    since: Instant,
    forced: bool,
}

/// Things that the thread needs apart from the heartbeats.
pub struct WatchdogContext {
    pub machine: String,
    pub runtime_folder: PathBuf,
    pub memory_folder: PathBuf,
    pub event_log: EventLog,
}

impl Watchdog {
    /// Starts the thread, which lives as long as the process.
    pub fn start(context: WatchdogContext) -> std::io::Result<Self> {
        let limits = Limits::default().divided_by(drill::watchdog_divisor());
        let watchdog = Self { shared: Arc::new(Shared { limits, ..Shared::default() }) };
        let watching = watchdog.clone();
        let name = format!("watchdog-{}", context.machine);
        std::thread::Builder::new().name(name).spawn(move || watching.run(&context))?;
        Ok(watchdog)
    }

    /// The heartbeat of the main loop.
    pub fn main(&self) -> &Heartbeat {
        &self.shared.main
    }

    pub fn watch_disk(&self, name: &str, heartbeat: Heartbeat) {
        self.shared.disks.lock().expect("nobody panics with it").push((name.to_owned(), heartbeat));
    }

    /// Sets whether the disks may wait for the guest's memory without limit.
    pub fn allow_disk_waits(&self, excused: bool) {
        self.shared.disks_excused.store(excused, Relaxed);
    }

    /// Announces a stop request. If the main loop does not handle it, the watchdog ends the machine.
    pub fn ordered_to_stop(&self, forced: bool) {
        let mut stop = self.shared.stop.lock().expect("nobody panics with it");
        let busy_for = self.shared.main.busy_for();
        match stop.as_mut() {
            // An earlier stop request is not handled yet either.
            Some(stop) if busy_for > stop.since.elapsed() => stop.forced |= forced,
            _ => *stop = Some(StopOrder { since: Instant::now(), forced }),
        }
    }

    fn run(&self, context: &WatchdogContext) {
        let alive_every = systemd_interval();
        let mut told = Instant::now();
        loop {
            std::thread::sleep(LOOK_EVERY);
            if let Some(why) = self.must_cut() {
                cut(context, &why);
            }
            if let Some((thread, busy_for)) = self.stuck() {
                let what = format!("has not responded for {} s", busy_for.as_secs());
                if is_stopping(context) {
                    cut(context, &format!("cannot stop normally: the keeper's thread {thread} {what}"));
                }
                die(&thread, &what);
            }
            if alive_every.is_some_and(|every| told.elapsed() >= every) {
                notify(&Notice::Alive);
                told = Instant::now();
            }
        }
    }

    /// A loop past its limit.
    fn stuck(&self) -> Option<(String, Duration)> {
        let (main, limits) = (self.shared.main.busy_for(), self.shared.limits);
        if main > limits.main {
            return Some(("main".to_owned(), main));
        }
        let mut disks = self.shared.disks.lock().expect("nobody panics with it");
        disks.retain(|(_, heartbeat)| !heartbeat.is_alone());
        if self.shared.disks_excused.load(Relaxed) {
            return None;
        }
        let mut stuck = disks.iter().map(|(name, heartbeat)| (format!("disk-{name}"), heartbeat.busy_for()));
        stuck.find(|(_, busy_for)| *busy_for > limits.disk)
    }

    /// Whether the main loop has been in one task since before the stop request, and for too long.
    fn must_cut(&self) -> Option<String> {
        let stop = (*self.shared.stop.lock().expect("nobody panics with it"))?;
        let waited = stop.since.elapsed();
        let limits = self.shared.limits;
        let limit = if stop.forced { limits.forced_stop } else { limits.stop };
        let hangs = waited > limit && self.shared.main.busy_for() > waited;
        hangs.then(|| {
            format!("cannot stop normally: the keeper's main loop has not responded for {} s", waited.as_secs())
        })
    }
}

/// Ends every QEMU of the machine, also one that a hop has just started, and the keeper.
fn cut(context: &WatchdogContext, why: &str) -> ! {
    let WatchdogContext { machine, runtime_folder, memory_folder, event_log, .. } = context;
    tracing::error!(machine, why, "killing its QEMU and ending the keeper");
    let recorded = life::living_qemu(runtime_folder).map(|qemu| qemu.pid);
    let pids: BTreeSet<_> = qemus_of(runtime_folder, memory_folder).into_iter().chain(recorded).collect();
    for pid in pids {
        if !hearth_qemu::kill_stray(pid) {
            tracing::error!(pid, "QEMU does not exit; the machine may not start");
        }
    }
    give_memory_back(runtime_folder, memory_folder);
    let (event_log, why) = (event_log.clone(), why.to_owned());
    let farewell = move || {
        event_log.record(EventKind::PowerCut { why });
        event_log.record(EventKind::StateChanged { from: MachineState::Stopping, to: MachineState::Stopped });
        event_log.close();
    };
    let _ = std::thread::Builder::new().name("farewell".to_owned()).spawn(farewell);
    std::thread::sleep(FAREWELL);
    std::process::exit(0)
}

/// A stop was requested and QEMU has ended. The next keeper has no guest to take over, and would start the machine.
fn is_stopping(WatchdogContext { runtime_folder, .. }: &WatchdogContext) -> bool {
    let journal = Journal::load(&runtime_folder.join("journal.json")).ok().flatten();
    let is_stop_wanted = journal.is_some_and(|journal| journal.ordered == Some(OrderNote::Stop));
    is_stop_wanted && life::living_guest(runtime_folder).is_none()
}

/// Removes the memory of guests that have ended, except what is still to be dumped. What else the machine keeps there, the
/// next keeper needs.
fn give_memory_back(runtime_folder: &Path, memory_folder: &Path) {
    if parked::is_there(memory_folder) {
        return;
    }
    let Ok(Some(journal)) = Journal::load(&runtime_folder.join("journal.json")) else { return };
    let is_dumped = |number: &u32| journal.dumps.iter().any(|note| note.incarnation == *number);
    let ended = numbers_in(memory_folder).into_iter().filter(|number| !is_dumped(number));
    ended.for_each(|number| discard_files(memory_folder, number));
}

/// Half of systemd's watchdog interval, if it watches this process (sd_watchdog_enabled(3)).
fn systemd_interval() -> Option<Duration> {
    let microseconds: u64 = std::env::var("WATCHDOG_USEC").ok()?.parse().ok()?;
    let meant = std::env::var("WATCHDOG_PID").map_or(true, |pid| pid == std::process::id().to_string());
    meant.then(|| Duration::from_micros(microseconds / 2))
}

#[cfg(test)]
mod tests {
    use hearth_recovery::journal::DumpNote;

    use super::*;

    #[test]
    fn a_loop_past_its_limit_is_named() {
        let watchdog = Watchdog::default();
        assert_eq!(watchdog.stuck(), None);
        let disk = Heartbeat::default();
        watchdog.watch_disk("data", disk.clone());
        disk.begin();
        watchdog.main().begin();
        assert_eq!(watchdog.stuck(), None, "both have just begun");
        assert!(watchdog.must_cut().is_none());
        drop(disk);
        watchdog.stuck();
        assert!(watchdog.shared.disks.lock().unwrap().is_empty(), "a disk that is gone is not watched");
    }

    #[test]
    fn watchdog_stops_only_a_hung_main_loop() {
        let watchdog = Watchdog::default();
        let order = |seconds, forced| {
            let since = Instant::now() - Duration::from_secs(seconds);
            *watchdog.shared.stop.lock().unwrap() = Some(StopOrder { since, forced });
        };
        order(3600, true);
        assert!(watchdog.must_cut().is_none(), "it waits for events, so it has seen the order");
        watchdog.main().begin();
        assert!(watchdog.must_cut().is_none(), "what it is at began after the order");
        order(0, true);
        std::thread::sleep(Duration::from_millis(5));
        assert!(watchdog.must_cut().is_none(), "it has some time");
    }

    #[track_caller]
    fn check_left(dumps: &[u32], parked: bool, left: &[u32]) {
        let (runtime, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["ram-1", "ledger-1", "ram-2", "ledger-2", "nvram-log"] {
            std::fs::write(memory.path().join(name), "").unwrap();
        }
        if parked {
            std::fs::write(memory.path().join("parked.json"), "").unwrap();
        }
        let mut journal = Journal::new("web", 1 << 30);
        journal.dumps = dumps.iter().map(|number| DumpNote { incarnation: *number, file: None }).collect();
        journal.save(&runtime.path().join("journal.json")).unwrap();
        give_memory_back(runtime.path(), memory.path());
        assert_eq!(numbers_in(memory.path()).into_iter().collect::<Vec<_>>(), left);
        assert!(memory.path().join("nvram-log").exists());
    }

    #[test]
    fn memory_that_nobody_needs_is_given_back() {
        check_left(&[], false, &[]);
        check_left(&[1], false, &[1]);
        check_left(&[], true, &[1, 2]);
    }

    /// Environment variable with the name of the thread that panics.
    const PANICS: &str = "HEARTH_TEST_PANICS";

    /// Runs in its own process, through this test binary.
    fn end_with_panic_in(thread: &str) -> (Option<i32>, String) {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "--nocapture", "watchdog::tests::child_with_a_panic"]);
        command.env(PANICS, thread);
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    }

    #[test]
    fn a_thread_that_panics_ends_the_process() {
        for thread in ["memory-web", "save-web", "launch-web", "tell-1", "main"] {
            let (code, said) = end_with_panic_in(thread);
            assert_eq!(code, Some(EXIT_CODE), "{said}");
            assert!(said.contains(thread) && said.contains("provoked"), "{said}");
        }
        assert_eq!(end_with_panic_in("disk-web-qcow2").0, Some(0), "contained");
    }

    #[test]
    #[ignore = "run by another test, in a process of its own"]
    fn child_with_a_panic() {
        let Ok(name) = std::env::var(PANICS) else { return };
        end_with_any_thread();
        let thread = std::thread::Builder::new().name(name).spawn(|| panic!("provoked")).unwrap();
        assert!(thread.join().is_err());
        std::process::exit(0);
    }
}
