//! Origin: which keys of a machine.toml only the host's operator may set, and how `--set` overrides them.
//!
//! The maker of a snapshot controls its machine.toml. The table of keys marks those that name programs, files, users or
//! ports of the restoring host (`Trust`).

use toml::{Table, Value};

use super::ConfigFile;
use super::edit::edit;
use super::fields::{Field, Section, Trust};
use super::shape::{prefix_of, subsection};
use crate::problem::Problem;

/// A key that names something of the host, with its value.
#[derive(Clone, Debug, PartialEq)]
pub struct HostKey {
    /// The key as shown in messages: `boot.kernel`, `nets[0].forward`.
    pub key: String,
    pub value: Value,
}

/// One `KEY=VALUE` of the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    pub key: String,
    /// None: `KEY=`, which removes the key.
    pub(super) value: Option<Value>,
}

impl Setting {
    pub fn new(key: &str, value: Value) -> Self {
        Self { key: key.to_owned(), value: Some(value) }
    }

    /// Values are written as in machine.toml; quotes around a string are optional. No value stands for the key's default.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, for example memory_folder=/dev/shm/web2")?;
        let (key, value) = (key.trim(), value.trim());
        if steps(key).is_none() {
            return Err(format!("{key:?} is not a key; keys look like cpus, crash.level or nets[0].forward"));
        }
        let parsed = format!("value = {value}").parse::<Table>().ok().filter(|table| table.len() == 1);
        let typed = parsed.and_then(|mut table| table.remove("value")).unwrap_or_else(|| Value::String(value.into()));
        Ok(Self { key: key.to_owned(), value: (!value.is_empty()).then_some(typed) })
    }
}

/// The key's path: names, some with an index.
pub(super) fn steps(key: &str) -> Option<Vec<(&str, Option<usize>)>> {
    let is_name = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
    let step = |step| match str::split_once(step, '[') {
        Some((name, position)) => Some((name, Some(position.strip_suffix(']')?.parse().ok()?))),
        None => Some((step, None)),
    };
    let steps: Option<Vec<(&str, Option<usize>)>> = key.split('.').map(step).collect();
    steps.filter(|steps| steps.iter().all(|(name, _)| is_name(name)))
}

impl ConfigFile {
    /// All keys that only the host's operator may set.
    pub fn host_keys(&self) -> Vec<HostKey> {
        let mut found = Vec::new();
        visit(&self.table(), Section::Machine, "", &mut found);
        found
    }

    /// The file with the command line's settings applied. The error lists everything that is wrong with them.
    pub fn with_settings(self, settings: &[Setting]) -> Result<Self, Vec<Problem>> {
        if settings.is_empty() {
            return Ok(self);
        }
        let text = settings.iter().try_fold(self.to_text(), |text, setting| edit(&text, setting))?;
        Self::parse(&text)
    }

    pub(super) fn table(&self) -> Table {
        Table::try_from(self).expect("what was typed in TOML is a table")
    }
}

fn visit(table: &Table, section: Section, prefix: &str, found: &mut Vec<HostKey>) {
    for (name, value) in table {
        match (subsection(section, name), value) {
            (Some(below), Value::Table(table)) => visit(table, below, &prefix_of(below, name), found),
            (Some(below), Value::Array(items)) => {
                let tables = items.iter().filter_map(Value::as_table).enumerate();
                tables.for_each(|(at, table)| visit(table, below, &format!("{name}[{at}]."), found));
            }
            _ if is_of_host(section, name, value) => {
                found.push(HostKey { key: format!("{prefix}{name}"), value: value.clone() });
            }
            _ => {}
        }
    }
}

fn is_of_host(section: Section, name: &str, value: &Value) -> bool {
    match Field::of_section(section).find(|field| field.key == name).map(|field| field.trust) {
        Some(Trust::Guest | Trust::Replaced) => false,
        Some(Trust::HostUnless(is_harmless)) => !is_harmless(value),
        Some(Trust::Host) | None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::super::fields::Kind;
    use super::super::file::FIELDS;
    use super::*;

    /// A file with one key, set to its example.
    fn with(field: &Field) -> ConfigFile {
        let line = format!("{} = {}\n", field.key, field.example);
        let heading = match field.section {
            Section::Machine => String::new(),
            other => format!("{}\n", other.heading()),
        };
        ConfigFile::parse(&format!("{heading}{line}")).unwrap()
    }

    /// Keys whose type names something of the host must not be marked as the guest's.
    #[test]
    fn path_keys_belong_to_the_host() {
        for field in FIELDS {
            let keys = with(field).host_keys();
            let is_replaced = matches!(field.trust, Trust::Replaced);
            if field.kind == Kind::Path && !is_replaced && field.key != "firmware" {
                assert_eq!(keys.len(), 1, "{:?} {}", field.section, field.key);
            }
            let is_host = matches!(field.trust, Trust::Host);
            assert!(!is_host || keys.len() == 1, "{:?} {}", field.section, field.key);
        }
    }

    #[test]
    fn harmless_values_of_a_host_key_are_free() {
        let check = |text: &str, expect: &[&str]| {
            let keys: Vec<_> = ConfigFile::parse(text).unwrap().host_keys().into_iter().map(|key| key.key).collect();
            assert_eq!(keys, expect, "{text}");
        };
        check("[boot]\nfirmware = \"uefi\"\n", &[]);
        check("[boot]\nfirmware = \"bios\"\n", &[]);
        check("[boot]\nfirmware = \"/etc/shadow\"\n", &["boot.firmware"]);
        check("sandbox = true\n", &[]);
        check("qemu_user = \"auto\"\n", &[]);
        check("qemu_user = \"root\"\n", &["qemu_user"]);
        check("sandbox = false\n", &["sandbox"]);
        check("machine_type = \"pc-q35-7.2\"\n", &[]);
        check("machine_type = \"q35,dumpdtb=/etc/passwd\"\n", &["machine_type"]);
        check("[[nets]]\n[[nets]]\nforward = [\"1:2\"]\nifname = \"tap0\"\n", &["nets[1].forward", "nets[1].ifname"]);
        check("[remount]\npersist_file = \"x\"\n[remount.ready]\nport = 8080\n", &["remount.persist_file"]);
    }

    #[test]
    fn settings_override_keys() {
        let typed = "name = \"web\"\ncpus = 2\n[[nets]]\nforward = [\"127.0.0.1:8080:80\"]\n";
        let set = |settings: &[&str]| {
            let settings: Vec<_> = settings.iter().map(|setting| Setting::parse(setting).unwrap()).collect();
            ConfigFile::parse(typed).unwrap().with_settings(&settings)
        };
        let changed = set(&[
            "nets[0].forward=[\"127.0.0.1:8081:80\"]",
            "memory_folder = /dev/shm/two",
            "crash.level=17",
            "remount.ready.port=8081",
            "name=",
        ])
        .unwrap();
        assert_eq!(changed.nets[0].forward, Some(vec!["127.0.0.1:8081:80".to_owned()]));
        assert_eq!((changed.memory_folder.as_deref(), changed.cpus), (Some("/dev/shm/two"), Some(2)));
        assert_eq!((changed.crash.unwrap().level, changed.name), (Some(17), None));
        assert_eq!(changed.remount.unwrap().ready.unwrap().port, Some(8081));
        let refused = |setting: &str, expect: &str| {
            let problems = set(&[setting]).unwrap_err();
            assert!(problems[0].to_string().contains(expect), "{problems:?}");
        };
        refused("nets[1].forward=[]", "no such section");
        refused("cpuz=3", "did you mean cpus?");
        refused("cpus=many", "is not an integer");
        for wrong in ["cpus", "=3", "nets[x].forward=1", "Nets=1", "a..b=1"] {
            assert!(Setting::parse(wrong).is_err(), "{wrong}");
        }
        // A string that contains a line break and more stays a string.
        let sly = Setting::parse("name=1\nqemu=\"/x\"").unwrap();
        assert_eq!(sly.value, Some(Value::String("1\nqemu=\"/x\"".into())));
    }
}
