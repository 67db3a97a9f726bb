//! Transfer of bytes between guest memory and the keeper's buffers, block by block, and their recording on the way.
//!
//! `position` is the distance from the start of a request's data. A block counts only if the request covers all of it
//! and it lies whole in one page of the guest: half a block has no tag, half a page cannot be served again.

use super::memory::{GuestMap, Unmapped};
use super::recorder::Recorder;
use super::request::{Request, Segment};
use crate::block::{BLOCK_BYTES, RamPage};
use crate::warm::AfterServing;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A place in the guest memory of a request.
#[derive(Clone, Copy)]
pub struct Cursor<'a> {
    segments: &'a [Segment],
    /// Bytes of the first segment that are behind us.
    behind: u32,
}

impl<'a> Cursor<'a> {
    pub fn at(request: &'a Request, position: u64) -> Self {
        let mut cursor = Self { segments: &request.data, behind: 0 };
        cursor.advance(position);
        cursor
    }

    pub fn advance(&mut self, mut bytes: u64) {
        while bytes > 0 && !self.segments.is_empty() {
            bytes -= self.piece(bytes).1;
        }
    }

    /// The next contiguous piece of at most `bytes`: its address and length.
    fn piece(&mut self, bytes: u64) -> (u64, u64) {
        let Some((segment, rest)) = self.segments.split_first() else { return (0, 0) };
        let left = u64::from(segment.bytes - self.behind);
        let address = segment.address + u64::from(self.behind);
        let taken = left.min(bytes);
        if taken == left {
            (self.segments, self.behind) = (rest, 0);
        } else {
            self.behind += taken as u32;
        }
        (address, taken)
    }

    /// The page that the next block fills exactly.
    fn whole_page(&self, memory: &GuestMap) -> Option<RamPage> {
        let segment = self.segments.first()?;
        let whole = u64::from(segment.bytes - self.behind) >= BLOCK;
        whole.then(|| memory.whole_page(segment.address + u64::from(self.behind))).flatten()
    }

    fn write(&mut self, memory: &GuestMap, mut bytes: &[u8]) -> Result<(), Unmapped> {
        while !bytes.is_empty() {
            let (address, length) = self.piece(bytes.len() as u64);
            if length == 0 {
                return Err(Unmapped);
            }
            let (now, later) = bytes.split_at(length as usize);
            memory.write(address, now)?;
            bytes = later;
        }
        Ok(())
    }

    fn read(&mut self, memory: &GuestMap, mut out: &mut [u8]) -> Result<(), Unmapped> {
        while !out.is_empty() {
            let (address, length) = self.piece(out.len() as u64);
            if length == 0 {
                return Err(Unmapped);
            }
            let (now, later) = out.split_at_mut(length as usize);
            memory.read(address, now)?;
            out = later;
        }
        Ok(())
    }

    /// The next bytes of guest memory hold something that is not recorded.
    fn overwritten(mut self, memory: &GuestMap, recorder: &mut Recorder, mut bytes: u64) {
        while bytes > 0 {
            let (address, length) = self.piece(bytes);
            if length == 0 {
                return;
            }
            for page in address / BLOCK..=(address + (length - 1)) / BLOCK {
                if let Some(page) = memory.page((page * BLOCK).max(address)) {
                    recorder.overwritten(page);
                }
            }
            bytes -= length;
        }
    }
}

/// Bytes from here to the end of the block, or of the request.
pub fn step(request: &Request, position: u64) -> u64 {
    (BLOCK - (request.offset + position) % BLOCK).min(request.bytes - position)
}

/// Bytes for the guest arrived: copies them to it, and notes which of its pages hold which blocks now.
pub fn deliver(
    memory: &GuestMap,
    recorder: &mut Recorder,
    request: &Request,
    position: u64,
    data: &[u8],
    recordable: bool,
) -> Result<(), Unmapped> {
    let mut cursor = Cursor::at(request, position);
    for (at, piece) in blocks(request, position, data) {
        let page = cursor.whole_page(memory).filter(|_| recordable);
        let tag = page.and(piece.try_into().ok()).and_then(|block| recorder.tag(block));
        match (page, tag) {
            (Some(page), Some(tag)) => recorder.holds(page, at / BLOCK, tag),
            _ => cursor.overwritten(memory, recorder, piece.len() as u64),
        }
        cursor.write(memory, piece)?;
    }
    Ok(())
}

/// Bytes of the guest on their way to the disk: copied once, so that what is tagged is what is written.
pub fn fetch(memory: &GuestMap, request: &Request, position: u64, out: &mut [u8]) -> Result<(), Unmapped> {
    Cursor::at(request, position).read(memory, out)
}

/// A write has reached the disk: notes the pages it came from.
pub fn note_written(memory: &GuestMap, recorder: &mut Recorder, request: &Request, position: u64, data: &[u8]) {
    let mut cursor = Cursor::at(request, position);
    for (at, piece) in blocks(request, position, data) {
        if let Some(page) = cursor.whole_page(memory)
            && let Ok(block) = piece.try_into()
            && let Some(tag) = recorder.tag(block)
        {
            recorder.holds(page, at / BLOCK, tag);
        }
        cursor.advance(piece.len() as u64);
    }
}

/// A write of whole blocks or parts of them has reached the disk, and met no other request.
pub fn tell_written(recorder: &Recorder, request: &Request, position: u64, data: &[u8]) {
    for (at, piece) in blocks(request, position, data) {
        recorder.written(at / BLOCK, (at % BLOCK) as usize, piece);
    }
}

/// The image was read: `data` begins at byte `offset` of the disk.
pub fn tell_read(recorder: &Recorder, offset: u64, data: &[u8], certain: bool) {
    for (at, piece) in cut(offset, data) {
        recorder.read_from_image(at / BLOCK, piece.try_into().ok().filter(|_| certain));
    }
}

/// Serves the block at byte `at` of the disk, or the part of it that begins there, from memory, if it is held.
pub fn serve(
    memory: &GuestMap,
    recorder: &mut Recorder,
    (at, bytes): (u64, u64),
    cursor: Cursor<'_>,
    recordable: bool,
) -> Result<bool, Unmapped> {
    let (block, start) = (at / BLOCK, (at % BLOCK) as usize);
    let page = cursor.whole_page(memory).filter(|_| recordable && bytes == BLOCK);
    let after = if page.is_some() { AfterServing::Release } else { AfterServing::Keep };
    let mut written = Ok(());
    let served = recorder.serve(block, after, &mut |whole| {
        let mut target = cursor;
        written = target.write(memory, &whole[start..start + bytes as usize]);
    });
    let Some(tag) = served else { return Ok(false) };
    written?;
    match page {
        Some(page) => recorder.holds(page, block, tag),
        None => cursor.overwritten(memory, recorder, bytes),
    }
    Ok(true)
}

/// Cuts data of a request at block borders of the disk.
fn blocks<'a>(request: &Request, position: u64, data: &'a [u8]) -> impl Iterator<Item = (u64, &'a [u8])> {
    cut(request.offset + position, data)
}

/// Byte offset on the disk, and the piece.
fn cut(offset: u64, data: &[u8]) -> impl Iterator<Item = (u64, &[u8])> {
    let mut at = offset;
    let mut rest = data;
    std::iter::from_fn(move || {
        let length = (BLOCK - at % BLOCK).min(rest.len() as u64);
        let (piece, later) = rest.split_at(length as usize);
        let found = (!piece.is_empty()).then_some((at, piece));
        at += length;
        rest = later;
        found
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::request::Kind;

    fn request(offset: u64, data: &[(u64, u32)]) -> Request {
        let data: Vec<_> = data.iter().map(|&(address, bytes)| Segment { address, bytes }).collect();
        let bytes = data.iter().map(|segment| u64::from(segment.bytes)).sum();
        Request { kind: Kind::Read, offset, bytes, data, status: 0 }
    }

    #[test]
    fn data_is_cut_at_block_boundaries() {
        let request = request(512, &[(0, 12288)]);
        let data = vec![0; 12288 - 4096];
        let cut: Vec<_> = blocks(&request, 4096, &data).map(|(at, piece)| (at, piece.len())).collect();
        assert_eq!(cut, [(4608, 3584), (8192, 4096), (12288, 512)]);
        assert_eq!(step(&request, 0), 3584);
        assert_eq!(step(&request, 12288 - 512), 512);
    }

    #[test]
    fn cursors_find_their_place_over_segments() {
        let request = request(0, &[(0x1000, 100), (0x5000, 412), (0x9000, 512)]);
        let mut cursor = Cursor::at(&request, 90);
        assert_eq!(cursor.piece(4096), (0x105a, 10));
        assert_eq!(cursor.piece(400), (0x5000, 400));
        assert_eq!(cursor.piece(400), (0x5190, 12));
        cursor.advance(500);
        assert_eq!(cursor.piece(400), (0x91f4, 12));
        assert_eq!(cursor.piece(400), (0, 0));
        assert_eq!(Cursor::at(&request, 512).piece(512), (0x9000, 512));
    }
}
