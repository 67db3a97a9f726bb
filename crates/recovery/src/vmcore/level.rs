//! Dump level: what a dump leaves out, in makedumpfile's numbers, which people know.

/// Sum of what is left out: 1 zero pages, 2 cache, 4 cache with private data, 8 user data, 16 free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DumpLevel(u8);

impl DumpLevel {
    /// Leaves nothing out.
    pub const ALL: Self = Self(0);
    /// Leaves out only pages of zeroes, for which nothing has to be known of the guest.
    pub const NOT_ZERO: Self = Self(1);
    /// Leaves out all that the kernel's own data does not need.
    pub const KERNEL: Self = Self(31);

    /// A level from 0 to 31; `None` for any other number.
    pub fn new(level: u8) -> Option<Self> {
        (level <= 31).then_some(Self(level))
    }

    /// The level as makedumpfile's number.
    pub fn number(self) -> u8 {
        self.0
    }

    /// Whether pages of zeroes are left out.
    pub fn excludes_zero(self) -> bool {
        self.0 & 1 != 0
    }

    /// Whether page cache without private data is left out.
    pub(crate) fn excludes_cache(self) -> bool {
        self.0 & 2 != 0
    }

    /// Whether page cache with private data is left out.
    pub(crate) fn excludes_private_cache(self) -> bool {
        self.0 & 4 != 0
    }

    /// Whether memory of programs is left out.
    pub(crate) fn excludes_user(self) -> bool {
        self.0 & 8 != 0
    }

    /// Whether free pages are left out.
    pub(crate) fn excludes_free(self) -> bool {
        self.0 & 16 != 0
    }

    /// Whether the guest's page descriptors are needed.
    pub(crate) fn needs_classification(self) -> bool {
        self.0 & !1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_makedumpfiles() {
        assert_eq!(DumpLevel::new(32), None);
        assert_eq!(DumpLevel::new(31), Some(DumpLevel::KERNEL));
        let level = DumpLevel::new(17).unwrap();
        assert!(level.excludes_zero() && level.excludes_free());
        assert!(!level.excludes_cache() && !level.excludes_private_cache() && !level.excludes_user());
        assert!(!DumpLevel::NOT_ZERO.needs_classification() && level.needs_classification());
    }
}
