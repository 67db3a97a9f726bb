//! Launch job: a thread that starts a QEMU, because that takes 40 to 1,000 ms and the machine's loop answers meanwhile.
//!
//! begin -> prepare -> spawn QEMU -> wait for its QMP -> `Event::Launched` -> `end`: the loop takes the result
//!       \-> `give_up`: a QEMU that was spawned is killed, and none is spawned from here on
//!
//! A QEMU that the loop has not taken ends with its job. Whoever drops a job, or one that was given up, waits for the end of its
//! QEMU: nothing of it is left then.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use hearth_qemu::Process;

use crate::event::Event;

/// A QEMU that is being started. `T`: what comes of it.
pub struct LaunchJob<T> {
    result: Receiver<T>,
    run: Run,
}

/// The thread of a job. It may have been given up.
pub struct Run {
    number: u32,
    control: LaunchControl,
    thread: Option<JoinHandle<()>>,
}

/// Ends a job from outside. Clones share it.
#[derive(Clone, Default)]
pub struct LaunchControl(Arc<Mutex<Stage>>);

#[derive(Default)]
enum Stage {
    /// No process has been started.
    #[default]
    Prepares,
    /// Kills the process that has been started.
    Spawned(Box<dyn Fn() + Send>),
    GivenUp {
        spawned: bool,
    },
    Over,
}

/// The job was given up before it had started a process.
#[derive(Debug, thiserror::Error)]
#[error("given up before QEMU was started")]
pub struct GivenUp;

impl<T: Send + 'static> LaunchJob<T> {
    /// `number`: of the QEMU's generation.
    pub fn begin(
        machine: &str,
        number: u32,
        tell: Sender<Event>,
        work: impl FnOnce(&LaunchControl) -> T + Send + 'static,
    ) -> io::Result<Self> {
        Self::begin_with(LaunchControl::default(), machine, number, tell, work)
    }

    /// As `begin`, for a job that goes on with a process, whose control these are.
    pub fn begin_with(
        control: LaunchControl,
        machine: &str,
        number: u32,
        tell: Sender<Event>,
        work: impl FnOnce(&LaunchControl) -> T + Send + 'static,
    ) -> io::Result<Self> {
        let (done, result) = channel();
        let held = control.clone();
        let work = move || {
            // If the job was given up nobody takes the result, and its QEMU ends here.
            let _ = done.send(work(&held));
            // Fails only when the loop is gone.
            let _ = tell.send(Event::Launched { generation: number });
        };
        let thread = std::thread::Builder::new().name(format!("launch-{machine}")).spawn(work)?;
        Ok(Self { result, run: Run { number, control, thread: Some(thread) } })
    }

    /// Number of the QEMU's generation.
    pub fn number(&self) -> u32 {
        self.run.number
    }

    /// To end the job early: a QEMU that was spawned is killed then, and none is spawned any more.
    pub fn control(&self) -> LaunchControl {
        self.run.control.clone()
    }

    /// Takes the result; waits for it if the job has not said yet that it has ended.
    pub fn end(self) -> T {
        let result = self.result.recv().expect("a panic of the job's thread ends the keeper");
        self.run.control.let_go();
        result
    }

    /// No QEMU comes of it. Keep what is returned until `Event::Launched`.
    pub fn give_up(self) -> Run {
        self.run.control.give_up();
        self.run
    }
}

impl Run {
    /// Number of the QEMU's generation.
    pub fn number(&self) -> u32 {
        self.number
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let has_process = self.control.give_up();
        // One that has started nothing, and never will, may wait for a program that hangs.
        if let Some(thread) = self.thread.take().filter(|_| has_process)
            && thread.join().is_err()
        {
            tracing::error!("the thread that starts QEMU panicked");
        }
    }
}

impl LaunchControl {
    /// Of a process that has been started.
    pub fn of(process: &Process) -> Self {
        Self(Arc::new(Mutex::new(Stage::Spawned(Box::new(process.killer())))))
    }

    /// Does what leaves something outside of this process, unless the job was given up. `begin` returns the process.
    pub fn spawn<E: From<GivenUp>>(&self, begin: impl FnOnce() -> Result<Process, E>) -> Result<Process, E> {
        let mut stage = self.stage();
        if matches!(*stage, Stage::GivenUp { .. }) {
            return Err(GivenUp.into());
        }
        let process = begin()?;
        *stage = Stage::Spawned(Box::new(process.killer()));
        Ok(process)
    }

    pub fn is_given_up(&self) -> bool {
        matches!(*self.stage(), Stage::GivenUp { .. })
    }

    /// Whether there is, or was, a process that ends now.
    pub fn give_up(&self) -> bool {
        let mut stage = self.stage();
        let spawned = match &*stage {
            Stage::Over => return false,
            Stage::Prepares => false,
            Stage::Spawned(kill) => {
                kill();
                true
            }
            Stage::GivenUp { spawned } => *spawned,
        };
        *stage = Stage::GivenUp { spawned };
        spawned
    }

    fn let_go(&self) {
        *self.stage() = Stage::Over;
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().expect("nobody panics with it")
    }
}
