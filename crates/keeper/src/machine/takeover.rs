//! Take-over: a keeper has died, and its QEMU has not. The next keeper continues with the guest.
//!
//! journal -> does that process live? -> reopen RAM, ledger, ember -> grant memory, if the guest waits for it -> serve
//! the disks (QEMU reconnects) -> QMP
//!
//! Without a keeper nobody guarded the disk images. While QEMU lives it holds the images' locks, and the new keeper
//! answers its open requests; but locks stop only programs that check them. So each image is compared with the dead
//! keeper's note, and blocks of a changed image are dropped (`images`). If QEMU is dead too, the ember cannot be
//! trusted, because nobody saw the end of the guest's last writes. Then the machine starts cold.

use std::path::PathBuf;
use std::sync::Arc;

use hearth_api::EventKind;
use hearth_disk::arrival::MissPolicy;
use hearth_disk::image::Unwritten;
use hearth_disk::server::{DiskServer, Peer};
use hearth_memory::RamFile;
use hearth_qemu::QmpError;
use hearth_recovery::ember::EmberError;
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::{Incarnation, discard_files, numbers_in, ram_path};
use hearth_recovery::journal::{DiskIdentity, GuestNote, Journal};
use hearth_recovery::rejuvenation::parked;
use hearth_recovery::vmcore::dump::incomplete_path;

use super::gate::UserfaultOr;
use super::generation::{Generation, LaunchError};
use super::images::Images;
use super::launch;
use super::state::{Input, PauseReason};
use super::{Machine, MachineError};
use crate::config::Config;
use crate::folders::memory_owner;

/// Whether a keeper of this program could take over the machine, according to its files. False if there is nothing to
/// take over.
pub fn could_take_over(config: &Config) -> Result<bool, MachineError> {
    let journal = Journal::load(&config.folders.runtime.join("journal.json"))?;
    let Some((journal, qemu)) = journal.and_then(|mut journal| journal.qemu.take().map(|qemu| (journal, qemu))) else {
        return Ok(false);
    };
    must_serve_the_same_disks(&journal, config, qemu.pid)?;
    let noted = Images::after_gap(&config.folders.memory).begin_take_over();
    must_find_the_same_files(config, qemu.pid, noted).map(|()| true)
}

impl Machine {
    /// Takes over a living QEMU of this machine. False if there is none.
    pub(super) fn take_over(&mut self) -> Result<bool, MachineError> {
        self.disks.note_greeting(&mut self.context);
        let (identity, hop_cut_off) = self.find_qemu_of_guest();
        self.kill_stray_qemus(identity.as_ref().map(|identity| identity.pid));
        let Some(process) = identity.as_ref().and_then(|identity| Generation::find(&self.context.folders, identity))
        else {
            self.discard_all_incarnations();
            return Ok(false);
        };
        let identity = identity.expect("a process was found by it");
        must_serve_the_same_disks(&self.context.journal, &self.context.config, identity.pid)?;
        must_find_the_same_files(&self.context.config, identity.pid, self.disks.images.begin_take_over())?;
        self.forget_order()?;
        let began = process.began();
        let incarnation = self.reopen()?;
        let restored = self.context.journal.restore.is_some();
        let resumed = match restored {
            true => {
                UserfaultOr::Userfault(self.lazy_restore.resume(&self.context, &self.disks, &incarnation, &identity)?)
            }
            false => self.memory.resume_gate(&self.context, &self.warm_reboot, &incarnation, &identity),
        };
        let userfault = match resumed {
            UserfaultOr::Userfault(userfault) => userfault,
            UserfaultOr::Stuck(why) => {
                tracing::error!(why, "cannot grant memory to the guest any more; ending it");
                return self.give_up_on(identity.pid, "");
            }
        };
        // Serve the disks first: QEMU may be waiting for them, and QMP with it.
        self.open_disks(&incarnation, Unwritten::Keep)?;
        self.disks.expect_only(Peer { pid: identity.pid, start_ticks: identity.start_ticks });
        self.disks.admit(&self.context, identity.pid);
        let pid = identity.pid;
        let mut generation = match Generation::adopt(&self.context, process, identity, userfault) {
            Err(LaunchError::Silent { stopped, .. }) => return self.give_up_on(pid, stopped),
            adopted => adopted?,
        };
        // QEMU lives, so the guest continues here, whatever a note says.
        parked::discard(&self.context.folders.memory);
        if hop_cut_off {
            self.finish_hop(&mut generation);
        } else if generation.identity().stale {
            self.disks.wake(&self.context, &generation);
        }
        // A restored guest may not have been started yet.
        let stands = restored && generation.qmp.run_state().is_ok_and(|state| state == "paused");
        let noted = self.context.journal.guest.clone();
        if noted.is_paused() || stands {
            self.context.journal.guest = GuestNote::Runs;
            self.resume_paused_guest(&mut generation);
        }
        let run_state = generation.qmp.run_state();
        self.warm_reboot.monitor.watch(Some(incarnation.clone()));
        let number = generation.number;
        let life = self.take_guest(incarnation, generation, began);
        // Record this only now: whoever waits for this event may type into the guest.
        self.context.record(EventKind::KeeperTookOver { qemu_pid: pid, generation: number });
        self.apply_infallible(Input::Runs { guest: life });
        self.continue_work(noted, run_state)?;
        Ok(true)
    }

    /// Continues what the dead keeper was doing with the guest. `noted`: its note about the guest; `run_state`: QEMU's.
    fn continue_work(&mut self, noted: GuestNote, run_state: Result<String, QmpError>) -> Result<(), MachineError> {
        if let GuestNote::PausedForDump { file } = noted {
            let why = "its keeper died; the paused guest continues: dump it again";
            let file = incomplete_path(&file).display().to_string();
            self.context.record(EventKind::DumpIncomplete { file, why: why.to_owned() });
        }
        self.ensure_qemu_uses_disks(1);
        if self.context.journal.frozen {
            self.saves.note_frozen(&mut self.context);
            self.thaw();
        }
        self.end_scan_cut_off();
        self.go_on_filling()?;
        self.go_on_with_order();
        match run_state.as_deref() {
            Ok("guest-panicked") => self.guest_panicked()?,
            Ok("watchdog") => self.watchdog_expired("pause".to_owned())?,
            Ok("running") => {}
            Ok(_) => self.apply_infallible(Input::Paused { reason: PauseReason::BeforeTakeOver }),
            Err(error) => tracing::warn!(%error, "QEMU does not report the guest's state"),
        }
        Ok(())
    }

    /// Gives up a QEMU that does not answer, and ends it. A cold start follows.
    fn give_up_on(&mut self, pid: u32, stopped: &str) -> Result<bool, MachineError> {
        let why = format!("its QEMU (pid {pid}) does not respond to its new keeper{stopped}");
        self.context.record(EventKind::PowerCut { why });
        if !hearth_qemu::kill_stray(pid) {
            tracing::error!(pid, "QEMU does not exit; the machine may not start");
        }
        self.end_memory();
        self.disks.backfill.set_miss_policy(MissPolicy::Refuse);
        // From now on, any change of the images may be another program's.
        self.warm_reboot.monitor.note_images(None);
        std::mem::take(&mut self.disks.servers).into_iter().for_each(DiskServer::stop);
        self.disks.backfill.set_miss_policy(MissPolicy::Wait);
        self.disks.nvram.clear();
        self.disks.pmem.clear();
        self.warm_reboot.ember.extinguish();
        self.disks.images.closed(&self.context.folders.memory);
        self.discard_all_incarnations();
        Ok(false)
    }

    /// Opens the files of the living incarnation and of the ember.
    fn reopen(&mut self) -> Result<Incarnation, MachineError> {
        let number = self.context.journal.incarnation;
        self.context.outside.event_log.set_incarnation(number);
        for dead in self.context.journal.ember.clone() {
            if let Err(why) = self.rebank(dead) {
                tracing::debug!(dead, why, "dropped from the ember");
                discard_files(&self.context.folders.memory, dead);
            }
        }
        self.warm_reboot.monitor.settle();
        Ok(Incarnation::open(&self.context.folders.memory, number)?)
    }

    fn rebank(&mut self, number: u32) -> Result<(), String> {
        let is_dumped = self.context.journal.dumps.iter().any(|note| note.incarnation == number);
        let dead = Incarnation::open(&self.context.folders.memory, number).map_err(|error| crate::chain(&error))?;
        let banked = if is_dumped { self.bank_for_dump(dead) } else { self.warm_reboot.ember.bank(dead) };
        banked.map_err(|error| crate::chain(&error))
    }

    /// Banks an incarnation for its dump, which starts or continues once the disks are served.
    fn bank_for_dump(&mut self, dead: Incarnation) -> Result<(), EmberError> {
        let hold = Arc::new(Hold::everything(dead.ram.pages()));
        self.warm_reboot.ember.bank_held(dead.clone(), hold.clone())?;
        self.crash_recovery.unfinished.push((dead, hold));
        Ok(())
    }

    /// Ends QEMUs that a dead keeper started and did not note: two QEMUs on one disk would destroy it.
    fn kill_stray_qemus(&self, ours: Option<u32>) {
        for pid in memory_owner::qemus_of(&self.context.folders.runtime, &self.context.folders.memory) {
            if Some(pid) != ours {
                tracing::warn!(pid, "ending a QEMU that a dead keeper never finished starting");
                if !hearth_qemu::kill_stray(pid) {
                    tracing::error!(pid, "QEMU does not exit; the machine may not start");
                }
            }
        }
    }

    /// Keeps the memory of incarnations that must be dumped. A dump needs no guard over the disks; only the ledger
    /// cannot be trusted, and so the ember.
    fn keep_for_dumps(&mut self) -> Vec<u32> {
        let noted: Vec<u32> = self.context.journal.dumps.iter().map(|note| note.incarnation).collect();
        noted.into_iter().filter(|number| self.keep_for_dump(*number)).collect()
    }

    fn keep_for_dump(&mut self, number: u32) -> bool {
        if self.crash_recovery.unfinished.iter().any(|(dead, _)| dead.number == number) {
            return true;
        }
        let opened = RamFile::open(&ram_path(&self.context.folders.memory, number));
        let Ok(ram) = opened else { return false };
        let dead = Incarnation { number, ram: Arc::new(ram), ledger: None };
        if let Err(error) = self.bank_for_dump(dead) {
            self.context.record(EventKind::DumpSkipped { why: crate::chain(&error) });
        }
        self.warm_reboot.ember.incarnations().contains(&number)
    }

    /// Starts or continues a dead keeper's dumps. Call it once the disks are served, because a dump yields to them.
    pub(super) fn go_on_with_dumps(&mut self) {
        for (dead, hold) in std::mem::take(&mut self.crash_recovery.unfinished) {
            self.crash_recovery.queue_dump(&mut self.context, &self.warm_reboot, &self.disks, &dead, hold);
        }
        // Incarnations whose memory is gone need no note.
        let (living, dumps) = (self.context.journal.incarnation, self.crash_recovery.dumps.statuses());
        let known = |number: u32| number == living || dumps.iter().any(|dump| dump.incarnation == number);
        self.context.journal.dumps.retain(|note| known(note.incarnation));
        self.context.save_journal();
    }

    fn discard_all_incarnations(&mut self) {
        let folder = &self.context.folders.memory.clone();
        let mut numbers = numbers_in(folder);
        for number in self.keep_for_dumps().into_iter().chain(self.parked_incarnation()) {
            numbers.remove(&number);
        }
        if !numbers.is_empty() {
            let message = "no keeper guarded the disks after QEMU ended: dropped the blocks held in memory".to_owned();
            self.context.record(EventKind::Error { message });
        }
        numbers.into_iter().for_each(|number| discard_files(folder, number));
    }
}

/// Refuses other disks: a mounted file system must not get another image.
pub(super) fn must_serve_the_same_disks(journal: &Journal, config: &Config, qemu_pid: u32) -> Result<(), MachineError> {
    let Some(what) = difference(&journal.disks, &launch::disk_identities(&config.devices)) else { return Ok(()) };
    Err(MachineError::OtherDisks { name: config.name.clone(), qemu_pid, what })
}

/// Refuses an image that was replaced by another file. `exchanged`: the first such file, with the name of its disk.
pub(super) fn must_find_the_same_files(
    config: &Config,
    qemu_pid: u32,
    exchanged: Option<(String, PathBuf)>,
) -> Result<(), MachineError> {
    let Some((disk, path)) = exchanged else { return Ok(()) };
    Err(MachineError::ExchangedImage { name: config.name.clone(), qemu_pid, disk, path })
}

/// The first difference between QEMU's disks and the configured ones, in words.
fn difference(has: &[DiskIdentity], gets: &[DiskIdentity]) -> Option<String> {
    if has.len() != gets.len() {
        return Some(format!("it has {}, but {} are configured", has.len(), gets.len()));
    }
    let (has, gets) = has.iter().zip(gets).find(|(has, gets)| has != gets)?;
    let words = |disk: &DiskIdentity| {
        let access = if disk.read_only { ", read-only" } else { "" };
        format!("{} is {} ({}{access})", disk.name, disk.path.display(), disk.format)
    };
    Some(format!("{}; configured: {}", words(has), words(gets)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn disk(name: &str, path: &str) -> DiskIdentity {
        DiskIdentity { name: name.into(), path: path.into(), format: "raw".into(), read_only: false }
    }

    #[test]
    fn what_a_machine_cannot_be_taken_over_with_is_told_beforehand() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("web.toml");
        let text = "name = \"web\"\nmemory = \"64MiB\"\n[boot]\nkernel = \"k\"\n[[disks]]\nname = \"root\"\npath = \"root.img\"\n";
        fs::write(&file, text).unwrap();
        let config = Config::load(&file, &crate::runtime_root::RuntimeRoot::new(folder.path())).unwrap();
        let path = config.folders.runtime.join("journal.json");
        fs::create_dir_all(&config.folders.runtime).unwrap();
        assert!(!could_take_over(&config).unwrap(), "it has never run");
        let mut journal = Journal::new("web", config.guest.memory_bytes);
        journal.save(&path).unwrap();
        assert!(!could_take_over(&config).unwrap(), "it has no QEMU");
        journal.qemu = Some(crate::sample::qemu_identity(7));
        journal.disks = launch::disk_identities(&config.devices);
        journal.save(&path).unwrap();
        assert!(could_take_over(&config).unwrap());
        journal.disks.clear();
        journal.save(&path).unwrap();
        let error = could_take_over(&config).unwrap_err().to_string();
        assert!(error.contains("with other disks than now configured: it has 0, but 1 are configured"), "{error}");
        fs::write(&path, r#"{"version": 9}"#).unwrap();
        let error = could_take_over(&config).unwrap_err().to_string();
        assert!(error.ends_with("version 9, but this keeper knows only 1; use the keeper that wrote it"), "{error}");
    }

    #[test]
    fn disks_that_were_exchanged_under_a_living_guest_are_told() {
        let has = [disk("root", "/a"), disk("data", "/b")];
        assert_eq!(difference(&has, &has), None);
        let check = |gets: &[DiskIdentity], expect: &str| assert_eq!(difference(&has, gets).unwrap(), expect);
        check(&[disk("root", "/a"), disk("data", "/c")], "data is /b (raw); configured: data is /c (raw)");
        check(&[disk("data", "/b"), disk("root", "/a")], "root is /a (raw); configured: data is /b (raw)");
        check(&[disk("root", "/a")], "it has 2, but 1 are configured");
        let read_only = DiskIdentity { read_only: true, ..disk("root", "/a") };
        check(&[read_only, has[1].clone()], "root is /a (raw); configured: root is /a (raw, read-only)");
    }
}
