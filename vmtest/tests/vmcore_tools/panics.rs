//! The ways in which a kernel is made to panic, and what a debugger must find afterwards.

use hearth_vmtest::artifacts::Linux;
use hearth_vmtest::images::File;
use hearth_vmtest::{Drives, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Panic {
    Sysrq,
    /// A module that writes through a null pointer.
    NullPointer,
    OutOfMemory,
    HungTask,
    /// Injected from outside by the machine's owner; the guest has no part in it.
    Nmi,
}

/// What is found in the dump.
pub struct Traces {
    /// A line of the kernel's log.
    pub log: &'static str,
    /// The name of the task that panicked; the NMI hits whoever runs.
    pub task: Option<&'static str>,
    /// A function on its stack.
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

    /// The guest's orders. Does not wait for the end. For the NMI the guest is made ready: it is to hit a task that is in the
    /// kernel, for the `crash` of Debian 12 cannot show the user's side of a stack of Linux 6.1, nor a task that is about to end.
    pub fn start(self, guest: &impl Drives) -> Result<()> {
        let orders = match self {
            Panic::Nmi => return guest.sh("dd if=/dev/urandom of=/dev/null bs=8M >/dev/null 2>&1 &").map(drop),
            Panic::Sysrq => return guest.panic(),
            Panic::NullPointer => "echo 1 >/proc/sys/kernel/panic_on_oops; insmod /mnt/hearth_fault.ko",
            // More than any guest here has, which the kernel would refuse at once if it were asked to be careful.
            Panic::OutOfMemory => "cd /proc/sys/vm; echo 1 >panic_on_oom; echo 1 >overcommit_memory; probe hog 100000",
            Panic::HungTask => {
                "cd /proc/sys/kernel; echo 1 >hung_task_panic; echo 2 >hung_task_timeout_secs; \
                 fsfreeze --freeze /mnt; touch /mnt/never"
            }
        };
        guest.guest().start(orders).map(drop)
    }
}

/// The module that breaks the kernel, for the root folder of the guest's disk.
pub fn module(linux: Linux) -> File {
    let module = std::fs::read(linux.vmcore_kernel("hearth_fault.ko")).expect("`make test-vmcore` makes the module");
    File { path: "hearth_fault.ko".into(), contents: module }
}

/// Makes the guest's memory worth a filter: its own file cache, dirty and clean, anonymous memory, freed memory.
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
