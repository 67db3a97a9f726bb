//! Changes keys in the text of a machine's file. Comments, order and spaces stay.

use toml_edit::{DocumentMut, Item, Table, TableLike, Value};

use super::origin::{Setting, steps};
use super::{Effect, Field, Section};
use crate::problem::Problem;

/// The text with these settings. It is TOML; what it means is not checked.
pub fn edit(text: &str, settings: &[Setting]) -> Result<String, Vec<Problem>> {
    let mut document: DocumentMut = text.parse().map_err(|error: toml_edit::TomlError| {
        vec![Problem::error("the file", error.message().replace('\n', ", "), "correct it first: `hearth check`")]
    })?;
    for setting in settings {
        put(document.as_table_mut(), setting).ok_or_else(|| {
            let hint = "repeated sections count from 0 and must exist, for example nets[0].forward";
            vec![Problem::error(&setting.key, "no such section", hint)]
        })?;
    }
    Ok(document.to_string())
}

/// None if the section does not exist.
fn put(table: &mut Table, setting: &Setting) -> Option<()> {
    let steps = steps(&setting.key)?;
    let (last, path) = steps.split_last()?;
    let mut table: &mut dyn TableLike = table;
    for (name, position) in path {
        table = match position {
            Some(at) => repeated(table.get_mut(name)?, *at)?,
            None => table.entry(name).or_insert_with(|| Item::Table(implicit())).as_table_like_mut()?,
        };
    }
    let (name, None) = last else { return None };
    let mut value: Value = setting.value.to_string().parse().expect("both crates write the same TOML");
    match table.get_mut(name).and_then(Item::as_value_mut) {
        Some(old) => {
            // A comment behind the value belongs to it.
            *value.decor_mut() = old.decor().clone();
            *old = value;
        }
        None => drop(table.insert(name, Item::Value(value))),
    }
    Some(())
}

/// A section that has a heading only if it has keys of its own.
fn implicit() -> Table {
    let mut table = Table::new();
    table.set_implicit(true);
    table
}

/// One of the sections with this heading.
fn repeated(item: &mut Item, at: usize) -> Option<&mut dyn TableLike> {
    match item {
        Item::ArrayOfTables(tables) => Some(tables.get_mut(at)?),
        Item::Value(Value::Array(tables)) => Some(tables.get_mut(at)?.as_inline_table_mut()?),
        _ => None,
    }
}

impl Setting {
    /// `KEY = VALUE`, as in the file.
    pub fn words(&self) -> String {
        format!("{} = {}", self.key, self.value)
    }

    /// When the change takes effect while a guest runs. None: there is no such key.
    pub fn effect(&self) -> Option<Effect> {
        let (table, key) = self.key.rsplit_once('.').map_or((None, &*self.key), |(table, key)| (Some(table), key));
        let table = table.map(|table| table.split('[').next().unwrap_or(table));
        let section = Section::ALL.into_iter().find(|section| section.table() == table)?;
        Field::of_section(section).find(|field| field.key == key).map(|field| field.effect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "# A web server.\nname = \"web\"\ncpus = 2   # as many as the host\n\n[boot] # from disk\n\
        firmware = \"bios\"\n\n# the second one is for data\n[[disks]]\npath = \"a\"\n[[disks]]\npath = \"b\"\n\n\
        [remount]\nready = { port = 80 }\n";

    #[track_caller]
    fn check(setting: &str, old: &str, new: &str) {
        let setting = Setting::parse(setting).unwrap();
        assert_eq!(edit(FILE, &[setting]).unwrap(), FILE.replacen(old, new, 1));
    }

    #[test]
    fn only_the_value_changes() {
        check("cpus=4", "cpus = 2 ", "cpus = 4 ");
        check("boot.firmware=uefi", "\"bios\"", "\"uefi\"");
        check("disks[1].path=/srv/c", "\"b\"", "\"/srv/c\"");
        check("remount.ready.port=81", "port = 80", "port = 81");
    }

    #[test]
    fn new_keys_and_sections_are_added_where_they_belong() {
        check("memory=2GiB", "the host\n", "the host\nmemory = \"2GiB\"\n");
        check("disks[0].iops=70", "\"a\"\n", "\"a\"\niops = 70\n");
        check("crash.level=17", "{ port = 80 }\n", "{ port = 80 }\n\n[crash]\nlevel = 17\n");
    }

    #[test]
    fn missing_sections_and_bad_files_are_refused() {
        let refused = |text: &str, setting: &str| edit(text, &[Setting::parse(setting).unwrap()]).unwrap_err();
        assert!(refused(FILE, "disks[2].path=c")[0].to_string().contains("no such section"));
        assert!(refused(FILE, "cpus.x=1")[0].to_string().contains("no such section"));
        assert!(refused("cpus =", "cpus=2")[0].to_string().contains("correct it first"));
    }

    #[test]
    fn effect_is_that_of_the_table_of_keys() {
        let effect = |setting: &str| Setting::parse(setting).unwrap().effect();
        assert_eq!(effect("cpus=2"), Some(Effect::WithNextGuest));
        assert_eq!(effect("disks[1].path=/x"), Some(Effect::WithNextStart));
        assert_eq!(effect("remount.ready.port=81"), Some(Effect::AtTakeOver));
        assert_eq!(effect("cpuz=2"), None);
    }
}
