//! QEMU: its program, command line, process and protocols.
//!
//! binary -> accelerator -> launch -> process (preload hands over its userfaultfd) -> qmp

#![warn(missing_docs)]

pub mod accelerator;
pub mod agent;
mod binary;
pub mod bounded;
mod confinement;
mod endpoint;
pub mod environment;
mod footprint;
pub mod launch;
mod log;
mod machine_type;
mod migration;
pub mod packet_gate;
pub mod pinned;
pub mod preload;
mod process;
mod qmp;
mod said;
mod sockets;
mod stream;
mod transcript;

pub use accelerator::{Accelerator, AcceleratorChoice, Wanted};
pub use binary::{Binary, BinaryError, VERSION_MIN, Version};
pub use confinement::kernel_has_landlock;
pub use endpoint::{Endpoint, connect_within};
pub use footprint::Footprint;
pub use launch::Launch;
pub use machine_type::{EARLIER_MACHINE_TYPE, Hardware, MachineType, MachineTypes, is_versioned};
pub use migration::Migration;
pub use process::{
    Process, ProcessError, ProcessId, arguments_of, is_like_started, kill_stray, memory_file_of, memory_of,
    processes_naming, runtime_folder_of,
};
pub use qmp::{Qmp, QmpError, QmpEvent, TimedEvent};
pub use stream::Stream;
pub use transcript::Transcript;
