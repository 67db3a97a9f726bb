//! Load generator: one client that asks for the same files in turn, one by one, and notes when each answer was whole.
//!
//! serving -> (told of an outage, or the connection breaks) -> probing -> first 200 -> serving
//!
//! One closed-loop client, as httperf in the paper, so that requests per second follow latency. While the service is
//! away it probes for a small page every 20 ms with a fresh connection each, so the moment of return is known to that.

pub mod http;
#[cfg(test)]
pub mod testing;
pub mod trace;

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http::Client;
use trace::{Sample, Trace};

/// A file may take this long: a cold 1 MiB file behind 200 IOPS takes a tenth of it.
const FILE_PATIENCE: Duration = Duration::from_secs(10);
/// A probe that is not answered by now went to a guest that was not there yet: ask again on a new connection.
const PROBE_PATIENCE: Duration = Duration::from_millis(250);
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{address} did not serve within {} s{}", .after.as_secs(), last_text(.last))]
    NotBack { address: SocketAddr, after: Duration, last: Option<String> },
    #[error("{path} on {address}: {what}")]
    Fetch { address: SocketAddr, path: String, what: String },
    #[error("cannot start the load generator's thread")]
    Thread(#[source] std::io::Error),
}

fn last_text(last: &Option<String>) -> String {
    last.as_ref().map_or_else(String::new, |last| format!("; the last attempt: {last}"))
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Targets {
    pub address: SocketAddr,
    /// A small page, to see whether the service is there.
    pub probe: String,
    pub files: Vec<String>,
}

#[derive(Default)]
struct Progress {
    samples: Vec<Sample>,
    /// Counts the outages announced; the client compares it with what it has dealt with.
    outages: u32,
    /// Since when it serves again after the outage of that number.
    back: Option<(u32, f64)>,
    last_failure: Option<String>,
    stopping: bool,
}

struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
    zero: Instant,
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect("no holder of this lock panics")
    }

    fn now_s(&self) -> f64 {
        self.zero.elapsed().as_secs_f64()
    }
}

/// Runs on a thread of its own until stopped.
pub struct Load {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    pub fn start(targets: Targets) -> Result<Self, LoadError> {
        let shared = Arc::new(Shared { progress: Mutex::default(), changed: Condvar::new(), zero: Instant::now() });
        let address = targets.address;
        let worker = Worker { shared: shared.clone(), client: Client::new(address), targets, next: 0, dealt_with: 0 };
        let thread = std::thread::Builder::new().name("load".into()).spawn(move || worker.run());
        Ok(Load { shared, address, thread: Some(thread.map_err(LoadError::Thread)?) })
    }

    pub fn now_s(&self) -> f64 {
        self.shared.now_s()
    }

    /// The machine is down: drops the request in hand and looks for the service's return. Not to be called before it is
    /// down, or a probe would still find the old service and take it for the new one.
    pub fn announce_outage(&self) {
        self.shared.progress().outages += 1;
    }

    /// Waits for the first 200 after the last announced outage (or after the start); returns its time.
    pub fn wait_back(&self, patience: Duration) -> Result<f64, LoadError> {
        let progress = self.shared.progress();
        let away = |progress: &mut Progress| progress.back.is_none_or(|(outage, _)| outage != progress.outages);
        let (progress, _) =
            self.shared.changed.wait_timeout_while(progress, patience, away).expect("no holder of this lock panics");
        match progress.back {
            Some((outage, at_s)) if outage == progress.outages => Ok(at_s),
            _ => {
                let last = progress.last_failure.clone();
                Err(LoadError::NotBack { address: self.address, after: patience, last })
            }
        }
    }

    /// Lets the load go on until this time.
    pub fn run_until(&self, at_s: f64) {
        std::thread::sleep(Duration::from_secs_f64((at_s - self.now_s()).max(0.0)));
    }

    /// Requests that were answered so far.
    pub fn answered(&self) -> usize {
        self.shared.progress().samples.len()
    }

    /// What was seen so far.
    pub fn trace(&self) -> Trace {
        Trace { samples: self.shared.progress().samples.clone() }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.shared.progress().stopping = true;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Worker {
    shared: Arc<Shared>,
    client: Client,
    targets: Targets,
    next: usize,
    dealt_with: u32,
}

impl Worker {
    fn run(mut self) {
        let mut serving = false;
        while !self.shared.progress().stopping {
            serving = if serving { self.fetch_next() } else { self.probe() };
        }
    }

    /// True if the service answered: then that moment is noted, for the newest outage known before the probe was sent.
    fn probe(&mut self) -> bool {
        self.dealt_with = self.shared.progress().outages;
        let failure = probe(&mut self.client, &self.targets.probe, &|| self.shared.progress().stopping);
        let mut progress = self.shared.progress();
        match failure {
            None if progress.outages == self.dealt_with => {
                if progress.back.is_none_or(|(outage, _)| outage != self.dealt_with) {
                    progress.back = Some((self.dealt_with, self.shared.now_s()));
                }
                self.shared.changed.notify_all();
                true
            }
            failure => {
                progress.last_failure = failure;
                drop(progress);
                std::thread::sleep(PROBE_INTERVAL);
                false
            }
        }
    }

    fn fetch_next(&mut self) -> bool {
        let path = &self.targets.files[self.next];
        let begun_s = self.shared.now_s();
        let (shared, dealt_with) = (self.shared.clone(), self.dealt_with);
        let give_up = move || {
            let progress = shared.progress();
            progress.stopping || progress.outages != dealt_with
        };
        let outcome = self.client.get(path, FILE_PATIENCE, &give_up);
        let mut progress = self.shared.progress();
        let answered = outcome.is_ok();
        match outcome {
            Ok(answer) if answer.status == 200 => {
                let bytes = answer.body.len() as u64;
                progress.samples.push(Sample { begun_s, ended_s: self.shared.now_s(), bytes });
                self.next = (self.next + 1) % self.targets.files.len();
            }
            Ok(answer) => progress.last_failure = Some(format!("{path}: status {}", answer.status)),
            Err(error) => progress.last_failure = Some(format!("{path}: {error}")),
        }
        answered && progress.outages == self.dealt_with
    }
}

/// Waits for the first 200 without loading the service; the clock is the caller's.
pub fn wait_for_service(targets: &Targets, patience: Duration) -> Result<(), LoadError> {
    let (mut client, begun) = (Client::new(targets.address), Instant::now());
    loop {
        let Some(failure) = probe(&mut client, &targets.probe, &|| false) else { return Ok(()) };
        if begun.elapsed() >= patience {
            return Err(LoadError::NotBack { address: targets.address, after: patience, last: Some(failure) });
        }
        std::thread::sleep(PROBE_INTERVAL);
    }
}

/// One probe on a connection of its own; what was wrong, if anything.
fn probe(client: &mut Client, path: &str, give_up: &dyn Fn() -> bool) -> Option<String> {
    client.disconnect();
    match client.get(path, PROBE_PATIENCE, give_up) {
        Ok(answer) if answer.status == 200 => None,
        Ok(answer) => Some(format!("status {}", answer.status)),
        Err(error) => Some(error.to_string()),
    }
}

/// Fetches every file once and hands it to `check` with its number.
pub fn fetch_all(targets: &Targets, mut check: impl FnMut(usize, &[u8])) -> Result<(), LoadError> {
    let mut client = Client::new(targets.address);
    for (number, path) in targets.files.iter().enumerate() {
        let failed = |what: String| LoadError::Fetch { address: targets.address, path: path.clone(), what };
        let answer = client.get(path, FILE_PATIENCE, &|| false).map_err(|error| failed(error.to_string()))?;
        if answer.status != 200 {
            return Err(failed(format!("status {}", answer.status)));
        }
        check(number, answer.body);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::testing::{Script, Server};
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn targets(address: SocketAddr) -> Targets {
        Targets { address, probe: "/".into(), files: vec!["/a".into(), "/b".into()] }
    }

    fn wait_for_samples(load: &Load, more_than: usize) -> usize {
        loop {
            let seen = load.trace().samples.len();
            if seen > more_than {
                return seen;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn after_an_outage_it_finds_the_service_again() {
        let server = Server::start(Script::Files { bytes: 1000 });
        let load = Load::start(targets(server.address())).unwrap();
        let first = load.wait_back(PATIENCE).unwrap();
        wait_for_samples(&load, 3);
        let crashed = load.now_s();
        server.cut();
        load.announce_outage();
        let back = load.wait_back(PATIENCE).unwrap();
        assert!(first < crashed && crashed <= back, "{first} {crashed} {back}");
        let seen = load.trace().samples.len();
        wait_for_samples(&load, seen);
    }

    #[test]
    fn a_service_that_never_comes_is_an_error_with_the_reason() {
        let server = Server::start(Script::NotFound);
        let load = Load::start(targets(server.address())).unwrap();
        let text = load.wait_back(Duration::from_millis(300)).unwrap_err().to_string();
        assert_eq!(text, format!("{} did not serve within 0 s; the last attempt: status 404", server.address()));
    }

    #[test]
    fn waiting_for_a_service_ends_with_it_or_with_the_reason() {
        let server = Server::start(Script::Files { bytes: 5 });
        wait_for_service(&targets(server.address()), PATIENCE).unwrap();
        let server = Server::start(Script::NotFound);
        let text = wait_for_service(&targets(server.address()), Duration::ZERO).unwrap_err().to_string();
        assert!(text.ends_with("the last attempt: status 404"), "{text}");
    }

    #[test]
    fn failed_requests_are_not_counted() {
        let server = Server::start(Script::HalfBody);
        assert!(fetch_all(&targets(server.address()), |_, _| ()).is_err());
        let load = Load::start(targets(server.address())).unwrap();
        assert!(load.wait_back(Duration::from_millis(100)).is_err());
        assert!(load.trace().samples.is_empty());
    }

    #[test]
    fn every_file_is_handed_over_once() {
        let server = Server::start(Script::Files { bytes: 7 });
        let mut seen = Vec::new();
        fetch_all(&targets(server.address()), |number, body| seen.push((number, body.len()))).unwrap();
        assert_eq!(seen, [(0, 7), (1, 7)]);
    }
}
