//! Memory: guest RAM in files of the host that outlive both QEMU and the keeper.
//!
//! create -> QEMU maps the file (share=on) -> measure residency -> QEMU dies -> view its pages -> release them ->
//! remove
//!
//! RAM is in files and not in anonymous memory, because Hearth reuses the memory of dead guests. This crate does not
//! know what the pages mean: that is the job of the ledger and the ember.

#![warn(missing_docs)]

mod address;
pub mod faults;
mod layout;
mod ram;
mod replace;
pub mod room;
mod view;

pub use address::{FileOffset, GuestPhysicalAddress};
pub use layout::{Layout, Place, PlacedFile};
pub use ram::{MemoryError, RamFile};
pub use replace::{Durability, fresh_file, replace_file, sync_folder_of};
pub use view::RamView;

/// Page size of x86 in bytes, and the unit in which RAM is kept, tagged and released.
pub const PAGE_BYTES: u64 = 4096;
