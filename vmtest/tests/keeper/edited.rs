//! Keys of machine.toml that change while no keeper lives. The guest keeps its configuration through everything that can be done
//! with it, and the next one gets the changes.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use hearth_api::PendingUntil;
use hearth_recovery::vmcore::VmcoreFile;
use hearth_vmtest::artifacts::CPU_MODEL;
use hearth_vmtest::{Disk, Drives, Random, Result, TestVm, event, known, patience, pattern};
use toml::{Table, Value};

use super::take_over;

/// Number of keys that the regular test changes together.
const KEYS: usize = 12;

/// A key, and its change to the file. The lists below say when each change takes effect.
type Change = (&'static str, fn(&mut Table));

const NEXT_GUEST: &[Change] = &[
    ("memory", |file| put(file, "memory", "192MiB")),
    ("cpus", |file| put(file, "cpus", 1)),
    ("cpu_model", |file| put(file, "cpu_model", format!("{CPU_MODEL},-avx2"))),
    ("accelerator", |file| put(file, "accelerator", "auto")),
    ("machine_type", |file| put(file, "machine_type", "pc-q35-7.1")),
    ("sandbox", |file| put(file, "sandbox", false)),
    ("display", |file| put(file, "display", "vnc")),
    ("ember", |file| put(file, "ember", "off")),
    ("guest_agent", |file| put(file, "guest_agent", true)),
    ("extra_qemu_args", |file| put(file, "extra_qemu_args", vec!["-device", "virtio-balloon-pci"])),
    ("boot.kernel", |file| copy(file, "kernel", |file| table(file, "boot"))),
    ("boot.initrd", |file| copy(file, "initrd", |file| table(file, "boot"))),
    ("boot.cmdline", |file| append(table(file, "boot"), "cmdline", " edited=1")),
    ("watchdog.action", |file| put(table(file, "watchdog"), "action", "nmi")),
    ("nets[0].mac", |file| put(item(file, "nets"), "mac", "52:54:00:00:00:42")),
    ("nets[0].isolated", |file| put(item(file, "nets"), "isolated", true)),
];

const NEXT_START: &[Change] = &[
    ("runtime_folder", |file| append(file, "runtime_folder", "-elsewhere")),
    ("memory_folder", |file| append(file, "memory_folder", "-elsewhere")),
    ("disks.disk0.path", |file| copy(file, "path", |file| item(file, "disks"))),
    ("disks.disk0.format", |file| put(item(file, "disks"), "format", "qcow2")),
    ("disks.disk0.read_only", |file| put(item(file, "disks"), "read_only", true)),
    ("disks.disk0.serial", |file| put(item(file, "disks"), "serial", "another")),
    ("disks.disk0.queues", |file| put(item(file, "disks"), "queues", 1)),
    ("refill", |file| put(file, "refill", "on")),
    ("nvram", |file| {
        file.insert("nvram".into(), vec![Value::Table([("size".into(), "16MiB".into())].into_iter().collect())].into());
    }),
];

/// Keys that this test does not change, with the reason.
const LEFT_OUT: &[&str] = &[
    // Another name makes another machine, or another list of disks.
    "name",
    "disks.name",
    // A domain of libvirt's has few of the other keys.
    "owner",
    // Needs root.
    "qemu_user",
    // The guest boots from a kernel.
    "boot.firmware",
    "boot.firmware_vars",
    // These need passt, a tap, or a port that two machines cannot share.
    "nets.kind",
    "nets.ifname",
    "nets.forward",
    // These exist only with their device.
    "nvram.name",
    "nvram.device",
    "nvram.mirror",
    "nvram.mirror_file",
    "nvram.serial",
];

/// Whether the changes of two keys together make a file that is refused: without an ember there is nothing to refill from.
fn excludes(one: &str, other: &str) -> bool {
    matches!((one, other), ("ember", "refill") | ("refill", "ember"))
}

fn put(table: &mut Table, key: &str, value: impl Into<Value>) {
    table.insert(key.to_owned(), value.into());
}

fn append(table: &mut Table, key: &str, more: &str) {
    let text = table.get(key).and_then(Value::as_str).map(|text| format!("{text}{more}"));
    put(table, key, text.expect("the file has the key"));
}

/// Copies the file that a key names to the folder of the machine's disk, and changes the key.
fn copy(file: &mut Table, key: &str, of: fn(&mut Table) -> &mut Table) {
    let text =
        |table: &Table, key: &str| table.get(key).and_then(Value::as_str).expect("the file has the key").to_owned();
    let disk = text(item(file, "disks"), "path");
    let to = Path::new(&disk).with_file_name(format!("another-{key}")).display().to_string();
    std::fs::copy(text(of(file), key), &to).expect("the file can be copied");
    put(of(file), key, to);
}

fn table<'a>(file: &'a mut Table, key: &str) -> &'a mut Table {
    file.entry(key).or_insert_with(|| Value::Table(Table::new())).as_table_mut().expect("a section")
}

fn item<'a>(file: &'a mut Table, key: &str) -> &'a mut Table {
    let first = file.get_mut(key).and_then(Value::as_array_mut).and_then(|items| items.first_mut());
    first.and_then(Value::as_table_mut).expect("the machine has one")
}

/// Keys that wait, from the table of fields as docs/config.md shows it.
fn keys_that_wait() -> BTreeSet<String> {
    let page = include_str!("../../../docs/config.md");
    let mut section = String::new();
    let mut keys = BTreeSet::new();
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            let name = heading.trim_matches(['`', '[', ']']);
            section = if name == "The machine" { String::new() } else { format!("{name}.") };
        }
        if line.ends_with("| next guest |") || line.ends_with("| next start |") {
            let key = line.trim_start_matches("| `").split('`').next().unwrap_or_default();
            keys.insert(format!("{section}{key}"));
        }
    }
    keys
}

/// A key as the page writes it: without the disk's name or the position in a list.
fn on_the_page(key: &str) -> String {
    match key {
        "nvram" => "nvram.size".to_owned(),
        key => key.replace("[0]", "").replace(".disk0", ""),
    }
}

#[test]
fn every_key_that_waits_has_a_change() {
    let changed = NEXT_GUEST.iter().chain(NEXT_START).map(|(key, _)| on_the_page(key));
    let known: BTreeSet<String> = changed.chain(LEFT_OUT.iter().map(|key| (*key).to_owned())).collect();
    assert_eq!(known, keys_that_wait());
}

/// Keys that wait according to `hearth status`, and what each waits for.
fn pending(vm: &TestVm) -> Result<BTreeSet<(String, PendingUntil)>> {
    Ok(vm.status()?.pending.into_iter().map(|change| (change.key, change.until)).collect())
}

fn edited(vm: &TestVm, changes: &[&Change]) -> Result<()> {
    vm.edit(|file| {
        // A key with a default must be written out before it can be appended to.
        let root = vm.runtime_root().join(vm.name()).display().to_string();
        file.entry("runtime_folder").or_insert(root.into());
        changes.iter().for_each(|(_, change)| change(file));
    })
}

/// Does everything that can be done with a guest, after its file was changed.
fn keeps_its_configuration(name: &str, changes: &[&Change]) -> Result<()> {
    let keys: Vec<_> = changes.iter().map(|(key, _)| *key).collect();
    eprintln!("changed: {}", keys.join(", "));
    let disk = Disk::empty(16).setting("queues", 2).setting("serial", "first");
    let vm = TestVm::busybox(name).memory_mib(256).cpus(2).disk(disk).net([("kind", "user".into())]);
    let vm = vm.dumps().crash_setting("level", 1).boot()?;
    known::fill(&vm, 16)?;
    let nonce = vm.nonce()?;
    let waits = |list: &[Change], until: PendingUntil| {
        let mine = list.iter().filter(|(key, _)| keys.contains(key));
        mine.map(|(key, _)| ((*key).to_owned(), until)).collect::<BTreeSet<_>>()
    };
    let next_start = waits(NEXT_START, PendingUntil::NextStart);
    let mut all = waits(NEXT_GUEST, PendingUntil::NextGuest);
    all.extend(next_start.clone());
    // A new section counts as one key.
    let all: BTreeSet<_> =
        all.into_iter().map(|(key, until)| (key.replace("watchdog.action", "watchdog"), until)).collect();

    vm.kill_keeper()?;
    edited(&vm, changes)?;
    take_over(&vm)?;
    assert_eq!(pending(&vm)?, all);
    let same_guest = |vm: &TestVm, after: &str| -> Result<()> {
        assert_eq!(vm.nonce()?, nonce, "the same guest after {after}");
        known::verify(vm)?;
        vm.sh("dd if=/dev/vda of=/dev/null bs=1M count=4 iflag=direct 2>&1").map(drop)
    };
    same_guest(&vm, "the take-over")?;
    vm.rejuvenate()?;
    same_guest(&vm, "the hop")?;
    vm.cli(&["upgrade-keeper", vm.name()])?;
    vm.wait_running()?;
    assert_eq!(pending(&vm)?, all, "after the upgrade");

    let snapshot = vm.folder().join("snapshot");
    vm.save(&snapshot)?;
    // The snapshot holds the guest's configuration, which differs from the operator's file by now.
    let restored = vm.restore(&snapshot, &format!("{name}-b"), &["--trust-config"])?;
    restored.wait_running()?;
    same_guest(&restored, "the restore")?;
    restored.stop_at_once()?;
    drop(restored);

    let record = vm.folder().join("record.json").display().to_string();
    vm.cli(&["host-reload", "prepare", "--drill", "--record", &record])?;
    assert!(vm.wait_keeper_end()?.success());
    vm.restart_keeper()?;
    vm.wait_running()?;
    same_guest(&vm, "parking")?;
    assert_eq!(pending(&vm)?, all, "after parking");

    vm.panic()?;
    let pages = vm.wait_event_within("the dump", patience(60), event!(DumpComplete { pages, .. } => pages))?;
    assert!(pages > (16 << 20) / 4096, "{pages}");
    vm.wait_incarnation(2)?;
    assert_eq!(pending(&vm)?, next_start, "the next guest got its changes");
    for (key, command, expect) in [
        ("cpus", "nproc", "1"),
        (
            "memory",
            "test $(sed -n 's/^MemTotal: *\\([0-9]*\\).*/\\1/p' /proc/meminfo) -lt 200000 && echo small",
            "small",
        ),
        ("boot.cmdline", "grep -o edited=1 /proc/cmdline", "edited=1"),
        ("nets[0].mac", "cat /sys/class/net/eth0/address", "52:54:00:00:00:42"),
    ] {
        if keys.contains(&key) {
            assert_eq!(vm.sh(command)?.trim(), expect, "{key}");
        }
    }
    vm.has_no_disk_errors()
}

/// Changes some keys together, random ones in each run, and always both folders in which a guest is looked for.
#[test]
fn guest_keeps_its_configuration_after_an_edit() -> Result<()> {
    let mut random = Random::seeded();
    let mut left: Vec<&Change> = NEXT_GUEST.iter().chain(NEXT_START).collect();
    let is_folder = |(key, _): &Change| matches!(*key, "runtime_folder" | "memory_folder");
    let mut chosen: Vec<_> = left.extract_if(.., |change| is_folder(change)).collect();
    while chosen.len() < KEYS {
        let at = random.below(left.len());
        let change = left.swap_remove(at);
        chosen.push(change);
        left.retain(|other| !excludes(change.0, other.0));
    }
    keeps_its_configuration("edited", &chosen)
}

/// Changes each key alone. Run by `make soak NAME=keys`.
#[test]
#[ignore = "takes minutes"]
fn each_key_alone_waits_for_its_time() -> Result<()> {
    for (number, change) in NEXT_GUEST.iter().chain(NEXT_START).enumerate() {
        keeps_its_configuration(&format!("edited-{number}"), &[change])?;
    }
    Ok(())
}

/// Page frames of a RAM file from `bytes` on that hold pages of the known pattern, and the contents of each. Below 2 GiB a
/// guest-physical address is an offset in the file.
fn known_pages_above(ram: &Path, bytes: u64, mib: usize) -> HashMap<u64, Vec<u8>> {
    let pattern = pattern::bytes("memory", mib << 20, known::SEED);
    let by_first_word: HashMap<_, _> = pattern.chunks_exact(4096).map(|page| (&page[..8], page)).collect();
    let (ram, mut step, mut found) = (File::open(ram).expect("the guest lives"), vec![0; 1 << 20], HashMap::new());
    let length = ram.metadata().expect("it is open").len();
    for at in (bytes..length).step_by(step.len()) {
        ram.read_exact_at(&mut step, at).expect("RAM is a multiple of 1 MiB");
        for (number, page) in step.chunks_exact(4096).enumerate() {
            if by_first_word.get(&page[..8]) == Some(&page) {
                found.insert(at / 4096 + number as u64, page.to_vec());
            }
        }
    }
    found
}

/// The dead guest had more memory than the file says, and than the next guest gets while its memory is dumped.
#[test]
fn dump_has_memory_above_an_edited_size() -> Result<()> {
    const KNOWN_MIB: usize = 96;
    const EDITED_MIB: u64 = 128;
    let vm = TestVm::busybox("shrunk").disk(Disk::empty(16)).dumps().crash_setting("level", 1).running()?;
    known::fill(&vm, KNOWN_MIB as u64)?;
    vm.kill_keeper()?;
    vm.edit(|file| put(file, "memory", format!("{EDITED_MIB}MiB")))?;
    take_over(&vm)?;
    assert_eq!(pending(&vm)?, [("memory".to_owned(), PendingUntil::NextGuest)].into());
    let above = known_pages_above(&vm.ram_file(1), EDITED_MIB << 20, KNOWN_MIB);
    assert!(above.len() > 1000, "{} pages of the pattern", above.len());
    vm.panic()?;
    let dumped = vm.wait_event_within("the dump", patience(60), event!(DumpComplete { file, .. } => file))?;
    let dump = VmcoreFile::open(Path::new(&dumped)).expect("the dump can be read");
    let mut reused = 0;
    for (pfn, known) in &above {
        let mut page = [0; 4096];
        dump.read_page(*pfn, &mut page).unwrap_or_else(|error| panic!("page frame {pfn:#x}: {error}"));
        assert!(page != [0; 4096], "page frame {pfn:#x} is empty");
        // The pattern is also in pages that the guest has freed, and may use again until it panics.
        reused += usize::from(page != known[..]);
    }
    assert!(reused * 100 < above.len(), "{reused} of {} pages differ", above.len());
    Ok(())
}

/// Error messages among the machine's events.
fn errors(vm: &TestVm) -> Vec<String> {
    vm.events().iter().filter_map(event!(Error { message } => message)).collect()
}

/// Starts the next keeper with this text in machine.toml.
fn exchange_file(vm: &TestVm, text: &str) -> Result<()> {
    vm.kill_keeper()?;
    std::fs::write(vm.folder().join("machine.toml"), text).expect("it can be written");
    vm.restart_keeper()?;
    vm.wait_running().map(drop)
}

#[test]
fn guest_survives_a_broken_machine_file() -> Result<()> {
    let vm = TestVm::busybox("broken").disk(Disk::empty(16)).boot()?;
    let (nonce, path) = (vm.nonce()?, vm.folder().join("machine.toml"));
    let good = std::fs::read_to_string(&path).expect("it is there");
    let unknown = format!("memroy = \"1GiB\"\n{good}");
    let without_value = format!("name = \"broken\"\ncpus =\n{good}");
    let incomplete = "name = \"broken\"\n".to_owned();
    for (broken, expect) in [(without_value, "cpus has no value"), (unknown, "memroy"), (incomplete, "is missing")] {
        exchange_file(&vm, &broken)?;
        assert_eq!(vm.nonce()?, nonce, "the guest continues");
        assert_eq!(pending(&vm)?, [("machine.toml".to_owned(), PendingUntil::NextStart)].into());
        assert!(errors(&vm).iter().any(|error| error.contains(expect)), "{expect}: {:?}", errors(&vm));
    }
    vm.reboot_forced()?;
    vm.wait_boots(2)?;
    vm.stop_at_once()?;
    let refused = vm.cli_output(&["run", &path.display().to_string()])?;
    assert!(
        refused.status != 0 && refused.text().contains("is missing"),
        "a machine without a guest: {}",
        refused.text()
    );
    std::fs::write(&path, good).expect("it can be written");
    vm.restart_keeper()?;
    vm.wait_running().map(drop)
}

#[test]
fn next_guest_falls_back_if_qemu_refuses_it() -> Result<()> {
    let vm = TestVm::busybox("refused").disk(Disk::empty(16)).boot()?;
    let good = std::fs::read_to_string(vm.folder().join("machine.toml")).expect("it is there");
    exchange_file(&vm, &format!("extra_qemu_args = [\"-device\", \"no-such-device\"]\n{good}"))?;
    let waits: BTreeSet<_> = [("extra_qemu_args".to_owned(), PendingUntil::NextGuest)].into();
    assert_eq!(pending(&vm)?, waits);
    for boots in 2..4 {
        vm.reboot_forced()?;
        vm.wait_boots(boots)?;
        assert_eq!(pending(&vm)?, waits, "the guest has the old configuration");
        let named = |error: &String| error.contains("(extra_qemu_args)") && error.contains("no-such-device");
        assert_eq!(errors(&vm).into_iter().filter(named).count(), boots - 1);
    }
    exchange_file(&vm, &good)?;
    assert_eq!(pending(&vm)?, BTreeSet::new());
    vm.reboot_forced()?;
    vm.wait_boots(4).map(drop)
}
