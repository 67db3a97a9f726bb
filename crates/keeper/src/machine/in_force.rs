//! Configuration of the next guest. It counts when that guest is started, and is taken back if no QEMU starts with it.
//! `crate::in_force` says which configuration the living guest has.

use hearth_api::{EventKind, PendingUntil};

use super::context::Last;
use super::{Machine, MachineError};
use crate::check;
use crate::config::Configured;

impl Machine {
    /// Applies the waiting configuration, if it is valid. Call it when there is no guest and one will be started.
    pub(super) fn take_next_configuration(&mut self) {
        if let Some(next) = self.context.file.next.configured.take() {
            let problems = check::of_next_guest(&self.context.config, &next.config);
            if let Some(problem) = problems.first() {
                let message = format!("the next guest starts with the previous configuration: {problem}");
                self.context.record(EventKind::Error { message });
                self.context.file.next.configured = Some(next);
                return;
            }
            let pending = self.context.file.pending.clone();
            let configured = self.exchange_configuration(*next);
            let accelerator = self.context.qemu.accelerator.clone();
            self.context.file.next.last = Some(Box::new(Last { configured, pending, accelerator }));
            self.context.file.pending.retain(|change| change.until == PendingUntil::NextStart);
            self.context.show_config();
        }
        self.context.qemu.accelerator = self.context.file.next.accelerator.clone();
    }

    /// Returns to the last guest's configuration, because no QEMU starts with the new one. The new one waits for the
    /// guest after the next. Returns false if nothing had changed.
    pub(super) fn take_back_configuration(&mut self, error: &MachineError) -> bool {
        let Some(last) = self.context.file.next.last.take() else { return false };
        let Last { configured, pending, accelerator } = *last;
        let keys: Vec<_> = pending.iter().filter(|change| change.until == PendingUntil::NextGuest).collect();
        let keys: Vec<_> = keys.iter().map(|change| change.key.as_str()).collect();
        let message = format!(
            "the next guest starts with the previous configuration: QEMU does not start with the changed keys ({}): {}",
            keys.join(", "),
            crate::chain(error)
        );
        self.context.record(EventKind::Error { message });
        self.context.file.next.configured = Some(Box::new(self.exchange_configuration(configured)));
        (self.context.file.pending, self.context.qemu.accelerator) = (pending, accelerator);
        self.context.show_config();
        true
    }

    /// Returns the configuration that counted before.
    fn exchange_configuration(&mut self, configured: Configured) -> Configured {
        let Configured { config, typed } = configured;
        let config = std::mem::replace(&mut self.context.config, config);
        let typed = std::mem::replace(&mut self.context.file.typed, typed);
        self.warm_reboot.set_budget(&self.context.config);
        Configured { config, typed }
    }
}
