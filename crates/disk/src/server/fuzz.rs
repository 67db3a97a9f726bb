//! Fuzzing with what a hostile guest or QEMU can send: chains, requests, messages and inflight regions, by the million.
//!
//! Inputs are mutations of the seeds in `tests/corpus` (shapes that matter, one file each) and descriptor tables made up
//! from likely numbers. A short round runs with the tests; `HEARTH_FUZZ_SECONDS=600 cargo test --release fuzz` goes on.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestCaseError, TestRunner};

use super::chain::{Descriptor, Table, walk};
use super::foreign::ForeignFd;
use super::inflight::{self, Inflight};
use super::request::{Bounds, Kind, RANGE_SECTORS_MAX, Request, SERIAL_BYTES, parse};
use super::wire::{Frame, Message};
use crate::allocation::{FOREIGN_BYTES_MAX, with_ceiling};

const CASES_A_ROUND: u32 = 4000;
const ENTRIES: u16 = 16;
const LIMIT: usize = 20;

/// Runs `check` on many inputs: one round, or rounds until the time is over.
fn fuzz<S: Strategy>(strategy: S, check: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let seconds = std::env::var("HEARTH_FUZZ_SECONDS").ok().map(|text| text.parse().expect("a number of seconds"));
    let (started, mut rounds) = (Instant::now(), 0u64);
    loop {
        let config = Config { cases: CASES_A_ROUND, failure_persistence: None, ..Config::default() };
        TestRunner::new(config).run(&strategy, &check).unwrap();
        rounds += 1;
        if seconds.is_none_or(|seconds| started.elapsed() >= Duration::from_secs(seconds)) {
            break;
        }
    }
    println!("{} cases", rounds * u64::from(CASES_A_ROUND));
}

fn seeds(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(folder);
    let files = std::fs::read_dir(&folder).unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap());
    let seeds: Vec<_> = files.collect();
    assert!(seeds.len() >= 9, "{} has lost its seeds", folder.display());
    seeds
}

/// A seed with some bytes changed: to anything, to a border, to a copy of others.
fn mutated(folder: &str) -> impl Strategy<Value = Vec<u8>> + use<> {
    let borders = select(vec![0u8, 1, 2, 3, 4, 7, 8, 15, 16, 0x7f, 0x80, 0xfe, 0xff]);
    let edit = (any::<prop::sample::Index>(), prop_oneof![any::<u8>(), borders], 1..5usize);
    (select(seeds(folder)), vec(edit, 0..6), any::<u16>()).prop_map(|(mut bytes, edits, cut)| {
        bytes.push(0);
        for (at, value, length) in edits {
            let at = at.index(bytes.len());
            let end = (at + length).min(bytes.len());
            bytes[at..end].fill(value);
        }
        if cut < 4096 {
            bytes.truncate(usize::from(cut) % bytes.len());
        }
        bytes
    })
}

/// A table of descriptors that point at each other, at themselves, and to the edges of everything.
fn made_up() -> impl Strategy<Value = Vec<u8>> {
    let address = select(vec![0u64, 0x10, 0x100, 0x200, 0x3f0, 0x7ff, 0x800, 1 << 32, u64::MAX - 15, u64::MAX]);
    let bytes = select(vec![0u32, 1, 15, 16, 17, 32, 48, 512, 513, 4096, 1 << 20, u32::MAX - 15, u32::MAX]);
    let entry = (address, bytes, 0..8u16, 0..ENTRIES + 2);
    let header = (0..15u32, select(vec![0u64, 1, 7, 2047, 2048, u64::MAX / 512, u64::MAX]));
    (vec(entry, 1..usize::from(ENTRIES)), header).prop_map(|(entries, (kind, sector))| {
        let mut memory = vec![0; 0x800];
        for (at, (address, bytes, flags, next)) in entries.into_iter().enumerate() {
            let raw = [&address.to_le_bytes()[..], &bytes.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()];
            memory[at * 16..][..16].copy_from_slice(&raw.concat());
        }
        memory[0x200..0x204].copy_from_slice(&kind.to_le_bytes());
        memory[0x208..0x210].copy_from_slice(&sector.to_le_bytes());
        memory
    })
}

/// Returns how many requests were accepted.
fn check_chain(memory: &[u8]) -> Result<usize, TestCaseError> {
    let mut accepted = 0;
    let read = |address: u64, out: &mut [u8]| {
        let at = usize::try_from(address).unwrap_or(usize::MAX);
        memory.get(at..at.saturating_add(out.len())).map(|found| out.copy_from_slice(found)).is_some()
    };
    for head in [0, 1, ENTRIES - 1, ENTRIES, u16::MAX] {
        for indirect_allowed in [true, false] {
            let mut descriptors = Vec::new();
            let table = Table { address: 0, entries: ENTRIES, indirect_allowed, limit: LIMIT };
            let walked = with_ceiling(FOREIGN_BYTES_MAX, || walk(table, head, &read, &mut descriptors));
            prop_assert!(descriptors.len() <= LIMIT);
            prop_assert!(head < ENTRIES || walked.is_err());
            // Descriptors found before a fault are parsed as well: they must not hurt either.
            for (read_only, discard) in [(false, true), (true, false)] {
                let bounds = Bounds { bytes: 1 << 20, read_only, discard };
                let parsed = with_ceiling(FOREIGN_BYTES_MAX, || parse(&descriptors, bounds, &read, Vec::new()));
                if let Ok(request) = parsed {
                    check_request(&request, &descriptors, bounds)?;
                    accepted += 1;
                }
            }
        }
    }
    Ok(accepted)
}

/// Properties that the rest of the server relies on.
fn check_request(request: &Request, descriptors: &[Descriptor], bounds: Bounds) -> Result<(), TestCaseError> {
    prop_assert!(!bounds.read_only || !request.kind.changes_blocks());
    prop_assert!(bounds.discard || request.kind != Kind::Discard);
    let end = request.offset.checked_add(request.bytes);
    prop_assert!(end.is_some_and(|end| end <= bounds.bytes || request.kind == Kind::Identify));
    let data: u64 = request.data.iter().map(|segment| u64::from(segment.bytes)).sum();
    match request.kind {
        Kind::Read | Kind::Write => {
            prop_assert_eq!(data, request.bytes);
            prop_assert!(data > 0 && data.is_multiple_of(512));
        }
        Kind::Identify => prop_assert!((1..=SERIAL_BYTES as u64).contains(&request.bytes) && data >= request.bytes),
        Kind::Discard | Kind::WriteZeroes { .. } => {
            prop_assert!((1..=u64::from(RANGE_SECTORS_MAX)).contains(&(request.bytes / 512)));
        }
        Kind::Flush => prop_assert_eq!(request.bytes, 0),
    }
    let inside = |address: u64, bytes: u64, writable: bool| {
        descriptors.iter().any(|descriptor| {
            let end = descriptor.address.checked_add(u64::from(descriptor.bytes));
            descriptor.writable == writable
                && address >= descriptor.address
                && end.is_some_and(|end| address + bytes <= end)
        })
    };
    prop_assert!(inside(request.status, 1, true), "the status byte is the guest's");
    for segment in &request.data {
        let writable = request.kind != Kind::Write;
        prop_assert!(segment.bytes > 0 && inside(segment.address, u64::from(segment.bytes), writable));
    }
    Ok(())
}

#[test]
fn fuzz_chains_and_requests() {
    let accepted: Cell<usize> = Cell::new(seeds("chains").iter().map(|seed| check_chain(seed).unwrap()).sum());
    fuzz(prop_oneof![mutated("chains"), made_up()], |memory| {
        accepted.set(accepted.get() + check_chain(&memory)?);
        Ok(())
    });
    println!("{} requests were accepted", accepted.get());
    assert!(accepted.get() > CASES_A_ROUND as usize / 4, "nearly all was refused, so little was tried");
}

#[test]
fn fuzz_messages() {
    let kinds: [OwnedFd; 3] = [
        std::fs::File::open("/dev/null").unwrap().into(),
        rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap(),
        inflight::create("fuzzed", 2, 16).unwrap().1,
    ];
    fuzz(mutated("messages"), |bytes| {
        let Some((head, payload)) = bytes.split_first_chunk::<5>() else { return Ok(()) };
        let [r0, r1, r2, r3, fds] = *head;
        let kind = &kinds[usize::from(fds >> 2) % kinds.len()];
        let fds = (0..fds % 4).map(|_| kind.try_clone().unwrap().into()).collect();
        let request = u32::from_le_bytes([r0, r1, r2, r3]);
        let frame = Frame { request, need_reply: false, payload: payload.to_vec(), fds };
        let message = with_ceiling(FOREIGN_BYTES_MAX, || Message::parse(frame));
        if let Ok(Message::GetConfig { offset, bytes, .. }) = message {
            prop_assert!(offset + bytes <= super::wire::CONFIG_BYTES_MAX);
        }
        Ok(())
    });
}

#[test]
fn fuzz_inflight_regions() {
    let (spec, file) = inflight::create("fuzzed", 2, 16).unwrap();
    let scribble = std::fs::File::from(file.try_clone().unwrap());
    let edits = vec((0..spec.bytes, select(vec![0u8, 1, 2, 15, 16, 255])), 0..40);
    fuzz((edits, any::<u16>(), any::<u16>()), |(edits, used, head)| {
        for (at, value) in edits {
            std::os::unix::fs::FileExt::write_all_at(&scribble, &[value], at).unwrap();
        }
        let again = ForeignFd::from(file.try_clone().unwrap()).sealed_memory().unwrap();
        let opened = with_ceiling(FOREIGN_BYTES_MAX, || Inflight::open(spec, again));
        let Ok(mut region) = opened else {
            // Another version, or another size: make it ours again.
            let empty = vec![0; spec.bytes as usize];
            std::os::unix::fs::FileExt::write_all_at(&scribble, &empty, 0).unwrap();
            return Ok(());
        };
        let resumed = with_ceiling(FOREIGN_BYTES_MAX, || region.resume(1, used));
        prop_assert!(resumed.len() <= 16 && resumed.iter().all(|head| *head < 16));
        region.begin(1, head);
        region.ending(1, head);
        region.ended(1, head, used.wrapping_add(1));
        prop_assert!(!region.resume(1, used.wrapping_add(1)).contains(&head));
        Ok(())
    });
}
