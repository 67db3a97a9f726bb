//! Block requests: from a list of descriptors to what the guest wants, or to why it is refused.
//!
//! Pure, like `chain`. Everything that a guest can get wrong ends here: what `parse` returns lies inside the disk, has
//! a status byte, and whole sectors. The replies to wrong requests are those that QEMU's own block export gives.

use super::chain::{Descriptor, ReadGuest};
use crate::block::SECTOR_BYTES;

const HEADER_BYTES: usize = 16;
const SEGMENT_BYTES: usize = 16;
/// Length of the serial number in a reply to GET_ID (virtio 1.2, 5.2.6).
pub const SERIAL_BYTES: usize = 20;
/// Sectors in one discard or write-zeroes request, at most; offered in the configuration.
pub const RANGE_SECTORS_MAX: u32 = 1 << 22;
const UNMAP: u32 = 1;

const TYPE_READ: u32 = 0;
const TYPE_WRITE: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;

/// A contiguous piece of guest-physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub address: u64,
    pub bytes: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    Flush,
    /// GET_ID: the serial number.
    Identify,
    Discard,
    WriteZeroes {
        unmap: bool,
    },
}

impl Kind {
    /// Whether it changes what blocks hold.
    pub fn changes_blocks(self) -> bool {
        matches!(self, Self::Write | Self::Discard | Self::WriteZeroes { .. })
    }
}

/// The status byte of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

/// A request that can be carried out.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    pub kind: Kind,
    /// Bytes from the start of the disk.
    pub offset: u64,
    /// Bytes of the disk that are read, written or voided. For `Identify`, of the reply.
    pub bytes: u64,
    /// Guest memory: target of a read, source of a write.
    pub data: Vec<Segment>,
    /// Guest-physical address of the status byte.
    pub status: u64,
}

/// A request that is not carried out. Without an address for it, there is no status to be written.
#[derive(Debug, PartialEq, Eq)]
pub struct Refusal {
    pub reason: &'static str,
    pub answer: Option<(u64, Status)>,
}

/// The disk, as far as requests are judged by it.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    pub bytes: u64,
    pub read_only: bool,
    pub discard: bool,
}

/// Judges a request. `data` is an empty vector, for reuse.
pub fn parse(
    descriptors: &[Descriptor],
    bounds: Bounds,
    read: &impl ReadGuest,
    data: Vec<Segment>,
) -> Result<Request, Refusal> {
    let (source, target, status) = split(descriptors)?;
    let refuse = |reason, answer| Refusal { reason, answer: Some((status, answer)) };
    let frame = Frame { source, target, status };
    frame.check_lengths().map_err(|reason| refuse(reason, Status::IoError))?;
    let mut header = [0; HEADER_BYTES];
    if !gather(source, 0, &mut header, read) {
        return Err(refuse("its header is cut off or outside of guest memory", Status::IoError));
    }
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let sector = u64::from_le_bytes(sector);
    let request = match u32::from_le_bytes([t0, t1, t2, t3]) {
        TYPE_READ => frame.transfer(Kind::Read, sector, bounds, data),
        TYPE_WRITE => frame.transfer(Kind::Write, sector, bounds, data),
        TYPE_FLUSH => Ok(Request { kind: Kind::Flush, offset: 0, bytes: 0, data, status }),
        TYPE_GET_ID => frame.identify(data),
        TYPE_DISCARD if bounds.discard => frame.range(TYPE_DISCARD, bounds, read, data),
        TYPE_WRITE_ZEROES => frame.range(TYPE_WRITE_ZEROES, bounds, read, data),
        _ => Err(("unknown type", Status::Unsupported)),
    };
    request.map_err(|(reason, answer)| refuse(reason, answer))
}

/// Splits a chain into the part that the guest sends, the part that it wants filled, and the status byte's address at its end.
fn split(descriptors: &[Descriptor]) -> Result<(&[Descriptor], &[Descriptor], u64), Refusal> {
    let refuse = |reason| Refusal { reason, answer: None };
    let middle = descriptors.iter().position(|d| d.writable).ok_or(refuse("no room for a status byte"))?;
    let (source, target) = descriptors.split_at(middle);
    let last = target.last().filter(|last| last.writable && last.bytes > 0);
    let last = last.ok_or(refuse("no room for a status byte at its end"))?;
    let status = last.address.checked_add(u64::from(last.bytes) - 1).ok_or(refuse("its status byte is nowhere"))?;
    Ok((source, target, status))
}

/// A request taken apart.
struct Frame<'a> {
    source: &'a [Descriptor],
    target: &'a [Descriptor],
    status: u64,
}

type Refused = (&'static str, Status);

impl Frame<'_> {
    fn check_lengths(&self) -> Result<(), &'static str> {
        if self.target.iter().any(|d| !d.writable) {
            return Err("data to read after data to write");
        }
        let mut total = 0u64;
        for descriptor in self.source.iter().chain(self.target) {
            let end = descriptor.address.checked_add(u64::from(descriptor.bytes));
            if descriptor.bytes == 0 || end.is_none() {
                return Err("a descriptor of no or of absurd length");
            }
            total += u64::from(descriptor.bytes);
        }
        // The used length is 32 bits wide.
        if total > u64::from(u32::MAX) { Err("absurd length") } else { Ok(()) }
    }

    fn transfer(&self, kind: Kind, sector: u64, bounds: Bounds, mut data: Vec<Segment>) -> Result<Request, Refused> {
        if kind == Kind::Write {
            self.source_data(&mut data);
        } else {
            self.target_data(&mut data);
        }
        if bounds.read_only && kind == Kind::Write {
            return Err(("a write to a read-only disk", Status::IoError));
        }
        let bytes = data.iter().map(|segment| u64::from(segment.bytes)).sum::<u64>();
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(("no whole sectors", Status::IoError));
        }
        let offset = within(sector, bytes, bounds)?;
        Ok(Request { kind, offset, bytes, data, status: self.status })
    }

    fn identify(&self, mut data: Vec<Segment>) -> Result<Request, Refused> {
        self.target_data(&mut data);
        let room = data.iter().map(|segment| u64::from(segment.bytes)).sum::<u64>();
        if room == 0 {
            return Err(("no room for the serial number", Status::IoError));
        }
        let bytes = room.min(SERIAL_BYTES as u64);
        Ok(Request { kind: Kind::Identify, offset: 0, bytes, data, status: self.status })
    }

    /// Discard and write-zeroes: exactly one range.
    fn range(
        &self,
        request: u32,
        bounds: Bounds,
        read: &impl ReadGuest,
        data: Vec<Segment>,
    ) -> Result<Request, Refused> {
        if bounds.read_only {
            return Err(("a change to a read-only disk", Status::IoError));
        }
        let bytes: u64 = self.source.iter().map(|d| u64::from(d.bytes)).sum();
        if bytes > (HEADER_BYTES + SEGMENT_BYTES) as u64 {
            return Err(("more than one range", Status::Unsupported));
        }
        let mut segment = [0; SEGMENT_BYTES];
        if !gather(self.source, HEADER_BYTES, &mut segment, read) {
            return Err(("its range is cut off", Status::IoError));
        }
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = segment;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let sectors = u32::from_le_bytes([n0, n1, n2, n3]);
        let kind = match (request, u32::from_le_bytes(flags)) {
            (TYPE_DISCARD, 0) => Kind::Discard,
            (TYPE_WRITE_ZEROES, flags @ (0 | UNMAP)) => Kind::WriteZeroes { unmap: flags == UNMAP },
            _ => return Err(("reserved flags", Status::Unsupported)),
        };
        if sectors == 0 || sectors > RANGE_SECTORS_MAX {
            return Err(("a range of no or of absurd length", Status::IoError));
        }
        let bytes = u64::from(sectors) * SECTOR_BYTES;
        let offset = within(sector, bytes, bounds)?;
        Ok(Request { kind, offset, bytes, data, status: self.status })
    }

    /// The data after the header.
    fn source_data(&self, data: &mut Vec<Segment>) {
        let mut skip = HEADER_BYTES as u32;
        for descriptor in self.source {
            let skipped = skip.min(descriptor.bytes);
            skip -= skipped;
            if skipped < descriptor.bytes {
                let address = descriptor.address + u64::from(skipped);
                data.push(Segment { address, bytes: descriptor.bytes - skipped });
            }
        }
    }

    /// The data before the status byte.
    fn target_data(&self, data: &mut Vec<Segment>) {
        data.extend(self.target.iter().map(|d| Segment { address: d.address, bytes: d.bytes }));
        if let Some(last) = data.last_mut() {
            last.bytes -= 1;
            if last.bytes == 0 {
                data.pop();
            }
        }
    }
}

/// The byte offset of a range that lies on the disk.
fn within(sector: u64, bytes: u64, bounds: Bounds) -> Result<u64, Refused> {
    let offset = sector.checked_mul(SECTOR_BYTES);
    let end = offset.and_then(|offset| offset.checked_add(bytes));
    match (offset, end) {
        (Some(offset), Some(end)) if end <= bounds.bytes => Ok(offset),
        _ => Err(("past the end of the disk", Status::IoError)),
    }
}

/// Reads `out.len()` bytes that start `skip` bytes into the descriptors, however the guest has cut them.
fn gather(descriptors: &[Descriptor], skip: usize, out: &mut [u8], read: &impl ReadGuest) -> bool {
    let (mut skip, mut filled) = (skip as u64, 0);
    for descriptor in descriptors {
        let skipped = skip.min(u64::from(descriptor.bytes));
        skip -= skipped;
        let room = out.len() - filled;
        let take = (u64::from(descriptor.bytes) - skipped).min(room as u64) as usize;
        if take > 0 && !read(descriptor.address + skipped, &mut out[filled..filled + take]) {
            return false;
        }
        filled += take;
        if filled == out.len() {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDS: Bounds = Bounds { bytes: 1 << 20, read_only: false, discard: true };

    fn source(address: u64, bytes: u32) -> Descriptor {
        Descriptor { address, bytes, writable: false }
    }

    fn target(address: u64, bytes: u32) -> Descriptor {
        Descriptor { address, bytes, writable: true }
    }

    fn header(kind: u32, sector: u64, range: Option<(u64, u32, u32)>) -> Vec<u8> {
        let mut bytes = [kind.to_le_bytes(), [0; 4]].concat();
        bytes.extend_from_slice(&sector.to_le_bytes());
        if let Some((sector, sectors, flags)) = range {
            bytes.extend_from_slice(&sector.to_le_bytes());
            bytes.extend_from_slice(&sectors.to_le_bytes());
            bytes.extend_from_slice(&flags.to_le_bytes());
        }
        bytes
    }

    /// Guest memory holds `bytes` from address 0x100 on.
    fn judge(bytes: &[u8], descriptors: &[Descriptor], bounds: Bounds) -> Result<Request, Refusal> {
        let read = |address: u64, out: &mut [u8]| {
            let at = usize::try_from(address).unwrap_or(usize::MAX).wrapping_sub(0x100);
            bytes.get(at..at.saturating_add(out.len())).map(|found| out.copy_from_slice(found)).is_some()
        };
        parse(descriptors, bounds, &read, Vec::new())
    }

    fn check_refused(bytes: &[u8], descriptors: &[Descriptor], bounds: Bounds, expected: Option<Status>) {
        let refusal = judge(bytes, descriptors, bounds).unwrap_err();
        assert_eq!(refusal.answer.map(|(_, status)| status), expected, "{}", refusal.reason);
    }

    #[test]
    fn requests_are_framed_as_the_guest_likes() {
        let bytes = header(TYPE_READ, 8, None);
        let expected = Request {
            kind: Kind::Read,
            offset: 4096,
            bytes: 512,
            data: vec![Segment { address: 0x900, bytes: 512 }],
            status: 0xb00,
        };
        let classic = [source(0x100, 16), target(0x900, 512), target(0xb00, 1)];
        assert_eq!(judge(&bytes, &classic, BOUNDS).as_ref(), Ok(&expected));
        let status_inside = [source(0x100, 3), source(0x103, 13), target(0x900, 513)];
        assert_eq!(judge(&bytes, &status_inside, BOUNDS), Ok(expected));

        let bytes = header(TYPE_WRITE, 0, None);
        let header_and_data_in_one = [source(0x100, 16 + 512), target(0xb00, 1)];
        let request = judge(&bytes, &header_and_data_in_one, BOUNDS).unwrap();
        assert_eq!(request.data, [Segment { address: 0x110, bytes: 512 }]);
    }

    #[test]
    fn partial_sectors_and_out_of_range_are_refused() {
        let end = BOUNDS.bytes / SECTOR_BYTES;
        for (sector, bytes) in [(end, 512), (end - 1, 1024), (u64::MAX, 512), (u64::MAX / 512, 512), (0, 511)] {
            let read = [source(0x100, 16), target(0x900, bytes), target(0xb00, 1)];
            check_refused(&header(TYPE_READ, sector, None), &read, BOUNDS, Some(Status::IoError));
            let write = [source(0x100, 16), source(0x900, bytes), target(0xb00, 1)];
            check_refused(&header(TYPE_WRITE, sector, None), &write, BOUNDS, Some(Status::IoError));
        }
        let nothing = [source(0x100, 16), target(0xb00, 1)];
        check_refused(&header(TYPE_READ, 0, None), &nothing, BOUNDS, Some(Status::IoError));
    }

    #[test]
    fn wrong_framing_is_refused() {
        let bytes = header(TYPE_READ, 0, None);
        let check = |descriptors: &[Descriptor], expected| check_refused(&bytes, descriptors, BOUNDS, expected);
        check(&[source(0x100, 16), source(0x900, 512)], None);
        check(&[source(0x100, 16), target(0x900, 512), source(0xb00, 1)], None);
        check(&[source(0x100, 16), target(0x900, 512), target(0xb00, 0)], None);
        check(&[source(0x100, 16), target(u64::MAX, 2)], None);
        check(&[source(0x100, 16), target(0x900, 0), target(0xb00, 1)], Some(Status::IoError));
        check(&[source(0x100, 15), target(0x900, 512), target(0xb00, 1)], Some(Status::IoError));
        check(&[source(0x4000, 16), target(0x900, 512), target(0xb00, 1)], Some(Status::IoError));
        let endless = [source(0x100, 16), target(0, u32::MAX), target(0, u32::MAX), target(0xb00, 1)];
        check(&endless, Some(Status::IoError));
    }

    #[test]
    fn ranges_are_judged_as_qemu_does() {
        let check = |kind, range, bytes: u32, bounds, expected| {
            let descriptors = [source(0x100, 16), source(0x110, bytes), target(0xb00, 1)];
            let mut memory = header(kind, 0, Some(range));
            memory.resize(64, 0);
            let answer = match judge(&memory, &descriptors, bounds) {
                Ok(_) => Status::Ok,
                Err(refusal) => refusal.answer.expect("there is a status byte").1,
            };
            assert_eq!(answer, expected, "type {kind}, {range:?}, {bytes} bytes");
        };
        for kind in [TYPE_DISCARD, TYPE_WRITE_ZEROES] {
            check(kind, (0, 8, 0), 16, BOUNDS, Status::Ok);
            check(kind, (0, 8, 0), 32, BOUNDS, Status::Unsupported);
            check(kind, (0, 8, 2), 16, BOUNDS, Status::Unsupported);
            check(kind, (0, 8, 0), 15, BOUNDS, Status::IoError);
            check(kind, (0, 0, 0), 16, BOUNDS, Status::IoError);
            check(kind, (0, u32::MAX, 0), 16, BOUNDS, Status::IoError);
            check(kind, (2048, 1, 0), 16, BOUNDS, Status::IoError);
            check(kind, (u64::MAX, 1, 0), 16, BOUNDS, Status::IoError);
            check(kind, (0, 8, 0), 16, Bounds { read_only: true, ..BOUNDS }, Status::IoError);
        }
        check(TYPE_DISCARD, (0, 8, UNMAP), 16, BOUNDS, Status::Unsupported);
        check(TYPE_WRITE_ZEROES, (0, 8, UNMAP), 16, BOUNDS, Status::Ok);
        check(TYPE_DISCARD, (0, 8, 0), 16, Bounds { discard: false, ..BOUNDS }, Status::Unsupported);
    }

    #[test]
    fn unknown_requests_are_unsupported() {
        let descriptors = [source(0x100, 16), target(0x900, 512), target(0xb00, 1)];
        check_refused(&header(77, 0, None), &descriptors, BOUNDS, Some(Status::Unsupported));
        let read_only = Bounds { read_only: true, ..BOUNDS };
        let write = [source(0x100, 16), source(0x900, 512), target(0xb00, 1)];
        check_refused(&header(TYPE_WRITE, 0, None), &write, read_only, Some(Status::IoError));
    }
}
