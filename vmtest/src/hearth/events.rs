//! The machine's events, followed with `hearth events NAME --follow --json` over all keepers of the machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use hearth_api::{EventRecord, milliseconds_of};

use crate::error::{Error, Result};
use crate::wait::Watched;

/// Pause between two attempts while no keeper answers. Nothing announces a keeper, so the thread polls.
const REDIAL: Duration = Duration::from_millis(50);

#[derive(Default)]
struct Followed {
    events: Vec<EventRecord>,
    last_sequence: u64,
    child: Option<Child>,
    over: bool,
}

/// A thread that collects events.
pub struct Follower {
    followed: Arc<Watched<Followed>>,
    thread: Option<JoinHandle<()>>,
}

impl Follower {
    pub fn start(name: &str, hearth: PathBuf, runtime_root: PathBuf) -> Result<Self> {
        let followed = Arc::new(Watched::<Followed>::default());
        let (ours, machine) = (Arc::clone(&followed), name.to_owned());
        let follow = move || {
            let (runtime_folder, mut command) = (runtime_root.join(&machine), Command::new(hearth));
            command.args(["events", &machine, "--follow", "--json"]).env("HEARTH_RUNTIME_ROOT", runtime_root);
            // Without a keeper the command prints the events of its file, and then that there is none.
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
            let mut seen = None;
            while await_news(&ours, &runtime_folder, &mut seen) && follow_once(&ours, &mut command) {
                std::thread::sleep(REDIAL);
            }
        };
        let thread = std::thread::Builder::new().name(format!("events-{name}")).spawn(follow);
        let thread = thread.map_err(|source| Error::Start { program: "the event follower".into(), source })?;
        Ok(Self { followed, thread: Some(thread) })
    }

    pub fn wait<T>(&self, limit: Duration, look: impl Fn(&EventRecord) -> Option<T>) -> Option<T> {
        self.followed.wait(limit, |followed| followed.events.iter().find_map(&look))
    }

    pub fn all(&self) -> Vec<EventRecord> {
        self.followed.lock().events.clone()
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.followed.change(|followed| {
            followed.over = true;
            if let Some(child) = &mut followed.child {
                // Fails only if it is dead already.
                let _ = child.kill();
            }
        });
        if let Some(thread) = self.thread.take() {
            // A panic of that thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// Waits until a keeper listens, or the file of events is not the one that was `seen`. Returns false once the follower was
/// dropped. The command is not started for nothing: a saved machine has no keeper while its clones are tested, and twenty starts a
/// second would read all of its events each time.
fn await_news(followed: &Watched<Followed>, runtime_folder: &Path, seen: &mut Option<(u64, SystemTime)>) -> bool {
    loop {
        let file = fs::metadata(runtime_folder.join("events.jsonl")).ok();
        let now = file.and_then(|file| Some((file.len(), file.modified().ok()?)));
        if now != *seen || UnixStream::connect(runtime_folder.join("api.sock")).is_ok() {
            *seen = now;
            return true;
        }
        if followed.wait(REDIAL, |followed| followed.over.then_some(())).is_some() {
            return false;
        }
    }
}

/// Follows one keeper until it ends. Returns false once the follower was dropped.
fn follow_once(followed: &Watched<Followed>, command: &mut Command) -> bool {
    let output = followed.change(|followed| {
        if followed.over {
            return None;
        }
        let mut child = command.spawn().ok()?;
        let output = child.stdout.take();
        followed.child = Some(child);
        output
    });
    for line in output.into_iter().flat_map(|output| BufReader::new(output).lines()).map_while(std::io::Result::ok) {
        if let Ok(event) = serde_json::from_str(&line) {
            followed.change(|followed| followed.add(event));
        }
    }
    let child = followed.change(|followed| followed.child.take());
    if let Some(mut child) = child {
        let _ = child.kill();
        let _ = child.wait();
    }
    !followed.lock().over
}

impl Followed {
    /// Adds an event once: a new connection repeats old events.
    fn add(&mut self, event: EventRecord) {
        if event.sequence > self.last_sequence {
            self.last_sequence = event.sequence;
            self.events.push(event);
        }
    }
}

/// The time of an event.
pub fn time_of(event: &EventRecord) -> Option<SystemTime> {
    Some(SystemTime::UNIX_EPOCH + Duration::from_millis(milliseconds_of(&event.time)?))
}

/// Makes a closure that looks at an event. It returns the event if that is of this kind: `event!(DumpWaits)`. Or it returns a part of
/// it: `event!(DumpWaits { why, .. } => why)`. Either may have a condition: `event!(DiskFull { disk, .. } if disk == "data")`. With a
/// name for the event the condition can be about all of it: `event!(|event| DumpComplete if event.incarnation == 2)`.
#[macro_export]
macro_rules! event {
    (|$event:ident| $kind:ident $(if $condition:expr)?) => {
        $crate::event!(|$event| $kind { .. } $(if $condition)? => $event.clone())
    };
    (|$event:ident| $kind:ident { $($fields:tt)* } $(if $condition:expr)?) => {
        $crate::event!(|$event| $kind { $($fields)* } $(if $condition)? => $event.clone())
    };
    (|$event:ident| $kind:ident { $($fields:tt)* } $(if $condition:expr)? => $part:expr) => {
        |$event: &$crate::hearth_api::EventRecord| match $event.event.clone() {
            $crate::hearth_api::EventKind::$kind { $($fields)* } $(if $condition)? => Some($part),
            _ => None,
        }
    };
    ($($kind:tt)+) => {
        $crate::event!(|event| $($kind)+)
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use hearth_api::EventKind;

    fn record(sequence: u64, event: EventKind) -> EventRecord {
        EventRecord { sequence, time: "2026-03-01T12:00:00.123Z".into(), machine: "web".into(), incarnation: 2, event }
    }

    #[test]
    fn repeated_events_count_once() {
        let mut followed = Followed::default();
        for sequence in [1, 2, 1, 2, 3] {
            followed.add(record(sequence, EventKind::GuestPanicked));
        }
        assert_eq!(followed.events.len(), 3);
    }

    #[test]
    fn event_is_found_by_kind_and_condition() {
        let gap = record(1, EventKind::Gap { missed: 7 });
        assert_eq!(event!(Gap)(&gap), Some(gap.clone()));
        assert_eq!(event!(GuestPanicked)(&gap), None);
        assert_eq!(event!(Gap { missed } => missed)(&gap), Some(7));
        assert_eq!(event!(Gap { missed } if missed > 7)(&gap), None);
        assert_eq!(event!(|event| Gap if event.incarnation == 2)(&gap), Some(gap.clone()));
        assert_eq!(event!(|event| Gap { missed } if event.incarnation == 1 => missed)(&gap), None);
    }

    #[test]
    fn time_of_an_event_is_parsed() {
        let expect = SystemTime::UNIX_EPOCH + Duration::from_millis(1_772_366_400_123);
        assert_eq!(time_of(&record(1, EventKind::GuestPanicked)), Some(expect));
        assert_eq!(time_of(&EventRecord { time: "yesterday".into(), ..record(1, EventKind::GuestPanicked) }), None);
    }
}
