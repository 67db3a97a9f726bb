//! For tests: a recording of all that is done to an image's file and to the log of its tables, in its order; and a disk that is full
//! for a while.

use std::io;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

#[derive(Clone, Debug, Default)]
pub(crate) struct Tape(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    events: Mutex<Vec<Event>>,
    /// Changes until the disk is full; it is for as many as `full_for`.
    until_full: AtomicI64,
    full_for: AtomicI64,
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Write {
        offset: u64,
        bytes: Vec<u8>,
    },
    /// Reads as zeroes; the file becomes longer if `grows`.
    Zero {
        offset: u64,
        length: u64,
        grows: bool,
    },
    Sync,
    Log {
        offset: u64,
        bytes: Vec<u8>,
    },
    LogEnds {
        length: u64,
    },
    /// The test's own: so many operations have been reported.
    Done(usize),
}

impl Tape {
    pub fn push(&self, event: Event) {
        self.0.events.lock().unwrap().push(event);
    }

    pub fn take(&self) -> Vec<Event> {
        std::mem::take(&mut *self.0.events.lock().unwrap())
    }

    /// The disk takes so many changes, refuses as many as `changes`, and takes all that follow.
    pub fn fill_disk(&self, after: i64, changes: i64) {
        self.0.until_full.store(after, Relaxed);
        self.0.full_for.store(changes, Relaxed);
    }

    fn may_change(&self) -> io::Result<()> {
        let left = self.0.until_full.fetch_sub(1, Relaxed);
        match left <= 0 && left > -self.0.full_for.load(Relaxed) {
            true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            false => Ok(()),
        }
    }
}

pub(super) fn note(tape: &Option<Tape>, event: impl FnOnce() -> Event) {
    if let Some(tape) = tape {
        tape.push(event());
    }
}

pub(super) fn may_change(tape: &Option<Tape>) -> io::Result<()> {
    tape.as_ref().map_or(Ok(()), Tape::may_change)
}
