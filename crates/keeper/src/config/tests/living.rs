//! Every key changed under a living guest: what counts for it, what counts for the next one, and what status says.

use std::collections::HashSet;

use hearth_api::{PendingChange, PendingUntil};

use crate::config::every_key::{Changed, changes, configured, root};
use crate::config::{ConfigFile, Configured, Effect, FIELDS, Field, InForce, Section};

/// A living guest has a machine type, whether its file names one or not.
const KEPT: &str = "pc-q35-9.1";

fn settled(configured: &Configured, machine_type: &str) -> Configured {
    let mut settled = configured.clone();
    settled.or_machine_type(machine_type.to_owned());
    settled
}

/// Adds to what is there already; anything else would not be a machine that changed.
fn in_force(changed: &Changed) -> InForce {
    InForce::of_living(&changed.after, &changed.before.for_journal(), &root()).unwrap()
}

fn keys(pending: &[PendingChange], until: PendingUntil) -> Vec<&str> {
    pending.iter().filter(|change| change.until == until).map(|change| change.key.as_str()).collect()
}

#[test]
fn every_key_changed_under_a_living_guest() {
    let mut seen = HashSet::new();
    for changed in changes() {
        let Changed { field, before, after } = changed;
        let before = settled(&before, KEPT);
        let kept = before.config.guest.machine_type.clone().unwrap_or_else(|| KEPT.to_owned());
        let changed = Changed { field, before, after };
        let (before, after) = (&changed.before, settled(&changed.after, &kept));
        let name = format!("{}{}", field.section.heading(), field.key);
        seen.insert(name.clone());
        let InForce { now, next, pending, .. } = in_force(&changed);
        let (guest, start) = (keys(&pending, PendingUntil::NextGuest), keys(&pending, PendingUntil::NextStart));
        if after.config == before.config {
            assert_eq!((field.key, &now.config, next, pending), ("machine_type", &before.config, None, vec![]));
            continue;
        }
        if field.effect == Effect::AtTakeOver {
            assert_eq!((&now.config, next, pending), (&after.config, None, vec![]), "{name}");
            continue;
        }
        assert_eq!(now.config, before.config, "{name}: the guest's own configuration");
        if field.effect == Effect::WithNextGuest {
            let mut expect = after.config.clone();
            expect.remount.clone_from(&before.config.remount);
            assert_eq!(next.map(|next| next.config), Some(expect), "{name}");
            assert_eq!((guest.len(), start.len()), (1, 0), "{name}: {pending:?}");
        } else {
            assert_eq!((next, guest.len()), (None, 0), "{name}");
            // Default folders follow the name.
            assert!(start.len() == 1 || field.key == "name", "{name}: {pending:?}");
        }
        let told = guest.iter().chain(&start).any(|key| key.contains(field.key) || key == &"disks" || key == &"nvram");
        assert!(told, "{name}: {pending:?}");
    }
    let all = FIELDS.iter().map(|field| format!("{}{}", field.section.heading(), field.key));
    let missing: Vec<_> = all.filter(|name| !seen.contains(name)).collect();
    assert_eq!(missing, Vec::<String>::new(), "no file of `every_key` lets these be changed");
}

#[test]
fn unchanged_keys_are_not_pending() {
    for Changed { before, .. } in changes() {
        let before = settled(&before, KEPT);
        let again = InForce::of_living(&before, &before.for_journal(), &root()).unwrap();
        let keys = |typed: &ConfigFile, config| -> Vec<String> {
            let keys = typed.clone().for_snapshot(config, "tcg").host_keys();
            keys.into_iter().map(|key| key.key.to_string()).collect()
        };
        let saved = keys(&again.now.typed, &again.now.config);
        assert_eq!(saved, keys(&before.typed, &before.config), "what a snapshot asks of its host");
        assert_eq!((again.now.config, again.next, again.pending), (before.config, None, vec![]));
    }
}

#[test]
fn a_section_comes_and_goes_as_a_whole() {
    for section in Section::ALL.into_iter().filter(|section| section.table().is_some() && !section.repeats()) {
        let effects: HashSet<_> = Field::of_section(section).map(|field| format!("{:?}", field.effect)).collect();
        assert_eq!(effects.len(), 1, "{}: one effect for all its keys", section.heading());
    }
}

#[test]
fn earlier_keeper_noted_no_machine_type() {
    let mut today = configured(SMALL).unwrap();
    let noted = today.for_journal();
    let now = InForce::of_living(&today, &noted, &root()).unwrap().now;
    assert_eq!(now.config.guest.machine_type.as_deref(), Some("pc-q35-7.2"));
    assert!(now.typed.for_snapshot(&now.config, "tcg").to_text().contains("machine_type = \"pc-q35-7.2\""));
    today.or_machine_type("pc-q35-10.2".to_owned());
    let found = InForce::of_living(&today, &noted, &root()).unwrap();
    assert_eq!(keys(&found.pending, PendingUntil::NextGuest), ["machine_type"]);
}

fn check(before: &str, after: &str, guest: &[&str], start: &[&str]) -> InForce {
    let (before, after) = (configured(before).unwrap(), configured(after).unwrap());
    let found = in_force(&Changed { field: &FIELDS[0], before, after });
    let told = (keys(&found.pending, PendingUntil::NextGuest), keys(&found.pending, PendingUntil::NextStart));
    assert_eq!(told, (guest.to_vec(), start.to_vec()));
    found
}

const SMALL: &str = "name = \"web\"\nmemory = \"64MiB\"\nboot.kernel = \"k\"\n";

#[test]
fn changes_wait_each_for_its_own_effect() {
    let disk =
        |queues, iops| format!("{SMALL}[[disks]]\nname = \"d\"\npath = \"d.img\"\nqueues = {queues}\niops = {iops}\n");
    let after = disk(1, 70).replace("64MiB", "96MiB");
    let found = check(&disk(2, 50), &after, &["memory"], &["disks.d.queues"]);
    let disk = &found.now.config.devices.disks[0];
    assert_eq!((found.now.config.guest.memory_bytes, disk.queues, disk.iops), (64 << 20, 2, Some(70)));
    let next = found.next.unwrap().config;
    assert_eq!(
        (next.guest.memory_bytes, next.devices.disks[0].queues, next.devices.disks[0].iops),
        (96 << 20, 2, Some(70))
    );
}

#[test]
fn devices_come_and_go_with_their_time() {
    let watchdog = format!("{SMALL}[watchdog]\n");
    check(SMALL, &watchdog, &["watchdog"], &[]);
    check(&watchdog, SMALL, &["watchdog"], &[]);
    let disks = format!("{SMALL}[[disks]]\npath = \"d.img\"\n");
    check(SMALL, &disks, &[], &["disks"]);
    check(&disks, SMALL, &[], &["disks"]);
    check(SMALL, &format!("{SMALL}[[nets]]\n"), &["nets"], &[]);
}

#[test]
fn another_spelling_changes_nothing() {
    let respelled = SMALL.replace("64MiB", "65536KiB").replace("\"k\"", "\"/machines/k\"");
    check(SMALL, &format!("cpus = 1\n{respelled}"), &[], &[]);
}

/// The probe is the keeper's, the forward the guest's: what they make together is no configuration.
#[test]
fn contradictory_merge_waits_as_a_whole() {
    let with = |port: u16| {
        format!("{SMALL}[remount]\nready = {{ port = {port} }}\n[[nets]]\nforward = [\"127.0.0.1:{port}:80\"]\n")
    };
    let found = check(&with(8080), &with(9090), &["remount.ready.port", "nets[0].forward"], &[]);
    assert_eq!(found.now.config, settled(&configured(&with(8080)).unwrap(), "pc-q35-7.2").config);
    assert_eq!(found.next.unwrap().config.devices.nets, configured(&with(9090)).unwrap().config.devices.nets);
}

#[test]
fn a_journal_from_elsewhere_means_the_same() {
    let before = configured(&format!("{SMALL}[[disks]]\npath = \"d.img\"\n")).unwrap();
    let mut elsewhere = before.clone();
    elsewhere.config.file = "/somewhere/else.toml".into();
    let again = InForce::of_living(&elsewhere, &before.for_journal(), &root()).unwrap();
    assert_eq!(again.now.config.devices.disks, before.config.devices.disks);
    assert_eq!(again.now.config.guest.boot, before.config.guest.boot);
}

#[test]
fn unknown_keys_are_reported() {
    let today = configured(SMALL).unwrap();
    for text in ["memory = ", "name = \"web\"\nmemory = \"64MiB\"\nboot.kernel = \"k\"\nfuture = 1\n"] {
        let problems = InForce::of_living(&today, text, &root()).unwrap_err();
        assert!(!problems.is_empty());
    }
}
