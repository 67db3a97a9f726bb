//! The threads that wait for memory, in order of arrival, and how long they have waited.

use std::time::{Duration, Instant};

use super::{AdmissionError, Verdict};

/// Threads of QEMU that wait, in order of arrival. At most as many as QEMU has threads.
#[derive(Default)]
pub struct Queue(Vec<Waiting>);

struct Waiting {
    unit: usize,
    thread: u32,
    /// The waiting time is counted up to this moment.
    counted: Instant,
    admitted: bool,
    waited: Duration,
}

impl Queue {
    /// Number of waiting threads.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no thread waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a thread. Returns false if it waits for this unit already: a signal interrupts a waiting thread, which then
    /// reports again.
    pub fn join(&mut self, unit: usize, thread: u32) -> bool {
        let known = self.0.iter().any(|waiting| (waiting.unit, waiting.thread) == (unit, thread));
        if !known {
            let counted = Instant::now();
            self.0.push(Waiting { unit, thread, counted, admitted: false, waited: Duration::ZERO });
        }
        !known
    }

    /// Calls `admit` for the unit of each thread and notes which threads are admitted.
    pub fn ask(
        &mut self,
        admit: &mut impl FnMut(usize) -> Result<Verdict, AdmissionError>,
    ) -> Result<(), AdmissionError> {
        for waiting in &mut self.0 {
            waiting.admitted = admit(waiting.unit)? == Verdict::Granted;
            let now = Instant::now();
            waiting.waited += now - waiting.counted;
            waiting.counted = now;
        }
        Ok(())
    }

    /// Returns the time waited since the last call, and removes admitted threads.
    pub fn take_waited(&mut self) -> Duration {
        let waited = self.0.iter_mut().map(|waiting| std::mem::take(&mut waiting.waited)).sum();
        self.0.retain(|waiting| !waiting.admitted);
        waited
    }
}
