//! The table of fields: key, type, default, meaning. What a file may hold, the suggestions for what it may not, and
//! `docs/config.md` come from here; a test holds it against `ConfigFile`.

use toml::Value;

use super::AUTO_USER;

/// Where in the file a field stands.
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

    /// As it is written in the file; the machine's own fields have no heading.
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

    /// The key of this section's table in the file; none for the machine's own fields.
    pub fn table(self) -> Option<&'static str> {
        match self {
            Self::Machine => None,
            other => Some(other.heading().trim_matches(['[', ']'])),
        }
    }

    /// Whether the heading may be given again and again.
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
                 or `https://` address. Snapshots do not include this section. See lazy-restore.md."
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

/// What a field takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Text,
    /// Relative ones start in the file's folder.
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

/// When a change of a key takes effect while a guest of the machine lives. A keeper reads the file once, at its own start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effect {
    /// The keeper alone acts on it: it counts from the keeper's start, also for a guest that the keeper takes over.
    AtTakeOver,
    /// A living guest was started with it. The change waits until that guest has ended, and its next QEMU boots.
    WithNextGuest,
    /// The keeper itself is built on it (folders, disks). The change waits until the machine has stopped.
    WithNextStart,
}

impl Effect {
    /// The words of status and docs.
    pub fn words(self) -> &'static str {
        match self {
            Self::AtTakeOver => "next keeper",
            Self::WithNextGuest => "next guest",
            Self::WithNextStart => "next start",
        }
    }
}

/// Whose word a restore takes for a field that stands in a snapshot's machine.toml: whoever made the snapshot may be a stranger.
#[derive(Clone, Copy)]
pub enum Trust {
    /// It says what the guest is, or what it gets: the snapshot's.
    Guest,
    /// It names a program, file, user, port or protection of the host: only the operator's.
    Host,
    /// `Host`, but for these values.
    HostUnless(fn(&Value) -> bool),
    /// Nobody's: the restored machine gets its own.
    Replaced,
}

/// Words for firmware that comes with the host's QEMU, and no path.
fn is_own_firmware(value: &Value) -> bool {
    matches!(value.as_str(), Some("bios" | "uefi"))
}

/// A user that nothing else of the host is.
fn is_own_user(value: &Value) -> bool {
    value.as_str() == Some(AUTO_USER)
}

/// What follows a comma are options of QEMU's, some of which name files.
fn is_plain(value: &Value) -> bool {
    value.as_str().is_some_and(|text| !text.contains(','))
}

fn is_true(value: &Value) -> bool {
    value.as_bool() == Some(true)
}

/// One field.
pub struct Field {
    pub trust: Trust,
    pub section: Section,
    pub key: &'static str,
    pub effect: Effect,
    pub kind: Kind,
    /// In words; empty if the field must be given.
    pub default: &'static str,
    /// A TOML value.
    pub example: &'static str,
    pub meaning: &'static str,
}

pub const ON_OFF: &[&str] = &["on", "off"];
pub const ACCELERATORS: &[&str] = &["auto", "kvm", "tcg"];
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

#[expect(clippy::too_many_arguments, reason = "a table row has as many columns")]
const fn field(
    trust: Trust,
    section: Section,
    key: &'static str,
    effect: Effect,
    kind: Kind,
    default: &'static str,
    example: &'static str,
    meaning: &'static str,
) -> Field {
    Field { trust, section, key, effect, kind, default, example, meaning }
}

const fn machine(
    trust: Trust,
    key: &'static str,
    effect: Effect,
    kind: Kind,
    default: &'static str,
    example: &'static str,
    meaning: &'static str,
) -> Field {
    field(trust, Section::Machine, key, effect, kind, default, example, meaning)
}

const fn crash(
    trust: Trust,
    key: &'static str,
    effect: Effect,
    kind: Kind,
    default: &'static str,
    example: &'static str,
    meaning: &'static str,
) -> Field {
    field(trust, Section::Crash, key, effect, kind, default, example, meaning)
}

const fn rejuvenate(
    trust: Trust,
    key: &'static str,
    effect: Effect,
    kind: Kind,
    default: &'static str,
    example: &'static str,
    meaning: &'static str,
) -> Field {
    field(trust, Section::Rejuvenate, key, effect, kind, default, example, meaning)
}

const fn disk(
    trust: Trust,
    key: &'static str,
    effect: Effect,
    kind: Kind,
    default: &'static str,
    example: &'static str,
    meaning: &'static str,
) -> Field {
    field(trust, Section::Disk, key, effect, kind, default, example, meaning)
}

use Effect::{AtTakeOver, WithNextGuest, WithNextStart};
use Kind::{Boolean, Choice, Integer, Path, Size, SizeOrPercent, Text, TextList, Time};
use Trust::{Guest, Host, HostUnless, Replaced};

/// All fields, in the order of the page.
pub static FIELDS: &[Field] = &[
    machine(
        Replaced,
        "name",
        WithNextStart,
        Text,
        "",
        r#""web""#,
        "Name of the machine: 1 to 32 letters, digits, `-`, `_` or `.`, beginning with a letter or digit.",
    ),
    machine(
        Guest,
        "memory",
        WithNextGuest,
        Size,
        "",
        r#""2GiB""#,
        "Guest RAM: a multiple of 2 MiB, from 32MiB to 16TiB.",
    ),
    machine(Guest, "cpus", WithNextGuest, Integer { min: 1, max: 255 }, "1", "2", "Number of virtual processors."),
    machine(
        Guest,
        "cpu_model",
        WithNextGuest,
        Text,
        "`host` under KVM, `max,-erms,-fsrm,-cx16` under TCG",
        r#""Skylake-Server,-hle,-rtm""#,
        "CPU model for QEMU, with features.",
    ),
    machine(
        Guest,
        "accelerator",
        WithNextGuest,
        Choice(ACCELERATORS),
        "`auto`",
        r#""auto""#,
        "Accelerator for QEMU. `auto` uses KVM if a test guest runs on it, else TCG; `hearth status` shows which and \
         why.",
    ),
    machine(
        HostUnless(is_plain),
        "machine_type",
        WithNextGuest,
        Text,
        "the newest one of the first QEMU, then fixed",
        r#""pc-q35-7.2""#,
        "QEMU machine type, which fixes the guest's devices. It must be a versioned q35.",
    ),
    machine(
        Host,
        "qemu",
        AtTakeOver,
        Path,
        "`qemu-system-x86_64` on PATH",
        r#""/usr/bin/qemu-system-x86_64""#,
        "QEMU program, version 7.2 or later.",
    ),
    machine(
        HostUnless(is_own_user),
        "qemu_user",
        WithNextGuest,
        Text,
        "the keeper's own user",
        r#""nobody""#,
        "User that QEMU switches to once its files are open; the keeper must run as root. Recommended: `\"auto\"`, a \
         user id for this machine alone, 2013265920 or higher, without an entry in /etc/passwd.",
    ),
    machine(
        Host,
        "runtime_folder",
        WithNextStart,
        Path,
        "`/run/hearth/NAME`",
        r#""/run/hearth/web""#,
        "Folder for sockets, logs and the journal, which are small. Default without root: \
         `$XDG_RUNTIME_DIR/hearth/NAME`.",
    ),
    machine(
        Host,
        "memory_folder",
        WithNextStart,
        Path,
        "`/dev/shm/hearth/NAME`",
        r#""/dev/shm/hearth/web""#,
        "Folder for the guest's RAM files. If the folder does not have the machine's name, Hearth creates a subfolder \
         of that name, because machines cannot share one. It must be on a tmpfs or DAX file system with space for the \
         memory and the slack. Default without root: `/dev/shm/hearth-UID/NAME`.",
    ),
    machine(
        Guest,
        "ember",
        WithNextGuest,
        Choice(ON_OFF),
        "`on`",
        r#""on""#,
        "Whether to keep a dead incarnation's memory as a source of disk blocks. With `off` every reboot is cold.",
    ),
    machine(
        Guest,
        "on_panic",
        AtTakeOver,
        Choice(ON_PANIC),
        "`dump+recover`; `recover` if the dump folder cannot be used",
        r#""dump+recover""#,
        "What to do after a kernel panic or watchdog timeout. `dump+recover` boots the next incarnation at once and \
         writes the dump meanwhile. `dump` writes the dump and leaves the guest paused. `recover` boots without a \
         dump. `pause` leaves the guest paused.",
    ),
    machine(
        Guest,
        "budget_slack",
        AtTakeOver,
        SizeOrPercent,
        "`3%`",
        r#""3%""#,
        "Host memory that the machine's files may use beyond its RAM: a size, or percent of the RAM (0 to 100).",
    ),
    machine(
        Guest,
        "admission",
        AtTakeOver,
        Choice(ADMISSION),
        "`dump`",
        r#""always""#,
        "When page faults limit the guest's memory growth, so that dead and living memory together never exceed the \
         budget. `dump`: while a dump holds dead memory. `always`: also while there is only an ember. Without \
         `always`, a guest that grows faster than the ember is trimmed may exceed the budget, which is reported.",
    ),
    machine(
        HostUnless(is_true),
        "sandbox",
        WithNextGuest,
        Boolean,
        "`true`",
        "true",
        "Whether to run QEMU in its seccomp sandbox, if the binary has one.",
    ),
    machine(
        Guest,
        "guest_agent",
        WithNextGuest,
        Boolean,
        "`false`",
        "true",
        "Adds a channel to qemu-guest-agent, which must run in the guest. `hearth save --freeze` (see lazy-restore.md) \
         and `remount.ready.unit` need it. It is an extra device.",
    ),
    machine(
        Host,
        "extra_qemu_args",
        WithNextGuest,
        TextList,
        "none",
        r#"["-device", "virtio-balloon-pci"]"#,
        "Arguments appended to QEMU's command line unchanged. Hearth does not check them, and they can break its \
         guarantees. If they contain `vmgenid`, Hearth adds no such device itself.",
    ),
    field(
        Host,
        Section::Boot,
        "kernel",
        WithNextGuest,
        Path,
        "none",
        r#""vmlinuz""#,
        "Linux kernel to boot directly. Give either this or `firmware`.",
    ),
    field(
        Host,
        Section::Boot,
        "initrd",
        WithNextGuest,
        Path,
        "none",
        r#""initrd.img""#,
        "Initial RAM disk; only with `kernel`.",
    ),
    field(
        Guest,
        Section::Boot,
        "cmdline",
        WithNextGuest,
        Text,
        "empty",
        r#""root=/dev/vda console=ttyS0""#,
        "Kernel command line; only with `kernel`.",
    ),
    field(
        HostUnless(is_own_firmware),
        Section::Boot,
        "firmware",
        WithNextGuest,
        Path,
        "`bios`, without `kernel`",
        r#""uefi""#,
        "`bios` (QEMU's SeaBIOS), `uefi` (the distribution's OVMF), or the path of a firmware image.",
    ),
    field(
        Host,
        Section::Boot,
        "firmware_vars",
        WithNextGuest,
        Path,
        "none",
        r#""web-vars.fd""#,
        "UEFI variable store: the machine's own, writable copy. Required with `uefi`.",
    ),
    crash(
        Host,
        "dump_folder",
        AtTakeOver,
        Path,
        "`/var/lib/hearth/NAME/dumps`",
        r#""/srv/dumps/web""#,
        "Folder for dumps, on a real disk rather than in host memory. Created when needed. Default without root: \
         `$XDG_STATE_HOME/hearth/NAME/dumps`.",
    ),
    crash(
        Guest,
        "level",
        AtTakeOver,
        Integer { min: 0, max: 31 },
        "31",
        "17",
        "Pages that dumps leave out, as makedumpfile's level: the sum of 1 zero pages, 2 cache, 4 private cache, 8 \
         user data, 16 free pages.",
    ),
    crash(
        Guest,
        "format",
        AtTakeOver,
        Choice(DUMP_FORMATS),
        "`kdump`",
        r#""kdump""#,
        "Format of dumps: `kdump` is compressed, `elf` is an uncompressed core file.",
    ),
    crash(
        Guest,
        "compression",
        AtTakeOver,
        Choice(COMPRESSIONS),
        "`zstd`",
        r#""lzo""#,
        "Compression of `kdump` files. Debian's makedumpfile reads only `lzo` and `zlib`; crash 8 and drgn read all.",
    ),
    crash(
        Guest,
        "keep_last",
        AtTakeOver,
        Integer { min: 1, max: 1000 },
        "5",
        "5",
        "Number of complete dumps to keep. When another is complete, the oldest is removed.",
    ),
    crash(
        Guest,
        "min_free",
        AtTakeOver,
        Size,
        "`1GiB`",
        r#""10GiB""#,
        "Free space to preserve in the dump folder. A dump that would use it waits, and says so.",
    ),
    crash(
        Guest,
        "chunk",
        AtTakeOver,
        Size,
        "`4MiB`",
        r#""16MiB""#,
        "Step in which a dump releases memory, 2MiB to 4GiB. It is written in pieces of at most 4 MiB, which together \
         fit into half of `budget_slack`.",
    ),
    crash(
        Guest,
        "threads",
        AtTakeOver,
        Integer { min: 1, max: 64 },
        "the host's processors, at most 4",
        "2",
        "Number of compression threads, which run at the lowest priority.",
    ),
    crash(
        Guest,
        "headroom",
        AtTakeOver,
        SizeOrPercent,
        "`0%`",
        r#""10%""#,
        "Host memory beyond the budget that a recovery may use while a dump is written: a size, or percent of the RAM.",
    ),
    crash(
        Guest,
        "disk_time",
        AtTakeOver,
        Choice(DISK_TIMES),
        "`recovery-first`",
        r#""balanced""#,
        "Priority when dump and guest use the same disk. On different disks neither waits.",
    ),
    crash(
        Guest,
        "mib_per_second",
        AtTakeOver,
        Integer { min: 1, max: 1_000_000 },
        "no limit",
        "70",
        "Maximum write rate of a dump, in MiB/s.",
    ),
    crash(
        Guest,
        "loop_count",
        AtTakeOver,
        Integer { min: 2, max: 1000 },
        "5",
        "5",
        "Number of crashes within the window that make a crash loop. The machine then waits before it starts its next \
         guest.",
    ),
    crash(
        Guest,
        "loop_window_s",
        AtTakeOver,
        Integer { min: 1, max: 86_400 },
        "60",
        "300",
        "Length of the window, in seconds of guest uptime.",
    ),
    crash(
        Guest,
        "loop_delay_s",
        AtTakeOver,
        Integer { min: 1, max: 86_400 },
        "10",
        "30",
        "First wait in a crash loop, in seconds. It doubles with each further crash.",
    ),
    crash(
        Guest,
        "loop_delay_max_s",
        AtTakeOver,
        Integer { min: 1, max: 86_400 },
        "300",
        "3600",
        "Longest wait in a crash loop, in seconds.",
    ),
    field(
        Guest,
        Section::Watchdog,
        "action",
        WithNextGuest,
        Choice(WATCHDOG_ACTIONS),
        "`crash`",
        r#""crash""#,
        "What to do when the guest stops feeding the watchdog. `crash` follows `on_panic`. `nmi` makes a prepared \
         guest panic by itself. `reset` reboots without a dump.",
    ),
    rejuvenate(
        Guest,
        "every",
        AtTakeOver,
        Time,
        "never",
        r#""30d""#,
        "Maximum age of a QEMU: a number with `s`, `m`, `h` or `d`.",
    ),
    rejuvenate(
        Guest,
        "rss_growth_mib",
        AtTakeOver,
        Integer { min: 1, max: 1_000_000 },
        "no limit",
        "256",
        "Maximum growth of QEMU's own memory since its start, in MiB, without the guest's RAM.",
    ),
    rejuvenate(
        Guest,
        "window",
        AtTakeOver,
        Text,
        "any time, at most once an hour",
        r#""02:00-05:00""#,
        "Daily time range for automatic rejuvenations, in the host's local time; at most one per day. It may span \
         midnight.",
    ),
    field(
        Guest,
        Section::Remount,
        "limit",
        AtTakeOver,
        SizeOrPercent,
        "`5%`",
        r#""64MiB""#,
        "Host memory for these blocks, beyond the RAM and its slack: a size, or percent of the RAM; at least 64KiB.",
    ),
    field(
        Guest,
        Section::Remount,
        "ready_after",
        AtTakeOver,
        Time,
        "`2m`",
        r#""30s""#,
        "Time after reset when the machine counts as ready at the latest: a number with `s`, `m`, `h` or `d`.",
    ),
    field(
        Guest,
        Section::Remount,
        "persist",
        AtTakeOver,
        Boolean,
        "`false`",
        "true",
        "Whether to save these blocks when the machine stops, and load them at its next start if no image has changed.",
    ),
    field(
        Host,
        Section::Remount,
        "persist_file",
        AtTakeOver,
        Path,
        "`/var/lib/hearth/NAME/boot-set`",
        r#""/srv/web.boot-set""#,
        "File for the saved blocks; only with `persist`. Default without root: `$XDG_STATE_HOME/hearth/NAME/boot-set`.",
    ),
    field(
        Guest,
        Section::Remount,
        "join_writes",
        AtTakeOver,
        Boolean,
        "`true`",
        "false",
        "Whether to merge waiting writes during boot across gaps whose content is in memory. This helps disks that \
         limit operations.",
    ),
    field(
        Host,
        Section::ObjectStore,
        "credentials",
        AtTakeOver,
        Path,
        "the keeper's environment",
        r#""/etc/hearth/s3.env""#,
        "File with one setting per line, named as in AWS tools: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, \
         `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL` for a store of another provider, `AWS_ALLOW_HTTP=true` \
         for one without TLS. For Google and Azure see lazy-restore.md.",
    ),
    field(
        Host,
        Section::ObjectStore,
        "folder",
        AtTakeOver,
        Path,
        "`/var/cache/hearth/objects`",
        r#""/srv/cache/hearth""#,
        "Cache folder for store data, on a disk; several machines may share it. A save is staged there completely \
         before it is uploaded. Default without root: `$XDG_CACHE_HOME/hearth/objects`.",
    ),
    field(
        Host,
        Section::ObjectStore,
        "cache_size",
        AtTakeOver,
        Size,
        "`8GiB`",
        r#""50GiB""#,
        "Maximum size of the cache, at least 64MiB. The least recently used data is dropped first. A snapshot that \
         fits is fetched only once.",
    ),
    field(
        Guest,
        Section::Ready,
        "port",
        AtTakeOver,
        Integer { min: 1, max: 65_535 },
        "none",
        "8080",
        "Host TCP port forwarded into the guest (`forward` of a network). The guest is ready once it sends anything \
         there: a greeting, or an answer to `GET / HTTP/1.0`.",
    ),
    field(
        Guest,
        Section::Ready,
        "unit",
        AtTakeOver,
        Text,
        "none",
        r#""web.service""#,
        "Unit of the guest's systemd. The guest is ready once it is active: the keeper asks the guest agent once a \
         second (`guest-exec` of `systemctl is-active`). Only with `guest_agent = true`.",
    ),
    disk(
        Guest,
        "name",
        WithNextStart,
        Text,
        "`disk0`, `disk1`, ...",
        r#""root""#,
        "Name of the disk in commands and metrics.",
    ),
    disk(
        Replaced,
        "path",
        WithNextStart,
        Path,
        "",
        r#""root.img""#,
        "Disk image: a file or a block device. Hearth locks it while in use.",
    ),
    disk(Replaced, "format", WithNextStart, Choice(DISK_FORMATS), "`raw`", r#""raw""#, "Format of the image."),
    disk(
        Guest,
        "read_only",
        WithNextStart,
        Boolean,
        "`false`",
        "false",
        "Whether to refuse writes. Other readers may then open the image too.",
    ),
    disk(
        Guest,
        "serial",
        WithNextStart,
        Text,
        "the disk's name",
        r#""root""#,
        "Serial number shown to the guest: at most 20 printable characters.",
    ),
    disk(
        Guest,
        "queues",
        WithNextStart,
        Integer { min: 1, max: 16 },
        "1",
        "1",
        "Number of virtqueues. More than one rarely helps, because one thread serves all.",
    ),
    disk(
        Guest,
        "mib_per_second",
        AtTakeOver,
        Integer { min: 1, max: 1_000_000 },
        "no limit",
        "125",
        "Maximum rate of reads and writes of the image, in MiB/s.",
    ),
    disk(
        Guest,
        "iops",
        AtTakeOver,
        Integer { min: 1, max: 100_000_000 },
        "no limit",
        "3000",
        "Maximum requests to the image per second.",
    ),
    disk(
        Guest,
        "direct",
        AtTakeOver,
        Boolean,
        "`true`",
        "true",
        "Whether to bypass the host's page cache (`O_DIRECT`), if the file system supports it.",
    ),
    field(
        Guest,
        Section::Nvram,
        "name",
        WithNextStart,
        Text,
        "`nvram0`, `nvram1`, ...",
        r#""journal""#,
        "Name of the device in commands.",
    ),
    field(
        Guest,
        Section::Nvram,
        "size",
        WithNextStart,
        Size,
        "",
        r#""64MiB""#,
        "Size of the device: a multiple of 4 KiB, or of 2 MiB with `pmem`. All of this host memory, beyond RAM and \
         slack, is allocated at start.",
    ),
    field(
        Guest,
        Section::Nvram,
        "device",
        WithNextStart,
        Choice(NVRAM_DEVICES),
        "`disk`",
        r#""pmem""#,
        "Device type: a `disk`, or `pmem` in the guest's address space (virtio-pmem, `/dev/pmem0`). A guest with \
         `pmem` cannot be rejuvenated.",
    ),
    field(
        Guest,
        Section::Nvram,
        "mirror",
        WithNextStart,
        Choice(MIRRORS),
        "`none`",
        r#""sync""#,
        "How the content is mirrored. `none`: it is lost with the host's memory. `async`: it is written to \
         `mirror_file` within about a second. `sync`: a guest flush returns once everything before it is durable in \
         `mirror_file`. `pmem` supports `none` and `sync`.",
    ),
    field(
        Host,
        Section::Nvram,
        "mirror_file",
        WithNextStart,
        Path,
        "none",
        r#""/srv/web-journal""#,
        "Mirror file on a real disk, created if missing. Required with `async` and `sync`.",
    ),
    field(
        Guest,
        Section::Nvram,
        "serial",
        WithNextStart,
        Text,
        "the device's name",
        r#""journal""#,
        "Serial number of a `disk` shown to the guest: at most 20 printable characters.",
    ),
    field(
        Guest,
        Section::Net,
        "kind",
        WithNextGuest,
        Choice(NET_KINDS),
        "`user`",
        r#""user""#,
        "Network type. `user`: built into QEMU, needs no privileges. `passt`: faster, needs no privileges. `tap`: an \
         interface of the host.",
    ),
    field(
        Host,
        Section::Net,
        "forward",
        WithNextGuest,
        TextList,
        "none",
        r#"["127.0.0.1:8080:80", "127.0.0.1:5353:53/udp"]"#,
        "Host ports forwarded into the guest: `HOSTIP:PORT:GUESTPORT` (`[::1]:PORT:GUESTPORT`), or `PORT:GUESTPORT` on \
         127.0.0.1, with `/udp` for UDP. Only with `user` and `passt`.",
    ),
    field(
        Guest,
        Section::Net,
        "isolated",
        WithNextGuest,
        Boolean,
        "`false`",
        "true",
        "Whether to block all traffic except `forward`. Only with `user`.",
    ),
    field(
        Host,
        Section::Net,
        "ifname",
        WithNextGuest,
        Text,
        "none",
        r#""tap0""#,
        "Name of an existing tap interface. Required with `tap`, and only used there.",
    ),
    field(
        Guest,
        Section::Net,
        "mac",
        WithNextGuest,
        Text,
        "derived from the machine's name",
        r#""52:54:00:12:34:56""#,
        "MAC address of the device.",
    ),
];

impl Field {
    pub fn of_section(section: Section) -> impl Iterator<Item = &'static Self> {
        FIELDS.iter().filter(move |field| field.section == section)
    }

    /// What the field takes, in words.
    pub fn takes(&self) -> String {
        match self.kind {
            Text => "string".to_owned(),
            Path => "path".to_owned(),
            Size => "size".to_owned(),
            SizeOrPercent => "size or percent".to_owned(),
            Time => "time".to_owned(),
            Integer { min, max } => format!("integer, {min} to {max}"),
            Boolean => "`true` or `false`".to_owned(),
            Choice(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
            TextList => "list of strings".to_owned(),
        }
    }
}
