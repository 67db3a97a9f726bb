//! A guest that is reset inside its QEMU: `virsh reset` and `reboot`, a reboot from inside, a panic with `on_crash=restart`. Its
//! memory stays, and the next kernel soon overwrites it.
//!
//! the guest is reset -> a driver begins anew with a disk, and QEMU waits -> cache map, beside it the old blocks are moved out
//! (`hearth_recovery::warm_reboot::in_place`) -> the next guest goes on
//!
//! No message of vhost-user says that the guest was reset. Drivers also begin anew when a kernel lets go of a disk and takes it again,
//! or starts another kernel (kexec). Firmware's driver is simpler than a kernel's, which a guest could imitate; libvirt's event of the
//! reset is certain, but may come later, so it is waited for. It comes through `hearth host`.
//!
//! | driver | reset known | then |
//! |---|---|---|
//! | firmware's | yes, and the last kernel's driver was not so simple | blocks are moved: no kernel uses the memory |
//! | the same, but QEMU pins the memory for a device | yes | blocks are copied: the device would go on with released pages |
//! | firmware's | no | blocks are copied, as far as the budget allows |
//! | a kernel's | yes, and firmware has not begun with a disk | the same: a kernel runs already |
//! | a kernel's | no | nothing: it may be the same kernel |

use std::time::{Duration, Instant};

use hearth_api::{EndCause, EventKind};
use hearth_memory::PAGE_BYTES;
use hearth_recovery::incarnation::Incarnation;
use hearth_recovery::warm_reboot::Phase;
use hearth_recovery::warm_reboot::in_place::{Original, Rescue, Rescued};

use super::{Attached, State, is_tracked, qemu};
use crate::machine::MachineError;
use crate::machine::crash_recovery::CrashRecovery;
use crate::machine::timeline::Timeline;

/// How long firmware waits for the word that the guest was reset. libvirt sends it when QEMU has reset the guest.
const WORD_PATIENCE: Duration = Duration::from_millis(300);
/// How long firmware may take from a reset to its disks.
const FIRMWARE_PATIENCE: Duration = Duration::from_secs(60);
/// How long the guest waits at most.
const HOLD: Duration = Duration::from_secs(2);
/// How long it waits for the cache map at most.
const MAP: Duration = Duration::from_secs(1);

/// What is known of resets of the living QEMU's guest.
#[derive(Default)]
pub struct Resets {
    /// When the guest was reset, if no driver has begun anew since.
    told: Option<Instant>,
    /// Whether the last driver that began was simple. A guest whose own driver is cannot be told from firmware.
    had_simple_driver: Option<bool>,
    /// When a driver began anew that waits for that word.
    waits_since: Option<Instant>,
    /// The last guest's blocks were rescued, and the next kernel has not begun with a disk. Firmware resets the guest once more, and
    /// goes from disk to disk: all of it is one reset.
    in_firmware: bool,
}

impl Resets {
    /// Whether the guest was reset, and so recently that its firmware may be at it.
    fn is_told(&self) -> bool {
        self.told.is_some_and(|at| at.elapsed() < FIRMWARE_PATIENCE)
    }

    /// When a driver has waited for long enough.
    pub fn deadline(&self) -> Option<Instant> {
        self.waits_since.map(|since| since + WORD_PATIENCE)
    }
}

impl Attached {
    /// libvirt says that the guest was reset.
    pub(super) fn domain_reset(&mut self) -> Result<(), MachineError> {
        if !matches!(self.state, State::Running(_)) || self.resets.in_firmware {
            return Ok(());
        }
        self.forget_crash();
        self.resets.told = Some(Instant::now());
        if self.resets.waits_since.is_some() { self.go_on_with_reset() } else { Ok(()) }
    }

    /// A driver begins anew with a disk, and QEMU waits.
    pub(super) fn new_driver(&mut self, is_simple: bool) -> Result<(), MachineError> {
        if self.resets.waits_since.is_some() || !matches!(self.state, State::Running(_)) {
            // Another disk of the same guest waits already. Or its QEMU has ended, and left its question behind.
            return Ok(());
        }
        let is_told = self.resets.is_told();
        let in_firmware = self.resets.in_firmware;
        self.resets.in_firmware &= is_simple;
        let had_simple_driver = self.resets.had_simple_driver.replace(is_simple);
        match (is_simple, is_told) {
            _ if in_firmware => self.answer(),
            (true, true) => self.reset_in_place(had_simple_driver),
            // There is nothing to move, so nothing to wait for.
            (true, false) if !self.has_tracked_guest() => self.reset_in_place(None),
            (true, false) => {
                self.resets.waits_since = Some(Instant::now());
                self.resets.had_simple_driver = had_simple_driver;
                Ok(())
            }
            // The kernel runs already.
            (false, true) => self.reset_in_place(None),
            (false, false) => self.answer(),
        }
    }

    /// Firmware has waited: the word has come, or does not come.
    pub(super) fn go_on_with_reset(&mut self) -> Result<(), MachineError> {
        let had_simple_driver = self.resets.had_simple_driver.replace(true);
        self.reset_in_place(if self.resets.is_told() { had_simple_driver } else { None })
    }

    fn has_tracked_guest(&self) -> bool {
        let incarnation = if let State::Running(life) = &self.state { life.incarnation.as_ref() } else { None };
        incarnation.is_some_and(|it| it.ledger.is_some())
    }

    /// Lets QEMU go on as before.
    fn answer(&mut self) -> Result<(), MachineError> {
        let incarnation = if let State::Running(life) = &self.state { life.incarnation.clone() } else { None };
        self.track(incarnation.as_ref())
    }

    /// Ends the incarnation, and begins the next one in the same memory. `had_simple_driver`: whether its guest's own driver was simple;
    /// None if that is not known, or the next guest may run already.
    fn reset_in_place(&mut self, had_simple_driver: Option<bool>) -> Result<(), MachineError> {
        let began = Instant::now();
        self.resets.in_firmware = self.resets.had_simple_driver == Some(true);
        (self.resets.told, self.resets.waits_since) = (None, None);
        let number = self.context.journal.incarnation;
        let State::Running(life) = &mut self.state else { return Ok(()) };
        let may_release = had_simple_driver == Some(false) && !qemu::pins_memory(life.process.id().pid);
        let original = if may_release { Original::Release } else { Original::Keep };
        if life.crash.take().is_some() {
            // Somebody has reset the crashed guest instead.
            self.context.journal.ordered = None;
            CrashRecovery::forget_dump(&mut self.context, number);
        }
        let Some(dead) = life.incarnation.take_if(|it| it.ledger.is_some()) else { return self.answer() };
        let lived = std::mem::replace(&mut life.began, began).elapsed();
        let cause = EndCause::GuestReset;
        self.crash_recovery.last_end = Some(cause);
        // It was no crash, so there is no wait.
        let _ = self.crash_recovery.crashes.ended(lived, cause, &self.context.config.crash.crash_loop);
        self.context.record(EventKind::IncarnationEnded { cause });
        self.recovery.timeline = Some(Timeline::start(dead.number + 1, cause, None));
        self.fast_remount.boot_cut_off();
        self.fast_remount.boot_begins(&self.context, &self.warm_reboot);
        // Both at once: what is moved are pages of files, and the map is read in the kernel's own memory.
        let map = self.warm_reboot.begin_reading_cache_map(&dead);
        let rescued = self.rescue(&dead, original, began);
        let map = map.and_then(|map| map.end_within(MAP.saturating_sub(began.elapsed()), "the guest waits"));
        if let Some(message) = map {
            self.warm_reboot.handle_memory(&self.context, &self.disks, &mut self.recovery, message);
        }
        if let Err(why) = rescued {
            tracing::warn!(why, "the reboot is cold");
            self.recovery.set_cold(why);
            self.warm_reboot.clear_cache_map();
        }
        self.recovery.phase_ended(&self.context, Phase::Rescue.name(), began, began.elapsed());
        self.next_incarnation();
        let (folder, number) = (&self.context.folders.memory, self.context.journal.incarnation);
        let next = Incarnation::with_ram(folder, number, dead.ram.clone(), is_tracked(&self.context));
        let next = next.map_err(|error| self.cannot_track(&crate::chain(&error))).ok();
        self.context.save_journal();
        self.warm_reboot.monitor.watch(next.clone());
        self.warm_reboot.monitor.settle();
        let answered = self.track(next.as_ref());
        if let State::Running(life) = &mut self.state {
            life.incarnation = next;
        }
        if let Some(timeline) = &mut self.recovery.timeline {
            timeline.recovered();
        }
        let warm = !self.warm_reboot.ember.incarnations().is_empty();
        let generation = self.context.journal.generation;
        self.context.record(EventKind::IncarnationStarted { generation, warm });
        answered
    }

    /// There is no room for the next guest's ledger. What was rescued goes, and it is noted that nothing is kept.
    fn cannot_track(&mut self, why: &str) {
        self.report_not_kept(why);
        self.context.journal.memory = None;
        self.recovery.set_cold(why.to_owned());
        self.warm_reboot.clear_cache_map();
    }

    fn rescue(&mut self, dead: &Incarnation, original: Original, began: Instant) -> Result<(), String> {
        let blocks_max = match original {
            Original::Release => usize::MAX,
            Original::Keep => {
                let usage = self.warm_reboot.monitor.usage();
                let free = self.warm_reboot.budget.limit_bytes(false).saturating_sub(usage.total_bytes());
                (free / PAGE_BYTES) as usize
            }
        };
        let tagger = self.warm_reboot.tagger.clone();
        let rescue = Rescue { dead, tagger: &tagger, original, blocks_max, until: began + HOLD };
        let (rescued, counts) = rescue.run(&self.context.folders.memory).map_err(|error| crate::chain(&error))?;
        let Rescued { taken, refused, left } = counts;
        self.context.record(EventKind::BlocksRescued {
            pages: taken,
            refused,
            left,
            released: original == Original::Release,
            duration_ms: began.elapsed().as_secs_f64() * 1e3,
        });
        let succession = self.warm_reboot.succession(&self.disks.servers);
        succession.bank(&self.context.folders.memory, rescued).map_err(|error| crate::chain(&error))?;
        self.recovery.kept(&self.context, &self.warm_reboot.ember);
        Ok(())
    }
}
