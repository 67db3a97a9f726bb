//! Reasons to refuse a save before it begins.

use hearth_api::{ApiError, ErrorWord, FreezeRequest, SaveRequest, ScanRequest};

use super::super::Machine;
use super::Saving;
use crate::object_store::is_address;

impl Machine {
    pub(super) fn must_be_savable(&self, request: &SaveRequest) -> Result<(), ApiError> {
        self.must_live("save")?;
        let refuse = |why: &str, hint: &str| Err(ApiError::new(ErrorWord::WrongState, why).hint(hint));
        if !is_address(&request.folder) && !request.folder.is_absolute() {
            return Err(ApiError::new(ErrorWord::BadRequest, "the save folder must be an absolute path"));
        }
        if request.scan.is_some_and(|plan| !plan.is_sane()) {
            let (periods, rounds) = (ScanRequest::PERIOD_MS, ScanRequest::ROUNDS);
            let why = format!("scan out of range: use {rounds:?} rounds of {periods:?} ms");
            return Err(ApiError::new(ErrorWord::BadRequest, why));
        }
        if request.freeze.is_some_and(|freeze| !freeze.is_sane()) {
            let why = format!("freeze patience out of range: use {:?} ms", FreezeRequest::PATIENCE_MS);
            return Err(ApiError::new(ErrorWord::BadRequest, why));
        }
        if !self.context.config.devices.nvram.is_empty() || !self.context.config.devices.pmem.is_empty() {
            return refuse(
                "cannot save: snapshots do not include NVRAM",
                "only a machine without [[nvram]] can be saved",
            );
        }
        if self.saves.current.as_ref().is_some_and(Saving::is_cancelled) {
            let why = "cannot save: a cancelled save has not ended yet";
            return refuse(why, "try again; if `hearth status` still shows it, check the disk that it was writing to");
        }
        if self.saves.current.is_some() || self.saves.preparing.is_some() {
            return refuse("cannot save: another save is running", "`hearth status` shows its progress");
        }
        self.copies.must_be_none("save")?;
        if !self.state.is_undisturbed() {
            let state = self.state.shown().name();
            let why = format!("cannot save: the machine is {state}, or is stopping or rebooting");
            return refuse(&why, "only a running guest can be saved");
        }
        self.rejuvenation.must_not_hop("save")?;
        self.must_run("save")?;
        if !self.memory.is_granted() {
            let why = "cannot save: the guest's memory is still being granted step by step";
            return refuse(why, "`hearth status` shows when that has ended");
        }
        if request.dedup_disk && self.state.guest().is_some_and(|life| life.incarnation.ledger.is_none()) {
            let why = "cannot save with --dedup-disk: with `ember = \"off\"` Hearth does not know which pages are on the \
                 disks";
            return refuse(why, "save without --dedup-disk");
        }
        if request.freeze.is_some() {
            self.may_freeze()?;
        }
        self.lazy_restore.must_be_complete("save")?;
        self.disks.must_be_complete("save")?;
        self.disks.must_have_space(&self.context, "save")?;
        self.disks.must_be_in_use("save")?;
        if self.crash_recovery.dumps.current().is_some_and(|dump| dump.live) {
            return refuse(
                "cannot save: the guest is being dumped",
                "wait for the dump, or end it with `hearth dump --discard`",
            );
        }
        Ok(())
    }

    fn may_freeze(&self) -> Result<(), ApiError> {
        let refuse = |why: &str, hint: String| Err(ApiError::new(ErrorWord::WrongState, why).hint(hint));
        if self.saves.is_being_thawed() {
            let why = "cannot freeze: the guest's file systems are still frozen for an earlier save";
            return refuse(why, "`hearth status` shows when they are thawed".to_owned());
        }
        let next_guest = self.context.file.next.configured.as_ref().map_or(&self.context.config, |next| &next.config);
        match self.state.guest().is_some_and(|life| life.generation.identity().guest_agent) {
            true => Ok(()),
            false if next_guest.guest.agent => {
                let why = "cannot freeze: the guest was started without a channel to its agent";
                refuse(why, "run `hearth reboot`: the next guest has one".to_owned())
            }
            false => {
                let file = self.context.config.file.display();
                let hint = format!(
                    "add `guest_agent = true` at the top of {file}, then stop and run the machine; qemu-guest-agent \
                     must run in the guest"
                );
                refuse("cannot freeze: the machine has no channel to a guest agent", hint)
            }
        }
    }
}
