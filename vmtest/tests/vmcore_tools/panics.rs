//! Ways to make a kernel panic, and what a debugger must find afterwards.

use hearth_vmtest::artifacts::Linux;
use hearth_vmtest::images::File;
use hearth_vmtest::{Drives, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panic {
    Sysrq,
    /// A module writes through a null pointer.
    NullPointer,
    OutOfMemory,
    HungTask,
    /// The machine's owner injects it from outside.
    Nmi,
}

/// Facts that the dump must show.
pub struct Traces {
    /// Text of a line in the kernel's log.
    pub log: &'static str,
    /// The task that panicked; `None` for the NMI, which hits any task.
    pub task: Option<&'static str>,
    /// A function on that task's stack.
    pub function: &'static str,
}

impl Panic {
    pub const ALL: [Panic; 5] = [Panic::Sysrq, Panic::NullPointer, Panic::OutOfMemory, Panic::HungTask, Panic::Nmi];

    pub fn traces(self) -> Traces {
        let (log, task, function) = match self {
            Panic::Sysrq => ("Kernel panic - not syncing: sysrq triggered crash", Some("sh"), "sysrq_handle_crash"),
            Panic::NullPointer => {
                ("BUG: kernel NULL pointer dereference, address: 0000000000000000", Some("insmod"), "exc_page_fault")
            }
            Panic::OutOfMemory => ("panic_on_oom is enabled", Some("probe"), "out_of_memory"),
            Panic::HungTask => ("Kernel panic - not syncing: hung_task: blocked tasks", Some("khungtaskd"), "watchdog"),
            Panic::Nmi => ("Kernel panic - not syncing: NMI: Not continuing", None, "unknown_nmi_error"),
        };
        Traces { log, task, function }
    }

    /// Starts the panic in the guest, without waiting for its end. For the NMI it only prepares the guest: the NMI should hit a
    /// task in the kernel, since Debian 12's `crash` can show neither the user part of a Linux 6.1 stack nor a task that is about
    /// to end.
    pub fn start(self, guest: &impl Drives) -> Result<()> {
        let commands = match self {
            Panic::Nmi => return guest.sh("dd if=/dev/urandom of=/dev/null bs=8M >/dev/null 2>&1 &").map(drop),
            Panic::Sysrq => return guest.panic(),
            Panic::NullPointer => "echo 1 >/proc/sys/kernel/panic_on_oops; insmod /mnt/hearth_fault.ko",
            // More memory than any guest here has; without overcommit the kernel would refuse it at once.
            Panic::OutOfMemory => "cd /proc/sys/vm; echo 1 >panic_on_oom; echo 1 >overcommit_memory; probe hog 100000",
            Panic::HungTask => {
                "cd /proc/sys/kernel; echo 1 >hung_task_panic; echo 2 >hung_task_timeout_secs; \
                 fsfreeze --freeze /mnt; touch /mnt/never"
            }
        };
        guest.guest().start(commands).map(drop)
    }
}

/// The module that faults, for the root folder of the guest's disk.
pub fn module(linux: Linux) -> File {
    let module = std::fs::read(linux.vmcore_kernel("hearth_fault.ko")).expect("`make test-vmcore` makes the module");
    File { path: "hearth_fault.ko".into(), contents: module }
}

/// Fills the guest's memory with every class of pages: clean and dirty file cache, anonymous memory, freed memory.
pub fn fill(guest: &impl Drives, mib: u64) -> Result<()> {
    let files = format!(
        "mount -t ext4 /dev/vda /mnt && probe fill /mnt/cached {} 3 && cp /mnt/cached /tmp/copy && \
         probe fill /tmp/freed {} 5 && rm /tmp/freed",
        (mib / 8) << 20,
        (mib / 4) << 20
    );
    guest.sh(&files)?;
    guest.sh(&format!("probe hog {} >/run/hog 2>&1 & until grep -q hogging= /run/hog; do sleep 0.1; done", mib / 4))?;
    Ok(())
}
