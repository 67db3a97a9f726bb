//! Checks that the dump folder is usable, on a disk and has space.

use std::path::Path;

use hearth_memory::room::Room;
use rustix::fs::Access;

use crate::config::{Config, OnPanic};
use crate::folders::existing;
use crate::problem::Problem;

pub fn check(config: &Config, problems: &mut Vec<Problem>) {
    if matches!(config.on_panic, OnPanic::Recover | OnPanic::Pause) {
        return;
    }
    let folder = &config.crash.dump_folder;
    let existing = existing(folder);
    problems
        .extend(unusable(folder, existing).or_else(|| in_memory(folder, existing)).or_else(|| full(config, existing)));
}

/// Only a warning, because the machine then recovers without a dump.
fn unusable(folder: &Path, existing: &Path) -> Option<Problem> {
    let why = if !existing.is_dir() {
        format!("{} is not a folder", existing.display())
    } else if let Err(errno) = rustix::fs::access(existing, Access::WRITE_OK | Access::EXEC_OK) {
        format!("{} cannot be written to: {}", existing.display(), std::io::Error::from(errno))
    } else {
        return None;
    };
    let message = format!("{} cannot be used, so crashes would not be dumped: {why}", folder.display());
    Some(Problem::warning("crash.dump_folder", message, "choose a folder on a disk, or set on_panic = \"recover\""))
}

fn in_memory(folder: &Path, existing: &Path) -> Option<Problem> {
    Room::of(existing).is_ok_and(|room| room.kind.is_host_memory()).then(|| {
        let message = format!("{} is in host memory, which dumps are meant to free", folder.display());
        Problem::warning("crash.dump_folder", message, "choose a folder on a disk")
    })
}

fn full(config: &Config, existing: &Path) -> Option<Problem> {
    let free_bytes = Room::of(existing).ok()?.free_bytes?;
    let min_bytes = config.crash.min_free_bytes;
    (free_bytes < min_bytes).then(|| {
        let (free_mib, min_mib) = (free_bytes >> 20, min_bytes >> 20);
        let folder = config.crash.dump_folder.display();
        let message = format!("{folder} has {free_mib} MiB free, but min_free requires {min_mib} MiB");
        Problem::warning("crash.dump_folder", message, "free space there, or lower crash.min_free")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime_root::RuntimeRoot;

    fn check_with(folder: &Path, more: &str) -> Vec<String> {
        let text = format!(
            "name = \"web\"\nmemory = \"32MiB\"\n{more}\n[boot]\nkernel = \"k\"\n[crash]\ndump_folder = \"{}\"\n\
             min_free = \"1024TiB\"\n",
            folder.display()
        );
        let config = Config::parse(&text, Path::new("/web.toml"), &RuntimeRoot::new("/run/hearth")).unwrap();
        let mut problems = Vec::new();
        check(&config, &mut problems);
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn folders_are_judged_before_the_crash() {
        let told = |folder: &str, more: &str| check_with(Path::new(folder), more).join("\n");
        assert!(told("/proc/version/dumps", "").starts_with(
            "warning: crash.dump_folder: /proc/version/dumps cannot be used, so crashes would not be dumped: /proc/version is not a folder;"
        ));
        assert!(told("/dev/shm/dumps/web", "").contains("/dev/shm/dumps/web is in host memory"));
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("a/b");
        let expect = "min_free requires 1073741824 MiB";
        // The temporary folder may be in memory too, which is then reported.
        let told_of_disk = told(disk.to_str().unwrap(), "");
        assert!(told_of_disk.contains(expect) || told_of_disk.contains("is in host memory"), "{told_of_disk}");
        assert_eq!(told("/proc/version/dumps", "on_panic = \"recover\""), "");
    }
}
