//! Compression of single pages, as kdump files store them: each page is a frame of its own.
//!
//! Each thread has one `Compressor`, whose context and buffers are made once. Measured on one busy core, over all
//! memory that a Debian guest of 2 GiB had in use (level 17): zstd 255 MiB/s to 29 %, lzo 187 MiB/s to 33 %, reading
//! alone 3.5 GiB/s. At level 31, whose pages are harder to compress, 110 MiB/s each, to 21, 31 and (zlib) 29 %.

use hearth_memory::PAGE_BYTES;

use super::lzo;

/// Size of a page, in bytes.
pub const PAGE: usize = PAGE_BYTES as usize;

/// How the pages of a dump are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Small and fast. Readers: crash 8, drgn, and makedumpfile 1.7 if built with it (Debian's is not).
    #[default]
    Zstd,
    /// Every tool can read it.
    Lzo,
    /// Every tool can read it. It is the slowest of all.
    Zlib,
    /// Pages are stored as they are.
    None,
}

impl Compression {
    /// All methods.
    pub const ALL: [Self; 4] = [Self::Zstd, Self::Lzo, Self::Zlib, Self::None];

    /// Name of the method.
    pub fn name(self) -> &'static str {
        match self {
            Self::Zstd => "zstd",
            Self::Lzo => "lzo",
            Self::Zlib => "zlib",
            Self::None => "none",
        }
    }

    /// The method of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// Its bit in kdump headers and page descriptors (`DUMP_DH_COMPRESSED_*` in makedumpfile's `diskdump_mod.h`).
    pub fn flag(self) -> u32 {
        match self {
            Self::Zstd => ZSTD,
            Self::Lzo => LZO,
            Self::Zlib => ZLIB,
            Self::None => 0,
        }
    }

    /// The method of these flags; `None` if this module does not write it.
    pub(crate) fn of_flags(flags: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.flag() == flags & (ZLIB | LZO | SNAPPY | ZSTD))
    }
}

const ZLIB: u32 = 0x1;
const LZO: u32 = 0x2;
const SNAPPY: u32 = 0x4;
const ZSTD: u32 = 0x20;

/// Most of the gain, for a third of the time of the next level.
const LEVEL: i32 = 1;

/// Compresses page after page.
pub struct Compressor {
    method: Method,
    output: Vec<u8>,
}

enum Method {
    Zstd(Box<zstd::bulk::Compressor<'static>>),
    Lzo(lzo::Compressor),
    Zlib(Box<flate2::Compress>),
    None,
}

impl Compressor {
    /// A compressor of this method. Its context is reused for every page.
    pub fn new(compression: Compression) -> Self {
        let method = match compression {
            Compression::Zstd => {
                let compressor = zstd::bulk::Compressor::new(LEVEL).expect("the level exists and memory does");
                Method::Zstd(Box::new(compressor))
            }
            Compression::Lzo => Method::Lzo(lzo::Compressor::default()),
            Compression::Zlib => Method::Zlib(Box::new(flate2::Compress::new(flate2::Compression::new(1), true))),
            Compression::None => Method::None,
        };
        let bound = zstd::zstd_safe::compress_bound(PAGE).max(lzo::bound(PAGE));
        Self { method, output: Vec::with_capacity(bound) }
    }

    /// Compresses a page. Returns `None` where that does not pay: the page is then stored as it is.
    pub fn compress(&mut self, page: &[u8]) -> Option<&[u8]> {
        self.output.clear();
        match &mut self.method {
            Method::Zstd(compressor) => {
                compressor.compress_to_buffer(page, &mut self.output).ok()?;
            }
            Method::Lzo(compressor) => compressor.compress(page, &mut self.output),
            Method::Zlib(compressor) => {
                compressor.reset();
                // There is space for a whole page: a stream that does not end within it does not pay.
                let end = compressor.compress_vec(page, &mut self.output, flate2::FlushCompress::Finish);
                end.ok().filter(|end| *end == flate2::Status::StreamEnd)?;
            }
            Method::None => return None,
        }
        (self.output.len() < page.len()).then_some(&self.output)
    }
}

/// Decompresses page after page, whatever method was used.
#[derive(Default)]
pub struct Decompressor {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
    zlib: Option<Box<flate2::Decompress>>,
}

/// Why a page cannot be decompressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each variant's message describes it")]
pub enum Damaged {
    #[error("the page's data is damaged")]
    Data,
    #[error("the page is compressed with snappy, which Hearth does not support")]
    Snappy,
    #[error("the page is compressed in an unknown way ({0:#x})")]
    Unknown(u32),
}

impl Decompressor {
    /// Decompresses `packed`, which must fill `page` exactly.
    pub fn decompress(&mut self, flags: u32, packed: &[u8], page: &mut [u8]) -> Result<(), Damaged> {
        let done = match flags {
            0 => {
                packed.len() == page.len() && {
                    page.copy_from_slice(packed);
                    true
                }
            }
            ZSTD => self.unzstd(packed, page),
            LZO => lzo::decompress(packed, page).is_some(),
            ZLIB => self.inflate(packed, page),
            SNAPPY => return Err(Damaged::Snappy),
            unknown => return Err(Damaged::Unknown(unknown)),
        };
        if done { Ok(()) } else { Err(Damaged::Data) }
    }

    fn unzstd(&mut self, packed: &[u8], page: &mut [u8]) -> bool {
        if self.zstd.is_none() {
            self.zstd = zstd::bulk::Decompressor::new().ok();
        }
        let done = self.zstd.as_mut().map(|zstd| zstd.decompress_to_buffer(packed, page));
        matches!(done, Some(Ok(bytes)) if bytes == page.len())
    }

    fn inflate(&mut self, packed: &[u8], page: &mut [u8]) -> bool {
        let inflate = self.zlib.get_or_insert_with(|| Box::new(flate2::Decompress::new(true)));
        inflate.reset(true);
        let end = inflate.decompress(packed, page, flate2::FlushDecompress::Finish);
        matches!(end, Ok(flate2::Status::StreamEnd)) && inflate.total_out() == page.len() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages() -> [Vec<u8>; 3] {
        let text = b"[    0.000000] Linux version 6.1.0".repeat(200)[..PAGE].to_vec();
        let mut state = 7_u32;
        let noise = std::iter::repeat_with(|| {
            state = state.wrapping_mul(0x915f_77f5).wrapping_add(1);
            (state >> 24) as u8
        });
        [text, vec![3; PAGE], noise.take(PAGE).collect()]
    }

    #[test]
    fn every_method_gives_pages_back() {
        let mut decompressor = Decompressor::default();
        for method in Compression::ALL {
            let mut compressor = Compressor::new(method);
            let packed = pages().map(|page| {
                let (packed, flags) = match compressor.compress(&page) {
                    Some(packed) => (packed.to_vec(), method.flag()),
                    None => (page.clone(), 0),
                };
                let mut unpacked = vec![0xee; PAGE];
                decompressor.decompress(flags, &packed, &mut unpacked).unwrap();
                assert_eq!(unpacked, page);
                packed.len() < PAGE / 4
            });
            let pays = method != Compression::None;
            assert_eq!(packed, [pays, pays, false], "{}", method.name());
            assert_eq!(Compression::named(method.name()), Some(method));
            assert_eq!(Compression::of_flags(method.flag() | 8), Some(method));
        }
    }

    #[test]
    fn damaged_pages_are_refused_and_harm_no_others() {
        let mut decompressor = Decompressor::default();
        let [text, ..] = pages();
        for method in [Compression::Zstd, Compression::Lzo, Compression::Zlib] {
            let packed = Compressor::new(method).compress(&text).unwrap().to_vec();
            let mut page = vec![0; PAGE];
            let mut check = |bytes: &[u8], page: &mut [u8]| decompressor.decompress(method.flag(), bytes, page);
            assert_eq!(check(&packed[..packed.len() - 2], &mut page), Err(Damaged::Data));
            assert_eq!(check(&packed, &mut page[..PAGE - 1]), Err(Damaged::Data));
            assert_eq!(check(&[], &mut page), Err(Damaged::Data));
            assert_eq!(check(&packed, &mut page), Ok(()));
            assert_eq!(page, text);
        }
        let mut page = vec![0; PAGE];
        assert_eq!(decompressor.decompress(0, &[1; 9], &mut page), Err(Damaged::Data));
        assert_eq!(decompressor.decompress(4, &[1; 9], &mut page), Err(Damaged::Snappy));
        assert_eq!(decompressor.decompress(3, &[1; 9], &mut page), Err(Damaged::Unknown(3)));
    }
}
