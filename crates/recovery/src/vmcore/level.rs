//! DumpLevel: what a dump leaves out, by makedumpfile's numbers, which are what people know.

/// A sum of what is left out: 1 zero pages, 2 cache, 4 cache with private data, 8 user data, 16 free pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DumpLevel(u8);

impl DumpLevel {
    /// Everything is in the dump.
    pub const ALL: Self = Self(0);
    /// Everything but pages of zeroes, for which nothing has to be known of the guest.
    pub const NOT_ZERO: Self = Self(1);
    /// What the kernel's own data needs, and no more.
    pub const KERNEL: Self = Self(31);

    /// 0 to 31.
    pub fn new(level: u8) -> Option<Self> {
        (level <= 31).then_some(Self(level))
    }

    pub fn number(self) -> u8 {
        self.0
    }

    pub fn excludes_zero(self) -> bool {
        self.0 & 1 != 0
    }

    pub fn excludes_cache(self) -> bool {
        self.0 & 2 != 0
    }

    pub fn excludes_private_cache(self) -> bool {
        self.0 & 4 != 0
    }

    pub fn excludes_user(self) -> bool {
        self.0 & 8 != 0
    }

    pub fn excludes_free(self) -> bool {
        self.0 & 16 != 0
    }

    /// Whether the kernel has to be asked at all.
    pub fn needs_classification(self) -> bool {
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
