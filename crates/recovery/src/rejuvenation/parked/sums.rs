//! Checksums of memory in a file, computed by several threads.

use std::num::NonZero;
use std::thread::available_parallelism;

use hearth_memory::{FileOffset, MemoryError, RamFile};

/// Bytes that one checksum covers.
const CHUNK_BYTES: u64 = 1 << 20;
/// Maximum number of threads. One sums memory at 1 to 3 GiB/s; more than these wait for the same memory.
const THREADS_MAX: usize = 8;

/// Checksums of RAM, chunk by chunk, so that several threads can share the work. A hole counts as zeroes, because a
/// file system may show either after its next mount.
#[derive(Clone, Debug, Default)]
pub struct ChunkSums(Vec<(u64, [u8; 32])>);

impl ChunkSums {
    /// Checksums of the whole memory. Nobody may write to it meanwhile.
    pub fn of_all(memory: &RamFile) -> Result<Self, MemoryError> {
        let threads = available_parallelism().map_or(1, NonZero::get).min(THREADS_MAX) as u64;
        std::thread::scope(|scope| {
            let others: Vec<_> =
                (1..threads).map(|first| scope.spawn(move || Self::of(memory, first, threads))).collect();
            let mut sums = Self::of(memory, 0, threads)?;
            for other in others {
                sums.add(other.join().expect("summing does not panic")?);
            }
            Ok(sums)
        })
    }

    /// Checksums of every `step`th chunk, from `first` on.
    fn of(ram: &RamFile, first: u64, step: u64) -> Result<Self, MemoryError> {
        let resident = ram.resident_ranges()?;
        let chunk_pages = CHUNK_BYTES / hearth_memory::PAGE_BYTES;
        let chunks = ram.bytes().div_ceil(CHUNK_BYTES);
        let mut bytes = vec![0; CHUNK_BYTES as usize];
        let mut sums = Vec::new();
        let mut next = 0;
        for chunk in (first..chunks).step_by(step as usize) {
            let pages = chunk * chunk_pages..(chunk + 1) * chunk_pages;
            while resident.get(next).is_some_and(|run| run.end <= pages.start) {
                next += 1;
            }
            if resident.get(next).is_none_or(|run| run.start >= pages.end) {
                continue;
            }
            let start = chunk * CHUNK_BYTES;
            let piece = &mut bytes[..(ram.bytes() - start).min(CHUNK_BYTES) as usize];
            ram.read(FileOffset(start), piece)?;
            if piece.iter().any(|&byte| byte != 0) {
                sums.push((chunk, *blake3::hash(piece).as_bytes()));
            }
        }
        Ok(Self(sums))
    }

    fn add(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// BLAKE3 over all checksums and the numbers of their chunks, in hex.
    pub fn seal(&self) -> String {
        let mut sums = self.0.clone();
        sums.sort_unstable();
        let mut hasher = blake3::Hasher::new();
        for (chunk, sum) in sums {
            hasher.update(&chunk.to_le_bytes()).update(&sum);
        }
        hasher.finalize().to_hex().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(ram: &RamFile, threads: u64) -> String {
        let mut sums = ChunkSums::default();
        (0..threads).for_each(|first| sums.add(ChunkSums::of(ram, first, threads).unwrap()));
        sums.seal()
    }

    #[test]
    fn every_bit_counts_and_holes_are_zeroes() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let ram = RamFile::create(&folder.path().join("ram-1"), 5 * CHUNK_BYTES + 8192).unwrap();
        let write = |at: u64, bytes: &[u8]| ram.write(FileOffset(at), bytes).unwrap();
        let empty = sum(&ram, 1);
        write(2 * CHUNK_BYTES, &[0; 4096]);
        assert_eq!(sum(&ram, 1), empty, "zeroes are as good as a hole");
        write(3 * CHUNK_BYTES + 4096, &[7; 100]);
        write(5 * CHUNK_BYTES + 8191, &[1]);
        let whole = sum(&ram, 1);
        assert_eq!([2, 3, 9].map(|threads| sum(&ram, threads)), [&*whole; 3], "however it is shared");
        for at in [0, 2 * CHUNK_BYTES + 5, 3 * CHUNK_BYTES + 4100, 5 * CHUNK_BYTES + 8190] {
            let mut before = [0];
            ram.read(FileOffset(at), &mut before).unwrap();
            write(at, &[before[0] ^ 0x40]);
            assert_ne!(sum(&ram, 2), whole, "at {at}");
            write(at, &before);
        }
        assert_eq!(sum(&ram, 2), whole);
        // The same bytes elsewhere are not the same memory.
        write(3 * CHUNK_BYTES + 4096, &[0; 100]);
        write(4 * CHUNK_BYTES + 4096, &[7; 100]);
        assert_ne!(sum(&ram, 1), whole);
    }
}
