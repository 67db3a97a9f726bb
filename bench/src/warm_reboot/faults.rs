//! Fault rounds: random pages of the guest's RAM are overwritten from outside, the guest dies at once and comes back warm, and
//! every file that it serves is compared with what was put on the disk. The next guest brings its file cache back (`refill`) by the
//! map that the damaged kernel leaves.
//!
//! QEMU stands still while pages are overwritten, and is killed then, so that the guest cannot write its damage to the disk: the
//! test is whether damaged memory is served, not whether a damaged kernel damages its disk.

use std::io;
use std::path::{Path, PathBuf};

use hearth_vmtest::{faults, processes};
use rustix::process::Pid;

use super::session::{self, Session};
use super::{Shape, WarmRebootError};
use crate::host::profile::Profile;
use crate::load;
use crate::record::Record;
use crate::sides::{FILES, Rig, Stack, Way};

const PAGE_BYTES: usize = 4096;

pub fn measure(rig: &Rig, shape: Shape, record: &mut Record) -> Result<(), WarmRebootError> {
    let mut session = session::started(rig, Stack::HearthRefill, Profile::Asis, shape)?;
    for round in 1..=shape.fault_rounds {
        let seed = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(u64::from(round));
        session.fill()?;
        inject(&session, shape.fault_pages, seed)?;
        session.crash_and_wait(Way::Killed)?;
        let bad = bad_blocks(&session, shape)?;
        let refused = refused_pages(&session)?;
        eprintln!(
            "warm-reboot: fault round {round} of {}: seed {seed:#x}, {} pages overwritten, {refused} refused, {bad} bad blocks served",
            shape.fault_rounds, shape.fault_pages
        );
        record.add("hearth-faults", "faults_injected", "pages", shape.fault_pages as f64);
        record.add("hearth-faults", "bad_blocks_served", "blocks", bad as f64);
        record.add("hearth-faults", "pages_refused", "pages", refused as f64);
    }
    Ok(())
}

fn inject(session: &Session<'_>, pages: u64, seed: u64) -> Result<(), WarmRebootError> {
    let failed = |source| WarmRebootError::Memory { side: "hearth".to_owned(), source };
    let status = session.machine().status().map_err(|error| session.machine_error(error))?;
    let qemu = status.and_then(|status| Pid::from_raw(status.qemu?.pid as i32));
    processes::freeze(qemu.expect("a guest runs under Hearth")).map_err(failed)?;
    let folder = session.machine().memory_folder().expect("Hearth's machines have a memory folder");
    let ram = newest_ram_file(folder).map_err(failed)?;
    faults::overwrite_pages(&ram, pages, seed).map(drop).map_err(|error| session.machine_error(error))
}

/// The living incarnation's RAM file, which has the highest number.
fn newest_ram_file(folder: &Path) -> io::Result<PathBuf> {
    let number = |path: &Path| path.file_name()?.to_str()?.strip_prefix("ram-")?.parse::<u32>().ok();
    let entries = std::fs::read_dir(folder)?.flatten().map(|entry| entry.path());
    let newest = entries.filter_map(|path| Some((number(&path)?, path))).max();
    newest.map(|(_, path)| path).ok_or_else(|| io::Error::other(format!("no RAM file in {}", folder.display())))
}

/// Number of 4 KiB blocks of all files that differ from what was put on the disk.
fn bad_blocks(session: &Session<'_>, shape: Shape) -> Result<u64, WarmRebootError> {
    let mut bad = 0;
    let mut seen = 0;
    let compare = |number: usize, body: &[u8]| {
        seen += 1;
        bad += differing_blocks(body, &shape.guest.contents(number));
    };
    load::fetch_all(session.targets(), compare).map_err(|error| session.load_error(error))?;
    assert_eq!(seen, FILES, "every file is compared");
    Ok(bad)
}

fn differing_blocks(served: &[u8], expected: &[u8]) -> u64 {
    let blocks = expected.len().max(served.len()).div_ceil(PAGE_BYTES);
    let block = |bytes: &[u8], index: usize| {
        let begin = (index * PAGE_BYTES).min(bytes.len());
        bytes[begin..(begin + PAGE_BYTES).min(bytes.len())].to_vec()
    };
    (0..blocks).filter(|index| block(served, *index) != block(expected, *index)).count() as u64
}

fn refused_pages(session: &Session<'_>) -> Result<u64, WarmRebootError> {
    let status = session.machine().status().map_err(|error| session.machine_error(error))?;
    Ok(status.map_or(0, |status| status.ember.refused.tag_mismatch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn living_ram_file_has_the_highest_number() {
        let folder = tempfile::tempdir().unwrap();
        assert!(newest_ram_file(folder.path()).is_err());
        for name in ["ram-9", "ram-10", "ledger-11", "tag.key"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert!(newest_ram_file(folder.path()).unwrap().ends_with("ram-10"));
    }

    #[test]
    fn missing_end_of_file_counts_as_bad() {
        assert_eq!(differing_blocks(&[1; 4096], &[1; 8192]), 1);
        assert_eq!(differing_blocks(&[1; 8192], &[1; 8192]), 0);
    }
}
