//! The page of all machines, and their metrics, over TCP. Everything can be read, and nothing changed.
//!
//! accept -> one thread a connection -> `Host` must be this host's -> answer -> close
//!
//! | path | answer |
//! |---|---|
//! | `/`, `/page.css`, `/page.js`, `/icon.svg` | the page, embedded in the program |
//! | `/machines` | what the page shows, once, as JSON |
//! | `/live` | the same once a second, as server-sent events |
//! | `/metrics` | Prometheus' text format |
//!
//! A site that a browser on this host visits can point a name of its own at 127.0.0.1 (DNS rebinding), and would then read the page
//! as its own. So a request by an unknown name is refused. Nothing answers with CORS headers.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime};

use crate::cli::survey::{Collector, Survey, View};
use crate::http::{CLIENTS_MAX, ReadError, Request, Slot, Slots, Stream};
use crate::metrics;
use crate::runtime_root::RuntimeRoot;

#[cfg(test)]
mod tests;

const CLIENT_PATIENCE: Duration = Duration::from_secs(10);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time between two messages of `/live`.
const LIVE_EVERY: Duration = Duration::from_secs(1);

/// The page is static; its script asks only this server.
const HEADERS: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
    connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
    X-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n\
    Cache-Control: no-store\r\nConnection: close\r\n";

#[derive(Debug, thiserror::Error)]
pub enum WebError {
    #[error(
        "other hosts can reach {address}, and the page has no password; use an address such as 127.0.0.1:{}, or add \
         --allow-remote", address.port()
    )]
    Remote { address: SocketAddr },
    #[error("cannot listen at {address}")]
    Listen { address: SocketAddr, source: io::Error },
}

impl WebError {
    /// Whether another process has the address for now, or this host does not have it yet.
    pub fn may_pass(&self) -> bool {
        let Self::Listen { source, .. } = self else { return false };
        matches!(source.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable)
    }
}

/// What the clients' threads share.
pub struct Web {
    collector: Arc<Collector>,
    root: RuntimeRoot,
    slots: Arc<Slots>,
    own_name: String,
    /// The last survey as JSON, for all followers.
    last: Mutex<Option<(Arc<Survey>, Arc<str>)>>,
}

/// Answer to a request: status, media type, body.
type Answer = (u16, &'static str, String);

/// Listens at this address, which must be one of this host's own unless others are allowed.
pub fn listen(address: SocketAddr, allow_remote: bool) -> Result<TcpListener, WebError> {
    if !address.ip().to_canonical().is_loopback() && !allow_remote {
        return Err(WebError::Remote { address });
    }
    TcpListener::bind(address).map_err(|source| WebError::Listen { address, source })
}

impl Web {
    pub fn new(collector: Arc<Collector>, root: RuntimeRoot) -> Arc<Self> {
        let own_name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Arc::new(Self { collector, root, slots: Arc::default(), own_name, last: Mutex::default() })
    }

    /// Serves clients for as long as the process lives.
    pub fn serve(self: &Arc<Self>, listener: &TcpListener) {
        loop {
            match listener.accept() {
                Ok((stream, _)) => self.begin(stream),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a client of the page");
                    // Most likely too many open files; retrying at once would only use up a processor.
                    thread::sleep(ACCEPT_PAUSE);
                }
            }
        }
    }

    fn begin(self: &Arc<Self>, mut stream: TcpStream) {
        let Some(slot) = self.slots.take() else {
            // The answer fits into the socket's buffer, and a client that is gone does not need it.
            let _ = send(&mut stream, text(503, &format!("too many clients: {CLIENTS_MAX} are connected")));
            return;
        };
        let web = self.clone();
        let spawned = thread::Builder::new().name("web-client".to_owned()).spawn(move || {
            if let Err(error) = web.answer(&slot, &mut stream) {
                tracing::debug!(%error, "a client of the page disconnected");
            }
            stream.close();
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot start a thread for a client of the page");
        }
    }

    fn answer(&self, slot: &Slot, stream: &mut TcpStream) -> io::Result<()> {
        Stream::set_write_timeout(stream, CLIENT_PATIENCE)?;
        let request = match Request::read(stream, CLIENT_PATIENCE) {
            Ok(request) => request,
            Err(ReadError::Refused(error)) => return send(stream, text(error.error.status(), &error.message)),
            Err(ReadError::Lost(error)) => return Err(error),
        };
        if !request.host.as_deref().is_some_and(|host| self.is_own(host)) {
            let what = "this host has another name; use its address, its own name or localhost";
            return send(stream, text(421, what));
        }
        if request.method != "GET" {
            return send(stream, text(405, "the page can only be read"));
        }
        match request.path.as_str() {
            "/live" if slot.follow() => self.follow(stream),
            "/live" => send(stream, text(503, "too many pages are open")),
            path => send(stream, self.file(path)),
        }
    }

    fn file(&self, path: &str) -> Answer {
        let embedded = |media_type, text: &str| (200, media_type, text.to_owned());
        match path {
            "/" => embedded("text/html; charset=utf-8", include_str!("page.html")),
            "/page.css" => embedded("text/css", include_str!("page.css")),
            "/page.js" => embedded("text/javascript", include_str!("page.js")),
            "/icon.svg" => embedded("image/svg+xml", include_str!("icon.svg")),
            "/machines" => embedded("application/json", &self.json()),
            "/metrics" => (200, metrics::MEDIA_TYPE, metrics_text(&self.collector)),
            _ => text(404, "there is no such page; the machines are at /"),
        }
    }

    /// Whether a request by this name is for this host: an address, which nobody can point elsewhere, or its own name.
    fn is_own(&self, host: &str) -> bool {
        if let Some(address) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            return address.0.parse::<Ipv6Addr>().is_ok();
        }
        let name = host.split_once(':').map_or(host, |(name, _)| name);
        name.parse::<IpAddr>().is_ok()
            || name.eq_ignore_ascii_case("localhost")
            || name.eq_ignore_ascii_case(&self.own_name)
    }

    /// Writes the machines once a second, until the client is gone.
    fn follow(&self, stream: &mut TcpStream) -> io::Result<()> {
        stream.write_all(format!("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{HEADERS}\r\n").as_bytes())?;
        loop {
            stream.write_all(format!("data: {}\n\n", self.json()).as_bytes())?;
            thread::sleep(LIVE_EVERY);
            if stream.has_hung_up()? {
                return Ok(());
            }
        }
    }

    fn json(&self) -> Arc<str> {
        let survey = self.collector.survey();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, json)) = last.as_ref().filter(|(of, _)| Arc::ptr_eq(of, &survey)) {
            return json.clone();
        }
        let view = View::of(&survey, &self.root);
        let json: Arc<str> = serde_json::to_string(&view).expect("what is shown is plain data").into();
        *last = Some((survey, json.clone()));
        json
    }
}

/// The metrics of all machines.
pub fn metrics_text(collector: &Arc<Collector>) -> String {
    let survey = collector.patient_survey();
    let seen: Vec<_> = survey.machines.iter().map(seen).collect();
    metrics::text_of_host(&seen, SystemTime::now())
}

fn seen(machine: &crate::cli::survey::Machine) -> metrics::Seen<'_> {
    let listed = &machine.listed;
    metrics::Seen {
        name: &listed.name,
        // An old status would look like a machine that stands still.
        status: listed.status.as_ref().filter(|_| machine.silent_for.is_none()),
        orphaned: listed.orphaned,
        silent: machine.silent_for.is_some(),
        parked: listed.parked.is_some(),
        failed: listed.failure.is_some(),
        forbidden: listed.forbidden,
    }
}

fn text(status: u16, text: &str) -> Answer {
    (status, "text/plain; charset=utf-8", format!("{text}\n"))
}

fn send(stream: &mut TcpStream, (status, media_type, body): Answer) -> io::Result<()> {
    let reason = match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        421 => "Misdirected Request",
        503 => "Service Unavailable",
        _ => "Bad Request",
    };
    let length = body.len();
    let head = format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {media_type}\r\nContent-Length: {length}\r\n{HEADERS}\r\n"
    );
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat())
}
