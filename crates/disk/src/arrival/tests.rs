//! Readers get the right bytes or wait; a note is trusted only as far as it is certain.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc;
use std::thread;

use super::*;
use crate::engine::tests::{Noise, bytes_of, pool_of, slot_at};
use crate::engine::{Operation, Submission};
use crate::image::tape::{Played, Tape};
use crate::image::{Format, Image, ImageOptions, ImageReader, create_overlay_over_arriving};

const UNIT: usize = UNIT_BYTES as usize;
/// Of the disk, in units.
const COUNT: usize = 12;
const REST: usize = 4096;
/// Those that are not zeroes.
const UNITS: [u64; 9] = [0, 1, 2, 4, 5, 6, 7, 10, COUNT as u64];

struct Stand {
    folder: tempfile::TempDir,
    content: Vec<u8>,
}

fn checksum(bytes: &[u8]) -> Checksum {
    blake3::hash(bytes).as_bytes()[..CHECKSUM_BYTES].try_into().unwrap()
}

impl Stand {
    fn new() -> Self {
        let mut content = vec![0; COUNT * UNIT + REST];
        for unit in UNITS {
            for (at, byte) in content.iter_mut().enumerate().skip(unit as usize * UNIT).take(UNIT) {
                *byte = (at / 512 + unit as usize) as u8 | 1;
            }
        }
        let stand = Self { folder: tempfile::tempdir().unwrap(), content };
        let units: Vec<_> = UNITS.iter().map(|unit| (*unit, checksum(stand.unit(*unit)))).collect();
        Arrival::make(&stand.path(), stand.content.len() as u64, "s3://b/p/disk-root", &units).unwrap();
        stand
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("disk-root")
    }

    fn unit(&self, unit: u64) -> &[u8] {
        let start = unit as usize * UNIT;
        &self.content[start..(start + UNIT).min(self.content.len())]
    }

    fn open(&self) -> Arc<Arrival> {
        Arc::new(Arrival::open(&self.path()).unwrap().expect("it is not complete"))
    }

    fn land(&self, arrival: &Arrival, unit: u64) {
        assert!(arrival.land(Order { unit }, self.unit(unit)).unwrap());
    }

    fn land_all(&self, arrival: &Arrival) {
        arrival.set_miss_policy(MissPolicy::Wait);
        while let Some((order, _)) = arrival.next(|| Some(())) {
            assert!(arrival.land(order, self.unit(order.unit)).unwrap());
        }
    }
}

/// Nothing is brought besides.
fn wanted(arrival: &Arrival) -> Order {
    arrival.next(|| None::<()>).unwrap().0
}

#[test]
fn landed_units_are_known_after_reopening() {
    let stand = Stand::new();
    let arrival = stand.open();
    assert_eq!(arrival.source(), "s3://b/p/disk-root");
    assert_eq!(arrival.place_of(4), Some(3 * UNIT_BYTES..4 * UNIT_BYTES));
    assert_eq!(arrival.place_of(COUNT as u64), Some(8 * UNIT_BYTES..8 * UNIT_BYTES + REST as u64));
    assert_eq!(arrival.place_of(3), None);
    let bytes = 8 * UNIT_BYTES + REST as u64;
    assert_eq!(arrival.counts(), Counts { bytes, missing_bytes: bytes });
    for unit in [4, 12] {
        stand.land(&arrival, unit);
    }
    arrival.note_landed().unwrap();
    stand.land(&arrival, 5);
    drop(arrival);
    // The last one was not noted.
    let arrival = stand.open();
    assert_eq!(arrival.counts(), Counts { bytes, missing_bytes: 7 * UNIT_BYTES });
    stand.land_all(&arrival);
    assert!(arrival.is_complete() && Arrival::open(&stand.path()).unwrap().is_none());
    assert!(std::fs::read(stand.path()).unwrap() == stand.content);
    assert_eq!(std::fs::read_dir(stand.folder.path()).unwrap().count(), 1);
}

/// In every state that a power cut can leave of the file, with the note as it was last written.
#[test]
fn noted_units_survive_a_power_cut() {
    let (stand, cut) = (Stand::new(), Stand::new());
    let tape = Tape::default();
    let mut arrival = Arrival::open(&stand.path()).unwrap().expect("it is not complete");
    arrival.tape = Some(tape.clone());
    for units in [&[4, COUNT as u64][..], &[0, 5, 6]] {
        units.iter().for_each(|unit| stand.land(&arrival, *unit));
        arrival.note_landed().unwrap();
    }
    stand.land_all(&arrival);
    let (mut noise, mut noted) = (Noise(1), 0);
    let mut played = Played::new(&vec![0; cut.content.len()]);
    for (number, event) in tape.take().iter().enumerate() {
        played.play(number, event);
        match event {
            Event::Log { bytes, .. } => std::fs::write(note::path_of(&cut.path()), bytes).unwrap(),
            Event::LogEnds { .. } => std::fs::remove_file(note::path_of(&cut.path())).unwrap(),
            _ => {}
        }
        for state in played.cut(&mut noise) {
            std::fs::write(cut.path(), &state).unwrap();
            let left = Arrival::open(&cut.path()).unwrap();
            for unit in UNITS {
                let start = unit * UNIT_BYTES;
                // Nothing fetches units here, so a unit that is missing is refused.
                if left.as_ref().is_none_or(|left| left.wait(start..start + 1).is_ok()) {
                    let place = &state[start as usize..][..cut.unit(unit).len()];
                    assert!(place == cut.unit(unit), "event {number}: unit {unit} is noted and not there");
                    noted += 1;
                }
            }
        }
    }
    assert!(noted >= UNITS.len(), "{noted} units were noted");
}

#[test]
fn torn_note_costs_only_another_fetch() {
    let stand = Stand::new();
    let note = note::path_of(&stand.path());
    let bare = std::fs::read(&note).unwrap();
    let arrival = stand.open();
    for unit in [0, 1, 2, 4] {
        stand.land(&arrival, unit);
    }
    arrival.note_landed().unwrap();
    drop(arrival);
    let noted = std::fs::read(&note).unwrap();
    let missing = |text: &[u8]| {
        std::fs::write(&note, text).unwrap();
        stand.open().counts().missing_bytes / UNIT_BYTES
    };
    assert_eq!(missing(&noted), 4);
    assert_eq!(missing(&noted[..noted.len() - 1]), 5, "cut off");
    let mut torn = noted.clone();
    torn[bare.len() + 3] ^= 1;
    torn[bare.len() + CHECKSUM_BYTES..][..CHECKSUM_BYTES].fill(0);
    assert_eq!(missing(&torn), 6, "torn");
    assert_eq!(missing(&[&noted[..], &[0xff; 200]].concat()), 4, "rubbish behind it");
    assert_eq!(missing(&bare), 8);
    // An altered note is never believed.
    for place in [0, 9, 17, 25, 40, 60, bare.len() - 1] {
        let mut altered = noted.clone();
        altered[place] ^= 1;
        std::fs::write(&note, altered).unwrap();
        assert!(Arrival::open(&stand.path()).unwrap_err().to_string().contains("is damaged"), "{place}");
    }
    std::fs::write(&note, &bare[..20]).unwrap();
    assert!(Arrival::open(&stand.path()).is_err());
}

#[test]
fn only_what_was_saved_lands() {
    let stand = Stand::new();
    let arrival = stand.open();
    let order = Order { unit: 1 };
    let mut altered = stand.unit(1).to_vec();
    altered[7] ^= 1;
    assert!(!arrival.land(order, &altered).unwrap());
    assert!(!arrival.land(order, &stand.unit(1)[1..]).unwrap());
    assert!(!arrival.land(order, stand.unit(2)).unwrap());
    assert!(!arrival.land(Order { unit: 3 }, stand.unit(3)).unwrap(), "it is a hole");
    assert_eq!(arrival.counts().missing_bytes, arrival.counts().bytes);
    stand.land(&arrival, 1);
}

#[test]
fn wanted_units_come_first() {
    let stand = Stand::new();
    let arrival = stand.open();
    for unit in [10, 4, 10] {
        assert!(arrival.wait(unit * UNIT_BYTES..unit * UNIT_BYTES + 1).is_err(), "it never comes");
    }
    let (leave, asked) = (AtomicBool::new(true), AtomicUsize::new(0));
    let next = || {
        let leave = || {
            asked.fetch_add(1, Relaxed);
            leave.load(Relaxed).then_some("leave")
        };
        arrival.next(leave).map(|(order, leave)| (order.unit, leave)).unwrap()
    };
    assert_eq!((next(), next()), ((10, None), (4, None)));
    arrival.set_miss_policy(MissPolicy::Wait);
    assert_eq!(next(), (5, Some("leave")));
    leave.store(false, Relaxed);
    // Nobody has to be asked for what somebody waits for.
    let before = asked.load(Relaxed);
    arrival.announce(0..1);
    assert_eq!((next(), asked.load(Relaxed)), ((0, None), before));
    thread::scope(|scope| {
        let rest = scope.spawn(|| [next(), next()]);
        while asked.load(Relaxed) < before + 2 {
            thread::yield_now();
        }
        leave.store(true, Relaxed);
        assert_eq!(rest.join().unwrap(), [1, 2].map(|unit| (unit, Some("leave"))), "what lies behind it");
    });
    let rest: Vec<u64> = (0..3).map(|_| next().0).collect();
    assert_eq!(rest, [6, 7, 12], "up to the end");
    // Nothing is left to begin with: whoever asks waits until it is stopped.
    thread::scope(|scope| {
        let waits = scope.spawn(|| arrival.next(|| Some(())));
        arrival.stop();
        assert_eq!(waits.join().unwrap(), None);
    });
}

#[test]
fn reader_waits_only_for_missing_bytes() {
    let stand = Stand::new();
    let arrival = stand.open();
    arrival.wait(3 * UNIT_BYTES..4 * UNIT_BYTES).unwrap();
    arrival.wait(7..7).unwrap();
    arrival.set_miss_policy(MissPolicy::Wait);
    let (tell, hear) = mpsc::channel();
    thread::scope(|scope| {
        let arrival = &arrival;
        scope.spawn(move || tell.send(arrival.wait(3 * UNIT_BYTES + 5..5 * UNIT_BYTES + 5)).unwrap());
        let orders = [wanted(arrival), wanted(arrival)];
        assert_eq!(orders.map(|order| order.unit), [4, 5]);
        // It cannot be brought, and then it can.
        assert!(arrival.failed(orders[1], "gone", true) && !arrival.failed(orders[0], "gone", true));
        assert_eq!(arrival.stuck(), ["gone", "gone"]);
        arrival.give_back(orders[1], Duration::ZERO);
        stand.land(arrival, 4);
        assert!(hear.recv_timeout(Duration::from_millis(20)).is_err(), "half of it is missing");
        let again = wanted(arrival);
        assert_eq!(again, orders[1]);
        stand.land(arrival, 5);
        assert!(hear.recv().unwrap().is_ok() && arrival.stuck().is_empty());
    });
}

#[test]
fn waiting_readers_get_an_error_when_refused() {
    let check = |end: &(dyn Fn(&Arrival) + Sync), expect: &str| {
        let stand = Stand::new();
        let arrival = stand.open();
        arrival.set_miss_policy(MissPolicy::Wait);
        let error = thread::scope(|scope| {
            let waits = scope.spawn(|| arrival.wait(0..1));
            // It is wanted: somebody waits.
            let order = wanted(&arrival);
            assert_eq!(order, Order { unit: 0 });
            end(&arrival);
            waits.join().unwrap().unwrap_err().to_string()
        });
        assert!(error.contains("disk-root: has not arrived completely") && error.contains(expect), "{error}");
    };
    check(&|arrival| arrival.set_miss_policy(MissPolicy::Refuse), "no process fetches it");
    check(&Arrival::stop, "cancelled");
    let hopeless = |arrival: &Arrival| {
        arrival.set_miss_policy(MissPolicy::Urge);
        arrival.failed(Order { unit: 0 }, "the store is gone", true);
    };
    check(&hopeless, "the store is gone");
}

#[test]
fn overlays_wait_for_arriving_bytes() {
    let stand = Stand::new();
    let top = stand.folder.path().join("top.qcow2");
    create_overlay_over_arriving(&top, &stand.path(), "raw").unwrap();
    let place = 4 * UNIT_BYTES - 512;
    let read = |reader: &ImageReader| {
        let mut bytes = [0; 1024];
        reader.read_at(&mut bytes, place).map(|()| bytes.to_vec())
    };
    let expect = &stand.content[place as usize..][..1024];
    // Readers that do not know of the backfill.
    for (path, format) in [(&top, Format::Qcow2), (&stand.path(), Format::Raw)] {
        let refused = read(&ImageReader::open(path, format).unwrap()).unwrap_err().to_string();
        assert!(refused.contains("no process fetches it"), "{refused}");
    }
    let options = ImageOptions {
        path: stand.path(),
        format: Format::Raw,
        read_only: false,
        direct: false,
        lock_patience: Duration::ZERO,
        owner: None,
    };
    let refused = Image::open(&options).unwrap().engine(pool_of(1), 8).err().unwrap().to_string();
    assert!(refused.contains("still being fetched"), "{refused}");
    // By another name of the same file.
    let link = stand.folder.path().join("link");
    std::fs::hard_link(stand.path(), &link).unwrap();
    let arrival = stand.open();
    arrival.set_miss_policy(MissPolicy::Wait);
    let arrivals = Arrivals(vec![arrival.clone()]);
    let readers = [(&top, Format::Qcow2), (&link, Format::Raw)]
        .map(|(path, format)| ImageReader::open_over(path, format, &arrivals).unwrap());
    thread::scope(|scope| {
        let waiting = readers.each_ref().map(|reader| scope.spawn(move || read(reader)));
        let order = wanted(&arrival);
        assert_eq!(order.unit, 4);
        assert!(arrival.land(order, stand.unit(4)).unwrap());
        for waiting in waiting {
            assert!(waiting.join().unwrap().unwrap() == expect);
        }
    });
    stand.land_all(&arrival);
    let complete = ImageReader::open(&top, Format::Qcow2).unwrap();
    let mut whole = vec![0; stand.content.len()];
    complete.read_at(&mut whole, 0).unwrap();
    assert!(whole == stand.content);
}

#[test]
fn queued_reads_are_requested_at_once() {
    let stand = Stand::new();
    let top = stand.folder.path().join("top.qcow2");
    create_overlay_over_arriving(&top, &stand.path(), "raw").unwrap();
    let arrival = stand.open();
    arrival.set_miss_policy(MissPolicy::Wait);
    let options = ImageOptions {
        path: top,
        format: Format::Qcow2,
        read_only: false,
        direct: false,
        lock_patience: Duration::ZERO,
        owner: None,
    };
    let image = Image::open_over(&options, &Arrivals(vec![arrival.clone()])).unwrap();
    let pool = pool_of(3);
    let mut engine = image.engine(pool.clone(), 8).unwrap();
    let places = [10, 2, 6].map(|unit| unit * UNIT_BYTES + 4096);
    for (number, offset) in (0..).zip(places) {
        let operation = Operation::Read(slot_at(number));
        engine.push(Submission { token: number.into(), operation, offset, bytes: 4096 });
    }
    engine.submit().unwrap();
    let orders = [(); 3].map(|()| wanted(&arrival));
    assert_eq!(orders.map(|order| order.unit), [10, 2, 6]);
    for order in orders {
        assert!(arrival.land(order, stand.unit(order.unit)).unwrap());
    }
    let mut ended = Vec::new();
    while ended.len() < places.len() {
        engine.wait(Duration::from_secs(10)).unwrap();
        engine.reap(&mut ended);
    }
    assert!(ended.iter().all(|completion| completion.result.is_ok()), "{ended:?}");
    for (number, place) in (0..).zip(places) {
        assert!(bytes_of(&pool, slot_at(number), 4096) == &stand.content[place as usize..][..4096]);
    }
}
