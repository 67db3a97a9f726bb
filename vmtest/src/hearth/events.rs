//! The machine's events, followed with `hearth events NAME --follow --json` over all keepers of the machine.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::error::{Error, Result};
use crate::wait::Watched;

/// Pause between two attempts while no keeper answers. Nothing announces a keeper, so the thread polls.
const REDIAL: Duration = Duration::from_millis(50);

#[derive(Default)]
struct Followed {
    events: Vec<Value>,
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

    pub fn wait(&self, limit: Duration, look: impl Fn(&Value) -> bool) -> Option<Value> {
        self.followed.wait(limit, |followed| followed.events.iter().find(|event| look(event)).cloned())
    }

    pub fn all(&self) -> Vec<Value> {
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
        if let Ok(event) = serde_json::from_str::<Value>(&line) {
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
    fn add(&mut self, event: Value) {
        match event["sequence"].as_u64() {
            Some(sequence) if sequence <= self.last_sequence => return,
            Some(sequence) => self.last_sequence = sequence,
            None => {}
        }
        self.events.push(event);
    }
}

/// The `time` of an event: `2026-03-01T12:00:00.123Z`.
pub fn time_of(event: &Value) -> Option<SystemTime> {
    let text = event["time"].as_str()?.strip_suffix('Z')?;
    let (date, time) = text.split_once('T')?;
    let [year, month, day] = numbers(date, '-')?;
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(time, ':')?;
    // Days since 1970 in the proleptic Gregorian calendar. Years begin in March here, so that leap days come last.
    let (shifted, index) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * shifted + shifted / 4 - shifted / 100 + shifted / 400 + (153 * index + 2) / 5 + day - 1 - 719_468;
    let seconds = u64::try_from(((days * 24 + hour) * 60 + minute) * 60 + second).ok()?;
    let millis: u64 = format!("{fraction:0<3}").get(..3)?.parse().ok()?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_millis(millis))
}

fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let parts = text.split(separator).map(|part| part.parse().ok()).collect::<Option<Vec<i64>>>()?;
    parts.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn event_times_are_parsed() {
        let check = |text: &str, millis: u64| {
            let expect = SystemTime::UNIX_EPOCH + Duration::from_millis(millis);
            assert_eq!(time_of(&json!({ "time": text })), Some(expect), "{text}");
        };
        check("1970-01-01T00:00:00.000Z", 0);
        check("2000-02-29T23:59:59.5Z", 951_868_799_500);
        check("2026-03-01T12:00:00.123Z", 1_772_366_400_123);
        assert_eq!(time_of(&json!({ "time": "yesterday" })), None);
    }

    #[test]
    fn repeated_events_count_once() {
        let mut followed = Followed::default();
        for sequence in [1, 2, 1, 2, 3] {
            followed.add(json!({ "sequence": sequence }));
        }
        assert_eq!(followed.events.len(), 3);
    }
}
