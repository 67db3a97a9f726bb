//! Columns of the table of keys (`file`): a key's location, its values, when a change takes effect, whom to trust.

use toml::Value;

use super::AUTO_USER;
use super::file::FIELDS;

/// Section of the file that a key belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Section {
    Machine,
    Boot,
    Crash,
    Watchdog,
    Rejuvenate,
    Remount,
    Ready,
    ObjectStore,
    Disk,
    Nvram,
    Net,
}

impl Section {
    pub const ALL: [Self; 11] = [
        Self::Machine,
        Self::Boot,
        Self::Crash,
        Self::Watchdog,
        Self::Rejuvenate,
        Self::Remount,
        Self::Ready,
        Self::ObjectStore,
        Self::Disk,
        Self::Nvram,
        Self::Net,
    ];

    /// Heading in the file; the machine's own keys have none.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Machine => "",
            Self::Boot => "[boot]",
            Self::Crash => "[crash]",
            Self::Watchdog => "[watchdog]",
            Self::Rejuvenate => "[rejuvenate]",
            Self::Remount => "[remount]",
            Self::Ready => "[remount.ready]",
            Self::ObjectStore => "[object_store]",
            Self::Disk => "[[disks]]",
            Self::Nvram => "[[nvram]]",
            Self::Net => "[[nets]]",
        }
    }

    /// Path of this section's table in the file; none for the machine's own keys.
    pub fn table(self) -> Option<&'static str> {
        match self {
            Self::Machine => None,
            other => Some(other.heading().trim_matches(['[', ']'])),
        }
    }

    /// Whether the heading may be repeated.
    pub fn repeats(self) -> bool {
        matches!(self, Self::Disk | Self::Nvram | Self::Net)
    }

    pub fn meaning(self) -> &'static str {
        match self {
            Self::Machine => "The machine itself. These keys stand at the top of the file, before any heading.",
            Self::Boot => "How the guest boots: a kernel, or firmware that finds one on the first disk.",
            Self::Crash => "How Hearth handles crashes and writes dumps: see crash-recovery.md.",
            Self::Watchdog => "Gives the guest a watchdog device (Intel 6300ESB).",
            Self::Rejuvenate => {
                "Lets the keeper replace QEMU automatically, as `every` and `rss_growth_mib` demand: see \
                 rejuvenation.md."
            }
            Self::Remount => {
                "Keeps the blocks that the machine reads until it is ready in memory for its next boot: see \
                 fast-remount.md. Does not work with `ember = \"off\"`."
            }
            Self::Ready => {
                "Readiness probe: it ends the boot, as `hearth ready` does. Give one of these keys. The short form is \
                 `ready = { port = 8080 }`."
            }
            Self::ObjectStore => {
                "Access to object stores, and their cache on this host, for snapshots at an `s3://`, `gs://`, `az://` \
                 or `https://` address. Snapshots do not include this section. See object-store.md."
            }
            Self::Nvram => {
                "One disk backed by host memory, for journals and logs; repeat the heading for each. The guest sees \
                 them after its disks, in this order, with `pmem` devices last: see fast-remount.md."
            }
            Self::Disk => {
                "One virtual disk; repeat the heading for each. The guest sees them in this order. A machine has at \
                 most 16 disks and NVRAM devices."
            }
            Self::Net => "One network device; repeat the heading for each. A machine has at most 7.",
        }
    }
}

/// Type of a key's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    /// A path; relative paths start in the file's folder.
    Path,
    /// `512MiB`, `2GiB`.
    Size,
    /// A size, or percent of the RAM.
    SizeOrPercent,
    /// `90s`, `30d`.
    Time,
    Integer {
        min: i64,
        max: i64,
    },
    Boolean,
    Choice(&'static [&'static str]),
    TextList,
}

/// When a change of a key takes effect while a guest runs. A keeper reads the file once, at its own start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// Only the keeper uses it, so it takes effect when a keeper starts, also for a guest that it takes over.
    AtTakeOver,
    /// A running guest was started with it. The change waits for the next guest's QEMU.
    WithNextGuest,
    /// The keeper itself depends on it (folders, disks). The change waits until the machine has stopped.
    WithNextStart,
}

impl Effect {
    /// The words used in status and docs.
    pub fn words(self) -> &'static str {
        match self {
            Self::AtTakeOver => "next keeper",
            Self::WithNextGuest => "next guest",
            Self::WithNextStart => "next start",
        }
    }
}

/// Whether a restore accepts a key from a snapshot's machine.toml, because whoever made the snapshot may be a stranger.
#[derive(Clone, Copy)]
pub enum Trust {
    /// It describes the guest or its resources: the snapshot's value is used.
    Guest,
    /// It names a program, file, user, port or protection of the host: only the operator may set it.
    Host,
    /// `Host`, except for these values.
    HostUnless(fn(&Value) -> bool),
    /// Ignored: the restored machine gets its own value.
    Replaced,
}

/// Firmware of the host's QEMU, given by name rather than path.
pub(super) fn is_own_firmware(value: &Value) -> bool {
    matches!(value.as_str(), Some("bios" | "uefi"))
}

/// A user that nothing else on the host uses.
pub(super) fn is_own_user(value: &Value) -> bool {
    value.as_str() == Some(AUTO_USER)
}

/// A comma starts QEMU options, some of which name files.
pub(super) fn is_plain(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.contains(','))
}

pub(super) fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

/// A key of the configuration file.
pub struct Field {
    pub trust: Trust,
    pub section: Section,
    pub key: &'static str,
    pub effect: Effect,
    pub kind: Kind,
    /// The default in words; empty if the key is required.
    pub default: &'static str,
    /// A TOML value.
    pub example: &'static str,
    pub meaning: &'static str,
}

pub const ON_OFF: &[&str] = &["on", "off"];
pub const OWNERS: &[&str] = &["hearth", "libvirt"];
pub const ACCELERATORS: &[&str] = &["auto", "kvm", "tcg"];
pub const DISPLAYS: &[&str] = &["none", "vnc"];
pub const ADMISSION: &[&str] = &["dump", "always"];
pub const ON_PANIC: &[&str] = &["dump+recover", "dump", "recover", "pause"];
pub const DUMP_FORMATS: &[&str] = &["kdump", "elf"];
pub const COMPRESSIONS: &[&str] = &["zstd", "lzo", "zlib", "none"];
pub const DISK_TIMES: &[&str] = &["recovery-first", "balanced", "dump-first"];
pub const WATCHDOG_ACTIONS: &[&str] = &["crash", "nmi", "reset"];
pub const DISK_FORMATS: &[&str] = &["raw", "qcow2"];
pub const MIRRORS: &[&str] = &["none", "async", "sync"];
pub const NVRAM_DEVICES: &[&str] = &["disk", "pmem"];
pub const NET_KINDS: &[&str] = &["user", "passt", "tap"];

impl Field {
    pub fn of_section(section: Section) -> impl Iterator<Item = &'static Self> {
        FIELDS.iter().filter(move |field| field.section == section)
    }

    /// The default as a value of the file, unless it is a path or a text, or depends on something else.
    #[cfg(test)]
    pub fn default_value(&self) -> Option<Value> {
        let word = self.default.strip_prefix('`').and_then(|text| Some(text.split_once('`')?.0));
        match self.kind {
            Kind::Integer { .. } => self.default.parse::<i64>().ok().map(Value::from),
            Kind::Boolean => word?.parse::<bool>().ok().map(Value::from),
            Kind::Size | Kind::SizeOrPercent | Kind::Time | Kind::Choice(_) => word.map(Value::from),
            Kind::Text | Kind::Path | Kind::TextList => None,
        }
    }

    /// The type of the key's value, in words.
    pub fn takes(&self) -> String {
        match self.kind {
            Kind::Text => "string".to_owned(),
            Kind::Path => "path".to_owned(),
            Kind::Size => "size".to_owned(),
            Kind::SizeOrPercent => "size or percent".to_owned(),
            Kind::Time => "time".to_owned(),
            Kind::Integer { min, max } => format!("integer, {min} to {max}"),
            Kind::Boolean => "`true` or `false`".to_owned(),
            Kind::Choice(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
            Kind::TextList => "list of strings".to_owned(),
        }
    }
}
