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
            Self::Machine => "The machine itself. These stand at the top of the file, before any heading.",
            Self::Boot => "How the guest starts: a kernel, or firmware that finds one on the first disk.",
            Self::Crash => "What becomes of a guest that crashed, and of its memory: see crash-recovery.md.",
            Self::Watchdog => "With this heading the guest has a watchdog device (Intel 6300ESB) to feed.",
            Self::Rejuvenate => {
                "With this heading the keeper replaces QEMU by itself when `every` or `rss_growth_mib` says so: see \
                 rejuvenation.md."
            }
            Self::Remount => {
                "With this heading the blocks that the machine reads from its disks until it is ready are held in memory for \
                 its next boot: see fast-remount.md. Not with `ember = \"off\"`."
            }
            Self::Ready => {
                "What tells that a boot is over, beside `hearth ready`: one of these. It may be written as \
                 `ready = { port = 8080 }` too."
            }
            Self::ObjectStore => {
                "Snapshots whose address begins with `s3://`, `gs://`, `az://` or `https://`: how they are reached, and what of them is \
                 kept on this host. No part of a snapshot. See lazy-restore.md."
            }
            Self::Nvram => {
                "One disk that is host memory, for journals and logs; repeat the heading for each. The guest sees them behind \
                 its disks, in this order, and `pmem` behind these: see fast-remount.md."
            }
            Self::Disk => {
                "One virtual disk; repeat the heading for each. The guest sees them in this order. A machine has places for 16 \
                 disks and NVRAM devices."
            }
            Self::Net => "One network device; repeat the heading for each, of 7 at most.",
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

#[expect(clippy::too_many_arguments, reason = "a row of the table has as many columns")]
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
        "Name of the machine in every command: 1 to 32 letters, digits, `-`, `_` or `.`, beginning with a letter or digit.",
    ),
    machine(
        Guest,
        "memory",
        WithNextGuest,
        Size,
        "",
        r#""2GiB""#,
        "RAM of the guest, a multiple of 2 MiB, from 32MiB to 16TiB.",
    ),
    machine(Guest, "cpus", WithNextGuest, Integer { min: 1, max: 255 }, "1", "2", "Virtual processors."),
    machine(
        Guest,
        "cpu_model",
        WithNextGuest,
        Text,
        "`host` under KVM, `max,-erms,-fsrm,-cx16` under TCG",
        r#""Skylake-Server,-hle,-rtm""#,
        "QEMU's CPU model, with features.",
    ),
    machine(
        Guest,
        "accelerator",
        WithNextGuest,
        Choice(ACCELERATORS),
        "`auto`",
        r#""auto""#,
        "`auto` tries KVM and takes it if it really works, else TCG; `hearth status` says which and why.",
    ),
    machine(
        HostUnless(is_plain),
        "machine_type",
        WithNextGuest,
        Text,
        "the newest of the QEMU that first starts the machine, and kept from then on",
        r#""pc-q35-7.2""#,
        "QEMU's machine type: what devices the guest finds. It must be a q35, with a version.",
    ),
    machine(
        Host,
        "qemu",
        AtTakeOver,
        Path,
        "`qemu-system-x86_64` on PATH",
        r#""/usr/bin/qemu-system-x86_64""#,
        "The QEMU program, 7.2 or later.",
    ),
    machine(
        HostUnless(is_own_user),
        "qemu_user",
        WithNextGuest,
        Text,
        "the keeper's own user",
        r#""nobody""#,
        "User that QEMU becomes once its files are open. Needs a keeper that runs as root. Recommended is `\"auto\"`: a user for \
         this machine alone, a number from 2013265920 on that needs no entry in /etc/passwd.",
    ),
    machine(
        Host,
        "runtime_folder",
        WithNextStart,
        Path,
        "`/run/hearth/NAME`",
        r#""/run/hearth/web""#,
        "Sockets, logs and journal: small. Without root: `$XDG_RUNTIME_DIR/hearth/NAME`.",
    ),
    machine(
        Host,
        "memory_folder",
        WithNextStart,
        Path,
        "`/dev/shm/hearth/NAME`",
        r#""/dev/shm/hearth/web""#,
        "Folder for the guest's RAM, which is kept in files. If the folder does not have the machine's name, a folder of that name is \
         made in it, because no two machines share one. It must be on a tmpfs or a DAX file system with room for the \
         memory and the slack. Without root the default is `/dev/shm/hearth-UID/NAME`.",
    ),
    machine(
        Guest,
        "ember",
        WithNextGuest,
        Choice(ON_OFF),
        "`on`",
        r#""on""#,
        "Whether a dead incarnation's memory is kept as a source of disk blocks. `off`: every reboot is cold.",
    ),
    machine(
        Guest,
        "on_panic",
        AtTakeOver,
        Choice(ON_PANIC),
        "`dump+recover`; `recover` if the dump folder cannot be used",
        r#""dump+recover""#,
        "When the guest crashes (its kernel panics, its watchdog barks): `dump+recover` starts the next incarnation at \
         once and writes the dump beside it, `dump` writes it and leaves the guest paused, `recover` dumps nothing, \
         `pause` leaves the guest to be looked at.",
    ),
    machine(
        Guest,
        "budget_slack",
        AtTakeOver,
        SizeOrPercent,
        "`3%`",
        r#""3%""#,
        "Host memory the machine's files may hold beyond its RAM: a size, or percent of the RAM (0 to 100).",
    ),
    machine(
        Guest,
        "admission",
        AtTakeOver,
        Choice(ADMISSION),
        "`dump`",
        r#""always""#,
        "When the guest gets its memory by page faults, so that dead and living memory together never exceed the \
         budget. `dump`: while a dump holds dead memory. `always`: also while only an ember is there, which is trimmed \
         as the guest grows; a guest that outruns that is otherwise only seen and reported.",
    ),
    machine(
        HostUnless(is_true),
        "sandbox",
        WithNextGuest,
        Boolean,
        "`true`",
        "true",
        "Run QEMU in its seccomp sandbox, where the binary has one.",
    ),
    machine(
        Guest,
        "guest_agent",
        WithNextGuest,
        Boolean,
        "`false`",
        "true",
        "A channel to the guest's own agent (qemu-guest-agent, which must run in the guest), by which `hearth save --freeze` \
         has file systems frozen (see lazy-restore.md) and `remount.ready` asks for a unit. A device more; a guest has it from its next boot on.",
    ),
    machine(
        Host,
        "extra_qemu_args",
        WithNextGuest,
        TextList,
        "none",
        r#"["-device", "virtio-balloon-pci"]"#,
        "Appended to QEMU's command line as they are. Hearth does not look at them, but for the word `vmgenid`, beside which it adds no such device: they can break what it promises.",
    ),
    field(
        Host,
        Section::Boot,
        "kernel",
        WithNextGuest,
        Path,
        "none",
        r#""vmlinuz""#,
        "Linux kernel to start directly. Either this or `firmware`.",
    ),
    field(
        Host,
        Section::Boot,
        "initrd",
        WithNextGuest,
        Path,
        "none",
        r#""initrd.img""#,
        "Initial RAM disk; with `kernel` only.",
    ),
    field(
        Guest,
        Section::Boot,
        "cmdline",
        WithNextGuest,
        Text,
        "empty",
        r#""root=/dev/vda console=ttyS0""#,
        "Kernel command line; with `kernel` only.",
    ),
    field(
        HostUnless(is_own_firmware),
        Section::Boot,
        "firmware",
        WithNextGuest,
        Path,
        "`bios`, if there is no `kernel`",
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
        "Variable store of UEFI firmware: the machine's own copy, it is written to. Must be given with `uefi`.",
    ),
    crash(
        Host,
        "dump_folder",
        AtTakeOver,
        Path,
        "`/var/lib/hearth/NAME/dumps`",
        r#""/srv/dumps/web""#,
        "Where dumps go: on a real disk, not in host memory. Made when it is needed. Without root: \
         `$XDG_STATE_HOME/hearth/NAME/dumps`.",
    ),
    crash(
        Guest,
        "level",
        AtTakeOver,
        Integer { min: 0, max: 31 },
        "31",
        "17",
        "What a dump leaves out, as makedumpfile counts it: the sum of 1 zero pages, 2 cache, 4 private cache, 8 user data, \
         16 free pages.",
    ),
    crash(
        Guest,
        "format",
        AtTakeOver,
        Choice(DUMP_FORMATS),
        "`kdump`",
        r#""kdump""#,
        "Compressed, or an ELF file as plain as memory.",
    ),
    crash(
        Guest,
        "compression",
        AtTakeOver,
        Choice(COMPRESSIONS),
        "`zstd`",
        r#""lzo""#,
        "Of `kdump` files. Debian's makedumpfile reads `lzo` and `zlib` only; crash 8 and drgn read all.",
    ),
    crash(
        Guest,
        "keep_last",
        AtTakeOver,
        Integer { min: 1, max: 1000 },
        "5",
        "5",
        "Complete dumps kept; older ones go when one more is complete.",
    ),
    crash(
        Guest,
        "min_free",
        AtTakeOver,
        Size,
        "`1GiB`",
        r#""10GiB""#,
        "A dump that would leave less than this free stops, and says so.",
    ),
    crash(
        Guest,
        "chunk",
        AtTakeOver,
        Size,
        "`4MiB`",
        r#""16MiB""#,
        "Memory comes free in steps of this: 2MiB to 4GiB. It is written in pieces of at most 4 MiB, \
         which all fit into half of `budget_slack`.",
    ),
    crash(
        Guest,
        "threads",
        AtTakeOver,
        Integer { min: 1, max: 64 },
        "as many as the host has processors, at most 4",
        "2",
        "Threads that compress, at the lowest priority.",
    ),
    crash(
        Guest,
        "headroom",
        AtTakeOver,
        SizeOrPercent,
        "`0%`",
        r#""10%""#,
        "Host memory that a recovery may use beyond the budget while a dump is written: a size, or percent of the RAM.",
    ),
    crash(
        Guest,
        "disk_time",
        AtTakeOver,
        Choice(DISK_TIMES),
        "`recovery-first`",
        r#""balanced""#,
        "Who waits when dump and guest need the same disk. On different disks nobody does.",
    ),
    crash(
        Guest,
        "mib_per_second",
        AtTakeOver,
        Integer { min: 1, max: 1_000_000 },
        "no limit",
        "70",
        "Limit of the dump's writing.",
    ),
    crash(
        Guest,
        "loop_count",
        AtTakeOver,
        Integer { min: 2, max: 1000 },
        "5",
        "5",
        "So many crashes within the window are a crash loop: the machine waits before it starts its next guest.",
    ),
    crash(
        Guest,
        "loop_window_s",
        AtTakeOver,
        Integer { min: 1, max: 86_400 },
        "60",
        "300",
        "The window, in seconds that guests lived.",
    ),
    crash(
        Guest,
        "loop_delay_s",
        AtTakeOver,
        Integer { min: 1, max: 86_400 },
        "10",
        "30",
        "How long the machine waits in a crash loop, in seconds: the first time so long, then twice as long each time.",
    ),
    crash(
        Guest,
        "loop_delay_max_s",
        AtTakeOver,
        Integer { min: 1, max: 86_400 },
        "300",
        "3600",
        "The longest it waits, in seconds.",
    ),
    field(
        Guest,
        Section::Watchdog,
        "action",
        WithNextGuest,
        Choice(WATCHDOG_ACTIONS),
        "`crash`",
        r#""crash""#,
        "When the guest stops feeding it: `crash` does what `on_panic` says, `nmi` makes a guest that is set up for it panic \
         by itself, `reset` reboots without a dump.",
    ),
    rejuvenate(
        Guest,
        "every",
        AtTakeOver,
        Time,
        "never",
        r#""30d""#,
        "How old QEMU may become: a number with `s`, `m`, `h` or `d`.",
    ),
    rejuvenate(
        Guest,
        "rss_growth_mib",
        AtTakeOver,
        Integer { min: 1, max: 1_000_000 },
        "no limit",
        "256",
        "By how much QEMU's own memory, without the guest's RAM, may grow over what it was at its start.",
    ),
    rejuvenate(
        Guest,
        "window",
        AtTakeOver,
        Text,
        "any time, at most once an hour",
        r#""02:00-05:00""#,
        "When it may happen: from and to, by the host's local time; at most once each day. It may go over midnight.",
    ),
    field(
        Guest,
        Section::Remount,
        "limit",
        AtTakeOver,
        SizeOrPercent,
        "`5%`",
        r#""64MiB""#,
        "Host memory for these blocks, on top of the RAM and its slack: a size, or percent of the RAM; at least 64KiB.",
    ),
    field(
        Guest,
        Section::Remount,
        "ready_after",
        AtTakeOver,
        Time,
        "`2m`",
        r#""30s""#,
        "The machine is taken to be ready so long after its reset, if nobody has said `hearth ready` before: a number with \
         `s`, `m`, `h` or `d`.",
    ),
    field(
        Guest,
        Section::Remount,
        "persist",
        AtTakeOver,
        Boolean,
        "`false`",
        "true",
        "Save what is held when the machine is stopped, and begin with it at its next start, if no image was changed in between.",
    ),
    field(
        Host,
        Section::Remount,
        "persist_file",
        AtTakeOver,
        Path,
        "`/var/lib/hearth/NAME/boot-set`",
        r#""/srv/web.boot-set""#,
        "Where it is saved; with `persist` only. Without root: `$XDG_STATE_HOME/hearth/NAME/boot-set`.",
    ),
    field(
        Guest,
        Section::Remount,
        "join_writes",
        AtTakeOver,
        Boolean,
        "`true`",
        "false",
        "Until the machine is ready, writes that wait at the same time are one operation over a gap between them that memory \
         holds: for disks with a limit on operations.",
    ),
    field(
        Host,
        Section::ObjectStore,
        "credentials",
        AtTakeOver,
        Path,
        "the keeper's environment",
        r#""/etc/hearth/s3.env""#,
        "A file with one setting a line, as the tools of AWS name them: `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, \
         `AWS_SESSION_TOKEN`, `AWS_REGION`, `AWS_ENDPOINT_URL` for a store of another house, `AWS_ALLOW_HTTP=true` for one without \
         TLS. Google's and Azure's stand in lazy-restore.md.",
    ),
    field(
        Host,
        Section::ObjectStore,
        "folder",
        AtTakeOver,
        Path,
        "`/var/cache/hearth/objects`",
        r#""/srv/cache/hearth""#,
        "What came out of a store is kept there, for all machines with the same folder; and a save on its way up lies there \
         whole. On a disk. Without root: `$XDG_CACHE_HOME/hearth/objects`.",
    ),
    field(
        Host,
        Section::ObjectStore,
        "cache_size",
        AtTakeOver,
        Size,
        "`8GiB`",
        r#""50GiB""#,
        "How much of what came is kept, 64MiB at least; what was not used for longest goes first. A snapshot that fits in is \
         fetched once.",
    ),
    field(
        Guest,
        Section::Ready,
        "port",
        AtTakeOver,
        Integer { min: 1, max: 65_535 },
        "none",
        "8080",
        "A TCP port of the host that leads into the guest (`forward` of a net). Ready is when the guest says something there: \
         a greeting, or an answer to `GET / HTTP/1.0`.",
    ),
    field(
        Guest,
        Section::Ready,
        "unit",
        AtTakeOver,
        Text,
        "none",
        r#""web.service""#,
        "A unit of the guest's systemd. Ready is when it is active, which the guest's agent is asked once a second (`guest-exec` of \
         `systemctl is-active`). With `guest_agent = true` only.",
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
        "The image: a file or a block device. It is locked while it is served.",
    ),
    disk(Replaced, "format", WithNextStart, Choice(DISK_FORMATS), "`raw`", r#""raw""#, "Format of the image."),
    disk(
        Guest,
        "read_only",
        WithNextStart,
        Boolean,
        "`false`",
        "false",
        "Refuse writes; other readers may open the image too.",
    ),
    disk(
        Guest,
        "serial",
        WithNextStart,
        Text,
        "the disk's name",
        r#""root""#,
        "Serial number the guest sees: at most 20 printable characters.",
    ),
    disk(
        Guest,
        "queues",
        WithNextStart,
        Integer { min: 1, max: 16 },
        "1",
        "1",
        "Virtqueues. More than one rarely helps: one thread serves all.",
    ),
    disk(
        Guest,
        "mib_per_second",
        AtTakeOver,
        Integer { min: 1, max: 1_000_000 },
        "no limit",
        "125",
        "Limit of bytes read from and written to the image.",
    ),
    disk(
        Guest,
        "iops",
        AtTakeOver,
        Integer { min: 1, max: 100_000_000 },
        "no limit",
        "3000",
        "Limit of requests to the image.",
    ),
    disk(
        Guest,
        "direct",
        AtTakeOver,
        Boolean,
        "`true`",
        "true",
        "Go around the host's page cache (`O_DIRECT`) where the file system can; with `false` the host may cache too.",
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
        "Host memory for it, on top of all else: a multiple of 4 KiB, of 2 MiB with `pmem`. All of it is taken at the start.",
    ),
    field(
        Guest,
        Section::Nvram,
        "device",
        WithNextStart,
        Choice(NVRAM_DEVICES),
        "`disk`",
        r#""pmem""#,
        "How the guest has it: as a `disk`, or in its address space (`pmem`: virtio-pmem, `/dev/pmem0`). QEMU cannot be replaced \
         under a guest with `pmem`.",
    ),
    field(
        Guest,
        Section::Nvram,
        "mirror",
        WithNextStart,
        Choice(MIRRORS),
        "`none`",
        r#""sync""#,
        "`none`: what it holds ends with the host's memory. `async`: it is written to `mirror_file` within a second or so. \
         `sync`: a flush of the guest returns when all before it is durable there. With `pmem` `none` or `sync`.",
    ),
    field(
        Host,
        Section::Nvram,
        "mirror_file",
        WithNextStart,
        Path,
        "none",
        r#""/srv/web-journal""#,
        "The mirror: a file on a real disk, made if it is not there. Must be given with `async` and `sync`.",
    ),
    field(
        Guest,
        Section::Nvram,
        "serial",
        WithNextStart,
        Text,
        "the device's name",
        r#""journal""#,
        "Serial number the guest sees of a `disk`: at most 20 printable characters.",
    ),
    field(
        Guest,
        Section::Net,
        "kind",
        WithNextGuest,
        Choice(NET_KINDS),
        "`user`",
        r#""user""#,
        "`user`: QEMU's own, no rights needed. `passt`: faster, no rights needed. `tap`: an interface of the host.",
    ),
    field(
        Host,
        Section::Net,
        "forward",
        WithNextGuest,
        TextList,
        "none",
        r#"["127.0.0.1:8080:80", "127.0.0.1:5353:53/udp"]"#,
        "Ports of the host that lead into the guest: `HOSTIP:PORT:GUESTPORT` (`[::1]:PORT:GUESTPORT`), or `PORT:GUESTPORT` on \
         127.0.0.1, with `/udp` for UDP; `user` and `passt` only.",
    ),
    field(
        Guest,
        Section::Net,
        "isolated",
        WithNextGuest,
        Boolean,
        "`false`",
        "true",
        "The guest reaches nobody, and nobody it but through `forward`. `user` only.",
    ),
    field(
        Host,
        Section::Net,
        "ifname",
        WithNextGuest,
        Text,
        "none",
        r#""tap0""#,
        "The tap interface, which must exist. With `tap` only, and must be given there.",
    ),
    field(
        Guest,
        Section::Net,
        "mac",
        WithNextGuest,
        Text,
        "derived from the machine's name",
        r#""52:54:00:12:34:56""#,
        "Hardware address of the device.",
    ),
];

impl Field {
    pub fn of_section(section: Section) -> impl Iterator<Item = &'static Self> {
        FIELDS.iter().filter(move |field| field.section == section)
    }

    /// What the field takes, in words.
    pub fn takes(&self) -> String {
        match self.kind {
            Text => "text".to_owned(),
            Path => "path".to_owned(),
            Size => "size".to_owned(),
            SizeOrPercent => "size or percent".to_owned(),
            Time => "time".to_owned(),
            Integer { min, max } => format!("integer, {min} to {max}"),
            Boolean => "`true` or `false`".to_owned(),
            Choice(words) => words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", "),
            TextList => "list of texts".to_owned(),
        }
    }
}
