//! Random choices of a test, repeatable by their seed.

/// Splitmix64.
pub struct Random(pub u64);

impl Random {
    /// A generator with the seed `HEARTH_SEED`, or a new one each time. Prints the seed.
    pub fn seeded() -> Self {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self::seeded_or(now.map_or(1, |since| since.as_nanos() as u64))
    }

    /// A generator with the seed `HEARTH_SEED`, or the given one. Prints the seed.
    pub fn seeded_or(seed: u64) -> Self {
        let seed = std::env::var("HEARTH_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(seed);
        eprintln!("HEARTH_SEED={seed}");
        Self(seed)
    }

    pub fn below(&mut self, most: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % most as u64) as usize
    }

    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}
