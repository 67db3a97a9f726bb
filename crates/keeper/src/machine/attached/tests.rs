//! The keeper of a domain, with this process in the place of libvirt's QEMU.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};

use hearth_disk::block::{DiskId, RamPage};
use hearth_disk::server::{MemoryPlace, ToldFile};
use hearth_qemu::{Accelerator, AcceleratorChoice};
use hearth_recovery::incarnation::ram_path;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use tempfile::TempDir;

use super::*;
use crate::config::Configured;
use crate::console::Hub;
use crate::control::LastAnswer;
use crate::event_log::EventLog;
use crate::folders::Folders;
use crate::machine::context::{ConfigurationFile, Next, Outside, QemuChoice, load_journal};
use crate::machine::inherited_locks::InheritedLocks;
use crate::runtime_root::RuntimeRoot;
use crate::sample;
use crate::watchdog::Watchdog;

const NAME: &str = "attached-test";
const PAGES: u64 = 256;

/// The folders of a domain's keeper.
struct Domain(TempDir);

impl Domain {
    fn new(keys: &str) -> Self {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = folder.path().join("root.img");
        fs::write(&image, [0; 4096]).unwrap();
        let text = format!(
            "name = \"{NAME}\"\nowner = \"libvirt\"\nmemory = \"64MiB\"\nmemory_folder = \"{}\"\n{keys}\n[[disks]]\npath = \"{}\"\n",
            folder.path().join("memory").display(),
            image.display(),
        );
        fs::write(folder.path().join("machine.toml"), text).unwrap();
        Self(folder)
    }

    /// A keeper with this QEMU in its journal.
    fn keeper(&self, qemu: Option<QemuIdentity>) -> Attached {
        let root = RuntimeRoot::new(self.0.path().join("run"));
        let Configured { config, typed } = Configured::load(&self.0.path().join("machine.toml"), &root).unwrap();
        let folders = Folders::prepare(NAME, &config.folders.runtime, &config.folders.memory).unwrap();
        let mut journal = load_journal(&config, &folders, &root).unwrap();
        journal.disks = launch::disk_identities(&config.devices);
        journal.qemu = qemu;
        let accelerator = AcceleratorChoice { accelerator: Accelerator::Tcg, why: String::new() };
        let context = Context {
            file: ConfigurationFile {
                typed,
                next: Next { configured: None, accelerator: accelerator.clone(), last: None },
                pending: Vec::new(),
                shown: Arc::default(),
            },
            qemu: QemuChoice { binary: None, accelerator, locks: InheritedLocks::default(), given_up: Vec::new() },
            restore: None,
            rehearses: false,
            outside: Outside {
                event_log: EventLog::in_memory(NAME),
                watchdog: Watchdog::default(),
                console: Hub::start(&folders.runtime.join("console.sock")).unwrap(),
                started: Instant::now(),
                tell: std::sync::mpsc::channel().0,
                terminated: Arc::default(),
                last_answer: LastAnswer::default(),
            },
            config,
            folders,
            root,
            journal,
        };
        Attached::begin(context).unwrap()
    }

    /// A keeper whose QEMU has told a disk of this memory, of which the disk has noted one block.
    fn running(&self, memory: &File) -> Attached {
        self.running_as(std::process::id(), memory)
    }

    /// As `running`, where this process is QEMU.
    fn running_as(&self, pid: u32, memory: &File) -> Attached {
        let mut attached = self.keeper(None);
        let Peer { pid, start_ticks } = Peer::of(pid).unwrap();
        let process = Process::adopt_foreign(ProcessId { pid, start_ticks }).unwrap();
        let told = told(memory, process.id().pid);
        attached.state = State::Awaited { since_ticks: 0, process: Some(process) };
        attached.told_memory(&told).unwrap();
        if let Some(incarnation) = living(&attached)
            && let Some(ledger) = &incarnation.ledger
        {
            memory.write_all_at(&[7; 4096], 5 * PAGE_BYTES).unwrap();
            let tag = attached.warm_reboot.tagger.tag(&[7; 4096]);
            ledger.lock().unwrap().record(RamPage(5), DiskId(0), 3, tag);
        }
        attached
    }

    fn memory_folder(&self) -> std::path::PathBuf {
        self.0.path().join("memory").join(NAME)
    }
}

/// A guest's memory, with pages that take none of the host's until they are written.
fn memory(bytes: u64) -> File {
    let memory = File::from(memfd_create("pc.ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap());
    memory.set_len(bytes).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    memory
}

fn told(memory: &File, pid: u32) -> ToldMemory {
    let bytes = memory.metadata().unwrap().len();
    let low = bytes.min(2 << 30);
    let mut places = vec![MemoryPlace { guest: 0, file_offset: 0, bytes: low }];
    if bytes > low {
        places.push(MemoryPlace { guest: 4 << 30, file_offset: low, bytes: bytes - low });
    }
    ToldMemory { pid, files: vec![ToldFile { file: Arc::new(memory.try_clone().unwrap()), places }] }
}

fn living(attached: &Attached) -> Option<&Incarnation> {
    let State::Running(life) = &attached.state else { return None };
    life.incarnation.as_ref()
}

/// Whether the blocks of each rescue were moved.
fn rescues(attached: &Attached) -> Vec<bool> {
    let records = attached.context.outside.event_log.since(0);
    let released = records.iter().filter_map(|record| match record.event {
        EventKind::BlocksRescued { released, .. } => Some(released),
        _ => None,
    });
    released.collect()
}

fn has_error(attached: &Attached, words: &str) -> bool {
    let records = attached.context.outside.event_log.since(0);
    records.iter().any(|record| matches!(&record.event, EventKind::Error { message } if message.contains(words)))
}

/// Resets the guest, with libvirt's word, after a kernel's driver.
fn reset(attached: &mut Attached) {
    attached.new_driver(false).unwrap();
    attached.domain_reset().unwrap();
    attached.new_driver(true).unwrap();
}

/// A disk of this process's pins memory, so another one is QEMU.
#[test]
fn pinned_memory_is_not_released() {
    for (device, released) in [("null", true), ("vfio/12", false)] {
        let domain = Domain::new("");
        let devices = domain.0.path().join("dev");
        fs::create_dir_all(devices.join("vfio")).unwrap();
        let script = format!("exec 3>{device}; echo; exec sleep 1000");
        let mut qemu = Command::new("sh");
        let qemu = qemu.args(["-c", &script]).current_dir(&devices).stdout(Stdio::piped());
        let mut qemu = qemu.spawn().unwrap();
        // It has opened its device when it says something.
        qemu.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let mut attached = domain.running_as(qemu.id(), &memory(PAGES * PAGE_BYTES));
        reset(&mut attached);
        qemu.kill().unwrap();
        qemu.wait().unwrap();
        assert_eq!(rescues(&attached), [released], "{device}");
        assert_eq!(attached.warm_reboot.ember.counts().remaining, 1);
    }
}

#[test]
fn nothing_is_tracked_or_waited_for_without_ember() {
    let domain = Domain::new("ember = \"off\"");
    let mut attached = domain.running(&memory(PAGES * PAGE_BYTES));
    assert!(living(&attached).is_some_and(|it| it.ledger.is_none()), "it is kept for a dump alone");
    attached.new_driver(true).unwrap();
    assert!(attached.resets.deadline().is_none());
    reset(&mut attached);
    assert_eq!((rescues(&attached).len(), attached.context.journal.incarnation), (0, 1));
    let State::Running(life) = std::mem::replace(&mut attached.state, State::Off) else { panic!("it ran") };
    attached.end_life(life, "ended".to_owned()).unwrap();
    let last = attached.recovery.timeline.as_ref().unwrap().recovery().clone();
    assert_eq!((last.why_cold.as_deref(), last.warm), (Some("ember = \"off\""), false));
    assert!(attached.warm_reboot.ember.incarnations().is_empty());
    assert_eq!(numbers_in(&domain.memory_folder()).len(), 0);
}

#[test]
fn memory_of_a_reset_that_was_cut_off_is_removed() {
    let domain = Domain::new("");
    let path = ram_path(&domain.memory_folder(), 0);
    fs::create_dir_all(domain.memory_folder()).unwrap();
    fs::write(&path, "rescued").unwrap();
    let attached = domain.keeper(Some(sample::this_process()));
    assert!(matches!(attached.state, State::Running(_)) && attached.context.journal.incarnation == 0);
    assert!(!path.exists());
}

#[test]
fn reset_without_room_for_a_ledger_leaves_nothing_behind() {
    let domain = Domain::new("");
    let mut attached = domain.running(&memory(PAGES * PAGE_BYTES));
    // In the place of the ledger, which then cannot be made.
    let obstacle = domain.memory_folder().join("ledger-2");
    fs::create_dir(&obstacle).unwrap();
    reset(&mut attached);
    assert!(has_error(&attached, "nothing of this guest's memory will be kept: ledger of incarnation 2"));
    assert!(living(&attached).is_none() && attached.context.journal.memory.is_none());
    fs::remove_dir(obstacle).unwrap();
    assert_eq!(numbers_in(&domain.memory_folder()).len(), 0);
}

#[test]
fn question_of_an_ended_qemu_changes_nothing() {
    let domain = Domain::new("");
    let memory = memory(PAGES * PAGE_BYTES);
    let mut attached = domain.running(&memory);
    let State::Running(life) = std::mem::replace(&mut attached.state, State::Off) else { panic!("it ran") };
    attached.end_life(life, "ended".to_owned()).unwrap();
    let kept = |attached: &Attached| attached.warm_reboot.ember.counts().remaining;
    assert_eq!(kept(&attached), 1);
    for _ in 0..2 {
        attached.told_memory(&told(&memory, std::process::id())).unwrap();
        attached.new_driver(true).unwrap();
        attached.new_driver(false).unwrap();
        assert_eq!((kept(&attached), attached.resets.deadline()), (1, None));
        attached.state = State::Awaited { since_ticks: 0, process: None };
    }
}

#[test]
fn memory_larger_than_the_host_is_not_believed() {
    let domain = Domain::new("");
    let mut attached = domain.running(&memory(HostMemory::now().unwrap().total_bytes * 3));
    assert!(living(&attached).is_none() && has_error(&attached, "it claims to have"));
    assert_eq!(attached.context.config.guest.memory_bytes, 64 << 20);
    // What it has in truth is kept.
    attached.told_memory(&told(&memory(PAGES * PAGE_BYTES), std::process::id())).unwrap();
    assert!(living(&attached).is_some_and(|it| it.ram.pages() == PAGES));
}
