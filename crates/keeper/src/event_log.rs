//! The machine's events: the latest in memory for followers, and all of them in a bounded file that outlives the
//! keeper.
//!
//! Readers hold a cursor, not a queue: one ring serves all of them. A slow reader costs nothing and only misses records
//! itself; it gets their number.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use hearth_api::{EventKind, EventRecord, MachineState};
use plain_text::beginning;

use crate::cli::describe;

/// Number of records in memory, enough for some hundred recoveries.
const RING_RECORDS: usize = 4096;
/// Size at which a new file starts. At most twice this is kept.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// An error with all its causes is far shorter. Much longer ones would push others out of the file, and out of its tail.
const ERROR_CHARS_MAX: usize = 4000;
/// Part of a file that is read to learn how a keeper ended: hundreds of records. A whole file takes 50 ms to parse.
const TAIL_BYTES: u64 = 64 << 10;
pub const FILE_NAME: &str = "events.jsonl";
const OLD_FILE_NAME: &str = "events.old.jsonl";

/// The log of one machine. Cheap to clone: clones are the same log.
#[derive(Clone)]
pub struct EventLog {
    inner: Arc<Inner>,
}

struct Inner {
    machine: String,
    incarnation: AtomicU32,
    ring: Mutex<Ring>,
    news: Condvar,
}

struct Ring {
    records: VecDeque<Arc<EventRecord>>,
    records_max: usize,
    /// Folder with the records of earlier keepers, until a reader asks for them: full files take 50 ms to parse.
    earlier: Option<PathBuf>,
    /// Sequence number of the last record; 0 before the first.
    last: u64,
    closed: bool,
    journal: Option<Journal>,
    /// The machine's state as last recorded.
    state: MachineState,
}

/// Result of a read.
#[derive(Clone, Debug, PartialEq)]
pub enum Received {
    Record(Arc<EventRecord>),
    /// No event arrived in time.
    Quiet,
    /// The log was closed, and every record was read.
    Closed,
}

impl EventLog {
    /// Continues an earlier keeper's file, so that a reader's `since` stays valid over a restart.
    pub fn open(machine: &str, runtime_folder: &Path) -> io::Result<Self> {
        let last_of = |name| Ok::<_, io::Error>(text_of(runtime_folder, name)?.rsplit(is_newline).find_map(parse));
        let last = last_of(FILE_NAME)?.map_or_else(|| last_of(OLD_FILE_NAME), |last| Ok(Some(last)))?;
        let (last, incarnation) = last.map_or((0, 0), |last| (last.sequence, last.incarnation));
        let journal = Journal::open(runtime_folder, FILE_BYTES_MAX, last)?;
        let log = Self::with(machine, RING_RECORDS, Some(journal));
        log.set_incarnation(incarnation);
        let mut ring = log.ring();
        (ring.last, ring.earlier) = (last, Some(runtime_folder.to_owned()));
        drop(ring);
        Ok(log)
    }

    /// A log without a file.
    pub fn in_memory(machine: &str) -> Self {
        Self::with(machine, RING_RECORDS, None)
    }

    fn with(machine: &str, records_max: usize, journal: Option<Journal>) -> Self {
        let records = VecDeque::new();
        let state = MachineState::Starting;
        let ring = Ring { records, records_max, earlier: None, last: 0, closed: false, journal, state };
        let inner = Inner {
            machine: machine.to_owned(),
            incarnation: AtomicU32::new(0),
            ring: Mutex::new(ring),
            news: Condvar::new(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Later records belong to this incarnation.
    pub(crate) fn set_incarnation(&self, incarnation: u32) {
        self.inner.incarnation.store(incarnation, Relaxed);
    }

    /// Adds a record and wakes the readers. Never fails: if the disk is full, records are written once there is space,
    /// as far as they are still in memory.
    pub fn record(&self, event: EventKind) -> u64 {
        let event = match event {
            EventKind::Error { message } => {
                EventKind::Error { message: beginning(&message, ERROR_CHARS_MAX).to_owned() }
            }
            event => event,
        };
        if is_step(&event) {
            tracing::info!("{}: {}", self.inner.machine, describe(&event));
        }
        let mut ring = self.ring();
        ring.last += 1;
        let record = Arc::new(EventRecord {
            sequence: ring.last,
            time: hearth_api::rfc3339(SystemTime::now()),
            machine: self.inner.machine.clone(),
            incarnation: self.inner.incarnation.load(Relaxed),
            event,
        });
        if ring.records.len() == ring.records_max {
            ring.records.pop_front();
        }
        ring.records.push_back(record);
        ring.write_file();
        self.inner.news.notify_all();
        ring.last
    }

    /// Records the machine's state if it differs from the one recorded last. A keeper begins with Starting.
    pub(crate) fn record_state(&self, to: MachineState) {
        let from = std::mem::replace(&mut self.ring().state, to);
        if from != to {
            self.record(EventKind::StateChanged { from, to });
        }
    }

    /// Sequence number of the last record; 0 before the first.
    pub fn last_sequence(&self) -> u64 {
        self.ring().last
    }

    /// The records after `since` that are still in memory, oldest first; starts with a gap record if some are missing.
    pub fn since(&self, since: u64) -> Vec<Arc<EventRecord>> {
        let mut subscription = self.subscribe(since);
        let mut records = Vec::new();
        while let Received::Record(record) = subscription.next(Duration::ZERO) {
            records.push(record);
        }
        records
    }

    /// A reader of everything after `since`.
    pub(crate) fn subscribe(&self, since: u64) -> Subscription {
        // A sequence number from the future belongs to a removed file: start with the oldest record.
        let since = if since > self.last_sequence() { 0 } else { since };
        Subscription { log: self.clone(), read: since }
    }

    /// Ends all readers once they have read everything.
    pub fn close(&self) {
        self.ring().closed = true;
        self.inner.news.notify_all();
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.inner.ring.lock().expect("holders of this lock do not panic")
    }
}

/// Whether the log has a line for it: the steps of a machine's life, for whoever watches `hearth run`.
fn is_step(event: &EventKind) -> bool {
    matches!(
        event,
        EventKind::KeeperTookOver { .. }
            | EventKind::QemuStarted { .. }
            | EventKind::IncarnationStarted { .. }
            | EventKind::GuestPanicked
            | EventKind::WatchdogExpired { .. }
            | EventKind::QemuExited { .. }
            | EventKind::IncarnationEnded { .. }
            | EventKind::CrashLoop { .. }
            | EventKind::StartWaits { .. }
            | EventKind::DumpStarted { .. }
            | EventKind::DumpComplete { .. }
            | EventKind::DumpIncomplete { .. }
            | EventKind::Rejuvenated { .. }
            | EventKind::RejuvenationFailed { .. }
            | EventKind::Parked { .. }
            | EventKind::Unparked { .. }
            | EventKind::Saved { .. }
            | EventKind::PowerCut { .. }
    )
}

/// A reader's position in the log.
pub struct Subscription {
    log: EventLog,
    /// Sequence number of the last record that this reader got.
    read: u64,
}

impl Subscription {
    /// The next record; waits at most this long.
    pub fn next(&mut self, patience: Duration) -> Received {
        let read = self.read;
        let mut ring = self.log.ring();
        ring.read_earlier(read);
        let (ring, _) = self
            .log
            .inner
            .news
            .wait_timeout_while(ring, patience, |ring| ring.last <= read && !ring.closed)
            .expect("holders of this lock do not panic");
        let Some(record) = ring.after(read) else {
            return if ring.closed { Received::Closed } else { Received::Quiet };
        };
        let missed = record.sequence - read - 1;
        if missed > 0 {
            self.read = record.sequence - 1;
            return Received::Record(Arc::new(gap(&record, missed)));
        }
        self.read = record.sequence;
        Received::Record(record)
    }
}

/// The record that replaces missing records before `next`.
fn gap(next: &EventRecord, missed: u64) -> EventRecord {
    EventRecord { sequence: next.sequence - 1, event: EventKind::Gap { missed }, ..next.clone() }
}

impl Ring {
    /// Reads the records of earlier keepers, if a reader of everything after `since` needs them.
    fn read_earlier(&mut self, since: u64) {
        let first = self.records.front().map_or(self.last + 1, |record| record.sequence);
        if since + 1 >= first {
            return;
        }
        let Some(folder) = self.earlier.take() else { return };
        let text = text_of_both(&folder).unwrap_or_else(|error| {
            tracing::warn!(folder = %folder.display(), %error, "earlier events cannot be read");
            Vec::new()
        });
        // The ring's own records are in the files too.
        let mut lines: Vec<&[u8]> =
            text.rsplit(is_newline).filter(|line| !line.is_empty()).take(self.records_max).collect();
        lines.reverse();
        let records = records_in(lines.into_iter());
        let mut records: VecDeque<_> = records.into_iter().filter(|record| record.sequence < first).collect();
        if records.back().is_some_and(|last| last.sequence + 1 == first) {
            records.drain(..(records.len() + self.records.len()).saturating_sub(self.records_max));
            records.into_iter().rev().for_each(|record| self.records.push_front(Arc::new(record)));
        }
    }

    /// The first record with a greater sequence number. The ring has no gaps, so this is an index.
    fn after(&self, sequence: u64) -> Option<Arc<EventRecord>> {
        let first = self.records.front()?.sequence;
        let index = (sequence + 1).saturating_sub(first);
        self.records.get(usize::try_from(index).ok()?).cloned()
    }

    /// Writes what the file lacks: the newest record, and earlier ones for which there was no space.
    fn write_file(&mut self) {
        let Some(mut journal) = self.journal.take() else { return };
        let written = self.write_missing(&mut journal);
        match (written, journal.fails) {
            (Err(error), false) => {
                tracing::warn!(path = %journal.path.display(), %error, "cannot write events; keeping them until the file is writable");
            }
            (Ok(()), true) => tracing::info!(path = %journal.path.display(), "writing events to the file again"),
            _ => {}
        }
        journal.fails = self.last > journal.written;
        self.journal = Some(journal);
    }

    fn write_missing(&self, journal: &mut Journal) -> io::Result<()> {
        let first_kept = self.records.front().map_or(0, |record| record.sequence);
        let missed = first_kept.saturating_sub(journal.written + 1);
        if missed > 0
            && let Some(first) = self.records.front()
        {
            journal.append(&gap(first, missed))?;
        }
        while let Some(record) = self.after(journal.written) {
            journal.append(&record)?;
        }
        Ok(())
    }
}

/// The file: one JSON object per line, unbuffered, so that a killed keeper loses no record.
struct Journal {
    path: PathBuf,
    file: File,
    bytes: u64,
    bytes_max: u64,
    /// Sequence number of the last record in the file.
    written: u64,
    /// Whether the last write failed.
    fails: bool,
}

impl Journal {
    /// `written`: sequence number of the last record in the files.
    fn open(folder: &Path, bytes_max: u64, written: u64) -> io::Result<Self> {
        let path = folder.join(FILE_NAME);
        let mut file = OpenOptions::new().create(true).append(true).read(true).mode(0o600).open(&path)?;
        let bytes = file.metadata()?.len();
        // A killed keeper's last line may be torn, so the next record must start a new line.
        let mut bytes = bytes;
        if bytes > 0 && !ends_with_newline(&file, bytes)? {
            file.write_all(b"\n")?;
            bytes += 1;
        }
        Ok(Self { path, file, bytes, bytes_max, written, fails: false })
    }

    fn append(&mut self, record: &EventRecord) -> io::Result<()> {
        let mut line = serde_json::to_vec(record)?;
        line.push(b'\n');
        if self.bytes + line.len() as u64 > self.bytes_max {
            let folder = self.path.parent().unwrap_or(Path::new("."));
            fs::rename(&self.path, folder.join(OLD_FILE_NAME))?;
            *self = Self { fails: self.fails, ..Self::open(folder, self.bytes_max, self.written)? };
        }
        if let Err(error) = self.file.write_all(&line) {
            // Removes half a line.
            let _ = self.file.set_len(self.bytes);
            return Err(error);
        }
        self.bytes += line.len() as u64;
        self.written = record.sequence;
        Ok(())
    }
}

fn ends_with_newline(file: &File, bytes: u64) -> io::Result<bool> {
    let mut last = [0];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut last, bytes - 1)?;
    Ok(last == *b"\n")
}

/// All records in the files of a runtime folder, oldest first. Torn lines, and records before a gap, are left out, so
/// that sequence numbers have no gaps.
pub fn read_file(runtime_folder: &Path) -> io::Result<Vec<EventRecord>> {
    Ok(records_in(text_of_both(runtime_folder)?.split(is_newline)))
}

/// The error that ended the machine's last keeper, also while the next one starts. None: a guest has run since, or it ended otherwise, or
/// its log does not say.
pub fn last_failure(runtime_folder: &Path) -> Option<String> {
    let tail = |name| tail_of(runtime_folder, name).unwrap_or_default();
    let text = [tail(OLD_FILE_NAME), tail(FILE_NAME)].join(&b'\n');
    failure_in(&records_in(text.split(is_newline)))
}

fn failure_in(records: &[EventRecord]) -> Option<String> {
    // A keeper begins with Starting, and may fail like the last one.
    let mut events = records.iter().rev().map(|record| &record.event);
    let state = events.find_map(|event| match event {
        EventKind::StateChanged { to, .. } if *to != MachineState::Starting => Some(*to),
        _ => None,
    });
    let mut of_that_keeper = events.take_while(|event| !matches!(event, EventKind::Started { .. }));
    let error = |event: &EventKind| match event {
        EventKind::Error { message } => Some(message.clone()),
        _ => None,
    };
    if state == Some(MachineState::Failed) { of_that_keeper.find_map(error) } else { None }
}

/// The last `TAIL_BYTES` of a file. Its first line may be torn.
fn tail_of(runtime_folder: &Path, name: &str) -> io::Result<Vec<u8>> {
    let mut file = File::open(runtime_folder.join(name))?;
    let bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(bytes.saturating_sub(TAIL_BYTES)))?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut tail)?;
    Ok(tail)
}

/// Nothing if there is no such file.
fn text_of(runtime_folder: &Path, name: &str) -> io::Result<Vec<u8>> {
    match fs::read(runtime_folder.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    }
}

/// The old file first. Its last line may be torn.
fn text_of_both(runtime_folder: &Path) -> io::Result<Vec<u8>> {
    let [old, new] = [text_of(runtime_folder, OLD_FILE_NAME)?, text_of(runtime_folder, FILE_NAME)?];
    Ok([old, new].join(&b'\n'))
}

fn records_in<'a>(lines: impl Iterator<Item = &'a [u8]>) -> Vec<EventRecord> {
    let mut records: Vec<EventRecord> = Vec::new();
    for record in lines.filter_map(parse) {
        if records.last().is_some_and(|last| last.sequence + 1 != record.sequence) {
            records.clear();
        }
        records.push(record);
    }
    records
}

fn parse(line: &[u8]) -> Option<EventRecord> {
    serde_json::from_slice(line).ok()
}

fn is_newline(byte: &u8) -> bool {
    *byte == b'\n'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(log: &EventLog, count: u64) {
        for bytes in 0..count {
            log.record(EventKind::EmberTrimmed { pages: 1, bytes });
        }
    }

    fn sequences(records: &[Arc<EventRecord>]) -> Vec<u64> {
        records.iter().map(|record| record.sequence).collect()
    }

    #[test]
    fn reader_gets_all_events_then_the_end() {
        let log = EventLog::in_memory("web");
        log.set_incarnation(3);
        let mut reader = log.subscribe(0);
        assert_eq!(reader.next(Duration::ZERO), Received::Quiet);
        let writer = std::thread::spawn({
            let log = log.clone();
            move || {
                numbered(&log, 100);
                log.close();
            }
        });
        for expected in 1..=100 {
            let Received::Record(record) = reader.next(Duration::from_secs(60)) else { panic!("record {expected}") };
            assert_eq!((record.sequence, record.incarnation, record.machine.as_str()), (expected, 3, "web"));
        }
        assert_eq!(reader.next(Duration::from_secs(60)), Received::Closed);
        writer.join().unwrap();
    }

    #[test]
    fn slow_reader_gets_a_gap_and_continues() {
        let log = EventLog::with("web", 4, None);
        numbered(&log, 10);
        let records = log.since(2);
        assert_eq!(records[0].event, EventKind::Gap { missed: 4 });
        assert_eq!(sequences(&records), [6, 7, 8, 9, 10]);
        assert_eq!(sequences(&log.since(8)), [9, 10]);
        assert_eq!(sequences(&log.since(10)), [0; 0]);
    }

    #[test]
    fn keepers_last_error_is_found_in_its_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = EventLog::open("web", folder.path()).unwrap();
        let error = |message: &str| log.record(EventKind::Error { message: message.into() });
        let start = || log.record(EventKind::Started { pid: 1, version: "1".into() });
        let check = |expect: Option<&str>| assert_eq!(last_failure(folder.path()).as_deref(), expect);
        check(None);
        numbered(&log, 2000);
        start();
        log.record_state(MachineState::Running);
        error("the agent is silent");
        numbered(&log, 1);
        check(None);
        error("disk full");
        log.record_state(MachineState::Failed);
        log.record(EventKind::DumpIncomplete { file: "/dump".into(), why: "ended".into() });
        check(Some("disk full"));
        start();
        log.record_state(MachineState::Starting);
        check(Some("disk full"));
        error("no such image");
        check(Some("disk full"));
        log.record_state(MachineState::Failed);
        error("cannot save the boot set");
        check(Some("no such image"));
        start();
        log.record_state(MachineState::Starting);
        log.record_state(MachineState::Running);
        check(None);
        log.record_state(MachineState::Stopped);
        check(None);
    }

    #[test]
    fn long_error_is_found_and_leaves_room_for_others() {
        let folder = tempfile::tempdir().unwrap();
        let log = EventLog::open("web", folder.path()).unwrap();
        log.record(EventKind::Error { message: "x".repeat(70_000) });
        log.record_state(MachineState::Failed);
        assert_eq!(last_failure(folder.path()), Some("x".repeat(ERROR_CHARS_MAX)));
    }

    #[test]
    fn future_sequence_restarts_at_the_oldest_event() {
        let log = EventLog::in_memory("web");
        numbered(&log, 2);
        assert_eq!(sequences(&log.since(77)), [1, 2]);
    }

    #[test]
    fn sequence_continues_after_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let log = EventLog::open("web", folder.path()).unwrap();
        log.set_incarnation(5);
        numbered(&log, 3);
        let path = folder.path().join(FILE_NAME);
        let torn = fs::read_to_string(&path).unwrap() + "{\"sequence\":4,\"ti";
        fs::write(&path, torn).unwrap();

        let log = EventLog::open("web", folder.path()).unwrap();
        assert_eq!(log.record(EventKind::GuestPanicked), 4);
        assert_eq!(sequences(&log.since(1)), [2, 3, 4]);
        assert_eq!(log.since(3)[0].incarnation, 5);
        let read: Vec<u64> = read_file(folder.path()).unwrap().iter().map(|record| record.sequence).collect();
        assert_eq!(read, [1, 2, 3, 4]);
    }

    #[test]
    fn earlier_records_are_read_on_demand() {
        let folder = tempfile::tempdir().unwrap();
        let earlier = EventLog::open("web", folder.path()).unwrap();
        earlier.set_incarnation(7);
        numbered(&earlier, 5);
        let log = EventLog::open("web", folder.path()).unwrap();
        assert_eq!(log.last_sequence(), 5);
        numbered(&log, 2);
        assert_eq!(sequences(&log.since(5)), [6, 7]);
        assert_eq!(log.ring().records.len(), 2, "nothing else was read");
        assert_eq!(log.since(5)[0].incarnation, 7);
        assert_eq!(sequences(&log.since(2)), [3, 4, 5, 6, 7]);
        assert_eq!(sequences(&log.since(0)), [1, 2, 3, 4, 5, 6, 7]);
    }

    /// Only as many as the ring has room for; the reader gets a gap record.
    #[test]
    fn earlier_records_keep_the_ring_bounded() {
        let folder = tempfile::tempdir().unwrap();
        numbered(&EventLog::open("web", folder.path()).unwrap(), 10);
        let log = EventLog::open("web", folder.path()).unwrap();
        log.ring().records_max = 4;
        numbered(&log, 1);
        let records = log.since(0);
        assert_eq!(records[0].event, EventKind::Gap { missed: 7 });
        assert_eq!(sequences(&records), [7, 8, 9, 10, 11]);
    }

    #[test]
    fn sequence_continues_after_another_versions_events() {
        let folder = tempfile::tempdir().unwrap();
        numbered(&EventLog::open("web", folder.path()).unwrap(), 2);
        let path = folder.path().join(FILE_NAME);
        let head = r#""time":"2026-03-01T12:00:00.000Z","machine":"web","incarnation":4"#;
        let later = format!("{{\"sequence\":3,{head},\"kind\":\"guest_teleported\",\"to\":\"mars\"}}\n");
        fs::write(&path, fs::read_to_string(&path).unwrap() + &later).unwrap();
        let log = EventLog::open("web", folder.path()).unwrap();
        assert_eq!(log.record(EventKind::GuestPanicked), 4);
        let records = log.since(0);
        assert_eq!(sequences(&records), [1, 2, 3, 4]);
        assert_eq!(records[2].event, EventKind::Unknown { what: "guest_teleported".into() });
        assert_eq!(records[3].incarnation, 4);
        // The unknown record is unchanged, for the version that knows it.
        assert!(fs::read_to_string(&path).unwrap().contains(&later));
    }

    #[test]
    fn log_files_stay_bounded_with_newest_events() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path(), 2000, 0).unwrap();
        let log = EventLog::with("web", 16, Some(journal));
        numbered(&log, 200);
        let bytes = |name| fs::metadata(folder.path().join(name)).unwrap().len();
        assert!(bytes(FILE_NAME) <= 2000 && bytes(OLD_FILE_NAME) <= 2000);
        let records = read_file(folder.path()).unwrap();
        assert_eq!(records.last().unwrap().sequence, 200);
        assert!(records.len() > 10, "{}", records.len());
    }

    /// A log whose file is full.
    fn full(folder: &Path) -> EventLog {
        let mut journal = Journal::open(folder, FILE_BYTES_MAX, 0).unwrap();
        journal.file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        EventLog::with("web", 8, Some(journal))
    }

    fn make_space(log: &EventLog, folder: &Path) {
        let journal = Journal::open(folder, FILE_BYTES_MAX, 0).unwrap();
        log.ring().journal.as_mut().unwrap().file = journal.file;
    }

    #[test]
    fn events_are_written_once_space_is_free() {
        let folder = tempfile::tempdir().unwrap();
        let log = full(folder.path());
        numbered(&log, 5);
        assert_eq!(read_file(folder.path()).unwrap(), []);
        make_space(&log, folder.path());
        log.record(EventKind::GuestPanicked);
        let read: Vec<u64> = read_file(folder.path()).unwrap().iter().map(|record| record.sequence).collect();
        assert_eq!(read, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn dropped_events_leave_a_gap_record() {
        let folder = tempfile::tempdir().unwrap();
        let log = full(folder.path());
        numbered(&log, 20);
        make_space(&log, folder.path());
        log.record(EventKind::GuestPanicked);
        let read = read_file(folder.path()).unwrap();
        assert_eq!(read[0].event, EventKind::Gap { missed: 13 });
        assert_eq!(read.iter().map(|record| record.sequence).collect::<Vec<_>>(), (13..=21).collect::<Vec<_>>());
    }

    #[test]
    fn unwritable_file_does_not_stop_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path(), 300, 0).unwrap();
        let log = EventLog::with("web", 16, Some(journal));
        // Starting a new file fails, because a folder has the old file's name.
        fs::create_dir(folder.path().join(OLD_FILE_NAME)).unwrap();
        numbered(&log, 10);
        assert_eq!(log.last_sequence(), 10);
        assert_eq!(log.since(0).len(), 10);
    }
}
