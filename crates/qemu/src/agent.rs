//! The guest's agent (qemu-guest-agent or a compatible one), over QEMU's channel for it.
//!
//! connect -> synchronise: skip answers to others -> command and answer, one line each
//!
//! The guest is not trusted. It may be silent, answer nonsense, answer late or without end. So every answer has a limit
//! of time and of bytes, and text from the guest is cleaned before anyone reads it.

use std::io::{self, ErrorKind, Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use qapi_qga::{
    GuestExec, GuestExecStatus, QgaCommand, guest_exec, guest_exec_status, guest_fsfreeze_freeze, guest_fsfreeze_thaw,
    guest_sync_delimited,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Endpoint, Stream};

/// Starts a new conversation; this byte never occurs in JSON.
const DELIMITER: u8 = 0xff;
/// Maximum number of bytes received until an answer is complete. An answer has less than a hundred; answers to others
/// may precede it.
const HEARD_BYTES_MAX: usize = 64 << 10;
/// Interval at which a wait checks whether to stop.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Time limit of a write. The buffer of a new socket holds everything that is ever sent.
const SEND_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum length of the guest's text in an error.
const QUOTED_CHARS: usize = 200;

/// Errors of the guest agent.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum AgentError {
    #[error("{socket}: no connection to the guest agent's channel")]
    Connect { socket: PathBuf, source: io::Error },
    #[error("the guest agent's channel broke")]
    Broken(#[source] io::Error),
    #[error("QEMU closed the guest agent's channel")]
    Closed,
    #[error("the guest agent did not answer within {waited:?} ({command})")]
    Silent { command: &'static str, waited: Duration },
    #[error("the guest agent sent more than {HEARD_BYTES_MAX} bytes without an answer ({command})")]
    Endless { command: &'static str },
    #[error("the guest agent's answer is invalid ({command}): {said}")]
    Answer { command: &'static str, said: String },
    #[error("the guest agent refuses ({command}): {description}")]
    Refused { command: &'static str, description: String },
    #[error("{program} has not ended in the guest within {waited:?}")]
    Unfinished { program: String, waited: Duration },
    #[error("the request to the guest agent was stopped")]
    Stopped,
}

/// How long to wait for an agent, and when to stop sooner.
pub struct Patience<'a> {
    /// Maximum time for an answer, and for the end of a program.
    pub time: Duration,
    /// Whether to stop waiting now.
    pub stop: &'a dyn Fn() -> bool,
}

/// A conversation with an agent. QEMU accepts one at a time; dropping this ends it.
#[derive(Debug)]
pub struct Agent {
    stream: Stream,
    heard: Vec<u8>,
}

/// A line from the agent.
#[derive(Deserialize)]
struct Line {
    #[serde(rename = "return")]
    answer: Option<Value>,
    error: Option<Value>,
}

impl Agent {
    /// Connects to the channel and synchronises with the agent, which proves that it answers.
    pub fn reach(channel: &Endpoint, patience: &Patience<'_>) -> Result<Self, AgentError> {
        let failed = |source| AgentError::Connect { socket: channel.socket.clone(), source };
        let stream = channel.connect(patience.time).map_err(failed)?;
        Self::begin(stream, patience)
    }

    fn begin(stream: Stream, patience: &Patience<'_>) -> Result<Self, AgentError> {
        stream.set_read_timeout(Some(LOOK_EVERY)).map_err(AgentError::Broken)?;
        stream.set_write_timeout(Some(SEND_PATIENCE)).map_err(AgentError::Broken)?;
        let mut agent = Self { stream, heard: Vec::new() };
        agent.sync(patience)?;
        Ok(agent)
    }

    /// Freezes all file systems. Returns their number.
    pub fn freeze(&mut self, patience: &Patience<'_>) -> Result<u64, AgentError> {
        self.answer(&guest_fsfreeze_freeze {}, patience)
    }

    /// Thaws all file systems. Returns the number of those that were frozen.
    pub fn thaw(&mut self, patience: &Patience<'_>) -> Result<u64, AgentError> {
        self.answer(&guest_fsfreeze_thaw {}, patience)
    }

    /// Runs a program in the guest and waits for its end. Returns whether its exit code is 0.
    pub fn succeeds(&mut self, program: &str, arguments: &[&str], patience: &Patience<'_>) -> Result<bool, AgentError> {
        let command = guest_exec {
            path: program.to_owned(),
            arg: Some(arguments.iter().map(|&argument| argument.to_owned()).collect()),
            env: None,
            input_data: None,
            capture_output: None,
        };
        let began = Instant::now();
        let GuestExec { pid } = self.answer(&command, patience)?;
        loop {
            let status: GuestExecStatus = self.answer(&guest_exec_status { pid }, patience)?;
            if status.exited {
                return Ok(status.exitcode == Some(0));
            }
            if began.elapsed() >= patience.time {
                return Err(AgentError::Unfinished { program: program.to_owned(), waited: patience.time });
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Skips the agent's answers to others until it answers this connection.
    fn sync(&mut self, patience: &Patience<'_>) -> Result<(), AgentError> {
        const NAME: &str = "guest-sync-delimited";
        let id = now_id();
        // Makes the agent discard a partial command of an earlier connection.
        self.send(&[DELIMITER])?;
        self.ask(NAME, &guest_sync_delimited { id })?;
        let mut listening = Listening::begin(NAME, patience);
        loop {
            let line = self.line(&mut listening)?;
            let Some(delimiter) = line.iter().rposition(|&byte| byte == DELIMITER) else { continue };
            let answer = serde_json::from_slice::<Line>(&line[delimiter + 1..]).ok().and_then(|line| line.answer);
            if answer.and_then(|answer| answer.as_i64()) == Some(id) {
                return Ok(());
            }
        }
    }

    fn answer<C: QgaCommand, T: DeserializeOwned>(
        &mut self,
        command: &C,
        patience: &Patience<'_>,
    ) -> Result<T, AgentError> {
        self.ask(C::NAME, command)?;
        let mut listening = Listening::begin(C::NAME, patience);
        let line = self.line(&mut listening)?;
        let odd = || AgentError::Answer { command: C::NAME, said: plain(&String::from_utf8_lossy(&line)) };
        match serde_json::from_slice(&line).map_err(|_| odd())? {
            Line { error: Some(error), .. } => {
                let description = plain(error["desc"].as_str().unwrap_or("without a reason"));
                Err(AgentError::Refused { command: C::NAME, description })
            }
            Line { answer: Some(answer), .. } => serde_json::from_value(answer).map_err(|_| odd()),
            Line { .. } => Err(odd()),
        }
    }

    fn ask<C: QgaCommand>(&mut self, name: &str, command: &C) -> Result<(), AgentError> {
        let arguments = serde_json::to_value(command).expect("a command is plain data");
        self.send(format!("{}\n", serde_json::json!({ "execute": name, "arguments": arguments })).as_bytes())
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.stream.write_all(bytes).map_err(AgentError::Broken)
    }

    /// The next line that is not empty, without its newline.
    fn line(&mut self, listening: &mut Listening<'_>) -> Result<Vec<u8>, AgentError> {
        loop {
            if let Some(end) = self.heard.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.heard.drain(..=end).collect();
                let line = line.trim_ascii();
                if !line.is_empty() {
                    return Ok(line.to_owned());
                }
                continue;
            }
            listening.must_go_on()?;
            let mut piece = [0; 4096];
            match self.stream.read(&mut piece) {
                Ok(0) => return Err(AgentError::Closed),
                Ok(length) => {
                    listening.hear(length)?;
                    self.heard.extend_from_slice(&piece[..length]);
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted => {}
                    _ => return Err(AgentError::Broken(error)),
                },
            }
        }
    }
}

/// Time and bytes that are left until an answer must be complete.
struct Listening<'a> {
    command: &'static str,
    patience: &'a Patience<'a>,
    began: Instant,
    heard: usize,
}

impl<'a> Listening<'a> {
    fn begin(command: &'static str, patience: &'a Patience<'a>) -> Self {
        Self { command, patience, began: Instant::now(), heard: 0 }
    }

    fn must_go_on(&self) -> Result<(), AgentError> {
        if (self.patience.stop)() {
            return Err(AgentError::Stopped);
        }
        match self.began.elapsed() >= self.patience.time {
            true => Err(AgentError::Silent { command: self.command, waited: self.patience.time }),
            false => Ok(()),
        }
    }

    fn hear(&mut self, bytes: usize) -> Result<(), AgentError> {
        self.heard += bytes;
        match self.heard > HEARD_BYTES_MAX {
            true => Err(AgentError::Endless { command: self.command }),
            false => Ok(()),
        }
    }
}

/// A number that differs each time. It fits in 31 bits, which every agent supports.
fn now_id() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::from(since.subsec_nanos() ^ std::process::id() << 8) & 0x7fff_ffff
}

/// Text from a guest, made safe for a terminal: truncated and without control characters.
fn plain(text: &str) -> String {
    let letter = |letter: char| if letter.is_control() || letter == '\u{fffd}' { '?' } else { letter };
    text.chars().take(QUOTED_CHARS).map(letter).collect()
}

#[cfg(test)]
mod tests;
