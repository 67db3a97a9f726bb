//! Every page that the server writes is in the dirty log, or a handed-over guest runs on old memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod common;

use std::collections::BTreeSet;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use common::*;
use hearth_disk::write_log::WriteLog;

const RAM_PAGES: u64 = 8192;

/// Pages of RAM by content, to find those that changed.
fn pages(guest: &Guest) -> Vec<Vec<u8>> {
    (0..RAM_PAGES).map(|page| guest.read_ram(page * 4096, 4096)).collect()
}

fn changed(before: &[Vec<u8>], after: &[Vec<u8>]) -> BTreeSet<u64> {
    (0..RAM_PAGES).filter(|page| before[*page as usize] != after[*page as usize]).collect()
}

#[test]
fn writes_are_logged_only_while_asked() {
    let place = Place::new(4 << 20);
    let _server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 2);
    let log = attach_log(&guest);
    guest.read_disk(0, 8192);
    assert!(take_log(&log).is_empty(), "not asked for yet");

    guest.set_log_all(true);
    guest.set_addresses(0, true);
    guest.set_addresses(1, true);
    let before = pages(&guest);
    guest.write_ram(DATA + 0x10000, &[1; 4096]);
    // Data of several shapes, a write (status and ring only), a serial number, an error.
    let pieces = [(DATA + 100, 1000, true), (DATA + 0x3ff0, 24, true), (DATA + 0x5f00, 3072, true)];
    guest.submit_pieces(0, READ, 3, &pieces);
    guest.submit(0, READ, 1 << 20, DATA + 0x20000, 300 * 1024);
    guest.submit_pieces(0, GET_ID, 0, &[(DATA + 0x9000, 20, true)]);
    guest.submit(0, READ, u64::MAX / 1024, DATA, 512);
    (0..4).for_each(|_| assert_ne!(guest.wait(0).status, 255));
    assert_eq!(guest.run(1, WRITE, 0, DATA + 0x10000, 4096).status, 0);
    let after = pages(&guest);
    let logged = take_log(&log);
    // Pages that the test itself wrote: headers, the available ring, the source of the write.
    let ours: BTreeSet<u64> = [(DATA + 0x10000) / 4096].into();
    let written: BTreeSet<u64> = changed(&before, &after).difference(&ours).copied().collect();
    let own_rings: BTreeSet<u64> = [0x0, 0x4, 0x10, 0x14].into();
    let missing: Vec<u64> = written.difference(&logged).copied().filter(|page| !own_rings.contains(page)).collect();
    assert!(missing.is_empty(), "pages {missing:x?} were written and not logged");
    for used in [guest.used_address(0), guest.used_address(1)] {
        assert!(logged.contains(&(used / 4096)) && logged.contains(&(used / 4096 + 1)), "the used ring");
    }
    assert!(logged.len() < written.len() + 8, "the log is no blanket: {logged:x?}");
    assert!(!logged.contains(&((DATA + 0x10000) / 4096)), "what is only read is not logged");

    guest.set_log_all(false);
    guest.set_addresses(0, false);
    guest.read_disk(0, 8192);
    assert!(take_log(&log).is_empty(), "no longer asked for");
}

#[test]
fn used_ring_is_logged_by_own_flag() {
    let place = Place::new(4 << 20);
    let _server = place.serve(None);
    // Without event indices only the entries are in the second page.
    let mut guest = Guest::connect_with(&place.socket(), 1, VERSION_1 | PROTOCOL_FEATURES);
    let log = attach_log(&guest);
    guest.set_addresses(0, true);
    guest.read_disk(0, 4096);
    // Index and entries.
    let page = guest.used_address(0) / 4096;
    assert_eq!(take_log(&log), [page, page + 1].into());
}

#[test]
fn keepers_own_log_has_all_writes() {
    let place = Place::new(4 << 20);
    let server = place.serve(None);
    let ram = ram_file();
    let identity = ram.metadata().unwrap();
    let log = Arc::new(WriteLog::new((identity.dev(), identity.ino()), RAM_PAGES));
    let taken = || {
        let mut pages = BTreeSet::new();
        log.take(|page| {
            pages.insert(page);
        });
        pages
    };
    let mut guest = Guest::with_ram(&place.socket(), 1, VERSION_1 | PROTOCOL_FEATURES, ram);
    guest.read_disk(0, 4096);
    assert!(taken().is_empty(), "nobody asked for it");
    server.set_write_log(Some(log.clone())).unwrap();
    let before = pages(&guest);
    guest.submit_pieces(0, READ, 3, &[(DATA + 0x3ff0, 24, true), (DATA + 0x5f00, 3048, true)]);
    assert_eq!(guest.wait(0).status, 0);
    let (logged, used) = (taken(), guest.used_address(0) / 4096);
    // The guest's own: descriptors, the available ring, headers.
    let ours: BTreeSet<u64> = (0..DATA / 4096).filter(|page| *page != used).collect();
    let written = &changed(&before, &pages(&guest)) - &ours;
    assert!(!written.is_empty() && written.is_subset(&logged) && logged.contains(&used), "{written:x?} {logged:x?}");
    server.set_write_log(None).unwrap();
    guest.read_disk(0, 4096);
    assert!(taken().is_empty());
}

#[test]
fn image_is_frozen_while_the_guest_writes() {
    let place = Place::new(4 << 20);
    let server = place.serve(None);
    let mut guest = Guest::connect(&place.socket(), 1);
    guest.write_ram(DATA, &[1; 8192]);
    assert_eq!(guest.run(0, WRITE, 1 << 20, DATA, 8192).status, 0);
    let before = place.disk_bytes(0, 4 << 20);
    let target = tempfile::tempfile().unwrap();
    let frozen = server.observer().freeze(target.try_clone().unwrap()).unwrap();
    guest.write_ram(DATA, &[2; 8192]);
    for offset in [1 << 20, 3 << 20, (4 << 20) - 8192] {
        assert_eq!(guest.run(0, WRITE, offset, DATA, 8192).status, 0);
    }
    frozen.copy(|_| true).unwrap();
    let mut copy = vec![0; 4 << 20];
    target.read_exact_at(&mut copy, 0).unwrap();
    assert!(copy == before, "the copy is of another moment");
    assert_eq!(guest.read_disk(3 << 20, 4096), [2; 4096]);
}
