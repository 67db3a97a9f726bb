//! Gate: the thread that answers a guest's first touch of each part of its memory, and the disks' requests for memory,
//! while the machine's memory is short (`hearth_recovery::admission`).
//!
//! QEMU is started with `-S` -> its memory is registered -> the disks get the gate -> the guest runs -> all of the
//! memory fits, or QEMU ends -> the gate is removed
//!
//! A guest for which no gate can be created runs all the same. The memory monitor trims for it, and an event says that
//! the machine may exceed its budget.

use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use hearth_api::{AdmissionStatus, EventKind};
use hearth_disk::gate::Gate;
use hearth_memory::faults::Userfault;
use hearth_memory::faults::admission::{AdmissionError, is_registered};
use hearth_recovery::admission::Admission;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::journal::QemuIdentity;

use super::Context;
use super::disks::Disks;
use super::generation::Generation;
use super::warm_reboot::WarmReboot;
use crate::event::{AdmissionMessage, Event};

/// A guest that waits this long is reported: even to a slow disk, a dump writes tens of MiB a second.
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

    /// It goes on granting memory until the process ends.
    pub fn leave(mut self) {
        // Without its handle a thread is waited for by nobody.
        self.thread = None;
    }
}

impl Drop for MemoryGate {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.admission.stop();
        if thread.join().is_err() {
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
        // The gate was stopped, or QEMU has ended.
        Ok(()) | Err(AdmissionError::Gone { .. }) => {}
        Err(error) => {
            // A guest that hangs for ever is worse than a guest that takes too much memory.
            let opened = admission.finish().err().map(|error| format!("; {}", crate::chain(&error)));
            tell(AdmissionMessage::Failed { why: crate::chain(&error) + &opened.unwrap_or_default() });
        }
    }
}

/// How the guest gets its memory within the budget. A guest that is restored gets it from its snapshot (`LazyRestore`) and
/// has no gate.
#[derive(Default)]
pub struct GuestMemory {
    /// Gate to the memory of the living QEMU, while memory is granted unit by unit. May be set before this keeper has that QEMU.
    pub gate: Option<MemoryGate>,
}

impl GuestMemory {
    /// Creates the gate for the memory of a QEMU that is paused.
    pub fn shut(
        &mut self,
        context: &Context,
        warm: &WarmReboot,
        disks: &Disks,
        incarnation: &Incarnation,
        generation: &Generation,
    ) {
        let userfault = generation.userfault().map_err(str::to_owned);
        let shut = userfault.and_then(|userfault| {
            let admission = Admission::register(warm.terms(context), incarnation, userfault);
            self.hold_gate(context, warm, admission.map_err(|error| crate::chain(&error))?)
        });
        match shut {
            Ok(()) => disks.set_gate(self.disk_gate()),
            Err(why) => not_gated(context, &why),
        }
    }

    /// Takes over a dead keeper's gate, if there is one. Call it before anything else touches the guest's memory.
    pub fn resume_gate(
        &mut self,
        context: &Context,
        warm: &WarmReboot,
        incarnation: &Incarnation,
        identity: &QemuIdentity,
    ) -> UserfaultOr {
        let fetched = identity.userfault_fd.ok_or_else(|| "a previous keeper had none".to_owned());
        let fetched = fetched.and_then(|fd| {
            Userfault::fetch(identity.pid, fd, identity.helper_fd).map_err(|error| crate::chain(&error))
        });
        let resumed = match &fetched {
            Ok(userfault) => {
                Admission::resume(warm.terms(context), incarnation, userfault).map_err(|error| crate::chain(&error))
            }
            Err(why) => match is_registered(identity.pid, &incarnation.ram) {
                Ok(false) => Ok(None),
                Ok(true) => Err(why.clone()),
                Err(error) => Err(error.to_string()),
            },
        };
        match resumed.and_then(|it| it.map_or(Ok(()), |admission| self.hold_gate(context, warm, admission))) {
            Ok(()) => UserfaultOr::Userfault(fetched),
            Err(why) => UserfaultOr::Stuck(why),
        }
    }

    fn hold_gate(&mut self, context: &Context, warm: &WarmReboot, admission: Admission) -> Result<(), String> {
        let gate = MemoryGate::start(&context.config.name, admission, context.outside.tell.clone());
        let gate = gate.map_err(|error| format!("cannot start the page-fault thread: {error}"))?;
        warm.monitor.consider(Some(gate.admission().clone()));
        self.gate = Some(gate);
        Ok(())
    }

    /// The gate that disks must use now before they touch the guest's memory.
    pub fn disk_gate(&self) -> Option<Gate> {
        self.gate.as_ref().filter(|gate| gate.is_shut()).map(|gate| gate.admission().gate())
    }

    /// Whether all of the guest's memory is granted. If only the ember prevents that, the ember is given up.
    pub fn is_granted(&self) -> bool {
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

    /// Removes the gate of a QEMU that has ended.
    pub fn end(&mut self, warm: &WarmReboot, disks: &Disks) {
        if self.gate.take().is_some() {
            warm.monitor.consider(None);
            disks.set_gate(None);
        }
    }

    pub fn handle_admission(&self, context: &Context, disks: &Disks, message: AdmissionMessage) {
        match message {
            AdmissionMessage::Stalled { waiting } => context.record(EventKind::GuestWaits { threads: waiting }),
            AdmissionMessage::Open => disks.set_gate(self.disk_gate()),
            AdmissionMessage::Failed { why } => {
                disks.set_gate(self.disk_gate());
                not_gated(context, &why);
            }
        }
    }

    /// Leaves the guest's memory to the next keeper.
    pub fn leave(self) {
        if let Some(gate) = self.gate {
            gate.leave();
        }
    }
}

fn not_gated(context: &Context, why: &str) {
    let message = format!("cannot control memory by page faults, so the machine may exceed its budget: {why}");
    context.record(EventKind::Error { message });
}

/// The userfaultfd that a dead keeper left in its QEMU.
pub enum UserfaultOr {
    Userfault(Result<Userfault, String>),
    /// The guest waits for memory that nobody can grant any more.
    Stuck(String),
}
