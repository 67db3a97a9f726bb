//! `hearth run`: the keeper of one machine, from its start until the machine has stopped.
//!
//! lock -> QEMU and accelerator -> console, events, API -> machine -> its event loop -> stopped

use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use hearth_qemu::{Binary, BinaryError, accelerator};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::config::{Config, ConfigFile};
use crate::console::Hub;
use crate::control::Control;
use crate::event::Event;
use crate::event_log::EventLog;
use crate::http::{Context, Server};
use crate::machine::restore::RestoreOrder;
use crate::machine::{FolderError, Folders, Machine, MachineError, Parts};
use crate::notify::{Notice, notify};
use crate::unix_socket::ListenError;

/// Clients that still wait for an answer when the machine has stopped.
const FAREWELL_PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error(transparent)]
    Binary(#[from] BinaryError),
    #[error(transparent)]
    Accelerator(#[from] accelerator::AcceleratorError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("the event log cannot be opened")]
    EventLog(#[source] std::io::Error),
    #[error("signals cannot be caught")]
    Signals(#[source] std::io::Error),
    #[error("{file}: was changed meanwhile: {what}")]
    Configuration { file: std::path::PathBuf, what: String },
    #[error(transparent)]
    Machine(#[from] MachineError),
}

/// Looks after a machine until it has stopped.
pub fn run(config: Config, restore: Option<RestoreOrder>) -> ExitCode {
    let name = config.name.clone();
    match keep(config, restore) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hearth: {name}: {}", crate::chain(&error));
            ExitCode::FAILURE
        }
    }
}

fn keep(config: Config, restore: Option<RestoreOrder>) -> Result<(), RunError> {
    let folders = Folders::prepare(&config.name, &config.runtime_folder, &config.memory_folder)?;
    let binary = Binary::find(config.qemu.as_deref())?;
    let (wanted, cpu_model) = (config.accelerator.into(), config.cpu_model.as_deref());
    let accelerator = accelerator::choose_once(&binary, wanted, cpu_model, &folders.runtime)?;
    tracing::info!(
        machine = config.name,
        qemu = %binary.version(),
        accelerator = accelerator.accelerator.name(),
        why = accelerator.why,
        "starting"
    );
    let event_log = EventLog::open(&config.name, &folders.runtime).map_err(RunError::EventLog)?;
    let console = Hub::start(&folders.runtime.join("console.sock"))?;
    let (tell, events) = channel();
    let context = Context {
        control: control(tell.clone()),
        events: event_log.clone(),
        config: serde_json::to_value(&config).expect("a configuration is plain data"),
    };
    let server = Server::start(&folders.runtime.join("api.sock"), context)?;
    listen_to_signals(tell.clone())?;
    let typed = ConfigFile::load(&config.file).map_err(|problems| RunError::Configuration {
        file: config.file.clone(),
        what: problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
    })?;
    let parts =
        Parts { config, typed, restore, folders, binary, accelerator, event_log: event_log.clone(), console, tell };
    let ended = Machine::start(parts).and_then(|machine| {
        notify(&Notice::Ready);
        machine.run(&events)
    });
    notify(&Notice::Stopping);
    event_log.close();
    server.finish(FAREWELL_PATIENCE);
    Ok(ended?)
}

fn control(tell: Sender<Event>) -> Control {
    Control::new(move |command, answer| {
        // A loop that has ended drops the question, and the asker learns that.
        let _ = tell.send(Event::Request { command, answer });
    })
}

fn listen_to_signals(tell: Sender<Event>) -> Result<(), RunError> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).map_err(RunError::Signals)?;
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            for _ in &mut signals {
                if tell.send(Event::Terminate).is_err() {
                    return;
                }
            }
        })
        .map_err(RunError::Signals)?;
    Ok(())
}
