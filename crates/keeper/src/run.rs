//! `hearth run`: the keeper of one machine, from its start until the machine has stopped.
//!
//! QEMU and accelerator -> console, events, API -> machine -> its event loop -> stopped

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hearth_api::{EventKind, MachineState, Order};
use hearth_qemu::{Accelerator, AcceleratorChoice, Binary, BinaryError, accelerator};
use hearth_recovery::journal::QemuIdentity;
use plain_text::printable;
use rustix::fs::Mode;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::check::life;
use crate::config::{Config, Configured, InForce, Owner};
use crate::console::Hub;
use crate::control::{Command, Control, LastAnswer};
use crate::event::Event;
use crate::event_log::EventLog;
use crate::failure;
use crate::folders::Folders;
use crate::http::{Context, Server};
use crate::machine::attached::Attached;
use crate::machine::inherited_locks::InheritedLocks;
use crate::machine::lazy_restore::RestoreOrder;
use crate::machine::{self, ConfigurationFile, End, Machine, MachineError, Next, Outside, QemuChoice, load_journal};
use crate::notify::{Notice, notify};
use crate::runtime_root::RuntimeRoot;
use crate::unix_socket::ListenError;
use crate::upgrade::{Inheritance, Successor};
use crate::watchdog::{Watchdog, WatchdogContext, end_with_any_thread};

/// Time for clients that still wait for an answer when the machine has stopped.
const FAREWELL_PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error(transparent)]
    Accelerator(#[from] accelerator::AcceleratorError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot open the event log")]
    EventLog(#[source] std::io::Error),
    #[error("cannot start the watchdog's thread")]
    Watchdog(#[source] std::io::Error),
    #[error("cannot catch signals")]
    Signals(#[source] std::io::Error),
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// The configurations that a keeper starts with.
pub struct Start {
    /// Checked.
    pub in_force: InForce,
    /// Locked.
    pub folders: Folders,
    pub root: RuntimeRoot,
    /// A snapshot to restore instead of booting.
    pub restore: Option<RestoreOrder>,
    pub inheritance: Inheritance,
}

/// Supervises a machine until it has stopped, or until this process becomes another keeper.
pub fn run(start: Start) -> ExitCode {
    end_with_any_thread();
    let name = start.in_force.now.config.name.clone();
    let Start { in_force, folders, root, restore, mut inheritance } = start;
    let runtime = folders.runtime.clone();
    match keep(in_force, folders, root, restore, &mut inheritance) {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(successor)) => {
            let error = successor.start();
            eprintln!("hearth: cannot start a keeper for {name}, whose QEMU keeps running: {error}");
        }
        Err(error) => {
            let why = crate::chain(&error);
            inheritance.give_back(&why);
            failure::record(&name, &runtime, &why);
            eprintln!("hearth: {name}: {}", printable(&why));
        }
    }
    ExitCode::FAILURE
}

/// The program that takes the machine over, if it has not stopped.
fn keep(
    in_force: InForce,
    folders: Folders,
    root: RuntimeRoot,
    restore: Option<RestoreOrder>,
    inheritance: &mut Inheritance,
) -> Result<Option<Successor>, RunError> {
    // The machine, its console and its API remove files when they end. A keeper that waits for the lock makes its own.
    let locked = folders.clone();
    let InForce { mut now, next, pending, misread, qemu } = in_force;
    // All files created from here on are for this user alone, also in the runtime folder, which QEMU's user may
    // traverse.
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
    let owner = now.config.owner;
    let (binary, chosen) = match owner {
        Owner::Hearth => choose_qemu(&mut now, next.as_deref(), qemu, &folders)?,
        // libvirt has its own.
        Owner::Libvirt => (None, AcceleratorChoice { accelerator: Accelerator::Kvm, why: "libvirt's".to_owned() }),
    };
    let Configured { config, typed } = now;
    let accelerator = accelerator_in_use(&config.name, &folders, binary.as_ref(), &chosen);
    let event_log = open_event_log(&config.name, &folders, inheritance.take_failure(), misread)?;
    let console = Hub::start(&folders.runtime.join("console.sock"))?;
    let (tell, events) = channel();
    let last_answer = LastAnswer::default();
    let watchdog = start_watchdog(&config.name, &folders, &event_log)?;
    let shown_config = Arc::new(Mutex::new(serde_json::to_value(&config).expect("a configuration is plain data")));
    // A keeper that hangs must not end a QEMU of libvirt's.
    let cuts = (owner == Owner::Hearth).then(|| watchdog.clone());
    let context = Context {
        control: control(tell.clone(), last_answer.clone(), cuts.clone()),
        events: event_log.clone(),
        config: shown_config.clone(),
    };
    let mut server = Server::start(&folders.runtime.join("api.sock"), context)?;
    let terminated = listen_to_signals(tell.clone(), cuts)?;
    let rehearses = restore.as_ref().and_then(|order| order.trace.as_ref()).is_some_and(|trace| trace.then_stop);
    let reach = reach(&config);
    let (log, started) = (event_log.clone(), Instant::now());
    let outside = Outside { event_log: log, watchdog, console, started, tell, terminated, last_answer };
    let next = Next { configured: next, accelerator: chosen, last: None };
    let context = machine::Context {
        journal: load_journal(&config, &folders, &root).map_err(MachineError::from)?,
        config,
        file: ConfigurationFile { typed, next, pending, shown: shown_config },
        folders,
        root,
        qemu: QemuChoice { binary, accelerator, locks: InheritedLocks::default(), given_up: Vec::new() },
        restore,
        rehearses,
        outside,
    };
    let mut tell_ready = |status: &str| {
        inheritance.forget_predecessor();
        notify(&Notice::Ready);
        notify(&Notice::Status(status.to_owned()));
    };
    let record = |error: &MachineError| {
        event_log.record(EventKind::Error { message: crate::chain(error) });
        event_log.record_state(MachineState::Failed);
    };
    let ended = match owner {
        Owner::Hearth => {
            let ready = || {
                tracing::info!("{reach}");
                tell_ready("its guest is running");
            };
            Machine::begin(context).inspect_err(record).and_then(|machine| machine.run(&events, ready))
        }
        Owner::Libvirt => Attached::begin(context)
            .inspect_err(record)
            .and_then(|attached| attached.run(&events, || tell_ready("ready to serve the domain's disks"))),
    };
    // Requests that arrive too late are refused now, not after their timeout.
    drop(events);
    if !matches!(ended, Ok(End::HandsOver { .. })) {
        notify(&Notice::Stopping);
    }
    event_log.close();
    server.stop_accepting();
    drop(locked);
    server.finish(FAREWELL_PATIENCE);
    match ended? {
        End::Stopped => Ok(None),
        End::HandsOver { machine, successor } => {
            machine.let_go();
            Ok(Some(successor))
        }
    }
}

/// How to reach the guest.
fn reach(config: &Config) -> String {
    let name = &config.name;
    let forwards = config.devices.nets.iter().flat_map(|net| net.backend.forward());
    let forwards: String = forwards.map(|forward| format!("; {}", forward.words())).collect();
    let screen = if config.guest.screen { format!("; screen: `hearth view {name}`") } else { String::new() };
    format!("{name}: its guest runs; console: `hearth console {name}`{screen}{forwards}")
}

/// The QEMU of the next start, and its accelerator; a guest without a machine type gets this QEMU's newest. `found`: as for
/// `find_qemu`.
fn choose_qemu(
    now: &mut Configured,
    next: Option<&Configured>,
    found: Option<Binary>,
    folders: &Folders,
) -> Result<(Option<Binary>, AcceleratorChoice), RunError> {
    let (binary, chosen) = match next {
        Some(next) => find_qemu(&next.config, None, folders)?,
        None => find_qemu(&now.config, found, folders)?,
    };
    if let (None, Some(binary)) = (&now.config.guest.machine_type, &binary) {
        now.or_machine_type(binary.newest_machine_type()?);
    }
    Ok((binary, chosen))
}

/// The accelerator of the running guest, which keeps what it was started with, or else the one chosen for the next QEMU.
fn accelerator_in_use(
    machine: &str,
    folders: &Folders,
    binary: Option<&Binary>,
    chosen: &AcceleratorChoice,
) -> AcceleratorChoice {
    let living = life::living_guest(&folders.runtime).and_then(|journal| journal.qemu);
    // Without either, libvirt has yet to start its QEMU.
    let is_known = living.is_some() || binary.is_some();
    let accelerator = living.map_or_else(|| chosen.clone(), |living| choice_of(&living));
    tracing::info!(
        machine,
        qemu = binary.map(|binary| binary.version().to_string()),
        accelerator = is_known.then(|| accelerator.accelerator.name()),
        why = is_known.then_some(accelerator.why.as_str()),
        "starting"
    );
    accelerator
}

/// Opens the event log, and records what went wrong before it was open.
fn open_event_log(
    machine: &str,
    folders: &Folders,
    failed_upgrade: Option<String>,
    misread: Option<String>,
) -> Result<EventLog, RunError> {
    let event_log = EventLog::open(machine, &folders.runtime).map_err(RunError::EventLog)?;
    if let Some(why) = failed_upgrade {
        event_log.record(EventKind::KeeperUpgradeFailed { why });
    }
    if let Some(message) = misread {
        event_log.record(EventKind::Error { message });
    }
    Ok(event_log)
}

fn start_watchdog(machine: &str, folders: &Folders, event_log: &EventLog) -> Result<Watchdog, RunError> {
    Watchdog::start(WatchdogContext {
        machine: machine.to_owned(),
        runtime_folder: folders.runtime.clone(),
        memory_folder: folders.memory.clone(),
        event_log: event_log.clone(),
    })
    .map_err(RunError::Watchdog)
}

/// The QEMU to start, and its accelerator. If a running QEMU is taken over, none needs to be installed. `found`: the check
/// before the start found it.
fn find_qemu(
    config: &Config,
    found: Option<Binary>,
    folders: &Folders,
) -> Result<(Option<Binary>, AcceleratorChoice), RunError> {
    let find = || {
        let binary = found.map_or_else(|| Binary::find(config.qemu.program.as_deref()), Ok)?;
        let (wanted, cpu_model) = (config.guest.accelerator, config.guest.cpu_model.as_deref());
        let accelerator = accelerator::choose_once(&binary, wanted, cpu_model, &folders.runtime)?;
        Ok((Some(binary), accelerator))
    };
    find().or_else(|error: RunError| {
        let Some(living) = life::living_qemu(&folders.runtime) else { return Err(error) };
        tracing::warn!(why = crate::chain(&error), "cannot start the next QEMU; taking over the running one");
        Ok((None, choice_of(&living)))
    })
}

fn choice_of(living: &QemuIdentity) -> AcceleratorChoice {
    let kvm = living.accelerator == Accelerator::Kvm.name();
    let accelerator = if kvm { Accelerator::Kvm } else { Accelerator::Tcg };
    AcceleratorChoice { accelerator, why: living.accelerator_why.clone() }
}

/// `cuts`: ends the machine if its loop does not take an order to stop.
fn control(tell: Sender<Event>, last_answer: LastAnswer, cuts: Option<Watchdog>) -> Control {
    let control = Control::new(move |command, answer| {
        if let (Command::Order(Order::Stop(request)), Some(watchdog)) = (&command, &cuts) {
            watchdog.ordered_to_stop(request.force);
        }
        // A loop that has ended drops the command, and the client gets an error.
        let _ = tell.send(Event::Request { command, answer });
    });
    control.or_last(last_answer)
}

/// Passes signals on to the loop. Returns a flag that is set when the first one arrives. `cuts`: as for `control`.
fn listen_to_signals(tell: Sender<Event>, cuts: Option<Watchdog>) -> Result<Arc<AtomicBool>, RunError> {
    let terminated = Arc::new(AtomicBool::new(false));
    let flag = terminated.clone();
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(RunError::Signals)?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for (nth, _) in signals.forever().enumerate() {
                flag.store(true, Relaxed);
                if let Some(watchdog) = &cuts {
                    watchdog.ordered_to_stop(nth > 0);
                }
                if tell.send(Event::Terminate).is_err() {
                    return;
                }
            }
        })
        .map_err(RunError::Signals)?;
    Ok(terminated)
}
