//! Memory: guest RAM as files of the host that outlive both QEMU and the keeper.
//!
//! create -> QEMU maps it (share=on) -> measure residency -> QEMU dies -> view its pages -> release them -> remove
//!
//! A file and not anonymous memory, because what a dead guest leaves behind is the point of it all. Nothing here knows
//! what the pages mean: that is the ledger's and the ember's business.

mod address;
pub mod faults;
mod layout;
mod ram;
mod replace;
pub mod room;
mod view;

pub use address::{FileOffset, GuestPhysicalAddress};
pub use layout::Layout;
pub use ram::{MemoryError, RamFile};
pub use replace::{Lasting, fresh_file, replace_file, sync_folder_of};
pub use view::RamView;

/// The page of x86, and the unit in which RAM is kept, tagged and released.
pub const PAGE_BYTES: u64 = 4096;
