//! QMP: commands to a QEMU, and its events.
//!
//! A reader thread reads every line: answers go to the caller that asked, events to the callback. Commands and answers
//! are types of `qapi-qmp`. Events are parsed leniently, because a newer QEMU may send fields that the types do not
//! know.
//!
//! QEMU is not trusted, because a guest may have taken it over. The length and number of its messages and what is kept
//! of them are bounded (`reader`). A QEMU that exceeds a bound is reported (`QmpEvent::Misbehaves`) and no longer
//! listened to.

use std::fs::File;
use std::io::{self, BufReader, IoSlice, Read, Seek, SeekFrom, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use plain_text::{beginning, printable};
use qapi_qmp::QmpCommand;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

use crate::launch::disk_chardev;
use crate::migration::Migration;
use crate::said::said;
use crate::{Endpoint, Process, Stream};

/// Time limit of an answer. QEMU answers in milliseconds, but may hold its lock while it flushes a disk.
pub(crate) const ANSWER_PATIENCE: Duration = Duration::from_secs(20);

/// Maximum size of a dump of one byte: 255 processors have about 400 KiB of notes, and the guest's own note at most 64
/// KiB.
const REGISTERS_BYTES_MAX: u64 = 4 << 20;

/// Maximum length of a name from QEMU; longer than any that it has.
const WORD_CHARS_MAX: usize = 100;

/// An event from QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are QEMU's own")]
pub enum QmpEvent {
    /// QEMU is about to end. `reason` is QEMU's own: `guest-reset`, `guest-shutdown`, `host-qmp-quit`, ...
    Shutdown { guest: bool, reason: String },
    /// The guest has panicked.
    GuestPanicked,
    /// The guest did not reset the watchdog in time. `action` is QEMU's: `pause`, `reset`, `inject-nmi`, ...
    Watchdog { action: String },
    /// The guest has stopped.
    Stopped,
    /// The guest runs again.
    Resumed,
    /// The state of a migration has changed.
    Migration(Migration),
    /// QEMU breaks the protocol or sends too much. No further message is read, and QEMU should be ended.
    Misbehaves(String),
    /// QEMU has closed the connection: the last event.
    HungUp,
    /// Any other event, by name.
    Other(String),
}

impl QmpEvent {
    /// Whether the event concerns the guest itself, and not how QEMU carries out a command.
    pub fn is_of_the_guest(&self) -> bool {
        matches!(self, Self::Shutdown { .. } | Self::GuestPanicked | Self::Watchdog { .. } | Self::Misbehaves(_))
    }
}

/// Errors of QMP commands.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum QmpError {
    #[error("QMP: {socket}: no connection")]
    Connect { socket: PathBuf, source: io::Error },
    #[error("QEMU has ended")]
    Ended,
    #[error("QMP: {command}: cannot be sent")]
    Send { command: &'static str, source: io::Error },
    #[error("QMP: {command}: no answer within {waited:?}")]
    Silent { command: &'static str, waited: Duration },
    #[error("QMP: {command}: {description}")]
    Refused { command: &'static str, description: String },
    #[error("QMP: {command}: the answer is invalid: {why}")]
    Answer { command: &'static str, why: String },
    #[error("QMP: the in-memory file that QEMU writes to cannot be created")]
    MemoryFile(#[source] io::Error),
}

/// An event and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimedEvent {
    /// The event.
    pub event: QmpEvent,
    /// When the event happened, by QEMU's clock: time since 1970.
    pub at: Duration,
}

type Listener = Box<dyn Fn(TimedEvent) -> bool + Send>;
type Listeners = Arc<Mutex<Vec<Listener>>>;

/// A QMP session.
pub struct Qmp {
    session: Mutex<Session>,
    listeners: Listeners,
}

impl std::fmt::Debug for Qmp {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Qmp").field("session", &self.session).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Session {
    stream: Stream,
    answers: Receiver<Value>,
    next_id: u64,
}

impl Qmp {
    /// Connects and waits for QEMU's greeting, which comes when its devices exist. Fails early if QEMU ends. The socket
    /// exists before QEMU (see `sockets`), so a refused connection means that QEMU has ended.
    pub fn connect(
        socket: &Path,
        patience: Duration,
        process: &Process,
        tell: impl Fn(QmpEvent) + Send + 'static,
    ) -> Result<Self, QmpError> {
        let failed = |source| QmpError::Connect { socket: socket.to_owned(), source };
        let endpoint = Endpoint { socket: socket.to_owned(), qemu: Some(process.id()) };
        let stream = endpoint.connect(patience).map_err(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => QmpError::Ended,
            _ => failed(error),
        })?;
        // A QEMU that reads no commands must not block the caller.
        stream.set_write_timeout(Some(ANSWER_PATIENCE)).map_err(failed)?;
        let (answered, answers) = sync_channel(reader::ANSWERS_MAX);
        let listeners = Listeners::default();
        let heard = Arc::clone(&listeners);
        let lines = BufReader::new(stream.try_clone().map_err(failed)?);
        std::thread::Builder::new()
            .name(format!("qmp-{}", process.id().pid))
            .spawn(move || {
                thread_filter::deny_unneeded();
                let hears = |said: TimedEvent| {
                    let told = |listener: &mut Listener| listener(said.clone());
                    heard.lock().expect("listeners do not panic").retain_mut(told);
                    if said.event != QmpEvent::HungUp {
                        tell(said.event);
                    }
                };
                reader::read_all(lines, &answered, &hears);
                hears(TimedEvent { event: QmpEvent::HungUp, at: now() });
            })
            .map_err(failed)?;
        let qmp = Self { session: Mutex::new(Session { stream, answers, next_id: 0 }), listeners };
        qmp.await_greeting(patience)?;
        qmp.execute_within(qapi_qmp::qmp_capabilities { enable: None }, patience)?;
        Ok(qmp)
    }

    /// Adds a callback for all further events, besides that of `connect`, until it returns false.
    pub fn listen(&self, listener: impl Fn(TimedEvent) -> bool + Send + 'static) {
        self.listeners.lock().expect("listeners do not panic").push(Box::new(listener));
    }

    /// Sends a command and waits up to 20 s for its answer.
    pub fn execute<C: QmpCommand>(&self, command: C) -> Result<C::Ok, QmpError> {
        self.execute_within(command, ANSWER_PATIENCE)
    }

    fn execute_within<C: QmpCommand>(&self, command: C, patience: Duration) -> Result<C::Ok, QmpError> {
        // It quotes the answer.
        let answer_error =
            |error: serde_json::Error| QmpError::Answer { command: C::NAME, why: said(&error.to_string()) };
        let arguments = serde_json::to_value(&command).map_err(answer_error)?;
        serde_json::from_value(self.ask(C::NAME, arguments, patience)?).map_err(answer_error)
    }

    /// Sends a command without types and waits for its answer.
    pub(crate) fn ask(&self, command: &'static str, arguments: Value, patience: Duration) -> Result<Value, QmpError> {
        self.ask_with(command, arguments, None, patience)
    }

    /// Sends QEMU a copy of a descriptor, which QEMU stores under this name.
    pub(crate) fn hand(&self, name: &str, descriptor: BorrowedFd<'_>, patience: Duration) -> Result<(), QmpError> {
        self.ask_with("getfd", json!({ "fdname": name }), Some(descriptor), patience).map(drop)
    }

    /// Sends a command, possibly with a copy of a descriptor, and waits for its answer.
    fn ask_with(
        &self,
        command: &'static str,
        arguments: Value,
        descriptor: Option<BorrowedFd<'_>>,
        patience: Duration,
    ) -> Result<Value, QmpError> {
        let mut session = self.session.lock().expect("no holder of this lock panics");
        session.next_id += 1;
        let id = session.next_id;
        let mut line = json!({ "execute": command, "id": id });
        if arguments.as_object().is_some_and(|arguments| !arguments.is_empty()) {
            line["arguments"] = arguments;
        }
        let line = format!("{line}\n");
        session.send(line.as_bytes(), descriptor).map_err(|source| {
            // A part of the line may have been sent: nothing can follow it.
            let _ = session.stream.shutdown(std::net::Shutdown::Both);
            match source.kind() {
                io::ErrorKind::BrokenPipe => QmpError::Ended,
                io::ErrorKind::WouldBlock => QmpError::Silent { command, waited: ANSWER_PATIENCE },
                _ => QmpError::Send { command, source },
            }
        })?;
        let mut answer = session.answer(id, command, patience)?;
        match answer.get("error") {
            Some(error) => {
                let description = said(error["desc"].as_str().unwrap_or("refused"));
                Err(QmpError::Refused { command, description })
            }
            None => Ok(answer["return"].take()),
        }
    }

    /// Waits for the first message, which has no id. If QEMU ends, the closed connection ends the wait.
    fn await_greeting(&self, patience: Duration) -> Result<(), QmpError> {
        let session = self.session.lock().expect("no holder of this lock panics");
        match session.answers.recv_timeout(patience) {
            Ok(_greeting) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(QmpError::Ended),
            Err(RecvTimeoutError::Timeout) => Err(QmpError::Silent { command: "greeting", waited: patience }),
        }
    }

    /// Presses the power button.
    pub fn system_powerdown(&self) -> Result<(), QmpError> {
        self.execute(qapi_qmp::system_powerdown {}).map(|_| ())
    }

    /// Injects a non-maskable interrupt. Linux panics on it if `kernel.unknown_nmi_panic` is 1.
    pub fn inject_nmi(&self) -> Result<(), QmpError> {
        self.execute(qapi_qmp::inject_nmi {}).map(|_| ())
    }

    /// Types Alt-SysRq-C on the guest's keyboard.
    pub fn type_sysrq_crash(&self) -> Result<(), QmpError> {
        use qapi_qmp::{KeyValue, QKeyCode, QKeyCodeWrapper, send_key};
        let key = |code| KeyValue::qcode(QKeyCodeWrapper { data: code });
        let keys = vec![key(QKeyCode::alt), key(QKeyCode::sysrq), key(QKeyCode::c)];
        self.execute(send_key { keys, hold_time: None }).map(|_| ())
    }

    /// Registers of all processors and the guest's notes, as the ELF file of a dump of one byte: 1 ms, against seconds
    /// for all memory. A running guest stops meanwhile. The file comes from QEMU, so it is not trusted; it is truncated
    /// at `REGISTERS_BYTES_MAX`.
    pub fn registers(&self, patience: Duration) -> Result<Vec<u8>, QmpError> {
        let deadline = Instant::now() + patience;
        let memory_file = memfd_create("hearth-registers", MemfdFlags::CLOEXEC);
        let memory_file = File::from(memory_file.map_err(|errno| QmpError::MemoryFile(errno.into()))?);
        let name = "hearth-registers";
        self.hand(name, memory_file.as_fd(), patience)?;
        let left = deadline.saturating_duration_since(Instant::now());
        // One byte at address 0, which is RAM in every PC.
        let one_byte = json!({ "paging": false, "protocol": format!("fd:{name}"), "begin": 0, "length": 1 });
        self.ask("dump-guest-memory", one_byte, left)?;
        let mut bytes = Vec::new();
        (&memory_file).seek(SeekFrom::Start(0)).map_err(QmpError::MemoryFile)?;
        memory_file.take(REGISTERS_BYTES_MAX).read_to_end(&mut bytes).map_err(QmpError::MemoryFile)?;
        Ok(bytes)
    }

    /// Stops the guest.
    pub fn pause(&self) -> Result<(), QmpError> {
        self.execute(qapi_qmp::stop {}).map(|_| ())
    }

    /// Lets a stopped guest run.
    pub fn resume(&self) -> Result<(), QmpError> {
        self.execute(qapi_qmp::cont {}).map(|_| ())
    }

    /// Whether QEMU's ends of its connections to these disks are all open. After a reconnect they are a little later than
    /// the server's (`tcp_chr_connect` in QEMU's chardev/char-socket.c runs in the main loop).
    pub fn has_connected<'a>(&self, disks: impl IntoIterator<Item = &'a str>) -> Result<bool, QmpError> {
        let chardevs = self.ask("query-chardev", json!({}), ANSWER_PATIENCE)?;
        Ok(disks.into_iter().all(|disk| is_connected(&chardevs, &disk_chardev(disk))))
    }

    /// Forwards a host port to the guest (`-netdev user` only), through the human monitor, because QMP has no command
    /// for it.
    pub fn add_forward(&self, net: &str, forward: &str) -> Result<(), QmpError> {
        self.monitor(&format!("hostfwd_add {net} {forward}"))
    }

    /// With `anew`, makes TCG translate all guest code again, into blocks that are not chained and run slower. Without
    /// it, translation is back to normal. Under TCG, code is read when it is translated, not when it runs. Uses the
    /// human monitor, because QMP has no command for it.
    pub fn set_fresh_translation(&self, anew: bool) -> Result<(), QmpError> {
        self.monitor(if anew { "log nochain" } else { "log none" })
    }

    /// Makes the guest announce itself once on its networks, as after a migration.
    pub fn announce(&self) -> Result<(), QmpError> {
        let once =
            qapi_qmp::AnnounceParameters { rounds: 1, initial: 50, max: 50, step: 0, id: None, interfaces: None };
        self.execute(qapi_qmp::announce_self(once)).map(|_| ())
    }

    /// Runs a command of the human monitor that prints nothing on success.
    fn monitor(&self, line: &str) -> Result<(), QmpError> {
        let line = json!({ "command-line": line });
        let answer = self.ask("human-monitor-command", line, ANSWER_PATIENCE)?;
        match answer.as_str().map(str::trim) {
            None | Some("") => Ok(()),
            Some(refusal) => Err(QmpError::Refused { command: "human-monitor-command", description: said(refusal) }),
        }
    }

    /// QEMU's name for the guest's state: `running`, `paused`, `guest-panicked`, ... A newer QEMU may have names that
    /// the types do not know.
    pub fn run_state(&self) -> Result<String, QmpError> {
        let status = self.ask("query-status", json!({}), ANSWER_PATIENCE)?;
        Ok(word(&status["status"]))
    }
}

impl Session {
    fn send(&mut self, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let Some(descriptor) = descriptor else { return self.stream.write_all(bytes) };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let descriptors = [descriptor];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)), "the buffer has room for one");
        let sent = sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)?;
        // The descriptor goes with the first bytes; the rest of the line is sent as usual.
        self.stream.write_all(&bytes[sent..])
    }

    /// Waits for the answer with this id. Skips late answers to commands that timed out.
    fn answer(&self, id: u64, command: &'static str, patience: Duration) -> Result<Value, QmpError> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.answers.recv_timeout(left) {
                Ok(answer) if answer["id"] == json!(id) => return Ok(answer),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => return Err(QmpError::Silent { command, waited: patience }),
                Err(RecvTimeoutError::Disconnected) => return Err(QmpError::Ended),
            }
        }
    }
}

impl Drop for Qmp {
    fn drop(&mut self) {
        let session = self.session.get_mut().expect("no holder of this lock panics");
        // Ends the reader thread. Fails only if QEMU closed the connection first.
        let _ = session.stream.shutdown(std::net::Shutdown::Both);
    }
}

fn now() -> Duration {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default()
}

fn event(message: &Value) -> Option<QmpEvent> {
    let name = message["event"].as_str()?;
    let data = &message["data"];
    Some(match name {
        "SHUTDOWN" => {
            QmpEvent::Shutdown { guest: data["guest"].as_bool().unwrap_or(false), reason: word(&data["reason"]) }
        }
        "GUEST_PANICKED" => QmpEvent::GuestPanicked,
        "WATCHDOG" => QmpEvent::Watchdog { action: word(&data["action"]) },
        "STOP" => QmpEvent::Stopped,
        "RESUME" => QmpEvent::Resumed,
        "MIGRATION" => QmpEvent::Migration(Migration::of(&word(&data["status"]), "")),
        _ => QmpEvent::Other(word(&message["event"])),
    })
}

/// A name from QEMU, truncated and printable so that it can be kept and shown.
fn word(value: &Value) -> String {
    printable(beginning(value.as_str().unwrap_or_default(), WORD_CHARS_MAX))
}

/// `chardevs`: the answer to `query-chardev`.
fn is_connected(chardevs: &Value, label: &str) -> bool {
    let is_open = |chardev: &Value| chardev["filename"].as_str().is_some_and(|name| !name.starts_with("disconnected:"));
    chardevs.as_array().into_iter().flatten().any(|chardev| chardev["label"] == *label && is_open(chardev))
}

mod reader;

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expect: Option<QmpEvent>) {
        assert_eq!(event(&serde_json::from_str(line).unwrap()), expect);
    }

    #[test]
    fn events_are_parsed_and_answers_ignored() {
        let reset = QmpEvent::Shutdown { guest: true, reason: "guest-reset".into() };
        check(
            r#"{"event": "SHUTDOWN", "data": {"guest": true, "reason": "guest-reset"}, "timestamp": {}}"#,
            Some(reset),
        );
        check(r#"{"event": "GUEST_PANICKED", "data": {"action": "from-the-future"}}"#, Some(QmpEvent::GuestPanicked));
        let watchdog = QmpEvent::Watchdog { action: "pause".into() };
        check(r#"{"event": "WATCHDOG", "data": {"action": "pause"}}"#, Some(watchdog));
        check(r#"{"event": "NEWS", "data": 5}"#, Some(QmpEvent::Other("NEWS".into())));
        check(r#"{"return": {}, "id": 3}"#, None);
    }

    #[test]
    fn unconnected_chardev_is_recognised() {
        let chardevs = json!([
            {"frontend-open": true, "filename": "unix:", "label": "serial"},
            {"frontend-open": true, "filename": "disconnected:unix:/run/disk-a.sock", "label": "chardev-a"},
            {"frontend-open": true, "filename": "unix:/run/disk-b.sock", "label": "chardev-b"},
        ]);
        assert_eq!(["a", "b", "c"].map(|id| is_connected(&chardevs, &disk_chardev(id))), [false, true, false]);
    }
}
