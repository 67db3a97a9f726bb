//! The guest as seen over its serial console: commands and their output, readiness, panics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::console::{Console, Line};
use crate::error::{Error, Result};
use crate::transcript::{Ready, Transcript};
use crate::wait::patience;

/// What the line discipline of a serial console surely takes at once.
const COMMAND_BYTES_MAX: usize = 4000;
/// What an error shows of the console.
const LINES_SHOWN: usize = 40;

/// Starts the agent of a guest that has one ([`crate::TestVm::busybox_with_agent`]). It answers once its port is open.
pub const START_AGENT: &str =
    "qemu-ga -d -m virtio-serial -p /dev/vport*p1 -t /run -f /run/qemu-ga.pid -l /tmp/qemu-ga.log";

/// How often the machine's processes are looked at while its console is waited on.
pub(crate) const LOOK_AFTER: Duration = Duration::from_millis(500);

/// How a command in the guest ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub status: i32,
    /// Standard output and standard error as they came.
    pub bytes: Vec<u8>,
}

impl Output {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// The number in a line `key=number`, as the probe prints its results.
    pub fn number(&self, key: &str) -> Option<f64> {
        self.text().lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')?.parse().ok())
    }
}

/// A guest at the other end of a serial console.
pub struct Guest {
    console: Console,
    next_id: AtomicU64,
    failed: AtomicBool,
}

impl Guest {
    pub(crate) fn open(name: &str, line: Line) -> Result<Self> {
        let console = Console::open(name, line).map_err(Error::Console)?;
        Ok(Self { console, next_id: AtomicU64::new(1), failed: AtomicBool::new(false) })
    }

    /// Sends a shell command without waiting: for those that end the guest.
    pub fn start(&self, command: &str) -> Result<u64> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // The first newline ends whatever another writer left unfinished on the line.
        let line = format!("\n{id} {}\n", BASE64.encode(command));
        if line.len() > COMMAND_BYTES_MAX {
            return Err(Error::CommandTooLong { bytes: line.len() });
        }
        self.console.write(line.as_bytes(), patience(20)).map_err(|source| self.fail(Error::Console(source)))?;
        Ok(id)
    }

    /// Types what a command that runs there reads.
    pub fn type_line(&self, line: &str) -> Result<()> {
        let typed = self.console.write(format!("{line}\n").as_bytes(), patience(20));
        typed.map_err(|source| self.fail(Error::Console(source)))
    }

    /// How a command that was started has ended; waits half a second for that.
    pub fn take_answer(&self, id: u64) -> Option<Output> {
        let answer = self.console.transcript().wait(LOOK_AFTER, |heard| heard.take_answer(id))?;
        Some(Output { status: answer.status, bytes: answer.output })
    }

    /// Readiness lines so far, one for each boot.
    pub fn ready(&self) -> Vec<Ready> {
        self.console.transcript().lock().ready().to_vec()
    }

    /// The kernel's messages so far.
    pub fn kernel_log(&self) -> Vec<String> {
        self.console.transcript().lock().kernel().to_vec()
    }

    /// Notes from now on when something comes over the console.
    pub fn watch_arrivals(&self) {
        self.console.transcript().change(Transcript::watch_arrivals);
    }

    pub fn arrivals(&self) -> Vec<Instant> {
        self.console.transcript().lock().arrivals().to_vec()
    }

    /// What else was said on the console, line by line.
    pub fn lines(&self) -> Vec<String> {
        self.console.transcript().lock().lines().to_vec()
    }

    /// The same from the `first` on, with the moment at which each was heard.
    pub fn heard_from(&self, first: usize) -> Vec<(Instant, String)> {
        self.console.transcript().lock().heard_from(first)
    }

    /// The last lines of the console as they came.
    pub fn console_tail(&self) -> String {
        self.console.transcript().lock().tail(LINES_SHOWN)
    }

    pub(crate) fn timeout(&self, what: &str, limit: Duration) -> Error {
        let (what, seconds) = (what.to_owned(), limit.as_secs());
        self.fail(Error::Timeout { what, seconds, console: self.console_tail() })
    }

    /// Remembers that something failed: the logs are printed when the machine is dropped.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.failed.store(true, Ordering::Relaxed);
        error
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}

/// What one can do with any machine that has a guest.
pub trait Drives {
    fn guest(&self) -> &Guest;

    /// Fails if the machine can no longer give what is waited for: its process is gone.
    fn check_alive(&self, waited: &str) -> Result<()>;

    /// Runs a shell command in the guest; any status is fine.
    fn run(&self, command: &str) -> Result<Output> {
        self.run_within(command, patience(20))
    }

    /// The same for commands that take long.
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        let id = self.guest().start(command)?;
        let answer = self.wait_console(&format!("answer to `{command}`"), limit, |heard| heard.take_answer(id))?;
        Ok(Output { status: answer.status, bytes: answer.output })
    }

    /// Waits until the console shows what `look` looks for, as long as the machine lives.
    fn wait_console<T>(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut(&mut Transcript) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            // What was said last still counts, so a machine's end is looked at after its console.
            let alive = self.check_alive(what);
            if let Some(found) = self.guest().console.transcript().wait(LOOK_AFTER, &mut look) {
                return Ok(found);
            }
            alive?;
            if Instant::now() > deadline {
                return Err(self.guest().timeout(what, limit));
            }
        }
    }

    /// Runs a shell command in the guest that must succeed, and returns what it printed.
    fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, patience(20))
    }

    /// The same for commands that take long.
    fn sh_within(&self, command: &str, limit: Duration) -> Result<String> {
        let output = self.run_within(command, limit)?;
        let text = output.text();
        if output.status == 0 {
            return Ok(text);
        }
        let (command, status) = (command.to_owned(), output.status);
        Err(self.guest().fail(Error::GuestCommand { command, status, output: text }))
    }

    /// Asks the guest for its nonce: the one of the last readiness line if it is still the same incarnation.
    fn nonce(&self) -> Result<String> {
        self.sh("printf %s \"$HEARTH_NONCE\"")
    }

    /// The guest's kernel panics. Does not wait.
    fn panic(&self) -> Result<()> {
        self.guest().start("echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger").map(drop)
    }

    /// The guest resets itself without going down properly: dirty pages and the journal stay as they are. Does not wait.
    fn reset(&self) -> Result<()> {
        self.guest().start("echo 1 >/proc/sys/kernel/sysrq; echo b >/proc/sysrq-trigger").map(drop)
    }

    /// Waits for the `count`th boot since the machine was made.
    fn wait_boots(&self, count: usize) -> Result<Ready> {
        let what = format!("readiness of boot {count}");
        self.wait_console(&what, patience(20), |heard| heard.ready().get(count - 1).cloned())
    }
}
