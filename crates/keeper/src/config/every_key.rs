//! Changes every key of the table, one at a time, in files that are valid before and after: for tests of changes.

use std::path::Path;

use toml::{Table, Value};

use super::fields::{Field, Kind, Section};
use super::{Config, ConfigFile, Configured};
use crate::runtime_root::RuntimeRoot;

/// No single file can contain every key; the first one has most of them.
pub const FILES: [&str; 5] = [
    r#"
        name = "web"
        memory = "256MiB"
        cpus = 2
        cpu_model = "max"
        accelerator = "tcg"
        machine_type = "pc-q35-7.2"
        qemu = "bin/qemu"
        qemu_user = "nobody"
        runtime_folder = "/tmp/runtime"
        memory_folder = "memory"
        on_panic = "dump"
        budget_slack = "5%"
        admission = "always"
        sandbox = true
        guest_agent = true
        display = "vnc"
        extra_qemu_args = ["-device", "virtio-balloon-pci"]
        [boot]
        kernel = "vmlinuz"
        initrd = "initrd"
        cmdline = "quiet"
        [crash]
        dump_folder = "dumps"
        level = 1
        format = "kdump"
        compression = "zstd"
        keep_last = 2
        min_free = "1MiB"
        chunk = "4MiB"
        threads = 2
        headroom = "10%"
        disk_time = "balanced"
        mib_per_second = 70
        loop_count = 4
        loop_window_s = 600
        loop_delay_s = 2
        loop_delay_max_s = 20
        [watchdog]
        action = "crash"
        [rejuvenate]
        every = "30d"
        rss_growth_mib = 256
        window = "23:00-05:00"
        [remount]
        limit = "6%"
        ready_after = "3m"
        persist = true
        persist_file = "boot-set"
        [remount.ready]
        unit = "web.service"
        [object_store]
        credentials = "s3.env"
        folder = "objects"
        cache_size = "1GiB"
        [[disks]]
        name = "root"
        path = "root.img"
        format = "raw"
        read_only = false
        serial = "root"
        queues = 2
        mib_per_second = 100
        iops = 1000
        direct = false
        [[nvram]]
        name = "journal"
        size = "16MiB"
        device = "disk"
        mirror = "sync"
        mirror_file = "mirror"
        serial = "journal"
        [[nets]]
        kind = "user"
        forward = ["127.0.0.1:8080:80"]
        isolated = false
        mac = "52:54:00:12:34:56"
    "#,
    r#"
        name = "web"
        memory = "256MiB"
        [boot]
        firmware = "code.fd"
        firmware_vars = "vars.fd"
        [remount]
        ready = { port = 8080 }
        [[disks]]
        path = "root.img"
        [[nets]]
        kind = "tap"
        ifname = "tap0"
        [[nets]]
        forward = ["127.0.0.1:8080:80", "127.0.0.1:8081:80"]
    "#,
    r#"
        name = "web"
        memory = "256MiB"
        boot.kernel = "vmlinuz"
        [[nvram]]
        size = "16MiB"
        [[nets]]
        kind = "passt"
    "#,
    r#"
        name = "web"
        memory = "256MiB"
        boot.kernel = "vmlinuz"
    "#,
    r#"
        name = "web"
        owner = "libvirt"
        memory = "256MiB"
        [[disks]]
        path = "root.img"
    "#,
];

/// A configuration before and after a change of one key.
pub struct Changed {
    pub field: &'static Field,
    pub before: Configured,
    pub after: Configured,
}

pub fn root() -> RuntimeRoot {
    RuntimeRoot::new("/run/hearth")
}

pub fn configured(text: &str) -> Option<Configured> {
    let config = Config::parse(text, Path::new("/machines/web.toml"), &root()).ok()?;
    Some(Configured { config, typed: ConfigFile::parse(text).ok()? })
}

/// All changes of all keys that leave a valid file and have an effect.
pub fn changes() -> Vec<Changed> {
    let mut changes = Vec::new();
    for text in FILES {
        let before = configured(text).expect("the file is good");
        let table: Table = toml::from_str(text).expect("the file is TOML");
        for section in Section::ALL {
            for field in Field::of_section(section) {
                let values = values(field.kind).into_iter().map(Some).chain([None]);
                let tables = values.filter_map(|value| with(&table, field, value));
                let after = tables.filter_map(|table| configured(&toml::to_string(&table).expect("a table")));
                let after = after.filter(|after| after.config != before.config);
                changes.extend(after.map(|after| Changed { field, before: before.clone(), after }));
            }
        }
    }
    changes
}

/// Configurations with and without this value of a key, of all files that are valid both ways.
pub fn with_and_without(field: &Field, value: &Value) -> Vec<(Config, Config)> {
    let tables = FILES.map(|text| toml::from_str::<Table>(text).expect("the file is TOML"));
    let config =
        |table: Option<Table>| configured(&toml::to_string(&table?).expect("a table")).map(|found| found.config);
    let pairs =
        tables.iter().map(|table| (config(with(table, field, Some(value.clone()))), config(with(table, field, None))));
    pairs.filter_map(|(with, without)| with.zip(without)).collect()
}

/// The file with another value of the key in its section's first table, or without the key.
fn with(table: &Table, field: &Field, value: Option<Value>) -> Option<Table> {
    let mut changed = table.clone();
    let entries = match field.section.table() {
        None => &mut changed,
        Some(path) => path.split('.').try_fold(&mut changed, |table, part| match table.get_mut(part)? {
            Value::Array(items) => items.first_mut()?.as_table_mut(),
            value => value.as_table_mut(),
        })?,
    };
    match value {
        Some(value) => entries.insert(field.key.to_owned(), value),
        None => entries.remove(field.key),
    };
    Some(changed)
}

/// Sample values of a kind. Those that do not fit a key make an invalid file, which is skipped.
fn values(kind: Kind) -> Vec<Value> {
    let texts = |words: &[&str]| words.iter().map(|&word| Value::from(word)).collect::<Vec<_>>();
    match kind {
        Kind::Text => texts(&["other", "52:54:00:00:00:99", "02:00-03:00"]),
        Kind::Path => texts(&["elsewhere"]),
        Kind::Size => texts(&["128MiB", "8MiB"]),
        Kind::SizeOrPercent => texts(&["7%", "3MiB"]),
        Kind::Time => texts(&["77m"]),
        Kind::Integer { .. } => vec![3.into(), 8081.into()],
        Kind::Boolean => vec![true.into(), false.into()],
        Kind::Choice(words) => texts(words),
        Kind::TextList => vec![Value::from(vec!["-s"]), Value::from(vec!["127.0.0.1:9090:90"])],
    }
}
