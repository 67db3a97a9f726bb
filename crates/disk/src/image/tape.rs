//! For tests: records all that is done to a file and to the log or note beside it, in order; and a disk that is full for a while.

use std::io;
use std::sync::atomic::{AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::engine::tests::Noise;

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
    /// The first `before` events of the tape are durable. Later ones may be.
    Sync {
        before: usize,
    },
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

    /// Number of recorded events. A sync that begins now makes them durable.
    pub fn length(&self) -> usize {
        self.0.events.lock().unwrap().len()
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

pub(crate) fn note(tape: &Option<Tape>, event: impl FnOnce() -> Event) {
    if let Some(tape) = tape {
        tape.push(event());
    }
}

pub(crate) fn length(tape: &Option<Tape>) -> usize {
    tape.as_ref().map_or(0, Tape::length)
}

pub(super) fn may_change(tape: &Option<Tape>) -> io::Result<()> {
    tape.as_ref().map_or(Ok(()), Tape::may_change)
}

/// The unit that a power cut leaves old or new.
pub(crate) const SECTOR: usize = 512;

/// A file's content while a tape is played, and the states that a power cut could leave.
pub(crate) struct Played {
    /// The content with every write so far.
    pub full: Vec<u8>,
    /// The content with the durable writes only.
    durable: Vec<u8>,
    /// The other writes, with their numbers on the tape.
    pending: Vec<(usize, Event)>,
}

impl Played {
    pub fn new(start: &[u8]) -> Self {
        Self { full: start.to_vec(), durable: start.to_vec(), pending: Vec::new() }
    }

    /// Plays the tape's next event, given with its number.
    pub fn play(&mut self, number: usize, event: &Event) {
        match event {
            Event::Write { .. } | Event::Zero { .. } => {
                apply(&mut self.full, event, |_| true);
                self.pending.push((number, event.clone()));
            }
            Event::Sync { before } => {
                let synced = self.pending.extract_if(.., |(number, _)| *number < *before);
                synced.for_each(|(_, event)| apply(&mut self.durable, &event, |_| true));
            }
            Event::Log { .. } | Event::LogEnds { .. } | Event::Done(_) => {}
        }
    }

    /// States after a power cut at this point: without any pending write, without one of them, with only one, with random sectors.
    pub fn cut(&self, noise: &mut Noise) -> Vec<Vec<u8>> {
        let odd = noise.below(self.pending.len().max(1));
        let state = |cut| {
            let mut state = self.durable.clone();
            for (index, (_, event)) in self.pending.iter().enumerate() {
                let seed = noise.next();
                apply(&mut state, event, |sector| match cut {
                    0 => false,
                    1 => index != odd,
                    2 => index == odd,
                    _ => Noise(seed ^ sector as u64).below(2) == 0,
                });
            }
            state
        };
        (0..if self.pending.is_empty() { 1 } else { 4 }).map(state).collect()
    }
}

/// Sectors of a write that reached the disk.
fn apply(file: &mut Vec<u8>, event: &Event, reached: impl Fn(usize) -> bool) {
    let (offset, length, grows) = match event {
        Event::Write { offset, bytes } => (*offset as usize, bytes.len(), true),
        Event::Zero { offset, length, grows } => (*offset as usize, *length as usize, *grows),
        _ => return,
    };
    for sector in 0..length.div_ceil(SECTOR) {
        let from = sector * SECTOR;
        let (start, end) = (offset + from, offset + (from + SECTOR).min(length));
        if !reached(sector) {
            continue;
        }
        if grows && file.len() < end {
            file.resize(end, 0);
        }
        let end = end.min(file.len());
        if start >= end {
            continue;
        }
        match event {
            Event::Write { bytes, .. } => file[start..end].copy_from_slice(&bytes[from..][..end - start]),
            _ => file[start..end].fill(0),
        }
    }
}
