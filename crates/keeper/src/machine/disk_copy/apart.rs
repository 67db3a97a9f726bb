//! Apart: work on a storage that may hang (NFS whose server is gone), on a thread of its own. If it hangs, it hangs alone.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// It looks this often whether to go on waiting.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Does this on a thread of its own, and waits for it no longer than `patience`, and while `go_on` has no objection. What comes of
/// work that nobody waits for any more is dropped on its thread.
pub fn apart<T: Send + 'static>(
    patience: Duration,
    go_on: &dyn Fn() -> Result<(), String>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    let (done, result) = channel();
    // The result is dropped there if nobody waits.
    let run = move || drop(done.send(work()));
    let thread = std::thread::Builder::new().name("copy-storage".into()).spawn(run);
    thread.map_err(|error| format!("cannot start a thread: {error}"))?;
    let began = Instant::now();
    loop {
        match result.recv_timeout(LOOK_EVERY) {
            Ok(result) => return Ok(result),
            Err(RecvTimeoutError::Disconnected) => return Err("its thread has ended".to_owned()),
            Err(RecvTimeoutError::Timeout) => go_on()?,
        }
        if began.elapsed() >= patience {
            return Err(format!("the storage of the copy has not answered for {patience:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn hung_work_is_left_behind() {
        let (answers, hangs) = mpsc::channel::<()>();
        let (ended, has_ended) = mpsc::channel::<()>();
        let work = move || {
            let _ = hangs.recv();
            ended
        };
        let short = Duration::from_millis(50);
        let error = apart(short, &|| Ok(()), work).unwrap_err();
        assert_eq!(error, "the storage of the copy has not answered for 50ms");
        drop(answers);
        // What it made is dropped.
        assert_eq!(has_ended.recv_timeout(Duration::from_secs(60)), Err(RecvTimeoutError::Disconnected));
        assert_eq!(apart(Duration::from_secs(60), &|| Ok(()), || 7), Ok(7));
        let (_answers, hangs) = mpsc::channel::<()>();
        let hung = move || hangs.recv().unwrap_or_default();
        assert_eq!(apart(Duration::from_secs(60), &|| Err("cancelled".to_owned()), hung), Err("cancelled".to_owned()));
    }
}
