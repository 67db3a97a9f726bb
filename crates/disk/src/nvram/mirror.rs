//! Mirror: the blocks of memory that have changed since they were last written to the mirror, and the thread that writes them.
//!
//! dirty blocks, flushes -> taken together -> each run copied under the lock -> written -> fdatasync -> flushes end
//!
//! A write of the guest and the copying of a block exclude each other, so that the mirror never has half a write of one
//! block. A block that is written while the mirror is, is dirty again, and its next flush waits for the next round.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::MirrorPolicy;
use crate::block::BLOCK_BYTES;
use crate::engine::Completion;
use crate::engine::notify::Doorbell;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// How long a change may wait for an asynchronous mirror; also the time until a mirror that failed is tried again.
const ASYNC_AFTER: Duration = Duration::from_secs(1);
/// A guest's write waits for at most so much copying.
const COPY_BYTES: usize = 64 << 10;

pub(super) struct Mirror {
    name: String,
    policy: MirrorPolicy,
    memory: Arc<File>,
    file: File,
    path: PathBuf,
    bytes: u64,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// A bit for each block.
    dirty: Vec<u64>,
    flushes: Vec<u64>,
    stop: bool,
    problem: Option<String>,
}

impl State {
    fn is_dirty(&self) -> bool {
        self.dirty.iter().any(|word| *word != 0)
    }
}

impl Mirror {
    pub(super) fn new(
        name: &str,
        policy: MirrorPolicy,
        memory: Arc<File>,
        (file, path): (File, &Path),
        bytes: u64,
        is_dirty: bool,
    ) -> Self {
        let words = bytes.div_ceil(BLOCK).div_ceil(64) as usize;
        let mut dirty = vec![0; words];
        if is_dirty {
            mark(&mut dirty, 0..bytes.div_ceil(BLOCK));
        }
        let state = State { dirty, flushes: Vec::new(), stop: false, problem: None };
        let (name, path) = (name.to_owned(), path.to_owned());
        Self { name, policy, memory, file, path, bytes, state: Mutex::new(state), changed: Condvar::new() }
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn start(self: Arc<Self>, flushed: Arc<Flushed>) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name(format!("mirror-{}", self.name)).spawn(move || self.run(&flushed))
    }

    /// Changes a range of the memory.
    pub(super) fn change(&self, range: Range<u64>, change: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.lock();
        // Also if it fails: then nobody knows what the range holds.
        mark(&mut state.dirty, range.start / BLOCK..range.end.div_ceil(BLOCK));
        let result = change();
        if self.policy == MirrorPolicy::Async {
            self.changed.notify_one();
        }
        result
    }

    /// Whether the end of a flush comes from here. A flush with nothing to write may still follow one that is being
    /// written, so it waits its turn as well.
    pub(super) fn must_wait(&self, token: u64) -> bool {
        if self.policy == MirrorPolicy::Async {
            return false;
        }
        self.lock().flushes.push(token);
        self.changed.notify_one();
        true
    }

    pub(super) fn stop(&self) {
        self.lock().stop = true;
        self.changed.notify_one();
    }

    pub(super) fn dirty_bytes(&self) -> u64 {
        self.lock().dirty.iter().map(|word| u64::from(word.count_ones())).sum::<u64>() * BLOCK
    }

    pub(super) fn problem(&self) -> Option<String> {
        self.lock().problem.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, flushed: &Flushed) {
        loop {
            let (dirty, flushes, stop) = self.next_round();
            let result = self.write(&dirty);
            if let Err(error) = &result {
                let problem = format!("{}: {error}", self.path.display());
                let mut state = self.lock();
                if state.problem.as_ref() != Some(&problem) {
                    tracing::error!(nvram = self.name, problem, "the mirror cannot be written");
                }
                state.dirty.iter_mut().zip(&dirty).for_each(|(word, again)| *word |= again);
                state.problem = Some(problem);
            } else {
                self.lock().problem = None;
            }
            let ended = |token| {
                let result = result.as_ref().map(|_| ());
                Completion { token, result: result.map_err(|error| io::Error::new(error.kind(), error.to_string())) }
            };
            flushed.add(flushes.into_iter().map(ended));
            if stop {
                return;
            }
        }
    }

    /// Waits for something to do, and takes all of it.
    fn next_round(&self) -> (Vec<u64>, Vec<u64>, bool) {
        let mut state = self.lock();
        while state.flushes.is_empty() && !state.stop {
            if self.policy == MirrorPolicy::Async && state.is_dirty() {
                // More may come meanwhile; a flush never does, and a stop is not kept waiting.
                let waited = self.changed.wait_timeout_while(state, ASYNC_AFTER, |state| !state.stop);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                break;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let clean = vec![0; state.dirty.len()];
        (std::mem::replace(&mut state.dirty, clean), std::mem::take(&mut state.flushes), state.stop)
    }

    fn write(&self, dirty: &[u64]) -> io::Result<()> {
        let mut buffer = vec![0; COPY_BYTES];
        for run in runs(dirty) {
            let run = run.start * BLOCK..(run.end * BLOCK).min(self.bytes);
            for at in run.clone().step_by(COPY_BYTES) {
                let piece = &mut buffer[..(run.end - at).min(COPY_BYTES as u64) as usize];
                let held = self.lock();
                self.memory.read_exact_at(piece, at)?;
                drop(held);
                self.file.write_all_at(piece, at)?;
            }
        }
        self.file.sync_data()
    }
}

fn mark(dirty: &mut [u64], blocks: Range<u64>) {
    blocks.for_each(|block| dirty[(block / 64) as usize] |= 1 << (block % 64));
}

/// Blocks that follow each other.
fn runs(dirty: &[u64]) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for (word, first) in dirty.iter().zip((0..).step_by(64)).filter(|(word, _)| **word != 0) {
        for block in (first..first + 64).filter(|block| word >> (block - first) & 1 == 1) {
            match runs.last_mut() {
                Some(run) if run.end == block => run.end += 1,
                _ => runs.push(block..block + 1),
            }
        }
    }
    runs
}

/// From one file to another, at the same place.
pub(super) fn copy(from: &File, to: &File, range: Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES];
    for at in range.clone().step_by(COPY_BYTES) {
        let piece = &mut buffer[..(range.end - at).min(COPY_BYTES as u64) as usize];
        from.read_exact_at(piece, at)?;
        to.write_all_at(piece, at)?;
    }
    Ok(())
}

/// Flushes that the mirror has ended, on their way back to the disk's thread.
pub(super) struct Flushed {
    ended: Mutex<Vec<Completion>>,
    has_ended: Condvar,
    doorbell: Doorbell,
}

impl Flushed {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { ended: Mutex::default(), has_ended: Condvar::new(), doorbell: Doorbell::new()? })
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Completion>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, ended: impl Iterator<Item = Completion>) {
        let mut here = self.lock();
        here.extend(ended);
        // Under the lock, as it is cleared: it never rings for what is gone.
        self.doorbell.ring();
        self.has_ended.notify_one();
    }

    pub(super) fn take(&self, ended: &mut Vec<Completion>) -> usize {
        let mut here = self.lock();
        self.doorbell.clear();
        let count = here.len();
        ended.append(&mut here);
        count
    }

    pub(super) fn wait(&self, at_most: Duration) {
        let waited = self.has_ended.wait_timeout_while(self.lock(), at_most, |ended| ended.is_empty());
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn notifier(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }
}
