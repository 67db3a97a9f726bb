//! Tests of dumps without QEMU: dumps without a thread, their progress, the size of their pieces.

use std::os::unix::fs::FileExt;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use hearth_disk::tag::Tagger;
use hearth_recovery::ember::Ember;
use hearth_recovery::hold::Hold;
use hearth_recovery::incarnation::Incarnation;

use super::super::dumps::Dumps;
use super::*;
use crate::config::DiskTime;

const RAM_BYTES: u64 = 32 << 20;

/// A dead guest with one page of memory, and a folder for its dump.
struct Dead {
    folder: tempfile::TempDir,
    _memory: tempfile::TempDir,
    claim: Claim,
    memory: DeadRam,
}

impl Dead {
    fn new() -> Self {
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        let dead = Incarnation::create(memory.path(), 1, RAM_BYTES, true).unwrap();
        let ram = std::fs::File::options().write(true).open(dead.ram.path()).unwrap();
        ram.write_all_at(&[1; 4096], 8 * PAGE_BYTES).unwrap();
        let (ram, hold) = (dead.ram.clone(), Arc::new(Hold::everything(dead.ram.pages())));
        let ember = Arc::new(Ember::new(memory.path(), Tagger::new(b"a key like noise")));
        ember.bank_held(dead, hold.clone()).unwrap();
        let claim = Claim::new(ember, hold, 1, &ram);
        let folder = tempfile::tempdir().unwrap();
        Self { folder, _memory: memory, claim, memory: DeadRam::new(ram) }
    }

    fn task(&self) -> (Task, Arc<Progress>) {
        let folder = self.folder.path().to_owned();
        let file = folder.join("web-1-x.vmcore");
        let name = file.display().to_string();
        let status = DumpStatus { state: DumpState::Queued, file: name, pages_written: 0, ..crate::sample::dump() };
        let guest_waits: GuestWaits = Arc::new(|| false);
        let task = Task {
            machine: "web".into(),
            memory: self.memory.clone(),
            claim: Some(self.claim.clone()),
            registers: Err("there is no QEMU here".into()),
            settings: Settings {
                level: DumpLevel::NOT_ZERO,
                format: Format::Elf,
                chunk_bytes: 2 << 20,
                piece_bytes: 1 << 20,
                threads: 1,
            },
            dump_folder: DumpFolder { folder, machine: "web".into(), keep_last: 1, min_free_bytes: 0 },
            pace: Pace::new(None, DiskTime::DumpFirst, Box::new(|| false), guest_waits.clone()),
            guest_waits,
            file,
            begun: false,
        };
        (task, Arc::new(Progress::new(status, Some(self.claim.clone()), Arc::default())))
    }
}

/// A thread that cannot be created: no host has memory for such a stack.
fn no_thread() -> std::thread::Builder {
    std::thread::Builder::new().stack_size(1 << 60)
}

#[test]
fn dump_without_thread_waits_and_starts_later() {
    let dead = Dead::new();
    let mut dumps = Dumps::default();
    dumps.queue(1, dead.task());
    let (_, task, progress) = dumps.next().unwrap();
    let refused = Job::start_in(no_thread(), task, progress, |_| {}).map(drop).expect_err("no such stack");
    dumps.not_started(*refused.task, "cannot start a thread".into());
    let status = dumps.current().unwrap();
    assert_eq!((status.state, status.why.as_deref()), (DumpState::Waiting, Some("cannot start a thread")));
    assert_eq!(status.held_bytes, PAGE_BYTES, "what is not in a file is not released");

    let (_, task, progress) = dumps.next().expect("it is still its turn");
    let Ok(job) = Job::start(task, progress.clone(), |_| {}) else { panic!("a thread can be had") };
    dumps.started(job);
    assert_eq!(progress.wait_still(), DumpState::Complete);
    dumps.over();
    assert!(!dumps.is_busy() && dead.folder.path().join("web-1-x.vmcore").exists());
}

/// A keeper is killed between the last step of a dump and its report.
#[test]
fn renamed_dump_counts_as_complete() {
    let dead = Dead::new();
    let run = |begun: bool| {
        let (task, progress) = dead.task();
        let Ok(_job) = Job::start(Task { begun, ..task }, progress.clone(), |_| {}) else {
            panic!("cannot start a thread")
        };
        (progress.wait_still(), progress.status().pages_written)
    };
    let all = RAM_BYTES / PAGE_BYTES;
    assert_eq!(run(false), (DumpState::Complete, all));
    assert_eq!(run(true), (DumpState::Complete, all));
    assert_eq!(run(false).0, DumpState::Waiting, "a file that somebody else put there");
}

/// The loop waits for the thread after its last message.
#[test]
fn last_message_comes_after_the_memory_is_unmapped() {
    let dead = Dead::new();
    let (task, progress) = dead.task();
    let part_of_task = Arc::downgrade(&task.guest_waits);
    let (hear, heard) = channel();
    let tell = move |message| {
        if let DumpMessage::Over = message {
            hear.send(part_of_task.strong_count()).unwrap();
        }
    };
    let Ok(_job) = Job::start(task, progress, tell) else { panic!("cannot start a thread") };
    assert_eq!(heard.recv().unwrap(), 0);
}

#[test]
fn discarded_dump_without_thread_releases_memory() {
    let dead = Dead::new();
    let (task, progress) = dead.task();
    let told = Mutex::new(Vec::new());
    progress.tell(Order::GiveUp);
    Job::end_without_thread(task, &progress, &|word| told.lock().unwrap().push(word));
    assert_eq!((progress.status().state, progress.status().held_bytes), (DumpState::Incomplete, 0));
    let told = told.into_inner().unwrap();
    assert!(matches!(told[..], [DumpMessage::Event(EventKind::DumpIncomplete { .. }), DumpMessage::Over]), "{told:?}");
}

#[test]
fn waiters_see_a_dump_wait_and_end() {
    let dead = Dead::new();
    let (_, progress) = dead.task();
    let (hear, heard) = channel();
    let waiter = std::thread::spawn({
        let progress = progress.clone();
        move || {
            hear.send(progress.wait_still()).unwrap();
            progress.tell(Order::GiveUp);
            hear.send(progress.wait_still()).unwrap();
        }
    });
    progress.enter(DumpState::Writing, None);
    progress.enter(DumpState::Waiting, Some("the disk is full".into()));
    assert_eq!(heard.recv().unwrap(), DumpState::Waiting);
    // It was told to give up. Another report that it still waits changes nothing.
    assert_eq!(progress.wait_order(), Order::GiveUp);
    progress.enter(DumpState::Incomplete, None);
    assert_eq!(heard.recv().unwrap(), DumpState::Incomplete);
    waiter.join().unwrap();
}

#[test]
fn pieces_are_small_against_the_slack() {
    for (slack_bytes, threads, piece) in [(0, 4, 64 << 10), (8_053_063, 2, 1 << 20), (1 << 30, 4, 4 << 20)] {
        assert_eq!(piece_bytes(slack_bytes, threads), piece);
        assert!(slack_bytes == 0 || buffer_bytes(slack_bytes, threads) <= slack_bytes / 2);
    }
}

#[test]
fn zero_pages_do_not_raise_the_rate() {
    let dead = Dead::new();
    let (_, progress) = dead.task();
    progress.update(|status| status.pages = 4000);
    progress.enter(DumpState::Writing, None);
    progress.wrote(&Written { page_count: 3000, zero: 3000, ..Written::default() });
    let status = progress.status();
    assert_eq!((status.pages_written, status.mib_per_s), (3000, 0.0));
    assert!(status.eta_s.is_some());
    progress.wrote(&Written { page_count: 256, ..Written::default() });
    assert!(progress.status().mib_per_s > 0.0);
}

#[test]
fn a_resumed_dump_counts_from_its_beginning() {
    let dead = Dead::new();
    let (_, progress) = dead.task();
    progress.began_before(Duration::from_secs(1));
    assert!(progress.status().duration_s >= 1.0);
    let (before, _) = (progress.status().started_at, progress.began_before(Duration::ZERO));
    assert!(progress.status().duration_s >= 1.0 && progress.status().started_at == before);
}
