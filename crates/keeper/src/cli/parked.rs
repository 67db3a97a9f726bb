//! A machine whose guest is parked. It has no keeper, so its state is read from its files, or from the record of a host
//! reload once the runtime folder is gone.

use std::path::{Path, PathBuf};

use hearth_api::rfc3339;
use hearth_qemu::accelerator::host_boot;
use hearth_recovery::incarnation::{file_residency_bytes, ram_path};
use hearth_recovery::journal::Journal;
use hearth_recovery::rejuvenation::parked;
use serde::Serialize;

use super::text::{bytes, uptime};
use crate::host_reload::Record;
use crate::runtime_root::RuntimeRoot;

/// State of a parked guest, from its files.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParkedGuest {
    /// RFC 3339: when its last instruction ran.
    pub since: String,
    pub stands_ms: u64,
    pub incarnation: u32,
    pub ram_bytes: u64,
    /// The part of it that uses host memory.
    pub resident_bytes: u64,
    pub memory_folder: PathBuf,
    pub qemu_version: String,
    pub accelerator: String,
    /// Whether the host has changed its kernel since.
    pub host_reloaded: bool,
    /// The command that resumes it.
    pub next: &'static str,
}

const NEXT: &str = "hearth host-reload resume";

/// None if no guest is parked there, or its note cannot be read. `record`: the record of the host reload, if any.
pub fn find(root: &RuntimeRoot, record: Option<&Record>, name: &str) -> Option<ParkedGuest> {
    let folder = in_journal(root, name).or_else(|| record?.parked_in(root.path(), name))?;
    let parked = parked::find(&folder).ok().flatten().filter(|parked| parked.machine == name)?;
    Some(ParkedGuest {
        since: rfc3339(parked.stopped_at),
        stands_ms: parked.stands_for().as_millis() as u64,
        incarnation: parked.incarnation,
        ram_bytes: parked.ram_bytes,
        resident_bytes: file_residency_bytes(&ram_path(&folder, parked.incarnation)),
        memory_folder: folder,
        qemu_version: parked.qemu_version,
        accelerator: parked.accelerator,
        host_reloaded: parked.boot_id != host_boot(),
        next: NEXT,
    })
}

fn in_journal(root: &RuntimeRoot, name: &str) -> Option<PathBuf> {
    let journal = Journal::load(&root.machine(name).join("journal.json")).ok().flatten()?;
    journal.guest.parked_in().map(Path::to_owned)
}

impl ParkedGuest {
    /// The page of `hearth status`.
    pub fn page(&self, name: &str) -> String {
        let stands = uptime(self.stands_ms as f64 / 1e3);
        let host = if self.host_reloaded { "has changed its kernel since" } else { "the same kernel as before" };
        let (ram, resident) = (bytes(self.ram_bytes), bytes(self.resident_bytes));
        let folder = self.memory_folder.display();
        [
            format!("{name}  parked since {} ({stands}), incarnation {}", self.since, self.incarnation),
            format!("  memory        {ram}, {resident} in use, in {folder}"),
            format!("  qemu          none; was {}, {}", self.qemu_version, self.accelerator),
            format!("  host          {host}"),
            format!("  resume with   `{}`, or `hearth run FILE`", self.next),
            format!("  discard with  `rm {folder}/parked.json`; the machine then boots"),
        ]
        .join("\n")
    }

    /// The row of `hearth ls`.
    pub fn row(&self, name: &str) -> Vec<String> {
        let stands = format!("for {}", uptime(self.stands_ms as f64 / 1e3));
        let (ram, resident) = (bytes(self.ram_bytes), bytes(self.resident_bytes));
        let accelerator = self.accelerator.clone();
        vec![name.to_owned(), "parked".to_owned(), self.incarnation.to_string(), stands, ram, resident, accelerator]
    }

    /// Why requests to it fail.
    pub fn sentence(&self, name: &str) -> String {
        format!(
            "{name} has been parked since {}, in {}; resume it with `{}`",
            self.since,
            self.memory_folder.display(),
            self.next
        )
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use hearth_recovery::journal::GuestNote;

    use super::*;
    use crate::host_reload::{MachineNote, Outcome};
    use crate::sample;

    #[test]
    fn parked_guest_is_found_by_journal_or_record() {
        let folder = tempfile::tempdir().unwrap();
        let (memory, root) = (folder.path().join("pmem"), RuntimeRoot::new(folder.path().join("run")));
        std::fs::create_dir_all(root.machine("web")).unwrap();
        std::fs::create_dir(&memory).unwrap();
        let machine = MachineNote {
            name: "web".into(),
            file: "/etc/hearth/web.toml".into(),
            memory_folder: memory.clone(),
            unit: None,
            outcome: Outcome::Parked,
            why: None,
            stood_ms: None,
        };
        let record = Record::new(rfc3339(SystemTime::UNIX_EPOCH), root.path(), None, vec![machine]);
        assert_eq!(find(&root, Some(&record), "web"), None, "nothing is there");
        sample::parked("web").commit(&memory).unwrap();
        let found = find(&root, Some(&record), "web").unwrap();
        assert_eq!((found.incarnation, found.ram_bytes, found.host_reloaded), (3, 64 << 20, true));
        let elsewhere = RuntimeRoot::new("/elsewhere");
        assert_eq!(find(&elsewhere, Some(&record), "web"), None, "it is about another runtime root");
        assert_eq!(find(&root, None, "web"), None);
        let mut journal = Journal::new("web", 64 << 20);
        journal.guest = GuestNote::Parked { folder: memory.clone() };
        journal.save(&root.machine("web").join("journal.json")).unwrap();
        let page = find(&root, None, "web").unwrap().page("web");
        assert!(page.starts_with("web  parked since 2026-03-01T12:00:00.123Z ("), "{page}");
        assert!(page.contains(&format!("64.0 MiB, 0 in use, in {}", memory.display())), "{page}");
        assert!(page.contains("`hearth host-reload resume`, or `hearth run FILE`"), "{page}");
        sample::parked("db").commit(&memory).unwrap();
        assert_eq!(find(&root, None, "web"), None, "it is another machine's");
    }
}
