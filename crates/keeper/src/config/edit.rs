//! Changes keys in the text of a machine's file. Comments, order and spaces stay.

use toml_edit::{Document, DocumentMut, Item, Table, TableLike, TomlError, Value};

use super::origin::{Setting, steps};
use super::{Effect, Field, Section};
use crate::problem::Problem;

const NO_SECTION: [&str; 2] =
    ["no such section", "repeated sections count from 0 and must exist, for example nets[0].forward"];
const REPEATED: [&str; 2] =
    ["repeated sections cannot be set as a whole", "set a key of one, for example nets[0].forward"];
/// The comments between its keys would be lost.
const WHOLE: [&str; 2] =
    ["the section is in the file, and cannot be set as a whole", "set its keys, for example boot.firmware"];

/// The text with this setting. It is TOML; what it means is not checked. It stays as it is if the key that is to be removed is not
/// there.
pub fn edit(text: &str, setting: &Setting) -> Result<String, Vec<Problem>> {
    let no_toml = |error: TomlError| {
        let hint = "correct it first: `hearth check`";
        vec![Problem::error("the file", error.message().replace('\n', ", "), hint)]
    };
    let refuse = |[what, hint]: [&str; 2]| vec![Problem::error(&setting.key, what, hint)];
    if Section::ALL.into_iter().any(|section| section.repeats() && section.table() == Some(&*setting.key)) {
        return Err(refuse(REPEATED));
    }
    let Some(value) = &setting.value else {
        if setting.field().is_none() {
            return Err(refuse(["no such key", "a whole section is removed in the file itself"]));
        }
        return without(Document::parse(text).map_err(no_toml)?, &setting.key).ok_or_else(|| refuse(NO_SECTION));
    };
    let mut document: DocumentMut = text.parse().map_err(no_toml)?;
    put(document.as_table_mut(), &setting.key, value).map_err(refuse)?;
    Ok(document.to_string())
}

/// The text without a key, if it is there: without its lines, unless it is in an inline table. Comments above it stay. None if
/// the repeated section does not exist.
fn without(document: Document<&str>, key: &str) -> Option<String> {
    let steps = steps(key)?;
    let ((name, None), path) = steps.split_last()? else { return None };
    let text = document.raw();
    let (mut table, mut is_inline): (&dyn TableLike, _) = (document.as_table(), false);
    for (name, position) in path {
        let item = table.get(name);
        is_inline |= item.is_some_and(Item::is_value);
        table = match (position, item) {
            (Some(at), Some(Item::ArrayOfTables(tables))) => tables.get(*at)?,
            (Some(at), item) => item?.as_array()?.get(*at)?.as_inline_table()?,
            (None, None) => return Some(text.to_owned()),
            (None, Some(item)) => item.as_table_like()?,
        };
    }
    let (Some(key), Some(item)) = (table.key(name), table.get(name)) else { return Some(text.to_owned()) };
    let (start, end) = (key.span()?.start, item.span()?.end);
    if is_inline {
        let mut document = document.into_mut();
        below(document.as_table_mut(), path)?.remove(name)?;
        return Some(document.to_string());
    }
    let first = text[..start].rfind('\n').map_or(0, |end| end + 1);
    let next = text[end..].find('\n').map_or(text.len(), |length| end + length + 1);
    Some([&text[..first], &text[next..]].concat())
}

/// The error says what cannot be set, and what to do.
fn put(table: &mut Table, key: &str, value: &toml::Value) -> Result<(), [&'static str; 2]> {
    let steps = steps(key).ok_or(NO_SECTION)?;
    let Some(((name, None), path)) = steps.split_last() else { return Err(NO_SECTION) };
    let table = below(table, path).ok_or(NO_SECTION)?;
    let mut value: Value = value.to_string().parse().expect("both crates write the same TOML");
    match table.get_mut(name) {
        Some(Item::Value(old)) => {
            // A comment behind the value belongs to it.
            *value.decor_mut() = old.decor().clone();
            *old = value;
        }
        Some(Item::Table(_)) => return Err(WHOLE),
        _ => drop(table.insert(name, Item::Value(value))),
    }
    Ok(())
}

/// The table at this path. Makes those that are missing, except repeated ones.
fn below<'a>(table: &'a mut Table, path: &[(&str, Option<usize>)]) -> Option<&'a mut dyn TableLike> {
    path.iter().try_fold(table as &mut dyn TableLike, |table, (name, position)| match position {
        Some(at) => repeated(table.get_mut(name)?, *at),
        None => table.entry(name).or_insert_with(|| Item::Table(implicit())).as_table_like_mut(),
    })
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
    /// `KEY = VALUE`, as in the file, or that the key is removed.
    pub fn words(&self) -> String {
        match &self.value {
            Some(value) => format!("{} = {value}", self.key),
            None => format!("{} is removed", self.key),
        }
    }

    /// That the file says so already.
    pub fn words_if_unchanged(&self) -> String {
        match &self.value {
            Some(value) => format!("{} is {value} already", self.key),
            None => format!("{} has its default already", self.key),
        }
    }

    /// When the change takes effect while a guest runs. A section changes with all its keys, and the slowest one decides. None:
    /// there is no such key.
    pub fn effect(&self) -> Option<Effect> {
        let below = format!("{}.", self.key);
        let is_changed = |section: &Section| {
            let table = section.table().unwrap_or_default();
            table == self.key || table.starts_with(&below)
        };
        let fields = Section::ALL.into_iter().filter(is_changed).flat_map(Field::of_section);
        fields.chain(self.field()).map(|field| field.effect).max()
    }

    fn field(&self) -> Option<&'static Field> {
        let (table, key) = self.key.rsplit_once('.').map_or((None, &*self.key), |(table, key)| (Some(table), key));
        let table = table.map(|table| table.split('[').next().unwrap_or(table));
        let section = Section::ALL.into_iter().find(|section| section.table() == table)?;
        Field::of_section(section).find(|field| field.key == key)
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
        assert_eq!(edit(FILE, &setting).unwrap(), FILE.replacen(old, new, 1));
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
        check("crash={ level = 17 }", "the host\n", "the host\ncrash = { level = 17 }\n");
        check("crash.level=17", "{ port = 80 }\n", "{ port = 80 }\n\n[crash]\nlevel = 17\n");
    }

    #[test]
    fn key_without_value_is_removed_and_comments_stay() {
        check("cpus=", "cpus = 2   # as many as the host\n", "");
        check("boot.firmware=", "firmware = \"bios\"\n", "");
        check("disks[0].path=", "path = \"a\"\n", "");
        check("remount.ready.port=", "{ port = 80 }", "{}");
        let many = "# first\nextra_qemu_args = [\n  \"-s\", # gdb\n]\n# last";
        let removed = |text: &str, key: &str| edit(text, &Setting::parse(key).unwrap());
        assert_eq!(removed(many, "extra_qemu_args=").unwrap(), "# first\n# last");
        assert_eq!(removed("boot.kernel = \"k\"\ncpus = 2", "boot.kernel=").unwrap(), "cpus = 2");
        assert_eq!(
            removed("disks = [{ path = \"a\", iops = 7 }]\n", "disks[0].iops=").unwrap(),
            "disks = [{ path = \"a\"}]\n"
        );
        let refused = |key: &str, expect: &str| {
            let problem = removed(FILE, key).unwrap_err()[0].to_string();
            assert!(problem.contains(expect), "{problem}");
        };
        refused("disks[2].path=", "disks[2].path: no such section");
        refused("nets[0].mac=", "nets[0].mac: no such section");
        refused("boot=", "boot: no such key; a whole section");
        refused("cpuz=", "cpuz: no such key");
    }

    #[test]
    fn removal_of_an_absent_key_changes_nothing() {
        for key in ["memory=", "boot.kernel=", "disks[0].iops=", "crash.level=", "remount.ready.unit="] {
            check(key, "", "");
        }
    }

    #[test]
    fn missing_sections_and_bad_files_are_refused() {
        let refused = |text: &str, setting: &str| edit(text, &Setting::parse(setting).unwrap()).unwrap_err();
        assert!(refused(FILE, "disks[2].path=c")[0].to_string().contains("no such section"));
        assert!(refused(FILE, "cpus.x=1")[0].to_string().contains("no such section"));
        for setting in ["nets=[]", "disks=[{ path = \"/srv/c\" }]", "nvram={}"] {
            assert!(refused(FILE, setting)[0].to_string().contains("cannot be set as a whole"), "{setting}");
        }
        for (text, setting) in [
            (FILE, "boot={ firmware = \"uefi\" }"),
            (FILE, "remount={ persist = true }"),
            ("[remount.ready]\n# a comment\nport = 80\n", "remount={ persist = true }"),
            ("boot.firmware = \"bios\" # a comment\n", "boot={ firmware = \"uefi\" }"),
        ] {
            assert!(refused(text, setting)[0].to_string().contains("the section is in the file"), "{setting}");
        }
        assert!(refused("cpus =", "cpus=2")[0].to_string().contains("correct it first"));
    }

    #[test]
    fn effect_is_that_of_the_table_of_keys() {
        let effect = |setting: &str| Setting::parse(setting).unwrap().effect();
        assert_eq!(effect("cpus=2"), Some(Effect::WithNextGuest));
        assert_eq!(effect("disks[1].path=/x"), Some(Effect::WithNextStart));
        assert_eq!(effect("remount.ready.port=81"), Some(Effect::AtTakeOver));
        assert_eq!(effect("boot={firmware=\"bios\"}"), Some(Effect::WithNextGuest));
        assert_eq!(effect("remount.ready={ port = 8080 }"), Some(Effect::AtTakeOver));
        let keys = [Section::Remount, Section::Ready].into_iter().flat_map(Field::of_section);
        assert_eq!(effect("remount={ready={port=81}}"), keys.map(|field| field.effect).max());
        assert_eq!(effect("cpuz=2"), None);
    }
}
