//! Device state of a guest: taken from a QEMU whose guest stands still, or given to one that waits for a guest.
//!
//! RAM is not part of it, but a file of its own (`x-ignore-shared`).

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use hearth_qemu::{Migration, Qmp, QmpError, Stream};

use crate::rejuvenation::relay;

/// Pause between two checks of QEMU's progress. It takes 10 to 20 ms in all.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Why a device state could not be taken or given.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum StateError {
    #[error("the channel for the guest's state cannot be created")]
    Channel(#[source] std::io::Error),
    #[error("QEMU did not save the state of its devices")]
    Take(#[source] QmpError),
    #[error("QEMU did not load the state of its devices; does it have the same machine type and devices?")]
    Give(#[source] QmpError),
    #[error("QEMU aborted: {why}")]
    BrokenOff { why: String },
    #[error("the guest is in state {state:?}, not in the one that was saved")]
    Elsewhere { state: String },
    #[error("QEMU hangs: the state was not transferred within {patience:?}")]
    Hangs { patience: Duration },
}

/// Does what can be done before the guest stands still.
pub fn prepare(qmp: &Qmp, patience: Duration) -> Result<(), StateError> {
    qmp.prepare_migration(patience).map_err(StateError::Take)
}

/// Takes the state, after `prepare`. The guest must stand still (`Qmp::pause`), and can run again afterwards.
pub fn take(qmp: &Qmp, patience: Duration) -> Result<Vec<u8>, StateError> {
    let deadline = Instant::now() + patience;
    let (ours, theirs) = Stream::pair().map_err(StateError::Channel)?;
    let ask = || qmp.migrate(OwnedFd::from(theirs).as_fd(), patience);
    let received = relay::receive_while(ours, deadline, ask).map_err(|_| StateError::Hangs { patience })?;
    let state = received.map_err(StateError::Take)?;
    await_end(qmp, deadline, patience, StateError::Take)?;
    Ok(state)
}

/// Gives the state to a QEMU that waits for a guest. Afterwards QEMU has the guest, which stands still.
pub fn give(qmp: &Qmp, state: &[u8], patience: Duration) -> Result<(), StateError> {
    let deadline = Instant::now() + patience;
    qmp.prepare_migration(patience).map_err(StateError::Give)?;
    let (ours, theirs) = Stream::pair().map_err(StateError::Channel)?;
    qmp.migrate_incoming(OwnedFd::from(theirs).as_fd(), patience).map_err(StateError::Give)?;
    match relay::send(ours, state, deadline) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => return Err(StateError::Hangs { patience }),
        // QEMU may have hung up. Whether it has all it needs it reports itself.
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
