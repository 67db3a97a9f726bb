//! Drives the real `hearth` binary and real guests as an operator would, so that tests read like what they promise:
//!
//! ```no_run
//! use hearth_vmtest::{Disk, Drives, TestVm};
//! # fn main() -> hearth_vmtest::Result<()> {
//! let vm = TestVm::busybox("warm").memory_mib(512).disk(Disk::ext4(256)).boot()?;
//! vm.sh("mkdir -p /d && mount /dev/vda /d && probe fill /d/a 1000000 7")?;
//! vm.panic()?;
//! vm.wait_incarnation(2)?;
//! vm.sh("mount /dev/vda /d && probe verify /d/a 7")?;
//! # Ok(())
//! # }
//! ```
//!
//! There are two kinds of machines: [`TestVm`] under a keeper, and [`PlainVm`] under QEMU alone, for benches to compare with.
//! Both run commands in the guest through its serial console, by the protocol in `guest/README.md`.
//!
//! Every machine has its own folders, so tests run in parallel. Tests wait for events and console lines, with limits that only a
//! hang reaches. Dropping a machine kills every process that it started, even a QEMU that outlived its keeper. If its test
//! failed, its logs are printed.

pub mod artifacts;
pub mod boot_disk;
pub mod clock;
mod console;
mod disk;
pub mod echo;
mod error;
pub mod fat;
pub mod faults;
pub mod fleet;
pub mod fresh_host;
mod guest;
mod hearth;
pub mod host_reload;
pub mod hung;
pub mod images;
pub mod known;
pub mod libvirt;
mod loop_device;
mod mounted;
pub mod net;
pub mod page_cache;
pub mod pattern;
mod plain;
pub mod processes;
mod program;
pub mod qemu_dump;
mod qmp;
mod random;
pub mod residency;
mod slots;
mod transcript;
mod volumes;
mod wait;
pub mod web;

pub use disk::Disk;
pub use error::{Error, Result};
pub use guest::{Drives, Guest, Output, START_AGENT};
pub use hearth::{Api, Parked, TestVm, TestVmBuilder};
/// What `hearth` answers, as types.
pub use hearth_api;
pub use loop_device::LoopDevice;
pub use mounted::Mounted;
pub use plain::{PlainVm, PlainVmBuilder};
pub use program::write_program;
pub use qmp::Qmp;
pub use random::Random;
pub use transcript::Ready;
pub use volumes::{Blocks, Volumes};
pub use wait::patience;
