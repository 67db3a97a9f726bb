//! The state of a guest's devices, taken from a QEMU whose guest stands still, or given to one that waits for a guest.
//!
//! RAM is not in it: that is a file beside (`x-ignore-shared`).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use hearth_qemu::{Migration, Qmp, QmpError};

use crate::rejuvenation::relay;

/// Between two looks at how far QEMU is. It takes 10 to 20 ms in all.
const LOOK_EVERY: Duration = Duration::from_millis(1);

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("no channel for the guest's state")]
    Channel(#[source] std::io::Error),
    #[error("QEMU did not give the state of its devices away")]
    Take(#[source] QmpError),
    #[error("QEMU did not take the state of its devices; is it of the same machine type, with the same devices?")]
    Give(#[source] QmpError),
    #[error("QEMU broke off: {why}")]
    BrokenOff { why: String },
    #[error("the guest is {state:?} and not where it was saved")]
    Elsewhere { state: String },
    #[error("QEMU hangs: the state was not over within {patience:?}")]
    Hangs { patience: Duration },
}

/// What can be done before the guest stands still.
pub fn prepare(qmp: &Qmp, patience: Duration) -> Result<(), StateError> {
    qmp.prepare_migration(patience).map_err(StateError::Take)
}

/// After `prepare`. The guest must stand still (`Qmp::pause`); it can go on afterwards.
pub fn take(qmp: &Qmp, patience: Duration) -> Result<Vec<u8>, StateError> {
    let deadline = Instant::now() + patience;
    let (ours, theirs) = UnixStream::pair().map_err(StateError::Channel)?;
    let ask = || qmp.migrate(OwnedFd::from(theirs).as_fd(), patience);
    let received = relay::receive_while(ours, deadline, ask).map_err(|_| StateError::Hangs { patience })?;
    let state = received.map_err(StateError::Take)?;
    await_end(qmp, deadline, patience, StateError::Take)?;
    Ok(state)
}

/// The guest is there afterwards, and stands still.
pub fn give(qmp: &Qmp, state: &[u8], patience: Duration) -> Result<(), StateError> {
    let deadline = Instant::now() + patience;
    qmp.prepare_migration(patience).map_err(StateError::Give)?;
    let (ours, theirs) = UnixStream::pair().map_err(StateError::Channel)?;
    qmp.migrate_incoming(OwnedFd::from(theirs).as_fd(), patience).map_err(StateError::Give)?;
    match relay::send(ours, state, deadline) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Err(StateError::Hangs { patience }),
        // It hung up on us: whether it has all it needs it says itself.
        _ => await_end(qmp, deadline, patience, StateError::Give)?,
    }
    let state = qmp.run_state().map_err(StateError::Give)?;
    if state == "paused" { Ok(()) } else { Err(StateError::Elsewhere { state }) }
}

fn await_end(
    qmp: &Qmp,
    deadline: Instant,
    patience: Duration,
    failed: fn(QmpError) -> StateError,
) -> Result<(), StateError> {
    loop {
        match qmp.migration().map_err(failed)? {
            Migration::Completed => return Ok(()),
            Migration::Failed { why } => return Err(StateError::BrokenOff { why }),
            Migration::None | Migration::UnderWay(_) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Migration::None | Migration::UnderWay(_) => return Err(StateError::Hangs { patience }),
        }
    }
}
