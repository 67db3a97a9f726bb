//! Soaks: tests that take minutes, which `make test` leaves out. They run one after another, because each needs the host to
//! itself.

use std::time::{Duration, Instant};

use crate::suite::{self, Summary};
use crate::{Outcome, exit_code, guest, set_up};

struct Soak {
    name: &'static str,
    /// The test binary, and the test in it.
    binary: &'static str,
    test: &'static str,
    /// Duration on two processors, under emulation.
    minutes: u32,
    says: &'static str,
}

const SOAKS: [Soak; 11] = [
    Soak {
        name: "disks",
        binary: "disk_simulation",
        test: "soak::a_million_schedules",
        minutes: 60,
        says: "a million schedules of a simulated disk (SEEDS=1000000, FIRST=1)",
    },
    Soak {
        name: "restores",
        binary: "lazy_restore",
        test: "soak::a_hundred_restores_succeed",
        minutes: 35,
        says: "100 restores of one snapshot, in four modes (ROUNDS=100)",
    },
    Soak {
        name: "services",
        binary: "lazy_restore",
        test: "services::web_server_and_database_survive_each_restore_mode",
        minutes: 10,
        says: "restores of a Debian with nginx and PostgreSQL, in three modes, with and without the snapshot in the page cache",
    },
    Soak {
        name: "hops",
        binary: "rejuvenation",
        test: "soak::hundreds_of_hops_succeed",
        minutes: 10,
        says: "200 hops between two versions of QEMU (HOPS=200)",
    },
    Soak {
        name: "upgrades",
        binary: "rejuvenation",
        test: "soak::hundreds_of_upgrades_succeed_at_any_moment",
        minutes: 5,
        says: "200 upgrades of the keeper a second or so apart (UPGRADES=200)",
    },
    Soak {
        name: "reboots",
        binary: "warm_reboot",
        test: "soak::hundreds_of_reboots_do_not_grow",
        minutes: 40,
        says: "200 reboots after which the guest reads its file cache back (REBOOTS=200)",
    },
    Soak {
        name: "keys",
        binary: "keeper",
        test: "edited::each_key_alone_waits_for_its_time",
        minutes: 15,
        says: "each key of machine.toml changed under a living guest",
    },
    Soak {
        name: "pairs",
        binary: "pairs",
        test: "every::every_pair_leaves_nothing_behind",
        minutes: 10,
        says: "each operation during each other one, and a death at each step, with a stand-in for QEMU",
    },
    Soak {
        name: "pairs-on-guests",
        binary: "pairs",
        test: "real::hundreds_of_pairs_on_a_real_guest",
        minutes: 40,
        says: "200 such pairs on a real guest (HEARTH_SEED)",
    },
    Soak {
        name: "volumes",
        binary: "fast_remount",
        test: "many::four_hundred_volumes_come_back_whole",
        minutes: 4,
        says: "400 volumes, two crashes",
    },
    Soak {
        name: "libvirt",
        binary: "libvirt",
        test: "kills::hundreds_of_kills_lose_nothing",
        minutes: 26,
        says: "200 rounds of kills of keeper, QEMU, libvirtd and `hearth host` around an attached domain (KILLS=200, HEARTH_SEED)",
    },
];

/// Runs the soak with this name, or all.
pub fn run(name: Option<&str>) -> Outcome {
    let wanted: Vec<&Soak> = SOAKS.iter().filter(|soak| name.is_none_or(|name| name == soak.name)).collect();
    if wanted.is_empty() {
        let names = SOAKS.map(|soak| soak.name).join(", ");
        return Err(format!("no soak {:?}; choose from {names}", name.unwrap_or_default()).into());
    }
    set_up()?;
    guest::qemu10()?;
    if wanted.iter().any(|soak| soak.name == "services") {
        guest::debian_database()?;
    }
    let (mut sum, mut lines) = (Summary::default(), Vec::new());
    for (number, soak) in (1..).zip(&wanted) {
        println!("soak {number} of {}, {}: {}; about {} minutes", wanted.len(), soak.name, soak.says, soak.minutes);
        let began = Instant::now();
        let arguments = [soak.test, "--exact", "--nocapture"].map(str::to_owned);
        let summary = soaked(suite::run_ignored(soak.binary, &arguments)?);
        lines.push(line(soak.name, &summary, began.elapsed()));
        sum = sum.and(summary);
    }
    lines.iter().for_each(|line| println!("{line}"));
    Ok(exit_code(&sum))
}

/// A soak that was not found counts as failed.
fn soaked(summary: Summary) -> Summary {
    if summary == Summary::default() { Summary { failed: 1, ..summary } } else { summary }
}

fn line(name: &str, summary: &Summary, took: Duration) -> String {
    format!("soak {name}: {summary}, in {:.1} minutes", took.as_secs_f64() / 60.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths;

    #[test]
    fn each_soak_is_an_ignored_test() {
        for Soak { name, binary, test, .. } in &SOAKS {
            let (module, function) = test.split_once("::").expect("a soak is in a module");
            let folders = ["vmtest", "crates/recovery"].map(|package| paths::root().join(package).join("tests"));
            let files = folders.map(|folder| folder.join(format!("{binary}/{module}.rs")));
            let file = files.iter().find(|file| file.exists()).expect("one of them has the module");
            let text = std::fs::read_to_string(file).expect("the file of the module");
            let before = text.split(&format!("fn {function}()")).next().expect("a first piece");
            assert!(before.len() < text.len(), "{name}: no {function} in {}", file.display());
            let attributes = before.rsplit("\n\n").next().expect("a last paragraph");
            assert!(attributes.contains("#[ignore"), "{name}: {function} is not ignored");
        }
    }

    #[test]
    fn soak_not_found_counts_as_failed() {
        assert_eq!(soaked(Summary::default()), Summary { passed: 0, failed: 1 });
        assert_eq!(soaked(Summary { passed: 1, failed: 0 }), Summary { passed: 1, failed: 0 });
        let line = line("hops", &Summary { passed: 1, failed: 0 }, Duration::from_secs(90));
        assert_eq!(line, "soak hops: 1 passed, 0 failed, in 1.5 minutes");
    }
}
