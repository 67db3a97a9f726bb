//! LZO1X-1: the compression that every build of makedumpfile and crash knows, for one page at a time.
//!
//! A compressed page is a sequence of literals and copies of earlier bytes. A page has 4 KiB, so it is written with two
//! of the format's four kinds of copy (M2 near and short, M3 of any length). The others are only read.
//!
//! | first byte | meaning |
//! |---|---|
//! | 0..=15 after a copy without literals | run of literals: 3 + value, or (0) 18 + extension |
//! | 0..=15 after literals | M1: copy 2 bytes from near (3 bytes from 2 KiB on after a run) |
//! | 16..=31 | M4: copy from 16 KiB on; distance 16 KiB exactly is the end |
//! | 32..=63 | M3: copy of 2 + value, or (0) 33 + extension, from up to 16 KiB |
//! | 64..=255 | M2: copy of 3 to 8 from up to 2 KiB |
//!
//! The low two bits of a copy's last byte but one count the literals that follow it. An extension is 255 for each zero
//! byte, and then the next byte. The first byte of all, if above 17, begins a run of value - 17 literals.
//!
//! This is our own implementation: crates are under the GPL or, like lzokay, compress a twelfth as fast (13 to 20 MiB/s against 150
//! to 300).

/// Longest distance of a copy that is written as M2.
const NEAR: usize = 0x800;
const HASH_BITS: u32 = 12;
/// Shorter copies cost as much as they save.
const MATCH_MIN: usize = 4;
const END: [u8; 3] = [0x11, 0, 0];

/// Maximum compressed length of `bytes` bytes.
pub const fn bound(bytes: usize) -> usize {
    bytes + bytes / 255 + 16
}

/// Compresses pages of at most 16 KiB. It remembers where each word was seen last.
pub struct Compressor {
    seen: Box<[u16; 1 << HASH_BITS]>,
}

impl Default for Compressor {
    fn default() -> Self {
        Self { seen: vec![0; 1 << HASH_BITS].into_boxed_slice().try_into().expect("the size it was made with") }
    }
}

impl Compressor {
    /// Appends the compressed `input` to `output`.
    pub fn compress(&mut self, input: &[u8], output: &mut Vec<u8>) {
        debug_assert!(input.len() <= 16 << 10, "distances are at most 16 KiB");
        self.seen.fill(0);
        let begin = output.len();
        let (mut at, mut literals_from) = (0, 0);
        // A position is stored plus one: zero means none.
        while at + MATCH_MIN <= input.len() {
            let word = word_at(input, at);
            let slot = &mut self.seen[(word.wrapping_mul(0x9e37_79b1) >> (u32::BITS - HASH_BITS)) as usize];
            let candidate = usize::from(std::mem::replace(slot, at as u16 + 1));
            if candidate == 0 || word_at(input, candidate - 1) != word {
                // The longer nothing is found, the larger the steps, so that bytes without a pattern cost little.
                at += 1 + ((at - literals_from) >> 5);
                continue;
            }
            let source = candidate - 1;
            let length = MATCH_MIN + equal(&input[source + MATCH_MIN..], &input[at + MATCH_MIN..]);
            put_literals(&input[literals_from..at], output, begin);
            put_copy(at - source, length, output);
            at += length;
            literals_from = at;
        }
        put_literals(&input[literals_from..], output, begin);
        output.extend(END);
    }
}

fn word_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Number of first bytes that are equal in both.
fn equal(one: &[u8], other: &[u8]) -> usize {
    let mut count = 0;
    for (one, other) in one.chunks_exact(8).zip(other.chunks_exact(8)) {
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let different = word(one) ^ word(other);
        if different != 0 {
            return count + different.trailing_zeros() as usize / 8;
        }
        count += 8;
    }
    count + one[count..].iter().zip(&other[count..]).take_while(|(one, other)| one == other).count()
}

fn put_literals(literals: &[u8], output: &mut Vec<u8>, begin: usize) {
    let count = literals.len();
    match count {
        0 => return,
        _ if output.len() == begin && count <= 238 => output.push(count as u8 + 17),
        // Up to three are counted in the copy before them.
        1..=3 => *output.iter_mut().nth_back(1).expect("a copy went before") |= count as u8,
        4..=18 => output.push(count as u8 - 3),
        _ => {
            output.push(0);
            put_extension(count - 18, output);
        }
    }
    output.extend(literals);
}

fn put_copy(distance: usize, length: usize, output: &mut Vec<u8>) {
    let distance = distance - 1;
    if length <= 8 && distance < NEAR {
        output.push((((length - 1) << 5) | ((distance & 7) << 2)) as u8);
        output.push((distance >> 3) as u8);
        return;
    }
    if length <= 33 {
        output.push(0x20 | (length - 2) as u8);
    } else {
        output.push(0x20);
        put_extension(length - 33, output);
    }
    output.extend(((distance << 2) as u16).to_le_bytes());
}

fn put_extension(mut value: usize, output: &mut Vec<u8>) {
    while value > 255 {
        output.push(0);
        value -= 255;
    }
    output.push(value as u8);
}

/// Decompresses `input`, which must fill `output` exactly; `None` if it does not, or is damaged.
pub fn decompress(input: &[u8], output: &mut [u8]) -> Option<()> {
    let mut reader = Reader { input, output, written: 0 };
    // Literals since the last copy: 0, 1 to 3, or 4 for any more.
    let mut literals = 0;
    if let Some(first @ 18..) = input.first() {
        reader.byte()?;
        literals = usize::from(first - 17);
        reader.literals(literals)?;
        literals = literals.min(4);
    }
    loop {
        let byte = usize::from(reader.byte()?);
        let (distance, length, low) = match byte {
            0..16 if literals == 0 => {
                let count = 3 + reader.extended(byte, 15)?;
                reader.literals(count)?;
                literals = 4;
                continue;
            }
            0..16 => {
                let far = usize::from(reader.byte()?) << 2;
                let (base, length) = if literals == 4 { (NEAR, 3) } else { (0, 2) };
                (base + far + (byte >> 2) + 1, length, byte & 3)
            }
            16..32 => {
                let length = 2 + reader.extended(byte & 7, 7)?;
                let (far, low) = reader.distance()?;
                let distance = ((byte & 8) << 11) + far;
                if distance == 0 {
                    let complete = reader.written == reader.output.len() && reader.input.is_empty();
                    return (complete && length == 3).then_some(());
                }
                (distance + 0x4000, length, low)
            }
            32..64 => {
                let length = 2 + reader.extended(byte & 31, 31)?;
                let (far, low) = reader.distance()?;
                (far + 1, length, low)
            }
            _ => {
                let far = usize::from(reader.byte()?) << 3;
                (far + ((byte >> 2) & 7) + 1, (byte >> 5) + 1, byte & 3)
            }
        };
        reader.copy(distance, length)?;
        reader.literals(low)?;
        literals = low;
    }
}

struct Reader<'a> {
    input: &'a [u8],
    output: &'a mut [u8],
    written: usize,
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.input.split_first()?;
        self.input = rest;
        Some(*first)
    }

    /// The value itself or, if it is zero, the extension plus the largest value.
    fn extended(&mut self, value: usize, largest: usize) -> Option<usize> {
        if value != 0 {
            return Some(value);
        }
        let mut sum = largest;
        loop {
            match self.byte()? {
                0 => sum += 255,
                last => return Some(sum + usize::from(last)),
            }
        }
    }

    /// Reads the distance of M3 and M4: 14 bits, and 2 bits of literals.
    fn distance(&mut self) -> Option<(usize, usize)> {
        let word = usize::from(u16::from_le_bytes([self.byte()?, self.byte()?]));
        Some((word >> 2, word & 3))
    }

    fn literals(&mut self, count: usize) -> Option<()> {
        let literals = self.input.get(..count)?;
        self.output.get_mut(self.written..self.written.checked_add(count)?)?.copy_from_slice(literals);
        self.input = &self.input[count..];
        self.written += count;
        Some(())
    }

    /// Source and target may overlap; then the bytes just written are repeated.
    fn copy(&mut self, distance: usize, length: usize) -> Option<()> {
        let source = self.written.checked_sub(distance)?;
        let end = self.written.checked_add(length).filter(|end| *end <= self.output.len())?;
        if distance >= length {
            self.output.copy_within(source..source + length, self.written);
        } else {
            for at in self.written..end {
                self.output[at] = self.output[at - distance];
            }
        }
        self.written = end;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Compresses `input` and checks that it decompresses again. Returns the compressed bytes.
    #[track_caller]
    fn round_trip(input: &[u8]) -> Vec<u8> {
        let mut packed = Vec::new();
        let mut compressor = Compressor::default();
        compressor.compress(&[7; 4096], &mut packed);
        packed.clear();
        compressor.compress(input, &mut packed);
        assert!(packed.len() <= bound(input.len()));
        let mut unpacked = vec![0xee; input.len()];
        assert_eq!(decompress(&packed, &mut unpacked), Some(()), "{packed:02x?}");
        assert_eq!(unpacked, input);
        packed
    }

    /// Bytes without a pattern.
    fn noise(bytes: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let mut next = || {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (state >> 56) as u8
        };
        (0..bytes).map(|_| next()).collect()
    }

    #[test]
    fn pages_come_out_as_they_went_in() {
        assert!(round_trip(&[0; 4096]).len() < 40);
        assert!(round_trip(&noise(4096)).len() > 4096);
        assert!(round_trip(&noise(64).repeat(64)).len() < 120);
        for bytes in [0, 1, 2, 3, 4, 5, 17, 18, 19, 237, 238, 239, 273, 274, 528, 4096] {
            round_trip(&noise(bytes));
            round_trip(&vec![5; bytes]);
        }
    }

    /// Lengths of literals and of copies around the places where their encoding changes.
    #[test]
    fn all_lengths_are_right() {
        let noise = noise(1200);
        for literals in (1..40).chain(230..300).chain(500..560) {
            for copied in (4..12).chain(30..40).chain(280..300) {
                let page: Vec<u8> =
                    [&noise[..600], &noise[600..600 + literals], &noise[..copied], &noise[600..610]].concat();
                round_trip(&page);
            }
        }
    }

    /// Made by liblzo2's lzo1x_1, and documented in the format's description: literals first, then the end.
    #[test]
    fn stream_of_liblzo2_is_read() {
        let mut text = [0; 17];
        let stream = b"\x22hello, lzo world!\x11\0\0";
        assert_eq!(decompress(stream, &mut text), Some(()));
        assert_eq!(&text, b"hello, lzo world!");
        assert_eq!(decompress(stream, &mut [0; 16]), None);
        assert_eq!(decompress(stream, &mut [0; 18]), None);
    }

    /// Kinds of copy that are read but never written.
    #[test]
    fn copies_of_all_kinds_are_read() {
        // Four literals, then M1 after a run, which reaches back 2 KiB and more, where nothing is.
        assert_eq!(decompress(b"\x15abcd\x00\x00\x11\0\0", &mut [0; 7]), None);
        // One literal belongs to an M2 copy, then M1 copies the two bytes before.
        let mut bytes = [0; 10];
        let stream = b"\x15abcd\x4d\x00e\x04\x00\x11\0\0";
        assert_eq!(decompress(stream, &mut bytes), Some(()));
        assert_eq!(&bytes, b"abcdabcece");
    }

    proptest! {
        #[test]
        fn anything_round_trips(parts in prop::collection::vec((0_usize..4096, 0_usize..400, 0_usize..30), 0..20)) {
            let noise = noise(4500);
            let mut page = Vec::new();
            for (from, copied, zeroes) in parts {
                page.extend(&noise[from..from + copied]);
                page.resize(page.len() + zeroes, 0);
            }
            page.truncate(4096);
            round_trip(&page);
        }

        #[test]
        fn damaged_streams_never_harm(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8), cut in any::<prop::sample::Index>()) {
            let mut packed = Vec::new();
            Compressor::default().compress(&[noise(500), vec![0; 100], noise(300)].concat(), &mut packed);
            for (at, byte) in damage {
                let at = at.index(packed.len());
                packed[at] = byte;
            }
            let _ = decompress(&packed, &mut [0; 900]);
            let _ = decompress(&packed[..cut.index(packed.len())], &mut [0; 900]);
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = decompress(&bytes, &mut [0; 4096]);
        }
    }
}
