//! The configuration of a running guest: what its QEMU was started with, merged with today's file.
//!
//! ```text
//! journal: what the guest was started with --+--> in force        keys that are `AtTakeOver` come from the file
//! machine.toml as it is now -----------------+--> the next guest  keys that are `WithNextGuest` as well
//!                                            +--> pending         each key whose value the guest does not have yet
//! ```
//! Everything is merged as tables of what was typed, key by key by the table of fields: a key cannot be forgotten here. A
//! mixture that contradicts itself (a probe of a port that the guest's network does not forward) is not used: then the file
//! as a whole waits.

use std::path::Path;

use hearth_api::{PendingChange, PendingUntil};
use hearth_qemu::{Binary, EARLIER_MACHINE_TYPE};
use toml::{Table, Value};

use super::fields::{Effect, Field, Kind, Section};
use super::{Config, ConfigFile, Owner};
use crate::problem::Problem;
use crate::runtime_root::RuntimeRoot;

/// The one key that is kept although the file does not set it.
const MACHINE_TYPE: &str = "machine_type";
/// Firmware given by name rather than path.
const FIRMWARE_WORDS: [&str; 2] = ["bios", "uefi"];

/// A configuration, as typed and as resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct Configured {
    pub config: Config,
    pub typed: ConfigFile,
}

/// The configurations that a keeper starts with.
#[derive(Clone, Debug, PartialEq)]
pub struct InForce {
    /// The configuration of the running guest, if there is one.
    pub now: Configured,
    /// The configuration of the next guest; none if it is the same.
    pub next: Option<Box<Configured>>,
    /// Keys of the file that are not in effect yet.
    pub pending: Vec<PendingChange>,
    /// Why the whole file is ignored: it cannot be understood.
    pub misread: Option<String>,
    /// The QEMU of `now`, if the check before the start found it.
    pub qemu: Option<Binary>,
}

impl From<Configured> for InForce {
    fn from(now: Configured) -> Self {
        Self { now, next: None, pending: Vec::new(), misread: None, qemu: None }
    }
}

impl Configured {
    /// Reads a machine's file. The error lists everything that is wrong with it.
    pub fn load(path: &Path, root: &RuntimeRoot) -> Result<Self, Vec<Problem>> {
        let config = Config::load(path, root)?;
        // The file is read twice; both must mean the same.
        let typed = ConfigFile::load(path)?;
        match Config::parse(&typed.to_text(), &config.file, root)? {
            again if again == config => Ok(Self { config, typed }),
            _ => Err(vec![Problem::error(path.display().to_string(), "was changed while being read", "try again")]),
        }
    }

    /// Sets the machine type, if the file does not and libvirt does not.
    pub fn or_machine_type(&mut self, machine_type: String) {
        if self.config.owner == Owner::Libvirt {
            return;
        }
        let machine_type = self.config.guest.machine_type.get_or_insert(machine_type);
        self.typed.machine_type = Some(machine_type.clone());
    }

    /// The text for the journal, which means the same wherever it is read. Default folders are left out, because a
    /// snapshot must not name what its machine's file does not.
    pub fn for_journal(&self) -> String {
        toml::to_string(&self.table()).expect("what was typed in TOML can be written so")
    }

    /// The typed keys, with absolute paths and a name for each disk and NVRAM.
    fn table(&self) -> Table {
        let mut table = Table::try_from(&self.typed).expect("what was typed is a table");
        let folder = self.config.file.parent().unwrap_or(Path::new("/"));
        for section in Section::ALL {
            for (position, entries) in tables_of(&mut table, section).into_iter().enumerate() {
                for field in Field::of_section(section).filter(|field| field.kind == Kind::Path) {
                    if let Some(Value::String(path)) = entries.get_mut(field.key) {
                        let is_word = field.key == "firmware" && FIRMWARE_WORDS.contains(&path.as_str());
                        if !is_word {
                            *path = folder.join(&*path).display().to_string();
                        }
                    }
                }
                if let Some(prefix) = name_prefix(section) {
                    entries.entry("name").or_insert_with(|| format!("{prefix}{position}").into());
                }
            }
        }
        table
    }

    fn parse(table: &Table, file: &Path, root: &RuntimeRoot) -> Result<Self, Vec<Problem>> {
        let text = toml::to_string(table).expect("a table of what was typed can be written");
        Ok(Self { config: Config::parse(&text, file, root)?, typed: ConfigFile::parse(&text)? })
    }
}

impl Configured {
    /// The configuration that a guest was started with, from its journal.
    pub fn of_journal(started_with: &str, file: &Path, root: &RuntimeRoot) -> Result<Self, Vec<Problem>> {
        let table: Table = toml::from_str(started_with)
            .map_err(|error| vec![Problem::error("journal", error.message().to_owned(), "end the guest's QEMU")])?;
        Self::parse(&table, file, root)
    }
}

impl InForce {
    /// Merges today's file with the journal of a running guest. The error lists what this program does not understand
    /// in the journal.
    pub fn of_living(today: &Configured, started_with: &str, root: &RuntimeRoot) -> Result<Self, Vec<Problem>> {
        let file = &today.config.file;
        let unreadable = |error: toml::de::Error| {
            let hint = "use the keeper that started the guest, or end its QEMU";
            vec![Problem::error(
                "journal",
                format!("cannot read the configuration that the guest was started with: {}", error.message()),
                hint,
            )]
        };
        let mut living: Table = toml::from_str(started_with).map_err(unreadable)?;
        let mut asked = today.table();
        // libvirt knows the machine types of its domains.
        let is_domain = |table: &Table| table.get("owner").and_then(Value::as_str) == Some("libvirt");
        if !is_domain(&living) {
            // Earlier keepers recorded none, and always used the same one.
            let machine_type = living.entry(MACHINE_TYPE).or_insert_with(|| EARLIER_MACHINE_TYPE.into()).clone();
            // Kept if the file sets none.
            if !is_domain(&asked) {
                asked.entry(MACHINE_TYPE).or_insert(machine_type);
            }
        }
        let read = |table: &Table| Configured::parse(table, file, root);
        let mixed = merge(&living, &asked, |effect| effect == Effect::AtTakeOver);
        let (table, now, mixes) = match read(&mixed) {
            Ok(now) => (mixed, now, true),
            Err(_) => (living.clone(), read(&living)?, false),
        };
        let next = read(&merge(&living, &asked, |effect| effect != Effect::WithNextStart)).ok();
        let next_differs = next.is_some();
        let next = next.filter(|next| next.config != now.config).map(|mut next| {
            // The keeper does not resize its boot set.
            next.config.remount.clone_from(&now.config.remount);
            Box::new(next)
        });
        let waits = |effect| !(mixes && effect == Effect::AtTakeOver);
        let differs = |table: &Table| read(table).map_or(true, |other| other.config != now.config);
        let pending = changes(&table, &asked, waits).into_iter().filter(|change| differs(&change.applied));
        let pending = pending.map(|change| {
            let with_guest = change.effect != Effect::WithNextStart && next_differs;
            let until = if with_guest { PendingUntil::NextGuest } else { PendingUntil::NextStart };
            PendingChange { key: change.key, until }
        });
        Ok(Self { pending: pending.collect(), next, ..now.into() })
    }
}

/// Prefix of default names in a repeated section whose tables are told apart by name.
fn name_prefix(section: Section) -> Option<&'static str> {
    match section {
        Section::Disk => Some("disk"),
        Section::Nvram => Some("nvram"),
        _ => None,
    }
}

/// The tables of a section.
fn tables_of(table: &mut Table, section: Section) -> Vec<&mut Table> {
    let Some(path) = section.table() else { return vec![table] };
    let mut parts = path.split('.');
    let first = parts.next().and_then(|part| table.get_mut(part));
    match parts.try_fold(first, |value, part| Some(value?.as_table_mut()?.get_mut(part))).flatten() {
        Some(Value::Table(table)) => vec![table],
        Some(Value::Array(items)) => items.iter_mut().filter_map(Value::as_table_mut).collect(),
        _ => Vec::new(),
    }
}

/// `living`, with `asked`'s values for keys of the given effects.
fn merge(living: &Table, asked: &Table, takes: impl Fn(Effect) -> bool + Copy) -> Table {
    let mut merged = living.clone();
    for section in Section::ALL {
        match section.table() {
            None => take_fields(&mut merged, asked, section, takes),
            Some(key) if section.repeats() => merge_repeated(&mut merged, asked, section, key, takes),
            // `remount.ready` comes and goes with `remount`.
            Some(key) if !key.contains('.') && takes(effect_of(section)) => replace(&mut merged, asked, key),
            Some(_) => {}
        }
    }
    merged
}

fn merge_repeated(
    merged: &mut Table,
    asked: &Table,
    section: Section,
    key: &str,
    takes: impl Fn(Effect) -> bool + Copy,
) {
    if Field::of_section(section).all(|field| takes(field.effect)) {
        return replace(merged, asked, key);
    }
    let asked = items(asked, key);
    for item in tables_of(merged, section) {
        let name = item.get("name").cloned();
        if let Some(asked) = asked.iter().find(|asked| name.is_some() && asked.get("name") == name.as_ref()) {
            take_fields(item, asked, section, takes);
        }
    }
}

fn take_fields(into: &mut Table, from: &Table, section: Section, takes: impl Fn(Effect) -> bool) {
    Field::of_section(section).filter(|field| takes(field.effect)).for_each(|field| replace(into, from, field.key));
}

fn replace(into: &mut Table, from: &Table, key: &str) {
    match from.get(key) {
        Some(value) => into.insert(key.to_owned(), value.clone()),
        None => into.remove(key),
    };
}

/// An optional section changes as a whole, so all its keys have the same effect (a test checks this).
fn effect_of(section: Section) -> Effect {
    Field::of_section(section).map(|field| field.effect).max().expect("a section has fields")
}

fn items<'a>(table: &'a Table, key: &str) -> Vec<&'a Table> {
    table.get(key).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_table).collect()
}

/// A key or section in which two files differ.
struct Change {
    key: String,
    effect: Effect,
    /// The configuration with this one change.
    applied: Table,
}

/// The keys that differ between `has` and `asked` and wait.
fn changes(has: &Table, asked: &Table, waits: impl Fn(Effect) -> bool) -> Vec<Change> {
    let mut changes = Vec::new();
    for section in Section::ALL {
        let heading = section.table();
        let (mine, theirs) = match heading {
            None => (vec![has], vec![asked]),
            Some(key) if section.repeats() => (items(has, key), items(asked, key)),
            Some(key) => (subtable(has, key).into_iter().collect(), subtable(asked, key).into_iter().collect()),
        };
        let names = |items: &[&Table]| items.iter().map(|item| item.get("name").cloned()).collect::<Vec<_>>();
        let is_named = name_prefix(section).is_some();
        if let Some(key) = heading
            && (mine.len() != theirs.len() || is_named && names(&mine) != names(&theirs))
        {
            let effect = effect_of(section);
            if waits(effect) && !key.contains('.') {
                let mut applied = has.clone();
                replace(&mut applied, asked, key);
                changes.push(Change { key: key.to_owned(), effect, applied });
            }
            continue;
        }
        for (position, (mine, theirs)) in mine.iter().zip(&theirs).enumerate() {
            for field in Field::of_section(section).filter(|field| waits(field.effect)) {
                if mine.get(field.key) == theirs.get(field.key) {
                    continue;
                }
                let mut applied = has.clone();
                if let Some(entries) = tables_of(&mut applied, section).into_iter().nth(position) {
                    replace(entries, theirs, field.key);
                }
                let name = mine.get("name").and_then(Value::as_str).filter(|_| is_named);
                let key = match (heading, name) {
                    (None, _) => field.key.to_owned(),
                    (Some(heading), Some(name)) => format!("{heading}.{name}.{}", field.key),
                    (Some(heading), None) if section.repeats() => format!("{heading}[{position}].{}", field.key),
                    (Some(heading), None) => format!("{heading}.{}", field.key),
                };
                changes.push(Change { key, effect: field.effect, applied });
            }
        }
    }
    changes
}

fn subtable<'a>(table: &'a Table, path: &str) -> Option<&'a Table> {
    path.split('.').try_fold(table, |table, part| table.get(part)?.as_table())
}
