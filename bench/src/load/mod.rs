//! Load generator: one client that requests the same files in turn, one by one, and notes the time of each complete answer. With
//! a database, every other request is a query.
//!
//! serving -> (told of an outage, or the connection breaks) -> probing -> first 200 -> serving
//!
//! It is a single closed-loop client, like httperf in the paper, so requests per second follow latency. While the service is away
//! it probes a small page every 20 ms, each time on a new connection, so the time of return is known to 20 ms.

mod connection;
pub mod http;
pub mod queries;
pub mod sql;
#[cfg(test)]
pub mod testing;
pub mod trace;

use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use http::Client;
use trace::{Sample, Trace};

/// Time limit for a file; a cold file of 1 MiB behind 200 IOPS takes a tenth of it.
const FILE_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for a probe. A slower one reached a guest that was not ready; the next uses a new connection.
const PROBE_PATIENCE: Duration = Duration::from_millis(250);
const PROBE_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{address} did not serve within {} s{}", .after.as_secs(), last_text(.last))]
    NotBack { address: SocketAddr, after: Duration, last: Option<String> },
    #[error("{path} on {address}: {what}")]
    Fetch { address: SocketAddr, path: String, what: String },
    #[error("database at {address}")]
    Query { address: SocketAddr, source: sql::SqlError },
    #[error("cannot start the load generator's thread")]
    Thread(#[source] std::io::Error),
}

fn last_text(last: &Option<String>) -> String {
    last.as_ref().map_or_else(String::new, |last| format!("; the last attempt: {last}"))
}

/// The requests' targets.
#[derive(Clone, Debug)]
pub struct Targets {
    pub address: SocketAddr,
    /// A small page that shows whether the service is up.
    pub probe: String,
    pub files: Vec<String>,
    pub database: Option<Database>,
}

/// A database, and its queries in turn.
#[derive(Clone, Debug)]
pub struct Database {
    pub address: SocketAddr,
    pub queries: Vec<Query>,
    /// Number of queries, and of files, that one client requests; then the next client opens new connections.
    pub per_client: usize,
}

#[derive(Clone, Debug)]
pub struct Query {
    pub text: String,
    /// Expected columns of its row. Another answer does not count.
    pub expect: Vec<String>,
}

#[derive(Default)]
struct Progress {
    samples: Vec<Sample>,
    /// Number of announced outages; the client compares it with the number that it has handled.
    outages: u32,
    /// The last handled outage, and the time at which the service was back.
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

/// The load, which runs on its own thread until it is dropped.
pub struct Load {
    shared: Arc<Shared>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    pub fn start(targets: Targets) -> Result<Self, LoadError> {
        let shared = Arc::new(Shared { progress: Mutex::default(), changed: Condvar::new(), zero: Instant::now() });
        let address = targets.address;
        let (shared_too, client) = (shared.clone(), Client::new(address));
        let sql = targets.database.as_ref().map(|database| sql::Client::new(database.address));
        let worker = Worker { shared: shared_too, client, sql, targets, next: 0, dealt_with: 0 };
        let thread = std::thread::Builder::new().name("load".into()).spawn(move || worker.run());
        Ok(Load { shared, address, thread: Some(thread.map_err(LoadError::Thread)?) })
    }

    pub fn now_s(&self) -> f64 {
        self.shared.now_s()
    }

    /// Announces an outage: the client drops its request and waits for the service's return. Call it only once the machine is
    /// down; otherwise a probe could still reach the old service.
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

    /// Waits until this time.
    pub fn run_until(&self, at_s: f64) {
        std::thread::sleep(Duration::from_secs_f64((at_s - self.now_s()).max(0.0)));
    }

    /// Number of requests answered so far.
    pub fn answered(&self) -> usize {
        self.shared.progress().samples.len()
    }

    /// The trace so far.
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
    sql: Option<sql::Client>,
    targets: Targets,
    /// Number of the next request.
    next: usize,
    dealt_with: u32,
}

impl Worker {
    fn run(mut self) {
        let mut serving = false;
        while !self.shared.progress().stopping {
            serving = if serving { self.ask_next() } else { self.probe() };
        }
    }

    /// Probes once. If the service answered, notes the time for the newest outage that was known before the probe.
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

    fn ask_next(&mut self) -> bool {
        let begun_s = self.shared.now_s();
        let (shared, dealt_with) = (self.shared.clone(), self.dealt_with);
        let give_up = move || {
            let progress = shared.progress();
            progress.stopping || progress.outages != dealt_with
        };
        let outcome = match (&self.targets.database, &mut self.sql) {
            (Some(database), Some(client)) if self.next % 2 == 1 => {
                if (self.next / 2).is_multiple_of(database.per_client) {
                    self.client.disconnect();
                    client.disconnect();
                }
                let query = &database.queries[self.next / 2 % database.queries.len()];
                query_once(client, query, &give_up)
            }
            (database, _) => {
                let turn = if database.is_some() { self.next / 2 } else { self.next };
                fetch_once(&mut self.client, &self.targets.files[turn % self.targets.files.len()], &give_up)
            }
        };
        let mut progress = self.shared.progress();
        match outcome {
            Ok(Answered::Well { bytes }) => {
                progress.samples.push(Sample { begun_s, ended_s: self.shared.now_s(), bytes });
                self.next += 1;
                progress.outages == self.dealt_with
            }
            Ok(Answered::Badly { what }) => {
                progress.last_failure = Some(what);
                progress.outages == self.dealt_with
            }
            Err(what) => {
                progress.last_failure = Some(what);
                false
            }
        }
    }
}

/// An answer by a running service.
enum Answered {
    Well { bytes: u64 },
    Badly { what: String },
}

fn fetch_once(client: &mut Client, path: &str, give_up: &dyn Fn() -> bool) -> Result<Answered, String> {
    match client.get(path, FILE_PATIENCE, give_up) {
        Ok(answer) if answer.status == 200 => Ok(Answered::Well { bytes: answer.body.len() as u64 }),
        Ok(answer) => Ok(Answered::Badly { what: format!("{path}: status {}", answer.status) }),
        Err(error) => Err(format!("{path}: {error}")),
    }
}

fn query_once(client: &mut sql::Client, query: &Query, give_up: &dyn Fn() -> bool) -> Result<Answered, String> {
    match client.row(&query.text, FILE_PATIENCE, give_up) {
        Ok(row) if row == query.expect => {
            Ok(Answered::Well { bytes: row.iter().map(|column| column.len() as u64).sum() })
        }
        Ok(row) => Ok(Answered::Badly { what: format!("{}: answered {row:?}, not {:?}", query.text, query.expect) }),
        Err(error) => Err(format!("{}: {error}", query.text)),
    }
}

/// Waits for the first 200 without loading the service. The caller measures the time.
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

/// Probes once on a new connection. Returns the failure, if any.
fn probe(client: &mut Client, path: &str, give_up: &dyn Fn() -> bool) -> Option<String> {
    client.disconnect();
    match client.get(path, PROBE_PATIENCE, give_up) {
        Ok(answer) if answer.status == 200 => None,
        Ok(answer) => Some(format!("status {}", answer.status)),
        Err(error) => Some(error.to_string()),
    }
}

/// Fetches every file once, and calls `check` with its number and contents.
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
        Targets { address, probe: "/".into(), files: vec!["/a".into(), "/b".into()], database: None }
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
    fn load_resumes_after_an_outage() {
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
    fn absent_service_is_an_error_with_reason() {
        let server = Server::start(Script::NotFound);
        let load = Load::start(targets(server.address())).unwrap();
        let text = load.wait_back(Duration::from_millis(300)).unwrap_err().to_string();
        assert_eq!(text, format!("{} did not serve within 0 s; the last attempt: status 404", server.address()));
    }

    #[test]
    fn wait_for_service_returns_or_reports_reason() {
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
    fn fetch_all_checks_every_file_once() {
        let server = Server::start(Script::Files { bytes: 7 });
        let mut seen = Vec::new();
        fetch_all(&targets(server.address()), |number, body| seen.push((number, body.len()))).unwrap();
        assert_eq!(seen, [(0, 7), (1, 7)]);
    }
}
