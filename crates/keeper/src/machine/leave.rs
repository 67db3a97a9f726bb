//! Leaving: a machine whose guest runs on is left to the next keeper, which finds it as after a kill of this one.
//!
//! Many parts of a machine put things in order when they are dropped, for a guest that has ended. Each of these has a `leave`:
//!
//! | part | when it is dropped | when it is left |
//! |---|---|---|
//! | disk servers | hang up, and wait for what is in flight | the caller says how |
//! | backfill, restore | fail the reads that wait for a block or a page | these go on waiting |
//! | gate before the memory | stops, and waits for its thread | goes on granting memory |
//! | dump under way | is given up | goes on |
//! | memory monitor | waits for its thread | does not wait |
//! | copy of a disk | is called off, and its file removed | the same |
//! | passt beside QEMU | is killed | keeps the guest's network |
//! | a QEMU that never came to be the machine's | is killed | there is none |
//! | locks of the folders | are released | stay until the process ends |
//!
//! Whatever goes on, goes on until this process ends or becomes another program, which is next. All other parts only close
//! connections and files, and tell their threads to end.

use hearth_disk::server::DiskServer;

use super::Machine;

impl Machine {
    /// Takes the machine apart without touching guest or files. `leave_disks`: how its disks' servers are left.
    pub(super) fn leave_to_next_keeper(self, leave_disks: fn(Vec<DiskServer>)) {
        // All fields by name: whoever adds one decides how it is left.
        let Self {
            context,
            warm_reboot,
            fast_remount,
            locked_files,
            memory,
            lazy_restore,
            mut disks,
            state,
            recovery: _,
            rejuvenation,
            saves,
            copies,
            crash_recovery,
        } = self;
        context.folders.stay_locked();
        leave_disks(std::mem::take(&mut disks.servers));
        std::mem::take(&mut disks.backfill).leave();
        memory.leave();
        lazy_restore.leave();
        warm_reboot.monitor.leave();
        crash_recovery.dumps.leave();
        if let (Some(life), _) = state.into_parts() {
            life.generation.leave();
        }
        drop((fast_remount, locked_files, disks, rejuvenation, saves, copies, context));
    }
}
