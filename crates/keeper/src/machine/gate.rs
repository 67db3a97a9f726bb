//! Gate: the thread that answers a guest's first touch of its memory, and the disks that ask with it, while the machine's
//! memory is short (`hearth_recovery::admission`).
//!
//! QEMU is started with `-S` -> its memory is registered -> the disks get the gate -> the guest runs -> everything would
//! fit, or QEMU ends -> the gate is gone
//!
//! A guest that cannot be gated runs all the same: the warden trims for it, and the events say that the budget is not
//! certain.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_api::{AdmissionStatus, EventKind};
use hearth_disk::gate::Gate;
use hearth_disk::server::ServerError;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::admission::{AdmissionError, is_registered};
use hearth_recovery::admission::{Admission, Terms};
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::QemuIdentity;

use super::Machine;
use super::generation::Generation;
use super::restore::Restoring;
use crate::config::AdmissionMode;
use crate::event::{AdmissionMessage, Event};

/// A guest that waits for so long is worth a word: the dump writes tens of MiB a second even to a slow disk.
const STALL: Duration = Duration::from_secs(10);

/// The gate of the living QEMU.
pub struct MemoryGate {
    admission: Arc<Admission>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryGate {
    pub fn start(machine: &str, admission: Admission, tell: Sender<Event>) -> std::io::Result<Self> {
        let admission = Arc::new(admission);
        let work = admission.clone();
        let thread = std::thread::Builder::new().name(format!("faults-{machine}")).spawn(move || {
            let tell = move |message| {
                // Fails only when the machine's loop is gone.
                let _ = tell.send(Event::Admission(message));
            };
            serve(&work, &tell);
        })?;
        Ok(Self { admission, thread: Some(thread) })
    }

    pub fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    pub fn is_shut(&self) -> bool {
        !self.admission.is_over()
    }

    pub fn status(&self) -> AdmissionStatus {
        let waits = self.admission.waits();
        AdmissionStatus {
            on: self.is_shut(),
            granted_bytes: self.admission.granted_bytes(),
            faults: waits.faults,
            waiting: waits.waiting,
            guest_wait_ms: waits.waited.as_millis() as u64,
        }
    }
}

impl Drop for MemoryGate {
    fn drop(&mut self) {
        self.admission.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the page-fault thread panicked");
        }
    }
}

fn serve(admission: &Admission, tell: &dyn Fn(AdmissionMessage)) {
    let mut told = false;
    let served = admission.serve(|admission| {
        let stands_still = admission.stalled_for() >= STALL;
        if stands_still && !told {
            tell(AdmissionMessage::Stalled { waiting: admission.waits().waiting });
        }
        told = stands_still;
    });
    match served {
        Ok(()) if admission.is_over() => tell(AdmissionMessage::Open),
        // Stopped, or QEMU is gone.
        Ok(()) | Err(AdmissionError::Gone { .. }) => {}
        Err(error) => {
            // A guest that hangs for ever is worse than one that takes too much.
            let opened = admission.finish().err().map(|error| format!("; {}", crate::chain(&error)));
            tell(AdmissionMessage::Failed { why: crate::chain(&error) + &opened.unwrap_or_default() });
        }
    }
}

impl Machine {
    /// Memory is granted unit by unit while dead memory cannot be given up for it, or whenever there is any.
    pub(super) fn gate_wanted(&self) -> bool {
        let always = self.parts.config.admission == AdmissionMode::Always;
        self.ember.is_held() || always && !self.ember.incarnations().is_empty()
    }

    /// Puts the gate before the memory of a QEMU that holds still.
    pub(super) fn shut_gate(&mut self, incarnation: &Incarnation, generation: &Generation) {
        let userfault = generation.userfault().map_err(str::to_owned);
        let shut = userfault.and_then(|userfault| {
            let admission = Admission::register(self.terms(), incarnation, userfault);
            self.hold_gate(admission.map_err(|error| crate::chain(&error))?)
        });
        match shut {
            Ok(()) => self.gate_disks(),
            Err(why) => self.not_gated(&why),
        }
    }

    /// Takes over the gate of a keeper that died, if it left one; before anything else touches the guest's memory. An
    /// error is a guest that would wait for ever.
    pub(super) fn resume_gate(&mut self, incarnation: &Incarnation, identity: &QemuIdentity) -> UserfaultOr {
        let fetched = identity.userfault_fd.ok_or_else(|| "a previous keeper had none".to_owned());
        let fetched = fetched.and_then(|fd| {
            Userfault::fetch(identity.pid, fd, identity.helper_fd).map_err(|error| crate::chain(&error))
        });
        let resumed = match &fetched {
            Ok(userfault) => {
                Admission::resume(self.terms(), incarnation, userfault).map_err(|error| crate::chain(&error))
            }
            Err(why) => match is_registered(identity.pid, &incarnation.ram) {
                Ok(false) => Ok(None),
                Ok(true) => Err(why.clone()),
                Err(error) => Err(error.to_string()),
            },
        };
        match resumed.and_then(|admission| admission.map_or(Ok(()), |admission| self.hold_gate(admission))) {
            Ok(()) => UserfaultOr::Userfault(fetched),
            Err(why) => UserfaultOr::Stuck(why),
        }
    }

    fn terms(&self) -> Terms {
        Terms {
            folder: self.parts.folders.memory.clone(),
            budget: self.budget,
            ember: self.ember.clone(),
            only_for_dumps: self.parts.config.admission == AdmissionMode::Dump,
        }
    }

    fn hold_gate(&mut self, admission: Admission) -> Result<(), String> {
        let gate = MemoryGate::start(&self.parts.config.name, admission, self.parts.tell.clone());
        let gate = gate.map_err(|error| format!("cannot start the page-fault thread: {error}"))?;
        self.warden.consider(Some(gate.admission().clone()));
        self.gate = Some(gate);
        Ok(())
    }

    /// What disks have to ask now.
    pub(super) fn disk_gate(&self) -> Option<Gate> {
        let restored = self.restoring.as_ref().and_then(Restoring::gate);
        restored.or_else(|| self.gate.as_ref().filter(|gate| gate.is_shut()).map(|gate| gate.admission().gate()))
    }

    /// The disks ask, or need not ask any more.
    pub(super) fn gate_disks(&self) {
        if let Err(error) = self.try_gate_disks() {
            tracing::warn!(error = crate::chain(&error), "a disk may use memory that was not granted");
        }
    }

    /// One that does not answer keeps none of the others from it.
    pub(super) fn try_gate_disks(&self) -> Result<(), ServerError> {
        let gated: Vec<_> = self.disks.iter().map(|disk| disk.set_gate(self.disk_gate())).collect();
        gated.into_iter().collect()
    }

    /// All of the guest's memory is granted; where only the ember stands against that, it gives way.
    pub(super) fn memory_is_granted(&self) -> bool {
        self.gate.as_ref().is_none_or(|gate| match gate.admission().end_for_ember() {
            Ok(ended) => ended,
            Err(error) => {
                tracing::warn!(
                    error = crate::chain(&error),
                    "cannot grant all memory at once; granting it unit by unit"
                );
                false
            }
        })
    }

    /// Its QEMU is gone.
    pub(super) fn drop_gate(&mut self) {
        if self.gate.take().is_some() {
            self.warden.consider(None);
            self.gate_disks();
        }
    }

    pub(super) fn admission_says(&mut self, message: AdmissionMessage) {
        match message {
            AdmissionMessage::Stalled { waiting } => self.record(EventKind::GuestWaits { threads: waiting }),
            AdmissionMessage::Open => self.gate_disks(),
            AdmissionMessage::Failed { why } => {
                self.gate_disks();
                self.not_gated(&why);
            }
        }
    }

    fn not_gated(&self, why: &str) {
        let message = format!("cannot control memory by page faults, so the machine may exceed its budget: {why}");
        self.record(EventKind::Error { message });
    }
}

/// What is left of a dead keeper's hold on its QEMU's memory.
pub enum UserfaultOr {
    Userfault(Result<Userfault, String>),
    /// The guest waits for memory that nobody can grant any more.
    Stuck(String),
}
