//! Priority: a dump's compressors have the lowest priority, because the next guest comes first. While the guest waits
//! for memory they have the keeper's own priority.
//!
//! To raise its priority a thread needs root, CAP_SYS_NICE or a limit (`ulimit -e`, systemd's `LimitNICE=`) that allows
//! it. Without these the compressors stay at the lowest priority.

use std::sync::{Arc, Mutex, MutexGuard};

use rustix::process::{Pid, getpriority_process, setpriority_process};

/// The kernel's number for the lowest priority.
const LOWEST: i32 = 19;

/// Tells whether the guest waits now for memory that a dump holds.
pub type GuestWaits = Arc<dyn Fn() -> bool + Send + Sync>;

/// The compressing threads of one dump. On Linux each thread has its own priority.
#[derive(Default)]
pub struct Compressors {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    threads: Vec<Pid>,
    hurried: bool,
}

impl Compressors {
    /// Adds this thread to the compressors, until the returned value is dropped.
    pub fn join(&self) -> Member<'_> {
        let thread = rustix::thread::gettid();
        let mut state = self.state();
        state.threads.push(thread);
        if !state.hurried {
            set(thread, LOWEST);
        }
        Member { compressors: self, thread }
    }

    /// Gives the compressors the caller's priority, or the lowest one again.
    pub fn hurry(&self, hurried: bool) {
        let mut state = self.state();
        if state.hurried == hurried {
            return;
        }
        state.hurried = hurried;
        let priority = if hurried { getpriority_process(None).unwrap_or(0) } else { LOWEST };
        state.threads.iter().for_each(|&thread| set(thread, priority));
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("holders of this lock do not panic")
    }
}

/// A thread among the compressors.
pub struct Member<'a> {
    compressors: &'a Compressors,
    thread: Pid,
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        // The thread's number may soon be another thread's.
        self.compressors.state().threads.retain(|&thread| thread != self.thread);
    }
}

fn set(thread: Pid, priority: i32) {
    if let Err(error) = setpriority_process(Some(thread), priority) {
        tracing::debug!(%error, priority, "cannot change a compression thread's priority");
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn compressors_are_raised_only_while_the_guest_waits() {
        let (compressors, own) = (Compressors::default(), getpriority_process(None).unwrap());
        // Only the kernel knows whether this user may raise a thread.
        let may_raise = std::thread::spawn(move || {
            let this = rustix::thread::gettid();
            set(this, LOWEST);
            setpriority_process(Some(this), own).is_ok()
        });
        let raised = if may_raise.join().unwrap() { own } else { LOWEST };
        std::thread::scope(|scope| {
            let ((joined, joins), (leave, leaves)) = (channel(), channel::<()>());
            let compressors = &compressors;
            scope.spawn(move || {
                let _member = compressors.join();
                joined.send(rustix::thread::gettid()).unwrap();
                // Blocks until the other end is dropped.
                let _ = leaves.recv();
            });
            let thread = joins.recv().unwrap();
            let priority = || getpriority_process(Some(thread)).unwrap();
            assert_eq!(priority(), LOWEST);
            compressors.hurry(true);
            assert_eq!(priority(), raised);
            compressors.hurry(false);
            assert_eq!(priority(), LOWEST);
            drop(leave);
        });
        assert!(compressors.state().threads.is_empty(), "a thread that is gone would be raised");
    }
}
