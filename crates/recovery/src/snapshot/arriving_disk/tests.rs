//! Tests that a disk arrives from a store as it was saved, and never otherwise, whatever happens to the store
//! meanwhile.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;

use hearth_disk::arrival::UNIT_BYTES;
use hearth_store::{Address, Cache, Settings, Store};
use loopback_s3::{BUCKET, S3Server, Wire};

use super::super::manifest::{Part, StoredDisk};
use super::super::stored_disk::tests::sent;
use super::super::stored_disk::{self, Content, index_file};
use super::*;

const MIB: usize = 1 << 20;

struct Stand {
    server: S3Server,
    folder: tempfile::TempDir,
    content: Vec<u8>,
    disk: DiskPart,
}

impl Stand {
    /// A disk of 8.5 MiB in a store, of which 2 MiB are zeroes.
    fn new() -> Self {
        let (server, folder) = (S3Server::start(), tempfile::tempdir().unwrap());
        let lines = server.environment().into_iter().map(|(key, value)| format!("{key}={value}\n"));
        fs::write(folder.path().join("s3.env"), lines.collect::<String>()).unwrap();
        let byte = |at: usize| if (3 * MIB..5 * MIB).contains(&at) { 0 } else { (at / 4096 * 7 + at / MIB) as u8 | 1 };
        let content: Vec<u8> = (0..8 * MIB + MIB / 2).map(byte).collect();
        let mut disk = DiskPart {
            name: "root".into(),
            format: "raw".into(),
            bytes: content.len() as u64,
            modified: None,
            stored: None,
        };
        let saved = folder.path().join("saved");
        fs::write(&saved, &content).unwrap();
        let source = Content::open(&saved, &disk).unwrap();
        let (_, blocks, index) = sent(&source);
        let part = Part { bytes: index.len() as u64, blake3: blake3::hash(&index).to_hex().to_string() };
        disk.stored = Some(StoredDisk { bytes: blocks.len() as u64, index: part });
        let stand = Self { server, folder, content, disk };
        let store = stand.far("saving").store;
        store.put("disk-root", blocks, &mut |_| true).unwrap();
        store.put(&index_file("root"), index, &mut |_| true).unwrap();
        stand
    }

    /// The store, with a cache of its own.
    fn far(&self, cache: &str) -> Far {
        let settings = Settings::from_file(&self.folder.path().join("s3.env")).unwrap();
        let address = Address::parse(&format!("s3://{BUCKET}/one")).unwrap();
        let cache = Cache::open(&self.folder.path().join(cache), 0).unwrap();
        Far {
            store: Arc::new(Store::open(address, &settings).unwrap()),
            cache,
            scheduler: Arc::default(),
            scratch: self.folder.path().into(),
        }
    }

    fn target(&self) -> PathBuf {
        self.folder.path().join("disk-root")
    }

    /// A disk of which nothing has arrived.
    fn expected(&self) -> ArrivingDisk {
        stored_disk::expect(&self.far("cache"), &self.disk, &self.target()).unwrap();
        self.reopened()
    }

    fn reopened(&self) -> ArrivingDisk {
        let arrival = Arrival::open(&self.target()).unwrap().expect("it is not complete");
        assert_eq!(ArrivingDisk::folder_of(&arrival), format!("s3://{BUCKET}/one"));
        ArrivingDisk::new(Arc::new(arrival), self.far("cache"))
    }

    fn check_complete(&self) {
        assert!(Arrival::open(&self.target()).unwrap().is_none());
        assert!(fs::read(self.target()).unwrap() == self.content);
    }

    /// Alters the object within this unit.
    fn flip(&self, arriving: &ArrivingDisk, unit: u64) {
        let place = arriving.arrival.place_of(unit).unwrap().start + 100;
        let file = fs::File::options().read(true).write(true).open(self.server.file("one/disk-root")).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, place).unwrap();
        file.write_all_at(&[byte[0] ^ 1], place).unwrap();
    }
}

#[test]
fn whole_disk_arrives_and_damage_is_refused() {
    let stand = Stand::new();
    let arriving = stand.expected();
    stand.flip(&arriving, 6);
    let refused = arriving.bring_all(&mut |_, _| {}).unwrap_err();
    let expect = "one/disk-root: is damaged: bytes 6291456 to 7340031 of the disk are not what was saved";
    assert!(refused.to_string().ends_with(expect) && !refused.is_away(), "{refused}");
    stand.flip(&arriving, 6);
    let mut heard = Vec::new();
    stand.reopened().bring_all(&mut |there, all| heard.push((there, all))).unwrap();
    let all = 6 * UNIT_BYTES + UNIT_BYTES / 2;
    assert_eq!(heard.last(), Some(&(all, all)), "{heard:?}");
    assert!(heard.is_sorted());
    stand.check_complete();
}

#[test]
fn readers_wait_until_the_store_is_back() {
    let stand = Stand::new();
    let arriving = stand.expected();
    stand.server.set_wire(Wire::Failing);
    arriving.arrival.set_miss_policy(MissPolicy::Wait);
    let (tell, told) = mpsc::channel();
    let bring = |arriving: &ArrivingDisk| {
        let tell = tell.clone();
        arriving.bring(move |why| tell.send(why).unwrap())
    };
    thread::scope(|scope| {
        let reader = scope.spawn(|| arriving.arrival.wait(7 * UNIT_BYTES..7 * UNIT_BYTES + 1));
        let bringing = [(); 2].map(|()| scope.spawn(|| bring(&arriving)));
        let why = told.recv().unwrap();
        assert!(why.contains("one/disk-root") && why.contains("500"), "{why}");
        assert!(!reader.is_finished() && arriving.arrival.stuck().contains(&why));
        stand.server.set_wire(Wire::Cut(700 << 10));
        thread::sleep(Duration::from_millis(300));
        stand.server.set_wire(Wire::Whole);
        reader.join().unwrap().unwrap();
        assert!(bringing.into_iter().all(|bringing| bringing.join().unwrap()));
    });
    assert!(arriving.arrival.stuck().is_empty());
    stand.check_complete();
}

#[test]
fn read_blocks_come_first_the_rest_when_idle() {
    let stand = Stand::new();
    let arriving = stand.expected();
    let memory = std::iter::from_fn(|| arriving.far.scheduler.try_take(Urgency::Memory));
    let memory: Vec<_> = memory.collect();
    arriving.arrival.set_miss_policy(MissPolicy::Wait);
    let before = stand.server.asked().len();
    let asked = thread::scope(|scope| {
        let bringing = [(); 2].map(|()| scope.spawn(|| arriving.bring(|_| {})));
        for unit in [7, 2] {
            arriving.arrival.wait(unit * UNIT_BYTES..unit * UNIT_BYTES + 1).unwrap();
        }
        let asked = stand.server.asked();
        drop(memory);
        assert!(bringing.into_iter().all(|bringing| bringing.join().unwrap()));
        asked
    });
    let place = |unit| ("disk-root".to_owned(), arriving.arrival.place_of(unit).unwrap().start);
    assert_eq!(asked[before..], [7, 2].map(place));
    stand.check_complete();
}

#[test]
fn replaced_object_is_refused_and_never_mixed() {
    let stand = Stand::new();
    let arriving = stand.expected();
    // The first unit arrives from the saved object.
    arriving.arrival.wait(0..1).unwrap_err();
    arriving.fetch(arriving.arrival.take_wanted().unwrap(), None).unwrap();
    arriving.arrival.note_landed().unwrap();
    let object = stand.server.file("one/disk-root");
    let saved = fs::read(&object).unwrap();
    let altered: Vec<u8> = saved.iter().map(|byte| byte ^ 1).collect();
    let check = |replaced: &[u8], expect: &str| {
        fs::write(&object, replaced).unwrap();
        let arriving = stand.reopened();
        arriving.arrival.set_miss_policy(MissPolicy::Urge);
        thread::scope(|scope| {
            let reader = scope.spawn(|| arriving.arrival.wait(5 * UNIT_BYTES..5 * UNIT_BYTES + 1));
            scope.spawn(|| arriving.bring(|_| {}));
            let refused = reader.join().unwrap().unwrap_err().to_string();
            assert!(refused.contains(expect), "{refused}");
            arriving.arrival.stop();
        });
        assert_eq!(arriving.arrival.counts().missing_bytes, 5 * UNIT_BYTES + UNIT_BYTES / 2);
    };
    check(&altered, "bytes 5242880 to 6291455 of the disk are not what was saved");
    check(&saved[1..], "it has 6815743 bytes, and had 6815744 when it was saved");
    fs::write(&object, &saved).unwrap();
    stand.reopened().bring_all(&mut |_, _| {}).unwrap();
    stand.check_complete();
}

#[test]
fn image_tables_come_first_and_nothing_else() {
    let stand = Stand::new();
    let (base, top) = (stand.folder.path().join("base"), stand.folder.path().join("top"));
    fs::write(&base, &stand.content).unwrap();
    hearth_disk::image::create_overlay(&top, &base, "raw").unwrap();
    // An image that a disk could be, with much data behind its tables.
    let mut image = fs::read(&top).unwrap();
    image[8..20].fill(0);
    image.resize(7 * MIB, 9);
    let units: Vec<[u8; 16]> =
        image.chunks(MIB).map(|unit| blake3::hash(unit).as_bytes()[..16].try_into().unwrap()).collect();
    let units: Vec<_> = (0..).zip(units).collect();
    Arrival::make(&stand.target(), image.len() as u64, &format!("s3://{BUCKET}/one/image"), &units).unwrap();
    stand.far("saving").store.upload("image", image.len() as u64, &mut &image[..], &mut |_| true).unwrap();
    let arriving = stand.reopened();
    arriving.bring_tables(&DiskPart { format: "qcow2".into(), ..stand.disk.clone() }).unwrap();
    assert_eq!(arriving.arrival.counts().missing_bytes, 6 * UNIT_BYTES);
    assert_eq!(stand.reopened().arrival.counts().missing_bytes, 6 * UNIT_BYTES, "and that is noted");
}
