//! Schedule of rejuvenations that the keeper begins by itself (`[rejuvenate]`), and the signs that they are decided by.
//! What the signs mean is in `crate::age`.

use std::time::{Duration, Instant};

use hearth_api::{ApiError, EventKind, Growth, QemuAge, RejuvenateRequest};

use super::Machine;
use crate::age::{Signs, is_open, minute_of_day, overdue};
use crate::config::Config;

/// Time between two checks whether a rejuvenation is due. A check is two reads in `/proc`.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// When the keeper checks again, and when it last began a rejuvenation by itself.
pub struct Schedule {
    next_look: Instant,
    last_attempt: Option<Instant>,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { next_look: Instant::now() + LOOK_EVERY, last_attempt: None }
    }
}

impl Schedule {
    /// When to check whether a rejuvenation is due.
    pub fn next_look(&self, config: &Config) -> Option<Instant> {
        config.rejuvenate.as_ref().map(|_| self.next_look)
    }
}

impl Machine {
    pub(super) fn age(&self) -> Result<Signs, ApiError> {
        let life = self.must_live("show the age of QEMU")?;
        let (generation, identity) = (&life.generation, life.generation.identity());
        let now = generation.footprint();
        let qemu = QemuAge {
            pid: identity.pid,
            generation: identity.generation,
            uptime_s: generation.process.began().map_or(0.0, |began| began.elapsed().as_secs_f64()),
            version: identity.version,
            installed_version: None,
            program_is_gone: generation.process.program_is_gone(),
            own_bytes: Growth {
                at_start: identity.at_start.map(|start| start.own_bytes),
                now: now.map(|now| now.own_bytes),
            },
            descriptors: Growth {
                at_start: identity.at_start.map(|start| start.descriptors),
                now: now.map(|now| now.descriptors),
            },
        };
        Ok(Signs {
            machine: self.context.config.name.clone(),
            qemu,
            program: self.context.config.qemu.program.clone(),
            hindrance: self.may_rejuvenate().err().map(|error| error.to_string()),
            policy: self.context.config.rejuvenate.clone(),
        })
    }

    /// Does it by itself, if the policy says so now.
    pub(super) fn look_at_age(&mut self) {
        self.rejuvenation.schedule.next_look = Instant::now() + LOOK_EVERY;
        let Some(policy) = &self.context.config.rejuvenate else { return };
        let since_attempt = self.rejuvenation.schedule.last_attempt.map(|at| at.elapsed());
        let hops = self.rejuvenation.hop.is_some();
        if hops || !self.state.is_undisturbed() || !is_open(policy.window, minute_of_day(), since_attempt) {
            return;
        }
        let Ok(signs) = self.age() else { return };
        let Some(why) = overdue(&signs.qemu, Some(policy)) else { return };
        self.rejuvenation.schedule.last_attempt = Some(Instant::now());
        self.context.record(EventKind::RejuvenationDue { why });
        match self.may_rejuvenate() {
            Ok(()) => self.rejuvenate(&RejuvenateRequest::default()),
            Err(error) => {
                let (phase, why) = ("launch".to_owned(), error.to_string());
                self.context.record(EventKind::RejuvenationFailed { phase, why, guest_lost: false });
            }
        }
    }
}
