//! Trace: what a restored guest touches first is noted, for a time or until it does what is looked for from outside.

use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use hearth_recovery::lazy_restore::LazyRam;

use super::{Teller, Word};

/// A connection that nobody in the guest takes ends sooner.
const HANGS_UP_WITHIN: Duration = Duration::from_millis(500);
/// A traced guest is looked after so often.
const TRACE_STEP: Duration = Duration::from_millis(50);

/// How long first touches are noted.
#[derive(Clone, Debug)]
pub struct Trace {
    pub window: Duration,
    /// Ends it sooner.
    pub until: Option<Probe>,
    /// The machine is of no use afterwards: a rehearsal.
    pub then_stop: bool,
}

/// What is looked for from outside.
#[derive(Clone, Debug)]
pub enum Probe {
    /// A port of this host behind which something answers.
    Port(u16),
    /// A shell command that succeeds.
    Command(String),
}

impl Probe {
    fn succeeds(&self) -> bool {
        match self {
            Self::Port(port) => is_served(*port),
            Self::Command(command) => {
                let run = Command::new("sh").args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).status();
                run.is_ok_and(|status| status.success())
            }
        }
    }
}

/// QEMU takes every connection, and hangs up on those that its guest does not take.
fn is_served(port: u16) -> bool {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let Ok(mut stream) = TcpStream::connect_timeout(&address, HANGS_UP_WITHIN) else { return false };
    if stream.set_read_timeout(Some(HANGS_UP_WITHIN)).is_err() {
        return false;
    }
    match stream.read(&mut [0]) {
        Ok(length) => length > 0,
        // It is not hung up on.
        Err(error) => matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut),
    }
}

pub(super) fn note_first_touches(lazy: &LazyRam, trace: &Trace, teller: &Teller) {
    let deadline = Instant::now() + trace.window;
    let is_reached = || trace.until.as_ref().is_some_and(Probe::succeeds);
    while Instant::now() < deadline && !lazy.is_stopped() && !is_reached() {
        std::thread::sleep(TRACE_STEP.min(deadline.saturating_duration_since(Instant::now())));
    }
    let used = lazy.end_trace();
    if lazy.is_stopped() {
        return;
    }
    match lazy.snapshot().add_trace(&used) {
        Ok(pages) => teller.say(Word::Traced { pages }),
        Err(error) => {
            let message = format!("the working set is not noted: {}", crate::chain(&error));
            teller.say(Word::Failed { message });
        }
    }
}
