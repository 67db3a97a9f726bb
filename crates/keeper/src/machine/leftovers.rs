//! Leftovers: which files may be in a machine's runtime folder, and when each is removed.
//!
//! Whoever creates a file here removes it, unless it is killed. So the next keeper removes files that nobody needs, and
//! so does each keeper whose machine stops or fails. Files that do not match this list are left alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::folders::VNC_SOCKET;

/// Files in the folder of a machine that has stopped or failed. `*` stands for a number or a name.
pub const AT_REST: [&str; 8] = [
    "keeper.lock",
    "journal.json",
    "events.jsonl",
    "events.old.jsonl",
    "keeper.log",
    "preload.so",
    "kvm-probe-*.json",
    QEMU_LOGS,
];

const QEMU_LOGS: &str = "qemu-*.log";
/// How many QEMU logs stay. A QEMU that printed nothing leaves no log, so these are the last ones with content.
const QEMU_LOGS_MAX: usize = 8;

/// Files of one QEMU; their names end with the generation's number.
const OF_A_QEMU: [&str; 7] =
    ["qmp-*.sock", "serial-*.sock", "agent-*.sock", "userfault-*.sock", "screen-*", "valves-*", "passt-*.pid"];
const OF_A_DEAD_GUEST: &str = "registers-*";
/// Files of a running machine.
const OF_A_GUEST: [&str; 2] = ["disk-*.sock", VNC_SOCKET];
/// The keeper's own sockets.
const OF_A_KEEPER: [&str; 2] = ["api.sock", "console.sock"];
/// A new file that was never renamed to its final name.
const UNFINISHED: &str = "*.new";

/// Whether Hearth makes files of this name in a runtime folder.
pub fn is_ours(name: &str) -> bool {
    let of_a_qemu = OF_A_QEMU.iter().chain(&OF_A_GUEST).chain([&OF_A_DEAD_GUEST, &UNFINISHED]);
    AT_REST.iter().chain(&OF_A_KEEPER).chain(of_a_qemu).any(|pattern| matches(pattern, name))
}

/// Which files of a runtime folder are still needed.
#[derive(Clone, Debug, Default)]
pub struct Needed {
    /// Generation of the living QEMU. Its disks' sockets and `vnc.sock` are needed too.
    pub generation: Option<u32>,
    /// Incarnations that still have to be dumped.
    pub dumps: Vec<u32>,
}

/// Removes what nobody needs. Only the machine's keeper may call this, and only while it starts no QEMU and creates no
/// file here.
pub fn remove(runtime: &Path, needed: &Needed) {
    let is_needed = |name: &str| {
        if AT_REST.iter().any(|pattern| matches(pattern, name)) {
            return true;
        }
        if OF_A_QEMU.iter().any(|pattern| matches(pattern, name)) {
            return needed.generation.is_some() && number_in(name) == needed.generation;
        }
        if matches(OF_A_DEAD_GUEST, name) {
            return number_in(name).is_some_and(|number| needed.dumps.contains(&number));
        }
        let is_of_guest = OF_A_GUEST.iter().any(|pattern| matches(pattern, name));
        let is_passing = is_of_guest && needed.generation.is_none() || matches(UNFINISHED, name);
        !is_passing
    };
    for (name, path) in files(runtime) {
        if !is_needed(&name) {
            forget(&path);
        }
    }
    remove_old_logs(runtime);
}

/// Removes all but the last logs of ended QEMUs.
pub fn remove_old_logs(runtime: &Path) {
    let age = |path: &PathBuf| fs::metadata(path).and_then(|log| log.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let mut logs: Vec<_> =
        files(runtime).filter(|(name, _)| matches(QEMU_LOGS, name)).map(|(_, path)| (age(&path), path)).collect();
    logs.sort_unstable();
    logs.iter().rev().skip(QEMU_LOGS_MAX).for_each(|(_, path)| forget(path));
}

fn forget(path: &Path) {
    let is_folder = path.symlink_metadata().is_ok_and(|found| found.is_dir());
    let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    if let Err(error) = removed {
        tracing::debug!(path = %path.display(), %error, "cannot remove");
    }
}

fn files(folder: &Path) -> impl Iterator<Item = (String, PathBuf)> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        Some((start, end)) => name.len() > start.len() + end.len() && name.starts_with(start) && name.ends_with(end),
        None => name == pattern,
    }
}

/// The last number in a name. `passt-NET-GENERATION.pid` has two.
fn number_in(name: &str) -> Option<u32> {
    let stem = name.split('.').next().unwrap_or(name);
    stem.rsplit('-').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_QEMUS: [&str; 9] = [
        "qmp-3.sock",
        "qmp-31.sock",
        "serial-3.sock",
        "agent-3.sock",
        "userfault-3.sock",
        "screen-3",
        "valves-3",
        "passt-0-3.pid",
        "passt-3-2.pid",
    ];
    const OTHERS: [&str; 7] = [
        "disk-root.sock",
        "vnc.sock",
        "registers-3",
        "registers-4",
        "journal.json.new",
        "api.sock",
        "somebodys-notes.txt",
    ];

    #[track_caller]
    fn check(needed: &Needed, stay: &[&str]) {
        let folder = tempfile::tempdir().unwrap();
        let at_rest: Vec<_> = AT_REST.iter().map(|pattern| pattern.replace('*', "3")).collect();
        for name in OF_QEMUS.iter().chain(&OTHERS).copied().chain(at_rest.iter().map(String::as_str)) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let screen = folder.path().join("screen-2");
        fs::create_dir(&screen).unwrap();
        fs::write(screen.join("vnc"), "").unwrap();
        remove(folder.path(), needed);
        let mut left: Vec<_> =
            files(folder.path()).map(|(name, _)| name).filter(|name| !at_rest.contains(name)).collect();
        left.sort();
        assert_eq!(left, stay);
        assert!(at_rest.iter().all(|name| folder.path().join(name).exists()));
    }

    #[test]
    fn unneeded_files_are_removed() {
        let always = ["api.sock", "somebodys-notes.txt"];
        check(&Needed::default(), &always);
        check(&Needed { dumps: vec![4], ..Needed::default() }, &["api.sock", "registers-4", "somebodys-notes.txt"]);
        let living = Needed { generation: Some(3), dumps: vec![3] };
        let mut stay = vec!["disk-root.sock", "vnc.sock", "registers-3"];
        stay.extend(always);
        stay.extend(OF_QEMUS.iter().filter(|name| !["qmp-31.sock", "passt-3-2.pid"].contains(name)));
        stay.sort_unstable();
        check(&living, &stay);
    }

    #[test]
    fn all_but_files_of_others_are_ours() {
        let at_rest = AT_REST.map(|pattern| pattern.replace('*', "3"));
        let mut names = OF_QEMUS.iter().chain(&OTHERS).copied().chain(at_rest.iter().map(String::as_str));
        assert!(names.all(|name| is_ours(name) == (name != "somebodys-notes.txt")));
        assert!(!is_ours("data.img"));
    }

    #[test]
    fn the_last_logs_stay() {
        let folder = tempfile::tempdir().unwrap();
        let log = |number: u64| folder.path().join(format!("qemu-{number}.log"));
        // Generations are counted anew with each start of the machine, so the newest log may have a low number.
        for (age, number) in (1..=20).rev().enumerate() {
            let file = fs::File::create(log(number)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(age as u64)).unwrap();
        }
        remove_old_logs(folder.path());
        assert!((1..=20).all(|number| log(number).exists() == (number <= QEMU_LOGS_MAX as u64)));
    }
}
