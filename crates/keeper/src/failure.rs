//! Failure: an error has ended a machine's keeper, or kept it from starting. It is in the machine's event log, where page, metrics and
//! commands look for it.
//!
//! error -> no other keeper runs the machine -> told already? -> the error and the state `failed` in the log
//!
//! It is over when a guest runs again, or when the operator takes note of it (`hearth stop`).

use std::path::Path;

use hearth_api::{EventKind, MachineState};

use crate::check::life;
use crate::event_log::{EventLog, last_failure};
use crate::folders::{self, FolderError};

#[derive(Debug, thiserror::Error)]
enum FailureError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("cannot open the event log")]
    EventLog(#[source] std::io::Error),
}

/// Records why the machine with this runtime folder does not run, unless another keeper runs it, or a service manager has tried again and
/// the same went wrong.
pub fn record(name: &str, runtime: &Path, why: &str) {
    let is_known = |known: String| without_digits(&known) == without_digits(why);
    if last_failure(runtime).is_some_and(is_known) {
        return;
    }
    let events = [EventKind::Error { message: why.to_owned() }];
    match append(name, runtime, events, (MachineState::Starting, MachineState::Failed)) {
        Ok(()) | Err(FailureError::Folder(FolderError::Running { .. })) => {}
        Err(error) => tracing::warn!(name, error = crate::chain(&error), "cannot record why the machine does not run"),
    }
}

/// The operator takes note of a failure. Returns false if there is none, and if the machine runs.
pub fn acknowledge(name: &str, runtime: &Path) -> bool {
    let has_failed = last_failure(runtime).is_some() && life::orphaned_qemu(runtime).is_none();
    let events = [EventKind::Request { verb: "stop".to_owned() }];
    has_failed && append(name, runtime, events, (MachineState::Failed, MachineState::Stopped)).is_ok()
}

/// Appends events and a change of the state to the log of a machine that no keeper runs.
fn append(
    name: &str,
    runtime: &Path,
    events: impl IntoIterator<Item = EventKind>,
    (from, to): (MachineState, MachineState),
) -> Result<(), FailureError> {
    let _lock = folders::lock_runtime(name, runtime)?;
    let log = EventLog::open(name, runtime).map_err(FailureError::EventLog)?;
    events.into_iter().chain([EventKind::StateChanged { from, to }]).for_each(|event| {
        log.record(event);
    });
    Ok(())
}

/// Free memory, pids and the like differ with each try.
fn without_digits(text: &str) -> String {
    text.chars().filter(|letter| !letter.is_ascii_digit()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_log::read_file;

    #[test]
    fn failure_is_recorded_once_until_it_is_over() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = folder.path().join("web");
        let check = |events: usize, failure: Option<&str>| {
            assert_eq!(read_file(&runtime).unwrap().len(), events);
            assert_eq!(last_failure(&runtime).as_deref(), failure);
        };
        assert!(!acknowledge("web", &runtime) && !runtime.exists());
        record("web", &runtime, "needs 4 GiB, 1 GiB free");
        check(2, Some("needs 4 GiB, 1 GiB free"));
        record("web", &runtime, "needs 4 GiB, 2 GiB free");
        check(2, Some("needs 4 GiB, 1 GiB free"));
        record("web", &runtime, "no such image");
        check(4, Some("no such image"));
        assert!(acknowledge("web", &runtime));
        check(6, None);
        assert!(!acknowledge("web", &runtime));
        record("web", &runtime, "no such image");
        check(8, Some("no such image"));
    }

    #[test]
    fn machine_with_a_keeper_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let runtime = folder.path().join("web");
        record("web", &runtime, "no such image");
        let _keeper = folders::lock_runtime("web", &runtime).unwrap();
        record("web", &runtime, "already running");
        assert!(!acknowledge("web", &runtime));
        assert_eq!(read_file(&runtime).unwrap().len(), 2);
    }
}
