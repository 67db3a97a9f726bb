//! A guest, seen through its serial console: commands and their output, readiness, panics.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;

use crate::console::{Console, Line};
use crate::error::{Error, Result};
use crate::transcript::{Ready, Transcript};
use crate::wait::patience;

/// The length of a line that a serial console's line discipline takes at once (Linux: 4095 bytes).
const COMMAND_BYTES_MAX: usize = 4000;
/// Number of console lines that an error shows.
const LINES_SHOWN: usize = 40;

/// Command that starts the agent of a guest that has one ([`crate::TestVm::busybox_with_agent`]). Once it has returned, the
/// agent's port is open.
pub const START_AGENT: &str =
    "qemu-ga -d -m virtio-serial -p /dev/vport*p1 -t /run -f /run/qemu-ga.pid -l /tmp/qemu-ga.log";

/// Time between two checks of the machine's processes during a wait for its console.
pub(crate) const LOOK_AFTER: Duration = Duration::from_millis(500);

/// Status and output of a command that ended in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    pub status: i32,
    /// Standard output and standard error, interleaved as they came.
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

    /// Sends a shell command without waiting for its end, for commands that end the guest.
    pub fn start(&self, command: &str) -> Result<u64> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        // The first newline ends a line that another writer left unfinished.
        let line = format!("\n{id} {}\n", BASE64.encode(command));
        if line.len() > COMMAND_BYTES_MAX {
            return Err(Error::CommandTooLong { bytes: line.len() });
        }
        self.console.write(line.as_bytes(), patience(20)).map_err(|source| self.fail(Error::Console(source)))?;
        Ok(id)
    }

    /// Types a line for a running command to read.
    pub fn type_line(&self, line: &str) -> Result<()> {
        let typed = self.console.write(format!("{line}\n").as_bytes(), patience(20));
        typed.map_err(|source| self.fail(Error::Console(source)))
    }

    /// Status and output of a command that was started, if it ends within half a second.
    pub fn take_answer(&self, id: u64) -> Option<Output> {
        let answer = self.console.transcript().wait(LOOK_AFTER, |heard| heard.take_answer(id))?;
        Some(Output { status: answer.status, bytes: answer.output })
    }

    /// The readiness lines so far, one for each boot.
    pub fn ready(&self) -> Vec<Ready> {
        self.console.transcript().lock().ready().to_vec()
    }

    /// The kernel's messages so far.
    pub fn kernel_log(&self) -> Vec<String> {
        self.console.transcript().lock().kernel().to_vec()
    }

    /// Begins to record the times at which bytes come over the console.
    pub fn watch_arrivals(&self) {
        self.console.transcript().change(Transcript::watch_arrivals);
    }

    pub fn arrivals(&self) -> Vec<Instant> {
        self.console.transcript().lock().arrivals().to_vec()
    }

    /// The console's other lines.
    pub fn lines(&self) -> Vec<String> {
        self.console.transcript().lock().lines().to_vec()
    }

    /// The console's other lines from number `first` on, each with the time at which it came.
    pub fn heard_from(&self, first: usize) -> Vec<(Instant, String)> {
        self.console.transcript().lock().heard_from(first)
    }

    /// The last lines of the console, unfiltered.
    pub fn console_tail(&self) -> String {
        self.console.transcript().lock().tail(LINES_SHOWN)
    }

    pub(crate) fn timeout(&self, what: &str, limit: Duration) -> Error {
        let (what, seconds) = (what.to_owned(), limit.as_secs());
        self.fail(Error::Timeout { what, seconds, console: self.console_tail() })
    }

    /// Notes that a step failed, so that the logs are printed when the machine is dropped.
    pub(crate) fn fail(&self, error: Error) -> Error {
        self.failed.store(true, Ordering::Relaxed);
        error
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}

/// Operations on any machine that has a guest.
pub trait Drives {
    fn guest(&self) -> &Guest;

    /// Fails if the machine's process is gone, so that what is waited for cannot happen.
    fn check_alive(&self, waited: &str) -> Result<()>;

    /// Runs a shell command in the guest, and accepts any exit status.
    fn run(&self, command: &str) -> Result<Output> {
        self.run_within(command, patience(20))
    }

    /// Like [`Drives::run`], with a time limit.
    fn run_within(&self, command: &str, limit: Duration) -> Result<Output> {
        let id = self.guest().start(command)?;
        let answer = self.wait_console(&format!("answer to `{command}`"), limit, |heard| heard.take_answer(id))?;
        Ok(Output { status: answer.status, bytes: answer.output })
    }

    /// Waits until `look` finds something in the console's transcript. Fails when the machine ends first.
    fn wait_console<T>(
        &self,
        what: &str,
        limit: Duration,
        mut look: impl FnMut(&mut Transcript) -> Option<T>,
    ) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            // The machine's last lines still count, so its state is read before the console and used after it.
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

    /// Runs a shell command in the guest, which must succeed, and returns its output.
    fn sh(&self, command: &str) -> Result<String> {
        self.sh_within(command, patience(20))
    }

    /// Like [`Drives::sh`], with a time limit.
    fn sh_within(&self, command: &str, limit: Duration) -> Result<String> {
        let output = self.run_within(command, limit)?;
        let text = output.text();
        if output.status == 0 {
            return Ok(text);
        }
        let (command, status) = (command.to_owned(), output.status);
        Err(self.guest().fail(Error::GuestCommand { command, status, output: text }))
    }

    /// Asks the guest for its nonce. It equals that of the last readiness line if this is still the same incarnation.
    fn nonce(&self) -> Result<String> {
        self.sh("printf %s \"$HEARTH_NONCE\"")
    }

    /// Makes the guest's kernel panic. Does not wait.
    fn panic(&self) -> Result<()> {
        self.guest().start("echo 1 >/proc/sys/kernel/sysrq; echo c >/proc/sysrq-trigger").map(drop)
    }

    /// Makes the guest reset without shutting down: dirty pages and the journal stay as they are. Does not wait.
    fn reset(&self) -> Result<()> {
        self.guest().start("echo 1 >/proc/sys/kernel/sysrq; echo b >/proc/sysrq-trigger").map(drop)
    }

    /// Waits for the `count`th boot since the machine was made.
    fn wait_boots(&self, count: usize) -> Result<Ready> {
        let what = format!("readiness of boot {count}");
        self.wait_console(&what, patience(20), |heard| heard.ready().get(count - 1).cloned())
    }
}
