//! FleetLock: asks the fleet's server for permission to reload this host, and reports when it is back.
//!
//! acquire: POST URL/v1/pre-reboot until 200, or the time is over; release: POST URL/v1/steady-state
//!
//! The protocol is Zincati's; airlock and others implement it. Both calls are idempotent.

use std::time::{Duration, Instant};

use hearth_store::shown;
use serde::{Deserialize, Serialize};
use ureq::Agent;

/// Timeout of one exchange.
const ANSWER_PATIENCE: Duration = Duration::from_secs(20);
/// Interval of retries after a refusal or a failed connection.
const ASK_EVERY: Duration = Duration::from_secs(5);
/// An error consists of two short texts.
const BODY_BYTES_MAX: u64 = 64 << 10;
const HEADER: &str = "fleet-lock-protocol";

/// The server, and this host's group and id.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FleetLock {
    /// Base URL of the server. It may contain a password, so print `shown` instead.
    pub url: String,
    pub group: String,
    /// This host's id at the server.
    pub id: String,
}

#[derive(Debug, thiserror::Error)]
pub enum FleetLockError {
    #[error("invalid fleet group {group:?}: use letters, digits, \".\" and \"-\"")]
    Group { group: String },
    #[error("this host's fleet id is empty; set one with --fleet-id")]
    Id,
    #[error("FleetLock server {url} refused: {value} ({kind})")]
    Refused { url: String, kind: String, value: String },
    #[error("{url} is not a FleetLock server: it answers with HTTP status {status}; check --fleet-lock")]
    NotUnderstood { url: String, status: u16 },
    #[error("cannot reach FleetLock server {url}: {why}; check --fleet-lock")]
    Unreachable { url: String, why: String },
}

#[derive(Serialize)]
struct Request<'a> {
    client_params: Params<'a>,
}

#[derive(Serialize)]
struct Params<'a> {
    id: &'a str,
    group: &'a str,
}

#[derive(Deserialize)]
struct Refusal {
    kind: String,
    value: String,
}

impl std::fmt::Debug for FleetLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { group, id, .. } = self;
        f.debug_struct("FleetLock").field("url", &self.shown()).field("group", group).field("id", id).finish()
    }
}

impl FleetLock {
    /// The server's URL without its password.
    pub fn shown(&self) -> String {
        shown(&self.url)
    }

    /// Waits until the server grants this host a slot.
    pub(crate) fn acquire(&self, wait: Duration) -> Result<(), FleetLockError> {
        self.post_until_success("v1/pre-reboot", wait)
    }

    /// Releases the slot. Retries a server that cannot be reached yet, as after a boot.
    pub fn release(&self, wait: Duration) -> Result<(), FleetLockError> {
        self.post_until_success("v1/steady-state", wait)
    }

    fn post_until_success(&self, route: &str, wait: Duration) -> Result<(), FleetLockError> {
        self.must_be_valid()?;
        let (agent, deadline) = (agent(), Instant::now() + wait);
        loop {
            let error = match self.post(&agent, route) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(error);
            }
            tracing::info!(route, why = crate::chain(&error), "retrying the FleetLock server");
            std::thread::sleep(left.min(ASK_EVERY));
        }
    }

    fn must_be_valid(&self) -> Result<(), FleetLockError> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
        if self.group.is_empty() || !self.group.bytes().all(known) {
            return Err(FleetLockError::Group { group: self.group.clone() });
        }
        if self.id.is_empty() { Err(FleetLockError::Id) } else { Ok(()) }
    }

    fn post(&self, agent: &Agent, route: &str) -> Result<(), FleetLockError> {
        let url = format!("{}/{route}", self.url.trim_end_matches('/'));
        let body = Request { client_params: Params { id: &self.id, group: &self.group } };
        let body = serde_json::to_vec(&body).expect("a request is plain data");
        let sent = agent.post(&url).header(HEADER, "true").content_type("application/json").send(&body[..]);
        let mut answer = match sent {
            Ok(answer) => answer,
            // The error may contain the URL.
            Err(error) => {
                let why = crate::chain(&error).replace(&url, &shown(&url));
                return Err(FleetLockError::Unreachable { url: shown(&url), why });
            }
        };
        // The protocol requires status 200.
        if answer.status() == 200 {
            return Ok(());
        }
        let status = answer.status().as_u16();
        let text = answer.body_mut().with_config().limit(BODY_BYTES_MAX).read_to_vec().unwrap_or_default();
        match serde_json::from_slice(&text) {
            Ok(Refusal { kind, value }) => Err(FleetLockError::Refused { url: shown(&url), kind, value }),
            Err(_) => Err(FleetLockError::NotUnderstood { url: shown(&url), status }),
        }
    }
}

/// TLS uses the host's trust store, because a fleet's server often has a certificate of its own CA.
fn agent() -> Agent {
    Agent::config_builder()
        .tls_config(hearth_store::trusting_the_host())
        .timeout_global(Some(ANSWER_PATIENCE))
        // Errors have a body. A server that redirects is not the right one.
        .http_status_as_error(false)
        .max_redirects(0)
        .build()
        .new_agent()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::thread::JoinHandle;

    use super::*;

    /// The protocol's example of a fleet whose slots are all taken.
    const FULL: &str = r#"{
  "kind": "failed_lock_semaphore_full",
  "value": "semaphore currently full, all slots are locked already"
}"#;

    /// Answers one connection after the other, and returns the requests: heads and bodies.
    fn server(answers: Vec<(u16, &'static str)>) -> (String, JoinHandle<Vec<(String, String)>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/base/", listener.local_addr().unwrap());
        let serve = move || {
            let answer = |(status, body): (u16, &str)| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                let mut head = String::new();
                while !head.ends_with("\r\n\r\n") {
                    reader.read_line(&mut head).unwrap();
                }
                let head = head.to_ascii_lowercase();
                let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
                let mut asked = vec![0; length.parse().unwrap()];
                reader.read_exact(&mut asked).unwrap();
                write!(
                    stream,
                    "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                    body.len()
                )
                .unwrap();
                (head, String::from_utf8(asked).unwrap())
            };
            answers.into_iter().map(answer).collect()
        };
        (url, std::thread::spawn(serve))
    }

    fn lock(url: String) -> FleetLock {
        FleetLock { url, group: "default".into(), id: "c988d2509fdf5cdcbed39037c56406fb".into() }
    }

    #[test]
    fn exchange_follows_the_protocol() {
        let (url, served) = server(vec![(200, ""), (200, "")]);
        let lock = lock(url);
        lock.acquire(Duration::ZERO).unwrap();
        lock.release(Duration::ZERO).unwrap();
        let asked = served.join().unwrap();
        for ((head, body), route) in asked.iter().zip(["pre-reboot", "steady-state"]) {
            assert!(head.starts_with(&format!("post /base/v1/{route} http/1.1\r\n")), "{head}");
            assert!(head.contains("\r\nfleet-lock-protocol: true\r\n"), "{head}");
            let body: serde_json::Value = serde_json::from_str(body).unwrap();
            let params = serde_json::json!({"group": "default", "id": "c988d2509fdf5cdcbed39037c56406fb"});
            assert_eq!(body, serde_json::json!({ "client_params": params }));
        }
    }

    #[test]
    fn refusal_shows_the_servers_reason() {
        let (url, served) = server(vec![(403, FULL)]);
        let error = lock(url).acquire(Duration::ZERO).unwrap_err().to_string();
        assert!(
            error.ends_with(
                "refused: semaphore currently full, all slots are locked already (failed_lock_semaphore_full)"
            ),
            "{error}"
        );
        served.join().unwrap();
    }

    #[test]
    fn a_place_that_comes_free_is_taken() {
        let (url, served) = server(vec![(403, FULL), (200, "")]);
        lock(url).acquire(Duration::from_millis(100)).unwrap();
        assert_eq!(served.join().unwrap().len(), 2);
    }

    #[test]
    fn slot_release_waits_for_a_late_server() {
        let (url, served) = server(vec![(500, "starting"), (200, "")]);
        lock(url).release(Duration::from_millis(100)).unwrap();
        assert_eq!(served.join().unwrap().len(), 2);
    }

    #[test]
    fn foreign_server_grants_no_lock() {
        for (status, body) in [(204, ""), (302, ""), (500, "<html>"), (404, r#"{"error": "no"}"#)] {
            let (url, served) = server(vec![(status, body)]);
            let error = lock(url).acquire(Duration::ZERO).unwrap_err().to_string();
            assert!(error.contains(&format!("it answers with HTTP status {status};")), "{error}");
            served.join().unwrap();
        }
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let error = lock(format!("http://{closed}")).release(Duration::ZERO).unwrap_err();
        assert!(matches!(error, FleetLockError::Unreachable { .. }), "{error}");
    }

    #[test]
    fn a_password_in_the_address_is_not_shown() {
        for address in ["http://me:hush@127.0.0.1:1/base", "http://me:hush@127.0.0.1:bad", "http://me:hush@"] {
            let lock = lock(address.to_owned());
            let error = lock.acquire(Duration::ZERO).unwrap_err();
            for said in [crate::chain(&error), format!("{error:?}"), format!("{lock:?}"), lock.shown()] {
                assert!(!said.contains("hush"), "{said}");
            }
        }
        let (url, served) = server(vec![(403, FULL), (500, "")]);
        let lock = lock(url.replace("//", "//me:hush@"));
        for _ in 0..2 {
            let error = lock.acquire(Duration::ZERO).unwrap_err().to_string();
            assert!(error.contains("http://***@127.0.0.1") && !error.contains("hush"), "{error}");
        }
        served.join().unwrap();
    }

    #[test]
    fn invalid_group_or_id_is_refused() {
        let check = |group: &str, id: &str, expect: &str| {
            let lock = FleetLock { url: "http://127.0.0.1:1".into(), group: group.into(), id: id.into() };
            let error = lock.acquire(Duration::ZERO).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        check("", "a", "fleet group");
        check("a b", "a", "fleet group");
        check("workers", "", "this host's fleet id");
    }
}
