//! Requests to the keeper of a domain of libvirt, and its status.

use std::time::{Duration, Instant};

use hearth_api::{
    ApiError, ErrorWord, EventKind, MachineState, MachineStatus, Order, QemuStatus, Recovery, UserfaultStatus,
};

use super::{Attached, State};
use crate::config::ConfigFile;
use crate::control::{Answer, Command};
use crate::machine::timeline::Timeline;

/// How long the end of a QEMU may take that libvirt has ended.
const END_PATIENCE: Duration = Duration::from_secs(5);

impl Attached {
    pub(super) fn obey(&mut self, command: Command) -> Result<Answer, ApiError> {
        match command {
            Command::Status => Ok(Answer::Status(Box::new(self.status()))),
            Command::RemountPlan => self
                .warm_reboot
                .remount_plan(&self.context, &self.disks)
                .map(|plan| Answer::RemountPlan(Box::new(plan))),
            Command::Resize { disk } => {
                self.must_run("resize")?;
                self.disks.resize(&self.context, &disk).map(Answer::Resized)
            }
            Command::Age => Err(self.not_ours("show the age of its QEMU", None)),
            Command::Order(order) => self.execute(order).map(|()| Answer::Accepted),
        }
    }

    fn execute(&mut self, order: Order) -> Result<(), ApiError> {
        match order {
            Order::DomainStarts(_) => self.domain_starts(),
            Order::DomainReset(_) => self.domain_reset().map_err(|error| failed(&error)),
            Order::DomainEnded(_) => {
                if let State::Awaited { .. } = self.state {
                    self.close();
                }
                Ok(())
            }
            Order::Stop(_) => self.stop(),
            Order::Ready(_) => {
                self.warm_reboot.must_have_boot_set(&self.context)?;
                self.must_run("mark the boot as finished")?;
                self.fast_remount.ready(&self.context, &self.warm_reboot, &self.disks, "marked by the operator");
                Ok(())
            }
            Order::Reboot(_) => Err(self.not_ours("reboot", Some("reboot"))),
            Order::Crash(_) => Err(self.not_ours("crash", Some("inject-nmi"))),
            Order::Dump(_) | Order::DumpResume(_) | Order::DumpDiscard(_) => {
                Err(self.not_ours("dump", Some("dump --memory-only")))
            }
            Order::Save(_) | Order::SaveCancel(_) => Err(self.not_ours("save", Some("save"))),
            Order::Rejuvenate(_) => Err(self.not_ours("rejuvenate", None)),
            Order::Park(_) => Err(self.not_ours("park", None)),
            Order::UpgradeKeeper(_) => {
                let name = &self.context.config.name;
                let message = format!("cannot upgrade the keeper of {name}: it is a domain of libvirt");
                let hint = format!("end the keeper and start the next one: systemctl restart hearth@{name}");
                Err(ApiError::new(ErrorWord::NotPossible, message).hint(hint))
            }
        }
    }

    /// libvirt is about to start QEMU.
    fn domain_starts(&mut self) -> Result<(), ApiError> {
        self.record_request("serve the disks");
        if let State::Running(life) = &self.state {
            if !life.process.ends_within(END_PATIENCE) {
                let message = format!("cannot serve the disks: QEMU (pid {}) still uses them", life.process.id().pid);
                return Err(ApiError::new(ErrorWord::WrongState, message));
            }
            self.qemu_ended("ended".to_owned()).map_err(|error| failed(&error))?;
        }
        if let State::Awaited { .. } = self.state {
            self.close();
        }
        let is_current = ConfigFile::load(&self.context.config.file).is_ok_and(|file| file == self.context.file.typed);
        if !is_current {
            // The hook starts the next keeper, which reads it.
            self.state = State::Stopped;
        }
        if let State::Running(_) | State::Stopped = self.state {
            return Err(ApiError::new(ErrorWord::MachineEnded, "the domain's file was changed, and its keeper ends"));
        }
        if let Some(timeline) = &mut self.recovery.timeline {
            timeline.began(Instant::now());
        }
        let served = self.serve(ticks_now());
        if served.is_err() {
            // What was opened is closed again.
            self.close();
        }
        served.map_err(|error| failed(&error))
    }

    fn stop(&mut self) -> Result<(), ApiError> {
        self.record_request("stop");
        let name = &self.context.config.name;
        if !matches!(self.state, State::Off | State::Awaited { process: None, .. }) {
            let message = format!("cannot stop: {name} is a domain of libvirt, and runs");
            let hint = format!("end it with `virsh shutdown {name}`; then `hearth stop {name}` gives back its memory");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint(hint));
        }
        self.context.outside.event_log.record_state(MachineState::Stopping);
        self.state = State::Stopped;
        Ok(())
    }

    fn record_request(&self, verb: &str) {
        self.context.record(EventKind::Request { verb: verb.to_owned() });
    }

    fn must_run(&self, what: &str) -> Result<(), ApiError> {
        if let State::Running(_) = self.state {
            return Ok(());
        }
        let message = format!("cannot {what}: the domain does not run");
        Err(ApiError::new(ErrorWord::WrongState, message))
    }

    /// `virsh`: the command that does it.
    fn not_ours(&self, what: &str, virsh: Option<&str>) -> ApiError {
        let name = &self.context.config.name;
        let refusal = ApiError::new(ErrorWord::NotPossible, format!("cannot {what}: {name} is a domain of libvirt"));
        match virsh {
            Some(command) => refusal.hint(format!("use `virsh {command} {name}`")),
            None => refusal.hint("only a machine whose QEMU Hearth starts can do that"),
        }
    }

    fn status(&self) -> MachineStatus {
        let config = &self.context.config;
        let life = if let State::Running(life) = &self.state { Some(life) } else { None };
        let qemu = self.context.journal.qemu.as_ref().filter(|_| life.is_some());
        MachineStatus {
            name: config.name.clone(),
            state: self.shown(),
            state_why: self.state_why(),
            next_start: None,
            incarnation: self.context.journal.incarnation,
            cause_of_last_end: self.last_end,
            uptime_s: life.map_or(0.0, |life| life.began.elapsed().as_secs_f64()),
            keeper: self.context.keeper_status(),
            qemu: qemu.map(|qemu| QemuStatus {
                pid: qemu.pid,
                version: qemu.version.clone(),
                generation: qemu.generation,
                accelerator: qemu.accelerator.clone(),
                accelerator_why: qemu.accelerator_why.clone(),
                userfault: UserfaultStatus::Absent { why: "libvirt owns QEMU".to_owned() },
            }),
            memory: self.warm_reboot.memory_status(&self.context, None),
            disks: self.disks.statuses(&self.context),
            nvram: Vec::new(),
            nets: Vec::new(),
            ledger_pages: life.and_then(|life| life.incarnation.as_ref()).map_or(0, |it| it.ledger_pages()),
            ember: self.warm_reboot.ember_status(&self.context),
            dumps: Vec::new(),
            last_recovery: self.last_recovery(),
            parking_since: None,
            rejuvenating_since: None,
            last_rejuvenation: None,
            unparked: None,
            save: None,
            frozen: None,
            restore: None,
            pending: self.context.file.pending.clone(),
        }
    }

    fn state_why(&self) -> Option<String> {
        match (&self.state, self.release_at) {
            (State::Off, Some(at)) if self.warm_reboot.ember.counts().remaining > 0 => {
                let left = at.saturating_duration_since(Instant::now()).as_secs();
                Some(format!("the domain is off; the memory of its last guest is kept for another {left} s"))
            }
            (State::Off, _) => Some("the domain is off".to_owned()),
            (State::Awaited { .. }, _) => Some("libvirt is starting QEMU".to_owned()),
            _ => None,
        }
    }

    fn last_recovery(&self) -> Option<Recovery> {
        self.recovery.timeline.as_ref().map(Timeline::recovery).cloned()
    }
}

fn failed(error: &dyn std::error::Error) -> ApiError {
    ApiError::new(ErrorWord::Failed, crate::chain(error))
}

/// Now, as the start times of processes are told: in clock ticks since the host's boot.
fn ticks_now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let per_second = rustix::param::clock_ticks_per_second();
    now.tv_sec as u64 * per_second + now.tv_nsec as u64 * per_second / 1_000_000_000
}
