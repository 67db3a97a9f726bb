//! Who waits for memory, in what order, and for how long in all.

use std::time::{Duration, Instant};

use super::{AdmissionError, Verdict};

/// Threads of QEMU that wait, in the order they came. There are never more than QEMU has threads.
#[derive(Default)]
pub struct Queue(Vec<Waiting>);

struct Waiting {
    unit: usize,
    thread: u32,
    /// Up to when its waiting is counted.
    counted: Instant,
    admitted: bool,
    waited: Duration,
}

impl Queue {
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// False: it waits there already. (A signal interrupts a thread that waits, and then it reports again.)
    pub fn join(&mut self, unit: usize, thread: u32) -> bool {
        let known = self.0.iter().any(|waiting| (waiting.unit, waiting.thread) == (unit, thread));
        if !known {
            let counted = Instant::now();
            self.0.push(Waiting { unit, thread, counted, admitted: false, waited: Duration::ZERO });
        }
        !known
    }

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

    /// The time waited since the last such call. Who was admitted leaves.
    pub fn take_waited(&mut self) -> Duration {
        let waited = self.0.iter_mut().map(|waiting| std::mem::take(&mut waiting.waited)).sum();
        self.0.retain(|waiting| !waiting.admitted);
        waited
    }
}
