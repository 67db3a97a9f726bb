//! Frozen: a guest whose agent was told to freeze its file systems, until the agent has thawed them.
//!
//! (journal: frozen) -> freeze, see `save` -> the guest is paused and continued -> a thread asks for the thaw until it
//! succeeds
//!
//! This also covers a save that fails, is cancelled or loses its keeper, and a guest restored from a snapshot in which
//! its file systems are frozen. An agent that answers late thaws late: it handles one request after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use hearth_api::{EventKind, FrozenStatus};
use hearth_qemu::Endpoint;
use hearth_qemu::agent::{Agent, AgentError, Patience};

use super::Context;
use super::generation::Generation;
use super::save::Saves;
use crate::event::{Event, ThawMessage};

/// A working agent answers within milliseconds; in a restored guest it first waits for its memory. An agent that was
/// silent for ten minutes will not answer again.
const PACE: Pace =
    Pace { answer: Duration::from_secs(10), every: Duration::from_secs(1), at_most: Duration::from_secs(600) };
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// State of file systems that are frozen, or may be.
#[derive(Default)]
pub struct Frozen {
    began: Option<(Instant, u64)>,
    problem: Option<String>,
    thaw: Option<Thaw>,
}

impl Frozen {
    pub fn began(&mut self, file_systems: u64) {
        self.began = Some((Instant::now(), file_systems));
    }

    fn for_ms(&self) -> Option<f64> {
        self.began.map(|(since, _)| since.elapsed().as_secs_f64() * 1e3)
    }
}

/// A thread that asks for the thaw. It ends soon after this is dropped.
struct Thaw {
    generation: u32,
    stop: Arc<AtomicBool>,
}

impl Drop for Thaw {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

impl Saves {
    /// Notes that the file systems may be frozen from now on. Does not save the journal.
    pub fn note_frozen(&mut self, context: &mut Context) {
        context.journal.frozen = true;
        self.frozen = Some(Frozen::default());
    }

    /// Notes that the file systems are not frozen, or that the guest is gone. Does not save the journal.
    pub fn forget_frozen(&mut self, context: &mut Context) {
        context.journal.frozen = false;
        self.frozen = None;
    }

    pub fn is_being_thawed(&self) -> bool {
        self.frozen.as_ref().is_some_and(|frozen| frozen.thaw.is_some())
    }

    pub fn frozen_status(&self) -> Option<FrozenStatus> {
        self.frozen.as_ref().map(|frozen| FrozenStatus {
            file_systems: frozen.began.map(|(_, file_systems)| file_systems),
            for_ms: frozen.for_ms(),
            problem: frozen.problem.clone(),
        })
    }

    /// Starts thawing the file systems of a guest that runs. Does nothing if none is frozen, or a thread already asks
    /// for the thaw.
    pub fn thaw(&mut self, context: &Context, generation: &Generation) {
        let Some(frozen) = &mut self.frozen else { return };
        let number = generation.number;
        if frozen.thaw.as_ref().is_some_and(|thaw| thaw.generation == number) {
            return;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let channel = generation.agent(&context.folders);
        let (stopped, tell) = (stop.clone(), context.outside.tell.clone());
        let say = move |message| {
            // Fails only when the loop has ended; then nobody needs the message.
            let _ = tell.send(Event::Thaw { generation: number, message });
        };
        let work = move || try_to_thaw(&channel, &PACE, &|| stopped.load(Relaxed), &say);
        match std::thread::Builder::new().name(format!("thaw-{}", context.config.name)).spawn(work) {
            Ok(_) => frozen.thaw = Some(Thaw { generation: number, stop }),
            Err(error) => not_thawed(context, &format!("cannot start a thread: {error}")),
        }
    }

    pub fn handle_thaw(&mut self, context: &mut Context, message: ThawMessage) {
        let Some(frozen) = &mut self.frozen else { return };
        match message {
            ThawMessage::Thawed { file_systems } => {
                let frozen_ms = frozen.for_ms();
                self.forget_frozen(context);
                context.save_journal();
                context.record(EventKind::Thawed { file_systems, frozen_ms });
            }
            ThawMessage::Failed { why } => {
                let message = format!("the guest's file systems may still be frozen, thawing them is retried: {why}");
                if frozen.problem.replace(why).is_none() {
                    context.record(EventKind::Error { message });
                }
            }
            ThawMessage::GaveUp => {
                frozen.thaw = None;
                let why = frozen.problem.clone().unwrap_or_default();
                not_thawed(context, &why);
            }
        }
    }
}

fn not_thawed(context: &Context, why: &str) {
    let message = format!(
        "the guest's file systems may stay frozen: {why}; thaw them in the guest with `fsfreeze --unfreeze`, or \
             reboot it"
    );
    context.record(EventKind::Error { message });
}

/// How often, and for how long, thawing is tried.
struct Pace {
    answer: Duration,
    every: Duration,
    at_most: Duration,
}

fn try_to_thaw(channel: &Endpoint, pace: &Pace, stop: &dyn Fn() -> bool, say: &dyn Fn(ThawMessage)) {
    let patience = Patience { time: pace.answer, stop };
    let began = Instant::now();
    while began.elapsed() < pace.at_most {
        match Agent::reach(channel, &patience).and_then(|mut agent| agent.thaw(&patience)) {
            Ok(file_systems) => return say(ThawMessage::Thawed { file_systems }),
            Err(AgentError::Stopped) => return,
            Err(error) => say(ThawMessage::Failed { why: crate::chain(&error) }),
        }
        let again = Instant::now() + pace.every;
        while Instant::now() < again {
            if stop() {
                return;
            }
            std::thread::sleep(LOOK_EVERY.min(pace.every));
        }
    }
    say(ThawMessage::GaveUp);
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::*;

    const QUICK: Pace =
        Pace { answer: Duration::from_secs(60), every: Duration::from_millis(1), at_most: Duration::from_millis(200) };

    fn said(socket: &Path, pace: &Pace, stop: &dyn Fn() -> bool) -> Vec<String> {
        let told = RefCell::new(Vec::new());
        try_to_thaw(&Endpoint::unchecked(socket), pace, stop, &|message| {
            told.borrow_mut().push(format!("{message:?}"))
        });
        told.into_inner()
    }

    #[test]
    fn thaw_retries_until_timeout_or_stop() {
        let nowhere = Path::new("/no/such.sock");
        let words = said(nowhere, &QUICK, &|| false);
        let failed = |word: &String| word.starts_with("Failed { why: \"/no/such.sock: no connection");
        let (last, tries) = words.split_last().unwrap();
        assert!(tries.len() > 1 && tries.iter().all(failed) && last == "GaveUp", "{words:?}");
        assert_eq!(said(nowhere, &QUICK, &|| true).len(), 1, "and no more is said");
    }

    #[test]
    fn returning_agent_thaws() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let agent = std::thread::spawn(move || {
            // Its first connection ends at once.
            drop(listener.accept().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            for line in BufReader::new(stream.try_clone().unwrap()).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                let said = match line.split_once("\"id\":") {
                    Some((_, id)) => [b"\xff{\"return\": ", id.split('}').next().unwrap().as_bytes(), b"}\n"].concat(),
                    None => b"{\"return\": 3}\n".to_vec(),
                };
                stream.write_all(&said).unwrap();
            }
        });
        let words = said(&socket, &Pace { at_most: Duration::from_secs(60), ..QUICK }, &|| false);
        assert!(words.len() == 2 && words[0].starts_with("Failed"), "{words:?}");
        assert_eq!(words[1], "Thawed { file_systems: 3 }");
        agent.join().unwrap();
    }
}
