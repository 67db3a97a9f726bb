//! Keepers that only answer, for tests: the API's server with a status of `sample`.

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hearth_api::{ApiError, ErrorWord, EventKind, MachineState, MachineStatus};
use serde_json::json;
use tempfile::TempDir;

use crate::control::{Answer, Command, Control};
use crate::event_log::EventLog;
use crate::http::{Context, Server};
use crate::runtime_root::RuntimeRoot;
use crate::sample;

struct Fake {
    /// Time until it answers, in ms.
    delay_ms: AtomicU64,
    status: Mutex<MachineStatus>,
}

impl Fake {
    fn new(name: &str) -> Arc<Self> {
        let status = MachineStatus { name: name.to_owned(), ..sample::healthy() };
        Arc::new(Self { delay_ms: AtomicU64::new(0), status: Mutex::new(status) })
    }
}

/// Keepers in a runtime root of their own.
pub struct Keepers {
    folder: TempDir,
    /// Each with the keeper's lock.
    _servers: Vec<(Server, File)>,
    fakes: BTreeMap<String, Arc<Fake>>,
}

impl Keepers {
    pub fn start(names: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fakes: BTreeMap<String, Arc<Fake>> =
            names.iter().map(|name| ((*name).to_owned(), Fake::new(name))).collect();
        let server = |name: &&str| {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            let lock = File::create(folder.path().join(name).join("keeper.lock")).unwrap();
            lock.lock().unwrap();
            (serve(&RuntimeRoot::new(folder.path()), name, fakes[*name].clone()), lock)
        };
        let servers = names.iter().map(server).collect();
        Self { folder, _servers: servers, fakes }
    }

    pub fn root(&self) -> RuntimeRoot {
        RuntimeRoot::new(self.folder.path())
    }

    /// From now on this one takes so long for an answer.
    pub fn delay(&self, name: &str, delay: Duration) {
        self.fakes[name].delay_ms.store(delay.as_millis() as u64, Ordering::Relaxed);
    }

    /// From now on this is the state of this one's machine.
    pub fn enter(&self, name: &str, state: MachineState) {
        self.fakes[name].status.lock().unwrap().state = state;
    }

    /// From now on this one takes requests and does not answer them.
    pub fn hang(&self, name: &str) {
        self.delay(name, Duration::from_secs(60));
    }
}

fn saved(folder: String) -> EventKind {
    EventKind::Saved {
        folder,
        pages: 90_000,
        bytes: 100 << 20,
        pause_ms: 12.0,
        duration_ms: 3000.0,
        rounds: 2,
        settled: true,
        pages_held: 40,
        pages_on_disks: 0,
    }
}

fn serve(root: &RuntimeRoot, name: &str, fake: Arc<Fake>) -> Server {
    let events = EventLog::in_memory(name);
    let address = format!("s3://bucket/{name}");
    events.record(EventKind::RestoreWaits { why: format!("{address}/memory: connection refused") });
    events.record(saved(address));
    events.record(EventKind::GuestPanicked);
    let control = Control::new(move |command, reply| {
        std::thread::sleep(Duration::from_millis(fake.delay_ms.load(Ordering::Relaxed)));
        let answer = match command {
            Command::Status => {
                let mut status = fake.status.lock().unwrap();
                // Its disk is busy.
                status.disks[0].reads += 120;
                status.disks[0].read_warm_bytes += 480 << 10;
                Ok(Answer::Status(Box::new(status.clone())))
            }
            _ => Err(ApiError::new(ErrorWord::NotPossible, "a fake keeper")),
        };
        // The client may be gone.
        let _ = reply.send(answer);
    });
    let config = Arc::new(Mutex::new(json!({"name": name, "secret": "of the configuration"})));
    Server::start(&root.api_socket(name), Context { control, events, config }).unwrap()
}

/// For a measurement by hand: twenty keepers in the folder that HEARTH_FAKE_KEEPERS names, for a minute.
#[test]
#[ignore = "a measurement by hand"]
fn serve_twenty_keepers() {
    let Some(folder) = std::env::var_os("HEARTH_FAKE_KEEPERS") else { return };
    let names: Vec<String> = (1..=20).map(|number| format!("machine-{number:02}")).collect();
    let keepers = Keepers::start(&names.iter().map(String::as_str).collect::<Vec<_>>());
    std::os::unix::fs::symlink(keepers.root().path(), folder).unwrap();
    std::thread::sleep(Duration::from_secs(60));
}
