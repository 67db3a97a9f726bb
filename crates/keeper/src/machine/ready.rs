//! Ready: asks the guest until it has finished its boot.
//!
//! At a port: QEMU accepts every connection to a forwarded port, also before the guest listens. So only bytes that come
//! back count. Some services send a greeting; others get an HTTP request, and any answer will do.
//!
//! Through the guest agent: whether a unit is active, according to `systemctl`. An agent starts late in a boot, so its
//! absence is normal at first. A refusal, or no agent after a minute, is reported once, and asking goes on.

use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::mem::discriminant;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hearth_qemu::Endpoint;
use hearth_qemu::agent::{Agent, AgentError, Patience};

use crate::config::Forward;
use crate::event::ReadinessMessage;

/// Time between two connections to a port. A connection costs the guest next to nothing.
const PORT_EVERY: Duration = Duration::from_millis(200);
/// How long to wait for an answer from a port before trying again.
const PORT_PATIENCE: Duration = Duration::from_secs(2);
const QUESTION: &[u8] = b"GET / HTTP/1.0\r\n\r\n";
/// Time between two `systemctl` runs in the guest.
const UNIT_EVERY: Duration = Duration::from_secs(1);
/// How long to wait for each answer of the agent, and for the program's end. Other users of the agent wait no longer
/// than this.
const UNIT_PATIENCE: Duration = Duration::from_secs(5);
/// Time from the guest's start in which a missing agent is not reported. Agents that exist are up within this time.
const SILENCE: Duration = Duration::from_secs(60);

/// Asks once whether the guest is ready. Its argument says whether the answer is still wanted.
type Ask = dyn Fn(&dyn Fn() -> bool) -> Result<bool, AgentError> + Send;

/// A question to the guest.
pub struct Question {
    ask: Box<Ask>,
    every: Duration,
    /// Errors before this time are not reported, unless the agent refuses.
    silence: Duration,
    /// The reason that is recorded when the guest is ready.
    why: &'static str,
}

impl Question {
    pub fn port(forward: Forward) -> Self {
        let address = SocketAddr::new(reachable(forward.host), forward.host_port);
        // Any error may only mean that the guest does not listen yet.
        let ask = move |_: &dyn Fn() -> bool| Ok(answers(address).unwrap_or(false));
        Self { ask: Box::new(ask), every: PORT_EVERY, silence: SILENCE, why: "its port answers" }
    }

    /// `channel`: the agent's socket.
    pub fn unit(unit: String, channel: Endpoint) -> Self {
        let ask = move |stop: &dyn Fn() -> bool| {
            let patience = Patience { time: UNIT_PATIENCE, stop };
            let mut agent = Agent::reach(&channel, &patience)?;
            agent.succeeds("systemctl", &["is-active", "--quiet", &unit], &patience)
        };
        Self { ask: Box::new(ask), every: UNIT_EVERY, silence: SILENCE, why: "its unit is active" }
    }
}

/// Asks until the guest is ready. Dropping it ends the thread.
pub struct ReadyWatch {
    stop: Arc<AtomicBool>,
}

impl ReadyWatch {
    pub fn start(
        machine: &str,
        question: Question,
        say: impl Fn(ReadinessMessage) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let work = move || watch(&question, &|| stopped.load(Ordering::Relaxed), &say);
        thread::Builder::new().name(format!("ready-{machine}")).spawn(work)?;
        Ok(Self { stop })
    }
}

impl Drop for ReadyWatch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn watch(question: &Question, stop: &dyn Fn() -> bool, say: &dyn Fn(ReadinessMessage)) {
    let began = Instant::now();
    let mut told = HashSet::new();
    while !stop() {
        let answer = (question.ask)(stop);
        // The guest has ended meanwhile: do not report its answer.
        if stop() {
            return;
        }
        match answer {
            Ok(true) => return say(ReadinessMessage::Ready { why: question.why }),
            Ok(false) => {}
            Err(error) => {
                let is_news = matches!(error, AgentError::Refused { .. }) || began.elapsed() >= question.silence;
                if is_news && told.insert(discriminant(&error)) {
                    say(ReadinessMessage::Unknown { why: crate::chain(&error) });
                }
            }
        }
        thread::sleep(question.every);
    }
}

/// The address to connect to: a forward on all addresses is reached through loopback.
fn reachable(host: IpAddr) -> IpAddr {
    match host {
        IpAddr::V4(address) if address.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(address) if address.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        address => address,
    }
}

fn answers(address: SocketAddr) -> io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&address, PORT_PATIENCE)?;
    stream.set_read_timeout(Some(PORT_PATIENCE))?;
    stream.set_write_timeout(Some(PORT_PATIENCE))?;
    stream.write_all(QUESTION)?;
    Ok(stream.read(&mut [0; 1])? > 0)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::io::{BufRead, BufReader};
    use std::net::TcpListener;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::mpsc;

    use std::path::PathBuf;

    use super::*;
    use crate::config::Protocol;

    fn watch_port(listener: &TcpListener) -> (ReadyWatch, mpsc::Receiver<ReadinessMessage>) {
        let address = listener.local_addr().unwrap();
        let forward =
            Forward { protocol: Protocol::Tcp, host: address.ip(), host_port: address.port(), guest_port: 80 };
        let (tell, told) = mpsc::channel();
        let watch = ReadyWatch::start("web", Question::port(forward), move |word| tell.send(word).unwrap()).unwrap();
        (watch, told)
    }

    #[test]
    fn silent_port_is_not_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (_watch, told) = watch_port(&listener);
        // QEMU accepts and closes the connection if the guest does not listen.
        for _ in 0..3 {
            drop(listener.accept().unwrap());
            assert!(told.try_recv().is_err());
        }
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"220 mail\r\n").unwrap();
        assert_eq!(told.recv().unwrap(), ReadinessMessage::Ready { why: "its port answers" });
    }

    #[test]
    fn dropped_watch_reports_nothing() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (watch, told) = watch_port(&listener);
        let (mut stream, _) = listener.accept().unwrap();
        drop(watch);
        stream.write_all(b"220 mail\r\n").unwrap();
        assert!(told.recv().is_err(), "its thread ends without a word");
    }

    /// Plays an agent for several conversations. Each code is the exit code of `systemctl is-active`; None means that
    /// the agent has no `guest-exec`. Returns the commands that it was asked to run.
    fn serve(listener: &UnixListener, codes: &[Option<u8>]) -> Vec<String> {
        let mut asked = Vec::new();
        for code in codes {
            let (stream, _) = listener.accept().unwrap();
            asked.extend(converse(stream, *code));
        }
        asked
    }

    fn converse(mut stream: UnixStream, code: Option<u8>) -> Option<String> {
        let mut ran = None;
        for line in BufReader::new(stream.try_clone().unwrap()).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(line.strip_prefix(&[0xff]).unwrap_or(&line)).into_owned();
            let command: serde_json::Value = serde_json::from_str(&line).unwrap();
            let arguments = &command["arguments"];
            let (mark, said) = match (command["execute"].as_str().unwrap(), code) {
                ("guest-sync-delimited", _) => (&b"\xff"[..], serde_json::json!({ "return": arguments["id"] })),
                ("guest-exec", Some(_)) => {
                    ran = Some(format!("{} {}", arguments["path"], arguments["arg"]));
                    (&b""[..], serde_json::json!({ "return": { "pid": 7 } }))
                }
                ("guest-exec-status", Some(code)) => {
                    (&b""[..], serde_json::json!({ "return": { "exited": true, "exitcode": code } }))
                }
                _ => (&b""[..], serde_json::json!({ "error": { "class": "CommandNotFound", "desc": "disabled" } })),
            };
            stream.write_all(&[mark, format!("{said}\n").as_bytes()].concat()).unwrap();
        }
        ran
    }

    fn quick(socket: PathBuf) -> Question {
        Question {
            every: Duration::from_millis(1),
            ..Question::unit("web.service".into(), Endpoint::unchecked(socket))
        }
    }

    #[test]
    fn agent_refusal_is_reported_once_and_retried() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = thread::spawn(move || serve(&listener, &[None, None, Some(3), Some(0)]));
        let words = RefCell::new(Vec::new());
        watch(&quick(socket), &|| false, &|word| words.borrow_mut().push(word));
        let refused = ReadinessMessage::Unknown { why: "the guest agent refuses (guest-exec): disabled".into() };
        assert_eq!(words.into_inner(), [refused, ReadinessMessage::Ready { why: "its unit is active" }]);
        let ran = r#""systemctl" ["is-active","--quiet","web.service"]"#;
        assert_eq!(agent.join().unwrap(), [ran, ran]);
    }

    #[test]
    fn missing_agent_is_reported_once_and_late() {
        let nowhere = || quick("/no/such.sock".into());
        let asked_and_told = |question: Question| {
            let (looks, words) = (Cell::new(0), RefCell::new(Vec::new()));
            let stop = || looks.replace(looks.get() + 1) > 20;
            watch(&question, &stop, &|word| words.borrow_mut().push(word));
            words.into_inner()
        };
        assert_eq!(asked_and_told(nowhere()), []);
        let told = asked_and_told(Question { silence: Duration::ZERO, ..nowhere() });
        assert!(
            matches!(&told[..], [ReadinessMessage::Unknown { why }] if why.starts_with("/no/such.sock: no connection")),
            "{told:?}"
        );
    }
}
