//! Tests that an upload sends what was saved, as soon as it can, and leaves nothing if it is stopped.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc;

use hearth_store::{Address, Cache, Settings, part_bytes};
use loopback_s3::{BUCKET, S3Server, Wire};

use super::super::pages::{Compression, Page, PageWriter};
use super::super::tests::Stand as Near;
use super::super::{Far, RamPart, Sealed, Snapshot};
use super::*;

/// The orders for a snapshot that is complete in a folder.
fn orders_of(folder: &Path) -> Vec<Order> {
    let text = fs::read_to_string(folder.join(MANIFEST)).unwrap();
    let manifest = Manifest::parse(&text, folder).unwrap();
    let outgoing = Arc::new(Outgoing::of_pages(manifest.ram_pages()));
    outgoing.finish(manifest.ram.bytes);
    let mut orders = vec![Order::Ram(outgoing)];
    orders.extend(manifest.disks.iter().cloned().map(Order::Disk));
    orders.push(Order::Finish(Box::new(manifest)));
    orders
}

/// Sends a snapshot's folder. Afterwards its disks are no longer in the folder.
pub fn send_folder(folder: &Path, store: &Store, watch: &mut Watch<'_>) -> Result<(), SaveError> {
    let (orders, heard) = mpsc::channel();
    orders_of(folder).into_iter().for_each(|order| orders.send(order).unwrap());
    Upload::new(folder, store, &Expected::default(), true, &mut |arrived, of| watch(arrived, of)).run(&heard)
}

/// A snapshot in a folder, and a store.
struct Stand {
    server: S3Server,
    near: Near,
    store: Arc<Store>,
}

impl Stand {
    fn new() -> Self {
        Self::of(Near::new())
    }

    fn of(near: Near) -> Self {
        let server = S3Server::start();
        let store = Arc::new(Self::store(&server, &near, "one"));
        Self { server, near, store }
    }

    fn store(server: &S3Server, near: &Near, place: &str) -> Store {
        let file = near.folder().with_file_name("s3.env");
        let lines = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
        fs::write(&file, lines.collect::<String>()).unwrap();
        let address = Address::parse(&format!("s3://{BUCKET}/{place}")).unwrap();
        Store::open(address, &Settings::from_file(&file).unwrap()).unwrap()
    }

    fn open(&self) -> Result<Snapshot, SnapshotError> {
        let cache = Cache::open(&self.near.folder().with_file_name("cache"), 0).unwrap();
        Snapshot::open_far(
            Far { store: self.store.clone(), cache, scheduler: Arc::default(), scratch: self.near.folder() },
            None,
        )
    }

    fn upload<'a>(&'a self, folder: &'a Path, keeps_disks: bool, watch: &'a mut Watch<'a>) -> Upload<'a> {
        Upload::new(folder, &self.store, &Expected::default(), keeps_disks, watch)
    }
}

fn page(number: u32, seed: u8) -> Page {
    let mut page = [seed; 4096];
    page[..4].copy_from_slice(&number.to_le_bytes());
    page
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    for _ in 0..3000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}");
}

#[test]
fn memory_is_sent_while_written_again_if_changed() {
    const PAGES: u32 = 5000;
    let (stand, home) = (Stand::new(), tempfile::tempdir().unwrap());
    let folder = home.path();
    let part = part_bytes(0);
    let near = stand.near.folder();
    for name in [MACHINE, STATE, "disk-root"] {
        fs::copy(near.join(name), folder.join(name)).unwrap();
    }
    let text = fs::read_to_string(near.join(MANIFEST)).unwrap();
    let mut manifest = Manifest::parse(&text, &near).unwrap();
    let ((orders, heard), seen) = (mpsc::channel(), [0, 0].map(AtomicU64::new));
    let [arrived, of] = &seen;
    std::thread::scope(|scope| {
        let stand = &stand;
        let sending = scope.spawn(move || {
            let mut watch = |bytes: u64, all: u64| -> Result<(), SaveError> {
                arrived.store(bytes, Relaxed);
                of.store(all, Relaxed);
                Ok(())
            };
            stand.upload(folder, false, &mut watch).run(&heard)
        });
        let outgoing = Arc::new(Outgoing::of_pages(u64::from(PAGES)));
        orders.send(Order::Ram(outgoing.clone())).unwrap();
        let writer = PageWriter::create_changeable(&folder.join(RAM), u64::from(PAGES)).unwrap();
        let mut writer = writer.going_out(Some(outgoing));
        for number in 0..PAGES {
            writer.put(number, &page(number, 1)).unwrap();
        }
        wait_until("two parts are there", || arrived.load(Relaxed) == 2 * part);
        // Pages of a part that was sent, and a page of one that was not.
        for number in [7, 8, PAGES - 1] {
            writer.put(number, &page(number, 2)).unwrap();
        }
        orders.send(Order::Disk(manifest.disks[0].clone())).unwrap();
        wait_until("the disk is there and gone from here", || !folder.join("disk-root").exists());
        assert!(stand.server.file("one/disk-root").exists());
        let Sealed { bytes, pages, seal } = writer.finish().unwrap();
        (manifest.ram, manifest.ram_bytes) = (RamPart { bytes, pages, seal }, u64::from(PAGES) * 4096);
        orders.send(Order::Finish(Box::new(manifest))).unwrap();
        sending.join().unwrap().unwrap();
        let others: u64 = ["machine.toml", "state", "disk-root", "disk-root.index", "manifest"]
            .map(|name| fs::metadata(stand.server.file(&format!("one/{name}"))).unwrap().len())
            .iter()
            .sum();
        // The first part was sent twice, and the last one only when it was complete.
        assert_eq!((arrived.load(Relaxed), of.load(Relaxed)), (bytes + part + others, bytes + part + others));
    });
    assert!(fs::read(folder.join(RAM)).unwrap() == fs::read(stand.server.file("one/ram")).unwrap());
    let snapshot = stand.open().unwrap();
    let mut reading = snapshot.ram.reading();
    for number in 0..PAGES {
        let seed = if [7, 8, PAGES - 1].contains(&number) { 2 } else { 1 };
        assert!(snapshot.ram.page(number, &mut reading).unwrap() == Some(&page(number, seed)), "page {number}");
    }
}

#[test]
fn nothing_is_begun_while_the_guest_stands_still() {
    let stand = Stand::new();
    let folder = stand.near.folder();
    let (orders, heard) = mpsc::channel();
    let (watched, arrived) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (stand, watched, arrived, folder) = (&stand, &watched, &arrived, &folder);
        let sending = scope.spawn(move || {
            let mut watch = |bytes: u64, _: u64| -> Result<(), SaveError> {
                watched.fetch_add(1, Relaxed);
                arrived.store(bytes, Relaxed);
                Ok(())
            };
            stand.upload(folder, true, &mut watch).run(&heard)
        });
        orders.send(Order::Hold).unwrap();
        let mut rest = orders_of(folder).into_iter();
        orders.send(rest.next().unwrap()).unwrap();
        let before = watched.load(Relaxed);
        wait_until("it looks on", || watched.load(Relaxed) > before + 5);
        assert_eq!((arrived.load(Relaxed), stand.server.files().len()), (0, 0));
        orders.send(Order::GoOn).unwrap();
        wait_until("its memory is there", || arrived.load(Relaxed) > 0);
        assert!(folder.join("disk-root").exists());
        rest.for_each(|order| orders.send(order).unwrap());
        sending.join().unwrap().unwrap();
    });
    assert_eq!(stand.open().unwrap().manifest.disks[0].stored.as_ref().unwrap().bytes, 1024);
    assert!(!folder.join("disk-root").exists(), "nobody reads it any more");
}

#[test]
fn upload_stopped_anywhere_leaves_nothing() {
    let stand = Stand::new();
    let folder = stand.near.folder();
    let whole: Vec<_> = ["disk-root", RAM].map(|name| (name, fs::read(folder.join(name)).unwrap())).into();
    let mut stopped_at = 0;
    loop {
        whole.iter().for_each(|(name, bytes)| fs::write(folder.join(name), bytes).unwrap());
        let mut asked = 0;
        let sent = send_folder(&folder, &stand.store, &mut |_, _| {
            asked += 1;
            if asked > stopped_at { Err(SaveError::CalledOff { why: "a test".into() }) } else { Ok(()) }
        });
        match sent {
            Ok(()) => break,
            Err(error) => assert!(matches!(error, SaveError::CalledOff { .. }), "{error}"),
        }
        stand.server.await_empty();
        stopped_at += 1;
    }
    assert!(stopped_at > 10, "it was stopped {stopped_at} times");
    stand.open().unwrap();
    // The saving thread is gone.
    let (orders, heard) = mpsc::channel();
    drop(orders);
    let abandoned = stand.upload(&folder, true, &mut |_, _| Ok(())).run(&heard);
    assert!(matches!(abandoned, Err(SaveError::Abandoned)));
    stand.open().unwrap();
}

#[test]
fn existing_snapshot_is_not_replaced() {
    let stand = Stand::new();
    let (folder, file) = (stand.near.folder(), stand.server.file("one/manifest"));
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "another").unwrap();
    let refused = send_folder(&folder, &stand.store, &mut |_, _| Ok(())).unwrap_err();
    assert!(refused.to_string().contains("exists already"), "{refused}");
    assert_eq!(fs::read(&file).unwrap(), b"another");
    wait_until("its parts are gone", || stand.server.files().len() == 1);
}

#[test]
fn broken_connections_only_slow_the_upload() {
    let stand = Stand::new();
    let folder = stand.near.folder();
    let asked = AtomicU64::new(0);
    // The store is back before anybody gives up.
    let turns = [Wire::Failing, Wire::Dead, Wire::LosesCompletions];
    send_folder(&folder, &stand.store, &mut |_, _| {
        let (turn, ask) = (asked.load(Relaxed) / 4, asked.fetch_add(1, Relaxed) % 4);
        // Each setting breaks the present connections.
        if ask == 0 {
            turns.get(turn as usize).into_iter().for_each(|wire| stand.server.set_wire(*wire));
        }
        Ok(())
    })
    .unwrap();
    stand.open().unwrap();
}

#[test]
fn folder_copied_to_a_store_is_refused() {
    let stand = Stand::new();
    let folder = stand.near.folder();
    for file in fs::read_dir(&folder).unwrap().flatten() {
        let (name, bytes) = (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap());
        stand.store.put(&name, bytes, &mut |_| true).unwrap();
    }
    let refused = stand.open().unwrap_err().to_string();
    let expect = "one/disk-root: is a file of a snapshot folder that was copied here; copy the whole folder to a host and \
                  restore it from there, or `hearth save` to the store";
    assert!(refused.ends_with(expect), "{refused}");
}

#[test]
fn compressed_memory_is_sent_once_written() {
    let home = tempfile::tempdir().unwrap();
    let outgoing = Arc::new(Outgoing::of_pages(64));
    let writer = PageWriter::create(&home.path().join(RAM), 64, Compression::Zstd).unwrap();
    let mut writer = writer.going_out(Some(outgoing.clone()));
    (0..64).for_each(|number| writer.add(number, &page(number, 3)).unwrap());
    assert_eq!(outgoing.take_due(), None);
    let sealed = writer.finish().unwrap();
    let due = outgoing.take_due().unwrap();
    assert_eq!((due.number, due.bytes), (0, 0..sealed.bytes));
}

#[test]
fn object_of_another_moment_is_refused_by_name() {
    let stand = Stand::of(Near::of_moment(1, &[25, 12]));
    let other = Near::of_moment(2, &[25, 12]);
    let two = Stand::store(&stand.server, &other, "two");
    send_folder(&stand.near.folder(), &stand.store, &mut |_, _| Ok(())).unwrap();
    send_folder(&other.folder(), &two, &mut |_, _| Ok(())).unwrap();
    let manifest = stand.server.file("one/manifest");
    let objects = fs::read_dir(manifest.parent().unwrap()).unwrap().flatten();
    let names: Vec<_> = objects.map(|object| object.file_name().into_string().unwrap()).collect();
    assert!(names.len() >= 7, "{names:?}");
    // Opens the snapshot and fetches its disks whole.
    let bring = || -> Result<Snapshot, SnapshotError> {
        // The server reports an object that was exchanged behind its back as unchanged.
        let _ = fs::remove_dir_all(stand.near.folder().with_file_name("cache"));
        let (snapshot, home) = (stand.open()?, tempfile::tempdir().unwrap());
        for disk in &snapshot.manifest.disks {
            snapshot.expect_disk(disk, home.path(), true, &mut |_, _| {})?;
        }
        Ok(snapshot)
    };
    for name in &names {
        let path = stand.server.file(&format!("one/{name}"));
        let ours = fs::read(&path).unwrap();
        fs::copy(stand.server.file(&format!("two/{name}")), &path).unwrap();
        let refusal = match bring() {
            Err(refusal) => refusal.to_string(),
            Ok(snapshot) => {
                assert_eq!(name, WORKING_SET);
                snapshot.working_set.unwrap_err().to_string()
            }
        };
        // With another manifest, the first object that is read is the wrong one.
        let named = if name == MANIFEST { MACHINE } else { name };
        assert!(refusal.contains(named), "{name}: {refusal}");
        fs::write(&path, &ours).unwrap();
        assert!(bring().unwrap().working_set.unwrap().is_some(), "{name} is back");
    }
}

#[test]
fn working_set_of_a_killed_save_is_removed() {
    let stand = Stand::new();
    let killed = Near::of_moment(2, &[25, 12]);
    // These objects had been sent when it was killed.
    send_folder(&killed.folder(), &stand.store, &mut |_, _| Ok(())).unwrap();
    stand.store.remove(MANIFEST).unwrap();
    assert!(stand.server.file("one/working-set").exists());
    send_folder(&stand.near.folder(), &stand.store, &mut |_, _| Ok(())).unwrap();
    assert!(!stand.server.file("one/working-set").exists());
    assert!(stand.open().unwrap().working_set.unwrap().is_none());
}
