//! Requests to the keeper of a domain of libvirt, and its status.

use std::time::{Duration, Instant};

use hearth_api::{
    ApiError, CopyDiskRequest, DomainHarvested, ErrorWord, EventKind, MachineState, MachineStatus, Order, QemuStatus,
    StopRequest, UserfaultStatus,
};

use super::crash::NextStart;
use super::libvirt_state::LibvirtState;
use super::{Attached, Life, State};
use crate::config::ConfigFile;
use crate::control::{Answer, Command, Reply};
use crate::machine::disk_copy::Consistency;
use crate::machine::state::WAITS_FOR_DUMPS;

/// How long the end of a QEMU may take that libvirt has ended.
const END_PATIENCE: Duration = Duration::from_secs(5);

impl Attached {
    /// None: a thread is at it, and the answer comes later.
    pub(super) fn obey(&mut self, command: Command, answer: &Reply) -> Option<Result<Answer, ApiError>> {
        Some(match command {
            Command::Status => Ok(Answer::Status(Box::new(self.status()))),
            Command::RemountPlan => self
                .warm_reboot
                .remount_plan(&self.context, &self.disks)
                .map(|plan| Answer::RemountPlan(Box::new(plan))),
            Command::Resize { disk } => {
                let may = self.must_run("resize");
                may.and_then(|()| self.disks.resize(&self.context, &disk)).map(Answer::Resized)
            }
            Command::Age => Err(self.not_ours("show the age of its QEMU", None)),
            Command::Order(Order::CopyDisk(request)) => {
                self.record_request("copy a disk");
                return self.begin_disk_copy(request, answer).err().map(Err);
            }
            Command::Order(order) => self.execute(order).map(|()| Answer::Accepted),
        })
    }

    /// Has a thread make the copy, which answers. The guest's agent is libvirt's.
    fn begin_disk_copy(&mut self, request: CopyDiskRequest, answer: &Reply) -> Result<(), ApiError> {
        self.must_run("copy a disk")?;
        self.disks.must_be_complete("copy a disk")?;
        self.disks.must_have_space(&self.context, "copy a disk")?;
        let consistency = Consistency::Crash { why: "nobody has frozen its file systems" };
        self.copies.begin(&self.context, &self.disks, request, |_| consistency, answer)
    }

    fn execute(&mut self, order: Order) -> Result<(), ApiError> {
        match order {
            Order::DomainStarts(_) => self.domain_starts(),
            Order::DomainReset(_) => self.domain_reset().map_err(|error| failed(&error)),
            Order::DomainCrashed(_) => self.domain_crashed(),
            Order::DomainHarvested(DomainHarvested { why }) => self.domain_harvested(why),
            Order::DomainEnded(_) => {
                if let State::Awaited { .. } = self.state {
                    self.start_failed();
                }
                Ok(())
            }
            Order::Stop(StopRequest { force }) => self.stop(force),
            Order::Ready(_) => {
                self.warm_reboot.must_have_boot_set(&self.context)?;
                self.must_run("mark the boot as finished")?;
                self.fast_remount.ready(&self.context, &self.warm_reboot, &self.disks, "marked by the operator");
                Ok(())
            }
            Order::CopyDisk(_) => unreachable!("`obey` takes it"),
            Order::CopyDiskTake(request) => self.copies.take(request),
            Order::CopyDiskCancel(request) => self.copies.cancel(&request.file),
            Order::Reboot(_) => Err(self.not_ours("reboot", Some("reboot"))),
            Order::Crash(_) => Err(self.not_ours("crash", Some("inject-nmi"))),
            Order::Dump(_) => Err(self.not_ours("dump", Some("dump --memory-only"))),
            Order::DumpResume(_) => {
                self.record_request("resume the dump");
                self.crash_recovery.resume_dump(&self.context)
            }
            Order::DumpDiscard(_) => {
                self.record_request("discard the dump");
                self.crash_recovery.discard_dumps(&self.context)
            }
            Order::Save(_) | Order::SaveCancel(_) => Err(self.not_ours("save", Some("save"))),
            Order::Rejuvenate(_) => Err(self.not_ours("rejuvenate", None)),
            Order::Park(_) => Err(self.not_ours("park", None)),
            Order::UpgradeKeeper(_) => {
                let name = &self.context.config.name;
                let message = format!("cannot upgrade the keeper of {name}: it is a domain of libvirt");
                let hint = format!("end the keeper and start the next one: systemctl restart hearth@{name}.service");
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
        if self.must_be_replaced() || self.is_told_to_end {
            // The hook starts the next keeper, which reads the file.
            self.state = State::Stopped;
            self.crash_recovery.dumps.give_up_for("the domain's next guest needs another keeper");
        } else if let State::Stopped = self.state {
            // It was only waiting for its dumps.
            self.state = State::Off;
        }
        if let State::Running(_) | State::Stopped = self.state {
            return Err(ApiError::new(ErrorWord::MachineEnded, "this keeper ends, and the next one serves the domain"));
        }
        // The time in which the domain was off belongs to a recovery from a crash only.
        if let (Some(timeline), None) = (&mut self.recovery.timeline, &self.next_start) {
            timeline.began(Instant::now());
        }
        let served = self.serve(ticks_now());
        if served.is_err() {
            // What was opened is closed again.
            self.start_failed();
        }
        served.map_err(|error| failed(&error))
    }

    /// Whether the domain's file was changed. While a dump is written, only its disks count: with this keeper the dump would end.
    fn must_be_replaced(&self) -> bool {
        let ours = &self.context.file.typed;
        let Ok(file) = ConfigFile::load(&self.context.config.file) else { return true };
        let is_of_same_disks = (&file.disks, &file.refill) == (&ours.disks, &ours.refill);
        file != *ours && !(is_of_same_disks && self.crash_recovery.must_wait_for_dumps())
    }

    fn stop(&mut self, force: bool) -> Result<(), ApiError> {
        self.record_request("stop");
        let name = &self.context.config.name;
        if force {
            self.crash_recovery.dumps.give_up_all();
        }
        if !matches!(self.state, State::Off | State::Stopped | State::Awaited { process: None, .. }) {
            let message = format!("cannot stop: {name} is a domain of libvirt, and runs");
            let hint = format!("end it with `virsh shutdown {name}`; then `hearth stop {name}` gives back its memory");
            return Err(ApiError::new(ErrorWord::WrongState, message).hint(hint));
        }
        self.context.outside.event_log.record_state(MachineState::Stopping);
        self.next_start = None;
        self.note_next_start(false);
        self.state = State::Stopped;
        Ok(())
    }

    fn record_request(&self, verb: &str) {
        self.context.record(EventKind::Request { verb: verb.to_owned() });
    }

    pub(super) fn must_run(&self, what: &str) -> Result<(), ApiError> {
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
        let dumps = self.crash_recovery.dumps.statuses();
        let may_have_crashed = match &self.state {
            State::Running(life) => life.crash.is_none(),
            State::Awaited { process, .. } => process.is_some() && self.next_start.is_none(),
            State::Off | State::Stopped => false,
        };
        let libvirt = LibvirtState::of(&config.name);
        let unreported = libvirt.as_ref().filter(|_| may_have_crashed).and_then(LibvirtState::crashed);
        let lost_start = libvirt.as_ref().filter(|_| life.is_none()).and_then(LibvirtState::lost_start);
        let back_off = self.next_start.as_ref().filter(|_| self.is_off()).and_then(NextStart::back_off);
        MachineStatus {
            name: config.name.clone(),
            state: if unreported.is_some() { MachineState::Paused } else { self.shown() },
            state_why: unreported.or(lost_start).or_else(|| self.state_why()),
            next_start: back_off.map(|back_off| back_off.next_start.clone()),
            crash_loop: back_off.is_some_and(|back_off| back_off.crash_loop),
            incarnation: self.context.journal.incarnation,
            cause_of_last_end: self.crash_recovery.last_end,
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
            last_recovery: self.recovery.shown(&dumps),
            dumps,
            parking_since: None,
            rejuvenating_since: None,
            last_rejuvenation: None,
            unparked: None,
            save: None,
            frozen: None,
            restore: None,
            refill: self.warm_reboot.refill_status(&self.disks),
            pending: self.context.file.pending.clone(),
        }
    }

    fn is_off(&self) -> bool {
        matches!(self.state, State::Off)
    }

    fn state_why(&self) -> Option<String> {
        let name = &self.context.config.name;
        match (&self.state, &self.next_start, self.release_at) {
            (State::Off, Some(next), _) => Some(next.why(name)),
            (State::Off, _, Some(at)) if self.warm_reboot.ember.counts().remaining > 0 => {
                let left = at.saturating_duration_since(Instant::now()).as_secs();
                Some(format!("the domain is off; the memory of its last guest is kept for another {left} s"))
            }
            (State::Off, ..) => Some("the domain is off".to_owned()),
            (State::Awaited { .. }, ..) => Some("libvirt is starting QEMU".to_owned()),
            (State::Running(Life { crash: Some(crash), .. }), ..) => Some(crash.why(name)),
            (State::Running(_), ..) => None,
            (State::Stopped, ..) => Some(WAITS_FOR_DUMPS.to_owned()),
        }
    }
}

fn failed(error: &dyn std::error::Error) -> ApiError {
    ApiError::new(ErrorWord::Failed, crate::chain(error))
}

/// Now, as the start times of processes are told: in clock ticks since the host's boot.
pub(super) fn ticks_now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let per_second = rustix::param::clock_ticks_per_second();
    now.tv_sec as u64 * per_second + now.tv_nsec as u64 * per_second / 1_000_000_000
}
