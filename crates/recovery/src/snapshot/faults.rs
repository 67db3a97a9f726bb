//! Faults: a test fails the n-th write of a save and all later ones. Outside of tests nothing fails here.

use std::io;

/// Called before each write, sync and rename of a file of a snapshot.
#[cfg(not(test))]
pub fn may_write() -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub use tests::may_write;

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Number of this thread's writes that still succeed, and the error of the later ones.
        static PLAN: Cell<Option<(u64, i32)>> = const { Cell::new(None) };
    }

    /// Fails according to the plan of this thread.
    pub fn may_write() -> io::Result<()> {
        match PLAN.get() {
            Some((0, errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some((left, errno)) => {
                PLAN.set(Some((left - 1, errno)));
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Runs `work` so that its write number `left`, counted from 0, and all later ones fail with `errno`.
    pub(crate) fn failing_from<T>(left: u64, errno: i32, work: impl FnOnce() -> T) -> T {
        PLAN.set(Some((left, errno)));
        let result = work();
        PLAN.set(None);
        result
    }
}
