//! A client of QMP, for plain machines and as a second monitor of others: commands with their answers, events in order.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Error, Result, at};
use crate::wait::{Watched, patience};

#[derive(Default)]
struct Heard {
    writer: Option<UnixStream>,
    answers: BTreeMap<u64, Value>,
    events: Vec<Value>,
    closed: bool,
}

/// A connection with QEMU.
pub struct Qmp {
    heard: Arc<Watched<Heard>>,
    next_id: AtomicU64,
}

impl Qmp {
    /// Waits in a thread for QEMU to connect. The thread ends when QEMU does, since that closes the connection.
    pub(crate) fn listen(name: &str, listener: UnixListener) -> std::io::Result<Self> {
        Self::over(name, move || listener.accept().map(|(stream, _)| stream))
    }

    /// Connects to a QEMU that listens on a second socket (`-qmp unix:PATH,server=on,wait=off`).
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = at("connect to", socket, UnixStream::connect(socket))?;
        at("listen to", socket, Self::over("second", || Ok(stream)))
    }

    fn over(name: &str, open: impl FnOnce() -> std::io::Result<UnixStream> + Send + 'static) -> std::io::Result<Self> {
        let heard = Arc::new(Watched::<Heard>::default());
        let ours = Arc::clone(&heard);
        std::thread::Builder::new().name(format!("qmp-{name}")).spawn(move || {
            if let Ok(stream) = open() {
                listen(&ours, stream);
            }
            ours.change(|heard| heard.closed = true);
        })?;
        Ok(Self { heard, next_id: AtomicU64::new(1) })
    }

    /// Executes a command, and returns its result.
    pub fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let failed = |message: String| Error::Qmp { command: command.into(), message };
        let limit = patience(20);
        let ready = |heard: &mut Heard| heard.writer.as_ref().map(UnixStream::try_clone);
        let writer = self.heard.wait(limit, ready).ok_or_else(|| failed("no connection".into()))?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let line = json!({ "execute": command, "arguments": arguments, "id": id });
        let sent = writer.and_then(|mut writer| writer.write_all(format!("{line}\n").as_bytes()));
        sent.map_err(|error| failed(error.to_string()))?;
        let answer = self.heard.wait(limit, |heard| match heard.answers.remove(&id) {
            None if heard.closed => Some(json!({ "error": { "desc": "QEMU ended before it answered" } })),
            answer => answer,
        });
        let mut answer = answer.ok_or_else(|| failed("no answer".into()))?;
        match answer.get("error") {
            Some(error) => Err(failed(error["desc"].as_str().unwrap_or_default().into())),
            None => Ok(answer["return"].take()),
        }
    }

    /// Waits for an event by its name, and returns its data. Events before the call count.
    pub fn wait_event(&self, name: &str, limit: Duration) -> Result<Value> {
        self.wait_nth_event(name, 1, limit)
    }

    /// Waits for the `nth` event of a name, counted from 1, and returns its data.
    pub fn wait_nth_event(&self, name: &str, nth: usize, limit: Duration) -> Result<Value> {
        let found = self.heard.wait(limit, |heard| {
            let event = heard.events.iter().filter(|event| event["event"] == name).nth(nth - 1);
            event.map(|event| Some(event["data"].clone())).or_else(|| heard.closed.then_some(None))
        });
        let missing = || Error::Qmp { command: name.into(), message: "no such event came".into() };
        found.flatten().ok_or_else(missing)
    }

    /// Waits for an event, past or future, that `look` accepts, and returns it with name, data and timestamp.
    pub fn find_event(&self, what: &str, limit: Duration, look: impl Fn(&Value) -> bool) -> Result<Value> {
        let found = self.heard.wait(limit, |heard| {
            let event = heard.events.iter().find(|event| look(event));
            event.map(|event| Some(event.clone())).or_else(|| heard.closed.then_some(None))
        });
        let missing = || Error::Qmp { command: what.into(), message: "no such event came".into() };
        found.flatten().ok_or_else(missing)
    }

    /// The names of all events so far.
    pub fn events(&self) -> Vec<String> {
        let heard = self.heard.lock();
        heard.events.iter().filter_map(|event| event["event"].as_str().map(str::to_owned)).collect()
    }
}

fn listen(heard: &Watched<Heard>, stream: UnixStream) {
    let Ok(mut writer) = stream.try_clone() else { return };
    for line in BufReader::new(stream).lines().map_while(std::io::Result::ok) {
        let Ok(mut message) = serde_json::from_str::<Value>(&line) else { continue };
        if message.get("QMP").is_some() {
            if writer.write_all(b"{\"execute\":\"qmp_capabilities\",\"id\":0}\n").is_err() {
                return;
            }
        } else if message.get("event").is_some() {
            heard.change(|heard| heard.events.push(message.take()));
        } else if message["id"] == 0 {
            let writer = writer.try_clone().ok();
            heard.change(|heard| heard.writer = writer);
        } else if let Some(id) = message["id"].as_u64() {
            heard.change(|heard| heard.answers.insert(id, message.take()));
        }
    }
}
